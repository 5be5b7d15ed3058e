#!/usr/bin/env python3
"""Everything that only a GPU machine can say, written to docs/gpu-record.json.

Stages, in this order: `bench` (scripts/bench.py; first, since minutes of tests heat the GPU and slow it),
`tests` (every test file by several processes, long tests first, then those that measure time by themselves),
`sanitizer` (the cases marked `sanitizer`, in parts and under each tool of compute-sanitizer, all side by
side; keep their shapes tiny). Each result is merged into the record as soon as it exists, of the benchmark
each case, so the stages, and even the files or cases of one stage, can run in separate commands. A record
made from other sources, on another GPU model or with another driver is started afresh. Tests that need two
GPUs run where there are two, and are counted as skipped elsewhere.
"""

import argparse
import datetime
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import bench
import benchlib
from benchlib import families, files, source

ROOT = benchlib.REPO_ROOT
RECORD = ROOT / "docs" / "gpu-record.json"
STAGES = ("bench", "tests", "sanitizer")
SANITIZER_TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
MEASURING_TESTS = r"host_time"
"""Names of the test files that measure time: they run with no other test beside them."""
SAME_MACHINE = ("device", "driver")
"""What the machines that add to one record have in common."""
SECONDS_BETWEEN_LOOKS = 1.0
"""At the results of the benchmark while it runs."""
SANITIZER_ERROR = 86
"""Exit status that compute-sanitizer is told to give when it finds something."""
SANITIZER_PORT, SANITIZER_PORTS = 49152, 16
"""The first of the ports by which compute-sanitizer and the process that it watches find each other, and how
many each has for itself: it tries ten, which are too few for all of them together.
"""
SANITIZER_PATIENCE = ("--launch-timeout", "300")
"""For imports of many processes at once, before their first call of CUDA: a minute by default."""
CORES = os.cpu_count() or 1
PROCESSES = max(1, min(15, CORES - 1))
"""Of pytest-xdist: more would leave a test too small a share of the GPU's memory."""
ONE_THREAD_EACH = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
"""For processes side by side. As many threads as there are cores, in each of them, would make every small
operation on the CPU wait for the others, and torch.compile would start as many processes.
"""
LONG_SECONDS = 3.0
"""Tests of so many seconds are in the record by name, for the next run to begin with."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--stage", action="append", choices=STAGES, help="run this stage only; may be repeated"
    )
    parser.add_argument("--skip-sanitizer", action="store_true", help="leave the sanitizer stage out")
    parser.add_argument("--tests", metavar="REGEX", help="run the test files whose path matches")
    parser.add_argument(
        "--test-args",
        default=f"-n {PROCESSES} --dist load --maxschedchunk 4",
        metavar="TEXT",
        help="how pytest-xdist runs the tests (default: %(default)r, so many processes share the GPU)",
    )
    parser.add_argument(
        "--tools", nargs="+", choices=SANITIZER_TOOLS, default=SANITIZER_TOOLS, help="sanitizer tools"
    )
    parser.add_argument(
        "--sanitizer-parts",
        type=int,
        default=max(1, min(4, CORES // len(SANITIZER_TOOLS))),
        metavar="N",
        help="parts of the cases, each in a process, that every tool watches (default %(default)d)",
    )
    parser.add_argument(
        "--sanitizer-args",
        default="",
        metavar="TEXT",
        help="more compute-sanitizer options, kept in the record",
    )
    parser.add_argument("--bench-args", default="", metavar="TEXT", help="more scripts/bench.py options")
    parser.add_argument(
        "--cubins",
        type=Path,
        metavar="DIR",
        help="benchmark kernels that `python -m rawmla compile --all --out DIR` wrote, by another NVRTC",
    )
    parser.add_argument("--commit", help="commit to record where the sources are no git checkout")
    parser.add_argument(
        "--record", type=Path, default=RECORD, help="the record to merge into (default docs/gpu-record.json)"
    )
    options = parser.parse_args(arguments)
    if options.sanitizer_parts < 1:
        parser.error("argument --sanitizer-parts: expected at least 1")
    return options


def stages_of(options: argparse.Namespace) -> list[str]:
    """The stages to run, in order."""
    chosen = options.stage or STAGES
    return [
        stage for stage in STAGES if stage in chosen and not (stage == "sanitizer" and options.skip_sanitizer)
    ]


def load_record(path: Path, identity: dict[str, Any]) -> dict[str, Any]:
    """The record at path when it has this `source_sha256`, `device` and `driver`; else a new one."""
    if path.exists():
        record = json.loads(path.read_text())
        others = [f"{key} {record.get(key)}" for key in identity if record.get(key) != identity[key]]
        if not others:
            return dict(record)
        print(f"{path.name}: made with other {', '.join(others)}; a new record is started")
    return {**identity, "tests": {}, "sanitizer": {}, "bench": {}}


def save_record(record: dict[str, Any], path: Path) -> None:
    """Write the record beside its place and rename it, so an interrupted run leaves a whole one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_whole(path, json.dumps(record, indent=1, sort_keys=True) + "\n")


def describe_machine() -> dict[str, Any]:
    """Device, number of GPUs, driver and package versions. Raises SystemExit without a Hopper GPU."""
    reason = bench.why_no_timing()
    if reason is not None:
        raise SystemExit(f"gpu_check.py needs a Hopper GPU: {reason}")
    import cupy
    import numpy
    import torch
    from cuda import bindings

    versions = {
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "cupy": cupy.__version__,
        "torch": str(torch.__version__),
        "cuda_bindings": bindings.__version__,
    }
    return {
        "device": torch.cuda.get_device_name(),
        "gpus": torch.cuda.device_count(),
        "driver": bench.driver_version(),
        "versions": versions,
    }


def empty_counts() -> dict[str, Any]:
    """Of a file that no test was reported of."""
    counts = {"passed": 0, "failed": 0, "skipped": 0, "seconds": 0.0}
    return {**counts, "failures": [], "skip_reasons": {}, "long": {}}


def file_of(case: ElementTree.Element) -> str:
    """The test file of a JUnit case. One that could not be collected is named by its module instead."""
    module = case.get("name", "") if not case.get("classname") else case.get("classname", "")
    return case.get("file") or module.replace(".", "/") + ".py"


def parse_junit(text: str) -> dict[str, dict[str, Any]]:
    """Per test file its counts, seconds, the names of what failed, why tests were skipped, and the seconds of
    long tests by name, from pytest's JUnit XML.
    """
    found: dict[str, dict[str, Any]] = {}
    for case in ElementTree.fromstring(text).iter("testcase"):
        counts = found.setdefault(file_of(case), empty_counts())
        name = f"{case.get('classname')}::{case.get('name')}"
        seconds = float(case.get("time", "0"))
        counts["seconds"] = round(counts["seconds"] + seconds, 3)
        if seconds >= LONG_SECONDS:
            counts["long"][name] = seconds
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            counts["failed"] += 1
            counts["failures"].append(name)
        elif skipped is not None:
            counts["skipped"] += 1
            reason = skipped.get("message", "")
            counts["skip_reasons"][reason] = counts["skip_reasons"].get(reason, 0) + 1
        else:
            counts["passed"] += 1
    return found


def sum_counts(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The counts of all files together."""
    total: dict[str, Any] = {
        key: sum(counts[key] for counts in found.values()) for key in ("passed", "failed", "skipped")
    }
    return total | {"failures": [name for counts in found.values() for name in counts["failures"]]}


def run_pytest(
    arguments: list[str], prefix: list[str], environment: dict[str, str], *, show: bool = True
) -> tuple[dict[str, dict[str, Any]], int, str]:
    """Run pytest with a JUnit report; returns the counts per file, exit status and output, which is also
    shown as it comes unless `show` is off.
    """
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder) / "junit.xml"
        command = [
            *prefix,
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-o",
            "junit_family=xunit1",  # the one that names the file of a test
            f"--junitxml={junit}",
        ]
        print("$", shlex.join([*command, *arguments]), flush=True)
        process = subprocess.Popen(
            [*command, *arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            if show:
                print(line, end="", flush=True)
            lines.append(line)
        status = process.wait()
        results = parse_junit(junit.read_text()) if junit.exists() else {}
    return results, status, "".join(lines)


def known_seconds(*records: dict[str, Any]) -> dict[str, float]:
    """What a test took, by its name where it was long, and in the mean of a file by the file's name; of
    several records the first one that has a file counts.
    """
    known: dict[str, float] = {}
    for record in records:
        for name, counts in record["tests"].items():
            number = counts["passed"] + counts["failed"]
            if name not in known and number:
                known |= counts.get("long", {})
                known[name] = counts["seconds"] / number
    return known


def side_by_side(record: dict[str, Any], folder: Path) -> dict[str, str]:
    """The environment of processes beside others: ONE_THREAD_EACH, and the order of tests/conftest.py."""
    records = [record] + ([json.loads(RECORD.read_text())] if RECORD.exists() else [])
    path = folder / "seconds.json"
    path.write_text(json.dumps(known_seconds(*records)))
    return {**ONE_THREAD_EACH, "TEST_SECONDS": str(path)}


def run_tests(record: dict[str, Any], options: argparse.Namespace) -> bool:
    """Run the test files and merge their counts; True when all passed."""
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    names = [path.relative_to(ROOT).as_posix() for path in paths]
    names = [name for name in names if not options.tests or re.search(options.tests, name)]
    alone = [name for name in names if re.search(MEASURING_TESTS, name)]
    together = [name for name in names if name not in alone]
    good = True
    for chosen, arguments in ((together, shlex.split(options.test_args)), (alone, [])):
        if not chosen:
            continue
        with tempfile.TemporaryDirectory() as folder:
            environment = side_by_side(record, Path(folder)) if chosen is together else {}
            results, status, _ = run_pytest([*arguments, *chosen], [], environment)
        for name, counts in results.items():
            record["tests"][name] = {**counts, "gpus": record["gpus"]}
        good &= status in (0, 5) and bool(results)  # 5, with results: every file was skipped as a whole
        save_record(record, options.record)
    for name in set(record["tests"]) - {path.relative_to(ROOT).as_posix() for path in paths}:
        print(f"{name}: in the record, not in the tree")
        good = False
    return good


def sanitizer_errors(output: str) -> int | None:
    """The number in compute-sanitizer's own summary (racecheck: hazards), None when there is no summary."""
    found = re.findall(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)", output)
    return sum(int(a or b) for a, b in found) if found else None


def files_with_marker(marker: str) -> list[str]:
    """The test files under tests/gpu that have the marker: importing the others would only take time."""
    text = f"pytest.mark.{marker}"
    paths = sorted((ROOT / "tests" / "gpu").glob("test_*.py"))
    return [path.relative_to(ROOT).as_posix() for path in paths if text in path.read_text()]


def sanitizer_verdict(parts: list[tuple[dict[str, dict[str, Any]], int, str]]) -> dict[str, Any]:
    """What one tool says, from the counts, exit status and output of each part of the cases.

    Clean means of every part: pytest passed, at least one case ran, and the tool's own summary counts zero
    errors. `errors` is None where a part has no summary, `exit_status` the first one that is not 0.
    """
    counts = [sum_counts(results) for results, _, _ in parts]
    errors = [sanitizer_errors(output) for _, _, output in parts]
    statuses = [status for _, status, _ in parts]
    return {
        **{key: sum(count[key] for count in counts) for key in ("passed", "failed", "skipped")},
        "failures": [name for count in counts for name in count["failures"]],
        "errors": None if None in errors else sum(number or 0 for number in errors),
        "exit_status": next((status for status in statuses if status), 0),
        "clean": not any(statuses) and all(c["passed"] for c in counts) and all(e == 0 for e in errors),
    }


def run_sanitizer(record: dict[str, Any], options: argparse.Namespace) -> bool:
    """Run the marked cases under each tool and merge the verdicts; True when all are clean.

    Each tool watches several parts of the cases, in processes of their own, and all run side by side.
    torch's allocator hands out memory without caching, so that an access outside one array is outside an
    allocation.
    """
    program = shutil.which("compute-sanitizer")
    if program is None:
        print("compute-sanitizer is not on the PATH: stage skipped")
        return False
    extra = shlex.split(options.sanitizer_args)
    chosen = ["-m", "sanitizer", *files_with_marker("sanitizer")]
    start = time.monotonic()
    good = True
    with (
        tempfile.TemporaryDirectory() as folder,
        ThreadPoolExecutor(options.sanitizer_parts * len(options.tools)) as pool,
    ):
        environment = {**side_by_side(record, Path(folder)), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}

        def run(tool: str, part: int) -> tuple[tuple[dict[str, dict[str, Any]], int, str], float]:
            prefix = [program, "--tool", tool, "--error-exitcode", str(SANITIZER_ERROR)]
            number = options.tools.index(tool) * options.sanitizer_parts + part
            prefix += ["--port", str(SANITIZER_PORT + SANITIZER_PORTS * number), *SANITIZER_PATIENCE, *extra]
            one = {**environment, "TEST_PART": f"{part}/{options.sanitizer_parts}"}
            return run_pytest(chosen, prefix, one, show=False), round(time.monotonic() - start, 1)

        parts = range(1, options.sanitizer_parts + 1)
        running = {tool: [pool.submit(run, tool, part) for part in parts] for tool in options.tools}
        for tool, futures in running.items():
            results, seconds = zip(*[future.result() for future in futures], strict=True)
            for part, (_, _, output), ended in zip(parts, results, seconds, strict=True):
                print(f"{tool}, part {part} of {len(parts)}, {ended:.0f} s:\n{output}", flush=True)
            verdict = sanitizer_verdict(list(results))
            settings = {"seconds": max(seconds), "options": options.sanitizer_args}
            record["sanitizer"][tool] = {**verdict, **settings}
            good &= verdict["clean"]
            save_record(record, options.record)
    return good


def cubin_compiler(folder: Path) -> str:
    """The NVRTC version in the meta.json files of a prebuilt folder; ValueError unless there is exactly
    one.
    """
    versions = {str(json.loads(path.read_text())["nvrtc"]) for path in sorted(folder.glob("*/meta.json"))}
    if len(versions) != 1:
        raise ValueError(f"{folder}: expected kernels of one NVRTC version, found {sorted(versions)}")
    return versions.pop()


def errors_of_rows(rows: Iterable[dict[str, Any]]) -> list[str]:
    """As scripts/bench.py notes them."""
    return [f"{row['case']}: {row['error']}" for row in rows if "error" in row]


def merge_runs(old: dict[str, Any] | None, new: dict[str, Any]) -> dict[str, Any]:
    """Two benchmarks of the same sources, compiler and device as one; none of the old figures is lost.

    Of a case in both, the newer figures count, beside those that only the older row has; one that failed now
    and did not before keeps the older row. Errors are those of the rows, and what else went wrong in the new
    run. The rest, such as the ceilings, is of the run with more cases.
    """
    if old is None:
        return new
    rows = {row["case"]: row for row in old["rows"]}
    for row in new["rows"]:
        known = rows.get(row["case"], row)
        if "error" in known:
            rows[row["case"]] = row
        elif "error" not in row:
            rows[row["case"]] = {**known, **row}
    of_new_rows = errors_of_rows(new["rows"])
    others = [error for error in new["errors"] if error not in of_new_rows]
    cases = [case for case in families.all_cases() if case.id in rows]
    lesser, greater = (new, old) if len(old["rows"]) > len(new["rows"]) else (old, new)
    return {
        **lesser,
        **greater,
        "method": families.methods(cases),
        "sustain_seconds": max(old["sustain_seconds"], new["sustain_seconds"]),
        "rows": [rows[case.id] for case in cases],
        "errors": [*others, *errors_of_rows(rows.values())],
    }


def run_bench(record: dict[str, Any], options: argparse.Namespace) -> bool:
    """Run scripts/bench.py in its own process and merge its results under its kernels' NVRTC version, each
    time it has written them; True when every case was measured.
    """
    environment = dict(os.environ)
    expected = None
    if options.cubins is not None:
        environment["RAWMLA_CUBIN_DIR"] = str(options.cubins.resolve())
        try:
            expected = cubin_compiler(options.cubins)
        except (OSError, KeyError, ValueError) as error:
            print(f"--cubins: {error}")
            return False
    before = dict(record["bench"])
    version = None

    def merge(results: Path) -> str:
        run = json.loads(results.read_text())
        found = str(run["versions"]["nvrtc"])
        if expected in (None, found):
            run["git_commit"] = record["git_commit"]
            record["bench"][found] = merge_runs(before.get(found), run)
            save_record(record, options.record)
        return found

    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "bench.json"
        extra = shlex.split(options.bench_args)
        command = [sys.executable, str(ROOT / "scripts" / "bench.py"), "--json", str(results), *extra]
        process = subprocess.Popen(command, cwd=ROOT, env=environment)
        try:
            written, ended = 0, False
            while not ended:
                ended = process.poll() is not None  # asked first, so that the last results are seen
                if results.exists() and results.stat().st_mtime_ns != written:
                    written = results.stat().st_mtime_ns
                    version = merge(results)
                if not ended:
                    time.sleep(SECONDS_BETWEEN_LOOKS)
        finally:
            process.kill()
            status = process.wait()
    if status != 0 or version is None:
        print(f"scripts/bench.py ended with status {status}")
        return False
    if expected not in (None, version):
        print(
            f"the prebuilt kernels are of NVRTC {expected}, the benchmark used NVRTC {version}: not recorded"
        )
        return False
    return True


def main(arguments: list[str] | None = None) -> int:
    """Entry point; the exit status is 0 when everything that ran is good."""
    options = parse_arguments(arguments)
    machine = describe_machine()
    identity = {"source_sha256": source.source_hash(ROOT)} | {key: machine[key] for key in SAME_MACHINE}
    record = load_record(options.record, identity)
    record |= machine
    record |= {
        "git_commit": options.commit or source.git_commit(ROOT),
        "date": datetime.date.today().isoformat(),
    }
    run = {"tests": run_tests, "sanitizer": run_sanitizer, "bench": run_bench}
    good = True
    for stage in stages_of(options):
        good &= run[stage](record, options)
    save_record(record, options.record)
    for name, counts in record["tests"].items():
        print(f"{name}: {counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    for tool, verdict in record["sanitizer"].items():
        print(f"{tool}: {'clean' if verdict['clean'] else 'NOT CLEAN'}")
    print("good" if good else "NOT GOOD")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
