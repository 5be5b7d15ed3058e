"""Division by a number that the host knows, as a multiplication: cuda_src/common/division.cuh."""

from __future__ import annotations

__all__ = ["divisor", "exact_divisor"]


def divisor(d: int) -> tuple[int, int]:
    """(magic, shift): n // d is n * magic >> shift for 0 <= n < 2**31. 1 <= d < 2**31."""
    shift = 31 + (d - 1).bit_length()
    return -(-(1 << shift) // d), shift


def exact_divisor(d: int) -> tuple[int, int]:
    """(inverse, shift): n // d of a multiple n of d is (n >> shift) * inverse, modulo 2**32. 1 <= d."""
    shift = (d & -d).bit_length() - 1
    return pow(d >> shift, -1, 2**32), shift
