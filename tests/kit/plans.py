"""Scheduling plans on the host: what a plan must satisfy, and plans of an engine's own making.

A plan row is a partition's share of the line "all 64-token blocks of request 0, then of request 1, ...". What
one partition computes of a request is a split; a request without tokens has one empty split, which some
partition has to visit so that its output gets written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BLOCK_TOKENS = 64

LAYOUTS = ("object", "tensors")
"""Row layouts: inside a `FlashMLASchedMeta`, and of bare tensors."""

IDLE_FORMS = ("past_end", "crossed", "negative")
"""Ways to write an idle row: begin_req >= b; begin_req > end_req; begin_req < 0."""

# Columns of begin_req, end_req, begin_block, end_block, begin_split.
_COLUMNS = {"object": (0, 1, 2, 3, 4), "tensors": (0, 2, 1, 3, 4)}


@dataclass(frozen=True, slots=True)
class Split:
    """Blocks `begin_block` to `end_block` (exclusive) of a request: its split `index`, computed by `part`."""

    part: int
    request: int
    index: int
    begin_block: int
    end_block: int


def blocks_of(lengths: Sequence[int]) -> list[int]:
    """64-token blocks per request."""
    return [-(-length // BLOCK_TOKENS) for length in lengths]


def read_splits(rows: NDArray[np.int32], lengths: Sequence[int], layout: str) -> list[Split]:
    """The splits that the rows of a plan describe, partition after partition.

    A planner may reckon a request without tokens as one block; its split is empty all the same.
    """
    blocks = blocks_of(lengths)
    columns = list(_COLUMNS[layout])
    splits = []
    for part, (begin_req, end_req, begin_block, end_block, begin_split) in enumerate(
        rows[:, columns].tolist()
    ):
        if begin_req < 0 or begin_req >= len(lengths) or begin_req > end_req:
            continue
        assert end_req < len(lengths), f"part {part} ends with request {end_req} of {len(lengths)}"
        for request in range(begin_req, end_req + 1):
            first = begin_block if request == begin_req else 0
            last = end_block if request == end_req and blocks[request] else blocks[request]
            splits.append(Split(part, request, begin_split if request == begin_req else 0, first, last))
    return splits


def check_plan(
    rows: NDArray[np.int32],
    num_splits: NDArray[np.int32],
    lengths: Sequence[int],
    layout: str,
    *,
    batch_invariant: bool = False,
) -> None:
    """Raise AssertionError unless the plan covers every block of every request exactly once, in order.

    `num_splits` must be the exclusive prefix sum of the splits per request, and the object layout's flags
    must say whether the first and the last request of a partition are split. A batch-invariant plan may cut a
    partition's share of a request further: there only coverage is checked, and that each request counts one
    split at least.
    """
    b = len(lengths)
    blocks = blocks_of(lengths)
    counts = np.diff(num_splits[: b + 1]).tolist()
    assert num_splits[0] == 0, f"num_splits starts with {num_splits[0]}"
    splits = read_splits(rows, lengths, layout)
    by_request: list[list[Split]] = [[] for _ in range(b)]
    for split in splits:
        by_request[split.request].append(split)
    for request, own in enumerate(by_request):
        position = 0
        for index, split in enumerate(own):
            assert split.begin_block == position, f"a gap or an overlap in {_place(request, blocks, own)}"
            is_empty = split.end_block <= position and blocks[request] > 0
            assert not is_empty, f"an empty split in {_place(request, blocks, own)}"
            in_order = batch_invariant or split.index == index
            assert in_order, f"splits out of order in {_place(request, blocks, own)}"
            position = split.end_block
        assert position == blocks[request], f"not all blocks covered of {_place(request, blocks, own)}"
        assert own, f"nobody writes the output of {_place(request, blocks, own)}"
        expected = len(own)
        fits = counts[request] >= 1 if batch_invariant else counts[request] == expected
        assert fits, (
            f"num_splits counts {counts[request]} splits, the rows have {expected}: "
            f"{_place(request, blocks, own)}"
        )
    if layout == "object" and not batch_invariant:
        _check_flags(rows, counts, b)


def _place(request: int, blocks: list[int], own: list[Split]) -> str:
    return f"request {request} ({blocks[request]} blocks): {own}"


def _check_flags(rows: NDArray[np.int32], counts: list[int], b: int) -> None:
    for part, row in enumerate(rows.tolist()):
        begin_req, end_req = row[0], row[1]
        if 0 <= begin_req < b and begin_req <= end_req:
            expected = [int(counts[begin_req] > 1), int(counts[end_req] > 1)]
            assert row[5:7] == expected, f"split flags of part {part} are {row[5:7]}, expected {expected}"


def write_plan(
    lengths: Sequence[int],
    shares: Sequence[int],
    layout: str,
    *,
    idle_form: str = "past_end",
    idle_before: int = 0,
    idle_after: int = 0,
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Rows and num_splits of a plan that gives `shares[i]` blocks to the i-th busy partition, the last one
    all that is left.

    `idle_before` idle rows precede the busy ones and `idle_after` follow them. Shares are positive;
    partitions for which nothing is left are idle too.
    """
    b = len(lengths)
    blocks = blocks_of(lengths)
    counts = [1] * b
    busy: list[tuple[int, int, int, int, int]] = []
    request, block, split = 0, 0, 0
    for index, share in enumerate(shares):
        if request == b:
            break
        remaining = share if index < len(shares) - 1 else sum(blocks)
        begin = (request, block, split)
        end = (request, block)
        while request < b and (remaining > 0 or blocks[request] == block):
            taken = min(remaining, blocks[request] - block)
            remaining -= taken
            block += taken
            end = (request, block)
            if block == blocks[request]:
                counts[request] = split + 1
                request, block, split = request + 1, 0, 0
        if block:
            split += 1
        busy.append((begin[0], end[0], begin[1], end[1], begin[2]))
    idle = {"past_end": (b, b - 1), "crossed": (b - 1, b - 2), "negative": (-1, -1)}[idle_form]
    idle_row = (*idle, 0, 0, 0)
    spare = len(shares) - len(busy)
    values = [idle_row] * idle_before + busy + [idle_row] * (idle_after + spare)
    rows = np.zeros((len(values), 8), dtype=np.int32)
    rows[:, list(_COLUMNS[layout])] = values
    if layout == "object":
        for row, (begin_req, end_req, *_) in zip(rows, values, strict=True):
            if 0 <= begin_req < b and begin_req <= end_req:
                row[5:7] = counts[begin_req] > 1, counts[end_req] > 1
    return rows, np.cumsum([0, *counts], dtype=np.int32)
