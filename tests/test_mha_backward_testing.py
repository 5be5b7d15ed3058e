"""The tools of the GPU tests of dense attention's backward, without a GPU: inputs, reference, comparison."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import test_mha_backward_matrix as matrix
from full_cases import full_unless
from test_mha_testing import CASES, OUTWEIGHED

from kit.mha import MhaCase, MhaInputs, make_mha_inputs, tokens_of
from kit.mha import reference as torch_reference
from kit.mha_backward import (
    MhaGradients,
    check_mha_backward,
    exact_results,
    make_mha_gradients,
    reference_backward,
    rows_in_use,
)
from rawmla import reference

torch = pytest.importorskip("torch")

GRADIENTS = ("out", "lse", "both")


def by_definition(
    inputs: MhaInputs, gradients: MhaGradients, results: tuple[Any, Any]
) -> tuple[torch.Tensor, ...]:
    """The NumPy reference, of float64 arrays."""

    def numbers(x: Any) -> Any:
        return None if x is None else x.double().numpy()

    arrays = [numbers(x) for x in (gradients.dout, inputs.q, inputs.k, inputs.v, *results)]
    options = {**inputs.options(), "dlse": numbers(gradients.dlse)}
    options["attn_sink"] = numbers(options["attn_sink"])
    if options["alibi_slopes"] is not None:
        options["alibi_slopes"] = options["alibi_slopes"].numpy()
    if inputs.cu_seqlens_q is None:
        found = reference.flash_attn_backward(*arrays, **options)
    else:
        cu_q, cu_k, used_q, used_k = (
            None if x is None else x.numpy()
            for x in (inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.seqused_q, inputs.seqused_k)
        )
        found = reference.flash_attn_varlen_backward(
            *arrays, cu_q, cu_k, 9, 9, **options, seqused_q=used_q, seqused_k=used_k
        )
    return tuple(torch.from_numpy(x) for x in found)


@pytest.mark.parametrize("of", GRADIENTS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_the_reference_in_torch(case: MhaCase, of: str) -> None:
    """From rounded results as the definition takes them, and from its own exact ones."""
    inputs = make_mha_inputs(case, "cpu")
    gradients = make_mha_gradients(inputs, of)
    exact = torch_reference(inputs)
    for given, results in ((exact_results(inputs),) * 2, (None, exact)):
        got = reference_backward(inputs, gradients, given).values
        want = by_definition(inputs, gradients, results)
        assert len(got) == len(want) == (3 if case.sink is None else 4)
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("chunk", (1, 400))
def test_the_reference_in_parts(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_mha_inputs(replace(CASES[3], s_q=20), "cpu")
    gradients = make_mha_gradients(inputs, "both")
    whole = reference_backward(inputs, gradients)
    monkeypatch.setattr("kit.mha.CHUNK_SCORES", 4 * chunk)
    parts = reference_backward(inputs, gradients)
    for name in ("values", "sizes", "floors"):
        for got, want in zip(getattr(parts, name), getattr(whole, name), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-15)


@pytest.mark.parametrize("of", GRADIENTS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_gradients_of_rows_that_attend_nothing_are_the_gap(case: MhaCase, of: str) -> None:
    """Of rows of no request and of tokens without keys; the others are finite."""
    inputs = make_mha_inputs(case, "cpu")
    gradients = make_mha_gradients(inputs, of)
    attending, attended = rows_in_use(inputs)
    lse = torch_reference(inputs)[1]
    lse = lse if inputs.cu_seqlens_q is not None else lse.mT
    assert torch.equal(attending, lse.isfinite().all(-1))
    assert torch.equal(gradients.dout.isfinite().all(-1).all(-1), attending)
    assert bool(gradients.dout[~attending].isnan().all())
    assert bool((gradients.dout[attending] != 0).any()) == (of != "lse")
    assert bool((inputs.k[attended].isfinite()).all())
    if of == "out":
        assert gradients.dlse is None
        return
    assert gradients.dlse.shape == exact_results(inputs)[1].shape
    assert gradients.dlse.stride() == exact_results(inputs)[1].stride()
    dlse = gradients.dlse if inputs.cu_seqlens_q is not None else gradients.dlse.mT
    assert torch.equal(dlse.isfinite().all(-1), attending) and bool(dlse[~attending].isnan().all())


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize("options", ({}, {"causal": True}), ids=str)
def test_plain_torch(options: dict[str, Any], dtype: str) -> None:
    """The reference in the inputs' dtype errs as much as autograd does in it."""
    inputs = make_mha_inputs(
        MhaCase(s_q=150, s_k=150, h_kv=4, d_qk=64, d_v=64, dtype=dtype, **options), "cpu"
    )
    gradients = make_mha_gradients(inputs)
    leaves = [x.transpose(1, 2).detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    scores = leaves[0] @ leaves[1].mT * 64**-0.5
    if options:
        scores = scores.masked_fill(torch.ones(150, 150, dtype=torch.bool).triu(1), -torch.inf)
    out = torch.softmax(scores, -1) @ leaves[2]
    out.backward(gradients.dout.transpose(1, 2))
    exact = reference_backward(inputs, gradients).values
    plain = reference_backward(inputs, gradients, dtype=inputs.q.dtype).values
    for want, ours, leaf in zip(exact, plain, leaves, strict=True):
        theirs = (leaf.grad.transpose(1, 2).double() - want).abs().max()
        assert 1 / 2 < float((ours.double() - want).abs().max() / theirs) < 2


# ---- comparison


def kernel(inputs: MhaInputs, gradients: MhaGradients, results: tuple[Any, Any], wrong: str = "") -> Any:
    """What a kernel would give: sums in float32, P and dS in the inputs' dtype. `wrong`: where it errs."""
    case, (out, lse), dout, dlse = inputs.case, results, gradients.dout, gradients.dlse
    dtype = inputs.q.dtype
    dq, dk, dv = (torch.zeros(x.shape) for x in (inputs.q, inputs.k, inputs.v))
    dsink = torch.zeros(case.h_q)
    if inputs.cu_seqlens_q is None:
        places: Any = [((r, slice(None)), (r, slice(None))) for r in range(len(inputs.q))]
        lse, dlse = lse.mT, None if dlse is None else dlse.mT
    else:
        places = tokens_of(inputs)
    scale = case.d_qk**-0.5 if case.softmax_scale is None else case.softmax_scale
    left, right = (10**6 if bound < 0 else bound for bound in case.window)
    right = 0 if case.causal else right
    for r, (i, j) in enumerate(places):
        for h in range(case.h_q):
            h_kv = h % case.h_kv if wrong == "group" else h // (case.h_q // case.h_kv)
            q, k, v = inputs.q[i][:, h].float(), inputs.k[j][:, h_kv].float(), inputs.v[j][:, h_kv].float()
            do, o, log_sum = dout[i][:, h].float(), out[i][:, h].float(), lse[i][:, h, None]
            t = torch.arange(len(q))[:, None] + len(k) - len(q) + (wrong == "diagonal")
            keys = torch.arange(len(k))
            seen = (t - left <= keys) & (keys <= t + right)
            s = scale * q @ k.T
            slope = torch.ones_like(s)
            if case.softcap:
                ratio = torch.tanh(s / case.softcap) * (1 + 2**-11 * torch.sin(1e4 * s))
                s, slope = case.softcap * ratio, 1 - ratio**2
            if inputs.alibi_slopes is not None:
                slopes = inputs.alibi_slopes
                s = s - (slopes[h] if slopes.ndim == 1 else slopes[r, h]) * (t - keys).abs()
                if wrong == "slope of ALiBi":
                    slope = 1 - (s / case.softcap) ** 2
            if wrong == "slope":
                slope = 1
            weights = torch.where(seen, (s - log_sum).exp(), 0)
            kept = torch.ones_like(log_sum)
            some = seen.any(1)[:, None]
            dots = torch.where(some, (do * o).sum(1)[:, None], 0)
            if inputs.attn_sink is not None:
                sink = inputs.attn_sink[h].float()
                kept = torch.sigmoid(log_sum - sink)
                share = torch.where(some, torch.sigmoid(sink - log_sum), 0)
                dsink[h] -= dots.sum() if wrong == "share" else (share * dots).sum()
            p = torch.where(seen, weights * (1 if wrong == "sink" else kept), 0)
            delta = 0 if wrong == "delta" else dots
            ds = p * (do @ v.T - delta)
            if dlse is not None and wrong != "dlse":
                ds = ds + (p if wrong == "c" else weights) * dlse[i][:, h, None]
            ds = (scale * torch.where(seen, ds * slope, 0)).to(dtype).float()
            rounded = p.to(dtype).float()
            if wrong == "last key":
                ds[:, -1:] = 0
            clean_q, clean_do = (torch.where(some, x, 0) for x in (q, do))
            dq[i][:, h] += ds @ torch.where(seen.any(0)[:, None], k, 0)
            dk[j][:, h_kv] += ds.T @ clean_q
            dv[j][:, h_kv] += rounded.T @ (do if wrong == "masks by multiplication" else clean_do)
    found = [x.to(dtype) for x in (dq, dk, dv)]
    if inputs.attn_sink is not None:
        found.append(dsink.to(inputs.attn_sink.dtype))
    return tuple(found)


LARGE = (
    MhaCase(s_q=130, s_k=150, d_qk=128, d_v=128, causal=True),
    MhaCase(s_q=150, s_k=130, d_qk=192, d_v=128, causal=True, layout="slice"),
    MhaCase(s_q=130, s_k=300, d_qk=64, d_v=64, dtype="float16", window=(40, 3), sink="float16"),
    MhaCase(s_q=90, s_k=200, d_qk=64, d_v=96, softcap=15.0, alibi="heads", sink="float32", layout="heads"),
    MhaCase(s_q=90, s_k=200, d_qk=64, d_v=96, dtype="float16", softcap=15.0, sink="infinite", h_q=6),
    MhaCase(s_q=90, s_k=200, d_qk=64, d_v=96, softcap=15.0, spread=3.0),
    MhaCase(s_q=90, s_k=200, d_qk=64, d_v=96, softcap=2.0, spread=3.0, dtype="float16"),
    MhaCase(s_q=300, s_k=1, d_qk=64, d_v=64, h_q=6, sink="bfloat16"),
    MhaCase(s_q=300, s_k=1, d_qk=64, d_v=64, dtype="float16"),
    MhaCase(s_q=1, s_k=300, d_qk=64, d_v=64, alibi="heads"),
    MhaCase(s_q=200, s_k=200, d_qk=64, d_v=64, window=(0, 0)),
    MhaCase(s_q=150, s_k=200, spread=3.0),
    MhaCase(s_q=150, s_k=200, spread=0.1, dtype="float16"),
    MhaCase(
        q_lengths=(70, 0, 130, 1), k_lengths=(50, 4, 0, 200), q_used=(64, 0, 130, 1), k_used=(50, 4, 0, 170),
        rows_around=3, d_qk=96, d_v=96, causal=True, alibi="requests", sink="infinite", h_q=6,
    ),
    OUTWEIGHED,
    replace(OUTWEIGHED, dtype="float16"),
)  # fmt: skip


TAKEN = [*itertools.product((*CASES, *LARGE), GRADIENTS)]
IN_TURN = {TAKEN[i + i // 3 % 3] for i in range(0, len(TAKEN), 3)}


@pytest.mark.parametrize(
    "taken",
    full_unless(lambda taken: taken in IN_TURN, TAKEN),
    ids=lambda taken: f"{taken[0].id}-{taken[1]}",
)
def test_the_comparison_takes_what_a_kernel_gives(taken: tuple[MhaCase, str]) -> None:
    """Each run has every case, with one kind of gradients or another."""
    case, of = taken
    inputs = make_mha_inputs(case, "cpu")
    gradients, results = make_mha_gradients(inputs, of), exact_results(inputs)
    check_mha_backward(inputs, gradients, results, kernel(inputs, gradients, results), plain=True)


PLAIN = MhaCase(s_q=130, s_k=150, d_qk=64, d_v=64, causal=True)
CAPPED = replace(PLAIN, softcap=15.0, alibi="heads")
WITH_SINK = replace(PLAIN, sink="float32")
EMPTY_ROWS = replace(PLAIN, s_k=70)


@pytest.mark.parametrize(
    ("case", "of", "wrong", "text"),
    (
        (PLAIN, "out", "delta", "relative L2 error of dq"),
        (PLAIN, "both", "dlse", "relative L2 error of dq .* relative L2 error of dk"),
        (PLAIN, "both", "diagonal", "relative L2 error of dq .* of dk .* of dv"),
        (PLAIN, "out", "group", "relative L2 error of dq"),
        (PLAIN, "out", "last key", "L2 error of a row of dk"),
        (CAPPED, "out", "slope", "relative L2 error of dq"),
        (CAPPED, "both", "slope of ALiBi", "relative L2 error of dq"),
        (WITH_SINK, "both", "c", "L2 error of a row of dq .* of dk"),
        (WITH_SINK, "out", "sink", "relative L2 error of dq .* of dk .* of dv"),
        (WITH_SINK, "out", "share", "error of dsink"),
        (EMPTY_ROWS, "out", "masks by multiplication", "elements of dv are infinite or NaN"),
    ),
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_the_comparison_finds_a_wrong_kernel(case: MhaCase, of: str, wrong: str, text: str) -> None:
    inputs = make_mha_inputs(case, "cpu")
    gradients, results = make_mha_gradients(inputs, of), exact_results(inputs)
    check_mha_backward(inputs, gradients, results, kernel(inputs, gradients, results), plain=True)
    with pytest.raises(AssertionError, match=text):
        check_mha_backward(inputs, gradients, results, kernel(inputs, gradients, results, wrong))


def test_the_comparison_finds_wrong_numbers() -> None:
    """A single row, of which the L2 error of the whole does not tell; NaN; what is not 0 and should be."""
    inputs = make_mha_inputs(replace(EMPTY_ROWS, s_k=100, sink="bfloat16"), "cpu")
    gradients, results = make_mha_gradients(inputs, "both"), exact_results(inputs)
    found = kernel(inputs, gradients, results)

    def fails(text: str, change: Callable[[list[Any]], Any], of: MhaGradients = gradients) -> None:
        got = [x.clone() for x in (found if of is gradients else kernel(inputs, of, results))]
        change(got)
        with pytest.raises(AssertionError, match=text):
            check_mha_backward(inputs, of, results, tuple(got), plain=True)

    for i, name in enumerate(("dq", "dk", "dv")):
        fails(f": relative L2 error of {name}", lambda got, i=i: got[i].mul_(1.02))
        fails(f": L2 error of a row of {name} ", lambda got, i=i: got[i][1, 99, 1].mul_(1.05))
        fails(f"elements of {name} are", lambda got, i=i: got[i][1, 99, 1, 3].fill_(torch.nan))
        fails(f"largest error of {name} ", lambda got, i=i: got[i][1, 99, 1, 3].add_(0.2))
        fails(f"{name} of torch.float32", lambda got, i=i: got.__setitem__(i, got[i].float()))
        fails(f"{name} of .* shape", lambda got, i=i: got.__setitem__(i, got[i][:1]))
    fails("dq is not 0 in a row", lambda got: got[0][1, 29, 1, 3].fill_(1e-6))
    fails("dq is not 0 in a row", lambda got: got[0][1, 29, 1, 3].fill_(torch.nan))
    fails("error of dsink", lambda got: got[3][1].mul_(1.02))
    fails("error of dsink", lambda got: got[3][1].fill_(torch.nan))
    fails("3 gradients instead of 4", lambda got: got.pop())
    of_lse = make_mha_gradients(inputs, "lse")
    fails("dv is not 0 without", lambda got: got[2][1, 99, 1, 3].fill_(1e-30), of_lse)
    check_mha_backward(inputs, gradients, results, found, plain=True)
    with pytest.raises(AssertionError, match="of dq"):
        check_mha_backward(inputs, of_lse, results, found)


def test_the_comparison_finds_what_is_outside_of_requests() -> None:
    case = MhaCase(
        q_lengths=(30, 0, 5), k_lengths=(20, 4, 9), q_used=(30, 0, 4), k_used=(16, 4, 8), rows_around=2
    )
    inputs = make_mha_inputs(case, "cpu")
    gradients, results = make_mha_gradients(inputs), exact_results(inputs)
    check_mha_backward(inputs, gradients, results, kernel(inputs, gradients, results))
    for i, rows in ((0, (0, 36, 37)), (1, (0, 18, 22, 34, 35)), (2, (1, 21, 23, 34, 36))):
        for row in rows:
            got = kernel(inputs, gradients, results)
            got[i][row, 1, 5] = 1e-20
            with pytest.raises(AssertionError, match="is not 0 in a row that takes no part;"):
                check_mha_backward(inputs, gradients, results, got)


def test_all_pairs_of_the_general_matrix() -> None:
    """Every value of every dimension of the matrix meets every value of the others."""
    rows = []
    for variant in matrix.VARIANTS:
        for case, mask, of, given, deterministic in matrix.general_cases(*variant):
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
                    "layout": case.layout,
                    "gradients": of,
                    "given": given,
                    "deterministic": deterministic,
                }
            )
    dims = sum(len(served) for served in matrix.DIMS)
    counts = {"sizes": 30, "dims": dims, "heads": 4, "mask": 5, "sink": 5, "layout": 3, "gradients": 3}
    for one, other in combinations(rows[0], 2):
        pairs = {(row[one], row[other]) for row in rows}
        assert len(pairs) == counts.get(one, 2) * counts.get(other, 2), (one, other)
