"""What the kernels' host sides share: type codes, and the constants of cuda_src/sched/plan.cuh."""

from __future__ import annotations

DTYPES = {"bfloat16": 0, "float16": 1}  # values of the define DTYPE
BLOCK_TOKENS = 64
D_V = 512
BATCH_INVARIANT_MIN_BLOCKS = 8
BATCH_INVARIANT_MAX_PIECES = 32


def ceil_div(a: int, b: int) -> int:
    """The quotient rounded up, for a >= 0 and b > 0."""
    return -(-a // b)
