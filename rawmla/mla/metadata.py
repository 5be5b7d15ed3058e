"""Plans that `rawmla.get_mla_metadata` computes at once, into new arrays or in place."""

from __future__ import annotations

from typing import Any

from ..call.arguments import Arg, check_arguments, check_once, check_places
from ..call.arrays import inspect
from ..call.checks import as_count
from ..kernels import mla_metadata
from ..kernels.common import BLOCK_TOKENS, MAX_TOPK, ceil_div
from .plan import IDLE, FlashMLASchedMeta, check_plan_arrays, count_parts, is_plan_object, make_plan

_TABLE = (Arg("cache_seqlens", "int32", "b", has_rows=True),)
_OUT = ("out[0]", "out[1]")


def compute(
    cache_seqlens: Any,
    num_q_tokens_per_head_k: int | None,
    num_heads_k: int | None,
    num_heads_q: int | None,
    topk: int | None,
    batch_invariant: bool,
    out: Any,
) -> tuple[Any, Any]:
    """Run `rawmla.get_mla_metadata` with arguments."""
    lengths = inspect(cache_seqlens, "cache_seqlens")
    h_kv = as_count("num_heads_k", num_heads_k)
    rows_q = as_count("num_q_tokens_per_head_k", num_q_tokens_per_head_k) * h_kv
    h_q = rows_q if num_heads_q is None else as_count("num_heads_q", num_heads_q)
    if h_q % h_kv or rows_q % h_q:
        raise ValueError(
            "num_heads_q: expected a multiple of num_heads_k that divides num_q_tokens_per_head_k * "
            f"num_heads_k = {rows_q}, got {h_q} with num_heads_k = {h_kv}"
        )

    tokens = mla_metadata.TokenCounts(lengths.ptr)
    if topk is not None:
        topk = as_count("topk", topk)
        if topk > MAX_TOPK:
            raise ValueError(f"topk: expected an int below 2**30, got {topk}")
        tokens = mla_metadata.TokenCounts(0, most=topk)
        if h_kv != 1:
            raise ValueError(f"num_heads_k: expected 1 with topk, got {h_kv}")

    is_pair = type(out) in (tuple, list)  # looking for the attributes of a plan takes a tenth of a call
    plan: FlashMLASchedMeta | None = out if not is_pair and out is not None and is_plan_object(out) else None
    if plan is not None:
        batch_invariant = batch_invariant_of(plan, batch_invariant)
        check_topk_of(plan, topk)
    is_new = out is None or plan is not None and is_empty(plan)
    if is_new:
        b, _ = check_once(_check, {"cache_seqlens": lengths})
        num_parts = count_parts(lengths.device, rows_q // h_q, h_q, h_kv, topk is not None)
        rows, splits = make_plan(lengths, b, num_parts, tokens, plan is not None, batch_invariant)
    else:
        rows, splits = given_arrays(out)
        given_rows, given_splits = inspect(rows, _OUT[0]), inspect(splits, _OUT[1])
        b, num_parts = check_once(
            _check, {"cache_seqlens": lengths, _OUT[0]: given_rows, _OUT[1]: given_splits}
        )
        if b:
            mla_metadata.launch(
                device=lengths.device,
                stream=lengths.framework.current_stream(lengths.device),
                capturing=lengths.framework.capture_query(lengths.device),
                tokens=tokens,
                b=b,
                num_parts=num_parts,
                sched_meta=given_rows.ptr,
                num_splits=given_splits.ptr,
                splits_length=given_splits.shape[0],
                object_layout=plan is not None,
                batch_invariant=batch_invariant,
            )
        else:
            given_rows.framework.fill(given_rows.array, IDLE)  # perhaps another framework than of lengths
            given_splits.framework.fill(given_splits.array, 0)
    if plan is None:
        return rows, splits
    if is_new:
        plan.tile_scheduler_metadata, plan.num_splits = rows, splits
    note_batch_invariant(plan, batch_invariant)
    return plan, None


def _check(views: dict[str, Any]) -> tuple[int, int]:
    """Check the lengths, and the arrays of a given plan; returns the numbers of requests and partitions."""
    b = check_arguments(_TABLE, views)["b"]
    if b > mla_metadata.MAX_BATCH:
        raise ValueError(f"cache_seqlens: expected at most {mla_metadata.MAX_BATCH} requests, got {b}")
    check_places(views)
    return b, check_plan_arrays(views[_OUT[0]], views[_OUT[1]], b, _OUT) if len(views) > 1 else 0


def is_empty(plan: FlashMLASchedMeta) -> bool:
    """Whether the object has no arrays."""
    return plan.tile_scheduler_metadata is None and plan.num_splits is None


def given_arrays(out: Any) -> tuple[Any, Any]:
    """Find the two arrays of a plan to recompute in place."""
    if isinstance(out, (tuple, list)) and len(out) == 2:
        return out[0], out[1]
    if is_plan_object(out):
        if out.tile_scheduler_metadata is None or out.num_splits is None:
            raise ValueError("out: expected a FlashMLASchedMeta with both arrays or none, got one array")
        return out.tile_scheduler_metadata, out.num_splits
    raise TypeError(
        "out: expected a pair (tile_scheduler_metadata, num_splits) or a FlashMLASchedMeta, "
        f"got {type(out).__name__}"
    )


def batch_invariant_of(plan: FlashMLASchedMeta, asked: bool) -> bool:
    """Whether `plan` has to be batch-invariant, which the decode calls that use it expect."""
    if plan.config is None:
        if asked and not (hasattr(plan, "enable_batch_invariant") or hasattr(plan, "__dict__")):
            raise ValueError(
                f"enable_batch_invariant: expected False with a {type(plan).__name__} as out, which has no "
                "place for it, got True; take a rawmla.FlashMLASchedMeta"
            )
        return asked or getattr(plan, "enable_batch_invariant", False)
    planned = getattr(plan.config, "enable_batch_invariant", False)
    if asked and not planned:
        raise ValueError(
            "enable_batch_invariant: expected False, as in the decode call which filled out, got True"
        )
    return planned


def note_batch_invariant(plan: FlashMLASchedMeta, batch_invariant: bool) -> None:
    """Note in an object that no call has used whether its arrays are batch-invariant.

    Calls size their scratch by it.
    """
    if plan.config is None and getattr(plan, "enable_batch_invariant", False) != batch_invariant:
        plan.enable_batch_invariant = batch_invariant


def check_topk_of(plan: FlashMLASchedMeta, topk: int | None) -> None:
    """Check that a plan recomputed in place covers the blocks of the decode calls that use it."""
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
        raise ValueError(f"topk: expected {planned}, as in the decode call which filled out, got {topk}")
