"""The scheduling plan of decode calls. Names, order and meaning of the arguments are FlashMLA's."""

from __future__ import annotations

from typing import Any

from ..call import tracing
from ..call.checks import as_bool
from ..mla import metadata
from ..mla.arguments import refuse_dense_fp8
from ..mla.plan import FlashMLASchedMeta
from .paths import mla_operators

__all__ = ["get_mla_metadata"]


def get_mla_metadata(
    cache_seqlens: Any = None,
    num_q_tokens_per_head_k: int | None = None,
    num_heads_k: int | None = None,
    num_heads_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
    *,
    num_heads_per_head_k: int | None = None,
    enable_batch_invariant: bool = False,
    out: Any = None,
) -> tuple[Any, Any]:
    """Plan how a decode call spreads its KV blocks over the GPU.

    Without arguments (`enable_batch_invariant` aside) returns `(FlashMLASchedMeta(), None)`: an empty plan
    that the first decode call fills on the device. With arguments the plan is computed now, on the device,
    into two tensors.

    Parameters
    ----------
    cache_seqlens : array
        int32 `[b]`, contiguous, on the GPU: KV tokens per request, 0 and up. b is at most 16384.
    num_q_tokens_per_head_k : int
        `s_q * h_q // h_kv`. `num_heads_per_head_k` is the older name of the same argument.
    num_heads_k : int
        `h_kv`.
    num_heads_q : int, optional
        `h_q`. None: `num_q_tokens_per_head_k * num_heads_k`, that is, s_q = 1. The plan is the same in dense
        decoding; with `topk` give it when s_q > 1, or the plan has more partitions than fill the GPU.
    is_fp8_kvcache : bool
        Whether the cache that the plan is for holds FP8 values; True needs `topk`.
    topk : int, optional
        A plan for sparse decoding: columns of `indices`. Only the shape of `cache_seqlens` counts then, and
        `num_heads_k` is 1. With an extra cache, the sum of both topk, each rounded up to a multiple of 64.
        Such a plan serves any `topk_length`. A decode call that fills an empty `FlashMLASchedMeta` reads its
        `topk_length` and leaves out the blocks after it.
    num_heads_per_head_k : int, optional
        See `num_q_tokens_per_head_k`; give one of the two.
    enable_batch_invariant : bool
        Split every request by its own length alone, so that its result has the same bits in any batch. A
        plan of bare tensors needs `enable_batch_invariant=True` on the decode call too, which sizes its
        scratch by it; a `FlashMLASchedMeta` remembers it.
    out : pair of arrays or FlashMLASchedMeta, optional
        A plan to recompute in place: `(tile_scheduler_metadata, num_splits)` of an earlier call, or an
        object. int32 `[n, 8]` with any n >= 1 and int32 `[>= b + 1]`, both contiguous, on the device of
        `cache_seqlens`; an object without arrays gets new ones, which the next decode call uses. The batch
        may be smaller than the one the arrays were made for: all of num_splits is written, so that a call for
        the larger batch leaves the results of the other requests alone.
        Between replays of a captured CUDA graph this updates the plan that the graph reads. `topk` must be
        equal, in blocks of 64, to the topk of the call which filled an object.

    Returns
    -------
    tile_scheduler_metadata : array or FlashMLASchedMeta
        int32 `[num_sm_parts, 8]` in the framework of `cache_seqlens`, one row per partition: begin_req,
        begin_block (of 64 tokens), end_req (inclusive), end_block (exclusive), begin_split, and 3 columns for
        the library's own use. Any consumer may copy it; a decode call takes any number of rows. `out` if it
        was given.
    num_splits : array or None
        int32 `[b + 1]`, exclusive prefix sum of splits per request. None with a `FlashMLASchedMeta`.

    Raises
    ------
    TypeError, ValueError
        An argument is of the wrong kind, dtype, shape or device; raised before anything is launched.
    NotImplementedError
        `is_fp8_kvcache` without `topk`: dense decoding has no FP8 caches.
    RawMLAError
        A subclass says what is missing: GPU, driver, NVRTC, a compiled kernel inside a graph capture.

    Notes
    -----
    Allocates the two arrays (unless `out` is given) with the caller's framework and enqueues one kernel on
    its current stream. Never synchronises; legal inside a CUDA-graph capture once `rawmla.warmup` has
    loaded the kernel. The row layout is FlashMLA's (github.com/deepseek-ai/FlashMLA).
    """
    batch_invariant = as_bool("enable_batch_invariant", enable_batch_invariant)
    if as_bool("is_fp8_kvcache", is_fp8_kvcache) and topk is None:
        refuse_dense_fp8()
    if num_heads_per_head_k is not None:
        if num_q_tokens_per_head_k is not None:
            raise TypeError(
                "num_heads_per_head_k: expected None when num_q_tokens_per_head_k, its newer name, is given, "
                f"got {num_heads_per_head_k!r}"
            )
        num_q_tokens_per_head_k = num_heads_per_head_k
    if all(x is None for x in (cache_seqlens, num_q_tokens_per_head_k, num_heads_k, num_heads_q, topk, out)):
        return FlashMLASchedMeta(enable_batch_invariant=batch_invariant), None
    compute = mla_operators().compute_plan if tracing.is_traced(cache_seqlens) else metadata.compute
    return compute(
        cache_seqlens, num_q_tokens_per_head_k, num_heads_k, num_heads_q, topk, batch_invariant, out
    )
