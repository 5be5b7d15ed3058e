"""Every score function and every mask of `kit.flex`, from Python and from CUDA text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from gpu_support import torch

import rawmla
from kit.flex import MASKS, SCORES, FlexCase, Function, check_flex, make_flex_inputs
from operations.flex import assert_same_results, attend, created_mask

SHAPE: dict[str, Any] = {"b": 2, "h_q": 4, "h_kv": 2, "s_q": 200, "s_k": 277}
forms = pytest.mark.parametrize("form", ("python", "cuda"))


@forms
@pytest.mark.parametrize("name", SCORES)
def test_score(name: str, form: str) -> None:
    inputs = make_flex_inputs(FlexCase(**SHAPE, score=name))
    check_flex(inputs, attend(inputs, form), plain=True)


def test_sine_of_cudas_library() -> None:
    """Text may call it, although it compiles ten times as long as torch_sin, with a table in local memory."""
    inputs = make_flex_inputs(FlexCase(**SHAPE, score="trigonometric"))
    text = rawmla.CudaMod("2 * sinf(score) + cosf(score)")
    check_flex(inputs, attend(inputs, score_mod=text), plain=True)


@forms
@pytest.mark.parametrize("name", MASKS)
def test_mask(name: str, form: str) -> None:
    """With lists of ours and of rawmla's own, which have the same bits."""
    inputs = make_flex_inputs(FlexCase(**SHAPE, mask=name))
    got = attend(inputs, form, max_scores=True)
    check_flex(inputs, got, plain=name != "empty")
    again = attend(inputs, form, max_scores=True, block_mask=created_mask(inputs, form))
    assert_same_results("created", again, got)


@forms
@pytest.mark.parametrize("separate", (True, False))
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
    ),
)
def test_score_and_mask(score: str, mask: str, separate: bool, form: str) -> None:
    """Both read tensors, which have to be those of the right function."""
    case = FlexCase(**SHAPE, score=score, mask=mask, separate=separate, dtype="float16", layout="tokens")
    inputs = make_flex_inputs(case)
    check_flex(inputs, attend(inputs, form), plain=True)


@pytest.mark.parametrize("layout", ("transposed", "every other", "expanded", "offset"))
def test_strides_of_captured_tensors(layout: str) -> None:
    """Read where they lie, beside NaN."""
    inputs = make_flex_inputs(FlexCase(**SHAPE, score="bias q k"))
    assert inputs.score is not None
    bias = inputs.score.captures["bias"]
    if layout == "transposed":
        moved = bias.t().contiguous().t()
    elif layout == "every other":
        whole = torch.full((400, 2 * 277), float("nan"), device="cuda")
        moved = whole[::2, 1::2]
        moved.copy_(bias)
    elif layout == "expanded":
        moved = bias[:1].expand(200, 277)
    else:
        whole = torch.full((200 * 277 + 1,), float("nan"), device="cuda")
        moved = whole[1:].view(200, 277)
        moved.copy_(bias)

    def python(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + moved[q, k]

    inputs = replace(inputs, score=replace(inputs.score, python=python, captures={"bias": moved}))
    for form in ("python", "cuda"):
        check_flex(inputs, attend(inputs, form))


@pytest.mark.parametrize(
    "dtype", ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
)
def test_dtypes_of_captured_tensors(dtype: str) -> None:
    draw = torch.Generator("cuda").manual_seed(0)
    if dtype == "bool" or "float" in dtype:
        values = torch.randn(277, generator=draw, device="cuda")
        table = values > 0 if dtype == "bool" else values.to(getattr(torch, dtype))
    else:
        low = 0 if dtype == "uint8" else -5
        table = torch.randint(low, 6, (277,), generator=draw, device="cuda").to(getattr(torch, dtype))
    inputs = make_flex_inputs(FlexCase(**SHAPE))
    score = Function(
        lambda s, b, h, q, k: s + table[k],
        "score + float(table(kv_idx))",
        lambda xp, t, s, b, h, q, k: s + t.table[k],
        {"table": table},
    )
    inputs = replace(inputs, score=score)
    for form in ("python", "cuda"):
        check_flex(inputs, attend(inputs, form))


def test_indices_outside_of_a_tensor() -> None:
    """Negative ones count from the end; what is still outside reads the first or last element."""
    table = torch.randn(10, device="cuda")
    inputs = make_flex_inputs(FlexCase(**SHAPE))

    def inside(xp: Any, t: Any, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        place = k - 100
        return s + t.table[xp.clip(xp.where(place < 0, place + 10, place), 0, 9)]

    score = Function(
        lambda s, b, h, q, k: s + table[k - 100], "score + table(kv_idx - 100)", inside, {"table": table}
    )
    inputs = replace(inputs, score=score)
    for form in ("python", "cuda"):
        check_flex(inputs, attend(inputs, form))


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


def test_error_in_the_users_text() -> None:
    inputs = make_flex_inputs(FlexCase(**SHAPE))
    with pytest.raises(rawmla.CompileError) as caught:
        attend(inputs, score_mod="score + nothing_of_that_name")
    assert ">  8 | return score + nothing_of_that_name\n" in str(caught.value)


def test_masks_of_masks() -> None:
    """`and_masks` and `or_masks`, here and of torch."""
    from torch.nn.attention import flex_attention as theirs

    sizes = FlexCase(**SHAPE).sizes("cuda")
    first, second = MASKS["random"](sizes), MASKS["window"](sizes)

    def both(xp: Any, t: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return t.chosen[q, k] & (q >= k) & (q - k <= t.width)

    def either(xp: Any, t: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return t.chosen[q, k] | (q >= k) & (q - k <= t.width)

    captures = {**first.captures, **second.captures}
    inputs = make_flex_inputs(FlexCase(**SHAPE))
    for names, arrays in (("and_masks", both), ("or_masks", either)):
        for module in (rawmla, theirs):
            python = getattr(module, names)(first.python, second.python)
            mask = Function(python, "", arrays, captures)
            given = rawmla.create_block_mask(python, None, None, 200, 277)
            one = replace(inputs, mask=mask, block_mask=given)
            check_flex(one, attend(one))
