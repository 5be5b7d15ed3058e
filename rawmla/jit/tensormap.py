"""TMA descriptors (tensor maps), encoded by the driver and remembered."""

from __future__ import annotations

import ctypes
import functools

from rawmla.errors import LaunchError
from rawmla.jit.driver import aligned_buffer, get_driver

TENSOR_MAP_BYTES = 128

_DTYPES = {"uint8": 0, "float16": 6, "float32": 7, "bfloat16": 9}
_SWIZZLES = {"none": 0, "32b": 1, "128b": 3}
_L2_PROMOTIONS = {"none": 0, "128b": 2, "256b": 3}
_MAX_RANK = 5


@functools.lru_cache(maxsize=4096)
def tensor_map(
    ptr: int,
    dtype: str,
    dims: tuple[int, ...],
    strides_bytes: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: str,
    l2_promotion: str,
) -> bytes:
    """Tiled tensor map for ``cp.async.bulk.tensor``; the 128 bytes of a ``CUtensorMap``.

    The last 4096 maps are kept, by all their arguments (never by shape alone), so a repeated call costs one
    lookup. Elements out of range read as zero. No GPU memory is touched.

    ``ptr`` is a multiple of 16. ``dims`` are extents in elements, innermost first, of 1 to 5 dimensions.
    ``strides_bytes`` belong to all but the innermost, multiples of 16 below 2**40. ``box``: elements that one
    instruction copies, per dimension; at most 256 each, and with a swizzle at most its bytes innermost.

    Raises `LaunchError` with every field if the driver refuses the combination.
    """
    fields = (
        f"ptr={ptr:#x}, dtype={dtype!r}, dims={dims}, strides_bytes={strides_bytes}, box={box}, "
        f"swizzle={swizzle!r}, l2_promotion={l2_promotion!r}"
    )
    rank = len(dims)
    if not 1 <= rank <= _MAX_RANK or len(strides_bytes) != rank - 1 or len(box) != rank:
        raise ValueError(
            f"tensor_map: expected rank 1 to 5, rank - 1 strides and a box of the same rank, got {fields}"
        )
    try:
        codes = _DTYPES[dtype], _SWIZZLES[swizzle], _L2_PROMOTIONS[l2_promotion]
    except KeyError as error:
        raise ValueError(f"tensor_map: unknown name {error} in {fields}") from None
    driver = get_driver()
    memory, address = aligned_buffer(TENSOR_MAP_BYTES, 128)
    try:
        driver.call_in_any_context(
            "cuTensorMapEncodeTiled",
            ctypes.c_void_p(address),
            ctypes.c_int(codes[0]),
            ctypes.c_uint32(rank),
            ctypes.c_void_p(ptr),
            (ctypes.c_uint64 * rank)(*dims),
            (ctypes.c_uint64 * rank)(*strides_bytes),
            (ctypes.c_uint32 * rank)(*box),
            (ctypes.c_uint32 * rank)(*((1,) * rank)),
            ctypes.c_int(0),  # no interleave
            ctypes.c_int(codes[1]),
            ctypes.c_int(codes[2]),
            ctypes.c_int(0),  # out of range: zeros
        )
    except LaunchError as error:
        raise LaunchError(f"{error}\n  {fields}") from None
    return bytes(memory)
