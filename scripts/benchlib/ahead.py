"""Compiling ahead what only a call compiles: the functions of flex cases, in rawmla and in torch.

A case takes a process, which leaves what it compiled in the caches on disk: rawmla's, torch's and Triton's.
All run side by side, before anything is timed; one after the other, in the process that times, it would take
several times as long.
"""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from . import families
from .flex_backward_cases import FlexBackwardCase
from .flex_cases import FlexCase
from .report import one_line

COMPILE_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"
"""Of torch: as many processes as there are cores would start for each of ours, and stay while it times."""


def begin(names: Sequence[str]) -> subprocess.Popen[bytes]:
    """A process that compiles what these cases need."""
    folder = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, "-m", "benchlib.ahead", *names],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )


class Ahead:
    """The processes of these cases, begun. It is worth it from two flex cases on."""

    def __init__(self, chosen: Sequence[families.Case]) -> None:
        os.environ.setdefault(COMPILE_THREADS, "1")
        names = [case.id for case in chosen if isinstance(case, FlexCase)]
        count = min(len(names), os.cpu_count() or 1) if len(names) > 1 else 0
        self._begin = time.monotonic()
        self._processes = [begin(names[number::count]) for number in range(count)]

    def wait(self) -> None:
        """Wait until they have ended, and say how long it took."""
        if not self._processes:
            return
        for process in self._processes:
            process.wait()
        seconds = time.monotonic() - self._begin
        print(f"compiled the functions of flex cases: {seconds:.0f} s", file=sys.stderr, flush=True)

    def stop(self) -> None:
        """End those that still run."""
        for process in self._processes:
            process.kill()
            process.wait()


def compile_cases(names: Sequence[str]) -> None:
    """Make the calls of these cases once, and those of what runs beside them. What fails is one line: it
    fails again when the case is timed, and is reported then.
    """
    from . import backward_peers, flex_backward_measure, flex_measure, peers

    for name in names:
        case = families.case_named(name)
        assert isinstance(case, FlexCase)
        try:
            if isinstance(case, FlexBackwardCase):
                inputs, beside = flex_backward_measure.prepare(case).inputs, backward_peers.FLEX
            else:
                inputs, beside = flex_measure.prepare(case).inputs, peers.FLEX
            for peer in beside if case.is_compared else ():
                try:
                    peer.calls(case, inputs)
                except ImportError:
                    continue
        except Exception as error:
            print(f"not compiled ahead: {name}: {one_line(error)}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    compile_cases(sys.argv[1:])
