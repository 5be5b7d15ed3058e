"""Checks of array arguments that the functions around decoding share; texts as in `rawmla.call.checks`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..call.arrays import ArrayView
from ..call.checks import check_place

__all__ = [
    "INT32_MAX",
    "check_no_overlap",
    "launch_place",
    "row_strides",
    "same_place",
    "steps",
]

INT32_MAX = 2**31 - 1


def launch_place(view: ArrayView) -> dict[str, Any]:
    """Where a kernel is launched that is called for an array: arguments of the kernels' host sides."""
    return {
        "device": view.device,
        "stream": view.framework.current_stream(view.device),
        "capturing": view.framework.capture_query(view.device),
    }


def same_place(name: str, view: ArrayView, other: ArrayView, other_name: str) -> None:
    """Check that two arrays are on one device, and their frameworks on one stream."""
    check_place(name, tuple(view), other.device, other.framework, other_name)


def row_strides(name: str, view: ArrayView) -> tuple[int, ...]:
    """Strides of all dimensions but the last, which must be contiguous; 0 where nothing is stepped over."""
    if view.shape[-1] > 1 and view.strides[-1] != 1:
        raise ValueError(
            f"{name}: expected a contiguous last dimension, got strides {list(view.strides)} (elements)"
        )
    return steps(view)[:-1]


def steps(view: ArrayView) -> tuple[int, ...]:
    """Strides, 0 in dimensions of size 1."""
    return tuple(stride if extent > 1 else 0 for extent, stride in zip(view.shape, view.strides, strict=True))


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
