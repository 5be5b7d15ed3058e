"""torch and CuPy, as calls use them: to read an array, to allocate, to copy, to find the stream.

Neither framework is imported here: whoever makes one of these classes passes the module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache, partial
from math import prod
from operator import attrgetter
from typing import Any, Protocol

WITH_BACKWARD = (
    "What has a backward: q, k, v and attn_sink of flash_attn_func, flash_attn_varlen_func and its packed "
    "forms; query, key, value and what score_mod reads, of flex_attention"
)
"""The functions with a graph of autograd, for the texts of errors."""

_ALLOCATION_ALIGNMENT = 256  # bytes; what every CUDA allocator gives


NewArray = tuple[tuple[int, ...], str] | tuple[tuple[int, ...], str, tuple[int, ...]]
"""Shape and dtype of an array to be made, and its strides in elements unless it is contiguous."""


class Framework(Protocol):
    """What a call needs of the framework of its arrays.

    `device` is a CUDA ordinal, `dtype` a name such as "bfloat16".
    """

    name: str

    def empty(self, shape: tuple[int, ...], dtype: str, device: int) -> Any:
        """A new contiguous array from the framework's allocator on its current stream, not filled."""

    def allocator(
        self, arrays: Sequence[NewArray], scratch_bytes: int, device: int
    ) -> Callable[[], list[Any]]:
        """A function that makes these arrays as `empty` does, and scratch after the last.

        The scratch, an array of `scratch_bytes` bytes, stays valid for as long as a graph captured then may
        run. It is None when there are none. Calls that repeat keep the function: it is faster than `empty`.
        """

    def contiguous_copy(self, array: Any, name: str) -> Any:
        """A contiguous copy of the argument `name`, made on the framework's current stream."""

    def aligned_copy(self, array: Any, name: str, dtype: str | None = None) -> Any:
        """A copy of the argument `name` with `aligned_strides`, made on the framework's current stream, in
        another dtype if one is named.
        """

    def fill(self, array: Any, value: float) -> None:
        """Set every element, on the framework's current stream."""

    def pointer(self, array: Any) -> int:
        """Device address of the first element."""

    def current_stream(self, device: int) -> int:
        """Handle of the framework's current stream on `device`."""

    def is_capturing(self, device: int) -> bool:
        """Whether that stream is being captured into a CUDA graph."""

    def capture_query(self, device: int) -> Callable[[], bool]:
        """`is_capturing(device)` as a function of no arguments, to be asked only where the answer matters."""

    def kind_check(self, arrays: Sequence[Any]) -> Callable[[Sequence[Any]], bool] | None:
        """Return a function of as many arrays with addresses, which takes a fifth of a reader's time.

        Where it returns True, a reader gives the fields that it gives of these, apart from addresses and
        arrays. It may return False of such arrays, too. None: there is no such function.
        """

    def determinism(self) -> bool:
        """Whether the framework as a whole is set to give the same bits always."""


Fields = tuple[int, tuple[int, ...], tuple[int, ...], str, int, Framework, Any]
"""The fields of an `ArrayView` without the names: what readers return, at four fifths of the time."""


@lru_cache
def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """In elements."""
    return tuple(prod(max(1, size) for size in shape[axis + 1 :]) for axis in range(len(shape)))


@lru_cache
def aligned_strides(shape: tuple[int, ...], multiple: int = 8) -> tuple[int, ...]:
    """Strides in elements of an array whose rows are padded to ``multiple``, and which else is contiguous."""
    return (*contiguous_strides((*shape[:-1], _aligned(shape[-1], multiple)))[:-1], 1)


def _aligned(columns: int, multiple: int = 8) -> int:
    return -(-columns // multiple) * multiple


def _with_strides(array: NewArray) -> tuple[tuple[int, ...], str, tuple[int, ...]]:
    return array if len(array) == 3 else (*array, contiguous_strides(array[0]))


class _Queries(dict[int, Callable[[], bool]]):
    """The functions that `Framework.capture_query` gives, one for each device."""

    def __init__(self, framework: Framework) -> None:
        self._is_capturing = framework.is_capturing

    def __missing__(self, device: int) -> Callable[[], bool]:
        query = self[device] = partial(self._is_capturing, device)
        return query


class TorchFramework:
    """torch: its caching allocator, its current stream per device, its graph-private pools.

    `Framework` documents the methods.
    """

    name = "torch"

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self.capture_query = _Queries(self).__getitem__
        self._name_of_dtype: dict[Any, str] = {
            dtype: str(dtype).removeprefix("torch.")
            for dtype in vars(torch).values()
            if isinstance(dtype, torch.dtype)
        }
        self._dtype_of_name = {name: dtype for dtype, name in self._name_of_dtype.items()}
        # What compiled torch programs allocate with: on the current device only, and faster than torch.empty.
        guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
        self._empty_strided = getattr(guards, "_empty_strided_cuda", None)
        self._guards = getattr(guards, "TensorGuards", None)
        self._current_device = getattr(torch._C, "_cuda_getDevice", None) or torch.cuda.current_device
        self._is_grad_enabled: Callable[[], bool] = torch.is_grad_enabled
        self._is_nested = attrgetter("is_nested")
        # torch.cuda.current_stream builds a Stream object (1 us); a launch needs no more than the raw handle.
        raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        self.current_stream: Callable[[int], int] = raw_stream or (
            lambda device: int(torch.cuda.current_stream(device).cuda_stream)
        )
        self.pointer: Callable[[Any], int] = torch.Tensor.data_ptr

    def read(self, x: Any, name: str) -> Fields:
        """Fields of a torch tensor; `name` is the argument's, for the error text."""
        try:
            if not x.is_cuda:
                raise ValueError(
                    f"{name}: expected a tensor in CUDA memory, got a torch tensor on device {x.device}"
                )
            ptr, shape = x.data_ptr(), x.shape
            strides = x.stride()
            is_negative = x.is_neg()
        except RuntimeError as error:  # sparse and nested tensors have no strides or no memory of their own
            raise TypeError(
                f"{name}: expected a dense torch tensor with memory, got {type(x).__name__} ({error})"
            ) from error
        if not ptr:
            refuse_no_memory(name, x, shape)
        if is_negative:
            raise ValueError(
                f"{name}: expected a tensor whose values are what its memory holds, got one with torch's "
                "negative bit, as the imaginary part of a conjugate has; pass tensor.resolve_neg()"
            )
        if x.requires_grad and self._is_grad_enabled():
            raise ValueError(
                f"{name}: expected a tensor that needs no gradient here, got requires_grad=True with grad "
                "enabled; pass a detached tensor, or call the function under torch.no_grad(). "
                f"{WITH_BACKWARD}"
            )
        return ptr, shape, strides, self._name_of_dtype[x.dtype], x.get_device(), self, x

    def kind_check(self, tensors: Sequence[Any]) -> Callable[[Sequence[Any]], bool] | None:
        """See `Framework.kind_check`: by such functions torch.compile's programs know their inputs again.

        There is none where a tensor requires grad: the function does not see whether grad is enabled.
        """
        if self._guards is None or any([x.requires_grad for x in tensors]):
            return None
        sizes, strides = [[*x.shape] for x in tensors], [[*x.stride()] for x in tensors]
        try:
            check = self._guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
            if not check(*tensors):
                return None
        except (TypeError, RuntimeError):  # another torch's class of this name, or one tensor given twice
            return None
        is_nested = self._is_nested
        # A nested tensor has the class and the address of others, but ends the process in torch's function.
        return lambda others: not any(map(is_nested, others)) and check(*others)

    def empty(self, shape: tuple[int, ...], dtype: str, device: int) -> Any:
        torch_dtype = self._dtype_of_name[dtype]
        if self._empty_strided is not None and self._current_device() == device:
            return self._empty_strided(shape, contiguous_strides(shape), torch_dtype)
        return self._torch.empty(shape, dtype=torch_dtype, device=self._torch.device("cuda", device))

    def allocator(
        self, arrays: Sequence[NewArray], scratch_bytes: int, device: int
    ) -> Callable[[], list[Any]]:
        """See `Framework.allocator`; torch keeps what a capture allocates in a pool of the graph."""
        scratch: list[NewArray] = [((scratch_bytes,), "uint8")] if scratch_bytes else []
        wanted = [
            (shape, strides, self._dtype_of_name[dtype])
            for shape, dtype, strides in map(_with_strides, [*arrays, *scratch])
        ]
        empty_strided, current_device = self._empty_strided, self._current_device

        def allocate() -> list[Any]:
            if empty_strided is not None and current_device() == device:
                made = [empty_strided(*array) for array in wanted]
            else:
                place = self._torch.device("cuda", device)
                made = [
                    self._torch.empty_strided(shape, strides, dtype=dtype, device=place)
                    for shape, strides, dtype in wanted
                ]
            return made if scratch_bytes else [*made, None]

        return allocate

    def contiguous_copy(self, array: Any, name: str) -> Any:
        """See `Framework.contiguous_copy`; not part of any autograd graph."""
        return array.detach().clone(memory_format=self._torch.contiguous_format)

    def aligned_copy(self, array: Any, name: str, dtype: str | None = None) -> Any:
        """See `Framework.aligned_copy`; not part of any autograd graph."""
        *sizes, columns = array.shape
        wanted = array.dtype if dtype is None else self._dtype_of_name[dtype]
        copy = array.new_empty((*sizes, _aligned(columns)), dtype=wanted)[..., :columns]
        return copy.copy_(array.detach())

    def fill(self, array: Any, value: float) -> None:
        array.fill_(value)

    def is_capturing(self, device: int) -> bool:
        cuda = self._torch.cuda
        with cuda.device(device):
            return bool(cuda.is_current_stream_capturing())

    def determinism(self) -> bool:
        """See `Framework.determinism`; torch.use_deterministic_algorithms sets it."""
        return bool(self._torch.are_deterministic_algorithms_enabled())


class CupyFramework:
    """CuPy: its memory pool and its current stream per device. `Framework` documents the methods.

    The pool has no notion of a graph: memory that is freed after a capture may be handed to somebody else
    while the graph still writes to it. Scratch of a captured call is therefore part of the allocation of
    one of the call's outputs, or never freed where the call allocates none.
    """

    name = "cupy"

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self.capture_query = _Queries(self).__getitem__
        self._get_device = cupy.cuda.runtime.getDevice
        self._get_stream = cupy.cuda.get_current_stream
        self._name_of_dtype: dict[Any, str] = {}
        self._dtype_of_name: dict[str, Any] = {}
        self._kept: list[Any] = []

    def read(self, x: Any, name: str) -> Fields:
        """Fields of a CuPy array; `name` is the argument's, for the error text."""
        dtype = x.dtype
        dtype_name = self._name_of_dtype.get(dtype)
        if dtype_name is None:
            dtype_name = self._name_of_dtype[dtype] = dtype.name
        itemsize = x.itemsize
        strides = x.strides
        for stride in strides:
            if stride % itemsize:
                raise ValueError(
                    f"{name}: expected strides that are multiples of the element ({itemsize} bytes), "
                    f"got {strides} bytes"
                )
        data = x.data
        element_strides = tuple([stride // itemsize for stride in strides])
        if not data.ptr:
            refuse_no_memory(name, x, x.shape)
        return data.ptr, x.shape, element_strides, dtype_name, data.device_id, self, x

    def take(self, x: Any, name: str) -> Fields:
        """Fields of another library's DLPack array: no copy, and ordered after the work of that library."""
        return self.read(self._cupy.from_dlpack(x), name)

    def empty(self, shape: tuple[int, ...], dtype: str, device: int) -> Any:
        if self._get_device() == device:
            return self._cupy.empty(shape, self._dtype(dtype))
        with self._on(device):
            return self._cupy.empty(shape, self._dtype(dtype))

    def allocator(
        self, arrays: Sequence[NewArray], scratch_bytes: int, device: int
    ) -> Callable[[], list[Any]]:
        """See `Framework.allocator`; in a capture the scratch lives as long as the last array does."""
        arrays = tuple(arrays)

        def make(array: NewArray, more_bytes: int = 0) -> tuple[Any, Any]:
            """Make the array, and a view of ``more_bytes`` further bytes of its allocation."""
            if len(array) == 2 and not more_bytes:
                return self.empty(*array, device), None
            shape, dtype_name, strides = _with_strides(array)
            dtype = self._dtype(dtype_name)
            reach = sum([(extent - 1) * stride for extent, stride in zip(shape, strides, strict=True)])
            size = (reach + 1) * dtype.itemsize if prod(shape) else 0
            start = -(-size // _ALLOCATION_ALIGNMENT) * _ALLOCATION_ALIGNMENT
            buffer = self.empty((start + more_bytes,), "uint8", device)
            steps = [stride * dtype.itemsize for stride in strides]
            return self._cupy.ndarray(shape, dtype, memptr=buffer.data, strides=steps), buffer[start:]

        def allocate() -> list[Any]:
            in_capture = scratch_bytes > 0 and self.is_capturing(device)
            if in_capture and arrays:
                return [*[make(array)[0] for array in arrays[:-1]], *make(arrays[-1], scratch_bytes)]
            made = [make(array)[0] for array in arrays]
            scratch = self.empty((scratch_bytes,), "uint8", device) if scratch_bytes else None
            if in_capture:
                self._kept.append(scratch)  # nothing says when the graph that uses it is gone
            return [*made, scratch]

        return allocate

    def kind_check(self, tensors: Sequence[Any]) -> None:
        """See `Framework.kind_check`; CuPy has none."""

    def contiguous_copy(self, array: Any, name: str) -> Any:
        with self._copying(array, name):
            return array.copy(order="C")

    def aligned_copy(self, array: Any, name: str, dtype: str | None = None) -> Any:
        *sizes, columns = array.shape
        wanted = array.dtype if dtype is None else self._dtype(dtype)
        with self._copying(array, name, dtype):
            copy = self._cupy.empty((*sizes, _aligned(columns)), wanted)[..., :columns]
            copy[...] = array
        return copy

    def _copying(self, array: Any, name: str, dtype: str | None = None) -> AbstractContextManager[Any]:
        """Work on the device of an argument that is copied, perhaps to another dtype."""
        device: int = array.data.device_id
        if self.is_capturing(device):
            usable = f"an array of {dtype} whose last dimension is contiguous"
            if dtype is None:
                usable = (
                    "a 16-byte aligned array whose last dimension is contiguous and whose other strides are "
                    "positive multiples of 8 elements"
                )
            raise ValueError(
                f"{name}: expected, inside a CUDA-graph capture of CuPy arrays, {usable} (a copy made now "
                f"would not outlive the capture), got {array.dtype}, address {array.data.ptr:#x}, strides "
                f"{array.strides} bytes"
            )
        return self._on(device)

    def fill(self, array: Any, value: float) -> None:
        with self._on(array.data.device_id):
            array.fill(value)

    def pointer(self, array: Any) -> int:
        return int(array.data.ptr)

    def current_stream(self, device: int) -> int:
        return int(self._get_stream(device).ptr)

    def is_capturing(self, device: int) -> bool:
        return bool(self._get_stream(device).is_capturing())

    def determinism(self) -> bool:
        """See `Framework.determinism`; CuPy has no such switch."""
        return False

    def _on(self, device: int) -> AbstractContextManager[Any]:
        return self._cupy.cuda.Device(device)

    def _dtype(self, name: str) -> Any:
        dtype = self._dtype_of_name.get(name)
        if dtype is None:
            kind: Any = name
            if name == "bfloat16":
                import ml_dtypes  # a bfloat16 CuPy array exists, so this is installed

                kind = ml_dtypes.bfloat16
            dtype = self._dtype_of_name[name] = self._cupy.dtype(kind)
        return dtype


def refuse_no_memory(name: str, x: Any, shape: tuple[int, ...]) -> None:
    """Raise for an array with elements at address 0."""
    if prod(shape):
        raise TypeError(
            f"{name}: expected an array with memory of its own, got {class_name(x)} of shape {list(shape)} "
            "at address 0"
        )


def class_name(x: Any) -> str:
    cls = type(x)
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
