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
from test_mha_varlen import MODES, lengths_of, some_of

import rawmla
from rawmla.testing.mha import MhaCase, make_mha_inputs

# Kernels, by head dimensions, dtype and flags: few, so that compiling takes little time.
KERNELS: tuple[dict[str, Any], ...] = (
    {"d_qk": 64, "d_v": 64, "alibi": "requests"},
    {"d_qk": 128, "d_v": 128},
    {"d_qk": 96, "d_v": 96, "dtype": "float16"},
    {"d_qk": 64, "d_v": 64, "softcap": 15.0},
    {"d_qk": 59, "d_v": 111},
)
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
        **KERNELS[number % len(KERNELS)],
    )
    return case, draw.choice(("out", "lse", "both"))


@pytest.mark.parametrize("longest", (8, 64, 2048))
@pytest.mark.parametrize("b", (1, 7, 20))
def test_backward_lengths(b: int, longest: int) -> None:
    """Every pair of modes, with dq, dk and dv given to every second call."""
    failures: list[str] = []
    number = 0
    for mode_q in MODES:
        for mode_k in MODES:
            case, of = random_case(b, longest, mode_q, mode_k, number)
            call = backward_inputs(make_mha_inputs(case), of)
            number += 1
            try:
                buffers, given = ([], {}) if number % 2 else gradient_buffers(call.inputs, CANARY)
                got = backward_of(call, **given)
                assert all(one is given[name] for one, name in zip(got, given, strict=False))
                check_backward(call, got, plain=True)
                for buffer, array in zip(buffers, given.values(), strict=True):
                    assert_untouched_around(buffer, array)
            except AssertionError as error:
                failures.append(f"gradient of {of}: {error}")
    assert number == 16
    shown = "\n".join(failures[:20])
    assert not failures, f"{len(failures)} of {number} cases failed:\n{shown}"


@pytest.mark.parametrize("of", ("out", "lse", "both"))
def test_backward_of_tokens_that_no_segment_covers(of: str) -> None:
    """Their gradients are 0 in given arrays too, and so are those of tokens past seqused."""
    call = backward_inputs(make_mha_inputs(FULL), of)
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


@pytest.mark.parametrize("gap", (float("nan"), float("inf"), 0.0))
@pytest.mark.parametrize(
    "case",
    (
        FULL,
        MhaCase(**RAGGED, k_used=(250, 1, 0, 129, 0, 511), d_qk=64, d_v=64, layout="heads", rows_around=200),
        MhaCase(**RAGGED, window=(20, 3), h_kv=1, d_qk=96, d_v=96, k_used=(33, 90, 0, 70, 131, 300)),
        MhaCase(**RAGGED, d_qk=40, d_v=128, q_used=(1, 0, 1, 76, 0, 64), layout="slice", dtype="float16"),
    ),
    ids=lambda case: case.id,
)
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
def test_backward_beside_a_spoilt_request(spoilt: int, causal: bool) -> None:
    """All arrays of one request are NaN: the others have the bits that they have beside a sound one."""
    call = backward_inputs(make_mha_inputs(MhaCase(**RAGGED, causal=causal)), "both")
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


def test_backward_with_longer_bounds_of_lengths() -> None:
    """max_seqlen may be more than any length."""
    call = backward_inputs(make_mha_inputs(MhaCase(**RAGGED, causal=True)))
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
def test_backward_of_equal_lengths(heads: tuple[int, int], sizes: tuple[int, int]) -> None:
    """With and without is_varlen; and as a batch, whose requests are a dimension."""
    s_q, s_k = sizes
    case = MhaCase(
        q_lengths=(s_q,) * 3, k_lengths=(s_k,) * 3, h_q=heads[0], h_kv=heads[1], causal=True, sink="float32"
    )
    call = backward_inputs(make_mha_inputs(case), "both")
    for is_varlen in (True, False):
        check_backward(call, backward_of(call, is_varlen=is_varlen))

    def batch(x: Any) -> Any:
        return x.unflatten(0, (3, -1)) if len(x) else x.view(3, 0, *x.shape[1:])

    inputs, (out, lse) = call.inputs, call.results
    arrays = (call.gradients.dout, inputs.q, inputs.k, inputs.v, out)
    got = rawmla.flash_attn_backward(
        *map(batch, arrays), batch(lse).mT, causal=True, dlse=batch(call.gradients.dlse).mT,
        attn_sink=inputs.attn_sink,
    )  # fmt: skip
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


def test_gradients_of_packed_arrays() -> None:
    """dq, dk and dv are slices of one array, as q, k and v are; every element of it is written."""
    same = {"q_lengths": RAGGED["q_lengths"], "k_lengths": RAGGED["q_lengths"]}
    for case in (
        MhaCase(**same, packed="qkv", h_q=4, h_kv=4, d_qk=128, d_v=64, causal=True),
        MhaCase(**same, packed="qkv4", h_q=4, h_kv=4, d_qk=64, d_v=64, dtype="float16"),
    ):
        call = backward_inputs(make_mha_inputs(case))
        whole = torch.full_like(call.inputs.parts, float("nan"))
        if case.packed == "qkv4":
            parts = whole.unbind(1)
        else:
            parts = whole.split([case.d_qk, case.d_qk, case.d_v], dim=-1)
        got = backward_of(call, **dict(zip(("dq", "dk", "dv"), parts, strict=True)))
        check_backward(call, got)
        assert bool(whole.isfinite().all())


def test_a_broken_promise_of_equal_lengths_of_gradients() -> None:
    """Results are undefined, but nothing outside of dq, dk and dv is written."""
    call = backward_inputs(make_mha_inputs(MhaCase(q_lengths=(100, 28, 64), k_lengths=(70, 70, 52))))
    buffers, given = gradient_buffers(call.inputs, CANARY)
    inputs = call.inputs
    rawmla.flash_attn_varlen_backward(
        call.gradients.dout, inputs.q, inputs.k, inputs.v, *call.results, inputs.cu_seqlens_q,
        inputs.cu_seqlens_k, 64, 64, is_varlen=False, **given,
    )  # fmt: skip
    for buffer, array in zip(buffers, given.values(), strict=True):
        assert_untouched_around(buffer, array)


def test_backward_of_many_requests() -> None:
    """More requests than a warp looks at in one step, most of them short or empty."""
    draw = random.Random(5)
    q_lengths = tuple(draw.choice((0, 0, 1, 2, 17, 150)) for _ in range(333))
    k_lengths = tuple(draw.choice((0, 1, 5, 90, 300)) for _ in range(333))
    for heads, causal in (((4, 4), False), ((8, 2), True)):
        case = MhaCase(
            q_lengths=q_lengths,
            k_lengths=k_lengths,
            h_q=heads[0],
            h_kv=heads[1],
            causal=causal,
            sink="float32",
        )
        call = backward_inputs(make_mha_inputs(case))
        check_backward(call, backward_of(call))
