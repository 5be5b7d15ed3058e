"""Arrays of the caller, seen as NumPy arrays, and the checks that every function of the reference shares.

torch is looked up in `sys.modules`, where it is if an argument is a tensor: it is never imported here.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

BYTE_DTYPES = ("float8_e4m3fn", "uint8", "int8")
"""What a quantised cache may be an array of."""
E5M2_BYTE_DTYPES = ("float8_e5m2", "uint8", "int8")
"""The same for a cache of e5m2."""

INT_DTYPES = ("int32",)
FLOAT_DTYPES = ("bfloat16", "float16", "float32", "float64")
_SEEN_AS_BYTES = {*BYTE_DTYPES, *E5M2_BYTE_DTYPES}


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


def read(x: Any, name: str) -> Array:
    """The argument `name`: a torch CPU tensor, or whatever NumPy makes an array of."""
    if not is_tensor(x):
        values = _as_numpy(x, name)
        dtype = values.dtype.name
        return Array(values.view(np.uint8) if dtype in _SEEN_AS_BYTES else values, dtype, False)
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


def like(values: NDArray[Any], dtype: str, array: Array) -> Any:
    """A result in the caller's kind: a tensor of `dtype` where `array` is one, else `values` as they are."""
    if not array.is_torch:
        return values
    torch = sys.modules["torch"]
    return torch.from_numpy(np.ascontiguousarray(values)).to(getattr(torch, dtype))


def check_target(x: Any, name: str) -> None:
    """Check that an argument is an array that can be written to."""
    if not is_tensor(x) and not isinstance(x, np.ndarray):
        raise TypeError(f"{name}: expected a torch CPU tensor or a NumPy array, got {type(x).__name__}")


def check_dtype(name: str, array: Array, wanted: tuple[str, ...], note: str = "") -> None:
    """Check an array's dtype. One of NumPy may be of any float type where floats are `wanted`, of any integer
    type where integers are, and of either when it is empty: NumPy makes float64 of an empty list.
    """
    if array.dtype in wanted:
        return
    if not array.is_torch and "uint8" not in wanted:
        is_float = array.dtype in FLOAT_DTYPES
        if "int32" not in wanted and is_float:
            return
        if "int32" in wanted and (array.values.dtype.kind in "iu" or is_float and not array.values.size):
            return
    raise TypeError(f"{name}: expected dtype {' or '.join(wanted)}{note}, got {array.dtype}")


def check_vector(
    name: str, array: Array, length: int, meaning: str, wanted: tuple[str, ...] = INT_DTYPES
) -> None:
    """Check an array of one dimension; `meaning` says where its length comes from."""
    check_dtype(name, array, wanted)
    if array.shape != (length,):
        raise ValueError(f"{name}: expected shape [{length}] ({meaning}), got {list(array.shape)}")


def _as_numpy(x: Any, name: str) -> NDArray[Any]:
    try:
        values = np.asarray(x)
    except (TypeError, ValueError) as error:  # CuPy arrays and ragged lists
        raise TypeError(
            f"{name}: expected a torch CPU tensor or a NumPy array, got {type(x).__name__} ({error})"
        ) from error
    if values.dtype.hasobject:
        raise TypeError(f"{name}: expected a torch CPU tensor or a NumPy array, got {type(x).__name__}")
    return values
