"""Arrays of the caller's framework, seen as pointers, shapes and strides.

Only this module and `frameworks` know torch, CuPy and DLPack. Neither framework is imported for somebody who
does not use it: torch and CuPy are looked up in `sys.modules`, where the module of any array that reaches us
already is. A DLPack array of another library is taken over by CuPy
without a copy, so results computed from such a `q` are CuPy arrays.

Reading an array is on the path of every call (about half a microsecond each for torch), hence a table from
the array's class to a reader function, plain tuples, and no work that only a failure needs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from ..errors import INSTALL_HINT, MissingDependencyError
from . import tracing
from .frameworks import CupyFramework, Fields, Framework, TorchFramework, class_name

_DLPACK_CPU = 1  # kDLCPU
_DLPACK_CUDA = (2, 13)  # kDLCUDA, kDLCUDAManaged


class ArrayView(NamedTuple):
    """One array argument: strides in elements, dtype by name, CUDA ordinal, and the array that owns it."""

    ptr: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: int
    framework: Framework
    array: Any


Reader = Callable[[Any, str], Fields]


class _Readers(dict[type, Reader]):
    """Class of an array -> the function that reads it; filled in as classes are met."""

    def __missing__(self, cls: type) -> Reader:
        reader = _find_reader(cls)
        if reader is None:
            return _reject
        self[cls] = reader
        return reader


READERS = _Readers()
"""`READERS[type(x)](x, name)` is `inspect(x, name)` as a plain tuple, without a function call around it."""

_frameworks: dict[str, Any] = {}


def needs_gradient(*arrays: Any) -> bool:
    """Whether torch makes a graph of a call: grad is enabled, and one of these tensors requires it."""
    if not tracing.is_grad_enabled():
        return False
    for x in arrays:
        if getattr(x, "requires_grad", False):
            return True
    return False


def read_given(x: Any, name: str) -> Fields | None:
    """The fields of an optional argument; None if it was not given."""
    return None if x is None else READERS[type(x)](x, name)


def is_array(x: Any) -> bool:
    """Whether `x` is of a kind that `inspect` looks at."""
    return type(x) in READERS or _find_reader(type(x)) is not None


def address_of(view: Fields | None) -> int:
    """The address in the fields of an optional argument; 0 if it was not given."""
    return 0 if view is None else view[0]


def inspect(x: Any, name: str) -> ArrayView:
    """View of an array argument, whose ``name`` starts the text of every error.

    It is a torch CUDA tensor, a CuPy array, or any object with `__dlpack__` and `__dlpack_device__` in CUDA
    memory. A `TypeError` says that it is no such array, or a tensor without strides or memory. A `ValueError`
    says that it is not in CUDA memory, or that its memory holds its values with the other sign.
    """
    return ArrayView(*READERS[type(x)](x, name))


def _find_reader(cls: type) -> Reader | None:
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    if tensor is not None and issubclass(cls, tensor):
        is_plain = getattr(cls, "__torch_dispatch__", None) is tensor.__torch_dispatch__
        return _torch().read if is_plain else _refuse_subclass
    ndarray = getattr(sys.modules.get("cupy"), "ndarray", None)
    if ndarray is not None and issubclass(cls, ndarray):
        return _cupy().read
    if hasattr(cls, "__dlpack__") and hasattr(cls, "__dlpack_device__"):
        return _read_dlpack
    return None


def framework_named(name: Literal["torch", "cupy"]) -> Framework:
    """torch, which somebody has imported, or CuPy."""
    return _torch() if name == "torch" else _cupy()


def _torch() -> TorchFramework:
    if "torch" not in _frameworks:  # there is one, also where two threads come here together
        _frameworks.setdefault("torch", TorchFramework(sys.modules["torch"]))
        tracing.ask_torch()
    return _frameworks["torch"]


def _cupy() -> CupyFramework:
    if "cupy" not in _frameworks:
        import cupy

        _frameworks.setdefault("cupy", CupyFramework(cupy))
    return _frameworks["cupy"]


def _read_dlpack(x: Any, name: str) -> Fields:
    device_type = int(x.__dlpack_device__()[0])
    if device_type not in _DLPACK_CUDA:
        raise ValueError(
            f"{name}: expected an array in CUDA memory, got {class_name(x)} in "
            + ("CPU memory" if device_type == _DLPACK_CPU else f"memory of DLPack device type {device_type}")
        )
    try:
        framework = _cupy()
    except ImportError as error:
        raise MissingDependencyError(
            f"{name}: reading the DLPack array {class_name(x)} needs CuPy, which is not installed; "
            f"install it with {INSTALL_HINT}"
        ) from error
    return framework.take(x, name)


def _reject(x: Any, name: str) -> Fields:
    raise TypeError(
        f"{name}: expected a torch tensor, CuPy array or DLPack array in CUDA memory, got {class_name(x)}"
    )


def _refuse_subclass(x: Any, name: str) -> Fields:
    """Raise for a tensor whose class answers operators: its memory is not the numbers that it stands for."""
    remedy = "pass the plain tensor that it holds"
    if type(x).__name__ == "FakeTensor":
        remedy = "call under its FakeTensorMode, or call the operators of rawmla.torch_ops; flex attention "
        remedy += "takes no fake tensors"
    raise TypeError(f"{name}: expected a plain torch tensor, got {class_name(x)}; {remedy}")
