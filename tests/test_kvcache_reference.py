"""Attention over caches of `rawmla.reference` against a loop over queries and heads, and against torch."""

from __future__ import annotations

from math import exp, log, tanh
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from rawmla import reference

torch = pytest.importorskip("torch")

H_Q, H_KV, D, D_V, BLOCKS = 4, 2, 16, 6, 30
NOWHERE = (-1, 2**31 - 1, BLOCKS, -(2**31))


def randn(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


class Setting:
    """Caches of two requests, of 9 and 5 tokens with room for 16, whose other tokens are NaN."""

    lengths = (9, 5)

    def __init__(self, page: int = 0, batch_idx: bool = False) -> None:
        self.rows = (3, 1) if batch_idx else (0, 1)
        draw = np.random.default_rng(page)
        count = 4 if batch_idx else 2
        shape = (BLOCKS, page) if page else (count, 16)
        self.k_cache, self.v_cache = (np.full((*shape, H_KV, d), np.nan) for d in (D, D_V))
        self.table: Any = None
        if page:
            blocks = iter(draw.permutation(BLOCKS))
            self.table = np.resize(int32(*NOWHERE), (count, -(-16 // page)))
            for row, length in zip(self.rows, (14, 10), strict=True):
                for column in range(-(-length // page)):
                    self.table[row, column] = next(blocks)
        for r, length in enumerate(self.lengths):
            for j in range(length):
                for cache in (self.k_cache, self.v_cache):
                    cache[self.place(r, j)] = draw.standard_normal(cache.shape[2:])
        self.arguments: dict[str, Any] = {"k_cache": self.k_cache, "v_cache": self.v_cache}
        self.arguments |= {"cache_seqlens": int32(*self.lengths), "block_table": self.table}
        if batch_idx:
            self.arguments["cache_batch_idx"] = int32(*self.rows)

    def place(self, r: int, j: int) -> tuple[int, int]:
        if self.table is None:
            return self.rows[r], j
        page = self.k_cache.shape[1]
        return int(self.table[self.rows[r], j // page]), j % page


def rotate(x: np.ndarray, angles: np.ndarray, interleaved: bool) -> np.ndarray:
    """Pairs of a row as complex numbers."""
    n, out = len(angles), x.copy()
    for i, angle in enumerate(angles):
        one, other = (2 * i, 2 * i + 1) if interleaved else (i, i + n)
        turned = (x[..., one] + 1j * x[..., other]) * np.exp(1j * angle)
        out[..., one], out[..., other] = turned.real, turned.imag
    return out


def attend_row(q: np.ndarray, keys: list[Any], values: list[Any], p: int, o: dict[str, Any]) -> Any:
    """out and lse of one query of one head at position p, by a loop over keys."""
    left, right = o.get("window_size", (-1, -1))
    right, chunk, scores = 0 if o.get("causal") else right, o.get("attention_chunk"), {}
    for j, key in enumerate(keys):
        if 0 <= left < p - j or 0 <= right < j - p or (chunk and j // chunk != p // chunk):
            continue
        score = float(q @ key) * o.get("softmax_scale", D**-0.5)
        score = o["softcap"] * tanh(score / o["softcap"]) if "softcap" in o else score
        scores[j] = score - o["slope"] * abs(p - j)
    if not scores:
        return np.zeros(D_V), -np.inf
    total = sum(exp(s) for s in scores.values())
    return sum(exp(s) * values[j] for j, s in scores.items()) / (total + exp(o["sink"])), log(total)


OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True},
    {"causal": True, "softmax_scale": 0.6, "softcap": 1.5},
    {"window_size": (3, 1)},
    {"window_size": (2, -1), "attention_chunk": 4},
    {"causal": True, "attention_chunk": 3},
    {"alibi_slopes": np.array([0.5, 0.1, 0.0, 2.0])},
    {"alibi_slopes": randn(2, H_Q), "attn_sink": np.array([0.5, -3.0, 2.0, 0.0])},
)
KINDS: Any = ({}, {"page": 3}, {"page": 1, "batch_idx": True}, {"batch_idx": True})


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
@pytest.mark.parametrize("new", (0, 2, 5))
@pytest.mark.parametrize("leftpad", (None, (2, 5)))
def test_against_a_loop(kind: dict[str, Any], options: dict[str, Any], new: int, leftpad: Any) -> None:
    """Queries of both forms; new tokens rotated where there are 2, and all caches as they have to be."""
    setting = Setting(**kind)
    q, k, v = randn(2, 3, H_Q, D), randn(2, new, H_KV, D), randn(2, new, H_KV, D_V)
    more: dict[str, Any] = {"k": k, "v": v} if new else {}
    expected_q, expected_k = q.copy(), k.copy()
    if new == 2:
        angles, interleaved = randn(16, 4), "causal" in options
        rotary = {"rotary_cos": np.cos(angles), "rotary_sin": np.sin(angles)}
        more |= {**rotary, "rotary_interleaved": interleaved}
        local = options.keys() & {"causal", "window_size", "attention_chunk"}
        for r, length in enumerate(setting.lengths):
            for i in range(3):
                expected_q[r, i] = rotate(q[r, i], angles[length + (i if local else 0)], interleaved)
            for t in range(2):
                expected_k[r, t] = rotate(k[r, t], angles[length + t], interleaved)
    k_cache, v_cache = setting.k_cache.copy(), setting.v_cache.copy()
    for r, length in enumerate(setting.lengths):
        for t in range(new):
            k_cache[setting.place(r, length + t)] = expected_k[r, t]
            v_cache[setting.place(r, length + t)] = v[r, t]
    given = {**setting.arguments, **options, **more, "cache_leftpad": leftpad and int32(*leftpad)}
    got = reference.flash_attn_with_kvcache(q, **given)
    for cache, want in ((setting.k_cache, k_cache), (setting.v_cache, v_cache)):
        np.testing.assert_allclose(cache, want, rtol=1e-12)
    for r, length in enumerate(setting.lengths):
        places = [setting.place(r, j) for j in range(leftpad[r] if leftpad else 0, length + new)]
        for i in range(3):
            for h in range(H_Q):
                slope = np.broadcast_to(options.get("alibi_slopes", 0), (2, H_Q))[r, h]
                own = {**options, "slope": slope, "sink": options.get("attn_sink", [-np.inf] * H_Q)[h]}
                keys, values = ([cache[at][h // 2] for at in places] for cache in (k_cache, v_cache))
                out, lse = attend_row(expected_q[r, i, h], keys, values, i + len(places) - 3, own)
                np.testing.assert_allclose(got[0][r, i, h], out, rtol=1e-9, atol=1e-12)
                np.testing.assert_allclose(got[1][r, h, i], lse, rtol=1e-9)
    flat = {"cu_seqlens_q": int32(0, 3, 6), "max_seqlen_q": 3, "cu_seqlens_k": int32(0, 9, 14)}
    if new:
        flat |= {"k": k.reshape(-1, H_KV, D), "v": v.reshape(-1, H_KV, D_V)}
    flat |= {"cu_seqlens_k_new": int32(0, new, 2 * new), "cache_seqlens": None}
    again = reference.flash_attn_with_kvcache(q.reshape(-1, H_Q, D), **{**given, **flat})
    for one, other in zip(again, (got[0], got[1].swapaxes(1, 2)), strict=True):
        np.testing.assert_array_equal(one, other.reshape(6, *other.shape[2:]))


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize("page", (None, 4))
def test_against_torch(dtype: str, page: int | None) -> None:
    """Tensors: rounded results, lse transposed, rotated tokens rounded; all tokens without lengths."""
    kind = getattr(torch, dtype)
    draw = torch.Generator().manual_seed(1)
    q, k_cache, v_cache, k, v = (
        torch.randn(2, n, h, D, generator=draw).to(kind)
        for n, h in ((3, H_Q), (12, H_KV), (12, H_KV), (2, H_KV), (2, H_KV))
    )
    want = torch.nn.functional.scaled_dot_product_attention(
        *(x.double().transpose(1, 2) for x in (q, k_cache, v_cache)), enable_gqa=True
    ).transpose(1, 2)
    caches, table = [k_cache, v_cache], None
    if page is not None:
        table = torch.tensor([[5, 1, 0], [2, 4, 3]], dtype=torch.int32)
        order = table.flatten().argsort()
        caches = [x.reshape(6, 4, H_KV, D)[order] for x in caches]
    out, lse = reference.flash_attn_with_kvcache(q, *caches, block_table=table)
    assert torch.equal(out, want.to(kind)) and lse.dtype == torch.float32
    assert lse.shape == (2, H_Q, 3) and lse.is_contiguous()
    cos, given = torch.rand(12, 8, generator=draw).to(kind), torch.full_like(q, torch.nan)
    result, _ = reference.flash_attn_with_kvcache(
        q, *caches, k, v, cache_seqlens=7, block_table=table, rotary_cos=cos, rotary_sin=1 - cos,
        rotary_seqlens=torch.tensor([2, 30], dtype=torch.int32), rotary_interleaved=False, out=given,
    )  # fmt: skip
    assert result is given and bool(given.isfinite().all())
    for r, positions in ((0, [2, 3]), (1, [11, 11])):  # clamped
        c, s = cos[positions, None].float(), (1 - cos)[positions, None].float()
        one, other = k[r].float().split(8, dim=-1)
        rotated = torch.cat([one * c - other * s, one * s + other * c], -1).to(kind)
        for t in range(2):
            at = (r, 7 + t) if table is None else (table[r, (7 + t) // 4], (7 + t) % 4)
            assert torch.equal(caches[0][at], rotated[t]) and torch.equal(caches[1][at], v[r, t])


@pytest.mark.parametrize("page", (0, 3))
def test_padded_requests_and_wrong_entries(page: int) -> None:
    """No tokens after the call: out 0, nothing read or written. Tokens without a place are not written."""
    setting = Setting(page)
    before = setting.k_cache.copy(), setting.v_cache.copy()
    q, k, v = np.ones((2, 3, H_Q, D)), np.ones((2, 2, H_KV, D)), np.ones((2, 2, H_KV, D_V))
    q[0] = np.nan
    given = {**setting.arguments, "k": k, "v": v, "cache_seqlens": int32(-2, 5)}
    out, lse = reference.flash_attn_with_kvcache(q, **given)
    assert not out[0].any() and (lse[0] == -np.inf).all() and np.isfinite(out[1]).all()
    for cache, old in zip((setting.k_cache, setting.v_cache), before, strict=True):
        for t in (5, 6):
            old[setting.place(1, t)] = 1
        np.testing.assert_array_equal(cache, old)
    for lengths in ((-1, 17), (5, 16)):  # from position -1 on, and past the end
        with np.errstate(invalid="ignore"):
            reference.flash_attn_with_kvcache(q, **{**given, "cache_seqlens": int32(*lengths)})
    for t in (0, 5, 6):
        before[1][setting.place(0, t)] = 1
    np.testing.assert_array_equal(setting.v_cache, before[1])


def test_bytes() -> None:
    """e4m3 caches and queries, with descales; new tokens keep their bytes, or are rotated and rounded."""
    fp8: Any = ml_dtypes.float8_e4m3fn
    caches = [getattr(Setting(), name).astype(fp8) for name in ("k_cache", "v_cache")]
    q, k, v = (randn(2, 3, h, d).astype(fp8) for h, d in ((H_Q, D), (H_KV, D), (H_KV, D_V)))
    scales = {name: np.abs(randn(2, H_KV, seed=i)) for i, name in enumerate(("q_descale", "k_descale"))}
    out, lse = reference.flash_attn_with_kvcache(
        q, *caches, k, v, cache_seqlens=int32(9, 5), **scales, v_descale=scales["k_descale"]
    )
    assert caches[0].dtype == fp8 and (caches[0][0, 9:12] == k[0]).all() and (caches[1][1, 5:8] == v[1]).all()
    factor = np.repeat(scales["q_descale"] * scales["k_descale"], 2, axis=1)
    exact = [x.astype(float) for x in caches]
    want, want_lse = reference.flash_attn_with_kvcache(
        q.astype(float) * factor[:, None, :, None], *exact, cache_seqlens=int32(12, 8)
    )
    np.testing.assert_allclose(out, want * np.repeat(scales["k_descale"], 2, axis=1)[:, None, :, None])
    np.testing.assert_allclose(lse, want_lse)
    tensors = [torch.from_numpy(x.view(np.uint8)).view(torch.float8_e4m3fn) for x in (q, *caches, k, v)]
    rotary = {"rotary_cos": torch.full((1, 8), 2.0), "rotary_sin": torch.zeros(1, 8)}
    result, _ = reference.flash_attn_with_kvcache(*tensors, cache_seqlens=5, **rotary)
    assert result.dtype == torch.bfloat16
    np.testing.assert_array_equal(caches[0][:, 5:8].astype(float), 2 * k.astype(float))


TOKENS = {"k": randn(2, 1, H_KV, D), "v": randn(2, 1, H_KV, D_V)}
BAD: tuple[tuple[dict[str, Any], str], ...] = (
    ({"k": randn(2, 1, H_KV, D)}, "^v: expected an array, as k is one"),
    ({"rotary_cos": np.ones((3, 2)), "rotary_sin": np.ones((3, 2))}, "^rotary_cos: expected None without k"),
    ({"cu_seqlens_k": int32(0, 1, 2)}, "^cu_seqlens_k: expected None, as cache_seqlens"),
    ({"max_seqlen_q": 1}, "^max_seqlen_q: expected None without cu_seqlens_q"),
    ({"cache_seqlens": int32(1)}, r"^cache_seqlens: expected shape \[2\]"),
    ({"cache_leftpad": int32(0, -1)}, "^cache_leftpad: expected numbers of at least 0"),
    ({**TOKENS, "cache_seqlens": None}, "^cache_seqlens: needed with k, as the position to append at"),
    ({"num_splits": -1}, "^num_splits: expected an int"),
    ({"q": randn(3, 1, H_Q, D), "cache_seqlens": 1}, "^k_cache: expected a row for each of 3 requests"),
    ({"q": randn(2, 1, 3, D)}, "^q: expected h_q to be a multiple"),
)


@pytest.mark.parametrize(("changes", "text"), BAD, ids=[text for _, text in BAD])
def test_refusals(changes: dict[str, Any], text: str) -> None:
    given = {"q": randn(2, 1, H_Q, D), **Setting().arguments}
    with pytest.raises(ValueError, match=text):
        reference.flash_attn_with_kvcache(**{**given, **changes})
