"""Sums of captured gradients in the backward of flex attention, on the emulated device."""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from flex_points import built, needs_host_compiler

torch = pytest.importorskip("torch")

from kit.flex import FlexCase  # noqa: E402
from operations.flex_backward import BackwardCase, make_flex_backward_call  # noqa: E402

if TYPE_CHECKING:
    from emulator import Emulator

pytestmark = needs_host_compiler
SMALL: dict[str, Any] = {"b": 1, "h_q": 2, "h_kv": 1, "s_q": 70, "s_k": 140}
PLACES: dict[str, Any] = {"relative table": slice(61, 201), "query scale": (1, 60)}
"""Where query 60 of head 1 adds: in units, and in digits."""
DIGITS = np.dtype([("digits", "<i8", (12, 32)), ("rest", "<f4", 32)])
CELLS_ALONE = """
#include "flex/captured_cells.cuh"
extern "C" double sum_of(const float* values, CapturedDigits* sums, int count) {
    for (int i = 0; i < count; ++i) {
        const TwoDigits two(__float_as_uint(values[i]));
        sums->digits[two.first][0] += two.low;
        sums->digits[two.first + 1][0] += two.high;
    }
    return sum_of_digits(*sums, 0);
}
extern "C" double unit(float largest, int terms_log2) {
    return power_of_two(-units_exponent(__float_as_uint(largest), terms_log2));
}
"""


@pytest.fixture(scope="module")
def cells() -> ctypes.CDLL:
    library = built(CELLS_ALONE)
    library.sum_of.restype = library.unit.restype = ctypes.c_double
    return library


def gradient(emulator: Emulator, score: str, seed: int, *infinite: tuple[int, ...]) -> Any:
    """The gradient of what a score function reads. grad_out is infinite at places (h, query, column)."""
    emulator.seed = seed
    call = make_flex_backward_call(BackwardCase(FlexCase(**SMALL, score=score), "both"), "cpu")
    for place in infinite:
        call.arguments["grad_out"][0][place] = math.inf
    return call.run()[3]


@pytest.mark.parametrize("score", PLACES)
def test_the_same_bits_in_any_order(emulator: Emulator, score: str) -> None:
    first, *others = (gradient(emulator, score, seed) for seed in range(3))
    assert bool(first.any()) and all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("score", PLACES)
def test_numbers_that_are_not_finite(emulator: Emulator, score: str) -> None:
    """They go to their own sums, and change no others."""
    want, got = (gradient(emulator, score, 1, *infinite) for infinite in ((), ((1, 60, 3),)))
    assert not got[PLACES[score]].isfinite().any()
    got[PLACES[score]] = want[PLACES[score]]
    assert torch.equal(got, want)


def test_digits_of_any_exponent(cells: ctypes.CDLL) -> None:
    """From the smallest float32 to the largest, of both signs: the sum is exact."""
    draw = np.random.default_rng(1)
    values = draw.integers(0, 2**32, 5000, dtype=np.uint32).view(np.float32)
    values = values[np.isfinite(values)]
    extremes = [np.finfo(np.float32).max, np.finfo(np.float32).smallest_subnormal, 1.0, -0.0]
    values = np.concatenate([values, np.array(extremes, np.float32)])
    for some in (values, values[:1], values[-1:], values[-3:-2], values[np.abs(values) < 1e-30]):
        given, sums = np.ascontiguousarray(some), np.zeros(1, DIGITS)
        addresses = [ctypes.c_void_p(x.ctypes.data) for x in (given, sums)]
        got = cells.sum_of(*addresses, len(given))
        assert got == pytest.approx(math.fsum(some.astype(float).tolist()), rel=1e-15, abs=0)


@pytest.mark.parametrize("terms_log2", (0, 20, 39))
def test_units_hold_all_terms(cells: ctypes.CDLL, terms_log2: int) -> None:
    """As many terms as there are, each as large as the largest, take 62 bits."""
    for largest in (1e-30, 0.75, 1.0, 3.0, 1e30):
        whole = cells.unit(ctypes.c_float(largest), terms_log2) * 2.0 ** (62 - terms_log2)
        assert largest * (1 - 1e-6) <= whole <= 2 * largest * (1 + 1e-6)
