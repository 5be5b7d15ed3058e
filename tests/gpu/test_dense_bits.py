"""The same call gives the same bits, and in batch-invariant mode whatever else is in the batch."""

import random

import pytest
from gpu_support import assert_same_bits, check, decode, in_batch, poisoned_allocations, torch

import rawmla
from rawmla.testing import DenseCase, make_dense_inputs

RERUN_CASES = (
    DenseCase(b=1, h_q=128, s_k=20000, sharp=True),
    DenseCase(b=7, s_q=2, h_q=16, s_k=3000, varlen=True, causal=True),
    DenseCase(b=64, s_q=2, h_q=128, s_k=2000, varlen=True, zero_lengths=True, causal=True, sharp=True),
    DenseCase(b=5, s_q=4, h_q=126, h_kv=2, s_k=1500, varlen=True, dtype="float16", page_block_size=16),
    DenseCase(b=33, h_q=64, d_qk=512, s_k=1500, varlen=True, page_block_size=256),
)

INVARIANT_CASES = (
    DenseCase(b=256, h_q=16, s_k=1500, varlen=True, zero_lengths=True),
    DenseCase(b=256, h_q=128, s_k=1500, varlen=True, sharp=True),
    DenseCase(b=64, s_q=3, h_q=64, s_k=3000, varlen=True, causal=True, dtype="float16"),
    DenseCase(b=32, s_q=2, h_q=12, h_kv=3, d_qk=512, s_k=3000, varlen=True, page_block_size=16),
    DenseCase(b=8, h_q=128, lengths=(40000, 1, 0, 64, 12345, 2048, 2049, 513), sharp=True),
)


@pytest.mark.parametrize("form", ("object", "tensors"))
@pytest.mark.parametrize("case", RERUN_CASES, ids=lambda case: case.id)
def test_reruns_give_the_same_bits(case: DenseCase, form: str) -> None:
    inputs = make_dense_inputs(case)
    want_out, want_lse = decode(inputs, form)
    for run in range(20):
        out, lse = decode(inputs, form)
        assert_same_bits(f"out of run {run}", out, want_out)
        assert_same_bits(f"lse of run {run}", lse, want_lse)
    check(inputs, (want_out, want_lse))


@pytest.mark.parametrize("case", RERUN_CASES, ids=lambda case: case.id)
def test_reruns_with_one_plan_back_to_back(case: DenseCase) -> None:
    """Twenty calls in flight at once, as a model's layers make them."""
    inputs = make_dense_inputs(case)
    metadata, _ = rawmla.get_mla_metadata()
    with poisoned_allocations():
        results = [
            rawmla.flash_mla_with_kvcache(
                inputs.q,
                inputs.k_cache,
                inputs.block_table,
                inputs.cache_seqlens,
                512,
                metadata,
                causal=case.causal,
            )
            for _ in range(20)
        ]
    for run, (out, lse) in enumerate(results):
        assert_same_bits(f"out of run {run}", out, results[0][0])
        assert_same_bits(f"lse of run {run}", lse, results[0][1])
    check(inputs, results[0])


@pytest.mark.parametrize("form", ("object", "tensors"))
@pytest.mark.parametrize("case", INVARIANT_CASES, ids=lambda case: case.id)
def test_batch_invariance(case: DenseCase, form: str) -> None:
    """Alone, in batches of 2 to all, in any position and company, a request keeps its bits."""
    inputs = make_dense_inputs(case)
    whole_out, whole_lse = decode(inputs, form, enable_batch_invariant=True)
    check(inputs, (whole_out, whole_lse))

    draw = random.Random(3)
    everyone = list(range(case.b))
    longest = max(everyone, key=inputs.lengths.__getitem__)
    shortest = min(everyone, key=inputs.lengths.__getitem__)
    batches = [[i] for i in {0, case.b - 1, longest, shortest, *draw.sample(everyone, 4)}]
    batches += [[longest] * 3, [longest, shortest], [shortest, longest, shortest]]
    batches += [draw.sample(everyone, size) for size in (2, 3, 5, 8, case.b // 2, case.b)]
    batches += [draw.choices(everyone, k=256), list(reversed(everyone))]
    for requests in batches:
        batch = in_batch(inputs, requests)
        out, lse = decode(batch, form, enable_batch_invariant=True)
        name = f"batch of {len(requests)}"
        assert_same_bits(f"{name} out", out, whole_out[requests])
        assert_same_bits(f"{name} lse", lse, whole_lse[requests])


@pytest.mark.parametrize("case", INVARIANT_CASES[-2:], ids=lambda case: case.id)
def test_batch_invariance_does_not_depend_on_table_width_or_form(case: DenseCase) -> None:
    inputs = make_dense_inputs(case)
    want_out, want_lse = decode(inputs, "object", enable_batch_invariant=True)
    width = inputs.block_table.shape[1]
    wide = torch.full((case.b, 3 * width), 2147480000, dtype=torch.int32, device="cuda")
    wide[:, :width] = inputs.block_table
    inputs.block_table = wide
    out, lse = decode(inputs, "tensors", enable_batch_invariant=True)
    assert_same_bits("out", out, want_out)
    assert_same_bits("lse", lse, want_lse)
