"""FlashAttention-4's Python functions (`flash_attn.cute`) by its names and argument orders.

The surface is the one of github.com/Dao-AILab/flash-attention 0251105, folder flash_attn/cute. Functions of
scores and masks are CuTe-DSL there: `rawmla.flex_attention` takes Python functions instead.
"""

from __future__ import annotations

from typing import Any

import torch

import rawmla

from ...api import dense
from ...call.arrays import needs_gradient
from ..usage import Usage
from .arguments import DTYPES, as_bound, as_pair, check_hints, check_num_splits, contiguous, heads_first
from .refusals import refuse_dtype, refuse_given, unsupported

__all__ = ["flash_attn_func", "flash_attn_varlen_func"]

FORM = "FlashAttention-4"
NO_WINDOW = (None, None)
_plain, _varlen = [Usage(f"flash_attn.cute.{name}") for name in __all__]


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    qv: Any = None,
    gather_kv_indices: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = NO_WINDOW,
    learnable_sink: Any = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    aux_tensors: Any = None,
    aux_scalars: Any = None,
    block_sparse_tensors: Any = None,
    block_sparse_tensors_bwd: Any = None,
    return_lse: bool = False,
) -> tuple[Any, Any]:
    """Compute attention of requests of one length: `rawmla.flash_attn_func`.

    Returns (out, lse); lse is None unless `return_lse` or a gradient is needed, and has the sink in its sum.
    """
    _refuse(q, qv, gather_kv_indices, score_mod, score_mod_bwd, mask_mod, aux_tensors, aux_scalars,
            block_sparse_tensors, block_sparse_tensors_bwd)  # fmt: skip
    if window_size is not NO_WINDOW:
        window_size = _window_of(window_size, causal)
    if num_splits != 1:
        check_num_splits(num_splits)
    if pack_gqa is not None:
        check_hints(pack_gqa, 0, None)
    out, lse = dense.flash_attn_func(
        q, k, v, 0.0, softmax_scale, causal, window_size, softcap or 0.0, None, deterministic,
        attn_sink=learnable_sink,
    )  # fmt: skip
    _plain.note(FORM, q, k)
    if return_lse or needs_gradient(q, k, v, learnable_sink):
        return contiguous(out), _with_sink(lse, learnable_sink)
    return contiguous(out), None


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    qv: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
    min_seqlen_k: Any = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    gather_kv_indices: Any = None,
    page_table: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = NO_WINDOW,
    learnable_sink: Any = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    block_sparse_tensors: Any = None,
    aux_tensors: Any = None,
    aux_scalars: Any = None,
    return_lse: bool = False,
    scheduler_metadata: Any = None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
) -> tuple[Any, Any]:
    """Compute attention of requests of different lengths: `rawmla.flash_attn_varlen_func`.

    Keys in pages, or of which `seqused_k` counts without `cu_seqlens_k`, are a cache:
    `rawmla.flash_attn_with_kvcache`, without gradients. Without lengths and pages, requests have one length:
    `flash_attn_func`, which also describes the results. `min_seqlen_k`, `scheduler_metadata`,
    `seqlen_k_per_split` and `disable_scheduler_metadata` change nothing.
    """
    _refuse(q, qv, gather_kv_indices, score_mod, score_mod_bwd, mask_mod, aux_tensors, aux_scalars,
            block_sparse_tensors, None)  # fmt: skip
    if window_size is not NO_WINDOW:
        window_size = _window_of(window_size, causal)
    if num_splits != 1:
        check_num_splits(num_splits)
    if pack_gqa is not None:
        check_hints(pack_gqa, 0, None)
    softcap = softcap or 0.0
    if cu_seqlens_q is not None and max_seqlen_q.__class__ is not int:
        max_seqlen_q = as_bound(max_seqlen_q, q.shape[0])
    if cu_seqlens_q is not None and cu_seqlens_k is not None and page_table is None:
        if max_seqlen_k.__class__ is not int:
            max_seqlen_k = as_bound(max_seqlen_k, k.shape[0])
        out, lse = dense.flash_attn_varlen_func(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, softmax_scale, causal,
            deterministic, window_size=window_size, softcap=softcap, attn_sink=learnable_sink,
            seqused_q=seqused_q, seqused_k=seqused_k,
        )  # fmt: skip
    elif cu_seqlens_q is cu_seqlens_k is seqused_q is seqused_k is page_table is None:
        out, lse = dense.flash_attn_func(
            q, k, v, 0.0, softmax_scale, causal, window_size, softcap, None, deterministic,
            attn_sink=learnable_sink,
        )  # fmt: skip
    else:
        if seqused_q is not None:
            unsupported("seqused_q")
        out, lse = rawmla.flash_attn_with_kvcache(
            q, k, v, cache_seqlens=seqused_k, block_table=page_table, cu_seqlens_q=cu_seqlens_q,
            max_seqlen_q=None if cu_seqlens_q is None else max_seqlen_q,
            cu_seqlens_k=cu_seqlens_k if seqused_k is None else None, softmax_scale=softmax_scale,
            causal=causal, window_size=window_size, softcap=softcap, attn_sink=learnable_sink,
            num_splits=num_splits,
        )  # fmt: skip
    _varlen.note(FORM, q, k)
    if return_lse or needs_gradient(q, k, v, learnable_sink):
        return contiguous(out), _with_sink(heads_first(lse), learnable_sink)
    return contiguous(out), None


def _refuse(
    q: Any,
    qv: Any,
    gather_kv_indices: Any,
    score_mod: Any,
    score_mod_bwd: Any,
    mask_mod: Any,
    aux_tensors: Any,
    aux_scalars: Any,
    block_sparse_tensors: Any,
    block_sparse_tensors_bwd: Any,
) -> None:
    """Raise for arguments that no kernel serves."""
    if getattr(q, "dtype", None) not in DTYPES:
        refuse_dtype("q", q)
    if (
        qv is gather_kv_indices is score_mod is score_mod_bwd is mask_mod is aux_tensors is aux_scalars
        is block_sparse_tensors is block_sparse_tensors_bwd is None
    ):  # fmt: skip
        return
    refuse_given(
        qv=qv, gather_kv_indices=gather_kv_indices, score_mod=score_mod, score_mod_bwd=score_mod_bwd,
        mask_mod=mask_mod, aux_tensors=aux_tensors, aux_scalars=aux_scalars,
        block_sparse_tensors=block_sparse_tensors, block_sparse_tensors_bwd=block_sparse_tensors_bwd,
    )  # fmt: skip


def _window_of(window_size: Any, causal: Any) -> Any:
    """Return a window with FlashAttention-4's meaning of negative bounds: None alone is no bound there."""
    window = as_pair(window_size)
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        return window
    left, right = window
    if not all(bound is None or hasattr(bound, "__index__") for bound in window):
        return window
    if causal and (right is None or right < 0):
        right = 0
    end = 0 if causal else right
    if left is not None and end is not None and left + end < 0:
        return NO_WINDOW
    if any(bound is not None and bound < 0 for bound in (left, right)):
        raise ValueError(
            "window_size: rawmla has no bounds below 0, by which FlashAttention-4 hides a query's own key, "
            f"got {tuple(window)}; pass None for no bound"
        )
    return left, right


def _with_sink(lse: Any, sink: Any) -> Any:
    """Add the sinks of heads to lse, in which heads stand before tokens."""
    return lse if sink is None else torch.logaddexp(lse, sink.float().unsqueeze(-1))
