"""Plans: both forms and layouts, plans written by somebody else, re-use and its checks."""

import random
from itertools import product
from typing import Any

import pytest
from gpu_support import (
    assert_same_bits,
    call_arguments,
    check,
    decode,
    plan,
    poisoned_allocations,
    reference,
    torch,
)

import rawmla
from rawmla.testing import DenseCase, DenseInputs, make_dense_inputs
from rawmla.testing.plans import IDLE_FORMS, LAYOUTS, blocks_of, write_plan

LENGTHS = (700, 0, 64, 65, 3000, 1, 0, 1999, 0)


def decode_with_plan(inputs: DenseInputs, rows: Any, num_splits: Any, layout: str) -> tuple[Any, Any]:
    """Decode with a plan written on the host, in either of its forms."""
    rows = torch.from_numpy(rows).cuda()
    num_splits = torch.from_numpy(num_splits).cuda()
    metadata: Any = rows
    splits: Any = num_splits
    if layout == "object":
        metadata, splits = rawmla.FlashMLASchedMeta(), None
        metadata.tile_scheduler_metadata = rows
        metadata.num_splits = num_splits
    with poisoned_allocations():
        return rawmla.flash_mla_with_kvcache(
            *call_arguments(inputs), metadata, splits, causal=inputs.case.causal
        )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("idle_form", IDLE_FORMS)
@pytest.mark.parametrize(("h_q", "s_q"), ((16, 1), (128, 2)))
def test_external_plans(h_q: int, s_q: int, idle_form: str, layout: str) -> None:
    case = DenseCase(b=len(LENGTHS), s_q=s_q, h_q=h_q, lengths=LENGTHS, causal=True, sharp=True)
    inputs = make_dense_inputs(case)
    total = sum(blocks_of(LENGTHS))
    draw = random.Random(5)
    plans = {
        "one row": [total],
        "two rows": [total // 2, total],
        "a row per block": [1] * total,
        "more rows than blocks": [1] * (total + 40),
        "uneven": [draw.randint(1, 9) for _ in range(60)],
        "everything split at odd places": [3, 5, 7, 11, 1, 1, 13] * 6,
    }
    want = None
    for name, shares in plans.items():
        for idle_before, idle_after in ((0, 0), (1, 0), (0, 7), (3, 150)):
            rows, num_splits = write_plan(
                LENGTHS, shares, layout, idle_form=idle_form, idle_before=idle_before, idle_after=idle_after
            )
            got = decode_with_plan(inputs, rows, num_splits, layout)
            want = reference(inputs) if want is None else want
            try:
                check(inputs, got, want)
            except AssertionError as error:
                raise AssertionError(f"{name}, {idle_before} + {idle_after} idle rows: {error}") from error


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pieces", (1, 2, 31, 32, 33, 64, 100, 160, 161, 256))
def test_any_number_of_splits(pieces: int, layout: str) -> None:
    lengths = (64 * 256, 100)
    inputs = make_dense_inputs(DenseCase(b=2, h_q=64, lengths=lengths, sharp=True))
    shares = [256 // pieces] * (pieces - 1) + [256 - (pieces - 1) * (256 // pieces)] + [2]
    rows, num_splits = write_plan(lengths, shares, layout)
    assert num_splits.tolist() == [0, pieces, pieces + 1]
    check(inputs, decode_with_plan(inputs, rows, num_splits, layout))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_idle_rows_anywhere(layout: str) -> None:
    inputs = make_dense_inputs(DenseCase(b=len(LENGTHS), h_q=128, lengths=LENGTHS))
    rows, num_splits = write_plan(LENGTHS, [4] * 30, layout, idle_after=30)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1)).numpy()
    check(inputs, decode_with_plan(inputs, rows[order], num_splits, layout))


def test_both_forms_agree() -> None:
    """The two layouts of the library's own plan describe the same split, so the bits agree too."""
    inputs = make_dense_inputs(
        DenseCase(b=9, s_q=2, h_q=128, s_k=2000, varlen=True, causal=True, zero_lengths=True)
    )
    by_object = decode(inputs, "object")
    by_tensors = decode(inputs, "tensors")
    assert_same_bits("out", by_object[0], by_tensors[0])
    assert_same_bits("lse", by_object[1], by_tensors[1])


def test_copied_plan() -> None:
    """Engines copy plans into buffers of their own, with room to spare."""
    inputs = make_dense_inputs(DenseCase(b=9, h_q=128, s_k=2000, varlen=True))
    metadata, num_splits = plan(inputs, "tensors")
    buffer = torch.full((metadata.shape[0] + 20, 8), -1, dtype=torch.int32, device="cuda")
    buffer[: metadata.shape[0]] = metadata
    splits = torch.full((100,), -1, dtype=torch.int32, device="cuda")
    splits[:10] = num_splits
    with poisoned_allocations():
        got = rawmla.flash_mla_with_kvcache(*call_arguments(inputs), buffer, splits)
    want = decode(inputs)
    check(inputs, got)
    assert_same_bits("out", got[0], want[0])


def test_object_is_filled_once_and_reused() -> None:
    inputs = make_dense_inputs(DenseCase(b=5, s_q=2, h_q=128, s_k=2000, varlen=True, causal=True))
    metadata, nothing = rawmla.get_mla_metadata()
    assert nothing is None and not metadata.have_initialized
    first = rawmla.flash_mla_with_kvcache(*call_arguments(inputs), metadata, causal=True)
    rows, num_splits = metadata.tile_scheduler_metadata, metadata.num_splits
    assert metadata.have_initialized
    assert rows.shape[1] == 8 and rows.dtype == torch.int32 and rows.is_cuda
    assert num_splits.shape == (6,) and num_splits.dtype == torch.int32
    assert (metadata.config.b, metadata.config.s_q, metadata.config.h_q) == (5, 2, 128)
    second = rawmla.flash_mla_with_kvcache(*call_arguments(inputs), metadata, causal=True)
    assert metadata.tile_scheduler_metadata is rows and metadata.num_splits is num_splits
    check(inputs, first)
    assert_same_bits("out", second[0], first[0])


CHANGES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("b", {"b": 4}),
    ("s_q", {"s_q": 3}),
    ("h_q", {"h_q": 64}),
    ("h_k", {"h_kv": 2}),
    ("page_block_size", {"page_block_size": 128}),
    ("causal", {"causal": False}),
)


@pytest.mark.parametrize(("field", "change"), CHANGES, ids=[field for field, _ in CHANGES])
def test_reused_object_with_another_configuration(field: str, change: dict[str, Any]) -> None:
    shape: dict[str, Any] = {"b": 5, "s_q": 2, "h_q": 128, "s_k": 300, "causal": True}
    inputs = make_dense_inputs(DenseCase(**shape))
    other = make_dense_inputs(DenseCase(**{**shape, **change}))
    metadata, _ = rawmla.get_mla_metadata()
    want = rawmla.flash_mla_with_kvcache(*call_arguments(inputs), metadata, causal=True)
    with pytest.raises(ValueError, match=rf"\b{field} = "):
        rawmla.flash_mla_with_kvcache(*call_arguments(other), metadata, causal=other.case.causal)
    again = rawmla.flash_mla_with_kvcache(*call_arguments(inputs), metadata, causal=True)
    assert_same_bits("out after the refused call", again[0], want[0])


@pytest.mark.parametrize("form", ("object", "tensors"))
def test_recomputed_in_place(form: str) -> None:
    """New lengths, same plan buffers; also for a batch smaller than the one the buffers were made for."""
    inputs = make_dense_inputs(DenseCase(b=8, h_q=128, s_k=4000))
    metadata, num_splits = plan(inputs, form)
    rawmla.flash_mla_with_kvcache(*call_arguments(inputs), metadata, num_splits)
    target = metadata if form == "object" else (metadata, num_splits)
    draw = random.Random(2)
    for _, kind in product(range(3), ("zero", "random", "full", "one long")):
        lengths = {
            "zero": [0] * 8,
            "random": [draw.randint(0, 4000) for _ in range(8)],
            "full": [4000] * 8,
            "one long": [1] * 7 + [4000],
        }[kind]
        inputs.cache_seqlens.copy_(torch.tensor(lengths, dtype=torch.int32))
        inputs.lengths = lengths
        rawmla.get_mla_metadata(inputs.cache_seqlens, 128, 1, out=target)
        with poisoned_allocations():
            got = rawmla.flash_mla_with_kvcache(*call_arguments(inputs), metadata, num_splits)
        check(inputs, got)
