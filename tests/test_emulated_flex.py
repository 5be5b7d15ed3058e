"""Flex attention with functions of Python and CUDA text, and the kernels that make block masks, on the
emulated device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from test_flex_sanitizer import CASES

from kit.flex import FlexCase

if TYPE_CHECKING:
    from emulator import Emulator

pytest.importorskip("torch")

MASKED = [case for case in CASES if case.mask]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_traced_functions(emulator: Emulator, case: FlexCase) -> None:
    from emulator import cases

    cases.check("flex", case)
    assert emulator.launched


@pytest.mark.parametrize("case", CASES[1:4], ids=lambda case: case.id)
def test_cuda_text(emulator: Emulator, case: FlexCase) -> None:
    from emulator import cases

    cases.check("flex", case, form="cuda")


def test_other_schedules(emulator: Emulator) -> None:
    from emulator import cases

    for emulator.seed in range(2, 6):
        cases.check("flex", CASES[2])


@pytest.mark.parametrize("case", MASKED, ids=lambda case: case.id)
def test_block_masks(emulator: Emulator, case: FlexCase) -> None:
    from emulator import cases

    cases.check_block_mask(case, "cuda" if case is MASKED[0] else "python")
    names = {label.partition("[")[0] for label in emulator.launched}
    assert names == {"block_mask_states", "block_mask_lists"}
