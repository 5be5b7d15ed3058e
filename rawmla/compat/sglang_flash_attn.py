"""SGLang's function of FlashAttention over a cache, which its fa3 backend calls, computed by rawmla.

It returns NotImplemented for a call that SGLang's own function has to compute; docs/engines.md lists these.
"""

from __future__ import annotations

import logging
from typing import Any

import rawmla

from ..mha.arguments import NO_WINDOW
from .engine_calls import FP8, pass_on, reason_of_cache, window_of
from .flash_attn.arguments import as_bound, contiguous
from .tables import whole_rows
from .usage import Usage

_log = logging.getLogger(__name__)
_NAME = "flash_attn_with_kvcache"
_usage = Usage(f"sglang.{_NAME}")


def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    qv: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    page_table: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k_new: Any = None,
    max_seqlen_q: Any = None,
    rotary_seqlens: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = NO_WINDOW,
    attention_chunk: int | None = None,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Any = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    only_qv: bool = False,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    sinks: Any = None,
    *more: Any,
    ver: int = 3,
    out: Any = None,
    max_seqlen_k: Any = None,
    **others: Any,
) -> Any:
    """Compute out, or (out, lse `[h_q, total_q]`). What follows `more` has other places in every version."""
    reason = None
    if more:
        reason = "parameters after sinks by position"
    elif not (k is qv is rotary_cos is cache_batch_idx is cache_leftpad is None):
        reason = "new tokens, qv, rotation, cache_batch_idx or cache_leftpad"
    elif attention_chunk:
        reason = "attention_chunk"
    elif ver != 3:
        reason = f"ver={ver}"
    elif page_table is None or cu_seqlens_q is None:
        reason = "no page_table or no cu_seqlens_q"
    elif sinks is not None and return_softmax_lse:
        reason = "sinks and return_softmax_lse"
    else:
        if max_seqlen_q.__class__ is not int:
            max_seqlen_q = as_bound(max_seqlen_q, q.shape[0])
        cache_dtype = k_cache.dtype
        reason = reason_of_cache(q, k_cache, v_cache, cache_dtype, max_seqlen_q, num_splits)
    for name, value in others.items():
        if value is not None:
            reason = name
    if reason is not None:
        pass_on(_log, _NAME, reason)
        return NotImplemented
    fresh = out is None
    if cache_dtype is not FP8:
        q_descale = k_descale = v_descale = None
    out, lse = rawmla.flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=cache_seqlens, block_table=whole_rows(page_table),
        cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q, q_descale=q_descale, k_descale=k_descale,
        v_descale=v_descale, softmax_scale=softmax_scale, causal=causal, window_size=window_of(window_size),
        softcap=softcap, attn_sink=sinks, num_splits=num_splits, out=out,
    )  # fmt: skip
    _usage.note("SGLang", q, k_cache)
    if fresh:
        out = contiguous(out)
    return (out, lse.t()) if return_softmax_lse else out
