"""The functions of FlashAttention-2's extension `flash_attn_2_cuda`, in its argument orders.

Their argument for a random generator has to be None, as in FlashAttention-2.
"""

from __future__ import annotations

from typing import Any

import torch

from ...api import dense_backward
from .arguments import DTYPES, detached, with_plus_inf
from .fa2_caches import cache_function, check_rotation
from .fa2_private import forward, varlen_forward
from .refusals import refuse_dropout, refuse_dtype

__all__ = ["bwd", "fwd", "fwd_kvcache", "varlen_bwd", "varlen_fwd"]


def _refuse_generator(generator: Any) -> None:
    """Raise FlashAttention-2's error for a generator that is given."""
    if generator is not None:
        raise RuntimeError("unused_generator: the `generator` argument is no longer supported; pass None")


def fwd(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    alibi_slopes: Any,
    p_dropout: float,
    softmax_scale: float,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    return_softmax: bool,
    unused_generator: Any = None,
) -> list[Any]:
    """Compute `_flash_attn_forward` into `out`, which may be None."""
    _refuse_generator(unused_generator)
    window = window_size_left, window_size_right
    return [*forward(q, k, v, out, p_dropout, softmax_scale, is_causal, window, softcap, alibi_slopes)]


def varlen_fwd(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    seqused_k: Any,
    leftpad_k: Any,
    block_table: Any,
    alibi_slopes: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    p_dropout: float,
    softmax_scale: float,
    zero_tensors: bool,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    return_softmax: bool,
    unused_generator: Any = None,
    num_splits: int = 0,
) -> list[Any]:
    """Compute `_flash_attn_varlen_forward` into `out`, which may be None."""
    _refuse_generator(unused_generator)
    return [
        *varlen_forward(
            q, k, v, out, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, p_dropout, softmax_scale,
            is_causal, (window_size_left, window_size_right), softcap, alibi_slopes, block_table, leftpad_k,
            seqused_k, zero_tensors, num_splits,
        )
    ]  # fmt: skip


def bwd(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    softmax_lse: Any,
    dq: Any,
    dk: Any,
    dv: Any,
    alibi_slopes: Any,
    p_dropout: float,
    softmax_scale: float,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    deterministic: bool,
    unused_generator: Any = None,
    rng_state: Any = None,
) -> list[Any]:
    """Return dq, dk and dv, which are written where they are given, and an empty tensor for softmax_d."""
    _refuse_generator(unused_generator)
    if p_dropout:
        refuse_dropout(p_dropout)
    dout, q, k, v, out, softmax_lse = detached(dout, q, k, v, out, softmax_lse)
    gradients = dense_backward.flash_attn_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, is_causal, softmax_scale, deterministic=deterministic,
        window_size=(window_size_left, window_size_right), softcap=softcap, alibi_slopes=alibi_slopes,
    )  # fmt: skip
    return [*gradients, q.new_empty(0, dtype=torch.float32)]


def varlen_bwd(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    softmax_lse: Any,
    dq: Any,
    dk: Any,
    dv: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    alibi_slopes: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    p_dropout: float,
    softmax_scale: float,
    zero_tensors: bool,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    deterministic: bool,
    unused_generator: Any = None,
    rng_state: Any = None,
) -> list[Any]:
    """Return the same four as `bwd`, for requests of different lengths."""
    _refuse_generator(unused_generator)
    if p_dropout:
        refuse_dropout(p_dropout)
    dout, q, k, v, out, softmax_lse = detached(dout, q, k, v, out, softmax_lse)
    gradients = dense_backward.flash_attn_varlen_backward(
        dout, q, k, v, out, softmax_lse.t(), cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dq, dk,
        dv, is_causal, softmax_scale, deterministic=deterministic,
        window_size=(window_size_left, window_size_right), softcap=softcap, alibi_slopes=alibi_slopes,
    )  # fmt: skip
    return [*gradients, q.new_empty(0, dtype=torch.float32)]


def fwd_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any,
    v: Any,
    cache_seqlens: Any,
    rotary_cos: Any,
    rotary_sin: Any,
    cache_batch_idx: Any,
    cache_leftpad: Any,
    block_table: Any,
    alibi_slopes: Any,
    out: Any,
    softmax_scale: float,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    is_rotary_interleaved: bool,
    num_splits: int,
) -> list[Any]:
    """Return out and lse of `flash_attn_with_kvcache`; `out` may be None."""
    if getattr(q, "dtype", None) not in DTYPES:
        refuse_dtype("q", q)
    q, k_cache, v_cache, k, v = detached(q, k_cache, v_cache, k, v)
    if rotary_cos is not None:
        check_rotation(q, k_cache, block_table, is_causal, (window_size_left, window_size_right))
    out, lse = cache_function(q)(
        q, k_cache, v_cache, k, v, rotary_cos=rotary_cos, rotary_sin=rotary_sin, cache_seqlens=cache_seqlens,
        cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad, block_table=block_table,
        softmax_scale=softmax_scale, causal=is_causal, window_size=(window_size_left, window_size_right),
        softcap=softcap, rotary_interleaved=is_rotary_interleaved, alibi_slopes=alibi_slopes,
        num_splits=num_splits, out=out,
    )  # fmt: skip
    return [out, with_plus_inf(lse)]
