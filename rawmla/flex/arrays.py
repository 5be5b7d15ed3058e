"""Checks of the arrays and lists of flex attention, and the sizes and strides that follow from them."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple, cast
from weakref import ref

from ..call.arrays import read_given
from ..call.checks import show
from ..call.frameworks import Fields, Framework, aligned_strides
from ..call.memo import Memo, kind_of
from ..kernels.block_mask import BlockLists, Grid
from ..kernels.mha_forward import NO_BOUND
from ..kernels.mha_forward_variants import WARPGROUP_ROWS, tile_in_blocks
from ..mha.arguments import check_head_dim, check_out_layout, fresh_out_strides, walked
from .functions import check_on_device

__all__ = [
    *("LISTS", "MASK_PARTS", "Q_LISTS", "FlexChecked", "GivenLists", "Recut", "check_arrays"),
    *("check_lengths", "check_lists", "cut_of", "keep_lists", "lists_of", "recall_lists"),
]

FP8 = ("float8_e4m3fn", "float8_e5m2")
INTEGERS = ("int32", "int64", "int16", "int8", "uint8")
LISTS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
Q_LISTS = ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")
"""Lists by columns, which a backward walks."""
MASK_PARTS = ("BLOCK_SIZE", "mask_mod", "seq_lengths")
"""The attributes of a BlockMask that a call looks at besides lists."""
_PARTS_OF = {names: attrgetter(*names, *MASK_PARTS) for names in (LISTS, Q_LISTS)}
Strides = tuple[int, int, int]
_UNSET_MASKS = ("_unset_mask", "_sliced_mask_mod_error")
"""Names of the functions of a mask that was indexed, rawmla's and torch's."""


class GivenLists(NamedTuple):
    """The lists of a block mask."""

    names: tuple[str, str, str, str]  # LISTS or Q_LISTS
    views: tuple[Fields, Fields, Fields | None, Fields | None]  # in their order
    sizes: tuple[Any, ...]  # BLOCK_SIZE and seq_lengths
    kind: tuple[Any, ...]  # what checks of them depend on

    def addresses(self) -> list[int]:
        """The addresses of the lists, 0 for a list that there is not."""
        return [0 if view is None else view[0] for view in self.views]


def lists_of(block_mask: Any, names: tuple[str, str, str, str] = LISTS) -> GivenLists | None:
    """The lists of a mask; None where everything is attended, as torch's mask of one huge block says too.

    ``names``: LISTS, or Q_LISTS for those by columns.
    """
    if block_mask is None:
        return None
    missing = [name for name in (*names, *MASK_PARTS) if not hasattr(block_mask, name)]
    if missing:
        raise TypeError(f"block_mask: expected a BlockMask, got {show(block_mask)} without {missing[0]}")
    if getattr(block_mask.mask_mod, "__name__", "") in _UNSET_MASKS:
        raise ValueError(
            "block_mask: expected a mask_mod that counts requests, heads and tokens as the mask does, got a "
            "mask that was indexed; assign a function for this part to block_mask.mask_mod"
        )
    block_q, block_k = block_mask.BLOCK_SIZE
    lengths = tuple(block_mask.seq_lengths)
    if lengths == (1, 1) and min(block_q, block_k) >= NO_BOUND:
        return None
    counts, indices, full_counts, full_indices = [
        read_given(getattr(block_mask, name), f"block_mask.{name}") for name in names
    ]
    has_full = getattr(block_mask, LISTS[2], None) is not None
    if counts is None or indices is None or (names == Q_LISTS and has_full and full_counts is None):
        absent = names[2:] if counts is not None and indices is not None else names[:2]
        remedy = ""
        if names == Q_LISTS:
            remedy = "; gradients need lists by columns, which are made of lists of torch and CuPy only"
        raise ValueError(f"block_mask: expected {absent[0]} and {absent[1]}, got None{remedy}")
    if (full_counts is None) != (full_indices is None):
        raise ValueError(f"block_mask: expected {names[2]} and {names[3]} or none of them, got one")
    views = counts, indices, full_counts, full_indices
    sizes = (int(block_q), int(block_k), *lengths)
    return GivenLists(names, views, sizes, (*[kind_of(view) for view in views], sizes))


class _Seen(NamedTuple):
    """Lists that passed the checks of a call, without the arrays."""

    references: list[Callable[[], Any]]  # weak ones
    places: list[Any]  # addresses and shapes
    lists: GivenLists


_seen: Memo[_Seen] = Memo(shared=True)
"""By the first list: its name and id. An entry whose arrays are gone is never found."""


def recall_lists(
    block_mask: Any, framework: Framework, names: tuple[str, str, str, str] = LISTS
) -> GivenLists | None:
    """The lists of a mask if they passed the checks before, none of which has to be copied; else None, also
    where there is something to refuse. Their views have no arrays. ``names`` as for `lists_of`.

    All layers of a model share a mask, or a few. Lists are recognised by identity, address and shape, and
    what else the mask has by value. What this cannot see is a list whose strides alone were changed in place.
    """
    seen = _seen.get((names[0], id(getattr(block_mask, names[0], None))))
    if seen is None:
        return None
    references, places, lists = seen
    try:
        *arrays, block_size, mask_mod, lengths = _PARTS_OF[names](block_mask)
        sizes = (*block_size, *lengths)
    except (AttributeError, TypeError):
        return None
    if (
        lists.views[0][5] is not framework
        or sizes != lists.sizes
        or getattr(mask_mod, "__name__", "") in _UNSET_MASKS
        or (arrays[2] is None and getattr(block_mask, LISTS[2], None) is not None)
    ):
        return None
    pointer = framework.pointer
    for array, reference, place in zip(arrays, references, places, strict=True):
        if reference() is not array:
            return None
        if (None if array is None else (pointer(array), array.shape)) != place:
            return None
    return lists


def keep_lists(block_mask: Any, lists: GivenLists, framework: Framework) -> None:
    """Remember the lists of a mask, which passed the checks, by weak references. Lists of another
    framework than query's are not remembered, as in `rawmla.call.memo.LatestPair`.
    """
    references: list[Callable[[], Any]] = []
    places = [view and view[:2] for view in lists.views]
    for name, view in zip(lists.names, lists.views, strict=True):
        if view is None:
            references.append(_no_list)
        elif view[5] is framework and view[6] is getattr(block_mask, name):
            references.append(ref(view[6]))
        else:
            return
    views = cast(Any, tuple([view and (*view[:6], None) for view in lists.views]))
    key = lists.names[0], id(lists.views[0][6])
    _seen.keep(key, _Seen(references, places, lists._replace(views=views)))


def _no_list() -> None:
    """Stands for a reference where there is no list."""


class Recut(NamedTuple):
    """The blocks of a mask that the kernel cannot walk, and the blocks that they are brought to."""

    given: Grid
    walked: Grid


class FlexChecked(NamedTuple):
    """Sizes and strides of arrays that passed the checks."""

    b: int
    k_batches: int
    h_q: int
    h_kv: int
    seqlen_q: int
    seqlen_k: int
    d_qk: int
    d_v: int
    strides: tuple[Strides, Strides, Strides, Strides]  # of q, k, v and out: (request, token, head)
    copied: tuple[bool, bool, bool]  # q, k and v
    list_copies: tuple[bool, bool, bool, bool]  # of the lists
    default_scale: float
    scores: bool  # False where B, L or S is 0: no function is called then
    lists: BlockLists | None
    cut: Recut | None
    calls: Memo[Any]


def check_arrays(
    q: Fields, k: Fields, v: Fields, out: Fields | None, lists: GivenLists | None, enable_gqa: bool
) -> FlexChecked:
    """Check the arrays of a call against each other."""
    _, q_shape, _, dtype, device, framework, _ = q
    if dtype != "bfloat16" and dtype != "float16":
        more = "; float32 is not supported yet" if dtype == "float32" else ""
        raise TypeError(f"query: expected dtype bfloat16 or float16, got {dtype}{more}")
    for name, sizes, view in (("query", "Hq, L, E", q), ("key", "Hkv, S, E", k), ("value", "Hkv, S, Ev", v)):
        if len(view[1]) != 4:
            batch = "B" if name == "query" else "Bkv"
            raise ValueError(f"{name}: expected shape [{batch}, {sizes}], got {list(view[1])}")
    for name, view in (("key", k), ("value", v)):
        if view[3] != dtype and view[3] not in FP8:
            raise TypeError(f"{name}: expected dtype {dtype}, as query has, or FP8, got {view[3]}")
    b, h_q, seqlen_q, d_qk = q_shape
    k_batches, h_kv, seqlen_k, k_dim = k[1]
    d_v = v[1][3]
    check_head_dim("query", "a last dimension (E)", d_qk, q_shape)
    check_head_dim("value", "a last dimension (Ev)", d_v, v[1])
    if k_dim != d_qk:
        raise ValueError(f"key: expected a last dimension of {d_qk}, as query has, got shape {list(k[1])}")
    if tuple(v[1][:3]) != tuple(k[1][:3]):
        raise ValueError(
            f"value: expected shape {[*k[1][:3], 'Ev']}, as key has but for Ev, got {list(v[1])}"
        )
    if k_batches not in (b, 1):
        raise ValueError(f"key: expected a batch of {b}, as query has, or 1, got shape {list(k[1])}")
    if not h_q or not h_kv or h_q % h_kv or (h_q != h_kv and not enable_gqa):
        rule = "to be a positive multiple of" if enable_gqa else "to be, without enable_gqa, equal to"
        raise ValueError(f"query: expected Hq {rule} the Hkv of key, got Hq {h_q} and Hkv {h_kv}")
    for name, shape in (("query", q_shape), ("key", k[1])):
        if shape[2] >= NO_BOUND:
            raise ValueError(f"{name}: expected less than 2**30 tokens, got shape {list(shape)}")
    if out is None:
        out_strides = fresh_out_strides(q, d_v)[:-1]
    else:
        if out[3] != dtype:
            raise TypeError(f"out: expected dtype {dtype}, as query has, got {out[3]}")
        if tuple(out[1]) != (b, h_q, seqlen_q, d_v):
            raise ValueError(f"out: expected shape [{b}, {h_q}, {seqlen_q}, {d_v}], got {list(out[1])}")
        out_strides = check_out_layout(out)
    for name, other in (("key", k), ("value", v), ("out", out)):
        if other is not None:
            check_on_device(name, other, device, framework)
    steps = [walked(view) if view[3] == dtype else None for view in (q, k, v)]
    strides = [
        aligned_strides(tuple(view[1]))[:-1] if step is None else step
        for view, step in zip((q, k, v), steps, strict=True)
    ]
    found: BlockLists | None = None
    cut: Recut | None = None
    list_copies = (False, False, False, False)
    scores = min(b, seqlen_q, seqlen_k) > 0
    if lists is not None and scores:
        found, list_copies = check_lists(lists, b, h_q, seqlen_q, seqlen_k, device, framework)
        tile = tile_in_blocks(d_qk, d_v)
        cut = cut_of(found, seqlen_q, seqlen_k, tile.rows, tile.keys)
    elif lists is not None:
        check_lengths(lists, seqlen_q, seqlen_k)
    return FlexChecked(
        b=b,
        k_batches=k_batches,
        h_q=h_q,
        h_kv=h_kv,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        d_qk=d_qk,
        d_v=d_v,
        strides=cast(Any, tuple((batch, token, head) for batch, head, token in (*strides, out_strides))),
        copied=cast(Any, tuple(step is None for step in steps)),
        list_copies=list_copies,
        default_scale=d_qk**-0.5,
        scores=scores,
        lists=found,
        cut=cut,
        calls=Memo(),
    )


def check_lengths(lists: GivenLists, seqlen_q: int, seqlen_k: int) -> None:
    _, _, *lengths = lists.sizes
    if tuple(lengths) != (seqlen_q, seqlen_k):
        small = lengths[0] < seqlen_q or lengths[1] < seqlen_k
        remedy = "make one for these lengths" if small else "make one for these lengths, or use _adjust"
        raise ValueError(
            f"block_mask: expected seq_lengths of ({seqlen_q}, {seqlen_k}), as query and key have, got "
            f"{tuple(lengths)}: it is too {'small' if small else 'large'}; {remedy}"
        )


class _Pair(NamedTuple):
    """Lists of one kind of blocks."""

    counts_strides: Strides
    lists_strides: Strides
    batches: int
    heads: int
    columns: int
    copied: tuple[bool, bool]


_NO_PAIR = _Pair((0, 0, 0), (0, 0, 0), 1, 1, 0, (False, False))


def check_lists(
    lists: GivenLists, b: int, h_q: int, seqlen_q: int, seqlen_k: int, device: int, framework: Framework
) -> tuple[BlockLists, tuple[bool, bool, bool, bool]]:
    """Check the lists of a mask. Returns their layout, and which of them have to be copied. Lists by columns
    have the columns of blocks where others have rows.
    """
    check_lengths(lists, seqlen_q, seqlen_k)
    block_q, block_k, *_ = lists.sizes
    if block_q < 1 or block_k < 1 or block_q % 16 or block_k % 16:
        raise ValueError(f"block_mask: expected a BLOCK_SIZE of multiples of 16, got {(block_q, block_k)}")
    names = lists.names
    for name, view in zip(names, lists.views, strict=True):
        if view is not None:
            check_on_device(f"block_mask.{name}", view, device, framework)
            if view[3] not in INTEGERS:
                raise TypeError(f"block_mask.{name}: expected dtype int32, got {view[3]}")
    lines = -(-seqlen_k // block_k) if names == Q_LISTS else -(-seqlen_q // block_q)
    counts, indices, full_counts, full_indices = lists.views
    partial = _check_pair(names[0], counts, names[1], indices, lines)
    full = _NO_PAIR
    if full_counts is not None and full_indices is not None:
        full = _check_pair(names[2], full_counts, names[3], full_indices, lines)
        if (full.batches, full.heads) != (partial.batches, partial.heads):
            raise ValueError(
                "block_mask: expected lists of partial and of full blocks with the same batch and heads, got "
                f"{(partial.batches, partial.heads)} and {(full.batches, full.heads)}"
            )
    if b % partial.batches or h_q % partial.heads:
        raise ValueError(
            f"block_mask: expected a batch and heads that divide the {b} and {h_q} of query, got "
            f"{partial.batches} and {partial.heads}"
        )
    found = BlockLists(
        (partial.counts_strides, full.counts_strides),
        (partial.lists_strides, full.lists_strides),
        (partial.columns, full.columns),
        partial.batches,
        partial.heads,
        _no_longer(block_q, seqlen_q),
        _no_longer(block_k, seqlen_k),
    )
    return found, (*partial.copied, *full.copied)


def _check_pair(counts_name: str, counts: Fields, lists_name: str, indices: Fields, lines: int) -> _Pair:
    """Check the lists of one kind of blocks."""
    _, shape, strides, dtype, *_ = indices
    _, counts_shape, counts_strides, counts_dtype, *_ = counts
    line, others, owner = ("rows", "columns", "query")
    if lists_name in Q_LISTS:
        line, others, owner = ("columns", "rows", "key")
    if not 2 <= len(shape) <= 4 or tuple(shape[:-1]) != tuple(counts_shape):
        raise ValueError(
            f"block_mask.{lists_name}: expected shape [B, H, {line}, {others}] where {counts_name} is "
            f"[B, H, {line}], got {list(shape)} and {list(counts_shape)}"
        )
    if shape[-2] < lines:
        raise ValueError(
            f"block_mask.{lists_name}: expected at least {lines} {line} of blocks, as {owner} has, got shape "
            f"{list(shape)}"
        )
    copies_counts, copies = counts_dtype != "int32", dtype != "int32"
    copies = copies or (strides[-1] != 1 and shape[-1] > 1)
    if copies_counts:
        counts_strides = aligned_strides(tuple(counts_shape))
    if copies:
        strides = aligned_strides(tuple(shape))
    batches, heads, _, columns = (1, 1, *shape)[-4:]
    if not batches or not heads:
        raise ValueError(f"block_mask.{lists_name}: expected at least one batch and head, got {list(shape)}")
    return _Pair(
        _stepped(counts_strides, shape[:-1]),
        _stepped(strides[:-1], shape[:-1]),
        batches,
        heads,
        columns,
        (copies_counts, copies),
    )


def _stepped(strides: tuple[int, ...], shape: tuple[int, ...]) -> Strides:
    """Strides of (batch, head, row), 0 where there is one only."""
    steps = [0 if extent == 1 else step for extent, step in zip(shape, strides, strict=True)]
    batch, head, row = (0, 0, *steps)[-3:]
    return batch, head, row


def _no_longer(block: int, length: int) -> int:
    """The size of a block, of which there is one, cut to what the length needs."""
    return min(block, -(-length // 128) * 128)


def cut_of(lists: BlockLists, seqlen_q: int, seqlen_k: int, rows: int, keys: int) -> Recut | None:
    """The blocks that lists are brought to. None where a kernel whose tiles have this number of rows and keys
    walks the blocks as they are: its tiles divide them, or there is one block.
    """
    block_q, block_k = lists.block_q, lists.block_k
    if (block_q % rows == 0 or block_q >= seqlen_q) and (block_k % keys == 0 or block_k >= seqlen_k):
        return None
    sizes = (lists.batches, lists.heads, seqlen_q, seqlen_k)
    side = 2 * WARPGROUP_ROWS
    return Recut(Grid(*sizes, block_q, block_k), Grid(*sizes, side, max(side, keys)))
