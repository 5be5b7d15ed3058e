"""Checks one call on the emulated device, from the root of a checkout:

    python -m tests.emulator mha b=1 s_q=300 s_k=500 d_qk=64 d_v=64 causal=True dtype=float16 --seeds 5

The words are a family of calls and fields of its case in tests/kit, as the names of tests show them.
The error is the L2 norm of a result's difference from the float64 reference, over the norm of the reference.
"""

from __future__ import annotations

import argparse
import ast
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import BuildError, EmulationError, Emulator, missing_reason


def main() -> int:
    """Exit status 1 after a fault or a wrong result."""
    reason = missing_reason()
    if reason is not None:
        raise SystemExit(reason)
    from .cases import FAMILIES, check  # torch is imported

    parser = argparse.ArgumentParser(
        prog="python -m tests.emulator", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("field", nargs="*", help="NAME=VALUE, a field of the case")
    parser.add_argument("--seed", type=int, default=1, help="the first schedule")
    parser.add_argument("--seeds", type=int, default=1, help="how many schedules, one after the other")
    parser.add_argument("--sms", type=int, default=4, help="multiprocessors: CTAs that run together")
    parser.add_argument("--folder", type=Path, default=Path("build/emulator"), help="of compiled kernels")
    given = parser.parse_intermixed_args()
    case = case_of(given.family, given.field)
    emulator = Emulator(given.folder, sm_count=given.sms)
    with emulator.installed():
        for emulator.seed in range(given.seed, given.seed + given.seeds):
            begin, first = time.perf_counter(), len(emulator.launched)
            try:
                error = check(given.family, case)
            except (AssertionError, BuildError, EmulationError) as problem:
                print(f"seed {emulator.seed}: {type(problem).__name__}: {problem}")
                return 1
            seconds = time.perf_counter() - begin
            kernels = ", ".join(emulator.launched[first:])
            print(
                f"seed {emulator.seed}: good, relative error {error:.2g}, {seconds:.1f} s, {kernels}",
                flush=True,
            )
    return 0


def case_of(family: str, fields: Iterable[str]) -> Any:
    """The case of a family with these fields, each "NAME=VALUE"."""
    from .cases import FAMILIES

    return FAMILIES[family][0](**dict(_field(word) for word in fields))


def _field(word: str) -> tuple[str, Any]:
    name, equals, value = word.partition("=")
    if not equals:
        raise SystemExit(f"expected NAME=VALUE, got {word!r}")
    try:
        return name, float("nan") if value == "nan" else ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value


if __name__ == "__main__":
    sys.exit(main())
