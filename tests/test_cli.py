"""``python -m rawmla info`` and ``python -m rawmla compile``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from jit_project import Project, tiny
from pytest import CaptureFixture, MonkeyPatch

import rawmla
from rawmla import cli, report
from rawmla.errors import NoGPUError, NVRTCNotFoundError
from rawmla.jit import builder, nvrtc
from rawmla.jit.driver import DeviceInfo

Run = Callable[..., Any]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: MonkeyPatch) -> Project:
    """The command line works on two tiny kernels, three with --all."""
    made = Project(tmp_path)
    kernels = ModuleType("rawmla.kernels")
    kernels.default_specs = lambda: [tiny(1), tiny(2)]  # type: ignore[attr-defined]
    kernels.all_specs = lambda: [tiny(1), tiny(2), tiny(3)]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "rawmla.kernels", kernels)
    monkeypatch.setattr(rawmla, "kernels", kernels, raising=False)
    monkeypatch.setattr(builder, "find_source_root", lambda: made.sources)
    monkeypatch.setenv("RAWMLA_CACHE_DIR", str(made.cache_dir))
    monkeypatch.delenv("RAWMLA_CACHE_MAX_MB", raising=False)
    monkeypatch.delenv("RAWMLA_CUBIN_DIR", raising=False)
    builder._default_builder.cache_clear()
    return made


@pytest.fixture
def run(project: Project, capsys: CaptureFixture[str]) -> Run:
    """Runs a command, which has to end with a status, and returns what it prints."""

    def run(status: int, *arguments: object) -> Any:
        capsys.readouterr()
        assert cli.main([str(argument) for argument in arguments]) == status
        return capsys.readouterr()

    return run


def test_compile_fills_the_cache(project: Project, run: Run, monkeypatch: MonkeyPatch) -> None:
    """The table is whole whatever the width of the terminal: a number that is cut off is a wrong number."""
    out, progress = run(0, "compile")
    header, first, second, last = out.splitlines()
    assert "2/2" in progress
    assert header.split()[:2] == ["kernel", "regs"]
    assert first.split()[0] == "tiny[FACTOR=1]" and second.split()[0] == "tiny[FACTOR=2]"
    assert first.split()[-1] == second.split()[-1] == "compiled"
    assert last == f"2 of 2 kernels ready (2 compiled); cache: {project.cache_dir}"
    assert len(project.entries()) == 2
    monkeypatch.setenv("COLUMNS", "20")
    header, *rows, _ = run(0, "compile", "--all").out.splitlines()
    assert [row.split()[-1] for row in rows] == ["cache", "cache", "compiled"]
    assert {len(row) for row in rows} == {len(header)} and {len(row.split()) for row in rows} == {7}


def test_compile_only_some(run: Run) -> None:
    lines = run(0, "compile", "--only", "FACTOR=[23]").out.splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["tiny[FACTOR=2]", "tiny[FACTOR=3]"]
    assert lines[3].startswith("2 of 2 kernels ready")
    for regex, text in (("huge", "a match with a kernel that --all compiles"), ("(", "a regular expression")):
        said = run(1, "compile", "--only", regex).err
        assert said.startswith(f"error: --only: expected {text}, got {regex!r}")


def test_compile_to_a_folder(project: Project, run: Run, monkeypatch: MonkeyPatch) -> None:
    folder = project.root / "deep" / "cubins"
    assert f"3 of 3 kernels written to {folder}" in run(0, "compile", "--all", "--out", folder).out
    assert len(list(folder.glob("*/kernel.cubin"))) == 3
    monkeypatch.setenv("RAWMLA_CUBIN_DIR", str(folder))
    monkeypatch.setattr(nvrtc, "version", lambda: pytest.fail("NVRTC was asked"))
    assert {builder.build(tiny(factor)).meta["origin"] for factor in (1, 2, 3)} == {"prebuilt"}


def test_compile_failure_is_shown_and_the_others_are_built(project: Project, run: Run) -> None:
    error = '#if FACTOR == 2\n#error "two is wrong"\n#endif\n'
    project.write("kernels/tiny.cu", f'{error}extern "C" __global__ void tiny() {{}}\n')
    out, err = run(1, "compile", "--all")
    assert "2 of 3 kernels" in out and "two is wrong" in err and "-DFACTOR=2" in err


def test_ctrl_c_ends_at_once(project: Project, capsys: CaptureFixture[str], monkeypatch: MonkeyPatch) -> None:
    """Kernels that are being compiled are not waited for, which the ordinary end of Python would do."""
    end, signals, finished = threading.Event(), iter([signal.SIGINT]), list[bool]()

    def compile_slowly(*arguments: object) -> None:
        for number in signals:  # by one of the threads
            os.kill(os.getpid(), number)
        finished.append(end.wait(20))

    monkeypatch.setattr(nvrtc, "compile_source", compile_slowly)
    monkeypatch.setattr(os, "_exit", sys.exit)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(SystemExit) as caught:
            cli.main(["compile"])
        assert caught.value.code == 130 and not finished
    finally:
        signal.signal(signal.SIGINT, before)
        end.set()
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    assert err.splitlines()[-1] == "interrupted" and err.count("interrupted") == 1


def raising(error: Exception) -> Callable[..., None]:
    """A function that raises an error."""

    def raised(*arguments: object, **keywords: object) -> None:
        raise error

    return raised


@pytest.mark.parametrize("fault", ["folder in a file", "cache for others", "read-only"])
def test_a_place_that_cannot_be_used_is_said_first(
    project: Project, run: Run, monkeypatch: MonkeyPatch, fault: str
) -> None:
    """Before anything is compiled, which takes minutes. What need not be compiled is no error."""
    out: list[object] = []
    if fault == "folder in a file":
        (project.root / "file").write_text("")
        out = ["--out", project.root / "file" / "below"]
        text = f"--out: {out[1]} cannot be written ("
    elif fault == "cache for others":
        project.cache_dir.mkdir()
        project.cache_dir.chmod(0o777)
        text = f"{project.cache_dir} is writable for others (mode 0777); `chmod go-w` it"
    else:
        run(0, "compile")
        monkeypatch.setattr(tempfile, "mkdtemp", raising(OSError(30, "Read-only file system")))
        run(0, "compile")
        text = f"{project.cache_dir} cannot be written ([Errno 30] Read-only file system)"
    monkeypatch.setattr(nvrtc, "compile_source", lambda *arguments: pytest.fail("compiled"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        said = run(1, "compile", "--all", *out)
    assert f"error: {text}" in said.err and said.out == ""
    assert out or said.err.rstrip().endswith("RAWMLA_CACHE_DIR names another folder")
    assert ("not used: " + text in run(0, "info").out) == (fault == "cache for others")


def test_compile_that_keeps_nothing_is_a_failure(run: Run, monkeypatch: MonkeyPatch) -> None:
    """A disk that is full by the time that a kernel is there."""
    monkeypatch.setattr(Path, "write_bytes", raising(OSError("No space left")))
    with pytest.warns(RuntimeWarning, match="No space left"):
        assert "error: 2 of them could not be kept" in run(1, "compile").err


def test_what_is_missing_is_said(project: Project, run: Run, monkeypatch: MonkeyPatch) -> None:
    """Errors end `compile`, and are lines of `info`, which says what works here."""
    monkeypatch.setattr(report, "get_driver", raising(NoGPUError("there is no driver")))
    folder = project.root / "cubins"
    run(0, "compile", "--out", folder)
    monkeypatch.setenv("RAWMLA_CUBIN_DIR", str(folder))
    out = run(0, "info").out
    for part in (
        *(f"rawmla {rawmla.__version__}", sys.version.split()[0], "numpy", "RAWMLA_CACHE_DIR  "),
        *(str(project.cache_dir), str(project.sources), f"{folder} (2 entries)"),
        *("none: there is no driver", "no: there is no driver", f"yes, with NVRTC {nvrtc.version()}"),
    ):
        assert part in out
    with monkeypatch.context() as nothing:
        nothing.setattr(report, "_import", lambda name, purpose: None)
        nothing.setattr(report.util, "find_spec", lambda name: None)
        text = 'no: torch is not installed (`pip install -e ".[torch]"` in a checkout of rawmla)'
        assert text in run(0, "info").out
    monkeypatch.setenv("RAWMLA_CACHE_MAX_MB", "lots")
    assert "RAWMLA_CACHE_MAX_MB" in run(1, "compile").err
    assert "RAWMLA_CACHE_MAX_MB: expected" in run(0, "info").out
    monkeypatch.delenv("RAWMLA_CACHE_MAX_MB")
    monkeypatch.delenv("RAWMLA_CUBIN_DIR")
    monkeypatch.setattr(nvrtc, "version", raising(NVRTCNotFoundError("there is no NVRTC")))
    assert "error: there is no NVRTC" in run(1, "compile").err


@pytest.fixture
def gpus(monkeypatch: MonkeyPatch) -> list[DeviceInfo]:
    """Two devices, which a test can change; the second is no Hopper."""
    infos = [DeviceInfo("NVIDIA H200", 132, (9, 0)), DeviceInfo("NVIDIA L4", 58, (8, 9))]
    driver = SimpleNamespace(version=lambda: (13, 0), device_count=lambda: 2)
    monkeypatch.setattr(report, "get_driver", lambda: driver)
    for module in (report, sys.modules["rawmla.jit.loading"]):
        monkeypatch.setattr(module, "device_info", lambda device: infos[device])
    return infos


def test_info_with_gpus(gpus: list[DeviceInfo], run: Run, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(report, "_import", lambda name, purpose: None)
    out = run(0, "info").out
    assert "NVIDIA H200, compute 9.0, 132 SMs" in out and "NVIDIA L4, compute 8.9" in out
    assert "for CUDA up to 13.0" in out and "yes, on device 0" in out
    monkeypatch.setattr(nvrtc, "version", lambda: "14.1.2")
    assert '`pip install -e ".[cu13]"` in a checkout of rawmla instead' in run(0, "info").out
    gpus[0] = gpus[1]
    assert "no: device 0 (NVIDIA L4) has compute capability 8.9" in run(0, "info").out


@pytest.mark.usefixtures("gpus")
def test_info_knows_what_torch_was_built_for(project: Project, run: Run, monkeypatch: MonkeyPatch) -> None:
    """From the file that torch itself reads; torch is not imported for it."""
    package = project.root / "site" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('imported')\n")
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    for version, cuda, text in (
        ("2.13.0+cpu", None, "no: torch 2.13.0+cpu was built without CUDA"),
        ("2.13.0+cu130", "13.0", "yes, torch 2.13.0+cu130 for CUDA 13.0"),
        ("2.15.0", "14.1", "no: torch 2.15.0 for CUDA 14.1 needs a newer driver than this one for CUDA 13.0"),
    ):
        (package / "version.py").write_text(f"__version__ = {version!r}\ncuda = {cuda!r}\n")
        assert text in run(0, "info").out
    assert "torch" not in sys.modules


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (["--bogus"], "unrecognized arguments: --bogus"),
        (["compile", "--bogus", "more"], "unrecognized arguments: --bogus more"),
        (["--bogus", "--", "script.py"], "unrecognized arguments: --bogus -- script.py"),
        (["info", "--", "script.py"], "unrecognized arguments: -- script.py"),
        (["bogus"], "invalid choice: 'bogus'"),
        ([], "expected a command: info, doctor, compile, flash-mla, flash-attn"),
        (["flash-mla"], "expected --path, or -- before a program"),
        (["flash-mla", "--path", "--", "x.py"], "expected --path, or -- before a program"),
        (["flash-mla", "x.py"], "unrecognized arguments: x.py"),
        (["flash-attn"], "expected --path, --check, --wheel, --kernels, or -- before a program"),
        (
            ["flash-attn", "--path", "--", "x.py"],
            "expected --path, --check, --wheel, --kernels, or -- before a program",
        ),
        (["flash-attn", "--path", "--dropout", "ignore"], "else set RAWMLA_FLASH_ATTN_DROPOUT"),
        (["flash-attn", "--fa", "2,5", "--path"], "expected some of 2, 3 and 4, as in 2,3, got '2,5'"),
    ],
)
def test_wrong_usage_names_what_is_wrong(capsys: CaptureFixture[str], given: list[str], text: str) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(given)
    assert caught.value.code == 2 and text in capsys.readouterr().err.splitlines()[-1]


def test_module_runs() -> None:
    done = subprocess.run([sys.executable, "-m", "rawmla", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, f"rawmla {rawmla.__version__}")
