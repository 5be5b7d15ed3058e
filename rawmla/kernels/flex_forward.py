"""Host side of cuda_src/kernels/mha_forward.cu with FLEX: attention with functions of the user's and lists of
blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Literal, NamedTuple, cast

from .. import jit
from ..jit.params import I32, I64, POINTER, ParamStruct, bytes_type
from ..jit.table import BoundedTable
from . import mha_forward
from .common import LOG2_E, ceil_div, stride_params
from .mha_forward import (
    COUNTER_BYTES,
    MAX_MAPS,
    NO_BOUND,
    NO_MAP,
    NO_PAGES,
    WARPGROUP_ROWS,
    Tile,
    key_map,
    padded,
    query_map,
    section,
    tile_in_blocks,
    variant,
)

__all__ = ["BlockLists", "FlexAddresses", "FlexForwardCall", "PreparedFlexForward", "spec", "tile_of"]

NO_LISTS = (0, 0, 0)


class BlockLists(NamedTuple):
    """Lists of partial and of full blocks as they lie: strides in elements of (batch, head, row)."""

    counts_strides: tuple[tuple[int, int, int], tuple[int, int, int]]
    lists_strides: tuple[tuple[int, int, int], tuple[int, int, int]]
    columns: tuple[int, int]
    batches: int
    heads: int
    block_q: int
    block_k: int


class FlexForwardCall(NamedTuple):
    """What stays the same when a call is repeated on other arrays. Strides are in elements, for (request,
    token, head).
    """

    device: int
    dtype: str
    b: int
    k_batches: int  # b or 1
    h_q: int
    h_kv: int
    seqlen_q: int
    seqlen_k: int
    d_qk: int
    d_v: int
    q_strides: tuple[int, int, int]
    k_strides: tuple[int, int, int]
    v_strides: tuple[int, int, int]
    out_strides: tuple[int, int, int]
    scale: float
    lists: BlockLists | None  # None: all keys are attended
    states: tuple[int, int, int, int] | None
    """Of lists made of others: rows and columns of blocks that have states, and tokens and keys of one."""
    header: tuple[str, str]  # name and text
    has_score_mod: bool
    score_mod_bytes: int
    mask_mod_bytes: int
    max_scores: bool


class FlexAddresses(NamedTuple):
    """The arrays of a call as device addresses; 0: not given."""

    q: int
    k: int
    v: int
    out: int
    lse: int
    max_scores: int
    kv_num_blocks: int
    kv_indices: int
    full_kv_num_blocks: int
    full_kv_indices: int
    states: int


@cache
def params_of(score_mod_bytes: int, mask_mod_bytes: int) -> ParamStruct:
    """Params of cuda_src/mha/params.cuh for functions with parameters of so many bytes."""
    return mha_forward.params_of(
        [
            *POINTER("max_scores", "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"),
            *POINTER("states"),
            *bytes_type("ScoreMod", score_mod_bytes)("score_mod"),
            *bytes_type("MaskMod", mask_mod_bytes)("mask_mod"),
        ],
        [
            *I64("counts_strides", "lists_strides", length=6),
            *I32("list_columns", length=2),
            *I32("mask_batches", "mask_heads", "block_q", "block_k", "block_tiles"),
            *I32("last_block_is_cut", "k_batches"),
            *I32("state_rows", "state_columns", "state_q", "state_k"),
        ],
    )


def tile_of(d_qk: int, d_v: int) -> Tile:
    """The tile for head dimensions as an array has them."""
    return tile_in_blocks(padded(d_qk), padded(d_v))


def spec(
    dtype: str, d_qk: int, d_v: int, keys: int, max_scores: bool, header: tuple[str, str]
) -> jit.KernelSpec:
    """The variant for head dimensions, with a tile of so many keys; ``header`` is of
    `rawmla.flex.mods`.
    """
    tile = tile_of(d_qk, d_v)._replace(keys=keys)
    features = {"FLEX": True, "MAX_SCORES": max_scores}
    return variant(dtype, padded(d_qk), padded(d_v), tile, features, headers=(header,))


class PreparedFlexForward:
    """The launch of a call.

    Attributes
    ----------
    scratch_bytes : int
        Size of the scratch that `launch` takes; 0: none.
    """

    def __init__(self, call: FlexForwardCall, capturing: Callable[[], bool]) -> None:
        """Load the kernel; ``capturing`` as in `rawmla.jit.get_kernel`."""
        keys, kernel = _kernel(call, capturing)
        tile = tile_of(call.d_qk, call.d_v)._replace(keys=keys)
        self._call = call
        self._tile_keys = tile.keys
        tile_rows = tile.consumers * WARPGROUP_ROWS
        tiles_per_head = ceil_div(call.seqlen_q, tile_rows)
        tiles = call.h_q * tiles_per_head * call.b
        sms = jit.device_info(call.device).sm_count
        self._is_counted = tiles > sms
        self.scratch_bytes = COUNTER_BYTES if self._is_counted else 0
        lists = call.lists or BlockLists((NO_LISTS, NO_LISTS), (NO_LISTS, NO_LISTS), (0, 0), 1, 1, 1, 1)
        state_rows, state_columns, state_q, state_k = call.states or (0, 0, 1, 1)
        self._params = params_of(call.score_mod_bytes, call.mask_mod_bytes)
        # A function takes scores in natural units; else their scale is part of the softmax.
        scale, softmax_scale = (call.scale, 1.0) if call.has_score_mod else (1.0, call.scale)
        params = self._params.pack(
            **stride_params("out", call.out_strides),
            lse_stride_b=call.h_q * call.seqlen_q,
            lse_stride_h=call.seqlen_q,
            accum_rows=0,
            b=call.b,
            heads=call.h_q,
            log2_group=0,
            heads_per_kv=call.h_q // call.h_kv,
            d_v=call.d_v,
            out_by_rows=call.d_v % 8 != 0,
            seqlen_q=call.seqlen_q,
            seqlen_k=call.seqlen_k,
            total_q=call.seqlen_q,
            total_k=call.seqlen_k,
            window_left=NO_BOUND,
            window_right=NO_BOUND,
            tiles_per_head=tiles_per_head,
            tiles=tiles,
            splits=1,
            section=section(call.seqlen_k, call.d_qk, call.d_v, call.h_q // call.h_kv, call.h_q * call.b),
            sink_dtype=0,
            alibi_stride_b=0,
            softmax_scale_log2=softmax_scale * LOG2_E,
            score_scale=scale,
            score_factor=1.0,
            counts_strides=(*lists.counts_strides[0], *lists.counts_strides[1]),
            lists_strides=(*lists.lists_strides[0], *lists.lists_strides[1]),
            list_columns=tuple(min(most, ceil_div(call.seqlen_k, lists.block_k)) for most in lists.columns),
            mask_batches=lists.batches,
            mask_heads=lists.heads,
            block_q=lists.block_q,
            block_k=lists.block_k,
            block_tiles=max(1, ceil_div(min(lists.block_k, call.seqlen_k), tile.keys)),
            last_block_is_cut=int(call.seqlen_k % (lists.block_k if call.lists else tile.keys) != 0),
            k_batches=call.k_batches,
            state_rows=state_rows,
            state_columns=state_columns,
            state_q=state_q,
            state_k=state_k,
            **NO_PAGES,
        )
        self._maps: dict[tuple[int, ...], tuple[bytes, ...]] = {}  # by the addresses of q, k, v and out
        # What functions read may be loaded ahead of griddepcontrol.wait: nothing overlaps the kernel before.
        self._launch = kernel.prepare(
            (min(tiles, sms), 1, 1), params, self._params.changing, pdl=False
        ).launch

    def launch(
        self, stream: int, addresses: FlexAddresses, score_mod: bytes, mask_mod: bytes, scratch: int
    ) -> None:
        """Enqueue the kernel, and before it the clearing of a counter where needed. ``score_mod`` and
        ``mask_mod`` are of `rawmla.flex.mods.Form.pack`, ``scratch`` the address of 16-byte aligned
        scratch, or 0.
        """
        arrays = addresses[:4]
        maps = self._maps.get(arrays) or self._encode(arrays)
        counter = 0
        if self._is_counted:
            counter = scratch
            jit.clear(counter, COUNTER_BYTES, stream, self._call.device)
        out, lse, *others = addresses[3:]
        self._launch(
            stream, *maps, NO_MAP, NO_MAP, out, lse, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, counter,
            *others, score_mod, mask_mod,
        )  # fmt: skip

    def _encode(self, arrays: tuple[int, ...]) -> tuple[bytes, ...]:
        """The tensor maps of q, k, v and out."""
        call = self._call
        dtype = cast(Literal["bfloat16", "float16"], call.dtype)

        def of_queries(address: int, d: int, strides: tuple[int, int, int]) -> bytes:
            return query_map(address, dtype, d, 1, call.h_q, call.seqlen_q, call.b, strides)

        def of_keys(address: int, d: int, strides: tuple[int, int, int]) -> bytes:
            tokens = max(1, call.seqlen_k)
            return key_map(address, dtype, d, self._tile_keys, call.h_kv, tokens, call.k_batches, strides)

        q, k, v, out = arrays
        if not call.seqlen_k:  # nothing is read through these maps, but there is no map of nothing
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


_keys_of: BoundedTable[jit.KernelSpec, int] = BoundedTable(512)
"""By the variant with the largest tile: the keys of the one that is used."""


def _kernel(call: FlexForwardCall, capturing: Callable[[], bool]) -> tuple[int, jit.Kernel]:
    """The keys of a tile and the kernel: half the keys where functions need more registers than are left."""
    most = tile_of(call.d_qk, call.d_v).keys
    largest = spec(call.dtype, call.d_qk, call.d_v, most, call.max_scores, call.header)
    keys = _keys_of.get(largest)
    if keys is None:
        if capturing():
            return most, jit.get_kernel(largest, call.device, capturing=capturing)
        jit.require_supported(call.device)
        keys = _keys_of[largest] = most // 2 if jit.build(largest).losses else most
    chosen = spec(call.dtype, call.d_qk, call.d_v, keys, call.max_scores, call.header)
    return keys, jit.get_kernel(chosen, call.device, capturing=capturing)
