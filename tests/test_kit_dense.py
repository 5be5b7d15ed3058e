"""The kit of dense attention and prefix prefill: inputs, references on the device, comparison."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from full_cases import full_unless

from kit.mha import MhaCase, MhaInputs, check_mha, covered_rows, make_mha_inputs, tokens_of
from kit.mha import reference as torch_reference
from kit.mha_backward import (
    MhaGradients,
    check_mha_backward,
    exact_results,
    make_mha_gradients,
    reference_backward,
    rows_in_use,
)
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
from kit.prefix import reference as prefix_reference
from rawmla import reference

torch = pytest.importorskip("torch")

FIXED = {"b": 2, "s_q": 7, "s_k": 9, "d_qk": 24, "d_v": 16}
SEGMENTS: dict[str, Any] = {"q_lengths": (3, 0, 6, 1), "k_lengths": (5, 4, 0, 2), "d_qk": 24, "d_v": 16}
SAME: dict[str, Any] = {**SEGMENTS, "k_lengths": (3, 0, 6, 1), "h_q": 2}
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
    MhaCase(**SAME, packed="qkv", q_used=(1, 0, 2, 1)),
    MhaCase(**{**SAME, "d_v": 24}, packed="qkv4", rows_around=1),
)
OUTWEIGHED = MhaCase(s_q=70, s_k=1, d_v=64, alibi="heads", sink="float32")  # out is down to exp(-60) of v
GRADIENTS = ("out", "lse", "both")


def name_of(x: Any) -> str:
    """A case or a kind of gradients in the name of a test."""
    return x if isinstance(x, str) else x.id


def by_definition(inputs: MhaInputs, gradients: MhaGradients | None = None, results: Any = None) -> Any:
    """The NumPy reference, of float64 arrays: out and lse, or the gradients that follow from them."""

    def numbers(x: Any) -> Any:
        return None if x is None else x.double().numpy()

    options = inputs.options()
    options["attn_sink"] = numbers(options["attn_sink"])
    if options["alibi_slopes"] is not None:
        options["alibi_slopes"] = options["alibi_slopes"].numpy()
    arrays = [numbers(x) for x in (inputs.q, inputs.k, inputs.v)]
    kind = "func"
    if gradients is not None:
        kind = "backward"
        arrays = [numbers(gradients.dout), *arrays, *(numbers(x) for x in results)]
        options["dlse"] = numbers(gradients.dlse)
    if inputs.cu_seqlens_q is None:
        found = getattr(reference, f"flash_attn_{kind}")(*arrays, **options)
    else:
        cu_q, cu_k, used_q, used_k = (
            None if x is None else x.numpy()
            for x in (inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.seqused_q, inputs.seqused_k)
        )
        found = getattr(reference, f"flash_attn_varlen_{kind}")(
            *arrays, cu_q, cu_k, 9, 9, **options, seqused_q=used_q, seqused_k=used_k
        )
    return tuple(torch.from_numpy(x.copy()) for x in found)


# ---- inputs


def is_token(array: Any, bounds: Any, used: Any) -> Any:
    """The rows of an array that hold tokens."""
    rows = torch.full(array.shape[:-2], bounds is None)
    if bounds is not None:
        lengths = bounds.diff() if used is None else used
        for start, length in zip(bounds.tolist(), lengths.tolist(), strict=False):
            rows[start : start + length] = True
    return rows


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_memory_of_no_token_holds_the_gap(case: MhaCase) -> None:
    """And nothing else: tokens are finite, whatever the layout."""
    for gap in (float("nan"), float("inf")):
        inputs = make_mha_inputs(replace(case, gap=gap), "cpu")
        of_k = inputs.cu_seqlens_k, inputs.seqused_k
        for array, bounds, used in (
            (inputs.q, inputs.cu_seqlens_q, inputs.seqused_q),
            (inputs.k, *of_k),
            (inputs.v, *of_k),
        ):
            rows = is_token(array, bounds, used)
            assert bool(array[rows].isfinite().all()) and not bool(array[~rows].isfinite().any())
            if inputs.parts is None:
                whole = torch.empty(0, dtype=array.dtype).set_(array.untyped_storage())
                heads, columns = array.shape[-2:]
                assert int(whole.isfinite().sum()) == int(rows.sum()) * heads * columns


@pytest.mark.parametrize("of", GRADIENTS)
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_gradients_of_rows_that_attend_nothing_are_the_gap(case: MhaCase, of: str) -> None:
    """Rows of no request and tokens without keys; the others are finite."""
    inputs = make_mha_inputs(case, "cpu")
    gradients, lse = make_mha_gradients(inputs, of), torch_reference(inputs)[1]
    attending, attended = rows_in_use(inputs)
    lse = lse if inputs.cu_seqlens_q is not None else lse.mT
    assert torch.equal(attending, lse.isfinite().all(-1))
    assert torch.equal(gradients.dout.isfinite().all(-1).all(-1), attending)
    assert bool(gradients.dout[~attending].isnan().all()) and bool((inputs.k[attended].isfinite()).all())
    assert bool((gradients.dout[attending] != 0).any()) == (of != "lse")
    assert (gradients.dlse is None) == (of == "out")
    if gradients.dlse is not None:
        given = exact_results(inputs)[1]
        assert (gradients.dlse.shape, gradients.dlse.stride()) == (given.shape, given.stride())
        dlse = gradients.dlse if inputs.cu_seqlens_q is not None else gradients.dlse.mT
        assert torch.equal(dlse.isfinite().all(-1), attending) and bool(dlse[~attending].isnan().all())


# ---- references


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_the_references(case: MhaCase) -> None:
    """Forward; backward from rounded results, as the definition takes them, and from exact ones."""
    inputs = make_mha_inputs(case, "cpu")
    rows, exact = covered_rows(inputs), torch_reference(inputs)
    for got, want in zip(exact, by_definition(inputs), strict=True):
        torch.testing.assert_close(got[rows], want[rows], rtol=1e-9, atol=1e-11)
    for of, given in itertools.product(GRADIENTS, (exact_results(inputs), None)):
        gradients = make_mha_gradients(inputs, of)
        found = reference_backward(inputs, gradients, given).values
        wanted = by_definition(inputs, gradients, exact if given is None else given)
        assert len(found) == len(wanted) == (3 if case.sink is None else 4)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("chunk", (1, 400))
def test_references_in_parts(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_mha_inputs(replace(CASES[3], s_q=20), "cpu")
    gradients = make_mha_gradients(inputs, "both")

    def results() -> list[Any]:
        found = reference_backward(inputs, gradients)
        return [*torch_reference(inputs), *found.values, *found.sizes, *found.floors]

    whole = results()
    monkeypatch.setattr("kit.mha.CHUNK_SCORES", chunk)
    for got, want in zip(results(), whole, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-15)


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_plain_torch(dtype: str) -> None:
    """The reference in the inputs' dtype errs as much as autograd does in it."""
    shape: dict[str, Any] = {"s_q": 150, "s_k": 150, "h_kv": 4, "d_qk": 64, "d_v": 64}
    inputs = make_mha_inputs(MhaCase(**shape, dtype=dtype, causal=True), "cpu")
    gradients = make_mha_gradients(inputs)
    leaves = [x.transpose(1, 2).detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    hidden = torch.ones(150, 150, dtype=torch.bool).triu(1)
    scores = (leaves[0] @ leaves[1].mT * 64**-0.5).masked_fill(hidden, -torch.inf)
    out = torch.softmax(scores, -1) @ leaves[2]
    out.backward(gradients.dout.transpose(1, 2))
    exact = reference_backward(inputs, gradients).values
    plain = reference_backward(inputs, gradients, dtype=inputs.q.dtype).values
    for want, ours, leaf in zip(exact, plain, leaves, strict=True):
        theirs = (leaf.grad.transpose(1, 2).double() - want).abs().max()
        assert 1 / 2 < float((ours.double() - want).abs().max() / theirs) < 2


# ---- comparison of the forward


def rounded(inputs: MhaInputs) -> tuple[Any, Any]:
    """What an exact kernel would give."""
    out, lse = torch_reference(inputs)
    return out.to(inputs.q.dtype), lse.float()


@pytest.mark.parametrize("case", (*CASES, OUTWEIGHED, replace(OUTWEIGHED, dtype="float16")), ids=name_of)
def test_the_comparison_takes_rounded_results(case: MhaCase) -> None:
    inputs = make_mha_inputs(case, "cpu")
    check_mha(inputs, rounded(inputs), plain=True)


def test_the_comparison_finds_what_is_wrong() -> None:
    inputs = make_mha_inputs(MhaCase(s_q=70, s_k=90, d_v=64), "cpu")
    planted: tuple[tuple[str, Callable[[Any, Any], Any]], ...] = (
        ("out are infinite", lambda out, lse: out[1, 2].fill_(float("nan"))),
        ("L2 error of out", lambda out, lse: out.mul_(1.02)),
        ("L2 error of a row of out 4", lambda out, lse: out[0, 3, 1].mul_(1.02)),
        ("plain torch", lambda out, lse: out[0, 3, 1, 5].add_(0.1)),
        ("error of lse", lambda out, lse: lse[1, 1, 4].add_(0.001)),
        ("lse is infinite", lambda out, lse: lse[1, 1, 4].fill_(float("-inf"))),
    )
    for text, change in planted:
        results = rounded(inputs)
        change(*results)
        with pytest.raises(AssertionError, match=text):
            check_mha(inputs, results, plain=True)


# ---- comparison of gradients


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
)  # fmt: skip  # fmt: skip
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


# ---- prefix prefill

SMALL: dict[str, Any] = {"query_lengths": (3, 0, 1, 6, 2), "contexts": (9, 5, 16, 0, 21), "d": 24}
PREFIX_CASES = (
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


def prefix_by_definition(inputs: PrefixInputs) -> Any:
    """The NumPy reference's o, which it rounds to the dtype of o; 7 where it is not written."""
    case = inputs.case
    o = torch.full(inputs.q.shape, 7, dtype=inputs.q.dtype if case.out_scale is None else torch.uint8)
    return reference.context_attention_fwd(**inputs.keywords(o))


@pytest.mark.parametrize("case", PREFIX_CASES, ids=name_of)
def test_the_reference_of_prefixes(case: PrefixCase) -> None:
    """Rounded, it has the bits of the definition, and it writes the same rows."""
    inputs = make_prefix_inputs(case, "cpu")
    got, want = prefix_reference(inputs), prefix_by_definition(inputs)
    rows = written_rows(inputs)
    assert bool(got[rows].isfinite().all()) and got[rows].numel()
    rounded = got.to(want.dtype) if case.out_scale is None else encode_out(got / float(inputs.out_scale))
    assert torch.equal(rounded[rows], want[rows])
    others = torch.ones(len(want), dtype=torch.bool)
    others[rows] = False
    assert bool(got[others].isnan().all()) and bool((want[others] == 7).all())


@pytest.mark.parametrize("case", PREFIX_CASES, ids=name_of)
def test_caches_and_tables_hold_the_gap(case: PrefixCase) -> None:
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


def rounded_prefix(inputs: PrefixInputs) -> Any:
    """What an exact kernel would give."""
    want = prefix_reference(inputs)
    if inputs.case.out_scale is None:
        return want.to(inputs.q.dtype)
    return encode_out(want / float(inputs.out_scale))


@pytest.mark.parametrize("case", PREFIX_CASES[:-1], ids=name_of)  # the last is below float16's numbers
def test_the_comparison_takes_rounded_prefixes(case: PrefixCase) -> None:
    inputs = make_prefix_inputs(case, "cpu")
    check_prefix(inputs, rounded_prefix(inputs))


@pytest.mark.parametrize("part", (1 << 24, 100))
def test_the_comparison_finds_wrong_prefixes(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kit.compare.PART_ELEMENTS", part)
    inputs = make_prefix_inputs(PrefixCase(**{**SMALL, "d": 64}), "cpu")

    def fails(text: str, change: Any) -> None:
        o = rounded_prefix(inputs)
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
    want = prefix_reference(inputs) / 0.01
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
