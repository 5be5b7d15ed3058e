"""One call of attention over a cache of keys and values, from the arrays to the launch.

It is laid out as `rawmla.mha.forward`.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

from ..call.arguments import Arg, Sizes, check_arguments, check_dtype, check_places, check_shape
from ..call.arrays import READERS, address_of, is_array
from ..call.checks import as_bool, as_int, as_softmax_scale, check_groups, show, usable_strides
from ..call.frameworks import Fields, NewArray
from ..call.memo import Check, Kind, Memo, kind_of
from ..kernels.common import FLOAT_DTYPES
from ..kernels.mha_cached import PreparedCached, decode_tokens, reads_pages
from ..kernels.mha_decode import MhaDecodeCall
from ..kernels.mha_forward import NO_BOUND
from .arguments import (
    NO_WINDOW,
    as_length,
    as_softcap,
    as_window,
    check_chunk,
    check_head_dim,
    check_out_layout,
    check_softcap,
    fresh_out_strides,
    of_three,
    read_strides,
    walked,
)
from .forward import check_slopes, copy_where
from .records import Prepared

_FP8 = "float8_e4m3fn"
_DESCALES = ("q_descale", "k_descale", "v_descale")


class CacheArrays(NamedTuple):
    """Arrays of a call by argument name, as the caller gave them or as `Fields`; None: not given.

    All but the last are in the order of `rawmla.kernels.mha_decode.MhaDecodeAddresses`, which has out and lse
    after the caches.
    """

    q: Any
    k_cache: Any
    v_cache: Any
    k: Any
    v: Any
    rotary_cos: Any
    rotary_sin: Any
    cu_seqlens_q: Any
    cache_seqlens: Any  # or an int
    cu_seqlens_k: Any
    cu_seqlens_k_new: Any
    cache_leftpad: Any
    cache_batch_idx: Any
    block_table: Any
    rotary_seqlens: Any
    attn_sink: Any
    alibi_slopes: Any
    q_descale: Any
    k_descale: Any
    v_descale: Any
    out: Any  # to be written


class CacheOptions(NamedTuple):
    """Checked options of a call, which `cache_options_of` makes."""

    max_seqlen_q: int | None
    """The longest request with cu_seqlens_q; None: it may have all tokens of q."""
    softmax_scale: float | None
    causal: bool
    window: tuple[int, int]
    softcap: float
    rotary_interleaved: bool
    num_splits: int
    """1: a row's sums have one order, whatever the batch is."""


_ALL = as_window(NO_WINDOW)
_kinds: Memo[Kind[Prepared]] = Memo(shared=True)
_latest: Memo[tuple[Kind[Prepared], Check]] = Memo(shared=True)
"""By options and classes of arrays the latest kind and a check of its arrays, if there is one and if the call
copies none.
"""


def cache_options_of(
    max_seqlen_q: Any,
    softmax_scale: Any,
    causal: Any,
    window_size: Any,
    softcap: Any,
    attention_chunk: Any,
    rotary_interleaved: Any,
    num_splits: Any,
) -> CacheOptions:
    """Check the options of the public function."""
    # The common values are accepted without a call: this is on the path of every call.
    if max_seqlen_q is not None:
        max_seqlen_q = as_length("max_seqlen_q", max_seqlen_q)
    if softmax_scale is not None:
        softmax_scale = as_softmax_scale(softmax_scale)
    if causal.__class__ is not bool:
        causal = as_bool("causal", causal)
    window = _ALL if window_size is NO_WINDOW else as_window(window_size)
    if softcap.__class__ is not float or softcap != 0.0:
        softcap = as_softcap(softcap)
    if attention_chunk.__class__ is not int or attention_chunk:
        check_chunk(attention_chunk)
    if rotary_interleaved.__class__ is not bool:
        rotary_interleaved = as_bool("rotary_interleaved", rotary_interleaved)
    if num_splits.__class__ is not int or num_splits < 0:
        num_splits = as_length("num_splits", num_splits)
    options = (max_seqlen_q, softmax_scale, causal, window, softcap, rotary_interleaved, num_splits)
    return tuple.__new__(CacheOptions, options)  # in half the time of a call of the class


def attend_cache(arrays: CacheArrays, options: CacheOptions) -> tuple[Any, Any]:
    """Compute out and lse, and append k and v to the caches."""
    length = arrays.cache_seqlens
    has_length = length is not None and not is_array(length)
    if has_length:
        # A number changes from call to call, so it is no part of what is kept.
        length = max(-NO_BOUND, min(as_int("cache_seqlens", length), NO_BOUND))
        arrays = arrays._replace(cache_seqlens=None)
    options_and_classes = (options, has_length, *map(type, arrays))
    latest, addresses = _latest.get(options_and_classes), None
    if latest is not None:
        kind, is_kind = latest
        addresses = kind.addresses(arrays, is_kind)
    if addresses is None:
        kind, views = _read(arrays, options, has_length)
        addresses = [address_of(view) for view in views]
        if kind.call.copied is None:
            check = kind.check(views)
            if check is None:
                _latest.pop(options_and_classes, None)
            else:
                _latest.keep(options_and_classes, (kind, check))
        elif kind.call.launch is not None:
            (addresses[0], *addresses[3:7]), copies = copy_where(
                kind.call.copied, [views[0], *views[3:7]], _COPIED
            )
    allocate, launch, *_ = kind.call

    pointer = kind.framework.pointer
    if arrays.out is None:
        out, lse, scratch = allocate()
        out_ptr = pointer(out)
    else:
        lse, scratch = allocate()
        out, out_ptr = arrays.out, addresses[-1]
    if launch is not None:
        launch(
            kind.framework.current_stream(kind.device),
            (*addresses[:3], out_ptr, pointer(lse), *addresses[3:-1]),
            0 if scratch is None else pointer(scratch),
            length if has_length else NO_BOUND,
        )
    return out, lse


def _read(
    arrays: CacheArrays, options: CacheOptions, has_length: bool
) -> tuple[Kind[Prepared], list[Fields | None]]:
    """Read the arrays of a call, and find or prepare its kind."""
    views = [
        None if x is None and name not in _REQUIRED else READERS[type(x)](x, name)
        for name, x in zip(CacheArrays._fields, arrays, strict=True)
    ]
    known = (options, has_length, *map(kind_of, views))
    kind = _kinds.get(known)
    if kind is None or kind.call.mixes_frameworks:
        read = CacheArrays._make(views)
        if kind is None:
            kind = _kinds.keep(known, Kind(views, _prepare(read, options, has_length)))
        check_places(read._asdict())
    return kind, views


def takes_any_tokens(is_fp8: bool, block_size: int) -> bool:
    """Whether calls over such pages are meant for requests with any number of query tokens."""
    return not is_fp8 and reads_pages(block_size)


def most_decode_tokens(h_q: int, h_kv: int) -> int:
    """Return for how many query tokens of a request calls over other pages are meant.

    With more they are as exact, but read the keys again for every few tokens.
    """
    return decode_tokens(h_q // h_kv)


_REQUIRED = frozenset(("q", "k_cache", "v_cache"))
_COPIED = ("q", "k", "v", "rotary_cos", "rotary_sin")
"""Arrays that are copied where the kernel cannot walk them."""
_QUERIES = (Arg("cu_seqlens_q", "int32", "b+1", has_rows=True),)
_K_CACHE, _V_CACHE = "num_blocks block_size h_kv d_qk", "num_blocks block_size h_kv d_v"
_OTHERS = (
    Arg("cu_seqlens_k_new", "int32", "b+1", has_rows=True),
    Arg("cache_seqlens", "int32", "b", has_rows=True),
    Arg("cu_seqlens_k", "int32", "b+1", has_rows=True),
    Arg("cache_leftpad", "int32", "b", has_rows=True),
    Arg("cache_batch_idx", "int32", "b", has_rows=True),
    Arg("block_table", "int32", "rows columns", has_rows=True),
    Arg("rotary_cos", "=q", "rotary_rows rotary_columns"),
    Arg("rotary_sin", "=q", "rotary_rows rotary_columns"),
    Arg("rotary_seqlens", "int32", "b", has_rows=True),
    Arg("attn_sink", " ".join(FLOAT_DTYPES), "h_q", has_rows=True),
)


def _check_call(
    arrays: CacheArrays, options: CacheOptions, has_length: bool
) -> tuple[dict[str, Any], tuple[bool, ...]]:
    """Check the arrays and the numbers of a call.

    Returns the fields of `MhaDecodeCall` without the strides of results, and which of q, k, v, rotary_cos and
    rotary_sin have to be copied.
    """
    views = arrays._asdict()
    _check_combination(arrays, options, has_length)
    q, varlen_q, varlen_new = arrays.q, arrays.cu_seqlens_q is not None, arrays.cu_seqlens_k_new is not None
    sizes = Sizes()
    is_fp8 = arrays.k_cache[3] == _FP8
    q_fp8 = is_fp8 and q[3] == _FP8
    if not q_fp8:
        check_dtype("q", q, "bfloat16 float16", " (float32 is not supported)")
    if varlen_q:
        check_arguments(_QUERIES, views, sizes)
        sizes["b"] = sizes["b+1"] - 1
        if sizes["b"] < 0:
            raise ValueError("cu_seqlens_q: expected shape [b+1], got [0]")
    rows = "total_q" if varlen_q else "b s_q"
    check_shape("q", q, f"{rows} h_q d_qk", sizes)
    sizes["b+1"] = sizes["b"] + 1
    of_new = "total_new" if varlen_new else "b s_new"
    table = (
        Arg("k_cache", _FP8 if is_fp8 else "=q", _K_CACHE),
        Arg("v_cache", "=k_cache", _V_CACHE),
        Arg("k", "=k_cache", f"{of_new} h_kv d_qk"),
        Arg("v", "=k_cache", f"{of_new} h_kv d_v"),
        *_OTHERS,
        *[Arg(name, "float32", "b h_kv") for name in _DESCALES if q_fp8 or is_fp8 and name != "q_descale"],
        Arg("out", "bfloat16" if q_fp8 else "=q", f"{rows} h_q d_v"),
    )
    check_arguments(table, views, sizes)
    b, h_q, h_kv, d_qk, d_v = [sizes[dim] for dim in ("b", "h_q", "h_kv", "d_qk", "d_v")]
    check_groups(h_q, h_kv, "q", "k_cache")
    for name, dimension, size in (("q", "d_qk", d_qk), ("v_cache", "d_v", d_v)):
        shape = views[name][1]
        check_head_dim(name, f"a last dimension ({dimension})", size, shape)
        if size % _unit(is_fp8):
            raise ValueError(
                f"{name}: expected a last dimension ({dimension}) that is a multiple of {_unit(is_fp8)}, 16 "
                f"bytes of the cache, which is never copied, got shape {list(shape)}"
            )
    if is_fp8 and arrays.rotary_cos is not None:
        raise ValueError(
            f"rotary_cos: expected None with a cache of {_FP8}, got an array; rotate q and k before the call"
        )
    for name in ("q", "k"):
        view = views[name]
        if view is not None and prod(view[1][:-2]) >= NO_BOUND:
            raise ValueError(f"{name}: expected less than 2**30 tokens, got shape {list(view[1])}")
    if q[1][-3] * (h_q // h_kv) >= NO_BOUND:
        raise ValueError(f"q: expected less than 2**30 tokens times h_q / h_kv, got shape {list(q[1])}")
    alibi_stride_b = 0 if arrays.alibi_slopes is None else check_slopes(arrays.alibi_slopes, sizes)
    check_places(views)
    softmax_scale = d_qk**-0.5 if options.softmax_scale is None else options.softmax_scale
    check_softcap(softmax_scale, options.softcap)

    total_q = q[1][-3]
    longest = total_q if options.max_seqlen_q is None else options.max_seqlen_q
    cache = _cache_fields(arrays, sizes)
    left, right = options.window
    # A window that hides nothing is none: then queries are not rotated by their positions.
    if left >= cache["block_size"] * cache["table_columns"] - 1:
        left = NO_BOUND
    if right >= longest - 1:
        right = NO_BOUND
    if options.causal:
        right = 0
    (q_strides,), (q_copied,) = read_strides(q) if not q_fp8 else ([_fp8_strides("q", q)], (False,))
    if is_fp8:
        new_strides = [_fp8_strides(name, views[name]) for name in ("k", "v")]
        copied: tuple[bool, ...] = (q_copied, False, False)
    else:
        new_strides, new_copied = read_strides(arrays.k, arrays.v)
        copied = (q_copied, *new_copied)
    angles = [view is not None and _is_scattered(view) for view in (arrays.rotary_cos, arrays.rotary_sin)]
    fields = dict(
        device=q[4], dtype="bfloat16" if q_fp8 else q[3], b=b, h_q=h_q, h_kv=h_kv, d_qk=d_qk, d_v=d_v,
        varlen_q=varlen_q, varlen_new=varlen_new, max_seqlen_q=min(longest, total_q), total_q=total_q,
        seqlen_new=sizes.get("s_new", sizes.get("total_new", 0)),
        total_new=sizes.get("s_new", sizes.get("total_new", 0)),
        q_strides=q_strides, k_new_strides=new_strides[0], v_new_strides=new_strides[1], **cache,
        cache_fp8=is_fp8, q_fp8=q_fp8, descale_strides=_descale_strides(arrays) if is_fp8 else ((0, 0),) * 3,
        softmax_scale=softmax_scale, window_left=left, window_right=right, softcap=options.softcap,
        rotary_dim=2 * sizes.get("rotary_columns", 0), rotary_rows=sizes.get("rotary_rows", 0),
        rotary_interleaved=options.rotary_interleaved, rotates_by_token=min(left, right) < NO_BOUND,
        sink_dtype=None if arrays.attn_sink is None else arrays.attn_sink[3],
        has_alibi=arrays.alibi_slopes is not None, alibi_stride_b=alibi_stride_b,
        is_whole=options.num_splits == 1,
    )  # fmt: skip
    rotary_dim = fields["rotary_dim"]
    if rotary_dim % 16 or rotary_dim > d_qk or rotary_dim and not fields["rotary_rows"]:
        raise ValueError(
            "rotary_cos: expected shape [rows, rotary_dim / 2], at least one row, where rotary_dim is a "
            f"multiple of 16 and at most the d_qk {d_qk} of q, got {list(arrays.rotary_cos[1])}"
        )
    return fields, (*copied, *angles)


def _check_combination(arrays: CacheArrays, options: CacheOptions, has_length: bool) -> None:
    """Check which arguments are given together."""
    for one, other in (("k", "v"), ("rotary_cos", "rotary_sin")):
        given = [getattr(arrays, name) is not None for name in (one, other)]
        if given[0] != given[1]:
            missing, there = (one, other) if given[1] else (other, one)
            raise ValueError(f"{missing}: expected an array, as {there} is one, or both None, got None")
    lengths = [name for name in ("cache_seqlens", "cu_seqlens_k") if getattr(arrays, name) is not None] + [
        "cache_seqlens"
    ] * has_length
    if len(lengths) > 1:
        raise ValueError("cu_seqlens_k: expected None with cache_seqlens, got both")
    if arrays.k is not None and not lengths:
        raise ValueError("cache_seqlens: expected the positions to append k at, got None")
    if arrays.k is None:
        for name in ("rotary_cos", "rotary_seqlens"):
            if getattr(arrays, name) is not None:
                raise ValueError(f"{name}: expected None without k, as nothing is rotated, got an array")
    if arrays.rotary_cos is None and arrays.rotary_seqlens is not None:
        raise ValueError("rotary_seqlens: expected None without rotary_cos, got an array")
    if arrays.cu_seqlens_q is None and options.max_seqlen_q is not None:
        raise ValueError(
            f"max_seqlen_q: expected None without cu_seqlens_q, got {show(options.max_seqlen_q)}"
        )


def _cache_fields(arrays: CacheArrays, sizes: Sizes) -> dict[str, Any]:
    """Check the layout of the caches; returns the fields of `MhaDecodeCall` that describe them."""
    b, num_blocks, block_size = sizes["b"], sizes["num_blocks"], sizes["block_size"]
    columns = table_rows = table_stride = 0
    if block_size >= NO_BOUND:
        raise ValueError(
            f"k_cache: expected less than 2**30 tokens in a row or page, got shape {list(arrays.k_cache[1])}"
        )
    if arrays.block_table is None:
        if arrays.cache_batch_idx is None and num_blocks < b:
            raise ValueError(
                f"k_cache: expected at least {b} rows, one of each request, without block_table and "
                f"cache_batch_idx, got shape {list(arrays.k_cache[1])}"
            )
        columns = 1
    else:
        table_rows = sizes["rows"]
        columns = sizes["columns"] if table_rows else 0  # the address of an empty table may be 0
        if arrays.cache_batch_idx is None and table_rows < b:
            raise ValueError(
                f"block_table: expected at least {b} rows, one of each request, got shape "
                f"{list(arrays.block_table[1])}"
            )
        table_stride = usable_strides(*arrays.block_table[1:3])[0]
    strides = []
    for name in ("k_cache", "v_cache"):
        view = getattr(arrays, name)
        itemsize = 1 if view[3] == _FP8 else 2
        steps = walked(view, itemsize)
        if arrays.k is not None and steps is not None:
            check_out_layout(view, name, itemsize)  # no element twice
        if steps is None:
            raise ValueError(
                f"{name}: expected a 16-byte aligned address, a contiguous last dimension and other strides "
                f"that are multiples of {16 // itemsize} and not negative, got address {view[0]:#x}, strides "
                f"{list(view[2])} (elements)"
            )
        strides.append(of_three(steps))
    most = (NO_BOUND - 1) // max(block_size, 1)
    return {
        "num_blocks": num_blocks,
        "block_size": max(block_size, 1),
        "table_rows": table_rows,
        "table_columns": min(columns, most) if block_size else 0,
        "table_stride": table_stride,
        "k_strides": strides[0],
        "v_strides": strides[1],
    }


def _unit(is_fp8: bool) -> int:
    """Elements of the cache in 16 bytes, of which head dimensions are multiples."""
    return 16 if is_fp8 else 8


def _fp8_strides(name: str, view: Fields | None) -> tuple[int, int, int]:
    """Check the layout of an FP8 array that may be None; returns its strides."""
    if view is None:
        return 0, 0, 0
    steps = walked(view, 1)
    if steps is None:
        raise ValueError(
            f"{name}: expected a 16-byte aligned address, a contiguous last dimension and other strides that "
            f"are multiples of 16 and not negative, got address {view[0]:#x}, strides {list(view[2])} "
            "(elements)"
        )
    return of_three(steps)


def _descale_strides(arrays: CacheArrays) -> tuple[tuple[int, int], ...]:
    strides = []
    for name in _DESCALES:
        view = getattr(arrays, name)
        batch, head = (0, 0) if view is None else usable_strides(*view[1:3])
        strides.append((batch, head))
    return tuple(strides)


def _is_scattered(view: Fields) -> bool:
    """Whether the kernel, which reads contiguous rows of angles, cannot read this array."""
    _, shape, strides, *_ = view
    return usable_strides(shape, strides) != (shape[1], 1)


def _prepare(arrays: CacheArrays, options: CacheOptions, has_length: bool) -> Prepared:
    """Check a call, load its kernels and work out their parameters."""
    fields, copied = _check_call(arrays, options, has_length)
    _, q_shape, _, _, device, framework, _ = arrays.q
    b, h_q, d_v, total_q = [fields[name] for name in ("b", "h_q", "d_v", "total_q")]
    results: list[NewArray] = []
    if arrays.out is None:
        out_steps = fresh_out_strides(arrays.q, d_v)
        results.append(((*q_shape[:-1], d_v), fields["dtype"], out_steps))
        fields["out_strides"] = of_three(out_steps[:-1])
    else:
        fields["out_strides"] = of_three(check_out_layout(arrays.out))
    if fields["varlen_q"]:
        results.append(((total_q, h_q), "float32", (1, max(total_q, 1))))
        fields["lse_strides"] = (0, total_q)
    else:
        results.append(((b, h_q, total_q), "float32"))
        fields["lse_strides"] = (h_q * total_q, total_q)
    kernels = None
    if b and (fields["max_seqlen_q"] or fields["seqlen_new"]):
        serves_long = not (has_length or fields["cache_fp8"]) and not any(
            [arrays.rotary_cos, arrays.cache_leftpad]
        )
        paged = arrays.block_table is not None
        kernels = PreparedCached(MhaDecodeCall(**fields), paged, serves_long, framework.capture_query(device))
    return Prepared.of(arrays._asdict(), results, kernels, copied)
