"""Checks of arguments that several MLA operations share."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

from ..call.arguments import Sizes, check_dtype, check_places, check_shape, row_strides
from ..call.arrays import READERS
from ..call.checks import INT32_MAX, as_int, check_no_overlap, strides_fit, usable_strides
from ..call.frameworks import Fields, contiguous_strides
from ..kernels.common import D_QK, D_ROPE, D_V, MAX_TOPK, Q_UNIT
from ..kernels.mla_cache_rows import FORMATS, MODEL1
from ..kernels.mla_sparse import Cache
from .paged_cache import check_paged_cache


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


def read_pair(q: tuple[Any, ...]) -> tuple[Fields, Fields]:
    """Read the arrays of a q that is a pair: the columns before RoPE, and the RoPE columns."""
    if len(q) != 2:
        raise ValueError(f"q: expected an array or a pair (q_nope, q_rope), got a tuple of {len(q)}")
    q_nope, q_rope = q
    return READERS[type(q_nope)](q_nope, "q"), READERS[type(q_rope)](q_rope, "q_rope")


def check_q(arrays: Any, dims: str, dtypes: str, reason: str = "") -> Sizes:
    """Check the q of a call, and that all arrays are on its device; returns the extents of q.

    ``arrays`` is a NamedTuple by the names of the arguments. d_qk counts the columns of both arrays
    of a pair.
    """
    q, q_rope = arrays.q, arrays.q_rope
    sizes = Sizes()
    check_dtype("q", q, dtypes, reason)
    check_shape("q", q, dims, sizes)
    row_strides("q", q)
    _, shape, _, dtype, *_ = q
    if q_rope is not None:
        sizes["d_qk"] += D_ROPE
    if sizes["d_qk"] not in D_QK:
        wanted = "(d_qk) of 576 or 512" if q_rope is None else "of 512 or 448 in the first array of a pair"
        raise ValueError(f"q: expected a last dimension {wanted}, got shape {list(shape)}")
    if q_rope is not None:
        check_dtype("q_rope", q_rope, dtype, ", the dtype of q")
        check_shape("q_rope", q_rope, dims.replace("d_qk", str(D_ROPE)), sizes)
    if prod(shape[:-1]) > INT32_MAX:
        raise ValueError(f"q: expected less than 2**31 rows (tokens times heads), got shape {list(shape)}")
    check_places(arrays._fields, arrays)
    return sizes


def check_sparse_q(arrays: Any, dims: str, reason: str = "") -> Sizes:
    """Check the q of a sparse call as `check_q` does."""
    sizes = check_q(arrays, dims, "bfloat16", reason)
    if not sizes["h_q"]:
        raise ValueError(f"q: expected at least 1 head, got shape {list(arrays.q[1])}")
    return sizes


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
    if q_rope is None:
        _, shape, *_ = q
        walked = _walked(q)
        usable = usable_strides(shape, contiguous_strides(shape))[:-1] if walked is None else walked
        _check_reach("q", q, usable)
        return QStrides(usable, usable, walked is None, rope_bytes)
    pair = []
    for name, view in (("q", q), ("q_rope", q_rope)):
        walked = _walked(view)
        if walked is None:
            ptr, _, strides, *_ = view
            raise ValueError(
                f"{name}: expected, in a pair, a 16-byte aligned address, a contiguous last dimension and "
                f"other strides that are positive multiples of 8, got address {ptr:#x}, strides "
                f"{list(strides)} (elements)"
            )
        _check_reach(name, view, walked)
        pair.append(walked)
    of_q, of_rope = pair
    return QStrides(of_q, of_rope, False, rope_bytes)


def _check_reach(name: str, q: Fields, strides: tuple[int, ...]) -> None:
    """Check that kernels can count from the first to the last value in 32 bits."""
    _, shape, *_ = q
    reach = sum([(extent - 1) * stride for extent, stride in zip(shape[:-1], strides, strict=True)])
    if reach + shape[-1] > Q_UNIT * 2**32:
        raise ValueError(
            f"{name}: expected rows within 64 GiB of each other, got shape {list(shape)} with strides "
            f"{list(strides)} (elements)"
        )


def _walked(view: Fields) -> tuple[int, ...] | None:
    """Find the strides but the last; None where kernels cannot walk the array."""
    ptr, shape, strides, *_ = view
    usable = usable_strides(shape, strides)
    fits = 0 in shape or strides_fit(ptr, shape, usable)  # in an empty array there is nothing to step over
    return usable[:-1] if usable[-1] == 1 and fits else None


def out_strides(out: Fields) -> tuple[int, ...]:
    """Check that kernels can write `out`, each element once; returns its strides but the last."""
    ptr, shape, strides, *_ = out
    walked = usable_strides(shape, strides)[:-1] if 0 in shape else _walked(out)
    if walked is None:
        raise ValueError(
            "out: expected a 16-byte aligned address, a contiguous last dimension and other strides that are "
            f"positive multiples of 8, got address {ptr:#x}, strides {list(strides)} (elements)"
        )
    if 0 not in shape:
        check_no_overlap("out", shape, (*walked, 1))
    return walked


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


def with_selection(cache: Cache, name: str, indices: Fields, width: str = "topk") -> Cache:
    """Check the number and the strides of the indices into a cache; returns the cache with them.

    ``width`` is the name of their last dimension.
    """
    _, shape, strides, *_ = indices
    *rows, topk = shape
    if not 0 < topk <= MAX_TOPK:
        raise ValueError(
            f"{name}: expected shape [{', '.join(map(str, rows))}, {width}] with {width} at least 1 and "
            f"below 2**30, got {list(shape)}"
        )
    stride_b, stride_s = row_strides(name, indices)
    if stride_b < 0 or stride_s < 0:
        raise ValueError(f"{name}: expected no negative stride, got strides {list(strides)} (elements)")
    return cache._replace(topk=topk, index_stride_b=stride_b, index_stride_s=stride_s)
