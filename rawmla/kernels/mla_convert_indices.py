"""Host side of cuda_src/kernels/mla_convert_indices.cu: token positions to slots of the cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from .. import jit
from ..jit.params import I32, I64, POINTER, U32, ParamStruct
from .common import ceil_div, divisor

PARAMS = ParamStruct(
    POINTER("indices", "block_table", "request_ids", "out", "counts"),
    I64("indices_stride_n", "indices_stride_s", "out_stride_n", "out_stride_s", "table_stride"),
    I32("rows", "s_q", "topk", "num_requests", "table_width", "page_block_size"),
    U32("page_magic"),
    I32("page_shift"),
)
_THREADS = 256
_WARPS = _THREADS // 32
_WARP_COLUMNS = 256  # of a row that one warp takes at a time


@cache
def spec(row_warps: int, compact: bool) -> jit.KernelSpec:
    """The variant with ``row_warps`` warps for a row; ``compact`` moves the valid indices to the front."""
    defines = (("COMPACT", int(compact)), ("ROW_WARPS", row_warps))
    return jit.KernelSpec("mla_convert_indices", defines, threads=_THREADS, smem_bytes=0)


def specs() -> list[jit.KernelSpec]:
    """All variants."""
    return [spec(row_warps, compact) for row_warps in (1, _WARPS) for compact in (False, True)]


def launch(
    *,
    device: int,
    stream: int,
    capturing: Callable[[], bool],
    counts: int,
    indices_strides: tuple[int, int],
    out_strides: tuple[int, int],
    rows: int,
    topk: int,
    page_block_size: int,
    **members: int,
) -> None:
    """Enqueue the kernel on arrays given as device addresses, for at least one of its n * s_q rows.

    ``members``: the others of `PARAMS`, but for the divisor. Strides are in elements; indices and out have
    them for the dimensions n and s_q. ``request_ids`` 0: the i-th of the n belongs to request i. ``counts``,
    int32 [rows], gets the number of valid indices of each row, which are moved to its front; 0: they stay
    where they are.
    """
    row_warps = 1 if topk <= _WARP_COLUMNS else _WARPS
    kernel = jit.get_kernel(spec(row_warps, counts != 0), device, capturing=capturing)
    page_magic, page_shift = divisor(page_block_size)
    params = PARAMS.pack(
        counts=counts,
        indices_stride_n=indices_strides[0],
        indices_stride_s=indices_strides[1],
        out_stride_n=out_strides[0],
        out_stride_s=out_strides[1],
        rows=rows,
        topk=topk,
        page_block_size=page_block_size,
        page_magic=page_magic,
        page_shift=page_shift,
        **members,
    )
    kernel.launch((ceil_div(rows, _WARPS // row_warps), 1, 1), params, stream, pdl=True)
