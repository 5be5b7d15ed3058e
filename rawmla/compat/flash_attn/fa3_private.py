"""FlashAttention-3's private functions: forward and backward without a graph."""

from __future__ import annotations

from typing import Any

import torch

import rawmla

from ...api import dense, dense_backward
from .arguments import (
    CACHE_DTYPES,
    DTYPES,
    as_bound,
    check_hints,
    check_num_splits,
    contiguous,
    detached,
    heads_first,
)
from .refusals import refuse_dtype, refuse_given, unsupported

Four = tuple[Any, Any, Any, Any]


def _flash_attn_forward(
    q: Any,
    k: Any,
    v: Any,
    k_new: Any = None,
    v_new: Any = None,
    qv: Any = None,
    out_: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    cu_seqlens_k_new: Any = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: Any = None,
    kv_batch_idx: Any = None,
    leftpad_k: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    seqlens_rotary: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Any = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Four:
    """Return out, lse with heads before tokens, and two empty tensors."""
    if qv is not None:
        unsupported("qv")
    if attention_chunk:
        unsupported("attention_chunk")
    check_hints(pack_gqa, sm_margin, scheduler_metadata)
    check_num_splits(num_splits)
    q, k, v, k_new, v_new = detached(q, k, v, k_new, v_new)
    window = window_size_left, window_size_right
    max_seqlen_q = None if cu_seqlens_q is None else as_bound(max_seqlen_q, q.shape[0])
    in_cache = not (k_new is page_table is kv_batch_idx is leftpad_k is rotary_cos is None)
    is_varlen = cu_seqlens_q is not None and cu_seqlens_k is not None
    in_cache |= not is_varlen and (cu_seqlens_q is not None or seqused_k is not None)
    if getattr(q, "dtype", None) not in (CACHE_DTYPES if in_cache else DTYPES):
        refuse_dtype("q", q)
    if in_cache:
        if seqused_q is not None:
            unsupported("seqused_q")
        out, lse = rawmla.flash_attn_with_kvcache(
            q, k, v, k_new, v_new, rotary_cos=rotary_cos, rotary_sin=rotary_sin, cache_seqlens=seqused_k,
            cache_batch_idx=kv_batch_idx, cache_leftpad=leftpad_k, block_table=page_table,
            cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q,
            cu_seqlens_k=cu_seqlens_k if seqused_k is None else None,
            cu_seqlens_k_new=None if k_new is None else cu_seqlens_k_new,
            rotary_seqlens=None if rotary_cos is None else seqlens_rotary,
            q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, softmax_scale=softmax_scale,
            causal=causal, window_size=window, softcap=softcap, rotary_interleaved=rotary_interleaved,
            num_splits=num_splits, out=out_,
        )  # fmt: skip
    elif is_varlen:
        out, lse = dense.flash_attn_varlen_func(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, as_bound(max_seqlen_k, k.shape[0]), 0.0,
            softmax_scale, causal, window_size=window, softcap=softcap, seqused_q=seqused_q,
            seqused_k=seqused_k, out=out_,
        )  # fmt: skip
    else:
        if seqused_q is not None:
            unsupported("seqused_q")
        out, lse = dense.flash_attn_func(q, k, v, 0.0, softmax_scale, causal, window, softcap, out=out_)
    nothing = q.new_empty(0, dtype=torch.float32)
    return out if out_ is not None else contiguous(out), heads_first(lse), nothing, nothing


def _flash_attn_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    softmax_lse: Any,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    sequed_q: Any = None,
    sequed_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dq: Any = None,
    dk: Any = None,
    dv: Any = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> Any:
    """Write dq, dk and dv. Returns an empty float32 tensor, as rawmla does not keep softmax_d."""
    check_hints(None, sm_margin, None)
    dout, q, k, v, out, softmax_lse = detached(dout, q, k, v, out, softmax_lse)
    window = window_size_left, window_size_right
    if cu_seqlens_q is None:
        refuse_given(sequed_q=sequed_q, sequed_k=sequed_k)
        dense_backward.flash_attn_backward(
            dout, q, k, v, out, softmax_lse, dq, dk, dv, is_causal, softmax_scale,
            deterministic=deterministic, window_size=window, softcap=softcap,
        )  # fmt: skip
    else:
        dense_backward.flash_attn_varlen_backward(
            dout, q, k, v, out, softmax_lse.t(), cu_seqlens_q, cu_seqlens_k,
            as_bound(max_seqlen_q, q.shape[0]), as_bound(max_seqlen_k, k.shape[0]), dq, dk, dv, is_causal,
            softmax_scale, deterministic=deterministic, window_size=window, softcap=softcap,
            seqused_q=sequed_q, seqused_k=sequed_k,
        )  # fmt: skip
    return q.new_empty(0, dtype=torch.float32)
