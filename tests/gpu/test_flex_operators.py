"""Operators of score functions on the GPU, whose instructions for some are approximate: values and
derivatives at single points, as torch's float64 has them.

tests/test_flex_trace.py evaluates these and the other functions of tests/flex_functions.py on the CPU.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from flex_functions import OF_THE_SCORE, scores
from flex_points import Evaluated, evaluate
from full_cases import full_unless
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


APPROXIMATE = (
    *("div", "reciprocal", "pow 0.5", "pow -0.5", "pow 1.5", "number to the power", "exp", "expm1", "log"),
    *(
        "log1p",
        "sqrt",
        "rsqrt",
        "sin",
        "tan",
        "acos",
        "atan2",
        "sinh",
        "tanh",
        "acosh",
        "erf",
        "erfc",
        "silu",
    ),
    *("gelu tanh", "softplus", "remainder", "fmod by the score", "rounding", "where with a hidden NaN"),
)


@pytest.mark.parametrize("name", full_unless(lambda name: name in APPROXIMATE, OF_THE_SCORE))
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
