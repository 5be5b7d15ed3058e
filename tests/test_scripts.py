"""The benchmark's timing, ratios and tables, the record and its pages; nothing here needs a GPU."""

import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import fresh
import pytest
from pytest import CaptureFixture, MonkeyPatch

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from bench import ahead, check, emulated, families, measure, pages, record, run, tables, timing  # noqa: E402

CEILINGS = [{"matmul_tflops": 700.0, "copy_gbps": 4200.0}, {"matmul_tflops": 720.0, "copy_gbps": 4240.0}]
STORED = tables.peers("NVIDIA H200")
MACHINE = {"device": "NVIDIA H200", "driver": "0", "gpus": 1, "cores": 16, "nvrtc": "13.0"}
MACHINE |= {"torch": "2", "cupy": "14"}
SLOWER = "decode-b128-q1-k8192-h64-bf16-fixed"
"""A case that FlashAttention-3 has a stored time of: 282.2 µs; FlashMLA's is 299.6 µs."""
BESIDE = "mha-b2-s8192-h16-d128-causal-bf16-fixed"
TAKEN_BESIDE = {
    "rawmla": {"us": 100.0, "sustained_us": 120.0},
    "cuDNN": {"us": 110.0, "sustained_us": 108.0},
}


def made_up_row(name: str, us: float, **more: Any) -> dict[str, Any]:
    """A row with a time that nobody measured: 5 % more without rests and 10 % more under load."""
    family, case = families.table()[name]
    row: dict[str, Any] = {"case": name, "us": us, "unrested_us": 1.05 * us, **more}
    if case.bytes_moved():
        row["gbps"] = case.bytes_moved() / us / 1e3
    if "metadata" not in name and case.flops():
        row |= {"sustained_us": 1.1 * us, "sustained_watts": 690.4, "rel_l2": 0.002}
        row["tflops"] = case.flops() / us / 1e6
    tables.add_shares([row], CEILINGS)
    return row


def made_up_rows() -> list[dict[str, Any]]:
    return [
        made_up_row(name, max(case.flops() / 6e8, case.bytes_moved() / 3e6) + 2)
        for name, (_, case) in families.table().items()
    ]


def made_up_part(stage: str, rows: list[dict[str, Any]], machine: Any = (), **more: Any) -> record.Part:
    """A part of a record."""
    part = {"stage": stage, "begin": "2000-01-01T00:00:00+00:00", "source_sha256": "0" * 64, "ended": True}
    part |= {"git_commit": "c" * 40, "options": {"bench_args": "--replays 7"}, "seconds": 5, "rows": rows}
    part["machine"] = MACHINE | dict(machine)
    if stage == "bench":
        part |= {"ceilings": CEILINGS, "errors": [], "sustain_seconds": 2.0}
    return record.sealed({**part, **more})


def file_row(name: str, passed: int, failed: int = 0, skipped: int = 0, **reasons: int) -> dict[str, Any]:
    """The row of a test file."""
    counts = {"passed": passed, "failed": failed, "skipped": skipped, "seconds": 1.0}
    failures = [f"{name}::{number}" for number in range(failed)]
    return {"file": name, **counts, "failures": failures, "skip_reasons": reasons}


def made_up_parts() -> list[record.Part]:
    tools = [{"tool": "memcheck", "clean": True}, {"tool": "initcheck", "clean": False}]
    tests = [file_row("tests/gpu/test_a.py", 1003, 1, 2, needs_two_GPUs=2), file_row("tests/test_b.py", 5)]
    return [
        made_up_part("bench", made_up_rows()),
        made_up_part("tests", tests),
        made_up_part("sanitizer", tools),
    ]


# ---- timing


class FakeGPU:
    """A GPU and the host's clock in seconds, for timing.Graph: replays are queued and run one after another.
    After half a second of work without a pause of a tenth, a replay takes half as long again.
    """

    def __init__(self, replay: float) -> None:
        self.replay_seconds = replay
        self.now = self.free_at = self.busy_since = 0.0
        self.runs: list[tuple[float, float]] = []
        self.naps: list[float] = []
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                self.time = 0.0

            def record(self) -> None:
                self.time = max(gpu.now, gpu.free_at)

            def synchronize(self) -> None:
                gpu.now = max(gpu.now, self.time)

            def elapsed_time(self, end: Any) -> float:
                return (end.time - self.time) * 1e3

        self.torch = MagicMock()
        cuda = self.torch.cuda
        cuda.Event, cuda._sleep, cuda.CUDAGraph.return_value.replay = Event, self.hold_back, self.run
        cuda.Stream.return_value.synchronize = self.synchronize
        self.time = types.SimpleNamespace(perf_counter=lambda: self.now, sleep=self.sleep)

    def run(self) -> None:
        self.now += 1e-7
        start = max(self.now, self.free_at)
        if start - self.free_at > 0.1:
            self.busy_since = start
        slow = 1.5 if start - self.busy_since > 0.5 else 1.0
        self.free_at = start + slow * self.replay_seconds
        self.runs.append((start, self.free_at))

    def synchronize(self) -> None:
        self.now = max(self.now, self.free_at)

    def hold_back(self, cycles: int) -> None:
        self.free_at = max(self.now, self.free_at) + cycles / 2e9

    def sleep(self, seconds: float) -> None:
        self.naps.append(seconds)
        self.now += seconds

    def gaps(self) -> list[float]:
        return [after[0] - before[1] for before, after in zip(self.runs, self.runs[1:], strict=False)]


@pytest.fixture
def fake_gpu(request: pytest.FixtureRequest, monkeypatch: MonkeyPatch) -> FakeGPU:
    gpu = FakeGPU(getattr(request, "param", 1e-3))
    monkeypatch.setattr(timing, "torch", gpu.torch)
    monkeypatch.setattr(timing, "time", gpu.time)
    return gpu


@pytest.mark.parametrize("fake_gpu", (1e-4, 5e-3, 4e-2), indirect=True, ids=lambda x: f"{1e3 * x:g}ms")
def test_the_ways_of_timing(fake_gpu: FakeGPU) -> None:
    replay, calls = fake_gpu.replay_seconds, list[int]()
    graph = timing.Graph(timing.repeat(calls.append, 10), 10)
    assert calls == 2 * list(range(10))  # once before the capture

    assert graph.without_rests(5)["us"] == pytest.approx(replay * 1e5, rel=0.01)
    assert len(fake_gpu.runs) >= 5 + timing.WARMUP_REPLAYS
    assert fake_gpu.runs[-6][1] >= timing.WARMUP_SECONDS
    assert max(fake_gpu.gaps()) < 1e-4 and not fake_gpu.naps

    fake_gpu.runs.clear()
    assert graph.rested(5)["us"] == pytest.approx(replay * 1e5, rel=0.01)
    *before, after = fake_gpu.naps
    assert after == pytest.approx(10 * 5 * replay, rel=0.01)
    assert len(before) == (1 if replay > 1e-3 else 0)
    pause = max(fake_gpu.gaps())
    assert pause == pytest.approx(20 * replay, rel=0.01) if before else pause < 1e-4

    fake_gpu.runs.clear()
    figures = graph.sustained(2.0)
    assert max(fake_gpu.gaps()[3:]) < 1e-4, "the load pauses"
    assert 2.0 <= fake_gpu.runs[-1][1] - fake_gpu.runs[0][0] < 2.3
    assert figures["us"] == pytest.approx(1.5 * replay * 1e5, rel=1e-6), "not the mean of the second half"
    assert graph.sustained(replay / 100)["us"] > 0, "a load shorter than a replay"


def test_enqueued_calls_wait_for_the_last(fake_gpu: FakeGPU) -> None:
    """The host's time for enqueueing counts in no figure: the GPU starts when all is there."""

    def calls() -> None:
        fake_gpu.now += 3e-3
        fake_gpu.run()

    assert timing.Enqueued(calls, 1).without_rests(5)["us"] == pytest.approx(1e3, rel=0.01)


def test_power_is_read_during_the_load(monkeypatch: MonkeyPatch) -> None:
    """A reading that ends after the load is dropped; without NVML there is none."""
    reading = threading.Event()
    readings = iter([(700.0, 1600.0), (690.0, 1500.0)])

    def read() -> tuple[float, float]:
        found = next(readings, None)
        if found is None:
            reading.set()
            time.sleep(0.2)
        return found or (1.0, 1.0)

    monkeypatch.setattr(timing, "read_nvml", read)
    with timing.meter(0) as found:
        reading.wait(30)
    assert found == [(700.0, 1600.0), (690.0, 1500.0)]
    monkeypatch.setattr(timing, "read_nvml", lambda: 1 / 0)
    with timing.meter(0) as found:
        pass
    assert found == []


# ---- ratios and tables


def test_only_figures_taken_alike_are_compared() -> None:
    """Stored times with those without rests, a library beside with ours beside it, in each way."""
    row = made_up_row(SLOWER, 300.0)
    found = tables.pairs(row, STORED)
    assert {(pair.label, pair.way, pair.theirs) for pair in found} == {
        ("FlashMLA", "no rests", 299.6),
        ("FlashAttention-3", "no rests", 282.2),
    }
    best = tables.better(found, "no rests")
    assert best is not None and best.label == "FlashAttention-3" and best.ratio == 282.2 / 315
    assert tables.better(found, "rested") is None
    assert [pair.way for pair in tables.pairs({"case": SLOWER, "us": 1.0}, STORED)] == []
    found = tables.pairs(made_up_row(BESIDE, 101.0, beside=TAKEN_BESIDE), {})
    assert [(p.label, p.way, p.theirs, p.ours) for p in found] == [
        ("cuDNN beside", "rested", 110.0, 100.0),
        ("cuDNN beside", "sustained", 108.0, 120.0),
    ]


def test_speeds() -> None:
    """Means and least by family, sustained beside rested; stored times only where nothing ran beside."""
    slow = {"rawmla": {"us": 100.0}, "FlashAttention-4": {"us": 90.0}, "cuDNN": {"us": 95.0}}
    slow["rawmla contiguous"] = {"us": 50.0}  # no other library
    other = "mha-b2-s8192-h16-d128-bf16-fixed"
    rows = [
        made_up_row(SLOWER, 300.0),
        made_up_row(BESIDE, 100.0, beside=TAKEN_BESIDE),
        made_up_row(other, 100.0, beside=slow),
    ]
    stored = {**STORED, BESIDE: {"Another": 50.0}}
    cells = tables.summary_cells(rows, stored)
    assert cells[1:] == [
        ["Dense decoding, MLA", "FlashAttention-3", "1", "0.90¹", "0.90¹", "-", "-"],
        ["Dense attention", "cuDNN, FlashAttention-4", "2", "0.99", "0.90", "0.90", "0.90"],
    ]
    family = families.family_of(BESIDE)
    headings, first, second = tables.family_cells(family, rows, stored)
    shown = dict(zip(headings, first, strict=True))
    assert shown["case"] == BESIDE and shown["rested µs"] == "100.0"
    assert shown["cuDNN beside rested µs"] == "110.0"
    assert shown["better / ours, rested"] == "1.100" and shown["rawmla beside sustained µs"] == "120.0"
    assert dict(zip(headings, second, strict=True))["better / ours, sustained"] == "-"
    assert "metadata µs" not in headings, "a column without a figure"


def test_share_of_the_nearer_roof() -> None:
    rows = [{"tflops": 360.0, "gbps": 424.0}, {"tflops": 72.0, "gbps": 2120.0}, {"gbps": 4240.0}, {"us": 1}]
    tables.add_shares(rows, CEILINGS)
    assert [row.get("share") for row in rows] == [0.5, 0.5, 1.0, None]
    assert [row.get("roof") for row in rows] == ["matmul", "copy", "copy", None]


def test_tables_fit_a_terminal() -> None:
    text = tables.text_report(made_up_rows(), STORED)
    assert all(len(line) <= tables.WIDTH for line in text.splitlines())
    assert all(family.title in text for family in families.FAMILIES)


# ---- the benchmark


def test_the_command_line(capsys: CaptureFixture[str]) -> None:
    assert run.main(["--list", "--cases", "metadata-b4096|merge-p2-b1-"]) == 0
    assert capsys.readouterr().out.split() == ["metadata-b4096", "merge-p2-b1-h128-bfloat16"]
    for words in ("--replays 4", "--sustain-seconds -1", "--sustain-seconds inf", "--cases (", "--cases no"):
        with pytest.raises(SystemExit) as error:
            run.main(words.split())
        assert error.value.code == 2, words


def test_a_timed_run(tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]) -> None:
    """Its record has a row for each case, saved as they come; one that fails is a row with its error."""
    ceilings = iter(CEILINGS[:1])
    path = tmp_path / "run.json"
    begun: list[str] = []

    def time_case(case: Any, *_: Any) -> dict[str, Any]:
        if begun:
            (part,) = record.read(path)
            assert [row["case"] for row in part["rows"]] == begun and not part["ended"]
        begun.append(case.id)
        if case.id == "metadata-b32":
            raise RuntimeError("no memory\nand more")
        return {"case": case.id, "us": 3.0, "unrested_us": 3.0}

    for family in families.FAMILIES:
        monkeypatch.setitem(vars(family), "measure", time_case)
    monkeypatch.setattr(record, "why_no_timing", lambda: None)
    monkeypatch.setattr(record, "describe_machine", lambda: MACHINE)
    monkeypatch.setattr(run, "compile_kernels", lambda: ["does not compile: x"])
    monkeypatch.setattr(measure, "measure_ceilings", lambda replays: next(ceilings))
    assert run.main(["--cases", "^metadata-b(1|32|128)$", "--json", str(path)]) == 1
    (part,) = record.read(path)
    assert part["ended"] and not part["good"] and part["machine"] == MACHINE
    assert part["errors"] == [
        "does not compile: x",
        "metadata-b32: RuntimeError: no memory",
        "ceilings after the cases: StopIteration",
    ]
    assert part["rows"][1] == {"case": "metadata-b32", "error": "RuntimeError: no memory"}
    printed = capsys.readouterr()
    assert "[3/3]" in printed.err and "FAILED: metadata-b32" in printed.out and "metadata-b128" in printed.out


def test_what_is_compiled_ahead(monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]) -> None:
    """Cases whose first call compiles, shared out over processes; the caches on disk serve them all."""
    begun: list[Any] = []

    def start(command: list[str], env: dict[str, str]) -> Any:
        begun.append(command[3:])
        assert env["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] == "1"
        return MagicMock()

    monkeypatch.setattr(ahead.subprocess, "Popen", start)
    monkeypatch.setattr(ahead.os, "cpu_count", lambda: 3)
    for name in ahead.SETTINGS:
        monkeypatch.delenv(name, raising=False)
    chosen = families.select("^(mha|flex|decode)")
    with ahead.compiled_ahead(chosen):
        pass
    slow = [case.id for case in chosen if not case.id.startswith(("decode", "flex-block-mask"))]
    assert len(begun) == 3 and sorted(sum(begun, [])) == sorted(slow)
    assert "compiled ahead" in capsys.readouterr().err
    begun.clear()
    with ahead.compiled_ahead(families.select(BESIDE)):
        pass
    assert not begun, "a single case compiles as it runs"


def test_the_benchmark_without_a_gpu(capsys: CaptureFixture[str], monkeypatch: MonkeyPatch) -> None:
    """The families of the cases chosen run on the emulated device; what fails is said."""
    import tests.emulator

    if (reason := tests.emulator.missing_reason()) is not None:
        pytest.skip(reason)
    monkeypatch.setattr(record, "why_no_timing", lambda: "no GPU in this test")
    assert run.main(["--cases", "^metadata|^flex-block-mask"]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0] == "no GPU in this test: nothing is timed." and lines[-1].endswith("Nothing was timed.")
    assert "block_mask_states" in out and all(len(line) <= tables.WIDTH for line in lines)
    from tests.emulator import cases

    monkeypatch.setattr(cases, "check", lambda name, case: 1 / 0)
    assert emulated.run("no GPU", [families.family_of("flex-block-mask-causal-s8192")]) == 1
    assert "FAILED: block_mask b=1" in capsys.readouterr().out


def test_kernels_that_do_not_compile(capsys: CaptureFixture[str], monkeypatch: MonkeyPatch) -> None:
    """Each is said; without an emulator a variant of each kernel is compiled."""

    def build(spec: Any) -> Any:
        if spec.label == "b[1]":
            raise emulated.CompileError("b is broken", log="", options=(), source_path=None)
        names = ("registers", "spill_stores", "spill_loads", "static_shared_bytes", "dynamic_shared_bytes")
        return types.SimpleNamespace(meta=dict.fromkeys(names, 8))

    specs = [types.SimpleNamespace(name=label[0], label=label) for label in ("a[1]", "b[1]", "a[2]")]
    import tests.emulator

    monkeypatch.setattr(tests.emulator, "missing_reason", lambda: "the emulator needs g++")
    monkeypatch.setattr(emulated.kernels, "all_specs", lambda: specs)
    monkeypatch.setattr(emulated.jit, "build", build)
    assert [kernel["label"] for kernel in emulated.compile_specs(specs)] == ["a[1]", "b[1]", "a[2]"]
    assert emulated.run("no GPU", families.FAMILIES) == 1
    out = capsys.readouterr().out
    assert "the emulator needs g++: no kernel runs" in out and "FAILED: b is broken" in out
    assert "2 kernels compiled" in out


# ---- tests and sanitizers


def small_tree(root: Path, monkeypatch: MonkeyPatch, **files: str) -> None:
    """A tree of tests under root, with our conftest.py; a name's __ is a folder.

    The variable NO_GPU says why there is no GPU.
    """
    for folder in ("gpu", "kit"):
        (root / "tests" / folder).mkdir(parents=True)
    shutil.copy(ROOT / "tests" / "conftest.py", root / "tests")
    stand_in = "import os\ndef missing_hopper_reason(): return os.environ.get('NO_GPU')\n"
    (root / "tests" / "kit" / "gpu.py").write_text(stand_in)
    (root / "pytest.ini").write_text("[pytest]\nmarkers =\n full: some\n gpu: some\n sanitizer: some\n")
    for name, text in files.items():
        (root / "tests" / f"{name.replace('__', '/')}.py").write_text(text)
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_TESTRUNUID"):  # of the run that this test is in
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(check, "ROOT", root)
    monkeypatch.setattr(record, "describe_machine", lambda: MACHINE)


def stage_of(stage: str, root: Path, *arguments: str) -> tuple[bool, record.Part]:
    """Whether a stage is good, and the part that it writes. Without rows it writes none."""
    path = root / "record.json"
    path.unlink(missing_ok=True)
    good = check.main(["--record", str(path), "--stage", stage, *arguments]) == 0
    return good, record.read(path)[0] if path.exists() else {"rows": []}


FULL = "import pytest\ndef test_one(): pass\n@pytest.mark.full\ndef test_two(): pass\n"


def test_the_tests_of_a_tree(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """Counted per file, with --full; what measures time runs alone. A file without a test is no pass."""
    pytest.importorskip("xdist")
    alone = (
        "import os\ndef test_alone(record_property):\n assert 'PYTEST_XDIST_WORKER' not in os.environ\n"
        " record_property('call', 20.5)\n"
    )
    files = {"test_b": FULL, "test_emulated_c": FULL, "test_host_time": alone, "gpu__test_a": "\n"}
    small_tree(tmp_path, monkeypatch, **files)
    assert check.test_files() == [
        *(f"tests/{name}.py" for name in ("test_emulated_c", "test_b", "test_host_time", "gpu/test_a"))
    ]
    monkeypatch.setattr(check, "TOGETHER", "-n 2")
    good, part = stage_of("tests", tmp_path, "--tests", "tests/test_", "--commit", "c")
    assert good and part["good"] and part["ended"] and part["machine"] == MACHINE
    assert part["options"] == {"tests": "tests/test_"} and part["git_commit"] == "c"
    counts = {row["file"]: tuple(row[key] for key in record.COUNTS) for row in part["rows"]}
    assert counts == {
        "tests/test_b.py": (2, 0, 0),
        "tests/test_emulated_c.py": (2, 0, 0),
        "tests/test_host_time.py": (1, 0, 0),
    }
    assert [row["measured_us"] for row in part["rows"] if "measured_us" in row] == [{"call": 20.5}]
    assert "| call | 20.5 |" in pages.performance_page([part])
    for text, good, counted in (
        ('import pytest\npytest.skip("no such GPU", allow_module_level=True)\n', True, [(0, 0, 1)]),
        ("\n", False, []),
        ("import no_such_module\n", False, [(0, 1, 0)]),
    ):
        (tmp_path / "tests" / "test_b.py").write_text(text)
        found, part = stage_of("tests", tmp_path, "--tests", "test_b")
        assert found is good, text
        assert [tuple(row[key] for key in record.COUNTS) for row in part["rows"]] == counted


SANITIZER = """
import os, subprocess, sys
tool, arguments = sys.argv[2], sys.argv[9:]
assert sys.argv[1:8:2] == ["--tool", "--error-exitcode", "--port", "--launch-timeout"]
print("port", sys.argv[6])
status = subprocess.run(arguments).returncode
bad = (tool, os.environ["TEST_PART"]) == ("racecheck", "1/2")
if (tool, os.environ["TEST_PART"]) != ("initcheck", "2/2"):
    print(f"RACECHECK SUMMARY: {4 * bad} hazards" if tool == "racecheck" else "ERROR SUMMARY: 0 errors")
sys.exit(int(sys.argv[4]) if bad else status)
"""


def test_the_sanitizer_in_parts(tmp_path: Path, monkeypatch: MonkeyPatch, capfd: CaptureFixture[str]) -> None:
    """All parts of all tools run; what one part finds, or fails to say, makes its tool not clean."""
    tests = (
        "import os, pytest\npytestmark = pytest.mark.sanitizer\n"
        "def test_one(): assert os.environ['PYTORCH_NO_CUDA_MEMORY_CACHING'] == '1'\n"
        "def test_two(): assert os.environ['OMP_NUM_THREADS'] == '1'\n"
    )
    small_tree(tmp_path, monkeypatch, gpu__test_c=tests)
    program = tmp_path / "compute-sanitizer"
    program.write_text(f"#!{sys.executable} -IS\n{SANITIZER}")
    program.chmod(0o700)
    monkeypatch.setattr(check.shutil, "which", lambda name: str(program))
    monkeypatch.setattr(check, "SANITIZER_PARTS", 2)
    good, part = stage_of("sanitizer", tmp_path)
    keys = ("passed", "failed", "errors", "clean")
    assert not good and {row["tool"]: tuple(row[key] for key in keys) for row in part["rows"]} == {
        "memcheck": (2, 0, 0, True),
        "racecheck": (2, 0, 4, False),
        "synccheck": (2, 0, 0, True),
        "initcheck": (2, 0, None, False),
    }
    assert len(set(re.findall(r"^port (\d+)$", capfd.readouterr().out, re.MULTILINE))) == 8
    monkeypatch.setattr(check.shutil, "which", lambda name: None)
    assert not stage_of("sanitizer", tmp_path)[0]


def test_the_sanitizer_gets_every_case() -> None:
    """The files that are looked for have all that is marked; the GPU's tests can be collected anywhere."""
    arguments = ["-q", "-p", "no:cacheprovider", "--collect-only", "--full", "-m", "sanitizer", "tests/gpu"]
    answer = fresh.run(("-c", "import pytest, sys; sys.exit(pytest.main())", *arguments), ROOT, timeout=300)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    found = {line.partition("::")[0] for line in answer.stdout.splitlines() if "::" in line}
    assert found == set(check.files_with_marker("sanitizer"))


# ---- tests/conftest.py


@pytest.mark.parametrize(
    ("options", "passed", "said"),
    [
        ("-n 1", 1, "1 cases left out: --full runs them too (docs/checks.md)"),
        ("--full", 2, ""),
        ("-k two", 0, "1 cases left out"),
        ("", 1, "left out the 1 files of tests/gpu: there is none"),
        ("gpu/test_b.py", 0, "skipped 1 test: there is none"),
    ],
)
def test_what_is_left_out(
    options: str, passed: int, said: str, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    """Cases marked `full`, and without a GPU its folder; a line counts them."""
    monkeypatch.setenv("NO_GPU", "there is none")
    small_tree(tmp_path, monkeypatch, test_a=FULL, gpu__test_b="def test_it(): pass\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *shlex.split(options)]
    printed = subprocess.run(command, cwd=tmp_path / "tests", capture_output=True, text=True).stdout
    assert f"{passed} passed" in printed or (not passed and "passed" not in printed), printed
    assert said in printed and ("cases left out" in printed) == (options not in ("--full", "gpu/test_b.py"))


# ---- the record and its pages


def test_source_hash(tmp_path: Path) -> None:
    """Equal trees have equal hashes; a name and a byte change it, what Python compiles does not."""
    for folder in record.HASHED_FOLDERS:
        (tmp_path / folder).mkdir()
    path = tmp_path / "rawmla" / "a.py"
    path.write_text("x = 1\n")
    first = record.source_hash(tmp_path)
    (tmp_path / "rawmla" / "__pycache__").mkdir()
    (tmp_path / "rawmla" / "__pycache__" / "a.pyc").write_text("y")
    (tmp_path / "README.md").write_text("y")
    assert record.source_hash(tmp_path) == first
    path.write_text("x = 2\n")
    second = record.source_hash(tmp_path)
    path.rename(path.with_name("b.py"))
    assert len({first, second, record.source_hash(tmp_path)}) == 3


def test_a_changed_row_is_refused(
    tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    """A figure, a line that is gone, a machine: by every script that reads the record."""
    path, merged = tmp_path / "record.json", tmp_path / "merged.json"
    monkeypatch.setattr(record, "RECORD", path)
    parts = made_up_parts()
    record.write(parts, path)
    assert record.read(path) == parts
    text = path.read_text()
    lines = text.splitlines(keepends=True)
    assert sum(line.startswith('{"case"') for line in lines) == len(families.table()), "a row a line"
    at = next(number for number, line in enumerate(lines) if SLOWER in line)
    for changed in (
        text.replace('"passed": 1003,', '"passed": 1004,'),
        "".join(lines[:at] + lines[at + 1 :]),
        text.replace('"gpus": 1', '"gpus": 2', 1),
    ):
        assert changed != text
        path.write_text(changed)
        with pytest.raises(record.RecordError, match="it was changed after its run"):
            record.read(path)
        assert pages.main() == 2
        assert check.main(["--merge", str(path), "--record", str(merged)]) == 2 and not merged.exists()
        assert capsys.readouterr().err.count("it was changed after its run") == 2
    for text in ("{}", "[]", "no JSON", '{"parts": [{}]}'):
        path.write_text(text)
        with pytest.raises(record.RecordError, match="expected a record"):
            record.read(path)


def test_parts_of_one_record_have_sources_and_machine_in_common(
    tmp_path: Path, capsys: CaptureFixture[str]
) -> None:
    path = tmp_path / "docs" / "record.json"
    part = made_up_part("tests", [file_row("tests/test_a.py", 1)])
    assert check.earlier_parts(path, part) == []
    record.write([part], path)
    assert check.earlier_parts(path, part) == [part] and capsys.readouterr().out == ""
    for key, value in record.identity(part).items():
        more = {key: "another"} if key in part else {}
        other = made_up_part("tests", [], {} if more else {key: "another"}, **more)
        assert check.earlier_parts(path, other) == []
        said = f"record.json: made with other {key} {value}; a new record is started\n"
        assert capsys.readouterr().out == said
        with pytest.raises(record.RecordError, match="expected .*, got "):
            record.merged([[part], [other]])
    assert record.merged([[part], [made_up_part("tests", [], {"gpus": 2})]])
    assert [file.name for file in path.parent.iterdir()] == ["record.json"]


def test_what_runs_again_is_kept(
    tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    """The later row counts, whole: no field of the first one is in it. The record and the pages have both."""
    name, later = "tests/test_a.py", {"begin": "2000-01-02T00:00:00+00:00"}
    row, fast = made_up_row(SLOWER, 100.0, cold_us=1.0), {"case": SLOWER, "us": 90.0}
    failed = {"case": "metadata-b1", "error": "RuntimeError"}
    first = [
        made_up_part("bench", [row, failed], errors=["metadata-b1: RuntimeError"]),
        made_up_part("tests", [file_row(name, 91, 1), file_row("tests/test_b.py", 1)]),
        made_up_part("sanitizer", [{"tool": "memcheck", "clean": False}]),
    ]
    second = [
        made_up_part("bench", [fast, {"case": "metadata-b1", "us": 2.0}], **later),
        made_up_part("tests", [file_row(name, 92)], **later),
        made_up_part("sanitizer", [{"tool": "memcheck", "clean": True}], **later),
    ]
    paths = [tmp_path / "second.json", tmp_path / "first.json"]
    record.write(second, paths[0])
    record.write(first, paths[1])
    monkeypatch.setattr(check, "test_files", lambda: [name, "tests/test_b.py", "tests/test_c.py"])
    merged = tmp_path / "merged.json"
    assert check.main(["--merge", *map(str, paths), "--record", str(merged)]) == 1
    lacks = capsys.readouterr().out.splitlines()
    assert lacks[-1] == "6 parts: NOT WHOLE" and "tests: without tests/test_c.py" in lacks
    assert not any("RuntimeError" in line or "memcheck" in line for line in lacks)
    assert "bench: no row beside FlashAttention-4" in lacks
    assert len(lacks) == 1 + len(families.table()) - 2 + 1 + 3 + len(check.NEEDED_BESIDE)
    with_both = {"case": BESIDE, "beside": dict.fromkeys(check.NEEDED_BESIDE, {})}
    assert not any("beside" in text for text in check.shortcomings([made_up_part("bench", [with_both])]))
    parts = record.read(merged)
    assert parts == [*first, *second]
    assert record.merged([parts, first]) == parts, "a part counts once"
    assert record.latest(parts, "bench")[0] == fast and record.errors(parts) == []
    assert record.errors(first) == ["metadata-b1: RuntimeError"]
    page = pages.performance_page(parts)
    assert "Tests there: 93 passed, 0 failed, 0 skipped; clean under" in page
    assert "results of a second run: 4." in pages.readme_section(parts)
    for line in (
        f"- `{name}`: first 91 passed, 1 failed, 0 skipped, then 92 passed, 0 failed, 0 skipped",
        "- `memcheck`: first not clean, then clean",
        f"- `{SLOWER}`: first 100.0 µs, then 90.0 µs",
        "- `metadata-b1`: first RuntimeError, then 2.0 µs",
    ):
        assert line in page.splitlines()


def test_a_call_of_every_stage(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """A part for each stage that had a row, whatever the stages before it say; a later call adds to them."""
    monkeypatch.setattr(record, "describe_machine", lambda: MACHINE)

    def stage(good: bool, *rows: Any) -> Any:
        def run(_: Any, part: record.Part, save: Any) -> bool:
            part["rows"] += rows
            return good

        return run

    tests = stage(True, file_row("tests/test_a.py", 1))
    sanitizer = stage(False, {"tool": "memcheck", "clean": False})
    monkeypatch.setattr(check, "RUNS", {"bench": stage(False), "tests": tests, "sanitizer": sanitizer})
    path = tmp_path / "record.json"
    assert check.main(["--record", str(path)]) == 1
    assert check.main(["--record", str(path), "--stage", "tests"]) == 0
    found = [(part["stage"], part["good"], part["ended"]) for part in record.read(path)]
    assert found == [("tests", True, True), ("sanitizer", False, True), ("tests", True, True)]
    path.write_text(path.read_text().replace('"passed": 1', '"passed": 2', 1))
    assert check.main(["--record", str(path), "--stage", "tests"]) == 2


def test_the_pages(monkeypatch: MonkeyPatch) -> None:
    """README has a row for each operation, the page every case and figure; another device has no ratio."""
    parts = made_up_parts()
    section, page = pages.readme_section(parts), pages.performance_page(parts)
    assert "| Dense decoding, MLA | FlashMLA" in section and "NVIDIA H200, driver 0, 2000-01-01" in section
    assert "1,008 passed, 1 failed, 2 skipped; clean under compute-sanitizer's memcheck; not clean" in section
    assert all(f"| `{name}` |" in page for name in families.table())
    assert "needs_two_GPUs" in page and "ceilings, before and after" in page
    other = [made_up_part("bench", made_up_rows(), {"device": "NVIDIA H100"})]
    assert "|" not in pages.readme_section(other) and "FlashMLA no rests" not in pages.performance_page(other)
    for readme in ("", pages.BEGIN, 2 * f"{pages.BEGIN}{pages.END}"):
        with pytest.raises(ValueError, match="to unpack"):
            pages.replace_section(readme, "x")
    assert pages.replace_section(f"a{pages.BEGIN}old{pages.END}b", "x") == f"a{pages.BEGIN}\nx\n{pages.END}b"


def test_the_pages_come_from_the_record() -> None:
    """The record is as its runs wrote it, and the pages say what it has."""
    for path, text in pages.written(record.merged([record.read(record.RECORD)])).items():
        assert path.read_text() == text
