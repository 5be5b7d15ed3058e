"""Plain torch twins of the functions that `rawmla.transformers` calls, which follow their contracts on a CPU.

They refuse what the functions refuse, take any dtype, and torch.compile and autograd follow them.
"""

from __future__ import annotations

from typing import Any

import torch

CALLS: list[str] = []
"""Names of the functions that were called."""


def record(name: str) -> None:
    if not torch.compiler.is_compiling():  # a list that grows would be compiled again
        CALLS.append(name)


def check(q: torch.Tensor, *arrays: torch.Tensor | None) -> None:
    """Check lengths and starts as the functions do; a copy would be made of others that are refused here."""
    for x in arrays:
        assert x is None or (x.dtype == torch.int32 and x.ndim == 1 and x.is_contiguous())
    assert q.stride(-1) == 1 and q.shape[-1] <= 256


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend `[..., s, h, d]` arrays, where ``visible`` is `[..., s_q, s_k]`."""
    q, k, v = [x.transpose(-3, -2).float() for x in (q, k, v)]
    group = q.shape[-3] // k.shape[-3]
    k, v = [x.repeat_interleave(group, -3) for x in (k, v)]
    v = v.masked_fill(~visible.any(-2)[..., None, :, None], 0)
    scale, softcap, sink = options["softmax_scale"], options["softcap"], options["attn_sink"]
    scores = (q @ k.transpose(-2, -1)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible[..., None, :, :], -torch.inf)
    top = scores.detach().amax(-1, keepdim=True)
    top = top.where(top > -torch.inf, 0)
    p = torch.exp(scores - top)
    total = p.sum(-1, keepdim=True)
    lse = (top + total.log()).squeeze(-1)
    if sink is not None:
        total = total + torch.exp(sink.float()[:, None, None] - top)
    return (p @ v / total.where(total > 0, 1)).transpose(-3, -2), lse.transpose(-2, -1)


def diagonal(place: torch.Tensor, keys: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """Whether a key is within the window around the place of a query on the diagonal."""
    left, right = options["window_size"]
    right = 0 if options["causal"] else right
    visible = keys >= (place - left if left >= 0 else keys)
    return visible & (keys <= (place + right if right >= 0 else keys))


def options_of(given: dict[str, Any]) -> dict[str, Any]:
    """Fill the defaults of options; no others are taken."""
    defaults = {"softmax_scale": None, "causal": False, "softcap": 0.0, "attn_sink": None}
    options = {**defaults, "window_size": (-1, -1), **given}
    assert len(options) == 5
    return options


def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any) -> Any:
    record("flash_attn_func")
    check(q)
    options = options_of(given)
    s_q, s_k = q.shape[1], k.shape[1]
    keys = torch.arange(s_k, device=q.device)
    visible = diagonal(torch.arange(s_q, device=q.device)[:, None] + s_k - s_q, keys, options)
    out, lse = attend(q, k, v, visible.expand(len(q), s_q, s_k), options)
    return out.to(q.dtype), lse.transpose(1, 2)


def flash_attn_with_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k: None = None, v: None = None, *,
    cache_seqlens: torch.Tensor | None = None, cache_leftpad: torch.Tensor | None = None, **given: Any,
) -> Any:  # fmt: skip
    record("flash_attn_with_kvcache")
    check(q, cache_seqlens, cache_leftpad)
    options = options_of(given)
    used = (q, k_cache, v_cache, options["attn_sink"])
    assert not torch.is_grad_enabled() or not any(x is not None and x.requires_grad for x in used)
    b, s_q, s_k = len(q), q.shape[1], k_cache.shape[1]
    zeros = q.new_zeros(b, dtype=torch.int32)
    end = (zeros + s_k if cache_seqlens is None else cache_seqlens)[:, None, None]
    start = (zeros if cache_leftpad is None else cache_leftpad)[:, None, None]
    keys = torch.arange(s_k, device=q.device)
    visible = diagonal(torch.arange(s_q, device=q.device)[:, None] + end - s_q, keys, options)
    out, lse = attend(q, k_cache, v_cache, visible & (keys >= start) & (keys < end), options)
    return out.to(q.dtype), lse.transpose(1, 2)


def flash_attn_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int, max_seqlen_k: int, *, seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None, **given: Any,
) -> Any:  # fmt: skip
    record("flash_attn_varlen_func")
    check(q, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    assert isinstance(max_seqlen_q, int) and isinstance(max_seqlen_k, int)
    options = options_of(given)
    sides = []
    for x, starts, used in ((q, cu_seqlens_q, seqused_q), (k, cu_seqlens_k, seqused_k)):
        token = torch.arange(len(x), device=q.device)
        request = torch.searchsorted(starts[1:].contiguous(), token, right=True).clamp(max=len(starts) - 2)
        length = starts.diff() if used is None else torch.minimum(used, starts.diff())
        place = token - starts[request]
        sides.append((request, place, length[request], place < length[request]))
    (request_q, place_q, length_q, exists_q), (request_k, place_k, _, exists_k) = sides
    keys_of = (cu_seqlens_k.diff() if seqused_k is None else seqused_k)[request_q]
    visible = diagonal((place_q + keys_of - length_q)[:, None], place_k, options)
    visible = visible & (request_q[:, None] == request_k) & exists_q[:, None] & exists_k
    out, lse = attend(q, k, v, visible, options)
    return out.to(q.dtype), lse
