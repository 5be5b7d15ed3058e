"""Dense multi-head attention, forward and backward, written as it is defined."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from ..call.checks import as_bool, as_count, as_int, as_softmax_scale, show
from ._arrays import (
    FLOAT_DTYPES,
    Array,
    check_dtype,
    check_target,
    check_vector,
    is_tensor,
    like,
    read,
    store,
)

_FUNCTION = TypeVar("_FUNCTION", bound=Callable[..., Any])
_DTYPES = ("bfloat16", "float16", "float32")
_LENGTHS = {
    "cu_seqlens_qo": "cu_seqlens_q",
    "cu_seqlens_kv": "cu_seqlens_k",
    "max_seqlen_qo": "max_seqlen_q",
    "max_seqlen_kv": "max_seqlen_k",
}
_SINK = {"learnable_sink": "attn_sink"}


class Rules(NamedTuple):
    """How all scores of a call are made of q and k.

    Attributes:
        scale: factor on the products.
        left, right: how many keys before and after its own position a query sees; None: all.
        softcap: scores become `softcap * tanh(score / softcap)`; 0: they stay.
        chunk: a query sees only the keys of its own chunk of so many positions; 0: of all.
    """

    scale: float
    left: int | None
    right: int | None
    softcap: float = 0.0
    chunk: int = 0


def visible_keys(s_q: int, s_kv: int, first: int, rules: Rules) -> NDArray[np.bool_]:
    """Which keys each query sees, `[s_q, s_kv]`. Query 0 is at position `first` of the keys."""
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


class _Scores(NamedTuple):
    """Scores of the queries that see a key at all, for the keys that a query sees at all.

    Attributes:
        rows, keys: the indices of these queries and keys. Of the others nothing is ever read.
        visible: the mask of those.
        values: their scores, -inf where masked.
        slope: derivative of the scores by `scale * q·k`.
    """

    rows: NDArray[np.int64]
    keys: NDArray[np.int64]
    visible: NDArray[np.bool_]
    values: NDArray[np.float64]
    slope: NDArray[np.float64]

    @classmethod
    def of(
        cls, q: NDArray[np.float64], k: NDArray[np.float64], first: int, rules: Rules, alibi: float
    ) -> _Scores:
        visible = visible_keys(len(q), len(k), first, rules)
        rows, keys = np.flatnonzero(visible.any(1)), np.flatnonzero(visible.any(0))
        visible = visible[rows][:, keys]
        with np.errstate(invalid="ignore"):  # masked pairs may be anything
            scores = rules.scale * (q[rows] @ k[keys].T)
            slope = np.ones_like(scores)
            if rules.softcap:
                ratio = np.tanh(scores / rules.softcap)
                scores, slope = rules.softcap * ratio, 1 - ratio**2
        scores = scores - alibi * np.abs(first + rows[:, None] - keys)
        return cls(rows, keys, visible, np.where(visible, scores, -np.inf), slope)


def attend(
    q: NDArray[np.float64],
    k: NDArray[np.float64],
    v: NDArray[np.float64],
    first: int,
    rules: Rules,
    alibi: float = 0.0,
    sink: float | None = None,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Attention of one head of one request.

    Args:
        q, k, v: `[s_q, d_qk]`, `[s_kv, d_qk]`, `[s_kv, d_v]`.
        first: position of query 0 among the keys.
        rules: how scores are made and which keys a query sees.
        alibi: subtracted from a score as often as query and key are apart.
        sink: logarithm of one more term of the denominator.

    Returns:
        out `[s_q, d_v]` and lse `[s_q]`; 0 and -inf where a query sees no key.
    """
    out, lse = np.zeros((len(q), v.shape[1])), np.full(len(q), -np.inf)
    scores = _Scores.of(q, k, first, rules, alibi)
    if len(scores.rows):
        top = scores.values.max(1)
        log_sum = top + np.log(np.exp(scores.values - top[:, None]).sum(1))
        p = np.exp(scores.values - _with_sink(log_sum, sink)[:, None])
        out[scores.rows], lse[scores.rows] = _sum(p, scores.visible, v[scores.keys]), log_sum
    return out, lse


class _Gradients(NamedTuple):
    q: NDArray[np.float64]
    k: NDArray[np.float64]
    v: NDArray[np.float64]
    sink: float


def _attend_backward(
    dout: NDArray[np.float64],
    q: NDArray[np.float64],
    k: NDArray[np.float64],
    v: NDArray[np.float64],
    out: NDArray[np.float64],
    lse: NDArray[np.float64],
    dlse: NDArray[np.float64],
    first: int,
    rules: Rules,
    alibi: float,
    sink: float | None,
) -> _Gradients:
    """Gradients of `attend`, from its results and their gradients."""
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    scores = _Scores.of(q, k, first, rules, alibi)
    rows, keys = scores.rows, scores.keys
    if not len(rows):
        return _Gradients(dq, dk, dv, 0.0)
    dout, out, lse, dlse = dout[rows], out[rows], lse[rows], dlse[rows]
    p = np.exp(scores.values - _with_sink(lse, sink)[:, None])
    dots = (dout * out).sum(1)
    with np.errstate(invalid="ignore"):
        # The second term is that of dlse: dlse / ds is the probability without the sink. In DELTA it is
        # p * c * dlse, which is the same number but for a sink of +inf, where p is 0 and c is infinite.
        ds = p * (dout @ v[keys].T - dots[:, None]) + np.exp(scores.values - lse[:, None]) * dlse[:, None]
        ds = np.where(scores.visible, ds * scores.slope, 0)
    dq[rows] = rules.scale * _sum(ds, scores.visible, k[keys])
    dk[keys] = rules.scale * _sum(ds.T, scores.visible.T, q[rows])
    dv[keys] = _sum(p.T, scores.visible.T, dout)
    dsink = 0.0
    if sink is not None:
        with np.errstate(over="ignore"):
            share = 1 / (1 + np.exp(lse - sink))  # exp(sink - logaddexp(lse, sink))
        dsink = -float((share * dots).sum())
    return _Gradients(dq, dk, dv, dsink)


def _sum(
    weights: NDArray[np.float64], visible: NDArray[np.bool_], terms: NDArray[np.float64]
) -> NDArray[np.float64]:
    """`weights @ terms` of the visible pairs alone: 0 times the infinity of a masked term is nothing."""
    finite = np.isfinite(terms)
    total = weights @ np.where(finite, terms, 0)
    for j in np.flatnonzero(~finite.all(1)):
        seen = visible[:, j]
        with np.errstate(invalid="ignore"):
            total[seen] += weights[seen, j, None] * np.where(finite[j], 0, terms[j])
    return total


def _with_sink(lse: NDArray[np.float64], sink: float | None) -> NDArray[np.float64]:
    """Logarithm of the denominator."""
    return lse if sink is None else np.logaddexp(lse, sink)


def _named(**aliases: str) -> Callable[[_FUNCTION], _FUNCTION]:
    """Let a function take arguments by other keywords too: `other="name"`."""

    def decorate(function: _FUNCTION) -> _FUNCTION:
        @functools.wraps(function)
        def renamed(*args: Any, **kwargs: Any) -> Any:
            for alias, name in aliases.items():
                if alias in kwargs:
                    if name in kwargs:
                        raise TypeError(f"{alias}: expected one of {alias} and {name}, got both")
                    kwargs[name] = kwargs.pop(alias)
            return function(*args, **kwargs)

        return cast(_FUNCTION, renamed)

    return decorate


@_named(**_LENGTHS, **_SINK)
def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    deterministic: bool = False,
    is_varlen: bool = True,
    *,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    attn_sink: Any = None,
    alibi_slopes: Any = None,
    attention_chunk: int = 0,
    seqused_q: Any = None,
    seqused_k: Any = None,
    out: Any = None,
) -> tuple[Any, Any]:
    """Attention of requests that lie one after another in q, and in k and v.

    With `t = i + s_kv - s_q`, the position of query i among the keys of its request, a score is
    `softmax_scale * q·k`, then `softcap * tanh(score / softcap)` with a softcap, then less
    `slope * |t - j|` with ALiBi. Query head h reads KV head `h // (h_q // h_kv)`.

    Args:
        q: `[total_q, h_q, d_qk]`.
        k, v: `[total_k, h_kv, d_qk]`, `[total_k, h_kv, d_v]`; h_q is a multiple of h_kv.
        cu_seqlens_q, cu_seqlens_k: integers `[b + 1]` that do not decrease; request r has the rows from entry
            r to the one before entry r + 1. Also `cu_seqlens_qo`, `cu_seqlens_kv`.
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths; they do not change what is computed. Also
            `max_seqlen_qo`, `max_seqlen_kv`.
        dropout_p: must be 0.
        softmax_scale: `d_qk ** -0.5` when None.
        causal: queries see no key after their own position: the right bound is 0.
        deterministic, is_varlen: do not change what is computed.
        window_size: (left, right): query i sees the keys `t - left <= j <= t + right`. None or -1: no bound.
        softcap: 0: none.
        attn_sink: `[h_q]`: `exp(sink)` is one more term of a head's denominator; lse is without it. Also
            `learnable_sink`.
        alibi_slopes: `[h_q]` or `[b, h_q]`.
        attention_chunk: c > 0: query i sees only keys j with `j // c == t // c`, rounded down.
        seqused_q, seqused_k: integers `[b]`: only so many first rows of a request are its tokens. None: all.
        out: optional array of the shape of the result that receives the rows of all requests. A tensor is
            also what is returned.

    Returns:
        out: `[total_q, h_q, d_v]`; float64, or a tensor of q's dtype.
        lse: `[total_q, h_q]`, natural logarithm of the sum of `exp` of the visible scores, stored as
        `[h_q, total_q]`; float64, or a float32 tensor.
        Rows with nothing to attend, those past seqused_q too, have out 0 and lse -inf. Rows of no request
        have that too, but in a given `out`, where they are not written.

    Raises:
        TypeError: an argument of the wrong kind or dtype, or given under both names.
        ValueError: shapes that do not fit; dropout; a bound below -1; a negative softcap or chunk; lengths
            that decrease or leave the arrays.
    """
    _check_ignored(dropout_p, deterministic, is_varlen, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    return _varlen_forward(
        _Inputs.of(read(q, "q"), read(k, "k"), read(v, "v"), 3),
        (cu_seqlens_q, seqused_q, "q"),
        (cu_seqlens_k, seqused_k, "k"),
        (softmax_scale, causal, window_size, softcap, attention_chunk),
        attn_sink,
        alibi_slopes,
        out,
    )


@_named(**_SINK)
def flash_attn_varlen_qkvpacked_func(
    qkv: Any,
    cu_seqlens: Any,
    max_seqlen: int,
    head_dim_qk: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    deterministic: bool = False,
    is_varlen: bool = True,
    *,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    attn_sink: Any = None,
    alibi_slopes: Any = None,
    attention_chunk: int = 0,
    seqused_q: Any = None,
    seqused_k: Any = None,
    out: Any = None,
) -> tuple[Any, Any]:
    """`flash_attn_varlen_func` of one array of q, k and v.

    Args:
        qkv: `[total, h, 2 * d_qk + d_v]`, with `head_dim_qk`; or `[total, 3, h, d]`, without.
        cu_seqlens, max_seqlen: those of q and of k.
        head_dim_qk: d_qk of a qkv with three dimensions.

    Other arguments, results and errors are those of `flash_attn_varlen_func`.
    """
    _check_ignored(dropout_p, deterministic, is_varlen, max_seqlen=max_seqlen)
    packed = read(qkv, "qkv")
    d_qk = _packed_d_qk("qkv", packed, head_dim_qk, 2)
    if d_qk is None:
        q, k, v = (packed._replace(values=packed.values[:, i]) for i in range(3))
    else:
        parts = (slice(d_qk), slice(d_qk, 2 * d_qk), slice(2 * d_qk, None))
        q, k, v = (packed._replace(values=packed.values[..., part]) for part in parts)
    return _varlen_forward(
        _Inputs.of(q, k, v, 3),
        (cu_seqlens, seqused_q, ""),
        (cu_seqlens, seqused_k, ""),
        (softmax_scale, causal, window_size, softcap, attention_chunk),
        attn_sink,
        alibi_slopes,
        out,
    )


@_named(**_LENGTHS, **_SINK)
def flash_attn_varlen_kvpacked_func(
    q: Any,
    kv: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    head_dim_qk: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    deterministic: bool = False,
    is_varlen: bool = True,
    *,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    attn_sink: Any = None,
    alibi_slopes: Any = None,
    attention_chunk: int = 0,
    seqused_q: Any = None,
    seqused_k: Any = None,
    out: Any = None,
) -> tuple[Any, Any]:
    """`flash_attn_varlen_func` of one array of k and v.

    Args:
        kv: `[total_k, h_kv, d_qk + d_v]`, with `head_dim_qk`; or `[total_k, 2, h_kv, d]`, without.
        head_dim_qk: d_qk of a kv with three dimensions.

    Other arguments, results and errors are those of `flash_attn_varlen_func`.
    """
    _check_ignored(dropout_p, deterministic, is_varlen, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    packed = read(kv, "kv")
    d_qk = _packed_d_qk("kv", packed, head_dim_qk, 1)
    if d_qk is None:
        k, v = (packed._replace(values=packed.values[:, i]) for i in range(2))
    else:
        parts = (slice(d_qk), slice(d_qk, None))
        k, v = (packed._replace(values=packed.values[..., part]) for part in parts)
    return _varlen_forward(
        _Inputs.of(read(q, "q"), k, v, 3),
        (cu_seqlens_q, seqused_q, "q"),
        (cu_seqlens_k, seqused_k, "k"),
        (softmax_scale, causal, window_size, softcap, attention_chunk),
        attn_sink,
        alibi_slopes,
        out,
    )


@_named(**_SINK)
def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    *,
    attn_sink: Any = None,
    attention_chunk: int = 0,
    out: Any = None,
) -> tuple[Any, Any]:
    """`flash_attn_varlen_func` of requests of one length.

    Args:
        q: `[b, s_q, h_q, d_qk]`.
        k, v: `[b, s_kv, h_kv, d_qk]`, `[b, s_kv, h_kv, d_v]`.

    Other arguments and errors are those of `flash_attn_varlen_func`.

    Returns:
        out: `[b, s_q, h_q, d_v]`; float64, or a tensor of q's dtype.
        lse: `[b, h_q, s_q]`; float64, or a float32 tensor.
    """
    _check_ignored(dropout_p, deterministic)
    inputs = _Inputs.of(read(q, "q"), read(k, "k"), read(v, "v"), 4)
    rules = _rules(inputs.d_qk, softmax_scale, causal, window_size, softcap, attention_chunk)
    result, lse = _forward(inputs, inputs.whole(), rules, attn_sink, alibi_slopes)
    if out is not None:
        _check_same("out", out, inputs.q, (*inputs.q.shape[:-1], inputs.d_v))
        store(out, ..., result)
    result = out if is_tensor(out) else like(result, inputs.q.dtype, inputs.q)
    return result, like(np.ascontiguousarray(lse.swapaxes(1, 2)), "float32", inputs.q)


@_named(**_LENGTHS, **_SINK)
def flash_attn_varlen_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dq: Any = None,
    dk: Any = None,
    dv: Any = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    is_varlen: bool = True,
    *,
    dlse: Any = None,
    deterministic: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    attn_sink: Any = None,
    alibi_slopes: Any = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
) -> tuple[Any, ...]:
    """Gradients of `flash_attn_varlen_func`.

    Probabilities are computed again from q, k and the given lse: `p = exp(score - lse)`, with a sink
    `exp(score - logaddexp(lse, sink))`. The gradient of a score is `p * (dout·v - DELTA)`, where
    `DELTA = rowsum(dout * out) - c * dlse`; c is 1, with a sink `exp(logaddexp(lse, sink) - lse)`, so that
    `p * c` is `exp(score - lse)` whatever the sink. With a softcap it is times
    `1 - tanh(softmax_scale * q·k / softcap) ** 2`, then times softmax_scale on its way to q and k. dq sums it
    times k over the keys that a query sees; dk and dv sum it times q, and p times dout, over the queries that
    see a key, of all query heads of the KV head. The gradient of a sink is
    `-sum(exp(sink - logaddexp(lse, sink)) * (dout·out))` over the rows of its head that see a key.

    The operation is that of FlashAttention (github.com/Dao-AILab/flash-attention; Dao et al., 2022,
    arxiv.org/abs/2205.14135, appendix B), and FlashMLA's (github.com/deepseek-ai/FlashMLA) on other GPUs.

    Args:
        dout: `[total_q, h_q, d_v]`, gradient of out.
        out, lse: what the forward function returned for the other arguments; lse with heads or tokens first
            in memory. Nothing is read of rows that have nothing to attend or are of no request.
        dq, dk, dv: optional arrays of the shapes of q, k, v that are overwritten. A tensor is also what is
            returned.
        dlse: `[total_q, h_q]`, gradient of lse; None: 0.

    Other arguments and errors are those of `flash_attn_varlen_func`.

    Returns:
        dq, dk, dv: of the shapes of q, k, v, 0 where a row has nothing to attend, is attended by none or is
        of no request; float64, or tensors of their dtypes. dv is 0 where dout is, whatever dlse.
        dsink: with attn_sink, `[h_q]`; float64, or a tensor of the sink's dtype.
    """
    _check_ignored(0.0, deterministic, is_varlen, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    inputs = _Inputs.of(read(q, "q"), read(k, "k"), read(v, "v"), 3)
    rules = _rules(inputs.d_qk, softmax_scale, causal, window_size, softcap)
    requests = _segments(inputs, (cu_seqlens_q, seqused_q, "q"), (cu_seqlens_k, seqused_k, "k"))
    logs = [_read_rows(name, x, inputs.q.shape[:2]) for name, x in (("lse", lse), ("dlse", dlse))]
    return _backward(inputs, requests, rules, dout, out, logs, (dq, dk, dv), attn_sink, alibi_slopes)


@_named(**_SINK)
def flash_attn_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    dq: Any = None,
    dk: Any = None,
    dv: Any = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    *,
    dlse: Any = None,
    deterministic: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    attn_sink: Any = None,
    alibi_slopes: Any = None,
) -> tuple[Any, ...]:
    """Gradients of `flash_attn_func`: `flash_attn_varlen_backward` of requests of one length.

    Args:
        dout: `[b, s_q, h_q, d_v]`, gradient of out.
        lse, dlse: `[b, h_q, s_q]`, in any order in memory.

    Other arguments, results and errors are those of `flash_attn_varlen_backward`, with the shapes of
    `flash_attn_func`.
    """
    _check_ignored(0.0, deterministic)
    inputs = _Inputs.of(read(q, "q"), read(k, "k"), read(v, "v"), 4)
    rules = _rules(inputs.d_qk, softmax_scale, causal, window_size, softcap)
    b, s_q, h_q, _ = inputs.q.shape
    logs = [_read_rows(name, x, (b, h_q, s_q)).swapaxes(1, 2) for name, x in (("lse", lse), ("dlse", dlse))]
    return _backward(inputs, inputs.whole(), rules, dout, out, logs, (dq, dk, dv), attn_sink, alibi_slopes)


class _Request(NamedTuple):
    """Where the arrays hold a request: `array[place]` is `[tokens, heads, ...]`.

    Attributes:
        q_rows: all rows that are its own; `q` the tokens among them.
        q, k: its queries; its keys and values.
    """

    q_rows: Any
    q: Any
    k: Any


class _Inputs(NamedTuple):
    """q, k and v of a call."""

    q: Array
    k: Array
    v: Array

    @classmethod
    def of(cls, q: Array, k: Array, v: Array, axes: int) -> _Inputs:
        """Check arrays of 3 dimensions, `[tokens, heads, d]`, or of 4, with the request before these."""
        names = "[b, s, h, d]" if axes == 4 else "[tokens, h, d]"
        check_dtype("q", q, _DTYPES)
        for name, array in (("k", k), ("v", v)):
            check_dtype(name, array, (q.dtype,), ", that of q")
        for name, array in (("q", q), ("k", k), ("v", v)):
            if len(array.shape) != axes or not array.shape[-1]:
                raise ValueError(f"{name}: expected shape {names} with d at least 1, got {list(array.shape)}")
        if axes == 4 and k.shape[0] != q.shape[0]:
            raise ValueError(f"k: expected {q.shape[0]} requests, those of q, got shape {list(k.shape)}")
        if k.shape[-1] != q.shape[-1]:
            raise ValueError(
                f"k: expected a last dimension of {q.shape[-1]}, that of q, got shape {list(k.shape)}"
            )
        if v.shape[:-1] != k.shape[:-1]:
            raise ValueError(f"v: expected shape {[*k.shape[:-1], 'd_v']} as k has, got {list(v.shape)}")
        h_q, h_kv = q.shape[-2], k.shape[-2]
        if not h_q or not h_kv or h_q % h_kv:
            raise ValueError(
                f"q: expected h_q to be a positive multiple of the h_kv of k, got h_q {h_q} and h_kv {h_kv}"
            )
        return cls(q, k, v)

    @property
    def d_qk(self) -> int:
        """Columns of q and k."""
        return self.q.shape[-1]

    @property
    def d_v(self) -> int:
        """Columns of v."""
        return self.v.shape[-1]

    @property
    def h_q(self) -> int:
        """Query heads."""
        return self.q.shape[-2]

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.h_q // self.k.shape[-2]

    def whole(self) -> list[_Request]:
        """The requests of arrays of 4 dimensions."""
        return [_Request(i, i, i) for i in range(self.q.shape[0])]


_Side = tuple[Any, Any, str]
"""cu_seqlens, seqused and how their names end."""


def _segments(inputs: _Inputs, q_side: _Side, k_side: _Side) -> list[_Request]:
    """The requests of arrays of 3 dimensions."""
    q_rows, q_tokens = _read_lengths(q_side, inputs.q.shape[0], "q")
    k_rows, k_tokens = _read_lengths(k_side, inputs.k.shape[0], "k")
    if len(k_rows) != len(q_rows):
        raise ValueError(
            f"cu_seqlens_k: expected shape [{len(q_rows) + 1}], that of cu_seqlens_q, got [{len(k_rows) + 1}]"
        )
    return [_Request(*places) for places in zip(q_rows, q_tokens, k_tokens, strict=True)]


def _read_lengths(side: _Side, total: int, array: str) -> tuple[list[slice], list[slice]]:
    """The rows of each request, and those of its tokens."""
    cu_seqlens, seqused, suffix = side
    name = f"cu_seqlens_{suffix}" if suffix else "cu_seqlens"
    given = read(cu_seqlens, name)
    check_dtype(name, given, ("int32",))
    if len(given.shape) != 1 or not given.shape[0]:
        raise ValueError(f"{name}: expected shape [b + 1], got {list(given.shape)}")
    bounds = given.values.astype(np.int64)
    if bounds[0] < 0 or bounds[-1] > total or (np.diff(bounds) < 0).any():
        raise ValueError(f"{name}: expected numbers from 0 to {total} that do not decrease, got {bounds}")
    used = np.diff(bounds)
    if seqused is not None:
        counts = read(seqused, f"seqused_{array}")
        check_vector(f"seqused_{array}", counts, len(used), f"b is that of {name}")
        used = np.clip(counts.values.astype(np.int64), 0, used)
    starts = bounds[:-1]
    rows = [slice(start, end) for start, end in zip(starts, bounds[1:], strict=True)]
    return rows, [slice(start, start + count) for start, count in zip(starts, used, strict=True)]


def _rules(
    d_qk: int,
    softmax_scale: float | None,
    causal: bool,
    window_size: Any,
    softcap: float,
    attention_chunk: int = 0,
) -> Rules:
    """What the arguments say of scores."""
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise TypeError(f"window_size: expected a pair (left, right), got {show(window_size)}")
    bounds: list[int | None] = []
    for bound in window_size:
        width = -1 if bound is None else as_int("window_size", bound)
        if width < -1:
            raise ValueError(f"window_size: expected None, -1 or at least 0, got {width}")
        bounds.append(None if width == -1 else width)
    left, right = bounds
    softcap = _as_number("softcap", softcap)
    if not 0 <= softcap < math.inf:
        raise ValueError(f"softcap: expected a finite number of at least 0, got {softcap}")
    chunk = as_int("attention_chunk", attention_chunk)
    if chunk < 0:
        raise ValueError(f"attention_chunk: expected at least 0, got {chunk}")
    scale = d_qk**-0.5 if softmax_scale is None else as_softmax_scale(softmax_scale)
    return Rules(scale, left, 0 if as_bool("causal", causal) else right, softcap, chunk)


def _as_number(name: str, value: Any) -> float:
    """A number of the host."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name}: expected a number, got {show(value)}")
    return float(value)


def _check_ignored(dropout_p: float, deterministic: bool, is_varlen: bool = True, **max_seqlens: int) -> None:
    """Check the arguments that change nothing here."""
    if _as_number("dropout_p", dropout_p) != 0:
        raise ValueError(f"dropout_p: expected 0, got {dropout_p}")
    as_bool("deterministic", deterministic)
    as_bool("is_varlen", is_varlen)
    for name, length in max_seqlens.items():
        as_int(name, length)


def _packed_d_qk(name: str, packed: Array, head_dim_qk: int | None, keys: int) -> int | None:
    """d_qk of an array with `keys` times d_qk and once d_v columns, None for one with an axis of parts."""
    shape = packed.shape
    if len(shape) == 4:
        if head_dim_qk is not None:
            raise ValueError(f"head_dim_qk: expected None for a {name} of 4 dimensions, got {head_dim_qk}")
        if shape[1] != keys + 1:
            raise ValueError(f"{name}: expected shape [total, {keys + 1}, h, d], got {list(shape)}")
        return None
    if len(shape) != 3:
        raise ValueError(
            f"{name}: expected shape [total, h, columns] or [total, {keys + 1}, h, d], got {list(shape)}"
        )
    if head_dim_qk is None:
        raise ValueError(f"head_dim_qk: expected an int for a {name} of 3 dimensions, got None")
    d_qk = as_count("head_dim_qk", head_dim_qk)
    if keys * d_qk >= shape[2]:
        raise ValueError(
            f"{name}: expected more than {keys * d_qk} columns for head_dim_qk {d_qk}, got shape "
            f"{list(shape)}"
        )
    return d_qk


def read_sink(name: str, sink: Any, h_q: int) -> Array | None:
    """A sink, or None."""
    if sink is None:
        return None
    array = read(sink, name)
    check_vector(name, array, h_q, "h_q is that of q", FLOAT_DTYPES)
    return array


def _read_slopes(alibi_slopes: Any, b: int, h_q: int) -> NDArray[np.float64]:
    """ALiBi's slopes `[b, h_q]`, 0 without."""
    if alibi_slopes is None:
        return np.zeros((b, h_q))
    slopes = read(alibi_slopes, "alibi_slopes")
    check_dtype("alibi_slopes", slopes, ("float32",))
    if slopes.shape not in ((h_q,), (b, h_q)):
        raise ValueError(
            f"alibi_slopes: expected shape [{h_q}] or [{b}, {h_q}] (b and h_q are those of q), got "
            f"{list(slopes.shape)}"
        )
    return np.broadcast_to(slopes.values.astype(np.float64), (b, h_q))


def _read_rows(name: str, x: Any, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """lse, or dlse, which is 0 when None."""
    if x is None and name == "dlse":
        return np.zeros(shape)
    array = read(x, name)
    check_dtype(name, array, ("float32",))
    if array.shape != shape:
        raise ValueError(f"{name}: expected shape {list(shape)}, got {list(array.shape)}")
    return array.values.astype(np.float64)


def _check_same(name: str, x: Any, array: Array, shape: tuple[int, ...]) -> None:
    """Check an array to write: its shape, and the dtype of another one."""
    check_target(x, name)
    given = read(x, name)
    check_dtype(name, given, (array.dtype,), ", that of q")
    if given.shape != shape:
        raise ValueError(f"{name}: expected shape {list(shape)}, got {list(given.shape)}")


def _varlen_forward(
    inputs: _Inputs,
    q_side: _Side,
    k_side: _Side,
    score_arguments: tuple[Any, ...],
    attn_sink: Any,
    alibi_slopes: Any,
    out: Any,
) -> tuple[Any, Any]:
    """The forward functions of segments."""
    rules = _rules(inputs.d_qk, *score_arguments)
    requests = _segments(inputs, q_side, k_side)
    if out is not None:
        _check_same("out", out, inputs.q, (*inputs.q.shape[:-1], inputs.d_v))
    result, lse = _forward(inputs, requests, rules, attn_sink, alibi_slopes)
    if out is not None:
        for request in requests:
            store(out, request.q_rows, result[request.q_rows])
    result = out if is_tensor(out) else like(result, inputs.q.dtype, inputs.q)
    return result, like(np.ascontiguousarray(lse.T), "float32", inputs.q).T


def _forward(
    inputs: _Inputs, requests: list[_Request], rules: Rules, attn_sink: Any, alibi_slopes: Any
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """out, of the shape of q but for its last dimension, and lse, without the last dimension."""
    q, k, v = (array.values.astype(np.float64) for array in inputs)
    sink = read_sink("attn_sink", attn_sink, inputs.h_q)
    slopes = _read_slopes(alibi_slopes, len(requests), inputs.h_q)
    out, lse = np.zeros((*q.shape[:-1], inputs.d_v)), np.full(q.shape[:-1], -np.inf)
    for r, request in enumerate(requests):
        queries, keys, values = q[request.q], k[request.k], v[request.k]
        for h in range(inputs.h_q):
            out[request.q][:, h], lse[request.q][:, h] = attend(
                queries[:, h],
                keys[:, h // inputs.group],
                values[:, h // inputs.group],
                len(keys) - len(queries),
                rules,
                float(slopes[r, h]),
                None if sink is None else float(sink.values[h]),
            )
    return out, lse


def _backward(
    inputs: _Inputs,
    requests: list[_Request],
    rules: Rules,
    dout: Any,
    out: Any,
    logs: list[NDArray[np.float64]],
    targets: tuple[Any, Any, Any],
    attn_sink: Any,
    alibi_slopes: Any,
) -> tuple[Any, ...]:
    """The backward functions; `logs` are lse and dlse, `[..., tokens, h_q]`."""
    results = {"dout": read(dout, "dout"), "out": read(out, "out")}
    for name, array in results.items():
        check_dtype(name, array, (inputs.q.dtype,), ", that of q")
        shape = (*inputs.q.shape[:-1], inputs.d_v)
        if array.shape != shape:
            raise ValueError(f"{name}: expected shape {list(shape)}, got {list(array.shape)}")
    for name, target, array in zip(("dq", "dk", "dv"), targets, inputs, strict=True):
        if target is not None:
            _check_same(name, target, array, array.shape)
    sink = read_sink("attn_sink", attn_sink, inputs.h_q)
    slopes = _read_slopes(alibi_slopes, len(requests), inputs.h_q)
    q, k, v = (array.values.astype(np.float64) for array in inputs)
    douts, outs = (array.values.astype(np.float64) for array in results.values())
    lse, dlse = logs
    dq, dk, dv, dsink = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v), np.zeros(inputs.h_q)
    for r, request in enumerate(requests):
        queries, keys, values = q[request.q], k[request.k], v[request.k]
        for h in range(inputs.h_q):
            h_kv = h // inputs.group
            gradients = _attend_backward(
                douts[request.q][:, h],
                queries[:, h],
                keys[:, h_kv],
                values[:, h_kv],
                outs[request.q][:, h],
                lse[request.q][:, h],
                dlse[request.q][:, h],
                len(keys) - len(queries),
                rules,
                float(slopes[r, h]),
                None if sink is None else float(sink.values[h]),
            )
            dq[request.q][:, h] = gradients.q
            dk[request.k][:, h_kv] += gradients.k
            dv[request.k][:, h_kv] += gradients.v
            dsink[h] += gradients.sink
    returned = []
    for target, values, array in zip(targets, (dq, dk, dv), inputs, strict=True):
        if target is not None:
            store(target, ..., values)
        returned.append(target if is_tensor(target) else like(values, array.dtype, results["dout"]))
    if sink is not None:
        returned.append(like(dsink, sink.dtype, results["dout"]))
    return tuple(returned)
