"""Prefill in numbers: sinks, logarithms, sharp rows, scores in order; and that decoding gives the same."""

import math
from dataclasses import replace
from typing import Any

import pytest
from gpu_support import (
    assert_same_bits,
    prefill,
    prefill_check,
    prefill_reference,
    sparse_decode,
    torch,
)
from test_prefill_edges import NAMES, kinds, make, slots_of

import rawmla
from kit import (
    check_close,
    prefill_lse_tolerance,
    prefill_out_tolerance,
)


@kinds
@pytest.mark.parametrize("log_base", ("2", "e"))
def test_sink_values(log_base: str, kind: dict[str, Any]) -> None:
    """A sink never changes max_logits or lse; -inf changes nothing, +inf takes everything."""
    for b, topk in ((4, 200), (2, 3000), (200, 100)):
        inputs = make(kind, b=b, h_q=16, s_k=3000, topk=topk, empty_rows=0.2)
        want = prefill(inputs, log_base=log_base)
        for value in (-math.inf, -1e30, -80.0, 0.0, 3.0, 30.0, 1e30, math.inf):
            inputs.attn_sink = torch.full((16,), value, device="cuda")
            got = prefill(inputs, log_base=log_base)
            check_close(
                f"out with sink {value}", got[0], prefill_reference(inputs)[0], prefill_out_tolerance()
            )
            assert_same_bits("max_logits", got[1], want[1])
            assert_same_bits("lse", got[2], want[2])
            if value in (-math.inf, -1e30):
                assert_same_bits(f"out with sink {value}", got[0], want[0])
            if value in (1e30, math.inf):
                assert not bool(got[0].any())


@kinds
def test_natural_logarithms(kind: dict[str, Any]) -> None:
    for b in (2, 200):
        inputs = make(kind, b=b, h_q=66, s_k=2000, topk=300, empty_rows=0.1)
        out, max_logits, lse = prefill(inputs, log_base="e")
        two = prefill(inputs)
        assert_same_bits("out", out, two[0])
        want = prefill_reference(inputs)
        for name, got, wanted in (("max_logits", max_logits, want[1]), ("lse", lse, want[2])):
            check_close(name, got, wanted * math.log(2.0), prefill_lse_tolerance())


@kinds
def test_is_decoding_with_a_request_per_token(kind: dict[str, Any]) -> None:
    inputs = make(kind, b=300, h_q=16, s_k=9000, topk=200, lengths="random", sink=True)
    out, _, lse = prefill(inputs, log_base="e")
    want_out, want_lse = sparse_decode(inputs)
    assert_same_bits("out", out, want_out[:, 0])
    assert_same_bits("lse", lse, want_lse[:, :, 0])


@pytest.mark.parametrize(("layout", "h_q"), (("v32", 64), ("model1", 16), ("model1", 130)))
def test_fp8_rows_that_are_selected_often(layout: str, h_q: int) -> None:
    """They are attended as the bf16 rows that dequantising gives."""
    kind = {"layout": layout, "page_block_size": 61, "block_gap": 1}
    inputs = make(kind, b=300, h_q=h_q, s_k=700, topk=200, lengths="random", sink=True)
    rows = rawmla.dequantize_k_cache(inputs.k_cache, layout).reshape(slots_of(inputs), 1, -1)
    want = rawmla.flash_mla_sparse_fwd(
        inputs.q[:, 0],
        rows,
        inputs.indices,
        inputs.case.width**-0.5,
        attn_sink=inputs.attn_sink,
        topk_length=inputs.topk_length,
    )
    for name, one, wanted in zip(NAMES, prefill(inputs), want, strict=True):
        assert_same_bits(name, one, wanted)


@kinds
@pytest.mark.parametrize("h_q", (16, 128))
def test_sharp_softmax_rows(h_q: int, kind: dict[str, Any]) -> None:
    """The running reference of the softmax is not the largest score."""
    for b in (5, 200):
        inputs = make(kind, b=b, h_q=h_q, s_k=3000, topk=2048, sharp=True)
        prefill_check(inputs, prefill(inputs))


@kinds
@pytest.mark.parametrize("descending", (False, True), ids=("rising", "falling"))
def test_scores_in_order(descending: bool, kind: dict[str, Any]) -> None:
    """The largest score is in the last block, or in the first."""
    for b in (2, 200):
        inputs = make(kind, b=b, h_q=64, s_k=700, topk=640, invalid=0.0, duplicates=0.0)
        inputs.q = inputs.q[:1, :, :1].expand_as(inputs.q).contiguous()
        named = inputs.indices.unique()
        one = replace(
            inputs,
            case=replace(inputs.case, b=len(named), topk=1),
            q=inputs.q[:1].expand(len(named), -1, -1, -1),
            indices=named[:, None, None],
        )
        score = torch.zeros(slots_of(inputs), dtype=torch.float64, device="cuda")
        score[named.long()] = prefill_reference(one)[1][:, 0]
        order = score[inputs.indices.long()].argsort(dim=2, descending=descending)
        inputs.indices = inputs.indices.gather(2, order)
        for scale in (None, 1.0, 4.0):
            want = prefill_reference(inputs, scale)
            out, max_logits, lse = prefill(inputs, scale)
            size = 1.0 if scale is None else scale / inputs.case.width**-0.5
            check_close("out", out, want[0], prefill_out_tolerance())
            check_close("max_logits", max_logits, want[1], prefill_lse_tolerance(size))
            check_close("lse", lse, want[2], prefill_lse_tolerance(size))
