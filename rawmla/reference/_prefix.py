"""Attention of new tokens over a paged cache of older ones and over themselves, written as it is defined."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..call.checks import as_softmax_scale
from ._arrays import (
    BYTE_DTYPES,
    E5M2_BYTE_DTYPES,
    FLOAT_DTYPES,
    INT_DTYPES,
    Array,
    Floats,
    check_groups,
    is_tensor,
    read,
    read_given,
    read_target,
    store,
)
from ._formats import decode_e4m3, decode_e5m2, encode_e4m3
from ._heads import Rules, attend, sinks_of, visible_keys

_DTYPES = ("bfloat16", "float16", "float32")
_FORMATS: dict[str, tuple[Any, Any]] = {
    **dict.fromkeys(("auto", "float16", "bfloat16"), (None, None)),
    **dict.fromkeys(("fp8", "fp8_e4m3"), (BYTE_DTYPES, decode_e4m3)),
    "fp8_e5m2": (E5M2_BYTE_DTYPES, decode_e5m2),
}
"""kv_cache_dtype -> dtypes of a cache, None for the dtype of q, and the function that decodes its bytes."""


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
    """Attention of new tokens over older ones and themselves as `rawmla.context_attention_fwd`, in float64.

    Arrays are float32 too, of any head dimension and page size. Rows of no request are not written.
    `max_seq_len` and `max_input_len` do not change what is computed. With `is_block_table_ptr` k_cache is an
    array in CPU memory, whose address is its `data_ptr()` in torch and `ctypes.data` in NumPy.

    Raises:
        TypeError, ValueError: dtypes and shapes that do not fit; k without v; ALiBi without `causal`.
        IndexError: b_loc is too narrow for a length, or names a page outside the cache, or an address at
            which no block starts.
    """
    if alibi_slopes is not None and not causal:
        raise ValueError("alibi_slopes: expected None with causal=False, got an array")
    if (k is None) != (v is None):
        missing, given = ("k", "v") if k is None else ("v", "k")
        raise ValueError(f"{missing}: expected an array, as {given} is one, or both None, got None")
    queries = read(q, "q", _DTYPES, ("tokens", "h_q", "d"))
    tokens, h_q, d = queries.shape
    cache = _Cache.of(
        k_cache, v_cache, kv_cache_dtype, (k_scale, v_scale), interleaved_v_pack_factor, queries
    )
    num_blocks, h_kv, _, block_size, _ = cache.k.shape
    check_groups(h_q, h_kv, "k_cache")
    own = []
    if k is not None:
        own = [read(x, name, (queries.dtype,), (tokens, h_kv, d)).floats for name, x in (("k", k), ("v", v))]
    seq_lens = read(b_seq_len, "b_seq_len", INT_DTYPES, ("b",)).values
    starts = read(b_start_loc, "b_start_loc", INT_DTYPES, (len(seq_lens) + 1,)).values
    table = read(b_loc, "b_loc", ("int32", "int64"), (len(seq_lens), "max_blocks")).values
    sink = sinks_of(read_given(sinks, "sinks", FLOAT_DTYPES, (h_q,)), h_q)
    given_slopes = read_given(alibi_slopes, "alibi_slopes", ("float32",), (h_q,))
    slopes = np.zeros(h_q) if given_slopes is None else given_slopes.floats
    out_scale = None if fp8_out_scale is None else _read_scale("fp8_out_scale", fp8_out_scale)
    out_dtypes = (queries.dtype,) if out_scale is None else BYTE_DTYPES
    target = read_target(o, "o", out_dtypes, queries.shape)

    query, window = queries.floats, sliding_window or 0
    scale = d**-0.5 if sm_scale is None else as_softmax_scale(sm_scale, "sm_scale")
    rules = Rules(scale, window - 1 if window > 0 else None, 0 if causal else None)
    for r, length in enumerate(seq_lens):
        start, end = int(starts[r]), int(starts[r + 1])
        query_len, seq_len = end - start, max(int(length), 0)
        if query_len < 1 or skip_decode and query_len == 1:
            continue
        ctx_len = max(seq_len - query_len, 0)
        total, cached = (ctx_len + query_len, ctx_len) if own else (seq_len, seq_len)
        keys, values = np.zeros((2, total, h_kv, d))
        positions = np.flatnonzero(visible_keys(query_len, total, ctx_len, rules)[:, :cached].any(0))
        entries = table[r, positions // block_size]
        blocks = _blocks(entries, k_cache if is_block_table_ptr else None, num_blocks)
        keys[positions], values[positions] = cache.tokens(blocks, positions % block_size)
        if own:
            keys[ctx_len:], values[ctx_len:] = (array[start:end] for array in own)
        result, _ = attend(query[start:end], keys, values, ctx_len, rules, slopes, sink)
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
        pack: tokens that are adjacent in V; 0: all tokens of a block.
    """

    k: NDArray[Any]
    v: NDArray[Any]
    decode: Any
    scales: tuple[float, float]
    pack: int

    @classmethod
    def of(
        cls, k_cache: Any, v_cache: Any, kv_cache_dtype: str, scales: tuple[Any, Any], pack: int, q: Array
    ) -> _Cache:
        """Read the arguments that say what the cache holds."""
        if kv_cache_dtype not in _FORMATS:
            raise ValueError(f"kv_cache_dtype: expected one of {', '.join(_FORMATS)}, got {kv_cache_dtype!r}")
        dtypes, decode = _FORMATS[kv_cache_dtype]
        dtypes = dtypes or (q.dtype,)
        d = q.shape[2]
        shape = ("num_blocks", "h_kv", f"{d} / x", "block_size", "x")
        k = read(k_cache, "k_cache", dtypes, shape).values
        num_blocks, h_kv, parts, block_size, x = k.shape
        if parts * x != d:
            raise ValueError(f"k_cache: expected shape [{', '.join(shape)}], got {list(k.shape)}")
        v = read(v_cache, "v_cache", dtypes, (num_blocks, h_kv, d, block_size)).values
        if pack < 0 or pack and block_size % pack:
            raise ValueError(
                f"interleaved_v_pack_factor: expected 0 or a divisor of the block_size {block_size}, got "
                f"{pack}"
            )
        if decode is None:
            return cls(k, v, None, (1.0, 1.0), pack)
        k_scale, v_scale = scales
        return cls(k, v, decode, (_read_scale("k_scale", k_scale), _read_scale("v_scale", v_scale)), pack)

    def tokens(self, pages: NDArray[np.int64], offsets: NDArray[np.int64]) -> tuple[Floats, Floats]:
        """Keys and values `[n, h_kv, d]` of n tokens."""
        num_blocks, h_kv, d, block_size = self.v.shape
        k = self.k.transpose(0, 3, 1, 2, 4)[pages, offsets].reshape(-1, h_kv, d)
        if self.pack:
            packed = self.v.reshape(num_blocks, h_kv, block_size // self.pack, d, self.pack)
            group, place = np.divmod(offsets, self.pack)
            v = packed.transpose(0, 2, 4, 1, 3)[pages, group, place]
        else:
            v = self.v.transpose(0, 3, 1, 2)[pages, offsets]
        if self.decode is not None:
            k, v = self.decode(k), self.decode(v)
        return k.astype(np.float64) * self.scales[0], v.astype(np.float64) * self.scales[1]


def _blocks(entries: NDArray[Any], k_cache: Any, num_blocks: int) -> NDArray[np.int64]:
    """The blocks that entries of a block table name.

    Args:
        k_cache: the array whose blocks' addresses entries above 0 are, None if they are numbers of blocks.
        num_blocks: its blocks.
    """
    blocks, rest = entries.astype(np.int64), np.zeros(len(entries), np.int64)
    if k_cache is not None:
        if is_tensor(k_cache):
            start, stride = k_cache.data_ptr(), k_cache.stride(0) * k_cache.element_size()
        else:
            start, stride = k_cache.ctypes.data, k_cache.strides[0]
        is_address = entries > 0
        blocks[is_address], rest[is_address] = np.divmod(blocks[is_address] - start, stride)
    wrong = (rest != 0) | (blocks < 0) | (blocks >= num_blocks)
    if wrong.any():
        raise IndexError(
            f"b_loc: expected blocks of k_cache, which has {num_blocks}, got entry {entries[wrong][0]}"
        )
    return blocks


def _read_scale(name: str, x: Any) -> float:
    """A scale: a number, or a float32 array of one."""
    if isinstance(x, (float, int)) and not isinstance(x, bool):
        return float(x)
    array = read(x, name, ("float32",))
    if array.shape not in ((), (1,)):
        raise ValueError(f"{name}: expected a number or shape [] or [1], got {list(array.shape)}")
    return float(array.values.reshape(()))
