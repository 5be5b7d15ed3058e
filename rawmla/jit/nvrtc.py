"""NVRTC through cuda-bindings: source text in, cubin for sm_90a and program log out."""

from __future__ import annotations

import functools
import re
import threading
from dataclasses import dataclass
from typing import Any

from rawmla.errors import INSTALL_HINT, MissingDependencyError, NVRTCNotFoundError, RawMLAError
from rawmla.jit.sources import SourceSet
from rawmla.jit.spec import KernelSpec

# Every numeric or code-generating flag is here and nowhere else. ptxas takes one option per flag.
_BASE_OPTIONS = (
    "-arch=sm_90a",
    "-std=c++20",
    "-no-source-include",  # only the headers handed over in memory
    "--ptxas-options=-v",
)
CHECKED_VERSIONS = "12.6 to 13.5"
"""Every kernel compiles by these without spills or serialised WGMMA."""

_RELEASE = re.compile(rb"release [\d.]+, V([\d.]+)")
_version_lock = threading.Lock()


@dataclass(frozen=True)
class NVRTCResult:
    """Outcome of one compilation; ``cubin`` is None when it failed."""

    cubin: bytes | None
    log: str
    status: str


def compiler_options(spec: KernelSpec) -> tuple[str, ...]:
    """All options a kernel is compiled with, in order."""
    return (*_BASE_OPTIONS, *(f"-D{name}={value}" for name, value in spec.macros))


def _bindings() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise MissingDependencyError(
            f"compiling a kernel needs the package cuda-bindings ({error}); install it with {INSTALL_HINT}"
        ) from error
    return nvrtc


def _check(nvrtc: Any, status: Any, call: str) -> None:
    if int(status) != 0:
        _, text = nvrtc.nvrtcGetErrorString(status)
        raise RawMLAError(f"{call} failed: {text.decode() if isinstance(text, bytes) else text}")


def _create(nvrtc: Any, source: bytes, name: str, headers: tuple[tuple[str, bytes], ...]) -> Any:
    status, program = nvrtc.nvrtcCreateProgram(
        source, name.encode(), len(headers), [data for _, data in headers], [n.encode() for n, _ in headers]
    )
    _check(nvrtc, status, "nvrtcCreateProgram")
    return program


def _fetch(nvrtc: Any, program: Any, what: str) -> bytes:
    """``what`` is CUBIN, PTX or ProgramLog."""
    status, size = getattr(nvrtc, f"nvrtcGet{what}Size")(program)
    _check(nvrtc, status, f"nvrtcGet{what}Size")
    # A bytearray of our own: the call writes in place, and CPython shares one-byte bytes objects.
    buffer = bytearray(size)
    (status,) = getattr(nvrtc, f"nvrtcGet{what}")(program, buffer)
    _check(nvrtc, status, f"nvrtcGet{what}")
    return bytes(buffer)


def version() -> str:
    """Full version of the NVRTC in use, such as ``12.9.86``; also proof that it works.

    Raises `MissingDependencyError` without cuda-bindings and `NVRTCNotFoundError` without the library.
    """
    with _version_lock:
        return _version()


@functools.lru_cache(maxsize=1)
def _version() -> str:
    nvrtc = _bindings()
    try:
        status, major, minor = nvrtc.nvrtcVersion()
    except Exception as error:  # cuda-bindings raises several types when the library cannot be opened
        raise NVRTCNotFoundError(
            f"the NVRTC library was not found ({str(error).strip().splitlines()[0]}); install it with "
            f"{INSTALL_HINT}, or set RAWMLA_CUBIN_DIR to a folder that `python -m rawmla compile --out DIR` "
            "wrote on another machine"
        ) from error
    _check(nvrtc, status, "nvrtcVersion")
    # nvrtcVersion has no patch level, and the patch level changes the code. The banner of any PTX has it.
    program = _create(nvrtc, b"", "version.cu", ())
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, 1, [b"-arch=compute_90a"])
        _check(nvrtc, status, "nvrtcCompileProgram")
        found = _RELEASE.search(_fetch(nvrtc, program, "PTX"))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return found.group(1).decode() if found else f"{major}.{minor}"


def library_path() -> str | None:
    """File of the NVRTC library in use; None before `version` has loaded it."""
    try:
        with open("/proc/self/maps") as maps:
            found = re.search(r"/\S*libnvrtc\.so\S*", maps.read())
    except OSError:
        return None
    return found.group(0) if found else None


def compile_source(source: SourceSet, options: tuple[str, ...]) -> NVRTCResult:
    """Compile; a refused program comes back with ``cubin=None`` and the log."""
    major, minor, *_ = map(int, version().split("."))
    if (major, minor) >= (12, 9):
        # This NVRTC has a cache of its own, which answers without the log that the checks for spills read.
        # The code is the same with the flag, so that no key has it.
        options = (*options, "-no-cache")
    nvrtc = _bindings()
    program = _create(nvrtc, source.main, source.main_name, source.headers)
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
        log = _fetch(nvrtc, program, "ProgramLog").rstrip(b"\0 \n").decode("utf-8", "replace")
        if int(status) != 0:
            _, text = nvrtc.nvrtcGetErrorString(status)
            return NVRTCResult(None, log, text.decode() if isinstance(text, bytes) else str(text))
        return NVRTCResult(_fetch(nvrtc, program, "CUBIN"), log, "NVRTC_SUCCESS")
    finally:
        nvrtc.nvrtcDestroyProgram(program)
