"""Host side of cuda_src/kernels/mla_convert_indices.cu: token positions in requests to slots in the cache."""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import cache

from .. import jit
from .common import ceil_div
from .division import divisor

__all__ = ["PARAMS", "launch", "spec", "specs"]

PARAMS = struct.Struct("<5Q5q6iIi")  # Params of mla_convert_indices.cu
_THREADS = 256
_WARPS = _THREADS // 32
_ROW_WARPS = (1, _WARPS)
_WARP_COLUMNS = 256  # of a row that one warp takes at a time


@cache
def spec(row_warps: int, compact: bool) -> jit.KernelSpec:
    """The variant for that many warps per row."""
    defines = (("COMPACT", int(compact)), ("ROW_WARPS", row_warps))
    return jit.KernelSpec("mla_convert_indices", defines, threads=_THREADS, smem_bytes=0)


def specs() -> list[jit.KernelSpec]:
    """All variants."""
    return [spec(row_warps, compact) for row_warps in _ROW_WARPS for compact in (False, True)]


def launch(
    *,
    device: int,
    stream: int,
    capturing: Callable[[], bool],
    indices: int,
    block_table: int,
    request_ids: int,
    out: int,
    counts: int,
    indices_strides: tuple[int, int],
    out_strides: tuple[int, int],
    table_stride: int,
    rows: int,
    s_q: int,
    topk: int,
    num_requests: int,
    table_width: int,
    page_block_size: int,
) -> None:
    """Enqueue the conversion of `rows` rows (n * s_q), at least one; arrays are given as device addresses.

    Strides are in elements, of the first and second dimension. `request_ids` 0: i belongs to request i.
    `counts` 0: nothing is moved, else int32 [rows].
    """
    row_warps = 1 if topk <= _WARP_COLUMNS else _WARPS
    kernel = jit.get_kernel(spec(row_warps, counts != 0), device, capturing=capturing)
    params = PARAMS.pack(
        indices, block_table, request_ids, out, counts, *indices_strides, *out_strides, table_stride, rows,
        s_q, topk, num_requests, table_width, page_block_size, *divisor(page_block_size),
    )  # fmt: skip
    kernel.launch((ceil_div(rows, _WARPS // row_warps), 1, 1), params, stream, pdl=True)
