"""The scheduling plan, on the NumPy model of the kernel that makes it: complete, balanced, and safe to merge.

`work_tiles` and `combine_candidates` restate what the kernels do with a plan (cuda_src/mla/plan.cuh and
cuda_src/kernels/mla_combine.cu); that the device makes the same plan is tested in tests/gpu/test_metadata.py.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pytest
from full_cases import full_unless
from numpy.typing import NDArray

from kit.plans import blocks_of, check_plan
from rawmla import reference
from rawmla.kernels import common
from rawmla.kernels import mla_combine as combine
from rawmla.kernels import mla_metadata as metadata
from rawmla.kernels.mla_metadata import MAX_BATCH
from rawmla.reference import _plan

KINDS = ("equal", "normal", "short", "holes", "one long", "alternating", "edges", "tiny", "zero")


def lengths_of(kind: str, b: int) -> list[int]:
    """Request lengths of a named kind."""
    draw = random.Random(b)
    of_kind = {
        "equal": lambda i: 4096,
        "normal": lambda i: max(1, int(draw.normalvariate(4096, 2048))),
        "short": lambda i: draw.randint(1, 200),
        "holes": lambda i: 0 if draw.random() < 0.5 else draw.randint(1, 5000),
        "one long": lambda i: 131072 if i == b // 2 else draw.randint(1, 64),
        "alternating": lambda i: 131072 if i % 2 else i % 3,
        "edges": lambda i: max(64 * draw.randint(1, 40) + draw.randint(-1, 1), 0),
        "tiny": lambda i: 1,
        "zero": lambda i: 0,
    }[kind]
    return [of_kind(i) for i in range(b)]


class WorkTile(NamedTuple):
    """A range of blocks of one request that one CTA computes in one go."""

    part: int
    req: int
    first_block: int
    num_blocks: int
    split_idx: int  # in o_accum; -1: the whole request, written to the output


def work_tiles(
    rows: NDArray[np.int32],
    num_splits: NDArray[np.int32],
    request_blocks: Sequence[int],
    max_splits: int,
    room: int | None = None,
) -> Iterator[WorkTile]:
    """The work tiles of all partitions, as `WorkTileWalk` in plan.cuh walks them; rows in the object layout.

    `request_blocks` are those there are when the plan is used, `room` as in `reference.plan_blocks`.
    """
    splits = num_splits.tolist()
    for part, row in enumerate(rows.tolist()):
        begin_req, end_req, begin_block, end_block, begin_split, *_, mark = row
        batch_invariant = mark == reference.BATCH_INVARIANT_MARK
        if not 0 <= begin_req < len(request_blocks):
            continue
        req, block = begin_req, 0
        while req <= min(end_req, len(request_blocks) - 1):
            blocks = request_blocks[req]
            count = splits[req + 1] - splits[req]
            begin = max(begin_block, 0) if req == begin_req else 0
            end = end_block if req == end_req else blocks
            first, stop = max(block, begin), end
            split = begin_split if req == begin_req else 0
            if batch_invariant:
                split_blocks = max(8, -(-(blocks if room is None else room) // 32))
                end = end_block if req == end_req else count * split_blocks
                split = first // split_blocks
                stop = min(end, (split + 1) * split_blocks)
            split_idx = -1
            if count > 1:
                split_idx = (splits[req] if batch_invariant else 2 * (splits[req] - req)) + split
                assert split_idx < max_splits, (
                    f"{split_idx} of {max_splits}: partition {part} drops request {req}"
                )
            work = WorkTile(part, req, first, max(min(stop, blocks) - first, 0), split_idx)
            block = stop
            if stop >= end:
                req, block = req + 1, 0
            if work.num_blocks > 0 or blocks == 0 or split_idx >= 0:
                yield work


def combine_candidates(rows: NDArray[np.int32], b: int, batch_invariant: bool) -> list[int]:
    """The request that each CTA column of mla_combine looks at; rows in the object layout."""
    by_request = batch_invariant or b <= len(rows)
    (_, columns, _), _ = combine.launch_shape(1, b, len(rows), by_request, batch_invariant)
    if by_request:
        return list(range(columns))
    candidates = []
    for begin_req, end_req, _, _, begin_split, *_ in rows[:columns].tolist():
        idle = begin_req < 0 or begin_req >= b or begin_req > end_req
        if not idle and not (begin_req == end_req and begin_split > 0):
            candidates.append(min(end_req, b - 1))
    return candidates


def check_work(
    plan: reference.Plan, blocks: Sequence[int], batch_invariant: bool, room: int | None = None
) -> None:
    """Each block is computed once; each split has a place of its own; each split request is merged once.

    `blocks` are those there are, of which a sparse plan may have seen more, up to `room`; o_accum has as
    many places as a call has whose block table or indices have room for no more than that.
    """
    b, num_parts = len(blocks), len(plan.object_rows)
    splits = np.diff(plan.num_splits).tolist()
    most = common.max_splits(num_parts, b, max(blocks, default=0) if room is None else room, batch_invariant)
    tiles = list(work_tiles(plan.object_rows, plan.num_splits, blocks, most, room))
    position = [0] * b
    visits = [0] * b
    for work in tiles:
        # What is planned behind the last block is an empty split, which the combine reads all the same.
        assert work.first_block == position[work.req] or (
            room is not None
            and work.num_blocks == 0
            and position[work.req] == blocks[work.req] < work.first_block
        ), work
        position[work.req] += work.num_blocks
        # The combine reads splits first, first + 1, ... of a request in order.
        expected = -1
        if splits[work.req] > 1:
            splits_before = int(plan.num_splits[work.req])
            first = splits_before if batch_invariant else 2 * (splits_before - work.req)
            expected = first + visits[work.req]
        assert work.split_idx == expected, work
        visits[work.req] += 1
    assert position == list(blocks) and visits == splits
    used = [work.split_idx for work in tiles if work.split_idx >= 0]
    assert len(set(used)) == len(used), "two splits share a place"
    if not batch_invariant:
        assert max(used, default=0) < 2 * num_parts
    candidates = Counter(combine_candidates(plan.object_rows, b, batch_invariant))
    assert all(candidates[req] == 1 for req in range(b) if splits[req] > 1)


@pytest.mark.parametrize("num_parts", (1, 7, 66, 132))
def test_uniform_plan_is_the_plan_of_equal_requests(num_parts: int) -> None:
    """Row for row, but for where idle rows lie; places in o_accum are of one request each."""
    cut = 0
    for b in (1, 2, 3, 5, 31, 64, 66, 67, 132, 200, 512, 4096):
        for blocks in (1, 2, 3, 8, 10, 32, 33, 257):
            uniform = metadata.uniform_plan(b, blocks, num_parts)
            plan = reference.plan([64 * blocks] * b, num_parts)
            rows = [tuple(row[:5]) for row in plan.object_rows.tolist() if row[0] <= row[1]]
            found = [uniform_row(uniform, part, b) for part in range(num_parts)]
            assert [row for row in found if row[0] <= row[1]] == rows, (b, blocks)
            taken: set[int] = set()
            for req, count in enumerate(np.diff(plan.num_splits).tolist()):
                first = req * uniform.pitch // uniform.length
                assert (req * uniform.pitch + blocks - 1) // uniform.length - first + 1 == count
                assert count == 1 or uniform.cuts
                if count > 1:
                    of_request = set(range(2 * first, 2 * first + count))
                    assert not of_request & taken and max(of_request) < 2 * num_parts
                    taken |= of_request
                    cut += 1
    assert cut > 20 or num_parts == 1


def uniform_row(plan: metadata.UniformPlan, part: int, b: int) -> tuple[int, int, int, int, int]:
    """UniformPlan::row of cuda_src/mla/plan.cuh."""
    begin, end = part * plan.length, (part + 1) * plan.length
    begin_req, begin_block = divmod(begin, plan.pitch)
    begin_split = part - begin_req * plan.pitch // plan.length
    if begin_block >= plan.blocks:
        begin_req, begin_block, begin_split = begin_req + 1, 0, 0
    end_req = (end - 1) // plan.pitch
    end_block = min(end - end_req * plan.pitch, plan.blocks)
    if end_req >= b:
        end_req, end_block = b - 1, plan.blocks
    return begin_req, end_req, begin_block, end_block, begin_split


def check_balance(plan: reference.Plan, lengths: Sequence[int], batch_invariant: bool) -> None:
    """No partition has more than an equal share, in which requests but the first have a fixed cost, or than
    the least that is worth a partition.
    """
    b, num_parts = len(lengths), len(plan.object_rows)
    blocks = np.maximum(blocks_of(lengths), 1)
    unit = np.maximum(8, -(-blocks // 32)) if batch_invariant else np.ones_like(blocks)
    units = -(-blocks // unit)
    total = int(units.sum())
    fixed = min(_plan.MAX_FIXED_COST, total // num_parts // _plan.FIXED_COST_DIVISOR) * (not batch_invariant)
    share = -(-(total + (b - 1) * fixed) // num_parts)
    if not batch_invariant:
        short = math.ceil(math.sqrt(total // b / _plan.SHORT_PART_FACTOR))
        share = max(share, min(short, _plan.MAX_SHORT_PART))
    before = [0, *np.cumsum(units).tolist()]  # units of the requests before each
    unit = unit.tolist()
    loads = []
    for begin_req, end_req, begin_block, end_block, *_ in plan.object_rows.tolist():
        if begin_req <= end_req:
            load = before[end_req] - before[begin_req]
            loads.append(load + -(-end_block // unit[end_req]) - begin_block // unit[begin_req])
            assert loads[-1] + fixed * (end_req - begin_req) <= share
    assert sum(loads) == total


def check_rows(plan: reference.Plan, lengths: Sequence[int], batch_invariant: bool) -> None:
    """The rows of the object are complete, and those of tensors are theirs in another order of columns."""
    rows = plan.object_rows
    check_plan(rows, plan.num_splits, lengths, "object", batch_invariant=batch_invariant)
    mark = reference.BATCH_INVARIANT_MARK * batch_invariant
    assert (rows[:, 7] == mark).all()
    assert (rows[rows[:, 0] > rows[:, 1]] == [len(lengths), -1, 0, 0, 0, 0, 0, mark]).all()
    without_flags = [1, 1, 1, 1, 1, 0, 0, 1]
    assert np.array_equal(plan.tensor_rows, rows[:, [0, 2, 1, 3, 4, 5, 6, 7]] * without_flags)


def check(lengths: Sequence[int], num_parts: int, batch_invariant: bool) -> reference.Plan:
    """Everything that has to hold for every plan."""
    plan = reference.plan(lengths, num_parts, batch_invariant)
    for rows in (plan.object_rows, plan.tensor_rows):
        assert rows.dtype == np.int32 and rows.shape == (num_parts, 8)
    check_rows(plan, lengths, batch_invariant)
    assert plan.num_splits.dtype == np.int32 and plan.num_splits.shape == (len(lengths) + 1,)
    check_work(plan, blocks_of(lengths), batch_invariant)
    check_balance(plan, lengths, batch_invariant)
    return plan


MARK = reference.BATCH_INVARIANT_MARK
WORKED_OUT: dict[str, tuple[list[int], int, bool, list[list[int]], list[int]]] = {
    "blocks 3, 1 (for none), 5 and 1: parts of 3 blocks, without a fixed cost": (
        [130, 0, 320, 64], 4, False,
        [
            [0, 0, 0, 3, 0, 0, 0, 0], [1, 2, 0, 2, 0, 0, 1, 0],
            [2, 2, 2, 5, 1, 1, 1, 0], [3, 3, 0, 1, 0, 0, 0, 0],
        ],
        [0, 1, 2, 4, 5],
    ),
    "40 and 24 blocks: parts of (64 + 3) / 2 = 34 with a fixed cost of 3": (
        [40 * 64, 24 * 64], 2, False,
        [[0, 0, 0, 34, 0, 1, 1, 0], [0, 1, 34, 24, 1, 1, 0, 0]],
        [0, 2, 3],
    ),
    "320 blocks are 32 splits of 10, 20 blocks 3 splits of 8, 8 and 4: parts of 18 splits": (
        [320 * 64, 20 * 64], 2, True,
        [[0, 0, 0, 180, 0, 1, 1, MARK], [0, 1, 180, 20, 18, 1, 1, MARK]],
        [0, 32, 35],
    ),
}  # fmt: skip
"""Lengths, parts, whether the plan is batch-invariant; its rows and numbers of splits."""


@pytest.mark.parametrize(
    ("lengths", "parts", "batch_invariant", "rows", "num_splits"), WORKED_OUT.values(), ids=WORKED_OUT
)
def test_plans_worked_out_by_hand(
    lengths: list[int], parts: int, batch_invariant: bool, rows: list[list[int]], num_splits: list[int]
) -> None:
    plan = check(lengths, parts, batch_invariant)
    assert plan.object_rows.tolist() == rows and plan.num_splits.tolist() == num_splits


def test_equal_requests_worked_out_by_hand() -> None:
    """Cuts between requests of equal length, unless a partition grows by it."""
    # 16 x 64 blocks over 33 partitions: 1024 / 33 is 32 without any fixed cost, so two partitions each
    halves = check([4096] * 16, 33, False)
    assert halves.object_rows[:3, :4].tolist() == [[0, 0, 0, 32], [0, 0, 32, 64], [1, 1, 0, 32]]
    assert halves.object_rows[32, :2].tolist() == [16, -1]
    assert halves.num_splits.tolist() == list(range(0, 33, 2))
    # 64 x 32 blocks over 33 partitions: (2048 + 63 * 3) / 33 is 68, and two requests are 32 + 3 + 32
    pairs = check([2048] * 64, 33, False)
    assert pairs.object_rows[:2, :4].tolist() == [[0, 1, 0, 32], [2, 3, 0, 32]]
    assert pairs.num_splits.tolist() == list(range(65))
    # 74 of them: three in a partition would be 102 where cuts anywhere make it 79
    assert check([2048] * 74, 33, False).num_splits[-1] > 74


NUMBERS = ((1, 2, 3, 7, 31, 32, 33, 128, 131, 132, 133, 1025), (4096,), (MAX_BATCH,))


@pytest.mark.parametrize("numbers", full_unless(lambda numbers: 1 in numbers, NUMBERS), ids=str)
@pytest.mark.parametrize("batch_invariant", (False, True))
@pytest.mark.parametrize("kind", KINDS)
def test_plans_of_named_batches(kind: str, batch_invariant: bool, numbers: tuple[int, ...]) -> None:
    for b, num_parts in itertools.product(numbers, (1, 33, 66, 132) if 1 in numbers else (132,)):
        check(lengths_of(kind, b), num_parts, batch_invariant)


@pytest.mark.parametrize("batch_invariant", (False, True))
@pytest.mark.parametrize("seed", full_unless(lambda seed: seed < 2, range(4)))
def test_random_batches(seed: int, batch_invariant: bool) -> None:
    draw = random.Random(seed)
    for _ in range(250):
        longest = draw.choice((1, 65, 300, 3000, 20_000, 200_000))
        b = draw.choice((1, 2, 3, 5, 9, 20, 60))
        lengths = [0 if draw.random() < 0.1 else draw.randint(1, longest) for _ in range(b)]
        check(lengths, draw.choice((draw.randint(1, 8), draw.randint(1, 132), 500)), batch_invariant)


def test_part_length_of_small_batches() -> None:
    """10,240 tokens are 160 blocks: sqrt(160 / 32) is 2.2, so partitions of 3, and 54 of them."""
    rows = check([10240], 132, False).object_rows
    busy = rows[rows[:, 0] <= rows[:, 1]]
    assert (busy[:, 3] - busy[:, 2]).tolist() == [3] * 53 + [1]


def test_few_idle_rows_lie_between_the_others() -> None:
    """128 partitions have work, of 132, of 146 (less than an eighth are idle) and of 147 (more)."""
    for num_parts, idle in (
        (132, [32, 65, 98, 131]),
        (146, list(range(7, 144, 8))),
        (147, list(range(128, 147))),
    ):
        rows = check([64] * 128, num_parts, False).object_rows
        assert np.flatnonzero(rows[:, 0] > rows[:, 1]).tolist() == idle
        assert rows[rows[:, 0] <= rows[:, 1], 0].tolist() == list(range(128))


def test_lengths_below_zero_count_as_zero() -> None:
    got, want = reference.plan([-1, 100, -1000], 3), reference.plan([0, 100, 0], 3)
    assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))


# ---- sparse plans: their splits depend on what a call has room for


@functools.cache
def plan_of_room(b: int, num_parts: int, room: int, batch_invariant: bool) -> reference.Plan:
    """The plan of tensors, which knows the room of a call alone."""
    plan = reference.plan_blocks([max(room, 1)] * b, num_parts, batch_invariant, room)
    check_rows(plan, [64 * room] * b, batch_invariant)
    return plan


def check_sparse(
    blocks: Sequence[int], num_parts: int, room: int, batch_invariant: bool
) -> tuple[reference.Plan, reference.Plan]:
    """Check the plans of an object, made of the blocks there are, and of tensors, made of `room`."""
    known = reference.plan_blocks(np.maximum(blocks, 1), num_parts, batch_invariant, room)
    check_rows(known, [64 * n for n in blocks], batch_invariant)
    full = plan_of_room(len(blocks), num_parts, room, batch_invariant)
    for plan in (known, full):
        check_work(plan, blocks, batch_invariant, room)
    return known, full


ROOMS = (1, 2, 8, 9, 32, 33, 256, 257, 264, 289, 1000)


@pytest.mark.parametrize(
    "case",
    full_unless(lambda case: ROOMS.index(case[0]) % 2 == case[1], itertools.product(ROOMS, (False, True))),
    ids=str,
)
def test_sparse_plans(case: tuple[int, bool]) -> None:
    room, batch_invariant = case
    draw = random.Random(room)
    for b in (1, 2, 3, 7, 40, 133):
        batches = [[room] * b, [0] * b, [1] * b, [draw.randint(0, room) for _ in range(b)]]
        batches.append([draw.choice((0, 1, room)) for _ in range(b)])
        for blocks, num_parts in itertools.product(batches, (1, 2, 33, 132)):
            check_sparse(blocks, num_parts, room, batch_invariant)


def test_get_mla_metadata_is_the_plan_of_the_gpus_parts() -> None:
    rows, num_splits = reference.get_mla_metadata([8192, 100], 128, 1)
    want = reference.plan([8192, 100], 66)
    assert np.array_equal(rows, want.tensor_rows) and np.array_equal(num_splits, want.num_splits)
    assert len(reference.get_mla_metadata([64], 65536, 1, sm_count=78)[0]) == 1
