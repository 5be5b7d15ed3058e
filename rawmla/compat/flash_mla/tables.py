"""The width of a `block_table`, which FlashMLA's kernels do not know: they get the distance of its rows."""

from __future__ import annotations

from typing import Any


def whole_rows(block_table: Any) -> Any:
    """Return a torch table with all columns between the beginnings of two rows; other arrays as given.

    SGLang captures graphs with a view of a few columns, which the lengths of the capture need, and replays
    them with longer requests, whose pages are in the columns after these.
    """
    if getattr(block_table, "ndim", 0) != 2 or not hasattr(block_table, "as_strided"):
        return block_table
    step, unit = block_table.stride()
    rows, columns = block_table.shape
    if step <= columns or unit != 1 or not rows:
        return block_table
    import torch

    if torch.compiler.is_compiling():
        return block_table
    elements = block_table.untyped_storage().nbytes() // block_table.element_size()
    in_last_row = elements - block_table.storage_offset() - (rows - 1) * step
    if in_last_row <= columns:
        return block_table
    return block_table.as_strided((rows, min(step, in_last_row)), (step, 1))
