"""Which module runs a call of a public function: operators while torch traces it, else eager code."""

from __future__ import annotations

from typing import Any

from ..call import tracing
from ..call.arrays import needs_gradient
from ..mha import forward


def mla_operators() -> Any:
    """Return the module that calls torch operators instead of the call paths of `rawmla.mla`."""
    from ..torch_ops import mla_calls  # imports torch

    return mla_calls


def mha_operators() -> Any:
    """Return the module that calls torch operators instead of the call paths of `rawmla.mha`."""
    from ..torch_ops import mha_calls  # imports torch

    return mha_calls


def dense_path(q: Any, k: Any, v: Any, attn_sink: Any) -> Any:
    """Return the module with `options_of` and `attend` of a forward call with these inputs (or packed)."""
    if tracing.is_traced(q):
        return mha_operators()
    if needs_gradient(q, k, v, attn_sink):
        from ..mha import autograd  # imports torch

        return autograd
    return forward
