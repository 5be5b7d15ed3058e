"""vLLM and SGLang with rawmla in them, end to end on one GPU: correctness, host time and speed.

    python scripts/engines run WAVE,WAVE --folder F --seconds S    serve, under a time limit; resumable
    python scripts/engines report F/results.jsonl                  tables; --write: into docs/engines.md

`models` makes small models with random weights, `prompts` their prompts, `waves` lists the jobs. `drive` runs
each job in a process of its own: `serve` starts one engine and does the tasks, SGLang by `sglang_engine`;
`alone` runs FlashMLA's kernel without an engine. `oracle` scores the chosen tokens with transformers in
float32. Of the tasks, `bits` finds the module where a prompt's bits differ, `host` measures host time,
`traces` GPU time. `record` reads and writes the results.

The engine and transformers have to be importable; rawmla is this checkout's. docs/engines.md has the results.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
