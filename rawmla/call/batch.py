"""The arrays that all layers of a decoding step share: block table, lengths and plan.

An engine passes the same objects to every layer. They are read and checked once; later calls recognise them
by identity, address and shape, in a third of the time. Only the latest set is remembered, by weak references.
What this cannot see is an array whose strides alone were changed in place.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import ref

from ..call import checks
from ..call.arrays import READERS, Framework


class Requests(NamedTuple):
    """Where the requests of a batch lie in the cache. `owners` keeps arrays of other libraries alive."""

    table_ptr: int
    table_stride: int
    max_blocks: int
    lengths_ptr: int
    owners: tuple[Any, ...]


class Batch(NamedTuple):
    """`Requests` and the plan for them."""

    table_ptr: int
    table_stride: int
    max_blocks: int
    lengths_ptr: int
    tiles_ptr: int
    num_parts: int
    splits_ptr: int
    owners: tuple[Any, ...]


class _Checked(NamedTuple):
    """A set of arrays that passed the checks."""

    table: ref[Any]
    lengths: ref[Any]
    tiles: ref[Any]
    splits: ref[Any]
    table_shape: tuple[int, ...]
    lengths_shape: tuple[int, ...]
    tiles_shape: tuple[int, ...]
    splits_shape: tuple[int, ...]
    b: int
    device: int
    framework: Framework
    batch: Batch


_latest: _Checked | None = None  # replaced as a whole, so threads see one set or another


def read_requests(
    block_table: Any, cache_seqlens: Any, b: int, device: int, framework: Framework
) -> Requests:
    """Check the block table and the lengths of `b` requests; `device` and `framework` are those of q."""
    table = READERS[type(block_table)](block_table, "block_table")
    lengths = READERS[type(cache_seqlens)](cache_seqlens, "cache_seqlens")
    max_blocks = checks.table_width(table, b, device, framework)
    checks.check_lengths(lengths, b, device, framework)
    return Requests(table[0], table[2][0], max_blocks, lengths[0], (table[6], lengths[6]))


def read_batch(
    block_table: Any,
    cache_seqlens: Any,
    tiles: Any,
    splits: Any,
    b: int,
    device: int,
    framework: Framework,
) -> Batch:
    """Check block table, lengths and plan of `b` requests, unless they are those of the last call."""
    global _latest
    if _latest is not None:
        (
            old_table,
            old_lengths,
            old_tiles,
            old_splits,
            table_shape,
            lengths_shape,
            tiles_shape,
            splits_shape,
            old_b,
            old_device,
            old_framework,
            batch,
        ) = _latest
        pointer = framework.pointer
        if (
            old_table() is block_table is not None
            and old_lengths() is cache_seqlens is not None
            and old_tiles() is tiles is not None
            and old_splits() is splits is not None
            and old_b == b
            and old_device == device
            and old_framework is framework
            and block_table.shape == table_shape
            and cache_seqlens.shape == lengths_shape
            and tiles.shape == tiles_shape
            and splits.shape == splits_shape
            and pointer(block_table) == batch.table_ptr
            and pointer(cache_seqlens) == batch.lengths_ptr
            and pointer(tiles) == batch.tiles_ptr
            and pointer(splits) == batch.splits_ptr
        ):
            return batch

    requests = read_requests(block_table, cache_seqlens, b, device, framework)
    tiles_view = READERS[type(tiles)](tiles, "tile_scheduler_metadata")
    splits_view = READERS[type(splits)](splits, "num_splits")
    num_parts = checks.plan_rows(tiles_view, splits_view, b, device, framework, "q")
    given = (block_table, cache_seqlens, tiles, splits)
    owners = (*requests.owners, tiles_view[6], splits_view[6])
    batch = Batch(*requests[:4], tiles_view[0], num_parts, splits_view[0], owners)
    if all(array is owner for array, owner in zip(given, owners, strict=True)):
        batch = batch._replace(owners=())
        _latest = _Checked(
            ref(block_table),
            ref(cache_seqlens),
            ref(tiles),
            ref(splits),
            block_table.shape,
            cache_seqlens.shape,
            tiles.shape,
            splits.shape,
            b,
            device,
            framework,
            batch,
        )
    return batch
