#!/usr/bin/env python3
"""Resolves every documented installation from package metadata alone, and checks what would be installed.

    python scripts/resolve_installs.py

uv resolves (nothing but metadata is downloaded), for Linux on x86-64. A combination passes if there is a
solution, all of its CUDA libraries are of one major version, NVRTC is one that the kernels are known to
compile by, and torch, where asked for, is a build for that CUDA.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WITHOUT_A_DRIVER = ("cu13", "torch", "test", "torch==2.13.0")
"""What scripts/environment.sh installs there."""
EXTRAS = [
    (f"cu{cuda}", *more) for cuda in (12, 13) for more in ((), ("test",), ("torch",), ("torch", "test"))
]
WISHES = [(f"3.{minor}", extras) for minor in range(10, 14) for extras in (*EXTRAS, WITHOUT_A_DRIVER)]
"""Python version and extras of every documented installation, maybe with a release of torch."""
NVRTC_OF = {12: "nvidia-cuda-nvrtc-cu12", 13: "nvidia-cuda-nvrtc"}
NVRTC_RANGE = ((12, 6), (13, 5))


def resolve(python: str, extras: tuple[str, ...]) -> dict[str, str]:
    """Package name to version. Raises ``RuntimeError`` with the resolver's words if there is no solution."""
    command = "uv pip compile pyproject.toml - --quiet --no-config --no-header --no-annotate".split()
    command += ["--python", sys.executable, "--no-python-downloads", "--only-binary", ":all:"]
    command += ["--python-version", python, "--python-platform", "x86_64-manylinux_2_28"]
    releases = [word for word in extras if "==" in word]
    command += [f"--extra={extra}" for extra in extras if extra not in releases]
    # Wheels on a machine's own disk, such as CPU builds of torch, are not what users get.
    environment = {key: text for key, text in os.environ.items() if not key.startswith(("PIP_", "UV_FIND"))}
    answer = subprocess.run(
        command, cwd=ROOT, env=environment, input="\n".join(releases), capture_output=True, text=True
    )
    if answer.returncode:
        raise RuntimeError(answer.stderr.strip())
    pairs = (line.split(";")[0].strip().split("==") for line in answer.stdout.splitlines() if "==" in line)
    return {name: version for name, version in pairs}


def fault(extras: tuple[str, ...], found: dict[str, str]) -> str:
    """What is wrong with a solution; empty if nothing is."""
    cuda = int(extras[0].removeprefix("cu"))
    (other,) = NVRTC_OF.keys() - {cuda}
    needed = (f"cupy-cuda{cuda}x", "cuda-bindings", NVRTC_OF[cuda], "ml-dtypes")
    if missing := [name for name in needed if name not in found]:
        return f"missing: {', '.join(missing)}"
    ends = f"-cu{other}", f"cuda{other}x"
    if strangers := [name for name in sorted(found) if name.endswith(ends) or name == NVRTC_OF[other]]:
        return f"libraries of CUDA {other}: {', '.join(strangers)}"
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


def judge(wish: tuple[str, tuple[str, ...]]) -> bool:
    """Whether a combination passes; its line is printed."""
    python, extras = wish
    try:
        found = resolve(python, extras)
        verdict = fault(extras, found)
    except RuntimeError as error:
        found, verdict = {}, str(error)
    names = ("torch", *NVRTC_OF.values(), "cuda-bindings")
    versions = " ".join(f"{name} {found[name]}" for name in names if name in found)
    print(f"{python:5}{','.join(extras):30}{versions:60}{verdict or 'ok'}", flush=True)
    return not verdict


if __name__ == "__main__":
    with ThreadPoolExecutor(8) as pool:  # they wait for the index, not for the processor
        passed = list(pool.map(judge, WISHES))
    print(f"{sum(passed)} of {len(passed)} installations resolve")
    sys.exit(not all(passed))
