"""The path around sparse decoding in plain NumPy: quantised caches, writing, gathering, indices, merging.

The two FP8 layouts are FlashMLA's (github.com/deepseek-ai/FlashMLA), one record a token:

- "v32" (DeepSeek-V3.2, d_qk 576), 656 bytes: 512 e4m3, 4 float32 scales (one per 128 values), 64 bf16.
- "model1" (DeepSeek-V4, d_qk 512), 584 bytes, split within a block: first `page_block_size` times 448 e4m3
  and 64 bf16 (576 bytes), then `page_block_size` times 7 e8m0 scales (one per 64 values) and a zero byte.

Bytes are those that the GPU functions of the same names write.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "E4M3_MAX",
    "LAYOUTS",
    "MODEL1_MIN_AMAX",
    "V32_MIN_SCALE",
    "CacheLayout",
    "bf16_bits",
    "convert_indices",
    "decode_bf16",
    "decode_e4m3",
    "decode_e8m0",
    "dequantize_k_cache",
    "encode_e4m3",
    "gather_kv_cache",
    "merge_attn_states",
    "quantize_k_cache",
    "round_to_bf16",
    "write_kv_cache",
]

D_ROPE = 64
"""The last columns of a row, which are never quantised."""

E4M3_MAX = 448.0
"""The largest e4m3 number."""

V32_MIN_SCALE = float(np.finfo(np.float32).tiny)
"""Scale of a "v32" tile whose values are all zero, or too small for the quotient to be a normal float32."""

MODEL1_MIN_AMAX = float(np.float32(1e-4))
"""A "model1" tile is scaled as if its largest magnitude were at least this."""


class CacheLayout(NamedTuple):
    """Sizes of a quantised layout: value columns that are quantised, values per scale, bytes per token."""

    d_nope: int
    tile: int
    token_bytes: int

    @property
    def d_qk(self) -> int:
        """Columns of a row."""
        return self.d_nope + D_ROPE


LAYOUTS = {"v32": CacheLayout(512, 128, 656), "model1": CacheLayout(448, 64, 584)}
"""The quantised layouts by name."""

_INFINITY_COUNTS_AS = 2.0**128  # in the scale of a "model1" tile

_MODEL1_ROW = 448 + 2 * D_ROPE  # bytes of a token in the first part of a block
_MODEL1_SCALES = 8  # bytes of a token in the second


def decode_e4m3(codes: ArrayLike) -> NDArray[np.float32]:
    """float32 values of e4m3 (the "fn" kind: no infinity, NaN is 0x7f and 0xff) given as uint8, any shape."""
    codes = np.asarray(codes, dtype=np.uint8)
    exponent, mantissa = (codes >> 3 & 15).astype(np.int32), (codes & 7).astype(np.float32)
    magnitude = np.where(
        exponent == 0, np.ldexp(mantissa, -9), np.ldexp(mantissa + 8, np.maximum(exponent, 1) - 10)
    )
    magnitude = np.where((codes & 0x7F) == 0x7F, np.float32(np.nan), magnitude)
    return np.where(codes & 0x80, -magnitude, magnitude).astype(np.float32)


def encode_e4m3(values: ArrayLike) -> NDArray[np.uint8]:
    """The nearest e4m3 numbers as uint8: ties to even, saturating at 448 (infinities too), NaN to 0x7f.

    What `cvt.rn.satfinite.e4m3x2.f32` does.
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


def quantize_k_cache(k_cache: ArrayLike, layout: str) -> NDArray[np.uint8]:
    """Quantise a bf16 cache.

    The scale of a tile is amax / 448 in float32, at least `V32_MIN_SCALE` ("v32"), or the least power of two
    that is not below max(amax, 1e-4) / 448 ("model1", where infinity counts as 2**128); amax is the largest
    magnitude in the tile, NaN aside. A value becomes the e4m3 number nearest to the float32 quotient value /
    scale.

    Args:
        k_cache: `[num_blocks, page_block_size, 1, d_qk]`, d_qk 576 ("v32") or 512 ("model1"), bf16 values in
            any float type.
        layout: "v32" or "model1".

    Returns:
        uint8 `[num_blocks, page_block_size, 1, 656 or 584]`, contiguous.
    """
    kind = _layout(layout)
    k_cache = np.asarray(k_cache)
    if k_cache.ndim != 4 or k_cache.shape[2:] != (1, kind.d_qk):
        raise ValueError(
            f"k_cache: expected shape [num_blocks, page_block_size, 1, {kind.d_qk}], "
            f"got {list(k_cache.shape)}"
        )
    num_blocks, page = k_cache.shape[:2]
    rows = round_to_bf16(k_cache.reshape(-1, kind.d_qk))
    cache = np.zeros((num_blocks, page, 1, kind.token_bytes), np.uint8)
    _store(cache, layout, np.arange(num_blocks * page), rows)
    return cache


def dequantize_k_cache(cache: ArrayLike, layout: str) -> NDArray[np.float64]:
    """The numbers that a quantised cache stands for, exactly.

    Args:
        cache: uint8 (or int8, or another type of one byte) `[num_blocks, page_block_size, 1, 656 or 584]`.
        layout: "v32" or "model1".

    Returns:
        float64 `[num_blocks, page_block_size, 1, d_qk]`: e4m3 * scale, and the RoPE columns as they are.
    """
    codes, scales, rope = _parts(_as_bytes(cache, layout), layout)
    tile = _layout(layout).tile
    with np.errstate(invalid="ignore"):  # a "v32" tile with an infinity is NaN
        nope = decode_e4m3(codes).astype(np.float64) * np.repeat(scales.astype(np.float64), tile, -1)
    return np.concatenate([nope, rope.astype(np.float64)], -1)[:, :, None]


def write_kv_cache(kv_c: ArrayLike, k_pe: ArrayLike, kv_cache: NDArray[Any], slot_mapping: ArrayLike) -> None:
    """Write new tokens into a paged cache, in place.

    Args:
        kv_c: `[T, 512 or 448]`, the columns before RoPE.
        k_pe: `[T, 64]`, the RoPE columns.
        kv_cache: uint8 or int8 `[num_blocks, page_block_size, 1, 656 or 584]`, or a float type of
            `[num_blocks, page_block_size, 1, 576 or 512]`.
        slot_mapping: integers `[T]`: block * page_block_size + offset in the block; a token whose slot is
            negative or past the cache is skipped. Of tokens with one slot the last is kept.
    """
    slots = np.asarray(slot_mapping)
    kept = np.flatnonzero((slots >= 0) & (slots < kv_cache.shape[0] * kv_cache.shape[1]))
    rows = round_to_bf16(np.concatenate([np.asarray(kv_c), np.asarray(k_pe)], -1)[kept])
    layout = _layout_of(kv_cache)
    if layout is not None:
        _store(kv_cache.view(np.uint8), layout, slots[kept], rows)
        return
    blocks, offsets = np.divmod(slots[kept], kv_cache.shape[1])
    kv_cache[blocks, offsets, 0] = rows


def gather_kv_cache(
    kv_cache: ArrayLike,
    block_table: ArrayLike,
    cache_seqlens: ArrayLike,
    out: NDArray[Any],
    *,
    workspace_starts: ArrayLike,
    seq_starts: ArrayLike | None = None,
) -> None:
    """Write each request's tokens into consecutive rows of a workspace, dequantised and rounded to bf16.

    Args:
        kv_cache: as for `write_kv_cache`.
        block_table: integers `[b, max_blocks]`, read up to the needed length.
        cache_seqlens: integers `[b]`.
        out: float `[rows, d_qk]`; token t of request i goes to row `workspace_starts[i] + t - seq_starts[i]`,
            and nowhere when that is not a row of `out`.
        workspace_starts: integers `[b]`.
        seq_starts: integers `[b]`, the first token of each request to gather; None is 0.

    A token whose page is not in the table, or not in the cache, becomes a row of zeros. A quantised value is
    e4m3 * scale in float32, rounded to bf16.
    """
    kv_cache, table = np.asarray(kv_cache), np.asarray(block_table)
    num_blocks, page = kv_cache.shape[:2]
    starts = np.zeros(len(table), np.int64) if seq_starts is None else np.asarray(seq_starts)
    for i, (length, row) in enumerate(
        zip(np.asarray(cache_seqlens), np.asarray(workspace_starts), strict=True)
    ):
        for token in range(int(starts[i]), int(length)):
            target = int(row) + token - int(starts[i])
            if not 0 <= target < len(out):
                continue
            column = token // page
            block = int(table[i, column]) if 0 <= column < table.shape[1] else -1
            out[target] = _row(kv_cache, block, token % page) if 0 <= block < num_blocks else 0


def convert_indices(
    indices: ArrayLike,
    block_table: ArrayLike,
    page_block_size: int,
    *,
    request_ids: ArrayLike | None = None,
    compact: bool = False,
) -> NDArray[np.int32] | tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Slots in the cache of token positions within requests.

    Args:
        indices: integers `[T, topk]` or `[b, s_q, topk]`, token positions.
        block_table: integers `[num_requests, max_blocks]`.
        page_block_size: tokens per page.
        request_ids: integers of the length of `indices`: the request of each entry of its first dimension;
            None: entry i belongs to request i.
        compact: move the valid slots of a row to its front, in their order.

    Returns:
        int32 of the shape of `indices`: `block_table[request, position // page_block_size] * page_block_size
        + position % page_block_size`, or -1 where the position is negative, its page is not in the table or
        negative there, the slot is above the largest int32, or there is no such request. With `compact` also
        int32 counts of the valid ones, of the shape of `indices` without its last dimension.
    """
    indices, table = np.asarray(indices), np.asarray(block_table)
    requests = np.arange(len(indices)) if request_ids is None else np.asarray(request_ids)
    slots = np.full(indices.shape, -1, np.int32)
    counts = np.zeros(indices.shape[:-1], np.int32)
    for place in np.ndindex(indices.shape[:-1]):
        request = int(requests[place[0]])
        found = [_slot(table, request, int(position), page_block_size) for position in indices[place]]
        valid = [slot for slot in found if slot >= 0]
        counts[place] = len(valid)
        slots[place] = valid + [-1] * (len(found) - len(valid)) if compact else found
    return (slots, counts) if compact else slots


def merge_attn_states(
    outs: Sequence[ArrayLike], lses: Sequence[ArrayLike]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Attention over all keys from attention over disjoint parts of them.

    Args:
        outs: `[b, s_q, h_q, 512]` each, or `[s_q, h_q, 512]` each.
        lses: `[b, h_q, s_q]` each (what decoding returns), or `[s_q, h_q]` each; natural logarithm. +inf or
            -inf marks a part without keys, whose out is ignored.

    Returns:
        out: float64, sum of outs weighted by exp(lse), divided by the sum of the weights; 0 without keys.
        lse: float64, logarithm of the sum of the weights; +inf without keys.
    """
    lse = np.stack([np.asarray(one, np.float64) for one in lses])
    out = np.stack([np.asarray(one, np.float64) for one in outs])
    empty = np.isinf(lse)
    top = np.where(empty, -np.inf, lse).max(0)
    offset = np.where(top == -np.inf, 0, top)
    weights = np.where(empty, 0, np.exp(np.where(empty, 0, lse) - offset))
    total = weights.sum(0)
    nothing = total == 0
    divisor = np.where(nothing, 1, total)
    shares = weights / divisor
    as_out = (0, 1, 3, 2) if out.ndim == 5 else (0, 1, 2)
    shares, ignored = (np.transpose(x, as_out)[..., None] for x in (shares, empty))
    merged = (np.where(ignored, 0, out) * shares).sum(0)
    return merged, np.where(nothing, np.inf, offset + np.log(divisor))


def _layout(layout: str) -> CacheLayout:
    if layout not in LAYOUTS:
        raise ValueError(f"layout: expected 'v32' or 'model1', got {layout!r}")
    return LAYOUTS[layout]


def _layout_of(kv_cache: NDArray[Any]) -> str | None:
    """The layout of a quantised cache, None for one of floats."""
    if kv_cache.itemsize != 1:
        return None
    (name,) = (name for name, kind in LAYOUTS.items() if kind.token_bytes == kv_cache.shape[3])
    return name


def _as_bytes(cache: ArrayLike, layout: str) -> NDArray[np.uint8]:
    kind = _layout(layout)
    cache = np.asarray(cache)
    if cache.ndim != 4 or cache.shape[2:] != (1, kind.token_bytes) or cache.itemsize != 1:
        raise ValueError(
            f"cache: expected bytes of shape [num_blocks, page_block_size, 1, {kind.token_bytes}], "
            f"got {cache.dtype} {list(cache.shape)}"
        )
    return cache.view(np.uint8)


def _parts(
    cache: NDArray[np.uint8], layout: str
) -> tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.float32]]:
    """(e4m3 codes, scales, RoPE columns), each `[num_blocks, page_block_size, n]`."""
    num_blocks, page = cache.shape[:2]
    if layout == "v32":
        records = cache[:, :, 0]
        codes, scales, rope = np.split(np.ascontiguousarray(records), [512, 528], -1)
        return codes, _view(scales, np.float32), decode_bf16(_view(rope, np.uint16))
    blocks = np.ascontiguousarray(cache).reshape(num_blocks, -1)
    rows = blocks[:, : page * _MODEL1_ROW].reshape(num_blocks, page, _MODEL1_ROW)
    powers = blocks[:, page * _MODEL1_ROW :].reshape(num_blocks, page, _MODEL1_SCALES)
    codes, rope = np.split(rows, [448], -1)
    return codes, decode_e8m0(powers[..., :7]), decode_bf16(_view(rope, np.uint16))


def _store(cache: NDArray[np.uint8], layout: str, slots: NDArray[Any], rows: NDArray[np.float32]) -> None:
    """Quantise rows into the slots of a cache of bytes."""
    kind = LAYOUTS[layout]
    page = cache.shape[1]
    codes, scales = _quantize(rows[:, : kind.d_nope], layout)
    rope = _view(bf16_bits(rows[:, kind.d_nope :]), np.uint8)
    for slot, code, scale, tail in zip(slots.tolist(), codes, scales, rope, strict=True):
        block, offset = divmod(slot, page)
        if layout == "v32":
            cache[block, offset, 0] = np.concatenate([code, scale, tail])
            continue
        data = cache[block].reshape(-1).copy()
        data[offset * _MODEL1_ROW :][:_MODEL1_ROW] = np.concatenate([code, tail])
        data[page * _MODEL1_ROW + offset * _MODEL1_SCALES :][:_MODEL1_SCALES] = scale
        cache[block] = data.reshape(cache[block].shape)


def _quantize(nope: NDArray[np.float32], layout: str) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """(e4m3 codes `[rows, d_nope]`, bytes of the scales `[rows, 16 or 8]`)."""
    kind = LAYOUTS[layout]
    tiles = nope.reshape(len(nope), kind.d_nope // kind.tile, kind.tile)
    amax = np.fmax.reduce(np.abs(tiles), -1, initial=0)
    if layout == "v32":
        scales = np.fmax(amax / np.float32(E4M3_MAX), np.float32(V32_MIN_SCALE))
        stored = _view(scales, np.uint8)
    else:
        amax = np.clip(amax.astype(np.float64), MODEL1_MIN_AMAX, _INFINITY_COUNTS_AS)
        fraction, exponent = np.frexp(amax)
        # Twice the fraction against 1.75 of 448 = 1.75 * 2**8: a larger one needs the next power of two.
        powers = (exponent - 9 + (fraction > 0.875) + 127).astype(np.uint8)
        scales = decode_e8m0(powers)
        stored = np.concatenate([powers, np.zeros((len(powers), 1), np.uint8)], -1)
    with np.errstate(invalid="ignore"):
        codes = encode_e4m3(tiles / scales[..., None])
    return codes.reshape(nope.shape), stored


def _row(kv_cache: NDArray[Any], block: int, offset: int) -> NDArray[np.float32]:
    """One token as bf16 values."""
    layout = _layout_of(kv_cache)
    if layout is None:
        return round_to_bf16(kv_cache[block, offset, 0])
    codes, scales, rope = _parts(kv_cache[block : block + 1].view(np.uint8), layout)
    with np.errstate(invalid="ignore", over="ignore"):
        nope = decode_e4m3(codes[0, offset]) * np.repeat(scales[0, offset], LAYOUTS[layout].tile)
    return np.concatenate([round_to_bf16(nope), rope[0, offset]])


def _slot(table: NDArray[Any], request: int, position: int, page: int) -> int:
    column = position // page
    if position < 0 or not 0 <= request < len(table) or column >= table.shape[1]:
        return -1
    block = int(table[request, column])
    slot = block * page + position % page
    return slot if block >= 0 and slot < 2**31 else -1


def _view(array: NDArray[Any], dtype: Any) -> NDArray[Any]:
    """The last dimension's bytes as another type."""
    return np.ascontiguousarray(array).view(dtype)
