"""Caches written, gathered, quantised and dequantised, bit for bit as the reference."""

from __future__ import annotations

from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from gpu_support import torch

import rawmla
from kit.generators import GARBAGE_PAGE
from operations.caches import (
    COLUMNS,
    KINDS,
    LAYOUTS,
    PAGES,
    PaddedCache,
    filled,
    host_cache,
    same_values,
    to_device,
    to_host,
    values,
)
from rawmla import reference

kinds = pytest.mark.parametrize("kind", KINDS)
layouts = pytest.mark.parametrize("layout", LAYOUTS)


# ---- write_kv_cache


@kinds
@pytest.mark.parametrize("slot_dtype", (np.int32, np.int64))
def test_write(slot_dtype: type, kind: str) -> None:
    """Some slots are skipped. Rows are contiguous, aligned parts of larger rows, and parts that are not."""
    page, num_blocks = 53, 11
    for tokens in (1, 4, 5, 63, 300):
        rows = values((tokens, COLUMNS[kind]), seed=tokens)
        slots = np.random.default_rng(1).permutation(num_blocks * page)[:tokens].astype(slot_dtype)
        slots[2::7] = -1
        slots[3::11] = num_blocks * page
        slots[5::13] = np.iinfo(slot_dtype).min
        slots[6::17] = np.iinfo(slot_dtype).max
        want = host_cache(kind, num_blocks, page)
        reference.write_kv_cache(rows[:, :-64], rows[:, -64:], want, slots)
        for columns, shift in ((0, 0), (16, 8), (5, 3)):
            shape = (tokens, COLUMNS[kind] + columns)
            given = torch.full(shape, float("nan"), dtype=torch.bfloat16, device="cuda")
            given = given[:, shift : shift + COLUMNS[kind]]
            given.copy_(to_device(rows))
            cache = PaddedCache(kind, num_blocks, page)
            rawmla.write_kv_cache(given[:, :-64], given[:, -64:], cache.view, to_device(slots))
            cache.check(want)


@kinds
def test_far_block(kind: str) -> None:
    """Block 2066 at a stride of 1,039,680 bytes begins past 2**31. Written, and gathered at once."""
    stride, num_blocks, page = 1_039_680, 2070, 64
    room = torch.zeros(num_blocks, stride, dtype=torch.uint8, device="cuda")
    shape = host_cache(kind, 1, page).shape[1:]
    blocks = room if kind in LAYOUTS else room.view(torch.bfloat16)
    cache = blocks[:, : page * shape[2]].unflatten(1, shape)
    rows = values((3, COLUMNS[kind]))
    given = to_device(rows)
    slots = torch.tensor([2066 * page + 5, 2069 * page + 63, 7], device="cuda")
    out = torch.zeros(3, COLUMNS[kind], dtype=torch.bfloat16, device="cuda")
    table = torch.tensor([[2066], [2069], [0]], dtype=torch.int32, device="cuda")
    starts = torch.tensor([5, 63, 7], dtype=torch.int32, device="cuda")
    lengths, places = starts + 1, torch.arange(3, dtype=torch.int32, device="cuda")
    rawmla.write_kv_cache(given[:, :-64], given[:, -64:], cache, slots)
    rawmla.gather_kv_cache(cache, table, lengths, out, workspace_starts=places, seq_starts=starts)

    want = host_cache(kind, 3, page)
    want.view(np.uint8)[:] = 0
    reference.write_kv_cache(rows[:, :-64], rows[:, -64:], want, [5, page + 63, 2 * page + 7])
    written = torch.stack([cache[block] for block in (2066, 2069, 0)])
    np.testing.assert_array_equal(to_host(written).view(np.uint8), want.view(np.uint8))
    gathered = np.zeros((3, COLUMNS[kind]), np.float32)
    reference.gather_kv_cache(
        want, [[0], [1], [2]], [6, 64, 8], gathered, workspace_starts=[0, 1, 2], seq_starts=[5, 63, 7]
    )
    same_values(out, gathered)


# ---- gather_kv_cache


@kinds
@pytest.mark.parametrize("page", (1, 53, 64))
def test_gather(page: int, kind: str) -> None:
    """Pages in any order; nothing is read past the lengths, nothing is written around the rows."""
    for b, with_starts in ((1, True), (6, False), (50, True)):
        draw = np.random.default_rng(page + b)
        width = -(-200 // page)
        num_blocks = b * width
        lengths = draw.integers(0, 201, b).astype(np.int32)
        starts = np.minimum(draw.integers(0, 100, b), lengths).astype(np.int32) * with_starts
        pages = draw.permutation(num_blocks).reshape(b, width)
        past = np.arange(width) * page >= lengths[:, None]
        table = np.full((b, width + 3), GARBAGE_PAGE, np.int32)
        table[:, :width] = np.where(past, GARBAGE_PAGE, pages)
        k_cache = np.full((num_blocks, page, 1, COLUMNS[kind]), np.nan, ml_dtypes.bfloat16)
        for i, length in enumerate(lengths):
            token = np.arange(length)
            k_cache[pages[i, token // page], token % page, 0] = values((length, COLUMNS[kind]), seed=i)
        counts = lengths - starts
        places = (np.cumsum(counts) - counts).astype(np.int32)
        want = np.full((int(counts.sum()) + 2, COLUMNS[kind]), -7, np.float32)
        host = filled(kind, k_cache)
        arguments = {"workspace_starts": places, "seq_starts": starts}
        reference.gather_kv_cache(host, table, lengths, want[1:-1], **arguments)
        assert not np.isnan(want).any()

        room = torch.full((len(want), COLUMNS[kind] + 24), -7.0, dtype=torch.bfloat16, device="cuda")
        given = {name: to_device(x) for name, x in arguments.items() if with_starts or name != "seq_starts"}
        rawmla.gather_kv_cache(
            PaddedCache.of(kind, host).view,
            to_device(table)[:, :width],
            to_device(lengths),
            room[1:-1, : COLUMNS[kind]],
            **given,
        )
        same_values(room[:, : COLUMNS[kind]], want)
        assert bool((room[:, COLUMNS[kind] :] == -7).all())


@kinds
@pytest.mark.parametrize("order", ("as numbered", "shuffled", "with gaps", "in a third"))
def test_gather_of_many_requests(order: str, kind: str) -> None:
    """More than are looked at in one go, by guesses at who has a row that are right, nearly, or not."""
    b, page = 2500, 4
    draw = np.random.default_rng(0)
    lengths = draw.integers(0, 7, b).astype(np.int32)
    table = draw.integers(0, 32, (b, 2)).astype(np.int32)
    host = filled(kind, values((32, page, 1, COLUMNS[kind])))
    numbers = draw.permutation(b) if order == "shuffled" else np.arange(b)
    steps = lengths[numbers] + (order == "with gaps")
    places = np.zeros(b, np.int32)
    places[numbers] = np.cumsum(steps) - steps
    rows = int(steps.sum()) * (3 if order == "in a third" else 1)
    want = np.full((rows, COLUMNS[kind]), -7, np.float32)
    reference.gather_kv_cache(host, table, lengths, want, workspace_starts=places)
    out = torch.full(want.shape, -7.0, dtype=torch.bfloat16, device="cuda")
    cache, pages, counts, starts = (to_device(x) for x in (host, table, lengths, places))
    rawmla.gather_kv_cache(cache, pages, counts, out, workspace_starts=starts)
    same_values(out, want)


OUTSIDE: tuple[tuple[tuple[int, int], int, int, int], ...] = (  # pages, length, place, start
    ((0, -1), 30, -3, 0),  # past the table, and rows before the first
    ((9, 2), 16, 35, 2),  # a page that is not there, and rows past the last
    ((1, 3), 2**31 - 1, 20, 0),
    ((2, 0), -5, 0, -9),
    ((2, 0), 5, 0, -(2**31)),
    ((2, 0), 2**31 - 1, -(2**31), 0),
)


@kinds
def test_gather_writes_nothing_outside(kind: str) -> None:
    """Zeros where there is a row but no token: alone, and with 100 requests without tokens before and after,
    where all requests are looked at.
    """
    host = filled(kind, values((4, 8, 1, COLUMNS[kind])))
    for (pages, length, place, start), others in product(OUTSIDE, (0, 100)):
        want = np.full((60, COLUMNS[kind]), -7, np.float32)
        room = torch.full(want.shape, -7.0, dtype=torch.bfloat16, device="cuda")
        first, last = max(start, start - place), min(length, start - place + 40)
        places = [place + first - start]
        reference.gather_kv_cache(
            host, [pages], [last], want[10:-10], workspace_starts=places, seq_starts=[first]
        )
        table, lengths, places_of, starts = (
            torch.tensor([*[none] * others, own, *[none] * others], dtype=torch.int32, device="cuda")
            for own, none in ((pages, (0, 0)), (length, 0), (place, 0), (start, 0))
        )
        rawmla.gather_kv_cache(
            to_device(host), table, lengths, room[10:-10], workspace_starts=places_of, seq_starts=starts
        )
        same_values(room, want)


# ---- quantize_k_cache, dequantize_k_cache


def check_quantized(k_cache: np.ndarray, layout: str) -> Any:
    """Quantise: the bytes are those of the reference. Returns the cache on the host."""
    cache = to_host(rawmla.quantize_k_cache(to_device(k_cache), layout))
    np.testing.assert_array_equal(cache, reference.quantize_k_cache(k_cache, layout))
    return cache


@layouts
@pytest.mark.parametrize("page", PAGES)
def test_quantize(page: int, layout: str) -> None:
    """Into a new cache, and into a given one with space between its blocks; and back."""
    for num_blocks in (1, 7):
        k_cache = values((num_blocks, page, 1, COLUMNS[layout]), seed=page)
        cache = rawmla.quantize_k_cache(to_device(k_cache), layout)
        want = reference.quantize_k_cache(k_cache, layout)
        np.testing.assert_array_equal(to_host(cache), want)
        assert cache.dtype == torch.uint8
        assert num_blocks == 1 or layout == "v32" or cache.stride(0) % 576 == 0
        back = rawmla.dequantize_k_cache(cache, layout)
        assert back.is_contiguous() and back.shape == k_cache.shape
        gathered = reference.bf16_bits(reference.dequantize_k_cache(want, layout))
        np.testing.assert_array_equal(to_host(back).view(np.uint16), gathered)
        given = PaddedCache(layout, num_blocks, page)
        assert rawmla.quantize_k_cache(to_device(k_cache), layout, out=given.view) is given.view
        given.check(want)


@layouts
def test_every_magnitude(layout: str) -> None:
    """Every positive bfloat16 as the largest of a tile of random smaller ones, infinity among them."""
    amax = np.arange(1, 0x7F81, dtype=np.uint16)
    draw = np.random.default_rng(0)
    bits = draw.integers(0, 0x8000, (len(amax), 1, 1, COLUMNS[layout]), dtype=np.uint16)
    near = amax[:, None, None, None] - np.minimum(bits & 0x7FF, amax[:, None, None, None])
    bits = near | (draw.integers(0, 2, bits.shape, dtype=np.uint16) << 15)
    bits[:, 0, 0, :: reference.LAYOUTS[layout].tile] = amax[:, None]
    check_quantized(bits.view(ml_dtypes.bfloat16), layout)


@layouts
def test_nan_and_infinity(layout: str) -> None:
    k_cache = values((3, 5, 1, COLUMNS[layout]))
    k_cache[0, 0, 0, 5], k_cache[1, 2, 0, 300], k_cache[2, 4, 0, 130] = np.nan, np.inf, -np.inf
    k_cache[1, 1, 0, :128], k_cache[1, 3, 0, -3:] = np.nan, np.nan
    got = reference.dequantize_k_cache(check_quantized(k_cache, layout), layout)
    assert np.isnan(got[1, 1, 0, :128]).all() and np.isnan(got[1, 3, 0, -3:]).all()
