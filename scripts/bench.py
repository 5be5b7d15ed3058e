#!/usr/bin/env python3
"""Benchmark of rawmla's dense and sparse decoding, sparse prefill, dense attention, prefix prefill, flex
attention, their backward, and of what goes with them.

On a machine with a Hopper GPU and torch: compiles what is not compiled yet and times every case (or those
that --cases selects) next to the ceilings of the same run. A case that fails is reported, and the others
still run. Elsewhere a small case of each family runs on an emulated device, beside the float64 reference, and
its kernels are compiled, with their registers and spills; nothing is timed.
"""

import argparse
import datetime
import importlib.util
import json
import math
import os
import platform
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import benchlib
from benchlib import against, ahead, families, files, nogpu, plot, report, source
from kit.gpu import missing_hopper_reason
from rawmla.kernels import all_specs

SUSTAINED_TOTAL_SECONDS = 360.0
"""Load of all cases together; with more cases than it has room for, each gets less than --sustain-seconds."""

UNUSABLE_CUBINS = 2
"""Exit status when RAWMLA_CUBIN_DIR cannot be used."""

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""


class Parser(argparse.ArgumentParser):
    """An argument parser that says in one line what is wrong."""

    def error(self, message: str) -> NoReturn:
        """Exit with status 2."""
        self.exit(2, f"{self.prog}: {message}\n")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line, checked as far as it can be before anything runs. `chosen` are the cases, `stored`
    the times to compare with.
    """
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cases", metavar="REGEX", help="run the cases whose name matches, e.g. 'b128-q1' or 'metadata'"
    )
    parser.add_argument("--list", action="store_true", help="print the names of the cases and stop")
    parser.add_argument(
        "--replays", type=int, default=5, help="graph replays per figure, at least 5 (default 5)"
    )
    parser.add_argument(
        "--sustain-seconds",
        type=float,
        default=2.0,
        metavar="S",
        help="seconds of load without rest for the sustained figure of an attention case (default 2, 0: none;"
        f" all cases together at most {SUSTAINED_TOTAL_SECONDS:.0f})",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the results to FILE, anew after each case"
    )
    parser.add_argument(
        "--against", type=Path, metavar="FILE", help="print the ratio to stored times taken the same way"
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="time flash_mla, FlashAttention-3 and torch where importable, in turns with rawmla (cuDNN and"
        " FlashAttention-4 beside dense attention, torch's flex attention beside ours: always)",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a roofline PNG to FILE")
    options = parser.parse_args(arguments)
    if options.replays < 5:
        parser.error("argument --replays: expected at least 5")
    if not (math.isfinite(options.sustain_seconds) and options.sustain_seconds >= 0):
        parser.error("argument --sustain-seconds: expected 0 or more")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error('argument --plot: matplotlib is not installed (pip install -e ".[plot]")')
    checks: dict[str, Any] = {
        "cases": lambda: families.select(options.cases),
        "against": lambda: against.load(options.against) if options.against else [],
        "json": lambda: files.check_writable(options.json) if options.json else None,
        "plot": lambda: files.check_writable(options.plot) if options.plot else None,
    }
    answers = {}
    for name, check in checks.items():
        try:
            answers[name] = check()
        except ValueError as error:
            parser.error(f"argument --{name}: {error}")
    options.chosen, options.stored = answers["cases"], answers["against"]
    return options


def why_no_timing() -> str | None:
    """None on a machine that can time; else the reason."""
    reason = missing_hopper_reason()
    if reason is not None:
        return reason
    import torch

    return None if torch.cuda.is_available() else "PyTorch sees no CUDA GPU"


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


def environment(kernels: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Device, driver and versions of a timed run; of NVRTC the one that made the kernels (several where a
    prebuilt folder holds a mixture).
    """
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
            "nvrtc": ", ".join(sorted({str(kernel["nvrtc"]) for kernel in kernels if "nvrtc" in kernel})),
        },
        "prebuilt_cubins": bool(os.environ.get("RAWMLA_CUBIN_DIR")),
    }


def sustain_seconds(chosen: Sequence[families.Case], wanted: float) -> float:
    """Seconds of load per case: what is wanted, or less where SUSTAINED_TOTAL_SECONDS has no room for it."""
    count = sum(families.family_of(case.id).attention for case in chosen)
    return min(wanted, SUSTAINED_TOTAL_SECONDS / max(count, 1))


def time_case(case: families.Case, settings: families.Settings) -> dict[str, Any]:
    """The row of a case; of one that fails a row with its `error`."""
    import torch

    try:
        row = families.family_of(case.id).measure(case, settings)
        torch.cuda.empty_cache()
    except Exception as error:  # whatever went wrong, the other cases are still worth their time
        row = {"case": case.id, **case.fields(), "error": report.one_line(error)}
    return row


def compile_kernels() -> list[dict[str, Any]]:
    """Every kernel, ready before anything is timed. Raises RuntimeWarning where RAWMLA_CUBIN_DIR is set and
    lacks one: another NVRTC would compile it, and the figures would be mislabelled.
    """
    if os.environ.get("RAWMLA_CUBIN_DIR"):
        warnings.filterwarnings("error", message=".*RAWMLA_CUBIN_DIR")
    kernels = nogpu.compile_specs(all_specs())
    for kernel in kernels:
        if "problem" in kernel:
            print(f"DOES NOT COMPILE: {kernel['problem']}", flush=True)
    return kernels


def store(result: dict[str, Any], path: Path | None) -> None:
    """Write the results to the file of --json."""
    if path is not None:
        files.write_whole(path, json.dumps(result, indent=1) + "\n")


def measure_all(result: dict[str, Any], options: argparse.Namespace, settings: families.Settings) -> None:
    """Ceilings, cases, ceilings again and host time, written into `result`, which is stored after each.

    What fails is one line of `result["errors"]`, and the rest goes on. Only without the first ceilings,
    which need no kernel of rawmla, nothing is measured.
    """
    from benchlib import flex_measure, measure

    result["ceilings"] = [measure.measure_ceilings(settings.replays)]
    rows = result["rows"]
    progress = report.Progress(len(options.chosen), sys.stderr)
    for case in options.chosen:
        row = time_case(case, settings)
        rows.append(row)
        if "error" in row:
            result["errors"].append(f"{case.id}: {row['error']}")
        report.add_shares(rows, report.best_ceilings(result["ceilings"]))
        store(result, options.json)
        progress.step(f"{row['us']:8.1f} µs  {case.id}" if "us" in row else f"FAILED  {result['errors'][-1]}")
    try:
        result["ceilings"].append(measure.measure_ceilings(settings.replays))
        result["host"] = measure.time_host()
        result["host"] |= flex_measure.time_host()
    except Exception as error:  # as for a case
        result["errors"].append(f"ceilings and host time after the cases: {report.one_line(error)}")
    report.add_shares(rows, report.best_ceilings(result["ceilings"]))
    store(result, options.json)


def run_timed(options: argparse.Namespace, result: dict[str, Any]) -> None:
    """Compile, measure into `result`, print the tables."""
    beside = ahead.Ahead(options.chosen)
    try:
        kernels = compile_kernels()
        beside.wait()
    finally:
        beside.stop()
    settings = families.Settings(
        options.replays, sustain_seconds(options.chosen, options.sustain_seconds), options.compare
    )
    result |= {"timed": True, "date": datetime.date.today().isoformat(), **environment(kernels)}
    result |= {
        "git_commit": source.git_commit(benchlib.REPO_ROOT),
        "method": families.methods(options.chosen),
        "replays": settings.replays,
        "sustain_seconds": settings.sustain_seconds,
        "rows": [],
        "errors": [f"does not compile: {kernel['label']}" for kernel in kernels if "problem" in kernel],
    }
    measure_all(result, options, settings)
    rows = result["rows"]
    print(f"{result['device']}, driver {result['driver']}, versions {result['versions']}")
    print(report.describe_ceilings(result["ceilings"]))
    print(f"\n{report.text_report(rows, options.stored)}\n")
    failures = dict.fromkeys(item for row in rows for item in row.get("not_compared", {}).items())
    for name, text in failures:
        print(f"not compared with {name}: {text}")
    if "host" in result:
        print(report.describe_host(result["host"]))
    print(result["method"])
    for text in result["errors"]:
        print(f"FAILED: {text}")
    if options.plot:
        title = f"rawmla on {result['device']}, under the ceilings of the same run"
        plot.roofline(rows, result["ceilings"], title, options.plot)


def run(arguments: list[str] | None) -> int:
    """The program; see main."""
    options = parse_arguments(arguments)
    if options.list:
        print("\n".join(case.id for case in options.chosen))
        return 0
    reason = why_no_timing()
    result: dict[str, Any] = {"source_sha256": source.source_hash(benchlib.REPO_ROOT)}
    if reason is None:
        run_timed(options, result)
        return 1 if result["errors"] else 0
    chosen = dict.fromkeys(families.family_of(case.id) for case in options.chosen)
    result |= nogpu.run(reason, list(chosen))
    store(result, options.json)
    return 0 if result["good"] else 1


def main(arguments: list[str] | None = None) -> int:
    """Entry point; the exit status is 0 unless a case fails or a kernel does not compile."""
    try:
        return run(arguments)
    except RuntimeWarning as warning:
        if "RAWMLA_CUBIN_DIR" not in str(warning):
            raise
        folder = os.environ.get("RAWMLA_CUBIN_DIR")
        remedy = f" (chmod -R go-w {folder})" if "writable for others" in str(warning) else ""
        print(f"bench.py: {warning}{remedy}", file=sys.stderr)
        return UNUSABLE_CUBINS
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
