"""Lists of blocks in arrays of torch, CuPy and NumPy, and pictures of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

__all__ = [
    *(
        "LISTS",
        "Q_LISTS",
        "Lists",
        "check_lists",
        "dense_of",
        "listed",
        "numpy_of",
        "picture",
        "transposed",
    ),
]

LISTS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
"""The names of lists in a BlockMask."""
Q_LISTS = ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")
"""The names of lists by columns, which a backward walks."""


class Lists(NamedTuple):
    """How many blocks each row of blocks has `[.., rows]`, and which `[.., rows, columns]`, int32."""

    counts: Any
    indices: Any


def check_lists(counts: Any, indices: Any, name: str) -> None:
    if (counts is None) != (indices is None):
        raise ValueError(f"{name}_num_blocks and {name}_indices: expected both or none of them")
    if counts is not None and (len(indices.shape) < 2 or tuple(indices.shape[:-1]) != tuple(counts.shape)):
        raise ValueError(
            f"{name}_indices: expected shape [.., rows, columns] where {name}_num_blocks is [.., rows], got "
            f"{list(indices.shape)} and {list(counts.shape)}"
        )


def dense_of(lists: Lists, columns: int) -> Any:
    """int32 `[.., rows, columns]`: 1 where a block is in the lists."""
    counts, indices = lists
    wide = _zeros_like(indices, (*indices.shape[:-1], columns + 1))
    width = indices.shape[-1]
    order = _range_like(indices, width)
    # Entries past the count mean nothing; those past the columns are dropped.
    listed = (order < counts[..., None]) & (indices >= 0) & (indices < columns)
    places = indices * listed + columns * ~listed
    _put_ones(wide, places)
    return wide[..., :columns]


def transposed(lists: Lists, columns: int) -> Lists:
    """Lists by columns: for each key block its query blocks, ascending, and then the other blocks."""
    return listed(dense_of(lists, columns).swapaxes(-1, -2))


def listed(dense: Any) -> Lists:
    """Lists of the places of ones, ascending, and then the other places."""
    counts = dense.sum(-1)
    return Lists(
        counts.int() if numpy_of(dense) is None else counts.astype("int32"), _stable_order(1 - dense)
    )


# The few operations that torch names in another way than NumPy and CuPy do


def numpy_of(array: Any) -> Any:
    """CuPy for an array of CuPy, NumPy for one of NumPy, as `rawmla.reference` has them; None for torch."""
    if isinstance(array, np.ndarray):
        return np
    if not hasattr(array, "__cuda_array_interface__") or hasattr(array, "scatter_"):
        return None
    import cupy

    return cupy


def _zeros_like(array: Any, shape: Sequence[int]) -> Any:
    numpy = numpy_of(array)
    return array.new_zeros(tuple(shape)) if numpy is None else numpy.zeros(tuple(shape), "int32")


def _range_like(array: Any, count: int) -> Any:
    numpy = numpy_of(array)
    if numpy is not None:
        return numpy.arange(count, dtype="int32")
    import torch

    return torch.arange(count, dtype=torch.int32, device=array.device)


def _put_ones(array: Any, places: Any) -> None:
    numpy = numpy_of(array)
    if numpy is None:
        array.scatter_(-1, places.long(), 1)
    else:
        numpy.put_along_axis(array, places.astype("int64"), 1, axis=-1)


def _stable_order(array: Any) -> Any:
    if numpy_of(array) is None:
        return array.contiguous().argsort(dim=-1, stable=True).int()  # with the strides of what it sorts
    return array.argsort(axis=-1, kind="stable").astype("int32")


# ---- pictures


def picture(rows: list[list[int]], grid_size: int | tuple[int, int]) -> list[str]:
    """Lines of a picture of a mask, each character the mean of some blocks."""
    side = grid_size if isinstance(grid_size, tuple) else (grid_size, grid_size)
    height, width = len(rows), len(rows[0]) if rows else 0
    row_step, column_step = (
        max(1, -(-extent // most)) if most > 0 else 1
        for extent, most in zip((height, width), side, strict=True)
    )
    lines = []
    for top in range(0, height, row_step):
        line = ""
        for left in range(0, width, column_step):
            cells = [x for row in rows[top : top + row_step] for x in row[left : left + column_step]]
            attended = sum(cells)
            line += "█" if attended == len(cells) else "░" if attended else " "
        lines.append(line)
    return lines
