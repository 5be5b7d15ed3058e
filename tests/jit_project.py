"""A small source tree with its own cache, for the tests of rawmla.jit and of the command line."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from rawmla.jit import Builder, CompiledKernel, DiskCache, KernelSpec

KERNEL = """\
#include "lib/outer.cuh"
extern "C" __global__ void tiny(int* out) { *out = outer() + FACTOR; }
"""
OUTER = '#pragma once\n#include "lib/inner.cuh"\n__device__ int outer() { return INNER; }\n'
INNER = "#pragma once\n#define INNER 7\n"
Pretend = Callable[..., None]


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
    may_lose: bool = False,
) -> KernelSpec:
    return KernelSpec(name, (("FACTOR", factor),), threads, smem_bytes, headers, may_lose)


def with_text(text: str, name: str = "mod/score.cuh") -> KernelSpec:
    """The variant with a generated header."""
    return tiny(headers=((name, text),))


def at_once(count: int, run: Callable[[int], object]) -> None:
    """Call `run(0)`, `run(1)` and so on in threads that begin together."""
    start = threading.Barrier(count)
    threads = [threading.Thread(target=lambda i=i: (start.wait(), run(i))) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def pretended_status(monkeypatch: pytest.MonkeyPatch) -> Pretend:
    """A function ``pretend(path, uid=..., gid=..., mode=...)``, after which os.stat and os.fstat say so.

    Only root can give a file to somebody else, and the tests are not always run by root.
    """
    changes: dict[tuple[int, int], dict[str, int]] = {}
    real_stat, real_fstat = os.stat, os.fstat

    def altered(status: os.stat_result) -> os.stat_result:
        change = changes.get((status.st_dev, status.st_ino))
        if change is None:
            return status
        fields = list(status)
        if "mode" in change:
            fields[0] = stat.S_IFMT(fields[0]) | change["mode"]
        fields[4], fields[5] = change.get("uid", fields[4]), change.get("gid", fields[5])
        return os.stat_result(fields, {"st_mtime": status.st_mtime})

    monkeypatch.setattr(os, "stat", lambda *arguments, **keywords: altered(real_stat(*arguments, **keywords)))
    monkeypatch.setattr(os, "fstat", lambda descriptor: altered(real_fstat(descriptor)))

    def pretend(path: Path, **change: int) -> None:
        status = real_stat(path)
        changes[status.st_dev, status.st_ino] = change

    return pretend
