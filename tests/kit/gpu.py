"""Is there a GPU here that the kernels run on? Answered without importing torch or CuPy."""

from __future__ import annotations

import ctypes
import importlib.util
from functools import cache

_ATTRIBUTE_MAJOR = 75  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
_ATTRIBUTE_MINOR = 76
_DRIVER_NAMES = ("libcuda.so.1", "nvcuda.dll")


@cache
def missing_hopper_reason() -> str | None:
    """Why the GPU tests cannot run here, or None when they can: driver, device 0 of compute capability 9.0,
    torch, CuPy.

    Costs a driver initialisation, and nothing on a machine without a driver.
    """
    driver = _open_driver()
    if driver is None:
        return "no NVIDIA driver on this machine"
    status = driver.cuInit(0)
    if status != 0:
        return f"the NVIDIA driver does not start (cuInit returned {status})"
    count = ctypes.c_int(0)
    status = driver.cuDeviceGetCount(ctypes.byref(count))
    if status != 0 or count.value == 0:
        return "no NVIDIA GPU on this machine"
    major, minor = (_attribute(driver, attribute) for attribute in (_ATTRIBUTE_MAJOR, _ATTRIBUTE_MINOR))
    if (major, minor) != (9, 0):
        return f"device 0 has compute capability {major}.{minor}, the kernels need 9.0 (Hopper)"
    missing = [name for name in ("torch", "cupy") if importlib.util.find_spec(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    return None


def _open_driver() -> ctypes.CDLL | None:
    for name in _DRIVER_NAMES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def _attribute(driver: ctypes.CDLL, attribute: int) -> int:
    value = ctypes.c_int(0)
    driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, 0)
    return value.value
