"""The same call gives the same bits; batch-invariant calls whatever else is in the batch."""

from __future__ import annotations

import random
from typing import Any

import pytest
from gpu_support import bits, torch

from operations import Operation, assert_results, for_each, is_planned

RERUNS = 20
TOGETHER = 10  # calls in flight between two comparisons


@pytest.mark.parametrize("form", ("object", "tensors"))
@for_each("rerun_cases", only=is_planned)
def test_reruns_of_planned_calls(operation: Operation, case: Any, form: str) -> None:
    """Each with a plan of its own."""
    call = operation.make(case)
    want = call.run(form)
    for run in range(RERUNS):
        assert_results(f"run {run}", call, call.run(form), want)
    call.check(want)


@for_each("rerun_cases", only=lambda operation: not is_planned(operation))
def test_reruns(operation: Operation, case: Any) -> None:
    call = operation.make(case)
    want = call.run()
    for run in range(RERUNS):
        assert_results(f"run {run}", call, call.run(), want)
    call.check(want)


@pytest.mark.unpoisoned
@for_each("rerun_cases")
def test_reruns_back_to_back(operation: Operation, case: Any) -> None:
    """Calls in flight at once, as a model's layers make them; scratch of one is that of the next. Their bits
    are compared on the device. Without poison, whose fills would keep the launches from overlapping.
    """
    call = operation.make(case)
    plan = {}
    if call.plan is not None:
        plan["tile_scheduler_metadata"], plan["num_splits"] = call.make_plan()
    first = call.run(**plan)
    call.check(first)
    ordered = [i for i, name in enumerate(call.results) if name not in call.unordered]
    wanted = [bits(first[i]) for i in ordered]
    targets = [call.target() for _ in range(TOGETHER)]
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for turn in range(operation.repeats // TOGETHER):
        given = plan if turn % 2 == 0 else {}  # without a plan, each call makes one
        for results in [call.run(**given, **target) for target in targets]:
            for i, want in zip(ordered, wanted, strict=True):
                different += (bits(results[i]) != want).any()
        for target in targets:
            for name, one in call.target().items():
                target[name].copy_(one)
    assert int(different) == 0, f"{int(different)} results of {operation.repeats} calls differ"


@pytest.mark.parametrize("form", ("object", "tensors"))
@for_each("invariant_cases", only=is_planned)
def test_batch_invariance(operation: Operation, case: Any, form: str) -> None:
    """Alone, in batches of 2 to all, in any position and company, a request keeps its bits."""
    call = operation.make(case)
    whole = call.run(form, invariant=True)
    call.check(whole)

    draw = random.Random(3)
    everyone = list(range(case.b))
    lengths = getattr(call.inputs, "lengths", None) or call.inputs.topk_length.tolist()
    longest = max(everyone, key=lengths.__getitem__)
    shortest = min(everyone, key=lengths.__getitem__)
    batches = [[i] for i in {0, case.b - 1, longest, shortest, *draw.sample(everyone, 4)}]
    batches += [[longest] * 3, [longest, shortest], [shortest, longest, shortest]]
    batches += [draw.sample(everyone, size) for size in (2, 3, 5, 8, case.b // 2, case.b)]
    batches += [draw.choices(everyone, k=256), list(reversed(everyone))]
    assert operation.part is not None
    for requests in batches:
        got = operation.part(call, requests).run(form, invariant=True)
        assert_results(f"batch of {len(requests)}", call, got, tuple(x[requests] for x in whole))
