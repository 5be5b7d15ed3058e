#!/usr/bin/env python3
"""Benchmark of rawmla's dense and sparse decoding, of its sparse prefill, and of what goes with them.

On a machine with a Hopper GPU and torch: times every case (or those that --cases selects) next to the
ceilings of the same run. Elsewhere: compiles every kernel, reports registers, spills, shared memory and
compile time, checks the reference, and says that nothing was timed.
"""

import argparse
import datetime
import importlib.util
import json
import os
import platform
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

import benchlib
from benchlib import against, cache_cases, cases, plot, report, source

TERMINAL_WIDTH = 200


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cases", metavar="REGEX", help="run the cases whose name matches, e.g. 'b128-q1' or 'metadata'"
    )
    parser.add_argument("--list", action="store_true", help="print the names of the cases and stop")
    parser.add_argument(
        "--replays", type=int, default=5, help="graph replays per figure, at least 5 (default 5)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE")
    parser.add_argument("--against", type=Path, metavar="FILE", help="print the ratio to a stored run")
    parser.add_argument(
        "--compare", action="store_true", help="time flash_mla, FlashAttention-3 and torch where importable"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a roofline PNG to FILE")
    options = parser.parse_args(arguments)
    if options.replays < 5:
        parser.error("--replays must be at least 5")
    return options


def why_no_timing() -> str | None:
    """None on a machine that can time; else the reason in a sentence."""
    if importlib.util.find_spec("torch") is None:
        return "PyTorch is not installed (timing needs it: pip install torch)."
    import torch

    if not torch.cuda.is_available():
        return "No CUDA GPU is visible to PyTorch."
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        return f"{torch.cuda.get_device_name()} has compute capability {capability}, not (9, 0) (Hopper)."
    return None


def kernel_compilers() -> list[str]:
    """NVRTC versions that made the kernels in use (one, unless a prebuilt folder holds a mixture)."""
    from rawmla import jit, kernels

    return sorted({str(jit.build(spec).meta["nvrtc"]) for spec in kernels.default_specs()})


def driver_version() -> str | None:
    """The display driver's version, from nvidia-smi."""
    try:
        answer = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.splitlines()[0].strip() if answer.stdout.strip() else None


def environment() -> dict[str, Any]:
    """Device, driver and versions of a timed run."""
    import torch

    import rawmla

    properties = torch.cuda.get_device_properties(0)
    versions = {
        "rawmla": rawmla.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }
    return {
        "device": properties.name,
        "sm_count": properties.multi_processor_count,
        "driver": driver_version(),
        "versions": {
            **versions,
            "torch_cuda": str(torch.version.cuda),
            "nvrtc": ", ".join(kernel_compilers()),
        },
        "prebuilt_cubins": bool(os.environ.get("RAWMLA_CUBIN_DIR")),
    }


def run_cases(
    chosen: list[cases.Case], options: argparse.Namespace, progress: Progress, console: Console
) -> list[dict[str, Any]]:
    """Time every chosen case; with --compare the peers on the same inputs too."""
    import torch

    from benchlib import measure, peers, prefill_measure, sparse_measure

    rows = []
    failures: dict[str, str] = {}
    for case in progress.track(chosen, description="timing"):
        if isinstance(case, cases.MetadataCase):
            rows.append(measure.time_metadata_case(case, options.replays))
            continue
        if isinstance(case, cache_cases.Case):
            rows.append(measure.time_cache_case(case, options.replays))
            torch.cuda.empty_cache()
            continue
        inputs: Any
        if isinstance(case, cases.SparseCase):
            row, inputs = sparse_measure.time_sparse(case, options.replays)
        elif isinstance(case, cases.PrefillCase):
            row, inputs = prefill_measure.time_prefill(case, options.replays)
        else:
            row, inputs = measure.time_decode(case, options.replays)
        if options.compare:
            answers = peers.time_peers(case, inputs, options.replays)
            row["peers"] = {name: us for name, us in answers.items() if isinstance(us, float)}
            failures |= {name: text for name, text in answers.items() if isinstance(text, str)}
        rows.append(row)
        del inputs
        torch.cuda.empty_cache()
    for name, text in failures.items():
        console.print(f"not compared with {name}: {text}", markup=False)
    return rows


def run_timed(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Ceilings, cases, ceilings again; prints the tables and returns the results."""
    from benchlib import measure

    chosen = cases.select(cases.all_cases(), options.cases)
    stored = against.load(options.against) if options.against else []
    if os.environ.get("RAWMLA_CUBIN_DIR"):
        # A kernel that the prebuilt folder lacks would be compiled by another NVRTC, and the figures
        # mislabelled.
        warnings.filterwarnings("error", message=".*RAWMLA_CUBIN_DIR")
    result: dict[str, Any] = {"timed": True, "date": datetime.date.today().isoformat(), **environment()}
    result |= {
        "git_commit": source.git_commit(benchlib.REPO_ROOT),
        "method": report.methods([case.fields() for case in chosen]),
        "replays": options.replays,
    }
    ceilings = [measure.measure_ceilings(options.replays)]
    with report.progress_bar(console) as progress:
        rows = run_cases(chosen, options, progress, console)
    ceilings.append(measure.measure_ceilings(options.replays))
    result |= {"host": measure.time_host(), "ceilings": ceilings, "rows": rows}
    report.add_shares(rows, report.best_ceilings(ceilings))
    console.print(
        f"{result['device']}, driver {result['driver']}, versions {result['versions']}", markup=False
    )
    console.print(report.describe_ceilings(ceilings))
    for table in (
        report.decode_table,
        report.sparse_table,
        report.prefill_table,
        report.metadata_table,
        report.cache_table,
    ):
        filled = table(rows, stored)
        if filled.row_count:
            console.print(filled)
    if stored:
        console.print(report.means_table(rows, stored))
    host = result["host"]
    console.print(report.describe_host(host))
    console.print(result["method"], soft_wrap=True, markup=False)
    if options.plot:
        plot.roofline({"rawmla": result}, result["device"], options.plot)
    return result


def main(arguments: list[str] | None = None) -> int:
    """Entry point; the exit status is 0 unless a kernel does not compile or the reference differs."""
    options = parse_arguments(arguments)
    if options.list:
        print("\n".join(case.id for case in cases.all_cases()))
        return 0
    console = Console() if sys.stdout.isatty() else Console(width=TERMINAL_WIDTH)
    reason = why_no_timing()
    if reason is None:
        result = run_timed(options, console)
    else:
        from benchlib import nogpu

        result = nogpu.run(console, reason)
    result = {"source_sha256": source.source_hash(benchlib.REPO_ROOT), **result}
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if result.get("good", True) else 1


if __name__ == "__main__":
    sys.exit(main())
