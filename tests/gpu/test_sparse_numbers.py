"""Sparse decoding in numbers: sinks, scales, magnitudes, sharp rows, merged parts."""

import math
from dataclasses import replace

import pytest
from gpu_support import (
    assert_same_bits,
    sparse_check,
    sparse_decode,
    sparse_reference,
    torch,
)
from test_sparse_edges import KINDS, kinds, named

from kit import SparseCase, SparseInputs, check_close, make_sparse_inputs, out_tolerance
from kit.sparse import block_fields


@kinds
def test_sink_values(layout: str, d_qk: int | None) -> None:
    """A sink never changes lse; -inf changes nothing, +inf takes everything."""
    case = SparseCase(b=4, s_q=2, h_q=16, topk=200, layout=layout, d_qk=d_qk, empty_rows=0.2)
    inputs = make_sparse_inputs(case)
    want = sparse_decode(inputs)
    sparse_check(inputs, want)
    for value in (-math.inf, -1e30, -80.0, 0.0, 3.0, 30.0, 1e30, math.inf):
        inputs.attn_sink = torch.full((16,), value, device="cuda")
        out, lse = sparse_decode(inputs)
        sparse_check(inputs, (out, lse))
        assert_same_bits(f"lse with sink {value}", lse, want[1])
        if value in (-math.inf, -1e30):
            assert_same_bits(f"out with sink {value}", out, want[0])
        if value in (1e30, math.inf):
            assert not bool(out.any())


@pytest.mark.parametrize("h_q", (8, 66))
def test_sinks_of_split_requests(h_q: int) -> None:
    """A sink counts once, however many splits a request is computed in."""
    for layout, d_qk in KINDS:
        case = SparseCase(b=2, h_q=h_q, s_k=4096, topk=4000, layout=layout, d_qk=d_qk, sink=True)
        inputs = make_sparse_inputs(case)
        sparse_check(inputs, sparse_decode(inputs))


def test_sink_as_a_slice_of_a_buffer() -> None:
    inputs = make_sparse_inputs(SparseCase(b=4, h_q=8, topk=200, layout="model1", sink=True))
    buffer = torch.full((64,), float("nan"), device="cuda")
    buffer[:8] = inputs.attn_sink
    want = sparse_decode(inputs)
    got = sparse_decode(replace(inputs, attn_sink=buffer[:8]))
    sparse_check(inputs, got)
    assert_same_bits("out", got[0], want[0])


def _rescale(inputs: SparseInputs, scales: "torch.Tensor", codes: "torch.Tensor | None" = None) -> None:
    """Give the named tokens new float64 scales, for "model1" powers of two, and new e4m3 codes."""
    form, page = inputs.case.format, inputs.case.page_block_size
    rows, tails = block_fields(inputs.k_cache, form)
    slots = named(inputs)
    place = (slots // page, slots % page)
    row = rows[place]
    if codes is not None:
        row[:, : form.values] = codes
    if tails is None:
        row[:, form.values : form.rope_offset] = scales.float().contiguous().view(torch.uint8)
    else:
        tails[..., : form.scales][place] = (torch.log2(scales).round() + 127).to(torch.uint8)
    rows[place] = row


@pytest.mark.parametrize("layout", ("v32", "model1"))
def test_every_e4m3_code_and_odd_scales(layout: str) -> None:
    """All finite codes (448, subnormals, zeros); scales far apart, not powers of two, and as good as zero."""
    inputs = make_sparse_inputs(SparseCase(b=4, s_q=2, h_q=64, s_k=700, topk=300, layout=layout))
    form = inputs.case.format
    count = len(named(inputs))
    draw = torch.Generator(device="cuda").manual_seed(1)
    codes = torch.randint(256, (count, form.values), generator=draw, device="cuda", dtype=torch.uint8)
    codes = torch.where((codes & 0x7F) == 0x7F, codes ^ 1, codes)
    odd = [0.0, 1e-30, 2.0**-20, 1.37e-4, 3.3e-4, 7.1e-4, 1.9e-3]
    even = [2.0**-127, 2.0**-100, 2.0**-20, 2.0**-13, 2.0**-12, 2.0**-11, 2.0**-9]
    choice = torch.tensor(odd if layout == "v32" else even, dtype=torch.float64, device="cuda")
    picked = torch.randint(7, (count, form.scales), generator=draw, device="cuda")
    _rescale(inputs, choice[picked], codes)
    sparse_check(inputs, sparse_decode(inputs))


@pytest.mark.parametrize("layout", ("v32", "model1"))
def test_scales_of_zero(layout: str) -> None:
    """Every value but the RoPE columns is 0, or as good as 0 with the least e8m0."""
    inputs = make_sparse_inputs(SparseCase(b=2, h_q=16, topk=130, layout=layout, invalid=0.0))
    least = 0.0 if layout == "v32" else 2.0**-127
    shape = (len(named(inputs)), inputs.case.format.scales)
    _rescale(inputs, torch.full(shape, least, dtype=torch.float64, device="cuda"))
    out, lse = sparse_decode(inputs)
    want_out, want_lse = sparse_reference(inputs)
    values = inputs.case.format.values
    assert float(out[..., :values].abs().max()) < 1e-30
    check_close("RoPE columns", out[..., values:512], want_out[..., values:], out_tolerance("bfloat16"))
    assert float((lse - want_lse).abs().max()) < 1e-5


@pytest.mark.parametrize("exponent", (-60, -24, 24, 60))
@kinds
def test_magnitude_of_the_values(layout: str, d_qk: int | None, exponent: int) -> None:
    """Scales far beyond what float16 holds, in calls with and without split requests."""
    for b, topk in ((2, 2000), (150, 70)):
        case = SparseCase(b=b, h_q=16, s_k=2000, topk=topk, layout=layout, d_qk=d_qk)
        inputs = make_sparse_inputs(case)
        factor = 2.0**exponent
        form, page = case.format, case.page_block_size
        slots = named(inputs)
        place = (slots // page, slots % page)
        raw = inputs.k_cache.view(torch.uint8)
        rows, tails = block_fields(raw, form)
        row = rows[place]
        rope = row[:, form.rope_offset :].contiguous().view(torch.bfloat16) * factor
        row[:, form.rope_offset :] = rope.contiguous().view(torch.uint8)
        if layout == "v32":
            scales = row[:, form.values : form.rope_offset].contiguous().view(torch.float32) * factor
            row[:, form.values : form.rope_offset] = scales.view(torch.uint8)
        rows[place] = row
        if tails is not None:
            powers = tails[..., : form.scales]
            powers[place] = (powers[place].int() + exponent).to(torch.uint8)
        out, lse = sparse_decode(inputs, softmax_scale=case.width**-0.5 / factor)
        scale = case.width**-0.5 / factor
        want_out, want_lse = sparse_reference(inputs, softmax_scale=scale)
        sparse_check(inputs, (out / factor, lse), (want_out / factor, want_lse))


@kinds
def test_softmax_scale(layout: str, d_qk: int | None) -> None:
    case = SparseCase(b=3, s_q=2, h_q=16, topk=200, layout=layout, d_qk=d_qk, power_of_two_scales=True)
    inputs = make_sparse_inputs(case)
    for scale in (1.0, 0.5, 1e-4):
        got = sparse_decode(inputs, softmax_scale=scale)
        sparse_check(inputs, got, sparse_reference(inputs, softmax_scale=scale))


@kinds
@pytest.mark.parametrize("h_q", (16, 128))
def test_sharp_softmax_rows(h_q: int, layout: str, d_qk: int | None) -> None:
    case = SparseCase(
        b=5,
        s_q=2,
        h_q=h_q,
        s_k=3000,
        topk=2048,
        layout=layout,
        d_qk=d_qk,
        sharp=True,
        power_of_two_scales=True,
    )
    inputs = make_sparse_inputs(case)
    sparse_check(inputs, sparse_decode(inputs))


@pytest.mark.parametrize("h_q", (16, 64))
@pytest.mark.parametrize("descending", (False, True), ids=("rising", "falling"))
def test_scales_that_change_from_block_to_block(descending: bool, h_q: int) -> None:
    """By 2^40 over a request's ten blocks, of either sign; requests that are not split.

    RoPE, which has no scale, is left out: no token attends by it alone.
    """
    inputs = make_sparse_inputs(SparseCase(b=150, h_q=h_q, s_k=700, topk=640, invalid=0.0))
    inputs.q[..., inputs.case.format.values :] = 0
    inputs = replace(inputs, indices=inputs.indices.sort(dim=-1, descending=descending).values)
    place = torch.arange(640, device="cuda") / 640
    exponents = torch.zeros(int(inputs.indices.max()) + 1, dtype=torch.float64, device="cuda")
    exponents[inputs.indices.flatten().long()] = (
        (40 * place - 60).double().expand_as(inputs.indices).flatten()
    )
    slots = named(inputs)
    draw = torch.Generator(device="cuda").manual_seed(2)
    shape = (len(slots), inputs.case.format.scales)
    signs = torch.randint(2, shape, generator=draw, device="cuda") * 2 - 1
    _rescale(
        inputs,
        signs * (1.0 + torch.rand(shape, generator=draw, device="cuda")) * exponents[slots, None].exp2(),
    )
    factor = 2.0**-20
    scale = inputs.case.width**-0.5 / (100 * factor)
    out, lse = sparse_decode(inputs, softmax_scale=scale)
    want_out, want_lse = sparse_reference(inputs, softmax_scale=scale)
    size = 448 * factor
    sparse_check(inputs, (out / size, lse), (want_out / size, want_lse))


@kinds
@pytest.mark.parametrize("parts", (2, 4, 8))
def test_merged_parts_are_the_whole(parts: int, layout: str, d_qk: int | None) -> None:
    """Keys dealt out to several calls, one of them without any, merged by their log-sum-exp."""
    inputs = make_sparse_inputs(
        SparseCase(b=4, s_q=2, h_q=16, s_k=1500, topk=1000, layout=layout, d_qk=d_qk, empty_rows=0.2)
    )
    whole = sparse_decode(inputs)
    sparse_check(inputs, whole)
    owner = torch.arange(1000, device="cuda") % parts
    calls = [replace(inputs, indices=inputs.indices.masked_fill(owner != part, -1)) for part in range(parts)]
    calls.append(replace(inputs, indices=torch.full_like(inputs.indices, -1)))
    results = [sparse_decode(call) for call in calls]
    lses = torch.stack([lse.double() for _, lse in results])
    lses = lses.masked_fill(lses == float("inf"), float("-inf"))  # a part without keys weighs nothing
    lse = torch.logsumexp(lses, dim=0)
    weights = torch.exp(lses - lse).nan_to_num(0.0).transpose(2, 3)[..., None]  # [parts, b, s_q, h_q, 1]
    out = sum(weight * one.double() for weight, (one, _) in zip(weights, results, strict=True))
    merged = out.bfloat16(), lse.masked_fill(lse == float("-inf"), float("inf")).float()
    sparse_check(inputs, merged)
