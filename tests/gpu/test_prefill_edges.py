"""Prefill at the edges: indices, lengths, rows that overlap, FP8 caches. Numbers are in
test_prefill_numbers.py.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
from gpu_support import (
    assert_same_bits,
    prefill,
    prefill_check,
    torch,
    united_selections,
)

from kit import (
    SparseCase,
    SparseInputs,
    check_close,
    make_sparse_inputs,
    prefill_out_tolerance,
)
from kit.sparse import INT_MAX, INT_MIN, block_fields

KINDS: tuple[dict[str, Any], ...] = (
    {"layout": "bf16", "d_qk": 576, "page_block_size": 1},
    {"layout": "bf16", "d_qk": 512, "page_block_size": 1},
    {"layout": "v32", "page_block_size": 53, "power_of_two_scales": True},
    {"layout": "model1", "page_block_size": 61},
)
HEADS = (1, 3, 16, 17, 63, 64, 65, 126, 128, 130, 200)
NAMES = ("out", "max_logits", "lse")


def kinds(test: Any) -> Any:
    """Parametrise a test by every kind of kv."""
    ids = [f"{kind['layout']}{kind.get('d_qk', '')}" for kind in KINDS]
    return pytest.mark.parametrize("kind", KINDS, ids=ids)(test)


def make(kind: dict[str, Any], **changes: Any) -> SparseInputs:
    """Inputs for query tokens that select from the same tokens of a kind of kv."""
    return make_sparse_inputs(SparseCase(**{"shared": True, **kind, **changes}))


def slots_of(inputs: SparseInputs) -> int:
    """Rows of kv, or slots of the cache."""
    return inputs.k_cache.shape[0] * inputs.k_cache.shape[1]


def assert_all_same_bits(text: str, got: Any, want: Any) -> None:
    """All three results have the same bits."""
    for name, one, wanted in zip(NAMES, got, want, strict=True):
        assert_same_bits(f"{name}, {text}", one, wanted)


def assert_empty(got: Any, rows: Any = slice(None)) -> None:
    """Nothing was attended: out is 0, max_logits -inf, lse +inf."""
    out, max_logits, lse = (x[rows] for x in got)
    assert_same_bits("out of empty rows", out, torch.zeros_like(out))
    assert bool((max_logits == -math.inf).all()) and bool((lse == math.inf).all())


# ---- shapes


@kinds
@pytest.mark.parametrize("h_q", HEADS)
def test_head_counts(h_q: int, kind: dict[str, Any]) -> None:
    """Few tokens, whose work is split, and many, whose work is not."""
    for b, topk in ((3, 200), (2, 3000), (150, 100)):
        inputs = make(kind, b=b, h_q=h_q, s_k=3000, topk=topk, sink=True)
        prefill_check(inputs, prefill(inputs))


@kinds
@pytest.mark.parametrize("topk", (1, 63, 64, 65, 133, 2051))
def test_topk_and_its_lengths(topk: int, kind: dict[str, Any]) -> None:
    """topk_length 0, 1, topk, anything between; negative ones count as 0, larger ones as topk."""
    lengths = (0, 1, topk, topk - 1, topk // 2, -5, INT_MIN, topk + 1, INT_MAX)
    for gap in (0, 7):
        inputs = make(kind, b=9, h_q=16, s_k=2100, topk=topk, lengths=lengths, index_gap=gap)
        got = prefill(inputs)
        prefill_check(inputs, got)
        assert_empty(got, [0, 5, 6])


@kinds
def test_every_length_zero(kind: dict[str, Any]) -> None:
    for b in (1, 200):
        inputs = make(kind, b=b, h_q=70, topk=130, lengths=(0,) * b, sink=True)
        assert_empty(prefill(inputs))


# ---- what must not be read


@kinds
@pytest.mark.parametrize("poison", ("nan", "inf"))
def test_poison_is_never_read(poison: str, kind: dict[str, Any]) -> None:
    """Rows that nobody selected, row 0 among them, space between rows or blocks, indices past the length."""
    changes: dict[str, Any] = {"b": 40, "h_q": 66, "s_k": 333, "topk": 150, "lengths": "random"}
    changes |= {"block_gap": 2, "index_gap": 3, "empty_rows": 0.2}
    poisoned = make(kind, poison=poison, **changes)
    got, want = prefill(poisoned), prefill(make(kind, poison="none", **changes))
    prefill_check(poisoned, got)
    assert_all_same_bits("with and without poison", got, want)


@kinds
@pytest.mark.parametrize("h_q", (8, 16, 64))
@pytest.mark.parametrize("b", (3, 200, 600))
def test_nan_in_a_selected_row_stays_with_those_who_selected_it(
    b: int, h_q: int, kind: dict[str, Any]
) -> None:
    inputs = make(kind, b=b, h_q=h_q, s_k=1400, topk=90)
    want = prefill(inputs)
    slot = int(inputs.indices[1, 0][inputs.indices[1, 0] >= 0].min())
    page = inputs.case.page_block_size
    rows, _ = block_fields(inputs.k_cache.view(torch.uint8), inputs.case.format)
    rows[slot // page, slot % page] = 0xFF
    touched = (inputs.indices[:, 0] == slot).any(dim=1)
    got = prefill(inputs)
    assert bool(touched.any()) and not bool(touched.all())
    assert all(bool(x[touched].isnan().all()) for x in got)
    assert_all_same_bits("of the others", [x[~touched] for x in got], [x[~touched] for x in want])


# ---- indices


@kinds
def test_all_indices_invalid(kind: dict[str, Any]) -> None:
    for b in (2, 200):
        inputs = make(kind, b=b, h_q=64, topk=330, sink=True)
        slots = slots_of(inputs)
        for value in (-1, -123456, INT_MIN, slots, slots + 1, INT_MAX):
            inputs.indices.fill_(value)
            assert_empty(prefill(inputs))


@kinds
def test_rows_without_valid_indices_among_others(kind: dict[str, Any]) -> None:
    for b in (5, 200):
        inputs = make(kind, b=b, h_q=17, s_k=700, topk=330, empty_rows=0.5, sink=True)
        got = prefill(inputs)
        prefill_check(inputs, got)
        valid = (inputs.indices >= 0) & (inputs.indices < slots_of(inputs))
        empty = ~valid.any(dim=2)[:, 0]
        assert bool(empty.any()) and not bool(empty.all())
        assert_empty(got, empty)


@kinds
@pytest.mark.parametrize("place", ("first", "last", "middle", "alternating", "first block", "last block"))
def test_valid_indices_at_one_place_only(place: str, kind: dict[str, Any]) -> None:
    """Everything else is invalid, in the same block of 64 or in others; whole splits have no valid index."""
    inputs = make(kind, b=3, h_q=32, topk=300, invalid=0.0)
    position = torch.arange(300, device="cuda")
    kept = {
        "first": position == 0,
        "last": position == 299,
        "middle": (position > 100) & (position < 105),
        "alternating": position % 2 == 1,
        "first block": position < 64,
        "last block": position >= 256,
    }[place]
    nowhere = torch.tensor([-1, -123456, INT_MIN, slots_of(inputs), INT_MAX], device="cuda")
    inputs.indices = torch.where(kept, inputs.indices, nowhere.int()[position % 5])
    prefill_check(inputs, prefill(inputs))


@kinds
def test_duplicates(kind: dict[str, Any]) -> None:
    """One row for all indices; and every row twice, which adds 1 to lse and leaves the others as they are."""
    inputs = make(kind, b=3, h_q=16, topk=128, invalid=0.0)
    once = replace(inputs, indices=inputs.indices[..., :64].contiguous())
    twice = replace(inputs, indices=torch.cat([once.indices, once.indices.flip(-1)], dim=-1))
    (out, max_logits, lse), got = prefill(once), prefill(twice)
    prefill_check(twice, got)
    check_close("out", got[0], out, prefill_out_tolerance())
    assert_same_bits("max_logits", got[1], max_logits)
    assert float((got[2] - lse - 1.0).abs().max()) < 1e-5
    same = replace(inputs, indices=inputs.indices[..., :1].expand(-1, -1, 128).contiguous())
    got = prefill(same)
    prefill_check(same, got)
    assert float((got[2] - got[1] - 7.0).abs().max()) < 1e-5


# ---- tokens that share the rows of a tile


@pytest.mark.parametrize("h_q", (8, 16, 32))
@pytest.mark.parametrize(("s_q", "s_k", "topk"), ((512, 300, 100), (1025, 4700, 300), (2047, 19000, 1200)))
@pytest.mark.parametrize("d_qk", (576, 512))
def test_united_selections(d_qk: int, s_q: int, s_k: int, topk: int, h_q: int) -> None:
    inputs = make(
        {"layout": "bf16", "d_qk": d_qk, "page_block_size": 1},
        b=s_q, h_q=h_q, s_k=s_k, topk=topk, lengths="random", sink=True, empty_rows=0.1, index_gap=3,
    )  # fmt: skip
    got = prefill(inputs)
    prefill_check(inputs, got)
    for name, one, again in zip(NAMES, got, prefill(inputs), strict=True):
        assert_same_bits(name, one, again)


@pytest.mark.parametrize("h_q", (8, 32))
def test_united_duplicates(h_q: int) -> None:
    """Rows that a token selects many times, and others of its group once or not at all."""
    inputs = make(KINDS[0], b=515, h_q=h_q, s_k=500, topk=150, invalid=0.0)
    token = torch.arange(515, device="cuda")
    inputs.indices[token % 3 == 0] = inputs.indices[token % 3 == 0][..., :1]
    inputs.indices[token % 3 == 1, :, 70:] = inputs.indices[token % 3 == 1, :, :80]
    got = prefill(inputs)
    prefill_check(inputs, got)
    for name, one, again in zip(NAMES, got, prefill(inputs), strict=True):
        assert_same_bits(name, one, again)


def test_united_selections_in_chunks() -> None:
    """Groups that scratch has no room for at once are attended one chunk after the other."""
    inputs = make(KINDS[0], b=1023, h_q=16, s_k=1000, topk=190, lengths="random", sink=True)
    with united_selections(scratch_bytes=1 << 20):
        prefill_check(inputs, prefill(inputs))


# ---- arrays


def test_one_row_of_indices_for_all_tokens() -> None:
    inputs = make(KINDS[0], b=9, h_q=16, topk=133)
    shared = inputs.indices[:1].expand(9, -1, -1)
    prefill_check(replace(inputs, indices=shared), prefill(replace(inputs, indices=shared)))


@pytest.mark.parametrize("stride", (0, 8, 64, 568))
def test_rows_of_kv_that_overlap(stride: int) -> None:
    """Windows of one long row."""
    inputs = make(KINDS[0], b=5, h_q=64, s_k=300, topk=200)
    rows = slots_of(inputs)
    flat = torch.randn(stride * rows + 576, device="cuda").mul(0.1).bfloat16()
    windows = replace(inputs, k_cache=flat.as_strided((rows, 1, 1, 576), (stride, stride, 576, 1)))
    apart = replace(inputs, k_cache=windows.k_cache.contiguous())
    got = prefill(windows)
    prefill_check(apart, got)
    assert_all_same_bits("overlapping", got, prefill(apart))


@pytest.mark.parametrize("layout", ("v32", "model1"))
@pytest.mark.parametrize("page_block_size", (1, 2, 53, 64, 69, 576))
def test_pages_of_fp8_caches(page_block_size: int, layout: str) -> None:
    """Blocks without and with space between them, and an address that is a multiple of 8 alone."""
    for h_q, gap in ((16, 0), (16, 1), (66, 0), (66, 3)):
        kind = {"layout": layout, "page_block_size": page_block_size}
        inputs = make(kind, b=9, h_q=h_q, s_k=700, topk=330, block_gap=gap, lengths="random")
        want = prefill(inputs)
        prefill_check(inputs, want)
        if gap == 0:
            count = inputs.k_cache.numel()
            storage = torch.full((count + 8,), 0xFF, dtype=torch.uint8, device="cuda")
            storage[8:] = inputs.k_cache.reshape(-1)
            moved = replace(inputs, k_cache=storage[8:].view(inputs.k_cache.shape))
            assert_all_same_bits("moved", prefill(moved), want)
        for dtype in (torch.int8, torch.float8_e4m3fn):
            seen = replace(inputs, k_cache=inputs.k_cache.view(dtype))
            assert_all_same_bits(str(dtype), prefill(seen), want)


def test_kv_past_2_31_elements() -> None:
    """Offsets are 64-bit: the last rows of 5 GiB."""
    rows = 2**31 // 512 + 1000
    inputs = make(KINDS[1], b=7, h_q=64, s_k=800, topk=300)
    kv = torch.full((rows, 1, 1, 512), float("nan"), dtype=torch.bfloat16, device="cuda")
    first = rows - slots_of(inputs)
    kv[first:] = inputs.k_cache
    valid = (inputs.indices >= 0) & (inputs.indices < slots_of(inputs))
    want = prefill(inputs)
    moved = replace(inputs, k_cache=kv, indices=torch.where(valid, inputs.indices + first, -1))
    assert_all_same_bits("at the end", prefill(moved), want)
