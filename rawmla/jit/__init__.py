"""Compiles, caches, loads and launches the CUDA kernels.

Importing this package is cheap: CuPy, cuda-bindings and the driver are touched when a function needs them.
"""

from __future__ import annotations

from rawmla.jit.builder import Builder, CompiledKernel, build, default_builder, export
from rawmla.jit.cache import DiskCache
from rawmla.jit.driver import NO_DEVICE, DeviceInfo, DeviceNeeded, current_device, device_info
from rawmla.jit.launch import NO_LAUNCH, Kernel, PreparedLaunch, clear
from rawmla.jit.loading import get_kernel, require_supported
from rawmla.jit.spec import KernelSpec
from rawmla.jit.tensormap import TENSOR_MAP_BYTES, tensor_map

__all__ = [
    "NO_DEVICE",
    "NO_LAUNCH",
    "TENSOR_MAP_BYTES",
    "Builder",
    "CompiledKernel",
    "DeviceInfo",
    "DeviceNeeded",
    "DiskCache",
    "Kernel",
    "KernelSpec",
    "PreparedLaunch",
    "build",
    "clear",
    "current_device",
    "default_builder",
    "device_info",
    "export",
    "get_kernel",
    "require_supported",
    "tensor_map",
]
