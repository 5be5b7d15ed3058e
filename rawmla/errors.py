"""Exceptions of rawmla. Wrong arguments raise plain ``TypeError`` or ``ValueError`` instead."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

__all__ = [
    "CompileError",
    "KernelNotReadyError",
    "LaunchError",
    "MissingDependencyError",
    "NVRTCNotFoundError",
    "NoGPUError",
    "RawMLAError",
    "UnsupportedGPUError",
]


class RawMLAError(RuntimeError):
    """Base class of every error that rawmla raises for a reason other than a wrong argument."""


def install_command(extra: str) -> str:
    """The command that installs rawmla with an extra, for the texts of errors. rawmla is not on PyPI yet."""
    return f'`pip install -e ".[{extra}]"` in a checkout of rawmla'


# What an error or `info` advises when CuPy, cuda-bindings or NVRTC is missing.
INSTALL_HINT = (
    f"{install_command('cu12')}, or with cu13, whichever fits the driver (`python -m rawmla info` shows it)"
)


class MissingDependencyError(RawMLAError, ImportError):
    """An optional package (CuPy, torch, cuda-bindings) is not installed. The text names what to install."""


class NoGPUError(RawMLAError):
    """There is no NVIDIA driver, or the driver offers no device."""


class UnsupportedGPUError(RawMLAError):
    """The device is not of compute capability 9.0; the kernels exist for Hopper (sm_90a) only."""


class NVRTCNotFoundError(RawMLAError):
    """The NVRTC library is not installed, and a kernel has to be compiled."""


class CompileError(RawMLAError):
    """NVRTC refused a kernel, or its code breaks a rule of this library (register spills, serialised WGMMA).

    Attributes
    ----------
    log : str
        Program log of NVRTC and ptxas.
    options : tuple of str
        Compiler options, in order.
    source_path : Path or None
        Saved copy of the kernel source, its headers beside it; None if no folder could be written.
    user_lines : str
        The errors in text that the user wrote, each with its numbered source lines and a caret; may be empty.
    """

    def __init__(
        self,
        reason: str,
        *,
        log: str,
        options: Sequence[str],
        source_path: Path | None,
        user_lines: str = "",
        other_log: str | None = None,
    ) -> None:
        self.reason = reason
        self.log = log
        self.options = tuple(options)
        self.source_path = source_path
        self.user_lines = user_lines
        saved = str(source_path) if source_path is not None else "could not be saved (no writable folder)"
        shown = (log if other_log is None else other_log).rstrip() or "(empty)"
        parts = [reason, user_lines, f"  options: {' '.join(self.options)}", f"  source:  {saved}", "  log:"]
        super().__init__("\n".join([*filter(None, parts), shown]))

    def __reduce__(self) -> tuple[object, ...]:
        # The constructor takes keywords, which the default pickling of exceptions cannot pass.
        return CompileError.__new__, (CompileError, *self.args), self.__dict__


class KernelNotReadyError(RawMLAError):
    """A kernel would have to be compiled or loaded while a CUDA graph is being captured.

    The text says what to call before the capture.
    """


class LaunchError(RawMLAError):
    """The CUDA driver refused a call; the text has its error name, its explanation and the arguments."""
