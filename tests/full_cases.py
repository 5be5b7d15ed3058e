"""Cases that only `pytest --full` runs; tests/conftest.py has the option."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def full_unless(is_quick: Callable[[Any], bool], cases: Iterable[Any], *, several: bool = False) -> list[Any]:
    """Values of a parameter for `pytest.mark.parametrize`: every run has the quick ones, `pytest --full` all.
    With `several`, a case has the values of several parameters.

    docs/checks.md says which test keeps a class of defects where cases are left out.
    """
    return [
        case if is_quick(case) else pytest.param(*(case if several else (case,)), marks=pytest.mark.full)
        for case in cases
    ]
