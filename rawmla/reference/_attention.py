"""Attention over a paged cache, written as it is defined."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..call.checks import as_bool, as_count, as_softmax_scale
from ._arrays import (
    BYTE_DTYPES,
    INT_DTYPES,
    Array,
    check_dtype,
    check_target,
    check_vector,
    is_tensor,
    like,
    read,
    store,
)
from ._cache import D_V, LAYOUTS, dequantize_k_cache
from ._plan import SchedConfig, dense_blocks, refuse_dense_fp8, sparse_blocks, use_plan

D_QK = (576, 512)
"""Columns of K."""
D_ROPE = 64
"""The last of them; in q they may be an array of their own."""


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
    """MLA decoding over a paged cache: dense, or sparse when `indices` is given.

    Dense, a query token attends the tokens of its request (all of them, or with `causal` those up to its
    own position). Sparse, it attends the cache slots that its row of `indices` names, each as often as it is
    named, and those of the extra cache in the same softmax.

    Args:
        q: `[b, s_q, h_q, d_qk]`, d_qk 576 or 512; or a tuple of `[b, s_q, h_q, d_qk - 64]` and, its RoPE
            columns, `[b, s_q, h_q, 64]`.
        k_cache: dense `[num_blocks, page_block_size, h_kv, d_qk]`, page_block_size 16, 32 or a multiple of
            64; head `h` of `q` reads KV head `h // (h_q // h_kv)`. Sparse the same with h_kv = 1 and any
            page_block_size, or with `is_fp8_kvcache` bytes `[num_blocks, page_block_size, 1, n]`, n 656 for
            d_qk 576 and 584 for d_qk 512.
        block_table: dense: integers `[b, max_blocks]`; entry `p` of request `i` is the page that holds its
            tokens `p * page_block_size` and following. Entries past the length are never looked at.
            Sparse: ignored.
        cache_seqlens: dense: integers `[b]`, tokens per request, 0 allowed. Sparse: ignored.
        head_dim_v: must be 512.
        tile_scheduler_metadata, num_splits: a plan of `get_mla_metadata`, or None. An empty
            `FlashMLASchedMeta` is filled, and refused by later calls of another configuration. How work is
            split does not change what is computed.
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
        out: optional array of the shape of the result that receives it. A tensor is also what is returned.
        enable_batch_invariant: part of a plan's configuration; it does not change what is computed.

    Returns:
        out: `[b, s_q, h_q, 512]`, `softmax(scale * q @ k.T) @ k[:, :512]`; float64, or a tensor of q's
        dtype.
        lse: `[b, h_q, s_q]`, natural logarithm of the sum of `exp` of the scaled scores; a sink does
        not change it. float64, or a float32 tensor.
        A query row with nothing to attend has out 0 and lse +inf.

    Raises:
        TypeError, ValueError: those of `rawmla.flash_mla_with_kvcache`, alignment and strides aside.
        NotImplementedError: `is_fp8_kvcache` without `indices`.
        IndexError: block_table names a page outside the cache, or is too narrow for a length.
    """
    _check_d_v("head_dim_v", head_dim_v)
    causal = as_bool("causal", causal)
    is_fp8_kvcache = as_bool("is_fp8_kvcache", is_fp8_kvcache)
    batch_invariant = as_bool("enable_batch_invariant", enable_batch_invariant)
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
        return _dense(*arrays, plan, softmax_scale, causal, out, batch_invariant)
    if causal:
        raise ValueError("causal: expected False with indices, got True")
    if (extra_k_cache is None) != (extra_indices_in_kvcache is None):
        missing = "extra_k_cache" if extra_k_cache is None else "extra_indices_in_kvcache"
        raise ValueError(f"{missing}: expected an array, as the other of the two was given, got None")
    if extra_k_cache is None and extra_topk_length is not None:
        raise ValueError("extra_topk_length: expected None without extra_k_cache, got an array")
    queries = _read_q(q, ("b", "s_q", "h_q", "d_qk"), ("bfloat16",), " with indices")
    b, s_q, h_q, d_qk = queries.shape
    target, sink = _Target.of(out, queries), _read_sink(attn_sink, h_q)
    rows, axes = (b, s_q), ("b", "b and s_q are those of q")
    cache = _read_cache("k_cache", k_cache, d_qk, is_fp8_kvcache)
    sources = [_select(cache, "", indices, topk_length, rows, axes)]
    if extra_k_cache is not None:
        cache = _read_cache("extra_k_cache", extra_k_cache, d_qk, is_fp8_kvcache)
        sources.append(_select(cache, "extra_", extra_indices_in_kvcache, extra_topk_length, rows, axes))
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
        enable_batch_invariant=batch_invariant,
    )
    extra = (sources[1].topk, sources[1].lengths) if sources[1:] else (0, None)
    use_plan(*plan, config, sparse_blocks(b, sources[0].topk, sources[0].lengths, *extra), queries)
    scale = d_qk**-0.5 if softmax_scale is None else softmax_scale
    result, lse = _sparse(queries.values.astype(np.float64), sources, scale)
    _apply_sink(result, lse, sink)
    return target.receive(result), like(lse, "float32", queries)


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
    """Sparse prefill: every query token attends the rows of kv that its indices name, each as often as named.

    Args:
        q: `[s_q, h_q, d_qk]`, d_qk 576 or 512; or a tuple of `[s_q, h_q, d_qk - 64]` and, its RoPE columns,
            `[s_q, h_q, 64]`.
        kv: `[s_kv, 1, d_qk]`, or with `is_fp8_kvcache` the quantised `k_cache` of `flash_mla_with_kvcache`.
        indices: integers `[s_q, 1, topk]`, rows of kv, or slots of the cache. One outside is skipped.
        sm_scale: factor on the scores.
        d_v: must be 512.
        attn_sink: `[h_q]`; multiplies a head's out by `exp(lse) / (exp(lse) + exp(sink))`, for a natural lse.
        topk_length: integers `[s_q]`, how many of a token's indices count; None for all.
        out: optional array of the shape of the result that receives it. A tensor is also what is returned.
        log_base: "2" or "e", of max_logits and lse.
        is_fp8_kvcache: kv is quantised.
        enable_batch_invariant: accepted and ignored; a token's result never depends on other tokens here.

    Returns:
        out: `[s_q, h_q, 512]`, `softmax(sm_scale * q @ k.T) @ k[:, :512]`; float64, or a bfloat16 tensor.
        max_logits: `[s_q, h_q]`, the largest scaled score, times log2(e) in base 2; float64, or a float32
        tensor.
        lse: `[s_q, h_q]`, logarithm of the sum of `exp` of the scaled scores; a sink does not change
        it. float64, or a float32 tensor.
        A query token without a valid index has out 0, max_logits -inf and lse +inf.

    Raises:
        TypeError, ValueError: those of `rawmla.flash_mla_sparse_fwd`, alignment and strides aside.
    """
    _check_d_v("d_v", d_v)
    sm_scale = as_softmax_scale(sm_scale, "sm_scale", "a float")
    if not isinstance(log_base, str):
        raise TypeError(f"log_base: expected a str, got {type(log_base).__name__}")
    if log_base not in ("2", "e"):
        raise ValueError(f"log_base: expected '2' or 'e', got {log_base!r}")
    is_fp8_kvcache = as_bool("is_fp8_kvcache", is_fp8_kvcache)
    as_bool("enable_batch_invariant", enable_batch_invariant)
    tokens = _read_q(q, ("s_q", "h_q", "d_qk"), ("bfloat16",))
    s_q, h_q, d_qk = tokens.shape
    target = _Target.of(out, tokens)
    cache = _read_cache("kv", kv, d_qk, True) if is_fp8_kvcache else _read_rows(kv, d_qk)
    source = _select(cache, "", indices, topk_length, (s_q, 1), ("s_q", "s_q is that of q"))
    query = tokens.values.astype(np.float64)[:, None]  # one token of as many requests
    result, lse = _sparse(query, [source], sm_scale)
    _apply_sink(result, lse, _read_sink(attn_sink, h_q))
    top = np.full(query.shape[:3:2], -np.inf)
    for i in range(len(query)):
        keys = source.keys(i, 0)
        if len(keys):
            top[i] = (sm_scale * (query[i, 0] @ keys.T)).max(axis=1)
    result, lse = result[:, 0], lse[:, :, 0]
    unit = np.log(2.0) if log_base == "2" else 1.0
    return target.receive(result), like(top / unit, "float32", tokens), like(lse / unit, "float32", tokens)


def _check_d_v(name: str, d_v: Any) -> None:
    """The number of value columns is a fixed one."""
    if as_count(name, d_v) != D_V:
        raise ValueError(f"{name}: expected {D_V}, got {d_v}")


def _read_q(q: Any, axes: tuple[str, ...], dtypes: tuple[str, ...], note: str = "") -> Array:
    """q as one array; a pair is put together."""
    is_pair = type(q) is tuple
    if is_pair and len(q) != 2:
        raise ValueError(f"q: expected an array or a pair (q_nope, q_rope), got a tuple of {len(q)}")
    queries = read(q[0] if is_pair else q, "q")
    check_dtype("q", queries, dtypes, note)
    shape = queries.shape
    if len(shape) != len(axes):
        raise ValueError(f"q: expected shape [{', '.join(axes)}], got {list(shape)}")
    if is_pair:
        if shape[-1] + D_ROPE not in D_QK:
            raise ValueError(
                "q: expected a last dimension of 512 or 448 in the first array of a pair, got shape "
                f"{list(shape)}"
            )
        rope = read(q[1], "q_rope")
        check_dtype("q_rope", rope, (queries.dtype,), ", that of q")
        if rope.shape != (*shape[:-1], D_ROPE):
            raise ValueError(f"q_rope: expected shape {[*shape[:-1], D_ROPE]}, got {list(rope.shape)}")
        parts = [part.values.astype(np.float64) for part in (queries, rope)]
        queries = queries._replace(values=np.concatenate(parts, axis=-1))
    elif shape[-1] not in D_QK:
        raise ValueError(f"q: expected a last dimension (d_qk) of 576 or 512, got shape {list(shape)}")
    if not shape[-2]:
        raise ValueError(f"q: expected at least 1 head, got shape {list(shape)}")
    return queries


def _read_sink(attn_sink: Any, h_q: int) -> NDArray[np.float64] | None:
    if attn_sink is None:
        return None
    sink = read(attn_sink, "attn_sink")
    check_vector("attn_sink", sink, h_q, "h_q is that of q", ("float32",))
    return sink.values.astype(np.float64)


class _Target(NamedTuple):
    """Where the attention output goes."""

    out: Any
    queries: Array

    @classmethod
    def of(cls, out: Any, queries: Array) -> _Target:
        if out is not None:
            check_target(out, "out")
            given = read(out, "out")
            check_dtype("out", given, (queries.dtype,), ", that of q")
            if given.shape != (*queries.shape[:-1], D_V):
                raise ValueError(f"out: expected shape {[*queries.shape[:-1], D_V]}, got {list(given.shape)}")
        return cls(out, queries)

    def receive(self, result: NDArray[np.float64]) -> Any:
        """What the function returns."""
        if self.out is not None:
            store(self.out, ..., result)
            if is_tensor(self.out):
                return self.out
        return like(result, self.queries.dtype, self.queries)


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
    queries = _read_q(q, ("b", "s_q", "h_q", "d_qk"), ("bfloat16", "float16"))
    b, s_q, h_q, d_qk = queries.shape
    cache = read(k_cache, "k_cache")
    check_dtype("k_cache", cache, (queries.dtype,), ", that of q")
    shape = cache.shape
    if len(shape) != 4:
        raise ValueError(
            f"k_cache: expected shape [num_blocks, page_block_size, h_kv, d_qk], got {list(shape)}"
        )
    num_blocks, page_block_size, h_kv, _ = shape
    if shape[3] != d_qk:
        raise ValueError(f"k_cache: expected a last dimension of {d_qk}, that of q, got shape {list(shape)}")
    if not page_block_size or page_block_size % 64 and page_block_size not in (16, 32):
        raise ValueError(
            "k_cache: expected a page_block_size of 16, 32 or a multiple of 64, got "
            f"{page_block_size} in shape {list(shape)}"
        )
    if not num_blocks:
        raise ValueError(f"k_cache: expected at least 1 block, got shape {list(shape)}")
    if not h_kv or h_q % h_kv:
        raise ValueError(
            f"q: expected h_q to be a positive multiple of the h_kv of k_cache, got h_q {h_q} and h_kv {h_kv}"
        )
    table, lengths = read(block_table, "block_table"), read(cache_seqlens, "cache_seqlens")
    check_dtype("block_table", table, INT_DTYPES)
    if len(table.shape) != 2 or table.shape[0] != b:
        raise ValueError(
            f"block_table: expected shape [{b}, max_blocks] (b is that of q), got {list(table.shape)}"
        )
    check_vector("cache_seqlens", lengths, b, "b is that of q")
    target = _Target.of(out, queries)
    config = SchedConfig(b, s_q, h_q, page_block_size, h_kv, causal, enable_batch_invariant=batch_invariant)
    use_plan(*plan, config, dense_blocks(lengths.values), queries)

    query = queries.values.astype(np.float64)
    scale = d_qk**-0.5 if softmax_scale is None else softmax_scale
    group = h_q // h_kv
    result = np.zeros((b, s_q, h_q, D_V))
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
                result[i, j, heads], lse[i, heads, j] = _attend(query[i, j, heads], k[:visible, g], scale)
    return target.receive(result), like(lse, "float32", queries)


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


def _select(
    cache: NDArray[Any], prefix: str, indices: Any, length: Any, rows: tuple[int, int], axes: tuple[str, str]
) -> Source:
    """Check what is selected from the cache `[num_blocks, page_block_size, 1, d_qk]`.

    Args:
        prefix: of the names of the arguments, "" or "extra_".
        rows: leading dimensions of the indices.
        axes: the name of the first of them, and what the error texts say of both.
    """
    name = "extra_indices_in_kvcache" if prefix else "indices"
    chosen = read(indices, name)
    check_dtype(name, chosen, INT_DTYPES)
    if len(chosen.shape) != 3 or chosen.shape[:2] != rows or not chosen.shape[2]:
        raise ValueError(
            f"{name}: expected shape [{rows[0]}, {rows[1]}, topk] ({axes[1]}) with topk at least 1, got "
            f"{list(chosen.shape)}"
        )
    lengths = None
    if length is not None:
        counts = read(length, f"{prefix}topk_length")
        check_vector(f"{prefix}topk_length", counts, rows[0], f"{axes[0]} is that of q")
        lengths = counts.values
    return Source(cache.reshape(-1, cache.shape[-1]), cache.shape[1], chosen.values, lengths)


def _read_cache(name: str, k_cache: Any, d_qk: int, is_fp8_kvcache: bool) -> NDArray[Any]:
    """Check the cache of a sparse call; returns its numbers `[num_blocks, page_block_size, 1, d_qk]`."""
    cache = read(k_cache, name)
    layout = "v32" if d_qk == 576 else "model1"
    columns = LAYOUTS[layout].token_bytes if is_fp8_kvcache else d_qk
    wanted = BYTE_DTYPES if is_fp8_kvcache else ("bfloat16",)
    check_dtype(name, cache, wanted, f" with is_fp8_kvcache={is_fp8_kvcache}")
    shape = cache.shape
    if len(shape) != 4 or shape[2:] != (1, columns):
        raise ValueError(
            f"{name}: expected shape [num_blocks, page_block_size, 1, {columns}] for this d_qk of q, got "
            f"{list(shape)}"
        )
    if not shape[0] or not shape[1]:
        raise ValueError(f"{name}: expected at least 1 block of at least 1 token, got shape {list(shape)}")
    return dequantize_k_cache(cache.values, layout) if is_fp8_kvcache else cache.values


def _read_rows(kv: Any, d_qk: int) -> NDArray[Any]:
    """Check the bf16 kv of a prefill call; returns it as a cache of pages of one token."""
    rows = read(kv, "kv")
    check_dtype("kv", rows, ("bfloat16",), " with is_fp8_kvcache=False")
    shape = rows.shape
    if len(shape) != 3 or shape[1:] != (1, d_qk):
        raise ValueError(f"kv: expected shape [s_kv, 1, {d_qk}] (d_qk is that of q), got {list(shape)}")
    if not shape[0]:
        raise ValueError(f"kv: expected at least 1 token, got shape {list(shape)}")
    return rows.values[:, None]


def _sparse(
    query: NDArray[np.float64], sources: list[Source], scale: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    b, s_q, h_q, _ = query.shape
    result = np.zeros((b, s_q, h_q, D_V))
    lse = np.full((b, h_q, s_q), np.inf)
    for i in range(b):
        for j in range(s_q):
            keys = np.concatenate([source.keys(i, j) for source in sources])
            result[i, j], lse[i, :, j] = _attend(query[i, j], keys, scale)
    return result, lse


def _apply_sink(
    result: NDArray[np.float64], lse: NDArray[np.float64], sink: NDArray[np.float64] | None
) -> None:
    """Multiply `[b, s_q, h_q, 512]` by what sinks leave of it, in place."""
    if sink is None:
        return
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
