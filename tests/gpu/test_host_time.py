"""Host time of a warm decode call with its plan given.

The target is 20 us; the limit of the test leaves room for slow hosts.
"""

import statistics
import time

import pytest
from gpu_support import call_arguments, torch

import rawmla
from rawmla.testing import DenseCase, make_dense_inputs

LIMIT_US = 40.0
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
