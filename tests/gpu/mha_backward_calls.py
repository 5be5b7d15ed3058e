"""Backward calls of dense attention in the GPU tests: of a case's inputs, after its own forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from gpu_support import assert_same_bits, torch
from mha_calls import attend

import rawmla
from kit.mha import MhaInputs, in_gaps
from kit.mha_backward import MhaGradients, check_mha_backward, make_mha_gradients
from rawmla.api import dense_backward
from rawmla.kernels.mha_backward_variants import Needs

__all__ = [
    "NAMES",
    "BackwardInputs",
    "assert_same_gradients",
    "backward_inputs",
    "backward_of",
    "check_backward",
    "function_and_arguments",
    "gradient_buffers",
    "gradients_of_some",
]

NAMES = ("dq", "dk", "dv", "dsink")


@dataclass
class BackwardInputs:
    """The arrays of a backward call: those of the forward, its results, and what it begins with."""

    inputs: MhaInputs
    gradients: MhaGradients
    results: tuple[Any, Any]  # out and lse


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


def function_and_arguments(call: BackwardInputs, **more: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The public function of a call, and what it is called with; `more` are further keywords."""
    inputs, case = call.inputs, call.inputs.case
    arrays = (call.gradients.dout, inputs.q, inputs.k, inputs.v, *call.results)
    keywords = {**inputs.options(), "dlse": call.gradients.dlse, **more}
    if inputs.cu_seqlens_q is None:
        return rawmla.flash_attn_backward, arrays, keywords
    keywords = {"seqused_q": inputs.seqused_q, "seqused_k": inputs.seqused_k, **keywords}
    longest = max(case.q_lengths or (0,)), max(case.k_lengths or (0,))
    arguments = (*arrays, inputs.cu_seqlens_q, inputs.cu_seqlens_k, *longest)
    return rawmla.flash_attn_varlen_backward, arguments, keywords


def backward_of(call: BackwardInputs, **more: Any) -> tuple[Any, ...]:
    """dq, dk, dv, and with a sink dsink."""
    function, arguments, keywords = function_and_arguments(call, **more)
    return function(*arguments, **keywords)


def check_backward(call: BackwardInputs, got: tuple[Any, ...], *, plain: bool = False) -> None:
    """Compare the gradients of a call with the reference; run after the kernels, never before."""
    check_mha_backward(call.inputs, call.gradients, call.results, got, plain=plain)


def gradient_buffers(inputs: MhaInputs, canary: float) -> tuple[list[Any], dict[str, Any]]:
    """Buffers of canaries, and slices of them in all dimensions, full of NaN, as dq, dk and dv."""
    buffers, given = [], {}
    for name, source in (("dq", inputs.q), ("dk", inputs.k), ("dv", inputs.v)):
        *rows, columns = source.shape
        aligned = -(-columns // 8) * 8
        buffer = torch.full(
            (*[n + 2 for n in rows], aligned + 16), canary, dtype=source.dtype, device=source.device
        )
        part = buffer[(*[slice(1, n + 1) for n in rows], slice(8, 8 + columns))]
        part.fill_(float("nan"))
        buffers.append(buffer)
        given[name] = part
    return buffers, given


def assert_same_gradients(
    name: str, got: tuple[Any, ...], want: tuple[Any, ...], *, exact_dq: bool = False
) -> None:
    """Raise unless dk, dv and dsink have the same bits; dq too with `exact_dq`.

    dq is summed in any order: two calls may round it differently, by a step of its dtype or what float32
    leaves of terms that cancel.
    """
    assert len(got) == len(want)
    for which, one, wanted in zip(NAMES, got, want, strict=False):
        if which == "dq" and not exact_dq:
            one, wanted = one.double(), wanted.double()
            step = 2.0**-7 if got[0].dtype == torch.bfloat16 else 2.0**-10
            torch.testing.assert_close(
                one, wanted, rtol=step, atol=1e-5, msg=lambda text: f"{name} dq: {text}"
            )
        else:
            assert_same_bits(f"{name}: {which}", one, wanted)
