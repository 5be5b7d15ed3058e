"""The plan that the device makes: complete, in order, balanced, in both layouts, in place."""

import random
from typing import Any

import numpy as np
import pytest
from gpu_support import call_arguments, torch

import rawmla
from kit import DenseCase, make_dense_inputs
from kit.plans import LAYOUTS, PlanSummary, check_plan, read_splits
from rawmla import reference


def lengths_of(kind: str, b: int) -> list[int]:
    """Request lengths of a named kind."""
    draw = random.Random(b)
    if kind == "equal":
        return [4096] * b
    if kind == "normal":
        return [max(1, int(draw.normalvariate(4096, 2048))) for _ in range(b)]
    if kind == "short":
        return [draw.randint(1, 200) for _ in range(b)]
    if kind == "holes":
        return [0 if draw.random() < 0.5 else draw.randint(1, 5000) for _ in range(b)]
    if kind == "one long":
        return [draw.randint(1, 64) for _ in range(b - 1)] + [131072]
    assert kind == "zero"
    return [0] * b


KINDS = ("equal", "normal", "short", "holes", "one long", "zero")
BATCHES = (1, 2, 3, 7, 16, 31, 32, 33, 128, 131, 511, 1000, 1024, 1025, 4096, 10007, 16384)
HEADS = ((1, 16, 1), (1, 128, 1), (2, 128, 1), (1, 64, 2), (4, 126, 2), (1, 1, 1), (1, 512, 1))


def make_plan(
    lengths: list[int], s_q: int, h_q: int, h_kv: int, layout: str, **kwargs: Any
) -> tuple[np.ndarray, np.ndarray]:
    """The device's plan on the host. The object layout is that of a FlashMLASchedMeta recomputed in place."""
    cache_seqlens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    rows, num_splits = rawmla.get_mla_metadata(cache_seqlens, s_q * h_q // h_kv, h_kv, h_q, **kwargs)
    if layout == "object":
        metadata = rawmla.FlashMLASchedMeta()
        metadata.tile_scheduler_metadata = torch.full_like(rows, -1)
        metadata.num_splits = torch.full_like(num_splits, -1)
        rawmla.get_mla_metadata(cache_seqlens, s_q * h_q // h_kv, h_kv, h_q, out=metadata, **kwargs)
        rows, num_splits = metadata.tile_scheduler_metadata, metadata.num_splits
    assert rows.dtype == torch.int32 and rows.shape[1] == 8
    assert num_splits.dtype == torch.int32 and num_splits.shape == (len(lengths) + 1,)
    return rows.cpu().numpy(), num_splits.cpu().numpy()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("b", BATCHES)
def test_plan_is_complete_and_balanced(b: int, kind: str, layout: str) -> None:
    lengths = lengths_of(kind, b)
    heads = HEADS if b < 1000 else HEADS[1:2]
    for s_q, h_q, h_kv in heads:
        rows, num_splits = make_plan(lengths, s_q, h_q, h_kv, layout)
        summary = check_plan(rows, num_splits, lengths, layout)
        assert is_balanced(summary, len(rows)), f"{len(rows)} parts: {summary}"


def is_balanced(summary: PlanSummary, parts: int) -> bool:
    """No part has much more than the mean, when a split costs some fixed number of blocks besides its own.

    Requests can be cut between any two blocks, so this holds for every batch.
    """
    return any(summary.largest_cost(cost) <= 1.15 * summary.total_cost(cost) / parts + 8 for cost in range(6))


@pytest.mark.parametrize("batch_invariant", (False, True))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("b", BATCHES)
def test_plan_is_that_of_the_reference(b: int, kind: str, batch_invariant: bool) -> None:
    """Integer for integer, in both layouts, for any number of parts."""
    lengths = lengths_of(kind, b)
    cache_seqlens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    num_splits = torch.full((b + 1,), -1, dtype=torch.int32, device="cuda")
    for parts in (1, 2, 7, 66, 131, 132, 1000, 2000):
        want = reference.plan(lengths, parts, batch_invariant)
        for layout, want_rows in zip(LAYOUTS, want[:2], strict=True):
            rows = torch.full((parts, 8), -99, dtype=torch.int32, device="cuda")
            num_splits.fill_(-99)
            out: Any = (rows, num_splits)
            if layout == "object":
                out = rawmla.FlashMLASchedMeta()
                out.tile_scheduler_metadata, out.num_splits = rows, num_splits
            rawmla.get_mla_metadata(cache_seqlens, 128, 1, out=out, enable_batch_invariant=batch_invariant)
            np.testing.assert_array_equal(rows.cpu().numpy(), want_rows, f"{parts} parts, {layout}")
            np.testing.assert_array_equal(num_splits.cpu().numpy(), want.num_splits, f"{parts} parts")


def test_small_batch_fills_the_machine() -> None:
    """FlashMLA occupies 19 of 66 parts. 32 parts of 4 blocks were measured faster than 43 of 3 or 64 of 2."""
    rows, num_splits = make_plan([8192], 1, 128, 1, "tensors")
    summary = check_plan(rows, num_splits, [8192], "tensors")
    assert len(summary.blocks) >= 32, summary


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("b", (1, 5, 128, 1000, 16384))
def test_batch_invariant_plan(b: int, layout: str) -> None:
    """Complete, cut at places that depend on the request alone, and counted so."""
    splits_of_length: dict[int, int] = {}
    for kind in KINDS:
        lengths = lengths_of(kind, b)
        rows, num_splits = make_plan(lengths, 1, 128, 1, layout, enable_batch_invariant=True)
        check_plan(rows, num_splits, lengths, layout, batch_invariant=True)
        for length, splits in zip(lengths, np.diff(num_splits).tolist(), strict=True):
            assert splits_of_length.setdefault(length, splits) == splits
    alone: dict[int, int] = {}
    for length in list(splits_of_length)[:20]:
        _, num_splits = make_plan([length], 1, 128, 1, layout, enable_batch_invariant=True)
        alone[length] = int(num_splits[1])
    assert alone == {length: splits_of_length[length] for length in alone}


def test_object_filled_by_the_call_has_the_object_layout() -> None:
    inputs = make_dense_inputs(DenseCase(b=9, s_q=2, h_q=128, s_k=2000, varlen=True, zero_lengths=True))
    metadata, _ = rawmla.get_mla_metadata()
    rawmla.flash_mla_with_kvcache(*call_arguments(inputs), metadata)
    rows, num_splits = (x.cpu().numpy() for x in (metadata.tile_scheduler_metadata, metadata.num_splits))
    check_plan(rows, num_splits, inputs.lengths, "object")
    tensors, splits = make_plan(inputs.lengths, 2, 128, 1, "tensors")
    assert np.array_equal(num_splits, splits)
    assert read_splits(rows, inputs.lengths, "object") == read_splits(tensors, inputs.lengths, "tensors")


@pytest.mark.parametrize("parts", (1, 2, 7, 66, 132, 300, 1000))
def test_in_place_with_any_number_of_rows(parts: int) -> None:
    lengths = lengths_of("holes", 50)
    cache_seqlens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    rows = torch.full((parts, 8), -99, dtype=torch.int32, device="cuda")
    num_splits = torch.full((51,), -99, dtype=torch.int32, device="cuda")
    returned = rawmla.get_mla_metadata(cache_seqlens, 128, 1, out=(rows, num_splits))
    assert returned[0] is rows and returned[1] is num_splits
    check_plan(rows.cpu().numpy(), num_splits.cpu().numpy(), lengths, "tensors")


def test_in_place_for_smaller_batches() -> None:
    cache_seqlens = torch.tensor(lengths_of("normal", 200), dtype=torch.int32, device="cuda")
    rows, num_splits = rawmla.get_mla_metadata(cache_seqlens, 128, 1)
    for b in (200, 3, 1, 199):
        rawmla.get_mla_metadata(cache_seqlens[:b], 128, 1, out=(rows, num_splits))
        lengths = cache_seqlens[:b].tolist()
        check_plan(rows.cpu().numpy(), num_splits.cpu().numpy(), lengths, "tensors")
        assert (num_splits[b:] == num_splits[b]).all()  # requests past the batch have no splits
        # Read by a call for the captured batch of 200, the rows name no request past the new batch.
        named = {
            split.request for split in read_splits(rows.cpu().numpy(), lengths + [64] * (200 - b), "tensors")
        }
        assert named == set(range(b))


def test_older_keyword_and_form_without_arguments() -> None:
    cache_seqlens = torch.tensor([100, 5000], dtype=torch.int32, device="cuda")
    new = rawmla.get_mla_metadata(cache_seqlens, num_q_tokens_per_head_k=128, num_heads_k=1)
    old = rawmla.get_mla_metadata(cache_seqlens, num_heads_per_head_k=128, num_heads_k=1)
    assert torch.equal(new[0][:, :5], old[0][:, :5]) and torch.equal(new[1], old[1])
    metadata, nothing = rawmla.get_mla_metadata()
    assert isinstance(metadata, rawmla.FlashMLASchedMeta) and nothing is None


def test_plan_is_deterministic_and_stays_on_the_device() -> None:
    cache_seqlens = torch.tensor(lengths_of("normal", 128), dtype=torch.int32, device="cuda")
    want = rawmla.get_mla_metadata(cache_seqlens, 128, 1)
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)
    got = [rawmla.get_mla_metadata(cache_seqlens, 128, 1) for _ in range(20)]
    assert not torch.cuda.current_stream().query(), "the planner waited for the device"
    for rows, num_splits in got:
        assert torch.equal(rows, want[0]) and torch.equal(num_splits, want[1])
