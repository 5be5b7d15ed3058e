"""Which blocks of keys a block of queries attends: lists of block numbers, for flex attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

from ..call.checks import as_int

__all__ = ["BlockMask", "and_masks", "as_block_size", "noop_mask", "or_masks"]

Mask = Callable[..., Any]
DEFAULT_BLOCK_SIZE = 128
MAX_BLOCK_SIZE = 2**30
PICTURE_SIDE = 20
PICTURES = 4


def noop_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> bool:
    """The mask that hides nothing."""
    return True


def _unset_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    raise ValueError(
        "block_mask: expected mask_mod to be set again, since the mask was indexed and its function still "
        "counts requests, heads and tokens as before; assign block_mask.mask_mod"
    )


def and_masks(*mask_mods: Mask) -> Mask:
    """The mask that hides what any of these hides."""

    def both(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        result: Any = True
        for number, mask_mod in enumerate(mask_mods):
            one = mask_mod(b, h, q_idx, kv_idx)
            result = result & one if number else one
        return result

    return both


def or_masks(*mask_mods: Mask) -> Mask:
    """The mask that hides what all of these hide."""

    def either(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        result: Any = False
        for number, mask_mod in enumerate(mask_mods):
            one = mask_mod(b, h, q_idx, kv_idx)
            result = result | one if number else one
        return result

    return either


class _Lists(NamedTuple):
    """How many blocks each row of blocks has `[.., rows]`, and which `[.., rows, columns]`, int32."""

    counts: Any
    indices: Any


class BlockMask:
    """The blocks of a mask: which are attended, and which of these without asking the mask function.

    A *partial* block is in `kv_indices`: flex attention asks `mask_mod` for each of its positions. A *full*
    one is in `full_kv_indices`: all its positions are attended. What is in neither list is not attended.

    Attributes
    ----------
    seq_lengths : (int, int)
        Query tokens and keys.
    kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices : array
        int32 `[B, H, rows]` and `[B, H, rows, columns]`: of each row of query blocks, how many key blocks are
        partial or full, and which. Entries past the count mean nothing. Full ones may be None.
    q_num_blocks, q_indices, full_q_num_blocks, full_q_indices : array
        The same by columns: of each key block, its query blocks. None unless a backward needs them.
    BLOCK_SIZE : (int, int)
        Query tokens and keys of a block.
    mask_mod : callable or CudaMod
        `mask_mod(b, h, q_idx, kv_idx)`.

    Notes
    -----
    The class has the attributes and methods of torch.nn.attention.flex_attention.BlockMask, for arrays of
    torch or CuPy. Indexing keeps a dimension that is indexed by an int.
    """

    def __init__(
        self,
        seq_lengths: tuple[int, int],
        kv_num_blocks: Any,
        kv_indices: Any,
        full_kv_num_blocks: Any = None,
        full_kv_indices: Any = None,
        q_num_blocks: Any = None,
        q_indices: Any = None,
        full_q_num_blocks: Any = None,
        full_q_indices: Any = None,
        BLOCK_SIZE: int | tuple[int, int] = DEFAULT_BLOCK_SIZE,
        mask_mod: Any = noop_mask,
    ) -> None:
        for counts, indices, name in (
            (kv_num_blocks, kv_indices, "kv"),
            (full_kv_num_blocks, full_kv_indices, "full_kv"),
            (q_num_blocks, q_indices, "q"),
            (full_q_num_blocks, full_q_indices, "full_q"),
        ):
            _check_lists(counts, indices, name)
        if kv_num_blocks is None:
            raise ValueError("kv_num_blocks: expected an array, got None")
        self.seq_lengths = seq_lengths
        self.kv_num_blocks, self.kv_indices = kv_num_blocks, kv_indices
        self.full_kv_num_blocks, self.full_kv_indices = full_kv_num_blocks, full_kv_indices
        self.q_num_blocks, self.q_indices = q_num_blocks, q_indices
        self.full_q_num_blocks, self.full_q_indices = full_q_num_blocks, full_q_indices
        self.BLOCK_SIZE = as_block_size(BLOCK_SIZE)
        self.mask_mod = mask_mod

    @classmethod
    def from_kv_blocks(
        cls,
        kv_num_blocks: Any,
        kv_indices: Any,
        full_kv_num_blocks: Any = None,
        full_kv_indices: Any = None,
        BLOCK_SIZE: int | tuple[int, int] = DEFAULT_BLOCK_SIZE,
        mask_mod: Any = None,
        seq_lengths: tuple[int, int] | None = None,
        compute_q_blocks: bool = True,
    ) -> BlockMask:
        """A mask from its lists by rows; those by columns follow unless `compute_q_blocks` is False.

        Lengths default to whole blocks, as many keys as `kv_indices` has columns.
        """
        for counts, indices, name in (
            (kv_num_blocks, kv_indices, "kv"),
            (full_kv_num_blocks, full_kv_indices, "full_kv"),
        ):
            _check_lists(counts, indices, name)
        q_size, kv_size = as_block_size(BLOCK_SIZE)
        rows, columns = kv_indices.shape[-2:]
        if seq_lengths is None:
            seq_lengths = (rows * q_size, columns * kv_size)
        by_columns = full_by_columns = _Lists(None, None)
        if compute_q_blocks:
            columns = -(-seq_lengths[1] // kv_size)
            by_columns = _transposed(_Lists(kv_num_blocks, kv_indices), columns)
            if full_kv_num_blocks is not None:
                full_by_columns = _transposed(_Lists(full_kv_num_blocks, full_kv_indices), columns)
        return cls(
            seq_lengths,
            kv_num_blocks,
            kv_indices,
            full_kv_num_blocks,
            full_kv_indices,
            by_columns.counts,
            by_columns.indices,
            full_by_columns.counts,
            full_by_columns.indices,
            (q_size, kv_size),
            noop_mask if mask_mod is None else mask_mod,
        )

    def as_tuple(self, flatten: bool = True) -> tuple[Any, ...]:
        """The lengths, lists, block sizes and the function; lengths and sizes as pairs unless `flatten`."""
        lists = (
            self.kv_num_blocks, self.kv_indices, self.full_kv_num_blocks, self.full_kv_indices,
            self.q_num_blocks, self.q_indices, self.full_q_num_blocks, self.full_q_indices,
        )  # fmt: skip
        if flatten:
            return (*self.seq_lengths, *lists, *self.BLOCK_SIZE, self.mask_mod)
        return (self.seq_lengths, *lists, self.BLOCK_SIZE, self.mask_mod)

    @property
    def shape(self) -> tuple[int, ...]:
        """The dimensions of the lists, then query tokens and keys."""
        return (*self.kv_indices.shape[:-2], *self.seq_lengths)

    def numel(self) -> int:
        """Positions of the mask, attended or not."""
        return prod(self.shape)

    def sparsity(self) -> float:
        """Percent of the blocks that are in no list. Waits for the device."""
        blocks = int(self.kv_num_blocks.sum())
        if self.full_kv_num_blocks is not None:
            blocks += int(self.full_kv_num_blocks.sum())
        sizes = zip(self.seq_lengths, self.BLOCK_SIZE, strict=True)
        all_blocks = prod(self.shape[:-2]) * prod(-(-length // size) for length, size in sizes)
        return 100 * (1 - blocks / all_blocks) if all_blocks else 0.0

    def to_dense(self) -> Any:
        """int32 `[B, H, rows, columns]`: 1 where a block is attended."""
        columns = max(self.kv_indices.shape[-1], -(-self.seq_lengths[1] // self.BLOCK_SIZE[1]))
        dense = _dense(_Lists(self.kv_num_blocks, self.kv_indices), columns)
        if self.full_kv_num_blocks is not None:
            dense = dense | _dense(_Lists(self.full_kv_num_blocks, self.full_kv_indices), columns)
        return dense

    def to_string(self, grid_size: int | tuple[int, int] = PICTURE_SIDE, limit: int = PICTURES) -> str:
        """A picture of each mask: a full block for what is attended, a shaded one for parts, else a space.

        At most `grid_size` rows and columns of characters, -1: one for each block; at most `limit` masks.
        """
        dense = self.to_dense().tolist()
        batch = self.kv_indices.shape[:-2]
        pictures: list[str] = []
        for place in _places(batch):
            if len(pictures) == limit:
                pictures.append("...")
                break
            rows = dense
            for index in place:
                rows = rows[index]
            pictures.append("\n".join([str(place), *_picture(rows, grid_size)]))
        return "\n\n".join(pictures)

    def __str__(self) -> str:
        return f"BlockMask(shape={self.shape}, sparsity={self.sparsity():.2f}%,\n{self.to_string()}\n)"

    def __getitem__(self, index: Any) -> BlockMask:
        """The mask of some requests, heads and rows of query blocks. `mask_mod` has to be set again."""
        given = index if isinstance(index, tuple) else (index,)
        kept = tuple(slice(i, i + 1 or None) if isinstance(i, int) else i for i in given)
        batch = len(self.kv_indices.shape) - 2
        if len(kept) > batch + 1:
            raise IndexError(f"block_mask: expected at most {batch + 1} indices, got {len(kept)}")
        q_len, kv_len = self.seq_lengths
        if len(kept) == batch + 1:
            q_len = self._tokens_of(kept[batch])
        return self._changed(lambda lists: _Lists(*[x[kept] for x in lists]), (q_len, kv_len), _unset_mask)

    def _changed(
        self, change: Callable[[_Lists], _Lists], seq_lengths: tuple[int, int], mask_mod: Any
    ) -> BlockMask:
        """The mask with other lists by rows."""
        partial = change(_Lists(self.kv_num_blocks, self.kv_indices))
        full = _Lists(self.full_kv_num_blocks, self.full_kv_indices)
        if full.counts is not None:
            full = change(full)
        return BlockMask.from_kv_blocks(
            partial.counts,
            partial.indices,
            full.counts,
            full.indices,
            self.BLOCK_SIZE,
            mask_mod,
            seq_lengths,
            self.q_indices is not None,
        )

    def _tokens_of(self, rows: Any) -> int:
        """Query tokens in rows of blocks; the last row may have fewer."""
        size, count = self.BLOCK_SIZE[0], self.kv_indices.shape[-2]
        if not isinstance(rows, slice):
            return int(rows.shape[0]) * size if hasattr(rows, "shape") else len(rows) * size
        chosen = range(count)[rows]
        tokens = len(chosen) * size
        return tokens - (count * size - self.seq_lengths[0]) if count - 1 in chosen else tokens

    def _adjust(self, q_len: int, kv_len: int) -> BlockMask:
        """The mask for other lengths, which are no longer; blocks beyond them are dropped."""
        q_size, kv_size = self.BLOCK_SIZE
        rows, columns = -(-q_len // q_size), -(-kv_len // kv_size)

        def cut(lists: _Lists) -> _Lists:
            return _listed(_dense(_Lists(lists.counts[..., :rows], lists.indices[..., :rows, :]), columns))

        return self._changed(cut, (q_len, kv_len), self.mask_mod)

    def to(self, device: Any) -> BlockMask:
        """The mask on another device."""
        moved = [x.to(device) if hasattr(x, "to") else x for x in self.as_tuple(flatten=False)]
        return BlockMask(*moved)


def as_block_size(size: int | tuple[int, int]) -> tuple[int, int]:
    """BLOCK_SIZE as (query tokens, keys)."""
    pair = tuple(size) if isinstance(size, (tuple, list)) else (size, size)
    sizes = [as_int("BLOCK_SIZE", one) for one in pair]
    if len(sizes) != 2 or any(not 1 <= one <= MAX_BLOCK_SIZE or one % 16 for one in sizes):
        raise ValueError(
            f"BLOCK_SIZE: expected a multiple of 16 up to 2**30, or a pair of them, got {size!r}"
        )
    first, second = sizes
    return first, second


def _check_lists(counts: Any, indices: Any, name: str) -> None:
    if (counts is None) != (indices is None):
        raise ValueError(f"{name}_num_blocks and {name}_indices: expected both or none of them")
    if counts is not None and (len(indices.shape) < 2 or tuple(indices.shape[:-1]) != tuple(counts.shape)):
        raise ValueError(
            f"{name}_indices: expected shape [.., rows, columns] where {name}_num_blocks is [.., rows], got "
            f"{list(indices.shape)} and {list(counts.shape)}"
        )


def _dense(lists: _Lists, columns: int) -> Any:
    """int32 `[.., rows, columns]`: 1 where a block is in the lists."""
    counts, indices = lists
    wide = _zeros_like(indices, (*indices.shape[:-1], columns + 1))
    width = indices.shape[-1]
    order = _range_like(indices, width)
    # Entries past the count mean nothing; those past the columns are dropped.
    listed = (order < counts[..., None]) & (indices >= 0) & (indices < columns)
    places = indices * listed + columns * ~listed
    _put_ones(wide, places)
    return wide[..., :columns]


def _transposed(lists: _Lists, columns: int) -> _Lists:
    """Lists by columns: of each of so many key blocks, its query blocks, ascending; others behind them."""
    return _listed(_dense(lists, columns).swapaxes(-1, -2))


def _listed(dense: Any) -> _Lists:
    """Lists of the places of ones, ascending, with the others behind them."""
    counts = dense.sum(-1)
    return _Lists(counts.astype("int32") if _is_cupy(dense) else counts.int(), _stable_order(1 - dense))


# The few operations whose names differ between torch and CuPy


def _is_cupy(array: Any) -> bool:
    return hasattr(array, "__cuda_array_interface__") and not hasattr(array, "scatter_")


def _zeros_like(array: Any, shape: Sequence[int]) -> Any:
    if _is_cupy(array):
        import cupy

        return cupy.zeros(tuple(shape), "int32")
    return array.new_zeros(tuple(shape))


def _range_like(array: Any, count: int) -> Any:
    if _is_cupy(array):
        import cupy

        return cupy.arange(count, dtype="int32")
    import torch

    return torch.arange(count, dtype=torch.int32, device=array.device)


def _put_ones(array: Any, places: Any) -> None:
    if _is_cupy(array):
        import cupy

        cupy.put_along_axis(array, places.astype("int64"), 1, axis=-1)
    else:
        array.scatter_(-1, places.long(), 1)


def _stable_order(array: Any) -> Any:
    if _is_cupy(array):
        return array.argsort(axis=-1, kind="stable").astype("int32")
    return array.argsort(dim=-1, stable=True).int()


# ---- pictures


def _places(shape: Sequence[int]) -> list[tuple[int, ...]]:
    places: list[tuple[int, ...]] = [()]
    for extent in shape:
        places = [(*place, index) for place in places for index in range(extent)]
    return places


def _picture(rows: list[list[int]], grid_size: int | tuple[int, int]) -> list[str]:
    """Lines of a picture of a mask, each character the mean of some blocks."""
    side = grid_size if isinstance(grid_size, tuple) else (grid_size, grid_size)
    height, width = len(rows), len(rows[0]) if rows else 0
    row_step, column_step = (
        max(1, -(-extent // most)) if most > 0 else 1
        for extent, most in zip((height, width), side, strict=True)
    )
    lines = []
    for top in range(0, height, row_step):
        line = ""
        for left in range(0, width, column_step):
            cells = [x for row in rows[top : top + row_step] for x in row[left : left + column_step]]
            attended = sum(cells)
            line += "█" if attended == len(cells) else "░" if attended else " "
        lines.append(line)
    return lines
