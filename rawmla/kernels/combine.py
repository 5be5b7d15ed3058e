"""Host side of cuda_src/kernels/mla_combine.cu: merging the pieces of split requests."""

from __future__ import annotations

import struct
from functools import cache

from .. import jit
from .common import D_V, DTYPES, ceil_div

__all__ = ["PARAMS", "grid", "spec", "specs"]

PARAMS = struct.Struct("<5Q3qQ6i")  # Params of mla_combine.cu
_ROWS_PER_CTA = (1, 4)


@cache
def spec(dtype: str, rows_per_cta: int) -> jit.KernelSpec:
    """A variant: four groups of 128 threads share one row's pieces, or take a row each."""
    groups = 4 // rows_per_cta
    return jit.KernelSpec(
        "mla_combine",
        (("DTYPE", DTYPES[dtype]), ("ROWS_PER_CTA", rows_per_cta)),
        threads=512,
        smem_bytes=(groups - 1) * D_V * 4,
    )


def specs(dtype: str) -> list[jit.KernelSpec]:
    """The variants for one dtype."""
    return [spec(dtype, rows) for rows in _ROWS_PER_CTA]


def grid(rows: int, b: int, num_parts: int, by_request: bool) -> tuple[tuple[int, int, int], int]:
    """(grid, rows per CTA): many pieces per request are shared by a CTA, few are not worth meeting for."""
    rows_per_cta = 1 if 4 * b <= num_parts else 4
    return (ceil_div(rows, rows_per_cta), b if by_request else num_parts, 1), rows_per_cta
