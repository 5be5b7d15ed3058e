"""The emulated device: kernels, tensor maps, and torch CPU tensors in the place of CUDA tensors."""

from __future__ import annotations

import contextlib
import ctypes
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from rawmla import jit
from rawmla.call import arrays, frameworks, memo
from rawmla.jit.driver import DeviceInfo, aligned_buffer
from rawmla.jit.table import BoundedTable
from rawmla.kernels import mha_forward_variants

from .build import build_kernel, build_machine

_REPORT_BYTES = 1 << 16
_PARAMS_ALIGN = 128
_POISON = 0xFF  # NaN in every float type


class EmulationError(Exception):
    """A kernel did what the machine refuses, or it cannot end; the text says which threads, and where."""


class Emulator:
    """One emulated device.

    Attributes
    ----------
    folder : Path
        Where kernels are built, and found again.
    seed : int
        Decides in which order threads run and copies land. Launches differ from each other all the same.
    sm_count : int
        CTAs that run together, and what the host side sees as the multiprocessors.
    launched : list of str
        Labels of the kernels that ran, in order.
    kernels : dict
        By its specification, every variant that was loaded.
    """

    def __init__(self, folder: Path, seed: int = 1, sm_count: int = 4) -> None:
        self.folder = folder
        self.seed = seed
        self.sm_count = sm_count
        self.launched: list[str] = []
        self._launch = ctypes.CDLL(str(build_machine(folder))).emulator_launch
        self.kernels: dict[jit.KernelSpec, EmulatedKernel] = {}

    def get_kernel(
        self, spec: jit.KernelSpec, device: int, *, capturing: Callable[[], bool] | None = None
    ) -> EmulatedKernel:
        """In place of `rawmla.jit.get_kernel`."""
        if spec not in self.kernels:
            self.kernels[spec] = EmulatedKernel(self, spec, build_kernel(spec, self.folder))
        return self.kernels[spec]

    def run(
        self,
        spec: jit.KernelSpec,
        library: ctypes.CDLL,
        grid: tuple[int, int, int],
        params: bytes,
        cluster: tuple[int, int, int] | None = None,
    ) -> None:
        """Launch a kernel and wait for its end."""
        cluster = cluster or (1, 1, 1)
        if any(extent % size for extent, size in zip(grid, cluster, strict=True)):
            raise ValueError(f"grid: expected multiples of the cluster {cluster}, got {grid}")
        expected = library.emulator_param_bytes()
        if len(params) != expected:
            raise ValueError(f"params: expected {expected} bytes, got {len(params)}")
        memory, address = aligned_buffer(len(params), _PARAMS_ALIGN)
        memory[:] = params
        report = ctypes.create_string_buffer(_REPORT_BYTES)
        failed = self._launch(
            library.emulator_entry,
            (ctypes.c_uint * 3)(*grid),
            (ctypes.c_uint * 3)(*cluster),
            ctypes.c_int(spec.threads),
            ctypes.c_int(spec.smem_bytes),
            ctypes.c_int(self.sm_count),
            ctypes.c_uint(self.seed * 10_007 + len(self.launched)),
            ctypes.c_void_p(address),
            report,
            ctypes.c_int(_REPORT_BYTES),
        )
        self.launched.append(spec.label)
        if failed:
            raise EmulationError(f"{spec.label}, grid {grid}, seed {self.seed}: {report.value.decode()}")

    @contextlib.contextmanager
    def installed(self) -> Iterator[Emulator]:
        """Inside, rawmla runs here: torch CPU tensors are arrays of device 0. Nothing of it remains after."""
        import torch

        with contextlib.ExitStack() as stack:
            for name, value in {
                "build": lambda spec: SimpleNamespace(losses=[], meta={"spill_stores": 0}),
                "clear": _clear,
                "current_device": lambda: 0,
                "device_info": lambda device: DeviceInfo("emulated", self.sm_count, (9, 0)),
                "get_kernel": self.get_kernel,
                "require_supported": lambda device: None,
                "tensor_map": tensor_map,
            }.items():
                stack.enter_context(mock.patch.object(jit, name, value))
            # What is kept between calls has kernels in it, or arrays' frameworks.
            stack.enter_context(mock.patch.object(mha_forward_variants, "_slow", BoundedTable(64)))
            stack.enter_context(mock.patch.dict(arrays._frameworks, {"torch": HostTensors(torch)}))
            stack.enter_context(mock.patch.dict(arrays.READERS, clear=True))
            # Without it, block masks would be made with CuPy where torch was built without CUDA.
            stack.enter_context(mock.patch.object(torch.backends.cuda, "is_built", lambda: True))
            memo.clear_all()
            stack.callback(memo.clear_all)
            yield self


class EmulatedKernel:
    """In place of `rawmla.jit.Kernel`."""

    def __init__(self, emulator: Emulator, spec: jit.KernelSpec, library: ctypes.CDLL) -> None:
        self._emulator = emulator
        self._library = library
        self.spec = spec
        self.device = 0

    def launch(
        self,
        grid: tuple[int, int, int],
        params: bytes,
        stream: int,
        *,
        cluster: tuple[int, int, int] | None = None,
        pdl: bool = False,
    ) -> None:
        """Run the kernel to its end, unless the stream is `NO_LAUNCH`."""
        if stream == jit.NO_LAUNCH:
            return
        self._emulator.run(self.spec, self._library, grid, params, cluster)

    def prepare(
        self,
        grid: tuple[int, int, int],
        params: bytes,
        changing: struct.Struct,
        then: tuple[EmulatedKernel, tuple[int, int, int]] | None = None,
        **options: Any,
    ) -> SimpleNamespace:
        """See `rawmla.jit.Kernel.prepare`."""

        def launch(stream: int, *members: Any, **context: Any) -> None:
            packed = bytearray(params)
            changing.pack_into(packed, 0, *members)
            self.launch(grid, bytes(packed), stream, **options)
            if then is not None:
                kernel, its_grid = then
                kernel.launch(its_grid, bytes(packed), stream)

        return SimpleNamespace(launch=launch)


_ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "uint8": 1}
_SWIZZLE_BYTES = {"none": 0, "32b": 32, "128b": 128}
_MAP = struct.Struct("<Q4Q5I5H3B")  # TensorMap of cuda/copies.cpp


def tensor_map(
    ptr: int,
    dtype: str,
    dims: tuple[int, ...],
    strides_bytes: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: str,
    l2_promotion: str,
) -> bytes:
    """In place of `rawmla.jit.tensor_map`, with the driver's conditions."""
    rank, element, swizzled = len(dims), _ELEMENT_BYTES[dtype], _SWIZZLE_BYTES[swizzle]
    good = (
        1 <= rank <= 5 and len(strides_bytes) == rank - 1 and len(box) == rank
        and ptr % 16 == 0 and all(stride % 16 == 0 and 0 <= stride < 2**40 for stride in strides_bytes)
        and all(1 <= extent <= 2**32 for extent in dims) and all(1 <= extent <= 256 for extent in box)
        and box[0] * element % 16 == 0 and (not swizzled or box[0] * element <= swizzled)
    )  # fmt: skip
    if not good:
        raise EmulationError(f"tensor_map: {ptr=:#x} {dtype=} {dims=} {strides_bytes=} {box=} {swizzle=}")

    def filled(values: tuple[int, ...], count: int) -> list[int]:
        return [*values, *[0] * (count - len(values))]

    packed = _MAP.pack(
        ptr, *filled(strides_bytes, 4), *filled(dims, 5), *filled(box, 5), rank, element, swizzled
    )
    return packed.ljust(jit.TENSOR_MAP_BYTES, b"\0")


def _clear(address: int, size: int, stream: int, device: int) -> None:
    """In place of `rawmla.jit.clear`."""
    if stream != jit.NO_LAUNCH:
        ctypes.memset(address, 0, size)


class _OnDevice:
    """A CPU tensor that says it is on device 0."""

    is_cuda = True

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensor, name)

    def get_device(self) -> int:
        return 0


class HostTensors(frameworks.TorchFramework):
    """torch, with CPU tensors on device 0. What the library allocates is poison until it is written."""

    def __init__(self, torch: Any) -> None:
        super().__init__(torch)
        self._empty_strided = self._poisoned
        self._current_device = lambda: 0
        self.current_stream = lambda device: 0

    def read(self, x: Any, name: str) -> frameworks.Fields:
        """See `TorchFramework.read`."""
        *fields, _ = super().read(_OnDevice(x), name)
        return (*fields, x)

    def is_capturing(self, device: int) -> bool:
        """Never."""
        return False

    def _poisoned(self, shape: Any, strides: Any, dtype: Any) -> Any:
        steps = zip(shape, strides, strict=True)
        elements = 0 if 0 in shape else 1 + sum((n - 1) * step for n, step in steps)
        return self.memory(elements * dtype.itemsize).view(dtype).as_strided(shape, strides)

    def memory(self, size: int) -> Any:
        """Bytes for an array, aligned as allocators of CUDA memory do."""
        whole = self._torch.full((size + 256,), _POISON, dtype=self._torch.uint8)
        first = -whole.data_ptr() % 256
        return whole[first : first + size]
