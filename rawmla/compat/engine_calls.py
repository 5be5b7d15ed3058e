"""Which of an engine's FlashAttention calls over a paged cache rawmla computes. The others go on to the
engine's own function, and the log says why, once.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from ..mha.arguments import MAX_HEAD_DIM, NO_WINDOW
from ..mha.kvcache import most_decode_tokens, takes_any_tokens

FP8 = torch.float8_e4m3fn
HALVES = (torch.bfloat16, torch.float16)
_UNITS = {torch.bfloat16: 8, torch.float16: 8, FP8: 16}
"""Elements of a cache in 16 bytes, of which head dimensions are multiples."""

_passed_on: set[str] = set()


def pass_on(log: logging.Logger, function: str, reason: str) -> None:
    """Log, once for each function and reason, that a call goes on to the engine's own function."""
    text = f"rawmla: {function} goes on to the engine's own function with {reason}"
    if text not in _passed_on:
        _passed_on.add(text)
        log.info(text)


def reason_of_cache(
    q: Any, k_cache: Any, v_cache: Any, cache_dtype: Any, max_seqlen_q: int, num_splits: int
) -> str | None:
    """Return why a call over pages goes on to the engine's function; None: rawmla computes it.

    Requests with many query rows need rawmla's prefill kernel, which does not read every cache. With
    `num_splits` 1 the bits of a row must not depend on the other requests, so the kernel is not chosen by
    the longest of them. This is on the path of every call, so no attribute of an array is read twice.
    """
    dtype = q.dtype
    if dtype not in HALVES and dtype is not FP8 or cache_dtype is not dtype and cache_dtype is not FP8:
        return f"q in {name_of(dtype)} over a cache in {name_of(cache_dtype)}"
    _, page, h_kv, d_qk = k_cache.shape
    d_v = v_cache.shape[3]
    unit = _UNITS[cache_dtype]
    if d_qk % unit or d_v % unit or not d_qk <= MAX_HEAD_DIM >= d_v:
        return f"head dimensions {d_qk} and {d_v} over a cache in {name_of(cache_dtype)}"
    if takes_any_tokens(cache_dtype is FP8, page):
        return None
    cache = "an FP8 cache" if cache_dtype is FP8 else f"pages of {page} tokens"
    if num_splits == 1:
        return f"num_splits=1 over {cache}"
    if max_seqlen_q > most_decode_tokens(q.shape[-2], h_kv):
        return f"many query tokens over {cache}"
    return None


def window_of(window_size: Any) -> Any:
    """Return NO_WINDOW for None and for a pair that equals it, since rawmla's functions check other objects
    in every call.
    """
    return NO_WINDOW if window_size is None or tuple(window_size) == NO_WINDOW else window_size


def name_of(dtype: Any) -> str:
    """Return the name of a dtype without its module."""
    return str(dtype).removeprefix("torch.")
