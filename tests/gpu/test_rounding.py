"""Attention and its gradients round no more often than their peers."""

from __future__ import annotations

import pytest
from full_cases import full_unless
from rounding import CASES, Case, assert_as_exact


@pytest.mark.parametrize("case", full_unless(lambda case: case[0] == (128, 128), CASES), ids=str)
def test_errors(case: Case) -> None:
    assert_as_exact("cuda", case, tokens=1000, seeds=4)
