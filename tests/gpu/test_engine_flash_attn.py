"""What engines pass to FlashAttention, repeated with exactly their views (tests/contracts/flash_attn)."""

from __future__ import annotations

import pytest
from contract_calls import Recorded
from flash_attn_calls import LONGER_REQUESTS, Call, id_of, is_passed_on, of_longer_requests, recorded
from gpu_support import torch

CALLS = [record for record in recorded() if not is_passed_on(record)]


@pytest.mark.parametrize("record", CALLS, ids=map(id_of, CALLS))
def test_recorded_calls(record: Recorded) -> None:
    """Eager, then captured once and replayed with all values, lengths and tables changed in place."""
    call = Call(record, "cuda")
    call.check(call.run())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = call.run()
    for seed in (1, 2, 3):
        call.fill(seed)
        graph.replay()
        call.check(got)


@pytest.mark.parametrize("case", LONGER_REQUESTS)
def test_longer_requests_than_expected(case: str) -> None:
    """Eager, and in a graph."""
    call = of_longer_requests(case, "cuda")
    call.check(call.run())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = call.run()
    graph.replay()
    call.check(got)
