"""Host side of cuda_src/kernels/mha_forward.cu: multi-head attention, forward, over arrays or a paged cache,
or with functions of the user's and lists of blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import jit
from ..jit.params import F32, I32, I64, POINTER, TENSOR_MAP, U32, ParamStruct, bytes_type, changing
from .block_mask import NO_LISTS, BlockLists
from .common import FLOAT_DTYPES, INT32_MAX, LOG2_E, ceil_div, divisor, fields, padded, stride_params
from .mha_combine import PreparedCombine, num_splits, state_bytes
from .mha_forward_variants import (
    WARPGROUP_ROWS,
    Tile,
    box_rows,
    flex_spec,
    is_slow,
    pages_of,
    rows_spec,
    spec,
    tile_in_blocks,
    tile_of,
)
from .paged_cache import PagedCache, cache_params, page_maps
from .tensor_maps import NO_MAP, TensorMaps, head_map

if TYPE_CHECKING:
    from .mha_backward import BackwardCall

NO_BOUND = 2**30
"""A window without a bound on that side, and more tokens than a request may have."""
_SECTION_BYTES = 32 * 2**20
"""K and V of the heads that are processed together, so that they stay in L2."""
_COUNTER_BYTES = 16


class Mods(NamedTuple):
    """Functions of scores and masks, and the blocks that they are called for."""

    header: tuple[str, str]  # name and text
    has_score_mod: bool
    score_mod_bytes: int
    mask_mod_bytes: int
    lists: BlockLists | None  # None: all keys are attended
    states: tuple[int, int, int, int] | None
    """For re-blocked lists: rows and columns of the given blocks, and tokens and keys of a block."""
    max_scores: bool


class RowCache(NamedTuple):
    """A cache whose tokens are rows, in place of k and v: cuda_src/mha/row_pages.cuh. The strides of k and v
    are of its dimensions (block, token, head).
    """

    num_blocks: int
    block_size: int
    paged: bool  # there is a block table, and block_size is a multiple of PAGE_ROWS
    table_rows: int
    table_stride: int
    seqlen_new: int  # tokens of each request that the lengths of the cache leave out
    total_new: int  # of their array
    skip_tokens: int  # the most query tokens of a request that has no results
    is_whole: bool  # keys are not split
    runs_beside: bool  # starts before mha_decode.cu ends

    def in_pieces(self, tile_keys: int) -> bool:
        """Whether a block may have only a part of the keys of a tile."""
        return self.paged and self.block_size % tile_keys > 0


class MhaForwardCall(NamedTuple):
    """The facts of a call that stay the same on other arrays: sizes, and strides in elements.

    Strides are of the dimensions (batch, token, head), multiples of 8, and 0 for a broadcast dimension. With
    `varlen` the requests are segments of one array, and the strides of the batch are not used. Lengths
    belong to the longest request, without the tokens in a cache. `total_q` and `total_k` are the tokens of
    the arrays, of one request without `varlen`.
    """

    device: int
    dtype: str
    b: int
    k_batches: int  # of k and v: b or 1
    h_q: int
    h_kv: int
    d_qk: int
    d_v: int
    varlen: bool
    max_seqlen_q: int
    max_seqlen_k: int
    total_q: int
    total_k: int
    q_strides: tuple[int, int, int]
    k_strides: tuple[int, int, int]
    v_strides: tuple[int, int, int]
    out_strides: tuple[int, int, int]
    lse_strides: tuple[int, int]  # of the dimensions (batch, head); tokens are contiguous
    softmax_scale: float
    window_left: int = NO_BOUND
    window_right: int = NO_BOUND  # 0: causal
    softcap: float = 0.0  # 0: none
    sink_dtype: str | None = None  # None: there are no sinks
    has_alibi: bool = False
    alibi_stride_b: int = 0  # of the slopes; 0 where all requests have the same
    out_is_aligned: bool = True  # its address and strides are multiples of 16 bytes
    cache: PagedCache | None = None
    mods: Mods | None = None
    rows: RowCache | None = None  # max_seqlen_k is then the tokens that a request can have


class MhaForwardAddresses(NamedTuple):
    """The arrays of a call as device addresses; 0: not given."""

    q: int
    k: int
    v: int
    out: int
    lse: int
    cu_seqlens_q: int = 0
    cu_seqlens_k: int = 0
    seqused_q: int = 0
    seqused_k: int = 0  # with a cache the tokens of each request, those in the cache too
    attn_sink: int = 0
    alibi_slopes: int = 0
    block_table: int = 0
    k_cache: int = 0
    v_cache: int = 0
    k_scale: int = 0
    v_scale: int = 0
    out_scale: int = 0


class RowCacheAddresses(NamedTuple):
    """Further arrays of a call with a `RowCache`, which are the last."""

    cache_batch_idx: int
    cu_seqlens_new: int


class ModAddresses(NamedTuple):
    """Further arrays of a call with `Mods`."""

    max_scores: int
    kv_num_blocks: int
    kv_indices: int
    full_kv_num_blocks: int
    full_kv_indices: int
    states: int


_MAPS = ("q_map", "k_map", "v_map", "out_map", "k_pages_map", "v_pages_map")
_NOT_GIVEN = (0,) * len(MhaForwardAddresses._fields)
_POINTERS = (*MhaForwardAddresses._fields[3:], "o_accum", "lse_accum", "counter")


@cache
def params_of(mod_bytes: tuple[int, int] | None = None, has_rows: bool = False) -> ParamStruct:
    """Params of cuda_src/mha/params.cuh; ``mod_bytes``: of the parameters of score_mod and mask_mod;
    ``has_rows``: for a cache of rows.
    """
    first = [*TENSOR_MAP(*_MAPS), *POINTER(*_POINTERS)]
    of_lists = []
    if mod_bytes is not None:
        score, mask = mod_bytes
        first += POINTER(*ModAddresses._fields)
        first += bytes_type("ScoreMod", score)("score_mod") + bytes_type("MaskMod", mask)("mask_mod")
        of_lists = [
            *I64("counts_strides", "lists_strides", length=6),
            *I32("list_columns", length=2),
            *I32("mask_batches", "mask_heads", "block_q", "block_k", "block_tiles"),
            *I32("last_block_is_cut", "k_batches"),
            *I32("state_rows", "state_columns", "state_q", "state_k"),
        ]
    if has_rows:
        first += POINTER(*RowCacheAddresses._fields)
        of_lists = I32("table_rows", "seqlen_new", "total_new", "runs_beside")
    return ParamStruct(
        changing(first),
        I64("out_stride_b", "out_stride_s", "out_stride_h"),
        I64("lse_stride_b", "lse_stride_h", "accum_rows"),
        I64("table_stride"),
        I64("k_stride_block", "k_stride_head", "v_stride_block", "v_stride_head"),
        I32("b", "heads", "log2_group", "heads_per_kv", "d_v", "out_by_rows"),
        I32("seqlen_q", "seqlen_k", "total_q", "total_k"),
        I32("window_left", "window_right"),
        I32("tiles_per_head", "tiles", "splits", "section", "sink_dtype", "alibi_stride_b"),
        I32("num_blocks", "block_size"),
        U32("block_magic", "block_bytes_inverse"),
        I32("block_shift", "block_bytes_shift", "table_entry", "x", "v_pack"),
        I32("cache_by_tma", "own_in_cache", "skip_tokens"),
        F32("softmax_scale_log2", "score_scale", "score_factor"),
        F32("k_scale_value", "v_scale_value", "out_scale_value"),
        of_lists,
    )


class PreparedMhaForward:
    """The launch of a call, which takes ``scratch_bytes`` of scratch; 0: none."""

    def __init__(self, call: MhaForwardCall, capturing: Callable[[], bool]) -> None:
        """Load the kernel; ``capturing`` as in `rawmla.jit.get_kernel`."""
        cache, mods = call.cache, call.mods
        kernel, tile, group = _load(call, capturing)
        self._call = call
        out_by_rows = call.d_v % 8 != 0 or not call.out_is_aligned or bool(cache and cache.out_fp8)
        heads = call.h_q // group
        tiles_per_head = ceil_div(call.max_seqlen_q * group, tile.rows)
        tiles = heads * tiles_per_head * call.b
        most_tiles = tiles  # whatever the lengths are
        if call.varlen:
            most_tiles = heads * (ceil_div(call.total_q * group, tile.rows) + call.b)
            tiles = min(tiles, most_tiles)
        sms = jit.device_info(call.device).sm_count
        splits, self._combine = 1, None
        if mods is None or not mods.max_scores:
            splits = _splits(call, tiles, tile.keys, sms)
            # Loaded in any case, so that lengths do not decide whether a call needs it.
            combine = PreparedCombine(call, splits, _rows(call), capturing)
            self._combine = combine if splits > 1 else None
        tiles *= splits
        bounded = min(call.window_left, call.window_right) < NO_BOUND
        unequal = call.varlen or bounded or mods is not None
        self._is_counted = unequal and tiles > sms
        self.scratch_bytes = _COUNTER_BYTES if self._is_counted else 0
        if self._combine is not None:
            self.scratch_bytes = self._combine.scratch_bytes
        rows = call.rows
        declared = params_of(mods and (mods.score_mod_bytes, mods.mask_mod_bytes), rows is not None)
        params = declared.pack(
            **stride_params(out=call.out_strides),
            lse_stride_b=call.lse_strides[0],
            lse_stride_h=call.lse_strides[1],
            accum_rows=_rows(call),
            **fields(call, "b", "d_v", "total_q", "total_k", "window_left", "window_right", "alibi_stride_b"),
            heads=heads,
            log2_group=group.bit_length() - 1,
            heads_per_kv=heads // call.h_kv,
            out_by_rows=out_by_rows,
            seqlen_q=call.max_seqlen_q,
            seqlen_k=min(cache.tokens, NO_BOUND) if cache else call.max_seqlen_k,
            tiles_per_head=tiles_per_head,
            tiles=min(most_tiles * splits, INT32_MAX),
            splits=splits,
            section=_section(call, heads) if unequal else 1,
            sink_dtype=FLOAT_DTYPES[call.sink_dtype] if call.sink_dtype else 0,
            **scale_params(call),
            **(cache_params(cache, call.d_v) | ({} if rows is None else _row_params(rows))),
            skip_tokens=rows.skip_tokens if rows else int(bool(cache and cache.skip_decode)),
            **({} if mods is None else _mod_params(call, mods, tile.keys)),
        )
        # By the addresses of q, k, v, out and the caches.
        self._maps = TensorMaps(partial(_maps, call, group, tile.keys, out_by_rows))
        # What functions read may be loaded ahead of griddepcontrol.wait: nothing overlaps the kernel before.
        pdl = mods is None and (not self._is_counted or rows is not None)
        self._launch = kernel.prepare((min(tiles, sms), 1, 1), params, declared.changing, pdl=pdl).launch

    def launch(self, stream: int, addresses: tuple[int, ...], scratch: int, *of_mods: Any) -> None:
        """Enqueue the kernel; before it the clearing of a counter, or after it the combine, where needed.

        Arguments as of `attend`.
        """
        self.begin(stream, scratch)
        self.attend(stream, addresses, scratch, *of_mods)

    def begin(self, stream: int, scratch: int) -> None:
        """Enqueue the clearing of a counter, where needed."""
        if self._is_counted:
            jit.clear(scratch, _COUNTER_BYTES, stream, self._call.device)

    def attend(self, stream: int, addresses: tuple[int, ...], scratch: int, *of_mods: Any) -> None:
        """Enqueue the kernel some time after `begin`, and the combine, where needed.

        ``addresses`` has the order of `MhaForwardAddresses`; the last ones may be missing. ``scratch`` is the
        address of 16-byte aligned scratch, or 0. ``of_mods``: with `Mods`, the addresses in the order of
        `ModAddresses`, and the parameters of score_mod and mask_mod, of `rawmla.flex.mods.Form.pack`.
        """
        addresses += _NOT_GIVEN[len(addresses) :]
        arrays = addresses[:4] if self._call.cache is None else (*addresses[:4], *addresses[12:14])
        maps = self._maps[arrays]
        counter = scratch if self._is_counted else 0
        o_accum = lse_accum = 0
        if self._combine is not None:
            o_accum, lse_accum = self._combine.places(scratch)
        self._launch(stream, *maps, *addresses[3:], o_accum, lse_accum, counter, *of_mods)
        if self._combine is not None:
            given = MhaForwardAddresses(*addresses)
            self._combine.launch(
                stream, scratch, given.out, given.lse, given.cu_seqlens_q, given.attn_sink, given.out_scale
            )


def _maps(
    call: MhaForwardCall, group: int, tile_keys: int, out_by_rows: bool, arrays: tuple[int, ...]
) -> tuple[bytes, ...]:
    """The tensor maps of a call's arrays, in the order of the kernel's parameters."""
    cache = call.cache
    q_batches, k_batches = (1, 1) if call.varlen else (call.b, call.k_batches)

    def of_queries(address: int, d: int, strides: tuple[int, int, int]) -> bytes:
        rows = WARPGROUP_ROWS
        return head_map(address, call.dtype, d, rows, call.h_q, call.total_q, q_batches, strides, group)

    def of_keys(address: int, d: int, strides: tuple[int, int, int]) -> bytes:
        if call.rows is not None:
            box, tokens = box_rows(tile_keys, call.rows.in_pieces(tile_keys)), call.rows.block_size
            return head_map(address, call.dtype, d, box, call.h_kv, tokens, call.rows.num_blocks, strides)
        if cache is not None and cache.own_in_cache:
            return NO_MAP
        tokens = max(1, call.total_k)
        return head_map(address, call.dtype, d, tile_keys, call.h_kv, tokens, k_batches, strides)

    q, k, v, out, *caches = arrays
    if not call.total_k:  # nothing is read through these maps, but there is no map of nothing
        k = v = q
    of_pages = NO_MAP, NO_MAP
    if cache is not None:
        of_pages = page_maps(cache, call.dtype, call.h_kv, call.d_v, padded(call.d_v), *caches)
    return (
        of_queries(q, call.d_qk, call.q_strides),
        of_keys(k, call.d_qk, call.k_strides),
        of_keys(v, call.d_v, call.v_strides),
        NO_MAP if out_by_rows else of_queries(out, call.d_v, call.out_strides),
        *of_pages,
    )


def _load(call: MhaForwardCall, capturing: Callable[[], bool]) -> tuple[jit.Kernel, Tile, int]:
    """The kernel of a call, its tile, and how many query heads share one."""
    options, mods = (call.dtype, call.d_qk, call.d_v), call.mods
    if mods is not None:
        tile = tile_in_blocks(call.d_qk, call.d_v)
        group = _heads_in_a_tile(call, tile.rows)
        more = mods.max_scores, mods.header, group > 1
        chosen = flex_spec(*options, tile.keys, *more)
        if is_slow(chosen, call.device, capturing, lambda built: bool(built.losses)):
            # The functions need more registers than are left.
            tile = tile._replace(keys=tile.keys // 2)
            chosen = flex_spec(*options, tile.keys, *more)
    else:
        changes_scores = call.softcap > 0, call.has_alibi
        pages = pages_of(call.cache, call.d_qk)
        tile = tile_of(call.d_qk, call.d_v, any(changes_scores), pages)
        group = _heads_in_a_tile(call, tile.rows)
        window = call.window_left < NO_BOUND
        if call.rows is None:
            chosen = spec(*options, window, *changes_scores, pages)
        else:
            chosen = rows_spec(*options, window, *changes_scores, call.rows.in_pieces(tile.keys))
    return jit.get_kernel(chosen, call.device, capturing=capturing), tile, group


def _heads_in_a_tile(call: MhaForwardCall, tile_rows: int) -> int:
    """Query heads of a KV head that share a tile: all, where that fills tiles better, or one."""
    group = call.h_q // call.h_kv
    if group & (group - 1) or group > WARPGROUP_ROWS:
        return 1
    if call.mods is not None and call.mods.lists is not None and call.mods.lists.heads > 1:
        return 1  # a tile walks one list
    if call.cache is not None:  # pages are gathered once for all of them
        return group
    together = ceil_div(call.max_seqlen_q * group, tile_rows)
    apart = group * ceil_div(call.max_seqlen_q, tile_rows)
    return group if together < 0.9 * apart else 1


def _splits(call: MhaForwardCall, tiles: int, tile_keys: int, sms: int) -> int:
    """Parts that the keys of a tile are cut into."""
    keys, right = call.max_seqlen_k, call.window_right
    # The combine writes every row, also those that skip_tokens leaves alone.
    if call.rows is not None and (call.rows.is_whole or call.rows.skip_tokens):
        return 1
    if call.cache is not None:
        # The combine writes every row, also those that skip_decode leaves alone.
        if call.cache.skip_decode:
            return 1
        keys, right = call.cache.tokens + call.max_seqlen_q, 0  # nothing comes after the tokens of q
    seen = min(keys, call.window_left + right + call.max_seqlen_q)
    return num_splits(tiles, ceil_div(seen, tile_keys), sms, state_bytes(_rows(call), padded(call.d_v)))


def _section(call: MhaForwardCall, heads: int) -> int:
    """Heads whose K and V fit in a good part of L2: a power of two, or all of them."""
    if call.cache is not None:
        return heads
    kv_bytes = 2 * call.max_seqlen_k * (call.d_qk + call.d_v)
    most = max(1, _SECTION_BYTES // max(1, kv_bytes)) * (heads // call.h_kv)
    all_heads = heads * (1 if call.varlen else call.b)
    return min(all_heads, 1 << most.bit_length() - 1)


def scale_params(call: MhaForwardCall | BackwardCall) -> dict[str, float]:
    """The factor of scores."""
    scale = call.softmax_scale
    if call.mods is not None:
        # A function takes scores in natural units; else their scale is part of the softmax.
        before, after = (scale, 1.0) if call.mods.has_score_mod else (1.0, scale)
        return {"softmax_scale_log2": after * LOG2_E, "score_scale": before, "score_factor": 1.0}
    # softcap * tanh(scale / softcap * s), and everything after it in base 2
    factor = (call.softcap or scale) * LOG2_E
    return {
        "softmax_scale_log2": 1.0 if call.has_alibi else factor,
        "score_scale": scale / call.softcap if call.softcap else 1.0,
        "score_factor": factor,
    }


def _row_params(rows: RowCache) -> dict[str, Any]:
    """The members that a call over a cache of rows has besides, or has other values of."""
    magic, shift = divisor(rows.block_size)
    return {
        **fields(rows, "num_blocks", "block_size", "table_rows", "table_stride", "seqlen_new", "total_new"),
        **fields(rows, "runs_beside"),
        "block_magic": magic,
        "block_shift": shift,
    }


def _mod_params(call: MhaForwardCall, mods: Mods, tile_keys: int) -> dict[str, Any]:
    """The members that a call with `Mods` has besides."""
    seqlen_k, lists = call.max_seqlen_k, mods.lists or NO_LISTS
    of_states = ("state_rows", "state_columns", "state_q", "state_k")
    return {
        **list_params(lists),
        "list_columns": tuple(min(most, ceil_div(seqlen_k, lists.block_k)) for most in lists.columns),
        "block_q": lists.block_q,
        "block_tiles": max(1, ceil_div(min(lists.block_k, seqlen_k), tile_keys)),
        "last_block_is_cut": int(seqlen_k % (lists.block_k if mods.lists else tile_keys) != 0),
        "k_batches": call.k_batches,
        **dict(zip(of_states, mods.states or (0, 0, 1, 1), strict=True)),
    }


def list_params(lists: BlockLists) -> dict[str, Any]:
    """The members that lists of blocks have in the forward and in the backward."""
    return {
        "counts_strides": (*lists.counts_strides[0], *lists.counts_strides[1]),
        "lists_strides": (*lists.lists_strides[0], *lists.lists_strides[1]),
        "mask_batches": lists.batches,
        "mask_heads": lists.heads,
        "block_k": lists.block_k,
    }


def _rows(call: MhaForwardCall) -> int:
    """Query tokens times heads of a call."""
    return call.h_q * call.total_q * (1 if call.varlen else call.b)
