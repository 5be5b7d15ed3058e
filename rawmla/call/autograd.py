"""Attention in torch's graphs of autograd: a forward call and its backward as one node.

Imports torch, so it is imported by a call that has read a tensor which requires grad.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Call(NamedTuple):
    """A forward call and its backward. Tensors that the backward wants are saved by autograd alone, which
    frees them, and raises where one was changed in place.
    """

    what: str
    """The operation, for errors."""
    forward: Callable[[], tuple[torch.Tensor, ...]]
    """out, lse, and results without a gradient. Called with grad disabled."""
    backward: Callable[..., tuple[torch.Tensor | None, ...]]
    """Gradients of the inputs: of (needs, dout, dlse, out, lse, inputs, others). ``needs`` says of each input
    whether its gradient is needed: others may be anything. dout or dlse is None where it is 0.
    """
    inputs: tuple[torch.Tensor | None, ...]
    """What may have a gradient."""
    others: tuple[torch.Tensor | None, ...]
    """Further tensors that the backward wants."""


def attend(call: Call) -> tuple[torch.Tensor, ...]:
    """The results of a call, with a graph."""
    return tuple(_Attention.apply(call, *call.inputs))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, *inputs: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        out, lse, *others = call.forward()
        ctx.save_for_backward(out, lse, *inputs, *call.others)
        ctx.what, ctx.gradients, ctx.count = call.what, call.backward, len(inputs)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*others)
        return (out, lse, *others)

    @staticmethod
    def backward(
        ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None, *unused: None
    ) -> tuple[Any, ...]:
        needs = ctx.needs_input_grad[1:]
        if dout is None and dlse is None:
            return (None,) * (1 + len(needs))
        how = ctx.what, ctx.gradients, ctx.count, needs
        # The gradient of the imaginary part of a conjugate has the negative bit: memory with the other sign.
        given = [x if x is None else x.resolve_neg() for x in (dout, dlse)]
        return (None, *_Gradients.apply(*how, *given, *ctx.saved_tensors))


class _Gradients(torch.autograd.Function):
    """The backward pass, as a function without a derivative of its own."""

    @staticmethod
    def forward(
        ctx: Any,
        what: str,
        gradients: Callable[..., tuple[torch.Tensor | None, ...]],
        count: int,
        needs: tuple[bool, ...],
        dout: torch.Tensor | None,
        dlse: torch.Tensor | None,
        out: torch.Tensor,
        lse: torch.Tensor,
        *saved: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, ...]:
        ctx.what = what
        made = gradients(needs, dout, dlse, out, lse, saved[:count], saved[count:])
        return tuple(one if needed else None for one, needed in zip(made, needs, strict=True))

    @staticmethod
    def backward(ctx: Any, *of_gradients: Any) -> Any:
        raise NotImplementedError(
            f"{ctx.what} has no second derivative: expected no gradient through the gradients of its inputs, "
            "which create_graph=True allows, got one"
        )


def gradient_of_out(dout: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    """dout; zeros that take the memory of a row where it is None."""
    return out.new_zeros(out.shape[-1]).expand_as(out) if dout is None else dout


def check_no_out(out: Any) -> None:
    """Check that a call with a graph makes its result itself."""
    if out is not None:
        raise ValueError(
            "out: expected None where a gradient is needed, as in torch's functions, got an array; copy the "
            "result, or call under torch.no_grad()"
        )


def check_torch(name: str, x: Any) -> None:
    """Check that an input of a call with a graph is one of torch."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(
            f"{name}: expected a torch tensor, as one of the arrays requires grad, got {type(x).__name__}"
        )
