"""Dense decoding: the calls of `flash_mla_with_kvcache` without `indices`.

`decode` is one call from the arrays to the launch. What depends on the kinds of q and the cache alone is in
`_Checked`, and what depends on the rest of the call's kind in a `PreparedCall`; both are kept.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from ..call.arrays import READERS, Fields
from ..call.checks import (
    INT32_MAX,
    as_softmax_scale,
    check_place,
    check_vector,
    strides_fit,
    usable_strides,
)
from ..call.memo import BatchPlace, LatestPair, Memo, PreparedCall, kind_of
from ..kernels import mla_dense_decode, mla_metadata
from ..kernels.common import D_V, MAX_GRID_YZ, TILE_ROWS
from ..kernels.mla_dense_decode import DenseDecodeCall, largest_dividend
from .arguments import QStrides, check_out, check_q_width, check_rows, q_strides, read_pair
from .plan import PlanConfigs, SchedConfig, compute_plan, mark_plan, resolve_plan

__all__ = ["decode"]


def decode(
    q: Any,
    k_cache: Any,
    block_table: Any,
    cache_seqlens: Any,
    tile_scheduler_metadata: Any,
    num_splits: Any,
    softmax_scale: float | None,
    causal: bool,
    out: Any,
    enable_batch_invariant: bool,
) -> tuple[Any, Any]:
    """`flash_mla_with_kvcache` without `indices`; booleans are checked already."""
    rope_view = None
    if q.__class__ is tuple:
        q_view, rope_view = read_pair(q)
    else:
        q_view = READERS[type(q)](q, "q")
    k_view = READERS[type(k_cache)](k_cache, "k_cache")
    q_ptr, q_shape, q_steps, dtype, device, framework, q_array = q_view
    k_ptr, k_shape, k_steps, k_dtype, k_device, k_framework, _ = k_view
    # One flat tuple: two of `kind_of` would take twice as long to build and to look up.
    kind = (
        q_ptr & 15, q_shape, q_steps, dtype, device, framework,
        k_ptr & 15, k_shape, k_steps, k_dtype, k_device, k_framework,
        rope_view if rope_view is None else kind_of(rope_view),
    )  # fmt: skip
    latest_kind, checked = _checked.latest
    if latest_kind != kind:  # layers repeat one kind, and comparing takes half the time of hashing
        checked = _checked.get(kind) or _checked.keep(kind, _check(q_view, rope_view, k_view))
        _checked.latest = kind, checked
    b, s_q, place, q_is_copied, rope_bytes, default_scale, configs_by_causal, calls, _ = checked
    if k_framework is not framework:
        check_place("k_cache", k_view, device, framework, "q")
    if rope_view is not None:
        check_place("q_rope", rope_view, device, framework, "q")
    softmax_scale = default_scale if softmax_scale is None else as_softmax_scale(softmax_scale)
    out_view = out_kind = None
    if out is not None:
        out_view = READERS[type(out)](out, "out")
        out_kind = kind_of(out_view)
        out_ptr, _, _, _, _, out_framework, _ = out_view
        if out_framework is not framework:
            check_place("out", out_view, device, framework, "q")
    requests = _latest_requests.find(block_table, cache_seqlens, place) or _check_requests(
        block_table, cache_seqlens, place
    )
    table_ptr, table_stride, max_blocks, lengths_ptr, _owners = requests
    configs = configs_by_causal[causal]
    plan = resolve_plan(tile_scheduler_metadata, num_splits, enable_batch_invariant, configs, place)
    arrays, num_parts, is_object, batch_invariant, unmarked = plan
    if not b or not s_q:
        return _empty_results(checked, out, out_view, q_view)

    key = (
        table_stride, max_blocks, num_parts, is_object, batch_invariant, out_kind, softmax_scale, causal
    )  # fmt: skip
    call = calls.get(key) or calls.keep(key, _prepare(checked, key, q_view, out_view))
    allocate, launch = call
    if q_is_copied:
        q_array = framework.contiguous_copy(q_array, "q")
        q_ptr = framework.pointer(q_array)
    if arrays is None:
        tokens = mla_metadata.TokenCounts(lengths_ptr)
        arrays = compute_plan(plan, b, tokens, device, framework)
    sched_meta, num_splits_ptr, _, _ = arrays
    if out is None:
        out, lse, scratch = allocate()
        out_ptr = framework.pointer(out)
    else:
        lse, scratch = allocate()
    # In the order of DenseDecodeAddresses, which would take a hundredth of the call to build.
    addresses = (
        q_ptr, q_ptr + rope_bytes if rope_view is None else rope_view[0], k_ptr, table_ptr, lengths_ptr,
        sched_meta, num_splits_ptr, out_ptr, framework.pointer(lse),
    )  # fmt: skip
    launch(framework.current_stream(device), addresses, 0 if scratch is None else framework.pointer(scratch))
    if unmarked is not None:
        mark_plan(plan, configs, arrays)
    return out, lse


class _Sizes(NamedTuple):
    """The sizes of q and the cache, and their strides in elements."""

    h_q: int
    h_kv: int
    d_qk: int
    page_block_size: int
    num_blocks: int
    k_strides: tuple[int, ...]
    q_strides: QStrides


class _Checked(NamedTuple):
    """What follows from the kinds of q and the cache, which passed the checks."""

    b: int
    s_q: int
    place: BatchPlace
    q_is_copied: bool  # a contiguous copy is needed
    rope_bytes: int  # from q to its RoPE columns, unless they are an array of their own
    default_scale: float
    configs: tuple[PlanConfigs, PlanConfigs]  # by causal
    calls: Memo[PreparedCall]
    sizes: _Sizes


_checked: Memo[_Checked] = Memo(shared=True)


def _check(q: Fields, q_rope: Fields | None, k_cache: Fields) -> _Checked:
    """Check q, of which RoPE may be an array of its own, and the cache against each other."""
    _, shape, strides, dtype, device, framework, _ = q
    if dtype != "bfloat16" and dtype != "float16":
        raise TypeError(f"q: expected dtype bfloat16 or float16, got {dtype}")
    if len(shape) != 4:
        raise ValueError(f"q: expected shape [b, s_q, h_q, d_qk], got {list(shape)}")
    b, s_q, h_q, _ = shape
    d_qk = check_q_width(q, q_rope)
    if strides[3] != 1:
        raise ValueError(f"q: expected a contiguous last dimension, got strides {list(strides)} (elements)")
    check_rows(shape)

    ptr, shape, strides, k_dtype, _, _, _ = k_cache
    if k_dtype != dtype:
        raise TypeError(f"k_cache: expected dtype {dtype}, that of q, got {k_dtype}")
    if len(shape) != 4:
        raise ValueError(
            f"k_cache: expected shape [num_blocks, page_block_size, h_kv, d_qk], got {list(shape)}"
        )
    num_blocks, page_block_size, h_kv, k_dim = shape
    if k_dim != d_qk:
        raise ValueError(f"k_cache: expected a last dimension of {d_qk}, that of q, got shape {list(shape)}")
    if page_block_size & 63 and page_block_size not in (16, 32) or not 0 < page_block_size <= INT32_MAX:
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
    if h_kv > MAX_GRID_YZ:
        raise ValueError(f"k_cache: expected at most {MAX_GRID_YZ} KV heads, got shape {list(shape)}")
    heads = h_q // h_kv
    most_rows = (largest_dividend(heads) + 1) // TILE_ROWS * TILE_ROWS  # the last tile is divided whole
    if s_q * heads > most_rows:
        raise ValueError(
            f"q: expected at most {most_rows} rows of a KV head (s_q * h_q / h_kv) with h_q / h_kv = {heads}"
            f", got {s_q * heads}"
        )
    if strides[3] != 1:
        raise ValueError(
            f"k_cache: expected a contiguous last dimension, got strides {list(strides)} (elements)"
        )
    check_place("k_cache", k_cache, device, framework, "q")
    k_strides = usable_strides(shape, strides)
    if not strides_fit(ptr, shape, k_strides):
        raise ValueError(
            "k_cache: expected a 16-byte aligned address and strides that are positive multiples of 8 "
            f"elements (TMA), got address {ptr:#x}, shape {list(shape)}, strides {list(strides)} (elements)"
        )
    strides_of_q = q_strides(q, q_rope, d_qk)
    config = SchedConfig(b, s_q, h_q, page_block_size, h_kv, causal=False)
    return _Checked(
        b=b,
        s_q=s_q,
        place=BatchPlace(b, device, framework),
        q_is_copied=strides_of_q.is_copied,
        rope_bytes=strides_of_q.rope_bytes,
        default_scale=d_qk**-0.5,
        configs=(PlanConfigs.of(config), PlanConfigs.of(replace(config, causal=True))),
        calls=Memo(),
        sizes=_Sizes(h_q, h_kv, d_qk, page_block_size, num_blocks, k_strides[:3], strides_of_q),
    )


class _Requests(NamedTuple):
    """Where the requests of a batch lie in the cache: device addresses, and sizes in elements."""

    table_ptr: int
    table_stride: int
    max_blocks: int
    lengths_ptr: int
    owners: tuple[Any, ...]
    """Keep arrays of other libraries alive during the call."""


_latest_requests = LatestPair()


def _check_requests(block_table: Any, cache_seqlens: Any, place: BatchPlace) -> _Requests:
    """Check the block table and the lengths of a call's requests."""
    b, device, framework = place
    table = READERS[type(block_table)](block_table, "block_table")
    lengths = READERS[type(cache_seqlens)](cache_seqlens, "cache_seqlens")
    table_ptr, shape, strides, dtype, _, _, table_owner = table
    if dtype != "int32":
        raise TypeError(f"block_table: expected dtype int32, got {dtype}")
    if len(shape) != 2 or shape[0] != b:
        raise ValueError(f"block_table: expected shape [{b}, max_blocks] (b is that of q), got {list(shape)}")
    if strides[1] != 1 and shape[1] > 1:
        raise ValueError(
            f"block_table: expected a contiguous last dimension, got strides {list(strides)} (elements)"
        )
    check_place("block_table", table, device, framework, "q")
    check_vector("cache_seqlens", lengths, ("int32",), b, "b is that of q")
    check_place("cache_seqlens", lengths, device, framework, "q")
    lengths_ptr, _, _, _, _, _, lengths_owner = lengths
    requests = _Requests(table_ptr, strides[0], shape[1], lengths_ptr, (table_owner, lengths_owner))
    kept = requests._replace(owners=())
    _latest_requests.keep(block_table, cache_seqlens, place, (table, lengths), kept)
    return requests


def _empty_results(checked: _Checked, out: Any, out_view: Fields | None, q: Fields) -> tuple[Any, Any]:
    """The results of a call without query tokens."""
    _, _, _, dtype, device, framework, _ = q
    b, s_q, h_q = checked.b, checked.s_q, checked.sizes.h_q
    if out_view is None:
        out = framework.empty((b, s_q, h_q, D_V), dtype, device)
    else:
        check_out(out_view, q)
    return out, framework.empty((b, h_q, s_q), "float32", device)


def _prepare(checked: _Checked, key: tuple[Any, ...], q: Fields, out_view: Fields | None) -> PreparedCall:
    """Load the kernels of a call and work out their parameters."""
    table_stride, max_blocks, num_parts, is_object, batch_invariant, _, softmax_scale, causal = key
    b, s_q = checked.b, checked.s_q
    h_q, h_kv, d_qk, page_block_size, num_blocks, k_strides, strides_of_q = checked.sizes
    max_seqlen = min(max_blocks * page_block_size, INT32_MAX)
    # A token's page is its number / 16, divided by that of the page's size.
    most_tokens = 16 * (largest_dividend(page_block_size // 16) + 1)
    if max_seqlen > most_tokens:
        raise ValueError(
            f"block_table: expected max_blocks * page_block_size of at most {most_tokens} tokens with a "
            f"page_block_size of {page_block_size}, got {max_blocks} blocks"
        )
    _, _, _, dtype, device, framework, _ = q
    results = [((b, s_q, h_q, D_V), dtype), ((b, h_q, s_q), "float32")]
    if out_view is None:
        out_strides: tuple[int, ...] = (s_q * h_q * D_V, h_q * D_V, D_V)
    else:
        out_strides = check_out(out_view, q)
        del results[0]
    k_stride_block, k_stride_token, k_stride_head = k_strides
    out_stride_b, out_stride_s, out_stride_h = out_strides
    prepared = mla_dense_decode.PreparedDenseDecode(
        DenseDecodeCall(
            device=device,
            dtype=dtype,
            b=b,
            s_q=s_q,
            h_q=h_q,
            h_kv=h_kv,
            d_qk=d_qk,
            page_block_size=page_block_size,
            num_blocks=num_blocks,
            q_strides=strides_of_q.q,
            q_rope_strides=strides_of_q.q_rope,
            k_stride_block=k_stride_block,
            k_stride_token=k_stride_token,
            k_stride_head=k_stride_head,
            block_table_stride=table_stride,
            max_seqlen=max_seqlen,
            num_parts=num_parts,
            object_layout=is_object,
            batch_invariant=batch_invariant,
            out_stride_b=out_stride_b,
            out_stride_s=out_stride_s,
            out_stride_h=out_stride_h,
            softmax_scale=softmax_scale,
            causal=causal and s_q > 1,
        ),
        framework.capture_query(device),
    )
    return PreparedCall(framework.allocator(results, prepared.scratch_bytes, device), prepared.launch)
