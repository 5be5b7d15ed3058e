"""Host side of cuda_src/kernels/mla_dense_decode*.cu and of the combine after them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import NamedTuple

from .. import jit
from ..jit.params import F32, I32, I64, POINTER, TENSOR_MAP, U32, ParamStruct, changing
from ..jit.spec import MAX_SMEM_BYTES
from .common import BLOCK_TOKENS, DTYPES, LOG2_E, TILE_ROWS, ceil_div, fields, q_stride_params, stride_params
from .mla_combine import PreparedCombine
from .tensor_maps import TensorMaps

FEW_ROWS = 16
"""The most query rows of a KV head for which mla_dense_decode_few_rows.cu runs."""
# No more than the kernel needs, so that CTAs of the combine find room beside it and are there when it ends.
_FEW_ROWS_SMEM_BYTES = 202_752
BOX_ROWS = (64, 32, 16)
"""Tokens that one TMA box copies."""


class DenseDecodeAddresses(NamedTuple):
    """The arrays of a call as device addresses."""

    q: int
    q_rope: int
    k_cache: int
    block_table: int
    cache_seqlens: int
    sched_meta: int
    num_splits: int
    out: int
    lse: int


PARAMS = ParamStruct(
    changing(
        TENSOR_MAP("k_map_half", "k_map_one"),
        POINTER("q", "q_rope", "block_table", "cache_seqlens", "sched_meta", "num_splits", "out", "lse"),
        POINTER("o_accum", "lse_accum_log2", "o_scale_log2"),
    ),
    U32("q_stride_b", "q_stride_s", "q_stride_h"),
    U32("q_rope_stride_b", "q_rope_stride_s", "q_rope_stride_h"),
    I64("block_table_stride"),
    I64("out_stride_b", "out_stride_s", "out_stride_h"),
    I32("b", "s_q", "h_q", "heads_per_kv"),
    U32("heads_magic"),
    I32("rows", "page_block_size"),
    U32("page_magic"),
    I32("max_seqlen", "max_splits", "object_layout", "causal"),
    F32("sm_scale_log2"),
)
"""Params of cuda_src/mla/dense.cuh."""


class DenseDecodeCall(NamedTuple):
    """The facts of a decode call that stay the same on other arrays: sizes, and strides in elements.

    ``q_rope_strides`` belong to the last 64 columns of q, which may be another array.
    ``block_table_stride`` is the stride of its rows, ``max_seqlen`` the tokens that a row has pages for.
    """

    device: int
    dtype: str
    b: int
    s_q: int
    h_q: int
    h_kv: int
    d_qk: int
    page_block_size: int
    num_blocks: int
    q_strides: tuple[int, ...]
    q_rope_strides: tuple[int, ...]
    k_strides: tuple[int, ...]  # of blocks, tokens and heads
    block_table_stride: int
    max_seqlen: int
    num_parts: int
    object_layout: bool
    batch_invariant: bool
    out_strides: tuple[int, ...]
    softmax_scale: float
    causal: bool


@cache
def spec(dtype: str, d_qk: int, box: int, cluster: int) -> jit.KernelSpec:
    """The variant for boxes of ``box`` tokens and clusters of ``cluster`` CTAs (1 or 2), which share K."""
    return jit.KernelSpec(
        "mla_dense_decode",
        (("BOX_ROWS", box), ("CLUSTER", cluster), ("DTYPE", DTYPES[dtype]), ("D_QK", d_qk)),
        threads=384,
        smem_bytes=MAX_SMEM_BYTES,
    )


@cache
def few_rows_spec(dtype: str, d_qk: int, box: int) -> jit.KernelSpec:
    """The variant for up to FEW_ROWS query rows of a KV head; ``box`` as in `spec`."""
    return jit.KernelSpec(
        "mla_dense_decode_few_rows",
        (("BOX_ROWS", box), ("DTYPE", DTYPES[dtype]), ("D_QK", d_qk)),
        threads=160,
        smem_bytes=_FEW_ROWS_SMEM_BYTES,
    )


def box_rows(page_block_size: int) -> int:
    """Tokens that one TMA box copies: a page, or the 64 of a block."""
    return min(page_block_size, BLOCK_TOKENS)


def specs(dtype: str, d_qk: int, page_block_sizes: Iterable[int]) -> list[jit.KernelSpec]:
    """The variants that caches with these page sizes need."""
    boxes = dict.fromkeys(box_rows(page) for page in page_block_sizes)
    pairs = [(box, cluster) for box in boxes for cluster in ((1, 2) if box == BLOCK_TOKENS else (1,))]
    few_rows = [few_rows_spec(dtype, d_qk, box) for box in boxes]
    return [spec(dtype, d_qk, box, cluster) for box, cluster in pairs] + few_rows


class PreparedDenseDecode:
    """The launches of a decode call: the attention kernel and, when requests can be split, the combine.

    They take ``scratch_bytes`` of scratch; 0: none.
    """

    def __init__(self, call: DenseDecodeCall, capturing: Callable[[], bool]) -> None:
        """Load the kernels; ``capturing`` as in `rawmla.jit.get_kernel`."""
        heads_per_kv = call.h_q // call.h_kv
        rows = call.s_q * heads_per_kv
        tiles = ceil_div(rows, TILE_ROWS)
        box = box_rows(call.page_block_size)
        cluster = 2 if box == BLOCK_TOKENS and tiles % 2 == 0 else 1
        if rows <= FEW_ROWS:
            chosen = few_rows_spec(call.dtype, call.d_qk, box)
        else:
            chosen = spec(call.dtype, call.d_qk, box, cluster)
        kernel = jit.get_kernel(chosen, call.device, capturing=capturing)
        max_blocks = ceil_div(call.max_seqlen, BLOCK_TOKENS)
        combine = PreparedCombine(call, call.dtype, max_blocks, capturing)
        self.scratch_bytes = combine.scratch_bytes
        self._lse_accum, self._o_scale = combine.lse_accum, combine.o_scale
        self._combine = combine.launch
        self._maps = TensorMaps(partial(_maps, call))  # by the address of the cache
        params = PARAMS.pack(
            **q_stride_params(call.q_strides, call.q_rope_strides),
            **stride_params(out=call.out_strides),
            **fields(call, "block_table_stride", "b", "s_q", "h_q", "page_block_size", "max_seqlen"),
            **fields(call, "object_layout", "causal"),
            heads_per_kv=heads_per_kv,
            heads_magic=_magic(heads_per_kv),
            rows=rows,
            page_magic=_magic(call.page_block_size // 16),
            max_splits=combine.max_splits,
            sm_scale_log2=call.softmax_scale * LOG2_E,
        )
        self._attend = kernel.prepare(
            (tiles, call.h_kv, call.num_parts),
            params,
            PARAMS.changing,
            cluster=(2, 1, 1) if cluster == 2 else None,
            pdl=True,
        ).launch

    def launch(self, stream: int, addresses: tuple[int, ...], scratch: int) -> None:
        """Enqueue the kernels.

        ``addresses`` has the order of `DenseDecodeAddresses`. ``scratch`` is the address of 16-byte aligned
        scratch, or 0.
        """
        q, q_rope, k_cache, block_table, cache_seqlens, sched_meta, num_splits, out, lse = addresses
        half, one = self._maps[k_cache]
        if self._combine is None:
            self._attend(
                stream, half, one, q, q_rope, block_table, cache_seqlens, sched_meta, num_splits, out, lse,
                0, 0, 0,
            )  # fmt: skip
            return
        lse_accum = scratch + self._lse_accum
        o_scale = scratch + self._o_scale
        current = self._attend(
            stream, half, one, q, q_rope, block_table, cache_seqlens, sched_meta, num_splits, out, lse,
            scratch, lse_accum, o_scale,
        )  # fmt: skip
        self._combine(
            stream, sched_meta, num_splits, scratch, lse_accum, o_scale, out, lse, 0,
            context_is_current=current,
        )  # fmt: skip


def _maps(call: DenseDecodeCall, k_cache: int) -> tuple[bytes, ...]:
    """The two tensor maps of a cache: boxes of half of V's chunks (64 columns) and of one."""
    stride_block, stride_token, stride_head = (2 * stride for stride in call.k_strides)
    return tuple(
        jit.tensor_map(
            k_cache,
            call.dtype,
            (64, call.page_block_size, call.d_qk // 64, call.h_kv, call.num_blocks),
            (stride_token, 128, stride_head, stride_block),
            (64, box_rows(call.page_block_size), chunks, 1, 1),
            "128b",
            "none",
        )
        for chunks in (4, 1)
    )


def _magic(d: int) -> int:
    """n // d is the high word of n * magic, for d > 1 and n up to `largest_dividend`: see Params in
    cuda_src/mla/dense.cuh.

    Where d is 1 the kernels do not divide, and the 2**32 that would be the magic number becomes 0.
    """
    return -(-(2**32) // d) % 2**32


def largest_dividend(d: int) -> int:
    """Every n up to this one is divided by ``d`` exactly: the magic number is too large by excess / d."""
    excess = -(2**32) % d
    return (2**32 - 1) // max(excess, 1)
