"""Dense attention: the same call gives the same bits, and a request's do not depend on its company.

The repeats are 1,000 for every case.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from gpu_support import assert_same_bits, bits, torch
from mha_calls import attend

import rawmla
from kit.mha import MhaCase, MhaInputs, check_mha, make_mha_inputs

REPEATS = 1000
TOGETHER = 10  # calls in flight between two comparisons

SIZES = ((1, 239), (239, 1), (3, 799), (799, 3), (1024, 128), (97, 97), (257, 257), (2048, 2048))


def assert_repeats(inputs: MhaInputs) -> None:
    """Raise unless all repeats give the bits of the first call, which are compared on the device."""
    first = attend(inputs)
    check_mha(inputs, first)
    wanted = [bits(x) for x in first]
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(REPEATS // TOGETHER):
        for results in [attend(inputs) for _ in range(TOGETHER)]:
            for one, want in zip(results, wanted, strict=True):
                different += (bits(one) != want).any()
    assert int(different) == 0, f"{inputs.case.id}: {int(different)} of {2 * REPEATS} results differ"


@pytest.mark.unpoisoned
@pytest.mark.parametrize("causal", (False, True), ids=("full", "causal"))
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_repeats(sizes: tuple[int, int], causal: bool) -> None:
    """Without poison, whose fills would keep the launches from overlapping."""
    s_q, s_k = sizes
    assert_repeats(make_mha_inputs(MhaCase(b=60, s_q=s_q, s_k=s_k, h_kv=4, d_qk=64, d_v=64, causal=causal)))


@pytest.mark.unpoisoned
@pytest.mark.parametrize(
    "case",
    (
        MhaCase(b=60, s_q=257, s_k=257, h_kv=1, causal=True),
        MhaCase(b=60, s_q=3, s_k=799, h_kv=1),
        MhaCase(b=60, s_q=97, s_k=300, d_qk=192, sink="float32", causal=True),
        MhaCase(b=60, s_q=257, s_k=97, d_qk=256, d_v=256),
        MhaCase(b=60, s_q=257, s_k=257, window=(50, 3), softcap=15.0, alibi="requests", dtype="float16"),
        MhaCase(
            q_lengths=(1, 400, 0, 33, 64, 130) * 10, k_lengths=(300, 401, 90, 0, 64, 17) * 10, causal=True
        ),
    ),
    ids=lambda case: case.id,
)
def test_repeats_of_other_kernels(case: MhaCase) -> None:
    """Groups of heads, other tiles, flags, and segments, whose tiles are given out by a counter."""
    assert_repeats(make_mha_inputs(case))


COMPANY: tuple[dict[str, Any], ...] = (
    {"causal": True},
    {"h_q": 8, "h_kv": 1, "sink": "bfloat16"},
    {"window": (70, 5)},
    {"d_qk": 64, "d_v": 64, "causal": True, "dtype": "float16"},
    {"d_qk": 192, "softcap": 15.0},
)


@pytest.mark.parametrize("options", COMPANY, ids=str)
def test_requests_in_other_company(options: dict[str, Any]) -> None:
    """Alone, reversed, doubled, in part: with the same max_seqlen, each request keeps its bits."""
    q_lengths, k_lengths = (300, 1, 0, 77, 130, 64, 257), (257, 90, 33, 0, 131, 513, 400)
    inputs = make_mha_inputs(MhaCase(q_lengths=q_lengths, k_lengths=k_lengths, **options))
    whole = attend(inputs)
    check_mha(inputs, whole)

    def tokens(array: Any, lengths: tuple[int, ...], request: int) -> Any:
        start = sum(lengths[:request])
        return array[start : start + lengths[request]]

    draw = random.Random(1)
    batches = [[r] for r in range(7)] + [list(range(6, -1, -1)), [4, 4, 4, 0], [2, 3, 2], [6, 1]]
    batches += [draw.choices(range(7), k=n) for n in (2, 5, 40)]
    for requests in batches:

        def chosen(array: Any, lengths: tuple[int, ...], requests: list[int] = requests) -> Any:
            return torch.cat([tokens(array, lengths, r) for r in requests])

        def bounds(lengths: tuple[int, ...], requests: list[int] = requests) -> Any:
            ends = torch.tensor([0, *(lengths[r] for r in requests)]).cumsum(0)
            return ends.to(torch.int32).cuda()

        got = rawmla.flash_attn_varlen_func(
            chosen(inputs.q, q_lengths), chosen(inputs.k, k_lengths), chosen(inputs.v, k_lengths),
            bounds(q_lengths), bounds(k_lengths), max(q_lengths), max(k_lengths), **inputs.options(),
        )  # fmt: skip
        for name, one, all_rows in zip(("out", "lse"), got, whole, strict=True):
            want = torch.cat([tokens(all_rows, q_lengths, r) for r in requests])
            assert_same_bits(f"{name} of requests {requests}", one, want)


@pytest.mark.parametrize("options", COMPANY, ids=str)
def test_requests_of_a_batch(options: dict[str, Any]) -> None:
    """Each request of a batch of equal ones alone, and the heads of one KV head alone."""
    inputs = make_mha_inputs(MhaCase(b=5, s_q=200, s_k=333, **options))
    case = inputs.case
    out, lse = attend(inputs)
    for r in (0, 3, 4):
        alone = replace(inputs, q=inputs.q[r : r + 1], k=inputs.k[r : r + 1], v=inputs.v[r : r + 1])
        got = attend(alone)
        assert_same_bits(f"out of request {r}", got[0][0], out[r])
        assert_same_bits(f"lse of request {r}", got[1][0], lse[r])
    group = case.h_q // case.h_kv
    last = slice(case.h_q - group, None)
    sink = None if inputs.attn_sink is None else inputs.attn_sink[last]
    alone = replace(
        inputs, q=inputs.q[:, :, last], k=inputs.k[:, :, -1:], v=inputs.v[:, :, -1:], attn_sink=sink
    )
    got = attend(alone)
    assert_same_bits("out of the last heads", got[0], out[:, :, last])
    assert_same_bits("lse of the last heads", got[1], lse[:, last])
