"""Which blocks of keys a block of queries attends: lists of block numbers, for flex attention."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from .. import jit
from ..call.checks import as_int, show
from .block_lists import LISTS, Q_LISTS, Lists, check_lists, dense_of, listed, numpy_of, picture, transposed
from .functions import as_reading, check_mask
from .mods import Reading

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
    """The mask function that hides what any of these hides.

    Parameters
    ----------
    *mask_mods : callable
        Python functions `mask_mod(b, h, q_idx, kv_idx)`. None given: nothing is hidden.

    Returns
    -------
    callable
        A function of the same arguments, for `flex_attention` and `create_block_mask`.

    Raises
    ------
    TypeError
        One is no callable. CUDA text, also in a `CudaMod`, is joined by ``&&``.

    Notes
    -----
    Calls none of them, allocates and enqueues nothing.
    """
    return _joined(mask_mods, operator.and_, True, "&&")


def or_masks(*mask_mods: Mask) -> Mask:
    """The mask function that hides what all of these hide. None given: everything is hidden.

    Parameters, result and errors are as for `and_masks`, but CUDA text is joined by ``||``.
    """
    return _joined(mask_mods, operator.or_, False, "||")


def _joined(mask_mods: Sequence[Any], join: Callable[[Any, Any], Any], of_none: bool, in_text: str) -> Mask:
    """The mask function that joins results; ``of_none`` is the result where there is no function."""
    for i, mask_mod in enumerate(mask_mods):
        if not callable(mask_mod):
            raise TypeError(
                f"mask_mods[{i}]: expected a Python function, got {show(mask_mod)}; join CUDA text by "
                f"{in_text}"
            )

    def joined(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        result: Any = of_none
        for number, mask_mod in enumerate(mask_mods):
            one = mask_mod(b, h, q_idx, kv_idx)
            result = join(result, one) if number else one
        return result

    return joined


class BlockMask:
    """The blocks of a mask: which are attended, and which of these without asking the mask function.

    A *partial* block is in `kv_indices`: flex attention calls `mask_mod` for each of its positions. A *full*
    one is in `full_kv_indices`: all its positions are attended. A block in neither list is not attended.

    Attributes
    ----------
    seq_lengths : (int, int)
        Query tokens and keys.
    kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices : array
        int32 `[B, H, rows]` and `[B, H, rows, columns]`: of each row of query blocks, how many key blocks are
        partial or full, and which. Entries past the count mean nothing. Full ones may be None.
    q_num_blocks, q_indices, full_q_num_blocks, full_q_indices : array
        The same by columns: of each key block, its query blocks. Where they are None, each backward makes
        them of those by rows.
    BLOCK_SIZE : (int, int)
        Query tokens and keys of a block.
    mask_mod : callable, TracedMod, CudaMod or str
        `mask_mod(b, h, q_idx, kv_idx)`. It is read once, see Notes.

    Notes
    -----
    The class has the attributes and methods of torch.nn.attention.flex_attention.BlockMask, for arrays of
    torch or CuPy. Indexing keeps a dimension that is indexed by an int.

    Arrays are made with the framework of the lists, on its current stream; what reads them on the host says
    that it waits for the device.

    `create_block_mask` reads the function, or else the first call with the mask. Later calls compute with the
    numbers, tensor objects and sizes that the function read then, and do not look at the function. If a
    variable of the function is bound to another number or tensor, assign `mask_mod` again, so that the next
    call reads it. Values of tensors are read when a kernel runs, so changes in place are seen. A mask
    that is made of this one, by `to` or for other lengths, reads the function for itself.
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
        check_lists(LISTS, kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices)
        check_lists(Q_LISTS, q_num_blocks, q_indices, full_q_num_blocks, full_q_indices)
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

        Lengths default to whole blocks, as many keys as `kv_indices` has columns. Lists by columns are found
        by way of dense arrays `[.., rows, columns]`, which are allocated. Never waits for the device.
        """
        check_lists(LISTS, kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices)
        q_size, kv_size = as_block_size(BLOCK_SIZE)
        rows, columns = kv_indices.shape[-2:]
        if seq_lengths is None:
            seq_lengths = (rows * q_size, columns * kv_size)
        by_rows = [Lists(kv_num_blocks, kv_indices), Lists(full_kv_num_blocks, full_kv_indices)]
        by_columns = [Lists(None, None)] * 2
        if compute_q_blocks:
            columns = -(-seq_lengths[1] // kv_size)
            by_columns = [x if x.counts is None else transposed(x, columns) for x in by_rows]
        lists = [one for pair in (*by_rows, *by_columns) for one in pair]
        parts: list[Any] = [*lists, (q_size, kv_size), noop_mask if mask_mod is None else mask_mod]
        return cls(seq_lengths, *parts)

    @property
    def mask_mod(self) -> Any:
        """The mask function."""
        return self._mask_mod

    @mask_mod.setter
    def mask_mod(self, function: Any) -> None:
        self._mask_mod = function
        self._kept: tuple[int, Reading | None] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """The state that is pickled and copied: all but the reading of the function."""
        return {**self.__dict__, "_kept": None}

    def as_tuple(self, flatten: bool = True) -> tuple[Any, ...]:
        """The lengths, lists, block sizes and the function; lengths and sizes as pairs unless `flatten`."""
        lists = [getattr(self, name) for name in (*LISTS, *Q_LISTS)]
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
        blocks = sum(int(lists.counts.sum()) for lists in self._by_rows())
        sizes = zip(self.seq_lengths, self.BLOCK_SIZE, strict=True)
        all_blocks = prod(self.shape[:-2]) * prod(-(-length // size) for length, size in sizes)
        return 100 * (1 - blocks / all_blocks) if all_blocks else 0.0

    def to_dense(self) -> Any:
        """int32 `[B, H, rows, columns]`, a new array: 1 where a block is attended. Does not wait."""
        columns = max(self.kv_indices.shape[-1], -(-self.seq_lengths[1] // self.BLOCK_SIZE[1]))
        dense, *full = [dense_of(lists, columns) for lists in self._by_rows()]
        return dense | full[0] if full else dense

    def to_string(self, grid_size: int | tuple[int, int] = PICTURE_SIDE, limit: int = PICTURES) -> str:
        """A picture of each mask: a full block for what is attended, a shaded one for parts, else a space.

        At most `grid_size` rows and columns of characters, -1: one for each block; at most `limit` masks.
        Waits for the device, as `str()` of a mask does.
        """
        dense = self.to_dense().tolist()
        batch = self.kv_indices.shape[:-2]
        pictures: list[str] = []
        for place in np.ndindex(*batch):
            if len(pictures) == limit:
                pictures.append("...")
                break
            rows = dense
            for index in place:
                rows = rows[index]
            pictures.append("\n".join([str(place), *picture(rows, grid_size)]))
        return "\n\n".join(pictures)

    def __str__(self) -> str:
        return f"BlockMask(shape={self.shape}, sparsity={self.sparsity():.2f}%,\n{self.to_string()}\n)"

    def __getitem__(self, index: Any) -> BlockMask:
        """The mask of some requests, heads and rows of query blocks. `mask_mod` has to be set again.

        An index is an int, a slice, or a list or array of numbers. Rows by a list or array count as whole
        blocks each, also the last row of the mask, which may have fewer tokens: reading an array would wait
        for the device. Raises IndexError for too many indices and for an int out of range, TypeError for
        bools and for rows by bools. Allocates as `from_kv_blocks`.
        """
        given = index if isinstance(index, tuple) else (index,)
        extents = self.kv_num_blocks.shape
        batch = len(extents) - 1
        if len(given) > batch + 1:
            raise IndexError(f"block_mask: expected at most {batch + 1} indices, got {len(given)}")
        kept = tuple([_kept(one, extent) for one, extent in zip(given, extents, strict=False)])
        q_len, kv_len = self.seq_lengths
        if len(kept) == batch + 1:
            q_len = self._tokens_of(kept[batch])
        return self._changed(lambda lists: Lists(*[x[kept] for x in lists]), (q_len, kv_len), _unset_mask)

    def _changed(
        self, change: Callable[[Lists], Lists], seq_lengths: tuple[int, int], mask_mod: Any
    ) -> BlockMask:
        """The mask with other lists by rows."""
        partial, *full = [change(lists) for lists in self._by_rows()]
        full_counts, full_indices = full[0] if full else (None, None)
        return BlockMask.from_kv_blocks(
            *partial, full_counts, full_indices, self.BLOCK_SIZE, mask_mod, seq_lengths,
            self.q_indices is not None,
        )  # fmt: skip

    def _by_rows(self) -> list[Lists]:
        """The lists of partial blocks, and of full ones if there are any."""
        lists = [Lists(self.kv_num_blocks, self.kv_indices)]
        if self.full_kv_num_blocks is not None:
            lists.append(Lists(self.full_kv_num_blocks, self.full_kv_indices))
        return lists

    def _tokens_of(self, rows: Any) -> int:
        """Query tokens in rows of blocks; the last row may have fewer."""
        size, count = self.BLOCK_SIZE[0], self.kv_indices.shape[-2]
        if not isinstance(rows, slice):
            _check_rows(rows)
            return len(rows) * size
        chosen = range(count)[rows]
        tokens = len(chosen) * size
        return tokens - (count * size - self.seq_lengths[0]) if count - 1 in chosen else tokens

    def _adjust(self, q_len: int, kv_len: int) -> BlockMask:
        """The mask for other lengths, none above the mask's own; blocks beyond them are dropped.

        Allocates dense arrays `[.., rows, columns]` on the way; never waits for the device.
        """
        q_size, kv_size = self.BLOCK_SIZE
        rows, columns = -(-q_len // q_size), -(-kv_len // kv_size)

        def cut(lists: Lists) -> Lists:
            return listed(dense_of(Lists(lists.counts[..., :rows], lists.indices[..., :rows, :]), columns))

        return self._changed(cut, (q_len, kv_len), self.mask_mod)

    def to(self, device: Any) -> BlockMask:
        """The mask with its lists on another device; lists that are there already are shared.

        ``device`` is what `torch.Tensor.to` takes, or for arrays of CuPy and NumPy a CUDA device: an ordinal,
        "cuda:1" or a torch.device. `mask_mod` and what it reads stay as they are. The framework of the lists
        makes the copies, on its current streams; CuPy copies lists of NumPy. Raises ValueError where lists of
        CuPy or NumPy would go to another kind of device. "cpu" leaves lists of NumPy as they are.
        """
        lengths, *lists, sizes, mask_mod = self.as_tuple(flatten=False)
        moved = [None if array is None else _moved(array, device) for array in lists]
        parts: list[Any] = [lengths, *moved, sizes, mask_mod]
        return BlockMask(*parts)


def lacks_columns(mask: Any) -> bool:
    """Whether a mask has lists by rows only, of torch or CuPy: `with_columns` adds lists by columns."""
    has_full = getattr(mask, "full_kv_num_blocks", None) is not None
    names = Q_LISTS if has_full else Q_LISTS[:2]
    if all([getattr(mask, name, None) is not None for name in names]):
        return False
    rows = getattr(mask, "kv_indices", None)
    return type(rows).__module__.partition(".")[0] in ("torch", "cupy")


def with_columns(mask: Any) -> BlockMask:
    """A mask that lacks lists by columns, with them."""
    return BlockMask.from_kv_blocks(
        mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices, mask.BLOCK_SIZE,
        mask.mask_mod, mask.seq_lengths,
    )  # fmt: skip


def hides_nothing(mask_mod: Any) -> bool:
    """Whether a function is `noop_mask`, or torch's of that name."""
    if mask_mod is noop_mask:
        return True
    theirs = sys.modules.get("torch.nn.attention.flex_attention")
    return mask_mod is getattr(theirs, "noop_mask", noop_mask)


def read_mask(block_mask: Any, device: int, backward: bool = False) -> Reading | None:
    """Read the function of a mask, unless the mask keeps a reading for this device. None where the function
    hides nothing. With `backward`, check that the function reads nothing that requires grad.
    """
    kept = getattr(block_mask, "_kept", None)
    if kept is None or kept[0] != device:
        mask_mod = block_mask.mask_mod
        reading = None if hides_nothing(mask_mod) else as_reading(mask_mod, "mask_mod", device)
        kept = device, reading
        if isinstance(block_mask, BlockMask):
            block_mask._kept = kept
    _, reading = kept
    if backward and reading is not None:
        check_mask(reading)
    return reading


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


def as_ordinal(device: Any) -> int:
    """The ordinal of a CUDA device. None and "cuda" are the current device."""
    if device is None or device == "cuda":
        return jit.current_device()
    if isinstance(device, int) and not isinstance(device, bool) and device >= 0:
        return device
    kind, _, number = str(device).partition(":")
    if kind != "cuda" or (number and not number.isdigit()):
        raise ValueError(f"device: expected a CUDA device, got {show(device)}")
    return int(number) if number else jit.current_device()


def _kept(index: Any, extent: int) -> Any:
    """An index of a dimension as one that keeps it."""
    if isinstance(index, (bool, np.bool_)):
        raise TypeError(
            f"block_mask: expected an int, a slice, or a list or array of numbers as index, got {show(index)}"
        )
    if not isinstance(index, (int, np.integer)):
        return index
    place = int(index)
    if not -extent <= place < extent:
        raise IndexError(f"block_mask: expected an index of {-extent} to {extent - 1}, got {place}")
    place %= extent
    return slice(place, place + 1)


def _check_rows(rows: Any) -> None:
    """Check that a list or array selects rows by their numbers. torch takes uint8 for bools."""
    if str(getattr(rows, "dtype", "")) in ("bool", "torch.bool", "torch.uint8") or (
        isinstance(rows, (list, tuple)) and any(isinstance(row, bool) for row in rows)
    ):
        got = "bools"
    elif len(getattr(rows, "shape", (0,))) != 1:
        got = f"shape {list(rows.shape)}"
    else:
        return
    raise TypeError(
        f"block_mask: expected rows by numbers, in a list or an array of one dimension, got {got}"
    )


def _moved(array: Any, device: Any) -> Any:
    if numpy_of(array) is None:
        return array.to(device)
    if isinstance(array, np.ndarray) and str(device) == "cpu":
        return array
    ordinal = as_ordinal(device)
    import cupy

    with cupy.cuda.Device(ordinal):
        return cupy.asarray(array)
