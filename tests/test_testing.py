"""The tests' own tools: inputs are what they claim, poison poisons, comparisons fail when they should."""

import os
import random
import subprocess
import sys
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import pytest

from kit import (
    DenseCase,
    DenseInputs,
    SparseCase,
    SparseInputs,
    Tolerance,
    check_close,
    lse_tolerance,
    make_dense_inputs,
    make_sparse_inputs,
    measure,
    out_tolerance,
)
from kit.flex import FlexCase
from kit.generators import GARBAGE_PAGE, SHARP_FACTOR
from kit.mha import MhaCase
from kit.plans import IDLE_FORMS, LAYOUTS, blocks_of, check_plan, read_splits, write_plan
from kit.prefix import PrefixCase
from kit.sparse import INT_MAX, INT_MIN, block_fields, block_stride
from rawmla import reference

LAYOUT_CASES = (
    DenseCase(b=4, h_q=2, s_k=100, varlen=True, page_block_size=16, seed=4),
    DenseCase(b=9, s_q=2, h_q=4, h_kv=2, s_k=70, varlen=True, zero_lengths=True, block_gap=3, table_gap=2),
    DenseCase(b=3, h_q=3, lengths=(0, 256, 257), page_block_size=256, dtype="float16", d_qk=512),
)


def decode(inputs: DenseInputs, causal: bool | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The NumPy reference on a case's inputs."""
    return reference.flash_mla_with_kvcache(
        inputs.q,
        inputs.k_cache,
        inputs.block_table,
        inputs.cache_seqlens,
        512,
        causal=inputs.case.causal if causal is None else causal,
    )


# ---- names of cases


@pytest.mark.parametrize("kind", (MhaCase, FlexCase, PrefixCase))
def test_a_name_is_what_differs_from_the_defaults(kind: Any) -> None:
    """Memory of no token holds NaN by default, which is not equal to itself."""
    assert kind().id == "default"
    assert kind(gap=inf, layout="slice").id == "layout=slice gap=inf"
    assert MhaCase(window=(3, -1)).id == "window=(3,-1)"


# ---- generators


def test_varlen_lengths_are_those_of_the_published_benchmark() -> None:
    draw = random.Random(0)
    published = [max(int(draw.normalvariate(4096, 2048)), 2) for _ in range(128)]
    assert DenseCase(b=128, s_q=2, s_k=4096, varlen=True).request_lengths() == published


def test_zero_lengths_and_given_lengths() -> None:
    lengths = DenseCase(b=128, s_k=100, zero_lengths=True).request_lengths()
    assert set(lengths) == {0, 100} and 10 < lengths.count(0) < 60
    assert DenseCase(b=2, lengths=(3, 0)).request_lengths() == [3, 0]
    with pytest.raises(ValueError, match="lengths"):
        DenseCase(b=3, lengths=(3, 0))


def test_ids_tell_cases_apart() -> None:
    base = DenseCase(b=2)
    changes: list[dict[str, Any]] = [
        {"b": 3},
        {"s_q": 2},
        {"s_k": 20},
        {"h_q": 8},
        {"h_kv": 2},
        {"d_qk": 512},
        {"page_block_size": 16},
        {"varlen": True},
        {"causal": True},
        {"dtype": "float16"},
        {"seed": 1},
        {"zero_lengths": True},
        {"sharp": True},
        {"block_gap": 1},
        {"table_gap": 1},
        {"lengths": (1, 2)},
    ]
    ids = {base.id} | {replace(base, **change).id for change in changes}
    assert len(ids) == len(changes) + 1
    assert base.id == "b2-sq1-sk4096-h128x1-d576-page64-bf16"


@pytest.mark.parametrize("case", LAYOUT_CASES, ids=lambda case: case.id)
def test_layout(case: DenseCase) -> None:
    """Each request has its own pages; whatever is not a token is poison; the rest of the table is garbage."""
    inputs = make_dense_inputs(case, "numpy")
    page = case.page_block_size
    assert inputs.q.shape == (case.b, case.s_q, case.h_q, case.d_qk)
    assert inputs.q.dtype.name == inputs.k_cache.dtype.name == case.dtype
    assert inputs.k_cache.shape[1:] == (page, case.h_kv, case.d_qk)
    assert inputs.cache_seqlens.tolist() == inputs.lengths == case.request_lengths()
    assert inputs.block_table.dtype == inputs.cache_seqlens.dtype == np.int32

    alive = np.zeros(inputs.k_cache.shape[:2], dtype=bool)
    for i, length in enumerate(inputs.lengths):
        count = -(-length // page)
        assert (inputs.block_table[i, count:] == GARBAGE_PAGE).all() and inputs.block_table.shape[1] > count
        for t in range(length):
            place = inputs.block_table[i, t // page], t % page
            assert not alive[place], "two tokens share a row"
            alive[place] = True
    finite = np.isfinite(inputs.k_cache.astype(np.float32)).all(axis=(2, 3))
    np.testing.assert_array_equal(finite, alive)
    assert np.isnan(inputs.k_cache.astype(np.float32)[~alive]).all()
    assert not alive.any(axis=1).all(), "no page is left unused"


def test_gaps_are_poisoned() -> None:
    case = LAYOUT_CASES[1]
    inputs = make_dense_inputs(case, "numpy")
    whole = inputs.k_cache.base
    assert whole.shape[1] == case.page_block_size + case.block_gap
    assert np.isnan(whole[:, case.page_block_size :].astype(np.float32)).all()
    table = inputs.block_table.base
    assert table.shape[1] == inputs.block_table.shape[1] + case.table_gap
    assert (table[:, -case.table_gap :] == GARBAGE_PAGE).all()


@pytest.mark.parametrize("poison", ("nan", "inf"))
def test_poison_reaches_whoever_reads_it(poison: str) -> None:
    inputs = make_dense_inputs(DenseCase(b=2, h_q=2, lengths=(70, 64), poison=poison), "numpy")
    assert np.isfinite(decode(inputs)[0]).all()
    with np.errstate(invalid="ignore"):
        inputs.cache_seqlens[0] += 1
        out, _ = decode(inputs)
        assert np.isnan(out[0]).all() and np.isfinite(out[1]).all()
        inputs.cache_seqlens[1] += 1  # needs another page, which the table does not have
        with pytest.raises(IndexError):
            decode(inputs)


def test_without_poison() -> None:
    case = DenseCase(b=2, h_q=2, lengths=(70, 64), block_gap=2)
    poisoned, clean = (
        make_dense_inputs(case, "numpy"),
        make_dense_inputs(replace(case, poison="none"), "numpy"),
    )
    assert np.isfinite(clean.k_cache.astype(np.float32)).all()
    np.testing.assert_array_equal(decode(poisoned)[0], decode(clean)[0])


def test_values() -> None:
    case = DenseCase(b=8, h_q=16, s_k=300)
    inputs = make_dense_inputs(case, "numpy")
    q, k = inputs.q.astype(np.float32), inputs.k_cache.astype(np.float32)
    assert np.abs(q).max() == 1.0 and 0.6 < q.std() < 0.8
    assert 0.095 < np.nanstd(k) < 0.105
    sharp = make_dense_inputs(replace(case, sharp=True), "numpy").q.astype(np.float32)
    scaled = np.abs(sharp).max(axis=-1) == SHARP_FACTOR
    assert scaled[0, 0, 0] and not scaled[0, 0, 1] and not scaled[1, 0, 0] and scaled.mean() == 0.5


def test_seed_decides() -> None:
    case = LAYOUT_CASES[0]
    first, second = make_dense_inputs(case, "numpy"), make_dense_inputs(case, "numpy")
    np.testing.assert_array_equal(first.q, second.q)
    np.testing.assert_array_equal(first.block_table, second.block_table)
    other = make_dense_inputs(replace(case, seed=5), "numpy")
    assert (first.q != other.q).any()


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match="framework"):
        make_dense_inputs(LAYOUT_CASES[0], "jax")
    with pytest.raises(ValueError, match="poison"):
        DenseCase(b=1, poison="zero")
    with pytest.raises(ValueError, match="dtype"):
        DenseCase(b=1, dtype="float32")


def as_numpy(inputs: DenseInputs) -> DenseInputs:
    """torch inputs as NumPy arrays."""
    return DenseInputs(
        inputs.case,
        inputs.q.double().numpy(),
        inputs.k_cache.double().numpy(),
        inputs.block_table.numpy(),
        inputs.cache_seqlens.numpy(),
        inputs.lengths,
    )


@pytest.mark.parametrize("case", LAYOUT_CASES, ids=lambda case: case.id)
def test_torch_inputs_are_laid_out_alike(case: DenseCase) -> None:
    torch = pytest.importorskip("torch")
    inputs = make_dense_inputs(case, "torch", "cpu")
    assert inputs.q.dtype == inputs.k_cache.dtype == getattr(torch, case.dtype)
    got, want = as_numpy(inputs), make_dense_inputs(case, "numpy")
    np.testing.assert_array_equal(got.block_table, want.block_table)
    np.testing.assert_array_equal(np.isnan(got.k_cache), np.isnan(want.k_cache.astype(np.float32)))
    assert np.abs(got.q).max() == 1.0 and 0.08 < np.nanstd(got.k_cache) < 0.12


@pytest.mark.parametrize("at_a_time", (1 << 26, 5000))
@pytest.mark.parametrize("page_block_size", (16, 64, 256))
@pytest.mark.parametrize("case", LAYOUT_CASES, ids=lambda case: case.id)
def test_repage_keeps_the_tokens(
    case: DenseCase, page_block_size: int, at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    from kit import repage

    monkeypatch.setattr("kit.generators.COPIED_AT_A_TIME", at_a_time)
    first = make_dense_inputs(case, "torch", "cpu")
    second = repage(first, page_block_size)
    assert second.k_cache.shape[1] == second.case.page_block_size == page_block_size
    for got, want in zip(decode(as_numpy(second)), decode(as_numpy(first)), strict=True):
        np.testing.assert_array_equal(got, want)
    same_page = make_dense_inputs(second.case, "torch", "cpu")
    np.testing.assert_array_equal(np.isnan(as_numpy(second).k_cache), np.isnan(as_numpy(same_page).k_cache))


@pytest.mark.parametrize("shape", ((), (5,), (3, 7), (2, 3, 4, 5)), ids=str)
@pytest.mark.parametrize("special", (False, True))
def test_comparison_in_parts(special: bool, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """All figures are those of the arrays as a whole."""
    draw = np.random.default_rng(0)
    want = np.array(draw.normal(size=shape))
    got = np.array(want + draw.normal(size=shape) * 0.01)
    if special:
        got[(0,) * len(shape)] = np.nan
        want[(-1,) * len(shape)] = np.inf
    whole = measure(got, want, Tolerance(0.01, 0.01))
    assert whole.misplaced == (0 if not special else 1 if shape == () else 2)
    monkeypatch.setattr("kit.compare.PART_ELEMENTS", 6)
    parts = measure(got, want, Tolerance(0.01, 0.01))
    for name in ("misplaced", "outside", "max_abs", "cosine", "rel_l2", "max_row_l2"):
        assert getattr(parts, name) == pytest.approx(getattr(whole, name), rel=1e-12, abs=1e-15), name


# ---- the reference in torch


@pytest.mark.parametrize("chunk_elements", (1, 1 << 28))
@pytest.mark.parametrize(
    "case",
    (
        *LAYOUT_CASES,
        DenseCase(b=4, s_q=4, h_q=6, h_kv=2, lengths=(0, 2, 33, 70), causal=True, sharp=True),
        DenseCase(b=3, s_q=2, h_q=5, lengths=(0, 0, 0), causal=True),
    ),
    ids=lambda case: case.id,
)
def test_torch_reference(case: DenseCase, chunk_elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from kit import torch_reference

    monkeypatch.setattr(torch_reference, "CHUNK_ELEMENTS", chunk_elements)
    inputs = make_dense_inputs(case, "torch", "cpu")
    for scale in (None, 0.2):
        out, lse = torch_reference.flash_mla_with_kvcache(
            inputs.q, inputs.k_cache, inputs.block_table, inputs.cache_seqlens, scale, case.causal
        )
        host = as_numpy(inputs)
        want_out, want_lse = reference.flash_mla_with_kvcache(
            host.q,
            host.k_cache,
            host.block_table,
            host.cache_seqlens,
            512,
            softmax_scale=scale,
            causal=case.causal,
        )
        np.testing.assert_allclose(out.numpy(), want_out, rtol=1e-11, atol=1e-13)
        np.testing.assert_allclose(lse.numpy(), want_lse, rtol=1e-12)


# ---- comparison

STRICT = Tolerance(absolute=1e-3, relative=1e-2, cosine=1e-6, row_l2=1e-2)


def to_kind(kind: str, array: np.ndarray) -> Any:
    """A NumPy array as an array of `kind`."""
    if kind == "numpy":
        return array
    return pytest.importorskip("torch").from_numpy(array)


@pytest.mark.parametrize("kind", ("numpy", "torch"))
class TestCheckClose:
    @pytest.fixture
    def want(self) -> np.ndarray:
        want = np.random.default_rng(0).standard_normal((3, 4, 64))
        want[1, 2] = np.inf
        want[0, 0, 0] = -np.inf
        want[2, 3, 1] = np.nan
        return want

    def test_equal(self, kind: str, want: np.ndarray) -> None:
        difference = check_close("x", to_kind(kind, want), to_kind(kind, want.copy()), STRICT)
        assert difference.max_abs == difference.rel_l2 == difference.max_row_l2 == 0.0
        assert difference.cosine == pytest.approx(0.0, abs=1e-15)

    def test_small_errors_pass(self, kind: str, want: np.ndarray) -> None:
        got = (want * (1 + 5e-4 * np.random.default_rng(1).standard_normal(want.shape))).astype(np.float32)
        difference = check_close("x", to_kind(kind, got), to_kind(kind, want), STRICT)
        assert 3e-4 < difference.rel_l2 < 7e-4

    @pytest.mark.parametrize("value", (np.nan, np.inf, -np.inf))
    def test_special_value_too_many(self, kind: str, want: np.ndarray, value: float) -> None:
        got = want.copy()
        got[2, 1, 7] = value
        with pytest.raises(
            AssertionError, match=r"^x: 1 of 768 .* first at \(2, 1, 7\): got -?(nan|inf), expected"
        ):
            check_close("x", to_kind(kind, got), to_kind(kind, want), STRICT)

    @pytest.mark.parametrize("value", (0.0, 1e30, np.nan))
    def test_special_value_lost(self, kind: str, want: np.ndarray, value: float) -> None:
        got = want.copy()
        got[1, 2, 5] = value
        with pytest.raises(AssertionError, match=r"first at \(1, 2, 5\).*expected inf"):
            check_close("x", to_kind(kind, got), to_kind(kind, want), STRICT)

    def test_sign_of_infinity(self, kind: str, want: np.ndarray) -> None:
        got = want.copy()
        got[0, 0, 0] = np.inf
        with pytest.raises(AssertionError, match=r"first at \(0, 0, 0\): got inf, expected -inf"):
            check_close("x", to_kind(kind, got), to_kind(kind, want), STRICT)

    def test_one_element_off(self, kind: str, want: np.ndarray) -> None:
        got = want.copy()
        got[2, 2, 9] = want[2, 2, 9] * 1.02 + 0.002
        with pytest.raises(AssertionError, match=r"1 of 768 elements are off.*first at \(2, 2, 9\): got"):
            check_close("x", to_kind(kind, got), to_kind(kind, want), STRICT)

    def test_many_small_errors(self, kind: str, want: np.ndarray) -> None:
        """A bias that every element's tolerance lets through is caught by the array's or the row's."""
        got = np.where(np.isfinite(want), want * 1.005, want)
        check_close("x", to_kind(kind, got), to_kind(kind, want), replace(STRICT, cosine=None))
        with pytest.raises(AssertionError, match="cosine difference"):
            check_close("x", to_kind(kind, got), to_kind(kind, want), STRICT)

    def test_one_bad_row(self, kind: str) -> None:
        """A wrong row of small numbers, within the absolute tolerance and invisible in the whole."""
        want = np.random.default_rng(2).standard_normal((500, 64))
        want[77] *= 1e-4
        got = want.copy()
        got[77] *= -1
        check_close("x", to_kind(kind, got), to_kind(kind, want), replace(STRICT, row_l2=None))
        with pytest.raises(AssertionError, match="relative L2 error of a row 2"):
            check_close("x", to_kind(kind, got), to_kind(kind, want), STRICT)

    def test_row_that_should_be_zero(self, kind: str) -> None:
        want = np.random.default_rng(2).standard_normal((5, 64))
        want[3] = 0.0
        check_close("x", to_kind(kind, want.copy()), to_kind(kind, want), STRICT)
        got = want.copy()
        got[3, 3] = 1e-9
        with pytest.raises(AssertionError, match="row inf"):
            check_close("x", to_kind(kind, got), to_kind(kind, want), STRICT)

    def test_shapes(self, kind: str, want: np.ndarray) -> None:
        with pytest.raises(AssertionError, match="shape"):
            check_close("x", to_kind(kind, want[:2]), to_kind(kind, want), STRICT)
        empty = to_kind(kind, want[:0])
        check_close("x", empty, empty, STRICT)

    def test_all_zero(self, kind: str) -> None:
        zero = to_kind(kind, np.zeros((3, 8)))
        assert check_close("x", zero, zero, STRICT).cosine == 0.0


def low_precision(inputs: DenseInputs, *, drop: int | None = None, scale_error: float = 1.0) -> Any:
    """What a kernel does: float32 scores, probabilities and result rounded to the type of the cache.

    With `drop` a token is left out of every request, with `scale_error` the scores are off: mistakes that the
    comparison has to find.
    """
    case = inputs.case
    dtype = inputs.q.dtype
    out = np.zeros((case.b, case.s_q, case.h_q, 512), dtype=dtype)
    lse = np.full((case.b, case.h_q, case.s_q), np.inf, dtype=np.float32)
    for i, length in enumerate(inputs.lengths):
        tokens = np.array([t for t in range(length) if t != drop])
        pages = inputs.block_table[i, tokens // case.page_block_size]
        k = inputs.k_cache[pages, tokens % case.page_block_size, 0].astype(np.float32)
        for j in range(case.s_q):
            scores = inputs.q[i, j].astype(np.float32) @ k.T * np.float32(case.d_qk**-0.5 * scale_error)
            top = scores.max(axis=1, keepdims=True)
            weights = np.exp(scores - top)
            total = weights.sum(axis=1, keepdims=True)
            product = weights.astype(dtype).astype(np.float32) @ k[:, :512]
            out[i, j] = (product / total).astype(dtype)
            lse[i, :, j] = (top + np.log(total))[:, 0]
    return out, lse


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize("sharp", (False, True))
class TestTolerances:
    """The kernels' tolerances let through what rounding does and nothing else."""

    def check(self, inputs: DenseInputs, got: Any) -> None:
        want = decode(inputs)
        check_close("out", got[0], want[0], out_tolerance(inputs.case.dtype))
        check_close("lse", got[1], want[1], lse_tolerance(SHARP_FACTOR if inputs.case.sharp else 1.0))

    @pytest.fixture
    def inputs(self, dtype: str, sharp: bool) -> DenseInputs:
        case = DenseCase(b=4, s_q=2, h_q=16, lengths=(1, 20, 140, 2000), dtype=dtype, sharp=sharp)
        return make_dense_inputs(case, "numpy")

    def test_rounding_passes(self, inputs: DenseInputs) -> None:
        self.check(inputs, low_precision(inputs))

    def test_a_token_left_out_is_found(self, inputs: DenseInputs) -> None:
        with pytest.raises(AssertionError):
            self.check(inputs, low_precision(inputs, drop=1999))

    def test_a_wrong_scale_is_found(self, inputs: DenseInputs) -> None:
        with pytest.raises(AssertionError):
            self.check(inputs, low_precision(inputs, scale_error=1.01))

    def test_heads_swapped_are_found(self, inputs: DenseInputs) -> None:
        out, lse = low_precision(inputs)
        swapped = out.copy()
        swapped[3, 1, [4, 6]] = out[3, 1, [6, 4]]
        with pytest.raises(AssertionError):
            self.check(inputs, (swapped, lse))

    def test_one_column_wrong_is_found(self, inputs: DenseInputs) -> None:
        out, lse = low_precision(inputs)
        out[3, 1, 5, 511] = 0.01
        with pytest.raises(AssertionError):
            self.check(inputs, (out, lse))


def test_error_of_rounding_is_that_of_the_published_table() -> None:
    """FlashMLA's relative L2 error is the rounding of probabilities and result, so a bound on it is fair."""
    for dtype, published in (("bfloat16", 0.00215), ("float16", 0.000267)):
        inputs = make_dense_inputs(DenseCase(b=1, h_q=128, lengths=(4096,), dtype=dtype), "numpy")
        error = measure(low_precision(inputs)[0], decode(inputs)[0], out_tolerance(dtype))
        assert error.rel_l2 == pytest.approx(published, rel=0.05)


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


def sparse_decode(inputs: SparseInputs) -> tuple[np.ndarray, np.ndarray]:
    """The NumPy reference on a sparse case's inputs."""
    return reference.flash_mla_with_kvcache(inputs.q, inputs.k_cache, None, None, 512, **inputs.keywords())


def named_slots(k_cache: np.ndarray, indices: np.ndarray, lengths: np.ndarray | None) -> np.ndarray:
    """Which slots a valid index names, `[num_blocks, page_block_size]`."""
    named = np.zeros(k_cache.shape[:2], dtype=bool)
    for i, rows in enumerate(indices):
        for index in rows[:, : None if lengths is None else max(lengths[i], 0)].ravel().tolist():
            if 0 <= index < named.size:
                named[index // named.shape[1], index % named.shape[1]] = True
    return named


def sources_of(inputs: SparseInputs) -> list[tuple[Any, Any, Any, int]]:
    """(cache, indices, lengths, page size) of the cache and, where there is one, of the extra cache."""
    case = inputs.case
    sources = [(inputs.k_cache, inputs.indices, inputs.topk_length, case.page_block_size)]
    if case.extra_topk:
        extra = (inputs.extra_k_cache, inputs.extra_indices, inputs.extra_topk_length)
        sources.append((*extra, case.extra_page_block_size))
    return sources


@pytest.mark.parametrize("case", SPARSE_CASES, ids=lambda case: case.id)
def test_every_byte_that_no_index_names_is_poison(case: SparseCase) -> None:
    inputs = make_sparse_inputs(case, "numpy")
    assert inputs.q.shape == (case.b, case.s_q, case.h_q, case.width) and inputs.q.dtype.name == "bfloat16"
    nowhere = np.isnan if case.poison == "nan" else (lambda x: ~np.isfinite(x))
    for cache, indices, lengths, page in sources_of(inputs):
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
            assert (tails[~named] == tails[..., form.scales :].max()).all()
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


@pytest.mark.parametrize("case", SPARSE_CASES, ids=lambda case: case.id)
def test_indices_hold_everything_that_may_stand_there(case: SparseCase) -> None:
    inputs = make_sparse_inputs(replace(case, b=40, lengths=case.lengths and "random"), "numpy")
    for cache, indices, lengths, _ in sources_of(inputs):
        slots = cache.shape[0] * cache.shape[1]
        named = named_slots(cache, indices, lengths).ravel()
        topk = indices.shape[2]
        assert indices.dtype == np.int32 and indices.strides[1] == 4 * (topk + case.index_gap)
        assert {-1, -123456, INT_MIN, slots, INT_MAX} <= set(np.unique(indices).tolist())
        counted = np.ones(indices.shape, dtype=bool)
        if lengths is not None:
            assert lengths.dtype == np.int32 and {0, 1, topk} <= set(lengths.tolist())
            counted &= np.arange(topk) < lengths[:, None, None]
            garbage = indices[~counted]
            inside = garbage[(garbage >= 0) & (garbage < slots)]
            assert len(inside) > len(garbage) / 2 and not named[inside].any()
        valid = counted & (indices >= 0) & (indices < slots)
        before = (~valid & counted)[..., :-1] & valid[..., 1:]
        assert before.any(), "no invalid index stands before a valid one"
        repeats = [len(row[ok]) - len(set(row[ok].tolist())) for row, ok in zip(indices, valid, strict=True)]
        assert max(repeats) > 0
        assert case.empty_rows == 0.0 or (~valid.any(axis=2)).sum() > 10


def test_sinks() -> None:
    sink = make_sparse_inputs(replace(SPARSE_CASES[1], h_q=64), "numpy").attn_sink
    assert sink.dtype == np.float32 and {-np.inf, np.inf, 0.0, 30.0, -30.0} <= set(sink.tolist())


def test_scales() -> None:
    """float32 scales are no powers of two; those rounded to some, and e8m0, are as small as they can be."""
    for power_of_two in (False, True):
        inputs = make_sparse_inputs(SparseCase(**SPARSE, power_of_two_scales=power_of_two), "numpy")
        named = named_slots(inputs.k_cache, inputs.indices, None)
        rows, _ = block_fields(inputs.k_cache, inputs.case.format)
        scales = rows[named][:, 512:528].copy().view(np.float32)
        assert (np.frexp(scales)[0] == 0.5).mean() == (1.0 if power_of_two else 0.0)
        codes = reference.decode_e4m3(rows[named][:, :512]).reshape(-1, 4, 128)
        largest = np.abs(codes).max(axis=2)
        assert largest.max() <= 448.0 and largest.min() > (200.0 if power_of_two else 447.0)
    model1 = make_sparse_inputs(SparseCase(**SPARSE, layout="model1"), "numpy")
    named = named_slots(model1.k_cache, model1.indices, None)
    rows, _ = block_fields(model1.k_cache, model1.case.format)
    largest = np.abs(reference.decode_e4m3(rows[named][:, :448]).reshape(-1, 7, 64)).max(axis=2)
    assert 200.0 < largest.min() and largest.max() <= 448.0


def test_sparse_ids_tell_cases_apart() -> None:
    base = SparseCase(b=2)
    changes: list[dict[str, Any]] = [
        {"b": 3},
        {"s_q": 2},
        {"h_q": 8},
        {"s_k": 20},
        {"topk": 65},
        {"page_block_size": 3},
        {"layout": "model1"},
        {"layout": "bf16"},
        {"layout": "bf16", "d_qk": 512},
        {"lengths": "random"},
        {"lengths": (1, 2)},
        {"extra_topk": 3},
        {"extra_topk": 3, "extra_s_k": 9},
        {"extra_topk": 3, "extra_page_block_size": 9},
        {"extra_lengths": "random"},
        {"extra_lengths": (1, 2)},
        {"sink": True},
        {"sharp": True},
        {"shared": True},
        {"power_of_two_scales": True},
        {"empty_rows": 0.5},
        {"block_gap": 1},
        {"index_gap": 1},
        {"seed": 1},
    ]
    assert len({base.id} | {replace(base, **change).id for change in changes}) == len(changes) + 1
    assert base.id == "v32-b2-sq1-h128-sk512-top64-page64"
    for wrong in ({"layout": "fp4"}, {"d_qk": 512}, {"lengths": (1,)}, {"lengths": "some"}, {"poison": "x"}):
        with pytest.raises(ValueError):
            replace(base, **wrong)
    with pytest.raises(ValueError, match="framework"):
        make_sparse_inputs(base, "jax")


def sparse_as_numpy(inputs: SparseInputs) -> SparseInputs:
    """torch inputs as NumPy arrays, with their strides; bf16 as float64."""

    def move(tensor: Any) -> Any:
        if tensor is None:
            return None
        return tensor.double().numpy() if tensor.element_size() == 2 else tensor.numpy()

    names = ("q", "k_cache", "indices", "topk_length", "extra_k_cache", "extra_indices")
    names += ("extra_topk_length", "attn_sink")
    return replace(inputs, **{name: move(getattr(inputs, name)) for name in names})


@pytest.mark.parametrize("case", SPARSE_CASES, ids=lambda case: case.id)
def test_sparse_torch_reference(case: SparseCase) -> None:
    """torch inputs are laid out like NumPy's, and the reference on the device computes what this one does."""
    pytest.importorskip("torch")
    from kit import torch_reference

    inputs = make_sparse_inputs(case, "torch", "cpu")
    host = sparse_as_numpy(inputs)
    alike = make_sparse_inputs(case, "numpy")
    np.testing.assert_array_equal(host.indices, alike.indices)
    assert inputs.k_cache.shape == alike.k_cache.shape
    assert [n * inputs.k_cache.element_size() for n in inputs.k_cache.stride()] == list(alike.k_cache.strides)
    want_out, want_lse = sparse_decode(host)
    out, lse = torch_reference.sparse_decode(inputs)
    if case.sink:
        out = torch_reference.apply_sink(out, lse, inputs.attn_sink)
    np.testing.assert_allclose(out.numpy(), want_out, rtol=1e-10, atol=1e-14)
    np.testing.assert_allclose(lse.numpy(), want_lse, rtol=1e-11)
    assert np.isfinite(want_out).all() and want_out.any()


def test_sparse_torch_reference_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from kit import torch_reference

    inputs = make_sparse_inputs(replace(SPARSE_CASES[1], b=7), "torch", "cpu")
    want = torch_reference.sparse_decode(inputs)
    monkeypatch.setattr(torch_reference, "CHUNK_ELEMENTS", 3 * 70 * 520)
    for got, one in zip(torch_reference.sparse_decode(inputs), want, strict=True):
        np.testing.assert_allclose(got.numpy(), one.numpy(), rtol=1e-12)
    inputs.indices = inputs.indices.transpose(0, 1).contiguous().transpose(0, 1)
    for got, one in zip(torch_reference.sparse_decode(inputs), want, strict=True):
        np.testing.assert_allclose(got.numpy(), one.numpy(), rtol=1e-12)
    alone, _ = torch_reference.sparse_decode(inputs, extra=False)
    assert bool((alone != want[0]).any())


# ---- plans


def random_plans() -> list[tuple[list[int], list[int]]]:
    """Lengths and shares."""
    plans = []
    for seed in range(60):
        draw = random.Random(seed)
        lengths = [draw.choice((0, 0, 1, 63, 64, 65, 300, 1000)) for _ in range(draw.randint(1, 9))]
        plans.append((lengths, [draw.randint(1, 8) for _ in range(draw.randint(1, 12))]))
    return plans


@pytest.mark.parametrize("layout", LAYOUTS)
def test_written_plans_are_complete(layout: str) -> None:
    for (lengths, shares), idle_form in zip(random_plans(), IDLE_FORMS * 20, strict=True):
        rows, num_splits = write_plan(
            lengths, shares, layout, idle_form=idle_form, idle_before=2, idle_after=1
        )
        summary = check_plan(rows, num_splits, lengths, layout)
        assert len(rows) == len(shares) + 3
        assert sum(summary.blocks) == sum(blocks_of(lengths))
        assert sum(summary.splits) == num_splits[-1]


def test_both_layouts_say_the_same() -> None:
    for lengths, shares in random_plans():
        by_layout = [write_plan(lengths, shares, layout) for layout in LAYOUTS]
        splits = [
            read_splits(rows, lengths, layout) for (rows, _), layout in zip(by_layout, LAYOUTS, strict=True)
        ]
        assert splits[0] == splits[1]
        np.testing.assert_array_equal(by_layout[0][1], by_layout[1][1])


def test_plan_columns() -> None:
    """Requests of 3, 0 and 2 blocks in shares of 2: parts (0: 0-2), (0: 2-3, 1, 2: 0-1), (2: 1-2)."""
    lengths = [150, 0, 128]
    rows, num_splits = write_plan(lengths, [2, 2, 2], "object")
    assert num_splits.tolist() == [0, 2, 3, 5]
    assert rows.tolist() == [[0, 0, 0, 2, 0, 1, 1, 0], [0, 2, 2, 1, 1, 1, 1, 0], [2, 2, 1, 2, 1, 1, 1, 0]]
    rows, _ = write_plan(lengths, [2, 2, 2], "tensors")
    assert rows.tolist() == [[0, 0, 0, 2, 0, 0, 0, 0], [0, 2, 2, 1, 1, 0, 0, 0], [2, 1, 2, 2, 1, 0, 0, 0]]


@pytest.mark.parametrize("column", range(5))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_damaged_plans_are_found(layout: str, column: int) -> None:
    lengths = [700, 0, 64, 65, 1999]
    rows, num_splits = write_plan(lengths, [7] * 7, layout)
    for part in range(len(rows)):
        for change in (-1, 1):
            damaged = rows.copy()
            damaged[part, column] += change
            if (damaged[part] == rows[part]).all():
                continue
            with pytest.raises(AssertionError):
                check_plan(damaged, num_splits, lengths, layout)
    for request in range(len(lengths) + 1):
        damaged = num_splits.copy()
        damaged[request] += 1
        with pytest.raises(AssertionError):
            check_plan(rows, damaged, lengths, layout)


def test_damaged_flags_are_found() -> None:
    lengths = [700, 64, 64]
    rows, num_splits = write_plan(lengths, [3] * 5, "object")
    for column in (5, 6):
        damaged = rows.copy()
        damaged[0, column] ^= 1
        with pytest.raises(AssertionError, match="flags"):
            check_plan(damaged, num_splits, lengths, "object")


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


@pytest.mark.parametrize("shape", ((2, 3, 5, 512), (7, 2, 512)), ids=str)
@pytest.mark.parametrize("parts", (1, 4))
def test_torch_reference_of_merging(parts: int, shape: tuple[int, ...]) -> None:
    torch = pytest.importorskip("torch")
    from kit import torch_reference

    draw = np.random.default_rng(parts)
    lse_shape = (shape[0], shape[2], shape[1]) if len(shape) == 4 else shape[:2]
    outs, lses = [], []
    for part in range(parts):
        out, lse = draw.standard_normal(shape), draw.standard_normal(lse_shape) * 4
        lse.reshape(-1)[part::3] = np.inf if part % 2 else -np.inf
        lse.reshape(-1)[0] = np.inf  # without keys in every part
        empty = np.isinf(lse)
        out[np.swapaxes(empty, 1, 2) if len(shape) == 4 else empty] = np.nan
        outs.append(out)
        lses.append(lse)
    want = reference.merge_attn_states(outs, lses)
    got = torch_reference.merge_attn_states(
        [torch.from_numpy(x) for x in outs], [torch.from_numpy(x) for x in lses]
    )
    for one, wanted in zip(got, want, strict=True):
        np.testing.assert_allclose(one.numpy(), wanted, rtol=1e-12, atol=1e-12)
