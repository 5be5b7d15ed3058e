"""Cases that only `pytest --full` runs; tests/conftest.py has the option."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def full_unless(is_quick: Callable[[Any], bool], cases: Iterable[Any]) -> list[Any]:
    """Values of a parameter for `pytest.mark.parametrize`: every run has the quick ones, `pytest --full` all.

    docs/checks.md says which test keeps a class of defects where cases are left out.
    """
    return [case if is_quick(case) else pytest.param(case, marks=pytest.mark.full) for case in cases]
