"""MLA decoding, dense and sparse: how it is called, its reference, and its entries of the table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from typing import Any

import torch

from kit import (
    SparseCase,
    SparseInputs,
    check_close,
    lse_tolerance,
    make_sparse_inputs,
    out_tolerance,
    torch_reference,
)
from kit.generators import SHARP_FACTOR
from kit.sparse import INT_MAX
from rawmla.kernels.mla_sparse import FEW_HEADS

from .core import Arguments, Bad, Call, Operation, spoilt, without, wrong_value
from .mla_decode import CALL_NAMES, PLAN_NAMES, QUERY_STRIDES, lengths_to_try

# ---- calls


def sparse_plan_arguments(inputs: SparseInputs) -> tuple[Any, ...]:
    """The arguments of `get_mla_metadata` for a sparse call.

    Bare tensors are planned for a number of indices, the same for every request. Those of an extra cache
    begin a block of their own, so the indices before them count in whole blocks.
    """
    case = inputs.case
    topk = case.topk
    if inputs.extra_k_cache is not None:
        topk = -(-topk // 64) * 64 + case.extra_topk
    lengths = torch.zeros(case.b, dtype=torch.int32, device=inputs.q.device)  # only their number counts
    return lengths, case.s_q * case.h_q, 1, case.h_q, case.layout != "bf16", topk


def sparse_arguments(inputs: SparseInputs) -> tuple[Any, ...]:
    """The first five arguments of `flash_mla_with_kvcache`; the others are `inputs.keywords()`."""
    return inputs.q, inputs.k_cache, None, None, 512


def sparse_decode(
    inputs: SparseInputs, form: str = "object", enable_batch_invariant: bool = False, **kwargs: Any
) -> tuple[Any, ...]:
    """Plan and decode."""
    return sparse_call(inputs).run(form, invariant=enable_batch_invariant, **kwargs)


def sparse_in_batch(inputs: SparseInputs, requests: list[int]) -> SparseInputs:
    """A batch of these requests, in this order, over the same caches."""
    rows = torch.tensor(requests, device=inputs.q.device)
    case = inputs.case
    given = {name: "random" for name in ("lengths", "extra_lengths") if getattr(case, name) is not None}
    names = ("q", "indices", "topk_length", "extra_indices", "extra_topk_length")
    chosen = {name: getattr(inputs, name) for name in names}
    chosen = {name: None if array is None else array[rows] for name, array in chosen.items()}
    return replace(inputs, case=replace(case, b=len(requests), **given), **chosen)


def rounds_keys(case: SparseCase) -> bool:
    """Whether the kernel of a case multiplies keys rounded to bfloat16; else it multiplies exact ones."""
    return not (case.layout == "v32" and case.h_q <= FEW_HEADS)


def sparse_reference(
    inputs: SparseInputs, softmax_scale: float | None = None, *, exact_keys: bool = False
) -> tuple[Any, Any]:
    """The float64 reference with sinks; of the keys that the kernel multiplies, or of exact ones."""
    rounded = rounds_keys(inputs.case) and not exact_keys
    out, lse = torch_reference.sparse_decode(inputs, softmax_scale, rounded_keys=rounded)
    if inputs.attn_sink is not None:
        out = torch_reference.apply_sink(out, lse, inputs.attn_sink)
    return out, lse


def sparse_check(inputs: SparseInputs, got: tuple[Any, Any], want: tuple[Any, Any] | None = None) -> None:
    """Compare a sparse call's (out, lse) with the float64 reference; run after the kernel, never before.

    Keys are those that the kernel multiplies; test_accuracy.py has exact ones for all.
    """
    (out, lse), case = got, inputs.case
    want_out, want_lse = sparse_reference(inputs) if want is None else want
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    check_close(f"{case.id} out", out, want_out, out_tolerance("bfloat16"))
    check_close(f"{case.id} lse", lse, want_lse, lse_tolerance(SHARP_FACTOR if case.sharp else 1.0))


# ---- entries

FULL = 2**20  # longer than any row of indices
EXTRA: Arguments = {"extra_topk": 70, "extra_page_block_size": 2, "extra_lengths": "random"}
SPARSE_SHAPE: Arguments = {"b": 4, "s_q": 2, "h_q": 16, "s_k": 300, "topk": 133, "page_block_size": 53}
WITH_EXTRA: Arguments = {"layout": "model1", "s_q": 2, "h_q": 64, "sink": True, "extra_page_block_size": 2}
SMALL_EXTRA: Arguments = {**WITH_EXTRA, "h_q": 9, "s_k": 200, "page_block_size": 61, "extra_s_k": 100}
FULL_12: Arguments = {"b": 12, "lengths": (FULL,) * 12, "extra_lengths": (FULL,) * 12}
RANDOM: Arguments = {"lengths": "random", "extra_lengths": "random"}
SPARSE_CASES: dict[str, tuple[SparseCase, ...]] = {
    "v32": (
        SparseCase(b=4, s_q=3, h_q=128, topk=133, lengths="random", sink=True, **EXTRA),
        SparseCase(
            **SPARSE_SHAPE, lengths="random", sink=True, block_gap=1, index_gap=3, power_of_two_scales=True
        ),
    ),
    "model1": (
        SparseCase(**SPARSE_SHAPE, **EXTRA, layout="model1", block_gap=1, lengths="random", sink=True),
        SparseCase(b=5, s_q=2, h_q=64, s_k=200, topk=130, layout="model1"),
    ),
    "bf16": (
        SparseCase(
            b=4, s_q=2, h_q=64, s_k=300, topk=200, layout="bf16", lengths="random", sink=True, **EXTRA
        ),
        SparseCase(**SPARSE_SHAPE, layout="bf16", d_qk=512, empty_rows=0.3),
    ),
}
SPARSE_RERUN_CASES = {
    "v32": (
        SparseCase(b=7, s_q=2, h_q=16, s_k=3000, topk=2048, lengths="random", sink=True),
        SparseCase(b=74, s_q=2, h_q=128, s_k=1000, topk=576, empty_rows=0.1, page_block_size=61),
    ),
    "model1": (
        SparseCase(b=1, h_q=128, s_k=20000, topk=16384, layout="model1", sharp=True),
        SparseCase(b=64, topk=128, block_gap=1, extra_topk=500, extra_s_k=900, **WITH_EXTRA, **RANDOM),
    ),
    "bf16": (
        SparseCase(b=33, h_q=66, s_k=2500, topk=2051, layout="bf16", d_qk=576),
        SparseCase(b=5, s_q=3, h_q=9, s_k=700, topk=600, layout="bf16", d_qk=512),
    ),
}
SPARSE_GRAPH_CASES = {
    "v32": (SparseCase(b=6, s_q=2, h_q=16, s_k=2500, topk=2048, lengths=(FULL,) * 6),),
    "model1": (
        SparseCase(b=1, h_q=128, s_k=9000, topk=8192, layout="model1", lengths=(FULL,), sink=True),
        SparseCase(s_k=700, topk=130, block_gap=1, extra_s_k=1000, extra_topk=700, **WITH_EXTRA, **FULL_12),
    ),
    "bf16": (SparseCase(b=70, h_q=66, s_k=900, topk=600, layout="bf16", d_qk=576, lengths=(FULL,) * 70),),
}
SPARSE_INVARIANT_CASES = {
    "v32": (
        SparseCase(b=200, h_q=16, s_k=2100, topk=2048, lengths="random", empty_rows=0.1),
        SparseCase(
            b=8, h_q=128, s_k=20000, topk=16384, lengths=(16384, 1, 0, 64, 12345, 2048, 2049, 513), sink=True
        ),
    ),
    "model1": (
        SparseCase(b=64, topk=300, sharp=True, extra_topk=1500, extra_s_k=1600, **WITH_EXTRA, **RANDOM),
    ),
    "bf16": (
        SparseCase(b=64, s_q=2, h_q=128, s_k=1500, topk=1000, lengths="random", layout="bf16", d_qk=512),
    ),
}
SPARSE_SMALL_CASES = {
    "v32": (
        SparseCase(b=1, h_q=1, s_k=1, topk=1, page_block_size=1, invalid=0.0, power_of_two_scales=True),
        SparseCase(b=2, s_q=2, h_q=16, s_k=90, topk=70, page_block_size=2, lengths=(0, 70), index_gap=1),
        SparseCase(b=2, h_q=66, s_k=300, topk=200, sink=True, block_gap=1, empty_rows=0.5, seed=1),
        SparseCase(b=2, h_q=64, s_k=100, topk=33, extra_s_k=70, extra_topk=1, extra_page_block_size=64),
    ),
    "model1": (
        SparseCase(b=1, h_q=128, s_k=700, topk=650, layout="model1", page_block_size=53, sharp=True),
        SparseCase(
            **SMALL_EXTRA,
            b=3,
            topk=130,
            block_gap=1,
            lengths=(1, 0, 300),
            extra_topk=65,
            extra_lengths=(0, 0, 64),
        ),
    ),
    "bf16": (
        SparseCase(b=2, s_q=2, h_q=16, s_k=150, topk=133, layout="bf16", d_qk=576, page_block_size=7),
        SparseCase(b=2, h_q=63, s_k=150, topk=64, layout="bf16", d_qk=512, block_gap=1, sink=True),
    ),
}
SPARSE_KERNELS = {
    "v32": ("mla_sparse_fp8_few_heads", "mla_sparse_fp8["),
    "model1": ("mla_sparse_fp8[",),
    "bf16": ("mla_sparse_bf16",),
}
CLUSTER_KERNELS = ("mla_sparse_fp8_cluster",)


def for_clusters(cases: tuple[SparseCase, ...]) -> tuple[SparseCase, ...]:
    """The cases with two and four tiles of 64 heads: the kernel for clusters takes even numbers."""
    return tuple(replace(case, h_q=heads) for case, heads in zip(cases, cycle((128, 256)), strict=False))


def sparse_call(inputs: SparseInputs) -> Call:
    """The call of sparse decoding."""
    return Call(
        "flash_mla_with_kvcache",
        {**dict(zip(CALL_NAMES, sparse_arguments(inputs), strict=True)), **inputs.keywords()},
        ("out", "softmax_lse"),
        lambda got: sparse_check(inputs, (got[0], got[1])),
        inputs,
        dict(zip(PLAN_NAMES, sparse_plan_arguments(inputs), strict=True)),
    )


def make_sparse_call(case: SparseCase, device: str = "cuda") -> Call:
    """The call of a case."""
    return sparse_call(make_sparse_inputs(case, "torch", device))


def sparse_changes(call: Call) -> Iterator[None]:
    """New lengths, those of an extra cache the reversed share, and shuffled rows of indices. Past the lengths
    indices name slot 0, which is poison, or nothing.
    """
    inputs = call.inputs
    case = inputs.case
    device = inputs.q.device
    draw = torch.Generator(device).manual_seed(5)
    sources = [(inputs.indices, inputs.topk_length)]
    if case.extra_topk:
        sources.append((inputs.extra_indices, inputs.extra_topk_length))
    valid = [indices.clone() for indices, _ in sources]
    for lengths in lengths_to_try([case.topk] * case.b):
        shares = [[length / case.topk for length in lengths]]
        shares.append(shares[0][::-1])
        for (indices, length), chosen, share in zip(sources, valid, shares, strict=False):
            width = indices.shape[2]
            order = torch.rand(indices.shape, generator=draw, device=device).argsort(dim=2)
            new = torch.tensor([round(part * width) for part in share], dtype=torch.int32, device=device)
            past = torch.arange(width, device=device) >= new[:, None, None]
            nowhere = torch.where(order % 2 == 0, 0, INT_MAX)
            indices.copy_(torch.where(past, nowhere, chosen.gather(2, order)))
            length.copy_(new)
        yield


SPARSE_BAD: dict[str, Bad] = {
    "causal": wrong_value("causal", True),
    "q float16": spoilt("q", lambda x: x.half(), TypeError),
    "one length too few": spoilt("topk_length", lambda x: x[:-1]),
    "one sink too few": spoilt("attn_sink", lambda x: x[:-1]),
    "head_dim_v 256": wrong_value("head_dim_v", 256),
    "scale 0": wrong_value("softmax_scale", 0.0),
    "no columns of indices": spoilt("indices", lambda x: x[..., :0]),
    "indices of another batch": spoilt("indices", lambda x: x[:-1]),
    "plan of 7 columns": spoilt("tile_scheduler_metadata", lambda x: x[:, :7].contiguous()),
    "num_splits too short": spoilt("num_splits", lambda x: x[:-1]),
}


def sparse_floats(case: SparseCase) -> tuple[str, ...]:
    """FP8 caches are bytes."""
    rows = case.layout == "bf16"
    given = {"q": True, "attn_sink": case.sink, "k_cache": rows, "extra_k_cache": rows and case.extra_topk}
    return tuple(name for name, there in given.items() if there)


def sparse_operation(layout: str, *, clusters: bool = False) -> Operation:
    """Sparse decoding over one kind of cache, or forced to the kernel for clusters, with cases for it."""

    def suited(cases: tuple[SparseCase, ...]) -> tuple[SparseCase, ...]:
        return for_clusters(cases) if clusters else cases

    per_request = ("q", "indices", "topk_length", "extra_indices_in_kvcache", "extra_topk_length")
    per_token = ("q", "indices", "extra_indices_in_kvcache")
    rows = ("wide", "columns", "permuted", "unaligned", "odd")
    small_cases = SPARSE_SMALL_CASES[layout]
    if clusters:
        small_cases = for_clusters(tuple(case for case in small_cases if case.h_q > 64)[:1])
    return Operation(
        name=f"sparse_{layout}" + "_clusters" * clusters,
        make=make_sparse_call,
        cases=suited(SPARSE_CASES[layout]),
        arrays=(
            "q",
            "k_cache",
            "indices",
            "attn_sink",
            "extra_k_cache",
            "extra_indices_in_kvcache",
            "topk_length",
            "extra_topk_length",
        ),
        floats=sparse_floats,
        small_cases=small_cases,
        kernels=CLUSTER_KERNELS if clusters else SPARSE_KERNELS[layout],
        rerun_cases=suited(SPARSE_RERUN_CASES[layout]),
        graph_cases=suited(SPARSE_GRAPH_CASES[layout]),
        invariant_cases=suited(SPARSE_INVARIANT_CASES[layout]),
        strides={"q": QUERY_STRIDES, "indices": rows, "extra_indices_in_kvcache": rows},
        out=lambda out: ((1, 1), (1, 1), (8, 16), (8, 8)),
        empty={
            "no requests": (without(*per_request), {"out": 0, "softmax_lse": 0}),
            "no query tokens": (without(*per_token, axis=1), {"out": 1, "softmax_lse": 2}),
        },
        bad=SPARSE_BAD,
        changes=sparse_changes,
        part=lambda call, requests: sparse_call(sparse_in_batch(call.inputs, requests)),
        plan_serves_all_lengths=True,
        clusters=clusters,
    )
