"""How the processes of pytest-xdist share a GPU's memory.

Each has a small share, which most tests are far from needing. A test that runs out of it waits for one of a
few large shares, which are for all processes together, and runs again. So no test has to say what it needs,
and no more of those that need much run at once than there is memory for.
"""

from __future__ import annotations

import gc
import os
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import AcquireReturnProxy, FileLock, Timeout

SMALL = 0.6
"""Of the memory, for the small shares of all processes. What neither these nor the large ones take is for
CUDA contexts, CuPy and the programs that tests start.
"""
LARGE = 0.15
"""Of the memory, for a large share, in addition to the small one of its process."""
LARGE_SHARES = 2
KEPT_BYTES = 1 << 30
"""What an allocator may keep of a test's memory for the next test."""
SECONDS_BETWEEN_TRIES = 0.05


def was_out_of_memory(error: BaseException) -> bool:
    """Whether torch or CuPy ran out of GPU memory, maybe as the cause of another error. The arrays that the
    failed functions held are freed then: pytest keeps the error for a while.
    """
    chain = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    if type(chain[-1]).__name__ != "OutOfMemoryError":  # of torch, and of CuPy
        return False
    for one in chain:
        traceback.clear_frames(one.__traceback__)
    return True


@dataclass(frozen=True)
class Shares:
    """The shares of a run with so many processes; `locks` names a file for each large share."""

    processes: int
    locks: tuple[Path, ...]

    @staticmethod
    def in_folder(folder: Path) -> Shares | None:
        """The run that this process is one of, with a folder that its processes have in common; None where it
        is alone.
        """
        processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
        if processes == 1:
            return None
        return Shares(processes, tuple(folder / f"large-share-{number}" for number in range(LARGE_SHARES)))

    def limit(self, torch: Any, more: float = 0.0) -> None:
        """Torch gives this process no more than its share, in which freed memory that it keeps counts too."""
        for device in range(torch.cuda.device_count()):
            torch.cuda.set_per_process_memory_fraction(SMALL / self.processes + more, device)

    def give_back(self, torch: Any, cupy: Any, kept: int = KEPT_BYTES) -> None:
        """Free what the allocators keep, if that is more than `kept` bytes."""
        if torch.cuda.memory_reserved() - torch.cuda.memory_allocated() > kept:
            torch.cuda.empty_cache()
        pool = cupy.get_default_memory_pool()
        if pool.free_bytes() > kept:
            pool.free_all_blocks()

    @contextmanager
    def large(self, torch: Any, cupy: Any) -> Iterator[None]:
        """Inside, this process has a large share. It waits for one without keeping memory of its own."""
        gc.collect()  # the failed test's arrays may be in cycles
        self.give_back(torch, cupy, 0)
        with self._lock():
            self.limit(torch, LARGE)
            try:
                yield
            finally:
                gc.collect()
                self.give_back(torch, cupy, 0)
                self.limit(torch)

    def _lock(self) -> AcquireReturnProxy:
        """Inside, this process alone has one of the files; the system frees it if the process ends."""
        while True:
            for path in self.locks:
                try:
                    return FileLock(path).acquire(timeout=0)
                except Timeout:
                    time.sleep(SECONDS_BETWEEN_TRIES)
