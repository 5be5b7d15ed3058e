"""The backward of dense attention of segments: lengths, seqused, slices, and what lies around the tokens.

Memory that belongs to no token is NaN in every case. The cases of one batch are one test, which goes on after
a mismatch, so that one run shows the whole pattern.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from gpu_support import assert_same_bits, torch
from mha_backward_calls import (
    assert_same_gradients,
    backward_inputs,
    backward_of,
    check_backward,
    gradient_buffers,
)
from mha_calls import CANARY, assert_untouched_around
from test_mha_autograd import in_parts
from test_mha_backward_sanitizer import CASES as SMALL_CASES
from test_mha_backward_sanitizer import FIXED_ORDER, OTHER_FORMS, PACKED, PARTIAL
from test_mha_varlen import MODES, lengths_of, some_of

import rawmla
from kit.mha import MhaCase, make_mha_inputs
from rawmla.kernels.mha_backward_variants import ALL, Needs, specs

# Kernels, by head dimensions, dtype and flags: few, so that compiling takes little time. A kernel of 192 in
# bfloat16 goes by keys in the wide form; with a sink and a gradient of lse by product, as the kernel of 128
# with softcap and ALiBi then does. A kernel of 192 in float16, or of 256, always goes by product.
KERNELS: tuple[dict[str, Any], ...] = (
    {"d_qk": 64, "d_v": 64, "alibi": "requests"},
    {"d_qk": 128, "d_v": 128},
    {"d_qk": 192, "d_v": 128},
    {"d_qk": 96, "d_v": 96, "dtype": "float16"},
    {"d_qk": 64, "d_v": 64, "softcap": 15.0},
    {"d_qk": 192, "d_v": 128},
    {"d_qk": 59, "d_v": 111},
    {"d_qk": 256, "d_v": 256},
    {"d_qk": 128, "d_v": 128, "softcap": 15.0, "alibi": "heads"},
    {"d_qk": 192, "d_v": 128, "dtype": "float16"},
)
# Kernels of every form, with what gradients are of: a sink and a gradient of lse are a flag together.
FORMS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"d_qk": 128, "d_v": 128}, "out"),
    ({"d_qk": 128, "d_v": 128, "sink": "float32"}, "both"),
    ({"d_qk": 192, "d_v": 128}, "lse"),
    ({"d_qk": 192, "d_v": 128, "sink": "bfloat16"}, "out"),
    ({"d_qk": 192, "d_v": 128, "sink": "float32"}, "both"),
    ({"d_qk": 256, "d_v": 256}, "both"),
    ({"d_qk": 128, "d_v": 128, "softcap": 15.0, "alibi": "requests"}, "out"),
    ({"d_qk": 128, "d_v": 128, "softcap": 15.0, "sink": "float32"}, "both"),
    ({"d_qk": 64, "d_v": 64}, "both"),
    ({"d_qk": 96, "d_v": 96, "dtype": "float16", "sink": "bfloat16"}, "both"),
)
ONE_OF_EACH_FORM = [FORMS[i][0] for i in (0, 2, 5, 8)]
MASKS: tuple[dict[str, Any], ...] = ({}, {"causal": True}, {"window": (60, 20)})
each_form = pytest.mark.parametrize("dims", ONE_OF_EACH_FORM, ids=lambda dims: f"{dims['d_qk']}")
LENGTHS = tuple((b, longest) for b in (1, 7, 20) for longest in (8, 64, 2048))
RAGGED: dict[str, Any] = {"q_lengths": (300, 0, 1, 77, 130, 64), "k_lengths": (257, 90, 0, 200, 131, 513)}
USED: dict[str, Any] = {"q_used": (290, 0, 0, 77, 3, 60), "k_used": (250, 90, 0, 5, 129, 513)}
FULL = MhaCase(**RAGGED, **USED, rows_around=200, layout="slice", causal=True, sink="float32")


def random_case(b: int, longest: int, mode_q: str, mode_k: str, number: int) -> tuple[MhaCase, str]:
    """A case with these lengths, its other dimensions drawn, and what the gradients are of."""
    draw = random.Random(f"backward {b} {longest} {mode_q} {mode_k} {number}")
    q_lengths = lengths_of(mode_q, longest, b, draw)
    k_lengths = lengths_of(mode_k, longest, b, draw)
    case = MhaCase(
        q_lengths=q_lengths,
        k_lengths=k_lengths,
        q_used=some_of(q_lengths, draw) if draw.random() < 0.5 else None,
        k_used=some_of(k_lengths, draw) if draw.random() < 0.5 else None,
        rows_around=draw.choice((0, 5, 150)),
        h_q=6,
        h_kv=draw.choice((1, 2, 3, 6)),
        causal=draw.random() < 0.5,
        window=draw.choice(((-1, -1), (-1, -1), (100, -1), (30, 5))),
        sink=draw.choice((None, "float32", "bfloat16", "infinite")),
        layout=draw.choice(("plain", "slice", "heads")),
        seed=number,
        **KERNELS[(number + b + longest) % len(KERNELS)],  # other ones for the same modes in every test
    )
    return case, draw.choice(("out", "lse", "both"))


def cases_of(b: int, longest: int) -> list[tuple[MhaCase, str]]:
    """A case for every pair of modes."""
    pairs = [(mode_q, mode_k) for mode_q in MODES for mode_k in MODES]
    return [random_case(b, longest, *pair, number) for number, pair in enumerate(pairs)]


def form_of_call(case: MhaCase, of: str, needs: Needs = ALL) -> str:
    """The form of the main kernel of a call. By keys, consumers have their columns of dQ, or take turns."""
    weights = case.sink is not None and of != "out"
    flags = case.softcap > 0, case.alibi is not None, weights
    spec = specs(case.dtype, case.d_qk, case.d_v, *flags, needs)[1]
    if spec.name == "mha_backward_by_product":
        return "by product"
    assert spec.name == "mha_backward"
    defines = dict(spec.defines)
    if defines["WIDE"]:
        return "by keys, wide"
    return "by keys, in turn" if defines["D_QK"] <= 96 else "by keys"


def features_of(case: MhaCase, of: str) -> set[str]:
    """What a form of the kernel has to meet in segments."""
    features = {
        "causal": case.causal,
        "left bound": case.window[0] >= 0,
        "both bounds": case.window[0] >= 0 and (case.causal or case.window[1] >= 0),
        "no mask": not case.causal and case.window == (-1, -1),
        "groups of heads": case.h_kv < case.h_q,
        "a head each": case.h_kv == case.h_q,
        "one KV head": case.h_kv == 1,
        "seqused_q": case.q_used is not None,
        "seqused_k": case.k_used is not None,
        "no seqused": case.q_used is None and case.k_used is None,
        "empty queries": 0 in (case.q_lengths or ()),
        "empty keys": 0 in (case.k_lengths or ()),
        "several tiles": max(case.q_lengths or (0,)) > 128 and max(case.k_lengths or (0,)) > 256,
        "rows around": case.rows_around > 0,
        "a sink": case.sink is not None,
    }
    return {name for name, met in features.items() if met} | {case.layout, of}


EVERY_FEATURE = {
    *("causal", "left bound", "both bounds", "no mask", "groups of heads", "a head each", "one KV head"),
    *("seqused_q", "seqused_k", "no seqused", "empty queries", "empty keys", "several tiles", "rows around"),
    *("a sink", "plain", "slice", "heads", "out", "lse", "both"),
}


def test_forms_of_the_cases() -> None:
    """Segments meet every form of the kernel with everything that cases differ in, and so do the short lists
    here and those that run under compute-sanitizer.
    """
    met: dict[str, set[str]] = {}
    for sizes in LENGTHS:
        for case, of in cases_of(*sizes):
            met.setdefault(form_of_call(case, of), set()).update(features_of(case, of))
    forms = {"by keys", "by keys, in turn", "by keys, wide", "by product"}
    assert met == dict.fromkeys(forms, EVERY_FEATURE)
    assert {form_of_call(MhaCase(**options), of) for options, of in FORMS} == forms
    assert {form_of_call(MhaCase(**dims), "out") for dims in ONE_OF_EACH_FORM} == forms
    assert {form_of_call(case, "out") for case in AROUND} == forms
    small = (*SMALL_CASES, *OTHER_FORMS)
    for calls in (small, [call for call in small if call[0].q_lengths], FIXED_ORDER):
        assert {form_of_call(case, of) for case, of in calls} == forms
    assert {form_of_call(case, "out") for case in PACKED} == forms
    assert {(form_of_call(case, of, needs), needs.dq, needs.dv) for case, of, needs in PARTIAL} >= {
        (form, dq, not dq) for form in forms for dq in (False, True)
    }


@pytest.mark.parametrize("mask", MASKS, ids=("full", "causal", "window"))
@pytest.mark.parametrize(("options", "of"), FORMS, ids=lambda x: x if isinstance(x, str) else MhaCase(**x).id)
def test_backward_of_segments_in_every_form(options: dict[str, Any], of: str, mask: dict[str, Any]) -> None:
    """Empty segments, seqused, tokens that no segment covers and groups of heads, all in one call."""
    case = MhaCase(**RAGGED, **USED, **options, **mask, rows_around=150, layout="slice", h_q=6, h_kv=2)
    call = backward_inputs(make_mha_inputs(case), of)
    buffers, given = gradient_buffers(call.inputs, CANARY)
    for more in ({}, given, {"deterministic": True}):
        check_backward(call, backward_of(call, **more), plain=True)
    for buffer, array in zip(buffers, given.values(), strict=True):
        assert_untouched_around(buffer, array)


@pytest.mark.parametrize(("b", "longest"), LENGTHS)
def test_backward_lengths(b: int, longest: int) -> None:
    """Every pair of modes, with dq, dk and dv given to every second call."""
    failures: list[str] = []
    cases = cases_of(b, longest)
    for number, (case, of) in enumerate(cases):
        call = backward_inputs(make_mha_inputs(case), of)
        try:
            buffers, given = gradient_buffers(call.inputs, CANARY) if number % 2 else ([], {})
            got = backward_of(call, **given)
            assert all(one is given[name] for one, name in zip(got, given, strict=False))
            check_backward(call, got, plain=True)
            for buffer, array in zip(buffers, given.values(), strict=True):
                assert_untouched_around(buffer, array)
        except AssertionError as error:
            failures.append(f"gradient of {of}: {error}")
    assert len(cases) == 16
    shown = "\n".join(failures[:20])
    assert not failures, f"{len(failures)} of {len(cases)} cases failed:\n{shown}"


@pytest.mark.parametrize("of", ("out", "lse", "both"))
@each_form
def test_backward_of_tokens_that_no_segment_covers(dims: dict[str, Any], of: str) -> None:
    """Their gradients are 0 in given arrays too, and so are those of tokens past seqused."""
    sink = None if of == "lse" else "float32"  # so that one call of 192 has the wide form
    call = backward_inputs(make_mha_inputs(replace(FULL, sink=sink, **dims)), of)
    for given in ({}, gradient_buffers(call.inputs, CANARY)[1]):
        got = backward_of(call, **given)
        check_backward(call, got)
        for x, bounds in zip(got[:3], ("cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_k"), strict=True):
            ends = getattr(call.inputs, bounds).tolist()
            assert ends[0] == 200 and len(x) == ends[-1] + 200
            assert not bool(x[: ends[0]].any()) and not bool(x[ends[-1] :].any())
        assert not bool(got[0][200 + 290 : 200 + 301].any()) and not bool(got[1][200 + 250 : 200 + 257].any())


def test_backward_arrays_without_a_request() -> None:
    """No segment has tokens, or none has keys, though the arrays have rows: all gradients are 0."""
    for q_lengths, k_lengths in (((0, 0), (0, 0)), ((5, 130), (0, 0)), ((0, 0), (5, 130))):
        case = MhaCase(q_lengths=q_lengths, k_lengths=k_lengths, rows_around=70, sink="float32")
        call = backward_inputs(make_mha_inputs(case), "both")
        for given in ({}, gradient_buffers(call.inputs, CANARY)[1]):
            for x in backward_of(call, **given):
                assert_same_bits(case.id, x, torch.zeros_like(x))


AROUND = (
    FULL,
    MhaCase(**RAGGED, k_used=(250, 1, 0, 129, 0, 511), d_qk=64, d_v=64, layout="heads", rows_around=200),
    MhaCase(**RAGGED, window=(20, 3), h_kv=1, d_qk=96, d_v=96, k_used=(33, 90, 0, 70, 131, 300)),
    MhaCase(**RAGGED, d_qk=40, d_v=128, q_used=(1, 0, 1, 76, 0, 64), layout="slice", dtype="float16"),
    MhaCase(**RAGGED, **USED, rows_around=200, layout="slice", causal=True, d_qk=192, h_kv=1),
    MhaCase(**RAGGED, **USED, window=(20, 3), d_qk=256, d_v=256, layout="heads"),
    MhaCase(**RAGGED, **USED, rows_around=9, causal=True, softcap=15.0, alibi="requests"),
)


@pytest.mark.parametrize("gap", (float("nan"), float("inf"), 0.0))
@pytest.mark.parametrize("case", AROUND, ids=lambda case: case.id)
def test_what_lies_around_tokens_has_no_effect_on_gradients(case: MhaCase, gap: float) -> None:
    """Whether it is NaN, infinite, 0 or 1, in the segments' tails too."""
    results = []
    for around in (gap, 1.0):
        call = backward_inputs(make_mha_inputs(replace(case, gap=around)), "both")
        results.append(backward_of(call))
        check_backward(call, results[-1])
    assert_same_gradients(f"gaps of {gap}", *results)


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("spoilt", (0, 3, 5))
@each_form
def test_backward_beside_a_spoilt_request(dims: dict[str, Any], spoilt: int, causal: bool) -> None:
    """All arrays of one request are NaN: the others have the bits that they have beside a sound one."""
    call = backward_inputs(make_mha_inputs(MhaCase(**RAGGED, **dims, causal=causal)), "both")
    want = backward_of(call)
    check_backward(call, want)
    inputs = call.inputs
    rows_q, rows_k = (
        slice(int(bounds[spoilt]), int(bounds[spoilt + 1]))
        for bounds in (inputs.cu_seqlens_q, inputs.cu_seqlens_k)
    )
    of_queries = (inputs.q, *call.results, call.gradients.dout, call.gradients.dlse)
    for x, rows in (*((x, rows_q) for x in of_queries), (inputs.k, rows_k), (inputs.v, rows_k)):
        x[rows] = float("nan")
    got = backward_of(call)
    for one, wanted, rows in zip(got, want, (rows_q, rows_k, rows_k), strict=True):
        assert bool(one[rows].isnan().any())
        one[rows] = wanted[rows]
    assert_same_gradients("beside a spoilt request", got, want)


@each_form
def test_backward_with_longer_bounds_of_lengths(dims: dict[str, Any]) -> None:
    """max_seqlen may be more than any length."""
    call = backward_inputs(make_mha_inputs(MhaCase(**RAGGED, **dims, causal=True)))
    want = backward_of(call)
    check_backward(call, want)
    inputs = call.inputs
    for longest in ((300, 513), (301, 600), (100_000, 1_000_000), (2**30 - 1, 2**30 - 1)):
        got = rawmla.flash_attn_varlen_backward(
            call.gradients.dout, inputs.q, inputs.k, inputs.v, *call.results, inputs.cu_seqlens_q,
            inputs.cu_seqlens_k, *longest, causal=True,
        )  # fmt: skip
        check_backward(call, got)
        assert_same_gradients(str(longest), got, want)


@pytest.mark.parametrize("sizes", ((128, 128), (130, 77), (1, 300), (77, 0)), ids=str)
@pytest.mark.parametrize("heads", ((4, 4), (8, 2)), ids=str)
@each_form
def test_backward_of_equal_lengths(
    dims: dict[str, Any], heads: tuple[int, int], sizes: tuple[int, int]
) -> None:
    """With and without is_varlen; and as a batch, whose requests are a dimension."""
    s_q, s_k = sizes
    case = MhaCase(
        q_lengths=(s_q,) * 3, k_lengths=(s_k,) * 3, h_q=heads[0], h_kv=heads[1], causal=True, sink="float32",
        **dims,
    )  # fmt: skip
    of = "out" if case.d_qk == 192 else "both"  # which has another form
    call = backward_inputs(make_mha_inputs(case), of)
    for is_varlen in (True, False):
        check_backward(call, backward_of(call, is_varlen=is_varlen))

    def batch(x: Any) -> Any:
        return x.unflatten(0, (3, -1)) if len(x) else x.view(3, 0, *x.shape[1:])

    inputs, (out, lse) = call.inputs, call.results
    arrays = (call.gradients.dout, inputs.q, inputs.k, inputs.v, out)
    dlse = None if of == "out" else batch(call.gradients.dlse).mT
    got = rawmla.flash_attn_backward(
        *map(batch, arrays), batch(lse).mT, causal=True, dlse=dlse, attn_sink=inputs.attn_sink
    )
    check_backward(call, (*(x.flatten(0, 1) for x in got[:3]), got[3]))


@pytest.mark.parametrize("heads_first", (False, True))
def test_both_orders_of_lse(heads_first: bool) -> None:
    """lse and dlse as [tokens, heads] with either dimension innermost in memory."""
    call = backward_inputs(make_mha_inputs(replace(FULL, layout="plain")), "both")
    want = backward_of(call)
    check_backward(call, want)

    def stored(x: Any) -> Any:
        return x.T.contiguous().T if heads_first else x.contiguous()

    call.results = call.results[0], stored(call.results[1])
    call.gradients.dlse = stored(call.gradients.dlse)
    assert (call.results[1].stride(0) == 1) == heads_first == (call.gradients.dlse.stride(0) == 1)
    assert_same_gradients("lse stored otherwise", backward_of(call), want)


@pytest.mark.parametrize("lengths", ((300, 0, 1, 77, 130, 64), (128,) * 3, (7, 0, 2) * 15, (513,)), ids=str)
@pytest.mark.parametrize(
    "options",
    (
        {"packed": "qkv", "h_kv": 4, "d_qk": 128, "d_v": 64, "causal": True},
        {"packed": "qkv", "h_kv": 4, "d_qk": 192, "layout": "slice"},
        {"packed": "qkv4", "h_kv": 4, "d_qk": 64, "d_v": 64, "dtype": "float16"},
        {"packed": "qkv4", "h_kv": 4, "d_qk": 256, "d_v": 256, "window": (60, 9)},
        {"packed": "kv", "h_q": 8, "h_kv": 2, "d_qk": 192, "causal": True},
        {"packed": "kv", "h_q": 4, "h_kv": 1, "d_qk": 128, "d_v": 64, "layout": "slice", "causal": True},
        {"packed": "kv4", "h_q": 6, "h_kv": 2, "d_qk": 256, "d_v": 256},
    ),
    ids=lambda options: MhaCase(**options).id,
)
def test_gradients_of_packed_arrays(options: dict[str, Any], lengths: tuple[int, ...]) -> None:
    """dq, dk and dv are slices of one array, as q, k and v are, or dk and dv; every element of it is written.
    Where all lengths are one, also with the promise that they are.
    """
    k_lengths = lengths if options["packed"].startswith("qkv") else tuple(2 * n for n in lengths)
    case = MhaCase(q_lengths=lengths, k_lengths=k_lengths, **options)
    call = backward_inputs(make_mha_inputs(case), "both")
    for is_varlen in (True, False)[: 1 + (len(set(lengths)) == 1)]:
        whole = torch.full_like(call.inputs.parts, float("nan"))
        parts = in_parts(case, {"parts": whole})
        given = dict(zip(("dq", "dk", "dv")[-len(parts) :], parts, strict=True))
        got = backward_of(call, is_varlen=is_varlen, **given)
        assert all(one is given.get(name, one) for one, name in zip(got, ("dq", "dk", "dv"), strict=True))
        check_backward(call, got)
        assert bool(whole.isfinite().all())


@each_form
def test_a_broken_promise_of_equal_lengths_of_gradients(dims: dict[str, Any]) -> None:
    """Results are undefined, but nothing outside of dq, dk and dv is written."""
    call = backward_inputs(make_mha_inputs(MhaCase(q_lengths=(100, 28, 64), k_lengths=(70, 70, 52), **dims)))
    buffers, given = gradient_buffers(call.inputs, CANARY)
    inputs = call.inputs
    rawmla.flash_attn_varlen_backward(
        call.gradients.dout, inputs.q, inputs.k, inputs.v, *call.results, inputs.cu_seqlens_q,
        inputs.cu_seqlens_k, 64, 64, is_varlen=False, **given,
    )  # fmt: skip
    for buffer, array in zip(buffers, given.values(), strict=True):
        assert_untouched_around(buffer, array)


@pytest.mark.parametrize("heads", ((4, 4), (8, 2)), ids=str)
@each_form
def test_backward_of_many_requests(dims: dict[str, Any], heads: tuple[int, int]) -> None:
    """More requests than a warp looks at in one step, most of them short or empty."""
    draw = random.Random(5)
    q_lengths = tuple(draw.choice((0, 0, 1, 2, 17, 150)) for _ in range(333))
    k_lengths = tuple(draw.choice((0, 1, 5, 90, 300)) for _ in range(333))
    case = MhaCase(
        q_lengths=q_lengths,
        k_lengths=k_lengths,
        h_q=heads[0],
        h_kv=heads[1],
        causal=heads[1] < heads[0],
        sink="float32",
        **dims,
    )
    call = backward_inputs(make_mha_inputs(case))
    check_backward(call, backward_of(call))
