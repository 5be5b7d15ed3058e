"""From token positions within requests, as an indexer selects them, to slots in a paged cache."""

from __future__ import annotations

from math import prod
from typing import Any

from ..call.arguments import Arg, check_arguments, check_once, check_places, row_strides
from ..call.arrays import inspect
from ..call.checks import INT32_MAX, as_count, check_no_overlap, launch_place
from ..kernels import mla_convert_indices
from ..kernels.common import MAX_TOPK


def _table(dims: str) -> tuple[Arg, ...]:
    return (
        Arg("indices", "int32", dims, has_rows=True),
        Arg("block_table", "int32", "num_requests max_blocks", has_rows=True),
        Arg("request_ids", "int32", dims.split()[0], has_rows=True),
        Arg("out", "int32", dims, has_rows=True),
    )


_TABLES = {2: _table("T topk"), 3: _table("b s_q topk")}
"""The arrays of a call, by how many dimensions indices has."""


def convert(
    indices: Any, block_table: Any, page_block_size: int, request_ids: Any, compact: bool, out: Any
) -> Any:
    """Run `rawmla.convert_indices`; ``compact`` is checked already."""
    page = as_count("page_block_size", page_block_size)
    if page > INT32_MAX:
        raise ValueError(f"page_block_size: expected less than 2**31, got {page}")
    positions, table = inspect(indices, "indices"), inspect(block_table, "block_table")
    ids = None if request_ids is None else inspect(request_ids, "request_ids")
    target = None if out is None else inspect(out, "out")
    views = {"indices": positions, "block_table": table, "request_ids": ids, "out": target}
    position_strides, table_stride, slot_strides = check_once(_check, views)
    *row_shape, topk = positions.shape
    n, s_q = row_shape[0], row_shape[1] if len(row_shape) == 2 else 1
    framework, device = positions.framework, positions.device
    if target is None:
        out = framework.empty(tuple(positions.shape), "int32", device)
        out_ptr, slot_strides = framework.pointer(out), (s_q * topk, topk)
    else:
        out_ptr = target.ptr
    counts = framework.empty(tuple(row_shape), "int32", device) if compact else None
    if n * s_q and topk:
        mla_convert_indices.launch(
            **launch_place(positions),
            indices=positions.ptr,
            block_table=table.ptr,
            request_ids=0 if ids is None else ids.ptr,
            out=out_ptr,
            counts=0 if counts is None else framework.pointer(counts),
            indices_strides=position_strides,
            out_strides=slot_strides,
            table_stride=table_stride,
            rows=n * s_q,
            s_q=s_q,
            topk=topk,
            num_requests=table.shape[0],
            table_width=table.shape[1],
            page_block_size=page,
        )
    elif counts is not None:
        framework.fill(counts, 0)
    return out if counts is None else (out, counts)


def _check(views: dict[str, Any]) -> tuple[tuple[int, int], int, tuple[int, int]]:
    """Find the strides of rows of indices, block_table and out, if it is given."""
    positions, table, ids, target = views.values()
    shape = positions.shape
    if len(shape) not in _TABLES:
        raise ValueError(f"indices: expected shape [T, topk] or [b, s_q, topk], got {list(shape)}")
    check_arguments(_TABLES[len(shape)], views)
    check_places(views)
    if prod(shape[:-1]) > INT32_MAX or shape[-1] > MAX_TOPK:
        raise ValueError(f"indices: expected less than 2**31 rows and 2**30 columns, got {list(shape)}")
    if ids is None and table.shape[0] < shape[0] or max(table.shape) > INT32_MAX:
        needed = f"at least {shape[0]}" if ids is None else "num_requests"
        raise ValueError(
            f"block_table: expected shape [{needed}, max_blocks], both below 2**31, got {list(table.shape)}"
        )
    (table_stride,) = row_strides("block_table", table)
    slot_strides = (0, 0)
    if target is not None:
        check_no_overlap("out", target.shape, target.strides)
        slot_strides = _two(row_strides("out", target))
    return _two(row_strides("indices", positions)), table_stride, slot_strides


def _two(strides: tuple[int, ...]) -> tuple[int, int]:
    """Extend the row strides of `[n, topk]` to `[n, s_q, topk]`, where s_q is 1."""
    return strides[0], strides[1] if len(strides) == 2 else 0
