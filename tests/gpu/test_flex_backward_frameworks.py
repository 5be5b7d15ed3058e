"""Backward of flex attention with torch, CuPy and DLPack; streams, graphs, threads, devices, warm-up."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from flex_backward_calls import (
    ALL_LISTS,
    BackwardInputs,
    assert_same_gradients,
    backward_inputs,
    backward_of,
    check_backward,
)
from gpu_support import assert_poison, cupy, loaded_labels, no_kernel_loaded, replaced_launches, torch
from test_flex_frameworks import CASES
from test_frameworks import DELAY_CYCLES, Producer, to_cupy
from test_graphs import capture

import rawmla
from kit.flex import FlexCase, attended, block_mask_of, with_mask_mod

BIASED, SMALL_BLOCKS, PLAIN, _ = CASES
IN_ORDER: dict[str, Any] = {"deterministic": True}
each = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
Gradients = tuple[Any, Any, Any, dict[str, Any]]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def arguments(
    call: BackwardInputs, change: Callable[[Any], Any], first: Callable[[Any], Any] | None = None
) -> Arguments:
    """Arrays and keywords of a call whose arrays `change` makes of tensors, functions being CUDA text.

    `first` makes those that are given by position instead.
    """
    inputs = call.inputs

    def moved(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        other = change(x.detach())
        return other.requires_grad_(x.requires_grad) if isinstance(other, torch.Tensor) else other

    def changed(function: Any) -> Any:
        captures = {name: moved(x) for name, x in function.captures.items()}
        return rawmla.CudaMod(
            function.code, captures, grad=function.grad, capture_grads=function.capture_grads
        )

    keywords = {**inputs.keywords(), "grad_lse": moved(call.gradients.dlse)}
    if inputs.score is not None:
        keywords["score_mod"] = changed(inputs.score)
    if inputs.block_mask is not None and inputs.mask is not None:
        known = inputs.block_mask
        parts: list[Any] = [known.seq_lengths, *[moved(getattr(known, name)) for name in ALL_LISTS]]
        parts += [known.BLOCK_SIZE, changed(inputs.mask)]
        keywords["block_mask"] = rawmla.BlockMask(*parts)
    arrays = (call.gradients.dout, inputs.q, inputs.k, inputs.v, *call.results)
    return tuple((first or change)(x) for x in arrays), keywords


def backward(arguments: Arguments, **more: Any) -> Gradients:
    (dout, q, k, v, out, lse), keywords = arguments
    return rawmla.flex_attention_backward(dout, q, k, v, out, lse, **{**keywords, **more})


def arrays_of(gradients: Gradients) -> list[Any]:
    *rows, captured = gradients
    return [*rows, *captured.values()]


def as_torch(gradients: Gradients) -> Gradients:
    dq, dk, dv, captured = gradients
    dq, dk, dv = (torch.from_dlpack(x) for x in (dq, dk, dv))
    return dq, dk, dv, {name: torch.from_dlpack(x) for name, x in captured.items()}


def tensors_of(call: BackwardInputs) -> list[Any]:
    """All that the call reads."""
    inputs = call.inputs
    found = [inputs.q, inputs.k, inputs.v, call.gradients.dout, call.gradients.dlse, *call.results]
    for function in (inputs.score, inputs.mask):
        if function is not None:
            found += [x.detach() for x in function.captures.values() if isinstance(x, torch.Tensor)]
    if inputs.block_mask is not None:
        found += [getattr(inputs.block_mask, name) for name in ALL_LISTS]
    return [x for x in found if x is not None]


def wanted_of(case: FlexCase, form: str = "cuda") -> tuple[BackwardInputs, Gradients]:
    """A call of gradients of out and lse, and its gradients in a fixed order."""
    call = backward_inputs(case, "both")
    want = backward_of(call, form, **IN_ORDER)
    check_backward(call, want)
    return call, want


# ---- arrays


@each
def test_cupy(case: FlexCase) -> None:
    """CuPy arrays in, CuPy arrays out, with the bits and strides that torch gets."""
    call, want = wanted_of(case)
    torch.cuda.synchronize()
    given = arguments(call, to_cupy)
    got = backward(given, **IN_ORDER)
    found = arrays_of(got)
    assert all(isinstance(x, cupy.ndarray) for x in found)
    strides = [tuple(x.element_size() * n for n in x.stride()) for x in arrays_of(want)]
    assert [x.strides for x in found] == strides
    in_any_order = backward(given)
    cupy.cuda.get_current_stream().synchronize()
    assert_same_gradients(as_torch(got), want, all_of_them=True)
    check_backward(call, as_torch(in_any_order))


def test_dlpack_producer() -> None:
    """Taken over by CuPy, which then also holds the results."""
    call, want = wanted_of(BIASED)
    torch.cuda.synchronize()
    given = arguments(call, to_cupy, Producer)
    got = backward(given, **IN_ORDER)
    assert all(isinstance(x, cupy.ndarray) for x in arrays_of(got))
    cupy.cuda.get_current_stream().synchronize()
    assert_same_gradients(as_torch(got), want, all_of_them=True)


def test_two_frameworks() -> None:
    """Lists and captured arrays of CuPy beside tensors: gradients are tensors."""
    call, want = wanted_of(BIASED)
    given = arguments(call, to_cupy, lambda x: x)
    got = backward(given, **IN_ORDER)
    assert all(isinstance(x, torch.Tensor) for x in arrays_of(got))
    assert_same_gradients(got, want, all_of_them=True)


def test_gradients_are_poison_before_the_kernels() -> None:
    """What the other tests rely on, in both frameworks and with rows that are padded. A captured gradient in
    float32 is cleared and summed in place.
    """
    for case in (BIASED, PLAIN, FlexCase(s_q=70, s_k=90, d_qk=17, d_v=33, score="head scale")):
        call = backward_inputs(case, "both")
        given = arguments(call, to_cupy)
        with replaced_launches(lambda: None):
            for got in (backward_of(call, "cuda"), backward(given)):
                for number, result in enumerate(arrays_of(got)):
                    assert_poison(f"{case.id}: gradient {number}", result)


# ---- streams and devices


def spoil(call: BackwardInputs) -> list[tuple[Any, Any]]:
    """Make all arrays garbage that is safe; returns what they held."""
    held = [(x, x.clone()) for x in tensors_of(call)]
    for x, _ in held:
        x.fill_(float("nan") if x.is_floating_point() else 0)
    return held


@each
def test_side_stream(case: FlexCase) -> None:
    """The inputs become valid late on a side stream; only work on that stream, after them, sees them."""
    call, want = wanted_of(case, "python")
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):  # so that the allocator holds memory for the stream
        for _ in range(2):
            backward_of(call, **IN_ORDER)
    torch.cuda.synchronize()
    held = spoil(call)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(DELAY_CYCLES)
        for x, valid in held:
            x.copy_(valid)
        got = backward_of(call, **IN_ORDER)
        assert not stream.query(), "the call waited for the device"
        spoil(call)
    stream.synchronize()
    assert_same_gradients(got, want, all_of_them=True)


@pytest.mark.parametrize("case", (BIASED, SMALL_BLOCKS), ids=lambda case: case.id)
def test_cupy_side_stream(case: FlexCase) -> None:
    call, want = wanted_of(case)
    torch.cuda.synchronize()
    given = arguments(call, lambda x: to_cupy(x.contiguous()))  # other lists would be copied
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        backward(given, **IN_ORDER)
    stream.synchronize()
    held = spoil(call)
    torch.cuda.synchronize()
    with stream, torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
        torch.cuda._sleep(DELAY_CYCLES)
        for x, valid in held:
            x.copy_(valid)
        got = backward(given, **IN_ORDER)
        assert not stream.done, "the call waited for the device"
    stream.synchronize()
    assert_same_gradients(as_torch(got), want, all_of_them=True)


@each
def test_second_device(case: FlexCase) -> None:
    """The arrays are on a device that is not the current one; and on one while another is current."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    call, want = wanted_of(case)
    given = arguments(call, lambda x: x.to("cuda:1"))
    torch.cuda.synchronize("cuda:1")
    got = backward(given, **IN_ORDER)
    assert torch.cuda.current_device() == 0
    assert all(x.device == torch.device("cuda:1") for x in arrays_of(got))
    dq, dk, dv, captured = got
    home = (*[x.to("cuda:0") for x in (dq, dk, dv)], {name: x.to("cuda:0") for name, x in captured.items()})
    assert_same_gradients(home, want, all_of_them=True)
    with torch.cuda.device(1):
        got = backward_of(call, "cuda", **IN_ORDER)
        assert torch.cuda.current_device() == 1
    assert_same_gradients(got, want, all_of_them=True)


# ---- graphs


def change_everything(call: BackwardInputs, turn: int) -> None:
    """Change in place all that a call reads: arrays, what functions read, lists; out, lse and the gradients
    belong to what changed.
    """
    inputs = call.inputs
    assert inputs.score is not None and inputs.mask is not None and inputs.block_mask is not None
    case = replace(inputs.case, seed=inputs.case.seed + turn + 7)
    documents = inputs.mask.captures["documents"]
    with torch.no_grad():
        inputs.q.mul_(-0.5)
        inputs.k.copy_(inputs.k.flip(-1))
        inputs.v.copy_(inputs.v.flip(-1))
        inputs.score.captures["slopes"].mul_(1.5)
        documents.copy_((documents * (turn + 1) + 1) // 2)
    seen = attended(inputs.mask, case, "cuda")
    new = block_mask_of(
        seen, (case.s_q, case.s_k), case.block, None, separate=case.separate, by_columns=True
    )  # fmt: skip
    for name in ALL_LISTS:
        getattr(inputs.block_mask, name).copy_(getattr(new, name))
    again = backward_inputs(case, "both", replace(inputs, case=case))
    for x, other in zip(
        (*call.results, call.gradients.dout, call.gradients.dlse),
        (*again.results, again.gradients.dout, again.gradients.dlse),
        strict=True,
    ):
        x.copy_(other)


@pytest.mark.parametrize("block", ((128, 128), (64, 32)), ids=str)
@pytest.mark.parametrize("form", ("python", "cuda"))
def test_graph(form: str, block: tuple[int, int]) -> None:
    """Replays follow everything that changes in place, also where what has to be copied is copied in the
    graph, in any order and in a fixed one.
    """
    call = backward_inputs(replace(BIASED, s_q=400, s_k=500, gap=0.0, block=block), "both")
    call.inputs.v = call.inputs.v.transpose(2, 3).contiguous().transpose(2, 3)

    def work() -> list[Gradients]:
        return [backward_of(call, form, **options) for options in ({}, IN_ORDER)]

    work()
    graph, (in_any_order, in_order) = capture(work)
    before: Gradients | None = None
    for turn in range(4):
        graph.replay()
        want = backward_of(call, form, **IN_ORDER)
        check_backward(call, want)
        assert_same_gradients(in_order, want, all_of_them=True)
        check_backward(call, in_any_order)
        assert before is None or not any(
            torch.equal(x, y) for x, y in zip(arrays_of(before), arrays_of(want), strict=True)
        )
        before = want
        change_everything(call, turn)


@pytest.mark.parametrize("case", (BIASED, PLAIN), ids=lambda case: case.id)
def test_cupy_graph(case: FlexCase) -> None:
    """Captured on a CuPy stream, with results that live on."""
    call, want = wanted_of(case)
    torch.cuda.synchronize()
    given = arguments(call, lambda x: to_cupy(x.contiguous()))  # other lists would be copied
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        # Loads the kernels, and gives the pool memory for this stream.
        backward(given, **IN_ORDER)
        stream.synchronize()
        stream.begin_capture()
        try:
            got = backward(given, **IN_ORDER)
        finally:
            graph = stream.end_capture()
        for _ in range(2):
            for x in arrays_of(got):
                x.fill(0)
            graph.launch(stream)
        stream.synchronize()
    assert_same_gradients(as_torch(got), want, all_of_them=True)


@pytest.mark.parametrize("options", ({}, IN_ORDER), ids=("any order", "fixed order"))
@pytest.mark.parametrize("case", (BIASED, SMALL_BLOCKS), ids=lambda case: case.id)
def test_kernel_missing_in_a_capture(case: FlexCase, options: dict[str, Any]) -> None:
    """Nothing is compiled or loaded in a capture, and the refused call leaves nothing behind."""
    call, want = wanted_of(case, "python")
    with no_kernel_loaded():
        with (
            pytest.raises(rawmla.KernelNotReadyError, match="warmup"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            backward_of(call, **options)
        assert loaded_labels() == []
        assert_same_gradients(backward_of(call, **options), want, all_of_them=bool(options))
        torch.cuda.synchronize()


# The kernel before the main one, that, and the one after it. With a score function, one for references, one
# for captured gradients and, but in float32 in any order, one that rounds them. In a fixed order two count
# along the rows of a mask, and sums in cells take two passes. Blocks that are brought to others take two, one
# of which is among those that count.
KERNELS: tuple[tuple[FlexCase, dict[str, Any], int], ...] = (
    (BIASED, {}, 6),
    (BIASED, IN_ORDER, 8),
    (SMALL_BLOCKS, {}, 7),
    (SMALL_BLOCKS, IN_ORDER, 10),
    (PLAIN, {}, 3),
    (PLAIN, IN_ORDER, 3),
)


@pytest.mark.parametrize("form", ("python", "cuda"))
@pytest.mark.parametrize(
    ("case", "options", "kernels"), KERNELS, ids=lambda x: x.id if isinstance(x, FlexCase) else str(x)
)
def test_warmup_call(case: FlexCase, options: dict[str, Any], kernels: int, form: str) -> None:
    """Loads what the very call needs, allocates and enqueues nothing; then the call can be captured."""
    call = backward_inputs(case, "both")
    want = backward_of(call, form, **options)
    check_backward(call, want)
    arrays = (call.gradients.dout, call.inputs.q, call.inputs.k, call.inputs.v, *call.results)
    keywords = {**call.inputs.keywords(form), "grad_lse": call.gradients.dlse, **options}
    torch.cuda.synchronize()
    with no_kernel_loaded():
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        rawmla.warmup_call(rawmla.flex_attention_backward, *arrays, **keywords)
        assert torch.cuda.current_stream().query()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        assert len(loaded_labels()) == kernels, loaded_labels()
        graph, got = capture(lambda: backward((arrays, keywords)))
        assert len(loaded_labels()) == kernels
        graph.replay()
        assert_same_gradients(got, want, all_of_them=bool(options))
        check_backward(call, got)
        torch.cuda.synchronize()


def test_kernels_are_used_again() -> None:
    """Only dtype, head dimensions (in steps of 32) and the text of functions choose a kernel: numbers and
    tensors of functions, lengths, heads, strides, scale and blocks do not.
    """
    base = FlexCase(s_q=70, s_k=90, score="alibi table", mask="window")
    same = (
        base,
        replace(base, b=5, h_q=12, h_kv=3, s_q=300, s_k=1000, layout="slice"),
        replace(base, b=3, b_kv=1, s_q=1, s_k=2000, layout="tokens"),
        replace(base, d_qk=59, d_v=40, scale=0.3, seed=3),
        replace(base, block=(256, 128), separate=False),
        replace(base, h_q=40, h_kv=40),
    )
    calls = [backward_inputs(case, of) for case in same for of in ("out", "both")]
    torch.cuda.synchronize()
    with no_kernel_loaded():
        for call in calls:
            backward_of(call)
        assert len(loaded_labels()) == 6, loaded_labels()
        for call in calls:  # sums of digits, and two kernels that count along the rows of the mask
            backward_of(call, **IN_ORDER)
        assert len(loaded_labels()) == 9, loaded_labels()
        inputs = calls[0].inputs
        assert inputs.block_mask is not None
        for width in range(3):

            def mask(b: Any, h: Any, q: Any, k: Any, width: int = width) -> Any:
                return (q >= k) & (q - k <= width)

            backward_of(calls[0], block_mask=with_mask_mod(inputs.block_mask, mask))
        assert len(loaded_labels()) == 9, loaded_labels()
        torch.cuda.synchronize()  # before the kernels are let go of


# ---- threads


def test_threads() -> None:
    """A thread per case, each with a stream of its own, gets the bits that it would get alone."""
    found = [wanted_of(case, "python") for case in (*CASES, *(replace(case, seed=9) for case in CASES))]
    torch.cuda.synchronize()
    results: list[list[Gradients]] = [[] for _ in found]
    errors: list[BaseException] = []
    start = threading.Barrier(len(found))

    def work(call: BackwardInputs, own: list[Gradients]) -> None:
        try:
            start.wait()
            with torch.cuda.stream(torch.cuda.Stream()):
                own.extend(backward_of(call, **IN_ORDER) for _ in range(10))
                torch.cuda.current_stream().synchronize()
        except BaseException as error:
            errors.append(error)

    def run_all() -> None:
        for own in results:
            own.clear()
        threads = [
            threading.Thread(target=work, args=(call, own))
            for (call, _), own in zip(found, results, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def check_all() -> None:
        assert not errors, errors
        torch.cuda.synchronize()
        for own, (_, want) in zip(results, found, strict=True):
            assert len(own) == 10
            for got in own:
                assert_same_gradients(got, want, all_of_them=True)

    run_all()
    check_all()
    with no_kernel_loaded():  # every thread prepares its calls, and loads kernels
        run_all()
        check_all()
        torch.cuda.synchronize()
