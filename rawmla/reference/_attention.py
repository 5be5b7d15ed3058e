"""Attention over a paged cache, written as it is defined."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ._cache import dequantize_k_cache

D_V = 512
"""Value columns: V is the first 512 columns of K."""


def visible_tokens(length: int, s_q: int, token: int, causal: bool) -> int:
    """How many leading cache tokens query token `token` (of `s_q`) attends, in a request of `length` tokens.

    The query tokens are the newest of the request: with `causal` the last one sees every key, the one before
    it all but the newest, and so on, so a request shorter than `s_q` leaves its first query tokens with no
    key at all.
    """
    if not causal:
        return length
    return max(length - s_q + token + 1, 0)


def flash_mla_with_kvcache(
    q: ArrayLike,
    k_cache: ArrayLike,
    block_table: ArrayLike,
    cache_seqlens: ArrayLike,
    head_dim_v: int = D_V,
    tile_scheduler_metadata: Any = None,
    num_splits: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Any = None,
    attn_sink: Any = None,
    extra_k_cache: Any = None,
    extra_indices_in_kvcache: Any = None,
    topk_length: Any = None,
    extra_topk_length: Any = None,
    out: NDArray[Any] | None = None,
    enable_batch_invariant: bool = False,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """MLA decoding over a paged cache: dense, or sparse when `indices` is given.

    Dense, a query token attends the tokens of its request (all of them, or with `causal` those up to its
    own position). Sparse, it attends the cache slots that its row of `indices` names, each as often as it is
    named, and those of the extra cache in the same softmax.

    Args:
        q: `[b, s_q, h_q, d_qk]`, any strides.
        k_cache: dense `[num_blocks, page_block_size, h_kv, d_qk]`; head `h` of `q` reads KV head `h //
            (h_q // h_kv)`. Sparse the same with h_kv = 1, or with `is_fp8_kvcache` bytes `[num_blocks,
            page_block_size, 1, n]`, n 656 for d_qk 576 and 584 for d_qk 512.
        block_table: dense: integers `[b, max_blocks]`; entry `p` of request `i` is the page that holds its
            tokens `p * page_block_size` and following. Entries past the length are never looked at.
            Sparse: ignored.
        cache_seqlens: dense: integers `[b]`, tokens per request, 0 allowed. Sparse: ignored.
        head_dim_v: must be 512.
        tile_scheduler_metadata, num_splits, enable_batch_invariant: accepted and ignored; how work is split
            does not change what is computed.
        softmax_scale: factor on the scores, `d_qk ** -0.5` when None.
        causal: see `visible_tokens`; False with `indices`.
        is_fp8_kvcache: the sparse cache is quantised, in the layout "v32" (d_qk 576) or "model1" (d_qk
            512) of `dequantize_k_cache`.
        indices: integers `[b, s_q, topk]`, slots `page * page_block_size + offset`. One outside `0 ..
            num_blocks * page_block_size - 1` is skipped, wherever it stands.
        attn_sink: `[h_q]`; multiplies a head's out by `exp(lse) / (exp(lse) + exp(sink))`.
        extra_k_cache, extra_indices_in_kvcache: a second cache of the same kind, with a page size and a
            topk of its own.
        topk_length, extra_topk_length: integers `[b]`, how many columns of a request's indices count; None
            for all.
        out: optional array of the result's shape that receives a copy of the result.

    Returns:
        out: float64 `[b, s_q, h_q, 512]`, `softmax(scale * q @ k.T) @ k[:, :512]`.
        lse: float64 `[b, h_q, s_q]`, natural logarithm of the sum of `exp` of the scaled scores; a sink does
        not change it.
        A query row with nothing to attend has out 0 and lse +inf.

    Raises:
        ValueError: shapes that do not fit each other, head_dim_v other than 512, or a combination of
            arguments that means nothing.
        IndexError: block_table names a page outside the cache, or is too narrow for a length.
    """
    if head_dim_v != D_V:
        raise ValueError(f"`head_dim_v`: expected {D_V}, got {head_dim_v}")
    query = np.asarray(q).astype(np.float64)
    scale = query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    if indices is None:
        sparse_arguments = {
            "is_fp8_kvcache": is_fp8_kvcache or None,
            "attn_sink": attn_sink,
            "extra_k_cache": extra_k_cache,
            "extra_indices_in_kvcache": extra_indices_in_kvcache,
            "topk_length": topk_length,
            "extra_topk_length": extra_topk_length,
        }
        given = [name for name, value in sparse_arguments.items() if value is not None]
        if given:
            raise ValueError(f"`{given[0]}`: of sparse decoding, expected `indices` with it")
        result, lse = _dense(query, np.asarray(k_cache), block_table, cache_seqlens, scale, causal)
    else:
        if causal:
            raise ValueError("`causal`: expected False with `indices`")
        if (extra_k_cache is None) != (extra_indices_in_kvcache is None):
            raise ValueError("`extra_k_cache`, `extra_indices_in_kvcache`: expected both or none")
        if extra_k_cache is None and extra_topk_length is not None:
            raise ValueError("`extra_topk_length`: expected `extra_k_cache` with it")
        sources = [_Source.of("k_cache", k_cache, indices, topk_length, query, is_fp8_kvcache)]
        if extra_k_cache is not None:
            extra = (extra_k_cache, extra_indices_in_kvcache, extra_topk_length)
            sources.append(_Source.of("extra_k_cache", *extra, query, is_fp8_kvcache))
        result, lse = _sparse(query, sources, scale)
        _apply_sink(result, lse, attn_sink)
    if out is not None:
        out[...] = result
    return result, lse


def flash_mla_sparse_fwd(
    q: ArrayLike,
    kv: ArrayLike,
    indices: ArrayLike,
    sm_scale: float,
    d_v: int = D_V,
    attn_sink: Any = None,
    topk_length: Any = None,
    out: NDArray[Any] | None = None,
    *,
    log_base: str = "2",
    is_fp8_kvcache: bool = False,
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Sparse prefill: every query token attends the rows of kv that its indices name, each as often as named.

    Args:
        q: `[s_q, h_q, d_qk]`, any strides.
        kv: `[s_kv, 1, d_qk]`, or with `is_fp8_kvcache` the quantised `k_cache` of `flash_mla_with_kvcache`.
        indices: integers `[s_q, 1, topk]`, rows of kv, or slots of the cache. One outside is skipped.
        sm_scale: factor on the scores.
        d_v: must be 512.
        attn_sink: `[h_q]`; multiplies a head's out by `exp(lse) / (exp(lse) + exp(sink))`, for a natural lse.
        topk_length: integers `[s_q]`, how many of a token's indices count; None for all.
        out: optional array of the result's shape that receives a copy of the result.
        log_base: "2" or "e", of max_logits and lse.
        is_fp8_kvcache: kv is quantised.

    Returns:
        out: float64 `[s_q, h_q, 512]`, `softmax(sm_scale * q @ k.T) @ k[:, :512]`.
        max_logits: float64 `[s_q, h_q]`, the largest scaled score, times log2(e) in base 2.
        lse: float64 `[s_q, h_q]`, logarithm of the sum of `exp` of the scaled scores; a sink does not change
        it.
        A query token without a valid index has out 0, max_logits -inf and lse +inf.

    Raises:
        ValueError: shapes that do not fit each other, d_v other than 512, or an unknown log_base.
    """
    if d_v != D_V:
        raise ValueError(f"`d_v`: expected {D_V}, got {d_v}")
    if log_base not in ("2", "e"):
        raise ValueError(f"`log_base`: expected '2' or 'e', got {log_base!r}")
    query = np.asarray(q).astype(np.float64)[:, None]  # one token of as many requests
    cache = np.asarray(kv)
    if not is_fp8_kvcache:
        if cache.ndim != 3:
            raise ValueError(f"`kv`: expected shape [s_kv, 1, d_qk], got {list(cache.shape)}")
        cache = cache[:, None]  # pages of one token
    source = _Source.of("kv", cache, indices, topk_length, query, is_fp8_kvcache)
    result, lse = _sparse(query, [source], sm_scale)
    _apply_sink(result, lse, attn_sink)
    top = np.full(query.shape[:3:2], -np.inf)
    for i in range(len(query)):
        keys = source.keys(i, 0)
        if len(keys):
            top[i] = (sm_scale * (query[i, 0] @ keys.T)).max(axis=1)
    result, lse = result[:, 0], lse[:, :, 0]
    if out is not None:
        out[...] = result
    unit = np.log(2.0) if log_base == "2" else 1.0
    return result, top / unit, lse / unit


def _dense(
    query: NDArray[np.float64],
    cache: NDArray[Any],
    block_table: ArrayLike,
    cache_seqlens: ArrayLike,
    scale: float,
    causal: bool,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    table = np.asarray(block_table)
    lengths = np.asarray(cache_seqlens)
    b, s_q, h_q, d_qk = query.shape
    _, page_block_size, h_kv, d_cache = cache.shape
    if d_cache != d_qk:
        raise ValueError(f"`k_cache`: expected last dimension {d_qk} like `q`, got {d_cache}")
    if h_q % h_kv:
        raise ValueError(f"`q`: expected a number of heads divisible by h_kv = {h_kv}, got {h_q}")
    if len(lengths) != b or len(table) != b:
        raise ValueError(
            f"`cache_seqlens`, `block_table`: expected {b} rows, got {len(lengths)} and {len(table)}"
        )
    group = h_q // h_kv

    result = np.zeros((b, s_q, h_q, D_V))
    lse = np.full((b, h_q, s_q), np.inf)
    for i in range(b):
        tokens = np.arange(int(lengths[i]))
        pages = table[i, tokens // page_block_size]
        if pages.size and pages.min() < 0:
            raise IndexError(f"`block_table`: request {i} has a negative page within its length")
        k = cache[pages, tokens % page_block_size].astype(np.float64)  # [length, h_kv, d_qk]
        for j in range(s_q):
            visible = visible_tokens(len(tokens), s_q, j, causal)
            for g in range(h_kv):
                heads = slice(g * group, (g + 1) * group)
                result[i, j, heads], lse[i, heads, j] = _attend(query[i, j, heads], k[:visible, g], scale)
    return result, lse


class _Source(NamedTuple):
    """A cache that a sparse call reads, and what it reads of it."""

    slots: NDArray[Any]  # [num_blocks * page_block_size, d_qk]
    indices: NDArray[Any]  # [b, s_q, topk]
    lengths: NDArray[Any]  # [b]

    @classmethod
    def of(
        cls, name: str, k_cache: Any, indices: Any, length: Any, query: NDArray[np.float64], quantised: bool
    ) -> _Source:
        b, s_q, _, d_qk = query.shape
        cache, chosen = np.asarray(k_cache), np.asarray(indices)
        if quantised:
            cache = dequantize_k_cache(cache, "v32" if d_qk == 576 else "model1")
        if cache.ndim != 4 or cache.shape[2:] != (1, d_qk):
            raise ValueError(
                f"`{name}`: expected shape [num_blocks, page_block_size, 1, {d_qk}], got {list(cache.shape)}"
            )
        if chosen.ndim != 3 or chosen.shape[:2] != (b, s_q):
            raise ValueError(f"indices of `{name}`: expected shape [{b}, {s_q}, topk], got {chosen.shape}")
        lengths = np.full(b, chosen.shape[2]) if length is None else np.asarray(length)
        if lengths.shape != (b,):
            raise ValueError(f"length of `{name}`: expected shape [{b}], got {list(lengths.shape)}")
        return cls(cache.reshape(-1, d_qk), chosen, lengths)

    def keys(self, request: int, token: int) -> NDArray[np.float64]:
        """The keys that a query token attends, in the order of its indices."""
        row = self.indices[request, token, : max(int(self.lengths[request]), 0)]
        return self.slots[row[(row >= 0) & (row < len(self.slots))]].astype(np.float64)


def _sparse(
    query: NDArray[np.float64], sources: list[_Source], scale: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    b, s_q, h_q, _ = query.shape
    result = np.zeros((b, s_q, h_q, D_V))
    lse = np.full((b, h_q, s_q), np.inf)
    for i in range(b):
        for j in range(s_q):
            keys = np.concatenate([source.keys(i, j) for source in sources])
            result[i, j], lse[i, :, j] = _attend(query[i, j], keys, scale)
    return result, lse


def _apply_sink(result: NDArray[np.float64], lse: NDArray[np.float64], attn_sink: Any) -> None:
    """Multiply `[b, s_q, h_q, 512]` by what sinks leave of it, in place."""
    if attn_sink is None:
        return
    sink = np.asarray(attn_sink).astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        kept = 1.0 / (1.0 + np.exp(sink[:, None] - lse))  # exp(lse) / (exp(lse) + exp(sink))
    kept[np.isposinf(lse)] = 0.0  # nothing attended: out is 0 whatever the sink
    result *= kept.transpose(0, 2, 1)[..., None]


def _attend(
    query: NDArray[np.float64], keys: NDArray[np.float64], scale: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Attention of heads `[n, d_qk]` over keys `[tokens, d_qk]`: out `[n, 512]` and lse `[n]`."""
    if len(keys) == 0:
        return np.zeros((len(query), D_V)), np.full(len(query), np.inf)
    scores = scale * (query @ keys.T)
    top = scores.max(axis=1, keepdims=True)
    log_sum = top + np.log(np.exp(scores - top).sum(axis=1, keepdims=True))
    return np.exp(scores - log_sum) @ keys[:, :D_V], log_sum[:, 0]
