"""The small cases of the table of operations, run by their kernels on the emulated device: they reach every
role and path of a kernel. Further cases are for what depends on the order in which threads run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

from full_cases import full_unless  # noqa: E402
from gpu_support import forced_clusters, united_selections  # noqa: E402

import rawmla  # noqa: E402
from kit import SparseCase  # noqa: E402
from kit.flex import FlexCase  # noqa: E402
from kit.mha import MhaCase, make_mha_inputs  # noqa: E402
from kit.prefix import PrefixCase  # noqa: E402
from operations import OPERATIONS, Call, Operation  # noqa: E402
from operations.dense import dense_call, make_dense_call  # noqa: E402
from operations.dense_backward import BackwardCase, make_dense_backward_call  # noqa: E402
from operations.flex import make_mask_call, make_traced_call  # noqa: E402
from operations.flex_backward import make_flex_backward_call  # noqa: E402
from operations.memory import all_canaries, between_canaries, fill_with_canaries  # noqa: E402
from operations.mla_prefill import BF16, make_prefill_call  # noqa: E402
from operations.prefix import FEW, FP8_KIND, WITHOUT_OWN, make_prefix_call  # noqa: E402

if TYPE_CHECKING:
    from emulator import Emulator

SEEDS = range(2, 6)


def labels_alone(emulator: Emulator) -> Any:
    """Inside, launches are noted and kernels do not run."""
    return mock.patch.object(emulator, "run", lambda spec, *_: emulator.launched.append(spec.label))


def names(emulator: Emulator) -> list[str]:
    """Names of the kernels that ran."""
    return [label.partition("[")[0] for label in emulator.launched]


@pytest.fixture
def clusters(request: pytest.FixtureRequest) -> Iterator[None]:
    """Calls go to the kernel for clusters if the operation says so."""
    with forced_clusters() if request.getfixturevalue("operation").clusters else nullcontext():
        yield


def checked(emulator: Emulator, call: Call, operation: Operation | None = None) -> None:
    """Make a call, into slices of larger buffers if the operation takes some, and check its results."""
    outputs, pairs = {}, []
    if operation is not None and operation.out is not None:
        with labels_alone(emulator):
            results = call.run()
        for name, result in zip(operation.outputs, results, strict=False):
            pairs.append(between_canaries(result, operation.out(result)))
            outputs[name] = pairs[-1][1].copy_(result)
    emulator.launched.clear()
    call.check(call.run(**outputs))
    for buffer, given in pairs:
        fill_with_canaries(given)
        assert all_canaries(buffer), "the call wrote outside an output"


# ---- small cases

SMALL = [(operation, case) for operation in OPERATIONS for case in operation.small_cases or operation.cases]


def is_quick(pair: tuple[Operation, Any]) -> bool:
    """Of the gradients of dense attention in any and in a fixed order, one by turns; two thirds of those of
    flex attention.
    """
    operation, case = pair
    number = operation.small_cases.index(case) if case in operation.small_cases else 0
    if operation.name.startswith("flex_backward"):
        return number % 3 != (2 if operation.any_framework else 0)
    twin = replace(case, deterministic=not case.deterministic) if isinstance(case, BackwardCase) else None
    return twin not in operation.small_cases or number % 4 in (0, 3)


@pytest.mark.usefixtures("clusters")
@pytest.mark.parametrize(
    ("operation", "case"),
    [
        pytest.param(*pair, id=f"{pair[0].name}-{pair[1].id}", marks=[] if is_quick(pair) else pytest.mark.full)
        for pair in SMALL
    ],
)
def test_small_case(emulator: Emulator, operation: Operation, case: Any) -> None:
    checked(emulator, operation.make(case, "cpu"), operation)
    assert any(label.startswith(operation.kernels) for label in emulator.launched), emulator.launched


@pytest.mark.usefixtures("clusters")
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_small_cases_reach_all_kernels(emulator: Emulator, operation: Operation) -> None:
    assert operation.kernels
    with labels_alone(emulator):
        for case in operation.small_cases or operation.cases:
            operation.make(case, "cpu").run()
    for kernel in operation.kernels:
        assert any(label.startswith(kernel) for label in emulator.launched), kernel
