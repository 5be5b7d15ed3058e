"""Host side of cuda_src/kernels/mla_combine.cu: merging the pieces of split requests."""

from __future__ import annotations

import struct
from functools import cache

from .. import jit
from .common import D_V, DTYPES, ceil_div

__all__ = ["PARAMS", "grid", "spec", "specs"]

PARAMS = struct.Struct("<5Q3qQ6i")  # Params of mla_combine.cu
_RESIDENT_ROWS = {4: 264, 2: 528}  # by piece groups: CTAs of 512 or 256 threads that run at once on 132 SMs
_ROWS_PER_CTA = 2  # without piece groups


@cache
def spec(dtype: str, piece_groups: int) -> jit.KernelSpec:
    """A variant: two warps merge a row's pieces, or 2 or 4 groups of four warps share them."""
    return jit.KernelSpec(
        "mla_combine",
        (("DTYPE", DTYPES[dtype]), ("PIECE_GROUPS", piece_groups)),
        threads=128 * piece_groups,
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
