"""The operations of `rawmla.mha` as calls of operators: what public functions do while torch traces them.

torch.compile traces these functions themselves, so they are Python that it can follow. Checks of arrays are
the operators'.
"""

from __future__ import annotations

from typing import Any

import torch

from ..call.checks import as_bool
from ..kernels.mha_backward_variants import Needs
from ..mha.arguments import as_window, check_options, packed_parts

__all__ = [
    "context_attention_fwd",
    "flash_attn",
    "flash_attn_backward",
    "flash_attn_varlen",
    "flash_attn_varlen_backward",
    "unpacked",
]

_ops = torch.ops.rawmla


def refuse_tensors(**numbers: Any) -> None:
    """Raise if a number was given as a tensor: operators would take it, and reading one waits for the GPU."""
    for name, number in numbers.items():
        if isinstance(number, torch.Tensor):
            raise TypeError(f"{name}: expected a number, got a tensor")


def unpacked(name: str, packed: Any, head_dim_qk: Any, count: int) -> list[Any]:
    """The parts of a packed tensor: views."""
    return [packed[index] for index in packed_parts(name, tuple(packed.shape), head_dim_qk, count)]


def flash_attn_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    dropout_p: Any,
    softmax_scale: Any,
    causal: Any,
    deterministic: Any,
    is_varlen: Any,
    window_size: Any,
    softcap: Any,
    attn_sink: Any,
    alibi_slopes: Any,
    attention_chunk: Any,
    seqused_q: Any,
    seqused_k: Any,
    out: Any,
) -> tuple[Any, Any]:
    """`rawmla.flash_attn_varlen_func`."""
    check_options(dropout_p, deterministic, attention_chunk)
    refuse_tensors(
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        softmax_scale=softmax_scale,
        causal=causal,
        is_varlen=is_varlen,
        softcap=softcap,
    )
    left, right = as_window(window_size, False)
    call = (
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        causal,
        is_varlen,
        left,
        right,
        softcap,
        attn_sink,
        alibi_slopes,
        seqused_q,
        seqused_k,
        as_bool("deterministic", deterministic),
    )
    if out is None:
        return _ops.flash_attn_varlen.default(*call)
    return out, _ops.flash_attn_varlen_out.default(*call, out)


def flash_attn(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: Any,
    softmax_scale: Any,
    causal: Any,
    window_size: Any,
    softcap: Any,
    alibi_slopes: Any,
    deterministic: Any,
    attn_sink: Any,
    attention_chunk: Any,
    out: Any,
) -> tuple[Any, Any]:
    """`rawmla.flash_attn_func`."""
    check_options(dropout_p, deterministic, attention_chunk)
    refuse_tensors(softmax_scale=softmax_scale, causal=causal, softcap=softcap)
    left, right = as_window(window_size, False)
    deterministic = as_bool("deterministic", deterministic)
    call = (q, k, v, softmax_scale, causal, left, right, softcap, attn_sink, alibi_slopes, deterministic)
    if out is None:
        return _ops.flash_attn.default(*call)
    return out, _ops.flash_attn_out.default(*call, out)


def flash_attn_varlen_backward(
    needs: Needs,
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    dq: Any,
    dk: Any,
    dv: Any,
    causal: Any,
    softmax_scale: Any,
    is_varlen: Any,
    dlse: Any,
    deterministic: Any,
    window_size: Any,
    softcap: Any,
    attn_sink: Any,
    alibi_slopes: Any,
    seqused_q: Any,
    seqused_k: Any,
) -> tuple[Any, ...]:
    """`rawmla.mha.gradients.varlen_gradients`."""
    refuse_tensors(
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        softmax_scale=softmax_scale,
        causal=causal,
        is_varlen=is_varlen,
        softcap=softcap,
    )
    left, right = as_window(window_size, False)
    call = (
        *(dout, q, k, v, out, lse, dlse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
        *(softmax_scale, causal, is_varlen, left, right, softcap, attn_sink, alibi_slopes),
        *(seqused_q, seqused_k, as_bool("deterministic", deterministic)),
    )
    return _backward("flash_attn_varlen_backward", call, needs, (dq, dk, dv))


def flash_attn_backward(
    needs: Needs,
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    dq: Any,
    dk: Any,
    dv: Any,
    causal: Any,
    softmax_scale: Any,
    dlse: Any,
    deterministic: Any,
    window_size: Any,
    softcap: Any,
    attn_sink: Any,
    alibi_slopes: Any,
) -> tuple[Any, ...]:
    """`rawmla.mha.gradients.gradients`."""
    refuse_tensors(softmax_scale=softmax_scale, causal=causal, softcap=softcap)
    left, right = as_window(window_size, False)
    call = (
        *(dout, q, k, v, out, lse, dlse, softmax_scale, causal, left, right, softcap),
        *(attn_sink, alibi_slopes, as_bool("deterministic", deterministic)),
    )
    return _backward("flash_attn_backward", call, needs, (dq, dk, dv))


def _backward(name: str, call: tuple[Any, ...], needs: Needs, given: Any) -> tuple[Any, ...]:
    if all(needs) and all(one is not None for one in given):
        return *given, getattr(_ops, f"{name}_out").default(*call, *given)
    *made, dsink = getattr(_ops, name).default(*call, list(needs))
    results = [
        (new if one is None else one.copy_(new)) if is_needed else None
        for one, new, is_needed in zip(given, made, needs, strict=False)
    ]
    return *results, dsink


def context_attention_fwd(
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    kv_cache_dtype: Any,
    k_cache: Any,
    v_cache: Any,
    b_loc: Any,
    b_start_loc: Any,
    b_seq_len: Any,
    max_seq_len: Any,
    max_input_len: Any,
    k_scale: Any,
    v_scale: Any,
    alibi_slopes: Any,
    sliding_window: Any,
    sm_scale: Any,
    skip_decode: Any,
    fp8_out_scale: Any,
    *others: Any,
) -> Any:
    """`rawmla.context_attention_fwd`."""
    if not str(kv_cache_dtype).startswith("fp8"):
        k_scale = v_scale = None  # only FP8 caches have scales
    refuse_tensors(
        max_seq_len=max_seq_len, max_input_len=max_input_len, sliding_window=sliding_window, sm_scale=sm_scale
    )
    _ops.context_attention_out.default(
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
        *_tensor_and_number(k_scale),
        *_tensor_and_number(v_scale),
        alibi_slopes,
        sliding_window,
        sm_scale,
        skip_decode,
        *_tensor_and_number(fp8_out_scale),
        *others,
    )
    return o


def _tensor_and_number(scale: Any) -> tuple[Any, Any]:
    return (scale, None) if isinstance(scale, torch.Tensor) else (None, scale)
