"""Attention of some rows by its definition in float64: what timed results are checked against."""

from collections.abc import Callable
from typing import Any

import torch

Score = Callable[[Any], Any]
"""Changes scores `[h, n, m]` of n queries and m keys."""


def _products(q: Any, k: Any) -> Any:
    """Scaled products of `[n, h_q, d]` and `[m, h_kv, d]`."""
    k = k.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return torch.einsum("nhd,mhd->hnm", q.double(), k) * q.shape[-1] ** -0.5


def attend(
    q: Any, k: Any, v: Any, seen: Any, score: Score | None = None, sink: Any = None
) -> tuple[Any, Any, Any]:
    """Return out `[n, h_q, d_v]`, and lse and the largest score `[h_q, n]`.

    `seen` `[n, m]`: which keys a query attends. `sink` `[h_q]`: a further score without a value.
    """
    scores = _products(q, k)
    if score is not None:
        scores = score(scores)
    scores = scores.masked_fill(~seen, float("-inf"))
    lse = scores.logsumexp(-1)
    total = lse if sink is None else torch.logaddexp(lse, sink.double()[:, None])
    v = v.double().repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    out = torch.einsum("hnm,mhd->nhd", (scores - total[..., None]).exp(), v)
    return out, lse, scores.amax(-1)


def backpropagate(
    q: Any,
    k: Any,
    v: Any,
    seen: Any,
    given: tuple[Any, Any, Any],
    score: Score | None = None,
    sink: Any = None,
    captured: Any = None,
) -> tuple[Any, Any, Any, Any]:
    """Return what these queries and keys add to dq, dk, dv and to the gradient of `captured`.

    `given`: out and its gradient `[n, h_q, d_v]`, and lse `[h_q, n]`.
    """
    out, dout, lse = (one.double() for one in given)
    heads = k.shape[1]
    products = _products(q, k).requires_grad_()
    with torch.enable_grad():
        scores = products if score is None else score(products)
    total = lse if sink is None else torch.logaddexp(lse, sink.double()[:, None])
    p = torch.where(seen, (scores.detach() - total[..., None]).exp(), 0.0)
    wide = v.double().repeat_interleave(q.shape[1] // heads, dim=1)
    by_p = torch.einsum("nhd,mhd->hnm", dout, wide) - (dout * out).sum(-1).T[..., None]
    wanted = [products] if captured is None else [products, captured]
    by_product, *by_captured = torch.autograd.grad(scores, wanted, p * by_p)
    by_product = by_product * q.shape[-1] ** -0.5
    wide = k.double().repeat_interleave(q.shape[1] // heads, dim=1)
    dq = torch.einsum("hnm,mhd->nhd", by_product, wide)
    dk, dv = (
        torch.einsum("hnm,nhd->mhd", one, rows.double()).unflatten(1, (heads, -1)).sum(2)
        for one, rows in ((by_product, q), (p, dout))
    )
    return dq, dk, dv, by_captured[0] if by_captured else None
