"""The operators of MLA: each with its schema, the call path that it runs, and the shapes of its results.

One that writes what it is given ends in `_out` (`_` for plans), and returns what the public function
allocates besides: nothing, or new tensors. Flags `object_layout` give the order of a plan's rows: as in an
object (`FlashMLASchedMeta`), or as in bare tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .. import jit, reference
from ..errors import RawMLAError
from ..kernels import mla_metadata
from ..kernels.common import D_V
from ..kernels.mla_cache_rows import QUANTIZED, padded_block_bytes
from ..mla import dense_decode, metadata, sparse_decode, sparse_prefill
from ..mla import plan as plans
from ..mla.cache import dequantize, gather, quantize, write
from ..mla.indices import convert
from ..mla.merge import merge
from .registration import empty_lse, register, register_with_out

__all__: list[str] = []

Result = tuple[torch.Tensor, ...]


# ---- plans


def _sm_count(device: torch.device) -> int:
    """Multiprocessors of a device; without it, and on the CPU, as many as the reference has."""
    if device.type == "cuda":
        try:
            index = torch.cuda.current_device() if device.index is None else device.index
            return jit.device_info(index).sm_count
        except (RawMLAError, RuntimeError, ValueError):
            pass  # traced for a GPU that is not there
    return reference.SM_COUNT


def _num_parts(device: torch.device, s_q: int, h_q: int, h_kv: int, is_sparse: bool) -> int:
    if is_sparse:
        return mla_metadata.num_sm_parts_sparse(_sm_count(device), s_q, h_q)
    return mla_metadata.num_sm_parts(_sm_count(device), s_q, h_q, h_kv)


def _empty_plan(like: torch.Tensor, num_parts: int) -> Result:
    """The arrays of a plan, not filled, for the requests that are the first axis of ``like``."""
    rows = like.new_empty((num_parts, mla_metadata.PLAN_COLUMNS), dtype=torch.int32)
    return rows, like.new_empty((like.shape[0] + 1,), dtype=torch.int32)


def _empty_new_plan(
    cache_seqlens: torch.Tensor,
    num_q_tokens_per_head_k: int,
    num_heads_k: int,
    num_heads_q: int | None,
    topk: int | None,
    **others: Any,
) -> Result:
    rows_q = int(num_q_tokens_per_head_k) * int(num_heads_k)
    h_q = rows_q if num_heads_q is None else int(num_heads_q)
    parts = _num_parts(cache_seqlens.device, rows_q // h_q, h_q, int(num_heads_k), topk is not None)
    return _empty_plan(cache_seqlens, parts)


def _empty_plan_of_object(
    s_q: int, h_q: int, num_heads_k: int, cache_seqlens: Any, indices: Any, **others: Any
) -> Result:
    given = cache_seqlens if indices is None else indices
    parts = _num_parts(given.device, int(s_q), int(h_q), int(num_heads_k), indices is not None)
    return _empty_plan(given, parts)


def _plan_in_place(*args: Any) -> Any:
    *given, rows, num_splits, object_layout = args
    plan, splits = _as_plan(plans.FlashMLASchedMeta, rows, num_splits, object_layout)
    given.append(plan if object_layout else (plan, splits))
    return metadata.compute(*given)


def _plan_in_reference(topk: int | None, **given: Any) -> Any:
    return reference.get_mla_metadata(is_fp8_kvcache=topk is not None, topk=topk, **given)


def _plan_in_place_in_reference(
    tile_scheduler_metadata: Any, num_splits: Any, object_layout: bool, **given: Any
) -> Any:
    made = reference.FlashMLASchedMeta
    plan, splits = _as_plan(made, tile_scheduler_metadata, num_splits, object_layout)
    return _plan_in_reference(out=plan if object_layout else (plan, splits), **given)


def _plan_object_in_reference(
    s_q: int,
    h_q: int,
    num_heads_k: int,
    cache_seqlens: Any,
    indices: Any,
    topk_length: Any,
    extra_indices_in_kvcache: Any,
    extra_topk_length: Any,
    enable_batch_invariant: bool,
) -> Result:
    device = (cache_seqlens if indices is None else indices).device
    parts = _num_parts(device, s_q, h_q, num_heads_k, indices is not None)
    if indices is None:
        plan = reference.plan(cache_seqlens, parts, enable_batch_invariant)
    else:
        b, _, topk = indices.shape
        extra_topk = 0 if extra_indices_in_kvcache is None else extra_indices_in_kvcache.shape[2]
        blocks = reference.sparse_blocks(b, topk, topk_length, extra_topk, extra_topk_length)
        room = int(reference.sparse_blocks(1, topk, None, extra_topk)[0])
        plan = reference.plan_blocks(blocks, parts, enable_batch_invariant, room)
    return torch.from_numpy(plan.object_rows), torch.from_numpy(plan.num_splits)


def _as_plan(
    plan_class: Callable[..., Any], tile_scheduler_metadata: Any, num_splits: Any, object_layout: bool
) -> tuple[Any, Any]:
    """A plan as two arguments of a decode call, from the arrays and the order of their rows."""
    if not object_layout:
        return tile_scheduler_metadata, num_splits
    return plan_class(tile_scheduler_metadata=tile_scheduler_metadata, num_splits=num_splits), None


_SIZES = (
    "Tensor cache_seqlens, int num_q_tokens_per_head_k, int num_heads_k, int? num_heads_q, int? topk, "
    "bool enable_batch_invariant"
)
register(
    f"plan({_SIZES}) -> (Tensor, Tensor)",
    partial(metadata.compute, out=None),
    _plan_in_reference,
    _empty_new_plan,
)
register(
    f"plan_({_SIZES}, Tensor(a!) tile_scheduler_metadata, Tensor(b!) num_splits, bool object_layout) -> ()",
    _plan_in_place,
    _plan_in_place_in_reference,
    None,
)
register(
    "plan_object(int s_q, int h_q, int num_heads_k, Tensor? cache_seqlens, Tensor? indices, "
    "Tensor? topk_length, Tensor? extra_indices_in_kvcache, Tensor? extra_topk_length, "
    "bool enable_batch_invariant) -> (Tensor, Tensor)",
    plans.plan_object,
    _plan_object_in_reference,
    _empty_plan_of_object,
)


# ---- attention


def _joined(q: Any, q_rope: Any) -> Any:
    """q as an argument of a call: one array, or a pair."""
    return q if q_rope is None else (q, q_rope)


def _decode(*args: Any, out: Any) -> Any:
    q, q_rope, k_cache, block_table, cache_seqlens, rows, num_splits, *options = args
    softmax_scale, causal, batch_invariant, object_layout = options
    arrays = (_joined(q, q_rope), k_cache, block_table, cache_seqlens)
    plan = _as_plan(plans.FlashMLASchedMeta, rows, num_splits, object_layout)
    return dense_decode.decode(*arrays, *plan, softmax_scale, causal, out, batch_invariant)


def _decode_sparse(*args: Any, out: Any) -> Any:
    q, q_rope, k_cache, indices, rows, num_splits, softmax_scale, is_fp8_kvcache, *others = args
    attn_sink, extra_cache, extra_indices, topk_length, extra_length, batch_invariant, object_layout = others
    q, plan = _joined(q, q_rope), _as_plan(plans.FlashMLASchedMeta, rows, num_splits, object_layout)
    extra = None
    if not (extra_cache is extra_indices is extra_length is None):
        extra = (extra_cache, extra_indices, extra_length)
    options = (softmax_scale, is_fp8_kvcache, indices, attn_sink, topk_length, extra, out, batch_invariant)
    return sparse_decode.decode(q, k_cache, *plan, *options)


def _decode_in_reference(
    q: Any, q_rope: Any, tile_scheduler_metadata: Any, num_splits: Any, object_layout: bool, **given: Any
) -> Any:
    made = reference.FlashMLASchedMeta
    plan, splits = _as_plan(made, tile_scheduler_metadata, num_splits, object_layout)
    return reference.flash_mla_with_kvcache(
        q=_joined(q, q_rope),
        head_dim_v=D_V,
        tile_scheduler_metadata=plan,
        num_splits=splits,
        **{"block_table": None, "cache_seqlens": None, **given},
    )


def _prefill(*args: Any, out: Any) -> Any:
    q, q_rope, kv, indices, sm_scale, attn_sink, topk_length, *options = args
    arrays = (_joined(q, q_rope), kv, indices, sm_scale, attn_sink, topk_length, out)
    return sparse_prefill.prefill(*arrays, *options)


def _prefill_in_reference(q: Any, q_rope: Any, **given: Any) -> Any:
    return reference.flash_mla_sparse_fwd(_joined(q, q_rope), **given)


def _empty_out(q: torch.Tensor) -> torch.Tensor:
    return q.new_empty((*q.shape[:-1], D_V))


def _empty_statistics(q: torch.Tensor) -> torch.Tensor:
    return q.new_empty(q.shape[:-1], dtype=torch.float32)


register_with_out(
    "decode",
    "Tensor q, Tensor? q_rope, Tensor k_cache, Tensor block_table, Tensor cache_seqlens, "
    "Tensor tile_scheduler_metadata, Tensor num_splits, float? softmax_scale, bool causal, "
    "bool enable_batch_invariant, bool object_layout",
    2,
    _decode,
    _decode_in_reference,
    lambda q, **others: (_empty_out(q), empty_lse(q)),
)
register_with_out(
    "decode_sparse",
    "Tensor q, Tensor? q_rope, Tensor k_cache, Tensor indices, Tensor tile_scheduler_metadata, "
    "Tensor num_splits, float? softmax_scale, bool is_fp8_kvcache, Tensor? attn_sink, Tensor? extra_k_cache, "
    "Tensor? extra_indices_in_kvcache, Tensor? topk_length, Tensor? extra_topk_length, "
    "bool enable_batch_invariant, bool object_layout",
    2,
    _decode_sparse,
    _decode_in_reference,
    lambda q, **others: (_empty_out(q), empty_lse(q)),
)
register_with_out(
    "sparse_fwd",
    "Tensor q, Tensor? q_rope, Tensor kv, Tensor indices, float sm_scale, Tensor? attn_sink, "
    "Tensor? topk_length, str log_base, bool is_fp8_kvcache, bool enable_batch_invariant",
    3,
    _prefill,
    _prefill_in_reference,
    lambda q, **others: (_empty_out(q), _empty_statistics(q), _empty_statistics(q)),
)


# ---- around attention


def _empty_quantized(k_cache: torch.Tensor, layout: str) -> torch.Tensor:
    num_blocks, page, _, _ = k_cache.shape
    format = QUANTIZED[layout]
    shape = (num_blocks, page, 1, format.token_bytes)
    strides = (padded_block_bytes(format, page), format.token_bytes, format.token_bytes, 1)
    return torch.empty_strided(shape, strides, dtype=torch.uint8, device=k_cache.device)


def _empty_slots(indices: torch.Tensor, **others: Any) -> torch.Tensor:
    return indices.new_empty(indices.shape)


register(
    "write_kv(Tensor kv_c, Tensor k_pe, Tensor(a!) kv_cache, Tensor slot_mapping) -> ()",
    write,
    reference.write_kv_cache,
    None,
)
register(
    "gather_kv(Tensor kv_cache, Tensor block_table, Tensor cache_seqlens, Tensor(a!) out, "
    "Tensor workspace_starts, Tensor? seq_starts) -> ()",
    gather,
    reference.gather_kv_cache,
    None,
)
register_with_out(
    "quantize", "Tensor k_cache, str layout", 1, quantize, reference.quantize_k_cache, _empty_quantized
)
register(
    "dequantize(Tensor cache, str layout) -> Tensor",
    dequantize,
    reference.dequantize_k_cache,
    lambda cache, layout: cache.new_empty((*cache.shape[:-1], QUANTIZED[layout].d_qk), dtype=torch.bfloat16),
)

_INDICES = "Tensor indices, Tensor block_table, int page_block_size, Tensor? request_ids"
register_with_out(
    "convert_indices",
    _INDICES,
    1,
    partial(convert, compact=False),
    partial(reference.convert_indices, compact=False),
    _empty_slots,
)
register_with_out(
    "convert_indices_compact",
    _INDICES,
    2,
    partial(convert, compact=True),
    partial(reference.convert_indices, compact=True),
    lambda indices, **others: (_empty_slots(indices), indices.new_empty(indices.shape[:-1])),
)
register_with_out(
    "merge",
    "Tensor[] outs, Tensor[] lses",
    2,
    merge,
    reference.merge_attn_states,
    lambda outs, lses: (outs[0].new_empty(outs[0].shape), lses[0].new_empty(lses[0].shape)),
)
