"""The kit of attention over caches: inputs, the reference on the device, comparison."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kit.kvcache import (
    ARRAYS,
    FP8,
    KvCacheCase,
    KvCacheInputs,
    check_kvcache,
    covered_rows,
    expected_caches,
    lengths_of,
    make_kvcache_inputs,
    named_arguments,
    problems_of_caches,
)
from kit.kvcache import reference as torch_reference
from rawmla import reference

torch = pytest.importorskip("torch")

SMALL: dict[str, Any] = {"lengths": (9, -2, 0, 21, 5), "d_qk": 32, "d_v": 16, "h_q": 4, "page": 4}
NEW: dict[str, Any] = {"new_lengths": (3, 2, 0, 1, 4), "rotary": 1.0}
SEGMENTS: dict[str, Any] = {"q_lengths": (3, 1, 0, 6, 2), "rows_around": 2}
CASES = (
    KvCacheCase(**SMALL),
    KvCacheCase(**SMALL, s_q=3, causal=True, batch_idx=True, sink="infinite", cache_layout="interleaved"),
    KvCacheCase(**{**SMALL, "page": None, "d_v": 20}, s_q=2, window=(3, 0), batch_idx=True, alibi="requests"),
    KvCacheCase(**SMALL, **SEGMENTS, window=(4, 1), leftpad=(2, 0, 0, 7, 5), room=40, softcap=15.0),
    KvCacheCase(**SMALL, new=1, causal=True, dtype="float16", alibi="heads", softmax_scale=0.3),
    KvCacheCase(**SMALL, **NEW, s_q=3),
    KvCacheCase(**SMALL, **NEW, **SEGMENTS, causal=True, interleaved=False, leftpad=(2, 0, 0, 7, 5)),
    KvCacheCase(
        **{**SMALL, "page": None}, new=3, rotary=0.5, s_q=2, rotary_from=(3, 0, 90, 1, 7), window=(100, 100),
        cache_layout="interleaved",
    ),
    KvCacheCase(**{**SMALL, "page": 1}, new=2, s_q=3, window=(1, 0), sink="bfloat16", batch_idx=True),
    KvCacheCase(**{**SMALL, "lengths": (7, 7)}, lengths_as="int", new=2, s_q=2),
    KvCacheCase(**{**SMALL, "lengths": (8, 8)}, lengths_as="all", s_q=2, causal=True),
    KvCacheCase(**{**SMALL, "lengths": (8, 0, 3)}, lengths_as="bounds", s_q=2),
    KvCacheCase(**SMALL, **SEGMENTS, new_lengths=(3, 2, 0, 1, 4), dtype=FP8, cache_dtype=FP8, descales=True),
    KvCacheCase(**SMALL, cache_dtype=FP8, descales=True),
    KvCacheCase(**SMALL, cache_dtype=FP8),
    KvCacheCase(**{**SMALL, "lengths": ()}, q_lengths=(), rows_around=2),
)  # fmt: skip


def on_host(x: Any) -> Any:
    """An array of NumPy on the same memory."""
    if not isinstance(x, torch.Tensor):
        return x
    kind = getattr(ml_dtypes, str(x.dtype).removeprefix("torch."), None)
    if kind is None:
        return x.numpy()
    return x.view(torch.uint8 if x.element_size() == 1 else torch.int16).numpy().view(kind)


def by_definition(inputs: KvCacheInputs) -> tuple[Any, ...]:
    """out and lse of the NumPy reference, not rounded; it appends to the caches of the inputs."""
    arguments = {name: on_host(x) for name, x in named_arguments(inputs).items()}
    results = reference.flash_attn_with_kvcache(**arguments)
    return tuple(torch.from_numpy(np.ascontiguousarray(x)) for x in results)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_the_references(case: KvCacheCase) -> None:
    """Both give the same numbers and caches. What nobody may read is NaN in all arrays."""
    inputs = make_kvcache_inputs(case, "cpu")
    rows, want = covered_rows(inputs), by_definition(inputs)
    for got, wanted in zip(torch_reference(inputs), want, strict=True):
        torch.testing.assert_close(got[rows], wanted[rows], rtol=1e-9, atol=1e-11)
        assert not bool(got[rows].isnan().any())
    assert not problems_of_caches(inputs)
    if case.lengths_as != "bounds":
        assert lengths_of(inputs) == list(case.lengths)
    rounded = want[0].to(torch.bfloat16 if case.dtype == FP8 else inputs.q.dtype), want[1].float()
    check_kvcache(inputs, rounded)
    assert set(ARRAYS) < set(named_arguments(inputs))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_caches_hold_the_gap(case: KvCacheCase) -> None:
    """And entries of pages without older tokens that some query sees, or new ones, are garbage."""
    inputs = make_kvcache_inputs(case, "cpu")
    tokens, pages = 0, 0
    for r, (n, length, new) in enumerate(zip(case.query_tokens, case.lengths, case.new_tokens, strict=True)):
        first = case.leftpad[r] if case.leftpad else 0
        seen = {
            j
            for j in range(first, length + new)
            if case.window[0] < 0 or j >= length + new - n - case.window[0]
        }
        seen = seen if n else set()
        tokens += len([j for j in seen if j < length])
        if case.page is not None:
            pages += len({j // case.page for j in {*seen, *range(max(length, 0), length + new)}})
    finite = sum(int(x.float().isfinite().sum()) for x in inputs.before)
    assert finite == tokens * case.h_kv * (case.d_qk + case.d_v)
    if inputs.block_table is not None:
        table, blocks = inputs.block_table, len(inputs.k_cache)
        assert int(((table >= 0) & (table < blocks)).sum()) == pages


@pytest.mark.parametrize("case", CASES[:9], ids=lambda case: case.id)
def test_of_tensors(case: KvCacheCase) -> None:
    """The reference of tensors gives rounded results in the layout of the GPU's."""
    inputs = make_kvcache_inputs(case, "cpu")
    out, lse = reference.flash_attn_with_kvcache(**named_arguments(inputs))
    check_kvcache(inputs, (out, lse))
    assert (lse.mT if case.q_lengths else lse).is_contiguous()


def test_the_comparison_finds_what_is_wrong() -> None:
    case = KvCacheCase(s_q=3, new=2, rotary=1.0, causal=True)
    inputs = make_kvcache_inputs(case, "cpu")
    for memory, want in zip(inputs.memory, expected_caches(inputs), strict=True):
        memory.copy_(want)
    exact = torch_reference(inputs)
    last = inputs.block_table[1, 77 // 16], 78 % 16
    planted: tuple[tuple[str, Callable[[Any, Any], Any]], ...] = (
        ("out are infinite", lambda out, lse: out[1, 2].fill_(float("nan"))),
        ("L2 error of a row of out", lambda out, lse: out[1, 2, 3].mul_(1.02)),
        ("error of lse", lambda out, lse: lse[1, 4, 1].add_(0.001)),
        ("rotated keys of request 1", lambda out, lse: inputs.k_cache[last][1, 5].add_(0.1)),
        ("1 elements of array 1", lambda out, lse: inputs.v_cache[last][1, 5].add_(0.1)),
        ("1 elements of array 1", lambda out, lse: inputs.v_cache[0, 15, 0, 7].fill_(0)),
    )
    kept = [x.clone() for x in inputs.memory]
    check_kvcache(inputs, (exact[0].to(inputs.q.dtype), exact[1].float()))
    for text, change in planted:
        results = exact[0].to(inputs.q.dtype), exact[1].float()
        change(*results)
        with pytest.raises(AssertionError, match=text):
            check_kvcache(inputs, results)
        for memory, good in zip(inputs.memory, kept, strict=True):
            memory.copy_(good)
