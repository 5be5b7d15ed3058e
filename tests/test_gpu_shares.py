"""How the GPU tests' processes share the memory of a GPU, with an allocator that is made up."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from gpu_shares import KEPT_BYTES, LARGE, LARGE_SHARES, SMALL, Shares, was_out_of_memory


class OutOfMemoryError(RuntimeError):
    """As torch and CuPy call theirs."""


def frameworks() -> tuple[Any, Any]:
    """torch and CuPy, whose allocators keep exactly what they may."""
    torch, cupy = MagicMock(), MagicMock()
    torch.cuda.device_count.return_value = 1
    torch.cuda.memory_reserved.return_value, torch.cuda.memory_allocated.return_value = KEPT_BYTES + 5, 5
    cupy.get_default_memory_pool().free_bytes.return_value = KEPT_BYTES
    return torch, cupy


def test_large_shares_are_for_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait, and none keeps its share when it ends, whatever way."""
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "15")
    run = Shares.in_folder(tmp_path)
    assert run is not None
    inside: list[int] = []
    together = threading.Barrier(LARGE_SHARES, timeout=60)

    def process(number: int) -> None:
        torch, cupy = frameworks()
        run.give_back(torch, cupy)
        assert not torch.cuda.empty_cache.called and not cupy.get_default_memory_pool().free_all_blocks.called
        with pytest.raises(ZeroDivisionError), run.large(torch, cupy):
            assert torch.cuda.empty_cache.called and cupy.get_default_memory_pool().free_all_blocks.called
            inside.append(number)
            assert len(inside) <= LARGE_SHARES
            together.wait()
            inside.remove(number)
            raise ZeroDivisionError
        limits = [call.args for call in torch.cuda.set_per_process_memory_fraction.call_args_list]
        assert limits == [(SMALL / 15 + LARGE, 0), (SMALL / 15, 0)]
        ended.append(number)

    ended: list[int] = []
    threads = [threading.Thread(target=process, args=(number,)) for number in range(2 * LARGE_SHARES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ended) == len(threads)


def test_out_of_memory() -> None:
    """Also as a cause."""
    try:
        try:
            raise OutOfMemoryError("no")
        except OutOfMemoryError as error:
            raise RuntimeError("in a case") from error
    except RuntimeError as error:
        assert was_out_of_memory(error)
    assert not was_out_of_memory(RuntimeError("CUDA error"))
