"""Caches as FlashAttention-2 takes them: of any head dimension, and with queries that need a gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import rawmla

from ...mha.arguments import as_window

UNIT = 8
"""The head dimensions that rawmla reads in caches are multiples of this."""


def cache_function(q: Any) -> Callable[..., Any]:
    """Return `rawmla.flash_attn_with_kvcache`, or `attend_copies` if q has columns that it does not read."""
    return attend_copies if q.shape[-1] % UNIT else rawmla.flash_attn_with_kvcache


def check_rotation(q: Any, k_cache: Any, block_table: Any, causal: Any, window_size: Any) -> None:
    """Refuse a window that hides nothing, if FlashAttention-2 rotates queries by their positions there."""
    if causal or q.ndim != 4 or k_cache.ndim != 4 or q.shape[1] == 1:
        return
    tokens = k_cache.shape[1] * (1 if block_table is None else block_table.shape[-1])
    left, right = as_window(window_size)
    hides = left < tokens - 1 or right < q.shape[1] - 1
    if not hides and min(left, right) < tokens:
        raise ValueError(
            "window_size: expected -1 for a bound that hides no key, with rotary_cos and several queries, "
            f"which FlashAttention-2 would rotate by their positions, got {tuple(window_size)}"
        )


def attend_copies(q: Any, k_cache: Any, v_cache: Any, k: Any = None, v: Any = None, **options: Any) -> Any:
    """Call `rawmla.flash_attn_with_kvcache` with copies of the caches, as FlashAttention-2 does."""
    if options["softmax_scale"] is None:
        options["softmax_scale"] = q.shape[-1] ** -0.5
    given = options.pop("out", None)
    copies = _padded(k_cache), _padded(v_cache)
    out, lse = rawmla.flash_attn_with_kvcache(_padded(q), *copies, _padded(k), _padded(v), **options)
    if k is not None:
        for cache, copy in zip((k_cache, v_cache), copies, strict=True):
            cache.copy_(copy[..., : cache.shape[-1]])
    out = out[..., : v_cache.shape[-1]]
    return out if given is None else given.copy_(out), lse


def _padded(x: Any) -> Any:
    """Return a copy of x with zeros after its columns, a multiple of `UNIT` in all; None stays None."""
    return None if x is None else torch.nn.functional.pad(x, (0, -x.shape[-1] % UNIT))


class WithoutBackward(torch.autograd.Function):
    """Returns out as it is, and raises in the backward: keys in pages have no gradient."""

    @staticmethod
    def forward(ctx: Any, out: Any, *inputs: Any) -> Any:
        """Return out."""
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Raise."""
        raise NotImplementedError(
            "block_table: rawmla has no gradient of keys in pages; pass k and v without block_table, or call "
            "the function under torch.no_grad()"
        )
