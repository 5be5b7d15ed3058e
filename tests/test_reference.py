"""`rawmla.reference` against references in torch: MLA, and tensors of all functions; surface and plans."""

import functools
import inspect
import subprocess
import sys
from dataclasses import replace
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
    torch_reference,
)
from kit.generators import on_numpy
from rawmla import reference
from rawmla.call.arguments import SECOND_NAMES
from rawmla.reference import _arrays

torch = pytest.importorskip("torch")
from operations import OPERATIONS, Operation  # noqa: E402

Arrays = tuple[np.ndarray, ...]


@pytest.fixture(params=(3 * 33 * 520, 1 << 28))
def _chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference in torch works in parts, and at once."""
    monkeypatch.setattr(torch_reference, "CHUNK_ELEMENTS", request.param)


def check(exact: Any, of_arrays: Any, of_tensors: Any, dtypes: tuple[Any, ...]) -> None:
    """Results of NumPy arrays are exact. Results of tensors are rounded to the dtypes of the GPU function."""
    for want, one, other, dtype in zip(exact, of_arrays, of_tensors, dtypes, strict=True):
        assert one.dtype == np.float64 and other.dtype == dtype
        np.testing.assert_allclose(one, want.numpy(), rtol=1e-10, atol=1e-13)
        assert torch.equal(other, torch.from_numpy(one).to(dtype))


# ---- dense decoding

DENSE_CASES = (
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


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize("scale", (None, 0.3))
@pytest.mark.parametrize("case", DENSE_CASES, ids=lambda case: case.id)
def test_dense(case: DenseCase, scale: float | None) -> None:
    given = make_dense_inputs(case, "torch", "cpu")
    exact = torch_reference.flash_mla_with_kvcache(
        given.q, given.k_cache, given.block_table, given.cache_seqlens, scale, case.causal
    )
    host, tensors = (decode(x, softmax_scale=scale) for x in (on_numpy(given), given))
    check(exact, host, tensors, (given.q.dtype, torch.float32))


def test_large_scores_do_not_overflow() -> None:
    q, k_cache = np.full((1, 1, 1, 512), 100.0), np.full((1, 16, 1, 512), 100.0)
    k_cache[0, 1] = -100.0
    out, lse = reference.flash_mla_with_kvcache(q, k_cache, [[0]], [2], 512, softmax_scale=1.0)
    assert lse[0, 0, 0] == 512e4 and (out == 100).all()


def test_what_does_not_matter() -> None:
    """A plan, strides, and whether out is given, which may be a view."""
    inputs = make_dense_inputs(DENSE_CASES[0], "numpy")
    want = decode(inputs)
    plan = {"tile_scheduler_metadata": np.zeros((3, 8), np.int32), "num_splits": np.zeros(4, np.int32)}
    given = np.full((3, 1, 4, 512), np.nan, dtype=np.float32)
    got = decode(inputs, **plan, enable_batch_invariant=True, out=given)
    inputs.q, inputs.k_cache = np.asfortranarray(inputs.q), np.asfortranarray(inputs.k_cache)
    for one, other, turned in zip(got, want, decode(inputs), strict=True):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_allclose(turned, other, rtol=1e-12, atol=1e-15)
    np.testing.assert_array_equal(given, want[0].astype(np.float32))
    tensors = make_dense_inputs(DENSE_CASES[0], "torch", "cpu")
    buffer = torch.zeros(3, 1, 7, 512, dtype=torch.bfloat16)
    target = buffer[:, :, 1:-2]
    assert decode(tensors, out=target)[0] is target
    assert torch.equal(target, torch.from_numpy(want[0]).bfloat16()) and not buffer[:, :, 0].any()


def test_a_tensor_with_the_negative_bit() -> None:
    """Its memory holds the values with the other sign, which NumPy does not take."""
    numbers = torch.arange(4.0)
    read = _arrays.read(torch._neg_view(numbers), "q")
    np.testing.assert_array_equal(read.values, -numbers.numpy())


# ---- sparse decoding and prefill

SHAPE: dict[str, Any] = {"b": 3, "s_q": 2, "h_q": 5, "s_k": 40, "topk": 33, "page_block_size": 7}
EXTRA: dict[str, Any] = {
    "layout": "model1",
    "lengths": "random",
    "extra_topk": 9,
    "extra_s_k": 20,
    "extra_lengths": "random",
}
SPARSE_CASES = (
    SparseCase(**SHAPE),
    SparseCase(**SHAPE, layout="model1", block_gap=1, sharp=True),
    SparseCase(**SHAPE, layout="bf16", d_qk=576, lengths="random", index_gap=3, empty_rows=0.3),
    SparseCase(**SHAPE, layout="bf16", d_qk=512, sink=True, lengths=(0, -4, 100)),
    SparseCase(**SHAPE, **EXTRA, extra_page_block_size=2, sink=True, empty_rows=0.3, poison="inf"),
    SparseCase(**SHAPE, extra_topk=65, sink=True, block_gap=2, poison_slot_0=False, seed=3),
)
BYTE_TYPES = (torch.uint8, torch.int8, torch.float8_e4m3fn)


def sparse_decode(inputs: SparseInputs, **kwargs: Any) -> Arrays:
    """The reference on a sparse case's inputs."""
    return reference.flash_mla_with_kvcache(
        inputs.q, inputs.k_cache, None, None, 512, **{**inputs.keywords(), **kwargs}
    )


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize("scale", (None, 0.3))
@pytest.mark.parametrize("case", SPARSE_CASES, ids=lambda case: case.id)
def test_sparse(case: SparseCase, scale: float | None) -> None:
    given = make_sparse_inputs(case, "torch", "cpu")
    out, lse = torch_reference.sparse_decode(given, scale)
    if case.sink:
        out = torch_reference.apply_sink(out, lse, given.attn_sink)
    assert out.isfinite().all() and out.any()
    host = sparse_decode(on_numpy(given), softmax_scale=scale)
    for dtype in BYTE_TYPES if case.layout != "bf16" else (torch.bfloat16,):
        caches = {"extra_k_cache": given.extra_k_cache.view(dtype)} if case.extra_topk else {}
        viewed = replace(given, k_cache=given.k_cache.view(dtype))
        tensors = sparse_decode(viewed, softmax_scale=scale, **caches)
        check((out, lse), host, tensors, (torch.bfloat16, torch.float32))


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


def prefill(inputs: SparseInputs, scale: float, **kwargs: Any) -> Arrays:
    """The reference of prefill on the inputs of a case whose requests are query tokens."""
    rows = inputs.case.layout == "bf16"
    options = {"attn_sink": inputs.attn_sink, "topk_length": inputs.topk_length, "is_fp8_kvcache": not rows}
    kv = inputs.k_cache[:, 0] if rows else inputs.k_cache
    return reference.flash_mla_sparse_fwd(inputs.q[:, 0], kv, inputs.indices, scale, **options | kwargs)


@pytest.mark.parametrize("scale", (0.04, 0.3))
@pytest.mark.parametrize("case", SPARSE_CASES, ids=lambda case: case.id)
def test_prefill(case: SparseCase, scale: float) -> None:
    """All query tokens select from one set of tokens; lse and largest scores are in base 2, or natural."""
    page = {"page_block_size": 1, "block_gap": 0} if case.layout == "bf16" else {}
    case = replace(case, s_q=1, shared=True, extra_topk=0, extra_lengths=None, **page)
    given = make_sparse_inputs(case, "torch", "cpu")
    host, tensors = (prefill(x, scale) for x in (on_numpy(given), given))
    exact = torch_reference.sparse_prefill(given, scale)
    check(exact, host, tensors, (torch.bfloat16, torch.float32, torch.float32))
    natural = prefill(on_numpy(given), scale, log_base="e", enable_batch_invariant=True)
    np.testing.assert_array_equal(natural[0], host[0])
    for one, other in zip(host[1:], natural[1:], strict=True):
        np.testing.assert_allclose(one * np.log(2.0), other, rtol=1e-14)
    out = torch.zeros_like(tensors[0])
    assert prefill(given, scale, out=out)[0] is out and torch.equal(out, tensors[0])


# ---- tensors of other functions

OF_MLA_OR_GPU_ALONE = ("dense", "sparse", "prefill", "flex", "block_mask")
TENSOR_CASES = [
    pytest.param(one, case, id=f"{one.name}-{case.id}")
    for one in OPERATIONS
    if not one.name.startswith(OF_MLA_OR_GPU_ALONE)
    for case in one.cases
]


@pytest.mark.parametrize(("operation", "case"), TENSOR_CASES)
def test_tensors(operation: Operation, case: Any) -> None:
    """Results of tensors pass the checks of kernels' results, and what is written is in place."""
    call = operation.make(case, "cpu")
    target = call.target()
    got = getattr(reference, call.function)(**call.arguments, **target)
    if call.written is not None:
        assert got is None or got is target[call.written]
        got = target[call.written]
    call.check(got if isinstance(got, tuple) else (got,))


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
        dense = make_dense_inputs(DENSE_CASES[1], "numpy")
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


def test_plans_are_computed_again_in_place() -> None:
    """A pair of arrays, or an object; one without arrays gets new ones, and remembers its kind."""
    rows, splits = reference.get_mla_metadata([5000, 70], 128, 1)
    again = reference.get_mla_metadata([3, 9000], num_heads_per_head_k=128, num_heads_k=1, out=(rows, splits))
    assert again[0] is rows and again[1] is splits
    for got, want in zip(again, reference.get_mla_metadata([3, 9000], 128, 1), strict=True):
        np.testing.assert_array_equal(got, want)
    inputs = make_dense_inputs(DENSE_CASES[0], "numpy")
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


# ---- the surface

WITHOUT_NUMBERS = {"warmup", "warmup_call", "install_flash_mla", "uninstall_flash_mla", "trace_mod"}
WITHOUT_NUMBERS |= {"install_flash_attn", "uninstall_flash_attn"}
FUNCTIONS = {name for name in rawmla.__all__ if inspect.isfunction(getattr(rawmla, name))} - WITHOUT_NUMBERS


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_same_arguments_as_the_gpu_function(name: str) -> None:
    """In the same order and of the same kind. The reference may have more of them, and more defaults. Its
    signatures do not show second names, which it takes by keyword.
    """
    shown = inspect.signature(getattr(rawmla, name)).parameters
    gpu = {argument: there for argument, there in shown.items() if argument not in SECOND_NAMES}
    may_be_missing = {SECOND_NAMES[argument] for argument in shown if argument in SECOND_NAMES}
    own = inspect.signature(getattr(reference, name)).parameters
    assert [x for x in own if x in gpu] == list(gpu)
    for argument, there in gpu.items():
        assert own[argument].kind == there.kind
        if argument not in may_be_missing:
            assert there.default in (inspect.Parameter.empty, own[argument].default)


def test_torch_is_not_imported_for_others() -> None:
    code = (
        "import sys; from rawmla import reference; import numpy as np; "
        "reference.flash_mla_with_kvcache(np.zeros((1, 1, 1, 512)), np.zeros((1, 16, 1, 512)), [[0]], [4]); "
        "print({'torch', 'cupy', 'ml_dtypes'} & set(sys.modules))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"
