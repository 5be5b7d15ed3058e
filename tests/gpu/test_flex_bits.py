"""Flex attention: the same call gives the same bits, and a row's do not depend on its company."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from flex_calls import assert_same_results, attend
from gpu_support import assert_same_bits, bits, torch

import rawmla
from kit.flex import FlexCase, FlexInputs, check_flex, make_flex_inputs

REPEATS = 500
TOGETHER = 10  # calls in flight between two comparisons


def assert_repeats(inputs: FlexInputs, repeats: int = REPEATS) -> None:
    """Raise unless all repeats give the bits of the first call, which are compared on the device."""
    first = attend(inputs, max_scores=True)
    check_flex(inputs, first)
    wanted = [bits(x) for x in first]
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(repeats // TOGETHER):
        for results in [attend(inputs, max_scores=True) for _ in range(TOGETHER)]:
            for one, want in zip(results, wanted, strict=True):
                different += (bits(one) != want).any()
    assert int(different) == 0, f"{inputs.case.id}: {int(different)} of {3 * repeats} results differ"


@pytest.mark.unpoisoned
@pytest.mark.parametrize(
    "case",
    (
        FlexCase(b=20, s_q=257, s_k=257, mask="causal"),
        FlexCase(b=20, s_q=257, s_k=257, mask="causal", block=(64, 64)),
        FlexCase(b=20, s_q=1023, s_k=1025, mask="documents", score="alibi", d_qk=128, d_v=128),
        FlexCase(b=20, h_kv=1, s_q=97, s_k=300, mask="random", score="softcap", dtype="float16"),
        FlexCase(b=60, h_kv=1, s_q=3, s_k=799, score="bias h q k"),
        FlexCase(b=20, s_q=300, s_k=500, mask="per head", d_qk=256, d_v=256),
        FlexCase(b=20, b_kv=1, s_q=799, s_k=3, score="silu"),
    ),
    ids=lambda case: case.id,
)
def test_flex_repeats(case: FlexCase) -> None:
    """Without poison, whose fills would keep the launches from overlapping."""
    assert_repeats(make_flex_inputs(case))


@pytest.mark.parametrize("score", ("", "alibi table"))
@pytest.mark.parametrize("block", ((128, 128), (256, 128), (32, 32)), ids=str)
def test_two_masks_that_list_the_same_blocks(block: tuple[int, int], score: str) -> None:
    """Rows that both mask alike have the same bits, whatever the other rows see. The masks are one function,
    whose kernel takes one tile: another function may have a smaller one, and other bits.
    """
    inputs = make_flex_inputs(FlexCase(s_q=500, s_k=700, score=score))
    changed = (torch.arange(500, device="cuda") * 7) % 5 < 2
    hides = torch.randn(500, 700, device="cuda") > 0
    hides[:, ::50] = False  # so that no block is empty

    def hiding(hidden: Any) -> Any:
        def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
            return (k <= q + 150) & ((k % 50 == 0) | (k % 3 > 0)) & ~hidden[q, k]

        return mask

    masks = [
        rawmla.create_block_mask(mask, None, None, 500, 700, BLOCK_SIZE=block, separate_full_blocks=False)
        for mask in (hiding(torch.zeros_like(hides)), hiding(changed[:, None] & hides))
    ]
    assert torch.equal(masks[0].kv_num_blocks, masks[1].kv_num_blocks)
    assert torch.equal(masks[0].kv_indices, masks[1].kv_indices)
    one, other = (attend(inputs, block_mask=mask, max_scores=True) for mask in masks)
    assert not torch.equal(bits(one[0][:, :, changed]), bits(other[0][:, :, changed]))
    for name, got, want in zip(("out", "lse", "max_scores"), other, one, strict=True):
        assert_same_bits(name, got[:, :, ~changed], want[:, :, ~changed])


COMPANY = (
    FlexCase(b=5, s_q=200, s_k=333, h_q=8, h_kv=2, mask="causal"),
    FlexCase(b=5, s_q=200, s_k=333, h_q=8, h_kv=8, mask="window", score="absolute", block=(64, 64)),
    FlexCase(b=5, s_q=200, s_k=333, h_q=8, h_kv=1, score="twice", d_qk=128, d_v=128, dtype="float16"),
)


@pytest.mark.parametrize("case", COMPANY, ids=lambda case: case.id)
def test_flex_requests_in_other_company(case: FlexCase) -> None:
    """A request alone, a batch in another order, and the heads of one KV head alone."""
    inputs = make_flex_inputs(case)
    whole = attend(inputs)
    check_flex(inputs, whole)
    for requests in ([0], [3], [4, 2, 0, 1, 3], [1, 1]):
        some = replace(inputs, q=inputs.q[requests], k=inputs.k[requests], v=inputs.v[requests])
        assert_same_results(str(requests), attend(some)[:2], [x[requests] for x in whole[:2]])
    group = case.h_q // case.h_kv
    last = slice(case.h_q - group, None)
    alone = replace(inputs, q=inputs.q[:, last], k=inputs.k[:, -1:], v=inputs.v[:, -1:])
    got = attend(alone, enable_gqa=group > 1)
    assert_same_results("the last heads", got[:2], [x[:, last] for x in whole[:2]])


def test_rows_of_a_longer_call() -> None:
    """The first 128 query tokens alone; what they see is the same blocks."""
    inputs = make_flex_inputs(FlexCase(s_q=512, s_k=512, mask="causal", score="absolute"))
    whole = attend(inputs)
    case = replace(inputs.case, s_q=128, mask="")
    mask = rawmla.create_block_mask(lambda b, h, q, k: q >= k, None, None, 128, 512)
    some = replace(inputs, case=case, q=inputs.q[:, :, :128], mask=None, block_mask=None)
    got = attend(some, block_mask=mask)
    assert_same_results("the first rows", got[:2], [x[:, :, :128] for x in whole[:2]])
