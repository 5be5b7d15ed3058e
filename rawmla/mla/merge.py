"""Attention over all keys from attention over disjoint parts of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..call.arguments import Arg, check_arguments, check_dtype, check_once, check_places, row_strides
from ..call.arrays import ArrayView, inspect
from ..call.checks import INT32_MAX, check_no_overlap, launch_place, usable_strides
from ..kernels import mla_merge_states
from ..kernels.common import D_V, ceil_div
from ..kernels.mla_merge_states import ITEM_BYTES, MAX_PARTS, State

_Dims = tuple[int, int, int]  # n, s, h
_DIMS = {4: (f"b s_q h_q {D_V}", "b h_q s_q"), 3: (f"s_q h_q {D_V}", "s_q h_q")}
"""The dimensions of an out and of its lse, by how many out has."""


def merge(outs: Sequence[Any], lses: Sequence[Any], out: Any) -> tuple[Any, Any]:
    """Run `rawmla.merge_attn_states`."""
    if not isinstance(outs, (list, tuple)) or not isinstance(lses, (list, tuple)):
        wrong, name = (lses, "lses") if isinstance(outs, (list, tuple)) else (outs, "outs")
        raise TypeError(f"{name}: expected a list or tuple of arrays, got {type(wrong).__name__}")
    if not outs or len(lses) != len(outs):
        raise ValueError(
            f"lses: expected at least 1, and as many as outs, got {len(lses)} lses and {len(outs)} outs"
        )
    out_views = {f"outs[{i}]": inspect(one, f"outs[{i}]") for i, one in enumerate(outs)}
    lse_views = {f"lses[{i}]": inspect(one, f"lses[{i}]") for i, one in enumerate(lses)}
    first = out_views["outs[0]"]
    if out is not None:
        out_views["out"] = inspect(out, "out")
    dims, out_strides, lse_strides = check_once(_check, {**out_views, **lse_views}, len(out_views))
    pointers = [view.ptr for view in out_views.values()]
    parts = [
        State(pointers[i], view.ptr, out_strides[i], lse_strides[i])
        for i, view in enumerate(lse_views.values())
    ]
    framework, device, dtype = first.framework, first.device, first.dtype
    lse_shape = tuple(lse_views["lses[0]"].shape)
    rows = dims[0] * dims[1] * dims[2]
    scratch_bytes = _scratch_states(len(parts)) * _state_bytes(rows)
    lse, scratch = framework.allocator([(lse_shape, "float32")], scratch_bytes, device)()
    scratch_ptr = 0 if scratch is None else framework.pointer(scratch)
    if out is None:
        out = framework.empty(tuple(first.shape), dtype, device)
        out_ptr = framework.pointer(out)
    else:
        out_ptr = pointers[-1]
    if not rows:
        return out, lse

    call = {**launch_place(first), **dict(zip("nsh", dims, strict=True))}
    parts, part_dtype = _merge_groups(parts, dtype, scratch_ptr, dims, call)
    _, s, h = dims
    result = State(
        out_ptr,
        framework.pointer(lse),
        out_strides[-1] if "out" in out_views else (s * h * D_V, h * D_V, D_V),
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


def _check(
    views: dict[str, ArrayView], count: int
) -> tuple[_Dims, list[tuple[int, int, int]], list[tuple[int, int, int]]]:
    """Check the outs, which are the first ``count`` arrays, and the lses; returns dimensions and strides."""
    first = views["outs[0]"]
    dims = _check_first(first)
    of_out, of_lse = _DIMS[len(first.shape)]
    outs, lses = [*views.items()][:count], [*views.items()][count:]
    table = [Arg(name, "=outs[0]", of_out, has_rows=True) for name, _ in outs]
    table += [Arg(name, "float32", of_lse) for name, _ in lses]
    check_arguments(table, views)
    check_places(views)
    out_strides = [_out_strides(name, view) for name, view in outs]
    if "out" in views:
        check_no_overlap("out", views["out"].shape, views["out"].strides)
    return dims, out_strides, [_lse_strides(view) for _, view in lses]


def _check_first(first: ArrayView) -> _Dims:
    """Check the first of the outs; returns (b, s_q, h_q), where b is 1 if there is no such dimension."""
    check_dtype("outs[0]", first, " ".join(ITEM_BYTES))
    if len(first.shape) not in _DIMS or first.shape[-1] != D_V:
        raise ValueError(
            f"outs[0]: expected shape [b, s_q, h_q, {D_V}] or [s_q, h_q, {D_V}], got {list(first.shape)}"
        )
    n, s, h = (1, *first.shape[:-1])[-3:]
    if n * s * h > INT32_MAX:
        raise ValueError(f"outs[0]: expected less than 2**31 rows, got shape {list(first.shape)}")
    return n, s, h


def _out_strides(name: str, view: ArrayView) -> tuple[int, int, int]:
    """Check the alignment of an out; returns its strides in elements, 0 for a b that it does not have."""
    strides = row_strides(name, view)
    if any(byte % 16 for byte in (view.ptr, *(stride * ITEM_BYTES[view.dtype] for stride in strides))):
        raise ValueError(
            f"{name}: expected an address and strides that are multiples of 16 bytes, got address "
            f"{view.ptr:#x}, strides {list(view.strides)} (elements)"
        )
    stride_n, stride_s, stride_h = (0, *strides)[-3:]
    return stride_n, stride_s, stride_h


def _lse_strides(view: ArrayView) -> tuple[int, int, int]:
    """The strides of an lse in the order of the dimensions of out."""
    strides = usable_strides(view.shape, view.strides)
    return (strides[0], strides[2], strides[1]) if len(strides) == 3 else (0, strides[0], strides[1])
