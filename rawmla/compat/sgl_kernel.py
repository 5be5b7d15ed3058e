"""`sgl_kernel.flash_mla` (sglang-kernel 0.4.10) by its names and argument orders, computed by rawmla.

Also the order of SGLang 0.5.23's module sglang.kernels.ops.attention.flash_mla_interface. It differs from
the order of `flash_mla`: `descale_q` and `descale_k` stand before `is_fp8_kvcache`, so None in the tenth
place could be either. Bare tensors of a plan have the row order of a plan object here, because this module's
own `get_mla_metadata` makes them so; tensors of `rawmla.get_mla_metadata` have another one.
"""

from __future__ import annotations

from typing import Any

from .flash_mla import flash_mla_interface
from .flash_mla.flash_mla_interface import FlashMLASchedMeta


def get_mla_metadata(
    cache_seqlens: Any = None,
    num_q_tokens_per_head_k: int | None = None,
    num_heads_k: int | None = None,
    num_heads_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
) -> tuple[Any, Any]:
    """`(FlashMLASchedMeta(), None)` without `cache_seqlens`, with it the arrays of a plan, computed now."""
    if cache_seqlens is None:
        return FlashMLASchedMeta(), None
    if num_q_tokens_per_head_k is None or num_heads_k is None:
        raise TypeError(
            "num_q_tokens_per_head_k, num_heads_k: expected two ints with cache_seqlens, got "
            f"{num_q_tokens_per_head_k!r} and {num_heads_k!r}"
        )
    return flash_mla_interface.get_mla_decoding_metadata(
        cache_seqlens, num_q_tokens_per_head_k, num_heads_k, num_heads_q, is_fp8_kvcache, topk
    )


def flash_mla_with_kvcache(
    q: Any,
    k_cache: Any,
    block_table: Any,
    cache_seqlens: Any,
    head_dim_v: int,
    tile_scheduler_metadata: Any,
    num_splits: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    descale_q: Any = None,
    descale_k: Any = None,
    is_fp8_kvcache: bool = False,
    indices: Any = None,
    attn_sink: Any = None,
    extra_k_cache: Any = None,
    extra_indices_in_kvcache: Any = None,
    topk_length: Any = None,
    extra_topk_length: Any = None,
    kv_format: str | None = None,
    *,
    use_legacy: bool = True,
) -> tuple[Any, Any]:
    """`rawmla.compat.flash_mla`'s function of this name with SGLang's order of arguments.

    A plan is an object, None (a plan of this call alone), or the pair of tensors of this module's
    `get_mla_metadata`.
    """
    if num_splits is not None and hasattr(tile_scheduler_metadata, "shape"):
        tile_scheduler_metadata = FlashMLASchedMeta(
            tile_scheduler_metadata=tile_scheduler_metadata, num_splits=num_splits
        )
        num_splits = None
    return flash_mla_interface.flash_mla_with_kvcache(
        q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits,
        softmax_scale, causal, is_fp8_kvcache, indices, attn_sink, extra_k_cache, extra_indices_in_kvcache,
        topk_length, extra_topk_length, None, False, kv_format, descale_q, descale_k, use_legacy=use_legacy,
    )  # fmt: skip


def flash_mla_sparse_fwd(
    q: Any,
    kv: Any,
    indices: Any,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Any = None,
    topk_length: Any = None,
    *,
    use_legacy: bool = True,
) -> tuple[Any, Any, Any]:
    """`rawmla.compat.flash_mla`'s function of this name; `max_logits` and `lse` are in base 2 with
    `use_legacy` and natural without, as SGLang has them.
    """
    return flash_mla_interface.flash_mla_sparse_fwd(
        q, kv, indices, sm_scale, d_v, attn_sink, topk_length, None, True if use_legacy else None
    )
