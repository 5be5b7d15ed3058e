"""Dense multi-head attention of requests, forward and backward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from ._arrays import FLOAT_DTYPES, INT_DTYPES, Array, is_tensor, like, read, read_target, result, store
from ._heads import Rules, attend, attend_backward

_FUNCTION = TypeVar("_FUNCTION", bound=Callable[..., Any])
_DTYPES = ("bfloat16", "float16", "float32")
_LENGTHS = {
    "cu_seqlens_qo": "cu_seqlens_q",
    "cu_seqlens_kv": "cu_seqlens_k",
    "max_seqlen_qo": "max_seqlen_q",
    "max_seqlen_kv": "max_seqlen_k",
}
_SINK = {"learnable_sink": "attn_sink"}


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
    """Attention of requests of different lengths as `rawmla.flash_attn_varlen_func`, in float64.

    q, k and v are float32 too, of any head dimension. `max_seqlen_q`, `max_seqlen_k`, `deterministic` and
    `is_varlen` do not change what is computed. Rows of no request have out 0 and lse -inf, but in a given
    `out`, where they are not written.

    Raises:
        TypeError: an argument under both of its names, or of another dtype.
        ValueError: shapes that do not fit, lengths that decrease or leave the arrays, dropout, and bounds,
            softcaps or chunks that mean nothing.
    """
    _refuse_dropout(dropout_p)
    return _varlen_forward(
        _Inputs.of(q, k, v, 3),
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
    """`flash_attn_varlen_func` of one array, as `rawmla.flash_attn_varlen_qkvpacked_func`."""
    _refuse_dropout(dropout_p)
    q, k, v = _unpacked("qkv", qkv, head_dim_qk, 3)
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
    """`flash_attn_varlen_func` of k and v in one array, as `rawmla.flash_attn_varlen_kvpacked_func`."""
    _refuse_dropout(dropout_p)
    k, v = _unpacked("kv", kv, head_dim_qk, 2)
    return _varlen_forward(
        _Inputs.of(q, k, v, 3),
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
    """`flash_attn_varlen_func` of requests of one length, as `rawmla.flash_attn_func`."""
    _refuse_dropout(dropout_p)
    inputs = _Inputs.of(q, k, v, 4)
    inputs.check_out(out)
    rules = Rules.of(inputs.d_qk, softmax_scale, causal, window_size, softcap, attention_chunk)
    attended, lse = _forward(inputs, inputs.whole(), rules, attn_sink, alibi_slopes)
    return (
        result(attended, inputs.q.dtype, inputs.q, out),
        like(np.ascontiguousarray(lse.swapaxes(1, 2)), "float32", inputs.q),
    )


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
    """Gradients as `rawmla.flash_attn_varlen_backward`, in float64.

    Probabilities are computed again from q, k and the given lse. Nothing is read of rows that have nothing to
    attend or are of no request; dv is 0 where dout is, whatever dlse. Arguments that
    `flash_attn_varlen_func` has too are as there.
    """
    inputs = _Inputs.of(q, k, v, 3)
    rules = Rules.of(inputs.d_qk, softmax_scale, causal, window_size, softcap)
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
    """`flash_attn_varlen_backward` of requests of one length, as `rawmla.flash_attn_backward`."""
    inputs = _Inputs.of(q, k, v, 4)
    rules = Rules.of(inputs.d_qk, softmax_scale, causal, window_size, softcap)
    b, s_q, h_q, _ = inputs.q.shape
    logs = [_read_rows(name, x, (b, h_q, s_q)).swapaxes(1, 2) for name, x in (("lse", lse), ("dlse", dlse))]
    return _backward(inputs, inputs.whole(), rules, dout, out, logs, (dq, dk, dv), attn_sink, alibi_slopes)


class _Request(NamedTuple):
    """The places of a request in the arrays: `array[place]` is `[tokens, heads, ...]`.

    Attributes:
        q_rows: all its rows of q.
        q, k: the rows of its queries, and of its keys and values.
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
    def of(cls, q: Any, k: Any, v: Any, axes: int) -> _Inputs:
        """Read arrays of 3 dimensions, `[tokens, heads, d]`, or of 4, with the request before these."""
        queries = read(q, "q", _DTYPES, ("b", "s", "h", "d")[4 - axes :])
        dtype, batch, d_qk = (queries.dtype,), queries.shape[: axes - 3], queries.shape[-1]
        keys = read(k, "k", dtype, (*batch, "s", "h", d_qk))
        values = read(v, "v", dtype, (*keys.shape[:-1], "d_v"))
        h_q, h_kv = queries.shape[-2], keys.shape[-2]
        if h_q % h_kv:
            raise ValueError(
                f"q: expected h_q to be a multiple of the h_kv of k, got h_q {h_q} and h_kv {h_kv}"
            )
        return cls(queries, keys, values)

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

    def check_out(self, out: Any) -> None:
        """Check an array that receives the result."""
        if out is not None:
            read_target(out, "out", (self.q.dtype,), (*self.q.shape[:-1], self.d_v))

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
            f"cu_seqlens_k: expected shape [{len(q_rows) + 1}] as cu_seqlens_q, got [{len(k_rows) + 1}]"
        )
    return [_Request(*places) for places in zip(q_rows, q_tokens, k_tokens, strict=True)]


def _read_lengths(side: _Side, total: int, array: str) -> tuple[list[slice], list[slice]]:
    """The rows of each request, and the rows of its tokens."""
    cu_seqlens, seqused, suffix = side
    name = f"cu_seqlens_{suffix}" if suffix else "cu_seqlens"
    bounds = read(cu_seqlens, name, INT_DTYPES, ("b + 1",)).values.astype(np.int64)
    if bounds[0] < 0 or bounds[-1] > total or (np.diff(bounds) < 0).any():
        raise ValueError(f"{name}: expected numbers from 0 to {total} that do not decrease, got {bounds}")
    used = np.diff(bounds)
    if seqused is not None:
        counts = read(seqused, f"seqused_{array}", INT_DTYPES, used.shape)
        used = np.clip(counts.values.astype(np.int64), 0, used)
    starts = bounds[:-1]
    rows = [slice(start, end) for start, end in zip(starts, bounds[1:], strict=True)]
    return rows, [slice(start, start + count) for start, count in zip(starts, used, strict=True)]


def _refuse_dropout(dropout_p: float) -> None:
    if dropout_p != 0:
        raise ValueError(f"dropout_p: expected 0, got {dropout_p}")


def _unpacked(name: str, packed: Any, head_dim_qk: int | None, parts: int) -> list[Array]:
    """The parts of an array `[total, parts, h, d]`, or, with head_dim_qk, `[total, h, columns]`."""
    if head_dim_qk is None:
        array = read(packed, name, None, ("total", parts, "h", "d"))
        return [array._replace(values=array.values[:, i]) for i in range(parts)]
    array = read(packed, name, None, ("total", "h", "columns"))
    ends = [head_dim_qk * i for i in range(1, parts)]
    return [array._replace(values=values) for values in np.split(array.values, ends, axis=-1)]


def read_sink(name: str, sink: Any, h_q: int) -> Array | None:
    """A sink, or None."""
    return None if sink is None else read(sink, name, FLOAT_DTYPES, (h_q,))


def _read_slopes(alibi_slopes: Any, b: int, h_q: int) -> NDArray[np.float64]:
    """ALiBi's slopes `[b, h_q]`, 0 without."""
    if alibi_slopes is None:
        return np.zeros((b, h_q))
    slopes = read(alibi_slopes, "alibi_slopes", ("float32",))
    if slopes.shape not in ((h_q,), (b, h_q)):
        raise ValueError(f"alibi_slopes: expected shape [{h_q}] or [{b}, {h_q}], got {list(slopes.shape)}")
    return np.broadcast_to(slopes.values.astype(np.float64), (b, h_q))


def _read_rows(name: str, x: Any, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """lse, or dlse, which is 0 when None."""
    if x is None and name == "dlse":
        return np.zeros(shape)
    return read(x, name, ("float32",), shape).values.astype(np.float64)


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
    rules = Rules.of(inputs.d_qk, *score_arguments)
    requests = _segments(inputs, q_side, k_side)
    inputs.check_out(out)
    attended, lse = _forward(inputs, requests, rules, attn_sink, alibi_slopes)
    if out is not None:
        for request in requests:
            store(out, request.q_rows, attended[request.q_rows])
    returned = out if is_tensor(out) else like(attended, inputs.q.dtype, inputs.q)
    return returned, like(np.ascontiguousarray(lse.T), "float32", inputs.q).T


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
    results_shape = (*inputs.q.shape[:-1], inputs.d_v)
    results = [read(x, name, (inputs.q.dtype,), results_shape) for name, x in (("dout", dout), ("out", out))]
    for name, target, array in zip(("dq", "dk", "dv"), targets, inputs, strict=True):
        if target is not None:
            read_target(target, name, (array.dtype,), array.shape)
    sink = read_sink("attn_sink", attn_sink, inputs.h_q)
    slopes = _read_slopes(alibi_slopes, len(requests), inputs.h_q)
    q, k, v = (array.values.astype(np.float64) for array in inputs)
    douts, outs = (array.values.astype(np.float64) for array in results)
    lse, dlse = logs
    dq, dk, dv, dsink = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v), np.zeros(inputs.h_q)
    for r, request in enumerate(requests):
        queries, keys, values = q[request.q], k[request.k], v[request.k]
        for h in range(inputs.h_q):
            h_kv = h // inputs.group
            gradients = attend_backward(
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
    returned = [
        result(values, array.dtype, results[0], target)
        for values, array, target in zip((dq, dk, dv), inputs, targets, strict=True)
    ]
    if sink is not None:
        returned.append(like(dsink, sink.dtype, results[0]))
    return tuple(returned)
