"""The scheduling plan that the GPU computes, equal in every number."""

from __future__ import annotations

from math import isqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

BLOCK_TOKENS = 64
"""Tokens per block; plans cut requests between blocks only."""

PLAN_COLUMNS = 8
"""Integers per row of a plan."""

MAX_FIXED_COST = 3
FIXED_COST_DIVISOR = 3
"""Each request after the first costs a plan that many blocks besides its own, but no more than a fraction of
a part's share."""

MAX_SHORT_PART = 16
SHORT_PART_FACTOR = 32
"""Parts have at least sqrt(n / 32) blocks for requests of n blocks on average, or 16 if that is less: merging
the pieces of a request costs time too."""

ROWS_PER_IDLE = 8
"""Idle rows of a plan of equal requests lie between the others when there is no more than one for so many
rows."""

BATCH_INVARIANT_MIN_BLOCKS = 8
BATCH_INVARIANT_MAX_PIECES = 32
"""A batch-invariant plan cuts a request into pieces of 8 blocks, or longer ones so that 32 suffice."""

BATCH_INVARIANT_MARK = 0x62690001
"""Last column of the rows of a batch-invariant plan."""


def get_mla_metadata(
    cache_seqlens: ArrayLike,
    num_q_tokens_per_head_k: int,
    num_heads_k: int,
    num_heads_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
    *,
    sm_count: int = 132,
    enable_batch_invariant: bool = False,
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """What `rawmla.get_mla_metadata` computes for a GPU with `sm_count` multiprocessors: see `plan`.

    Args:
        cache_seqlens: integers `[b]`, tokens per request. With `topk` only their number counts.
        num_q_tokens_per_head_k: `s_q * h_q // h_kv`.
        num_heads_k: `h_kv`.
        num_heads_q: `h_q`; None means `num_q_tokens_per_head_k * num_heads_k`, that is, s_q = 1.
        is_fp8_kvcache: accepted and ignored; the plan is the same.
        topk: indices per query token of a sparse call. Every request then has `ceil(topk / 64)` blocks.
        sm_count: 132 is an H100 SXM or H200.
        enable_batch_invariant: cut each request by its own length alone.

    Returns:
        tile_scheduler_metadata: int32 `[num_sm_parts, 8]`, rows in the order of bare tensors.
        num_splits: int32 `[b + 1]`.
    """
    if topk is None:
        tiles = -(-num_q_tokens_per_head_k // 64) * num_heads_k  # CTAs that one part takes
        made = plan(cache_seqlens, max(sm_count // tiles, 1), enable_batch_invariant)
    else:
        h_q = num_heads_q or num_q_tokens_per_head_k * num_heads_k
        s_q = num_q_tokens_per_head_k * num_heads_k // h_q
        blocks = sparse_blocks(len(np.asarray(cache_seqlens)), topk)
        made = plan_blocks(blocks, sparse_num_parts(s_q, h_q, sm_count), enable_batch_invariant)
    return made.tensor_rows, made.num_splits


def sparse_num_parts(s_q: int, h_q: int, sm_count: int = 132) -> int:
    """Rows of a sparse call's plan: a CTA computes up to 64 heads of one query token."""
    return max(sm_count // (s_q * -(-h_q // 64)), 1)


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
        num_splits: int32 `[b + 1]`, exclusive prefix sum of the pieces per request.
    """

    object_rows: NDArray[np.int32]
    tensor_rows: NDArray[np.int32]
    num_splits: NDArray[np.int32]


def plan(cache_seqlens: ArrayLike, num_parts: int, batch_invariant: bool = False) -> Plan:
    """The plan of `rawmla.get_mla_metadata` for a dense batch, cut into a given number of parts.

    Args:
        cache_seqlens: integers `[b]`, tokens per request; one without tokens counts as one block, because
            some part has to write its output.
        num_parts: rows of the plan, at least 1.
        batch_invariant: cut each request into pieces that its own length decides.

    Returns:
        The plan. Rows of parts without work have begin_req b and end_req -1.
    """
    lengths = np.maximum(np.asarray(cache_seqlens, dtype=np.int64), 0)
    return plan_blocks(np.maximum(-(-lengths // BLOCK_TOKENS), 1), num_parts, batch_invariant)


def plan_blocks(
    blocks: ArrayLike, num_parts: int, batch_invariant: bool = False, room: int | None = None
) -> Plan:
    """The plan for requests of given numbers of blocks; see `sparse_blocks` for those of a sparse batch.

    All requests lie on one line, each but the first behind a fixed cost, as its units. A unit is what no cut
    may divide: a block, or in a batch-invariant plan a piece, so that a request's own length decides where it
    is cut. The line is cut into stretches of equal length, `num_parts` or fewer, also because a stretch is
    not made too short; a part computes the units that lie in its stretch. Rows without a stretch are idle:
    the last ones.
    Several requests of equal length are moved apart so that cuts fall between them, if no part gets longer:
    each gets parts of its own, or each part whole requests. If few rows are idle then, one follows every so
    many others, so that the SMs that do nothing are not neighbours.

    Args:
        blocks: integers `[b]`, 64-token blocks per request, at least 1.
        num_parts: rows of the plan, at least 1.
        batch_invariant: cut each request into pieces whose size its own number of blocks decides, or `room`.
        room: blocks that the `topk` and `extra_topk` of a sparse call leave room for; None in dense decoding.

    Returns:
        The plan. Rows of parts without work have begin_req b and end_req -1.
    """
    blocks = np.asarray(blocks, dtype=np.int64)
    b = len(blocks)
    unit_blocks = np.ones(b, dtype=np.int64)
    if batch_invariant:
        most = blocks if room is None else np.full(b, room)
        unit_blocks = np.maximum(BATCH_INVARIANT_MIN_BLOCKS, -(-most // BATCH_INVARIANT_MAX_PIECES))
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
    pieces = units if batch_invariant else last_part - first_part + 1

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
            row = (first, last, begin_block, end_block, begin_split, pieces[first] > 1, pieces[last] > 1)
        object_rows[row_of_part[part], :7] = row
        object_rows[row_of_part[part], 7] = BATCH_INVARIANT_MARK if batch_invariant else 0
    tensor_rows = object_rows[:, [0, 2, 1, 3, 4, 5, 6, 7]]
    tensor_rows[:, 5:7] = 0
    num_splits = np.concatenate([[0], np.cumsum(pieces)]).astype(np.int32)
    return Plan(object_rows, tensor_rows, num_splits)
