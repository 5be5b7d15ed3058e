"""Lengths, tables and indices of any values, on the emulated device: nothing outside of the arrays is read or
written, and all calls end. The arrays of a call lie beside pages without access.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("torch")

from emulator import Emulator  # noqa: E402
from emulator.guards import Guards, failure_in_child  # noqa: E402
from test_lengths_sanitizer import OPERATIONS, Calls, Place, split_calls  # noqa: E402


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_nothing_outside_is_touched(emulator: Emulator, operation: Callable[[Place], Calls]) -> None:
    if operation is split_calls:
        emulator.sm_count = 16  # enough multiprocessors that keys are split
    guards = Guards()
    with guards.of_library():
        calls = operation(guards.place)
        failure = failure_in_child({**calls, "then": guards.check}, seconds=60)
    assert not failure, failure
