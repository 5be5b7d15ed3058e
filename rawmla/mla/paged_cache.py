"""The check of a paged cache of one KV head, for every function that reads or writes one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..call.checks import INT32_MAX, usable_strides
from ..call.frameworks import Fields
from ..kernels.mla_cache_rows import CacheFormat

BYTE_DTYPES = ("float8_e4m3fn", "uint8", "int8")
"""The dtypes that the bytes of a quantised cache may have."""

_UINT32_MAX = 2**32 - 1


class PagedCache(NamedTuple):
    """A cache `[num_blocks, page_block_size, 1, columns]` that passed the check; strides in bytes.

    The addresses of all tokens are multiples of ``alignment``, which is 16 or 8.
    """

    format: CacheFormat
    ptr: int
    num_blocks: int
    page_block_size: int
    block_stride: int
    token_stride: int
    alignment: int


def check_paged_cache(
    name: str,
    view: Fields,
    formats: Sequence[CacheFormat],
    *,
    of: str = "",
    least_alignment: int | None = None,
) -> PagedCache:
    """Check a cache that may be in any of these formats. Its dtype and last dimension say in which.

    Tokens of a quantised cache follow each other within a block; all other strides are free, 0 among them.
    ``of`` is the part of an error's text that says what chose these formats.
    ``least_alignment``, in bytes, is for kernels that read quantised rows at less than their usual alignment.
    """
    ptr, shape, strides, dtype, _, _, _ = view
    is_quantized = dtype in BYTE_DTYPES
    itemsize = 1 if is_quantized else 2
    fitting = {
        format.token_bytes // itemsize: format for format in formats if format.is_quantized == is_quantized
    }
    if not fitting or not is_quantized and dtype != "bfloat16":
        wanted = [*BYTE_DTYPES] if any(format.is_quantized for format in formats) else []
        wanted += ["bfloat16"] if not all(format.is_quantized for format in formats) else []
        raise TypeError(f"{name}: expected dtype {' or '.join(wanted)}{of}, got {dtype}")
    if len(shape) != 4 or shape[2] != 1 or shape[3] not in fitting or not 0 < shape[1] <= INT32_MAX:
        columns = " or ".join(map(str, fitting))
        raise ValueError(
            f"{name}: expected shape [num_blocks, page_block_size, 1, {columns}]{of}, with page_block_size "
            f"at least 1, got {dtype} {list(shape)}"
        )
    format = fitting[shape[3]]
    block_stride, token_stride, _, step = usable_strides(shape, strides)
    if step != 1 or is_quantized and token_stride != shape[3]:
        raise ValueError(
            f"{name}: expected contiguous "
            f"{'tokens (only the stride of blocks is free)' if is_quantized else 'columns'}, got strides "
            f"{list(strides)} (elements) of shape {list(shape)}"
        )
    block_bytes = block_stride * itemsize
    row_bytes = format.row_bytes if is_quantized else token_stride * itemsize
    needed = least_alignment if is_quantized and least_alignment is not None else format.alignment
    steps = ptr | block_bytes | row_bytes
    alignment = 16 if not steps % 16 else 8 if not steps % 8 else 1
    if alignment < needed or block_stride < 0 or not 0 <= row_bytes <= _UINT32_MAX:
        raise ValueError(
            f"{name}: expected an address and strides that are multiples of {needed} bytes, strides not "
            f"negative and tokens less than 4 GiB apart, got address {ptr:#x}, strides {list(strides)} "
            f"(elements) of shape {list(shape)}"
        )
    return PagedCache(format, ptr, shape[0], shape[1], block_bytes, row_bytes, alignment)
