"""Sparse decoding and prefill in numbers: sinks, scales, magnitudes, sharp rows, merged parts, logarithms."""

import math
from typing import Any

import pytest
from gpu_support import assert_same_bits, torch
from sparse_kinds import DECODE, PREFILL, Kind, for_kinds, named

from kit import (
    SparseCase,
    SparseInputs,
    check_close,
    make_sparse_inputs,
    prefill_lse_tolerance,
)
from kit.sparse import block_fields
from operations.mla_sparse import sparse_check, sparse_decode, sparse_reference

SINKS = (-math.inf, -1e30, -80.0, 0.0, 3.0, 30.0, 1e30, math.inf)
FP8_LAYOUTS = pytest.mark.parametrize("layout", ("v32", "model1"))


@for_kinds()
def test_sink_values(kind: Kind) -> None:
    """A sink changes `out` alone, once for all splits; -inf changes nothing, +inf takes everything."""
    for b, topk in ((2, 3000), (4, 200), (200, 100)):
        inputs = kind.make(b=b, s_k=3000, topk=topk, empty_rows=0.2)
        want = kind.checked(inputs)
        for value in SINKS:
            inputs.attn_sink = torch.full((kind.h_q,), value, device="cuda")
            got = kind.checked(inputs)
            unchanged = 0 if value in (-math.inf, -1e30) else 1
            for name, one, wanted in list(zip(kind.results, got, want, strict=True))[unchanged:]:
                assert_same_bits(f"{name} with sink {value}", one, wanted)
            if value in (1e30, math.inf):
                assert not bool(got[0].any())


@for_kinds()
def test_sharp_softmax_rows(kind: Kind) -> None:
    """The running reference of the softmax is not the largest score."""
    for b in (5, 200):
        kind.checked(kind.make(b=b, s_k=3000, topk=2048, sharp=True, power_of_two_scales=True))


# ---- scales of FP8 caches


def rescale(inputs: SparseInputs, scales: Any, codes: Any = None) -> None:
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


@FP8_LAYOUTS
@pytest.mark.parametrize("h_q", (16, 64))
def test_every_e4m3_code_and_odd_scales(h_q: int, layout: str) -> None:
    """All finite codes (448, subnormals, zeros); scales far apart, not powers of two, and as good as zero."""
    inputs = make_sparse_inputs(SparseCase(b=4, s_q=2, h_q=h_q, s_k=700, topk=300, layout=layout))
    form = inputs.case.format
    count = len(named(inputs))
    draw = torch.Generator(device="cuda").manual_seed(1)
    codes = torch.randint(256, (count, form.values), generator=draw, device="cuda", dtype=torch.uint8)
    codes = torch.where((codes & 0x7F) == 0x7F, codes ^ 1, codes)
    odd = [0.0, 1e-30, 2.0**-20, 1.37e-4, 3.3e-4, 7.1e-4, 1.9e-3]
    even = [2.0**-127, 2.0**-100, 2.0**-20, 2.0**-13, 2.0**-12, 2.0**-11, 2.0**-9]
    choice = torch.tensor(odd if layout == "v32" else even, dtype=torch.float64, device="cuda")
    picked = torch.randint(7, (count, form.scales), generator=draw, device="cuda")
    rescale(inputs, choice[picked], codes)
    sparse_check(inputs, sparse_decode(inputs))


def multiply(inputs: SparseInputs, exponent: int) -> None:
    """Multiply the keys of the named tokens by a power of two, by their scales where they have some."""
    factor, form, page = 2.0**exponent, inputs.case.format, inputs.case.page_block_size
    slots = named(inputs)
    place = (slots // page, slots % page)
    rows, tails = block_fields(inputs.k_cache.view(torch.uint8), form)
    row = rows[place]
    rope = row[:, form.rope_offset :].contiguous().view(torch.bfloat16) * factor
    row[:, form.rope_offset :] = rope.contiguous().view(torch.uint8)
    if inputs.case.layout == "v32":
        scales = row[:, form.values : form.rope_offset].contiguous().view(torch.float32) * factor
        row[:, form.values : form.rope_offset] = scales.view(torch.uint8)
    rows[place] = row
    if tails is not None:
        powers = tails[..., : form.scales]
        powers[place] = (powers[place].int() + exponent).to(torch.uint8)


@for_kinds(DECODE)
@pytest.mark.parametrize("exponent", (-60, -24, 24, 60))
def test_magnitude_of_the_values(exponent: int, kind: Kind) -> None:
    """Scales far beyond what float16 holds, in calls with and without split requests."""
    for b, topk in ((2, 2000), (150, 70)):
        inputs = kind.make(b=b, s_k=2000, topk=topk)
        multiply(inputs, exponent)
        factor = 2.0**exponent
        scale = inputs.case.width**-0.5 / factor
        out, lse = kind.run(inputs, scale)
        want_out, want_lse = kind.reference(inputs, scale)
        kind.check(inputs, (out / factor, lse), (want_out / factor, want_lse))


@pytest.mark.parametrize("h_q", (16, 64))
@pytest.mark.parametrize("descending", (False, True), ids=("rising", "falling"))
def test_scales_that_change_from_block_to_block(descending: bool, h_q: int) -> None:
    """By 2^40 over a request's ten blocks, of either sign; requests that are not split.

    RoPE, which has no scale, is left out: no token attends by it alone.
    """
    inputs = make_sparse_inputs(SparseCase(b=150, h_q=h_q, s_k=700, topk=640, invalid=0.0))
    inputs.q[..., inputs.case.format.values :] = 0
    inputs.indices = inputs.indices.sort(dim=-1, descending=descending).values
    exponents = torch.zeros(int(inputs.indices.max()) + 1, dtype=torch.float64, device="cuda")
    steps = (torch.arange(640, device="cuda") / 16 - 60).double()
    exponents[inputs.indices.flatten().long()] = steps.expand_as(inputs.indices).flatten()
    slots = named(inputs)
    draw = torch.Generator(device="cuda").manual_seed(2)
    shape = (len(slots), inputs.case.format.scales)
    signs = torch.randint(2, shape, generator=draw, device="cuda") * 2 - 1
    sizes = 1.0 + torch.rand(shape, generator=draw, device="cuda")
    rescale(inputs, signs * sizes * exponents[slots, None].exp2())
    factor = 2.0**-20
    scale = inputs.case.width**-0.5 / (100 * factor)
    out, lse = sparse_decode(inputs, softmax_scale=scale)
    want_out, want_lse = sparse_reference(inputs, softmax_scale=scale)
    size = 448 * factor
    sparse_check(inputs, (out / size, lse), (want_out / size, want_lse))


# ---- prefill


@for_kinds(PREFILL)
def test_natural_logarithms(kind: Kind) -> None:
    for b in (2, 200):
        inputs = kind.make(b=b, s_k=2000, topk=300, empty_rows=0.1)
        natural, base_2 = kind.run(inputs, log_base="e"), kind.run(inputs)
        assert_same_bits("out", natural[0], base_2[0])
        for name, got, want in list(zip(kind.results, natural, kind.reference(inputs), strict=True))[1:]:
            check_close(name, got, want * math.log(2.0), prefill_lse_tolerance())
