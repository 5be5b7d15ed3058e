"""Host side of cuda_src/kernels/mla_dense_decode*.cu, and of the combine that follows them."""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import cache
from math import log2
from typing import Literal, NamedTuple, cast

from .. import jit
from . import mla_combine as combine
from .common import BLOCK_TOKENS, DTYPES, addresses, ceil_div, num_slots

__all__ = [
    "BOX_ROWS",
    "D_QK",
    "FEW_ROWS",
    "DenseDecodeCall",
    "PreparedDecode",
    "box_rows",
    "few_rows_spec",
    "spec",
    "specs",
]

_PARAMS = struct.Struct("<256s 10Q 3q q 3q 4iI2iI4if 4x")  # Params of mla/dense.cuh
_POINTERS = addresses(10, before="256s")  # its first members: tensor maps and addresses
_MAX_MAPS = 1024  # caches with tensor maps of their own, one for each layer
_LOG2_E = log2(2.718281828459045)
_BLOCK_M = 64
_SMEM_BYTES = 232_448  # all that a CTA can have
D_QK = (576, 512)
FEW_ROWS = 16
# No more than it needs, so that CTAs of the combine find room beside it and are there when it ends.
_FEW_ROWS_SMEM_BYTES = 202_752
BOX_ROWS = (64, 32, 16)
_CLUSTER_DIMS = (None, None, (2, 1, 1))  # by cluster size


class DenseDecodeCall(NamedTuple):
    """What stays the same when a decode call is repeated on other queries: sizes, and strides in elements.

    ``block_table_stride`` is the row stride of block_table, ``max_seqlen`` what its rows have room for.
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
    q_stride_b: int
    q_stride_s: int
    q_stride_h: int
    k_stride_block: int
    k_stride_token: int
    k_stride_head: int
    block_table_stride: int
    max_seqlen: int
    num_parts: int
    object_layout: bool
    batch_invariant: bool
    out_stride_b: int
    out_stride_s: int
    out_stride_h: int
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
        "mla_dense_decode",
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


@cache
def few_rows_spec(dtype: str, d_qk: int, rows: int) -> jit.KernelSpec:
    """The variant for up to FEW_ROWS query rows of a KV head; ``rows`` as in `spec`."""
    return jit.KernelSpec(
        "mla_dense_decode_few_rows",
        (
            ("BOX_ROWS", rows),
            ("DTYPE", DTYPES[dtype]),
            ("D_QK", d_qk),
            ("SMEM_BYTES", _FEW_ROWS_SMEM_BYTES),
        ),
        threads=160,
        smem_bytes=_FEW_ROWS_SMEM_BYTES,
    )


def box_rows(page_block_size: int) -> int:
    """Tokens that one TMA box copies: a page, or the 64 of a block."""
    return min(page_block_size, BLOCK_TOKENS)


def specs(dtype: str, d_qk: int, page_block_sizes: list[int]) -> list[jit.KernelSpec]:
    """The variants that caches with these page sizes need."""
    boxes = dict.fromkeys(box_rows(page) for page in page_block_sizes)
    pairs = [(box, cluster) for box in boxes for cluster in ((1, 2) if box == BLOCK_TOKENS else (1,))]
    few_rows = [few_rows_spec(dtype, d_qk, box) for box in boxes]
    return [spec(dtype, d_qk, box, cluster) for box, cluster in pairs] + few_rows


class PreparedDecode:
    """The launches of a decode call: the decode kernel and, when requests can be split, the combine.

    Attributes
    ----------
    scratch_bytes : int
        Of the 16-byte aligned scratch that `launch` takes; 0: none.
    """

    def __init__(self, call: DenseDecodeCall, capturing: Callable[[], bool]) -> None:
        """Load the kernels; ``capturing`` as in `rawmla.jit.get_kernel`."""
        heads_per_kv = call.h_q // call.h_kv
        rows = call.s_q * heads_per_kv
        m_blocks = ceil_div(rows, _BLOCK_M)
        box = box_rows(call.page_block_size)
        cluster = 2 if box == BLOCK_TOKENS and m_blocks % 2 == 0 else 1
        if rows <= FEW_ROWS:
            chosen = few_rows_spec(call.dtype, call.d_qk, box)
        else:
            chosen = spec(call.dtype, call.d_qk, box, cluster)
        main = jit.get_kernel(chosen, call.device, capturing=capturing)
        max_blocks = ceil_div(call.max_seqlen, BLOCK_TOKENS)
        slots = num_slots(call.num_parts, call.b, max_blocks, call.batch_invariant)
        slot_rows = slots * call.s_q * call.h_q
        self.scratch_bytes = slot_rows * combine.slot_row_bytes(call.dtype)
        self._lse_accum, self._o_scale, _ = combine.scalar_offsets(call.dtype, slot_rows)
        out_strides = (call.out_stride_b, call.out_stride_s, call.out_stride_h)
        self._call = call
        self._maps: dict[int, bytes] = {}  # by the address of the cache
        heads_magic = -(-(2**32) // heads_per_kv) & 0xFFFFFFFF  # division by multiplication: see Params
        page_magic = -(-(2**36) // call.page_block_size) & 0xFFFFFFFF
        params = _PARAMS.pack(
            b"", *[0] * 10, call.q_stride_b, call.q_stride_s, call.q_stride_h, call.block_table_stride,
            *out_strides, call.b, call.s_q, call.h_q, heads_per_kv, heads_magic, rows, call.page_block_size,
            page_magic, min(call.max_seqlen, 2**31 - 1), slots, call.object_layout, call.causal,
            call.softmax_scale * _LOG2_E,
        )  # fmt: skip
        self._main = main.prepare(
            (m_blocks, call.h_kv, call.num_parts), params, _POINTERS,
            cluster=_CLUSTER_DIMS[cluster], pdl=True,
        ).launch  # fmt: skip
        self._merge = combine.prepare(
            device=call.device,
            dtype=call.dtype,
            b=call.b,
            s_q=call.s_q,
            h_q=call.h_q,
            num_parts=call.num_parts,
            slots=slots,
            object_layout=call.object_layout,
            batch_invariant=call.batch_invariant,
            out_strides=out_strides,
            capturing=capturing,
        )

    def launch(
        self,
        stream: int,
        k_cache: int,
        q: int,
        block_table: int,
        cache_seqlens: int,
        sched_meta: int,
        num_splits: int,
        out: int,
        lse: int,
        scratch: int,
    ) -> None:
        """Enqueue the kernels on arrays given as device addresses."""
        maps = self._maps.get(k_cache) or self._encode(k_cache)
        if self._merge is None:
            self._main(stream, maps, q, block_table, cache_seqlens, sched_meta, num_splits, out, lse, 0, 0, 0)
            return
        lse_accum = scratch + self._lse_accum
        o_scale = scratch + self._o_scale
        current = self._main(
            stream, maps, q, block_table, cache_seqlens, sched_meta, num_splits, out, lse,
            scratch, lse_accum, o_scale,
        )  # fmt: skip
        self._merge(
            stream, sched_meta, num_splits, scratch, lse_accum, o_scale, out, lse, 0,
            context_is_current=current,
        )  # fmt: skip

    def _encode(self, k_cache: int) -> bytes:
        """The two tensor maps of a cache: boxes of half of V's chunks (64 columns) and of one."""
        call = self._call

        def encode(chunks: int) -> bytes:
            return jit.tensor_map(
                k_cache,
                cast(Literal["bfloat16", "float16"], call.dtype),
                (64, call.page_block_size, call.d_qk // 64, call.h_kv, call.num_blocks),
                (2 * call.k_stride_token, 128, 2 * call.k_stride_head, 2 * call.k_stride_block),
                (64, box_rows(call.page_block_size), chunks, 1, 1),
                "128b",
                "none",
            )

        if len(self._maps) >= _MAX_MAPS:
            self._maps.clear()
        maps = self._maps[k_cache] = encode(4) + encode(1)
        return maps
