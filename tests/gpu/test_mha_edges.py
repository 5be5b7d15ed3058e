"""Dense attention at the borders of what it takes, forward and backward: masks, sinks, numbers, lengths.

Layouts and sizes of arrays are in test_attention_arrays.py, segments in test_mha_varlen.py.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest
from full_cases import full_unless
from gpu_support import assert_same_bits, torch

import rawmla
from kit.mha import MhaCase, check_mha, make_mha_inputs, reference
from kit.mha_backward import rows_in_use
from operations.dense import CANARY, assert_same_results, assert_untouched_around, attend
from operations.dense_backward import (
    assert_same_gradients,
    backward_inputs,
    backward_of,
    check_backward,
    gradient_buffers,
)


def check_both(case: MhaCase) -> None:
    """The results of a call, and the gradients through both of them."""
    call = backward_inputs(make_mha_inputs(case), "both")
    check_mha(call.inputs, attend(call.inputs))
    check_backward(call, backward_of(call))


# ---- nothing to attend


@pytest.mark.parametrize("of", ("out", "lse", "both"))
@pytest.mark.parametrize("spoiler", (nan, inf))
def test_rows_without_keys(spoiler: float, of: str) -> None:
    """The first 140 of 200 query tokens see none of 60 keys: what their rows hold reaches nothing."""
    for sink in (None, "float32", "infinite"):
        inputs = make_mha_inputs(MhaCase(s_q=200, s_k=60, causal=True, sink=sink, gap=spoiler))
        call = backward_inputs(inputs, of)
        check_mha(inputs, call.results)
        assert not bool(call.results[0][:, :140].any())
        assert not bool(call.gradients.dout[:, :140].isfinite().any())
        inputs.q[:, :140] = spoiler
        call.results[0][:, :140] = spoiler
        got = backward_of(call)
        check_backward(call, got)
        assert_same_bits("dq", got[0][:, :140], torch.zeros_like(got[0][:, :140]))


@pytest.mark.parametrize("window", ((-1, 0), (3, 0), (0, -1), (5, 7), (200, 0)), ids=str)
def test_rows_without_keys_in_windows(window: tuple[int, int]) -> None:
    for s_q, s_k in ((300, 1), (400, 130), (129, 64)):
        check_both(MhaCase(s_q=s_q, s_k=s_k, window=window, sink="bfloat16"))


@pytest.mark.parametrize("spoiler", (nan, inf))
@pytest.mark.parametrize("left", (0, 30, 100))
@pytest.mark.parametrize("d", (64, 128))
def test_keys_that_no_query_sees_may_hold_anything(d: int, left: int, spoiler: float) -> None:
    """Those ahead of the first query's window, in a tile with others that count."""
    inputs = make_mha_inputs(MhaCase(s_q=70, s_k=333, window=(left, -1), d_qk=d, d_v=d))
    unseen = ~rows_in_use(inputs)[1]
    assert bool(unseen[:, : 333 - 70 - left].all()) and not bool(unseen[:, 333 - 70 - left :].any())
    call = backward_inputs(inputs, "both")
    want = backward_of(call)
    check_backward(call, want)
    inputs.k[unseen], inputs.v[unseen] = spoiler, spoiler
    got = backward_of(call)
    check_backward(call, got)
    assert_same_gradients("unseen keys spoilt", got, want)


# ---- masks


@pytest.mark.parametrize("sizes", ((300, 300), (129, 400), (257, 128)), ids=str)
@pytest.mark.parametrize("d", (64, 128, 256))
def test_windows_at_borders_of_tiles(d: int, sizes: tuple[int, int]) -> None:
    """Tiles have 64 to 192 query tokens and 64 to 128 keys."""
    for left in (-1, 0, 1, 63, 64, 65, 80, 127, 129, 192, 299):
        for right in (-1, 0, 63, 64, 80, 128, 300):
            check_both(
                MhaCase(b=1, s_q=sizes[0], s_k=sizes[1], window=(left, right), h_q=2, h_kv=1, d_qk=d, d_v=d)
            )


@pytest.mark.parametrize("spoiler", (nan, inf))
@pytest.mark.parametrize("d", (64, 128, 256))
def test_keys_that_are_masked_may_hold_anything(d: int, spoiler: float) -> None:
    """K where a row does not see it, V where no row of its tile does, which has at most 192 tokens."""
    inputs = make_mha_inputs(MhaCase(b=2, s_q=1024, s_k=1024, d_qk=d, d_v=d, causal=True))
    out, lse = attend(inputs)
    inputs.k[:, 512:] = spoiler
    for name, one, want in zip(("out", "lse"), attend(inputs), (out, lse.transpose(1, 2)), strict=True):
        one = one if name == "out" else one.transpose(1, 2)
        assert_same_bits(f"{name} before spoilt keys", one[:, :512], want[:, :512])
    inputs.v[:, 512:] = spoiler
    got = attend(inputs)[0]
    assert_same_bits("out before spoilt values", got[:, : 512 - 192], out[:, : 512 - 192])
    windowed = make_mha_inputs(MhaCase(b=2, s_q=1024, s_k=1024, d_qk=d, d_v=d, window=(100, 0)))
    out, lse = attend(windowed)
    windowed.k[:, :400] = windowed.v[:, :400] = spoiler
    got, got_lse = attend(windowed)
    assert_same_bits("lse behind spoilt keys", got_lse[:, :, 700:], lse[:, :, 700:])
    assert_same_bits("out behind spoilt keys", got[:, 700:], out[:, 700:])


def test_a_spoilt_row() -> None:
    """NaN in one row of q spoils the row of its head, and no other."""
    inputs = make_mha_inputs(MhaCase(s_q=150, s_k=200, h_q=8, h_kv=1))
    want, want_lse = (x.clone() for x in attend(inputs))
    inputs.q[1, 70, 3] = nan
    out, lse = attend(inputs)
    assert bool(out[1, 70, 3].isnan().all()) and bool(lse[1, 3, 70].isnan())
    out[1, 70, 3], lse[1, 3, 70] = want[1, 70, 3], want_lse[1, 3, 70]
    assert_same_results("the other rows", inputs, (out, lse), (want, want_lse))


# ---- lengths


@pytest.mark.parametrize("options", ({"causal": True}, {"alibi": "heads"}), ids=str)
@pytest.mark.parametrize("d", full_unless(lambda d: d != 160, (64, 128, 160, 256)))
def test_segments_at_borders_of_tiles(d: int, options: dict[str, Any]) -> None:
    """Of 64, 128 and 192 query tokens, and of 80, 112 and 128 keys."""
    borders = (64, 80, 112, 128, 192, 224, 256, 384)
    lengths = [border + step for border in borders for step in (-1, 0, 1)]
    for k_lengths in (lengths, lengths[::-1], lengths[7:] + lengths[:7]):
        inputs = make_mha_inputs(
            MhaCase(q_lengths=tuple(lengths), k_lengths=tuple(k_lengths), h_kv=4, d_qk=d, d_v=d, **options)
        )
        check_mha(inputs, attend(inputs))


def test_segments_past_2_31_elements() -> None:
    """Tokens at both ends of arrays of more than 2**31 elements; k and v are the same memory."""
    tokens = 2**31 // (2 * 128) + 1000
    many = 2**31 // (4 * 128) + 1000
    q = torch.full((many, 4, 128), nan, dtype=torch.bfloat16, device="cuda")
    kv = torch.full((tokens, 2, 128), nan, dtype=torch.bfloat16, device="cuda")
    assert q.numel() > 2**31 and kv.numel() > 2**31
    small = make_mha_inputs(MhaCase(q_lengths=(150, 1, 77), k_lengths=(200, 3, 300), causal=True))
    q[:150], q[-78:] = small.q[:150], small.q[150:]
    kv[:200], kv[-303:] = small.k[:200], small.k[200:]
    ends_q = torch.tensor([0, 150, many - 78, many - 77, many], dtype=torch.int32, device="cuda")
    ends_k = torch.tensor([0, 200, tokens - 303, tokens - 300, tokens], dtype=torch.int32, device="cuda")
    used_q = torch.tensor([150, 0, 1, 77], dtype=torch.int32, device="cuda")
    out, lse = rawmla.flash_attn_varlen_func(
        q, kv, kv, ends_q, ends_k, many, tokens, causal=True, seqused_q=used_q
    )
    got = torch.cat([out[:150], out[-78:]]), torch.cat([lse[:150], lse[-78:]])
    check_mha(replace(small, v=small.k), got)
    for piece in out[150:-78].split(1 << 20):
        assert not bool(piece.any())
    assert bool((lse[150:-78] == -inf).all())


def test_more_than_2_24_keys() -> None:
    """A few keys that count, on both sides of what float32 can number."""
    s_k = 2**24 + 77
    inputs = make_mha_inputs(MhaCase(b=1, s_q=3, s_k=s_k, h_q=2, h_kv=1, d_qk=8, d_v=8, causal=True))
    inputs.q.fill_(3)
    inputs.k.zero_()
    for number, key in enumerate((0, 1000, 2**24 - 1, 2**24 + 1, s_k - 3, s_k - 2, s_k - 1)):
        inputs.k[:, key] = 4 + number / 16
    check_mha(inputs, attend(inputs))


TOO_SMALL = MhaCase(q_lengths=(300, 77, 0, 40), k_lengths=(900, 90, 33, 100))


@pytest.mark.parametrize("longest", ((0, 0), (77, 0), (0, 100), (1, 1), (299, 899), (77, 100)), ids=str)
@pytest.mark.parametrize("deterministic", (False, True), ids=("any order", "fixed order"))
def test_backward_with_too_small_bounds_of_lengths(deterministic: bool, longest: tuple[int, int]) -> None:
    """Results are undefined, but nothing outside of dq, dk and dv is written, and no tile waits for the turn
    of one that does not run. The next call is right.
    """
    call = backward_inputs(make_mha_inputs(TOO_SMALL), "both")
    buffers, given = gradient_buffers(call.inputs, CANARY)
    bounds = dict(zip(("max_seqlen_q", "max_seqlen_k"), longest, strict=True))
    backward_of(call, deterministic=deterministic, **bounds, **given)
    for buffer, array in zip(buffers, given.values(), strict=True):
        assert_untouched_around(buffer, array)
    check_backward(call, backward_of(call, deterministic=deterministic))


# ---- sinks


@pytest.mark.parametrize("dtype", ("float32", "bfloat16", "float16"))
def test_infinite_sinks(dtype: str) -> None:
    """-inf has no effect, +inf makes out 0; lse is the same with any sink."""
    inputs = make_mha_inputs(MhaCase(s_q=200, s_k=150, causal=True))
    out, lse = attend(inputs)
    for value, want in ((-inf, out), (inf, torch.zeros_like(out))):
        sink = torch.full((4,), value, dtype=getattr(torch, dtype), device="cuda")
        got = attend(inputs, attn_sink=sink)
        assert bool((got[0] == want).all())
        assert_same_bits("lse", got[1], lse)


def test_large_sinks() -> None:
    """Far above and far below all scores; finite results are the reference's."""
    for value in (-3e4, -100.0, -5.0, 5.0, 12.0, 60.0, 200.0, 3e4, 3e38, -3e38):
        inputs = make_mha_inputs(MhaCase(s_q=70, s_k=150))
        inputs.attn_sink = torch.full((4,), value, device="cuda")
        got = attend(inputs)
        if value > 50:  # out is at the end of what its dtype holds, or 0
            want = reference(inputs)[0]
            assert float((got[0].double() - want).abs().max()) < 1e-20
        else:
            check_mha(inputs, got)


@pytest.mark.parametrize("dtype", ("float64", "bfloat16", "float16"))
def test_dsink_in_the_dtype_of_the_sink(dtype: str) -> None:
    """That of the same sink in float32, rounded."""
    case = MhaCase(b=3, s_q=150, s_k=200, causal=True, sink="bfloat16")
    call = backward_inputs(make_mha_inputs(case), "both")
    sink = call.inputs.attn_sink.to(getattr(torch, dtype))
    assert bool((sink.float() == call.inputs.attn_sink.float()).all())
    exact, got = (
        backward_of(replace(call, inputs=replace(call.inputs, attn_sink=one)))[3]
        for one in (sink.float(), sink)
    )
    assert exact.dtype == torch.float32 and bool(exact.any())
    assert_same_bits("dsink", got, exact.to(sink.dtype))


# ---- numbers


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize("spread", (0.0, 1e-3, 4.0, 30.0))
def test_flat_and_sharp_scores(spread: float, dtype: str) -> None:
    inputs = make_mha_inputs(MhaCase(s_q=150, s_k=700, dtype=dtype, causal=True))
    for array in (inputs.q, inputs.k):
        array *= spread
    check_mha(inputs, attend(inputs))


@pytest.mark.parametrize("direction", (1, -1))
@pytest.mark.parametrize("step", (0.01, 0.2, 3.0, 40.0))
def test_scores_that_rise_or_fall(step: float, direction: int) -> None:
    """From key to key: the largest score so far changes in every block of keys, or in the first alone."""
    inputs = make_mha_inputs(MhaCase(s_q=150, s_k=900, d_qk=64, d_v=64, softmax_scale=1.0))
    inputs.q.zero_()
    inputs.k.zero_()
    inputs.q[..., 0], inputs.q[..., 1] = 1, 1
    keys = torch.arange(900, device="cuda")
    # In two columns, so that bfloat16 holds the numbers.
    inputs.k[..., 0] = (step * direction * 30 * (keys // 30))[:, None]
    inputs.k[..., 1] = (step * direction * (keys % 30))[:, None]
    check_mha(inputs, attend(inputs))


@pytest.mark.parametrize("scale", (1e-30, 1e-4, 3.0))
@pytest.mark.parametrize("softcap", (0.0, 0.1, 2.0, 30.0, 1e4))
def test_scales_and_softcaps(softcap: float, scale: float) -> None:
    inputs = make_mha_inputs(MhaCase(s_q=150, s_k=200, softmax_scale=scale, d_qk=64, d_v=64))
    inputs = replace(inputs, case=replace(inputs.case, softcap=softcap))
    check_mha(inputs, attend(inputs))


def test_slopes() -> None:
    """0 is no ALiBi; large and negative ones; requests with a stride between their slopes, or with none."""
    inputs = make_mha_inputs(MhaCase(b=3, s_q=150, s_k=200, alibi="requests"))
    zero = attend(inputs, alibi_slopes=torch.zeros(4, device="cuda"))
    check_mha(replace(inputs, alibi_slopes=None), zero)
    inputs.alibi_slopes = torch.tensor([8.0, -0.01, 0.5, 100.0], device="cuda")
    want = attend(inputs)
    check_mha(inputs, want)
    for slopes in (inputs.alibi_slopes.expand(3, 4), inputs.alibi_slopes.repeat(3, 2)[:, :4]):
        assert_same_results("slopes", inputs, attend(inputs, alibi_slopes=slopes), want)
