"""Checks of arguments that every operation shares: all that the host can see without a synchronise.

Errors read "`name`: expected X, got Y". `TypeError` is for the wrong kind or dtype, `ValueError` for a shape,
stride, range or combination. A check of one operation stands beside that operation.

Strides are in elements. A dimension of size 1 is never stepped over, so any stride is legal there.
`usable_strides` puts the contiguous one in its place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import index
from typing import Any

import numpy as np

from .arrays import ArrayView
from .frameworks import Fields, Framework

INT32_MAX = 2**31 - 1
STRIDE_LIMIT = 2**40  # bytes: strides of a tensor map are below
_MIN_SCALE, _MAX_SCALE = 2.0**-126, 2.0**127  # times log2(e), normal numbers of float32


def as_bool(name: str, value: Any) -> bool:
    """`value` if it is a bool (Python's or NumPy's)."""
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise TypeError(f"{name}: expected a bool, got {show(value)}")


def as_int(name: str, value: Any) -> int:
    """`value` if it is an integer (Python's or NumPy's)."""
    if value.__class__ is int:
        return value
    if not isinstance(value, (bool, np.bool_)) and isinstance(value, (int, np.integer)):
        return index(value)
    raise TypeError(f"{name}: expected an int, got {show(value)}")


def as_count(name: str, value: Any) -> int:
    """`value` as an int of at least 1."""
    count = as_int(name, value)
    if count < 1:
        raise ValueError(f"{name}: expected an int of at least 1, got {count}")
    return count


def as_softmax_scale(
    softmax_scale: Any, name: str = "softmax_scale", wanted: str = "a float or None"
) -> float:
    """`softmax_scale` as a positive float that is one in float32, also times log2(e).

    Arrays are refused: reading one synchronises.
    """
    if softmax_scale.__class__ is float and _MIN_SCALE <= softmax_scale <= _MAX_SCALE:
        return softmax_scale
    scale = as_float(name, softmax_scale, wanted)
    if not _MIN_SCALE <= scale <= _MAX_SCALE:
        raise ValueError(
            f"{name}: expected a finite float32 greater than 0 ({_MIN_SCALE:.2g} to {_MAX_SCALE:.2g}), "
            f"got {scale}"
        )
    return scale


def as_scale(scale: Any) -> float:
    """The `scale` of flex attention as a float that is finite in float32, also times log2(e)."""
    number = as_float("scale", scale, "a float or None")
    if not -_MAX_SCALE <= number <= _MAX_SCALE:
        raise ValueError(
            f"scale: expected a finite float32 of magnitude {_MAX_SCALE:.2g} at most, got {number}"
        )
    return number


def as_float(name: str, value: Any, wanted: str) -> float:
    """`value` as a float if it is a number; an integer that is too large for one is an infinity."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name}: expected {wanted}, got {show(value)}")
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def check_groups(h_q: int, h_kv: int, q_name: str, k_name: str) -> None:
    """Check that every KV head has equally many query heads, one at least."""
    if not h_kv or not h_q or h_q % h_kv:
        raise ValueError(
            f"{q_name}: expected h_q to be a positive multiple of the h_kv of {k_name}, got h_q {h_q} and "
            f"h_kv {h_kv}"
        )


def check_place(name: str, view: Fields, device: int, framework: Framework, reference: str) -> None:
    """Check that `view` is on `device` and, if it is of another framework, that both share a stream.

    Work on the same stream is ordered; anything else could read memory that is still being written.
    """
    _, _, _, _, given_device, given_framework, _ = view
    if given_device != device:
        raise ValueError(
            f"{name}: expected an array on device cuda:{device}, the device of {reference}, got "
            f"cuda:{given_device}"
        )
    if given_framework is framework:
        return
    stream, given_stream = framework.current_stream(device), given_framework.current_stream(device)
    if given_stream != stream:
        raise ValueError(
            f"{name}: expected a {framework.name} array, as {reference} is, or one of a framework with "
            f"the same current stream ({stream:#x}), got a {given_framework.name} array with stream "
            f"{given_stream:#x}"
        )


def launch_place(view: ArrayView) -> dict[str, Any]:
    """Where a kernel that is called for an array is launched: arguments of the kernels' host sides."""
    return {
        "device": view.device,
        "stream": view.framework.current_stream(view.device),
        "capturing": view.framework.capture_query(view.device),
    }


def usable_strides(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """`strides`, with contiguous ones for dimensions of size 1."""
    usable = list(strides)
    inner = 1
    for axis in range(len(shape) - 1, -1, -1):
        if shape[axis] <= 1:
            usable[axis] = inner
        inner = usable[axis] * shape[axis]
    return tuple(usable)


def check_no_overlap(name: str, shape: Sequence[int], strides: Sequence[int]) -> None:
    """Check that an array which is written has each element once, and no stride below 1."""
    reach = 0  # elements from the first to the last one of the dimensions seen so far, smallest stride first
    for stride, extent in sorted(zip(strides, shape, strict=True)):
        if extent > 1:
            if stride <= reach:
                raise ValueError(
                    f"{name}: expected positive strides and elements that do not overlap, got shape "
                    f"{list(shape)}, strides {list(strides)} (elements)"
                )
            reach += stride * (extent - 1)


def show(value: Any) -> str:
    """A value for the text of an error: its type, and the value itself where it is short."""
    if isinstance(value, (int, float, str, np.generic)):
        return f"{type(value).__name__} {value!r}"
    return "None" if value is None else type(value).__name__
