"""The mean error of attention and its gradients against float64, beside a computation that rounds P and dS to
the inputs' dtype once, as matrix instructions require, and is exact to float32 otherwise. PyTorch's eager
attention rounds at least as often.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

import rawmla

torch = pytest.importorskip("torch")

BOUND = 1.05
"""How many times its error ours may be."""
DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
Case = tuple[tuple[int, int], str, str]
"""Head dimensions, a dtype, and "dense" or "flex"."""
CASES: list[Case] = [*itertools.product(DIMS, ("bfloat16", "float16"), ("dense", "flex"))]


def assert_as_exact(device: str, case: Case, tokens: int, seeds: int) -> None:
    """Compare out, dq, dk and dv of causal attention, over all seeds together."""
    dims, dtype, function = case
    ours, rounded = ([0.0] * 4 for _ in range(2))
    for seed in range(seeds):
        generator = torch.Generator(device).manual_seed(seed)

        q, k, v, dout = (
            torch.randn(1, 2, tokens, d, generator=generator, device=device).to(getattr(torch, dtype))
            for d in (dims[0], *dims, dims[1])
        )
        exact = attention(*(x.double() for x in (q, k, v, dout)), None)
        wanted = attention(*(x.float() for x in (q, k, v, dout)), q.dtype)
        for i, (got, want, one) in enumerate(
            zip(_attention_of(function, q, k, v, dout), wanted, exact, strict=True)
        ):
            assert got.isfinite().all()
            ours[i] += float((got.double() - one).abs().mean())
            rounded[i] += float((want.to(q.dtype).double() - one).abs().mean())
    for name, error, bound in zip(("out", "dq", "dk", "dv"), ours, rounded, strict=True):
        assert error <= BOUND * bound, f"{name}: {error / bound:.3f} times the error of rounding once"


def attention(q: Any, k: Any, v: Any, dout: Any, dtype: Any) -> tuple[Any, Any, Any, Any]:
    """out, dq, dk and dv of causal attention; P, dS and out are rounded to `dtype`, None: not."""

    def rounded(x: Any) -> Any:
        return x if dtype is None else x.to(dtype).to(x.dtype)

    n, scale = q.shape[-2], q.shape[-1] ** -0.5
    hidden = torch.ones(n, n, dtype=torch.bool, device=q.device).triu_(1)
    p = (q @ k.mT * scale).masked_fill_(hidden, -torch.inf).softmax(-1)
    out = rounded(rounded(p) @ v)
    ds = rounded(p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)))
    return out, ds @ k * scale, ds.mT @ q * scale, rounded(p).mT @ dout


def _attention_of(function: str, q: Any, k: Any, v: Any, dout: Any) -> tuple[Any, ...]:
    if function == "flex":
        out, lse = rawmla.flex_attention(q, k, v, _causal, return_lse=True)
        return out, *rawmla.flex_attention_backward(dout, q, k, v, out, lse, _causal)[:3]
    q, k, v, dout = (x.transpose(1, 2) for x in (q, k, v, dout))
    out, lse = rawmla.flash_attn_func(q, k, v, causal=True)
    gradients = rawmla.flash_attn_backward(dout, q, k, v, out, lse, causal=True)[:3]
    return tuple(x.transpose(1, 2) for x in (out, *gradients))


def _causal(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return torch.where(q_idx >= kv_idx, score, -float("inf"))
