"""Dense attention of segments, forward and backward: lengths, seqused, packed arrays, surroundings of tokens.

Memory that belongs to no token is NaN in every case. The cases of one batch are one test, which goes on after
a mismatch, so that one run shows the whole pattern.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from gpu_support import assert_same_bits, torch
from test_autograd import in_parts

import rawmla
from kit.mha import MhaCase, check_mha, covered_rows, make_mha_inputs, reference
from operations.dense import (
    CANARY,
    assert_same_results,
    assert_untouched_around,
    attend,
    out_buffer,
)
from operations.dense_backward import (
    assert_same_gradients,
    backward_inputs,
    backward_of,
    check_backward,
    gradient_buffers,
)

# Kernels of the forward, by head dimensions, dtype and flags: few, so that compiling takes little time.
FORWARD_KERNELS: tuple[dict[str, Any], ...] = (
    {"d_qk": 64, "d_v": 64},
    {"d_qk": 128, "d_v": 128, "window": (100, -1)},
    {"d_qk": 192, "d_v": 128, "dtype": "float16", "softcap": 15.0},
    {"d_qk": 256, "d_v": 256, "alibi": "requests"},
)
# Kernels of the backward. One of 192 in bfloat16 goes by keys in the wide form; with a sink and a gradient
# of lse by product, as the kernel of 128 with softcap and ALiBi then does. A kernel of 192 in float16, or of
# 256, always goes by product.
BACKWARD_KERNELS: tuple[dict[str, Any], ...] = (
    {"d_qk": 64, "d_v": 64, "alibi": "requests"},
    {"d_qk": 128, "d_v": 128},
    {"d_qk": 192, "d_v": 128},
    {"d_qk": 59, "d_v": 111},
    {"d_qk": 256, "d_v": 256},
    {"d_qk": 128, "d_v": 128, "softcap": 15.0, "alibi": "requests"},
    {"d_qk": 192, "d_v": 128, "dtype": "float16"},
)
# Kernels of every form, with what gradients are of: a sink and a gradient of lse are a flag together.
FORMS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"d_qk": 128, "d_v": 128}, "out"),
    ({"d_qk": 128, "d_v": 128, "sink": "float32"}, "both"),
    ({"d_qk": 192, "d_v": 128}, "lse"),
    ({"d_qk": 192, "d_v": 128, "sink": "float32"}, "both"),
    ({"d_qk": 256, "d_v": 256}, "both"),
    ({"d_qk": 128, "d_v": 128, "softcap": 15.0, "alibi": "requests"}, "out"),
    ({"d_qk": 64, "d_v": 64}, "both"),
)
ONE_OF_EACH_FORM = [FORMS[i][0] for i in (0, 2, 4, 6)]
MASKS: tuple[dict[str, Any], ...] = ({}, {"causal": True}, {"window": (60, 20)})
each_form = pytest.mark.parametrize("dims", ONE_OF_EACH_FORM, ids=lambda dims: f"{dims['d_qk']}")
MODES = ("full", "third", "random", "zeros")
LENGTHS = tuple((b, longest) for b in (1, 7, 20) for longest in (8, 64, 2048))
RAGGED: dict[str, Any] = {"q_lengths": (300, 0, 1, 77, 130, 64), "k_lengths": (257, 90, 0, 200, 131, 513)}
SAME: dict[str, Any] = {"q_lengths": (300, 0, 1, 77, 130, 64), "k_lengths": (300, 0, 1, 77, 130, 64)}
USED: dict[str, Any] = {"q_used": (290, 0, 0, 77, 3, 60), "k_used": (250, 90, 0, 5, 129, 513)}
FULL = MhaCase(**RAGGED, **USED, rows_around=200, layout="slice", causal=True, sink="float32")


# ---- random lengths


def lengths_of(mode: str, longest: int, b: int, draw: random.Random) -> tuple[int, ...]:
    """Lengths of a batch; "zeros": random, but 0 for every fifth request and the last one."""
    if mode == "full":
        return (longest,) * b
    if mode == "third":
        return tuple(draw.randint(max(1, longest - longest // 3), longest) for _ in range(b))
    lengths = [draw.randint(1, longest) for _ in range(b)]
    if mode == "zeros":
        lengths[::5] = [0] * len(lengths[::5])
        lengths[-1] = 0
    return tuple(lengths)


def some_of(lengths: tuple[int, ...], draw: random.Random) -> tuple[int, ...]:
    """seqused: none of some requests' tokens, all of others', a part else."""
    return tuple(draw.choice((0, n, draw.randint(0, n))) for n in lengths)


def random_case(
    b: int, longest: int, mode_q: str, mode_k: str, number: int, *, backward: bool = False
) -> tuple[MhaCase, str]:
    """A case with these lengths, its other dimensions drawn, and what gradients are of."""
    draw = random.Random(f"{'backward ' * backward}{b} {longest} {mode_q} {mode_k} {number}")
    q_lengths = lengths_of(mode_q, longest, b, draw)
    k_lengths = lengths_of(mode_k, longest, b, draw)
    # Other ones for the same modes in every test
    kernel = (
        BACKWARD_KERNELS[(number + b + longest) % len(BACKWARD_KERNELS)]
        if backward
        else FORWARD_KERNELS[(number + number // 4) % len(FORWARD_KERNELS)]
    )
    packed = "" if backward else draw.choice(("", "", "kv", "kv4", "qkv", "qkv4"))
    if packed.endswith("4") and kernel["d_qk"] != kernel["d_v"]:
        packed = packed[:-1]
    h_kv = draw.choice((1, 2, 3, 6))
    if packed.startswith("qkv"):
        k_lengths, h_kv = q_lengths, 6
    options = dict(kernel)
    if backward:
        options["window"] = draw.choice(((-1, -1), (-1, -1), (100, -1), (30, 5)))
    case = MhaCase(
        q_lengths=q_lengths,
        k_lengths=k_lengths,
        q_used=some_of(q_lengths, draw) if draw.random() < 0.5 else None,
        k_used=some_of(k_lengths, draw) if draw.random() < 0.5 else None,
        rows_around=draw.choice((0, 5, 150) if backward else (0, 5)),
        h_q=6,
        h_kv=h_kv,
        causal=draw.random() < 0.5,
        sink=draw.choice((None, "float32", "bfloat16", "infinite")),
        layout=draw.choice(("plain", "slice")) if packed else draw.choice(("plain", "slice", "heads")),
        packed=packed,
        seed=number,
        **options,
    )
    return case, draw.choice(("out", "lse", "both"))


def cases_of(b: int, longest: int, *, backward: bool = False) -> list[tuple[MhaCase, str]]:
    """A case for every pair of modes."""
    pairs = [(mode_q, mode_k) for mode_q in MODES for mode_k in MODES]
    return [random_case(b, longest, *pair, number, backward=backward) for number, pair in enumerate(pairs)]


def check_forward_case(case: MhaCase, out_given: bool) -> None:
    """The results, and that no row outside of the segments is written."""
    inputs = make_mha_inputs(case)
    if not out_given:
        check_mha(inputs, attend(inputs), plain=True)
        return
    buffer, given = out_buffer(inputs)
    covered = torch.zeros(len(given), dtype=torch.bool, device="cuda")
    covered[covered_rows(inputs)] = True
    given[~covered] = CANARY
    got = attend(inputs, out=given)
    assert got[0] is given
    check_mha(inputs, got, plain=True)
    if inputs.k.shape[0]:
        assert bool((given[~covered] == CANARY).all()), f"{case.id}: a row of no segment was written"
    assert_untouched_around(buffer, given)


def check_backward_case(case: MhaCase, of: str, given: bool) -> None:
    """The gradients, and that nothing is written around those that are given."""
    call = backward_inputs(make_mha_inputs(case), of)
    buffers, arrays = gradient_buffers(call.inputs, CANARY) if given else ([], {})
    got = backward_of(call, **arrays)
    assert all(one is arrays[name] for one, name in zip(got, arrays, strict=False))
    check_backward(call, got, plain=True)
    for buffer, array in zip(buffers, arrays.values(), strict=True):
        assert_untouched_around(buffer, array)


@pytest.mark.parametrize("backward", (False, True), ids=("forward", "backward"))
@pytest.mark.parametrize(("b", "longest"), LENGTHS)
def test_lengths(b: int, longest: int, backward: bool) -> None:
    """Every pair of modes, with results given to every second call."""
    failures: list[str] = []
    cases = cases_of(b, longest, backward=backward)
    for number, (case, of) in enumerate(cases):
        try:
            if backward:
                check_backward_case(case, of, bool(number % 2))
            else:
                check_forward_case(case, bool(number % 2))
        except AssertionError as error:
            failures.append(f"gradient of {of}: {error}" if backward else str(error))
    shown = "\n".join(failures[:20])
    assert not failures, f"{len(failures)} of {len(cases)} cases failed:\n{shown}"


# ---- every form of the backward


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


# ---- what lies around tokens


AROUND = (
    FULL,
    MhaCase(**RAGGED, k_used=(250, 1, 0, 129, 0, 511), d_qk=64, d_v=64, layout="heads", rows_around=200),
    MhaCase(**RAGGED, window=(20, 3), h_kv=1, k_used=(33, 90, 0, 70, 131, 300)),
    MhaCase(**RAGGED, d_qk=59, d_v=111, q_used=(1, 0, 1, 76, 0, 64), layout="slice"),
    MhaCase(**RAGGED, **USED, rows_around=200, layout="slice", causal=True, d_qk=192, h_kv=1),
    MhaCase(**RAGGED, **USED, window=(20, 3), d_qk=256, d_v=256, layout="heads"),
    MhaCase(**RAGGED, **USED, rows_around=9, causal=True, softcap=15.0, alibi="requests"),
)


@pytest.mark.parametrize("gap", (float("nan"), float("inf")))
@pytest.mark.parametrize("case", AROUND, ids=lambda case: case.id)
def test_what_lies_around_tokens_has_no_effect(case: MhaCase, gap: float) -> None:
    """Whether it is NaN, infinite or 1, in the tails of segments too. The forward has the same bits."""
    results, gradients = [], []
    for around in (gap, 1.0):
        inputs = make_mha_inputs(replace(case, gap=around))
        results.append(attend(inputs))
        check_mha(inputs, results[-1])
        call = backward_inputs(inputs, "both")
        gradients.append(backward_of(call))
        check_backward(call, gradients[-1])
    assert_same_results(f"gaps of {gap}", inputs, *results)
    assert_same_gradients(f"gaps of {gap}", *gradients)


@pytest.mark.parametrize("spoilt", (0, 3, 5))
@each_form
def test_beside_a_spoilt_request(dims: dict[str, Any], spoilt: int) -> None:
    """All arrays of one request are NaN: the others have the bits that they have beside a sound one."""
    call = backward_inputs(make_mha_inputs(MhaCase(**RAGGED, **dims, causal=spoilt == 3)), "both")
    inputs = call.inputs
    want, want_of_forward = backward_of(call), [x.clone() for x in attend(inputs)]
    check_backward(call, want)
    rows_q, rows_k = (
        slice(int(bounds[spoilt]), int(bounds[spoilt + 1]))
        for bounds in (inputs.cu_seqlens_q, inputs.cu_seqlens_k)
    )
    of_queries = (inputs.q, *call.results, call.gradients.dout, call.gradients.dlse)
    for x, rows in (*((x, rows_q) for x in of_queries), (inputs.k, rows_k), (inputs.v, rows_k)):
        x[rows] = float("nan")
    forward, got = attend(inputs), backward_of(call)
    for results, wanted, places in (
        (forward, want_of_forward, (rows_q, rows_q)),
        (got, want, (rows_q, rows_k, rows_k)),
    ):
        for one, other, rows in zip(results, wanted, places, strict=True):
            assert bool(one[rows].isnan().any())
            one[rows] = other[rows]
    for name, one, other in zip(("out", "lse"), forward, want_of_forward, strict=True):
        assert_same_bits(name, one, other)
    assert_same_gradients("beside a spoilt request", got, want)


# ---- bounds of lengths


@each_form
def test_longer_bounds_of_lengths(dims: dict[str, Any]) -> None:
    """max_seqlen may be more than any length."""
    call = backward_inputs(make_mha_inputs(MhaCase(**RAGGED, **dims, causal=True)))
    want = backward_of(call)
    check_backward(call, want)
    for longest in ((300, 513), (301, 600), (100_000, 1_000_000), (2**30 - 1, 2**30 - 1)):
        bounds = dict(zip(("max_seqlen_q", "max_seqlen_k"), longest, strict=True))
        check_mha(call.inputs, attend(call.inputs, **bounds))
        got = backward_of(call, **bounds)
        check_backward(call, got)
        assert_same_gradients(str(longest), got, want)


@pytest.mark.parametrize("sizes", ((130, 77), (1, 300), (77, 0)), ids=str)
@each_form
def test_equal_lengths(dims: dict[str, Any], sizes: tuple[int, int]) -> None:
    """With and without is_varlen; and as a batch, whose requests are a dimension."""
    s_q, s_k = sizes
    case = MhaCase(
        q_lengths=(s_q,) * 3, k_lengths=(s_k,) * 3, h_q=8, h_kv=2, causal=True, sink="float32",
        **dims,
    )  # fmt: skip
    of = "out" if case.d_qk == 192 else "both"  # which has another form
    call = backward_inputs(make_mha_inputs(case), of)
    want = reference(call.inputs)
    for is_varlen in (True, False):
        check_mha(call.inputs, attend(call.inputs, is_varlen=is_varlen), want)
        check_backward(call, backward_of(call, is_varlen=is_varlen))

    def batch(x: Any) -> Any:
        return x.unflatten(0, (3, -1)) if len(x) else x.view(3, 0, *x.shape[1:])

    inputs, (out, lse) = call.inputs, call.results
    options: dict[str, Any] = {"causal": True, "attn_sink": inputs.attn_sink}
    one, one_lse = rawmla.flash_attn_func(*map(batch, (inputs.q, inputs.k, inputs.v)), **options)
    check_mha(inputs, (one.flatten(0, 1), one_lse.transpose(1, 2).flatten(0, 1)), want)
    arrays = (call.gradients.dout, inputs.q, inputs.k, inputs.v, out)
    dlse = None if of == "out" else batch(call.gradients.dlse).mT
    got = rawmla.flash_attn_backward(*map(batch, arrays), batch(lse).mT, dlse=dlse, **options)
    check_backward(call, (*(x.flatten(0, 1) for x in got[:3]), got[3]))


@each_form
def test_a_broken_promise_of_equal_lengths(dims: dict[str, Any]) -> None:
    """Results are undefined, but nothing outside of those that are given is written."""
    call = backward_inputs(make_mha_inputs(MhaCase(q_lengths=(100, 28, 64), k_lengths=(70, 70, 52), **dims)))
    bounds: dict[str, Any] = {"max_seqlen_q": 64, "max_seqlen_k": 64, "is_varlen": False}
    buffer, out = out_buffer(call.inputs)
    attend(call.inputs, **bounds, out=out)
    assert_untouched_around(buffer, out)
    buffers, given = gradient_buffers(call.inputs, CANARY)
    backward_of(call, **bounds, **given)
    for buffer, array in zip(buffers, given.values(), strict=True):
        assert_untouched_around(buffer, array)


# ---- packed arrays


SAME_USED: dict[str, Any] = {
    "q_used": (290, 0, 0, 77, 3, 60),
    "k_used": (300, 0, 1, 5, 129, 0),
    "rows_around": 9,
}
PACKED = (
    MhaCase(**SAME, **SAME_USED, packed="qkv", h_q=4, h_kv=4, d_qk=192, layout="slice", causal=True),
    MhaCase(**SAME, packed="qkv", h_q=3, h_kv=3, d_qk=64, d_v=64, layout="slice"),
    MhaCase(**SAME, packed="qkv4", h_q=4, h_kv=4, dtype="float16"),
    MhaCase(**SAME, **SAME_USED, packed="qkv4", h_q=1, h_kv=1, d_qk=64, d_v=64, causal=True),
    MhaCase(**RAGGED, packed="kv", h_q=8, h_kv=2, d_qk=192, causal=True),
    MhaCase(**RAGGED, packed="kv4", h_q=6, h_kv=2, d_qk=256, d_v=256, window=(30, 40)),
    MhaCase(q_lengths=(128,) * 3, k_lengths=(128,) * 3, packed="qkv", h_kv=4, d_v=64, causal=True),
    MhaCase(q_lengths=(7, 0, 2) * 15, k_lengths=(14, 0, 4) * 15, packed="kv4"),
    MhaCase(**SAME, packed="qkv", h_q=2, h_kv=2, d_qk=59, d_v=111),
)


@pytest.mark.parametrize("case", PACKED, ids=lambda case: case.id)
def test_packed(case: MhaCase) -> None:
    """As the same parts in arrays of their own, bit for bit. Gradients fill parts of one array; parts of odd
    columns are copied, and no gradient can be a slice of them.
    """
    inputs = make_mha_inputs(case)
    is_varlen = len({*case.q_lengths, *case.k_lengths}) > 1
    got = attend(inputs, is_varlen=is_varlen)
    check_mha(inputs, got)
    apart = replace(
        inputs, case=replace(case, packed=""), q=inputs.q.clone(), k=inputs.k.clone(), v=inputs.v.clone()
    )
    assert_same_results("packed and apart", inputs, got, attend(apart))
    if case.d_qk % 8:
        return
    call = backward_inputs(inputs, "both")
    whole = torch.full_like(inputs.parts, float("nan"))
    parts = in_parts(case, {"parts": whole})
    given = dict(zip(("dq", "dk", "dv")[-len(parts) :], parts, strict=True))
    for more in ({"is_varlen": is_varlen}, {"deterministic": True}):
        whole.fill_(float("nan"))
        gradients = backward_of(call, **more, **given)
        assert all(
            one is given.get(name, one) for one, name in zip(gradients, ("dq", "dk", "dv"), strict=True)
        )
        check_backward(call, gradients)
        assert bool(whole.isfinite().all())
