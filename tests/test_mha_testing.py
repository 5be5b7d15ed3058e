"""The tools of the GPU tests of dense attention, without a GPU: inputs, reference, comparison."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import test_mha_matrix

from kit.mha import MhaCase, MhaInputs, check_mha, covered_rows, make_mha_inputs
from kit.mha import reference as torch_reference
from rawmla import reference

torch = pytest.importorskip("torch")

FIXED = {"b": 2, "s_q": 7, "s_k": 9, "d_qk": 24, "d_v": 16}
SEGMENTS: dict[str, Any] = {"q_lengths": (3, 0, 6, 1), "k_lengths": (5, 4, 0, 2), "d_qk": 24, "d_v": 16}
CASES = (
    MhaCase(**FIXED),
    MhaCase(**FIXED, causal=True, softmax_scale=0.3, layout="slice"),
    MhaCase(**{**FIXED, "s_q": 9, "s_k": 4}, causal=True, layout="heads"),
    MhaCase(**FIXED, window=(2, 1), softcap=15.0, sink="bfloat16", alibi="heads"),
    MhaCase(**FIXED, window=(-1, 0), sink="infinite", alibi="requests", dtype="float16", h_q=6),
    MhaCase(**FIXED, window=(0, -1), h_q=2, h_kv=1, layout="slice"),
    MhaCase(**SEGMENTS, rows_around=2, causal=True),
    MhaCase(**SEGMENTS, q_used=(2, 0, 6, 1), k_used=(5, 0, 0, 1), alibi="requests", sink="float32"),
    MhaCase(**SEGMENTS, packed="kv", window=(3, 0), layout="slice"),
    MhaCase(**{**SEGMENTS, "d_v": 24}, packed="kv4", k_used=(1, 2, 0, 1)),
    MhaCase(**{**SEGMENTS, "k_lengths": (3, 0, 6, 1)}, h_q=2, packed="qkv", q_used=(1, 0, 2, 1)),
    MhaCase(**{**SEGMENTS, "k_lengths": (3, 0, 6, 1), "d_v": 24}, h_q=2, packed="qkv4", rows_around=1),
)


def by_definition(inputs: MhaInputs) -> tuple[Any, Any]:
    """The NumPy reference, of float64 arrays."""
    arrays = [x.double().numpy() for x in (inputs.q, inputs.k, inputs.v)]
    options = inputs.options()
    for name in ("attn_sink", "alibi_slopes"):
        if options[name] is not None:
            options[name] = options[name].double().numpy()
            if name == "alibi_slopes":
                options[name] = options[name].astype("float32")
    if inputs.cu_seqlens_q is None:
        results = reference.flash_attn_func(*arrays, **options)
    else:
        lengths = [
            None if x is None else x.numpy()
            for x in (inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.seqused_q, inputs.seqused_k)
        ]
        results = reference.flash_attn_varlen_func(
            *arrays, *lengths[:2], 9, 9, **options, seqused_q=lengths[2], seqused_k=lengths[3]
        )
    return tuple(torch.from_numpy(x.copy()) for x in results)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_the_reference_in_torch(case: MhaCase) -> None:
    inputs = make_mha_inputs(case, "cpu")
    rows = covered_rows(inputs)
    for got, want in zip(torch_reference(inputs), by_definition(inputs), strict=True):
        torch.testing.assert_close(got[rows], want[rows], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("chunk", (1, 100))
def test_the_reference_in_parts(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_mha_inputs(replace(CASES[4], s_q=20), "cpu")
    whole = torch_reference(inputs)
    monkeypatch.setattr("kit.mha.CHUNK_SCORES", chunk)
    for got, want in zip(torch_reference(inputs), whole, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=0)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_memory_of_no_token_holds_the_gap(case: MhaCase) -> None:
    """And nothing else: tokens are finite, whatever the layout."""
    for gap in (float("nan"), float("inf")):
        inputs = make_mha_inputs(replace(case, gap=gap), "cpu")
        for array, bounds, used in (
            (inputs.q, inputs.cu_seqlens_q, inputs.seqused_q),
            (inputs.k, inputs.cu_seqlens_k, inputs.seqused_k),
            (inputs.v, inputs.cu_seqlens_k, inputs.seqused_k),
        ):
            is_token = torch.ones(array.shape[:-2], dtype=torch.bool)
            if bounds is not None:
                lengths = bounds.diff() if used is None else used
                is_token[:] = False
                for start, length in zip(bounds.tolist(), lengths.tolist(), strict=False):
                    is_token[start : start + length] = True
            assert bool(array[is_token].isfinite().all())
            assert not bool(array[~is_token].isfinite().any())
            if inputs.parts is None:
                whole = torch.empty(0, dtype=array.dtype).set_(array.untyped_storage())
                heads, columns = array.shape[-2:]
                assert int(whole.isfinite().sum()) == int(is_token.sum()) * heads * columns


def rounded(inputs: MhaInputs) -> tuple[Any, Any]:
    """What an exact kernel would give."""
    out, lse = torch_reference(inputs)
    return out.to(inputs.q.dtype), lse.float()


OUTWEIGHED = MhaCase(s_q=70, s_k=1, d_v=64, alibi="heads", sink="float32")  # out is down to exp(-60) of v


@pytest.mark.parametrize(
    "case", (*CASES, OUTWEIGHED, replace(OUTWEIGHED, dtype="float16")), ids=lambda case: case.id
)
def test_the_comparison_takes_rounded_results(case: MhaCase) -> None:
    inputs = make_mha_inputs(case, "cpu")
    check_mha(inputs, rounded(inputs), plain=True)


def test_the_comparison_finds_what_is_wrong() -> None:
    inputs = make_mha_inputs(MhaCase(s_q=70, s_k=90, d_v=64), "cpu")

    def fails(text: str, change: Any) -> None:
        out, lse = rounded(inputs)
        change(out, lse)
        with pytest.raises(AssertionError, match=text):
            check_mha(inputs, (out, lse), plain=True)

    fails("out are infinite", lambda out, lse: out[1, 2].fill_(float("nan")))
    fails("L2 error of out", lambda out, lse: out.mul_(1.02))
    fails("L2 error of a row of out 4", lambda out, lse: out[0, 3, 1].mul_(1.02))
    fails("plain torch", lambda out, lse: out[0, 3, 1, 5].add_(0.1))
    fails("error of lse", lambda out, lse: lse[1, 1, 4].add_(0.001))
    fails("lse is infinite", lambda out, lse: lse[1, 1, 4].fill_(float("-inf")))


def test_all_pairs_of_the_general_matrix() -> None:
    """Every value of every dimension of the matrix meets every value of the others."""
    rows = []
    for variant in test_mha_matrix.VARIANTS:
        for case, mask, deterministic, out_given in test_mha_matrix.general_cases(*variant):
            rows.append(
                {
                    "sizes": (case.s_q, case.s_k),
                    "dims": (case.d_qk, case.d_v),
                    "heads": (case.h_q, case.h_kv),
                    "dtype": case.dtype,
                    "mask": mask,
                    "softcap": case.softcap > 0,
                    "sink": case.sink,
                    "alibi": case.alibi is not None,
                    "deterministic": deterministic,
                    "layout": case.layout,
                    "out": out_given,
                }
            )
    counts = {"sizes": 30, "dims": 16, "heads": 4, "mask": 5, "sink": 5, "layout": 3}
    for one, other in combinations(rows[0], 2):
        pairs = {(row[one], row[other]) for row in rows}
        assert len(pairs) == counts.get(one, 2) * counts.get(other, 2), (one, other)
