"""Arrays beside memory that nobody may touch: who reads or writes there ends the process."""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
import signal
import traceback
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import torch

from .device import HostTensors

_PAGE = mmap.PAGESIZE
_ALIGNMENT = 16  # in bytes, of every array
_FILL = 0xFF
_protect = ctypes.CDLL(None, use_errno=True).mprotect


class Guards:
    """Makes arrays that end at a page without access. An array of whole pages begins at one, too; in front of
    others are bytes that nobody may change.
    """

    def __init__(self) -> None:
        self._around: list[torch.Tensor] = []

    def allocate(self, size: int) -> torch.Tensor:
        """Return `size` bytes of such memory, filled with 0xff."""
        extent = -(-max(size, 1) // _PAGE) * _PAGE
        whole = torch.frombuffer(mmap.mmap(-1, extent + 2 * _PAGE), dtype=torch.uint8)
        for page in (0, _PAGE + extent):
            if _protect(ctypes.c_void_p(whole.data_ptr() + page), _PAGE, 0):
                raise OSError(ctypes.get_errno(), "mprotect failed")
        inner = whole[_PAGE : _PAGE + extent].fill_(_FILL)
        first = (extent - size) // _ALIGNMENT * _ALIGNMENT
        self._around += [inner[:first], inner[first + size :]]
        return inner[first : first + size]

    def place(self, x: torch.Tensor) -> torch.Tensor:
        """Return a copy of an array in such memory."""
        return self.allocate(x.nbytes).view(x.dtype).view(x.shape).copy_(x)

    def check(self) -> None:
        """Raise unless the bytes around all arrays are as they were."""
        assert all(bool((part == _FILL).all()) for part in self._around), "bytes beside an array changed"

    def of_library(self) -> Any:
        """Inside, what the library allocates is such an array."""
        return mock.patch.object(HostTensors, "memory", lambda _, size: self.allocate(size))


def failure_in_child(calls: Mapping[str, Callable[[], object]], seconds: int) -> str:
    """Make calls in a forked process, which SIGALRM ends after `seconds` seconds. Returns which call failed
    and how, or an empty text.
    """
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        faulthandler.disable()
        signal.alarm(seconds)
        try:
            for call in calls.values():
                os.write(write, b"\0")
                call()
            os._exit(0)
        except BaseException:
            os.write(write, traceback.format_exc().encode())
        os._exit(1)
    os.close(write)
    with open(read) as pipe:
        *begun, failure = pipe.read().split("\0")
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    ends = {
        1: failure,
        -signal.SIGSEGV: "memory outside of the arrays was touched",
        -signal.SIGALRM: f"no end within {seconds} seconds",
    }
    return f"{list(calls)[len(begun) - 1]}: {ends.get(code, f'exit code {code}')}" if code else ""
