"""Score and mask functions of a call: Python callables, `CudaMod` or CUDA text, as a kernel takes them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from ..call.arrays import READERS, WITH_BACKWARD, Framework, NeedsGradient, contiguous_strides, inspect
from ..call.checks import INT32_MAX, check_place, show
from ..errors import MissingDependencyError
from ..jit import NO_LAUNCH
from ..kernels.block_mask import Grid
from .mods import (
    HEADER_NAME,
    NO_FUNCTION,
    Backward,
    Capture,
    CudaMod,
    Form,
    Kind,
    Layout,
    Mod,
    Number,
    Place,
    Reading,
    header,
    reading_of,
)

__all__ = ["IDENTITY", "Bound", "as_mod", "bound", "check_on_device", "header_of", "placed", "within_blocks"]

IDENTITY = Mod("return score;", (), (), NO_FUNCTION)
"""The score function that changes nothing."""


def as_mod(function: Any, kind: Kind, device: int, backward: bool = False) -> Mod | None:
    """A function that a user gave, traced if it is one of Python; None for None, and a `Mod` as it is. With
    `backward`, a score function has gradients, and a mask function has to read nothing that requires grad.

    Raises
    ------
    TypeError
        It is none of the kinds.
    MissingDependencyError
        It is a Python function, and torch, which traces it, is not installed.
    NotImplementedError, ValueError
        As `rawmla.attention.trace.trace`, and `CudaMod.mod`; `NeedsGradient` without `backward`.
    """
    if function is None:
        return None
    mod = _as_mod(function, kind, device, backward and kind == "score_mod")
    if backward and kind == "mask_mod":
        for source in (*[x.array for x in mod.captures], *[x.source for x in mod.numbers]):
            if getattr(source, "requires_grad", False):
                raise ValueError(
                    "mask_mod: expected captured tensors that do not require grad, got one of shape "
                    f"{list(source.shape)} that does"
                )
    return mod


def _as_mod(function: Any, kind: Kind, device: int, backward: bool) -> Mod:
    if isinstance(function, Mod):
        return function
    if isinstance(function, str):
        function = CudaMod(function)
    if isinstance(function, CudaMod):
        return function.mod(backward)
    if not callable(function):
        raise TypeError(f"{kind}: expected a function, a CudaMod or CUDA text, got {show(function)}")
    reading = _tracer(kind, device, backward)(function)
    if not backward:
        for source in reading.sources:
            _check_number(source, kind)
    return reading.mod()


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


def _check_number(source: Any, kind: Kind) -> None:
    """Check that a number needs no gradient. Those on the CPU are no arrays that a reader sees."""
    if getattr(source, "requires_grad", False) and sys.modules["torch"].is_grad_enabled():
        raise NeedsGradient(
            f"{kind}: expected captured numbers that need no gradient here, got requires_grad=True with grad "
            f"enabled; call under torch.no_grad(). {WITH_BACKWARD}"
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


def bound(function: Any, kind: Kind, device: int, framework: Framework) -> Bound | None:
    """A function that a user gave with what it reads, for a call without gradients; None for None.

    Checks and errors are those of `as_mod` and of `placed`. A function that is known by its trace costs the
    reading of its arrays, and little more.
    """
    if function is None:
        return None
    if isinstance(function, (Mod, CudaMod, str)) or not callable(function):
        frame, arrays, sources = reading_of(_as_mod(function, kind, device, False))
    else:
        frame, arrays, sources = _tracer(kind, device, False)(function)
    name = f"{kind}: an array that it reads"
    addresses: list[int] = []
    lie: tuple[Any, ...] = ()
    for array in arrays:
        if array.__class__ is Place:
            ptr, shape, strides = array
        else:
            ptr, shape, strides, _, on, of, _ = view = READERS[type(array)](array, name)
            if on != device or of is not framework:
                check_on_device(name, view, device, framework)
        addresses.append(ptr)
        lie += (shape, strides)
    numbers: list[int | float] = []
    for source in sources:
        if isinstance(source, (int, float)):
            numbers.append(source)
        else:
            _check_number(source, kind)
            numbers.append(source.item())
    form = frame.forms.get(lie)
    if form is None:
        for shape in lie[::2]:
            _check_sizes(shape, name)
        form = frame.make_form(lie)
    return Bound(form, addresses, numbers, form.pack(addresses, numbers))


def _check_sizes(shape: Sequence[int], name: str) -> None:
    if not all(0 < size <= INT32_MAX for size in shape):
        raise ValueError(f"{name}: expected dimensions of 1 to 2**31 - 1, got shape {list(shape)}")


def placed(mod: Mod | None, kind: Kind, device: int, framework: Framework) -> tuple[Mod | None, list[Place]]:
    """A function with the layouts of the arrays that it reads, and where they lie; checks their device."""
    if mod is None or not mod.captures:
        return mod, []
    places = []
    name = f"{kind}: an array that it reads"
    for capture in mod.captures:
        if isinstance(capture.array, Place):
            places.append(capture.array)
        else:
            view = inspect(capture.array, name)
            check_on_device(name, view, device, framework)
            _check_sizes(view.shape, name)
            places.append(Place(view.ptr, view.shape, view.strides))
    captures = [
        capture._replace(layout=place.layout()) for capture, place in zip(mod.captures, places, strict=True)
    ]
    return mod._replace(captures=tuple(captures)), places


def header_of(score: Mod | None, mask: Mod | None) -> tuple[str, str]:
    """Name and text of the header that a kernel with these functions includes."""
    return HEADER_NAME, _header(_text_of(score), _text_of(mask))


_Text = tuple[str, tuple[tuple[str, int, Layout], ...], tuple[bool, ...], "Backward | None"]


def _text_of(mod: Mod | None) -> _Text | None:
    """What the text of a kernel depends on."""
    if mod is None:
        return None
    captures = tuple([(capture.dtype, capture.rank, capture.layout) for capture in mod.captures])
    return mod.text, captures, tuple([number.is_integer for number in mod.numbers]), mod.backward


@lru_cache(maxsize=1024)
def _header(score: _Text | None, mask: _Text | None) -> str:
    def mod_of(text: _Text | None) -> Mod | None:
        if text is None:
            return None
        statements, captures, numbers, backward = text
        return Mod(
            statements,
            tuple(Capture(None, *capture) for capture in captures),
            tuple(Number(0, is_integer) for is_integer in numbers),
            backward,
        )

    return header(mod_of(score), mod_of(mask))


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
    (cuda_src/attention/block_states.cuh), at an address that is still to be put in its `Place`. With
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
