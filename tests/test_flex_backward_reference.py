"""Backward of flex attention in the reference: against torch's autograd, and against finite differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from rawmla.flex.block_mask import BlockMask
from rawmla.reference._flex import (
    NumpyMod,
    create_block_mask,
    flex_attention,
    flex_attention_backward,
)

torch = pytest.importorskip("torch")

B, H, L, S = 2, 4, 22, 26
DRAW = np.random.default_rng(0)
BIAS, TABLE, SCALE = DRAW.standard_normal((H, S, S)), DRAW.standard_normal(L + S), DRAW.random(())
PLACES, FACTOR = DRAW.standard_normal((S, 3)) / 3, DRAW.random(H) + 0.5
ROWS = DRAW.random((B, L)) > 0.5


class Score(NamedTuple):
    """A score function of tensors of captured arrays, and of NumPy arrays with its gradients."""

    captures: dict[str, Any]
    torch: Callable[..., Any]
    numpy: Callable[..., NumpyMod]


SCORES: dict[str, Score | None] = {
    "none": None,
    "softcap": Score(
        {},
        lambda s, b, h, q, k: 2 * torch.tanh(s / 2),
        lambda: NumpyMod(
            lambda s, b, h, q, k: 2 * np.tanh(s / 2),
            lambda grad, s, b, h, q, k: grad * (1 - np.tanh(s / 2) ** 2),
        ),
    ),
    "causal": Score(
        {},
        lambda s, b, h, q, k: torch.where(q >= k, s**2, -np.inf),
        lambda: NumpyMod(
            lambda s, b, h, q, k: np.where(q >= k, s**2, -np.inf),
            lambda grad, s, b, h, q, k: np.where(q >= k, 2 * s * grad, 0),
        ),
    ),
    "relative": Score(
        {"table": TABLE},
        lambda s, b, h, q, k, table: s + table[q - k + S],
        lambda table: NumpyMod(
            lambda s, b, h, q, k: s + table[q - k + S],
            lambda grad, s, b, h, q, k: grad,
            {"table": (table, lambda grad, s, b, h, q, k: ((q - k + S,), grad))},
        ),
    ),
    "several": Score(
        {"factor": FACTOR, "bias": BIAS, "scale": SCALE},
        lambda s, b, h, q, k, factor, bias, scale: s * factor[h] * scale + bias[h, q, k] + bias[h, k, q],
        lambda factor, bias, scale: NumpyMod(
            lambda s, b, h, q, k: s * factor[h] * scale + bias[h, q, k] + bias[h, k, q],
            lambda grad, s, b, h, q, k: grad * factor[h] * scale,
            {
                "factor": (factor, lambda grad, s, b, h, q, k: ((h,), grad * s * scale)),
                "bias": (
                    bias,
                    lambda grad, s, b, h, q, k: (
                        (h, np.stack([q + 0 * k, k + 0 * q]), np.stack([k + 0 * q, q + 0 * k])),
                        grad,
                    ),
                ),
                "scale": (scale, lambda grad, s, b, h, q, k: ((), grad * s * factor[h])),
            },
        ),
    ),
    "distance": Score(
        {"places": PLACES},
        lambda s, b, h, q, k, places: s - ((places[q] - places[k]) ** 2).sum(-1),
        lambda places: NumpyMod(
            lambda s, b, h, q, k: s - ((places[q] - places[k]) ** 2).sum(-1),
            lambda grad, s, b, h, q, k: grad,
            {
                "places": (
                    places,
                    lambda grad, s, b, h, q, k: (
                        (
                            np.stack([q + 0 * k, k + 0 * q])[:, None],
                            np.arange(3)[None, :, None, None],
                        ),
                        np.stack([-2 * grad, 2 * grad])[:, None] * np.moveaxis(places[q] - places[k], -1, 0),
                    ),
                )
            },
        ),
    ),
}
MASKS: dict[str, Callable[..., Any] | None] = {
    "no mask": None,
    "causal": lambda b, h, q, k: q >= k,
    "per head": lambda b, h, q, k: abs(q - k) < 3 + 5 * h,
    "some rows": lambda b, h, q, k: np.broadcast_to(ROWS[b, q], (L, S)),
    "empty": lambda b, h, q, k: q < 0,
}
HEADS = ((4, 2), (2, 2), (1, 1), (4, 1))
"""KV heads and their batch."""


class Call(NamedTuple):
    """Arguments, and what they attend, `[B, H, L, S]`."""

    arrays: list[Any]
    grads: tuple[Any, Any]
    block_mask: Any
    visible: Any
    scale: float = 0.4


def call(mask: str, h_kv: int = H, b_kv: int = B, seed: int = 0) -> Call:
    draw = np.random.default_rng(seed)
    shapes = (B, H, L, 8), (b_kv, h_kv, S, 8), (b_kv, h_kv, S, 5)
    mask_mod = MASKS[mask]
    block_mask, visible = None, np.ones((B, H, L, S), bool)
    if mask_mod is not None:
        block_mask = create_block_mask(mask_mod, B, H, L, S, BLOCK_SIZE=16)
        i, j = np.arange(L)[:, None], np.arange(S)[None, :]
        for b, h in np.ndindex(B, H):
            visible[b, h] = mask_mod(b, h, i, j)
    grads = draw.standard_normal((B, H, L, 5)), draw.standard_normal((B, H, L))
    return Call([draw.standard_normal(shape) for shape in shapes], grads, block_mask, visible)


def listed_call() -> Call:
    """Lists of partial and full blocks that need not agree with the mask, with garbage behind their ends."""
    made = call("causal", 2, 1)
    states = np.random.default_rng(3).integers(0, 3, (1, 2, 2, 2))  # nothing, partial, full
    lists = []
    for state in (1, 2):
        order = np.argsort(states != state, axis=-1, kind="stable")
        order[np.arange(2) >= (states == state).sum(-1)[..., None]] = 2**30
        lists += [(states == state).sum(-1), order]
    block_mask = BlockMask((L, S), *lists, BLOCK_SIZE=16, mask_mod=lambda b, h, q, k: (q + k + h) % 3 > 0)
    visible = np.zeros((B, H, L, S), bool)
    for b, h, i, j in np.ndindex(*visible.shape):
        state = states[0, h % 2, i // 16, j // 16]
        visible[b, h, i, j] = state == 2 or (state == 1 and (i + j + h) % 3 > 0)
    assert {0, 1, 2} == set(states.flat)
    return made._replace(block_mask=block_mask, visible=visible)


def by_autograd(made: Call, score: Score | None, with_out: bool, with_lse: bool) -> list[Any]:
    """Gradients of q, k, v and the captured arrays of plain attention in float64."""
    q, k, v = (torch.from_numpy(x).requires_grad_() for x in made.arrays)
    captures = (
        {} if score is None else {n: torch.tensor(x).requires_grad_() for n, x in score.captures.items()}
    )
    group = H // k.shape[1]
    keys, values = (x.expand(B, *x.shape[1:]).repeat_interleave(group, 1) for x in (k, v))
    at = [
        torch.arange(n).view([-1 if i == axis else 1 for i in range(4)])
        for axis, n in enumerate((B, H, L, S))
    ]
    scores = made.scale * (q @ keys.mT)
    if score is not None:
        scores = score.torch(scores, *at, **captures)
    visible = torch.from_numpy(made.visible)
    attending = (visible & (scores > -torch.inf)).any(-1)
    scores = scores.masked_fill(~visible, -torch.inf).masked_fill(~attending[..., None], 0.0)
    out = torch.softmax(scores, -1).masked_fill(~attending[..., None], 0.0) @ values
    lse = torch.logsumexp(scores, -1).masked_fill(~attending, 0.0)
    total = torch.zeros((), dtype=torch.float64)
    if with_out:
        total = total + (out * torch.from_numpy(made.grads[0])).sum()
    if with_lse:
        total = total + (lse * torch.from_numpy(made.grads[1])).sum()
    wanted = torch.autograd.grad(total, [q, k, v, *captures.values()], allow_unused=True)
    return [
        np.zeros(x.shape) if grad is None else grad.numpy()
        for x, grad in zip((q, k, v, *captures.values()), wanted, strict=True)
    ]


def gradients(made: Call, score: Score | None, with_out: bool = True, with_lse: bool = True) -> list[Any]:
    """Those of the reference, from its own results."""
    mod = None if score is None else score.numpy(**score.captures)
    options = (mod, made.block_mask, made.scale, True)
    out, lse = flex_attention(*made.arrays, *options, return_lse=True)
    grad_out, grad_lse = made.grads
    dq, dk, dv, captured = flex_attention_backward(
        grad_out if with_out else 0 * grad_out, *made.arrays, out, lse, *options,
        grad_lse=grad_lse if with_lse else None,
    )  # fmt: skip
    names = [] if score is None else list(score.captures)
    assert list(captured) == names
    return [dq, dk, dv, *captured.values()]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("score", SCORES)
def test_against_autograd(score: str, mask: str) -> None:
    made = call(mask)
    for got, want in zip(
        gradients(made, SCORES[score]), by_autograd(made, SCORES[score], True, True), strict=True
    ):
        assert got.dtype == np.float64
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_shared_heads_and_batches(heads: tuple[int, int]) -> None:
    made = call("per head", *heads)
    for got, want in zip(
        gradients(made, SCORES["several"]), by_autograd(made, SCORES["several"], True, True), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("score", SCORES)
def test_lists(score: str) -> None:
    made = listed_call()
    for got, want in zip(
        gradients(made, SCORES[score]), by_autograd(made, SCORES[score], True, True), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("with_out", "with_lse"), ((True, False), (False, True)))
def test_of_one_result(with_out: bool, with_lse: bool) -> None:
    made = call("some rows", 2)
    found = gradients(made, SCORES["several"], with_out, with_lse)
    for got, want in zip(found, by_autograd(made, SCORES["several"], with_out, with_lse), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)
    assert with_out or not found[2].any()


@pytest.mark.parametrize("score", SCORES)
def test_against_finite_differences(score: str) -> None:
    """Of the reference's own forward, for a few elements of each array."""
    made, mod = call("per head", 2, 1), SCORES[score]
    captures = {} if mod is None else dict(mod.captures)
    sources = [*made.arrays, *captures.values()]

    def loss(changed: list[Any]) -> float:
        arrays, own = changed[:3], dict(zip(captures, changed[3:], strict=True))
        function = None if mod is None else mod.numpy(**own)
        out, lse = flex_attention(*arrays, function, made.block_mask, made.scale, True, return_lse=True)
        attending = lse > -np.inf
        return float((out * made.grads[0]).sum() + (lse[attending] * made.grads[1][attending]).sum())

    draw, step = np.random.default_rng(5), 1e-5
    for i, gradient in enumerate(gradients(made, mod)):
        for place in {tuple(draw.integers(0, n) for n in gradient.shape) for _ in range(4)}:
            sides = []
            for sign in (1, -1):
                moved = [np.array(x) for x in sources]
                moved[i][place] += sign * step
                sides.append(loss(moved))
            difference = (sides[0] - sides[1]) / (2 * step)
            np.testing.assert_allclose(gradient[place], difference, rtol=1e-6, atol=1e-7)


def test_what_is_masked_does_not_matter() -> None:
    """NaN in rows that attend nothing or are not attended, and in what functions give there."""
    made, clean = call("per head"), SCORES["softcap"]
    made.visible[:, :, 3], made.visible[..., 7] = False, False
    seen = made.visible
    made = made._replace(
        block_mask=create_block_mask(lambda b, h, q, k: seen[b, h], B, H, L, S, BLOCK_SIZE=16)
    )
    want = gradients(made, clean)
    arrays, grads = [x.copy() for x in made.arrays], [x.copy() for x in made.grads]
    for x in (arrays[0], *grads):
        x[:, :, 3] = np.nan
    for x in arrays[1:]:
        x[:, :, 7] = np.nan

    def spoiled(x: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return np.where(seen[b, h], x, np.nan)

    assert clean is not None
    mod = clean.numpy()
    poisoned = Score(
        {},
        clean.torch,
        lambda: NumpyMod(
            lambda s, *at: spoiled(mod(s, *at), *at),
            lambda grad, s, *at: spoiled(mod.grad(grad, s, *at), *at),
        ),
    )
    found = gradients(made._replace(arrays=arrays, grads=tuple(grads)), poisoned)
    for got, wanted in zip(found, want, strict=True):
        np.testing.assert_array_equal(got, wanted)
    assert not found[0][:, :, 3].any() and not found[1][:, :, 7].any() and not found[2][:, :, 7].any()


def test_tensors() -> None:
    """Gradients are tensors of the dtypes of what they belong to."""
    made = call("causal")
    q, k, v = (torch.from_numpy(x).bfloat16() for x in made.arrays)
    table = torch.from_numpy(TABLE).half()
    scores = SCORES["relative"]
    assert scores is not None
    mod = scores.numpy(table.double().numpy())
    mod.capture_grads["table"] = (table, mod.capture_grads["table"][1])
    out, lse = flex_attention(q, k, v, mod, made.block_mask, return_lse=True)
    grad = torch.from_numpy(made.grads[0]).bfloat16()
    *found, captured = flex_attention_backward(grad, q, k, v, out, lse, mod, made.block_mask)
    assert [x.dtype for x in found] == [torch.bfloat16] * 3 and captured["table"].dtype == torch.float16
    exact = [x.double().numpy() for x in (q, k, v, out, lse)]
    *want, wanted = flex_attention_backward(grad.double().numpy(), *exact, mod, made.block_mask)
    for got, one in zip((*found, captured["table"]), (*want, wanted["table"]), strict=True):
        np.testing.assert_allclose(got.double().numpy(), one, rtol=2**-8, atol=1e-6)
