"""Kernels that tests write around parts of cuda_src."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cuda_probe import headers
from gpu_support import cupy

from rawmla.jit import nvrtc
from rawmla.jit.sources import SourceSet


def probe(folder: Path, text: str, **defines: int) -> Any:
    """The kernel `probe` of a source that includes project headers."""
    options = ("-arch=sm_90a", "-std=c++20", *(f"-D{name}={value}" for name, value in defines.items()))
    result = nvrtc.compile_source(SourceSet("probe.cu", text.encode(), headers()), options)
    assert result.status == "NVRTC_SUCCESS" and result.cubin is not None, result.log
    path = folder / "probe.cubin"
    path.write_bytes(result.cubin)
    return cupy.RawModule(path=str(path)).get_function("probe")
