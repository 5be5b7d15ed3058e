"""Compiling kernels, and what the benchmark does without a Hopper GPU: a small case of each family on an
emulated device.
"""

import importlib.util
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from rawmla import jit, kernels
from rawmla.errors import CompileError

from . import ROOT
from .cases import one_line
from .families import Family
from .tables import EMPTY, Cells, fitted

FOLDER = ROOT / "build" / "emulator"
"""Where the emulator keeps the kernels that g++ compiles."""

Build = Callable[[jit.KernelSpec], Any]
Kernel = dict[str, Any]


def built(spec: jit.KernelSpec, build: Build) -> Kernel:
    """Label, resources and compile time of a variant; of one that does not compile, label and `problem`."""
    try:
        return {"label": spec.label, **build(spec).meta}
    except CompileError as error:
        return {"label": spec.label, "problem": str(error)}


def compile_specs(specs: Sequence[jit.KernelSpec]) -> list[Kernel]:
    """Build variants on all cores, or take them from the cache; see `built`."""
    print(f"compiling {len(specs)} kernels", file=sys.stderr, flush=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # NVRTC runs without the interpreter lock
        return list(pool.map(lambda spec: built(spec, jit.build), specs))


@dataclass
class Result:
    """What came of a family's small case, and the kernels that it ran: see `built`."""

    title: str
    error: float | None = None
    problem: str = ""
    kernels: Sequence[Kernel] = ()


def run_small(families: Sequence[Family]) -> list[Result]:
    """Run the small case of each family on an emulated device, while NVRTC compiles the kernels."""
    from tests.emulator import Emulator
    from tests.emulator.__main__ import case_of
    from tests.emulator.cases import check

    build = jit.build  # of the library itself: the emulated device has another
    results = [Result(family.title) for family in families]
    jobs: list[Iterator[Kernel]] = []
    with ThreadPoolExecutor(1) as pool:
        for family, result in zip(families, results, strict=True):
            emulator = Emulator(FOLDER)
            name, *fields = shlex.split(family.small)
            try:
                with emulator.installed():
                    result.error = check(name, case_of(name, fields))
            except Exception as problem:  # whatever went wrong, the other families are still worth their time
                result.problem = f"{family.small}: {one_line(problem)}"
            said = "FAILED" if result.problem else "ran"
            print(f"{said} {family.title}: {family.small}", file=sys.stderr, flush=True)
            ran = [spec for spec in emulator.kernels if spec.label in emulator.launched]
            jobs.append(pool.map(lambda spec: built(spec, build), ran))
    for result, own in zip(results, jobs, strict=True):
        result.kernels = list(own)
    return results


def missing_reason() -> str | None:
    """Why nothing can be emulated here, or None."""
    if importlib.util.find_spec("pytest") is None:
        return "the emulator needs pytest"
    from tests import emulator

    return emulator.missing_reason()


def cells_of(results: Sequence[Result]) -> Cells:
    """A line for each kernel of each result."""
    cells = [["family", "error", "kernel", "registers", "spill B", "shared B"]]
    for result in results:
        first = [result.title, EMPTY if result.error is None else f"{result.error:.1e}"]
        for kernel in result.kernels:
            figures = [EMPTY] * 3
            if "problem" not in kernel:
                spills = kernel["spill_stores"] + kernel["spill_loads"]
                shared = kernel["static_shared_bytes"] + kernel["dynamic_shared_bytes"]
                figures = [str(one) for one in (kernel["registers"], spills, shared)]
            cells.append([*first, kernel["label"].partition("[")[0], *figures])
            first = ["", ""]
    return cells


def run(reason: str, families: Sequence[Family]) -> int:
    """Run the small cases of families, or only compile kernels where nothing can be emulated, and say that
    nothing was timed, and why. The exit status is 1 where something fails.
    """
    families = [family for family in families if family.small]
    missing = missing_reason()
    if missing is None:
        print(
            f"{reason}: nothing is timed.\nA small case of each family runs on an emulated device, and NVRTC "
            "compiles its kernels for a GPU.\nThe first time this takes about a minute on two cores.",
            flush=True,
        )
        results = run_small(families)
    else:
        print(f"{reason}: nothing is timed.\n{missing}: no kernel runs, one variant of each is compiled.")
        specs = {spec.name: spec for spec in reversed(kernels.all_specs())}
        results = [Result("compiled alone", kernels=compile_specs(list(specs.values())))]
    print(fitted(cells_of(results), (0, 2)))
    found = {kernel["label"]: kernel for result in results for kernel in result.kernels}
    problems = [result.problem for result in results if result.problem]
    problems += [kernel["problem"] for kernel in found.values() if "problem" in kernel]
    for problem in problems:
        print(f"FAILED: {problem}")
    if missing is None and families:
        print(
            "error: L2 norm of the difference from the float64 reference, over the norm of the reference.\n"
            f"One case again, or with other numbers:\n  python -m tests.emulator {families[0].small}"
        )
    print(f"{len(found)} kernels compiled. Nothing was timed.")
    return 1 if problems else 0
