"""Host time of warm calls, with their plan given where there is one. This test runs by itself.

The target is 20 us, and 2 us more by FlashAttention's door; the limits leave room for slow hosts.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
from gpu_support import torch

import rawmla
from kit import DenseCase, make_dense_inputs
from kit.kvcache import KvCacheCase, make_kvcache_inputs
from operations.kvcache import kvcache_call
from operations.mla_decode import call_arguments
from rawmla.compat.flash_attn import fa2

LIMIT_US = 40.0
DOOR_LIMIT_US = 5.0
CALLS_IN_FLIGHT = 40
DECODE = KvCacheCase(lengths=(300,) * 4, h_q=32, h_kv=8, causal=True)

pytestmark = pytest.mark.unpoisoned


def times_of_calls(call: Callable[[], Any], count: int) -> list[float]:
    """Microseconds of each call."""
    times = []
    for turn in range(count):
        begin = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - begin) / 1000)
        if turn % CALLS_IN_FLIGHT == 0:
            torch.cuda.synchronize()  # so that a full launch queue is not what is measured
    return times


def median_of(name: str, call: Callable[[], Any], record_property: Any) -> float:
    """Median of 1,000 calls, after some that load kernels."""
    times_of_calls(call, 20)
    times = times_of_calls(call, 1000)
    median = statistics.median(times)
    print(f"\nhost time, {name}: median {median:.1f}, fastest {min(times):.1f} us")
    record_property("median_us", median)
    return median


@pytest.mark.parametrize("form", ("object", "tensors"))
@pytest.mark.parametrize("s_k", (64, 8192), ids=("one_block", "split"))
def test_mla_decoding(s_k: int, form: str, record_property: Any) -> None:
    inputs = make_dense_inputs(DenseCase(b=1, h_q=16, s_k=s_k))
    planned = (inputs.cache_seqlens, 16, 1) if form == "tensors" else ()
    arguments = (*call_arguments(inputs), *rawmla.get_mla_metadata(*planned))
    call = lambda: rawmla.flash_mla_with_kvcache(*arguments)  # noqa: E731
    assert median_of(f"s_k {s_k}, {form}", call, record_property) < LIMIT_US


@pytest.mark.parametrize("changes", ({}, {"new": 1, "rotary": 1.0}), ids=("decoding", "appending"))
def test_attention_over_caches(changes: dict[str, Any], record_property: Any) -> None:
    """By rawmla's own function, and by FlashAttention-2's."""
    given = kvcache_call(make_kvcache_inputs(KvCacheCase(**{**vars(DECODE), **changes}))).arguments
    own = median_of("kvcache", lambda: rawmla.flash_attn_with_kvcache(**given), record_property)
    door = median_of("door", lambda: fa2.flash_attn_with_kvcache(**given), record_property)
    assert own < LIMIT_US and door < own + DOOR_LIMIT_US


@pytest.mark.parametrize("varlen", (False, True), ids=("fixed", "varlen"))
def test_door_of_dense_attention(varlen: bool, record_property: Any) -> None:
    q = torch.randn(2, 64, 4, 64, dtype=torch.bfloat16, device="cuda")
    if varlen:
        starts = torch.tensor([0, 50, 128], dtype=torch.int32, device="cuda")
        given: tuple[Any, ...] = (*[q.flatten(0, 1)] * 3, starts, starts, 78, 78)
        functions = rawmla.flash_attn_varlen_func, fa2.flash_attn_varlen_func
    else:
        given, functions = (q, q, q), (rawmla.flash_attn_func, fa2.flash_attn_func)
    own, door = [
        median_of(name, lambda f=f: f(*given), record_property)
        for name, f in zip(("own", "door"), functions, strict=True)
    ]
    assert door < own + DOOR_LIMIT_US
