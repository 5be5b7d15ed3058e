"""Prefix prefill: the same call gives the same bits, and a request's do not depend on its company."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from gpu_support import assert_same_bits, bits, torch, without_splits
from prefix_calls import Target, attend

from kit.prefix import PrefixCase, PrefixInputs, check_prefix, make_prefix_inputs, written_rows

REPEATS = 200
TOGETHER = 10  # calls in flight between two comparisons

SOURCES: dict[str, dict[str, Any]] = {
    "by TMA": {},
    "gathered": {"x": 16},
    "fp8": {"kv_cache_dtype": "fp8_e4m3", "x": 16, "bytes_dtype": "uint8"},
}
MANY: dict[str, Any] = {
    "query_lengths": (100, 1, 0, 257, 16, 128, 300),
    "contexts": (333, 40, 100, 0, 1000, 512, 77),
}


def bytes_or_numbers(o: Any) -> Any:
    return o.view(torch.uint8) if o.element_size() == 1 else o


def assert_repeats(inputs: PrefixInputs) -> None:
    """Raise unless all repeats give the bits of the first call, which are compared on the device.

    The calls in flight together have outputs of their own, which are NaN before.
    """
    targets = [Target(inputs, apart=False).o for _ in range(TOGETHER)]
    first = attend(inputs)
    check_prefix(inputs, first)
    wanted = bits(bytes_or_numbers(first))
    different = torch.zeros((), dtype=torch.int64, device=first.device)
    for _ in range(REPEATS // TOGETHER):
        for o in targets:
            attend(inputs, o)
        for o in targets:
            different += (bits(bytes_or_numbers(o)) != wanted).any()
            bytes_or_numbers(o).view(torch.uint8).fill_(0xFF)
    assert int(different) == 0, f"{inputs.case.id}: {int(different)} of {REPEATS} results differ"


@pytest.mark.unpoisoned
@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES.keys())
def test_many_tiles_of_a_cta(source: dict[str, Any]) -> None:
    """A CTA takes many tiles, one after the other, of requests that all have a long context."""
    assert_repeats(make_prefix_inputs(PrefixCase((1024,) * 8, (2048,) * 8, h_q=32, h_kv=8, **source)))


@pytest.mark.unpoisoned
@pytest.mark.parametrize(
    "case",
    (
        PrefixCase(**MANY, h_q=32, h_kv=8),
        PrefixCase(**MANY, h_q=32, h_kv=8, x=16, table="pointers"),
        PrefixCase(**MANY, h_q=32, h_kv=8, window=100, sinks="float32"),
        PrefixCase(**MANY, h_q=32, h_kv=8, window=100, x=16, block_size=7, own_cached=True),
        PrefixCase(**MANY, h_q=32, h_kv=8, block_size=544, causal=False),
        PrefixCase(**MANY, h_q=32, h_kv=8, out_scale=0.02, bytes_dtype="uint8", **SOURCES["by TMA"]),
        PrefixCase(**MANY, h_q=32, h_kv=32, **SOURCES["fp8"], out_scale=0.02),
        PrefixCase((1,) * 300, (200, 30, 0) * 100, h_q=32, h_kv=4),
        PrefixCase((1,) * 300, (200, 30, 0) * 100, h_q=32, h_kv=4, x=16),
        PrefixCase(**MANY, h_q=32, h_kv=8, d=256),
        PrefixCase(**MANY, h_q=32, h_kv=8, d=256, x=16),
    ),
    ids=lambda case: case.id,
)
def test_repeats(case: PrefixCase) -> None:
    """Without poison, whose fills would keep the launches from overlapping."""
    assert_repeats(make_prefix_inputs(case))


COMPANY: tuple[dict[str, Any], ...] = (
    {},
    {"x": 16, "block_size": 12, "sinks": "bfloat16"},
    {"window": 70, "h_q": 8, "h_kv": 1},
    {"own_cached": True, "causal": False, "x": 16},
    {**SOURCES["fp8"], "out_scale": 0.02},
)


def requests_of(inputs: PrefixInputs, requests: list[int]) -> PrefixInputs:
    """A batch of these requests, in this order, over the same cache."""
    starts = inputs.b_start_loc.tolist()
    lengths = [starts[r + 1] - starts[r] for r in requests]

    def rows(array: Any) -> Any:
        return None if array is None else torch.cat([array[starts[r] : starts[r + 1]] for r in requests])

    device = inputs.q.device
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(device)
    chosen = torch.tensor(requests, device=device)
    return replace(
        inputs, q=rows(inputs.q), k=rows(inputs.k), v=rows(inputs.v), b_loc=inputs.b_loc[chosen],
        b_start_loc=ends, b_seq_len=inputs.b_seq_len[chosen],
    )  # fmt: skip


@pytest.mark.parametrize("options", COMPANY, ids=str)
def test_requests_in_other_company(options: dict[str, Any]) -> None:
    """Alone, reversed, doubled, in part: unless keys are split, each request keeps its bits."""
    inputs = make_prefix_inputs(PrefixCase(**MANY, **options))
    starts = inputs.b_start_loc.tolist()
    draw = random.Random(1)
    batches = [[r] for r in range(7)] + [list(range(6, -1, -1)), [4, 4, 4, 0], [2, 3, 2], [6, 1]]
    batches += [draw.choices(range(7), k=n) for n in (2, 5, 40)]
    with without_splits():
        whole = attend(inputs)
        check_prefix(inputs, whole)
        whole = bytes_or_numbers(whole)
        for requests in batches:
            got = attend(requests_of(inputs, requests))
            want = torch.cat([whole[starts[r] : starts[r + 1]] for r in requests])
            assert_same_bits(f"requests {requests}", bytes_or_numbers(got), want)


@pytest.mark.parametrize("options", COMPANY, ids=str)
def test_heads_of_one_kv_head(options: dict[str, Any]) -> None:
    """Alone, in the same cache, unless keys are split."""
    inputs = make_prefix_inputs(PrefixCase(**MANY, **{**options, "h_q": 8, "h_kv": 2}))
    rows = written_rows(inputs)

    def part(array: Any, heads: slice) -> Any:
        return None if array is None else array[:, heads]

    with without_splits():
        whole = bytes_or_numbers(attend(inputs))
        for kv_head in range(2):
            heads, kv = slice(4 * kv_head, 4 * kv_head + 4), slice(kv_head, kv_head + 1)
            alone = replace(
                inputs,
                q=inputs.q[:, heads],
                k=part(inputs.k, kv),
                v=part(inputs.v, kv),
                k_cache=inputs.k_cache[:, kv],
                v_cache=inputs.v_cache[:, kv],
                sinks=None if inputs.sinks is None else inputs.sinks[heads],
            )
            got = bytes_or_numbers(attend(alone))
            assert_same_bits(f"heads of KV head {kv_head}", got[rows], whole[:, heads][rows])
