"""The backward of dense attention on the GPU, made ready to be timed by `turns`."""

from dataclasses import dataclass
from typing import Any

import torch

import rawmla

from . import mha_measure
from .measure import Prepared
from .mha_backward_cases import MhaBackwardCase
from .mha_measure import MhaArrays, check_output, of_request, options
from .peers import Call
from .turns import prepared


@dataclass(frozen=True)
class MhaBackwardArrays(MhaArrays):
    """The arrays of a forward case, its results, and the gradient of out, which is like out."""

    dout: Any
    out: Any
    lse: Any


def make_inputs(case: MhaBackwardCase, device: str = "cuda") -> MhaBackwardArrays:
    """Inputs on a device, all normal(0, 1), and what the forward call makes of them."""
    given = mha_measure.make_inputs(case, device)
    function = rawmla.flash_attn_varlen_func if case.varlen else rawmla.flash_attn_func
    out, lse = function(given.q, given.k, given.v, **options(case, given, "attn_sink"))
    return MhaBackwardArrays(**vars(given), dout=torch.randn_like(out), out=out, lse=lse)


def gradients_of(
    case: MhaBackwardCase, inputs: MhaBackwardArrays, request: int, rows: slice, columns: slice
) -> tuple[Any, Any, Any]:
    """The definition for some query tokens and some keys of a request in float64: what they give to dq
    `[rows, h_q, d_qk]`, dk `[columns, h_kv, d_qk]` and dv `[columns, h_kv, d_v]`, from the out and lse of the
    inputs.
    """
    queries, keys = case.lengths()[request]
    group = case.h_q // case.h_kv
    q, out, dout = (
        of_request(case, array, request, 0)[rows].double() for array in (inputs.q, inputs.out, inputs.dout)
    )
    k, v = (
        of_request(case, array, request, 1)[columns].double().repeat_interleave(group, dim=1)
        for array in (inputs.k, inputs.v)
    )
    scores = torch.einsum("ihd,jhd->hij", q, k) * case.d_qk**-0.5
    slope = torch.full_like(scores, case.d_qk**-0.5)
    if case.softcap:
        capped = torch.tanh(scores / case.softcap)
        scores, slope = case.softcap * capped, slope * (1 - capped**2)
    own = torch.arange(keys - queries, keys, device=q.device)[rows, None]  # the key that each query stands at
    key = torch.arange(keys, device=q.device)[columns]
    seen = key <= own if case.causal else torch.ones_like(key + own, dtype=torch.bool)
    if case.window is not None:
        seen = seen & (key >= own - case.window)
    lse = of_request(case, inputs.lse, request, 0).T if case.varlen else inputs.lse[request]
    total = lse[:, rows].double()
    if case.sink:
        total = torch.logaddexp(total, inputs.attn_sink.double()[:, None])
    p = torch.where(seen, (scores - total[..., None]).exp(), 0.0)
    delta = (dout * out).sum(-1).T[..., None]
    ds = p * (torch.einsum("ihd,jhd->hij", dout, v) - delta) * slope
    dk, dv = torch.einsum("hij,ihd->jhd", ds, q), torch.einsum("hij,ihd->jhd", p, dout)
    shared = (array.unflatten(1, (case.h_kv, group)).sum(2) for array in (dk, dv))
    return torch.einsum("hij,jhd->ihd", ds, k), *shared


def check_gradients(case: MhaBackwardCase, inputs: MhaBackwardArrays, gradients: Any) -> float:
    """Largest relative L2 error of dq of a middle and the last query token of the first and the last request,
    and of dk and dv of the keys that the first, a middle and the last one stand at.

    Raises AssertionError at 1 % or NaN: the time of a wrong result means nothing.
    """
    everything = slice(None)
    worst = 0.0
    for request in {0, case.b - 1}:
        queries, keys = case.lengths()[request]
        dq, dk, dv = (
            of_request(case, array, request, side)
            for array, side in zip(gradients[:3], (0, 1, 1), strict=True)
        )
        found = []
        for token in {queries // 2, queries - 1}:
            row = slice(token, token + 1)
            want, _, _ = gradients_of(case, inputs, request, row, everything)
            found.append((f"dq of token {token}", dq[row], want))
        for key in {keys - queries, keys - queries + queries // 2, keys - 1}:
            column = slice(key, key + 1)
            _, *wanted = gradients_of(case, inputs, request, everything, column)
            for name, got, want in zip(("dk", "dv"), (dk, dv), wanted, strict=True):
                found.append((f"{name} of token {key}", got[column], want))
        for name, got, want in found:
            error = float((got.double() - want).norm() / want.norm())
            assert error < 0.01, f"{case.id}: {name} of request {request} has an error of {error}"
            worst = max(worst, error)
    return worst


def prepare(case: MhaBackwardCase) -> Prepared:
    """Inputs of a case and first calls, whose results are checked."""
    inputs = make_inputs(case)
    check_output(case, inputs, inputs.out)
    function = rawmla.flash_attn_varlen_backward if case.varlen else rawmla.flash_attn_backward
    keywords = options(case, inputs, "attn_sink")

    def backward(deterministic: bool) -> Call:
        def call(_: int) -> Any:
            return function(
                inputs.dout,
                inputs.q,
                inputs.k,
                inputs.v,
                inputs.out,
                inputs.lse,
                deterministic=deterministic,
                **keywords,
            )

        return call

    return prepared(case, inputs, backward, lambda gradients: check_gradients(case, inputs, gradients))
