"""Calls that launch nothing: what stands for their arrays, and the framework that these are of.

`rawmla.warmup_call` makes such calls to load kernels, and `rawmla.torch_ops` to check arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from . import jit
from .call.arrays import READERS
from .call.frameworks import Fields, NewArray, contiguous_strides

_ADDRESS = 1 << 40  # of arrays that are not allocated; nothing follows it


class StandIn:
    """Stands for an array in a call that launches nothing: the caller's, or one that the call makes."""

    def __init__(self, array: Any = None) -> None:
        self.array = array

    def __getitem__(self, index: Any) -> StandIn:
        return self

    def reshape(self, *shape: int) -> StandIn:
        return self


class Described(StandIn):
    """Stands for an array of which this is known: ``fields`` are what a reader gives, without the array."""

    def __init__(self, *fields: Any) -> None:
        super().__init__()
        self.fields = fields


def _read(x: Described, name: str) -> Fields:
    return (*x.fields, x)


READERS[Described] = _read
for _class in (StandIn, Described):
    _class.__qualname__ = _class.__name__ = "array"  # what the texts of errors call it


class NoFramework:
    """The framework of a call that launches nothing: it makes no arrays, and its stream takes no kernels.

    Its methods are the methods of `Framework`.
    """

    def __init__(
        self,
        name: str,
        is_capturing: Callable[[int], bool] = lambda device: False,
        capture_query: Callable[[int], Callable[[], bool]] = lambda device: lambda: False,
        determinism: Callable[[], bool] = lambda: False,
    ) -> None:
        self.name = name
        self.is_capturing = is_capturing
        self.capture_query = capture_query
        self.determinism = determinism

    def empty(self, *args: Any, **kwargs: Any) -> Any:
        return StandIn()

    contiguous_copy = aligned_copy = empty

    def allocator(
        self, arrays: Sequence[NewArray], scratch_bytes: int, device: int
    ) -> Callable[[], list[Any]]:
        # What a call makes may be given to another one.
        made = [
            Described(
                _ADDRESS, shape, strides[0] if strides else contiguous_strides(shape), dtype, device, self
            )
            for shape, dtype, *strides in arrays
        ]
        return lambda: [*made, StandIn()]

    def kind_check(self, arrays: Sequence[Any]) -> None:
        pass

    def fill(self, array: Any, value: float) -> None:
        pass

    def pointer(self, array: Any) -> int:
        return _ADDRESS

    def current_stream(self, device: int) -> int:
        return jit.NO_LAUNCH
