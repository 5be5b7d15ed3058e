"""FlashAttention-3's Python functions by its names and argument orders, computed by rawmla.

The surface is the one of flash_attn_3 3.0.0 (github.com/Dao-AILab/flash-attention, folder hopper) with
`s_aux` by keyword, which is `attn_sink` of rawmla's functions. docs/flash_attn.md has the differences.
"""

from __future__ import annotations

from typing import Any

import torch

import rawmla

from ...api import dense
from ...mha.arguments import NO_WINDOW
from ..usage import Usage
from . import fa3_ops
from .arguments import (
    CACHE_DTYPES,
    DTYPES,
    as_bound,
    as_pair,
    check_hints,
    check_num_splits,
    contiguous,
    heads_first,
    split_packed,
)
from .fa3_combine import flash_attn_combine, get_scheduler_metadata
from .fa3_private import _flash_attn_backward, _flash_attn_forward
from .refusals import refuse_dtype, unsupported

__all__ = [
    "_flash_attn_backward",
    "_flash_attn_forward",
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]

FORM = "FlashAttention-3"
_plain, _varlen, _kvcache = [
    Usage(f"flash_attn_interface.{name}")
    for name in ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache")
]
fa3_ops.define()


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    window_size: Any = NO_WINDOW,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    s_aux: Any = None,
) -> Any:
    """Compute attention of requests of one length: `rawmla.flash_attn_func`.

    Returns out, or with `return_attn_probs` (out, lse). The scales of FP8 inputs do not count, as FP8 inputs
    are refused. `num_splits`, `pack_gqa` and `sm_margin` are checked and change nothing.
    """
    if getattr(q, "dtype", None) not in DTYPES:
        refuse_dtype("q", q)
    if qv is not None:
        unsupported("qv")
    if attention_chunk:
        unsupported("attention_chunk")
    if window_size.__class__ is not tuple:
        window_size = as_pair(window_size)
    if num_splits != 1:
        check_num_splits(num_splits)
    if pack_gqa is not None or sm_margin != 0:
        check_hints(pack_gqa, sm_margin, None)
    out, lse = dense.flash_attn_func(
        q, k, v, 0.0, softmax_scale, causal, window_size, softcap, None, deterministic, attn_sink=s_aux
    )
    _plain.note(FORM, q, k)
    out = contiguous(out)
    return (out, lse) if return_attn_probs else out


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    seqused_q: Any = None,
    seqused_k: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    window_size: Any = NO_WINDOW,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    s_aux: Any = None,
) -> Any:
    """Compute attention of requests of different lengths: `rawmla.flash_attn_varlen_func`.

    Returns out, or with `return_attn_probs` (out, lse `[h_q, total_q]`). `max_seqlen_q` and `max_seqlen_k`
    may be tensors, which are read on the CPU alone.
    """
    if getattr(q, "dtype", None) not in DTYPES:
        refuse_dtype("q", q)
    if qv is not None:
        unsupported("qv")
    if attention_chunk:
        unsupported("attention_chunk")
    if window_size.__class__ is not tuple:
        window_size = as_pair(window_size)
    if max_seqlen_q.__class__ is not int:
        max_seqlen_q = as_bound(max_seqlen_q, q.shape[0])
    if max_seqlen_k.__class__ is not int:
        max_seqlen_k = as_bound(max_seqlen_k, k.shape[0])
    if num_splits != 1:
        check_num_splits(num_splits)
    if pack_gqa is not None or sm_margin != 0:
        check_hints(pack_gqa, sm_margin, None)
    out, lse = dense.flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, softmax_scale, causal,
        deterministic, window_size=window_size, softcap=softcap, attn_sink=s_aux, seqused_q=seqused_q,
        seqused_k=seqused_k,
    )  # fmt: skip
    _varlen.note(FORM, q, k)
    out = contiguous(out)
    return (out, lse.t()) if return_attn_probs else out


def flash_attn_qkvpacked_func(
    qkv: Any,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    window_size: Any = NO_WINDOW,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Call `flash_attn_func` with parts of qkv: `[b, s, 3, h, d]`, or `[b, s, h_q + 2 * h_kv, d]`.

    The second form needs `num_heads_q`, which is h_q.
    """
    if qkv.dim() == 5:
        q, k, v = split_packed("qkv", qkv, 3)
    elif qkv.dim() != 4:
        raise ValueError(
            f"qkv: expected shape [b, s, 3, h, d] or [b, s, h_q + 2 * h_kv, d], got {list(qkv.shape)}"
        )
    elif num_heads_q is None:
        raise ValueError("num_heads_q: expected an int with a qkv of four dimensions, got None")
    else:
        heads = qkv.shape[2] - num_heads_q
        if heads <= 0 or heads % 2:
            raise ValueError(
                f"num_heads_q: expected one that leaves 2 * h_kv heads of qkv, {list(qkv.shape)}, got "
                f"{num_heads_q}"
            )
        q, k, v = qkv.split([num_heads_q, heads // 2, heads // 2], dim=2)
    return flash_attn_func(
        q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size, attention_chunk,
        softcap, 1, None, deterministic, sm_margin, return_attn_probs,
    )  # fmt: skip


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
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Any = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    *,
    s_aux: Any = None,
) -> Any:
    """Append k and v to caches and attend over them: `rawmla.flash_attn_with_kvcache`.

    Returns out, or with `return_softmax_lse` (out, lse, two empty tensors); lse is `[b, h_q, s_q]`, or
    `[h_q, total_q]` with `cu_seqlens_q`. `scheduler_metadata` is never read.
    """
    if getattr(q, "dtype", None) not in CACHE_DTYPES:
        refuse_dtype("q", q)
    if qv is not None:
        unsupported("qv")
    if attention_chunk:
        unsupported("attention_chunk")
    if window_size.__class__ is not tuple:
        window_size = as_pair(window_size)
    if cu_seqlens_q is None:
        max_seqlen_q = None  # q has four dimensions, one of them s_q; some callers pass the length as well
    elif max_seqlen_q.__class__ is not int:
        max_seqlen_q = as_bound(max_seqlen_q, q.shape[0])
    if pack_gqa is not None or sm_margin != 0 or scheduler_metadata is not None:
        check_hints(pack_gqa, sm_margin, scheduler_metadata)
    out, lse = rawmla.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, rotary_cos=rotary_cos, rotary_sin=rotary_sin, cache_seqlens=cache_seqlens,
        cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad, block_table=page_table,
        cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q,
        cu_seqlens_k_new=None if k is None else cu_seqlens_k_new,
        rotary_seqlens=None if rotary_cos is None else rotary_seqlens,
        q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, softmax_scale=softmax_scale,
        causal=causal, window_size=window_size, softcap=softcap, rotary_interleaved=rotary_interleaved,
        attn_sink=s_aux, num_splits=num_splits,
    )  # fmt: skip
    _kvcache.note(FORM, q, k_cache)
    out = contiguous(out)
    if not return_softmax_lse:
        return out
    nothing = q.new_empty(0, dtype=torch.float32)
    return out, heads_first(lse), nothing, nothing
