"""One call of `create_block_mask`: the block mask of a function, found on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import jit
from ..call.arrays import framework_named, inspect, is_array, needs_gradient
from ..call.checks import as_bool, as_int
from ..call.frameworks import WITH_BACKWARD, Framework, NewArray
from ..kernels import block_mask as kernels
from ..kernels.block_mask import Grid, ListAddresses
from ..kernels.mha_forward import NO_BOUND
from .block_mask import BlockMask, as_block_size, as_ordinal, hides_nothing
from .functions import as_reading, bound, header_of, packed_of
from .mods import CudaMod, TracedMod


def make(*arguments: Any) -> BlockMask:
    """`create_block_mask` of the arguments of `prepare`."""
    return prepare(*arguments)()


def prepare(
    mask_mod: Any,
    B: Any,
    H: Any,
    Q_LEN: Any,
    KV_LEN: Any,
    device: Any,
    BLOCK_SIZE: Any,
    separate_full_blocks: Any,
    **unused: Any,
) -> Callable[[], BlockMask]:
    """Check the arguments of a call, and load its kernels. Returns the rest of the call."""
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
    if needs_gradient(*reading.sources):  # numbers on the CPU are no arrays that a reader sees
        raise ValueError(
            "mask_mod: expected captured numbers that need no gradient here, got requires_grad=True with "
            f"grad enabled; call under torch.no_grad(). {WITH_BACKWARD}"
        )
    # Without blocks in the grid, arrays that the function reads may be empty.
    mask = bound(reading, "mask_mod", ordinal, framework) if grid.blocks else None
    header = header_of(None, reading.frame.mod if mask is None else mask.form.frame.mod)
    for spec in (kernels.states_spec(header), kernels.LISTS_SPEC):
        jit.get_kernel(spec, ordinal, capturing=framework.capture_query(ordinal))

    def launch() -> BlockMask:
        where = kernels.Where(ordinal, framework.current_stream(ordinal), framework.capture_query(ordinal))
        shapes: list[NewArray] = []
        for lines, entries in ((grid.rows, grid.columns), (grid.columns, grid.rows)):
            counts = (grid.batches, grid.heads, lines)
            shapes += [(counts, "int32"), ((*counts, entries), "int32")] * (1 + separate)
        *arrays, states = framework.allocator(shapes, max(grid.blocks, 1), ordinal)()
        address = framework.pointer(states)
        kernels.states(grid, header, packed_of(mask), address, where)
        lists: list[Any] = []
        half = len(arrays) // 2
        for by_columns, made in ((False, arrays[:half]), (True, arrays[half:])):
            made += [None] * (4 - half)
            pointers = [0 if array is None else framework.pointer(array) for array in made]
            kernels.lists(grid, address, ListAddresses(*pointers), where, by_columns=by_columns)
            lists += made
        parts: list[Any] = [(grid.q_len, grid.kv_len), *lists, (block_q, block_k), mask_mod]
        block_mask = BlockMask(*parts)
        block_mask._kept = ordinal, None if hides_nothing(mask_mod) else reading
        return block_mask

    return launch


def _as_size(name: str, value: Any, least: int) -> int:
    size = as_int(name, value)
    if not least <= size < NO_BOUND:
        raise ValueError(f"{name}: expected {least} to 2**30 - 1, got {size}")
    return size


def _place(mask_mod: Any, device: Any) -> tuple[Framework, int]:
    """The framework and the ordinal of the device of a new mask."""
    captures = mask_mod.captures if isinstance(mask_mod, (CudaMod, TracedMod)) else {}
    arrays = [
        inspect(x, f"captures: {name}")
        for name, x in captures.items()
        if is_array(x) and not name.startswith("mod.n")  # the name of a number, also of a tensor of the CPU
    ]
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
