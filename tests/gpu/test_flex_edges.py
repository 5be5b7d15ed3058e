"""Flex attention at the borders of what it takes, forward and backward: lists, blocks, lengths, numbers.

Layouts and sizes of arrays are in test_attention_arrays.py. In the backward the lists by columns say what is
attended. Those by rows, which the forward and the reference read, say the same in another order.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf, isnan, nan
from typing import Any

import pytest
from full_cases import full_unless
from gpu_support import assert_same_bits, torch

import rawmla
from kit.flex import (
    MASKS,
    FlexCase,
    Function,
    block_mask_of,
    check_flex,
    make_flex_inputs,
    reference,
    with_mask_mod,
)
from kit.flex_backward import captured_tensors
from operations.core import LISTS
from operations.flex import assert_same_results, attend
from operations.flex_backward import (
    BackwardInputs,
    assert_same_gradients,
    backward_inputs,
    backward_of,
    check_backward,
)

GARBAGE = 2**31 - 1
BLOCKS = ((16, 16), (32, 32), (96, 96), (128, 128), (256, 256), (128, 256), (256, 128), (32, 64))
IN_ORDER: dict[str, Any] = {"deterministic": True}


def with_lists(call: BackwardInputs, **lists: Any) -> BackwardInputs:
    """The call with other lists."""
    assert call.inputs.block_mask is not None
    changed = with_mask_mod(call.inputs.block_mask, call.inputs.block_mask.mask_mod)
    for name, value in lists.items():
        setattr(changed, name, value)
    return replace(call, inputs=replace(call.inputs, block_mask=changed))


def check_both(call: BackwardInputs, form: str = "python", **mask: Any) -> None:
    """The results, and the gradients in any order and in a fixed one; `mask`: another block mask."""
    check_flex(call.inputs, attend(call.inputs, form, max_scores=True, **mask))
    for options in ({}, IN_ORDER):
        check_backward(call, backward_of(call, form, **mask, **options))


def in_no_order(listed: Any) -> tuple[Any, Any]:
    """Counts and lists of what is marked in rows, with garbage behind their ends."""
    counts = listed.sum(-1, dtype=torch.int32)
    draw = torch.Generator("cuda").manual_seed(1)
    order = (torch.rand(listed.shape, generator=draw, device="cuda") - 2.0 * listed).argsort(-1).int()
    behind = torch.arange(listed.shape[-1], device="cuda") >= counts[..., None]
    return counts, order.masked_fill(behind, GARBAGE)


def given_lists(
    case: FlexCase, batches: int, heads: int, kinds: tuple[int, ...] = (1, 2), mask_name: str = "random"
) -> BackwardInputs:
    """A call with lists at random by rows and by columns, which do not agree with the mask.

    `kinds`: which lists may have entries: 1, of partial blocks, and 2, of full ones.
    """
    inputs = make_flex_inputs(case)
    for tensor in captured_tensors(inputs).values():
        tensor.requires_grad_()
    mask = MASKS[mask_name](case.sizes("cuda"))
    draw = torch.Generator("cuda").manual_seed(case.seed)
    rows, columns = (-(-n // size) for n, size in zip((case.s_q, case.s_k), case.block, strict=True))
    states = torch.randint(0, 3, (batches, heads, rows, columns), generator=draw, device="cuda")
    lists: list[Any] = []
    for by_rows in (True, False):
        for kind in (1, 2):
            listed = (states == kind) & (kind in kinds)
            lists += in_no_order(listed if by_rows else listed.mT)
    block_mask = rawmla.BlockMask((case.s_q, case.s_k), *lists, case.block, mask.python)
    return backward_inputs(case, "both", replace(inputs, mask=mask, block_mask=block_mask))


# ---- lists


@pytest.mark.parametrize("kinds", ((1, 2), (1,), (2,)), ids=("both", "partial", "full"))
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_lists_are_obeyed(block: tuple[int, int], kinds: tuple[int, ...]) -> None:
    """What is in no list is not attended, and the mask is asked in partial blocks alone."""
    for s_q, s_k, form in ((300, 1000, "python"), (1025, 277, "cuda"), (40, 50, "python")):
        case = FlexCase(s_q=s_q, s_k=s_k, h_kv=2, block=block, seed=s_q, score="head scale")
        check_both(given_lists(case, 2, 4, kinds), form)


@pytest.mark.parametrize("block", ((32, 32), (128, 128)), ids=str)
@pytest.mark.parametrize(
    ("batches", "heads"), ((1, 1), (1, 3), (2, 1), (2, 2), (4, 6), (1, 6), (4, 1)), ids=str
)
def test_lists_of_fewer_requests_and_heads(batches: int, heads: int, block: tuple[int, int]) -> None:
    """Lists serve further requests and heads by the number of either, modulo the number of lists.

    Requests have keys of their own, or share one set. With 150 tokens, query heads share tiles if they
    have one list.
    """
    for b_kv, s_q, mask in ((0, 200, "random"), (1, 150, "per head")):
        case = FlexCase(b=4, b_kv=b_kv, h_q=6, h_kv=3, s_q=s_q, s_k=500, block=block, score="head scale")
        check_both(given_lists(case, batches, heads, mask_name=mask))


def listed_call(**options: Any) -> tuple[BackwardInputs, Any, Any]:
    """A call with full and partial blocks and a captured gradient; its results, and its gradients in a fixed
    order.
    """
    case = FlexCase(**{"b": 3, "s_q": 500, "s_k": 1000, "mask": "window", "score": "head scale", **options})
    call = backward_inputs(case, "both")
    results, gradients = attend(call.inputs), backward_of(call, **IN_ORDER)
    check_flex(call.inputs, results)
    check_backward(call, gradients)
    return call, results, gradients


def narrow(count: Any, x: Any) -> Any:
    """As many entries as a line has at most, each kind its own."""
    return x if x.ndim == 3 else x[..., : max(1, int(count.max()))].contiguous()


def wide(count: Any, x: Any) -> Any:
    return x if x.ndim == 3 else torch.nn.functional.pad(x, (0, 50), value=GARBAGE)


def long(count: Any, x: Any) -> Any:
    """More lines than query or key has."""
    return torch.nn.functional.pad(x, (0, 2) if x.ndim == 3 else (0, 0, 0, 2), value=GARBAGE)


def expanded(count: Any, x: Any) -> Any:
    return x.expand(3, 4, *x.shape[2:])


def int64(count: Any, x: Any) -> Any:
    return x.long()


def every_other(count: Any, x: Any) -> Any:
    whole = torch.full((*x.shape[:-1], 2 * x.shape[-1]), GARBAGE, dtype=x.dtype, device="cuda")
    whole[..., ::2] = x
    return whole[..., ::2]


def sliced(count: Any, x: Any) -> Any:
    whole = torch.full([n + 3 for n in x.shape], GARBAGE, dtype=x.dtype, device="cuda")
    return whole[tuple(slice(2, n + 2) for n in x.shape)].copy_(x)


def without_batch(count: Any, x: Any) -> Any:
    return x[0, 0]


def garbage(value: int) -> Any:
    """Past the count of a line."""

    def change(count: Any, x: Any) -> Any:
        if x.ndim == 3:
            return x
        return x.masked_fill(torch.arange(x.shape[-1], device="cuda") >= count[..., None], value)

    return change


@pytest.mark.parametrize("block", ((64, 64), (128, 128)), ids=str)
def test_layouts_of_lists(block: tuple[int, int]) -> None:
    """Lists of any width, stride and integer dtype, with garbage past the counts, give the same bits."""
    call, results, gradients = listed_call(block=block)
    known = {name: getattr(call.inputs.block_mask, name) for name in LISTS}
    counts = {name: known[name.replace("indices", "num_blocks")] for name in LISTS}
    changes = [narrow, wide, long, expanded, int64, every_other, sliced, without_batch]
    changes += [garbage(value) for value in (GARBAGE, -1, -(2**31), 3)]
    lists = [{name: change(counts[name], x) for name, x in known.items()} for change in changes]
    one_expanded = {name: x.contiguous() if name.startswith("full") else x for name, x in lists[3].items()}
    for moved in (*lists, one_expanded):
        changed = with_lists(call, **moved)
        assert_same_results("lists", attend(changed.inputs), results)
        assert_same_gradients(backward_of(changed, **IN_ORDER), gradients, all_of_them=True)


def test_no_full_lists() -> None:
    """Absent, or present and empty."""
    call, results, gradients = listed_call(separate=False)
    known = call.inputs.block_mask
    assert known is not None and known.full_kv_num_blocks is known.full_q_num_blocks is None
    empty = {}
    for prefix in ("kv", "q"):
        empty[f"full_{prefix}_num_blocks"] = torch.zeros_like(getattr(known, f"{prefix}_num_blocks"))
        empty[f"full_{prefix}_indices"] = torch.full_like(getattr(known, f"{prefix}_indices"), GARBAGE)
    changed = with_lists(call, **empty)
    assert_same_results("empty", attend(changed.inputs), results)
    assert_same_gradients(backward_of(changed, **IN_ORDER), gradients, all_of_them=True)


def test_counts_are_clipped() -> None:
    """To the number of blocks that there are."""
    call = backward_inputs(FlexCase(s_q=300, s_k=1000, score="head scale"), "both")
    for size, kind in ((128, ""), (128, "full_"), (2**20, "full_")):
        lists: dict[str, Any] = {}
        sizes = [-(-length // size) for length in (300, 1000)]
        for name, (lines, others) in (("kv", sizes), ("q", sizes[::-1])):
            entries = torch.arange(others, dtype=torch.int32, device="cuda").expand(1, 1, lines, others)
            many = torch.full((1, 1, lines), 2**30, dtype=torch.int32, device="cuda")
            for prefix in ("", "full_"):
                lists[f"{prefix}{name}_indices"] = torch.nn.functional.pad(entries, (0, 20), value=GARBAGE)
                lists[f"{prefix}{name}_num_blocks"] = many if prefix == kind else torch.zeros_like(many)
        check_both(call, block_mask=rawmla.BlockMask((300, 1000), **lists, BLOCK_SIZE=(size, size)))


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


# ---- blocks and lengths


@pytest.mark.parametrize("block", ((16, 16), (32, 64)), ids=str)
def test_unlisted_small_blocks_may_hold_anything(block: tuple[int, int]) -> None:
    """V of every block that no row lists is NaN, also next to listed ones in the same tile."""
    for mask in ("padding", "checkered"):
        inputs = make_flex_inputs(FlexCase(s_q=200, s_k=500, block=block, mask=mask, gap_keys=1))
        assert bool(inputs.v.isnan().any())
        check_flex(inputs, attend(inputs))


@pytest.mark.parametrize(
    "block",
    full_unless(lambda block: block[0] == 16, ((512, 1024), (16, 2**20), (2**20, 16), (2**20, 2**20))),
    ids=str,
)
def test_blocks_longer_than_the_sequence(block: tuple[int, int]) -> None:
    for mask in ("causal", "random"):
        for s_q, s_k in ((100, 277), (400, 500), (1, 1)):
            # No NaN where blocks of the usual size are empty: these longer ones have such keys in them.
            call = backward_inputs(FlexCase(s_q=s_q, s_k=s_k, mask=mask, gap=0.0, score="head scale"), "both")
            assert call.inputs.mask is not None
            given = rawmla.create_block_mask(call.inputs.mask.python, None, None, s_q, s_k, BLOCK_SIZE=block)
            check_both(call, block_mask=given)


def test_empty_calls() -> None:
    """Gradients are 0, also of what functions read; with a block mask and without one."""
    for b, s_q, s_k in ((0, 5, 7), (2, 0, 7), (2, 5, 0), (0, 0, 0)):
        call = backward_inputs(FlexCase(b=b, s_q=s_q, s_k=s_k, score="head offset"), "both")
        mask = rawmla.create_block_mask(lambda b, h, q, k: q >= k, None, None, s_q, s_k)
        for block_mask in (None, mask):
            out, lse, top = attend(call.inputs, max_scores=True, block_mask=block_mask)
            assert bool((out == 0).all()) and bool((lse == -inf).all()) and bool((top == -inf).all())
            got = backward_of(call, block_mask=block_mask)
            assert not any(bool(x.any()) for x in (*got[:3], got[3]["offset"]))


@pytest.mark.parametrize("score", ("", "bias b h q k"))
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


@pytest.mark.parametrize(("kv_dtype", "dtype"), (("float8_e4m3fn", "bfloat16"), ("float8_e5m2", "float16")))
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
def test_scales(score: str) -> None:
    """Zero and negative ones too, with and without a function of the caller's."""
    for scale in (0.0, -0.2, 1e-30, 1, 3.5, -1):
        inputs = make_flex_inputs(FlexCase(s_q=200, s_k=277, scale=scale, score=score, mask="causal"))
        check_flex(inputs, attend(inputs, max_scores=True))


@pytest.mark.parametrize("spoiler", full_unless(isnan, (nan, inf, -inf)), ids=str)
def test_what_functions_give_where_it_is_masked(spoiler: float) -> None:
    """Also past the last query token and key. It goes nowhere, forward and backward."""
    case = FlexCase(s_q=300, s_k=277, mask="causal")
    for masked, sizes in (
        (lambda b, h, q, k: q < k, case),
        (lambda b, h, q, k: (q >= 300) | (k >= 277), replace(case, mask="")),
    ):
        call = backward_inputs(sizes, "both")

        def score(s: Any, b: Any, h: Any, q: Any, k: Any, masked: Any = masked) -> Any:
            return torch.where(masked(b, h, q, k), spoiler, s)

        check_flex(call.inputs, attend(call.inputs, score_mod=score, max_scores=True))
        check_backward(call, backward_of(call, score_mod=score))


@pytest.mark.parametrize("spoiler", (nan, inf), ids=str)
def test_a_spoilt_row(spoiler: float) -> None:
    """NaN or +inf at an attended position spoils out and dq of its row, and dk and dv of its head alone."""
    call = backward_inputs(FlexCase(s_q=300, s_k=500), "both")
    row, head = (1, 2, slice(37, 38)), (1, 2)

    def results(number: float) -> tuple[Any, ...]:
        def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            return s + torch.where((b == 1) & (h == 2) & (q == 37) & (k == 200), number, 0.0)

        inputs = call.inputs
        out, lse = rawmla.flex_attention(inputs.q, inputs.k, inputs.v, score, return_lse=True)
        gradients = backward_of(replace(call, results=(out, lse)), score_mod=score, **IN_ORDER)[:3]
        return out.clone(), *gradients

    want, got = results(0.0), results(spoiler)
    check_backward(call, (*want[1:], {}))
    assert bool(got[0][row].isnan().all()) and bool(got[1][row].isnan().all())
    places = {"out": row, "dq": row, "dk": head, "dv": head}
    for (name, place), one, wanted in zip(places.items(), got, want, strict=True):
        one[place] = wanted[place]
        assert_same_bits(name, one, wanted)


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


def test_logs_with_strides_past_2_31_elements() -> None:
    """lse and its gradient, of two requests."""
    call = backward_inputs(FlexCase(b=2, h_q=2, h_kv=2, s_q=100, s_k=100, mask="causal"), "both")
    room = 1 << 20
    memory = torch.full((2**31 + 2 * room,), nan, device="cuda")
    for number, name in enumerate(("lse", "dlse")):
        place = memory.as_strided(call.results[1].shape, (2**31, 100, 1), number * room)
        if name == "lse":
            call = replace(call, results=(call.results[0], place.copy_(call.results[1])))
        else:
            call = replace(call, gradients=replace(call.gradients, dlse=place.copy_(call.gradients.dlse)))
    check_backward(call, backward_of(call))


def test_a_captured_tensor_with_strides_past_2_31_elements() -> None:
    """Its gradient is contiguous."""
    memory = torch.empty(2**31 + 300, dtype=torch.bfloat16, device="cuda")
    table = memory.as_strided((2, 277), (2**31, 1))
    table.normal_()
    table = table.detach().requires_grad_()
    score = Function(
        lambda s, b, h, q, k: s + table[b, k],
        "score + table(b, kv_idx)",
        lambda xp, t, s, b, h, q, k: s + t.table[b, k + 0 * q],
        {"table": table},
        "grad",
        {"table": ("b, kv_idx", "grad")},
    )
    inputs = replace(make_flex_inputs(FlexCase(s_q=70, s_k=277)), score=score)
    call = backward_inputs(inputs.case, "out", inputs)
    for form in ("python", "cuda"):
        check_backward(call, backward_of(call, form))


@pytest.mark.parametrize("form", ("python", "cuda"))
def test_a_captured_gradient_past_2_31_elements(form: str) -> None:
    """Of an expanded tensor: the gradient alone takes memory. What is read lies past 2**31 elements."""
    rows, read = 2**31 // 512 + 10, 10
    first = rows - read
    row = torch.randn(1, 512, device="cuda")
    table = row.expand(rows, 512).detach().requires_grad_()
    end = row.expand(read, 512).detach().requires_grad_()

    def end_score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + end[q, k]

    score = Function(
        lambda s, b, h, q, k: s + table[q + first, k],
        "score + table(q_idx + first, kv_idx)",
        lambda xp, t, s, b, h, q, k: s + t.table[q, k],
        {"table": table, "first": first},
        "grad",
        {"table": ("q_idx + first, kv_idx", "grad")},
    )
    inputs = replace(make_flex_inputs(FlexCase(s_q=read, s_k=500)), score=score)
    at_end = backward_inputs(
        inputs.case, "both", replace(inputs, score=replace(score, python=end_score, captures={"table": end}))
    )
    check_flex(at_end.inputs, attend(inputs, form))
    dq, dk, dv, captured = backward_of(replace(at_end, inputs=inputs), form)
    assert captured["table"].shape == (rows, 512)
    assert not any(bool(part.any()) for part in captured["table"][:-read].split(1 << 18))
    check_backward(at_end, (dq, dk, dv, {"table": captured["table"][-read:].clone()}))


@pytest.mark.parametrize("h_kv", (4, 1))
@pytest.mark.parametrize("mask", (None, "window"))
@pytest.mark.parametrize("s_q", (1, 70))
def test_few_queries_over_many_keys(s_q: int, mask: str | None, h_kv: int) -> None:
    """Keys are split over multiprocessors; results are those of dense attention within roundings of out."""
    b, h, s_k, d = 2, 4, 20_000, 128
    q, k, v = (
        torch.randn(b, heads, s, d, dtype=torch.bfloat16, device="cuda")
        for heads, s in ((h, s_q), (h_kv, s_k), (h_kv, s_k))
    )
    first = s_k - s_q

    def in_window(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q + first >= k) & (q + first - k <= 3000)

    lists = None if mask is None else rawmla.create_block_mask(in_window, None, None, s_q, s_k)
    out, lse = rawmla.flex_attention(q, k, v, block_mask=lists, enable_gqa=True, return_lse=True)
    window = (-1, -1) if mask is None else (3000, 0)
    want, want_lse = rawmla.flash_attn_func(*[x.transpose(1, 2) for x in (q, k, v)], window_size=window)
    torch.testing.assert_close(out, want.transpose(1, 2), rtol=2**-7, atol=2**-10)
    torch.testing.assert_close(lse, want_lse, rtol=0, atol=1e-4)
