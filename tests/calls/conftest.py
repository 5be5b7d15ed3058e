"""The world of stand-ins that every test here runs in."""

from __future__ import annotations

import pytest

from calls.fakes import World, make_world


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """Stand-ins for arrays, launches and the device, for the length of the test."""
    return make_world(monkeypatch)
