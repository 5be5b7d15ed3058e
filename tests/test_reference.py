"""`rawmla.reference` against formulas written in other ways, and at its edges."""

import inspect
import math
import subprocess
import sys
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

import rawmla
from kit import (
    DenseCase,
    DenseInputs,
    SparseCase,
    SparseInputs,
    make_dense_inputs,
    make_sparse_inputs,
)
from rawmla import reference
from rawmla.reference import _arrays

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


def test_a_tensor_with_the_negative_bit() -> None:
    """Its memory holds the values with the other sign, which NumPy does not take."""
    torch = pytest.importorskip("torch")
    numbers = torch.arange(4.0)
    read = _arrays.read(torch._neg_view(numbers), "q")
    np.testing.assert_array_equal(read.values, -numbers.numpy())


FUNCTIONS = (
    "and_masks",
    "context_attention_fwd",
    "convert_indices",
    "create_block_mask",
    "dequantize_k_cache",
    "flash_attn_backward",
    "flash_attn_func",
    "flash_attn_varlen_backward",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "flex_attention",
    "flex_attention_backward",
    "gather_kv_cache",
    "get_mla_metadata",
    "merge_attn_states",
    "noop_mask",
    "or_masks",
    "quantize_k_cache",
    "write_kv_cache",
)
SECOND_NAMES = {
    "cu_seqlens_qo": "cu_seqlens_q",
    "cu_seqlens_kv": "cu_seqlens_k",
    "max_seqlen_qo": "max_seqlen_q",
    "max_seqlen_kv": "max_seqlen_k",
    "learnable_sink": "attn_sink",
}
"""Of arguments by keyword; signatures of the reference do not show them."""


@pytest.mark.parametrize("name", FUNCTIONS)
def test_same_arguments_as_the_gpu_function(name: str) -> None:
    """In the same order and of the same kind. The reference may have more of them, and more defaults."""
    shown = inspect.signature(getattr(rawmla, name)).parameters
    gpu = {argument: there for argument, there in shown.items() if argument not in SECOND_NAMES}
    may_be_missing = {SECOND_NAMES[argument] for argument in shown if argument in SECOND_NAMES}
    own = inspect.signature(getattr(reference, name)).parameters
    assert [x for x in own if x in gpu] == list(gpu)
    for argument, there in gpu.items():
        assert own[argument].kind == there.kind
        if argument not in may_be_missing:
            assert there.default in (inspect.Parameter.empty, own[argument].default)


def test_every_public_function_has_a_counterpart() -> None:
    public = {name for name in rawmla.__all__ if inspect.isfunction(getattr(rawmla, name))}
    compute_nothing = {"warmup", "warmup_call", "install_flash_mla", "uninstall_flash_mla"}
    compute_nothing |= {"trace_mod", "TracedMod"}
    assert set(FUNCTIONS) == public - compute_nothing
    others = {name for name in rawmla.__all__ if not name.endswith("Error")}
    others -= {"__version__", "compat", "reference", *compute_nothing, *FUNCTIONS}
    assert others >= {"BlockMask", "FlashMLASchedMeta"} and others <= set(reference.__all__)


@pytest.mark.parametrize(
    "argument", ("attn_sink", "extra_k_cache", "extra_indices_in_kvcache", "topk_length", "extra_topk_length")
)
def test_sparse_arguments_need_indices(argument: str) -> None:
    inputs = make_dense_inputs(CASES[0], "numpy")
    with pytest.raises(ValueError, match=rf"^{argument}: expected None without indices"):
        decode(inputs, **{argument: np.ones(3)})


def test_dense_decoding_has_no_fp8_cache() -> None:
    inputs = make_dense_inputs(CASES[0], "numpy")
    with pytest.raises(NotImplementedError, match="is_fp8_kvcache=True"):
        decode(inputs, is_fp8_kvcache=True)


def test_dense_arguments_that_do_not_fit() -> None:
    inputs = make_dense_inputs(CASES[1], "numpy")
    names = ("q", "k_cache", "block_table", "cache_seqlens", "head_dim_v")
    good = dict(
        zip(names, (inputs.q, inputs.k_cache, inputs.block_table, inputs.cache_seqlens, 512), strict=True)
    )
    q, k_cache = inputs.q, inputs.k_cache
    bad: list[tuple[str, Any, type[Exception], str]] = [
        ("head_dim_v", 256, ValueError, "head_dim_v: expected 512, got 256"),
        ("q", q[0], ValueError, r"q: expected shape \[b, s_q, h_q, 576 or 512\], got \[3, 6, 512\]"),
        ("q", q[..., :500], ValueError, r"q: expected shape \[b, s_q, h_q, 576 or 512\], got"),
        ("q", q[:, :, :5], ValueError, "q: expected h_q to be a multiple of the h_kv of k_cache"),
        ("q", q.astype(np.int32), TypeError, "q: expected dtype bfloat16 or float16, got int32"),
        ("q", None, TypeError, "q: expected a torch CPU tensor or a NumPy array, got NoneType"),
        (
            "k_cache",
            k_cache[0],
            ValueError,
            r"k_cache: expected shape \[num_blocks, page_block_size, h_kv, 5",
        ),
        ("k_cache", k_cache[..., :500], ValueError, r"k_cache: expected shape .* 512\], got"),
        ("k_cache", k_cache.view(np.uint16), TypeError, "k_cache: expected dtype bfloat16, got u"),
        (
            "block_table",
            inputs.block_table[:-1],
            ValueError,
            r"block_table: expected shape \[4, max_blocks\], got",
        ),
        (
            "block_table",
            inputs.block_table + 0.5,
            TypeError,
            "block_table: expected dtype int32, got float64",
        ),
        (
            "cache_seqlens",
            [1],
            ValueError,
            r"cache_seqlens: expected shape \[4\], got \[1\]",
        ),
        ("softmax_scale", 0.0, ValueError, "softmax_scale: expected a finite float32 greater than 0"),
        ("out", np.zeros((4, 3, 6, 576)), ValueError, r"out: expected shape \[4, 3, 6, 512\], got"),
        ("out", [0.0], TypeError, "out: expected a torch CPU tensor or a NumPy array, got list"),
    ]
    for name, value, error, text in bad:
        with pytest.raises(error, match="^" + text):
            reference.flash_mla_with_kvcache(**{**good, name: value})


def test_pages_outside_the_cache_are_an_error_within_the_length_only() -> None:
    inputs = make_dense_inputs(DenseCase(b=1, h_q=1, lengths=(64,)), "numpy")
    decode(inputs)
    for page in (-1, 2147480000):
        inputs.block_table[0, 0] = page
        with pytest.raises(IndexError):
            decode(inputs)


# ---- sparse

SPARSE_SHAPE: dict[str, Any] = {"b": 3, "s_q": 2, "h_q": 5, "s_k": 40, "topk": 33, "page_block_size": 7}
SPARSE_CASES = (
    SparseCase(**SPARSE_SHAPE),
    SparseCase(**SPARSE_SHAPE, layout="model1", block_gap=1, sharp=True),
    SparseCase(**SPARSE_SHAPE, layout="bf16", d_qk=576, lengths="random", index_gap=3, empty_rows=0.3),
    SparseCase(**SPARSE_SHAPE, layout="bf16", d_qk=512, sink=True, lengths=(0, -4, 100)),
    SparseCase(
        **SPARSE_SHAPE,
        layout="model1",
        sink=True,
        lengths="random",
        extra_topk=9,
        extra_s_k=20,
        extra_page_block_size=2,
        extra_lengths="random",
        empty_rows=0.3,
        poison="inf",
    ),
    SparseCase(**SPARSE_SHAPE, extra_topk=65, sink=True, block_gap=2, poison_slot_0=False, seed=3),
)


def sparse_decode(inputs: SparseInputs, **kwargs: Any) -> Arrays:
    """The reference on a sparse case's inputs."""
    return reference.flash_mla_with_kvcache(
        inputs.q, inputs.k_cache, None, None, 512, **{**inputs.keywords(), **kwargs}
    )


def tokens_by_bytes(k_cache: np.ndarray, layout: str, slot: int) -> np.ndarray:
    """One token of a cache, byte after byte, as the description of its layout says."""
    import ml_dtypes

    page = k_cache.shape[1]
    block = np.ascontiguousarray(k_cache[slot // page]).reshape(-1)
    offset = slot % page
    if layout == "bf16":
        return block.reshape(page, -1)[offset].astype(np.float64)
    if layout == "v32":
        row = block[offset * 656 :][:656]
        scales = np.repeat(row[512:528].view(np.float32), 128).astype(np.float64)
        values, rope = row[:512], row[528:]
    else:
        row = block[offset * 576 :][:576]
        codes = block[page * 576 + offset * 8 :][:7]
        scales = np.repeat(2.0 ** (codes.astype(np.float64) - 127), 64)
        values, rope = row[:448], row[448:]
    values = values.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * scales
    return np.concatenate([values, rope.view(ml_dtypes.bfloat16).astype(np.float64)])


def by_softmax_with_a_sink_column(inputs: SparseInputs, scale: float) -> Arrays:
    """Keys gathered one by one; the sink as one more column of scores, whose value is 0."""
    case = inputs.case
    out = np.zeros((case.b, case.s_q, case.h_q, 512))
    lse = np.full((case.b, case.h_q, case.s_q), np.inf)
    sources = [(inputs.k_cache, inputs.indices, inputs.topk_length)]
    if case.extra_topk:
        sources.append((inputs.extra_k_cache, inputs.extra_indices, inputs.extra_topk_length))
    for i in range(case.b):
        for j in range(case.s_q):
            keys = []
            for cache, indices, lengths in sources:
                for position, index in enumerate(indices[i, j].tolist()):
                    counts = lengths is None or position < lengths[i]
                    if counts and 0 <= index < cache.shape[0] * cache.shape[1]:
                        keys.append(tokens_by_bytes(cache, case.layout, index))
            for h in range(case.h_q if keys else 0):
                scores = scale * np.array(keys) @ inputs.q[i, j, h].astype(np.float64)
                lse[i, h, j] = np.logaddexp.reduce(scores)
                sink = -np.inf if inputs.attn_sink is None else float(inputs.attn_sink[h])
                columns = np.append(scores, sink)
                if sink == np.inf:
                    continue
                weights = np.exp(columns - columns.max())
                out[i, j, h] = weights[:-1] / weights.sum() @ np.array(keys)[:, :512]
    return out, lse


@pytest.mark.parametrize("scale", (None, 0.3))
@pytest.mark.parametrize("case", SPARSE_CASES, ids=lambda case: case.id)
def test_sparse_against_a_sink_column(case: SparseCase, scale: float | None) -> None:
    inputs = make_sparse_inputs(case, "numpy")
    out, lse = sparse_decode(inputs, softmax_scale=scale)
    want_out, want_lse = by_softmax_with_a_sink_column(inputs, case.width**-0.5 if scale is None else scale)
    assert out.dtype == lse.dtype == np.float64 and np.isfinite(out).all()
    np.testing.assert_allclose(out, want_out, rtol=1e-11, atol=1e-14)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-11)


def test_sparse_is_dense_attention_over_the_selected_rows() -> None:
    """All tokens of a request selected, in any order: what dense decoding of the same cache gives."""
    dense = make_dense_inputs(DenseCase(b=3, s_q=2, h_q=6, lengths=(5, 0, 130), page_block_size=16), "numpy")
    indices = np.full((3, 2, 131), -1, dtype=np.int32)
    for i, length in enumerate(dense.lengths):
        token = np.arange(length)
        slots = dense.block_table[i, token // 16] * 16 + token % 16
        indices[i, 0, :length], indices[i, 1, 131 - length :] = slots, slots[::-1]
    got = reference.flash_mla_with_kvcache(dense.q, dense.k_cache, None, None, 512, indices=indices)
    want = decode(dense, causal=False)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-11, atol=1e-14)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-12)


def test_duplicates_count_as_often_as_they_occur() -> None:
    inputs = make_sparse_inputs(SparseCase(b=1, h_q=2, s_k=20, topk=3, layout="bf16", invalid=0.0), "numpy")
    first, second = np.unique(inputs.indices)[:2]
    keys = inputs.k_cache.reshape(-1, 576)[[first, second]].astype(np.float64)
    inputs.indices = np.array([[[first, first, first, second]]])
    out, lse = sparse_decode(inputs)
    weights = np.exp(576**-0.5 * inputs.q[0, 0].astype(np.float64) @ keys.T) * (3, 1)
    np.testing.assert_allclose(lse[0, :, 0], np.log(weights.sum(axis=1)), rtol=1e-12)
    np.testing.assert_allclose(out[0, 0], weights / weights.sum(axis=1, keepdims=True) @ keys[:, :512])


def test_a_sink_changes_out_alone() -> None:
    inputs = make_sparse_inputs(replace(SPARSE_CASES[2], h_q=4), "numpy")
    out, lse = sparse_decode(inputs)
    assert np.isfinite(lse).any() and not np.isfinite(lse).all()
    sunk, same_lse = sparse_decode(inputs, attn_sink=np.array([-np.inf, np.inf, 0.0, 1e30]))
    np.testing.assert_array_equal(same_lse, lse)
    np.testing.assert_array_equal(sunk[:, :, 0], out[:, :, 0])
    assert not sunk[:, :, [1, 3]].any()
    kept = 1 / (1 + np.exp(-lse[:, 2]))
    np.testing.assert_allclose(sunk[:, :, 2], out[:, :, 2] * kept[..., None], rtol=1e-12)


def test_sparse_combinations_that_mean_nothing() -> None:
    inputs = make_sparse_inputs(SPARSE_CASES[0], "numpy")
    bad: dict[str, dict[str, Any]] = {
        "causal: expected False with indices, got True": {"causal": True},
        "extra_indices_in_kvcache: expected an array": {"extra_k_cache": inputs.k_cache},
        "extra_topk_length: expected None without extra_k_cache": {"extra_topk_length": np.ones(3, int)},
        r"indices: expected shape \[3, 2, topk\], got \[2, 2, 33\]": {"indices": inputs.indices[:2]},
        r"topk_length: expected shape \[3\], got": {"topk_length": np.ones(4, int)},
        r"attn_sink: expected shape \[5\]": {"attn_sink": np.ones(4)},
    }
    for text, arguments in bad.items():
        with pytest.raises(ValueError, match="^" + text):
            sparse_decode(inputs, **arguments)
    with pytest.raises(TypeError, match="^k_cache: expected dtype bfloat16, got uint"):
        sparse_decode(inputs, is_fp8_kvcache=False)
    caches = (
        (inputs.k_cache[..., :9], ValueError, r"expected shape \[num_blocks, page_block_size, 1, 656\]"),
        (
            inputs.k_cache.astype(np.int32),
            TypeError,
            "expected dtype float8_e4m3fn or uint8 or int8, got int32",
        ),
    )
    for k_cache, error, text in caches:
        with pytest.raises(error, match="^k_cache: " + text):
            sparse_decode(replace(inputs, k_cache=k_cache))


# ---- plans


def test_an_empty_plan_is_filled_by_the_first_call() -> None:
    inputs = make_dense_inputs(CASES[1], "numpy")
    metadata, num_splits = reference.get_mla_metadata()
    assert num_splits is None and not metadata.have_initialized and metadata.config is None
    out, lse = decode(inputs, tile_scheduler_metadata=metadata)
    wanted = decode(inputs)
    np.testing.assert_array_equal(out, wanted[0])
    np.testing.assert_array_equal(lse, wanted[1])
    assert metadata.have_initialized and metadata.config.b == 4
    want = reference.plan(inputs.cache_seqlens, 66)  # 3 tokens of 3 heads are a tile of each of 2 KV heads
    np.testing.assert_array_equal(metadata.tile_scheduler_metadata, want.object_rows)
    np.testing.assert_array_equal(metadata.num_splits, want.num_splits)
    decode(inputs, tile_scheduler_metadata=metadata)

    with pytest.raises(ValueError, match="^tile_scheduler_metadata: expected a plan for causal = False"):
        decode(inputs, tile_scheduler_metadata=metadata, causal=False)
    with pytest.raises(ValueError, match="^tile_scheduler_metadata: .* enable_batch_invariant = True"):
        decode(inputs, tile_scheduler_metadata=metadata, enable_batch_invariant=True)
    with pytest.raises(ValueError, match="^num_splits: expected None with a FlashMLASchedMeta"):
        decode(inputs, tile_scheduler_metadata=metadata, num_splits=metadata.num_splits)


def test_an_empty_plan_of_a_sparse_call() -> None:
    inputs = make_sparse_inputs(SPARSE_CASES[4], "numpy")
    for invariant in (False, True):
        metadata, _ = reference.get_mla_metadata(enable_batch_invariant=invariant)
        sparse_decode(inputs, tile_scheduler_metadata=metadata)
        blocks = reference.sparse_blocks(3, 33, inputs.topk_length, 9, inputs.extra_topk_length)
        want = reference.plan_blocks(blocks, 66, invariant, 2)
        np.testing.assert_array_equal(metadata.tile_scheduler_metadata, want.object_rows)
        assert metadata.config.enable_batch_invariant == invariant
        assert (metadata.config.topk, metadata.config.extra_topk) == (33, 9)


def test_plans_in_arrays_are_checked() -> None:
    inputs = make_dense_inputs(CASES[0], "numpy")
    rows, splits = reference.get_mla_metadata(inputs.cache_seqlens, 4, 1)
    decode(inputs, tile_scheduler_metadata=rows, num_splits=splits)
    bad: tuple[tuple[Any, Any, str], ...] = (
        (rows, None, "num_splits: expected an int32 array with a tensor as tile_scheduler_metadata"),
        (rows[:, :5], splits, r"tile_scheduler_metadata: expected shape \[num_sm_parts, 8\]"),
        (rows, splits[:3], r"num_splits: expected shape \[n\] with n >= b \+ 1 = 4, got \[3\]"),
    )
    for tiles, given, text in bad:
        with pytest.raises(ValueError, match="^" + text):
            decode(inputs, tile_scheduler_metadata=tiles, num_splits=given)


def test_plans_are_computed_again_in_place() -> None:
    rows, splits = reference.get_mla_metadata([5000, 70], 128, 1)
    again = reference.get_mla_metadata([3, 9000], num_heads_per_head_k=128, num_heads_k=1, out=(rows, splits))
    assert again[0] is rows and again[1] is splits
    for got, want in zip(again, reference.get_mla_metadata([3, 9000], 128, 1), strict=True):
        np.testing.assert_array_equal(got, want)

    inputs = make_dense_inputs(CASES[0], "numpy")
    metadata, _ = reference.get_mla_metadata()
    decode(inputs, tile_scheduler_metadata=metadata)
    assert reference.get_mla_metadata([9, 1, 700], 4, 1, out=metadata) == (metadata, None)
    np.testing.assert_array_equal(
        metadata.tile_scheduler_metadata, reference.plan([9, 1, 700], 132).object_rows
    )


@pytest.mark.parametrize("invariant", (False, True))
def test_an_object_without_arrays_gets_new_ones(invariant: bool) -> None:
    """A plan made ahead, which the first call uses. It says what it holds, also when it is computed again."""
    inputs = make_dense_inputs(CASES[0], "numpy")
    metadata = reference.FlashMLASchedMeta()
    given = reference.get_mla_metadata(
        inputs.cache_seqlens, 4, 1, out=metadata, enable_batch_invariant=invariant, sm_count=78
    )
    assert given == (metadata, None) and not metadata.have_initialized and metadata.config is None
    rows, splits = metadata.tile_scheduler_metadata, metadata.num_splits
    want = reference.plan(inputs.cache_seqlens, 78, invariant)
    np.testing.assert_array_equal(rows, want.object_rows)
    np.testing.assert_array_equal(splits, want.num_splits)
    assert metadata.enable_batch_invariant == invariant
    reference.get_mla_metadata([9, 1, 700], 4, 1, out=metadata, enable_batch_invariant=True)
    assert metadata.tile_scheduler_metadata is rows and metadata.enable_batch_invariant
    np.testing.assert_array_equal(rows, reference.plan([9, 1, 700], 78, True).object_rows)
    decode(inputs, tile_scheduler_metadata=metadata)
    assert metadata.tile_scheduler_metadata is rows and metadata.config.enable_batch_invariant


def test_an_object_keeps_the_kind_of_its_call() -> None:
    """As `rawmla.get_mla_metadata`: topk in blocks of 64, and whether it is batch-invariant."""
    inputs = make_sparse_inputs(SPARSE_CASES[4], "numpy")
    sparse, _ = reference.get_mla_metadata()
    sparse_decode(inputs, tile_scheduler_metadata=sparse)
    assert reference.get_mla_metadata([0, 0, 0], 4, 1, topk=128, out=sparse) == (sparse, None)
    dense, _ = reference.get_mla_metadata()
    decode(make_dense_inputs(CASES[0], "numpy"), tile_scheduler_metadata=dense)
    wanted = "topk: expected an int of 2 blocks of 64, such as 128, as in the decode call which filled out"
    bad: tuple[tuple[Any, dict[str, Any], str], ...] = (
        (sparse, {"topk": 64}, f"{wanted}, got 64"),
        (sparse, {}, f"{wanted}, got None"),
        (dense, {"topk": 64}, "topk: expected None, as in the decode call which filled out, got 64"),
        (dense, {"enable_batch_invariant": True}, "enable_batch_invariant: expected False, as in the dec"),
    )
    for metadata, arguments, text in bad:
        rows = metadata.tile_scheduler_metadata.copy()
        with pytest.raises(ValueError, match="^" + text):
            reference.get_mla_metadata([5, 5, 5], 4, 1, out=metadata, **arguments)
        np.testing.assert_array_equal(metadata.tile_scheduler_metadata, rows)


def test_bad_arguments_of_get_mla_metadata() -> None:
    bad: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"cache_seqlens": [[1]]}, ValueError, r"cache_seqlens: expected shape \[b\], got \[1, 1\]"),
        ({"cache_seqlens": [0.5]}, TypeError, "cache_seqlens: expected dtype int32, got float64"),
        ({"num_heads_q": 3}, ValueError, "num_heads_q: expected a multiple of num_heads_k"),
        ({"topk": 64, "num_heads_k": 2}, ValueError, "num_heads_k: expected 1 with topk, got 2"),
        ({"is_fp8_kvcache": True}, NotImplementedError, "is_fp8_kvcache=True"),
        ({"num_heads_per_head_k": 4}, TypeError, "num_heads_per_head_k: expected None when"),
        ({"out": 3}, TypeError, "out: expected a pair"),
        (
            {"out": reference.FlashMLASchedMeta(num_splits=np.zeros(2, np.int32))},
            ValueError,
            "out: expected a FlashMLASchedMeta with both arrays or none, got one array",
        ),
    ]
    good = {"cache_seqlens": [5], "num_q_tokens_per_head_k": 16, "num_heads_k": 1}
    for arguments, error, text in bad:
        with pytest.raises(error, match="^" + text):
            reference.get_mla_metadata(**{**good, **arguments})


# ---- torch


def on_numpy(inputs: Any) -> Any:
    """Inputs of torch CPU tensors as NumPy arrays, bf16 and fp16 as float64."""
    moved = {}
    for field in fields(inputs):
        array = getattr(inputs, field.name)
        if hasattr(array, "element_size"):
            moved[field.name] = array.double().numpy() if array.element_size() == 2 else array.numpy()
    return replace(inputs, **moved)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_torch_tensors(case: DenseCase) -> None:
    """Results are those of NumPy, rounded to the dtypes that the GPU function returns."""
    torch = pytest.importorskip("torch")
    given = make_dense_inputs(case, "torch", "cpu")
    rows, splits = reference.get_mla_metadata(
        given.cache_seqlens, case.s_q * case.h_q // case.h_kv, case.h_kv
    )
    assert rows.dtype == splits.dtype == torch.int32
    arrays = (given.q, given.k_cache, given.block_table, given.cache_seqlens, 512)
    out, lse = reference.flash_mla_with_kvcache(*arrays, rows, splits, causal=case.causal)
    want_out, want_lse = (torch.from_numpy(x) for x in decode(on_numpy(given)))
    assert torch.equal(out, want_out.to(given.q.dtype)) and torch.equal(lse, want_lse.float())

    buffer = torch.zeros(case.b, case.s_q, case.h_q + 3, 512, dtype=given.q.dtype)
    target = buffer[:, :, 1:-2]
    metadata, _ = reference.get_mla_metadata()
    again, _ = reference.flash_mla_with_kvcache(*arrays, metadata, causal=case.causal, out=target)
    assert again is target and torch.equal(buffer[:, :, 1:-2], out) and not buffer[:, :, 0].any()
    assert metadata.tile_scheduler_metadata.dtype == torch.int32


@pytest.mark.parametrize("case", SPARSE_CASES, ids=lambda case: case.id)
def test_sparse_torch_tensors(case: SparseCase) -> None:
    torch = pytest.importorskip("torch")
    given = make_sparse_inputs(case, "torch", "cpu")
    want_out, want_lse = (torch.from_numpy(x) for x in sparse_decode(on_numpy(given)))
    byte_types = (torch.uint8, torch.int8, torch.float8_e4m3fn)
    for dtype in byte_types if case.layout != "bf16" else (torch.bfloat16,):
        caches = {"extra_k_cache": given.extra_k_cache.view(dtype)} if case.extra_topk else {}
        out, lse = reference.flash_mla_with_kvcache(
            given.q, given.k_cache.view(dtype), None, None, 512, **{**given.keywords(), **caches}
        )
        assert torch.equal(out, want_out.bfloat16()) and torch.equal(lse, want_lse.float())


def test_torch_dtypes_are_those_of_the_gpu_function() -> None:
    torch = pytest.importorskip("torch")
    inputs = make_dense_inputs(CASES[0], "torch", "cpu")
    names = ("q", "k_cache", "block_table", "cache_seqlens")
    good = {name: getattr(inputs, name) for name in names}
    bad: list[tuple[str, Any, type[Exception], str]] = [
        ("q", inputs.q.float(), TypeError, "q: expected dtype bfloat16 or float16, got float32"),
        (
            "k_cache",
            inputs.k_cache.half(),
            TypeError,
            "k_cache: expected dtype bfloat16, got float16",
        ),
        ("block_table", inputs.block_table.long(), TypeError, "block_table: expected dtype int32, got int64"),
        (
            "cache_seqlens",
            inputs.cache_seqlens.long(),
            TypeError,
            "cache_seqlens: expected dtype int32, got i",
        ),
        ("out", torch.zeros(3, 1, 4, 512), TypeError, "out: expected dtype bfloat16, got float32"),
        ("q", inputs.q.to("meta"), ValueError, "q: expected a tensor in CPU memory, got a torch tensor on d"),
        ("q", inputs.q.to_sparse(), TypeError, "q: expected a dense torch tensor with memory, got Tensor"),
        (
            "q",
            inputs.q.clone().requires_grad_(),
            ValueError,
            "q: expected a tensor that does not require grad",
        ),
    ]
    for name, value, error, text in bad:
        with pytest.raises(error, match="^" + text):
            reference.flash_mla_with_kvcache(**{**good, name: value})
    with torch.no_grad():
        reference.flash_mla_with_kvcache(**{**good, "q": inputs.q.clone().requires_grad_()})


def test_torch_is_not_imported_for_others() -> None:
    code = (
        "import sys; from rawmla import reference; import numpy as np; "
        "reference.flash_mla_with_kvcache(np.zeros((1, 1, 1, 512)), np.zeros((1, 16, 1, 512)), [[0]], [4]); "
        "print({'torch', 'cupy', 'ml_dtypes'} & set(sys.modules))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


# ---- blocks of sparse requests


def test_blocks_of_sparse_requests() -> None:
    blocks = reference.sparse_blocks
    assert blocks(3, 64).tolist() == [1, 1, 1]
    assert blocks(2, 65, extra_topk=1).tolist() == [3, 3]
    assert blocks(6, 130, [-7, 0, 1, 64, 129, 4000]).tolist() == [1, 1, 1, 1, 3, 3]
    assert blocks(3, 130, [0, 0, 65], 200, [0, 1, 1000]).tolist() == [1, 1, 6]
    assert blocks(2, 64, None, 64, [0, 64]).tolist() == [1, 2]


def test_plans_of_blocks_and_of_lengths_agree() -> None:
    lengths = [0, 1, 64, 65, 4000, 130]
    blocks = [1, 1, 1, 2, 63, 3]
    for parts in (1, 3, 40):
        for invariant in (False, True):
            got, want = (
                reference.plan_blocks(blocks, parts, invariant),
                reference.plan(lengths, parts, invariant),
            )
            assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))


def test_sparse_metadata() -> None:
    """2 query tokens of 128 heads are 4 tiles: 33 parts of 132; the lengths do not matter."""
    for lengths in ([0] * 5, [9999] * 5):
        rows, num_splits = reference.get_mla_metadata(lengths, 256, 1, 128, True, 2050)
        want = reference.plan_blocks([33] * 5, 33)
        np.testing.assert_array_equal(rows, want.tensor_rows)
        np.testing.assert_array_equal(num_splits, want.num_splits)
    assert len(reference.get_mla_metadata([1], 8, 1, topk=64)[0]) == 132
    assert reference.sparse_num_parts(2, 65) == 33 and reference.sparse_num_parts(1, 1, sm_count=78) == 78
    assert reference.sparse_num_parts(65536, 8) == 1
