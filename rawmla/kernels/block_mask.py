"""Host side of the block_mask kernels in cuda_src/kernels: block masks from functions, and from lists whose
blocks the attention kernel cannot walk; and the order in which tiles of keys add to dq.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

from .. import jit
from ..jit.params import I32, I64, POINTER, ParamStruct, bytes_type, changing
from .common import ceil_div

_STATES_THREADS = 256
_WARPS = 4
_CTAS = 2048
"""At most: warps and CTAs take several lines or blocks one after the other."""


class Grid(NamedTuple):
    """The blocks of a mask."""

    batches: int
    heads: int
    q_len: int
    kv_len: int
    block_q: int
    block_k: int

    @property
    def rows(self) -> int:
        """Rows of blocks."""
        return ceil_div(self.q_len, self.block_q)

    @property
    def columns(self) -> int:
        """Columns of blocks."""
        return ceil_div(self.kv_len, self.block_k)

    @property
    def blocks(self) -> int:
        """All blocks: bytes of their states."""
        return self.batches * self.heads * self.rows * self.columns


class BlockLists(NamedTuple):
    """Memory layout of the lists of partial and full blocks: strides in elements of (batch, head, row)."""

    counts_strides: tuple[tuple[int, int, int], tuple[int, int, int]]
    lists_strides: tuple[tuple[int, int, int], tuple[int, int, int]]
    columns: tuple[int, int]
    batches: int
    heads: int
    block_q: int
    block_k: int


_NOWHERE = (0, 0, 0)
NO_LISTS = BlockLists((_NOWHERE, _NOWHERE), (_NOWHERE, _NOWHERE), (0, 0), 1, 1, 1, 1)


class ListAddresses(NamedTuple):
    """Where lists go; the last two are 0 where full blocks are not kept apart."""

    partial_counts: int
    partial_blocks: int
    full_counts: int
    full_blocks: int


class Where(NamedTuple):
    """Where kernels are launched."""

    device: int
    stream: int
    capturing: Callable[[], bool]

    def launch(self, spec: jit.KernelSpec, ctas: int, params: bytes) -> None:
        """Enqueue a kernel with this number of CTAs, or the most that are useful."""
        kernel = jit.get_kernel(spec, self.device, capturing=self.capturing)
        kernel.launch((min(ctas, _CTAS), 1, 1), params, self.stream)


@cache
def states_params(mask_mod_bytes: int) -> ParamStruct:
    """Params of block_mask_states.cu for a mask function whose parameters take ``mask_mod_bytes`` bytes."""
    return ParamStruct(
        changing(bytes_type("MaskMod", mask_mod_bytes)("mask_mod"), POINTER("states")),
        I64("blocks"),
        I32("heads", "rows", "columns", "block_q", "block_k", "q_len", "kv_len"),
    )


LISTS_PARAMS = ParamStruct(
    POINTER("states", "partial_counts", "partial_blocks", "full_counts", "full_blocks"),
    I64("all_lines", "mask_blocks", "line_step", "entry_step"),
    I32("lines", "entries", "list_line", "list_entry", "state_line", "state_entry"),
    I32("line_tokens", "entry_tokens"),
)
SCATTER_PARAMS = ParamStruct(
    POINTER("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "states"),
    I64("counts_strides", "lists_strides", length=6),
    I64("all_rows"),
    I32("list_columns", length=2),
    I32("heads", "rows", "columns"),
)


def states_spec(header: tuple[str, str]) -> jit.KernelSpec:
    """The variant for a function; ``header`` is of `rawmla.flex.mods`."""
    return jit.KernelSpec("block_mask_states", (), threads=_STATES_THREADS, smem_bytes=0, headers=(header,))


LISTS_SPEC = jit.KernelSpec("block_mask_lists", (), threads=32 * _WARPS, smem_bytes=0)
SCATTER_SPEC = jit.KernelSpec("block_mask_scatter", (), threads=32 * _WARPS, smem_bytes=0)


def states(grid: Grid, header: tuple[str, str], mask_mod: bytes, address: int, where: Where) -> None:
    """Enqueue the kernel that writes the states of all blocks; ``mask_mod`` is of
    `rawmla.flex.mods.Form.pack`.
    """
    if not grid.blocks:
        return
    struct = states_params(len(mask_mod))
    params = bytearray(
        struct.pack(
            blocks=grid.blocks,
            heads=grid.heads,
            rows=grid.rows,
            columns=grid.columns,
            block_q=grid.block_q,
            block_k=grid.block_k,
            q_len=grid.q_len,
            kv_len=grid.kv_len,
        )
    )
    struct.changing.pack_into(params, 0, mask_mod, address)
    where.launch(states_spec(header), grid.blocks, bytes(params))


def lists(
    listed: Grid,
    address: int,
    made: ListAddresses,
    where: Where,
    *,
    by_columns: bool = False,
    state_blocks: tuple[int, int] | None = None,
) -> None:
    """Enqueue the kernel that lists blocks by rows, or by columns.

    ``state_blocks``: (query tokens, keys) of the blocks that have the states at ``address``, where they are
    others than those to be listed.
    """
    state_q, state_k = state_blocks or (listed.block_q, listed.block_k)
    columns = ceil_div(listed.kv_len, state_k)
    by_q = (listed.rows, listed.block_q, state_q, listed.q_len, columns)
    by_k = (listed.columns, listed.block_k, state_k, listed.kv_len, 1)
    line, entry = (by_k, by_q) if by_columns else (by_q, by_k)
    all_lines = listed.batches * listed.heads * line[0]
    if not all_lines:
        return
    params = LISTS_PARAMS.pack(
        states=address,
        **made._asdict(),
        all_lines=all_lines,
        mask_blocks=ceil_div(listed.q_len, state_q) * columns,
        line_step=line[4],
        entry_step=entry[4],
        lines=line[0],
        entries=entry[0],
        list_line=line[1],
        list_entry=entry[1],
        state_line=line[2],
        state_entry=entry[2],
        line_tokens=line[3],
        entry_tokens=entry[3],
    )
    where.launch(LISTS_SPEC, ceil_div(all_lines, _WARPS), params)


def scatter(given: Grid, lists: BlockLists, addresses: Sequence[int], address: int, where: Where) -> None:
    """Enqueue the kernel that writes the states of the blocks in lists, over zeros."""
    all_rows = given.batches * given.heads * given.rows
    if not all_rows or not given.columns:
        return
    counts, blocks, full_counts, full_blocks = addresses
    params = SCATTER_PARAMS.pack(
        kv_num_blocks=counts,
        kv_indices=blocks,
        full_kv_num_blocks=full_counts,
        full_kv_indices=full_blocks,
        states=address,
        counts_strides=(*lists.counts_strides[0], *lists.counts_strides[1]),
        lists_strides=(*lists.lists_strides[0], *lists.lists_strides[1]),
        all_rows=all_rows,
        list_columns=lists.columns,
        heads=given.heads,
        rows=given.rows,
        columns=given.columns,
    )
    where.launch(SCATTER_SPEC, ceil_div(all_rows, _WARPS), params)


_RANKS_THREADS = 128
RANKS_PARAMS = ParamStruct(
    POINTER("states", "ranks"),
    I64("all_rows"),
    I32("rows", "columns", "tiles"),
)
RANKS_SPEC = jit.KernelSpec("block_mask_ranks", (), threads=_RANKS_THREADS, smem_bytes=0)


def ranks(
    mask: Grid,
    lists: BlockLists,
    addresses: Sequence[int],
    places: tuple[int, int],
    tile_keys: int,
    *,
    device: int,
    stream: int,
    capturing: Callable[[], bool],
) -> None:
    """Enqueue what finds the order in which tiles of ``tile_keys`` keys add to dq.

    ``mask`` has the lists' columns as rows. ``addresses``: of the lists. ``places``: addresses of one byte
    and of 4 bytes for each block.
    """
    to_states, to_ranks = places
    where = Where(device, stream, capturing)
    jit.clear(to_states, ceil_div(mask.blocks, 4) * 4, stream, device)
    partial, full = lists.columns
    columns = min(partial, mask.columns), min(full, mask.columns)
    scatter(mask, lists._replace(columns=columns), addresses, to_states, where)
    all_rows = mask.batches * mask.heads * mask.columns
    params = RANKS_PARAMS.pack(
        states=to_states,
        ranks=to_ranks,
        all_rows=all_rows,
        rows=mask.columns,
        columns=mask.rows,
        tiles=ceil_div(lists.block_k, tile_keys),
    )
    where.launch(RANKS_SPEC, ceil_div(all_rows, _RANKS_THREADS), params)
