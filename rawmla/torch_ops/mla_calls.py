"""The call paths of `rawmla.mla` as calls of operators: what public functions do while torch traces them.

torch.compile traces these functions themselves, so they are Python that it can follow: attributes of plan
objects, sizes, and operators. All checks of arrays are the operators'.
"""

from __future__ import annotations

from typing import Any

import torch

from ..mla import metadata
from ..mla import plan as plans
from ..mla.plan import FlashMLASchedMeta, SchedConfig
from ..mla.sparse_decode import ExtraCache
from .registration import call_with_out

_ops = torch.ops.rawmla


def compute_plan(
    cache_seqlens: Any,
    num_q_tokens_per_head_k: Any,
    num_heads_k: Any,
    num_heads_q: Any,
    topk: Any,
    batch_invariant: bool,
    out: Any,
) -> tuple[Any, Any]:
    """As `rawmla.mla.metadata.compute`."""
    is_object = _is_object(out)
    if is_object:
        batch_invariant = metadata.batch_invariant_of(out, batch_invariant)
        metadata.check_topk_of(out, topk)
    sizes = (num_q_tokens_per_head_k, num_heads_k, num_heads_q, topk, batch_invariant)
    if out is None:
        return _ops.plan.default(cache_seqlens, *sizes)
    if is_object and metadata.is_empty(out):  # arrays of the right size, in the order of bare tensors so far
        out.tile_scheduler_metadata, out.num_splits = _ops.plan.default(cache_seqlens, *sizes)
    rows, num_splits = metadata.given_arrays(out)
    _ops.plan_.default(cache_seqlens, *sizes, rows, num_splits, is_object)
    if not is_object:
        return rows, num_splits
    metadata.note_batch_invariant(out, batch_invariant)
    return out, None


def decode(
    q: Any,
    k_cache: Any,
    block_table: Any,
    cache_seqlens: Any,
    tile_scheduler_metadata: Any,
    num_splits: Any,
    softmax_scale: Any,
    causal: bool,
    out: Any,
    enable_batch_invariant: bool,
) -> tuple[Any, Any]:
    """As `rawmla.mla.dense_decode.decode`."""
    q, q_rope = _parts(q)
    b, s_q, h_q, _ = q.shape
    _, page_block_size, h_kv, _ = k_cache.shape
    plan = tile_scheduler_metadata
    is_object, batch_invariant = _kind_of_plan(plan, num_splits, enable_batch_invariant)
    config = SchedConfig(b, s_q, h_q, page_block_size, h_kv, causal, enable_batch_invariant=batch_invariant)
    lengths = (cache_seqlens, None, None, None, None)
    rows, num_splits = _arrays_of(plan, config, lengths) if is_object else (plan, num_splits)
    call = (q, q_rope, k_cache, block_table, cache_seqlens, rows, num_splits, softmax_scale, causal)
    results = call_with_out("decode", (*call, batch_invariant, is_object), out)
    if is_object:
        _mark(plan, config, rows, num_splits)
    return results


def decode_sparse(
    q: Any,
    k_cache: Any,
    tile_scheduler_metadata: Any,
    num_splits: Any,
    softmax_scale: Any,
    is_fp8_kvcache: bool,
    indices: Any,
    attn_sink: Any,
    topk_length: Any,
    extra: ExtraCache | None,
    out: Any,
    enable_batch_invariant: bool,
) -> tuple[Any, Any]:
    """As `rawmla.mla.sparse_decode.decode`."""
    extra_k_cache, extra_indices, extra_topk_length = extra or (None, None, None)
    q, q_rope = _parts(q)
    b, s_q, h_q, _ = q.shape
    plan = tile_scheduler_metadata
    is_object, batch_invariant = _kind_of_plan(plan, num_splits, enable_batch_invariant)
    config = SchedConfig(
        b,
        s_q,
        h_q,
        k_cache.shape[1],
        1,
        False,
        is_fp8_kvcache,
        indices.shape[2],
        None if extra_k_cache is None else extra_k_cache.shape[1],
        None if extra_indices is None else extra_indices.shape[2],
        batch_invariant,
    )
    lengths = (None, indices, topk_length, extra_indices, extra_topk_length)
    rows, num_splits = _arrays_of(plan, config, lengths) if is_object else (plan, num_splits)
    call = (
        *(q, q_rope, k_cache, indices, rows, num_splits, softmax_scale, is_fp8_kvcache, attn_sink),
        *(extra_k_cache, extra_indices, topk_length, extra_topk_length, batch_invariant, is_object),
    )
    results = call_with_out("decode_sparse", call, out)
    if is_object:
        _mark(plan, config, rows, num_splits)
    return results


def _parts(q: Any) -> tuple[Any, Any]:
    """q and, if it is a pair, its RoPE columns."""
    if not isinstance(q, tuple):
        return q, None
    if len(q) != 2:
        raise ValueError(f"q: expected an array or a pair (q_nope, q_rope), got a tuple of {len(q)}")
    return q


def _is_object(plan: Any) -> bool:
    # Tensors first: torch 2.4 cannot trace the other question with one.
    return not isinstance(plan, torch.Tensor) and plans.is_plan_object(plan)


def _kind_of_plan(plan: Any, num_splits: Any, batch_invariant: bool) -> tuple[bool, bool]:
    """Whether the plan of a call is an object, and whether it is batch-invariant."""
    if _is_object(plan):
        if num_splits is not None:
            plans.refuse_splits(num_splits)
        return True, batch_invariant or getattr(plan, "enable_batch_invariant", False)
    if not isinstance(plan, torch.Tensor):
        plans.refuse_what_is_no_plan(plan)
    if num_splits is None:
        plans.refuse_no_splits()
    return False, batch_invariant


def _arrays_of(
    plan: FlashMLASchedMeta, config: SchedConfig, lengths: tuple[Any, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The arrays of an object, which must be one for this configuration, or new ones if it is empty.

    ``lengths`` are the arrays that a plan is computed from.
    """
    if plan.have_initialized:
        plans.check_config(plan.config, plans.fields_of(config))
    if plan.tile_scheduler_metadata is not None:
        return plan.tile_scheduler_metadata, plan.num_splits
    if plan.num_splits is not None:
        plans.refuse_one_array()
    sizes = (config.s_q, config.h_q, config.h_k)
    return _ops.plan_object.default(*sizes, *lengths, config.enable_batch_invariant)


def _mark(plan: FlashMLASchedMeta, config: SchedConfig, rows: Any, num_splits: Any) -> None:
    """Note in the object that a call has used it, as `rawmla.mla.plan.mark_plan` does."""
    if plan.have_initialized or config.b == 0 or config.s_q == 0:  # `not config.b` would fix b in torch 2.4
        return
    plan.tile_scheduler_metadata, plan.num_splits = rows, num_splits
    plan.config = config if isinstance(plan, FlashMLASchedMeta) else plans.config_for(plan, config)
    plan.have_initialized = True


def prefill(
    q: Any,
    kv: Any,
    indices: Any,
    sm_scale: Any,
    attn_sink: Any,
    topk_length: Any,
    out: Any,
    log_base: Any,
    is_fp8_kvcache: Any,
    enable_batch_invariant: Any,
) -> tuple[Any, Any, Any]:
    """As `rawmla.mla.sparse_prefill.prefill`."""
    arrays = (*_parts(q), kv, indices, sm_scale, attn_sink, topk_length)
    options = (log_base, is_fp8_kvcache, enable_batch_invariant)
    return call_with_out("sparse_fwd", (*arrays, *options), out)


def quantize(k_cache: Any, layout: Any, out: Any) -> Any:
    """As `rawmla.mla.cache.quantize`."""
    return call_with_out("quantize", (k_cache, layout), out)


def dequantize(cache: Any, layout: Any) -> Any:
    """As `rawmla.mla.cache.dequantize`."""
    return _ops.dequantize.default(cache, layout)


def write(kv_c: Any, k_pe: Any, kv_cache: Any, slot_mapping: Any) -> None:
    """As `rawmla.mla.cache.write`."""
    _ops.write_kv.default(kv_c, k_pe, kv_cache, slot_mapping)


def gather(
    kv_cache: Any, block_table: Any, cache_seqlens: Any, out: Any, workspace_starts: Any, seq_starts: Any
) -> None:
    """As `rawmla.mla.cache.gather`."""
    _ops.gather_kv.default(kv_cache, block_table, cache_seqlens, out, workspace_starts, seq_starts)


def convert(
    indices: Any, block_table: Any, page_block_size: Any, request_ids: Any, compact: bool, out: Any
) -> Any:
    """As `rawmla.mla.indices.convert`."""
    name = "convert_indices_compact" if compact else "convert_indices"
    return call_with_out(name, (indices, block_table, page_block_size, request_ids), out)


def merge(outs: Any, lses: Any, out: Any) -> tuple[Any, Any]:
    """As `rawmla.mla.merge.merge`."""
    return call_with_out("merge", (outs, lses), out)
