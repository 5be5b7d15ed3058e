"""Host side of cuda_src/kernels/mla_unite_selections.cu and mla_find_not_finite.cu, which come before the
attention of query tokens that share the rows of a tile.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from .. import jit
from .common import BLOCK_TOKENS, ceil_div

__all__ = [
    "GROUP_TOKENS",
    "MAX_CAPACITY",
    "MAX_ROWS",
    "capacity",
    "find_not_finite",
    "not_finite_bytes",
    "selected_bytes",
    "specs",
    "unite",
]

GROUP_TOKENS = (2, 4, 8)
"""Query tokens of a tile of 64 rows, with 32, 16 and 8 heads."""
MAX_CAPACITY = 16_384
"""Indices that the tokens of a group may have together."""
MAX_ROWS = 32_768
"""Rows of kv."""

_UNITE_PARAMS = struct.Struct("<8Qq4i")  # Params of mla_unite_selections.cu
_FIND_PARAMS = struct.Struct("<2Qqi4x")  # Params of mla_find_not_finite.cu
_FIND_THREADS = 128
_SMEM_BYTES = (MAX_ROWS + MAX_CAPACITY) * 9 // 8 + 256

_FIND = jit.KernelSpec("mla_find_not_finite", (), threads=_FIND_THREADS, smem_bytes=0)
_UNITE = jit.KernelSpec(
    "mla_unite_selections",
    (("MAX_ENTRIES", MAX_CAPACITY), ("MAX_ROWS", MAX_ROWS), ("SMEM_BYTES", _SMEM_BYTES)),
    threads=256,
    smem_bytes=_SMEM_BYTES,
)


def specs() -> list[jit.KernelSpec]:
    """Both kernels."""
    return [_FIND, _UNITE]


def capacity(group_tokens: int, topk: int) -> int:
    """Room for the united selection of a group: whole blocks."""
    return ceil_div(group_tokens * topk, BLOCK_TOKENS) * BLOCK_TOKENS


def not_finite_bytes(num_rows: int) -> int:
    """Of a bit for each row."""
    return ceil_div(num_rows, 32) * 4


def selected_bytes(group_tokens: int, group_capacity: int) -> int:
    """Of the words of a group."""
    return group_capacity // BLOCK_TOKENS * 2 * group_tokens * 8


def find_not_finite(
    *,
    device: int,
    stream: int,
    capturing: Callable[[], bool],
    rows: int,
    not_finite: int,
    row_stride: int,
    num_rows: int,
) -> None:
    """Enqueue the search for NaN and Inf; arrays are given as device addresses, the stride in bytes."""
    kernel = jit.get_kernel(_FIND, device, capturing=capturing)
    params = _FIND_PARAMS.pack(rows, not_finite, row_stride, num_rows)
    warps = not_finite_bytes(num_rows)  # a byte each
    kernel.launch((ceil_div(warps, _FIND_THREADS // 32), 1, 1), params, stream, pdl=True)


def unite(
    *,
    device: int,
    stream: int,
    capturing: Callable[[], bool],
    indices: int,
    topk_length: int,
    not_finite: int,
    attn_sink: int,
    rows: int,
    counts: int,
    selected: int,
    sinks: int,
    index_stride: int,
    topk: int,
    num_rows: int,
    group_tokens: int,
    groups: int,
) -> None:
    """Enqueue the uniting of the selections of `groups` groups; arrays are given as device addresses."""
    kernel = jit.get_kernel(_UNITE, device, capturing=capturing)
    params = _UNITE_PARAMS.pack(
        indices, topk_length, not_finite, attn_sink, rows, counts, selected, sinks, index_stride, topk,
        num_rows, group_tokens, capacity(group_tokens, topk),
    )  # fmt: skip
    kernel.launch((groups, 1, 1), params, stream, pdl=True)
