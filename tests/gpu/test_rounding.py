"""Attention and its gradients round no more often than their peers."""

from __future__ import annotations

import pytest
from rounding import CASES, Case, assert_as_exact


@pytest.mark.parametrize("case", CASES, ids=str)
def test_errors(case: Case) -> None:
    assert_as_exact("cuda", case, tokens=1000, seeds=4)
