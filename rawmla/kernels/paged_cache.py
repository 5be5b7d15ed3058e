"""How kernels read keys from a paged cache: what a call says of it, its parameters and its tensor maps."""

from __future__ import annotations

from typing import Any, NamedTuple

from .. import jit
from .common import divisor, exact_divisor, fields
from .tensor_maps import NO_MAP

CACHE_DTYPES = ("same", "e4m3", "e5m2")
"""Dtypes of a cache: the dtype of q, or FP8."""
_PIECE_TOKENS = 16
"""Tokens of a page that are copied together: cuda_src/mha/paged_keys.cuh."""


class PagedCache(NamedTuple):
    """A cache whose keys come before the keys in k. Strides are in its elements, for (block, head)."""

    dtype: str  # one of CACHE_DTYPES
    num_blocks: int
    block_size: int
    x: int  # contiguous dimensions in k_cache
    v_pack: int  # contiguous tokens in an interleaved v_cache; 0: not interleaved
    k_strides: tuple[int, int]
    v_strides: tuple[int, int]
    table_stride: int  # of the rows of block_table, in its elements
    table_columns: int
    table_bytes: int  # of an entry: 4 or 8
    table_has_pointers: bool
    own_in_cache: bool  # the tokens of q have their keys there, and there is no k
    skip_decode: bool
    k_scale: float | None  # a number of the host; None: on the device, or 1 where there is no address
    v_scale: float | None
    out_fp8: bool
    out_scale: float | None

    @property
    def tokens(self) -> int:
        """Tokens of a request that have entries in the block table."""
        return self.table_columns * self.block_size

    @property
    def together(self) -> int:
        """Elements in 16 bytes."""
        return 8 if self.dtype == "same" else 16

    def by_tma(self, d: int) -> bool:
        """Whether TMA can copy pages without a gather: cuda_src/mha/paged_keys.cuh."""
        return (
            self.x == self.together
            and d % self.together == 0
            and self.v_pack == 0
            and self.block_size % _PIECE_TOKENS == 0
            and self.num_blocks > 0
            and not any(stride % self.together for stride in self.k_strides + self.v_strides)
        )


_NO_CACHE = dict.fromkeys(
    (
        *("table_stride", "num_blocks", "block_size", "block_magic", "block_shift"),
        *("block_bytes_inverse", "block_bytes_shift"),
        *("k_stride_block", "k_stride_head", "v_stride_block", "v_stride_head", "x", "v_pack"),
        *("table_entry", "cache_by_tma", "own_in_cache"),
        *("k_scale_value", "v_scale_value", "out_scale_value"),
    ),
    0,
)


def cache_params(cache: PagedCache | None, d: int) -> dict[str, Any]:
    """The members of a kernel's parameters that a cache of head dimension ``d`` has; None: zeros."""
    if cache is None:
        return _NO_CACHE
    magic, shift = divisor(cache.block_size)
    inverse = bytes_shift = 0
    if cache.table_has_pointers:
        itemsize = 2 if cache.dtype == "same" else 1
        inverse, bytes_shift = exact_divisor(cache.k_strides[0] * itemsize)
    return {
        **fields(cache, "table_stride", "num_blocks", "block_size", "x", "v_pack"),
        **fields(cache, "own_in_cache"),
        "block_magic": magic,
        "block_shift": shift,
        "k_stride_block": cache.k_strides[0],
        "k_stride_head": cache.k_strides[1],
        "v_stride_block": cache.v_strides[0],
        "v_stride_head": cache.v_strides[1],
        "block_bytes_inverse": inverse,
        "block_bytes_shift": bytes_shift,
        "table_entry": 2 if cache.table_has_pointers else int(cache.table_bytes == 8),
        "cache_by_tma": cache.by_tma(d),
        "k_scale_value": 1.0 if cache.k_scale is None else cache.k_scale,
        "v_scale_value": 1.0 if cache.v_scale is None else cache.v_scale,
        "out_scale_value": 1.0 if cache.out_scale is None else cache.out_scale,
    }


def page_maps(
    cache: PagedCache, dtype: str, heads: int, d: int, columns: int, k: int, v: int
) -> tuple[bytes, bytes]:
    """The tensor maps of the pages at ``k`` and ``v``: boxes of 16 tokens and of the columns that a kernel
    computes.
    """
    if not cache.by_tma(d):
        return NO_MAP, NO_MAP
    # Pieces of FP8 caches are converted, and not swizzled before.
    is_fp8 = cache.dtype != "same"
    of_cache = "uint8" if is_fp8 else dtype
    size, together = cache.block_size, cache.together
    step = 16 // together
    (k_block, k_head), (v_block, v_head) = cache.k_strides, cache.v_strides
    return (
        jit.tensor_map(
            k,
            of_cache,
            (together * size, d // together, heads, cache.num_blocks),
            (16 * size, step * k_head, step * k_block),
            (together * _PIECE_TOKENS, columns // together, 1, 1),
            "none",
            "256b",
        ),
        jit.tensor_map(
            v,
            of_cache,
            (size, d, heads, cache.num_blocks),
            (step * size, step * v_head, step * v_block),
            (_PIECE_TOKENS, columns, 1, 1),
            "none" if is_fp8 else "32b",
            "256b",
        ),
    )
