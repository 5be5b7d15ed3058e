"""FlashAttention-2's private functions, which other libraries call: forward and backward without a graph."""

from __future__ import annotations

from typing import Any

import torch

from ...api import dense, dense_backward
from .arguments import DTYPES, as_bound, detached, lse_of_equal_lengths, with_plus_inf
from .fa2_caches import cache_function
from .refusals import refuse_dropout, refuse_dtype, unsupported

__all__ = [
    "_flash_attn_backward",
    "_flash_attn_forward",
    "_flash_attn_varlen_backward",
    "_flash_attn_varlen_forward",
    "_wrapped_flash_attn_backward",
    "_wrapped_flash_attn_forward",
    "_wrapped_flash_attn_varlen_backward",
    "_wrapped_flash_attn_varlen_forward",
]

Four = tuple[Any, Any, Any, Any]
USE_TRITON_ROCM = False
"""Whether FlashAttention-2 would run on AMD's GPUs. Its tests read this and the next name."""


def _get_block_size_n(device: Any, head_dim: int, is_dropout: bool, is_causal: bool) -> int:
    """Return the keys in a step of FlashAttention-2's kernels on Hopper; ours take other numbers."""
    assert head_dim <= 256
    if head_dim <= 64:
        return 64 if is_dropout and head_dim > 32 else 128
    return 32 if is_dropout and 96 < head_dim <= 128 else 64


def _flash_attn_forward(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Any,
    return_softmax: bool,
) -> Four:
    """Return out, lse, an empty tensor, and int64 `[2]`, which stands for the state of random numbers."""
    return forward(
        q, k, v, None, dropout_p, softmax_scale, causal, (window_size_left, window_size_right), softcap,
        alibi_slopes,
    )  # fmt: skip


def forward(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window: tuple[int, int],
    softcap: float,
    alibi_slopes: Any,
) -> Four:
    """Compute `_flash_attn_forward` into an `out` that may be given."""
    if getattr(q, "dtype", None) not in DTYPES:
        refuse_dtype("q", q)
    if dropout_p:
        refuse_dropout(dropout_p)
    q, k, v = detached(q, k, v)
    out, lse = dense.flash_attn_func(
        q, k, v, 0.0, softmax_scale, causal, window, softcap, alibi_slopes, out=out
    )
    return out, lse_of_equal_lengths(lse, q, k), q.new_empty(0), q.new_empty(2, dtype=torch.int64)


def _flash_attn_varlen_forward(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    return_softmax: bool = False,
    block_table: Any = None,
    leftpad_k: Any = None,
    seqused_k: Any = None,
    zero_tensors: bool = False,
    num_splits: int = 0,
) -> Four:
    """Return the same four as `_flash_attn_forward`, with lse `[h_q, total_q]`."""
    return varlen_forward(
        q, k, v, None, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
        causal, (window_size_left, window_size_right), softcap, alibi_slopes, block_table, leftpad_k,
        seqused_k, zero_tensors, num_splits,
    )  # fmt: skip


def varlen_forward(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window: tuple[int, int],
    softcap: float,
    alibi_slopes: Any,
    block_table: Any,
    leftpad_k: Any,
    seqused_k: Any,
    zero_tensors: bool,
    num_splits: int,
) -> Four:
    """Compute `_flash_attn_varlen_forward` into an `out` that may be given."""
    if getattr(q, "dtype", None) not in DTYPES:
        refuse_dtype("q", q)
    if dropout_p:
        refuse_dropout(dropout_p)
    if num_splits > 1:
        raise RuntimeError(
            f"num_splits: num_splits > 1 is not supported by varlen_fwd, got {num_splits}; pass 0"
        )
    if max_seqlen_q.__class__ is not int:
        max_seqlen_q = as_bound(max_seqlen_q, q.shape[0])
    q, k, v = detached(q, k, v)
    if zero_tensors:  # rows of no request are not written
        out = q.new_zeros((*q.shape[:-1], v.shape[-1])) if out is None else out.zero_()
    if block_table is not None:
        out, lse = attend_pages(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, softmax_scale, causal, window, softcap,
            alibi_slopes, block_table, leftpad_k, seqused_k, num_splits, None, out,
        )  # fmt: skip
    else:
        if leftpad_k is not None:
            unsupported("leftpad_k")
        if max_seqlen_k.__class__ is not int:
            max_seqlen_k = as_bound(max_seqlen_k, k.shape[0])
        out, lse = dense.flash_attn_varlen_func(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, softmax_scale, causal,
            window_size=window, softcap=softcap, alibi_slopes=alibi_slopes, seqused_k=seqused_k, out=out,
        )  # fmt: skip
    return out, with_plus_inf(lse.t()), q.new_empty(0), q.new_empty(2, dtype=torch.int64)


def attend_pages(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any,
    softmax_scale: float | None,
    causal: bool,
    window: Any,
    softcap: float,
    alibi_slopes: Any,
    block_table: Any,
    leftpad_k: Any,
    seqused_k: Any,
    num_splits: int,
    attn_sink: Any,
    out: Any,
) -> tuple[Any, Any]:
    """Attend over keys in pages, as many as seqused_k counts, or cu_seqlens_k where that is None."""
    return cache_function(q)(
        q, k, v, cache_seqlens=seqused_k, cache_leftpad=leftpad_k, block_table=block_table,
        cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q,
        cu_seqlens_k=cu_seqlens_k if seqused_k is None else None, softmax_scale=softmax_scale, causal=causal,
        window_size=window, softcap=softcap, alibi_slopes=alibi_slopes, attn_sink=attn_sink,
        num_splits=num_splits, out=out,
    )  # fmt: skip


def _flash_attn_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    softmax_lse: Any,
    dq: Any,
    dk: Any,
    dv: Any,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Any,
    deterministic: bool,
    rng_state: Any = None,
) -> Any:
    """Write dq, dk and dv. Returns an empty float32 tensor, as rawmla does not keep softmax_d."""
    if dropout_p:
        refuse_dropout(dropout_p)
    dout, q, k, v, out, softmax_lse = detached(dout, q, k, v, out, softmax_lse)
    dense_backward.flash_attn_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, causal, softmax_scale, deterministic=deterministic,
        window_size=(window_size_left, window_size_right), softcap=softcap, alibi_slopes=alibi_slopes,
    )  # fmt: skip
    return q.new_empty(0, dtype=torch.float32)


def _flash_attn_varlen_backward(
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
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Any,
    deterministic: bool,
    rng_state: Any = None,
    zero_tensors: bool = False,
) -> Any:
    """Write dq, dk and dv, zeros in rows of no request. Returns an empty float32 tensor."""
    if dropout_p:
        refuse_dropout(dropout_p)
    dout, q, k, v, out, softmax_lse = detached(dout, q, k, v, out, softmax_lse)
    dense_backward.flash_attn_varlen_backward(
        dout, q, k, v, out, softmax_lse.t(), cu_seqlens_q, cu_seqlens_k,
        as_bound(max_seqlen_q, q.shape[0]), as_bound(max_seqlen_k, k.shape[0]), dq, dk, dv, causal,
        softmax_scale, deterministic=deterministic, window_size=(window_size_left, window_size_right),
        softcap=softcap, alibi_slopes=alibi_slopes,
    )  # fmt: skip
    return q.new_empty(0, dtype=torch.float32)


_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward
