"""What public functions call instead while torch traces them: see `rawmla.call.tracing`."""

from __future__ import annotations

from typing import Any

__all__ = ["between_graphs"]


def between_graphs() -> Any:
    """The module with the operations of this folder as calls that torch.compile does not follow."""
    from . import uncompiled

    return uncompiled
