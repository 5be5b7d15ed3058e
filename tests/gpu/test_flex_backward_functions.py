"""Backward of flex attention with every score function and every mask of `kit.flex`, from Python
and from CUDA text: gradients of q, k, v and of captured tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from gpu_support import forget_prepared_calls, torch

import rawmla
from kit.flex import MASKS, SCORES, FlexCase, Function, make_flex_inputs
from operations.flex_backward import (
    BackwardInputs,
    assert_same_gradients,
    backward_inputs,
    backward_of,
    check_backward,
)
from rawmla.kernels import flex_captured

SHAPE: dict[str, Any] = {"b": 2, "h_q": 4, "h_kv": 2, "s_q": 200, "s_k": 277}
forms = pytest.mark.parametrize("form", ("python", "cuda"))


@forms
@pytest.mark.parametrize("name", SCORES)
def test_score(name: str, form: str) -> None:
    call = backward_inputs(FlexCase(**SHAPE, score=name), "both")
    check_backward(call, backward_of(call, form))


@forms
@pytest.mark.parametrize("separate", (True, False))
@pytest.mark.parametrize("name", MASKS)
def test_mask(name: str, separate: bool, form: str) -> None:
    call = backward_inputs(FlexCase(**SHAPE, mask=name, separate=separate), "both")
    check_backward(call, backward_of(call, form))


@forms
@pytest.mark.parametrize(
    ("score", "mask"),
    (
        ("alibi table", "documents"),
        ("bias k q h b", "random"),
        ("softcap", "window"),
        ("nested", "causal"),
        ("paged", "prefix"),
        ("gathered", "per head"),
        ("log", "lower half"),
        ("distance", "padding"),
        ("scalar", "empty"),
    ),
)
def test_score_and_mask(score: str, mask: str, form: str) -> None:
    """Both read tensors, which have to be those of the right function."""
    case = FlexCase(**SHAPE, score=score, mask=mask, dtype="float16", layout="tokens")
    call = backward_inputs(case)
    check_backward(call, backward_of(call, form))


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[int]]:
    """The passes over the scores that calls take for captured gradients, as `kernels.flex_captured` has them;
    to be cleared between calls.
    """
    found: set[int] = set()
    original = flex_captured.captured_spec

    def recorded(dtype: str, d_qk: int, d_v: int, pass_: int, header: tuple[str, str]) -> Any:
        found.add(pass_)
        return original(dtype, d_qk, d_v, pass_, header)

    monkeypatch.setattr(flex_captured, "captured_spec", recorded)
    forget_prepared_calls()
    yield found
    forget_prepared_calls()


IN_CELLS, IN_DIGITS = {flex_captured.LARGEST, flex_captured.IN_UNITS}, {flex_captured.IN_DIGITS}
FIXED_ORDERS = {
    "bias h q k": IN_CELLS,
    "relative table": IN_CELLS,
    "bias b k": IN_DIGITS,
    "head scale": IN_DIGITS,
    "query scale": IN_DIGITS,
    "scalar": IN_DIGITS,
    "distance": IN_DIGITS,
}
"""How captured gradients are summed where the order is fixed."""


def assert_repeats(call: BackwardInputs, passes: set[int], in_order: set[int], form: str) -> None:
    """Raise unless dk and dv of some calls have the same bits, and with `deterministic` everything, which
    then is summed in this way.
    """
    for options, wanted in (({}, {flex_captured.IN_ANY_ORDER}), ({"deterministic": True}, in_order)):
        passes.clear()
        want = backward_of(call, form, **options)
        assert passes == wanted
        check_backward(call, want)
        for _ in range(5):
            assert_same_gradients(backward_of(call, form, **options), want, all_of_them=bool(options))


@forms
@pytest.mark.parametrize("name", FIXED_ORDERS)
def test_the_same_call_gives_the_same_bits(name: str, form: str, passes: set[int]) -> None:
    call = backward_inputs(FlexCase(**{**SHAPE, "s_q": 1023, "s_k": 1025}, score=name, mask="causal"), "both")
    assert_repeats(call, passes, FIXED_ORDERS[name], form)


@forms
def test_many_elements_in_a_fixed_order(form: str, passes: set[int]) -> None:
    """More than are summed digit by digit, though no place depends on query and key. Most are not read."""
    table = torch.randn(2**20 + 8, device="cuda", requires_grad=True)
    score = Function(
        lambda s, b, h, q, k: s + table[k],
        "score + table(kv_idx)",
        lambda xp, t, s, b, h, q, k: s + t.table[k],
        {"table": table},
        "grad",
        {"table": ("kv_idx", "grad")},
    )
    inputs = replace(make_flex_inputs(FlexCase(**SHAPE)), score=score)
    assert_repeats(backward_inputs(inputs.case, "both", inputs), passes, IN_CELLS, form)


@forms
@pytest.mark.parametrize("name", ("bias h q k", "head scale"))
def test_deterministic_algorithms_of_torch(name: str, form: str, passes: set[int]) -> None:
    """Their switch has the effect of `deterministic=True`, which has the last word."""
    call = backward_inputs(FlexCase(**SHAPE, score=name, mask="causal"), "both")
    want = backward_of(call, form, deterministic=True)
    check_backward(call, want)
    passes.clear()
    torch.use_deterministic_algorithms(True)
    try:
        results = [backward_of(call, form) for _ in range(5)]
        assert passes <= FIXED_ORDERS[name]
        backward_of(call, form, deterministic=False)
        assert flex_captured.IN_ANY_ORDER in passes
    finally:
        torch.use_deterministic_algorithms(False)
    for got in results:
        assert_same_gradients(got, want, all_of_them=True)


@pytest.mark.parametrize("layout", ("transposed", "every other", "expanded"))
def test_strides_of_captured_tensors(layout: str) -> None:
    """Gradients are contiguous; that of an expanded tensor has its own shape."""
    inputs = make_flex_inputs(FlexCase(**SHAPE, score="bias q k"))
    assert inputs.score is not None
    bias = inputs.score.captures["bias"]
    if layout == "transposed":
        moved = bias.t().contiguous().t()
    elif layout == "every other":
        whole = torch.full((400, 2 * 277), float("nan"), device="cuda")
        moved = whole[::2, 1::2]
        moved.copy_(bias)
    else:
        moved = bias[:1].expand(200, 277)
    moved = moved.detach().requires_grad_()

    def python(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + bias[q, k]

    bias = moved
    inputs = replace(inputs, score=replace(inputs.score, python=python, captures={"bias": moved}))
    call = backward_inputs(inputs.case, "out", inputs)
    for form in ("python", "cuda"):
        check_backward(call, backward_of(call, form))


@pytest.mark.parametrize("dtype", ("float64", "float32", "float16", "bfloat16"))
def test_dtypes_of_captured_tensors(dtype: str) -> None:
    """Gradients have them."""
    draw = torch.Generator("cuda").manual_seed(0)
    table = torch.randn(277, generator=draw, device="cuda").to(getattr(torch, dtype)).requires_grad_()
    score = Function(
        lambda s, b, h, q, k: s * table[k].float(),
        "score * table(kv_idx)",
        lambda xp, t, s, b, h, q, k: s * t.table[k],
        {"table": table},
        "grad * table(kv_idx)",
        {"table": ("kv_idx", "grad * score")},
    )
    inputs = replace(make_flex_inputs(FlexCase(**SHAPE)), score=score)
    call = backward_inputs(inputs.case, "out", inputs)
    for form in ("python", "cuda"):
        check_backward(call, backward_of(call, form))


def test_gradients_go_where_was_read() -> None:
    """Negative indices count from the end; what is still outside is the first or last element."""
    table = torch.randn(10, device="cuda", requires_grad=True)

    def inside(xp: Any, t: Any, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        place = k - 100
        return s + t.table[xp.clip(xp.where(place < 0, place + 10, place), 0, 9)]

    score = Function(
        lambda s, b, h, q, k: s + table[k - 100],
        "score + table(kv_idx - 100)",
        inside,
        {"table": table},
        "grad",
        {"table": ("kv_idx - 100", "grad")},
    )
    inputs = replace(make_flex_inputs(FlexCase(**SHAPE)), score=score)
    call = backward_inputs(inputs.case, "out", inputs)
    for form in ("python", "cuda"):
        check_backward(call, backward_of(call, form))


def test_tensors_without_gradients() -> None:
    """None where the result does not depend on a tensor; nothing of one that does not require grad."""
    call = backward_inputs(FlexCase(**SHAPE))
    used, cut = (torch.randn(277, device="cuda", requires_grad=True) for _ in range(2))
    without = torch.randn(277, device="cuda")
    dq, dk, dv, captured = backward_of(
        call, score_mod=lambda s, b, h, q, k: s + 0 * used[k] + 0 * cut[k].detach() + 0 * without[k]
    )
    assert captured["cut"] is None and "without" not in captured
    assert captured["used"].dtype == used.dtype and not bool(captured["used"].any())
    check_backward(call, (dq, dk, dv, {}))


def test_a_mod_that_is_not_finite_where_it_is_masked() -> None:
    """Neither its result nor its derivatives go anywhere, also not into captured gradients."""
    call = backward_inputs(FlexCase(**SHAPE, score="scalar", mask="causal"), "both")
    assert call.inputs.score is not None
    factor = call.inputs.score.captures["factor"]

    def python(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s * factor / (q >= k)  # 0 / 0, or infinite

    call = replace(call, inputs=replace(call.inputs, score=replace(call.inputs.score, python=python)))
    check_backward(call, backward_of(call))


@pytest.mark.parametrize(
    ("change", "error", "text"),
    (
        ({"score_mod": "2 * score"}, ValueError, "score_mod: expected a CudaMod with grad"),
        ({"score_mod": lambda s, b, h, q, k: torch.lgamma(s)}, NotImplementedError, "aten::lgamma"),
        ({"scale": float("nan")}, ValueError, "^scale: expected a finite float32"),
    ),
)
def test_refused(change: dict[str, Any], error: type[Exception], text: str) -> None:
    call = backward_inputs(FlexCase(**SHAPE))
    with pytest.raises(error, match=text):
        backward_of(call, **change)


def test_mask_functions_have_no_gradients() -> None:
    limits = torch.zeros(200, device="cuda", requires_grad=True)
    call = backward_inputs(FlexCase(**SHAPE))
    mask = rawmla.create_block_mask(lambda b, h, q, k: q >= k, None, None, 200, 277)
    mask.mask_mod = lambda b, h, q, k: q - k > limits[q]
    with pytest.raises(ValueError, match="mask_mod: expected captured tensors that do not require grad"):
        backward_of(call, block_mask=mask)


def test_block_masks_need_no_lists_by_columns() -> None:
    """The backward makes them."""
    call = backward_inputs(FlexCase(**SHAPE, mask="causal"))
    without = make_flex_inputs(call.inputs.case).block_mask
    assert without is not None and without.q_num_blocks is None
    check_backward(call, backward_of(call, block_mask=without))


def test_error_in_the_users_gradient() -> None:
    call = backward_inputs(FlexCase(**SHAPE))
    with pytest.raises(rawmla.CompileError) as caught:
        backward_of(call, score_mod=rawmla.CudaMod("score", grad="grad + nothing_of_that_name"))
    assert "return grad + nothing_of_that_name" in str(caught.value)
