"""Fresh memory is poison in every test; small sparse calls are forced to the kernel for clusters, which few
of them would reach by themselves.
"""

import os
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
from gpu_support import forced_clusters, poison, poisonable_allocations, torch

import rawmla
from rawmla.testing.gpu import missing_hopper_reason

FORCED = {"test_prefill_edges", "test_prefill_numbers", "test_prefill_sanitizer", "test_sparse_sanitizer"}
TWICE = {
    "test_sparse_bits",
    "test_sparse_edges",
    "test_sparse_matrix",
    "test_sparse_numbers",
    "test_sparse_plans",
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.module.__name__ in TWICE:
        metafunc.parametrize("clusters", (False, True), ids=("chosen", "clusters"), indirect=True)


@pytest.fixture(autouse=True)
def clusters(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whether calls are forced to the kernel for clusters: by the file, a parameter, or the operation."""
    parameters = getattr(getattr(request.node, "callspec", None), "params", {})
    operation = parameters.get("operation")
    forced = request.module.__name__ in FORCED or (operation is not None and operation.clusters)
    with forced_clusters() if getattr(request, "param", forced) else nullcontext():
        yield


@pytest.fixture(scope="session", autouse=True)
def _share_of_the_memory() -> None:
    """Processes of pytest-xdist share the GPU: torch gives none of them more than its share, in which freed
    memory that it keeps counts too. A test that needs more than that runs out of memory.
    """
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if processes > 1 and missing_hopper_reason() is None:
        for device in range(torch.cuda.device_count()):
            torch.cuda.set_per_process_memory_fraction(0.9 / processes, device)


@pytest.fixture
def _nothing_compiled() -> Iterator[None]:
    """torch.compile has compiled nothing, and nothing of this test is left to others."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="session", autouse=True)
def _poisonable_allocations() -> Iterator[None]:
    with poisonable_allocations():
        yield


@pytest.fixture(autouse=True)
def _poison(request: pytest.FixtureRequest) -> Iterator[None]:
    """compute-sanitizer takes poison for initialised memory, so its cases go without."""
    markers = ("sanitizer", "unpoisoned")
    with poison(not any(request.node.get_closest_marker(name) for name in markers)):
        yield


@pytest.fixture
def flash_mla() -> Iterator[Any]:
    """The module of that name, which is rawmla's."""
    yield rawmla.install_flash_mla(replace=True)
    rawmla.uninstall_flash_mla()
