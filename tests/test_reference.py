"""`rawmla.reference` of MLA against formulas written in other ways; its surface, and its plans."""

import functools
import inspect
import itertools
import subprocess
import sys
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import rawmla
from kit import DenseCase, DenseInputs, SparseCase, SparseInputs, make_dense_inputs, make_sparse_inputs
from kit.generators import on_numpy
from rawmla import reference
from rawmla.reference import _arrays

torch = pytest.importorskip("torch")

Arrays = tuple[np.ndarray, ...]


# ---- dense decoding

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


@pytest.mark.parametrize("scale", (None, 0.3))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_against_einsum(case: DenseCase, scale: float | None) -> None:
    inputs = make_dense_inputs(case, "numpy")
    out, lse = decode(inputs, softmax_scale=scale)
    want_out, want_lse = by_einsum(inputs, case.d_qk**-0.5 if scale is None else scale)
    assert out.dtype == lse.dtype == np.float64
    np.testing.assert_allclose(out, want_out, rtol=1e-11, atol=1e-13)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-11)


def test_large_scores_do_not_overflow() -> None:
    q = np.full((1, 1, 1, 512), 100.0)
    k_cache = np.full((1, 16, 1, 512), 100.0)
    k_cache[0, 1] = -100.0
    out, lse = reference.flash_mla_with_kvcache(q, k_cache, [[0]], [2], 512, softmax_scale=1.0)
    assert lse[0, 0, 0] == 512e4
    np.testing.assert_array_equal(out, 100.0)


def test_what_does_not_matter() -> None:
    """A plan, strides, and whether out is given."""
    inputs = make_dense_inputs(CASES[0], "numpy")
    want = decode(inputs)
    plan = {"tile_scheduler_metadata": np.zeros((3, 8), np.int32), "num_splits": np.zeros(4, np.int32)}
    given = np.full((3, 1, 4, 512), np.nan, dtype=np.float32)
    got = decode(inputs, **plan, enable_batch_invariant=True, out=given)
    inputs.q, inputs.k_cache = np.asfortranarray(inputs.q), np.asfortranarray(inputs.k_cache)
    for one, other, turned in zip(got, want, decode(inputs), strict=True):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_allclose(turned, other, rtol=1e-12, atol=1e-15)
    np.testing.assert_array_equal(given, want[0].astype(np.float32))


def test_a_tensor_with_the_negative_bit() -> None:
    """Its memory holds the values with the other sign, which NumPy does not take."""
    numbers = torch.arange(4.0)
    read = _arrays.read(torch._neg_view(numbers), "q")
    np.testing.assert_array_equal(read.values, -numbers.numpy())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_torch_tensors(case: DenseCase) -> None:
    """Results are those of NumPy, rounded to the dtypes that the GPU function returns."""
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


# ---- sparse decoding

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


@pytest.mark.parametrize("case", SPARSE_CASES, ids=lambda case: case.id)
def test_sparse_torch_tensors(case: SparseCase) -> None:
    given = make_sparse_inputs(case, "torch", "cpu")
    want_out, want_lse = (torch.from_numpy(x) for x in sparse_decode(on_numpy(given)))
    byte_types = (torch.uint8, torch.int8, torch.float8_e4m3fn)
    for dtype in byte_types if case.layout != "bf16" else (torch.bfloat16,):
        caches = {"extra_k_cache": given.extra_k_cache.view(dtype)} if case.extra_topk else {}
        out, lse = reference.flash_mla_with_kvcache(
            given.q, given.k_cache.view(dtype), None, None, 512, **{**given.keywords(), **caches}
        )
        assert torch.equal(out, want_out.bfloat16()) and torch.equal(lse, want_lse.float())


# ---- sparse prefill

PREFILL_SHAPE: dict[str, Any] = {
    "b": 7,
    "h_q": 5,
    "s_k": 40,
    "topk": 33,
    "page_block_size": 1,
    "shared": True,
}
PREFILL_CASES = (
    SparseCase(**PREFILL_SHAPE, layout="bf16", d_qk=576),
    SparseCase(
        **PREFILL_SHAPE, layout="bf16", d_qk=512, sink=True, lengths="random", empty_rows=0.3, sharp=True
    ),
    SparseCase(**PREFILL_SHAPE, layout="bf16", lengths=(0, -4, 100, 33, 32, 1, 2), block_gap=1, index_gap=3),
    SparseCase(**{**PREFILL_SHAPE, "page_block_size": 7}, layout="v32", sink=True, empty_rows=0.3),
    SparseCase(**{**PREFILL_SHAPE, "page_block_size": 7}, layout="model1", lengths="random", block_gap=1),
)


def kv_of(inputs: SparseInputs) -> Any:
    """The kv of a prefill call: rows, or the paged cache."""
    return inputs.k_cache[:, 0] if inputs.case.layout == "bf16" else inputs.k_cache


def prefill(inputs: SparseInputs, scale: float = 0.1, **kwargs: Any) -> tuple[np.ndarray, ...]:
    """The reference on a case's inputs."""
    return reference.flash_mla_sparse_fwd(
        inputs.q[:, 0],
        kv_of(inputs),
        inputs.indices,
        scale,
        **{
            "attn_sink": inputs.attn_sink,
            "topk_length": inputs.topk_length,
            "is_fp8_kvcache": inputs.case.layout != "bf16",
            **kwargs,
        },
    )


def by_powers_of_two(inputs: SparseInputs, scale: float) -> tuple[np.ndarray, ...]:
    """The definition in base 2, as it stands in the documentation; keys gathered one by one."""
    case = inputs.case
    rows = inputs.k_cache
    if case.layout != "bf16":
        rows = reference.dequantize_k_cache(rows, case.layout)
    rows = rows.reshape(-1, case.width).astype(np.float64)
    out = np.zeros((case.b, case.h_q, 512))
    max_logits, lse = np.full((case.b, case.h_q), -np.inf), np.full((case.b, case.h_q), np.inf)
    for i in range(case.b):
        counted = case.topk if inputs.topk_length is None else int(inputs.topk_length[i])
        chosen = [
            index for index in inputs.indices[i, 0].tolist()[: max(counted, 0)] if 0 <= index < len(rows)
        ]
        for h in range(case.h_q if chosen else 0):
            p = [
                scale * np.log2(np.e) * float(rows[t] @ inputs.q[i, 0, h].astype(np.float64)) for t in chosen
            ]
            max_logits[i, h] = max(p)
            lse[i, h] = max(p) + np.log2(sum(2.0 ** (x - max(p)) for x in p))
            out[i, h] = sum(2.0 ** (x - lse[i, h]) * rows[t, :512] for x, t in zip(p, chosen, strict=True))
            if inputs.attn_sink is not None:
                sink = float(inputs.attn_sink[h])
                natural = lse[i, h] * np.log(2.0)
                out[i, h] *= 0.0 if sink == np.inf else 1.0 / (1.0 + np.exp(sink - natural))
    return out, max_logits, lse


@pytest.mark.parametrize("scale", (0.04, 0.3))
@pytest.mark.parametrize("case", PREFILL_CASES, ids=lambda case: case.id)
def test_against_powers_of_two(case: SparseCase, scale: float) -> None:
    inputs = make_sparse_inputs(case, "numpy")
    got, want = prefill(inputs, scale), by_powers_of_two(inputs, scale)
    assert all(x.dtype == np.float64 for x in got) and np.isfinite(got[0]).all() and got[0].any()
    np.testing.assert_allclose(got[0], want[0], rtol=1e-11, atol=1e-14)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-11, atol=1e-14)
    np.testing.assert_allclose(got[2], want[2], rtol=1e-11, atol=1e-14)
    natural = prefill(inputs, scale, log_base="e", enable_batch_invariant=True)
    np.testing.assert_array_equal(natural[0], got[0])
    for one, other in zip(got[1:], natural[1:], strict=True):
        np.testing.assert_allclose(one * np.log(2.0), other, rtol=1e-14)


@pytest.mark.parametrize("case", PREFILL_CASES, ids=lambda case: case.id)
def test_prefill_torch_tensors(case: SparseCase) -> None:
    """Results are those of NumPy, rounded to the dtypes that the GPU function returns."""
    given = make_sparse_inputs(case, "torch", "cpu")
    got, wanted = prefill(given), prefill(on_numpy(given))
    for one, want, dtype in zip(got, wanted, (torch.bfloat16, torch.float32, torch.float32), strict=True):
        assert one.dtype == dtype and torch.equal(one, torch.from_numpy(want).to(dtype))
    out = torch.zeros_like(got[0])
    assert prefill(given, out=out)[0] is out and torch.equal(out, got[0])


# ---- plans


@pytest.mark.parametrize("invariant", (False, True))
@pytest.mark.parametrize("is_sparse", (False, True))
def test_an_empty_plan_is_filled_by_the_first_call(is_sparse: bool, invariant: bool) -> None:
    """The results do not depend on it; later calls use it, or refuse it where it is of another kind."""
    metadata, num_splits = reference.get_mla_metadata(enable_batch_invariant=invariant)
    assert num_splits is None and not metadata.have_initialized and metadata.config is None
    if is_sparse:
        sparse = make_sparse_inputs(SPARSE_CASES[4], "numpy")
        call: Any = functools.partial(sparse_decode, sparse)
        blocks = reference.sparse_blocks(3, 33, sparse.topk_length, 9, sparse.extra_topk_length)
        want = reference.plan_blocks(blocks, 66, invariant, 2)
    else:  # 3 tokens of 3 heads are a tile of each of 2 KV heads
        dense = make_dense_inputs(CASES[1], "numpy")
        call = functools.partial(decode, dense, enable_batch_invariant=invariant)
        want = reference.plan(dense.cache_seqlens, 66, invariant)
    for got, one in zip(call(tile_scheduler_metadata=metadata), call(), strict=True):
        np.testing.assert_array_equal(got, one)
    assert metadata.have_initialized and metadata.config.enable_batch_invariant == invariant
    assert (metadata.config.topk, metadata.config.extra_topk) == ((33, 9) if is_sparse else (None, None))
    np.testing.assert_array_equal(metadata.tile_scheduler_metadata, want.object_rows)
    np.testing.assert_array_equal(metadata.num_splits, want.num_splits)
    call(tile_scheduler_metadata=metadata)
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"num_splits": metadata.num_splits}, "^num_splits: expected None with a FlashMLASchedMeta"),
        ({"causal": False}, "^tile_scheduler_metadata: expected a plan for causal = False"),
        ({"enable_batch_invariant": True}, "^tile_scheduler_metadata: .* enable_batch_invariant = True"),
    )
    for changes, text in refused[: 1 if is_sparse else 2 if invariant else 3]:
        with pytest.raises(ValueError, match=text):
            call(tile_scheduler_metadata=metadata, **changes)


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
    """A pair of arrays, or an object; one without arrays gets new ones, and remembers its kind."""
    rows, splits = reference.get_mla_metadata([5000, 70], 128, 1)
    again = reference.get_mla_metadata([3, 9000], num_heads_per_head_k=128, num_heads_k=1, out=(rows, splits))
    assert again[0] is rows and again[1] is splits
    for got, want in zip(again, reference.get_mla_metadata([3, 9000], 128, 1), strict=True):
        np.testing.assert_array_equal(got, want)
    inputs = make_dense_inputs(CASES[0], "numpy")
    metadata = reference.FlashMLASchedMeta()
    options: dict[str, Any] = {"out": metadata, "sm_count": 78}
    assert reference.get_mla_metadata(inputs.cache_seqlens, 4, 1, **options) == (metadata, None)
    assert not metadata.have_initialized and not metadata.enable_batch_invariant
    made = metadata.tile_scheduler_metadata
    np.testing.assert_array_equal(made, reference.plan(inputs.cache_seqlens, 78).object_rows)
    reference.get_mla_metadata([9, 1, 700], 4, 1, out=metadata, enable_batch_invariant=True)
    assert metadata.tile_scheduler_metadata is made and metadata.enable_batch_invariant
    np.testing.assert_array_equal(made, reference.plan([9, 1, 700], 78, True).object_rows)
    decode(inputs, tile_scheduler_metadata=metadata)
    assert metadata.tile_scheduler_metadata is made and metadata.config.enable_batch_invariant


def test_an_object_keeps_the_kind_of_its_call() -> None:
    """As `rawmla.get_mla_metadata`: topk in blocks of 64, and whether it is batch-invariant."""
    sparse, dense = (reference.get_mla_metadata()[0] for _ in range(2))
    sparse_decode(make_sparse_inputs(SPARSE_CASES[4], "numpy"), tile_scheduler_metadata=sparse)
    decode(make_dense_inputs(CASES[0], "numpy"), tile_scheduler_metadata=dense)
    assert reference.get_mla_metadata([0, 0, 0], 4, 1, topk=128, out=sparse) == (sparse, None)
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


def test_blocks_and_parts_of_sparse_requests() -> None:
    """A plan of sparse requests is one of blocks; the lengths that are given do not matter."""
    blocks = reference.sparse_blocks
    assert blocks(3, 64).tolist() == [1, 1, 1] and blocks(2, 65, extra_topk=1).tolist() == [3, 3]
    assert blocks(6, 130, [-7, 0, 1, 64, 129, 4000]).tolist() == [1, 1, 1, 1, 3, 3]
    assert blocks(3, 130, [0, 0, 65], 200, [0, 1, 1000]).tolist() == [1, 1, 6]
    assert blocks(2, 64, None, 64, [0, 64]).tolist() == [1, 2]
    for parts, invariant in itertools.product((1, 3, 40), (False, True)):
        of_blocks = reference.plan_blocks([1, 1, 1, 2, 63, 3], parts, invariant)
        of_lengths = reference.plan([0, 1, 64, 65, 4000, 130], parts, invariant)
        assert all(np.array_equal(a, b) for a, b in zip(of_blocks, of_lengths, strict=True))
    want = reference.plan_blocks([33] * 5, 33)  # 2 query tokens of 128 heads are 4 tiles: 33 parts of 132
    for lengths in ([0] * 5, [9999] * 5):
        rows, num_splits = reference.get_mla_metadata(lengths, 256, 1, 128, True, 2050)
        np.testing.assert_array_equal(rows, want.tensor_rows)
        np.testing.assert_array_equal(num_splits, want.num_splits)
    assert len(reference.get_mla_metadata([1], 8, 1, topk=64)[0]) == 132
    assert reference.sparse_num_parts(2, 65) == 33 and reference.sparse_num_parts(1, 1, sm_count=78) == 78
    assert reference.sparse_num_parts(65536, 8) == 1


# ---- the surface

NAMES = {
    "cu_seqlens_qo": "cu_seqlens_q",
    "cu_seqlens_kv": "cu_seqlens_k",
    "max_seqlen_qo": "max_seqlen_q",
    "max_seqlen_kv": "max_seqlen_k",
    "learnable_sink": "attn_sink",
}
"""Second names of arguments by keyword; signatures of the reference do not show them."""
WITHOUT_NUMBERS = {"warmup", "warmup_call", "install_flash_mla", "uninstall_flash_mla", "trace_mod"}
FUNCTIONS = {name for name in rawmla.__all__ if inspect.isfunction(getattr(rawmla, name))} - WITHOUT_NUMBERS


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_same_arguments_as_the_gpu_function(name: str) -> None:
    """In the same order and of the same kind. The reference may have more of them, and more defaults."""
    shown = inspect.signature(getattr(rawmla, name)).parameters
    gpu = {argument: there for argument, there in shown.items() if argument not in NAMES}
    may_be_missing = {NAMES[argument] for argument in shown if argument in NAMES}
    own = inspect.signature(getattr(reference, name)).parameters
    assert [x for x in own if x in gpu] == list(gpu)
    for argument, there in gpu.items():
        assert own[argument].kind == there.kind
        if argument not in may_be_missing:
            assert there.default in (inspect.Parameter.empty, own[argument].default)


def test_every_public_name_has_a_counterpart() -> None:
    others = {name for name in rawmla.__all__ if not name.endswith("Error")}
    others -= {"__version__", "compat", "reference", "TracedMod", *WITHOUT_NUMBERS}
    assert others >= {"BlockMask", "FlashMLASchedMeta"} and others <= set(reference.__all__)


def test_torch_is_not_imported_for_others() -> None:
    code = (
        "import sys; from rawmla import reference; import numpy as np; "
        "reference.flash_mla_with_kvcache(np.zeros((1, 1, 1, 512)), np.zeros((1, 16, 1, 512)), [[0]], [4]); "
        "print({'torch', 'cupy', 'ml_dtypes'} & set(sys.modules))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"
