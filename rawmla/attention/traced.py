"""What public functions call instead while torch traces them: see `rawmla.call.tracing`."""

from __future__ import annotations

from typing import Any

__all__ = ["outside_of_graphs"]


def outside_of_graphs() -> Any:
    """The module with the functions of this folder that torch.compile does not look into."""
    from ..torch_ops import flex_calls

    return flex_calls
