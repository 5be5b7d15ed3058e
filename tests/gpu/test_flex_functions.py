"""Every score function and mask of `kit.flex`, from Python and from CUDA text, forward and backward, and what
captured tensors may be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from full_cases import full_unless
from gpu_support import forget_prepared_calls, torch
from test_flex_matrix import VARIANTS

import rawmla
from kit.flex import MASKS, SCORES, FlexCase, Function, check_flex, make_flex_inputs
from operations.flex import assert_same_results, attend, created_mask
from operations.flex_backward import (
    BackwardInputs,
    assert_same_gradients,
    backward_inputs,
    backward_of,
    check_backward,
)
from rawmla.kernels import flex_captured

SHAPE: dict[str, Any] = {"b": 2, "h_q": 4, "h_kv": 2, "s_q": 200, "s_k": 277}
forms = pytest.mark.parametrize("form", full_unless(lambda form: form == "python", ("python", "cuda")))


# Every run has these in test_flex_matrix.py, in other tests, or in another order of their indices.
ELSEWHERE = {
    *(name for variant in VARIANTS for name in (variant.score, variant.mask)),
    *("query scale", "bias b k", "scalar", "alibi table", "bias b h q k", "head offset", "identity", "twice"),
    *("absolute", "bias q k", "bias k q", "bias q h k", "bias k q h b"),
} - {"causal"}


def in_turn(names: Any, elsewhere: Any = ()) -> list[Any]:
    """Names with each form. Every run has every second name that is not `elsewhere`, in one form, in turn."""
    forms = ("python", "cuda")
    others = [name for name in names if name not in elsewhere]
    quick = {(name, forms[number % 2]) for number, name in enumerate(others[::2])}
    pairs = [(name, form) for name in names for form in forms]
    return full_unless(lambda pair: pair in quick, pairs, several=True)


def check_both(call: BackwardInputs, form: str, *, plain: bool = False, **more: Any) -> None:
    """The results and the gradients."""
    check_flex(call.inputs, attend(call.inputs, form, **more), plain=plain)
    check_backward(call, backward_of(call, form, **more))


def call_with(score: Function, of: str = "out") -> BackwardInputs:
    """A call with this score function."""
    inputs = replace(make_flex_inputs(FlexCase(**SHAPE)), score=score)
    return backward_inputs(inputs.case, of, inputs)


def call_with_table(
    table: Any,
    python: Callable[..., Any],
    code: str,
    arrays: Callable[..., Any],
    place: str = "kv_idx",
    grad: str = "grad",
) -> BackwardInputs:
    """A call whose score function reads a table at one place, and adds to the score what is there, or
    multiplies by it.
    """
    of_score = "grad" if grad == "grad" else f"grad * table({place})"
    score = Function(python, code, arrays, {"table": table}, of_score, {"table": (place, grad)})
    return call_with(score)


# ---- functions


@pytest.mark.parametrize(("name", "form"), in_turn(SCORES, ELSEWHERE))
def test_score(name: str, form: str) -> None:
    check_both(backward_inputs(FlexCase(**SHAPE, score=name), "both"), form, plain=True)


@pytest.mark.parametrize("separate", (True, False))
@pytest.mark.parametrize(("name", "form"), in_turn(MASKS, ELSEWHERE))
def test_mask(name: str, form: str, separate: bool) -> None:
    """With lists of ours and of rawmla's own, which give the same bits."""
    call = backward_inputs(FlexCase(**SHAPE, mask=name, separate=separate), "both")
    got = attend(call.inputs, form, max_scores=True)
    check_flex(call.inputs, got, plain=name != "empty")
    created = created_mask(call.inputs, form)
    assert_same_results("created", attend(call.inputs, form, max_scores=True, block_mask=created), got)
    check_backward(call, backward_of(call, form))
    check_backward(call, backward_of(call, form, block_mask=created))


def test_statements_and_lengths_of_cuda_text() -> None:
    """`q_len` and `kv_len`, numbers, several returns; a str is text without captures."""
    inputs = make_flex_inputs(FlexCase(**SHAPE))
    shift, rate = 77, 0.125  # 277 - 200
    score = Function(
        lambda s, b, h, q, k: s,  # not called
        """const int diagonal = q_idx + kv_len - q_len;
if (kv_idx > diagonal) return -kInfinity;
return score - rate * (diagonal - kv_idx) + shift;""",
        lambda xp, t, s, b, h, q, k: xp.where(
            k > q + shift, float("-inf"), s - t.rate * (q + shift - k) + t.shift
        ),
        {"rate": rate, "shift": 3},
    )
    inputs = replace(inputs, score=score)
    check_flex(inputs, attend(inputs, "cuda"))
    twice = replace(inputs, score=SCORES["twice"](inputs.case.sizes("cuda")))
    got = attend(inputs, score_mod="2 * score")
    check_flex(twice, got)
    assert_same_results("text", got, attend(twice, "cuda"))


def test_errors_in_the_users_text() -> None:
    call = backward_inputs(FlexCase(**SHAPE))
    with pytest.raises(rawmla.CompileError) as caught:
        attend(call.inputs, score_mod="score + nothing_of_that_name")
    assert ">  8 | return score + nothing_of_that_name\n" in str(caught.value)
    with pytest.raises(rawmla.CompileError) as caught:
        backward_of(call, score_mod=rawmla.CudaMod("score", grad="grad + nothing_of_that_name"))
    assert "return grad + nothing_of_that_name" in str(caught.value)


# ---- captured tensors


@pytest.mark.parametrize(("layout", "form"), in_turn(("transposed", "every other", "expanded", "offset")))
def test_strides_of_captured_tensors(layout: str, form: str) -> None:
    """Read where they lie, beside NaN. Gradients are contiguous; one of an expanded tensor has its shape."""
    inputs = make_flex_inputs(FlexCase(**SHAPE, score="bias q k"))
    assert inputs.score is not None
    bias = inputs.score.captures["bias"].detach()
    if layout == "transposed":
        moved = bias.t().contiguous().t()
    elif layout == "every other":
        moved = torch.full((400, 2 * 277), float("nan"), device="cuda")[::2, 1::2].copy_(bias)
    elif layout == "expanded":
        moved = bias[:1].expand(200, 277)
    else:
        memory = torch.full((200 * 277 + 1,), float("nan"), device="cuda")
        moved = memory[1:].view(200, 277).copy_(bias)
    moved = moved.detach().requires_grad_()

    def python(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + bias[q, k]

    bias = moved
    check_both(call_with(replace(inputs.score, python=python, captures={"bias": moved})), form)


@pytest.mark.parametrize(("dtype", "form"), in_turn(("float64", "float32", "float16", "bfloat16")))
def test_dtypes_of_captured_tensors(dtype: str, form: str) -> None:
    """Gradients have them."""
    draw = torch.Generator("cuda").manual_seed(0)
    table = torch.randn(277, generator=draw, device="cuda").to(getattr(torch, dtype)).requires_grad_()
    call = call_with_table(
        table,
        lambda s, b, h, q, k: s * table[k].float(),
        "score * table(kv_idx)",
        lambda xp, t, s, b, h, q, k: s * t.table[k],
        grad="grad * score",
    )
    check_both(call, form)


@pytest.mark.parametrize(("dtype", "form"), in_turn(("int64", "int32", "int16", "int8", "uint8", "bool")))
def test_captured_integers(dtype: str, form: str) -> None:
    draw = torch.Generator("cuda").manual_seed(0)
    low = 0 if dtype in ("uint8", "bool") else -5
    high = 2 if dtype == "bool" else 6
    table = torch.randint(low, high, (277,), generator=draw, device="cuda").to(getattr(torch, dtype))
    inputs = make_flex_inputs(FlexCase(**SHAPE))
    score = Function(
        lambda s, b, h, q, k: s + table[k],
        "score + float(table(kv_idx))",
        lambda xp, t, s, b, h, q, k: s + t.table[k],
        {"table": table},
    )
    inputs = replace(inputs, score=score)
    check_flex(inputs, attend(inputs, form))


@forms
def test_indices_outside_of_a_tensor(form: str) -> None:
    """Negative ones count from the end; what is still outside is the first or last element. Gradients go
    where was read.
    """
    table = torch.randn(10, device="cuda", requires_grad=True)

    def inside(xp: Any, t: Any, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        place = k - 100
        return s + t.table[xp.clip(xp.where(place < 0, place + 10, place), 0, 9)]

    call = call_with_table(
        table, lambda s, b, h, q, k: s + table[k - 100], "score + table(kv_idx - 100)", inside, "kv_idx - 100"
    )
    check_both(call, form)


# ---- gradients of captured tensors


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
# How captured gradients are summed where the order is fixed
FIXED_ORDERS = {
    "bias h q k": IN_CELLS,
    "relative table": IN_CELLS,
    "bias b k": IN_DIGITS,
    "head scale": IN_DIGITS,
    "query scale": IN_DIGITS,
    "scalar": IN_DIGITS,
    "distance": IN_DIGITS,
}


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


@pytest.mark.parametrize(("name", "form"), in_turn(FIXED_ORDERS))
def test_the_same_call_gives_the_same_bits(name: str, form: str, passes: set[int]) -> None:
    call = backward_inputs(FlexCase(**{**SHAPE, "s_q": 1023, "s_k": 1025}, score=name, mask="causal"), "both")
    assert_repeats(call, passes, FIXED_ORDERS[name], form)


def test_many_elements_in_a_fixed_order(passes: set[int]) -> None:
    """More than are summed digit by digit, though no place depends on query and key. Most are not read."""
    table = torch.randn(2**20 + 8, device="cuda", requires_grad=True)
    call = call_with_table(
        table,
        lambda s, b, h, q, k: s + table[k],
        "score + table(kv_idx)",
        lambda xp, t, s, b, h, q, k: s + t.table[k],
    )
    assert_repeats(call, passes, IN_CELLS, "python")


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
