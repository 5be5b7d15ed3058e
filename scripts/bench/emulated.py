"""Compiling kernels, and what the benchmark does without a Hopper GPU: a small case of each family on an
emulated device.
"""

import os
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rawmla import jit, kernels
from rawmla.errors import CompileError

from . import ROOT
from .cases import one_line
from .families import Family
from .tables import EMPTY, Cells, fitted

FOLDER = ROOT / "build" / "emulator"  # of what g++ compiles

Kernel = dict[str, Any]


def built(spec: jit.KernelSpec, build: Callable[[jit.KernelSpec], Any]) -> Kernel:
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


def run_small(family: Family, emulator: Any) -> tuple[float | None, str]:
    """The error of the family's small case on an emulated device, and what went wrong."""
    from tests.emulator.__main__ import case_of
    from tests.emulator.cases import check

    name, *fields = shlex.split(family.small)
    error, problem = None, ""
    try:
        with emulator.installed():
            error = check(name, case_of(name, fields))
    except Exception as raised:  # whatever went wrong, the other families are still worth their time
        problem = f"{family.small}: {one_line(raised)}"
    said = "FAILED" if problem else "ran"
    print(f"{said} {family.title}: {family.small}", file=sys.stderr, flush=True)
    return error, problem


def cells_of(title: str, error: float | None, kernels: Iterable[Kernel]) -> Cells:
    """A line for each kernel."""
    cells = []
    first = [title, EMPTY if error is None else f"{error:.1e}"]
    for kernel in kernels:
        figures = [EMPTY] * 3
        if "problem" not in kernel:
            spills = kernel["spill_stores"] + kernel["spill_loads"]
            shared = kernel["static_shared_bytes"] + kernel["dynamic_shared_bytes"]
            figures = [str(one) for one in (kernel["registers"], spills, shared)]
        cells.append([*first, kernel["label"].partition("[")[0], *figures])
        first = ["", ""]
    return cells


def run(reason: str, families: Sequence[Family]) -> int:
    """Run the small cases of families, while NVRTC compiles their kernels. Where nothing can be emulated,
    only compile. Say that nothing was timed, and why. The exit status is 1 where something fails.
    """
    from tests import emulator

    print(f"{reason}: nothing is timed.")
    problems = []
    results: list[tuple[str, float | None, list[Kernel]]] = []
    if missing := emulator.missing_reason():
        print(f"{missing}: no kernel runs, one variant of each is compiled.")
        specs = {spec.name: spec for spec in reversed(kernels.all_specs())}
        results = [("compiled alone", None, compile_specs(list(specs.values())))]
    else:
        print(
            "A small case of each family runs on an emulated device, and NVRTC compiles its kernels.\n"
            "The first time this takes about a minute on two cores.",
            flush=True,
        )
        build = jit.build  # of the library itself: the emulated device has another
        jobs = []
        with ThreadPoolExecutor(1) as pool:
            for family in (family for family in families if family.small):
                device = emulator.Emulator(FOLDER)
                error, problem = run_small(family, device)
                problems += [problem] if problem else []
                ran = [spec for spec in device.kernels if spec.label in device.launched]
                jobs.append((family.title, error, pool.map(lambda spec: built(spec, build), ran)))
        results = [(title, error, list(job)) for title, error, job in jobs]
    headings = ["family", "error", "kernel", "registers", "spill B", "shared B"]
    print(fitted([headings, *(row for result in results for row in cells_of(*result))], (0, 2)))
    if not missing:
        print("error: L2 norm of the difference from the float64 reference, over the reference's.")
    found = {kernel["label"]: kernel for _, _, own in results for kernel in own}
    problems += [kernel["problem"] for kernel in found.values() if "problem" in kernel]
    for problem in problems:
        print(f"FAILED: {problem}")
    print(f"{len(found)} kernels compiled. Nothing was timed.")
    return 1 if problems else 0
