"""The tools of the GPU tests of flex attention's backward, without a GPU: reference and comparison."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle, product
from types import SimpleNamespace
from typing import Any

import pytest
from host_mods import differentiate, needs_host_compiler

from kit.flex import MASKS, SCORES, FlexCase, FlexInputs, Sizes, attended, make_flex_inputs
from kit.flex import reference as forward
from kit.flex_backward import (
    OF_SCORE,
    FlexGradients,
    captured_tensors,
    check_flex_backward,
    exact_results,
    make_flex_backward_inputs,
    make_flex_gradients,
    probabilities,
    reference_backward,
)
from kit.mha_backward import FLOAT32
from rawmla import reference
from rawmla.reference._flex import NumpyMod, flex_attention_backward

torch = pytest.importorskip("torch")
from rawmla.flex.trace import trace  # noqa: E402

SIZES = Sizes(3, 4, 150, 170, device="cpu")
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
)  # fmt: skip
GRADIENTS = ("out", "lse", "both")


def name_of(x: Any) -> str:
    """A case or a kind of gradients in the name of a test."""
    return x if isinstance(x, str) else x.id


def inspect(x: Any, name: str) -> Any:
    """As that of rawmla.call.arrays, but for tensors of the CPU."""
    return SimpleNamespace(dtype=str(x.dtype).removeprefix("torch."), shape=x.shape)


@needs_host_compiler
@pytest.mark.parametrize("name", SCORES)
def test_forms_agree(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients of CUDA text and of the traced function are those of autograd in float64."""
    monkeypatch.setattr("rawmla.flex.mods.inspect", inspect)
    function, count = SCORES[name](SIZES), 300
    draw = torch.Generator().manual_seed(7)
    scores, grads = 2 * torch.randn(count, generator=draw), torch.randn(count, generator=draw)
    if name == "reciprocal":
        scores = scores.abs() + 0.5
    extents = (SIZES.b, SIZES.h, SIZES.s_q, SIZES.s_k)
    at = torch.stack([torch.randint(0, n, (count,), generator=draw) for n in extents], dim=1)

    captures = {key: function.captures[key].requires_grad_() for key in function.capture_grads}
    exact = {key: x.detach().double().requires_grad_() for key, x in captures.items()}
    sources = scores.double().requires_grad_()
    values = function.torch(exact)(sources, *at.unbind(1))
    values.backward(grads.double())
    mods = [function.cuda().mod(backward=True)]
    if name != "scalar":  # on the CPU a number
        mods.append(trace(function.python, "score_mod", backward=True))
    for mod in mods:
        got = differentiate(mod, scores, at, grads)
        derivatives = got.derivatives.double() * grads
        torch.testing.assert_close(derivatives, sources.grad, rtol=2e-5, atol=2e-5)
        names = [mod.captures[place].name for place in got.gradients]
        assert sorted(names) == sorted(captures)
        for key, x in captures.items():
            (place,) = [place for place in got.gradients if mod.captures[place].array is x]
            torch.testing.assert_close(got.gradients[place].double(), exact[key].grad, rtol=2e-5, atol=1e-4)
    assert [x for x in function.captures.values() if getattr(x, "requires_grad", False)] or not captures


def by_autograd(inputs: FlexInputs, gradients: FlexGradients) -> list[Any]:
    """Gradients of plain attention in float64: of q, k, v and captured tensors."""
    case = inputs.case
    seen = torch.ones(1, 1, case.s_q, case.s_k, dtype=torch.bool)
    if inputs.mask is not None:
        seen = attended(inputs.mask, case, "cpu")
    lse = forward(inputs)[1]
    seen = seen.expand(case.b, case.h_q, -1, -1) & (lse > -torch.inf)[..., None]
    leaves = [x.double().nan_to_num().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    captures = {name: x.detach().double().requires_grad_() for name, x in captured_tensors(inputs).items()}
    group = case.h_q // case.h_kv
    keys, values = (x.expand(case.b, -1, -1, -1).repeat_interleave(group, 1) for x in leaves[1:])
    scale = case.d_qk**-0.5 if case.scale is None else case.scale
    scores = torch.where(seen, leaves[0] @ keys.mT * scale, 1.0)
    if inputs.score is not None:
        extents = (case.b, case.h_q, case.s_q, case.s_k)
        at = [
            torch.arange(n).view([-1 if i == axis else 1 for i in range(4)]) for axis, n in enumerate(extents)
        ]
        scores = inputs.score.torch(captures)(scores, *at)
    some = seen.any(-1)
    scores = scores.masked_fill(~seen, -torch.inf).masked_fill(~some[..., None], 0.0)
    out = torch.softmax(scores, -1).masked_fill(~some[..., None], 0.0) @ values
    total = (out * gradients.dout.double().nan_to_num()).sum()
    if gradients.dlse is not None and case.s_k:
        top = scores.detach().amax(-1, keepdim=True)  # of -1e9 even float64 would lose the sum
        logs = (torch.logsumexp(scores - top, -1) + top[..., 0]).masked_fill(~some, 0.0)
        total = total + (logs * gradients.dlse.double().nan_to_num()).sum()
    return list(
        torch.autograd.grad(total, [*leaves, *captures.values()], materialize_grads=True, allow_unused=True)
    )


@pytest.mark.parametrize(
    ("of", "case"), [*[("both", case) for case in CASES], *product(GRADIENTS[:2], CASES[::6])], ids=name_of
)
def test_the_reference_in_torch(of: str, case: FlexCase) -> None:
    """Against autograd of all of attention at once, where rows and keys that take no part are NaN."""
    inputs = make_flex_inputs(case, "cpu")
    gradients = make_flex_gradients(inputs, of)
    found = reference_backward(inputs, gradients)
    want = by_autograd(inputs, gradients)
    got = [*found.rows.values, *[x.value for x in found.captured.values()]]
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("case", CASES[::3], ids=name_of)
def test_from_rounded_results(case: FlexCase) -> None:
    """As `rawmla.reference` has it."""
    inputs = make_flex_inputs(case, "cpu")
    gradients, results = make_flex_gradients(inputs, "both"), exact_results(inputs)
    numbers = [x.double().numpy() for x in (gradients.dout, inputs.q, inputs.k, inputs.v, *results)]
    mod, score = None, inputs.score
    if score is not None:

        def grad(cotangent: Any, s: Any, *at: Any) -> Any:
            source = torch.from_numpy(s).requires_grad_()
            value = score.torch()(source, *[torch.as_tensor(x) for x in at])
            return torch.autograd.grad(value, source, torch.from_numpy(cotangent))[0].numpy()

        mod = NumpyMod(score.numpy(), grad)
    block_mask = None
    if inputs.mask is not None:
        block_mask = reference.create_block_mask(
            inputs.mask.numpy(), case.b, case.h_q, case.s_q, case.s_k, BLOCK_SIZE=case.block
        )
    *want, _ = flex_attention_backward(
        *numbers, mod, block_mask, case.scale, True, grad_lse=gradients.dlse.double().numpy()
    )
    for one, other in zip(reference_backward(inputs, gradients, results).rows.values, want, strict=True):
        torch.testing.assert_close(one, torch.from_numpy(other), rtol=1e-6, atol=1e-6)


def test_the_reference_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the floors of captured gradients, which are drawn."""
    inputs = make_flex_inputs(FlexCase(**SMALL, score="head scale", mask="per head", h_kv=2), "cpu")
    gradients = make_flex_gradients(inputs, "both")
    whole = reference_backward(inputs, gradients)
    monkeypatch.setattr("kit.flex.CHUNK_SCORES", 1)
    parts = reference_backward(inputs, gradients)
    for name in ("values", "sizes", "floors"):
        for got, want in zip(getattr(parts.rows, name), getattr(whole.rows, name), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-15)
    one, other = (x.captured["factor"] for x in (parts, whole))
    torch.testing.assert_close(one.value, other.value)
    assert bool(((one.floor / other.floor).log2().abs() < 1).all())


def test_floors_of_captured_gradients() -> None:
    """What errors come to that do not know of each other, of terms and of whole rows, by the terms
    themselves.
    """
    inputs = make_flex_inputs(FlexCase(**SMALL, score="head scale"), "cpu")
    gradients = make_flex_gradients(inputs)
    found = reference_backward(inputs, gradients).captured["factor"]
    q, k, v, dout = (x.double() for x in (inputs.q, inputs.k, inputs.v, gradients.dout))
    products = q @ k.mT * 8**-0.5
    factor = inputs.score.captures["factor"].double()[:, None, None]  # type: ignore[union-attr]
    scores = products * factor
    p = torch.softmax(scores, -1)
    out = p @ v
    grad = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True))
    torch.testing.assert_close(found.value, (grad * products).sum((0, 2, 3)))
    q, k, v, out, dout = (x.norm(dim=-1, keepdim=True) for x in (q, k, v, out, dout))
    lost = FLOAT32 * (p * dout * (v.mT + out) + 8**-0.5 * q * k.mT * (grad * factor).abs())
    lost += OF_SCORE * (scores * grad).abs()
    of_rows = FLOAT32 * p * dout * out, OF_SCORE * torch.logsumexp(scores, -1, keepdim=True) * grad
    squares = (lost * products).square().sum((0, 2, 3))
    for one in of_rows:
        squares += (one * products).sum(3).square().sum((0, 2))
    assert bool(((found.floor / squares.sqrt()).log2().abs() < 1).all())


@pytest.mark.parametrize("of", GRADIENTS)
@pytest.mark.parametrize("case", CASES[::4], ids=name_of)
def test_gradients_of_rows_that_attend_nothing_are_the_gap(case: FlexCase, of: str) -> None:
    inputs = make_flex_inputs(case, "cpu")
    gradients = make_flex_gradients(inputs, of)
    attending = forward(inputs)[1] > -torch.inf
    assert torch.equal(gradients.dout.isfinite().all(-1), attending)
    assert bool((gradients.dout[attending] != 0).any()) == (of != "lse" and bool(attending.any()))
    assert (gradients.dlse is None) == (of == "out")
    if gradients.dlse is not None:
        assert torch.equal(gradients.dlse.isfinite(), attending)


# ---- comparison


def kernel(inputs: FlexInputs, gradients: FlexGradients, results: tuple[Any, Any], wrong: str = "") -> Any:
    """What a kernel would give: sums in float32, P and dS in the inputs' dtype. `wrong`: where it errs."""
    case, dtype, (out, lse) = inputs.case, inputs.q.dtype, results
    seen = torch.ones(1, 1, case.s_q, case.s_k, dtype=torch.bool)
    if inputs.mask is not None and wrong != "mask":
        seen = attended(inputs.mask, case, "cpu")
    rows = lse > -torch.inf
    seen = seen.expand(case.b, case.h_q, -1, -1) & rows[..., None]
    group = case.h_q // case.h_kv
    q, dout, out = (x.float().masked_fill(~rows[..., None], 0.0) for x in (inputs.q, gradients.dout, out))
    k, v = (x.float().nan_to_num().repeat_interleave(group, 1) for x in (inputs.k, inputs.v))
    scale = case.d_qk**-0.5 if case.scale is None else case.scale
    s = torch.where(seen, q @ k.mT * scale, 1.0).requires_grad_()
    captures = {name: x.detach().double().requires_grad_() for name, x in captured_tensors(inputs).items()}
    scores = s * 1.0
    if inputs.score is not None:
        at = [
            torch.arange(n).view([-1 if i == axis else 1 for i in range(4)])
            for axis, n in enumerate((case.b, case.h_q, case.s_q, case.s_k))
        ]
        scores = inputs.score.torch(captures)(s, *at)
    (slope,) = torch.autograd.grad(scores.sum(), s, retain_graph=True)
    p = probabilities(scores.detach(), seen, lse).float()
    rounded = p.to(dtype).float()
    delta = (dout * out).sum(-1, keepdim=True) * (wrong != "delta")
    if gradients.dlse is not None and wrong != "dlse":
        delta = delta - gradients.dlse.masked_fill(~rows, 0.0)[..., None]
    grad = p * (dout @ v.mT - delta)
    ds = torch.where(seen, grad * (1 if wrong == "slope" else slope), 0.0).to(dtype).float()
    dq = scale * (ds @ k)
    dk, dv = ((x.mT @ y).unflatten(1, (case.h_kv, group)) for x, y in ((scale * ds, q), (rounded, dout)))
    dk, dv = (x[:, :, 0] if wrong == "group" else x.sum(2) for x in (dk, dv))
    if case.b_kv == 1:
        dk, dv = dk.sum(0, keepdim=True), dv.sum(0, keepdim=True)
    found = {}
    for name, x in captures.items():
        cotangent = grad.to(dtype) if wrong == "rounded" else grad
        if wrong == "last key":
            cotangent = grad.masked_fill(torch.arange(case.s_k) == case.s_k - 1, 0.0)
        (part,) = torch.autograd.grad(scores, x, cotangent.to(scores.dtype), retain_graph=True)
        found[name] = part.to(inputs.score.captures[name].dtype)  # type: ignore[union-attr]
    return dq.to(dtype), dk.to(dtype), dv.to(dtype), found


LARGE: dict[str, Any] = {"s_q": 90, "s_k": 130, "d_qk": 64, "d_v": 64, "block": (64, 64)}
KERNEL_CASES = (
    *[FlexCase(**LARGE, score=name, seed=i) for i, name in enumerate(SCORES)],
    *[FlexCase(**LARGE, score=name, dtype="float16") for name in ("head scale", "bias q k", "softcap")],
    *[FlexCase(**LARGE, mask=name, score="head offset") for name in ("per head", "padding", "empty")],
    FlexCase(**LARGE, b_kv=1, h_kv=2, score="head gate", mask="documents"),
    FlexCase(**{**LARGE, "s_k": 1}, score="one element"),
)  # fmt: skip


@pytest.mark.parametrize(("case", "of"), list(zip(KERNEL_CASES, cycle(GRADIENTS))), ids=name_of)
def test_the_comparison_takes_rounded_gradients(case: FlexCase, of: str) -> None:
    inputs = make_flex_inputs(case, "cpu")
    gradients, results = make_flex_gradients(inputs, of), exact_results(inputs)
    check_flex_backward(inputs, gradients, results, kernel(inputs, gradients, results))


@pytest.mark.parametrize(
    ("wrong", "change", "text"),
    (
        ("delta", {}, "error of dq"),
        ("dlse", {}, "error of dk"),
        ("slope", {"score": "softcap"}, "error of dq"),
        ("slope", {"score": "square"}, "error of dk"),
        ("group", {"h_kv": 1}, "error of dv"),
        ("mask", {"mask": "per head", "gap": 0.0}, "error of dv"),
        ("last key", {"score": "head scale"}, "gradient of factor"),
        ("last key", {"score": "bias k q", "dtype": "float16"}, "gradient of bias"),
        ("last key", {"score": "scalar", "dtype": "float16"}, "gradient of factor"),
        ("delta", {"score": "head offset"}, "gradient of offset"),
    ),
)
def test_the_comparison_finds_errors(wrong: str, change: dict[str, Any], text: str) -> None:
    inputs = make_flex_inputs(FlexCase(**{**LARGE, **change}), "cpu")
    gradients, results = make_flex_gradients(inputs, "both"), exact_results(inputs)
    with pytest.raises(AssertionError, match=text):
        check_flex_backward(inputs, gradients, results, kernel(inputs, gradients, results, wrong))


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_the_comparison_finds_rounded_terms_of_captured_gradients(dtype: str) -> None:
    """All terms of a row sum to next to nothing."""
    inputs = make_flex_inputs(FlexCase(**LARGE, score="head offset", dtype=dtype), "cpu")
    gradients, results = make_flex_gradients(inputs), exact_results(inputs)
    with pytest.raises(AssertionError, match="gradient of offset"):
        check_flex_backward(inputs, gradients, results, kernel(inputs, gradients, results, "rounded"))


def test_the_comparison_finds_single_rows_and_elements() -> None:
    inputs = make_flex_inputs(FlexCase(**LARGE, score="bias h q k", mask="lower half"), "cpu")
    gradients, results = make_flex_gradients(inputs, "out"), exact_results(inputs)

    def fails(text: str, change: Any) -> None:
        got = kernel(inputs, gradients, results)
        change(*got[:3], got[3])
        with pytest.raises(AssertionError, match=text):
            check_flex_backward(inputs, gradients, results, got)

    fails("dq are infinite", lambda dq, dk, dv, more: dq[1, 2, 60].fill_(float("nan")))
    fails("dq is not 0", lambda dq, dk, dv, more: dq[0, 0, 3].fill_(1e-6))
    fails("a row of dk", lambda dq, dk, dv, more: dk[0, 1, 100].mul_(1.1))
    fails("error of dv", lambda dq, dk, dv, more: dv.mul_(1.02))
    fails("gradient of bias", lambda dq, dk, dv, more: more["bias"].mul_(1.03))
    fails("gradient of bias", lambda dq, dk, dv, more: more["bias"][1, 60, 3].add_(float("nan")))
    fails("gradients of \\[\\]", lambda dq, dk, dv, more: more.clear())
    fails(
        "gradient of bias of torch.float32", lambda dq, dk, dv, more: more.update(bias=more["bias"].float())
    )
    zero = replace(gradients, dout=gradients.dout * 0, dlse=torch.ones(results[1].shape))
    got = list(kernel(inputs, zero, results))
    got[2] = got[2] + 1e-30
    with pytest.raises(AssertionError, match="dv is not 0"):
        check_flex_backward(inputs, zero, results, tuple(got))


@pytest.mark.parametrize("part", ("one", "eight", "smallest tenth"))
@pytest.mark.parametrize("score", ("bias h q k", "bias b h q k"))
def test_the_comparison_finds_elements_of_captured_gradients_that_nothing_was_added_to(
    score: str, part: str
) -> None:
    """Of middling size, where the L2 norm shows nothing, or the smallest: each has a bound of its own."""
    inputs = make_flex_inputs(FlexCase(**LARGE, score=score), "cpu")
    gradients, results = make_flex_gradients(inputs, "both"), exact_results(inputs)
    got = kernel(inputs, gradients, results)
    check_flex_backward(inputs, gradients, results, got)
    order = got[3]["bias"].abs().flatten().argsort()
    middle, tenth = len(order) // 2, len(order) // 10
    lost = {"one": order[middle:][:1], "eight": order[middle:][:8], "smallest tenth": order[:tenth]}
    got[3]["bias"].view(-1)[lost[part]] = 0
    with pytest.raises(AssertionError, match="gradient of bias"):
        check_flex_backward(inputs, gradients, results, got)


def test_the_comparison_finds_errors_of_a_captured_gradient_finer_than_the_inputs() -> None:
    """float16, of inputs of bfloat16."""
    inputs = make_flex_inputs(FlexCase(**LARGE, score="head scale"), "cpu")
    gradients, results = make_flex_gradients(inputs, "both"), exact_results(inputs)
    got = kernel(inputs, gradients, results)
    check_flex_backward(inputs, gradients, results, got)
    assert got[3]["factor"].mul_(1.002).dtype == torch.float16
    with pytest.raises(AssertionError, match="gradient of factor"):
        check_flex_backward(inputs, gradients, results, got)


@pytest.mark.parametrize(("name", "lengths"), (("dq", (1100, 40)), ("dk", (40, 1100)), ("dv", (40, 1100))))
def test_the_comparison_finds_single_rows_of_few_columns(name: str, lengths: tuple[int, int]) -> None:
    """One of 17,600, of which the L2 norm shows nothing."""
    case = FlexCase(b=1, h_q=16, h_kv=16, s_q=lengths[0], s_k=lengths[1], d_qk=32, d_v=16)
    inputs = make_flex_inputs(case, "cpu")
    gradients, results = make_flex_gradients(inputs, "both"), exact_results(inputs)
    got = kernel(inputs, gradients, results)
    check_flex_backward(inputs, gradients, results, got)
    rows = got[("dq", "dk", "dv").index(name)][0, 3]
    rows[rows.norm(dim=-1).argsort()[len(rows) // 2]] = 0
    with pytest.raises(AssertionError, match=f": L2 error of a row of {name} [^;]*$"):
        check_flex_backward(inputs, gradients, results, got)


# ---- inputs


def test_tensors_that_require_grad() -> None:
    inputs = make_flex_backward_inputs(FlexCase(**SMALL, score="alibi table"), "cpu")
    assert inputs.score is not None
    traced = trace(inputs.score.python, "score_mod", backward=True)
    assert traced.backward is not None
    assert traced.captures[traced.backward.gradients[0]].array is captured_tensors(inputs)["slopes"]
    assert not forward(inputs)[0].requires_grad


@pytest.mark.parametrize("separate", (True, False))
@pytest.mark.parametrize("name", ("causal", "per head", "empty"))
def test_lists_by_columns(name: str, separate: bool) -> None:
    """Those of the NumPy reference."""
    inputs = make_flex_backward_inputs(FlexCase(**SMALL, mask=name, separate=separate), "cpu")
    assert inputs.block_mask is not None and inputs.mask is not None
    shape = tuple(inputs.block_mask.kv_num_blocks.shape[:2])
    want = reference.create_block_mask(
        inputs.mask.numpy(), *shape, 37, 50, BLOCK_SIZE=(16, 32), separate_full_blocks=separate
    )
    for which in ("kv", "full_kv", "q", "full_q"):
        for what in ("num_blocks", "indices"):
            got, wanted = (getattr(x, f"{which}_{what}") for x in (inputs.block_mask, want))
            assert (got is None) == (wanted is None) == (which.startswith("full") and not separate)
            if got is not None:
                assert got.dtype == torch.int32 and got.tolist() == wanted.tolist()
