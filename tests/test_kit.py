"""The tests' own tools: inputs are what they claim, poison poisons, comparisons fail when they should."""

import itertools
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kit import (
    DenseCase,
    SparseCase,
    Tolerance,
    check_close,
    make_dense_inputs,
    make_sparse_inputs,
)
from kit.generators import GARBAGE_PAGE
from kit.plans import LAYOUTS, check_plan, write_plan
from kit.sparse import block_fields, block_stride
from rawmla import reference

torch = pytest.importorskip("torch")
from operations.mla_decode import check  # noqa: E402
from operations.mla_decode import reference as exact  # noqa: E402

LAYOUT_CASES = (
    DenseCase(b=4, h_q=2, s_k=100, varlen=True, page_block_size=16, seed=4),
    DenseCase(b=9, s_q=2, h_q=4, h_kv=2, s_k=70, varlen=True, zero_lengths=True, block_gap=3, table_gap=2),
    DenseCase(b=3, h_q=3, lengths=(0, 256, 257), page_block_size=256, dtype="float16", poison="inf"),
)


# ---- generators


@pytest.mark.parametrize("case", LAYOUT_CASES, ids=lambda case: case.id)
def test_layout(case: DenseCase) -> None:
    """Each request has its own pages; whatever is not a token is poison; the rest of the table is garbage."""
    inputs = make_dense_inputs(case, "numpy")
    page = case.page_block_size
    assert inputs.cache_seqlens.tolist() == inputs.lengths == case.request_lengths()
    alive = np.zeros(inputs.k_cache.shape[:2], dtype=bool)
    for i, length in enumerate(inputs.lengths):
        count = -(-length // page)
        assert (inputs.block_table[i, count:] == GARBAGE_PAGE).all() and inputs.block_table.shape[1] > count
        for t in range(length):
            place = inputs.block_table[i, t // page], t % page
            assert not alive[place], "two tokens share a row"
            alive[place] = True
    values = inputs.k_cache.astype(np.float32)
    assert np.isfinite(values[alive]).all() and not np.isfinite(values[~alive]).any()
    assert not alive.any(axis=1).all(), "no page is left unused"
    gaps = make_dense_inputs(case, "torch", "cpu")
    whole = torch.empty(0, dtype=gaps.k_cache.dtype).set_(gaps.k_cache.untyped_storage())
    assert int(whole.isfinite().sum()) == alive.sum() * case.h_kv * case.d_qk
    assert (whole.numel() > gaps.k_cache.numel()) == (case.block_gap > 0)


# ---- comparison

STRICT = Tolerance(absolute=1e-3, relative=1e-2, cosine=1e-6, row_l2=1e-2)


def wanted() -> Any:
    """Normal numbers with infinities, NaN, a row of small ones, and a row of zeros."""
    want = np.random.default_rng(0).standard_normal((3, 40, 64))
    want[1, 2], want[0, 0, 0], want[2, 3, 1] = np.inf, -np.inf, np.nan
    want[2, 17] *= 1e-4
    want[2, 30] = 0
    return want


# A place, what stands there instead, and the text of the error.
PLANTED: tuple[tuple[Any, Any, str], ...] = (
    ((2, 1, 7), np.nan, r"^x: 1 of 7680 .* first at \(2, 1, 7\): got nan, expected"),
    ((2, 1, 7), -np.inf, r"first at \(2, 1, 7\): got -inf"),
    ((1, 2, 5), 0.0, r"first at \(1, 2, 5\).*expected inf"),
    ((1, 2, 5), np.nan, r"first at \(1, 2, 5\).*expected inf"),
    ((0, 0, 0), np.inf, r"first at \(0, 0, 0\): got inf, expected -inf"),
    ((2, 3, 1), 1.0, r"first at \(2, 3, 1\).*expected nan"),
    ((2, 2, 9), lambda x: x * 1.02 + 0.002, r"1 of 7680 elements are off.*first at \(2, 2, 9\): got"),
    ((...,), lambda x: np.where(np.isfinite(x), x * 1.005, x), "cosine difference"),
    ((2, 17), lambda x: -x, "relative L2 error of a row 2"),
    ((2, 30, 3), 1e-9, "row inf"),
)


@pytest.mark.parametrize("part_elements", (1 << 24, 200))
@pytest.mark.parametrize("convert", (np.asarray, torch.from_numpy), ids=("numpy", "torch"))
def test_check_close(convert: Any, part_elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes small errors, finds each planted one, and has the same figures when it works in parts."""
    monkeypatch.setattr("kit.compare.PART_ELEMENTS", part_elements)
    want = wanted()
    same = check_close("x", convert(want.copy()), convert(want), STRICT)
    assert same.max_abs == same.rel_l2 == same.max_row_l2 == 0.0 and abs(same.cosine) < 1e-15
    noise = 1 + 5e-4 * np.random.default_rng(1).standard_normal(want.shape)
    difference = check_close("x", convert((want * noise).astype(np.float32)), convert(want), STRICT)
    assert 3e-4 < difference.rel_l2 < 7e-4
    for place, value, text in PLANTED:
        got = want.copy()
        got[place] = value(got[place]) if callable(value) else value
        with pytest.raises(AssertionError, match=text):
            check_close("x", convert(got), convert(want), STRICT)
    with pytest.raises(AssertionError, match="shape"):
        check_close("x", convert(want[:2]), convert(want), STRICT)
    for empty in (want[:0], np.array(1.0)):
        check_close("x", convert(empty), convert(empty), STRICT)


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize("sharp", (False, True))
def test_tolerances(dtype: str, sharp: bool) -> None:
    """They let through what rounding does, and no token left out, wrong scale, swapped heads or column."""
    case = DenseCase(b=4, s_q=2, h_q=16, lengths=(2, 20, 140, 2000), dtype=dtype, sharp=sharp)
    inputs = make_dense_inputs(case, "torch", "cpu")
    want = exact(inputs)

    def rounded(lengths: Any = inputs.cache_seqlens, scale: float = 1.0) -> Any:
        out, lse = exact(replace(inputs, cache_seqlens=lengths), softmax_scale=case.d_qk**-0.5 * scale)
        return out.to(inputs.q.dtype), lse.float()

    out, lse = rounded()
    check(inputs, (out, lse), want)
    swapped, column = out.clone(), out.clone()
    swapped[3, 1, [4, 6]] = out[3, 1, [6, 4]]
    column[3, 1, 5, 511] = 0.01
    wrong = rounded(inputs.cache_seqlens - 1), rounded(scale=1.01)
    for results in (*wrong, (swapped, lse), (column, lse)):
        with pytest.raises(AssertionError):
            check(inputs, results, want)


# ---- sparse generators

SPARSE: dict[str, Any] = {"b": 4, "s_q": 2, "h_q": 3, "s_k": 50, "topk": 40, "page_block_size": 7}
SPARSE_CASES = (
    SparseCase(**SPARSE),
    SparseCase(
        **SPARSE, layout="model1", lengths="random", extra_topk=30, extra_page_block_size=2, sink=True
    ),
    SparseCase(**SPARSE, layout="model1", block_gap=3, lengths=(0, 40, -1, 90), extra_lengths="random"),
    SparseCase(**SPARSE, layout="bf16", d_qk=512, block_gap=2, index_gap=5, extra_topk=99, extra_s_k=30),
    SparseCase(**SPARSE, layout="bf16", d_qk=576, sharp=True, empty_rows=0.4, poison_slot_0=False),
    SparseCase(**SPARSE, power_of_two_scales=True, block_gap=1, lengths="random", poison="inf", seed=2),
)


def named_slots(k_cache: np.ndarray, indices: np.ndarray, lengths: np.ndarray | None) -> np.ndarray:
    """Which slots a valid index names, `[num_blocks, page_block_size]`."""
    named = np.zeros(k_cache.shape[:2], dtype=bool)
    for i, rows in enumerate(indices):
        for index in rows[:, : None if lengths is None else max(lengths[i], 0)].ravel().tolist():
            if 0 <= index < named.size:
                named[index // named.shape[1], index % named.shape[1]] = True
    return named


@pytest.mark.parametrize("case", SPARSE_CASES, ids=lambda case: case.id)
def test_every_byte_that_no_index_names_is_poison(case: SparseCase) -> None:
    inputs = make_sparse_inputs(case, "numpy")
    assert inputs.q.shape == (case.b, case.s_q, case.h_q, case.width) and inputs.q.dtype.name == "bfloat16"
    nowhere = np.isnan if case.poison == "nan" else (lambda x: ~np.isfinite(x))
    sources = [("", case.page_block_size)]
    sources += [("extra_", case.extra_page_block_size)] if case.extra_topk else []
    for prefix, page in sources:
        cache, indices, lengths = (
            getattr(inputs, f"{prefix}{name}") for name in ("k_cache", "indices", "topk_length")
        )
        form = case.format
        raw = cache.view(np.uint8)
        assert raw.shape[1:] == (page, 1, form.token_bytes) and cache.strides[0] == block_stride(case, page)
        named = named_slots(cache, indices, lengths)
        assert named.any() and not named.all()
        assert not named[0, 0] or not case.poison_slot_0
        values = cache if case.layout == "bf16" else reference.dequantize_k_cache(cache, case.layout)
        values = values[:, :, 0].astype(np.float64)
        assert np.isfinite(values[named]).all() and 0.09 < values[named].std() < 0.11
        assert nowhere(values[~named]).all()
        rows, tails = block_fields(raw, form)
        if tails is not None:
            assert (tails[..., form.scales :] == (0xFF if case.poison == "nan" else 0xFE)).all()
        codes = rows[~named][:, : form.values]
        allowed = {0x7F, 0xFF} if case.poison == "nan" else {0x7E, 0xFE}
        assert not form.values or set(np.unique(codes).tolist()) == allowed
        filler = block_stride(case, page) - page * form.token_bytes
        whole = np.lib.stride_tricks.as_strided(
            raw, (len(raw), block_stride(case, page)), (raw.strides[0], 1)
        )
        gaps = whole[:, whole.shape[1] - filler :]
        assert (gaps == (0xFF if case.poison == "nan" else 0x7E)).all() and (filler > 0) == (
            case.block_gap > 0
        )


# ---- plans


@pytest.mark.parametrize("layout", LAYOUTS)
def test_damaged_plans_are_found(layout: str) -> None:
    lengths = [700, 0, 64, 65, 1999]
    rows, num_splits = write_plan(lengths, [7] * 7, layout)
    check_plan(rows, num_splits, lengths, layout)
    columns = 7 if layout == "object" else 5  # the last two are flags
    for part, column, change in itertools.product(range(len(rows)), range(columns), (-1, 1)):
        damaged = rows.copy()
        damaged[part, column] += change
        with pytest.raises(AssertionError):
            check_plan(damaged, num_splits, lengths, layout)
    for request in range(len(lengths) + 1):
        damaged = num_splits.copy()
        damaged[request] += 1
        with pytest.raises(AssertionError):
            check_plan(rows, damaged, lengths, layout)


# ---- the question whether there is a GPU


def test_missing_hopper_reason_needs_no_framework() -> None:
    program = (
        "import sys, kit\n"
        "reason = kit.missing_hopper_reason()\n"
        "assert reason is None or isinstance(reason, str) and reason\n"
        "assert not {'torch', 'cupy', 'cuda.bindings'} & set(sys.modules)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=60)
