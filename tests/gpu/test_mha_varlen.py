"""Dense attention of segments: lengths, seqused, packed arrays, and what lies around the tokens.

Memory that belongs to no token is NaN in every case. The cases of one batch are one test, which goes on after
a mismatch, so that one run shows the whole pattern.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from gpu_support import assert_same_bits, torch
from mha_calls import CANARY, assert_same_results, assert_untouched_around, attend, out_buffer

import rawmla
from kit.mha import MhaCase, check_mha, covered_rows, make_mha_inputs, reference

MODES = ("full", "third", "random", "zeros")
# Kernels, by head dimensions, dtype and flags: few, so that compiling takes little time.
KERNELS: tuple[dict[str, Any], ...] = (
    {"d_qk": 64, "d_v": 64},
    {"d_qk": 128, "d_v": 128, "window": (100, -1)},
    {"d_qk": 192, "d_v": 128, "dtype": "float16", "softcap": 15.0},
    {"d_qk": 256, "d_v": 256, "alibi": "requests"},
)


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


def random_case(b: int, longest: int, mode_q: str, mode_k: str, number: int) -> MhaCase:
    """A case with these lengths, its other dimensions drawn."""
    draw = random.Random(f"{b} {longest} {mode_q} {mode_k} {number}")
    q_lengths = lengths_of(mode_q, longest, b, draw)
    k_lengths = lengths_of(mode_k, longest, b, draw)
    kernel = KERNELS[number % len(KERNELS)]
    packed = draw.choice(("", "", "kv", "kv4", "qkv", "qkv4"))
    if packed.endswith("4") and kernel["d_qk"] != kernel["d_v"]:
        packed = packed[:-1]
    h_kv = draw.choice((1, 2, 3, 6))
    if packed.startswith("qkv"):
        k_lengths, h_kv = q_lengths, 6
    return MhaCase(
        q_lengths=q_lengths,
        k_lengths=k_lengths,
        q_used=some_of(q_lengths, draw) if draw.random() < 0.5 else None,
        k_used=some_of(k_lengths, draw) if draw.random() < 0.5 else None,
        rows_around=draw.choice((0, 5)),
        h_q=6,
        h_kv=h_kv,
        causal=draw.random() < 0.5,
        sink=draw.choice((None, "float32", "bfloat16", "infinite")),
        layout=draw.choice(("plain", "slice")) if packed else draw.choice(("plain", "slice", "heads")),
        packed=packed,
        seed=number,
        **kernel,
    )


@pytest.mark.parametrize("longest", (8, 64, 2048))
@pytest.mark.parametrize("b", (1, 7, 20))
def test_lengths(b: int, longest: int) -> None:
    """Every pair of modes, with `out` given to every second call."""
    failures: list[str] = []
    number = 0
    for mode_q in MODES:
        for mode_k in MODES:
            case = random_case(b, longest, mode_q, mode_k, number + number // 4)
            inputs = make_mha_inputs(case)
            number += 1
            try:
                if number % 2:
                    check_mha(inputs, attend(inputs), plain=True)
                    continue
                buffer, given = out_buffer(inputs)
                covered = torch.zeros(len(given), dtype=torch.bool, device="cuda")
                covered[covered_rows(inputs)] = True
                given[~covered] = CANARY
                got = attend(inputs, out=given)
                assert got[0] is given
                check_mha(inputs, got, plain=True)
                if inputs.k.shape[0]:
                    assert bool((given[~covered] == CANARY).all()), (
                        f"{case.id}: a row of no segment was written"
                    )
                assert_untouched_around(buffer, given)
            except AssertionError as error:
                failures.append(str(error))
    assert number == 16
    shown = "\n".join(failures[:20])
    assert not failures, f"{len(failures)} of {number} cases failed:\n{shown}"


RAGGED: dict[str, Any] = {"q_lengths": (300, 0, 1, 77, 130, 64), "k_lengths": (257, 90, 0, 200, 131, 513)}
SAME: dict[str, Any] = {"q_lengths": (300, 0, 1, 77, 130, 64), "k_lengths": (300, 0, 1, 77, 130, 64)}
USED: dict[str, Any] = {"q_used": (290, 0, 0, 77, 3, 60), "k_used": (300, 0, 1, 5, 129, 0), "rows_around": 9}
PACKED = (
    MhaCase(**SAME, packed="qkv", h_q=4, h_kv=4, causal=True),
    MhaCase(**SAME, **USED, packed="qkv", h_q=4, h_kv=4, d_qk=192, layout="slice", causal=True),
    MhaCase(**SAME, packed="qkv", h_q=3, h_kv=3, d_qk=40, d_v=40, layout="slice"),
    MhaCase(**SAME, packed="qkv4", h_q=4, h_kv=4, dtype="float16"),
    MhaCase(**SAME, **USED, packed="qkv4", h_q=1, h_kv=1, d_qk=64, d_v=64, causal=True),
    MhaCase(**RAGGED, packed="kv", h_q=8, h_kv=2, causal=True),
    MhaCase(**RAGGED, packed="kv", h_q=8, h_kv=1, d_qk=192, layout="slice", rows_around=70),
    MhaCase(**RAGGED, packed="kv4", h_q=6, h_kv=2, window=(30, 40)),
    MhaCase(**RAGGED, packed="kv4", h_q=4, h_kv=4, d_qk=59, d_v=59),
    MhaCase(**SAME, packed="qkv", h_q=2, h_kv=2, d_qk=59, d_v=111),
)


@pytest.mark.parametrize("case", PACKED, ids=lambda case: case.id)
def test_packed(case: MhaCase) -> None:
    """As the same parts in arrays of their own, bit for bit; parts of odd columns are copied."""
    inputs = make_mha_inputs(case)
    got = attend(inputs)
    check_mha(inputs, got)
    apart = replace(
        inputs, case=replace(case, packed=""), q=inputs.q.clone(), k=inputs.k.clone(), v=inputs.v.clone()
    )
    assert_same_results("packed and apart", inputs, got, attend(apart))


@pytest.mark.parametrize("gap", (float("nan"), float("inf"), 0.0))
@pytest.mark.parametrize(
    "case",
    (
        MhaCase(**SAME, **USED, h_q=4, h_kv=2, causal=True, layout="slice"),
        MhaCase(**RAGGED, k_used=(250, 1, 0, 129, 0, 511), d_qk=64, d_v=64, layout="heads", rows_around=200),
        MhaCase(**RAGGED, window=(20, 3), h_kv=1, d_qk=96, d_v=96, k_used=(33, 90, 0, 70, 131, 300)),
        MhaCase(**RAGGED, d_qk=256, d_v=256, q_used=(1, 0, 1, 76, 0, 64), layout="slice"),
    ),
    ids=lambda case: case.id,
)
def test_what_lies_around_tokens_has_no_effect(case: MhaCase, gap: float) -> None:
    """Bits are the same whether it is NaN, infinite or 1, in the segments' tails too."""
    results = []
    for around in (gap, 1.0):
        inputs = make_mha_inputs(replace(case, gap=around))
        results.append(attend(inputs))
        check_mha(inputs, results[-1])
    assert_same_results(f"gaps of {gap}", inputs, *results)


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("spoilt", (0, 3, 5))
def test_a_spoilt_request(spoilt: int, causal: bool) -> None:
    """q, k and v of one request are NaN: the others have the bits that they have beside a sound one."""
    inputs = make_mha_inputs(MhaCase(**RAGGED, causal=causal))
    want = [x.clone() for x in attend(inputs)]
    rows_q, rows_k = (
        slice(int(bounds[spoilt]), int(bounds[spoilt + 1]))
        for bounds in (inputs.cu_seqlens_q, inputs.cu_seqlens_k)
    )
    inputs.q[rows_q], inputs.k[rows_k], inputs.v[rows_k] = (float("nan"),) * 3
    for name, one, wanted in zip(("out", "lse"), attend(inputs), want, strict=True):
        assert bool(one[rows_q].isnan().any())
        one[rows_q] = wanted[rows_q]
        assert_same_bits(name, one, wanted)


def test_longer_bounds_of_lengths() -> None:
    """max_seqlen may be more than any length."""
    inputs = make_mha_inputs(MhaCase(**RAGGED, causal=True))
    for longest_q, longest_k in ((300, 513), (301, 600), (100_000, 1_000_000), (2**30 - 1, 2**30 - 1)):
        got = rawmla.flash_attn_varlen_func(
            inputs.q, inputs.k, inputs.v, inputs.cu_seqlens_q, inputs.cu_seqlens_k, longest_q, longest_k,
            causal=True,
        )  # fmt: skip
        check_mha(inputs, got)


@pytest.mark.parametrize("sizes", ((128, 128), (130, 77), (1, 300), (77, 0)), ids=str)
@pytest.mark.parametrize("heads", ((4, 4), (8, 2)), ids=str)
def test_equal_lengths(heads: tuple[int, int], sizes: tuple[int, int]) -> None:
    """With and without is_varlen; and as a batch, whose requests are a dimension."""
    s_q, s_k = sizes
    case = MhaCase(
        q_lengths=(s_q,) * 3, k_lengths=(s_k,) * 3, h_q=heads[0], h_kv=heads[1], causal=True, sink="float32"
    )
    inputs = make_mha_inputs(case)
    want = reference(inputs)
    for is_varlen in (True, False):
        check_mha(inputs, attend(inputs, is_varlen=is_varlen), want)
    batch = [
        x.unflatten(0, (3, -1)) if len(x) else x.view(3, 0, *x.shape[1:])
        for x in (inputs.q, inputs.k, inputs.v)
    ]
    out, lse = rawmla.flash_attn_func(*batch, causal=True, attn_sink=inputs.attn_sink)
    check_mha(inputs, (out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)), want)


def test_a_broken_promise_of_equal_lengths() -> None:
    """Results are undefined, but nothing outside of `out` is written."""
    inputs = make_mha_inputs(MhaCase(q_lengths=(100, 28, 64), k_lengths=(70, 70, 52)))
    buffer, given = out_buffer(inputs)
    rawmla.flash_attn_varlen_func(
        inputs.q, inputs.k, inputs.v, inputs.cu_seqlens_q, inputs.cu_seqlens_k, 64, 64, is_varlen=False,
        out=given,
    )  # fmt: skip
    assert_untouched_around(buffer, given)


def test_lse_is_stored_by_heads() -> None:
    """`[total_q, h_q]`, whose transpose is contiguous; a batch has it as `[b, h_q, s_q]`."""
    inputs = make_mha_inputs(MhaCase(**RAGGED))
    _, lse = attend(inputs)
    assert lse.shape == (sum(RAGGED["q_lengths"]), 4) and lse.T.is_contiguous()
    _, lse = attend(make_mha_inputs(MhaCase(b=3, s_q=5, s_k=7)))
    assert lse.shape == (3, 4, 5) and lse.is_contiguous()


def test_many_requests() -> None:
    """More requests than a warp looks at in one step, most of them short or empty."""
    draw = random.Random(5)
    q_lengths = tuple(draw.choice((0, 0, 1, 2, 17, 150)) for _ in range(333))
    k_lengths = tuple(draw.choice((0, 1, 5, 90, 300)) for _ in range(333))
    for heads, causal in (((4, 4), False), ((8, 2), True)):
        case = MhaCase(q_lengths=q_lengths, k_lengths=k_lengths, h_q=heads[0], h_kv=heads[1], causal=causal)
        inputs = make_mha_inputs(case)
        check_mha(inputs, attend(inputs))


def test_partial_results_merge() -> None:
    """By their lse, results over parts of the keys give those over all of them, with a sink added then."""
    inputs = make_mha_inputs(MhaCase(b=3, s_q=70, s_k=333, sink="float32"))
    want_out, want_lse = reference(inputs)
    merged = torch.zeros_like(want_out)
    parts = [
        rawmla.flash_attn_func(inputs.q, inputs.k[:, rows], inputs.v[:, rows])
        for rows in (slice(200), slice(200, None), slice(0, 0))
    ]
    lse = torch.logsumexp(torch.stack([part_lse.double() for _, part_lse in parts]), dim=0)
    torch.testing.assert_close(lse, want_lse, atol=1e-4, rtol=2e-6)
    total = torch.logaddexp(lse, inputs.attn_sink.double()[:, None])
    for out, part_lse in parts:
        merged += out.double() * (part_lse.double() - total).exp().transpose(1, 2)[..., None]
    assert float((merged - want_out).norm() / want_out.norm()) < 2**-8
