"""Host side of mha_backward.cu and mha_backward_by_product.cu in cuda_src/kernels, and of the kernels before
and after them: gradients of dense multi-head attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Literal, NamedTuple, cast

from .. import jit
from ..jit.params import F32, I32, I64, POINTER, TENSOR_MAP, Declaration, ParamStruct
from ..jit.spec import MAX_SMEM_BYTES
from .common import CHUNK, DTYPES, FLOAT_DTYPES, LOG2_E, ceil_div, offsets_in_scratch, stride_params
from .mha_forward import NO_BOUND
from .mha_forward_variants import padded
from .mha_maps import MAX_MAPS, key_map

__all__ = [
    "ALL",
    "FINISH_PARAMS",
    "PARAMS",
    "PREPARE_PARAMS",
    "BackwardAddresses",
    "BackwardCall",
    "Needs",
    "PreparedMhaBackward",
    "specs",
]

BLOCK_ROWS = 64
_BARRIER_BYTES = 640
Strides = tuple[int, int, int]


class Needs(NamedTuple):
    """Which gradients of a call somebody needs."""

    dq: bool
    dk: bool
    dv: bool
    others: bool
    """dsink; in flex attention those of captured arrays."""

    @property
    def main(self) -> bool:
        """Whether the kernel of dq, dk and dv has something to compute."""
        return self.dq or self.dk or self.dv


ALL = Needs(True, True, True, True)


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
    cu_seqlens_q: int
    cu_seqlens_k: int
    seqused_q: int
    seqused_k: int
    alibi_slopes: int
    attn_sink: int
    dsink: int


class BackwardCall(NamedTuple):
    """What stays the same when a call is repeated on other arrays. Strides are in elements, for (request,
    token, head).
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
    window_left: int
    window_right: int
    softcap: float
    alibi_stride_b: int
    has_alibi: bool
    sink_dtype: str | None  # None: there are no sinks
    has_dlse: bool
    deterministic: bool  # dq is summed in a fixed order
    needs: Needs


PREPARE_PARAMS = ParamStruct(
    POINTER("out", "dout", "lse", "dlse", "lse_log2", "delta", "dq_accum"),
    POINTER("attn_sink", "dsink_parts", "weights", "turns", "cu_seqlens_q", "seqused_q"),
    I64("out_stride_b", "out_stride_s", "out_stride_h"),
    I64("dout_stride_b", "dout_stride_s", "dout_stride_h"),
    I64("lse_stride_b", "lse_stride_s", "lse_stride_h"),
    I64("dlse_stride_b", "dlse_stride_s", "dlse_stride_h"),
    I64("blocks"),
    I32("b", "heads", "seqlen_q", "total_q", "d_v", "accum_columns", "sink_dtype"),
    changing=(
        "out", "dout", "lse", "dlse", "lse_log2", "delta", "dq_accum",
        "attn_sink", "dsink_parts", "weights", "turns", "cu_seqlens_q", "seqused_q",
    ),
)  # fmt: skip
CHANGING = (
    "q_map", "dout_map", "k_map", "v_map", "lse", "delta", "weights", "dq_accum", "turns", "dk", "dv",
    "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "alibi_slopes",
)  # fmt: skip


def params_of(more_changing: Sequence[Declaration] = (), more: Iterable[Declaration] = ()) -> ParamStruct:
    """Params of cuda_src/mha/backward_params.cuh with further members: some that change from launch to
    launch, and some at the end.
    """
    return ParamStruct(
        TENSOR_MAP("q_map", "dout_map", "k_map", "v_map"),
        POINTER("lse", "delta", "weights", "dq_accum", "turns", "dk", "dv"),
        POINTER("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "alibi_slopes"),
        more_changing,
        I64("dk_stride_b", "dk_stride_s", "dk_stride_h"),
        I64("dv_stride_b", "dv_stride_s", "dv_stride_h"),
        I64("blocks"),
        I32("b", "heads_kv", "group", "d_qk", "d_v", "seqlen_q", "seqlen_k", "total_q", "total_k"),
        I32("window_left", "window_right", "tiles_per_head", "section", "alibi_stride_b"),
        F32("softmax_scale_log2", "score_scale", "score_factor", "scale"),
        more,
        changing=(*CHANGING, *(one.name for one in more_changing)),
    )


PARAMS = params_of()
FINISH_PARAMS = ParamStruct(
    POINTER("dq_accum", "dq", "cu_seqlens_q", "dsink_parts", "dsink"),
    I64("dq_stride_b", "dq_stride_s", "dq_stride_h"),
    I64("blocks"),
    I32("b", "seqlen_q", "total_q", "d_qk", "accum_columns", "sink_dtype"),
    F32("scale"),
    changing=("dq_accum", "dq", "cu_seqlens_q", "dsink_parts", "dsink"),
)
CLEAR_PARAMS = ParamStruct(
    POINTER("cu_seqlens_q", "cu_seqlens_k"),
    POINTER("gradients", elements=("dq", "dk", "dv")),
    I64("strides_s", "strides_h", length=3),
    I32("tokens", "heads", "columns", "first_ctas", length=3),
    I32("b"),
    changing=("cu_seqlens_q", "cu_seqlens_k", "dq", "dk", "dv"),
)


class Form(NamedTuple):
    """How the consumers of a CTA share its work; docs/kernels/mha_backward.md has the forms."""

    kernel: str
    is_wide: bool
    tile_keys: int
    threads: int

    @property
    def by_product(self) -> bool:
        """Whether consumers share products instead of keys."""
        return self.kernel == "mha_backward_by_product"

    def accum_columns(self, d_qk: int) -> int:
        """Columns of the sums of dQ."""
        return ceil_div(d_qk, CHUNK) * CHUNK if self.by_product else padded(d_qk)


BY_KEYS = Form("mha_backward", False, 128, 384)
BY_KEYS_WIDE = Form("mha_backward", True, 128, 384)
BY_PRODUCT = Form("mha_backward_by_product", False, 64, 512)
CLEAR_SPEC = jit.KernelSpec("mha_backward_clear", (), threads=128, smem_bytes=0)
_CLEARED_ROWS = 64


def form_of(
    dtype: str, d_qk: int, d_v: int, softcap: bool, alibi: bool, weights: bool, needs: Needs = ALL
) -> Form:
    """The form for a pair of head dimensions that `padded` returned, with the flags of `specs`."""
    # dK and dV take half a register a column: with more columns a consumer of all products spills.
    if max(d_qk, d_v) <= 128 and d_qk + d_v <= (224 if softcap and alibi and weights else 256):
        return BY_KEYS
    if (d_qk, d_v) == (192, 128) and not (softcap or alibi or weights):
        if not needs.dq and not needs.dk:
            return BY_KEYS
        # In other variants ptxas serialises the products, or P loses bits that dS needs.
        if dtype == "bfloat16":
            return BY_KEYS_WIDE
    return BY_PRODUCT


def _bytes_by_keys(is_wide: bool, d_qk: int, d_v: int, has_dq: bool, stages: int) -> int:
    """Shared memory of mha_backward.cu with a number of stages of Q and dO."""
    row_bytes = 2 * CHUNK * (ceil_div(d_qk, CHUNK) + ceil_div(d_v, CHUNK))
    ds_bytes = BLOCK_ROWS * 2 * 128 * (1 if is_wide else 2)
    dq_bytes = 2 * BLOCK_ROWS * 4 * (d_qk // 2 if d_qk > 96 else d_qk)
    return (
        128 * row_bytes
        + stages * BLOCK_ROWS * (row_bytes + 12)
        + (ds_bytes if has_dq or is_wide else 0)
        + (dq_bytes if has_dq else 0)
        + _BARRIER_BYTES
    )


def _bytes_by_product(d_qk: int, d_v: int, places: int) -> int:
    """Shared memory of mha_backward_by_product.cu with a number of places for chunks of dQ."""
    row_bytes = 2 * CHUNK * (ceil_div(d_qk, CHUNK) + ceil_div(d_v, CHUNK))
    factors = ds = BLOCK_ROWS * 2 * 64
    return (
        64 * row_bytes
        + 2 * BLOCK_ROWS * (row_bytes + 12)
        + ds
        + factors
        + BLOCK_ROWS * CHUNK * 4 * places
        + _BARRIER_BYTES
    )


@cache
def specs(
    dtype: str,
    d_qk: int,
    d_v: int,
    softcap: bool = False,
    alibi: bool = False,
    weights: bool = False,
    needs: Needs = ALL,
) -> tuple[jit.KernelSpec, jit.KernelSpec, jit.KernelSpec]:
    """The variants of the three kernels, in the order of their launch.

    ``weights``: there are sinks and dlse.
    """
    form = form_of(dtype, padded(d_qk), padded(d_v), softcap, alibi, weights, needs)
    prepare, finish = specs_around(dtype, d_v)
    features = {"SOFTCAP": softcap, "ALIBI": alibi, "WEIGHTS": weights}
    return prepare, variant(dtype, d_qk, d_v, form, features, needs), finish


def specs_around(dtype: str, d_v: int) -> tuple[jit.KernelSpec, jit.KernelSpec]:
    """The variants of the kernels before and behind the main one."""
    kind = ("DTYPE", DTYPES[dtype])
    lanes = ("LANES", 8 if d_v <= CHUNK else 16)  # of a row, 16 bytes each
    return (
        jit.KernelSpec("mha_backward_prepare", (kind, lanes), threads=128, smem_bytes=0),
        jit.KernelSpec("mha_backward_finish", (kind,), threads=128, smem_bytes=0),
    )


_FEATURES = {"ALIBI": False, "FLEX": False, "SOFTCAP": False, "WEIGHTS": False}


def variant(
    dtype: str,
    d_qk: int,
    d_v: int,
    form: Form,
    features: dict[str, bool],
    needs: Needs,
    headers: tuple[tuple[str, str], ...] = (),
) -> jit.KernelSpec:
    """The variant of the main kernel in a form."""
    d_qk, d_v = padded(d_qk), padded(d_v)
    if form.is_wide and needs.dq:
        needs = ALL  # ptxas would serialise what is left without dk or dv; what nobody needs is not stored
    if form.by_product:
        parts = ceil_div(d_qk, CHUNK)
        places, smem_bytes = next(
            (n, smem_bytes)
            for n in range(parts, 0, -1)
            for smem_bytes in [_bytes_by_product(d_qk, d_v, n)]
            if parts % n == 0 and smem_bytes <= MAX_SMEM_BYTES
        )
        of_form: tuple[tuple[str, int], ...] = (("DQ_PLACES", places),)
    else:
        stages, smem_bytes = next(
            (n, smem_bytes)
            for n in (3, 2)
            for smem_bytes in [_bytes_by_keys(form.is_wide, d_qk, d_v, needs.dq, n)]
            if smem_bytes <= MAX_SMEM_BYTES
        )
        of_form = (("STAGES", stages), ("WIDE", form.is_wide))
    return jit.KernelSpec(
        form.kernel,
        (
            *of_form,
            ("DTYPE", DTYPES[dtype]),
            ("D_QK", d_qk),
            ("D_V", d_v),
            ("NEEDS_DK", needs.dk),
            ("NEEDS_DQ", needs.dq),
            ("NEEDS_DV", needs.dv),
            *(_FEATURES | features).items(),
        ),
        threads=form.threads,
        smem_bytes=smem_bytes,
        headers=headers,
        # Variants for some gradients are too many to be compiled by every NVRTC before a user does.
        may_lose=not (needs.dq and needs.dk and needs.dv),
    )


_L2_BYTES = 20 << 20
"""What tiles that run together may read and add to of queries, in a good part of L2."""


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
    """The launches of a call.

    Attributes
    ----------
    scratch_bytes : int
        Size of the scratch that `launch` takes.
    """

    def __init__(self, call: BackwardCall, capturing: Callable[[], bool]) -> None:
        """Load the kernels; ``capturing`` as in `rawmla.jit.get_kernel`."""
        self._call = call
        needs = call.needs
        # What sinks leave to a row is a number of its own then: mha_backward_prepare.cu says why.
        self._has_weights = call.sink_dtype is not None and call.has_dlse
        flags = call.softcap > 0, call.has_alibi, self._has_weights
        needs_finish = needs.dq or (call.sink_dtype is not None and needs.others)
        kernels = [
            jit.get_kernel(spec, call.device, capturing=capturing) if is_needed else None
            for spec, is_needed in zip(
                specs(call.dtype, call.d_qk, call.d_v, *flags, needs),
                (True, needs.main, needs_finish),
                strict=True,
            )
        ]
        form = form_of(call.dtype, padded(call.d_qk), padded(call.d_v), *flags, needs)
        self._tile_keys = tile_keys = form.tile_keys
        seqlen_q, seqlen_k = call.max_seqlen_q, call.max_seqlen_k
        blocks = call.b * ceil_div(seqlen_q, BLOCK_ROWS)
        tiles_per_head = ceil_div(seqlen_k, tile_keys)
        tiles = call.b * tiles_per_head
        if call.varlen:  # at most
            blocks = call.total_q // BLOCK_ROWS + call.b
            tiles = min(tiles, call.total_k // tile_keys + call.b)
        accum_columns = form.accum_columns(call.d_qk)
        rows = call.h_q * blocks * BLOCK_ROWS
        self._places, self.scratch_bytes = offsets_in_scratch((
            4 * rows,  # lse
            4 * rows,  # delta
            4 * rows * accum_columns if needs.dq else 0,  # dq_accum
            4 * call.h_q * blocks if call.sink_dtype is not None else 0,  # dsink_parts
            4 * rows if self._has_weights else 0,  # weights
            4 * call.h_q * blocks if call.deterministic and needs.dq else 0,  # turns
        ))  # fmt: skip
        sink_dtype = FLOAT_DTYPES[call.sink_dtype or "float32"]
        sizes = {"b": call.b, "seqlen_q": seqlen_q, "total_q": call.total_q, "blocks": blocks}
        prepare = PREPARE_PARAMS.pack(
            **stride_params("out", call.out_strides),
            **stride_params("dout", call.dout_strides),
            **stride_params("lse", call.lse_strides),
            **stride_params("dlse", call.dlse_strides),
            heads=call.h_q,
            d_v=call.d_v,
            accum_columns=accum_columns,
            sink_dtype=sink_dtype,
            **sizes,
        )
        has_masks = min(call.window_left, call.window_right) < NO_BOUND
        section = section_of(
            call.h_q // call.h_kv, seqlen_q, call.d_qk, call.d_v, call.deterministic, has_masks
        )
        if call.varlen:
            section = max(n for n in range(1, section + 1) if call.h_kv % n == 0)
        # As in mha_forward: softcap * tanh(scale / softcap * s), and everything behind it in base 2
        factor = (call.softcap or call.softmax_scale) * LOG2_E
        main = PARAMS.pack(
            **stride_params("dk", call.dk_strides),
            **stride_params("dv", call.dv_strides),
            heads_kv=call.h_kv,
            group=call.h_q // call.h_kv,
            d_qk=call.d_qk,
            d_v=call.d_v,
            seqlen_k=seqlen_k,
            total_k=call.total_k,
            window_left=call.window_left,
            window_right=call.window_right,
            tiles_per_head=tiles_per_head,
            section=section,
            alibi_stride_b=call.alibi_stride_b,
            softmax_scale_log2=1.0 if call.has_alibi else factor,
            score_scale=call.softmax_scale / call.softcap if call.softcap else 1.0,
            score_factor=factor,
            scale=call.softmax_scale,
            **sizes,
        )
        finish = FINISH_PARAMS.pack(
            **stride_params("dq", call.dq_strides),
            d_qk=call.d_qk,
            accum_columns=accum_columns,
            sink_dtype=sink_dtype,
            scale=call.softmax_scale,
            **sizes,
        )
        finish_grid = (call.h_q * blocks, ceil_div(accum_columns, CHUNK) if needs.dq else 1, 1)
        grids = ((call.h_q * blocks, 1, 1), (call.h_kv * tiles, 1, 1), finish_grid)
        self._launches = [
            None if kernel is None else kernel.prepare(grid, params, struct.changing, pdl=True).launch
            for kernel, grid, params, struct in zip(
                kernels,
                grids,
                (prepare, main, finish),
                (PREPARE_PARAMS, PARAMS, FINISH_PARAMS),
                strict=True,
            )
        ]
        self._clear = _prepare_clear(call, capturing) if call.varlen and needs.main else None
        self._maps: dict[tuple[int, ...], tuple[bytes, ...]] = {}

    def launch(self, stream: int, addresses: BackwardAddresses, scratch: int) -> None:
        """Enqueue the kernels: those of the gradients that are needed, and with segments one for tokens of no
        request. ``scratch`` is the address of 128-byte aligned scratch.
        """
        (
            q, k, v, out, dout, lse, dlse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k,
            alibi_slopes, attn_sink, dsink,
        ) = addresses  # fmt: skip
        lse_log2, delta, accum, dsink_parts, weights, turns = [scratch + place for place in self._places]
        if not self._has_weights:
            weights = 0
        if not self._call.needs.dq:
            accum = 0
        if not (self._call.deterministic and self._call.needs.dq):
            turns = 0
        prepare, main, finish = self._launches
        assert prepare is not None
        prepare(
            stream, out, dout, lse, dlse, lse_log2, delta, accum, attn_sink, dsink_parts, weights,
            turns, cu_seqlens_q, seqused_q,
        )  # fmt: skip
        if main is not None:
            arrays = q, dout, k, v
            maps = self._maps.get(arrays) or self._encode(arrays)
            main(
                stream, *maps, lse_log2, delta, weights, accum, turns, dk, dv, cu_seqlens_q, cu_seqlens_k,
                seqused_q, seqused_k, alibi_slopes,
            )  # fmt: skip
        if finish is not None:
            finish(stream, accum, dq, cu_seqlens_q, dsink_parts, dsink)
        if self._clear is not None:
            self._clear(stream, cu_seqlens_q, cu_seqlens_k, dq, dk, dv)

    def _encode(self, arrays: tuple[int, ...]) -> tuple[bytes, ...]:
        call = self._call
        dtype = cast(Literal["bfloat16", "float16"], call.dtype)
        batches = 1 if call.varlen else call.b
        q, dout, k, v = arrays
        if len(self._maps) >= MAX_MAPS:
            self._maps.clear()
        maps = self._maps[arrays] = (
            key_map(q, dtype, call.d_qk, BLOCK_ROWS, call.h_q, call.total_q, batches, call.q_strides),
            key_map(dout, dtype, call.d_v, BLOCK_ROWS, call.h_q, call.total_q, batches, call.dout_strides),
            key_map(k, dtype, call.d_qk, self._tile_keys, call.h_kv, call.total_k, batches, call.k_strides),
            key_map(v, dtype, call.d_v, self._tile_keys, call.h_kv, call.total_k, batches, call.v_strides),
        )
        return maps


def _prepare_clear(call: BackwardCall, capturing: Callable[[], bool]) -> Callable[..., object]:
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
