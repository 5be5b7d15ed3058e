"""A decode step in a CUDA graph: captured once, replayed while requests grow.

The graph holds the plan, the attention and the merging of split requests. Between replays the caller writes
new queries and lengths into the arrays that were captured; the plan follows, as the graph computes it.

Run it on a machine with a Hopper GPU: python examples/cuda_graph.py
"""

import sys

import torch

import rawmla

HEADS, D_QK, D_V, PAGE, PAGES = 128, 576, 512, 64, 40
STEPS = [[2000, 5, 700], [2001, 6, 701], [64, 2560, 0]]  # lengths of the requests at each replay

# The GPU rounds softmax's numerators to bf16, and both results are rounded to bf16, at most one step apart.
RTOL, ATOL = 1e-2, 5e-4
LSE_TOL = 1e-4


def main() -> None:
    try:
        rawmla.warmup()  # nothing can be compiled or loaded while a graph is captured
    except rawmla.RawMLAError as error:
        sys.exit(str(error))

    torch.manual_seed(0)
    requests = len(STEPS[0])
    q = bf16(requests, 1, HEADS, D_QK)
    k_cache = bf16(requests * PAGES, PAGE, 1, D_QK) * 0.1
    block_table = torch.randperm(requests * PAGES, device="cuda").to(torch.int32).view(requests, PAGES)
    cache_seqlens = torch.zeros(requests, dtype=torch.int32, device="cuda")

    plan, _ = rawmla.get_mla_metadata()  # empty, so the captured call computes it
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = rawmla.flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, D_V, plan)

    for lengths in STEPS:
        q.copy_(bf16(*q.shape))
        cache_seqlens.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()

        eager_plan, _ = rawmla.get_mla_metadata()
        eager_out, eager_lse = rawmla.flash_mla_with_kvcache(
            q, k_cache, block_table, cache_seqlens, D_V, eager_plan
        )
        assert torch.equal(out, eager_out) and torch.equal(lse, eager_lse)  # the same bits

        want_out, want_lse = rawmla.reference.flash_mla_with_kvcache(
            q.cpu(), k_cache.cpu(), block_table.cpu(), cache_seqlens.cpu(), D_V
        )
        torch.testing.assert_close(out.cpu(), want_out, rtol=RTOL, atol=ATOL)
        torch.testing.assert_close(lse.cpu(), want_lse, rtol=LSE_TOL, atol=LSE_TOL)
    print(f"cuda_graph: {len(STEPS)} replays equal eager calls and agree with the reference")


def bf16(*shape: int) -> torch.Tensor:
    """Random numbers on the GPU."""
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


if __name__ == "__main__":
    main()
