"""What rawmla computes, written down in plain NumPy and float64.

`flash_mla_with_kvcache` has the name and the argument order of the GPU function and follows its definition
line by line, with nothing tiled, split or rounded. `plan` is the scheduling plan that the GPU computes, equal
in every number. They are the oracle of the tests and the place to look up what an argument means. They run on
the CPU, need NumPy alone, and are slow on purpose: one request and one query token at a time.

Inputs are NumPy arrays of any float type, `ml_dtypes.bfloat16` included; results are float64.
"""

from __future__ import annotations

from math import isqrt
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "BATCH_INVARIANT_MARK",
    "BATCH_INVARIANT_MAX_PIECES",
    "BATCH_INVARIANT_MIN_BLOCKS",
    "BLOCK_TOKENS",
    "D_V",
    "FIXED_COST_DIVISOR",
    "MAX_FIXED_COST",
    "MAX_SHORT_PART",
    "PLAN_COLUMNS",
    "SHORT_PART_FACTOR",
    "Plan",
    "flash_mla_with_kvcache",
    "get_mla_metadata",
    "plan",
    "visible_tokens",
]

D_V = 512
"""Value columns: V is the first 512 columns of K."""

BLOCK_TOKENS = 64
"""Tokens per block; plans cut requests between blocks only."""

PLAN_COLUMNS = 8
"""Integers per row of a plan."""

MAX_FIXED_COST = 3
FIXED_COST_DIVISOR = 3
"""Each request after the first costs a plan that many blocks besides its own, but no more than a fraction of
a part's share."""

MAX_SHORT_PART = 16
SHORT_PART_FACTOR = 12
"""Parts have at least sqrt(n / 12) blocks for requests of n blocks on average, or 16 if that is less: merging
the pieces of a request costs time too."""

BATCH_INVARIANT_MIN_BLOCKS = 8
BATCH_INVARIANT_MAX_PIECES = 32
"""A batch-invariant plan cuts a request into pieces of 8 blocks, or longer ones so that 32 suffice."""

BATCH_INVARIANT_MARK = 0x62690001
"""Last column of the rows of a batch-invariant plan."""


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
    """Dense MLA decoding over a paged cache.

    Args:
        q: `[b, s_q, h_q, d_qk]`, any strides.
        k_cache: `[num_blocks, page_block_size, h_kv, d_qk]`; head `h` of `q` reads KV head `h // (h_q //
        h_kv)`.
        block_table: integers `[b, max_blocks]`; entry `p` of request `i` is the page that holds its tokens
            `p * page_block_size` and following. Entries past the length are never looked at.
        cache_seqlens: integers `[b]`, tokens per request, 0 allowed.
        head_dim_v: must be 512.
        tile_scheduler_metadata, num_splits, enable_batch_invariant: accepted and ignored; how work is split
            does not change what is computed.
        softmax_scale: factor on the scores, `d_qk ** -0.5` when None.
        causal: see `visible_tokens`.
        out: optional array of the result's shape that receives a copy of the result.
        is_fp8_kvcache, indices, attn_sink, extra_k_cache, extra_indices_in_kvcache, topk_length,
            extra_topk_length: sparse decoding, not defined here yet.

    Returns:
        out: float64 `[b, s_q, h_q, 512]`, `softmax(scale * q @ k.T) @ k[:, :512]`.
        lse: float64 `[b, h_q, s_q]`, natural logarithm of the sum of `exp` of the scaled scores.
        A query row with nothing to attend has out 0 and lse +inf.

    Raises:
        ValueError: shapes that do not fit each other, or head_dim_v other than 512.
        NotImplementedError: an argument of sparse decoding was given.
        IndexError: block_table names a page outside the cache, or is too narrow for a length.
    """
    sparse_arguments = (
        indices,
        attn_sink,
        extra_k_cache,
        extra_indices_in_kvcache,
        topk_length,
        extra_topk_length,
    )
    if is_fp8_kvcache or any(argument is not None for argument in sparse_arguments):
        raise NotImplementedError(
            "the reference covers dense decoding; its sparse arguments come with sparse decoding"
        )
    if head_dim_v != D_V:
        raise ValueError(f"`head_dim_v`: expected {D_V}, got {head_dim_v}")

    query = np.asarray(q).astype(np.float64)
    cache = np.asarray(k_cache)
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
    scale = d_qk**-0.5 if softmax_scale is None else softmax_scale
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
            if visible == 0:
                continue
            for g in range(h_kv):
                heads = slice(g * group, (g + 1) * group)
                keys = k[:visible, g]
                scores = scale * (query[i, j, heads] @ keys.T)  # [group, visible]
                top = scores.max(axis=1, keepdims=True)
                log_sum = top + np.log(np.exp(scores - top).sum(axis=1, keepdims=True))
                result[i, j, heads] = np.exp(scores - log_sum) @ keys[:, :D_V]
                lse[i, heads, j] = log_sum[:, 0]
    if out is not None:
        out[...] = result
    return result, lse


def get_mla_metadata(
    cache_seqlens: ArrayLike,
    num_q_tokens_per_head_k: int,
    num_heads_k: int,
    *,
    sm_count: int = 132,
    enable_batch_invariant: bool = False,
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """What `rawmla.get_mla_metadata` computes for a GPU with `sm_count` multiprocessors: see `plan`.

    Args:
        cache_seqlens: integers `[b]`, tokens per request.
        num_q_tokens_per_head_k: `s_q * h_q // h_kv`.
        num_heads_k: `h_kv`.
        sm_count: 132 is an H100 SXM or H200.
        enable_batch_invariant: cut each request by its own length alone.

    Returns:
        tile_scheduler_metadata: int32 `[num_sm_parts, 8]`, rows in the order of bare tensors.
        num_splits: int32 `[b + 1]`.
    """
    tiles = -(-num_q_tokens_per_head_k // 64) * num_heads_k  # CTAs that one part takes
    made = plan(cache_seqlens, max(sm_count // tiles, 1), enable_batch_invariant)
    return made.tensor_rows, made.num_splits


class Plan(NamedTuple):
    """A scheduling plan: who computes which 64-token blocks.

    Attributes:
        object_rows: int32 `[num_parts, 8]`, rows as a `FlashMLASchedMeta` holds them: begin_req, end_req
            (inclusive), begin_block, end_block (exclusive, of end_req), begin_split, whether the first and
            whether the last request is split, mark.
        tensor_rows: the same in the order of bare tensors: begin_req, begin_block, end_req, end_block,
            begin_split, 0, 0, mark.
        num_splits: int32 `[b + 1]`, exclusive prefix sum of the pieces per request.
    """

    object_rows: NDArray[np.int32]
    tensor_rows: NDArray[np.int32]
    num_splits: NDArray[np.int32]


def plan(cache_seqlens: ArrayLike, num_parts: int, batch_invariant: bool = False) -> Plan:
    """The plan of `rawmla.get_mla_metadata` for a batch, cut into a given number of parts.

    All requests lie on one line, each but the first behind a fixed cost, as its units. A unit is what no cut
    may divide: a block, or in a batch-invariant plan a piece, so that a request's own length decides where it
    is cut. The line is cut into `num_parts` stretches of equal length, of which the last ones may be empty,
    also because a stretch is not made too short; a part computes the units that lie in its stretch.

    Args:
        cache_seqlens: integers `[b]`, tokens per request; one without tokens counts as one block, because
            some part has to write its output.
        num_parts: rows of the plan, at least 1.
        batch_invariant: cut each request into pieces that its own length decides.

    Returns:
        The plan. Rows of parts without work have begin_req b and end_req -1.
    """
    lengths = np.maximum(np.asarray(cache_seqlens, dtype=np.int64), 0)
    b = len(lengths)
    blocks = np.maximum(-(-lengths // BLOCK_TOKENS), 1)
    unit_blocks = np.ones(b, dtype=np.int64)
    if batch_invariant:
        unit_blocks = np.maximum(BATCH_INVARIANT_MIN_BLOCKS, -(-blocks // BATCH_INVARIANT_MAX_PIECES))
    units = -(-blocks // unit_blocks)

    fixed = 0
    if not batch_invariant:
        fixed = min(MAX_FIXED_COST, int(units.sum()) // num_parts // FIXED_COST_DIVISOR)
    line_end = int(units.sum()) + max(b - 1, 0) * fixed
    part_length = max(-(-line_end // num_parts), 1)
    if not batch_invariant and b:
        mean = int(units.sum()) // b
        shortest = isqrt((mean - 1) // SHORT_PART_FACTOR) + 1  # sqrt(mean / factor), rounded up
        part_length = max(part_length, min(shortest, MAX_SHORT_PART))

    stop = np.cumsum(fixed + units) - fixed  # of each request on the line
    start = stop - units  # of its units
    first_part = start // part_length
    last_part = (stop - 1) // part_length
    pieces = units if batch_invariant else last_part - first_part + 1

    object_rows = np.zeros((num_parts, PLAN_COLUMNS), dtype=np.int32)
    for part in range(num_parts):
        begin = part * part_length
        end = min(begin + part_length, line_end)
        requests = np.flatnonzero((start < end) & (stop > begin))  # that have a unit in this part
        row: tuple[int, ...] = (b, -1, 0, 0, 0, 0, 0)
        if begin < end and len(requests):
            first, last = requests[0], requests[-1]
            begin_unit = max(begin - start[first], 0)
            begin_block = begin_unit * unit_blocks[first]
            end_block = min((end - start[last]) * unit_blocks[last], blocks[last])
            begin_split = begin_unit if batch_invariant else part - first_part[first]
            row = (first, last, begin_block, end_block, begin_split, pieces[first] > 1, pieces[last] > 1)
        object_rows[part, :7] = row
        object_rows[part, 7] = BATCH_INVARIANT_MARK if batch_invariant else 0
    tensor_rows = object_rows[:, [0, 2, 1, 3, 4, 5, 6, 7]]
    tensor_rows[:, 5:7] = 0
    num_splits = np.concatenate([[0], np.cumsum(pieces)]).astype(np.int32)
    return Plan(object_rows, tensor_rows, num_splits)
