"""Host side of the backward of flex attention: cuda_src/kernels/mha_backward.cu with FLEX, the kernels before
and behind it, and those of the gradients of captured arrays.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple, cast

from .. import jit
from ..jit.params import I32, I64, POINTER, ParamStruct, bytes_type
from ..jit.spec import MAX_SMEM_BYTES
from ..jit.table import BoundedTable
from . import block_mask, mha_backward
from .block_mask import NO_LISTS, BlockLists, Grid
from .common import CHUNK, DTYPES, FLOAT_DTYPES, LOG2_E, ceil_div, offsets_in_scratch, stride_params
from .mha_backward import (
    ALL,
    BLOCK_ROWS,
    BY_KEYS,
    BY_PRODUCT,
    FINISH_PARAMS,
    PREPARE_PARAMS,
    Form,
    Needs,
    Strides,
)
from .mha_forward import NO_BOUND
from .mha_forward_variants import padded
from .mha_maps import MAX_MAPS, key_map

__all__ = [
    *("FINISH_SPEC", "RANKS_SPEC", "CapturedGradient", "FlexBackwardAddresses", "FlexBackwardCall"),
    *("PreparedFlexBackward", "captured_spec", "params_of", "spec"),
]

_BARRIER_BYTES = 512
_CAPTURED_KEYS, _CAPTURED_THREADS = 128, 384
_REFERENCE_THREADS = 128
_CELL_BYTES = 16
_DIGITS_BYTES, _ELEMENTS_TOGETHER = 3200, 32  # of CapturedDigits
_MOST_ELEMENTS = 1 << 20
"""Of captured gradients that are summed digit by digit, in 100 MiB of scratch."""
_MOST_TERMS_LOG2 = 39
"""Of the numbers that may be added before a digit overflows."""
_FINISH_THREADS, _FINISH_CTAS = 256, 1024
_RANKS_THREADS, _RANKS_CTAS = 128, 2048
_FEW_SPILLS = 256
"""Bytes that a thread may spill in the whole kernel. By arithmetic that takes 400 cycles of a step of 2,560
at d 128; consumers that share one product double what is added to dq, which takes nearly the step again.
"""


class CapturedGradient(NamedTuple):
    """The gradient of a captured array: how many elements it has, and its dtype."""

    elements: int
    dtype: str


class FlexBackwardCall(NamedTuple):
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
    scale: float
    lists: BlockLists | None  # by columns: strides of (batch, head, column); None: all keys are attended
    header: tuple[str, str]  # name and text
    has_score_mod: bool
    score_mod_bytes: int
    mask_mod_bytes: int
    captured: tuple[CapturedGradient, ...]  # that are needed
    sites: int  # of them all
    scattered: bool  # a place depends on query and key, so that scores are added one by one
    deterministic: bool
    needs: Needs


class FlexBackwardAddresses(NamedTuple):
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
    q_num_blocks: int
    q_indices: int
    full_q_num_blocks: int
    full_q_indices: int


@cache
def params_of(score_mod_bytes: int, mask_mod_bytes: int) -> ParamStruct:
    """Params of cuda_src/mha/backward_params.cuh for functions with parameters of so many bytes."""
    return mha_backward.params_of(
        [
            *POINTER("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices", "ranks", "largest"),
            *bytes_type("ScoreMod", score_mod_bytes)("score_mod"),
            *bytes_type("MaskMod", mask_mod_bytes)("mask_mod"),
        ],
        [
            *I64("counts_strides", "lists_strides", length=6),
            *I32("list_rows", length=2),
            *I32("mask_batches", "mask_heads", "mask_rows", "mask_columns", "block_rows", "block_k"),
            *I32("q_blocks", "requests", "terms_log2"),
        ],
    )


CAPTURED_FINISH_PARAMS = ParamStruct(
    POINTER("sums", "largest", "out"),
    I64("count"),
    I32("sums_are", "dtype", "terms_log2"),
    changing=("sums", "largest", "out"),
)
RANKS_PARAMS = ParamStruct(
    POINTER("states", "ranks"),
    I64("all_rows"),
    I32("rows", "columns", "tiles"),
)
FINISH_SPEC = jit.KernelSpec("flex_captured_finish", (), threads=_FINISH_THREADS, smem_bytes=0)
RANKS_SPEC = jit.KernelSpec("block_mask_ranks", (), threads=_RANKS_THREADS, smem_bytes=0)


def spec(
    dtype: str, d_qk: int, d_v: int, form: Form, header: tuple[str, str], needs: Needs = ALL
) -> jit.KernelSpec:
    """The variant of the main kernel in a form; ``header`` is of `rawmla.flex.mods`."""
    return mha_backward.variant(dtype, d_qk, d_v, form, {"FLEX": True}, needs, headers=(header,))


def forms_of(d_qk: int, d_v: int) -> tuple[Form, ...]:
    """The forms that there are for head dimensions, the better one first."""
    return (BY_KEYS, BY_PRODUCT) if max(padded(d_qk), padded(d_v)) <= 128 else (BY_PRODUCT,)


IN_ANY_ORDER, LARGEST, IN_UNITS, IN_DIGITS = range(4)
"""Values of the define PASS of flex_captured_gradients.cu."""
FLOATS, CELLS, DIGITS = range(3)
"""Values of the parameter sums_are of flex_captured_finish.cu."""
_PASSES = {FLOATS: (IN_ANY_ORDER,), CELLS: (LARGEST, IN_UNITS), DIGITS: (IN_DIGITS,)}


def captured_spec(dtype: str, d_qk: int, d_v: int, pass_: int, header: tuple[str, str]) -> jit.KernelSpec:
    """The variant of flex_captured_gradients.cu for head dimensions."""
    d_qk, d_v = padded(d_qk), padded(d_v)
    row_bytes = 2 * CHUNK * (ceil_div(d_qk, CHUNK) + ceil_div(d_v, CHUNK))
    stages, smem_bytes = next(
        (n, smem_bytes)
        for n in (2, 1)
        for smem_bytes in [_CAPTURED_KEYS * row_bytes + n * BLOCK_ROWS * (row_bytes + 12) + _BARRIER_BYTES]
        if smem_bytes <= MAX_SMEM_BYTES
    )
    return jit.KernelSpec(
        "flex_captured_gradients",
        (
            ("DTYPE", DTYPES[dtype]),
            ("D_QK", d_qk),
            ("D_V", d_v),
            ("FLEX", True),
            ("PASS", pass_),
            ("STAGES", stages),
        ),
        threads=_CAPTURED_THREADS,
        smem_bytes=smem_bytes,
        headers=(header,),
    )


def references_spec(dtype: str, d_qk: int, tile_keys: int, header: tuple[str, str]) -> jit.KernelSpec:
    """The variant of flex_row_references.cu for tiles of keys as the kernel after it has them."""
    d_qk = padded(d_qk)
    return jit.KernelSpec(
        "flex_row_references",
        (
            ("DTYPE", DTYPES[dtype]),
            ("D_QK", d_qk),
            ("FLEX", True),
            ("TILE_KEYS", tile_keys),
        ),
        threads=_REFERENCE_THREADS,
        smem_bytes=2 * CHUNK * ceil_div(d_qk, CHUNK) * (BLOCK_ROWS + tile_keys) + 16,
        headers=(header,),
    )


class PreparedFlexBackward:
    """The launches of a call.

    Attributes
    ----------
    scratch_bytes : int
        Size of the scratch that `launch` takes.
    """

    def __init__(self, call: FlexBackwardCall, capturing: Callable[[], bool]) -> None:
        """Load the kernels; ``capturing`` as in `rawmla.jit.get_kernel`."""
        self._call = call
        self._capturing = capturing
        needs = call.needs
        around = mha_backward.specs_around(call.dtype, call.d_v)
        kernels = [jit.get_kernel(one, call.device, capturing=capturing) for one in around[: 1 + needs.dq]]
        form, main = _kernel(call, capturing) if needs.main else (BY_KEYS, None)
        self._tile_keys = form.tile_keys if needs.main else _CAPTURED_KEYS
        self._accum_columns = form.accum_columns(call.d_qk)
        q_blocks = ceil_div(call.seqlen_q, BLOCK_ROWS)
        places = call.h_q * call.b * q_blocks
        rows = places * BLOCK_ROWS
        self._mask = _mask_of(call)
        mask_blocks = 0
        if call.deterministic and needs.dq and self._mask is not None:
            mask_blocks = self._mask.blocks
            for one in (block_mask.SCATTER_SPEC, RANKS_SPEC):
                jit.get_kernel(one, call.device, capturing=capturing)
        self._sums_are = _what_sums_are(call)
        self._sum_bytes = [_sum_bytes(self._sums_are, one.elements) for one in call.captured]
        self._summed = [self._sums_are != FLOATS or one.dtype != "float32" for one in call.captured]
        sums = [size * summed for size, summed in zip(self._sum_bytes, self._summed, strict=True)]
        self._offsets, self.scratch_bytes = offsets_in_scratch((
            4 * rows,  # lse
            4 * rows,  # delta
            4 * rows * call.has_score_mod,  # references
            4 * rows * self._accum_columns * needs.dq,  # dq_accum
            4 * places * (call.deterministic and needs.dq),  # turns
            mask_blocks,  # states
            4 * mask_blocks,  # ranks
            4 * len(call.captured) * (self._sums_are == CELLS),  # largest
            *sums,
        ))  # fmt: skip
        self._prepare_around(kernels, places, q_blocks)
        self._params = params_of(call.score_mod_bytes, call.mask_mod_bytes)
        self._main = None if main is None else self._prepare_tiles(main, self._tile_keys, q_blocks)
        self._references = self._prepare_references(places, q_blocks)
        self._captured = self._prepare_captured(q_blocks)
        self._maps: dict[tuple[int, ...], tuple[bytes, ...]] = {}

    def launch(
        self,
        stream: int,
        addresses: FlexBackwardAddresses,
        score_mod: bytes,
        mask_mod: bytes,
        captured: Sequence[int],
        scratch: int,
    ) -> None:
        """Enqueue the kernels. ``score_mod`` and ``mask_mod`` are of `rawmla.flex.mods.Form.pack`,
        without addresses of gradients; ``captured`` has those of the results, and ``scratch`` is that of
        128-byte aligned scratch.
        """
        call = self._call
        q, k, v, out, dout, lse, dlse, dq, dk, dv, *lists = addresses
        lse_log2, delta, references, accum, turns, states, ranks, largest, *sums = [
            scratch + x for x in self._offsets
        ]
        if self._sums_are != CELLS:
            largest = 0
        if not (call.deterministic and call.needs.dq):
            turns = ranks = 0
        if self._mask is None:
            ranks = 0
        if not call.needs.dq:
            accum = 0
        prepare, *finish = self._around
        prepare(stream, out, dout, lse, dlse, lse_log2, delta, accum, 0, 0, 0, turns, 0, 0)
        if ranks and self._mask is not None:
            self._rank(stream, self._mask, lists, states, ranks)

        def arguments(tile_keys: int, functions: bytes) -> tuple[Any, ...]:
            maps = self._maps_of((q, dout, k, v), tile_keys)
            return (
                stream, *maps, lse_log2, delta, references, accum, turns, dk, dv, 0, 0, 0, 0, 0, *lists,
                ranks, largest, functions, mask_mod,
            )  # fmt: skip

        if self._references is not None:
            self._references(*arguments(self._tile_keys, score_mod))
        if self._main is not None:
            self._main(*arguments(self._tile_keys, score_mod))
        for finish_dq in finish:
            finish_dq(stream, accum, dq, 0, 0, 0)
        if not call.captured:
            return
        places = [x if summed else y for x, y, summed in zip(sums, captured, self._summed, strict=True)]
        if largest:
            jit.clear(largest, 4 * len(places), stream, call.device)
        for place, size in zip(places, self._sum_bytes, strict=True):
            jit.clear(place, size, stream, call.device)
        with_gradients = score_mod[: -8 * len(places)] + struct.pack(f"<{len(places)}Q", *places)
        for launch in self._captured:
            launch(*arguments(_CAPTURED_KEYS, with_gradients))
        for i, finish_captured in enumerate(self._captured_finish):
            if finish_captured is not None:
                finish_captured(stream, places[i], largest + 4 * i if largest else 0, captured[i])

    def _prepare_around(self, kernels: list[jit.Kernel], places: int, q_blocks: int) -> None:
        """The kernel before the main one and, where dq is needed, that behind it."""
        call = self._call
        sizes = {"b": call.b, "blocks": call.b * q_blocks, "sink_dtype": 0}
        sizes |= {"seqlen_q": call.seqlen_q, "total_q": call.seqlen_q}
        prepare = PREPARE_PARAMS.pack(
            **stride_params("out", call.out_strides),
            **stride_params("dout", call.dout_strides),
            **stride_params("lse", call.lse_strides),
            **stride_params("dlse", call.dlse_strides),
            heads=call.h_q,
            d_v=call.d_v,
            accum_columns=self._accum_columns,
            **sizes,
        )
        finish = FINISH_PARAMS.pack(
            **stride_params("dq", call.dq_strides),
            d_qk=call.d_qk,
            accum_columns=self._accum_columns,
            scale=call.scale,
            **sizes,
        )
        chunks = ceil_div(self._accum_columns, CHUNK)
        self._around = [  # without dq there is one kernel
            kernel.prepare((places, y, 1), params, declared.changing, pdl=True).launch
            for kernel, y, params, declared in zip(
                kernels, (1, chunks), (prepare, finish), (PREPARE_PARAMS, FINISH_PARAMS), strict=False
            )
        ]

    def _prepare_tiles(self, kernel: jit.Kernel, tile_keys: int, q_blocks: int) -> Callable[..., object]:
        """A kernel whose CTAs have a tile of so many keys each."""
        call = self._call
        tiles = call.k_batches * call.h_kv * ceil_div(call.seqlen_k, tile_keys)
        params = self._packed(tile_keys, q_blocks)
        # What functions read may be loaded ahead of griddepcontrol.wait: nothing overlaps the kernel before.
        return kernel.prepare((tiles, 1, 1), params, self._params.changing, pdl=False).launch

    def _prepare_references(self, places: int, q_blocks: int) -> Callable[..., object] | None:
        """The kernel that finds references of rows whose lse is far from 0, as a score function makes."""
        call = self._call
        if not call.has_score_mod or not (call.needs.main or call.captured):
            return None
        one = references_spec(call.dtype, call.d_qk, self._tile_keys, call.header)
        kernel = jit.get_kernel(one, call.device, capturing=self._capturing)
        params = self._packed(self._tile_keys, q_blocks)
        # The kernel before waits for all that came earlier: what functions read is there.
        return kernel.prepare((places, 1, 1), params, self._params.changing, pdl=True).launch

    def _packed(self, tile_keys: int, q_blocks: int) -> bytes:
        """The parameters of a kernel whose tiles have so many keys."""
        call, mask = self._call, self._mask
        lists = call.lists or NO_LISTS
        # A function takes scores in natural units; else their scale is part of the softmax.
        scale, softmax_scale = (call.scale, 1.0) if call.has_score_mod else (1.0, call.scale)
        return self._params.pack(
            **stride_params("dk", call.dk_strides),
            **stride_params("dv", call.dv_strides),
            blocks=call.b * q_blocks,
            b=call.k_batches,
            heads_kv=call.h_kv,
            group=call.h_q // call.h_kv,
            d_qk=call.d_qk,
            d_v=call.d_v,
            seqlen_q=call.seqlen_q,
            seqlen_k=call.seqlen_k,
            total_q=call.seqlen_q,
            total_k=call.seqlen_k,
            window_left=NO_BOUND,
            window_right=NO_BOUND,
            tiles_per_head=ceil_div(call.seqlen_k, tile_keys),
            section=mha_backward.section_of(
                call.h_q // call.h_kv * (call.b // call.k_batches),
                call.seqlen_q,
                call.d_qk,
                call.d_v,
                call.deterministic,
                call.lists is not None,
            ),
            alibi_stride_b=0,
            softmax_scale_log2=softmax_scale * LOG2_E,
            score_scale=scale,
            score_factor=1.0,
            scale=call.scale,
            counts_strides=(*lists.counts_strides[0], *lists.counts_strides[1]),
            lists_strides=(*lists.lists_strides[0], *lists.lists_strides[1]),
            list_rows=tuple(min(most, mask.columns if mask else 0) for most in lists.columns),
            mask_batches=lists.batches,
            mask_heads=lists.heads,
            mask_rows=mask.columns if mask else 0,
            mask_columns=mask.rows if mask else 0,
            block_rows=ceil_div(lists.block_q, BLOCK_ROWS),
            block_k=lists.block_k,
            q_blocks=q_blocks,
            requests=call.b // call.k_batches,
            terms_log2=_terms_log2(call),
        )

    def _prepare_captured(self, q_blocks: int) -> list[Callable[..., object]]:
        """The passes over all scores that find gradients of captured arrays, and what brings these to their
        dtypes.
        """
        call = self._call
        self._captured_finish: list[Callable[..., object] | None] = []
        if not call.captured:
            return []
        launches: list[Callable[..., object]] = []
        for pass_ in _PASSES[self._sums_are]:
            one = captured_spec(call.dtype, call.d_qk, call.d_v, pass_, call.header)
            kernel = jit.get_kernel(one, call.device, capturing=self._capturing)
            launches.append(self._prepare_tiles(kernel, _CAPTURED_KEYS, q_blocks))
        for gradient, summed in zip(call.captured, self._summed, strict=True):
            if not summed:
                self._captured_finish.append(None)
                continue
            kernel = jit.get_kernel(FINISH_SPEC, call.device, capturing=self._capturing)
            finish = CAPTURED_FINISH_PARAMS.pack(
                count=gradient.elements,
                sums_are=self._sums_are,
                dtype=FLOAT_DTYPES[gradient.dtype],
                terms_log2=_terms_log2(call),
            )
            ctas = min(ceil_div(gradient.elements, _FINISH_THREADS), _FINISH_CTAS)
            self._captured_finish.append(
                kernel.prepare((ctas, 1, 1), finish, CAPTURED_FINISH_PARAMS.changing, pdl=True).launch
            )
        return launches

    def _rank(self, stream: int, mask: Grid, lists: Sequence[int], states: int, ranks: int) -> None:
        """Enqueue what finds the order in which tiles add to dq."""
        call = self._call
        assert call.lists is not None
        where: Any = {"device": call.device, "stream": stream, "capturing": self._capturing}
        jit.clear(states, ceil_div(mask.blocks, 4) * 4, stream, call.device)
        rows = min(call.lists.columns[0], mask.columns), min(call.lists.columns[1], mask.columns)
        block_mask.scatter(mask, call.lists._replace(columns=rows), lists, states, **where)
        params = RANKS_PARAMS.pack(
            states=states,
            ranks=ranks,
            all_rows=mask.batches * mask.heads * mask.columns,
            rows=mask.columns,
            columns=mask.rows,
            tiles=ceil_div(call.lists.block_k, self._tile_keys),
        )
        kernel = jit.get_kernel(RANKS_SPEC, call.device, capturing=self._capturing)
        ctas = min(ceil_div(mask.batches * mask.heads * mask.columns, _RANKS_THREADS), _RANKS_CTAS)
        kernel.launch((ctas, 1, 1), params, stream)

    def _maps_of(self, arrays: tuple[int, ...], tile_keys: int) -> tuple[bytes, ...]:
        """The tensor maps of q, dout, k and v, with boxes of so many keys."""
        key = (*arrays, tile_keys)
        found = self._maps.get(key)
        if found is not None:
            return found
        call = self._call
        dtype = cast(Literal["bfloat16", "float16"], call.dtype)

        def of_queries(address: int, d: int, strides: Strides) -> bytes:
            return key_map(address, dtype, d, BLOCK_ROWS, call.h_q, call.seqlen_q, call.b, strides)

        def of_keys(address: int, d: int, strides: Strides) -> bytes:
            return key_map(address, dtype, d, tile_keys, call.h_kv, call.seqlen_k, call.k_batches, strides)

        q, dout, k, v = arrays
        if len(self._maps) >= MAX_MAPS:
            self._maps.clear()
        maps = self._maps[key] = (
            of_queries(q, call.d_qk, call.q_strides),
            of_queries(dout, call.d_v, call.dout_strides),
            of_keys(k, call.d_qk, call.k_strides),
            of_keys(v, call.d_v, call.v_strides),
        )
        return maps


def _mask_of(call: FlexBackwardCall) -> Grid | None:
    """The blocks of the mask, columns as lines: those of the keys are its rows."""
    lists = call.lists
    if lists is None:
        return None
    return Grid(lists.batches, lists.heads, call.seqlen_k, call.seqlen_q, lists.block_k, lists.block_q)


def _terms_log2(call: FlexBackwardCall) -> int:
    """The exponent of a power of 2 that is no less than how often any element is added to."""
    return (max(1, call.sites) * call.b * call.h_q * call.seqlen_q * call.seqlen_k - 1).bit_length()


def _what_sums_are(call: FlexBackwardCall) -> int:
    """The value of sums_are for captured gradients. Digits take one pass over the scores where cells take
    two, and six times the memory.
    """
    if not call.deterministic:
        return FLOATS
    elements = sum(one.elements for one in call.captured)
    are_few = elements <= _MOST_ELEMENTS and _terms_log2(call) <= _MOST_TERMS_LOG2
    return DIGITS if are_few and not call.scattered else CELLS


def _sum_bytes(sums_are: int, elements: int) -> int:
    """Scratch for the sums of a captured gradient."""
    if sums_are == DIGITS:
        return _DIGITS_BYTES * ceil_div(elements, _ELEMENTS_TOGETHER)
    return elements * (_CELL_BYTES if sums_are == CELLS else 4)


_form_of: BoundedTable[jit.KernelSpec, Form] = BoundedTable(512)
"""By the variant in the better form: that which is used."""


def _kernel(call: FlexBackwardCall, capturing: Callable[[], bool]) -> tuple[Form, jit.Kernel]:
    """The form and the kernel: consumers share a product where functions leave them no registers else."""
    best, *others = forms_of(call.d_qk, call.d_v)
    first = spec(call.dtype, call.d_qk, call.d_v, best, call.header, call.needs)
    form = best if not others else _form_of.get(first)
    if form is None:
        if capturing():
            return best, jit.get_kernel(first, call.device, capturing=capturing)
        jit.require_supported(call.device)
        built = jit.build(first)
        is_slow = built.meta["spill_stores"] > _FEW_SPILLS or any(x.startswith("ptxas") for x in built.losses)
        form = _form_of[first] = others[0] if is_slow else best
    chosen = spec(call.dtype, call.d_qk, call.d_v, form, call.header, call.needs)
    return form, jit.get_kernel(chosen, call.device, capturing=capturing)
