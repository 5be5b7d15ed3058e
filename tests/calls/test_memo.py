"""What is remembered of calls: a known kind is not checked again, and no call is taken for another."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from calls.fakes import Arguments, FakeArray, World, contiguous
from calls.suite import (
    all_arguments,
    all_numbers,
    arrays_of,
    change_last,
    each_operation,
    facts,
    flat,
    known_kinds,
    parameters_of,
    run,
    stand_in,
    tensors_of,
)
from operations import Operation
from operations.memory import strided
from rawmla.call import memo

MOVED = 1 << 50  # past every address of the host


def moved(value: Any) -> Any:
    """An argument of the same kind at another address."""
    if isinstance(value, list):
        return list(map(moved, value))
    return value.but(ptr=value.ptr + MOVED) if isinstance(value, FakeArray) else value


@each_operation
def test_layers_share_what_is_known(world: World, operation: Operation) -> None:
    """A call with arrays at other addresses is launched with these, and nothing new is remembered."""
    given = all_arguments(operation)
    run(operation, given)
    kinds = known_kinds()
    world.begin_again()
    run(operation, {name: moved(value) for name, value in given.items()})
    assert known_kinds() == kinds
    launched = all_numbers(world)
    for name, value in arrays_of(given).items():
        for x in flat(value):
            assert x.ptr + MOVED in launched and x.ptr not in launched, name


OPTIONS: dict[str, tuple[Any, ...]] = {
    "bool": (True, False),
    "float": (0.5, np.float64(0)),
    "float | None": (0.125, np.float32(0.5)),
    "int": (3, np.int64(0)),
    "str": ("e",),
}
"""Values that options are given, by their annotation."""


def shorter(x: FakeArray, axis: int) -> FakeArray:
    """A slice without the last element along an axis, in the same strides."""
    shape = list(x.shape)
    shape[axis] = max(shape[axis] - 1, 0)
    return x.but(shape=tuple(shape), strides=x.strides or contiguous(x.shape))


def others(operation: Operation) -> Iterator[tuple[str, Arguments]]:
    """Calls that differ in an argument, or in all."""
    given = all_arguments(operation)
    for case in operation.cases[1:]:
        yield case.id, all_arguments(operation, case)
    for name, kinds in operation.strides.items():
        (*_, tensor) = flat(tensors_of(operation).arguments[name])
        for kind in kinds:
            other = stand_in(strided(tensor, kind)[0])
            yield f"{name} {kind}", {**given, name: change_last(given[name], lambda x, other=other: other)}
    for name, value in arrays_of(given).items():
        yield f"{name} off 16 bytes", {**given, name: change_last(value, lambda x: x.but(ptr=x.ptr + 2))}
        for axis in range(len(flat(value)[-1].shape)):
            less = change_last(value, partial(shorter, axis=axis))
            yield f"{name} shorter in {axis}", {**given, name: less}
    for option in parameters_of(operation):
        for value in OPTIONS.get(str(option.annotation), ()):
            yield f"{option.name} {value}", {**given, option.name: value}
        if option.default is None:
            yield f"{option.name} None", {**given, option.name: None}


@each_operation
def test_what_differs_is_not_mistaken(
    world: World, operation: Operation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call launches, or refuses, the same when it or another one is known as when none is. Few are
    remembered.
    """
    monkeypatch.setattr(memo, "MAX_ENTRIES", 2)

    def outcome(arguments: Arguments) -> Any:
        world.begin_again()
        try:
            run(operation, arguments)
        except (TypeError, ValueError, NotImplementedError) as error:
            assert world.untouched
            return str(error)
        assert max(map(len, memo._shared)) <= 2
        return facts(world)

    given = all_arguments(operation)
    first, differ = outcome(given), 0
    for text, arguments in others(operation):
        after_another = outcome(arguments)
        assert outcome(arguments) == after_another, text
        assert outcome(given) == first, text
        memo.clear_all()
        assert outcome(arguments) == after_another, text
        assert outcome(given) == first, text
        differ += after_another != first
    assert differ
