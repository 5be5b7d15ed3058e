"""Batch-invariant prefill: a token's bits depend on what it selects and on nothing else."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from full_cases import full_unless
from gpu_support import assert_same_bits, torch

import rawmla
from kit import SparseCase, SparseInputs, make_sparse_inputs
from operations.mla_prefill import PREFILL_KINDS, prefill, prefill_check
from operations.mla_sparse import sparse_in_batch

TOKENS = 1100  # enough for selections to be united, and for FP8 caches to be copied to bf16 rows

kinds = pytest.mark.parametrize("kind", PREFILL_KINDS.values(), ids=PREFILL_KINDS)


def make(kind: dict[str, Any], **changes: Any) -> SparseInputs:
    """Tokens that select few rows, each of them many times."""
    shape: dict[str, Any] = {"b": TOKENS, "s_k": 1500, "topk": 200, "lengths": "random", "sink": True}
    return make_sparse_inputs(SparseCase(**{**shape, **kind, **changes}, empty_rows=0.05))


def run(inputs: SparseInputs) -> Any:
    """The results of a batch-invariant call."""
    return prefill(inputs, enable_batch_invariant=True)


def assert_bits(text: str, got: Any, want: Any, tokens: Any = slice(None)) -> None:
    """All three results have the bits that these tokens have in `want`."""
    for name, one, wanted in zip(("out", "max_logits", "lse"), got, want, strict=True):
        assert_same_bits(f"{name}, {text}", one, wanted[tokens])


def batches_of(b: int) -> list[list[int]]:
    """Alone, few, a range, the whole in another order, the same token many times."""
    draw = random.Random(3)
    everyone = list(range(b))
    batches = [[i] for i in (0, b - 1, *draw.sample(everyone, 3))]
    batches += [sorted(draw.sample(everyone, size)) for size in (2, 7, 64, 132, 300, b // 2)]
    batches += [list(range(100, 700)), list(reversed(everyone)), [5] * 520 + everyone]
    return batches


@kinds
@pytest.mark.parametrize("h_q", full_unless(lambda h_q: h_q in (16, 128), (8, 16, 32, 64, 128)))
def test_tokens_keep_their_bits(h_q: int, kind: dict[str, Any]) -> None:
    """Whatever other tokens are in the call. Then other tokens get other queries, indices and
    lengths; one in seven stays, and keeps its bits.
    """
    inputs = make(kind, h_q=h_q)
    want = run(inputs)
    prefill_check(inputs, want)
    for tokens in batches_of(TOKENS):
        assert_bits(f"{len(tokens)} tokens", run(sparse_in_batch(inputs, tokens)), want, tokens)
    kept = torch.arange(TOKENS, device="cuda") % 7 == 3
    others = (~kept)[:, None, None]
    for length in (0, 1, 200):
        rolled = inputs.topk_length.roll(1, dims=0).clamp(max=length)
        changed = replace(
            inputs,
            q=torch.where(others[..., None], -inputs.q, inputs.q),
            indices=torch.where(others, inputs.indices.roll(1, dims=0), inputs.indices),
            topk_length=torch.where(kept, inputs.topk_length, rolled),
        )
        assert_bits(f"length {length}", [x[kept] for x in run(changed)], want, kept)


@pytest.mark.unpoisoned
@kinds
@pytest.mark.parametrize("h_q", (16, 128))
def test_lengths_of_the_kernel_ahead(h_q: int, kind: dict[str, Any]) -> None:
    """Lengths that `convert_indices` has just counted: attention waits for them, although its plan needs no
    arrays. Where they are written there was 0 before.
    """
    tokens, topk = 64, 2048
    inputs = make(kind, b=tokens, h_q=h_q, s_k=4000, topk=topk, lengths=None)
    cache = inputs.k_cache
    pages = -(-cache.shape[0] * cache.shape[1] // 64)
    table = torch.arange(pages, dtype=torch.int32, device="cuda")[None]  # one request: slots are positions
    request_ids = torch.zeros(tokens, dtype=torch.int32, device="cuda")

    def compacted(slots: Any) -> SparseInputs:
        """The same selections, valid slots first, and their numbers."""
        before = torch.zeros(tokens, 1, dtype=torch.int32, device="cuda")
        address = before.data_ptr()
        del before
        _, counts = rawmla.convert_indices(
            inputs.indices, table, 64, request_ids=request_ids, compact=True, out=slots
        )
        assert counts.data_ptr() == address
        case = replace(inputs.case, lengths="random")
        return replace(inputs, case=case, indices=slots, topk_length=counts.view(-1))

    alone = compacted(torch.empty_like(inputs.indices))
    torch.cuda.synchronize()
    assert 0 < int(alone.topk_length.max()) < topk
    want = run(alone)
    torch.cuda.synchronize()
    prefill_check(inputs, want)

    slots = torch.empty_like(inputs.indices)
    for _ in range(2):  # the second time the allocator has memory for all results
        torch.cuda._sleep(50_000_000)  # about 25 ms: launches wait for each other, not for the host
        results = [run(compacted(slots)) for _ in range(100)]
        for number, got in enumerate(results):
            assert_bits(f"call {number}", got, want)
        del results


def test_more_tokens_than_a_plan_takes() -> None:
    inputs = make(PREFILL_KINDS["bf16"], b=40_000, h_q=8, s_k=300, topk=70)
    want = run(inputs)
    for tokens in (list(range(16_000, 17_000)), list(range(39_000, 40_000)), [0, 39_999]):
        assert_bits(f"{len(tokens)} tokens", run(sparse_in_batch(inputs, tokens)), want, tokens)
