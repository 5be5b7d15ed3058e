"""Programs in processes that are forked from one that has torch."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import fresh


def test_what_a_program_sees(tmp_path: Path) -> None:
    """Its arguments, folder, environment and path are as if Python had started it."""
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "beside.py").write_text("text = 'found'\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import beside, os, sys\nprint(sys.argv, os.getcwd(), sys.path[:2], os.environ['ONLY'], __name__)\n"
        "print(sorted(m for m in sys.modules if m.startswith('rawmla')), sys.stdin.read(), file=sys.stderr)\n"
    )
    path = str(tmp_path / "path")
    for program, first in ((str(script),), str(tmp_path)), (("-c", script.read_text()), ""):
        answer = fresh.run((*program, "x"), tmp_path, {"PYTHONPATH": path, "ONLY": "1"})
        argv = [program[0], "x"]
        assert answer.stdout == f"{argv} {tmp_path} {[first, path]} 1 __main__\n", answer.stderr
        assert answer.stderr == "[] \n" and answer.returncode == 0


def test_how_a_program_ends(tmp_path: Path) -> None:
    """And nothing of one is left to the next."""
    assert fresh.run(("-c", "import sys; sys.kept = 1; sys.exit(7)"), tmp_path).returncode == 7
    answer = fresh.run(("-c", "import sys; print(hasattr(sys, 'kept')); raise KeyError('name')"), tmp_path)
    assert answer.returncode == 1 and answer.stdout == "False\n"
    assert answer.stderr.startswith("Traceback") and answer.stderr.endswith("KeyError: 'name'\n")
    answer = fresh.run(("-c", "import time; time.sleep(60)"), tmp_path, os.environ, timeout=1)
    assert answer.returncode == -signal.SIGALRM
