"""The graph of autograd of eager calls of dense attention; `rawmla.torch_ops.mha` has the operators' graph.

Imports torch, so it is imported by a call with a tensor that requires grad.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ..call.arrays import READERS, read_given
from ..call.autograd import Call, check_no_out, check_torch, gradient_of_out
from ..call.autograd import attend as attend_with_graph
from ..kernels.mha_backward_variants import Needs
from . import backward, forward
from .arguments import fresh_out_strides, packed_parts, walked
from .records import DenseArrays, DenseOptions, Gradients, Packing
from .records import options_of as options_of

WHAT = "dense attention"


def attend(
    given: tuple[Any, ...], options: DenseOptions, packing: Packing | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute out and lse with a graph; q, k, v, what holds them, or attn_sink requires grad."""
    arrays = DenseArrays._make(given)
    check_no_out(arrays.out)
    read_given(arrays.alibi_slopes, "alibi_slopes")  # has no gradient: refused where it requires grad
    names = ("q", "k", "v") if packing is None else ("qkv",) if packing.parts == 3 else ("q", "kv")
    inputs = arrays[: len(names)]
    for name, x in zip(names, inputs, strict=True):
        check_torch(name, x)
    if arrays.attn_sink is not None:
        check_torch("attn_sink", arrays.attn_sink)
    indices: list[list[Any]] = [[...] for _ in inputs]  # of q, k and v in an input
    if packing is not None:
        shape = tuple(inputs[-1].shape)
        indices[-1] = packed_parts(packing.name, shape, packing.head_dim_qk, packing.parts)
    others = arrays._replace(q=None, k=None, v=None, attn_sink=None)
    if names == ("qkv",):
        others = others._replace(cu_seqlens_k=others.cu_seqlens_q)
    saved = {name: x for name, x in others._asdict().items() if isinstance(x, torch.Tensor)}
    rest = others._replace(**dict.fromkeys(saved))
    call = Call(
        WHAT,
        partial(forward.attend, arrays, options, packing),
        partial(_gradients, tuple(indices), tuple(saved), rest, options),
        (arrays.attn_sink, *inputs),
        tuple(saved.values()),
    )
    out, lse = attend_with_graph(call)
    return out, lse


def _gradients(
    parts: tuple[list[Any], ...],
    names: tuple[str, ...],
    rest: DenseArrays,
    options: DenseOptions,
    needs: tuple[bool, ...],
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    inputs: tuple[torch.Tensor, ...],
    others: tuple[torch.Tensor, ...],
) -> tuple[torch.Tensor | None, ...]:
    """Compute `Call.backward` of an eager call.

    ``parts`` has the indices of q, k and v in each input but the sink, and ``names`` has the names of
    ``others``, which are tensors; further arrays are in ``rest``.
    """
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
    given = [
        None if target is None or walked(READERS[type(target)](target, name)) is None else target
        for name, target in zip(("dq", "dk", "dv"), targets, strict=True)
    ]
    of_q, of_k, of_v = [is_needed for is_needed, indices in zip(needed, parts, strict=True) for _ in indices]
    *made, dsink = backward.backpropagate(
        rest._replace(q=q, k=k, v=v, attn_sink=sink, **dict(zip(names, others, strict=True))),
        Gradients(gradient_of_out(dout, out), out, lse, dlse, *given),
        options,
        Needs(of_q, of_k, of_v, needs_sink),
    )
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
