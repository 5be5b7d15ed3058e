"""FlashAttention-2's Python functions by its names and argument orders, computed by rawmla.

The surface is the one of flash-attn 2.8 (github.com/Dao-AILab/flash-attention). Three keyword-only arguments
are added: `s_aux`, which is `attn_sink` of rawmla's functions, and which transformers passes where a function
has it; `seqused_k` and `out` of `flash_attn_varlen_func`. docs/flash_attn.md has the differences.
"""

from __future__ import annotations

from typing import Any

from ...api import dense
from ...call.arrays import needs_gradient
from ...mha.arguments import NO_WINDOW
from ..usage import Usage
from . import fa2_private
from .arguments import (
    DTYPES,
    as_bound,
    as_pair,
    detached,
    lse_of_equal_lengths,
    split_packed,
    with_plus_inf,
)
from .fa2_caches import WithoutBackward, cache_function, check_rotation
from .fa2_private import *  # noqa: F403
from .fa2_private import attend_pages
from .refusals import refuse_dropout, refuse_dtype

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    *fa2_private.__all__,
]

FORM = "FlashAttention-2"
_plain, _varlen, _kvcache = [
    Usage(f"flash_attn.{name}")
    for name in ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache")
]


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Any = None,
) -> Any:
    """Compute attention of requests of one length: `rawmla.flash_attn_func`.

    Returns out, or with `return_attn_probs` (out, lse, an empty tensor), where lse is +inf in rows without
    keys.
    """
    if getattr(q, "dtype", None) not in DTYPES:
        refuse_dtype("q", q)
    if dropout_p:
        refuse_dropout(dropout_p)
    if window_size.__class__ is not tuple:
        window_size = as_pair(window_size)
    out, lse = dense.flash_attn_func(
        q, k, v, 0.0, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        attn_sink=s_aux,
    )  # fmt: skip
    _plain.note(FORM, q, k)
    if return_attn_probs:
        return out, lse_of_equal_lengths(lse, q, k), q.new_empty(0)
    return out


def flash_attn_kvpacked_func(
    q: Any,
    kv: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Call `flash_attn_func` with the k and v in kv `[b, s_k, 2, h_kv, d]`."""
    k, v = split_packed("kv", kv, 2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Call `flash_attn_func` with the q, k and v in qkv `[b, s, 3, h, d]`."""
    q, k, v = split_packed("qkv", qkv, 3)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
    *,
    s_aux: Any = None,
    seqused_k: Any = None,
    out: Any = None,
) -> Any:
    """Compute attention of requests of different lengths: `rawmla.flash_attn_varlen_func`.

    With `block_table`, k and v are paged caches: `rawmla.flash_attn_with_kvcache`. Returns out, or with
    `return_attn_probs` (out, lse `[h_q, total_q]`, an empty tensor), where lse is +inf in rows without keys.
    `max_seqlen_q` and `max_seqlen_k` may be tensors, which are read on the CPU alone.
    """
    if getattr(q, "dtype", None) not in DTYPES:
        refuse_dtype("q", q)
    if dropout_p:
        refuse_dropout(dropout_p)
    if window_size.__class__ is not tuple:
        window_size = as_pair(window_size)
    if max_seqlen_q.__class__ is not int:
        max_seqlen_q = as_bound(max_seqlen_q, q.shape[0])
    if block_table is not None:
        bare_q, bare_k, bare_v = detached(q, k, v)
        out, lse = attend_pages(
            bare_q, bare_k, bare_v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, softmax_scale, causal,
            window_size, softcap, alibi_slopes, block_table, None, seqused_k, 0, s_aux, out,
        )  # fmt: skip
        if needs_gradient(q, k, v):
            out = WithoutBackward.apply(out, q, k, v)
    else:
        if max_seqlen_k.__class__ is not int:
            max_seqlen_k = as_bound(max_seqlen_k, k.shape[0])
        out, lse = dense.flash_attn_varlen_func(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, softmax_scale, causal,
            deterministic, window_size=window_size, softcap=softcap, attn_sink=s_aux,
            alibi_slopes=alibi_slopes, seqused_k=seqused_k, out=out,
        )  # fmt: skip
    _varlen.note(FORM, q, k)
    if return_attn_probs:
        return out, with_plus_inf(lse.t()), q.new_empty(0)
    return out


def flash_attn_varlen_kvpacked_func(
    q: Any,
    kv: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Call `flash_attn_varlen_func` with the k and v in kv `[total_k, 2, h_kv, d]`."""
    if getattr(q, "dtype", None) not in DTYPES:
        refuse_dtype("q", q)
    if dropout_p:
        refuse_dropout(dropout_p)
    if window_size.__class__ is not tuple:
        window_size = as_pair(window_size)
    if max_seqlen_q.__class__ is not int:
        max_seqlen_q = as_bound(max_seqlen_q, q.shape[0])
    if max_seqlen_k.__class__ is not int:
        max_seqlen_k = as_bound(max_seqlen_k, kv.shape[0])
    out, lse = dense.flash_attn_varlen_kvpacked_func(
        q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, None, 0.0, softmax_scale, causal,
        deterministic, window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes,
    )  # fmt: skip
    _varlen.note(FORM, q, kv)
    if return_attn_probs:
        return out, with_plus_inf(lse.t()), q.new_empty(0)
    return out


def flash_attn_varlen_qkvpacked_func(
    qkv: Any,
    cu_seqlens: Any,
    max_seqlen: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Call `flash_attn_varlen_func` with the q, k and v in qkv `[total, 3, h, d]`."""
    if getattr(qkv, "dtype", None) not in DTYPES:
        refuse_dtype("qkv", qkv)
    if dropout_p:
        refuse_dropout(dropout_p)
    if window_size.__class__ is not tuple:
        window_size = as_pair(window_size)
    if max_seqlen.__class__ is not int:
        max_seqlen = as_bound(max_seqlen, qkv.shape[0])
    out, lse = dense.flash_attn_varlen_qkvpacked_func(
        qkv, cu_seqlens, max_seqlen, None, 0.0, softmax_scale, causal, deterministic,
        window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes,
    )  # fmt: skip
    _varlen.note(FORM, qkv, qkv)
    if return_attn_probs:
        return out, lse.t(), qkv.new_empty(0)  # a query has itself as a key
    return out


def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    block_table: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = NO_WINDOW,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Any = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    s_aux: Any = None,
) -> Any:
    """Append k and v to caches and attend over them: `rawmla.flash_attn_with_kvcache`.

    Returns out, or with `return_softmax_lse` (out, lse `[b, h_q, s_q]`), where lse is +inf in rows without
    keys.
    """
    if getattr(q, "dtype", None) not in DTYPES:
        refuse_dtype("q", q)
    if window_size.__class__ is not tuple:
        window_size = as_pair(window_size)
    if rotary_cos is not None:
        check_rotation(q, k_cache, block_table, causal, window_size)
    out, lse = cache_function(q)(
        q, k_cache, v_cache, k, v, rotary_cos=rotary_cos, rotary_sin=rotary_sin, cache_seqlens=cache_seqlens,
        cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad, block_table=block_table,
        softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
        rotary_interleaved=rotary_interleaved, alibi_slopes=alibi_slopes, attn_sink=s_aux,
        num_splits=num_splits,
    )  # fmt: skip
    _kvcache.note(FORM, q, k_cache)
    if return_softmax_lse:
        return out, with_plus_inf(lse)
    return out
