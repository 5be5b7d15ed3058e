"""The parts of scripts/bench.py, gpu_check.py and update_figures.py.

A checkout's scripts measure the checkout's code: the repository root comes first on the module search path,
whether or not a rawmla is installed. They share `tests/kit` with the tests, so `tests` is on the path too.
"""

import sys
from pathlib import Path

REPO_ROOT = Path(__file__).resolve().parents[2]

for folder in (REPO_ROOT / "tests", REPO_ROOT):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
