"""Compiling every kernel, and what else the benchmark does without a Hopper GPU: check the reference."""

import math
import os
import random
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import numpy as np

from rawmla import jit, kernels, reference
from rawmla.errors import CompileError

from .cases import D_V
from .report import Cells, Progress, aligned

TOLERANCE = 1e-10
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


def compile_all() -> list[dict[str, Any]]:
    """Build every kernel variant on all cores, or take it from the cache, and return label, resources and
    compile time of each; of one that does not compile, label and `problem`.
    """
    specs = kernels.all_specs()

    def build(spec: jit.KernelSpec) -> dict[str, Any]:
        try:
            return {"label": spec.label, **jit.build(spec).meta}
        except CompileError as error:
            return {"label": spec.label, "problem": str(error)}

    progress = Progress(len(specs), sys.stderr)
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # NVRTC runs without the interpreter lock
        jobs = {pool.submit(build, spec): spec for spec in specs}
        try:
            for job in as_completed(jobs):
                job.result()  # raises what makes the rest useless, such as a prebuilt folder that is refused
                progress.step(f"compiled {jobs[job].label}")
        finally:
            pool.shutdown(cancel_futures=True)
    return [job.result() for job in jobs]


def compile_cells(rows: list[dict[str, Any]]) -> Cells:
    """compile_all as a table."""
    cells = [
        ["kernel", "threads", "registers", "spill B", "local B", "shared B", "compile s", "NVRTC", "from"]
    ]
    for row in rows:
        if "problem" in row:
            continue
        cells.append(
            [
                row["label"],
                str(row["threads"]),
                str(row["registers"]),
                str(row["spill_stores"] + row["spill_loads"]),
                str(row["local_bytes"]),
                str(row["static_shared_bytes"] + row["dynamic_shared_bytes"]),
                f"{row['compile_seconds']:.2f}",
                str(row["nvrtc"]),
                str(row["origin"]),
            ]
        )
    return cells


def reference_error() -> float:
    """Largest difference of rawmla.reference from a computation that shares nothing with it.

    Scalar Python with exactly rounded sums, on a small causal case with permuted pages and three lengths,
    one of them zero. Infinities must agree; else the answer is infinite.
    """
    rng = random.Random(1)
    d_qk, page, s_q, h_q, lengths = 576, 16, 2, 2, [37, 0, 5]
    table = [[5, 0, 3], [0, 0, 0], [1, 0, 0]]
    cache = [[[rng.gauss(0, 1) for _ in range(d_qk)] for _ in range(page)] for _ in range(6)]
    q = [[[[rng.gauss(0, 1) for _ in range(d_qk)] for _ in range(h_q)] for _ in range(s_q)] for _ in lengths]
    out, lse = reference.flash_mla_with_kvcache(
        np.array(q),
        np.array(cache)[:, :, None, :],
        np.array(table, dtype=np.int32),
        np.array(lengths, dtype=np.int32),
        D_V,
        None,
        causal=True,
    )
    worst = 0.0
    for i, length in enumerate(lengths):
        tokens = [cache[table[i][t // page]][t % page] for t in range(length)]
        for j in range(s_q):
            keys = tokens[: max(0, length - s_q + j + 1)]
            for h in range(h_q):
                scores = [
                    math.fsum(x * y for x, y in zip(q[i][j][h], key, strict=True)) / math.sqrt(d_qk)
                    for key in keys
                ]
                total = math.fsum(math.exp(score) for score in scores)
                want_lse = math.log(total) if keys else math.inf
                got = float(lse[i, h, j])
                worst = max(worst, 0.0 if got == want_lse else abs(got - want_lse))
                for column in range(D_V):
                    weighted = math.fsum(
                        math.exp(s) * key[column] for s, key in zip(scores, keys, strict=True)
                    )
                    want = weighted / total if keys else 0.0
                    worst = max(worst, abs(float(out[i, j, h, column]) - want))
    return worst


def run(reason: str) -> dict[str, Any]:
    """Compile report and reference check; the result says that nothing was timed, and why."""
    print(f"{reason}. Nothing is timed: the kernels are compiled and the reference is checked.", flush=True)
    rows = compile_all()
    print(aligned(compile_cells(rows)))
    problems = [row for row in rows if "problem" in row]
    for row in problems:
        print(f"DOES NOT COMPILE: {row['problem']}")
    error = reference_error()
    agrees = error < TOLERANCE
    verdict = "agrees with" if agrees else "DIFFERS from"
    print(f"rawmla.reference {verdict} an independent computation: largest difference {error:.1e}.")
    print("Nothing was timed.")
    return {
        "timed": False,
        "reason": reason,
        "kernels": [{key: row[key] for key in KEPT if key in row} for row in rows],
        "reference_error": error,
        "good": agrees and not problems,
    }
