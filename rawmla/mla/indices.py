"""From token positions within requests, as an indexer selects them, to slots in a paged cache."""

from __future__ import annotations

from typing import Any

from ..call import tracing
from ..call.arrays import ArrayView, inspect
from ..call.checks import (
    INT32_MAX,
    as_bool,
    as_count,
    check_no_overlap,
    check_vector,
    launch_place,
    row_strides,
    same_place,
)
from ..kernels import mla_convert_indices
from ..kernels.common import MAX_TOPK
from .traced import operators

__all__ = ["convert_indices"]


def convert_indices(
    indices: Any,
    block_table: Any,
    page_block_size: int,
    *,
    request_ids: Any = None,
    compact: bool = False,
    out: Any = None,
) -> Any:
    """Slots in a paged cache of token positions within requests: what sparse decoding takes as `indices`.

    The slot of a position is `block_table[request, position // page_block_size] * page_block_size +
    position % page_block_size`. It is -1 where the position is negative, its page is not in the table or
    negative there, the slot is above the largest int32, or there is no such request.

    Parameters
    ----------
    indices : array
        int32 `[T, topk]` or `[b, s_q, topk]`, token positions. Last dimension contiguous, other strides
        free, so rows may be longer than topk.
    block_table : array
        int32 `[num_requests, max_blocks]`, last dimension contiguous, row stride free: page ids of each
        request.
    page_block_size : int
        Tokens per page, 1 and up.
    request_ids : array, optional
        int32, contiguous, of the length of `indices`: the request that `indices[i]` belongs to. None:
        request i.
    compact : bool
        Move the valid slots of a row to its front, in their order, -1 behind them, and return their number.
    out : array, optional
        int32 of the shape of `indices`, last dimension contiguous, rows that do not overlap. May be
        `indices`.

    Returns
    -------
    slots : array
        `out`, or a new contiguous int32 array of the shape of `indices` in its framework.
    counts : array
        With `compact` only: int32 `[T]` or `[b, s_q]`, valid slots per row. For `[T, topk]`, and for s_q 1,
        this is the `topk_length` of sparse attention.

    Raises
    ------
    TypeError, ValueError
        An argument is of the wrong kind, dtype, shape, stride or device; raised before anything is launched.
    RawMLAError
        A subclass says what is missing: GPU, driver, NVRTC, a compiled kernel inside a graph capture.

    Notes
    -----
    Allocates the results with the framework of `indices` and enqueues one kernel on its current stream; never
    synchronises; legal inside a CUDA-graph capture once `rawmla.warmup(sparse_formats=[...])` has loaded the
    kernel. Positions past a request's length give slots of whatever stands in its table there.
    """
    compact = as_bool("compact", compact)
    if tracing.is_traced(indices):
        return operators().convert_indices(indices, block_table, page_block_size, request_ids, compact, out)
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
                f"out: expected shape {list(positions.shape)}, that of indices, got {list(slots.shape)}"
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
    """Row strides of `[n, s_q, topk]`, s_q being 1 where it is not there."""
    return strides[0], strides[1] if len(strides) == 2 else 0
