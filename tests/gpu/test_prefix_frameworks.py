"""Prefix prefill with torch, CuPy and DLPack; streams, devices, graphs, threads, torch.compile, warm-up."""

from __future__ import annotations

import threading
from dataclasses import fields, replace
from typing import Any

import pytest
from gpu_support import assert_same_bits, cupy, no_kernel_loaded, replaced_launches, torch
from prefix_calls import Target, assert_same_rows, attend, readdressed
from test_frameworks import DELAY_CYCLES, Producer, to_cupy
from test_graphs import capture
from test_mha_frameworks import compiled, mapped, quiet, run_all, spoil

import rawmla
from kit.prefix import PrefixCase, PrefixInputs, check_prefix, make_prefix_inputs
from rawmla.jit import loading

LENGTHS: dict[str, Any] = {
    "query_lengths": (300, 0, 1, 77, 130, 64),
    "contexts": (257, 90, 40, 0, 131, 513),
}
BY_TMA = PrefixCase(**LENGTHS, rows_around=9, layout="slice", window=100, sinks="float32", padded=True)
GATHERED = PrefixCase(
    **LENGTHS, own_cached=True, block_size=12, table="int64", dtype="float16", causal=False, skip_decode=True
)
FP8 = PrefixCase(
    **LENGTHS, kv_cache_dtype="fp8_e4m3", bytes_dtype="uint8", x=16, k_scale=0.7, v_scale=1.3, out_scale=0.02,
    device_scales=True, alibi=True,
)  # fmt: skip
CASES = (BY_TMA, GATHERED, FP8)
each_case = pytest.mark.parametrize("case", CASES, ids=("by TMA", "gathered", "fp8"))
ARRAYS = [field.name for field in fields(PrefixInputs) if field.name != "case"]


def given_arrays(inputs: PrefixInputs) -> list[str]:
    return [name for name in ARRAYS if isinstance(getattr(inputs, name), torch.Tensor)]


# ---- arrays


@each_case
def test_prefix_cupy(case: PrefixCase) -> None:
    """CuPy arrays in and out, with the bits that torch gets, and nothing else written."""
    inputs = make_prefix_inputs(case)
    want = attend(inputs)
    check_prefix(inputs, want)
    target = Target(inputs)
    torch.cuda.synchronize()
    attend(mapped(inputs, to_cupy), to_cupy(target.o))
    cupy.cuda.get_current_stream().synchronize()
    assert_same_rows("CuPy", inputs, target.o, want)
    target.assert_untouched_around()


def test_prefix_cupy_copies() -> None:
    """Strides that are negative, and a last dimension that is not contiguous."""
    inputs = make_prefix_inputs(replace(BY_TMA, layout="plain", rows_around=0))
    want = attend(inputs)
    target = Target(inputs)
    torch.cuda.synchronize()
    in_cupy = mapped(inputs, to_cupy)
    in_cupy.k = cupy.ascontiguousarray(in_cupy.k[::-1])[::-1]
    in_cupy.v = cupy.ascontiguousarray(in_cupy.v.swapaxes(1, 2)).swapaxes(1, 2)
    attend(in_cupy, to_cupy(target.o))
    cupy.cuda.get_current_stream().synchronize()
    assert_same_rows("copied by CuPy", inputs, target.o, want)


@each_case
def test_prefix_dlpack_producer(case: PrefixCase) -> None:
    inputs = make_prefix_inputs(case)
    want = attend(inputs)
    target = Target(inputs)
    torch.cuda.synchronize()
    attend(mapped(inputs, Producer), Producer(target.o))
    cupy.cuda.get_current_stream().synchronize()
    assert_same_rows("a producer", inputs, target.o, want)


def test_prefix_two_frameworks() -> None:
    """Tables, lengths and scales of CuPy beside tensors."""
    for case in (BY_TMA, FP8):
        inputs = make_prefix_inputs(case)
        want = attend(inputs)
        names = ["b_loc", "b_start_loc", "b_seq_len"] + ["k_scale", "out_scale"] * case.device_scales
        mixed = replace(inputs, **{name: to_cupy(getattr(inputs, name)) for name in names})
        o = Target(inputs).o
        attend(mixed, o)
        assert_same_rows("two frameworks", inputs, o, want)


def test_prefix_o_is_nan_before_the_kernel() -> None:
    """What the other tests rely on."""
    for case in CASES:
        inputs = make_prefix_inputs(case)
        with replaced_launches(lambda: None):
            o = attend(inputs)
        with pytest.raises(AssertionError, match="NaN"):
            check_prefix(inputs, o)


# ---- streams


@each_case
def test_prefix_side_stream(case: PrefixCase) -> None:
    """The inputs become valid late on a side stream; only work on that stream, after them, sees them."""
    inputs = make_prefix_inputs(case)
    want = attend(inputs)
    o = Target(inputs).o
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):  # so that the allocator holds memory for the stream
        for _ in range(2):
            attend(inputs, o)
    torch.cuda.synchronize()
    held = spoil(inputs)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(DELAY_CYCLES)
        for x, valid in held:
            x.copy_(valid)
        o.view(torch.uint8 if o.element_size() == 1 else torch.int16).zero_()
        attend(inputs, o)
        assert not stream.query(), "the call waited for the device"
        spoil(inputs)
    stream.synchronize()
    for x, valid in held:
        x.copy_(valid)
    assert_same_rows("on a side stream", inputs, o, want)


def test_prefix_default_stream_is_not_involved() -> None:
    """A call on a side stream finishes while the default stream is held up."""
    inputs = make_prefix_inputs(BY_TMA)
    want = attend(inputs)
    o = Target(inputs).o
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(2):
            attend(inputs, o)
        o.zero_()
    torch.cuda.synchronize()
    torch.cuda._sleep(4 * DELAY_CYCLES)
    with torch.cuda.stream(stream):
        attend(inputs, o)
    stream.synchronize()
    assert not torch.cuda.default_stream().query(), "the call waited for the default stream"
    torch.cuda.synchronize()
    assert_same_rows("on a side stream", inputs, o, want)


# ---- devices


@each_case
def test_prefix_second_device(case: PrefixCase) -> None:
    """The arrays are on a device that is not the current one; arrays of two devices are refused."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    inputs = make_prefix_inputs(case)
    want = attend(inputs)
    moved = mapped(inputs, lambda x: x.to("cuda:1"))
    o = torch.empty_like(want, device="cuda:1")
    torch.cuda.synchronize("cuda:1")
    attend(moved, o)
    assert torch.cuda.current_device() == 0
    assert_same_rows("on the second device", inputs, o.to("cuda:0"), want)
    with torch.cuda.device(1):
        o = attend(inputs)
        assert torch.cuda.current_device() == 1
    assert_same_rows("while the second is current", inputs, o, want)
    for name in given_arrays(inputs):
        if name != "q":
            argument = "fp8_out_scale" if name == "out_scale" else name
            with pytest.raises(ValueError, match=f"{argument}: expected an array on device cuda:0"):
                attend(replace(inputs, **{name: getattr(moved, name)}), want)


# ---- graphs

LONGEST = 572
BATCHES = (
    ((300, 0, 1, 77, 130, 64), (257, 90, 40, 0, 131, 513)),
    ((64, 130, 77, 1, 0, 300), (0, 600, 16, 500, 77, 3)),
    ((572, 0, 0, 0, 0, 0), (300, 200, 0, 0, 0, 0)),
    ((95, 95, 95, 95, 96, 96), (0, 0, 0, 0, 0, 0)),
    ((1, 1, 1, 1, 1, 567), (600, 1, 15, 16, 17, 33)),
)


def copy_into(inputs: PrefixInputs, other: PrefixInputs) -> None:
    """Everything that the arrays of a call hold, from another call of the same sizes."""
    table = readdressed(other, inputs.k_cache)
    for name in given_arrays(inputs):
        getattr(inputs, name).copy_(table if name == "b_loc" else getattr(other, name))


@pytest.mark.parametrize(
    "case",
    (*CASES, replace(BY_TMA, table="pointers", window=0), replace(FP8, table="pointers", own_cached=True)),
    ids=("by TMA", "gathered", "fp8", "by TMA, addresses", "fp8, addresses"),
)
def test_prefix_graph(case: PrefixCase) -> None:
    """Replays follow tables, lengths, scales, caches and all else that changes in place."""
    case = replace(case, room=1200)
    inputs = make_prefix_inputs(case)
    attend(inputs, max_input_len=LONGEST)
    o = Target(inputs, apart=False).o
    graph, _ = capture(lambda: attend(inputs, o, max_input_len=LONGEST))
    for turn, (query_lengths, contexts) in enumerate((*BATCHES, BATCHES[0])):
        other = make_prefix_inputs(
            replace(
                case, query_lengths=query_lengths, contexts=contexts, seed=turn + 1, k_scale=0.2 * (turn + 1),
                v_scale=0.4 * (turn + 1), out_scale=None if case.out_scale is None else 0.01 * (turn + 1),
            )
        )  # fmt: skip
        copy_into(inputs, other)
        o.view(torch.uint8 if o.element_size() == 1 else torch.int16).fill_(
            -1 if o.element_size() > 1 else 255
        )
        graph.replay()
        check_prefix(inputs, o)
        eager = attend(inputs, max_input_len=LONGEST)
        assert_same_rows("replayed and eager", inputs, o, eager)
    inputs.b_start_loc.zero_()
    before = o.clone()
    graph.replay()
    as_bytes = torch.uint8 if o.element_size() == 1 else o.dtype
    assert_same_bits("without tokens", o.view(as_bytes), before.view(as_bytes))


def test_prefix_graph_of_calls() -> None:
    """One captured call after another, which a counter gives tiles to."""
    case = PrefixCase((512,) * 8, (100,) * 8, h_q=32, h_kv=8)
    inputs = make_prefix_inputs(case)
    targets = [Target(inputs, apart=False).o for _ in range(3)]
    attend(inputs, targets[0])
    graph, _ = capture(lambda: [attend(inputs, o) for o in targets])
    for _ in range(3):
        for o in targets:
            o.fill_(float("nan"))
        graph.replay()
        check_prefix(inputs, targets[0])
        for o in targets[1:]:
            assert_same_rows("replayed", inputs, o, targets[0])
        inputs.q.mul_(0.5)


def test_prefix_graph_with_a_copy() -> None:
    """What has to be copied is copied in the graph, from where it lies then."""
    inputs = make_prefix_inputs(PrefixCase((70, 30), (90, 0)))
    inputs.v = inputs.v.transpose(1, 2).contiguous().transpose(1, 2)
    o = attend(inputs)
    graph, _ = capture(lambda: attend(inputs, o))
    for _ in range(2):
        graph.replay()
        check_prefix(inputs, o)
        inputs.v.mul_(-3)


def test_prefix_cupy_graph() -> None:
    """Captured on a CuPy stream; copies are refused there."""
    inputs = make_prefix_inputs(replace(BY_TMA, layout="plain"))
    want = attend(inputs)
    target = Target(inputs)
    in_cupy, o = mapped(inputs, to_cupy), to_cupy(target.o)
    backwards = replace(in_cupy, k=in_cupy.k[::-1])
    torch.cuda.synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        attend(in_cupy, o)  # loads the kernel, and gives the pool memory for this stream
        stream.synchronize()
        stream.begin_capture()
        try:
            attend(in_cupy, o)
            with pytest.raises(ValueError, match="^k: expected, inside a CUDA-graph capture"):
                attend(backwards, o)
        finally:
            graph = stream.end_capture()
        target.o.zero_()
        torch.cuda.synchronize()
        for _ in range(2):
            graph.launch(stream)
        stream.synchronize()
    assert_same_rows("replayed", inputs, target.o, want)


@each_case
def test_prefix_kernel_missing_in_a_capture(case: PrefixCase) -> None:
    """Nothing is compiled or loaded in a capture, and the refused call leaves nothing behind."""
    inputs = make_prefix_inputs(case)
    want = attend(inputs)
    o = Target(inputs).o
    with no_kernel_loaded():
        with (
            pytest.raises(rawmla.KernelNotReadyError, match="warmup"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            attend(inputs, o)
        assert loading.loaded_labels() == []
        assert_same_rows("after a refused capture", inputs, attend(inputs), want)
        torch.cuda.synchronize()  # before the kernel is let go of


@each_case
def test_prefix_warmup_call(case: PrefixCase) -> None:
    """Loads what the very call needs, allocates and enqueues nothing; then the call can be captured."""
    inputs = make_prefix_inputs(case)
    want = attend(inputs)
    target = Target(inputs)
    torch.cuda.synchronize()
    with no_kernel_loaded():
        stream = torch.cuda.current_stream()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        rawmla.warmup_call(rawmla.context_attention_fwd, **inputs.keywords(target.o))
        assert stream.query()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        loaded = loading.loaded_labels()
        assert loaded
        graph, _ = capture(lambda: attend(inputs, target.o))
        assert loading.loaded_labels() == loaded
        graph.replay()
        assert_same_rows("replayed", inputs, target.o, want)
        target.assert_untouched_around()


def test_prefix_kernels_are_used_again() -> None:
    """Only dtypes, the head dimension (in steps of 32), flags and how pages lie choose a kernel."""
    short: dict[str, Any] = {"query_lengths": (40, 1, 0), "contexts": (70, 9, 3)}
    by_tma: list[dict[str, Any]] = [
        {"block_size": 32}, {"block_size": 544}, {"h_q": 8, "h_kv": 1}, {"h_q": 5, "h_kv": 5}, {"d": 104},
        {"table": "int64"}, {"table": "pointers"}, {"padded": True, "layout": "slice"}, {"causal": False},
        {"own_cached": True}, {"skip_decode": True}, {"sm_scale": 0.3}, {"sinks": "bfloat16"},
        {"sinks": "float32"}, {"pack": 16}, {"query_lengths": (1,) * 300, "contexts": (5,) * 300},
    ]  # fmt: skip
    gathered: list[dict[str, Any]] = [
        {"x": 16}, {"block_size": 1}, {"block_size": 12}, {"pack": 4}, {"d": 111, "x": 1},
        {"x": 128, "block_size": 544, "table": "pointers", "own_cached": True},
    ]  # fmt: skip
    fp8: list[dict[str, Any]] = [
        {"kv_cache_dtype": "fp8", "bytes_dtype": "uint8"},
        {"kv_cache_dtype": "fp8_e4m3", "x": 16, "k_scale": 3.0, "device_scales": True},
        {"kv_cache_dtype": "fp8_e4m3", "block_size": 7, "bytes_dtype": "int8"},
    ]
    windows: list[dict[str, Any]] = [{"window": 1}, {"window": 100, "causal": False}, {"window": 10**6}]
    with no_kernel_loaded():
        for kernels, options in enumerate((by_tma, gathered, fp8, windows), start=1):
            for one in options:
                attend(make_prefix_inputs(PrefixCase(**{**short, **one})))
            loaded = [label for label in loading.loaded_labels() if label.startswith("mha_forward")]
            assert len(loaded) == kernels, (options, loaded)
        torch.cuda.synchronize()  # before the kernels are let go of


# ---- threads


def test_prefix_threads() -> None:
    """A thread per case, each with a stream of its own, gets the bits that it would get alone."""
    calls = [make_prefix_inputs(case) for case in (*CASES, *(replace(case, seed=9) for case in CASES))]
    wanted = [attend(inputs) for inputs in calls]
    outputs = [[Target(inputs).o for _ in range(10)] for inputs in calls]
    torch.cuda.synchronize()
    errors: list[BaseException] = []
    start = threading.Barrier(len(calls))

    def work(inputs: PrefixInputs, own: list[Any]) -> None:
        try:
            start.wait()
            with torch.cuda.stream(torch.cuda.Stream()):
                for o in own:
                    attend(inputs, o)
                torch.cuda.current_stream().synchronize()
        except BaseException as error:
            errors.append(error)

    with no_kernel_loaded():  # every thread prepares its calls, and loads kernels
        run_all([threading.Thread(target=work, args=pair) for pair in zip(calls, outputs, strict=True)])
        torch.cuda.synchronize()
    assert not errors, errors
    for inputs, own, want in zip(calls, outputs, wanted, strict=True):
        for o in own:
            assert_same_rows("in a thread", inputs, o, want)


# ---- torch.compile


@quiet
@compiled
@pytest.mark.parametrize("backend", ("inductor", "aot_eager"))
@each_case
def test_prefix_compiled(case: PrefixCase, backend: str) -> None:
    """o is written in place, and what is computed of it then sees that."""
    inputs = make_prefix_inputs(case)
    want = attend(inputs)
    o = Target(inputs, apart=False).o

    def step(o: Any, keywords: dict[str, Any]) -> Any:
        return rawmla.context_attention_fwd(**{**keywords, "o": o}) * 1

    keywords = inputs.keywords(None)
    got = torch.compile(step, fullgraph=True, backend=backend)(o, keywords)
    assert_same_rows("compiled", inputs, o, want)
    assert_same_rows("compiled, what follows", inputs, got, want)


@quiet
@compiled
def test_prefix_compiled_o_is_a_slice() -> None:
    inputs = make_prefix_inputs(replace(BY_TMA, layout="plain"))
    want = attend(inputs)
    buffer = torch.ones(len(inputs.q), 8, 128, dtype=inputs.q.dtype, device="cuda")
    keywords = inputs.keywords(None)

    def step(buffer: Any, keywords: dict[str, Any]) -> Any:
        rawmla.context_attention_fwd(**{**keywords, "o": buffer[:, 4:]})

    torch.compile(step, fullgraph=True)(buffer, keywords)
    assert_same_rows("compiled", inputs, buffer[:, 4:], want)
    assert bool((buffer[:, :4] == 1).all())
