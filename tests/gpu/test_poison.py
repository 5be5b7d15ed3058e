"""The tests' own poison: what the library allocates is poison before a kernel runs, on every path."""

from __future__ import annotations

from typing import Any

import pytest
from gpu_support import assert_poison, cupy, poison, replaced_launches, torch
from test_frameworks import in_cupy

from operations import Call, Operation, assert_results, for_first
from rawmla.call.arrays import inspect
from rawmla.call.frameworks import NewArray

KINDS: tuple[tuple[NewArray, ...], ...] = (
    (((3, 5), "bfloat16"), ((2, 7), "float32")),
    (((4, 8), "int32"),),
    (((3, 5), "float16", (8, 1)), ((4, 6), "float32", (1, 4))),
)


def example(framework: str, device: int) -> Any:
    """An array, by which the library finds its framework."""
    if framework == "torch":
        return torch.zeros(1, device=f"cuda:{device}")
    with cupy.cuda.Device(device):
        return cupy.zeros(1, cupy.float32)


@pytest.mark.parametrize("place", ("current device", "another device"))
@pytest.mark.parametrize("name", ("torch", "cupy"))
def test_arrays_of_a_framework(name: str, place: str) -> None:
    """`empty`, and what `allocator` gives: arrays, with and without scratch."""
    device = 0 if place == "current device" else 1
    if device >= torch.cuda.device_count():
        pytest.skip("needs two GPUs")
    framework = inspect(example(name, device), "x").framework
    for kinds in KINDS:
        for shape, dtype, *_ in kinds:
            assert_poison(f"empty {dtype}", framework.empty(shape, dtype, device))
        for scratch_bytes in (0, 4096):
            allocate = framework.allocator(kinds, scratch_bytes, device)
            for _ in range(2):
                *arrays, scratch = allocate()
                assert [tuple(x.shape) for x in arrays] == [shape for shape, *_ in kinds]
                for array, (_, dtype, *_) in zip(arrays, kinds, strict=True):
                    assert_poison(f"allocated {dtype}", array)
                assert (scratch is None) == (not scratch_bytes)
                if scratch is not None:
                    assert_poison("scratch", scratch)


def test_without_poison_nothing_is_filled() -> None:
    """What the sanitizer's cases rely on: memory that was written before is handed out as it was."""
    framework = inspect(example("torch", 0), "x").framework
    torch.cuda.empty_cache()
    used = torch.zeros(1 << 20, dtype=torch.int32, device="cuda")
    address = used.data_ptr()
    del used
    with poison(False):
        again = framework.empty((1 << 20,), "int32", 0)
        assert again.data_ptr() == address
        assert not bool(again.any())
    assert_poison("with poison", framework.empty((1 << 20,), "int32", 0))


def fresh_results(call: Call, form: str) -> list[tuple[str, Any]]:
    """What one call allocates: its results and its plan."""
    plan = {}
    found = []
    if call.plan is not None:
        metadata, num_splits = call.make_plan(form)
        plan = {"tile_scheduler_metadata": metadata, "num_splits": num_splits}
        found += list(plan.items()) if form == "tensors" else []
    found += list(zip(call.results, call.run(**plan), strict=True))
    if form == "object" and call.plan is not None:
        metadata = plan["tile_scheduler_metadata"]
        found += [("rows", metadata.tile_scheduler_metadata), ("num_splits", metadata.num_splits)]
    return found


@pytest.mark.parametrize("framework", ("torch", "cupy"))
@for_first(only=lambda operation: not operation.writes)
def test_results_and_plans_of_calls(operation: Operation, case: Any, framework: str) -> None:
    """Without their kernels, calls give poison: those that are prepared anew, and those that were before."""
    call = operation.make(case)
    if framework == "cupy" and operation.any_framework:
        call = in_cupy(call)
    with replaced_launches(lambda: None):
        for form in call.forms():
            for _ in range(2):
                for name, array in fresh_results(call, form):
                    assert_poison(f"{name}, {form}", array)


@for_first(only=lambda operation: not operation.writes)
def test_results_in_a_capture(operation: Operation, case: Any) -> None:
    """The poison is part of the graph: a replay fills the results again before its kernels run."""
    call = operation.make(case)
    graph = torch.cuda.CUDAGraph()
    with replaced_launches(lambda: None):
        call.run()
        with torch.cuda.graph(graph):
            found = fresh_results(call, "object")
    for _, array in found:
        array.zero_()
    graph.replay()
    for name, array in found:
        assert_poison(name, array)


@for_first()
def test_the_same_bits_without_poison(operation: Operation, case: Any) -> None:
    call = operation.make(case)
    want = call.run()
    with poison(False):
        got = call.run()
    assert_results("without poison", call, got, want)
