"""python scripts/bench: see `run`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from bench import run

    sys.exit(run.main())
