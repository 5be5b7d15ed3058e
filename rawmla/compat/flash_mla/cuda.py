"""The functions of FlashMLA's C++ module `flash_mla.cuda`, by their names and argument orders.

Plans are the two arrays of a plan object, or None twice, and are returned: the arrays given, or new ones.
Arguments after FlashMLA 9241ae3's are vLLM 0.33's (`out_`, `enable_batch_invariant`) and, by keyword,
sgl-flash-mla 1.0.0's. The Python functions in `rawmla.compat.flash_mla.flash_mla_interface` have the
documentation.
"""

from __future__ import annotations

from typing import Any

from ...api import decode, plan, sparse_prefill
from ...mla.plan import FlashMLASchedMeta
from ..tables import whole_rows
from ..usage import Usage
from .refusals import MEGA_ATTENTION, check_kv_format, refuse_other_records, refused

__all__ = [
    "dense_decode_fwd",
    "dense_prefill_bwd",
    "dense_prefill_fwd",
    "fused_norm_rope_attn_rope_cast_decode",
    "fused_norm_rope_attn_rope_cast_fwd",
    "get_mla_decoding_metadata",
    "permute_q_b_proj",
    "permute_wv_proj",
    "sparse_decode_fwd",
    "sparse_prefill_fwd",
]

_FORM = "FlashMLA's C++ functions"
_dense_usage = Usage("dense_decode_fwd")
_sparse_usage = Usage("sparse_decode_fwd")
_prefill_usage = Usage("sparse_prefill_fwd")


def dense_decode_fwd(
    q: Any,
    kcache: Any,
    head_size_v: int,
    seqlens_k: Any,
    block_table: Any,
    softmax_scale: float,
    is_causal: bool,
    tile_scheduler_metadata: Any,
    num_splits: Any,
    out_: Any = None,
) -> tuple[Any, Any, Any, Any]:
    """Dense decoding; returns (out, lse, tile_scheduler_metadata, num_splits)."""
    made = FlashMLASchedMeta(tile_scheduler_metadata=tile_scheduler_metadata, num_splits=num_splits)
    out, lse = decode.flash_mla_with_kvcache(
        q, kcache, whole_rows(block_table), seqlens_k, head_size_v, made, None, softmax_scale, is_causal,
        out=out_,
    )  # fmt: skip
    _dense_usage.note(_FORM, q, kcache)
    return out, lse, made.tile_scheduler_metadata, made.num_splits


def sparse_decode_fwd(
    q: Any,
    kv: Any,
    indices: Any,
    topk_length: Any,
    attn_sink: Any,
    tile_scheduler_metadata: Any,
    num_splits: Any,
    extra_kv: Any,
    extra_indices: Any,
    extra_topk_length: Any,
    d_v: int,
    sm_scale: float,
    out_: Any = None,
    enable_batch_invariant: bool = False,
    *,
    kv_format: str | None = None,
) -> tuple[Any, Any, Any, Any]:
    """Sparse decoding over FP8 caches; returns (out, lse, tile_scheduler_metadata, num_splits).

    `lse` is contiguous `[b, h_q, s_q]`, where FlashMLA returns a transposed view.
    """
    if kv_format is not None:
        check_kv_format(kv_format, kv)
    made = FlashMLASchedMeta(tile_scheduler_metadata=tile_scheduler_metadata, num_splits=num_splits)
    try:
        out, lse = decode.flash_mla_with_kvcache(
            q, kv, None, None, d_v, made, None, sm_scale, False, True, indices, attn_sink, extra_kv,
            extra_indices, topk_length, extra_topk_length, out_, enable_batch_invariant,
        )  # fmt: skip
    except (TypeError, ValueError):
        refuse_other_records("kv", kv)
        refuse_other_records("extra_kv", extra_kv)
        raise
    _sparse_usage.note(_FORM, q, kv)
    return out, lse, made.tile_scheduler_metadata, made.num_splits


def sparse_prefill_fwd(
    q: Any,
    kv: Any,
    indices: Any,
    sm_scale: float,
    d_v: int,
    attn_sink: Any = None,
    topk_length: Any = None,
    out_: Any = None,
    *,
    return_log2_stats: bool = False,
    return_stats: bool = True,
) -> list[Any]:
    """Sparse prefill; returns [out, max_logits, lse], natural logarithms unless `return_log2_stats`."""
    log_base = "2" if return_log2_stats else "e"
    result = sparse_prefill.flash_mla_sparse_fwd(
        q, kv, indices, sm_scale, d_v, attn_sink, topk_length, out_, log_base=log_base
    )
    _prefill_usage.note(_FORM, q, kv)
    return list(result) if return_stats else [result[0], None, None]


def get_mla_decoding_metadata(
    seqlens_k: Any,
    num_q_tokens_per_head_k: int,
    h_k: int,
    h_q: int | None,
    is_fp8_kvcache: bool,
    topk: int | None,
) -> list[Any]:
    """The two arrays of a plan object, computed now."""
    made = FlashMLASchedMeta()
    plan.get_mla_metadata(seqlens_k, num_q_tokens_per_head_k, h_k, h_q, is_fp8_kvcache, topk, out=made)
    return [made.tile_scheduler_metadata, made.num_splits]


dense_prefill_fwd = refused("dense_prefill_fwd", "call flash_mla.flash_attn_varlen_func")
dense_prefill_bwd = refused(
    "dense_prefill_bwd",
    "call rawmla.flash_attn_varlen_backward, or backward() through flash_mla.flash_attn_varlen_func",
)
fused_norm_rope_attn_rope_cast_fwd = refused("fused_norm_rope_attn_rope_cast_fwd", MEGA_ATTENTION)
fused_norm_rope_attn_rope_cast_decode = refused("fused_norm_rope_attn_rope_cast_decode", MEGA_ATTENTION)
permute_q_b_proj = refused("permute_q_b_proj", MEGA_ATTENTION)
permute_wv_proj = refused("permute_wv_proj", MEGA_ATTENTION)
