"""Host side of cuda_src/kernels/mla_cache_gather.cu: copies tokens of a paged cache into rows of bf16."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from .. import jit
from ..jit.params import I32, I64, POINTER, U32, ParamStruct
from .common import ceil_div, divisor
from .mla_cache_rows import UNIT_TOKENS, CacheFormat

PARAMS = ParamStruct(
    POINTER("cache", "block_table", "cache_seqlens", "workspace_starts", "seq_starts", "out"),
    I64("table_stride", "out_stride"),
    I32("block_stride", "token_stride", "b", "table_width", "num_blocks", "rows", "page_block_size"),
    U32("page_magic"),
    I32("page_shift"),
)
_THREADS = {True: 64, False: 32}  # by is_paged


def _rows_per_cta(is_paged: bool) -> int:
    return _THREADS[is_paged] // 32 * UNIT_TOKENS


@cache
def spec(format: CacheFormat, is_paged: bool) -> jit.KernelSpec:
    """The variant for a format: gathers requests by their block table, or a cache in order."""
    defines = (("FORMAT", format.code), ("PAGED", int(is_paged)))
    return jit.KernelSpec("mla_cache_gather", defines, threads=_THREADS[is_paged], smem_bytes=0)


def launch(
    format: CacheFormat,
    is_paged: bool,
    *,
    device: int,
    stream: int,
    capturing: Callable[[], bool],
    rows: int,
    page_block_size: int,
    **members: int,
) -> None:
    """Enqueue the kernel on arrays given as device addresses, for at least one row of the output.

    ``members``: the others of `PARAMS`, but for the divisor. Strides of the table and of ``out`` are in
    elements, strides of the cache in bytes. Not ``is_paged``: row r is slot r, and the arguments about
    requests have no effect. ``seq_starts`` 0: every request from its first token on.
    """
    kernel = jit.get_kernel(spec(format, is_paged), device, capturing=capturing)
    page_magic, page_shift = divisor(page_block_size)
    params = PARAMS.pack(
        rows=rows, page_block_size=page_block_size, page_magic=page_magic, page_shift=page_shift, **members
    )
    kernel.launch((ceil_div(rows, _rows_per_cta(is_paged)), 1, 1), params, stream, pdl=True)
