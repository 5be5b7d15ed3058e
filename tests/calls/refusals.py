"""Calls that are refused: rows of a table, the rows that every array has, and the checks of a row."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

from calls.fakes import Arguments, FakeArray, FakeFramework, World, change, put

Refusal = tuple[str, type[Exception], str, Callable[[Arguments], Any]]
"""The argument that the text names, the exception, parts of the text, with " ... " between them, and what
spoils a call.
"""

OTHER = FakeFramework("other", stream=0x99)


def shapes(**new: tuple[int, ...]) -> Callable[[Arguments], None]:
    """Give arrays other shapes."""

    def apply(arguments: Arguments) -> None:
        for name, shape in new.items():
            change(name, shape=shape)(arguments)

    return apply


def of_every_array(arguments: Arguments, first: str, optional: Iterable[str] = ()) -> list[Refusal]:
    """Rows for each array of a call; others must be where `first` is."""
    rows: list[Refusal] = []
    for name, array in arguments.items():
        if not isinstance(array, FakeArray):
            continue
        rows.append((name, TypeError, "got list", put(name, [1])))
        rows.append((name, ValueError, "CUDA memory ... numpy.ndarray", put(name, np.zeros((1, 1, 1, 8)))))
        if name not in optional:
            rows.append((name, TypeError, "got NoneType", put(name, None)))
        if name != first:
            rows.append((name, ValueError, f"cuda:0 ... of {first} ... cuda:1", change(name, device=1)))
            streams = "fake array ... 0x51 ... other array ... 0x99"
            rows.append((name, ValueError, streams, change(name, framework=OTHER)))
    return rows


def ids_of(refusals: list[Refusal]) -> list[str]:
    return [f"{argument}: {text}" for argument, _, text, _ in refusals]


def check_refused(world: World, function: Callable[..., Any], arguments: Arguments, refusal: Refusal) -> None:
    """Check the exception and its text, and that nothing happened before it."""
    argument, error, text, spoil = refusal
    spoil(arguments)
    with pytest.raises(error) as caught:
        function(**arguments)
    message = str(caught.value)
    assert type(caught.value) is error
    assert message.startswith(f"{argument}: expected ") and ", got " in message
    for part in text.split(" ... "):
        assert part in message
    assert world.untouched


def check_refused_later(
    world: World, function: Callable[..., Any], of: Callable[[], Arguments], refusals: list[Refusal]
) -> None:
    """Check that what is known of an accepted call hides none of the refusals."""
    function(**of())
    made = len(world.framework.allocated)
    for _, error, _, spoil in refusals:
        arguments = of()
        spoil(arguments)
        with pytest.raises(error):
            function(**arguments)
    assert len(world.framework.allocated) == made
