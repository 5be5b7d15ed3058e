"""What every operation refuses, before anything is allocated or launched: also after a good call, of which
kinds are remembered.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rawmla
from calls.fakes import Arguments, FakeArray, FakeFramework, World, contiguous
from calls.suite import (
    HOST_OPERATIONS,
    all_arguments,
    arrays_of,
    change_last,
    each_operation,
    in_tensors,
    make_call,
    run,
    stand_ins,
    tensors_of,
)
from operations import Operation

OTHER = FakeFramework("other", stream=0x99)


def strided(x: FakeArray) -> FakeArray:
    """Every stride twice as large."""
    return x.but(strides=tuple(2 * stride for stride in x.strides or contiguous(x.shape)))


def of_another_shape(x: FakeArray) -> FakeArray:
    """All in one dimension, or one element fewer."""
    return x.but(shape=(math.prod(x.shape),) if len(x.shape) > 1 else (x.shape[0] - 1,))


def of_another_dtype(x: FakeArray) -> FakeArray:
    """The common mistake: int64 and float32, or bfloat16 in place of float32."""
    mistakes = {"int32": "int64", "int64": "int16", "uint8": "int16", "float32": "bfloat16"}
    return x.but(dtype=mistakes.get(x.dtype, "float32"))


# How an array is spoilt -> exception, what the text also holds, the change.
WRONG: dict[str, tuple[type[Exception], str, Callable[[FakeArray], Any]]] = {
    "a list": (TypeError, "got list", lambda x: [1.0]),
    "on the host": (ValueError, "got numpy.ndarray in CPU memory", lambda x: np.zeros(3)),
    "of another dtype": (TypeError, "expected dtype", of_another_dtype),
    "of one dimension more": (ValueError, ", 1]", lambda x: x.but(shape=(*x.shape, 1))),
    "of another shape": (ValueError, "expected shape", of_another_shape),
    "with a strided last dimension": (ValueError, "contiguous", strided),
}
PLACES: dict[str, tuple[str, Callable[[FakeArray], Any]]] = {
    "on another device": ("on device cuda:", lambda x: x.but(device=1)),
    "of another stream": ("same current stream", lambda x: x.but(framework=OTHER)),
}
# What an option is spoilt by, by its annotation.
ARRAY = FakeArray(())
WRONG_OPTIONS: dict[str, tuple[tuple[type[Exception], Any], ...]] = {
    "bool": ((TypeError, 1), (TypeError, None), (TypeError, ARRAY)),
    "int": ((TypeError, 512.0), (TypeError, True), (TypeError, None)),
    "float": ((TypeError, True), (TypeError, "1"), (TypeError, ARRAY), (TypeError, None)),
    "float | None": ((TypeError, True), (TypeError, "1"), (TypeError, ARRAY)),
}
INVALID_SCALES = (0.0, -0.1, 1e-46, math.nan, math.inf, 1e39, 3e38, 10**400)


def assert_refused(
    world: World, operation: Operation, pattern: str, kind: type[Exception], text: str, bad: Arguments
) -> None:
    """The call raises: before a good call and after it."""
    for is_first in (True, False):
        world.begin_again()
        with pytest.raises(kind, match=pattern) as caught:
            run(operation, bad)
        message = str(caught.value)
        assert type(caught.value) is kind
        assert "expected " in message and text in message, message
        assert ", got " in message or kind is NotImplementedError, message
        assert world.untouched
        if is_first:
            run(operation, all_arguments(operation))
            assert world.launched


def names(argument: str) -> str:
    """A pattern for errors about an argument, or about one array of a list."""
    return rf"^{re.escape(argument)}(\[\d+\])?\b"


def compares(argument: str) -> str:
    """A pattern for errors about the argument, or about another one that is compared with it."""
    return rf"{names(argument)}|\b(the device of|as) {argument}\b"


ARRAYS = [(operation, name) for operation in HOST_OPERATIONS for name in arrays_of(all_arguments(operation))]
each_array = pytest.mark.parametrize(
    ("operation", "name"), ARRAYS, ids=[f"{operation.name}-{name}" for operation, name in ARRAYS]
)


@pytest.mark.parametrize("wrong", WRONG)
@each_array
def test_wrong_array(world: World, operation: Operation, name: str, wrong: str) -> None:
    kind, text, change = WRONG[wrong]
    good = all_arguments(operation)
    bad = {**good, name: change_last(good[name], change)}
    if wrong == "with a strided last dimension" and name in operation.odd_last:
        run(operation, bad)
        assert world.launched
    else:
        assert_refused(world, operation, names(name), kind, text, bad)


@pytest.mark.parametrize("wrong", PLACES)
@each_array
def test_array_of_another_place(world: World, operation: Operation, name: str, wrong: str) -> None:
    """If it is the first one, the others are elsewhere."""
    text, change = PLACES[wrong]
    good = all_arguments(operation)
    bad = {**good, name: change_last(good[name], change)}
    if len(arrays_of(good)) == 1:
        run(operation, bad)
        assert world.launched
    else:
        assert_refused(world, operation, compares(name), ValueError, text, bad)


@each_array
def test_none(world: World, operation: Operation, name: str) -> None:
    """It is refused where an array is needed, and otherwise stands for no array."""
    bad = {**all_arguments(operation), name: None}
    (default,) = [x.default for x in parameters_of(operation) if x.name == name]
    if default is inspect.Parameter.empty:
        assert_refused(world, operation, names(name), TypeError, "got NoneType", bad)
    else:
        try:
            run(operation, bad)
        except ValueError as error:  # it is one of two that are given together
            assert re.search(rf"\b{name}\b", str(error)) and world.untouched
        else:
            assert world.launched


@each_operation
def test_streams_are_checked_every_time(world: World, operation: Operation) -> None:
    """A call with an array of another framework is not accepted because the streams once were the same."""
    good = all_arguments(operation)
    if len(arrays_of(good)) > 1:
        *_, name = arrays_of(good)
        other = FakeFramework("other")
        mixed = {**good, name: change_last(good[name], lambda x: x.but(framework=other))}
        run(operation, mixed)
        assert world.launched and not other.allocated
        other.stream += 1
        world.begin_again()
        with pytest.raises(ValueError, match=compares(name)):
            run(operation, mixed)
        assert world.untouched


def parameters_of(operation: Operation) -> list[inspect.Parameter]:
    """The parameters of its function."""
    return list(inspect.signature(getattr(rawmla, tensors_of(operation).function)).parameters.values())


@each_operation
def test_wrong_options(world: World, operation: Operation) -> None:
    good = all_arguments(operation)
    for option in parameters_of(operation):
        for kind, value in WRONG_OPTIONS.get(str(option.annotation), ()):
            bad = {**good, option.name: value}
            assert_refused(world, operation, rf"^{option.name}\b", kind, "", bad)
        if "scale" in option.name:
            for scale in INVALID_SCALES:
                bad = {**good, option.name: scale}
                assert_refused(world, operation, rf"^{option.name}: ", ValueError, "finite", bad)


BAD = [
    (operation, text) for operation in HOST_OPERATIONS for text in operation.bad if "on the CPU" not in text
]


@pytest.mark.parametrize(
    ("operation", "bad"), BAD, ids=[f"{operation.name}-{text}" for operation, text in BAD]
)
def test_wrong_arguments(world: World, operation: Operation, bad: str) -> None:
    """The rows of the table."""
    kind, name, changes = operation.bad[bad]
    changed = changes(in_tensors(operation))
    arguments = all_arguments(operation) | {name: stand_ins(value) for name, value in changed.items()}
    assert_refused(world, operation, rf"^{re.escape(name)}", kind, "", arguments)


WRONG_OUT: dict[str, tuple[type[Exception], Callable[[FakeArray], Any]]] = {
    "a list": (TypeError, lambda x: [1.0]),
    "of another dtype": (TypeError, lambda x: x.but(dtype="float64")),
    "of another shape": (ValueError, lambda x: x.but(shape=(*x.shape[:-1], x.shape[-1] + 8))),
    "of one dimension more": (ValueError, lambda x: x.but(shape=(1, *x.shape))),
    "on another device": (ValueError, lambda x: x.but(device=1)),
    "of another stream": (ValueError, lambda x: x.but(framework=OTHER)),
    "with a strided last dimension": (ValueError, strided),
    "of overlapping rows": (ValueError, lambda x: x.but(strides=(0, *contiguous(x.shape)[1:]))),
    "at an odd address": (ValueError, lambda x: x.but(ptr=x.ptr + 2)),  # but for integers
}


@pytest.mark.parametrize("wrong", WRONG_OUT)
@each_operation
def test_wrong_out(world: World, operation: Operation, wrong: str) -> None:
    kind, change = WRONG_OUT[wrong]
    if operation.out is not None:
        (result, *_) = make_call(operation).run()
        if wrong == "at an odd address" and result.dtype == "int32":
            return
        given = change(result.but(framework=None, ptr=0x7000))
        bad = {**all_arguments(operation), operation.outputs[0]: given}
        assert_refused(world, operation, rf"^{operation.outputs[0]}: ", kind, "", bad)
