"""The parts of scripts/bench.py, gpu_check.py and update_figures.py.

A checkout's scripts measure the checkout's code: the repository root comes first on the module search path,
whether or not a rawmla is installed.
"""

import sys
from pathlib import Path

REPO_ROOT = Path(__file__).resolve().parents[2]

if str(REPO_ROOT) not in sys.path:
    sys.path.insert(0, str(REPO_ROOT))
