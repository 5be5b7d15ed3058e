"""Sparse prefill: attention of many query tokens, each over tokens of its own choice.

`flash_mla_sparse_fwd` is one call from the arrays to the launch, laid out as in `rawmla.mla.dense_decode`.
"""

from __future__ import annotations

from math import log
from typing import Any

from .. import jit
from ..call.arguments import (
    Arg,
    Sizes,
    check_arguments,
    check_dtype,
    check_places,
    check_shape,
    row_strides,
)
from ..call.arrays import READERS
from ..call.checks import as_bool, as_softmax_scale, show
from ..call.frameworks import Fields
from ..call.memo import Memo, kind_of
from ..kernels import mla_metadata, mla_sparse_prefill
from ..kernels.common import D_V
from ..kernels.mla_sparse import NO_CACHE, Cache, SparseAddresses, SparseCall
from .arguments import (
    PreparedCall,
    check_sparse_cache,
    check_sparse_q,
    out_of,
    prepared_call,
    q_strides,
    read_pair,
    with_selection,
)

_LSE_FACTORS = {"2": 1.0, "e": log(2.0)}


_TABLE = (
    Arg("indices", "int32", "s_q 1 topk", has_rows=True),
    Arg("topk_length", "int32", "s_q", has_rows=True),
    Arg("attn_sink", "float32", "h_q", has_rows=True),
    Arg("out", "=q", f"s_q h_q {D_V}"),
)

_calls: Memo[PreparedCall] = Memo(shared=True)


def prefill(
    q: Any,
    kv: Any,
    indices: Any,
    sm_scale: float,
    attn_sink: Any,
    topk_length: Any,
    out: Any,
    log_base: str,
    is_fp8_kvcache: bool,
    enable_batch_invariant: bool,
) -> tuple[Any, Any, Any]:
    """Run `rawmla.flash_mla_sparse_fwd`; ``d_v`` is checked already."""
    softmax_scale = as_softmax_scale(sm_scale, "sm_scale", "a float")
    lse_factor = _as_lse_factor(log_base)
    is_fp8_kvcache = as_bool("is_fp8_kvcache", is_fp8_kvcache)
    enable_batch_invariant = as_bool("enable_batch_invariant", enable_batch_invariant)
    rope_view = None
    if q.__class__ is tuple:
        q_view, rope_view = read_pair(q)
    else:
        q_view = READERS[type(q)](q, "q")
    kv_view = READERS[type(kv)](kv, "kv")
    indices_view = READERS[type(indices)](indices, "indices")
    length_view = None if topk_length is None else READERS[type(topk_length)](topk_length, "topk_length")
    sink_view = None if attn_sink is None else READERS[type(attn_sink)](attn_sink, "attn_sink")
    out_view = None if out is None else READERS[type(out)](out, "out")
    q_ptr, q_shape, q_steps, dtype, device, framework, q_array = q_view
    kv_ptr, kv_shape, kv_steps, kv_dtype, kv_device, kv_framework, _ = kv_view
    index_ptr, index_shape, index_steps, index_dtype, index_device, index_framework, _ = indices_view
    # The key has what checks depend on, as in dense decoding.
    key = (
        softmax_scale, lse_factor, is_fp8_kvcache, enable_batch_invariant,
        q_ptr & 15, q_shape, q_steps, dtype, device, framework,
        kv_ptr & 15, kv_shape, kv_steps, kv_dtype, kv_device, kv_framework,
        index_shape, index_steps, index_dtype, index_device, index_framework,
        length_view and length_view[1:6], sink_view and sink_view[1:6],
        rope_view and kind_of(rope_view), out_view and kind_of(out_view),
    )  # fmt: skip
    call = _calls.get(key)
    if call is None or call.mixes_frameworks:
        arrays = {
            "q": q_view,
            "q_rope": rope_view,
            "kv": kv_view,
            "indices": indices_view,
            "topk_length": length_view,
            "attn_sink": sink_view,
            "out": out_view,
        }
        options = softmax_scale, lse_factor, is_fp8_kvcache, enable_batch_invariant
        call = call or _calls.keep(key, _prepare(arrays, *options))
        check_places(arrays)
    allocate, launch, q_is_copied, rope_bytes, _ = call
    if q_is_copied:
        q_array = framework.contiguous_copy(q_array, "q")
        q_ptr = framework.pointer(q_array)
    q_rope_ptr = q_ptr + rope_bytes if rope_view is None else rope_view[0]
    if out_view is None:
        out, max_logits, lse, scratch = allocate()
        out_ptr = framework.pointer(out)
    else:
        max_logits, lse, scratch = allocate()
        out_ptr = out_view[0]
    if launch is None:
        return out, max_logits, lse

    addresses = SparseAddresses(
        q_ptr, q_rope_ptr, kv_ptr, 0, index_ptr, 0, 0 if length_view is None else length_view[0], 0,
        0 if sink_view is None else sink_view[0], 0, 0, out_ptr, framework.pointer(lse),
        framework.pointer(max_logits),
    )  # fmt: skip
    launch(framework.current_stream(device), addresses, 0 if scratch is None else framework.pointer(scratch))
    return out, max_logits, lse


def _as_lse_factor(log_base: Any) -> float:
    """Check `log_base`; returns the factor that converts a logarithm in base 2 to it."""
    if not isinstance(log_base, str):
        raise TypeError(f"log_base: expected a str, got {show(log_base)}")
    factor = _LSE_FACTORS.get(log_base)
    if factor is None:
        raise ValueError(f"log_base: expected '2' or 'e', got {log_base!r}")
    return factor


def _rows_of_kv(kv: Fields, d_qk: int) -> Cache:
    """Check the bf16 kv of a call; returns it as a cache of blocks of one token, without a selection."""
    check_dtype("kv", kv, "bfloat16", " with is_fp8_kvcache=False")
    sizes = Sizes(d_qk=d_qk)
    check_shape("kv", kv, "s_kv 1 d_qk", sizes)
    ptr, shape, strides, *_ = kv
    if not sizes["s_kv"]:
        raise ValueError(f"kv: expected at least 1 token, got shape {list(shape)}")
    stride, _ = row_strides("kv", kv)
    if ptr & 15 or stride & 7 or stride < 0:
        raise ValueError(
            "kv: expected a 16-byte aligned address and a stride of tokens that is a multiple of 8, not "
            f"negative, got address {ptr:#x}, strides {list(strides)} (elements)"
        )
    return Cache(1, sizes["s_kv"], 2 * stride, 2 * d_qk, 0, 0, 0)


def _prepare(
    arrays: dict[str, Any],
    softmax_scale: float,
    lse_factor: float,
    is_fp8_kvcache: bool,
    batch_invariant: bool,
) -> PreparedCall:
    """Check a call, load its kernels and work out their parameters."""
    q = arrays["q"]
    _, _, _, dtype, device, framework, _ = q
    sizes = check_sparse_q(arrays, "s_q h_q d_qk")
    check_arguments(_TABLE, arrays, sizes)
    s_q, h_q, d_qk = sizes["s_q"], sizes["h_q"], sizes["d_qk"]
    if is_fp8_kvcache:
        format, cache, load_bytes = check_sparse_cache("kv", arrays["kv"], d_qk, is_fp8_kvcache)
    else:
        format, cache, load_bytes = "bf16", _rows_of_kv(arrays["kv"], d_qk), 16
    cache = with_selection(cache, "indices", arrays["indices"])
    strides = q_strides(q, arrays["q_rope"], d_qk)
    results, steps = out_of(q, arrays["out"])
    results += [((s_q, h_q), "float32")] * 2
    kernels = None
    if s_q:
        kernels = mla_sparse_prefill.prepare(
            SparseCall(
                device=device,
                format=format,
                d_qk=d_qk,
                load_bytes=load_bytes,
                b=s_q,
                s_q=1,
                h_q=h_q,
                cache=cache,
                extra=NO_CACHE,
                q_strides=(strides.q[0], 0, strides.q[1]),
                q_rope_strides=(strides.q_rope[0], 0, strides.q_rope[1]),
                out_strides=(steps[0], 0, steps[1]),
                num_parts=mla_metadata.num_sm_parts_sparse(jit.device_info(device).sm_count, 1, h_q),
                object_layout=True,
                softmax_scale=softmax_scale,
                lse_factor=lse_factor,
                limited=arrays["topk_length"] is not None,
                batch_invariant=batch_invariant,
            ),
            framework.capture_query(device),
        )
    return prepared_call(arrays, strides, results, kernels)
