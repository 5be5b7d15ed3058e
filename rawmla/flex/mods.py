"""Score and mask functions as a kernel takes them: a header of CUDA text, and the bytes of its parameters."""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from types import NoneType
from typing import Any, Literal, NamedTuple

import numpy as np

from ..call.arrays import inspect, is_array
from ..call.memo import Memo

Kind = Literal["score_mod", "mask_mod"]
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
_RESERVED = {"score", "b", "h", "q_idx", "kv_idx", "q_len", "kv_len", "grad", "mod", "gradient_sink"}
ELEMENTS = {
    "bool": "Bool",
    "uint8": "unsigned char",
    "int8": "signed char",
    "int16": "short",
    "int32": "int",
    "int64": "i64",
    "bfloat16": "Bf16",
    "float16": "F16",
    "float32": "float",
    "float64": "double",
}
"""The type of the elements of a captured array in cuda_src/flex/mods.cuh, by dtype."""


Layout = Literal["kAny", "kSmall", "kSmallRows"]
"""The layout of a captured array: the enum of this name in cuda_src/flex/mods.cuh."""


class Capture(NamedTuple):
    """An array that a function reads, ``mod.t<i>`` in its text, and its name for the user."""

    array: Any
    dtype: str
    rank: int
    layout: Layout = "kAny"
    name: str = ""


class Number(NamedTuple):
    """A number that a function closes over, ``mod.n<i>`` in its text: a Python number, or a 0-d tensor of the
    CPU, which is read at every call.
    """

    source: Any
    is_integer: bool


class Site(NamedTuple):
    """An element of a captured array to whose gradient every score adds something.

    `by_q` and `by_kv`: another query token, another key may be another element.
    """

    gradient: int
    by_q: bool
    by_kv: bool


class Backward(NamedTuple):
    """The gradients of a score function as a kernel needs them. In both texts ``grad`` is the gradient of the
    result; they are linear in it.
    """

    text: str  # statements, the last of which returns the result and its derivative by the score
    is_one: bool  # the derivative, everywhere
    captured: str  # statements: `gradient_sink.template add<i>(place, value)` for each site i
    gradients: tuple[int, ...]  # the captures that have one, in the order of the sites' `gradient`
    sites: tuple[Site, ...]


class Mod(NamedTuple):
    """A function as a kernel has it."""

    text: str  # statements, the last of which returns
    captures: tuple[Capture, ...]
    numbers: tuple[Number, ...]
    backward: Backward | None = None


NO_FUNCTION = Backward("return {score, 1.0f};", True, "", (), ())
"""The gradients of the score function that changes nothing."""


class CudaMod:
    """A score or mask function in CUDA C++.

    Parameters
    ----------
    code : str
        An expression, or statements that `return` one: float for a score function, bool for a mask function.
        It can use ``score`` (float, score functions only), ``b``, ``h``, ``q_idx``, ``kv_idx``, ``q_len`` and
        ``kv_len`` (int), and the names in `captures`.
    captures : mapping of str to array or number, optional
        An array is read as ``name(i, j, ...)``, with an index for each of its dimensions: a float, an i64 for
        integers, a bool. Indices below 0 count from the end; what is outside is moved inside. A number is a
        float or an i64 of that name, and not part of the text: another one needs no new kernel.
    grad : str, optional
        The gradient of `score`, as `code` is written: besides its names it can use ``grad`` (float), the
        gradient of what `code` gives, in which it has to be linear. Wanted where gradients are; score
        functions only.
    capture_grads : mapping of str to (str, str), optional
        By the name of a floating-point array in `captures` what a score adds to its gradient: indices such
        as ``"h, q_idx"``, by the rules for indices of a reading, and an expression, which can use ``grad``
        too. A sequence of such pairs where the array is read at several places. Wanted for tensors of torch
        that require grad; arrays that are no tensors and are named here have gradients too.

    Raises
    ------
    TypeError, ValueError
        The code is no str; a name is no identifier or has a meaning already; a capture is no array or number,
        or an int beyond 64 bits; capture_grads has no pairs of str, or a name that is no floating-point array
        of captures.

    Notes
    -----
    The code is compiled unchanged and runs on the GPU with full access to its memory. Treat it like any
    program: do not use code from a source that you do not trust.
    """

    def __init__(
        self,
        code: str,
        captures: Mapping[str, Any] | None = None,
        *,
        grad: str | None = None,
        capture_grads: Mapping[str, Any] | None = None,
    ) -> None:
        for argument, text in (("code", code), ("grad", grad)):
            if (text is not None or argument == "code") and not (isinstance(text, str) and text.strip()):
                raise TypeError(f"{argument}: expected CUDA text, got {text!r}")
        self.code = code
        self.grad = grad
        self.captures: dict[str, Any] = {}
        for name, given in (captures or {}).items():
            capture = given.item() if isinstance(given, np.generic) else given
            if not isinstance(name, str) or not _IDENTIFIER.fullmatch(name):
                raise ValueError(f"captures: expected names that are C identifiers, got {name!r}")
            if name in _RESERVED:
                raise ValueError(f"captures: expected names without a meaning of their own, got {name!r}")
            if not is_array(capture) and not isinstance(capture, (int, float)):
                raise TypeError(f"captures: expected {name} to be an array or a number, got {capture!r}")
            if isinstance(capture, int) and not -(2**63) <= capture < 2**63:
                raise ValueError(f"captures: expected {name} to be an int of 64 bits, got {capture}")
            self.captures[name] = capture

        if not isinstance(capture_grads, (Mapping, NoneType)):
            raise TypeError(f"capture_grads: expected a mapping of names, got {capture_grads!r}")
        self.capture_grads = {name: _pairs(name, x) for name, x in (capture_grads or {}).items()}
        for name in self.capture_grads:
            if not is_array(self.captures.get(name)):
                raise ValueError(f"capture_grads: expected names of arrays in captures, got {name!r}")

    def mod(self, backward: bool = False) -> Mod:
        """The function as a kernel has it; with `backward`, one that computes gradients."""
        lines: list[str] = []
        captures: list[Capture] = []
        numbers: list[Number] = []
        places: dict[str, int] = {}
        for name, capture in self.captures.items():
            if is_array(capture):
                requires_grad = getattr(capture, "requires_grad", False)
                view = inspect(capture.detach() if requires_grad else capture, f"captures: {name}")
                if view.dtype not in ELEMENTS:
                    raise TypeError(f"captures: expected {name} to be of another dtype, got {view.dtype}")
                at = f"mod.t{len(captures)}"
                lines.append(f"const Named<decltype({at})> {name}{{{at}}};")
                places[name] = len(captures)
                captures.append(Capture(capture, view.dtype, len(view.shape), name=name))
            else:
                is_integer = isinstance(capture, int)
                c_type = "i64" if is_integer else "float"
                lines.append(f"const {c_type} {name} = mod.n{len(numbers)};")
                numbers.append(Number(capture, is_integer))
        text = "\n".join([*lines, _with_return(self.code)])
        # Gradients may use fewer of them than the function does.
        names = [f"[[maybe_unused]] {line}" for line in lines]
        gradients = self._backward(names, captures, places) if backward else None
        return Mod(text, tuple(captures), tuple(numbers), gradients)

    def _backward(self, names: list[str], captures: list[Capture], places: dict[str, int]) -> Backward:
        """The gradients as a kernel needs them; `names` has the statements that give captures their names."""
        if self.grad is None:
            raise ValueError(
                "score_mod: expected a CudaMod with grad, since gradients are needed, got one without"
            )
        gradients: list[int] = []
        sites: list[Site] = []
        calls: list[str] = []
        for name, place in places.items():
            capture, pairs = captures[place], self.capture_grads.get(name)
            if pairs is None and getattr(capture.array, "requires_grad", False):
                raise ValueError(
                    f"score_mod: expected a CudaMod with capture_grads for {name}, which requires grad, "
                    "got one without"
                )
            if pairs is not None and "float" not in capture.dtype:
                raise ValueError(
                    f"capture_grads: expected {name} to be of a floating-point dtype, got {capture.dtype}"
                )
            if pairs is None or not getattr(capture.array, "requires_grad", True):
                continue
            for indices, value in pairs:
                words = set(_IDENTIFIER.findall(indices))
                by = [bool(words & {argument, "score"}) for argument in ("q_idx", "kv_idx")]
                calls.append(
                    f"gradient_sink.template add<{len(sites)}>(mod.t{place}.place(\n{indices}\n), "
                    f"static_cast<float>(\n{value}\n));"
                )
                sites.append(Site(len(gradients), *by))
            gradients.append(place)
        arguments = "score, b, h, q_idx, kv_idx, q_len, kv_len"
        head = f"return {{mod({arguments}), [&]() -> float {{"
        return Backward(
            "\n".join([head, *names, _with_return(self.grad), "}()};"]),
            self.grad.strip() == "grad",
            "\n".join([*(names if calls else []), *calls]),
            tuple(gradients),
            tuple(sites),
        )


def _with_return(code: str) -> str:
    """Statements that return, of an expression too."""
    return code if re.search(r"\breturn\b", code) else f"return {code}\n;"  # may end with a comment


def _pairs(name: Any, given: Any) -> tuple[tuple[str, str], ...]:
    """Pairs of indices and values."""

    def is_pair(x: Any) -> bool:
        return isinstance(x, (tuple, list)) and len(x) == 2 and all(isinstance(one, str) for one in x)

    pairs = (given,) if is_pair(given) else given
    if not isinstance(pairs, (tuple, list)) or not all(map(is_pair, pairs)):
        raise TypeError(f"capture_grads: expected {name} to have indices and a value, got {given!r}")
    for _, value in pairs:
        if not value.strip():
            raise ValueError(f"capture_grads: expected {name} to have a value, got {value!r}")
    return tuple((indices, value) for indices, value in pairs)


class Place(NamedTuple):
    """The address and the layout of a captured array, strides in elements."""

    ptr: int
    shape: Sequence[int]
    strides: Sequence[int]

    def layout(self) -> Layout:
        """The layout that indexing may rely on."""
        steps = [(extent - 1) * abs(stride) for extent, stride in zip(self.shape, self.strides, strict=True)]
        if sum(max(step, 0) for step in steps) >= 2**31 or any(abs(x) >= 2**31 for x in self.strides):
            return "kAny"
        return "kSmallRows" if steps and (self.shape[-1] <= 1 or self.strides[-1] == 1) else "kSmall"


NO_BYTES = bytes(8)
"""The bytes of a ScoreMod or MaskMod without a function."""


class Reading(NamedTuple):
    """A function together with the arrays and the numbers that it reads in a call."""

    frame: Frame
    arrays: Sequence[Any]  # by captures
    sources: Sequence[Any]  # by numbers: Python numbers, or 0-d tensors of the CPU


def reading_of(mod: Mod) -> Reading:
    """Take a function apart that was just traced or written."""
    text, captures, numbers, backward = mod
    without = tuple([Capture(None, x.dtype, x.rank, name=x.name) for x in captures])
    frame = frame_of(Mod(text, without, tuple([Number(0, x.is_integer) for x in numbers]), backward))
    return Reading(frame, [x.array for x in captures], [x.source for x in numbers])


class TracedMod:
    """A Python score or mask function as `rawmla.trace_mod` found it: CUDA text and what the text reads.

    `flex_attention`, `flex_attention_backward`, `create_block_mask` and `BlockMask` take it instead of the
    function. No call looks at the Python function again.

    Attributes
    ----------
    kind : str
        "score_mod" or "mask_mod".
    code : str
        CUDA statements, the last of which returns. ``mod.t0``, ``mod.t1``, ... are the tensors in `captures`
        in their order, and ``mod.n0``, ``mod.n1``, ... the numbers.
    captures : dict of str to torch.Tensor or number
        The tensors that the function reads, by the names of its variables, and then its numbers by the keys
        "mod.n0", "mod.n1", ... A 0-d tensor of the CPU is a number.
    grad : str or None
        CUDA statements for the gradients of a score function: those that add to the gradients of captured
        tensors, and then those that return its value and its derivative by the score, where ``grad`` is 1.
        None for a mask function, and for a score function that has no gradients.

    Notes
    -----
    A call reads what `captures` holds: a tensor that changed in place has its new values, also in its new
    memory. To change the attributes changes no call.
    """

    def __init__(self, kind: Kind, reading: Reading, names: Sequence[str], gradients: Any) -> None:
        self.kind = kind
        self.code = reading.frame.mod.text
        numbers = {f"mod.n{i}": source for i, source in enumerate(reading.sources)}
        self.captures = {**dict(zip(names, reading.arrays, strict=True)), **numbers}
        self.grad: str | None = None
        if isinstance(gradients, Reading):
            assert gradients.frame.mod.backward is not None
            text, _, captured, *_ = gradients.frame.mod.backward
            self.grad = f"{captured}\n{text}" if captured else text
        self._reading = reading
        self._gradients = gradients  # a Reading, or why there is none
        self._required_grad = [x.requires_grad for x in reading.arrays]

    def reading(self, backward: bool = False) -> Reading:
        """The function as a call takes it; with `backward`, with its gradients, or an error."""
        if not backward:
            return self._reading
        if isinstance(self._gradients, Exception):
            raise type(self._gradients)(*self._gradients.args)
        for name, array, required in zip(
            self.captures, self._reading.arrays, self._required_grad, strict=False
        ):
            if array.requires_grad and not required:
                raise ValueError(
                    f"{self.kind}: expected {name} to require no grad, as when the function was traced, got "
                    "requires_grad=True; trace it again"
                )
        gradients: Reading = self._gradients
        return gradients


class Frame:
    """A function without the arrays and numbers that it reads. Functions with equal text share one, so a new
    trace finds the forms of an older one. It is compared by identity where it is part of a key, because
    hashing the text is slow.
    """

    def __init__(self, mod: Mod) -> None:
        self.mod = mod  # its arrays are None, and its numbers 0
        self.forms: Memo[Form] = Memo()  # by shape, strides and dtype of one capture after the other

    @cached_property
    def alone(self) -> Bound:
        """The function, which reads nothing, as every call binds it."""
        form = Form(self.mod, ())
        return Bound(form, [], [], form.pack((), ()))


frame_of = lru_cache(maxsize=1024)(Frame)
"""The `Frame` of a `Mod` without arrays and numbers."""


class Form:
    """Packs the bytes of a ScoreMod or MaskMod from addresses and numbers, for captures of known shapes and
    strides. Its `frame` has the layouts of its arrays, on which the text of a kernel depends.
    """

    __slots__ = ("_lengths", "_pack", "frame")

    def __init__(self, mod: Mod, places: Sequence[Place]) -> None:
        captures = [x._replace(layout=place.layout()) for x, place in zip(mod.captures, places, strict=True)]
        self.frame = frame_of(mod._replace(captures=tuple(captures)))
        code = "<"
        lengths = []
        for capture, place in zip(captures, places, strict=True):
            count = max(1, capture.rank)
            strides, sizes = (([*x, 0])[:count] for x in (place.strides, place.shape))
            packed = struct.pack(f"<{count}q{count}i", *strides, *sizes)
            lengths.append(packed + bytes(-len(packed) % 8))
            code += f"Q{len(lengths[-1])}s"
        for number in mod.numbers:
            code += _padding(code) + "q" if number.is_integer else "f"
        code += _padding(code)
        if mod.backward is not None:
            code += f"{8 * max(1, len(mod.backward.gradients))}x"
        self._lengths = lengths
        self._pack = struct.Struct(code if struct.calcsize(code) else "8x").pack

    def pack(self, addresses: Sequence[int], numbers: Sequence[int | float]) -> bytes:
        """The bytes of a ScoreMod or MaskMod, a multiple of 8, given the addresses of the captures. The
        bytes of a function with gradients end with the addresses of its gradients, which are 0 here.
        """
        members: list[Any] = []
        for address, lengths in zip(addresses, self._lengths, strict=True):
            members += (address, lengths)
        try:
            return self._pack(*members, *numbers)
        except (struct.error, OverflowError):
            return self._pack(*members, *self._fitted(numbers))

    def _fitted(self, numbers: Sequence[int | float]) -> list[int | float]:
        """The numbers, infinite where they are too large for a float."""
        fitted = []
        for value, number in zip(numbers, self.frame.mod.numbers, strict=True):
            if number.is_integer and not -(2**63) <= value < 2**63:
                raise ValueError(f"a score or mask function: expected integers of 64 bits, got {value}")
            fitted.append(value if number.is_integer else ctypes.c_float(value).value)
        return fitted


class Bound(NamedTuple):
    """A function with the addresses and numbers of a call."""

    form: Form
    addresses: list[int]  # of its arrays
    numbers: list[int | float]
    packed: bytes


def _padding(code: str) -> str:
    """The padding that brings a struct format to a multiple of 8 bytes."""
    return "x" * (-struct.calcsize(code) % 8)
