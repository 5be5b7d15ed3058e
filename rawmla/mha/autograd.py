"""The graph of autograd of eager calls of dense attention; that of operators is in `rawmla.torch_ops.mha`.

Imports torch, so it is imported by a call that has read a tensor which requires grad.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from ..call.arrays import READERS
from ..call.autograd import Call, attend, check_no_out, check_torch, gradient_of_out
from ..call.checks import as_bool
from ..kernels.mha_backward_variants import Needs
from .arguments import fresh_out_strides, packed_parts, walked
from .gradients import gradients, varlen_gradients

__all__ = ["WHAT", "attention"]

WHAT = "dense attention"


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
    check_no_out(forward["out"])
    as_bool("deterministic", backward["deterministic"])
    slopes, sink = backward["alibi_slopes"], backward["attn_sink"]
    if slopes is not None:
        READERS[type(slopes)](slopes, "alibi_slopes")  # which has no gradient: refused where it requires grad
    given = {**arrays, **({} if sink is None else {"attn_sink": sink})}
    with torch.no_grad():
        views = {name: READERS[type(x)](x, name) for name, x in given.items()}
    for name, x in given.items():
        check_torch(name, x)
    head_dim_qk = forward.get("head_dim_qk")
    parts = tuple(_parts(name, view[1], head_dim_qk) for name, view in views.items() if name in arrays)
    others = {name: x for name, x in backward.items() if name != "attn_sink"}
    saved = {name: x for name, x in others.items() if isinstance(x, torch.Tensor)}
    numbers = {name: x for name, x in others.items() if name not in saved}
    call = Call(
        WHAT,
        partial(function, **arrays, **forward),
        partial(_gradients, parts, tuple(saved), numbers),
        (sink, *arrays.values()),
        tuple(saved.values()),
    )
    out, lse = attend(call)
    return out, lse


def _parts(name: str, shape: tuple[int, ...], head_dim_qk: Any) -> list[Any]:
    """Where q, k and v, as far as the array holds them, lie in it: indices."""
    count = {"qkv": 3, "kv": 2}.get(name)
    return [...] if count is None else packed_parts(name, tuple(shape), head_dim_qk, count)


def _gradients(
    parts: tuple[list[Any], ...],
    names: tuple[str, ...],
    numbers: Mapping[str, Any],
    needs: tuple[bool, ...],
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    inputs: tuple[torch.Tensor, ...],
    others: tuple[torch.Tensor, ...],
) -> tuple[torch.Tensor | None, ...]:
    """`Call.backward` of an eager call; ``names`` are those of ``others``."""
    sink, *arrays = inputs
    needs_sink, *needed = needs
    q, k, v = [x[index] for x, indices in zip(arrays, parts, strict=True) for index in indices]
    # The kernel writes into the gradient of a packed array, where it can write rows at these places.
    wholes = [
        _fresh_like(x) if is_needed and len(indices) > 1 else None
        for x, indices, is_needed in zip(arrays, parts, needed, strict=True)
    ]
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
    function: Callable[..., Any] = varlen_gradients if has_segments else gradients
    of_q, of_k, of_v = [is_needed for is_needed, indices in zip(needed, parts, strict=True) for _ in indices]
    *made, dsink = function(
        Needs(of_q, of_k, of_v, needs_sink), gradient_of_out(dout, out), q, k, v, out, lse, **keywords,
        dlse=dlse, attn_sink=sink,
    )  # fmt: skip
    results: list[torch.Tensor | None] = []
    gradients_of_parts = iter(zip(made, targets, strict=True))
    for whole, indices in zip(wholes, parts, strict=True):
        for _ in indices:
            one, target = next(gradients_of_parts)
            if target is not None and target is not one:
                target.copy_(one)
        results.append(one if whole is None else whole)
    return (dsink, *results)


def _fresh_like(x: torch.Tensor) -> torch.Tensor:
    """An array for the gradient of a packed one, in the order of its strides."""
    shape = tuple(x.shape)
    strides = fresh_out_strides(READERS[type(x)](x, "qkv"), shape[-1])
    return x.new_empty_strided(shape, strides)
