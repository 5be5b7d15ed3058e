"""`create_block_mask`: the block mask of a function, found on the device."""

from __future__ import annotations

from inspect import signature
from typing import Any, NamedTuple

from .. import jit
from ..call import tracing
from ..call.arrays import Framework, NewArray, framework_named, inspect, is_array
from ..call.checks import as_bool, as_int
from ..kernels import block_mask as kernels
from ..kernels.block_mask import Grid, ListAddresses
from ..kernels.mha_forward import NO_BOUND
from .block_mask import DEFAULT_BLOCK_SIZE, BlockMask, as_block_size, as_ordinal
from .functions import as_reading, bound, header_of, packed_of
from .mods import CudaMod
from .traced import between_graphs

__all__ = ["create_block_mask", "load", "make"]


def create_block_mask(
    mask_mod: Any,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: Any = None,
    BLOCK_SIZE: int | tuple[int, int] = DEFAULT_BLOCK_SIZE,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
) -> BlockMask:
    """The blocks of a mask function: which of them are empty, partial or full.

    Parameters
    ----------
    mask_mod : callable, CudaMod or str
        `mask_mod(b, h, q_idx, kv_idx)`: whether a query token attends a key. As for `flex_attention`.
    B, H : int or None
        Requests and heads that have masks of their own; None is 1.
    Q_LEN, KV_LEN : int
        Query tokens and keys.
    device : int, str or torch.device, optional
        A CUDA device; None is that of the arrays of a `CudaMod`, else the current one.
    BLOCK_SIZE : int or pair of int
        Query tokens and keys of a block, multiples of 16.
    separate_full_blocks : bool
        False: all blocks that are not empty are partial.
    _compile, compute_dq_write_order, dq_kv_order
        Change nothing.

    Returns
    -------
    BlockMask
        With arrays of torch, or of CuPy where `mask_mod` is a `CudaMod` that reads arrays of CuPy, or torch
        is not installed or was built without CUDA. Lists are ascending; behind their ends come the other
        blocks. A block is full if the function holds for all its positions and it lies inside
        (Q_LEN, KV_LEN); a block that the end of the sequence cuts is partial.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, RawMLAError
        As of `flex_attention`.

    Notes
    -----
    Allocates the lists, and one byte for each block; time and memory are proportional to the positions that
    the function is asked for and to the blocks, and no mask of Q_LEN x KV_LEN is in memory. Enqueues three
    kernels on the current stream; never synchronises. It may be captured in a CUDA graph; its lists then
    follow arrays that the function reads. torch.compile runs the call between two graphs.

    The operation is the function of this name in torch (torch.nn.attention.flex_attention).

    Examples
    --------
    >>> mask = rawmla.create_block_mask(lambda b, h, q, k: q >= k, None, None, 8192, 8192)
    >>> out = rawmla.flex_attention(q, k, v, block_mask=mask)
    """
    call = between_graphs().make if tracing.is_traced(None) else make
    return call(mask_mod, B, H, Q_LEN, KV_LEN, device, BLOCK_SIZE, separate_full_blocks)


def make(
    mask_mod: Any,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: Any,
    BLOCK_SIZE: int | tuple[int, int],
    separate_full_blocks: bool,
) -> BlockMask:
    """`create_block_mask`."""
    prepared = _prepare(mask_mod, B, H, Q_LEN, KV_LEN, device, BLOCK_SIZE, separate_full_blocks)
    grid, separate, framework, ordinal, header, mask_bytes = prepared
    where: Any = {
        "device": ordinal,
        "stream": framework.current_stream(ordinal),
        "capturing": framework.capture_query(ordinal),
    }
    shapes: list[NewArray] = []
    for lines, entries in ((grid.rows, grid.columns), (grid.columns, grid.rows)):
        counts = (grid.batches, grid.heads, lines)
        shapes += [(counts, "int32"), ((*counts, entries), "int32")] * (1 + separate)
    *arrays, states = framework.allocator(shapes, max(grid.blocks, 1), ordinal)()
    address = framework.pointer(states)
    kernels.states(grid, header, mask_mod=mask_bytes, address=address, **where)
    lists: list[Any] = []
    half = len(arrays) // 2
    for by_columns, made in ((False, arrays[:half]), (True, arrays[half:])):
        made += [None] * (4 - half)
        pointers = [0 if array is None else framework.pointer(array) for array in made]
        kernels.lists(grid, address, ListAddresses(*pointers), by_columns=by_columns, **where)
        lists += made
    kv_counts, kv, full_kv_counts, full_kv, q_counts, q, full_q_counts, full_q = lists
    return BlockMask(
        (grid.q_len, grid.kv_len), kv_counts, kv, full_kv_counts, full_kv, q_counts, q, full_q_counts, full_q,
        (grid.block_q, grid.block_k), mask_mod,
    )  # fmt: skip


def load(*args: Any, **kwargs: Any) -> None:
    """Check the arguments of a call of `create_block_mask`, and load its kernels."""
    given = signature(create_block_mask).bind(*args, **kwargs)
    given.apply_defaults()
    _prepare(**given.arguments)


class _Prepared(NamedTuple):
    """What a call does."""

    grid: Grid
    separate: bool
    framework: Framework
    device: int
    header: tuple[str, str]
    mask_mod: bytes


def _prepare(
    mask_mod: Any,
    B: Any,
    H: Any,
    Q_LEN: Any,
    KV_LEN: Any,
    device: Any,
    BLOCK_SIZE: Any,
    separate_full_blocks: Any,
    **unused: Any,
) -> _Prepared:
    """Check the arguments of a call, and load its kernels."""
    block_q, block_k = as_block_size(BLOCK_SIZE)
    grid = Grid(
        batches=_as_size("B", 1 if B is None else B, 1),
        heads=_as_size("H", 1 if H is None else H, 1),
        q_len=_as_size("Q_LEN", Q_LEN, 0),
        kv_len=_as_size("KV_LEN", KV_LEN, 0),
        block_q=block_q,
        block_k=block_k,
    )
    separate = as_bool("separate_full_blocks", separate_full_blocks)
    framework, ordinal = _place(mask_mod, device)
    reading = as_reading(mask_mod, "mask_mod", ordinal)
    if reading is None:
        raise TypeError("mask_mod: expected a function, a CudaMod or CUDA text, got None")
    # Of a grid without blocks, what the function reads may be empty.
    mask = bound(reading, "mask_mod", ordinal, framework) if grid.blocks else None
    header = header_of(None, reading.frame.mod if mask is None else mask.form.variant.mod)
    for spec in (kernels.states_spec(header), kernels.LISTS_SPEC):
        jit.get_kernel(spec, ordinal, capturing=framework.capture_query(ordinal))
    return _Prepared(grid, separate, framework, ordinal, header, packed_of(mask))


def _as_size(name: str, value: Any, least: int) -> int:
    size = as_int(name, value)
    if not least <= size < NO_BOUND:
        raise ValueError(f"{name}: expected {least} to 2**30 - 1, got {size}")
    return size


def _place(mask_mod: Any, device: Any) -> tuple[Framework, int]:
    """The framework and the ordinal of the device of a new mask."""
    arrays = []
    if isinstance(mask_mod, CudaMod):
        arrays = [inspect(x, f"captures: {name}") for name, x in mask_mod.captures.items() if is_array(x)]
    ordinal = arrays[0].device if arrays and device is None else as_ordinal(device)
    if arrays:
        return arrays[0].framework, ordinal
    return framework_named("torch" if _has_torch() else "cupy"), ordinal


def _has_torch() -> bool:
    """Whether there is a torch with tensors of GPUs."""
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.backends.cuda.is_built())
