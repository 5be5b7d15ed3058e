"""Packages of this environment: their versions, and which get in each other's way."""

from __future__ import annotations

import functools
import sys
import warnings
from importlib import metadata

from .errors import install_command

# Distributions of CuPy share one folder: the one installed last overwrites the others.
_CUPY = ("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x", "cupy-cuda14x")
# Libraries of CUDA 12 have their major version in the name.
_NVRTC = ("nvidia-cuda-nvrtc-cu11", "nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc")
# rawmla compiles, loads and launches with these.
_CUDA = (*_CUPY[1:], "cuda-bindings", *_NVRTC)


def version_of(distribution: str) -> str | None:
    """The version of an installed distribution; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def conflicts(path: list[str] | None = None) -> list[str]:
    """Packages that are installed twice, a text with the remedy for each; empty if all is well.

    Parameters
    ----------
    path : list of str, optional
        Folders to look for installed distributions in; None: `sys.path`.
    """
    found = {}
    for name in {*_CUPY, *_CUDA}:
        for distribution in metadata.distributions(name=name, path=sys.path if path is None else path):
            found[name] = distribution.version
            break
    texts = []
    cupys = [name for name in _CUPY if name in found]
    if len(cupys) > 1:
        texts.append(
            f"{_listed(cupys, found)} are installed together, but they share one folder; run "
            f"`pip uninstall {' '.join(cupys)}`, then {_reinstall()}"
        )
    majors: dict[int, list[str]] = {}
    for name in _CUDA:
        if name in found:
            majors.setdefault(_major(name, found[name]), []).append(name)
    if len(majors) > 1:
        sorts = "; ".join(f"CUDA {major}: {_listed(majors[major], found)}" for major in sorted(majors))
        texts.append(
            f"libraries of {len(majors)} CUDA versions are installed together ({sorts}); keep the driver's "
            f"and run `pip uninstall` with the others, then {_reinstall()}"
        )
    return texts


@functools.lru_cache(maxsize=1)
def warn_of_conflicts() -> None:
    """Warn of each of `conflicts`, once in a process."""
    for text in conflicts():
        warnings.warn(f"rawmla: {text}", RuntimeWarning, stacklevel=2)


def _major(name: str, version: str) -> int:
    digits = name.rpartition("-cu")[2].removeprefix("da").removesuffix("x")
    return int(digits if digits.isdigit() else version.partition(".")[0])


def _listed(names: list[str], versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {versions[name]}" for name in names)


def _reinstall() -> str:
    return f"{install_command('cu12')} or {install_command('cu13')}"
