"""Host side of paged prefix prefill: cuda_src/kernels/mha_forward.cu with keys in a paged cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple, cast

from .. import jit
from . import mha_combine
from .common import FLOAT_DTYPES, INT32_MAX, LOG2_E, ceil_div
from .division import divisor, exact_divisor
from .mha_combine import Combine, PreparedCombine, num_splits, state_bytes
from .mha_forward import (
    COUNTER_BYTES,
    GATHERED,
    MAX_MAPS,
    NO_BOUND,
    NO_MAP,
    PAGED_BY_TMA,
    PARAMS,
    WARPGROUP_ROWS,
    Pages,
    key_map,
    padded,
    query_map,
    spec,
    tile_of,
)

__all__ = ["CACHE_DTYPES", "PrefixPrefillAddresses", "PrefixPrefillCall", "PreparedPrefixPrefill", "specs"]

CACHE_DTYPES = ("same", "e4m3", "e5m2")
"""What a cache holds: values of the dtype of q, or FP8 bytes."""
PIECE_TOKENS = 16
"""Tokens of a page that are copied together: cuda_src/mha/paged_keys.cuh."""


class PrefixPrefillAddresses(NamedTuple):
    """The arrays of a call as device addresses; 0: not given."""

    q: int
    k: int
    v: int
    o: int
    k_cache: int
    v_cache: int
    block_table: int
    b_start_loc: int
    b_seq_len: int
    k_scale: int
    v_scale: int
    alibi_slopes: int
    sinks: int
    fp8_out_scale: int


class PrefixPrefillCall(NamedTuple):
    """What stays the same when a call is repeated on other arrays: sizes, and strides in elements.

    Strides of q, k, v and o are of the dimensions (token, head), those of q, k and v multiples of 16 bytes. k
    and v have the strides (0, 0) where the own tokens are read from the cache.
    """

    device: int
    dtype: str
    b: int
    h_q: int
    h_kv: int
    d: int
    tokens: int  # rows of q
    tokens_kv: int  # rows of k and v
    max_query_len: int
    q_strides: tuple[int, int]
    k_strides: tuple[int, int]
    v_strides: tuple[int, int]
    o_strides: tuple[int, int]
    o_is_aligned: bool  # its address and strides are multiples of 16 bytes
    own_from_cache: bool
    cache_dtype: str  # one of CACHE_DTYPES
    num_blocks: int
    block_size: int
    x: int  # dimensions that lie together in k_cache
    v_pack: int  # tokens that lie together in an interleaved v_cache; 0: not interleaved
    k_strides_cache: tuple[int, int]  # of the dimensions (block, head), in elements of the cache
    v_strides_cache: tuple[int, int]
    table_stride: int  # of the rows of block_table, in its elements
    table_columns: int
    table_bytes: int  # of an entry: 4 or 8
    table_has_pointers: bool
    softmax_scale: float
    window: int  # NO_BOUND: none; else a token sees so many tokens before itself (W - 1)
    causal: bool
    skip_decode: bool
    has_alibi: bool
    has_sinks: bool
    sink_dtype: str
    k_scale: float | None  # a number of the host; None: on the device, or 1 where there is no address
    v_scale: float | None
    fp8_out: bool
    fp8_out_scale: float | None


def specs(dtype: str, head_dims: Iterable[int]) -> list[jit.KernelSpec]:
    """The variants for head dimensions without ALiBi and FP8 output, and their combine.

    They read caches in the dtype of q in vLLM's layout, and e4m3 ones.
    """
    found: list[jit.KernelSpec] = []
    for d in head_dims:
        for pages in (Pages(PAGED_BY_TMA), Pages(GATHERED, CACHE_DTYPES.index("e4m3"))):
            for window in (False, True):
                found.append(spec(dtype, d, d, window, softcap=False, alibi=False, pages=pages))
        found.append(mha_combine.spec(dtype, padded(d)))
    return list(dict.fromkeys(found))


class PreparedPrefixPrefill:
    """The launch of a call.

    Attributes
    ----------
    scratch_bytes : int
        Size of the scratch that `launch` takes; 0: none.
    """

    scratch_bytes: int

    def __init__(self, call: PrefixPrefillCall, capturing: Callable[[], bool]) -> None:
        """Load the kernel; ``capturing`` as in `rawmla.jit.get_kernel`."""
        has_window = call.window < NO_BOUND
        self._by_tma = _tma_reaches(call)
        pages = Pages(
            PAGED_BY_TMA if self._by_tma and call.cache_dtype == "same" else GATHERED,
            CACHE_DTYPES.index(call.cache_dtype),
            call.fp8_out,
        )
        chosen = spec(
            call.dtype, call.d, call.d, has_window, softcap=False, alibi=call.has_alibi, pages=pages
        )
        kernel = jit.get_kernel(chosen, call.device, capturing=capturing)
        tile = tile_of(padded(call.d), padded(call.d), call.has_alibi, pages)
        tile_rows = tile.consumers * WARPGROUP_ROWS
        group = call.h_q // call.h_kv
        if group & (group - 1) or group > WARPGROUP_ROWS:
            group = 1
        heads = call.h_q // group
        most_tiles = heads * (ceil_div(call.tokens * group, tile_rows) + call.b)  # whatever the lengths are
        tiles = min(most_tiles, heads * call.b * ceil_div(call.max_query_len * group, tile_rows))
        sms = jit.device_info(call.device).sm_count
        table_tokens = call.table_columns * call.block_size
        seen = table_tokens + call.max_query_len
        if has_window:
            seen = min(seen, call.window + call.max_query_len)
        # The combine writes every row, also those that skip_decode leaves alone.
        split_bytes = state_bytes(call.h_q * call.tokens, padded(call.d))
        splits = num_splits(tiles, ceil_div(seen, tile.keys), sms, split_bytes)
        if call.skip_decode:
            splits = 1
        tiles *= splits
        # Loaded in any case, so that only dtypes, dimensions and flags decide which kernels a call needs.
        combine = _combine(call, splits, capturing)
        self._combine = combine if splits > 1 else None
        self._is_counted = tiles > sms
        self.scratch_bytes = COUNTER_BYTES if self._is_counted else 0
        if self._combine is not None:
            self.scratch_bytes = self._combine.scratch_bytes
        self._call = call
        self._group = group
        self._tile_keys = tile.keys
        self._out_by_rows = call.fp8_out or not call.o_is_aligned or call.d % 8 != 0
        self._maps: dict[tuple[int, ...], tuple[bytes, ...]] = {}
        magic, shift = divisor(call.block_size)
        inverse = bytes_shift = 0
        if call.table_has_pointers:
            itemsize = 2 if call.cache_dtype == "same" else 1
            inverse, bytes_shift = exact_divisor(call.k_strides_cache[0] * itemsize)
        factor = call.softmax_scale * LOG2_E
        params = PARAMS.pack(
            out_stride_b=0,
            out_stride_s=call.o_strides[0],
            out_stride_h=call.o_strides[1],
            lse_stride_b=0,
            lse_stride_h=call.tokens,
            accum_rows=call.h_q * call.tokens,
            table_stride=call.table_stride,
            k_stride_block=call.k_strides_cache[0],
            k_stride_head=call.k_strides_cache[1],
            v_stride_block=call.v_strides_cache[0],
            v_stride_head=call.v_strides_cache[1],
            b=call.b,
            heads=heads,
            log2_group=group.bit_length() - 1,
            heads_per_kv=heads // call.h_kv,
            d_v=call.d,
            out_by_rows=self._out_by_rows,
            seqlen_q=0,
            seqlen_k=min(table_tokens, NO_BOUND),
            total_q=call.tokens,
            total_k=call.tokens_kv,
            window_left=call.window,
            window_right=0 if call.causal else NO_BOUND,
            tiles_per_head=0,
            tiles=min(most_tiles * splits, INT32_MAX),
            splits=splits,
            section=heads,
            sink_dtype=FLOAT_DTYPES[call.sink_dtype] if call.has_sinks else 0,
            alibi_stride_b=0,
            num_blocks=call.num_blocks,
            block_size=call.block_size,
            block_magic=magic,
            block_shift=shift,
            block_bytes_inverse=inverse,
            block_bytes_shift=bytes_shift,
            table_entry=2 if call.table_has_pointers else int(call.table_bytes == 8),
            x=call.x,
            v_pack=call.v_pack,
            cache_by_tma=self._by_tma,
            own_in_cache=call.own_from_cache,
            skip_decode=call.skip_decode,
            softmax_scale_log2=1.0 if call.has_alibi else factor,
            score_scale=1.0,
            score_factor=factor,
            k_scale_value=1.0 if call.k_scale is None else call.k_scale,
            v_scale_value=1.0 if call.v_scale is None else call.v_scale,
            out_scale_value=1.0 if call.fp8_out_scale is None else call.fp8_out_scale,
        )
        self._launch = kernel.prepare(
            (min(tiles, sms), 1, 1), params, PARAMS.changing, pdl=not self._is_counted
        ).launch

    def launch(self, stream: int, addresses: tuple[int, ...], scratch: int) -> None:
        """Enqueue the kernel; before it the clearing of a counter, or behind it the combine, where needed.

        ``addresses`` has the order of `PrefixPrefillAddresses`. ``scratch`` is the address of 16-byte aligned
        scratch, or 0.
        """
        (
            q, k, v, o, k_cache, v_cache, block_table, b_start_loc, b_seq_len, k_scale, v_scale, alibi_slopes,
            sinks, out_scale,
        ) = addresses  # fmt: skip
        arrays = q, k, v, o, k_cache, v_cache
        maps = self._maps.get(arrays) or self._encode(arrays)
        counter = o_accum = lse_accum = 0
        if self._is_counted:
            counter = scratch
            jit.clear(counter, COUNTER_BYTES, stream, self._call.device)
        if self._combine is not None:
            o_accum, lse_accum = self._combine.places(scratch)
        self._launch(
            stream, *maps, o, 0, b_start_loc, 0, 0, b_seq_len, sinks, alibi_slopes, block_table, k_cache,
            v_cache, k_scale, v_scale, out_scale, o_accum, lse_accum, counter,
        )  # fmt: skip
        if self._combine is not None:
            self._combine.launch(stream, scratch, o, 0, b_start_loc, sinks, out_scale)

    def _encode(self, arrays: tuple[int, ...]) -> tuple[bytes, ...]:
        """The tensor maps of a call's arrays, in the order of the kernel's parameters."""
        call = self._call
        dtype = cast(Literal["bfloat16", "float16"], call.dtype)
        q, k, v, o, k_cache, v_cache = arrays
        size, d = call.block_size, call.d
        k_block, k_head = call.k_strides_cache
        v_block, v_head = call.v_strides_cache

        def of_queries(address: int, strides: tuple[int, int]) -> bytes:
            return query_map(address, dtype, d, self._group, call.h_q, call.tokens, 1, (0, *strides))

        def of_keys(address: int, strides: tuple[int, int]) -> bytes:
            if call.own_from_cache:
                return NO_MAP
            return key_map(address, dtype, d, self._tile_keys, call.h_kv, call.tokens_kv, 1, (0, *strides))

        k_pages = v_pages = NO_MAP
        if self._by_tma:
            # Pieces of FP8 caches are converted, and not swizzled before.
            is_fp8 = call.cache_dtype != "same"
            of_cache: Literal["bfloat16", "float16", "uint8"] = "uint8" if is_fp8 else dtype
            together = _dims_together(call)
            step = 16 // together
            k_pages = jit.tensor_map(
                k_cache,
                of_cache,
                (together * size, d // together, call.h_kv, call.num_blocks),
                (16 * size, step * k_head, step * k_block),
                (together * PIECE_TOKENS, padded(d) // together, 1, 1),
                "none",
                "256b",
            )
            v_pages = jit.tensor_map(
                v_cache,
                of_cache,
                (size, d, call.h_kv, call.num_blocks),
                (step * size, step * v_head, step * v_block),
                (PIECE_TOKENS, padded(d), 1, 1),
                "none" if is_fp8 else "32b",
                "256b",
            )
        if len(self._maps) >= MAX_MAPS:
            self._maps.clear()
        maps = self._maps[arrays] = (
            of_queries(q, call.q_strides),
            of_keys(k, call.k_strides),
            of_keys(v, call.v_strides),
            NO_MAP if self._out_by_rows else of_queries(o, call.o_strides),
            k_pages,
            v_pages,
        )
        return maps


def _combine(call: PrefixPrefillCall, splits: int, capturing: Callable[[], bool]) -> PreparedCombine:
    combine = Combine(
        device=call.device,
        dtype=call.dtype,
        splits=splits,
        b=call.b,
        heads=call.h_q,
        seqlen_q=call.tokens,
        rows=call.h_q * call.tokens,
        d_v=call.d,
        d_accum=padded(call.d),
        out_strides=(0, *call.o_strides),
        sink_dtype=call.sink_dtype if call.has_sinks else "float32",
        out_fp8=call.fp8_out,
        out_scale=call.fp8_out_scale,
    )
    return PreparedCombine(combine, capturing)


def _tma_reaches(call: PrefixPrefillCall) -> bool:
    """Whether TMA can copy the cache's pages as they lie: cuda_src/mha/paged_keys.cuh."""
    together = _dims_together(call)
    return (
        call.x == together
        and call.d % together == 0
        and call.v_pack == 0
        and call.block_size % PIECE_TOKENS == 0
        and call.num_blocks > 0
        and not any(stride % together for stride in call.k_strides_cache + call.v_strides_cache)
    )


def _dims_together(call: PrefixPrefillCall) -> int:
    """Elements of the cache in 16 bytes."""
    return 8 if call.cache_dtype == "same" else 16
