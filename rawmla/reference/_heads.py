"""Attention of one request over keys in arrays, forward and backward, in float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..call.checks import as_softmax_scale
from ._arrays import Array, Floats, read


class Rules(NamedTuple):
    """Computation of the scores of a call from q and k.

    Attributes:
        scale: factor on the products.
        left, right: how many keys before and after its own position a query sees; None: all.
        softcap: scores become `softcap * tanh(score / softcap)`; 0: they stay.
        chunk: tokens of a chunk; a query sees only the keys of its own chunk. 0: no chunks.
    """

    scale: float
    left: int | None
    right: int | None
    softcap: float = 0.0
    chunk: int = 0

    @classmethod
    def of(
        cls,
        d_qk: int,
        softmax_scale: float | None,
        causal: bool,
        window_size: Sequence[int | None],
        softcap: float,
        chunk: int = 0,
        dropout_p: float = 0.0,
    ) -> Rules:
        """The rules of a call of dense attention."""
        if dropout_p != 0:
            raise ValueError(f"dropout_p: expected 0, got {dropout_p}")
        if any(bound is not None and bound < -1 for bound in window_size):
            raise ValueError(f"window_size: expected None, -1 or at least 0, got {window_size}")
        if not 0 <= softcap < inf:
            raise ValueError(f"softcap: expected a finite number of at least 0, got {softcap}")
        if chunk < 0:
            raise ValueError(f"attention_chunk: expected at least 0, got {chunk}")
        scale = d_qk**-0.5 if softmax_scale is None else as_softmax_scale(softmax_scale)
        left, right = (None if bound == -1 else bound for bound in window_size)
        return cls(scale, left, 0 if causal else right, softcap, chunk)


def visible_keys(s_q: int, s_kv: int, first: int, rules: Rules) -> NDArray[np.bool_]:
    """Return which keys each query sees, `[s_q, s_kv]`. Query 0 is at position `first` of the keys."""
    t, j = first + np.arange(s_q)[:, None], np.arange(s_kv)
    visible = np.ones((s_q, s_kv), bool)
    if rules.left is not None:
        visible &= t - j <= rules.left
    if rules.right is not None:
        visible &= j - t <= rules.right
    if rules.chunk:
        start = t // rules.chunk * rules.chunk  # rounds down, also where t is negative
        visible &= (start <= j) & (j < start + rules.chunk)
    return visible


def sinks_of(sink: Array | None, h_q: int) -> Floats:
    """Return sinks as numbers, -inf for heads without."""
    return np.full(h_q, -np.inf) if sink is None else sink.floats


def slopes_of(alibi_slopes: Any, b: int, h_q: int) -> Floats:
    """Return slopes of ALiBi `[b, h_q]` for an argument of that shape, of shape `[h_q]`, or None: 0."""
    slopes = np.zeros((b, h_q))
    if alibi_slopes is not None:
        given = read(alibi_slopes, "alibi_slopes", ("float32",))
        if given.shape not in ((h_q,), slopes.shape):
            raise ValueError(
                f"alibi_slopes: expected shape [{h_q}] or {list(slopes.shape)}, got {list(given.shape)}"
            )
        slopes[:] = given.floats
    return slopes


class _Scores(NamedTuple):
    """Scores of one head: of the queries that see a key at all, for the keys that a query sees at all.

    Attributes:
        rows, keys: indices of these queries of the head, and of these keys of its KV head.
        visible: their mask, `[rows, keys]`.
        values: their scores, -inf where masked.
        slope: derivative of the scores by `scale * q·k`.
    """

    rows: tuple[NDArray[np.int64], int]
    keys: tuple[NDArray[np.int64], int]
    visible: NDArray[np.bool_]
    values: Floats
    slope: Floats


def _scores(q: Floats, k: Floats, first: int, rules: Rules, slopes: Floats) -> Iterator[_Scores]:
    """Compute the scores of each head; there are none where no query sees a key."""
    visible = visible_keys(len(q), len(k), first, rules)
    rows, keys = np.flatnonzero(visible.any(1)), np.flatnonzero(visible.any(0))
    if not len(rows):
        return
    visible = visible[rows][:, keys]
    distances = np.abs(first + rows[:, None] - keys)
    h_q, h_kv = q.shape[1], k.shape[1]
    for h in range(h_q):
        of_q, of_k = (rows, h), (keys, h // (h_q // h_kv))
        with np.errstate(invalid="ignore"):  # masked pairs may be anything
            scores = rules.scale * (q[of_q] @ k[of_k].T)
            slope = np.ones_like(scores)
            if rules.softcap:
                ratio = np.tanh(scores / rules.softcap)
                scores, slope = rules.softcap * ratio, 1 - ratio**2
        scores = scores - slopes[h] * distances
        yield _Scores(of_q, of_k, visible, np.where(visible, scores, -np.inf), slope)


def attend(
    q: Floats, k: Floats, v: Floats, first: int, rules: Rules, slopes: Floats, sinks: Floats
) -> tuple[Floats, Floats]:
    """Attention of one request.

    Args:
        q, k, v: `[s_q, h_q, d_qk]`, `[s_kv, h_kv, d_qk]`, `[s_kv, h_kv, d_v]`.
        first: position of query 0 among the keys.
        rules: how scores are made and which keys a query sees.
        slopes: `[h_q]`, of ALiBi: subtracted from a score as often as query and key are apart.
        sinks: `[h_q]`, logarithms of one more term of the denominator.

    Returns:
        out `[s_q, h_q, d_v]` and lse `[s_q, h_q]`; 0 and -inf where a query sees no key.
    """
    out, lse = np.zeros((*q.shape[:2], v.shape[2])), np.full(q.shape[:2], -np.inf)
    for scores in _scores(q, k, first, rules, slopes):
        rows, keys = scores.rows, scores.keys
        top = scores.values.max(1)
        lse[rows] = top + np.log(np.exp(scores.values - top[:, None]).sum(1))
        p = np.exp(scores.values - np.logaddexp(lse[rows], sinks[rows[1]])[:, None])
        out[rows] = weighted_sum(p, scores.visible, v[keys])
    return out, lse


def attend_backward(
    dout: Floats,
    out: Floats,
    lse: Floats,
    dlse: Floats,
    q: Floats,
    k: Floats,
    v: Floats,
    first: int,
    rules: Rules,
    slopes: Floats,
    sinks: Floats,
) -> list[Floats]:
    """Gradients of q, k, v and sinks of `attend`, from its results and their gradients."""
    dq, dk, dv, dsinks = grads = [np.zeros_like(x) for x in (q, k, v, sinks)]
    for scores in _scores(q, k, first, rules, slopes):
        rows, keys, visible = scores.rows, scores.keys, scores.visible
        h = rows[1]
        p = np.exp(scores.values - np.logaddexp(lse[rows], sinks[h])[:, None])
        dots = (dout[rows] * out[rows]).sum(1)
        without_sink = np.exp(scores.values - lse[rows][:, None])
        with np.errstate(invalid="ignore"):
            # The second term is the part of dlse, whose derivative is the probability without the sink. In
            # DELTA it is p * c * dlse: the same number unless the sink is +inf, where p is 0 and c is
            # infinite.
            ds = p * (dout[rows] @ v[keys].T - dots[:, None]) + without_sink * dlse[rows][:, None]
            ds = np.where(visible, ds * scores.slope, 0)
        dq[rows] = rules.scale * weighted_sum(ds, visible, k[keys])
        dk[keys] += rules.scale * weighted_sum(ds.T, visible.T, q[rows])
        dv[keys] += weighted_sum(p.T, visible.T, dout[rows])
        with np.errstate(over="ignore", invalid="ignore"):
            share = 1 / (1 + np.exp(lse[rows] - sinks[h]))  # exp(sink - logaddexp(lse, sink))
        dsinks[h] = -(share * dots).sum()
    return grads


def weighted_sum(weights: Floats, visible: NDArray[np.bool_], terms: Floats) -> Floats:
    """`weights @ terms` of the visible pairs alone: 0 times the infinity of a masked term is nothing."""
    finite = np.isfinite(terms)
    total = weights @ np.where(finite, terms, 0)
    for j in np.flatnonzero(~finite.all(1)):
        seen = visible[:, j]
        with np.errstate(invalid="ignore"):
            total[seen] += weights[seen, j, None] * np.where(finite[j], 0, terms[j])
    return total
