"""The backward of dense attention: calls of a case's inputs, and its entries of the table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

import rawmla
from kit.mha import MhaCase, MhaInputs, in_gaps, make_mha_inputs
from kit.mha_backward import Gradients, check_mha_backward, exact_results, make_mha_gradients
from rawmla.api import dense_backward
from rawmla.kernels.mha_backward_variants import Needs

from .core import (
    Arguments,
    Call,
    Operation,
    assert_rounded_alike,
    assert_same_bits,
    slices,
    without,
    wrong_value,
)
from .dense import (
    D64,
    D256,
    IN_PLACE,
    MANY,
    OF_SEGMENTS,
    ONE_KV,
    PAIR,
    RERUNS,
    ROWS,
    SEGMENTS,
    SMALL,
    attend,
    buffer_like,
    changes_of_numbers,
    changes_of_segments,
    floats_of,
    named_arguments,
)

NAMES = ("dq", "dk", "dv", "dsink")


@dataclass
class BackwardInputs:
    """The arrays of a backward call: those of the forward, its results, and what it begins with."""

    inputs: Any  # MhaInputs, or FlexInputs
    gradients: Gradients
    results: tuple[Any, Any]  # out and lse

    def begin_with(self, gradients: Gradients, results: tuple[Any, Any]) -> None:
        """Take over other numbers in place."""
        olds = (*self.results, self.gradients.dout, self.gradients.dlse)
        for old, new in zip(olds, (*results, gradients.dout, gradients.dlse), strict=True):
            if old is not None:
                old.copy_(new)


@dataclass(frozen=True)
class BackwardCase:
    """A case of the forward; what gradients begin with: "out", "lse" or "both"; and `deterministic`."""

    forward: Any
    of: str = "out"
    deterministic: bool = True

    @property
    def needs_forward(self) -> bool:
        """Whether out and lse have to be those of the kernel, whose tanh is approximate."""
        return bool(getattr(self.forward, "softcap", 0.0))

    @property
    def id(self) -> str:
        """A name for people and for pytest."""
        return f"{self.forward.id}-{self.of}{'' if self.deterministic else '-any order'}"


# ---- calls


def backward_inputs(inputs: MhaInputs, of: str = "out") -> BackwardInputs:
    """With the out and lse of the forward on the device; out has the layout of the case.

    Rows of no request, which the forward does not write, hold the case's gap.
    """
    case = inputs.case
    shape = (*inputs.q.shape[:-1], case.d_v)
    given = in_gaps(shape, case.layout, case.gap, inputs.q.dtype, inputs.q.device)
    if case.d_v % 8 and case.layout == "plain":
        given = None  # rows of no multiple of 16 bytes are none to write to
    out, lse = attend(inputs, out=given)
    if inputs.cu_seqlens_q is not None:
        first, last = int(inputs.cu_seqlens_q[0]), int(inputs.cu_seqlens_q[-1])
        for x in (out, lse):
            x[:first], x[last:] = case.gap, case.gap
    return BackwardInputs(inputs, make_mha_gradients(inputs, of), (out, lse))


def gradients_of_some(needs: Needs, function: Any, *args: Any, **keywords: Any) -> tuple[Any, ...]:
    """Call a public function for these gradients alone, as autograd does; returns four, or None."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dense_backward, "ALL", needs)
        made = function(*args, **keywords)
    return (*made, *(None,) * (4 - len(made)))


def named_backward_arguments(call: BackwardInputs) -> tuple[str, Arguments]:
    """The public function of a call, and its arguments by name."""
    function, arguments = named_arguments(replace(call.inputs, case=replace(call.inputs.case, packed="")))
    out, lse = call.results
    arguments |= {"dout": call.gradients.dout, "out": out, "lse": lse, "dlse": call.gradients.dlse}
    return function.replace("_func", "_backward"), arguments


def backward_of(call: BackwardInputs, **more: Any) -> tuple[Any, ...]:
    """dq, dk, dv, and with a sink dsink."""
    name, arguments = named_backward_arguments(call)
    return getattr(rawmla, name)(**{**arguments, **more})


def check_backward(call: BackwardInputs, got: tuple[Any, ...], *, plain: bool = False) -> None:
    """Compare the gradients of a call with the reference; run after the kernels, never before."""
    check_mha_backward(call.inputs, call.gradients, call.results, got, plain=plain)


def gradient_buffers(inputs: MhaInputs, canary: float) -> tuple[list[Any], dict[str, Any]]:
    """Buffers of canaries, and slices of them in all dimensions, full of NaN, as dq, dk and dv."""
    buffers, given = zip(*(buffer_like(x, canary) for x in (inputs.q, inputs.k, inputs.v)), strict=True)
    return list(buffers), dict(zip(NAMES, given, strict=False))


def assert_same_gradients(
    name: str, got: tuple[Any, ...], want: tuple[Any, ...], *, exact_dq: bool = False
) -> None:
    """Raise unless dk, dv and dsink have the same bits; dq, which is summed in any order, with `exact_dq`."""
    assert len(got) == len(want)
    for which, one, wanted in zip(NAMES, got, want, strict=False):
        same = assert_rounded_alike if which == "dq" and not exact_dq else assert_same_bits
        same(f"{name}: {which}", one, wanted)


# ---- entries


def make_dense_backward_call(case: BackwardCase, device: str = "cuda") -> Call:
    """The call of a case, with the results of an exact forward."""
    inputs = make_mha_inputs(case.forward, device)
    call = BackwardInputs(inputs, make_mha_gradients(inputs, case.of), exact_results(inputs))
    function, arguments = named_backward_arguments(call)
    return Call(
        function,
        {**arguments, "deterministic": case.deterministic},
        NAMES if inputs.attn_sink is not None else NAMES[:3],
        lambda got: check_backward(call, got),
        call,
        unordered=() if case.deterministic else ("dq",),
    )


def dense_backward_changes(call: Call) -> Iterator[None]:
    """Change arrays, then segments; results and gradients to begin with follow."""
    given = call.inputs
    inputs, of = given.inputs, "out" if given.gradients.dlse is None else "both"

    def follow(seed: int) -> None:
        again = replace(inputs, case=replace(inputs.case, seed=seed))
        given.begin_with(make_mha_gradients(again, of), exact_results(inputs))

    yield
    for turn in changes_of_numbers(vars(inputs), inputs.case.softcap):
        follow(turn)
        yield
    if inputs.cu_seqlens_q is not None:
        for turn, _ in enumerate(changes_of_segments(inputs), 4):
            follow(turn)
            yield


ARRAYS = ("q", "k", "v", "attn_sink", "alibi_slopes", "dout", "out", "lse", "dlse")


def backward_floats(case: BackwardCase) -> tuple[str, ...]:
    """All arrays of a case but lengths."""
    names = floats_of(ARRAYS)(case.forward)
    return names if case.of != "out" else names[:-1]


def both_orders(*cases: tuple[MhaCase, str]) -> tuple[BackwardCase, ...]:
    """Each case in any order and in a fixed one."""
    return tuple(BackwardCase(case, of, ordered) for case, of in cases for ordered in (False, True))


BATCH = MhaCase(b=3, s_q=150, s_k=200, causal=True, softcap=15.0, alibi="heads", sink="float32", gap=0.0)
OF_192 = replace(IN_PLACE, d_qk=192, alibi=None, causal=True, window=(-1, -1), sink="float32", h_kv=1)
OF_256 = replace(IN_PLACE, **D256, alibi=None)

MHA_BACKWARD = Operation(
    name="mha_backward",
    make=make_dense_backward_call,
    cases=(
        BackwardCase(BATCH, "both"),
        BackwardCase(replace(BATCH, alibi=None, layout="heads"), "out", False),
    ),
    arrays=ARRAYS,
    floats=backward_floats,
    small_cases=(
        *both_orders(
            (MhaCase(b=1, s_q=1, s_k=1, h_q=1, h_kv=1), "out"),
            (MhaCase(b=2, s_q=150, s_k=300, **PAIR, causal=True, layout="heads"), "out"),
            (MhaCase(b=1, s_q=150, s_k=40, h_q=4, h_kv=2, causal=True, sink="infinite"), "both"),
        ),
        BackwardCase(MhaCase(b=1, s_q=200, s_k=300, **ONE_KV, window=(30, 5), layout="slice", **D64)),
        BackwardCase(MhaCase(b=1, s_q=140, s_k=270, **PAIR, softcap=15.0, alibi="heads", **D64), "both"),
        BackwardCase(
            MhaCase(b=2, s_q=70, s_k=90, **PAIR, d_qk=96, d_v=96, dtype="float16", sink="bfloat16"),
            "out",
            False,
        ),
        BackwardCase(MhaCase(b=1, s_q=140, s_k=270, **ONE_KV, d_qk=192, causal=True), "out", False),
        BackwardCase(MhaCase(b=1, s_q=140, s_k=150, **ONE_KV, **D256, causal=True), "both", False),
    ),
    kernels=("mha_backward_prepare", "mha_backward[", "mha_backward_by_product", "mha_backward_finish"),
    rerun_cases=both_orders(
        *(
            (MhaCase(b=60, s_q=s_q, s_k=s_k, h_kv=4, **D64, causal=causal, sink="float32"), "out")
            for causal, (s_q, s_k) in zip((True, False) * 4, RERUNS, strict=True)
        ),
        (MhaCase(b=60, s_q=1024, s_k=128, h_kv=4, causal=True, sink="float32"), "out"),
        (MhaCase(b=60, s_q=257, s_k=257, h_kv=1, causal=True, sink="float32"), "both"),
        (MhaCase(b=60, s_q=97, s_k=300, h_kv=4, d_qk=96, d_v=96, sink="bfloat16", dtype="float16"), "both"),
        (MhaCase(b=20, s_q=257, s_k=257, **D64, window=(50, 3), softcap=15.0, alibi="requests"), "both"),
        (MhaCase(b=8, s_q=300, s_k=457, d_qk=192, causal=True), "out"),
        (MhaCase(b=8, s_q=300, s_k=457, **D256, window=(200, 30), h_kv=1, layout="slice"), "both"),
    ),
    repeats=1000,
    graph_cases=both_orders((BATCH, "both")),
    strides={"dout": (*ROWS, "transposed"), **{name: ROWS for name in ("q", "k", "v", "out")}},
    odd_last=("q", "k", "v", "dout", "out", "lse", "dlse"),
    copied=("dout",),
    ordered_like="q",
    out=slices,
    outputs=("dq", "dk", "dv"),
    empty={
        "no requests": (without("dout", "q", "k", "v", "out", "lse", "dlse"), {"dq": 0, "dk": 0, "dv": 0})
    },
    bad={"scale 0": wrong_value("softmax_scale", 0.0)},
    changes=dense_backward_changes,
)

MHA_VARLEN_BACKWARD = replace(
    MHA_BACKWARD,
    name="mha_varlen_backward",
    cases=(BackwardCase(SEGMENTS, "both"), BackwardCase(OF_192, "out"), BackwardCase(OF_256, "both", False)),
    arrays=(*ARRAYS, *OF_SEGMENTS),
    small_cases=(
        *both_orders(
            (MhaCase(**SMALL, causal=True, sink="float32"), "both"),
            (MhaCase(**SMALL, **ONE_KV, d_qk=192, window=(90, 5), k_used=(3, 5, 0, 200)), "out"),
            (MhaCase(**SMALL, **ONE_KV, **D256, q_used=(2, 0, 1, 100)), "both"),
        ),
        BackwardCase(
            MhaCase(**SMALL, q_used=(2, 0, 1, 100), k_used=(3, 0, 0, 141), rows_around=70, layout="slice"),
            "lse",
        ),
        BackwardCase(MhaCase(**SMALL, d_qk=59, d_v=111, layout="slice"), "out", False),
        BackwardCase(
            MhaCase(q_lengths=(1, 0, 2) * 15, k_lengths=(3, 1, 2) * 15, d_qk=32, d_v=32), "both", False
        ),
    ),
    kernels=("mha_backward_clear", "mha_backward[", "mha_backward_by_product"),
    rerun_cases=both_orders((MhaCase(**MANY, causal=True), "both")),
    graph_cases=(*both_orders((IN_PLACE, "both")), BackwardCase(OF_192, "out"), BackwardCase(OF_256, "both")),
    empty={},
)
