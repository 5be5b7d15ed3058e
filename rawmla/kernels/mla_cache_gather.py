"""Host side of cuda_src/kernels/mla_cache_gather.cu: tokens of a paged cache into rows of bf16."""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import cache

from .. import jit
from .common import ceil_div
from .division import divisor
from .mla_cache_rows import UNIT_TOKENS, CacheLayout

__all__ = ["PARAMS", "launch", "spec", "specs"]

PARAMS = struct.Struct("<6Q2q7iIi4x")  # Params of mla_cache_gather.cu
_THREADS = {True: 64, False: 32}  # by is_paged


def _rows_per_cta(is_paged: bool) -> int:
    return _THREADS[is_paged] // 32 * UNIT_TOKENS


@cache
def spec(layout: CacheLayout, is_paged: bool) -> jit.KernelSpec:
    """The variant of a layout."""
    defines = (("FORMAT", layout.code), ("PAGED", int(is_paged)))
    return jit.KernelSpec("mla_cache_gather", defines, threads=_THREADS[is_paged], smem_bytes=0)


def specs(layout: CacheLayout) -> list[jit.KernelSpec]:
    """The variants of a layout: gathering requests, and dequantising whole caches."""
    return [spec(layout, True), *([spec(layout, False)] if layout.is_quantized else [])]


def launch(
    layout: CacheLayout,
    *,
    device: int,
    stream: int,
    capturing: Callable[[], bool],
    cache: int,
    block_table: int,
    cache_seqlens: int,
    workspace_starts: int,
    seq_starts: int,
    out: int,
    table_stride: int,
    out_stride: int,
    block_stride: int,
    token_stride: int,
    b: int,
    table_width: int,
    num_blocks: int,
    rows: int,
    page_block_size: int,
) -> None:
    """Enqueue the reading of at most `rows` rows, at least one; arrays are given as device addresses.

    `block_table` 0: row r is slot r, and `b` and the arrays of requests mean nothing. `seq_starts` may be 0.
    Strides of the table and of `out` are in elements, those of the cache in bytes.
    """
    is_paged = block_table != 0
    kernel = jit.get_kernel(spec(layout, is_paged), device, capturing=capturing)
    params = PARAMS.pack(
        cache, block_table, cache_seqlens, workspace_starts, seq_starts, out, table_stride, out_stride,
        block_stride, token_stride, b, table_width, num_blocks, rows, page_block_size,
        *divisor(page_block_size),
    )  # fmt: skip
    kernel.launch((ceil_div(rows, _rows_per_cta(is_paged)), 1, 1), params, stream, pdl=True)
