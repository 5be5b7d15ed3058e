"""Number formats of caches and results, converted bit for bit: e4m3, e5m2, e8m0 and bf16."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

E4M3_MAX = 448.0
"""The largest e4m3 number."""


def decode_e4m3(codes: ArrayLike) -> NDArray[np.float32]:
    """float32 values of e4m3 (the "fn" kind: no infinity, NaN is 0x7f and 0xff) given as uint8, any shape."""
    codes = np.asarray(codes, dtype=np.uint8)
    exponent, mantissa = (codes >> 3 & 15).astype(np.int32), (codes & 7).astype(np.float32)
    magnitude = np.where(
        exponent == 0, np.ldexp(mantissa, -9), np.ldexp(mantissa + 8, np.maximum(exponent, 1) - 10)
    )
    magnitude = np.where((codes & 0x7F) == 0x7F, np.float32(np.nan), magnitude)
    return np.where(codes & 0x80, -magnitude, magnitude).astype(np.float32)


def decode_e5m2(codes: ArrayLike) -> NDArray[np.float32]:
    """float32 values of e5m2 given as uint8, any shape: the upper bytes of float16 numbers."""
    return (np.asarray(codes, dtype=np.uint8).astype(np.uint16) << 8).view(np.float16).astype(np.float32)


def encode_e4m3(values: ArrayLike) -> NDArray[np.uint8]:
    """The nearest e4m3 numbers as uint8: ties to even, saturating at 448 (infinities too), NaN to 0x7f.

    The rounding of `cvt.rn.satfinite.e4m3x2.f32`.
    """
    values = np.asarray(values)
    values = values if values.dtype == np.float64 else values.astype(np.float32)
    magnitude = np.minimum(np.nan_to_num(np.abs(values), nan=0.0), E4M3_MAX)
    exponent = np.frexp(np.maximum(magnitude, 2.0**-6))[1] - 1
    steps = np.rint(np.ldexp(magnitude, 3 - exponent)).astype(np.int32)  # 8 to 16, below 8 if subnormal
    codes = (exponent + 7 << 3) + steps - 8
    codes |= np.where(np.signbit(values), 0x80, 0)
    return np.where(np.isnan(values), 0x7F, codes).astype(np.uint8)


def decode_e8m0(codes: ArrayLike) -> NDArray[np.float32]:
    """float32 values of e8m0, 2 ** (code - 127), given as uint8; 255 is NaN."""
    codes = np.asarray(codes, dtype=np.uint8)
    powers = np.ldexp(np.float32(1), np.minimum(codes, 254).astype(np.int32) - 127)
    return np.where(codes == 255, np.float32(np.nan), powers)


def bf16_bits(values: ArrayLike) -> NDArray[np.uint16]:
    """The nearest bf16 numbers as uint16: ties to even, NaN stays one. Values are read as float32."""
    values = np.asarray(values).astype(np.float32)
    bits = np.ascontiguousarray(values).view(np.uint32).reshape(values.shape)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), (bits >> 16).astype(np.uint16) | np.uint16(0x40), rounded)


def decode_bf16(bits: ArrayLike) -> NDArray[np.float32]:
    """float32 values of bf16 given as uint16."""
    return (np.asarray(bits, dtype=np.uint16).astype(np.uint32) << 16).view(np.float32)


def round_to_bf16(values: ArrayLike) -> NDArray[np.float32]:
    """The nearest bf16 numbers, as float32."""
    return decode_bf16(bf16_bits(values))
