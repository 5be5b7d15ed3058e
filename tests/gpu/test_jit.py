"""Kernels with generated headers on a real device: loaded, launched, let go of and loaded again."""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpu_support import torch
from jit_project import KERNEL, Project, tiny

from rawmla.jit import Kernel, KernelSpec, builder, get_kernel
from rawmla.jit.table import BoundedTable

POINTER = struct.Struct("<Q")
loading = sys.modules["rawmla.jit.loading"]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    """The library compiles this project's kernel, and keeps two variants with text."""
    made = Project(tmp_path)
    made.write("kernels/tiny.cu", '#include "mod/score.cuh"\n' + KERNEL.replace("outer()", "score(*out)"))
    monkeypatch.setattr(builder, "find_source_root", lambda: made.sources)
    monkeypatch.setenv("RAWMLA_CACHE_DIR", str(made.cache_dir))
    monkeypatch.setenv("RAWMLA_CUBIN_DIR", "")
    monkeypatch.setattr(loading, "_kernels", {})
    monkeypatch.setattr(loading, "_user_kernels", BoundedTable(2))
    monkeypatch.setattr(loading, "_captured", [])
    monkeypatch.setattr(loading, "_warned", BoundedTable(2))
    builder._default_builder.cache_clear()
    yield made
    builder._default_builder.cache_clear()


def times(factor: int) -> KernelSpec:
    """``out = factor * out + 1``"""
    text = f"__device__ int score(int x) {{ return {factor} * x; }}\n"
    return tiny(1, headers=(("mod/score.cuh", text),))


def run(kernel: Kernel, value: int) -> int:
    out = torch.tensor([value], dtype=torch.int32, device="cuda")
    kernel.launch((1, 1, 1), POINTER.pack(out.data_ptr()), torch.cuda.current_stream().cuda_stream)
    return int(out.item())


def test_kernels_are_let_go_of_and_loaded_again(project: Project) -> None:
    """Also while the last launch of one may still run, and with another one held by a prepared launch."""
    out = torch.zeros(1, dtype=torch.int32, device="cuda")
    stream = torch.cuda.current_stream().cuda_stream
    held = get_kernel(times(7), 0).prepare((1, 1, 1), POINTER.pack(out.data_ptr()), POINTER)
    want = 0
    for turn in range(40):
        factor = turn % 5
        get_kernel(times(factor), 0).launch((1, 1, 1), POINTER.pack(out.data_ptr()), stream)
        want = factor * want + 1
    held.launch(stream, out.data_ptr())
    assert int(out.item()) == 7 * want + 1


def test_a_graph_replays_what_others_have_displaced(project: Project) -> None:
    out = torch.zeros(1, dtype=torch.int32, device="cuda")
    get_kernel(times(3), 0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stream = torch.cuda.current_stream().cuda_stream
        get_kernel(times(3), 0).launch((1, 1, 1), POINTER.pack(out.data_ptr()), stream)
    for factor in range(10, 20):
        run(get_kernel(times(factor), 0), 1)
    assert [kernel.spec for kernel in loading._captured] == [times(3)]
    for _ in range(2):
        graph.replay()
    assert int(out.item()) == 4
