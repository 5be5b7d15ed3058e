"""Dense attention at the borders of what it takes: empty calls, layouts, sizes, masks, sinks, numbers."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest
from gpu_support import assert_same_bits, torch
from mha_calls import assert_same_results, assert_untouched_around, attend, out_buffer

import rawmla
from kit.mha import MhaCase, MhaInputs, check_mha, make_mha_inputs, reference
from rawmla.call import frameworks

# ---- nothing to attend


def test_rows_without_keys() -> None:
    """The first 140 of 200 query tokens see none of 60 keys, with any sink; the others are as ever."""
    for sink in (None, "float32", "infinite"):
        inputs = make_mha_inputs(MhaCase(s_q=200, s_k=60, causal=True, sink=sink))
        out, lse = attend(inputs)
        check_mha(inputs, (out, lse))
        assert_same_bits("out", out[:, :140], torch.zeros_like(out[:, :140]))
        assert bool((lse[:, :, :140] == -inf).all())


@pytest.mark.parametrize("window", ((-1, 0), (3, 0), (0, -1), (5, 7)), ids=str)
def test_rows_without_keys_in_windows(window: tuple[int, int]) -> None:
    for s_q, s_k in ((300, 1), (400, 130)):
        inputs = make_mha_inputs(MhaCase(s_q=s_q, s_k=s_k, window=window, sink="bfloat16"))
        check_mha(inputs, attend(inputs))


def test_requests_without_keys_or_tokens() -> None:
    """Results of requests without keys are 0 and -inf, with keys that hold NaN next to them."""
    case = MhaCase(q_lengths=(0, 5, 130, 0, 7), k_lengths=(9, 0, 0, 0, 3), rows_around=4, sink="float32")
    for used in (None, (0, 0, 0, 0, 0)):
        inputs = make_mha_inputs(replace(case, k_used=used))
        got = attend(inputs)
        check_mha(inputs, got)
        rows = slice(4, 4 + 135)
        assert_same_bits("out", got[0][rows], torch.zeros_like(got[0][rows]))
        assert bool((got[1][rows] == -inf).all())


@pytest.mark.parametrize(
    ("b", "s_q", "s_k"), ((0, 5, 7), (2, 0, 7), (2, 5, 0), (0, 0, 0), (2, 0, 0)), ids=str
)
@pytest.mark.parametrize("out_given", (False, True))
def test_empty_calls(b: int, s_q: int, s_k: int, out_given: bool) -> None:
    for segments in (False, True):
        sizes: dict[str, Any] = {"b": b, "s_q": s_q, "s_k": s_k}
        if segments:
            sizes = {"q_lengths": (s_q,) * b, "k_lengths": (s_k,) * b}
        inputs = make_mha_inputs(MhaCase(**sizes, sink="float32"))
        given = None
        if out_given:
            buffer, given = out_buffer(inputs)
        out, lse = attend(inputs, out=given)
        assert out.shape == (*inputs.q.shape[:-1], 128) and (given is None or out is given)
        assert lse.shape == ((b * s_q, 4) if segments else (b, 4, s_q))
        assert bool((out == 0).all()) and bool((lse == -inf).all())
        if out_given:
            assert_untouched_around(buffer, given)


# ---- layouts


def batch(**options: Any) -> MhaInputs:
    return make_mha_inputs(MhaCase(b=3, s_q=150, s_k=200, causal=True, **options))


def with_layouts(inputs: MhaInputs, change: Any) -> MhaInputs:
    """The same numbers, each of q, k and v laid out by `change`."""
    return replace(inputs, **{name: change(getattr(inputs, name)) for name in "qkv"})


def in_order(*order: int) -> Any:
    """A layout with the dimensions of `[b, s, h, d]` in this order in memory."""

    def change(x: Any) -> Any:
        places = [order.index(axis) for axis in range(4)]
        return x.permute(order).contiguous().permute(places)

    return change


def part_of_a_projection(x: Any) -> Any:
    """The middle one of three, `[b, s, 3, h, d]`, beside NaN."""
    whole = torch.full((*x.shape[:2], 3, *x.shape[2:]), nan, dtype=x.dtype, device="cuda")
    whole[:, :, 1] = x
    return whole[:, :, 1]


def at_offset(elements: int) -> Any:
    """A contiguous array at so many elements behind an aligned address."""

    def change(x: Any) -> Any:
        memory = torch.full((x.numel() + elements,), nan, dtype=x.dtype, device="cuda")
        memory[elements:] = x.flatten()
        return memory[elements:].view(x.shape)

    return change


def odd_rows(x: Any) -> Any:
    """A stride that is no multiple of 16 bytes."""
    whole = torch.full((*x.shape[:-1], x.shape[-1] + 4), nan, dtype=x.dtype, device="cuda")
    whole[..., : x.shape[-1]] = x
    return whole[..., : x.shape[-1]]


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the arguments that calls copy."""
    made: list[str] = []
    original = frameworks.TorchFramework.aligned_copy

    def counted(self: Any, array: Any, name: str) -> Any:
        made.append(name)
        return original(self, array, name)

    monkeypatch.setattr(frameworks.TorchFramework, "aligned_copy", counted)
    return made


@pytest.mark.parametrize(
    "change",
    (
        *[
            in_order(*order)
            for order in ((0, 2, 1, 3), (1, 0, 2, 3), (2, 1, 0, 3), (2, 0, 1, 3), (1, 2, 0, 3))
        ],
        part_of_a_projection,
        at_offset(8),
    ),
    ids=("b h s d", "s b h d", "h s b d", "h b s d", "s h b d", "projection", "offset of 16 bytes"),
)
def test_layouts_that_are_free(change: Any, copies: list[str]) -> None:
    """Read where they lie; a fresh out has its dimensions in the order of q's."""
    inputs = batch()
    want = attend(inputs)
    check_mha(inputs, want)
    moved = with_layouts(inputs, change)
    got = attend(moved)
    assert_same_results("laid out", inputs, got, want)
    assert copies == []

    def order(x: Any) -> list[int]:
        return sorted(range(4), key=lambda axis: -x.stride(axis))

    assert order(got[0]) == order(moved.q) and got[0].numel() == got[0].untyped_storage().size() // 2


@pytest.mark.parametrize("name", ("q", "k", "v"))
@pytest.mark.parametrize(
    "change",
    (in_order(0, 1, 3, 2), at_offset(1), odd_rows),
    ids=("last dimension not contiguous", "address", "stride"),
)
def test_layouts_that_are_copied(change: Any, name: str, copies: list[str]) -> None:
    inputs = batch()
    want = attend(inputs)
    moved = replace(inputs, **{name: change(getattr(inputs, name))})
    assert_same_results("copied", inputs, attend(moved), want)
    assert copies == [name]


@pytest.mark.parametrize("axes", ((0,), (1,), (2,), (0, 2), (0, 1, 2)), ids=str)
@pytest.mark.parametrize("names", ("q", "k", "v", "kv", "qkv"))
def test_broadcast_arrays(names: str, axes: tuple[int, ...], copies: list[str]) -> None:
    """A stride of 0 is read as it is."""
    inputs = batch()

    def first_for_all(x: Any) -> Any:
        for axis in axes:
            x = x.narrow(axis, 0, 1).expand(*[x.shape[i] if i == axis else -1 for i in range(4)])
        return x

    broadcast = replace(inputs, **{name: first_for_all(getattr(inputs, name)) for name in names})
    got = attend(broadcast)
    assert copies == []
    check_mha(broadcast, got)
    assert_same_results("broadcast", inputs, got, attend(with_layouts(broadcast, lambda x: x.contiguous())))


@pytest.mark.parametrize("order", ((0, 2, 1, 3), (2, 1, 0, 3), (1, 0, 2, 3)), ids=str)
def test_out_in_another_order(order: tuple[int, ...]) -> None:
    inputs = batch()
    want = attend(inputs)
    given = in_order(*order)(torch.full_like(want[0], nan))
    got = attend(inputs, out=given)
    assert got[0] is given
    assert_same_results("out given", inputs, got, want)


@pytest.mark.parametrize("segments", (False, True), ids=("batch", "segments"))
@pytest.mark.parametrize("dims", ((1, 1), (17, 33), (255, 3)), ids=str)
@pytest.mark.parametrize("layout", ("plain", "slice"))
def test_odd_head_dimensions(dims: tuple[int, int], layout: str, segments: bool) -> None:
    """Those that are no multiple of 8 are copied unless their rows are apart; rows of a fresh out are.

    What lies between the rows of a given out is not written.
    """
    sizes: dict[str, Any] = {"s_q": 150, "s_k": 200}
    if segments:
        sizes = {"q_lengths": (130, 0, 1, 128, 41), "k_lengths": (200, 3, 7, 128, 90)}
    inputs = make_mha_inputs(MhaCase(**sizes, d_qk=dims[0], d_v=dims[1], layout=layout, dtype="float16"))
    out, lse = attend(inputs)
    check_mha(inputs, (out, lse), plain=True)
    assert out.stride(-2) % 8 == 0 and out.stride(-1) == 1
    buffer, given = out_buffer(inputs)
    assert_same_results("out given", inputs, attend(inputs, out=given), (out, lse))
    assert_untouched_around(buffer, given)


# ---- sizes


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


@pytest.mark.parametrize("axis", (0, 1, 2))
def test_strides_past_2_31_elements(axis: int) -> None:
    """Two requests, tokens or heads, 2**31 elements apart; out too."""
    sizes = {0: (2, 100, 2), 1: (1, 2, 2), 2: (2, 100, 2)}[axis]
    inputs = make_mha_inputs(MhaCase(b=sizes[0], s_q=sizes[1], s_k=sizes[1], h_q=2, h_kv=2, causal=True))
    room = 1 << 20
    memory = torch.full((2**31 + 4 * room,), nan, dtype=torch.bfloat16, device="cuda")
    strides = list(inputs.q.contiguous().stride())
    strides[axis] = 2**31

    def placed(number: int, values: Any = None) -> Any:
        array = memory.as_strided(inputs.q.shape, strides, number * room)
        return array if values is None else array.copy_(values)

    apart = replace(inputs, q=placed(0, inputs.q), k=placed(1, inputs.k), v=placed(2, inputs.v))
    got = attend(apart, out=placed(3))
    check_mha(inputs, got)


def test_more_than_2_24_keys() -> None:
    """A few keys that count, on both sides of what float32 can number."""
    s_k = 2**24 + 77
    inputs = make_mha_inputs(MhaCase(b=1, s_q=3, s_k=s_k, h_q=2, h_kv=1, d_qk=8, d_v=8, causal=True))
    inputs.q.fill_(3)
    inputs.k.zero_()
    for number, key in enumerate((0, 1000, 2**24 - 1, 2**24 + 1, s_k - 3, s_k - 2, s_k - 1)):
        inputs.k[:, key] = 4 + number / 16
    check_mha(inputs, attend(inputs))


def test_more_than_65535_heads_of_requests() -> None:
    """b * h of 68,160, as a batch and as segments."""
    inputs = make_mha_inputs(MhaCase(b=22720, s_q=3, s_k=5, h_q=3, h_kv=3, d_qk=64, d_v=64, causal=True))
    want = reference(inputs)
    check_mha(inputs, attend(inputs), want)
    ends = torch.arange(22721, dtype=torch.int32, device="cuda")
    out, lse = rawmla.flash_attn_varlen_func(
        inputs.q.flatten(0, 1), inputs.k.flatten(0, 1), inputs.v.flatten(0, 1), 3 * ends, 5 * ends, 3, 5,
        causal=True,
    )  # fmt: skip
    check_mha(inputs, (out.unflatten(0, (22720, 3)), lse.unflatten(0, (22720, 3)).transpose(1, 2)), want)


def test_many_heads() -> None:
    inputs = make_mha_inputs(MhaCase(b=1, s_q=2, s_k=70, h_q=70_000, h_kv=35_000, d_qk=64, d_v=64))
    check_mha(inputs, attend(inputs))


# ---- masks


@pytest.mark.parametrize("sizes", ((300, 300), (129, 400), (257, 128)), ids=str)
@pytest.mark.parametrize("d", (64, 128, 256))
def test_windows_at_borders_of_tiles(d: int, sizes: tuple[int, int]) -> None:
    """Of 64 to 192 query tokens and of 80 or 128 keys."""
    for left in (-1, 0, 1, 63, 79, 80, 127, 128, 129, 191, 192, 299):
        for right in (-1, 0, 1, 64, 80, 127, 128, 300):
            inputs = make_mha_inputs(
                MhaCase(b=1, s_q=sizes[0], s_k=sizes[1], window=(left, right), d_qk=d, d_v=d)
            )
            check_mha(inputs, attend(inputs))


def test_ways_to_say_a_window() -> None:
    """None and -1; bounds past all keys, and past 32 bits; causal and a right bound of 0."""
    inputs = make_mha_inputs(MhaCase(s_q=150, s_k=200))
    full, causal = attend(inputs), attend(inputs, causal=True)
    left = attend(inputs, window_size=(7, 0))
    for want, options in (
        (full, {"window_size": (None, None)}),
        (full, {"window_size": (None, 10**6)}),
        (full, {"window_size": (-1, 2**40)}),
        (full, {"window_size": (2**40, -1)}),
        (causal, {"window_size": (None, 0)}),
        (causal, {"window_size": (-1, 5), "causal": True}),
        (causal, {"window_size": (2**31, 0)}),
        (left, {"window_size": (7, None), "causal": True}),
    ):
        assert_same_results(str(options), inputs, attend(inputs, **options), want)


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


@pytest.mark.parametrize("options", ({}, {"causal": True}, {"alibi": "heads"}), ids=str)
@pytest.mark.parametrize("d", (64, 128, 160, 256))
def test_lengths_at_borders_of_tiles(d: int, options: dict[str, Any]) -> None:
    """Of 64, 128 and 192 query tokens, and of 80, 112 and 128 keys."""
    borders = (64, 80, 112, 128, 192, 224, 256, 384)
    lengths = [border + step for border in borders for step in (-1, 0, 1)]
    for k_lengths in (lengths, lengths[::-1], lengths[7:] + lengths[:7]):
        inputs = make_mha_inputs(
            MhaCase(q_lengths=tuple(lengths), k_lengths=tuple(k_lengths), h_kv=4, d_qk=d, d_v=d, **options)
        )
        check_mha(inputs, attend(inputs))


def test_a_spoilt_row() -> None:
    """NaN in one row of q spoils the row of its head, and no other."""
    inputs = make_mha_inputs(MhaCase(s_q=150, s_k=200, h_q=8, h_kv=1))
    want, want_lse = (x.clone() for x in attend(inputs))
    inputs.q[1, 70, 3] = nan
    out, lse = attend(inputs)
    assert bool(out[1, 70, 3].isnan().all()) and bool(lse[1, 3, 70].isnan())
    out[1, 70, 3], lse[1, 3, 70] = want[1, 70, 3], want_lse[1, 3, 70]
    assert_same_results("the other rows", inputs, (out, lse), (want, want_lse))


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
def test_scales(scale: float) -> None:
    for softcap in (0.0, 2.0):
        inputs = make_mha_inputs(
            MhaCase(s_q=150, s_k=200, softmax_scale=scale, softcap=softcap, d_qk=64, d_v=64)
        )
        check_mha(inputs, attend(inputs))


@pytest.mark.parametrize("softcap", (0.1, 30.0, 1e4))
def test_softcaps(softcap: float) -> None:
    inputs = make_mha_inputs(MhaCase(s_q=150, s_k=200, d_qk=64, d_v=64))
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
