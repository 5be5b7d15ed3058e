"""Division by a number that the host knows, as a multiplication: cuda_src/common/division.cuh."""

from __future__ import annotations

__all__ = ["divisor"]


def divisor(d: int) -> tuple[int, int]:
    """(magic, shift): n // d is n * magic >> shift for 0 <= n < 2**31. 1 <= d < 2**31."""
    shift = 31 + (d - 1).bit_length()
    return -(-(1 << shift) // d), shift
