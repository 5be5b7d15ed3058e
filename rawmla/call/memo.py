"""Tables that are kept from call to call, so that a call which was seen before costs little host time.

A model repeats a few kinds of call. The first call of a kind is checked, its kernels are loaded and its
parameters are worked out. The next call of the kind finds them by a key of shapes, strides and dtypes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, Generic, TypeVar

from .frameworks import Fields

Value = TypeVar("Value")
Check = Callable[[Sequence[Any]], bool]
"""Says whether arrays are such as one was made of: see `Framework.kind_check`."""

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
        if len(self) >= MAX_ENTRIES and key not in self:
            self.clear()
        self[key] = value
        return value


class Kind(Generic[Value]):
    """One kind of call, and what is kept of it.

    A program repeats a kind for each layer. So `addresses` checks whether arrays are of this kind before
    anybody reads them, by a function that `check` makes. A kind never changes: threads share it.
    """

    __slots__ = ("_alignments", "_given", "_spread", "call", "device", "framework")

    def __init__(self, views: Sequence[Fields | None], call: Value) -> None:
        """``views`` are of the arrays, two or more, None where there is none; ``call`` is what is kept."""
        self.call = call
        given = [view for view in views if view is not None]
        _, _, _, _, self.device, self.framework, _ = given[0]
        places = [place for place, view in enumerate(views) if view is not None]
        self._given = itemgetter(*places)
        # A 0 follows the addresses of the given arrays: this takes it for every array that is not given.
        own = {place: number for number, place in enumerate(places)}
        self._spread = itemgetter(*[own.get(place, len(places)) for place in range(len(views))])
        self._alignments = [view[0] & 15 for view in given]

    def check(self, views: Sequence[Fields | None]) -> Check | None:
        """Make a check for `addresses` from arrays of this kind; None where there is no check of them.

        It says no of arrays that come in another mode of torch, such as inference mode.
        """
        given = self._given(views)
        if all([view[0] and view[5] is self.framework for view in given]):
            return self.framework.kind_check([view[6] for view in given])
        return None

    def addresses(self, arrays: Sequence[Any], is_kind: Check) -> Sequence[int] | None:
        """Return the addresses of arrays, with 0 for None; None if the arrays may be of another kind.

        ``arrays`` has None where this kind has none: another array there is not looked at.
        """
        given = self._given(arrays)
        try:
            found = [*map(self.framework.pointer, given)]
        except RuntimeError:  # a sparse tensor has the class of others, but `is_kind` may not survive it
            return None
        if 0 in found or [address & 15 for address in found] != self._alignments:  # 0: its memory was freed
            return None
        return self._spread((*found, 0)) if is_kind(given) else None


def clear_all() -> None:
    """Forget every kind of call, and what their launches keep alive. Results do not change."""
    for memo in _shared:
        memo.clear()


def kind_of(view: Fields | None) -> tuple[Any, ...] | None:
    """List what checks of an optional array depend on: its view, but the alignment alone of its address."""
    return view and (view[0] & 15, view[1:6])
