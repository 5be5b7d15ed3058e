"""Host side of cuda_src/kernels/mla_unite_selections.cu and mla_find_not_finite.cu.

Both run before the attention of groups of query tokens that share the rows of a tile: the first unites what
the tokens of a group select, the second finds the rows of kv that hold NaN or Inf.
"""

from __future__ import annotations

from collections.abc import Callable

from .. import jit
from ..jit.params import I32, I64, POINTER, ParamStruct
from .common import BLOCK_TOKENS, ceil_div

GROUP_TOKENS = (2, 4, 8)
"""Query tokens of a tile of 64 rows, with 32, 16 and 8 heads."""
MAX_CAPACITY = 16_384
"""Indices that the tokens of a group may have together."""
MAX_ROWS = 32_768
"""Rows that kv may have."""

UNITE_PARAMS = ParamStruct(
    POINTER("indices", "topk_length", "not_finite", "attn_sink", "rows", "counts", "selected", "sinks"),
    I64("index_stride"),
    I32("topk", "num_rows", "group_tokens", "capacity"),
)
FIND_PARAMS = ParamStruct(POINTER("rows", "not_finite"), I64("row_stride"), I32("num_rows"))
_FIND_THREADS = 128
_FIND = jit.KernelSpec("mla_find_not_finite", (), threads=_FIND_THREADS, smem_bytes=0)
_UNITE = jit.KernelSpec(
    "mla_unite_selections",
    (("MAX_ENTRIES", MAX_CAPACITY), ("MAX_ROWS", MAX_ROWS)),
    threads=256,
    smem_bytes=(MAX_ROWS + MAX_CAPACITY) * 9 // 8 + 256,
)


def specs() -> list[jit.KernelSpec]:
    """Both kernels."""
    return [_FIND, _UNITE]


def capacity(group_tokens: int, topk: int) -> int:
    """Rows that a group can select, rounded up to whole blocks."""
    return ceil_div(group_tokens * topk, BLOCK_TOKENS) * BLOCK_TOKENS


def not_finite_bytes(num_rows: int) -> int:
    """Bytes of ``not_finite``, which has a bit for each row."""
    return ceil_div(num_rows, 32) * 4


def selected_bytes(group_tokens: int, group_capacity: int) -> int:
    """Bytes of ``selected`` for one group: two 64-bit words for each block and token."""
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
    """Enqueue the search for NaN and Inf on arrays given as device addresses; the stride is in bytes."""
    kernel = jit.get_kernel(_FIND, device, capturing=capturing)
    params = FIND_PARAMS.pack(rows=rows, not_finite=not_finite, row_stride=row_stride, num_rows=num_rows)
    warps = not_finite_bytes(num_rows)  # each writes one byte
    kernel.launch((ceil_div(warps, _FIND_THREADS // 32), 1, 1), params, stream, pdl=True)


def unite(
    *,
    device: int,
    stream: int,
    capturing: Callable[[], bool],
    topk: int,
    group_tokens: int,
    groups: int,
    **members: int,
) -> None:
    """Enqueue the uniting for ``groups`` groups on arrays given as device addresses.

    ``members``: the others of `UNITE_PARAMS`, but for the capacity. ``topk_length`` and ``attn_sink`` may be
    0. ``rows``, ``counts``, ``selected`` and ``sinks`` are written.
    """
    kernel = jit.get_kernel(_UNITE, device, capturing=capturing)
    params = UNITE_PARAMS.pack(
        topk=topk, group_tokens=group_tokens, capacity=capacity(group_tokens, topk), **members
    )
    kernel.launch((groups, 1, 1), params, stream, pdl=True)
