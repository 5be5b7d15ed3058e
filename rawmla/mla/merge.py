"""Attention over all keys from attention over disjoint parts of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..call.arrays import ArrayView, inspect
from ..call.checks import (
    INT32_MAX,
    check_no_overlap,
    launch_place,
    row_strides,
    same_place,
    usable_strides,
)
from ..kernels import mla_merge_states
from ..kernels.common import D_V, ceil_div
from ..kernels.mla_merge_states import ITEM_BYTES, MAX_PARTS, State

__all__ = ["merge"]

_Dims = tuple[int, int, int]  # n, s, h


def merge(outs: Sequence[Any], lses: Sequence[Any], out: Any) -> tuple[Any, Any]:
    """Run `rawmla.merge_attn_states`."""
    if not isinstance(outs, (list, tuple)) or not isinstance(lses, (list, tuple)):
        wrong, name = (lses, "lses") if isinstance(outs, (list, tuple)) else (outs, "outs")
        raise TypeError(f"{name}: expected a list or tuple of arrays, got {type(wrong).__name__}")
    if not outs or len(lses) != len(outs):
        raise ValueError(
            f"lses: expected at least 1, and as many as outs, got {len(lses)} lses and {len(outs)} outs"
        )
    first = inspect(outs[0], "outs[0]")
    dtype, dims = first.dtype, _dims(first)
    lse_shape = _lse_shape(first)
    parts = []
    for i, (one_out, one_lse) in enumerate(zip(outs, lses, strict=True)):
        view = inspect(one_out, f"outs[{i}]")
        strides = _out_strides(f"outs[{i}]", view, first)
        lse_view = inspect(one_lse, f"lses[{i}]")
        lse_strides = _lse_strides(f"lses[{i}]", lse_view, lse_shape, first)
        parts.append(State(view.ptr, lse_view.ptr, strides, lse_strides))

    framework, device = first.framework, first.device
    given_strides = None
    if out is not None:
        target = inspect(out, "out")
        given_strides = _out_strides("out", target, first)
        check_no_overlap("out", target.shape, target.strides)
        out_ptr = target.ptr
    rows = dims[0] * dims[1] * dims[2]
    scratch_bytes = _scratch_states(len(parts)) * _state_bytes(rows)
    lse, scratch = framework.allocator([(lse_shape, "float32")], scratch_bytes, device)()
    scratch_ptr = 0 if scratch is None else framework.pointer(scratch)
    if out is None:
        out = framework.empty(tuple(first.shape), dtype, device)
        out_ptr = framework.pointer(out)
    if not rows:
        return out, lse

    call = {**launch_place(first), **dict(zip("nsh", dims, strict=True))}
    parts, part_dtype = _merge_groups(parts, dtype, scratch_ptr, dims, call)
    _, s, h = dims
    result = State(
        out_ptr,
        framework.pointer(lse),
        given_strides or (s * h * D_V, h * D_V, D_V),
        (s * h, 1, s) if len(first.shape) == 4 else (s * h, h, 1),
    )
    mla_merge_states.launch(parts, result, part_dtype, dtype, **call)
    return out, lse


def _merge_groups(
    parts: list[State], dtype: str, scratch: int, dims: _Dims, call: dict[str, Any]
) -> tuple[list[State], str]:
    """Merge groups of parts into scratch until one launch can merge the rest.

    Returns the rest and its dtype.
    """
    n, s, h = dims
    while len(parts) > MAX_PARTS:
        merged = []
        for start in range(0, len(parts), MAX_PARTS):
            lse = scratch + n * s * h * D_V * 4
            state = State(scratch, lse, (s * h * D_V, h * D_V, D_V), (s * h, h, 1))
            mla_merge_states.launch(parts[start : start + MAX_PARTS], state, dtype, "float32", **call)
            merged.append(state)
            scratch += _state_bytes(n * s * h)
        parts, dtype = merged, "float32"
    return parts, dtype


def _state_bytes(rows: int) -> int:
    """Count the bytes of a float32 out and its lse, a multiple of 16."""
    return rows * D_V * 4 + ceil_div(rows, 4) * 16


def _scratch_states(parts: int) -> int:
    """Count the merged states that scratch holds."""
    states = 0
    while parts > MAX_PARTS:
        parts = ceil_div(parts, MAX_PARTS)
        states += parts
    return states


def _dims(first: ArrayView) -> _Dims:
    """Check the first of the outs; returns (b, s_q, h_q), where b is 1 if there is no such dimension."""
    if first.dtype not in ITEM_BYTES:
        raise TypeError(f"outs[0]: expected dtype {' or '.join(ITEM_BYTES)}, got {first.dtype}")
    if len(first.shape) not in (3, 4) or first.shape[-1] != D_V:
        raise ValueError(
            f"outs[0]: expected shape [b, s_q, h_q, {D_V}] or [s_q, h_q, {D_V}], got {list(first.shape)}"
        )
    n, s, h = (1, *first.shape[:-1])[-3:]
    if n * s * h > INT32_MAX:
        raise ValueError(f"outs[0]: expected less than 2**31 rows, got shape {list(first.shape)}")
    return n, s, h


def _lse_shape(out: ArrayView) -> tuple[int, ...]:
    if len(out.shape) == 4:
        return out.shape[0], out.shape[2], out.shape[1]
    return out.shape[0], out.shape[1]


def _out_strides(name: str, view: ArrayView, first: ArrayView) -> tuple[int, int, int]:
    """Check an out against the first one; returns its strides in elements."""
    if view.dtype != first.dtype:
        raise TypeError(f"{name}: expected dtype {first.dtype}, the dtype of outs[0], got {view.dtype}")
    if tuple(view.shape) != tuple(first.shape):
        raise ValueError(
            f"{name}: expected shape {list(first.shape)}, the shape of outs[0], got {list(view.shape)}"
        )
    same_place(name, view, first, "outs[0]")
    strides = row_strides(name, view)
    if any(byte % 16 for byte in (view.ptr, *(stride * ITEM_BYTES[view.dtype] for stride in strides))):
        raise ValueError(
            f"{name}: expected an address and strides that are multiples of 16 bytes, got address "
            f"{view.ptr:#x}, strides {list(view.strides)} (elements)"
        )
    stride_n, stride_s, stride_h = (0, *strides)[-3:]
    return stride_n, stride_s, stride_h


def _lse_strides(
    name: str, view: ArrayView, shape: tuple[int, ...], first: ArrayView
) -> tuple[int, int, int]:
    """Check an lse; returns its strides in the order of the dimensions of out."""
    if view.dtype != "float32":
        raise TypeError(f"{name}: expected dtype float32, got {view.dtype}")
    if tuple(view.shape) != shape:
        raise ValueError(
            f"{name}: expected shape {list(shape)} for outs of shape {list(first.shape)}, "
            f"got {list(view.shape)}"
        )
    same_place(name, view, first, "outs[0]")
    strides = usable_strides(view.shape, view.strides)
    return (strides[0], strides[2], strides[1]) if len(shape) == 3 else (0, strides[0], strides[1])
