"""What is kept from call to call, so that a call which was seen before costs little host time.

A model repeats a few kinds of call. The checks of a kind are passed once, its kernels are loaded and its
parameters are worked out once; the next call of the kind finds them by a key of shapes, strides and dtypes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar
from weakref import ref

from .arrays import Fields, Framework

__all__ = ["LatestPair", "Memo", "BatchPlace", "PreparedCall", "clear_all", "kind_of"]

Value = TypeVar("Value")

MAX_ENTRIES = 1024
"""Of a `Memo`: enough for every kind of call of a program, and few enough to bound what it keeps alive."""

_shared: list[Memo[Any]] = []


class Memo(dict[Any, Value]):
    """A table of at most `MAX_ENTRIES` entries. Looked up with `get`; emptied when full, which costs a later
    call some microseconds. One made with `shared=True` is emptied by `clear_all` too.
    """

    latest: tuple[Any, Any]
    """The key and the value of the latest look-up, for users that note it."""

    def __init__(self, *, shared: bool = False) -> None:
        super().__init__()
        self.latest = None, None
        if shared:
            _shared.append(self)

    def keep(self, key: Any, value: Value) -> Value:
        """Remember `value`, and return it."""
        if len(self) >= MAX_ENTRIES:
            self.clear()
        self[key] = value
        return value


def clear_all() -> None:
    """Forget every kind of call, and with it what their launches keep alive. Results do not change."""
    for memo in _shared:
        memo.clear()
        memo.latest = None, None


class PreparedCall(NamedTuple):
    """What one kind of call does."""

    allocate: Callable[[], list[Any]]
    """Makes the results that the caller did not give, in order, and the scratch, or None, after them."""
    launch: Callable[..., None]
    """Enqueues the kernels: (stream, addresses of the arrays, address of the scratch)."""


def kind_of(view: Fields | None) -> tuple[Any, ...] | None:
    """What checks of an optional array depend on: of its address, only the alignment to 16 bytes."""
    if view is None:
        return None
    ptr, shape, strides, dtype, device, framework, _ = view
    return ptr & 15, shape, strides, dtype, device, framework


class BatchPlace(NamedTuple):
    """Of a call: the number of requests, and the device and the framework that all arrays have to be of."""

    b: int
    device: int
    framework: Framework


class _Pair(NamedTuple):
    first: ref[Any]
    second: ref[Any]
    place: BatchPlace
    state: tuple[Any, ...]
    """Addresses and shapes."""
    value: Any


class LatestPair:
    """The latest two arrays that passed a check, and what the check gave.

    All layers of a decoding step share the block table, the lengths and the plan: an engine passes the same
    objects to each. They are recognised by identity, address and shape, in a third of the time that a check
    takes. What this cannot see is an array whose strides alone were changed in place.
    """

    def __init__(self) -> None:
        self._latest: _Pair | None = None  # replaced as a whole, so threads see one pair or another

    def find(self, first: Any, second: Any, place: BatchPlace) -> Any:
        """What the check gave for these arrays in a call of the same place; None if it has to be made."""
        latest = self._latest
        if latest is None:
            return None
        old_first, old_second, old_place, state, value = latest
        if (
            old_first() is first is not None
            and old_second() is second is not None
            and (old_place is place or old_place == place)
        ):
            pointer = place.framework.pointer
            if (pointer(first), pointer(second), first.shape, second.shape) == state:
                return value
        return None

    def keep(
        self, first: Any, second: Any, place: BatchPlace, views: tuple[Fields, Fields], value: Any
    ) -> None:
        """Remember the arrays by weak references; `views` are theirs.

        Arrays of another framework than q's are not remembered: its stream has to be looked at in every call,
        and the view of a DLPack array belongs to an array that was made for this call.
        """
        framework = place.framework
        first_ptr, first_shape, _, _, _, first_framework, first_owner = views[0]
        second_ptr, second_shape, _, _, _, second_framework, second_owner = views[1]
        if (
            first_owner is first
            and second_owner is second
            and first_framework is framework
            and second_framework is framework
        ):
            state = (first_ptr, second_ptr, first_shape, second_shape)
            self._latest = _Pair(ref(first), ref(second), place, state, value)
