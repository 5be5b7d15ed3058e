"""The launch of a loaded kernel."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from rawmla.errors import LaunchError
from rawmla.jit.driver import Driver, aligned_buffer, get_driver
from rawmla.jit.spec import KernelSpec

# CUlaunchConfig (56 bytes): grid 3 x u32, block 3 x u32, dynamic shared memory u32, padding, stream @32,
# attribute pointer @40, number of attributes u32 @48. The first struct is what changes from call to call.
_CALL = struct.Struct("<7I4xQ")
_STREAM = struct.Struct("<Q")
_STREAM_AT = 32
_CONFIG_BYTES = 56
_ATTRIBUTES = struct.Struct("<QI")
_ATTRIBUTES_AT = 40
# CUlaunchAttribute (72 bytes): id u32 @0, value @8.
_ATTRIBUTE_BYTES = 72
_CLUSTER = struct.Struct("<I4x3I")
_PDL = struct.Struct("<I4xi")
_ID_CLUSTER_DIMENSION = 4
_ID_PROGRAMMATIC_STREAM_SERIALIZATION = 6
_PARAMS_ALIGN = 128  # of CUtensorMap members; 64 would do before CUDA 13

NO_LAUNCH = -1
"""Given as a stream, it makes a launch do nothing: what remains is the loading of the kernel."""

_unused: list[tuple[Driver, int, object]] = []
"""Code of kernels that nobody has any more, with driver and context. It is unloaded later, since Python may
collect a kernel while a CUDA graph is captured, and an unload would end the capture.
"""


def unload_unused() -> None:
    """Unload the code of kernels that nobody has any more."""
    while _unused:
        driver, context, module = _unused.pop()
        # The driver unloads code in the context that is current. Code of a lost context is gone.
        with suppress(LaunchError), driver.in_context(context):
            del module


class _Buffers:
    """Everything the driver reads during one launch, prepared for one kind of launch and used by one thread
    at a time."""

    __slots__ = (
        "_keep",
        "argument",
        "asked",
        "config",
        "config_ref",
        "context",
        "context_ref",
        "fill",
        "params",
        "status",
        "status_ref",
        "stream",
        "then",
    )

    def __init__(self, param_bytes: int, cluster: tuple[int, int, int] | None, pdl: bool) -> None:
        config, _ = aligned_buffer(_CONFIG_BYTES, 16)
        attributes, attributes_address = aligned_buffer(2 * _ATTRIBUTE_BYTES, 16)
        count = 0
        if cluster is not None:
            _CLUSTER.pack_into(attributes, 0, _ID_CLUSTER_DIMENSION, *cluster)
            count = 1
        if pdl:
            _PDL.pack_into(attributes, count * _ATTRIBUTE_BYTES, _ID_PROGRAMMATIC_STREAM_SERIALIZATION, 1)
            count += 1
        _ATTRIBUTES.pack_into(config, _ATTRIBUTES_AT, attributes_address if count else 0, count)
        params, params_address = aligned_buffer(param_bytes, _PARAMS_ALIGN)
        pointers = (ctypes.c_void_p * 1)(params_address)
        self._keep = (attributes, params, pointers)
        self.config = config
        # References, which ctypes passes on as they are: a c_void_p is converted at every call.
        self.config_ref = ctypes.byref(config)
        self.params = memoryview(params).cast("B")
        self.argument = ctypes.byref(pointers)
        self.fill: Callable[..., None]  # packs the first members of `params`; set by `PreparedLaunch`
        self.stream = 0  # that `config` holds, if only `PreparedLaunch` uses these buffers
        # The launch after this one, with the same `argument`.
        self.then: tuple[PreparedLaunch, _Buffers] | None = None
        self.context = ctypes.c_void_p()
        self.context_ref = ctypes.byref(self.context)
        self.asked = 0, ctypes.c_void_p()  # the stream that was asked last whether it is captured
        self.status = ctypes.c_int()
        self.status_ref = ctypes.byref(self.status)


class Kernel:
    """A kernel loaded on one device; ``meta`` as in `CompiledKernel`."""

    def __init__(
        self,
        spec: KernelSpec,
        device: int,
        meta: dict[str, Any],
        driver: Driver,
        context: int,
        function: int,
        param_bytes: int | None,
        module: object = None,
        keep_loaded: Callable[[Kernel], None] | None = None,
    ) -> None:
        """``keep_loaded`` is called once with this kernel, when a stream that is captured launches it."""
        self._module = module  # holds the code
        self.spec = spec
        self.device = device
        self.meta = meta
        self._driver = driver
        self._launch_ex = driver.library.cuLaunchKernelEx
        self._get_context = driver.library.cuCtxGetCurrent
        self._is_capturing = driver.library.cuStreamIsCapturing
        self._context = context
        # A reference, as in `_Buffers`; nothing is read from that address.
        self._function = ctypes.byref(ctypes.c_char.from_address(function))
        self._param_bytes = param_bytes
        self._threads = spec.threads
        self._smem_bytes = spec.smem_bytes
        self._keep_loaded = keep_loaded
        self._free: dict[tuple[tuple[int, int, int] | None, bool], list[_Buffers]] = {}

    def __del__(self, unused: list[tuple[Driver, int, object]] = _unused) -> None:
        # The default outlives the globals of this module, which are gone when the interpreter ends.
        if self._module is not None:
            unused.append((self._driver, self._context, self.__dict__.pop("_module")))  # nobody else has it

    def launch(
        self,
        grid: tuple[int, int, int],
        params: bytes,
        stream: int,
        *,
        cluster: tuple[int, int, int] | None = None,
        pdl: bool = False,
    ) -> None:
        """Enqueue the kernel; legal inside a CUDA-graph capture, never synchronises, thread safe.

        ``params`` has all bytes of the parameter struct, and is copied before the call returns. ``stream`` 0
        is the legacy default stream. ``cluster`` is a size in CTAs; None: what the kernel was compiled with,
        else no clusters. ``pdl``, programmatic dependent launch: the kernel may start before the one ahead of
        it on the stream has finished, and waits for it with ``griddepcontrol.wait``.

        Raises `ValueError` if ``params`` has another length than the struct, and `LaunchError` if the driver
        refuses the launch or reports an earlier asynchronous error.
        """
        if stream == NO_LAUNCH:
            return
        kind = (cluster, pdl)
        free = self._free.get(kind)
        # Taking buffers out of the list is what makes this thread safe: list.pop and append are atomic.
        try:
            buffers = free.pop()  # type: ignore[union-attr]
        except (IndexError, AttributeError):
            free = self._free.setdefault(kind, [])
            buffers = self._new_buffers(params, cluster, pdl)
        try:
            buffers.params[:] = params
            grid_x, grid_y, grid_z = grid
            _CALL.pack_into(
                buffers.config, 0, grid_x, grid_y, grid_z, self._threads, 1, 1, self._smem_bytes, stream
            )
            code = self._enqueue(buffers)
        except (ValueError, TypeError, struct.error) as error:
            raise self._bad_arguments(grid, params, stream, error) from None
        if stream and self._keep_loaded is not None:
            self._stay_if_captured(stream, buffers, self._keep_loaded)
        free.append(buffers)  # type: ignore[union-attr]
        if code != 0:
            raise self._failed(code, grid, cluster, pdl, stream)

    def prepare(
        self,
        grid: tuple[int, int, int],
        params: bytes,
        changing: struct.Struct,
        *,
        cluster: tuple[int, int, int] | None = None,
        pdl: bool = False,
        then: tuple[Kernel, tuple[int, int, int]] | None = None,
    ) -> PreparedLaunch:
        """Launches that differ only in the stream and in the first members of the parameter struct.

        ``changing`` is the format of these members. ``then`` is a kernel without a user's text, and its grid:
        every launch enqueues it after this one, with the same parameters and ``pdl``, at a third of the host
        time of a launch of its own. Others as for `launch`.
        """
        return PreparedLaunch(self, grid, params, changing, cluster, pdl, then)

    def _enqueue(self, buffers: _Buffers) -> int:
        self._get_context(buffers.context_ref)
        if buffers.context.value == self._context:
            return self._launch_ex(buffers.config_ref, self._function, buffers.argument, None)
        with self._driver.in_context(self._context):
            return self._launch_ex(buffers.config_ref, self._function, buffers.argument, None)

    def _stay_if_captured(
        self, stream: int, buffers: _Buffers, keep_loaded: Callable[[Kernel], None]
    ) -> None:
        """Keep the code loaded for good if the stream is being captured: replays need it, and nothing tells
        when the last graph that has it is gone. The legacy default stream, 0, cannot be captured.
        """
        asked, handle = buffers.asked
        if asked != stream:
            handle = ctypes.c_void_p(stream)
            buffers.asked = stream, handle
        if self._is_capturing(handle, buffers.status_ref) != 0:
            self._driver.call_in_any_context("cuStreamIsCapturing", handle, buffers.status_ref)
        if buffers.status.value:
            self._keep_loaded = None
            keep_loaded(self)

    def _failed(self, code: int, grid: object, cluster: object, pdl: bool, stream: int) -> LaunchError:
        return LaunchError(
            f"launch of {self.spec.label} failed: {self._driver.error_text(code)}\n"
            f"  grid {grid}, {self._threads} threads, {self._smem_bytes} bytes of dynamic shared memory, "
            f"cluster {cluster}, pdl {pdl}, device {self.device}, stream {stream:#x}"
        )

    def _new_buffers(self, params: bytes, cluster: tuple[int, int, int] | None, pdl: bool) -> _Buffers:
        if self._param_bytes is None:  # a driver that cannot tell the size: the first launch sets it
            self._param_bytes = len(params)
        return _Buffers(self._param_bytes, cluster, pdl)

    def _bad_arguments(self, grid: object, params: bytes, stream: object, error: Exception) -> Exception:
        if len(params) != self._param_bytes:
            return ValueError(
                f"params: expected the {self._param_bytes} bytes of the struct that {self.spec.label} takes, "
                f"got {len(params)} bytes"
            )
        return ValueError(
            f"launch of {self.spec.label}: expected a grid of three non-negative integers and a stream "
            f"handle, got {grid!r} and {stream!r} ({error})"
        )


class PreparedLaunch:
    """See `Kernel.prepare`: less than half the host time of `Kernel.launch`."""

    __slots__ = (
        "_changing",
        "_cluster",
        "_context",
        "_free",
        "_function",
        "_get_context",
        "_grid",
        "_kernel",
        "_launch_ex",
        "_params",
        "_pdl",
        "_then",
    )

    def __init__(
        self,
        kernel: Kernel,
        grid: tuple[int, int, int],
        params: bytes,
        changing: struct.Struct,
        cluster: tuple[int, int, int] | None,
        pdl: bool,
        then: tuple[Kernel, tuple[int, int, int]] | None = None,
    ) -> None:
        self._kernel = kernel
        self._grid = grid
        self._params = params
        self._changing = changing
        self._get_context = kernel._get_context
        self._context = kernel._context
        self._launch_ex = kernel._launch_ex
        self._function = kernel._function
        self._cluster = cluster
        self._pdl = pdl
        self._then = None if then is None else PreparedLaunch(*then, params, changing, None, pdl)
        self._free: list[_Buffers] = []

    def launch(self, stream: int, *members: int | bytes, context_is_current: bool = False) -> bool:
        """Enqueue the kernel with these first members; see `Kernel.launch`.

        Returns whether the kernel's context was current in this thread. A launch on the same device right
        after one that said so need not ask the driver again: ``context_is_current``.
        """
        try:
            buffers = self._free.pop()  # so that no other thread uses it
        except IndexError:
            buffers = self._new_buffers()
        buffers.fill(*members)
        if stream != buffers.stream:
            if stream == NO_LAUNCH:
                self._free.append(buffers)
                return False
            _STREAM.pack_into(buffers.config, _STREAM_AT, stream)
            if buffers.then is not None:
                _STREAM.pack_into(buffers.then[1].config, _STREAM_AT, stream)
            buffers.stream = stream
        if not context_is_current:
            self._get_context(buffers.context_ref)
            context_is_current = buffers.context.value == self._context
        if context_is_current:
            code = self._launch_ex(buffers.config_ref, self._function, buffers.argument, None)
        else:
            code = self._kernel._enqueue(buffers)
        keep_loaded = self._kernel._keep_loaded
        if stream and keep_loaded is not None:
            self._kernel._stay_if_captured(stream, buffers, keep_loaded)
        latest = self
        if buffers.then is not None and code == 0:
            latest, after = buffers.then
            if context_is_current:
                code = self._launch_ex(after.config_ref, latest._function, after.argument, None)
            else:
                code = latest._kernel._enqueue(after)
        self._free.append(buffers)
        if code != 0:
            raise latest._kernel._failed(code, latest._grid, latest._cluster, latest._pdl, stream)
        return context_is_current

    def _new_buffers(self) -> _Buffers:
        kernel = self._kernel
        buffers = kernel._new_buffers(self._params, self._cluster, self._pdl)
        try:
            buffers.params[:] = self._params
            buffers.fill = partial(self._changing.pack_into, buffers.params, 0)
            _CALL.pack_into(buffers.config, 0, *self._grid, kernel._threads, 1, 1, kernel._smem_bytes, 0)
        except (ValueError, TypeError, struct.error) as error:
            raise kernel._bad_arguments(self._grid, self._params, 0, error) from None
        if self._then is not None:
            after = self._then._new_buffers()
            after.argument = buffers.argument
            buffers.then = self._then, after
        return buffers


def clear(address: int, size: int, stream: int, device: int) -> None:
    """Enqueue the clearing of ``size`` bytes of ``device``'s memory, both multiples of 4.

    Legal inside a CUDA-graph capture. Raises `LaunchError` if the driver refuses.
    """
    if stream == NO_LAUNCH:
        return
    driver = get_driver()
    context = driver.primary_context(device)
    arguments = (
        ctypes.c_uint64(address),
        ctypes.c_uint(0),
        ctypes.c_size_t(size // 4),
        ctypes.c_void_p(stream),
    )
    if driver.is_current(context):  # to make it so takes as long as the rest of this function
        driver.call("cuMemsetD32Async", *arguments)
    else:
        with driver.in_context(context):
            driver.call("cuMemsetD32Async", *arguments)
