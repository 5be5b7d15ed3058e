"""The graph of autograd of dense attention: of eager calls here, of operators in `rawmla.torch_ops.mha`.

Imports torch, so it is imported by a call that has read a tensor which requires grad.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from ..call.arrays import READERS
from ..call.checks import as_bool
from .arguments import fresh_out_strides, packed_parts, walked
from .gradients import flash_attn_backward, flash_attn_varlen_backward

__all__ = ["Call", "attend", "attention", "gradient_of_out"]


class Call(NamedTuple):
    """A forward call and its backward. Tensors that the backward wants are saved by autograd alone, which
    frees them, and raises where one was changed in place.
    """

    forward: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    """out and lse. Called with grad disabled."""
    backward: Callable[..., tuple[torch.Tensor | None, ...]]
    """Gradients of the sink and of the arrays: of (dout, dlse, out, lse, sink, arrays, others); dout or dlse
    is None where it is 0.
    """
    sink: torch.Tensor | None
    arrays: tuple[torch.Tensor, ...]
    """q, k and v, or what holds them."""
    others: tuple[torch.Tensor | None, ...]
    """Further tensors that the backward wants."""


def attend(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse, with a graph."""
    out, lse = _Attention.apply(call, call.sink, *call.arrays)
    return out, lse


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: Call, sink: torch.Tensor | None, *arrays: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = call.forward()
        ctx.save_for_backward(out, lse, sink, *arrays, *call.others)
        ctx.gradients, ctx.count = call.backward, len(arrays)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[Any, ...]:
        needs = ctx.needs_input_grad[1:]
        if dout is None and dlse is None:
            return (None,) * (1 + len(needs))
        return (None, *_Gradients.apply(ctx.gradients, ctx.count, needs, dout, dlse, *ctx.saved_tensors))


class _Gradients(torch.autograd.Function):
    """The backward pass, as a function without a derivative of its own."""

    @staticmethod
    def forward(
        ctx: Any,
        gradients: Callable[..., tuple[torch.Tensor | None, ...]],
        count: int,
        needs: tuple[bool, ...],
        dout: torch.Tensor | None,
        dlse: torch.Tensor | None,
        out: torch.Tensor,
        lse: torch.Tensor,
        sink: torch.Tensor | None,
        *saved: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, ...]:
        made = gradients(dout, dlse, out, lse, sink, saved[:count], saved[count:])
        return tuple(one if needed else None for one, needed in zip(made, needs, strict=True))

    @staticmethod
    def backward(ctx: Any, *of_gradients: Any) -> Any:
        raise NotImplementedError(
            "dense attention has no second derivative: expected no gradient through the gradients of q, k, v "
            "and attn_sink, which create_graph=True allows, got one"
        )


def gradient_of_out(dout: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    """dout; zeros that take the memory of a row where it is None."""
    return out.new_zeros(out.shape[-1]).expand_as(out) if dout is None else dout


def attention(
    function: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    arrays: Mapping[str, Any],
    forward: Mapping[str, Any],
    backward: Mapping[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    """A public function of arrays of which one requires grad.

    ``arrays`` are q, k and v, or what holds them, by name; ``forward`` and ``backward`` are the keywords of
    the function, and of that for its gradients.
    """
    if forward["out"] is not None:
        raise ValueError(
            "out: expected None where a gradient is needed, as in torch's functions, got an array; copy the "
            "result, or call under torch.no_grad()"
        )
    as_bool("deterministic", backward["deterministic"])
    slopes, sink = backward["alibi_slopes"], backward["attn_sink"]
    if slopes is not None:
        READERS[type(slopes)](slopes, "alibi_slopes")  # which has no gradient: refused where it requires grad
    given = {**arrays, **({} if sink is None else {"attn_sink": sink})}
    with torch.no_grad():
        views = {name: READERS[type(x)](x, name) for name, x in given.items()}
    for name, x in given.items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(
                f"{name}: expected a torch tensor, as one of the arrays requires grad, got {type(x).__name__}"
            )
    head_dim_qk = forward.get("head_dim_qk")
    parts = tuple(_parts(name, view[1], head_dim_qk) for name, view in views.items() if name in arrays)
    others = {name: x for name, x in backward.items() if name != "attn_sink"}
    saved = {name: x for name, x in others.items() if isinstance(x, torch.Tensor)}
    numbers = {name: x for name, x in others.items() if name not in saved}
    call = Call(
        partial(function, **arrays, **forward),
        partial(_gradients, parts, tuple(saved), numbers),
        sink,
        tuple(arrays.values()),
        tuple(saved.values()),
    )
    return attend(call)


def _parts(name: str, shape: tuple[int, ...], head_dim_qk: Any) -> list[Any]:
    """Where q, k and v, as far as the array holds them, lie in it: indices."""
    count = {"qkv": 3, "kv": 2}.get(name)
    return [...] if count is None else packed_parts(name, tuple(shape), head_dim_qk, count)


def _gradients(
    parts: tuple[list[Any], ...],
    names: tuple[str, ...],
    numbers: Mapping[str, Any],
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    sink: torch.Tensor | None,
    arrays: tuple[torch.Tensor, ...],
    others: tuple[torch.Tensor, ...],
) -> tuple[torch.Tensor | None, ...]:
    """`Call.backward` of an eager call; ``names`` are those of ``others``."""
    q, k, v = [x[index] for x, indices in zip(arrays, parts, strict=True) for index in indices]
    # The kernel writes into the gradient of a packed array, where it can write rows at these places.
    wholes = [_fresh_like(x) if len(indices) > 1 else None for x, indices in zip(arrays, parts, strict=True)]
    targets = [
        None if whole is None else whole[index]
        for whole, indices in zip(wholes, parts, strict=True)
        for index in indices
    ]
    given = {
        name: target
        for name, target in zip(("dq", "dk", "dv"), targets, strict=True)
        if target is not None and walked(READERS[type(target)](target, name)) is not None
    }
    keywords = {**numbers, **dict(zip(names, others, strict=True)), **given}
    has_segments = "cu_seqlens_q" in keywords
    function: Callable[..., Any] = flash_attn_varlen_backward if has_segments else flash_attn_backward
    *made, dsink = function(
        gradient_of_out(dout, out), q, k, v, out, lse, **keywords, dlse=dlse, attn_sink=sink
    ) + (() if sink is not None else (None,))
    results: list[torch.Tensor] = []
    for one, target in zip(made, targets, strict=True):
        if target is None:
            results.append(one)
        elif target is not one:
            target.copy_(one)
    for i, whole in enumerate(wholes):
        if whole is not None:
            results.insert(i, whole)
    return (dsink, *results)


def _fresh_like(x: torch.Tensor) -> torch.Tensor:
    """An array for the gradient of a packed one, in the order of its strides."""
    shape = tuple(x.shape)
    strides = fresh_out_strides(READERS[type(x)](x, "qkv"), shape[-1])
    return x.new_empty_strided(shape, strides)
