"""Python functions that read the very objects which an earlier call of the same code read: what that call
bound, found again without a look at its trace.

A model makes the same call in every layer and step. Here a function is known by its code, and by the identity
of what it reads; arrays also by where and how they lie. Where a function reads anything that can change and
stay the same object, such as a list or another function, nothing is kept, and `memo` compares it by value.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import is_
from types import CodeType, FunctionType
from typing import Any, NamedTuple
from weakref import ref

from ..call.arrays import READERS, Framework
from ..call.memo import Memo

__all__ = ["keep_bound", "recall_bound"]

_ABSENT = object()
"""Of a name that is no global."""


class _Array(NamedTuple):
    place: int  # among the objects
    reference: Callable[[], Any]
    fields: list[Any]  # without the array


class _Known(NamedTuple):
    code: CodeType  # kept, so that no other one gets its id
    framework: Framework
    names: tuple[str, ...]
    objects: list[Any]  # None in the places of arrays
    arrays: list[_Array]
    bound: Any


_known: Memo[_Known] = Memo(shared=True)
"""By kind, device and id of the code."""


def recall_bound(function: FunctionType, kind: str, device: int, framework: Framework) -> Any:
    """The `Bound` of a function of which `keep_bound` kept one, if it reads the same; else None.

    Raises
    ------
    NeedsGradient
        An array that it reads requires grad by now.
    """
    known = _known.get((kind, device, id(function.__code__)))
    if known is None:
        return None
    _, its_framework, names, objects, arrays, bound = known
    if framework is not its_framework:
        return None
    read = _objects_of(function, names)
    if read is None or len(read) != len(objects):
        return None
    for place, reference, fields in arrays:
        array = read[place]
        if array is None or reference() is not array or array.__dict__:
            return None
        *now, _ = READERS[type(array)](array, f"{kind}: an array that it reads")
        if now != fields:
            return None
        read[place] = None
    return bound if all(map(is_, read, objects)) else None


def keep_bound(
    function: FunctionType, kind: str, device: int, framework: Framework, reading: Any, bound: Any
) -> None:
    """Remember what was bound for a traced function, without its arrays, unless it reads what may change.

    Of a function that reads arrays of another framework nothing is kept either: its stream has to be looked
    at in every call.
    """
    from . import memo  # imports torch, which has traced the function

    names = memo.global_names(function)
    read = _objects_of(function, names)
    if read is None or not all(isinstance(source, (int, float)) for source in reading.sources):
        return
    captured = {id(array) for array in reading.arrays}
    arrays = []
    for place, one in enumerate(read):
        if id(one) in captured:
            *fields, _ = READERS[type(one)](one, kind)
            if fields[5] is not framework:
                return
            arrays.append(_Array(place, ref(one), fields))
            read[place] = None
        elif one is not _ABSENT and not memo.stands_alone(one):
            return
    if {id(array.reference()) for array in arrays} == captured:
        key = kind, device, id(function.__code__)
        _known.keep(key, _Known(function.__code__, framework, names, read, arrays, bound))


def _objects_of(function: FunctionType, names: tuple[str, ...]) -> list[Any] | None:
    """What a function reads: defaults, closed-over variables, globals; None if it may read more."""
    if function.__dict__ or function.__kwdefaults__ is not None:
        return None
    read = [*(function.__defaults__ or ())]
    try:
        for cell in function.__closure__ or ():
            read.append(cell.cell_contents)
    except ValueError:  # a variable without a value yet
        return None
    scope = function.__globals__
    for name in names:
        read.append(scope.get(name, _ABSENT))
    return read
