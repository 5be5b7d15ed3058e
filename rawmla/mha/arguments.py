"""Checks of arguments that several MHA operations share: numbers, and layouts of q, k, v and out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..call.checks import (
    STRIDE_LIMIT,
    as_float,
    as_int,
    as_softmax_scale,
    check_no_overlap,
    show,
    usable_strides,
)
from ..call.frameworks import Fields, aligned_strides
from ..kernels.mha_forward import NO_BOUND

MAX_HEAD_DIM = 256
NO_WINDOW = (-1, -1)
"""The default of window_size."""
FLOAT32_MAX = float(np.finfo(np.float32).max)


def either(name: str, value: Any, alias: str, alias_value: Any) -> Any:
    """The value of an argument that was given by its second name."""
    if value is not None:
        raise TypeError(f"{alias}: expected it or {name}, which is the same argument, got both")
    return alias_value


def as_length(name: str, value: Any) -> int:
    """`value` as a number of tokens. Arrays are refused: reading one synchronises."""
    length = value if value.__class__ is int else as_int(name, value)
    if length < 0:
        raise ValueError(f"{name}: expected an int of at least 0, got {length}")
    return length


def check_dropout(dropout_p: Any) -> None:
    """Refuse any dropout."""
    if as_float("dropout_p", dropout_p, "0.0") != 0:
        raise ValueError(f"dropout_p: expected 0.0, as there is no dropout, got {dropout_p}")


def check_chunk(attention_chunk: Any) -> None:
    """Refuse attention in chunks."""
    chunk = as_int("attention_chunk", attention_chunk)
    if chunk < 0:
        raise ValueError(f"attention_chunk: expected 0 (no chunks), got {chunk}")
    if chunk:
        raise ValueError(
            f"attention_chunk: expected 0, as attention in chunks is not supported yet, got {chunk}"
        )


def as_softcap(softcap: Any) -> float:
    """`softcap` as a float: 0 for none, or positive and one in float32."""
    if as_float("softcap", softcap, "a float") == 0:
        return 0.0
    return as_softmax_scale(softcap, "softcap", "a float")


def check_softcap(softmax_scale: float, softcap: float) -> None:
    """Check that scores divided by the softcap can be computed: the quotient of the two is one in float32."""
    if softcap and softmax_scale > FLOAT32_MAX * softcap:
        raise ValueError(
            f"softcap: expected at least softmax_scale / {FLOAT32_MAX:.4g}, got softcap {softcap} and "
            f"softmax_scale {softmax_scale}"
        )


def as_window(window_size: Any) -> tuple[int, int]:
    """Keys to the left and to the right of the diagonal; `NO_BOUND` where all are visible."""
    if not isinstance(window_size, (tuple, list)):
        raise TypeError(f"window_size: expected a pair of ints, got {show(window_size)}")
    if len(window_size) != 2:
        raise ValueError(f"window_size: expected a pair (left, right), got {len(window_size)} items")
    left, right = window_size
    if left.__class__ is int and right.__class__ is int and left == right == -1:  # as in most calls
        return NO_BOUND, NO_BOUND
    return _as_bound(left, "left"), _as_bound(right, "right")


def _as_bound(value: Any, side: str) -> int:
    if value is None:
        return NO_BOUND
    if value.__class__ is not int:
        # int too: under torch.compile the class of an int may be another.
        if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
            raise TypeError(f"window_size: expected an int or None on the {side}, got {show(value)}")
        value = int(value)
    if value < -1:
        raise ValueError(
            f"window_size: expected at least 0, or -1 or None for no bound, on the {side}, got {value}"
        )
    return NO_BOUND if value == -1 else min(value, NO_BOUND)


def check_head_dim(name: str, dimension: str, size: int, shape: Sequence[int]) -> None:
    """Check a head dimension; `dimension` is its name in the documented shape."""
    if not 1 <= size <= MAX_HEAD_DIM:
        raise ValueError(
            f"{name}: expected {dimension} of 1 to {MAX_HEAD_DIM}, got {size} in shape {list(shape)}"
        )


def walked(view: Fields, itemsize: int = 2, alignment: int = 16) -> tuple[int, ...] | None:
    """Strides of all dimensions but the last in which kernels walk an array; None where they cannot.

    They take a contiguous last dimension, and an address and other strides that are multiples of
    ``alignment`` bytes, strides not negative. Dimensions of one element get a stride as in `aligned_strides`.
    """
    ptr, shape, strides, *_ = view
    shape = tuple(shape)
    multiple = alignment // itemsize
    aligned = aligned_strides(shape, multiple)
    if 0 in shape:
        return aligned[:-1]  # there is nothing to step over
    if ptr % alignment or strides[-1] != 1 and shape[-1] > 1:
        return None
    steps = []
    for extent, stride, fitting in zip(shape[:-1], strides[:-1], aligned[:-1], strict=True):
        if extent == 1:
            steps.append(fitting)
        elif stride % multiple or not 0 <= stride < STRIDE_LIMIT // itemsize:
            return None
        else:
            steps.append(stride)
    return tuple(steps)


def of_three(strides: tuple[int, ...]) -> tuple[int, int, int]:
    """With 0 for the requests where an array has no dimension for them."""
    request, token, head = (0, *strides)[-3:]
    return request, token, head


def read_strides(*views: Any) -> tuple[list[tuple[int, int, int]], tuple[bool, ...]]:
    """Strides in which kernels read arrays, 0 for None, and which of the arrays have to be copied first."""
    strides, copied = [], []
    for view in views:
        steps = (0, 0, 0) if view is None else walked(view)
        copied.append(steps is None)
        strides.append(of_three(steps or aligned_strides(tuple(view[1]))[:-1]))
    return strides, tuple(copied)


def order_of(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    """Sort the dimensions of q but the last by their strides, for a fresh out.

    An array that is broadcast along one has no such order, and keeps the order of its dimensions.
    """
    axes = list(range(len(shape) - 1))
    if all(strides[axis] > 0 or shape[axis] <= 1 for axis in axes):
        usable = usable_strides(shape, strides)
        axes.sort(key=lambda axis: -usable[axis])
    return axes


def fresh_out_strides(q: Fields, d_v: int) -> tuple[int, ...]:
    """Make strides of a fresh out: dimensions in q's order of strides, rows padded to 8 elements."""
    _, shape, strides, *_ = q
    order = order_of(shape, strides)
    steps = aligned_strides((*[shape[axis] for axis in order], d_v))
    return (*[steps[order.index(axis)] for axis in range(len(order))], 1)


def check_out_layout(
    out: Fields, name: str = "out", itemsize: int = 2, alignment: int = 16
) -> tuple[int, ...]:
    """Check that kernels can write an array, each element once; returns its strides but the last.

    ``alignment`` as in `walked`.
    """
    ptr, shape, strides, *_ = out
    steps = walked(out, itemsize, alignment)
    if steps is None or any(extent > 1 and not step for extent, step in zip(shape, steps, strict=False)):
        multiples = f" multiples of {alignment // itemsize}" if alignment > itemsize else ""
        raise ValueError(
            f"{name}: expected an address that is a multiple of {alignment} bytes, a contiguous last "
            f"dimension and other strides that are positive{multiples}, got address {ptr:#x}, strides "
            f"{list(strides)} (elements)"
        )
    if 0 not in shape:
        check_no_overlap(name, shape, (*steps, 1))
    return steps


def packed_parts(name: str, shape: tuple[int, ...], head_dim_qk: Any, count: int) -> list[tuple[Any, Any]]:
    """The parts of a packed array of this shape, of which v is the last of ``count``, as its indices."""
    if len(shape) == 4:
        if head_dim_qk is not None:
            raise ValueError(
                f"head_dim_qk: expected None with a {name} of four dimensions, got {show(head_dim_qk)}"
            )
        if shape[1] != count:
            raise ValueError(f"{name}: expected shape [total, {count}, h, d], got {list(shape)}")
        return [(slice(None), i) for i in range(count)]
    columns = "2 * d_qk + d_v" if count == 3 else "d_qk + d_v"
    if len(shape) != 3:
        raise ValueError(
            f"{name}: expected shape [total, h, {columns}] or [total, {count}, h, d], got {list(shape)}"
        )
    if head_dim_qk is None:
        raise ValueError(f"head_dim_qk: expected an int with a {name} of three dimensions, got None")
    d_qk = as_int("head_dim_qk", head_dim_qk)
    if not 1 <= d_qk <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim_qk: expected 1 to {MAX_HEAD_DIM}, got {d_qk}")
    first_of_v = (count - 1) * d_qk
    if not 1 <= shape[2] - first_of_v <= MAX_HEAD_DIM:
        raise ValueError(
            f"{name}: expected a last dimension of {columns}, d_qk {d_qk} and d_v 1 to {MAX_HEAD_DIM}, "
            f"got shape {list(shape)}"
        )
    ends = [*range(0, first_of_v + 1, d_qk), shape[2]]
    return [(..., slice(start, end)) for start, end in zip(ends[:-1], ends[1:], strict=True)]
