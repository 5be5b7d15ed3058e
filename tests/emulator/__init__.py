"""Runs rawmla's kernels on a CPU, without a GPU; docs/emulator.md says what that can tell and what not."""

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
for folder in (TESTS, TESTS / "gpu"):  # tests/kit, and the helpers of tests/gpu; pytest has both already
    if str(folder) not in sys.path:
        sys.path.append(str(folder))

from .build import BuildError, missing_reason  # noqa: E402
from .device import EmulationError, Emulator  # noqa: E402

__all__ = ["BuildError", "EmulationError", "Emulator", "missing_reason"]
