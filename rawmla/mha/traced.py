"""What public functions call instead while torch traces them: see `rawmla.call.tracing`."""

from __future__ import annotations

from typing import Any

__all__ = ["operators"]


def operators() -> Any:
    """The module with the operations of this folder as calls of operators, which this registers."""
    from ..torch_ops import mha_calls

    return mha_calls
