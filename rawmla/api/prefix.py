"""Public function of prefix prefill."""

from __future__ import annotations

from typing import Any

from ..call import tracing
from ..mha import prefix
from ..mha.prefix_arrays import PrefixArrays, PrefixOptions
from .paths import mha_operators

__all__ = ["context_attention_fwd"]


def context_attention_fwd(
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    kv_cache_dtype: str,
    k_cache: Any,
    v_cache: Any,
    b_loc: Any,
    b_start_loc: Any,
    b_seq_len: Any,
    max_seq_len: int | None,
    max_input_len: int,
    k_scale: Any,
    v_scale: Any,
    alibi_slopes: Any = None,
    sliding_window: int | None = None,
    sm_scale: float | None = None,
    skip_decode: bool = False,
    fp8_out_scale: Any = None,
    sinks: Any = None,
    is_block_table_ptr: bool = False,
    interleaved_v_pack_factor: int = 0,
    causal: bool = True,
) -> Any:
    """Compute attention of new tokens over older ones, in a paged cache, and over themselves.

    Request r has query_len rows of q, k, v and o, from `b_start_loc[r]` to `b_start_loc[r + 1] - 1`, and
    `ctx_len = max(b_seq_len[r] - query_len, 0)` older tokens in the cache. Its token at position t is token
    `t % block_size` of page `b_loc[r, t // block_size]` for t < ctx_len, and row `b_start_loc[r] + t -
    ctx_len` of k and v from there on. Query j is at position u = ctx_len + j and sees the tokens with t <= u.
    For every head `S = sm_scale * Q @ K.T`, with ALiBi `S += slope * (t - u)`, and `o = softmax(S) @ V`.
    Products take q's dtype and add up in float32; scores, softmax and sums are float32, and probabilities are
    rounded to q's dtype before the second product.

    Arrays are torch CUDA tensors, CuPy arrays, or DLPack arrays of other libraries in CUDA memory. All are
    on the device of `q`, which need not be the current one. Arrays of two frameworks in one call need the
    same current stream in both. Strides are in elements.

    Parameters
    ----------
    q : array
        bfloat16 or float16 `[tokens, h_q, d]`, d 1 to 256, less than 2**30 tokens.
    k, v : array or None
        `[tokens, h_kv, d]` in q's dtype. Query head h reads KV head `h // (h_q / h_kv)`, and h_q is a
        multiple of h_kv. Both None: the new tokens are read from the cache too, at their positions; tokens
        from b_seq_len on do not exist.
        q, k and v are read in place if their last dimension is contiguous, their address a multiple of
        16 bytes, and every other stride 0 (a broadcast dimension) or a positive multiple of 8. Any other one
        is copied once, on the same stream.
    o : array
        `[tokens, h_q, d]`, written and returned: of q's dtype, or with `fp8_out_scale` float8_e4m3fn, uint8
        or int8. Any strides but the last, which is contiguous, no element twice; never copied. It must not
        overlap an input. Rows of no request are not written.
    kv_cache_dtype : str
        "auto", "float16" or "bfloat16": the caches are of q's dtype. "fp8", "fp8_e4m3": they are
        float8_e4m3fn, uint8 or int8. "fp8_e5m2": float8_e5m2, uint8 or int8.
    k_cache : array
        `[num_blocks, h_kv, d / x, block_size, x]`, x any divisor of d, block_size any.
    v_cache : array
        `[num_blocks, h_kv, d, block_size]`.
        Caches are never copied: 16-byte aligned, contiguous within a block and head; the strides of blocks
        and heads are multiples of 16 bytes and not negative.
    b_loc : array
        int32 or int64 `[b, max_blocks]`, last dimension contiguous: the pages of a request. Entries from
        `b_seq_len / block_size` (rounded up) on are not read, nor are entries for pages that no query sees.
        An entry that names no page of the cache stands for a page of zeros.
    b_start_loc : array
        int32 `[b + 1]`, contiguous, not decreasing. Requests may have no row. Rows before the first of q, or
        past its last, do not exist.
    b_seq_len : array
        int32 `[b]`, contiguous: tokens of a request, new ones included. A value below query_len counts as
        query_len, and the cache has no more tokens of a request than `b_loc` has pages for.
    max_seq_len : int or None
        Changes nothing.
    max_input_len : int
        At least the query_len of every request. Results of longer requests are undefined.
    k_scale, v_scale : float or array
        For FP8 caches: a value is the float8 number times this, a positive number or a float32 array of one
        element (shape `[]` or `[1]`), which the host does not read. Ignored with other caches.
    alibi_slopes : array, optional
        float32 `[h_q]`, contiguous. Needs `causal`.
    sliding_window : int, optional
        W > 0: a query sees the tokens with u - t < W only. None, 0 or less is off. Pages that no query of a
        tile sees are not read.
    sm_scale : float, optional
        Finite and positive; None is `d**-0.5`.
    skip_decode : bool
        The rows of requests with one query are not written.
    fp8_out_scale : float or array, optional
        As `k_scale`: o gets the e4m3 numbers nearest to result / scale, ties to even, at most 448.
    sinks : array, optional
        float32, bfloat16, float16 or float64 `[h_q]`, contiguous, natural logarithm: one more term exp(sink)
        in the sum of softmax. -inf has no effect, +inf makes o 0.
    is_block_table_ptr : bool
        Entries of `b_loc`, then int64, that are above 0 are addresses of blocks of k_cache; V is read from
        the block with the same number. Other entries are numbers of blocks.
    interleaved_v_pack_factor : int
        y > 0, a divisor of block_size: the memory of a block and head of v_cache is `[block_size / y, d, y]`;
        its shape and strides stay as above. 0: `[d, block_size]`.
    causal : bool
        False: a query sees all new tokens of its request.

    Returns
    -------
    array
        `o`. 0 in a row with nothing to attend.

    Raises
    ------
    TypeError, ValueError
        An argument is of the wrong kind or dtype (an array where a number is expected among them, because
        reading it would wait for the GPU); a shape, stride, range or combination is not allowed; a tensor
        requires grad while grad is enabled. Raised before anything is allocated or launched.
    RawMLAError
        A subclass says what is missing: GPU, driver, NVRTC, a compiled kernel inside a graph capture.

    Notes
    -----
    Allocates the copies that are named above, each with the framework of its array, and scratch with q's:
    16 bytes, which are cleared, or, where keys are split over multiprocessors because queries are few,
    4 * splits * h_q * tokens * (d, rounded up to 32, + 1) bytes, at most 32 MiB. Enqueues the copies, the
    clearing and one kernel, or two with splits, on its current stream. Never synchronises, never reads a
    length, a table or a scale on the host. Nothing is launched without requests or query tokens. There is no
    backward.

    Inside a CUDA-graph capture the call allocates from the capture's pool (torch) and never compiles: a
    kernel that neither `rawmla.warmup(prefix_head_dims=[...])` nor `rawmla.warmup_call` has loaded is a
    `KernelNotReadyError`. Replays follow lengths, tables and scales that changed in place. CuPy has no graph
    pools: pass arrays that need no copy; scratch of a captured call is never freed.

    The operation is the function of this name in vLLM (github.com/vllm-project/vllm), with any combination of
    its options, and o as its result.

    Examples
    --------
    >>> rawmla.context_attention_fwd(
    ...     q, k, v, o, "auto", k_cache, v_cache, block_table, start_loc, seq_lens, None, 2048, 1.0, 1.0
    ... )
    """
    arrays = PrefixArrays(
        q, k, v, o, k_cache, v_cache, b_loc, b_start_loc, b_seq_len, k_scale, v_scale, alibi_slopes, sinks,
        fp8_out_scale,
    )  # fmt: skip
    options = PrefixOptions(
        kv_cache_dtype, max_seq_len, max_input_len, sliding_window, sm_scale, skip_decode,
        is_block_table_ptr, interleaved_v_pack_factor, causal,
    )  # fmt: skip
    path = mha_operators() if tracing.is_traced(q) else prefix
    return path.prefill(arrays, options)
