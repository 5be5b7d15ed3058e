"""MLA decoding, dense and sparse: how it is called, its reference, and its entries of the table."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from kit import (
    DenseCase,
    DenseInputs,
    check_close,
    lse_tolerance,
    make_dense_inputs,
    out_tolerance,
    torch_reference,
)
from kit.generators import GARBAGE_PAGE, SHARP_FACTOR

from .core import Bad, Call, Operation, spoilt, without, wrong_value

PLAN_NAMES = (
    "cache_seqlens",
    "num_q_tokens_per_head_k",
    "num_heads_k",
    "num_heads_q",
    "is_fp8_kvcache",
    "topk",
)


CALL_NAMES = ("q", "k_cache", "block_table", "cache_seqlens", "head_dim_v")

# ---- dense decoding: calls


def plan(inputs: DenseInputs, form: str, **kwargs: Any) -> tuple[Any, Any]:
    """Scheduling metadata for a call: `form` "object" (filled in by the call) or "tensors"."""
    return dense_call(inputs).make_plan(form, **kwargs)


def decode(
    inputs: DenseInputs, form: str = "tensors", enable_batch_invariant: bool = False, **kwargs: Any
) -> tuple[Any, ...]:
    """Plan and decode."""
    return dense_call(inputs).run(form, invariant=enable_batch_invariant, **kwargs)


def in_batch(inputs: DenseInputs, requests: list[int]) -> DenseInputs:
    """A batch of these requests, in this order, over the same cache."""
    rows = torch.tensor(requests, device=inputs.q.device)
    lengths = [inputs.lengths[i] for i in requests]
    return DenseInputs(
        case=replace(inputs.case, b=len(requests), lengths=tuple(lengths)),
        q=inputs.q[rows],
        k_cache=inputs.k_cache,
        block_table=inputs.block_table[rows],
        cache_seqlens=inputs.cache_seqlens[rows],
        lengths=lengths,
    )


def as_pair(q: Any) -> tuple[Any, Any]:
    """q in two arrays, each with an allocation of its own."""
    return q[..., :-64].contiguous(), q[..., -64:].contiguous()


def call_arguments(inputs: DenseInputs) -> tuple[Any, ...]:
    """The first five arguments of `flash_mla_with_kvcache`."""
    return inputs.q, inputs.k_cache, inputs.block_table, inputs.cache_seqlens, 512


def reference(inputs: DenseInputs, **kwargs: Any) -> tuple[Any, Any]:
    """The float64 reference of a call."""
    return torch_reference.flash_mla_with_kvcache(
        *call_arguments(inputs)[:4], causal=inputs.case.causal, **kwargs
    )


def check(inputs: DenseInputs, got: tuple[Any, Any], want: tuple[Any, Any] | None = None) -> None:
    """Compare a call's (out, lse) with the float64 reference; run after the kernel, never before."""
    case = inputs.case
    out, lse = got
    want_out, want_lse = reference(inputs) if want is None else want
    assert str(out.dtype) == f"torch.{case.dtype}" and lse.dtype == torch.float32
    check_close(f"{case.id} out", out, want_out, out_tolerance(case.dtype))
    check_close(f"{case.id} lse", lse, want_lse, lse_tolerance(SHARP_FACTOR if case.sharp else 1.0))


# ---- dense decoding

DENSE_CASES = (
    DenseCase(b=5, s_q=2, h_q=16, s_k=700, varlen=True, causal=True, zero_lengths=True, seed=3),
    DenseCase(b=2, h_q=128, s_k=2000, dtype="float16", sharp=True, page_block_size=16),
    DenseCase(b=3, h_q=12, h_kv=2, d_qk=512, s_k=300, varlen=True),
    DenseCase(b=4, s_q=3, h_q=128, s_k=500, varlen=True, causal=True),
)
DENSE_RERUN_CASES = (
    DenseCase(b=1, h_q=128, s_k=20000, sharp=True),
    DenseCase(b=7, s_q=2, h_q=16, s_k=3000, varlen=True, causal=True),
    DenseCase(b=64, s_q=2, h_q=128, s_k=2000, varlen=True, zero_lengths=True, causal=True, sharp=True),
    DenseCase(b=5, s_q=4, h_q=126, h_kv=2, s_k=1500, varlen=True, dtype="float16", page_block_size=16),
    DenseCase(b=33, h_q=64, d_qk=512, s_k=1500, varlen=True, page_block_size=256),
)
DENSE_GRAPH_CASES = (
    DenseCase(b=1, h_q=128, s_k=9000),
    DenseCase(b=6, s_q=2, h_q=16, s_k=2500, causal=True),
    DenseCase(b=12, s_q=2, h_q=128, s_k=2500, causal=True, sharp=True, page_block_size=16, dtype="float16"),
    DenseCase(b=70, h_q=64, s_k=1000, page_block_size=256),
)
DENSE_INVARIANT_CASES = (
    DenseCase(b=256, h_q=16, s_k=1500, varlen=True, zero_lengths=True),
    DenseCase(b=256, h_q=128, s_k=1500, varlen=True, sharp=True),
    DenseCase(b=64, s_q=3, h_q=64, s_k=3000, varlen=True, causal=True, dtype="float16"),
    DenseCase(b=32, s_q=2, h_q=12, h_kv=3, d_qk=512, s_k=3000, varlen=True, page_block_size=16),
    DenseCase(b=8, h_q=128, lengths=(40000, 1, 0, 64, 12345, 2048, 2049, 513), sharp=True),
)
DENSE_SMALL_CASES = (
    DenseCase(b=1, h_q=1, lengths=(1,)),
    DenseCase(b=2, h_q=16, lengths=(0, 0)),
    DenseCase(b=3, s_q=2, h_q=16, lengths=(0, 63, 129), causal=True),
    DenseCase(b=1, h_q=128, lengths=(700,)),
    DenseCase(b=2, s_q=2, h_q=128, lengths=(1, 400), causal=True, dtype="float16"),
    DenseCase(b=2, s_q=4, h_q=9, h_kv=3, lengths=(3, 200), causal=True, page_block_size=16),
    DenseCase(b=2, h_q=63, lengths=(65, 300), d_qk=512, page_block_size=32),
    DenseCase(b=3, h_q=64, lengths=(17, 0, 520), page_block_size=256, dtype="float16", d_qk=512),
    DenseCase(b=4, h_q=16, lengths=(100, 250, 64, 30), block_gap=8, table_gap=3),
)


def dense_call(inputs: DenseInputs) -> Call:
    """The call of dense decoding."""
    case = inputs.case
    plan = (inputs.cache_seqlens, case.s_q * case.h_q // case.h_kv, case.h_kv, case.h_q)
    return Call(
        "flash_mla_with_kvcache",
        {**dict(zip(CALL_NAMES, call_arguments(inputs), strict=True)), "causal": case.causal},
        ("out", "softmax_lse"),
        lambda got: check(inputs, (got[0], got[1])),
        inputs,
        dict(zip(PLAN_NAMES, plan, strict=False)),
    )


def make_dense_call(case: DenseCase, device: str = "cuda") -> Call:
    """The call of a case."""
    return dense_call(make_dense_inputs(case, "torch", device))


def lengths_to_try(full: list[int]) -> list[list[int]]:
    """Lengths that a batch may have from replay to replay: none, all, some, and few of them."""
    draw = random.Random(7)
    some = [draw.randint(0, length) for length in full]
    one = [0] * (len(full) - 1) + [full[-1]]
    zero = [0] * len(full)
    short = [min(length, 1 + i % 3) for i, length in enumerate(full)]
    return [zero, full, zero, some, one, short, full, full, some]


def dense_changes(call: Call) -> Iterator[None]:
    """New lengths; tokens and entries of the block table past them are poisoned."""
    inputs = call.inputs
    cache, table, full = inputs.k_cache.clone(), inputs.block_table.clone(), list(inputs.lengths)
    page = inputs.case.page_block_size
    device = table.device
    token = torch.arange(table.shape[1] * page, device=device).expand(len(full), -1)
    column = torch.arange(table.shape[1], device=device)
    for lengths in lengths_to_try(full):
        new = torch.tensor(lengths, dtype=torch.int32, device=device)
        inputs.cache_seqlens.copy_(new)
        inputs.k_cache.copy_(cache)
        past = (token >= new[:, None]) & (token < torch.tensor(full, device=device)[:, None])
        request, position = past.nonzero(as_tuple=True)
        inputs.k_cache[table[request, position // page].long(), position % page] = float("nan")
        inputs.block_table.copy_(table.masked_fill(column * page >= new[:, None], GARBAGE_PAGE))
        inputs.lengths = lengths
        yield


DENSE_BAD: dict[str, Bad] = {
    "q float32": spoilt("q", lambda x: x.float(), TypeError),
    "k_cache of another dtype": spoilt("k_cache", lambda x: x.half(), TypeError),
    "d_qk 320": spoilt("q", lambda x: x[..., :320]),
    "k_cache of another d_qk": spoilt("k_cache", lambda x: x[..., :512]),
    "page of 48 tokens": spoilt("k_cache", lambda x: x[:, :48]),
    "k_cache with odd strides": spoilt("k_cache", lambda x: torch.nn.functional.pad(x, (0, 1))[..., :576]),
    "one table row too few": spoilt("block_table", lambda x: x[:-1]),
    "one length too few": spoilt("cache_seqlens", lambda x: x[:-1]),
    "head_dim_v 256": wrong_value("head_dim_v", 256),
    "scale 0": wrong_value("softmax_scale", 0.0),
    "scale NaN": wrong_value("softmax_scale", float("nan")),
    "plan of 7 columns": spoilt("tile_scheduler_metadata", lambda x: x[:, :7].contiguous()),
    "plan of int64": spoilt("tile_scheduler_metadata", lambda x: x.long(), TypeError),
    "num_splits missing": wrong_value("num_splits", None),
    "num_splits too short": spoilt("num_splits", lambda x: x[:-1]),
    "topk_length without indices": (ValueError, "topk_length", lambda a: {"topk_length": a["cache_seqlens"]}),
    "indices with causal": (
        ValueError,
        "causal",
        lambda a: {"indices": torch.zeros(5, 2, 64, dtype=torch.int32, device=a["q"].device)},
    ),
    "FP8 without indices": wrong_value("is_fp8_kvcache", True, NotImplementedError),
}

QUERY_STRIDES = ("wide", "columns", "permuted", "unaligned", "odd")

DENSE = Operation(
    name="dense",
    make=make_dense_call,
    cases=DENSE_CASES,
    arrays=("q", "k_cache", "block_table", "cache_seqlens"),
    floats=lambda case: ("q", "k_cache"),
    small_cases=DENSE_SMALL_CASES,
    kernels=(
        *("mla_dense_decode[BOX_ROWS=64,CLUSTER=1", "mla_dense_decode[BOX_ROWS=64,CLUSTER=2"),
        *("mla_dense_decode[BOX_ROWS=32,CLUSTER=1", "mla_dense_decode_few_rows", "mla_combine"),
    ),
    rerun_cases=DENSE_RERUN_CASES,
    graph_cases=DENSE_GRAPH_CASES,
    invariant_cases=DENSE_INVARIANT_CASES,
    strides={"q": QUERY_STRIDES, "block_table": ("columns", "odd")},
    out=lambda out: ((1, 1), (1, 1), (8, 16), (8, 8)),
    empty={
        "no requests": (without("q", "block_table", "cache_seqlens"), {"out": 0, "softmax_lse": 0}),
        "no query tokens": (without("q", axis=1), {"out": 1, "softmax_lse": 2}),
    },
    bad=DENSE_BAD,
    changes=dense_changes,
    part=lambda call, requests: dense_call(in_batch(call.inputs, requests)),
)
