"""Plans of sparse calls: both forms, plans written by somebody else, re-use and its checks; CuPy arrays."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gpu_support import (
    assert_same_bits,
    bits,
    cupy,
    poisoned_allocations,
    sparse_arguments,
    sparse_check,
    sparse_decode,
    sparse_lse_tolerance,
    sparse_plan,
    sparse_plan_arguments,
    sparse_reference,
    torch,
    without_extra,
)

import rawmla
from rawmla import reference
from rawmla.testing import SparseCase, SparseInputs, check_close, make_sparse_inputs, out_tolerance
from rawmla.testing.plans import IDLE_FORMS, LAYOUTS, write_plan

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


def block_tokens(case: SparseCase) -> list[int]:
    """Tokens per request as plans count them: those of either cache rounded up to whole blocks of 64."""
    tokens = [-(-length // 64) * 64 for length in LENGTHS]
    if case.extra_topk:
        tokens = [n + -(-length // 64) * 64 for n, length in zip(tokens, EXTRA_LENGTHS, strict=True)]
    return tokens


def decode_with_plan(inputs: SparseInputs, rows: Any, num_splits: Any, layout: str) -> tuple[Any, Any]:
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
        return rawmla.flash_mla_with_kvcache(*sparse_arguments(inputs), metadata, splits, **inputs.keywords())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("idle_form", IDLE_FORMS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.layout)
def test_external_plans_and_idle_rows(case: SparseCase, idle_form: str, layout: str) -> None:
    inputs = make_sparse_inputs(case)
    tokens = block_tokens(case)
    total = sum(tokens) // 64
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
                tokens, shares, layout, idle_form=idle_form, idle_before=idle_before, idle_after=idle_after
            )
            got = decode_with_plan(inputs, rows, num_splits, layout)
            want = sparse_reference(inputs) if want is None else want
            try:
                sparse_check(inputs, got, want)
            except AssertionError as error:
                raise AssertionError(f"{name}, {idle_before} + {idle_after} idle rows: {error}") from error


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pieces", (1, 2, 31, 32, 33, 100, 160, 161, 256))
def test_any_number_of_splits(pieces: int, layout: str) -> None:
    case = SparseCase(
        b=2, h_q=64, s_k=17000, topk=64 * 256, layout="model1", lengths=(64 * 256, 100), sharp=True
    )
    inputs = make_sparse_inputs(case)
    shares = [256 // pieces] * (pieces - 1) + [256 - (pieces - 1) * (256 // pieces)] + [2]
    rows, num_splits = write_plan([64 * 256, 100], shares, layout)
    assert num_splits.tolist() == [0, pieces, pieces + 1]
    sparse_check(inputs, decode_with_plan(inputs, rows, num_splits, layout))


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


def test_both_forms_agree() -> None:
    """Without lengths both forms describe the same split, so the bits agree too."""
    for layout in ("v32", "model1", "bf16"):
        inputs = make_sparse_inputs(SparseCase(b=9, s_q=2, h_q=128, s_k=2100, topk=2048, layout=layout))
        by_object, by_tensors = sparse_decode(inputs, "object"), sparse_decode(inputs, "tensors")
        sparse_check(inputs, by_object)
        assert_same_bits("out", by_object[0], by_tensors[0])
        assert_same_bits("lse", by_object[1], by_tensors[1])


def test_copied_plan() -> None:
    """Engines copy plans into buffers of their own, with room to spare."""
    inputs = make_sparse_inputs(CASES[0])
    metadata, num_splits = sparse_plan(inputs, "tensors")
    buffer = torch.full((metadata.shape[0] + 20, 8), -1, dtype=torch.int32, device="cuda")
    buffer[: metadata.shape[0]] = metadata
    splits = torch.full((100,), -1, dtype=torch.int32, device="cuda")
    splits[:10] = num_splits
    with poisoned_allocations():
        got = rawmla.flash_mla_with_kvcache(*sparse_arguments(inputs), buffer, splits, **inputs.keywords())
    want = sparse_decode(inputs, "tensors")
    sparse_check(inputs, got)
    assert_same_bits("out", got[0], want[0])


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


def test_plan_of_tensors_recomputed_in_place() -> None:
    """A smaller batch over the buffers of a larger one."""
    large = make_sparse_inputs(SparseCase(b=40, h_q=64, s_k=2100, topk=2048))
    metadata, num_splits = sparse_plan(large, "tensors")
    for b in (3, 17, 40):
        inputs = replace(large, case=replace(large.case, b=b), q=large.q[:b], indices=large.indices[:b])
        metadata.fill_(-1)
        rawmla.get_mla_metadata(*sparse_plan_arguments(inputs), out=(metadata, num_splits))
        with poisoned_allocations():
            got = rawmla.flash_mla_with_kvcache(
                *sparse_arguments(inputs), metadata, num_splits, **inputs.keywords()
            )
        sparse_check(inputs, got)


# ---- CuPy

CUPY_SHAPE: dict[str, Any] = {"b": 4, "s_q": 2, "h_q": 16, "s_k": 300, "topk": 133, "page_block_size": 53}
CUPY_CASES = (
    SparseCase(**CUPY_SHAPE, lengths="random", sink=True, block_gap=1, index_gap=3, power_of_two_scales=True),
    SparseCase(
        **CUPY_SHAPE,
        layout="model1",
        block_gap=1,
        lengths="random",
        extra_topk=70,
        extra_page_block_size=2,
        extra_lengths="random",
        sink=True,
    ),
    SparseCase(**CUPY_SHAPE, layout="bf16", d_qk=512, empty_rows=0.3),
)


@pytest.mark.parametrize("form", ("object", "tensors"))
@pytest.mark.parametrize("case", CUPY_CASES, ids=lambda case: case.id)
def test_cupy_with_caches_of_bytes(case: SparseCase, form: str) -> None:
    """uint8 caches, bfloat16 of ml_dtypes; results are CuPy arrays with the bits that torch gets."""
    inputs = make_sparse_inputs(case, "cupy")
    if form == "object":
        metadata, num_splits = rawmla.get_mla_metadata()
    else:
        lengths = cupy.zeros(case.b, dtype=np.int32)
        topk = -(-case.topk // 64) * 64 + case.extra_topk if case.extra_topk else case.topk
        arguments = (case.s_q * case.h_q, 1, case.h_q, case.layout != "bf16", topk)
        metadata, num_splits = rawmla.get_mla_metadata(lengths, *arguments)
        assert isinstance(metadata, cupy.ndarray) and isinstance(num_splits, cupy.ndarray)
    out, lse = rawmla.flash_mla_with_kvcache(
        *sparse_arguments(inputs), metadata, num_splits, **inputs.keywords()
    )
    assert isinstance(out, cupy.ndarray) and isinstance(lse, cupy.ndarray)
    assert out.dtype.name == "bfloat16" and lse.dtype == np.float32

    host = make_sparse_inputs(case, "numpy")
    want_out, want_lse = reference.flash_mla_with_kvcache(*sparse_arguments(host), **host.keywords())
    check_close(f"{case.id} out", cupy.asnumpy(out), want_out, out_tolerance("bfloat16"))
    check_close(f"{case.id} lse", cupy.asnumpy(lse), want_lse, sparse_lse_tolerance(host))

    cupy.cuda.get_current_stream().synchronize()
    names = ("q", "k_cache", "indices", "topk_length", "extra_k_cache", "extra_indices")
    names += ("extra_topk_length", "attn_sink")
    arrays = {name: getattr(inputs, name) for name in names}
    shared = {name: None if array is None else torch.from_dlpack(array) for name, array in arrays.items()}
    torch_out, torch_lse = sparse_decode(replace(inputs, **shared), form)
    assert bool((bits(torch_out) == bits(torch.from_dlpack(out))).all())
    assert bool((bits(torch_lse) == bits(torch.from_dlpack(lse))).all())


def test_a_plan_serves_calls_with_the_same_configuration_only() -> None:
    """The extra cache is part of the configuration: a plan made with it does not serve a call without."""
    inputs = make_sparse_inputs(SparseCase(**SHAPE))
    metadata, _ = rawmla.get_mla_metadata()
    plain = without_extra(inputs)
    want = rawmla.flash_mla_with_kvcache(*sparse_arguments(plain), metadata, **plain.keywords())
    sparse_check(plain, want)
    with pytest.raises(ValueError, match="extra"):
        rawmla.flash_mla_with_kvcache(*sparse_arguments(inputs), metadata, **inputs.keywords())
