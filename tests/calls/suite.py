"""Calls of the table of operations, made of stand-ins: what the suites over the table share."""

from __future__ import annotations

import inspect
import struct
from collections.abc import Callable, Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import rawmla
from calls.fakes import Arguments, FakeArray, World
from operations import OPERATIONS, Operation
from operations.core import Call, change_arrays
from rawmla.call import memo

Change = Callable[[FakeArray], Any]

HOST_OPERATIONS = [
    operation
    for operation in OPERATIONS
    if operation.arrays and operation.any_framework and not operation.clusters
]
"""The entries with arrays that stand-ins can replace, without those that differ in the kernel alone."""

each_operation = pytest.mark.parametrize(
    "operation", HOST_OPERATIONS, ids=[operation.name for operation in HOST_OPERATIONS]
)
each_case = pytest.mark.parametrize(
    ("operation", "case"),
    [(operation, case) for operation in HOST_OPERATIONS for case in operation.cases],
    ids=[f"{operation.name}-{case.id}" for operation in HOST_OPERATIONS for case in operation.cases],
)


def each_entry(field: str, name: str) -> pytest.MarkDecorator:
    """A test for each entry of a dict of each operation (`bad`, `empty`, `strides`)."""
    pairs = [(operation, key) for operation in HOST_OPERATIONS for key in getattr(operation, field)]
    ids = [f"{operation.name}-{key}" for operation, key in pairs]
    return pytest.mark.parametrize(("operation", name), pairs, ids=ids)


@cache
def tensors(operation: str, case: int) -> Call:
    """The call of a case in tensors of the CPU, which only their layout is taken from."""
    (entry,) = [entry for entry in HOST_OPERATIONS if entry.name == operation]
    return entry.make(entry.cases[case], "cpu")


def tensors_of(operation: Operation, case: Any = None) -> Call:
    """The same by the case itself, which is the first if it is not given."""
    return tensors(operation.name, 0 if case is None else operation.cases.index(case))


def stand_in(x: Any) -> FakeArray:
    """A stand-in for a tensor, on the GPU."""
    dtype = str(x.dtype).removeprefix("torch.")
    return FakeArray(tuple(x.shape), dtype, tuple(x.stride()), ptr=x.data_ptr() or 0x100)


def stand_ins(value: Any, change: Change = lambda x: x) -> Any:
    """An argument with stand-ins for its tensors."""
    return change_arrays(value, lambda x: change(stand_in(x)))


def make_call(operation: Operation, case: Any = None, change: Change = lambda x: x, **given: Any) -> Call:
    """The call of a case in stand-ins, every one of them changed; ``given`` replaces arguments."""
    call = tensors_of(operation, case).mapped(lambda x: change(stand_in(x)))
    call.arguments.update(given)
    return call


@cache
def _all_tensors(operation: str, case: int) -> Arguments:
    call = tensors(operation, case)
    arguments = call.arguments | call.target()
    if call.plan is not None:
        splits = len(call.plan["cache_seqlens"]) + 1
        plan = torch.zeros(5, 8, dtype=torch.int32), torch.zeros(splits, dtype=torch.int32)
        arguments |= dict(zip(("tile_scheduler_metadata", "num_splits"), plan, strict=True))
    return arguments


def in_tensors(operation: Operation, case: Any = None) -> Arguments:
    """All that the function takes in a case: also a plan of tensors, and what it writes."""
    return dict(_all_tensors(operation.name, 0 if case is None else operation.cases.index(case)))


def all_arguments(operation: Operation, case: Any = None) -> Arguments:
    """The same in stand-ins."""
    return {name: stand_ins(value) for name, value in in_tensors(operation, case).items()}


def arrays_of(arguments: Arguments) -> Arguments:
    """The arguments that are arrays, or lists of them."""
    return {name: value for name, value in arguments.items() if isinstance(value, (FakeArray, list))}


def parameters_of(operation: Operation) -> list[inspect.Parameter]:
    """The parameters of its function."""
    return list(inspect.signature(getattr(rawmla, tensors_of(operation).function)).parameters.values())


def run(operation: Operation, arguments: Arguments) -> Any:
    """Call the function of an operation."""
    return getattr(rawmla, tensors_of(operation).function)(**arguments)


def flat(value: Any) -> list[FakeArray]:
    """An array, or the arrays of a list."""
    return value if isinstance(value, list) else [value]


def change_last(value: Any, change: Change) -> Any:
    """Change an array, or the last one of a list."""
    return [*value[:-1], change(value[-1])] if isinstance(value, list) else change(value)


def numbers(value: Any) -> Iterator[int]:
    """Every integer that a launch depends on, those in packed bytes too."""
    if isinstance(value, int):
        yield value
    elif isinstance(value, (bytes, bytearray)):
        yield from struct.unpack_from(f"<{len(value) // 8}Q", value)
    elif isinstance(value, dict):
        yield from numbers(list(value.values()))
    elif isinstance(value, SimpleNamespace):
        yield from numbers(vars(value))
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from numbers(one)


def all_numbers(world: World) -> set[int]:
    """Every integer in the launches."""
    return set(numbers(world.launched))


def facts(world: World) -> list[Arguments]:
    """The launches by what can be compared: without the functions that are made anew for every call."""
    made_anew = ("capturing", "prepared")
    return [
        {name: value for name, value in launch.items() if name not in made_anew} for launch in world.launched
    ]


def known_kinds() -> int:
    """How many kinds of call are remembered."""
    return sum(map(len, memo._shared))
