"""Plans of sparse calls: what the library's own ones are, and the configurations of objects."""

from typing import Any

import numpy as np
import pytest
from gpu_support import (
    assert_same_bits,
    sparse_arguments,
    sparse_check,
    torch,
    without_extra,
)

import rawmla
from kit import SparseCase, make_sparse_inputs
from rawmla import reference

LENGTHS = (700, 0, 64, 65, 2100, 1, 0, 1999, 0)
EXTRA_LENGTHS = (0, 0, 1, 64, 500, 65, 0, 130, 3)

CASES = (
    SparseCase(b=9, s_q=2, h_q=16, s_k=2200, topk=2100, lengths=LENGTHS),
    SparseCase(b=9, h_q=128, s_k=2200, topk=2100, layout="bf16", lengths=LENGTHS, sink=True),
    SparseCase(
        b=9,
        s_q=2,
        h_q=64,
        s_k=2200,
        topk=2100,
        layout="model1",
        lengths=LENGTHS,
        extra_topk=500,
        extra_page_block_size=2,
        extra_lengths=EXTRA_LENGTHS,
        sink=True,
        sharp=True,
    ),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.layout)
def test_the_plan_of_an_object_is_that_of_the_reference(case: SparseCase) -> None:
    inputs = make_sparse_inputs(case)
    sm_count = torch.cuda.get_device_properties(0).multi_processor_count
    for invariant in (False, True):
        metadata, nothing = rawmla.get_mla_metadata(enable_batch_invariant=invariant)
        assert nothing is None
        rawmla.flash_mla_with_kvcache(*sparse_arguments(inputs), metadata, **inputs.keywords())
        blocks = reference.sparse_blocks(
            case.b, case.topk, LENGTHS, case.extra_topk, EXTRA_LENGTHS if case.extra_topk else None
        )
        parts = reference.sparse_num_parts(case.s_q, case.h_q, sm_count)
        room = -(-case.topk // 64) + -(-case.extra_topk // 64)
        want = reference.plan_blocks(blocks, parts, invariant, room)
        np.testing.assert_array_equal(metadata.tile_scheduler_metadata.cpu().numpy(), want.object_rows)
        np.testing.assert_array_equal(metadata.num_splits.cpu().numpy(), want.num_splits)


@pytest.mark.parametrize("topk", (1, 64, 2048, 2051))
@pytest.mark.parametrize(("h_q", "s_q"), ((1, 1), (8, 3), (64, 1), (66, 2), (128, 2), (128, 200)))
def test_the_plan_of_tensors_is_that_of_the_reference(h_q: int, s_q: int, topk: int) -> None:
    sm_count = torch.cuda.get_device_properties(0).multi_processor_count
    for b in (1, 5, 300):
        lengths = torch.full((b,), 12345, dtype=torch.int32, device="cuda")
        for invariant in (False, True):
            rows, num_splits = rawmla.get_mla_metadata(
                lengths, s_q * h_q, 1, h_q, True, topk, enable_batch_invariant=invariant
            )
            want_rows, want_splits = reference.get_mla_metadata(
                [0] * b,
                s_q * h_q,
                1,
                h_q,
                True,
                topk,
                sm_count=sm_count,
                enable_batch_invariant=invariant,
            )
            np.testing.assert_array_equal(rows.cpu().numpy(), want_rows)
            np.testing.assert_array_equal(num_splits.cpu().numpy(), want_splits)


def test_object_is_filled_once_and_reused() -> None:
    inputs = make_sparse_inputs(CASES[2])
    metadata, _ = rawmla.get_mla_metadata()
    assert not metadata.have_initialized
    first = rawmla.flash_mla_with_kvcache(*sparse_arguments(inputs), metadata, **inputs.keywords())
    rows, num_splits = metadata.tile_scheduler_metadata, metadata.num_splits
    config = metadata.config
    assert metadata.have_initialized and config.is_fp8_kvcache and not config.causal
    assert (config.b, config.s_q, config.h_q, config.h_k) == (9, 2, 64, 1)
    assert (config.page_block_size, config.topk) == (64, 2100)
    assert (config.extra_page_block_size, config.extra_topk) == (2, 500)
    second = rawmla.flash_mla_with_kvcache(*sparse_arguments(inputs), metadata, **inputs.keywords())
    assert metadata.tile_scheduler_metadata is rows and metadata.num_splits is num_splits
    sparse_check(inputs, first)
    assert_same_bits("out", second[0], first[0])


SHAPE: dict[str, Any] = {"b": 5, "s_q": 2, "h_q": 64, "s_k": 200, "topk": 130, "layout": "model1"}
SHAPE |= {"extra_topk": 70, "extra_page_block_size": 32}
CHANGES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("b", {"b": 4}),
    ("s_q", {"s_q": 3}),
    ("h_q", {"h_q": 128}),
    ("page_block_size", {"page_block_size": 32}),
    ("is_fp8_kvcache", {"layout": "bf16", "d_qk": 512}),
    ("topk", {"topk": 131}),
    ("extra_page_block_size", {"extra_page_block_size": 16}),
    ("extra_topk", {"extra_topk": 71}),
    ("extra_page_block_size", {"extra_topk": 0}),
)


@pytest.mark.parametrize(("field", "change"), CHANGES, ids=[str(change) for _, change in CHANGES])
def test_reused_object_with_another_configuration(field: str, change: dict[str, Any]) -> None:
    inputs = make_sparse_inputs(SparseCase(**SHAPE))
    other = make_sparse_inputs(SparseCase(**{**SHAPE, **change}))
    metadata, _ = rawmla.get_mla_metadata()
    want = rawmla.flash_mla_with_kvcache(*sparse_arguments(inputs), metadata, **inputs.keywords())
    with pytest.raises(ValueError, match=rf"\b{field} = "):
        rawmla.flash_mla_with_kvcache(*sparse_arguments(other), metadata, **other.keywords())
    again = rawmla.flash_mla_with_kvcache(*sparse_arguments(inputs), metadata, **inputs.keywords())
    assert_same_bits("out after the refused call", again[0], want[0])


# ---- CuPy


def test_a_plan_serves_calls_with_the_same_configuration_only() -> None:
    """The extra cache is part of the configuration: a plan made with it does not serve a call without."""
    inputs = make_sparse_inputs(SparseCase(**SHAPE))
    metadata, _ = rawmla.get_mla_metadata()
    plain = without_extra(inputs)
    want = rawmla.flash_mla_with_kvcache(*sparse_arguments(plain), metadata, **plain.keywords())
    sparse_check(plain, want)
    with pytest.raises(ValueError, match="extra"):
        rawmla.flash_mla_with_kvcache(*sparse_arguments(inputs), metadata, **inputs.keywords())
