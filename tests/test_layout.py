"""Arithmetic of the dense kernel: swizzle, descriptors, fragments, division by multiplication, tails.

What is constexpr in C++, or can be made so, is evaluated by the compiler. The rest is restated here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pytest
from cuda_probe import assert_in_header, source

from rawmla.kernels.mla_dense_decode import box_rows, largest_dividend

TILE = "layout/swizzled_tile.cuh"
CHUNK_BYTES = 64 * 128


def hardware_swizzle(address: int, row_bytes: int = 128) -> int:
    """Swizzle of 128 bytes: bits 4-6 of a shared-memory address are XORed with its bits 7-9. Of 64: bits 4-5
    with bits 7-8.
    """
    return address ^ (address >> 7 & row_bytes // 16 - 1) << 4


def tile_byte(row: int, col: int) -> int:
    """Where element (row, col) of a 64-row tile lies, as the head of swizzled_tile.cuh says."""
    return (col // 64) * 8192 + row * 128 + (((col % 64) // 8) ^ (row % 8)) * 16 + (col % 8) * 2


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


def test_tile_formula_is_the_hardware_swizzle_of_its_chunks() -> None:
    bytes_used = set()
    for row in range(64):
        for col in range(576):
            linear = col // 64 * CHUNK_BYTES + row * 128 + col % 64 * 2
            assert tile_byte(row, col) == hardware_swizzle(linear)
            bytes_used.add(tile_byte(row, col))
    assert bytes_used == set(range(0, 64 * 576 * 2, 2))


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


def test_descriptor_steps_reach_every_element() -> None:
    """What wgmma reads through a descriptor is the element that the tile formula puts there."""
    sbo, step_k_major, step_mn_major = 1024, 32, 2048
    for chunk in (0, 3, 8):
        for step in range(4):
            start = chunk * CHUNK_BYTES + step * step_k_major
            for row in range(64):
                for k in range(16):
                    linear = start + row // 8 * sbo + row % 8 * 128 + k * 2
                    assert hardware_swizzle(linear) == tile_byte(row, chunk * 64 + step * 16 + k)
    for step in range(4):
        for k in range(16):
            for col in range(256):
                linear = (
                    step * step_mn_major + col // 64 * CHUNK_BYTES + k // 8 * sbo + k % 8 * 128 + col % 64 * 2
                )
                assert hardware_swizzle(linear) == tile_byte(step * 16 + k, col)


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


# Fragments


def accumulator_place(thread: int, i: int) -> tuple[int, int]:
    """(row, column) of register i of a thread of the warpgroup, as the head of ptx/wgmma.cuh says."""
    warp, lane = thread // 32, thread % 32
    return 16 * warp + lane // 4 + 8 * (i >> 1 & 1), 8 * (i >> 2) + 2 * (lane % 4) + (i & 1)


def test_accumulator_layout_covers_the_tile() -> None:
    for registers, columns in ((32, 64), (128, 256)):
        places = {accumulator_place(thread, i) for thread in range(128) for i in range(registers)}
        assert places == {(row, col) for row in range(64) for col in range(columns)}


Word = tuple[int, int]  # (row, column of the first of two elements)


def exchanged(function: str, held: Sequence[list[Word]]) -> list[list[Word]]:
    """Runs the statements of a transposition in fragments.cuh for the lanes of a quad or pair in step."""
    body = re.search(
        rf"void {function}\(u32 \(&v\)\[{len(held)}\]\) \{{(.*?)\n\}}",
        source("layout/fragments.cuh"),
        re.DOTALL,
    )
    assert body
    conditions, *statements = (line.strip() for line in body[1].strip().split(";") if line.strip())
    masks = {name: int(bit) for name, bit in re.findall(r"(\w+) = threadIdx\.x & (\d)", conditions)}
    assert masks == ({"odd": 1, "upper": 2} if len(held) == 4 else {"odd": 1})
    lanes: list[dict[str, Word]] = [{f"v[{i}]": word for i, word in enumerate(words)} for words in held]
    select = r"(odd|upper) \? (\S+) : ([^\s,;]+)"
    for statement in statements:
        parsed = re.fullmatch(
            rf"(?:const u32 )?(\S+) = (?:__shfl_xor_sync\(0xffffffff, {select}, (\d)\)|{select})", statement
        )
        assert parsed, statement
        target, *exchange, own_flag, own_yes, own_no = parsed.groups()
        flag, yes, no, distance = exchange if exchange[0] else (own_flag, own_yes, own_no, "0")
        chosen = [values[yes if lane & masks[flag] else no] for lane, values in enumerate(lanes)]
        for lane, values in enumerate(lanes):
            values[target] = chosen[lane ^ int(distance)]
    return [[values[f"v[{i}]"] for i in range(len(held))] for values in lanes]


@pytest.mark.parametrize(("function", "size"), [("quad_transpose", 4), ("pair_transpose", 2)])
def test_transpositions(function: str, size: int) -> None:
    matrix = [[(row, column) for column in range(size)] for row in range(size)]
    assert exchanged(function, matrix) == [[(row, column) for row in range(size)] for column in range(size)]


@pytest.mark.parametrize(("groups", "function"), [(4, "quad_transpose"), (2, "pair_transpose")])
def test_columns_of_splits_come_back_in_order(groups: int, function: str) -> None:
    """A quad's pairs of `groups` groups of eight columns, stored as held, are neighbours once merged."""
    address = {
        4: "8 * unit",
        2: "16 * (unit / 4) + 8 * (unit % 2) + 4 * (unit / 2 % 2)",
    }[groups]
    assert f"half_row + {address}" in source("kernels/mla_combine.cu")
    columns = []
    for chunk in range(256 // (8 * groups)):
        held = [[(0, 8 * (groups * chunk + g) + 2 * lane) for g in range(groups)] for lane in range(4)]
        for first in range(0, 4, groups):
            lanes = exchanged(function, held[first : first + groups])
            for lane, words in enumerate(lanes, first):
                begin = eval(address.replace("/", "//"), {"unit": 4 * chunk + lane})
                assert [column for _, column in words] == [begin + 2 * i for i in range(groups)]
                columns += [column for _, column in words]
    assert sorted(columns) == list(range(0, 256, 2))


def test_q_registers_become_a_fragments() -> None:
    """Lanes load 16 bytes each of rows l / 4 and l / 4 + 8; the fragments want pairs of all of them."""
    for warp in range(4):
        for group in range(8):
            for i in range(14):
                rows = []  # q[2 i + r] of the quad's lanes, after the transposition
                for r in range(2):
                    row = 16 * warp + group + 8 * r
                    loaded = [[(row, 32 * i + 8 * lane + 2 * word) for word in range(4)] for lane in range(4)]
                    rows.append(exchanged("quad_transpose", loaded))
                for lane in range(4):
                    even, odd = rows[0][lane], rows[1][lane]
                    steps = [even[0], odd[0], even[1], odd[1]], [even[2], odd[2], even[3], odd[3]]
                    for step, fragment in enumerate(steps):
                        thread = 32 * warp + 4 * group + lane
                        places = [accumulator_place(thread, 2 * register) for register in range(4)]
                        column = 16 * (2 * i + step)
                        assert fragment == [(row, column + col) for row, col in places]


def test_staged_q_becomes_a_fragments() -> None:
    """Lane l gives ldmatrix row l % 16 and unit l / 16 of a step; of matrix i, a thread gets register i."""
    load = re.search(
        r"Chunk::offset\(warp_idx \* 16 \+ lane_idx % 16, lane_idx / 16\);\s+"
        r"auto place = .*? return \(src \^ \(step % 4 \* 32\)\) \+ step / 4 \* Chunk::kBytes;",
        source("kernels/mla_sparse_bf16.cu"),
        re.DOTALL,
    )
    assert load is not None
    for warp in range(4):
        for step in range(28):
            for lane in range(32):
                row = 16 * warp + lane % 16
                src = hardware_swizzle(row * 128 + lane // 16 * 16)
                address = (src ^ step % 4 * 32) + step // 4 * CHUNK_BYTES
                assert address == tile_byte(row, 16 * step + lane // 16 * 8)
            for thread in range(32 * warp, 32 * warp + 32):
                for register in range(4):  # of lanes 8 register .. 8 register + 7
                    row, col = accumulator_place(thread, 2 * register)
                    assert (row - 16 * warp) // 8 == register % 2 and col // 8 == register // 2


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


def page_magic(page_block_size: int) -> int:
    """As PreparedDecode packs it (tests/test_kernels_compile.py)."""
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
