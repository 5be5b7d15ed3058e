"""Comparison of a kernel's result with its reference.

Non-finite values are compared first and by place; then every element has to be close absolutely or
relatively; then the array as a whole (cosine difference) and every row of the last dimension (relative L2
error), which catch what a tolerance per element lets through: many small errors that point the same way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What `check_close` accepts.

    An element passes when its error is below `absolute` or below `relative` times the reference value.
    `cosine` bounds `1 - 2 (x.y) / (x.x + y.y)`, `row_l2` the relative L2 error of each row of the last
    dimension; None leaves a check out.
    """

    absolute: float
    relative: float
    cosine: float | None = None
    row_l2: float | None = None


@dataclass(frozen=True, slots=True)
class Difference:
    """How far two arrays are apart; all figures over the elements that are finite in both.

    Attributes:
        misplaced: elements that are +inf, -inf or NaN in one array and something else in the other.
        outside: finite elements outside the tolerance.
        max_abs: largest absolute error.
        cosine: `1 - 2 (x.y) / (x.x + y.y)`, 0 for two arrays of zeros.
        rel_l2: L2 norm of the error over the L2 norm of the reference.
        max_row_l2: the same for the worst row of the last dimension.
    """

    misplaced: int
    outside: int
    max_abs: float
    cosine: float
    rel_l2: float
    max_row_l2: float


def out_tolerance(dtype: str) -> Tolerance:
    """Tolerance for attention output of `dtype` "bfloat16" or "float16".

    `row_l2` is in half-steps of the type's rounding: rounding the probabilities costs a row at most one (when
    one of them outweighs the rest), rounding the result 0.4 in the mean over its 512 columns.
    """
    half_step = {"bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
    return Tolerance(absolute=8e-4, relative=2.01 / 128, cosine=5e-6, row_l2=1.25 * half_step)


def lse_tolerance(score_scale: float = 1.0) -> Tolerance:
    """Tolerance for decode's log-sum-exp; `score_scale` is how much larger than usual the scores are."""
    return Tolerance(absolute=1e-6 * score_scale, relative=8.01 / 65536)


def prefill_out_tolerance() -> Tolerance:
    """Tolerance for prefill's attention output."""
    return replace(out_tolerance("bfloat16"), cosine=7e-6)


def prefill_lse_tolerance(score_scale: float = 1.0) -> Tolerance:
    """Tolerance for prefill's log-sum-exp and largest scores; `score_scale` as for decode's."""
    return Tolerance(absolute=1e-6 * score_scale, relative=2.01 / 65536)


def check_close(name: str, got: Any, want: Any, tolerance: Tolerance) -> Difference:
    """Raise AssertionError unless `got` equals `want` within `tolerance`; else say how far apart they are.

    Takes NumPy, CuPy or torch arrays (both of one kind, any strides, any float type) and compares them where
    they live, in float64; torch and CuPy cost one synchronisation. The error's text holds the first bad
    coordinate and both values.
    """
    if tuple(got.shape) != tuple(want.shape):
        raise AssertionError(f"{name}: shape {tuple(got.shape)}, expected {tuple(want.shape)}")
    difference = measure(got, want, tolerance)
    size = math.prod(got.shape)
    if difference.misplaced:
        problem = f"{difference.misplaced} of {size} elements are infinite or NaN in one array only"
        raise AssertionError(f"{name}: {problem}; {_first_bad(got, want, tolerance, special=True)}")
    if difference.outside:
        problem = f"{difference.outside} of {size} elements are off, by {difference.max_abs:.3g} at most"
        raise AssertionError(f"{name}: {problem}; {_first_bad(got, want, tolerance, special=False)}")
    if tolerance.cosine is not None and not difference.cosine < tolerance.cosine:
        raise AssertionError(
            f"{name}: cosine difference {difference.cosine:.3g}, allowed {tolerance.cosine:.3g}"
        )
    if tolerance.row_l2 is not None and not difference.max_row_l2 < tolerance.row_l2:
        raise AssertionError(
            f"{name}: relative L2 error of a row {difference.max_row_l2:.3g}, allowed {tolerance.row_l2:.3g}"
        )
    return difference


def measure(got: Any, want: Any, tolerance: Tolerance) -> Difference:
    """How far `got` is from `want`; raises nothing. `tolerance` decides what counts as `outside`."""
    if math.prod(got.shape) == 0:
        return Difference(0, 0, 0.0, 0.0, 0.0, 0.0)
    with np.errstate(all="ignore"):
        return _measure(got, want, tolerance)


PART_ELEMENTS = 1 << 24
"""Elements that are compared at a time (128 MiB in float64), unless a single row has more."""


def in_parts(*arrays: Any) -> Iterator[tuple[Any, ...]]:
    """Some rows at a time of arrays of one shape, `[n, last dimension]` each, for little memory."""
    if not arrays[0].ndim:
        arrays = tuple(x.reshape(1) for x in arrays)
    columns = arrays[0].shape[-1]
    rows = [x.reshape(-1, columns) for x in arrays]
    step = max(1, PART_ELEMENTS // columns)
    for first in range(0, len(rows[0]), step):
        yield tuple(x[first : first + step] for x in rows)


def _measure(got: Any, want: Any, tolerance: Tolerance) -> Difference:
    parts = []
    for one, other in in_parts(got, want):
        xp, x, y = _as_float64(one, other)
        parts.append(_figures(xp, x, y, tolerance))
    figures = xp.stack(parts)
    figures = xp.stack([*figures[:, :6].sum(0), figures[:, 6].max(), figures[:, 7].max()]).tolist()
    count_misplaced, count_outside, xx, yy, xy, ee, max_abs, max_row_l2 = figures
    return Difference(
        misplaced=int(count_misplaced),
        outside=int(count_outside),
        max_abs=max_abs,
        cosine=1.0 - 2.0 * xy / (xx + yy) if xx + yy else 0.0,
        rel_l2=math.sqrt(ee / yy) if yy else (math.inf if ee else 0.0),
        max_row_l2=max_row_l2,
    )


def _figures(xp: Any, x: Any, y: Any, tolerance: Tolerance) -> Any:
    """Of some rows: six numbers to be added up, and two of which the largest counts."""
    misplaced, finite, outside = _flags(xp, x, y, tolerance)
    x = xp.where(finite, x, xp.zeros_like(x))
    y = xp.where(finite, y, xp.zeros_like(y))
    error = x - y
    xx, yy, xy, ee = (x * x).sum(), (y * y).sum(), (x * y).sum(), (error * error).sum()
    row_error = (error * error).sum(-1) ** 0.5
    row_norm = (y * y).sum(-1) ** 0.5
    # A row of zeros has to be met exactly: its relative error is 0 or inf.
    row_l2 = xp.where(row_error == 0, xp.zeros_like(row_error), row_error / row_norm)
    return xp.stack(
        [misplaced.sum() + 0.0, outside.sum() + 0.0, xx, yy, xy, ee, abs(error).max(), row_l2.max()]
    )


def _flags(xp: Any, x: Any, y: Any, tolerance: Tolerance) -> tuple[Any, Any, Any]:
    """Per element: special (infinite or NaN) in one array only; finite in both; finite and off."""
    same_special = (xp.isnan(x) & xp.isnan(y)) | (xp.isinf(x) & (x == y))
    finite = xp.isfinite(x) & xp.isfinite(y)
    error = abs(x - y)
    close = (error < tolerance.absolute) | (error < tolerance.relative * abs(y))
    return ~(finite | same_special), finite, finite & ~close


def _first_bad(got: Any, want: Any, tolerance: Tolerance, *, special: bool) -> str:
    xp, x, y = _as_float64(got, want)
    with np.errstate(all="ignore"):
        misplaced, _, outside = _flags(xp, x, y, tolerance)
    bad = misplaced if special else outside
    flat = int((bad.reshape(-1) * 1).argmax())
    place = tuple(int(c) for c in np.unravel_index(flat, tuple(got.shape)))
    return f"first at {place}: got {float(x[place])!r}, expected {float(y[place])!r}"


def _as_float64(got: Any, want: Any) -> tuple[Any, Any, Any]:
    """The array module and both arrays in float64."""
    kind = type(got).__module__.partition(".")[0]
    if kind == "torch":
        import torch

        return torch, got.double(), want.double()
    if kind == "cupy":
        import cupy

        return cupy, got.astype(cupy.float64), cupy.asarray(want).astype(cupy.float64)
    return np, np.asarray(got).astype(np.float64), np.asarray(want).astype(np.float64)
