"""Everything that only a GPU machine can say, written to docs/gpu-record.json.

Stages, in this order: `bench` (the benchmark; first, since minutes of tests heat the GPU and slow it),
`tests` (every test file by several processes, then those that measure time by themselves),
`sanitizer` (the cases marked `sanitizer`, in parts and under each tool of compute-sanitizer, all side by
side; keep their shapes tiny). A run of a stage is one part of the record, with its machine; what ran before
stays beside what runs again. So the stages, and even the files or cases of one stage, can run in separate
commands, on several machines of one kind: `--record FILE` writes elsewhere, `--merge FILE ...` makes one
record of several, and says what failed or is missing. Tests that need two GPUs run where there are two, and
are counted as skipped elsewhere.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from . import ROOT, record
from . import run as benchmark
from .cases import CUDNN, FLASH_ATTENTION_4

STAGES = ("bench", "tests", "sanitizer")
NEEDED_BESIDE = (CUDNN, FLASH_ATTENTION_4)
"""Libraries beside which a whole record has figures."""
SANITIZER_TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
MEASURING_TESTS = r"host_time"
"""Names of the test files that measure time: they run with no other test beside them."""
SANITIZER_ERROR = 86  # exit status that compute-sanitizer gives when it finds something
SANITIZER_PORT, SANITIZER_PORTS = 49152, 16
"""The first of the ports by which compute-sanitizer and the process that it watches find each other, and how
many each has for itself: it tries ten, which are too few for all of them together.
"""
SANITIZER_PATIENCE = ("--launch-timeout", "300")
"""For imports of many processes at once, before their first call of CUDA: a minute by default."""
CORES = os.cpu_count() or 1
SANITIZER_PARTS = max(1, min(4, CORES // len(SANITIZER_TOOLS)))  # each in a process, for every tool
PROCESSES = max(1, min(15, CORES - 1))
"""Processes of pytest-xdist. With more, a test would have too small a share of the GPU's memory."""
TOGETHER = f"-n {PROCESSES} --dist load --maxschedchunk 1" if importlib.util.find_spec("xdist") else ""
"""Options of pytest-xdist."""
ONE_THREAD_EACH = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
"""For processes side by side. As many threads as there are cores, in each of them, would make every small
operation on the CPU wait for the others, and torch.compile would start as many processes.
"""

Counts = dict[str, Any]
Answer = tuple[dict[str, Counts], int, str]
"""Counts by file, exit status and output of a run of pytest."""


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--stage", action="append", choices=STAGES, help="run this stage only; may be repeated")
    add("--tests", metavar="REGEX", help="run the test files whose path matches")
    add("--bench-args", default="", metavar="TEXT", help="options of the benchmark")
    add("--commit", help="commit to record where the sources are no git checkout")
    add(
        "--record",
        type=Path,
        default=record.RECORD,
        help="the record to add to (default docs/gpu-record.json)",
    )
    add("--merge", nargs="+", type=Path, metavar="FILE", help="run nothing; write these records as one")
    return parser.parse_args(arguments)


def parse_junit(text: str) -> dict[str, Counts]:
    """Counts per file of a JUnit report of the family xunit1, which names files: passed, failed, skipped,
    reasons, the seconds of its tests, and the microseconds that they measured.
    """
    found: dict[str, Counts] = {}
    for case in ElementTree.fromstring(text).iter("testcase"):
        # A file that is skipped as a whole has its module name in `name`, no `classname` and no file.
        module = case.get("classname") or case.get("name") or ""
        file = case.get("file") or f"{module.replace('.', '/')}.py"
        empty: Counts = {"passed": 0, "failed": 0, "skipped": 0, "skip_reasons": {}}
        counts = found.setdefault(file, {**empty, "failures": [], "seconds": 0.0})
        name = f"{module}::{case.get('name')}"
        counts["seconds"] = round(counts["seconds"] + float(case.get("time", "0")), 3)
        if re.search(MEASURING_TESTS, file):
            properties = {each.get("name"): float(each.get("value", "nan")) for each in case.iter("property")}
            counts.setdefault("measured_us", {}).update(properties)
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


def run_pytest(
    arguments: Iterable[str], prefix: Iterable[str], environment: dict[str, str], *, show: bool = True
) -> Answer:
    """Run pytest with a JUnit report. The output is also shown as it comes unless `show` is off."""
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder) / "junit.xml"
        command = [*prefix, sys.executable, *"-m pytest -q -p no:cacheprovider -o".split()]
        # The family of reports that names the file of a test.
        command += ["junit_family=xunit1", f"--junitxml={junit}", *arguments]
        print("$", shlex.join(command), flush=True)
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": path, **environment}
        given: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        lines = []
        with subprocess.Popen(command, cwd=ROOT, env=environment, **given) as process:
            for line in process.stdout or ():
                if show:
                    print(line, end="", flush=True)
                lines.append(line)
        results = parse_junit(junit.read_text()) if junit.exists() else {}
    return results, process.returncode, "".join(lines)


def test_files() -> list[str]:
    """The test files of the tree, folder by folder: pytest 9.1 loses fixtures of a conftest.py where files of
    several folders alternate. Those that emulate kernels, which take longest, come first in their folder, and
    the GPU's folder comes last.
    """

    def place(path: Path) -> tuple[Any, ...]:
        return path.parent.name == "gpu", path.parent, "emulated" not in path.name, path.name

    paths = sorted((ROOT / "tests").rglob("test_*.py"), key=place)
    return [path.relative_to(ROOT).as_posix() for path in paths]


def run_tests(options: argparse.Namespace, part: record.Part, save: Callable[[], None]) -> bool:
    """Run the test files and note their counts; True when all passed."""
    names = [name for name in test_files() if re.search(options.tests or "", name)]
    alone = [name for name in names if re.search(MEASURING_TESTS, name)]
    together = [name for name in names if name not in alone]
    good = True
    for chosen, arguments in ((together, TOGETHER.split()), (alone, [])):
        if not chosen:
            continue
        environment = ONE_THREAD_EACH if chosen is together else {}
        results, status, _ = run_pytest(["--full", *arguments, *chosen], [], environment)
        part["rows"] += [{"file": name, **counts} for name, counts in results.items()]
        good &= status in (0, 5) and bool(results)  # 5, with results: every file was skipped as a whole
        save()
    return good


def sanitizer_errors(output: str) -> int | None:
    """The number in compute-sanitizer's own summary (racecheck: hazards), None when there is no summary."""
    found = re.findall(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)", output)
    return sum(int(a or b) for a, b in found) if found else None


def files_with_marker(marker: str) -> list[str]:
    """The test files under tests/gpu that have the marker: importing the others would only take time."""
    files = (name for name in test_files() if name.startswith("tests/gpu/"))
    return [name for name in files if f"pytest.mark.{marker}" in (ROOT / name).read_text()]


def sanitizer_verdict(parts: Sequence[Answer]) -> Counts:
    """What one tool says, from the answers of each part of the cases.

    Clean means of every part: pytest passed, at least one case ran, and the tool's own summary counts zero
    errors. `errors` is None where a part has no summary.
    """
    files = [list(results.values()) for results, _, _ in parts]
    errors = [sanitizer_errors(output) for _, _, output in parts]
    statuses = [status for _, status, _ in parts]
    ran = all(sum(counts["passed"] for counts in one) for one in files)
    return {
        **{key: sum(c[key] for one in files for c in one) for key in ("passed", "failed", "skipped")},
        "failures": [name for one in files for counts in one for name in counts["failures"]],
        "errors": None if None in errors else sum(number or 0 for number in errors),
        "clean": not any(statuses) and ran and all(number == 0 for number in errors),
    }


def run_sanitizer(_: argparse.Namespace, part: record.Part, save: Callable[[], None]) -> bool:
    """Run the marked cases under each tool and note the verdicts; True when all are clean.

    Each tool watches several parts of the cases, in processes of their own, and all run side by side.
    torch's allocator hands out memory without caching, so that an access outside one array is outside an
    allocation.
    """
    program, count = shutil.which("compute-sanitizer"), SANITIZER_PARTS
    if program is None:
        print("compute-sanitizer is not on the PATH: stage skipped")
        return False
    chosen = ["--full", "-m", "sanitizer", *files_with_marker("sanitizer")]
    start = time.monotonic()
    good = True
    with ThreadPoolExecutor(count * len(SANITIZER_TOOLS)) as pool:
        environment = {**ONE_THREAD_EACH, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}

        def watch(tool: str, number: int) -> tuple[Answer, float]:
            port = SANITIZER_PORT + SANITIZER_PORTS * (SANITIZER_TOOLS.index(tool) * count + number)
            prefix = [program, "--tool", tool, "--error-exitcode", str(SANITIZER_ERROR)]
            prefix += ["--port", str(port), *SANITIZER_PATIENCE]
            one = {**environment, "TEST_PART": f"{number}/{count}"}
            return run_pytest(chosen, prefix, one, show=False), round(time.monotonic() - start, 1)

        numbers = range(1, count + 1)
        running = {tool: [pool.submit(watch, tool, number) for number in numbers] for tool in SANITIZER_TOOLS}
        for tool, futures in running.items():
            answers, seconds = zip(*[future.result() for future in futures], strict=True)
            for number, answer, spent in zip(numbers, answers, seconds, strict=True):
                print(f"{tool}, part {number} of {count}, {spent:.0f} s:\n{answer[2]}", flush=True)
            verdict = sanitizer_verdict(answers)
            part["rows"].append({"tool": tool, **verdict, "seconds": max(seconds)})
            good &= bool(verdict["clean"])
            save()
    return good


def run_bench(options: argparse.Namespace, part: record.Part, save: Callable[[], None]) -> bool:
    """Measure the cases; True when every one was measured."""
    return benchmark.measure(benchmark.parse_arguments(shlex.split(options.bench_args)), part, save)


RUNS = {"bench": run_bench, "tests": run_tests, "sanitizer": run_sanitizer}


def earlier_parts(path: Path, new: record.Part) -> list[record.Part]:
    """The parts of the record at path when the new part may stand beside them; else none, a new record is
    started.
    """
    parts = record.read(path) if path.exists() else []
    others = {item for part in parts for item in record.identity(part).items() - record.identity(new).items()}
    if others:
        said = ", ".join(sorted(f"{key} {value}" for key, value in others))
        print(f"{path.name}: made with other {said}; a new record is started")
    return [] if others else parts


def run_stage(stage: str, options: argparse.Namespace) -> bool:
    """Run a stage, whose part of the record is written as it grows. Whether it is good."""
    begin = time.monotonic()
    part = record.new_part(stage, vars(options))
    earlier = earlier_parts(options.record, part)

    def save() -> None:
        if part["rows"]:
            record.write([*earlier, part], options.record)

    good = RUNS[stage](options, part, save)
    part |= {"ended": True, "good": good, "seconds": round(time.monotonic() - begin)}
    save()
    return good


def shortcomings(parts: Sequence[record.Part]) -> list[str]:
    """What failed, in the results that count, and what a whole record has beside."""
    from .families import table

    found = record.errors(parts)
    for row in record.latest(parts, "tests"):
        found += [f"failed: {name}" for name in row["failures"]]
    found += [f"{row['tool']}: not clean" for row in record.latest(parts, "sanitizer") if not row["clean"]]
    whole = {"bench": table(), "tests": test_files(), "sanitizer": SANITIZER_TOOLS}
    for stage, names in whole.items():
        there = record.results(parts, stage)
        found += [f"{stage}: without {name}" for name in names if name not in there]
    # A library that is not installed is left out in silence, and without it ratios flatter.
    beside = {name for row in record.latest(parts, "bench") for name in row.get("beside", {})}
    found += [f"bench: no row beside {name}" for name in NEEDED_BESIDE if name not in beside]
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
    good = all([run_stage(stage, options) for stage in STAGES if stage in (options.stage or STAGES)])
    parts = record.read(options.record) if options.record.exists() else []
    for stage, words in record.IN_WORDS.items():
        for row in record.latest(parts, stage):
            print(f"{row[record.NAMES[stage]]}: {words(row)}")
    print("good" if good else "NOT GOOD")
    return 0 if good else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program. Returns the exit status of `merge` or `run_stages`, or 2 where a record is refused."""
    options = parse_arguments(arguments)
    try:
        return merge(options) if options.merge else run_stages(options)
    except record.RecordError as error:
        print(f"gpu_check.py: {error}", file=sys.stderr)
        return 2
