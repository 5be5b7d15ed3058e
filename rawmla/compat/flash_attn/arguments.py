"""Arguments and results of FlashAttention in rawmla's forms."""

from __future__ import annotations

from math import inf
from typing import Any

import torch

from ...call import tracing
from ...call.arrays import needs_gradient

DTYPES = (torch.bfloat16, torch.float16)
CACHE_DTYPES = (*DTYPES, torch.float8_e4m3fn)
"""Dtypes of queries over caches in FlashAttention-3."""


def as_pair(window_size: Any) -> Any:
    """Return a CPU tensor or NumPy array as a tuple; other windows are returned as they are."""
    if isinstance(window_size, torch.Tensor):
        return tuple(window_size.tolist()) if window_size.device.type == "cpu" else window_size
    return tuple(window_size.tolist()) if hasattr(window_size, "tolist") else window_size


def as_bound(length: Any, tokens: int) -> Any:
    """Return a longest length as an int, if it is a tensor or None; other values are returned as they are.

    A tensor on a GPU is never read, since that would wait for the GPU: the result is `tokens`, as no request
    is longer. None and tensors of a call that torch traces give `tokens` too.
    """
    if length is None:
        return tokens
    if not isinstance(length, torch.Tensor):
        return length
    if length.device.type != "cpu" or tracing.is_traced(length):
        return tokens
    return int(length)


def split_packed(name: str, packed: Any, count: int) -> Any:
    """Return the `count` arrays `[b, s, h, d]` of a packed one, as views."""
    if packed.ndim != 5 or packed.shape[2] != count:
        raise ValueError(f"{name}: expected shape [b, s, {count}, h, d], got {list(packed.shape)}")
    return packed.unbind(2)


def detached(*arrays: Any) -> tuple[Any, ...]:
    """Return the same arrays without a graph, for functions that have none in FlashAttention either."""
    return tuple(x if x is None else x.detach() for x in arrays) if needs_gradient(*arrays) else arrays


def heads_first(lse: Any) -> Any:
    """Return an lse with heads before tokens: a packed one is transposed, others have this order."""
    return lse.t() if lse.ndim == 2 else lse


def with_plus_inf(lse: Any) -> Any:
    """Replace -inf by +inf, which is FlashAttention-2's lse of a row without keys."""
    return lse.masked_fill(lse == -inf, inf)


def lse_of_equal_lengths(lse: Any, q: Any, k: Any) -> Any:
    """Replace -inf by +inf where all requests have one length.

    With at least as many keys as queries, every query sees a key, whatever the mask.
    """
    return lse if k.shape[1] >= q.shape[1] else with_plus_inf(lse)


def contiguous(out: Any) -> Any:
    """Return out contiguous, as FlashAttention-3 and 4 do; rawmla's has its dimensions in q's order."""
    return out if out.is_contiguous() else out.contiguous()


def check_hints(pack_gqa: Any, sm_margin: Any, scheduler_metadata: Any) -> None:
    """Check arguments that choose how a kernel of FlashAttention runs. They change nothing here.

    The numbers in `scheduler_metadata` are not read, so that stale ones do no harm.
    """
    if pack_gqa is not None and not isinstance(pack_gqa, bool):
        raise TypeError(f"pack_gqa: expected None or a bool, got {type(pack_gqa).__name__}")
    if isinstance(sm_margin, bool) or not isinstance(sm_margin, int):
        raise TypeError(f"sm_margin: expected an int, got {type(sm_margin).__name__}")
    if scheduler_metadata is None:
        return
    if getattr(scheduler_metadata, "dtype", None) is not torch.int32:
        kind = getattr(scheduler_metadata, "dtype", type(scheduler_metadata).__name__)
        raise TypeError(f"scheduler_metadata: expected None or an int32 tensor, got {kind}")
    if scheduler_metadata.ndim != 1:
        shape = list(scheduler_metadata.shape)
        raise ValueError(f"scheduler_metadata: expected one dimension, got shape {shape}")


def check_num_splits(num_splits: Any) -> None:
    """Check a number of splits that changes nothing: dense attention chooses its own."""
    if isinstance(num_splits, bool) or not isinstance(num_splits, int):
        raise TypeError(f"num_splits: expected an int, got {type(num_splits).__name__}")
    if num_splits < 0:
        raise ValueError(f"num_splits: expected at least 0, got {num_splits}")
