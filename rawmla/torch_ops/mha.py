"""The operators of dense attention and of prefix prefill, registered as those of `rawmla.torch_ops.mla`.

A window has two arguments, whose bounds are -1 for none. Packed arrays are split before: parts are views. A
scale that may be a number or a tensor has two arguments, of which one at least is None.
"""

from __future__ import annotations

from typing import Any

import torch

from ..mha.arguments import order_of
from .registration import NoExample, example, register

__all__: list[str] = []

Result = tuple[torch.Tensor, ...]
_MASKS = "SymInt window_left, SymInt window_right, float softcap, Tensor? attn_sink, Tensor? alibi_slopes"
_VARLEN = (
    "Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, "
    f"SymInt max_seqlen_k, float? softmax_scale, bool causal, bool is_varlen, {_MASKS}, Tensor? seqused_q, "
    "Tensor? seqused_k"
)
_FIXED = f"Tensor q, Tensor k, Tensor v, float? softmax_scale, bool causal, {_MASKS}"
_PREFIX = (
    "Tensor q, Tensor? k, Tensor? v, Tensor(a!) o, str kv_cache_dtype, Tensor k_cache, Tensor v_cache, "
    "Tensor b_loc, Tensor b_start_loc, Tensor b_seq_len, SymInt? max_seq_len, SymInt max_input_len, "
    "Tensor? k_scale, float? k_scale_number, Tensor? v_scale, float? v_scale_number, Tensor? alibi_slopes, "
    "SymInt? sliding_window, float? sm_scale, bool skip_decode, Tensor? fp8_out_scale, "
    "float? fp8_out_scale_number, Tensor? sinks, bool is_block_table_ptr, int interleaved_v_pack_factor, "
    "bool causal"
)


def _varlen(
    api: Any,
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None,
    causal: bool,
    is_varlen: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    attn_sink: Any,
    alibi_slopes: Any,
    seqused_q: Any,
    seqused_k: Any,
    out: Any = None,
) -> Any:
    return api.flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        0.0,
        softmax_scale,
        causal,
        False,
        is_varlen,
        window_size=(window_left, window_right),
        softcap=softcap,
        attn_sink=attn_sink,
        alibi_slopes=alibi_slopes,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        out=out,
    )


def _fixed(
    api: Any,
    q: Any,
    k: Any,
    v: Any,
    softmax_scale: float | None,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    attn_sink: Any,
    alibi_slopes: Any,
    out: Any = None,
) -> Any:
    return api.flash_attn_func(
        q,
        k,
        v,
        0.0,
        softmax_scale,
        causal,
        (window_left, window_right),
        softcap,
        alibi_slopes,
        attn_sink=attn_sink,
        out=out,
    )


def _prefix(
    api: Any,
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    kv_cache_dtype: str,
    k_cache: Any,
    v_cache: Any,
    b_loc: Any,
    b_start_loc: Any,
    b_seq_len: Any,
    max_seq_len: int | None,
    max_input_len: int,
    k_scale: Any,
    k_scale_number: float | None,
    v_scale: Any,
    v_scale_number: float | None,
    alibi_slopes: Any,
    sliding_window: int | None,
    sm_scale: float | None,
    skip_decode: bool,
    fp8_out_scale: Any,
    fp8_out_scale_number: float | None,
    *others: Any,
) -> Any:
    return api.context_attention_fwd(
        q,
        k,
        v,
        o,
        kv_cache_dtype,
        k_cache,
        v_cache,
        b_loc,
        b_start_loc,
        b_seq_len,
        max_seq_len,
        max_input_len,
        k_scale_number if k_scale is None else k_scale,
        v_scale_number if v_scale is None else v_scale,
        alibi_slopes,
        sliding_window,
        sm_scale,
        skip_decode,
        fp8_out_scale_number if fp8_out_scale is None else fp8_out_scale,
        *others,
    )


def _empty_out(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """A fresh out, with the strides of `rawmla.mha.arguments.fresh_out_strides`.

    Sizes may be symbolic. The order follows from their example values, so that it restricts none.
    """
    shape = (*q.shape[:-1], v.shape[-1])
    try:
        sizes, steps = (tuple([example(n) for n in numbers]) for numbers in (q.shape, q.stride()))
        order = order_of(sizes, steps)
    except NoExample:
        order = list(range(len(shape) - 1))
    strides: list[Any] = [1] * len(shape)
    step: Any = (shape[-1] + 7) // 8 * 8
    for axis in reversed(order):
        strides[axis] = step
        step = step * (max(1, shape[axis]) if isinstance(shape[axis], int) else shape[axis])
    return q.new_empty_strided(shape, strides)


def _empty_varlen_lse(q: torch.Tensor) -> torch.Tensor:
    tokens, h_q, _ = q.shape
    return q.new_empty((h_q, tokens), dtype=torch.float32).t()


def _empty_lse(q: torch.Tensor) -> torch.Tensor:
    b, s_q, h_q, _ = q.shape
    return q.new_empty((b, h_q, s_q), dtype=torch.float32)


register(
    f"flash_attn_varlen({_VARLEN}) -> (Tensor, Tensor)",
    _varlen,
    lambda q, k, v, *args: (_empty_out(q, v), _empty_varlen_lse(q)),
)
register(
    f"flash_attn_varlen_out({_VARLEN}, Tensor(a!) out) -> Tensor",
    lambda *args: _varlen(*args)[1],
    lambda q, *args: _empty_varlen_lse(q),
)
register(
    f"flash_attn({_FIXED}) -> (Tensor, Tensor)",
    _fixed,
    lambda q, k, v, *args: (_empty_out(q, v), _empty_lse(q)),
)
register(
    f"flash_attn_out({_FIXED}, Tensor(a!) out) -> Tensor",
    lambda *args: _fixed(*args)[1],
    lambda q, *args: _empty_lse(q),
)
register(f"context_attention_out({_PREFIX}) -> ()", _prefix, None)
