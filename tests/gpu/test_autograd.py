"""Gradients of dense and flex attention through autograd: held against the float64 reference and the plain
backward functions; in part, on streams, in graphs, under torch.compile.

What flex attention has beyond that is in test_flex_autograd.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
from full_cases import full_unless
from gpu_support import assert_same_bits, no_kernel_loaded, torch
from test_frameworks import DELAY_CYCLES
from test_graphs import capture

import rawmla
from kit.flex import FlexCase, FlexInputs
from kit.flex_backward import captured_tensors, make_flex_backward_inputs, make_flex_gradients
from kit.mha import MhaCase, MhaInputs, make_mha_inputs
from kit.mha_backward import make_mha_gradients
from operations import dense, dense_backward, flex, flex_backward

RAGGED: dict[str, Any] = {"q_lengths": (300, 0, 1, 77, 130, 64), "k_lengths": (257, 90, 0, 200, 131, 513)}
SAME: dict[str, Any] = {"q_lengths": (300, 0, 1, 77, 130, 64), "k_lengths": (300, 0, 1, 77, 130, 64)}
SHAPE: dict[str, Any] = {"b": 2, "h_kv": 2, "s_q": 200, "s_k": 277}
BATCH = MhaCase(b=3, s_q=150, s_k=200, causal=True, sink="float32", layout="heads")
SEGMENTS = MhaCase(
    **RAGGED, q_used=(290, 0, 0, 77, 3, 60), k_used=(250, 90, 0, 5, 129, 513), rows_around=9, layout="slice",
    window=(100, 3), sink="bfloat16",
)  # fmt: skip
BIASED = FlexCase(**SHAPE, score="alibi table", mask="documents")
CASES = (
    BATCH,
    SEGMENTS,
    MhaCase(**SAME, packed="qkv", d_qk=128, d_v=64, h_kv=4, causal=True),
    MhaCase(**RAGGED, packed="kv4", d_qk=64, d_v=64, dtype="float16", alibi="requests"),
    BIASED,
    FlexCase(**SHAPE, score="bias b h q k", mask="window", d_qk=128, layout="slice", dtype="float16"),
    FlexCase(**SHAPE, score="scalar", mask="causal", layout="tokens"),
    FlexCase(**{**SHAPE, "b": 3}, b_kv=1, mask="random", d_v=33),
)
MORE_CASES = (
    MhaCase(b=2, s_q=70, s_k=90, d_qk=59, d_v=33, dtype="float16"),
    MhaCase(**SAME, packed="qkv4", d_qk=64, d_v=64, h_kv=4, dtype="float16"),
    MhaCase(**SAME, packed="qkv", d_qk=60, d_v=60, h_kv=4),  # parts that no kernel can write in place
    MhaCase(**RAGGED, packed="kv", d_qk=192, h_q=8, causal=True, layout="slice"),
    MhaCase(q_lengths=(0, 0), k_lengths=(0, 0), packed="qkv4", h_kv=4),
    FlexCase(**SHAPE, score="distance"),
    FlexCase(**SHAPE, score="softcap", mask="lower half", block=(64, 64)),
)
compiled = pytest.mark.usefixtures("_nothing_compiled")
quiet = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own


def for_cases(*cases: Any) -> Any:
    return pytest.mark.parametrize("case", cases, ids=lambda case: f"{type(case).__name__} {case.id}")


in_every_case = for_cases(*CASES)


@dataclass
class Step:
    """A call whose results are differentiated: `inputs`, and the tensors that have gradients, by name."""

    inputs: Any
    gradients: Any  # of out and lse
    leaves: dict[str, Any]

    def attend(self, **more: Any) -> tuple[Any, Any]:
        """out and lse, with a graph."""
        if isinstance(self.inputs, MhaInputs):
            return dense.attend(replace(self.inputs, **self.leaves), **more)
        inputs = replace(self.inputs, **{name: self.leaves[name] for name in "qkv"})
        return flex.attend(inputs, **more)[:2]

    def differentiate(self, of: str = "both", **more: Any) -> tuple[tuple[Any, Any], dict[str, Any]]:
        """out and lse, and the gradients of the leaves that require grad. Calls are deterministic unless
        `more` says otherwise.
        """
        out, lse = self.attend(**{"deterministic": True, **more})
        used = [(out, self.gradients.dout)] * (of != "lse") + [(lse, self.gradients.dlse)] * (of != "out")
        wanted = {name: x for name, x in self.leaves.items() if x.requires_grad}
        found = torch.autograd.grad([x for x, _ in used], list(wanted.values()), [dx for _, dx in used])
        return (out.detach(), lse.detach()), dict(zip(wanted, found, strict=True))

    def parts(self, grads: dict[str, Any]) -> tuple[Any, ...]:
        """dq, dk, dv and the others, as the plain function gives them."""
        if isinstance(self.inputs, MhaInputs):
            return in_parts(self.inputs.case, grads)
        others = {name: x for name, x in grads.items() if name not in ("q", "k", "v")}
        return grads["q"], grads["k"], grads["v"], others

    def check(self, results: tuple[Any, Any], grads: dict[str, Any], **more: Any) -> None:
        """Gradients are those of the reference, and of the plain function in the same order of sums."""
        module: Any = dense_backward if isinstance(self.inputs, MhaInputs) else flex_backward
        call = module.BackwardInputs(self.inputs, self.gradients, results)
        got = self.parts(grads)
        module.check_backward(call, got)
        with torch.no_grad():
            assert_same(got, module.backward_of(call, **{"deterministic": True, **more}))


def step_of(case: Any, of: str = "both", needs: tuple[str, ...] | None = None) -> Step:
    """The step of a case, with gradients of these leaves; None: of all."""
    if isinstance(case, FlexCase):
        inputs = make_flex_backward_inputs(case)
        leaves = {**{name: getattr(inputs, name) for name in "qkv"}, **captured_tensors(inputs)}
        gradients: Any = make_flex_gradients(inputs, of)
    else:
        inputs = make_mha_inputs(case)
        names = ["q", "k", "v"]
        if case.packed:
            names = ["parts"] if case.packed.startswith("qkv") else ["q", "parts"]
        if inputs.attn_sink is not None:
            names.append("attn_sink")
        leaves = {name: getattr(inputs, name).detach() for name in names}
        gradients = make_mha_gradients(inputs, of)
    leaves = {name: x.requires_grad_(needs is None or name in needs) for name, x in leaves.items()}
    return Step(inputs, gradients, leaves)


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


def assert_same(got: Any, want: Any) -> None:
    """Raise unless gradients have the same bits: tuples of tensors, or dicts."""
    if isinstance(got, dict):
        assert set(got) == set(want)
        got, want = got.values(), [want[name] for name in got]
    for number, (one, other) in enumerate(zip(got, want, strict=True)):
        if isinstance(one, dict):
            assert_same(one, other)
        else:
            assert_same_bits(f"gradient {number}", one, other)


# ---- gradients


@pytest.mark.parametrize(
    ("case", "of"),
    full_unless(
        lambda pair: (pair[1] == "both" and pair[0] not in MORE_CASES) or pair[0] in (BATCH, BIASED),
        product((*CASES, *MORE_CASES), ("out", "lse", "both")),
        several=True,
    ),
    ids=lambda x: x if isinstance(x, str) else f"{type(x).__name__} {x.id}",
)
def test_gradients(case: Any, of: str) -> None:
    """Those of the reference and of the plain functions. Through one result the other's is not needed."""
    step = step_of(case, of)
    results, grads = step.differentiate(of)
    for name, x in grads.items():
        assert x.shape == step.leaves[name].shape and x.dtype == step.leaves[name].dtype
    if "parts" in grads and case.d_qk % 8 == 0:  # one tensor for each packed one, without gaps
        assert grads["parts"].numel() == grads["parts"].untyped_storage().nbytes() // 2
    step.check(results, grads)


BIAS = CASES[5]


@pytest.mark.parametrize("needs", ("q", "k", "v", "other", "q k", "q v", "k v", "k other", "q other"))
@pytest.mark.parametrize(
    "case",
    full_unless(
        lambda case: case in (SEGMENTS, BIAS),
        (
            SEGMENTS,
            BIAS,
            *[
                MhaCase(b=2, s_q=150, s_k=200, sink="float32", **options)
                for options in (
                    {"d_qk": 64, "d_v": 64, "alibi": "heads", "softcap": 15.0},
                    {"softcap": 15.0, "causal": True},
                    {"d_qk": 192, "causal": True},
                    {"d_qk": 256, "d_v": 256, "causal": True},
                )
            ],
            *[replace(BIAS, d_qk=d_qk, d_v=128) for d_qk in (64, 192)],
            replace(BIAS, d_qk=256, d_v=256, dtype="bfloat16"),
        ),
    ),
    ids=lambda case: case.id,
)
def test_gradients_of_some(case: Any, needs: str) -> None:
    """The same bits, whichever others are wanted."""
    other = "bias" if isinstance(case, FlexCase) else "attn_sink"
    names = tuple(needs.replace("other", other).split())
    of = "both" if case is SEGMENTS or isinstance(case, FlexCase) else "out"
    _, every = step_of(case, of).differentiate(of)
    _, some = step_of(case, of, names).differentiate(of)
    assert_same(some, {name: every[name] for name in names})


# ---- torch's switch for a fixed order


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@for_cases(  # every form of the kernel, and so large that sums in any order differ
    MhaCase(b=8, s_q=300, s_k=900, causal=True),
    MhaCase(b=8, s_q=300, s_k=900, causal=True, d_qk=192, h_kv=1),
    MhaCase(b=8, s_q=300, s_k=900, d_qk=256, d_v=256),
    MhaCase(q_lengths=(500, 0, 177) * 3, k_lengths=(500, 0, 177) * 3, packed="qkv4", h_kv=4),
)
def test_a_fixed_order_by_torchs_switch(case: MhaCase) -> None:
    """Every pass, and every replay of a graph, has the bits of a deterministic call."""
    step = step_of(case)
    results, want = step.differentiate()
    step.check(results, want)
    with deterministic_algorithms():
        for _ in range(10):
            assert_same(step.differentiate(deterministic=False)[1], want)
        graph, (_, grads) = captured(lambda: step.differentiate(deterministic=False))
    for _ in range(3):
        graph.replay()
        assert_same(grads, want)


# ---- streams and graphs


def captured(function: Callable[[], Any]) -> tuple[Any, Any]:
    """A graph of a backward pass, which torch wants to run on a side stream first."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function()
    torch.cuda.current_stream().wait_stream(side)
    return capture(function)


@for_cases(SEGMENTS, BIASED)
def test_on_a_side_stream(case: Any) -> None:
    """The backward pass runs on the stream of the forward, and waits for nothing else."""
    step = step_of(case)
    _, want = step.differentiate()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(2):  # so that the allocator holds memory for the stream
            step.differentiate()
        torch.cuda._sleep(DELAY_CYCLES)
        _, got = step.differentiate()
        assert not stream.query(), "the call waited for the device"
    stream.synchronize()
    assert_same(got, want)


@in_every_case
def test_in_a_graph(case: Any) -> None:
    """Forward and backward are captured once; replays follow arrays and lengths that change in place."""
    step = step_of(replace(case, gap=0.0))
    graph, (results, grads) = captured(step.differentiate)
    for turn in range(3):
        graph.replay()
        step.check(results, grads)
        with torch.no_grad():
            for x in step.leaves.values():
                x.mul_(0.75)
            if isinstance(case, MhaCase) and case.q_used is not None and turn == 0:
                step.inputs.seqused_q.div_(2, rounding_mode="floor")
                step.inputs.seqused_k.div_(3, rounding_mode="floor")
        if isinstance(case, MhaCase):  # gradients of rows without keys belong to the lengths
            again = make_mha_gradients(step.inputs, "both")
            step.gradients.dout.copy_(again.dout)
            step.gradients.dlse.copy_(again.dlse)


@for_cases(SEGMENTS, BIASED)
def test_warmup_call_loads_what_a_graph_needs(case: Any) -> None:
    """Forward and backward, of tensors that require grad; nothing is enqueued or allocated."""
    step = step_of(case)
    _, want = step.differentiate()
    inputs = step.inputs
    if isinstance(inputs, FlexInputs):
        function: Any = rawmla.flex_attention
        arguments, keywords = (inputs.q, inputs.k, inputs.v), {**inputs.keywords(), "return_lse": True}
    else:
        function, arguments, keywords = dense.function_and_arguments(replace(inputs, **step.leaves))
    torch.cuda.synchronize()
    with no_kernel_loaded():
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        rawmla.warmup_call(function, *arguments, **keywords, deterministic=True, backward=True)
        assert torch.cuda.current_stream().query()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        graph, (_, got) = capture(step.differentiate)
        graph.replay()
        assert_same(got, want)
        torch.cuda.synchronize()  # before the kernels are let go of


# ---- torch.compile


backends = pytest.mark.parametrize("backend", ("inductor", "aot_eager"))


@quiet
@compiled
@backends
@for_cases(BATCH, CASES[2])
def test_compiled_dense(case: MhaCase, backend: str) -> None:
    """Gradients of a compiled step, through both results; torch may give -0.0 where none is."""
    step = step_of(case)
    _, want = step.differentiate()
    function, _, keywords = dense.function_and_arguments(replace(step.inputs, **step.leaves))
    run = torch.compile(lambda **given: function(**given), fullgraph=True, backend=backend)
    results = run(**keywords, deterministic=True)
    gradients = (step.gradients.dout, step.gradients.dlse)
    got = torch.autograd.grad(results, list(step.leaves.values()), gradients)
    assert_same(
        {name: x + 0.0 for name, x in zip(step.leaves, got, strict=True)},
        {name: x + 0.0 for name, x in want.items()},
    )


@quiet
@compiled
@backends
@for_cases(BIASED, BIAS)
def test_compiled_flex(case: FlexCase, backend: str) -> None:
    """Gradients of a compiled step go through the call, from the graph after it to the one before it."""
    step = step_of(case)

    def run(q: Any, k: Any, v: Any) -> Any:
        inputs = replace(step.inputs, q=q * 0.5, k=k, v=v)
        out, lse, _ = flex.attend(inputs, deterministic=True)
        return out * 2, lse * 2

    found = []
    for function in (run, torch.compile(run, backend=backend)):
        results = function(*[step.leaves[name] for name in "qkv"])
        gradients = (step.gradients.dout, step.gradients.dlse)
        found.append(torch.autograd.grad(results, list(step.leaves.values()), gradients))
    assert_same(*found)
