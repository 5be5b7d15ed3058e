"""Validation of the arguments of decoding: everything that the host can see without a synchronise.

Errors read "`name`: expected X, got Y". `TypeError` is for the wrong kind or dtype, `ValueError` for a
shape, stride, range or combination. The functions that many decode calls go through (`dense_sizes`,
`plan_rows`, `check_config`) are flat integer compares: text is put together only where something failed.
"""

from __future__ import annotations

from math import log
from operator import index
from typing import Any, NamedTuple

import numpy as np

from ..call.arrays import Fields, Framework
from ..kernels.mla_cache_rows import QUANTIZED, CacheFormat
from ..kernels.mla_sparse import NO_CACHE, Cache

D_V = 512
"""Value columns: the first 512 of a cache row."""

D_QK = (512, 576)
PLAN_COLUMNS = 8
FLOAT32_MAX = 3.4028234663852886e38

_LOG_BASES = {"2": 1.0, "e": log(2.0)}

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


def check_head_dim_v(head_dim_v: Any, name: str = "head_dim_v") -> None:
    """`head_dim_v` must be 512."""
    if _as_int(name, head_dim_v) != D_V:
        raise ValueError(f"{name}: expected {D_V}, got {head_dim_v}")


def as_log_base(log_base: Any) -> float:
    """What numbers in base 2 are multiplied by to be in `log_base`, "2" or "e"."""
    if not isinstance(log_base, str):
        raise TypeError(f"log_base: expected a str, got {_show(log_base)}")
    factor = _LOG_BASES.get(log_base)
    if factor is None:
        raise ValueError(f"log_base: expected '2' or 'e', got {log_base!r}")
    return factor


def as_softmax_scale(
    softmax_scale: Any, name: str = "softmax_scale", wanted: str = "a float or None"
) -> float:
    """`softmax_scale` as a positive float within float32. Arrays are refused: reading one synchronises."""
    if softmax_scale.__class__ is float and 0.0 < softmax_scale <= FLOAT32_MAX:
        return softmax_scale
    if isinstance(softmax_scale, (bool, np.bool_)) or not isinstance(
        softmax_scale, (int, float, np.integer, np.floating)
    ):
        raise TypeError(f"{name}: expected {wanted}, got {_show(softmax_scale)}")
    scale = float(softmax_scale)
    if not 0.0 < scale <= FLOAT32_MAX:
        raise ValueError(f"{name}: expected a finite float32 greater than 0, got {scale}")
    return scale


def refuse_without_indices(is_fp8_kvcache: bool, **arrays: Any) -> None:
    """Raise for those arguments of sparse decoding that were given without `indices`."""
    given = [name for name, value in arrays.items() if value is not None]
    if given:
        raise ValueError(
            f"{', '.join(given)}: expected None without indices: of sparse decoding, got an array"
        )
    if is_fp8_kvcache:
        refuse_dense_fp8()


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
    check_vector("cache_seqlens", cache_seqlens, ("int32",), b, "b is that of q")
    check_place("cache_seqlens", cache_seqlens, device, framework, "q")


def check_vector(name: str, view: Fields, dtypes: tuple[str, ...], length: int, meaning: str) -> None:
    """Check a contiguous array of one dimension; `meaning` says where its length comes from."""
    _, shape, strides, dtype, _, _, _ = view
    if dtype not in dtypes:
        raise TypeError(f"{name}: expected dtype {' or '.join(dtypes)}, got {dtype}")
    if tuple(shape) != (length,):
        raise ValueError(f"{name}: expected shape [{length}] ({meaning}), got {list(shape)}")
    if length > 1 and strides[0] != 1:
        raise ValueError(f"{name}: expected a contiguous array, got stride {strides[0]} (elements)")


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
    """Check `out` against q, of decoding or of prefill; returns its strides in elements."""
    ptr, shape, strides, dtype, _, _, _ = out
    _, q_shape, _, q_dtype, device, framework, _ = q
    if dtype != q_dtype:
        raise TypeError(f"out: expected dtype {q_dtype}, that of q, got {dtype}")
    if tuple(shape) != (*q_shape[:-1], D_V):
        raise ValueError(f"out: expected shape {[*q_shape[:-1], D_V]}, got {list(shape)}")
    check_place("out", out, device, framework, "q")
    if len(shape) == 4:
        _, s_q, h_q, _ = shape
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
    if usable[-1] != 1 or not strides_fit(ptr, shape, usable):
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
                raise _other_config(field, wanted, planned)


def _as_int(name: str, value: Any) -> int:
    if not isinstance(value, (bool, np.bool_)) and isinstance(value, (int, np.integer)):
        return index(value)
    raise TypeError(f"{name}: expected an int, got {_show(value)}")


def _show(value: Any) -> str:
    """A value's type, and the value where it is short."""
    if isinstance(value, (int, float, str, np.generic)):
        return f"{type(value).__name__} {value!r}"
    return "None" if value is None else type(value).__name__


class SparseSizes(NamedTuple):
    """What a sparse decode call is about; strides of out in elements.

    ``format`` and ``load_bytes`` are as in `rawmla.kernels.mla_sparse.SparseCall`; ``extra`` is
    NO_CACHE without an extra cache.
    """

    format: str
    d_qk: int
    load_bytes: int
    b: int
    s_q: int
    h_q: int
    cache: Cache
    extra: Cache
    out_strides: tuple[int, ...]


_FP8_DTYPES = ("float8_e4m3fn", "uint8", "int8")
_FP8_LAYOUTS = {layout.d_qk: layout for layout in QUANTIZED.values()}


def _check_sparse_q(views: dict[str, Fields | None], axes: tuple[str, ...], purpose: str = "") -> Fields:
    """Check the q of a sparse call, with these dimensions, and that the other arrays are where it is."""
    q = views["q"]
    assert q is not None
    _, shape, strides, dtype, device, framework, _ = q
    if dtype != "bfloat16":
        raise TypeError(f"q: expected dtype bfloat16{purpose}, got {dtype}")
    if len(shape) != len(axes):
        raise ValueError(f"q: expected shape [{', '.join(axes)}], got {list(shape)}")
    if shape[-1] not in D_QK:
        raise ValueError(f"q: expected a last dimension (d_qk) of 576 or 512, got shape {list(shape)}")
    if not shape[-2]:
        raise ValueError(f"q: expected at least 1 head, got shape {list(shape)}")
    if strides[-1] != 1:
        raise ValueError(f"q: expected a contiguous last dimension, got strides {list(strides)} (elements)")
    for name, view in views.items():
        if view is not None and name != "q":
            check_place(name, view, device, framework, "q")
    return q


def sparse_sizes(is_fp8_kvcache: bool, views: dict[str, Fields | None]) -> SparseSizes:
    """Check the arrays of a sparse decode call, by the names of the arguments, against each other."""
    q = _check_sparse_q(views, ("b", "s_q", "h_q", "d_qk"), " with indices")
    b, s_q, h_q, d_qk = q[1]
    layout = _FP8_LAYOUTS[d_qk] if is_fp8_kvcache else None
    extra_given = [views[name] is not None for name in ("extra_k_cache", "extra_indices_in_kvcache")]
    if any(extra_given) != all(extra_given):
        missing = "extra_indices_in_kvcache" if extra_given[0] else "extra_k_cache"
        raise ValueError(f"{missing}: expected an array, as the other of the two was given, got None")
    if views["extra_topk_length"] is not None and not all(extra_given):
        raise ValueError("extra_topk_length: expected None without extra_k_cache, got an array")
    cache, align = _sparse_cache("k_cache", views["k_cache"], layout, d_qk)
    cache = _with_indices(cache, "indices", views["indices"], b, s_q)
    extra = NO_CACHE
    if all(extra_given):
        extra, extra_align = _sparse_cache("extra_k_cache", views["extra_k_cache"], layout, d_qk)
        extra = _with_indices(extra, "extra_indices_in_kvcache", views["extra_indices_in_kvcache"], b, s_q)
        align = min(align, extra_align)
    vectors = (
        ("topk_length", "int32", b, "b"),
        ("extra_topk_length", "int32", b, "b"),
        ("attn_sink", "float32", h_q, "h_q"),
    )
    for name, dtype, length, meaning in vectors:
        view = views[name]
        if view is not None:
            check_vector(name, view, (dtype,), length, f"{meaning} is that of q")
    out = views["out"]
    out_steps = (s_q * h_q * D_V, h_q * D_V, D_V) if out is None else out_strides(out, q)[:3]
    format = layout.name if layout else "bf16"
    return SparseSizes(format, d_qk, align, b, s_q, h_q, cache, extra, out_steps)


def _sparse_cache(name: str, view: Fields | None, layout: CacheFormat | None, d_qk: int) -> tuple[Cache, int]:
    """Check a cache, bf16 without a layout; returns it, without indices, and what the addresses of its rows
    are multiples of.
    """
    assert view is not None
    ptr, shape, strides, dtype, _, _, _ = view
    wanted = _FP8_DTYPES if layout else ("bfloat16",)
    if dtype not in wanted:
        raise TypeError(
            f"{name}: expected dtype {' or '.join(wanted)} with is_fp8_kvcache={layout is not None}, "
            f"got {dtype}"
        )
    itemsize, columns = (1, layout.token_bytes) if layout else (2, d_qk)
    if len(shape) != 4 or shape[2] != 1 or shape[3] != columns:
        raise ValueError(
            f"{name}: expected shape [num_blocks, page_block_size, 1, {columns}] for this d_qk of q, got "
            f"{list(shape)}"
        )
    num_blocks, page_block_size, _, _ = shape
    if not num_blocks or not page_block_size:
        raise ValueError(f"{name}: expected at least 1 block of at least 1 token, got shape {list(shape)}")
    block_stride, token_stride, _, step = usable_strides(shape, strides)
    if step != 1 or layout and token_stride != columns:
        raise ValueError(
            f"{name}: expected contiguous tokens (only the block stride is free in an FP8 cache), got "
            f"strides {list(strides)} (elements) of shape {list(shape)}"
        )
    block_bytes = block_stride * itemsize
    token_bytes = layout.row_bytes if layout else token_stride * itemsize
    steps = ptr | block_bytes | token_bytes
    align = 16 if not steps & 15 else 8 if not steps & 7 and layout else 0
    if not align or block_stride < 0 or token_stride < 0:
        raise ValueError(
            f"{name}: expected an address and strides that are multiples of {8 if layout else 16} "
            f"bytes, strides not negative, got address {ptr:#x}, strides {list(strides)} (elements)"
        )
    return Cache(page_block_size, num_blocks, block_bytes, token_bytes, 0, 0, 0), align


def _with_indices(
    cache: Cache, name: str, view: Fields | None, b: int, s_q: int, meaning: str = "b and s_q are those of q"
) -> Cache:
    """Check what is selected from a cache."""
    assert view is not None
    _, shape, strides, dtype, _, _, _ = view
    if dtype != "int32":
        raise TypeError(f"{name}: expected dtype int32, got {dtype}")
    if len(shape) != 3 or tuple(shape[:2]) != (b, s_q) or not shape[2]:
        raise ValueError(
            f"{name}: expected shape [{b}, {s_q}, topk] ({meaning}) with topk at least 1, got {list(shape)}"
        )
    stride_b, stride_s, step = strides
    if step != 1 and shape[2] > 1 or stride_b < 0 or stride_s < 0:
        raise ValueError(
            f"{name}: expected a contiguous last dimension and no negative stride, got strides "
            f"{list(strides)} (elements)"
        )
    return cache._replace(topk=shape[2], index_stride_b=stride_b, index_stride_s=stride_s)


class PrefillSizes(NamedTuple):
    """What a prefill call is about; strides of out in elements, of tokens and of heads.

    ``format``, ``load_bytes`` and ``cache`` are as in `rawmla.kernels.sparse_prefill.SparsePrefillCall`.
    """

    format: str
    d_qk: int
    load_bytes: int
    s_q: int
    h_q: int
    cache: Cache
    out_strides: tuple[int, int]


def prefill_sizes(is_fp8_kvcache: bool, views: dict[str, Fields | None]) -> PrefillSizes:
    """Check the arrays of a prefill call, by the names of the arguments, against each other."""
    q = _check_sparse_q(views, ("s_q", "h_q", "d_qk"))
    s_q, h_q, d_qk = q[1]
    if is_fp8_kvcache:
        layout = _FP8_LAYOUTS[d_qk]
        cache, align = _sparse_cache("kv", views["kv"], layout, d_qk)
        format = layout.name
    else:
        cache, align, format = _rows(views["kv"], d_qk), 16, "bf16"
    cache = _with_indices(cache, "indices", views["indices"], s_q, 1, "s_q is that of q")
    vectors = (("topk_length", "int32", s_q, "s_q"), ("attn_sink", "float32", h_q, "h_q"))
    for name, dtype, length, meaning in vectors:
        view = views[name]
        if view is not None:
            check_vector(name, view, (dtype,), length, f"{meaning} is that of q")
    out = views["out"]
    stride, stride_h, _ = (h_q * D_V, D_V, 1) if out is None else out_strides(out, q)
    return PrefillSizes(format, d_qk, align, s_q, h_q, cache, (stride, stride_h))


def _rows(kv: Fields | None, d_qk: int) -> Cache:
    """Check the bf16 kv of a prefill call; returns it, without indices, as a cache of blocks of one token."""
    assert kv is not None
    ptr, shape, strides, dtype, _, _, _ = kv
    if dtype != "bfloat16":
        raise TypeError(f"kv: expected dtype bfloat16 with is_fp8_kvcache=False, got {dtype}")
    if len(shape) != 3 or shape[1] != 1 or shape[2] != d_qk:
        raise ValueError(f"kv: expected shape [s_kv, 1, {d_qk}] (d_qk is that of q), got {list(shape)}")
    if not shape[0]:
        raise ValueError(f"kv: expected at least 1 token, got shape {list(shape)}")
    stride, _, step = usable_strides(shape, strides)
    if step != 1:
        raise ValueError(f"kv: expected a contiguous last dimension, got strides {list(strides)} (elements)")
    if ptr & 15 or stride & 7 or stride < 0:
        raise ValueError(
            "kv: expected a 16-byte aligned address and a stride of tokens that is a multiple of 8, not "
            f"negative, got address {ptr:#x}, strides {list(strides)} (elements)"
        )
    return Cache(1, shape[0], 2 * stride, 2 * d_qk, 0, 0, 0)


def check_sparse_config(planned: Any, wanted: Any) -> None:
    """As `check_config`, for two configurations."""
    if planned == wanted:
        return
    if planned is None:
        raise ValueError(
            "tile_scheduler_metadata: expected a FlashMLASchedMeta with a config once have_initialized is "
            "True, got config None"
        )
    for field in _CONFIG_FIELDS:
        if getattr(planned, field, False) != getattr(wanted, field):
            raise _other_config(field, getattr(wanted, field), getattr(planned, field, False))


def _other_config(field: str, wanted: Any, planned: Any) -> ValueError:
    return ValueError(
        f"tile_scheduler_metadata: expected a plan for {field} = {wanted}, that of this call, got a "
        f"FlashMLASchedMeta filled for {field} = {planned}; take one from get_mla_metadata() for each "
        "configuration"
    )


def refuse_dense_fp8() -> None:
    """Raise for an FP8 cache without indices."""
    raise NotImplementedError(
        "is_fp8_kvcache=True: FP8 caches are for sparse decoding, expected indices (get_mla_metadata: topk) "
        "with it"
    )
