"""Dense decoding with torch: one step of a model with several layers.

Block table and lengths are the same in every layer, and so is the plan of how the work is spread over the
GPU: the first call fills it on the device, the other layers use it again.

Run it on a machine with a Hopper GPU: python examples/decode_torch.py
"""

import sys

import torch

import rawmla

LAYERS, HEADS, D_QK, D_V, PAGE = 4, 16, 576, 512, 64
LENGTHS = [1000, 77, 1, 0]  # tokens in the cache of each request

# The GPU rounds softmax's numerators to bf16, and both results are rounded to bf16, at most one step apart.
RTOL, ATOL = 1e-2, 2e-4
LSE_TOL = 1e-4


def main() -> None:
    try:
        rawmla.warmup()  # compiles the kernels, or loads them from the cache
    except rawmla.RawMLAError as error:
        sys.exit(str(error))

    torch.manual_seed(0)
    requests = len(LENGTHS)
    pages = -(-max(LENGTHS) // PAGE)  # of each request
    num_blocks = requests * pages
    block_table = torch.randperm(num_blocks, device="cuda").to(torch.int32).view(requests, pages)
    cache_seqlens = torch.tensor(LENGTHS, dtype=torch.int32, device="cuda")
    caches = [bf16(num_blocks, PAGE, 1, D_QK) * 0.1 for _ in range(LAYERS)]
    queries = [bf16(requests, 1, HEADS, D_QK) for _ in range(LAYERS)]

    plan, _ = rawmla.get_mla_metadata()  # of one step: take a new one when the lengths have changed
    results = []
    for q, k_cache in zip(queries, caches, strict=True):
        results.append(
            rawmla.flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, D_V, plan, causal=True)
        )

    plan, _ = rawmla.reference.get_mla_metadata()
    batch = (block_table.cpu(), cache_seqlens.cpu())
    for (out, lse), q, k_cache in zip(results, queries, caches, strict=True):
        want_out, want_lse = rawmla.reference.flash_mla_with_kvcache(
            q.cpu(), k_cache.cpu(), *batch, D_V, plan, causal=True
        )
        torch.testing.assert_close(out.cpu(), want_out, rtol=RTOL, atol=ATOL)
        torch.testing.assert_close(lse.cpu(), want_lse, rtol=LSE_TOL, atol=LSE_TOL)
    print(f"decode_torch: {LAYERS} layers, {requests} requests of {LENGTHS} tokens agree with the reference")


def bf16(*shape: int) -> torch.Tensor:
    """Random numbers on the GPU."""
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


if __name__ == "__main__":
    main()
