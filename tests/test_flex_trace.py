"""Score and mask functions as CUDA text: what it computes, what it holds as parameters, what is refused."""

from __future__ import annotations

import functools
import math
import re
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from host_mods import evaluate, needs_host_compiler, wanted

torch = pytest.importorskip("torch")
from rawmla.flex.trace import trace  # noqa: E402

B, H, LENGTH = 2, 4, 50
F = torch.nn.functional


def _draw(seed: int) -> Any:
    return torch.Generator().manual_seed(seed)


def _randn(*shape: int) -> Any:
    return torch.randn(shape, generator=_draw(sum(shape)))


BIAS = _randn(H, LENGTH, LENGTH)
SLOPES = _randn(H).abs().bfloat16()
HALF = _randn(H).half()
DOCUMENTS = torch.randint(0, 5, (B, LENGTH), generator=_draw(1))
PLACES = _randn(LENGTH, 3)
TABLE = _randn(99)
FLAGS = _randn(LENGTH) > 0
INT8 = torch.randint(-128, 128, (LENGTH,), dtype=torch.int8, generator=_draw(2))
UINT8 = torch.randint(0, 256, (LENGTH,), dtype=torch.uint8, generator=_draw(3))
INT16 = torch.randint(-(2**15), 2**15, (LENGTH,), dtype=torch.int16, generator=_draw(4))
DOUBLE = _randn(LENGTH).double()
OFFSETS = torch.randint(0, 40, (B, H), generator=_draw(5))
TRANSPOSED = _randn(LENGTH, H).t()
EVERY_OTHER = _randn(2 * LENGTH)[::2]
SQUARE = _randn(4, 4)
RANK4, RANK5, RANK6 = _randn(B, H, 2, LENGTH), _randn(B, H, 2, 3, 2), _randn(B, H, 2, 3, B, 2)
WHICH = torch.tensor([1, 0])
ALPHA, THREE = torch.tensor(2.5), torch.tensor(3)

SCORE_MODS: dict[str, Callable[..., Any]] = {
    "identity": lambda s, b, h, q, k: s,
    "twice": lambda s, b, h, q, k: 2 * s,
    "number": lambda s, b, h, q, k: 3.0,
    "indices": lambda s, b, h, q, k: q * 1.5 - k + b,
    "bias": lambda s, b, h, q, k: s + BIAS[h, q, k] * 2,
    "chained": lambda s, b, h, q, k: s + BIAS[h][q][k],
    "partly chained": lambda s, b, h, q, k: s + BIAS[h, q][k],
    "softcap": lambda s, b, h, q, k: 30 * torch.tanh(s / 30),
    "alibi": lambda s, b, h, q, k: s + SLOPES[h].float() * (k - q),
    "dilated": lambda s, b, h, q, k: torch.where((q - k) % 7 == 0, s, s - 1),
    "distance": lambda s, b, h, q, k: s - (PLACES[q] - PLACES[k]).square().sum(),
    "clamped table": lambda s, b, h, q, k: s + TABLE[torch.clamp(k - q, -31, 32) + 31],
    "offsets": lambda s, b, h, q, k: s + TABLE[OFFSETS[b, h]] * (q - k) / math.sqrt(3),
    "gate": lambda s, b, h, q, k: s * ALPHA + torch.sigmoid(SQUARE[h % 4].sum()),
    "silu": lambda s, b, h, q, k: F.silu(s) + torch.exp(-(q - k).abs().float()),
    "blocks": lambda s, b, h, q, k: torch.where(q // 2 == k // 2, s, -float("inf")),
    "0-d": lambda s, b, h, q, k: s + (THREE * q).to(s.dtype),
    "fresh tensor": lambda s, b, h, q, k: torch.maximum(s, torch.tensor(0.5)),
    "ends": lambda s, b, h, q, k: s + TABLE[-1] + TABLE[3:7].mean(),
    "masked_fill": lambda s, b, h, q, k: s.masked_fill(q < k, float("-inf")),
    "int8": lambda s, b, h, q, k: s + INT8[q] * INT8[k],
    "uint8": lambda s, b, h, q, k: s + (UINT8[q] + UINT8[k]) - (UINT8[q] - UINT8[k]),
    "int16": lambda s, b, h, q, k: s + (INT16[q] << 1) + INT16[k],
    "float64": lambda s, b, h, q, k: s + DOUBLE[k].float() * HALF[h].float(),
    "strides": lambda s, b, h, q, k: s + TRANSPOSED[h, q] + EVERY_OTHER[k],
    "floor": lambda s, b, h, q, k: (q - k) // 3 * 1.0 + (q - k) // -7 + s,
    "remainder": lambda s, b, h, q, k: s + (q - k) % -5 + torch.remainder(s, 0.7) + torch.fmod(s, -0.3),
    "rounding": lambda s, b, h, q, k: (
        torch.div(s, 0.3, rounding_mode="floor") + torch.div(s, 0.3, rounding_mode="trunc")
    ),
    "floor_divide": lambda s, b, h, q, k: torch.floor_divide(s, -0.4),
    "powers": lambda s, b, h, q, k: s**2 + s.abs() ** 1.5 + 2**s + q**3,
    "roots": lambda s, b, h, q, k: s.abs().sqrt() + torch.rsqrt(s.abs() + 1) + 1 / (s + 10) + s.reciprocal(),
    "activations": lambda s, b, h, q, k: (
        F.gelu(s) + F.gelu(s, approximate="tanh") + F.softplus(s) + F.leaky_relu(s, 0.1) + F.elu(s)
    ),
    "cut": lambda s, b, h, q, k: F.relu(s) + F.hardtanh(s) + s.clamp_min(0.1) + s.clamp(max=0.2),
    "steps": lambda s, b, h, q, k: s.floor() + s.ceil() + s.round() + s.trunc() + s.frac(),
    "trigonometric": lambda s, b, h, q, k: (
        torch.sin(s) + torch.cos(s) + torch.atan2(s, q + 1.0) + torch.tan(s)
    ),
    "hyperbolic": lambda s, b, h, q, k: torch.sinh(s) + torch.cosh(s) + torch.asinh(s) + torch.atanh(s / 20),
    "erf": lambda s, b, h, q, k: torch.erf(s) + torch.erfc(s) + torch.log1p(s.abs()) + torch.expm1(s),
    "logarithms": lambda s, b, h, q, k: torch.log(s.abs()) + torch.log2(s.abs()) + torch.log10(s.abs()),
    "flags": lambda s, b, h, q, k: torch.where(FLAGS[q] & ~FLAGS[k], s, 0.0),
    "bits": lambda s, b, h, q, k: s + (q << 2) + (k >> 1) + (q ^ k) + (q & k | h) + ~q,
    "signs": lambda s, b, h, q, k: s + torch.sign(s) + torch.sgn(s) + (q - k).sign(),
    "bool as number": lambda s, b, h, q, k: s * (q > k) + (q == k),
    "minimum": lambda s, b, h, q, k: s - torch.minimum(q, k),
    "short vectors": lambda s, b, h, q, k: s + PLACES[q].amax() - PLACES[k].amin() + PLACES[q][1:].sum(),
    "element of a vector": lambda s, b, h, q, k: (
        s + (PLACES[q] * 2)[1] + PLACES[q].expand(2, 3).sum(0)[h % 3]
    ),
    "alpha": lambda s, b, h, q, k: torch.rsub(s, 2) + torch.sub(s, q, alpha=2),
    "int32 wraps": lambda s, b, h, q, k: s + (q + 40000) * (k + 60000),
    "in place": lambda s, b, h, q, k: _in_place(s, b, h, q, k),
    "nan and inf": lambda s, b, h, q, k: torch.where(torch.isfinite(s / 0) | torch.isnan(s), s, s + 1),
    "infinities": lambda s, b, h, q, k: (
        torch.where(torch.isinf(s / (q - k)), 2.0, s) + torch.isneginf(s / (q - k)) * 3 + torch.isinf(q / k)
    ),
    "six indices": lambda s, b, h, q, k: (
        s
        + RANK5[b, h, q % 2, k % 3, 1]
        + RANK6[b][h, q % 2][k % 3, b, h % 2]
        + RANK6[..., -1][b, h, q % 2, 0, 1]
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
    "parts of small integers": lambda s, b, h, q, k: (
        (UINT8[q] % -3) + 256.0 * (UINT8[k] // -3) + 512.0 * torch.fmod(INT8[q], -3) + s + INT16[q] % -300
    ),
    "bounds of small integers": lambda s, b, h, q, k: (
        torch.clamp(UINT8[q], -2, 3) + 256.0 * UINT8[k].clamp(min=-9) + 1e5 * INT8[q].clamp(-9, 5) + s
    ),
    "sums of small integers": lambda s, b, h, q, k: (
        (UINT8[q] + -1) + 256.0 * torch.sub(UINT8[k], 3, alpha=-100) + 1e5 * (UINT8[q] & -4) + (-1 - UINT8[q])
    ),
    "vectors in place": lambda s, b, h, q, k: _vectors_in_place(s, b, h, q, k),
    "what was read in place": lambda s, b, h, q, k: TABLE[q].mul_(s).add_(BIAS[h, q][k].neg_()),
    "one tensor by two names": lambda s, b, h, q, k: _by_two_names(s, b, h, q, k),
    "index captured": lambda s, b, h, q, k: s + RANK4[b, h][WHICH[0], q] - RANK4[b, h][WHICH[k % 2], q],
}
MASK_MODS: dict[str, Callable[..., Any]] = {
    "causal": lambda b, h, q, k: q >= k,
    "documents": lambda b, h, q, k: (DOCUMENTS[b, q] == DOCUMENTS[b, k]) & (q >= k),
    "window": functools.partial(lambda width, b, h, q, k: (q - k <= width) & (q >= k), 9),
    "all": lambda b, h, q, k: True,
    "ones": lambda b, h, q, k: torch.ones_like(q, dtype=torch.bool),
    "new_ones": lambda b, h, q, k: q.new_ones((), dtype=torch.bool),
    "not": lambda b, h, q, k: ~(q == k) | (k < 3),
    "logical": lambda b, h, q, k: torch.logical_and(q > k, torch.logical_not(FLAGS[k])),
    "or, xor": lambda b, h, q, k: torch.logical_or(torch.logical_xor(q % 3, k > q), FLAGS[k]),
    "integer": lambda b, h, q, k: (q - k) % 3,
    "finite": lambda b, h, q, k: torch.isfinite(BIAS[h, q, k]) & (q != k),
}


def _points(count: int = 100) -> tuple[Any, Any]:
    scores = torch.randn(count, generator=_draw(7)) * 2
    extents = (B, H, LENGTH, LENGTH)
    return scores, torch.stack([torch.randint(0, n, (count,), generator=_draw(n)) for n in extents], dim=1)


@needs_host_compiler
@pytest.mark.parametrize("name", SCORE_MODS)
def test_score_mod(name: str) -> None:
    mod, points = SCORE_MODS[name], _points()
    got = evaluate(trace(mod, "score_mod"), "score_mod", *points)
    torch.testing.assert_close(got, wanted(mod, "score_mod", *points), rtol=2e-5, atol=2e-5, equal_nan=True)


@needs_host_compiler
@pytest.mark.parametrize("name", MASK_MODS)
def test_mask_mod(name: str) -> None:
    mod, points = MASK_MODS[name], _points()
    got = evaluate(trace(mod, "mask_mod"), "mask_mod", *points)
    assert torch.equal(got, wanted(mod, "mask_mod", *points))


@needs_host_compiler
def test_indices_wrap_and_stay_inside() -> None:
    """Negative ones count from the end; what is outside reads the first or last element."""
    values = torch.arange(10.0)
    _, at = _points(60)
    traced = trace(lambda s, b, h, q, k: values[q - 30], "score_mod")
    got = evaluate(traced, "score_mod", torch.zeros(60), at)
    places = at[:, 2] - 30
    places = torch.where(places < 0, places + 10, places).clamp(0, 9)
    assert torch.equal(got, values[places])


def test_numbers_are_parameters() -> None:
    """Functions that differ in numbers alone have one text."""

    def window(width: int, scale: float) -> Callable[..., Any]:
        return lambda s, b, h, q, k: torch.where(q - k < width, s * scale, -1.25)

    first, second = trace(window(5, 2.0), "score_mod"), trace(window(700, 0.125), "score_mod")
    assert first.text == second.text
    assert [number.source for number in first.numbers] == [5, 2.0, -1.25]
    assert [number.source for number in second.numbers] == [700, 0.125, -1.25]
    assert [number.is_integer for number in first.numbers] == [True, False, False]


def test_numbers_beside_indices_and_slices_are_parameters() -> None:
    kinds = [trace(lambda s, b, h, q, k: s + RANK4[n, h, :, q][1], "score_mod") for n in (0, 1)]  # noqa: B023
    assert kinds[0].text == kinds[1].text
    assert [int(number.source) for number in kinds[1].numbers] == [1, 1]


def test_in_threads() -> None:
    """make_fx patches torch.nn.Module, and puts back what it found there."""
    unpatched, found = torch.nn.Module.__call__, []

    def run() -> None:
        for _ in range(10):
            try:
                found.append(trace(lambda s, b, h, q, k: s + TABLE[q], "score_mod").text)
            except AssertionError as error:
                found.append(str(error))

    threads = [threading.Thread(target=run) for _ in range(2)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert torch.nn.Module.__call__ is unpatched
    finally:
        torch.nn.Module.__call__ = unpatched
    assert set(found) == {trace(lambda s, b, h, q, k: s + TABLE[q], "score_mod").text}


def test_a_number_on_the_cpu_is_read_later() -> None:
    scale = torch.tensor(2.0)
    for mod in (lambda s, b, h, q, k: s * scale, lambda s, b, h, q, k: s * scale[()]):
        (number,) = trace(mod, "score_mod").numbers
        assert number.source is scale


def test_literal_indices_are_parameters_on_any_default_device() -> None:
    mod = lambda s, b, h, q, k: s + SQUARE[1, q % 4]  # noqa: E731
    want = trace(mod, "score_mod")
    torch.set_default_device("meta")
    try:
        got = trace(mod, "score_mod")
    finally:
        torch.set_default_device(None)
    assert got.text == want.text and [capture.array is SQUARE for capture in got.captures] == [True]


def test_elements_of_a_vector_are_told_apart_without_moving_the_index_inside() -> None:
    """ptxas of CUDA 12.6 to 13.2 gets comparisons of an index that was moved inside wrong: tests/gpu/
    test_flex_operators.py has what comes out.
    """
    text = trace(lambda s, b, h, q, k: s + (PLACES[q] * s)[h % 3], "score_mod").text
    assert "wrapped(" in text and re.search(r"\(v(\d+) < 1 \? v\d+ : \(v\1 == 1 \? v\d+ : v\d+\)\)", text)
    assert "inside(" not in text


def test_a_tensor_is_captured_once() -> None:
    traced = trace(lambda s, b, h, q, k: s + TABLE[q] - TABLE[k] + DOUBLE[q], "score_mod")
    assert [(capture.array is TABLE, capture.dtype, capture.rank) for capture in traced.captures] == [
        (True, "float32", 1),
        (False, "float64", 1),
    ]


def _named(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return torch.lgamma(s)


class _Object:
    def __call__(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return torch.special.i0(q + 0.5) > 2


def _side_effect(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    TABLE[3:5].add_(1)
    return s


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


def _in_place(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    far = q - k > 5
    far.logical_and_(k > 2)
    s = s * 2
    s.masked_fill_(far, -1.0)
    return s


@pytest.mark.parametrize(
    ("mod", "kind", "error", "texts"),
    (
        (_named, "score_mod", NotImplementedError, ("score_mod _named: ", "aten::lgamma")),
        (_Object(), "mask_mod", NotImplementedError, ("mask_mod _Object: ", "aten::i0")),
        (
            functools.partial(_named),
            "score_mod",
            NotImplementedError,
            ("score_mod _named: ", "aten::lgamma"),
        ),
        (
            lambda s, b, h, q, k: s if q > k else -s,
            "score_mod",
            ValueError,
            ("does not branch", "torch.where"),
        ),
        (
            lambda s, b, h, q, k: s + DOCUMENTS[b].sum(),
            "score_mod",
            NotImplementedError,
            ("50 elements", "16"),
        ),
        (lambda s, b, h, q, k: PLACES[q], "score_mod", ValueError, ("0-d tensor", "[3]")),
        (lambda s, b, h, q, k: None, "score_mod", ValueError, ("0-d tensor", "NoneType")),
        (
            lambda s, b, h, q, k: s + TABLE[FLAGS[q]],
            "score_mod",
            NotImplementedError,
            ("aten.nonzero", "depends on values"),
        ),
        (_side_effect, "score_mod", ValueError, ("_side_effect", "side effects", "aten::add_")),
        (
            lambda s, b, h, q, k: torch.mul(s, 3, out=s * 2),
            "score_mod",
            NotImplementedError,
            ("<lambda>: calls aten::mul with out=", "use the tensor that it returns"),
        ),
        (
            lambda s, b, h, q, k: torch._foreach_add_([s], 1),
            "score_mod",
            NotImplementedError,
            ("calls aten::_foreach_add_", "which kernels do not have"),
        ),
        (
            lambda s, b, h, q, k: torch.cond(q > k, lambda x: x * 2, lambda x: x + 1, (s,)),
            "score_mod",
            NotImplementedError,
            ("score_mod", "cond", "operator with functions"),
        ),
    ),
)
def test_refused(mod: Any, kind: Any, error: type[Exception], texts: tuple[str, ...]) -> None:
    with pytest.raises(error) as caught:
        trace(mod, kind)
    for text in texts:
        assert text in str(caught.value)


def _of(make: Callable[[Any], Any], change: Callable[[Any], Any]) -> Callable[..., Any]:
    """A function that changes a view of a vector, or what a view was made of, and uses both."""

    def function(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        whole = s * PLACES[q]
        part = make(whole)
        change(part)
        return whole.sum() + sum(x.sum() for x in (part if isinstance(part, tuple) else (part,)))

    return function


def _changed_below_a_view(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    view = s.view(())
    s += 1
    return view


VIEWS = {
    "view": _of(lambda x: x.view(3), lambda x: x.add_(1)),
    "view of one": _of(lambda x: x.sum().view(()), lambda x: x.add_(1)),
    "detach": _of(lambda x: x.detach(), lambda x: x.mul_(2)),
    "data": _of(lambda x: x.data, lambda x: x.mul_(2)),
    "unsqueeze": _of(lambda x: x.unsqueeze(0), lambda x: x.neg_()),
    "squeeze": _of(lambda x: x.squeeze(), lambda x: x.fill_(2)),
    "expand": _of(lambda x: x.expand(3), lambda x: x.clamp_(0, 1)),
    "reshape": _of(lambda x: x.reshape(1, 3), lambda x: x.masked_fill_(x > 0, 1.0)),
    "everything": _of(lambda x: x[...], lambda x: x.add_(1)),
    "new dimension": _of(lambda x: x[None], lambda x: x.add_(1)),
    "slice": _of(lambda x: x[1:], lambda x: x.add_(1)),
    "element": _of(lambda x: x[1], lambda x: x.add_(1)),
    "select": _of(lambda x: x.select(0, 1), lambda x: x.add_(1)),
    "unbind": _of(lambda x: x.unbind(0), lambda x: x[1].add_(1)),
    "a view of a view": _of(lambda x: x.view(1, 3)[0].detach()[1:], lambda x: x.add_(1)),
    "an assignment": _of(lambda x: x[1:], lambda x: x.__setitem__(0, 1.0)),
    "what a view was made of": _changed_below_a_view,
}


@pytest.mark.parametrize("name", [name for name in VIEWS if name != "view of one"])
def test_changes_of_what_has_a_view_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="^score_mod .*: expected changes in place of .* got one by aten::"):
        trace(VIEWS[name], "score_mod")


@needs_host_compiler
def test_changes_of_a_view_alone() -> None:
    """What the view was made of is used by nothing afterwards."""
    points = _points()
    got = evaluate(trace(VIEWS["view of one"], "score_mod"), "score_mod", *points)
    want = wanted(VIEWS["view of one"], "score_mod", *points)
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


LOG = torch.zeros(LENGTH, LENGTH)
NEW = torch.zeros(LENGTH)


@pytest.mark.parametrize("backward", (False, True))
@pytest.mark.parametrize(
    ("changed", "change"),
    (
        ("LOG", lambda s, q, k: LOG.__setitem__((q, k), s)),
        ("LOG", lambda s, q, k: LOG.__setitem__((3, k), s)),
        ("LOG", lambda s, q, k: LOG.__setitem__((3, 4), 1.0)),
        ("LOG", lambda s, q, k: LOG[3].__setitem__(k, s)),
        ("LOG", lambda s, q, k: LOG.add_(1)),
        ("LOG", lambda s, q, k: LOG.index_put_((q, k), s)),
        ("LOG", lambda s, q, k: LOG.data.add_(1)),
        ("LOG", lambda s, q, k: LOG.detach()[3:5].add_(1)),
        ("LOG", lambda s, q, k: LOG[3][4].mul_(2)),
        ("NEW", lambda s, q, k: NEW.copy_(s)),
        ("NEW", lambda s, q, k: NEW.fill_(1)),
        ("NEW", lambda s, q, k: torch.mul(NEW, 2, out=NEW)),
        ("NEW", lambda s, q, k: NEW.resize_(3)),
        ("THREE", lambda s, q, k: THREE.add_(1)),
        ("THREE", lambda s, q, k: THREE.view(()).add_(1)),
    ),
)
def test_side_effects(changed: str, change: Callable[..., Any], backward: bool) -> None:
    """Refused by the name of the tensor, which stays as it was."""

    def function(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        change(s, q, k)
        return s

    before = [(x, x.clone(), x._version) for x in (LOG, NEW, THREE)]
    text = (
        f"^score_mod .*function: expected a function without side effects, got one that changes {changed} by "
    )
    with pytest.raises(ValueError, match=text):
        trace(function, "score_mod", backward=backward)
    for tensor, values, version in before:
        assert tensor._version == version and torch.equal(tensor, values)


SIZES, FLAG = torch.tensor([64, 3]), torch.tensor(True)


@pytest.mark.parametrize("backward", (False, True))
@pytest.mark.parametrize(
    ("name", "value"),
    (
        ("THREE", lambda: int(THREE)),
        ("ALPHA", lambda: float(ALPHA)),
        ("FLAG", lambda: 1 if FLAG else 2),
        ("THREE", lambda: THREE.item()),
        ("THREE", lambda: len(range(THREE))),
        ("THREE", lambda: float(f"{THREE}")),
        ("THREE", lambda: 1 if THREE > 2 else 2),
        ("THREE", lambda: TABLE[:THREE].sum()),
        ("THREE", lambda: int(torch.tensor(3) + THREE)),
        ("THREE", lambda: torch.tensor(THREE)),
        ("THREE", lambda: torch.tensor([THREE, 1])[0]),
        ("SIZES", lambda: SIZES[0].item()),
        ("SIZES", lambda: SIZES.tolist()[0]),
        ("SIZES", lambda: (SIZES * 2).tolist()[0]),
        ("SIZES", lambda: int(SIZES.numpy()[0])),
        ("SIZES", lambda: int(np.asarray(SIZES)[0])),
        ("SIZES", lambda: int(np.from_dlpack(SIZES)[0])),
        ("SIZES", lambda: SIZES.untyped_storage()[0]),
        ("SIZES", lambda: 1 if torch.equal(SIZES, SIZES) else 2),
        ("SIZES", lambda: 1 if 64 in SIZES else 2),
    ),
)
def test_values_in_python_are_refused(name: str, value: Callable[[], Any], backward: bool) -> None:
    """They would stay as they are now. The text names the tensor, and the way out."""
    text = f"score_mod .*<lambda>: expected captured tensors to be read by index .*the value of {name} into"
    with pytest.raises(ValueError, match=f"{text}.*index it .*or pass a number"):
        trace(lambda s, b, h, q, k: s * value(), "score_mod", backward=backward)


def test_values_of_numbers_in_the_text() -> None:
    """They cannot change."""
    traced = trace(lambda s, b, h, q, k: s * int(torch.tensor(3) + 1), "score_mod")
    assert [number.source for number in traced.numbers][-1] == 4


def test_a_view_whose_data_was_replaced() -> None:
    """torch itself fails by an AssertionError here. One that a user's function raises reaches the user."""
    view = torch.zeros(10)[2:]
    view.data = view.data.half()
    with pytest.raises(
        ValueError, match=r"got view, a view whose data was replaced \(.*float16\); read a clone"
    ):
        trace(lambda s, b, h, q, k: s + view[q], "score_mod")
    clone = view.clone()
    assert trace(lambda s, b, h, q, k: s + clone[q], "score_mod").captures[0].dtype == "float16"

    def asserts(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        raise AssertionError("mine")

    with pytest.raises(AssertionError, match="^mine$"):
        trace(asserts, "score_mod")


class Scaled:
    """A function as an object, and as one of its methods."""

    def __call__(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, scale: float = 2.5) -> Any:
        return score * scale


def _with_keyword(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, *, scale: float = 2.5) -> Any:
    return score * scale


@pytest.mark.parametrize(
    "mod", (Scaled(), Scaled().__call__, _with_keyword, lambda score, *others: score * 2.5)
)
def test_further_parameters(mod: Any) -> None:
    (number,) = trace(mod, "score_mod").numbers
    assert number.source == 2.5


@pytest.mark.parametrize("mod", (lambda score, b, h, q: score, lambda: 1, lambda s, b, h, q, k, more: s))
def test_other_arguments(mod: Any) -> None:
    with pytest.raises(
        TypeError, match=r"^score_mod .*<lambda>: expected a function of \(score, b, h, q_idx, kv"
    ):
        trace(mod, "score_mod")
