"""Python functions that read the very objects which a function read before: what an earlier call bound, found
again without a look at its trace.

All layers and steps of a model make the same few calls. Here a function is known by the identity of its code
and of all that it reads, also through tuples and functions; of a tensor count, besides, address, shape,
strides, dtype and device. Where it reads anything else that may change and stay the same object, nothing is
kept: `memo`, which compares by value, has the last word.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from types import FunctionType, MethodType
from typing import Any, NamedTuple

from ..call.arrays import Framework
from ..call.memo import Memo
from .code import names_in

__all__ = ["keep_bound", "objects_of", "recall_bound"]

_CHANGING = {list, dict, set, functools.partial, MethodType}
"""What most often is the reason why nothing is kept."""

_MAX_OBJECTS = 256
"""More take longer to collect than to describe; a function that calls itself has no end of them."""


class _Mark:
    """Stands among objects, and is none that a function can read."""


_FUNCTION, _TUPLE, _END, _ABSENT = _Mark(), _Mark(), _Mark(), _Mark()
"""Before the code of a function, before and behind the objects of a tuple, for a name that is no global."""

_MAX_OF_CODE = 256
"""More than layers with tables of their own. Of a number that is another at every call there is no end."""


class _Known(NamedTuple):
    objects: list[Any]  # kept, so that no others get their ids; None in the places of tensors
    tensors: list[tuple[int, tuple[Any, ...]]]  # places among the objects, where ids may be reused; states
    bound: Any


_known: Memo[dict[tuple[int, ...], _Known]] = Memo(shared=True)
"""By kind, device, framework and id of the code, and by the ids of all objects."""


def objects_of(function: FunctionType) -> list[Any] | None:
    """A function's code and all that it reads, with marks, so that no other function has the same list; None
    if nothing may be kept of it.
    """
    objects: list[Any] = []
    return objects if _add((function,), objects) else None


def _add(given: Iterable[Any], objects: list[Any]) -> bool:
    """Add objects, and what functions and tuples among them hold, to a list; False if nothing may be kept."""
    for one in given:
        kind = one.__class__
        if kind is FunctionType:
            if not _add_function(one, objects):
                return False
        elif kind is tuple:
            objects.append(_TUPLE)
            if not _add(one, objects):
                return False
            objects.append(_END)
        elif kind in _CHANGING:
            return False
        else:
            objects.append(one)
    return len(objects) <= _MAX_OBJECTS


def _add_function(function: FunctionType, objects: list[Any]) -> bool:
    """Add code, defaults, closed-over variables and globals."""
    code = function.__code__
    known = names_in(code)
    if function.__dict__ or function.__kwdefaults__ or known.of_layout or len(objects) > _MAX_OBJECTS:
        return False
    objects += (_FUNCTION, code)
    held = [*(function.__defaults__ or ())]
    try:
        held += [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # a variable without a value yet
        return False
    scope = function.__globals__
    held += [scope.get(name, _ABSENT) for name in known.names]
    return _add(held, objects)


def recall_bound(objects: Sequence[Any], kind: str, device: int, framework: Framework) -> Any:
    """The `Bound` that `keep_bound` kept for a function with these objects; None if there is none, or if one
    of the tensors has changed.
    """
    of_code = _known.get((kind, device, framework, id(objects[1])))
    known = None if of_code is None else of_code.get(tuple(map(id, objects)))
    if known is None:
        return None
    for place, state in known.tensors:
        tensor = objects[place]
        if tensor.__class__ is not state[0] or tensor.__dict__ or _state_of(tensor) != state:
            return None
    return known.bound


def keep_bound(
    function: FunctionType,
    objects: list[Any],
    kind: str,
    device: int,
    framework: Framework,
    reading: Any,
    bound: Any,
) -> None:
    """Remember what was bound for a function, without its tensors, unless it reads what may change.

    ``objects`` are those before it was traced: if it has others by now, it is not known which of them were
    read. Of a call with arrays of another framework than torch's nothing is kept, as the streams of both have
    to be looked at every time; and nothing of a function with a tensor that requires grad.
    """
    from . import memo  # imports torch, which has traced the function

    key = kind, device, framework, id(objects[1])
    of_code = _known.get(key, {})
    if framework.name != "torch" or len(of_code) >= _MAX_OF_CODE:
        return
    states = {id(array): _state_of(array) for array in reading.arrays}
    addresses: list[int] = []
    lie: tuple[Any, ...] = ()
    for array in reading.arrays:
        _, address, shape, strides, *_ = states[id(array)]
        addresses.append(address)
        lie += (shape, strides)
    if addresses != bound.addresses or reading.frame.forms.get(lie) is not bound.form:
        return
    kept: list[Any] = list(objects)
    tensors = []
    for place, one in enumerate(objects):
        if id(one) in states:
            if one.__dict__ or one.requires_grad:
                return
            tensors.append((place, states[id(one)]))
            kept[place] = None
        elif not (one.__class__ is _Mark or objects[place - 1] is _FUNCTION or memo.stands_alone(one)):
            return
    ids = tuple(map(id, objects))
    now = objects_of(function)
    if now is None or ids != tuple(map(id, now)):
        return
    if len({id(objects[place]) for place, _ in tensors}) == len(states):
        of_code[ids] = _Known(kept, tensors, bound)
        _known.keep(key, of_code)


def _state_of(tensor: Any) -> tuple[Any, ...]:
    """What a trace and a kernel depend on of a tensor of torch, besides its values."""
    return (
        tensor.__class__,
        tensor.data_ptr(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.get_device(),
        tensor.requires_grad,
    )
