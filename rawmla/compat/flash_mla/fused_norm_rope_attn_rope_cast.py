"""Signatures of sgl-flash-mla 1.0.0's module of this name, for programs that import it and do not call it.

Every function raises NotImplementedError: the fused kernels exist for SM100 alone.
"""

from __future__ import annotations

from .refusals import MEGA_ATTENTION, refused

__all__ = ["decode", "permute_q_b_proj", "permute_wv_proj", "prefill"]

_NAME = "fused_norm_rope_attn_rope_cast"
_NORM_AND_CAST = (
    "enable_q_norm rms_norm_eps token_positions is_rope_neox_style rope_dim cos_sin_cache n_wv_group "
    "num_per_channels use_tma_aligned_col_major_sf round_sf use_packed_ue8m0"
)

prefill = refused(
    f"{_NAME}.prefill",
    MEGA_ATTENTION,
    f"{_NORM_AND_CAST} q kv indices sm_scale",
    d_v=512,
    attn_sink=None,
    topk_length=None,
    use_legacy=False,
)
decode = refused(
    f"{_NAME}.decode",
    MEGA_ATTENTION,
    f"{_NORM_AND_CAST} q k_cache indices_in_kvcache sm_scale",
    d_v=512,
    attn_sink=None,
    topk_length=None,
    extra_k_cache=None,
    extra_indices_in_kvcache=None,
    extra_topk_length=None,
    use_legacy=False,
)
permute_q_b_proj = refused(f"{_NAME}.permute_q_b_proj", MEGA_ATTENTION, "weight_and_sf h_q d_q")
permute_wv_proj = refused(f"{_NAME}.permute_wv_proj", MEGA_ATTENTION, "weight_and_sf wv_group_size d_o")
