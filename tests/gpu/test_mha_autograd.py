"""Gradients of dense attention through autograd: held against the float64 reference and the plain backward
functions; in part, in graphs, under torch.compile, on streams.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from gpu_support import assert_same_bits, no_kernel_loaded, torch
from mha_backward_calls import (
    NAMES,
    BackwardInputs,
    assert_same_gradients,
    backward_of,
    check_backward,
    function_and_arguments,
)
from mha_calls import attend
from mha_calls import function_and_arguments as forward_call
from test_frameworks import DELAY_CYCLES
from test_graphs import capture

import rawmla
from kit.mha import MhaCase, MhaInputs, make_mha_inputs
from kit.mha_backward import make_mha_gradients, reference_backward, rows_in_use

RAGGED: dict[str, Any] = {"q_lengths": (300, 0, 1, 77, 130, 64), "k_lengths": (257, 90, 0, 200, 131, 513)}
SAME: dict[str, Any] = {"q_lengths": (300, 0, 1, 77, 130, 64), "k_lengths": (300, 0, 1, 77, 130, 64)}
BATCH = MhaCase(b=3, s_q=150, s_k=200, causal=True, sink="float32", layout="heads")
SEGMENTS = MhaCase(
    **RAGGED, q_used=(290, 0, 0, 77, 3, 60), k_used=(250, 90, 0, 5, 129, 513), rows_around=9, layout="slice",
    window=(100, 3), sink="bfloat16",
)  # fmt: skip
CASES = (
    BATCH,
    SEGMENTS,
    MhaCase(b=2, s_q=70, s_k=90, d_qk=59, d_v=33, dtype="float16"),
    MhaCase(**RAGGED, d_qk=64, d_v=64, alibi="requests"),
    MhaCase(**SAME, packed="qkv", d_qk=128, d_v=64, h_kv=4, causal=True),
    MhaCase(**SAME, packed="qkv4", d_qk=64, d_v=64, h_kv=4, dtype="float16"),
    MhaCase(**RAGGED, packed="kv", d_qk=64, d_v=96, sink="float32"),
    MhaCase(**RAGGED, packed="kv4", d_qk=64, d_v=64, dtype="float16"),
    MhaCase(**SAME, packed="qkv", d_qk=60, d_v=60, h_kv=4),  # parts that no kernel can write in place
)

cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
compiled = pytest.mark.usefixtures("_nothing_compiled")
quiet = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own


def leaves_of(inputs: MhaInputs, needs: tuple[str, ...] | None = None) -> dict[str, Any]:
    """The tensors of a call that have gradients, by fields of the inputs; those of `needs` require grad."""
    case = inputs.case
    names = ["q", "k", "v"]
    if case.packed:
        names = ["parts"] if case.packed.startswith("qkv") else ["q", "parts"]
    if inputs.attn_sink is not None:
        names.append("attn_sink")
    leaves = {name: getattr(inputs, name).detach() for name in names}
    return {n: x.requires_grad_(needs is None or n in needs) for n, x in leaves.items()}


def differentiate(
    inputs: MhaInputs, leaves: dict[str, Any], dout: Any, dlse: Any, **more: Any
) -> tuple[tuple[Any, Any], dict[str, Any]]:
    """out and lse, and the gradients of the leaves that require grad. None: a result is not used. `more` are
    further keywords of the call.
    """
    results = attend(replace(inputs, **leaves), **more)
    used = [(x, dx) for x, dx in zip(results, (dout, dlse), strict=True) if dx is not None]
    wanted = [name for name, x in leaves.items() if x.requires_grad]
    grads = torch.autograd.grad(
        [x for x, _ in used], [leaves[name] for name in wanted], [dx for _, dx in used]
    )
    return (results[0].detach(), results[1].detach()), dict(zip(wanted, grads, strict=True))


def in_parts(case: MhaCase, grads: dict[str, Any]) -> tuple[Any, ...]:
    """dq, dk, dv and dsink, as far as there are any."""
    made = dict(grads)
    if "parts" in made:
        whole = made.pop("parts")
        names = ("q", "k", "v")[-3 if case.packed.startswith("qkv") else -2 :]
        if case.packed.endswith("4"):
            views = whole.unbind(1)
        else:
            views = whole.split([case.d_qk] * (len(names) - 1) + [case.d_v], dim=-1)
        made.update(zip(names, views, strict=True))
    return tuple(made[name] for name in ("q", "k", "v", "attn_sink") if name in made)


@pytest.mark.parametrize("of", ("out", "lse", "both"))
@cases
def test_gradients(case: MhaCase, of: str) -> None:
    """Those of the plain functions, and of the reference; through one result the other's is not needed."""
    inputs = make_mha_inputs(case)
    gradients = make_mha_gradients(inputs, of)
    dout = None if of == "lse" else gradients.dout
    leaves = leaves_of(inputs)
    results, grads = differentiate(inputs, leaves, dout, gradients.dlse)
    assert all(x.shape == leaves[name].shape for name, x in grads.items())
    call = BackwardInputs(inputs, gradients, results)
    got = in_parts(case, grads)
    check_backward(call, got)
    assert_same_gradients(case.id, got, backward_of(call))


@pytest.mark.parametrize(
    "needs",
    (
        *(("q",), ("k",), ("v",), ("attn_sink",), ("q", "k"), ("q", "v"), ("k", "v"), ("k", "attn_sink")),
        ("q", "attn_sink"),
    ),
    ids="+".join,
)
@pytest.mark.parametrize(
    "case",
    (
        BATCH,
        SEGMENTS,
        MhaCase(b=2, s_q=150, s_k=200, d_qk=64, d_v=64, alibi="heads", softcap=15.0, sink="float32"),
        MhaCase(b=2, s_q=150, s_k=200, d_qk=128, d_v=128, causal=True, softcap=15.0, sink="float32"),
        MhaCase(b=2, s_q=150, s_k=200, d_qk=192, d_v=128, causal=True, sink="float32"),
        MhaCase(b=2, s_q=150, s_k=200, d_qk=192, d_v=128, window=(60, 10), dtype="float16", sink="float32"),
        MhaCase(b=2, s_q=150, s_k=200, d_qk=256, d_v=256, causal=True, sink="float32"),
    ),
    ids=lambda case: case.id,
)
def test_gradients_of_some(case: MhaCase, needs: tuple[str, ...]) -> None:
    """The same bits, whichever others are wanted; but for dq, which is summed in any order."""
    inputs = make_mha_inputs(case)
    gradients = make_mha_gradients(inputs, "both" if case in (BATCH, SEGMENTS) else "out")
    _, every = differentiate(inputs, leaves_of(inputs), gradients.dout, gradients.dlse)
    _, some = differentiate(inputs, leaves_of(inputs, needs), gradients.dout, gradients.dlse)
    assert tuple(some) == tuple(name for name in every if name in needs)
    names = dict(zip(("q", "k", "v", "attn_sink"), NAMES, strict=True))
    for name, one in some.items():
        if name != "q":
            assert_same_bits(names[name], one, every[name])
    if "q" in some:
        assert_same_gradients("some", (some["q"],), (every["q"],))


@pytest.mark.parametrize("lengths", ((128,) * 3, (7, 0, 2) * 15, (513,), (0, 0)), ids=str)
@pytest.mark.parametrize(
    "options",
    (
        {"packed": "qkv", "d_qk": 128, "d_v": 64, "h_kv": 4, "causal": True},
        {"packed": "qkv", "d_qk": 192, "h_kv": 4, "layout": "slice"},
        {"packed": "qkv4", "d_qk": 64, "d_v": 64, "h_kv": 4, "dtype": "float16"},
        {"packed": "kv", "d_qk": 192, "h_q": 8, "h_kv": 2, "causal": True},
        {"packed": "kv4", "d_qk": 64, "d_v": 64, "h_q": 6, "h_kv": 2, "dtype": "float16"},
    ),
    ids=lambda options: MhaCase(**options).id,
)
def test_gradients_of_packed_arrays_of_other_lengths(
    options: dict[str, Any], lengths: tuple[int, ...]
) -> None:
    """One tensor for each packed one. Where all lengths are one, also with the promise that they are."""
    k_lengths = lengths if options["packed"].startswith("qkv") else tuple(2 * n for n in lengths)
    case = MhaCase(q_lengths=lengths, k_lengths=k_lengths, **options)
    inputs = make_mha_inputs(case)
    gradients = make_mha_gradients(inputs)
    for is_varlen in (True, False)[: 1 + (len(set(lengths)) == 1)]:
        results, grads = differentiate(inputs, leaves_of(inputs), gradients.dout, None, is_varlen=is_varlen)
        assert grads["parts"].shape == inputs.parts.shape and grads["parts"].dtype == inputs.parts.dtype
        assert grads["parts"].numel() == grads["parts"].untyped_storage().nbytes() // 2
        got = in_parts(case, grads)
        call = BackwardInputs(inputs, gradients, results)
        check_backward(call, got)
        assert_same_gradients(case.id, got, backward_of(call))


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("dims", ((64, 64), (128, 128), (192, 128)), ids=str)
def test_gradients_of_lse_within_flash_attention_bounds(dims: tuple[int, int], causal: bool) -> None:
    """Through lse alone dq and dk are within 0.02 of the exact ones, at 128 to 256 tokens, and dv is 0."""
    for s_q, s_k in ((128, 128), (200, 256), (256, 131)):
        inputs = make_mha_inputs(MhaCase(s_q=s_q, s_k=s_k, d_qk=dims[0], d_v=dims[1], causal=causal))
        gradients = make_mha_gradients(inputs, "lse")
        _, grads = differentiate(inputs, leaves_of(inputs), None, gradients.dlse)
        got = in_parts(inputs.case, grads)
        want = reference_backward(inputs, gradients).values
        assert bool(got[0].any()) and bool(got[1].any()) and not bool(got[2].any())
        for name, one, wanted in zip(NAMES, got, want, strict=False):
            assert float((one.double() - wanted).abs().max()) < 0.02, (name, s_q, s_k)


def test_gradients_of_both_results_within_flash_attention_bounds() -> None:
    for s_q, s_k in ((128, 128), (200, 256), (256, 131)):
        inputs = make_mha_inputs(MhaCase(s_q=s_q, s_k=s_k))
        gradients = make_mha_gradients(inputs, "both")
        _, grads = differentiate(inputs, leaves_of(inputs), gradients.dout, gradients.dlse)
        want = reference_backward(inputs, gradients).values
        for name, one, wanted in zip(NAMES, in_parts(inputs.case, grads), want, strict=False):
            assert float((one.double() - wanted).abs().max()) < 0.02, (name, s_q, s_k)


@cases
def test_results_with_a_graph_are_those_without(case: MhaCase) -> None:
    inputs = make_mha_inputs(case)
    rows = rows_in_use(inputs)[0]
    want = attend(inputs)
    got = attend(replace(inputs, **leaves_of(inputs)))
    assert all(x.requires_grad for x in got) and not any(x.requires_grad for x in want)
    assert [x.stride() for x in got] == [x.stride() for x in want]
    assert_same_bits("out", got[0].detach()[rows], want[0][rows])
    lse = [(x if case.q_lengths is not None else x.mT)[rows] for x in (got[1].detach(), want[1])]
    assert_same_bits("lse", *lse)


def test_gradients_with_strides_of_zero() -> None:
    """What a sum gives as the gradient of out is a number that is broadcast."""
    inputs = make_mha_inputs(BATCH)
    gradients = make_mha_gradients(inputs)
    leaves = leaves_of(inputs)
    out, lse = attend(replace(inputs, **leaves))
    grads = torch.autograd.grad(out.sum(), list(leaves.values()))
    gradients.dout = torch.ones_like(out)
    call = BackwardInputs(inputs, gradients, (out.detach(), lse.detach()))
    check_backward(call, grads)
    assert_same_gradients("of a sum", grads, backward_of(call))


def test_backward_twice_and_accumulated() -> None:
    inputs = make_mha_inputs(BATCH)
    leaves = leaves_of(inputs)
    out, _ = attend(replace(inputs, **leaves))
    dout = make_mha_gradients(inputs).dout
    out.backward(dout, retain_graph=True)
    first = {name: x.grad.clone() for name, x in leaves.items()}
    out.backward(dout)
    for name in ("k", "v", "attn_sink"):
        assert_same_bits(name, leaves[name].grad, first[name] * 2)


def test_checkpointed() -> None:
    """The forward is computed again in the backward pass: the same bits."""
    from torch.utils.checkpoint import checkpoint

    inputs = make_mha_inputs(BATCH)
    dout = make_mha_gradients(inputs).dout
    _, want = differentiate(inputs, leaves_of(inputs), dout, None)
    leaves = leaves_of(inputs)

    def layer(q: Any, k: Any, v: Any, sink: Any) -> Any:
        return rawmla.flash_attn_func(q, k, v, causal=True, attn_sink=sink)[0]

    out = checkpoint(layer, *leaves.values(), use_reentrant=False)
    got = torch.autograd.grad(out, list(leaves.values()), dout)
    assert_same_gradients("checkpointed", got, tuple(want.values()))


# ---- a fixed order of dq


@contextmanager
def fixed_order(way: str) -> Iterator[dict[str, Any]]:
    """Inside, calls with these keywords sum dq in a fixed order: by "deterministic", or torch's switch."""
    if way == "deterministic":
        yield {"deterministic": True}
        return
    torch.use_deterministic_algorithms(True)
    try:
        yield {}
    finally:
        torch.use_deterministic_algorithms(False)


ways = pytest.mark.parametrize("way", ("deterministic", "torch's switch"))
# Of every form of the kernel, and so large that sums in any order differ.
in_fixed_order = pytest.mark.parametrize(
    "case",
    (
        MhaCase(b=8, s_q=300, s_k=900, causal=True),
        MhaCase(b=8, s_q=300, s_k=900, causal=True, d_qk=192, h_kv=1),
        MhaCase(b=8, s_q=300, s_k=900, d_qk=256, d_v=256),
        MhaCase(q_lengths=(300, 0, 77) * 3, k_lengths=(900, 7, 500) * 3, packed="kv", d_qk=192, causal=True),
        MhaCase(q_lengths=(500, 0, 177) * 3, k_lengths=(500, 0, 177) * 3, packed="qkv4", h_kv=4),
    ),
    ids=lambda case: case.id,
)


@ways
@in_fixed_order
def test_gradients_in_a_fixed_order(case: MhaCase, way: str) -> None:
    """Every pass gives the bits of the plain function in dq too."""
    inputs = make_mha_inputs(case)
    gradients = make_mha_gradients(inputs, "both")
    with fixed_order(way) as keywords:
        passes = [
            differentiate(inputs, leaves_of(inputs), gradients.dout, gradients.dlse, **keywords)
            for _ in range(10)
        ]
    call = BackwardInputs(inputs, gradients, passes[0][0])
    want = backward_of(call, deterministic=True)
    check_backward(call, want)
    for _, grads in passes:
        assert_same_gradients(way, in_parts(case, grads), want, exact_dq=True)


@ways
@in_fixed_order
def test_a_fixed_order_in_a_graph(case: MhaCase, way: str) -> None:
    """Replays of forward and backward give the bits of eager passes."""
    inputs = make_mha_inputs(case)
    gradients = make_mha_gradients(inputs, "both")
    leaves = leaves_of(inputs)
    with fixed_order(way) as keywords:

        def step() -> Any:
            return differentiate(inputs, leaves, gradients.dout, gradients.dlse, **keywords)

        side = torch.cuda.Stream()  # as torch wants it ahead of a capture of a backward pass
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        graph, (results, grads) = capture(step)
    for turn in range(3):
        for _ in range(3):
            graph.replay()
            want = backward_of(BackwardInputs(inputs, gradients, results), deterministic=True)
            assert_same_gradients(f"turn {turn}", in_parts(case, grads), want, exact_dq=True)
        check_backward(BackwardInputs(inputs, gradients, results), want)
        with torch.no_grad():
            for x in (inputs.q, inputs.v):
                x.mul_(-0.7)


# ---- what raises


def test_second_derivative() -> None:
    inputs = make_mha_inputs(BATCH)
    leaves = leaves_of(inputs)
    out, _ = attend(replace(inputs, **leaves))
    (dk,) = torch.autograd.grad(out.sum(), leaves["k"], create_graph=True)
    with pytest.raises(NotImplementedError, match="^dense attention has no second derivative"):
        dk.float().sum().backward()


@pytest.mark.parametrize("name", ("q", "k", "v", "attn_sink", "cu_seqlens_q", "seqused_k", "out"))
def test_changes_in_place_are_found(name: str) -> None:
    inputs = replace(make_mha_inputs(SEGMENTS))
    called = replace(inputs, **leaves_of(inputs))
    out, _ = attend(called)
    with torch.no_grad():
        (out if name == "out" else getattr(called, name)).mul_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


# ---- streams and graphs


def test_on_a_side_stream() -> None:
    """The backward pass runs on the stream of the forward, and waits for nothing else."""
    inputs = make_mha_inputs(SEGMENTS)
    gradients = make_mha_gradients(inputs, "both")
    _, want = differentiate(inputs, leaves_of(inputs), gradients.dout, gradients.dlse)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(2):  # so that the allocator holds memory for the stream
            differentiate(inputs, leaves_of(inputs), gradients.dout, gradients.dlse)
        leaves = leaves_of(inputs)
        torch.cuda._sleep(DELAY_CYCLES)
        _, got = differentiate(inputs, leaves, gradients.dout, gradients.dlse)
        assert not stream.query(), "the call waited for the device"
    stream.synchronize()
    assert_same_gradients("on a side stream", in_parts(SEGMENTS, got), in_parts(SEGMENTS, want))


@cases
def test_in_a_graph(case: MhaCase) -> None:
    """Forward and backward are captured once; replays follow arrays and lengths that change in place."""
    inputs = make_mha_inputs(replace(case, gap=0.0))
    gradients = make_mha_gradients(inputs, "both")
    leaves = leaves_of(inputs)

    def step() -> Any:
        return differentiate(inputs, leaves, gradients.dout, gradients.dlse)

    side = torch.cuda.Stream()  # as torch wants it ahead of a capture of a backward pass
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph, (results, grads) = capture(step)
    for turn in range(3):
        graph.replay()
        call = BackwardInputs(inputs, gradients, results)
        got = in_parts(case, grads)
        check_backward(call, got)
        assert_same_gradients("replayed", got, backward_of(call))
        with torch.no_grad():
            inputs.q.mul_(0.5)
            if inputs.seqused_q is not None and turn == 0:
                inputs.seqused_q.div_(2, rounding_mode="floor")
                inputs.seqused_k.div_(3, rounding_mode="floor")
        again = make_mha_gradients(inputs, "both")
        for x, other in ((gradients.dout, again.dout), (gradients.dlse, again.dlse)):
            x.copy_(other)


@cases
def test_warmup_call_loads_what_a_graph_needs(case: MhaCase) -> None:
    """Forward and backward, of tensors that require grad; nothing is enqueued or allocated."""
    inputs = make_mha_inputs(case)
    gradients = make_mha_gradients(inputs, "both")
    leaves = leaves_of(inputs)
    _, want = differentiate(inputs, leaves, gradients.dout, gradients.dlse)
    function, arguments, keywords = forward_call(replace(inputs, **leaves))
    torch.cuda.synchronize()
    with no_kernel_loaded():
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        rawmla.warmup_call(function, *arguments, **keywords, backward=True)
        assert torch.cuda.current_stream().query()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        graph, (_, got) = capture(lambda: differentiate(inputs, leaves, gradients.dout, gradients.dlse))
        graph.replay()
        assert_same_gradients("replayed", in_parts(case, got), in_parts(case, want))
        torch.cuda.synchronize()  # before the kernels are let go of


def test_warmup_by_name() -> None:
    inputs = make_mha_inputs(MhaCase(**RAGGED, causal=True))
    dout = make_mha_gradients(inputs).dout
    leaves = leaves_of(inputs)
    _, want = differentiate(inputs, leaves, dout, None)
    dims = [(128, 128)]
    with no_kernel_loaded():
        rawmla.warmup("mha", "mha_backward", mha_head_dims=dims, mha_backward_head_dims=dims)
        graph, (_, got) = capture(lambda: differentiate(inputs, leaves, dout, None))
        graph.replay()
        assert_same_gradients("replayed", tuple(got.values()), tuple(want.values()))
        torch.cuda.synchronize()


# ---- torch.compile


@quiet
@compiled
@pytest.mark.parametrize("backend", ("inductor", "aot_eager"))
@cases
def test_compiled(case: MhaCase, backend: str) -> None:
    """Gradients of a compiled step, through both results."""
    inputs = make_mha_inputs(case)
    gradients = make_mha_gradients(inputs, "both")
    results, want = differentiate(inputs, leaves_of(inputs), gradients.dout, gradients.dlse)
    leaves = leaves_of(inputs)
    function, arguments, keywords = forward_call(replace(inputs, **leaves))
    step = torch.compile(lambda *args, **more: function(*args, **more), fullgraph=True, backend=backend)
    out, lse = step(*arguments, **keywords)
    grads = torch.autograd.grad([out, lse], list(leaves.values()), [gradients.dout, gradients.dlse])
    got = in_parts(case, dict(zip(leaves, grads, strict=True)))
    check_backward(BackwardInputs(inputs, gradients, results), got)
    assert_same_gradients("compiled", got, in_parts(case, want))


@quiet
@compiled
@pytest.mark.parametrize("needs", (("q",), ("k", "v"), ("attn_sink",)), ids=str)
def test_compiled_gradients_of_some(needs: tuple[str, ...]) -> None:
    inputs = make_mha_inputs(SEGMENTS)
    gradients = make_mha_gradients(inputs)
    # torch.compile takes zeros for the gradient of lse, which is not used.
    _, want = differentiate(inputs, leaves_of(inputs), gradients.dout, torch.zeros_like(attend(inputs)[1]))
    leaves = leaves_of(inputs, needs)
    function, arguments, keywords = forward_call(replace(inputs, **leaves))
    out, _ = torch.compile(function, fullgraph=True, backend="aot_eager")(*arguments, **keywords)
    grads = torch.autograd.grad(out, [leaves[name] for name in needs], gradients.dout)
    for name, one in zip(needs, grads, strict=True):
        if name == "q":
            assert_same_gradients("compiled", (one,), (want["q"],))
        else:
            assert_same_bits(name, one, want[name])


@quiet
@compiled
@pytest.mark.parametrize("case", (BATCH, SEGMENTS), ids=lambda case: case.id)
def test_compiled_plain_backward(case: MhaCase) -> None:
    inputs = make_mha_inputs(case)
    gradients = make_mha_gradients(inputs, "both")
    call = BackwardInputs(inputs, gradients, attend(inputs))
    function, arguments, keywords = function_and_arguments(call)
    got = torch.compile(function, fullgraph=True, backend="aot_eager")(*arguments, **keywords)
    check_backward(call, got)
    assert_same_gradients("compiled", got, backward_of(call))


@quiet
@compiled
def test_training_in_cuda_graphs_of_torch_compile() -> None:
    """mode="reduce-overhead": replays of forward and backward are what eager steps give."""
    inputs = make_mha_inputs(BATCH)
    dout = make_mha_gradients(inputs).dout

    def layer(q: Any, k: Any, v: Any, sink: Any) -> Any:
        return rawmla.flash_attn_func(q, k, v, causal=True, attn_sink=sink)[0]

    step = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    for turn in range(5):
        with torch.no_grad():
            inputs.q.mul_(0.9)
        torch.compiler.cudagraph_mark_step_begin()
        results = []
        for function in (step, layer):
            leaves = leaves_of(inputs)
            grads = torch.autograd.grad(function(*leaves.values()), list(leaves.values()), dout)
            results.append(tuple(x.clone() for x in grads))
        assert_same_gradients(f"turn {turn}", *results)
