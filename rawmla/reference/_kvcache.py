"""Attention over caches of keys and values, to which new tokens are appended first, as it is defined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..call.checks import as_int
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
    read_target,
    store,
)
from ._formats import decode_e4m3, encode_e4m3, round_to_bf16
from ._heads import Rules, attend, sinks_of, slopes_of

_FP8 = "float8_e4m3fn"
_DTYPES = ("bfloat16", "float16", "float32", _FP8)


def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    *,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    block_table: Any = None,
    cu_seqlens_q: Any = None,
    max_seqlen_q: int | None = None,
    cu_seqlens_k: Any = None,
    cu_seqlens_k_new: Any = None,
    rotary_seqlens: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    attention_chunk: int = 0,
    rotary_interleaved: bool = True,
    alibi_slopes: Any = None,
    attn_sink: Any = None,
    num_splits: int = 0,
    out: Any = None,
) -> tuple[Any, Any]:
    """Attention over caches as `rawmla.flash_attn_with_kvcache`, in float64.

    Arrays are float32 too, of any head dimension, page size and rotary dimension. New tokens are written to
    `k_cache` and `v_cache` in their dtype, and attended as they are there; rotary embedding is computed in
    float32, of float64 arrays in float64, and rounded to the dtype of the array. `num_splits` does not change
    what is computed. Rows of no request have out 0 and lse -inf, but in a given `out`, where they are not
    written.

    Tokens outside the caches are not written: beyond the end of the cache or table, or where an entry of
    `block_table` or `cache_batch_idx` is out of range. As keys and values they are NaN.

    Raises:
        TypeError: an argument of another dtype.
        ValueError: shapes that do not fit, arguments that need or exclude each other, bounds that decrease
            or leave the arrays, negative padding, and masks that mean nothing.
    """
    if as_int("num_splits", num_splits) < 0:
        raise ValueError(f"num_splits: expected an int of at least 0, got {num_splits}")
    _check_pairs(k=k, v=v)
    _check_pairs(rotary_cos=rotary_cos, rotary_sin=rotary_sin)
    if rotary_cos is None and rotary_seqlens is not None:
        raise ValueError("rotary_seqlens: expected None without rotary_cos, got an array")
    if rotary_cos is not None and k is None:
        raise ValueError("rotary_cos: expected None without k, as only new tokens are rotated, got an array")
    queries, bounds_q = _read_queries(q, cu_seqlens_q)
    b = len(queries.values) if bounds_q is None else len(bounds_q) - 1
    h_q, d = queries.shape[-2:]
    keys, values = _read_caches(k_cache, v_cache, queries, is_written=k is not None)
    h_kv, d_v = keys.shape[2], values.shape[3]
    check_groups(h_q, h_kv, "k_cache")
    places = _Places.of(keys.shape, block_table, cache_batch_idx, b)
    lengths = _read_lengths(cache_seqlens, cu_seqlens_k, b, places.capacity, is_written=k is not None)
    leftpads = _read_vector(cache_leftpad, "cache_leftpad", b)
    if (leftpads < 0).any():
        raise ValueError(f"cache_leftpad: expected numbers of at least 0, got {leftpads}")
    rules = Rules.of(d, softmax_scale, causal, window_size, softcap, attention_chunk)
    slopes = slopes_of(alibi_slopes, b, h_q)
    sinks = sinks_of(read_given(attn_sink, "attn_sink", FLOAT_DTYPES, (h_q,)), h_q)
    descales = [
        _read_descale(x, name, b, h_kv, is_fp8=array.dtype == _FP8)
        for x, name, array in (
            (q_descale, "q_descale", queries),
            (k_descale, "k_descale", keys),
            (v_descale, "v_descale", values),
        )
    ]
    out_dtype = "bfloat16" if queries.dtype == _FP8 else queries.dtype
    check_target(out, "out", (out_dtype,), (*queries.shape[:-1], d_v))
    longest = _read_longest(max_seqlen_q, queries, bounds_q)

    rows: list[Any] = list(range(b)) if bounds_q is None else _slices(bounds_q)
    rotary = _Rotary.of(rotary_cos, rotary_sin, rotary_interleaved, queries)
    bases = lengths if rotary_seqlens is None else _read_vector(rotary_seqlens, "rotary_seqlens", b)
    totals = lengths
    if k is not None:
        new = _NewTokens.of(k, v, cu_seqlens_k_new, keys, values, b)
        totals = lengths + np.array([len(new.k.values[at]) for at in new.rows], np.int64)
        found = [places.find(r, np.arange(lengths[r], totals[r])) for r in range(b)]
        new.write(k_cache, keys, new.coded_keys(keys, rotary, bases), found)
        new.write(v_cache, values, _coded(new.v, values), found)
        keys, values = read(k_cache, "k_cache"), read(v_cache, "v_cache")
    query = queries.floats
    if rotary is not None:
        is_local = _is_local(causal, window_size, attention_chunk, places.capacity, longest)
        for base, at in zip(bases, rows, strict=True):
            positions = base + np.arange(len(query[at])) * is_local
            query[at] = rotary.apply(query[at], positions, queries.dtype)

    attended, lse = np.zeros((*queries.shape[:-1], d_v)), np.full(queries.shape[:-1], -np.inf)
    cached_keys, cached_values = keys.floats, values.floats
    group = h_q // h_kv
    for r, (length, leftpad) in enumerate(zip(totals, leftpads, strict=True)):
        if length <= leftpad:
            continue
        inside, *index = places.find(r, np.arange(leftpad, length))
        seen_keys = np.full((length - leftpad, h_kv, d), np.nan)
        seen_values = np.full((length - leftpad, h_kv, d_v), np.nan)
        seen_keys[inside] = cached_keys[tuple(index)]
        seen_values[inside] = cached_values[tuple(index)]
        of_q, of_k, of_v = (descale[r, :, None] for descale in descales)
        of_queries = query[rows[r]] * np.repeat(of_q * of_k, group, axis=0)
        first = length - leftpad - len(of_queries)
        attended[rows[r]], lse[rows[r]] = attend(
            of_queries, seen_keys, seen_values * of_v, first, rules, slopes[r], sinks
        )
    if out is not None:
        for at in rows:
            store(out, at, attended[at])
    returned = out if is_tensor(out) else queries.result(attended, out_dtype)
    logs = queries.result(np.ascontiguousarray(lse.swapaxes(-1, -2)), "float32")
    return returned, logs if bounds_q is None else logs.swapaxes(-1, -2)


# ---- reading


def _check_pairs(**pair: Any) -> None:
    """Check that both arguments are given or none."""
    (name, one), (other_name, other) = pair.items()
    if (one is None) != (other is None):
        missing, given = (name, other_name) if one is None else (other_name, name)
        raise ValueError(f"{missing}: expected an array, as {given} is one, or both None, got None")


def _read_queries(q: Any, cu_seqlens_q: Any) -> tuple[Array, NDArray[np.int64] | None]:
    """Queries `[b, s_q, h_q, d]`, or `[total_q, h_q, d]` and the bounds of the requests."""
    if cu_seqlens_q is None:
        return read(q, "q", _DTYPES, ("b", "s_q", "h_q", "d")), None
    queries = read(q, "q", _DTYPES, ("total_q", "h_q", "d"))
    return queries, read_bounds(cu_seqlens_q, "cu_seqlens_q", len(queries.values))


def _read_longest(max_seqlen_q: Any, queries: Array, bounds_q: NDArray[np.int64] | None) -> int:
    """Return the largest number of query tokens of a request, all for None."""
    if bounds_q is not None:
        return len(queries.values) if max_seqlen_q is None else as_int("max_seqlen_q", max_seqlen_q)
    if max_seqlen_q is not None:
        raise ValueError(f"max_seqlen_q: expected None without cu_seqlens_q, got {max_seqlen_q}")
    return queries.shape[1]


def _read_caches(k_cache: Any, v_cache: Any, queries: Array, *, is_written: bool) -> tuple[Array, Array]:
    reader = read_target if is_written else read
    dtypes = tuple(dict.fromkeys((queries.dtype, _FP8)))
    keys = reader(k_cache, "k_cache", dtypes, ("b_c or num_blocks", "tokens", "h_kv", queries.shape[-1]))
    return keys, reader(v_cache, "v_cache", (keys.dtype,), (*keys.shape[:3], "d_v"))


def _read_vector(x: Any, name: str, b: int) -> NDArray[np.int64]:
    """Integers `[b]`, 0 for None."""
    return np.zeros(b, np.int64) if x is None else read(x, name, INT_DTYPES, (b,)).values.astype(np.int64)


def _read_lengths(
    cache_seqlens: Any, cu_seqlens_k: Any, b: int, capacity: int, *, is_written: bool
) -> NDArray[np.int64]:
    """Numbers of tokens in the caches before the call, `[b]`."""
    if cu_seqlens_k is not None:
        if cache_seqlens is not None:
            raise ValueError("cu_seqlens_k: expected None, as cache_seqlens is given, got an array")
        return np.diff(read_bounds(cu_seqlens_k, "cu_seqlens_k", segments=b))
    if cache_seqlens is None:
        if is_written:
            raise ValueError(
                "cache_seqlens: needed with k, as the position to append at; expected an int or an array, "
                "got None"
            )
        return np.full(b, capacity)
    if isinstance(cache_seqlens, (int, np.integer)):
        return np.full(b, as_int("cache_seqlens", cache_seqlens), np.int64)
    return _read_vector(cache_seqlens, "cache_seqlens", b)


def _read_descale(x: Any, name: str, b: int, h_kv: int, *, is_fp8: bool) -> Floats:
    """Return factors `[b, h_kv]`, 1 for None and of what is not FP8."""
    given = read_given(x, name, ("float32",), (b, h_kv)) if is_fp8 else None
    return np.ones((b, h_kv)) if given is None else given.floats


def _slices(bounds: NDArray[np.int64]) -> list[slice]:
    return [slice(start, end) for start, end in zip(bounds[:-1], bounds[1:], strict=True)]


# ---- places

_Found = tuple[NDArray[np.bool_], NDArray[np.int64], NDArray[np.int64]]
"""Which of some positions are in the caches, and both indices of those."""


class _Places(NamedTuple):
    """The places of tokens in the caches.

    Attributes:
        extents: number of rows of a cache and tokens of each, or number of blocks and tokens of each.
        table: block table, None if the caches are not paged.
        rows: the row of caches or table of each request.
    """

    extents: tuple[int, int]
    table: NDArray[Any] | None
    rows: NDArray[np.int64]

    @classmethod
    def of(cls, shape: tuple[int, ...], block_table: Any, cache_batch_idx: Any, b: int) -> _Places:
        """Read the arguments that say where the tokens are, in caches of this shape."""
        rows = (
            np.arange(b) if cache_batch_idx is None else _read_vector(cache_batch_idx, "cache_batch_idx", b)
        )
        table = None
        if block_table is not None:
            table = read(block_table, "block_table", INT_DTYPES, ("rows", "pages")).values
        name, count = ("k_cache", shape[0]) if table is None else ("block_table", len(table))
        if cache_batch_idx is None and count < b:
            raise ValueError(
                f"{name}: expected a row for each of {b} requests without cache_batch_idx, got {count}"
            )
        return cls((shape[0], shape[1]), table, rows)

    @property
    def capacity(self) -> int:
        """The number of tokens that a request has room for."""
        return self.extents[1] * (1 if self.table is None else self.table.shape[1])

    def find(self, request: int, positions: NDArray[np.int64]) -> _Found:
        """Find the positions of a request in the caches."""
        first, second = np.full_like(positions, self.rows[request]), positions
        if self.table is not None:
            column, second = np.divmod(positions, self.extents[1])
            inside = (first >= 0) & (first < len(self.table)) & (column >= 0) & (column < self.table.shape[1])
            entries = (
                self.table[np.where(inside, first, 0), np.where(inside, column, 0)] if inside.any() else 0
            )
            first = np.where(inside, entries, -1)
        inside = (first >= 0) & (first < self.extents[0]) & (second >= 0) & (second < self.extents[1])
        return inside, first[inside], second[inside]


# ---- new tokens


class _NewTokens(NamedTuple):
    """The tokens that a call appends.

    Attributes:
        k, v: the arrays of the caller.
        rows: the index of each request's tokens in them.
    """

    k: Array
    v: Array
    rows: list[Any]

    @classmethod
    def of(cls, k: Any, v: Any, cu_seqlens_k_new: Any, keys: Array, values: Array, b: int) -> _NewTokens:
        """Read the arguments of a call, for caches of keys and values."""
        leading = (b, "s_new") if cu_seqlens_k_new is None else ("total_new",)
        new_k = read(k, "k", (keys.dtype,), (*leading, *keys.shape[2:]))
        new_v = read(v, "v", (keys.dtype,), (*new_k.shape[:-2], *values.shape[2:]))
        if cu_seqlens_k_new is None:
            return cls(new_k, new_v, list(range(b)))
        bounds = read_bounds(cu_seqlens_k_new, "cu_seqlens_k_new", len(new_k.values), b)
        return cls(new_k, new_v, _slices(bounds))

    def coded_keys(self, cache: Array, rotary: _Rotary | None, bases: NDArray[np.int64]) -> NDArray[Any]:
        """Return the keys as a cache holds them, rotated from positions `bases` on."""
        if rotary is None:
            return _coded(self.k, cache)
        keys = self.k.floats
        for base, at in zip(bases, self.rows, strict=True):
            keys[at] = rotary.apply(keys[at], base + np.arange(len(keys[at])), cache.dtype)
        return encode_e4m3(keys) if cache.dtype == _FP8 else keys

    def write(self, target: Any, cache: Array, tokens: NDArray[Any], found: list[_Found]) -> None:
        """Write tokens where `found` says; an FP8 `cache` shares the memory of its `target`."""
        for at, (inside, *index) in zip(self.rows, found, strict=True):
            if cache.dtype == _FP8:
                cache.values[tuple(index)] = tokens[at][inside]
            else:
                store(target, tuple(index), tokens[at][inside])


def _coded(tokens: Array, cache: Array) -> NDArray[Any]:
    """Return new tokens as a cache holds them: as bytes if it is FP8."""
    if cache.dtype == _FP8 and tokens.dtype != _FP8:
        return encode_e4m3(tokens.floats)
    return tokens.values


# ---- rotary embedding


class _Rotary(NamedTuple):
    """Rotary embedding.

    Attributes:
        cos, sin: `[positions, rotary_dim / 2]`.
        interleaved: pairs are adjacent columns; else their distance is rotary_dim / 2.
    """

    cos: NDArray[Any]
    sin: NDArray[Any]
    interleaved: bool

    @classmethod
    def of(cls, rotary_cos: Any, rotary_sin: Any, interleaved: bool, queries: Array) -> _Rotary | None:
        """Read the arguments of a call."""
        if rotary_cos is None:
            return None
        dtypes = FLOAT_DTYPES if queries.dtype == _FP8 else (queries.dtype,)
        cos = read(rotary_cos, "rotary_cos", dtypes, ("seqlen_ro", "rotary_dim / 2"))
        sin = read(rotary_sin, "rotary_sin", (cos.dtype,), cos.shape)
        if 2 * cos.shape[1] > queries.shape[-1]:
            raise ValueError(
                f"rotary_cos: expected at most {queries.shape[-1] // 2} columns, half of the columns of q, "
                f"got {cos.shape[1]}"
            )
        if not len(cos.values):
            raise ValueError("rotary_cos: expected at least one row, got none")
        exact = np.float64 if queries.dtype == "float64" else np.float32
        return cls(cos.floats.astype(exact), sin.floats.astype(exact), interleaved)

    def apply(self, x: Floats, positions: NDArray[np.int64], dtype: str) -> Floats:
        """Rotate tokens `[n, heads, d]` by their positions `[n]`, and round them to the dtype."""
        at, half = np.clip(positions, 0, len(self.cos) - 1), self.cos.shape[1]
        cos, sin = self.cos[at, None], self.sin[at, None]
        if self.interleaved:
            one, other = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
        else:
            one, other = slice(half), slice(half, 2 * half)
        rotated = x.astype(cos.dtype)
        rotated[..., one], rotated[..., other] = (
            rotated[..., one] * cos - rotated[..., other] * sin,
            rotated[..., one] * sin + rotated[..., other] * cos,
        )
        if dtype == "bfloat16":
            return round_to_bf16(rotated).astype(np.float64)
        if dtype == _FP8:
            return decode_e4m3(encode_e4m3(rotated)).astype(np.float64)
        return rotated.astype(dtype).astype(np.float64)


def _is_local(
    causal: bool, window_size: Sequence[int | None], attention_chunk: int, capacity: int, longest: int
) -> bool:
    """Whether queries see different keys, so that each is rotated by its own position.

    A window that covers all keys of any request counts as none, as in FlashAttention-3.
    """
    left, right = (-1 if bound is None else bound for bound in window_size)
    return causal or attention_chunk > 0 or 0 <= left < capacity - 1 or 0 <= right < longest - 1
