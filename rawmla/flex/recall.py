"""Python functions that read the very objects which a function read before: what an earlier call bound, found
again without a look at its trace.

All layers and steps of a model make the same few calls. Here a function is known by the identity of its code
and of all that it reads; of a tensor count, besides, address, shape, strides, dtype and device. Where it
reads anything else that may change and stay the same object, such as a list or another function, nothing is
kept: `memo` compares that by value.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from ..call.arrays import Framework
from ..call.memo import Memo
from .code import names_in

__all__ = ["keep_bound", "objects_of", "recall_bound", "states_of"]

_CHANGING = {list, tuple, dict, set, functools.partial, FunctionType, MethodType}
"""Common kinds that may change in place, or hold what may: found early. `keep_bound` refuses all others."""

_ABSENT = object()
"""In the place of a global that there is not."""


class _State(NamedTuple):
    """What a trace and a kernel depend on of a tensor of torch, besides its values."""

    kind: type
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: Any
    device: int
    requires_grad: bool
    is_negative: bool
    has_attributes: bool


class _Known(NamedTuple):
    objects: list[Any]  # kept, so that no others get their ids; None in the places of tensors
    states: list[tuple[int, _State]]  # places of tensors, where other objects may have these ids by now
    values: list[tuple[ModuleType, str, Any]]  # what was read of modules
    bound: Any


_known: Memo[_Known] = Memo(shared=True)
"""By kind, device, framework, and `_ids` of the objects."""


def objects_of(function: FunctionType) -> list[Any] | None:
    """A function's code, its defaults, and the values of its closed-over variables and of globals; None if
    nothing may be kept of it.
    """
    code = function.__code__
    if function.__kwdefaults__:
        return None
    objects = [code, *(function.__defaults__ or ())]
    try:
        objects += [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # a variable without a value yet
        return None
    scope = function.__globals__
    objects += [scope.get(name, _ABSENT) for name, _ in names_in(code).globals]
    return objects if _CHANGING.isdisjoint(map(type, objects)) else None


def _ids(objects: Sequence[Any]) -> list[int | str]:
    """What tells objects from others: floats by value, as Python makes a new one with each operation."""
    return [x.hex() if type(x) is float else id(x) for x in objects]


def states_of(objects: Sequence[Any]) -> list[tuple[int, _State]] | None:
    """Places and states of the tensors among objects; None if one has no memory of its own."""
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    try:
        return [(place, _state_of(x)) for place, x in enumerate(objects) if isinstance(x, torch.Tensor)]
    except RuntimeError:
        return None


def _state_of(x: Any) -> _State:
    return _State(
        type(x), x.data_ptr(), x.shape, x.stride(), x.dtype, x.get_device(), x.requires_grad, x.is_neg(),
        bool(x.__dict__),
    )  # fmt: skip


def recall_bound(objects: Sequence[Any], kind: str, device: int, framework: Framework) -> Any:
    """The `Bound` that `keep_bound` kept for a function with these objects; None if there is none, or if one
    of the tensors has changed.
    """
    known = _known.get((kind, device, framework, *_ids(objects)))
    if known is None:
        return None
    for place, state in known.states:
        if type(objects[place]) is not state.kind:
            return None
        try:
            if _state_of(objects[place]) != state:
                return None
        except RuntimeError:  # a sparse tensor with the id of one that is gone
            return None
        if state.requires_grad and sys.modules["torch"].is_grad_enabled():
            return None
    for module, name, value in known.values:
        if getattr(module, name, _ABSENT) is not value:
            return None
    return known.bound


def keep_bound(
    function: FunctionType,
    objects: list[Any],
    states: list[tuple[int, _State]] | None,
    kind: str,
    device: int,
    framework: Framework,
    reading: Any,
    bound: Any,
) -> None:
    """Remember what was bound for a function, without its tensors, unless it reads what may change.

    ``objects`` and ``states`` are those before it was traced: if it has others by now, it is not known which
    of them were read. Of a call with arrays of another framework than torch's nothing is kept, as the streams
    of both have to be looked at every time.
    """
    from . import memo  # imports torch, which has traced the function

    if framework.name != "torch" or states is None:
        return
    of_tensors = {id(objects[place]) for place, _ in states}
    if of_tensors != {id(array) for array in reading.arrays} or any(x.has_attributes for _, x in states):
        return  # it reads a number of the CPU, an array that its trace makes, or what its tensors hold
    kept = [None if id(x) in of_tensors else x for x in objects]
    values = memo.reads_of(function)
    if values is None or not all(x is _ABSENT or memo.stands_alone(x) for x in kept[1:]):
        return
    ids = _ids(objects)
    now = objects_of(function)
    if now is not None and _ids(now) == ids and states_of(now) == states:
        _known.keep((kind, device, framework, *ids), _Known(kept, states, values, bound))
