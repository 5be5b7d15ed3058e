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


def medians(record_property: Any, calls: dict[str, Callable[[], Any]]) -> list[float]:
    """Median microseconds of 1,000 calls of each, in turns, after some that load kernels."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(1020):
        for name, call in calls.items():
            begin = time.perf_counter_ns()
            call()
            times[name].append((time.perf_counter_ns() - begin) / 1000)
        if turn % CALLS_IN_FLIGHT == 0:
            torch.cuda.synchronize()  # so that a full launch queue is not what is measured
    found = []
    for name, all_times in times.items():
        found.append(statistics.median(all_times[20:]))
        print(f"\nhost time, {name}: median {found[-1]:.1f}, fastest {min(all_times):.1f} us")
        record_property(name, found[-1])
    return found


@pytest.mark.parametrize("form", ("an object", "tensors"))
@pytest.mark.parametrize("s_k", (64, 8192), ids=("one_block", "split"))
def test_mla_decoding(s_k: int, form: str, record_property: Any) -> None:
    inputs = make_dense_inputs(DenseCase(b=1, h_q=16, s_k=s_k))
    planned = (inputs.cache_seqlens, 16, 1) if form == "tensors" else ()
    arguments = (*call_arguments(inputs), *rawmla.get_mla_metadata(*planned))
    name = f"flash_mla_with_kvcache, {s_k} tokens, plan of {form}"
    (own,) = medians(record_property, {name: lambda: rawmla.flash_mla_with_kvcache(*arguments)})
    assert own < LIMIT_US


@pytest.mark.parametrize("changes", ({}, {"new": 1, "rotary": 1.0}), ids=("decoding", "appending"))
def test_attention_over_caches(changes: dict[str, Any], record_property: Any) -> None:
    """By rawmla's own function, and by FlashAttention-2's."""
    given = kvcache_call(make_kvcache_inputs(KvCacheCase(**{**vars(DECODE), **changes}))).arguments
    name = "flash_attn_with_kvcache, " + ("appending" if changes else "decoding")
    calls = {
        name: lambda: rawmla.flash_attn_with_kvcache(**given),
        f"{name}, of the drop-in": lambda: fa2.flash_attn_with_kvcache(**given),
    }
    own, door = medians(record_property, calls)
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
    of_own, of_door = functions
    name = of_own.__name__
    calls = {name: lambda: of_own(*given), f"{name}, of the drop-in": lambda: of_door(*given)}
    own, door = medians(record_property, calls)
    assert door < own + DOOR_LIMIT_US
