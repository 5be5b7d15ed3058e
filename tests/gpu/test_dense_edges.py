"""Dense decoding at the edges: empty requests, huge caches, poison, shapes, scores, calls that overlap."""

import math
from dataclasses import replace
from typing import Any

import pytest
from full_cases import full_unless
from gpu_support import assert_same_bits, torch

import rawmla
from kit import DenseCase, make_dense_inputs
from operations.mla_decode import call_arguments, check, decode, plan, reference

FORMS = ("object", "tensors")
ZERO_LENGTHS: dict[str, Any] = {"varlen": True, "zero_lengths": True}
TILE_ROWS: dict[str, Any] = {"b": 5, "s_k": 900, "page_block_size": 32, "varlen": True, "causal": True}
EDGE_CASES = (
    DenseCase(b=4, s_q=4, h_q=16, lengths=(0, 1, 3, 5), causal=True),
    DenseCase(b=5, s_q=5, h_q=128, lengths=(64, 2, 65, 0, 127), causal=True, sharp=True),
    DenseCase(b=2, s_q=128, h_q=16, lengths=(100, 777), causal=True),
    DenseCase(b=3, s_q=2, h_q=8, lengths=(63, 64, 65), page_block_size=32),
    DenseCase(b=3, h_q=64, lengths=(127, 128, 129), page_block_size=128),
    DenseCase(b=2, h_q=256, s_k=1000),
    DenseCase(b=2, s_q=2, h_q=96, h_kv=3, s_k=1000, causal=True, sharp=True),
    DenseCase(b=7, s_q=2, h_q=32, h_kv=2, s_k=600, varlen=True, block_gap=64, table_gap=1, dtype="float16"),
    DenseCase(b=4, h_q=128, s_k=2000, varlen=True, page_block_size=16, block_gap=1, sharp=True),
    DenseCase(b=1, h_q=16, s_k=131072, d_qk=512, dtype="float16", sharp=True),
    DenseCase(b=70, h_q=33, s_k=2000, **ZERO_LENGTHS, sharp=True),
    DenseCase(b=128, h_q=128, s_k=4096, **ZERO_LENGTHS, causal=True),
    # A tile has 16 query rows of a KV head: one less and more, of one token or of several.
    *(
        DenseCase(s_q=s_q, h_q=h_q, h_kv=h_kv, **TILE_ROWS)
        for s_q, h_q, h_kv in ((1, 15, 1), (2, 16, 2), (1, 17, 1), (2, 32, 2), (3, 5, 1), (3, 11, 1))
    ),
    *(DenseCase(b=b, h_q=128, lengths=(0,) * b) for b in (1, 3, 200)),
)


@pytest.mark.parametrize("case", EDGE_CASES, ids=lambda case: case.id)
def test_edge_case(case: DenseCase) -> None:
    """Requests without a token have out 0 and lse +inf."""
    inputs = make_dense_inputs(case)
    empty = [i for i, length in enumerate(inputs.lengths) if length == 0]
    for form in FORMS:
        out, lse = decode(inputs, form)
        check(inputs, (out, lse))
        assert_same_bits("out of empty requests", out[empty], torch.zeros_like(out[empty]))
        assert bool((lse[empty] == float("inf")).all())


@pytest.mark.parametrize("gap", (0, 8))
def test_cache_past_2_31_elements(gap: int) -> None:
    """The live pages lie at both ends of a cache of more than 2**31 elements (4 GiB), the rest is poison."""
    case = DenseCase(b=6, s_q=2, h_q=128, s_k=3000, varlen=True, causal=True, block_gap=gap)
    small = make_dense_inputs(case)
    live = small.k_cache.shape[0]
    num_blocks = 2**31 // (64 * 576) + 2 * live
    storage = torch.full((num_blocks, 64 + gap, 1, 576), float("nan"), dtype=torch.bfloat16, device="cuda")
    assert storage.numel() > 2**31
    k_cache = storage[:, :64]
    half = live // 2
    k_cache[:half] = small.k_cache[:half]
    shift = num_blocks - live
    k_cache[half + shift :] = small.k_cache[half:]
    table = small.block_table
    moved = torch.where((table >= half) & (table < live), table + shift, table)
    large = replace(small, k_cache=k_cache, block_table=moved.int())
    check(large, decode(large))


@pytest.mark.parametrize("poison", ("nan", "inf"))
@pytest.mark.parametrize("page_block_size", (16, 64, 256))
@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_poison_is_never_read(dtype: str, page_block_size: int, poison: str) -> None:
    case = DenseCase(
        b=9,
        s_q=2,
        h_q=64,
        lengths=(1, 15, 16, 17, 63, 64, 65, 250, 700),
        page_block_size=page_block_size,
        dtype=dtype,
        block_gap=32,
        table_gap=3,
    )
    for causal in (False, True):
        poisoned = make_dense_inputs(replace(case, causal=causal, poison=poison))
        got, want = decode(poisoned), decode(make_dense_inputs(replace(case, causal=causal, poison="none")))
        check(poisoned, got)
        assert_same_bits(f"{case.id} out with and without poison", got[0], want[0])
        assert_same_bits(f"{case.id} lse with and without poison", got[1], want[1])


@pytest.mark.parametrize("h_q", (16, 128), ids=("few_rows", "tile"))
def test_nan_stays_in_its_request_and_with_those_who_see_it(h_q: int) -> None:
    """In a token that all see; then in one column of V of the newest token. By causality only the last query
    token sees it. That column is NaN for the others too, since 0 times NaN is NaN; nothing else changes.
    """
    inputs = make_dense_inputs(DenseCase(b=5, h_q=h_q, lengths=(700, 650, 1, 64, 900)))
    want, want_lse = decode(inputs)
    inputs.k_cache[int(inputs.block_table[1, 5]), 3] = float("nan")
    out, lse = decode(inputs)
    assert bool(out[1].isnan().all()) and bool(lse[1].isnan().all())
    others = [0, 2, 3, 4]
    assert_same_bits("other requests' out", out[others], want[others])
    assert_same_bits("other requests' lse", lse[others], want_lse[others])

    inputs = make_dense_inputs(DenseCase(b=2, s_q=3, h_q=h_q, lengths=(70, 200), causal=True))
    want, want_lse = decode(inputs)
    page, row = divmod(69, inputs.case.page_block_size)
    inputs.k_cache[inputs.block_table[0, page].long(), row, :, 5] = float("nan")
    out, lse = decode(inputs)
    columns = [column for column in range(512) if column != 5]
    assert_same_bits("older query tokens", out[0, :2][..., columns], want[0, :2][..., columns])
    assert_same_bits("their lse", lse[0, :, :2], want_lse[0, :, :2])
    assert bool(out[0, 2].isnan().all()) and bool(out[0, :2, :, 5].isnan().all())
    assert_same_bits("the other request", out[1], want[1])


# ---- numbers


@pytest.mark.parametrize(("b", "s_q", "h_q"), ((3, 16, 128), (140, 1, 16)))
@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize("rise", full_unless(lambda rise: rise == 7.5, (0.3, 4.0, 7.5, 30.0, -4.0)))
def test_scores_that_rise_from_block_to_block(rise: float, dtype: str, b: int, s_q: int, h_q: int) -> None:
    """By `rise` powers of two: the softmax's reference has to follow them, seldom or in every block.

    Rows leave room for four parts, or requests are as many as parts: most of a request's blocks are in one
    split.
    """
    inputs = make_dense_inputs(DenseCase(b=b, s_q=s_q, h_q=h_q, s_k=1500, varlen=True, dtype=dtype))
    inputs.q.mul_(0.1)[..., -1] = 1
    for request, length in enumerate(inputs.lengths):
        blocks = torch.arange(-(-length // 64), device="cuda")
        pages = inputs.block_table[request, : len(blocks)].long()
        inputs.k_cache[pages, :, :, -1] += (rise * math.log(2) * blocks)[:, None, None].to(inputs.q.dtype)
    check(inputs, decode(inputs, softmax_scale=1.0), reference(inputs, softmax_scale=1.0))


@pytest.mark.parametrize("exponent", (-90, -24, 24, 90))
def test_magnitude_of_the_values(exponent: int) -> None:
    """Splits of split requests keep their powers of two, though float16 would not hold the values."""
    inputs = make_dense_inputs(DenseCase(b=2, h_q=16, s_k=3000))
    factor = 2.0**exponent
    scaled = replace(inputs, k_cache=inputs.k_cache * factor)
    out, lse = decode(scaled, softmax_scale=inputs.q.shape[-1] ** -0.5 / factor)
    check(inputs, (out / factor, lse))


# ---- launches


@pytest.mark.unpoisoned
@pytest.mark.parametrize("varlen", (False, True), ids=("whole", "split"))
def test_calls_that_wait_for_each_other(varlen: bool) -> None:
    """Each call's q is the out of the one before, which holds NaN until that call, combine included, is done.

    Of requests that are not split, most CTAs of the combine leave early. Without poison, whose fills would
    keep the calls from overlapping.
    """
    inputs = make_dense_inputs(DenseCase(b=132, h_q=64, s_k=1000, d_qk=512, varlen=varlen))
    metadata, num_splits = plan(inputs, "tensors")
    assert bool((num_splits.diff() > 1).any()) == varlen
    q, *rest = call_arguments(inputs)

    def chain(between: Any) -> list[Any]:
        outs = [torch.full_like(q, float("nan")) for _ in range(10)]
        between()
        for before, out in zip([q, *outs], outs, strict=False):
            rawmla.flash_mla_with_kvcache(before, *rest, metadata, num_splits, out=out)
            between()
        return outs

    for got, want in zip(chain(lambda: None), chain(torch.cuda.synchronize), strict=True):
        assert not want.isnan().any()
        assert_same_bits("out", got, want)
