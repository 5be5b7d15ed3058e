"""Fresh memory is poison in every test; small sparse calls of some operations are forced to the kernel for
clusters, which few of them would reach by themselves.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
from gpu_shares import Shares, was_out_of_memory
from gpu_support import cupy, forced_clusters, poison, poisonable_allocations, torch

import rawmla
from kit.gpu import missing_hopper_reason


@pytest.fixture(autouse=True)
def clusters(request: pytest.FixtureRequest) -> Iterator[None]:
    """Calls are forced to the kernel for clusters where an operation of the test's parameters says so."""
    parameters = getattr(getattr(request.node, "callspec", None), "params", {})
    forced = any(getattr(value, "clusters", False) for value in parameters.values())
    with forced_clusters() if forced else nullcontext():
        yield


_shares: Shares | None = None


@pytest.fixture(scope="session", autouse=True)
def _share_of_the_memory(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Processes of pytest-xdist share the GPU."""
    global _shares
    if missing_hopper_reason() is None:
        _shares = Shares.in_folder(tmp_path_factory.getbasetemp().parent)
    if _shares is not None:
        _shares.limit(torch)


@pytest.fixture(autouse=True)
def _memory_is_given_back(_share_of_the_memory: None) -> Iterator[None]:
    """What allocators keep of a test's memory, if it is much, is for other processes."""
    yield
    if _shares is not None:
        _shares.give_back(torch, cupy)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Any:
    """A test for which the share of its process is too small runs once more, with a large share."""
    try:
        return (yield)
    except Exception as error:
        if _shares is None or not was_out_of_memory(error):
            raise
    with _shares.large(torch, cupy):
        arguments = pyfuncitem._fixtureinfo.argnames
        pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in arguments})
    return True


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
