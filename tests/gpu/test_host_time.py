"""Host time of a warm decode call with its plan given. This test runs by itself.

The target is 20 us; the limit of the test leaves room for slow hosts.
"""

import statistics
import time
from typing import Any

import pytest
from gpu_support import torch

import rawmla
from kit import DenseCase, make_dense_inputs
from operations.mla_decode import call_arguments

LIMIT_US = 40.0
CALLS_IN_FLIGHT = 40


def times_of_calls(arguments: Any, count: int) -> list[float]:
    """Microseconds of each call."""
    times = []
    for turn in range(count):
        begin = time.perf_counter_ns()
        rawmla.flash_mla_with_kvcache(*arguments)
        times.append((time.perf_counter_ns() - begin) / 1000)
        if turn % CALLS_IN_FLIGHT == 0:
            torch.cuda.synchronize()  # so that a full launch queue is not what is measured
    return times


@pytest.mark.unpoisoned
@pytest.mark.parametrize("form", ("object", "tensors"))
@pytest.mark.parametrize("s_k", (64, 8192), ids=("one_block", "split"))
def test_host_time(s_k: int, form: str, record_property: Any) -> None:
    inputs = make_dense_inputs(DenseCase(b=1, h_q=16, s_k=s_k))
    planned = (inputs.cache_seqlens, 16, 1) if form == "tensors" else ()
    arguments = (*call_arguments(inputs), *rawmla.get_mla_metadata(*planned))
    times_of_calls(arguments, 20)
    times = times_of_calls(arguments, 1000)
    median = statistics.median(times)
    print(f"\nhost time, s_k {s_k}, {form}: median {median:.1f}, fastest {min(times):.1f} us")
    record_property("median_us", median)
    assert median < LIMIT_US
