"""Which blocks of queries a tile of keys walks in the backward of flex attention, and in which order tiles
add to dq: the C++ of cuda_src/flex/query_lists.cuh, flex/listed_queries.cuh and kernels/block_mask_ranks.cu,
compiled for the CPU.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
from cuda_probe import source
from flex_points import built, needs_host_compiler

from rawmla.kernels.block_mask import RANKS_SPEC

pytestmark = needs_host_compiler
ROWS = 64  # query tokens of a step
BEHIND = 6  # steps that the thread that adds dQ may be behind the one that copies

_WALK = """
#include "common/types.cuh"
enum { kEmpty = 0 };
constexpr int kBlockRows = 64;
template <int kCount> struct Tile { enum { kRows = kCount, kBytes = 16 }; };
using BlockRows = Tile<kBlockRows>;
struct Function { enum { kIsThere = 1 }; };
using ScoreMod = Function;
using MaskMod = Function;
struct Params {
    const int *q_num_blocks, *q_indices, *full_q_num_blocks, *full_q_indices, *ranks;
    i64 counts_strides[6], lists_strides[6], blocks;
    int group, list_rows[2], mask_batches, mask_heads, mask_rows, mask_columns, block_rows, block_k, q_blocks;
    int requests;
    inline static TensorMap q_map, dout_map, k_map, v_map;
    inline static const float *lse, *delta, *weights;
};
struct KeyTile { int request, kv_head, first_key, k_len; };
enum { kL2EvictNormal };
template <int, class... T> void tma_load_4d(T...) {}
template <class... T> void bulk_load(T...) {}
inline u32 smem_address(const void* x) { return static_cast<u32>(reinterpret_cast<u64>(x)); }
inline void mbarrier_arrive_expect_tx(u32, u32) {}
inline void mbarrier_expect_tx(u32, u32) {}
void mbarrier_arrive(u32 bar);
void mbarrier_wait_parity(u32 bar, u32 parity);
"""
_CALLS = """
#include <new>
struct Plan {
    unsigned char k[16], v[16], q[3][16], dout[3][16];
    float lse[3][kBlockRows], delta[3][kBlockRows], references[3][kBlockRows];
    WalkState walk;
    QueryStep steps[kPublishedSteps];
    u64 bar_step[kPublishedSteps];  // how many have arrived
    u64 bar_k_full, bar_v_full, bar_q_landed[3], bar_q_full[3], bar_q_free[3];
    u64 bar_dout_landed[3], bar_dout_full[3], bar_dout_free[3];
} smem;
// The thread that adds dQ, when a step is published.
void* reader;
void (*read_published)(void* reader);
bool waits_for_ever;
u32 step_of(u32 bar) { return (bar - smem_address(smem.bar_step)) / sizeof(u64); }

void mbarrier_arrive(u32 bar) {
    if (step_of(bar) >= kPublishedSteps) return;
    ++smem.bar_step[step_of(bar)];
    read_published(reader);
}
void mbarrier_wait_parity(u32 bar, u32 parity) {
    waits_for_ever |= step_of(bar) < kPublishedSteps && smem.bar_step[step_of(bar)] % 2 == parity;
}

template <int kTileKeys>
struct Follower {
    using Blocks = AddedBlocks<Tile<kTileKeys>, Plan>;
    const Params& params;
    const KeyTile& tile;
    int (*steps)[7];
    alignas(Blocks) unsigned char memory[sizeof(Blocks)];
    Blocks* blocks = nullptr;
    int number = 0, count = 0;  // of steps that were published and read

    Follower(const Params& params, const KeyTile& tile, int* steps)
        : params(params), tile(tile), steps(reinterpret_cast<int(*)[7]>(steps)) {}
    void published() {
        const QueryStep step = smem.steps[number % kPublishedSteps];
        const int found[] = {step.block, step.head, step.request, step.is_partial(), 0, 0, step.is_last()};
        for (int i = 0; i < 7; ++i) steps[number][i] = found[i];
        if (++number > kBehind) read();
    }
    bool read() {
        if (blocks == nullptr) blocks = new (memory) Blocks(params, smem, tile);
        else blocks->advance();
        if (waits_for_ever || !blocks->is_there()) return false;
        steps[count][4] = blocks->turn();
        steps[count++][5] = blocks->place();
        return true;
    }
};
template <int kTileKeys, bool kByBlock>
int walk_tile(const Params& params, const KeyTile& tile, int* steps) {
    smem = {}, waits_for_ever = false;
    Follower<kTileKeys> follower(params, tile, steps);
    reader = &follower;
    read_published = [](void* one) { static_cast<Follower<kTileKeys>*>(one)->published(); };
    load_listed<Tile<kTileKeys>, BlockRows, kByBlock, true, true>(params, smem, tile);
    while (follower.read()) {}
    return waits_for_ever ? -1 : follower.count;
}
extern "C" int walk(const Params* params, const KeyTile* tile, int tile_keys, int by_block, int* steps) {
    const auto chosen = tile_keys == 64 ? by_block ? walk_tile<64, true> : walk_tile<64, false>
                                        : by_block ? walk_tile<128, true> : walk_tile<128, false>;
    return chosen(*params, *tile, steps);
}
"""
_RANK = """
extern "C" void rank(const Params* params) {
    gridDim = {1, 1, 1};
    for (threadIdx.x = 0; threadIdx.x < kThreads; ++threadIdx.x) block_mask_ranks(*params);
}
"""


class _WalkParams(ctypes.Structure):
    _fields_ = (
        [(name, ctypes.c_void_p) for name in ("counts", "lists", "full_counts", "full_lists", "ranks")]
        + [("counts_strides", ctypes.c_longlong * 6), ("lists_strides", ctypes.c_longlong * 6)]
        + [("blocks", ctypes.c_longlong), ("group", ctypes.c_int), ("list_rows", ctypes.c_int * 2)]
        + [
            (name, ctypes.c_int)
            for name in (
                *("mask_batches", "mask_heads", "mask_rows", "mask_columns", "block_rows", "block_k"),
                *("q_blocks", "requests"),
            )
        ]
    )


class _RankParams(ctypes.Structure):
    _fields_ = [("states", ctypes.c_void_p), ("ranks", ctypes.c_void_p), ("all_rows", ctypes.c_longlong)] + [
        (name, ctypes.c_int) for name in ("rows", "columns", "tiles")
    ]


def _walking() -> ctypes.CDLL:
    lists, listed = source("flex/query_lists.cuh"), source("flex/listed_queries.cuh")
    lists = lists[lists.index("constexpr bool kTrims") : lists.index("// A warp: clears the rows")]
    first = listed.index("template <class KeyRows, class Plan>\nclass AddedBlocks")
    added = listed[first : listed.index("// A thread's keys are")]
    return built(f"{_WALK}{lists}{added}constexpr int kBehind = {BEHIND};{_CALLS}")


def _ranking() -> ctypes.CDLL:
    text = f'#include "kernels/block_mask_ranks.cu"{_RANK}'
    return built(text, THREADS=RANKS_SPEC.threads)


class Case(NamedTuple):
    """Lengths, heads, requests, the mask's blocks, batches and heads, and how its lists lie."""

    b: int = 2
    k_batches: int = 2
    h_kv: int = 2
    group: int = 2
    q_len: int = 500
    k_len: int = 700
    block: tuple[int, int] = (128, 128)
    masks: tuple[int, int] = (1, 1)
    full: bool = True
    wide: int = 0  # further columns of the lists


CASES = (
    Case(),
    Case(k_batches=1, masks=(2, 4)),
    Case(b=3, k_batches=1, h_kv=1, group=3, masks=(3, 1), wide=3),
    Case(block=(64, 256), q_len=130, k_len=1000, masks=(1, 2)),
    Case(block=(256, 128), q_len=300, full=False),
    Case(block=(256, 384), q_len=513, k_len=700, masks=(2, 1), wide=1),
    Case(q_len=1, k_len=1),
)


class Mask(NamedTuple):
    """0, 1 partial, 2 full by `[batch, head, column, row]`, and its lists by columns."""

    states: Any
    arrays: list[Any]


def make_mask(case: Case, draw: Any, ascending: bool = False) -> Mask:
    rows, columns = -(-case.q_len // case.block[0]), -(-case.k_len // case.block[1])
    states = draw.integers(0, 3 if case.full else 2, (*case.masks, columns, rows)).astype(np.uint8)
    arrays = []
    for kind in (1, 2):
        listed = states == kind
        # What is behind a count is no address.
        lists = np.full((*states.shape[:3], rows + case.wide), 2**31 - 1, np.int32)
        for place in np.ndindex(states.shape[:3]):
            found = np.flatnonzero(listed[place])
            found = found if ascending else draw.permutation(found)
            lists[place][: len(found)] = found
        arrays += [listed.sum(-1, dtype=np.int32), lists]
    return Mask(states, arrays)


def strides(array: Any, count: int) -> list[int]:
    return [step // array.itemsize for step in array.strides[:count]]


def ranks_of(case: Case, mask: Mask, tile_keys: int) -> Any:
    ranks = np.full(mask.states.shape, -1, np.int32)
    columns, rows = mask.states.shape[2:]
    params = _RankParams(
        mask.states.ctypes.data, ranks.ctypes.data, mask.states.size // columns, rows, columns,
        case.block[1] // tile_keys,
    )  # fmt: skip
    _ranking().rank(ctypes.byref(params))
    return ranks


def walk(
    case: Case, mask: Mask | None, ranks: Any, tile_keys: int, tile: tuple[int, int, int], by_block: bool
) -> Any:
    """(block, head, request, partial, turn, place) of each step of the tile (request, KV head, first key).

    The last step says that it is the last, and no other does. Without steps, one is published that is not
    there.
    """
    blocks = -(-case.q_len // ROWS)
    params = _WalkParams(
        blocks=case.b * blocks, group=case.group, mask_batches=1, mask_heads=1, block_rows=1, block_k=1,
        q_blocks=blocks, requests=case.b // case.k_batches,
    )  # fmt: skip
    if mask is not None:
        columns, rows = mask.states.shape[2:]
        counts, lists, full_counts, full_lists = mask.arrays
        params.counts, params.lists = counts.ctypes.data, lists.ctypes.data
        if case.full:
            params.full_counts, params.full_lists = full_counts.ctypes.data, full_lists.ctypes.data
        params.ranks = ranks.ctypes.data
        params.counts_strides[:] = [*strides(counts, 3), *strides(full_counts, 3)]
        params.lists_strides[:] = [*strides(lists, 3), *strides(full_lists, 3)]
        params.list_rows[:] = [rows, rows]
        params.mask_batches, params.mask_heads = case.masks
        params.mask_rows, params.mask_columns = rows, columns
        params.block_rows, params.block_k = case.block[0] // ROWS, case.block[1]
    steps = np.zeros((case.b * case.h_kv * case.group * blocks + 1, 7), np.int32)
    library = _walking()
    given = (ctypes.c_int * 4)(*tile, case.k_len)
    count = library.walk(
        ctypes.byref(params), given, tile_keys, by_block, steps.ctypes.data_as(ctypes.c_void_p)
    )
    assert count >= 0, "the thread that adds dQ waits for a step that nobody publishes"
    assert steps[:count, 6].tolist() == [i == count - 1 for i in range(count)]
    assert not steps[max(count, 1) :].any() and (count > 0 or steps[0, 0] == -1)
    return steps[:count, :6].tolist()


def tiles_of(case: Case, tile_keys: int) -> list[tuple[int, int, int]]:
    return [
        (request, head, first)
        for request in range(case.k_batches)
        for head in range(case.h_kv)
        for first in range(0, case.k_len, tile_keys)
    ]


@pytest.mark.parametrize(("tile_keys", "ascending", "by_block"), [*product((64, 128), *[(False, True)] * 2)])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_listed_blocks(case: Case, tile_keys: int, ascending: bool, by_block: bool) -> None:
    """Each once, of every request and head that reads the keys, partial and full ones together, from the last
    on if the lists are ascending. By block: a block for all requests and heads if they have the same lists,
    of lists in any order too. Turns go from the first keys to the last, without a gap.
    """
    mask = make_mask(case, np.random.default_rng(0), ascending)
    ranks = ranks_of(case, mask, tile_keys)
    q_blocks, requests = -(-case.q_len // ROWS), case.b // case.k_batches
    turns: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for tile in tiles_of(case, tile_keys):
        steps = walk(case, mask, ranks, tile_keys, tile, by_block)
        want = set()
        for request in range(tile[0] * requests, (tile[0] + 1) * requests):
            for head in range(tile[1] * case.group, (tile[1] + 1) * case.group):
                place = (request % case.masks[0], head % case.masks[1], tile[2] // case.block[1])
                for block in range(q_blocks):
                    state = mask.states[place][block * ROWS // case.block[0]]
                    if state:
                        want.add((block, head, request, state == 1))
        assert len(steps) == len(want) and {(*step[:3], bool(step[3])) for step in steps} == want
        if by_block and case.masks == (1, 1):
            readers = requests * case.group
            assert all(
                len({step[0] for step in steps[i : i + readers]}) == 1 for i in range(0, len(steps), readers)
            )
            order = [(-block if ascending else 0, request, head) for block, head, request, *_ in steps]
            order = order if ascending else order[:readers]
        else:
            order = [(request, head, -block if ascending else 0) for block, head, request, *_ in steps]
        assert order == sorted(order)
        for block, head, request, _, turn, place in steps:
            assert place == head * case.b * q_blocks + request * q_blocks + block
            turns[place].append((tile[2], turn))
    assert turns
    for found in turns.values():
        assert [turn for _, turn in sorted(found)] == list(range(len(found)))


@pytest.mark.parametrize("case", CASES[:3], ids=str)
def test_without_lists(case: Case) -> None:
    """All blocks, as full ones, from the last on; by block: each for all heads."""
    q_blocks, requests = -(-case.q_len // ROWS), case.b // case.k_batches
    for tile in tiles_of(case, 128):
        steps = walk(case, None, None, 128, tile, by_block=False)
        assert [step[:4] for step in steps] == [
            [block, head, request, 0]
            for request in range(tile[0] * requests, (tile[0] + 1) * requests)
            for head in range(tile[1] * case.group, (tile[1] + 1) * case.group)
            for block in reversed(range(q_blocks))
        ]
        assert {step[4] for step in steps} == {tile[2] // 128}
        by_block = walk(case, None, None, 128, tile, by_block=True)
        assert by_block == sorted(steps, key=lambda step: (-step[0], step[2], step[1]))


def test_numbers_that_are_no_blocks_are_skipped() -> None:
    """They would be addresses; and a count is no longer than the column."""
    case = Case(h_kv=1, group=1, b=1, k_batches=1, full=False)
    mask = make_mask(case, np.random.default_rng(0))
    counts, lists = mask.arrays[:2]
    counts[...] = 2**31 - 1
    lists[...] = [-1, 2, 4, -(2**31)]
    ranks = ranks_of(case, mask, 128)
    for by_block in (False, True):
        steps = walk(case, mask, ranks, 128, (0, 0, 0), by_block)
        assert [step[0] for step in steps] == [5, 4]
