"""Compiling kernels, and what the benchmark does without a Hopper GPU: a small case of each family on an
emulated device.
"""

import importlib.util
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

from rawmla import jit, kernels
from rawmla.errors import CompileError

from . import REPO_ROOT
from .columns import EMPTY, Cells
from .families import Family
from .report import Progress, fitted, one_line

FOLDER = REPO_ROOT / "build" / "emulator"
"""Where the emulator keeps the kernels that g++ compiles."""

KEPT = (
    "label",
    "threads",
    "registers",
    "spill_stores",
    "spill_loads",
    "local_bytes",
    "static_shared_bytes",
    "dynamic_shared_bytes",
    "compile_seconds",
    "nvrtc",
    "problem",
)
"""Fields of a kernel's build metadata that --json stores."""

Build = Callable[[jit.KernelSpec], Any]


def built(spec: jit.KernelSpec, build: Build) -> dict[str, Any]:
    """Label, resources and compile time of a variant; of one that does not compile, label and `problem`."""
    try:
        return {"label": spec.label, **build(spec).meta}
    except CompileError as error:
        return {"label": spec.label, "problem": str(error)}


def compile_specs(specs: Sequence[jit.KernelSpec]) -> list[dict[str, Any]]:
    """Build variants on all cores, or take them from the cache; see `built`."""
    progress = Progress(len(specs), sys.stderr)
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # NVRTC runs without the interpreter lock
        jobs = {pool.submit(built, spec, jit.build): spec for spec in specs}
        try:
            for job in as_completed(jobs):
                job.result()  # raises what makes the rest useless, such as a prebuilt folder that is refused
                progress.step(f"compiled {jobs[job].label}")
        finally:
            pool.shutdown(cancel_futures=True)
    return [job.result() for job in jobs]


@dataclass
class Row:
    """What came of a family's small case, and the kernels that it ran: see `built`."""

    title: str
    error: float | None = None
    problem: str = ""
    kernels: Sequence[dict[str, Any]] = ()


def run_small(families: Sequence[Family]) -> list[Row]:
    """Run the small case of each family on an emulated device, while NVRTC compiles the kernels."""
    from tests.emulator import Emulator
    from tests.emulator.__main__ import case_of
    from tests.emulator.cases import check

    build = jit.build  # of the library itself: the emulated device has another
    progress = Progress(len(families), sys.stderr)
    rows, jobs = [], []
    with ThreadPoolExecutor(1) as pool:
        for family in families:
            row, emulator = Row(family.title), Emulator(FOLDER)
            name, *fields = shlex.split(family.small)
            try:
                with emulator.installed():
                    row.error = check(name, case_of(name, fields))
            except Exception as problem:  # whatever went wrong, the other families are still worth their time
                row.problem = f"{family.small}: {one_line(problem)}"
            progress.step(f"{'FAILED' if row.problem else 'ran'} {family.title}: {family.small}")
            rows.append(row)
            ran = [spec for spec in emulator.kernels if spec.label in emulator.launched]
            jobs.append([pool.submit(built, spec, build) for spec in ran])
        for row, own in zip(rows, jobs, strict=True):
            row.kernels = [job.result() for job in own]
    return rows


def missing_reason() -> str | None:
    """Why nothing can be emulated here, or None."""
    for module in ("torch", "pytest"):
        if importlib.util.find_spec(module) is None:
            return f"the emulator needs {module}"
    from tests import emulator

    return emulator.missing_reason()


def cells_of(rows: Sequence[Row]) -> Cells:
    """A line for each kernel of each row."""
    cells = [["family", "error", "kernel", "registers", "spill B", "shared B"]]
    for row in rows:
        first = [row.title, EMPTY if row.error is None else f"{row.error:.1e}"]
        for kernel in row.kernels:
            figures = [EMPTY] * 3
            if "problem" not in kernel:
                spills = kernel["spill_stores"] + kernel["spill_loads"]
                shared = kernel["static_shared_bytes"] + kernel["dynamic_shared_bytes"]
                figures = [str(kernel["registers"]), str(spills), str(shared)]
            cells.append([*first, kernel["label"].partition("[")[0], *figures])
            first = ["", ""]
    return cells


def run(reason: str, families: Sequence[Family]) -> dict[str, Any]:
    """Run the small cases of families, or only compile kernels where nothing can be emulated; the result says
    that nothing was timed, and why.
    """
    families = [family for family in families if family.small]
    missing = missing_reason()
    if missing is None:
        print(
            f"{reason}: nothing is timed.\nA small case of each family runs on an emulated device, and NVRTC "
            "compiles its kernels for a GPU.\nThe first time this takes about a minute on two cores.",
            flush=True,
        )
        rows = run_small(families)
    else:
        print(f"{reason}: nothing is timed.\n{missing}: no kernel runs, one variant of each is compiled.")
        specs = {spec.name: spec for spec in reversed(kernels.all_specs())}
        rows = [Row("compiled alone", kernels=compile_specs(list(specs.values())))]
    print(fitted(cells_of(rows), (0, 2)))
    found = {kernel["label"]: kernel for row in rows for kernel in row.kernels}
    problems = [row.problem for row in rows if row.problem]
    problems += [kernel["problem"] for kernel in found.values() if "problem" in kernel]
    for problem in problems:
        print(f"FAILED: {problem}")
    if missing is None:
        print(
            "error: L2 norm of the difference from the float64 reference, over the norm of the reference.\n"
            "One case again, or with other numbers:\n"
            + "\n".join(f"  python -m tests.emulator {family.small}" for family in families[:1])
        )
    print(f"{len(found)} kernels compiled. Nothing was timed.")
    return {
        "timed": False,
        "reason": reason,
        "errors": {row.title: row.error for row in rows},
        "kernels": [{key: kernel[key] for key in KEPT if key in kernel} for kernel in found.values()],
        "good": not problems,
    }
