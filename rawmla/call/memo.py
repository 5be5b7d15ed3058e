"""Tables that are kept from call to call, so that a call which was seen before costs little host time.

A model repeats a few kinds of call. The first call of a kind is checked, its kernels are loaded and its
parameters are worked out. The next call of the kind finds them by a key of shapes, strides and dtypes.
"""

from __future__ import annotations

from typing import Any, TypeVar

from .frameworks import Fields

Value = TypeVar("Value")

MAX_ENTRIES = 1024
"""The most entries of a `Memo`: enough for every kind of call of a program, and few enough to bound what it
keeps alive.
"""

_shared: list[Memo[Any]] = []


class Memo(dict[Any, Value]):
    """A table of at most `MAX_ENTRIES` entries, which callers look up with `get`.

    A full table is emptied, which costs a later call some microseconds. `clear_all` empties a table that was
    made with `shared=True`.
    """

    def __init__(self, *, shared: bool = False) -> None:
        super().__init__()
        if shared:
            _shared.append(self)

    def keep(self, key: Any, value: Value) -> Value:
        """Remember `value`, and return it."""
        if len(self) >= MAX_ENTRIES:
            self.clear()
        self[key] = value
        return value


def clear_all() -> None:
    """Forget every kind of call, and what their launches keep alive. Results do not change."""
    for memo in _shared:
        memo.clear()


def kind_of(view: Fields | None) -> tuple[Any, ...] | None:
    """List what checks of an optional array depend on: its view, but the alignment alone of its address."""
    return view and (view[0] & 15, view[1:6])
