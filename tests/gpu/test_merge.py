"""Merging partial attention on the GPU, against the reference in float64."""

from __future__ import annotations

import pytest
from gpu_support import assert_same_bits, torch

import rawmla
from operations.merge import check_merged, make_parts

SHAPES = ((2, 3, 5, 512), (1, 1, 128, 512), (7, 2, 512), (300, 16, 512))
SHAPE = SHAPES[0]


@pytest.mark.parametrize("dtype", ("bfloat16", "float16", "float32"))
@pytest.mark.parametrize("parts", (1, 2, 8, 9, 32, 33, 1025))
def test_as_the_reference(parts: int, dtype: str) -> None:
    for shape in SHAPES if parts <= 100 else SHAPES[:1]:
        outs, lses = make_parts(parts, shape, dtype)
        got = rawmla.merge_attn_states(outs, lses)
        assert got[0].is_contiguous() and got[1].is_contiguous()
        check_merged(outs, lses, got)
        for name, one, other in zip(("out", "lse"), rawmla.merge_attn_states(outs, lses), got, strict=True):
            assert_same_bits(f"{name}, again", one, other)


def test_one_part_and_empty_ones() -> None:
    """The only part with keys comes back as it is; where no part has keys, out is 0 and lse +inf."""
    outs, lses = make_parts(3, SHAPE, "bfloat16")
    for i, lse in enumerate(lses):
        lse.fill_(float("inf") if i != 1 else 1.5)
    outs[0].fill_(float("nan"))
    outs[1].nan_to_num_()
    out, lse = rawmla.merge_attn_states(outs, lses)
    assert torch.equal(out, outs[1]) and torch.equal(lse, lses[1])
    out, lse = rawmla.merge_attn_states([outs[0]] * 40, [lses[0]] * 40)
    assert bool((out == 0).all()) and bool((lse == float("inf")).all())


def test_in_place() -> None:
    """The result on top of a part, which is a slice of the heads of a larger buffer."""
    outs, lses = make_parts(4, SHAPE, "bfloat16")
    buffer = torch.full((2, 3, 16, 512), -7.0, dtype=torch.bfloat16, device="cuda")
    first = buffer[:, :, 4:9]
    first.copy_(outs[0])
    got = rawmla.merge_attn_states([first, *outs[1:]], lses, out=first)
    assert got[0] is first
    check_merged(outs, lses, got)
    first.fill_(-7)
    assert bool((buffer == -7).all())
