"""Flex attention at the borders of what it takes: lists, blocks, lengths, layouts, numbers."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest
from gpu_support import assert_same_bits, torch

import rawmla
from kit.flex import (
    MASKS,
    FlexCase,
    FlexInputs,
    Function,
    block_mask_of,
    check_flex,
    make_flex_inputs,
    reference,
    with_mask_mod,
)
from operations.flex import assert_same_results, assert_untouched_around, attend, created_mask, out_buffer

GARBAGE = 2**31 - 1
BLOCKS = ((16, 16), (32, 32), (96, 96), (128, 128), (256, 256), (128, 256), (256, 128), (32, 64))
LISTS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")


def with_lists(inputs: FlexInputs, **lists: Any) -> FlexInputs:
    """The call with other lists."""
    assert inputs.block_mask is not None
    changed = with_mask_mod(inputs.block_mask, inputs.block_mask.mask_mod)
    for name, value in lists.items():
        setattr(changed, name, value)
    return replace(inputs, block_mask=changed)


def given_lists(case: FlexCase, batches: int, heads: int, kinds: tuple[int, ...] = (1, 2)) -> FlexInputs:
    """Lists at random, which do not agree with the mask, in no order and with garbage behind their ends.

    `kinds`: which lists may have entries: 1, of partial blocks, and 2, of full ones.
    """
    inputs = make_flex_inputs(case)
    mask = MASKS["random"](case.sizes("cuda"))
    draw = torch.Generator("cuda").manual_seed(case.seed)
    rows, columns = (-(-n // size) for n, size in zip((case.s_q, case.s_k), case.block, strict=True))
    shape = (batches, heads, rows, columns)
    states = torch.randint(0, 3, shape, generator=draw, device="cuda")
    lists: list[Any] = []
    for kind in (1, 2):
        listed = (states == kind) & (kind in kinds)
        counts = listed.sum(-1, dtype=torch.int32)
        order = (torch.rand(shape, generator=draw, device="cuda") - 2.0 * listed).argsort(-1).int()
        behind = torch.arange(columns, device="cuda") >= counts[..., None]
        lists += [counts, order.masked_fill(behind, GARBAGE)]
    parts = [(case.s_q, case.s_k), *lists, None, None, None, None, case.block, mask.python]
    return replace(inputs, mask=mask, block_mask=rawmla.BlockMask(*parts))


# ---- lists


@pytest.mark.parametrize("kinds", ((1, 2), (1,), (2,)), ids=("both", "partial", "full"))
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_lists_are_obeyed(block: tuple[int, int], kinds: tuple[int, ...]) -> None:
    """What is in no list is not attended, and the mask is asked in partial blocks alone."""
    for s_q, s_k in ((300, 1000), (1025, 277), (40, 50)):
        case = FlexCase(s_q=s_q, s_k=s_k, h_kv=2, block=block, seed=s_q)
        inputs = given_lists(case, 2, 4, kinds)
        for form in ("python", "cuda"):
            check_flex(inputs, attend(inputs, form, max_scores=True))


@pytest.mark.parametrize("block", ((32, 32), (128, 128)), ids=str)
@pytest.mark.parametrize(
    ("batches", "heads"), ((1, 1), (1, 3), (2, 1), (2, 2), (4, 6), (1, 6), (4, 1)), ids=str
)
def test_lists_of_fewer_requests_and_heads(batches: int, heads: int, block: tuple[int, int]) -> None:
    """Batch and head are taken modulo those of the lists."""
    case = FlexCase(b=4, h_q=6, h_kv=3, s_q=200, s_k=500, block=block)
    inputs = given_lists(case, batches, heads)
    check_flex(inputs, attend(inputs))


@pytest.mark.parametrize("block", ((64, 64), (128, 128)), ids=str)
@pytest.mark.parametrize("garbage", (GARBAGE, -1, -(2**31), 3))
def test_garbage_past_the_count(garbage: int, block: tuple[int, int]) -> None:
    inputs = make_flex_inputs(FlexCase(s_q=300, s_k=1000, mask="documents", block=block))
    want = attend(inputs)
    check_flex(inputs, want)
    changed = {}
    for prefix in ("kv", "full_kv"):
        counts, indices = (getattr(inputs.block_mask, f"{prefix}_{x}") for x in ("num_blocks", "indices"))
        behind = torch.arange(indices.shape[-1], device="cuda") >= counts[..., None]
        changed[f"{prefix}_indices"] = indices.masked_fill(behind, garbage)
    assert_same_results("garbage", attend(with_lists(inputs, **changed)), want)


@pytest.mark.parametrize("block", ((64, 64), (128, 128)), ids=str)
def test_layouts_of_lists(block: tuple[int, int]) -> None:
    """Narrow, wide, expanded, of other integers, not contiguous, without full ones, in slices of garbage."""
    inputs = make_flex_inputs(FlexCase(b=3, s_q=500, s_k=1000, mask="window", block=block))
    want = attend(inputs)
    check_flex(inputs, want)
    known = {name: getattr(inputs.block_mask, name) for name in LISTS}

    def narrow(x: Any) -> Any:
        """As many columns as a row has entries at most, each kind its own."""
        if x.ndim == 3:
            return x
        counts = known["kv_num_blocks" if x is known["kv_indices"] else "full_kv_num_blocks"]
        return x[..., : max(1, int(counts.max()))].contiguous()

    def wide(x: Any) -> Any:
        return x if x.ndim == 3 else torch.nn.functional.pad(x, (0, 50), value=GARBAGE)

    def long(x: Any) -> Any:
        """More rows than query has."""
        pad = (0, 2) if x.ndim == 3 else (0, 0, 0, 2)
        return torch.nn.functional.pad(x, pad, value=GARBAGE)

    def expanded(x: Any) -> Any:
        return x.expand(3, 4, *x.shape[2:])

    def int64(x: Any) -> Any:
        return x.long()

    def every_other(x: Any) -> Any:
        whole = torch.full((*x.shape[:-1], 2 * x.shape[-1]), GARBAGE, dtype=x.dtype, device="cuda")
        whole[..., ::2] = x
        return whole[..., ::2]

    def sliced(x: Any) -> Any:
        whole = torch.full([n + 3 for n in x.shape], GARBAGE, dtype=x.dtype, device="cuda")
        part = whole[tuple(slice(2, n + 2) for n in x.shape)]
        return part.copy_(x)

    def without_batch(x: Any) -> Any:
        return x[0, 0]

    for change in (narrow, wide, long, expanded, int64, every_other, sliced, without_batch):
        moved = {name: change(x) for name, x in known.items()}
        assert_same_results(change.__name__, attend(with_lists(inputs, **moved)), want)
    assert_same_results("one expanded", attend(with_lists(inputs, **{
        name: x.expand(3, 4, *x.shape[2:]).contiguous() if name.startswith("full") else expanded(x)
        for name, x in known.items()
    })), want)  # fmt: skip


def test_no_full_lists() -> None:
    """Absent, or present and empty."""
    inputs = make_flex_inputs(FlexCase(s_q=500, s_k=700, mask="causal", separate=False))
    want = attend(inputs)
    check_flex(inputs, want)
    known = inputs.block_mask
    assert known is not None and known.full_kv_num_blocks is None
    empty = {
        "full_kv_num_blocks": torch.zeros_like(known.kv_num_blocks),
        "full_kv_indices": torch.full_like(known.kv_indices, GARBAGE),
    }
    assert_same_results("empty", attend(with_lists(inputs, **empty)), want)


def test_counts_are_clipped() -> None:
    """To the number of blocks that there are."""
    inputs = make_flex_inputs(FlexCase(s_q=300, s_k=1000))
    want = reference(inputs)
    rows, columns = 3, 8
    for block, kind in (((128, 128), "kv"), ((128, 128), "full_kv"), ((2**20, 2**20), "full_kv")):
        if block[0] > 128:
            rows, columns = 1, 1
        entries = torch.arange(columns, dtype=torch.int32, device="cuda").expand(1, 1, rows, columns)
        wide = torch.nn.functional.pad(entries, (0, 20), value=GARBAGE)
        many = torch.full((1, 1, rows), 2**30, dtype=torch.int32, device="cuda")
        none = torch.zeros_like(many)
        lists = (many, wide, none, wide) if kind == "kv" else (none, wide, many, wide)
        mask = rawmla.BlockMask((300, 1000), *lists, BLOCK_SIZE=block)
        check_flex(inputs, attend(inputs, block_mask=mask), want)


def test_block_masks_of_torch() -> None:
    """As they are: made by torch, empty, and with further attributes."""
    from torch.nn.attention import flex_attention as theirs

    inputs = make_flex_inputs(FlexCase(s_q=300, s_k=500, mask="documents", score="alibi"))
    assert inputs.mask is not None
    want = attend(inputs)
    mask = theirs.create_block_mask(inputs.mask.python, 2, None, 300, 500, device="cuda")
    assert_same_results("torch's", attend(inputs, block_mask=mask), want)
    part = theirs.create_block_mask(inputs.mask.python, 2, 8, 300, 500, device="cuda")[:, :4]
    part.mask_mod = inputs.mask.python
    assert_same_results("indexed", attend(inputs, block_mask=part), want)
    whole = make_flex_inputs(FlexCase(s_q=300, s_k=500))
    empty = theirs._create_empty_block_mask(whole.q, whole.k)
    assert_same_results("empty", attend(whole, block_mask=empty), attend(whole))
    noop = theirs.create_block_mask(theirs.noop_mask, None, None, 300, 500, device="cuda")
    check_flex(whole, attend(whole, block_mask=noop))
    out, aux = rawmla.flex_attention(
        whole.q, whole.k, whole.v, return_aux=theirs.AuxRequest(lse=True, max_scores=True)
    )
    check_flex(whole, (out, aux.lse, aux.max_scores))


def test_paged_attention_of_torch() -> None:
    """K and V of all requests in the pages of one cache; mask and score function are converted by torch."""
    from torch.nn.attention.experimental._paged_attention import PagedAttention

    b, page, count, tokens = 3, 128, 16, 500
    inputs = make_flex_inputs(FlexCase(b=b, s_q=tokens, s_k=tokens, score="absolute", mask="causal"))
    assert inputs.mask is not None and inputs.score is not None
    paged = PagedAttention(count, page, b, device="cuda")
    for length in (100, 300, tokens):  # so that a request's pages are apart
        for request in (2, 0, 1):
            paged.reserve(torch.tensor(request, device="cuda"), torch.tensor(length, device="cuda"))
    k_cache = torch.full((1, 4, count * page, 64), nan, dtype=torch.bfloat16, device="cuda")
    v_cache = torch.zeros_like(k_cache)
    places = torch.arange(tokens, device="cuda").expand(b, tokens)
    paged.assign(torch.arange(b, device="cuda"), places, inputs.k, inputs.v, k_cache, v_cache)
    mask = rawmla.create_block_mask(inputs.mask.python, b, 1, tokens, tokens)
    converted = paged.convert_logical_block_mask(mask)
    out, lse = rawmla.flex_attention(
        inputs.q, k_cache, v_cache, paged.get_score_mod(inputs.score.python), converted, return_lse=True
    )
    check_flex(inputs, (out, lse, None))


def test_indexed_block_masks() -> None:
    """Some requests, heads and rows of blocks, with the function set again."""
    inputs = make_flex_inputs(FlexCase(b=3, s_q=512, s_k=700, mask="per head"))
    assert inputs.mask is not None
    want = attend(inputs)
    mask = rawmla.create_block_mask(inputs.mask.python, 3, 4, 512, 700)
    part = mask[1:, :, 1:3]
    some = replace(inputs, q=inputs.q[1:, :, 128:384], k=inputs.k[1:], v=inputs.v[1:])
    with pytest.raises(ValueError, match="mask_mod"):
        attend(some, block_mask=part)
    python = inputs.mask.python
    part.mask_mod = lambda b, h, q, k: python(b + 1, h, q + 128, k)
    got = attend(some, block_mask=part)
    assert_same_results("indexed", got[:2], (want[0][1:, :, 128:384], want[1][1:, :, 128:384]))
    short = mask._adjust(300, 450)
    some = replace(inputs, q=inputs.q[:, :, :300], k=inputs.k[:, :, :450], v=inputs.v[:, :, :450])
    case = replace(inputs.case, s_q=300, s_k=450)
    cut = replace(some, case=case, block_mask=short)
    check_flex(cut, attend(cut))


# ---- blocks and lengths


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("mask", ("documents", "checkered", "padding"))
def test_blocks(mask: str, block: tuple[int, int]) -> None:
    for sizes in ((300, 1000), (1000, 300)):
        case = FlexCase(s_q=sizes[0], s_k=sizes[1], h_kv=1, mask=mask, block=block, layout="slice")
        inputs = make_flex_inputs(case)
        got = attend(inputs)
        check_flex(inputs, got)
        assert_same_results("created", attend(inputs, block_mask=created_mask(inputs)), got)


@pytest.mark.parametrize("block", ((16, 16), (32, 64), (64, 64), (96, 96)), ids=str)
def test_unlisted_small_blocks_may_hold_anything(block: tuple[int, int]) -> None:
    """V of blocks that no row lists, also next to listed ones."""
    mask = Function(
        lambda b, h, q, k: (k // 96) % 2 == 0,
        "kv_idx / 96 % 2 == 0",
        lambda xp, t, b, h, q, k: (q >= 0) & ((k // 96) % 2 == 0),
    )
    case = FlexCase(s_q=200, s_k=500, block=block)
    inputs = replace(make_flex_inputs(case), mask=mask)
    created = rawmla.create_block_mask(mask.python, None, None, 200, 500, BLOCK_SIZE=block)
    want = attend(replace(inputs, block_mask=created))
    check_flex(replace(inputs, block_mask=created), want)
    keys = torch.arange(500, device="cuda")
    listed = torch.zeros(500, dtype=torch.bool, device="cuda")
    for column in created.to_dense()[0, 0].any(0).nonzero().flatten().tolist():
        listed |= keys // block[1] == column
    assert not bool(listed.all())
    inputs.k[:, :, ~listed], inputs.v[:, :, ~listed] = nan, nan
    assert_same_results("spoilt", attend(replace(inputs, block_mask=created)), want)


@pytest.mark.parametrize("block", ((512, 1024), (16, 2**20), (2**20, 16), (2**20, 2**20)), ids=str)
def test_blocks_longer_than_the_sequence(block: tuple[int, int]) -> None:
    for mask in ("causal", "random"):
        for s_q, s_k in ((100, 277), (400, 500), (1, 1)):
            # No NaN where blocks of the usual size are empty: these longer ones have such keys in them.
            case = FlexCase(s_q=s_q, s_k=s_k, mask=mask, gap=0.0)
            inputs = make_flex_inputs(case)
            assert inputs.mask is not None
            given = rawmla.create_block_mask(inputs.mask.python, None, None, s_q, s_k, BLOCK_SIZE=block)
            check_flex(inputs, attend(inputs, block_mask=given))


@pytest.mark.parametrize("mask", ("", "random"))
@pytest.mark.parametrize("h_kv", (8, 1))
def test_few_queries(h_kv: int, mask: str) -> None:
    """Decoding: L 1 to 16."""
    for s_q in range(1, 17):
        case = FlexCase(
            b=3, h_q=8, h_kv=h_kv, s_q=s_q, s_k=400 + s_q, d_qk=128, d_v=128, mask=mask, score="bias h q k"
        )
        inputs = make_flex_inputs(case)
        check_flex(inputs, attend(inputs))


@pytest.mark.parametrize("d", (64, 128, 192, 256))
def test_lengths_at_borders_of_tiles(d: int) -> None:
    for s_q in (127, 128, 129, 255, 257):
        for s_k in (1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 257):
            inputs = make_flex_inputs(
                FlexCase(b=1, h_q=2, h_kv=2, s_q=s_q, s_k=s_k, d_qk=d, d_v=d, mask="random", layout="slice")
            )
            check_flex(inputs, attend(inputs))


@pytest.mark.parametrize("dims", ((1, 1), (3, 255), (17, 33), (256, 8), (1, 256), (200, 72)), ids=str)
@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_odd_head_dimensions(dtype: str, dims: tuple[int, int]) -> None:
    for layout in ("plain", "slice"):
        inputs = make_flex_inputs(
            FlexCase(s_q=150, s_k=200, d_qk=dims[0], d_v=dims[1], dtype=dtype, layout=layout, mask="causal")
        )
        got = attend(inputs)
        check_flex(inputs, got)
        buffer, given = out_buffer(inputs)
        assert_same_results("out given", attend(inputs, out=given), got)
        assert_untouched_around(buffer, given)


@pytest.mark.parametrize("out_given", (False, True))
@pytest.mark.parametrize(
    ("b", "s_q", "s_k"), ((0, 5, 7), (2, 0, 7), (2, 5, 0), (0, 0, 0), (2, 0, 0), (2, 300, 0)), ids=str
)
def test_empty_calls(b: int, s_q: int, s_k: int, out_given: bool) -> None:
    inputs = make_flex_inputs(FlexCase(b=b, s_q=s_q, s_k=s_k, score="head offset"))
    mask = rawmla.create_block_mask(lambda b, h, q, k: q >= k, None, None, s_q, s_k)
    for block_mask in (None, mask):
        buffer, given = out_buffer(inputs) if out_given else (None, None)
        out, lse, top = attend(inputs, max_scores=True, block_mask=block_mask, out=given)
        assert out.shape == (b, 4, s_q, 64) and lse.shape == top.shape == (b, 4, s_q)
        assert given is None or out is given
        assert bool((out == 0).all()) and bool((lse == -inf).all()) and bool((top == -inf).all())
        if out_given:
            assert_untouched_around(buffer, given)


@pytest.mark.parametrize("score", ("", "square", "bias b h q k"))
def test_rows_without_keys(score: str) -> None:
    """By lists, by the mask in listed blocks, and by the score function."""
    whole = make_flex_inputs(FlexCase(s_q=300, s_k=500, score=score, mask="empty"))
    assert whole.mask is not None
    everything = torch.arange(4, dtype=torch.int32, device="cuda").expand(1, 1, 3, 4)
    listed = rawmla.BlockMask(
        (300, 500), torch.full((1, 1, 3), 4, dtype=torch.int32, device="cuda"), everything,
        mask_mod=whole.mask.python,
    )  # fmt: skip
    whole.k.fill_(0.5)
    for block_mask in (whole.block_mask, listed):
        whole.v.fill_(nan if block_mask is whole.block_mask else 1.0)
        out, lse, top = attend(whole, max_scores=True, block_mask=block_mask)
        assert_same_bits("out", out, torch.zeros_like(out))
        assert bool((lse == -inf).all()) and bool((top == -inf).all())
    half = make_flex_inputs(FlexCase(s_q=300, s_k=500, score=score, mask="lower half"))
    got = attend(half, max_scores=True)
    check_flex(half, got)
    assert_same_bits("out", got[0][:, :, :150], torch.zeros_like(got[0][:, :, :150]))
    out, lse, top = attend(
        make_flex_inputs(FlexCase(s_q=300, s_k=500)), max_scores=True, score_mod=lambda s, b, h, q, k: -inf
    )
    assert_same_bits("out", out, torch.zeros_like(out))
    assert bool((lse == -inf).all()) and bool((top == -inf).all())


def test_more_than_65535_heads_of_requests() -> None:
    """b * h of 68,160, with lists of each request."""
    case = FlexCase(b=22720, h_q=3, h_kv=3, s_q=3, s_k=5, score="head offset", mask="padding")
    inputs = make_flex_inputs(case)
    check_flex(inputs, attend(inputs))
    plain = make_flex_inputs(replace(case, score="", mask=""))
    check_flex(plain, attend(plain))


def test_many_heads_of_lists() -> None:
    """A list for each of 2 x 3,000 heads, of which K and V are one."""
    case = FlexCase(b=2, b_kv=1, h_q=3000, h_kv=1, s_q=20, s_k=300, mask="per head", block=(64, 64))
    inputs = make_flex_inputs(case)
    check_flex(inputs, attend(inputs))


# ---- arrays


@pytest.mark.parametrize("h_kv", (6, 2, 1))
@pytest.mark.parametrize("mask", ("", "causal", "per batch"))
def test_one_k_and_v_for_all_requests(mask: str, h_kv: int) -> None:
    """As if they were there for each; functions see the request of the query."""
    case = FlexCase(b=5, b_kv=1, h_q=6, h_kv=h_kv, s_q=200, s_k=300, score="bias b k", mask=mask)
    inputs = make_flex_inputs(case)
    got = attend(inputs)
    check_flex(inputs, got)
    each = replace(inputs, k=inputs.k.expand(5, -1, -1, -1), v=inputs.v.expand(5, -1, -1, -1))
    assert_same_results("expanded", attend(each), got)


def at_offset(x: Any) -> Any:
    """One element behind an aligned address."""
    memory = torch.full((x.numel() + 1,), nan, dtype=x.dtype, device="cuda")
    memory[1:] = x.flatten()
    return memory[1:].view(x.shape)


def odd_rows(x: Any) -> Any:
    """A stride that is no multiple of 16 bytes."""
    whole = torch.full((*x.shape[:-1], x.shape[-1] + 4), nan, dtype=x.dtype, device="cuda")
    whole[..., : x.shape[-1]] = x
    return whole[..., : x.shape[-1]]


def in_order(*order: int) -> Any:
    """A layout with the dimensions in this order in memory."""

    def change(x: Any) -> Any:
        return x.permute(order).contiguous().permute([order.index(axis) for axis in range(4)])

    return change


@pytest.mark.parametrize(
    "change",
    (*[in_order(*order) for order in ((0, 2, 1, 3), (2, 0, 1, 3), (1, 0, 2, 3), (0, 1, 3, 2))],
     at_offset, odd_rows),
    ids=("b s h d", "s b h d", "h b s d", "last not contiguous", "address", "stride"),
)  # fmt: skip
def test_layouts(change: Any) -> None:
    """Read where they lie or copied; a fresh out has its dimensions in the order of query's."""
    inputs = make_flex_inputs(FlexCase(b=3, s_q=150, s_k=200, mask="causal", score="alibi"))
    want = attend(inputs)
    for names in ("q", "k", "v", "qkv"):
        moved = replace(inputs, **{name: change(getattr(inputs, name)) for name in names})
        got = attend(moved)
        assert_same_results(names, got, want)
        assert got[1].is_contiguous()
        if "q" in names and moved.q.stride(-1) == 1:
            wanted = sorted(range(4), key=lambda axis: -moved.q.stride(axis))
            assert sorted(range(4), key=lambda axis: -got[0].stride(axis)) == wanted


@pytest.mark.parametrize("axes", ((0,), (1,), (2,), (0, 1, 2)), ids=str)
def test_broadcast_arrays(axes: tuple[int, ...]) -> None:
    inputs = make_flex_inputs(FlexCase(b=3, s_q=150, s_k=200, mask="causal"))

    def first_for_all(x: Any) -> Any:
        for axis in axes:
            x = x.narrow(axis, 0, 1).expand(*[x.shape[i] if i == axis else -1 for i in range(4)])
        return x

    broadcast = replace(inputs, **{name: first_for_all(getattr(inputs, name)) for name in "qkv"})
    got = attend(broadcast)
    check_flex(broadcast, got)
    dense = replace(broadcast, **{name: getattr(broadcast, name).contiguous() for name in "qkv"})
    assert_same_results("broadcast", attend(dense), got)


@pytest.mark.parametrize("order", ((0, 1, 2, 3), (0, 2, 1, 3), (2, 1, 0, 3), (1, 0, 2, 3)), ids=str)
def test_out_in_another_order(order: tuple[int, ...]) -> None:
    inputs = make_flex_inputs(FlexCase(b=3, s_q=150, s_k=200, mask="causal"))
    want = attend(inputs)
    given = in_order(*order)(torch.full_like(want[0], nan))
    got = attend(inputs, out=given)
    assert got[0] is given
    assert_same_results("out given", got, want)


@pytest.mark.parametrize("layout", ("plain", "slice", "tokens"))
def test_out_is_a_slice(layout: str) -> None:
    inputs = make_flex_inputs(FlexCase(b=3, s_q=150, s_k=200, mask="documents", layout=layout))
    want = attend(inputs)
    buffer, given = out_buffer(inputs)
    got = attend(inputs, out=given)
    assert got[0] is given
    assert_same_results("out given", got, want)
    assert_untouched_around(buffer, given)


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize("kv_dtype", ("float8_e4m3fn", "float8_e5m2"))
def test_fp8_keys_and_values(kv_dtype: str, dtype: str) -> None:
    """Scales are the functions' affair."""
    for mask, layout, d in (("", "plain", 64), ("window", "slice", 128), ("padding", "tokens", 40)):
        case = FlexCase(
            s_q=150, s_k=277, h_kv=2, d_qk=d, d_v=d, dtype=dtype, kv_dtype=kv_dtype, mask=mask,
            layout=layout, score="scalar",
        )  # fmt: skip
        inputs = make_flex_inputs(case)
        check_flex(inputs, attend(inputs))
    one = replace(inputs, k=inputs.k.to(inputs.q.dtype))  # value alone
    check_flex(replace(one, v=inputs.v.to(inputs.q.dtype), case=replace(case, kv_dtype="")), attend(one))


# ---- numbers


@pytest.mark.parametrize("score", ("", "head offset"))
@pytest.mark.parametrize("scale", (0.0, -0.2, 1e-30, 1, 3.5, -1))
def test_scales(scale: float, score: str) -> None:
    """Zero and negative ones too, with and without a function of the caller's."""
    for mask in ("", "causal"):
        inputs = make_flex_inputs(FlexCase(s_q=200, s_k=277, scale=scale, score=score, mask=mask))
        check_flex(inputs, attend(inputs, max_scores=True))


def test_results_that_are_asked_for() -> None:
    """Each alone and together; out has the same bits with and without lse."""
    inputs = make_flex_inputs(FlexCase(s_q=200, s_k=277, score="alibi", mask="window"))
    keywords, arrays = inputs.keywords(), (inputs.q, inputs.k, inputs.v)
    want = reference(inputs)
    out = rawmla.flex_attention(*arrays, **keywords)
    check_flex(inputs, (out, None, None), want)
    with_lse = rawmla.flex_attention(*arrays, **keywords, return_lse=True)
    assert_same_bits("out", with_lse[0], out)
    for lse in (False, True):
        for max_scores in (False, True):
            got, aux = rawmla.flex_attention(
                *arrays, **keywords, return_aux=rawmla.AuxRequest(lse=lse, max_scores=max_scores)
            )
            assert (aux.lse is not None) == lse and (aux.max_scores is not None) == max_scores
            check_flex(inputs, (got, aux.lse, aux.max_scores), want)
            if lse and not max_scores:
                assert_same_bits("lse", aux.lse, with_lse[1])


def test_options_change_nothing() -> None:
    inputs = make_flex_inputs(FlexCase(s_q=200, s_k=277, score="alibi", mask="causal"))
    want = attend(inputs)
    for options in (
        {"ROWS_GUARANTEED_SAFE": True, "BLOCKS_ARE_CONTIGUOUS": True, "PRESCALE_QK": True},
        {"BLOCK_M": 64, "fwd_BLOCK_N": 32, "bwd_num_stages": 3, "USE_TMA": True, "BACKEND": "AUTO"},
        {},
    ):
        assert_same_results(str(options), attend(inputs, kernel_options=options), want)
    assert_same_results("deterministic", attend(inputs, deterministic=True), want)


def spoilt(where: str, spoiler: str) -> Function:
    """The identity, but for what it gives at some positions: `where` is a condition in C++ and Python."""
    value = {"nan": nan, "inf": inf, "-inf": -inf}[spoiler]
    code = {"nan": "kInfinity - kInfinity", "inf": "kInfinity", "-inf": "-kInfinity"}[spoiler]
    condition = eval(f"lambda q_idx, kv_idx: {where.replace('&&', '&')}")
    return Function(
        lambda s, b, h, q, k: torch.where(condition(q, k), value, s),
        f"{where} ? {code} : score",
        lambda xp, t, s, b, h, q, k: xp.where(condition(q, k), value, s),
    )


@pytest.mark.parametrize("form", ("python", "cuda"))
@pytest.mark.parametrize("spoiler", ("nan", "inf"))
def test_what_functions_give_where_it_is_masked(spoiler: str, form: str) -> None:
    inputs = make_flex_inputs(FlexCase(s_q=300, s_k=500, mask="causal"))
    score = spoilt("(q_idx < kv_idx)", spoiler)
    want = reference(inputs)
    check_flex(inputs, attend(replace(inputs, score=score), form, max_scores=True), want)
    behind = make_flex_inputs(FlexCase(s_q=300, s_k=277))  # keys past the last one
    score = spoilt("(kv_idx >= 277)", spoiler)
    check_flex(behind, attend(replace(behind, score=score), form, max_scores=True))


@pytest.mark.parametrize("form", ("python", "cuda"))
@pytest.mark.parametrize("spoiler", ("nan", "inf"))
def test_spoilt_rows(spoiler: str, form: str) -> None:
    """NaN or +inf at an attended position spoils its row, and no other."""
    inputs = make_flex_inputs(FlexCase(s_q=300, s_k=500))
    score = spoilt("(q_idx == 37) && (kv_idx == 200)", spoiler)
    got = attend(replace(inputs, score=score), form)
    want = reference(inputs)
    assert bool(got[0][:, :, 37].isnan().all())
    others = [row for row in range(300) if row != 37]
    check_flex(inputs, tuple(x if x is None else x[:, :, others] for x in got), tuple(
        x[:, :, others] for x in want
    ))  # fmt: skip


def test_keys_that_are_masked_may_hold_nan() -> None:
    """K where a row does not see it; V of a listed block stays finite."""
    inputs = make_flex_inputs(FlexCase(s_q=500, s_k=500, mask="causal"))
    want = attend(inputs, max_scores=True)
    for spoiler in (nan, inf):
        inputs.k[:, :, 201:] = spoiler
        got = attend(inputs, max_scores=True)
        for name, one, wanted in zip(("out", "lse", "max_scores"), got, want, strict=True):
            assert_same_bits(name, one[:, :, :201], wanted[:, :, :201])


def test_large_scores() -> None:
    """Far apart and far from 0; float16 queries of 100."""
    for dtype, size in (("bfloat16", 30.0), ("float16", 10.0)):
        inputs = make_flex_inputs(FlexCase(s_q=200, s_k=277, dtype=dtype, mask="causal", score="identity"))
        inputs.q.mul_(size)
        got = attend(inputs, max_scores=True)
        want = reference(inputs)
        assert float(want[2].nan_to_num(neginf=0.0).abs().max()) > 40
        check_flex(inputs, got, want)


def test_more_keys_than_float32_counts() -> None:
    """Indices of keys past 2**24 are exact, in lists, masks, scores and loads. Only the last blocks have keys
    that are attended.
    """
    first, s_k = 2**24, 2**24 + 301
    tail = FlexCase(b=1, h_q=2, h_kv=2, s_q=3, s_k=301, d_qk=16, d_v=16, dtype="float16")
    inputs = make_flex_inputs(tail)
    table = torch.randn(301, device="cuda")

    def far(x: Any) -> Any:
        whole = torch.full((1, 2, s_k, 16), nan, dtype=x.dtype, device="cuda")
        whole[:, :, first:] = x
        return whole

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + table[k - first] + (k - first) % 2

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        return k >= first + q

    def arrays(xp: Any, t: Any, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + t.table[k] + k % 2

    keys_from_q = Function(lambda b, h, q, k: k >= q, "", lambda xp, t, b, h, q, k: k >= q)
    seen = torch.arange(301, device="cuda") >= torch.arange(3, device="cuda")[:, None]
    near = replace(
        inputs,
        score=Function(score, "", arrays, {"table": table}),
        mask=keys_from_q,
        block_mask=block_mask_of(seen[None, None], (3, 301), (128, 128), None),
    )
    blocks = rawmla.create_block_mask(mask, None, None, 3, s_k)
    got = attend(
        replace(inputs, k=far(inputs.k), v=far(inputs.v)), score_mod=score, block_mask=blocks, max_scores=True
    )
    check_flex(near, got)


# ---- strides past 32 bits


@pytest.mark.parametrize("axis", (0, 1, 2))
def test_strides_past_2_31_elements(axis: int) -> None:
    """Two requests, heads or tokens, 2**31 elements apart; out too."""
    sizes = {0: (2, 2, 100), 1: (2, 2, 100), 2: (1, 2, 2)}[axis]
    inputs = make_flex_inputs(
        FlexCase(b=sizes[0], h_q=2, h_kv=2, s_q=sizes[2], s_k=sizes[2], d_qk=128, d_v=128, mask="causal")
    )
    room = 1 << 20
    memory = torch.full((2**31 + 4 * room,), nan, dtype=torch.bfloat16, device="cuda")
    strides = list(inputs.q.contiguous().stride())
    strides[axis] = 2**31

    def placed(number: int, values: Any = None) -> Any:
        array = memory.as_strided(inputs.q.shape, strides, number * room)
        return array if values is None else array.copy_(values)

    apart = replace(inputs, q=placed(0, inputs.q), k=placed(1, inputs.k), v=placed(2, inputs.v))
    check_flex(inputs, attend(apart, out=placed(3)))


def test_a_captured_tensor_past_2_31_elements() -> None:
    rows = 2**31 // 512 + 10
    table = torch.empty(rows, 512, dtype=torch.bfloat16, device="cuda")
    table[-10:] = torch.randn(10, 512, device="cuda")
    inputs = make_flex_inputs(FlexCase(s_q=10, s_k=500))
    first = rows - 10
    score = Function(
        lambda s, b, h, q, k: s + table[q + first, k],
        "score + table(q_idx + first, kv_idx)",
        lambda xp, t, s, b, h, q, k: s + t.table[q, k],
        {"table": table, "first": first},
    )
    for form in ("python", "cuda"):
        got = attend(replace(inputs, score=score), form)
        end = replace(inputs, score=replace(score, captures={"table": table[-10:]}))
        check_flex(end, got)
