"""The tests' own poison: what the library allocates is poison before a kernel runs, on every path."""

from __future__ import annotations

from typing import Any

from gpu_support import assert_poison, replaced_launches, to_cupy, torch

from operations import Call, Operation, for_first


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


@for_first(only=lambda operation: not operation.writes)
def test_results_and_plans_of_calls(operation: Operation, case: Any) -> None:
    """Without their kernels, calls give poison: those that are prepared anew, those that were before, and
    those in a graph, whose replay fills the results again.
    """
    call = operation.make(case)
    calls = [call, *([call.mapped(to_cupy)] if operation.any_framework else [])]
    graph = torch.cuda.CUDAGraph()
    with replaced_launches(lambda: None):
        for one in calls:
            for form in one.forms():
                for _ in range(2):
                    for name, array in fresh_results(one, form):
                        assert_poison(f"{name}, {form}", array)
        with torch.cuda.graph(graph):
            found = fresh_results(call, "object")
    for _, array in found:
        array.zero_()
    graph.replay()
    for name, array in found:
        assert_poison(f"{name}, replayed", array)
