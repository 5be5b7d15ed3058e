"""The kit of flex attention: functions, inputs, references on the device; comparison, of gradients too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flex_points import evaluate, needs_host_compiler, wanted

import rawmla
from kit.flex import MASKS, SCORES, FlexCase, FlexInputs, Sizes, attended, check_flex, make_flex_inputs
from kit.flex import reference as forward
from kit.flex_backward import (
    captured_tensors,
    check_flex_backward,
    exact_results,
    make_flex_backward_inputs,
    make_flex_gradients,
    reference_backward,
)
from kit.mha_backward import Gradients
from rawmla import reference

torch = pytest.importorskip("torch")
from rawmla.flex.trace import trace  # noqa: E402

SIZES = Sizes(3, 4, 150, 170, device="cpu")
FUNCTIONS = [*[("score_mod", name) for name in SCORES], *[("mask_mod", name) for name in MASKS]]
SMALL: dict[str, Any] = {"s_q": 37, "s_k": 50, "d_qk": 8, "d_v": 6, "block": (16, 32), "b": 3}
CASES = (
    *[FlexCase(**SMALL, score=name, seed=i) for i, name in enumerate(SCORES)],
    *[FlexCase(**SMALL, mask=name, separate=i % 3 > 0, seed=i) for i, name in enumerate(MASKS)],
    FlexCase(**SMALL, b_kv=1, h_kv=1, score="bias b h q k", mask="documents", layout="slice"),
    FlexCase(**SMALL, h_kv=2, score="distance", mask="per head", layout="tokens", dtype="float16"),
    FlexCase(**SMALL, score="head scale", mask="padding", scale=0.0),
    FlexCase(**SMALL, score="silu", mask="window", scale=-0.3),
    FlexCase(b=1, s_q=1, s_k=20, score="scalar", mask="causal", block=(128, 16)),
    FlexCase(b=2, s_q=5, s_k=0, d_qk=8, d_v=8),
    FlexCase(b=2, s_q=0, s_k=5, d_qk=8, d_v=8, mask="causal"),
)
FP8_CASES = (
    FlexCase(**SMALL, mask="window", kv_dtype="float8_e4m3fn"),
    FlexCase(**SMALL, mask="padding", kv_dtype="float8_e5m2", layout="slice", scale=0.0),
)
GRADIENTS = ("out", "lse", "both")


def name_of(x: Any) -> str:
    """A case or a kind of gradients in the name of a test."""
    return x if isinstance(x, str) else x.id


# ---- functions


@pytest.fixture
def tensors_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA text may capture them."""

    def inspect(x: Any, name: str) -> Any:
        return SimpleNamespace(dtype=str(x.dtype).removeprefix("torch."), shape=x.shape)

    monkeypatch.setattr("rawmla.flex.mods.inspect", inspect)


def points(name: str, count: int) -> tuple[Any, Any]:
    """Scores `[count]`, and requests, heads, queries and keys `[count, 4]`."""
    draw = torch.Generator().manual_seed(7)
    scores = 2 * torch.randn(count, generator=draw)
    if name == "reciprocal":
        scores = scores.abs() + 0.5
    extents = (SIZES.b, SIZES.h, SIZES.s_q, SIZES.s_k)
    return scores, torch.stack([torch.randint(0, n, (count,), generator=draw) for n in extents], dim=1)


@needs_host_compiler
@pytest.mark.usefixtures("tensors_of_the_cpu")
@pytest.mark.parametrize(("kind", "name"), FUNCTIONS)
def test_forms_agree(kind: str, name: str) -> None:
    """As Python on numbers, as CUDA text, traced, as arrays of NumPy and of torch."""
    function = (SCORES if kind == "score_mod" else MASKS)[name](SIZES)
    scores, at = points(name, 100)
    want = wanted(function.python, kind, scores, at)
    first = (scores,) if kind == "score_mod" else ()
    mods = (function.cuda().mod(), trace(function.python, kind))
    in_cuda, traced = (evaluate(mod, scores, at, is_mask=kind == "mask_mod").values for mod in mods)
    in_torch = function.torch()(*first, *at.unbind(1)).expand(len(at)).float()
    in_numpy = function.numpy()(*[x.numpy() for x in first], *[x.numpy() for x in at.unbind(1)])
    in_numpy = torch.from_numpy(np.broadcast_to(in_numpy, len(at)).astype(np.float32))
    for got in (in_cuda, traced, in_torch, in_numpy):
        torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=2e-5, equal_nan=True)
    assert not bool(want.isnan().any())
    assert name in ("identity", "empty") or len(want.unique()) > 1


@needs_host_compiler
@pytest.mark.usefixtures("tensors_of_the_cpu")
@pytest.mark.parametrize("name", SCORES)
def test_gradients_of_forms_agree(name: str) -> None:
    """Those of CUDA text and of the traced function are those of autograd in float64."""
    function, (scores, at) = SCORES[name](SIZES), points(name, 300)
    grads = torch.randn(300, generator=torch.Generator().manual_seed(8))
    captures = {key: function.captures[key].requires_grad_() for key in function.capture_grads}
    exact = {key: x.detach().double().requires_grad_() for key, x in captures.items()}
    sources = scores.double().requires_grad_()
    values = function.torch(exact)(sources, *at.unbind(1))
    values.backward(grads.double())
    mods = [function.cuda().mod(backward=True)]
    if name != "scalar":  # on the CPU a number
        mods.append(trace(function.python, "score_mod", backward=True))
    for mod in mods:
        got = evaluate(mod, scores, at, grads)
        derivatives = got.derivatives * grads
        torch.testing.assert_close(derivatives, sources.grad, rtol=2e-5, atol=2e-5)
        names = [mod.captures[place].name for place in got.gradients]
        assert sorted(names) == sorted(captures)
        for key, x in captures.items():
            (place,) = [place for place in got.gradients if mod.captures[place].array is x]
            torch.testing.assert_close(got.gradients[place].double(), exact[key].grad, rtol=2e-5, atol=1e-4)


# ---- inputs


@pytest.mark.parametrize("separate", (True, False))
@pytest.mark.parametrize("name", MASKS)
def test_lists_and_gaps(name: str, separate: bool) -> None:
    """Lists of rows and of columns are those of NumPy; what no result depends on holds the gap."""
    case = FlexCase(**SMALL, mask=name, separate=separate, h_kv=2, layout="slice", gap_keys=1)
    inputs = make_flex_backward_inputs(case, "cpu")
    mask = inputs.block_mask
    assert mask is not None and inputs.mask is not None
    of_requests = name in ("documents", "prefix", "padding", "per batch")
    shape = tuple(mask.kv_num_blocks.shape[:2])
    assert shape == (3 if of_requests else 1, 4 if name == "per head" else 1)
    want = reference.create_block_mask(
        inputs.mask.numpy(), *shape, 37, 50, BLOCK_SIZE=(16, 32), separate_full_blocks=separate
    )
    for which, what in product(("kv", "full_kv", "q", "full_q"), ("num_blocks", "indices")):
        got, wanted_one = (getattr(x, f"{which}_{what}") for x in (mask, want))
        assert (got is None) == (wanted_one is None) == (which.startswith("full") and not separate)
        assert got is None or got.dtype == torch.int32 and got.tolist() == wanted_one.tolist()
    seen = attended(inputs.mask, case, "cpu").expand(3, 4, 37, 50).unflatten(1, (2, 2)).any(2).any(2)
    listed = torch.nn.functional.pad(seen, (0, 14)).unflatten(-1, (2, 32)).any(-1)
    listed = listed.repeat_interleave(32, -1)[..., :50]
    for array, held in ((inputs.q, torch.ones(3, 4, 37) > 0), (inputs.k, seen), (inputs.v, listed)):
        assert torch.equal(array.isfinite().all(-1), held) and torch.equal(array.isfinite().any(-1), held)
        whole = torch.empty(0, dtype=array.dtype).set_(array.untyped_storage())
        assert int(whole.isfinite().sum()) == int(held.sum()) * array.shape[-1]


# ---- references


def by_definition(inputs: FlexInputs) -> tuple[Any, Any, Any]:
    """The NumPy reference, of float64 arrays, and lists of its own."""
    case = inputs.case
    arrays = [x.double().numpy() for x in (inputs.q, inputs.k, inputs.v)]
    mask = None
    if inputs.mask is not None:
        mask = reference.create_block_mask(
            inputs.mask.numpy(), case.b, case.h_q, case.s_q, case.s_k,
            BLOCK_SIZE=case.block, separate_full_blocks=case.separate,
        )  # fmt: skip
    out, aux = reference.flex_attention(
        *arrays, None if inputs.score is None else inputs.score.numpy(), mask, case.scale,
        case.h_q != case.h_kv, return_aux=rawmla.AuxRequest(True, True),
    )  # fmt: skip
    return tuple(torch.from_numpy(x) for x in (out, aux.lse, aux.max_scores))


@pytest.mark.parametrize("case", (*CASES, *FP8_CASES), ids=name_of)
def test_the_reference_in_torch(case: FlexCase) -> None:
    inputs = make_flex_inputs(case, "cpu")
    for got, want in zip(forward(inputs), by_definition(inputs), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def by_autograd(inputs: FlexInputs, gradients: Gradients) -> list[Any]:
    """Gradients of the forward's reference in float64: of q, k, v and captured tensors."""
    leaves = [x.double().nan_to_num().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    captures = {name: x.detach().double().requires_grad_() for name, x in captured_tensors(inputs).items()}
    q, k, v = leaves
    out, lse, _ = forward(replace(inputs, q=q, k=k, v=v), captures=captures)
    some = lse > -torch.inf
    total = (out[some] * gradients.dout.double()[some]).sum() + 0 * q.sum()
    if gradients.dlse is not None:
        total = total + (lse[some] * gradients.dlse.double()[some]).sum()
    return list(
        torch.autograd.grad(total, [*leaves, *captures.values()], materialize_grads=True, allow_unused=True)
    )


@pytest.mark.parametrize(
    ("of", "case"), [*[("both", case) for case in CASES], *product(GRADIENTS[:2], CASES[::6])], ids=name_of
)
def test_the_reference_of_gradients(of: str, case: FlexCase) -> None:
    """Against autograd of all of attention at once, where rows and keys that take no part are NaN."""
    inputs = make_flex_inputs(case, "cpu")
    gradients = make_flex_gradients(inputs, of)
    found = reference_backward(inputs, gradients)
    want = by_autograd(inputs, gradients)
    got = [*found.rows.values, *[x.value for x in found.captured.values()]]
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9)


# ---- comparison of the forward


def rounded(inputs: FlexInputs) -> tuple[Any, Any, Any]:
    """What an exact kernel would give."""
    out, lse, top = forward(inputs)
    return out.to(inputs.q.dtype), lse.float(), top.float()


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_the_comparison_finds_what_is_wrong(dtype: str) -> None:
    inputs = make_flex_inputs(FlexCase(s_q=70, s_k=90, dtype=dtype, mask="lower half"), "cpu")

    def fails(text: str, change: Any) -> None:
        results = rounded(inputs)
        change(*results)
        with pytest.raises(AssertionError, match=text):
            check_flex(inputs, results, plain=True)

    check_flex(inputs, rounded(inputs), plain=True)
    fails("out are infinite", lambda out, lse, top: out[1, 2, 60].fill_(float("nan")))
    fails("L2 error of out", lambda out, lse, top: out.mul_(1.02))
    fails("L2 error of a row of out", lambda out, lse, top: out[0, 3, 61].mul_(1.02))
    fails("mean error of out", lambda out, lse, top: out.add_(0.05 * out.abs().max()))
    fails("error of lse", lambda out, lse, top: lse[1, 1, 64].add_(0.001))
    fails("error of max_scores", lambda out, lse, top: top[1, 1, 64].sub_(0.001))
    fails("max_scores is infinite", lambda out, lse, top: top[1, 1, 64].fill_(float("nan")))
    fails("row of out", lambda out, lse, top: out[0, 0, 3].fill_(0.001))
    fails("lse is infinite", lambda out, lse, top: lse[0, 0, 3].fill_(-1e30))


# ---- comparison of gradients


def exact_gradients(inputs: FlexInputs, gradients: Gradients, results: tuple[Any, Any]) -> Any:
    """What an exact kernel would give; the emulator's tests check what real ones give."""
    found = reference_backward(inputs, gradients, results)
    sources = (inputs.q, inputs.k, inputs.v)
    arrays = [x.to(source.dtype) for x, source in zip(found.rows.values, sources, strict=True)]
    captures = captured_tensors(inputs)
    return (*arrays, {name: x.value.to(captures[name].dtype) for name, x in found.captured.items()})


def at_rank(x: Any, first: float, count: int) -> Any:
    """A view that zeroes `count` elements from this share of all elements on, ordered by their size."""
    flat = x.view(-1)
    flat[flat.abs().argsort()[int(first * len(flat)) :][:count]] = 0


LARGE: dict[str, Any] = {"s_q": 90, "s_k": 130, "d_qk": 64, "d_v": 64, "block": (64, 64)}
PLANTED: tuple[tuple[str, Callable[..., Any]], ...] = (
    ("dq are infinite", lambda dq, dk, dv, more: dq[1, 2, 60].fill_(float("nan"))),
    ("dq is not 0", lambda dq, dk, dv, more: dq[0, 0, 3].fill_(1e-6)),
    ("a row of dk", lambda dq, dk, dv, more: dk[0, 1, 100].mul_(1.1)),
    ("error of dv", lambda dq, dk, dv, more: dv.mul_(1.02)),
    ("gradient of bias", lambda dq, dk, dv, more: more["bias"].mul_(1.007)),
    ("gradient of bias", lambda dq, dk, dv, more: more["bias"][1, 60, 3].add_(float("nan"))),
    ("gradient of bias", lambda dq, dk, dv, more: at_rank(more["bias"], 0.75, 1)),
    ("gradient of bias", lambda dq, dk, dv, more: at_rank(more["bias"], 0.5, 2000)),
    (r"gradients of \[\]", lambda dq, dk, dv, more: more.clear()),
    ("bias of torch.float32", lambda dq, dk, dv, more: more.update(bias=more["bias"].float())),
)


@pytest.mark.parametrize(("text", "change"), PLANTED)
def test_the_comparison_finds_planted_gradients(text: str, change: Any) -> None:
    inputs = make_flex_inputs(FlexCase(**LARGE, score="bias h q k", mask="lower half"), "cpu")
    gradients, results = make_flex_gradients(inputs, "both"), exact_results(inputs)
    got = exact_gradients(inputs, gradients, results)
    check_flex_backward(inputs, gradients, results, got)
    change(*got)
    with pytest.raises(AssertionError, match=text):
        check_flex_backward(inputs, gradients, results, got)


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_the_comparison_finds_rounded_terms(dtype: str) -> None:
    """Where all terms of a row sum to next to nothing, a captured gradient shows that they were rounded."""
    inputs = make_flex_inputs(FlexCase(**LARGE, score="head offset", dtype=dtype), "cpu")
    gradients, results = make_flex_gradients(inputs), exact_results(inputs)
    got = exact_gradients(inputs, gradients, results)
    q, k, v, dout, out = (x.double() for x in (inputs.q, inputs.k, inputs.v, gradients.dout, results[0]))
    offset = inputs.score.captures["offset"].double()[:, None, None]  # type: ignore[union-attr]
    p = torch.exp(q @ k.mT / 8 + offset - results[1][..., None])
    terms = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True))
    for rounded_terms in (terms, terms.to(inputs.q.dtype)):
        got[3]["offset"] = rounded_terms.double().sum((0, 2, 3)).float().detach()
        if rounded_terms is terms:
            check_flex_backward(inputs, gradients, results, got)
    with pytest.raises(AssertionError, match="gradient of offset"):
        check_flex_backward(inputs, gradients, results, got)
