"""Small as the sparse calls of these tests are, few would reach the kernel for clusters by themselves."""

import pytest

from rawmla.kernels import mla_sparse as sparse_decode
from rawmla.mla import sparse_decode as sparse
from rawmla.mla import sparse_prefill as prefill

FORCED = {"test_prefill_edges", "test_prefill_sanitizer", "test_sparse_sanitizer"}
TWICE = {
    "test_sparse_bits",
    "test_sparse_edges",
    "test_sparse_graphs",
    "test_sparse_matrix",
    "test_sparse_plans",
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.module.__name__ in TWICE:
        metafunc.parametrize("clusters", (False, True), ids=("chosen", "clusters"), indirect=True)


@pytest.fixture(autouse=True)
def clusters(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether mla_sparse_fp8_cluster.cu takes every call that it can, also those with short parts."""
    if getattr(request, "param", request.module.__name__ in FORCED):
        monkeypatch.setattr(sparse_decode, "_CLUSTER_MIN_BLOCKS", 0)
        # What is prepared is kept from call to call
        monkeypatch.setattr(sparse, "_known", {})
        monkeypatch.setattr(prefill, "_known", {})
