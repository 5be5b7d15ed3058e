"""What every operation promises of a call: which strides it takes, where it writes, what it leaves alone.
What it refuses is in test_refusals.py.
"""

from __future__ import annotations

from typing import Any

import pytest
from gpu_support import POISON_BYTE, bits, replaced_launches, torch

from operations import OPERATIONS, Operation, assert_results, for_each
from operations.core import change_arrays
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
        assert call.written or got[0].is_contiguous() == want[0].is_contiguous()


# ---- results


@for_each("cases", only=lambda operation: operation.out)
def test_out_between_canaries(operation: Operation, case: Any) -> None:
    """`out` is a slice of a larger buffer: written whole, and nothing around it."""
    call = operation.make(case)
    want = call.run()
    call.check(want)
    assert operation.out is not None
    buffer, given = between_canaries(want[0], operation.out(want[0]))
    for form in ("object", "tensors") if call.plan is not None else ("object",):
        if call.written is None:
            given.view(torch.uint8).fill_(POISON_BYTE)
        got = call.run(form, out=given)
        assert got[0] is given
        call.check(got)
        if form == "object":
            assert_results("given and fresh", call, got, want)
    fill_with_canaries(given)
    assert all_canaries(buffer), "the call wrote outside `out`"


@for_each("cases")
def test_results_are_written_whole(operation: Operation, case: Any) -> None:
    """Fresh memory is poison here (test_poison.py), so what is right was written by this call."""
    call = operation.make(case)
    for form in ("object", "tensors") if call.plan is not None else ("object",):
        call.check(call.run(form))


@for_each("cases")
def test_inputs_are_left_alone(operation: Operation, case: Any) -> None:
    call = operation.make(case)
    before = {name: change_arrays(x, torch.clone) for name, x in call.arrays().items()}
    arguments = {}
    if call.plan is not None:
        metadata, num_splits = call.make_plan("tensors")
        arguments = {"tile_scheduler_metadata": metadata, "num_splits": num_splits}
    kept = {name: x.clone() for name, x in arguments.items()}
    call.run(**arguments)
    for name, now in {**call.arrays(), **arguments}.items():
        then = {**before, **kept}[name]
        for one, other in zip(*((x if isinstance(x, list) else [x]) for x in (now, then)), strict=True):
            assert torch.equal(bits(one), bits(other)), name


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
        given = torch.empty_like(got[0])
        assert call.run(**changes, out=given)[0] is given
