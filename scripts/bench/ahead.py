"""Compiling ahead what only a call compiles: the functions of flex cases, and FlashAttention-4's kernels.

Processes side by side make the calls once, before anything is timed, and leave what they compiled in the
caches on disk: rawmla's, torch's, Triton's and FlashAttention-4's. One after the other, in the process that
times, compiling would take longer than timing.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from . import ROOT, families
from .cases import Case, one_line

SETTINGS = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1"}
"""Else torch would start as many processes as there are cores for each of ours, which stay while it times;
and FlashAttention-4 would compile anew in each process."""

PROCESSES = 16


@contextmanager
def compiled_ahead(chosen: Sequence[Case]) -> Iterator[None]:
    """Compile beside what the block does, and then to the end. It is worth it from two cases on."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    names = [case.id for case in chosen if families.family_of(case.id).rounds > 1]
    count = min(len(names), os.cpu_count() or 1, PROCESSES) if len(names) > 1 else 0
    path = os.pathsep.join([str(ROOT / "scripts"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    begin = time.monotonic()
    processes = [
        subprocess.Popen([sys.executable, "-m", "bench.ahead", *names[one::count]], env=environment)
        for one in range(count)
    ]
    try:
        yield
        for process in processes:
            process.wait()
        print(f"compiled ahead: {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def compile_cases(names: Sequence[str]) -> None:
    """Make the calls of these cases once, and those of what runs beside them. What fails is one line: it
    fails again when the case is timed, and is reported then.
    """
    for name in names:
        try:
            for make in families.table()[name][1].prepare().peers.values():
                try:
                    make()(0)
                except ImportError:
                    continue
        except Exception as error:
            print(f"not compiled ahead: {name}: {one_line(error)}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    compile_cases(sys.argv[1:])
