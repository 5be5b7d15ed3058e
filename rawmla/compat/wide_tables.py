"""The part of `tables` that needs torch."""

from __future__ import annotations

from typing import Any

import torch


@torch.compiler.disable
def widened(table: Any) -> Any:
    """Return a table that is a view of wider rows with the whole rows, as far as their memory goes."""
    rows, columns = table.shape
    step, unit = table.stride()
    elements = table.untyped_storage().nbytes() // table.element_size()
    in_last_row = elements - table.storage_offset() - (rows - 1) * step
    if unit != 1 or not rows or in_last_row <= columns:
        return table
    return table.as_strided((rows, min(step, in_last_row)), (step, 1))
