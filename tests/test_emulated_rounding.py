"""Attention and its gradients round no more often than their peers, on the emulated device."""

from __future__ import annotations

import pytest
from emulator import Emulator
from full_cases import full_unless
from rounding import CASES, Case, assert_as_exact

QUICK = (
    *(((128, 128), "bfloat16", "dense"), ((192, 128), "bfloat16", "dense")),
    *(((256, 256), "float16", "dense"), ((64, 64), "float16", "flex"), ((192, 128), "bfloat16", "flex")),
)


@pytest.mark.parametrize("case", full_unless(lambda case: case in QUICK, CASES), ids=str)
def test_errors(emulator: Emulator, case: Case) -> None:
    assert_as_exact("cpu", case, tokens=192, seeds=1)
