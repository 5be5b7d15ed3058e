"""A small source tree with its own cache, for the tests of rawmla.jit and of the command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rawmla.jit import Builder, CompiledKernel, DiskCache, KernelSpec

KERNEL = """\
#include "lib/outer.cuh"
extern "C" __global__ void tiny(int* out) { *out = outer() + FACTOR; }
"""
OUTER = '#pragma once\n#include "lib/inner.cuh"\n__device__ int outer() { return INNER; }\n'
INNER = "#pragma once\n#define INNER 7\n"


@dataclass
class Project:
    """Folders ``cuda_src`` and ``cache`` below ``root``; `builder` makes a builder as a new process would."""

    root: Path
    max_bytes: int = 10_000_000

    def __post_init__(self) -> None:
        self.sources = self.root / "cuda_src"
        self.cache_dir = self.root / "cache"
        self.write("kernels/tiny.cu", KERNEL)
        self.write("lib/outer.cuh", OUTER)
        self.write("lib/inner.cuh", INNER)

    def write(self, name: str, text: str) -> None:
        target = self.sources / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def builder(self, prebuilt: Path | None = None) -> Builder:
        return Builder(self.sources, DiskCache(self.cache_dir, self.max_bytes), prebuilt)

    def build(self, factor: int = 1) -> CompiledKernel:
        return self.builder().build(tiny(factor))

    def entries(self) -> list[str]:
        return sorted(folder.name for _, _, folder in DiskCache(self.cache_dir, self.max_bytes).entries())


def tiny(
    factor: int = 1,
    *,
    name: str = "tiny",
    threads: int = 128,
    smem_bytes: int = 0,
    headers: tuple[tuple[str, str], ...] = (),
) -> KernelSpec:
    return KernelSpec(name, (("FACTOR", factor),), threads, smem_bytes, headers)
