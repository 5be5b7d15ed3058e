"""Kernels that are loaded: found again, or built and loaded."""

from __future__ import annotations

import ctypes
import threading
import warnings
from collections.abc import Callable

from rawmla.environment import warn_of_conflicts
from rawmla.errors import (
    INSTALL_HINT,
    KernelNotReadyError,
    LaunchError,
    MissingDependencyError,
    UnsupportedGPUError,
)
from rawmla.jit.builder import CompiledKernel, build
from rawmla.jit.driver import Driver, device_info, get_driver
from rawmla.jit.launch import Kernel, unload_unused
from rawmla.jit.spec import KernelSpec
from rawmla.jit.table import BoundedTable

_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8

# A captured graph needs the code of its kernels and does not hold it. Our own variants are few, and stay.
# Variants with user text have no end: those that a capture launched stay too. Of the others the least
# recently used go, unless a prepared launch holds them. Code that nobody holds is unloaded when the next
# kernel is loaded, which a capture does not allow either.
USER_KERNELS = 512
_kernels: dict[tuple[KernelSpec, int], Kernel] = {}
_user_kernels: BoundedTable[tuple[KernelSpec, int], Kernel] = BoundedTable(USER_KERNELS)
_captured: list[Kernel] = []  # a list: a variant that was dropped and loaded again is there twice
_warned: BoundedTable[KernelSpec, bool] = BoundedTable(USER_KERNELS)
_load_mutex = threading.Lock()


def get_kernel(spec: KernelSpec, device: int, *, capturing: Callable[[], bool] | None = None) -> Kernel:
    """The kernel loaded on ``device``: from this process (a dictionary lookup), else built and loaded.

    Of variants with user text the last `USER_KERNELS` stay loaded, all that were launched while a CUDA graph
    was captured, and others as long as somebody holds the kernel or a launch prepared from it. If such a
    variant, or one that may lose, spills, uses local memory or has serialised WGMMA, there is one
    ``RuntimeWarning`` for it.

    ``capturing`` says whether the caller's stream is being captured into a CUDA graph; nothing is compiled or
    loaded then. It is called only when the kernel is not loaded.

    Raises `KernelNotReadyError` if ``capturing()`` and this process has not loaded the kernel on this device
    yet; else `NoGPUError`, `UnsupportedGPUError`, `MissingDependencyError`, `NVRTCNotFoundError`,
    `CompileError` or `LaunchError`, whose texts have the remedy.
    """
    kernel = _loaded(spec, device)
    if kernel is not None:
        return kernel
    if capturing is not None and capturing():
        raise KernelNotReadyError(
            f"kernel {spec.label} is not loaded on device {device} yet, and nothing can be compiled or "
            "loaded while a CUDA graph is captured: before the capture, call `rawmla.warmup` or, with the "
            "arguments of the call, `rawmla.warmup_call`, or the function itself once"
        )
    with _load_mutex:
        kernel = _loaded(spec, device)
        if kernel is None:
            require_supported(device)
            compiled = build(spec)
            unload_unused()
            kernel = _load(compiled, device)
            table = _user_kernels if spec.user_text else _kernels
            table[(spec, device)] = kernel
            _warn_of_losses(compiled)
        return kernel


def _loaded(spec: KernelSpec, device: int) -> Kernel | None:
    kernel = _kernels.get((spec, device))
    return _user_kernels.get((spec, device)) if kernel is None and spec.user_text else kernel


def loaded_labels() -> list[str]:
    """Labels of our own kernels that this process has loaded, on any device."""
    return sorted({spec.label for spec, _ in list(_kernels) if not spec.user_text})


def _warn_of_losses(compiled: CompiledKernel) -> None:
    losses = compiled.losses
    if losses and _warned.get(compiled.spec) is None:
        _warned[compiled.spec] = True
        text = f"rawmla: {compiled.spec.label} runs slower than it could: {'; '.join(losses)}"
        warnings.warn(text, RuntimeWarning, stacklevel=3)


def require_supported(device: int) -> None:
    """Raise `UnsupportedGPUError` unless the device has compute capability 9.0 (H100, H200, GH200)."""
    info = device_info(device)
    if info.compute_capability != (9, 0):
        major, minor = info.compute_capability
        raise UnsupportedGPUError(
            f"device {device} ({info.name}) has compute capability {major}.{minor}; the kernels of rawmla "
            "use instructions that exist on 9.0 only (H100, H200, GH200)"
        )


def _load(compiled: CompiledKernel, device: int) -> Kernel:
    warn_of_conflicts()
    try:
        import cupy
        from cupy.cuda.function import Module
    except ImportError as error:
        raise MissingDependencyError(
            f"loading a kernel needs CuPy ({error}); install it with {INSTALL_HINT}"
        ) from error
    spec = compiled.spec
    driver = get_driver()
    context = driver.primary_context(device)
    with cupy.cuda.Device(device), driver.in_context(context):
        try:
            module = Module()
            module.load(compiled.cubin)  # the bytes that were checked, not a file that may be another by now
            function = module.get_function(spec.name).ptr
        except cupy.cuda.driver.CUDADriverError as error:
            raise LaunchError(f"{spec.label} could not be loaded on device {device}: {error}") from error
        handle = ctypes.c_void_p(function)
        if driver.has("cuFuncLoad"):  # CUDA 12.4; lazy loading would otherwise happen at the first launch
            driver.call("cuFuncLoad", handle)
        driver.call(
            "cuFuncSetAttribute",
            handle,
            ctypes.c_int(_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES),
            ctypes.c_int(spec.smem_bytes),
        )
        param_bytes = _param_bytes(driver, handle)
    keep_loaded = _keep_loaded if spec.user_text else None
    return Kernel(spec, device, compiled.meta, driver, context, function, param_bytes, module, keep_loaded)


def _keep_loaded(kernel: Kernel) -> None:
    """Hold a kernel that a captured graph launches for good."""
    _captured.append(kernel)
    _kernels.setdefault((kernel.spec, kernel.device), kernel)


def _param_bytes(driver: Driver, function: ctypes.c_void_p) -> int | None:
    """Size of the kernel's only parameter; None with a driver older than CUDA 12.4."""
    if not driver.has("cuFuncGetParamInfo"):
        return None
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    driver.call("cuFuncGetParamInfo", function, ctypes.c_size_t(0), ctypes.byref(offset), ctypes.byref(size))
    return size.value
