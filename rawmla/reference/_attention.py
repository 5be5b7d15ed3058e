"""Attention over a paged cache, written as it is defined."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..call.checks import as_softmax_scale
from ._arrays import BYTE_DTYPES, INT_DTYPES, Array, Shape, like, read, read_target, result
from ._cache import D_ROPE, D_V, LAYOUTS, dequantize_k_cache
from ._plan import SchedConfig, dense_blocks, refuse_dense_fp8, sparse_blocks, use_plan

D_QK = (576, 512)
"""Columns of K."""


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
    plan = (tile_scheduler_metadata, num_splits)
    if indices is None:
        sparse_only = {
            "attn_sink": attn_sink,
            "extra_k_cache": extra_k_cache,
            "extra_indices_in_kvcache": extra_indices_in_kvcache,
            "topk_length": topk_length,
            "extra_topk_length": extra_topk_length,
        }
        given = [name for name, value in sparse_only.items() if value is not None]
        if given:
            raise ValueError(f"{', '.join(given)}: expected None without indices, got an array")
        if is_fp8_kvcache:
            refuse_dense_fp8()
        arrays = (q, k_cache, block_table, cache_seqlens)
        return _dense(*arrays, plan, softmax_scale, causal, out, enable_batch_invariant)
    if causal:
        raise ValueError("causal: expected False with indices, got True")
    if (extra_k_cache is None) != (extra_indices_in_kvcache is None):
        missing = "extra_k_cache" if extra_k_cache is None else "extra_indices_in_kvcache"
        raise ValueError(f"{missing}: expected an array, as the other of the two was given, got None")
    if extra_k_cache is None and extra_topk_length is not None:
        raise ValueError("extra_topk_length: expected None without extra_k_cache, got an array")
    queries = _read_q(q, ("b", "s_q", "h_q"), ("bfloat16",))
    b, s_q, h_q, d_qk = queries.shape
    _check_out(out, queries)
    sink = _read_sink(attn_sink, h_q)
    cache = _read_cache("k_cache", k_cache, d_qk, is_fp8_kvcache)
    sources = [_select(cache, "", indices, topk_length, (b, s_q))]
    if extra_k_cache is not None:
        cache = _read_cache("extra_k_cache", extra_k_cache, d_qk, is_fp8_kvcache)
        sources.append(_select(cache, "extra_", extra_indices_in_kvcache, extra_topk_length, (b, s_q)))
    config = SchedConfig(
        b,
        s_q,
        h_q,
        page_block_size=sources[0].page_block_size,
        h_k=1,
        causal=False,
        is_fp8_kvcache=is_fp8_kvcache,
        topk=sources[0].topk,
        extra_page_block_size=sources[1].page_block_size if sources[1:] else None,
        extra_topk=sources[1].topk if sources[1:] else None,
        enable_batch_invariant=enable_batch_invariant,
    )
    extra = (sources[1].topk, sources[1].lengths) if sources[1:] else (0, None)
    use_plan(*plan, config, sparse_blocks(b, sources[0].topk, sources[0].lengths, *extra), queries)
    scale = d_qk**-0.5 if softmax_scale is None else softmax_scale
    attended, lse = _sparse(queries.values.astype(np.float64), sources, scale)
    _apply_sink(attended, lse, sink)
    return result(attended, queries.dtype, queries, out), like(lse, "float32", queries)


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
    _check_out(out, tokens)
    if is_fp8_kvcache:
        cache = _read_cache("kv", kv, d_qk, True)
    else:
        cache = read(kv, "kv", ("bfloat16",), ("s_kv", 1, d_qk)).values[:, None]  # pages of one token
    source = _select(cache, "", indices, topk_length, (s_q, 1))
    query = tokens.values.astype(np.float64)[:, None]  # one token of as many requests
    attended, lse = _sparse(query, [source], sm_scale)
    _apply_sink(attended, lse, _read_sink(attn_sink, h_q))
    top = np.full(query.shape[:3:2], -np.inf)
    for i in range(len(query)):
        keys = source.keys(i, 0)
        if len(keys):
            top[i] = (sm_scale * (query[i, 0] @ keys.T)).max(axis=1)
    unit = np.log(2.0) if log_base == "2" else 1.0
    logs = (like(x / unit, "float32", tokens) for x in (top, lse[:, :, 0]))
    return result(attended[:, 0], tokens.dtype, tokens, out), *logs


def _check_d_v(name: str, d_v: int) -> None:
    """Check the number of value columns, which is fixed."""
    if d_v != D_V:
        raise ValueError(f"{name}: expected {D_V}, got {d_v}")


def _read_q(q: Any, axes: Shape, dtypes: tuple[str, ...]) -> Array:
    """q as one array; a pair is concatenated."""
    if type(q) is not tuple:
        return read(q, "q", dtypes, (*axes, D_QK))
    first, second = q
    nope = read(first, "q", dtypes, (*axes, [d_qk - D_ROPE for d_qk in D_QK]))
    rope = read(second, "q_rope", (nope.dtype,), (*nope.shape[:-1], D_ROPE))
    parts = [part.values.astype(np.float64) for part in (nope, rope)]
    return nope._replace(values=np.concatenate(parts, axis=-1))


def _read_sink(attn_sink: Any, h_q: int) -> NDArray[np.float64] | None:
    if attn_sink is None:
        return None
    return read(attn_sink, "attn_sink", ("float32",), (h_q,)).values.astype(np.float64)


def _check_out(out: Any, queries: Array) -> None:
    if out is not None:
        read_target(out, "out", (queries.dtype,), (*queries.shape[:-1], D_V))


def _dense(
    q: Any,
    k_cache: Any,
    block_table: Any,
    cache_seqlens: Any,
    plan: tuple[Any, Any],
    softmax_scale: float | None,
    causal: bool,
    out: Any,
    batch_invariant: bool,
) -> tuple[Any, Any]:
    queries = _read_q(q, ("b", "s_q", "h_q"), ("bfloat16", "float16"))
    b, s_q, h_q, d_qk = queries.shape
    axes = ("num_blocks", "page_block_size", "h_kv", d_qk)
    cache = read(k_cache, "k_cache", (queries.dtype,), axes)
    page_block_size, h_kv = cache.shape[1:3]
    if h_q % h_kv:
        raise ValueError(
            f"q: expected h_q to be a multiple of the h_kv of k_cache, got h_q {h_q} and h_kv {h_kv}"
        )
    table = read(block_table, "block_table", INT_DTYPES, (b, "max_blocks"))
    lengths = read(cache_seqlens, "cache_seqlens", INT_DTYPES, (b,))
    _check_out(out, queries)
    config = SchedConfig(b, s_q, h_q, page_block_size, h_kv, causal, enable_batch_invariant=batch_invariant)
    use_plan(*plan, config, dense_blocks(lengths.values), queries)

    query = queries.values.astype(np.float64)
    scale = d_qk**-0.5 if softmax_scale is None else softmax_scale
    group = h_q // h_kv
    attended = np.zeros((b, s_q, h_q, D_V))
    lse = np.full((b, h_q, s_q), np.inf)
    for i in range(b):
        tokens = np.arange(int(lengths.values[i]))
        pages = table.values[i, tokens // page_block_size]
        if pages.size and pages.min() < 0:
            raise IndexError(f"block_table: request {i} has a negative page within its length")
        k = cache.values[pages, tokens % page_block_size].astype(np.float64)  # [length, h_kv, d_qk]
        for j in range(s_q):
            visible = visible_tokens(len(tokens), s_q, j, causal)
            for g in range(h_kv):
                heads = slice(g * group, (g + 1) * group)
                attended[i, j, heads], lse[i, heads, j] = _attend(query[i, j, heads], k[:visible, g], scale)
    return result(attended, queries.dtype, queries, out), like(lse, "float32", queries)


class Source(NamedTuple):
    """A cache that a sparse call reads, and what it reads of it."""

    slots: NDArray[Any]  # [num_blocks * page_block_size, d_qk]
    page_block_size: int
    indices: NDArray[Any]  # [b, s_q, topk]
    lengths: NDArray[Any] | None  # [b]

    @property
    def topk(self) -> int:
        """Columns of the indices."""
        return self.indices.shape[2]

    def keys(self, request: int, token: int) -> NDArray[np.float64]:
        """The keys that a query token attends, in the order of its indices."""
        row = self.indices[request, token]
        if self.lengths is not None:
            row = row[: max(int(self.lengths[request]), 0)]
        return self.slots[row[(row >= 0) & (row < len(self.slots))]].astype(np.float64)


def _select(cache: NDArray[Any], prefix: str, indices: Any, length: Any, rows: tuple[int, int]) -> Source:
    """Read what is selected from the cache `[num_blocks, page_block_size, 1, d_qk]`.

    Args:
        prefix: of the names of the arguments, "" or "extra_".
        rows: leading dimensions of the indices.
    """
    name = "extra_indices_in_kvcache" if prefix else "indices"
    chosen = read(indices, name, INT_DTYPES, (*rows, "topk"))
    lengths = None
    if length is not None:
        lengths = read(length, f"{prefix}topk_length", INT_DTYPES, rows[:1]).values
    return Source(cache.reshape(-1, cache.shape[-1]), cache.shape[1], chosen.values, lengths)


def _read_cache(name: str, k_cache: Any, d_qk: int, is_fp8_kvcache: bool) -> NDArray[Any]:
    """Numbers `[num_blocks, page_block_size, 1, d_qk]` of the cache of a sparse call."""
    layout = "v32" if d_qk == 576 else "model1"
    columns = LAYOUTS[layout].token_bytes if is_fp8_kvcache else d_qk
    dtypes = BYTE_DTYPES if is_fp8_kvcache else ("bfloat16",)
    axes = ("num_blocks", "page_block_size", 1, columns)
    cache = read(k_cache, name, dtypes, axes)
    return dequantize_k_cache(cache.values, layout) if is_fp8_kvcache else cache.values


def _sparse(
    query: NDArray[np.float64], sources: list[Source], scale: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    b, s_q, h_q, _ = query.shape
    attended = np.zeros((b, s_q, h_q, D_V))
    lse = np.full((b, h_q, s_q), np.inf)
    for i in range(b):
        for j in range(s_q):
            keys = np.concatenate([source.keys(i, j) for source in sources])
            attended[i, j], lse[i, :, j] = _attend(query[i, j], keys, scale)
    return attended, lse


def _apply_sink(
    attended: NDArray[np.float64], lse: NDArray[np.float64], sink: NDArray[np.float64] | None
) -> None:
    """Multiply `[b, s_q, h_q, 512]` by what sinks leave of it, in place."""
    if sink is None:
        return
    with np.errstate(over="ignore", invalid="ignore"):
        kept = 1.0 / (1.0 + np.exp(sink[:, None] - lse))  # exp(lse) / (exp(lse) + exp(sink))
    kept[np.isposinf(lse)] = 0.0  # nothing attended: out is 0 whatever the sink
    attended *= kept.transpose(0, 2, 1)[..., None]


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
