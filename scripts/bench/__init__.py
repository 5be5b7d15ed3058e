"""The benchmark, the record of GPU machines and the pages made of it.

    python scripts/bench ...                the benchmark: `run`
    python scripts/gpu_check.py ...         benchmark, tests and sanitizers into the record: `check`
    python scripts/update_figures.py ...    README and docs/performance.md from the record: `pages`

`families` has the names of all cases, from which they are made: `mla`, `dense`, `kvcache`, `prefix`, `flex`
and `around` have the kinds of cases, with counts, inputs, calls, checks and the libraries beside
(`flash_attention_3` is one). `measure` times a case by `timing`; `tables` shows the results. The checkout's
own rawmla is measured, whether or not another one is installed.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

for folder in (ROOT / "tests", ROOT):  # `kit` is in tests
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
