"""Public function of attention over a cache of keys and values."""

from __future__ import annotations

from typing import Any

from ..call import tracing
from ..mha import kvcache
from ..mha.arguments import NO_WINDOW
from ..mha.kvcache import CacheArrays
from ..mha.records import Window
from .paths import mha_operators

__all__ = ["flash_attn_with_kvcache"]


def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    *,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    block_table: Any = None,
    cu_seqlens_q: Any = None,
    max_seqlen_q: int | None = None,
    cu_seqlens_k: Any = None,
    cu_seqlens_k_new: Any = None,
    rotary_seqlens: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = NO_WINDOW,
    softcap: float = 0.0,
    attention_chunk: int = 0,
    rotary_interleaved: bool = True,
    alibi_slopes: Any = None,
    attn_sink: Any = None,
    num_splits: int = 0,
    out: Any = None,
) -> tuple[Any, Any]:
    """Compute attention of a few query tokens over a cache, and append new tokens to the cache before.

    Request r has `cache_seqlens[r]` tokens in the cache, and its new tokens of `k` and `v` are written after
    them. For every head `S = softmax_scale * Q @ K.T` over all of them; with a softcap
    `S = softcap * tanh(S / softcap)`; with ALiBi `S[i, j] -= slope * abs(i + s_k - s_q - j)`, where s_k is
    the number of all keys and s_q of query tokens. Keys that a mask hides are left out; then
    `lse = log(sum(exp(S)))` and `out = exp(S - lse) @ V`. Products take the dtype of the inputs and add up in
    float32; scores, softmax and sums are float32, and probabilities are rounded to the dtype of the inputs
    before the second product.

    Arrays are torch CUDA tensors, CuPy arrays, or DLPack arrays of other libraries in CUDA memory (taken over
    by CuPy, which then also holds the results). All are on the device of `q`, which need not be the current
    one. Arrays of two frameworks in one call need the same current stream in both. Strides are in elements.

    Parameters
    ----------
    q : array
        bfloat16 or float16 `[b, s_q, h_q, d_qk]`, or `[total_q, h_q, d_qk]` with `cu_seqlens_q`, and with
        FP8 caches also float8_e4m3fn. d_qk is a multiple of 8 up to 256, with FP8 caches of 16. Less than
        2**30 tokens; s_q or total_q times h_q / h_kv is less than 2**30, too.
    k_cache : array
        `[b_cache, s_cache, h_kv, d_qk]` in q's dtype or float8_e4m3fn, or `[num_blocks, block_size, h_kv,
        d_qk]` with `block_table`, any block_size. Query head h reads KV head `h // (h_q / h_kv)`, and h_q is
        a multiple of h_kv. s_cache or block_size is less than 2**30.
    v_cache : array
        The same of d_v columns, a multiple of 8 up to 256.
        Caches are never copied: 16-byte aligned, last dimension contiguous, other strides multiples of 16
        bytes and not negative, with `k` positive.
    k, v : array, optional
        New tokens, `[b, s_new, h_kv, d_qk]` and `[b, s_new, h_kv, d_v]`, or with `cu_seqlens_k_new`
        `[total_new, h_kv, d_qk]` and `[total_new, h_kv, d_v]`, in the dtype of the caches. Token t of request
        r is written to position `cache_seqlens[r] + t` of the caches. s_new may differ from s_q.
        q, k and v are read in place if their last dimension is contiguous, their address a multiple of
        16 bytes, and every other stride 0 or a positive multiple of 8. Any other one is copied once, on the
        same stream. FP8 ones are never copied: their strides are 0 or multiples of 16, else `ValueError`.
    rotary_cos, rotary_sin : array, optional
        `[rows, rotary_dim / 2]` in q's dtype, rotary_dim a multiple of 16 up to d_qk. The first rotary_dim
        columns of k and q are rotated: k, before it is stored, at positions from `cache_seqlens[r]` on; q at
        the same positions where `causal` or a window hides keys, else all at the first. Products are
        float32, rounded to q's dtype. Only with k, and not with FP8 caches. A position past the last row
        counts as the last.
    cache_seqlens : int or array, optional
        int32 `[b]`, contiguous, or one number: tokens of each request in the cache. None: all s_cache, with
        a `block_table` columns * block_size. Where it and the new tokens come to 0 or less, out is 0 and
        nothing is read.
    cache_batch_idx : array, optional
        int32 `[b]`, contiguous: the row of the caches, or of `block_table`, that a request has.
    cache_leftpad : array, optional
        int32 `[b]`, contiguous: the first position of a request that exists.
    block_table : array, optional
        int32 `[b, columns]`, last dimension contiguous: position p of request r is token `p % block_size` of
        block `block_table[r, p // block_size]`. An entry that names no block stands for zeros, and
        makes results undefined where new tokens would be in it; positions past the last column do not exist.
    cu_seqlens_q : array, optional
        int32 `[b + 1]`, contiguous, not decreasing: request r has the tokens `cu_seqlens_q[r]` to
        `cu_seqlens_q[r + 1] - 1` of q. Tokens before the first of q, or past its last, do not exist.
    max_seqlen_q : int, optional
        At least the number of query tokens of every request, with `cu_seqlens_q`; None: total_q. If a request
        has more, its results are undefined.
    cu_seqlens_k : array, optional
        int32 `[b + 1]`, contiguous: its differences in place of `cache_seqlens`.
    cu_seqlens_k_new : array, optional
        int32 `[b + 1]`, contiguous, as `cu_seqlens_q`, of k and v. Not looked at without k.
    rotary_seqlens : array, optional
        int32 `[b]`, contiguous: the first position for the rotation, in place of `cache_seqlens`.
    q_descale, k_descale, v_descale : array, optional
        float32 `[b, h_kv]`, any strides: FP8 numbers of q, k and v stand for themselves times these; None is
        1. Not looked at where q, or the caches, are not FP8.
    softmax_scale : float, optional
        Finite and positive; None is `d_qk**-0.5`.
    causal : bool
        Hide keys to the right of the diagonal, as `window_size` with 0 on the right. The diagonal ends in the
        last query and the last key.
    window_size : pair of int or None
        Query i sees the keys from `i + s_k - s_q - left` to `i + s_k - s_q + right`; -1 or None is no bound.
        Blocks of keys that no query of a request sees are not read.
    softcap : float
        0 for none, or finite and positive.
    attention_chunk : int
        0.
    rotary_interleaved : bool
        Pairs of columns that are rotated together: 2i and 2i + 1, or i and i + rotary_dim / 2.
    alibi_slopes : array, optional
        float32 `[h_q]` or `[b, h_q]`, last dimension contiguous.
    attn_sink : array, optional
        float32, bfloat16, float16 or float64 `[h_q]`, contiguous, natural logarithm: one more term exp(sink)
        in the sum, so that `out` is multiplied by `exp(lse) / (exp(lse) + exp(sink))`; `lse` does not change.
    num_splits : int
        1: a multiprocessor attends all keys of a head, so that a row has the same bits in any batch. Any
        other number of at least 0: the work is shared equally among multiprocessors.
    out : array, optional
        `[b, s_q, h_q, d_v]` or `[total_q, h_q, d_v]` in q's dtype, written and returned. Never copied:
        16-byte aligned, last dimension contiguous, other strides positive multiples of 8, no element twice.
        It must not overlap an input.

    Returns
    -------
    out : array
        `[b, s_q, h_q, d_v]` or `[total_q, h_q, d_v]` in q's dtype, bfloat16 for an FP8 q, in the framework of
        `q`. A fresh one has its dimensions in the order of strides of `q`. 0 in a row with nothing to attend.
        Rows of no request are not written.
    lse : array
        float32 `[b, h_q, s_q]`, or `[total_q, h_q]`, the transpose of a contiguous `[h_q, total_q]`: natural
        logarithm of the sum of exponentials of the scores that no mask hides, without the sink; -inf in a row
        with nothing to attend.

    Raises
    ------
    TypeError, ValueError
        An argument is of the wrong kind or dtype; a shape, stride, range or combination is not allowed; a
        tensor requires grad while grad is enabled. Raised before anything is allocated or launched.
    RawMLAError
        A subclass says what is missing: GPU, driver, NVRTC, a compiled kernel inside a graph capture.

    Notes
    -----
    Allocates the copies that are named above, the results, and scratch of at most multiprocessors *
    (128 * (d_v, rounded up to 64, + 2) + 5) * 4 bytes, twice as much with more than 64 query rows (tokens
    times h_q / h_kv) of a request, with the framework of `q`. Enqueues the copies and two kernels, or one
    with num_splits 1, up to four with more than 64 query rows, on its current stream. Never synchronises,
    never reads a length or a table on the host. Nothing is launched without requests, or without query and
    new tokens. There is no backward.

    Inside a CUDA-graph capture the call allocates from the capture's pool (torch) and never compiles: a
    kernel that neither `rawmla.warmup("kvcache", ...)` nor `rawmla.warmup_call` has loaded is a
    `KernelNotReadyError`. Replays follow lengths and tables that changed in place.

    The operation is FlashAttention's function of this name (github.com/Dao-AILab/flash-attention).

    Examples
    --------
    >>> out, lse = rawmla.flash_attn_with_kvcache(
    ...     q, k_cache, v_cache, k, v, cache_seqlens=lengths, block_table=table, causal=True
    ... )
    """
    path = mha_operators() if tracing.is_traced(q) else kvcache
    if k is None:
        cu_seqlens_k_new = None
    options = path.cache_options_of(
        max_seqlen_q, softmax_scale, causal, window_size, softcap, attention_chunk, rotary_interleaved,
        num_splits,
    )  # fmt: skip
    arrays = (
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cu_seqlens_q, cache_seqlens, cu_seqlens_k,
        cu_seqlens_k_new, cache_leftpad, cache_batch_idx, block_table, rotary_seqlens, attn_sink,
        alibi_slopes, q_descale, k_descale, v_descale, out,
    )  # fmt: skip
    # A call of the class would take twice as long.
    return path.attend_cache(tuple.__new__(CacheArrays, arrays), options)
