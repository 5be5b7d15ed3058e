"""Checks of arguments that several MLA operations share."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..call.arrays import READERS
from ..call.checks import (
    INT32_MAX,
    as_int,
    check_no_overlap,
    check_place,
    check_vector,
    strides_fit,
    usable_strides,
)
from ..call.frameworks import Fields, contiguous_strides
from ..kernels.common import D_QK, D_ROPE, D_V, MAX_TOPK, Q_UNIT
from ..kernels.mla_cache_rows import FORMATS, MODEL1
from ..kernels.mla_sparse import Cache
from .paged_cache import check_paged_cache

__all__ = [
    "QStrides",
    "check_head_dim_v",
    "check_out",
    "check_q_width",
    "check_rows",
    "check_selection",
    "check_sparse_cache",
    "check_sparse_q",
    "check_vectors",
    "q_strides",
    "read_pair",
    "refuse_dense_fp8",
    "refuse_without_indices",
]


def check_head_dim_v(head_dim_v: Any, name: str = "head_dim_v") -> None:
    """Check that `head_dim_v` is 512."""
    if as_int(name, head_dim_v) != D_V:
        raise ValueError(f"{name}: expected {D_V}, got {head_dim_v}")


def refuse_dense_fp8() -> None:
    """Raise for an FP8 cache without indices."""
    raise NotImplementedError(
        "is_fp8_kvcache=True: FP8 caches are for sparse decoding, expected indices (get_mla_metadata: topk) "
        "with it"
    )


def refuse_without_indices(**arrays: Any) -> None:
    """Raise for the arguments of sparse decoding that were given without `indices`."""
    given = [name for name, value in arrays.items() if value is not None]
    if given:
        raise ValueError(
            f"{', '.join(given)}: expected None without indices, got an array; dense decoding has no such "
            "argument, so give the selected slots as indices, or leave it out"
        )
    refuse_dense_fp8()


def check_rows(shape: tuple[int, ...]) -> None:
    """Check that the query rows of a q of this shape can be counted in 32 bits."""
    rows = 1
    for extent in shape[:-1]:
        rows *= extent
    if rows > INT32_MAX:
        raise ValueError(f"q: expected less than 2**31 rows (tokens times heads), got shape {list(shape)}")


def read_pair(q: tuple[Any, ...]) -> tuple[Fields, Fields]:
    """Read the arrays of a q that is a pair: the columns before RoPE, and the RoPE columns."""
    if len(q) != 2:
        raise ValueError(f"q: expected an array or a pair (q_nope, q_rope), got a tuple of {len(q)}")
    q_nope, q_rope = q
    return READERS[type(q_nope)](q_nope, "q"), READERS[type(q_rope)](q_rope, "q_rope")


def check_q_width(q: Fields, q_rope: Fields | None) -> int:
    """Check the columns of q, and its RoPE array if it has one; returns d_qk, the columns of both."""
    _, shape, _, dtype, *_ = q
    if q_rope is None:
        if shape[-1] not in D_QK:
            raise ValueError(f"q: expected a last dimension (d_qk) of 576 or 512, got shape {list(shape)}")
        return shape[-1]
    d_qk = shape[-1] + D_ROPE
    if d_qk not in D_QK:
        raise ValueError(
            "q: expected a last dimension of 512 or 448 in the first array of a pair, got shape "
            f"{list(shape)}"
        )
    _, rope_shape, _, rope_dtype, *_ = q_rope
    if rope_dtype != dtype:
        raise TypeError(f"q_rope: expected dtype {dtype}, the dtype of q, got {rope_dtype}")
    if tuple(rope_shape) != (*shape[:-1], D_ROPE):
        raise ValueError(f"q_rope: expected shape {[*shape[:-1], D_ROPE]}, got {list(rope_shape)}")
    return d_qk


class QStrides(NamedTuple):
    """The strides of q and of its RoPE columns in elements, but the last, and where these columns begin."""

    q: tuple[int, ...]
    q_rope: tuple[int, ...]
    is_copied: bool
    """Kernels cannot walk q, so they attend a contiguous copy."""
    rope_bytes: int
    """Bytes from the first column of q to its RoPE columns, unless these are an array of their own."""


def q_strides(q: Fields, q_rope: Fields | None, d_qk: int) -> QStrides:
    """Check the strides of q. A q that kernels cannot walk will be copied; such a pair is refused."""
    rope_bytes = 2 * (d_qk - D_ROPE)
    usable = _walked(q)
    if q_rope is None:
        copied = usable is None
        if usable is None:
            _, shape, *_ = q
            usable = usable_strides(shape, contiguous_strides(shape))[:-1]
        _check_reach("q", q, usable)
        return QStrides(usable, usable, copied, rope_bytes)
    rope = _walked(q_rope)
    if usable is None or rope is None:
        name, (ptr, _, strides, *_) = ("q", q) if usable is None else ("q_rope", q_rope)
        raise ValueError(
            f"{name}: expected, in a pair, a 16-byte aligned address, a contiguous last dimension and other "
            f"strides that are positive multiples of 8, got address {ptr:#x}, strides {list(strides)} "
            "(elements)"
        )
    _check_reach("q", q, usable)
    _check_reach("q_rope", q_rope, rope)
    return QStrides(usable, rope, False, rope_bytes)


def _check_reach(name: str, q: Fields, strides: tuple[int, ...]) -> None:
    """Check that kernels can count from the first to the last value in 32 bits."""
    _, shape, *_ = q
    reach = sum([(extent - 1) * stride for extent, stride in zip(shape[:-1], strides, strict=True)])
    if reach + shape[-1] > Q_UNIT * 2**32:
        raise ValueError(
            f"{name}: expected rows within 64 GiB of each other, got shape {list(shape)} with strides "
            f"{list(strides)} (elements)"
        )


def _walked(q: Fields) -> tuple[int, ...] | None:
    """Find the strides but the last; None where kernels cannot walk the array."""
    ptr, shape, strides, *_ = q
    usable = usable_strides(shape, strides)
    fits = 0 in shape or strides_fit(ptr, shape, usable)  # in an empty array there is nothing to step over
    return usable[:-1] if usable[-1] == 1 and fits else None


def check_out(out: Fields, q: Fields) -> tuple[int, ...]:
    """Check `out` against q, of decoding or of prefill; returns its strides but the last."""
    ptr, shape, strides, dtype, _, _, _ = out
    _, q_shape, _, q_dtype, device, framework, _ = q
    if dtype != q_dtype:
        raise TypeError(f"out: expected dtype {q_dtype}, the dtype of q, got {dtype}")
    if tuple(shape) != (*q_shape[:-1], D_V):
        raise ValueError(f"out: expected shape {[*q_shape[:-1], D_V]}, got {list(shape)}")
    check_place("out", out, device, framework, "q")
    usable = usable_strides(shape, strides)
    if 0 in shape:
        return usable[:-1]  # there is nothing to step over
    if usable[-1] != 1 or not strides_fit(ptr, shape, usable):
        raise ValueError(
            "out: expected a 16-byte aligned address, a contiguous last dimension and other strides that are "
            f"positive multiples of 8, got address {ptr:#x}, strides {list(strides)} (elements)"
        )
    check_no_overlap("out", shape, usable)
    return usable[:-1]


def check_sparse_q(views: Any, axes: tuple[str, ...], purpose: str = "") -> tuple[Fields, int]:
    """Check the q of a sparse call, and that the other arrays are on its device; returns q and d_qk.

    ``axes`` names the dimensions of q. ``views`` is a NamedTuple of the arrays by the names of the arguments.
    """
    q: Fields = views.q
    _, shape, strides, dtype, device, framework, _ = q
    if dtype != "bfloat16":
        raise TypeError(f"q: expected dtype bfloat16{purpose}, got {dtype}")
    if len(shape) != len(axes):
        raise ValueError(f"q: expected shape [{', '.join(axes)}], got {list(shape)}")
    d_qk = check_q_width(q, views.q_rope)
    if not shape[-2]:
        raise ValueError(f"q: expected at least 1 head, got shape {list(shape)}")
    if strides[-1] != 1:
        raise ValueError(f"q: expected a contiguous last dimension, got strides {list(strides)} (elements)")
    check_rows(shape)
    for name, view in views._asdict().items():
        if view is not None and name != "q":
            check_place(name, view, device, framework, "q")
    return q, d_qk


def check_sparse_cache(name: str, view: Fields, d_qk: int, is_fp8_kvcache: bool) -> tuple[str, Cache, int]:
    """Check a cache whose rows are read by slot.

    Returns the public name of its format, the cache as kernels take it, still without a selection, and the
    number of bytes that the addresses of its rows are multiples of.
    """
    formats = [
        (public_name, format)
        for public_name, of_name in FORMATS.items()
        for format in of_name
        if format.is_quantized == is_fp8_kvcache and format.d_qk == d_qk
    ]
    of = f" for this d_qk of q with is_fp8_kvcache={is_fp8_kvcache}"
    cache = check_paged_cache(name, view, [format for _, format in formats], of=of, least_alignment=8)
    if not cache.num_blocks:
        _, shape, *_ = view
        raise ValueError(f"{name}: expected at least 1 block, got shape {list(shape)}")
    if cache.format is MODEL1 and cache.page_block_size * cache.token_stride > INT32_MAX:
        raise ValueError(
            f"{name}: expected pages of less than 2 GiB, got page_block_size {cache.page_block_size}"
        )
    ((public_name, _),) = formats
    strides = (cache.block_stride, cache.token_stride)
    return public_name, Cache(cache.page_block_size, cache.num_blocks, *strides, 0, 0, 0), cache.alignment


def check_selection(cache: Cache, name: str, view: Fields, b: int, s_q: int, meaning: str) -> Cache:
    """Check the indices into a cache; returns the cache with them. ``meaning`` names the source of b, s_q."""
    _, shape, strides, dtype, _, _, _ = view
    if dtype != "int32":
        raise TypeError(f"{name}: expected dtype int32, got {dtype}")
    if len(shape) != 3 or tuple(shape[:2]) != (b, s_q) or not 0 < shape[2] <= MAX_TOPK:
        raise ValueError(
            f"{name}: expected shape [{b}, {s_q}, topk] ({meaning}) with topk at least 1 and below 2**30, "
            f"got {list(shape)}"
        )
    stride_b, stride_s, step = usable_strides(shape, strides)
    if step != 1 or stride_b < 0 or stride_s < 0:
        raise ValueError(
            f"{name}: expected a contiguous last dimension and no negative stride, got strides "
            f"{list(strides)} (elements)"
        )
    return cache._replace(topk=shape[2], index_stride_b=stride_b, index_stride_s=stride_s)


def check_vectors(views: Any, lengths: dict[str, tuple[str, int, str]]) -> None:
    """Check the vectors that are given; ``lengths`` maps names to dtype, length and dimension of q."""
    for name, (dtype, length, dimension) in lengths.items():
        view = getattr(views, name)
        if view is not None:
            check_vector(name, view, (dtype,), length, f"the {dimension} of q")
