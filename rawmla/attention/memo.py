"""Traces of functions, kept for as long as nothing that a function reads is of another kind.

A function is known by its code and by what it reads: cells, globals, attributes, defaults, arguments of
functools.partial. Tensors count by dtype, shape and whether they require grad, everything else by value. A
function that reads what is not known here, such as an object or a module of a user's, is traced at every
call.
"""

from __future__ import annotations

import functools
import sys
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch

from .mods import Mod
from .trace import trace

__all__ = ["traced"]

MAX_TRACES = 256
_STEADY = {"torch", *sys.stdlib_module_names}
"""Modules whose attributes, and those of their classes, stay as they are."""


class _Unknown(Exception):
    """What a function reads cannot be compared."""


class _Kept(NamedTuple):
    """A trace, with the places of its tensors among those that the function reads."""

    mod: Mod
    captures: tuple[int, ...]
    numbers: tuple[int | None, ...]  # None: the source that the trace has


_kept: OrderedDict[Any, _Kept] = OrderedDict()


def traced(
    function: Callable[..., Any],
    kind: Literal["score_mod", "mask_mod"],
    device: Any,
    backward: bool = False,
) -> Mod:
    """A function as CUDA text with the tensors that it reads now; arguments and errors as of `trace`."""
    tensors: list[torch.Tensor] = []
    try:
        key = (kind, device, backward, _described(function, tensors, frozenset()))
        found = _kept.get(key)
    except (_Unknown, TypeError):  # TypeError: what cannot be hashed
        return trace(function, kind, device, backward)
    if found is None:
        mod = trace(function, kind, device, backward)
        places = {id(tensor): place for place, tensor in enumerate(tensors)}
        captures = [places.get(id(capture.array)) for capture in mod.captures]
        if None not in captures:
            numbers = tuple(places.get(id(number.source)) for number in mod.numbers)
            found_at = tuple(place for place in captures if place is not None)
            _kept[key] = _Kept(_without_tensors(mod, numbers), found_at, numbers)
            if len(_kept) > MAX_TRACES:
                _kept.popitem(last=False)
        return mod
    _kept.move_to_end(key)
    mod, captures_at, numbers_at = found
    return mod._replace(
        captures=tuple(
            capture._replace(array=tensors[place])
            for capture, place in zip(mod.captures, captures_at, strict=True)
        ),
        numbers=tuple(
            number if place is None else number._replace(source=tensors[place])
            for number, place in zip(mod.numbers, numbers_at, strict=True)
        ),
    )


def _without_tensors(mod: Mod, numbers_at: tuple[int | None, ...]) -> Mod:
    """A trace that keeps no memory of the caller's alive."""
    numbers = []
    for number, place in zip(mod.numbers, numbers_at, strict=True):
        source = number.source
        if isinstance(source, torch.Tensor):  # one without a place was made by the trace, of a number
            number = number._replace(source=source.item() if place is None else None)
        numbers.append(number)
    captures = tuple(capture._replace(array=None) for capture in mod.captures)
    return mod._replace(captures=captures, numbers=tuple(numbers))


def _described(x: Any, tensors: list[torch.Tensor], around: frozenset[int]) -> Any:
    """What a trace depends on of `x`, to be compared; its tensors are added to `tensors`.

    `around` has the ids of the functions that are being described.
    """
    describe = _BY_CLASS.get(x.__class__, _described_other)
    return describe(x, tensors, around)


def _described_other(x: Any, tensors: list[torch.Tensor], around: frozenset[int]) -> Any:
    """`_described` of what is of no class in `_BY_CLASS`."""
    for kind, describe in _BY_CLASS.items():
        if isinstance(x, kind):
            return describe(x, tensors, around)
    if isinstance(x, types.BuiltinFunctionType) and not isinstance(x.__self__, (types.ModuleType, type)):
        raise _Unknown  # a method of an object, which may change
    if isinstance(x, (types.BuiltinFunctionType, torch._ops.OpOverloadPacket)):
        return x
    if isinstance(x, (types.ModuleType, type)):
        home = x.__name__ if isinstance(x, types.ModuleType) else x.__module__
        if home.partition(".")[0] in _STEADY:
            return x
    raise _Unknown


def _described_function(
    function: types.FunctionType, tensors: list[torch.Tensor], around: frozenset[int]
) -> Any:
    if id(function) in around:  # it calls itself
        return function.__code__
    if function.__dict__:
        raise _Unknown
    around = around | {id(function)}
    code, scope = function.__code__, function.__globals__
    names = [name for name in _names_of(code) if name in scope]
    cells, defaults, keywords = function.__closure__, function.__defaults__, function.__kwdefaults__
    return (
        code,
        cells and tuple([_described(cell.cell_contents, tensors, around) for cell in cells]),
        defaults and tuple([_described(x, tensors, around) for x in defaults]),
        keywords and _described_dict(keywords, tensors, around),
        tuple([(name, _described(scope[name], tensors, around)) for name in names]),
    )


def _described_tensor(x: torch.Tensor, tensors: list[torch.Tensor], around: frozenset[int]) -> Any:
    for place, tensor in enumerate(tensors):
        if tensor is x:
            return ("again", place)
    tensors.append(x)
    # Sizes may stand in the trace: where a function reads one, takes a slice or unbinds.
    return ("tensor", x.dtype, tuple(x.shape), x.requires_grad, x.device.type)


def _described_value(x: Any, tensors: list[torch.Tensor], around: frozenset[int]) -> Any:
    return (x.__class__, x)


def _described_float(x: float, tensors: list[torch.Tensor], around: frozenset[int]) -> Any:
    return (float, x if x and x == x else repr(x))  # zeros have signs, and no NaN is equal to itself


def _described_sequence(x: Any, tensors: list[torch.Tensor], around: frozenset[int]) -> Any:
    return (x.__class__, tuple([_described(one, tensors, around) for one in x]))


def _described_dict(x: dict[Any, Any], tensors: list[torch.Tensor], around: frozenset[int]) -> Any:
    return (dict, tuple([(name, _described(one, tensors, around)) for name, one in x.items()]))


def _described_partial(x: Any, tensors: list[torch.Tensor], around: frozenset[int]) -> Any:
    return ("partial", *[_described(one, tensors, around) for one in (x.func, x.args, x.keywords)])


_BY_CLASS: dict[type, Callable[[Any, list[torch.Tensor], frozenset[int]], Any]] = {
    types.FunctionType: _described_function,
    torch.Tensor: _described_tensor,
    float: _described_float,
    **dict.fromkeys((int, bool, str, bytes, type(None), torch.dtype, torch.device), _described_value),
    **dict.fromkeys((tuple, list), _described_sequence),
    dict: _described_dict,
    functools.partial: _described_partial,
}


@functools.lru_cache(maxsize=1024)
def _names_of(code: types.CodeType) -> tuple[str, ...]:
    """Names that the code, or that of a function in it, may look up among the globals."""
    names = list(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names += _names_of(constant)
    return tuple(names)
