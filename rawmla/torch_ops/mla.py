"""The operators of MLA: each with its schema, the public function it calls, and the shapes of its results.

One that writes what it is given ends in `_out` (`_` for plans), and returns what the public function
allocates besides: nothing, or new tensors. Flags `object_layout` tell the order of a plan's rows: that of an
object (`FlashMLASchedMeta`), or that of bare tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import rawmla

from .. import jit, reference
from ..errors import RawMLAError
from ..kernels import mla_metadata
from ..kernels.common import D_V
from ..kernels.mla_cache_rows import QUANTIZED, padded_block_bytes
from ..mla import plan as plans
from .registration import empty_lse
from .registration import register as register_operator

__all__: list[str] = []

Result = tuple[torch.Tensor, ...]


def register(schema: str, call: Callable[..., Any], empty: Callable[..., Any] | None) -> None:
    """Register an operator; ``call(api, *args)`` calls the function of `rawmla` or `rawmla.reference`."""
    register_operator(schema, partial(call, rawmla), partial(call, reference), empty)


def _sm_count(device: torch.device) -> int:
    """Multiprocessors of a device; without it, and on the CPU, those of the reference."""
    if device.type == "cuda":
        try:
            return jit.device_info(
                torch.cuda.current_device() if device.index is None else device.index
            ).sm_count
        except (RawMLAError, RuntimeError, ValueError):
            pass  # traced for a GPU that is not there
    return reference.SM_COUNT


def _plan_of(api: Any, rows: Any, num_splits: Any, object_layout: bool) -> tuple[Any, Any]:
    """A plan as arguments of the public functions, from the arrays and the order of their rows."""
    if object_layout:
        return api.FlashMLASchedMeta(tile_scheduler_metadata=rows, num_splits=num_splits), None
    return rows, num_splits


# ---- plans


def _empty_plan(like: torch.Tensor, b: Any, num_parts: int) -> Result:
    rows = like.new_empty((num_parts, mla_metadata.PLAN_COLUMNS), dtype=torch.int32)
    return rows, like.new_empty((b + 1,), dtype=torch.int32)


def _plan(
    api: Any,
    cache_seqlens: Any,
    num_q_tokens_per_head_k: int,
    num_heads_k: int,
    num_heads_q: int | None,
    topk: int | None,
    enable_batch_invariant: bool,
) -> Any:
    return api.get_mla_metadata(
        cache_seqlens,
        num_q_tokens_per_head_k,
        num_heads_k,
        num_heads_q,
        topk is not None,
        topk,
        enable_batch_invariant=enable_batch_invariant,
    )


def _plan_results(
    cache_seqlens: torch.Tensor,
    num_q_tokens_per_head_k: int,
    num_heads_k: int,
    num_heads_q: int | None,
    topk: int | None,
    enable_batch_invariant: bool,
) -> Result:
    rows_q = int(num_q_tokens_per_head_k) * int(num_heads_k)
    h_q = rows_q if num_heads_q is None else int(num_heads_q)
    is_sparse = topk is not None
    parts = _num_parts(cache_seqlens.device, rows_q // h_q, h_q, int(num_heads_k), is_sparse)
    return _empty_plan(cache_seqlens, cache_seqlens.shape[0], parts)


def _num_parts(device: torch.device, s_q: int, h_q: int, h_kv: int, is_sparse: bool) -> int:
    if is_sparse:
        return mla_metadata.num_sm_parts_sparse(_sm_count(device), s_q, h_q)
    return mla_metadata.num_sm_parts(_sm_count(device), s_q, h_q, h_kv)


register(
    "plan(Tensor cache_seqlens, int num_q_tokens_per_head_k, int num_heads_k, int? num_heads_q, int? topk, "
    "bool enable_batch_invariant) -> (Tensor, Tensor)",
    _plan,
    _plan_results,
)


def _plan_in_place(
    api: Any,
    cache_seqlens: Any,
    num_q_tokens_per_head_k: int,
    num_heads_k: int,
    num_heads_q: int | None,
    topk: int | None,
    enable_batch_invariant: bool,
    tile_scheduler_metadata: Any,
    num_splits: Any,
    object_layout: bool,
) -> Any:
    plan, splits = _plan_of(api, tile_scheduler_metadata, num_splits, object_layout)
    return api.get_mla_metadata(
        cache_seqlens,
        num_q_tokens_per_head_k,
        num_heads_k,
        num_heads_q,
        topk is not None,
        topk,
        enable_batch_invariant=enable_batch_invariant,
        out=plan if object_layout else (plan, splits),
    )


register(
    "plan_(Tensor cache_seqlens, int num_q_tokens_per_head_k, int num_heads_k, int? num_heads_q, int? topk, "
    "bool enable_batch_invariant, Tensor(a!) tile_scheduler_metadata, Tensor(b!) num_splits, "
    "bool object_layout) -> ()",
    _plan_in_place,
    None,
)


def _plan_object(
    api: Any,
    s_q: int,
    h_q: int,
    num_heads_k: int,
    cache_seqlens: Any,
    indices: Any,
    topk_length: Any,
    extra_indices_in_kvcache: Any,
    extra_topk_length: Any,
    enable_batch_invariant: bool,
) -> Any:
    if api is not reference:
        return plans.plan_object(
            s_q,
            h_q,
            num_heads_k,
            cache_seqlens,
            indices,
            topk_length,
            extra_indices_in_kvcache,
            extra_topk_length,
            enable_batch_invariant,
        )
    if indices is None:
        parts = _num_parts(cache_seqlens.device, s_q, h_q, num_heads_k, False)
        plan = reference.plan(cache_seqlens, parts, enable_batch_invariant)
    else:
        parts = _num_parts(indices.device, s_q, h_q, num_heads_k, True)
        b, _, topk = indices.shape
        extra_topk = 0 if extra_indices_in_kvcache is None else extra_indices_in_kvcache.shape[2]
        blocks = reference.sparse_blocks(b, topk, topk_length, extra_topk, extra_topk_length)
        room = int(reference.sparse_blocks(1, topk, None, extra_topk)[0])
        plan = reference.plan_blocks(blocks, parts, enable_batch_invariant, room)
    return torch.from_numpy(plan.object_rows), torch.from_numpy(plan.num_splits)


def _plan_object_results(
    s_q: int, h_q: int, num_heads_k: int, cache_seqlens: Any, indices: Any, *rest: Any
) -> Result:
    given = cache_seqlens if indices is None else indices
    parts = _num_parts(given.device, int(s_q), int(h_q), int(num_heads_k), indices is not None)
    return _empty_plan(given, given.shape[0], parts)


register(
    "plan_object(int s_q, int h_q, int num_heads_k, Tensor? cache_seqlens, Tensor? indices, "
    "Tensor? topk_length, Tensor? extra_indices_in_kvcache, Tensor? extra_topk_length, "
    "bool enable_batch_invariant) -> (Tensor, Tensor)",
    _plan_object,
    _plan_object_results,
)


# ---- decoding


def _joined(q: Any, q_rope: Any) -> Any:
    """q as an argument of the public functions: one array, or a pair."""
    return q if q_rope is None else (q, q_rope)


def _empty_out(q: torch.Tensor) -> torch.Tensor:
    return q.new_empty((*q.shape[:-1], D_V))


_DENSE = (
    "Tensor q, Tensor? q_rope, Tensor k_cache, Tensor block_table, Tensor cache_seqlens, "
    "Tensor tile_scheduler_metadata, "
    "Tensor num_splits, float? softmax_scale, bool causal, bool enable_batch_invariant, bool object_layout"
)


def _decode(
    api: Any,
    q: Any,
    q_rope: Any,
    k_cache: Any,
    block_table: Any,
    cache_seqlens: Any,
    rows: Any,
    num_splits: Any,
    *options: Any,
) -> Any:
    softmax_scale, causal, batch_invariant, object_layout, out = options
    return api.flash_mla_with_kvcache(
        _joined(q, q_rope),
        k_cache,
        block_table,
        cache_seqlens,
        D_V,
        *_plan_of(api, rows, num_splits, object_layout),
        softmax_scale,
        causal,
        out=out,
        enable_batch_invariant=batch_invariant,
    )


register(
    f"decode({_DENSE}) -> (Tensor, Tensor)",
    lambda *args: _decode(*args, None),
    lambda q, *args: (_empty_out(q), empty_lse(q)),
)
register(
    f"decode_out({_DENSE}, Tensor(a!) out) -> Tensor",
    lambda *args: _decode(*args)[1],
    lambda q, *args: empty_lse(q),
)

_SPARSE = (
    "Tensor q, Tensor? q_rope, Tensor k_cache, Tensor indices, Tensor tile_scheduler_metadata, "
    "Tensor num_splits, "
    "float? softmax_scale, bool is_fp8_kvcache, Tensor? attn_sink, Tensor? extra_k_cache, "
    "Tensor? extra_indices_in_kvcache, Tensor? topk_length, Tensor? extra_topk_length, "
    "bool enable_batch_invariant, bool object_layout"
)


def _decode_sparse(
    api: Any, q: Any, q_rope: Any, k_cache: Any, indices: Any, rows: Any, num_splits: Any, *options: Any
) -> Any:
    softmax_scale, is_fp8_kvcache, *arrays, batch_invariant, object_layout, out = options
    return api.flash_mla_with_kvcache(
        _joined(q, q_rope),
        k_cache,
        None,
        None,
        D_V,
        *_plan_of(api, rows, num_splits, object_layout),
        softmax_scale,
        False,
        is_fp8_kvcache,
        indices,
        *arrays,
        out,
        batch_invariant,
    )


register(
    f"decode_sparse({_SPARSE}) -> (Tensor, Tensor)",
    lambda *args: _decode_sparse(*args, None),
    lambda q, *args: (_empty_out(q), empty_lse(q)),
)
register(
    f"decode_sparse_out({_SPARSE}, Tensor(a!) out) -> Tensor",
    lambda *args: _decode_sparse(*args)[1],
    lambda q, *args: empty_lse(q),
)


# ---- sparse prefill

_PREFILL = (
    "Tensor q, Tensor? q_rope, Tensor kv, Tensor indices, float sm_scale, Tensor? attn_sink, "
    "Tensor? topk_length, "
    "str log_base, bool is_fp8_kvcache, bool enable_batch_invariant"
)


def _sparse_fwd(
    api: Any,
    q: Any,
    q_rope: Any,
    kv: Any,
    indices: Any,
    sm_scale: float,
    attn_sink: Any,
    topk_length: Any,
    log_base: str,
    is_fp8_kvcache: bool,
    enable_batch_invariant: bool,
    out: Any = None,
) -> Any:
    return api.flash_mla_sparse_fwd(
        _joined(q, q_rope),
        kv,
        indices,
        sm_scale,
        D_V,
        attn_sink,
        topk_length,
        out,
        log_base=log_base,
        is_fp8_kvcache=is_fp8_kvcache,
        enable_batch_invariant=enable_batch_invariant,
    )


def _empty_statistics(q: torch.Tensor) -> Result:
    max_logits, lse = (q.new_empty(q.shape[:-1], dtype=torch.float32) for _ in range(2))
    return max_logits, lse


register(
    f"sparse_fwd({_PREFILL}) -> (Tensor, Tensor, Tensor)",
    _sparse_fwd,
    lambda q, *args: (_empty_out(q), *_empty_statistics(q)),
)
register(
    f"sparse_fwd_out({_PREFILL}, Tensor(a!) out) -> (Tensor, Tensor)",
    lambda *args: _sparse_fwd(*args)[1:],
    lambda q, *args: _empty_statistics(q),
)


# ---- caches

register(
    "write_kv(Tensor kv_c, Tensor k_pe, Tensor(a!) kv_cache, Tensor slot_mapping) -> ()",
    lambda api, *args: api.write_kv_cache(*args),
    None,
)
register(
    "gather_kv(Tensor kv_cache, Tensor block_table, Tensor cache_seqlens, Tensor(a!) out, "
    "Tensor workspace_starts, Tensor? seq_starts) -> ()",
    lambda api, kv_cache, block_table, cache_seqlens, out, workspace_starts, seq_starts: api.gather_kv_cache(
        kv_cache, block_table, cache_seqlens, out, workspace_starts=workspace_starts, seq_starts=seq_starts
    ),
    None,
)


def _empty_quantized(k_cache: torch.Tensor, layout: str) -> torch.Tensor:
    num_blocks, page, _, _ = k_cache.shape
    format = QUANTIZED[layout]
    shape = (num_blocks, page, 1, format.token_bytes)
    strides = (padded_block_bytes(format, page), format.token_bytes, format.token_bytes, 1)
    return torch.empty_strided(shape, strides, dtype=torch.uint8, device=k_cache.device)


register(
    "quantize(Tensor k_cache, str layout) -> Tensor",
    lambda api, k_cache, layout: api.quantize_k_cache(k_cache, layout),
    _empty_quantized,
)
register(
    "quantize_out(Tensor k_cache, str layout, Tensor(a!) out) -> ()",
    lambda api, k_cache, layout, out: api.quantize_k_cache(k_cache, layout, out=out),
    None,
)
register(
    "dequantize(Tensor cache, str layout) -> Tensor",
    lambda api, cache, layout: api.dequantize_k_cache(cache, layout),
    lambda cache, layout: cache.new_empty((*cache.shape[:-1], QUANTIZED[layout].d_qk), dtype=torch.bfloat16),
)


# ---- indices

_INDICES = "Tensor indices, Tensor block_table, int page_block_size, Tensor? request_ids"


def _convert(
    api: Any,
    compact: bool,
    indices: Any,
    block_table: Any,
    page_block_size: int,
    request_ids: Any,
    out: Any = None,
) -> Any:
    return api.convert_indices(
        indices, block_table, page_block_size, request_ids=request_ids, compact=compact, out=out
    )


def _empty_slots(indices: torch.Tensor) -> torch.Tensor:
    return indices.new_empty(indices.shape)


def _empty_counts(indices: torch.Tensor) -> torch.Tensor:
    return indices.new_empty(indices.shape[:-1])


register(
    f"convert_indices({_INDICES}) -> Tensor",
    lambda api, *args: _convert(api, False, *args),
    lambda indices, *args: _empty_slots(indices),
)
register(
    f"convert_indices_out({_INDICES}, Tensor(a!) out) -> ()",
    lambda api, *args: _convert(api, False, *args),
    None,
)
register(
    f"convert_indices_compact({_INDICES}) -> (Tensor, Tensor)",
    lambda api, *args: _convert(api, True, *args),
    lambda indices, *args: (_empty_slots(indices), _empty_counts(indices)),
)
register(
    f"convert_indices_compact_out({_INDICES}, Tensor(a!) out) -> Tensor",
    lambda api, *args: _convert(api, True, *args)[1],
    lambda indices, *args: _empty_counts(indices),
)


# ---- merging


def _empty_merged_lse(lses: list[torch.Tensor]) -> torch.Tensor:
    return lses[0].new_empty(lses[0].shape)


register(
    "merge(Tensor[] outs, Tensor[] lses) -> (Tensor, Tensor)",
    lambda api, outs, lses: api.merge_attn_states(outs, lses),
    lambda outs, lses: (outs[0].new_empty(outs[0].shape), _empty_merged_lse(lses)),
)
register(
    "merge_out(Tensor[] outs, Tensor[] lses, Tensor(a!) out) -> Tensor",
    lambda api, outs, lses, out: api.merge_attn_states(outs, lses, out=out)[1],
    lambda outs, lses, out: _empty_merged_lse(lses),
)
