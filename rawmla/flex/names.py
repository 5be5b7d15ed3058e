"""Names of the tensors that a function reads: the variables that it reads them from."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

UNNAMED = "capture"
"""The name of a tensor that no variable is found to hold."""

MAX_LOOKED_AT = 10_000
"""Objects after which the search ends: a function can reach a whole program."""


def names_of(function: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> list[str]:
    """A name for each tensor, all different: the variable, attribute or parameter that holds it, with a
    number at the end where several have the same, and `UNNAMED` where none is found.
    """
    found = _found(function, {id(tensor) for tensor in tensors})
    names: list[str] = []
    for tensor in tensors:
        name = base = found.get(id(tensor), UNNAMED)
        number = 1
        while name in names:
            number += 1
            name = f"{base}_{number}"
        names.append(name)
    return names


def _found(function: Callable[..., Any], wanted: set[int]) -> dict[int, str]:
    """The names of the tensors of these ids, nearest first."""
    found: dict[int, str] = {}
    level: list[tuple[str, Any]] = [("", function)]
    seen: dict[int, Any] = {id(function): function}  # kept: an id may be another object's later
    while level and len(found) < len(wanted) and len(seen) < MAX_LOOKED_AT:
        inner = []
        for name, x in level:
            if id(x) in wanted:
                found.setdefault(id(x), name)
                continue
            for own_name, one in _held(x):
                if id(one) not in seen:
                    seen[id(one)] = one
                    inner.append((own_name or name, one))
        level = inner
    return found


def _held(x: Any) -> Iterable[tuple[str, Any]]:
    """List what a function or another object holds, with names; "": the name of the object itself."""
    if isinstance(x, functools.partial):
        code = getattr(x.func, "__code__", None)
        names = () if code is None else code.co_varnames
        yield from x.keywords.items()
        yield from zip((*names, *[""] * len(x.args)), x.args, strict=False)
        yield "", x.func
    elif isinstance(x, types.MethodType):
        yield "", x.__self__
        yield "", x.__func__
    elif isinstance(x, types.FunctionType):
        code = x.__code__
        for name, cell in zip(code.co_freevars, x.__closure__ or (), strict=True):
            try:
                yield name, cell.cell_contents
            except ValueError:  # empty still
                continue
        arguments = code.co_varnames[: code.co_argcount]
        defaults = x.__defaults__ or ()
        yield from zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True)
        yield from (x.__kwdefaults__ or {}).items()
        yield from ((name, x.__globals__[name]) for name in code.co_names if name in x.__globals__)
    elif isinstance(x, (tuple, list)):
        yield from (("", one) for one in x)
    elif isinstance(x, dict):
        yield from ((name if isinstance(name, str) else "", one) for name, one in x.items())
    elif not isinstance(x, (types.ModuleType, type)) and hasattr(x, "__dict__"):
        yield from vars(x).items()
        if callable(x):
            yield "", x.__call__
