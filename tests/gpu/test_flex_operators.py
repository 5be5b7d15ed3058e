"""The operators of score and mask functions on the GPU, whose instructions for some are approximate: what the
traced text of a function gives there at single points, and its gradients, as torch's float64 has them.

The functions are those of tests/flex_functions.py, which tests/test_flex_trace.py evaluates on the CPU.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from flex_functions import CAPTURED, MASK_MODS, OF_THE_SCORE, SCORE_MODS, draw, points, scores
from flex_points import Evaluated, evaluate, wanted
from gpu_support import torch
from kernel_probe import probe

from rawmla.flex.mods import Mod
from rawmla.flex.trace import trace


def launch(folder: Path, text: str, macros: dict[str, int], addresses: list[int], count: int) -> None:
    """Run the kernel `probe` of a text with a thread for each point."""
    kernel = probe(folder, text, **macros)
    torch.cuda.synchronize()
    kernel((1,), (count,), tuple(addresses))
    torch.cuda.synchronize()


def on_the_gpu(mod: Mod, folder: Path, *at: Any, is_mask: bool = False) -> Evaluated:
    """The results of a function at points."""
    return evaluate(mod, *at, is_mask=is_mask, launch=partial(launch, folder), device="cuda")


def bounds(mod: Mod) -> dict[str, float]:
    """tanh.approx is off by 2**-11 of its result."""
    text = mod.text + (mod.backward.text + mod.backward.captured if mod.backward else "")
    error = 2e-3 if "tanh" in text or "gelu" in text else 2e-5
    return {"rtol": error, "atol": error}


@pytest.mark.parametrize("name", OF_THE_SCORE)
def test_derivatives(name: str, tmp_path: Path) -> None:
    """Also where a function has none, or several."""
    function, at_scores = OF_THE_SCORE[name], scores()
    source = at_scores.double().requires_grad_()
    value = function(source.clone())
    (want,) = torch.autograd.grad(value.sum(), source)
    traced = trace(lambda s, b, h, q, k: function(s), "score_mod", backward=True)
    got = on_the_gpu(traced, tmp_path, at_scores, torch.zeros(len(at_scores), 4))
    for values in (got.values, got.again):
        torch.testing.assert_close(values, value.detach(), **bounds(traced), equal_nan=True)
    torch.testing.assert_close(got.derivatives, want, **bounds(traced), equal_nan=True)


@pytest.mark.parametrize("name", SCORE_MODS)
def test_score_mod(name: str, tmp_path: Path) -> None:
    function, at = SCORE_MODS[name], points()
    traced = trace(function, "score_mod")
    want = wanted(function, "score_mod", *at)
    got = on_the_gpu(traced, tmp_path, *at)
    torch.testing.assert_close(got.values, want, **bounds(traced), equal_nan=True)


@pytest.mark.parametrize("name", MASK_MODS)
def test_mask_mod(name: str, tmp_path: Path) -> None:
    function, at = MASK_MODS[name], points()
    got = on_the_gpu(trace(function, "mask_mod"), tmp_path, *at, is_mask=True)
    assert torch.equal(got.values, wanted(function, "mask_mod", *at))


@pytest.mark.parametrize("name", CAPTURED)
def test_captured_tensors(name: str, tmp_path: Path) -> None:
    case, (at_scores, at) = CAPTURED[name], points()
    grads = torch.randn(len(at_scores), generator=draw(8))
    exact, own = case.tensors(torch.float64), case.tensors()
    function, want = case.function(*exact), []
    for score, indices, grad in zip(at_scores, at.int(), grads, strict=True):
        source = score.double().requires_grad_()
        value = function(source, *indices)
        value.backward(grad.double())
        derivative = torch.zeros_like(source) if source.grad is None else source.grad / grad
        want.append((value.detach(), derivative))
    traced = trace(case.function(*own), "score_mod", backward=True)
    got = on_the_gpu(traced, tmp_path, at_scores, at, grads)
    for one, of in zip((got.again, got.derivatives), zip(*want, strict=True), strict=True):
        torch.testing.assert_close(one, torch.stack(of), **bounds(traced))
    assert len(got.gradients) == len(own)
    for tensor, source in zip(own, exact, strict=True):
        (place,) = [place for place in got.gradients if traced.captures[place].array is tensor]
        tolerance = max(1e-4, bounds(traced)["atol"] * 10)
        torch.testing.assert_close(got.gradients[place].double(), source.grad, rtol=2e-5, atol=tolerance)
