"""Attention over a paged cache, written as it is defined."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..call.checks import as_softmax_scale
from ..mla.arguments import check_extra, refuse_without_indices
from ..mla.plan import SchedConfig
from ._arrays import BYTE_DTYPES, INT_DTYPES, Array, Floats, check_groups, check_target, read, read_given
from ._cache import D_ROPE, D_V, LAYOUTS, dequantize_k_cache
from ._plan import dense_blocks, sparse_blocks, use_plan

D_QK = (576, 512)
"""Columns of K."""

_Keys = Callable[[int, int], Floats]
"""The keys `[n, h_kv, d_qk]` that a query token of a request attends: (request, token)."""


def visible_tokens(length: int, s_q: int, token: int, causal: bool) -> int:
    """Count the leading tokens of a request of `length` tokens that query token `token` of `s_q` attends.

    The query tokens are the newest of the request: with `causal` the last one sees every key, the one before
    it all but the newest, and so on, so a request shorter than `s_q` leaves its first query tokens with no
    key at all.
    """
    if not causal:
        return length
    return max(length - s_q + token + 1, 0)


def flash_mla_with_kvcache(
    q: Any,
    k_cache: Any,
    block_table: Any,
    cache_seqlens: Any,
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
    out: Any = None,
    enable_batch_invariant: bool = False,
) -> tuple[Any, Any]:
    """MLA decoding over a paged cache as `rawmla.flash_mla_with_kvcache`, in float64.

    Dense, pages have any number of tokens. An empty `FlashMLASchedMeta` is filled, and refused by later calls
    of another configuration; how work is split does not change what is computed.

    Raises:
        TypeError, ValueError: dtypes and shapes that do not fit, and arguments that would have no effect.
        NotImplementedError: `is_fp8_kvcache` without `indices`.
        IndexError: block_table names a page outside the cache, or is too narrow for a length.
    """
    _check_d_v("head_dim_v", head_dim_v)
    if softmax_scale is not None:
        softmax_scale = as_softmax_scale(softmax_scale)
    if indices is None:
        sparse_only = {
            "attn_sink": attn_sink,
            "extra_k_cache": extra_k_cache,
            "extra_indices_in_kvcache": extra_indices_in_kvcache,
            "topk_length": topk_length,
            "extra_topk_length": extra_topk_length,
        }
        if is_fp8_kvcache or any(x is not None for x in sparse_only.values()):
            refuse_without_indices(**sparse_only)
    elif causal:
        raise ValueError("causal: expected False with indices, got True")
    else:
        check_extra(extra_k_cache, extra_indices_in_kvcache, extra_topk_length)

    dtypes = ("bfloat16", "float16") if indices is None else ("bfloat16",)
    queries = _read_q(q, ("b", "s_q", "h_q"), dtypes)
    b, s_q, h_q, d_qk = queries.shape
    check_target(out, "out", (queries.dtype,), (b, s_q, h_q, D_V))
    sink = read_given(attn_sink, "attn_sink", ("float32",), (h_q,))
    if indices is None:
        axes = ("num_blocks", "page_block_size", "h_kv", d_qk)
        cache = read(k_cache, "k_cache", (queries.dtype,), axes).values
        _, page_block_size, h_kv, _ = cache.shape
        check_groups(h_q, h_kv, "k_cache")
        table = read(block_table, "block_table", INT_DTYPES, (b, "max_blocks")).values
        lengths = read(cache_seqlens, "cache_seqlens", INT_DTYPES, (b,)).values
        keys_of, blocks = _paged(cache, table, lengths, s_q, causal), dense_blocks(lengths)
        config = SchedConfig(b, s_q, h_q, page_block_size, h_kv, causal)
    else:
        cache = _read_cache("k_cache", k_cache, d_qk, is_fp8_kvcache)
        source = _Source.of(cache, "", indices, topk_length, (b, s_q))
        config = SchedConfig(b, s_q, h_q, cache.shape[1], 1, False, is_fp8_kvcache, source.topk)
        if extra_k_cache is None:
            keys_of, blocks = _selected(source), sparse_blocks(b, source.topk, source.lengths)
        else:
            cache = _read_cache("extra_k_cache", extra_k_cache, d_qk, is_fp8_kvcache)
            extra = _Source.of(cache, "extra_", extra_indices_in_kvcache, extra_topk_length, (b, s_q))
            config.extra_page_block_size, config.extra_topk = cache.shape[1], extra.topk
            keys_of = _selected(source, extra)
            blocks = sparse_blocks(b, source.topk, source.lengths, extra.topk, extra.lengths)
    config.enable_batch_invariant = enable_batch_invariant
    use_plan(tile_scheduler_metadata, num_splits, config, blocks, queries)
    scale = d_qk**-0.5 if softmax_scale is None else softmax_scale
    attended, lse, _ = _attend(queries.floats, keys_of, scale, sink)
    return queries.result(attended, queries.dtype, out), queries.result(lse, "float32")


def flash_mla_sparse_fwd(
    q: Any,
    kv: Any,
    indices: Any,
    sm_scale: float,
    d_v: int = D_V,
    attn_sink: Any = None,
    topk_length: Any = None,
    out: Any = None,
    *,
    log_base: str = "2",
    is_fp8_kvcache: bool = False,
    enable_batch_invariant: bool = False,
) -> tuple[Any, Any, Any]:
    """Sparse prefill as `rawmla.flash_mla_sparse_fwd`, in float64.

    A token's result never depends on other tokens, whatever `enable_batch_invariant`.
    """
    _check_d_v("d_v", d_v)
    sm_scale = as_softmax_scale(sm_scale, "sm_scale", "a float")
    if log_base not in ("2", "e"):
        raise ValueError(f"log_base: expected '2' or 'e', got {log_base!r}")
    tokens = _read_q(q, ("s_q", "h_q"), ("bfloat16",))
    s_q, h_q, d_qk = tokens.shape
    check_target(out, "out", (tokens.dtype,), (s_q, h_q, D_V))
    if is_fp8_kvcache:
        cache = _read_cache("kv", kv, d_qk, True)
    else:
        cache = read(kv, "kv", ("bfloat16",), ("s_kv", 1, d_qk)).values[:, None]  # pages of one token
    source = _Source.of(cache, "", indices, topk_length, (s_q, 1))
    sink = read_given(attn_sink, "attn_sink", ("float32",), (h_q,))
    # Each token is a request of its own.
    attended, lse, top = _attend(tokens.floats[:, None], _selected(source), sm_scale, sink)
    unit = np.log(2.0) if log_base == "2" else 1.0
    logs = (tokens.result(x[:, :, 0] / unit, "float32") for x in (top, lse))
    return tokens.result(attended[:, 0], tokens.dtype, out), *logs


def _check_d_v(name: str, d_v: int) -> None:
    """Check the number of value columns."""
    if d_v != D_V:
        raise ValueError(f"{name}: expected {D_V}, got {d_v}")


def _read_q(q: Any, axes: tuple[str, ...], dtypes: tuple[str, ...]) -> Array:
    """q as one array; a pair is concatenated."""
    if type(q) is not tuple:
        return read(q, "q", dtypes, (*axes, D_QK))
    first, second = q
    nope = read(first, "q", dtypes, (*axes, [d_qk - D_ROPE for d_qk in D_QK]))
    rope = read(second, "q_rope", (nope.dtype,), (*nope.shape[:-1], D_ROPE))
    return nope._replace(values=np.concatenate([nope.floats, rope.floats], axis=-1))


def _read_cache(name: str, k_cache: Any, d_qk: int, is_fp8_kvcache: bool) -> NDArray[Any]:
    """Numbers `[num_blocks, page_block_size, 1, d_qk]` of the cache of a sparse call."""
    layout = "v32" if d_qk == 576 else "model1"
    columns = LAYOUTS[layout].token_bytes if is_fp8_kvcache else d_qk
    dtypes = BYTE_DTYPES if is_fp8_kvcache else ("bfloat16",)
    cache = read(k_cache, name, dtypes, ("num_blocks", "page_block_size", 1, columns))
    return dequantize_k_cache(cache.values, layout) if is_fp8_kvcache else cache.values


def _paged(cache: NDArray[Any], table: NDArray[Any], lengths: NDArray[Any], s_q: int, causal: bool) -> _Keys:
    """Find keys through a block table, in a cache `[num_blocks, page_block_size, h_kv, d_qk]`."""
    page_block_size = cache.shape[1]

    @lru_cache(maxsize=1)
    def keys(request: int) -> Floats:
        tokens = np.arange(max(int(lengths[request]), 0))
        pages = table[request, tokens // page_block_size]
        if pages.size and pages.min() < 0:
            raise IndexError(f"block_table: request {request} has a negative page within its length")
        return cache[pages, tokens % page_block_size].astype(np.float64)

    def visible(request: int, token: int) -> Floats:
        rows = keys(request)
        return rows[: visible_tokens(len(rows), s_q, token, causal)]

    return visible


class _Source(NamedTuple):
    """A cache that a sparse call reads by slot, and the slots."""

    slots: NDArray[Any]  # [num_blocks * page_block_size, d_qk]
    indices: NDArray[Any]  # [b, s_q, topk]
    lengths: NDArray[Any] | None  # [b]

    @classmethod
    def of(
        cls, cache: NDArray[Any], prefix: str, indices: Any, topk_length: Any, rows: tuple[int, int]
    ) -> _Source:
        """Read a selection `[*rows, topk]` from a cache `[num_blocks, page_block_size, 1, d_qk]`.

        `prefix` begins the names of the arguments: "" or "extra_".
        """
        name = "extra_indices_in_kvcache" if prefix else "indices"
        chosen = read(indices, name, INT_DTYPES, (*rows, "topk")).values
        lengths = read_given(topk_length, f"{prefix}topk_length", INT_DTYPES, rows[:1])
        slots = cache.reshape(-1, cache.shape[-1])
        return cls(slots, chosen, None if lengths is None else lengths.values)

    @property
    def topk(self) -> int:
        """Columns of the indices."""
        return self.indices.shape[2]

    def keys(self, request: int, token: int) -> Floats:
        """The keys `[n, d_qk]` that a query token attends, in the order of its indices."""
        row = self.indices[request, token]
        if self.lengths is not None:
            row = row[: max(int(self.lengths[request]), 0)]
        return self.slots[row[(row >= 0) & (row < len(self.slots))]].astype(np.float64)


def _selected(*sources: _Source) -> _Keys:
    """Find keys by the slots of one or two sources."""
    return lambda *at: np.concatenate([source.keys(*at) for source in sources])[:, None]


def _attend(query: Floats, keys_of: _Keys, scale: float, sink: Array | None) -> tuple[Floats, Floats, Floats]:
    """Attention of queries `[b, s_q, h_q, d_qk]`, each over the keys `[n, h_kv, d_qk]` of its token.

    Returns:
        out `[b, s_q, h_q, 512]`; lse and the largest score, `[b, h_q, s_q]`. They are 0, +inf and -inf
        without a key.
    """
    b, s_q, h_q, _ = query.shape
    attended = np.zeros((b, s_q, h_q, D_V))
    lse, top = np.full((b, h_q, s_q), np.inf), np.full((b, h_q, s_q), -np.inf)
    for i, j in np.ndindex(b, s_q):
        keys = keys_of(i, j)
        if not len(keys):
            continue
        h_kv = keys.shape[1]
        for g in range(h_kv):
            heads = slice(g * h_q // h_kv, (g + 1) * h_q // h_kv)
            scores = scale * (query[i, j, heads] @ keys[:, g].T)
            most = scores.max(axis=1, keepdims=True)
            log_sum = most + np.log(np.exp(scores - most).sum(axis=1, keepdims=True))
            attended[i, j, heads] = np.exp(scores - log_sum) @ keys[:, g, :D_V]
            lse[i, heads, j], top[i, heads, j] = log_sum[:, 0], most[:, 0]
    if sink is not None:
        with np.errstate(over="ignore", invalid="ignore"):
            kept = 1.0 / (1.0 + np.exp(sink.floats[:, None] - lse))  # exp(lse) / (exp(lse) + exp(sink))
        kept[np.isposinf(lse)] = 0.0  # nothing attended: out is 0 whatever the sink
        attended *= kept.transpose(0, 2, 1)[..., None]
    return attended, lse, top
