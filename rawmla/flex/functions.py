"""Score and mask functions of a call: Python callables, `TracedMod`, `CudaMod` or text, for a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from types import FunctionType
from typing import Any

from ..call.arrays import READERS, needs_gradient
from ..call.checks import INT32_MAX, check_place, show
from ..call.frameworks import Framework, contiguous_strides
from ..errors import MissingDependencyError
from ..jit import NO_LAUNCH
from ..kernels.block_mask import Grid
from .header import HEADER_NAME, header
from .mods import (
    NO_BYTES,
    NO_FUNCTION,
    Bound,
    Capture,
    CudaMod,
    Form,
    Kind,
    Mod,
    Number,
    Place,
    Reading,
    TracedMod,
    frame_of,
    reading_of,
)

IDENTITY = reading_of(Mod("return score;", (), (), NO_FUNCTION))
"""The score function that changes nothing."""


def as_reading(function: Any, kind: Kind, device: int, backward: bool = False) -> Reading | None:
    """Read a function that a user gave, tracing one of Python. None is None, and a `Reading` stays as it is.
    With `backward`, a score function has gradients.
    """
    if function is None or isinstance(function, Reading):
        return function
    with_gradients = backward and kind == "score_mod"
    if isinstance(function, TracedMod):
        if function.kind != kind:
            raise TypeError(f"{kind}: expected a function of this kind, got a TracedMod of a {function.kind}")
        return function.reading(with_gradients)
    if isinstance(function, (CudaMod, str)):
        given = CudaMod(function) if isinstance(function, str) else function
        return reading_of(given.mod(with_gradients))
    if callable(function):
        memo, place = _memo_for(kind, device)
        reading: Reading = memo.read(function, kind, place, with_gradients)
        return reading
    raise TypeError(f"{kind}: expected a function, a CudaMod or CUDA text, got {show(function)}")


def as_bound(function: Any, kind: Kind, device: int, framework: Framework) -> Reading | Bound | None:
    """Read a function as `as_reading` does, and bind one of Python at once where that was done before. What
    is bound needs no gradient.
    """
    if type(function) is not FunctionType:
        return as_reading(function, kind, device)
    memo, place = _memo_for(kind, device)
    found: Reading | Bound = memo.recall(function, kind, place, framework)
    return found


@lru_cache(maxsize=256)
def _memo_for(kind: Kind, device: int) -> tuple[Any, Any]:
    """The module `memo`, and the device of torch on which the tensors of functions of a kind are."""
    try:
        import torch
    except ImportError as error:
        raise MissingDependencyError(
            f"{kind}: a Python function is traced by torch, which cannot be imported ({error}); without "
            "torch, give it as CUDA text: rawmla.CudaMod"
        ) from error
    from . import memo

    return memo, torch.device("cuda", device)


def traced(function: Any, kind: Kind, device: int) -> TracedMod:
    """`rawmla.trace_mod` for an ordinal of a device."""
    if kind not in ("score_mod", "mask_mod"):
        raise ValueError(f"kind: expected 'score_mod' or 'mask_mod', got {kind!r}")
    if isinstance(function, (CudaMod, TracedMod)) or not callable(function):
        raise TypeError(f"function: expected a Python function, got {show(function)}")
    memo, place = _memo_for(kind, device)
    reading = memo.read(function, kind, place)
    gradients: Any = None
    if kind == "score_mod":
        try:
            gradients = memo.read(function, kind, place, True)
        except (NotImplementedError, ValueError) as error:
            gradients = type(error)(*error.args)  # without the frames of its traceback
    from .names import names_of

    return TracedMod(kind, reading, names_of(function, reading.arrays), gradients)


def reads_gradient(*functions: Reading | Bound | None) -> bool:
    """Whether torch makes a graph of a call that reads these functions."""
    read: list[Any] = []
    for one in functions:
        if isinstance(one, Reading):
            read += (*one.arrays, *one.sources)
    return bool(read) and needs_gradient(*read)


def check_mask(reading: Reading) -> None:
    """Check that a mask function reads nothing that requires grad."""
    for source in (*reading.arrays, *reading.sources):
        if getattr(source, "requires_grad", False):
            raise ValueError(
                "mask_mod: expected captured tensors that do not require grad, got one of shape "
                f"{list(source.shape)} that does"
            )


def bound(reading: Reading | Bound | None, kind: Kind, device: int, framework: Framework) -> Bound | None:
    """Bind a function to the addresses of its arrays and the values of its numbers, as they are in this call;
    None is None, and a `Bound` stays as it is. A function with gradients reads its arrays without a graph,
    since their gradients are results.
    """
    if reading is None or isinstance(reading, Bound):
        return reading
    frame, arrays, sources = reading
    if not arrays and not sources:
        return frame.alone
    name = f"{kind}: an array that it reads"
    addresses: list[int] = []
    kinds: tuple[Any, ...] = ()
    for array in arrays:
        if array.__class__ is Place:
            (ptr, shape, strides), dtype = array, "uint8"
        else:
            if frame.mod.backward is not None and getattr(array, "requires_grad", False):
                array = array.detach()
            ptr, shape, strides, dtype, on, of, _ = view = READERS[type(array)](array, name)
            if on != device or of is not framework:
                check_on_device(name, view, device, framework)
        addresses.append(ptr)
        kinds += (shape, strides, dtype)
    numbers = [x if isinstance(x, (int, float)) else x.item() for x in sources]
    form = frame.forms.get(kinds)
    if form is None:
        for capture, shape, dtype in zip(frame.mod.captures, kinds[::3], kinds[2::3], strict=True):
            _check_capture(capture, shape, dtype, name)
        places = [Place(0, *one) for one in zip(kinds[::3], kinds[1::3], strict=True)]
        form = frame.forms.keep(kinds, Form(frame.mod, places))
    return Bound(form, addresses, numbers, form.pack(addresses, numbers))


def packed_of(function: Bound | None) -> bytes:
    """The bytes of a ScoreMod or MaskMod."""
    return NO_BYTES if function is None else function.packed


def _check_capture(capture: Capture, shape: Sequence[int], dtype: str, name: str) -> None:
    """Check an array against the text, which may be older than its dtype and shape."""
    if dtype != capture.dtype:
        raise TypeError(
            f"{name}: expected dtype {capture.dtype}, as when the function was traced, got {dtype}"
        )
    if len(shape) != capture.rank:
        raise ValueError(
            f"{name}: expected {capture.rank} dimensions, as when the function was traced, got shape "
            f"{list(shape)}"
        )
    if not all(0 < size <= INT32_MAX for size in shape):
        raise ValueError(f"{name}: expected dimensions of 1 to 2**31 - 1, got shape {list(shape)}")


@lru_cache(maxsize=1024)
def header_of(score: Mod | None, mask: Mod | None) -> tuple[str, str]:
    """Name and text of the header that a kernel with these functions, without arrays, includes."""
    return HEADER_NAME, header(score, mask)


def check_on_device(name: str, view: Any, device: int, framework: Framework) -> None:
    """Check that an array is on the device of the query and, if it is of another framework, on its stream."""
    has_stream = view[5] is not framework and framework.current_stream(device) != NO_LAUNCH
    check_place(name, view, device, framework if has_stream else view[5], "query")


def within_blocks(mask: Reading | None, grid: Grid, by_columns: bool = False) -> Reading:
    """The mask function that hides each position in an empty block of the grid, shows each in a full block,
    and calls ``mask`` in a partial one. The last array that it reads has the states of the blocks
    (cuda_src/flex/block_states.cuh), at an address that is still to be put in its `Place`. With
    ``by_columns`` the states of one column of blocks are consecutive.
    """
    text, captures, numbers, _ = Mod("return true;", (), ()) if mask is None else mask.frame.mod
    batches, heads, block_q, block_k = [f"static_cast<int>(mod.n{len(numbers) + i})" for i in range(4)]
    lines = [
        f"const int block_state = mod.t{len(captures)}(b % {batches}, h % {heads}, q_idx / {block_q}, "
        f"kv_idx / {block_k});",
        "if (block_state != 1) return block_state == 2;",
        text if mask is None else f"{{\n{text}\n}}",  # with its own names
    ]
    shape = (grid.batches, grid.heads, grid.rows, grid.columns)
    strides = contiguous_strides(shape)
    if by_columns:
        strides = (*strides[:2], 1, grid.rows)
    states = Place(0, shape, strides)
    frame = frame_of(
        Mod("\n".join(lines), (*captures, Capture(None, "uint8", 4)), (*numbers, *[Number(0, True)] * 4))
    )
    _, arrays, sources = (None, (), ()) if mask is None else mask
    sizes = (grid.batches, grid.heads, grid.block_q, grid.block_k)
    return Reading(frame, (*arrays, states), (*sources, *sizes))
