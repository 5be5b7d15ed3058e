"""CUDA graphs: captured once, replayed while the arguments and plans change in place."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from gpu_support import (
    assert_poison,
    cupy,
    loaded_labels,
    no_kernel_loaded,
    to_cupy,
    torch,
)

import rawmla
from kit import DenseCase
from kit.mha import MhaCase
from operations import OPERATIONS, Operation, assert_results, for_each, for_first, is_planned
from operations.dense import make_dense_call
from operations.memory import all_canaries, fill_with_canaries, strided
from operations.mla_decode import make_dense_call as make_decode_call
from rawmla import jit
from rawmla.jit import launch
from rawmla.kernels import default_specs

PLANS = ("object", "object, invariant", "tensors, inside", "tensors, outside")


def capture(work: Any) -> tuple[Any, Any]:
    """Capture what `work` enqueues. Its results live in the graph's memory, and their poison is part of the
    graph, so every replay starts from poison.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work()
    return graph, result


PLANNED = [
    (operation, case, plan)
    for operation in OPERATIONS
    if is_planned(operation)
    for case in operation.graph_cases
    for plan in (*PLANS, *(("tensors, before",) if operation.plan_serves_all_lengths else ()))
]


@pytest.mark.parametrize(
    ("operation", "case", "plan"),
    PLANNED,
    ids=[f"{operation.name}-{plan}-{case.id}" for operation, case, plan in PLANNED],
)
def test_planned_calls(operation: Operation, case: Any, plan: str) -> None:
    """The plan is computed in the graph by the call ("object") or beside it ("inside"), or into the buffers
    that the graph reads, before each replay ("outside") or once ("before"). Two layers share it.
    """
    call = operation.make(case)
    form, _, how = plan.partition(", ")
    invariant = how == "invariant"
    call.run(form, invariant=invariant)  # loads the kernels
    metadata, num_splits = call.make_plan(form, invariant=invariant)

    def work() -> Any:
        if how == "inside":
            call.replan(metadata, num_splits)
        given = {"tile_scheduler_metadata": metadata, "num_splits": num_splits}
        return [call.run(invariant=invariant and form == "tensors", **given) for _ in range(2)]

    graph, (got, again) = capture(work)
    assert operation.changes is not None
    for _ in operation.changes(call):
        if how == "inside":
            metadata.fill_(-1)
        if how == "outside":
            call.replan(metadata, num_splits)
        graph.replay()
        call.check(got)
        assert_results("a later layer", call, again, got)
        if form == "object":
            assert_results("replayed and eager", call, got, call.run(form, invariant=invariant))


@for_each("graph_cases", only=lambda operation: not is_planned(operation))
def test_calls(operation: Operation, case: Any) -> None:
    call = operation.make(case)
    call.run()  # loads the kernels
    target = call.target()
    graph, (got, again) = capture(lambda: (call.run(**target), call.run(**target)))
    assert operation.changes is not None
    for _ in operation.changes(call):
        if call.fresh is not None:
            got[0].copy_(call.fresh())
        graph.replay()
        call.check(got)
        assert_results("replayed and eager", call, got, call.run())
        assert_results("one captured call after another", call, again, got)


COPIED = [(operation, operation.cases[0], name) for operation in OPERATIONS for name in operation.copied]


@pytest.mark.parametrize(
    ("operation", "case", "name"), COPIED, ids=[f"{operation.name}-{name}" for operation, _, name in COPIED]
)
def test_copies(operation: Operation, case: Any, name: str) -> None:
    """What has to be copied is copied in the graph, from where it lies then."""
    call = operation.make(case)
    given = strided(call.arguments[name], "transposed")[-1]
    call.run(**{name: given})
    graph, got = capture(lambda: call.run(**{name: given}))
    for _ in range(2):
        graph.replay()
        assert_results("replayed and eager", call, got, call.run(**{name: given}))
        given.mul_(0.5)


@for_first(only=lambda operation: operation.any_framework)
def test_cupy(operation: Operation, case: Any) -> None:
    """Captured on a CuPy stream, with results that live on; copies are refused there."""
    call = operation.make(case)
    want = call.run()
    in_cupy = call.mapped(to_cupy, lambda x: to_cupy(x.contiguous()))
    target = in_cupy.target()
    plan = {} if call.plan is None else {"tile_scheduler_metadata": in_cupy.make_plan()[0]}
    torch.cuda.synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        in_cupy.run(**plan, **target)  # loads the kernels, and gives the pool memory for this stream
        stream.synchronize()
        stream.begin_capture()
        try:
            got = in_cupy.run(**plan, **target)
            for name in operation.copied:
                with pytest.raises(ValueError, match=f"^{name}: expected, inside a CUDA-graph capture"):
                    in_cupy.run(**{name: in_cupy.arguments[name][::-1]}, **target)
        finally:
            graph = stream.end_capture()
        for _ in range(2):
            if call.written is None:
                for x in got:
                    x.data.memset_async(0, x.nbytes)
            graph.launch(stream)
        stream.synchronize()
    assert_results("replayed", call, tuple(torch.from_dlpack(x) for x in got), want)


SMALLER = [
    (operation, case, form, invariant)
    for operation in OPERATIONS
    if is_planned(operation)
    for case in operation.graph_cases
    if case.b > 1
    for form in ("tensors", "object")
    for invariant in (False, True)
]


@pytest.mark.parametrize(
    ("operation", "case", "form", "invariant"),
    SMALLER,
    ids=[
        f"{operation.name}-{form}{'-invariant' * invariant}-{case.id}"
        for operation, case, form, invariant in SMALLER
    ],
)
def test_batch_smaller_than_captured(operation: Operation, case: Any, form: str, invariant: bool) -> None:
    """Between replays the plan is made for the first requests only, by `get_mla_metadata(..., out=)`: rows of
    the others are not written, whatever the plan before said of them.
    """
    call = operation.make(case)
    metadata, num_splits = call.make_plan(form, invariant=invariant)
    plan = {"tile_scheduler_metadata": metadata, "num_splits": num_splits}
    call.run(invariant=invariant, **plan)  # loads the kernels, fills an object
    given = torch.empty((case.b, case.s_q, case.h_q, 512), dtype=call.arguments["q"].dtype, device="cuda")
    graph, (out, lse) = capture(lambda: call.run(invariant=invariant, **plan, out=given))
    splits = metadata.num_splits if form == "object" else num_splits
    assert operation.changes is not None and operation.part is not None
    was_split = False
    for _ in operation.changes(call):
        for size in sorted({1, 3, case.b - 1}):
            call.replan(metadata, num_splits, invariant=invariant)
            was_split |= bool((splits.diff() > 1)[size:].any())
            call.replan(metadata, num_splits, size, invariant=invariant)
            fill_with_canaries(given)
            graph.replay()
            small = operation.part(call, list(range(size)))
            small.check((out[:size], lse[:size]))
            if invariant:
                want = small.run("tensors", invariant=True)
                assert_results(f"the first {size}", call, (out[:size], lse[:size]), want)
            assert all_canaries(out[size:]), f"out of requests from {size} on was written"
            assert_poison(f"lse of requests from {size} on", lse[size:])
    assert was_split, "no plan for all requests had split one of those behind the first"
    call.replan(metadata, num_splits, invariant=invariant)
    graph.replay()
    call.check((out, lse))


@for_first()
def test_kernel_missing_in_a_capture(operation: Operation, case: Any) -> None:
    """Nothing is compiled or loaded in a capture, and the refused call leaves nothing behind: the same plan
    object, still empty, serves the next call.
    """
    call = operation.make(case)
    want = call.run()
    target = call.target()
    metadata = {} if call.plan is None else {"tile_scheduler_metadata": call.make_plan()[0]}
    with no_kernel_loaded():
        with (
            pytest.raises(rawmla.KernelNotReadyError, match="warmup"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            call.run(**metadata, **target)
        assert loaded_labels() == []
        assert_results("after a refused capture", call, call.run(**metadata), want)
    assert_results("afterwards", call, call.run(), want)


@for_each("cases")
def test_warmup_call(operation: Operation, case: Any) -> None:
    """Loads what the very call needs, allocates and enqueues nothing; then the call can be captured."""
    call = operation.make(case)
    target = call.target()
    plan = {} if call.plan is None else {"tile_scheduler_metadata": call.make_plan()[0]}
    with no_kernel_loaded():
        want = call.run()
        torch.cuda.synchronize()
        needed = set(loaded_labels())
    with no_kernel_loaded():
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        rawmla.warmup_call(getattr(rawmla, call.function), **{**call.arguments, **plan, **target})
        assert torch.cuda.current_stream().query()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        loaded = loaded_labels()
        assert needed <= set(loaded)
        graph, got = capture(lambda: call.run(**plan, **target))
        assert loaded_labels() == loaded
        graph.replay()
        assert_results("replayed", call, got, want)
        torch.cuda.synchronize()  # before the kernels are let go of


def test_a_kernel_is_collected_in_a_capture() -> None:
    """Its code stays until the next kernel is loaded: an unload would end the capture."""
    first, second, *_ = default_specs()
    with no_kernel_loaded():
        kernels = [jit.get_kernel(first, 0)]
    x = torch.ones(3, device="cuda")
    graph, y = capture(lambda: (kernels.clear(), gc.collect(), x + 1)[-1])
    graph.replay()
    assert y.tolist() == [2, 2, 2]
    assert launch._unused
    with no_kernel_loaded():
        jit.get_kernel(second, 0)
        assert not launch._unused


def test_warmup_by_name() -> None:
    """`rawmla.warmup` is enough for a capture of MLA decoding and, given "mha", of dense attention, also with
    segments and sinks.
    """
    cases = (
        MhaCase(b=2, s_q=70, s_k=90, causal=True, sink="float16"),
        MhaCase(q_lengths=(300, 0, 1), k_lengths=(257, 90, 0), h_q=8, h_kv=1),
    )
    calls = [make_dense_call(case) for case in cases]
    calls.append(make_decode_call(DenseCase(b=2, h_q=16, s_k=300)))
    want = [call.run() for call in calls]
    with no_kernel_loaded():
        rawmla.warmup()
        rawmla.warmup("mha", mha_head_dims=[(128, 128)])
        graph, got = capture(lambda: [call.run() for call in calls])
        graph.replay()
        for call, one, wanted in zip(calls, got, want, strict=True):
            assert_results("replayed", call, one, wanted)
        torch.cuda.synchronize()  # before the kernels are let go of
