"""Checks of arguments that several MLA operations share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from ..call.arguments import Sizes, check_dtype, check_places, check_shape, mixes_frameworks, row_strides
from ..call.arrays import READERS
from ..call.checks import INT32_MAX, STRIDE_LIMIT, as_int, check_no_overlap, usable_strides
from ..call.frameworks import Fields, NewArray, contiguous_strides
from ..kernels.common import D_QK, D_ROPE, D_V, MAX_TOPK, Q_UNIT
from ..kernels.mla_cache_rows import FORMATS, MODEL1, CacheFormat
from ..kernels.mla_sparse import Cache

BYTE_DTYPES = ("float8_e4m3fn", "uint8", "int8")
"""The dtypes that the bytes of a quantised cache may have."""

_UINT32_MAX = 2**32 - 1


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


def check_extra(extra_k_cache: Any, extra_indices: Any, extra_topk_length: Any) -> None:
    """Check that the arguments about a second cache were given together."""
    if (extra_k_cache is None) != (extra_indices is None):
        missing = "extra_k_cache" if extra_k_cache is None else "extra_indices_in_kvcache"
        raise ValueError(f"{missing}: expected an array, as the other of the two was given, got None")
    if extra_k_cache is None and extra_topk_length is not None:
        raise ValueError("extra_topk_length: expected None without extra_k_cache, got an array")


def read_pair(q: tuple[Any, ...]) -> tuple[Fields, Fields]:
    """Read the arrays of a q that is a pair: the columns before RoPE, and the RoPE columns."""
    if len(q) != 2:
        raise ValueError(f"q: expected an array or a pair (q_nope, q_rope), got a tuple of {len(q)}")
    q_nope, q_rope = q
    return READERS[type(q_nope)](q_nope, "q"), READERS[type(q_rope)](q_rope, "q_rope")


def check_q(arrays: Mapping[str, Any], dims: str, dtypes: str, reason: str = "") -> Sizes:
    """Check the q of a call, and that all arrays are on its device; returns the extents of q.

    ``arrays`` are by the names of the arguments. d_qk counts the columns of both arrays of a pair.
    """
    q, q_rope = arrays["q"], arrays["q_rope"]
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
    check_places(arrays)
    return sizes


def check_sparse_q(arrays: Mapping[str, Any], dims: str, reason: str = "") -> Sizes:
    """Check the q of a sparse call as `check_q` does."""
    sizes = check_q(arrays, dims, "bfloat16", reason)
    if not sizes["h_q"]:
        raise ValueError(f"q: expected at least 1 head, got shape {list(arrays['q'][1])}")
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
    pair = [walk(name, view, ", in a pair,") for name, view in (("q", q), ("q_rope", q_rope))]
    _check_reach("q", q, pair[0])
    _check_reach("q_rope", q_rope, pair[1])
    return QStrides(pair[0], pair[1], False, rope_bytes)


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
    """Find the strides but the last; None where TMA and copies of 16 bytes cannot walk the array."""
    ptr, shape, strides, *_ = view
    *steps, step = usable_strides(shape, strides)
    taken = [stride for extent, stride in zip(shape, steps, strict=False) if extent > 1]
    fits = not ptr & 15 and all(0 < stride < STRIDE_LIMIT // 2 and not stride & 7 for stride in taken)
    # In an empty array there is nothing to step over.
    return tuple(steps) if step == 1 and (fits or 0 in shape) else None


def walk(name: str, view: Fields, reason: str = "") -> tuple[int, ...]:
    """Check that kernels can walk an array; returns its strides but the last."""
    walked = _walked(view)
    if walked is None:
        ptr, shape, strides, *_ = view
        raise ValueError(
            f"{name}: expected{reason} a 16-byte aligned address, a contiguous last dimension and other "
            f"strides that are positive multiples of 8, below 2**39 (TMA), got address {ptr:#x}, shape "
            f"{list(shape)}, strides {list(strides)} (elements)"
        )
    return walked


def out_of(q: Fields, out: Fields | None) -> tuple[list[NewArray], tuple[int, ...]]:
    """List `out` as an array to be made, unless it is given; returns its strides but the last, too.

    Kernels must be able to write a given one, each element once.
    """
    if out is None:
        _, q_shape, _, dtype, *_ = q
        made = (*q_shape[:-1], D_V)
        return [(made, dtype)], contiguous_strides(made)[:-1]
    _, shape, strides, *_ = out
    if 0 in shape:
        return [], usable_strides(shape, strides)[:-1]
    walked = walk("out", out)
    check_no_overlap("out", shape, (*walked, 1))
    return [], walked


class PreparedCall(NamedTuple):
    """The work of one kind of call, whose arrays and numbers passed all checks."""

    allocate: Callable[[], list[Any]]
    """Makes the results that the caller did not give, in order, and the scratch, or None, after them."""
    launch: Callable[..., None] | None
    """Enqueues the kernels: (stream, addresses, address of the scratch). None: there are no query tokens."""
    q_is_copied: bool
    rope_bytes: int
    """Both as in `QStrides`."""
    mixes_frameworks: bool
    """Some arrays are of another framework than q."""


def prepared_call(
    arrays: Mapping[str, Any], strides: QStrides, results: list[NewArray], kernels: Any
) -> PreparedCall:
    """Prepare a call that launches ``kernels``, which have `scratch_bytes` and `launch`, or None."""
    _, _, _, _, device, framework, _ = arrays["q"]
    scratch_bytes, launch = (0, None) if kernels is None else (kernels.scratch_bytes, kernels.launch)
    allocate = framework.allocator(results, scratch_bytes, device)
    return PreparedCall(allocate, launch, strides.is_copied, strides.rope_bytes, mixes_frameworks(arrays))


class PagedCache(NamedTuple):
    """A cache `[num_blocks, page_block_size, 1, columns]` that passed the check; strides in bytes.

    The addresses of all tokens are multiples of ``alignment``, which is 16 or 8.
    """

    format: CacheFormat
    num_blocks: int
    page_block_size: int
    block_stride: int
    token_stride: int
    alignment: int


def check_paged_cache(
    name: str,
    view: Fields,
    formats: Sequence[CacheFormat],
    *,
    of: str = "",
    least_alignment: int | None = None,
) -> PagedCache:
    """Check a cache that may be in any of these formats. Its dtype and last dimension say in which.

    Tokens of a quantised cache follow each other within a block; all other strides are free, 0 among them.
    ``of`` is the part of an error's text that says what chose these formats.
    ``least_alignment``, in bytes, is for kernels that read quantised rows at less than their usual alignment.
    """
    ptr, shape, strides, dtype, _, _, _ = view
    is_quantized = dtype in BYTE_DTYPES
    itemsize = 1 if is_quantized else 2
    fitting = {
        format.token_bytes // itemsize: format for format in formats if format.is_quantized == is_quantized
    }
    if not fitting or not is_quantized and dtype != "bfloat16":
        wanted = [*BYTE_DTYPES] if any(format.is_quantized for format in formats) else []
        wanted += ["bfloat16"] if not all(format.is_quantized for format in formats) else []
        raise TypeError(f"{name}: expected dtype {' or '.join(wanted)}{of}, got {dtype}")
    if len(shape) != 4 or shape[2] != 1 or shape[3] not in fitting or not 0 < shape[1] <= INT32_MAX:
        columns = " or ".join(map(str, fitting))
        raise ValueError(
            f"{name}: expected shape [num_blocks, page_block_size, 1, {columns}]{of}, with page_block_size "
            f"at least 1, got {dtype} {list(shape)}"
        )
    format = fitting[shape[3]]
    block_stride, token_stride, _, step = usable_strides(shape, strides)
    if step != 1 or is_quantized and token_stride != shape[3]:
        raise ValueError(
            f"{name}: expected contiguous "
            f"{'tokens (only the stride of blocks is free)' if is_quantized else 'columns'}, got strides "
            f"{list(strides)} (elements) of shape {list(shape)}"
        )
    block_bytes = block_stride * itemsize
    row_bytes = format.row_bytes if is_quantized else token_stride * itemsize
    needed = least_alignment if is_quantized and least_alignment is not None else format.alignment
    steps = ptr | block_bytes | row_bytes
    alignment = 16 if not steps % 16 else 8 if not steps % 8 else 1
    if alignment < needed or block_stride < 0 or not 0 <= row_bytes <= _UINT32_MAX:
        raise ValueError(
            f"{name}: expected an address and strides that are multiples of {needed} bytes, strides not "
            f"negative and tokens less than 4 GiB apart, got address {ptr:#x}, strides {list(strides)} "
            f"(elements) of shape {list(shape)}"
        )
    return PagedCache(format, shape[0], shape[1], block_bytes, row_bytes, alignment)


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
