"""Prefix prefill over pages, run by its kernels on the emulated device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from test_prefix_sanitizer import CASES, FEW, FP8

from kit.prefix import PrefixCase

if TYPE_CHECKING:
    from emulator import Emulator

pytest.importorskip("torch")

SOURCES: dict[str, dict[str, Any]] = {"by TMA": {}, "gathered": {"x": 16}, "fp8": FP8}


def check(case: PrefixCase) -> None:
    from emulator import cases

    cases.check("prefix", case)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_small_calls(emulator: Emulator, case: PrefixCase) -> None:
    """They reach every role and path of the kernels. Memory around o is left as it was."""
    check(case)
    assert emulator.launched


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_other_schedules(emulator: Emulator, source: dict[str, Any]) -> None:
    for emulator.seed in range(2, 6):
        check(PrefixCase(**FEW, **source))


def test_turns_without_own_keys(emulator: Emulator) -> None:
    """Lanes of the loader that look for its turn late, when the gatherer has taken the next one: these seeds
    delay them."""
    for emulator.seed in (8, 21, 24):
        emulator.launched.clear()  # their number decides the order, too
        check(PrefixCase((6, 4, 40), (-2, -4, -1), x=16, own_cached=True, h_q=1, h_kv=1))


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_more_tiles_than_sms(emulator: Emulator, source: dict[str, Any]) -> None:
    """Tiles that a CTA takes one after the other, from the counter."""
    check(PrefixCase((5, 1, 3) * 5, (40, 0, 130) * 5, h_q=1, h_kv=1, **source))
