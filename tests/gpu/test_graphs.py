"""CUDA graphs: captured once, replayed while the arguments and plans change in place."""

from __future__ import annotations

from typing import Any

import pytest
from gpu_support import assert_poison, cupy, loaded_labels, no_kernel_loaded, torch
from test_frameworks import gradients, in_cupy

import rawmla
from kit.mha import MhaCase
from operations import OPERATIONS, Operation, assert_results, for_each, for_first, is_planned
from operations.core import assert_rounded_alike
from operations.dense import make_dense_call
from operations.memory import Outputs, all_canaries, fill_with_canaries

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
    that the graph reads, before each replay ("outside") or once ("before").
    """
    call = operation.make(case)
    form, _, how = plan.partition(", ")
    invariant = how == "invariant"
    call.run(form, invariant=invariant)  # loads the kernels
    metadata, num_splits = call.make_plan(form, invariant=invariant)

    def work() -> Any:
        if how == "inside":
            call.replan(metadata, num_splits)
        return call.run(
            invariant=invariant and form == "tensors", tile_scheduler_metadata=metadata, num_splits=num_splits
        )

    graph, got = capture(work)
    assert operation.changes is not None
    for _ in operation.changes(call):
        if how == "inside":
            metadata.fill_(-1)
        if how == "outside":
            call.replan(metadata, num_splits)
        graph.replay()
        call.check(got)
        if form == "object":
            assert_results("replayed and eager", call, got, call.run(form, invariant=invariant))


@for_each("graph_cases", only=lambda operation: not is_planned(operation))
def test_calls(operation: Operation, case: Any) -> None:
    call = operation.make(case)
    call.run()  # loads the kernels
    target = call.target()
    graph, got = capture(lambda: call.run(**target))
    assert operation.changes is not None
    for _ in operation.changes(call):
        if call.fresh is not None:
            got[0].copy_(call.fresh())
        graph.replay()
        call.check(got)
        assert_results("replayed and eager", call, got, call.run())


@for_first(only=lambda operation: not is_planned(operation))
def test_calls_one_after_the_other(operation: Operation, case: Any) -> None:
    """Their scratch is the same, and a counter in it may give tiles to CTAs."""
    call = operation.make(case)
    call.run()
    targets = [call.target() for _ in range(3)]
    graph, results = capture(lambda: [call.run(**target) for target in targets])
    for _ in range(3):
        for target, got in zip(targets, results, strict=True):
            if target and call.fresh is not None:
                got[0].copy_(call.fresh())
        graph.replay()
        for got in results:
            assert_results("replayed", call, got, call.run())


@for_first(only=lambda operation: operation.copied)
def test_copies_in_a_graph(operation: Operation, case: Any) -> None:
    """What has to be copied is copied in the graph, from where it lies then."""
    call = operation.make(case)
    name = operation.copied
    x = call.arguments[name]
    call.arguments[name] = moved = x.mT.contiguous().mT
    target, want = call.target(), call.run()
    graph, got = capture(lambda: call.run(**target))
    for factor in (1, -1):
        moved.mul_(factor)
        graph.replay()
        want = call.run(**{name: moved.contiguous()})
        assert_results("replayed", call, got, want)


@for_first(only=lambda operation: operation.any_framework and not is_planned(operation))
def test_cupy_graph(operation: Operation, case: Any) -> None:
    """Captured on a CuPy stream, with results that live on; copies are refused there."""
    call = operation.make(case)
    want = call.run()
    on_cupy = in_cupy(call)
    target = on_cupy.target()
    torch.cuda.synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        on_cupy.run(**target)  # loads the kernels, and gives the pool memory for this stream
        stream.synchronize()
        stream.begin_capture()
        try:
            got = on_cupy.run(**target)
            if operation.copied:
                backwards = on_cupy.arguments[operation.copied][::-1]
                with pytest.raises(ValueError, match=f"^{operation.copied}: expected, inside a CUDA-graph"):
                    on_cupy.run(**target, **{operation.copied: backwards})
        finally:
            graph = stream.end_capture()
        for _ in range(2):
            for x in got if not target else ():
                x.fill(0)
            graph.launch(stream)
        stream.synchronize()
    assert_results("replayed", call, tuple(torch.from_dlpack(x) for x in got), want)


@for_each("graph_cases", only=is_planned)
def test_one_object_for_several_layers(operation: Operation, case: Any) -> None:
    """The first layer computes the plan inside the graph, the others read it there."""
    call = operation.make(case)
    call.run()
    metadata, _ = call.make_plan()
    graph, results = capture(lambda: [call.run(tile_scheduler_metadata=metadata) for _ in range(3)])
    assert operation.changes is not None
    for number, _ in enumerate(operation.changes(call)):
        graph.replay()
        call.check(results[0])
        for got in results[1:]:
            assert_results("later layer", call, got, results[0])
        if number == 4:
            break


@for_each("graph_cases", only=lambda operation: operation.out)
def test_outputs_given_and_other_memory_reused_between_replays(operation: Operation, case: Any) -> None:
    call = operation.make(case)
    assert operation.changes is not None
    outputs = Outputs.of(operation, call, call.run())
    metadata = {} if call.plan is None else {"tile_scheduler_metadata": call.make_plan()[0]}
    graph, got = capture(lambda: call.run(**metadata, **outputs.given))
    assert all(one is given for one, given in zip(got, outputs.given.values(), strict=False))
    for _ in operation.changes(call):
        outputs.renew()
        other = [torch.full((n << 20,), float("nan"), device="cuda") for n in (1, 2, 8)]
        graph.replay()
        call.check(got)
        del other
    outputs.assert_untouched_around()


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


@for_each("cases")
def test_warmup_call(operation: Operation, case: Any) -> None:
    """Loads what the very call needs, allocates and enqueues nothing; then the call can be captured."""
    call = operation.make(case)
    want, target = call.run(), call.target()
    plan = {}
    if call.plan is not None:
        plan["tile_scheduler_metadata"], plan["num_splits"] = call.make_plan()
    torch.cuda.synchronize()
    with no_kernel_loaded():
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        rawmla.warmup_call(getattr(rawmla, call.function), **call.arguments, **target, **plan)
        assert torch.cuda.current_stream().query()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        loaded = loaded_labels()
        assert loaded
        graph, got = capture(lambda: call.run(**target, **plan))
        assert loaded_labels() == loaded
        graph.replay()
        assert_results("replayed", call, got, want)
        torch.cuda.synchronize()  # before the kernels are let go of


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


@for_first(only=lambda operation: operation.grads)
def test_kernel_of_the_backward_missing_in_a_captured_pass(operation: Operation, case: Any) -> None:
    """The forward's kernels are there, those of its backward are not: autograd passes the refusal on."""
    call = operation.make(case)
    want = gradients(operation, call)
    with no_kernel_loaded():
        call.run()
        before = loaded_labels()
        with (
            pytest.raises(rawmla.KernelNotReadyError, match="warmup"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            gradients(operation, call)
        assert loaded_labels() == before
        got = gradients(operation, call)
        torch.cuda.synchronize()  # before the kernels are let go of
    for number, (one, other) in enumerate(zip(got, want, strict=True)):
        assert_rounded_alike(f"gradient {number}", one, other)


def test_warmup_by_name() -> None:
    """`rawmla.warmup("mha")` is enough for a capture of plain calls, causal ones, segments and sinks."""
    cases = (
        MhaCase(b=2, s_q=70, s_k=90, causal=True, sink="float16"),
        MhaCase(q_lengths=(300, 0, 1, 77), k_lengths=(257, 90, 0, 200), h_q=8, h_kv=1),
    )
    calls = [make_dense_call(case) for case in cases]
    wanted = [call.run() for call in calls]
    with no_kernel_loaded():
        rawmla.warmup("mha", mha_head_dims=[(128, 128)])
        graph, results = capture(lambda: [call.run() for call in calls])
        graph.replay()
        for call, got, want in zip(calls, results, wanted, strict=True):
            assert_results("replayed", call, got, want)
        torch.cuda.synchronize()
