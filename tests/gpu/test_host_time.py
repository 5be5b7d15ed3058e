"""Host time of a warm decode call with its plan given, and what the names of FlashMLA add to it.

The target is 20 us; the limit of the test leaves room for slow hosts. These tests run by themselves.
"""

import statistics
import time
from typing import Any

import pytest
from gpu_support import call_arguments, torch

import rawmla
from kit import DenseCase, make_dense_inputs

LIMIT_US = 40.0
OVERHEAD_US = 2.0
CALLS = 1000
CALLS_IN_FLIGHT = 50


@pytest.mark.unpoisoned
@pytest.mark.parametrize("form", ("object", "tensors"))
@pytest.mark.parametrize("s_k", (64, 8192), ids=("one_block", "split"))
def test_host_time(s_k: int, form: str, record_property: pytest.FixtureRequest) -> None:
    inputs = make_dense_inputs(DenseCase(b=1, h_q=16, s_k=s_k))
    arguments = call_arguments(inputs)
    metadata, num_splits = rawmla.get_mla_metadata(
        *((inputs.cache_seqlens, 16, 1) if form == "tensors" else ())
    )
    for _ in range(20):
        rawmla.flash_mla_with_kvcache(*arguments, metadata, num_splits)
    torch.cuda.synchronize()
    times = []
    for index in range(CALLS):
        begin = time.perf_counter_ns()
        rawmla.flash_mla_with_kvcache(*arguments, metadata, num_splits)
        times.append(time.perf_counter_ns() - begin)
        if index % CALLS_IN_FLIGHT == CALLS_IN_FLIGHT - 1:
            torch.cuda.synchronize()  # so that a full launch queue is not what is measured
    median = statistics.median(times) / 1000
    fastest = min(times) / 1000
    print(
        f"\nhost time of a decode call, s_k {s_k}, {form}: median {median:.1f} us, fastest {fastest:.1f} us"
    )
    record_property("median_us", median)
    assert median < LIMIT_US


@pytest.mark.unpoisoned
def test_overhead(flash_mla: Any) -> None:
    """Host time of a call through the module beyond that of rawmla's own function."""
    inputs = make_dense_inputs(DenseCase(b=2, h_q=16, s_k=300))
    plan, _ = rawmla.get_mla_metadata()

    calls = (flash_mla.flash_mla_with_kvcache, rawmla.flash_mla_with_kvcache)
    arguments = (*call_arguments(inputs), plan)
    times: tuple[list[int], list[int]] = ([], [])
    for turn in range(4000):
        for call, column in zip(calls, times, strict=True):  # in turns, so that both see the same host
            start = time.perf_counter_ns()
            call(*arguments)
            column.append(time.perf_counter_ns() - start)
        if turn % 20 == 19:
            torch.cuda.synchronize()  # so that a full launch queue is not what is measured
    through, own = (statistics.median(column) / 1000 for column in times)
    assert through - own < OVERHEAD_US, f"{through:.2f} us and {own:.2f} us"
