"""Flex attention of `rawmla.reference`: against loops, torch's own on the CPU, and autograd."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from kit import functions
from kit.functions import Sizes
from rawmla import reference
from rawmla.flex.block_mask import BlockMask
from rawmla.reference._flex import NumpyMod, flex_attention_backward

torch = pytest.importorskip("torch")
from torch.nn.attention import flex_attention as theirs  # noqa: E402

B, H, L, S = 2, 4, 40, 50

FUNCTIONS = Sizes(B, H, L, S, device="cpu")
SCORES = ("", "bias h q k", "alibi table", "softcap", "causal", "square")
MASKS = ("causal", "documents", "per head", "padding", "lower half", "empty")


def score_of(name: str) -> Any:
    """A score function as NumPy and as tensors take it."""
    if not name:
        return None, None
    score = functions.SCORES[name](FUNCTIONS)
    return score.numpy(), score.python


def mask_of(name: str) -> Any:
    """A mask as NumPy and as tensors take it."""
    mask = functions.MASKS[name](FUNCTIONS)
    return mask.numpy(), mask.python


@pytest.fixture(autouse=True)
def without_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch computes the same operator without tracing it first, where its version has a switch for that."""
    monkeypatch.setattr(theirs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False)


def arrays(h_kv: int = H, b_kv: int = B, d_qk: int = 8, d_v: int = 5, seed: int = 0) -> list[np.ndarray]:
    draw = np.random.default_rng(seed)
    shapes = (B, H, L, d_qk), (b_kv, h_kv, S, d_qk), (b_kv, h_kv, S, d_v)
    return [draw.standard_normal(shape) for shape in shapes]


def by_loops(q: Any, k: Any, v: Any, score_mod: Any, visible: Any, scale: float) -> tuple[Any, Any, Any]:
    """`visible` is a function of (b, h, query token, key)."""
    group = H // k.shape[1]
    out, lse, top = np.zeros((B, H, L, v.shape[-1])), np.full((B, H, L), -np.inf), np.full((B, H, L), -np.inf)
    for b, h, i in np.ndindex(B, H, L):
        one_k, one_v = k[b % k.shape[0], h // group], v[b % k.shape[0], h // group]
        seen = [j for j in range(S) if visible(b, h, i, j)]
        scores = [scale * math.fsum(q[b, h, i] * one_k[j]) for j in seen]
        if score_mod is not None:
            scores = [float(score_mod(s, b, h, i, j)) for s, j in zip(scores, seen, strict=True)]
        top[b, h, i] = max(scores, default=-np.inf)
        if np.isfinite(top[b, h, i]):
            lse[b, h, i] = top[b, h, i] + math.log(math.fsum(math.exp(s - top[b, h, i]) for s in scores))
            out[b, h, i] = sum(
                math.exp(s - lse[b, h, i]) * one_v[j] for s, j in zip(scores, seen, strict=True)
            )
    return out, lse, top


def both(lse: bool = True, max_scores: bool = True) -> Any:
    return SimpleNamespace(lse=lse, max_scores=max_scores)


def check(got: Any, want: Any) -> None:
    out, aux = got
    for one, other in zip((out, aux.lse, aux.max_scores), want, strict=True):
        assert one.dtype == np.float64
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("score", SCORES)
def test_against_loops(score: str) -> None:
    """Lists of partial and full blocks, some in none of them, which need not agree with the mask."""
    score_mod = score_of(score)[0]
    draw = np.random.default_rng(3)
    states = draw.integers(0, 3, (1, 2, 3, 4))  # nothing, partial, full
    lists = []
    for state in (1, 2):
        order = np.argsort(states != state, axis=-1, kind="stable")
        order[np.arange(4) >= (states == state).sum(-1)[..., None]] = 2**30  # garbage
        lists += [(states == state).sum(-1), order]
    mask = BlockMask((L, S), *lists, BLOCK_SIZE=16, mask_mod=lambda b, h, q, k: (q + k + h) % 3 > 0)
    q, k, v = arrays(h_kv=2, b_kv=1)

    def visible(b: int, h: int, i: int, j: int) -> bool:
        state = states[0, h % 2, i // 16, j // 16]
        return state == 2 or (state == 1 and (i + j + h) % 3 > 0)

    got = reference.flex_attention(q, k, v, score_mod, mask, 0.3, True, return_aux=both())
    check(got, by_loops(q, k, v, score_mod, visible, 0.3))


@pytest.mark.parametrize("h_kv", (4, 1))
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("score", SCORES)
def test_against_torch(score: str, mask: str, h_kv: int) -> None:
    """Both make the block mask themselves. torch has no largest scores on the CPU."""
    q, k, v = arrays(h_kv)
    ours = reference.create_block_mask(mask_of(mask)[0], B, H, L, S, BLOCK_SIZE=(32, 16))
    got = reference.flex_attention(q, k, v, score_of(score)[0], ours, enable_gqa=h_kv == 1, return_lse=True)
    blocks = theirs.create_block_mask(mask_of(mask)[1], B, H, L, S, device="cpu", BLOCK_SIZE=(32, 16))
    tensors = [torch.from_numpy(x) for x in (q, k, v)]
    want, aux = theirs.flex_attention(
        *tensors, score_of(score)[1], blocks, enable_gqa=h_kv == 1, return_aux=theirs.AuxRequest(lse=True)
    )
    for one, other in zip(got, (want, aux.lse), strict=True):
        np.testing.assert_allclose(one, other.numpy(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("size", (16, (32, 16), 128), ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_block_masks_against_torch(mask: str, size: Any) -> None:
    ours = reference.create_block_mask(mask_of(mask)[0], B, H, L, S, BLOCK_SIZE=size)
    blocks = theirs.create_block_mask(mask_of(mask)[1], B, H, L, S, device="cpu", BLOCK_SIZE=size)
    assert ours.shape == tuple(blocks.shape) and ours.BLOCK_SIZE == tuple(blocks.BLOCK_SIZE)
    for name in ("kv", "full_kv", "q", "full_q"):
        counts, entries = getattr(ours, f"{name}_num_blocks"), getattr(ours, f"{name}_indices")
        assert counts.dtype == entries.dtype == np.int32
        np.testing.assert_array_equal(counts, getattr(blocks, f"{name}_num_blocks").numpy())
        np.testing.assert_array_equal(entries, getattr(blocks, f"{name}_indices").numpy())


def test_torchs_block_masks() -> None:
    """Lists may be tensors; the empty one attends everything."""
    q, k, v = arrays()
    blocks = theirs.create_block_mask(lambda b, h, q, k: q >= k, None, None, L, S, device="cpu")
    blocks.mask_mod = lambda b, h, q, k: q >= k
    causal = reference.create_block_mask(mask_of("causal")[0], None, None, L, S)
    np.testing.assert_array_equal(
        reference.flex_attention(q, k, v, None, blocks), reference.flex_attention(q, k, v, None, causal)
    )
    empty = theirs._create_empty_block_mask(*[torch.from_numpy(x) for x in (q, k)])
    np.testing.assert_array_equal(
        reference.flex_attention(q, k, v, None, empty), reference.flex_attention(q, k, v)
    )


def test_what_is_not_attended_does_not_matter() -> None:
    """K and V of positions that are hidden, and what a function gives there, may be NaN."""
    q, k, v = arrays()
    mask = reference.create_block_mask(mask_of("causal")[0], None, None, L, S, BLOCK_SIZE=16)
    want = reference.flex_attention(q, k, v, None, mask)
    k[:, :, L:], v[:, :, L:] = np.nan, np.nan

    def spoilt(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return np.where(q >= k, s, np.nan)

    np.testing.assert_allclose(reference.flex_attention(q, k, v, spoilt, mask), want, rtol=1e-12)


@pytest.mark.parametrize("kind", ("float8_e4m3fn", "float8_e5m2"))
def test_tensors(kind: str) -> None:
    """Rounded to query's dtype; keys and values of bytes; out given."""
    q, k, v = (torch.from_numpy(x) for x in arrays())
    q, k, v = q.bfloat16(), *[x.to(getattr(torch, kind)) for x in (k, v)]
    out = torch.full((B, H, L, 5), math.nan, dtype=torch.bfloat16)
    got, aux = reference.flex_attention(q, k, v, return_aux=both(), out=out)
    assert got is out and aux.lse.dtype == aux.max_scores.dtype == torch.float32
    want, lse = theirs.flex_attention(*[x.double() for x in (q, k, v)], return_lse=True)
    assert torch.equal(got, want.bfloat16())
    torch.testing.assert_close(aux.lse, lse.float())
    assert reference.flex_attention(q, k, v, return_aux=both(max_scores=False))[1].max_scores is None


GROUPS = torch.from_numpy(np.random.default_rng(0).integers(0, 4, (L, 2)))
TABLE = torch.from_numpy(np.random.default_rng(1).standard_normal((L, S))).bfloat16()
# Of single positions: values of whole arrays would be others, or an error.
OF_TENSORS: dict[str, tuple[Any, Any]] = {
    "any": (
        lambda s, b, h, q, k: torch.where((GROUPS[q] == k % 4).any(), s, s - 1),
        lambda b, h, q, k: (GROUPS[q] == k % 4).any(),
    ),
    "rows": (lambda s, b, h, q, k: s + TABLE[q][k], lambda b, h, q, k: TABLE[q][k] > 0),
    "methods": (lambda s, b, h, q, k: s.clamp(max=0.5), lambda b, h, q, k: (q - k).abs().lt(5 + h)),
    "stack": (
        lambda s, b, h, q, k: torch.stack([s, -s]).max(),
        lambda b, h, q, k: torch.stack([q, k]).sum() % 3 > 0,
    ),
    "documents": (score_of("alibi table")[1], mask_of("documents")[1]),
}


@pytest.mark.parametrize("name", OF_TENSORS)
def test_functions_of_tensors(name: str) -> None:
    """Those that rawmla traces, with their BlockMask, torch's, and AuxRequest."""
    score, mask = OF_TENSORS[name]
    tensors = [torch.from_numpy(x) for x in arrays()]
    blocks = theirs.create_block_mask(mask, B, H, L, S, device="cpu", BLOCK_SIZE=16)
    want, lse = theirs.flex_attention(*tensors, score, blocks, return_lse=True)
    ours = reference.create_block_mask(mask, B, H, L, S, device="cpu", BLOCK_SIZE=16)
    assert isinstance(ours, reference.BlockMask)
    np.testing.assert_array_equal(ours.to_dense(), blocks.to_dense().numpy())
    for given in (ours, blocks):
        out, aux = reference.flex_attention(
            *tensors, score, given, return_aux=reference.AuxRequest(lse=True), kernel_options={"BLOCK_M": 64}
        )
        assert isinstance(aux, reference.AuxOutput) and aux.max_scores is None
        torch.testing.assert_close(out, want, rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(aux.lse, lse.float())


def test_functions_of_arrays_with_tensors() -> None:
    q, k, v = arrays()
    for score, mask in (
        (score_of("bias h q k")[0], mask_of("lower half")[0]),
        (lambda *at: 0.5, lambda *at: True),
    ):
        blocks = reference.create_block_mask(mask, B, H, L, S)
        want = reference.flex_attention(q, k, v, score, blocks)
        got = reference.flex_attention(*[torch.from_numpy(x) for x in (q, k, v)], score, blocks)
        np.testing.assert_array_equal(got.numpy(), want)


@pytest.mark.parametrize(("b", "l", "s"), ((0, 5, 7), (2, 0, 7), (2, 5, 0)))
def test_empty(b: int, l: int, s: int) -> None:  # noqa: E741
    q, k, v = np.zeros((b, 3, l, 8)), np.zeros((b, 3, s, 8)), np.zeros((b, 3, s, 4))
    mask = reference.create_block_mask(lambda b, h, q, k: q >= k, None, None, l, s)
    for block_mask in (None, mask):
        out, lse = reference.flex_attention(q, k, v, None, block_mask, return_lse=True)
        assert out.shape == (b, 3, l, 4) and (out == 0).all() and (lse == -np.inf).all()
    out, aux = reference.flex_attention(q, k, v, return_aux=both())
    assert aux.max_scores.shape == (b, 3, l) and (aux.max_scores == -np.inf).all()


# ---- backward

DRAW = np.random.default_rng(0)
BIAS, DISTANCES, SCALE = DRAW.standard_normal((H, S, S)), DRAW.standard_normal(L + S), DRAW.random(())
PLACES, FACTOR = DRAW.standard_normal((S, 3)) / 3, DRAW.random(H) + 0.5


class Score(NamedTuple):
    """A score function of tensors of captured arrays, and of NumPy arrays with its gradients."""

    captures: dict[str, Any]
    torch: Callable[..., Any]
    numpy: Callable[..., NumpyMod]


GRADIENTS: dict[str, Score | None] = {
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
        {"table": DISTANCES},
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
    block_mask, visible = None, np.ones((B, H, L, S), bool)
    if mask:
        mask_mod = mask_of(mask)[0]
        block_mask = reference.create_block_mask(mask_mod, B, H, L, S, BLOCK_SIZE=16)
        i, j = np.arange(L)[:, None], np.arange(S)[None, :]
        for b, h in np.ndindex(B, H):
            visible[b, h] = mask_mod(b, h, i, j)
    grads = draw.standard_normal((B, H, L, 5)), draw.standard_normal((B, H, L))
    return Call([draw.standard_normal(shape) for shape in shapes], grads, block_mask, visible)


def listed_call() -> Call:
    """Lists of partial and full blocks that need not agree with the mask, with garbage behind their ends."""
    made = call("causal", 2, 1)
    states = np.random.default_rng(3).integers(0, 3, (1, 2, 3, 4))  # nothing, partial, full
    lists = []
    for state in (1, 2):
        order = np.argsort(states != state, axis=-1, kind="stable")
        order[np.arange(4) >= (states == state).sum(-1)[..., None]] = 2**30
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
    out, lse = reference.flex_attention(*made.arrays, *options, return_lse=True)
    grad_out, grad_lse = made.grads
    dq, dk, dv, captured = flex_attention_backward(
        grad_out if with_out else 0 * grad_out, *made.arrays, out, lse, *options,
        grad_lse=grad_lse if with_lse else None,
    )  # fmt: skip
    names = [] if score is None else list(score.captures)
    assert list(captured) == names
    return [dq, dk, dv, *captured.values()]


CALLS = (
    *product(GRADIENTS, ("", "causal", "per head", "padding", "empty"), ((H, B),)),
    *product(("several",), ("per head",), HEADS),
    *product(GRADIENTS, ("listed",), ((2, 1),)),
)
"""Score functions, masks, and KV heads with their batch."""


@pytest.mark.parametrize(("score", "mask", "heads"), CALLS, ids=str)
def test_against_autograd(score: str, mask: str, heads: tuple[int, int]) -> None:
    made = listed_call() if mask == "listed" else call(mask, *heads)
    found = gradients(made, GRADIENTS[score])
    for got, want in zip(found, by_autograd(made, GRADIENTS[score], True, True), strict=True):
        assert got.dtype == np.float64
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("with_out", "with_lse"), ((True, False), (False, True)))
def test_of_one_result(with_out: bool, with_lse: bool) -> None:
    made = call("padding", 2)
    found = gradients(made, GRADIENTS["several"], with_out, with_lse)
    for got, want in zip(found, by_autograd(made, GRADIENTS["several"], with_out, with_lse), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)
    assert with_out or not found[2].any()


def test_what_is_masked_has_no_gradient() -> None:
    """NaN in rows that attend nothing or are not attended, and in what functions give there."""
    made, clean = call("per head"), GRADIENTS["softcap"]
    made.visible[:, :, 3], made.visible[..., 7] = False, False
    seen = made.visible
    made = made._replace(
        block_mask=reference.create_block_mask(lambda b, h, q, k: seen[b, h], B, H, L, S, BLOCK_SIZE=16)
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


def test_gradients_of_tensors() -> None:
    """Gradients are tensors of the dtypes of what they belong to."""
    made = call("causal")
    q, k, v = (torch.from_numpy(x).bfloat16() for x in made.arrays)
    table = torch.from_numpy(DISTANCES).half()
    scores = GRADIENTS["relative"]
    assert scores is not None
    mod = scores.numpy(table.double().numpy())
    mod.capture_grads["table"] = (table, mod.capture_grads["table"][1])
    out, lse = reference.flex_attention(q, k, v, mod, made.block_mask, return_lse=True)
    grad = torch.from_numpy(made.grads[0]).bfloat16()
    *found, captured = flex_attention_backward(grad, q, k, v, out, lse, mod, made.block_mask)
    assert [x.dtype for x in found] == [torch.bfloat16] * 3 and captured["table"].dtype == torch.float16
    exact = [x.double().numpy() for x in (q, k, v, out, lse)]
    *want, wanted = flex_attention_backward(grad.double().numpy(), *exact, mod, made.block_mask)
    for got, one in zip((*found, captured["table"]), (*want, wanted["table"]), strict=True):
        np.testing.assert_allclose(got.double().numpy(), one, rtol=2**-8, atol=1e-6)
