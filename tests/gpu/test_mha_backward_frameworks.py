"""The backward of dense attention with DLPack and CuPy, on streams and devices, in graphs and threads, for
arrays that are large, and which calls share a kernel.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest
from gpu_support import cupy, loaded_labels, no_kernel_loaded, torch
from mha_backward_calls import (
    BackwardInputs,
    assert_same_gradients,
    backward_inputs,
    backward_of,
    check_backward,
    gradient_buffers,
)
from mha_calls import CANARY, assert_untouched_around, attend
from test_autograd import RAGGED, Step, in_parts
from test_frameworks import DELAY_CYCLES, Producer, to_cupy
from test_graphs import capture
from test_mha_frameworks import as_torch, mapped, run_all

import rawmla
from kit.mha import MhaCase, MhaInputs, make_mha_inputs
from kit.mha_backward import MhaGradients

SEGMENTS = MhaCase(
    **RAGGED, q_used=(290, 0, 0, 77, 3, 60), k_used=(250, 90, 0, 5, 129, 513), rows_around=9, layout="slice",
    window=(100, 3), alibi="requests", sink="bfloat16", d_qk=64, d_v=64,
)  # fmt: skip
# Of every form of the kernel, which head dimensions and flags choose.
WIDE = replace(SEGMENTS, d_qk=192, d_v=128, alibi=None, causal=True, window=(-1, -1), sink="float32", h_kv=1)
BY_PRODUCT = replace(SEGMENTS, d_qk=256, d_v=256, alibi=None)
BATCH = MhaCase(b=3, s_q=150, s_k=200, causal=True, softcap=15.0, alibi="heads", sink="float32")
CALLS = (
    *((SEGMENTS, "both"), (WIDE, "out"), (BY_PRODUCT, "both"), (replace(BATCH, layout="heads"), "both")),
    (replace(BATCH, alibi=None), "out"),
)
each_call = pytest.mark.parametrize(("case", "of"), CALLS, ids=lambda x: x if isinstance(x, str) else x.id)

EVERY = {"q", "k", "v", "attn_sink", "dout", "dlse", "out", "lse"}
OF_SEGMENTS = {"cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"}


def map_call(call: BackwardInputs, change: Callable[[Any], Any]) -> BackwardInputs:
    """The call on other arrays, which `change` makes of the torch tensors."""
    dlse = call.gradients.dlse
    return BackwardInputs(
        mapped(call.inputs, change),
        MhaGradients(change(call.gradients.dout), None if dlse is None else change(dlse)),
        (change(call.results[0]), change(call.results[1])),
    )


def differentiate(inputs: MhaInputs, gradients: MhaGradients) -> tuple[Any, ...]:
    """dq, dk, dv and dsink through autograd."""
    leaves = {name: getattr(inputs, name).detach().requires_grad_() for name in (*"qkv", "attn_sink")}
    of = "out" if gradients.dlse is None else "both"
    return in_parts(inputs.case, Step(inputs, gradients, leaves).differentiate(of, deterministic=False)[1])


def arrays_of(call: BackwardInputs) -> dict[str, Any]:
    """All arrays that a call reads, by name."""
    names = ("q", "k", "v", "attn_sink", "alibi_slopes", *sorted(OF_SEGMENTS))
    arrays = {name: getattr(call.inputs, name) for name in names}
    arrays |= {"dout": call.gradients.dout, "dlse": call.gradients.dlse}
    arrays |= dict(zip(("out", "lse"), call.results, strict=True))
    return {name: x for name, x in arrays.items() if x is not None}


# ---- arrays


@each_call
def test_backward_dlpack_producer(case: MhaCase, of: str) -> None:
    """Taken over by CuPy, which then also holds the results."""
    call = backward_inputs(make_mha_inputs(case), of)
    want = backward_of(call)
    check_backward(call, want)
    torch.cuda.synchronize()
    got = backward_of(map_call(call, Producer))
    assert all(isinstance(x, cupy.ndarray) for x in got)
    cupy.cuda.get_current_stream().synchronize()
    assert_same_gradients("a producer", as_torch(got), want)


def test_backward_of_two_frameworks() -> None:
    """Lengths, lse and its gradient of CuPy beside tensors: results are tensors."""
    call = backward_inputs(make_mha_inputs(SEGMENTS), "both")
    want = backward_of(call)
    names = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "alibi_slopes")
    mixed = {name: to_cupy(getattr(call.inputs, name)) for name in names}
    got = backward_of(
        BackwardInputs(
            replace(call.inputs, **mixed),
            replace(call.gradients, dlse=to_cupy(call.gradients.dlse)),
            (call.results[0], to_cupy(call.results[1])),
        )
    )
    assert all(isinstance(x, torch.Tensor) for x in got)
    assert_same_gradients("two frameworks", got, want)


# ---- streams


@pytest.mark.parametrize("framework", ("torch", "CuPy"))
@pytest.mark.parametrize(("case", "of"), CALLS[:2], ids=lambda x: x if isinstance(x, str) else x.id)
def test_backward_of_arrays_that_become_valid_late(case: MhaCase, of: str, framework: str) -> None:
    """All arrays are garbage until work on a side stream makes them valid, after the call is enqueued."""
    call = backward_inputs(make_mha_inputs(case), of)
    want = backward_of(call)
    check_backward(call, want)
    own = cupy.cuda.Stream(non_blocking=True)
    called = map_call(call, to_cupy) if framework == "CuPy" else call
    torch.cuda.synchronize()
    with own, torch.cuda.stream(torch.cuda.ExternalStream(own.ptr)):
        for _ in range(2):  # so that the allocators hold memory for the stream
            backward_of(called)
    own.synchronize()
    held = [(x, x.clone()) for x in arrays_of(call).values()]
    for x, _ in held:
        x.fill_(nan if x.is_floating_point() else 0)
    torch.cuda.synchronize()
    with own, torch.cuda.stream(torch.cuda.ExternalStream(own.ptr)):
        torch.cuda._sleep(DELAY_CYCLES)
        for x, valid in held:
            x.copy_(valid)
        got = backward_of(called)
        assert not own.done, "the call waited for the device"
    own.synchronize()
    assert_same_gradients("on a side stream", as_torch(got) if framework == "CuPy" else got, want)


def test_backward_default_stream_is_not_involved() -> None:
    """A call on a side stream finishes while the default stream is held up."""
    call = backward_inputs(make_mha_inputs(SEGMENTS), "both")
    want = backward_of(call)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(2):
            backward_of(call)
    torch.cuda.synchronize()
    torch.cuda._sleep(4 * DELAY_CYCLES)
    with torch.cuda.stream(stream):
        got = backward_of(call)
    stream.synchronize()
    assert not torch.cuda.default_stream().query(), "the call waited for the default stream"
    torch.cuda.synchronize()
    assert_same_gradients("on a side stream", got, want)


# ---- devices


@pytest.mark.parametrize(("case", "of"), CALLS[:3], ids=lambda x: x if isinstance(x, str) else x.id)
def test_backward_second_device(case: MhaCase, of: str) -> None:
    """The arrays are on a device that is not the current one; and on one while another is current."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    call = backward_inputs(make_mha_inputs(case), of)
    want = backward_of(call)
    check_backward(call, want)
    moved = map_call(call, lambda x: x.to("cuda:1"))
    torch.cuda.synchronize("cuda:1")
    got = backward_of(moved)
    assert torch.cuda.current_device() == 0
    assert all(x.device == torch.device("cuda:1") for x in got)
    assert_same_gradients("on the second device", tuple(x.to("cuda:0") for x in got), want)
    grads = differentiate(moved.inputs, moved.gradients)
    assert torch.cuda.current_device() == 0
    through_graph = tuple(x.to("cuda:0") for x in grads)
    assert_same_gradients("autograd on the second device", through_graph, want)
    with torch.cuda.device(1):
        got = backward_of(call)
        assert torch.cuda.current_device() == 1
    assert all(x.device == torch.device("cuda:0") for x in got)
    assert_same_gradients("while the second is current", got, want)
    for name, x in arrays_of(moved).items():  # with one array elsewhere
        wrong = BackwardInputs(replace(call.inputs), replace(call.gradients), call.results)
        if name in ("out", "lse"):
            wrong.results = (x, call.results[1]) if name == "out" else (call.results[0], x)
        elif name != "q":  # whose device is that of the call
            setattr(wrong.gradients if name in ("dout", "dlse") else wrong.inputs, name, x)
        else:
            continue
        with pytest.raises(ValueError, match=f"^{name}: expected an array on device cuda:0"):
            backward_of(wrong)


# ---- graphs


def renew(call: BackwardInputs, of: str, seed: int) -> None:
    """Write the forward's results for what changed, and other gradients to begin with, in place."""
    inputs = replace(call.inputs, case=replace(call.inputs.case, seed=seed))
    again = arrays_of(backward_inputs(inputs, of))
    arrays = arrays_of(call)
    for name in ("out", "lse", "dout", "dlse"):
        if name in arrays:
            arrays[name].copy_(again[name])


def changes(call: BackwardInputs, of: str) -> Iterator[None]:
    """Change all arrays of a call in place, in several ways; yields after each."""
    inputs, arrays = call.inputs, arrays_of(call)
    segments = inputs.cu_seqlens_q is not None
    bounds = {name: arrays[name].clone() for name in ("cu_seqlens_q", "cu_seqlens_k") if segments}
    yield
    for turn in range(1, 4):
        for name in ("q", "k", "v"):
            spread = inputs.case.softcap / 4 if name == "q" and inputs.case.softcap else 1
            arrays[name].copy_(torch.randn(arrays[name].shape, device="cuda") * spread)
        arrays["attn_sink"].add_(1)
        if "alibi_slopes" in arrays:
            arrays["alibi_slopes"].mul_(0.5)
        # Shorter requests, which begin elsewhere.
        for name, first in (("cu_seqlens_q", turn), ("cu_seqlens_k", 5 - turn)):
            if segments:
                lengths = bounds[name].diff() // turn
                arrays[name].copy_(first + torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]))
                arrays[f"seqused_{name[-1]}"].copy_(lengths * turn // 3)
        renew(call, of, turn)
        yield
    if not segments:
        return
    for name in bounds:  # no tokens at all, then one request with all of them
        arrays[name].zero_()
    renew(call, of, 5)
    yield
    for name in bounds:
        lengths = inputs.case.q_lengths if name == "cu_seqlens_q" else inputs.case.k_lengths
        assert lengths is not None
        arrays[name][1:] = max(lengths)
        arrays[f"seqused_{name[-1]}"].zero_()[0] = 250
    renew(call, of, 6)
    yield


@each_call
def test_backward_in_a_graph_where_everything_changes(case: MhaCase, of: str) -> None:
    """Replays follow all arrays and lengths: fresh gradients, given ones, and those in a fixed order, which
    are those of eager calls in every bit.
    """
    call = backward_inputs(make_mha_inputs(replace(case, gap=0.0)), of)
    assert arrays_of(call).keys() >= EVERY - ({"dlse"} if of == "out" else set())
    assert case.q_lengths is None or arrays_of(call).keys() >= OF_SEGMENTS
    for deterministic in (False, True):
        backward_of(call, deterministic=deterministic)
    buffers, given = gradient_buffers(call.inputs, CANARY)
    graph, (fresh, filled, ordered) = capture(
        lambda: (backward_of(call), backward_of(call, **given), backward_of(call, deterministic=True))
    )
    for turn, _ in enumerate(changes(call, of)):
        graph.replay()
        want = backward_of(call, deterministic=True)
        check_backward(call, want)
        for name, got in (("replayed", fresh), ("given", filled), ("in a fixed order", ordered)):
            assert_same_gradients(f"{name}, turn {turn}", got, want, exact_dq=got is ordered)
    assert turn == (3 if case.q_lengths is None else 5)
    for buffer, array in zip(buffers, given.values(), strict=True):
        assert_untouched_around(buffer, array)


def test_backward_in_a_graph_with_a_copy() -> None:
    """What has to be copied is copied in the graph, from where it lies then."""
    call = backward_inputs(make_mha_inputs(MhaCase(b=2, s_q=70, s_k=90)))
    for x in (call.gradients, call.inputs):
        name = "dout" if x is call.gradients else "k"
        setattr(x, name, getattr(x, name).transpose(2, 3).contiguous().transpose(2, 3))
    backward_of(call)
    graph, got = capture(lambda: backward_of(call))
    for _ in range(2):
        graph.replay()
        check_backward(call, got)
        call.gradients.dout.mul_(-3)


@pytest.mark.parametrize(("case", "of"), CALLS[:2], ids=lambda x: x if isinstance(x, str) else x.id)
def test_backward_cupy_graph(case: MhaCase, of: str) -> None:
    """Captured on a CuPy stream, with results that live on; copies are refused there."""
    call = backward_inputs(make_mha_inputs(replace(case, layout="plain")), of)
    want = backward_of(call, deterministic=True)
    check_backward(call, want)
    in_cupy = map_call(call, to_cupy)
    backwards = replace(in_cupy, gradients=replace(in_cupy.gradients, dout=in_cupy.gradients.dout[::-1]))
    torch.cuda.synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        backward_of(in_cupy, deterministic=True)  # loads the kernels, and gives the pool memory
        stream.synchronize()
        stream.begin_capture()
        try:
            got = backward_of(in_cupy, deterministic=True)
            with pytest.raises(ValueError, match="^dout: expected, inside a CUDA-graph capture"):
                backward_of(backwards, deterministic=True)
        finally:
            graph = stream.end_capture()
        for _ in range(2):
            for x in got:
                x.fill(0)
            graph.launch(stream)
        stream.synchronize()
    assert_same_gradients("replayed", as_torch(got), want, exact_dq=True)


def test_backward_kernel_missing_in_a_captured_pass() -> None:
    """The forward's kernels are there, those of its backward are not: autograd passes the refusal on."""
    inputs = make_mha_inputs(WIDE)
    call = backward_inputs(inputs)
    want = backward_of(call)
    dout = call.gradients.dout
    with no_kernel_loaded():
        attend(inputs)
        before = loaded_labels()
        with (
            pytest.raises(rawmla.KernelNotReadyError, match="warmup"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            differentiate(inputs, MhaGradients(dout, None))
        assert loaded_labels() == before
        got = differentiate(inputs, MhaGradients(dout, None))
        assert_same_gradients("after a refused capture", got, want)
        torch.cuda.synchronize()  # before the kernels are let go of


# ---- kernels


def test_backward_kernels_are_used_again() -> None:
    """Only dtype, head dimensions (in steps of 32) and flags choose kernels: everything else shares them.
    Three do the work of a call, with segments a fourth clears what belongs to none.
    """

    def prepared(of: str = "out", **options: Any) -> BackwardInputs:
        return backward_inputs(make_mha_inputs(MhaCase(**options)), of)

    shapes = ((1, 1, 1, 1, 1, "plain"), (3, 150, 300, 8, 2, "slice"), (2, 70, 3, 6, 6, "heads"),
              (40, 5, 200, 32, 1, "plain"))  # fmt: skip
    names = ("b", "s_q", "s_k", "h_q", "h_kv", "layout")
    options_of: list[dict[str, Any]] = [dict(zip(names, shape, strict=True)) for shape in shapes]
    plain = [prepared(**options) for options in options_of]
    sizes: dict[str, Any] = {"s_q": 70, "s_k": 90}
    plain += [
        prepared(**sizes, **options)
        for options in (
            {"causal": True}, {"window": (-1, 9)}, {"window": (5, 3)}, {"softmax_scale": 0.3},
            {"sink": "bfloat16"}, {"sink": "float32"}, {"d_qk": 111, "d_v": 97}, {"d_qk": 104},
        )
    ]  # fmt: skip
    plain.append(prepared("both", **sizes))
    segments = [prepared(**RAGGED), prepared(**RAGGED, sink="float32", causal=True)]
    softcaps = [prepared(**sizes, softcap=softcap) for softcap in (1.0, 15.0, 50.0)]
    slopes = [prepared(**sizes, alibi=alibi, seed=seed) for seed, alibi in enumerate(("heads", "requests"))]
    weights = [prepared("both", **sizes, sink=sink) for sink in ("float32", "bfloat16", "float16")]
    with no_kernel_loaded():
        for calls, count in ((plain, 3), (segments, 4), (softcaps, 5), (slopes, 6), (weights, 7)):
            for number, call in enumerate(calls):
                backward_of(call, deterministic=number % 2 == 1)
                backward_of(call, **gradient_buffers(call.inputs, CANARY)[1])
            assert len(loaded_labels()) == count
        torch.cuda.synchronize()  # before the kernels are let go of


# ---- threads


def test_backward_threads() -> None:
    """Two threads for each case, each with a stream of its own, get the bits that they would get alone."""
    made = [(replace(case, seed=seed), of) for case, of in CALLS for seed in (0, 9)]
    calls = [backward_inputs(make_mha_inputs(case), of) for case, of in made]
    wanted = [backward_of(call, deterministic=True) for call in calls]
    for call, want in zip(calls, wanted, strict=True):
        check_backward(call, want)
    torch.cuda.synchronize()
    results: list[list[Any]] = [[] for _ in calls]
    errors: list[BaseException] = []
    start = threading.Barrier(len(calls))

    def work(call: BackwardInputs, own: list[Any]) -> None:
        try:
            start.wait()
            with torch.cuda.stream(torch.cuda.Stream()):
                own.extend(backward_of(call, deterministic=turn % 2 == 0) for turn in range(20))
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
        for own, want in zip(results, wanted, strict=True):
            assert len(own) == 20
            for turn, got in enumerate(own):
                assert_same_gradients("in a thread", got, want, exact_dq=turn % 2 == 0)


# ---- large arrays


ENDS: dict[str, Any] = {"q_lengths": (150, 1, 77), "k_lengths": (200, 3, 300), "causal": True}


def middle_is_0(x: Any, first: int, last: int) -> bool:
    """Whether all rows are 0 but for so many at either end."""
    return not any(bool(piece.any()) for piece in x[first : len(x) - last].split(1 << 18))


def at_ends(small: Any, first: int, x: Any) -> None:
    """Write the rows of `small` to the ends of x, `first` of them to its beginning."""
    x[:first], x[first - len(small) :] = small[:first], small[first:]


def bounds(*ends: int) -> Any:
    return torch.tensor(ends, dtype=torch.int32, device="cuda")


def test_backward_of_queries_past_2_31_elements() -> None:
    """q, dout, out and dq are parts of one array; a request without tokens in use lies between the others."""
    tokens = 2**31 // (4 * 2 * 128) + 1000
    memory = torch.full((tokens, 4, 2, 128), nan, dtype=torch.bfloat16, device="cuda")
    assert memory.numel() > 2**31
    q, dout, out, dq = memory.unbind(1)
    lse = torch.full((tokens, 2), -inf, device="cuda")
    call = backward_inputs(make_mha_inputs(MhaCase(**ENDS, h_q=2, h_kv=1)))
    inputs = call.inputs
    sources = (inputs.q, call.gradients.dout, *call.results)
    for x, small in zip((q, dout, out, lse), sources, strict=True):
        at_ends(small, 150, x)
    got = rawmla.flash_attn_varlen_backward(
        dout, q, inputs.k, inputs.v, out, lse, bounds(0, 150, tokens - 78, tokens - 77, tokens),
        bounds(0, 200, 200, 203, 503), tokens, 300, dq=dq, causal=True, seqused_q=bounds(150, 0, 1, 77),
    )  # fmt: skip
    assert got[0] is dq
    check_backward(call, (torch.cat([dq[:150], dq[-78:]]), *got[1:]))
    assert middle_is_0(dq, 150, 78)


def test_backward_of_keys_past_2_31_elements() -> None:
    """k and v are parts of one array, dk and dv of another; a request without queries lies between."""
    tokens = 2**31 // (2 * 256) + 1000
    memory, gradients = (
        torch.full((tokens, 2, 256), nan, dtype=torch.bfloat16, device="cuda") for _ in range(2)
    )
    assert memory.numel() > 2**31
    (k, v), (dk, dv) = (x.split(128, dim=-1) for x in (memory, gradients))
    call = backward_inputs(make_mha_inputs(MhaCase(**ENDS)))
    inputs = call.inputs
    at_ends(inputs.k, 200, k)
    at_ends(inputs.v, 200, v)
    got = rawmla.flash_attn_varlen_backward(
        call.gradients.dout, inputs.q, k, v, *call.results, bounds(0, 150, 150, 151, 228),
        bounds(0, 200, tokens - 303, tokens - 300, tokens), 150, tokens, dk=dk, dv=dv, causal=True,
    )  # fmt: skip
    assert got[1] is dk and got[2] is dv
    check_backward(call, (got[0], *(torch.cat([x[:200], x[-303:]]) for x in (dk, dv))))
    assert middle_is_0(gradients, 200, 303)


def test_backward_with_sums_past_2_31_elements() -> None:
    """The float32 sums of dq in scratch; q, dout and out have one head for all, as a stride of 0."""
    heads, d = 16, 40
    tokens = 2**31 // (heads * 64) + 1000  # a row of the sums has 64 columns
    one = torch.full((3, tokens, 1, d), nan, dtype=torch.bfloat16, device="cuda")
    q, dout, out = one.expand(-1, -1, heads, -1).unbind(0)
    lse = torch.full((tokens, heads), -inf, device="cuda")
    inputs = make_mha_inputs(MhaCase(**ENDS, h_q=heads, h_kv=heads, d_qk=d, d_v=d))
    first_for_all = [x[:, :1].expand(-1, heads, -1) for x in (inputs.q, inputs.q.flip(0))]
    call = backward_inputs(replace(inputs, q=first_for_all[0]))
    call.gradients.dout = first_for_all[1]
    call.results = call.results[0][:, :1].expand(-1, heads, -1), call.results[1]
    sources = (call.inputs.q, call.gradients.dout, call.results[0])
    for x, small in zip(one, sources, strict=True):
        at_ends(small[:, :1], 150, x)
    at_ends(call.results[1], 150, lse)
    got = rawmla.flash_attn_varlen_backward(
        dout, q, inputs.k, inputs.v, out, lse, bounds(0, 150, tokens - 78, tokens - 77, tokens),
        bounds(0, 200, 200, 203, 503), tokens, 300, causal=True, seqused_q=bounds(150, 0, 1, 77),
    )  # fmt: skip
    check_backward(call, (torch.cat([got[0][:150], got[0][-78:]]), *got[1:]))
    assert middle_is_0(got[0], 150, 78)
