"""Attention of new tokens over a paged cache of older ones and over themselves, written as it is defined."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..call.checks import as_bool, as_int, as_softmax_scale
from ._arrays import (
    BYTE_DTYPES,
    E5M2_BYTE_DTYPES,
    Array,
    check_dtype,
    check_target,
    check_vector,
    is_tensor,
    read,
    store,
)
from ._cache import decode_e4m3, decode_e5m2, encode_e4m3
from ._mha import Rules, attend, read_sink, visible_keys

_DTYPES = ("bfloat16", "float16", "float32")
_PLAIN = ("auto", "float16", "bfloat16")
_FP8 = {"fp8": BYTE_DTYPES, "fp8_e4m3": BYTE_DTYPES, "fp8_e5m2": E5M2_BYTE_DTYPES}


def context_attention_fwd(
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    kv_cache_dtype: str,
    k_cache: Any,
    v_cache: Any,
    b_loc: Any,
    b_start_loc: Any,
    b_seq_len: Any,
    max_seq_len: int | None,
    max_input_len: int,
    k_scale: Any,
    v_scale: Any,
    alibi_slopes: Any = None,
    sliding_window: int | None = None,
    sm_scale: float | None = None,
    skip_decode: bool = False,
    fp8_out_scale: Any = None,
    sinks: Any = None,
    is_block_table_ptr: bool = False,
    interleaved_v_pack_factor: int = 0,
    causal: bool = True,
) -> Any:
    """Attention of each request's new tokens over its older ones, in a paged cache, and over themselves.

    Request r has the rows `b_start_loc[r] .. b_start_loc[r + 1] - 1` of q, query_len of them, and
    `ctx_len = max(b_seq_len[r] - query_len, 0)` older tokens. Its key at position t is token
    `t % block_size` of page `b_loc[r, t // block_size]` for t < ctx_len, and row
    `b_start_loc[r] + t - ctx_len` of k and v from there on. Query j is at position u = ctx_len + j and sees
    the keys t <= u. Query head h reads KV head `h // (h_q // h_kv)`.

    Args:
        q: `[tokens, h_q, d]`.
        k, v: `[tokens, h_kv, d]`. Both None: all keys are read from the cache, by their positions; those from
            b_seq_len on do not exist.
        o: `[tokens, h_q, d]`, receives the result; rows of no request are not written. With fp8_out_scale
            it is float8_e4m3fn or bytes.
        kv_cache_dtype: "auto", "float16", "bfloat16": the caches are numbers. "fp8", "fp8_e4m3", "fp8_e5m2":
            they are float8 or bytes, and a value is the float8 number times `k_scale` or `v_scale`.
        k_cache: `[num_blocks, h_kv, d / x, block_size, x]`.
        v_cache: `[num_blocks, h_kv, d, block_size]`.
        b_loc: integers `[b, max_blocks]`. Entries of pages that no query sees are not looked at.
        b_start_loc, b_seq_len: integers `[b + 1]` and `[b]`.
        max_seq_len, max_input_len: upper bounds of lengths; they do not change what is computed. The first
            may be None.
        k_scale, v_scale: numbers, or arrays of one; ignored for a cache of numbers.
        alibi_slopes: `[h_q]`; `slope * (t - u)` is added to a score. Needs `causal`.
        sliding_window: W > 0: a query sees only keys with `u - t < W`.
        sm_scale: factor on the products, `d ** -0.5` when None.
        skip_decode: rows of requests with one query are not written.
        fp8_out_scale: a number, or an array of one: o is the e4m3 number nearest to out / scale, at most 448.
        sinks: `[h_q]`; `exp(sink)` is one more term of a head's denominator.
        is_block_table_ptr: entries of b_loc above 0 are addresses in bytes: that of block n of k_cache is the
            address of its first element, `data_ptr()` in torch and `ctypes.data` in NumPy, plus n strides of
            the first dimension. So k_cache itself has to be an array in CPU memory here. V is read from the
            block of the same number. Other entries are numbers of blocks, as without.
        interleaved_v_pack_factor: y > 0: the memory of a block and head of v_cache is
            `[block_size / y, d, y]`, under the shape of above.
        causal: False: a query sees all new tokens of its request.

    Returns:
        o.

    Raises:
        TypeError: an argument of the wrong kind or dtype.
        ValueError: shapes that do not fit; k without v; "auto" and its like with a cache of bytes; ALiBi
            without `causal`.
        IndexError: b_loc is too narrow for a length, or names a page outside the cache, or an address at
            which no block starts.
    """
    causal, skip_decode = as_bool("causal", causal), as_bool("skip_decode", skip_decode)
    if max_seq_len is not None:
        as_int("max_seq_len", max_seq_len)
    as_int("max_input_len", max_input_len)
    window = 0 if sliding_window is None else as_int("sliding_window", sliding_window)
    if alibi_slopes is not None and not causal:
        raise ValueError("alibi_slopes: expected None with causal=False, got an array")
    if (k is None) != (v is None):
        missing, given = ("k", "v") if k is None else ("v", "k")
        raise ValueError(f"{missing}: expected an array, as {given} is one, or both None, got None")

    queries = read(q, "q")
    check_dtype("q", queries, _DTYPES)
    if len(queries.shape) != 3 or not queries.shape[2]:
        raise ValueError(f"q: expected shape [tokens, h_q, d], got {list(queries.shape)}")
    tokens, h_q, d = queries.shape
    caches = (read(k_cache, "k_cache"), read(v_cache, "v_cache"))
    cache = _Cache.of(caches, kv_cache_dtype, (k_scale, v_scale), interleaved_v_pack_factor, queries)
    if not h_q or h_q % cache.h_kv:
        raise ValueError(
            f"q: expected h_q to be a positive multiple of the h_kv of k_cache, got h_q {h_q} and h_kv "
            f"{cache.h_kv}"
        )
    own = []
    for name, x in (("k", k), ("v", v)):
        if x is not None:
            array = read(x, name)
            check_dtype(name, array, (queries.dtype,), ", that of q")
            if array.shape != (tokens, cache.h_kv, d):
                raise ValueError(f"{name}: expected shape {[tokens, cache.h_kv, d]}, got {list(array.shape)}")
            own.append(array.values.astype(np.float64))
    seq_lens = read(b_seq_len, "b_seq_len")
    b = seq_lens.shape[0] if seq_lens.shape else 0
    check_vector("b_seq_len", seq_lens, b, "requests")
    start_loc = read(b_start_loc, "b_start_loc")
    check_vector("b_start_loc", start_loc, b + 1, "b is that of b_seq_len, and 1")
    table = read(b_loc, "b_loc")
    check_dtype("b_loc", table, ("int32", "int64"))
    if len(table.shape) != 2 or table.shape[0] != b:
        raise ValueError(
            f"b_loc: expected shape [{b}, max_blocks] (b is that of b_seq_len), got {list(table.shape)}"
        )
    blocks = _Blocks(k_cache if as_bool("is_block_table_ptr", is_block_table_ptr) else None, cache.num_blocks)
    sink = read_sink("sinks", sinks, h_q)
    slopes = np.zeros(h_q)
    if alibi_slopes is not None:
        given_slopes = read(alibi_slopes, "alibi_slopes")
        check_vector("alibi_slopes", given_slopes, h_q, "h_q is that of q", ("float32",))
        slopes = given_slopes.values.astype(np.float64)
    out_scale = None if fp8_out_scale is None else _read_scale("fp8_out_scale", fp8_out_scale)
    check_target(o, "o")
    target = read(o, "o")
    if out_scale is None:
        check_dtype("o", target, (queries.dtype,), ", that of q")
    else:
        check_dtype("o", target, BYTE_DTYPES, " with fp8_out_scale")
    if target.shape != queries.shape:
        raise ValueError(f"o: expected shape {list(queries.shape)}, that of q, got {list(target.shape)}")

    scale = d**-0.5 if sm_scale is None else as_softmax_scale(sm_scale, "sm_scale")
    rules = Rules(scale, window - 1 if window > 0 else None, 0 if causal else None)
    for r in range(b):
        start, end = int(start_loc.values[r]), int(start_loc.values[r + 1])
        query_len, seq_len = end - start, max(int(seq_lens.values[r]), 0)
        if query_len < 1 or skip_decode and query_len == 1:
            continue
        ctx_len = max(seq_len - query_len, 0)
        total, cached = (ctx_len + query_len, ctx_len) if own else (seq_len, seq_len)
        keys, values = np.zeros((2, total, cache.h_kv, d))
        visible = visible_keys(query_len, total, ctx_len, rules)
        positions = np.flatnonzero(visible[:, :cached].any(0))
        entries = table.values[r, positions // cache.block_size]
        pages = np.array([blocks.number(int(entry)) for entry in entries], np.int64)
        keys[positions], values[positions] = cache.tokens(pages, positions % cache.block_size)
        if own:
            keys[ctx_len:], values[ctx_len:] = (array[start:end] for array in own)
        result = np.zeros((query_len, h_q, d))
        for h in range(h_q):
            h_kv = h // (h_q // cache.h_kv)
            result[:, h], _ = attend(
                queries.values[start:end, h].astype(np.float64),
                keys[:, h_kv],
                values[:, h_kv],
                ctx_len,
                rules,
                float(slopes[h]),
                None if sink is None else float(sink.values[h]),
            )
        if out_scale is None:
            store(o, slice(start, end), result)
        else:
            target.values[start:end] = encode_e4m3(result / out_scale)
    return o


class _Cache(NamedTuple):
    """The paged keys and values.

    Attributes:
        k, v: the arrays of the caller.
        decode: what makes numbers of bytes, None if they are numbers.
        scales: factors of k and v, 1 if they are numbers.
        pack: tokens that lie side by side in V; 0: all of a block.
    """

    k: NDArray[Any]
    v: NDArray[Any]
    decode: Any
    scales: tuple[float, float]
    pack: int

    @classmethod
    def of(
        cls, caches: tuple[Array, Array], kv_cache_dtype: str, scales: tuple[Any, Any], pack: int, q: Array
    ) -> _Cache:
        """Check the arguments that say what the cache holds."""
        if not isinstance(kv_cache_dtype, str):
            raise TypeError(f"kv_cache_dtype: expected a str, got {type(kv_cache_dtype).__name__}")
        if kv_cache_dtype not in (*_PLAIN, *_FP8):
            raise ValueError(
                f"kv_cache_dtype: expected one of {', '.join((*_PLAIN, *_FP8))}, got {kv_cache_dtype!r}"
            )
        is_fp8 = kv_cache_dtype in _FP8
        note = f" with kv_cache_dtype {kv_cache_dtype!r}"
        for name, cache in zip(("k_cache", "v_cache"), caches, strict=True):
            if not is_fp8 and cache.dtype in (*BYTE_DTYPES, *E5M2_BYTE_DTYPES):
                raise ValueError(
                    f"kv_cache_dtype: expected {', '.join(_FP8)} for a {name} of {cache.dtype}, got "
                    f"{kv_cache_dtype!r}"
                )
            check_dtype(name, cache, _FP8[kv_cache_dtype] if is_fp8 else (q.dtype,), note)
        k, v = (cache.values for cache in caches)
        d = q.shape[2]
        if k.ndim != 5 or not all(k.shape[1:]) or k.shape[2] * k.shape[4] != d:
            raise ValueError(
                f"k_cache: expected shape [num_blocks, h_kv, {d} / x, block_size, x] (d is that of q), got "
                f"{list(k.shape)}"
            )
        num_blocks, h_kv, _, block_size, _ = k.shape
        if v.shape != (num_blocks, h_kv, d, block_size):
            raise ValueError(
                f"v_cache: expected shape {[num_blocks, h_kv, d, block_size]}, as k_cache has, got "
                f"{list(v.shape)}"
            )
        pack = as_int("interleaved_v_pack_factor", pack)
        if pack < 0 or pack and block_size % pack:
            raise ValueError(
                f"interleaved_v_pack_factor: expected 0 or a divisor of the block_size {block_size}, got "
                f"{pack}"
            )
        if not is_fp8:
            return cls(k, v, None, (1.0, 1.0), pack)
        k_scale, v_scale = (
            _read_scale(name, x) for name, x in zip(("k_scale", "v_scale"), scales, strict=True)
        )
        decode = decode_e5m2 if kv_cache_dtype == "fp8_e5m2" else decode_e4m3
        return cls(k, v, decode, (k_scale, v_scale), pack)

    @property
    def num_blocks(self) -> int:
        """Pages."""
        return self.k.shape[0]

    @property
    def h_kv(self) -> int:
        """KV heads."""
        return self.k.shape[1]

    @property
    def block_size(self) -> int:
        """Tokens per page."""
        return self.k.shape[3]

    def tokens(
        self, pages: NDArray[np.int64], offsets: NDArray[np.int64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Keys and values `[n, h_kv, d]` of n tokens."""
        d = self.v.shape[2]
        k = self.k[pages, :, :, offsets].reshape(len(pages), self.h_kv, d)
        if self.pack:
            # Where [block_size / pack, d, pack] holds column c of a token, and what that place is called
            # in [d, block_size].
            group, place = np.divmod(offsets[:, None], self.pack)
            flat = (group * d + np.arange(d)) * self.pack + place
            v = self.v[pages[:, None], :, flat // self.block_size, flat % self.block_size].swapaxes(1, 2)
        else:
            v = self.v[pages, :, :, offsets]
        if self.decode is not None:
            k, v = self.decode(k), self.decode(v)
        return k.astype(np.float64) * self.scales[0], v.astype(np.float64) * self.scales[1]


class _Blocks:
    """What entries of the block table mean.

    Args:
        k_cache: the array whose blocks' addresses entries above 0 are, None if they are numbers of blocks.
        num_blocks: its blocks.
    """

    def __init__(self, k_cache: Any, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._start = None
        if k_cache is None:
            return
        check_target(k_cache, "k_cache")
        if is_tensor(k_cache):
            self._start, self._stride = k_cache.data_ptr(), k_cache.stride(0) * k_cache.element_size()
        else:
            self._start, self._stride = k_cache.ctypes.data, k_cache.strides[0]

    def number(self, entry: int) -> int:
        """The block of an entry."""
        block, rest = entry, 0
        if self._start is not None and entry > 0:
            block, rest = divmod(entry - self._start, self._stride)
        if rest or not 0 <= block < self._num_blocks:
            raise IndexError(
                f"b_loc: expected blocks of k_cache, which has {self._num_blocks}, got entry {entry}"
            )
        return block


def _read_scale(name: str, x: Any) -> float:
    """A scale: a number, or a float32 array of one."""
    if isinstance(x, (float, int)) and not isinstance(x, bool):
        return float(x)
    array = read(x, name)
    check_dtype(name, array, ("float32",))
    if array.shape not in ((), (1,)):
        raise ValueError(f"{name}: expected a number or shape [] or [1], got {list(array.shape)}")
    return float(array.values.reshape(()))
