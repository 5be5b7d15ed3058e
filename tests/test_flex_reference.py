"""Flex attention of `rawmla.reference`: against loops, and against torch's own on the CPU."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rawmla import reference
from rawmla.flex.block_mask import BlockMask

torch = pytest.importorskip("torch")
from torch.nn.attention import flex_attention as theirs  # noqa: E402

B, H, L, S = 2, 4, 40, 50
DRAW = np.random.default_rng(0)
BIAS = DRAW.standard_normal((H, L, S))
SLOPES = DRAW.random(H)
DOCUMENTS = np.sort(DRAW.integers(0, 4, (B, 60)))
ROWS = DRAW.random((B, L)) > 0.5

# In both columns the function; those of torch read tensors.
SCORES: dict[str, Any] = {
    "none": (None, None),
    "bias": (
        lambda s, b, h, q, k: s + BIAS[h, q, k],
        lambda s, b, h, q, k: s + torch.from_numpy(BIAS)[h, q, k],
    ),
    "alibi": (
        lambda s, b, h, q, k: s + SLOPES[h] * (k - q),
        lambda s, b, h, q, k: s + torch.from_numpy(SLOPES)[h] * (k - q),
    ),
    "softcap": (lambda s, b, h, q, k: 3 * np.tanh(s / 3), lambda s, b, h, q, k: 3 * torch.tanh(s / 3)),
    "causal": (
        lambda s, b, h, q, k: np.where(q >= k, s, -np.inf),
        lambda s, b, h, q, k: torch.where(q >= k, s, -math.inf),
    ),
    "square": (lambda s, b, h, q, k: s**2, lambda s, b, h, q, k: s**2),
}
MASKS: dict[str, Any] = {
    "all": (lambda b, h, q, k: True, lambda b, h, q, k: q >= 0),
    "causal": (lambda b, h, q, k: q >= k, lambda b, h, q, k: q >= k),
    "documents": (
        lambda b, h, q, k: DOCUMENTS[b, q] == DOCUMENTS[b, k],
        lambda b, h, q, k: torch.from_numpy(DOCUMENTS)[b, q] == torch.from_numpy(DOCUMENTS)[b, k],
    ),
    "per head": (lambda b, h, q, k: abs(q - k) < 3 + 8 * h, lambda b, h, q, k: abs(q - k) < 3 + 8 * h),
    "some rows": (
        lambda b, h, q, k: np.broadcast_to(ROWS[b, q], (L, S)),
        lambda b, h, q, k: torch.from_numpy(ROWS)[b, q] & (k >= 0),
    ),
    "none": (lambda b, h, q, k: q < 0, lambda b, h, q, k: q < 0),
}
SIZES = (16, (32, 16), 128)


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
    score_mod = SCORES[score][0]
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
    ours = reference.create_block_mask(MASKS[mask][0], B, H, L, S, BLOCK_SIZE=(32, 16))
    got = reference.flex_attention(q, k, v, SCORES[score][0], ours, enable_gqa=h_kv == 1, return_lse=True)
    blocks = theirs.create_block_mask(MASKS[mask][1], B, H, L, S, device="cpu", BLOCK_SIZE=(32, 16))
    tensors = [torch.from_numpy(x) for x in (q, k, v)]
    want, aux = theirs.flex_attention(
        *tensors, SCORES[score][1], blocks, enable_gqa=h_kv == 1, return_aux=theirs.AuxRequest(lse=True)
    )
    for one, other in zip(got, (want, aux.lse), strict=True):
        np.testing.assert_allclose(one, other.numpy(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_block_masks_against_torch(mask: str, size: Any) -> None:
    ours = reference.create_block_mask(MASKS[mask][0], B, H, L, S, BLOCK_SIZE=size)
    blocks = theirs.create_block_mask(MASKS[mask][1], B, H, L, S, device="cpu", BLOCK_SIZE=size)
    assert ours.shape == tuple(blocks.shape) and ours.BLOCK_SIZE == tuple(blocks.BLOCK_SIZE)
    for name in ("kv", "full_kv", "q", "full_q"):
        counts, entries = getattr(ours, f"{name}_num_blocks"), getattr(ours, f"{name}_indices")
        assert counts.dtype == entries.dtype == np.int32
        np.testing.assert_array_equal(counts, getattr(blocks, f"{name}_num_blocks").numpy())
        np.testing.assert_array_equal(entries, getattr(blocks, f"{name}_indices").numpy())


def test_block_mask_without_full_blocks() -> None:
    apart = reference.create_block_mask(MASKS["causal"][0], None, None, L, S, BLOCK_SIZE=16)
    one = reference.create_block_mask(
        MASKS["causal"][0], None, None, L, S, BLOCK_SIZE=16, separate_full_blocks=False
    )
    assert one.full_kv_num_blocks is one.full_kv_indices is one.full_q_num_blocks is None
    np.testing.assert_array_equal(one.kv_num_blocks, apart.kv_num_blocks + apart.full_kv_num_blocks)
    assert one.kv_num_blocks.tolist() == [[[1, 2, 3]]]
    assert one.kv_indices.tolist() == [[[[0, 1, 2, 3]] * 3]]


def test_torchs_block_masks() -> None:
    """Lists may be tensors; the empty one attends everything."""
    q, k, v = arrays()
    blocks = theirs.create_block_mask(lambda b, h, q, k: q >= k, None, None, L, S, device="cpu")
    blocks.mask_mod = lambda b, h, q, k: q >= k
    causal = reference.create_block_mask(MASKS["causal"][0], None, None, L, S)
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
    mask = reference.create_block_mask(MASKS["causal"][0], None, None, L, S, BLOCK_SIZE=16)
    want = reference.flex_attention(q, k, v, None, mask)
    k[:, :, L:], v[:, :, L:] = np.nan, np.nan

    def spoilt(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return np.where(q >= k, s, np.nan)

    np.testing.assert_allclose(reference.flex_attention(q, k, v, spoilt, mask), want, rtol=1e-12)


def test_nan_and_inf_spoil_their_row_alone() -> None:
    q, k, v = arrays()
    want = reference.flex_attention(q, k, v)
    for spoiler in (np.nan, np.inf):
        got = reference.flex_attention(
            q, k, v, lambda s, b, h, i, j, x=spoiler: np.where((i == 3) & (j == 7), x, s)
        )
        assert np.isnan(got[:, :, 3]).all()
        np.testing.assert_array_equal(np.delete(got, 3, 2), np.delete(want, 3, 2))


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


GROUPS = torch.from_numpy(DRAW.integers(0, 4, (L, 2)))
TABLE = torch.from_numpy(DRAW.standard_normal((L, S))).bfloat16()
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
    "documents": (SCORES["alibi"][1], MASKS["documents"][1]),
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
    for score, mask in ((SCORES["bias"][0], MASKS["some rows"][0]), (lambda *at: 0.5, lambda *at: True)):
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
