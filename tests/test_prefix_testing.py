"""The tools of the GPU tests of prefix prefill, without a GPU: inputs, reference, comparison, the matrix."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import test_prefix_matrix as matrix

from kit.prefix import (
    GARBAGE,
    PrefixCase,
    PrefixInputs,
    check_prefix,
    decode_out,
    encode_out,
    make_prefix_inputs,
    written_rows,
)
from kit.prefix import reference as torch_reference
from rawmla import reference

torch = pytest.importorskip("torch")

SMALL: dict[str, Any] = {"query_lengths": (3, 0, 1, 6, 2), "contexts": (9, 5, 16, 0, 21), "d": 24}
CASES = (
    PrefixCase(**SMALL, block_size=4),
    PrefixCase(**SMALL, block_size=4, x=4, pack=2, padded=True, rows_around=2, layout="slice"),
    PrefixCase(**SMALL, block_size=1, x=24, table="int64", window=5, dtype="float16", layout="heads"),
    PrefixCase(**SMALL, block_size=7, x=1, table="pointers", causal=False, window=3, padded=True),
    PrefixCase(**SMALL, block_size=4, own_cached=True, window=6, sinks="infinite", alibi=True, h_q=6),
    PrefixCase(**SMALL, block_size=4, own_cached=True, causal=False, skip_decode=True, sinks="bfloat16"),
    PrefixCase(
        **SMALL, block_size=16, x=3, kv_cache_dtype="fp8", k_scale=0.3, v_scale=2.0, device_scales=True
    ),
    PrefixCase(
        **SMALL, block_size=8, pack=4, kv_cache_dtype="fp8_e5m2", bytes_dtype="uint8", own_cached=True,
        sinks="float32", out_scale=0.01,
    ),
    PrefixCase(**SMALL, kv_cache_dtype="fp8_e4m3", bytes_dtype="int8", out_scale=0.02, device_scales=True),
    PrefixCase(query_lengths=(6, 4, 2), contexts=(-2, -4, 0), d=24, own_cached=True),
    PrefixCase(query_lengths=(6, 4, 2), contexts=(-2, -4, 5), d=24, block_size=4, window=3),
    PrefixCase(**SMALL, room=40, block_size=4, sm_scale=0.4, uniform=1e-3),
)  # fmt: skip


def by_definition(inputs: PrefixInputs) -> Any:
    """The NumPy reference's o, which it rounds to the dtype of o; 7 where it is not written."""
    case = inputs.case
    o = torch.full(inputs.q.shape, 7, dtype=inputs.q.dtype if case.out_scale is None else torch.uint8)
    return reference.context_attention_fwd(**inputs.keywords(o))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_the_reference_in_torch(case: PrefixCase) -> None:
    """Rounded, it has the bits of the definition, and it writes the same rows."""
    inputs = make_prefix_inputs(case, "cpu")
    got, want = torch_reference(inputs), by_definition(inputs)
    rows = written_rows(inputs)
    assert bool(got[rows].isfinite().all()) and got[rows].numel()
    rounded = got.to(want.dtype) if case.out_scale is None else encode_out(got / float(inputs.out_scale))
    assert torch.equal(rounded[rows], want[rows])
    others = torch.ones(len(want), dtype=torch.bool)
    others[rows] = False
    assert bool(got[others].isnan().all()) and bool((want[others] == 7).all())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_memory_of_no_token_holds_the_gap(case: PrefixCase) -> None:
    """And entries of pages that no query sees are garbage."""
    inputs = make_prefix_inputs(case, "cpu")
    cached = pages = 0
    for n, context in zip(case.query_lengths, case.contexts, strict=True):
        seq_len, older = n + context, max(context, 0)
        first = max(older - case.window + 1, 0) if case.window else 0
        seen = range(first, seq_len if case.own_cached else older) if n else range(0)
        cached += len(seen)
        pages += len({t // case.block_size for t in seen})
    for cache in (inputs.k_cache, inputs.v_cache):
        whole = torch.empty(0, dtype=cache.dtype).set_(cache.untyped_storage())
        if case.float8 is None:
            taken = whole.isfinite()
        else:
            taken = whole.view(torch.uint8) != 0x7F
        assert int(taken.sum()) == cached * case.h_kv * case.d
    assert int((inputs.b_loc != GARBAGE[case.table]).sum()) == pages
    for array in (inputs.q, inputs.k, inputs.v):
        if array is not None:
            whole = torch.empty(0, dtype=array.dtype).set_(array.untyped_storage())
            assert int(whole.isfinite().sum()) == sum(case.query_lengths) * array.shape[1] * case.d


def rounded(inputs: PrefixInputs) -> Any:
    """What an exact kernel would give."""
    want = torch_reference(inputs)
    if inputs.case.out_scale is None:
        return want.to(inputs.q.dtype)
    return encode_out(want / float(inputs.out_scale))


@pytest.mark.parametrize("case", CASES[:-1], ids=lambda case: case.id)  # the last is below float16's numbers
def test_the_comparison_takes_rounded_results(case: PrefixCase) -> None:
    inputs = make_prefix_inputs(case, "cpu")
    check_prefix(inputs, rounded(inputs))


@pytest.mark.parametrize("part", (1 << 24, 100))
def test_the_comparison_finds_what_is_wrong(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kit.compare.PART_ELEMENTS", part)
    inputs = make_prefix_inputs(PrefixCase(**{**SMALL, "d": 64}), "cpu")

    def fails(text: str, change: Any) -> None:
        o = rounded(inputs)
        change(o)
        with pytest.raises(AssertionError, match=text):
            check_prefix(inputs, o)

    fails("out are infinite", lambda o: o[1, 2].fill_(float("nan")))
    fails("L2 error of out", lambda o: o.mul_(1.02))
    fails("L2 error of a row of out 4", lambda o: o[3, 1].mul_(1.02))


@pytest.mark.parametrize("part", (1 << 24, 100))
@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_the_comparison_of_bytes(dtype: str, part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes what products in the dtype give, and refuses rounding towards 0 and other errors."""
    monkeypatch.setattr("kit.compare.PART_ELEMENTS", part)
    case = PrefixCase(query_lengths=(60, 40), contexts=(70, 3), d=64, out_scale=0.01, dtype=dtype)
    inputs = make_prefix_inputs(case, "cpu")
    want = torch_reference(inputs) / 0.01
    noise = torch.randn(want.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    half_step = 2.0**-8 if dtype == "bfloat16" else 2.0**-11
    typical = want.square().mean(-1, keepdim=True).sqrt()
    check_prefix(inputs, encode_out(want))
    check_prefix(inputs, encode_out(want + noise * typical * half_step * 0.4))
    down = encode_out(want)
    down -= (decode_out(down).abs() > want.abs()).to(torch.uint8)
    for wrong, text in (
        (down, "an element of o"),
        (encode_out(want * 1.1), "L2 error of o"),
        (encode_out(want).index_fill(0, torch.tensor([5]), 0x7F), "NaN"),
        (encode_out(want).index_fill(0, torch.tensor([5]), 0), "an element of o"),
    ):
        with pytest.raises(AssertionError, match=text):
            check_prefix(inputs, wrong)


def test_relations_of_contexts_and_gaps() -> None:
    """Other gaps, the same tokens."""
    case = replace(CASES[1], gap=1.0)
    inputs, spoilt = make_prefix_inputs(case, "cpu"), make_prefix_inputs(CASES[1], "cpu")
    rows = written_rows(inputs)
    assert torch.equal(torch_reference(inputs)[rows], torch_reference(spoilt)[rows])
    assert bool(inputs.k_cache.isfinite().all()) and not bool(spoilt.k_cache.isfinite().all())


def test_all_pairs_of_the_matrix() -> None:
    """Every value of a dimension meets every value of the others that the call allows."""
    missing = []
    rows = [matrix.values_of(case) for case in matrix.CASES]
    for one, other in combinations(matrix.VALUES, 2):
        met = {(row[one], row[other]) for row in rows}
        for pair in ((a, b) for a in matrix.VALUES[one] for b in matrix.VALUES[other]):
            if pair not in met and matrix.is_allowed({one: pair[0], other: pair[1]}):
                missing.append((one, other, pair))
    assert not missing, missing
    assert all(matrix.is_allowed(row) for row in rows)
    assert len({matrix.variant_of(row) for row in rows}) == len(matrix.VARIANTS)
