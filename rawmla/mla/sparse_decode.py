"""Sparse decoding: the calls of `flash_mla_with_kvcache` with `indices`.

`decode` is one call from the arrays to the launch, laid out as in `rawmla.mla.dense_decode`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..call.arrays import READERS, Fields, address_of, read_given
from ..call.checks import as_softmax_scale, check_streams
from ..call.memo import BatchPlace, Memo, PreparedCall, kind_of
from ..kernels import mla_metadata, mla_sparse
from ..kernels.common import D_V
from ..kernels.mla_sparse import NO_CACHE, Cache, SparseAddresses, SparseCall
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


class _Checked(NamedTuple):
    """What follows from the kinds of the arrays, which passed the checks; strides in elements."""

    format: str  # as in SparseCall
    b: int
    s_q: int
    h_q: int
    d_qk: int
    place: BatchPlace
    load_bytes: int  # what addresses of cache rows are multiples of
    cache: Cache
    extra: Cache  # NO_CACHE: there is none
    q_strides: QStrides
    out_strides: tuple[int, ...]
    default_scale: float
    configs: PlanConfigs
    calls: Memo[PreparedCall]


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
    q_view, q_rope = read_pair(q) if q.__class__ is tuple else (READERS[type(q)](q, "q"), None)
    arrays = _Arrays(
        q_view,
        q_rope,
        READERS[type(k_cache)](k_cache, "k_cache"),
        READERS[type(indices)](indices, "indices"),
        read_given(topk_length, "topk_length"),
        read_given(extra_k_cache, "extra_k_cache"),
        read_given(extra_indices_in_kvcache, "extra_indices_in_kvcache"),
        read_given(extra_topk_length, "extra_topk_length"),
        read_given(attn_sink, "attn_sink"),
        read_given(out, "out"),
    )
    kind = (is_fp8_kvcache, *map(kind_of, arrays))
    checked = _checked.get(kind) or _checked.keep(kind, _check(is_fp8_kvcache, arrays))
    _, _, _, _, device, framework, q_array = arrays.q
    check_streams(arrays, device, framework)
    softmax_scale = checked.default_scale if softmax_scale is None else as_softmax_scale(softmax_scale)
    plan = resolve_plan(
        tile_scheduler_metadata, num_splits, enable_batch_invariant, checked.configs, checked.place
    )
    if not checked.b or not checked.s_q:
        return _empty_results(checked, out, arrays.q)

    key = (plan.num_parts, plan.is_object, plan.batch_invariant, softmax_scale)
    call = checked.calls.get(key) or checked.calls.keep(key, _prepare(checked, key, arrays))
    q_ptr = address_of(arrays.q)
    if checked.q_strides.is_copied:
        q_array = framework.contiguous_copy(q_array, "q")
        q_ptr = framework.pointer(q_array)
    q_rope_ptr = q_ptr + checked.q_strides.rope_bytes if q_rope is None else address_of(arrays.q_rope)
    topk_length_ptr = address_of(arrays.topk_length)
    extra_topk_length_ptr = address_of(arrays.extra_topk_length)
    plan_arrays = plan.arrays
    if plan_arrays is None:
        tokens = mla_metadata.TokenCounts(
            topk_length_ptr, extra_topk_length_ptr, checked.cache.topk, checked.extra.topk
        )
        plan_arrays = compute_plan(plan, checked.b, tokens, device, framework)
    if out is None:
        out, lse, scratch = call.allocate()
        out_ptr = framework.pointer(out)
    else:
        lse, scratch = call.allocate()
        out_ptr = address_of(arrays.out)
    call.launch(
        framework.current_stream(device),
        SparseAddresses(
            q=q_ptr,
            q_rope=q_rope_ptr,
            k_cache=address_of(arrays.k_cache),
            extra_k_cache=address_of(arrays.extra_k_cache),
            indices=address_of(arrays.indices),
            extra_indices=address_of(arrays.extra_indices_in_kvcache),
            topk_length=topk_length_ptr,
            extra_topk_length=extra_topk_length_ptr,
            attn_sink=address_of(arrays.attn_sink),
            sched_meta=plan_arrays.sched_meta,
            num_splits=plan_arrays.num_splits,
            out=out_ptr,
            lse=framework.pointer(lse),
        ),
        0 if scratch is None else framework.pointer(scratch),
    )
    if plan.unmarked is not None:
        mark_plan(plan, checked.configs, plan_arrays)
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
    return _Checked(
        format=format,
        b=b,
        s_q=s_q,
        h_q=h_q,
        d_qk=d_qk,
        place=BatchPlace(b, device, framework),
        load_bytes=load_bytes,
        cache=cache,
        extra=extra,
        q_strides=q_strides(q, arrays.q_rope, d_qk),
        out_strides=(s_q * h_q * D_V, h_q * D_V, D_V) if arrays.out is None else check_out(arrays.out, q),
        default_scale=d_qk**-0.5,
        configs=PlanConfigs.of(config),
        calls=Memo(),
    )


def _empty_results(checked: _Checked, out: Any, q: Fields) -> tuple[Any, Any]:
    """The results of a call without query tokens."""
    _, _, _, dtype, device, framework, _ = q
    b, s_q, h_q = checked.b, checked.s_q, checked.h_q
    if out is None:
        out = framework.empty((b, s_q, h_q, D_V), dtype, device)
    return out, framework.empty((b, h_q, s_q), "float32", device)


def _prepare(checked: _Checked, key: tuple[Any, ...], arrays: _Arrays) -> PreparedCall:
    """Load the kernels of a call and work out their parameters."""
    num_parts, is_object, batch_invariant, softmax_scale = key
    b, s_q, h_q, d_qk = checked.b, checked.s_q, checked.h_q, checked.d_qk
    _, _, _, dtype, device, framework, _ = arrays.q
    results = [((b, s_q, h_q, D_V), dtype), ((b, h_q, s_q), "float32")]
    if arrays.out is not None:
        del results[0]
    prepared = mla_sparse.PreparedSparse(
        SparseCall(
            device=device,
            format=checked.format,
            d_qk=d_qk,
            load_bytes=checked.load_bytes,
            b=b,
            s_q=s_q,
            h_q=h_q,
            cache=checked.cache,
            extra=checked.extra,
            q_strides=checked.q_strides.q,
            q_rope_strides=checked.q_strides.q_rope,
            num_parts=num_parts,
            object_layout=is_object,
            batch_invariant=batch_invariant,
            out_strides=checked.out_strides,
            softmax_scale=softmax_scale,
        ),
        framework.capture_query(device),
    )
    return PreparedCall(framework.allocator(results, prepared.scratch_bytes, device), prepared.launch)
