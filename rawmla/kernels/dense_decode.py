"""Host side of cuda_src/kernels/sm90_dense_decode.cu, and of the combine that follows it."""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import cache, lru_cache
from math import log2
from typing import Literal, NamedTuple, cast

from .. import jit
from . import combine
from .common import (
    BATCH_INVARIANT_MAX_PIECES,
    BATCH_INVARIANT_MIN_BLOCKS,
    BLOCK_TOKENS,
    DTYPES,
    ceil_div,
)

__all__ = ["BOX_ROWS", "D_QK", "DenseDecodeArgs", "box_rows", "launch", "scratch_bytes", "spec", "specs"]

_PARAMS = struct.Struct("<256s Q3q Qq QQQ Q3q QQQQ 4iI2iI3if 8x")  # Params of sm90_dense_decode.cu
_LOG2_E = log2(2.718281828459045)
_BLOCK_M = 64
_SMEM_BYTES = 232_448  # all that a CTA can have
D_QK = (576, 512)
BOX_ROWS = (64, 32, 16)
_CLUSTER_DIMS = (None, None, (2, 1, 1))  # by cluster size


class DenseDecodeArgs(NamedTuple):
    """One dense decode call: device addresses, sizes, and strides in elements.

    ``block_table_stride`` is the row stride of block_table; ``scratch`` points to
    ``scratch_bytes(...)`` bytes.
    """

    device: int
    stream: int
    capturing: Callable[[], bool]
    dtype: str
    b: int
    s_q: int
    h_q: int
    h_kv: int
    d_qk: int
    page_block_size: int
    num_blocks: int
    q: int
    q_stride_b: int
    q_stride_s: int
    q_stride_h: int
    k_cache: int
    k_stride_block: int
    k_stride_token: int
    k_stride_head: int
    block_table: int
    block_table_stride: int
    cache_seqlens: int
    sched_meta: int
    num_parts: int
    num_splits: int
    object_layout: bool
    batch_invariant: bool
    out: int
    out_stride_b: int
    out_stride_s: int
    out_stride_h: int
    lse: int
    scratch: int
    scratch_bytes: int
    softmax_scale: float
    causal: bool


@cache
def spec(dtype: str, d_qk: int, rows: int, cluster: int) -> jit.KernelSpec:
    """A variant; ``rows`` are the BOX_ROWS of the page size, ``cluster`` the CTAs that share K (1 or 2).

    Raises ValueError for a combination that no kernel exists for.
    """
    if dtype not in DTYPES or d_qk not in D_QK or rows not in BOX_ROWS:
        raise ValueError(
            f"dense decode: expected dtype in {list(DTYPES)}, d_qk in {list(D_QK)} and page_block_size "
            f"16, 32 or a multiple of 64, got {dtype!r}, {d_qk} and pages that need boxes of {rows} tokens"
        )
    return jit.KernelSpec(
        "sm90_dense_decode",
        (
            ("BOX_ROWS", rows),
            ("CLUSTER", cluster),
            ("DTYPE", DTYPES[dtype]),
            ("D_QK", d_qk),
            ("SMEM_BYTES", _SMEM_BYTES),
        ),
        threads=384,
        smem_bytes=_SMEM_BYTES,
    )


def box_rows(page_block_size: int) -> int:
    """Tokens that one TMA box copies: a page, or the 64 of a block."""
    return min(page_block_size, BLOCK_TOKENS)


def specs(dtype: str, d_qk: int, page_block_sizes: list[int]) -> list[jit.KernelSpec]:
    """The variants that caches with these page sizes need."""
    boxes = dict.fromkeys(box_rows(page) for page in page_block_sizes)
    pairs = [(box, cluster) for box in boxes for cluster in ((1, 2) if box == BLOCK_TOKENS else (1,))]
    return [spec(dtype, d_qk, box, cluster) for box, cluster in pairs]


def _num_slots(num_parts: int, b: int, max_seqlen: int, batch_invariant: bool) -> int:
    """Scratch slots for pieces: see ``first_slot`` in cuda_src/sched/plan.cuh. 0: nothing can be split."""
    blocks = ceil_div(max_seqlen, BLOCK_TOKENS)
    if blocks <= 1:
        return 0
    slots = 2 * num_parts if num_parts > 1 else 0
    if batch_invariant:
        pieces = min(ceil_div(blocks, BATCH_INVARIANT_MIN_BLOCKS), BATCH_INVARIANT_MAX_PIECES)
        slots = max(slots, b * pieces if pieces > 1 else 0)
    return slots


def scratch_bytes(
    dtype: str, num_parts: int, b: int, s_q: int, h_q: int, max_seqlen: int, batch_invariant: bool
) -> int:
    """Bytes of 16-byte aligned scratch: the pieces of split requests, see cuda_src/sched/pieces.cuh."""
    return _num_slots(num_parts, b, max_seqlen, batch_invariant) * s_q * h_q * combine.slot_row_bytes(dtype)


@lru_cache(maxsize=1024)
def _k_maps(
    k_cache: int,
    dtype: str,
    page_block_size: int,
    d_qk: int,
    h_kv: int,
    num_blocks: int,
    stride_token: int,
    stride_head: int,
    stride_block: int,
) -> bytes:
    """The two tensor maps of a cache: boxes of two chunks (64 columns) and of one."""

    def encode(chunks: int) -> bytes:
        return jit.tensor_map(
            k_cache,
            cast(Literal["bfloat16", "float16"], dtype),
            (64, page_block_size, d_qk // 64, h_kv, num_blocks),
            (2 * stride_token, 128, 2 * stride_head, 2 * stride_block),
            (64, box_rows(page_block_size), chunks, 1, 1),
            "128b",
            "none",
        )

    return encode(2) + encode(1)


def launch(args: DenseDecodeArgs) -> None:
    """Enqueue the decode kernel and, with scratch, the combine."""
    (
        device, stream, capturing, dtype, b, s_q, h_q, h_kv, d_qk, page_block_size, num_blocks,
        q, q_stride_b, q_stride_s, q_stride_h,
        k_cache, k_stride_block, k_stride_token, k_stride_head,
        block_table, block_table_stride, cache_seqlens, sched_meta, num_parts, num_splits,
        object_layout, batch_invariant,
        out, out_stride_b, out_stride_s, out_stride_h, lse, scratch, scratch_bytes, softmax_scale, causal,
    ) = args  # fmt: skip
    heads_per_kv = h_q // h_kv
    rows = s_q * heads_per_kv
    m_blocks = (rows + _BLOCK_M - 1) // _BLOCK_M
    box = box_rows(page_block_size)
    cluster = 2 if box == BLOCK_TOKENS and m_blocks % 2 == 0 else 1
    main = jit.get_kernel(spec(dtype, d_qk, box, cluster), device, capturing=capturing)
    all_rows = s_q * h_q
    num_slots = scratch_bytes // (all_rows * combine.slot_row_bytes(dtype))
    pieces = (0, 0, 0)
    if num_slots:
        pieces = combine.scratch_addresses(dtype, scratch, num_slots * all_rows)
        by_request = batch_invariant or b <= num_parts
        combine_grid, mapping = combine.launch_shape(all_rows, b, num_parts, by_request, batch_invariant)
        merge = jit.get_kernel(combine.spec(dtype, mapping), device, capturing=capturing)
    maps = _k_maps(
        k_cache, dtype, page_block_size, d_qk, h_kv, num_blocks, k_stride_token, k_stride_head, k_stride_block
    )
    heads_magic = -(-(2**32) // heads_per_kv) & 0xFFFFFFFF  # division by multiplication: see Params
    page_magic = -(-(2**36) // page_block_size) & 0xFFFFFFFF
    params = _PARAMS.pack(
        maps, q, q_stride_b, q_stride_s, q_stride_h, block_table, block_table_stride,
        cache_seqlens, sched_meta, num_splits, out, out_stride_b, out_stride_s, out_stride_h,
        lse, *pieces, b, s_q, h_q, heads_per_kv, heads_magic, rows, page_block_size, page_magic,
        num_slots, object_layout, causal, softmax_scale * _LOG2_E,
    )  # fmt: skip
    main.launch((m_blocks, h_kv, num_parts), params, stream, cluster=_CLUSTER_DIMS[cluster], pdl=True)
    if num_slots:
        params = combine.PARAMS.pack(
            sched_meta, num_splits, *pieces, out, out_stride_b, out_stride_s, out_stride_h,
            lse, b, s_q, h_q, num_slots, object_layout, by_request,
        )  # fmt: skip
        merge.launch(combine_grid, params, stream, pdl=True)
