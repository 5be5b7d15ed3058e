"""Sparse decoding on the GPU, made ready to be timed by `measure`."""

from dataclasses import dataclass
from typing import Any

import torch

import rawmla
from kit import torch_reference
from kit.sparse import SparseCase as Layout
from kit.sparse import SparseInputs, make_cache

from .cases import D_V, SparseCase
from .measure import METADATA_GRAPH_CALLS, Prepared, l2_bytes, rotated_sets
from .timing import slope


@dataclass(frozen=True)
class SparseArrays:
    """Device arrays of a sparse case. `index_sets` holds one pair (indices, extra indices) per rotated set of
    pages; set 0 is the plain case. What the case does not have is None.
    """

    q: Any
    k_cache: Any
    extra_k_cache: Any
    index_sets: list[tuple[Any, Any]]
    extra_topk_length: Any

    def keywords(self, case: SparseCase, number: int) -> dict[str, Any]:
        """The keyword arguments of a decode call over one of the sets."""
        indices, extra_indices = self.index_sets[number]
        return {
            "is_fp8_kvcache": case.layout != "bf16",
            "indices": indices,
            "extra_k_cache": self.extra_k_cache,
            "extra_indices_in_kvcache": extra_indices,
            "extra_topk_length": self.extra_topk_length,
        }


def make_inputs(case: SparseCase, sets: int = 1, device: str = "cuda") -> SparseArrays:
    """Inputs on a device: q normal(0, 1) clamped to [-1, 1], caches normal(0, 0.1) and quantised, pages in a
    random order, indices a random subset of the request's tokens.

    `sets` disjoint sets of pages hold as many caches, for runs whose data must not stay in L2.
    """
    torch.manual_seed(0)
    q = torch.randn(case.b, case.s_q, case.h_q, case.d_qk, device=device).clamp_(-1, 1).bfloat16()
    k_cache, indices = _cache_and_indices(case, case.page_block_size, case.topk, sets, device)
    extra_k_cache, extra_indices = None, [None] * sets
    if case.extra_topk:
        extra = (case.extra_page_block_size, case.extra_topk)
        extra_k_cache, extra_indices = _cache_and_indices(case, *extra, sets, device)
    lengths = case.extra_lengths()
    return SparseArrays(
        q,
        k_cache,
        extra_k_cache,
        list(zip(indices, extra_indices, strict=True)),
        None if lengths is None else torch.tensor(lengths, dtype=torch.int32, device=device),
    )


def _layout(case: SparseCase) -> Layout:
    """The case as the test tools know it. Blocks of MODEL1 are padded to a multiple of 576 bytes."""
    return Layout(
        b=case.b,
        s_q=case.s_q,
        h_q=case.h_q,
        layout=case.layout,
        d_qk=case.d_qk,
        block_gap=1 if case.layout == "model1" else 0,
    )


def _cache_and_indices(
    case: SparseCase, page: int, topk: int, sets: int, device: str
) -> tuple[Any, list[Any]]:
    pages = -(-case.s_k // page)
    k_cache = make_cache(_layout(case), sets * case.b * pages, page, device)
    tables = torch.randperm(len(k_cache), device=device).view(sets, case.b, 1, pages)
    found = []
    for table in tables:
        order = torch.rand(case.b, case.s_q, case.s_k, device=device).argsort(dim=2)
        token = order[..., :topk]
        block = table.expand(-1, case.s_q, -1).gather(2, token // page)
        found.append((block * page + token % page).int())
    return k_cache, found


def check_output(case: SparseCase, inputs: SparseArrays, out: Any) -> float:
    """Relative L2 error of the first and the last request against float64.

    Raises AssertionError at 1 % or NaN: the time of a wrong result means nothing.
    """
    worst = 0.0
    for request in {0, case.b - 1}:
        part = slice(request, request + 1)
        indices, extra_indices = inputs.index_sets[0]
        lengths = inputs.extra_topk_length
        chosen = SparseInputs(
            _layout(case),
            q=inputs.q[part],
            k_cache=inputs.k_cache,
            indices=indices[part],
            extra_k_cache=inputs.extra_k_cache,
            extra_indices=None if extra_indices is None else extra_indices[part],
            extra_topk_length=None if lengths is None else lengths[part],
        )
        want, _ = torch_reference.sparse_decode(chosen)
        error = float((out[part].double() - want).norm() / want.norm())
        assert error < 0.01, f"{case.id}: request {request} has a relative error of {error}"
        worst = max(worst, error)
    return worst


def time_plan(case: SparseCase, replays: int) -> float:
    """Microseconds of one metadata kernel, as for dense decoding."""
    requests = torch.zeros(case.b, dtype=torch.int32, device="cuda")
    blocks = -(-case.topk // 64) + -(-case.extra_topk // 64)
    arguments = (requests, case.s_q * case.h_q, 1, case.h_q, case.layout != "bf16", 64 * blocks)
    buffers = rawmla.get_mla_metadata(*arguments, enable_batch_invariant=case.batch_invariant)

    def call(_: int) -> None:
        rawmla.get_mla_metadata(*arguments, enable_batch_invariant=case.batch_invariant, out=buffers)

    return slope(call, *METADATA_GRAPH_CALLS, replays)


def prepare(case: SparseCase) -> Prepared:
    """Inputs of a case and a first call, which makes the plan and whose result is checked."""
    sets = rotated_sets(case, l2_bytes())
    inputs = make_inputs(case, sets)
    meta, _ = rawmla.get_mla_metadata(enable_batch_invariant=case.batch_invariant)

    def call(number: int) -> Any:
        return rawmla.flash_mla_with_kvcache(
            inputs.q, inputs.k_cache, None, None, D_V, meta, **inputs.keywords(case, number)
        )

    error = check_output(case, inputs, call(0)[0])
    return Prepared(inputs, call, sets, error, lambda replays: {"meta_us": time_plan(case, replays)})
