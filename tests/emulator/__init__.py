"""Runs rawmla's kernels on a CPU, without a GPU; docs/emulator.md says what that can tell and what not."""

from .build import BuildError, missing_reason
from .device import EmulationError, Emulator

__all__ = ["BuildError", "EmulationError", "Emulator", "missing_reason"]
