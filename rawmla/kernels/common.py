"""Sizes that several kernels share with their CUDA sources, arithmetic, and members of parameter structs.

Cache formats are in `rawmla.kernels.mla_cache_rows`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import e, log2
from typing import Any

DTYPES = {"bfloat16": 0, "float16": 1}
"""Values of the define DTYPE."""
FLOAT_DTYPES = {"float32": 0, "bfloat16": 1, "float16": 2, "float64": 3}
"""Codes of cuda_src/common/float_dtypes.cuh."""
D_QK = (576, 512)
"""Columns of a query and of a cache row."""
D_ROPE = 64
"""The last of them; in q they may be an array of their own."""
D_V = 512
"""The first columns, which are also V."""
BLOCK_TOKENS = 64
"""KV tokens of a block, the unit of a plan."""
TILE_ROWS = 64
"""Query rows of a tile, which one CTA attends."""
Q_UNIT = 8
"""Elements in the unit of strides and offsets of q, 16 bytes; kernels store them in 32 bits."""
CHUNK = 64
"""Columns of a 16-bit tile in shared memory: rows of 128 bytes, which is what the swizzle permutes."""
_DIM_STEP = 32
LOG2_E = log2(e)
INT32_MAX = 2**31 - 1
MAX_TOPK = 2**30 - 1
"""Columns of indices: sums of two, rounded up to blocks, are still int32."""
MAX_GRID_YZ = 65_535
"""CTAs along grid y and along grid z."""
BATCH_INVARIANT_MIN_BLOCKS = 8
BATCH_INVARIANT_MAX_SPLITS = 32
"""Limits of a batch-invariant plan: the fewest blocks of a split, and the most splits of a request."""


def max_splits(num_parts: int, b: int, max_blocks: int, batch_invariant: bool) -> int:
    """How many splits scratch needs room for, when no request has more than ``max_blocks`` blocks.

    0: no request can be split. cuda_src/mla/plan.cuh assigns the splits to requests.
    """
    if max_blocks <= 1:
        return 0
    most = 2 * num_parts if num_parts > 1 else 0
    if batch_invariant:
        per_request = min(ceil_div(max_blocks, BATCH_INVARIANT_MIN_BLOCKS), BATCH_INVARIANT_MAX_SPLITS)
        most = max(most, b * per_request if per_request > 1 else 0)
    return most


def fields(record: Any, *names: str) -> dict[str, Any]:
    """Members of the parameter structs that have the names and values of a record's fields."""
    return {name: getattr(record, name) for name in names}


def q_stride_params(strides: tuple[int, ...], rope_strides: tuple[int, ...]) -> dict[str, int]:
    """Members of the parameter structs: strides of q and of its RoPE columns, in units of `Q_UNIT` elements.

    Only the stride of a dimension of one element, which is never used, can exceed 32 bits.
    """
    q, q_rope = ([stride // Q_UNIT % 2**32 for stride in given] for given in (strides, rope_strides))
    return stride_params(q=q, q_rope=q_rope)


def stride_params(**strides: Sequence[int]) -> dict[str, int]:
    """Members of the parameter structs: strides of arrays in elements, for (batch, token, head)."""
    return {
        f"{name}_stride_{axis}": stride
        for name, given in strides.items()
        for axis, stride in zip("bsh", given, strict=True)
    }


def offsets_in_scratch(sizes: Iterable[int], alignment: int = 128) -> tuple[list[int], int]:
    """Aligned offsets in scratch of arrays with the given sizes in bytes, and the size of the scratch."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end = ceil_div(end + size, alignment) * alignment
    return offsets, end


def ceil_div(a: int, b: int) -> int:
    """The quotient rounded up, for a >= 0 and b > 0."""
    return -(-a // b)


def padded(d: int) -> int:
    """The columns that kernels of multi-head attention compute for a head dimension: the others are zeros."""
    return ceil_div(d, _DIM_STEP) * _DIM_STEP


def divisor(d: int) -> tuple[int, int]:
    """(magic, shift): n // d is n * magic >> shift for 0 <= n < 2**31. 1 <= d < 2**31.

    cuda_src/common/division.cuh divides so by a number that the host knows.
    """
    shift = 31 + (d - 1).bit_length()
    return -(-(1 << shift) // d), shift


def exact_divisor(d: int) -> tuple[int, int]:
    """(inverse, shift): n // d of a multiple n of d is (n >> shift) * inverse, modulo 2**32. 1 <= d."""
    shift = (d & -d).bit_length() - 1
    return pow(d >> shift, -1, 2**32), shift
