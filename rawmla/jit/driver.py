"""The CUDA driver through ctypes: the few calls that rawmla needs, and the devices of this machine.

ctypes rather than cuda-bindings, because a launch then costs one foreign call on memory prepared beforehand
instead of a configuration object built per call.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rawmla.errors import LaunchError, NoGPUError

NO_DEVICE = -1
"""Given as a device, it makes a call stop where it needs one, with `DeviceNeeded`: arguments are checked."""


class DeviceNeeded(Exception):
    """A call on `NO_DEVICE` has checked its arguments."""


_ATTRIBUTE_SM_COUNT = 16
_ATTRIBUTE_CC_MAJOR = 75
_ATTRIBUTE_CC_MINOR = 76
_CUDA_NO_DEVICE = 100
_INVALID_CONTEXT = 201


def aligned_buffer(size: int, align: int) -> tuple[Any, int]:
    """Zeroed ctypes memory of ``size`` bytes, and its address, a multiple of ``align``."""
    raw = (ctypes.c_char * (size + align))()
    view = (ctypes.c_char * size).from_buffer(raw, -ctypes.addressof(raw) % align)
    return view, ctypes.addressof(view)


@dataclass(frozen=True)
class DeviceInfo:
    """One GPU: ``name``, number of multiprocessors ``sm_count``, ``compute_capability`` (major, minor)."""

    name: str
    sm_count: int
    compute_capability: tuple[int, int]


class Driver:
    """An initialised driver library.

    ``library`` is the ctypes handle; calls on a hot path use its functions directly, with ctypes objects
    prepared beforehand. All others go through `call`, which checks the result.
    """

    def __init__(self, library: Any) -> None:
        self.library = library
        self._contexts: dict[int, int] = {}
        self._mutex = threading.Lock()

    def error_text(self, code: int) -> str:
        """Name and explanation of a driver result code."""
        texts = []
        for function in ("cuGetErrorName", "cuGetErrorString"):
            text = ctypes.c_char_p()
            getattr(self.library, function)(ctypes.c_int(code), ctypes.byref(text))
            texts.append(text.value.decode() if text.value else f"error {code}")
        return f"{texts[0]} ({texts[1]})"

    def call(self, function: str, *arguments: Any) -> None:
        """Call ``function`` with ctypes values; raises `LaunchError` with the driver's words if it fails."""
        self._check(function, getattr(self.library, function)(*arguments))

    def call_in_any_context(self, function: str, *arguments: Any) -> None:
        """`call` of a function that needs a context, whichever it is.

        A thread may have none although kernels are loaded: torch's threads of autograd begin so.
        """
        code = getattr(self.library, function)(*arguments)
        if code == _INVALID_CONTEXT and self._contexts:
            with self.in_context(next(iter(self._contexts.values()))):
                code = getattr(self.library, function)(*arguments)
        self._check(function, code)

    def _check(self, function: str, code: int) -> None:
        if code != 0:
            raise LaunchError(f"{function}: {self.error_text(code)}")

    @contextmanager
    def in_context(self, context: int) -> Iterator[None]:
        """Make ``context`` current in this thread, and the previous one again afterwards."""
        self.call("cuCtxPushCurrent_v2", ctypes.c_void_p(context))
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def is_current(self, context: int) -> bool:
        """Whether ``context`` is current in this thread."""
        current = ctypes.c_void_p()
        self.call("cuCtxGetCurrent", ctypes.byref(current))
        return current.value == context

    def has(self, function: str) -> bool:
        """Whether this driver version knows ``function``."""
        return hasattr(self.library, function)

    def version(self) -> tuple[int, int]:
        """Newest CUDA version that the driver supports."""
        value = ctypes.c_int()
        self.call("cuDriverGetVersion", ctypes.byref(value))
        return value.value // 1000, value.value % 1000 // 10

    def device_count(self) -> int:
        """Number of visible devices."""
        value = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(value))
        return value.value

    def device_info(self, device: int) -> DeviceInfo:
        """Properties of device ordinal ``device``. Raises ``ValueError`` if there is no such device."""
        handle = self._handle(device)
        name = ctypes.create_string_buffer(256)
        self.call("cuDeviceGetName", name, ctypes.c_int(256), handle)
        values = []
        for attribute in (_ATTRIBUTE_SM_COUNT, _ATTRIBUTE_CC_MAJOR, _ATTRIBUTE_CC_MINOR):
            value = ctypes.c_int()
            self.call("cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(attribute), handle)
            values.append(value.value)
        return DeviceInfo(name.value.decode(), values[0], (values[1], values[2]))

    def primary_context(self, device: int) -> int:
        """Handle of the primary context, the one that torch and CuPy use; retained once for the process."""
        context = self._contexts.get(device)
        if context is not None:
            return context
        with self._mutex:
            context = self._contexts.get(device)
            if context is None:
                handle = ctypes.c_void_p()
                self.call("cuDevicePrimaryCtxRetain", ctypes.byref(handle), self._handle(device))
                context = self._contexts[device] = int(handle.value or 0)
            return context

    def _handle(self, device: int) -> ctypes.c_int:
        count = self.device_count()
        if not 0 <= device < count:
            raise ValueError(
                f"device: expected an ordinal below {count}, the number of devices, got {device}"
            )
        handle = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(handle), ctypes.c_int(device))
        return handle


@functools.lru_cache(maxsize=1)
def get_driver() -> Driver:
    """The driver of this machine, initialised. Raises `NoGPUError` if there is none or it has no device."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise NoGPUError(
            f"the NVIDIA driver was not found ({error}). Kernels can be compiled here with `python -m rawmla "
            "compile`, but running them needs a Hopper GPU; a container has to be given access to it."
        ) from None
    driver = Driver(library)
    code = library.cuInit(ctypes.c_uint(0))
    if code != 0 or driver.device_count() == 0:
        reason = driver.error_text(code if code != 0 else _CUDA_NO_DEVICE)
        raise NoGPUError(
            f"the NVIDIA driver offers no device: {reason}. Is CUDA_VISIBLE_DEVICES set as meant?"
        )
    return driver


@functools.lru_cache(maxsize=64)
def device_info(device: int) -> DeviceInfo:
    """Name, SM count and compute capability of a device ordinal; cached.

    Raises `NoGPUError` without a driver or device and ``ValueError`` for an ordinal out of range.
    """
    if device == NO_DEVICE:
        raise DeviceNeeded
    return get_driver().device_info(device)


def current_device() -> int:
    """Ordinal of the device whose context is current in this thread; 0 when none is."""
    driver = get_driver()
    value = ctypes.c_int()
    code = driver.library.cuCtxGetDevice(ctypes.byref(value))
    if code == _INVALID_CONTEXT:
        return 0
    if code != 0:
        raise LaunchError(f"cuCtxGetDevice: {driver.error_text(code)}")
    return value.value
