#!/usr/bin/env python3
"""Everything that only a GPU machine can say, written to docs/gpu-record.json.

Stages, in this order: `bench` (scripts/bench.py; first, since minutes of tests heat the GPU and slow it),
`tests` (every test file by several processes, long tests first, then those that measure time by themselves),
`sanitizer` (the cases marked `sanitizer`, in parts and under each tool of compute-sanitizer, all side by
side; keep their shapes tiny). A run of a stage is one part of the record, with its machine; what ran before
stays beside what runs again. So the stages, and even the files or cases of one stage, can run in separate
commands, on several machines of one kind: `--record FILE` writes elsewhere, `--merge FILE ...` makes one
record of several, and says what failed or is missing. Tests that need two GPUs run where there are two, and
are counted as skipped elsewhere.
"""

import argparse
import datetime
import importlib.util
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
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bench
import benchlib
from benchlib import families, record, source

ROOT = benchlib.REPO_ROOT
RECORD = ROOT / "docs" / "gpu-record.json"
STAGES = ("bench", "tests", "sanitizer")
SANITIZER_TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
MEASURING_TESTS = r"host_time"
"""Names of the test files that measure time: they run with no other test beside them."""
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
"""Processes of pytest-xdist. With more, a test would have too small a share of the GPU's memory."""
ONE_THREAD_EACH = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
"""For processes side by side. As many threads as there are cores, in each of them, would make every small
operation on the CPU wait for the others, and torch.compile would start as many processes.
"""
LONG_SECONDS = 3.0
"""Tests that take this long are in the record by name, for the next run to begin with."""
OF_A_BENCHMARK = ("replays", "sustain_seconds", "ceilings", "host", "errors", "rows")
"""What a part of the record has of a file of scripts/bench.py."""


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
        default=f"-n {PROCESSES} --dist load --maxschedchunk 4" if importlib.util.find_spec("xdist") else "",
        metavar="TEXT",
        help="options of pytest-xdist (default: %(default)r, where -n is how many processes share the GPU;"
        " none where pytest-xdist is not installed)",
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
        "--record", type=Path, default=RECORD, help="the record to add to (default docs/gpu-record.json)"
    )
    parser.add_argument(
        "--merge", nargs="+", type=Path, metavar="FILE", help="run nothing; write these records as one"
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


@dataclass
class Run:
    """A part of the record while it is made, and the parts before it."""

    options: argparse.Namespace
    part: record.Part
    earlier: list[record.Part]

    def parts(self) -> list[record.Part]:
        """The earlier ones, and this one if it has a row."""
        return [*self.earlier, record.sealed(self.part)] if self.part["rows"] else self.earlier

    def save(self) -> None:
        """Write the record with the rows that are known by now."""
        if self.part["rows"]:
            record.write(self.parts(), self.options.record)


def describe_machine() -> dict[str, Any]:
    """Device, number of GPUs, driver, cores and versions. Raises SystemExit without a Hopper GPU."""
    reason = bench.why_no_timing()
    if reason is not None:
        raise SystemExit(f"gpu_check.py needs a Hopper GPU: {reason}")
    import cupy
    import numpy
    import torch
    from cuda import bindings

    from rawmla.jit import nvrtc

    return {
        "device": torch.cuda.get_device_name(),
        "gpus": torch.cuda.device_count(),
        "driver": bench.driver_version(),
        "cores": CORES,
        "nvrtc": nvrtc.version(),
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "cupy": cupy.__version__,
        "torch": str(torch.__version__),
        "cuda_bindings": bindings.__version__,
    }


def now() -> str:
    """Date and time, of UTC."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


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
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        process = subprocess.Popen(
            [*command, *arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment},
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


def known_seconds(rows: Iterable[dict[str, Any]]) -> dict[str, float]:
    """What a test took, by its name where it was long, and in the mean of a file by the file's name."""
    known: dict[str, float] = {}
    for row in rows:
        number = row["passed"] + row["failed"]
        if number:
            known |= row["long"]
            known[row["file"]] = row["seconds"] / number
    return known


def side_by_side(run: Run, folder: Path) -> dict[str, str]:
    """The environment of processes beside others: ONE_THREAD_EACH, and the order of tests/conftest.py."""
    known = (record.read(RECORD) if RECORD.exists() else []) + run.earlier
    path = folder / "seconds.json"
    path.write_text(json.dumps(known_seconds(record.latest(known, "tests"))))
    return {**ONE_THREAD_EACH, "TEST_SECONDS": str(path)}


def test_files() -> list[str]:
    """The test files of the tree."""
    return [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "tests").rglob("test_*.py"))]


def run_tests(run: Run) -> bool:
    """Run the test files and note their counts; True when all passed."""
    names = [name for name in test_files() if not run.options.tests or re.search(run.options.tests, name)]
    alone = [name for name in names if re.search(MEASURING_TESTS, name)]
    together = [name for name in names if name not in alone]
    good = True
    for chosen, arguments in ((together, shlex.split(run.options.test_args)), (alone, [])):
        if not chosen:
            continue
        with tempfile.TemporaryDirectory() as folder:
            environment = side_by_side(run, Path(folder)) if chosen is together else {}
            results, status, _ = run_pytest(["--full", *arguments, *chosen], [], environment)
        run.part["rows"] += [{"file": name, **counts} for name, counts in results.items()]
        good &= status in (0, 5) and bool(results)  # 5, with results: every file was skipped as a whole
        run.save()
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


def run_sanitizer(run: Run) -> bool:
    """Run the marked cases under each tool and note the verdicts; True when all are clean.

    Each tool watches several parts of the cases, in processes of their own, and all run side by side.
    torch's allocator hands out memory without caching, so that an access outside one array is outside an
    allocation.
    """
    program = shutil.which("compute-sanitizer")
    if program is None:
        print("compute-sanitizer is not on the PATH: stage skipped")
        return False
    options = run.options
    extra = shlex.split(options.sanitizer_args)
    chosen = ["-m", "sanitizer", *files_with_marker("sanitizer")]
    start = time.monotonic()
    good = True
    with (
        tempfile.TemporaryDirectory() as folder,
        ThreadPoolExecutor(options.sanitizer_parts * len(options.tools)) as pool,
    ):
        environment = {**side_by_side(run, Path(folder)), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}

        def watch(tool: str, part: int) -> tuple[tuple[dict[str, dict[str, Any]], int, str], float]:
            prefix = [program, "--tool", tool, "--error-exitcode", str(SANITIZER_ERROR)]
            number = options.tools.index(tool) * options.sanitizer_parts + part
            prefix += ["--port", str(SANITIZER_PORT + SANITIZER_PORTS * number), *SANITIZER_PATIENCE, *extra]
            one = {**environment, "TEST_PART": f"{part}/{options.sanitizer_parts}"}
            return run_pytest(chosen, prefix, one, show=False), round(time.monotonic() - start, 1)

        parts = range(1, options.sanitizer_parts + 1)
        running = {tool: [pool.submit(watch, tool, part) for part in parts] for tool in options.tools}
        for tool, futures in running.items():
            results, seconds = zip(*[future.result() for future in futures], strict=True)
            for part, (_, _, output), ended in zip(parts, results, seconds, strict=True):
                print(f"{tool}, part {part} of {len(parts)}, {ended:.0f} s:\n{output}", flush=True)
            verdict = sanitizer_verdict(list(results))
            run.part["rows"].append({"tool": tool, **verdict, "seconds": max(seconds)})
            good &= verdict["clean"]
            run.save()
    return good


def cubin_compiler(folder: Path) -> str:
    """The NVRTC version in the meta.json files of a prebuilt folder; ValueError unless there is exactly
    one.
    """
    versions = {str(json.loads(path.read_text())["nvrtc"]) for path in sorted(folder.glob("*/meta.json"))}
    if len(versions) != 1:
        raise ValueError(f"{folder}: expected kernels of one NVRTC version, found {sorted(versions)}")
    return versions.pop()


def run_bench(run: Run) -> bool:
    """Run scripts/bench.py in its own process and note its results each time it has written them; True when
    every case was measured.
    """
    environment = dict(os.environ)
    expected = None
    if run.options.cubins is not None:
        environment["RAWMLA_CUBIN_DIR"] = str(run.options.cubins.resolve())
        try:
            expected = cubin_compiler(run.options.cubins)
        except (OSError, KeyError, ValueError) as error:
            print(f"--cubins: {error}")
            return False
    version = None

    def note(results: Path) -> str:
        found: dict[str, Any] = json.loads(results.read_text())
        nvrtc = str(found["versions"]["nvrtc"])
        if expected in (None, nvrtc):
            run.part |= {key: found[key] for key in OF_A_BENCHMARK if key in found}
            run.part["machine"] = {**run.part["machine"], "nvrtc": nvrtc}
            run.save()
        return nvrtc

    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "bench.json"
        extra = shlex.split(run.options.bench_args)
        command = [sys.executable, str(ROOT / "scripts" / "bench.py"), "--json", str(results), *extra]
        process = subprocess.Popen(command, cwd=ROOT, env=environment)
        try:
            written, ended = 0, False
            while not ended:
                ended = process.poll() is not None  # before the look at the file, which is then the last one
                if results.exists() and results.stat().st_mtime_ns != written:
                    written = results.stat().st_mtime_ns
                    version = note(results)
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


OPTIONS = {
    "bench": ("bench_args",),
    "tests": ("tests", "test_args"),
    "sanitizer": ("tools", "sanitizer_parts", "sanitizer_args"),
}
"""What a part keeps of the command line."""
RUNS = {"bench": run_bench, "tests": run_tests, "sanitizer": run_sanitizer}


def run_stage(
    stage: str, options: argparse.Namespace, same: dict[str, Any], earlier: list[record.Part]
) -> Run:
    """Run a stage; its part of the record says whether it is good. `same`: what parts of a call have in
    common.
    """
    begin = time.monotonic()
    given = {name: getattr(options, name) for name in OPTIONS[stage]}
    part = {"stage": stage, "begin": now(), **same, "options": given, "ended": False, "rows": []}
    run = Run(options, part, earlier)
    good = RUNS[stage](run)
    run.part |= {"ended": True, "good": good, "seconds": round(time.monotonic() - begin)}
    run.save()
    return run


def earlier_parts(path: Path, identity: dict[str, Any]) -> list[record.Part]:
    """The parts of the record at path when they have this identity; else none, a new record is started."""
    parts = record.read(path) if path.exists() else []
    others = {
        f"{key} {value}"
        for part in parts
        for key, value in record.identity(part).items()
        if value != identity[key]
    }
    if others:
        print(f"{path.name}: made with other {', '.join(sorted(others))}; a new record is started")
    return [] if others else parts


def shortcomings(parts: Sequence[record.Part]) -> list[str]:
    """What failed, in the results that count, and what a whole record has beside."""
    found = record.errors(parts)
    for row in record.latest(parts, "tests"):
        found += [f"failed: {name}" for name in row["failures"]]
    found += [f"{row['tool']}: not clean" for row in record.latest(parts, "sanitizer") if not row["clean"]]
    whole = {
        "bench": [case.id for case in families.all_cases()],
        "tests": test_files(),
        "sanitizer": SANITIZER_TOOLS,
    }
    for stage, names in whole.items():
        there = record.results(parts, stage)
        found += [f"{stage}: without {name}" for name in names if name not in there]
    return found


def merge(options: argparse.Namespace) -> int:
    """Make one record of several; the exit status is 0 when nothing failed and nothing is missing."""
    parts = record.merged([record.read(path) for path in options.merge])
    record.write(parts, options.record)
    lacks = shortcomings(parts)
    print("\n".join([*lacks, f"{len(parts)} parts: {'NOT WHOLE' if lacks else 'whole and good'}"]))
    return 1 if lacks else 0


def run_stages(options: argparse.Namespace) -> int:
    """Run the chosen stages; the exit status is 0 when everything that ran is good."""
    machine = describe_machine()
    same = {
        "source_sha256": source.source_hash(ROOT),
        "git_commit": options.commit or source.git_commit(ROOT),
        "machine": machine,
    }
    parts = earlier_parts(options.record, record.identity(same))
    good = True
    for stage in stages_of(options):
        run = run_stage(stage, options, same, parts)
        parts, good = run.parts(), good and bool(run.part["good"])
    for row in record.latest(parts, "tests"):
        print(f"{row['file']}: {row['passed']} passed, {row['failed']} failed, {row['skipped']} skipped")
    for row in record.latest(parts, "sanitizer"):
        print(f"{row['tool']}: {'clean' if row['clean'] else 'NOT CLEAN'}")
    print("good" if good else "NOT GOOD")
    return 0 if good else 1


def main(arguments: list[str] | None = None) -> int:
    """Run the program. Returns the exit status of `merge` or `run_stages`, or 2 where a record is refused."""
    options = parse_arguments(arguments)
    try:
        return merge(options) if options.merge else run_stages(options)
    except record.RecordError as error:
        print(f"gpu_check.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
