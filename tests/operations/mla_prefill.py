"""MLA decoding, dense and sparse: how it is called, its reference, and its entries of the table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from kit import (
    SparseCase,
    SparseInputs,
    check_close,
    make_sparse_inputs,
    prefill_lse_tolerance,
    prefill_out_tolerance,
    torch_reference,
)
from kit.generators import SHARP_FACTOR
from kit.sparse import INT_MAX, block_fields

from .core import Arguments, Call, Operation, spoilt, without, wrong_value
from .mla_decode import QUERY_STRIDES
from .mla_sparse import CLUSTER_KERNELS, rounds_keys

# ---- calls


def prefill(inputs: SparseInputs, sm_scale: float | None = None, **kwargs: Any) -> tuple[Any, ...]:
    """Prefill the requests of a sparse case, of one query token each."""
    return prefill_call(inputs).run(**({} if sm_scale is None else {"sm_scale": sm_scale}), **kwargs)


def prefill_reference(inputs: SparseInputs, sm_scale: float | None = None) -> tuple[Any, Any, Any]:
    """The float64 reference of a prefill call, of the keys that its kernel multiplies."""
    return torch_reference.sparse_prefill(inputs, sm_scale, rounded_keys=rounds_keys(inputs.case))


def prefill_check(
    inputs: SparseInputs, got: tuple[Any, Any, Any], want: tuple[Any, Any, Any] | None = None
) -> None:
    """Compare (out, max_logits, lse) with the float64 reference; run after the kernel, never before."""
    case = inputs.case
    want = prefill_reference(inputs) if want is None else want
    assert [x.dtype for x in got] == [torch.bfloat16, torch.float32, torch.float32]
    assert got[1].is_contiguous() and got[2].is_contiguous()
    scores = prefill_lse_tolerance(SHARP_FACTOR if case.sharp else 1.0)
    tolerances = (prefill_out_tolerance(), scores, scores)
    for name, one, wanted, tolerance in zip(("out", "max_logits", "lse"), got, want, tolerances, strict=True):
        check_close(f"{case.id} {name}", one, wanted, tolerance)


# ---- entries

PREFILL_KINDS: dict[str, Arguments] = {
    "bf16": {"layout": "bf16", "d_qk": 576, "page_block_size": 1, "shared": True},
    "bf16_512": {"layout": "bf16", "d_qk": 512, "page_block_size": 1, "shared": True},
    "v32": {"layout": "v32", "page_block_size": 53, "power_of_two_scales": True, "shared": True},
    "model1": {"layout": "model1", "page_block_size": 61, "shared": True},
}
BF16, BF16_512, V32, MODEL1 = PREFILL_KINDS.values()
PREFILL_SHAPES: tuple[Arguments, ...] = (
    {"b": 9, "h_q": 16, "s_k": 300, "topk": 133, "lengths": "random", "sink": True},
    {"b": 200, "h_q": 128, "s_k": 300, "topk": 200, "lengths": "random", "sink": True, "empty_rows": 0.2},
)
PREFILL_RERUN_CASES = {
    "bf16": (
        SparseCase(b=1, h_q=128, s_k=9000, topk=8192, **BF16),
        SparseCase(b=500, h_q=66, s_k=1000, topk=576, empty_rows=0.1, **BF16_512),
        SparseCase(b=20_000, h_q=3, s_k=300, topk=130, lengths="random", **BF16),
    ),
    "v32": (SparseCase(b=7, h_q=16, s_k=3000, topk=2048, lengths="random", sink=True, **V32),),
    "model1": (SparseCase(b=40, h_q=64, s_k=900, topk=500, **MODEL1),),
}
# Few tokens over many rows: a cache whose rows are selected often is copied to bf16 rows first.
PREFILL_CLUSTER_SHAPES: tuple[Arguments, ...] = (
    {"b": 9, "h_q": 128, "s_k": 300, "topk": 133, "lengths": "random", "sink": True},
    {"b": 15, "h_q": 256, "s_k": 500, "topk": 200, "lengths": "random", "sink": True, "empty_rows": 0.2},
)
PREFILL_CLUSTER_RERUN_CASES = {
    "v32": (SparseCase(b=7, h_q=128, s_k=3000, topk=2048, lengths="random", sink=True, **V32),),
    "model1": (SparseCase(b=40, h_q=256, s_k=3000, topk=500, **MODEL1),),
}
PREFILL_SMALL_CASES = {
    "bf16": (
        SparseCase(b=1, h_q=1, s_k=1, topk=1, invalid=0.0, **BF16),
        SparseCase(b=3, h_q=16, s_k=90, topk=70, lengths=(0, 70, 1), index_gap=1, **BF16),
        SparseCase(b=2, h_q=66, s_k=300, topk=200, sink=True, block_gap=1, empty_rows=0.5, seed=1, **BF16),
        SparseCase(b=1, h_q=128, s_k=700, topk=650, **BF16_512),
        SparseCase(b=150, h_q=9, s_k=60, topk=65, lengths="random", sink=True, **BF16),
    ),
    "v32": (
        SparseCase(b=2, h_q=16, s_k=300, topk=200, **{**V32, "page_block_size": 7}),
        SparseCase(b=2, h_q=64, s_k=100, topk=33, block_gap=1, **{**V32, "page_block_size": 2}),
    ),
    "model1": (
        SparseCase(b=2, h_q=63, s_k=300, topk=133, sink=True, **MODEL1),
        SparseCase(b=30, h_q=33, s_k=50, topk=40, block_gap=1, **{**MODEL1, "page_block_size": 7}),
    ),
}
PREFILL_CLUSTER_SMALL_CASES = {
    "v32": (SparseCase(b=3, h_q=80, s_k=200, topk=150, sink=True, **V32),),
    "model1": (SparseCase(b=3, h_q=128, s_k=200, topk=150, lengths=(0, 150, 60), **MODEL1),),
}
PREFILL_KERNELS = {
    "bf16": ("mla_sparse_bf16",),
    "v32": ("mla_sparse_fp8_few_heads", "mla_sparse_fp8["),
    "model1": ("mla_sparse_fp8[", "mla_cache_gather", "mla_sparse_bf16"),
}


def prefill_call(inputs: SparseInputs) -> Call:
    """The call of sparse prefill. Its kv is rows of a bf16 cache of pages of one token, or a whole cache."""
    rows = inputs.case.layout == "bf16"
    return Call(
        "flash_mla_sparse_fwd",
        {
            "q": inputs.q[:, 0],
            "kv": inputs.k_cache[:, 0] if rows else inputs.k_cache,
            "indices": inputs.indices,
            "sm_scale": inputs.case.width**-0.5,
            "attn_sink": inputs.attn_sink,
            "topk_length": inputs.topk_length,
            "is_fp8_kvcache": not rows,
        },
        ("out", "max_logits", "lse"),
        lambda got: prefill_check(inputs, (got[0], got[1], got[2])),
        inputs,
    )


def make_prefill_call(case: SparseCase, device: str = "cuda") -> Call:
    """The call of a case."""
    return prefill_call(make_sparse_inputs(case, "torch", device))


def prefill_changes(call: Call) -> Iterator[None]:
    """New lengths and shuffled rows of indices."""
    inputs = call.inputs
    case = inputs.case
    device = inputs.q.device
    draw = torch.Generator(device).manual_seed(5)
    alive = live_rows(inputs)
    for share in (1.0, 0.0, 0.3, 1.0):
        lengths = torch.rand(case.b, generator=draw, device=device).add(share).clamp(max=1.0)
        inputs.topk_length.copy_((lengths * case.topk * share).int())
        order = torch.rand(alive.shape, generator=draw, device=device).argsort(dim=2)
        counted = torch.arange(case.topk, device=device) < inputs.topk_length[:, None, None]
        inputs.indices.copy_(torch.where(counted, alive.gather(2, order), INT_MAX))
        yield


def live_rows(inputs: SparseInputs) -> Any:
    """The indices, -1 in place of those that name poison, as those past a length do."""
    form, slots = inputs.case.format, inputs.k_cache.shape[0] * inputs.k_cache.shape[1]
    rows, _ = block_fields(inputs.k_cache.view(torch.uint8), form)
    rope = rows[..., form.rope_offset :][..., : 2 * form.rope].contiguous().view(torch.bfloat16)
    alive = rope.isfinite().all(dim=-1).reshape(-1)
    assert len(alive) == slots
    valid = (inputs.indices >= 0) & (inputs.indices < slots)
    return torch.where(valid & alive[inputs.indices.long().masked_fill(~valid, 0)], inputs.indices, -1)


def prefill_operation(layout: str, *, clusters: bool = False) -> Operation:
    """Sparse prefill over one kind of kv, or forced to the kernel for clusters, with cases for it."""
    kinds = [kind for kind in PREFILL_KINDS.values() if kind["layout"] == layout]
    shapes = PREFILL_CLUSTER_SHAPES if clusters else PREFILL_SHAPES
    reruns = (PREFILL_CLUSTER_RERUN_CASES if clusters else PREFILL_RERUN_CASES)[layout]
    per_token = ("q", "indices", "topk_length")
    return Operation(
        name=f"prefill_{layout}" + "_clusters" * clusters,
        make=make_prefill_call,
        cases=tuple(SparseCase(**shape, **kind) for kind in kinds for shape in shapes),
        arrays=("q", "kv", "indices", "attn_sink", "topk_length"),
        floats=lambda case: ("q", "attn_sink", *(("kv",) if layout == "bf16" else ())),
        small_cases=(PREFILL_CLUSTER_SMALL_CASES if clusters else PREFILL_SMALL_CASES)[layout],
        kernels=CLUSTER_KERNELS if clusters else PREFILL_KERNELS[layout],
        rerun_cases=reruns,
        graph_cases=tuple(replace(case, lengths="random") for case in reruns),
        strides={
            "q": QUERY_STRIDES,
            "indices": ("wide", "columns", "unaligned", "odd"),
            **({"kv": ("wide", "columns")} if layout == "bf16" else {}),
        },
        out=lambda out: ((1, 1), (8, 16), (8, 8)),
        empty={"no query tokens": (without(*per_token), {"out": 0, "max_logits": 0, "lse": 0})},
        bad={
            "d_v 256": wrong_value("d_v", 256),
            "scale 0": wrong_value("sm_scale", 0.0),
            "no scale": wrong_value("sm_scale", None, TypeError),
            "another base": wrong_value("log_base", "10"),
            "q float16": spoilt("q", lambda x: x.half(), TypeError),
            "one length too few": spoilt("topk_length", lambda x: x[:-1]),
            "one sink too few": spoilt("attn_sink", lambda x: x[:-1]),
            "no columns of indices": spoilt("indices", lambda x: x[..., :0]),
            "indices of other tokens": spoilt("indices", lambda x: x[:-1]),
        },
        changes=prefill_changes,
        clusters=clusters,
    )
