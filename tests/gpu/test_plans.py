"""Plans: both forms and layouts, plans written by somebody else, re-use.

What a plan looks like is in test_metadata.py, which calls a plan refuses is in tests/calls/test_plans.py.
"""

from __future__ import annotations

from typing import Any

import pytest
from gpu_support import torch

import rawmla
from kit import DenseCase, SparseCase
from kit.plans import IDLE_FORMS, LAYOUTS, write_plan
from operations import Call, Operation, assert_results
from operations.mla_decode import DENSE
from operations.mla_sparse import for_clusters, sparse_operation

LENGTHS = (700, 0, 64, 65, 3000, 1, 0, 1999, 0)
SPARSE_LENGTHS = (700, 0, 64, 65, 2100, 1, 0, 1999, 0)
EXTRA_LENGTHS = (0, 0, 1, 64, 500, 65, 0, 130, 3)
SPLITS = (1, 2, 32, 33, 160, 161, 256)

DENSE_SHAPE: dict[str, Any] = {"b": len(LENGTHS), "lengths": LENGTHS, "causal": True, "sharp": True}
SPARSE_SHAPE: dict[str, Any] = {"b": len(LENGTHS), "s_k": 2200, "topk": 2100, "lengths": SPARSE_LENGTHS}
SPARSE_CASES = {
    "v32": SparseCase(s_q=2, h_q=16, **SPARSE_SHAPE),
    "bf16": SparseCase(h_q=128, layout="bf16", sink=True, **SPARSE_SHAPE),
    "model1": SparseCase(
        s_q=2,
        h_q=64,
        layout="model1",
        extra_topk=500,
        extra_page_block_size=2,
        extra_lengths=EXTRA_LENGTHS,
        sink=True,
        sharp=True,
        **SPARSE_SHAPE,
    ),
}
CASES: tuple[tuple[Operation, Any], ...] = (
    (DENSE, DenseCase(h_q=16, **DENSE_SHAPE)),
    (DENSE, DenseCase(h_q=128, s_q=2, **DENSE_SHAPE)),
    *((sparse_operation(layout), case) for layout, case in SPARSE_CASES.items()),
    *(
        (sparse_operation(layout, clusters=True), *for_clusters((case,)))
        for layout, case in SPARSE_CASES.items()
        if layout != "bf16"
    ),
)
IDS = [f"{operation.name}-h{case.h_q}" for operation, case in CASES]


def block_tokens(case: Any) -> list[int]:
    """Tokens per request as plans count them: in sparse calls those of either cache in whole blocks of 64."""
    if isinstance(case, DenseCase):
        return case.request_lengths()
    tokens = [-(-length // 64) * 64 for length in case.lengths]
    if case.extra_topk:
        tokens = [n + -(-length // 64) * 64 for n, length in zip(tokens, case.extra_lengths, strict=True)]
    return tokens


def run_with_plan(call: Call, rows: Any, num_splits: Any, layout: str) -> tuple[Any, ...]:
    """Decode with a plan written on the host, in either of its forms."""
    metadata: Any = torch.from_numpy(rows).cuda()
    splits: Any = torch.from_numpy(num_splits).cuda()
    if layout == "object":
        plan = rawmla.FlashMLASchedMeta()
        plan.tile_scheduler_metadata, plan.num_splits = metadata, splits
        metadata, splits = plan, None
    return call.run(tile_scheduler_metadata=metadata, num_splits=splits)


PLANS = {
    "one row": lambda total: [total],
    "a row per block": lambda total: [1] * total,
    "more rows than blocks": lambda total: [1] * (total + 40),
    "everything split at odd places": lambda total: [3, 5, 7, 11, 1, 1, 13] * 6,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("idle_form", IDLE_FORMS)
@pytest.mark.parametrize(("operation", "case"), CASES, ids=IDS)
def test_external_plans_and_idle_rows(operation: Operation, case: Any, idle_form: str, layout: str) -> None:
    """Rows that are idle before, after and among the others."""
    call = operation.make(case)
    tokens = block_tokens(case)
    total = sum(-(-length // 64) for length in tokens)
    for name, shares in PLANS.items():
        for before, after in ((0, 0), (1, 0), (3, 150)):
            rows, num_splits = write_plan(
                tokens, shares(total), layout, idle_form=idle_form, idle_before=before, idle_after=after
            )
            shuffled = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1)).numpy()
            for order in (slice(None), shuffled) if before else (slice(None),):
                got = run_with_plan(call, rows[order], num_splits, layout)
                try:
                    call.check(got)
                except AssertionError as error:
                    raise AssertionError(f"{name}, {before} + {after} idle rows: {error}") from error


LONG_LENGTHS = (64 * 256, 100)  # 256 blocks, and two
LONG_SPARSE = SparseCase(
    b=2, h_q=64, s_k=17000, topk=LONG_LENGTHS[0], layout="model1", lengths=LONG_LENGTHS, sharp=True
)
LONG_CASES: tuple[tuple[Operation, Any], ...] = (
    (DENSE, DenseCase(b=2, h_q=64, lengths=LONG_LENGTHS, sharp=True)),
    (sparse_operation("model1"), LONG_SPARSE),
    (sparse_operation("model1", clusters=True), *for_clusters((LONG_SPARSE,))),
)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("operation", "case"), LONG_CASES, ids=[operation.name for operation, _ in LONG_CASES]
)
def test_any_number_of_splits(operation: Operation, case: Any, layout: str) -> None:
    call = operation.make(case)
    for splits in SPLITS:
        shares = [256 // splits] * (splits - 1) + [256 - (splits - 1) * (256 // splits)] + [2]
        rows, num_splits = write_plan(LONG_LENGTHS, shares, layout)
        assert num_splits.tolist() == [0, splits, splits + 1]
        try:
            call.check(run_with_plan(call, rows, num_splits, layout))
        except AssertionError as error:
            raise AssertionError(f"{splits} splits: {error}") from error


@pytest.mark.parametrize(("operation", "case"), CASES, ids=IDS)
def test_copied_plan(operation: Operation, case: Any) -> None:
    """Engines copy plans into buffers of their own, with room to spare: rows that are idle, and numbers of
    splits that nobody may read.
    """
    call = operation.make(case)
    metadata, num_splits = call.make_plan("tensors")
    want = call.run(tile_scheduler_metadata=metadata, num_splits=num_splits)
    call.check(want)
    buffer = torch.full((metadata.shape[0] + 20, 8), -1, dtype=torch.int32, device="cuda")
    buffer[: metadata.shape[0]] = metadata
    for spare in (-1, 1 << 28):
        splits = torch.full((100,), spare, dtype=torch.int32, device="cuda")
        splits[: case.b + 1] = num_splits
        got = call.run(tile_scheduler_metadata=buffer, num_splits=splits)
        assert_results(f"spare numbers {spare}", call, got, want)
