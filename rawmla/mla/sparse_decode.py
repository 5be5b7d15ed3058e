"""Sparse decoding: the calls of `flash_mla_with_kvcache` with `indices`.

`decode` is one call from the arrays to the launch, laid out as in `rawmla.mla.dense_decode`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..call.arrays import READERS, Fields, address_of, read_given
from ..call.checks import as_softmax_scale, check_streams, mixes_frameworks
from ..call.memo import BatchPlace, Memo, PreparedCall, kind_of
from ..kernels import mla_metadata, mla_sparse
from ..kernels.common import D_V
from ..kernels.mla_sparse import NO_CACHE, Cache, SparseCall
from .arguments import (
    QStrides,
    check_out,
    check_selection,
    check_sparse_cache,
    check_sparse_q,
    check_vectors,
    q_strides,
    read_pair,
)
from .plan import PlanConfigs, SchedConfig, compute_plan, mark_plan, resolve_plan

__all__ = ["decode"]


class _Arrays(NamedTuple):
    """The arrays of a call by the names of the arguments; None: not given."""

    q: Fields
    q_rope: Fields | None  # RoPE of q, if it is an array of its own
    k_cache: Fields
    indices: Fields
    topk_length: Fields | None
    extra_k_cache: Fields | None
    extra_indices_in_kvcache: Fields | None
    extra_topk_length: Fields | None
    attn_sink: Fields | None
    out: Fields | None


class _Sizes(NamedTuple):
    """The sizes of the arrays, and their strides in elements."""

    format: str  # as in SparseCall
    h_q: int
    d_qk: int
    load_bytes: int  # what addresses of cache rows are multiples of
    cache: Cache
    extra: Cache  # NO_CACHE: there is none
    q_strides: QStrides
    out_strides: tuple[int, ...]


class _Checked(NamedTuple):
    """What follows from the kinds of the arrays, which passed the checks."""

    b: int
    s_q: int
    place: BatchPlace
    mixes_frameworks: bool  # some arrays are of another framework than q
    q_is_copied: bool  # a contiguous copy is needed
    rope_bytes: int  # from q to its RoPE columns, unless they are an array of their own
    default_scale: float
    configs: PlanConfigs
    calls: Memo[PreparedCall]
    sizes: _Sizes


_checked: Memo[_Checked] = Memo(shared=True)


def decode(
    q: Any,
    k_cache: Any,
    tile_scheduler_metadata: Any,
    num_splits: Any,
    softmax_scale: float | None,
    is_fp8_kvcache: bool,
    indices: Any,
    attn_sink: Any,
    extra_k_cache: Any,
    extra_indices_in_kvcache: Any,
    topk_length: Any,
    extra_topk_length: Any,
    out: Any,
    enable_batch_invariant: bool,
) -> tuple[Any, Any]:
    """`flash_mla_with_kvcache` with `indices`; booleans are checked already."""
    rope_view = None
    if q.__class__ is tuple:
        q_view, rope_view = read_pair(q)
    else:
        q_view = READERS[type(q)](q, "q")
    k_view = READERS[type(k_cache)](k_cache, "k_cache")
    indices_view = READERS[type(indices)](indices, "indices")
    # Most calls leave out most of the others, and a function call for each would be a twentieth of the time.
    length_view = None if topk_length is None else READERS[type(topk_length)](topk_length, "topk_length")
    extra_view = extra_indices_view = extra_length_view = extra_kind = None
    if not (extra_k_cache is extra_indices_in_kvcache is extra_topk_length is None):
        extra_view = read_given(extra_k_cache, "extra_k_cache")
        extra_indices_view = read_given(extra_indices_in_kvcache, "extra_indices_in_kvcache")
        extra_length_view = read_given(extra_topk_length, "extra_topk_length")
        extra_kind = kind_of(extra_view), kind_of(extra_indices_view), kind_of(extra_length_view)
    sink_view = None if attn_sink is None else READERS[type(attn_sink)](attn_sink, "attn_sink")
    out_view = None if out is None else READERS[type(out)](out, "out")
    # In the order of _Arrays, which only checks need.
    views = (
        q_view, rope_view, k_view, indices_view, length_view, extra_view, extra_indices_view,
        extra_length_view, sink_view, out_view,
    )  # fmt: skip
    q_ptr, q_shape, q_steps, dtype, device, framework, q_array = q_view
    k_ptr, k_shape, k_steps, k_dtype, k_device, k_framework, _ = k_view
    index_ptr, index_shape, index_steps, index_dtype, index_device, index_framework, _ = indices_view
    # One flat tuple of what every call has, as in dense decoding.
    kind = (
        is_fp8_kvcache,
        q_ptr & 15, q_shape, q_steps, dtype, device, framework,
        k_ptr & 15, k_shape, k_steps, k_dtype, k_device, k_framework,
        index_ptr & 15, index_shape, index_steps, index_dtype, index_device, index_framework,
        rope_view if rope_view is None else kind_of(rope_view),
        length_view if length_view is None else kind_of(length_view),
        sink_view if sink_view is None else kind_of(sink_view),
        out_view if out_view is None else kind_of(out_view),
        extra_kind,
    )  # fmt: skip
    latest_kind, checked = _checked.latest
    if latest_kind != kind:  # layers repeat one kind, and comparing takes half the time of hashing
        checked = _checked.get(kind) or _checked.keep(kind, _check(is_fp8_kvcache, _Arrays(*views)))
        _checked.latest = kind, checked
    b, s_q, place, mixes_frameworks, q_is_copied, rope_bytes, default_scale, configs, calls, _ = checked
    if mixes_frameworks:
        check_streams(_Arrays(*views), device, framework)
    softmax_scale = default_scale if softmax_scale is None else as_softmax_scale(softmax_scale)
    plan = resolve_plan(tile_scheduler_metadata, num_splits, enable_batch_invariant, configs, place)
    plan_arrays, num_parts, is_object, batch_invariant, unmarked = plan
    if not b or not s_q:
        return _empty_results(checked, out, q_view)

    key = (num_parts, is_object, batch_invariant, softmax_scale)
    call = calls.get(key) or calls.keep(key, _prepare(checked, key, _Arrays(*views)))
    allocate, launch = call
    if q_is_copied:
        q_array = framework.contiguous_copy(q_array, "q")
        q_ptr = framework.pointer(q_array)
    topk_length_ptr = 0 if length_view is None else length_view[0]
    extra_ptr = extra_indices_ptr = extra_topk_length_ptr = 0
    if extra_kind is not None:
        extra_ptr, extra_indices_ptr = address_of(extra_view), address_of(extra_indices_view)
        extra_topk_length_ptr = address_of(extra_length_view)
    if plan_arrays is None:
        topk, extra_topk = checked.sizes.cache.topk, checked.sizes.extra.topk
        tokens = mla_metadata.TokenCounts(topk_length_ptr, extra_topk_length_ptr, topk, extra_topk)
        plan_arrays = compute_plan(plan, b, tokens, device, framework)
    sched_meta, num_splits_ptr, _, _ = plan_arrays
    if out_view is None:
        out, lse, scratch = allocate()
        out_ptr = framework.pointer(out)
    else:
        lse, scratch = allocate()
        out_ptr = out_view[0]
    # In the order of SparseAddresses, which would take a twentieth of the call to build.
    addresses = (
        q_ptr, q_ptr + rope_bytes if rope_view is None else rope_view[0], k_ptr, extra_ptr, index_ptr,
        extra_indices_ptr, topk_length_ptr, extra_topk_length_ptr, 0 if sink_view is None else sink_view[0],
        sched_meta, num_splits_ptr, out_ptr, framework.pointer(lse), 0, 0,
    )  # fmt: skip
    launch(framework.current_stream(device), addresses, 0 if scratch is None else framework.pointer(scratch))
    if unmarked is not None:
        mark_plan(plan, configs, plan_arrays)
    return out, lse


def _check(is_fp8_kvcache: bool, arrays: _Arrays) -> _Checked:
    """Check the arrays of a call against each other."""
    q, d_qk = check_sparse_q(arrays, ("b", "s_q", "h_q", "d_qk"), " with indices")
    _, (b, s_q, h_q, _), _, _, device, framework, _ = q
    extra_given = [arrays.extra_k_cache is not None, arrays.extra_indices_in_kvcache is not None]
    if any(extra_given) != all(extra_given):
        missing = "extra_indices_in_kvcache" if extra_given[0] else "extra_k_cache"
        raise ValueError(f"{missing}: expected an array, as the other of the two was given, got None")
    if arrays.extra_topk_length is not None and not all(extra_given):
        raise ValueError("extra_topk_length: expected None without extra_k_cache, got an array")
    of_q = "b and s_q are those of q"
    format, cache, load_bytes = check_sparse_cache("k_cache", arrays.k_cache, d_qk, is_fp8_kvcache)
    cache = check_selection(cache, "indices", arrays.indices, b, s_q, of_q)
    extra = NO_CACHE
    if arrays.extra_k_cache is not None and arrays.extra_indices_in_kvcache is not None:
        name = "extra_k_cache"
        _, extra, extra_load_bytes = check_sparse_cache(name, arrays.extra_k_cache, d_qk, is_fp8_kvcache)
        name = "extra_indices_in_kvcache"
        extra = check_selection(extra, name, arrays.extra_indices_in_kvcache, b, s_q, of_q)
        load_bytes = min(load_bytes, extra_load_bytes)
    check_vectors(
        arrays,
        {
            "topk_length": ("int32", b, "b"),
            "extra_topk_length": ("int32", b, "b"),
            "attn_sink": ("float32", h_q, "h_q"),
        },
    )
    config = SchedConfig(
        b,
        s_q,
        h_q,
        cache.page_block_size,
        1,
        causal=False,
        is_fp8_kvcache=is_fp8_kvcache,
        topk=cache.topk,
        extra_page_block_size=extra.page_block_size if extra is not NO_CACHE else None,
        extra_topk=extra.topk or None,
    )
    strides = q_strides(q, arrays.q_rope, d_qk)
    return _Checked(
        b=b,
        s_q=s_q,
        place=BatchPlace(b, device, framework),
        mixes_frameworks=mixes_frameworks(arrays),
        q_is_copied=strides.is_copied,
        rope_bytes=strides.rope_bytes,
        default_scale=d_qk**-0.5,
        configs=PlanConfigs.of(config),
        calls=Memo(),
        sizes=_Sizes(
            format=format,
            h_q=h_q,
            d_qk=d_qk,
            load_bytes=load_bytes,
            cache=cache,
            extra=extra,
            q_strides=strides,
            out_strides=(s_q * h_q * D_V, h_q * D_V, D_V) if arrays.out is None else check_out(arrays.out, q),
        ),
    )


def _empty_results(checked: _Checked, out: Any, q: Fields) -> tuple[Any, Any]:
    """The results of a call without query tokens."""
    _, _, _, dtype, device, framework, _ = q
    b, s_q, h_q = checked.b, checked.s_q, checked.sizes.h_q
    if out is None:
        out = framework.empty((b, s_q, h_q, D_V), dtype, device)
    return out, framework.empty((b, h_q, s_q), "float32", device)


def _prepare(checked: _Checked, key: tuple[Any, ...], arrays: _Arrays) -> PreparedCall:
    """Load the kernels of a call and work out their parameters."""
    num_parts, is_object, batch_invariant, softmax_scale = key
    b, s_q = checked.b, checked.s_q
    format, h_q, d_qk, load_bytes, cache, extra, strides_of_q, out_strides = checked.sizes
    _, _, _, dtype, device, framework, _ = arrays.q
    results = [((b, s_q, h_q, D_V), dtype), ((b, h_q, s_q), "float32")]
    if arrays.out is not None:
        del results[0]
    prepared = mla_sparse.PreparedSparse(
        SparseCall(
            device=device,
            format=format,
            d_qk=d_qk,
            load_bytes=load_bytes,
            b=b,
            s_q=s_q,
            h_q=h_q,
            cache=cache,
            extra=extra,
            q_strides=strides_of_q.q,
            q_rope_strides=strides_of_q.q_rope,
            num_parts=num_parts,
            object_layout=is_object,
            batch_invariant=batch_invariant,
            out_strides=out_strides,
            softmax_scale=softmax_scale,
        ),
        framework.capture_query(device),
    )
    return PreparedCall(framework.allocator(results, prepared.scratch_bytes, device), prepared.launch)
