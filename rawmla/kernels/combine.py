"""Host side of cuda_src/kernels/mla_combine.cu: merging the pieces of split requests."""

from __future__ import annotations

import struct
from functools import cache

from .. import jit
from .common import D_V, DTYPES, ceil_div

__all__ = ["PARAMS", "grid", "scratch_addresses", "slot_row_bytes", "spec", "specs"]

PARAMS = struct.Struct("<6Q3qQ6i")  # Params of mla_combine.cu
_RESIDENT_ROWS = {8: 132, 4: 528}  # by piece groups: rows that CTAs of 512 or 256 threads merge at once
_ROWS_PER_CTA = 2  # without piece groups
_PIECE_BYTES = {"bfloat16": 2, "float16": 4}  # of a number in o_accum, by the dtype of the call
_SCALARS = 3  # lse_accum_log2 and two o_scale_log2


@cache
def slot_row_bytes(dtype: str) -> int:
    """Bytes of scratch for a query row of a piece: cuda_src/sched/pieces.cuh."""
    return D_V * _PIECE_BYTES[dtype] + 4 * _SCALARS


def scratch_addresses(dtype: str, scratch: int, slot_rows: int) -> tuple[int, int, int]:
    """Addresses of o_accum, lse_accum_log2 and o_scale_log2 in scratch for that many rows of pieces."""
    lse_accum = scratch + slot_rows * D_V * _PIECE_BYTES[dtype]
    return scratch, lse_accum, lse_accum + 4 * slot_rows


@cache
def spec(dtype: str, piece_groups: int) -> jit.KernelSpec:
    """A variant: two warps merge a row's pieces, or 4 or 8 such pairs share them."""
    return jit.KernelSpec(
        "mla_combine",
        (("DTYPE", DTYPES[dtype]), ("PIECE_GROUPS", piece_groups)),
        threads=64 * (piece_groups if piece_groups > 1 else _ROWS_PER_CTA),
        smem_bytes=(piece_groups - 1) * D_V * 4,
    )


def specs(dtype: str) -> list[jit.KernelSpec]:
    """The variants for one dtype."""
    return [spec(dtype, groups) for groups in (1, *_RESIDENT_ROWS)]


def grid(
    rows: int, b: int, num_parts: int, by_request: bool, batch_invariant: bool
) -> tuple[tuple[int, int, int], int]:
    """(grid, piece groups): as many warps per row as still run all rows at once.

    A batch-invariant sum must not be grouped by the batch: always one group.
    """
    candidates = b if by_request else num_parts
    if not batch_invariant:
        for piece_groups, resident in _RESIDENT_ROWS.items():
            if min(b, num_parts) * rows <= resident:
                return (rows, candidates, 1), piece_groups
    return (ceil_div(rows, _ROWS_PER_CTA), candidates, 1), 1
