"""Operations around attention: on paged caches, on indices into them, and on partial results.

Four layouts of a cache `[num_blocks, page_block_size, 1, columns]` are known by dtype and last dimension;
RoPE is the last 64 of a row's d_qk columns and stays bfloat16:

- "v32" (DeepSeek-V3.2), bytes, 656: 512 e4m3 values, 4 float32 scales (one per 128 values), 64 bfloat16.
- "model1" (DeepSeek-V4), bytes, 584, split within a block: first `page_block_size` times 448 e4m3 values
  and 64 bfloat16, then `page_block_size` times 7 e8m0 scales (one per 64 values) and a zero byte.
- bfloat16, 576 or 512.

Bytes are uint8, int8 or float8_e4m3fn arrays. The formats are FlashMLA's (github.com/deepseek-ai/FlashMLA).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..call import tracing
from ..call.checks import as_bool
from ..mla.cache import dequantize, gather, quantize, write
from ..mla.indices import convert
from ..mla.merge import merge
from .paths import mla_operators

__all__ = [
    "convert_indices",
    "dequantize_k_cache",
    "gather_kv_cache",
    "merge_attn_states",
    "quantize_k_cache",
    "write_kv_cache",
]


def quantize_k_cache(k_cache: Any, layout: str, *, out: Any = None) -> Any:
    """Quantise a whole bfloat16 cache.

    The scale of a tile is amax / 448 in float32, at least 2**-126 ("v32"), or the least power of two that
    is not below max(amax, 1e-4) / 448 ("model1"); amax is the tile's largest magnitude, NaN aside. A value
    becomes the e4m3 number nearest to value / scale, ties to even, saturating. NaN stays NaN; an infinity
    makes its tile NaN in "v32" and stays infinite in "model1".

    Parameters
    ----------
    k_cache : array
        bfloat16 `[num_blocks, page_block_size, 1, d_qk]`, d_qk 576 ("v32") or 512 ("model1"), last dimension
        contiguous, other strides free (below 2**31 elements), any alignment.
    layout : str
        "v32" or "model1".
    out : array, optional
        The cache to write: bytes `[num_blocks, page_block_size, 1, 656 or 584]`, tokens contiguous within a
        block, blocks any distance below 2 GiB apart. Address and block stride are multiples of 16 bytes
        ("v32") or 8 ("model1"). Bytes between blocks are left alone.

    Returns
    -------
    array
        `out`, or a new uint8 array of that shape in the framework of `k_cache`. Blocks of a new "model1"
        cache begin at multiples of 576 bytes, so it may be a strided view.

    Raises
    ------
    TypeError, ValueError
        An argument is of the wrong kind, dtype, shape, stride or device; raised before anything is launched.
    RawMLAError
        A subclass says what is missing: GPU, driver, NVRTC, a compiled kernel inside a graph capture.

    Notes
    -----
    Enqueues one kernel on the current stream of the framework of `k_cache`; never synchronises; legal inside
    a CUDA-graph capture once `rawmla.warmup(sparse_formats=[layout])` has loaded the kernel.
    `rawmla.reference.quantize_k_cache` gives the same bytes.
    """
    run = mla_operators().quantize if tracing.is_traced(k_cache) else quantize
    return run(k_cache, layout, out)


def dequantize_k_cache(cache: Any, layout: str) -> Any:
    """Dequantise a whole cache to bfloat16.

    Parameters
    ----------
    cache : array
        Bytes `[num_blocks, page_block_size, 1, 656 or 584]`, strides and alignment as for `out` of
        `quantize_k_cache`.
    layout : str
        "v32" or "model1".

    Returns
    -------
    array
        bfloat16 `[num_blocks, page_block_size, 1, d_qk]`, contiguous, in the framework of `cache`: e4m3 *
        scale in float32, rounded to bfloat16, and the RoPE columns as they are.

    Raises
    ------
    TypeError, ValueError, RawMLAError
        As for `quantize_k_cache`; MissingDependencyError if the result would be a CuPy array and ml_dtypes,
        which has the dtype, is not installed.

    Notes
    -----
    Allocation, stream and graph capture as for `quantize_k_cache`.
    """
    run = mla_operators().dequantize if tracing.is_traced(cache) else dequantize
    return run(cache, layout)


def write_kv_cache(kv_c: Any, k_pe: Any, kv_cache: Any, slot_mapping: Any) -> None:
    """Write new tokens into a paged cache, quantised if its layout is: the bytes of `quantize_k_cache`.

    Parameters
    ----------
    kv_c : array
        bfloat16 `[T, 512]` for caches of "v32" or 576 columns, `[T, 448]` for "model1" or 512 columns: the
        columns before RoPE. Last dimension contiguous, row stride free (below 2**31 elements), any
        alignment; rows of 16 bytes' alignment are read faster.
    k_pe : array
        bfloat16 `[T, 64]`, the RoPE columns; strides as for `kv_c`.
    kv_cache : array
        Written in place; the layout is inferred from dtype and last dimension. Bytes `[num_blocks,
        page_block_size, 1, 656 or 584]` with strides and alignment as for `out` of `quantize_k_cache`, or
        bfloat16 `[num_blocks, page_block_size, 1, 576 or 512]` with a 16-byte aligned address and strides
        that are multiples of 8 elements, below 2 GiB. Blocks may be padded; only the named tokens' bytes
        change.
    slot_mapping : array
        int32 or int64 `[T]`, contiguous: block * page_block_size + offset in the block. A token whose slot is
        negative or past the cache is skipped. Which of two tokens with one slot stays is undefined.

    Raises
    ------
    TypeError, ValueError
        An argument is of the wrong kind, dtype, shape, stride or device; raised before anything is launched.
    RawMLAError
        A subclass says what is missing: GPU, driver, NVRTC, a compiled kernel inside a graph capture.

    Notes
    -----
    Allocates nothing; enqueues one kernel on the current stream of the framework of `kv_cache`; never
    synchronises; legal inside a CUDA-graph capture once `rawmla.warmup(sparse_formats=[...])` has loaded the
    kernel ("v32", "model1" or "bf16").

    Examples
    --------
    >>> cache = rawmla.quantize_k_cache(k_cache, "v32")
    >>> rawmla.write_kv_cache(kv_c, k_pe, cache, slot_mapping)
    """
    run = mla_operators().write if tracing.is_traced(kv_c) else write
    run(kv_c, k_pe, kv_cache, slot_mapping)


def gather_kv_cache(
    kv_cache: Any,
    block_table: Any,
    cache_seqlens: Any,
    out: Any,
    *,
    workspace_starts: Any,
    seq_starts: Any = None,
) -> None:
    """Copy requests' tokens from a paged cache into consecutive rows of a bfloat16 workspace, dequantised.

    Token t of request i, for t from `seq_starts[i]` to `cache_seqlens[i] - 1`, goes to row
    `workspace_starts[i] + t - seq_starts[i]`. A quantised value is e4m3 * scale in float32, rounded to
    bfloat16.

    Parameters
    ----------
    kv_cache : array
        A cache of any of the layouts, as for `write_kv_cache`.
    block_table : array
        int32 `[b, max_blocks]`, last dimension contiguous, row stride free: page ids of each request, in
        order. Entries past the needed length are not read. A token whose page is not in the table, or not
        in the cache, becomes a row of zeros.
    cache_seqlens : array
        int32 `[b]`, contiguous: tokens per request, 0 and up.
    out : array
        bfloat16 `[rows, d_qk]`, 16-byte aligned, last dimension contiguous, row stride a multiple of 8 and
        at least d_qk. Rows that no token goes to are left alone, and tokens that would go outside are
        dropped.
    workspace_starts : array
        int32 `[b]`, contiguous: the row of each request's first token, in any order. Where two tokens meet,
        which stays is undefined.
    seq_starts : array, optional
        int32 `[b]`, contiguous: the first token of each request to copy. None: 0.

    Raises
    ------
    TypeError, ValueError
        An argument is of the wrong kind, dtype, shape, stride or device; raised before anything is launched.
    RawMLAError
        A subclass says what is missing: GPU, driver, NVRTC, a compiled kernel inside a graph capture.

    Notes
    -----
    Allocates nothing; enqueues one kernel on the current stream of the framework of `kv_cache`; never
    synchronises, and the host never looks at lengths, so replays of a captured graph follow them. Graph
    capture as for `write_kv_cache`.
    """
    run = mla_operators().gather if tracing.is_traced(kv_cache) else gather
    run(kv_cache, block_table, cache_seqlens, out, workspace_starts, seq_starts)


def convert_indices(
    indices: Any,
    block_table: Any,
    page_block_size: int,
    *,
    request_ids: Any = None,
    compact: bool = False,
    out: Any = None,
) -> Any:
    """Convert token positions within requests to slots in a paged cache, the `indices` of sparse decoding.

    The slot of a position is `block_table[request, position // page_block_size] * page_block_size +
    position % page_block_size`. It is -1 where the position is negative, its page is not in the table or
    negative there, the slot is above the largest int32, or there is no such request.

    Parameters
    ----------
    indices : array
        int32 `[T, topk]` or `[b, s_q, topk]`, token positions. Last dimension contiguous, other strides
        free, so rows may be longer than topk.
    block_table : array
        int32 `[num_requests, max_blocks]`, last dimension contiguous, row stride free: page ids of each
        request.
    page_block_size : int
        Tokens per page, 1 and up.
    request_ids : array, optional
        int32, contiguous, of the length of `indices`: the request that `indices[i]` belongs to. None:
        request i.
    compact : bool
        Move the valid slots of a row to its front, in their order, -1 after them, and return their number.
    out : array, optional
        int32 of the shape of `indices`, last dimension contiguous, rows that do not overlap. May be
        `indices`.

    Returns
    -------
    slots : array
        `out`, or a new contiguous int32 array of the shape of `indices` in its framework.
    counts : array
        With `compact` only: int32 `[T]` or `[b, s_q]`, valid slots per row. For `[T, topk]`, and for s_q 1,
        this is the `topk_length` of sparse attention.

    Raises
    ------
    TypeError, ValueError
        An argument is of the wrong kind, dtype, shape, stride or device; raised before anything is launched.
    RawMLAError
        A subclass says what is missing: GPU, driver, NVRTC, a compiled kernel inside a graph capture.

    Notes
    -----
    Allocates the results with the framework of `indices` and enqueues one kernel on its current stream; never
    synchronises; legal inside a CUDA-graph capture once `rawmla.warmup(sparse_formats=[...])` has loaded the
    kernel. Positions past a request's length give slots of any page that its table has there.
    """
    run = mla_operators().convert if tracing.is_traced(indices) else convert
    return run(indices, block_table, page_block_size, request_ids, as_bool("compact", compact), out)


def merge_attn_states(outs: Sequence[Any], lses: Sequence[Any], *, out: Any = None) -> tuple[Any, Any]:
    """Merge partial attention results, each over a part of the keys, into the result over all keys.

    `out = sum_i exp(lse_i) * out_i / sum_i exp(lse_i)` and `lse = ln(sum_i exp(lse_i))`, in float32.

    Parameters
    ----------
    outs : sequence of arrays
        One for each part, all bfloat16, float16 or float32, of one shape: `[b, s_q, h_q, 512]` (what
        `flash_mla_with_kvcache` returns) or `[s_q, h_q, 512]`. Last dimension contiguous, addresses and other
        strides multiples of 16 bytes.
    lses : sequence of arrays
        float32, natural logarithm, as many as `outs`: `[b, h_q, s_q]` each (what `flash_mla_with_kvcache`
        returns), or `[s_q, h_q]` with outs of three dimensions (what `flash_mla_sparse_fwd` returns with
        `log_base="e"`). Any strides. +inf or -inf marks a row without keys: its out is ignored, NaN or not.
    out : array, optional
        An array with the shape and dtype of `outs`, strides under the same rules, and no element twice. It is
        written and returned, and may be one of `outs`.

    Returns
    -------
    out : array
        In the shape and dtype of `outs`, contiguous unless given, in the framework of the first of them. 0
        in a row without keys.
    lse : array
        float32 in the shape of `lses`, contiguous; +inf in a row without keys.

    Raises
    ------
    TypeError, ValueError
        An argument is of the wrong kind, dtype, shape, stride or device; raised before anything is launched.
    RawMLAError
        A subclass says what is missing: GPU, driver, NVRTC, a compiled kernel inside a graph capture.

    Notes
    -----
    Any number of parts: up to 32 take one kernel; more are merged 32 at a time into float32 scratch, and the
    results again. Allocates the results and that scratch with the framework of the first array, enqueues on
    its current stream, never synchronises; legal inside a CUDA-graph capture once
    `rawmla.warmup(dtypes=[...])` has loaded the kernels. Sums are in the order of the parts: the same call
    gives the same bits.
    """
    run = mla_operators().merge if tracing.is_traced(outs) else merge
    return run(outs, lses, out)
