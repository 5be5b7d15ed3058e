"""Decoding of grouped queries over a paged cache in a CUDA graph, which is replayed for each token.

The graph appends the new keys, rotated, and values to the cache, and attends. Between replays the caller
writes new tokens and lengths into the arrays that were captured. The results of the last token are compared
with attention over all tokens at once, which needs no cache.

Run it on a machine with a Hopper GPU: python examples/paged_decoding.py
"""

import sys
from collections.abc import Callable
from typing import Any

import torch

import rawmla

HEADS, KV_HEADS, D, PAGE = 32, 8, 128, 16
PROMPTS = [1500, 7, 333, 64]  # tokens of each request
STEPS = 20
TOLERANCE = 0.01  # largest difference of a row of results, as a part of its norm


def main() -> None:
    try:
        rawmla.warmup("kvcache", "mha", kvcache_head_dims=[(D, D)], mha_head_dims=[(D, D)])
    except rawmla.RawMLAError as error:
        sys.exit(str(error))

    torch.manual_seed(0)
    requests, longest = len(PROMPTS), max(PROMPTS) + STEPS
    pages = -(-longest // PAGE)  # of each request
    table = torch.randperm(requests * pages, device="cuda").to(torch.int32).view(requests, pages)
    k_cache, v_cache = (bf16(requests * pages, PAGE, KV_HEADS, D) for _ in range(2))
    angles = torch.arange(longest, device="cuda")[:, None] * 0.01 ** (
        torch.arange(D // 2, device="cuda") / 64
    )
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    lengths = torch.tensor(PROMPTS, dtype=torch.int32, device="cuda")
    q, k, v = bf16(requests, 1, HEADS, D), bf16(requests, 1, KV_HEADS, D), bf16(requests, 1, KV_HEADS, D)

    def step() -> tuple[torch.Tensor, ...]:
        return rawmla.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, rotary_cos=cos, rotary_sin=sin, cache_seqlens=lengths,
            block_table=table, causal=True,
        )  # fmt: skip

    graph, (out, _) = capture(step, None)
    for _ in range(STEPS):
        for x in (q, k, v):
            x.copy_(bf16(*x.shape))
        graph.replay()
        lengths += 1

    largest = 0.0
    for request, prompt in enumerate(PROMPTS):
        rows = [x[table[request].long()].flatten(0, 1)[: prompt + STEPS] for x in (k_cache, v_cache)]
        last = rotated(q[request], cos[prompt + STEPS - 1], sin[prompt + STEPS - 1])
        want, _ = rawmla.flash_attn_func(last[None], rows[0][None], rows[1][None])
        difference = (out[request].float() - want[0].float()).norm(dim=-1) / want[0].float().norm(dim=-1)
        largest = max(largest, float(difference.max()))
    if not largest <= TOLERANCE:
        sys.exit(f"paged_decoding: a row differs by {largest:.4f} of its norm, more than {TOLERANCE}")
    print(
        f"paged_decoding: {STEPS} replays for {requests} requests, every row within {largest:.4f} of its norm"
    )


def capture(step: Callable[[], tuple[torch.Tensor, ...]], pool: Any) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """Capture a step in a CUDA graph; returns the graph and the arrays that a replay fills."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        outs = step()
    return graph, outs


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs of neighbouring columns."""
    a, b = x[..., ::2].float(), x[..., 1::2].float()
    pairs = torch.stack([a * cos.float() - b * sin.float(), a * sin.float() + b * cos.float()], dim=-1)
    return pairs.flatten(-2).to(x.dtype)


def bf16(*shape: int) -> torch.Tensor:
    """Random numbers on the GPU."""
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


if __name__ == "__main__":
    main()
