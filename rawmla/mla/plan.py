"""The scheduling plan of a decode call: how its KV blocks are spread over the GPU.

`get_mla_metadata` keeps the names, order and meaning of FlashMLA's arguments. A plan is two int32 arrays,
either bare or inside a `FlashMLASchedMeta`; the order of a row's fields differs between the two forms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .. import jit
from ..call import checks
from ..call.arrays import Framework, inspect
from ..kernels import mla_metadata as metadata
from ..kernels.common import BLOCK_TOKENS, ceil_div

__all__ = ["FlashMLASchedMeta", "SchedConfig", "fill_plan", "get_mla_metadata"]


@dataclass(slots=True)
class SchedConfig:
    """The call that a `FlashMLASchedMeta` was filled for; every field must match when it is used again.

    `h_k` is the number of KV heads (`h_kv`). `topk` and the `extra_*` fields are None for dense decoding, the
    latter also without an extra cache.
    """

    b: int
    s_q: int
    h_q: int
    page_block_size: int
    h_k: int
    causal: bool
    is_fp8_kvcache: bool = False
    topk: int | None = None
    extra_page_block_size: int | None = None
    extra_topk: int | None = None
    enable_batch_invariant: bool = False


@dataclass(eq=False)
class FlashMLASchedMeta:
    """A scheduling plan: the first decode call with it computes it, later ones of the same kind reuse it.

    Lengths are not part of the configuration: when `cache_seqlens` changes (in sparse decoding `topk_length`
    or `extra_topk_length`), take a new object, or recompute this one in place with `get_mla_metadata(...,
    out=plan)`. All fields may be written from outside; a caller with a scheduler of its own sets the two
    arrays before the first call. One object must not be filled by two threads at once.

    Attributes
    ----------
    have_initialized : bool
        True once a decode call has filled the object.
    config : SchedConfig or None
        The configuration it was filled for.
    tile_scheduler_metadata : array or None
        int32 `[num_sm_parts, 8]`, one row per part: begin_req, end_req (inclusive), begin_block, end_block
        (exclusive), begin_split, first request is split, last request is split, pad. Blocks are 64 tokens.
        A part is idle when begin_req >= b, begin > end or begin < 0. (Plans passed as bare tensors have
        another order: see `get_mla_metadata`.)
    num_splits : array or None
        int32 `[>= b + 1]`, exclusive prefix sum of the number of splits per request.
    enable_batch_invariant : bool
        The plan is to be batch-invariant (see `get_mla_metadata`).
    """

    have_initialized: bool = False
    config: SchedConfig | None = None
    tile_scheduler_metadata: Any = None
    num_splits: Any = None
    enable_batch_invariant: bool = False


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
        decoding; with `topk` give it when s_q > 1, or the plan has more parts than fill the GPU.
    is_fp8_kvcache : bool
        Of the cache that the plan will be used on; True needs `topk`.
    topk : int, optional
        A plan for sparse decoding: columns of `indices`. Of `cache_seqlens` only the shape counts then, and
        `num_heads_k` is 1. With an extra cache, the sum of both topk, each rounded up to a multiple of 64.
        Such a plan does not know `topk_length` and serves any; that of an empty `FlashMLASchedMeta` does,
        and leaves out the blocks behind it.
    num_heads_per_head_k : int, optional
        See `num_q_tokens_per_head_k`; give one of the two.
    enable_batch_invariant : bool
        Split every request by its own length alone, so that its result has the same bits in any batch. A
        plan of bare tensors needs `enable_batch_invariant=True` on the decode call too, which sizes its
        scratch by it; a `FlashMLASchedMeta` remembers it.
    out : pair of arrays or FlashMLASchedMeta, optional
        A plan to recompute in place: `(tile_scheduler_metadata, num_splits)` of an earlier call, or a
        filled object. int32 `[n, 8]` with any n >= 1 and int32 `[>= b + 1]`, both contiguous, on the device
        of `cache_seqlens`. The batch may be smaller than the one the arrays were made for: all of
        `num_splits[b + 1:]` then equals `num_splits[b]`, so that requests past the batch have no splits.
        Between replays of a captured CUDA graph this updates the plan that the graph reads. `topk` must be
        that of the call which filled an object, in blocks of 64.

    Returns
    -------
    tile_scheduler_metadata : array or FlashMLASchedMeta
        int32 `[num_sm_parts, 8]` in the framework of `cache_seqlens`, one row per part: begin_req,
        begin_block (of 64 tokens), end_req (inclusive), end_block (exclusive), begin_split, 3 more of the
        library's own. Any consumer may copy it; a decode call takes any number of rows. `out` if that was
        given.
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
    batch_invariant = checks.as_bool("enable_batch_invariant", enable_batch_invariant)
    if checks.as_bool("is_fp8_kvcache", is_fp8_kvcache) and topk is None:
        checks.refuse_dense_fp8()
    if num_heads_per_head_k is not None:
        if num_q_tokens_per_head_k is not None:
            raise TypeError(
                "num_heads_per_head_k: expected None when num_q_tokens_per_head_k, its newer name, is given, "
                f"got {num_heads_per_head_k!r}"
            )
        num_q_tokens_per_head_k = num_heads_per_head_k
    if all(x is None for x in (cache_seqlens, num_q_tokens_per_head_k, num_heads_k, num_heads_q, topk, out)):
        return FlashMLASchedMeta(enable_batch_invariant=batch_invariant), None

    lengths = inspect(cache_seqlens, "cache_seqlens")
    ptr, shape, strides, dtype, device, framework, _ = lengths
    if dtype != "int32":
        raise TypeError(f"cache_seqlens: expected dtype int32, got {dtype}")
    if len(shape) != 1:
        raise ValueError(f"cache_seqlens: expected shape [b], got {list(shape)}")
    b = shape[0]
    if b > metadata.MAX_BATCH:
        raise ValueError(f"cache_seqlens: expected at most {metadata.MAX_BATCH} requests, got {b}")
    if b > 1 and strides[0] != 1:
        raise ValueError(f"cache_seqlens: expected a contiguous array, got stride {strides[0]} (elements)")
    h_kv = checks.as_count("num_heads_k", num_heads_k)
    rows_q = checks.as_count("num_q_tokens_per_head_k", num_q_tokens_per_head_k) * h_kv
    h_q = rows_q if num_heads_q is None else checks.as_count("num_heads_q", num_heads_q)
    if h_q % h_kv or rows_q % h_q:
        raise ValueError(
            "num_heads_q: expected a multiple of num_heads_k that divides num_q_tokens_per_head_k * "
            f"num_heads_k = {rows_q}, got {h_q} with num_heads_k = {h_kv}"
        )

    tokens = metadata.TokenCounts(ptr)
    if topk is not None:
        tokens = metadata.TokenCounts(0, most=checks.as_count("topk", topk))
        if h_kv != 1:
            raise ValueError(f"num_heads_k: expected 1 with topk, got {h_kv}")

    plan = out if isinstance(out, FlashMLASchedMeta) else None
    if out is None:
        sm_count = jit.device_info(device).sm_count
        if topk is None:
            num_parts = metadata.num_sm_parts(sm_count, rows_q // h_q, h_q, h_kv)
        else:
            num_parts = metadata.num_sm_parts_sparse(sm_count, rows_q // h_q, h_q)
        tiles, splits = _empty_arrays(framework, num_parts, b, device)
        tiles_ptr, splits_ptr = framework.pointer(tiles), framework.pointer(splits)
        splits_length = b + 1
    else:
        if plan is not None:
            batch_invariant = _batch_invariant_of(plan, batch_invariant)
            _check_topk_of(plan, topk)
        tiles, splits = _given_arrays(out)
        tiles_view, splits_view = inspect(tiles, "out[0]"), inspect(splits, "out[1]")
        num_parts = checks.plan_rows(
            tiles_view, splits_view, b, device, framework, "cache_seqlens", ("out[0]", "out[1]")
        )
        tiles_ptr, splits_ptr = tiles_view.ptr, splits_view.ptr
        splits_length = splits_view.shape[0]

    if b:
        metadata.launch(
            device=device,
            stream=framework.current_stream(device),
            capturing=framework.capture_query(device),
            tokens=tokens,
            b=b,
            num_parts=num_parts,
            sched_meta=tiles_ptr,
            num_splits=splits_ptr,
            splits_length=splits_length,
            object_layout=plan is not None,
            batch_invariant=batch_invariant,
        )
    else:
        framework.fill(tiles, -1)  # begin < 0: every part idle, whatever the batch of the call that reads it
        framework.fill(splits, 0)
    return (tiles, splits) if plan is None else (plan, None)


def fill_plan(
    plan: FlashMLASchedMeta,
    config: SchedConfig,
    tokens: metadata.TokenCounts,
    device: int,
    framework: Framework,
) -> tuple[int, int, int]:
    """Compute the arrays of an empty object; returns (address of rows, their number, address of splits)."""
    sm_count = jit.device_info(device).sm_count
    if config.topk is None:
        num_parts = metadata.num_sm_parts(sm_count, config.s_q, config.h_q, config.h_k)
    else:
        num_parts = metadata.num_sm_parts_sparse(sm_count, config.s_q, config.h_q)
    tiles, splits = _empty_arrays(framework, num_parts, config.b, device)
    tiles_ptr, splits_ptr = framework.pointer(tiles), framework.pointer(splits)
    metadata.launch(
        device=device,
        stream=framework.current_stream(device),
        capturing=framework.capture_query(device),
        tokens=tokens,
        b=config.b,
        num_parts=num_parts,
        sched_meta=tiles_ptr,
        num_splits=splits_ptr,
        splits_length=config.b + 1,
        object_layout=True,
        batch_invariant=config.enable_batch_invariant,
    )
    plan.tile_scheduler_metadata = tiles
    plan.num_splits = splits
    return tiles_ptr, num_parts, splits_ptr


def _empty_arrays(framework: Framework, num_parts: int, b: int, device: int) -> tuple[Any, Any]:
    """The two arrays of a plan, not yet computed."""
    return (
        framework.empty((num_parts, checks.PLAN_COLUMNS), "int32", device),
        framework.empty((b + 1,), "int32", device),
    )


def _given_arrays(out: Any) -> tuple[Any, Any]:
    """The two arrays of a plan to recompute in place."""
    if isinstance(out, FlashMLASchedMeta):
        if out.tile_scheduler_metadata is None or out.num_splits is None:
            raise ValueError(
                "out: expected a FlashMLASchedMeta that a decode call has filled, got one without arrays"
            )
        return out.tile_scheduler_metadata, out.num_splits
    if isinstance(out, (tuple, list)) and len(out) == 2:
        return out[0], out[1]
    raise TypeError(
        "out: expected a pair (tile_scheduler_metadata, num_splits) or a FlashMLASchedMeta, "
        f"got {type(out).__name__}"
    )


def _batch_invariant_of(plan: FlashMLASchedMeta, asked: bool) -> bool:
    """Whether to recompute `plan` batch-invariant: as the decode calls that use it expect it."""
    if plan.config is None:
        return asked or plan.enable_batch_invariant
    planned = getattr(plan.config, "enable_batch_invariant", False)
    if asked and not planned:
        raise ValueError(
            "enable_batch_invariant: expected False, that of the decode call which filled out, got True"
        )
    return planned


def _check_topk_of(plan: FlashMLASchedMeta, topk: int | None) -> None:
    """A plan recomputed in place must cover the blocks of the decode calls that use it."""
    if plan.config is None:
        return
    if plan.config.topk is None:
        planned, same = "None", topk is None
    else:
        widths = (plan.config.topk, plan.config.extra_topk or 0)
        blocks = sum([ceil_div(width, BLOCK_TOKENS) for width in widths])
        planned = f"an int of {blocks} blocks of {BLOCK_TOKENS}, such as {blocks * BLOCK_TOKENS}"
        same = topk is not None and ceil_div(topk, BLOCK_TOKENS) == blocks
    if not same:
        raise ValueError(f"topk: expected {planned}, that of the decode call which filled out, got {topk}")
