"""Score and mask functions that tests trace, and the points at which they evaluate them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")

B, H, L = 2, 4, 50
F = torch.nn.functional
INFINITY = float("inf")


def draw(seed: int) -> Any:
    """A generator of random numbers."""
    return torch.Generator().manual_seed(seed)


def randn(*shape: int) -> Any:
    """Random numbers that the shape decides."""
    return torch.randn(shape, generator=draw(sum(shape)))


def _integers(low: int, high: int, *shape: int, dtype: Any = torch.int64) -> Any:
    return torch.randint(low, high, shape, dtype=dtype, generator=draw(high))


# ---- what functions read

BIAS = randn(H, L, L)
SLOPES = randn(H).abs().bfloat16()
DOCUMENTS = _integers(0, 5, B, L)
PLACES = randn(L, 3)
TABLE = randn(99)
FLAGS = randn(L) > 0
INT8 = _integers(-128, 128, L, dtype=torch.int8)
UINT8 = _integers(0, 256, L, dtype=torch.uint8)
INT16 = _integers(-(2**15), 2**15, L, dtype=torch.int16)
DOUBLE = randn(L).double()
SQUARE = randn(4, 4)
RANK4, RANK5 = randn(B, H, 2, L), randn(B, H, 2, 3, 2)
WHICH = torch.tensor([1, 0])
THREE = torch.tensor(3)


def points(count: int = 100) -> tuple[Any, Any]:
    """Scores `[count]`, and (b, h, q_idx, kv_idx) `[count, 4]`, each index drawn by itself."""
    scores = torch.randn(count, generator=draw(7)) * 2
    scores[:8] = scores[:8].round()
    extents = (B, H, L, L)
    return scores, torch.stack(
        [torch.randint(0, n, (count,), generator=draw(30 + i)) for i, n in enumerate(extents)], dim=1
    )


# ---- values


def _vectors_in_place(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    vector = PLACES[q] * s
    before = vector.square()  # no view
    vector.add_(PLACES[k]).masked_fill_(vector > 1, 2.0)
    vector.index_put_((h % 3,), s)
    return (vector - before).sum() + vector[b]


def _by_two_names(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    first = s.clone()
    second = first.contiguous().to(torch.float32).add_(1)
    first *= 3
    seen = (q > k).clone()
    seen |= k > 3
    counted = s.clone()
    counted.gt_(0.5)  # stays a float
    last = s.view(()).mul(2)
    last.view(()).detach()  # used by nothing afterwards
    last += 1
    return first + second + seen + counted / 2 + last


SCORE_MODS: dict[str, Callable[..., Any]] = {
    "0-d": lambda s, b, h, q, k: s + (THREE * q).to(s.dtype),
    "int8": lambda s, b, h, q, k: s + INT8[q] * INT8[k],
    "uint8": lambda s, b, h, q, k: s + (UINT8[q] + UINT8[k]) - (UINT8[q] - UINT8[k]),
    "floor": lambda s, b, h, q, k: (q - k) // 3 * 1.0 + (q - k) // -7 + torch.floor_divide(s, -0.4),
    "remainder": lambda s, b, h, q, k: s + (q - k) % -5 + torch.remainder(s, 0.7) + torch.fmod(s, -0.3),
    "bits": lambda s, b, h, q, k: s + (q << 2) + (k >> 1) + (q ^ k) + (q & k | h) + ~q - torch.minimum(q, k),
    "integer powers": lambda s, b, h, q, k: s + q**3 + (q - k) ** 2,
    "int32 wraps": lambda s, b, h, q, k: s + (q + 40000) * (k + 60000),
    "nan and inf": lambda s, b, h, q, k: torch.where(torch.isfinite(s / 0) | torch.isnan(s), s, s + 1),
    "infinities": lambda s, b, h, q, k: (
        torch.where(torch.isinf(s / (q - k)), 2.0, s) + torch.isneginf(s / (q - k)) * 3 + torch.isinf(q / k)
    ),
    "slices beside indices": lambda s, b, h, q, k: (
        s
        + (BIAS[h, 1:][q % 49, k] + BIAS[:, q][h, k] + BIAS[..., k][h, q] + BIAS[h, ...][q, k])
        + (RANK5[b, :, q % 2, ..., 1][h, k % 3] + RANK4[b, 1::2, -1, ...][h // 2, k])
        + (PLACES[q] * s).expand(2, 3)[b, 1:][h % 2]
    ),
    "new dimensions beside indices": lambda s, b, h, q, k: (
        s
        + (SQUARE[h, None, q % 4][0] + PLACES[None, q, None][0, 0, h % 3] + PLACES[k, ..., None][h % 3, 0])
        + (PLACES[q] * s)[None, h % 3, None].sum()
    ),
    "sums of nothing": lambda s, b, h, q, k: (
        s + (PLACES[q] * s)[3:].sum() + PLACES[k][0:0].sum() + PLACES[k].int()[3:].sum()
    ),
    "means of nothing": lambda s, b, h, q, k: torch.where(q > k, s, (PLACES[q] * s)[0:0].mean()),
    "orders of small integers": lambda s, b, h, q, k: sum(
        2**place * compared
        for place, compared in enumerate(
            compare(x[q], -1)
            for x in (UINT8, INT8, INT16)
            for compare in (torch.lt, torch.le, torch.gt, torch.ge, torch.eq, torch.ne)
        )
    ),
    "small integers of two kinds": lambda s, b, h, q, k: (
        s + (UINT8[q] < INT8[k]) + 2 * torch.maximum(UINT8[q], INT8[k]) + 1024 * (UINT8[q] % INT8[q].sign())
    ),
    "bounds of small integers": lambda s, b, h, q, k: (
        torch.clamp(UINT8[q], -2, 3) + 256.0 * UINT8[k].clamp(min=-9) + 1e5 * INT8[q].clamp(-9, 5) + s
    ),
    "vectors in place": _vectors_in_place,
    "what was read in place": lambda s, b, h, q, k: TABLE[q].mul_(s).add_(BIAS[h, q][k].neg_()),
    "one tensor by two names": _by_two_names,
    "index captured": lambda s, b, h, q, k: s + RANK4[b, h][WHICH[0], q] - RANK4[b, h][WHICH[k % 2], q],
}
MASK_MODS: dict[str, Callable[..., Any]] = {
    "all": lambda b, h, q, k: True,
    "new_ones": lambda b, h, q, k: q.new_ones((), dtype=torch.bool),
    "not": lambda b, h, q, k: ~(q == k) | (k < 3),
    "logical": lambda b, h, q, k: torch.logical_and(q > k, torch.logical_not(FLAGS[k])),
    "or, xor": lambda b, h, q, k: torch.logical_or(torch.logical_xor(q % 3, k > q), FLAGS[k]),
}


# ---- derivatives by the score

EDGES = (0.0, -0.0, 0.25, -0.25, 0.5, -0.5, 0.75, 1.0, -1.0, 1.5, -1.5, 2.0, -2.0, 3.0, -3.0, 6.0, -6.0, 20.0)
"""Where functions below switch, are tied, or have no derivative."""


def scores() -> Any:
    """The edges, and random scores."""
    return torch.cat([torch.tensor(EDGES), torch.randn(100, generator=draw(7)) * 2])


def _straight_through(s: Any) -> Any:
    with torch.no_grad():
        step = s.round() - s
    return (s + step) * 2


OF_THE_SCORE: dict[str, Callable[[Any], Any]] = {
    **{
        name: getattr(torch, name)
        for name in (
            *(
                "abs",
                "acos",
                "acosh",
                "asin",
                "asinh",
                "atan",
                "atanh",
                "cos",
                "erf",
                "erfc",
                "expm1",
                "log1p",
            ),
            *("reciprocal", "rsqrt", "sigmoid", "sin", "sqrt", "tan", "tanh"),
        )
    },
    **{name: getattr(F, name) for name in ("gelu", "selu", "silu")},
    **{f"pow {power}": lambda s, power=power: s**power for power in (5, -1, -0.5, 1.5)},
    **{
        name: lambda s, most=most: most(s, 2 * s) + most(s, s**2) + most(s, torch.tensor(0.5))
        for name, most in (("maximum", torch.maximum), ("minimum", torch.minimum))
    },
    "rsub": lambda s: torch.rsub(s, 2, alpha=3),
    "mul": lambda s: 2 * s * s,
    "div": lambda s: s / 3 + 3 / s,
    "pow 1": lambda s: s**1 + s**0,
    "pow 2": lambda s: s**2 + s**3,
    "number to the power": lambda s: 2**s + 0.5**s + 0 ** s.abs(),
    "power of two": lambda s: s.abs() ** s,
    "exp": lambda s: torch.exp(s) + torch.exp2(s) * s.neg().square() - F.relu(s),
    "log": lambda s: torch.log(s) + torch.log2(s) * torch.log10(s),
    "atan2": lambda s: torch.atan2(s, s + 1) + torch.atan2(1 - s, s * 2),
    "sinh": lambda s: torch.sinh(s / 2),
    "cosh": lambda s: torch.cosh(s / 2),
    "gelu tanh": lambda s: F.gelu(s, approximate="tanh"),
    "softplus": lambda s: F.softplus(s) + F.softplus(s, 2.0, 3.0),
    "hardtanh": lambda s: F.hardtanh(s) + F.hardtanh(s, -0.5, 2.0),
    "elu": lambda s: F.elu(s, 1.5) + torch.ops.aten.elu(s, 0.7, 1.2, 0.3),
    "in place": lambda s: (
        F.elu(s * 1, inplace=True) + F.leaky_relu(s * 1, inplace=True) + (s * 1).sigmoid_() + (2 * s).tanh_()
    ),
    "score in place": lambda s: s.mul_(3).add_(1).sin(),
    "clamp": lambda s: s.clamp(-0.5, 2) + s.clamp(min=1) + s.clamp(max=-1),
    "clamp_min": lambda s: s.clamp_min(0.5) + s.clamp_max(1.5),
    "clamp by tensors": lambda s: (2 * s).clamp(s - 1, s * s),
    "where": lambda s: torch.where(s > 0.5, s * s, -s) + torch.where(s >= 1, s, 0.0),
    "where with a hidden NaN": lambda s: torch.where(s > 0, torch.log(s), -INFINITY),
    "where with a hidden infinity": lambda s: torch.where(s > 0, 1 / s, s),
    "masked_fill": lambda s: (s * s).masked_fill(s < 0.5, -1.0) + (3 * s).masked_fill_(s > 1, 0.0),
    "remainder": lambda s: torch.remainder(s, 0.75) * s + s % -0.5,
    "fmod": lambda s: torch.fmod(s, 0.75) * s,
    "fmod by the score": lambda s: torch.fmod(torch.tensor(2.25), s + 0.125),
    "rounding": lambda s: s * (s.floor() + s.ceil() + s.round() + s.trunc()) + s.frac(),
    "div with rounding": lambda s: (
        s + torch.div(s, 0.25, rounding_mode="floor") + torch.div(s, 0.3, rounding_mode="trunc")
    ),
    "sign": lambda s: s + torch.sign(s) + torch.sgn(s) * s,
    "comparisons": lambda s: s * (s > 0.5) + s * (s != 1) * (s <= 2) + (s == 3),
    "detach": lambda s: s * s.detach() + s.detach(),
    "no_grad": _straight_through,
    "copies": lambda s: s.to(torch.float64).float().clone() + torch.zeros_like(s) + torch.full_like(s, 2.0),
    "used often": lambda s: s * torch.sigmoid(s) + torch.tanh(s) ** 2 - s.exp() * s.cos(),
}


# ---- gradients of captured tensors


class Captured(NamedTuple):
    """A function of tensors of these shapes and of the arguments of a score function."""

    reads: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    sites: str | None = None
    """For each place that a kernel adds to, the number of its gradient and by what it changes: q, k. None: it
    is not tested.
    """
    dtype: torch.dtype = torch.float32

    def function(self, *tensors: Any) -> Callable[..., Any]:
        """The score function that reads these tensors."""
        return functools.partial(self.reads, *tensors)

    def tensors(self, dtype: torch.dtype | None = None) -> list[Any]:
        """Tensors to read, which require grad, of the dtype or another one with the same values."""
        made = [torch.randn(shape, generator=draw(20 + i)) for i, shape in enumerate(self.shapes)]
        return [x.to(self.dtype).to(dtype or self.dtype).requires_grad_() for x in made]

    def wanted_sites(self) -> list[tuple[int, bool, bool]]:
        """The sites as (gradient, by_q, by_kv)."""
        return [(int(x[0]), "q" in x, "k" in x) for x in (self.sites or "").split()]


CAPTURED: dict[str, Captured] = {
    "often": Captured(
        lambda t, s, b, h, q, k: s + t[q] * t[q] + t[q].tanh() - t[k] + t[3] + t[-1], ((L,),), "0q 0k 0 0"
    ),
    "several": Captured(
        lambda t, u, v, s, b, h, q, k: s * u[h] + t[q] * v[k] - u[0], ((L,), (H,), (L,)), "0 1q 2k 0"
    ),
    "by the score": Captured(lambda t, s, b, h, q, k: s + t[(s > 0).int()], ((2,),), "0qk"),
    "slices beside indices": Captured(
        lambda t, s, b, h, q, k: s + t[h, 1:][q % 49] * t[..., k][h] + s * t[h, None, q][0], ((H, L),)
    ),
    "views": Captured(
        lambda t, s, b, h, q, k: (
            s + t.unbind(0)[1][q] + t.select(1, 3)[h % 2] + t.narrow(1, 10, 30)[h % 2, q % 30]
        ),
        ((2, L),),
    ),
    "elements of a vector": Captured(
        lambda t, s, b, h, q, k: s + (t[q] * s)[h % 3] + (t[k] * 2)[1] + (t[k] * s)[1:].sum(), ((L, 3),)
    ),
    "outer product": Captured(
        lambda t, s, b, h, q, k: s + (t[q].view(3, 1) * t[k].unsqueeze(0)).sum() / 4, ((L, 3),)
    ),
    "largest": Captured(
        lambda t, s, b, h, q, k: s + t[q].amax() * 2 - t[k].amin(0, keepdim=True).squeeze(0), ((L, 3),)
    ),
    "ties": Captured(
        lambda t, s, b, h, q, k: torch.maximum(s, t[q].round()) + torch.minimum(t[q], t[k]) + s * s, ((L,),)
    ),
    "two arguments": Captured(
        lambda t, s, b, h, q, k: (
            torch.atan2(s, t[q]) + t[q].abs() ** t[k] + s / t[h] + torch.fmod(s, t[q]) + s.clamp(t[q], t[k])
        ),
        ((L,),),
    ),
    "hidden": Captured(
        lambda t, s, b, h, q, k: torch.where(q >= k, s + t[q], -INFINITY) + torch.where(k > 3, 0.0, t[k]),
        ((L,),),
        "0q 0k",
    ),
    "float16": Captured(lambda t, s, b, h, q, k: s + t[h].float() * (q - k), ((H,),), dtype=torch.float16),
    "float64": Captured(
        lambda t, s, b, h, q, k: s.double() * t[h, k] + t[h, q] ** 2, ((H, L),), dtype=torch.float64
    ),
}
