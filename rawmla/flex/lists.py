"""The lists of a block mask in a call: read, checked, and brought to blocks that a kernel walks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple
from weakref import ref

from .. import jit
from ..call.arrays import READERS, address_of
from ..call.checks import show
from ..call.frameworks import Fields, Framework, NewArray, aligned_strides
from ..call.memo import Memo
from ..kernels import block_mask as kernels
from ..kernels.block_mask import BlockLists, Grid, ListAddresses
from ..kernels.common import ceil_div
from ..kernels.mha_forward import NO_BOUND, MhaForwardCall
from ..kernels.mha_forward_variants import WARPGROUP_ROWS
from .arrays import addresses_of, has_scores, kinds_of
from .block_lists import LISTS, Q_LISTS
from .functions import check_on_device, packed_of
from .mods import Bound

INTEGERS = ("int32", "int64", "int16", "int8", "uint8")
MASK_PARTS = ("BLOCK_SIZE", "mask_mod", "seq_lengths")
"""The attributes of a BlockMask that a call looks at besides lists."""
_PARTS_OF = {names: attrgetter(*MASK_PARTS, *names) for names in (LISTS, Q_LISTS)}
_ARGUMENTS_OF = {names: [f"block_mask.{name}" for name in names] for names in (LISTS, Q_LISTS)}
_UNSET_MASKS = ("_unset_mask", "_sliced_mask_mod_error")
"""Names of the functions of a mask that was indexed, rawmla's and torch's."""


class GivenLists(NamedTuple):
    """The lists of a block mask."""

    names: tuple[str, str, str, str]  # LISTS or Q_LISTS
    views: list[Fields | None]  # in their order
    addresses: tuple[int, ...]  # 0 for a list that there is not
    sizes: tuple[int, ...]  # BLOCK_SIZE and seq_lengths
    kind: object  # one for all lists of which checks see the same

    @property
    def arguments(self) -> list[str]:
        """The lists as errors name them."""
        return _ARGUMENTS_OF[self.names]


def read_lists(block_mask: Any, names: tuple[str, str, str, str] = LISTS) -> GivenLists | None:
    """Read the lists of a mask. None where everything is attended, as in torch's mask of one huge block.

    ``names``: LISTS, or Q_LISTS for lists by columns.
    """
    if block_mask is None:
        return None
    try:
        block_size, mask_mod, lengths, *arrays = _PARTS_OF[names](block_mask)
    except AttributeError:
        missing = [name for name in (*names, *MASK_PARTS) if not hasattr(block_mask, name)]
        if not missing:
            raise
        raise TypeError(
            f"block_mask: expected a BlockMask, got {show(block_mask)} without {missing[0]}"
        ) from None
    if getattr(mask_mod, "__name__", "") in _UNSET_MASKS:
        raise ValueError(
            "block_mask: expected a mask_mod that counts requests, heads and tokens as the mask does, got a "
            "mask that was indexed; assign a function for this part to block_mask.mask_mod"
        )
    sizes = (*block_size, *lengths)
    lacks_full = arrays[2] is None and names == Q_LISTS and getattr(block_mask, LISTS[2], None) is not None
    key = (names[0], lacks_full, *sizes, *map(id, arrays))
    known = _known.get(key)
    if known is not None:
        references, places, pointer, lists = known
        if True not in [reference() is None for reference in references]:
            if places == [(pointer(x), x.shape) for x in arrays if x is not None]:
                return lists
    if sizes[2:] == (1, 1) and min(block_size) >= NO_BOUND:
        return None
    _check_none(names, arrays, lacks_full)
    views = [
        None if x is None else READERS[type(x)](x, name)
        for x, name in zip(arrays, _ARGUMENTS_OF[names], strict=True)
    ]
    addresses = tuple([address_of(view) for view in views])
    kind = (sizes, kinds_of(views))
    lists = GivenLists(names, views, addresses, sizes, _kinds.get(kind) or _kinds.keep(kind, object()))
    _remember(key, arrays, lists)
    return lists


def _check_none(names: tuple[str, str, str, str], arrays: list[Any], lacks_full: bool) -> None:
    """Check which lists are None. ``lacks_full``: there are full blocks, but no lists of them by columns."""
    counts, indices, full_counts, full_indices = arrays
    if counts is None or indices is None or lacks_full:
        absent = names[2:] if counts is not None and indices is not None else names[:2]
        remedy = ""
        if names == Q_LISTS:
            remedy = "; gradients need lists by columns, which are made of lists of torch and CuPy only"
        raise ValueError(f"block_mask: expected {absent[0]} and {absent[1]}, got None{remedy}")
    if (full_counts is None) != (full_indices is None):
        raise ValueError(f"block_mask: expected {names[2]} and {names[3]} or none of them, got one")


class _Known(NamedTuple):
    """Lists that were read before, without the arrays.

    All layers of a model share a mask, or a few. Lists are recognised by identity, address and shape. If the
    strides of a list alone were changed in place, this does not see it.
    """

    references: Sequence[Callable[[], Any]]  # weak ones
    places: list[tuple[int, tuple[int, ...]]]  # addresses and shapes
    pointer: Callable[[Any], int]  # of the framework of all lists
    lists: GivenLists


_kinds: Memo[object] = Memo(shared=True)
"""Objects that stand for sizes, shapes, strides and dtypes of lists in keys: these are slow to hash."""
_known: Memo[_Known] = Memo(shared=True)
"""By names, sizes and the ids of lists. An entry whose arrays are gone is never found."""


def _remember(key: Any, arrays: list[Any], lists: GivenLists) -> None:
    """Keep lists as known, unless one is copied at every call, or is of another framework than the first."""
    given = [(x, view) for x, view in zip(arrays, lists.views, strict=True) if view is not None]
    framework = given[0][1][5]
    for x, (_, _, strides, dtype, _, of, array) in given:
        if array is not x or of is not framework or dtype != "int32" or strides[-1:] != (1,):
            return
    places = [view[:2] for _, view in given]
    without_arrays = lists._replace(views=[view and (*view[:6], None) for view in lists.views])
    _known.keep(key, _Known([ref(x) for x, _ in given], places, framework.pointer, without_arrays))


class Recut(NamedTuple):
    """The blocks of a mask that a kernel cannot walk, and larger ones, whose lists are in the call's scratch.

    Kernels write them at every call: the states of the given blocks first, and then the lists.
    """

    given: Grid
    walked: Grid
    by_columns: bool
    step: int
    """Addresses in the scratch are multiples of it."""

    def lists(self) -> BlockLists:
        """The layout of the lists in the scratch."""
        grid = self._lines_first(self.walked)
        lines, entries = grid.rows, grid.columns
        counts = (grid.heads * lines, lines, 1)
        lists = (grid.heads * lines * entries, lines * entries, entries)
        sizes = (grid.batches, grid.heads, self.walked.block_q, self.walked.block_k)
        return BlockLists((counts, counts), (lists, lists), (entries, entries), *sizes)

    def places(self, address: int) -> tuple[int, ListAddresses, int]:
        """Where in the scratch the states and the lists are, and the end of it."""
        grid = self._lines_first(self.walked)
        lines, blocks = 4 * grid.batches * grid.heads * grid.rows, 4 * grid.blocks
        places = [address]
        for size in (self.given.blocks, lines, blocks, lines, blocks):
            places.append(places[-1] + ceil_div(size, self.step) * self.step)
        states, *lists, end = places
        return states, ListAddresses(*lists), end

    def launch(
        self, lists: BlockLists, given: Sequence[int], address: int, device: int, framework: Framework
    ) -> tuple[ListAddresses, int]:
        """Enqueue the kernels, for lists of this layout at the given addresses. Returns the addresses of the
        lists for the attention kernel, and of the states.
        """
        states, made, _ = self.places(address)
        grid, walked = self._lines_first(self.given), self._lines_first(self.walked)
        where = kernels.Where(device, framework.current_stream(device), framework.capture_query(device))
        jit.clear(states, ceil_div(grid.blocks, 4) * 4, where.stream, device)
        kernels.scatter(grid, lists, given, states, where)
        kernels.lists(walked, states, made, where, state_blocks=(grid.block_q, grid.block_k))
        return made, states

    def _lines_first(self, grid: Grid) -> Grid:
        """The grid, with columns for rows where lists are by columns."""
        if not self.by_columns:
            return grid
        batches, heads, q_len, kv_len, block_q, block_k = grid
        return Grid(batches, heads, kv_len, q_len, block_k, block_q)


class Blocks(NamedTuple):
    """The lists of a call, which passed the checks."""

    lists: BlockLists
    copied: tuple[bool | str, ...]
    """How lists are copied first, see `addresses_of`."""
    recut: Recut | None

    def load(self, device: int, framework: Framework) -> BlockLists:
        """Load the kernels of `launch_lists`. Returns the layout of the lists for the attention kernel."""
        if self.recut is None:
            return self.lists
        for spec in (kernels.LISTS_SPEC, kernels.SCATTER_SPEC):
            jit.get_kernel(spec, device, capturing=framework.capture_query(device))
        return self.recut.lists()


def launch_lists(
    blocks: Blocks | None,
    lists: GivenLists | None,
    mask: Bound | None,
    scratch: int,
    device: int,
    framework: Framework,
) -> tuple[list[Any], tuple[int, ...], bytes]:
    """Enqueue the copies of lists, and the kernels that bring them to other blocks. Returns the copies, which
    the caller keeps until the launch; the addresses of the lists for the attention kernel, and of the states
    of blocks, 0 where there are none; and the parameters of the mask function.
    """
    if blocks is None or lists is None:
        return [], (0, 0, 0, 0, 0), packed_of(mask)
    copies: list[Any] = []
    addresses: Sequence[int] = lists.addresses
    if any(blocks.copied):
        copies, addresses = addresses_of(lists.views, lists.names, blocks.copied)
    if blocks.recut is None or mask is None:
        return copies, (*addresses, 0), packed_of(mask)
    made, states = blocks.recut.launch(blocks.lists, addresses, scratch, device, framework)
    return copies, (*made, states), mask.form.pack([*mask.addresses[:-1], states], mask.numbers)


def _check_lengths(lists: GivenLists, seqlen_q: int, seqlen_k: int) -> None:
    """Check that a mask is made for these lengths."""
    _, _, *lengths = lists.sizes
    if tuple(lengths) != (seqlen_q, seqlen_k):
        small = lengths[0] < seqlen_q or lengths[1] < seqlen_k
        remedy = "make one for these lengths" if small else "make one for these lengths, or use _adjust"
        raise ValueError(
            f"block_mask: expected seq_lengths of ({seqlen_q}, {seqlen_k}), as query and key have, got "
            f"{tuple(lengths)}: it is too {'small' if small else 'large'}; {remedy}"
        )


def check_lists(
    lists: GivenLists | None, call: MhaForwardCall, framework: Framework, tile: tuple[int, int], step: int
) -> Blocks | None:
    """Check the lists of a mask for a call. None without lists, and without scores. Lists by columns have
    columns of blocks where others have rows.

    ``tile``: rows and keys of a tile of the attention kernel. ``step``: see `Recut`.
    """
    if lists is None:
        return None
    device, seqlen_q, seqlen_k = call.device, call.max_seqlen_q, call.max_seqlen_k
    _check_lengths(lists, seqlen_q, seqlen_k)
    if not has_scores(call):
        return None
    block_q, block_k = [int(size) for size in lists.sizes[:2]]
    if block_q < 1 or block_k < 1 or block_q % 16 or block_k % 16:
        raise ValueError(f"block_mask: expected a BLOCK_SIZE of multiples of 16, got {(block_q, block_k)}")
    for name, view in zip(lists.arguments, lists.views, strict=True):
        if view is not None:
            check_on_device(name, view, device, framework)
            if view[3] not in INTEGERS:
                raise TypeError(f"{name}: expected dtype int32, got {view[3]}")
    by_columns = lists.names == Q_LISTS
    lines = ceil_div(seqlen_k, block_k) if by_columns else ceil_div(seqlen_q, block_q)
    pairs = [_check_pair(lists, 0, lines), _NO_PAIR]
    if lists.views[2] is not None:
        pairs[1] = _check_pair(lists, 2, lines)
    counts_strides, lists_strides, columns, copied, leading = zip(*pairs, strict=True)
    batches, heads = leading[0]
    if leading[1] not in (None, leading[0]):
        raise ValueError(
            "block_mask: expected lists of partial and of full blocks with the same batch and heads, got "
            f"{leading[0]} and {leading[1]}"
        )
    if call.b % batches or call.h_q % heads:
        raise ValueError(
            f"block_mask: expected a batch and heads that divide the {call.b} and {call.h_q} of query, got "
            f"{batches} and {heads}"
        )
    # The size of a block, of which there is one, is cut to what the length needs.
    block_q = min(block_q, ceil_div(seqlen_q, 128) * 128)
    block_k = min(block_k, ceil_div(seqlen_k, 128) * 128)
    recut = None
    rows, keys = tile
    if (block_q % rows and block_q < seqlen_q) or (block_k % keys and block_k < seqlen_k):
        sizes, side = (batches, heads, seqlen_q, seqlen_k), 2 * WARPGROUP_ROWS
        walked = Grid(*sizes, side, max(side, keys))
        recut = Recut(Grid(*sizes, block_q, block_k), walked, by_columns, step)
    layout = BlockLists(counts_strides, lists_strides, columns, batches, heads, block_q, block_k)
    return Blocks(layout, (*copied[0], *copied[1]), recut)


_NO_PAIR = ((0, 0, 0), (0, 0, 0), 0, (False, False), None)


def _check_pair(lists: GivenLists, first: int, lines: int) -> tuple[Any, ...]:
    """Check the lists of one kind of blocks, with at least this number of lines. Returns strides of counts
    and of lists, the length of a list, how the two are copied, and batch and heads.
    """
    counts, indices = lists.views[first : first + 2]
    assert counts is not None and indices is not None
    name = lists.arguments[first + 1]
    by_columns = lists.names == Q_LISTS
    line, others, owner = ("columns", "rows", "key") if by_columns else ("rows", "columns", "query")
    _, shape, strides, dtype, *_ = indices
    _, counts_shape, counts_strides, counts_dtype, *_ = counts
    if not 2 <= len(shape) <= 4 or tuple(shape[:-1]) != tuple(counts_shape):
        raise ValueError(
            f"{name}: expected shape [B, H, {line}, {others}] where {lists.names[first]} is [B, H, {line}], "
            f"got {list(shape)} and {list(counts_shape)}"
        )
    if shape[-2] < lines:
        raise ValueError(
            f"{name}: expected at least {lines} {line} of blocks, as {owner} has, got shape {list(shape)}"
        )
    copied: list[str | bool] = [False, False]
    if counts_dtype != "int32":
        copied[0], counts_strides = "int32", aligned_strides(tuple(counts_shape))
    if dtype != "int32" or (strides[-1] != 1 and shape[-1] > 1):
        copied[1], strides = "int32", aligned_strides(tuple(shape))
    batches, heads, _, columns = (1, 1, *shape)[-4:]
    if not batches or not heads:
        raise ValueError(f"{name}: expected at least one batch and head, got {list(shape)}")
    return (
        _stepped(counts_strides, shape[:-1]),
        _stepped(strides[:-1], shape[:-1]),
        columns,
        copied,
        (batches, heads),
    )


def _stepped(strides: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Strides of (batch, head, row), 0 where there is one only."""
    steps = [0 if extent == 1 else step for extent, step in zip(shape, strides, strict=True)]
    batch, head, row = (0, 0, *steps)[-3:]
    return batch, head, row


class Prepared(NamedTuple):
    """How to run one kind of call: an allocator for its results, and a prepared launch."""

    allocate: Callable[[], list[Any]]
    """Makes the results that are wanted and not given, and the scratch, or None."""
    launch: Callable[..., None] | None
    """Enqueues the kernels; None where nothing is to be computed."""
    lists_start: int = 0
    """Where in the scratch lists of other blocks begin."""

    @classmethod
    def of(cls, call: Any, results: list[NewArray], blocks: Blocks | None, step: int, q: Fields) -> Prepared:
        """Take a host twin's launch, and add room for lists at a multiple of ``step`` bytes."""
        device, framework = q[4], q[5]
        start = ceil_div(call.scratch_bytes, step) * step
        end = start if blocks is None or blocks.recut is None else blocks.recut.places(start)[-1]
        return cls(framework.allocator(results, end, device), call.launch, start)


class Checked(NamedTuple):
    """Facts that follow from the arrays of a call, which passed the checks."""

    call: Any  # MhaForwardCall or BackwardCall, without functions, with the default scale, all gradients
    copied: tuple[bool | str, ...]
    """How arrays are copied first, see `rawmla.flex.arrays.addresses_of`."""
    blocks: Blocks | None
    scores: bool
    mixes_frameworks: bool
    """Whether some arrays are of another framework than query, for `check_streams`."""
    calls: Memo[Prepared]

    @classmethod
    def of(
        cls,
        call: Any,
        copied: tuple[bool | str, ...],
        blocks: Blocks | None,
        views: Sequence[Fields | None],
        lists: GivenLists | None,
    ) -> Checked:
        """Facts of arrays and lists, of which the first array is query."""
        every = (*views, *(lists.views if lists else ()))
        mixed = len({view[5] for view in every if view is not None}) > 1
        return cls(call, copied, blocks, has_scores(call), mixed, Memo())


def check_streams(names: Sequence[str], views: Sequence[Any], lists: GivenLists | None) -> None:
    """Check again, as in every call, that arrays of other frameworks than query's are on its stream."""
    device, framework = views[0][4:6]
    for name, view in zip(names, (*views, *(lists.views if lists else ())), strict=False):
        if view is not None and view[5] is not framework:
            check_on_device(name, view, device, framework)
