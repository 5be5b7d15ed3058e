"""Division by multiplication: for which numbers it is exact, by formulas and by the C++ functions."""

from __future__ import annotations

import random

import numpy as np
import pytest
from cuda_probe import assert_in_header

from rawmla.kernels import common
from rawmla.kernels.mla_dense_decode import largest_dividend


def multiply_high(numerators: np.ndarray, magic: int) -> np.ndarray:
    """`__umulhi`: the upper half of a 32 x 32-bit product."""
    return numerators.astype(np.uint64) * np.uint64(magic) >> np.uint64(32)


@pytest.mark.parametrize("divisor", (252, 1023, 6252, 65_535))
def test_largest_dividend(divisor: int) -> None:
    """Every number up to it is divided exactly, and not all of the next ones."""
    largest = largest_dividend(divisor)
    numerators = np.arange(largest + divisor + 1, dtype=np.int64)
    exact = multiply_high(numerators, -(-(2**32) // divisor)) == numerators // divisor
    assert exact[: largest + 1].all() and not exact.all()
    assert all(largest_dividend(2**k) == 2**32 - 1 for k in range(32))


def test_division_by_any_number() -> None:
    """By the C++ functions for some numbers, by their formulas for many."""
    draw = random.Random(0)
    divisors = [1, 2, 3, 7, 53, 64, 61, 576, 65535, 65536, 2**30, 2**30 + 1, 2**31 - 1]
    few = len(divisors)
    divisors += [draw.randrange(1, 2 ** draw.randint(1, 31)) for _ in range(200)]
    conditions = []
    for i, d in enumerate(divisors):
        magic, shift = common.divisor(d)
        inverse, exact_shift = common.exact_divisor(d)
        assert magic < 2**32
        near = [k * d + e for k in (1, 2, (2**31 - 1) // d) for e in (-1, 0, 1)]
        for n in (0, 2**31 - 1, *near, *(draw.randrange(2**31) for _ in range(50))):
            if 0 <= n < 2**31:
                assert n * magic >> shift == n // d
                assert (n * d >> exact_shift) * inverse % 2**32 == n
                if i < few and n in near:
                    conditions.append(f"divide({n}, {magic}u, {shift}) == {n // d}")
                    conditions.append(f"divide_exactly({n * d}ll, {inverse}u, {exact_shift}) == {n}")
    assert_in_header("common/division.cuh", conditions, constexpr=("divide", "divide_exactly"))


def test_page_of_a_token() -> None:
    """Usual page sizes are exact for every token number that an int32 length allows, any multiple of 64 up to
    8,192 for 2^27 tokens, more than a GPU's memory holds (154 GB).
    """
    for page in (32, *range(64, 641, 64), 1024, 2048, 4096, 65_536):
        assert largest_dividend(page // 16) >= 2**31 // 16 - 1
    for page in range(64, 8193, 64):
        assert largest_dividend(page // 16) >= 2**27 // 16 - 1


def test_token_of_a_query_row() -> None:
    """Rows of a KV head are (token, head) pairs; the last tile reaches up to 63 rows further."""
    for heads in range(2, 1025):
        assert largest_dividend(heads) >= 4096 * heads + 63
