"""Traces of functions, kept for as long as nothing that a function reads is of another kind.

A function is known by its code and by what it reads: cells, globals, attributes, defaults, arguments of
functools.partial. Tensors count by dtype, shape, device and whether they require grad, everything else by
value. A function that reads what is not known here, such as an object, a module or a class of a user's, or
how a tensor lies in memory, is traced at every call.
"""

from __future__ import annotations

import functools
import operator
import sys
import types
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any, Literal, NamedTuple

import torch

from .code import names_in
from .mods import Frame, Reading, reading_of
from .trace import trace

__all__ = ["read", "stands_alone"]

MAX_TRACES = 256
_STEADY = {"torch", "numpy", *sys.stdlib_module_names}
"""Modules whose attributes, and those of their classes, stay as they are."""


class _Unknown(Exception):
    """What a function reads cannot be compared."""


class _Kept:
    """A trace without the caller's tensors: it has their places among those that the function reads."""

    __slots__ = ("captures", "frame", "numbers", "used", "without_tensors")

    def __init__(self, frame: Frame, captures: list[int], numbers: list[_Number]) -> None:
        self.frame = frame
        self.captures = captures
        self.numbers = numbers
        self.without_tensors = Reading(frame, (), tuple([value for value, _ in numbers]))
        self.used = next(_clock)


class _Number(NamedTuple):
    """A number of a trace: the value that it has there, or the place of the tensor that has it."""

    value: Any
    place: int | None


_kept: dict[Any, _Kept] = {}
_clock = count()


def read(
    function: Callable[..., Any],
    kind: Literal["score_mod", "mask_mod"],
    device: Any,
    backward: bool = False,
) -> Reading:
    """What stays of a function, and what it reads now; arguments and errors as of `trace`."""
    tensors: list[torch.Tensor] = []
    try:
        key = (kind, device, backward, _BY_CLASS[function.__class__](function, tensors, ()))
        found = _kept.get(key)
    except (_Unknown, TypeError, ValueError):  # TypeError: what cannot be hashed; ValueError: an empty cell
        return reading_of(trace(function, kind, device, backward))
    if found is None:
        reading = reading_of(trace(function, kind, device, backward))
        _keep(key, reading, tensors)
        return reading
    found.used = next(_clock)
    if not tensors:
        return found.without_tensors
    return Reading(
        found.frame,
        [tensors[place] for place in found.captures],
        found.numbers and [value if place is None else tensors[place] for value, place in found.numbers],
    )


def _keep(key: Any, reading: Reading, tensors: list[torch.Tensor]) -> None:
    """Remember a trace, but none that reads a tensor which is not among those found."""
    places = {id(tensor): place for place, tensor in enumerate(tensors)}
    captures = [places[id(array)] for array in reading.arrays if id(array) in places]
    if len(captures) < len(reading.arrays):
        return
    numbers = []
    for source in reading.sources:
        place = places.get(id(source))
        if place is None and isinstance(source, torch.Tensor):  # made by the trace, of a number
            source = source.item()
        numbers.append(_Number(source if place is None else None, place))
    _kept[key] = _Kept(reading.frame, captures, numbers)
    if len(_kept) > MAX_TRACES:  # a copy: another thread may add one
        oldest, _ = min(_kept.copy().items(), key=lambda item: item[1].used)
        _kept.pop(oldest, None)


_contents = operator.attrgetter("cell_contents")
Around = tuple[Any, ...]
"""The functions that are being described, one inside of the other."""


def _described_function(function: types.FunctionType, tensors: list[torch.Tensor], around: Around) -> Any:
    if function in around:  # it calls itself
        return function.__code__
    if function.__dict__:
        raise _Unknown
    around = (*around, function)
    code, scope = names_in(function.__code__), function.__globals__
    if code.of_layout:
        raise _Unknown
    cells, defaults, keywords = function.__closure__, function.__defaults__, function.__kwdefaults__
    return (
        code,
        cells and _described_all(map(_contents, cells), tensors, around),
        defaults and _described_all(defaults, tensors, around),
        keywords and _described_names(keywords, tensors, around),
        code.names and _described_names({x: scope[x] for x in code.names if x in scope}, tensors, around),
    )


def _described_all(several: Iterable[Any], tensors: list[torch.Tensor], around: Around) -> tuple[Any, ...]:
    return tuple([_BY_CLASS[x.__class__](x, tensors, around) for x in several])


def _described_tensor(x: torch.Tensor, tensors: list[torch.Tensor], around: Around) -> Any:
    for place, tensor in enumerate(tensors):
        if tensor is x:
            return ("again", place)
    tensors.append(x)
    # Sizes may stand in the trace: where a function reads one, takes a slice or unbinds.
    described = ("tensor", x.dtype, x.shape, x.requires_grad, x.device)
    if x.__dict__:  # torch.compile leaves something there too
        return (described, _described_names(x.__dict__, tensors, around))
    return described


def _described_value(x: Any, tensors: list[torch.Tensor], around: Around) -> Any:
    return (x.__class__, x)


def _described_float(x: float, tensors: list[torch.Tensor], around: Around) -> Any:
    return (x.__class__, x if x and x == x else repr(x))  # zeros have signs, and no NaN is equal to itself


def _described_sequence(x: Any, tensors: list[torch.Tensor], around: Around) -> Any:
    return (x.__class__, _described_all(x, tensors, around))


def _described_names(x: dict[str, Any], tensors: list[torch.Tensor], around: Around) -> Any:
    return (tuple(x), _described_all(x.values(), tensors, around))


def _described_dict(x: dict[Any, Any], tensors: list[torch.Tensor], around: Around) -> Any:
    return ("dict", _described_all(x, tensors, around), _described_all(x.values(), tensors, around))


def _described_partial(x: Any, tensors: list[torch.Tensor], around: Around) -> Any:
    if x.__dict__:
        raise _Unknown
    parts = _described_all((x.func, *x.args), tensors, around)
    return ("partial", parts, _described_names(x.keywords, tensors, around))


def _described_module(x: Any, tensors: list[torch.Tensor], around: Around) -> Any:
    if x.__name__.partition(".")[0] in _STEADY:
        return x
    raise _Unknown


def _described_class(x: type, tensors: list[torch.Tensor], around: Around) -> Any:
    if x.__module__.partition(".")[0] in _STEADY:
        return x
    raise _Unknown


def _described_builtin(x: Any, tensors: list[torch.Tensor], around: Around) -> Any:
    if isinstance(x.__self__, (types.ModuleType, type)):
        return x
    raise _Unknown  # a method of an object, which may change


def _described_itself(x: Any, tensors: list[torch.Tensor], around: Around) -> Any:
    return x


def _refused(x: Any, tensors: list[torch.Tensor], around: Around) -> Any:
    raise _Unknown


_Describer = Callable[[Any, list[torch.Tensor], Around], Any]


class _Describers(dict[type, _Describer]):
    """Class -> the function that gives what a trace depends on of an object, to be compared; the object's
    tensors are added to a list.
    """

    def __missing__(self, cls: type) -> _Describer:
        if cls.__bases__ == (tuple,) and vars(cls).keys() - getattr(cls, "_fields", ()) <= _OF_NAMED_TUPLES:
            return _described_sequence
        if cls.__module__.partition(".")[0] in ("torch", "numpy") or issubclass(cls, type):
            for known, describe in self.items():
                if issubclass(cls, known):
                    return describe
        return _refused  # a user's dict or a defaultdict, say, has more than its contents


_OF_NAMED_TUPLES = vars(_Number).keys()
"""The members of any NamedTuple, beside its fields, that has none of its own."""


_BY_CLASS = _Describers(
    {
        types.FunctionType: _described_function,
        **dict.fromkeys((torch.Tensor, torch.nn.Parameter), _described_tensor),
        float: _described_float,
        **dict.fromkeys((int, bool, str, bytes, type(None), torch.dtype, torch.device), _described_value),
        **dict.fromkeys((tuple, list), _described_sequence),
        dict: _described_dict,
        functools.partial: _described_partial,
        types.ModuleType: _described_module,
        type: _described_class,
        types.BuiltinFunctionType: _described_builtin,
        torch._ops.OpOverloadPacket: _described_itself,
    }
)


_ALONE = {
    *(_described_value, _described_float, _described_module, _described_class, _described_builtin),
    _described_itself,
}


def stands_alone(x: Any) -> bool:
    """Whether the trace of a function that reads an object is the same for as long as it reads this one."""
    describe = _BY_CLASS[type(x)]  # a proxy has the `__class__` of what it stands for, and may change
    if describe not in _ALONE:
        return False
    try:
        describe(x, [], ())
    except _Unknown:
        return False
    return True
