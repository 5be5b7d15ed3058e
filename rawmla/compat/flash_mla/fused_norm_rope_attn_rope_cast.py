"""Signatures of sgl-flash-mla 1.0.0's module of this name, for programs that import it and do not call it.

Every function raises NotImplementedError: the fused kernels exist for SM100 alone.
"""

from __future__ import annotations

from typing import Any, NoReturn

from .refusals import refuse_mega_attention

__all__ = ["decode", "permute_q_b_proj", "permute_wv_proj", "prefill"]

_NAME = "fused_norm_rope_attn_rope_cast"


def prefill(
    enable_q_norm: bool,
    rms_norm_eps: float,
    token_positions: Any,
    is_rope_neox_style: bool,
    rope_dim: int,
    cos_sin_cache: Any,
    n_wv_group: int,
    num_per_channels: int,
    use_tma_aligned_col_major_sf: bool,
    round_sf: bool,
    use_packed_ue8m0: bool,
    q: Any,
    kv: Any,
    indices: Any,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Any = None,
    topk_length: Any = None,
    use_legacy: bool = False,
) -> NoReturn:
    """NotImplementedError."""
    refuse_mega_attention(f"{_NAME}.prefill")


def decode(
    enable_q_norm: bool,
    rms_norm_eps: float,
    token_positions: Any,
    is_rope_neox_style: bool,
    rope_dim: int,
    cos_sin_cache: Any,
    n_wv_group: int,
    num_per_channels: int,
    use_tma_aligned_col_major_sf: bool,
    round_sf: bool,
    use_packed_ue8m0: bool,
    q: Any,
    k_cache: Any,
    indices_in_kvcache: Any,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Any = None,
    topk_length: Any = None,
    extra_k_cache: Any = None,
    extra_indices_in_kvcache: Any = None,
    extra_topk_length: Any = None,
    use_legacy: bool = False,
) -> NoReturn:
    """NotImplementedError."""
    refuse_mega_attention(f"{_NAME}.decode")


def permute_q_b_proj(weight_and_sf: Any, h_q: int, d_q: int) -> NoReturn:
    """NotImplementedError."""
    refuse_mega_attention(f"{_NAME}.permute_q_b_proj")


def permute_wv_proj(weight_and_sf: Any, wv_group_size: int, d_o: int) -> NoReturn:
    """NotImplementedError."""
    refuse_mega_attention(f"{_NAME}.permute_wv_proj")
