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

from ..call.checks import as_bool, as_count
from ._arrays import (
    BYTE_DTYPES,
    INT_DTYPES,
    Array,
    check_dtype,
    check_target,
    check_vector,
    is_tensor,
    like,
    read,
    store,
)

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
    "decode_e5m2",
    "decode_e8m0",
    "dequantize_k_cache",
    "encode_e4m3",
    "gather_kv_cache",
    "merge_attn_states",
    "quantize_k_cache",
    "round_to_bf16",
    "write_kv_cache",
]

D_V = 512
"""Value columns: V is the first 512 columns of K."""

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


def decode_e5m2(codes: ArrayLike) -> NDArray[np.float32]:
    """float32 values of e5m2 given as uint8, any shape: the upper bytes of float16 numbers."""
    return (np.asarray(codes, dtype=np.uint8).astype(np.uint16) << 8).view(np.float16).astype(np.float32)


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


def quantize_k_cache(k_cache: Any, layout: str, *, out: Any = None) -> Any:
    """Quantise a bf16 cache.

    The scale of a tile is amax / 448 in float32, at least `V32_MIN_SCALE` ("v32"), or the least power of two
    that is not below max(amax, 1e-4) / 448 ("model1", where infinity counts as 2**128); amax is the largest
    magnitude in the tile, NaN aside. A value becomes the e4m3 number nearest to the float32 quotient value /
    scale.

    Args:
        k_cache: `[num_blocks, page_block_size, 1, d_qk]`, d_qk 576 ("v32") or 512 ("model1"), bf16 values in
            any float type.
        layout: "v32" or "model1".
        out: optional bytes `[num_blocks, page_block_size, 1, 656 or 584]` to write.

    Returns:
        `out`, or a contiguous uint8 array or tensor of that shape.
    """
    kind = _layout(layout)
    source = read(k_cache, "k_cache")
    check_dtype("k_cache", source, ("bfloat16",))
    _check_shape("k_cache", source, kind.d_qk)
    num_blocks, page = source.shape[:2]
    rows = round_to_bf16(source.values.reshape(-1, kind.d_qk))
    if out is None:
        cache = np.zeros((num_blocks, page, 1, kind.token_bytes), np.uint8)
        out = like(cache, "uint8", source)
    else:
        check_target(out, "out")
        target = read(out, "out")
        check_dtype("out", target, BYTE_DTYPES)
        _check_shape("out", target, kind.token_bytes, num_blocks, page)
        cache = target.values
    _store(cache, layout, np.arange(num_blocks * page), rows)
    return out


def dequantize_k_cache(cache: Any, layout: str) -> Any:
    """The numbers that a quantised cache stands for.

    Args:
        cache: bytes `[num_blocks, page_block_size, 1, 656 or 584]`.
        layout: "v32" or "model1".

    Returns:
        `[num_blocks, page_block_size, 1, d_qk]`: e4m3 * scale, and the RoPE columns as they are. float64 and
        exact, or a bfloat16 tensor, rounded once from float32.
    """
    kind = _layout(layout)
    source = read(cache, "cache")
    check_dtype("cache", source, BYTE_DTYPES)
    _check_shape("cache", source, kind.token_bytes)
    codes, scales, rope = _parts(source.values, layout)
    with np.errstate(invalid="ignore"):  # a "v32" tile with an infinity is NaN
        nope = decode_e4m3(codes).astype(np.float64) * np.repeat(scales.astype(np.float64), kind.tile, -1)
    return like(np.concatenate([nope, rope.astype(np.float64)], -1)[:, :, None], "bfloat16", source)


def write_kv_cache(kv_c: Any, k_pe: Any, kv_cache: Any, slot_mapping: Any) -> None:
    """Write new tokens into a paged cache, in place.

    Args:
        kv_c: `[T, 512 or 448]`, the columns before RoPE.
        k_pe: `[T, 64]`, the RoPE columns.
        kv_cache: bytes `[num_blocks, page_block_size, 1, 656 or 584]`, or bf16 (in NumPy a float type)
            `[num_blocks, page_block_size, 1, 576 or 512]`.
        slot_mapping: integers `[T]`: block * page_block_size + offset in the block; a token whose slot is
            negative or past the cache is skipped. Of tokens with one slot the last is kept.
    """
    check_target(kv_cache, "kv_cache")
    target = read(kv_cache, "kv_cache")
    layout, d_qk = _check_cache(target)
    nope, rope = read(kv_c, "kv_c"), read(k_pe, "k_pe")
    check_dtype("kv_c", nope, ("bfloat16",))
    check_dtype("k_pe", rope, ("bfloat16",))
    if len(nope.shape) != 2 or nope.shape[1] != d_qk - D_ROPE:
        raise ValueError(
            f"kv_c: expected shape [T, {d_qk - D_ROPE}] for a cache of {target.dtype} with last dimension "
            f"{target.shape[3]}, got {list(nope.shape)}"
        )
    tokens = nope.shape[0]
    if rope.shape != (tokens, D_ROPE):
        raise ValueError(
            f"k_pe: expected shape {[tokens, D_ROPE]} (T is that of kv_c), got {list(rope.shape)}"
        )
    mapping = read(slot_mapping, "slot_mapping")
    check_vector("slot_mapping", mapping, tokens, "T is that of kv_c", ("int32", "int64"))
    num_blocks, page = target.shape[:2]
    kept = np.flatnonzero((mapping.values >= 0) & (mapping.values < num_blocks * page))
    slots = mapping.values[kept]
    rows = round_to_bf16(np.concatenate([nope.values, rope.values], -1)[kept])
    if layout is not None:
        _store(target.values, layout, slots, rows)
        return
    for slot, row in zip(slots.tolist(), rows, strict=True):
        store(kv_cache, (slot // page, slot % page, 0), row)


def gather_kv_cache(
    kv_cache: Any,
    block_table: Any,
    cache_seqlens: Any,
    out: Any,
    *,
    workspace_starts: Any,
    seq_starts: Any = None,
) -> None:
    """Write each request's tokens into consecutive rows of a workspace, dequantised and rounded to bf16.

    Args:
        kv_cache: as for `write_kv_cache`.
        block_table: integers `[b, max_blocks]`, read up to the needed length.
        cache_seqlens: integers `[b]`.
        out: bf16 (in NumPy a float type) `[rows, d_qk]`; token t of request i goes to row
            `workspace_starts[i] + t - seq_starts[i]`, and nowhere when that is not a row of `out`.
        workspace_starts: integers `[b]`.
        seq_starts: integers `[b]`, the first token of each request to gather; None is 0.

    A token whose page is not in the table, or not in the cache, becomes a row of zeros. A quantised value is
    e4m3 * scale in float32, rounded to bf16.
    """
    source = read(kv_cache, "kv_cache")
    layout, d_qk = _check_cache(source)
    table = _read_table(block_table)
    b = len(table)
    requests = {"cache_seqlens": cache_seqlens, "workspace_starts": workspace_starts}
    if seq_starts is not None:
        requests["seq_starts"] = seq_starts
    vectors = {name: read(x, name) for name, x in requests.items()}
    for name, vector in vectors.items():
        check_vector(name, vector, b, "b is that of block_table")
    check_target(out, "out")
    workspace = read(out, "out")
    check_dtype("out", workspace, ("bfloat16",))
    if len(workspace.shape) != 2 or workspace.shape[1] != d_qk:
        raise ValueError(f"out: expected shape [rows, {d_qk}] for this cache, got {list(workspace.shape)}")
    num_blocks, page = source.shape[:2]
    for i in range(b):
        length, target = (int(vectors[name].values[i]) for name in ("cache_seqlens", "workspace_starts"))
        start = int(vectors["seq_starts"].values[i]) if "seq_starts" in vectors else 0
        for token in range(start, length):
            place = target + token - start
            if not 0 <= place < workspace.shape[0]:
                continue
            column = token // page
            block = int(table[i, column]) if 0 <= column < table.shape[1] else -1
            found = 0 <= block < num_blocks
            row = _row(source.values, layout, block, token % page) if found else np.zeros(d_qk, np.float32)
            store(out, place, row)


def convert_indices(
    indices: Any,
    block_table: Any,
    page_block_size: int,
    *,
    request_ids: Any = None,
    compact: bool = False,
    out: Any = None,
) -> Any:
    """Slots in the cache of token positions within requests.

    Args:
        indices: integers `[T, topk]` or `[b, s_q, topk]`, token positions.
        block_table: integers `[num_requests, max_blocks]`.
        page_block_size: tokens per page.
        request_ids: integers of the length of `indices`: the request of each entry of its first dimension;
            None: entry i belongs to request i.
        compact: move the valid slots of a row to its front, in their order.
        out: optional integers of the shape of `indices` to write; may be `indices`.

    Returns:
        `out`, or int32 of the shape of `indices`: `block_table[request, position // page_block_size] *
        page_block_size + position % page_block_size`, or -1 where the position is negative, its page is not
        in the table or negative there, the slot is above the largest int32, or there is no such request. With
        `compact` also int32 counts of the valid ones, of the shape of `indices` without its last dimension.
    """
    compact = as_bool("compact", compact)
    page = as_count("page_block_size", page_block_size)
    positions = read(indices, "indices")
    check_dtype("indices", positions, INT_DTYPES)
    shape = positions.shape
    if len(shape) not in (2, 3):
        raise ValueError(f"indices: expected shape [T, topk] or [b, s_q, topk], got {list(shape)}")
    table = _read_table(block_table, "num_requests" if request_ids is not None else f"at least {shape[0]}")
    requests = np.arange(shape[0])
    if request_ids is not None:
        ids = read(request_ids, "request_ids")
        check_vector("request_ids", ids, shape[0], "the length of indices")
        requests = ids.values
    elif len(table) < shape[0]:
        raise ValueError(
            f"block_table: expected shape [at least {shape[0]}, max_blocks], got {list(table.shape)}"
        )
    if out is not None:
        check_target(out, "out")
        given = read(out, "out")
        check_dtype("out", given, INT_DTYPES)
        if given.shape != shape:
            raise ValueError(f"out: expected shape {list(shape)}, that of indices, got {list(given.shape)}")
    slots = np.full(shape, -1, np.int32)
    counts = np.zeros(shape[:-1], np.int32)
    for place in np.ndindex(shape[:-1]):
        request = int(requests[place[0]])
        found = [_slot(table, request, int(position), page) for position in positions.values[place]]
        valid = [slot for slot in found if slot >= 0]
        counts[place] = len(valid)
        slots[place] = valid + [-1] * (len(found) - len(valid)) if compact else found
    if out is None:
        out = like(slots, "int32", positions)
    else:
        store(out, ..., slots)
    return (out, like(counts, "int32", positions)) if compact else out


def merge_attn_states(outs: Sequence[Any], lses: Sequence[Any], *, out: Any = None) -> tuple[Any, Any]:
    """Attention over all keys from attention over disjoint parts of them.

    Args:
        outs: `[b, s_q, h_q, 512]` each, or `[s_q, h_q, 512]` each.
        lses: `[b, h_q, s_q]` each (what decoding returns), or `[s_q, h_q]` each; natural logarithm. +inf or
            -inf marks a part without keys, whose out is ignored.
        out: optional array of the shape of the result that receives it. A tensor is also what is returned.

    Returns:
        out: sum of outs weighted by exp(lse), divided by the sum of the weights; 0 without keys. float64, or
        a tensor of the dtype of `outs`.
        lse: logarithm of the sum of the weights; +inf without keys. float64, or a float32 tensor.
    """
    for name, arrays in (("outs", outs), ("lses", lses)):
        if not isinstance(arrays, (list, tuple)):
            raise TypeError(f"{name}: expected a list or tuple of arrays, got {type(arrays).__name__}")
    if not outs or len(lses) != len(outs):
        raise ValueError(
            f"lses: expected at least 1, and as many as outs, got {len(lses)} lses and {len(outs)} outs"
        )
    first = read(outs[0], "outs[0]")
    check_dtype("outs[0]", first, ("bfloat16", "float16", "float32"))
    shape = first.shape
    if len(shape) not in (3, 4) or shape[-1] != D_V:
        raise ValueError(
            f"outs[0]: expected shape [b, s_q, h_q, {D_V}] or [s_q, h_q, {D_V}], got {list(shape)}"
        )
    lse_shape = (shape[0], shape[2], shape[1]) if len(shape) == 4 else shape[:2]
    parts = [_state(first, f"outs[{i}]", x) for i, x in enumerate(outs)]
    if out is not None:
        check_target(out, "out")
        _state(first, "out", out)
    logs = [read(x, f"lses[{i}]") for i, x in enumerate(lses)]
    for i, one in enumerate(logs):
        check_dtype(f"lses[{i}]", one, ("float32",))
        if one.shape != lse_shape:
            raise ValueError(
                f"lses[{i}]: expected shape {list(lse_shape)} for outs of shape {list(shape)}, got "
                f"{list(one.shape)}"
            )

    lse = np.stack([one.values.astype(np.float64) for one in logs])
    states = np.stack([part.values.astype(np.float64) for part in parts])
    empty = np.isinf(lse)
    top = np.where(empty, -np.inf, lse).max(0)
    offset = np.where(top == -np.inf, 0, top)
    weights = np.where(empty, 0, np.exp(np.where(empty, 0, lse) - offset))
    total = weights.sum(0)
    nothing = total == 0
    divisor = np.where(nothing, 1, total)
    shares = weights / divisor
    as_out = (0, 1, 3, 2) if states.ndim == 5 else (0, 1, 2)
    shares, ignored = (np.transpose(x, as_out)[..., None] for x in (shares, empty))
    merged = (np.where(ignored, 0, states) * shares).sum(0)
    merged_lse = like(np.where(nothing, np.inf, offset + np.log(divisor)), "float32", first)
    if out is not None:
        store(out, ..., merged)
        if is_tensor(out):
            return out, merged_lse
    return like(merged, first.dtype, first), merged_lse


def _state(first: Array, name: str, x: Any) -> Array:
    """Check an out against the first one."""
    array = read(x, name)
    check_dtype(name, array, (first.dtype,), ", that of outs[0]")
    if array.shape != first.shape:
        raise ValueError(
            f"{name}: expected shape {list(first.shape)}, that of outs[0], got {list(array.shape)}"
        )
    return array


def _layout(layout: Any) -> CacheLayout:
    if not isinstance(layout, str):
        raise TypeError(f"layout: expected 'v32' or 'model1', got {type(layout).__name__}")
    if layout not in LAYOUTS:
        raise ValueError(f"layout: expected 'v32' or 'model1', got {layout!r}")
    return LAYOUTS[layout]


def _check_cache(kv_cache: Array) -> tuple[str | None, int]:
    """Check a cache of any layout; returns the layout, None of one that is not quantised, and d_qk."""
    columns: dict[int, tuple[str | None, int]]
    if kv_cache.dtype in BYTE_DTYPES:
        columns = {kind.token_bytes: (name, kind.d_qk) for name, kind in LAYOUTS.items()}
    else:
        check_dtype("kv_cache", kv_cache, (*BYTE_DTYPES, "bfloat16"))
        columns = {kind.d_qk: (None, kind.d_qk) for kind in LAYOUTS.values()}
    shape = kv_cache.shape
    if len(shape) != 4 or shape[2] != 1 or shape[3] not in columns or not shape[1]:
        widths = " or ".join(map(str, columns))
        raise ValueError(
            f"kv_cache: expected shape [num_blocks, page_block_size, 1, {widths}] with page_block_size "
            f"at least 1, got {kv_cache.dtype} {list(shape)}"
        )
    return columns[shape[3]]


def _check_shape(
    name: str, array: Array, columns: int, num_blocks: int | None = None, page: int | None = None
) -> None:
    """Check `[num_blocks, page_block_size, 1, columns]`, the first two as given or free."""
    shape = array.shape
    if (
        len(shape) != 4
        or shape[2:] != (1, columns)
        or not shape[1]
        or num_blocks not in (None, shape[0])
        or page not in (None, shape[1])
    ):
        expected = f"[{num_blocks or 'num_blocks'}, {page or 'page_block_size'}, 1, {columns}]"
        raise ValueError(
            f"{name}: expected shape {expected} with page_block_size at least 1, got {list(shape)}"
        )


def _read_table(block_table: Any, rows: str = "b") -> NDArray[Any]:
    table = read(block_table, "block_table")
    check_dtype("block_table", table, INT_DTYPES)
    if len(table.shape) != 2:
        raise ValueError(f"block_table: expected shape [{rows}, max_blocks], got {list(table.shape)}")
    return table.values


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


def _row(kv_cache: NDArray[Any], layout: str | None, block: int, offset: int) -> NDArray[np.float32]:
    """One token as bf16 values."""
    if layout is None:
        return round_to_bf16(kv_cache[block, offset, 0])
    codes, scales, rope = _parts(kv_cache[block : block + 1], layout)
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
