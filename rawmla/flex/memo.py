"""Traces of functions, kept for as long as nothing that a function reads is of another kind.

A function is known by its code and by what it reads: cells, globals, attributes, defaults, arguments of
functools.partial. Tensors count by dtype, shape, strides, device and whether they require grad, everything
else by value. The functions of a few modules are trusted to give the same for the same arguments. A function
that reads anything else, such as an object, a module or a class of a user's, the time, or the layout of a
tensor in memory, is traced at every call.
"""

from __future__ import annotations

import builtins
import functools
import math
import operator
import types
from collections.abc import Callable, Collection
from itertools import repeat
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from ..call.arrays import READERS
from ..call.frameworks import Fields, Framework
from ..call.memo import Memo
from .code import Chain, CodeNames, names_in
from .mods import Bound, Frame, Reading, reading_of
from .trace import trace

MAX_COMPARED = 10_000
"""Objects of a function that are compared at most: more of them take milliseconds, as a trace does."""


class _Unknown(Exception):
    """A function reads an object that cannot be compared."""


class _Kept(NamedTuple):
    """A trace without the caller's tensors: it has their places among those that the function reads."""

    frame: Frame
    captures: list[int]
    numbers: list[tuple[Any, int | None]]
    """Values, or the places of the tensors that have them."""
    fixed: list[Any] | None
    """The values of the numbers; None where a tensor has one, or a capture needs a gradient."""
    bound: dict[Framework, Bound]
    """The function as the last call of a framework bound it, by `recall`."""

    def reading(self, views: list[Fields]) -> Reading:
        """The function with the tensors of a look at it."""
        sources = self.fixed
        if sources is None:
            sources = [value if place is None else views[place][6] for value, place in self.numbers]
        return Reading(self.frame, [views[place][6] for place in self.captures], sources)


_kept: Memo[_Kept] = Memo()


def read(
    function: Callable[..., Any],
    kind: Literal["score_mod", "mask_mod"],
    device: Any,
    backward: bool = False,
) -> Reading:
    """Read a function: its kept trace, or a new one, with the tensors and numbers that it reads now.
    Arguments and errors are as for `trace`.
    """
    look = _Look()
    try:
        key = (kind, device, backward, _described(function, look))
        found = _kept.get(key)
    except _NOT_KNOWN:
        return reading_of(trace(function, kind, device, backward))
    if found is None:
        reading = reading_of(trace(function, kind, device, backward))
        _keep(key, reading, look)
        return reading
    return found.reading(look.views)


def recall(
    function: types.FunctionType,
    kind: Literal["score_mod", "mask_mod"],
    device: torch.device,
    framework: Framework,
) -> Reading | Bound:
    """Read a function as `read` does, or bind it at once: where a call of the framework bound it to arrays of
    these kinds before, none of which needs a gradient, and no tensor of the CPU has one of its numbers.
    """
    look = _Look()
    views = look.views
    try:
        found = _kept.get((kind, device, False, _described_function(function, look)))
    except _NOT_KNOWN:
        found = None
    if found is None:
        return read(function, kind, device)
    if found.fixed is None:
        return found.reading(views)
    addresses = [views[place][0] for place in found.captures]
    known = found.bound.get(framework)
    if known is not None and known.addresses == addresses:
        return known
    read_of = [views[place] for place in found.captures]
    form = found.frame.forms.get(sum([view[1:4] for view in read_of], ()))
    if form is None or {view[4:6] for view in read_of} - {(device.index, framework)}:
        return found.reading(views)
    found.bound[framework] = Bound(form, addresses, found.fixed, form.pack(addresses, found.fixed))
    return found.bound[framework]


def _keep(key: Any, reading: Reading, look: _Look) -> None:
    """Remember a trace, but none that reads a tensor which is not among those found."""
    places = {id(view[6]): place for place, view in enumerate(look.views)}
    captures = [places[id(array)] for array in reading.arrays if id(array) in places]
    if len(captures) < len(reading.arrays):
        return
    numbers: list[tuple[Any, int | None]] = []
    for source in reading.sources:
        place = places.get(id(source))
        if place is None and isinstance(source, torch.Tensor):  # made by the trace, of a number
            source = source.item()
        numbers.append((source if place is None else None, place))
    is_fixed = all([place is None for _, place in numbers]) and all([look.views[i][0] for i in captures])
    fixed = [x for x, _ in numbers] if is_fixed else None
    _kept.keep(key, _Kept(reading.frame, captures, numbers, fixed, {}))


_UNREAD = (0, (), (), "", -1, None)
"""The first fields of a tensor that is not read: it is a number of the CPU, or needs a gradient."""


class _Look:
    """One look at what a function reads."""

    __slots__ = ("around", "left", "views")

    def __init__(self) -> None:
        self.views: list[Any] = []  # fields of the tensors found so far
        self.around: list[types.FunctionType] = []  # being described, one inside of the other
        self.left = MAX_COMPARED  # objects that may still be compared


def _described(x: Any, look: _Look) -> Any:
    return _BY_CLASS[type(x)](x, look)  # a proxy has the `__class__` of what it stands for, and may change


def _described_function(function: types.FunctionType, look: _Look) -> Any:
    if function in _TRUSTED:
        return function
    if function in look.around:  # it calls itself
        return function.__code__
    code = _readable_names(function.__code__)
    look.left -= 1
    if code is None or look.left < 0 or function.__dict__:
        raise _Unknown
    if _builtins_of(function) is not _OF_BUILTINS:
        raise _Unknown
    look.around.append(function)
    scope = function.__globals__
    cells, defaults, keywords = function.__closure__, function.__defaults__, function.__kwdefaults__
    described = (
        code,
        cells and tuple(map(_described_variable, map(_contents, cells), code.free, repeat(look))),
        defaults and _described_all(defaults, look),
        keywords and _described_names(keywords, look),
        code.globals
        and tuple(
            [
                _described_module(builtins, ((name,),), look)
                if name not in scope
                else _described_module(scope[name], chains, look)
                if type(scope[name]) is types.ModuleType
                else _BY_CLASS[type(scope[name])](scope[name], look)
                for name, chains in code.globals
            ]
        ),
    )
    look.around.pop()
    return described


_contents = operator.attrgetter("cell_contents")
_builtins_of = operator.attrgetter("__builtins__")
_OF_BUILTINS = vars(builtins)


def _described_variable(x: Any, chains: tuple[Chain, ...], look: _Look) -> Any:
    """A variable; a module is described by what its chains read."""
    return _described_module(x, chains, look) if type(x) is types.ModuleType else _BY_CLASS[type(x)](x, look)


def _described_module(x: types.ModuleType, chains: tuple[Chain, ...], look: _Look) -> Any:
    return (x, *[_described(getattr(module, name), look) for module, name in _values_of(x, chains)])


@functools.lru_cache(maxsize=1024)
def _values_of(x: Any, chains: tuple[Chain, ...]) -> list[tuple[types.ModuleType, str]]:
    """The attributes that are read of a module, besides trusted functions: modules and names."""
    found = []
    for chain in chains:
        inner = x
        for name in chain:
            if isinstance(inner, types.ModuleType):
                if inner not in _MODULES:
                    raise _Unknown
                module, last, inner = inner, name, getattr(inner, name)
        if isinstance(inner, types.ModuleType):
            raise _Unknown
        if inner not in _TRUSTED:
            found.append((module, last))
    return found


def _described_all(several: Collection[Any], look: _Look) -> tuple[Any, ...]:
    look.left -= len(several)
    if look.left < 0:
        raise _Unknown
    return tuple([_BY_CLASS[type(x)](x, look) for x in several])


def _described_tensor(x: torch.Tensor, look: _Look) -> Any:
    views = look.views
    for place, view in enumerate(views):
        if view[6] is x:
            return ("again", place)
    requires_grad = x.requires_grad
    # Sizes may stand in the trace: where a function reads one, takes a slice or unbinds.
    described: tuple[Any, ...] = ()
    if not (x.is_cpu and not x.dim()) and not (requires_grad and torch.is_grad_enabled()):
        try:
            view = READERS[type(x)](x, "a tensor that it reads")
            described = (requires_grad, view[1:6])
            views.append(view)
        except (TypeError, ValueError):  # noqa: SIM105  (suppress takes longer)
            pass
    if not described:
        views.append((*_UNREAD, x))
        described = ("tensor", x.dtype, x.shape, requires_grad, x.device)
    if x.__dict__:  # torch.compile leaves something there too
        return (described, _described_names(x.__dict__, look))
    return described


def _described_float(x: float, look: _Look) -> Any:
    return (x.__class__, x if x and x == x else repr(x))  # zeros have signs, and no NaN is equal to itself


def _described_sequence(x: Any, look: _Look) -> Any:
    return (x.__class__, _described_all(x, look))


def _described_names(x: dict[str, Any], look: _Look) -> Any:
    return (tuple(x), _described_all(x.values(), look))


def _described_partial(x: Any, look: _Look) -> Any:
    if x.__dict__:
        raise _Unknown
    return ("partial", _described_all((x.func, *x.args), look), _described_names(x.keywords, look))


def _described_trusted(x: Any, look: _Look) -> Any:
    if x in _TRUSTED:
        return x
    raise _Unknown


def _described_operator(x: Any, look: _Look) -> Any:
    name = x.__name__
    if x is getattr(torch.ops.aten, name, None) and _gives_tensors(name):
        return x
    raise _Unknown


def _refused(x: Any, look: _Look) -> Any:
    raise _Unknown


_Describer = Callable[[Any, _Look], Any]


class _Describers(dict[type, _Describer]):
    """Class -> the function that gives what a trace depends on of an object, to be compared."""

    def __missing__(self, cls: type) -> _Describer:
        if cls.__bases__ == (tuple,) and vars(cls).keys() - getattr(cls, "_fields", ()) <= _OF_NAMED_TUPLES:
            return _described_sequence
        if cls.__module__.partition(".")[0] in ("torch", "numpy") or issubclass(cls, type):
            for known, describe in self.items():
                if issubclass(cls, known):
                    return describe
        return _refused  # a user's dict or a defaultdict, say, has more than its contents


_OF_NAMED_TUPLES = vars(Reading).keys()
"""The members of any NamedTuple, beside its fields, that has none of its own."""


_BY_CLASS = _Describers(
    {
        types.FunctionType: _described_function,
        **dict.fromkeys((torch.Tensor, torch.nn.Parameter), _described_tensor),
        float: _described_float,
        **dict.fromkeys(
            (int, bool, str, bytes, type(None), torch.dtype, torch.device), lambda x, look: (x.__class__, x)
        ),
        **dict.fromkeys((tuple, list), _described_sequence),
        dict: lambda x, look: ("dict", _described_all(x, look), _described_all(x.values(), look)),
        functools.partial: _described_partial,
        **dict.fromkeys((type, types.BuiltinFunctionType, np.ufunc), _described_trusted),
        torch._ops.OpOverloadPacket: _described_operator,
    }
)


_OF_THE_KEY = frozenset(
    "shape size dim ndim ndimension numel nelement dtype device get_device requires_grad itemsize nbytes "
    "element_size is_tensor is_floating_point is_complex is_signed is_cpu is_cuda is_meta type float double "
    "half bfloat16 int long short char byte bool T H new_tensor Tensor Size finfo iinfo".split()
)
"""Names of torch, and of its tensors, for what follows from what is compared of a tensor."""

_OUTWARDS = {"format", "format_map", "gi_frame"}
"""Attributes by which a string or a generator gives what is not compared."""


@functools.lru_cache(maxsize=4096)
def _gives_tensors(name: str) -> bool:
    """Whether torch has an operator of this name, and all that take a tensor first give tensors alone: those
    are recorded, and give no value while a function is traced.
    """
    gives = [
        (
            bool(schema.arguments) and str(schema.arguments[0].type) == "Tensor",
            bool(schema.returns) and {str(x.type) for x in schema.returns} <= {"Tensor", "List[Tensor]"},
        )
        for schema in torch._C._jit_get_schemas_for_operator("aten::" + name)
    ]
    return any(tensors for _, tensors in gives) and all(tensors for takes, tensors in gives if takes)


@functools.lru_cache(maxsize=1024)
def _readable_names(code: types.CodeType) -> CodeNames | None:
    """The names in code, if they lead to all that it reads, and no attribute gives more of an object than is
    compared; else None.
    """
    names = names_in(code)
    for name in names.attributes:
        of_tensors = (
            hasattr(torch.nn.Parameter, name) and name not in _OF_THE_KEY and not _gives_tensors(name)
        )
        if of_tensors or name in _OUTWARDS or name.startswith("_"):
            return None
    return names if names.complete else None


_MODULES = {
    *(builtins, math, operator, functools, np, torch, torch.nn, torch.nn.functional, torch.special),
    *(torch.ops, torch.ops.aten),
}
"""Modules that a function may read from, if it reads what can be compared or is trusted."""

_BUILTINS = (
    "abs all any bool callable complex dict divmod enumerate filter float frozenset int isinstance len "
    "issubclass list map max min pow range reversed round set slice sorted sum tuple type zip"
)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)

_TRUSTED = {
    *(getattr(builtins, name) for name in _BUILTINS.split()),
    *(x for x in vars(builtins).values() if isinstance(x, type) and issubclass(x, BaseException)),
    *(functools.partial, functools.reduce, torch.nn.Parameter),
    *(
        x
        for module in (math, operator, torch.nn.functional, torch.special)
        for x in vars(module).values()
        if isinstance(x, _FUNCTIONS)
    ),
    *(
        x
        for name, x in vars(torch).items()
        if isinstance(x, (*_FUNCTIONS, type)) and (name in _OF_THE_KEY or _gives_tensors(name))
    ),
    *(
        x
        for x in vars(np).values()
        if isinstance(x, np.ufunc) or (isinstance(x, type) and issubclass(x, np.generic))
    ),
}
"""Functions and classes that give the same whenever they get the same."""


_NOT_KNOWN = (_Unknown, AttributeError, KeyError, RecursionError, TypeError, ValueError)
"""The errors of `_described` where a function reads what cannot be compared: a name that there is not, a
container that holds itself, what cannot be hashed, a variable without a value yet.
"""
