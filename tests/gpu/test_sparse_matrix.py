"""Matrices of sparse decoding over FP8 caches and of prefill over bf16 rows.

A test builds its caches and indices once per case, for 128 heads. Calls with fewer heads take a slice of q,
which has gaps in memory; calls without an extra cache or sinks leave them out. References are computed after
the calls, for all heads at once. A test goes on after a mismatch, so one run shows all that fails.
"""

from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from full_cases import full_unless
from gpu_support import poison, rounds_keys, torch, without_extra
from sparse_kinds import DECODE, PREFILL, Kind

from kit import SparseCase, SparseInputs, make_sparse_inputs

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
DECODE_KINDS = tuple(kind for kind in DECODE if kind.fp8 and "few_heads" not in kind.name)

PREFILL_HEADS = (128, 64, 16)
PREFILL_TOKENS = (1, 62, 213, 1024)
PREFILL_SHAPES = (  # (s_kv, topk)
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
PREFILL_KINDS = tuple(kind for kind in PREFILL if not kind.fp8)


def with_heads(inputs: SparseInputs, h_q: int, *, extra: bool, sink: bool) -> SparseInputs:
    """The call of the first heads, with or without its options."""
    case = replace(inputs.case, h_q=h_q, sink=sink)
    attn_sink = inputs.attn_sink[:h_q] if sink else None
    chosen = replace(inputs, case=case, q=inputs.q[:, :, :h_q], attn_sink=attn_sink)
    return chosen if extra else without_extra(chosen)


def check_matrix(kind: Kind, cases: Iterable[SparseCase], heads: tuple[int, ...], count: int) -> None:
    """Every case with each number of heads, with and without an extra cache and sinks: `count` calls."""
    checked, failures = 0, []
    for case in cases:
        extras = (False, True) if case.extra_topk else (False,)
        references: dict[Any, Any] = {}
        try:
            whole = make_sparse_inputs(case)
            results = []
            for number, (h_q, extra, sink) in enumerate(product(heads, extras, (False, True))):
                inputs = with_heads(whole, h_q, extra=extra, sink=sink)
                form = ("object", "tensors")[number % 2 ^ extra]
                with poison(form == "tensors" or case.s_q == 1):  # without it, plan and attention overlap
                    given = {}
                    if kind.prefill and sink:
                        given["out"] = torch.full_like(inputs.q[:, 0, :, :512], float("nan"))
                    results.append((inputs, extra, kind.run(inputs, form=form, **given)))
            for inputs, extra, _ in results:  # the first call of a key has most heads
                key = extra, inputs.case.sink, rounds_keys(inputs.case)
                references[key] = references.get(key) or kind.reference(inputs)
        except Exception as error:
            raise RuntimeError(f"{case.id}: {error}") from error
        for inputs, extra, got in results:
            checked += 1
            wanted = references[extra, inputs.case.sink, rounds_keys(inputs.case)]
            try:
                kind.check(inputs, got, first_heads(kind, wanted, inputs.case.h_q))
            except AssertionError as error:
                failures.append(f"{'with' if extra else 'without'} the extra cache: {error}")
    shown = "\n".join(failures[:20])
    assert not failures, f"{len(failures)} of {checked} combinations failed:\n{shown}"
    assert checked == count


def first_heads(kind: Kind, results: Any, h_q: int) -> tuple[Any, ...]:
    """The results of the first heads."""
    if kind.prefill:
        return tuple(x[:, :h_q] for x in results)
    out, lse = results
    return out[:, :, :h_q], lse[:, :h_q]


def shapes(values: Any, quick: tuple[Any, ...]) -> Any:
    """Parametrise a test by shapes, of which a default run has the `quick` ones."""
    cases = full_unless(lambda shape: shape in quick, values)
    return pytest.mark.parametrize(
        "shape", cases, ids=lambda shape: "x".join(map(str, shape)).replace(" ", "")
    )


@shapes(SHAPES, (SHAPES[1], SHAPES[2]))
@pytest.mark.parametrize("kind", DECODE_KINDS, ids=lambda kind: kind.name)
def test_decode(kind: Kind, shape: tuple[tuple[int, int, int], tuple[int, int, int]]) -> None:
    (s_k, topk, page), (extra_s_k, extra_topk, extra_page) = shape
    cases = [
        SparseCase(
            **kind.cache,
            b=b,
            s_q=s_q,
            s_k=s_k,
            topk=topk,
            page_block_size=page,
            lengths=lengths,
            extra_s_k=extra_s_k,
            extra_topk=extra_topk,
            extra_page_block_size=extra_page,
            extra_lengths=lengths,
            sink=True,
            empty_rows=0.02,
            block_gap=1 if kind.cache["layout"] == "model1" else s_q - 1,
            index_gap=s_q - 1,
            seed=b + s_q,
        )
        for b, s_q, lengths in product(BATCHES, QUERY_TOKENS, (None, "random"))
    ]
    check_matrix(kind, cases, HEADS, 192)


@shapes(PREFILL_SHAPES, (PREFILL_SHAPES[3], PREFILL_SHAPES[5]))
@pytest.mark.parametrize("kind", PREFILL_KINDS, ids=lambda kind: kind.name)
def test_prefill(kind: Kind, shape: tuple[int, int]) -> None:
    s_k, topk = shape
    cases = [
        SparseCase(
            **kind.cache,
            b=tokens,
            s_k=s_k,
            topk=topk,
            lengths=None if not limited else "random" if tokens > 1 else (topk // 2 + 1,),
            sink=True,
            empty_rows=0.02,
            shared=True,
            block_gap=int(limited),
            index_gap=int(limited),
            seed=tokens,
        )
        for tokens, limited in product(PREFILL_TOKENS, (False, True))
    ]
    check_matrix(kind, cases, PREFILL_HEADS, 48)
