"""Dense multi-head attention of requests, forward and backward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from ..call.arguments import SECOND_NAMES
from ._arrays import (
    FLOAT_DTYPES,
    INT_DTYPES,
    Array,
    Floats,
    check_groups,
    check_target,
    is_tensor,
    read,
    read_bounds,
    read_given,
    store,
)
from ._heads import Rules, attend, attend_backward, sinks_of, slopes_of

_FUNCTION = TypeVar("_FUNCTION", bound=Callable[..., Any])
_DTYPES = ("bfloat16", "float16", "float32")


def _with_second_names(function: _FUNCTION) -> _FUNCTION:
    """Let a function take arguments by their `SECOND_NAMES` too."""

    @functools.wraps(function)
    def renamed(*args: Any, **kwargs: Any) -> Any:
        for alias, name in SECOND_NAMES.items():
            if alias in kwargs:
                if name in kwargs:
                    raise TypeError(f"{alias}: expected one of {alias} and {name}, got both")
                kwargs[name] = kwargs.pop(alias)
        return function(*args, **kwargs)

    return cast(_FUNCTION, renamed)


@_with_second_names
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
    sides = (cu_seqlens_q, seqused_q, "cu_seqlens_q"), (cu_seqlens_k, seqused_k, "cu_seqlens_k")
    rules = (softmax_scale, causal, window_size, softcap, attention_chunk, dropout_p)
    return _Call.of((q, k, v), sides, rules, attn_sink, alibi_slopes).forward(out)


@_with_second_names
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
    q, k, v = _unpacked("qkv", qkv, head_dim_qk, 3)
    sides = (cu_seqlens, seqused_q, "cu_seqlens"), (cu_seqlens, seqused_k, "cu_seqlens")
    rules = (softmax_scale, causal, window_size, softcap, attention_chunk, dropout_p)
    return _Call.of((q, k, v), sides, rules, attn_sink, alibi_slopes).forward(out)


@_with_second_names
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
    k, v = _unpacked("kv", kv, head_dim_qk, 2)
    sides = (cu_seqlens_q, seqused_q, "cu_seqlens_q"), (cu_seqlens_k, seqused_k, "cu_seqlens_k")
    rules = (softmax_scale, causal, window_size, softcap, attention_chunk, dropout_p)
    return _Call.of((q, k, v), sides, rules, attn_sink, alibi_slopes).forward(out)


@_with_second_names
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
    rules = (softmax_scale, causal, window_size, softcap, attention_chunk, dropout_p)
    return _Call.of((q, k, v), None, rules, attn_sink, alibi_slopes).forward(out)


@_with_second_names
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
    sides = (cu_seqlens_q, seqused_q, "cu_seqlens_q"), (cu_seqlens_k, seqused_k, "cu_seqlens_k")
    rules = (softmax_scale, causal, window_size, softcap)
    call = _Call.of((q, k, v), sides, rules, attn_sink, alibi_slopes)
    return call.backward(dout, out, lse, dlse, (dq, dk, dv))


@_with_second_names
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
    rules = (softmax_scale, causal, window_size, softcap)
    call = _Call.of((q, k, v), None, rules, attn_sink, alibi_slopes)
    return call.backward(dout, out, lse, dlse, (dq, dk, dv))


class _Request(NamedTuple):
    """The places of a request in the arrays: `array[place]` is `[tokens, heads, ...]`.

    Attributes:
        rows: all its rows of q.
        q, k: the rows of its queries, and of its keys and values.
    """

    rows: Any
    q: Any
    k: Any


_Side = tuple[Any, Any, str]
"""cu_seqlens, seqused, and the name of the first."""


class _Call(NamedTuple):
    """A forward or backward call.

    Attributes:
        q, k, v: arrays of segments, `[tokens, heads, d]`, or of requests, `[b, tokens, heads, d]`.
        requests: their places in the arrays.
        rules: how scores are made and which keys a query sees.
        slopes: of ALiBi, `[b, h_q]`, 0 without.
        sink: the array of the caller.
    """

    q: Array
    k: Array
    v: Array
    requests: list[_Request]
    rules: Rules
    slopes: Floats
    sink: Array | None

    @classmethod
    def of(
        cls,
        arrays: tuple[Any, Any, Any],
        sides: tuple[_Side, _Side] | None,
        rules: tuple[Any, ...],
        attn_sink: Any,
        alibi_slopes: Any,
    ) -> _Call:
        """Read the arguments of a call; `sides` is None where requests are a dimension of the arrays."""
        q = read(arrays[0], "q", _DTYPES, ("b", "s", "h", "d")[sides is not None :])
        k = read(arrays[1], "k", (q.dtype,), (*q.shape[:-3], "s", "h", q.shape[-1]))
        v = read(arrays[2], "v", (q.dtype,), (*k.shape[:-1], "d_v"))
        h_q = q.shape[-2]
        check_groups(h_q, k.shape[-2], "k")
        requests = [_Request(i, i, i) for i in range(len(q.values))]
        if sides is not None:
            requests = _segments(sides, len(q.values), len(k.values))
        slopes = slopes_of(alibi_slopes, len(requests), h_q)
        sink = read_given(attn_sink, "attn_sink", FLOAT_DTYPES, (h_q,))
        return cls(q, k, v, requests, Rules.of(q.shape[-1], *rules), slopes, sink)

    def forward(self, out: Any) -> tuple[Any, Any]:
        """The results of a forward function."""
        rows = self.q.shape[:-1]
        check_target(out, "out", (self.q.dtype,), (*rows, self.v.shape[-1]))
        attended, lse = np.zeros((*rows, self.v.shape[-1])), np.full(rows, -np.inf)
        for request, operands in self._operands():
            attended[request.q], lse[request.q] = attend(*operands)
        if out is not None:
            for request in self.requests:
                store(out, request.rows, attended[request.rows])
        returned = out if is_tensor(out) else self.q.result(attended, self.q.dtype)
        logs = self.q.result(np.ascontiguousarray(lse.swapaxes(-1, -2)), "float32")
        return returned, logs.T if len(rows) == 2 else logs

    def backward(
        self, dout: Any, out: Any, lse: Any, dlse: Any, targets: tuple[Any, Any, Any]
    ) -> tuple[Any, ...]:
        """The results of a backward function; `targets` are dq, dk and dv."""
        rows = self.q.shape[:-1]
        shape = (*rows, self.v.shape[-1])
        douts, outs = (read(x, name, (self.q.dtype,), shape) for name, x in (("dout", dout), ("out", out)))
        shape = rows if len(rows) == 2 else (rows[0], rows[2], rows[1])
        logs = read(lse, "lse", ("float32",), shape).floats
        dlogs = np.zeros(shape) if dlse is None else read(dlse, "dlse", ("float32",), shape).floats
        if len(rows) == 3:
            logs, dlogs = logs.swapaxes(1, 2), dlogs.swapaxes(1, 2)
        arrays = (self.q, self.k, self.v)
        for name, target, array in zip(("dq", "dk", "dv"), targets, arrays, strict=True):
            check_target(target, name, (array.dtype,), array.shape)
        dq, dk, dv = grads = [np.zeros_like(array.values, np.float64) for array in arrays]
        dsink = np.zeros(rows[-1])
        results = douts.floats, outs.floats, logs, dlogs
        for request, operands in self._operands():
            of_request = attend_backward(*[x[request.q] for x in results], *operands)
            dq[request.q], dk[request.k], dv[request.k], dsinks = of_request
            dsink += dsinks
        returned = [
            douts.result(values, array.dtype, target)
            for values, array, target in zip(grads, arrays, targets, strict=True)
        ]
        if self.sink is not None:
            returned.append(douts.result(dsink, self.sink.dtype))
        return tuple(returned)

    def _operands(self) -> Iterator[tuple[_Request, tuple[Any, ...]]]:
        """The requests, each with the arguments of `attend`."""
        q, k, v = self.q.floats, self.k.floats, self.v.floats
        sinks = sinks_of(self.sink, q.shape[-2])
        for request, slopes in zip(self.requests, self.slopes, strict=True):
            queries, keys = q[request.q], k[request.k]
            first = len(keys) - len(queries)
            yield request, (queries, keys, v[request.k], first, self.rules, slopes, sinks)


def _segments(sides: tuple[_Side, _Side], total_q: int, total_k: int) -> list[_Request]:
    """The requests that are segments of arrays."""
    q_rows, q_tokens = _read_lengths(sides[0], total_q, "q")
    k_rows, k_tokens = _read_lengths(sides[1], total_k, "k")
    if len(k_rows) != len(q_rows):
        raise ValueError(
            f"cu_seqlens_k: expected shape [{len(q_rows) + 1}] as cu_seqlens_q, got [{len(k_rows) + 1}]"
        )
    return [_Request(*places) for places in zip(q_rows, q_tokens, k_tokens, strict=True)]


def _read_lengths(side: _Side, total: int, array: str) -> tuple[list[slice], list[slice]]:
    """The rows of each request, and the rows of its tokens."""
    cu_seqlens, seqused, name = side
    bounds = read_bounds(cu_seqlens, name, total)
    used = np.diff(bounds)
    if seqused is not None:
        counts = read(seqused, f"seqused_{array}", INT_DTYPES, used.shape)
        used = np.clip(counts.values.astype(np.int64), 0, used)
    starts = bounds[:-1]
    rows = [slice(start, end) for start, end in zip(starts, bounds[1:], strict=True)]
    return rows, [slice(start, start + count) for start, count in zip(starts, used, strict=True)]


def _unpacked(name: str, packed: Any, head_dim_qk: int | None, parts: int) -> list[Array]:
    """The parts of an array `[total, parts, h, d]`, or, with head_dim_qk, `[total, h, columns]`."""
    if head_dim_qk is None:
        array = read(packed, name, None, ("total", parts, "h", "d"))
        return [array._replace(values=array.values[:, i]) for i in range(parts)]
    array = read(packed, name, None, ("total", "h", "columns"))
    ends = [head_dim_qk * i for i in range(1, parts)]
    return [array._replace(values=values) for values in np.split(array.values, ends, axis=-1)]
