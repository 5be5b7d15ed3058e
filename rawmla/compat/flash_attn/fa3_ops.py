"""The operators `torch.ops.flash_attn_3`, with FlashAttention-3's schemas, over rawmla.

torch's own attention (`torch.nn.attention.activate_flash_attention_impl("FA3")`) calls them by name.
"""

from __future__ import annotations

from typing import Any

import torch

from .fa3_combine import flash_attn_combine, get_scheduler_metadata
from .fa3_private import _flash_attn_backward, _flash_attn_forward

SCHEMAS = {
    "fwd": (
        "(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None, Tensor(v_new!)? v_new=None, "
        "Tensor? q_v=None, Tensor(out!)? out=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
        "Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None, Tensor? seqused_k=None, "
        "int? max_seqlen_q=None, int? max_seqlen_k=None, Tensor? page_table=None, Tensor? kv_batch_idx=None, "
        "Tensor? leftpad_k=None, Tensor? rotary_cos=None, Tensor? rotary_sin=None, "
        "Tensor? seqlens_rotary=None, Tensor? q_descale=None, Tensor? k_descale=None, "
        "Tensor? v_descale=None, float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, "
        "int window_size_right=-1, int attention_chunk=0, float softcap=0.0, "
        "bool is_rotary_interleaved=False, Tensor? scheduler_metadata=None, int num_splits=0, "
        "bool? pack_gqa=None, int sm_margin=0) -> (Tensor(out!), Tensor, Tensor, Tensor)"
    ),
    "bwd": (
        "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(dq!)? dq=None, "
        "Tensor(dk!)? dk=None, Tensor(dv!)? dv=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
        "Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, "
        "float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, "
        "int window_size_right=-1, float softcap=0.0, bool deterministic=False, int sm_margin=0) "
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
    "fwd_combine": (
        "(Tensor out_partial, Tensor lse_partial, Tensor(out!)? out=None, ScalarType? out_dtype=None) "
        "-> (Tensor(out!), Tensor)"
    ),
    "get_scheduler_metadata": (
        "(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads, int num_heads_k, int headdim, "
        "int headdim_v, ScalarType qkv_dtype, Tensor seqused_k, Tensor? cu_seqlens_q=None, "
        "Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None, "
        "Tensor? leftpad_k=None, int? page_size=None, int max_seqlen_k_new=0, bool is_causal=False, "
        "int window_size_left=-1, int window_size_right=-1, int attention_chunk=0, bool has_softcap=False, "
        "int num_splits=0, bool? pack_gqa=None, int sm_margin=0) -> Tensor"
    ),
}

_library: Any = None  # the operators exist as long as it does


def define() -> None:
    """Define the operators, unless FlashAttention-3's extension has defined them in this process."""
    global _library
    if _library is not None or hasattr(torch.ops.flash_attn_3, "fwd"):
        return
    _library = torch.library.Library("flash_attn_3", "DEF")
    kernels = {
        "fwd": _fwd,
        "bwd": _bwd,
        "fwd_combine": flash_attn_combine,
        "get_scheduler_metadata": _metadata,
    }
    for name, kernel in kernels.items():
        _library.define(name + SCHEMAS[name])
        _library.impl(name, kernel, "CUDA")


# torch leaves out trailing arguments that have the schema's defaults, which are not the function's.
_FWD_DEFAULTS = (*[None] * 24, False, -1, -1, 0, 0.0, False, None, 0, None, 0)


def _fwd(*given: Any) -> tuple[Any, ...]:
    with torch.no_grad():
        out, lse, nothing, _ = _flash_attn_forward(*given, *_FWD_DEFAULTS[len(given) :])
    return out, lse, nothing, torch.empty_like(nothing)


def _bwd(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    softmax_lse: Any,
    dq: Any = None,
    dk: Any = None,
    dv: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *others: Any,
) -> tuple[Any, ...]:
    """The function has the same arguments in another order."""
    with torch.no_grad():
        nothing = _flash_attn_backward(
            dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q,
            max_seqlen_k, dq, dk, dv, *others,
        )  # fmt: skip
    return nothing, *[torch.empty_like(nothing) for _ in range(4)]


def _metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads: int,
    num_heads_k: int,
    headdim: int,
    headdim_v: int,
    qkv_dtype: Any,
    seqused_k: Any,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    cu_seqlens_k_new: Any = None,
    seqused_q: Any = None,
    leftpad_k: Any = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    *others: Any,
) -> Any:
    return get_scheduler_metadata(
        batch_size, max_seqlen_q, max_seqlen_k, num_heads, num_heads_k, headdim, seqused_k,
        causal=is_causal, window_size=(window_size_left, window_size_right),
    )  # fmt: skip
