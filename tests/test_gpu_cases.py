"""The GPU tests' cases, looked at without a GPU: calls go to the kernels that they are there for."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import test_plans
from calls.fakes import FakeArray, make_world
from gpu_support import forced_clusters

import rawmla
from kit import SparseCase
from operations import OPERATIONS
from rawmla import jit
from rawmla.kernels import mla_sparse

OF_TABLE = [
    (operation, case)
    for operation in OPERATIONS
    for case in (
        *operation.cases,
        *operation.rerun_cases,
        *operation.graph_cases,
        *operation.invariant_cases,
    )
]
CLUSTER_CASES = dict.fromkeys(
    (operation.name, case)
    for operation, case in (*OF_TABLE, *test_plans.CASES, *test_plans.LONG_CASES)
    if operation.clusters
)


@pytest.fixture
def attention(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """The names of the kernels that calls on stand-ins for arrays ask for, without those around attention."""
    asked: set[str] = set()

    def get_kernel(spec: jit.KernelSpec, *_: Any, **__: Any) -> Any:
        asked.add(spec.name)
        return SimpleNamespace(prepare=lambda *_, **__: SimpleNamespace(launch=lambda *_, **__: True))

    prepared = mla_sparse.PreparedSparse
    make_world(monkeypatch)
    monkeypatch.setattr(mla_sparse, "PreparedSparse", prepared)
    monkeypatch.setattr(jit, "get_kernel", get_kernel)
    with forced_clusters():
        yield asked


def cache(case: SparseCase, s_k: int, page: int) -> FakeArray:
    """With the rows that requests own, or all share, and no other ones."""
    blocks = (1 if case.shared else case.b) * -(-s_k // page)
    return FakeArray((blocks, page, 1, case.format.token_bytes), "uint8")


def decode(case: SparseCase, **given: Any) -> None:
    if case.extra_topk:
        given["extra_k_cache"] = cache(case, case.extra_s_k, case.extra_page_block_size)
        given["extra_indices_in_kvcache"] = FakeArray((case.b, case.s_q, case.extra_topk))
    rawmla.flash_mla_with_kvcache(
        FakeArray((case.b, case.s_q, case.h_q, case.width), "bfloat16"),
        cache(case, case.s_k, case.page_block_size),
        None,
        None,
        512,
        *rawmla.get_mla_metadata(),
        indices=FakeArray((case.b, case.s_q, case.topk)),
        is_fp8_kvcache=True,
        **given,
    )


def prefill(case: SparseCase, **given: Any) -> None:
    rawmla.flash_mla_sparse_fwd(
        FakeArray((case.b, case.h_q, case.width), "bfloat16"),
        cache(case, case.s_k, case.page_block_size),
        FakeArray((case.b, 1, case.topk)),
        0.1,
        is_fp8_kvcache=True,
        **given,
    )


@pytest.mark.parametrize(
    ("name", "case"), CLUSTER_CASES, ids=[f"{name}-{case.id}" for name, case in CLUSTER_CASES]
)
def test_clusters(name: str, case: SparseCase, attention: set[str]) -> None:
    """Cases of operations that force the kernel for clusters reach it, and no other attention kernel: not
    that for rows in bf16 either, which attends copies.
    """
    topk_length = None if case.lengths is None else FakeArray((case.b,))
    (prefill if name.startswith("prefill") else decode)(case, topk_length=topk_length)
    assert attention - {"mla_combine"} == {"mla_sparse_fp8_cluster"}
