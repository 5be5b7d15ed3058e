"""Flex attention and its block masks on the GPU, made ready to be timed; and their time on the host."""

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

import rawmla

from .columns import Row
from .flex_cases import BlockMaskCase, FlexCase
from .measure import Prepared, calls_per_graph, host_figures
from .timing import CALLS_PER_GRAPH, repeat, rest, time_graph

SOFTCAP = 30.0
HOST_TOKENS = 1024  # more tiles than an H200 has SMs, as most calls have: scratch is made and cleared then


@dataclass(frozen=True)
class FlexArrays:
    """Device arrays of a case: q, k and v `[b, h, s, d]`, and what its functions read: a slope or a factor
    for each head, one factor, or a bias `[h_q, 2 s - 1]` by distance, and the document of each token. None
    where there is no such thing.
    """

    q: Any
    k: Any
    v: Any
    table: Any
    documents: Any


def make_inputs(case: FlexCase, device: str = "cuda") -> FlexArrays:
    """Inputs on a device, q, k, v and the bias normal(0, 1)."""
    torch.manual_seed(0)

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    slopes = [2 ** (-8 * (head + 1) / case.h_q) for head in range(case.h_q)]
    tables: dict[str | None, Callable[[], Any]] = {
        "alibi": lambda: torch.tensor(slopes, device=device),
        "bias": lambda: normal(case.h_q, 2 * case.s - 1),
        "scale": lambda: 1 + torch.rand(case.h_q, device=device),
        "scalar": lambda: torch.tensor(1.5, device=device),
    }
    documents = None
    if case.mask == "documents":
        documents = torch.arange(case.s, dtype=torch.int32, device=device) // case.extent
    return FlexArrays(
        normal(case.b, case.h_q, case.s, case.d),
        normal(case.b, case.h_kv, case.s, case.d),
        normal(case.b, case.h_kv, case.s, case.d),
        tables.get(case.score, lambda: None)(),
        documents,
    )


def functions(case: FlexCase, inputs: FlexArrays) -> tuple[Any, Any]:
    """The score and the mask function of a case in Python, None where it has none.

    They read tensors, numbers and modules only: else rawmla could not know them again, and would trace them
    at every call.
    """
    extent, table, documents, last = case.extent, inputs.table, inputs.documents, case.s - 1
    scores: dict[str | None, Any] = {
        "alibi": lambda score, b, h, q_idx, kv_idx: score + table[h] * (kv_idx - q_idx),
        "softcap": lambda score, b, h, q_idx, kv_idx: SOFTCAP * torch.tanh(score / SOFTCAP),
        "bias": lambda score, b, h, q_idx, kv_idx: score + table[h, q_idx - kv_idx + last],
        "scale": lambda score, b, h, q_idx, kv_idx: score * table[h],
        "scalar": lambda score, b, h, q_idx, kv_idx: score * table,
    }
    masks = {
        "causal": causal,
        "window": lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx <= extent),
        "documents": lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (documents[q_idx] == documents[kv_idx]),
        "prefix": lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) | (kv_idx < extent),
    }
    return scores.get(case.score), masks.get(case.mask)


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """The mask that shows a query the keys up to its own."""
    return q_idx >= kv_idx


def attention_of_token(case: FlexCase, inputs: FlexArrays, request: int, token: int) -> tuple[Any, Any, Any]:
    """The definition for one query token of a request in float64: out `[h_q, d]`, lse and the largest score
    `[h_q]`: the check of the timed kernel, which asks no function of the case.
    """
    begin, end = case.visible(token)
    group = case.h_q // case.h_kv
    k, v = (
        array[request, :, begin:end].double().repeat_interleave(group, dim=0)
        for array in (inputs.k, inputs.v)
    )
    scores = torch.einsum("hd,htd->ht", inputs.q[request, :, token].double(), k) * case.d**-0.5
    distance = token - torch.arange(begin, end, device=scores.device)
    if case.score == "alibi":
        scores -= inputs.table.double()[:, None] * distance
    elif case.score == "softcap":
        scores = SOFTCAP * torch.tanh(scores / SOFTCAP)
    elif case.score == "bias":
        scores += inputs.table[:, distance + case.s - 1].double()
    elif case.score in ("scale", "scalar"):
        scores *= inputs.table.double().expand(case.h_q)[:, None]
    lse = scores.logsumexp(1)
    return torch.einsum("ht,htd->hd", (scores - lse[:, None]).exp(), v), lse, scores.amax(1)


@torch.no_grad()
def check_output(case: FlexCase, inputs: FlexArrays, out: Any, further: Any = None) -> float:
    """Largest relative L2 error of the first, a middle and the last query token of the first and the last
    request. `further`: what has lse and max_scores, which are checked too.

    Raises AssertionError at 1 %, of lse and max_scores at 0.001, or NaN: the time of a wrong result means
    nothing.
    """
    worst = 0.0
    for request in {0, case.b - 1}:
        for token in {0, case.s // 2, case.s - 1}:
            want, *wanted = attention_of_token(case, inputs, request, token)
            error = float((out[request, :, token].double() - want).norm() / want.norm())
            assert error < 0.01, f"{case.id}: token {token} of request {request} has an error of {error}"
            worst = max(worst, error)
            if further is None:
                continue
            for name, one in zip(("lse", "max_scores"), wanted, strict=True):
                error = float((getattr(further, name)[request, :, token].double() - one).abs().max())
                where = f"token {token} of request {request}"
                assert error < 0.001, f"{case.id}: {name} of {where} has an error of {error}"
    return worst


def prepare(case: FlexCase) -> Prepared:
    """Inputs of a case, its block mask, and a first call, whose result is checked."""
    inputs = make_inputs(case)
    score, mask = functions(case, inputs)
    if case.cuda_text:
        mask = rawmla.CudaMod("q_idx >= kv_idx")
    block_mask = None
    if mask is not None:
        block_mask = rawmla.create_block_mask(
            mask, None, None, case.s, case.s, device="cuda", BLOCK_SIZE=case.block_size
        )
    wanted = rawmla.AuxRequest(lse=True, max_scores=True) if case.further else None

    def call(_: int) -> Any:
        return rawmla.flex_attention(
            inputs.q,
            inputs.k,
            inputs.v,
            score,
            block_mask,
            enable_gqa=case.h_kv != case.h_q,
            return_aux=wanted,
        )

    results = call(0) if case.further else (call(0),)
    error = check_output(case, inputs, *results)
    return Prepared(inputs, call, 1, error, lambda replays: {}, calls_per_graph(case))


def check_block_mask(case: BlockMaskCase, made: Any) -> None:
    """Check the blocks of a mask against the definition: which are attended, and how many of them are full.

    Raises AssertionError where they differ.
    """
    rows = FlexCase(s=case.s).attended(made.BLOCK_SIZE[0])
    found = [{column for column, one in enumerate(row) if one} for row in made.to_dense()[0, 0].tolist()]
    assert found == rows, f"{case.id}: other blocks than those of the mask"
    full = made.full_kv_num_blocks[0, 0].tolist()  # all but the one on the diagonal
    assert full == [len(row) - 1 for row in rows], f"{case.id}: other full blocks than those of the mask"


def time_block_mask(case: BlockMaskCase, replays: int) -> Row:
    """Measure making a block mask: in a graph, and `call_us`, one call with the wait for its end."""

    def call() -> Any:
        return rawmla.create_block_mask(causal, None, None, case.s, case.s, device="cuda")

    def call_and_wait() -> None:
        call()
        torch.cuda.synchronize()

    check_block_mask(case, call())
    rest()
    timing = time_graph(repeat(lambda _: call(), CALLS_PER_GRAPH), CALLS_PER_GRAPH, replays)
    waited = host_figures("mask", call_and_wait)["mask_call_us"]
    return {"case": case.id, **case.fields(), **vars(timing), "call_us": waited}


def time_host() -> dict[str, float]:
    """Host microseconds of one eager flex call on a small case, warm, with a score and a mask function of
    Python; and the seconds that the first call of another score function takes, whose kernel no cache has.
    """
    case = FlexCase(s=HOST_TOKENS, score="alibi")
    inputs = make_inputs(case)
    score, mask = functions(case, inputs)
    block_mask = rawmla.create_block_mask(mask, None, None, case.s, case.s, device="cuda")

    def call(score_mod: Any = score) -> None:
        rawmla.flex_attention(inputs.q, inputs.k, inputs.v, score_mod, block_mask)

    figures = host_figures("flex", call)
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, RAWMLA_CACHE_DIR=folder):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call(lambda score, b, h, q_idx, kv_idx: score + torch.sin(q_idx - kv_idx))
        torch.cuda.synchronize()
        figures["flex_first_call_s"] = time.perf_counter() - begin
    return figures
