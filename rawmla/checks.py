"""Validation of the arguments of decoding: everything that the host can see without a synchronise.

Errors read "`name`: expected X, got Y". `TypeError` is for the wrong kind or dtype, `ValueError` for a
shape, stride, range or combination. The functions called on every decode (`dense_sizes`, `plan_rows`,
`check_config`) are flat integer compares: text is put together only where something failed.
"""

from __future__ import annotations

from operator import index
from typing import Any

import numpy as np

from .arrays import Fields, Framework

D_V = 512
"""Value columns: the first 512 of a cache row."""

D_QK = (512, 576)
PLAN_COLUMNS = 8
FLOAT32_MAX = 3.4028234663852886e38

_CONFIG_FIELDS = (
    "b",
    "s_q",
    "h_q",
    "page_block_size",
    "h_k",
    "causal",
    "is_fp8_kvcache",
    "topk",
    "extra_page_block_size",
    "extra_topk",
    "enable_batch_invariant",
)


def as_bool(name: str, value: Any) -> bool:
    """`value` if it is a bool (Python's or NumPy's)."""
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise TypeError(f"{name}: expected a bool, got {_show(value)}")


def as_count(name: str, value: Any) -> int:
    """`value` as an int of at least 1."""
    count = _as_int(name, value)
    if count < 1:
        raise ValueError(f"{name}: expected an int of at least 1, got {count}")
    return count


def check_head_dim_v(head_dim_v: Any) -> None:
    """`head_dim_v` must be 512."""
    if _as_int("head_dim_v", head_dim_v) != D_V:
        raise ValueError(f"head_dim_v: expected {D_V}, got {head_dim_v}")


def as_softmax_scale(softmax_scale: Any) -> float:
    """`softmax_scale` as a positive float within float32. Arrays are refused: reading one synchronises."""
    if softmax_scale.__class__ is float and 0.0 < softmax_scale <= FLOAT32_MAX:
        return softmax_scale
    if isinstance(softmax_scale, (bool, np.bool_)) or not isinstance(
        softmax_scale, (int, float, np.integer, np.floating)
    ):
        raise TypeError(f"softmax_scale: expected a float or None, got {_show(softmax_scale)}")
    scale = float(softmax_scale)
    if not 0.0 < scale <= FLOAT32_MAX:
        raise ValueError(f"softmax_scale: expected a finite float32 greater than 0, got {scale}")
    return scale


def refuse_sparse(is_fp8_kvcache: Any, **arrays: Any) -> None:
    """Raise for the arguments of sparse decoding that were given; return if none was."""
    given = [name for name, value in arrays.items() if value is not None]
    if as_bool("is_fp8_kvcache", is_fp8_kvcache):
        given.insert(0, "is_fp8_kvcache=True")
    if given:
        raise NotImplementedError(
            f"{', '.join(given)}: comes with sparse decoding, which this version does not have yet; "
            "expected is_fp8_kvcache=False and None for indices, attn_sink, topk, topk_length and extra_*"
        )


def dense_sizes(q: Fields, k_cache: Fields) -> tuple[int, int, int, int, int, int, int]:
    """Check q and the cache of a dense decode against each other.

    Returns
    -------
    tuple of int
        (b, s_q, h_q, d_qk, num_blocks, page_block_size, h_kv).
    """
    _, shape, strides, dtype, device, framework, _ = q
    if dtype != "bfloat16" and dtype != "float16":
        raise TypeError(f"q: expected dtype bfloat16 or float16, got {dtype}")
    if len(shape) != 4:
        raise ValueError(f"q: expected shape [b, s_q, h_q, d_qk], got {list(shape)}")
    b, s_q, h_q, d_qk = shape
    if d_qk != 576 and d_qk != 512:
        raise ValueError(f"q: expected a last dimension (d_qk) of 576 or 512, got shape {list(shape)}")
    if strides[3] != 1:
        raise ValueError(f"q: expected a contiguous last dimension, got strides {list(strides)} (elements)")

    _, shape, strides, k_dtype, k_device, k_framework, _ = k_cache
    if k_dtype != dtype:
        raise TypeError(f"k_cache: expected dtype {dtype}, that of q, got {k_dtype}")
    if len(shape) != 4:
        raise ValueError(
            f"k_cache: expected shape [num_blocks, page_block_size, h_kv, d_qk], got {list(shape)}"
        )
    num_blocks, page_block_size, h_kv, k_dim = shape
    if k_dim != d_qk:
        raise ValueError(f"k_cache: expected a last dimension of {d_qk}, that of q, got shape {list(shape)}")
    if page_block_size & 63 and page_block_size != 16 and page_block_size != 32 or not page_block_size:
        raise ValueError(
            "k_cache: expected a page_block_size of 16, 32 or a multiple of 64, got "
            f"{page_block_size} in shape {list(shape)}"
        )
    if not num_blocks:
        raise ValueError(f"k_cache: expected at least 1 block, got shape {list(shape)}")
    if not h_kv or not h_q or h_q % h_kv:
        raise ValueError(
            f"q: expected h_q to be a positive multiple of the h_kv of k_cache, got h_q {h_q} and h_kv {h_kv}"
        )
    if strides[3] != 1:
        raise ValueError(
            f"k_cache: expected a contiguous last dimension, got strides {list(strides)} (elements)"
        )

    if k_device != device or k_framework is not framework:
        check_place("k_cache", k_cache, device, framework, "q")
    return b, s_q, h_q, d_qk, num_blocks, page_block_size, h_kv


def table_width(block_table: Fields, b: int, device: int, framework: Framework) -> int:
    """Check the block table of `b` requests; returns its number of columns."""
    _, shape, strides, dtype, _, _, _ = block_table
    if dtype != "int32":
        raise TypeError(f"block_table: expected dtype int32, got {dtype}")
    if len(shape) != 2 or shape[0] != b:
        raise ValueError(f"block_table: expected shape [{b}, max_blocks] (b is that of q), got {list(shape)}")
    if strides[1] != 1 and shape[1] > 1:
        raise ValueError(
            f"block_table: expected a contiguous last dimension, got strides {list(strides)} (elements)"
        )
    check_place("block_table", block_table, device, framework, "q")
    return shape[1]


def check_lengths(cache_seqlens: Fields, b: int, device: int, framework: Framework) -> None:
    """Check the lengths of `b` requests."""
    _, shape, strides, dtype, _, _, _ = cache_seqlens
    if dtype != "int32":
        raise TypeError(f"cache_seqlens: expected dtype int32, got {dtype}")
    if len(shape) != 1 or shape[0] != b:
        raise ValueError(f"cache_seqlens: expected shape [{b}] (b is that of q), got {list(shape)}")
    if strides[0] != 1 and b > 1:
        raise ValueError(f"cache_seqlens: expected a contiguous array, got stride {strides[0]} (elements)")
    check_place("cache_seqlens", cache_seqlens, device, framework, "q")


def check_place(name: str, view: Fields, device: int, framework: Framework, reference: str) -> None:
    """Check that `view` is on `device` and, if it is of another framework, that both share a stream.

    Work on the same stream is ordered; anything else could read memory that is still being written.
    """
    _, _, _, _, given_device, given_framework, _ = view
    if given_device != device:
        raise ValueError(
            f"{name}: expected an array on device cuda:{device}, that of {reference}, got cuda:{given_device}"
        )
    if given_framework is framework:
        return
    stream, given_stream = framework.current_stream(device), given_framework.current_stream(device)
    if given_stream != stream:
        raise ValueError(
            f"{name}: expected a {framework.name} array, as {reference} is, or one of a framework with "
            f"the same current stream ({stream:#x}), got a {given_framework.name} array with stream "
            f"{given_stream:#x}"
        )


def usable_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """`strides`, with contiguous ones for dimensions of size 1, which are never stepped over."""
    usable = list(strides)
    inner = 1
    for axis in range(len(shape) - 1, -1, -1):
        if shape[axis] <= 1:
            usable[axis] = inner
        inner = usable[axis] * shape[axis]
    return tuple(usable)


def strides_fit(ptr: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether 16-byte copies can walk the array: base and steps multiples of 16 bytes, steps positive."""
    steps = [stride for extent, stride in zip(shape[:-1], strides[:-1], strict=True) if extent > 1]
    return not ptr & 15 and all(step > 0 and not step & 7 for step in steps)


def k_cache_strides(k_cache: Fields) -> tuple[int, ...]:
    """Strides for TMA where the given ones do not fit as they are: a dimension of size 1 may have any."""
    ptr, shape, strides, _, _, _, _ = k_cache
    usable = usable_strides(shape, strides)
    if not strides_fit(ptr, shape, usable):
        raise ValueError(
            "k_cache: expected a 16-byte aligned address and strides that are positive multiples of 8 "
            f"elements (TMA), got address {ptr:#x}, shape {list(shape)}, strides {list(strides)} (elements)"
        )
    return usable


def out_strides(out: Fields, q: Fields) -> tuple[int, ...]:
    """Check `out` against q; returns its strides in elements."""
    ptr, shape, strides, dtype, _, _, _ = out
    _, (b, s_q, h_q, _), _, q_dtype, device, framework, _ = q
    if dtype != q_dtype:
        raise TypeError(f"out: expected dtype {q_dtype}, that of q, got {dtype}")
    if tuple(shape) != (b, s_q, h_q, D_V):
        raise ValueError(f"out: expected shape {[b, s_q, h_q, D_V]}, got {list(shape)}")
    check_place("out", out, device, framework, "q")
    step_b, step_s, step_h, step = strides
    if (
        step == 1
        and step_h >= D_V
        and step_s >= h_q * step_h
        and step_b >= s_q * step_s
        and not (ptr & 15 or (step_h | step_s | step_b) & 7)
    ):
        return strides  # the usual order of dimensions, contiguous or a slice
    usable = usable_strides(shape, strides)
    if usable[3] != 1 or not strides_fit(ptr, shape, usable):
        raise ValueError(
            "out: expected a 16-byte aligned address, a contiguous last dimension and other strides that are "
            f"positive multiples of 8, got address {ptr:#x}, strides {list(strides)} (elements)"
        )
    reach = 0  # elements from the first to the last one of the dimensions seen so far, smallest stride first
    for stride, extent in sorted(zip(usable, shape, strict=True)):
        if extent > 1:
            if stride <= reach:
                raise ValueError(
                    "out: expected an array whose elements do not overlap, got "
                    f"shape {list(shape)}, strides {list(strides)} (elements)"
                )
            reach += stride * (extent - 1)
    return usable


def plan_rows(
    tiles: Fields,
    splits: Fields,
    b: int,
    device: int,
    framework: Framework,
    reference: str,
    names: tuple[str, str] = ("tile_scheduler_metadata", "num_splits"),
) -> int:
    """Check the two arrays of a plan for `b` requests; returns the number of rows."""
    ptr, shape, strides, dtype, _, _, _ = tiles
    if dtype != "int32":
        raise TypeError(f"{names[0]}: expected dtype int32, got {dtype}")
    if len(shape) != 2 or shape[1] != PLAN_COLUMNS or not shape[0]:
        raise ValueError(f"{names[0]}: expected shape [num_sm_parts, {PLAN_COLUMNS}], got {list(shape)}")
    if strides[1] != 1 or strides[0] != PLAN_COLUMNS and shape[0] > 1 or ptr & 15:
        raise ValueError(
            f"{names[0]}: expected a contiguous array at a 16-byte aligned address, got strides "
            f"{list(strides)} (elements), address {ptr:#x}"
        )
    rows = shape[0]
    _, shape, strides, dtype, _, _, _ = splits
    if dtype != "int32":
        raise TypeError(f"{names[1]}: expected dtype int32, got {dtype}")
    if len(shape) != 1 or shape[0] <= b:
        raise ValueError(f"{names[1]}: expected shape [n] with n >= b + 1 = {b + 1}, got {list(shape)}")
    if strides[0] != 1 and b > 0:
        raise ValueError(f"{names[1]}: expected a contiguous array, got stride {strides[0]} (elements)")
    check_place(names[0], tiles, device, framework, reference)
    check_place(names[1], splits, device, framework, reference)
    return rows


def check_config(
    config: Any,
    b: int,
    s_q: int,
    h_q: int,
    page_block_size: int,
    h_k: int,
    causal: bool,
    enable_batch_invariant: bool,
) -> None:
    """The call must be the one that `config`, of a filled `FlashMLASchedMeta`, was made for."""
    if (
        config is None
        or config.b != b
        or config.s_q != s_q
        or config.h_q != h_q
        or config.page_block_size != page_block_size
        or config.h_k != h_k
        or config.causal != causal
        or config.is_fp8_kvcache
        or config.topk is not None
        or config.extra_page_block_size is not None
        or config.extra_topk is not None
        or getattr(config, "enable_batch_invariant", False) != enable_batch_invariant
    ):
        if config is None:
            raise ValueError(
                "tile_scheduler_metadata: expected a FlashMLASchedMeta with a config once have_initialized "
                "is True, got config None"
            )
        call = (b, s_q, h_q, page_block_size, h_k, causal, False, None, None, None, enable_batch_invariant)
        for field, wanted in zip(_CONFIG_FIELDS, call, strict=True):
            planned = getattr(config, field, False)
            if planned != wanted:
                raise ValueError(
                    f"tile_scheduler_metadata: expected a plan for {field} = {wanted}, that of this "
                    f"call, got a FlashMLASchedMeta filled for {field} = {planned}; take one from "
                    "get_mla_metadata() for each configuration"
                )


def _as_int(name: str, value: Any) -> int:
    if not isinstance(value, (bool, np.bool_)) and isinstance(value, (int, np.integer)):
        return index(value)
    raise TypeError(f"{name}: expected an int, got {_show(value)}")


def _show(value: Any) -> str:
    """A value's type, and the value where it is short."""
    if isinstance(value, (int, float, str, np.generic)):
        return f"{type(value).__name__} {value!r}"
    return "None" if value is None else type(value).__name__
