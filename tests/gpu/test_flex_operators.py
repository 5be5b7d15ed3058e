"""The operators of score and mask functions on the GPU, whose instructions for some are approximate: what the
traced text of a function gives there at single points, and its gradients, as torch's float64 has them.

The functions are those of tests/test_flex_trace.py and tests/test_flex_gradients.py, which evaluate them on
the CPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gpu_support import torch
from host_mods import pack, wanted
from test_device_parts import probe
from test_flex_gradients import CAPTURED, OF_THE_SCORE
from test_flex_gradients import _points as points_of_gradients
from test_flex_gradients import _scores as scores
from test_flex_gradients import _tensors as tensors
from test_flex_trace import MASK_MODS, SCORE_MODS
from test_flex_trace import _points as points

from rawmla.flex.header import header
from rawmla.flex.mods import Mod, Place
from rawmla.flex.trace import trace

PROBE = """
struct Sink {
    const ScoreMod& mod;
    template <int kPlace> __device__ void add(i64 place, float value) {
        atomicAdd(mod.gradients[ScoreMod::kSite[kPlace].gradient] + place, value);
    }
};
extern "C" __global__ void probe(const FUNCTION* function, const float* scores, const int* at,
                                 const float* grads, float* values, float* derivatives) {
    const int i = threadIdx.x;
    const int b = at[4 * i], h = at[4 * i + 1], q = at[4 * i + 2], k = at[4 * i + 3];
#if IS_MASK
    values[i] = (*function)(b, h, q, k, 50, 50);
#else
    values[i] = (*function)(scores[i], b, h, q, k, 50, 50);
#if IS_BACKWARD
    const auto both = function->value_and_derivative(scores[i], b, h, q, k, 50, 50);
    values[i] = both.value, derivatives[i] = both.derivative;
    Sink sink{*function};
    function->captured_gradients(grads[i], scores[i], b, h, q, k, 50, 50, sink);
#endif
#endif
}
"""


def bounds(mod: Mod) -> dict[str, float]:
    """tanh.approx is off by 2**-11 of its result."""
    text = mod.text + (mod.backward.text + mod.backward.captured if mod.backward else "")
    error = 2e-3 if "tanh" in text or "gelu" in text else 2e-5
    return {"rtol": error, "atol": error}


def evaluate(
    mod: Mod, folder: Path, scores: Any, at: Any, grads: Any = None, *, is_mask: bool = False
) -> tuple[Any, Any, dict[int, Any]]:
    """Values and derivatives at the points, float64, and by capture the gradients summed over the points."""
    declared = header(None, mod) if is_mask else header(mod, None)
    text = declared.replace("#pragma once", "") + (
        PROBE if mod.backward else PROBE[PROBE.index('extern "C"') :]
    )
    kernel = probe(
        folder,
        text.replace("FUNCTION", "MaskMod" if is_mask else "ScoreMod"),
        IS_MASK=int(is_mask),
        IS_BACKWARD=int(mod.backward is not None),
    )
    captured = [capture.array.detach().cuda() for capture in mod.captures]
    of = mod.backward.gradients if mod.backward else ()
    gradients = {place: torch.zeros(captured[place].shape, device="cuda") for place in of}
    places = [Place(x.data_ptr(), tuple(x.shape), x.stride()) for x in captured]
    packed = pack(mod, places, [x.data_ptr() for x in gradients.values()])
    count = len(scores)
    arrays = [
        torch.frombuffer(bytearray(packed), dtype=torch.uint8).cuda(),
        scores.float().cuda(),
        at.int().contiguous().cuda(),
        (torch.ones(count) if grads is None else grads.float()).cuda(),
        torch.full((count,), float("nan"), device="cuda"),
        torch.full((count,), float("nan"), device="cuda"),
    ]
    torch.cuda.synchronize()
    kernel((1,), (count,), tuple(x.data_ptr() for x in arrays))
    torch.cuda.synchronize()
    values, derivatives = (x.double().cpu() for x in arrays[4:])
    return values, derivatives, {place: x.cpu() for place, x in gradients.items()}


@pytest.mark.parametrize("name", OF_THE_SCORE)
def test_derivatives(name: str, tmp_path: Path) -> None:
    """Also where a function has none, or several."""
    function, at_scores = OF_THE_SCORE[name], scores()
    source = at_scores.double().requires_grad_()
    value = function(source.clone())
    (want,) = torch.autograd.grad(value.sum(), source)
    traced = trace(lambda s, b, h, q, k: function(s), "score_mod", backward=True)
    values, derivatives, _ = evaluate(traced, tmp_path, at_scores, torch.zeros(len(at_scores), 4))
    torch.testing.assert_close(values, value.detach(), **bounds(traced), equal_nan=True)
    torch.testing.assert_close(derivatives, want, **bounds(traced), equal_nan=True)


@pytest.mark.parametrize("name", SCORE_MODS)
def test_score_mod(name: str, tmp_path: Path) -> None:
    function, at = SCORE_MODS[name], points()
    traced = trace(function, "score_mod")
    values, *_ = evaluate(traced, tmp_path, *at)
    want = wanted(function, "score_mod", *at).double()
    torch.testing.assert_close(values, want, **bounds(traced), equal_nan=True)


@pytest.mark.parametrize("name", MASK_MODS)
def test_mask_mod(name: str, tmp_path: Path) -> None:
    function, at = MASK_MODS[name], points()
    values, *_ = evaluate(trace(function, "mask_mod"), tmp_path, *at, is_mask=True)
    assert torch.equal(values, wanted(function, "mask_mod", *at).double())


@pytest.mark.parametrize("name", CAPTURED)
def test_captured_tensors(name: str, tmp_path: Path) -> None:
    case = CAPTURED[name]
    at_scores, at, grads = points_of_gradients()
    exact, own = tensors(case, torch.float64), tensors(case)
    function, want = case.build(*exact), []
    for score, indices, grad in zip(at_scores, at, grads, strict=True):
        source = score.double().requires_grad_()
        value = function(source, *indices)
        value.backward(grad.double())
        derivative = torch.zeros_like(source) if source.grad is None else source.grad / grad
        want.append((value.detach(), derivative))
    traced = trace(case.build(*own), "score_mod", backward=True)
    *got, gradients = evaluate(traced, tmp_path, at_scores, at, grads)
    for one, of in zip(got, zip(*want, strict=True), strict=True):
        torch.testing.assert_close(one, torch.stack(of), **bounds(traced))
    assert len(gradients) == len(own)
    for tensor, source in zip(own, exact, strict=True):
        (place,) = [place for place in gradients if traced.captures[place].array is tensor]
        tolerance = max(1e-4, bounds(traced)["atol"] * 10)
        torch.testing.assert_close(gradients[place].double(), source.grad, rtol=2e-5, atol=tolerance)
