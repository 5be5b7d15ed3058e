"""Checks of the arrays of a call of `rawmla.context_attention_fwd` against each other."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

from ..call.arguments import Arg, Sizes, check_arguments, check_dtype, check_places, check_shape
from ..call.checks import STRIDE_LIMIT, check_groups
from ..call.frameworks import Fields, contiguous_strides
from ..kernels.common import FLOAT_DTYPES
from ..kernels.mha_forward import NO_BOUND, MhaForwardCall
from ..kernels.paged_cache import PagedCache
from .arguments import check_head_dim, check_out_layout, of_three, read_strides, walked

CACHE_DTYPES = {
    "auto": "same",
    "float16": "same",
    "bfloat16": "same",
    "fp8": "e4m3",
    "fp8_e4m3": "e4m3",
    "fp8_e5m2": "e5m2",
}
"""kv_cache_dtype -> what the host twin calls it."""
_FP8_DTYPES = {"e4m3": "float8_e4m3fn uint8 int8", "e5m2": "float8_e5m2 uint8 int8"}


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


_TABLE = (
    Arg("k", "=q", "tokens h_kv d"),
    Arg("v", "=q", "tokens h_kv d"),
    Arg("b_start_loc", "int32", "b+1", has_rows=True),
    Arg("b_loc", "int32 int64", "b max_blocks", has_rows=True),
    Arg("alibi_slopes", "float32", "h_q", has_rows=True),
    Arg("sinks", " ".join(FLOAT_DTYPES), "h_q", has_rows=True),
)
_REQUESTS = (Arg("b_seq_len", "int32", "b", has_rows=True),)


def check_call(
    arrays: PrefixArrays, options: PrefixOptions, scales: tuple[float | None, ...]
) -> tuple[MhaForwardCall, tuple[bool, ...]]:
    """Check the arrays of a call, which are read, against each other; options are checked already.

    ``scales`` are k_scale, v_scale and fp8_out_scale where these are numbers. Returns the call of the kernel,
    and which of q, k and v have to be copied.
    """
    kv_cache_dtype, _, max_input_len, window, sm_scale, skip_decode, has_pointers, pack, causal = options
    k_scale, v_scale, out_scale = scales
    fp8_out = out_scale is not None or arrays.fp8_out_scale is not None
    q = arrays.q
    sizes = Sizes()
    check_dtype("q", q, "bfloat16 float16", " (float32 is not supported yet)")
    check_shape("q", q, "tokens h_q d", sizes)
    tokens, h_q, d = sizes.values()
    _, q_shape, _, dtype, device, *_ = q
    check_head_dim("q", "a last dimension (d)", d, q_shape)
    if tokens >= NO_BOUND:
        raise ValueError(f"q: expected less than 2**30 tokens, got shape {list(q_shape)}")
    cache_dtype = _check_caches(arrays, kv_cache_dtype, sizes)
    h_kv, block_size = sizes["h_kv"], sizes["block_size"]
    check_groups(h_q, h_kv, "q", "k_cache")
    if pack and block_size % pack:
        raise ValueError(
            f"interleaved_v_pack_factor: expected 0 or a divisor of the block_size {block_size}, got {pack}"
        )
    if has_pointers:
        check_dtype("b_loc", arrays.b_loc, "int64", " with is_block_table_ptr")
    check_arguments(_REQUESTS, arrays._asdict(), sizes)
    b = sizes["b"]
    sizes["b+1"] = b + 1
    check_arguments(_TABLE, arrays._asdict(), sizes)
    _check_scales(arrays)
    o_strides = _check_o(arrays, fp8_out, sizes)
    check_places(arrays._asdict())
    itemsize = 2 if cache_dtype == "same" else 1
    cache_strides = [
        _check_cache_layout(name, view, itemsize)
        for name, view in (("k_cache", arrays.k_cache), ("v_cache", arrays.v_cache))
    ]
    if has_pointers and not cache_strides[0][0]:
        raise ValueError("k_cache: expected a positive stride of blocks with is_block_table_ptr, got 0")
    _, (_, columns), (row_stride, _), table_dtype, *_ = arrays.b_loc
    (q_strides, k_strides, v_strides), copied = read_strides(q, arrays.k, arrays.v)
    max_query_len = min(max_input_len, tokens)
    call = MhaForwardCall(
        device=device,
        dtype=dtype,
        b=b,
        k_batches=b,
        h_q=h_q,
        h_kv=h_kv,
        d_qk=d,
        d_v=d,
        varlen=True,
        max_seqlen_q=max_query_len,
        max_seqlen_k=max_query_len,
        total_q=tokens,
        total_k=0 if arrays.k is None else tokens,
        q_strides=q_strides,
        k_strides=k_strides,
        v_strides=v_strides,
        out_strides=of_three(o_strides),
        lse_strides=(0, tokens),
        softmax_scale=d**-0.5 if sm_scale is None else sm_scale,
        window_left=window,
        window_right=0 if causal else NO_BOUND,
        sink_dtype=None if arrays.sinks is None else arrays.sinks[3],
        has_alibi=arrays.alibi_slopes is not None,
        out_is_aligned=walked(arrays.o, 1 if fp8_out else 2) is not None,
        cache=PagedCache(
            dtype=cache_dtype,
            num_blocks=sizes["num_blocks"],
            block_size=block_size,
            x=sizes["x"],
            v_pack=0 if pack == block_size else pack,  # then the memory is the same as without
            k_strides=cache_strides[0],
            v_strides=cache_strides[1],
            table_stride=row_stride if b > 1 else columns,
            table_columns=columns,
            table_bytes=8 if table_dtype == "int64" else 4,
            table_has_pointers=has_pointers,
            own_in_cache=arrays.k is None,
            skip_decode=skip_decode,
            k_scale=k_scale,
            v_scale=v_scale,
            out_fp8=fp8_out,
            out_scale=out_scale,
        ),
    )
    return call, copied


def _check_caches(arrays: PrefixArrays, kv_cache_dtype: str, sizes: Sizes) -> str:
    """Check dtypes and shapes of the caches; returns what the host twin calls the dtype."""
    cache_dtype = CACHE_DTYPES[kv_cache_dtype]
    for name, view in (("k_cache", arrays.k_cache), ("v_cache", arrays.v_cache)):
        of_option = f" with kv_cache_dtype {kv_cache_dtype!r}"
        if cache_dtype != "same":
            check_dtype(name, view, _FP8_DTYPES[cache_dtype], of_option)
        elif view[3] in " ".join(_FP8_DTYPES.values()).split():
            raise ValueError(
                f"kv_cache_dtype: expected fp8, fp8_e4m3 or fp8_e5m2 with a {name} of {view[3]}, got "
                f"{kv_cache_dtype!r}"
            )
        else:
            check_dtype(name, view, arrays.q[3], f", the dtype of q,{of_option}")
    _, shape, *_ = arrays.k_cache
    if len(shape) != 5 or not all(shape[1:]) or shape[2] * shape[4] != sizes["d"]:
        raise ValueError(
            f"k_cache: expected shape [num_blocks, h_kv, {sizes['d']} / x, block_size, x] (d is the last "
            f"dimension of q), got {list(shape)}"
        )
    sizes["num_blocks"], sizes["h_kv"], _, sizes["block_size"], sizes["x"] = shape
    check_shape("v_cache", arrays.v_cache, "num_blocks h_kv d block_size", sizes)
    return cache_dtype


def _check_cache_layout(name: str, view: Fields, itemsize: int) -> tuple[int, int]:
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
    of_blocks, of_heads = steps
    return of_blocks, of_heads


def _check_scales(arrays: PrefixArrays) -> None:
    """Check the scales that are arrays."""
    for name in ("k_scale", "v_scale", "fp8_out_scale"):
        view = getattr(arrays, name)
        if view is not None:
            _, shape, _, dtype, *_ = view
            if dtype != "float32":
                raise TypeError(f"{name}: expected a number or an array of dtype float32, got {dtype}")
            if tuple(shape) not in ((), (1,)):
                raise ValueError(f"{name}: expected a number or shape [] or [1], got {list(shape)}")


def _check_o(arrays: PrefixArrays, fp8_out: bool, sizes: Sizes) -> tuple[int, ...]:
    """Check `o` against q; returns its strides but the last."""
    if fp8_out:
        check_dtype("o", arrays.o, _FP8_DTYPES["e4m3"], " with fp8_out_scale")
    else:
        check_dtype("o", arrays.o, arrays.q[3], ", the dtype of q")
    check_shape("o", arrays.o, "tokens h_q d", sizes)
    itemsize = 1 if fp8_out else 2
    return check_out_layout(arrays.o, "o", itemsize, alignment=itemsize)
