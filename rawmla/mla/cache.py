"""Paged caches around decoding: quantising, writing new tokens, reading them back."""

from __future__ import annotations

from typing import Any

from ..call.arguments import (
    Arg,
    Sizes,
    check_arguments,
    check_dtype,
    check_once,
    check_places,
    check_shape,
    row_strides,
)
from ..call.arrays import ArrayView, inspect
from ..call.checks import INT32_MAX, check_no_overlap, launch_place
from ..errors import MissingDependencyError
from ..kernels import mla_cache_gather, mla_cache_write
from ..kernels.mla_cache_rows import CACHE_FORMATS, QUANTIZED, CacheFormat, padded_block_bytes
from .arguments import PagedCache, check_paged_cache

_WRITE_TABLE = (
    Arg("kv_c", "bfloat16", "T d_nope", has_rows=True),
    Arg("k_pe", "bfloat16", "T d_rope", has_rows=True),
    Arg("slot_mapping", "int32 int64", "T", has_rows=True),
)
_GATHER_TABLE = (
    Arg("block_table", "int32", "b max_blocks", has_rows=True),
    Arg("cache_seqlens", "int32", "b", has_rows=True),
    Arg("workspace_starts", "int32", "b", has_rows=True),
    Arg("seq_starts", "int32", "b", has_rows=True),
    Arg("out", "bfloat16", "rows d_qk", has_rows=True),
)
_NO_REQUESTS: dict[str, Any] = dict.fromkeys(
    ("block_table", "cache_seqlens", "workspace_starts", "seq_starts", "table_stride", "b", "table_width"), 0
)
"""Parameters about requests, for a cache that is read in order."""


def quantize(k_cache: Any, layout: str, out: Any) -> Any:
    """Run `rawmla.quantize_k_cache`."""
    format = _quantized_format(layout)
    source = inspect(k_cache, "k_cache")
    target = None if out is None else inspect(out, "out")
    views = {"k_cache": source, "out": target}
    block_step, token_step, are_aligned, block_stride = check_once(_check_quantize, views, format)
    num_blocks, page = source.shape[:2]
    if target is None:
        padded = padded_block_bytes(format, page)
        if padded > INT32_MAX:
            raise ValueError(
                f"k_cache: expected pages of less than 2 GiB in {layout!r}, got page_block_size {page}"
            )
        blocks = source.framework.empty((num_blocks, padded), "uint8", source.device)
        out = blocks[:, : page * format.token_bytes].reshape(num_blocks, page, 1, format.token_bytes)
        ptr, block_stride = source.framework.pointer(blocks), padded
    else:
        ptr = target.ptr
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
            sources_are_aligned=are_aligned,
        )
    return out


def _check_quantize(views: dict[str, Any], format: CacheFormat) -> tuple[int, int, bool, int]:
    """Find the strides of blocks and tokens of k_cache, whether rows are aligned, and the stride of out."""
    source, target = views.values()
    sizes = Sizes()
    check_dtype("k_cache", source, "bfloat16")
    check_shape("k_cache", source, f"num_blocks page_block_size 1 {format.d_qk}", sizes)
    if not sizes["page_block_size"]:
        raise ValueError(f"k_cache: expected page_block_size at least 1, got shape {list(source.shape)}")
    _check_size("k_cache", source, 0)
    block_step, token_step, _ = _int32_strides("k_cache", source)
    block_stride = 0
    if target is not None:
        block_stride = _paged_cache("out", target, format).block_stride
        check_shape("out", target, f"num_blocks page_block_size 1 {format.token_bytes}", sizes)
    check_places(views)
    return block_step, token_step, _rows_are_aligned(source, block_step, token_step), block_stride


def dequantize(cache: Any, layout: str) -> Any:
    """Run `rawmla.dequantize_k_cache`."""
    format = _quantized_format(layout)
    source = inspect(cache, "cache")
    given = check_once(_check_cache, {"cache": source}, format)
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
            cache=source.ptr,
            out=source.framework.pointer(out),
            out_stride=format.d_qk,
            block_stride=given.block_stride,
            token_stride=given.token_stride,
            num_blocks=given.num_blocks,
            rows=rows,
            page_block_size=given.page_block_size,
            **_NO_REQUESTS,
        )
    return out


def write(kv_c: Any, k_pe: Any, kv_cache: Any, slot_mapping: Any) -> None:
    """Run `rawmla.write_kv_cache`."""
    target = inspect(kv_cache, "kv_cache")
    nope, rope, slots = inspect(kv_c, "kv_c"), inspect(k_pe, "k_pe"), inspect(slot_mapping, "slot_mapping")
    views = {"kv_cache": target, "kv_c": nope, "k_pe": rope, "slot_mapping": slots}
    given, nope_step, rope_step, are_aligned = check_once(_check_write, views)
    tokens = nope.shape[0]
    if tokens:
        mla_cache_write.launch(
            given.format,
            **launch_place(target),
            kv_c=nope.ptr,
            k_pe=rope.ptr,
            slots=slots.ptr,
            slots_are_64bit=slots.dtype == "int64",
            cache=target.ptr,
            kv_c_stride=nope_step,
            k_pe_stride=rope_step,
            source_block_stride=0,
            block_stride=given.block_stride,
            token_stride=given.token_stride,
            num_slots=given.num_blocks * given.page_block_size,
            tokens=tokens,
            page_block_size=given.page_block_size,
            sources_are_aligned=are_aligned,
        )


def _check_write(views: dict[str, Any]) -> tuple[PagedCache, int, int, bool]:
    """Find the cache, the strides of kv_c and k_pe, and whether their rows are aligned."""
    target, nope, rope, _ = views.values()
    given = _paged_cache("kv_cache", target)
    format = given.format
    sizes = Sizes(d_rope=format.d_qk - format.d_nope)
    of_cache = f" for a cache of {target.dtype} with last dimension {target.shape[3]}"
    check_shape("kv_c", nope, f"T {format.d_nope}", sizes, of_cache)
    check_arguments(_WRITE_TABLE, views, sizes)
    check_places(views)
    (nope_step,), (rope_step,) = _int32_strides("kv_c", nope), _int32_strides("k_pe", rope)
    if sizes["T"] > INT32_MAX:
        raise ValueError(f"kv_c: expected at most {INT32_MAX} tokens, got {sizes['T']}")
    are_aligned = _rows_are_aligned(nope, nope_step) and _rows_are_aligned(rope, rope_step)
    return given, nope_step, rope_step, are_aligned


def gather(
    kv_cache: Any, block_table: Any, cache_seqlens: Any, out: Any, workspace_starts: Any, seq_starts: Any
) -> None:
    """Run `rawmla.gather_kv_cache`."""
    source = inspect(kv_cache, "kv_cache")
    table, workspace = inspect(block_table, "block_table"), inspect(out, "out")
    requests = {
        "cache_seqlens": inspect(cache_seqlens, "cache_seqlens"),
        "workspace_starts": inspect(workspace_starts, "workspace_starts"),
        "seq_starts": None if seq_starts is None else inspect(seq_starts, "seq_starts"),
    }
    views = {"kv_cache": source, "block_table": table, **requests, "out": workspace}
    given, table_step, out_step = check_once(_check_gather, views)
    b, table_width = table.shape
    pointers: dict[str, Any] = {name: 0 if view is None else view.ptr for name, view in requests.items()}
    if b and workspace.shape[0]:
        mla_cache_gather.launch(
            given.format,
            True,
            **launch_place(source),
            cache=source.ptr,
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


def _check_gather(views: dict[str, Any]) -> tuple[PagedCache, int, int]:
    """Find the cache, and the strides of block_table and out."""
    source, table, *_, workspace = views.values()
    given = _paged_cache("kv_cache", source)
    check_arguments(_GATHER_TABLE, views, Sizes(d_qk=given.format.d_qk))
    check_places(views)
    if max(table.shape) > INT32_MAX:
        raise ValueError(
            f"block_table: expected shape [b, max_blocks], both below 2**31, got {list(table.shape)}"
        )
    (table_step,) = row_strides("block_table", table)
    if workspace.shape[0] > INT32_MAX:
        raise ValueError(f"out: expected less than 2**31 rows, got shape {list(workspace.shape)}")
    (out_step,) = row_strides("out", workspace)
    check_no_overlap("out", workspace.shape, workspace.strides)
    if not _rows_are_aligned(workspace, out_step):
        raise ValueError(
            "out: expected a 16-byte aligned address and a row stride that is a multiple of 8, got address "
            f"{workspace.ptr:#x}, strides {list(workspace.strides)} (elements)"
        )
    return given, table_step, out_step


def _quantized_format(layout: Any) -> CacheFormat:
    if not isinstance(layout, str):
        raise TypeError(f"layout: expected 'v32' or 'model1', got {type(layout).__name__}")
    if layout not in QUANTIZED:
        raise ValueError(f"layout: expected 'v32' or 'model1', got {layout!r}")
    return QUANTIZED[layout]


def _check_cache(views: dict[str, Any], format: CacheFormat) -> PagedCache:
    ((name, view),) = views.items()
    return _paged_cache(name, view, format)


def _paged_cache(name: str, view: ArrayView, format: CacheFormat | None = None) -> PagedCache:
    """Check a cache of a quantised format, or of any, that is written or read token by token."""
    cache = check_paged_cache(name, view, CACHE_FORMATS if format is None else (format,))
    check_no_overlap(name, view.shape, view.strides)
    _check_size(name, view, max(cache.block_stride, cache.token_stride))
    return cache


def _check_size(name: str, view: ArrayView, stride_bytes: int) -> None:
    """Slots and strides are 32-bit integers on the device."""
    slots = view.shape[0] * view.shape[1]
    if slots > INT32_MAX or stride_bytes > INT32_MAX:
        raise ValueError(
            f"{name}: expected at most {INT32_MAX} tokens and blocks less than 2 GiB apart, got shape "
            f"{list(view.shape)}, strides {list(view.strides)} (elements)"
        )


def _int32_strides(name: str, view: ArrayView) -> tuple[int, ...]:
    """Check that strides are 32-bit integers; returns them but the last."""
    strides = row_strides(name, view)
    if any(abs(stride) > INT32_MAX for stride in strides):
        raise ValueError(f"{name}: expected strides below 2**31, got strides {list(view.strides)} (elements)")
    return strides


def _rows_are_aligned(view: ArrayView, *strides: int) -> bool:
    """Whether every row of a bfloat16 array begins at a multiple of 16 bytes."""
    return not view.ptr % 16 and not any(stride % 8 for stride in strides)
