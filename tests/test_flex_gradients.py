"""Gradients of score functions as CUDA text: by the score, and what is added to those of captured tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from cuda_probe import headers
from host_mods import differentiate, needs_host_compiler, pack

from rawmla.flex.functions import as_reading, check_mask
from rawmla.flex.header import HEADER_NAME, header
from rawmla.flex.mods import NO_BYTES, CudaMod, Place, reading_of
from rawmla.jit import nvrtc
from rawmla.jit.sources import SourceSet

torch = pytest.importorskip("torch")
from rawmla.flex.trace import trace  # noqa: E402

B, H, LENGTH = 2, 4, 50
F = torch.nn.functional
INFINITY = float("inf")


def _draw(seed: int) -> Any:
    return torch.Generator().manual_seed(seed)


# ---- derivatives by the score

EDGES = (0.0, -0.0, 0.25, -0.25, 0.5, -0.5, 0.75, 1.0, -1.0, 1.5, -1.5, 2.0, -2.0, 3.0, -3.0, 6.0, -6.0, 20.0)
"""Where functions below switch, are tied, or have no derivative."""

OF_THE_SCORE: dict[str, Callable[[Any], Any]] = {
    "add": lambda s: s + 2,
    "sub": lambda s: s - 2,
    "rsub": lambda s: torch.rsub(s, 2, alpha=3),
    "mul": lambda s: 2 * s * s,
    "div": lambda s: s / 3 + 3 / s,
    "neg": lambda s: -s,
    "abs": lambda s: s.abs(),
    "reciprocal": lambda s: s.reciprocal(),
    "square": lambda s: s.square(),
    "pow 0": lambda s: s**0,
    "pow 1": lambda s: s**1,
    "pow 2": lambda s: s**2,
    "pow 3": lambda s: s**3,
    "pow 4": lambda s: s**4,
    "pow 5": lambda s: s**5,
    "pow -1": lambda s: s**-1,
    "pow -2": lambda s: s**-2,
    "pow 0.5": lambda s: s**0.5,
    "pow -0.5": lambda s: s**-0.5,
    "pow 1.5": lambda s: s**1.5,
    "number to the power": lambda s: 2**s + 0.5**s + 0**s.abs(),
    "power of two": lambda s: s.abs() ** s,
    "exp": lambda s: torch.exp(s),
    "exp2": lambda s: torch.exp2(s),
    "expm1": lambda s: torch.expm1(s),
    "log": lambda s: torch.log(s),
    "log2": lambda s: torch.log2(s),
    "log10": lambda s: torch.log10(s),
    "log1p": lambda s: torch.log1p(s),
    "sqrt": lambda s: torch.sqrt(s),
    "rsqrt": lambda s: torch.rsqrt(s),
    "sin": lambda s: torch.sin(s),
    "cos": lambda s: torch.cos(s),
    "tan": lambda s: torch.tan(s),
    "asin": lambda s: torch.asin(s),
    "acos": lambda s: torch.acos(s),
    "atan": lambda s: torch.atan(s),
    "atan2": lambda s: torch.atan2(s, s + 1) + torch.atan2(1 - s, s * 2),
    "sinh": lambda s: torch.sinh(s / 2),
    "cosh": lambda s: torch.cosh(s / 2),
    "tanh": lambda s: torch.tanh(s),
    "asinh": lambda s: torch.asinh(s),
    "acosh": lambda s: torch.acosh(s),
    "atanh": lambda s: torch.atanh(s),
    "erf": lambda s: torch.erf(s),
    "erfc": lambda s: torch.erfc(s),
    "sigmoid": lambda s: torch.sigmoid(s),
    "silu": lambda s: F.silu(s),
    "relu": lambda s: F.relu(s),
    "gelu": lambda s: F.gelu(s),
    "gelu tanh": lambda s: F.gelu(s, approximate="tanh"),
    "softplus": lambda s: F.softplus(s) + F.softplus(s, 2.0, 3.0),
    "leaky_relu": lambda s: F.leaky_relu(s, 0.1),
    "hardtanh": lambda s: F.hardtanh(s) + F.hardtanh(s, -0.5, 2.0),
    "elu": lambda s: F.elu(s, 1.5) + torch.ops.aten.elu(s, 0.7, 1.2, 0.3),
    "selu": lambda s: F.selu(s),
    "in place": lambda s: (
        F.elu(s * 1, inplace=True) + F.leaky_relu(s * 1, inplace=True) + (s * 1).sigmoid_() + (2 * s).tanh_()
    ),
    "silu in place": lambda s: F.silu(s * 2, inplace=True) * s,
    "score in place": lambda s: s.mul_(3).add_(1).sin(),
    "clamp": lambda s: s.clamp(-0.5, 2) + s.clamp(min=1) + s.clamp(max=-1),
    "clamp_min": lambda s: s.clamp_min(0.5) + s.clamp_max(1.5),
    "clamp by tensors": lambda s: (2 * s).clamp(s - 1, s * s),
    "maximum": lambda s: (
        torch.maximum(s, 2 * s) + torch.maximum(s, s**2) + torch.maximum(s, torch.tensor(0.5))
    ),
    "minimum": lambda s: (
        torch.minimum(s, 2 * s) + torch.minimum(s, s**2) + torch.minimum(s, torch.tensor(0.5))
    ),
    "where": lambda s: torch.where(s > 0.5, s * s, -s) + torch.where(s >= 1, s, 0.0),
    "where with a hidden NaN": lambda s: torch.where(s > 0, torch.log(s), -INFINITY),
    "where with a hidden infinity": lambda s: torch.where(s > 0, 1 / s, s),
    "causal": lambda s: torch.where(s > 1, s, -INFINITY),
    "masked_fill": lambda s: (s * s).masked_fill(s < 0.5, -1.0) + (3 * s).masked_fill_(s > 1, 0.0),
    "remainder": lambda s: torch.remainder(s, 0.75) * s + s % -0.5,
    "fmod": lambda s: torch.fmod(s, 0.75) * s,
    "fmod by the score": lambda s: torch.fmod(torch.tensor(2.25), s + 0.125),
    "rounding": lambda s: s * (s.floor() + s.ceil() + s.round() + s.trunc()) + s.frac(),
    "div with rounding": lambda s: s + torch.div(s, 0.25, rounding_mode="floor"),
    "sign": lambda s: s + torch.sign(s) + torch.sgn(s) * s,
    "comparisons": lambda s: s * (s > 0.5) + s * (s != 1) * (s <= 2) + (s == 3),
    "bool": lambda s: torch.where(torch.logical_not(torch.isnan(s)) & torch.isfinite(s), s, 0.0),
    "detach": lambda s: s * s.detach() + s.detach(),
    "no_grad": lambda s: _straight_through(s),
    "copies": lambda s: s.to(torch.float64).float().clone() + torch.zeros_like(s) + torch.full_like(s, 2.0),
    "softcap": lambda s: 2 * torch.tanh(s / 2),
    "used often": lambda s: s * torch.sigmoid(s) + torch.tanh(s) ** 2 - s.exp() * s.cos(),
}  # fmt: skip


def _straight_through(s: Any) -> Any:
    with torch.no_grad():
        step = s.round() - s
    return (s + step) * 2


def _scores() -> Any:
    return torch.cat([torch.tensor(EDGES), torch.randn(100, generator=_draw(7)) * 2])


@needs_host_compiler
@pytest.mark.parametrize("name", OF_THE_SCORE)
def test_derivatives(name: str) -> None:
    """Those of torch's autograd in float64, also where it has none, or several."""
    function, scores = OF_THE_SCORE[name], _scores()
    source = scores.double().requires_grad_()
    value = function(source.clone())
    (want,) = torch.autograd.grad(value.sum(), source)
    traced = trace(lambda s, b, h, q, k: function(s), "score_mod", backward=True)
    at = torch.zeros(len(scores), 4)
    got = differentiate(traced, scores, at, torch.ones(len(scores)))
    torch.testing.assert_close(got.derivatives.double(), want, rtol=2e-5, atol=2e-5, equal_nan=True)
    torch.testing.assert_close(got.values.double(), value.detach(), rtol=2e-5, atol=2e-5, equal_nan=True)
    assert got.gradients == {}


@pytest.mark.parametrize(
    ("is_one", "mod"),
    (
        (True, lambda s, b, h, q, k: s),
        (True, lambda s, b, h, q, k: s + (q - k) * 0.5),
        (True, lambda s, b, h, q, k: (s + VECTORS[q].sum()).to(torch.float64)),
        (True, lambda s, b, h, q, k: s - torch.where(q > k, 1.0, 2.0)),
        (False, lambda s, b, h, q, k: s * 1.0),
        (False, lambda s, b, h, q, k: s + s.detach() * s),
        (False, lambda s, b, h, q, k: torch.where(q >= k, s, -INFINITY)),
    ),
)
def test_derivatives_of_one_are_known(is_one: bool, mod: Callable[..., Any]) -> None:
    traced = trace(mod, "score_mod", backward=True)
    assert traced.backward is not None and traced.backward.is_one == is_one


def test_zeros_stand_in_the_text() -> None:
    """Those of derivatives: a selection then has no parameter. Numbers of the function have none of it."""
    traced = trace(lambda s, b, h, q, k: torch.where(q > k, s + 0.0, -INFINITY), "score_mod", backward=True)
    assert traced.backward is not None and "? grad : static_cast<float>(0)" in traced.backward.text
    assert [number.source for number in traced.numbers] == [0.0]


# ---- captured tensors

VECTORS = torch.randn(LENGTH, 3, generator=_draw(1))
DOCUMENTS = torch.randint(0, 5, (B, LENGTH), generator=_draw(2))


class Captured(NamedTuple):
    """A function that `build` makes of tensors of these shapes, and what a kernel can know of it."""

    build: Callable[..., Callable[..., Any]]
    shapes: tuple[tuple[int, ...], ...]
    sites: list[tuple[int, bool, bool]]  # gradient, by_q, by_kv
    dtype: torch.dtype = torch.float32


L = LENGTH
CAPTURED: dict[str, Captured] = {
    "bias": Captured(lambda t: lambda s, b, h, q, k: s + t[h, q, k], ((H, L, L),), [(0, True, True)]),
    "chained": Captured(
        lambda t: lambda s, b, h, q, k: s + t[b][h, q][k], ((B, H, L, L),), [(0, True, True)]
    ),
    "symmetric": Captured(
        lambda t: lambda s, b, h, q, k: s + t[q, k] + t[k, q], ((L, L),), [(0, True, True)] * 2
    ),
    "by head": Captured(lambda t: lambda s, b, h, q, k: s + t[h], ((H,),), [(0, False, False)]),
    "without the score": Captured(
        lambda t: lambda s, b, h, q, k: t[h, q, k] * t[h][k, q], ((H, L, L),), [(0, True, True)] * 2
    ),
    "scale by head": Captured(lambda t: lambda s, b, h, q, k: s * t[h], ((H,),), [(0, False, False)]),
    "gate": Captured(
        lambda t: lambda s, b, h, q, k: s * torch.sigmoid(t[h]), ((H,),), [(0, False, False)]
    ),
    "by query": Captured(lambda t: lambda s, b, h, q, k: s + t[b, q], ((B, L),), [(0, True, False)]),
    "by key": Captured(lambda t: lambda s, b, h, q, k: s - 2 * t[h][k], ((H, L),), [(0, False, True)]),
    "relative": Captured(
        lambda t: lambda s, b, h, q, k: s + t[torch.clamp(q - k, -16, 16) + 16], ((33,),), [(0, True, True)]
    ),
    "one element": Captured(lambda t: lambda s, b, h, q, k: s * t[0], ((1,),), [(0, False, False)]),
    "whole of one element": Captured(
        lambda t: lambda s, b, h, q, k: (s * t).sum(), ((1,),), [(0, False, False)]
    ),
    "often": Captured(
        lambda t: lambda s, b, h, q, k: s + t[q] * t[q] + t[q].tanh() - t[k] + t[3] + t[-1],
        ((L,),),
        [(0, True, False), (0, False, True), (0, False, False), (0, False, False)],
    ),
    "several": Captured(
        lambda t, u, v: lambda s, b, h, q, k: s * u[h] + t[q] * v[k] - u[0],
        ((L,), (H,), (L,)),
        [(0, False, False), (1, True, False), (2, False, True), (0, False, False)],
    ),
    "distance": Captured(
        lambda t: lambda s, b, h, q, k: s - (t[q] - t[k]).square().sum(-1),
        ((L, 3),),
        [*[(0, True, False)] * 3, *[(0, False, True)] * 3],
    ),
    "gathered": Captured(
        lambda t: lambda s, b, h, q, k: s + t[DOCUMENTS[b, q], DOCUMENTS[b, k]], ((5, 5),), [(0, True, True)]
    ),
    "by a load": Captured(
        lambda t: lambda s, b, h, q, k: s + t[DOCUMENTS[b, k]], ((5,),), [(0, False, True)]
    ),
    "by the score": Captured(
        lambda t: lambda s, b, h, q, k: s + t[(s > 0).int()], ((2,),), [(0, True, True)]
    ),
    "slices": Captured(
        lambda t: lambda s, b, h, q, k: s + t[1:4, 0][h % 3] * t[:, 1].mean() + t[2].amax(),
        ((4, 3),),
        [],
    ),
    "slices beside indices": Captured(
        lambda t: lambda s, b, h, q, k: s + t[h, 1:][q % 49] * t[..., k][h] + s * t[h, None, q][0],
        ((H, L),),
        [],
    ),
    "sums of nothing": Captured(
        lambda t: lambda s, b, h, q, k: s * t[q][1] + (t[q] * s)[3:].sum() + t[k][:0].sum(), ((L, 3),), []
    ),
    "views": Captured(
        lambda t: lambda s, b, h, q, k: (
            s + t.unbind(0)[1][q] + t.select(1, 3)[h % 2] + t.narrow(1, 10, 30)[h % 2, q % 30]
        ),
        ((2, L),),
        [],
    ),
    "elements of a vector": Captured(
        lambda t: lambda s, b, h, q, k: s + (t[q] * s)[h % 3] + (t[k] * 2)[1] + (t[k] * s)[1:].sum(),
        ((L, 3),),
        [],
    ),
    "unbound vector": Captured(
        lambda t: lambda s, b, h, q, k: s * (t[q] * s).unbind(0)[2] + (t[q] + t[k]).unbind(0)[0],
        ((L, 3),),
        [],
    ),
    "outer product": Captured(
        lambda t: lambda s, b, h, q, k: s + (t[q].view(3, 1) * t[k].unsqueeze(0)).sum() / 4, ((L, 3),), []
    ),
    "largest": Captured(
        lambda t: lambda s, b, h, q, k: s + t[q].amax() * 2 - t[k].amin(0, keepdim=True).squeeze(0),
        ((L, 3),),
        [],
    ),
    "ties": Captured(
        lambda t: lambda s, b, h, q, k: (
            torch.maximum(s, t[q].round()) + torch.minimum(t[q], t[k]) + s * s
        ),
        ((L,),),
        [],
    ),
    "two arguments": Captured(
        lambda t: lambda s, b, h, q, k: (
            torch.atan2(s, t[q]) + t[q].abs() ** t[k] + s / t[h] + torch.fmod(s, t[q]) + s.clamp(t[q], t[k])
        ),
        ((L,),),
        [],
    ),
    "hidden": Captured(
        lambda t: lambda s, b, h, q, k: (
            torch.where(q >= k, s + t[q], -INFINITY) + torch.where(k > 3, 0.0, t[k])
        ),
        ((L,),),
        [(0, True, False), (0, False, True)],
    ),
    "bfloat16": Captured(
        lambda t: lambda s, b, h, q, k: s * t[q].float() + t[k].float(), ((L,),), [], torch.bfloat16
    ),
    "float16": Captured(
        lambda t: lambda s, b, h, q, k: s + t[h].float() * (q - k), ((H,),), [], torch.float16
    ),
    "float64": Captured(lambda t: lambda s, b, h, q, k: s.double() * t[h, k], ((H, L),), [], torch.float64),
    "in float64": Captured(
        lambda t: lambda s, b, h, q, k: s.double() + t[h, k] ** 2, ((H, L),), [], torch.float64
    ),
}  # fmt: skip


def _points(count: int = 60) -> tuple[Any, Any, Any]:
    scores = torch.randn(count, generator=_draw(7)) * 2
    scores[:8] = scores[:8].round()
    extents = (B, H, L, L)
    at = torch.stack([torch.randint(0, n, (count,), generator=_draw(n)) for n in extents], dim=1)
    return scores, at.int(), torch.randn(count, generator=_draw(8))


def _tensors(case: Captured, dtype: torch.dtype | None = None) -> list[Any]:
    made = []
    for i, shape in enumerate(case.shapes):
        tensor = torch.randn(shape, generator=_draw(20 + i)).to(case.dtype)
        made.append(tensor.to(dtype or case.dtype).requires_grad_())
    return made


@needs_host_compiler
@pytest.mark.parametrize("name", CAPTURED)
def test_captured_tensors(name: str) -> None:
    case = CAPTURED[name]
    scores, at, grads = _points()
    exact = _tensors(case, torch.float64)
    function = case.build(*exact)
    values, derivatives = [], []
    for score, indices, grad in zip(scores, at, grads, strict=True):
        source = score.double().requires_grad_()
        value = function(source, *indices)
        value.backward(grad.double())
        values.append(value.detach())
        derivatives.append(
            torch.zeros((), dtype=torch.float64) if source.grad is None else source.grad / grad
        )

    own = _tensors(case)
    traced = trace(case.build(*own), "score_mod", backward=True)
    assert traced.backward is not None
    got = differentiate(traced, scores, at, grads)
    torch.testing.assert_close(got.values.double(), torch.stack(values), rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(got.derivatives.double(), torch.stack(derivatives), rtol=2e-5, atol=2e-5)
    assert len(got.gradients) == len(own)
    for tensor, source in zip(own, exact, strict=True):
        (place,) = [place for place in got.gradients if traced.captures[place].array is tensor]
        torch.testing.assert_close(got.gradients[place].double(), source.grad, rtol=2e-5, atol=1e-4)
    if case.sites:
        assert [tuple(site) for site in traced.backward.sites] == case.sites


@needs_host_compiler
@pytest.mark.parametrize("name", CAPTURED)
def test_places_depend_on_what_is_said(name: str) -> None:
    traced = trace(CAPTURED[name].build(*_tensors(CAPTURED[name])), "score_mod", backward=True)
    assert traced.backward is not None
    scores, at, grads = _points()
    places = differentiate(traced, scores, at, grads).places
    for argument in ("q_idx", "kv_idx"):
        moved, column = at.clone(), 2 + (argument == "kv_idx")
        moved[:, column] = moved[:, column].flip(0)
        others = differentiate(traced, scores.flip(0) * 2 + 1, moved, grads).places
        for i, site in enumerate(traced.backward.sites):
            depends = site.by_q if argument == "q_idx" else site.by_kv
            assert depends or torch.equal(places[:, i], others[:, i])


@needs_host_compiler
def test_gradients_go_where_was_read() -> None:
    """Negative indices count from the end, and those outside are moved inside."""
    table = torch.zeros(10, requires_grad=True)
    scores, at, grads = _points()
    traced = trace(lambda s, b, h, q, k: s + table[q - 30], "score_mod", backward=True)
    (gradient,) = differentiate(traced, scores, at, grads).gradients.values()
    places = at[:, 2] - 30
    places = torch.where(places < 0, places + 10, places).clamp(0, 9)
    torch.testing.assert_close(gradient, torch.zeros(10).index_add(0, places, grads))


@needs_host_compiler
def test_gradients_are_contiguous() -> None:
    """In the shape of a captured tensor, however it lies."""
    whole = torch.randn(H, 2 * L)
    for tensor in (whole.T, whole[:, ::2].T, whole[1, 3].expand(L, H)):
        table = tensor.detach().requires_grad_()
        scores, at, grads = _points()
        traced = trace(lambda s, b, h, q, k: s + table[q, h], "score_mod", backward=True)  # noqa: B023
        (gradient,) = differentiate(traced, scores, at, grads).gradients.values()
        want = torch.zeros(table.shape).index_put((at[:, 2], at[:, 1]), grads, accumulate=True)
        torch.testing.assert_close(gradient, want)


def _by_a_factor() -> tuple[Any, Any]:
    """A tensor without dimensions on a device without memory, and a function that multiplies by it."""
    factor = torch.zeros((), device="meta", requires_grad=True)
    return factor, trace(lambda s, b, h, q, k: s * factor + factor, "score_mod", "meta", True)


def test_a_tensor_without_dimensions() -> None:
    """On a device, where it is no number."""
    factor, traced = _by_a_factor()
    assert traced.backward is not None
    assert traced.backward.gradients == (0,) and traced.captures[0].array is factor
    assert traced.backward.sites == ((0, False, False),)


@needs_host_compiler
def test_derivatives_of_a_tensor_without_dimensions() -> None:
    _, traced = _by_a_factor()
    scores, at, grads = _points()
    here = traced._replace(captures=(traced.captures[0]._replace(array=torch.tensor(0.75)),))
    got = differentiate(here, scores, at, grads)
    torch.testing.assert_close(got.gradients[0], ((scores + 1) * grads).sum())
    torch.testing.assert_close(got.derivatives, torch.full((len(scores),), 0.75))


def test_tensors_without_a_gradient() -> None:
    """The result does not depend on them, or passes no gradient on, or they require none."""
    used, unused, compared, cut = (torch.randn(L, requires_grad=True) for _ in range(4))
    without = torch.randn(L)

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        unused[k] * 2
        with torch.no_grad():
            blocked = cut[k] * 3
        return torch.where(compared[q] > 0, s, used[q] + cut[q].detach() + blocked + without[k])

    traced = trace(mod, "score_mod", backward=True)
    assert traced.backward is not None
    assert [traced.captures[place].array is used for place in traced.backward.gradients] == [True]
    assert len(traced.backward.sites) == 1


def test_a_tensor_that_was_computed() -> None:
    """One that is no leaf has a gradient of its own, which goes no further."""
    weight = torch.randn(L, requires_grad=True)
    table = weight * 2
    traced = trace(lambda s, b, h, q, k: s + table[q], "score_mod", backward=True)
    assert traced.backward is not None and traced.captures[traced.backward.gradients[0]].array is table
    assert weight.grad is None


PROBE = f"""#include "{HEADER_NAME}"
CONDITIONS
struct Sink {{
    const ScoreMod& mod;
    float sums[ScoreMod::kSites + 1];
    template <int kPlace> __device__ void add(i64 place, float value) {{
        constexpr Site site = ScoreMod::kSite[kPlace];
        if constexpr (site.by_q || site.by_kv) {{
            atomicAdd(mod.gradients[site.gradient] + place, value);
        }} else {{
            sums[kPlace] += value;
        }}
    }}
}};
extern "C" __global__ void probe(const __grid_constant__ ScoreMod score, float* out) {{
    const int i = threadIdx.x;
    const ValueAndDerivative both = score.value_and_derivative(out[i], 0, 1, i, 2 * i, 100, 100);
    Sink sink{{score, {{}}}};
    score.captured_gradients(out[i + 100], out[i], 0, 1, i, 2 * i, 100, 100, sink);
    for (float sum : sink.sums) out[i] += sum;
    out[i] += both.value * both.derivative;
}}
"""


def _compile(text: str, conditions: str = "") -> None:
    """Compile a kernel that uses a ScoreMod as backward kernels do."""
    main = PROBE.replace("CONDITIONS", conditions)
    sources = SourceSet("probe.cu", main.encode(), (*headers(), (HEADER_NAME, text.encode())))
    result = nvrtc.compile_source(sources, ("-arch=sm_90a", "-std=c++20"))
    assert result.cubin is not None, result.log


@pytest.mark.parametrize("name", ("several", "distance", "elements of a vector", "float16", "by the score"))
def test_the_text_compiles(name: str) -> None:
    traced = trace(CAPTURED[name].build(*_tensors(CAPTURED[name])), "score_mod", backward=True)
    assert traced.backward is not None
    size = len(pack(traced, [Place(0, x.array.shape, x.array.stride()) for x in traced.captures]))
    _compile(
        header(traced, None),
        f"static_assert(sizeof(ScoreMod) == {size} && ScoreMod::kIsThere);"
        f"static_assert(ScoreMod::kGradients == {len(traced.backward.gradients)});"
        f"static_assert(ScoreMod::kSites == {len(traced.backward.sites)});",
    )


def test_all_operators_compile() -> None:
    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return sum(function(s.clone()) for function in OF_THE_SCORE.values())

    _compile(header(trace(mod, "score_mod", backward=True), None))


def test_without_a_function() -> None:
    _compile(
        header(None, None),
        "static_assert(!ScoreMod::kIsThere && ScoreMod::kDerivativeIsOne && ScoreMod::kSites == 0);"
        f"static_assert(sizeof(ScoreMod) == {len(NO_BYTES)});",
    )


@pytest.mark.parametrize("context", (torch.no_grad, torch.inference_mode, torch.enable_grad))
def test_traced_as_in_a_backward_pass(context: Callable[[], Any]) -> None:
    table = torch.randn(L, requires_grad=True)
    with context():
        traced = trace(lambda s, b, h, q, k: s * table[q], "score_mod", backward=True)
    assert traced.backward is not None and len(traced.backward.sites) == 1


def test_the_text_is_the_same_each_time() -> None:
    def text() -> Any:
        case = CAPTURED["several"]
        traced = trace(case.build(*_tensors(case)), "score_mod", backward=True)
        return traced.text, traced.backward

    assert text() == text()


def _with_number(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s * NUMBER


NUMBER = torch.tensor(2.0, requires_grad=True)


@pytest.mark.parametrize(
    ("mod", "error", "texts"),
    (
        (lambda s, b, h, q, k: s.expand(3), ValueError, ("0-d tensor", "[3]")),
        (lambda s, b, h, q, k: None, ValueError, ("0-d tensor", "NoneType")),
        (lambda s, b, h, q, k: s // 0.5, NotImplementedError, ("floor_divide", "no gradients")),
        (lambda s, b, h, q, k: torch.lgamma(s), NotImplementedError, ("aten::lgamma",)),
        (_with_number, ValueError, ("score_mod _with_number", "on the device of query", "number on the CPU")),
    ),
)
def test_refused(mod: Any, error: type[Exception], texts: tuple[str, ...]) -> None:
    with pytest.raises(error) as caught:
        trace(mod, "score_mod", backward=True)
    for text in texts:
        assert text in str(caught.value)


@needs_host_compiler
@pytest.mark.parametrize(
    "mod",
    (
        lambda s, b, h, q, k: 3.0,
        lambda s, b, h, q, k: q,
        lambda s, b, h, q, k: s.detach() + VECTORS[q].sum(),
        lambda s, b, h, q, k: torch.where(s > 0, 1.0, 2.0),
    ),
)
def test_results_that_do_not_depend_on_the_score(mod: Any) -> None:
    scores, at, grads = _points()
    got = differentiate(trace(mod, "score_mod", backward=True), scores, at, grads)
    want = torch.tensor([float(mod(score, *indices)) for score, indices in zip(scores, at, strict=True)])
    torch.testing.assert_close(got.values, want, rtol=2e-5, atol=2e-5)
    assert not got.derivatives.any() and not got.is_one and got.gradients == {}


@needs_host_compiler
def test_what_was_read_may_be_changed_in_place() -> None:
    """Gradients are as without the changes: s * table[h, q] + table[b, k] has the same ones."""
    table, (scores, at, grads) = torch.randn(H, L, requires_grad=True), _points()

    def in_place(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        read = table[h][q]
        read *= s
        return read.add_(table[b, k])

    got, want = (
        differentiate(trace(mod, "score_mod", backward=True), scores, at, grads)
        for mod in (in_place, lambda s, b, h, q, k: table[h][q] * s + table[b, k])
    )
    assert torch.equal(got.values, want.values) and torch.equal(got.derivatives, want.derivatives)
    assert got.gradients[0].any() and torch.equal(got.gradients[0], want.gradients[0])


def test_in_anomaly_mode() -> None:
    """torch then looks for NaN among gradients, of which there are no values while a function is traced."""
    mod = lambda s, b, h, q, k: torch.tanh(s) * q  # noqa: E731
    want = trace(mod, "score_mod", backward=True)
    with torch.autograd.set_detect_anomaly(True):
        assert trace(mod, "score_mod", backward=True) == want
        assert torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()


@pytest.mark.parametrize("device", ("cuda", "meta"))
def test_the_device_is_not_in_the_text(device: str) -> None:
    """Nor does it have to be there."""
    kinds = [trace(lambda s, b, h, q, k: torch.tanh(s) * q, "score_mod", x, True) for x in ("cpu", device)]
    assert kinds[0] == kinds[1]


ADDED = torch.randn(L)


class Module(torch.nn.Module):
    """A score function that is a module with parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(H))
        self.others = {"shift": torch.randn(L, requires_grad=True)}

    def forward(self, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s * self.scale[h] + self.others["shift"][q]


def test_names_of_captured_tensors() -> None:
    """Those of variables, parameters and attributes; each once."""

    def named(mod: Callable[..., Any]) -> list[str]:
        return [capture.name for capture in trace(mod, "score_mod", backward=True).captures]

    def biased(table: Any) -> Callable[..., Any]:
        return lambda s, b, h, q, k: s + table[q]

    def scaled(factors: Any, s: Any, b: Any, h: Any, q: Any, k: Any, *, offset: Any) -> Any:
        return s * factors[h] + offset[k]

    def summed(s: Any, b: Any, h: Any, q: Any, k: Any, added: Any = ADDED) -> Any:
        return first(second(s, b, h, q, k), b, h, q, k) + added[q] + VECTORS[q].sum()

    first, second = biased(torch.randn(L)), biased(torch.randn(L))
    assert named(summed) == ["table", "table_2", "added", "VECTORS"]
    partial = functools.partial(scaled, torch.randn(H), offset=torch.randn(L))
    assert named(partial) == ["factors", "offset"]
    module = Module()
    for mod in (module, module.forward, lambda *given: module(*given)):
        assert named(mod) == ["scale", "shift"]
    assert named(lambda s, b, h, q, k: s + globals()["VECTORS"][q].sum()) == ["capture"]


# ---- text of the user's

BIAS, SLOPES = torch.randn(H, L, L, generator=_draw(31)), torch.randn(H, generator=_draw(32)).bfloat16()
TEXTS: dict[str, tuple[CudaMod, Callable[..., Any], list[tuple[int, bool, bool]], bool]] = {
    "bias": (
        CudaMod("score + bias(h, q_idx, kv_idx)", {"bias": BIAS}, grad="grad",
                capture_grads={"bias": ("h, q_idx, kv_idx", "grad")}),
        lambda bias, slopes: lambda s, b, h, q, k: s + bias[h, q, k],
        [(0, True, True)], True,
    ),
    "comments and statements": (
        CudaMod("const float x = score * n; // twice\nreturn x * slopes(h);", {"n": 2, "slopes": SLOPES},
                grad="const float x = n * grad;\nreturn x * slopes(h); // by it",
                capture_grads={"slopes": ("h // head", "grad * n * score // grad")}),
        lambda bias, slopes: lambda s, b, h, q, k: s * 2 * slopes[h],
        [(0, False, False)], False,
    ),
    "several": (
        CudaMod("slopes(0) * score + bias(0, q_idx, kv_idx) + bias(-1, kv_idx, 5)",
                {"bias": BIAS, "slopes": SLOPES}, grad="slopes(0) * grad",
                capture_grads={"slopes": ("0", "score * grad"),
                               "bias": [("0, q_idx, kv_idx", "grad"), ("-1, kv_idx, 5", "grad")]}),
        lambda bias, slopes: lambda s, b, h, q, k: slopes[0] * s + bias[0, q, k] + bias[-1, k, 5],
        [(0, True, True), (0, False, True), (1, False, False)], False,
    ),
    "names inside": (
        CudaMod("const float value = score; const float v0 = value;\nreturn v0 + (q_len - q_len) + sink;",
                {"sink": 0.0}, grad="const float value = grad; return value;"),
        lambda bias, slopes: lambda s, b, h, q, k: s,
        [], False,
    ),
}  # fmt: skip


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured arrays are tensors of the CPU."""

    def inspect(x: Any, name: str) -> Any:
        return SimpleNamespace(dtype=str(x.dtype).removeprefix("torch."), shape=x.shape)

    monkeypatch.setattr("rawmla.flex.mods.inspect", inspect)


@needs_host_compiler
@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.usefixtures("on_the_cpu")
def test_cuda_text(name: str) -> None:
    given, build, sites, is_one = TEXTS[name]
    for tensor in (BIAS, SLOPES):
        tensor.requires_grad_()
    scores, at, grads = _points()
    exact = [x.detach().double().requires_grad_() for x in (BIAS, SLOPES)]
    function = build(*exact)
    sources = scores.double().requires_grad_()
    values = torch.stack([function(s, *x) for s, x in zip(sources, at, strict=True)])
    (values * grads).sum().backward()

    mod = given.mod(backward=True)
    _compile(header(mod, None))
    got = differentiate(mod, scores, at, grads)
    torch.testing.assert_close(got.values.double(), values.detach(), rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(got.derivatives.double() * grads, sources.grad, rtol=2e-5, atol=2e-5)
    for place, gradient in got.gradients.items():
        (want,) = [
            x.grad for x, y in zip(exact, (BIAS, SLOPES), strict=True) if mod.captures[place].array is y
        ]
        torch.testing.assert_close(gradient.double(), want, rtol=2e-5, atol=1e-4)
    assert [capture.name for capture in mod.captures] == [
        name for name in ("bias", "slopes") if name in given.captures
    ]
    assert mod.backward is not None and [tuple(site) for site in mod.backward.sites] == sites
    assert got.is_one == is_one


@pytest.mark.usefixtures("on_the_cpu")
def test_captures_of_cuda_text_that_require_grad() -> None:
    table, buckets = torch.randn(L, requires_grad=True), torch.arange(L)
    with pytest.raises(ValueError, match="capture_grads for table, which requires grad"):
        CudaMod("score + table(q_idx)", {"table": table}, grad="grad").mod(backward=True)
    pair = ("q_idx", "grad")
    given: dict[str, Any] = {"grad": "grad", "capture_grads": {"table": pair}}
    with pytest.raises(ValueError, match="expected table to be of a floating-point dtype, got int64"):
        CudaMod("score + table(q_idx)", {"table": buckets}, **given).mod(backward=True)
    mod = CudaMod("score + table(q_idx)", {"table": table.detach()}, **given).mod(backward=True)
    assert mod.backward is not None and mod.backward.sites == mod.backward.gradients == ()


# ---- functions of a call


@torch.no_grad()
def test_mask_functions_have_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    table, limit = torch.randn(L, requires_grad=True), torch.tensor(0.5, requires_grad=True)
    monkeypatch.setattr(
        "rawmla.flex.memo.read",
        lambda mask, kind, *given: reading_of(trace(mask, kind)),
    )
    for mask, shape in ((lambda b, h, q, k: table[q] > 0, "[50]"), (lambda b, h, q, k: q > limit, "[]")):
        reading = as_reading(mask, "mask_mod", 0)
        assert reading is not None
        with pytest.raises(
            ValueError, match="^mask_mod: expected captured tensors that do not require grad"
        ) as caught:
            check_mask(reading)
        assert shape in str(caught.value)
