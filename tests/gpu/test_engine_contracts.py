"""What engines pass to FlashMLA, repeated with exactly their views (tests/contracts)."""

from __future__ import annotations

import pytest
from contract_calls import Call, Recorded, attention_calls, functions_of
from gpu_support import torch

CALLS = attention_calls()


@pytest.mark.parametrize("record", CALLS, ids=[record.id for record in CALLS])
def test_recorded_calls(record: Recorded) -> None:
    """Eager, then captured once and replayed with all values changed in place."""
    call = Call(record, functions_of(record), "cuda")
    call.check(call.run())
    plan = None if call.is_prefill else call.plan()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = call.run(plan)
    for seed in (1, 2, 3):
        call.fill(seed)
        if plan is not None:
            call.replan(plan)
        graph.replay()
        call.check(got)
