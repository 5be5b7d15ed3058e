#!/usr/bin/env python3
"""Errors of out against float64 beside other libraries': the table "Accuracy" of docs/support.md.

    python scripts/accuracy.py

It needs a Hopper GPU, torch, and sglang-kernel 0.4.5, which has FlashAttention-3 and FlashMLA. For every
operation and standard deviation of the scores it prints the root-mean-square error, divided by the other
library's on the same inputs.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import rawmla  # noqa: E402

DEVIATIONS = (0.5, 1, 2, 5)
Ready = tuple[Callable[[float], Any], Callable[[float], Any], Callable[[float], Any]]
"""Functions of softmax_scale: out of rawmla, of the other library, and in float64. The last two dimensions
are heads and columns.
"""


def normal(*shape: int) -> Any:
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")


def integers(*shape: int, least: int = 0, below: int = 1) -> Any:
    return torch.randint(least, below, shape, dtype=torch.int32, device="cuda")


def exact(q: Any, k: Any, v: Any, scale: float) -> Any:
    """Attention in float64 of q `[b, rows, d]` over k and v `[b, keys, d]`."""
    return (q.double() @ k.double().mT * scale).softmax(-1) @ v.double()


def by_head(x: Any, group: int = 1) -> Any:
    """`[b, s, h, d]` as `[b * h * group, s, d]`."""
    return x.transpose(1, 2).repeat_interleave(group, 1).flatten(0, 1)


def dense(d: int) -> Ready:
    """One request of 4,096 tokens and 2 heads."""
    from sgl_kernel.flash_attn import flash_attn_varlen_func

    q, k, v = (normal(1, 4096, 2, d) for _ in range(3))
    starts = torch.tensor([0, 4096], dtype=torch.int32, device="cuda")
    return (
        lambda scale: rawmla.flash_attn_func(q, k, v, softmax_scale=scale)[0],
        lambda scale: flash_attn_varlen_func(
            q[0], k[0], v[0], starts, starts, 4096, 4096, softmax_scale=scale
        ).view(q.shape),
        lambda scale: exact(*map(by_head, (q, k, v)), scale).view(1, 2, 4096, d).transpose(1, 2),
    )


def caches(tokens: int) -> Ready:
    """One token of 32 requests, 32 query heads and 8 of keys, pages of 16."""
    from sgl_kernel.flash_attn import flash_attn_with_kvcache

    b, group, d, pages = 32, 4, 128, tokens // 16
    q, k, v = normal(b, 1, 8 * group, d), *(normal(b * pages, 16, 8, d) for _ in range(2))
    table = torch.arange(b * pages, dtype=torch.int32, device="cuda").view(b, pages)
    lengths = torch.full((b,), tokens, dtype=torch.int32, device="cuda")
    given = {"cache_seqlens": lengths, "causal": True}

    def float64(scale: float) -> Any:
        keys, values = (by_head(x.view(b, tokens, 8, d)) for x in (k, v))
        return exact(q.view(b * 8, group, d), keys, values, scale).view(q.shape)

    return (
        lambda scale: rawmla.flash_attn_with_kvcache(
            q, k, v, block_table=table, softmax_scale=scale, **given
        )[0],
        lambda scale: flash_attn_with_kvcache(q, k, v, page_table=table, softmax_scale=scale, **given),
        float64,
    )


def decoding(heads: int) -> Ready:
    """Dense MLA: one token of 16 requests over 4,096 keys."""
    from sgl_kernel import flash_mla

    b, tokens = 16, 4096
    q, cache = normal(b, 1, heads, 576), normal(b * tokens // 64, 64, 1, 576)
    table = torch.arange(b * tokens // 64, dtype=torch.int32, device="cuda").view(b, -1)
    lengths = torch.full((b,), tokens, dtype=torch.int32, device="cuda")

    def out(library: Any, scale: float) -> Any:
        plan = library.get_mla_metadata(lengths, heads, 1)
        return library.flash_mla_with_kvcache(q, cache, table, lengths, 512, *plan, softmax_scale=scale)[0]

    keys = cache.view(b, tokens, 576)
    return (
        lambda scale: out(rawmla, scale),
        lambda scale: out(flash_mla, scale),
        lambda scale: exact(q[:, 0], keys, keys[..., :512], scale)[:, None],
    )


def sparse_prefill(heads: int) -> Ready:
    """64 query tokens that select 2,048 of 8,192 keys each."""
    from sgl_kernel import flash_mla

    q, kv, indices = normal(64, heads, 576), normal(8192, 1, 576), integers(64, 1, 2048, below=8192)
    keys = kv[indices[:, 0].long(), 0]
    return (
        lambda scale: rawmla.flash_mla_sparse_fwd(q, kv, indices, scale)[0],
        lambda scale: flash_mla.flash_mla_sparse_fwd(q, kv, indices, scale)[0],
        lambda scale: exact(q, keys, keys[..., :512], scale),
    )


def sparse_decoding(heads: int) -> Ready:
    """16 requests that select 2,048 of 4,096 keys each, in an FP8 cache of V3.2."""
    from sgl_kernel import flash_mla

    b, tokens = 16, 4096
    q = normal(b, 1, heads, 576)
    cache = rawmla.quantize_k_cache(normal(b * tokens // 64, 64, 1, 576), "v32")
    keys = rawmla.dequantize_k_cache(cache, "v32").view(-1, 576)
    first = torch.arange(b, dtype=torch.int32, device="cuda")[:, None, None] * tokens
    indices = first + integers(b, 1, 2048, below=tokens)
    chosen = keys[indices[:, 0].long()]
    table = torch.arange(b * tokens // 64, dtype=torch.int32, device="cuda").view(b, -1)
    lengths = torch.full((b,), tokens, dtype=torch.int32, device="cuda")

    def out(library: Any, fp8: Any, scale: float) -> Any:
        plan = library.get_mla_metadata(lengths, heads, 1, heads, is_fp8_kvcache=True, topk=2048)
        return library.flash_mla_with_kvcache(
            q, fp8, table, lengths, 512, *plan, softmax_scale=scale, is_fp8_kvcache=True, indices=indices
        )[0]

    return (
        lambda scale: out(rawmla, cache, scale),
        lambda scale: out(flash_mla, cache.view(torch.float8_e4m3fn), scale),
        lambda scale: exact(q[:, 0], chosen, chosen[..., :512], scale)[:, None],
    )


ROWS: tuple[tuple[str, str, Callable[[int], Ready], tuple[int, ...], Callable[[int], int]], ...] = (
    ("dense attention, d {}, 4,096 keys", "FlashAttention-3", dense, (64, 128, 256), lambda d: d),
    ("attention over caches, d 128, {} keys", "FlashAttention-3", caches, (1024, 8192), lambda tokens: 128),
    ("dense MLA decoding, {} heads, 4,096 keys", "FlashMLA", decoding, (16, 64, 128), lambda heads: 576),
    ("sparse MLA prefill, {} heads, 2,048 keys", "FlashMLA", sparse_prefill, (64, 128), lambda heads: 576),
    ("sparse MLA decoding, FP8, {} heads", "FlashMLA", sparse_decoding, (64, 128), lambda heads: 576),
)
"""Operation, other library, what makes the functions, their sizes, and d_qk by size."""


def ratios(ready: Ready, d_qk: int) -> Iterator[float]:
    """The ratios of errors by deviation of the scores."""
    for deviation in DEVIATIONS:
        ours, others, float64 = (function(deviation * d_qk**-0.5).double() for function in ready)
        yield float((ours - float64).square().mean().sqrt() / (others - float64).square().mean().sqrt())


def main() -> int:
    """Print the rows of the table, one for each size."""
    for operation, library, make, sizes, d_qk in ROWS:
        for size in sizes:
            torch.manual_seed(0)
            found = " | ".join(f"{ratio:.3f}" for ratio in ratios(make(size), d_qk(size)))
            print(f"| {operation.format(f'{size:,}')} | {library} | {found} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
