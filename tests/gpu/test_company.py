"""The bits of a request, or of a KV head, do not depend on what else is in its call."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
from full_cases import full_unless
from gpu_support import assert_same_bits, bits, torch, without_splits

import rawmla
from kit import SparseCase, make_sparse_inputs
from kit.flex import FlexCase, check_flex, make_flex_inputs
from kit.mha import MhaCase, check_mha, make_mha_inputs
from kit.prefix import PrefixCase, PrefixInputs, check_prefix, make_prefix_inputs
from operations import dense, flex, prefix
from operations.mla_sparse import sparse_decode

DRAW = random.Random(1)
BATCHES = [[r] for r in range(7)] + [list(range(6, -1, -1)), [4, 4, 4, 0], [2, 3, 2], [6, 1]]
BATCHES += [DRAW.choices(range(7), k=n) for n in (2, 5, 40)]
"""Of seven requests."""


def tokens_of(array: Any, starts: list[int], requests: list[int]) -> Any:
    """The rows of these requests, in this order."""
    return None if array is None else torch.cat([array[starts[r] : starts[r + 1]] for r in requests])


def starts_of(starts: list[int], requests: list[int]) -> Any:
    """Where these requests begin in an array of their own."""
    lengths = [starts[r + 1] - starts[r] for r in requests]
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cuda")


# ---- dense attention

DENSE_CASES: tuple[dict[str, Any], ...] = (
    {"causal": True},
    {"h_q": 8, "h_kv": 1, "sink": "bfloat16"},
    {"window": (70, 5)},
    {"d_qk": 64, "d_v": 64, "causal": True, "dtype": "float16"},
    {"d_qk": 192, "softcap": 15.0},
)


@pytest.mark.parametrize("options", DENSE_CASES, ids=str)
def test_requests_of_dense_attention(options: dict[str, Any]) -> None:
    """Alone, reversed, doubled, in part: with the same max_seqlen, each request keeps its bits."""
    q_lengths, k_lengths = (300, 1, 0, 77, 130, 64, 257), (257, 90, 33, 0, 131, 513, 400)
    inputs = make_mha_inputs(MhaCase(q_lengths=q_lengths, k_lengths=k_lengths, **options))
    q_starts, k_starts = ([0, *accumulate(lengths)] for lengths in (q_lengths, k_lengths))
    whole = dense.attend(inputs)
    check_mha(inputs, whole)
    for requests in BATCHES:
        got = rawmla.flash_attn_varlen_func(
            tokens_of(inputs.q, q_starts, requests),
            tokens_of(inputs.k, k_starts, requests),
            tokens_of(inputs.v, k_starts, requests),
            starts_of(q_starts, requests),
            starts_of(k_starts, requests),
            max(q_lengths),
            max(k_lengths),
            **inputs.options(),
        )
        for name, one, rows in zip(("out", "lse"), got, whole, strict=True):
            assert_same_bits(f"{name} of requests {requests}", one, tokens_of(rows, q_starts, requests))


# ---- prefix prefill

MANY: dict[str, Any] = {
    "query_lengths": (100, 1, 0, 257, 16, 128, 300),
    "contexts": (333, 40, 100, 0, 1000, 512, 77),
}
PREFIX_CASES: tuple[dict[str, Any], ...] = (
    {},
    {"x": 16, "block_size": 12, "sinks": "bfloat16"},
    {"window": 70, "h_q": 8, "h_kv": 1},
    {"own_cached": True, "causal": False, "x": 16},
    {**prefix.FP8_KIND, "out_scale": 0.02},
)


def bytes_or_numbers(o: Any) -> Any:
    return o.view(torch.uint8) if o.element_size() == 1 else o


def requests_of(inputs: PrefixInputs, requests: list[int]) -> PrefixInputs:
    """A batch of these requests, in this order, over the same cache."""
    starts = inputs.b_start_loc.tolist()
    chosen = torch.tensor(requests, device=inputs.q.device)
    return replace(
        inputs,
        **{name: tokens_of(getattr(inputs, name), starts, requests) for name in "qkv"},
        b_loc=inputs.b_loc[chosen],
        b_start_loc=starts_of(starts, requests),
        b_seq_len=inputs.b_seq_len[chosen],
    )


@pytest.mark.parametrize("options", PREFIX_CASES, ids=str)
def test_requests_of_prefix_prefill(options: dict[str, Any]) -> None:
    """Alone, reversed, doubled, in part: unless keys are split, each request keeps its bits."""
    inputs = make_prefix_inputs(PrefixCase(**MANY, **options))
    starts = inputs.b_start_loc.tolist()
    with without_splits():
        whole = prefix.attend(inputs)
        check_prefix(inputs, whole)
        for requests in BATCHES:
            got = prefix.attend(requests_of(inputs, requests))
            want = tokens_of(bytes_or_numbers(whole), starts, requests)
            assert_same_bits(f"requests {requests}", bytes_or_numbers(got), want)


# ---- flex attention


@pytest.mark.parametrize(
    "case",
    (
        FlexCase(b=5, s_q=200, s_k=333, h_q=8, h_kv=2, mask="causal"),
        FlexCase(b=5, s_q=200, s_k=333, h_q=8, h_kv=8, mask="window", score="absolute", block=(64, 64)),
        FlexCase(b=5, s_q=200, s_k=333, h_q=8, h_kv=1, score="twice", d_qk=128, d_v=128, dtype="float16"),
    ),
    ids=lambda case: case.id,
)
def test_requests_of_flex_attention(case: FlexCase) -> None:
    """A request alone, a batch in another order, and the heads of one KV head alone."""
    inputs = make_flex_inputs(case)
    whole = flex.attend(inputs)
    check_flex(inputs, whole)
    for requests in ([0], [3], [4, 2, 0, 1, 3], [1, 1]):
        some = replace(inputs, **{name: getattr(inputs, name)[requests] for name in "qkv"})
        flex.assert_same_results(str(requests), flex.attend(some)[:2], [x[requests] for x in whole[:2]])
    group = case.h_q // case.h_kv
    last = slice(case.h_q - group, None)
    alone = replace(inputs, q=inputs.q[:, last], k=inputs.k[:, -1:], v=inputs.v[:, -1:])
    got = flex.attend(alone, enable_gqa=group > 1)
    flex.assert_same_results("the last heads", got[:2], [x[:, last] for x in whole[:2]])


@pytest.mark.parametrize("score", full_unless(bool, ("", "alibi table")))
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
    one, other = (flex.attend(inputs, block_mask=mask, max_scores=True) for mask in masks)
    assert not torch.equal(bits(one[0][:, :, changed]), bits(other[0][:, :, changed]))
    for name, got, want in zip(("out", "lse", "max_scores"), other, one, strict=True):
        assert_same_bits(name, got[:, :, ~changed], want[:, :, ~changed])


# ---- MLA


@pytest.mark.parametrize("layout", ("v32", "model1"))
def test_batch_invariance_of_query_tokens(layout: str) -> None:
    """A plan has fewer parts for more query tokens; the splits of a request stay the same."""
    case = SparseCase(b=6, s_q=4, h_q=64, s_k=3000, topk=2048, lengths="random", layout=layout)
    inputs = make_sparse_inputs(case)
    want_out, want_lse = sparse_decode(inputs, enable_batch_invariant=True)
    for token in range(4):
        one = slice(token, token + 1)
        alone = replace(inputs, case=replace(case, s_q=1), q=inputs.q[:, one], indices=inputs.indices[:, one])
        out, lse = sparse_decode(alone, enable_batch_invariant=True)
        assert_same_bits(f"out of token {token}", out, want_out[:, one])
        assert_same_bits(f"lse of token {token}", lse, want_lse[:, :, one])
