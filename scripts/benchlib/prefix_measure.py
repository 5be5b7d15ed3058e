"""Prefix prefill on the GPU, made ready to be timed by `measure`."""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

import rawmla

from .measure import Prepared, calls_per_graph
from .prefix_cases import PrefixCase

X = {"bf16": 8, "fp8": 16}
"""Dimensions that lie together in k_cache: 16 bytes, as in vLLM."""

SCALES = 0.03, 0.02
"""Of K and V in an FP8 cache: values of normal(0, 1) stay far below 448 of them."""

OUT_SCALE = 2.0**-10
"""Of an FP8 output. Its numbers are normal ones then; results of some thousand keys are about 0.02."""


@dataclass(frozen=True)
class PrefixArrays:
    """Device arrays of a case: the new tokens of all requests one after the other in q, k and v, out for
    them, and the cache. What the case does not have is None.
    """

    q: Any
    k: Any
    v: Any
    out: Any
    k_cache: Any
    v_cache: Any
    block_table: Any
    start_loc: Any
    seq_lens: Any
    alibi_slopes: Any
    sinks: Any


def make_inputs(case: PrefixCase, device: str = "cuda") -> PrefixArrays:
    """Inputs on a device, q, keys and values normal(0, 1); pages in a random order.

    As in engines, requests have pages for their new tokens too, which the kernel does not read.
    """
    torch.manual_seed(0)
    lengths = case.query_lengths()
    seq_lens = [case.ctx_len + queries for queries in lengths]
    page = case.page_block_size
    pages = [-(-length // page) for length in seq_lens]
    blocks = sum(pages)

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    def cache(scale: float, *shape: int) -> Any:
        return normal(*shape) if case.cache == "bf16" else (normal(*shape) / scale).to(torch.float8_e4m3fn)

    def integers(values: Any) -> Any:
        return torch.tensor(list(values), dtype=torch.int32, device=device)

    order = iter(torch.randperm(blocks).tolist())
    table = torch.zeros(case.b, max(pages), dtype=torch.int32)
    for request, count in enumerate(pages):
        table[request, :count] = torch.tensor([next(order) for _ in range(count)])
    q = normal(sum(lengths), case.h_q, case.d)
    slopes = [2 ** (-8 * (head + 1) / case.h_q) for head in range(case.h_q)]
    return PrefixArrays(
        q,
        normal(sum(lengths), case.h_kv, case.d),
        normal(sum(lengths), case.h_kv, case.d),
        torch.empty_like(q, dtype=torch.float8_e4m3fn if case.fp8_out else q.dtype),
        cache(SCALES[0], blocks, case.h_kv, case.d // X[case.cache], page, X[case.cache]),
        cache(SCALES[1], blocks, case.h_kv, case.d, page),
        table.to(device),
        integers([0, *accumulate(lengths)]),
        integers(seq_lens),
        torch.tensor(slopes, device=device) if case.alibi else None,
        normal(case.h_q) if case.sink else None,
    )


def arguments(case: PrefixCase, inputs: PrefixArrays) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of `context_attention_fwd`, by position and by keyword."""
    longest = max(case.query_lengths())
    given = (
        *(inputs.q, inputs.k, inputs.v, inputs.out, "auto" if case.cache == "bf16" else case.cache),
        *(inputs.k_cache, inputs.v_cache, inputs.block_table, inputs.start_loc, inputs.seq_lens),
        *(case.ctx_len + longest, longest, *SCALES),
    )
    return given, {
        "alibi_slopes": inputs.alibi_slopes,
        "sliding_window": case.window,
        "fp8_out_scale": OUT_SCALE if case.fp8_out else None,
        "sinks": inputs.sinks,
    }


def keys_of_request(case: PrefixCase, inputs: PrefixArrays, request: int) -> tuple[Any, Any]:
    """K and V of all positions of a request in float64, `[positions, h_kv, d]` each."""
    lengths = case.query_lengths()
    begin = sum(lengths[:request])
    own = slice(begin, begin + lengths[request])
    pages = inputs.block_table[request, : -(-case.ctx_len // case.page_block_size)].long()
    k = inputs.k_cache[pages].double().permute(0, 3, 1, 2, 4).flatten(3).flatten(0, 1)[: case.ctx_len]
    v = inputs.v_cache[pages].double().permute(0, 3, 1, 2).flatten(0, 1)[: case.ctx_len]
    k_scale, v_scale = SCALES if case.cache == "fp8" else (1.0, 1.0)
    return (
        torch.cat([k * k_scale, inputs.k[own].double()]),
        torch.cat([v * v_scale, inputs.v[own].double()]),
    )


def attention_of_token(
    case: PrefixCase, inputs: PrefixArrays, keys: tuple[Any, Any], row: int, token: int
) -> Any:
    """The definition for a request's new token of this number, row `row` of q, in float64, `[h_q, d]`: the
    check of the timed kernel. `keys` are the request's, of `keys_of_request`.
    """
    begin, end = case.visible(token)
    k, v = (array[begin:end] for array in keys)
    q = inputs.q[row].double().unflatten(0, (case.h_kv, -1))
    scores = torch.einsum("kgd,tkd->kgt", q, k).flatten(0, 1) * case.d**-0.5
    if case.alibi:
        scores += inputs.alibi_slopes.double()[:, None] * torch.arange(begin + 1 - end, 1, device=q.device)
    total = scores.logsumexp(1)
    if case.sink:
        total = torch.logaddexp(total, inputs.sinks.double())
    weights = (scores - total[:, None]).exp().unflatten(0, (case.h_kv, -1))
    return torch.einsum("kgt,tkd->kgd", weights, v).flatten(0, 1)


def check_output(case: PrefixCase, inputs: PrefixArrays, out: Any) -> float:
    """Largest relative L2 error of the first, a middle and the last new token of the first and the last
    request.

    Raises AssertionError at 1 % (4 % of FP8 output, whose rounding alone makes about 2.6 %) or NaN: the time
    of a wrong result means nothing.
    """
    bound = 0.04 if case.fp8_out else 0.01
    lengths = case.query_lengths()
    worst = 0.0
    for request in {0, case.b - 1}:
        keys = keys_of_request(case, inputs, request)
        for token in {0, lengths[request] // 2, lengths[request] - 1}:
            row = sum(lengths[:request]) + token
            want = attention_of_token(case, inputs, keys, row, token)
            got = out[row].double() * (OUT_SCALE if case.fp8_out else 1.0)
            error = float((got - want).norm() / want.norm())
            assert error < bound, f"{case.id}: token {token} of request {request} has an error of {error}"
            worst = max(worst, error)
    return worst


def prepare(case: PrefixCase) -> Prepared:
    """Inputs of a case and a first call, whose result is checked."""
    inputs = make_inputs(case)
    given, keywords = arguments(case, inputs)

    def call(_: int) -> Any:
        return rawmla.context_attention_fwd(*given, **keywords)

    error = check_output(case, inputs, call(0))
    return Prepared(inputs, call, 1, error, lambda replays: {}, calls_per_graph(case))
