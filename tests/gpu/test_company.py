"""What else the bits of attention do not depend on: a request's company, the heads beside it, what other rows
see. Batch invariance of planned calls is in test_bits.py.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from gpu_support import assert_same_bits, bits, torch, without_splits

import rawmla
from kit import DenseCase, SparseCase, make_dense_inputs, make_sparse_inputs
from kit.flex import FlexCase, check_flex, make_flex_inputs
from kit.generators import GARBAGE_PAGE
from kit.mha import MhaCase, check_mha, make_mha_inputs
from kit.prefix import PrefixCase, PrefixInputs, check_prefix, make_prefix_inputs, written_rows
from operations import dense, flex, prefix
from operations.mla_decode import DENSE_INVARIANT_CASES, decode
from operations.mla_sparse import sparse_check, sparse_decode, without_extra

Options = dict[str, Any]


def batches_of_seven() -> list[list[int]]:
    """Requests alone, reversed, doubled, in part."""
    draw = random.Random(1)
    batches = [[r] for r in range(7)] + [list(range(6, -1, -1)), [4, 4, 4, 0], [2, 3, 2], [6, 1]]
    return batches + [draw.choices(range(7), k=n) for n in (2, 5, 40)]


def rows_of(array: Any, bounds: Any, requests: list[int]) -> Any:
    """The rows of these requests, one after the other."""
    ends = bounds.tolist()
    return None if array is None else torch.cat([array[ends[r] : ends[r + 1]] for r in requests])


def bounds_of(bounds: Any, requests: list[int]) -> Any:
    """Where these requests begin and end, one after the other."""
    return torch.cat([bounds.new_zeros(1), bounds.diff()[requests].cumsum(0)]).int()


# ---- dense attention

DENSE_OPTIONS: tuple[Options, ...] = (
    {"causal": True},
    {"h_q": 8, "h_kv": 1, "sink": "bfloat16"},
    {"window": (70, 5)},
    {"d_qk": 64, "d_v": 64, "causal": True, "dtype": "float16"},
    {"d_qk": 192, "softcap": 15.0},
)


@pytest.mark.parametrize("options", DENSE_OPTIONS, ids=str)
def test_dense_requests_in_other_company(options: Options) -> None:
    """With the same max_seqlen, each request keeps its bits."""
    q_lengths, k_lengths = (300, 1, 0, 77, 130, 64, 257), (257, 90, 33, 0, 131, 513, 400)
    inputs = make_mha_inputs(MhaCase(q_lengths=q_lengths, k_lengths=k_lengths, **options))
    whole = dense.attend(inputs)
    check_mha(inputs, whole)
    cu_q, cu_k = inputs.cu_seqlens_q, inputs.cu_seqlens_k
    for requests in batches_of_seven():
        some = replace(
            inputs,
            q=rows_of(inputs.q, cu_q, requests),
            k=rows_of(inputs.k, cu_k, requests),
            v=rows_of(inputs.v, cu_k, requests),
            cu_seqlens_q=bounds_of(cu_q, requests),
            cu_seqlens_k=bounds_of(cu_k, requests),
        )
        for name, one, every in zip(("out", "lse"), dense.attend(some), whole, strict=True):
            assert_same_bits(f"{name} of requests {requests}", one, rows_of(every, cu_q, requests))


@pytest.mark.parametrize("options", DENSE_OPTIONS, ids=str)
def test_dense_requests_of_a_batch(options: Options) -> None:
    """Each request of a batch of equal ones alone, and the heads of one KV head alone."""
    inputs = make_mha_inputs(MhaCase(b=5, s_q=200, s_k=333, **options))
    case = inputs.case
    out, lse = dense.attend(inputs)
    for r in (0, 3, 4):
        alone = replace(inputs, q=inputs.q[r : r + 1], k=inputs.k[r : r + 1], v=inputs.v[r : r + 1])
        got = dense.attend(alone)
        assert_same_bits(f"out of request {r}", got[0][0], out[r])
        assert_same_bits(f"lse of request {r}", got[1][0], lse[r])
    last = slice(case.h_q - case.h_q // case.h_kv, None)
    sink = None if inputs.attn_sink is None else inputs.attn_sink[last]
    got = dense.attend(
        replace(inputs, q=inputs.q[:, :, last], k=inputs.k[:, :, -1:], v=inputs.v[:, :, -1:], attn_sink=sink)
    )
    assert_same_bits("out of the last heads", got[0], out[:, :, last])
    assert_same_bits("lse of the last heads", got[1], lse[:, last])


# ---- prefix prefill

MANY: Options = {
    "query_lengths": (100, 1, 0, 257, 16, 128, 300),
    "contexts": (333, 40, 100, 0, 1000, 512, 77),
}
PREFIX_OPTIONS: tuple[Options, ...] = (
    {},
    {"x": 16, "block_size": 12, "sinks": "bfloat16"},
    {"window": 70, "h_q": 8, "h_kv": 1},
    {"own_cached": True, "causal": False, "x": 16},
    {"kv_cache_dtype": "fp8_e4m3", "x": 16, "bytes_dtype": "uint8", "out_scale": 0.02},
)


def prefix_requests(inputs: PrefixInputs, requests: list[int]) -> PrefixInputs:
    """A batch of these requests, in this order, over the same cache."""
    starts = inputs.b_start_loc
    return replace(
        inputs,
        **{name: rows_of(getattr(inputs, name), starts, requests) for name in ("q", "k", "v")},
        b_loc=inputs.b_loc[requests],
        b_start_loc=bounds_of(starts, requests),
        b_seq_len=inputs.b_seq_len[requests],
    )


@pytest.mark.parametrize("options", PREFIX_OPTIONS, ids=str)
def test_prefix_requests_in_other_company(options: Options) -> None:
    """Unless keys are split, each request keeps its bits."""
    inputs = make_prefix_inputs(PrefixCase(**MANY, **options))
    with without_splits():
        whole = prefix.attend(inputs)
        check_prefix(inputs, whole)
        for requests in batches_of_seven():
            got = prefix.attend(prefix_requests(inputs, requests))
            want = rows_of(whole, inputs.b_start_loc, requests)
            assert_same_bits(f"requests {requests}", got, want)


@pytest.mark.parametrize("options", PREFIX_OPTIONS, ids=str)
def test_prefix_heads_of_one_kv_head(options: Options) -> None:
    """Alone, in the same cache, unless keys are split."""
    inputs = make_prefix_inputs(PrefixCase(**MANY, **{**options, "h_q": 8, "h_kv": 2}))
    rows = written_rows(inputs)

    def part(array: Any, heads: slice) -> Any:
        return None if array is None else array[:, heads]

    with without_splits():
        whole = prefix.attend(inputs)
        for kv_head in range(2):
            heads, kv = slice(4 * kv_head, 4 * kv_head + 4), slice(kv_head, kv_head + 1)
            alone = replace(
                inputs,
                q=inputs.q[:, heads],
                sinks=None if inputs.sinks is None else inputs.sinks[heads],
                **{name: part(getattr(inputs, name), kv) for name in ("k", "v", "k_cache", "v_cache")},
            )
            got = prefix.attend(alone)
            assert_same_bits(f"heads of KV head {kv_head}", got[rows], whole[:, heads][rows])


# ---- flex attention


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
    one, other = (flex.attend(inputs, block_mask=mask, max_scores=True) for mask in masks)
    assert not torch.equal(bits(one[0][:, :, changed]), bits(other[0][:, :, changed]))
    for name, got, want in zip(("out", "lse", "max_scores"), other, one, strict=True):
        assert_same_bits(name, got[:, :, ~changed], want[:, :, ~changed])


FLEX_CASES = (
    FlexCase(b=5, s_q=200, s_k=333, h_q=8, h_kv=2, mask="causal"),
    FlexCase(b=5, s_q=200, s_k=333, h_q=8, h_kv=8, mask="window", score="absolute", block=(64, 64)),
    FlexCase(b=5, s_q=200, s_k=333, h_q=8, h_kv=1, score="twice", d_qk=128, d_v=128, dtype="float16"),
)


@pytest.mark.parametrize("case", FLEX_CASES, ids=lambda case: case.id)
def test_flex_requests_in_other_company(case: FlexCase) -> None:
    """A request alone, a batch in another order, and the heads of one KV head alone."""
    inputs = make_flex_inputs(case)
    whole = flex.attend(inputs)
    check_flex(inputs, whole)
    for requests in ([0], [3], [4, 2, 0, 1, 3], [1, 1]):
        some = replace(inputs, q=inputs.q[requests], k=inputs.k[requests], v=inputs.v[requests])
        flex.assert_same_results(str(requests), flex.attend(some)[:2], [x[requests] for x in whole[:2]])
    group = case.h_q // case.h_kv
    last = slice(case.h_q - group, None)
    alone = replace(inputs, q=inputs.q[:, last], k=inputs.k[:, -1:], v=inputs.v[:, -1:])
    got = flex.attend(alone, enable_gqa=group > 1)
    flex.assert_same_results("the last heads", got[:2], [x[:, last] for x in whole[:2]])


def test_rows_of_a_longer_call() -> None:
    """The first 128 query tokens alone; what they see is the same blocks."""
    inputs = make_flex_inputs(FlexCase(s_q=512, s_k=512, mask="causal", score="absolute"))
    whole = flex.attend(inputs)
    case = replace(inputs.case, s_q=128, mask="")
    mask = rawmla.create_block_mask(lambda b, h, q, k: q >= k, None, None, 128, 512)
    some = replace(inputs, case=case, q=inputs.q[:, :, :128], mask=None, block_mask=None)
    got = flex.attend(some, block_mask=mask)
    flex.assert_same_results("the first rows", got[:2], [x[:, :, :128] for x in whole[:2]])


# ---- MLA decoding


@pytest.mark.parametrize("case", DENSE_INVARIANT_CASES[-2:], ids=lambda case: case.id)
def test_batch_invariance_does_not_depend_on_table_width_or_form(case: DenseCase) -> None:
    inputs = make_dense_inputs(case)
    want = decode(inputs, "object", enable_batch_invariant=True)
    width = inputs.block_table.shape[1]
    wide = torch.full((case.b, 3 * width), GARBAGE_PAGE, dtype=torch.int32, device="cuda")
    wide[:, :width] = inputs.block_table
    inputs.block_table = wide
    assert_pairs("wide table", decode(inputs, "tensors", enable_batch_invariant=True), want)


def assert_pairs(name: str, got: tuple[Any, Any], want: tuple[Any, Any]) -> None:
    for result, one, wanted in zip(("out", "lse"), got, want, strict=True):
        assert_same_bits(f"{name}: {result}", one, wanted)


twice = pytest.mark.parametrize("clusters", (False, True), ids=("chosen", "clusters"), indirect=True)


@twice
def test_batch_invariance_of_query_tokens() -> None:
    """A plan has fewer parts for more query tokens; the splits of a request stay the same."""
    case = SparseCase(b=6, s_q=4, h_q=64, s_k=3000, topk=2048, lengths="random")
    inputs = make_sparse_inputs(case)
    out, lse = sparse_decode(inputs, enable_batch_invariant=True)
    for i in range(4):
        part = slice(i, i + 1)
        alone = replace(
            inputs, case=replace(case, s_q=1), q=inputs.q[:, part], indices=inputs.indices[:, part]
        )
        got = sparse_decode(alone, enable_batch_invariant=True)
        assert_pairs(f"token {i}", got, (out[:, part], lse[:, :, part]))


@twice
@pytest.mark.parametrize("layout", ("v32", "model1"))
def test_what_stands_at_invalid_places_does_not_change_the_bits(layout: str) -> None:
    """Other invalid indices, other garbage past the lengths; the same valid ones at the same places."""
    case = SparseCase(b=9, s_q=2, h_q=32, topk=300, layout=layout, lengths="random", invalid=0.3)
    inputs = make_sparse_inputs(case)
    want = sparse_decode(inputs)
    slots = inputs.k_cache.shape[0] * inputs.k_cache.shape[1]
    past = torch.arange(300, device="cuda") >= inputs.topk_length[:, None, None]
    invalid = past | (inputs.indices < 0) | (inputs.indices >= slots)
    for value in (-1, 2**31 - 1, slots):
        other = replace(inputs, indices=inputs.indices.masked_fill(invalid, value))
        assert_pairs(f"with {value}", sparse_decode(other), want)


@twice
def test_an_extra_cache_without_indices_does_not_change_the_bits() -> None:
    case = SparseCase(
        b=9, s_q=2, h_q=64, topk=300, layout="model1", extra_topk=100, extra_lengths=(0,) * 9, sink=True
    )
    inputs = make_sparse_inputs(case)
    got = sparse_decode(inputs)
    sparse_check(inputs, got)
    assert_pairs("without", got, sparse_decode(without_extra(inputs)))
