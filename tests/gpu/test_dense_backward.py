"""The backward of dense attention: arrays that are large, and a capture without its kernels."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan
from typing import Any

from gpu_support import torch

import rawmla
from kit.mha import MhaCase, make_mha_inputs
from operations.dense_backward import backward_inputs, check_backward

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
