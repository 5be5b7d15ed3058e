"""Host side of cuda_src/kernels/mla_cache_write.cu: tokens into a paged cache, quantised if its layout is."""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import cache

from .. import jit
from .common import ceil_div
from .division import divisor
from .mla_cache_rows import UNIT_TOKENS, CacheLayout

__all__ = ["PARAMS", "launch", "spec", "specs"]

PARAMS = struct.Struct("<4Q8iI3i")  # Params of mla_cache_write.cu
_THREADS = 64
_TOKENS_PER_CTA = _THREADS // 32 * UNIT_TOKENS


@cache
def spec(layout: CacheLayout, has_slots: bool) -> jit.KernelSpec:
    """The variant of a layout."""
    defines = (("FORMAT", layout.code), ("SLOTS", int(has_slots)))
    return jit.KernelSpec("mla_cache_write", defines, threads=_THREADS, smem_bytes=0)


def specs(layout: CacheLayout) -> list[jit.KernelSpec]:
    """The variants of a layout: writing new tokens, and quantising whole caches."""
    return [spec(layout, True), *([spec(layout, False)] if layout.is_quantized else [])]


def launch(
    layout: CacheLayout,
    *,
    device: int,
    stream: int,
    capturing: Callable[[], bool],
    kv_c: int,
    k_pe: int,
    slots: int,
    slots_are_64bit: bool,
    cache: int,
    kv_c_stride: int,
    k_pe_stride: int,
    source_block_stride: int,
    block_stride: int,
    token_stride: int,
    num_slots: int,
    tokens: int,
    page_block_size: int,
    sources_are_aligned: bool,
) -> None:
    """Enqueue the writing of `tokens` tokens, at least one; arrays are given as device addresses.

    Strides of the sources are in elements, those of the cache in bytes. `slots` 0: token t goes to slot t,
    and the sources are blocks `source_block_stride` apart.
    """
    kernel = jit.get_kernel(spec(layout, slots != 0), device, capturing=capturing)
    params = PARAMS.pack(
        kv_c, k_pe, slots, cache, kv_c_stride, k_pe_stride, source_block_stride, block_stride, token_stride,
        num_slots, tokens, page_block_size, *divisor(page_block_size), slots_are_64bit, sources_are_aligned,
    )  # fmt: skip
    kernel.launch((ceil_div(tokens, _TOKENS_PER_CTA), 1, 1), params, stream, pdl=True)
