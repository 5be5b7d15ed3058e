"""Packages that get in each other's way are named, with the remedy."""

from __future__ import annotations

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
    assert "CUDA 12: cupy-cuda12x 14.2.0, nvidia-cuda-nvrtc-cu12 12.8.93; CUDA 13: " in second


def test_libraries_of_two_cuda_versions(tmp_path: Path) -> None:
    (text,) = environment.conflicts(site(tmp_path, {**CUDA12, "cuda-bindings": "13.0.3"}))
    assert text.startswith(
        "libraries of 2 CUDA versions are installed together (CUDA 12: cupy-cuda12x 14.2.0, "
    )
    assert "CUDA 13: cuda-bindings 13.0.3" in text


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


@pytest.mark.parametrize(
    ("answer", "extras"),
    [
        ("exit 9", "cu12"),
        ("echo '| Driver Version: 550.54   CUDA Version: 12.4  |'", "cu12,torch"),
        ("echo '| Driver Version: 580.159  CUDA Version: 13.0  |'", "cu13,torch"),
        ("echo '| KMD Version: 610.1  CUDA UMD Version: 13.4  |'", "cu13,torch"),
    ],
    ids=["no driver", "driver of CUDA 12", "driver of CUDA 13", "newer wording"],
)
def test_both_commands_choose_extras_by_the_driver(tmp_path: Path, answer: str, extras: str) -> None:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{answer}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    script = f'PATH="{tmp_path}:$PATH"; source scripts/environment.sh; cuda_extras'
    found = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script], cwd=ROOT, capture_output=True, text=True
    )
    assert (found.returncode, found.stdout) == (0, extras + "\n"), found.stderr
    for name in ("bench.sh", "test.sh"):
        text = (ROOT / "scripts" / name).read_text()
        assert "environment.sh" in text and "cu1" not in text


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
