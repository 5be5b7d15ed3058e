"""Calls that public functions make while torch traces them: see `rawmla.call.tracing`."""

from __future__ import annotations

from typing import Any


def between_graphs() -> Any:
    """The module with the operations of this folder as calls that torch.compile does not follow.

    Raises NotImplementedError under make_fx, which torch.export uses too, as a launch would not be recorded,
    and under a FakeTensorMode, as there is no operator that fake tensors could go through.
    """
    import torch
    from torch._guards import active_fake_mode
    from torch.fx.experimental import proxy_tensor

    from . import uncompiled

    if torch.compiler.is_dynamo_compiling():
        return uncompiled
    if proxy_tensor.get_proxy_mode() is not None:
        raise NotImplementedError(
            "flex attention: make_fx and torch.export cannot record a call, since score and mask functions "
            "are no arguments of an operator; torch.compile breaks its graph for it"
        )
    if active_fake_mode() is not None:
        raise NotImplementedError(
            "flex attention: cannot be called under FakeTensorMode, since score and mask functions are no "
            "arguments of an operator; call it with real tensors, or through torch.compile"
        )
    return uncompiled
