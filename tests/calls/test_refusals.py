"""What every operation refuses, before anything is allocated or launched: also after a good call, of which
kinds are remembered.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from calls.fakes import Arguments, FakeArray, FakeFramework, World, contiguous
from calls.suite import (
    HOST_OPERATIONS,
    all_arguments,
    arrays_of,
    change_last,
    each_entry,
    each_operation,
    facts,
    flat,
    in_tensors,
    make_call,
    parameters_of,
    run,
    stand_ins,
)
from operations import Operation

OTHER = FakeFramework("other", stream=0x99)


def strided(x: FakeArray) -> FakeArray:
    """Every stride twice as large."""
    return x.but(strides=tuple(2 * stride for stride in x.strides or contiguous(x.shape)))


def of_another_shape(x: FakeArray) -> FakeArray:
    """All in one dimension, nothing in one dimension, or two elements in the place of one."""
    size = math.prod(x.shape)
    return x.but(shape=(2,) if size == 1 else (0,) if len(x.shape) == 1 else (size,))


def of_more_dimensions(x: FakeArray) -> FakeArray:
    """With a last dimension of one element; of two, where one element has any shape."""
    return x.but(shape=(*x.shape, 1 if math.prod(x.shape) > 1 else 2))


# How an array is spoilt -> exception, what the text also holds, the change.
WRONG: dict[str, tuple[type[Exception], str, Callable[[FakeArray], Any]]] = {
    "a list": (TypeError, "got list", lambda x: [1.0]),
    "on the host": (ValueError, "got numpy.ndarray in CPU memory", lambda x: np.zeros(3)),
    "of another dtype": (TypeError, "dtype", lambda x: x.but(dtype="complex64")),
    "of one dimension more": (ValueError, "", of_more_dimensions),
    "of another shape": (ValueError, "shape", of_another_shape),
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


ARRAYS = [
    (operation, name)
    for operation in HOST_OPERATIONS
    for name, value in in_tensors(operation).items()
    if isinstance(value, (torch.Tensor, list))
]
each_array = pytest.mark.parametrize(
    ("operation", "name"), ARRAYS, ids=[f"{operation.name}-{name}" for operation, name in ARRAYS]
)


@pytest.mark.parametrize("wrong", WRONG)
@each_array
def test_wrong_array(world: World, operation: Operation, name: str, wrong: str) -> None:
    kind, text, change = WRONG[wrong]
    good = all_arguments(operation)
    bad = {**good, name: change_last(good[name], change)}
    has_one = math.prod(flat(good[name])[-1].shape) == 1
    if wrong == "with a strided last dimension" and (name in operation.odd_last or has_one):
        run(operation, bad)
        assert world.launched
    else:
        # A wrong extent may be found in the next array, which is compared with this one.
        patterns = {"of one dimension more": rf"\b{name}\b", "of another shape": "expected"}
        assert_refused(world, operation, patterns.get(wrong, names(name)), kind, text, bad)


ONE_SIZE = ("mha", "mha_varlen", "mha_backward", "mha_varlen_backward", "prefix", "prefix_fp8")
FREE = {("mha", "q", 1), ("mha", "v", 3), ("mha_varlen", "q", 0), ("mha_varlen", "v", 2)}


@pytest.mark.parametrize("which", ONE_SIZE)
def test_another_extent(world: World, which: str) -> None:
    """It is refused in every dimension that another array has, too."""
    (operation,) = [one for one in HOST_OPERATIONS if one.name == which]
    good = all_arguments(operation)
    results = zip(operation.outputs, make_call(operation).run(), strict=False)
    outputs = {name: x.but(framework=None, ptr=0x7000) for name, x in results}
    free = {*FREE, (which, "b_loc", 1)}
    for name, value in (arrays_of(good) | outputs).items():
        for axis, extent in enumerate(value.shape):
            if (which, name, axis) not in free:
                shape = (*value.shape[:axis], extent + 8, *value.shape[axis + 1 :])
                bad = {**good, name: value.but(shape=shape)}
                assert_refused(world, operation, "expected (a number or )?shape ", ValueError, "", bad)


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
    (default,) = [x.default for x in parameters_of(operation) if x.name == name]
    try:
        run(operation, {**all_arguments(operation), name: None})
    except (TypeError, ValueError) as error:
        assert "expected " in str(error) and world.untouched
    else:
        assert default is None and world.launched


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


@each_operation
def test_wrong_options(world: World, operation: Operation) -> None:
    good = all_arguments(operation)
    for option in parameters_of(operation):
        for kind, value in WRONG_OPTIONS.get(str(option.annotation), ()):
            bad = {**good, option.name: value}
            assert_refused(world, operation, rf"^{option.name}\b", kind, "", bad)
        if option.name in ("softmax_scale", "sm_scale"):
            for scale in INVALID_SCALES:
                bad = {**good, option.name: scale}
                assert_refused(world, operation, rf"^{option.name}: ", ValueError, "finite", bad)


SECOND_NAMES = {
    "cu_seqlens_qo": "cu_seqlens_q",
    "cu_seqlens_kv": "cu_seqlens_k",
    "max_seqlen_qo": "max_seqlen_q",
    "max_seqlen_kv": "max_seqlen_k",
    "learnable_sink": "attn_sink",
}
MHA = [operation for operation in HOST_OPERATIONS if operation.name.startswith("mha")]


@pytest.mark.parametrize("operation", MHA, ids=lambda operation: operation.name)
def test_second_names(world: World, operation: Operation) -> None:
    """The names of FlashMLA and FlashAttention mean the same, but not together."""
    good = {**all_arguments(operation), "attn_sink": FakeArray((4,), "float32", ptr=0x6000)}
    run(operation, good)
    want = facts(world)
    for alias, name in SECOND_NAMES.items():
        if alias in {parameter.name for parameter in parameters_of(operation)}:
            world.begin_again()
            run(operation, {alias if key == name else key: value for key, value in good.items()})
            assert facts(world) == want
            text = f"it or {name}, which is the same argument, got both"
            assert_refused(world, operation, f"^{alias}: ", TypeError, text, {**good, alias: good[name]})


@each_entry("bad", "bad")
def test_wrong_arguments(world: World, operation: Operation, bad: str) -> None:
    """The rows of the table, but for arrays on the CPU, which stand-ins cannot be."""
    kind, name, changes = operation.bad[bad]
    if "on the CPU" in bad:
        return
    changed = changes(in_tensors(operation))
    arguments = all_arguments(operation) | {name: stand_ins(value) for name, value in changed.items()}
    assert_refused(world, operation, rf"^{re.escape(name)}", kind, "", arguments)


def overlapping(x: FakeArray) -> FakeArray:
    """The second half of an element of the first dimension is the first half of the next."""
    first, *others = contiguous(x.shape)
    return x.but(strides=(first // 2, *others))


WRONG_OUT: dict[str, tuple[type[Exception], Callable[[FakeArray], Any]]] = {
    "a list": (TypeError, lambda x: [1.0]),
    "of another dtype": (TypeError, lambda x: x.but(dtype="float64")),
    "of another shape": (ValueError, lambda x: x.but(shape=(*x.shape[:-1], x.shape[-1] + 8))),
    "of one dimension more": (ValueError, lambda x: x.but(shape=(1, *x.shape))),
    "on another device": (ValueError, lambda x: x.but(device=1)),
    "of another stream": (ValueError, lambda x: x.but(framework=OTHER)),
    "with a strided last dimension": (ValueError, strided),
    "written at one place": (ValueError, lambda x: x.but(strides=(0, *contiguous(x.shape)[1:]))),
    "of overlapping rows": (ValueError, overlapping),
}


@pytest.mark.parametrize("wrong", WRONG_OUT)
@each_operation
def test_wrong_out(world: World, operation: Operation, wrong: str) -> None:
    kind, change = WRONG_OUT[wrong]
    if operation.out is not None:
        for name, result in zip(operation.outputs, make_call(operation).run(), strict=False):
            bad = {**all_arguments(operation), name: change(result.but(framework=None, ptr=0x7000))}
            assert_refused(world, operation, rf"^{name}: ", kind, "", bad)
