"""The backward of dense attention on the published matrix of FlashMLA, which --full runs whole."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

from gpu_support import assert_same_bits, torch
from test_mha_matrix import FLASH_MLA_LSE, FLASH_MLA_OUT, flash_mla_case, on_flash_mla_matrix

from kit import check_close
from kit.mha import HALF_STEP, make_mha_inputs, tokens_of
from kit.mha_backward import make_mha_gradients
from operations.dense import attend
from operations.dense_backward import BackwardInputs, backward_of

ROWS = 2048  # query tokens of one step of the reference
HEADS_TOGETHER = 16  # query heads that are compared at a time, whole groups
NAMES = ("out", "lse", "dq", "dk", "dv")


def exact_head(
    q: Any, k: Any, v: Any, dout: Any, softmax_scale: float, causal: bool
) -> tuple[Any, Any, Any, Any, Any]:
    """out, lse, dq, dk and dv of one head of one request, which has no fewer keys than query tokens, in
    float64. The reference of tests/kit also says how much each row may be off, at several times the
    cost.
    """
    q, k, v, dout = (x.double() for x in (q, k, v, dout))
    q = q * softmax_scale
    s_q, s_k = len(q), len(k)
    out, lse, dq = torch.empty_like(dout), q.new_empty(s_q), torch.empty_like(q)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    for first in range(0, s_q, ROWS):
        rows = slice(first, min(first + ROWS, s_q))
        seen = slice(0, s_k - s_q + rows.stop if causal else s_k)
        scores = q[rows] @ k[seen].T
        if causal:  # the last of these rows sees all of these keys
            hidden = torch.ones_like(scores, dtype=torch.bool).triu_(seen.stop - len(scores) + 1)
            scores.masked_fill_(hidden, -inf)
            del hidden
        lse[rows] = scores.logsumexp(-1)
        p = scores.sub_(lse[rows, None]).exp_()
        out[rows] = p @ v[seen]
        dv[seen] += p.T @ dout[rows]
        ds = dout[rows] @ v[seen].T
        ds.sub_((dout[rows] * out[rows]).sum(-1, keepdim=True)).mul_(p)
        dq[rows] = ds @ k[seen]
        dk[seen] += ds.T @ q[rows]
    return out, lse, dq.mul_(softmax_scale), dk, dv


def exact_heads(call: BackwardInputs, first: int, count: int) -> tuple[Any, ...]:
    """The same of these query heads of all requests, and of the KV heads that they read."""
    inputs, dout, case = call.inputs, call.gradients.dout, call.inputs.case
    assert case.softmax_scale is not None
    group = case.h_q // case.h_kv
    arrays = (dout, call.results[1], inputs.q, inputs.k, inputs.v)
    heads = (count, count, count, count // group, count // group)
    sums = [
        torch.zeros((len(x), n, *x.shape[2:]), dtype=torch.float64, device=x.device)
        for x, n in zip(arrays, heads, strict=True)
    ]
    for rows_q, rows_k in tokens_of(inputs):
        for head in range(first, first + count):
            shared = head // group
            one = exact_head(
                inputs.q[rows_q, head],
                inputs.k[rows_k, shared],
                inputs.v[rows_k, shared],
                dout[rows_q, head],
                case.softmax_scale,
                case.causal,
            )
            places = [(rows_q, head - first)] * 3 + [(rows_k, shared - first // group)] * 2
            for x, place, part in zip(sums, places, one, strict=True):
                x[place] += part
    return tuple(sums)


@on_flash_mla_matrix
def test_flash_mla_backward(s: int, ragged: bool, heads: tuple[int, int], d_qk: int, causal: bool) -> None:
    """Five forward and backward passes give the same bits, but for those of dq, within the published bounds;
    relative L2 errors of gradients are at most a whole step of the dtype. All heads against float64.

    The published runs have no backward with groups of heads. There the first keys, whose weights are large,
    sum up so many roundings to bf16 of each that single elements of millions pass the absolute bound.
    """
    inputs = make_mha_inputs(flash_mla_case(s, ragged, heads, d_qk, causal))
    case = inputs.case
    call = BackwardInputs(inputs, make_mha_gradients(inputs), attend(inputs, is_varlen=ragged))
    got = (*call.results, *backward_of(call, is_varlen=ragged))
    for _ in range(4):
        again = attend(inputs, is_varlen=ragged)
        for name, one, want in zip(NAMES, again, got, strict=False):
            assert_same_bits(name, one, want)
        del again, one
        gradients = backward_of(call, is_varlen=ragged)
        for name, one, want in zip(NAMES[3:], gradients[1:], got[3:], strict=True):
            assert_same_bits(name, one, want)
        del gradients, one
    group = heads[0] // heads[1]
    for first in range(0, heads[0], HEADS_TOGETHER):
        wanted = exact_heads(call, first, HEADS_TOGETHER)
        for name, one, want in zip(NAMES, got, wanted, strict=True):
            start = first // group if name in ("dk", "dv") else first
            part = one[:, start : start + want.shape[1]]
            tolerance = FLASH_MLA_LSE if name == "lse" else FLASH_MLA_OUT
            if name in ("dk", "dv"):  # sums over the heads of a group
                tolerance = replace(tolerance, absolute=tolerance.absolute * group**0.5)
            label = f"{case.id} {name} of heads from {first} on"
            difference = check_close(label, part, want, tolerance)
            if name in ("dq", "dk", "dv"):
                assert difference.rel_l2 <= 2 * HALF_STEP[case.dtype], (label, difference)
