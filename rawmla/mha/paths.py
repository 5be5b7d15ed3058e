"""Which module runs a call of dense attention: operators while torch traces it, else eager code."""

from __future__ import annotations

from typing import Any

from ..call import tracing
from ..call.arrays import needs_gradient
from . import backward, forward, prefix

__all__ = ["backward_path", "forward_path", "prefix_path"]


def forward_path(q: Any, k: Any, v: Any, attn_sink: Any) -> Any:
    """Return the module with `options_of` and `run` of a forward call with these inputs, or packed ones."""
    if tracing.is_traced(q):
        from ..torch_ops import mha_calls

        return mha_calls
    if needs_gradient(q, k, v, attn_sink):
        from . import autograd  # imports torch

        return autograd
    return forward


def backward_path(dout: Any) -> Any:
    """Return the module with `options_of` and `backpropagate` of a backward call."""
    if tracing.is_traced(dout):
        from ..torch_ops import mha_calls

        return mha_calls
    return backward


def prefix_path(q: Any) -> Any:
    """Return the module with `prefill`."""
    if tracing.is_traced(q):
        from ..torch_ops import mha_calls

        return mha_calls
    return prefix
