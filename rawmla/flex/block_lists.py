"""Lists of blocks in arrays of torch, CuPy and NumPy, and pictures of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

LISTS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
"""The names of lists in a BlockMask."""
Q_LISTS = ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")
"""The names of lists by columns, which a backward walks."""


class Lists(NamedTuple):
    """How many blocks each row of blocks has `[.., rows]`, and which `[.., rows, columns]`, int32."""

    counts: Any
    indices: Any


def check_lists(names: tuple[str, str, str, str], *arrays: Any) -> None:
    """Check the shapes of the lists of partial and of full blocks."""
    for i in (0, 2):
        (counts, indices), (counts_name, name) = arrays[i : i + 2], names[i : i + 2]
        if (counts is None) != (indices is None):
            raise ValueError(f"{counts_name} and {name}: expected both or none of them")
        if counts is not None and (
            len(indices.shape) < 2 or tuple(indices.shape[:-1]) != tuple(counts.shape)
        ):
            raise ValueError(
                f"{name}: expected shape [.., rows, columns] where {counts_name} is [.., rows], got "
                f"{list(indices.shape)} and {list(counts.shape)}"
            )


def dense_of(lists: Lists, columns: int) -> Any:
    """int32 `[.., rows, columns]`: 1 where a block is in the lists."""
    counts, indices = lists
    shape, width = (*indices.shape[:-1], columns + 1), indices.shape[-1]
    numpy = numpy_of(indices)
    if numpy is None:
        import torch

        wide = indices.new_zeros(shape)
        order = torch.arange(width, dtype=torch.int32, device=indices.device)
    else:
        wide = numpy.zeros(shape, "int32")
        order = numpy.arange(width, dtype="int32")
    # Entries past the count mean nothing; those past the columns are dropped.
    is_listed = (order < counts[..., None]) & (indices >= 0) & (indices < columns)
    places = indices * is_listed + columns * ~is_listed
    if numpy is None:
        wide.scatter_(-1, places.long(), 1)
    else:
        numpy.put_along_axis(wide, places.astype("int64"), 1, axis=-1)
    return wide[..., :columns]


def transposed(lists: Lists, columns: int) -> Lists:
    """Lists by columns: for each key block its query blocks, ascending, and then the other blocks."""
    return listed(dense_of(lists, columns).swapaxes(-1, -2))


def listed(dense: Any) -> Lists:
    """Lists of the places of ones, ascending, and then the other places."""
    counts, absent = dense.sum(-1), 1 - dense
    if numpy_of(dense) is None:  # argsort gives the strides of what it sorts
        return Lists(counts.int(), absent.contiguous().argsort(dim=-1, stable=True).int())
    return Lists(counts.astype("int32"), absent.argsort(axis=-1, kind="stable").astype("int32"))


def numpy_of(array: Any) -> Any:
    """CuPy for an array of CuPy, NumPy for one of NumPy, as `rawmla.reference` has them; None for torch."""
    if isinstance(array, np.ndarray):
        return np
    if not hasattr(array, "__cuda_array_interface__") or hasattr(array, "scatter_"):
        return None
    import cupy

    return cupy


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
