"""The tools of the GPU tests of flex attention, without a GPU: functions, inputs, reference, comparison."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import test_flex_matrix as matrix
import test_flex_pairs as pairs
from host_mods import evaluate, needs_host_compiler, wanted

import rawmla
from kit.flex import (
    BIASES,
    MASKS,
    SCORES,
    FlexCase,
    FlexInputs,
    Sizes,
    attended,
    block_mask_of,
    check_flex,
    make_flex_inputs,
    with_mask_mod,
)
from kit.flex import reference as torch_reference
from rawmla import reference
from rawmla.flex.block_mask import BlockMask

torch = pytest.importorskip("torch")
from rawmla.flex.trace import trace  # noqa: E402

SIZES = Sizes(3, 4, 150, 170, device="cpu")
FUNCTIONS = [*[("score_mod", name) for name in SCORES], *[("mask_mod", name) for name in MASKS]]
SMALL: dict[str, Any] = {"s_q": 37, "s_k": 50, "d_qk": 8, "d_v": 6, "block": (16, 32), "b": 3}
CASES = (
    *[FlexCase(**SMALL, score=name, seed=i) for i, name in enumerate(SCORES)],
    *[FlexCase(**SMALL, mask=name, separate=i % 3 > 0, seed=i) for i, name in enumerate(MASKS)],
    FlexCase(**SMALL, b_kv=1, h_kv=1, score="bias b h q k", mask="documents", layout="slice"),
    FlexCase(**SMALL, h_kv=2, mask="per head", layout="tokens", dtype="float16", scale=-0.3),
    FlexCase(**SMALL, mask="window", kv_dtype="float8_e4m3fn"),
    FlexCase(**SMALL, mask="padding", kv_dtype="float8_e5m2", layout="slice", scale=0.0),
    FlexCase(b=1, s_q=1, s_k=20, mask="causal", block=(128, 16)),
    FlexCase(b=2, s_q=5, s_k=0, d_qk=8, d_v=8),
    FlexCase(b=2, s_q=0, s_k=5, d_qk=8, d_v=8, mask="causal"),
)


def points(name: str, count: int = 100) -> tuple[Any, Any]:
    draw = torch.Generator().manual_seed(7)
    scores = 2 * torch.randn(count, generator=draw)
    if name == "reciprocal":
        scores = scores.abs() + 0.5
    extents = (SIZES.b, SIZES.h, SIZES.s_q, SIZES.s_k)
    return scores, torch.stack([torch.randint(0, n, (count,), generator=draw) for n in extents], dim=1)


@needs_host_compiler
@pytest.mark.parametrize(("kind", "name"), FUNCTIONS)
def test_forms_agree(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Python on numbers, as CUDA text, traced, as arrays of NumPy and of torch."""

    def inspect(x: Any, name: str) -> Any:
        """As that of rawmla.call.arrays, but for tensors of the CPU."""
        return SimpleNamespace(dtype=str(x.dtype).removeprefix("torch."), shape=x.shape)

    monkeypatch.setattr("rawmla.flex.mods.inspect", inspect)
    function = (SCORES if kind == "score_mod" else MASKS)[name](SIZES)
    scores, at = points(name)
    want = wanted(function.python, kind, scores, at)
    first = (scores,) if kind == "score_mod" else ()
    in_cuda = evaluate(function.cuda().mod(), kind, scores, at)
    traced = evaluate(trace(function.python, kind), kind, scores, at)
    in_torch = function.torch()(*first, *at.unbind(1)).expand(len(at)).float()
    in_numpy = function.numpy()(*[x.numpy() for x in first], *[x.numpy() for x in at.unbind(1)])
    in_numpy = torch.from_numpy(np.broadcast_to(in_numpy, len(at)).astype(np.float32))
    for got in (in_cuda, traced, in_torch, in_numpy):
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5, equal_nan=True)
    assert not bool(want.isnan().any())
    assert name in ("identity", "empty") or len(want.unique()) > 1


def by_definition(inputs: FlexInputs) -> tuple[Any, Any, Any]:
    """The NumPy reference, of float64 arrays, and lists of its own."""
    case = inputs.case
    arrays = [x.double().numpy() for x in (inputs.q, inputs.k, inputs.v)]
    mask = None
    if inputs.mask is not None:
        mask = reference.create_block_mask(
            inputs.mask.numpy(), case.b, case.h_q, case.s_q, case.s_k,
            BLOCK_SIZE=case.block, separate_full_blocks=case.separate,
        )  # fmt: skip
    out, aux = reference.flex_attention(
        *arrays, None if inputs.score is None else inputs.score.numpy(), mask, case.scale,
        case.h_q != case.h_kv, return_aux=rawmla.AuxRequest(True, True),
    )  # fmt: skip
    return tuple(torch.from_numpy(x) for x in (out, aux.lse, aux.max_scores))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_the_reference_in_torch(case: FlexCase) -> None:
    inputs = make_flex_inputs(case, "cpu")
    for got, want in zip(torch_reference(inputs), by_definition(inputs), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_the_reference_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_flex_inputs(replace(CASES[-7], score="bias b h q k"), "cpu")
    whole = torch_reference(inputs)
    monkeypatch.setattr("kit.flex.CHUNK_SCORES", 1)
    for got, want in zip(torch_reference(inputs), whole, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


def test_the_reference_obeys_lists() -> None:
    """Lists that do not agree with the mask, of fewer requests and heads, with garbage behind their ends."""
    inputs = make_flex_inputs(FlexCase(**{**SMALL, "b": 4}), "cpu")
    mask = MASKS["random"](replace(SIZES, b=4, s_q=37, s_k=50))
    draw = np.random.default_rng(5)
    states = draw.integers(0, 3, (2, 2, 3, 2))
    lists = []
    for state in (1, 2):
        counts = (states == state).sum(-1)
        order = np.argsort(states != state, axis=-1, kind="stable")
        order[np.arange(2) >= counts[..., None]] = 2**30
        lists += [torch.from_numpy(x.astype(np.int32)) for x in (counts, order)]
    given = BlockMask((37, 50), *lists, BLOCK_SIZE=(16, 32), mask_mod=mask.python)
    inputs = replace(inputs, mask=mask, block_mask=given)
    numbers = [x.double().numpy() for x in (inputs.q, inputs.k, inputs.v)]
    want = reference.flex_attention(*numbers, None, with_mask_mod(given, mask.numpy()), return_lse=True)
    for got, wanted_one in zip(torch_reference(inputs), want, strict=False):
        np.testing.assert_allclose(got.numpy(), wanted_one, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("separate", (True, False))
@pytest.mark.parametrize("name", MASKS)
def test_lists_of_inputs(name: str, separate: bool) -> None:
    """Those of the NumPy reference; for one request and head where the mask does not depend on them."""
    case = FlexCase(**SMALL, mask=name, separate=separate)
    inputs = make_flex_inputs(case, "cpu")
    assert inputs.block_mask is not None and inputs.mask is not None
    shape = tuple(inputs.block_mask.kv_num_blocks.shape[:2])
    assert shape == {"per head": (1, 4)}.get(
        name, (3, 1) if name in ("documents", "prefix", "padding", "per batch") else (1, 1)
    )
    want = reference.create_block_mask(
        inputs.mask.numpy(), *shape, 37, 50, BLOCK_SIZE=(16, 32), separate_full_blocks=separate
    )
    for lists in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"):
        got, wanted_one = getattr(inputs.block_mask, lists), getattr(want, lists)
        assert (got is None) == (wanted_one is None)
        if got is not None:
            assert got.dtype == torch.int32
            np.testing.assert_array_equal(got.numpy(), wanted_one)


@pytest.mark.parametrize("layout", ("plain", "slice", "tokens"))
@pytest.mark.parametrize("mask", ("", "checkered", "per head", "padding"))
def test_what_no_result_depends_on_holds_the_gap(mask: str, layout: str) -> None:
    case = FlexCase(
        b=2, h_kv=2, s_q=130, s_k=400, d_qk=8, d_v=16, block=(64, 64), mask=mask, layout=layout, gap_keys=1
    )
    inputs = make_flex_inputs(case, "cpu")
    holds = [torch.ones(x.shape[:-1], dtype=torch.bool) for x in (inputs.q, inputs.k, inputs.v)]
    if inputs.mask is not None:
        seen = attended(inputs.mask, case, "cpu").expand(2, 4, 130, 400)
        for request, head in np.ndindex(2, 2):
            keys = seen[request, 2 * head : 2 * head + 2].any((0, 1))
            blocks = torch.nn.functional.pad(seen[request, 2 * head : 2 * head + 2].any((0, 1)), (0, 48))
            holds[1][request, head] = keys
            listed = blocks.view(7, 64).any(1).repeat_interleave(64)[:400]
            holds[2][request, head] = listed
        assert not bool(holds[2].all())
        assert mask == "checkered" or not torch.equal(holds[1], holds[2])
    for array, held in zip((inputs.q, inputs.k, inputs.v), holds, strict=True):
        assert torch.equal(array.isfinite().all(-1), held) and torch.equal(array.isfinite().any(-1), held)
        whole = torch.empty(0, dtype=array.dtype).set_(array.untyped_storage())
        assert int(whole.isfinite().sum()) == int(held.sum()) * array.shape[-1]
        assert (whole.numel() > array.numel()) == (layout == "slice")


def rounded(inputs: FlexInputs) -> tuple[Any, Any, Any]:
    """What an exact kernel would give."""
    out, lse, top = torch_reference(inputs)
    return out.to(inputs.q.dtype), lse.float(), top.float()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_the_comparison_takes_rounded_results(case: FlexCase) -> None:
    inputs = make_flex_inputs(case, "cpu")
    check_flex(inputs, rounded(inputs), plain=True)


@pytest.mark.parametrize("mask", ("", "lower half"))
@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_the_comparison_finds_what_is_wrong(dtype: str, mask: str) -> None:
    inputs = make_flex_inputs(FlexCase(s_q=70, s_k=90, dtype=dtype, mask=mask), "cpu")

    def fails(text: str, change: Any) -> None:
        results = rounded(inputs)
        change(*results)
        with pytest.raises(AssertionError, match=text):
            check_flex(inputs, results, plain=True)

    fails("out are infinite", lambda out, lse, top: out[1, 2, 60].fill_(float("nan")))
    fails("L2 error of out", lambda out, lse, top: out.mul_(1.02))
    fails("L2 error of a row of out", lambda out, lse, top: out[0, 3, 61].mul_(1.02))
    fails("mean error of out", lambda out, lse, top: out.add_(0.05 * out.abs().max()))
    fails("error of lse", lambda out, lse, top: lse[1, 1, 64].add_(0.001))
    fails("error of max_scores", lambda out, lse, top: top[1, 1, 64].sub_(0.001))
    fails("lse is infinite", lambda out, lse, top: lse[1, 1, 64].fill_(float("-inf")))
    fails("max_scores is infinite", lambda out, lse, top: top[1, 1, 64].fill_(float("nan")))
    if mask:
        fails("row of out", lambda out, lse, top: out[0, 0, 3].fill_(0.001))
        fails("lse is infinite", lambda out, lse, top: lse[0, 0, 3].fill_(-1e30))
        fails("max_scores is infinite", lambda out, lse, top: top[0, 0, 3].fill_(float("inf")))


@pytest.mark.parametrize("name", [name for name in SCORES if name not in ("identity", "head offset")])
def test_the_comparison_finds_a_missing_function(name: str) -> None:
    """At the shape of the GPU test of all functions; "head offset" changes lse alone."""
    case = FlexCase(s_q=70, s_k=90, score=name)
    inputs = make_flex_inputs(case, "cpu")
    results = rounded(replace(inputs, score=None))
    with pytest.raises(AssertionError, match="error of out"):
        check_flex(inputs, (results[0], None, None))


@pytest.mark.parametrize("name", MASKS)
def test_the_comparison_finds_a_missing_mask(name: str) -> None:
    inputs = make_flex_inputs(FlexCase(s_q=150, s_k=300, mask=name, gap=0.0), "cpu")
    results = rounded(replace(inputs, mask=None, block_mask=None))
    with pytest.raises(AssertionError, match="error of" if name != "empty" else "is infinite"):
        check_flex(inputs, results)


def test_blocks_of_a_mask() -> None:
    seen = torch.zeros(1, 1, 40, 70, dtype=torch.bool)
    seen[..., :16, :32], seen[..., 20, 33], seen[..., 32:, :] = True, True, True
    mask = block_mask_of(seen, (40, 70), (16, 32), None)
    assert mask.kv_num_blocks.tolist() == [[[0, 1, 3]]] and mask.full_kv_num_blocks.tolist() == [[[1, 0, 0]]]
    assert mask.kv_indices[0, 0, 1].tolist() == [1, 0, 2] and mask.full_kv_indices[0, 0, 0, 0] == 0


def test_all_pairs_of_the_matrix() -> None:
    """Every value of every dimension of the matrix meets every value of the others."""
    rows = []
    for variant in matrix.VARIANTS:
        for case, length, out_given, created in matrix.cases_of(variant):
            rows.append(
                {
                    "dims": (case.d_qk, case.d_v),
                    "s_k": case.s_k,
                    "length": length,
                    "heads": (case.h_q, case.h_kv),
                    "batch": (case.b, case.b_kv),
                    "block": case.block,
                    "layout": case.layout,
                    "out": out_given,
                    "created": created,
                    "separate": case.separate,
                }
            )
    counts = {
        "dims": 10, "s_k": 9, "length": 4, "heads": 4, "batch": 3, "block": 9, "layout": 3
    }  # fmt: skip
    for one, other in combinations(rows[0], 2):
        pairs = {(row[one], row[other]) for row in rows}
        assert len(pairs) == counts.get(one, 2) * counts.get(other, 2), (one, other)
    assert {variant.dtype for variant in matrix.VARIANTS} == {"bfloat16", "float16"}


def test_every_function_meets_every_pair_of_head_dimensions() -> None:
    """So does every mask. Each function is Python and CUDA text, in both dtypes, for all numbers of heads."""
    made = pairs.pairs()
    cases = [pair.case for pair in made]
    of_all = {(case.score, case.d_qk, case.d_v) for case in cases if case.score in SCORES}
    assert len(of_all) == len(SCORES) * len(pairs.DIMS) == 380
    assert len({(case.mask, case.d_qk, case.d_v) for case in cases}) == len(MASKS) * len(pairs.DIMS)
    assert len({(case.mask, case.block) for case in cases}) == len(MASKS) * len(matrix.BLOCKS)
    assert len({(pair.case.mask, pair.of) for pair in made}) == len(MASKS) * len(pairs.GRADIENTS)
    for what, count in (
        (lambda pair: pair.form, 2),
        (lambda pair: pair.case.dtype, 2),
        (lambda pair: (pair.case.h_q, pair.case.h_kv), len(matrix.HEADS)),
    ):
        found = {(pair.case.score, what(pair)) for pair in made if pair.case.score in SCORES}
        assert len(found) == len(SCORES) * count
    assert {case.score for case in cases} == SCORES.keys() | BIASES.keys() and len(BIASES) == 60
    assert len({pair.id for pair in made}) == len(made)
