"""The backward of flex attention: calls of a case's inputs, and its entries of the table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import rawmla
from kit.flex import FlexCase, FlexInputs
from kit.flex_backward import (
    captured_tensors,
    check_flex_backward,
    exact_results,
    make_flex_backward_inputs,
    make_flex_gradients,
)

from .core import Arguments, Call, Operation, assert_same_bits, wrong_value
from .dense import D256, ONE_KV, PAIR, ROWS
from .dense_backward import BackwardCase, BackwardInputs
from .flex import BIASED, CASES, CHANGING, SMALL_BLOCKS, change_everything, flex_arguments

# ---- calls


def backward_inputs(case: FlexCase, of: str = "out", inputs: FlexInputs | None = None) -> BackwardInputs:
    """With the out and lse of the forward on the device."""
    inputs = make_flex_backward_inputs(case) if inputs is None else inputs
    with torch.no_grad():
        results = rawmla.flex_attention(inputs.q, inputs.k, inputs.v, return_lse=True, **inputs.keywords())
    return BackwardInputs(inputs, make_flex_gradients(inputs, of), results)


def named_arguments(call: BackwardInputs, form: str) -> Arguments:
    """The arguments by name, functions in one form."""
    out, lse = call.results
    gradients = {"grad_out": call.gradients.dout, "grad_lse": call.gradients.dlse}
    return {**flex_arguments(call.inputs, form), "out": out, "lse": lse, **gradients}


def backward_of(call: BackwardInputs, form: str = "python", **more: Any) -> tuple[Any, Any, Any, Any]:
    """dq, dk, dv, and by name the gradients of captured tensors; `more` are further keywords, or others."""
    return rawmla.flex_attention_backward(**{**named_arguments(call, form), **more})


def check_backward(call: BackwardInputs, got: tuple[Any, Any, Any, Any]) -> None:
    """Compare the gradients of a call with the reference; run after the kernels, never before."""
    check_flex_backward(call.inputs, call.gradients, call.results, got)


def assert_same_gradients(got: tuple[Any, ...], want: tuple[Any, ...], *, all_of_them: bool) -> None:
    """Raise unless dk and dv have the same bits, and with `all_of_them` dq and captured gradients too."""
    pairs = {"dk": (got[1], want[1]), "dv": (got[2], want[2])}
    if all_of_them:
        assert set(got[3]) == set(want[3])
        pairs |= {"dq": (got[0], want[0]), **{name: (got[3][name], want[3][name]) for name in got[3]}}
    for name, (one, other) in pairs.items():
        assert_same_bits(name, one, other)


# ---- entries


def make_flex_backward_call(case: BackwardCase, device: str = "cuda", form: str = "cuda") -> Call:
    """The call of a case, with the results of an exact forward."""
    inputs = make_flex_backward_inputs(case.forward, device)
    with torch.no_grad():
        results = exact_results(inputs)
    call = BackwardInputs(inputs, make_flex_gradients(inputs, case.of), results)
    captured = tuple(captured_tensors(inputs))
    return Call(
        "flex_attention_backward",
        {**named_arguments(call, form), "deterministic": case.deterministic},
        ("dq", "dk", "dv", *captured),
        lambda got: check_backward(call, (*got[:3], dict(zip(captured, got[3:], strict=True)))),
        call,
        unpack=lambda got: (*got[:3], *(got[3][name] for name in captured)),
        unordered=() if case.deterministic else ("dq", *captured),
    )


def flex_backward_changes(call: Call) -> Iterator[None]:
    """Change everything; out, lse and gradients to begin with belong to what changed."""
    given = call.inputs
    yield
    for turn in range(1, 4):
        change_everything(given.inputs, turn)
        again = replace(given.inputs, case=replace(given.inputs.case, seed=turn))
        gradients = make_flex_gradients(again, "out" if given.gradients.dlse is None else "both")
        with torch.no_grad():
            given.begin_with(gradients, exact_results(given.inputs))
        yield


ARRAYS = ("query", "key", "value", "out", "lse", "grad_out", "grad_lse")
SMALL_CASES = (
    BackwardCase(FlexCase(b=1, **PAIR, s_q=150, s_k=300, mask="causal"), "out", False),
    BackwardCase(
        FlexCase(b=2, **ONE_KV, s_q=140, s_k=270, score="bias b h q k", layout="slice"), "both", False
    ),
    BackwardCase(FlexCase(b=2, **PAIR, s_q=140, s_k=270, mask="documents", score="head scale"), "both"),
    BackwardCase(FlexCase(b=2, **ONE_KV, s_q=140, s_k=270, mask="documents", score="filled"), "both", False),
    BackwardCase(FlexCase(b=1, **PAIR, s_q=70, s_k=300, score="filled", dtype="float16"), "both"),
    BackwardCase(
        FlexCase(b=2, b_kv=1, h_q=4, h_kv=2, s_q=70, s_k=300, mask="per batch", score="paged"), "lse", False
    ),
    BackwardCase(FlexCase(b=1, **PAIR, s_q=150, s_k=200, mask="random", block=(32, 64))),
    BackwardCase(FlexCase(b=1, **PAIR, s_q=150, s_k=500, mask="window", block=(256, 256))),
    BackwardCase(FlexCase(b=2, **PAIR, s_q=70, s_k=90, mask="padding", d_qk=59, d_v=111), "both", False),
    BackwardCase(FlexCase(b=1, **PAIR, s_q=140, s_k=270, mask="checkered", score="distance", **D256)),
    BackwardCase(FlexCase(b=1, **PAIR, s_q=130, s_k=140, mask="empty", score="one element"), "both", False),
    # In a fixed order where a place depends on query and key: two passes.
    BackwardCase(FlexCase(b=1, **ONE_KV, s_q=70, s_k=140, mask="causal", score="bias h q k"), "both"),
)

FLEX_BACKWARD = Operation(
    name="flex_backward",
    make=make_flex_backward_call,
    cases=(
        BackwardCase(BIASED, "both"),
        BackwardCase(SMALL_BLOCKS, "both"),
        BackwardCase(CASES[2], "out", False),
        BackwardCase(CASES[3], "both", False),
    ),
    arrays=ARRAYS,
    floats=lambda case: ARRAYS if case.of != "out" else ARRAYS[:-1],
    small_cases=SMALL_CASES,
    kernels=("mha_backward[", "mha_backward_by_product", "flex_captured_gradients"),
    rerun_cases=(BackwardCase(replace(BIASED, b=20, s_q=257, s_k=257), "both"),),
    graph_cases=tuple(
        BackwardCase(replace(CHANGING, block=block), "both", ordered)
        for block, ordered in (((128, 128), True), ((64, 32), True), ((128, 128), False))
    ),
    strides={"query": ROWS, "value": ROWS, "grad_out": (*ROWS, "transposed")},
    odd_last=ARRAYS,
    copied=("grad_out",),
    ordered_like="query",
    bad={"scale NaN": wrong_value("scale", float("nan"))},
    changes=flex_backward_changes,
)

FLEX_BACKWARD_TRACED = replace(
    FLEX_BACKWARD,
    name="flex_backward_traced",
    make=partial(make_flex_backward_call, form="python"),
    any_framework=False,
)
