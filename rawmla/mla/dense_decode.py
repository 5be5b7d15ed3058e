"""Dense decoding: the calls of `flash_mla_with_kvcache` without `indices`.

`decode` is one call from the arrays to the launch. A call that differs from an earlier one in addresses alone
finds its launch in a memo. Other calls are checked and prepared first.
"""

from __future__ import annotations

from typing import Any

from ..call.arguments import Arg, check_arguments, check_places
from ..call.arrays import READERS
from ..call.checks import INT32_MAX, as_softmax_scale, check_groups
from ..call.frameworks import Fields
from ..call.memo import Memo, kind_of
from ..kernels import mla_dense_decode, mla_metadata
from ..kernels.common import D_V, MAX_GRID_YZ, TILE_ROWS
from ..kernels.mla_dense_decode import DenseDecodeCall, largest_dividend
from .arguments import check_q, out_of, prepared_call, q_strides, read_pair, walk
from .plan import (
    GivenPlan,
    PreparedDecode,
    SchedConfig,
    check_config,
    check_plan,
    fields_of,
    make_plan,
    mark_plan,
    read_plan,
)

_TABLE = (
    Arg("k_cache", "=q", "num_blocks page_block_size h_kv d_qk", has_rows=True),
    Arg("block_table", "int32", "b max_blocks", has_rows=True),
    Arg("cache_seqlens", "int32", "b", has_rows=True),
    Arg("out", "=q", f"b s_q h_q {D_V}"),
)

_calls: Memo[PreparedDecode] = Memo(shared=True)


def decode(
    q: Any,
    k_cache: Any,
    block_table: Any,
    cache_seqlens: Any,
    tile_scheduler_metadata: Any,
    num_splits: Any,
    softmax_scale: float | None,
    causal: bool,
    out: Any,
    enable_batch_invariant: bool,
) -> tuple[Any, Any]:
    """Run `flash_mla_with_kvcache` without `indices`; booleans are checked already."""
    rope_view = None
    if q.__class__ is tuple:
        q_view, rope_view = read_pair(q)
    else:
        q_view = READERS[type(q)](q, "q")
    k_view = READERS[type(k_cache)](k_cache, "k_cache")
    table_view = READERS[type(block_table)](block_table, "block_table")
    lengths_view = READERS[type(cache_seqlens)](cache_seqlens, "cache_seqlens")
    plan = read_plan(tile_scheduler_metadata, num_splits, enable_batch_invariant)
    holder, plan_arrays, batch_invariant = plan
    out_view = None if out is None else READERS[type(out)](out, "out")
    if softmax_scale is not None:
        softmax_scale = as_softmax_scale(softmax_scale)
    q_ptr, q_shape, q_steps, dtype, device, framework, q_array = q_view
    k_ptr, k_shape, k_steps, k_dtype, k_device, k_framework, _ = k_view
    table_ptr, table_shape, table_steps, table_dtype, table_device, table_framework, _ = table_view
    lengths_ptr, lengths_shape, lengths_steps, lengths_dtype, lengths_device, lengths_framework, _ = (
        lengths_view
    )
    # Checks depend on all but the addresses, and on the alignment of those that must be aligned. A flat tuple
    # takes less time than one tuple for each array.
    key = (
        softmax_scale, causal, batch_invariant, holder is None,
        q_ptr & 15, q_shape, q_steps, dtype, device, framework,
        k_ptr & 15, k_shape, k_steps, k_dtype, k_device, k_framework,
        table_shape, table_steps, table_dtype, table_device, table_framework,
        lengths_shape, lengths_steps, lengths_dtype, lengths_device, lengths_framework,
        plan_arrays and plan_arrays.kind, rope_view and kind_of(rope_view), out_view and kind_of(out_view),
    )  # fmt: skip
    call = _calls.get(key)
    if call is None or call.mixes_frameworks:
        rows_view, splits_view = plan_arrays.views if plan_arrays else (None, None)
        arrays = {
            "q": q_view,
            "q_rope": rope_view,
            "k_cache": k_view,
            "block_table": table_view,
            "cache_seqlens": lengths_view,
            "tile_scheduler_metadata": rows_view,
            "num_splits": splits_view,
            "out": out_view,
        }
        call = call or _calls.keep(key, _prepare(arrays, plan, softmax_scale, causal))
        check_places(arrays)
    allocate, launch, q_is_copied, rope_bytes, _, num_parts, config, config_fields = call
    if holder is not None and holder.have_initialized:
        check_config(holder.config, config_fields)
    if launch is None:
        *results, lse, _ = allocate()
        return (results[0] if results else out), lse

    if q_is_copied:
        q_array = framework.contiguous_copy(q_array, "q")
        q_ptr = framework.pointer(q_array)
    made = None
    if plan_arrays is None:
        tokens = mla_metadata.TokenCounts(lengths_ptr)
        made = make_plan(q_view, config.b, num_parts, tokens, True, config.enable_batch_invariant)
        rows_ptr, splits_ptr = map(framework.pointer, made)
    else:
        rows_ptr, splits_ptr, _, _ = plan_arrays
    if out_view is None:
        out, lse, scratch = allocate()
        out_ptr = framework.pointer(out)
    else:
        lse, scratch = allocate()
        out_ptr = out_view[0]
    # In the order of DenseDecodeAddresses. To build one would take a hundredth of the call.
    addresses = (
        q_ptr, q_ptr + rope_bytes if rope_view is None else rope_view[0], k_ptr, table_ptr, lengths_ptr,
        rows_ptr, splits_ptr, out_ptr, framework.pointer(lse),
    )  # fmt: skip
    launch(framework.current_stream(device), addresses, 0 if scratch is None else framework.pointer(scratch))
    if holder is not None and (made is not None or not holder.have_initialized):
        mark_plan(holder, config, made)
    return out, lse


def _prepare(
    arrays: dict[str, Any], plan: GivenPlan, softmax_scale: float | None, causal: bool
) -> PreparedDecode:
    """Check a call, load its kernels and work out their parameters."""
    q = arrays["q"]
    _, _, _, dtype, device, framework, _ = q
    sizes = check_q(arrays, "b s_q h_q d_qk", "bfloat16 float16")
    check_arguments(_TABLE, arrays, sizes)
    b, s_q, h_q, h_kv, d_qk = [sizes[dim] for dim in ("b", "s_q", "h_q", "h_kv", "d_qk")]
    page_block_size = sizes["page_block_size"]
    _check_heads(s_q, h_q, h_kv)
    k_strides = _check_pages(arrays["k_cache"])
    strides = q_strides(q, arrays["q_rope"], d_qk)
    max_seqlen = _max_seqlen(sizes["max_blocks"], page_block_size)
    results, steps = out_of(q, arrays["out"])
    results.append(((b, h_q, s_q), "float32"))
    holder, *_, batch_invariant = plan
    config = SchedConfig(b, s_q, h_q, page_block_size, h_kv, causal, enable_batch_invariant=batch_invariant)
    num_parts = check_plan(plan, config, device, framework)
    kernels = None
    if b and s_q:
        kernels = mla_dense_decode.PreparedDenseDecode(
            DenseDecodeCall(
                device=device,
                dtype=dtype,
                b=b,
                s_q=s_q,
                h_q=h_q,
                h_kv=h_kv,
                d_qk=d_qk,
                page_block_size=page_block_size,
                num_blocks=sizes["num_blocks"],
                q_strides=strides.q,
                q_rope_strides=strides.q_rope,
                k_strides=k_strides,
                block_table_stride=arrays["block_table"][2][0],
                max_seqlen=max_seqlen,
                num_parts=num_parts,
                object_layout=holder is not None,
                batch_invariant=batch_invariant,
                out_strides=steps,
                softmax_scale=d_qk**-0.5 if softmax_scale is None else softmax_scale,
                causal=causal and s_q > 1,
            ),
            framework.capture_query(device),
        )
    work = prepared_call(arrays, strides, results, kernels)
    return PreparedDecode(*work, num_parts, config, fields_of(config))


def _check_heads(s_q: int, h_q: int, h_kv: int) -> None:
    """Check how many rows of q a KV head has."""
    check_groups(h_q, h_kv, "q", "k_cache")
    if h_kv > MAX_GRID_YZ:
        raise ValueError(f"k_cache: expected at most {MAX_GRID_YZ} KV heads, got {h_kv}")
    heads = h_q // h_kv
    most_rows = (largest_dividend(heads) + 1) // TILE_ROWS * TILE_ROWS  # the last tile is divided whole
    if s_q * heads > most_rows:
        raise ValueError(
            f"q: expected at most {most_rows} rows of a KV head (s_q * h_q / h_kv) with h_q / h_kv = {heads}"
            f", got {s_q * heads}"
        )


def _check_pages(k_cache: Fields) -> tuple[int, ...]:
    """Check the pages of the cache; returns its strides but the last."""
    _, shape, *_ = k_cache
    num_blocks, page_block_size, _, _ = shape
    if page_block_size & 63 and page_block_size not in (16, 32) or not 0 < page_block_size <= INT32_MAX:
        raise ValueError(
            "k_cache: expected a page_block_size of 16, 32 or a multiple of 64, got "
            f"{page_block_size} in shape {list(shape)}"
        )
    if not num_blocks:
        raise ValueError(f"k_cache: expected at least 1 block, got shape {list(shape)}")
    return walk("k_cache", k_cache)


def _max_seqlen(max_blocks: int, page_block_size: int) -> int:
    """Find the most tokens of a request, which kernels must be able to divide by the size of a page."""
    # A token's page is its number / 16, divided by the size of a page / 16.
    most_tokens = 16 * (largest_dividend(page_block_size // 16) + 1)
    max_seqlen = min(max_blocks * page_block_size, INT32_MAX)
    if max_seqlen > most_tokens:
        raise ValueError(
            f"block_table: expected max_blocks * page_block_size of at most {most_tokens} tokens with a "
            f"page_block_size of {page_block_size}, got {max_blocks} blocks"
        )
    return max_seqlen
