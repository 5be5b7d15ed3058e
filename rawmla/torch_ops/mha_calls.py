"""The call paths of `rawmla.mha` as calls of operators: what public functions do while torch traces them.

torch.compile traces these functions themselves, so they are Python that it can follow. Checks of arrays are
the operators'.
"""

from __future__ import annotations

from typing import Any

import torch

from ..call.checks import as_bool
from ..kernels.mha_backward_variants import Needs
from ..mha.arguments import as_window, check_chunk, check_dropout, packed_parts
from ..mha.kvcache import CacheArrays, CacheOptions
from ..mha.prefix_arrays import PrefixArrays, PrefixOptions
from ..mha.records import DenseArrays, DenseOptions, Gradients, Packing
from .registration import call_with_out

_ops = torch.ops.rawmla


def refuse_tensors(**numbers: Any) -> None:
    """Raise if a number was given as a tensor: operators would take it, and reading one waits for the GPU."""
    for name, number in numbers.items():
        if isinstance(number, torch.Tensor):
            raise TypeError(f"{name}: expected a number, got a tensor")


def options_of(
    dropout_p: Any,
    softmax_scale: Any,
    causal: Any,
    deterministic: Any,
    is_varlen: Any,
    window_size: Any,
    softcap: Any,
    attention_chunk: Any,
    max_seqlens: tuple[Any, Any] | None,
    max_names: tuple[str, str] = ("max_seqlen_q", "max_seqlen_k"),
) -> DenseOptions:
    """As `rawmla.mha.records.options_of`, but numbers that may be symbolic are left to the operators."""
    check_dropout(dropout_p)
    check_chunk(attention_chunk)
    refuse_tensors(softmax_scale=softmax_scale, causal=causal, is_varlen=is_varlen, softcap=softcap)
    if max_seqlens is not None:
        refuse_tensors(**{max_names[0]: max_seqlens[0], max_names[1]: max_seqlens[1]})
    window, fixed_order = as_window(window_size), as_bool("deterministic", deterministic)
    return DenseOptions(max_seqlens, softmax_scale, causal, window, softcap, is_varlen, fixed_order)


def _operator(arrays: DenseArrays, options: DenseOptions) -> tuple[str, tuple[Any, ...]]:
    """The name of the form's operator, and its arguments but for q, k and v: see `rawmla.torch_ops.mha`."""
    _, _, _, starts_q, starts_k, used_q, used_k, sink, slopes, _ = arrays
    max_seqlens, scale, causal, (left, right), softcap, is_varlen, deterministic = options
    masks = (left, right, softcap, sink, slopes)
    if max_seqlens is None:
        return "flash_attn", (scale, causal, *masks, deterministic)
    lengths = (starts_q, starts_k, *max_seqlens)
    return "flash_attn_varlen", (*lengths, scale, causal, is_varlen, *masks, used_q, used_k, deterministic)


def attend(arrays: tuple[Any, ...], options: DenseOptions, packing: Packing | None = None) -> tuple[Any, Any]:
    """As `rawmla.mha.forward.attend`."""
    q, k, v, starts_q, starts_k, used_q, used_k, sink, slopes, out = arrays
    if packing is not None:
        packed = q if packing.parts == 3 else k
        indices = packed_parts(packing.name, tuple(packed.shape), packing.head_dim_qk, packing.parts)
        parts = [packed[index] for index in indices]
        if packing.parts == 3:
            (q, k, v), starts_k = parts, starts_q
        else:
            k, v = parts
    name, call = _operator(
        DenseArrays(q, k, v, starts_q, starts_k, used_q, used_k, sink, slopes, out), options
    )
    return call_with_out(name, (q, k, v, *call), out)


def backpropagate(
    arrays: DenseArrays, gradients: Gradients, options: DenseOptions, needs: Needs
) -> tuple[Any, ...]:
    """As `rawmla.mha.backward.backpropagate`."""
    dout, out, lse, dlse, *given = gradients
    name, others = _operator(arrays, options)
    call = (dout, arrays.q, arrays.k, arrays.v, out, lse, dlse, *others)
    if all(needs) and all(one is not None for one in given):
        return *given, getattr(_ops, f"{name}_backward_out").default(*call, *given)
    *made, dsink = getattr(_ops, f"{name}_backward").default(*call, list(needs))
    results = [
        (new if one is None else one.copy_(new)) if is_needed else None
        for one, new, is_needed in zip(given, made, needs, strict=False)
    ]
    return *results, dsink


def cache_options_of(
    max_seqlen_q: Any,
    softmax_scale: Any,
    causal: Any,
    window_size: Any,
    softcap: Any,
    attention_chunk: Any,
    rotary_interleaved: Any,
    num_splits: Any,
) -> CacheOptions:
    """As `rawmla.mha.kvcache.cache_options_of`, in the same way as `options_of`."""
    check_chunk(attention_chunk)
    refuse_tensors(
        max_seqlen_q=max_seqlen_q, softmax_scale=softmax_scale, causal=causal, softcap=softcap,
        rotary_interleaved=rotary_interleaved, num_splits=num_splits,
    )  # fmt: skip
    window = as_window(window_size)
    return CacheOptions(max_seqlen_q, softmax_scale, causal, window, softcap, rotary_interleaved, num_splits)


def attend_cache(arrays: CacheArrays, options: CacheOptions) -> tuple[Any, Any]:
    """As `rawmla.mha.kvcache.attend_cache`."""
    (
        q, k_cache, v_cache, k, v, cos, sin, starts, lengths, starts_k, starts_new, leftpad, batch_idx, table,
        rotary_lengths, sink, slopes, q_descale, k_descale, v_descale, out,
    ) = arrays  # fmt: skip
    longest, scale, causal, (left, right), softcap, interleaved, num_splits = options
    length = None
    if lengths is not None and not isinstance(lengths, torch.Tensor):
        lengths, length = None, lengths
    shared = (
        starts, longest, lengths, length, starts_k, leftpad, batch_idx, table, scale, causal, left, right,
        softcap, sink, slopes, num_splits, q_descale, k_descale, v_descale,
    )  # fmt: skip
    if k is None and v is None and cos is None and sin is None and rotary_lengths is None:
        return call_with_out("flash_attn_kvcache", (q, k_cache, v_cache, *shared), out)
    new = (k, v, starts_new, cos, sin, rotary_lengths, interleaved)
    return call_with_out("flash_attn_kvcache_append", (q, k_cache, v_cache, *new, *shared), out)


def prefill(arrays: PrefixArrays, options: PrefixOptions) -> Any:
    """As `rawmla.mha.prefix.prefill`."""
    q, k, v, o, k_cache, v_cache, table, starts, lengths, k_scale, v_scale, slopes, sinks, out_scale = arrays
    cache_dtype, longest, longest_input, window, sm_scale, skip_decode, has_pointers, pack, causal = options
    if not str(cache_dtype).startswith("fp8"):
        k_scale = v_scale = None  # only FP8 caches have scales
    refuse_tensors(max_seq_len=longest, max_input_len=longest_input, sliding_window=window, sm_scale=sm_scale)
    _ops.context_attention_out.default(
        q, k, v, o, cache_dtype, k_cache, v_cache, table, starts, lengths, longest, longest_input,
        *_tensor_and_number(k_scale), *_tensor_and_number(v_scale), slopes, window, sm_scale, skip_decode,
        *_tensor_and_number(out_scale), sinks, has_pointers, pack, causal,
    )  # fmt: skip
    return o


def _tensor_and_number(scale: Any) -> tuple[Any, Any]:
    return (scale, None) if isinstance(scale, torch.Tensor) else (None, scale)
