"""Prefill of requests of very different lengths: one call of rawmla, or a call of torch's SDPA for each.

The tokens of all requests follow one another in one array, as a server has them, and nothing is padded.
Keys and values are slices of one projection with K and V beside each other; they are not copied.

Run it on a machine with a Hopper GPU: python examples/varlen_prefill.py
"""

import sys
import time
from collections.abc import Callable

import torch

import rawmla

HEADS, D = 16, 128
LENGTHS = [8000, 100, 1, 3000, 517, 64, 0, 5000, 250, 1200, 33, 2048]  # tokens of each request
CALLS, REPEATS = 10, 5  # the fastest of REPEATS times of CALLS calls
TOLERANCE = 1e-2  # of the norm of a row of results: both round softmax's numerators and results to bf16


def by_rawmla(q: torch.Tensor, kv: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """One call; `starts` is on the GPU, and the host does not look at it."""
    longest = max(LENGTHS)
    out, _ = rawmla.flash_attn_varlen_func(
        q, kv[:, 0], kv[:, 1], starts, starts, longest, longest, causal=True
    )
    return out


def by_torch(q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """A call for each request; the host knows the lengths."""
    outs = []
    for own_q, own_kv in zip(q.split(LENGTHS), kv.split(LENGTHS), strict=True):
        heads_first = [x.transpose(0, 1)[None] for x in (own_q, own_kv[:, 0], own_kv[:, 1])]
        out = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True)
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)


def seconds(call: Callable[[], torch.Tensor]) -> float:
    """The time of a call, the host's part included where the GPU waits for it."""
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / CALLS)
    return min(times)


def main() -> None:
    try:
        rawmla.warmup("mha", mha_head_dims=[(D, D)])
    except rawmla.RawMLAError as error:
        sys.exit(str(error))

    torch.manual_seed(0)
    tokens = sum(LENGTHS)
    q, kv = bf16(tokens, HEADS, D), bf16(tokens, 2, HEADS, D)
    starts = torch.tensor([0, *LENGTHS], device="cuda").cumsum(0).to(torch.int32)

    got, want = by_rawmla(q, kv, starts), by_torch(q, kv).float()
    packed, _ = rawmla.flash_attn_varlen_kvpacked_func(
        q, kv, starts, starts, max(LENGTHS), max(LENGTHS), causal=True
    )
    assert torch.equal(packed, got)  # the same, with K and V as the projection gives them
    difference = ((got.float() - want).norm(dim=-1) / want.norm(dim=-1)).max()
    if not difference <= TOLERANCE:  # nor NaN
        sys.exit(f"varlen_prefill: a row differs from torch's by {difference:.4f} of its norm")

    first = 0
    for length in LENGTHS:  # the short ones against the definition too, on the CPU
        if length < 300:
            own = slice(first, first + length)
            own_q, own_k, own_v = (x[own][None].cpu() for x in (q, kv[:, 0], kv[:, 1]))
            defined, _ = rawmla.reference.flash_attn_func(own_q, own_k, own_v, causal=True)
            torch.testing.assert_close(got[own].cpu(), defined[0], rtol=TOLERANCE, atol=TOLERANCE)
        first += length

    flops = sum(2 * HEADS * length**2 * (D + D) / 2 for length in LENGTHS)  # half of a square: causal
    print(f"{len(LENGTHS)} requests of {min(LENGTHS)} to {max(LENGTHS)} tokens, {HEADS} heads of {D}")
    print(f"{'':28} ms/batch  TFLOP/s")
    ways = {
        "rawmla, one call": lambda: by_rawmla(q, kv, starts),
        "torch SDPA, one per request": lambda: by_torch(q, kv),
    }
    for name, call in ways.items():
        elapsed = seconds(call)
        print(f"{name:28}{1e3 * elapsed:9.3f}{flops / elapsed / 1e12:9.1f}")
    print(f"varlen_prefill: every row within {difference:.4f} of its norm of torch's result")


def bf16(*shape: int) -> torch.Tensor:
    """Random numbers on the GPU."""
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


if __name__ == "__main__":
    main()
