"""Operations around sparse decoding in plain NumPy: quantised caches, writing, gathering, indices, merging.

`rawmla.api.cache` describes the layouts. Bytes are equal to the bytes that the GPU functions write.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..call.checks import as_count
from ._arrays import BYTE_DTYPES, INT_DTYPES, Array, check_target, read, read_target, store
from ._formats import E4M3_MAX, bf16_bits, decode_bf16, decode_e4m3, decode_e8m0, encode_e4m3, round_to_bf16

D_V = 512
"""Value columns: V is the first 512 columns of K."""

D_ROPE = 64
"""The last columns of a row, which are never quantised."""

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

_PAGES = ("num_blocks", "page_block_size")
_INFINITY_COUNTS_AS = 2.0**128  # in the scale of a "model1" tile
_MODEL1_ROW = 448 + 2 * D_ROPE  # bytes of a token in the first part of a block
_MODEL1_SCALES = 8  # bytes of a token in the second


def quantize_k_cache(k_cache: Any, layout: str, *, out: Any = None) -> Any:
    """Quantise a cache as `rawmla.quantize_k_cache` does, in any float type and with any strides.

    The scale of a tile is amax / 448 in float32, at least `V32_MIN_SCALE` ("v32"), or the least power of two
    that is not below max(amax, 1e-4) / 448 ("model1", where infinity counts as 2**128). amax is the largest
    magnitude in the tile, NaN aside. A value becomes the e4m3 number nearest to the float32 quotient value /
    scale.
    """
    kind = _layout(layout)
    source = read(k_cache, "k_cache", ("bfloat16",), (*_PAGES, 1, kind.d_qk))
    num_blocks, page = source.shape[:2]
    rows = round_to_bf16(source.values.reshape(-1, kind.d_qk))
    shape = (num_blocks, page, 1, kind.token_bytes)
    if out is None:
        cache = np.zeros(shape, np.uint8)
        out = source.result(cache, "uint8")
    else:
        cache = read_target(out, "out", BYTE_DTYPES, shape).values
    _store(cache, layout, np.arange(num_blocks * page), rows)
    return out


def dequantize_k_cache(cache: Any, layout: str) -> Any:
    """Dequantise a cache as `rawmla.dequantize_k_cache`: e4m3 * scale, and the RoPE columns as they are.

    The numbers are exact in float64, or rounded once from float32 in a bfloat16 tensor.
    """
    kind = _layout(layout)
    source = read(cache, "cache", BYTE_DTYPES, (*_PAGES, 1, kind.token_bytes))
    parts = _dequantized(_fields(np.ascontiguousarray(source.values), layout), layout, np.float64)
    return source.result(np.concatenate(parts, -1)[:, :, None], "bfloat16")


def write_kv_cache(kv_c: Any, k_pe: Any, kv_cache: Any, slot_mapping: Any) -> None:
    """Write new tokens into a paged cache as `rawmla.write_kv_cache` does.

    If tokens share a slot, the last one is kept; the kernel keeps any of them.
    """
    target, layout, d_qk = _read_cache(kv_cache, read_target)
    nope = read(kv_c, "kv_c", ("bfloat16",), ("T", d_qk - D_ROPE))
    tokens = nope.shape[0]
    rope = read(k_pe, "k_pe", ("bfloat16",), (tokens, D_ROPE))
    mapping = read(slot_mapping, "slot_mapping", ("int32", "int64"), (tokens,))
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
    """Write each request's tokens into rows of a workspace as `rawmla.gather_kv_cache` does.

    A token whose page is not in the table, or not in the cache, becomes a row of zeros. A quantised value is
    e4m3 * scale in float32, rounded to bf16.
    """
    source, layout, d_qk = _read_cache(kv_cache, read)
    table = read(block_table, "block_table", INT_DTYPES, ("b", "max_blocks")).values
    b = len(table)
    lengths = read(cache_seqlens, "cache_seqlens", INT_DTYPES, (b,)).values.tolist()
    targets = read(workspace_starts, "workspace_starts", INT_DTYPES, (b,)).values.tolist()
    starts = [0] * b
    if seq_starts is not None:
        starts = read(seq_starts, "seq_starts", INT_DTYPES, (b,)).values.tolist()
    workspace = read_target(out, "out", ("bfloat16",), ("rows", d_qk))
    num_blocks, page = source.shape[:2]
    for i, (start, length, target) in enumerate(zip(starts, lengths, targets, strict=True)):
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
    """Slots of token positions within requests, as `rawmla.convert_indices` computes them.

    A slot is -1 where the position is negative, its page is not in the table or negative there, the slot is
    above the largest int32, or there is no such request.
    """
    positions = read(indices, "indices", INT_DTYPES)
    shape = positions.shape
    table = read(block_table, "block_table", INT_DTYPES, ("num_requests", "max_blocks")).values
    requests = np.arange(shape[0])
    if request_ids is not None:
        requests = read(request_ids, "request_ids", INT_DTYPES, (shape[0],)).values
    elif len(table) < len(requests):
        raise ValueError(f"block_table: expected {len(requests)} rows or more, got {len(table)}")
    check_target(out, "out", INT_DTYPES, shape)
    requests = requests.reshape(-1, *[1] * (len(shape) - 1))
    page = as_count("page_block_size", page_block_size)
    columns, offsets = np.divmod(positions.values.astype(np.int64), page)
    known = (columns >= 0) & (columns < table.shape[1]) & (requests >= 0) & (requests < len(table))
    blocks = np.full(shape, -1, np.int64)
    blocks[known] = table[np.broadcast_to(requests, shape)[known], columns[known]]
    slots = blocks * page + offsets
    slots[(blocks < 0) | (slots >= 2**31)] = -1
    if compact:
        slots = np.take_along_axis(slots, np.argsort(slots < 0, axis=-1, kind="stable"), -1)
    counts = (slots >= 0).sum(-1).astype(np.int32)
    if out is None:
        out = positions.result(slots.astype(np.int32), "int32")
    else:
        store(out, ..., slots)
    return (out, positions.result(counts, "int32")) if compact else out


def merge_attn_states(outs: Sequence[Any], lses: Sequence[Any], *, out: Any = None) -> tuple[Any, Any]:
    """Merge attention over disjoint parts of the keys as `rawmla.merge_attn_states` does.

    A part whose lse is +inf or -inf has no keys, and its out is ignored.
    """
    first = read(outs[0], "outs[0]", ("bfloat16", "float16", "float32"))
    shape = first.shape
    lse_shape = (shape[0], shape[2], shape[1]) if len(shape) == 4 else shape[:2]
    parts = [read(x, f"outs[{i}]", (first.dtype,), shape) for i, x in enumerate(outs)]
    check_target(out, "out", (first.dtype,), shape)
    logs = [read(x, f"lses[{i}]", ("float32",), lse_shape) for i, x in enumerate(lses)]
    if len(logs) != len(parts):
        raise ValueError(f"lses: expected as many as outs, {len(parts)}, got {len(logs)}")
    lse = np.stack([one.floats for one in logs])
    states = np.stack([part.floats for part in parts])
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
    merged_lse = first.result(np.where(nothing, np.inf, offset + np.log(divisor)), "float32")
    return first.result(merged, first.dtype, out), merged_lse


def _layout(layout: str) -> CacheLayout:
    if layout not in LAYOUTS:
        raise ValueError(f"layout: expected 'v32' or 'model1', got {layout!r}")
    return LAYOUTS[layout]


def _read_cache(kv_cache: Any, reader: Callable[..., Array]) -> tuple[Array, str | None, int]:
    """A cache of any kind, read by `read` or `read_target`; its layout, None if it is bf16; and d_qk."""
    cache = reader(kv_cache, "kv_cache", (*BYTE_DTYPES, "bfloat16"))
    columns: dict[int, tuple[str | None, int]] = {kind.d_qk: (None, kind.d_qk) for kind in LAYOUTS.values()}
    if cache.dtype in BYTE_DTYPES:
        columns = {kind.token_bytes: (name, kind.d_qk) for name, kind in LAYOUTS.items()}
    read(cache, "kv_cache", None, (*_PAGES, 1, columns))
    return cache, *columns[cache.shape[3]]


def _fields(cache: NDArray[np.uint8], layout: str) -> list[NDArray[np.uint8]]:
    """Views of a contiguous cache: e4m3 codes, scales, RoPE columns; `[num_blocks, page_block_size, n]`."""
    num_blocks, page = cache.shape[:2]
    if layout == "v32":
        return np.split(cache[:, :, 0], [512, 528], -1)
    blocks = cache.reshape(num_blocks, page * cache.shape[3])
    rows = blocks[:, : page * _MODEL1_ROW].reshape(num_blocks, page, _MODEL1_ROW)
    scales = blocks[:, page * _MODEL1_ROW :].reshape(num_blocks, page, _MODEL1_SCALES)
    return [rows[..., :448], scales, rows[..., 448:]]


def _dequantized(
    fields: list[NDArray[np.uint8]], layout: str, dtype: Any
) -> tuple[NDArray[Any], NDArray[Any]]:
    """The columns of rows that are quantised, as products in `dtype`, and their RoPE columns."""
    codes, scales, rope = fields
    factors = _view(scales, np.float32) if layout == "v32" else decode_e8m0(scales[..., :7])
    with np.errstate(invalid="ignore", over="ignore"):  # a "v32" tile with an infinity is NaN
        nope = decode_e4m3(codes).astype(dtype) * np.repeat(factors.astype(dtype), LAYOUTS[layout].tile, -1)
    return nope, decode_bf16(_view(rope, np.uint16)).astype(dtype)


def _store(cache: NDArray[np.uint8], layout: str, slots: NDArray[Any], rows: NDArray[np.float32]) -> None:
    """Quantise rows into the slots of a cache of bytes."""
    d_nope = LAYOUTS[layout].d_nope
    codes, scales = _quantize(rows[:, :d_nope], layout)
    rope = _view(bf16_bits(rows[:, d_nope:]), np.uint8)
    written = np.ascontiguousarray(cache)
    places = np.divmod(slots, cache.shape[1])
    for field, values in zip(_fields(written, layout), (codes, scales, rope), strict=True):
        field[places] = values
    if written is not cache:
        cache[...] = written


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
    fields = _fields(np.ascontiguousarray(kv_cache[block : block + 1]), layout)
    nope, rope = _dequantized([field[0, offset] for field in fields], layout, np.float32)
    return np.concatenate([round_to_bf16(nope), rope])


def _view(array: NDArray[Any], dtype: Any) -> NDArray[Any]:
    """The last dimension's bytes as another type."""
    return np.ascontiguousarray(array).view(dtype)
