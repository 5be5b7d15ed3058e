"""The dense reference on the device: float64 in torch, for test matrices too large for `rawmla.reference`.

It computes what `rawmla.reference` computes (the tests hold one against the other) in batched matrix products
over chunks of requests, so that its memory stays bounded whatever the cache.
"""

from __future__ import annotations

from typing import Any

CHUNK_ELEMENTS = 1 << 28
"""Cache elements converted to float64 at a time (2 GiB), unless a single request holds more."""


def flash_mla_with_kvcache(
    q: Any,
    k_cache: Any,
    block_table: Any,
    cache_seqlens: Any,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> tuple[Any, Any]:
    """Dense MLA decoding in float64: out `[b, s_q, h_q, 512]` and lse `[b, h_q, s_q]`, as `rawmla.reference`
    defines it.

    torch tensors on any device, any strides. Reads the lengths on the host, so it synchronises. float64
    products are not subject to TF32.
    """
    import torch

    b, s_q, h_q, d_qk = q.shape
    scale = d_qk**-0.5 if softmax_scale is None else softmax_scale
    lengths = [int(length) for length in cache_seqlens.tolist()]
    out = torch.zeros(b, s_q, h_q, 512, dtype=torch.float64, device=q.device)
    lse = torch.full((b, h_q, s_q), float("inf"), dtype=torch.float64, device=q.device)
    per_token = k_cache.shape[2] * d_qk
    for start, stop in _chunks(lengths, CHUNK_ELEMENTS // per_token):
        width = max(lengths[start:stop], default=0)
        if width == 0:
            continue
        own = cache_seqlens[start:stop].long()
        k = _gather(k_cache, block_table[start:stop], own, width)
        out[start:stop], lse[start:stop] = _attend(q[start:stop].double(), k, own, scale, causal)
    return out, lse


def _chunks(lengths: list[int], budget: int) -> list[tuple[int, int]]:
    """Consecutive requests whose padded tokens stay within the budget, one request at least."""
    chunks = []
    start, widest = 0, 0
    for i, length in enumerate(lengths):
        widest = max(widest, length)
        if i > start and widest * (i - start + 1) > budget:
            chunks.append((start, i))
            start, widest = i, length
    chunks.append((start, len(lengths)))
    return chunks


def _gather(k_cache: Any, block_table: Any, lengths: Any, width: int) -> Any:
    """The requests' keys as float64 `[n, h_kv, width, d_qk]`, zero past the length."""
    import torch

    page_block_size = k_cache.shape[1]
    token = torch.arange(width, device=k_cache.device)
    valid = token < lengths[:, None]
    page = torch.where(valid, block_table[:, token // page_block_size].long(), 0)
    k = k_cache[page, token % page_block_size].permute(0, 2, 1, 3)
    k = k.to(torch.float64, memory_format=torch.contiguous_format)
    return k.masked_fill_(~valid[:, None, :, None], 0.0)


def _attend(q: Any, k: Any, lengths: Any, scale: float, causal: bool) -> tuple[Any, Any]:
    import torch

    n, s_q, h_q, d_qk = q.shape
    h_kv, width = k.shape[1], k.shape[2]
    group = h_q // h_kv
    rows = q.reshape(n, s_q, h_kv, group, d_qk).permute(0, 2, 1, 3, 4).reshape(n, h_kv, s_q * group, d_qk)
    scores = (rows @ k.transpose(2, 3)).mul_(scale).view(n, h_kv, s_q, group, width)
    visible = lengths[:, None].expand(n, s_q)
    if causal:
        visible = (visible - s_q + 1 + torch.arange(s_q, device=q.device)).clamp_(min=0)
    hidden = torch.arange(width, device=q.device) >= visible[:, :, None]  # [n, s_q, width]
    scores.masked_fill_(hidden[:, None, :, None, :], float("-inf"))
    empty = (visible == 0)[:, None, :, None]
    log_sum = torch.logsumexp(scores, dim=-1)  # [n, h_kv, s_q, group]
    weights = scores.sub_(log_sum.masked_fill(empty, 0.0)[..., None]).exp_()
    out = weights.view(n, h_kv, s_q * group, width) @ k[..., :512]
    out = out.view(n, h_kv, s_q, group, 512).permute(0, 2, 1, 3, 4).reshape(n, s_q, h_q, 512)
    lse = log_sum.masked_fill(empty, float("inf")).permute(0, 1, 3, 2).reshape(n, h_q, s_q)
    return out, lse
