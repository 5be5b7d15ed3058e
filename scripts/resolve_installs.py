#!/usr/bin/env python3
"""Resolves every documented installation from package metadata alone, and checks what would be installed.

    python scripts/resolve_installs.py

uv resolves (nothing but metadata is downloaded), for Linux on x86-64. A combination passes if there is a
solution, all of its CUDA libraries are of one major version, NVRTC is one that the kernels are known to
compile by, and torch, where asked for, is a build for that CUDA.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
CUDA_OF = {"cu12": 12, "cu13": 13}
OPTIONS = ((), ("torch",))
TOOLS = ((), ("test",))
WITHOUT_A_DRIVER = ("cu13", "torch", "test", "torch==2.13.0")
"""What scripts/environment.sh installs there."""
NVRTC_OF = {12: "nvidia-cuda-nvrtc-cu12", 13: "nvidia-cuda-nvrtc"}
NVRTC_RANGE = ((12, 6), (13, 5))


def combinations() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Python version and extras of every documented installation, maybe with a release of torch."""
    for python, cuda, option, tool in itertools.product(PYTHONS, CUDA_OF, OPTIONS, TOOLS):
        yield python, (cuda, *option, *tool)
    for python in PYTHONS:
        yield python, WITHOUT_A_DRIVER


def resolve(python: str, extras: tuple[str, ...]) -> dict[str, str]:
    """Package name to version. Raises ``RuntimeError`` with the resolver's words if there is no solution."""
    command = "uv pip compile pyproject.toml - --quiet --no-config --no-header --no-annotate".split()
    command += ["--python", sys.executable, "--no-python-downloads", "--only-binary", ":all:"]
    command += ["--python-version", python, "--python-platform", "x86_64-manylinux_2_28"]
    releases = [word for word in extras if "==" in word]
    command += [word for extra in extras if extra not in releases for word in ("--extra", extra)]
    # Wheels on a machine's own disk, such as CPU builds of torch, are not what users get.
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_FIND"))
    }
    answer = subprocess.run(
        command, cwd=ROOT, env=environment, input="\n".join(releases), capture_output=True, text=True
    )
    if answer.returncode:
        raise RuntimeError(answer.stderr.strip())
    pairs = (line.split(";")[0].strip().split("==") for line in answer.stdout.splitlines() if "==" in line)
    return {name: version for name, version in pairs}


def fault(extras: tuple[str, ...], found: dict[str, str]) -> str:
    """What is wrong with a solution; empty if nothing is."""
    cuda = CUDA_OF[extras[0]]
    needed = (f"cupy-cuda{cuda}x", "cuda-bindings", NVRTC_OF[cuda], "ml-dtypes")
    missing = [name for name in needed if name not in found]
    if missing:
        return f"missing: {', '.join(missing)}"
    (other,) = {12, 13} - {cuda}
    strangers = [name for name in found if name.endswith((f"-cu{other}", f"cuda{other}x"))]
    strangers += [NVRTC_OF[other]] if NVRTC_OF[other] in found else []
    if strangers:
        return f"libraries of CUDA {other}: {', '.join(sorted(set(strangers)))}"
    if not found["cuda-bindings"].startswith(f"{cuda}."):
        return f"cuda-bindings {found['cuda-bindings']} is not for CUDA {cuda}"
    major, minor, *_ = map(int, found[NVRTC_OF[cuda]].split("."))
    if not NVRTC_RANGE[0] <= (major, minor) <= NVRTC_RANGE[1]:
        return f"kernels are not known to compile by NVRTC {found[NVRTC_OF[cuda]]}"
    if ("torch" in extras) != ("torch" in found):
        return "torch is missing" if "torch" in extras else "torch was not asked for"
    if "torch" in extras and not any(name.startswith("nvidia-cudnn") for name in found):
        return f"torch {found['torch']} is not a CUDA build"
    return ""


def judge(wish: tuple[str, tuple[str, ...]]) -> tuple[dict[str, str], str]:
    """Solution and verdict of a combination."""
    try:
        found = resolve(*wish)
        return found, fault(wish[1], found) or "ok"
    except RuntimeError as error:
        return {}, str(error)


def main() -> int:
    """Print a line for each combination; 0 if each passes, else 1."""
    wanted = list(combinations())
    with ThreadPoolExecutor(8) as pool:  # they wait for the index, not for the processor
        answers = list(pool.map(judge, wanted))
    for (python, extras), (found, verdict) in zip(wanted, answers, strict=True):
        columns = ("torch", NVRTC_OF[CUDA_OF[extras[0]]], "cuda-bindings")
        versions = " ".join(f"{name} {found.get(name, '-')}" for name in columns)
        print(f"{python:5}{','.join(extras):30}{versions:60}{verdict}")
    good = sum(verdict == "ok" for _, verdict in answers)
    print(f"{good} of {len(wanted)} installations resolve")
    return 0 if good == len(wanted) else 1


if __name__ == "__main__":
    sys.exit(main())
