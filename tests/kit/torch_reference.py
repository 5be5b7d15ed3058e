"""The reference on the device: float64 in torch, for test matrices too large for `rawmla.reference`.

It computes what `rawmla.reference` computes (the tests hold one against the other) in batched matrix products
over chunks of query tokens, so that its memory stays bounded whatever the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from typing import Any

from .sparse import RowFormat, SparseInputs, block_fields

CHUNK_ELEMENTS = 1 << 26
"""Cache elements converted to float64 at a time (512 MiB), unless a single query token has more."""


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
    page, h_kv = k_cache.shape[1:3]
    scale = d_qk**-0.5 if softmax_scale is None else softmax_scale
    out = torch.zeros(b * s_q, h_q, 512, dtype=torch.float64, device=q.device)
    lse = torch.full((b * s_q, h_q), float("inf"), dtype=torch.float64, device=q.device)
    hidden = torch.arange(s_q, device=q.device).flip(0) * causal  # of the last keys
    counts = (cache_seqlens.long()[:, None] - hidden).flatten()
    longest = max([1, *counts.tolist()])
    rows = q.reshape(b * s_q, h_kv, h_q // h_kv, d_qk)
    step = max(CHUNK_ELEMENTS // (longest * h_kv * d_qk), 1)
    for part in (counts > 0).nonzero()[:, 0].split(step):
        if not len(part):
            continue
        token = torch.arange(int(counts[part].max()), device=q.device)
        valid = token < counts[part][:, None]
        block = torch.where(valid, block_table[part // s_q][:, token // page].long(), 0)
        k = k_cache[block, token % page].transpose(1, 2).double().masked_fill_(~valid[:, None, :, None], 0.0)
        queries, valid = rows[part].double().flatten(0, 1), valid.repeat_interleave(h_kv, 0)
        found, sums, _ = _attend_selected(queries, k.flatten(0, 1), valid, scale)
        out[part], lse[part] = found.view(-1, h_q, 512), sums.view(-1, h_q)
    return out.view(b, s_q, h_q, 512), lse.view(b, s_q, h_q).transpose(1, 2)


def sparse_decode(
    inputs: SparseInputs, softmax_scale: float | None = None, *, rounded_keys: bool = False
) -> tuple[Any, Any]:
    """Sparse MLA decoding in float64 without sinks (see `apply_sink`): out `[b, s_q, h_q, 512]` and lse `[b,
    h_q, s_q]`, as `rawmla.reference` defines it.

    torch tensors on any device. FP8 caches are dequantised for the named slots only: exactly, or with
    `rounded_keys` to bfloat16, which is what the kernel multiplies.
    """
    b, s_q, h_q, _ = inputs.q.shape
    out, lse, _ = _sparse_rows(inputs, softmax_scale, rounded_keys)
    return out.view(b, s_q, h_q, 512), lse.view(b, s_q, h_q).transpose(1, 2)


def sparse_prefill(
    inputs: SparseInputs, sm_scale: float | None = None, *, rounded_keys: bool = False
) -> tuple[Any, Any, Any]:
    """Sparse prefill in float64, with the sinks, in base 2: out `[s_q, h_q, 512]`, max_logits and lse `[s_q,
    h_q]`, as `rawmla.reference` defines it.

    Its query tokens are the requests of `inputs`, which have one query token each. `rounded_keys` is as in
    `sparse_decode`.
    """
    out, lse, top = _sparse_rows(inputs, sm_scale, rounded_keys)
    if inputs.attn_sink is not None:
        out = apply_sink(out[:, None], lse[:, :, None], inputs.attn_sink)[:, 0]
    return out, top / log(2.0), lse / log(2.0)


def _sparse_rows(
    inputs: SparseInputs, softmax_scale: float | None, rounded_keys: bool
) -> tuple[Any, Any, Any]:
    """Out, lse and the largest scaled score of every query token, without sinks."""
    import torch

    q = inputs.q
    b, s_q, h_q, d_qk = q.shape
    scale = d_qk**-0.5 if softmax_scale is None else softmax_scale
    sources = [(inputs.k_cache, inputs.indices, inputs.topk_length)]
    if inputs.extra_k_cache is not None:
        sources.append((inputs.extra_k_cache, inputs.extra_indices, inputs.extra_topk_length))
    rows = q.reshape(b * s_q, h_q, d_qk)
    out = torch.empty(b * s_q, h_q, 512, dtype=torch.float64, device=q.device)
    lse, top = (torch.empty(b * s_q, h_q, dtype=torch.float64, device=q.device) for _ in range(2))
    chosen = [(cache, *_valid(cache, indices, length)) for cache, indices, length in sources]
    width = sum(index.shape[1] for _, index, _ in chosen)
    step = max(CHUNK_ELEMENTS // (width * (d_qk + h_q)), 1)
    for start in range(0, b * s_q, step):
        part = slice(start, start + step)
        valid = torch.cat([flags[part] for _, _, flags in chosen], dim=1)
        k = torch.cat([dequantise(cache, slot[part], inputs.case.format) for cache, slot, _ in chosen], dim=1)
        if rounded_keys:
            k = k.bfloat16().double()
        k.masked_fill_(~valid[..., None], 0.0)
        out[part], lse[part], top[part] = _attend_selected(rows[part].double(), k, valid, scale)
    return out, lse, top


def apply_sink(out: Any, lse: Any, attn_sink: Any) -> Any:
    """`out` times `exp(lse) / (exp(lse) + exp(sink))`."""
    import torch

    kept = torch.sigmoid(lse - attn_sink.double()[:, None])  # [b, h_q, s_q]
    kept = torch.where(lse == float("inf"), 0.0, kept)  # nothing attended: out is 0 whatever the sink
    return out * kept.transpose(1, 2)[..., None]


def merge_attn_states(outs: Sequence[Any], lses: Sequence[Any]) -> tuple[Any, Any]:
    """Attention over all keys from attention over disjoint parts of them, in float64, as `rawmla.reference`
    defines it: out in the shape of `outs`, lse in the shape of `lses`. torch tensors on any device.
    """
    import torch

    scores = torch.stack([lse.double() for lse in lses])
    scores.masked_fill_(scores == float("inf"), float("-inf"))  # of parts without keys
    log_sum = torch.logsumexp(scores, dim=0)
    empty = log_sum == float("-inf")
    weights = scores.sub(log_sum.masked_fill(empty, 0.0)).exp_()
    if outs[0].ndim == 4:  # lses are [b, h_q, s_q]
        scores, weights = scores.transpose(2, 3), weights.transpose(2, 3)
    merged = torch.zeros(outs[0].shape, dtype=torch.float64, device=outs[0].device)
    for out, score, weight in zip(outs, scores, weights, strict=True):
        counted = (score != float("-inf"))[..., None]
        merged += torch.where(counted, out.double() * weight[..., None], 0.0)
    return merged, log_sum.masked_fill(empty, float("inf"))


def dequantise(k_cache: Any, slots: Any, form: RowFormat) -> Any:
    """Tokens of a cache, in float64 and exactly: `[*slots.shape, d_qk]`."""
    import torch

    page_block_size = k_cache.shape[1]
    page, offset = slots // page_block_size, slots % page_block_size
    if not form.values:
        return k_cache[page, offset, 0].double()
    rows, tails = block_fields(k_cache.view(torch.uint8), form)
    row = rows[page, offset]
    rope = row[..., form.rope_offset :].contiguous().view(torch.bfloat16)[..., : form.rope].double()
    if tails is None:
        scales = row[..., form.values : form.rope_offset].contiguous().view(torch.float32).double()
    else:
        powers = [2.0 ** (code - 127) for code in range(255)] + [float("nan")]
        powers = torch.tensor(powers, dtype=torch.float64, device=slots.device)
        scales = powers[tails[page, offset][..., : form.scales].long()]
    values = row[..., : form.values].contiguous().view(torch.float8_e4m3fn).float().double()
    values = values.unflatten(-1, (form.scales, form.tile)) * scales[..., None]
    return torch.cat([values.flatten(-2), rope], dim=-1)


def _valid(k_cache: Any, indices: Any, length: Any) -> tuple[Any, Any]:
    """Slots `[b * s_q, topk]`, 0 where an index names none, and whether it names one."""
    import torch

    b, s_q, topk = indices.shape
    valid = (indices >= 0) & (indices < k_cache.shape[0] * k_cache.shape[1])
    if length is not None:
        valid &= torch.arange(topk, device=indices.device) < length[:, None, None]
    slots = indices.long().masked_fill(~valid, 0)
    return slots.reshape(b * s_q, topk), valid.reshape(b * s_q, topk)


def _attend_selected(q: Any, k: Any, valid: Any, scale: float) -> tuple[Any, Any, Any]:
    """Attention of `[n, h_q, d_qk]` over each row's own keys `[n, width, d_qk]`, and its largest scores."""
    import torch

    scores = (q @ k.transpose(1, 2)).mul_(scale)
    scores.masked_fill_(~valid[:, None], float("-inf"))
    empty = ~valid.any(dim=1)[:, None]
    top = scores.amax(dim=-1)
    log_sum = torch.logsumexp(scores, dim=-1)
    weights = scores.sub_(log_sum.masked_fill(empty, 0.0)[..., None]).exp_()
    return weights @ k[..., :512], log_sum.masked_fill(empty, float("inf")), top
