"""Block masks of flex attention: lists that are known, how lists may lie, and lists of other blocks."""

from __future__ import annotations

import gc
import math
import struct
import weakref
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

import rawmla
from calls.fakes import LISTS, FakeArray, FakeFramework, World, contiguous
from calls.test_dense import COPY
from calls.test_flex import (
    COLUMNS,
    EXPECTED,
    EXPECTED_LISTS,
    HQ,
    MASK_LISTS,
    ROWS,
    B,
    L,
    S,
    call,
    mask_of,
    only,
    plain,
    resize,
)
from rawmla import jit
from rawmla.flex.block_mask import _unset_mask
from rawmla.kernels import block_mask as mask_kernels
from rawmla.kernels.block_mask import BlockLists


class TestKnownLists:
    """Lists that passed the checks of a call before: what else they and their mask become is seen."""

    QKV = ("query", "key", "value")

    @pytest.fixture
    def mask(self, world: World) -> Any:
        """A mask that a call knows."""
        mask = mask_of()
        call(plain(), block_mask=mask)
        return mask

    def reads(self, world: World, mask: Any) -> list[str]:
        """What a call reads."""
        world.reads.clear()
        call(plain(), block_mask=mask)
        return [name for name in world.reads if name not in self.QKV]

    def addresses(self, world: World) -> tuple[int, ...]:
        return tuple(world.flex[-1].more[1:5])

    def test_are_not_read_again(self, world: World) -> None:
        masks = [mask_of(), mask_of(full=False)]
        assert [self.reads(world, mask) for mask in masks] == [MASK_LISTS, MASK_LISTS[:2]]
        for mask, full in ((masks[0], (0x6000, 0x7000)), (masks[1], (0, 0)), (masks[0], (0x6000, 0x7000))):
            assert self.reads(world, mask) == [] and self.addresses(world) == (0x4000, 0x5000, *full)
        same_lists = SimpleNamespace(**vars(masks[0]), mask_mod=masks[0].mask_mod)
        assert self.reads(world, same_lists) == []

    @pytest.mark.parametrize("name", LISTS)
    def test_another_list_or_address(self, world: World, mask: Any, name: str) -> None:
        setattr(mask, name, getattr(mask, name).but(ptr=0xE000))
        assert self.reads(world, mask) == MASK_LISTS
        getattr(mask, name).ptr = 0xF000
        assert self.reads(world, mask) == MASK_LISTS
        assert self.addresses(world)[LISTS.index(name)] == 0xF000

    def test_another_shape(self, world: World, mask: Any) -> None:
        mask.kv_indices.shape = (1, 1, ROWS, COLUMNS - 1)
        assert self.reads(world, mask) == MASK_LISTS
        assert world.flex[-1].call.mods.lists.columns == (COLUMNS - 1, COLUMNS)
        mask.kv_indices.shape = (1, 1, ROWS - 1, COLUMNS)
        with pytest.raises(ValueError, match=r"^block_mask\.kv_indices"):
            call(plain(), block_mask=mask)

    def test_no_full_lists_any_more(self, world: World, mask: Any) -> None:
        mask.full_kv_num_blocks = mask.full_kv_indices = None
        assert self.reads(world, mask) == MASK_LISTS[:2] and self.addresses(world)[2:] == (0, 0)

    @pytest.mark.parametrize(
        ("name", "value"),
        (
            ("seq_lengths", (L + 1, S)),
            ("BLOCK_SIZE", (128, 100)),
            ("mask_mod", _unset_mask),
            ("kv_num_blocks", None),
            ("full_kv_indices", None),
        ),
    )
    def test_what_is_refused(self, world: World, mask: Any, name: str, value: Any) -> None:
        setattr(mask, name, value)
        with pytest.raises(ValueError, match="^block_mask: expected"):
            call(plain(), block_mask=mask)

    def test_another_function(self, world: World, mask: Any) -> None:
        mask.mask_mod = rawmla.CudaMod("q_idx > kv_idx")
        assert self.reads(world, mask) == [] and "q_idx > kv_idx" in world.flex[-1].call.mods.header[1]

    def test_other_queries(self, world: World) -> None:
        """What is checked against them is checked again: batches, heads, and the stream."""
        mask, other = mask_of(B, HQ), FakeFramework("other")
        self.reads(world, mask)
        one_batch = {name: plain()[name].but(shape=(1, *plain()[name].shape[1:])) for name in self.QKV}
        with pytest.raises(ValueError, match="a batch and heads that divide"):
            call(plain() | one_batch, block_mask=mask)
        elsewhere = {name: plain()[name].but(framework=other) for name in self.QKV}
        for _ in range(2):
            other.stream = 0x51
            call(plain() | elsewhere, block_mask=mask)
            other.stream = 0x99
            with pytest.raises(ValueError, match="expected a other array, as query is, .* got a fake array"):
                call(plain() | elsewhere, block_mask=mask)

    def test_copied_lists_are_copied_at_every_call(self, world: World) -> None:
        mask = mask_of()
        mask.kv_indices = mask.kv_indices.but(dtype="int64")
        for count in (1, 2):
            assert self.reads(world, mask) == MASK_LISTS
            assert world.framework.copied == [mask.kv_indices] * count

    def test_are_not_kept_alive(self, world: World) -> None:
        mask = mask_of()
        self.reads(world, mask)
        lists = [weakref.ref(getattr(mask, name)) for name in LISTS]
        world.flex.clear()
        del mask
        gc.collect()
        assert [one() for one in lists] == [None] * 4


# ---- how the lists of a mask lie


def lists_of(world: World, mask: Any) -> BlockLists:
    call(plain(), block_mask=mask)
    found: BlockLists = world.flex[-1].call.mods.lists
    return found


def steps(*shape: int) -> tuple[int, ...]:
    """Strides, 0 where there is one only, but for the row."""
    strides = contiguous(shape)
    return tuple(0 if extent == 1 else step for extent, step in zip(shape, strides, strict=True))


@pytest.mark.parametrize("leading", ((1, 1), (B, 1), (1, HQ), (B, HQ), (B, 4), (HQ,), ()), ids=str)
def test_leading_dimensions(world: World, leading: tuple[int, ...]) -> None:
    """(batch, head, row) with steps of 0 where there is one only."""
    mask = mask_of(*leading)
    if not leading:
        for letters in ("kv", "full_kv"):
            resize(letters, ROWS, COLUMNS)({"block_mask": mask})
    found = lists_of(world, mask)
    b, h = (1, 1, *leading)[-2:]
    assert found.counts_strides == (steps(b, h, ROWS),) * 2
    assert found.lists_strides == (steps(b, h, ROWS, COLUMNS)[:3],) * 2
    assert (found.batches, found.heads) == (b, h)


def test_expanded_and_narrow_lists(world: World) -> None:
    """Each pair has strides and columns of its own, also along batch and head that are there once."""
    mask = mask_of(B, HQ)
    mask.kv_indices = mask.kv_indices.but(strides=(0, 0, 100, 1))
    mask.kv_num_blocks = mask.kv_num_blocks.but(strides=(0, 0, 5))
    mask.full_kv_indices = mask.full_kv_indices.but(shape=(B, HQ, ROWS, 2))
    mask.full_kv_num_blocks = mask.full_kv_num_blocks.but(strides=(3, -6, 2))
    found = lists_of(world, mask)
    assert found.counts_strides == ((0, 0, 5), (3, -6, 2))
    assert found.lists_strides == ((0, 0, 100), (HQ * ROWS * 2, ROWS * 2, 2))
    assert found.columns == (COLUMNS, 2) and not world.framework.copied


@pytest.mark.parametrize("dtype", ("int64", "int16", "uint8"))
def test_other_integers_are_converted(world: World, dtype: str) -> None:
    mask = mask_of(B, HQ)
    given = [getattr(mask, name) for name in LISTS]
    mask.kv_num_blocks = given[0].but(dtype=dtype, strides=(0, 0, 1))
    mask.full_kv_indices = given[3].but(dtype=dtype)
    found = lists_of(world, mask)
    assert world.framework.copied == [mask.kv_num_blocks, mask.full_kv_indices]
    # Rows of a copy are padded to a multiple of 8.
    assert found.counts_strides == ((HQ * 8, 8, 1), (HQ * ROWS, ROWS, 1))
    assert found.lists_strides == ((HQ * ROWS * 4, ROWS * 4, 4), (HQ * ROWS * 8, ROWS * 8, 8))
    assert world.flex[0].more[1:] == (COPY + 0x1000, 0x5000, 0x6000, COPY + 0x2000, 0)


def test_a_last_dimension_with_steps_is_copied(world: World) -> None:
    mask = mask_of()
    mask.kv_indices = mask.kv_indices.but(strides=(24, 24, 8, 2))
    mask.kv_num_blocks = mask.kv_num_blocks.but(strides=(6, 6, 2))
    found = lists_of(world, mask)
    assert world.framework.copied == [mask.kv_indices]
    assert (found.counts_strides[0], found.lists_strides[0]) == ((0, 0, 2), (0, 0, 8))


def test_torchs_mask_of_everything(world: World) -> None:
    """It has one huge block, and lengths of (1, 1)."""
    mask = mask_of(size=2**30)
    mask.seq_lengths = (1, 1)
    call(plain(), block_mask=mask)
    launch = only(world)
    assert launch.call == EXPECTED and launch.more[1:] == (0,) * 5
    assert launch.text.count("kIsThere = false") == 2


def test_torchs_mask(world: World) -> None:
    """Further attributes are not looked at, and those of a mask of torch are enough."""
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    indexed = flex.create_block_mask(flex.noop_mask, 1, 1, L, S, device="cpu")[:, :, :1]
    with pytest.raises(ValueError, match="^block_mask: expected a mask_mod .* got a mask that was indexed"):
        call(plain(), block_mask=indexed)
    assert world.untouched
    for mask_mod, asked in ((lambda b, h, q, k: q >= 0, 1), (flex.noop_mask, 0)):
        theirs = flex.create_block_mask(mask_mod, 1, 1, L, S, device="cpu")
        for name, address in zip(LISTS, (0x4000, 0x5000, 0x6000, 0x7000), strict=True):
            setattr(theirs, name, FakeArray(tuple(getattr(theirs, name).shape), ptr=address))
        theirs.something_new = object()
        world.flex.clear()
        call(plain(), block_mask=theirs)
        launch = only(world)
        assert launch.call.mods.lists == EXPECTED_LISTS and launch.text.count("kIsThere = true") == asked


@pytest.mark.parametrize("d", (256, 224))
def test_wide_heads_have_tiles_of_64_keys(world: World, d: int) -> None:
    wide = {name: plain()[name].but(shape=(*plain()[name].shape[:3], d)) for name in TestKnownLists.QKV}
    call(plain() | wide, block_mask=mask_of(size=(128, 64)))
    assert world.flex[0].call.mods.lists.block_k == 64 and not world.enqueued


# ---- blocks that a kernel cannot walk: lists of blocks of 128 are made of them at every call


def read_struct(declared: Any, params: bytes) -> dict[str, Any]:
    """The members of a parameter struct by name; arrays are tuples."""
    assert len(params) == declared.size
    found = {}
    for member in declared.members:
        values = struct.unpack_from(f"<{member.code}", params, member.offset)
        found[member.name] = values if member.length else values[0]
    return found


def check_recut(
    world: World,
    launch: Any,
    made: Sequence[int],
    leading: tuple[int, int],
    lengths: tuple[int, int],
    block: tuple[int, int],
) -> Any:
    """Check what makes lists of blocks of 128 in scratch, and where; returns the launch that clears states.

    Args:
        made: addresses of the lists for the attention kernel.
        lengths: tokens along lines and along entries of the lists.
        block: the mask's block, in the same order.
    """
    lines, entries = [-(-length // size) for length, size in zip(lengths, block, strict=True)]
    new_lines, new_entries = [-(-length // 128) for length in lengths]
    masks = math.prod(leading)
    clear, scatter, lists = world.enqueued
    assert [x.name for x in world.enqueued] == ["clear", "block_mask_scatter", "block_mask_lists"]
    assert {x.stream for x in world.enqueued} == {0x51}
    assert clear.size % 4 == 0 and masks * lines * entries <= clear.size < masks * lines * entries + 4
    of_scatter = read_struct(mask_kernels.SCATTER_PARAMS, scatter.params)
    of_lists = read_struct(mask_kernels.LISTS_PARAMS, lists.params)
    assert clear.address == of_scatter["states"] == of_lists["states"]
    assert scatter.grid == (min(2048, -(-masks * lines // 4)), 1, 1)
    names = ("partial_counts", "partial_blocks", "full_counts", "full_blocks")
    assert [of_lists[name] for name in names] == list(made)
    # Every place lies in the scratch after that of the kernels, is aligned, and overlaps no other.
    scratch = world.framework.allocated[-1]
    counts = 4 * masks * new_lines
    parts = zip(made, (counts, counts * new_entries) * 2, strict=True)
    places = sorted([(scratch.ptr, launch.prepared.scratch_bytes), (clear.address, clear.size), *parts])
    assert not any(address % 16 for address, _ in places)
    ends = [address + size for address, size in places]
    assert all(end <= begin for end, (begin, _) in zip(ends, places[1:], strict=False))
    assert places[0][0] == scratch.ptr and ends[-1] <= scratch.ptr + scratch.shape[0]
    return clear


def of_128(leading: tuple[int, ...], lines: int, entries: int) -> BlockLists:
    """The lists that are made: contiguous, of blocks of 128."""
    counts, lists = contiguous((*leading, lines)), contiguous((*leading, lines, entries))[:3]
    return BlockLists((counts,) * 2, (lists,) * 2, (entries,) * 2, *leading, 128, 128)


@pytest.mark.parametrize("size", ((16, 16), (96, 128), (128, 96), (128, 64), (384, 48), (80, 512)), ids=str)
@pytest.mark.parametrize("leading", ((1, 1), (B, 4)), ids=str)
def test_other_blocks(world: World, size: tuple[int, int], leading: tuple[int, int]) -> None:
    rows, columns = -(-L // size[0]), -(-S // size[1])
    mask_mod = rawmla.CudaMod("q_idx * x >= kv_idx", {"x": 2.5})
    mask = mask_of(*leading, size=size, mask_mod=mask_mod)
    call(plain(), block_mask=mask)
    launch = only(world)
    clear = check_recut(world, launch, launch.more[1:5], leading, (L, S), size)
    assert launch.more.states == clear.address and launch.scratch == world.framework.allocated[-1].ptr
    assert launch.call.mods.states == (rows, columns, *size)
    assert launch.call.mods.lists == of_128(leading, ROWS, COLUMNS)

    # The mask function is asked in partial blocks alone, of the mask's size: their states are read.
    shape = (*leading, rows, columns)
    parts = (clear.address, *contiguous(shape), *shape, 2.5, *leading, *size)
    assert launch.mask_mod == struct.pack("<Q4q4if4x4q", *parts)
    before, _ = launch.text.split("return q_idx * x >= kv_idx")
    assert "if (block_state != 1) return block_state == 2;" in before

    call(plain(), block_mask=mask)
    first, second = world.flex
    assert first.prepared is second.prepared and len(world.enqueued) == 6
    assert first.scratch != second.scratch and first.more[1:] != second.more[1:]


def test_other_blocks_without_full_lists_and_function(world: World) -> None:
    call(plain(), block_mask=mask_of(full=False, mask_mod=rawmla.noop_mask, size=32))
    scatter = read_struct(mask_kernels.SCATTER_PARAMS, world.enqueued[1].params)
    assert (scatter["full_kv_num_blocks"], scatter["list_columns"]) == (0, (16, 0))
    launch = only(world)
    assert 0 not in launch.more[1:]
    assert "return block_state == 2;\nreturn true;" in launch.text
    assert set(world.loaded) == {mask_kernels.LISTS_SPEC, mask_kernels.SCATTER_SPEC}


def test_kernels_are_loaded_before_anything_is_made(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "get_kernel", Mock(side_effect=rawmla.KernelNotReadyError("block_mask_lists")))
    with pytest.raises(rawmla.KernelNotReadyError):
        call(plain(), block_mask=mask_of(size=32))
    assert world.untouched
