"""Host side of mha_backward.cu and mha_backward_by_product.cu in cuda_src/kernels, and of the kernels before
and after them: gradients of multi-head attention, with functions of the user's too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

from .. import jit
from ..jit.params import F32, I32, I64, POINTER, TENSOR_MAP, Member, ParamStruct, bytes_type, changing
from . import block_mask
from .block_mask import NO_LISTS, BlockLists, Grid
from .common import CHUNK, FLOAT_DTYPES, ceil_div, fields, offsets_in_scratch, padded, stride_params
from .flex_captured import CAPTURED_KEYS, CapturedGradient, PreparedCaptured, terms_log2
from .mha_backward_variants import (
    BLOCK_ROWS,
    BY_KEYS,
    CLEAR_SPEC,
    Form,
    Needs,
    flex_spec,
    form_of,
    forms_of,
    references_spec,
    specs,
    specs_around,
)
from .mha_forward import NO_BOUND, list_params, scale_params
from .mha_forward_variants import is_slow
from .tensor_maps import TensorMaps, head_map

_FEW_SPILLS = 256
"""Bytes that a thread may spill in the whole kernel. By arithmetic that takes 400 cycles of a step of 2,560
at d 128; consumers that share one product double what is added to dq, which takes nearly the step again.
"""
Strides = tuple[int, int, int]


class BackwardAddresses(NamedTuple):
    """The arrays of a call as device addresses; 0: not given, or not needed."""

    q: int
    k: int
    v: int
    out: int
    dout: int
    lse: int
    dlse: int
    dq: int
    dk: int
    dv: int
    cu_seqlens_q: int = 0
    cu_seqlens_k: int = 0
    seqused_q: int = 0
    seqused_k: int = 0
    alibi_slopes: int = 0
    attn_sink: int = 0
    dsink: int = 0


class BackwardMods(NamedTuple):
    """Functions of scores and masks, and the blocks that they are called for."""

    header: tuple[str, str]  # name and text
    has_score_mod: bool
    score_mod_bytes: int
    mask_mod_bytes: int
    lists: BlockLists | None  # by columns: strides of (batch, head, column); None: all keys are attended
    captured: tuple[CapturedGradient, ...]  # that are needed
    sites: int  # of them all
    scattered: bool  # a place depends on query and key, so that scores are added one by one


class BackwardCall(NamedTuple):
    """The facts of a call that stay the same on other arrays. Strides are in elements, for (request,
    token, head).
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
    total_q: int  # of the array with varlen, else of a request
    total_k: int
    q_strides: Strides
    k_strides: Strides
    v_strides: Strides
    out_strides: Strides
    dout_strides: Strides
    lse_strides: Strides
    dlse_strides: Strides
    dq_strides: Strides
    dk_strides: Strides
    dv_strides: Strides
    softmax_scale: float
    deterministic: bool  # dq is summed in a fixed order
    needs: Needs
    window_left: int = NO_BOUND
    window_right: int = NO_BOUND
    softcap: float = 0.0
    alibi_stride_b: int = 0
    has_alibi: bool = False
    sink_dtype: str | None = None  # None: there are no sinks
    has_dlse: bool = False
    mods: BackwardMods | None = None


PREPARE_PARAMS = ParamStruct(
    changing(
        POINTER("out", "dout", "lse", "dlse", "lse_log2", "delta", "dq_accum"),
        POINTER("attn_sink", "dsink_parts", "weights", "turns", "cu_seqlens_q", "seqused_q"),
    ),
    I64("out_stride_b", "out_stride_s", "out_stride_h"),
    I64("dout_stride_b", "dout_stride_s", "dout_stride_h"),
    I64("lse_stride_b", "lse_stride_s", "lse_stride_h"),
    I64("dlse_stride_b", "dlse_stride_s", "dlse_stride_h"),
    I64("blocks"),
    I32("b", "heads", "seqlen_q", "total_q", "d_v", "accum_columns", "sink_dtype"),
)


@cache
def params_of(mod_bytes: tuple[int, int] | None = None) -> ParamStruct:
    """Params of cuda_src/mha/backward_params.cuh; ``mod_bytes``: of what score_mod and mask_mod read."""
    first = [
        *TENSOR_MAP("q_map", "dout_map", "k_map", "v_map"),
        *POINTER("lse", "delta", "weights", "dq_accum", "turns", "dk", "dv"),
        *POINTER("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "alibi_slopes"),
    ]
    of_lists: list[Member] = []
    if mod_bytes is not None:
        score, mask = mod_bytes
        first += [
            *POINTER("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices", "ranks", "largest"),
            *bytes_type("ScoreMod", score)("score_mod"),
            *bytes_type("MaskMod", mask)("mask_mod"),
        ]
        of_lists = [
            *I64("counts_strides", "lists_strides", length=6),
            *I32("list_rows", length=2),
            *I32("mask_batches", "mask_heads", "mask_rows", "mask_columns", "block_rows", "block_k"),
            *I32("q_blocks", "requests", "terms_log2"),
        ]
    return ParamStruct(
        changing(first),
        I64("dk_stride_b", "dk_stride_s", "dk_stride_h"),
        I64("dv_stride_b", "dv_stride_s", "dv_stride_h"),
        I64("blocks"),
        I32("b", "heads_kv", "group", "d_qk", "d_v", "seqlen_q", "seqlen_k", "total_q", "total_k"),
        I32("window_left", "window_right", "tiles_per_head", "section", "alibi_stride_b"),
        F32("softmax_scale_log2", "score_scale", "score_factor", "scale"),
        of_lists,
    )


FINISH_PARAMS = ParamStruct(
    changing(POINTER("dq_accum", "dq", "cu_seqlens_q", "dsink_parts", "dsink")),
    I64("dq_stride_b", "dq_stride_s", "dq_stride_h"),
    I64("blocks"),
    I32("b", "seqlen_q", "total_q", "d_qk", "accum_columns", "sink_dtype"),
    F32("scale"),
)
_CLEARED_ROWS = 64
CLEAR_PARAMS = ParamStruct(
    changing(POINTER("cu_seqlens_q", "cu_seqlens_k"), POINTER("gradients", length=3)),  # dq, dk and dv
    I64("strides_s", "strides_h", length=3),
    I32("tokens", "heads", "columns", "first_ctas", length=3),
    I32("b"),
)
_L2_BYTES = 20 << 20
"""The most bytes of Q, dO and dQ for tiles that run together: a good part of L2."""


def section_of(readers: int, seqlen_q: int, d_qk: int, d_v: int, deterministic: bool, has_masks: bool) -> int:
    """How many KV heads have tiles that run together, where `readers` query heads of all requests read each.
    Few, so that what tiles read of queries, and the sums of dQ, stay in L2; more of them if they are short,
    since multiprocessors idle at the end of a section. In a fixed order more too, since tiles of a head wait
    for each other; half of that where all tiles walk equally long.
    """
    if not deterministic:
        bytes_of_head = readers * seqlen_q * (6 * padded(d_qk) + 2 * padded(d_v))
        least = 2 if readers == 1 else 4
        return max(least, min(8, 1 << max(1, _L2_BYTES // max(1, bytes_of_head)).bit_length() - 1))
    # By measurement 16 with d 64, 8 with 128, 4 with 256.
    heads = 1024 // (ceil_div(padded(d_qk), CHUNK) * CHUNK)
    return heads if has_masks else heads // 2


class PreparedMhaBackward:
    """The launches of a call, which take ``scratch_bytes`` of scratch."""

    def __init__(self, call: BackwardCall, capturing: Callable[[], bool]) -> None:
        """Load the kernels; ``capturing`` as in `rawmla.jit.get_kernel`."""
        self._call = call
        self._capturing = capturing
        needs, mods = call.needs, call.mods
        form, kernel = _load(call, capturing)
        self._tile_keys = form.tile_keys
        self._accum_columns = form.accum_columns(call.d_qk)
        self._blocks = call.b * ceil_div(call.max_seqlen_q, BLOCK_ROWS)
        if call.varlen:  # at most
            self._blocks = call.total_q // BLOCK_ROWS + call.b
        self._has_weights = _has_weights(call)
        self._mask = _mask_of(call)
        ranked_blocks = self._mask.blocks if self._mask is not None and call.deterministic and needs.dq else 0
        if ranked_blocks:
            for one in (block_mask.SCATTER_SPEC, block_mask.RANKS_SPEC):
                jit.get_kernel(one, call.device, capturing=capturing)
        self._struct = params_of(mods and (mods.score_mod_bytes, mods.mask_mod_bytes))
        self._prepare, self._finish = self._prepare_around()
        self._main = None if kernel is None else self._prepare_tiles(kernel, self._tile_keys)
        self._references = self._prepare_references()
        self._captured = None
        if mods is not None:
            self._captured = PreparedCaptured(call, mods, self._prepare_tiles, capturing)
        self._clear = _prepare_clear(call, capturing) if call.varlen and needs.main else None
        rows = call.h_q * self._blocks * BLOCK_ROWS
        self._offsets, self.scratch_bytes = offsets_in_scratch((
            4 * rows,  # lse
            4 * rows,  # delta
            4 * rows * (self._has_weights or (mods is not None and mods.has_score_mod)),  # or references
            4 * rows * self._accum_columns * needs.dq,  # dq_accum
            4 * call.h_q * self._blocks * (call.sink_dtype is not None),  # dsink_parts
            4 * call.h_q * self._blocks * (call.deterministic and needs.dq),  # turns
            ranked_blocks,  # states
            4 * ranked_blocks,  # ranks
            *(() if self._captured is None else self._captured.scratch_sizes),
        ))  # fmt: skip
        self._maps = TensorMaps(partial(_maps, call))

    def launch(self, stream: int, addresses: BackwardAddresses, scratch: int, *of_mods: Any) -> None:
        """Enqueue the kernels of the gradients that are needed, and with segments one for tokens of no
        request. ``scratch`` is the address of 128-byte aligned scratch.

        ``of_mods``: with `BackwardMods`, the addresses of the lists by columns; the parameters of score_mod,
        without addresses of gradients, and of mask_mod, of `rawmla.flex.mods.Form.pack`; the addresses of the
        gradients of captured arrays.
        """
        call = self._call
        (
            q, k, v, out, dout, lse, dlse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k,
            alibi_slopes, attn_sink, dsink,
        ) = addresses  # fmt: skip
        lse_log2, delta, of_rows, accum, dsink_parts, turns, states, ranks, *captured = [
            scratch + offset for offset in self._offsets
        ]
        accum *= call.needs.dq
        turns *= call.needs.dq and call.deterministic
        ranks *= turns != 0 and self._mask is not None
        dsink_parts *= call.sink_dtype is not None
        weights = of_rows * self._has_weights
        self._prepare(
            stream, out, dout, lse, dlse, lse_log2, delta, accum, attn_sink, dsink_parts, weights,
            turns, cu_seqlens_q, seqused_q,
        )  # fmt: skip

        def arguments(tile_keys: int, score_mod: bytes | None = None) -> tuple[Any, ...]:
            """The arguments of a kernel whose tiles have ``tile_keys`` keys."""
            maps = self._maps[q, dout, k, v, tile_keys]
            given = (
                stream, *maps, lse_log2, delta, weights, accum, turns, dk, dv, cu_seqlens_q, cu_seqlens_k,
                seqused_q, seqused_k, alibi_slopes,
            )  # fmt: skip
            if score_mod is None:
                return given
            return (*given, *lists, ranks, largest, score_mod, mask_mod)

        if self._captured is None:
            if self._main is not None:
                self._main(*arguments(self._tile_keys))
            if self._finish is not None:
                self._finish(stream, accum, dq, cu_seqlens_q, dsink_parts, dsink)
            if self._clear is not None:
                self._clear(stream, cu_seqlens_q, cu_seqlens_k, dq, dk, dv)
            return
        *lists, score_mod, mask_mod, results = of_mods
        weights = of_rows  # references of rows stand in their place
        largest = self._captured.largest(captured)
        if ranks and self._mask is not None and call.mods is not None and call.mods.lists is not None:
            block_mask.ranks(
                self._mask, call.mods.lists, lists, (states, ranks), self._tile_keys,
                device=call.device, stream=stream, capturing=self._capturing,
            )  # fmt: skip
        for launch in (self._references, self._main):
            if launch is not None:
                launch(*arguments(self._tile_keys, score_mod))
        if self._finish is not None:
            self._finish(stream, accum, dq, 0, 0, 0)
        self._captured.launch(stream, arguments, score_mod, results, captured)

    def _prepare_around(self) -> tuple[Callable[..., object], Callable[..., object] | None]:
        """The kernel before the main one, and that after it where there is something for it."""
        call = self._call
        prepare, finish = specs_around(call.dtype, call.d_v)
        sizes = {
            "b": call.b,
            "seqlen_q": call.max_seqlen_q,
            "total_q": call.total_q,
            "blocks": self._blocks,
            "accum_columns": self._accum_columns,
            "sink_dtype": FLOAT_DTYPES[call.sink_dtype or "float32"],
        }
        kernel = jit.get_kernel(prepare, call.device, capturing=self._capturing)
        params = PREPARE_PARAMS.pack(
            **stride_params(out=call.out_strides, dout=call.dout_strides),
            **stride_params(lse=call.lse_strides, dlse=call.dlse_strides),
            heads=call.h_q,
            d_v=call.d_v,
            **sizes,
        )
        grid = (call.h_q * self._blocks, 1, 1)
        before = kernel.prepare(grid, params, PREPARE_PARAMS.changing, pdl=True).launch
        if not (call.needs.dq or (call.sink_dtype is not None and call.needs.others)):
            return before, None
        kernel = jit.get_kernel(finish, call.device, capturing=self._capturing)
        params = FINISH_PARAMS.pack(
            **stride_params(dq=call.dq_strides), d_qk=call.d_qk, scale=call.softmax_scale, **sizes
        )
        chunks = ceil_div(self._accum_columns, CHUNK) if call.needs.dq else 1
        grid = (call.h_q * self._blocks, chunks, 1)
        return before, kernel.prepare(grid, params, FINISH_PARAMS.changing, pdl=True).launch

    def _prepare_tiles(self, kernel: jit.Kernel, tile_keys: int) -> Callable[..., object]:
        """Prepare a kernel whose CTAs have a tile of ``tile_keys`` keys each."""
        call = self._call
        tiles = call.k_batches * ceil_div(call.max_seqlen_k, tile_keys)
        if call.varlen:  # at most
            tiles = min(tiles, call.total_k // tile_keys + call.b)
        params = self._packed(tile_keys)
        # What functions read may be loaded ahead of griddepcontrol.wait: nothing overlaps the kernel before.
        pdl = call.mods is None
        return kernel.prepare((call.h_kv * tiles, 1, 1), params, self._struct.changing, pdl=pdl).launch

    def _prepare_references(self) -> Callable[..., object] | None:
        """The kernel that finds references of rows whose lse is far from 0, as a score function makes."""
        call, mods = self._call, self._call.mods
        if mods is None or not mods.has_score_mod or not (call.needs.main or mods.captured):
            return None
        one = references_spec(call.dtype, call.d_qk, self._tile_keys, mods.header)
        kernel = jit.get_kernel(one, call.device, capturing=self._capturing)
        params = self._packed(self._tile_keys)
        # The kernel before waits for all that came earlier: what functions read is there.
        grid = (call.h_q * self._blocks, 1, 1)
        return kernel.prepare(grid, params, self._struct.changing, pdl=True).launch

    def _packed(self, tile_keys: int) -> bytes:
        """Pack the parameters of a kernel whose tiles have ``tile_keys`` keys."""
        call = self._call
        requests = call.b // call.k_batches if call.mods else 1
        return self._struct.pack(
            **stride_params(dk=call.dk_strides, dv=call.dv_strides),
            **fields(call, "d_qk", "d_v", "total_q", "total_k"),
            **fields(call, "window_left", "window_right", "alibi_stride_b"),
            blocks=self._blocks,
            b=call.k_batches,
            heads_kv=call.h_kv,
            group=call.h_q // call.h_kv,
            seqlen_q=call.max_seqlen_q,
            seqlen_k=call.max_seqlen_k,
            tiles_per_head=ceil_div(call.max_seqlen_k, tile_keys),
            section=_section(call, requests),
            scale=call.softmax_scale,
            **scale_params(call),
            **({} if call.mods is None else self._mod_params(call.mods, requests)),
        )

    def _mod_params(self, mods: BackwardMods, requests: int) -> dict[str, Any]:
        """The members that a call with `BackwardMods` has besides."""
        lists, mask = mods.lists or NO_LISTS, self._mask
        return {
            **list_params(lists),
            "list_rows": tuple(min(most, mask.columns if mask else 0) for most in lists.columns),
            "mask_rows": mask.columns if mask else 0,
            "mask_columns": mask.rows if mask else 0,
            "block_rows": ceil_div(lists.block_q, BLOCK_ROWS),
            "q_blocks": self._blocks // self._call.b,
            "requests": requests,
            "terms_log2": terms_log2(self._call, mods),
        }


def _maps(call: BackwardCall, key: tuple[int, ...]) -> tuple[bytes, ...]:
    """The tensor maps of q, dout, k and v; ``key`` has their addresses, and the keys of a box."""
    q, dout, k, v, tile_keys = key
    q_batches, k_batches = (1, 1) if call.varlen else (call.b, call.k_batches)

    def of_queries(address: int, d: int, strides: Strides) -> bytes:
        return head_map(address, call.dtype, d, BLOCK_ROWS, call.h_q, call.total_q, q_batches, strides)

    def of_keys(address: int, d: int, strides: Strides) -> bytes:
        return head_map(address, call.dtype, d, tile_keys, call.h_kv, call.total_k, k_batches, strides)

    return (
        of_queries(q, call.d_qk, call.q_strides),
        of_queries(dout, call.d_v, call.dout_strides),
        of_keys(k, call.d_qk, call.k_strides),
        of_keys(v, call.d_v, call.v_strides),
    )


def _prepare_clear(call: BackwardCall, capturing: Callable[[], bool]) -> Callable[..., object]:
    """The kernel that writes zeros into the gradients of tokens that belong to no request."""
    kernel = jit.get_kernel(CLEAR_SPEC, call.device, capturing=capturing)
    tokens = (call.total_q * call.needs.dq, call.total_k * call.needs.dk, call.total_k * call.needs.dv)
    ctas = [ceil_div(count, _CLEARED_ROWS) for count in tokens]
    strides = (call.dq_strides, call.dk_strides, call.dv_strides)
    params = CLEAR_PARAMS.pack(
        strides_s=tuple(token for _, token, _ in strides),
        strides_h=tuple(head for _, _, head in strides),
        tokens=tokens,
        heads=(call.h_q, call.h_kv, call.h_kv),
        columns=(call.d_qk, call.d_qk, call.d_v),
        first_ctas=(0, ctas[0], ctas[0] + ctas[1]),
        b=call.b,
    )
    return kernel.prepare((sum(ctas), 1, 1), params, CLEAR_PARAMS.changing, pdl=True).launch


def _has_weights(call: BackwardCall) -> bool:
    """Whether what sinks leave to a row is a number of its own: mha_backward_prepare.cu says why."""
    return call.sink_dtype is not None and call.has_dlse


def _load(call: BackwardCall, capturing: Callable[[], bool]) -> tuple[Form, jit.Kernel | None]:
    """The form of a call and the main kernel; None where nobody needs its results."""
    options, needs, mods = (call.dtype, call.d_qk, call.d_v), call.needs, call.mods
    if mods is None:
        flags = call.softcap > 0, call.has_alibi, _has_weights(call)
        form = form_of(call.dtype, padded(call.d_qk), padded(call.d_v), *flags, needs)
        if not needs.main:
            return form, None
        _, chosen, _ = specs(*options, *flags, needs)
    else:
        if not needs.main:
            return BY_KEYS._replace(tile_keys=CAPTURED_KEYS), None
        form, *others = forms_of(call.d_qk, call.d_v)
        chosen = flex_spec(*options, form, mods.header, needs)
        if others and is_slow(chosen, call.device, capturing, _loses_much):
            # Consumers share a product where functions leave them no registers else.
            form = others[0]
            chosen = flex_spec(*options, form, mods.header, needs)
    return form, jit.get_kernel(chosen, call.device, capturing=capturing)


def _loses_much(built: jit.CompiledKernel) -> bool:
    """Whether code spills more than `_FEW_SPILLS`, or has serialised products."""
    return built.meta["spill_stores"] > _FEW_SPILLS or any(x.startswith("ptxas") for x in built.losses)


def _mask_of(call: BackwardCall) -> Grid | None:
    """The blocks of the mask, transposed: its rows are blocks of keys."""
    lists = call.mods and call.mods.lists
    if not lists:
        return None
    return Grid(
        lists.batches, lists.heads, call.max_seqlen_k, call.max_seqlen_q, lists.block_k, lists.block_q
    )


def _section(call: BackwardCall, requests: int) -> int:
    """KV heads whose tiles run together; ``requests``: how many have the same keys."""
    has_masks = min(call.window_left, call.window_right) < NO_BOUND
    if call.mods is not None:
        has_masks = call.mods.lists is not None
    readers = call.h_q // call.h_kv * requests
    section = section_of(readers, call.max_seqlen_q, call.d_qk, call.d_v, call.deterministic, has_masks)
    if call.varlen:
        section = max(n for n in range(1, section + 1) if call.h_kv % n == 0)
    return section
