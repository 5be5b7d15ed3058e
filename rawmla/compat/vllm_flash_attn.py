"""The functions of vLLM's FlashAttention module, computed by rawmla where it can.

They return NotImplemented for a call that vLLM's own function has to compute; docs/engines.md lists these.
vLLM's parameters stand in another order than FlashAttention's, and `fa_version` chooses one of its kernels;
rawmla computes calls of all versions alike. vLLM's merges take +inf and -inf alike as the lse of a row
without keys, so version 2 gets -inf too.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

import rawmla

from ..api import dense
from ..mha.arguments import MAX_HEAD_DIM
from .engine_calls import FP8, HALVES, name_of, pass_on, reason_of_cache, window_of
from .flash_attn.arguments import as_bound, contiguous
from .usage import Usage

_log = logging.getLogger("vllm.rawmla")
_NAME = "flash_attn_varlen_func"
_usage = Usage(f"vllm_flash_attn.{_NAME}")


def get_scheduler_metadata(*args: Any, **kwargs: Any) -> Any:
    """Return no plan: rawmla needs none, and vLLM's kernels make their own in a call without one.

    Absorbed MLA, whose values have another head dimension, stays with vLLM's kernel and gets its plan.
    """
    return NotImplemented if args or kwargs.get("headdim_v") not in (None, kwargs["headdim"]) else None


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    max_seqlen_q: Any,
    cu_seqlens_q: Any,
    max_seqlen_k: Any,
    cu_seqlens_k: Any = None,
    seqused_k: Any = None,
    q_v: Any = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = None,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
    return_softmax_lse: bool = False,
    out: Any = None,
    scheduler_metadata: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    num_splits: int = 0,
    *more: Any,
    fa_version: Any = None,
    s_aux: Any = None,
    cp_world_size: int = 1,
    cp_rank: Any = None,
    cp_tot_seqused_k: Any = None,
    dynamic_causal: Any = None,
    mask_mod: Any = None,
    aux_tensors: Any = None,
    output_scale: Any = None,
    **others: Any,
) -> Any:
    """Compute out, or (out, lse `[h_q, total_q]`).

    What follows `more` has other places in every version. It is named, since Python takes long to find out
    that a keyword has no name here.
    """
    if max_seqlen_q.__class__ is not int:
        max_seqlen_q = as_bound(max_seqlen_q, q.shape[0])
    reason = None
    if more:
        reason = "parameters after num_splits by position"
    elif q_v is not None:
        reason = "q_v"
    elif dropout_p:
        reason = "dropout_p"
    elif cp_world_size != 1:
        reason = "cp_world_size"
    elif not (dynamic_causal is mask_mod is aux_tensors is output_scale is None):
        reason = "dynamic_causal, mask_mod, aux_tensors or output_scale"
    elif block_table is not None:
        k_dtype = k.dtype
        reason = reason_of_cache(q, k, v, k_dtype, max_seqlen_q, num_splits)
    else:
        reason = _reason_without_cache(q, k, v, cu_seqlens_k, num_splits)
    for name, value in others.items():
        if value is not None:
            reason = name
    if reason is not None:
        pass_on(_log, _NAME, reason)
        return NotImplemented
    fresh = out is None
    window = window_of(window_size)
    softcap = softcap or 0.0  # vLLM's 0 is an int, which rawmla's functions would check by a call
    if block_table is not None:
        if k_dtype is not FP8:  # vLLM passes its scales of 1 with other caches too
            q_descale = k_descale = v_descale = None
        out, lse = rawmla.flash_attn_with_kvcache(
            q, k, v, cache_seqlens=seqused_k, block_table=block_table, cu_seqlens_q=cu_seqlens_q,
            max_seqlen_q=max_seqlen_q, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
            softmax_scale=softmax_scale, causal=causal, window_size=window, softcap=softcap,
            alibi_slopes=alibi_slopes, attn_sink=s_aux, num_splits=num_splits, out=out,
        )  # fmt: skip
    else:
        if max_seqlen_k.__class__ is not int:
            max_seqlen_k = as_bound(max_seqlen_k, k.shape[0])
        out, lse = dense.flash_attn_varlen_func(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, softmax_scale, causal,
            window_size=window, softcap=softcap, attn_sink=s_aux, alibi_slopes=alibi_slopes,
            seqused_k=seqused_k, out=out,
        )  # fmt: skip
    _usage.note("vLLM", q, k)
    if fresh:
        out = contiguous(out)
    if not return_softmax_lse:
        return out
    lse = lse.t()
    return out, lse if s_aux is None else torch.logaddexp(lse, s_aux.float().unsqueeze(1))


def _reason_without_cache(q: Any, k: Any, v: Any, cu_seqlens_k: Any, num_splits: int) -> str | None:
    """As `reason_of_cache`, of packed keys. rawmla chooses by all requests how it splits their keys."""
    if q.dtype not in HALVES:
        return f"q in {name_of(q.dtype)} without a cache"
    if cu_seqlens_k is None:
        return "neither block_table nor cu_seqlens_k"
    if not q.shape[-1] <= MAX_HEAD_DIM >= v.shape[-1]:
        return f"head dimensions {q.shape[-1]} and {v.shape[-1]}"
    if num_splits == 1:
        return "num_splits=1 without a cache"
    return None
