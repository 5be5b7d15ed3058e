"""Lengths, tables and indices of any values, on the emulated device: nothing outside of the arrays is read or
written, and all calls end. The arrays of a call lie beside pages without access.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("torch")

import torch  # noqa: E402
from emulator import Emulator  # noqa: E402
from emulator.guards import Guards, failure_in_child  # noqa: E402
from test_lengths_sanitizer import OPERATIONS, Calls, Place, split_calls  # noqa: E402

import rawmla  # noqa: E402


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_nothing_outside_is_touched(emulator: Emulator, operation: Callable[[Place], Calls]) -> None:
    if operation is split_calls:
        emulator.sm_count = 16  # enough multiprocessors that keys are split
    guards = Guards()
    with guards.of_library():
        calls = operation(guards.place)
        failure = failure_in_child({**calls, "then": guards.check}, seconds=60)
    assert not failure, failure


def test_positions_that_end_in_zeros(emulator: Emulator) -> None:
    """As vLLM's graphs of vision encoders have them. Keys are split, and the requests before are right."""
    emulator.sm_count = 40
    random = torch.Generator().manual_seed(5)
    q, k, v = torch.randn((3, 1100, 1, 64), generator=random).half()
    positions = torch.tensor([0, 300, 1100, 0, 0], dtype=torch.int32)
    out, lse = rawmla.flash_attn_varlen_func(q, k, v, positions, positions, 1100, 1100)
    assert any("mha_combine" in label for label in emulator.launched)
    for begin, end in ((0, 300), (300, 1100)):
        scores = q[begin:end, 0].double() @ k[begin:end, 0].double().T / 8
        want = scores.softmax(1) @ v[begin:end, 0].double()
        torch.testing.assert_close(out[begin:end, 0].double(), want, atol=2e-3, rtol=0)
        torch.testing.assert_close(lse[begin:end, 0].double(), scores.logsumexp(1), atol=1e-3, rtol=0)
