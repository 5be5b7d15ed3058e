"""The plans that the device makes are those of the reference, integer for integer.

tests/test_schedule.py tests the plans of the reference: complete, balanced, cut where they should be.
"""

import random
from typing import Any

import numpy as np
import pytest
from full_cases import full_unless
from gpu_support import torch
from test_plans import CASES, IDS

import rawmla
from kit import DenseCase
from kit.plans import LAYOUTS
from operations import Operation
from operations.caches import to_device
from rawmla import reference

BATCHES = (1, 7, 32, 33, 131, 511, 1024, 1025, 4096, 10007, 16384)
HEADS = ((1, 16, 1), (1, 128, 1), (2, 128, 1), (1, 64, 2), (4, 126, 2), (1, 1, 1), (1, 512, 1))
PARTS = (1, 2, 66, 131, 300, 2000)


def lengths_of(kind: str, b: int) -> Any:
    """Request lengths of a named kind."""
    draw = random.Random(b)
    made = {
        "equal": lambda: [4096] * b,
        "normal": lambda: [max(1, int(draw.normalvariate(4096, 2048))) for _ in range(b)],
        "short": lambda: [draw.randint(1, 200) for _ in range(b)],
        "holes": lambda: [0 if draw.random() < 0.5 else draw.randint(1, 5000) for _ in range(b)],
        "one long": lambda: [draw.randint(1, 64) for _ in range(b - 1)] + [131072],
        "zero": lambda: [0] * b,
    }[kind]()
    return np.array(made, np.int32)


KINDS = ("equal", "normal", "short", "holes", "one long", "zero")


def assert_plan(text: str, got: Any, want_rows: Any, want_splits: Any) -> None:
    """Rows and numbers of splits are as wanted."""
    for one, wanted in zip(got, (want_rows, want_splits), strict=True):
        np.testing.assert_array_equal(one.cpu().numpy(), wanted, text)


def sm_count() -> int:
    """Multiprocessors of the GPU."""
    return int(torch.cuda.get_device_properties(0).multi_processor_count)


@pytest.mark.parametrize("invariant", (False, True))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("b", full_unless(lambda b: b in (1, 33, 131, 1025, 16384), BATCHES))
def test_lengths(b: int, kind: str, invariant: bool) -> None:
    """In place for any number of parts and in both layouts; and for the parts of calls with any heads."""
    lengths = lengths_of(kind, b)
    cache_seqlens = to_device(lengths)
    options = {"enable_batch_invariant": invariant}
    num_splits = torch.empty(b + 1, dtype=torch.int32, device="cuda")
    for parts in PARTS:
        want = reference.plan(lengths, parts, invariant)
        for layout, want_rows in zip(LAYOUTS, want[:2], strict=True):
            rows = torch.full((parts, 8), -99, dtype=torch.int32, device="cuda")
            num_splits.fill_(-99)
            out: Any = (rows, num_splits)
            if layout == "object":
                out = rawmla.FlashMLASchedMeta()
                out.tile_scheduler_metadata, out.num_splits = rows, num_splits
            returned = rawmla.get_mla_metadata(cache_seqlens, 128, 1, out=out, **options)
            assert layout == "object" or (returned[0] is rows and returned[1] is num_splits)
            assert_plan(f"{parts} parts, {layout}", (rows, num_splits), want_rows, want.num_splits)
    for s_q, h_q, h_kv in HEADS if b < 1000 else HEADS[1:2]:
        arguments = s_q * h_q // h_kv, h_kv, h_q
        got = rawmla.get_mla_metadata(cache_seqlens, *arguments, **options)
        wanted = reference.get_mla_metadata(lengths, *arguments, sm_count=sm_count(), **options)
        assert_plan(f"{s_q} x {h_q} / {h_kv} heads", got, *wanted)


@pytest.mark.parametrize("topk", (1, 64, 2048, 2051))
def test_number_of_indices(topk: int) -> None:
    """What `cache_seqlens` holds does not count."""
    for h_q, s_q in ((1, 1), (8, 3), (64, 1), (66, 2), (128, 2), (128, 200)):
        for b in (1, 5, 300):
            lengths = torch.full((b,), 12345, dtype=torch.int32, device="cuda")
            for invariant in (False, True):
                arguments = s_q * h_q, 1, h_q, True, topk
                options = {"enable_batch_invariant": invariant}
                got = rawmla.get_mla_metadata(lengths, *arguments, **options)
                want = reference.get_mla_metadata([0] * b, *arguments, sm_count=sm_count(), **options)
                assert_plan(f"{h_q} heads, {s_q} tokens, {b} requests", got, *want)


@pytest.mark.parametrize("invariant", (False, True))
@pytest.mark.parametrize(("operation", "case"), CASES, ids=IDS)
def test_object_that_a_call_fills(operation: Operation, case: Any, invariant: bool) -> None:
    call = operation.make(case)
    metadata, _ = call.make_plan(invariant=invariant)
    call.run(tile_scheduler_metadata=metadata)
    if isinstance(case, DenseCase):
        parts = max(sm_count() // -(-case.s_q * case.h_q // 64), 1)
        want = reference.plan(case.request_lengths(), parts, invariant)
    else:
        extra = case.extra_lengths if case.extra_topk else None
        blocks = reference.sparse_blocks(case.b, case.topk, case.lengths, case.extra_topk, extra)
        room = -(-case.topk // 64) + -(-case.extra_topk // 64)
        want = reference.plan_blocks(
            blocks, reference.sparse_num_parts(case.s_q, case.h_q, sm_count()), invariant, room
        )
    got = metadata.tile_scheduler_metadata, metadata.num_splits
    assert_plan("object", got, want.object_rows, want.num_splits)
