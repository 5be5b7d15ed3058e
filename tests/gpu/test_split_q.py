"""A q in two arrays, the second with the RoPE columns, gives the bits of one array.

In every kernel that reads q, and in a CUDA graph. Which pairs are taken is in tests/calls/test_split_q.py.
"""

from __future__ import annotations

from typing import Any

import pytest
from gpu_support import no_kernel_loaded, small_plans, torch, united_selections

import rawmla
from kit import SparseCase
from operations import Operation, assert_results, for_each, for_first
from operations.mla_prefill import PREFILL_KINDS, make_prefill_call

Pair = tuple[Any, Any]


def takes_pairs(operation: Operation) -> bool:
    """Choose the operations of MLA whose calls have a q."""
    return operation.kernels[0].startswith(("mla_dense", "mla_sparse"))


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


@for_each("small_cases", only=takes_pairs)
def test_bits_of_one_array(operation: Operation, case: Any) -> None:
    """The small cases reach every kernel."""
    call = operation.make(case)
    nope, rope = split(call.arguments["q"])
    for form in call.forms():
        want = call.run(form)
        call.check(want)
        assert_results(f"in two arrays, {form}", call, call.run(form, q=(nope, rope)), want)
    want = call.run()
    for first, second in ((nope.contiguous(), rope.contiguous()), (call.arguments["q"][..., :-64], rope)):
        got = call.run(q=(first, second))
        assert_results(f"{first.stride()} and {second.stride()}", call, got, want)


@pytest.mark.parametrize("h_q", (8, 16, 32))
@pytest.mark.parametrize("kind", PREFILL_KINDS)
def test_chunks_of_prefill(kind: str, h_q: int) -> None:
    """The addresses of both arrays move from chunk to chunk, and to the tokens after the last group."""
    case = SparseCase(b=103, h_q=h_q, s_k=300, topk=133, lengths="random", **PREFILL_KINDS[kind])
    for text, chunks in (("tokens", small_plans(40)), ("groups", united_selections(1 << 16, tokens=1))):
        with chunks:
            call = make_prefill_call(case)
            want = call.run()
            call.check(want)
            got = call.run(q=split(call.arguments["q"]))
            assert_results(f"chunks of {text}", call, got, want)


@for_first(only=takes_pairs)
def test_in_a_graph_after_warmup_call(operation: Operation, case: Any) -> None:
    """`warmup_call` with a pair loads all that the capture needs; replays follow values changed in place."""
    call = operation.make(case)
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
