"""Sparse decoding at the edges: poison, invalid indices, odd shapes, huge caches. Numbers are in
test_sparse_numbers.py.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
from gpu_support import (
    assert_same_bits,
    sparse_check,
    sparse_decode,
    torch,
)

from kit import SparseCase, SparseInputs, check_close, make_sparse_inputs, out_tolerance
from kit.sparse import INT_MAX, INT_MIN, block_fields

HEADS = (1, 2, 3, 4, 8, 9, 11, 16, 24, 32, 48, 63, 64, 66, 96, 126, 128, 192, 256)
TOPK = (1, 63, 64, 65, 128, 133, 192, 256, 512, 1024, 2048, 2051)
PAGES = (1, 2, 32, 53, 61, 64, 69, 256, 576)
KINDS: tuple[tuple[str, int | None], ...] = (("v32", None), ("model1", None), ("bf16", 576), ("bf16", 512))

EXTRA: dict[str, Any] = {"extra_s_k": 300, "extra_topk": 133, "extra_page_block_size": 2}


def kinds(test: Any) -> Any:
    """Parametrise a test by every kind of cache."""
    ids = [f"{layout}{d_qk or ''}" for layout, d_qk in KINDS]
    return pytest.mark.parametrize(("layout", "d_qk"), KINDS, ids=ids)(test)


def named(inputs: SparseInputs) -> "torch.Tensor":
    """Slots that a valid index of the main cache names; of a case without lengths."""
    slots = inputs.k_cache.shape[0] * inputs.k_cache.shape[1]
    chosen = inputs.indices[(inputs.indices >= 0) & (inputs.indices < slots)]
    return chosen.long().unique()


def assert_empty(got: tuple["torch.Tensor", "torch.Tensor"]) -> None:
    """Nothing was attended: out is 0, lse +inf."""
    out, lse = got
    assert_same_bits("out", out, torch.zeros_like(out))
    assert bool((lse == float("inf")).all())


# ---- shapes


@kinds
@pytest.mark.parametrize("h_q", HEADS)
def test_head_counts(h_q: int, layout: str, d_qk: int | None) -> None:
    for s_q in (1, 2):
        inputs = make_sparse_inputs(
            SparseCase(b=5, s_q=s_q, h_q=h_q, topk=200, layout=layout, d_qk=d_qk, sink=True, **EXTRA)
        )
        sparse_check(inputs, sparse_decode(inputs))


@kinds
@pytest.mark.parametrize("topk", TOPK)
def test_topk_and_its_lengths(topk: int, layout: str, d_qk: int | None) -> None:
    """topk_length 0, 1, topk, anything between; negative ones count as 0, larger ones as topk."""
    lengths = (0, 1, topk, topk - 1, topk // 2, -5, INT_MIN, topk + 1, INT_MAX)
    case = SparseCase(
        b=9, s_q=2, h_q=16, s_k=2100, topk=topk, layout=layout, d_qk=d_qk, lengths=lengths, index_gap=7
    )
    for changed in (case, replace(case, lengths=None, index_gap=0), replace(case, **EXTRA)):
        inputs = make_sparse_inputs(changed)
        for form in ("object", "tensors"):
            sparse_check(inputs, sparse_decode(inputs, form))


@kinds
@pytest.mark.parametrize("page_block_size", PAGES)
def test_page_sizes(page_block_size: int, layout: str, d_qk: int | None) -> None:
    """Blocks without and with space between them; an extra cache whose pages have another size."""
    for gap in (0, 1, 3):
        case = SparseCase(
            b=3,
            h_q=32,
            topk=130,
            page_block_size=page_block_size,
            layout=layout,
            d_qk=d_qk,
            block_gap=gap,
            extra_topk=70,
            extra_page_block_size=PAGES[-1] // page_block_size + 1,
        )
        inputs = make_sparse_inputs(case)
        sparse_check(inputs, sparse_decode(inputs))


@kinds
@pytest.mark.parametrize("s_q", (*range(1, 9), 16, 128))
def test_query_tokens(s_q: int, layout: str, d_qk: int | None) -> None:
    case = SparseCase(b=3, s_q=s_q, h_q=66, topk=100, layout=layout, d_qk=d_qk, empty_rows=0.2)
    inputs = make_sparse_inputs(case)
    for form in ("object", "tensors"):
        sparse_check(inputs, sparse_decode(inputs, form))


@pytest.mark.parametrize("h_q", (8, 64))
def test_65536_query_tokens_in_one_request(h_q: int) -> None:
    """An engine's mixed batch. q has 2**31 elements and more for 64 heads; a sample of tokens is compared."""
    tokens = 65536
    inputs = make_sparse_inputs(SparseCase(b=1, s_q=tokens, h_q=h_q, s_k=256, topk=64, empty_rows=0.01))
    assert inputs.q.numel() > 2**31 or h_q == 8
    out, lse = sparse_decode(inputs)
    draw = torch.Generator().manual_seed(0)
    sample = torch.cat([torch.arange(64), torch.randint(tokens, (4096,), generator=draw)])
    sample = torch.cat([sample, torch.arange(tokens - 64, tokens)]).cuda()
    chosen = replace(
        inputs,
        case=replace(inputs.case, s_q=len(sample)),
        q=inputs.q[:, sample],
        indices=inputs.indices[:, sample],
    )
    sparse_check(chosen, (out[:, sample], lse[:, :, sample]))
    assert bool(out.isfinite().all()) and not bool(lse.isnan().any())


# ---- what must not be read


@kinds
@pytest.mark.parametrize("poison", ("nan", "inf"))
@pytest.mark.parametrize("page_block_size", (2, 53, 64))
def test_poison_is_never_read(page_block_size: int, poison: str, layout: str, d_qk: int | None) -> None:
    """Unselected slots, slot 0, the last page's tail, padding between blocks and the pad bytes of scales."""
    case = SparseCase(
        b=6,
        s_q=2,
        h_q=64,
        s_k=333,
        topk=150,
        page_block_size=page_block_size,
        layout=layout,
        d_qk=d_qk,
        lengths="random",
        extra_lengths="random",
        block_gap=2,
        index_gap=3,
        empty_rows=0.2,
        poison=poison,
        **EXTRA,
    )
    poisoned, clean = make_sparse_inputs(case), make_sparse_inputs(replace(case, poison="none"))
    got, want = sparse_decode(poisoned), sparse_decode(clean)
    sparse_check(poisoned, got)
    assert_same_bits("out with and without poison", got[0], want[0])
    assert_same_bits("lse with and without poison", got[1], want[1])


@kinds
def test_slot_0(layout: str, d_qk: int | None) -> None:
    """Poisoned while nobody selects it, and a token like any other when somebody does."""
    case = SparseCase(b=2, h_q=16, s_k=64, topk=64, layout=layout, d_qk=d_qk, invalid=0.0, duplicates=0.0)
    for poisoned in (True, False):
        inputs = make_sparse_inputs(replace(case, poison_slot_0=poisoned, invalid=0.3 if poisoned else 0.0))
        assert bool((inputs.indices == 0).any()) != poisoned
        sparse_check(inputs, sparse_decode(inputs))


@kinds
def test_nan_in_a_selected_slot_stays_with_those_who_selected_it(layout: str, d_qk: int | None) -> None:
    inputs = make_sparse_inputs(SparseCase(b=5, s_q=2, h_q=16, topk=90, layout=layout, d_qk=d_qk))
    want = sparse_decode(inputs)
    slot = int(inputs.indices[1, 0][inputs.indices[1, 0] >= 0].min())
    page = inputs.case.page_block_size
    raw = inputs.k_cache.view(torch.uint8)
    rows, _ = block_fields(raw, inputs.case.format)
    rows[slot // page, slot % page] = 0xFF
    touched = (inputs.indices == slot).any(dim=2)
    out, lse = sparse_decode(inputs)
    assert bool(out[touched].isnan().all()) and bool(lse.transpose(1, 2)[touched].isnan().all())
    assert_same_bits("out of the others", out[~touched], want[0][~touched])
    lse_of = [x.transpose(1, 2)[~touched] for x in (lse, want[1])]
    assert_same_bits("lse of the others", *lse_of)


# ---- indices


@kinds
@pytest.mark.parametrize("extra", (False, True))
def test_all_indices_invalid(extra: bool, layout: str, d_qk: int | None) -> None:
    case = SparseCase(b=7, s_q=2, h_q=64, topk=130, layout=layout, d_qk=d_qk, sink=True)
    inputs = make_sparse_inputs(replace(case, **EXTRA) if extra else case)
    slots = inputs.k_cache.shape[0] * inputs.k_cache.shape[1]
    for value in (-1, -123456, INT_MIN, slots, slots + 1, INT_MAX):
        inputs.indices.fill_(value)
        if extra:
            inputs.extra_indices.fill_(-1)
        for form in ("object", "tensors"):
            assert_empty(sparse_decode(inputs, form))


@kinds
def test_rows_without_valid_indices_among_others(layout: str, d_qk: int | None) -> None:
    case = SparseCase(b=40, s_q=3, h_q=16, topk=130, layout=layout, d_qk=d_qk, empty_rows=0.5, sink=True)
    inputs = make_sparse_inputs(case)
    out, lse = sparse_decode(inputs)
    sparse_check(inputs, (out, lse))
    slots = inputs.k_cache.shape[0] * inputs.k_cache.shape[1]
    empty = ~((inputs.indices >= 0) & (inputs.indices < slots)).any(dim=2)
    assert bool(empty.any()) and not bool(empty.all())
    assert_same_bits("out of empty rows", out[empty], torch.zeros_like(out[empty]))
    assert bool((lse.transpose(1, 2)[empty] == float("inf")).all())


@kinds
@pytest.mark.parametrize("place", ("first", "last", "middle", "alternating", "first block", "last block"))
def test_valid_indices_at_one_place_only(place: str, layout: str, d_qk: int | None) -> None:
    """Everything else is invalid, in the same block of 64 or in others."""
    inputs = make_sparse_inputs(SparseCase(b=3, s_q=2, h_q=32, topk=300, layout=layout, d_qk=d_qk, invalid=0))
    position = torch.arange(300, device="cuda")
    kept = {
        "first": position == 0,
        "last": position == 299,
        "middle": (position > 100) & (position < 105),
        "alternating": position % 2 == 1,
        "first block": position < 64,
        "last block": position >= 256,
    }[place]
    slots = inputs.k_cache.shape[0] * inputs.k_cache.shape[1]
    nowhere = torch.tensor([-1, -123456, INT_MIN, slots, INT_MAX], dtype=torch.int32, device="cuda")
    inputs.indices = torch.where(kept, inputs.indices, nowhere[position % 5])
    sparse_check(inputs, sparse_decode(inputs))


@kinds
def test_duplicates(layout: str, d_qk: int | None) -> None:
    """One slot for a whole row; and every slot twice, which adds ln 2 to lse and leaves out as it is."""
    inputs = make_sparse_inputs(SparseCase(b=3, s_q=2, h_q=16, topk=128, layout=layout, d_qk=d_qk, invalid=0))
    once = replace(inputs, indices=inputs.indices[..., :64].contiguous())
    twice = replace(inputs, indices=torch.cat([once.indices, once.indices.flip(-1)], dim=-1))
    (out, lse), (twice_out, twice_lse) = sparse_decode(once), sparse_decode(twice)
    sparse_check(twice, (twice_out, twice_lse))
    check_close("out", twice_out, out, out_tolerance("bfloat16"))
    assert float((twice_lse - lse - math.log(2)).abs().max()) < 1e-5
    same = replace(inputs, indices=inputs.indices[..., :1].expand(-1, -1, 128).contiguous())
    sparse_check(same, sparse_decode(same))


def test_one_request_with_one_key() -> None:
    for layout, d_qk in KINDS:
        case = SparseCase(
            b=1, h_q=16, s_k=1, topk=1, page_block_size=1, layout=layout, d_qk=d_qk, invalid=0.0
        )
        inputs = make_sparse_inputs(case)
        for form in ("object", "tensors"):
            sparse_check(inputs, sparse_decode(inputs, form))


@kinds
@pytest.mark.parametrize("b", (1, 3, 200))
def test_every_length_zero(b: int, layout: str, d_qk: int | None) -> None:
    """A batch of padding: all parts of the plan are idle but those that write zeros."""
    zeros = (0,) * b
    case = SparseCase(b=b, s_q=2, h_q=128, topk=130, layout=layout, d_qk=d_qk, lengths=zeros, sink=True)
    for changed in (case, replace(case, extra_lengths=zeros, **EXTRA)):
        inputs = make_sparse_inputs(changed)
        for form in ("object", "tensors"):
            assert_empty(sparse_decode(inputs, form))


@kinds
def test_one_of_two_caches_is_empty(layout: str, d_qk: int | None) -> None:
    lengths = (0, 130, 0, 1, 0)
    others = (133, 0, 1, 0, 0)
    case = SparseCase(
        b=5, h_q=64, topk=130, layout=layout, d_qk=d_qk, lengths=lengths, extra_lengths=others, **EXTRA
    )
    inputs = make_sparse_inputs(case)
    for form in ("object", "tensors"):
        out, lse = sparse_decode(inputs, form)
        sparse_check(inputs, (out, lse))
        assert_empty((out[4], lse[4]))


# ---- large offsets


@pytest.mark.parametrize(("layout", "d_qk"), (("v32", None), ("model1", None), ("bf16", 576)))
def test_cache_past_2_31_bytes(layout: str, d_qk: int | None) -> None:
    """Caches of more than 4 GiB, of which tokens everywhere are selected."""
    case = SparseCase(b=8, s_q=2, h_q=128, s_k=930_000, topk=2048, layout=layout, d_qk=d_qk)
    inputs = make_sparse_inputs(case)
    nbytes = inputs.k_cache.numel() * inputs.k_cache.element_size()
    assert nbytes > 2**32
    assert int(named(inputs).max()) * case.format.token_bytes > 2**32 - 2**28
    sparse_check(inputs, sparse_decode(inputs))


def test_block_stride_times_block_past_2_31() -> None:
    """A block stride of 1,039,680 bytes; blocks from 2,066 on begin past 2**31 bytes."""
    case = SparseCase(
        b=8,
        h_q=64,
        s_k=66_560,
        topk=1000,
        page_block_size=256,
        layout="model1",
        block_gap=1 + 1_039_680 // 576 - -(-256 * 584 // 576),
    )
    inputs = make_sparse_inputs(case)
    assert inputs.k_cache.stride(0) == 1_039_680
    assert bool((named(inputs) // 256 >= 2066).any())
    sparse_check(inputs, sparse_decode(inputs))


# ---- arrays


@pytest.mark.parametrize("layout", ("v32", "model1"))
@pytest.mark.parametrize("dtype", ("int8", "float8_e4m3fn"))
def test_dtypes_of_the_cache(dtype: str, layout: str) -> None:
    inputs = make_sparse_inputs(SparseCase(b=4, h_q=64, topk=200, layout=layout, block_gap=1, **EXTRA))
    want = sparse_decode(inputs)
    sparse_check(inputs, want)
    kind = getattr(torch, dtype)
    seen = replace(inputs, k_cache=inputs.k_cache.view(kind), extra_k_cache=inputs.extra_k_cache.view(kind))
    got = sparse_decode(seen)
    assert_same_bits("out", got[0], want[0])
    assert_same_bits("lse", got[1], want[1])


@pytest.mark.parametrize("layout", ("v32", "model1"))
def test_cache_at_an_address_that_is_a_multiple_of_8(layout: str) -> None:
    inputs = make_sparse_inputs(SparseCase(b=4, h_q=64, topk=200, page_block_size=53, layout=layout))
    want = sparse_decode(inputs)
    stride, count = inputs.k_cache.stride(0), inputs.k_cache.numel()
    assert stride == 53 * inputs.k_cache.shape[3]
    storage = torch.full((count + 8,), 0xFF, dtype=torch.uint8, device="cuda")
    storage[8:] = inputs.k_cache.reshape(-1)
    moved = replace(inputs, k_cache=storage[8:].view(inputs.k_cache.shape))
    got = sparse_decode(moved)
    sparse_check(inputs, got)
    assert_same_bits("out", got[0], want[0])


@pytest.mark.parametrize("what", ("cache", "extra cache"))
def test_bf16_cache_with_a_huge_token_stride(what: str) -> None:
    """A block of two tokens 2**32 bytes and more apart: refused, since a kernel keeps this stride in 32 bits.

    torch asks for all the memory in between; it is allocated and never written.
    """
    case = SparseCase(b=2, h_q=64, s_k=2, topk=2, page_block_size=2, layout="bf16", d_qk=512)
    inputs = make_sparse_inputs(replace(case, extra_s_k=2, extra_topk=2, extra_page_block_size=2))
    stride = 2**31 + 8
    storage = torch.empty(stride + 512, dtype=torch.bfloat16, device="cuda")
    apart = storage.as_strided((1, 2, 1, 512), (2 * stride, stride, 512, 1))
    name = "k_cache" if what == "cache" else "extra_k_cache"
    memory = torch.cuda.memory_allocated()
    with pytest.raises(ValueError, match=f"^{name}: "):
        sparse_decode(replace(inputs, **{name: apart}))
    assert torch.cuda.memory_allocated() == memory
    del storage, apart
    torch.cuda.empty_cache()
