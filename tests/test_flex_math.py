"""The functions of numbers that cuda_src/flex/mods.cuh has instead of CUDA's library: what they give beside
float64, and that a kernel with them compiles at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flex_points import apply, needs_host_compiler
from full_cases import full_unless

from rawmla import jit
from rawmla.flex.functions import header_of
from rawmla.kernels.mha_forward_variants import flex_spec, tile_in_blocks

torch = pytest.importorskip("torch")
from rawmla.flex.trace import trace  # noqa: E402

_SIZES = [0.0, float("inf"), 1, 2, 0.5, 3, 88, 1e10]
SPECIAL = torch.tensor([float("nan"), *_SIZES, *[-x for x in _SIZES]])


def _between(low: float, high: float, seed: int = 0) -> Any:
    return torch.rand(100_000, generator=torch.Generator().manual_seed(seed)) * (high - low) + low


def _relative_error(got: Any, wanted: Any) -> float:
    return float(((got.double() - wanted).abs() / wanted.abs().clamp_min(1e-37)).max())


def _check_special(name: str, function: Callable[..., Any], *arguments: Any) -> None:
    torch.testing.assert_close(
        apply(f"torch_{name}", *arguments), function(*arguments), rtol=1e-5, atol=1e-36, equal_nan=True
    )


@needs_host_compiler
@pytest.mark.parametrize("name", ("sin", "cos"))
def test_sine_and_cosine(name: str) -> None:
    """They stay within [-1, 1], and give NaN where there is no angle and nowhere else."""
    for end in (3.2, 100.0, 1e5, 2.0**31):
        x = _between(-end, end)
        wanted = getattr(np, name)(x.numpy().astype(np.longdouble))
        error = np.abs(apply(f"torch_{name}", x).numpy() - wanted)
        assert error.max() <= 1e-7, end
        assert end > 4 or (error <= 2 * np.spacing(np.abs(wanted).astype(np.float32))).all()
    bits = torch.randint(-(2**31), 2**31, (200_000,), generator=torch.Generator().manual_seed(1))
    x = torch.cat([bits.to(torch.int32).view(torch.float32), SPECIAL])
    got = apply(f"torch_{name}", x)
    assert torch.equal(got.isnan(), ~x.isfinite())
    assert float(got[x.isfinite()].abs().max()) <= 1


@needs_host_compiler
def test_tangent() -> None:
    x = _between(-300, 300)
    sine, cosine = x.double().sin(), x.double().cos()
    error = (apply("torch_tan", x).double() - sine / cosine).abs() * cosine.square()  # of the angle
    assert float(error.max()) <= 2e-7


FUNCTIONS: dict[str, tuple[Any, tuple[tuple[float, float, float], ...]]] = {
    "sinh": (torch.sinh, ((-1, 1, 3e-7), (-10, 10, 1e-6), (-88, 88, 1e-5))),
    "asinh": (torch.asinh, ((-1, 1, 5e-7), (-1e12, 1e12, 5e-7))),
    "acosh": (torch.acosh, ((1, 1.01, 5e-7), (1, 3, 5e-7), (1, 1e12, 5e-7))),
    "atanh": (torch.atanh, ((-0.4, 0.4, 5e-7), (-1, 1, 5e-7))),
    "log1p": (torch.log1p, ((-0.5, 0.5, 5e-7), (-1, 9, 5e-7))),
    "expm1": (torch.expm1, ((-0.5, 0.5, 5e-7), (-3, 3, 5e-7), (-80, 80, 1e-5))),
    "erfc": (torch.erfc, ((-4, 1, 1e-6), (1, 4, 3e-6), (1, 9, 1e-5))),
    "sqrt": (torch.sqrt, ((0, 1, 1e-7), (0, 1e10, 1e-7))),
    "reciprocal": (torch.reciprocal, ((0, 1, 1e-7),)),
}


@needs_host_compiler
@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_of_a_number(name: str) -> None:
    function, ranges = FUNCTIONS[name]
    for low, high, bound in ranges:
        x = _between(low, high)
        assert _relative_error(apply(f"torch_{name}", x), function(x.double())) <= bound, (low, high)
    _check_special(name, function, SPECIAL)


PAIRS: dict[str, tuple[Callable[[Any, Any], Any], float]] = {
    "atan2": (torch.atan2, 5e-7),
    "pow": (torch.pow, 3e-6),
    "fmod": (torch.fmod, 0),
    "remainder": (torch.remainder, 1e-7),
    "floor_divide": (torch.floor_divide, 0),
    "trunc_divide": (lambda a, b: torch.div(a, b, rounding_mode="trunc"), 0),
}


@needs_host_compiler
@pytest.mark.parametrize("name", PAIRS)
def test_function_of_two_numbers(name: str) -> None:
    function, bound = PAIRS[name]
    a, b = _between(-20, 20, 2), _between(-5, 5, 3)
    a = a.abs() if name == "pow" else a
    exact = function(a, b).double() if bound == 0 else function(a.double(), b.double())
    assert _relative_error(apply(f"torch_{name}", a, b), exact) <= bound
    pairs = torch.meshgrid(SPECIAL, SPECIAL, indexing="ij")
    _check_special(name, function, *[x.reshape(-1).contiguous() for x in pairs])
    if name in ("fmod", "remainder"):  # of large quotients
        a, b = torch.exp2(_between(0, 29, 4)), _between(0.5, 5, 5)
        assert torch.equal(apply(f"torch_{name}", a, b), function(a, b))
    if name.endswith("_divide"):  # a whole quotient is exact
        quotient, b = _between(-2000, 2000, 6).round(), _between(-99, 99, 7).round()
        quotient, b = quotient[b != 0], b[b != 0]
        assert torch.equal(apply(f"torch_{name}", quotient * b, b), quotient)


COMPILED: dict[str, Callable[..., Any]] = {
    "sin": lambda s, b, h, q, k: s + torch.sin(q - k),
    "cos": lambda s, b, h, q, k: s + torch.cos(q - k),
    "pow": lambda s, b, h, q, k: s.abs() ** 1.5,
    "atanh": lambda s, b, h, q, k: torch.atanh(s),
    "erfc": lambda s, b, h, q, k: torch.erfc(s),
    "log1p": lambda s, b, h, q, k: torch.log1p(s),
}


@pytest.mark.parametrize("name", full_unless(lambda name: name == "sin", COMPILED))
def test_largest_tile_has_no_losses(name: str) -> None:
    """Else the kernel is compiled a second time, with another tile."""
    header = header_of(trace(COMPILED[name], "score_mod"), None)
    keys = tile_in_blocks(128, 128).keys
    assert jit.build(flex_spec("bfloat16", 128, 128, keys, False, header)).losses == []
