"""FlashAttention-3's functions around attention: merging partial results, and plans, which rawmla ignores."""

from __future__ import annotations

from math import inf
from typing import Any

import torch

from ...mha.arguments import NO_WINDOW
from .arguments import as_pair

MAX_SPLITS = 256
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def flash_attn_combine(
    out_partial: Any, lse_partial: Any, out: Any = None, out_dtype: Any = None
) -> tuple[Any, Any]:
    """Merge n partial results of the same queries over disjoint keys, in float32.

    Parameters
    ----------
    out_partial : tensor
        float32, float16 or bfloat16 `[n, b, s, h, d]`, n at most 256.
    lse_partial : tensor
        float32 `[n, b, s, h]`; -inf for a part without keys.
    out : tensor, optional
        `[b, s, h, d]` in any dtype, written and returned.
    out_dtype : dtype, optional
        The dtype of a fresh out; None is the one of out_partial.

    Returns
    -------
    out, lse : tensor
        lse is float32 `[b, s, h]`, the transpose of a contiguous `[b, h, s]`.
    """
    if out_partial.dtype not in _DTYPES:
        raise TypeError(f"out_partial: expected float32, float16 or bfloat16, got {out_partial.dtype}")
    if out_partial.dim() != 5 or not 1 <= out_partial.shape[0] <= MAX_SPLITS:
        shape = list(out_partial.shape)
        raise ValueError(f"out_partial: expected shape [n, b, s, h, d], n 1 to {MAX_SPLITS}, got {shape}")
    if lse_partial.dtype is not torch.float32:
        raise TypeError(f"lse_partial: expected float32, got {lse_partial.dtype}")
    if lse_partial.shape != out_partial.shape[:-1]:
        expected = list(out_partial.shape[:-1])
        raise ValueError(f"lse_partial: expected shape {expected}, got {list(lse_partial.shape)}")
    if out is not None and out.shape != out_partial.shape[1:]:
        raise ValueError(f"out: expected shape {list(out_partial.shape[1:])}, got {list(out.shape)}")
    parts = lse_partial.transpose(2, 3)
    lse = parts.logsumexp(0)
    weights = (parts - lse).exp().masked_fill(parts == -inf, 0).transpose(2, 3)
    merged = (weights.unsqueeze(-1) * out_partial.masked_fill((weights == 0).unsqueeze(-1), 0)).sum(0)
    if out is not None:
        return out.copy_(merged), lse.transpose(1, 2)
    return merged.to(out_partial.dtype if out_dtype is None else out_dtype), lse.transpose(1, 2)


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Any,
    qkv_dtype: Any = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k_new: Any = None,
    cache_leftpad: Any = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: Any = NO_WINDOW,
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Any:
    """Return zeros of the size that FlashAttention-3's metadata has: rawmla's kernels need none."""
    left, right = as_pair(window_size)
    left = -1 if left is None or left >= max_seqlen_k - 1 else left
    right = 0 if causal else -1 if right is None or right >= max_seqlen_q - 1 else right
    is_causal = left < 0 and right == 0
    is_local = not is_causal and (left >= 0 or right >= 0)
    vectors = 2 + (not is_local) + (is_causal or is_local)
    rounded = (batch_size + 3) // 4 * 4
    return torch.zeros(1 + rounded * vectors, dtype=torch.int32, device=cache_seqlens.device)
