"""Paged caches around decoding: quantising, writing new tokens, reading them back."""

from __future__ import annotations

from typing import Any

from ..call.arrays import ArrayView, inspect
from ..call.checks import (
    INT32_MAX,
    check_no_overlap,
    check_vector,
    launch_place,
    row_strides,
    same_place,
)
from ..errors import MissingDependencyError
from ..kernels import mla_cache_gather, mla_cache_write
from ..kernels.mla_cache_rows import CACHE_FORMATS, QUANTIZED, CacheFormat, padded_block_bytes
from .paged_cache import PagedCache, check_paged_cache

__all__ = ["dequantize", "gather", "quantize", "write"]


def quantize(k_cache: Any, layout: str, out: Any) -> Any:
    """Run `rawmla.quantize_k_cache`."""
    format = _quantized_format(layout)
    source = inspect(k_cache, "k_cache")
    if source.dtype != "bfloat16":
        raise TypeError(f"k_cache: expected dtype bfloat16, got {source.dtype}")
    _check_cache_shape("k_cache", source, format.d_qk)
    num_blocks, page = source.shape[:2]
    block_step, token_step, _ = row_strides("k_cache", source)
    _check_int32_strides("k_cache", source)
    if out is None:
        padded = padded_block_bytes(format, page)
        if padded > INT32_MAX:
            raise ValueError(
                f"k_cache: expected pages of less than 2 GiB in {layout!r}, got page_block_size {page}"
            )
        blocks = source.framework.empty((num_blocks, padded), "uint8", source.device)
        out = blocks[:, : page * format.token_bytes].reshape(num_blocks, page, 1, format.token_bytes)
        ptr, block_stride = source.framework.pointer(blocks), padded
    else:
        target = inspect(out, "out")
        given = _paged_cache("out", target, format)
        _check_cache_shape("out", target, format.token_bytes, num_blocks, page)
        same_place("out", target, source, "k_cache")
        ptr, block_stride = given.ptr, given.block_stride
    if num_blocks:
        mla_cache_write.launch(
            format,
            **launch_place(source),
            kv_c=source.ptr,
            k_pe=source.ptr + 2 * format.d_nope,
            slots=0,
            slots_are_64bit=False,
            cache=ptr,
            kv_c_stride=token_step,
            k_pe_stride=token_step,
            source_block_stride=block_step,
            block_stride=block_stride,
            token_stride=format.row_bytes,
            num_slots=num_blocks * page,
            tokens=num_blocks * page,
            page_block_size=page,
            sources_are_aligned=_rows_are_aligned(source, block_step, token_step),
        )
    return out


def dequantize(cache: Any, layout: str) -> Any:
    """Run `rawmla.dequantize_k_cache`."""
    format = _quantized_format(layout)
    source = inspect(cache, "cache")
    given = _paged_cache("cache", source, format)
    rows = given.num_blocks * given.page_block_size
    try:
        out = source.framework.empty((*source.shape[:3], format.d_qk), "bfloat16", source.device)
    except ImportError as error:
        raise MissingDependencyError(f"a bfloat16 CuPy array needs ml_dtypes: {error}") from error
    if rows:
        mla_cache_gather.launch(
            format,
            False,
            **launch_place(source),
            cache=given.ptr,
            block_table=0,
            cache_seqlens=0,
            workspace_starts=0,
            seq_starts=0,
            out=source.framework.pointer(out),
            table_stride=0,
            out_stride=format.d_qk,
            block_stride=given.block_stride,
            token_stride=given.token_stride,
            b=0,
            table_width=0,
            num_blocks=given.num_blocks,
            rows=rows,
            page_block_size=given.page_block_size,
        )
    return out


def write(kv_c: Any, k_pe: Any, kv_cache: Any, slot_mapping: Any) -> None:
    """Run `rawmla.write_kv_cache`."""
    target = inspect(kv_cache, "kv_cache")
    given = _paged_cache("kv_cache", target)
    format = given.format
    nope, rope = inspect(kv_c, "kv_c"), inspect(k_pe, "k_pe")
    for name, view in (("kv_c", nope), ("k_pe", rope)):
        if view.dtype != "bfloat16":
            raise TypeError(f"{name}: expected dtype bfloat16, got {view.dtype}")
    if len(nope.shape) != 2 or nope.shape[1] != format.d_nope:
        raise ValueError(
            f"kv_c: expected shape [T, {format.d_nope}] for a cache of {target.dtype} with last dimension "
            f"{target.shape[3]}, got {list(nope.shape)}"
        )
    tokens = nope.shape[0]
    d_rope = format.d_qk - format.d_nope
    if tuple(rope.shape) != (tokens, d_rope):
        raise ValueError(f"k_pe: expected shape {[tokens, d_rope]} (the T of kv_c), got {list(rope.shape)}")
    (nope_step,), (rope_step,) = row_strides("kv_c", nope), row_strides("k_pe", rope)
    _check_int32_strides("kv_c", nope)
    _check_int32_strides("k_pe", rope)
    slots = inspect(slot_mapping, "slot_mapping")
    check_vector("slot_mapping", slots, ("int32", "int64"), tokens, "the T of kv_c")
    for name, view in (("kv_c", nope), ("k_pe", rope), ("slot_mapping", slots)):
        same_place(name, view, target, "kv_cache")
    if tokens > INT32_MAX:
        raise ValueError(f"kv_c: expected at most {INT32_MAX} tokens, got {tokens}")
    if tokens:
        mla_cache_write.launch(
            format,
            **launch_place(target),
            kv_c=nope.ptr,
            k_pe=rope.ptr,
            slots=slots.ptr,
            slots_are_64bit=slots.dtype == "int64",
            cache=given.ptr,
            kv_c_stride=nope_step,
            k_pe_stride=rope_step,
            source_block_stride=0,
            block_stride=given.block_stride,
            token_stride=given.token_stride,
            num_slots=given.num_blocks * given.page_block_size,
            tokens=tokens,
            page_block_size=given.page_block_size,
            sources_are_aligned=_rows_are_aligned(nope, nope_step) and _rows_are_aligned(rope, rope_step),
        )


def gather(
    kv_cache: Any, block_table: Any, cache_seqlens: Any, out: Any, workspace_starts: Any, seq_starts: Any
) -> None:
    """Run `rawmla.gather_kv_cache`."""
    source = inspect(kv_cache, "kv_cache")
    given = _paged_cache("kv_cache", source)
    d_qk = given.format.d_qk
    table = inspect(block_table, "block_table")
    if table.dtype != "int32":
        raise TypeError(f"block_table: expected dtype int32, got {table.dtype}")
    if len(table.shape) != 2 or max(table.shape) > INT32_MAX:
        raise ValueError(
            f"block_table: expected shape [b, max_blocks], both below 2**31, got {list(table.shape)}"
        )
    b, table_width = table.shape
    (table_step,) = row_strides("block_table", table)
    requests: dict[str, ArrayView | None] = {
        "cache_seqlens": inspect(cache_seqlens, "cache_seqlens"),
        "workspace_starts": inspect(workspace_starts, "workspace_starts"),
        "seq_starts": None if seq_starts is None else inspect(seq_starts, "seq_starts"),
    }
    workspace = inspect(out, "out")
    out_step = _workspace_stride(workspace, d_qk)
    for name, view in (*requests.items(), ("block_table", table), ("out", workspace)):
        if view is None:
            continue
        if name in requests:
            check_vector(name, view, ("int32",), b, "the b of block_table")
        same_place(name, view, source, "kv_cache")
    pointers: dict[str, Any] = {name: 0 if view is None else view.ptr for name, view in requests.items()}
    if b and workspace.shape[0]:
        mla_cache_gather.launch(
            given.format,
            True,
            **launch_place(source),
            cache=given.ptr,
            block_table=table.ptr,
            **pointers,
            out=workspace.ptr,
            table_stride=table_step,
            out_stride=out_step,
            block_stride=given.block_stride,
            token_stride=given.token_stride,
            b=b,
            table_width=table_width,
            num_blocks=given.num_blocks,
            rows=workspace.shape[0],
            page_block_size=given.page_block_size,
        )


def _quantized_format(layout: Any) -> CacheFormat:
    if not isinstance(layout, str):
        raise TypeError(f"layout: expected 'v32' or 'model1', got {type(layout).__name__}")
    if layout not in QUANTIZED:
        raise ValueError(f"layout: expected 'v32' or 'model1', got {layout!r}")
    return QUANTIZED[layout]


def _paged_cache(name: str, view: ArrayView, format: CacheFormat | None = None) -> PagedCache:
    """Check a cache of a quantised format, or of any, that is written or read token by token."""
    cache = check_paged_cache(name, view, CACHE_FORMATS if format is None else (format,))
    check_no_overlap(name, view.shape, view.strides)
    _check_size(name, view, max(cache.block_stride, cache.token_stride))
    return cache


def _check_cache_shape(
    name: str, view: ArrayView, columns: int, num_blocks: int | None = None, page: int | None = None
) -> None:
    """Check `[num_blocks, page_block_size, 1, columns]`, the first two as given or free."""
    shape = view.shape
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
    _check_size(name, view, 0)


def _check_size(name: str, view: ArrayView, stride_bytes: int) -> None:
    """Slots and strides are 32-bit integers on the device."""
    slots = view.shape[0] * view.shape[1]
    if slots > INT32_MAX or stride_bytes > INT32_MAX:
        raise ValueError(
            f"{name}: expected at most {INT32_MAX} tokens and blocks less than 2 GiB apart, got shape "
            f"{list(view.shape)}, strides {list(view.strides)} (elements)"
        )


def _check_int32_strides(name: str, view: ArrayView) -> None:
    if any(abs(stride) > INT32_MAX for stride in row_strides(name, view)):
        raise ValueError(f"{name}: expected strides below 2**31, got strides {list(view.strides)} (elements)")


def _rows_are_aligned(view: ArrayView, *strides: int) -> bool:
    """Whether every row of a bfloat16 array begins at a multiple of 16 bytes."""
    return not view.ptr % 16 and not any(stride % 8 for stride in strides)


def _workspace_stride(out: ArrayView, d_qk: int) -> int:
    """Check the workspace; returns its row stride in elements."""
    if out.dtype != "bfloat16":
        raise TypeError(f"out: expected dtype bfloat16, got {out.dtype}")
    if len(out.shape) != 2 or out.shape[1] != d_qk or out.shape[0] > INT32_MAX:
        raise ValueError(
            f"out: expected shape [rows, {d_qk}] with rows below 2**31, for this cache, got {list(out.shape)}"
        )
    (stride,) = row_strides("out", out)
    check_no_overlap("out", out.shape, out.strides)
    if not _rows_are_aligned(out, stride):
        raise ValueError(
            "out: expected a 16-byte aligned address and a row stride that is a multiple of 8, got address "
            f"{out.ptr:#x}, strides {list(out.strides)} (elements)"
        )
    return stride
