"""The backward of flex attention on the GPU, made ready to be timed by `turns`."""

from dataclasses import dataclass, replace
from typing import Any

import torch

import rawmla

from . import flex_measure
from .flex_backward_cases import FlexBackwardCase
from .flex_measure import SOFTCAP, FlexArrays, check_output, functions
from .measure import Prepared
from .peers import Call
from .turns import prepared


@dataclass(frozen=True)
class FlexBackwardArrays(FlexArrays):
    """The arrays of a forward case, its results, and the gradient of out, which is like out."""

    dout: Any
    out: Any
    lse: Any


@dataclass(frozen=True)
class Pairs:
    """What the definition says of some pairs of query token and key, in float64.

    `p` `[h_q, n]` and the gradients of the products q·k and of the scores, `[h_q, n]`; and the rows of the
    pairs, `[h_q, n, d]`.
    """

    p: Any
    by_product: Any
    by_score: Any
    q: Any
    k: Any
    dout: Any


def gradients_of_pairs(
    case: FlexBackwardCase, inputs: FlexBackwardArrays, request: int, queries: Any, keys: Any
) -> Pairs:
    """The definition for the pairs (queries[n], keys[n]) of a request, from the out and lse of the inputs.
    It asks no function of the case.
    """
    group = case.h_q // case.h_kv
    q, out, dout = (array[request, :, queries].double() for array in (inputs.q, inputs.out, inputs.dout))
    k, v = (
        array[request, :, keys].double().repeat_interleave(group, dim=0) for array in (inputs.k, inputs.v)
    )
    scale = case.d**-0.5
    scores, slope = (q * k).sum(-1) * scale, 1.0
    if case.score == "alibi":
        scores -= inputs.table.double()[:, None] * (queries - keys)
    elif case.score == "softcap":
        capped = torch.tanh(scores / SOFTCAP)
        scores, slope = SOFTCAP * capped, 1 - capped**2
    elif case.score == "bias":
        scores += inputs.table.detach()[:, queries - keys + case.s - 1].double()
    elif case.score in ("scale", "scalar"):
        slope = inputs.table.detach().double().expand(case.h_q)[:, None]
        scores = scores * slope
    begin, end = torch.tensor([case.visible(token) for token in queries.tolist()]).to(keys.device).T
    p = (scores - inputs.lse[request, :, queries].double()).exp()
    p = torch.where((keys >= begin) & (keys < end), p, 0.0)
    by_score = p * ((dout * v).sum(-1) - (dout * out).sum(-1))
    return Pairs(p, by_score * slope * scale, by_score, q, k, dout)


def gradient_of_factors(case: FlexBackwardCase, inputs: FlexBackwardArrays) -> Any:
    """The gradient of the factor of each head, float64 `[h_q]`: a sum over all pairs, which is made
    for one head of one request at a time.
    """
    factors = inputs.table.detach().double().expand(case.h_q)
    found = torch.zeros_like(factors)
    group, at = case.h_q // case.h_kv, torch.arange(case.s, device=factors.device)
    begin, end = torch.tensor([case.visible(token) for token in range(case.s)]).to(at.device).T
    hidden = (at < begin[:, None]) | (at >= end[:, None])
    for request in range(case.b):
        for head in range(case.h_q):
            q, out, dout = (x[request, head].double() for x in (inputs.q, inputs.out, inputs.dout))
            k, v = (x[request, head // group].double() for x in (inputs.k, inputs.v))
            scores = q @ k.T * case.d**-0.5
            p = (scores * factors[head] - inputs.lse[request, head].double()[:, None]).exp_()
            by_score = p.masked_fill_(hidden, 0.0) * (dout @ v.T - (dout * out).sum(-1, keepdim=True))
            found[head] += (by_score * scores).sum()
    return found


def check_gradients(case: FlexBackwardCase, inputs: FlexBackwardArrays, gradients: Any) -> float:
    """Largest relative L2 error of dq, and of dk and dv, of the first or a middle and the last token of the
    first and the last request; and of what the score function reads, of a table at three distances.

    Raises AssertionError at 1 % or NaN: the time of a wrong result means nothing.
    """
    dq, dk, dv = gradients[:3]
    every = torch.arange(case.s, device=dq.device)

    def over_group(array: Any) -> Any:
        return array.unflatten(0, (case.h_kv, -1)).sum(1)

    found = []
    for request in {0, case.b - 1}:
        of = f"of request {request}"
        for token in {case.s // 2, case.s - 1}:  # with one visible key dq is 0
            pairs = gradients_of_pairs(case, inputs, request, torch.full_like(every, token), every)
            want = torch.einsum("hn,hnd->hd", pairs.by_product, pairs.k)
            found.append((f"dq of token {token} {of}", dq[request, :, token], want))
        for token in {0, case.s // 2, case.s - 1}:
            pairs = gradients_of_pairs(case, inputs, request, every, torch.full_like(every, token))
            want = over_group(torch.einsum("hn,hnd->hd", pairs.by_product, pairs.q))
            found.append((f"dk of token {token} {of}", dk[request, :, token], want))
            want = over_group(torch.einsum("hn,hnd->hd", pairs.p, pairs.dout))
            found.append((f"dv of token {token} {of}", dv[request, :, token], want))
    if case.captured and case.score in ("scale", "scalar"):
        (got,) = gradients[3].values()
        want = gradient_of_factors(case, inputs)
        found.append(("gradient of factors", got, want if case.score == "scale" else want.sum()))
    elif case.captured:
        (table,) = gradients[3].values()
        for distance in {0, 1, case.s // 2}:
            at = every[distance:]
            requests = [
                gradients_of_pairs(case, inputs, request, at, at - distance) for request in range(case.b)
            ]
            want = sum(pairs.by_score.sum(-1) for pairs in requests)
            found.append((f"gradient of distance {distance}", table[:, distance + case.s - 1], want))
    worst = 0.0
    for name, got, want in found:
        error = float((got.double() - want).norm() / want.norm())
        assert error < 0.01, f"{case.id}: {name} has an error of {error}"
        worst = max(worst, error)
    return worst


def prepare(case: FlexBackwardCase) -> Prepared:
    """Inputs of a case, its block mask, and first calls, whose results are checked."""
    given = flex_measure.make_inputs(case)
    if case.captured:
        given.table.requires_grad_()
    score, mask = functions(case, given)
    block_mask = None
    if mask is not None:
        block_mask = rawmla.create_block_mask(mask, None, None, case.s, case.s, device="cuda")
    gqa = case.h_kv != case.h_q
    with torch.no_grad():  # else autograd would keep what a captured tensor needs
        out, lse = rawmla.flex_attention(
            given.q, given.k, given.v, score, block_mask, enable_gqa=gqa, return_lse=True
        )
    check_output(case, given, out)
    inputs = FlexBackwardArrays(**vars(given), dout=torch.randn_like(out), out=out, lse=lse)

    def backward(deterministic: bool, score_mod: Any = score) -> Call:
        def call(_: int) -> Any:
            with torch.no_grad():
                return rawmla.flex_attention_backward(
                    inputs.dout,
                    inputs.q,
                    inputs.k,
                    inputs.v,
                    inputs.out,
                    inputs.lse,
                    score_mod,
                    block_mask,
                    enable_gqa=gqa,
                    deterministic=deterministic,
                )

        return call

    without = None
    if case.captured:
        constant = replace(given, table=given.table.detach())
        without = backward(False, functions(case, constant)[0])
    return prepared(
        case, inputs, backward, lambda gradients: check_gradients(case, inputs, gradients), without
    )
