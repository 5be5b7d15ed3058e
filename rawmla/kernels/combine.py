"""Host side of cuda_src/kernels/mla_combine.cu: merging the pieces of split requests."""

from __future__ import annotations

import struct
from functools import cache

from .. import jit
from .common import D_V, DTYPES, ceil_div

__all__ = ["PARAMS", "grid", "spec", "specs"]

PARAMS = struct.Struct("<5Q3qQ6i")  # Params of mla_combine.cu
_PIECE_GROUPS = (1, 4)
_RESIDENT_CTAS = 528  # of 512 threads on 132 SMs


@cache
def spec(dtype: str, piece_groups: int) -> jit.KernelSpec:
    """A variant: a warp merges a row's pieces, or 16 warps in 4 groups do."""
    return jit.KernelSpec(
        "mla_combine",
        (("DTYPE", DTYPES[dtype]), ("PIECE_GROUPS", piece_groups)),
        threads=128 if piece_groups == 1 else 512,
        smem_bytes=(piece_groups - 1) * D_V * 4,
    )


def specs(dtype: str) -> list[jit.KernelSpec]:
    """The variants for one dtype."""
    return [spec(dtype, groups) for groups in _PIECE_GROUPS]


def grid(
    rows: int, b: int, num_parts: int, by_request: bool, batch_invariant: bool
) -> tuple[tuple[int, int, int], int]:
    """(grid, piece groups): 16 warps per row while all rows are resident at once, else one.

    A batch-invariant sum must not be grouped by the batch: always one.
    """
    if not batch_invariant and min(b, num_parts) * rows <= _RESIDENT_CTAS:
        return (rows, b if by_request else num_parts, 1), 4
    return (ceil_div(rows, 4), b if by_request else num_parts, 1), 1
