"""Arithmetic of the dense kernel: swizzle, descriptors, division by multiplication, tails.

What is constexpr in C++, or can be made so, is evaluated by the compiler. The rest is restated here.
Fragments are left to the emulated kernels, which move every element.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
from cuda_probe import assert_in_header

from rawmla.kernels import common
from rawmla.kernels.mla_dense_decode import box_rows, largest_dividend

TILE = "layout/swizzled_tile.cuh"


def hardware_swizzle(address: int, row_bytes: int = 128) -> int:
    """Swizzle of 128 bytes: bits 4-6 of a shared-memory address are XORed with its bits 7-9. Of 64: bits 4-5
    with bits 7-8.
    """
    return address ^ (address >> 7 & row_bytes // 16 - 1) << 4


@pytest.mark.parametrize("rows", (8, 16, 64, 192))
@pytest.mark.parametrize("row_bytes", (64, 128))
def test_swizzle_offset(rows: int, row_bytes: int) -> None:
    tile = f"SwizzledTile<{rows}, {row_bytes}>"
    conditions = [
        f"{tile}::offset({row}, {unit}) == {hardware_swizzle(row * row_bytes + unit * 16, row_bytes)}"
        for row in range(rows)
        for unit in range(row_bytes // 16)
    ]
    conditions += [f"{tile}::kBytes == {rows * row_bytes}", f"{tile}::kCols == {row_bytes // 2}"]
    assert_in_header(TILE, conditions)


def bits(value: int, low: int, high: int) -> int:
    return value >> low & (1 << high - low + 1) - 1


def descriptor(start: int, lbo: int, sbo: int, swizzle: int) -> int:
    """A matrix descriptor from the PTX ISA's table; addresses in bytes, swizzle 0 (none), 1 (128), 2 (64)."""
    return (start & 0x3FFFF) >> 4 | lbo >> 4 << 16 | sbo >> 4 << 32 | swizzle << 62


STARTS = (0, 16, 1024, 8192, 0x12340, 0x38800, 232_448 - 8192)


@pytest.mark.parametrize(("rows", "row_bytes"), [(64, 128), (16, 128), (192, 128), (64, 64)])
def test_descriptors(rows: int, row_bytes: int) -> None:
    tile, swizzle = f"SwizzledTile<{rows}, {row_bytes}>", {128: 1, 64: 2}[row_bytes]
    conditions = []
    for start in STARTS:
        k_major = descriptor(start, 0, 8 * row_bytes, swizzle)
        mn_major = descriptor(start, rows * row_bytes, 8 * row_bytes, swizzle)
        conditions.append(f"{tile}::k_major({start}) == {k_major}ull")
        conditions.append(f"{tile}::mn_major({start}) == {mn_major}ull")
        for value, lbo in ((k_major, 0), (mn_major, rows * row_bytes // 16)):
            fields = (bits(value, 0, 13), bits(value, 16, 29), bits(value, 32, 45))
            assert fields == (start // 16, lbo, row_bytes // 2)
            assert (bits(value, 46, 61), bits(value, 62, 63)) == (0, swizzle)
    conditions += [
        f"{tile}::kStepK == 32 / 16",
        f"{tile}::kStepMn == {16 * row_bytes // 16}",
        f"{tile}::kStepTile == {rows * row_bytes // 16}",
    ]
    assert_in_header(TILE, conditions)


@pytest.mark.parametrize("tiles", (1, 4, 9))
def test_group_major_descriptors(tiles: int) -> None:
    conditions = [
        f"GroupMajorTiles<{tiles}>::descriptor({start}) == {descriptor(start, 1024, tiles * 1024, 1)}ull"
        for start in STARTS
    ]
    conditions += [
        f"GroupMajorTiles<{tiles}>::kStepMn == {2 * tiles * 1024 // 16}",
        f"GroupMajorTiles<{tiles}>::kStepTile == {1024 // 16}",
    ]
    conditions += [
        f"descriptor_unswizzled({start}, 1024) == {descriptor(start, 1024, 128, 0)}ull" for start in STARTS
    ]
    assert_in_header(TILE, conditions)


def test_next_16_columns_are_another_bit_of_the_unit() -> None:
    """The stores of P flip bits 5 and 6 of one address for each group of 16 columns."""
    tile = "SwizzledTile<64>"
    conditions = [
        f"({tile}::offset({row}, {half}) ^ {32 * group}) == {tile}::offset({row}, {2 * group + half})"
        for row in range(64)
        for half in range(2)
        for group in range(4)
    ]
    assert_in_header(TILE, conditions)


# Division by multiplication


def multiply_high(numerators: np.ndarray, magic: int) -> np.ndarray:
    """`__umulhi`: the upper half of a 32 x 32-bit product."""
    return numerators.astype(np.uint64) * np.uint64(magic) >> np.uint64(32)


def first_wrong(divisor: int, limit: int) -> int | None:
    """The smallest n below `limit` for which multiply_high(n, ceil(2^32 / divisor)) is wrong.

    With e = magic d - 2^32, n = q d + r becomes q + (r + n e / 2^32) / d: too large once n e >= 2^32 (d - r),
    which happens first for r = d - 1.
    """
    excess = -(2**32) % divisor
    if excess == 0:
        return None
    first = -(-(2**32) // excess)
    first += (divisor - 1 - first) % divisor
    return first if first < limit else None


@pytest.mark.parametrize("divisor", (2, 3, 4, 12, 44, 100, 126, 128, 6252, 65_535))
def test_bound_of_the_division(divisor: int) -> None:
    magic = -(-(2**32) // divisor)
    wrong = first_wrong(divisor, 2**31)
    border = 2**31 if wrong is None else wrong
    for low in (0, border // 2, max(border - 100_000, 0)):
        numerators = np.arange(low, min(low + 100_000, border), dtype=np.int64)
        assert np.array_equal(multiply_high(numerators, magic), numerators // divisor)
    if wrong is not None:
        assert int(multiply_high(np.array([wrong]), magic)[0]) == wrong // divisor + 1


@pytest.mark.parametrize("divisor", (252, 1023, 6252, 65_535))
def test_largest_dividend(divisor: int) -> None:
    """Every number up to it is divided exactly, and not all of the next ones."""
    magic = -(-(2**32) // divisor)
    largest = largest_dividend(divisor)
    numerators = np.arange(largest + 1, dtype=np.int64)
    assert np.array_equal(multiply_high(numerators, magic), numerators // divisor)
    wrong = first_wrong(divisor, 2**33)
    assert wrong is not None and largest < wrong <= largest + divisor
    assert all(largest_dividend(2**k) == 2**32 - 1 for k in range(32))


def test_division_by_any_number() -> None:
    """By the C++ functions for some numbers, by their formulas for many."""
    draw = random.Random(0)
    divisors = [1, 2, 3, 7, 53, 64, 61, 576, 65535, 65536, 2**30, 2**30 + 1, 2**31 - 1]
    few = len(divisors)
    divisors += [draw.randrange(1, 2 ** draw.randint(1, 31)) for _ in range(200)]
    conditions = []
    for i, d in enumerate(divisors):
        magic, shift = common.divisor(d)
        inverse, exact_shift = common.exact_divisor(d)
        assert magic < 2**32
        near = [k * d + e for k in (1, 2, (2**31 - 1) // d) for e in (-1, 0, 1)]
        for n in (0, 2**31 - 1, *near, *(draw.randrange(2**31) for _ in range(50))):
            if 0 <= n < 2**31:
                assert n * magic >> shift == n // d
                assert (n * d >> exact_shift) * inverse % 2**32 == n
                if i < few and n in near:
                    conditions.append(f"divide({n}, {magic}u, {shift}) == {n // d}")
                    conditions.append(f"divide_exactly({n * d}ll, {inverse}u, {exact_shift}) == {n}")
    assert_in_header("common/division.cuh", conditions, constexpr=("divide", "divide_exactly"))


def page_magic(page_block_size: int) -> int:
    """As PreparedDecode packs it (tests/test_mla_launches.py)."""
    return -(-(2**36) // page_block_size) & 0xFFFFFFFF


@pytest.mark.parametrize("page_block_size", (32, *range(64, 641, 64), 1024, 2048, 4096, 65_536))
def test_page_of_a_token_for_every_length(page_block_size: int) -> None:
    """Usual page sizes: exact for every token number that an int32 length allows."""
    divisor = page_block_size // 16
    assert page_magic(page_block_size) == -(-(2**32) // divisor)
    assert first_wrong(divisor, 2**31 // 16) is None
    pages = 2**31 // page_block_size
    edges = np.arange(0, pages, max(pages // 20_000, 1), dtype=np.int64) * page_block_size
    tokens = np.concatenate([edges, edges + page_block_size - 16, [2**31 - 16]])
    tokens = tokens[(tokens >= 0) & (tokens < 2**31)]
    assert np.array_equal(multiply_high(tokens // 16, page_magic(page_block_size)), tokens // page_block_size)


def test_page_of_a_token_for_every_page_size() -> None:
    """Any multiple of 64 up to 8,192: exact for 2^27 tokens, more than a GPU's memory holds (154 GB)."""
    assert all(first_wrong(page // 16, 2**27 // 16) is None for page in range(64, 8193, 64))


def test_token_of_a_query_row() -> None:
    """Rows of a KV head are (token, head) pairs; the last tile reaches up to 63 rows further."""
    for heads in range(2, 1025):
        assert first_wrong(heads, 4096 * heads + 64) is None


# Tails


def block_in_shared_memory(length: int, first_token: int, page_block_size: int) -> list[int | None]:
    """The token in each of the 64 rows of a K block after TMA has written it; None is a row of zeros.

    Restates Walker::look_up of mla_dense_decode.cu and the out-of-range rule of TMA. Tokens are numbered
    within the request; rows of a page are tokens of it, whether they belong to this block or not.
    """
    box = box_rows(page_block_size)
    rows: list[int | None] = []
    for j in range(64 // box):
        first = first_token + j * box
        tokens = min(length - first, box)
        page = first // page_block_size
        row = first - page * page_block_size + tokens - box if tokens > 0 else page_block_size
        for i in range(row, row + box):
            rows.append(page * page_block_size + i if 0 <= i < page_block_size else None)
    return rows


def attended_rows(length: int, first_token: int, limit: int, box: int) -> list[int]:
    """The rows that mask_scores of mla_dense_decode.cu leaves to a query that sees `limit` keys."""
    tokens = min(length - first_token, 64)
    tail_box = tokens // box
    tail_shift = box - tokens % box
    limit = min(limit - first_token, 64)
    kept = []
    for row in range(64):
        in_box = row // 8 * 8 // box
        shift = tail_shift if in_box == tail_box else 0
        begin = 64 if in_box > tail_box else in_box * box + shift
        if not (row < begin or row >= limit + shift):
            kept.append(row)
    return kept


@pytest.mark.parametrize("page_block_size", (16, 32, 64, 128, 192))
@pytest.mark.parametrize("first_token", (0, 64, 128, 640))
def test_every_visible_token_is_attended_once(page_block_size: int, first_token: int) -> None:
    """For every length of the last block and every causal limit, also limits before or in earlier blocks."""
    box = box_rows(page_block_size)
    for tail in range(1, 65):
        length = first_token + tail
        rows = block_in_shared_memory(length, first_token, page_block_size)
        assert all(token is None or token < length for token in rows), "a token past the length was loaded"
        for limit in {0, first_token - 1, *range(first_token, length + 1)}:
            kept = [rows[row] for row in attended_rows(length, first_token, limit, box)]
            assert kept == list(range(first_token, limit)), (tail, limit)


@pytest.mark.parametrize("page_block_size", (16, 32, 64, 128))
def test_full_blocks_need_no_mask(page_block_size: int) -> None:
    for length in (64, 65, 500):
        assert block_in_shared_memory(length, 0, page_block_size) == list(range(64))
        assert attended_rows(length, 0, length, box_rows(page_block_size)) == list(range(64))
