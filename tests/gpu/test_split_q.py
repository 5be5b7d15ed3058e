"""A q in two arrays, the second with the RoPE columns, gives the bits of one array.

In every kernel that reads q, and in a CUDA graph. Which pairs are taken is in tests/test_split_q_calls.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest
from gpu_support import (
    forget_prepared_calls,
    no_kernel_loaded,
    small_plans,
    torch,
    united_selections,
)

import rawmla
from kit import DenseCase, SparseCase
from operations import Call, assert_results
from operations.mla_decode import make_dense_call
from operations.mla_prefill import PREFILL_KINDS, make_prefill_call
from operations.mla_sparse import make_sparse_call
from rawmla import jit

Pair = tuple[Any, Any]

MAKE: dict[str, Callable[[Any], Call]] = {
    "dense": make_dense_call,
    "sparse": make_sparse_call,
    "prefill": make_prefill_call,
}


Defines = dict[str, int]


@dataclass(frozen=True)
class Reads:
    """A call, and the kernel that reads its q: the name, and some of the defines of a variant."""

    operation: str
    case: Any
    kernel: str
    defines: Defines = field(default_factory=dict)

    @property
    def id(self) -> str:
        return f"{self.operation}-{self.kernel}-{self.defines}-{self.case.id}"

    @property
    def clusters(self) -> bool:
        """Small calls do not reach the kernel for clusters by themselves."""
        return self.kernel == CLUSTER

    def make(self) -> Call:
        return MAKE[self.operation](self.case)


MANY_ROWS, FEW_ROWS = "mla_dense_decode", "mla_dense_decode_few_rows"
FEW_HEADS, FP8, CLUSTER, BF16 = (
    f"mla_sparse_{name}" for name in ("fp8_few_heads", "fp8", "fp8_cluster", "bf16")
)
DENSE_SHAPES: tuple[tuple[dict[str, Any], str, Defines], ...] = (
    ({"s_q": 2, "h_q": 8}, FEW_ROWS, {}),
    ({"h_q": 12, "page_block_size": 16}, FEW_ROWS, {}),
    ({"h_q": 40}, MANY_ROWS, {"CLUSTER": 1}),
    ({"s_q": 3, "h_q": 50, "dtype": "float16"}, MANY_ROWS, {"CLUSTER": 1}),
    ({"h_q": 128, "page_block_size": 32}, MANY_ROWS, {"CLUSTER": 1}),
    ({"h_q": 128}, MANY_ROWS, {"CLUSTER": 2}),
    ({"s_q": 2, "h_q": 120, "h_kv": 2, "dtype": "float16"}, MANY_ROWS, {"CLUSTER": 2}),
)
DENSE = [
    Reads(
        "dense",
        DenseCase(b=5, s_k=700, varlen=True, causal=True, d_qk=d_qk, **shape),
        kernel,
        {**defines, "D_QK": d_qk},
    )
    for d_qk, (shape, kernel, defines) in product((576, 512), DENSE_SHAPES)
]
SPARSE_SHAPES: tuple[tuple[dict[str, Any], tuple[int, ...], str], ...] = (
    ({"layout": "v32"}, (9, 16), FEW_HEADS),
    ({"layout": "v32"}, (64, 128), FP8),
    ({"layout": "v32"}, (100, 128), CLUSTER),
    ({"layout": "model1"}, (16, 128), FP8),
    ({"layout": "model1"}, (100, 128), CLUSTER),
    ({"layout": "bf16", "d_qk": 576}, (16, 64, 100), BF16),
    ({"layout": "bf16", "d_qk": 512}, (16, 128), BF16),
)
SPARSE = [
    Reads(
        "sparse",
        SparseCase(b=5, s_q=2, h_q=h_q, s_k=300, topk=200, lengths="random", sink=True, **layout),
        kernel,
    )
    for layout, heads, kernel in SPARSE_SHAPES
    for h_q in heads
]
PREFILL_SHAPES: tuple[tuple[str, int, int, str, Defines], ...] = (
    ("bf16", 9, 16, BF16, {"GROUP_TOKENS": 1}),
    ("bf16_512", 200, 100, BF16, {"GROUP_TOKENS": 1}),
    ("bf16", 1031, 8, BF16, {"GROUP_TOKENS": 8}),
    ("bf16_512", 1031, 16, BF16, {"GROUP_TOKENS": 4}),
    ("bf16", 1031, 32, BF16, {"GROUP_TOKENS": 2}),
    ("v32", 9, 16, FEW_HEADS, {}),
    ("v32", 9, 64, FP8, {}),
    ("v32", 9, 128, CLUSTER, {}),
    ("v32", 200, 100, BF16, {"GROUP_TOKENS": 1}),  # the cache is copied to bf16 rows
    ("model1", 9, 64, FP8, {}),
    ("model1", 9, 128, CLUSTER, {}),
    ("model1", 1031, 16, BF16, {"GROUP_TOKENS": 4}),
)
PREFILL = [
    Reads(
        "prefill",
        SparseCase(b=s_q, h_q=h_q, s_k=300, topk=133, lengths="random", sink=True, **PREFILL_KINDS[kind]),
        kernel,
        defines,
    )
    for kind, s_q, h_q, kernel, defines in PREFILL_SHAPES
]
CASES = (*DENSE, *SPARSE, *PREFILL)
SEVERAL = (DENSE[0], DENSE[5], SPARSE[1], SPARSE[3], SPARSE[-1], PREFILL[0])


def split(q: Any) -> Pair:
    """The columns of q in two arrays as engines have them, amid NaN: the first is part of one with the heads
    outermost, as a product with a matrix per head makes it; the second is the end of 192 columns.
    """
    *tokens, heads, d_qk = q.shape

    def nan(*shape: int) -> Any:
        return torch.full(shape, float("nan"), dtype=q.dtype, device=q.device)

    first = nan(heads + 2, tokens[0] + 2, *tokens[1:], d_qk - 64 + 16)
    second = nan(tokens[0] + 2, *tokens[1:], heads + 3, 192)
    pair = first[1:-1, 1:-1, ..., 8:-8].movedim(0, -2), second[1:-1, ..., 2:-1, 128:]
    assert [x.shape for x in pair] == [(*tokens, heads, d_qk - 64), (*tokens, heads, 64)]
    assert pair[0].stride()[:-1] != pair[1].stride()[:-1]
    copy_to(pair, q)
    return pair


def copy_to(pair: Pair, q: Any) -> None:
    """Put the columns of q into a pair."""
    pair[0].copy_(q[..., :-64])
    pair[1].copy_(q[..., -64:])


def kernels_asked_for(monkeypatch: pytest.MonkeyPatch) -> list[jit.KernelSpec]:
    """The variants that calls look up from here on."""
    asked: list[jit.KernelSpec] = []
    get_kernel = jit.get_kernel

    def asking(spec: jit.KernelSpec, *arguments: Any, **keywords: Any) -> Any:
        asked.append(spec)
        return get_kernel(spec, *arguments, **keywords)

    monkeypatch.setattr(jit, "get_kernel", asking)
    forget_prepared_calls()
    return asked


@pytest.mark.parametrize("reads", CASES, ids=lambda reads: reads.id)
def test_bits_of_one_array(reads: Reads, monkeypatch: pytest.MonkeyPatch) -> None:
    call = reads.make()
    pair = split(call.arguments["q"])
    for form in call.forms():
        want = call.run(form)
        call.check(want)
        asked = kernels_asked_for(monkeypatch)
        got = call.run(form, q=pair)
        assert_results(f"in two arrays, {form}", call, got, want)
        readers = [spec for spec in asked if spec.name.startswith(("mla_dense", "mla_sparse"))]
        assert {spec.name for spec in readers} == {reads.kernel}
        assert any(reads.defines.items() <= dict(spec.defines).items() for spec in readers)
    nope, rope = pair
    for first, second in ((nope.contiguous(), rope.contiguous()), (call.arguments["q"][..., :-64], rope)):
        got = call.run(q=(first, second))
        assert_results(f"{first.stride()} and {second.stride()}", call, got, call.run())


@pytest.mark.parametrize("kind", PREFILL_KINDS)
def test_chunks_of_prefill(kind: str) -> None:
    """The addresses of both arrays move from chunk to chunk, and to the tokens behind the last group."""
    case = SparseCase(b=103, h_q=16, s_k=300, topk=133, lengths="random", **PREFILL_KINDS[kind])
    for text, chunks in (("tokens", small_plans(40)), ("groups", united_selections(1 << 16, tokens=1))):
        with chunks:
            call = make_prefill_call(case)
            want = call.run()
            call.check(want)
            got = call.run(q=split(call.arguments["q"]))
            assert_results(f"chunks of {text}", call, got, want)


@pytest.mark.parametrize("reads", SEVERAL, ids=lambda reads: reads.id)
def test_in_a_graph_after_warmup_call(reads: Reads) -> None:
    """`warmup_call` with a pair loads all that the capture needs; replays follow values changed in place."""
    call = reads.make()
    q = call.arguments["q"]
    pair = split(q)
    with no_kernel_loaded():
        plan: dict[str, Any] = {}
        if call.plan is not None:
            plan = dict(zip(("tile_scheduler_metadata", "num_splits"), call.make_plan(), strict=True))
        rawmla.warmup_call(getattr(rawmla, call.function), **{**call.arguments, "q": pair, **plan})
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = call.run(q=pair, **plan)
        for factor in (1.0, -0.5, 2.0):
            q.mul_(factor)
            copy_to(pair, q)
            graph.replay()
            call.check(got)
            assert_results(f"times {factor}", call, got, call.run())
        graph.reset()
        torch.cuda.synchronize()
