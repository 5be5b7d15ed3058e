"""Traces that are kept: reused where nothing of another kind is read, with the tensors of the very call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from rawmla.attention import memo  # noqa: E402

SCALE = 2.0


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The functions that are traced."""
    made: list[Any] = []
    original = memo.trace
    monkeypatch.setattr(memo, "_kept", type(memo._kept)())
    monkeypatch.setattr(memo, "trace", lambda *given: made.append(given[0]) or original(*given))
    return made


def biased(table: Any, factor: Any = 1.0) -> Callable[..., Any]:
    return lambda s, b, h, q, k: s + table[q] * factor


def test_other_tensors_of_the_kind(traces: list[Any]) -> None:
    first, second = torch.randn(50), torch.randn(70)
    mods = [memo.traced(biased(table), "score_mod", "cpu") for table in (first, second, first)]
    assert len(traces) == 1
    for mod, table in zip(mods, (first, second, first), strict=True):
        assert mod.captures[0].array is table
    assert mods[0].text == mods[1].text


@pytest.mark.parametrize(
    "other",
    (
        biased(torch.randn(50).half()),
        biased(torch.randn(50), 2.0),
        biased(torch.randn(50), 1),
        biased(torch.randn(50, requires_grad=True)),
        biased(torch.randn(10)),
        functools.partial(biased(torch.randn(50))),
        lambda s, b, h, q, k: s,
    ),
)
def test_other_kinds(traces: list[Any], other: Callable[..., Any]) -> None:
    memo.traced(biased(torch.randn(50)), "score_mod", "cpu")
    memo.traced(other, "score_mod", "cpu")
    assert len(traces) == 2


def test_short_dimensions_are_part_of_the_text(traces: list[Any]) -> None:
    def distance(places: Any) -> Callable[..., Any]:
        return lambda s, b, h, q, k: s - (places[q] - places[k]).abs().sum()

    mods = [memo.traced(distance(torch.randn(n, 3)), "score_mod", "cpu") for n in (100, 200)]
    assert len(traces) == 1 and mods[0].text == mods[1].text
    memo.traced(distance(torch.randn(100, 4)), "score_mod", "cpu")
    assert len(traces) == 2


def test_globals(traces: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def scaled(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s * SCALE

    for scale, count in ((2.0, 1), (2.0, 1), (3.0, 2)):
        monkeypatch.setitem(globals(), "SCALE", scale)
        (number,) = memo.traced(scaled, "score_mod", "cpu").numbers
        assert number.source == scale and len(traces) == count


def test_numbers_on_the_cpu_are_those_of_the_call(traces: list[Any]) -> None:
    first, second = torch.tensor(2.0), torch.tensor(3.0)
    for factor in (first, second):
        mod = memo.traced(biased(torch.randn(50), factor), "score_mod", "cpu")
        assert mod.numbers[0].source is factor
    assert len(traces) == 1


def test_functions_of_functions(traces: list[Any]) -> None:
    def both(*mods: Callable[..., Any]) -> Callable[..., Any]:
        return lambda s, b, h, q, k: mods[1](mods[0](s, b, h, q, k), b, h, q, k)

    for table in (torch.randn(50), torch.randn(60)):
        mod = memo.traced(both(biased(table), biased(table, 3.0)), "score_mod", "cpu")
        assert [capture.array is table for capture in mod.captures] == [True]
    assert len(traces) == 1
    tables = torch.randn(50), torch.randn(60)
    mod = memo.traced(both(biased(tables[0]), biased(tables[1], 3.0)), "score_mod", "cpu")
    assert len(mod.captures) == 2 and len(traces) == 2


def test_unknown_objects_are_traced_again(traces: list[Any]) -> None:
    class Mod:
        width = 3

        def __call__(self, b: Any, h: Any, q: Any, k: Any) -> Any:
            return q - k < self.width

    mod = Mod()
    for width in (3, 4):
        mod.width = width
        assert memo.traced(mod, "mask_mod", "cpu").numbers[0].source == width
    assert len(traces) == 2


def test_bounded(traces: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memo, "MAX_TRACES", 2)
    table = torch.randn(50)
    for factor in (1.0, 2.0, 3.0, 3.0, 1.0):
        memo.traced(biased(table, factor), "score_mod", "cpu")
    assert len(traces) == 4


class Settings:
    window = 5


def test_attributes_that_may_change_are_read_again() -> None:
    def by_class(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx - kv_idx <= Settings.window

    def by_function(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx - kv_idx <= by_function.window  # type: ignore[attr-defined]

    by_function.window = 5  # type: ignore[attr-defined]
    cases: list[tuple[Any, Any]] = [(by_class, Settings), (by_function, by_function)]
    for function, owner in cases:
        first = memo.traced(function, "mask_mod", "cpu")
        owner.window = 7
        second = memo.traced(function, "mask_mod", "cpu")
        owner.window = 5
        assert [number.source for number in first.numbers] == [5]
        assert [number.source for number in second.numbers] == [7]
