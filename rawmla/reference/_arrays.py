"""Arrays of the caller as NumPy arrays, with the dtypes and shapes that a function expects, and results.

torch is looked up in `sys.modules`, where it is if an argument is a tensor: it is never imported here.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ._formats import decode_e4m3, decode_e5m2

BYTE_DTYPES = ("float8_e4m3fn", "uint8", "int8")
"""Dtypes of the array of a quantised cache."""
E5M2_BYTE_DTYPES = ("float8_e5m2", "uint8", "int8")
"""The same for a cache of e5m2."""

Floats = NDArray[np.float64]

INT_DTYPES = ("int32",)
FLOAT_DTYPES = ("bfloat16", "float16", "float32", "float64")
_SEEN_AS_BYTES = {*BYTE_DTYPES, *E5M2_BYTE_DTYPES}

_DECODERS = {"float8_e4m3fn": decode_e4m3, "float8_e5m2": decode_e5m2}

Shape = tuple["int | str | Collection[int]", ...]
"""Dimensions that an array must have: a number, one of several, or the name of one of any size."""


class Array(NamedTuple):
    """An array argument.

    Attributes:
        values: its numbers, bf16 tensors as float32 and 8-bit types as uint8; shares memory where it can.
        dtype: the name of its own type.
        is_torch: whether it is a torch tensor.
    """

    values: NDArray[Any]
    dtype: str
    is_torch: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def floats(self) -> Floats:
        """Its numbers as float64."""
        decode = _DECODERS.get(self.dtype)
        return (self.values if decode is None else decode(self.values)).astype(np.float64)

    def result(self, values: NDArray[Any], dtype: str, out: Any = None) -> Any:
        """A result in the kind of this array: a tensor of `dtype`, or `values` as they are.

        It is written to `out` if that is given. A tensor `out` is also what is returned.
        """
        if out is not None:
            store(out, ..., values)
            if is_tensor(out):
                return out
        if not self.is_torch:
            return values
        torch = sys.modules["torch"]
        return torch.from_numpy(np.ascontiguousarray(values)).to(getattr(torch, dtype))


def read(x: Any, name: str, dtypes: tuple[str, ...] | None = None, shape: Shape | None = None) -> Array:
    """Read the argument `name`: a torch CPU tensor, whatever NumPy makes an array of, or an Array.

    Args:
        dtypes: the dtypes that are taken, None for all. An array of NumPy may be of any float type where a
            float type is, and of any integer type where int32 is.
        shape: the dimensions that are expected, None for any.

    Raises:
        TypeError: no array, or another dtype.
        ValueError: another shape; a tensor on a GPU, or one that requires grad.
    """
    if isinstance(x, Array):
        array = x
    else:
        array = _read_tensor(x, name) if is_tensor(x) else _read_numpy(x, name)
    if dtypes is not None and not _is_of(array, dtypes):
        raise TypeError(f"{name}: expected dtype {' or '.join(dtypes)}, got {array.dtype}")
    if shape is not None and not _fits(array.shape, shape):
        texts = [str(x) if isinstance(x, (int, str)) else " or ".join(map(str, x)) for x in shape]
        raise ValueError(f"{name}: expected shape [{', '.join(texts)}], got {list(array.shape)}")
    return array


def read_given(x: Any, name: str, dtypes: tuple[str, ...], shape: Shape | None = None) -> Array | None:
    """Read an argument that may be None."""
    return None if x is None else read(x, name, dtypes, shape)


def read_target(x: Any, name: str, dtypes: tuple[str, ...], shape: Shape | None = None) -> Array:
    """Read an argument that is written: an array, and nothing that NumPy would make a copy of."""
    if not is_tensor(x) and not isinstance(x, np.ndarray):
        raise TypeError(f"{name}: expected a torch CPU tensor or a NumPy array, got {type(x).__name__}")
    return read(x, name, dtypes, shape)


def read_bounds(
    x: Any, name: str, total: int | None = None, segments: int | None = None
) -> NDArray[np.int64]:
    """Read where segments begin and end: `[segments + 1]` numbers from 0 to `total`, None for no limits."""
    shape = "b + 1" if segments is None else segments + 1
    bounds = read(x, name, INT_DTYPES, (shape,)).values.astype(np.int64)
    if bounds[0] < 0 or (total is not None and bounds[-1] > total) or (np.diff(bounds) < 0).any():
        limits = "from 0" if total is None else f"from 0 to {total}"
        raise ValueError(f"{name}: expected numbers {limits} that do not decrease, got {bounds}")
    return bounds


def check_target(x: Any, name: str, dtypes: tuple[str, ...], shape: Shape) -> None:
    """Check an argument that is written if it is not None."""
    if x is not None:
        read_target(x, name, dtypes, shape)


def check_groups(h_q: int, h_kv: int, keys: str) -> None:
    """Check that every KV head of the argument `keys` has equally many query heads."""
    if h_q % h_kv:
        raise ValueError(
            f"q: expected h_q to be a multiple of the h_kv of {keys}, got h_q {h_q} and h_kv {h_kv}"
        )


def _read_numpy(x: Any, name: str) -> Array:
    refusal = f"{name}: expected a torch CPU tensor or a NumPy array, got {type(x).__name__}"
    try:
        values = np.asarray(x)
    except (TypeError, ValueError) as error:  # CuPy arrays and ragged lists
        raise TypeError(f"{refusal} ({error})") from error
    if values.dtype.hasobject:
        raise TypeError(refusal)
    dtype = values.dtype.name
    return Array(values.view(np.uint8) if dtype in _SEEN_AS_BYTES else values, dtype, False)


def _read_tensor(x: Any, name: str) -> Array:
    if x.device.type != "cpu":
        raise ValueError(f"{name}: expected a tensor in CPU memory, got a torch tensor on device {x.device}")
    torch = sys.modules["torch"]
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name}: expected a tensor that does not require grad, as no graph is made here, got one that "
            "does; detach it or call under torch.no_grad()"
        )
    dtype = str(x.dtype).removeprefix("torch.")
    try:
        plain = x.detach().resolve_neg()
        if dtype in _SEEN_AS_BYTES:
            plain = plain.view(torch.uint8)
        elif dtype == "bfloat16":
            plain = plain.float()
        return Array(plain.numpy(), dtype, True)
    except (RuntimeError, TypeError) as error:  # sparse and fake tensors; types that NumPy does not have
        raise TypeError(
            f"{name}: expected a dense torch tensor with memory, got {type(x).__name__} of {dtype} ({error})"
        ) from error


def _is_of(array: Array, dtypes: tuple[str, ...]) -> bool:
    """Whether an array is of one of these dtypes; an empty list, of which NumPy makes float64, is."""
    if array.dtype in dtypes:
        return True
    if array.is_torch or "uint8" in dtypes:
        return False
    is_float = array.dtype in FLOAT_DTYPES
    if "int32" not in dtypes:
        return is_float
    return array.values.dtype.kind in "iu" or is_float and not array.values.size


def _fits(shape: tuple[int, ...], wanted: Shape) -> bool:
    return len(shape) == len(wanted) and all(
        isinstance(x, str) or (size == x if isinstance(x, int) else size in x)
        for size, x in zip(shape, wanted, strict=True)
    )


def is_tensor(x: Any) -> bool:
    """Whether `x` is a torch tensor."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    return tensor is not None and isinstance(x, tensor)


def store(target: Any, place: Any, values: NDArray[Any]) -> None:
    """`target[place] = values` for a tensor or NumPy array, converted to its dtype."""
    if not is_tensor(target):
        target[place] = values
        return
    torch = sys.modules["torch"]
    with torch.no_grad():
        target[place] = torch.from_numpy(np.ascontiguousarray(values)).to(target.dtype)
