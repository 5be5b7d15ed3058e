"""Sparse decoding: the calls of `flash_mla_with_kvcache` with `indices`.

`decode` is one call from the arrays to the launch, laid out as in `rawmla.mla.dense_decode`.
"""

from __future__ import annotations

from typing import Any

from ..call.arguments import Arg, check_arguments, check_places
from ..call.arrays import READERS, address_of, read_given
from ..call.checks import as_softmax_scale
from ..call.memo import Memo, kind_of
from ..kernels import mla_metadata, mla_sparse
from ..kernels.common import D_V
from ..kernels.mla_sparse import NO_CACHE, SparseCall
from .arguments import (
    check_extra,
    check_sparse_cache,
    check_sparse_q,
    out_of,
    prepared_call,
    q_strides,
    read_pair,
    with_selection,
)
from .plan import (
    GivenPlan,
    PreparedDecode,
    SchedConfig,
    check_config,
    check_plan,
    fields_of,
    make_plan,
    mark_plan,
    read_plan,
)

ExtraCache = tuple[Any, Any, Any]
"""A second cache that is attended in the same softmax: the cache, its indices and how many of them count."""


_TABLE = (
    Arg("indices", "int32", "b s_q topk", has_rows=True),
    Arg("topk_length", "int32", "b", has_rows=True),
    Arg("extra_indices_in_kvcache", "int32", "b s_q extra_topk", has_rows=True),
    Arg("extra_topk_length", "int32", "b", has_rows=True),
    Arg("attn_sink", "float32", "h_q", has_rows=True),
    Arg("out", "=q", f"b s_q h_q {D_V}"),
)

_calls: Memo[PreparedDecode] = Memo(shared=True)


def decode(
    q: Any,
    k_cache: Any,
    tile_scheduler_metadata: Any,
    num_splits: Any,
    softmax_scale: float | None,
    is_fp8_kvcache: bool,
    indices: Any,
    attn_sink: Any,
    topk_length: Any,
    extra: ExtraCache | None,
    out: Any,
    enable_batch_invariant: bool,
) -> tuple[Any, Any]:
    """Run `flash_mla_with_kvcache` with `indices`; booleans are checked already."""
    rope_view = None
    if q.__class__ is tuple:
        q_view, rope_view = read_pair(q)
    else:
        q_view = READERS[type(q)](q, "q")
    k_view = READERS[type(k_cache)](k_cache, "k_cache")
    indices_view = READERS[type(indices)](indices, "indices")
    # Most calls leave out most of the other arrays. A function call for each would add a twentieth.
    length_view = None if topk_length is None else READERS[type(topk_length)](topk_length, "topk_length")
    extra_view = extra_indices_view = extra_length_view = extra_kind = None
    if extra is not None:
        extra_k_cache, extra_indices, extra_topk_length = extra
        extra_view = read_given(extra_k_cache, "extra_k_cache")
        extra_indices_view = read_given(extra_indices, "extra_indices_in_kvcache")
        extra_length_view = read_given(extra_topk_length, "extra_topk_length")
        extra_kind = kind_of(extra_view), kind_of(extra_indices_view), kind_of(extra_length_view)
    sink_view = None if attn_sink is None else READERS[type(attn_sink)](attn_sink, "attn_sink")
    plan = read_plan(tile_scheduler_metadata, num_splits, enable_batch_invariant)
    holder, plan_arrays, batch_invariant = plan
    out_view = None if out is None else READERS[type(out)](out, "out")
    if softmax_scale is not None:
        softmax_scale = as_softmax_scale(softmax_scale)
    q_ptr, q_shape, q_steps, dtype, device, framework, q_array = q_view
    k_ptr, k_shape, k_steps, k_dtype, k_device, k_framework, _ = k_view
    index_ptr, index_shape, index_steps, index_dtype, index_device, index_framework, _ = indices_view
    # The key has what checks depend on, as in dense decoding.
    key = (
        softmax_scale, is_fp8_kvcache, batch_invariant, holder is None,
        q_ptr & 15, q_shape, q_steps, dtype, device, framework,
        k_ptr & 15, k_shape, k_steps, k_dtype, k_device, k_framework,
        index_shape, index_steps, index_dtype, index_device, index_framework,
        plan_arrays and plan_arrays.kind, length_view and length_view[1:6], sink_view and sink_view[1:6],
        rope_view and kind_of(rope_view), out_view and kind_of(out_view), extra_kind,
    )  # fmt: skip
    call = _calls.get(key)
    if call is None or call.mixes_frameworks:
        rows_view, splits_view = plan_arrays.views if plan_arrays else (None, None)
        arrays = {
            "q": q_view,
            "q_rope": rope_view,
            "k_cache": k_view,
            "indices": indices_view,
            "topk_length": length_view,
            "extra_k_cache": extra_view,
            "extra_indices_in_kvcache": extra_indices_view,
            "extra_topk_length": extra_length_view,
            "attn_sink": sink_view,
            "tile_scheduler_metadata": rows_view,
            "num_splits": splits_view,
            "out": out_view,
        }
        call = call or _calls.keep(key, _prepare(arrays, plan, softmax_scale, is_fp8_kvcache))
        check_places(arrays)
    allocate, launch, q_is_copied, rope_bytes, _, num_parts, config, config_fields = call
    if holder is not None and holder.have_initialized:
        check_config(holder.config, config_fields)
    if launch is None:
        *results, lse, _ = allocate()
        return (results[0] if results else out), lse

    if q_is_copied:
        q_array = framework.contiguous_copy(q_array, "q")
        q_ptr = framework.pointer(q_array)
    length_ptr = 0 if length_view is None else length_view[0]
    extra_ptr = extra_indices_ptr = extra_length_ptr = 0
    if extra is not None:
        extra_ptr, extra_indices_ptr = address_of(extra_view), address_of(extra_indices_view)
        extra_length_ptr = address_of(extra_length_view)
    made = None
    if plan_arrays is None:
        widths = config.topk or 0, config.extra_topk or 0
        tokens = mla_metadata.TokenCounts(length_ptr, extra_length_ptr, *widths)
        made = make_plan(q_view, config.b, num_parts, tokens, True, config.enable_batch_invariant)
        rows_ptr, splits_ptr = map(framework.pointer, made)
    else:
        rows_ptr, splits_ptr, _, _ = plan_arrays
    if out_view is None:
        out, lse, scratch = allocate()
        out_ptr = framework.pointer(out)
    else:
        lse, scratch = allocate()
        out_ptr = out_view[0]
    # In the order of SparseAddresses. To build one would take a twentieth of the call.
    addresses = (
        q_ptr, q_ptr + rope_bytes if rope_view is None else rope_view[0], k_ptr, extra_ptr, index_ptr,
        extra_indices_ptr, length_ptr, extra_length_ptr, 0 if sink_view is None else sink_view[0],
        rows_ptr, splits_ptr, out_ptr, framework.pointer(lse), 0, 0,
    )  # fmt: skip
    launch(framework.current_stream(device), addresses, 0 if scratch is None else framework.pointer(scratch))
    if holder is not None and (made is not None or not holder.have_initialized):
        mark_plan(holder, config, made)
    return out, lse


def _prepare(
    arrays: dict[str, Any], plan: GivenPlan, softmax_scale: float | None, is_fp8_kvcache: bool
) -> PreparedDecode:
    """Check a call, load its kernels and work out their parameters."""
    q = arrays["q"]
    _, _, _, dtype, device, framework, _ = q
    sizes = check_sparse_q(arrays, "b s_q h_q d_qk", " with indices")
    b, s_q, h_q, d_qk = [sizes[dim] for dim in ("b", "s_q", "h_q", "d_qk")]
    extra_cache, extra_indices = arrays["extra_k_cache"], arrays["extra_indices_in_kvcache"]
    check_extra(extra_cache, extra_indices, arrays["extra_topk_length"])
    check_arguments(_TABLE, arrays, sizes)
    format, cache, load_bytes = check_sparse_cache("k_cache", arrays["k_cache"], d_qk, is_fp8_kvcache)
    cache = with_selection(cache, "indices", arrays["indices"])
    extra = NO_CACHE
    if extra_cache is not None:
        _, extra, extra_bytes = check_sparse_cache("extra_k_cache", extra_cache, d_qk, is_fp8_kvcache)
        extra = with_selection(extra, "extra_indices_in_kvcache", extra_indices, "extra_topk")
        load_bytes = min(load_bytes, extra_bytes)
    strides = q_strides(q, arrays["q_rope"], d_qk)
    results, steps = out_of(q, arrays["out"])
    results.append(((b, h_q, s_q), "float32"))
    holder, *_, batch_invariant = plan
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
        enable_batch_invariant=batch_invariant,
    )
    num_parts = check_plan(plan, config, device, framework)
    kernels = None
    if b and s_q:
        kernels = mla_sparse.PreparedSparse(
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
                q_strides=strides.q,
                q_rope_strides=strides.q_rope,
                num_parts=num_parts,
                object_layout=holder is not None,
                batch_invariant=batch_invariant,
                out_strides=steps,
                softmax_scale=d_qk**-0.5 if softmax_scale is None else softmax_scale,
            ),
            framework.capture_query(device),
        )
    work = prepared_call(arrays, strides, results, kernels)
    return PreparedDecode(*work, num_parts, config, fields_of(config))
