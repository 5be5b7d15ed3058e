"""The scheduling plan that the GPU computes, equal in every number."""

from __future__ import annotations

from math import isqrt
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..mla import metadata
from ..mla import plan as plans
from ..mla.arguments import refuse_dense_fp8
from ._arrays import INT_DTYPES, Array, read, store

BLOCK_TOKENS = 64
"""Tokens per block; plans cut requests between blocks only."""

PLAN_COLUMNS = 8
"""Integers per row of a plan."""

SM_COUNT = 132
"""Multiprocessors of an H100 SXM or H200."""

MAX_FIXED_COST = 3
FIXED_COST_DIVISOR = 3
"""Each request after the first costs a plan that many blocks besides its own, but no more than a fraction of
a partition's share."""

MAX_SHORT_PART = 16
SHORT_PART_FACTOR = 32
"""Parts have at least sqrt(n / 32) blocks for requests of n blocks on average, or 16 if that is less: merging
the splits of a request costs time too."""

ROWS_PER_IDLE = 8
"""Idle rows of a plan of equal requests are spread among the others when at most one row in 8 is idle."""

BATCH_INVARIANT_MIN_BLOCKS = 8
BATCH_INVARIANT_MAX_SPLITS = 32
"""A batch-invariant plan cuts a request into splits of 8 blocks, or longer ones so that 32 suffice."""

BATCH_INVARIANT_MARK = 0x62690001
"""Last column of the rows of a batch-invariant plan."""


def get_mla_metadata(
    cache_seqlens: Any = None,
    num_q_tokens_per_head_k: int | None = None,
    num_heads_k: int | None = None,
    num_heads_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
    *,
    num_heads_per_head_k: int | None = None,
    enable_batch_invariant: bool = False,
    out: Any = None,
    sm_count: int = SM_COUNT,
) -> tuple[Any, Any]:
    """Compute the plan of `rawmla.get_mla_metadata` for a GPU with `sm_count` multiprocessors: see `plan`.

    132 multiprocessors are an H100 SXM or H200. Every request of a sparse call has `ceil(topk / 64)` blocks.
    """
    batch_invariant = enable_batch_invariant
    if is_fp8_kvcache and topk is None:
        refuse_dense_fp8()
    if num_heads_per_head_k is not None:
        if num_q_tokens_per_head_k is not None:
            raise TypeError(
                "num_heads_per_head_k: expected None when num_q_tokens_per_head_k, its newer name, is given, "
                f"got {num_heads_per_head_k!r}"
            )
        num_q_tokens_per_head_k = num_heads_per_head_k
    if all(x is None for x in (cache_seqlens, num_q_tokens_per_head_k, num_heads_k, num_heads_q, topk, out)):
        return plans.FlashMLASchedMeta(enable_batch_invariant=batch_invariant), None

    lengths = read(cache_seqlens, "cache_seqlens", INT_DTYPES, ("b",))
    b = lengths.shape[0]
    if num_heads_k is None or num_q_tokens_per_head_k is None:
        raise TypeError("num_heads_k, num_q_tokens_per_head_k: expected an int with cache_seqlens, got None")
    h_kv, rows_q = num_heads_k, num_q_tokens_per_head_k * num_heads_k
    h_q = rows_q if num_heads_q is None else num_heads_q
    if h_q % h_kv or rows_q % h_q:
        raise ValueError(
            "num_heads_q: expected a multiple of num_heads_k that divides num_q_tokens_per_head_k * "
            f"num_heads_k = {rows_q}, got {h_q} with num_heads_k = {h_kv}"
        )
    if topk is None:
        blocks, num_parts = dense_blocks(lengths.values), dense_num_parts(rows_q // h_q, h_q, h_kv, sm_count)
    else:
        if h_kv != 1:
            raise ValueError(f"num_heads_k: expected 1 with topk, got {h_kv}")
        blocks = sparse_blocks(b, topk)
        num_parts = sparse_num_parts(rows_q // h_q, h_q, sm_count)

    is_object = plans.is_plan_object(out)
    if is_object:
        batch_invariant = metadata.batch_invariant_of(out, batch_invariant)
        metadata.check_topk_of(out, topk)
    if out is None or is_object and metadata.is_empty(out):
        made = plan_blocks(blocks, num_parts, batch_invariant)
        tiles = lengths.result(made.object_rows if is_object else made.tensor_rows, "int32")
        splits = lengths.result(made.num_splits, "int32")
    else:
        tiles, splits = metadata.given_arrays(out)
        check_plan(tiles, splits, b, ("out[0]", "out[1]"))
        made = plan_blocks(blocks, len(tiles), batch_invariant)
        store(tiles, ..., made.object_rows if is_object else made.tensor_rows)
        store(splits, slice(b + 1), made.num_splits)
        store(splits, slice(b + 1, None), made.num_splits[-1:])  # requests of a larger batch have no splits
    if not is_object:
        return tiles, splits
    out.tile_scheduler_metadata, out.num_splits = tiles, splits
    metadata.note_batch_invariant(out, batch_invariant)
    return out, None


def use_plan(
    given: Any, num_splits: Any, config: plans.SchedConfig, blocks: NDArray[np.int64], queries: Array
) -> None:
    """Check the plan of a decode call, and fill it if it is an empty object, with arrays like `queries`.

    `given` is the tile_scheduler_metadata of the call; `blocks` are 64-token blocks per request.
    """
    if given is None:
        return
    if not plans.is_plan_object(given):
        if num_splits is None:
            plans.refuse_no_splits()
        check_plan(given, num_splits, config.b)
        return
    if num_splits is not None:
        plans.refuse_splits(num_splits)
    if getattr(given, "enable_batch_invariant", False):  # objects of other libraries lack it
        config.enable_batch_invariant = True
    if given.have_initialized:
        plans.check_config(given.config, plans.fields_of(config))
    if not config.b or not config.s_q:
        return
    arrays = None
    if given.tile_scheduler_metadata is not None:
        check_plan(given.tile_scheduler_metadata, given.num_splits, config.b)
    else:
        room = None
        if config.topk is None:
            num_parts = dense_num_parts(config.s_q, config.h_q, config.h_k, SM_COUNT)
        else:
            num_parts = sparse_num_parts(config.s_q, config.h_q, SM_COUNT)
            room = int(sparse_blocks(1, config.topk, None, config.extra_topk or 0)[0])
        made = plan_blocks(blocks, num_parts, config.enable_batch_invariant, room)
        arrays = queries.result(made.object_rows, "int32"), queries.result(made.num_splits, "int32")
    plans.mark_plan(given, config, arrays)


def check_plan(
    tiles: Any,
    num_splits: Any,
    b: int,
    names: tuple[str, str] = ("tile_scheduler_metadata", "num_splits"),
) -> None:
    """Check the two arrays of a plan for `b` requests."""
    read(tiles, names[0], INT_DTYPES, ("num_sm_parts", PLAN_COLUMNS))
    splits = read(num_splits, names[1], INT_DTYPES, ("n",))
    if len(splits.values) <= b:
        raise ValueError(
            f"{names[1]}: expected shape [n] with n >= b + 1 = {b + 1}, got {list(splits.shape)}"
        )


def dense_num_parts(s_q: int, h_q: int, h_kv: int, sm_count: int) -> int:
    """Rows of a dense call's plan: a CTA computes up to 64 rows of one KV head."""
    return max(sm_count // (-(-(s_q * h_q // h_kv) // 64) * h_kv), 1)


def sparse_num_parts(s_q: int, h_q: int, sm_count: int = SM_COUNT) -> int:
    """Rows of a sparse call's plan: a CTA computes up to 64 heads of one query token."""
    return max(sm_count // (s_q * -(-h_q // 64)), 1)


def dense_blocks(cache_seqlens: ArrayLike) -> NDArray[np.int64]:
    """Blocks of 64 tokens per request, at least 1: some partition has to write the output of an empty one."""
    lengths = np.maximum(np.asarray(cache_seqlens, dtype=np.int64), 0)
    return np.maximum(-(-lengths // BLOCK_TOKENS), 1)


def sparse_blocks(
    b: int,
    topk: int,
    topk_length: ArrayLike | None = None,
    extra_topk: int = 0,
    extra_topk_length: ArrayLike | None = None,
) -> NDArray[np.int64]:
    """Blocks of 64 indices per request of a sparse call; the blocks of the extra cache follow the main ones.

    Args:
        b: requests.
        topk, extra_topk: columns of `indices` and of `extra_indices_in_kvcache`.
        topk_length, extra_topk_length: integers `[b]`, how many of the columns count, cut to 0 and their
            number; None for all.

    Returns:
        int64 `[b]`, at least 1: a request without any index still has its output written.
    """
    blocks = np.zeros(b, dtype=np.int64)
    for width, length in ((topk, topk_length), (extra_topk, extra_topk_length)):
        count = np.full(b, width) if length is None else np.clip(np.asarray(length, np.int64), 0, width)
        blocks += -(-count // BLOCK_TOKENS)
    return np.maximum(blocks, 1)


class Plan(NamedTuple):
    """A scheduling plan: who computes which 64-token blocks.

    Attributes:
        object_rows: int32 `[num_parts, 8]`, rows as a `FlashMLASchedMeta` holds them: begin_req, end_req
            (inclusive), begin_block, end_block (exclusive, of end_req), begin_split, whether the first and
            whether the last request is split, mark.
        tensor_rows: the same in the order of bare tensors: begin_req, begin_block, end_req, end_block,
            begin_split, 0, 0, mark.
        num_splits: int32 `[b + 1]`, exclusive prefix sum of the splits per request.
    """

    object_rows: NDArray[np.int32]
    tensor_rows: NDArray[np.int32]
    num_splits: NDArray[np.int32]


def plan(cache_seqlens: ArrayLike, num_parts: int, batch_invariant: bool = False) -> Plan:
    """The plan of `rawmla.get_mla_metadata` for a dense batch, by its `[b]` lengths; see `plan_blocks`."""
    return plan_blocks(dense_blocks(cache_seqlens), num_parts, batch_invariant)


def plan_blocks(
    blocks: ArrayLike, num_parts: int, batch_invariant: bool = False, room: int | None = None
) -> Plan:
    """The plan for requests of given numbers of blocks; see `sparse_blocks` for the blocks of a sparse batch.

    The units of all requests form one line, with a fixed cost before each request but the first. A unit is
    what no cut may divide: a block, or in a batch-invariant plan a split, so that a request's own length
    decides where it is cut. The line is cut into at most `num_parts` stretches of equal length, fewer if they
    would be too short, and a partition computes the units in its stretch. Rows without a stretch are idle:
    the last ones. Several requests of equal length are moved apart so that cuts fall between them, if no
    partition gets longer: each gets partitions of its own, or each partition whole requests. If few rows are
    idle then, they are spread evenly, so that idle SMs are not neighbours.

    Args:
        blocks: integers `[b]`, 64-token blocks per request, at least 1.
        num_parts: rows of the plan, at least 1.
        batch_invariant: cut each request into splits whose size its own number of blocks decides, or `room`.
        room: blocks that the `topk` and `extra_topk` of a sparse call leave room for; None in dense decoding.

    Returns:
        The plan. Rows of partitions without work have begin_req b and end_req -1.
    """
    blocks = np.asarray(blocks, dtype=np.int64)
    b = len(blocks)
    unit_blocks = np.ones(b, dtype=np.int64)
    if batch_invariant:
        most = blocks if room is None else np.full(b, room)
        unit_blocks = np.maximum(BATCH_INVARIANT_MIN_BLOCKS, -(-most // BATCH_INVARIANT_MAX_SPLITS))
    units = -(-blocks // unit_blocks)

    fixed = 0
    if not batch_invariant:
        fixed = min(MAX_FIXED_COST, int(units.sum()) // num_parts // FIXED_COST_DIVISOR)
    line_end = int(units.sum()) + max(b - 1, 0) * fixed
    part_length = max(-(-line_end // num_parts), 1)
    moved_apart = None  # where each request then begins
    if not batch_invariant and b:
        mean = int(units.sum()) // b
        shortest = isqrt((mean - 1) // SHORT_PART_FACTOR) + 1  # sqrt(mean / factor), rounded up
        shortest = min(shortest, MAX_SHORT_PART)
        part_length = max(part_length, shortest)
        if b > 1 and (units == units[0]).all():
            group = -(-b // num_parts)  # requests in a part
            if group > 1:
                apart = group * mean + (group - 1) * fixed
                span = apart
            else:
                apart = max(-(-mean // (num_parts // b)), shortest)
                span = -(-mean // apart) * apart
            if apart <= part_length:
                part_length = apart
                request = np.arange(b)
                moved_apart = request // group * span + request % group * (mean + fixed)

    stop = np.cumsum(fixed + units) - fixed  # of each request on the line
    if moved_apart is not None:
        stop = moved_apart + units
        line_end = int(stop[-1])
    start = stop - units  # of its units
    first_part = start // part_length
    last_part = (stop - 1) // part_length
    splits = units if batch_invariant else last_part - first_part + 1

    busy = -(-line_end // part_length)
    idle = num_parts - busy
    row_of_part = list(range(num_parts))
    if moved_apart is not None and 0 < idle * ROWS_PER_IDLE <= num_parts:
        gap = num_parts // idle
        idle_rows = range(gap - 1, gap * idle, gap)
        row_of_part = [row for row in range(num_parts) if row not in idle_rows] + list(idle_rows)

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
            row = (first, last, begin_block, end_block, begin_split, splits[first] > 1, splits[last] > 1)
        object_rows[row_of_part[part], :7] = row
        object_rows[row_of_part[part], 7] = BATCH_INVARIANT_MARK if batch_invariant else 0
    tensor_rows = object_rows[:, [0, 2, 1, 3, 4, 5, 6, 7]]
    tensor_rows[:, 5:7] = 0
    num_splits = np.concatenate([[0], np.cumsum(splits)]).astype(np.int32)
    return Plan(object_rows, tensor_rows, num_splits)
