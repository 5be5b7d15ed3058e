"""Sparse decoding and prefill at the edges: shapes, lengths, indices, poison, huge arrays.

Numbers are in test_sparse_numbers.py.
"""

import random
from dataclasses import replace
from typing import Any

import pytest
from full_cases import full_unless
from gpu_support import poison, torch
from sparse_kinds import (
    BF16_512,
    DECODE,
    KINDS,
    PREFILL,
    Kind,
    for_kinds,
    named,
    slots_of,
    valid,
)

from kit.sparse import INT_MAX, INT_MIN, block_fields

HEADS = (1, 3, 8, 9, 16, 17, 32, 33, 63, 64, 65, 66, 96, 128, 130, 192, 256)
TOPK = (1, 63, 64, 65, 2051)
PAGES = (1, 2, 53, 64, 69, 576)
EXTRA: dict[str, Any] = {"extra_s_k": 300, "extra_topk": 133, "extra_page_block_size": 2}
BF16_PREFILL = [kind for kind in PREFILL if not kind.fp8]
ROWS = BF16_PREFILL[0]
DECODE_KIND = DECODE[0]
# Few tokens, whose work is split, and many, whose work is not.
SIZES = ({"b": 2, "s_k": 3000, "topk": 3000}, {"b": 3, "topk": 200}, {"b": 150, "topk": 100})

# (requests or tokens, tokens of the cache, topk)
COMBINED_SIZES = (
    (1, 4321, 4096),
    (1, 64, 8192),
    (4, 1521, 2048),
    (4, 32, 384),
    (74, 650, 576),
    (74, 114, 64),
    (213, 300, 100),
    (321, 592, 128),
    (1024, 95, 128),
)


def extra_for(kind: Kind) -> dict[str, Any]:
    """An extra cache, where the call takes one."""
    return {} if kind.prefill else EXTRA


# ---- shapes


@for_kinds()
def test_head_counts(kind: Kind) -> None:
    for h_q in HEADS:
        if kind.clusters and h_q <= 64:  # they reach the kernel of another kind
            continue
        for size in SIZES:
            kind.checked(kind.make(h_q=h_q, sink=True, **size))
        kind.checked(kind.make(b=5, h_q=h_q, topk=200, sink=True, **extra_for(kind)))


@for_kinds()
@pytest.mark.parametrize("topk", TOPK)
def test_topk_and_its_lengths(topk: int, kind: Kind) -> None:
    """topk_length 0, 1, topk, anything between; negative ones count as 0, larger ones as topk."""
    lengths = (0, 1, topk, topk - 1, topk // 2, -5, INT_MIN, topk + 1, INT_MAX)
    shape = {"b": 9, "s_k": 2100, "topk": topk}
    options: tuple[dict[str, Any], ...] = (
        {"lengths": lengths},
        {"lengths": lengths, "index_gap": 7, **extra_for(kind)},
        {},
    )
    for option in options:
        inputs = kind.make(**shape, **option)
        for form in kind.forms:
            got = kind.checked(inputs, form=form)
            if "extra_topk" not in option and "lengths" in option:
                kind.assert_empty(got, [0, 5, 6])


@for_kinds([kind for kind in KINDS if kind.fp8 or not kind.prefill])
@pytest.mark.parametrize("page", PAGES)
def test_page_sizes(page: int, kind: Kind) -> None:
    """Blocks without and with space between them, and a cache whose address is a multiple of 8 alone."""
    changes: dict[str, Any] = {"b": 3, "topk": 130, "page_block_size": page, "lengths": "random"}
    if not kind.prefill:
        changes |= {"extra_topk": 70, "extra_page_block_size": PAGES[-1] // page + 1}
    for gap in (0, 1):
        inputs = kind.make(**{**changes, "block_gap": gap})
        want = kind.checked(inputs)
        if kind.fp8 and gap == 0:
            storage = torch.full((inputs.k_cache.numel() + 8,), 0xFF, dtype=torch.uint8, device="cuda")
            storage[8:] = inputs.k_cache.reshape(-1)
            moved = replace(inputs, k_cache=storage[8:].view(inputs.k_cache.shape))
            kind.assert_bits("moved", kind.run(moved), want)


@pytest.mark.parametrize("h_q", (8, 64))
def test_65536_query_tokens_in_one_request(h_q: int) -> None:
    """A mixed batch of an engine. With 64 heads q has more than 2**31 elements. A sample is compared."""
    tokens = 65536
    inputs = DECODE_KIND.make(b=1, s_q=tokens, h_q=h_q, s_k=256, topk=64, empty_rows=0.01)
    assert inputs.q.numel() > 2**31 or h_q == 8
    out, lse = DECODE_KIND.run(inputs)
    draw = torch.Generator().manual_seed(0)
    sample = torch.cat([torch.arange(64), torch.randint(tokens, (4096,), generator=draw)])
    sample = torch.cat([sample, torch.arange(tokens - 64, tokens)]).cuda()
    chosen = replace(
        inputs,
        case=replace(inputs.case, s_q=len(sample)),
        q=inputs.q[:, sample],
        indices=inputs.indices[:, sample],
    )
    DECODE_KIND.check(chosen, (out[:, sample], lse[:, :, sample]))
    assert bool(out.isfinite().all()) and not bool(lse.isnan().any())


@pytest.mark.parametrize(("tokens", "h_q", "topk"), ((70_000, 5, 130), (16_385, 64, 100)))
def test_more_tokens_of_prefill_than_a_plan_takes(tokens: int, h_q: int, topk: int) -> None:
    """Tokens at the seams between plans and a sample of the others are compared."""
    inputs = ROWS.make(
        b=tokens, h_q=h_q, s_k=2 * topk, topk=topk, lengths="random", empty_rows=0.01, sink=True
    )
    got = ROWS.run(inputs)
    seams = torch.arange(0, tokens, -(-tokens // -(-tokens // 16384)))
    draw = torch.Generator().manual_seed(0)
    sample = torch.cat(
        [seams, seams - 1, torch.tensor([tokens - 1]), torch.randint(tokens, (4096,), generator=draw)]
    )
    sample = sample.clamp(min=0).cuda()
    chosen = replace(
        inputs,
        case=replace(inputs.case, b=len(sample)),
        q=inputs.q[sample],
        indices=inputs.indices[sample],
        topk_length=inputs.topk_length[sample],
    )
    ROWS.check(chosen, tuple(x[sample] for x in got))
    assert bool(got[0].isfinite().all()) and not any(bool(x.isnan().any()) for x in got[1:])


@for_kinds()
@pytest.mark.parametrize("seed", full_unless(lambda seed: seed < 2, range(16)))
def test_random_combinations(seed: int, kind: Kind) -> None:
    """Sizes and options that occur together; an `out` that is given holds NaN before."""
    draw = random.Random(seed)
    heads = [h for h in HEADS if not kind.clusters or h > 64]
    for number in range(24):
        b, s_k, topk = draw.choice(COMBINED_SIZES)
        s_q, limited, gap = (draw.choice(x) for x in ((1, 3), (0, 1), (0, 1)))
        case: dict[str, Any] = {
            "b": b,
            "h_q": draw.choice(heads),
            "s_k": s_k,
            "topk": topk,
            "lengths": "random" if limited else None,
            "sink": draw.random() < 0.5,
            "sharp": draw.random() < 0.3 and b < 100,
            "empty_rows": 0.02,
            "block_gap": gap,
            "index_gap": gap,
            "power_of_two_scales": True,
            "seed": number,
        }
        if not kind.prefill:
            case |= {"s_q": s_q, "page_block_size": draw.choice(PAGES)}
        if not kind.prefill and draw.random() < 0.5:
            case |= {**EXTRA, "extra_topk": draw.choice((33, 64, 512)), "extra_lengths": case["lengths"]}
        inputs = kind.make(**case)
        out = torch.full_like(inputs.q[..., :512], float("nan")) if gap else None
        out = out[:, 0] if kind.prefill and gap else out
        with poison(s_q == 1):  # without it, plan and attention overlap
            got = kind.run(inputs, form=draw.choice(kind.forms), out=out)
        kind.check(inputs, got)


# ---- what must not be read


@for_kinds()
@pytest.mark.parametrize("poison", ("nan", "inf"))
def test_poison_is_never_read(poison: str, kind: Kind) -> None:
    """Unselected slots, slot 0, the last page's tail, padding between blocks, the pad bytes of scales, and
    indices past the length.
    """
    changes: dict[str, Any] = {"b": 40, "s_k": 333, "topk": 150, "lengths": "random"}
    changes |= {"block_gap": 2, "index_gap": 3, "empty_rows": 0.2}
    if not kind.prefill:
        changes |= {"s_q": 2, "extra_lengths": "random", "page_block_size": 53, **EXTRA}
    got = kind.checked(kind.make(poison=poison, **changes))
    kind.assert_bits("with and without poison", got, kind.run(kind.make(poison="none", **changes)))


@for_kinds()
@pytest.mark.parametrize("b", (5, 600))
def test_nan_in_a_selected_slot_stays_with_those_who_selected_it(b: int, kind: Kind) -> None:
    inputs = kind.make(b=b, s_k=1400, topk=90)
    want = kind.run(inputs)
    slot = int(inputs.indices[1, 0][inputs.indices[1, 0] >= 0].min())
    page = inputs.case.page_block_size
    rows, _ = block_fields(inputs.k_cache.view(torch.uint8), inputs.case.format)
    rows[slot // page, slot % page] = 0xFF
    touched = (inputs.indices == slot).any(dim=2).flatten()
    got, others = kind.by_token(kind.run(inputs)), [x[~touched] for x in kind.by_token(want)]
    assert bool(touched.any()) and not bool(touched.all())
    assert all(bool(x[touched].isnan().all()) for x in got)
    kind.assert_bits("of the others", [x[~touched] for x in got], others)


# ---- indices


@for_kinds()
def test_all_indices_invalid(kind: Kind) -> None:
    """And every length zero, as in a batch of padding: of the plan those alone work that write zeros."""
    for changes in ({"b": 7}, {"b": 200}, {"b": 7, **extra_for(kind)}):
        inputs = kind.make(topk=330, sink=True, **changes)
        slots = slots_of(inputs)
        for value in (-1, -123456, INT_MIN, slots, slots + 1, INT_MAX):
            inputs.indices.fill_(value)
            if inputs.extra_indices is not None:
                inputs.extra_indices.fill_(-1)
            for form in kind.forms:
                kind.assert_empty(kind.run(inputs, form=form))
    for b in (1, 200):
        zeros = (0,) * b
        extra = {} if kind.prefill else {"extra_lengths": zeros, **EXTRA}
        inputs = kind.make(b=b, topk=130, lengths=zeros, sink=True, **extra)
        for form in kind.forms:
            kind.assert_empty(kind.run(inputs, form=form))


@for_kinds()
def test_valid_indices_at_one_place_only(kind: Kind) -> None:
    """Everything else is invalid, in the same block of 64 or in others; whole splits have no valid index."""
    inputs = kind.make(b=3, topk=300, invalid=0.0)
    position = torch.arange(300, device="cuda")
    nowhere = torch.tensor([-1, -123456, INT_MIN, slots_of(inputs), INT_MAX], device="cuda")
    for kept in (position == 0, position == 299, position % 2 == 1, position < 64, position >= 256):
        indices = torch.where(kept, inputs.indices, nowhere.int()[position % 5])
        kind.checked(replace(inputs, indices=indices))


# ---- tokens that share the rows of a tile


@pytest.mark.parametrize("h_q", (8, 16, 32))
@for_kinds(BF16_PREFILL)
def test_united_selections(kind: Kind, h_q: int) -> None:
    """Also of rows that a token selects many times, and others of its group once or not at all."""
    for tokens, s_k, topk in ((512, 300, 100), (2047, 19000, 1200)):
        shape = {"b": tokens, "h_q": h_q, "s_k": s_k, "topk": topk}
        inputs = kind.make(**shape, lengths="random", sink=True, empty_rows=0.1, index_gap=3)
        kind.assert_bits("again", kind.checked(inputs), kind.run(inputs))
    inputs = kind.make(b=515, h_q=h_q, s_k=500, topk=150, invalid=0.0)
    token = torch.arange(515, device="cuda")
    inputs.indices[token % 3 == 0] = inputs.indices[token % 3 == 0][..., :1]
    inputs.indices[token % 3 == 1, :, 70:] = inputs.indices[token % 3 == 1, :, :80]
    kind.assert_bits("duplicates, again", kind.checked(inputs), kind.run(inputs))


# ---- arrays


@for_kinds([kind for kind in DECODE if kind.cache is not BF16_512])
def test_cache_past_2_31_bytes(kind: Kind) -> None:
    """Caches of more than 4 GiB, of which tokens everywhere are selected."""
    inputs = kind.make(b=8, s_q=2, s_k=930_000, topk=2048)
    assert inputs.k_cache.numel() * inputs.k_cache.element_size() > 2**32
    assert int(named(inputs).max()) * inputs.case.format.token_bytes > 2**32 - 2**28
    kind.checked(inputs)


def test_kv_past_2_31_elements() -> None:
    """Offsets are 64-bit: the last rows of 5 GiB."""
    kind = BF16_PREFILL[1]
    inputs = kind.make(b=7, h_q=64, s_k=800, topk=300)
    rows = 2**31 // 512 + 1000
    kv = torch.full((rows, 1, 1, 512), float("nan"), dtype=torch.bfloat16, device="cuda")
    first = rows - slots_of(inputs)
    kv[first:] = inputs.k_cache
    moved = replace(inputs, k_cache=kv, indices=torch.where(valid(inputs), inputs.indices + first, -1))
    kind.assert_bits("at the end", kind.run(moved), kind.checked(inputs))
