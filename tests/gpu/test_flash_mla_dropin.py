"""The module `flash_mla`: bit by bit what rawmla's own functions return.

How each version's arguments are read is in tests/test_flash_mla_surface.py and tests/test_compat_ops.py; what
engines pass is in test_engine_contracts.py.
"""

from __future__ import annotations

from typing import Any

import pytest
from gpu_support import assert_same_bits, torch

import rawmla
from kit import DenseCase, SparseCase
from operations import Call
from operations.mla_decode import make_dense_call
from operations.mla_prefill import PREFILL_KINDS, make_prefill_call
from operations.mla_sparse import make_sparse_call
from rawmla import compat
from rawmla.compat import sgl_kernel

EXTRA: dict[str, Any] = {"extra_s_k": 3000, "extra_topk": 512, "extra_page_block_size": 2}
RANDOM: dict[str, Any] = {"lengths": "random", "sink": True}
DENSE = DenseCase(b=5, s_q=2, h_q=16, s_k=1500, varlen=True, causal=True, zero_lengths=True)
V32 = SparseCase(b=5, s_q=2, h_q=64, s_k=2500, topk=2048, **RANDOM)
V4 = SparseCase(b=5, h_q=16, s_k=900, topk=128, layout="model1", extra_lengths="random", **EXTRA, **RANDOM)
PREFILL = SparseCase(b=70, h_q=64, s_k=900, topk=300, **PREFILL_KINDS["bf16"], **RANDOM)
decoding = pytest.mark.parametrize(
    "case", (DENSE, V32, V4), ids=lambda case: getattr(case, "layout", "dense")
)


def make(case: Any) -> Call:
    """The call of a decoding case."""
    return make_dense_call(case) if isinstance(case, DenseCase) else make_sparse_call(case)


def same(name: str, got: Any, want: Any) -> None:
    """The results of two calls have the same bits, shapes and strides."""
    for index, (one, wanted) in enumerate(zip(got, want, strict=True)):
        assert one.shape == wanted.shape and one.stride() == wanted.stride() and one.dtype == wanted.dtype
        assert_same_bits(f"{name}, result {index}", one, wanted)


@decoding
def test_plans_of_decoding(flash_mla: Any, case: Any) -> None:
    """None, an object twice, and arrays planned beforehand."""
    call = make(case)
    want = call.run()
    call.check(want)
    decode = flash_mla.flash_mla_with_kvcache
    plan, _ = flash_mla.get_mla_metadata()
    for name, given in (("none", None), ("object", plan), ("again", plan)):
        same(name, decode(**call.arguments, tile_scheduler_metadata=given), want)
    assert call.plan is not None
    tiles, splits = flash_mla.get_mla_decoding_metadata(*call.plan.values())
    hoisted = rawmla.FlashMLASchedMeta(tile_scheduler_metadata=tiles, num_splits=splits)
    call.check(decode(**call.arguments, tile_scheduler_metadata=hoisted))
    status = compat.status()
    assert status["functions"]["flash_mla_with_kvcache"]["called_as"] == "FlashMLA with plan objects"
    assert any(label.startswith("mla_") for label in status["kernels"])


@decoding
def test_capture(flash_mla: Any, case: Any) -> None:
    """The plan of an empty object, or of None, is computed in the graph, so replays follow the lengths. The
    arrays of a plan in buffers of an engine get a new plan before each replay.
    """
    call = make(case)
    call.run()  # loads the kernels
    plan, _ = flash_mla.get_mla_metadata()
    assert call.plan is not None
    tiles, splits = flash_mla.get_mla_decoding_metadata(*call.plan.values())
    hoisted = rawmla.FlashMLASchedMeta(tile_scheduler_metadata=tiles, num_splits=splits)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [
            flash_mla.flash_mla_with_kvcache(**call.arguments, tile_scheduler_metadata=given)
            for given in (plan, plan, None, hoisted)
        ]
    lengths = call.arguments["cache_seqlens" if isinstance(case, DenseCase) else "topk_length"]
    whole = lengths.clone()
    for factor in (1.0, 0.0, 0.1, 0.9):
        lengths.copy_(whole * factor)
        for buffer, new in zip(
            (tiles, splits), flash_mla.get_mla_decoding_metadata(*call.plan.values()), strict=True
        ):
            buffer.copy_(new)
        graph.replay()
        want = call.run()
        for got in results[:3]:
            same(f"lengths times {factor}", got, want)
        call.check(results[3])


def test_prefill(flash_mla: Any) -> None:
    call = make_prefill_call(PREFILL)
    natural, base_2 = call.run(log_base="e"), call.run(log_base="2")
    call.check(base_2)
    names = ("q", "kv", "indices", "sm_scale", "attn_sink", "topk_length")
    *four, sink, lengths = (call.arguments[name] for name in names)
    seven = (*four, 512, sink, lengths)
    prefill = flash_mla.flash_mla_sparse_fwd
    same("natural", prefill(*seven), natural)
    same("base 2", prefill(*seven, True, True), base_2)
    same("sgl_kernel", sgl_kernel.flash_mla_sparse_fwd(*seven), base_2)
    buffer = torch.zeros(PREFILL.b, 128, 512, dtype=torch.bfloat16, device="cuda")
    got = prefill(*seven, buffer[:, :64])
    assert got[0].data_ptr() == buffer.data_ptr() and not bool(buffer[:, 64:].any())
    for one, wanted in zip(got, natural, strict=True):
        assert_same_bits("vLLM, head slice", one, wanted)
    out, max_logits, lse = prefill(*seven, use_legacy=True, return_log2_lse=False)
    assert max_logits is None and lse is None
    assert_same_bits("no statistics", out, natural[0])
