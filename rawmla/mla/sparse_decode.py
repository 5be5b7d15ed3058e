"""Sparse decoding: the calls of `flash_mla_with_kvcache` with `indices`.

As in `rawmla.mla.decode`, the host checks what it can see, allocates in the framework of q and hands plain
addresses and numbers to `rawmla.kernels`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..call import checks
from ..call.arrays import READERS, Fields, inspect
from ..kernels import mla_metadata as metadata
from ..kernels import mla_sparse as sparse_decode
from ..mla.plan import FlashMLASchedMeta, SchedConfig, fill_plan

__all__ = ["PreparedCall", "decode"]

_D_V = checks.D_V
_ARGUMENTS = (
    "q",
    "k_cache",
    "indices",
    "topk_length",
    "extra_k_cache",
    "extra_indices_in_kvcache",
    "extra_topk_length",
    "attn_sink",
    "out",
)
_REQUIRED = ("q", "k_cache")

# Calls whose checks were passed, with their launches. Emptied when full.
_MAX_KNOWN = 1024
_known: dict[tuple[Any, ...], _Known] = {}


class PreparedCall(NamedTuple):
    """What a kind of call does on its arrays, of decoding or of prefill."""

    allocate: Callable[[], list[Any]]  # `out` unless given, the other results, scratch or None
    launch: Callable[..., None]


class _Known(NamedTuple):
    """What follows from the kinds of the arguments."""

    sizes: checks.SparseSizes
    q_strides: tuple[int, int, int] | None  # None: a contiguous copy is needed
    calls: dict[tuple[Any, ...], PreparedCall]


def decode(
    q: Any,
    k_cache: Any,
    tile_scheduler_metadata: Any,
    num_splits: Any,
    softmax_scale: float | None,
    is_fp8_kvcache: bool,
    indices: Any,
    attn_sink: Any,
    extra_k_cache: Any,
    extra_indices_in_kvcache: Any,
    topk_length: Any,
    extra_topk_length: Any,
    out: Any,
    enable_batch_invariant: bool,
) -> tuple[Any, Any]:
    """`flash_mla_with_kvcache` with `indices`; booleans are checked already."""
    arrays = (
        q,
        k_cache,
        indices,
        topk_length,
        extra_k_cache,
        extra_indices_in_kvcache,
        extra_topk_length,
        attn_sink,
        out,
    )
    views: list[Fields | None] = [
        None if array is None and name not in _REQUIRED else READERS[type(array)](array, name)
        for array, name in zip(arrays, _ARGUMENTS, strict=True)
    ]
    kinds = tuple([None if view is None else (view[0] & 15, *view[1:6]) for view in views])
    known = _known.get((is_fp8_kvcache, kinds)) or _learn(is_fp8_kvcache, kinds, views)
    sizes = known.sizes
    b, s_q, h_q = sizes.b, sizes.s_q, sizes.h_q
    q_view = views[0]
    assert q_view is not None
    _, _, _, _, device, framework, q_array = q_view
    for view, name in zip(views[1:], _ARGUMENTS[1:], strict=True):
        if view is not None and view[5] is not framework:
            checks.check_place(name, view, device, framework, "q")
    scale = sizes.d_qk**-0.5 if softmax_scale is None else checks.as_softmax_scale(softmax_scale)

    pointers = [0 if view is None else view[0] for view in views]
    tokens = metadata.TokenCounts(pointers[3], pointers[6], sizes.cache.topk, sizes.extra.topk)
    plan = tile_scheduler_metadata if isinstance(tile_scheduler_metadata, FlashMLASchedMeta) else None
    config = None
    if plan is None:
        if num_splits is None:
            raise ValueError(
                "num_splits: expected an int32 array with a tensor as tile_scheduler_metadata, got None"
            )
        tiles, splits = tile_scheduler_metadata, num_splits
    else:
        if num_splits is not None:
            raise ValueError(
                "num_splits: expected None with a FlashMLASchedMeta, which holds its own, got "
                f"{type(num_splits).__name__}"
            )
        enable_batch_invariant = enable_batch_invariant or plan.enable_batch_invariant
        config = SchedConfig(
            b,
            s_q,
            h_q,
            sizes.cache.page_block_size,
            1,
            causal=False,
            is_fp8_kvcache=is_fp8_kvcache,
            topk=sizes.cache.topk,
            extra_page_block_size=sizes.extra.page_block_size if sizes.extra.topk else None,
            extra_topk=sizes.extra.topk or None,
            enable_batch_invariant=enable_batch_invariant,
        )
        if plan.have_initialized:
            checks.check_sparse_config(plan.config, config)
        tiles, splits = plan.tile_scheduler_metadata, plan.num_splits
        if tiles is None and splits is not None:
            raise ValueError(
                "tile_scheduler_metadata: expected both arrays of the FlashMLASchedMeta or none, got "
                "num_splits"
            )
    if plan is None or tiles is not None:
        tiles_view = inspect(tiles, "tile_scheduler_metadata")
        splits_view = inspect(splits, "num_splits")
        num_parts = checks.plan_rows(tiles_view, splits_view, b, device, framework, "q")
        tiles_ptr, splits_ptr = tiles_view.ptr, splits_view.ptr
    elif b > metadata.MAX_BATCH:
        raise ValueError(f"q: expected at most {metadata.MAX_BATCH} requests for a plan, got {b}")

    if not b or not s_q:
        if out is None:
            out = framework.empty((b, s_q, h_q, _D_V), "bfloat16", device)
        return out, framework.empty((b, h_q, s_q), "float32", device)

    stream = framework.current_stream(device)
    q_strides = known.q_strides
    if q_strides is None:
        q_array = framework.contiguous_copy(q_array, "q")
        pointers[0] = framework.pointer(q_array)
        q_strides = (s_q * h_q * sizes.d_qk, h_q * sizes.d_qk, sizes.d_qk)
    if plan is not None and (tiles is None or not plan.have_initialized):
        assert config is not None
        if tiles is None:
            tiles_ptr, num_parts, splits_ptr = fill_plan(plan, config, tokens, device, framework)
        plan.config = config
        plan.have_initialized = True

    key = (num_parts, plan is not None, enable_batch_invariant, scale)
    call = known.calls.get(key)
    if call is None:
        if len(known.calls) >= _MAX_KNOWN:
            known.calls.clear()
        prepared = sparse_decode.PreparedSparse(
            sparse_decode.SparseCall(
                device=device,
                format=sizes.format,
                d_qk=sizes.d_qk,
                load_bytes=sizes.load_bytes,
                b=b,
                s_q=s_q,
                h_q=h_q,
                cache=sizes.cache,
                extra=sizes.extra,
                q_strides=q_strides,
                num_parts=num_parts,
                object_layout=plan is not None,
                batch_invariant=enable_batch_invariant,
                out_strides=sizes.out_strides,
                softmax_scale=scale,
            ),
            framework.capture_query(device),
        )
        results = [((b, s_q, h_q, _D_V), "bfloat16"), ((b, h_q, s_q), "float32")][out is not None :]
        allocate = framework.allocator(results, prepared.scratch_bytes, device)
        call = known.calls[key] = PreparedCall(allocate, prepared.launch)
    if out is None:
        out, lse, scratch = call.allocate()
        pointers[8] = framework.pointer(out)
    else:
        lse, scratch = call.allocate()
    call.launch(
        stream,
        sparse_decode.SparseAddresses(
            q=pointers[0],
            k_cache=pointers[1],
            extra_k_cache=pointers[4],
            indices=pointers[2],
            extra_indices=pointers[5],
            topk_length=pointers[3],
            extra_topk_length=pointers[6],
            attn_sink=pointers[7],
            sched_meta=tiles_ptr,
            num_splits=splits_ptr,
            out=pointers[8],
            lse=framework.pointer(lse),
        ),
        0 if scratch is None else framework.pointer(scratch),
    )
    return out, lse


def _learn(is_fp8_kvcache: bool, kinds: tuple[Any, ...], views: list[Fields | None]) -> _Known:
    """Check the arguments, and remember that."""
    sizes = checks.sparse_sizes(is_fp8_kvcache, dict(zip(_ARGUMENTS, views, strict=True)))
    q_view = views[0]
    assert q_view is not None
    ptr, shape, strides, *_ = q_view
    usable = checks.usable_strides(shape, strides)
    fits = checks.strides_fit(ptr, shape, usable)
    known = _Known(sizes, (usable[0], usable[1], usable[2]) if fits else None, {})
    if len(_known) >= _MAX_KNOWN:
        _known.clear()
    _known[is_fp8_kvcache, kinds] = known
    return known
