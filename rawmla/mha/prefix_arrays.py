"""Checks of the arrays of a call of `rawmla.context_attention_fwd` against each other."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

from ..call.checks import STRIDE_LIMIT, check_place, check_vector, mixes_frameworks
from ..call.frameworks import Fields, aligned_strides, contiguous_strides
from ..call.memo import Memo, PreparedCall
from ..kernels.common import FLOAT_DTYPES
from ..kernels.mha_forward import NO_BOUND
from ..kernels.paged_cache import PagedCache
from .arguments import check_head_dim, check_out_layout, walked
from .forward import of_three

__all__ = ["CACHE_DTYPES", "PrefixArrays", "PrefixChecked", "PrefixOptions", "check_arrays"]

Strides = tuple[int, int]

_BYTES = ("uint8", "int8")
CACHE_DTYPES = {
    "auto": "same",
    "float16": "same",
    "bfloat16": "same",
    "fp8": "e4m3",
    "fp8_e4m3": "e4m3",
    "fp8_e5m2": "e5m2",
}
"""kv_cache_dtype -> what the host twin calls it."""
_FP8_ARRAYS = {"e4m3": ("float8_e4m3fn", *_BYTES), "e5m2": ("float8_e5m2", *_BYTES)}
_ANY_FP8 = {dtype for dtypes in _FP8_ARRAYS.values() for dtype in dtypes}


class PrefixArrays(NamedTuple):
    """Arrays of a call by argument name, as the caller gave them or as `Fields`; None: not given.

    A scale is as the caller gave it, which may be a number, or `Fields`.
    """

    q: Any
    k: Any
    v: Any
    o: Any
    k_cache: Any
    v_cache: Any
    b_loc: Any
    b_start_loc: Any
    b_seq_len: Any
    k_scale: Any
    v_scale: Any
    alibi_slopes: Any
    sinks: Any
    fp8_out_scale: Any


class PrefixOptions(NamedTuple):
    """Options of a call by argument name, as the caller gave them."""

    kv_cache_dtype: Any
    max_seq_len: Any
    max_input_len: Any
    sliding_window: Any
    sm_scale: Any
    skip_decode: Any
    is_block_table_ptr: Any
    interleaved_v_pack_factor: Any
    causal: Any


class PrefixSizes(NamedTuple):
    """What a `MhaForwardCall` has of the arrays, by the names there."""

    h_q: int
    h_kv: int
    d_qk: int
    d_v: int
    q_strides: tuple[int, int, int]
    k_strides: tuple[int, int, int]
    v_strides: tuple[int, int, int]
    out_strides: tuple[int, int, int]
    out_is_aligned: bool
    cache: PagedCache  # without numbers of the call


class PrefixChecked(NamedTuple):
    """Sizes and strides of arrays that passed the checks."""

    b: int
    copied: tuple[bool, bool, bool] | None  # which of q, k and v have to be copied; None: none
    mixes_frameworks: bool  # some arrays are of another framework than q
    default_scale: float
    sizes: PrefixSizes
    calls: Memo[PreparedCall]


def check_arrays(
    arrays: PrefixArrays, kv_cache_dtype: str, pack: int, is_block_table_ptr: bool, fp8_out: bool
) -> PrefixChecked:
    """Check the arrays of a call, which are read, against each other."""
    q, own = arrays.q, (arrays.k, arrays.v)
    _, q_shape, _, dtype, device, framework, _ = q
    if dtype != "bfloat16" and dtype != "float16":
        more = "; float32 is not supported yet" if dtype == "float32" else ""
        raise TypeError(f"q: expected dtype bfloat16 or float16, got {dtype}{more}")
    if len(q_shape) != 3:
        raise ValueError(f"q: expected shape [tokens, h_q, d], got {list(q_shape)}")
    tokens, h_q, d = q_shape
    check_head_dim("q", "a last dimension (d)", d, q_shape)
    if tokens >= NO_BOUND:
        raise ValueError(f"q: expected less than 2**30 tokens, got shape {list(q_shape)}")
    cache_dtype = _check_caches(arrays, kv_cache_dtype)
    num_blocks, h_kv, _, block_size, x = arrays.k_cache[1]
    if not h_q or h_q % h_kv:
        raise ValueError(
            f"q: expected h_q to be a positive multiple of the h_kv of k_cache, got h_q {h_q} and h_kv {h_kv}"
        )
    if pack and block_size % pack:
        raise ValueError(
            f"interleaved_v_pack_factor: expected 0 or a divisor of the block_size {block_size}, got {pack}"
        )
    for name, view in zip(("k", "v"), own, strict=True):
        if view is not None:
            _, shape, _, own_dtype, _, _, _ = view
            if own_dtype != dtype:
                raise TypeError(f"{name}: expected dtype {dtype}, that of q, got {own_dtype}")
            if tuple(shape) != (tokens, h_kv, d):
                raise ValueError(f"{name}: expected shape {[tokens, h_kv, d]}, got {list(shape)}")
    b = _check_requests(arrays, is_block_table_ptr)
    _check_head_terms(arrays, h_q)
    o_strides = _check_o(arrays, fp8_out)
    for name, array in zip(PrefixArrays._fields, arrays, strict=True):
        if array is not None:
            check_place(name, array, device, framework, "q")
    itemsize = 2 if cache_dtype == "same" else 1
    cache_strides = [
        _check_cache_layout(name, view, itemsize)
        for name, view in (("k_cache", arrays.k_cache), ("v_cache", arrays.v_cache))
    ]
    if is_block_table_ptr and not cache_strides[0][0]:
        raise ValueError("k_cache: expected a positive stride of blocks with is_block_table_ptr, got 0")
    _, (_, columns), (row_stride, _), table_dtype, *_ = arrays.b_loc
    steps = [(0, 0) if view is None else walked(view) for view in (q, *own)]
    copied = [step is None for step in steps]
    q_strides, k_strides, v_strides = [
        of_three(aligned_strides((tokens, heads, d))[:-1] if step is None else step)
        for heads, step in zip((h_q, h_kv, h_kv), steps, strict=True)
    ]
    return PrefixChecked(
        b=b,
        copied=(copied[0], copied[1], copied[2]) if any(copied) else None,
        mixes_frameworks=mixes_frameworks(arrays),
        default_scale=d**-0.5,
        sizes=PrefixSizes(
            h_q=h_q,
            h_kv=h_kv,
            d_qk=d,
            d_v=d,
            q_strides=q_strides,
            k_strides=k_strides,
            v_strides=v_strides,
            out_strides=of_three(o_strides),
            out_is_aligned=walked(arrays.o, 1 if fp8_out else 2) is not None,
            cache=PagedCache(
                dtype=cache_dtype,
                num_blocks=num_blocks,
                block_size=block_size,
                x=x,
                v_pack=0 if pack == block_size else pack,  # then the memory is the same as without
                k_strides=cache_strides[0],
                v_strides=cache_strides[1],
                table_stride=row_stride if b > 1 else columns,
                table_columns=columns,
                table_bytes=8 if table_dtype == "int64" else 4,
                table_has_pointers=is_block_table_ptr,
                own_in_cache=arrays.k is None,
                skip_decode=False,
                k_scale=None,
                v_scale=None,
                out_fp8=fp8_out,
                out_scale=None,
            ),
        ),
        calls=Memo(),
    )


def _of_two(strides: tuple[int, ...]) -> Strides:
    first, second = strides
    return first, second


def _check_caches(arrays: PrefixArrays, kv_cache_dtype: str) -> str:
    """Check dtypes and shapes of the caches; returns what the host twin calls the dtype."""
    cache_dtype = CACHE_DTYPES[kv_cache_dtype]
    _, q_shape, _, q_dtype, *_ = arrays.q
    d = q_shape[2]
    for name, (_, _, _, dtype, *_) in (("k_cache", arrays.k_cache), ("v_cache", arrays.v_cache)):
        if cache_dtype != "same":
            if dtype not in _FP8_ARRAYS[cache_dtype]:
                raise TypeError(
                    f"{name}: expected dtype {' or '.join(_FP8_ARRAYS[cache_dtype])} with kv_cache_dtype "
                    f"{kv_cache_dtype!r}, got {dtype}"
                )
        elif dtype in _ANY_FP8:
            raise ValueError(
                f"kv_cache_dtype: expected fp8, fp8_e4m3 or fp8_e5m2 with a {name} of {dtype}, got "
                f"{kv_cache_dtype!r}"
            )
        elif dtype != q_dtype:
            raise TypeError(
                f"{name}: expected dtype {q_dtype}, that of q, with kv_cache_dtype {kv_cache_dtype!r}, got "
                f"{dtype}"
            )
    _, k_shape, *_ = arrays.k_cache
    _, v_shape, *_ = arrays.v_cache
    if len(k_shape) != 5 or not all(k_shape[1:]) or k_shape[2] * k_shape[4] != d:
        raise ValueError(
            f"k_cache: expected shape [num_blocks, h_kv, {d} / x, block_size, x] (d is that of q), got "
            f"{list(k_shape)}"
        )
    wanted = (*k_shape[:2], d, k_shape[3])
    if tuple(v_shape) != wanted:
        raise ValueError(f"v_cache: expected shape {list(wanted)}, as k_cache has, got {list(v_shape)}")
    return cache_dtype


def _check_cache_layout(name: str, view: Fields, itemsize: int) -> Strides:
    """Check that kernels can walk a cache; returns its strides of blocks and heads."""
    ptr, shape, strides, *_ = view
    shape, multiple = tuple(shape), 16 // itemsize
    inner = zip(shape[2:], strides[2:], contiguous_strides(shape)[2:], strict=True)
    fits = not ptr & 15 and all(extent == 1 or stride == wanted for extent, stride, wanted in inner)
    steps = []
    size = -(-prod(shape[2:]) // multiple) * multiple  # of a head, for dimensions that nobody steps over
    for extent, stride, fitting in zip(shape[:2], strides[:2], (shape[1] * size, size), strict=True):
        steps.append(fitting if extent <= 1 else stride)
        fits = fits and not steps[-1] % multiple and 0 <= steps[-1] < STRIDE_LIMIT // itemsize
    if shape[0] and not fits:
        dims = "[d / x, block_size, x]" if len(shape) == 5 else "[d, block_size]"
        raise ValueError(
            f"{name}: expected a 16-byte aligned address, contiguous {dims} within a block and head, and "
            f"strides of blocks and heads that are multiples of {multiple} (16 bytes) and not negative, got "
            f"address {ptr:#x}, shape {list(shape)}, strides {list(strides)} (elements)"
        )
    return _of_two(tuple(steps))


def _check_requests(arrays: PrefixArrays, is_block_table_ptr: bool) -> int:
    """Check lengths and block table; returns the number of requests."""
    _, shape, *_ = arrays.b_seq_len
    if len(shape) != 1:
        raise ValueError(f"b_seq_len: expected shape [b], got {list(shape)}")
    b = shape[0]
    check_vector("b_seq_len", arrays.b_seq_len, ("int32",), b, "b")
    check_vector("b_start_loc", arrays.b_start_loc, ("int32",), b + 1, "b + 1, b is that of b_seq_len")
    _, shape, strides, dtype, *_ = arrays.b_loc
    if is_block_table_ptr and dtype != "int64":
        raise TypeError(f"b_loc: expected dtype int64 with is_block_table_ptr, got {dtype}")
    if dtype not in ("int32", "int64"):
        raise TypeError(f"b_loc: expected dtype int32 or int64, got {dtype}")
    if len(shape) != 2 or shape[0] != b:
        raise ValueError(
            f"b_loc: expected shape [{b}, max_blocks] (b is that of b_seq_len), got {list(shape)}"
        )
    if shape[1] > 1 and strides[1] != 1:
        raise ValueError(
            f"b_loc: expected a contiguous last dimension, got strides {list(strides)} (elements)"
        )
    return b


def _check_head_terms(arrays: PrefixArrays, h_q: int) -> None:
    """Check slopes and sinks, and the scales that are arrays."""
    if arrays.alibi_slopes is not None:
        check_vector("alibi_slopes", arrays.alibi_slopes, ("float32",), h_q, "h_q is that of q")
    if arrays.sinks is not None:
        check_vector("sinks", arrays.sinks, tuple(FLOAT_DTYPES), h_q, "h_q is that of q")
    for name in ("k_scale", "v_scale", "fp8_out_scale"):
        view = getattr(arrays, name)
        if view is not None:
            _, shape, _, dtype, *_ = view
            if dtype != "float32":
                raise TypeError(f"{name}: expected a number or an array of dtype float32, got {dtype}")
            if tuple(shape) not in ((), (1,)):
                raise ValueError(f"{name}: expected a number or shape [] or [1], got {list(shape)}")


def _check_o(arrays: PrefixArrays, fp8_out: bool) -> Strides:
    """Check `o` against q; returns its strides but the last."""
    _, shape, _, dtype, *_ = arrays.o
    _, q_shape, _, q_dtype, *_ = arrays.q
    if fp8_out:
        if dtype not in _FP8_ARRAYS["e4m3"]:
            raise TypeError(
                f"o: expected dtype {' or '.join(_FP8_ARRAYS['e4m3'])} with fp8_out_scale, got {dtype}"
            )
    elif dtype != q_dtype:
        raise TypeError(f"o: expected dtype {q_dtype}, that of q, got {dtype}")
    if tuple(shape) != tuple(q_shape):
        raise ValueError(f"o: expected shape {list(q_shape)}, that of q, got {list(shape)}")
    itemsize = 1 if fp8_out else 2
    return _of_two(check_out_layout(arrays.o, "o", itemsize, alignment=itemsize))
