"""Dense attention with torch, CuPy and DLPack; streams, devices, graphs, threads, torch.compile, warm-up."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
from gpu_support import assert_poison, assert_same_bits, cupy, no_kernel_loaded, replaced_launches, torch
from mha_calls import (
    assert_same_results,
    assert_untouched_around,
    attend,
    function_and_arguments,
    out_buffer,
)
from test_frameworks import DELAY_CYCLES, Producer, to_cupy
from test_graphs import capture

import rawmla
from kit.mha import MhaCase, MhaInputs, check_mha, covered_rows, make_mha_inputs
from rawmla.jit import loading

RAGGED: dict[str, Any] = {"q_lengths": (300, 0, 1, 77, 130, 64), "k_lengths": (257, 90, 0, 200, 131, 513)}
SAME: dict[str, Any] = {"q_lengths": (300, 0, 1, 77, 130, 64), "k_lengths": (300, 0, 1, 77, 130, 64)}
BATCH = MhaCase(b=3, s_q=150, s_k=200, causal=True, sink="float32", layout="heads")
SEGMENTS = MhaCase(
    **RAGGED, q_used=(290, 0, 0, 77, 3, 60), k_used=(250, 90, 0, 5, 129, 513), rows_around=9, layout="slice",
    window=(100, 3), alibi="requests", sink="bfloat16",
)  # fmt: skip
CASES = (
    BATCH,
    SEGMENTS,
    MhaCase(**SAME, packed="qkv", d_qk=192, h_kv=4, causal=True),
    MhaCase(**RAGGED, packed="kv4", d_qk=64, d_v=64, dtype="float16"),
)
OTHERS = ("k", "v", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "attn_sink", "alibi_slopes")


def mapped(inputs: MhaInputs, change: Callable[[Any], Any]) -> MhaInputs:
    """The call on other arrays, which `change` makes of the torch tensors."""
    values = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    return replace(inputs, **{name: change(x) for name, x in values.items() if isinstance(x, torch.Tensor)})


def as_torch(results: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(torch.from_dlpack(x) for x in results)


# ---- arrays


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_mha_cupy(case: MhaCase) -> None:
    """CuPy arrays in, CuPy arrays out, with the bits that torch gets; `out` too."""
    inputs = make_mha_inputs(case)
    want = attend(inputs)
    check_mha(inputs, want)
    buffer, given = out_buffer(inputs)
    in_cupy = mapped(inputs, to_cupy)
    torch.cuda.synchronize()
    got = attend(in_cupy)
    assert all(isinstance(x, cupy.ndarray) for x in got)
    assert [x.strides for x in got] == [tuple(x.element_size() * n for n in x.stride()) for x in want]
    target = to_cupy(given)
    got_given = attend(in_cupy, out=target)
    assert got_given[0] is target
    cupy.cuda.get_current_stream().synchronize()
    assert_same_results("CuPy", inputs, as_torch(got), want)
    assert_same_results("CuPy, out given", inputs, (given, torch.from_dlpack(got_given[1])), want)
    assert_untouched_around(buffer, given)


def test_mha_cupy_copies() -> None:
    """Strides that are negative, and a last dimension that is not contiguous."""
    inputs = make_mha_inputs(replace(BATCH, layout="plain"))
    want = attend(inputs)
    torch.cuda.synchronize()
    in_cupy = mapped(inputs, to_cupy)
    in_cupy.k = cupy.ascontiguousarray(in_cupy.k[:, ::-1])[:, ::-1]
    in_cupy.v = cupy.ascontiguousarray(in_cupy.v.swapaxes(2, 3)).swapaxes(2, 3)
    got = attend(in_cupy)
    cupy.cuda.get_current_stream().synchronize()
    assert_same_results("copied by CuPy", inputs, as_torch(got), want)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_mha_dlpack_producer(case: MhaCase) -> None:
    """Taken over by CuPy, which then also holds the results."""
    inputs = make_mha_inputs(case)
    want = attend(inputs)
    torch.cuda.synchronize()
    got = attend(mapped(inputs, Producer))
    assert all(isinstance(x, cupy.ndarray) for x in got)
    cupy.cuda.get_current_stream().synchronize()
    assert_same_results("a producer", inputs, as_torch(got), want)


def test_mha_two_frameworks() -> None:
    """Lengths of CuPy beside tensors: results are tensors."""
    inputs = make_mha_inputs(SEGMENTS)
    want = attend(inputs)
    sink = inputs.attn_sink.float()
    mixed = replace(
        inputs,
        cu_seqlens_q=to_cupy(inputs.cu_seqlens_q),
        seqused_k=to_cupy(inputs.seqused_k),
        attn_sink=to_cupy(sink),
    )
    got = attend(mixed)
    assert all(isinstance(x, torch.Tensor) for x in got)
    assert_same_results("two frameworks", inputs, got, want)


def test_mha_results_are_poison_before_the_kernel() -> None:
    """What the other tests rely on, in both frameworks and with rows that are padded."""
    for case in (BATCH, CASES[2], MhaCase(b=2, s_q=70, s_k=90, d_qk=17, d_v=33)):
        inputs = make_mha_inputs(case)
        with replaced_launches(lambda: None):
            for one in (inputs, mapped(inputs, to_cupy)):
                for _ in range(2):
                    for name, result in zip(("out", "lse"), attend(one), strict=True):
                        assert_poison(name, result)


def test_mha_tensors_that_require_grad() -> None:
    """Without a graph of autograd they are as others."""
    inputs = make_mha_inputs(BATCH)
    want = attend(inputs)
    for array in (inputs.q, inputs.k, inputs.v, inputs.attn_sink):
        array.requires_grad_()
    for without in (torch.no_grad, torch.inference_mode):
        with without():
            got = attend(inputs)
        assert not got[0].requires_grad and not got[1].requires_grad
        assert_same_results(without.__name__, inputs, got, want)


# ---- streams


def spoil(inputs: MhaInputs) -> list[tuple[Any, Any]]:
    """Make all arrays garbage that is safe; returns what they held."""
    held = []
    for field in fields(inputs):
        x = getattr(inputs, field.name)
        if isinstance(x, torch.Tensor):
            held.append((x, x.clone()))
    for x, _ in held:
        x.fill_(float("nan") if x.is_floating_point() else 0)
    return held


@pytest.mark.parametrize("case", CASES[:2], ids=lambda case: case.id)
def test_mha_side_stream(case: MhaCase) -> None:
    """The inputs become valid late on a side stream; only work on that stream, after them, sees them."""
    inputs = make_mha_inputs(case)
    want = attend(inputs)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):  # so that the allocator holds memory for the stream
        for _ in range(2):
            attend(inputs)
    torch.cuda.synchronize()
    held = spoil(inputs)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(DELAY_CYCLES)
        for x, valid in held:
            x.copy_(valid)
        got = attend(inputs)
        assert not stream.query(), "the call waited for the device"
        spoil(inputs)
    stream.synchronize()
    for x, valid in held:
        x.copy_(valid)
    assert_same_results("on a side stream", inputs, got, want)


def test_mha_default_stream_is_not_involved() -> None:
    """A call on a side stream finishes while the default stream is held up."""
    inputs = make_mha_inputs(SEGMENTS)
    want = attend(inputs)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(2):
            attend(inputs)
    torch.cuda.synchronize()
    torch.cuda._sleep(4 * DELAY_CYCLES)
    with torch.cuda.stream(stream):
        got = attend(inputs)
    stream.synchronize()
    assert not torch.cuda.default_stream().query(), "the call waited for the default stream"
    torch.cuda.synchronize()
    assert_same_results("on a side stream", inputs, got, want)


def test_mha_cupy_side_stream() -> None:
    inputs = make_mha_inputs(SEGMENTS)
    want = attend(inputs)
    torch.cuda.synchronize()
    in_cupy = mapped(inputs, to_cupy)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        attend(in_cupy)
    stream.synchronize()
    held = spoil(inputs)
    torch.cuda.synchronize()
    with stream, torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
        torch.cuda._sleep(DELAY_CYCLES)
        for x, valid in held:
            x.copy_(valid)
        got = attend(in_cupy)
        assert not stream.done, "the call waited for the device"
    stream.synchronize()
    assert_same_results("on a side stream", inputs, as_torch(got), want)


# ---- devices


@pytest.mark.parametrize("case", CASES[:2], ids=lambda case: case.id)
def test_mha_second_device(case: MhaCase) -> None:
    """The arrays are on a device that is not the current one; and on one while another is current."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    inputs = make_mha_inputs(case)
    want = attend(inputs)
    moved = mapped(inputs, lambda x: x.to("cuda:1"))
    torch.cuda.synchronize("cuda:1")
    got = attend(moved)
    assert torch.cuda.current_device() == 0
    assert all(x.device == torch.device("cuda:1") for x in got)
    assert_same_results("on the second device", inputs, tuple(x.to("cuda:0") for x in got), want)
    with torch.cuda.device(1):
        got = attend(inputs)
        assert torch.cuda.current_device() == 1
    assert all(x.device == torch.device("cuda:0") for x in got)
    assert_same_results("while the second is current", inputs, got, want)
    for name in OTHERS:  # than q
        if getattr(inputs, name) is not None:
            with pytest.raises(ValueError, match=f"{name}: expected an array on device cuda:0"):
                attend(replace(inputs, **{name: getattr(moved, name)}))


# ---- graphs


def changed(inputs: MhaInputs) -> Any:
    """Change all arrays of a call of segments in place, in several ways; yields after each."""
    case = inputs.case
    bounds = {name: getattr(inputs, name).clone() for name in ("cu_seqlens_q", "cu_seqlens_k")}
    yield
    for turn in range(1, 4):
        for name in ("q", "k", "v"):
            array = getattr(inputs, name)
            array.copy_(torch.randn(array.shape, device="cuda"))
        inputs.attn_sink.add_(1)
        inputs.alibi_slopes.mul_(0.5)
        yield
        # Shorter requests, which begin elsewhere.
        for name, first in (("cu_seqlens_q", turn), ("cu_seqlens_k", 5 - turn)):
            lengths = bounds[name].diff() // turn
            getattr(inputs, name).copy_(first + torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]))
        for used, name in ((inputs.seqused_q, "cu_seqlens_q"), (inputs.seqused_k, "cu_seqlens_k")):
            used.copy_(getattr(inputs, name).diff() * turn // 3)
        yield
    for name in bounds:  # no tokens at all, then one request with all of them
        getattr(inputs, name).zero_()
    yield
    for name in bounds:
        getattr(inputs, name)[1:] = max(case.q_lengths if name == "cu_seqlens_q" else case.k_lengths)
    for used in (inputs.seqused_q, inputs.seqused_k):
        used.zero_()
        used[0] = 250
    yield


@pytest.mark.parametrize("causal", (False, True))
def test_mha_graph_of_segments(causal: bool) -> None:
    """Replays follow arrays and lengths that change in place."""
    inputs = make_mha_inputs(replace(SEGMENTS, causal=causal, gap=0.0, layout="plain"))
    attend(inputs)
    buffer, given = out_buffer(inputs)
    graph, (fresh, with_out) = capture(lambda: (attend(inputs), attend(inputs, out=given)))
    turns = 0
    for _ in changed(inputs):
        turns += 1
        graph.replay()
        check_mha(inputs, fresh)
        assert_same_results("replayed and eager", inputs, fresh, attend(inputs))
        assert_same_results("out given", inputs, with_out, fresh)
    assert turns == 9
    assert_untouched_around(buffer, given)


@pytest.mark.parametrize("case", (BATCH, CASES[2], CASES[3]), ids=lambda case: case.id)
def test_mha_graph(case: MhaCase) -> None:
    """One captured call after another, which a counter in the same scratch gives tiles to."""
    inputs = make_mha_inputs(case)
    attend(inputs)
    graph, results = capture(lambda: [attend(inputs) for _ in range(3)])
    for _ in range(3):
        graph.replay()
        want = attend(inputs)
        check_mha(inputs, want)
        for got in results:
            assert_same_results("replayed", inputs, got, want)
        rows = covered_rows(inputs)
        inputs.q[rows] *= 0.5
        inputs.v[...] = inputs.v.flip(-1)


def test_mha_graph_with_a_copy() -> None:
    """What has to be copied is copied in the graph, from where it lies then."""
    inputs = make_mha_inputs(MhaCase(b=2, s_q=70, s_k=90))
    inputs.v = inputs.v.transpose(2, 3).contiguous().transpose(2, 3)
    attend(inputs)
    graph, got = capture(lambda: attend(inputs))
    for _ in range(2):
        graph.replay()
        check_mha(inputs, got)
        inputs.v.mul_(-3)


def test_mha_cupy_graph() -> None:
    """Captured on a CuPy stream, with results that live on; copies are refused there."""
    inputs = make_mha_inputs(replace(SEGMENTS, layout="plain"))
    want = attend(inputs)
    in_cupy = mapped(inputs, to_cupy)
    backwards = replace(in_cupy, k=in_cupy.k[::-1])
    torch.cuda.synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        attend(in_cupy)  # loads the kernel, and gives the pool memory for this stream
        stream.synchronize()
        stream.begin_capture()
        try:
            got = attend(in_cupy)
            with pytest.raises(ValueError, match="^k: expected, inside a CUDA-graph capture"):
                attend(backwards)
        finally:
            graph = stream.end_capture()
        for _ in range(2):
            for x in got:
                x.fill(0)
            graph.launch(stream)
        stream.synchronize()
    assert_same_results("replayed", inputs, as_torch(got), want)


def test_mha_kernel_missing_in_a_capture() -> None:
    """Nothing is compiled or loaded in a capture, and the refused call leaves nothing behind."""
    inputs = make_mha_inputs(SEGMENTS)
    want = attend(inputs)
    with no_kernel_loaded():
        with (
            pytest.raises(rawmla.KernelNotReadyError, match="warmup"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            attend(inputs)
        assert loading.loaded_labels() == []
        assert_same_results("after a refused capture", inputs, attend(inputs), want)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_mha_warmup_call(case: MhaCase) -> None:
    """Loads what the very call needs, allocates and enqueues nothing; then the call can be captured."""
    inputs = make_mha_inputs(case)
    want = attend(inputs)
    function, arguments, keywords = function_and_arguments(inputs)
    torch.cuda.synchronize()
    with no_kernel_loaded():
        stream = torch.cuda.current_stream()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        rawmla.warmup_call(function, *arguments, **keywords)
        assert stream.query()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        assert len(loading.loaded_labels()) == 2  # that of attention and that of splits
        graph, got = capture(lambda: function(*arguments, **keywords))
        assert len(loading.loaded_labels()) == 2
        graph.replay()
        assert_same_results("replayed", inputs, got, want)


def test_mha_warmup_by_name() -> None:
    """`rawmla.warmup("mha")` is enough for a capture of plain calls, causal ones, segments and sinks."""
    plain = make_mha_inputs(MhaCase(b=2, s_q=70, s_k=90, causal=True, sink="float16"))
    segments = make_mha_inputs(MhaCase(**RAGGED, h_q=8, h_kv=1))
    want = [attend(plain), attend(segments)]
    with no_kernel_loaded():
        rawmla.warmup("mha", mha_head_dims=[(128, 128)])
        graph, got = capture(lambda: [attend(plain), attend(segments)])
        graph.replay()
        for inputs, one, wanted in zip((plain, segments), got, want, strict=True):
            assert_same_results("replayed", inputs, one, wanted)


def test_mha_kernels_are_used_again() -> None:
    """Only dtype, head dimensions (in steps of 32) and flags choose a kernel: everything else shares one. The
    kernel that combines splits is loaded with the first.
    """
    calls: list[tuple[MhaCase, dict[str, Any]]] = [
        (MhaCase(b=b, s_q=s_q, s_k=s_k, h_q=h_q, h_kv=h_kv, layout=layout), {})
        for b, s_q, s_k, h_q, h_kv, layout in (
            (1, 1, 1, 1, 1, "plain"),
            (3, 150, 700, 8, 2, "slice"),
            (2, 70, 3, 6, 6, "heads"),
            (40, 5, 200, 32, 1, "plain"),
        )
    ]
    calls += [(MhaCase(s_q=70, s_k=90, **options), {}) for options in (
        {"causal": True}, {"window": (-1, 9)}, {"softmax_scale": 0.3}, {"sink": "bfloat16"},
        {"sink": "float32"}, {"d_qk": 111, "d_v": 97}, {"d_qk": 104, "d_v": 128},
    )]  # fmt: skip
    calls += [(MhaCase(**RAGGED), {}), (SEGMENTS, {"window_size": (-1, -1), "alibi_slopes": None})]
    calls += [(MhaCase(**SAME, packed="qkv", h_kv=4), {"deterministic": True})]
    with no_kernel_loaded():
        for case, more in calls:
            attend(make_mha_inputs(case), **more)
        assert len(loading.loaded_labels()) == 2
        for number, left in enumerate((0, 5, 100, 1000)):
            case = MhaCase(b=number + 1, s_q=70, s_k=90, window=(left, number - 1))
            attend(make_mha_inputs(case), softmax_scale=0.1 * (number + 1))
        assert len(loading.loaded_labels()) == 3
        for softcap in (1.0, 15.0, 50.0):
            attend(make_mha_inputs(MhaCase(s_q=70, s_k=90, softcap=softcap)))
        assert len(loading.loaded_labels()) == 4
        torch.cuda.synchronize()  # before the kernels are let go of


# ---- threads


def test_mha_threads() -> None:
    """A thread per case, each with a stream of its own, gets the bits that it would get alone."""
    cases = [*CASES, *(replace(case, seed=9) for case in CASES)]
    calls = [make_mha_inputs(case) for case in cases]
    wanted = [attend(inputs) for inputs in calls]
    torch.cuda.synchronize()
    results: list[list[Any]] = [[] for _ in calls]
    errors: list[BaseException] = []
    start = threading.Barrier(len(calls))

    def work(inputs: MhaInputs, own: list[Any]) -> None:
        try:
            start.wait()
            with torch.cuda.stream(torch.cuda.Stream()):
                own.extend(attend(inputs) for _ in range(20))
                torch.cuda.current_stream().synchronize()
        except BaseException as error:
            errors.append(error)

    for prepared in (True, False):  # the second time every thread prepares its calls, and loads kernels
        for own in results:
            own.clear()
        threads = [threading.Thread(target=work, args=pair) for pair in zip(calls, results, strict=True)]
        if prepared:
            run_all(threads)
        else:
            with no_kernel_loaded():
                run_all(threads)
        assert not errors, errors
        torch.cuda.synchronize()
        for inputs, own, want in zip(calls, results, wanted, strict=True):
            assert len(own) == 20
            for got in own:
                assert_same_results("in a thread", inputs, got, want)


def run_all(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# ---- torch.compile


compiled = pytest.mark.usefixtures("_nothing_compiled")
quiet = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own


@quiet
@compiled
@pytest.mark.parametrize("backend", ("inductor", "aot_eager"))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_mha_compiled(case: MhaCase, backend: str) -> None:
    inputs = make_mha_inputs(case)
    function, arguments, keywords = function_and_arguments(inputs)

    def step(*arguments: Any, **keywords: Any) -> Any:
        out, lse = function(*arguments, **keywords)
        return out, lse * 1

    got = torch.compile(step, fullgraph=True, backend=backend)(*arguments, **keywords)
    want = step(*arguments, **keywords)
    assert_same_results("compiled", inputs, got, want)
    assert got[0].stride() == want[0].stride()


@quiet
@compiled
def test_mha_compiled_out() -> None:
    inputs = make_mha_inputs(BATCH)
    want = attend(inputs)
    buffer = torch.ones(3, 150, 8, 128, dtype=torch.bfloat16, device="cuda")

    def step(buffer: Any, q: Any, k: Any, v: Any, sink: Any) -> Any:
        return rawmla.flash_attn_func(q, k, v, causal=True, attn_sink=sink, out=buffer[:, :, 4:])[1]

    lse = torch.compile(step, fullgraph=True)(buffer, inputs.q, inputs.k, inputs.v, inputs.attn_sink)
    assert_same_results("compiled", inputs, (buffer[:, :, 4:], lse), want)
    assert bool((buffer[:, :, :4] == 1).all())


@quiet
@compiled
def test_mha_compiled_for_many_lengths() -> None:
    """One graph for all sizes."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")

    def step(q: Any, k: Any, v: Any) -> Any:
        return rawmla.flash_attn_func(q, k, v, causal=True)

    compiled_step = torch.compile(step, fullgraph=True, backend=counter, dynamic=True)
    for b, s_q, s_k in ((3, 70, 90), (2, 130, 150), (5, 33, 257)):
        inputs = make_mha_inputs(MhaCase(b=b, s_q=s_q, s_k=s_k))
        arrays = inputs.q, inputs.k, inputs.v
        for name, got, want in zip(("out", "lse"), compiled_step(*arrays), step(*arrays), strict=True):
            assert_same_bits(name, got, want)
    assert counter.frame_count <= 2
