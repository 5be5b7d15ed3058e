"""`rawmla.reference` against formulas written in other ways, and at its edges."""

import inspect
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import rawmla
from rawmla import reference
from rawmla.testing import DenseCase, DenseInputs, make_dense_inputs

Arrays = tuple[np.ndarray, np.ndarray]

CASES = (
    DenseCase(b=3, s_q=1, h_q=4, lengths=(5, 70, 17), page_block_size=16),
    DenseCase(b=4, s_q=3, h_q=6, h_kv=2, lengths=(1, 2, 64, 65), causal=True, d_qk=512),
    DenseCase(b=3, s_q=4, h_q=3, lengths=(0, 3, 40), causal=True, sharp=True, dtype="float16"),
    DenseCase(b=5, s_q=2, h_q=8, h_kv=8, s_k=90, varlen=True, zero_lengths=True, block_gap=5, table_gap=2),
)


def decode(inputs: DenseInputs, **kwargs: Any) -> Arrays:
    """The reference on a case's inputs."""
    kwargs.setdefault("causal", inputs.case.causal)
    return reference.flash_mla_with_kvcache(
        inputs.q, inputs.k_cache, inputs.block_table, inputs.cache_seqlens, 512, **kwargs
    )


def by_loops(inputs: DenseInputs) -> Arrays:
    """Scalar arithmetic over Python lists, one number at a time."""
    case = inputs.case
    out = np.zeros((case.b, case.s_q, case.h_q, 512))
    lse = np.full((case.b, case.h_q, case.s_q), math.inf)
    for i, length in enumerate(inputs.lengths):
        for j in range(case.s_q):
            last = length - case.s_q + j if case.causal else length - 1
            for h in range(case.h_q):
                query = inputs.q[i, j, h].astype(float).tolist()
                keys = []
                for t in range(last + 1):
                    page = inputs.block_table[i][t // case.page_block_size]
                    row = inputs.k_cache[page][t % case.page_block_size][h * case.h_kv // case.h_q]
                    keys.append(row.astype(float).tolist())
                if not keys:
                    continue
                scores = [
                    math.fsum(x * y for x, y in zip(query, key, strict=True)) / math.sqrt(case.d_qk)
                    for key in keys
                ]
                total = math.fsum(math.exp(score) for score in scores)
                lse[i, h, j] = math.log(total)
                for column in range(512):
                    weighted = (math.exp(s) * key[column] for s, key in zip(scores, keys, strict=True))
                    out[i, j, h, column] = math.fsum(weighted) / total
    return out, lse


def by_einsum(inputs: DenseInputs, scale: float) -> Arrays:
    """All requests at once: padded keys, an additive mask, products in another order."""
    case = inputs.case
    width = max(*inputs.lengths, 1)
    keys = np.zeros((case.b, width, case.h_kv, case.d_qk))
    for i, length in enumerate(inputs.lengths):
        pages = [inputs.k_cache[p] for p in inputs.block_table[i, : -(-length // case.page_block_size)]]
        if length:
            keys[i, :length] = np.concatenate(pages)[:length].astype(np.float64)
    keys = np.repeat(keys, case.h_q // case.h_kv, axis=2)  # [b, width, h_q, d_qk]
    positions = np.arange(width)[None, None]
    lengths = np.array(inputs.lengths)[:, None, None]
    ends = lengths - (case.s_q - 1 - np.arange(case.s_q)[None, :, None]) if case.causal else lengths
    mask = np.where(positions < ends, 0.0, -np.inf) * np.ones((1, case.s_q, 1))
    scores = np.einsum("bthd,bshd->bhst", keys, inputs.q.astype(np.float64) * scale) + mask[:, None]
    lse = np.logaddexp.reduce(scores, axis=-1)
    with np.errstate(invalid="ignore"):
        weights = np.nan_to_num(np.exp(scores - lse[..., None]), nan=0.0)
    out = np.einsum("bhst,bthd->bshd", weights, keys[..., :512])
    return out, np.where(np.isneginf(lse), np.inf, lse)


@pytest.mark.parametrize("case", CASES[:3], ids=lambda case: case.id)
def test_against_scalar_loops(case: DenseCase) -> None:
    short = tuple(min(length, 5) for length in case.lengths or ())
    inputs = make_dense_inputs(replace(case, lengths=short), "numpy")
    out, lse = decode(inputs)
    want_out, want_lse = by_loops(inputs)
    np.testing.assert_allclose(out, want_out, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-12)


@pytest.mark.parametrize("scale", (None, 0.3))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_against_einsum(case: DenseCase, scale: float | None) -> None:
    inputs = make_dense_inputs(case, "numpy")
    out, lse = decode(inputs, softmax_scale=scale)
    want_out, want_lse = by_einsum(inputs, case.d_qk**-0.5 if scale is None else scale)
    assert out.dtype == lse.dtype == np.float64
    np.testing.assert_allclose(out, want_out, rtol=1e-11, atol=1e-13)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-11)


def test_zero_length() -> None:
    inputs = make_dense_inputs(DenseCase(b=3, s_q=2, h_q=4, lengths=(0, 9, 0)), "numpy")
    for causal in (False, True):
        out, lse = decode(inputs, causal=causal)
        assert not out[[0, 2]].any()
        assert np.isposinf(lse[[0, 2]]).all()
        assert np.isfinite(lse[1]).all() and out[1].any()


def test_causal_with_fewer_keys_than_query_tokens() -> None:
    """With 2 keys and 4 query tokens, the first two tokens see nothing, the third one key, the last both."""
    inputs = make_dense_inputs(DenseCase(b=1, s_q=4, h_q=2, lengths=(2,), causal=True), "numpy")
    out, lse = decode(inputs)
    assert not out[0, :2].any() and np.isposinf(lse[0, :, :2]).all()
    first_page = inputs.k_cache[inputs.block_table[0, 0]].astype(np.float64)
    np.testing.assert_allclose(out[0, 2], np.repeat(first_page[:1, 0, :512], 2, axis=0), rtol=1e-14)
    whole_out, whole_lse = decode(inputs, causal=False)
    np.testing.assert_array_equal(out[0, 3], whole_out[0, 3])
    np.testing.assert_array_equal(lse[0, :, 3], whole_lse[0, :, 3])


def test_visible_tokens() -> None:
    assert [reference.visible_tokens(10, 3, j, True) for j in range(3)] == [8, 9, 10]
    assert [reference.visible_tokens(2, 4, j, True) for j in range(4)] == [0, 0, 1, 2]
    assert [reference.visible_tokens(10, 3, j, False) for j in range(3)] == [10, 10, 10]
    assert reference.visible_tokens(7, 1, 0, True) == reference.visible_tokens(7, 1, 0, False) == 7


def test_lse_is_natural_and_of_scaled_scores() -> None:
    """Four equal keys: every score is the same, lse = score + ln 4, out = the key."""
    q = np.full((1, 1, 1, 512), 0.5)
    k_cache = np.full((1, 16, 1, 512), 0.25)
    k_cache[0, 4:] = np.nan
    out, lse = reference.flash_mla_with_kvcache(q, k_cache, [[0]], [4], 512, softmax_scale=0.125)
    assert lse[0, 0, 0] == pytest.approx(0.125 * 512 * 0.5 * 0.25 + math.log(4), rel=1e-14)
    np.testing.assert_allclose(out, 0.25, rtol=1e-14)


def test_large_scores_do_not_overflow() -> None:
    q = np.full((1, 1, 1, 512), 100.0)
    k_cache = np.full((1, 16, 1, 512), 100.0)
    k_cache[0, 1] = -100.0
    out, lse = reference.flash_mla_with_kvcache(q, k_cache, [[0]], [2], 512, softmax_scale=1.0)
    assert lse[0, 0, 0] == 512e4
    np.testing.assert_array_equal(out, 100.0)


def test_values_are_the_first_512_columns() -> None:
    inputs = make_dense_inputs(DenseCase(b=1, h_q=2, lengths=(1,), d_qk=576), "numpy")
    out, _ = decode(inputs)
    row = inputs.k_cache[inputs.block_table[0, 0], 0, 0, :512].astype(np.float64)
    np.testing.assert_array_equal(out[0, 0], np.stack([row, row]))


def test_how_the_work_is_split_does_not_matter() -> None:
    inputs = make_dense_inputs(CASES[0], "numpy")
    want = decode(inputs)
    got = decode(
        inputs,
        tile_scheduler_metadata=np.zeros((3, 8), dtype=np.int32),
        num_splits=np.zeros(4, dtype=np.int32),
        enable_batch_invariant=True,
    )
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_array_equal(got[1], want[1])


def test_out_receives_the_result() -> None:
    inputs = make_dense_inputs(CASES[0], "numpy")
    given = np.full((3, 1, 4, 512), np.nan, dtype=np.float32)
    out, _ = decode(inputs, out=given)
    np.testing.assert_array_equal(given, out.astype(np.float32))


def test_strides_do_not_matter() -> None:
    inputs = make_dense_inputs(CASES[1], "numpy")
    want = decode(inputs)
    inputs.q = np.asfortranarray(inputs.q)
    inputs.k_cache = np.asfortranarray(inputs.k_cache)
    got = decode(inputs)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-12, atol=1e-15)


def test_same_arguments_as_the_gpu_function() -> None:
    gpu = inspect.signature(rawmla.flash_mla_with_kvcache).parameters
    assert list(inspect.signature(reference.flash_mla_with_kvcache).parameters) == list(gpu)


@pytest.mark.parametrize(
    "argument",
    ("indices", "attn_sink", "extra_k_cache", "extra_indices_in_kvcache", "topk_length", "is_fp8_kvcache"),
)
def test_sparse_arguments_are_refused(argument: str) -> None:
    inputs = make_dense_inputs(CASES[0], "numpy")
    with pytest.raises(NotImplementedError, match="sparse"):
        decode(inputs, **{argument: True})


def test_shapes_that_do_not_fit() -> None:
    inputs = make_dense_inputs(CASES[1], "numpy")
    arguments = (inputs.q, inputs.k_cache, inputs.block_table, inputs.cache_seqlens)
    with pytest.raises(ValueError, match="head_dim_v"):
        reference.flash_mla_with_kvcache(*arguments, 256)
    bad = {
        "k_cache": (0, inputs.q[..., :500]),
        "heads": (0, inputs.q[:, :, :5]),
        "block_table": (2, inputs.block_table[:-1]),
        "cache_seqlens": (3, inputs.cache_seqlens[:-1]),
    }
    for text, (position, value) in bad.items():
        changed = [*arguments]
        changed[position] = value
        with pytest.raises(ValueError, match=text):
            reference.flash_mla_with_kvcache(*changed, 512)


def test_pages_outside_the_cache_are_an_error_within_the_length_only() -> None:
    inputs = make_dense_inputs(DenseCase(b=1, h_q=1, lengths=(64,)), "numpy")
    decode(inputs)
    for page in (-1, 2147480000):
        inputs.block_table[0, 0] = page
        with pytest.raises(IndexError):
            decode(inputs)
