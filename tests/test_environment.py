"""Packages that get in each other's way are named, with the remedy."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from rawmla import environment

ROOT = Path(__file__).resolve().parents[1]

CUDA12 = {"cupy-cuda12x": "14.2.0", "cuda-bindings": "12.9.4", "nvidia-cuda-nvrtc-cu12": "12.8.93"}
CUDA13 = {"cupy-cuda13x": "14.2.0", "cuda-bindings": "13.0.3", "nvidia-cuda-nvrtc": "13.0.88"}


def site(folder: Path, packages: dict[str, str]) -> list[str]:
    """A folder where these distributions are installed."""
    for name, version in packages.items():
        info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return [str(folder)]


@pytest.mark.parametrize("packages", [{}, CUDA12, CUDA13], ids=["nothing", "CUDA 12", "CUDA 13"])
def test_no_conflict(tmp_path: Path, packages: dict[str, str]) -> None:
    assert environment.conflicts(site(tmp_path, packages)) == []


def test_two_cupys(tmp_path: Path) -> None:
    first, second = environment.conflicts(site(tmp_path, {**CUDA12, **CUDA13}))
    assert first.startswith("cupy-cuda12x 14.2.0, cupy-cuda13x 14.2.0 are installed together")
    assert "`pip uninstall cupy-cuda12x cupy-cuda13x`" in first and '".[cu12]"' in first
    assert second.startswith("libraries of 2 CUDA versions are installed together (CUDA 12: cupy-cuda12x ")
    assert "CUDA 12: cupy-cuda12x 14.2.0, nvidia-cuda-nvrtc-cu12 12.8.93; CUDA 13: " in second


def test_the_first_call_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "conflicts", lambda: ["two of them"])
    environment.warn_of_conflicts.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match="rawmla: two of them") as caught:
            environment.warn_of_conflicts()
            environment.warn_of_conflicts()
        assert len(caught) == 1
    finally:
        environment.warn_of_conflicts.cache_clear()


def commands_of(script: str, folder: Path, answer: str, *arguments: str) -> tuple[list[str], str]:
    """What a script has Python do where `nvidia-smi` gives the answer, as lines of OMP_NUM_THREADS and
    arguments, and what it says.
    """
    log = folder / "log"
    for name, text in {
        "scripts/environment.sh": (ROOT / "scripts" / "environment.sh").read_text(),
        f"scripts/{script}": (ROOT / "scripts" / script).read_text(),
        "bin/nvidia-smi": f"#!/bin/sh\n{answer}\n",
        ".venv/bin/python": f"""#!/bin/sh
[ "$3" = show ] || echo "${{OMP_NUM_THREADS:-unset}} $*" >>{log}
[ "$3" != show ]
""",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    environment = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    command = ["bash", f"scripts/{script}", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return log.read_text().splitlines(), done.stderr


@pytest.mark.parametrize(
    ("answer", "installed"),
    [
        ("exit 9", ".[cu13,torch,test] torch==2.13.0"),
        ("echo '| Driver Version: 550.54   CUDA Version: 12.4  |'", ".[cu12,torch,test]"),
        ("echo '| Driver Version: 580.159  CUDA Version: 13.0  |'", ".[cu13,torch,test]"),
        ("echo '| KMD Version: 610.1  CUDA UMD Version: 13.4  |'", ".[cu13,torch,test]"),
    ],
    ids=["no driver", "driver of CUDA 12", "driver of CUDA 13", "newer wording"],
)
def test_the_test_command(tmp_path: Path, answer: str, installed: str) -> None:
    """It installs torch, also without a driver, and says what it does. Processes side by side would share a
    GPU.
    """
    (_, install, test), said = commands_of("test.sh", tmp_path, answer, "-k", "one")
    assert install.endswith(f"--editable {installed}")
    assert f"Installing rawmla{installed[1:]} " in said
    assert "it downloads about 4 GB" in said
    if answer == "exit 9":
        assert test == "1 -m pytest -q -n auto --dist worksteal -k one"
        assert "minutes on two cores" in said
        (_, install, _), _ = commands_of("bench.sh", tmp_path / "bench", answer)
        assert install.endswith("--editable .[cu13,torch] nvidia-ml-py pytest torch==2.13.0")
    else:
        assert test == "unset -m pytest -q -k one"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({}, ""),
        ({"cupy-cuda12x": None}, "missing: cupy-cuda12x"),
        ({"ml-dtypes": None, "cuda-bindings": None}, "missing: cuda-bindings, ml-dtypes"),
        (
            {"nvidia-cublas": "13.0.0", "nvidia-cuda-nvrtc": "13.0.88"},
            "libraries of CUDA 13: nvidia-cuda-nvrtc",
        ),
        ({"nvidia-cudnn-cu13": "9.0"}, "libraries of CUDA 13: nvidia-cudnn-cu13"),
        ({"cuda-bindings": "13.0.3"}, "cuda-bindings 13.0.3 is not for CUDA 12"),
        ({"nvidia-cuda-nvrtc-cu12": "12.4.127"}, "kernels are not known to compile by NVRTC 12.4.127"),
        ({"torch": None}, "torch is missing"),
        ({"nvidia-cudnn-cu12": None}, "torch 2.10.0 is not a CUDA build"),
    ],
)
def test_installations_that_would_not_do(
    change: dict[str, str | None], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import resolve_installs

    found = {**CUDA12, "ml-dtypes": "0.6", "torch": "2.10.0", "nvidia-cudnn-cu12": "9.10", **change}
    found = {name: version for name, version in found.items() if version is not None}
    assert resolve_installs.fault(("cu12", "torch", "test"), found) == text


def test_what_is_installed_without_a_driver_is_resolved_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import resolve_installs

    *extras, torch = resolve_installs.WITHOUT_A_DRIVER
    text = (ROOT / "scripts" / "environment.sh").read_text()
    assert f"packages+=({torch})" in text
    wanted = [extras for _, extras in resolve_installs.WISHES]
    assert wanted.count(resolve_installs.WITHOUT_A_DRIVER) == 4 and extras == ["cu13", "torch", "test"]
