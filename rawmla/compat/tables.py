"""The width of a page table, which the kernels of FlashMLA and FlashAttention-3 do not know: they get the
distance of its rows.
"""

from __future__ import annotations

from typing import Any


def whole_rows(table: Any) -> Any:
    """Return a torch table with all columns between the beginnings of two rows; other arrays as given.

    SGLang captures graphs with a view of a few columns, which the lengths of the capture need, and replays
    them with longer requests, whose pages are in the columns after these. Inside torch.compile such a view
    breaks the graph, since a traced tensor does not tell where its memory ends.
    """
    if not hasattr(table, "as_strided") or table.ndim != 2 or table.stride(0) <= table.shape[1]:
        return table
    from .wide_tables import widened

    return widened(table)
