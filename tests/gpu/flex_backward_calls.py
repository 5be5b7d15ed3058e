"""Backward calls of flex attention in the GPU tests: of a case's inputs, after its own forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpu_support import assert_same_bits, torch

import rawmla
from kit.flex import FlexCase, FlexInputs
from kit.flex_backward import (
    FlexGradients,
    check_flex_backward,
    make_flex_backward_inputs,
    make_flex_gradients,
)

__all__ = [
    "ALL_LISTS",
    "BackwardInputs",
    "assert_same_gradients",
    "backward_inputs",
    "backward_of",
    "check_backward",
]

ALL_LISTS = tuple(
    f"{prefix}{lines}_{what}"
    for lines in ("kv", "q")
    for prefix in ("", "full_")
    for what in ("num_blocks", "indices")
)
"""Attributes of a block mask: its lists by rows and by columns, in the order of its constructor."""


@dataclass
class BackwardInputs:
    """The arrays of a backward call: those of the forward, its results, and what it begins with."""

    inputs: FlexInputs
    gradients: FlexGradients
    results: tuple[Any, Any]  # out and lse


def backward_inputs(case: FlexCase, of: str = "out", inputs: FlexInputs | None = None) -> BackwardInputs:
    """With the out and lse of the forward on the device."""
    inputs = make_flex_backward_inputs(case) if inputs is None else inputs
    with torch.no_grad():
        results = rawmla.flex_attention(inputs.q, inputs.k, inputs.v, return_lse=True, **inputs.keywords())
    return BackwardInputs(inputs, make_flex_gradients(inputs, of), results)


def backward_of(call: BackwardInputs, form: str = "python", **more: Any) -> tuple[Any, Any, Any, Any]:
    """dq, dk, dv, and by name the gradients of captured tensors; `more` are further keywords, or others."""
    inputs, gradients = call.inputs, call.gradients
    keywords = {**inputs.keywords(form), "grad_lse": gradients.dlse, **more}
    arrays = (gradients.dout, inputs.q, inputs.k, inputs.v, *call.results)
    return rawmla.flex_attention_backward(*arrays, **keywords)


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
