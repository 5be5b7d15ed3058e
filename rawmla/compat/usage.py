"""Calls through the names of other libraries: counts for `rawmla.compat.status`, and the log."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

try:
    from torch.compiler import is_dynamo_compiling
except ImportError:  # CuPy arrays need no torch

    def is_dynamo_compiling() -> bool:
        return False


_logger = logging.getLogger("rawmla.compat")


class Usage:
    """The calls of one function. `note` is on the path of every call, so it keeps shapes and no arrays."""

    __slots__ = ("calls", "form", "function", "shapes")

    def __init__(self, function: str) -> None:
        self.function = function
        self.calls = 0
        self.form = ""
        self.shapes: tuple[Any, ...] = ()
        USED[function] = self

    def note(self, form: str, q: Any, cache: Any) -> None:
        """Count a call that has been made; `form` says whose way of calling it was."""
        if is_dynamo_compiling():  # the count would be a guard, and every call compiled anew
            return
        calls = self.calls
        self.calls = calls + 1
        self.form = form
        if not calls:
            self.shapes = getattr(q, "shape", ()), getattr(cache, "shape", ())
            self._log_first()

    def _log_first(self) -> None:
        shapes = " and ".join(str(list(shape)) for shape in self.shapes)
        log(f"{self.function} is computed by rawmla: called as of {self.form}, shapes {shapes}")


USED: dict[str, Usage] = {}
"""All functions of this process that note their calls, by name."""


def _forget() -> None:
    for used in USED.values():
        used.calls = 0


os.register_at_fork(after_in_child=_forget)  # counts and the log are of one process


def log(message: str) -> None:
    """One line through `logging` at INFO; on standard error too where the variable RAWMLA_LOG is 1."""
    if os.environ.get("RAWMLA_LOG") == "1" and not _logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("rawmla [%(process)d]: %(message)s"))
        _logger.addHandler(handler)
        _logger.setLevel(logging.INFO)
        _logger.propagate = False  # or a program with a handler of its own shows the line twice
    _logger.info(message)
