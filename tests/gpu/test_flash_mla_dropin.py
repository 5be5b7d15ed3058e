"""The module `flash_mla` and patched operators: bit by bit what rawmla's own functions return."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
from gpu_support import (
    assert_same_bits,
    call_arguments,
    check,
    plan_arguments,
    prefill_kv,
    sparse_arguments,
    sparse_check,
    sparse_plan_arguments,
    torch,
)

import rawmla
from kit import (
    DenseCase,
    DenseInputs,
    SparseCase,
    SparseInputs,
    make_dense_inputs,
    make_sparse_inputs,
)
from rawmla import compat
from rawmla.compat import ops, sgl_kernel

DENSE = DenseCase(b=5, s_q=2, h_q=16, s_k=1500, varlen=True, causal=True, zero_lengths=True)
V32 = SparseCase(b=5, s_q=2, h_q=64, s_k=2500, topk=2048, lengths="random", sink=True)
V4 = SparseCase(
    b=5,
    s_q=1,
    h_q=16,
    s_k=900,
    topk=128,
    layout="model1",
    lengths="random",
    extra_s_k=3000,
    extra_topk=512,
    extra_page_block_size=2,
    extra_lengths="random",
    sink=True,
)
PREFILL = SparseCase(
    b=70,
    h_q=64,
    s_k=900,
    topk=300,
    layout="bf16",
    page_block_size=1,
    lengths="random",
    sink=True,
    shared=True,
)


def same(name: str, got: Any, want: Any) -> None:
    """The results of two calls have the same bits, shapes and strides."""
    assert len(got) == len(want)
    for index, (one, wanted) in enumerate(zip(got, want, strict=True)):
        assert one.shape == wanted.shape and one.stride() == wanted.stride() and one.dtype == wanted.dtype
        assert_same_bits(f"{name}, result {index}", one, wanted)


def own_dense(inputs: DenseInputs, **keywords: Any) -> Any:
    plan, _ = rawmla.get_mla_metadata()
    return rawmla.flash_mla_with_kvcache(*call_arguments(inputs), plan, causal=inputs.case.causal, **keywords)


def own_sparse(inputs: SparseInputs, **keywords: Any) -> Any:
    plan, _ = rawmla.get_mla_metadata()
    return rawmla.flash_mla_with_kvcache(*sparse_arguments(inputs), plan, **{**inputs.keywords(), **keywords})


def own_prefill(inputs: SparseInputs, log_base: str = "e") -> Any:
    return rawmla.flash_mla_sparse_fwd(
        inputs.q[:, 0],
        prefill_kv(inputs),
        inputs.indices,
        0.05,
        attn_sink=inputs.attn_sink,
        topk_length=inputs.topk_length,
        log_base=log_base,
    )


@dataclasses.dataclass
class EnginePlan:
    """The plan object of vLLM's copy, with its own config class."""

    @dataclasses.dataclass
    class Config:
        b: int
        s_q: int
        h_q: int
        page_block_size: int
        h_k: int
        causal: bool
        is_fp8_kvcache: bool
        topk: int | None
        extra_page_block_size: int | None
        extra_topk: int | None
        enable_batch_invariant: bool

    have_initialized: bool = False
    config: Config | None = None
    tile_scheduler_metadata: Any = None
    num_splits: Any = None


def test_dense_in_every_form(flash_mla: Any) -> None:
    inputs = make_dense_inputs(DENSE)
    arguments = call_arguments(inputs)
    want = own_dense(inputs)
    check(inputs, want)

    plan, splits = flash_mla.get_mla_metadata(*plan_arguments(inputs), is_fp8_kvcache=False)
    for _ in range(2):
        same("FlashMLA", flash_mla.flash_mla_with_kvcache(*arguments, plan, splits, causal=True), want)
    assert plan.have_initialized and plan.config.causal is True

    q, k_cache, block_table, cache_seqlens, _ = arguments
    named = {"q": q, "k_cache": k_cache, "block_table": block_table, "cache_seqlens": cache_seqlens}
    plan, _ = flash_mla.get_mla_metadata()
    out = torch.empty(*q.shape[:-1], 512, dtype=q.dtype, device="cuda")
    got = flash_mla.flash_mla_with_kvcache(
        **named, head_dim_v=512, tile_scheduler_metadata=plan, causal=True, is_fp8_kvcache=False, out=out
    )
    assert got[0] is out
    same("vLLM", got, want)

    tiles, splits = flash_mla.get_mla_decoding_metadata(
        cache_seqlens, DENSE.s_q * DENSE.h_q, 1, DENSE.h_q, use_legacy=True
    )
    hoisted = flash_mla.flash_mla_interface.FlashMLASchedMeta(
        tile_scheduler_metadata=tiles, num_splits=splits
    )
    got = flash_mla.flash_mla_with_kvcache(
        **named, head_dim_v=512, tile_scheduler_metadata=hoisted, causal=True, use_legacy=True
    )
    assert hoisted.tile_scheduler_metadata is tiles and hoisted.have_initialized
    same("sgl-flash-mla, hoisted plan", got, want)
    assert_same_bits("hoisted plan", tiles, plan.tile_scheduler_metadata)
    assert_same_bits("hoisted splits", splits, plan.num_splits)
    assert tiles.shape[0] <= torch.cuda.get_device_properties(0).multi_processor_count

    got = flash_mla.flash_mla_with_kvcache(*arguments, None, causal=True)
    same("no plan", got, want)

    foreign = EnginePlan()
    for _ in range(2):
        same("vLLM's plan", flash_mla.flash_mla_with_kvcache(*arguments, foreign, causal=True), want)
    assert type(foreign.config) is EnginePlan.Config
    assert_same_bits("vLLM's plan", foreign.tile_scheduler_metadata, plan.tile_scheduler_metadata)


def test_dense_of_the_older_generation() -> None:
    inputs = make_dense_inputs(DENSE)
    try:
        flash_mla = rawmla.install_flash_mla(replace=True, api="tensors")
        lengths, rows, h_kv, _ = plan_arguments(inputs)
        tiles, splits = flash_mla.get_mla_metadata(lengths, rows, h_kv)
        want_tiles, want_splits = rawmla.get_mla_metadata(lengths, rows, h_kv)
        assert_same_bits("rows", tiles, want_tiles)
        assert_same_bits("splits", splits, want_splits)
        # Chitu and SGLang keep both in buffers of their own, num_splits in a longer one.
        buffer = torch.full((40,), -1, dtype=torch.int32, device="cuda")
        buffer[: DENSE.b + 1].copy_(splits)
        for number in (DENSE.b + 1, 40):
            got = flash_mla.flash_mla_with_kvcache(
                *call_arguments(inputs), tiles.clone(), buffer[:number], None, True
            )
            same("tensors", got, own_dense(inputs))
    finally:
        rawmla.uninstall_flash_mla()


@pytest.mark.parametrize("case", (V32, V4), ids=lambda case: case.layout)
def test_sparse_in_every_form(flash_mla: Any, case: SparseCase) -> None:
    inputs = make_sparse_inputs(case)
    given = inputs.keywords()
    want = own_sparse(inputs)
    sparse_check(inputs, want)
    call = flash_mla.flash_mla_with_kvcache
    sixteen = (
        *sparse_arguments(inputs), None, None, None, False, True, inputs.indices, inputs.attn_sink,
        inputs.extra_k_cache, inputs.extra_indices, inputs.topk_length, inputs.extra_topk_length,
    )  # fmt: skip
    same("FlashMLA", call(*sixteen), want)
    out = torch.empty(*inputs.q.shape[:-1], 512, dtype=inputs.q.dtype, device="cuda")
    same("vLLM", call(*sixteen, out, False), want)
    same("sgl-flash-mla", call(*sixteen, False, True), want)
    name = "V32" if case.layout == "v32" else "V4"
    same("sgl-flash-mla, format", call(*sixteen, use_legacy=True, kv_format=name), want)

    invariant = own_sparse(inputs, enable_batch_invariant=True)
    same("vLLM, batch invariant", call(*sixteen, None, True), invariant)
    same("sgl-flash-mla, batch invariant", call(*sixteen, True), invariant)

    # is_fp8_kvcache is left out, and the block table and the lengths are what engines pass: dummies.
    del given["is_fp8_kvcache"]
    dummy = torch.zeros(1, 1, dtype=torch.int32, device="cuda")
    plan, _ = flash_mla.get_mla_metadata()
    arguments = (inputs.q, inputs.k_cache, dummy, dummy[0], 512, plan)
    for _ in range(2):
        same("dummies", call(*arguments, **given), want)

    # SGLang's planner writes the arrays of an object, in a buffer of its own.
    foreign = EnginePlan()
    foreign.tile_scheduler_metadata = plan.tile_scheduler_metadata.clone()
    foreign.num_splits = plan.num_splits.clone()
    rows = foreign.tile_scheduler_metadata
    same("given arrays", call(*arguments[:5], foreign, **given), want)
    assert foreign.tile_scheduler_metadata is rows and foreign.have_initialized


def test_hoisted_sparse_plan(flash_mla: Any) -> None:
    """A plan that knows topk alone serves any topk_length; so in sgl_kernel's order, as bare tensors."""
    inputs = make_sparse_inputs(dataclasses.replace(V32, sink=False))
    given = inputs.keywords()
    lengths, rows, _, h_q, is_fp8, topk = sparse_plan_arguments(inputs)
    tiles, splits = sgl_kernel.get_mla_metadata(lengths, rows, 1, h_q, is_fp8, topk)
    got = sgl_kernel.flash_mla_with_kvcache(*sparse_arguments(inputs), tiles, splits, **given)
    sparse_check(inputs, got)
    plan = rawmla.FlashMLASchedMeta(tile_scheduler_metadata=tiles, num_splits=splits)
    same("in an object", flash_mla.flash_mla_with_kvcache(*sparse_arguments(inputs), plan, **given), got)


def test_prefill_in_every_form(flash_mla: Any) -> None:
    inputs = make_sparse_inputs(PREFILL)
    natural, base_2 = own_prefill(inputs), own_prefill(inputs, "2")
    q, kv = inputs.q[:, 0], prefill_kv(inputs)
    seven = (q, kv, inputs.indices, 0.05, 512, inputs.attn_sink, inputs.topk_length)
    call = flash_mla.flash_mla_sparse_fwd
    same("FlashMLA", call(*seven), natural)
    buffer = torch.zeros(q.shape[0], 128, 512, dtype=q.dtype, device="cuda")
    got = call(*seven, buffer[:, :64])
    assert got[0].data_ptr() == buffer.data_ptr() and not bool(buffer[:, 64:].any())
    for index, (one, wanted) in enumerate(zip(got, natural, strict=True)):
        assert_same_bits(f"vLLM, head slice, result {index}", one, wanted)
    same("sgl-flash-mla, natural", call(*seven, True), natural)
    same("sgl-flash-mla, base 2", call(*seven, True, True), base_2)
    out, max_logits, lse = call(*seven, use_legacy=True, return_log2_lse=False)
    assert max_logits is None and lse is None
    assert_same_bits("sgl-flash-mla, no statistics", out, natural[0])
    same("sgl_kernel", sgl_kernel.flash_mla_sparse_fwd(*seven), base_2)
    same("SGLang, current kernels", sgl_kernel.flash_mla_sparse_fwd(*seven, use_legacy=False), natural)


@pytest.mark.parametrize("case", (V32, V4), ids=lambda case: case.layout)
def test_capture(flash_mla: Any, case: SparseCase) -> None:
    """The plan of an empty object, or of None, is computed in the graph, so replays follow the lengths."""
    inputs = make_sparse_inputs(case)
    call = flash_mla.flash_mla_with_kvcache
    own_sparse(inputs)  # loads the kernels
    plan, _ = flash_mla.get_mla_metadata()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [
            call(*sparse_arguments(inputs), given, **inputs.keywords()) for given in (plan, plan, None)
        ]
    assert inputs.topk_length is not None
    for number in (case.topk, 0, 33, case.topk // 2):
        inputs.topk_length.fill_(number)
        inputs.topk_length[::2] = case.topk
        graph.replay()
        want = own_sparse(inputs)
        for got in results:
            same(f"topk_length {number}", got, want)


def test_dense_capture_with_a_hoisted_plan(flash_mla: Any) -> None:
    """Engines keep the arrays of a plan in buffers, and copy a new plan into them before each replay."""
    inputs = make_dense_inputs(dataclasses.replace(DENSE, zero_lengths=False))
    want = own_dense(inputs)
    planned = (DENSE.s_q * DENSE.h_q, 1, DENSE.h_q)
    tiles, splits = flash_mla.get_mla_decoding_metadata(inputs.cache_seqlens, *planned)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan = rawmla.FlashMLASchedMeta(tile_scheduler_metadata=tiles, num_splits=splits)
        got = flash_mla.flash_mla_with_kvcache(*call_arguments(inputs), plan, causal=True)
    graph.replay()
    same("as captured", got, want)
    for factor in (0.5, 0.1, 0.9):
        inputs.cache_seqlens.copy_(torch.tensor([int(n * factor) for n in inputs.lengths]))
        new_tiles, new_splits = flash_mla.get_mla_decoding_metadata(inputs.cache_seqlens, *planned)
        tiles.copy_(new_tiles)
        splits.copy_(new_splits)
        graph.replay()
        same(f"lengths times {factor}", got, own_dense(inputs))


def theirs(*args: Any) -> Any:
    raise AssertionError("the engine's kernel")


@pytest.fixture(params=tuple(ops.NAMESPACES))
def patched(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The operators of an engine, defined here with its schemas and kernels that fail; then patched."""
    namespace = request.param
    library = torch.library.Library(namespace, "DEF")
    try:
        for name, operator in ops.NAMESPACES[namespace].items():
            library.define(operator.schema)
            # Not "CUDA": torch lets Python replace a kernel of C++ there, but none of Python.
            library.impl(name, theirs, "CompositeExplicitAutograd")
        with ops.patch(namespace) as patch:
            assert set(patch.operators) == set(ops.NAMESPACES[namespace])
            yield getattr(torch.ops, namespace)
        with pytest.raises(AssertionError, match="the engine's kernel"):
            zeros = torch.zeros(1, 1, 1, device="cuda")
            getattr(torch.ops, namespace).sparse_prefill_fwd(
                zeros, zeros, zeros, 1.0, 512, None, None, *([None] if namespace == "_flashmla_C" else [])
            )
    finally:
        library._destroy()


def given_plan(plan: Any) -> tuple[Any, Any]:
    return (None, None) if plan is None else (plan.tile_scheduler_metadata, plan.num_splits)


@pytest.mark.parametrize("case", (V32, V4), ids=lambda case: case.layout)
def test_patched_sparse_decode(patched: Any, case: SparseCase) -> None:
    inputs = make_sparse_inputs(case)
    want = own_sparse(inputs)
    scale = inputs.q.shape[-1] ** -0.5
    plan = rawmla.FlashMLASchedMeta()
    rawmla.flash_mla_with_kvcache(*sparse_arguments(inputs), plan, **inputs.keywords())
    for one in (None, plan):
        tiles, splits = given_plan(one)
        out, lse, new_tiles, new_splits = patched.sparse_decode_fwd(
            inputs.q, inputs.k_cache, inputs.indices, inputs.topk_length, inputs.attn_sink, tiles, splits,
            inputs.extra_k_cache, inputs.extra_indices, inputs.extra_topk_length, 512, scale,
        )  # fmt: skip
        same("sparse_decode_fwd", (out, lse), want)
        assert_same_bits("plan", new_tiles, plan.tile_scheduler_metadata)
        assert_same_bits("splits", new_splits, plan.num_splits)
        if one is not None:
            assert new_tiles.data_ptr() == tiles.data_ptr()
            assert new_splits.data_ptr() == splits.data_ptr()


def test_patched_dense_decode(patched: Any) -> None:
    if not hasattr(patched, "dense_decode_fwd"):
        assert patched.name == "flash_mla"  # sgl-flash-mla's current kernels are sparse alone
        return
    inputs = make_dense_inputs(DENSE)
    q, k_cache, block_table, lengths, _ = call_arguments(inputs)
    want = own_dense(inputs)
    plan = rawmla.FlashMLASchedMeta()
    rawmla.flash_mla_with_kvcache(*call_arguments(inputs), plan, causal=True)
    vllm = patched.name == "_flashmla_C"
    for one in (None, plan):
        tiles, splits = given_plan(one)
        out = torch.empty(*q.shape[:-1], 512, dtype=q.dtype, device="cuda") if vllm else None
        arguments = (q, k_cache, 512, lengths, block_table, 576**-0.5, True, tiles, splits)
        got, lse, new_tiles, new_splits = patched.dense_decode_fwd(*arguments, *([out] if vllm else []))
        same("dense_decode_fwd", (got, lse), want)
        if out is not None:
            assert got.data_ptr() == out.data_ptr()
        assert_same_bits("plan", new_tiles, plan.tile_scheduler_metadata)
        if one is not None:
            assert new_tiles.data_ptr() == tiles.data_ptr()
            assert new_splits.data_ptr() == splits.data_ptr()


def test_patched_prefill(patched: Any) -> None:
    inputs = make_sparse_inputs(PREFILL)
    q, kv = inputs.q[:, 0], prefill_kv(inputs)
    seven = (q, kv, inputs.indices, 0.05, 512, inputs.attn_sink, inputs.topk_length)
    natural = own_prefill(inputs)
    if patched.name == "_flashmla_C":
        out = torch.empty_like(natural[0])
        got = patched.sparse_prefill_fwd(*seven, out)
        assert got[0].data_ptr() == out.data_ptr()
        same("given out", got, natural)
        got = patched.sparse_prefill_fwd(*seven, None)
    else:
        got = patched.sparse_prefill_fwd(*seven)
    same("sparse_prefill_fwd", got, natural)
    if patched.name == "flash_mla_legacy":
        same("base 2", patched.sparse_prefill_fwd(*seven, True), own_prefill(inputs, "2"))
        out, max_logits, lse = patched.sparse_prefill_fwd(*seven, False, False)
        assert max_logits is None and lse is None
        assert_same_bits("no statistics", out, natural[0])


def test_patched_operators_in_a_graph(patched: Any) -> None:
    inputs = make_sparse_inputs(V4)
    own_sparse(inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse, tiles, splits = patched.sparse_decode_fwd(
            inputs.q, inputs.k_cache, inputs.indices, inputs.topk_length, inputs.attn_sink, None, None,
            inputs.extra_k_cache, inputs.extra_indices, inputs.extra_topk_length, 512, 512**-0.5,
        )  # fmt: skip
    assert inputs.topk_length is not None
    for number in (V4.topk, 0, 7):
        inputs.topk_length.fill_(number)
        graph.replay()
        same(f"topk_length {number}", (out, lse), own_sparse(inputs))


def test_status_names_the_kernels(flash_mla: Any) -> None:
    inputs = make_dense_inputs(DENSE)
    before = compat.status()["functions"].get("flash_mla_with_kvcache", {"calls": 0})["calls"]
    flash_mla.flash_mla_with_kvcache(*call_arguments(inputs), None, causal=True)
    status = compat.status()
    noted = status["functions"]["flash_mla_with_kvcache"]
    assert noted["calls"] == before + 1 and noted["called_as"] == "FlashMLA with plan objects"
    assert noted["shapes"] == [tuple(inputs.q.shape), tuple(inputs.k_cache.shape)]
    assert any(label.startswith("mla_dense_decode") for label in status["kernels"])
