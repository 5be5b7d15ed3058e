"""Score and mask functions as CUDA text: what it computes, its gradients, its parameters, what is refused."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from flex_functions import (
    CAPTURED,
    DOCUMENTS,
    DOUBLE,
    FLAGS,
    MASK_MODS,
    OF_THE_SCORE,
    PLACES,
    SCORE_MODS,
    SQUARE,
    TABLE,
    THREE,
    H,
    L,
    draw,
    points,
    scores,
)
from flex_points import compile_alone, evaluate, needs_host_compiler, wanted

torch = pytest.importorskip("torch")
from rawmla.flex.trace import trace  # noqa: E402

GRADS = torch.randn(100, generator=draw(8))


def both(mod: Callable[..., Any], device: str = "cpu") -> Any:
    """The trace of a score function with its backward."""
    traced = trace(mod, "score_mod", device, backward=True)
    assert traced.backward is not None
    return traced


def assert_close(got: Any, want: Any, atol: float = 2e-5) -> None:
    torch.testing.assert_close(got.double(), want.double(), rtol=2e-5, atol=atol, equal_nan=True)


# ---- values


@needs_host_compiler
@pytest.mark.parametrize("name", SCORE_MODS | MASK_MODS)
def test_values(name: str) -> None:
    kind: Any = "score_mod" if name in SCORE_MODS else "mask_mod"
    mod, at = (SCORE_MODS | MASK_MODS)[name], points()
    got = evaluate(trace(mod, kind), *at, is_mask=kind == "mask_mod")
    assert_close(got.values, wanted(mod, kind, *at))


@needs_host_compiler
@pytest.mark.parametrize(("first", "end"), ((0, 10), (2, 8)))
def test_indices_wrap_and_stay_inside(first: int, end: int) -> None:
    """Negative ones count from the end, also of a slice; the others outside read the first or last element,
    whose gradient they add to.
    """
    table, (_, at), size = torch.arange(10.0, requires_grad=True), points(), end - first
    got = evaluate(both(lambda s, b, h, q, k: table[first:end][q - 30]), torch.zeros(100), at, GRADS)
    places = at[:, 2] - 30
    places = torch.where(places < 0, places + size, places).clamp(0, size - 1) + first
    assert_close(got.values, table[places])
    assert_close(got.gradients[0], torch.zeros(10).index_add(0, places, GRADS))


# ---- gradients


@needs_host_compiler
@pytest.mark.parametrize("name", OF_THE_SCORE)
def test_derivatives(name: str) -> None:
    """Those of torch's autograd in float64, also where it has none, or several."""
    function, at = OF_THE_SCORE[name], scores()
    source = at.double().requires_grad_()
    value = function(source.clone())
    (want,) = torch.autograd.grad(value.sum(), source)
    got = evaluate(both(lambda s, b, h, q, k: function(s)), at, torch.zeros(len(at), 4))
    assert_close(got.derivatives, want)
    for values in (got.values, got.again):
        assert_close(values, value.detach())
    assert got.gradients == {}


@needs_host_compiler
@pytest.mark.parametrize("name", CAPTURED)
def test_captured_tensors(name: str) -> None:
    case, (at_scores, at) = CAPTURED[name], points()
    exact, own = case.tensors(torch.float64), case.tensors()
    function, sources = case.function(*exact), at_scores.double().requires_grad_()
    values = torch.stack([function(*one) for one in zip(sources, *at.int().T, strict=True)])
    values.backward(GRADS.double())
    traced = both(case.function(*own))
    got = evaluate(traced, at_scores, at, GRADS)
    for again in (got.values, got.again):
        assert_close(again, values.detach())
    assert_close(got.derivatives, sources.grad / GRADS)
    assert len(got.gradients) == len(own)
    for tensor, source in zip(own, exact, strict=True):
        (place,) = [place for place in got.gradients if traced.captures[place].array is tensor]
        assert_close(got.gradients[place], source.grad, atol=1e-4)
    sites = [tuple(site) for site in traced.backward.sites]
    assert case.sites is None or sites == case.wanted_sites()
    for column in (2, 3):  # a place changes with q_idx or kv_idx only where its site says so
        moved = at.clone()
        moved[:, column] = moved[:, column].flip(0)
        others = evaluate(traced, at_scores.flip(0) * 2 + 1, moved, GRADS).places
        for i, site in enumerate(sites):
            assert site[column - 1] or torch.equal(got.places[:, i], others[:, i])


@needs_host_compiler
def test_gradients_are_contiguous() -> None:
    """They have the shape of a captured tensor and strides of their own."""
    whole, (at_scores, at) = torch.randn(H, 2 * L), points()
    for tensor in (whole.T, whole[:, ::2].T, whole[1, 3].expand(L, H)):
        table = tensor.detach().requires_grad_()
        got = evaluate(both(lambda s, b, h, q, k: s + table[q, h]), at_scores, at, GRADS)  # noqa: B023
        want = torch.zeros(table.shape).index_put((at[:, 2], at[:, 1]), GRADS, accumulate=True)
        assert_close(got.gradients[0], want)
        assert_close(got.values, at_scores + tensor[at[:, 2], at[:, 1]])


@needs_host_compiler
def test_what_was_read_may_be_changed_in_place() -> None:
    table, at = torch.randn(H, L, requires_grad=True), points()
    in_place, plain = (
        evaluate(both(mod), *at, GRADS)
        for mod in (
            lambda s, b, h, q, k: table[h][q].mul_(s).add_(table[b, k]),
            lambda s, b, h, q, k: table[h][q] * s + table[b, k],
        )
    )
    assert in_place.gradients[0].any()
    torch.testing.assert_close(in_place, plain, rtol=0, atol=0)


def test_tensors_without_a_gradient() -> None:
    """The result does not depend on them, or passes no gradient on, or they require none."""
    used, unused, compared, cut = (torch.randn(L, requires_grad=True) for _ in range(4))
    without = torch.randn(L)

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        unused[k] * 2
        with torch.no_grad():
            blocked = cut[k] * 3
        return torch.where(compared[q] > 0, s, used[q] + cut[q].detach() + blocked + without[k])

    traced = both(mod)
    assert [traced.captures[place].array is used for place in traced.backward.gradients] == [True]
    assert len(traced.backward.sites) == 1


@needs_host_compiler
@pytest.mark.parametrize(
    ("derivative", "is_one", "mod"),
    (
        (1, True, lambda s, b, h, q, k: s),
        (1, True, lambda s, b, h, q, k: s + (q - k) * 0.5),
        (1, True, lambda s, b, h, q, k: (s + PLACES[q].sum()).to(torch.float64)),
        (1, False, lambda s, b, h, q, k: s * 1.0),
        (None, False, lambda s, b, h, q, k: s + s.detach() * s),
        (0, False, lambda s, b, h, q, k: 3.0),
        (0, False, lambda s, b, h, q, k: s.detach() + PLACES[q].sum()),
        (0, False, lambda s, b, h, q, k: torch.where(s > 0, 1.0, 2.0)),
    ),
)
def test_constant_derivatives_are_known(derivative: int | None, is_one: bool, mod: Any) -> None:
    """A kernel multiplies by no derivative that is one everywhere."""
    traced, at = both(mod), points()
    got = evaluate(traced, *at)
    assert traced.backward.is_one == is_one and got.gradients == {}
    assert derivative is None or bool((got.derivatives == derivative).all())
    assert_close(got.again, wanted(mod, "score_mod", *at))


@pytest.mark.parametrize("name", ("several", "elements of a vector", "float16", "by the score"))
def test_the_text_compiles(name: str) -> None:
    """The compiler of kernels takes what the host's takes."""
    evaluate(both(CAPTURED[name].function(*CAPTURED[name].tensors())), *points(), launch=compile_alone)


# ---- parameters


def test_literal_indices_are_parameters_on_any_default_device() -> None:
    mod = lambda s, b, h, q, k: s + SQUARE[1, q % 4]  # noqa: E731
    want = trace(mod, "score_mod")
    torch.set_default_device("meta")
    try:
        got = trace(mod, "score_mod")
    finally:
        torch.set_default_device(None)
    assert got.text == want.text and [capture.array is SQUARE for capture in got.captures] == [True]


def test_indices_of_elements_are_not_moved_inside() -> None:
    """ptxas of CUDA 12.6 to 13.2 gets comparisons of an index that was moved inside wrong: tests/gpu/
    test_flex_operators.py has the results.
    """
    text = trace(lambda s, b, h, q, k: s + (PLACES[q] * s)[h % 3], "score_mod").text
    assert "wrapped(" in text and re.search(r"\(v(\d+) < 1 \? v\d+ : \(v\1 == 1 \? v\d+ : v\d+\)\)", text)
    assert "inside(" not in text


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

    def summed(s: Any, b: Any, h: Any, q: Any, k: Any, added: Any = DOUBLE) -> Any:
        return first(second(s, b, h, q, k), b, h, q, k) + added[q] + PLACES[q].sum()

    first, second = biased(torch.randn(L)), biased(torch.randn(L))
    assert named(summed) == ["table", "table_2", "added", "PLACES"]
    module = Module()
    for mod in (module, module.forward, lambda *given: module(*given)):
        assert named(mod) == ["scale", "shift"]
    assert named(lambda s, b, h, q, k: s + globals()["PLACES"][q].sum()) == ["capture"]


# ---- where it is traced


def test_in_threads() -> None:
    """make_fx patches torch.nn.Module, and puts back what it found there."""
    unpatched = torch.nn.Module.__call__
    try:
        with ThreadPoolExecutor(2) as pool:
            found = pool.map(lambda _: trace(SCORE_MODS["index captured"], "score_mod").text, range(20))
        assert set(found) == {trace(SCORE_MODS["index captured"], "score_mod").text}
        assert torch.nn.Module.__call__ is unpatched
    finally:
        torch.nn.Module.__call__ = unpatched


@pytest.mark.parametrize(
    "context",
    (
        torch.no_grad,
        torch.inference_mode,
        torch.enable_grad,
        functools.partial(torch.autograd.set_detect_anomaly, True),
    ),
)
@pytest.mark.parametrize("device", ("cpu", "cuda", "meta"))
def test_the_text_does_not_depend_on(context: Callable[[], Any], device: str) -> None:
    """The device, which need not be there, and modes of autograd."""
    table = torch.randn(L, requires_grad=True)
    mod = lambda s, b, h, q, k: torch.tanh(s) * q * table[q]  # noqa: E731
    want = both(lambda s, b, h, q, k: torch.tanh(s) * q * table[q])
    with context():
        got = both(mod, device)
    assert (got.text, got.backward) == (want.text, want.backward) and len(got.backward.sites) == 1


# ---- refusals


def _named(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return torch.lgamma(s)


REFUSED = (
    (_named, NotImplementedError, "score_mod _named: .*aten::lgamma"),
    (functools.partial(_named), NotImplementedError, "score_mod _named: .*aten::lgamma"),
    (lambda: 1, TypeError, r"^score_mod .*<lambda>: expected a function of \(score, b, h, q_idx, kv"),
    (lambda s, b, h, q, k, more: s, TypeError, r"<lambda>: expected a function of \(score, b, h, q_idx, kv"),
    (lambda s, b, h, q, k: s + DOCUMENTS[b].sum(), NotImplementedError, "50 elements.*16"),
    (lambda s, b, h, q, k: PLACES[q], ValueError, r"0-d tensor.*\[3\]"),
    (lambda s, b, h, q, k: s + TABLE[FLAGS[q]], NotImplementedError, "aten.nonzero.*depends on values"),
    (
        lambda s, b, h, q, k: torch.mul(s, 3, out=s * 2),
        NotImplementedError,
        "<lambda>: calls aten::mul with out=.*use the tensor that it returns",
    ),
    (
        lambda s, b, h, q, k: torch._foreach_add_([s], 1),
        NotImplementedError,
        "calls aten::_foreach_add_.*which kernels do not have",
    ),
    (
        lambda s, b, h, q, k: torch.cond(q > k, lambda x: x * 2, lambda x: x + 1, (s,)),
        NotImplementedError,
        "score_mod.*cond.*operator with functions",
    ),
)
REFUSED_GRADIENTS = (
    (lambda s, b, h, q, k: s.expand(3), ValueError, r"0-d tensor.*\[3\]"),
    (lambda s, b, h, q, k: None, ValueError, "0-d tensor.*NoneType"),
    (lambda s, b, h, q, k: s // 0.5, NotImplementedError, "no gradients.*floor_divide"),
    (_named, NotImplementedError, "aten::lgamma"),
)


@pytest.mark.parametrize(
    ("kind", "backward", "mod", "error", "text"),
    (
        *[("score_mod", False, *row) for row in REFUSED],
        *[("score_mod", True, *row) for row in REFUSED_GRADIENTS],
        ("mask_mod", False, lambda b, h, q, k: q.lgamma() > 2, NotImplementedError, "^mask_mod .*::lgamma"),
    ),
)
def test_refused(kind: Any, backward: bool, mod: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"(?s){text}"):
        trace(mod, kind, backward=backward)


def _of(make: Callable[[Any], Any], change: Callable[[Any], Any]) -> Callable[..., Any]:
    """A function that changes a view of a vector, or the tensor that has the view, and uses both."""

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
    "element": _of(lambda x: x[1], lambda x: x.add_(1)),
    "unbind": _of(lambda x: x.unbind(0), lambda x: x[1].add_(1)),
    "a view of a view": _of(lambda x: x.view(1, 3)[0].detach()[1:], lambda x: x.add_(1)),
    "an assignment": _of(lambda x: x[1:], lambda x: x.__setitem__(0, 1.0)),
    "the tensor of a view": _changed_below_a_view,
}


@pytest.mark.parametrize("name", VIEWS)
def test_changes_of_what_has_a_view_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="^score_mod .*: expected changes in place of .* got one by aten::"):
        trace(VIEWS[name], "score_mod")


LOG = torch.zeros(L, L)
NEW = torch.zeros(L)


@pytest.mark.parametrize("backward", (False, True))
@pytest.mark.parametrize(
    ("changed", "change"),
    (
        ("LOG", lambda s, q, k: LOG.__setitem__((q, k), s)),
        ("LOG", lambda s, q, k: LOG.add_(1)),
        ("LOG", lambda s, q, k: LOG.data.add_(1)),
        ("LOG", lambda s, q, k: LOG.detach()[3:5].add_(1)),
        ("NEW", lambda s, q, k: NEW.copy_(s)),
        ("NEW", lambda s, q, k: torch.mul(NEW, 2, out=NEW)),
        ("NEW", lambda s, q, k: NEW.resize_(3)),
        ("THREE", lambda s, q, k: THREE.add_(1)),
    ),
)
def test_side_effects(changed: str, change: Callable[..., Any], backward: bool) -> None:
    """They are refused by the name of the tensor, which stays as it was."""

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
        ("FLAG", lambda: 1 if FLAG else 2),
        ("THREE", lambda: THREE.item()),
        ("THREE", lambda: len(range(THREE))),
        ("THREE", lambda: TABLE[:THREE].sum()),
        ("THREE", lambda: int(torch.tensor(3) + THREE)),
        ("THREE", lambda: torch.tensor(THREE)),
        ("SIZES", lambda: (SIZES * 2).tolist()[0]),
        ("SIZES", lambda: int(SIZES.numpy()[0])),
        ("SIZES", lambda: int(np.from_dlpack(SIZES)[0])),
        ("SIZES", lambda: SIZES.untyped_storage()[0]),
        ("SIZES", lambda: 1 if torch.equal(SIZES, SIZES) else 2),
    ),
)
def test_values_in_python_are_refused(name: str, value: Callable[[], Any], backward: bool) -> None:
    """They would stay as they are now. The text names the tensor, and the way out."""
    text = f"score_mod .*<lambda>: expected captured tensors to be read by index .*the value of {name} into"
    with pytest.raises(ValueError, match=f"{text}.*index it .*or pass a number"):
        trace(lambda s, b, h, q, k: s * value(), "score_mod", backward=backward)


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
