"""Python functions that read the very objects which an earlier call of the same code read: what that call
bound, found again without a look at its trace.

A model makes the same call in every layer and step. Here a function is known by its code, and by the identity
of what it reads, also through tuples and functions; arrays also by where and how they lie. Where it reads
anything else that can change and stay the same object, such as a list, nothing is kept: `memo` compares by
value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import is_
from types import CodeType, FunctionType
from typing import Any, NamedTuple
from weakref import ref

from ..call.arrays import READERS, Framework
from ..call.memo import Memo

__all__ = ["keep_bound", "recall_bound"]

_ABSENT = object()
"""Of a name that is no global."""


_MAX_FUNCTIONS = 16
"""That one of which a bound is kept may call, itself included."""


class _Array(NamedTuple):
    place: int  # among the objects
    reference: Callable[[], Any]
    fields: list[Any]  # without the array


class _Known(NamedTuple):
    framework: Framework
    names: list[tuple[str, ...]]  # of each function's globals
    objects: list[Any]  # None in the places of arrays; code among them is kept, so that no other gets its id
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
    its_framework, names, objects, arrays, bound = known
    if framework is not its_framework:
        return None
    read: list[Any] = []
    following = iter(names)
    if not _add_function(function, read, lambda code: next(following, None)) or len(read) != len(objects):
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

    names: list[tuple[str, ...]] = []

    def names_of(code: CodeType) -> tuple[str, ...] | None:
        names.append(memo.global_names(code))
        return names[-1] if len(names) <= _MAX_FUNCTIONS else None

    read: list[Any] = []
    if not _add_function(function, read, names_of):
        return
    if not all(isinstance(source, (int, float)) for source in reading.sources):
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
        elif not (one is _ABSENT or isinstance(one, CodeType) or memo.stands_alone(one)):
            return
    if {id(array.reference()) for array in arrays} == captured:
        known = _Known(framework, names, read, arrays, bound)
        _known.keep((kind, device, id(function.__code__)), known)


_NamesOf = Callable[[CodeType], "tuple[str, ...] | None"]


def _add_function(function: FunctionType, read: list[Any], names_of: _NamesOf) -> bool:
    """Add a function's code and what it reads to a list: defaults, closed-over variables, globals, and what
    functions among these read. False if it may read more.
    """
    code = function.__code__
    names = names_of(code)
    if names is None or function.__dict__ or function.__kwdefaults__ is not None:
        return False
    own = [code, *(function.__defaults__ or ())]
    try:
        for cell in function.__closure__ or ():
            own.append(cell.cell_contents)
    except ValueError:  # a variable without a value yet
        return False
    scope = function.__globals__
    for name in names:
        own.append(scope.get(name, _ABSENT))
    return _add(own, read, names_of)


def _add(objects: Iterable[Any], read: list[Any], names_of: _NamesOf) -> bool:
    for one in objects:
        if one.__class__ is FunctionType:
            if not _add_function(one, read, names_of):
                return False
        elif one.__class__ is tuple:
            read.append(len(one))
            if not _add(one, read, names_of):
                return False
        else:
            read.append(one)
    return True
