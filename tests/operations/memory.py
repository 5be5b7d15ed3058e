"""Torch tensors in memory of other layouts, between what nobody may read or write."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import torch

from kit.sparse import INT_MAX

from .core import Pads, bits

CANARY = -7


def strided(x: Any, kind: str) -> list[Any]:
    """The values of a torch tensor behind other strides of a kind:

    wide: slices of larger dimensions before the last; columns: of a larger last one; permuted: every order of
    the dimensions before the last in memory; unaligned: an odd address; odd: an odd stride of rows;
    transposed: every order of all dimensions.
    """

    def room(*pads: tuple[int, int]) -> Any:
        buffer = garbage(padded_shape(x, pads), x)
        return inner(buffer, x, pads)

    none = ((0, 0),) * x.ndim
    if kind == "wide":
        targets = [
            room(*none[:axis], (4, 4) if axis == x.ndim - 2 else (1, 2), *none[axis + 1 :])
            for axis in range(x.ndim - 1)
        ]
    elif kind == "columns":
        targets = [room(*none[:-1], (32, 32))]
    elif kind == "odd":
        targets = [room(*none[:-1], (0, 1))]
    elif kind == "unaligned":
        targets = [garbage([x.numel() + 1], x)[1:].view(x.shape)]
    else:
        kept = 0 if kind == "transposed" else 1
        targets = []
        for leading in list(permutations(range(x.ndim - kept)))[1:]:
            order = leading if kind == "transposed" else (*leading, x.ndim - 1)
            buffer = garbage([x.shape[axis] for axis in order], x)
            targets.append(buffer.permute([order.index(axis) for axis in range(x.ndim)]))
    for target in targets:
        target.copy_(x)
        assert torch.equal(bits(target), bits(x))
    return targets


def padded_shape(x: Any, pads: Pads) -> list[int]:
    """The shape of a buffer with room around x."""
    return [n + before + after for n, (before, after) in zip(x.shape, pads, strict=True)]


def inner(buffer: Any, x: Any, pads: Pads) -> Any:
    """The slice of a padded buffer that has the shape of x."""
    for axis, (before, _) in enumerate(pads):
        buffer = buffer.narrow(axis, before, x.shape[axis])
    return buffer


def garbage(shape: list[int], like: Any) -> Any:
    """A tensor of what nobody may read: NaN, or a number too large for an index."""
    value = float("nan") if like.is_floating_point() else 0xFF if like.element_size() == 1 else INT_MAX
    return torch.full(shape, value, dtype=like.dtype, device=like.device)


def between_canaries(result: Any, pads: Pads) -> tuple[Any, Any]:
    """A buffer of canaries, and the slice of it that has the result's shape."""
    buffer = torch.empty(padded_shape(result, pads), dtype=result.dtype, device=result.device)
    fill_with_canaries(buffer)
    return buffer, inner(buffer, result, pads)


def fill_with_canaries(x: Any) -> None:
    """What a call must not write over, in any dtype."""
    x.fill_(-CANARY if x.dtype == torch.uint8 else CANARY)


def all_canaries(x: Any) -> bool:
    """Whether nothing was written there."""
    return bool((x == (-CANARY if x.dtype == torch.uint8 else CANARY)).all())
