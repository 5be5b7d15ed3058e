"""Tables of calls that are refused. What every operation refuses is in test_refusals.py."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest

from calls.fakes import Arguments, World, change

Refusal = tuple[str, type[Exception], str, Any]
"""The argument that the text names, the exception, parts of the text, with " ... " between them, and what is
wrong: a function spoils a call, a dict changes fields of the argument, and anything else replaces it.
"""


def shapes(**new: tuple[int, ...]) -> Callable[[Arguments], None]:
    """Give arrays other shapes."""

    def apply(arguments: Arguments) -> None:
        for name, shape in new.items():
            change(name, shape=shape)(arguments)

    return apply


def each(refusals: list[Refusal]) -> pytest.MarkDecorator:
    """A test for each row of a table."""
    ids = [f"{argument}: {text}" for argument, _, text, _ in refusals]
    return pytest.mark.parametrize("refusal", refusals, ids=ids)


def check_refused(
    world: World, function: Callable[..., Any], make: Callable[[], Arguments], refusal: Refusal
) -> None:
    """Check the exception and its text, and that nothing happened before it: before a good call and after
    it, when what is known of that call could hide what differs.
    """
    argument, error, text, wrong = refusal
    for is_first in (True, False):
        world.begin_again()
        arguments = make()
        if isinstance(wrong, FunctionType):
            wrong(arguments)
        elif isinstance(wrong, dict):
            change(argument, **wrong)(arguments)
        else:
            arguments[argument] = wrong
        with pytest.raises(error) as caught:
            function(**arguments)
        message = str(caught.value)
        assert type(caught.value) is error
        assert message.startswith(f"{argument}: expected") and ", got " in message, message
        for part in text.split(" ... "):
            assert part in message, message
        assert world.untouched
        if is_first:
            function(**make())
            assert world.launched


def check_all_refused(
    world: World, function: Callable[..., Any], make: Callable[[], Arguments], refusals: list[Refusal]
) -> None:
    """Check every row of a table."""
    for refusal in refusals:
        check_refused(world, function, make, refusal)
