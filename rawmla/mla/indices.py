"""From token positions within requests, as an indexer selects them, to slots in a paged cache."""

from __future__ import annotations

from typing import Any

from ..call.arrays import ArrayView, inspect
from ..call.checks import (
    INT32_MAX,
    as_count,
    check_no_overlap,
    check_vector,
    launch_place,
    row_strides,
    same_place,
)
from ..kernels import mla_convert_indices
from ..kernels.common import MAX_TOPK

__all__ = ["convert"]


def convert(
    indices: Any, block_table: Any, page_block_size: int, request_ids: Any, compact: bool, out: Any
) -> Any:
    """Run `rawmla.convert_indices`; ``compact`` is checked already."""
    page = as_count("page_block_size", page_block_size)
    if page > INT32_MAX:
        raise ValueError(f"page_block_size: expected less than 2**31, got {page}")
    positions = _int32("indices", indices)
    if len(positions.shape) not in (2, 3):
        raise ValueError(f"indices: expected shape [T, topk] or [b, s_q, topk], got {list(positions.shape)}")
    *row_shape, topk = positions.shape
    n, s_q = row_shape[0], row_shape[1] if len(row_shape) == 2 else 1
    if n * s_q > INT32_MAX or topk > MAX_TOPK:
        raise ValueError(
            f"indices: expected less than 2**31 rows and 2**30 columns, got {list(positions.shape)}"
        )
    table = _int32("block_table", block_table)
    if len(table.shape) != 2 or request_ids is None and table.shape[0] < n or max(table.shape) > INT32_MAX:
        needed = "num_requests" if request_ids is not None else f"at least {n}"
        raise ValueError(
            f"block_table: expected shape [{needed}, max_blocks], both below 2**31, got {list(table.shape)}"
        )
    same_place("block_table", table, positions, "indices")
    ids = 0
    if request_ids is not None:
        view = inspect(request_ids, "request_ids")
        check_vector("request_ids", view, ("int32",), n, "the length of indices")
        same_place("request_ids", view, positions, "indices")
        ids = view.ptr
    position_strides = row_strides("indices", positions)
    (table_stride,) = row_strides("block_table", table)

    framework, device = positions.framework, positions.device
    if out is None:
        out = framework.empty(tuple(positions.shape), "int32", device)
        out_ptr, slot_strides = framework.pointer(out), (s_q * topk, topk)
    else:
        slots = _int32("out", out)
        if tuple(slots.shape) != tuple(positions.shape):
            raise ValueError(
                f"out: expected shape {list(positions.shape)}, the shape of indices, got {list(slots.shape)}"
            )
        same_place("out", slots, positions, "indices")
        given = row_strides("out", slots)
        check_no_overlap("out", slots.shape, slots.strides)
        out_ptr, slot_strides = slots.ptr, _two(given)
    counts = framework.empty(tuple(row_shape), "int32", device) if compact else None
    if n * s_q and topk:
        mla_convert_indices.launch(
            **launch_place(positions),
            indices=positions.ptr,
            block_table=table.ptr,
            request_ids=ids,
            out=out_ptr,
            counts=0 if counts is None else framework.pointer(counts),
            indices_strides=_two(position_strides),
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


def _int32(name: str, x: Any) -> ArrayView:
    view = inspect(x, name)
    if view.dtype != "int32":
        raise TypeError(f"{name}: expected dtype int32, got {view.dtype}")
    return view


def _two(strides: tuple[int, ...]) -> tuple[int, int]:
    """Extend the row strides of `[n, topk]` to `[n, s_q, topk]`, where s_q is 1."""
    return strides[0], strides[1] if len(strides) == 2 else 0
