"""What accepted calls of every operation allocate, launch and return."""

from __future__ import annotations

from typing import Any

import pytest
from calls.fakes import FakeArray, FakeFramework, World, contiguous
from calls.suite import (
    HOST_OPERATIONS,
    all_arguments,
    all_numbers,
    arrays_of,
    change_last,
    each_case,
    each_operation,
    make_call,
    run,
    stand_in,
    tensors_of,
)
from operations import Operation
from operations.memory import padded_shape, strided

import rawmla
from rawmla.jit import NO_LAUNCH


def addresses_of(value: Any) -> list[int]:
    """The address of an array, or those of a list."""
    return [x.ptr for x in (value if isinstance(value, list) else [value])]


@each_case
def test_arrays_and_results(world: World, operation: Operation, case: Any) -> None:
    """Every array reaches a launch, on the stream of its framework; every result is new."""
    for form in tensors_of(operation, case).forms():
        world.begin_again()
        call = make_call(operation, case)
        results = call.run(form)
        assert len(results) == len(call.results)
        launched = all_numbers(world)
        for name, value in call.arrays().items():
            assert not isinstance(value, FakeArray) or value in world.framework.copied or value.ptr in launched
            assert launched.issuperset(addresses_of(value)) or value in world.framework.copied, name
        made = world.framework.allocated
        for result in results:
            assert result.ptr in launched and (result in made or call.written or result.index is not None)
        assert {launch["stream"] for launch in world.launched} == {0x51}
        assert world.framework.asked_capturing == 0


@each_operation
def test_other_device(world: World, operation: Operation) -> None:
    make_call(operation, change=lambda x: x.but(device=1)).run()
    assert {launch["stream"] for launch in world.launched} == {0x52}
    assert {launch["device"] for launch in world.launched if "device" in launch} <= {1}
    assert {x.device for x in world.framework.allocated} <= {1}
