"""Merging partial attention on the GPU, against the reference in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gpu_support import cupy, poisoned_allocations, torch

import rawmla
from rawmla import reference

DTYPES = ("bfloat16", "float16", "float32")
RELATIVE = {"bfloat16": 2.0**-8, "float16": 2.0**-10, "float32": 4e-6}
SHAPES = ((2, 3, 5, 512), (1, 1, 128, 512), (7, 2, 512), (300, 16, 512))


def make_parts(parts: int, shape: tuple[int, ...], dtype: str, seed: int = 0) -> tuple[list[Any], list[Any]]:
    """Random states; some rows are empty, with NaN in their out, and the first one is so in all parts."""
    draw = torch.Generator("cuda").manual_seed(seed + parts)
    lse_shape = (shape[0], shape[2], shape[1]) if len(shape) == 4 else shape[:2]
    outs, lses = [], []
    for i in range(parts):
        out = torch.randn(shape, generator=draw, device="cuda").to(getattr(torch, dtype))
        lse = torch.randn(lse_shape, generator=draw, device="cuda") * 4
        empty = torch.rand(lse_shape, generator=draw, device="cuda") < 0.2
        empty.view(-1)[0] = True
        lse[empty] = float("inf") if i % 2 else -float("inf")
        out[empty.transpose(1, 2) if len(shape) == 4 else empty] = float("nan")
        outs.append(out)
        lses.append(lse)
    return outs, lses


def check(outs: list[Any], lses: list[Any], got: tuple[Any, Any]) -> None:
    dtype = str(outs[0].dtype).removeprefix("torch.")
    want_out, want_lse = reference.merge_attn_states(
        [x.double().cpu().numpy() for x in outs], [x.cpu().numpy() for x in lses]
    )
    out, lse = (x.double().cpu().numpy() for x in got)
    assert got[0].dtype == outs[0].dtype and got[1].dtype == torch.float32
    np.testing.assert_allclose(out, want_out, rtol=RELATIVE[dtype], atol=2e-6)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", (1, 2, 3, 8, 9, 31, 32, 33, 100))
def test_as_the_reference(parts: int, dtype: str, shape: tuple[int, ...]) -> None:
    outs, lses = make_parts(parts, shape, dtype)
    with poisoned_allocations():
        got = rawmla.merge_attn_states(outs, lses)
    assert got[0].is_contiguous() and got[1].is_contiguous()
    check(outs, lses, got)
    again = rawmla.merge_attn_states(outs, lses)
    assert torch.equal(got[0].view(torch.uint8), again[0].view(torch.uint8)) and torch.equal(got[1], again[1])


def test_more_parts_than_two_levels_hold() -> None:
    outs, lses = make_parts(1025, (3, 2, 512), "bfloat16")
    check(outs, lses, rawmla.merge_attn_states(outs, lses))


def test_one_part_and_empty_ones() -> None:
    """The only part with keys comes back as it is."""
    outs, lses = make_parts(3, (2, 3, 5, 512), "bfloat16")
    for i, lse in enumerate(lses):
        lse.fill_(float("inf") if i != 1 else 1.5)
    outs[0].fill_(float("nan"))
    outs[1].nan_to_num_()
    out, lse = rawmla.merge_attn_states(outs, lses)
    assert torch.equal(out, outs[1]) and torch.equal(lse, lses[1])


def test_all_empty() -> None:
    outs = [torch.full((2, 3, 5, 512), float("nan"), dtype=torch.bfloat16, device="cuda")] * 40
    lses = [torch.full((2, 5, 3), float("inf"), device="cuda")] * 40
    out, lse = rawmla.merge_attn_states(outs, lses)
    assert bool((out == 0).all()) and bool((lse == float("inf")).all())


def test_far_apart() -> None:
    """Weights that underflow, and lse far from 0."""
    outs, _ = make_parts(3, (2, 3, 5, 512), "float32")
    for out in outs:
        out.nan_to_num_()
    lses = [torch.full((2, 5, 3), value, device="cuda") for value in (1000.0, 1003.0, -5000.0)]
    check(outs, lses, rawmla.merge_attn_states(outs, lses))


def test_strides_and_in_place() -> None:
    """Head slices of larger buffers, transposed lse, the result on top of a part."""
    outs, lses = make_parts(4, (2, 3, 5, 512), "bfloat16")
    buffer = torch.full((2, 3, 16, 512), -7.0, dtype=torch.bfloat16, device="cuda")
    first = buffer[:, :, 4:9]
    first.copy_(outs[0])
    turned = [
        lse.transpose(1, 2).contiguous().transpose(1, 2) if i % 2 else lse for i, lse in enumerate(lses)
    ]
    got = rawmla.merge_attn_states([first, *outs[1:]], turned, out=first)
    assert got[0] is first
    check(outs, lses, got)
    first.fill_(-7)
    assert bool((buffer == -7).all())


def test_inside_a_graph() -> None:
    for parts in (3, 40):
        outs, lses = make_parts(parts, (2, 3, 16, 512), "bfloat16")
        rawmla.merge_attn_states(outs, lses)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = rawmla.merge_attn_states(outs, lses)
        for seed in (1, 2):
            for old, new in zip(
                (*outs, *lses), sum(make_parts(parts, (2, 3, 16, 512), "bfloat16", seed), []), strict=True
            ):
                old.copy_(new)
            graph.replay()
            check(outs, lses, got)


def test_cupy_arrays() -> None:
    outs, lses = make_parts(40, (3, 4, 512), "float16")
    want = rawmla.merge_attn_states(outs, lses)
    torch.cuda.synchronize()
    given = [[cupy.asarray(x) for x in arrays] for arrays in (outs, lses)]
    out, lse = rawmla.merge_attn_states(*given)
    assert isinstance(out, cupy.ndarray) and isinstance(lse, cupy.ndarray)
    np.testing.assert_array_equal(out.get().view(np.int16), want[0].cpu().numpy().view(np.int16))
    np.testing.assert_array_equal(lse.get(), want[1].cpu().numpy())
