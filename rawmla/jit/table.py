"""A dictionary of bounded size."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class BoundedTable(Generic[Key, Value]):
    """At most ``bound`` values; the one that was stored or looked up longest ago is dropped. Thread safe."""

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self._values: OrderedDict[Key, Value] = OrderedDict()
        self._mutex = threading.Lock()

    def get(self, key: Key) -> Value | None:
        """The value, which counts as used now; None if there is none."""
        with self._mutex:
            value = self._values.get(key)
            if value is not None:
                self._values.move_to_end(key)
            return value

    def __setitem__(self, key: Key, value: Value) -> None:
        dropped = []  # freed after the lock is, because a destructor may look something up here
        with self._mutex:
            self._values[key] = value
            self._values.move_to_end(key)
            while len(self._values) > self.bound:
                dropped.append(self._values.popitem(last=False))

    def __len__(self) -> int:
        return len(self._values)
