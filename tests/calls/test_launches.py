"""What accepted calls of every operation allocate, launch and return, and what `warmup_call` does not."""

from __future__ import annotations

from typing import Any

import torch

import rawmla
from calls.fakes import COPY, FakeFramework, World
from calls.suite import (
    all_arguments,
    all_numbers,
    arrays_of,
    change_last,
    each_case,
    each_entry,
    each_operation,
    flat,
    make_call,
    run,
    stand_in,
    stand_ins,
    tensors_of,
)
from operations import Operation
from operations.memory import between_canaries, strided
from rawmla.jit import NO_LAUNCH


@each_case
def test_arrays_and_results(world: World, operation: Operation, case: Any) -> None:
    """Every array reaches a launch, on the stream of its framework. Every result is new."""
    for form in tensors_of(operation, case).forms():
        world.begin_again()
        asked = world.framework.asked_capturing
        call = make_call(operation, case)
        results = call.run(form)
        assert len(results) == len(call.results)
        launched = all_numbers(world)
        for name, value in arrays_of(call.arguments).items():
            for x in flat(value):
                assert x.ptr in launched or x in world.framework.copied, name
        for result in results:
            assert result.ptr in launched and (call.written or result.framework is world.framework)
        assert {launch["stream"] for launch in world.launched} == {0x51}
        assert world.framework.asked_capturing - asked == len(world.loaded)
        for launch in world.launched:
            assert "capturing" not in launch or launch["capturing"]() is False


@each_operation
def test_other_device(world: World, operation: Operation) -> None:
    make_call(operation, change=lambda x: x.but(device=1)).run()
    assert {launch["stream"] for launch in world.launched} == {0x52}
    assert {launch["device"] for launch in world.launched if "device" in launch} <= {1}
    assert {x.device for x in world.framework.allocated} <= {1}


@each_operation
def test_another_framework_on_the_same_stream(world: World, operation: Operation) -> None:
    """Results are of the framework of the first array."""
    for name, value in arrays_of(all_arguments(operation)).items():
        other = FakeFramework("other")
        given = change_last(value, lambda x, other=other: x.but(framework=other))
        world.begin_again()
        run(operation, {**all_arguments(operation), name: given})
        assert world.launched and not (other.allocated and world.framework.allocated)


@each_entry("strides", "name")
def test_strides(world: World, operation: Operation, name: str) -> None:
    """Arrays are taken as they are. Those that no kernel can walk are copied, again in every call."""
    (*_, tensor) = flat(tensors_of(operation).arguments[name])
    for kind in operation.strides[name]:
        for target in strided(tensor, kind):
            given = stand_in(target)
            arguments = {**all_arguments(operation)}
            arguments[name] = change_last(arguments[name], lambda x, given=given: given)
            for _ in range(2):
                world.begin_again()
                run(operation, arguments)
                launched = all_numbers(world)
                if given in world.framework.copied:
                    assert kind in ("unaligned", "odd", "transposed")
                    assert world.framework.copied.count(given) == 1
                    assert {COPY, COPY + 0x1000} & launched and given.ptr not in launched
                else:
                    assert given.ptr in launched


@each_operation
def test_given_results(world: World, operation: Operation) -> None:
    """A slice of a larger buffer is written and returned in place of a new array."""
    if operation.out is None:
        return
    new = make_call(operation).run()
    made = len(world.framework.allocated)
    for name, result in zip(operation.outputs, new, strict=False):
        like = torch.empty(result.shape, dtype=getattr(torch, result.dtype))
        _, tensor = between_canaries(like, operation.out(like))
        given = stand_in(tensor)
        world.begin_again()
        call = make_call(operation, **{name: given})
        got = call.run()
        assert got[new.index(result)] is given and given.ptr in all_numbers(world)
        assert len(world.framework.allocated) == made - (call.written is None)


@each_entry("empty", "what")
def test_nothing_to_compute(world: World, operation: Operation, what: str) -> None:
    """Nothing is launched, and a plan is not filled."""
    changes, empty = operation.empty[what]
    tensors = tensors_of(operation)
    changed = changes(tensors.arguments | tensors.target())
    for form in tensors.forms():
        call = make_call(operation, **{name: stand_ins(value) for name, value in changed.items()})
        world.begin_again()
        results = call.run(form)
        assert len(world.launched) == len(world.plans) and not world.loaded
        for name, axis in empty.items():
            if name in call.results:
                assert results[call.results.index(name)].shape[axis] == 0


@each_operation
def test_warmup_call(world: World, operation: Operation) -> None:
    """Kernels are loaded for what the call launches, and nothing else happens."""
    call = make_call(operation)
    function = getattr(rawmla, call.function)
    plan = rawmla.FlashMLASchedMeta()
    forms = [all_arguments(operation)]
    if call.plan is not None:
        forms.append(forms[0] | {"tile_scheduler_metadata": plan, "num_splits": None})
    for arguments in forms:
        world.begin_again()
        assert rawmla.warmup_call(function, **arguments) is None
        warmed = world.launched
        assert {launch["stream"] for launch in warmed} == {NO_LAUNCH}
        made = world.framework
        assert not (made.allocated or made.copied or made.filled)
        assert vars(plan) == vars(rawmla.FlashMLASchedMeta())
        world.begin_again()
        function(**arguments)
        assert {launch["stream"] for launch in world.launched} == {0x51}
        assert len(world.launched) == len(warmed)
