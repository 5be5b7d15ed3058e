"""What the kernels' host sides share: type codes, and the constants of cuda_src/mla/plan.cuh."""

from __future__ import annotations

import struct

DTYPES = {"bfloat16": 0, "float16": 1}  # values of the define DTYPE
BLOCK_TOKENS = 64
D_V = 512
BATCH_INVARIANT_MIN_BLOCKS = 8
BATCH_INVARIANT_MAX_PIECES = 32


def num_slots(num_parts: int, b: int, max_blocks: int, batch_invariant: bool) -> int:
    """Scratch slots for pieces of requests of up to `max_blocks` blocks: see ``first_slot`` in
    cuda_src/mla/plan.cuh. 0: nothing can be split.
    """
    if max_blocks <= 1:
        return 0
    slots = 2 * num_parts if num_parts > 1 else 0
    if batch_invariant:
        pieces = min(ceil_div(max_blocks, BATCH_INVARIANT_MIN_BLOCKS), BATCH_INVARIANT_MAX_PIECES)
        slots = max(slots, b * pieces if pieces > 1 else 0)
    return slots


def addresses(count: int, before: str = "") -> struct.Struct:
    """Format of that many device addresses, `before` ahead of them: as the native size_t, which is packed in
    half the time of "Q".
    """
    return struct.Struct(f"@{before}{count}N")


def ceil_div(a: int, b: int) -> int:
    """The quotient rounded up, for a >= 0 and b > 0."""
    return -(-a // b)
