"""How the GPU tests' processes share the memory of a GPU, with an allocator that is made up."""

from __future__ import annotations

import importlib.util
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu_shares
import pytest
from gpu_shares import LARGE, LARGE_SHARES, SMALL, Shares, was_out_of_memory


class OutOfMemoryError(RuntimeError):
    """As torch and CuPy call theirs."""


class Cuda:
    """torch.cuda: what a process may have, and has."""

    def __init__(self) -> None:
        self.fractions: list[float] = []
        self.reserved, self.allocated = 5 << 30, 1 << 20

    def device_count(self) -> int:
        return 1

    def set_per_process_memory_fraction(self, fraction: float, device: int) -> None:
        self.fractions.append(fraction)

    def memory_reserved(self) -> int:
        return self.reserved

    def memory_allocated(self) -> int:
        return self.allocated

    def empty_cache(self) -> None:
        self.reserved = self.allocated


class Pool:
    """CuPy's."""

    def __init__(self) -> None:
        self.free = 100

    def free_bytes(self) -> int:
        return self.free

    def free_all_blocks(self) -> None:
        self.free = 0


def frameworks() -> tuple[Cuda, Pool, Any, Any]:
    cuda, pool = Cuda(), Pool()
    return cuda, pool, SimpleNamespace(cuda=cuda), SimpleNamespace(get_default_memory_pool=lambda: pool)


def shares(folder: Path, monkeypatch: pytest.MonkeyPatch, processes: int = 15) -> Shares:
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", str(processes))
    made = Shares.in_folder(folder)
    assert made is not None
    return made


def test_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, pool, torch, cupy = frameworks()
    run = shares(tmp_path, monkeypatch)
    run.give_back(torch, cupy)
    assert cuda.reserved == cuda.allocated and pool.free == 100
    cuda.reserved += gpu_shares.KEPT_BYTES
    run.give_back(torch, cupy)
    assert cuda.reserved == cuda.allocated + gpu_shares.KEPT_BYTES
    pool.free = gpu_shares.KEPT_BYTES + 1
    run.give_back(torch, cupy)
    assert pool.free == 0


def test_large_shares_are_for_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait, and none keeps its share when it ends, whatever way."""
    run = shares(tmp_path, monkeypatch)
    inside, most, limits = 0, 0, []
    guard = threading.Lock()
    together = threading.Barrier(LARGE_SHARES, timeout=60)

    def process(number: int) -> None:
        nonlocal inside, most
        cuda, pool, torch, cupy = frameworks()
        with pytest.raises(ZeroDivisionError), run.large(torch, cupy):
            assert pool.free == 0 and cuda.reserved == cuda.allocated
            with guard:
                inside += 1
                most = max(most, inside)
            together.wait()
            cuda.reserved += 1 << 30
            with guard:
                inside -= 1
            raise ZeroDivisionError
        limits.append(cuda.fractions)
        assert cuda.reserved == cuda.allocated

    threads = [threading.Thread(target=process, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == LARGE_SHARES
    assert limits == [[SMALL / 15 + LARGE, SMALL / 15]] * 4


class Array:
    """Memory."""


def test_out_of_memory() -> None:
    """Also as a cause; what the functions held is freed while the error lives."""
    held: list[Any] = []

    def call(error: Exception) -> None:
        array = Array()
        held.append(weakref.ref(array))
        raise error

    def wrap() -> None:
        try:
            call(OutOfMemoryError("no"))
        except OutOfMemoryError as error:
            raise RuntimeError("in a case") from error

    for function, is_memory in (
        (wrap, True),
        (lambda: call(OutOfMemoryError("no")), True),
        (lambda: call(RuntimeError("CUDA error")), False),
    ):
        try:
            function()
        except RuntimeError as error:
            kept = error
        assert was_out_of_memory(kept) == is_memory
        assert (held[-1]() is None) == is_memory


def test_a_test_runs_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, with its arguments and a large share, if it ran out of memory and not if it failed otherwise."""
    path = Path(__file__).parent / "gpu" / "conftest.py"
    spec = importlib.util.spec_from_file_location("conftest_of_gpu", path)
    assert spec is not None and spec.loader is not None
    conftest = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conftest)
    cuda, _, torch, cupy = frameworks()
    monkeypatch.setattr(conftest, "torch", torch)
    monkeypatch.setattr(conftest, "cupy", cupy)
    monkeypatch.setattr(conftest, "_shares", shares(tmp_path, monkeypatch))
    ran: list[Any] = []

    def test(**arguments: Any) -> None:
        ran.append((arguments, cuda.fractions[-1]))
        if len(ran) > 1:
            raise OutOfMemoryError("no")

    item = SimpleNamespace(
        obj=test, funcargs={"a": 1, "of a fixture": 2}, _fixtureinfo=SimpleNamespace(argnames=("a",))
    )

    def outcome(error: Exception) -> Any:
        hook = conftest.pytest_pyfunc_call(item)
        next(hook)
        try:
            hook.throw(error)
        except StopIteration as end:
            return end.value

    for error in (AssertionError(), RuntimeError("CUDA error")):
        with pytest.raises(type(error)):
            outcome(error)
    assert not ran
    assert outcome(OutOfMemoryError("no")) is True
    assert ran == [({"a": 1}, SMALL / 15 + LARGE)] and cuda.fractions[-1] == SMALL / 15
    with pytest.raises(OutOfMemoryError):  # of the second time
        outcome(OutOfMemoryError("no"))
    assert len(ran) == 2
