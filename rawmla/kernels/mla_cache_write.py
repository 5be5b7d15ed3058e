"""Host side of cuda_src/kernels/mla_cache_write.cu: writes tokens into a paged cache.

They are quantised if the format of the cache is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from .. import jit
from ..jit.params import I32, POINTER, U32, ParamStruct
from .common import ceil_div, divisor
from .mla_cache_rows import UNIT_TOKENS, CacheFormat

PARAMS = ParamStruct(
    POINTER("kv_c", "k_pe", "slots", "cache"),
    I32("kv_c_stride", "k_pe_stride", "source_block_stride", "block_stride", "token_stride"),
    I32("num_slots", "tokens", "page_block_size"),
    U32("page_magic"),
    I32("page_shift", "slots_are_64bit", "sources_are_aligned"),
)
_THREADS = 64
_TOKENS_PER_CTA = _THREADS // 32 * UNIT_TOKENS


@cache
def spec(format: CacheFormat, has_slots: bool) -> jit.KernelSpec:
    """The variant for a format: writes tokens to given slots or, without, a whole cache."""
    defines = (("FORMAT", format.code), ("SLOTS", int(has_slots)))
    return jit.KernelSpec("mla_cache_write", defines, threads=_THREADS, smem_bytes=0)


def launch(
    format: CacheFormat,
    *,
    device: int,
    stream: int,
    capturing: Callable[[], bool],
    slots: int,
    tokens: int,
    page_block_size: int,
    **members: int,
) -> None:
    """Enqueue the kernel on arrays given as device addresses, for at least one token.

    ``members``: the others of `PARAMS`, but for the divisor. Strides of the sources are in elements, strides
    of the cache in bytes. ``slots`` 0: token t goes to slot t, and the sources are blocks
    ``source_block_stride`` apart. ``sources_are_aligned``: every row of both sources begins at a multiple of
    16 bytes.
    """
    kernel = jit.get_kernel(spec(format, slots != 0), device, capturing=capturing)
    page_magic, page_shift = divisor(page_block_size)
    params = PARAMS.pack(
        slots=slots,
        tokens=tokens,
        page_block_size=page_block_size,
        page_magic=page_magic,
        page_shift=page_shift,
        **members,
    )
    kernel.launch((ceil_div(tokens, _TOKENS_PER_CTA), 1, 1), params, stream, pdl=True)
