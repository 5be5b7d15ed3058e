"""What every operation promises of a call: which strides it takes, where it writes, what it leaves alone.
What it refuses is in test_refusals.py.
"""

from __future__ import annotations

from typing import Any

import pytest
from gpu_support import bits, poison_or_fresh, replaced_launches, torch

from operations import OPERATIONS, Operation, assert_results, for_each
from operations.memory import all_canaries, between_canaries, fill_with_canaries, strided

# ---- strides

STRIDES = [
    (operation, case, name, kind)
    for operation in OPERATIONS
    for case in operation.cases
    for name, kinds in operation.strides.items()
    if not name.startswith("extra") or case.extra_topk
    for kind in kinds
]


@pytest.mark.parametrize(
    ("operation", "case", "name", "kind"),
    STRIDES,
    ids=[f"{operation.name}-{name}-{kind}-{case.id}" for operation, case, name, kind in STRIDES],
)
def test_strides(operation: Operation, case: Any, name: str, kind: str) -> None:
    """The same values behind other strides, between what nobody may read, give the same bits."""
    call = operation.make(case)
    value = call.arguments[name]
    want = call.run()
    call.check(want)
    if isinstance(value, list):
        ways = [list(way) for way in zip(*(strided(x, kind) for x in value), strict=True)]
    else:
        ways = strided(value, kind)
    assert ways
    for number, way in enumerate(ways):
        got = call.run(**{name: way})
        assert_results(f"{name}, {kind}, number {number}", call, got, want)
        if not operation.writes and name != operation.ordered_like:
            assert got[0].is_contiguous() == want[0].is_contiguous()


# ---- results


@for_each("cases", only=lambda operation: operation.out)
def test_outputs_between_canaries(operation: Operation, case: Any) -> None:
    """Outputs are slices of larger buffers: written whole, and nothing around them."""
    call = operation.make(case)
    want = call.run()
    call.check(want)
    assert operation.out is not None
    pairs = [between_canaries(x, operation.out(x)) for _, x in zip(operation.outputs, want, strict=False)]
    outputs = dict(zip(operation.outputs, (given for _, given in pairs), strict=True))
    for form in call.forms():
        for given in outputs.values():
            poison_or_fresh(call, given)
        got = call.run(form, **outputs)
        assert all(one is given for one, given in zip(got, outputs.values(), strict=False))
        call.check(got)
        if form == "object":
            assert_results("given and fresh", call, got, want)
    for buffer, given in pairs:
        fill_with_canaries(given)
        assert all_canaries(buffer), "the call wrote outside an output"


@for_each("cases")
def test_results_are_written_whole(operation: Operation, case: Any) -> None:
    """Fresh memory is poison here (test_poison.py), so what is right was written by this call."""
    call = operation.make(case)
    for form in call.forms():
        call.check(call.run(form))


@for_each("cases")
def test_inputs_are_left_alone(operation: Operation, case: Any) -> None:
    call = operation.make(case)
    plan: dict[str, Any] = {}
    if call.plan is not None:
        plan["tile_scheduler_metadata"], plan["num_splits"] = call.make_plan("tensors")
    arrays = [*call.all_arrays(), *plan.values()]
    before = [x.clone() for x in arrays]
    call.run(**plan)
    for number, (one, other) in enumerate(zip(arrays, before, strict=True)):
        assert torch.equal(bits(one), bits(other)), f"array {number} of the call was changed"


EMPTY = [
    (operation, case, name)
    for operation in OPERATIONS
    for case in operation.cases
    for name in operation.empty
]


@pytest.mark.parametrize(
    ("operation", "case", "name"),
    EMPTY,
    ids=[f"{operation.name}-{name}-{case.id}" for operation, case, name in EMPTY],
)
def test_nothing_to_compute(operation: Operation, case: Any, name: str) -> None:
    """Results of the right shape, and nothing is launched; what is written in place stays as it was."""
    call = operation.make(case)
    full = call.run()
    target = call.target()
    change, empty_axes = operation.empty[name]
    changes = {**target, **change({**call.arguments, **target})}
    before = None if call.written is None else changes[call.written].clone()

    def launched() -> None:
        raise AssertionError("a call with nothing to compute launched a kernel")

    with replaced_launches(launched):
        got = call.run(**changes)
    torch.cuda.synchronize()
    for text, one, other in zip(call.results, got, full, strict=True):
        shape = [0 if axis == empty_axes.get(text) else n for axis, n in enumerate(other.shape)]
        assert list(one.shape) == shape, text
    if before is not None:
        assert torch.equal(bits(got[0]), bits(before))
        return
    for text, one, other in zip(call.results, got, full, strict=True):
        assert one.dtype == other.dtype, text
        assert one.numel() == 0 or bool((one == 0).all()), text  # counts of rows without columns
    if operation.out is not None:
        outputs = {x: torch.empty_like(one) for x, one in zip(operation.outputs, got, strict=False)}
        again = call.run(**changes, **outputs)
        assert all(one is given for one, given in zip(again, outputs.values(), strict=False))
