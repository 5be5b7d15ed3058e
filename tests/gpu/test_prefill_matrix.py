"""The prefill test matrix: 960 combinations in 20 tests of 48.

A test builds its kv and indices once per number of query tokens and lengths, for 128 heads; calls with fewer
heads take a slice of q, calls without sinks leave them out. References are computed after the calls, for all
heads at once. A test goes on after a mismatch, so that one run shows the whole pattern.
"""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from gpu_support import prefill, prefill_check, prefill_reference, torch

from kit import SparseCase, SparseInputs, make_sparse_inputs

HEADS = (128, 64, 16)
QUERY_TOKENS = (1, 62, 213, 1024)
SHAPES = (  # (s_kv, topk)
    (128, 128),
    (592, 128),
    (1840, 256),
    (1521, 512),
    (95, 128),
    (114, 384),
    (32, 2048),
    (64, 8192),
    (4321, 4096),
    (300, 100),
)


def with_heads(inputs: SparseInputs, h_q: int, *, sink: bool) -> SparseInputs:
    """The call of the first heads, with or without sinks. A slice of the heads has gaps in memory."""
    attn_sink = inputs.attn_sink[:h_q] if sink else None
    case = replace(inputs.case, h_q=h_q, sink=sink)
    return replace(inputs, case=case, q=inputs.q[:, :, :h_q], attn_sink=attn_sink)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(str(n) for n in shape))
@pytest.mark.parametrize("d_qk", (576, 512))
def test_prefill_matrix(d_qk: int, shape: tuple[int, int]) -> None:
    s_kv, topk = shape
    checked = 0
    failures: list[str] = []
    for s_q, limited in product(QUERY_TOKENS, (False, True)):
        case = SparseCase(
            b=s_q,
            h_q=max(HEADS),
            s_k=s_kv,
            topk=topk,
            page_block_size=1,
            layout="bf16",
            d_qk=d_qk,
            lengths=None if not limited else "random" if s_q > 1 else (topk // 2 + 1,),
            sink=True,
            empty_rows=0.02,
            shared=True,
            block_gap=int(limited),
            index_gap=int(limited),
            seed=s_q,
        )
        try:
            whole = make_sparse_inputs(case)
            results: list[tuple[SparseInputs, tuple[Any, Any, Any]]] = []
            for h_q, sink in product(HEADS, (False, True)):
                inputs = with_heads(whole, h_q, sink=sink)
                out = torch.full((s_q, h_q, 512), float("nan"), dtype=torch.bfloat16, device="cuda")
                results.append((inputs, prefill(inputs, out=out if sink else None)))
            want = {
                sink: prefill_reference(with_heads(whole, max(HEADS), sink=sink)) for sink in (False, True)
            }
        except Exception as error:
            raise RuntimeError(f"{case.id}: {error}") from error
        for inputs, got in results:
            checked += 1
            wanted = want[inputs.case.sink]
            try:
                prefill_check(inputs, got, tuple([x[:, : inputs.case.h_q] for x in wanted]))
            except AssertionError as error:
                failures.append(str(error))
    shown = "\n".join(failures[:20])
    assert not failures, f"{len(failures)} of {checked} combinations failed:\n{shown}"
    assert checked == len(QUERY_TOKENS) * 2 * len(HEADS) * 2 == 48


@pytest.mark.parametrize(
    ("s_q", "h_q", "topk"), ((70_000, 16, 64), (70_000, 5, 130), (16_385, 64, 100), (1_000_000, 1, 33))
)
def test_many_query_tokens(s_q: int, h_q: int, topk: int) -> None:
    """More than one plan takes; tokens at the seams and a sample of the others are compared."""
    case = SparseCase(
        b=s_q,
        h_q=h_q,
        s_k=2 * topk,
        topk=topk,
        page_block_size=1,
        layout="bf16",
        lengths="random",
        empty_rows=0.01,
        shared=True,
        sink=True,
    )
    inputs = make_sparse_inputs(case)
    got = prefill(inputs)
    chunk = -(-s_q // -(-s_q // 16384))
    seams = torch.arange(0, s_q, chunk)
    draw = torch.Generator().manual_seed(0)
    sample = torch.cat(
        [seams, seams - 1, torch.tensor([s_q - 1]), torch.randint(s_q, (4096,), generator=draw)]
    )
    sample = sample.clamp(min=0).cuda()
    chosen = replace(
        inputs,
        case=replace(case, b=len(sample)),
        q=inputs.q[sample],
        indices=inputs.indices[sample],
        topk_length=inputs.topk_length[sample],
    )
    prefill_check(chosen, tuple([x[sample] for x in got]))
    assert bool(got[0].isfinite().all()) and not any(bool(x.isnan().any()) for x in got[1:])
