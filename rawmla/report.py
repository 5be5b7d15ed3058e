"""The report of ``python -m rawmla info``: machine, packages, cache, and what works or why not."""

from __future__ import annotations

import os
import platform
import runpy
import sys
from collections.abc import Callable
from importlib import util
from pathlib import Path

from rawmla import __version__
from rawmla.environment import conflicts, version_of
from rawmla.errors import (
    INSTALL_HINT,
    MissingDependencyError,
    RawMLAError,
    UnsupportedGPUError,
    install_command,
)
from rawmla.jit import default_builder, device_info, nvrtc, require_supported
from rawmla.jit.driver import get_driver
from rawmla.jit.entry import untrusted_reason

Rows = list[tuple[str, str]]

_PACKAGES = (
    "numpy cupy-cuda12x cupy-cuda13x cupy cuda-bindings nvidia-cuda-nvrtc-cu12 nvidia-cuda-nvrtc torch "
    "ml_dtypes"
).split()


def collect() -> dict[str, Rows]:
    """Section title to (label, text) rows. Nothing is compiled but NVRTC's own version check."""
    return {
        f"rawmla {__version__}": _system(),
        "packages": _packages(),
        "GPU": _gpu(),
        "kernels": _answers(
            ("sources", lambda: str(default_builder().source_root)),
            ("NVRTC", lambda: f"{nvrtc.version()} ({nvrtc.library_path() or 'path unknown'})"),
            ("cache", _cache),
            ("prebuilt", _prebuilt),
        ),
        "what works": _answers(
            ("compile kernels", lambda: f"yes, with NVRTC {nvrtc.version()}"),
            ("run kernels", _running),
            ("torch tensors", _torch_tensors),
            ("CuPy arrays", _cupy_arrays),
        ),
    }


def torch_build() -> tuple[str, str | None] | None:
    """Version of torch and of the CUDA that it was built for, which a CPU build has not; None without torch.

    Read without importing torch, which takes seconds. The package's metadata do not always say it.
    """
    found = util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    build = runpy.run_path(str(Path(found.origin).with_name("version.py")))
    return build["__version__"], build["cuda"]


def _answers(*questions: tuple[str, Callable[[], str]]) -> Rows:
    """Answers, or why there is none: a report must not stop at what it reports."""
    rows = []
    for label, answer in questions:
        try:
            rows.append((label, answer()))
        except (RawMLAError, OSError, ValueError) as error:
            rows.append((label, f"no: {error}"))
    return rows


def _system() -> Rows:
    rows = [("Python", f"{sys.version.split()[0]} on {platform.platform()}")]
    rows += [(name, value) for name, value in sorted(os.environ.items()) if name.startswith("RAWMLA_")]
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        rows.append(("CUDA_VISIBLE_DEVICES", os.environ["CUDA_VISIBLE_DEVICES"]))
    return rows


def _packages() -> Rows:
    versions = [(name, version_of(name)) for name in _PACKAGES]
    found = [(name, version) for name, version in versions if version is not None]
    return found + [("conflict", text) for text in conflicts()]


def _gpu() -> Rows:
    try:
        driver = get_driver()
        release = "unknown"
        proc = Path("/proc/driver/nvidia/version")
        if proc.is_file():
            release = proc.read_text().splitlines()[0].partition("Module")[2].split("  ")[1].strip()
        major, minor = driver.version()
        rows = [("driver", f"{release}, for CUDA up to {major}.{minor}")]
        for device in range(driver.device_count()):
            info = device_info(device)
            cc_major, cc_minor = info.compute_capability
            rows.append(
                (f"device {device}", f"{info.name}, compute {cc_major}.{cc_minor}, {info.sm_count} SMs")
            )
        return rows
    except (RawMLAError, OSError, IndexError) as error:
        return [("driver", f"none: {error}")]


def _cache() -> str:
    store = default_builder().cache
    refusal = store.refusal()
    if refusal is not None:
        return f"not used: {refusal}"
    entries = store.entries()
    used = sum(size for _, size, _ in entries) / 1e6
    return f"{store.path} ({len(entries)} entries, {used:.1f} of {store.max_bytes / 1e6:.0f} MB)"


def _prebuilt() -> str:
    folder = default_builder().prebuilt
    if folder is None:
        return "RAWMLA_CUBIN_DIR is not set"
    reason = untrusted_reason(folder, root_may_own=True)
    count = len(list(folder.glob("*/kernel.cubin")))
    return f"not used: {reason}" if reason else f"{folder} ({count} entries)"


def _running() -> str:
    driver = get_driver()
    good, refused = [], []
    for device in range(driver.device_count()):
        try:
            require_supported(device)
            good.append(str(device))
        except UnsupportedGPUError as error:
            refused.append(str(error))
    if not good:
        return f"no: {'; '.join(refused)}"
    _import("cupy", "loading kernels needs CuPy")
    where = f"on device {', '.join(good)}"
    try:
        toolkit, driver_major = int(nvrtc.version().split(".")[0]), driver.version()[0]
    except RawMLAError:
        if default_builder().prebuilt is None:
            raise
        return f"only kernels of RAWMLA_CUBIN_DIR, {where}: NVRTC is missing"
    if toolkit > driver_major:
        return (
            f"no: code of NVRTC {toolkit} needs a newer driver than this one for CUDA {driver_major}; "
            f"run {install_command(f'cu{driver_major}')} instead"
        )
    return f"yes, {where}"


def _torch_tensors() -> str:
    build = torch_build()
    if build is None:
        return f"no: torch is not installed ({install_command('torch')})"
    version, cuda = build
    if cuda is None:
        return f"no: torch {version} was built without CUDA"
    made_for = f"torch {version} for CUDA {cuda}"
    try:
        major, minor = get_driver().version()
    except RawMLAError:  # said in the rows of the GPU
        return f"yes, {made_for}"
    if int(cuda.split(".")[0]) > major:
        return f"no: {made_for} needs a newer driver than this one for CUDA {major}.{minor}"
    return f"yes, {made_for}"


def _cupy_arrays() -> str:
    _import("cupy", "CuPy arrays need CuPy")
    try:
        _import("ml_dtypes", "")
    except MissingDependencyError:
        return "float16 only: bfloat16 needs ml_dtypes (`pip install ml_dtypes`)"
    return "yes"


def _import(name: str, purpose: str) -> None:
    try:
        __import__(name)
    except Exception as error:  # what an import may raise has no end
        raise MissingDependencyError(f"{purpose} ({error}); install it with {INSTALL_HINT}") from error
