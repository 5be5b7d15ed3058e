"""Small calls of prefix prefill that reach every role and path of its kernels: to run under
compute-sanitizer, as test_sparse_sanitizer.py. Inputs are made, and results compared, on the CPU.
"""

from dataclasses import replace
from typing import Any

import pytest
from prefix_calls import Target, attend, readdressed
from test_mha_sanitizer import on_gpu

from kit.prefix import PrefixCase, check_prefix, make_prefix_inputs

pytestmark = pytest.mark.sanitizer

FEW: dict[str, Any] = {"query_lengths": (5, 0, 1, 140), "contexts": (3, 7, 90, 270)}
# Windows that begin in the middle of a page, and contexts that end there: values are trimmed at both ends.
TRIMMED: dict[str, Any] = {"query_lengths": (20, 3), "contexts": (205, 43), "window": 37}
FP8: dict[str, Any] = {"kv_cache_dtype": "fp8_e4m3", "x": 16, "bytes_dtype": "uint8", "v_scale": 0.5}
CASES = (
    # by TMA
    PrefixCase((1,), (1,), h_q=1, h_kv=1),
    PrefixCase((1,), (0,), h_q=1, h_kv=1),
    PrefixCase(**FEW),
    PrefixCase(**FEW, rows_around=2, layout="slice", padded=True, block_size=48, sinks="infinite"),
    PrefixCase(**FEW, own_cached=True, causal=False, h_q=3, h_kv=1),
    PrefixCase((6, 4, 40), (-2, -4, -1), own_cached=True),
    PrefixCase(**FEW, skip_decode=True, table="pointers", h_q=8, h_kv=1),
    PrefixCase(**TRIMMED),
    PrefixCase(**TRIMMED, own_cached=True, padded=True),
    PrefixCase(**FEW, alibi=True, sinks="bfloat16", table="int64"),
    PrefixCase(**FEW, out_scale=0.02, rows_around=2, bytes_dtype="uint8"),
    PrefixCase(**FEW, d=256, h_q=2, h_kv=2),
    PrefixCase(**FEW, d=24, h_q=2, h_kv=2, dtype="float16"),
    # gathered
    PrefixCase((1,), (1,), h_q=1, h_kv=1, x=16),
    PrefixCase(**FEW, x=16, rows_around=2, layout="slice", padded=True, table="pointers"),
    PrefixCase(**FEW, block_size=1, own_cached=True, causal=False, h_q=3, h_kv=1),
    PrefixCase(**FEW, block_size=12, pack=4, skip_decode=True, sinks="float32"),
    PrefixCase((6, 4, 40), (-2, -4, -1), own_cached=True, x=16),
    PrefixCase(**TRIMMED, block_size=7),
    PrefixCase(**TRIMMED, x=16, own_cached=True, padded=True),
    PrefixCase(**FEW, d=256, h_q=2, h_kv=2, x=16),
    PrefixCase(**FEW, d=17, x=1, h_q=2, h_kv=2, padded=True),
    # FP8
    PrefixCase(**FEW, **FP8),
    PrefixCase(**FEW, **{**FP8, "x": 8}, block_size=1, table="int64", padded=True),
    PrefixCase(**TRIMMED, **FP8, device_scales=True),
    PrefixCase(**FEW, **FP8, own_cached=True, out_scale=0.02, device_scales=True, skip_decode=True),
    PrefixCase(**FEW, **{**FP8, "kv_cache_dtype": "fp8_e5m2"}, alibi=True, pack=8),
)


def check_small_call(case: PrefixCase) -> None:
    host = make_prefix_inputs(case, "cpu")
    device = on_gpu(host)
    device.b_loc = readdressed(replace(host, b_loc=device.b_loc), device.k_cache)
    target = Target(device)
    attend(device, target.o)
    check_prefix(host, target.o.cpu())
    target.assert_untouched_around()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_small_prefix_call(case: PrefixCase) -> None:
    check_small_call(case)


@pytest.mark.parametrize("source", ({}, {"x": 16}, FP8), ids=("by TMA", "gathered", "fp8"))
def test_more_tiles_than_sms(source: dict[str, Any]) -> None:
    """Tiles that a CTA takes one after the other, from the counter."""
    check_small_call(PrefixCase((5, 1, 3) * 50, (40, 0, 130) * 50, h_q=1, h_kv=1, **source))
