"""Score and mask functions of a call: Python callables, `CudaMod` or CUDA text, as a kernel takes them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from types import FunctionType
from typing import Any, NamedTuple

from ..call.arrays import READERS, WITH_BACKWARD, Framework, NeedsGradient, contiguous_strides
from ..call.checks import INT32_MAX, check_place, show
from ..errors import MissingDependencyError
from ..jit import NO_LAUNCH
from ..kernels.block_mask import Grid
from .mods import (
    HEADER_NAME,
    NO_BYTES,
    NO_FUNCTION,
    Capture,
    CudaMod,
    Form,
    Kind,
    Mod,
    Number,
    Place,
    Reading,
    header,
    reading_of,
)
from .recall import keep_bound, objects_of, recall_bound, states_of

__all__ = [
    *("IDENTITY", "Bound", "as_bound", "as_reading", "bound", "check_on_device", "header_of", "packed_of"),
    "within_blocks",
]

IDENTITY = reading_of(Mod("return score;", (), (), NO_FUNCTION))
"""The score function that changes nothing."""


def as_reading(function: Any, kind: Kind, device: int, backward: bool = False) -> Reading | None:
    """A function that a user gave, traced if it is one of Python, and what it reads now; None for None, and a
    `Reading` as it is. With `backward`, a score function has gradients, and a mask function has to read
    nothing that requires grad.

    Raises
    ------
    TypeError
        It is none of the kinds.
    MissingDependencyError
        It is a Python function, and torch, which traces it, is not installed.
    NotImplementedError, ValueError
        As `rawmla.flex.trace.trace`, and `CudaMod.mod`; `NeedsGradient` without `backward`.
    """
    if function is None:
        return None
    with_gradients = backward and kind == "score_mod"
    if isinstance(function, Reading):
        reading = function
    elif isinstance(function, (CudaMod, str)):
        given = CudaMod(function) if isinstance(function, str) else function
        reading = reading_of(given.mod(with_gradients))
    elif callable(function):
        reading = _tracer(kind, device, with_gradients)(function)
    else:
        raise TypeError(f"{kind}: expected a function, a CudaMod or CUDA text, got {show(function)}")
    if not with_gradients:
        _check_numbers(reading.sources, kind)
        if backward:
            _check_mask(reading)
    return reading


@lru_cache(maxsize=256)
def _tracer(kind: Kind, device: int, backward: bool) -> Callable[[Any], Reading]:
    """What traces functions of a kind that read tensors of the device."""
    try:
        import torch
    except ImportError as error:
        raise MissingDependencyError(
            f"{kind}: a Python function is traced by torch, which cannot be imported ({error}); without "
            "torch, give it as CUDA text: rawmla.CudaMod"
        ) from error
    from . import memo

    place = torch.device("cuda", device)
    return lambda function: memo.read(function, kind, place, backward)


def _check_numbers(sources: Sequence[Any], kind: Kind) -> None:
    """Check that numbers need no gradient. Those on the CPU are no arrays that a reader sees."""
    if (
        True in [getattr(source, "requires_grad", False) for source in sources]
        and sys.modules["torch"].is_grad_enabled()
    ):
        raise NeedsGradient(
            f"{kind}: expected captured numbers that need no gradient here, got requires_grad=True with grad "
            f"enabled; call under torch.no_grad(). {WITH_BACKWARD}"
        )


def _check_mask(reading: Reading) -> None:
    """Check that a mask function reads nothing that requires grad."""
    for source in (*reading.arrays, *reading.sources):
        if getattr(source, "requires_grad", False):
            raise ValueError(
                "mask_mod: expected captured tensors that do not require grad, got one of shape "
                f"{list(source.shape)} that does"
            )


class Bound(NamedTuple):
    """A function with what it reads in a call."""

    form: Form
    addresses: list[int]  # of its arrays
    numbers: list[int | float]
    packed: bytes

    def with_last_address(self, address: int) -> Bound:
        """The same with another address of the last array."""
        addresses = [*self.addresses[:-1], address]
        packed = self.form.pack(addresses, self.numbers)
        return Bound(self.form, addresses, self.numbers, packed)


def bound(reading: Reading | None, kind: Kind, device: int, framework: Framework) -> Bound | None:
    """A function of a call with where its arrays lie and the values of its numbers; None for None. Arrays of
    a function with gradients are read without their own: theirs are results.

    Raises
    ------
    TypeError, ValueError
        An array cannot be read, lies on another device, or has a size that no kernel takes.
    """
    if reading is None:
        return None
    frame, arrays, sources = reading
    name = f"{kind}: an array that it reads"
    addresses: list[int] = []
    lie: tuple[Any, ...] = ()
    for array in arrays:
        if array.__class__ is Place:
            ptr, shape, strides = array
        else:
            if frame.mod.backward is not None and getattr(array, "requires_grad", False):
                array = array.detach()
            ptr, shape, strides, _, on, of, _ = view = READERS[type(array)](array, name)
            if on != device or of is not framework:
                check_on_device(name, view, device, framework)
        addresses.append(ptr)
        lie += (shape, strides)
    numbers = [x if isinstance(x, (int, float)) else x.item() for x in sources]
    form = frame.forms.get(lie)
    if form is None:
        for shape in lie[::2]:
            _check_sizes(shape, name)
        form = frame.make_form(lie)
    return Bound(form, addresses, numbers, form.pack(addresses, numbers))


def as_bound(function: Any, kind: Kind, device: int, framework: Framework) -> Bound | None:
    """`bound` of `as_reading`, for calls without gradients; found again where a Python function reads the
    very objects of an earlier call.
    """
    objects = objects_of(function) if type(function) is FunctionType else None
    if objects is None:
        return bound(as_reading(function, kind, device), kind, device, framework)
    recalled: Bound | None = recall_bound(objects, kind, device, framework)
    if recalled is not None:
        return recalled
    states = states_of(objects)
    reading = as_reading(function, kind, device)
    result = bound(reading, kind, device, framework)
    keep_bound(function, objects, states, kind, device, framework, reading, result)
    return result


def packed_of(function: Bound | None) -> bytes:
    """The bytes of a ScoreMod or MaskMod."""
    return NO_BYTES if function is None else function.packed


def _check_sizes(shape: Sequence[int], name: str) -> None:
    if not all(0 < size <= INT32_MAX for size in shape):
        raise ValueError(f"{name}: expected dimensions of 1 to 2**31 - 1, got shape {list(shape)}")


@lru_cache(maxsize=1024)
def header_of(score: Mod | None, mask: Mod | None) -> tuple[str, str]:
    """Name and text of the header that a kernel with these functions, without arrays, includes."""
    return HEADER_NAME, header(score, mask)


def check_on_device(name: str, view: Any, device: int, framework: Framework) -> None:
    """Check that an array is on the device of the query and, if it is of another framework, on its stream."""
    given_framework = view[5]
    if given_framework is framework or framework.current_stream(device) == NO_LAUNCH:
        if view[4] != device:
            raise ValueError(
                f"{name}: expected an array on device cuda:{device}, that of query, got cuda:{view[4]}"
            )
    else:
        check_place(name, view, device, framework, "query")


def within_blocks(mask: Mod | None, grid: Grid, by_columns: bool = False) -> Mod:
    """The mask function that hides what lies in an empty block of the grid and shows what lies in a full one,
    asking ``mask`` in partial ones. The last array that it reads has the states of the blocks
    (cuda_src/flex/block_states.cuh), at an address that is still to be put in its `Place`. With
    ``by_columns`` those of a column of blocks lie one after the other.
    """
    captures, known = ((), ()) if mask is None else (mask.captures, mask.numbers)
    batches, heads, block_q, block_k = [f"static_cast<int>(mod.n{len(known) + i})" for i in range(4)]
    lines = [
        f"const int block_state = mod.t{len(captures)}(b % {batches}, h % {heads}, q_idx / {block_q}, "
        f"kv_idx / {block_k});",
        "if (block_state != 1) return block_state == 2;",
        "return true;" if mask is None else f"{{\n{mask.text}\n}}",  # with its own names
    ]
    shape = (grid.batches, grid.heads, grid.rows, grid.columns)
    strides = contiguous_strides(shape)
    if by_columns:
        strides = (*strides[:2], 1, grid.rows)
    states = Place(0, shape, strides)
    numbers = (grid.batches, grid.heads, grid.block_q, grid.block_k)
    return Mod(
        "\n".join(lines),
        (*captures, Capture(states, "uint8", 4)),
        (*known, *[Number(number, True) for number in numbers]),
    )
