"""Backward of flex attention at the borders of what it takes: lists, blocks, lengths, layouts, sizes.

The lists by columns say what is attended; those by rows, which the forward and the reference read, say the
same in another order.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest
from gpu_support import assert_same_bits, torch
from test_flex_edges import BLOCKS, GARBAGE, at_offset, given_lists, in_order, odd_rows

import rawmla
from kit.flex import FlexCase, FlexInputs, Function, make_flex_inputs, with_mask_mod
from kit.flex_backward import captured_tensors, make_flex_backward_inputs, reference_backward
from operations.flex_backward import (
    ALL_LISTS,
    BackwardInputs,
    assert_same_gradients,
    backward_inputs,
    backward_of,
    check_backward,
)

IN_ORDER: dict[str, Any] = {"deterministic": True}
orders = pytest.mark.parametrize("options", ({}, IN_ORDER), ids=("any order", "fixed order"))


def with_lists(call: BackwardInputs, **lists: Any) -> BackwardInputs:
    """The call with other lists."""
    block_mask = call.inputs.block_mask
    assert block_mask is not None
    changed = with_mask_mod(block_mask, block_mask.mask_mod)
    for name, value in lists.items():
        setattr(changed, name, value)
    return replace(call, inputs=replace(call.inputs, block_mask=changed))


def in_no_order(listed: Any) -> tuple[Any, Any]:
    """Counts and lists of what is marked in rows, with garbage behind their ends."""
    counts = listed.sum(-1, dtype=torch.int32)
    draw = torch.Generator("cuda").manual_seed(1)
    order = (torch.rand(listed.shape, generator=draw, device="cuda") - 2.0 * listed).argsort(-1).int()
    behind = torch.arange(listed.shape[-1], device="cuda") >= counts[..., None]
    return counts, order.masked_fill(behind, GARBAGE)


def both_kinds_of_lists(
    case: FlexCase, batches: int, heads: int, kinds: tuple[int, ...] = (1, 2)
) -> FlexInputs:
    """`given_lists` with the same blocks by columns, in no order either."""
    inputs = given_lists(case, batches, heads, kinds)
    for tensor in captured_tensors(inputs).values():
        tensor.requires_grad_()
    mask = inputs.block_mask
    assert mask is not None
    for prefix in ("", "full_"):
        counts, indices = (getattr(mask, f"{prefix}kv_{x}") for x in ("num_blocks", "indices"))
        columns = indices.shape[-1]
        valid = torch.arange(columns, device="cuda") < counts[..., None]
        listed = torch.zeros((*indices.shape[:-1], columns + 1), dtype=torch.bool, device="cuda")
        listed.scatter_(-1, torch.where(valid, indices, columns).long(), True)
        by_columns = in_no_order(listed[..., :columns].mT)
        for what, value in zip(("num_blocks", "indices"), by_columns, strict=True):
            setattr(mask, f"{prefix}q_{what}", value)
    return inputs


# ---- lists


@pytest.mark.parametrize("kinds", ((1, 2), (1,), (2,)), ids=("both", "partial", "full"))
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_lists_are_obeyed(block: tuple[int, int], kinds: tuple[int, ...]) -> None:
    """What is in no list is not attended, and the mask is asked in partial blocks alone; by every kernel, in
    any order and in a fixed one.
    """
    for s_q, s_k, form in ((300, 1000, "python"), (1025, 277, "cuda"), (40, 50, "python")):
        case = FlexCase(s_q=s_q, s_k=s_k, h_kv=2, block=block, seed=s_q, score="head scale")
        call = backward_inputs(case, "both", both_kinds_of_lists(case, 2, 4, kinds))
        for options in ({}, IN_ORDER):
            check_backward(call, backward_of(call, form, **options))


@orders
@pytest.mark.parametrize("block", ((32, 32), (128, 128)), ids=str)
@pytest.mark.parametrize(
    ("batches", "heads"), ((1, 1), (1, 3), (2, 1), (2, 2), (4, 6), (1, 6), (4, 1)), ids=str
)
def test_lists_of_fewer_requests_and_heads(
    batches: int, heads: int, block: tuple[int, int], options: dict[str, Any]
) -> None:
    """Batch and head are taken modulo those of the lists; keys that all requests share too."""
    for b_kv in (0, 1):
        case = FlexCase(
            b=4, b_kv=b_kv, h_q=6, h_kv=3, s_q=200, s_k=500, block=block, score="head scale"
        )  # fmt: skip
        call = backward_inputs(case, "both", both_kinds_of_lists(case, batches, heads))
        check_backward(call, backward_of(call, **options))


def listed_call(**options: Any) -> tuple[BackwardInputs, Any]:
    """A call with full and partial blocks and a captured gradient; and its gradients in a fixed order."""
    case = FlexCase(**{"b": 3, "s_q": 500, "s_k": 1000, "mask": "window", "score": "head scale", **options})
    call = backward_inputs(case, "both")
    want = backward_of(call, **IN_ORDER)
    check_backward(call, want)
    return call, want


@pytest.mark.parametrize("block", ((64, 64), (128, 128)), ids=str)
def test_garbage_past_the_count(block: tuple[int, int]) -> None:
    call, want = listed_call(block=block)
    for garbage in (GARBAGE, -1, -(2**31), 3):
        changed = {}
        for prefix in ("kv", "full_kv", "q", "full_q"):
            mask = call.inputs.block_mask
            counts, indices = (getattr(mask, f"{prefix}_{x}") for x in ("num_blocks", "indices"))
            behind = torch.arange(indices.shape[-1], device="cuda") >= counts[..., None]
            changed[f"{prefix}_indices"] = indices.masked_fill(behind, garbage)
        got = backward_of(with_lists(call, **changed), **IN_ORDER)
        assert_same_gradients(got, want, all_of_them=True)


@pytest.mark.parametrize("block", ((64, 64), (128, 128)), ids=str)
def test_layouts_of_lists(block: tuple[int, int]) -> None:
    """Narrow, wide, expanded, of other integers, not contiguous, in slices of garbage."""
    call, want = listed_call(block=block)
    known = {name: getattr(call.inputs.block_mask, name) for name in ALL_LISTS}

    def narrow(name: str, x: Any) -> Any:
        """As many entries as a line has at most, each kind its own."""
        if x.ndim == 3:
            return x
        counts = known[name.replace("indices", "num_blocks")]
        return x[..., : max(1, int(counts.max()))].contiguous()

    def wide(name: str, x: Any) -> Any:
        return x if x.ndim == 3 else torch.nn.functional.pad(x, (0, 50), value=GARBAGE)

    def long(name: str, x: Any) -> Any:
        """More lines than query or key has."""
        pad = (0, 2) if x.ndim == 3 else (0, 0, 0, 2)
        return torch.nn.functional.pad(x, pad, value=GARBAGE)

    def expanded(name: str, x: Any) -> Any:
        return x.expand(3, 4, *x.shape[2:])

    def int64(name: str, x: Any) -> Any:
        return x.long()

    def every_other(name: str, x: Any) -> Any:
        whole = torch.full((*x.shape[:-1], 2 * x.shape[-1]), GARBAGE, dtype=x.dtype, device="cuda")
        whole[..., ::2] = x
        return whole[..., ::2]

    def sliced(name: str, x: Any) -> Any:
        whole = torch.full([n + 3 for n in x.shape], GARBAGE, dtype=x.dtype, device="cuda")
        part = whole[tuple(slice(2, n + 2) for n in x.shape)]
        return part.copy_(x)

    def without_batch(name: str, x: Any) -> Any:
        return x[0, 0]

    def one_expanded(name: str, x: Any) -> Any:
        return expanded(name, x).contiguous() if name.startswith("full") else expanded(name, x)

    changes = (narrow, wide, long, expanded, int64, every_other, sliced, without_batch, one_expanded)
    for change in changes:
        moved = with_lists(call, **{name: change(name, x) for name, x in known.items()})
        assert_same_gradients(backward_of(moved, **IN_ORDER), want, all_of_them=True)


def test_no_full_lists() -> None:
    """Absent, or present and empty."""
    call, want = listed_call(separate=False)
    known = call.inputs.block_mask
    assert known is not None and known.full_q_num_blocks is None
    empty = {}
    for prefix in ("kv", "q"):
        empty[f"full_{prefix}_num_blocks"] = torch.zeros_like(getattr(known, f"{prefix}_num_blocks"))
        empty[f"full_{prefix}_indices"] = torch.full_like(getattr(known, f"{prefix}_indices"), GARBAGE)
    got = backward_of(with_lists(call, **empty), **IN_ORDER)
    assert_same_gradients(got, want, all_of_them=True)


@orders
def test_counts_are_clipped(options: dict[str, Any]) -> None:
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
        mask = rawmla.BlockMask((300, 1000), **lists, BLOCK_SIZE=(size, size))
        check_backward(call, backward_of(call, block_mask=mask, **options))


# ---- blocks and lengths


@pytest.mark.parametrize("block", ((512, 1024), (16, 2**20), (2**20, 16), (2**20, 2**20)), ids=str)
def test_blocks_longer_than_the_sequence(block: tuple[int, int]) -> None:
    for s_q, s_k in ((100, 277), (400, 500), (1, 1)):
        # No NaN where blocks of the usual size are empty: these longer ones have such keys in them.
        case = FlexCase(s_q=s_q, s_k=s_k, mask="causal", gap=0.0, score="head scale")
        call = backward_inputs(case, "both")
        assert call.inputs.mask is not None
        given = rawmla.create_block_mask(call.inputs.mask.python, None, None, s_q, s_k, BLOCK_SIZE=block)
        for options in ({}, IN_ORDER):
            check_backward(call, backward_of(call, block_mask=given, **options))


@pytest.mark.parametrize("mask", ("", "random"))
@pytest.mark.parametrize("h_kv", (8, 1))
def test_few_queries(h_kv: int, mask: str) -> None:
    """L 1 to 16."""
    for s_q in range(1, 17):
        case = FlexCase(
            b=3, h_q=8, h_kv=h_kv, s_q=s_q, s_k=400 + s_q, d_qk=128, d_v=128, mask=mask, score="head scale"
        )
        call = backward_inputs(case, "both")
        check_backward(call, backward_of(call))


@pytest.mark.parametrize("d", (64, 128, 256))
def test_lengths_at_borders_of_tiles(d: int) -> None:
    """Of 64 query tokens, and of 64 and 128 keys."""
    for s_q in (63, 64, 65, 127, 128, 129):
        for s_k in (1, 63, 64, 65, 127, 128, 129, 257):
            case = FlexCase(
                b=1, h_q=2, h_kv=2, s_q=s_q, s_k=s_k, d_qk=d, d_v=d, mask="random", layout="slice"
            )
            call = backward_inputs(case, "both")
            check_backward(call, backward_of(call))


@orders
@pytest.mark.parametrize("form", ("python", "cuda"))
@pytest.mark.parametrize(
    ("b", "s_q", "s_k"), ((0, 5, 7), (2, 0, 7), (2, 5, 0), (0, 0, 0), (2, 0, 0), (2, 300, 0)), ids=str
)
def test_empty_calls(b: int, s_q: int, s_k: int, form: str, options: dict[str, Any]) -> None:
    """Gradients are 0, also where there is a mask."""
    call = backward_inputs(FlexCase(b=b, s_q=s_q, s_k=s_k, score="head offset"), "both")
    mask = rawmla.create_block_mask(lambda b, h, q, k: q >= k, None, None, s_q, s_k)
    for block_mask in (None, mask):
        got = backward_of(call, form, block_mask=block_mask, **options)
        check_backward(call, got)
        assert not any(bool(x.any()) for x in (*got[:3], got[3]["offset"]))


# ---- arrays


@orders
def test_more_than_65535_heads_of_requests(options: dict[str, Any]) -> None:
    """b * h of 68,160, with lists of each request."""
    case = FlexCase(b=22720, h_q=3, h_kv=3, s_q=3, s_k=5, score="head offset", mask="padding")
    call = backward_inputs(case, "both")
    check_backward(call, backward_of(call, **options))


def test_more_than_65535_heads_without_functions() -> None:
    call = backward_inputs(FlexCase(b=22720, h_q=3, h_kv=3, s_q=3, s_k=5))
    check_backward(call, backward_of(call))


def test_many_heads_of_lists() -> None:
    """A list for each of 2 x 3,000 heads, of which K and V are one."""
    case = FlexCase(b=2, b_kv=1, h_q=3000, h_kv=1, s_q=20, s_k=300, mask="per head", block=(64, 64))
    call = backward_inputs(case)
    check_backward(call, backward_of(call))


def with_array(call: BackwardInputs, name: str, change: Any) -> BackwardInputs:
    """The call with one array laid out otherwise."""
    if name in ("q", "k", "v"):
        return replace(call, inputs=replace(call.inputs, **{name: change(getattr(call.inputs, name))}))
    if name in ("dout", "dlse"):
        return replace(
            call, gradients=replace(call.gradients, **{name: change(getattr(call.gradients, name))})
        )
    out, lse = call.results
    return replace(call, results=(change(out), lse) if name == "out" else (out, change(lse)))


def order_in_memory(x: Any) -> list[int]:
    """The dimensions, those with larger strides first."""
    return sorted(range(4), key=lambda axis: -x.stride(axis))


@pytest.mark.parametrize(
    "change",
    (*[in_order(*order) for order in ((0, 2, 1, 3), (2, 0, 1, 3), (1, 0, 2, 3), (0, 1, 3, 2))],
     at_offset, odd_rows),
    ids=("b s h d", "s b h d", "h b s d", "last not contiguous", "address", "stride"),
)  # fmt: skip
def test_layouts(change: Any) -> None:
    """Read where they lie or copied; gradients have their dimensions in the order of what they are of."""
    case = FlexCase(b=3, h_kv=2, s_q=150, s_k=200, mask="causal", score="head scale")
    call = backward_inputs(case, "both")
    want = backward_of(call, **IN_ORDER)
    check_backward(call, want)
    arrays = ("q", "k", "v", "dout", "out")
    for names in (*[(name,) for name in arrays], arrays):
        moved = call
        for name in names:
            moved = with_array(moved, name, change)
        got = backward_of(moved, **IN_ORDER)
        assert_same_gradients(got, want, all_of_them=True)
        for gradient, source in zip(got, (moved.inputs.q, moved.inputs.k, moved.inputs.v), strict=False):
            assert gradient.stride(-1) == 1
            if source.stride(-1) == 1:
                assert order_in_memory(gradient) == order_in_memory(source)


def test_layouts_of_lse_and_its_gradient() -> None:
    """Any strides."""
    call = backward_inputs(FlexCase(b=3, s_q=150, s_k=200, mask="causal"), "both")
    want = backward_of(call, **IN_ORDER)
    check_backward(call, want)

    def transposed(x: Any) -> Any:
        return x.permute(2, 0, 1).contiguous().permute(1, 2, 0)

    def every_other(x: Any) -> Any:
        whole = torch.full((*x.shape[:-1], 2 * x.shape[-1] + 1), nan, device="cuda")
        whole[..., 1::2] = x
        return whole[..., 1::2]

    for change in (transposed, every_other):
        for names in (("lse",), ("dlse",), ("lse", "dlse")):
            moved = call
            for name in names:
                moved = with_array(moved, name, change)
            assert_same_gradients(backward_of(moved, **IN_ORDER), want, all_of_them=True)


@pytest.mark.parametrize("axes", ((0,), (1,), (2,), (0, 1, 2)), ids=str)
def test_broadcast_arrays(axes: tuple[int, ...]) -> None:
    """Gradients have all elements of the shape."""
    inputs = make_flex_backward_inputs(FlexCase(b=3, s_q=150, s_k=200, mask="causal", gap=0.0))

    def first_for_all(x: Any) -> Any:
        for axis in axes:
            x = x.narrow(axis, 0, 1).expand(*[x.shape[i] if i == axis else -1 for i in range(4)])
        return x

    inputs = replace(inputs, **{name: first_for_all(getattr(inputs, name)) for name in "qkv"})
    call = with_array(backward_inputs(inputs.case, "both", inputs), "dout", first_for_all)
    got = backward_of(call, **IN_ORDER)
    checked = got
    if 2 in axes:
        # With one key for all tokens a row of dq is that key times one number, a sum that cancels; of dk it
        # is the query times one number. No error of such a row is spread over its columns.
        exact = reference_backward(call.inputs, call.gradients, call.results).rows.values[:2]
        checked = (*[x.to(got[0].dtype) for x in exact], *got[2:])
    check_backward(call, checked)
    for name in ("q", "k", "v", "dout"):
        call = with_array(call, name, lambda x: x.contiguous())
    assert_same_gradients(backward_of(call, **IN_ORDER), got, all_of_them=True)


# ---- what is not finite


@pytest.mark.parametrize("spoiler", (nan, inf, -inf), ids=str)
def test_what_functions_give_where_it_is_masked(spoiler: float) -> None:
    """Also behind the last query token and key. It goes nowhere."""
    case = FlexCase(s_q=300, s_k=277, mask="causal")
    for masked, sizes in (
        (lambda b, h, q, k: q < k, case),
        (lambda b, h, q, k: (q >= 300) | (k >= 277), replace(case, mask="")),
    ):
        call = backward_inputs(sizes, "both")

        def score(s: Any, b: Any, h: Any, q: Any, k: Any, masked: Any = masked) -> Any:
            return torch.where(masked(b, h, q, k), spoiler, s)

        check_backward(call, backward_of(call, score_mod=score))


@pytest.mark.parametrize("spoiler", (nan, inf), ids=str)
def test_a_spoilt_row(spoiler: float) -> None:
    """NaN or +inf at an attended position spoils dq of its row, and dk and dv of its head alone."""
    call = backward_inputs(FlexCase(s_q=300, s_k=500), "both")

    def gradients(number: float) -> tuple[Any, ...]:
        def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            return s + torch.where((b == 1) & (h == 2) & (q == 37) & (k == 200), number, 0.0)

        inputs = call.inputs
        results = rawmla.flex_attention(inputs.q, inputs.k, inputs.v, score, return_lse=True)
        return backward_of(replace(call, results=results), score_mod=score, **IN_ORDER)[:3]

    want, got = gradients(0.0), gradients(spoiler)
    check_backward(call, (*want, {}))
    assert bool(got[0][1, 2, 37].isnan().all())
    for name, one, wanted in zip(("dq", "dk", "dv"), got, want, strict=True):
        rows = slice(37, 38) if name == "dq" else slice(None)
        one[1, 2, rows] = wanted[1, 2, rows]
        assert_same_bits(name, one, wanted)


# ---- strides past 32 bits


@pytest.mark.parametrize("axis", (0, 1, 2))
def test_strides_past_2_31_elements(axis: int) -> None:
    """Two requests, heads or tokens, 2**31 elements apart."""
    sizes = {0: (2, 2, 100), 1: (2, 2, 100), 2: (1, 2, 2)}[axis]
    case = FlexCase(
        b=sizes[0], h_q=2, h_kv=2, s_q=sizes[2], s_k=sizes[2], d_qk=128, d_v=128, mask="causal"
    )  # fmt: skip
    call = backward_inputs(case, "both")
    room = 1 << 20
    memory = torch.full((2**31 + 6 * room,), nan, dtype=torch.bfloat16, device="cuda")
    strides = list(call.inputs.q.contiguous().stride())
    strides[axis] = 2**31
    for number, name in enumerate(("q", "k", "v", "dout", "out")):
        place = memory.as_strided(call.inputs.q.shape, strides, number * room)
        call = with_array(call, name, place.copy_)
    check_backward(call, backward_of(call))


def test_logs_with_strides_past_2_31_elements() -> None:
    """lse and its gradient, of two requests."""
    call = backward_inputs(FlexCase(b=2, h_q=2, h_kv=2, s_q=100, s_k=100, mask="causal"), "both")
    room = 1 << 20
    memory = torch.full((2**31 + 2 * room,), nan, device="cuda")
    for number, name in enumerate(("lse", "dlse")):
        place = memory.as_strided(call.results[1].shape, (2**31, 100, 1), number * room)
        call = with_array(call, name, place.copy_)
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
    dq, dk, dv, captured = backward_of(replace(at_end, inputs=inputs), form)
    assert captured["table"].shape == (rows, 512)
    assert not any(bool(part.any()) for part in captured["table"][:-read].split(1 << 18))
    check_backward(at_end, (dq, dk, dv, {"table": captured["table"][-read:].clone()}))
