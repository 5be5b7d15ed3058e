"""What public functions call instead while torch traces them: see `rawmla.call.tracing`."""

from __future__ import annotations

from typing import Any

__all__ = ["between_graphs"]


def between_graphs() -> Any:
    """The module with the operations of this folder as calls that torch.compile does not follow.

    Raises NotImplementedError under make_fx, which torch.export uses too: a launch would not be recorded.
    """
    import torch
    from torch.fx.experimental import proxy_tensor

    from . import uncompiled

    if not torch.compiler.is_dynamo_compiling() and proxy_tensor.get_proxy_mode() is not None:
        raise NotImplementedError(
            "flex attention: make_fx and torch.export cannot record a call, since score and mask functions "
            "are no arguments of an operator; torch.compile breaks its graph for it"
        )
    return uncompiled
