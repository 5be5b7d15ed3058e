"""Dense attention on the GPU, made ready to be timed by `measure`."""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

import rawmla

from .measure import DTYPES, Prepared, calls_per_graph
from .mha_cases import MhaCase


@dataclass(frozen=True)
class MhaArrays:
    """Device arrays of a case: q, k and v `[b, s, h, d]`, or with varlen `[tokens, h, d]` and where the
    requests begin. What the case does not have is None.
    """

    q: Any
    k: Any
    v: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    attn_sink: Any


def make_inputs(case: MhaCase, device: str = "cuda") -> MhaArrays:
    """Inputs on a device, all normal(0, 1)."""
    torch.manual_seed(0)
    lengths = list(zip(*case.lengths(), strict=True))

    def array(tokens: tuple[int, ...], heads: int, d: int) -> Any:
        shape = (sum(tokens),) if case.varlen else (case.b, case.s)
        return torch.randn(*shape, heads, d, device=device, dtype=DTYPES[case.dtype])

    def starts(tokens: tuple[int, ...]) -> Any:
        if not case.varlen:
            return None
        return torch.tensor([0, *accumulate(tokens)], dtype=torch.int32, device=device)

    queries, keys = lengths
    return MhaArrays(
        array(queries, case.h_q, case.d_qk),
        array(keys, case.h_kv, case.d_qk),
        array(keys, case.h_kv, case.d_v),
        starts(queries),
        starts(keys),
        torch.randn(case.h_q, device=device, dtype=torch.bfloat16) if case.sink else None,
    )


def options(case: MhaCase, inputs: MhaArrays, sink: str) -> dict[str, Any]:
    """What is given by keyword beside the arrays, to rawmla and to FlashAttention alike but for the name of
    the sink.
    """
    chosen = {
        "causal": case.causal,
        "window_size": (case.window, 0 if case.causal else None),
        "softcap": case.softcap,
        sink: inputs.attn_sink,
    }
    if case.varlen:
        queries, keys = (max(lengths) for lengths in zip(*case.lengths(), strict=True))
        chosen |= {
            "cu_seqlens_q": inputs.cu_seqlens_q,
            "cu_seqlens_k": inputs.cu_seqlens_k,
            "max_seqlen_q": queries,
            "max_seqlen_k": keys,
        }
    return chosen


def attention_of_token(case: MhaCase, inputs: MhaArrays, request: int, token: int) -> Any:
    """The definition for one query token of a request in float64, `[h_q, d_v]`: the check of the timed
    kernel.
    """
    queries, keys = case.lengths()[request]
    q = of_request(case, inputs.q, request, 0)
    k, v = (of_request(case, array, request, 1) for array in (inputs.k, inputs.v))
    own = token + keys - queries
    begin = 0 if case.window is None else max(0, own - case.window)
    end = own + 1 if case.causal else keys
    group = case.h_q // case.h_kv
    seen_k, seen_v = (array[begin:end].double().repeat_interleave(group, dim=1) for array in (k, v))
    scores = torch.einsum("hd,thd->ht", q[token].double(), seen_k) * case.d_qk**-0.5
    if case.softcap:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    total = scores.logsumexp(1)
    if case.sink:
        total = torch.logaddexp(total, inputs.attn_sink.double())
    return torch.einsum("ht,thd->hd", (scores - total[:, None]).exp(), seen_v)


def of_request(case: MhaCase, array: Any, request: int, side: int) -> Any:
    """The tokens of a request in q, out (side 0), or k and v (side 1)."""
    if not case.varlen:
        return array[request]
    lengths = [one[side] for one in case.lengths()]
    begin = sum(lengths[:request])
    return array[begin : begin + lengths[request]]


def check_output(case: MhaCase, inputs: MhaArrays, out: Any) -> float:
    """Largest relative L2 error of the first, a middle and the last query token of the first and the last
    request.

    Raises AssertionError at 1 % or NaN: the time of a wrong result means nothing.
    """
    worst = 0.0
    for request in {0, case.b - 1}:
        queries = case.lengths()[request][0]
        for token in {0, queries // 2, queries - 1}:
            want = attention_of_token(case, inputs, request, token)
            got = of_request(case, out, request, 0)[token].double()
            error = float((got - want).norm() / want.norm())
            assert error < 0.01, f"{case.id}: token {token} of request {request} has an error of {error}"
            worst = max(worst, error)
    return worst


def prepare(case: MhaCase) -> Prepared:
    """Inputs of a case and a first call, whose result is checked."""
    inputs = make_inputs(case)
    function = rawmla.flash_attn_varlen_func if case.varlen else rawmla.flash_attn_func
    keywords = options(case, inputs, "attn_sink")

    def call(_: int) -> Any:
        return function(inputs.q, inputs.k, inputs.v, **keywords)[0]

    error = check_output(case, inputs, call(0))
    return Prepared(inputs, call, 1, error, lambda replays: {}, calls_per_graph(case))
