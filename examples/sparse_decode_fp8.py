"""Sparse decoding from an FP8 cache, in the layout of DeepSeek-V3.2 ("v32").

A prompt's cache is quantised as a whole, the newest token of each request is written after it, and the token
attends 256 positions of its request, itself among them, that an indexer would have chosen.

Run it on a machine with a Hopper GPU: python examples/sparse_decode_fp8.py
"""

import sys

import torch

import rawmla

HEADS, D_QK, D_V, PAGE, TOPK = 128, 576, 512, 64, 256
LENGTHS = [1500, 300, 40]  # tokens in the cache of each request before the step

# The GPU rounds keys and softmax's numerators to bf16, and both results are rounded to bf16, at most one step
# apart.
RTOL, ATOL = 1e-2, 3e-4
LSE_TOL = 1e-3


def main() -> None:
    try:
        rawmla.warmup(sparse_formats=["v32"])
    except rawmla.RawMLAError as error:
        sys.exit(str(error))

    torch.manual_seed(0)
    requests = len(LENGTHS)
    pages = -(-(max(LENGTHS) + 1) // PAGE)  # of each request
    prompt = bf16(requests * pages, PAGE, 1, D_QK) * 0.1
    block_table = torch.randperm(requests * pages, device="cuda").to(torch.int32).view(requests, pages)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32, device="cuda")

    # The cache: 656 bytes a token instead of 1,152.
    cache = rawmla.quantize_k_cache(prompt, "v32")

    # The new tokens, at position `length` of each request: 512 columns to quantise, 64 of RoPE.
    kv_c, k_pe = bf16(requests, 512) * 0.1, bf16(requests, 64) * 0.1
    new_slots = rawmla.convert_indices(lengths[:, None], block_table, PAGE)[:, 0].contiguous()
    rawmla.write_kv_cache(kv_c, k_pe, cache, new_slots)

    # What each token attends: positions within its request, -1 where there are fewer than TOPK.
    chosen = torch.full((requests, 1, TOPK), -1, dtype=torch.int32)
    for request, length in enumerate(LENGTHS):
        some = torch.randperm(length)[: TOPK - 1].to(torch.int32)
        chosen[request, 0, : len(some)] = some
        chosen[request, 0, len(some)] = length
    slots = rawmla.convert_indices(chosen.cuda(), block_table, PAGE)

    q = bf16(requests, 1, HEADS, D_QK)
    plan, _ = rawmla.get_mla_metadata()
    out, lse = rawmla.flash_mla_with_kvcache(
        q, cache, None, None, D_V, plan, is_fp8_kvcache=True, indices=slots
    )

    # The same steps on the CPU: the same bytes and slots, and a result within the tolerance.
    want_cache = rawmla.reference.quantize_k_cache(prompt.cpu(), "v32")
    rawmla.reference.write_kv_cache(kv_c.cpu(), k_pe.cpu(), want_cache, new_slots.cpu())
    assert torch.equal(cache.cpu(), want_cache)
    assert torch.equal(slots.cpu(), rawmla.reference.convert_indices(chosen, block_table.cpu(), PAGE))
    want_out, want_lse = rawmla.reference.flash_mla_with_kvcache(
        q.cpu(), want_cache, None, None, D_V, is_fp8_kvcache=True, indices=slots.cpu()
    )
    torch.testing.assert_close(out.cpu(), want_out, rtol=RTOL, atol=ATOL)
    torch.testing.assert_close(lse.cpu(), want_lse, rtol=LSE_TOL, atol=LSE_TOL)
    print(f"sparse_decode_fp8: {requests} requests over {TOPK} tokens each agree with the reference")


def bf16(*shape: int) -> torch.Tensor:
    """Random numbers on the GPU."""
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


if __name__ == "__main__":
    main()
