"""Prefix prefill on its matrix, by draws that are always the same.

The cases of one kernel are one test. Cached memory of no token is NaN, as are the rows of no request, and
entries of pages that no query sees are garbage.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from full_cases import full_unless
from gpu_support import torch

from kit.mha import LEAST, worst_row
from kit.prefix import PrefixCase, make_prefix_inputs, reference, written_rows
from operations.prefix import Target, attend, run_cases

PAST_ALL = 5000  # a window of more than any context
VALUES: dict[str, tuple[Any, ...]] = {
    "d": (24, 80, 96, 128, 192, 256),
    "dtype": ("bfloat16", "float16"),
    "cache": ("auto", "fp8_e4m3", "fp8_e5m2"),
    "x": (8, 16),
    "block_size": (1, 16, 32, 544),
    "heads": ((64, 64), (64, 8), (64, 1), (32, 8)),
    "window": (0, 1, 16, 128, 2048, PAST_ALL),
    "sinks": (None, "float32", "bfloat16", "float16", "infinite"),
    "alibi": (False, True),
    "skip_decode": (False, True),
    "causal": (True, False),
    "own_cached": (False, True),
    "pack": (0, 4, 16),
    "table": ("int32", "int64", "pointers"),
    "padded": (False, True),
    "layout": ("plain", "slice", "heads"),
    "device_scales": (False, True),
    "bytes_dtype": ("float8", "uint8", "int8"),
}
BY_TMA, GATHERED = "by TMA", "gathered"
# What chooses a kernel: padded d, source of the pages, what the cache holds, and float16, a window, ALiBi, an
# FP8 output.
VARIANTS = tuple(
    (padded, source, cache, *(flag == "1" for flag in flags))
    for padded, all_flags in (
        (32, "0000 1101 0111 1010"),
        (96, "1011 0110 1000 0101"),
        (128, "0101 1010 0010 1111"),
        (192, "1110 0001 1101 0000"),
        (256, "0011 1100 0101 1001"),
    )
    for (source, cache), flags in zip(
        ((BY_TMA, "auto"), (GATHERED, "auto"), (GATHERED, "fp8_e4m3"), (GATHERED, "fp8_e5m2")),
        all_flags.split(),
        strict=True,
    )
)


def is_allowed(values: dict[str, Any]) -> bool:
    """Whether a call can have these values."""
    return not (
        (values["d"] == 24 and values["x"] == 16)
        or (values["alibi"] and not values["causal"])
        or (values["block_size"] == 1 and values["pack"])
    )


def is_by_tma(values: dict[str, Any]) -> bool:
    """Whether TMA reads the pages."""
    return (
        values["cache"] == "auto"
        and values["x"] == 8
        and values["block_size"] % 16 == 0
        and values["pack"] in (0, values["block_size"])
    )


def case_of(variant: tuple[Any, ...], number: int) -> PrefixCase:
    """A case that the kernel takes: ten requests, one of them with a single token and one with none."""
    padded, source, cache, is_half, has_window, alibi, fp8_out = variant
    draw = random.Random(f"{variant} {number}")
    while True:
        values = {name: draw.choice(some) for name, some in VALUES.items()}
        values |= {
            "d": draw.choice([d for d in VALUES["d"] if -(-d // 32) * 32 == padded]),
            "dtype": "float16" if is_half else "bfloat16",
            "cache": cache,
            "window": draw.choice(VALUES["window"][1:]) if has_window else 0,
            "alibi": alibi,
        }
        if is_allowed(values) and is_by_tma(values) == (source == BY_TMA):
            break
    query_lengths = [draw.randint(16, 1024) for _ in range(8)] + [0, 1]
    contexts = [draw.randint(0, 1024) for _ in range(9)] + [0]
    draw.shuffle(query_lengths)
    draw.shuffle(contexts)
    h_q, h_kv = values.pop("heads")
    return PrefixCase(
        query_lengths=tuple(query_lengths),
        contexts=tuple(contexts),
        rows_around=3,
        h_q=h_q,
        h_kv=h_kv,
        kv_cache_dtype=values.pop("cache"),
        k_scale=0.7,
        v_scale=1.3,
        out_scale=0.02 if fp8_out else None,
        seed=number,
        **values,
    )


def name_of(variant: tuple[Any, ...]) -> str:
    """For a test's id."""
    padded, source, cache, is_half, *flags = variant
    names = [name for name, on in zip(("window", "alibi", "fp8 out"), flags, strict=True) if on]
    return "-".join([str(padded), source, cache, "float16" if is_half else "bfloat16", *names])


@pytest.mark.parametrize(
    "variant", full_unless(lambda variant: variant in VARIANTS[::5], VARIANTS), ids=name_of
)
def test_prefix_matrix(variant: tuple[Any, ...]) -> None:
    run_cases([case_of(variant, number) for number in range(10)])


# ---- small numbers


@pytest.mark.parametrize("cache", VALUES["cache"])
@pytest.mark.parametrize("heads", full_unless(lambda heads: heads == (64, 8), VALUES["heads"]), ids=str)
def test_small_numbers(heads: tuple[int, int], cache: str) -> None:
    """vLLM's inputs, up to 1e-3 in float16, with its bounds and within rounding of each row. FP8 caches have
    scales that spread their numbers over the codes.
    """
    draw = random.Random(f"{heads} {cache}")
    for window, block_size, alibi in (
        (0, 32, False),
        (0, 544, False),
        (16, 32, False),
        (2048, 544, False),
        (0, 32, True),
    ):
        case = PrefixCase(
            query_lengths=(*[draw.randint(16, 1024) for _ in range(8)], 1, 0),
            contexts=(0, *[draw.randint(1, 1024) for _ in range(9)]),
            h_q=heads[0], h_kv=heads[1], dtype="float16", kv_cache_dtype=cache, block_size=block_size,
            window=window, alibi=alibi, uniform=1e-3, k_scale=1e-5, v_scale=1e-5,
        )  # fmt: skip
        inputs = make_prefix_inputs(case)
        target = Target(inputs)
        attend(inputs, target.o)
        rows = written_rows(inputs)
        got, want = target.o[rows], reference(inputs)[rows]
        assert bool(got.isfinite().all())
        worst = float((got.double() - want).abs().max())
        assert worst <= (1e-6 if alibi else 1e-4 if cache == "auto" else 1e-3), (case.id, worst)
        assert worst_row(got, want, 1.25 * 2.0**-11, LEAST["float16"]) <= 1, case.id
        target.assert_untouched_around()
        torch.cuda.synchronize()
