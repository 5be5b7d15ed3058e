"""A q in two arrays, of which the second has the RoPE columns, gives the bits of one array: in every kernel
that reads q, in a CUDA graph, and with arrays of every framework.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
from gpu_support import (
    cupy,
    forced_clusters,
    forget_prepared_calls,
    no_kernel_loaded,
    small_plans,
    torch,
    united_selections,
)
from test_frameworks import Producer, forms, to_cupy

import rawmla
from kit import DenseCase, SparseCase, make_dense_inputs, make_sparse_inputs
from operations import Call, assert_results
from operations.mla_decode import dense_call
from operations.mla_prefill import PREFILL_KINDS, prefill_call
from operations.mla_sparse import sparse_call
from rawmla import jit

Pair = tuple[Any, Any]

MAKE: dict[str, Callable[[Any], Call]] = {
    "dense": lambda case: dense_call(make_dense_inputs(case)),
    "sparse": lambda case: sparse_call(make_sparse_inputs(case)),
    "prefill": lambda case: prefill_call(make_sparse_inputs(case)),
}


@dataclass(frozen=True)
class Reads:
    """A call, and the kernel that reads its q: the name, and some of the defines of a variant."""

    operation: str
    case: Any
    kernel: str
    defines: tuple[tuple[str, int], ...] = ()

    @property
    def id(self) -> str:
        words = [self.operation, self.kernel.removeprefix("mla_"), *(f"{k}{v}" for k, v in self.defines)]
        return "-".join([*words, self.case.id])

    def make(self) -> Call:
        return MAKE[self.operation](self.case)

    def forced(self) -> Any:
        """Small calls do not reach the kernel for clusters by themselves."""
        return forced_clusters() if self.kernel == "mla_sparse_fp8_cluster" else nullcontext()


MANY_ROWS, FEW_ROWS = "mla_dense_decode", "mla_dense_decode_few_rows"
DENSE_SHAPES: tuple[tuple[dict[str, Any], str, tuple[tuple[str, int], ...]], ...] = (
    ({"s_q": 2, "h_q": 8}, FEW_ROWS, ()),
    ({"h_q": 12, "page_block_size": 16}, FEW_ROWS, ()),
    ({"h_q": 40}, MANY_ROWS, (("CLUSTER", 1),)),
    ({"s_q": 3, "h_q": 50}, MANY_ROWS, (("CLUSTER", 1),)),
    ({"h_q": 128, "page_block_size": 32}, MANY_ROWS, (("CLUSTER", 1),)),
    ({"h_q": 128}, MANY_ROWS, (("CLUSTER", 2),)),
    ({"s_q": 2, "h_q": 120, "h_kv": 2}, MANY_ROWS, (("CLUSTER", 2),)),
)
DENSE = [
    Reads(
        "dense",
        DenseCase(b=5, s_k=700, varlen=True, causal=True, dtype=dtype, d_qk=d_qk, **shape),
        kernel,
        (*defines, ("D_QK", d_qk)),
    )
    for dtype, d_qk, (shape, kernel, defines) in product(("bfloat16", "float16"), (576, 512), DENSE_SHAPES)
]

FEW_HEADS, FP8, CLUSTER, BF16 = (
    f"mla_sparse_{name}" for name in ("fp8_few_heads", "fp8", "fp8_cluster", "bf16")
)
SPARSE = [
    Reads(
        "sparse",
        SparseCase(b=5, s_q=2, h_q=h_q, s_k=300, topk=200, lengths="random", sink=True, **layout),
        kernel,
    )
    for layout, h_q, kernel in (
        ({"layout": "v32"}, 9, FEW_HEADS),
        ({"layout": "v32"}, 16, FEW_HEADS),
        ({"layout": "v32"}, 64, FP8),
        ({"layout": "v32"}, 128, FP8),
        ({"layout": "v32"}, 100, CLUSTER),
        ({"layout": "v32"}, 128, CLUSTER),
        ({"layout": "model1"}, 16, FP8),
        ({"layout": "model1"}, 64, FP8),
        ({"layout": "model1"}, 128, FP8),
        ({"layout": "model1"}, 100, CLUSTER),
        ({"layout": "model1"}, 128, CLUSTER),
        *(
            ({"layout": "bf16", "d_qk": d_qk}, h_q, BF16)
            for d_qk, h_q in product((576, 512), (16, 64, 100, 128))
        ),
    )
]

ALONE = (("GROUP_TOKENS", 1),)
PREFILL = [
    Reads(
        "prefill",
        SparseCase(b=s_q, h_q=h_q, s_k=300, topk=133, lengths="random", sink=True, **PREFILL_KINDS[kind]),
        kernel,
        defines,
    )
    for kind, s_q, h_q, kernel, defines in (
        *((kind, 9, 16, BF16, ALONE) for kind in ("bf16", "bf16_512")),
        *((kind, 200, 100, BF16, ALONE) for kind in ("bf16", "bf16_512")),
        *(
            (kind, 1031, h_q, BF16, (("GROUP_TOKENS", 64 // h_q),))
            for kind, h_q in product(("bf16", "bf16_512"), (8, 16, 32))
        ),
        ("v32", 9, 16, FEW_HEADS, ()),
        ("v32", 9, 64, FP8, ()),
        ("v32", 9, 128, CLUSTER, ()),
        ("v32", 200, 100, BF16, ALONE),  # the cache is copied to bf16 rows
        ("v32", 1031, 16, BF16, (("GROUP_TOKENS", 4),)),
        ("model1", 9, 64, FP8, ()),
        ("model1", 9, 128, CLUSTER, ()),
        ("model1", 200, 100, BF16, ALONE),
        ("model1", 1031, 16, BF16, (("GROUP_TOKENS", 4),)),
    )
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
    with reads.forced():
        call = reads.make()
        pair = split(call.arguments["q"])
        for form in forms(call):
            want = call.run(form)
            call.check(want)
            asked = kernels_asked_for(monkeypatch)
            got = call.run(form, q=pair)
            assert_results(f"in two arrays, {form}", call, got, want)
            readers = [spec for spec in asked if spec.name.startswith(("mla_dense", "mla_sparse"))]
            assert {spec.name for spec in readers} == {reads.kernel}
            assert any(dict(reads.defines).items() <= dict(spec.defines).items() for spec in readers)


@pytest.mark.parametrize("reads", SEVERAL, ids=lambda reads: reads.id)
def test_either_array_may_be_packed(reads: Reads) -> None:
    """Or both be slices of one, which is what a whole q is."""
    call = reads.make()
    q = call.arguments["q"]
    want = call.run()
    nope, rope = split(q)
    for first, second in (
        (nope.contiguous(), rope),
        (nope, rope.contiguous()),
        (nope.contiguous(), rope.contiguous()),
        (q[..., :-64], q[..., -64:]),
        (q[..., :-64], rope),
    ):
        assert_results(f"{first.stride()} and {second.stride()}", call, call.run(q=(first, second)), want)


@pytest.mark.parametrize("kind", PREFILL_KINDS)
def test_chunks_of_prefill(kind: str) -> None:
    """The addresses of both arrays move from chunk to chunk, and to the tokens behind the last group."""
    case = SparseCase(b=103, h_q=16, s_k=300, topk=133, lengths="random", **PREFILL_KINDS[kind])
    for text, chunks in (("tokens", small_plans(40)), ("groups", united_selections(1 << 16, tokens=1))):
        with chunks:
            call = prefill_call(make_sparse_inputs(case))
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


@pytest.mark.parametrize("reads", SEVERAL, ids=lambda reads: reads.id)
def test_frameworks(reads: Reads) -> None:
    """CuPy arrays, arrays of a library that has DLPack alone, and one array each of torch and CuPy: results
    are of the framework of the first.
    """
    call = reads.make()
    want = call.run()
    pair = split(call.arguments["q"])
    torch.cuda.synchronize()
    for text, change in (("CuPy", to_cupy), ("DLPack", Producer)):
        got = call.mapped(change).run(q=tuple([change(x) for x in pair]))
        assert all(isinstance(x, cupy.ndarray) for x in got)
        cupy.cuda.get_current_stream().synchronize()
        assert_results(text, call, tuple(torch.from_dlpack(x) for x in got), want)
    got = call.run(q=(pair[0], to_cupy(pair[1])))
    assert all(isinstance(x, torch.Tensor) for x in got)
    assert_results("torch and CuPy", call, got, want)


@pytest.mark.parametrize("reads", SEVERAL, ids=lambda reads: reads.id)
def test_arrays_that_kernels_cannot_walk(reads: Reads) -> None:
    """One array would be copied; a pair is there to save copies."""
    call = reads.make()
    nope, rope = split(call.arguments["q"])
    odd = torch.empty((*rope.shape[:-1], 65), dtype=rope.dtype, device=rope.device)[..., :64]
    for pair, name in (
        ((nope, odd), "q_rope"),
        ((nope, rope[:1].expand_as(rope)), "q_rope"),
        ((nope[:1].expand_as(nope), rope), "q"),
    ):
        with pytest.raises(ValueError, match=rf"^{name}: expected, in a pair, a 16-byte aligned address"):
            call.run(q=pair)


def test_one_token_and_one_head() -> None:
    """Dimensions of size 1 may have any stride."""
    case = replace(SPARSE[0].case, b=1, s_q=1, h_q=1, lengths=None)
    for make, one in ((sparse_call, case), (prefill_call, replace(case, shared=True))):
        call = make(make_sparse_inputs(one))
        want = call.run()
        call.check(want)
        pair = [
            x.contiguous().as_strided(x.shape, (*[3] * (x.ndim - 1), 1)) for x in split(call.arguments["q"])
        ]
        assert_results("any stride", call, call.run(q=tuple(pair)), want)
