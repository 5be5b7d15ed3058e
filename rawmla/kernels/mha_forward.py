"""Host side of cuda_src/kernels/mha_forward.cu: dense multi-head attention, forward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Literal, NamedTuple, cast

from .. import jit
from ..jit.params import F32, I32, I64, POINTER, TENSOR_MAP, U32, Declaration, ParamStruct
from ..jit.spec import MAX_SMEM_BYTES
from . import mha_combine
from .common import CHUNK, DTYPES, FLOAT_DTYPES, INT32_MAX, LOG2_E, ceil_div, stride_params
from .mha_combine import Combine, PreparedCombine, num_splits, state_bytes

__all__ = [
    "NO_BOUND",
    "PARAMS",
    "MhaForwardAddresses",
    "MhaForwardCall",
    "PreparedMhaForward",
    "Tile",
    "spec",
    "specs",
    "tile_of",
]

NO_BOUND = 2**30
"""A window without a bound on that side, and more tokens than a request may have."""
WARPGROUP_ROWS = 64
_STAGES = 2
_DIM_STEP = 32
_BARRIER_BYTES = 512
_SECTION_BYTES = 32 * 2**20
"""K and V of the heads that are processed together, so that they stay in L2."""
COUNTER_BYTES = 16
MAX_MAPS = 1024


class MhaForwardAddresses(NamedTuple):
    """The arrays of a call as device addresses; 0: not given."""

    q: int
    k: int
    v: int
    out: int
    lse: int
    cu_seqlens_q: int
    cu_seqlens_k: int
    seqused_q: int
    seqused_k: int
    attn_sink: int
    alibi_slopes: int


class MhaForwardCall(NamedTuple):
    """What stays the same when a call is repeated on other arrays: sizes, and strides in elements.

    Strides are of the dimensions (batch, token, head), multiples of 8, and 0 for a broadcast dimension. With
    `varlen` the requests are segments of one array, and the strides of the batch are not used. Lengths are
    those of the longest request. `total_q` and `total_k` are the tokens of the arrays, of one request without
    `varlen`.
    """

    device: int
    dtype: str
    b: int
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
    window_left: int  # NO_BOUND: none
    window_right: int  # 0: causal
    softcap: float  # 0: none
    has_sink: bool
    sink_dtype: str
    alibi_stride_b: int  # of the slopes; 0 where all requests have the same
    has_alibi: bool


class Tile(NamedTuple):
    """How the kernel cuts a call of some head dimensions."""

    consumers: int  # warpgroups with 64 query rows each
    keys: int


CHANGING = (
    *("q_map", "k_map", "v_map", "out_map", "k_pages_map", "v_pages_map"),
    *("out", "lse", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"),
    *("attn_sink", "alibi_slopes", "block_table", "k_cache", "v_cache"),
    *("k_scale", "v_scale", "out_scale", "o_accum", "lse_accum", "counter"),
)
"""Members that change from launch to launch, the first ones."""


def params_of(more_changing: Sequence[Declaration] = (), more: Sequence[Declaration] = ()) -> ParamStruct:
    """Params of cuda_src/mha/params.cuh, with members that only some variants have."""
    return ParamStruct(
        TENSOR_MAP(*CHANGING[:6]),
        POINTER(*CHANGING[6:]),
        more_changing,
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
        I32("cache_by_tma", "own_in_cache", "skip_decode"),
        F32("softmax_scale_log2", "score_scale", "score_factor"),
        F32("k_scale_value", "v_scale_value", "out_scale_value"),
        more,
        changing=(*CHANGING, *(one.name for one in more_changing)),
    )


PARAMS = params_of()
"""Params of cuda_src/mha/params.cuh."""
NO_MAP = bytes(jit.TENSOR_MAP_BYTES)
NO_PAGES = {
    name: 0
    for name in (
        *("table_stride", "num_blocks", "block_size", "block_magic", "block_shift"),
        *("block_bytes_inverse", "block_bytes_shift"),
        *("k_stride_block", "k_stride_head", "v_stride_block", "v_stride_head", "x", "v_pack"),
        *("table_entry", "cache_by_tma", "own_in_cache", "skip_decode"),
        *("k_scale_value", "v_scale_value", "out_scale_value"),
    )
}


class Pages(NamedTuple):
    """How a kernel takes keys from a paged cache; the defaults: there is none."""

    source: int = 0  # PAGED_BY_TMA or GATHERED
    cache_type: int = 0  # 0: the dtype of q, 1: e4m3, 2: e5m2
    out_fp8: bool = False


PAGED_BY_TMA, GATHERED = 1, 2
NO_CACHE = Pages()


@cache
def tile_of(d_qk: int, d_v: int, changes_scores: bool = False, pages: Pages = NO_CACHE) -> Tile:
    """The tile of a pair of head dimensions that `padded` returned.

    ``changes_scores``: there is a softcap or ALiBi. The numbers of registers below were found by compiling:
    with more keys some variant spills, by one of the compilers that tests/test_kernels_compile.py asks.
    """
    # O, S and P of a thread: d_v / 2, keys / 2 and keys / 4 registers, besides those for everything else. A
    # warpgroup that gathers leaves fewer of them for two consumers than a wide O needs.
    if d_qk <= 96 and d_v <= 96 and not pages.source:
        consumers, registers = 3, 116 if changes_scores else 132
    else:
        consumers = 1 if pages.source == GATHERED and d_v > 192 else 2
        gathering = 140 if changes_scores else 160 if d_v <= 128 else 150
        registers = 178 if consumers == 1 else (196, 178, gathering)[pages.source]
    keys = min(128, (registers - d_v // 2) * 4 // 3)
    return Tile(consumers, min(keys, _keys_beside_q(d_qk, d_v, consumers, pages)) // 16 * 16)


def tile_in_blocks(d_qk: int, d_v: int) -> Tile:
    """The tile of a pair of head dimensions that `padded` returned, whose keys divide blocks of 128."""
    consumers = 2
    most = min(128, (196 - d_v // 2) * 4 // 3, _keys_beside_q(d_qk, d_v, consumers, NO_CACHE))
    return Tile(consumers, 1 << most.bit_length() - 1)


def _keys_beside_q(d_qk: int, d_v: int, consumers: int, pages: Pages) -> int:
    """Keys of which there is room for K and V in shared memory."""
    q_columns = max(_chunks(d_qk), _chunks(d_v)) * CHUNK
    room = MAX_SMEM_BYTES - _BARRIER_BYTES - consumers * WARPGROUP_ROWS * q_columns * 2
    return room // _key_bytes(d_qk, d_v, pages)


def _key_bytes(d_qk: int, d_v: int, pages: Pages) -> int:
    """Shared memory for a key of the tile: in the stages, and as an FP8 cache has it."""
    raw = d_qk + d_v if pages.cache_type else 0
    return _STAGES * (_chunks(d_qk) + _chunks(d_v)) * CHUNK * 2 + raw


def _chunks(d: int) -> int:
    return ceil_div(d, CHUNK)


def padded(d: int) -> int:
    """The columns that a kernel computes for a head dimension: the others are zeros."""
    return ceil_div(d, _DIM_STEP) * _DIM_STEP


@cache
def spec(
    dtype: str, d_qk: int, d_v: int, window: bool, softcap: bool, alibi: bool, pages: Pages = NO_CACHE
) -> jit.KernelSpec:
    """The variant for head dimensions; ``window``: whether a mask can hide the first keys of a row."""
    d_qk, d_v = padded(d_qk), padded(d_v)
    tile = tile_of(d_qk, d_v, softcap or alibi, pages)
    features = {"WINDOW": window, "SOFTCAP": softcap, "ALIBI": alibi}
    return variant(dtype, d_qk, d_v, tile, features, pages)


FEATURES = {"ALIBI": False, "FLEX": False, "MAX_SCORES": False, "SOFTCAP": False, "WINDOW": False}


def variant(
    dtype: str,
    d_qk: int,
    d_v: int,
    tile: Tile,
    features: dict[str, bool],
    pages: Pages = NO_CACHE,
    headers: tuple[tuple[str, str], ...] = (),
) -> jit.KernelSpec:
    """The variant with a tile, for head dimensions that `padded` returned."""
    row_bytes = tile.consumers * WARPGROUP_ROWS * CHUNK * 2
    smem_bytes = row_bytes * _chunks(d_qk) + tile.keys * _key_bytes(d_qk, d_v, pages) + _BARRIER_BYTES
    # O lies where Q was, but where there is room for both.
    out_buffer = smem_bytes + row_bytes * _chunks(d_v) <= MAX_SMEM_BYTES
    smem_bytes += row_bytes * (_chunks(d_v) if out_buffer else max(0, _chunks(d_v) - _chunks(d_qk)))
    return jit.KernelSpec(
        "mha_forward",
        (
            ("CACHE_TYPE", pages.cache_type),
            ("CONSUMERS", tile.consumers),
            ("DTYPE", DTYPES[dtype]),
            ("D_QK", d_qk),
            ("D_V", d_v),
            ("OUT_BUFFER", out_buffer),
            ("OUT_FP8", pages.out_fp8),
            ("PAGED", pages.source),
            ("TILE_KEYS", tile.keys),
            *(FEATURES | features).items(),
        ),
        threads=128 * (tile.consumers + 1 + (pages.source == GATHERED)),
        smem_bytes=smem_bytes,
        headers=headers,
    )


def specs(dtype: str, head_dims: Iterable[tuple[int, int]]) -> list[jit.KernelSpec]:
    """The variants for pairs of head dimensions (d_qk, d_v) without softcap and ALiBi, and their combine."""
    found: list[jit.KernelSpec] = []
    for d_qk, d_v in head_dims:
        for window in (False, True):
            found.append(spec(dtype, d_qk, d_v, window, softcap=False, alibi=False))
        found.append(mha_combine.spec(dtype, padded(d_v)))
    return list(dict.fromkeys(found))


class PreparedMhaForward:
    """The launch of a call.

    Attributes
    ----------
    scratch_bytes : int
        Size of the scratch that `launch` takes; 0: none.
    """

    def __init__(self, call: MhaForwardCall, capturing: Callable[[], bool]) -> None:
        """Load the kernel; ``capturing`` as in `rawmla.jit.get_kernel`."""
        alibi, softcap = call.has_alibi, call.softcap > 0
        chosen = spec(call.dtype, call.d_qk, call.d_v, call.window_left < NO_BOUND, softcap, alibi)
        kernel = jit.get_kernel(chosen, call.device, capturing=capturing)
        tile = tile_of(padded(call.d_qk), padded(call.d_v), softcap or alibi)
        tile_rows = tile.consumers * WARPGROUP_ROWS
        self._call = call
        self._group = _heads_in_a_tile(call, tile_rows)
        self._tile_keys = tile.keys
        heads = call.h_q // self._group
        tiles_per_head = ceil_div(call.max_seqlen_q * self._group, tile_rows)
        tiles = heads * tiles_per_head * call.b
        most_tiles = tiles  # whatever the lengths are
        if call.varlen:
            most_tiles = heads * (ceil_div(call.total_q * self._group, tile_rows) + call.b)
            tiles = min(tiles, most_tiles)
        sms = jit.device_info(call.device).sm_count
        seen = min(call.max_seqlen_k, call.window_left + call.window_right + call.max_seqlen_q)
        split_bytes = state_bytes(_rows(call), padded(call.d_v))
        splits = num_splits(tiles, ceil_div(seen, tile.keys), sms, split_bytes)
        tiles *= splits
        unequal = call.varlen or call.window_right < NO_BOUND or call.window_left < NO_BOUND
        # Loaded in any case, so that only dtypes, dimensions and flags decide which kernels a call needs.
        combine = _combine(call, splits, capturing)
        self._combine = combine if splits > 1 else None
        self._is_counted = unequal and tiles > sms
        self.scratch_bytes = COUNTER_BYTES if self._is_counted else 0
        if self._combine is not None:
            self.scratch_bytes = self._combine.scratch_bytes
        scale = call.softmax_scale
        # softcap * tanh(scale / softcap * s), and everything behind it in base 2
        factor = (call.softcap if softcap else scale) * LOG2_E
        params = PARAMS.pack(
            **stride_params("out", call.out_strides),
            lse_stride_b=call.lse_strides[0],
            lse_stride_h=call.lse_strides[1],
            accum_rows=_rows(call),
            b=call.b,
            heads=heads,
            log2_group=self._group.bit_length() - 1,
            heads_per_kv=heads // call.h_kv,
            d_v=call.d_v,
            out_by_rows=call.d_v % 8 != 0,
            seqlen_q=call.max_seqlen_q,
            seqlen_k=call.max_seqlen_k,
            total_q=call.total_q,
            total_k=call.total_k,
            window_left=call.window_left,
            window_right=call.window_right,
            tiles_per_head=tiles_per_head,
            tiles=min(most_tiles * splits, INT32_MAX),
            splits=splits,
            section=self._section(heads) if unequal else 1,
            sink_dtype=FLOAT_DTYPES[call.sink_dtype] if call.has_sink else 0,
            alibi_stride_b=call.alibi_stride_b,
            softmax_scale_log2=1.0 if alibi else factor,
            score_scale=scale / call.softcap if softcap else 1.0,
            score_factor=factor,
            **NO_PAGES,
        )
        self._maps: dict[tuple[int, ...], tuple[bytes, ...]] = {}  # by the addresses of q, k, v and out
        self._launch = kernel.prepare(
            (min(tiles, sms), 1, 1), params, PARAMS.changing, pdl=not self._is_counted
        ).launch

    def _section(self, heads: int) -> int:
        call = self._call
        all_heads = heads * (1 if call.varlen else call.b)
        return section(call.max_seqlen_k, call.d_qk, call.d_v, heads // call.h_kv, all_heads)

    def launch(self, stream: int, addresses: tuple[int, ...], scratch: int) -> None:
        """Enqueue the kernel; before it the clearing of a counter, or behind it the combine, where needed.

        ``addresses`` has the order of `MhaForwardAddresses`. ``scratch`` is the address of 16-byte aligned
        scratch, or 0.
        """
        arrays = addresses[:4]
        maps = self._maps.get(arrays) or self._encode(arrays)
        counter = o_accum = lse_accum = 0
        if self._is_counted:
            counter = scratch
            jit.clear(counter, COUNTER_BYTES, stream, self._call.device)
        if self._combine is not None:
            o_accum, lse_accum = self._combine.places(scratch)
        self._launch(
            stream, *maps, NO_MAP, NO_MAP, *addresses[3:], 0, 0, 0, 0, 0, 0, o_accum, lse_accum, counter
        )  # fmt: skip
        if self._combine is not None:
            _, _, _, out, lse, cu_seqlens_q, _, _, _, attn_sink, _ = addresses
            self._combine.launch(stream, scratch, out, lse, cu_seqlens_q, attn_sink)

    def _encode(self, arrays: tuple[int, ...]) -> tuple[bytes, ...]:
        """The tensor maps of q, k, v and out."""
        call = self._call
        dtype = cast(Literal["bfloat16", "float16"], call.dtype)
        batches = 1 if call.varlen else call.b

        def of_queries(address: int, d: int, strides: tuple[int, int, int]) -> bytes:
            return query_map(address, dtype, d, self._group, call.h_q, call.total_q, batches, strides)

        def of_keys(address: int, d: int, strides: tuple[int, int, int]) -> bytes:
            tokens = max(1, call.total_k)
            return key_map(address, dtype, d, self._tile_keys, call.h_kv, tokens, batches, strides)

        q, k, v, out = arrays
        if not call.total_k:  # nothing is read through these maps, but there is no map of nothing
            k = v = q
        if len(self._maps) >= MAX_MAPS:
            self._maps.clear()
        maps = self._maps[arrays] = (
            of_queries(q, call.d_qk, call.q_strides),
            of_keys(k, call.d_qk, call.k_strides),
            of_keys(v, call.d_v, call.v_strides),
            of_queries(out, call.d_v, call.out_strides),
        )
        return maps


def query_map(
    address: int,
    dtype: Literal["bfloat16", "float16"],
    d: int,
    group: int,
    heads: int,
    tokens: int,
    batches: int,
    strides: tuple[int, int, int],
) -> bytes:
    """The tensor map of q or out: boxes of 64 columns and 64 rows, tokens times ``group`` heads.

    ``strides`` as in `MhaForwardCall`.
    """
    batch, token, head = strides
    return jit.tensor_map(
        address,
        dtype,
        (d, group, tokens, heads // group, batches),
        (2 * head, 2 * token, 2 * head * group, 2 * batch),
        (CHUNK, group, WARPGROUP_ROWS // group, 1, 1),
        "128b",
        "256b",
    )


def key_map(
    address: int,
    dtype: Literal["bfloat16", "float16"],
    d: int,
    keys: int,
    heads: int,
    tokens: int,
    batches: int,
    strides: tuple[int, int, int],
) -> bytes:
    """The tensor map of k or v: boxes of 64 columns and ``keys`` tokens.

    ``strides`` as in `MhaForwardCall`.
    """
    batch, token, head = strides
    return jit.tensor_map(
        address,
        dtype,
        (d, tokens, heads, batches),
        (2 * token, 2 * head, 2 * batch),
        (CHUNK, keys, 1, 1),
        "128b",
        "256b",
    )


def _rows(call: MhaForwardCall) -> int:
    """Query tokens times heads of a call."""
    return call.h_q * call.total_q * (1 if call.varlen else call.b)


def _combine(call: MhaForwardCall, splits: int, capturing: Callable[[], bool]) -> PreparedCombine:
    combine = Combine(
        device=call.device,
        dtype=call.dtype,
        splits=splits,
        b=call.b,
        heads=call.h_q,
        seqlen_q=call.lse_strides[1],  # rows lie as in lse
        rows=_rows(call),
        d_v=call.d_v,
        d_accum=padded(call.d_v),
        out_strides=call.out_strides,
        sink_dtype=call.sink_dtype if call.has_sink else "float32",
    )
    return PreparedCombine(combine, capturing)


def _heads_in_a_tile(call: MhaForwardCall, tile_rows: int) -> int:
    """Query heads of a KV head that share a tile: all, where that fills tiles better, or one."""
    group = call.h_q // call.h_kv
    if group & (group - 1) or group > WARPGROUP_ROWS:
        return 1
    together = ceil_div(call.max_seqlen_q * group, tile_rows)
    apart = group * ceil_div(call.max_seqlen_q, tile_rows)
    return group if together < 0.9 * apart else 1


def section(seqlen_k: int, d_qk: int, d_v: int, per_kv_head: int, heads: int) -> int:
    """Heads, of so many, whose K and V fit in a good part of L2: a power of two, or all there are. So many
    read a KV head.
    """
    kv_bytes = 2 * seqlen_k * (d_qk + d_v)
    most = max(1, _SECTION_BYTES // max(1, kv_bytes)) * per_kv_head
    return min(1 << (most.bit_length() - 1), heads)
