"""The sparse FP8 test matrix: 1,920 combinations in 10 tests of 192.

A test builds its caches and indices once per batch and number of query tokens, for 128 heads; calls with
fewer heads take a slice of q, calls without an extra cache or sinks leave them out. References are computed
after the calls, for all heads at once. A test goes on after a mismatch, so that one run shows the whole
pattern.
"""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from gpu_support import poison, rounds_keys, sparse_check, sparse_decode, without_extra

from kit import SparseCase, SparseInputs, make_sparse_inputs
from kit.torch_reference import apply_sink
from kit.torch_reference import sparse_decode as float64_reference

HEADS = (128, 64, 16, 8)
BATCHES = (4, 74, 321)
QUERY_TOKENS = (1, 3)
# (s_k, topk, page) of the cache, then of the extra cache.
SHAPES = (
    ((512, 64, 2), (300, 130, 64)),
    ((512, 64, 69), (256, 512, 2)),
    ((1024, 576, 61), (700, 64, 53)),
    ((2046, 2048, 64), (1000, 500, 256)),
    ((650, 100, 53), (90, 33, 1)),
)


def with_heads(inputs: SparseInputs, h_q: int, *, extra: bool, sink: bool) -> SparseInputs:
    """The call of the first heads, with or without its options. A slice of the heads has gaps in memory."""
    case = replace(inputs.case, h_q=h_q, sink=sink)
    attn_sink = inputs.attn_sink[:h_q] if sink else None
    chosen = replace(inputs, case=case, q=inputs.q[:, :, :h_q], attn_sink=attn_sink)
    return chosen if extra else without_extra(chosen)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(str(n) for n in shape[0]))
@pytest.mark.parametrize("layout", ("v32", "model1"))
def test_sparse_matrix(layout: str, shape: tuple[tuple[int, int, int], tuple[int, int, int]]) -> None:
    (s_k, topk, page), (extra_s_k, extra_topk, extra_page) = shape
    checked = 0
    failures: list[str] = []
    for b, s_q, lengths in product(BATCHES, QUERY_TOKENS, (None, "random")):
        case = SparseCase(
            b=b,
            s_q=s_q,
            s_k=s_k,
            topk=topk,
            page_block_size=page,
            layout=layout,
            lengths=lengths,
            extra_s_k=extra_s_k,
            extra_topk=extra_topk,
            extra_page_block_size=extra_page,
            extra_lengths=lengths,
            sink=True,
            empty_rows=0.02,
            block_gap=1 if layout == "model1" else s_q - 1,
            index_gap=s_q - 1,
            seed=b + s_q,
        )
        try:
            whole = make_sparse_inputs(case)
            results: list[tuple[SparseInputs, bool, tuple[Any, Any]]] = []
            for number, (h_q, extra, sink) in enumerate(product(HEADS, (False, True), (False, True))):
                inputs = with_heads(whole, h_q, extra=extra, sink=sink)
                form = ("object", "tensors")[number % 2 ^ extra]
                with poison(form == "tensors" or s_q == 1):  # without it, plan and attention overlap
                    results.append((inputs, extra, sparse_decode(inputs, form)))
            want = {
                (extra, rounded): float64_reference(whole, extra=extra, rounded_keys=rounded)
                for extra, rounded in {(extra, rounds_keys(inputs.case)) for inputs, extra, _ in results}
            }
        except Exception as error:
            raise RuntimeError(f"{case.id}: {error}") from error
        for inputs, extra, got in results:
            checked += 1
            h_q = inputs.case.h_q
            out, lse = want[extra, rounds_keys(inputs.case)]
            out, lse = out[:, :, :h_q], lse[:, :h_q]
            if inputs.attn_sink is not None:
                out = apply_sink(out, lse, inputs.attn_sink)
            try:
                sparse_check(inputs, got, (out, lse))
            except AssertionError as error:
                failures.append(f"{'with' if extra else 'without'} the extra cache: {error}")
    shown = "\n".join(failures[:20])
    assert not failures, f"{len(failures)} of {checked} combinations failed:\n{shown}"
    assert checked == len(BATCHES) * len(QUERY_TOKENS) * 2 * len(HEADS) * 4 == 192
