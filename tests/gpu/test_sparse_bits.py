"""The same sparse call gives the same bits, and in batch-invariant mode whatever else is in the batch."""

import random
from dataclasses import replace

import pytest
from gpu_support import (
    assert_same_bits,
    poisoned_allocations,
    sparse_arguments,
    sparse_check,
    sparse_decode,
    sparse_in_batch,
    torch,
    without_extra,
)

import rawmla
from rawmla.testing import SparseCase, make_sparse_inputs

RERUN_CASES = (
    SparseCase(b=1, h_q=128, s_k=20000, topk=16384, layout="model1", sharp=True),
    SparseCase(b=7, s_q=2, h_q=16, s_k=3000, topk=2048, lengths="random", sink=True),
    SparseCase(b=74, s_q=2, h_q=128, s_k=1000, topk=576, empty_rows=0.1, page_block_size=61),
    SparseCase(
        b=64,
        s_q=2,
        h_q=64,
        topk=128,
        layout="model1",
        block_gap=1,
        lengths="random",
        extra_topk=500,
        extra_s_k=900,
        extra_page_block_size=2,
        extra_lengths="random",
        sink=True,
    ),
    SparseCase(b=33, h_q=66, s_k=2500, topk=2051, layout="bf16", d_qk=576),
    SparseCase(b=5, s_q=3, h_q=9, s_k=700, topk=600, layout="bf16", d_qk=512),
)

INVARIANT_CASES = (
    SparseCase(b=200, h_q=16, s_k=2100, topk=2048, lengths="random", empty_rows=0.1),
    SparseCase(b=64, s_q=2, h_q=128, s_k=1500, topk=1000, lengths="random", layout="bf16", d_qk=512),
    SparseCase(
        b=64,
        s_q=2,
        h_q=64,
        topk=300,
        layout="model1",
        lengths="random",
        extra_topk=1500,
        extra_s_k=1600,
        extra_page_block_size=2,
        extra_lengths="random",
        sink=True,
        sharp=True,
    ),
    SparseCase(
        b=8, h_q=128, s_k=20000, topk=16384, lengths=(16384, 1, 0, 64, 12345, 2048, 2049, 513), sink=True
    ),
)


@pytest.mark.parametrize("form", ("object", "tensors"))
@pytest.mark.parametrize("case", RERUN_CASES, ids=lambda case: case.id)
def test_reruns_give_the_same_bits(case: SparseCase, form: str) -> None:
    inputs = make_sparse_inputs(case)
    want_out, want_lse = sparse_decode(inputs, form)
    for run in range(20):
        out, lse = sparse_decode(inputs, form)
        assert_same_bits(f"out of run {run}", out, want_out)
        assert_same_bits(f"lse of run {run}", lse, want_lse)
    sparse_check(inputs, (want_out, want_lse))


@pytest.mark.parametrize("case", RERUN_CASES, ids=lambda case: case.id)
def test_reruns_with_one_plan_back_to_back(case: SparseCase) -> None:
    """Twenty calls in flight at once, as a model's layers make them."""
    inputs = make_sparse_inputs(case)
    metadata, _ = rawmla.get_mla_metadata()
    with poisoned_allocations():
        results = [
            rawmla.flash_mla_with_kvcache(*sparse_arguments(inputs), metadata, **inputs.keywords())
            for _ in range(20)
        ]
    for run, (out, lse) in enumerate(results):
        assert_same_bits(f"out of run {run}", out, results[0][0])
        assert_same_bits(f"lse of run {run}", lse, results[0][1])
    sparse_check(inputs, results[0])


@pytest.mark.parametrize("form", ("object", "tensors"))
@pytest.mark.parametrize("case", INVARIANT_CASES, ids=lambda case: case.id)
def test_batch_invariance(case: SparseCase, form: str) -> None:
    """Alone, in batches of 2 to all, in any position and company, a request keeps its bits."""
    inputs = make_sparse_inputs(case)
    whole_out, whole_lse = sparse_decode(inputs, form, enable_batch_invariant=True)
    sparse_check(inputs, (whole_out, whole_lse))

    draw = random.Random(3)
    everyone = list(range(case.b))
    lengths = inputs.topk_length.tolist()
    longest = max(everyone, key=lengths.__getitem__)
    shortest = min(everyone, key=lengths.__getitem__)
    batches = [[i] for i in {0, case.b - 1, longest, shortest, *draw.sample(everyone, 4)}]
    batches += [[longest] * 3, [longest, shortest], [shortest, longest, shortest]]
    batches += [draw.sample(everyone, size) for size in (2, 3, 5, 8, case.b // 2, case.b)]
    batches += [draw.choices(everyone, k=256), list(reversed(everyone))]
    for requests in batches:
        batch = sparse_in_batch(inputs, requests)
        out, lse = sparse_decode(batch, form, enable_batch_invariant=True)
        name = f"batch of {len(requests)}"
        assert_same_bits(f"{name} out", out, whole_out[requests])
        assert_same_bits(f"{name} lse", lse, whole_lse[requests])


def test_batch_invariance_of_query_tokens() -> None:
    """A plan has fewer parts for more query tokens; the pieces of a request stay the same."""
    case = SparseCase(b=6, s_q=4, h_q=64, s_k=3000, topk=2048, lengths="random")
    inputs = make_sparse_inputs(case)
    want_out, want_lse = sparse_decode(inputs, enable_batch_invariant=True)
    for token in range(4):
        alone = replace(
            inputs,
            case=replace(case, s_q=1),
            q=inputs.q[:, token : token + 1],
            indices=inputs.indices[:, token : token + 1],
        )
        out, lse = sparse_decode(alone, enable_batch_invariant=True)
        assert_same_bits(f"out of token {token}", out, want_out[:, token : token + 1])
        assert_same_bits(f"lse of token {token}", lse, want_lse[:, :, token : token + 1])


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
        got = sparse_decode(replace(inputs, indices=inputs.indices.masked_fill(invalid, value)))
        assert_same_bits(f"out with {value}", got[0], want[0])
        assert_same_bits(f"lse with {value}", got[1], want[1])


def test_an_extra_cache_without_indices_does_not_change_the_bits() -> None:
    case = SparseCase(
        b=9, s_q=2, h_q=64, topk=300, layout="model1", extra_topk=100, extra_lengths=(0,) * 9, sink=True
    )
    inputs = make_sparse_inputs(case)
    got, want = sparse_decode(inputs), sparse_decode(without_extra(inputs))
    sparse_check(inputs, got)
    assert_same_bits("out", got[0], want[0])
    assert_same_bits("lse", got[1], want[1])
