"""Public functions of dense attention."""

from __future__ import annotations

from typing import Any

from ..mha.arguments import NO_WINDOW, either
from ..mha.records import Packing, Window
from .paths import dense_path

__all__ = [
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
]


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    deterministic: bool = False,
    is_varlen: bool = True,
    *,
    window_size: Window = NO_WINDOW,
    softcap: float = 0.0,
    attn_sink: Any = None,
    alibi_slopes: Any = None,
    attention_chunk: int = 0,
    seqused_q: Any = None,
    seqused_k: Any = None,
    out: Any = None,
    cu_seqlens_qo: Any = None,
    cu_seqlens_kv: Any = None,
    max_seqlen_qo: int | None = None,
    max_seqlen_kv: int | None = None,
    learnable_sink: Any = None,
) -> tuple[Any, Any]:
    """Compute attention of requests of different lengths, which are segments of one array.

    For every request with `s_q` query tokens and `s_k` keys, and for every head:
    `S = softmax_scale * Q @ K.T`; with a softcap `S = softcap * tanh(S / softcap)`; with ALiBi
    `S[i, j] -= slope * abs(i + s_k - s_q - j)`. Keys that a mask hides are left out; then
    `lse = log(sum(exp(S)))` and `out = exp(S - lse) @ V`. Products take the dtype of the inputs and add up in
    float32; scores, softmax and sums are float32, and probabilities are rounded to the dtype of the inputs
    before the second product.

    Arrays are torch CUDA tensors, CuPy arrays, or DLPack arrays of other libraries in CUDA memory (taken over
    by CuPy, which then also holds the results). All are on the device of `q`, which need not be the current
    one. Arrays of two frameworks in one call need the same current stream in both. Strides are in elements.

    Parameters
    ----------
    q : array
        bfloat16 or float16 `[total_q, h_q, d_qk]`, d_qk 1 to 256, less than 2**30 tokens.
    k : array
        `[total_k, h_kv, d_qk]` in q's dtype. Query head h reads KV head `h // (h_q / h_kv)`, and h_q is a
        multiple of h_kv.
    v : array
        `[total_k, h_kv, d_v]` in q's dtype, d_v 1 to 256.
        q, k and v are read in place if their last dimension is contiguous, their address a multiple of
        16 bytes, and every other stride 0 (a broadcast dimension) or a positive multiple of 8: in any order,
        so that transposed arrays and slices are fine. Any other one is copied once, on the same stream.
    cu_seqlens_q, cu_seqlens_k : array
        int32 `[b + 1]`, contiguous, not decreasing: request r has the tokens `cu_seqlens_q[r]` to
        `cu_seqlens_q[r + 1] - 1` of q, and the tokens of k and v that `cu_seqlens_k` gives likewise. Lengths
        may be 0. Tokens before the first of an array, or past its last, do not exist. `cu_seqlens_qo` and
        `cu_seqlens_kv` are other names of the two.
    max_seqlen_q, max_seqlen_k : int
        At least the length of every request in q, and in k. If one is longer, all results are undefined, but
        nothing outside of the arrays is read or written.
        `max_seqlen_qo` and `max_seqlen_kv` are other names of them.
    dropout_p : float
        0.
    softmax_scale : float, optional
        Finite and positive; None is `d_qk**-0.5`.
    causal : bool
        Hide keys to the right of the diagonal, as `window_size` with 0 on the right. The diagonal ends in the
        last query and the last key: query i is at key `i + s_k - s_q`.
    deterministic : bool
        Whether dq, too, always has the same bits, as in `flash_attn_varlen_backward`. out, lse, dk, dv and
        dsink of the same call always have them.
    is_varlen : bool
        False promises that every request has `max_seqlen_q` and `max_seqlen_k` tokens, and saves looking for
        them. Results of a call that breaks the promise are undefined, but nothing outside of the arrays is
        read or written.
    window_size : pair of int or None
        Query i sees the keys from `i + s_k - s_q - left` to `i + s_k - s_q + right`; -1 or None is no bound.
        Keys that no query of a tile sees are not read.
    softcap : float
        0 for none, or finite and positive.
    attn_sink : array, optional
        float32, bfloat16, float16 or float64 `[h_q]`, contiguous, natural logarithm: one more term exp(sink)
        in the sum, so that `out` is multiplied by `exp(lse) / (exp(lse) + exp(sink))`; `lse` does not change.
        -inf has no effect, +inf makes `out` 0. `learnable_sink` is another name of it.
    alibi_slopes : array, optional
        float32 `[h_q]` or `[b, h_q]`, last dimension contiguous.
    attention_chunk : int
        0.
    seqused_q, seqused_k : array, optional
        int32 `[b]`, contiguous: the number of tokens of a request that exist. The diagonal ends in the last
        of them. Numbers below 0 and above the request's length count as these. Query tokens after them get
        `out` 0 and `lse` -inf.
    out : array, optional
        `[total_q, h_q, d_v]` in q's dtype, written and returned. Never copied: 16-byte aligned, last
        dimension contiguous, other strides positive multiples of 8 (a slice of a larger buffer is fine), no
        element twice. It must not overlap an input. None where a gradient is needed.

    Returns
    -------
    out : array
        `[total_q, h_q, d_v]` in q's dtype, in the framework of `q`. A fresh one has its dimensions in the
        order of strides of `q` and a contiguous last dimension; where d_v is no multiple of 8, its rows are
        padded to one. 0 in a row with nothing to attend. Rows of no request are not written.
    lse : array
        float32 `[total_q, h_q]`, the transpose of a contiguous `[h_q, total_q]`: natural logarithm of the sum
        of exponentials of the scores that no mask hides, without the sink; -inf in a row with nothing to
        attend.

    Raises
    ------
    TypeError, ValueError
        An argument is of the wrong kind or dtype (an array where a number is expected among them, because
        reading it would wait for the GPU), or given under both of its names; a shape, stride, range or
        combination is not allowed. Raised before anything is allocated or launched.
    RawMLAError
        A subclass says what is missing: GPU, driver, NVRTC, a compiled kernel inside a graph capture.

    Notes
    -----
    Allocates the copies that are named above, each with the framework of its array, and the results and
    scratch with the framework of `q`. Scratch is none, or 16 bytes, which are cleared, or, where keys are
    split over multiprocessors because queries are few, 4 * splits * h_q * total_q * (d_v, rounded up to 32,
    + 1) bytes, at most 32 MiB. Enqueues the copies, the clearing and one kernel, or two with splits, on its
    current stream. Never synchronises, never reads a length on the host. Nothing is launched without
    requests or query tokens.

    Where grad is enabled and q, k, v or attn_sink is a torch tensor that requires grad, both results have a
    graph. `flash_attn_varlen_backward` computes the gradients, through out, lse or both, and documents their
    cost. Inputs and results are saved for it; a packed array gets its gradient as one array. ALiBi's slopes
    have no gradient, and there is no second derivative.

    Inside a CUDA-graph capture the call allocates from the capture's pool (torch) and never compiles: a
    kernel that neither `rawmla.warmup(mha_head_dims=[...])` nor `rawmla.warmup_call` has loaded is a
    `KernelNotReadyError`. Replays follow lengths that changed in place. CuPy has no graph pools: keep the
    results alive for as long as the graph is, and pass arrays that need no copy.

    The operation is FlashMLA's (github.com/deepseek-ai/FlashMLA), which has it for SM100, with the
    masks, softcap and slopes of FlashAttention (github.com/Dao-AILab/flash-attention).

    Examples
    --------
    >>> out, lse = rawmla.flash_attn_varlen_func(
    ...     q, k, v, cu_seqlens_q, cu_seqlens_k, 4096, 4096, causal=True
    ... )
    """
    if cu_seqlens_qo is not None:
        cu_seqlens_q = either("cu_seqlens_q", cu_seqlens_q, "cu_seqlens_qo", cu_seqlens_qo)
    if cu_seqlens_kv is not None:
        cu_seqlens_k = either("cu_seqlens_k", cu_seqlens_k, "cu_seqlens_kv", cu_seqlens_kv)
    if max_seqlen_qo is not None:
        max_seqlen_q = either("max_seqlen_q", max_seqlen_q, "max_seqlen_qo", max_seqlen_qo)
    if max_seqlen_kv is not None:
        max_seqlen_k = either("max_seqlen_k", max_seqlen_k, "max_seqlen_kv", max_seqlen_kv)
    if learnable_sink is not None:
        attn_sink = either("attn_sink", attn_sink, "learnable_sink", learnable_sink)
    path = dense_path(q, k, v, attn_sink)
    options = path.options_of(
        dropout_p, softmax_scale, causal, deterministic, is_varlen, window_size, softcap, attention_chunk,
        (max_seqlen_q, max_seqlen_k),
    )  # fmt: skip
    arrays = (q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, attn_sink, alibi_slopes, out)
    return path.attend(arrays, options)


def flash_attn_varlen_qkvpacked_func(
    qkv: Any,
    cu_seqlens: Any,
    max_seqlen: int,
    head_dim_qk: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    deterministic: bool = False,
    is_varlen: bool = True,
    *,
    window_size: Window = NO_WINDOW,
    softcap: float = 0.0,
    attn_sink: Any = None,
    alibi_slopes: Any = None,
    attention_chunk: int = 0,
    seqused_q: Any = None,
    seqused_k: Any = None,
    out: Any = None,
    learnable_sink: Any = None,
) -> tuple[Any, Any]:
    """Call `rawmla.flash_attn_varlen_func` with a q, k and v that are parts of one array.

    Everything else is as in that function: parameters of the same name, results, allocation, streams, graph
    captures and errors.

    Parameters
    ----------
    qkv : array
        bfloat16 or float16: `[total, h, 2 * d_qk + d_v]` with `head_dim_qk`, the columns of q, k and v in
        this order (FlashMLA); or `[total, 3, h, d]` without it (FlashAttention). Each part is read in
        place or copied, by that function's rules for q, k and v.
    cu_seqlens : array
        int32 `[b + 1]`, contiguous, not decreasing, of queries and keys alike.
    max_seqlen : int
        At least the length of every request.
    head_dim_qk : int, optional
        d_qk of a `qkv` of three dimensions, 1 to 256.

    Returns
    -------
    out, lse : array
        `[total, h, d_v]` and `[total, h]`, as in that function.

    Raises
    ------
    TypeError, ValueError, RawMLAError
        As in that function, and for a head_dim_qk that does not fit qkv. Errors call the parts `qkv`, or q,
        k and v where torch traces the call.

    Notes
    -----
    The operation is FlashMLA's (github.com/deepseek-ai/FlashMLA), and FlashAttention's
    (github.com/Dao-AILab/flash-attention) with four dimensions.
    """
    if learnable_sink is not None:
        attn_sink = either("attn_sink", attn_sink, "learnable_sink", learnable_sink)
    path = dense_path(qkv, None, None, attn_sink)
    options = path.options_of(
        dropout_p, softmax_scale, causal, deterministic, is_varlen, window_size, softcap, attention_chunk,
        (max_seqlen, max_seqlen), ("max_seqlen", "max_seqlen"),
    )  # fmt: skip
    arrays = (qkv, None, None, cu_seqlens, None, seqused_q, seqused_k, attn_sink, alibi_slopes, out)
    return path.attend(arrays, options, Packing("qkv", 3, head_dim_qk))


def flash_attn_varlen_kvpacked_func(
    q: Any,
    kv: Any,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    head_dim_qk: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    deterministic: bool = False,
    is_varlen: bool = True,
    *,
    window_size: Window = NO_WINDOW,
    softcap: float = 0.0,
    attn_sink: Any = None,
    alibi_slopes: Any = None,
    attention_chunk: int = 0,
    seqused_q: Any = None,
    seqused_k: Any = None,
    out: Any = None,
    cu_seqlens_qo: Any = None,
    cu_seqlens_kv: Any = None,
    max_seqlen_qo: int | None = None,
    max_seqlen_kv: int | None = None,
    learnable_sink: Any = None,
) -> tuple[Any, Any]:
    """Call `rawmla.flash_attn_varlen_func` with a k and v that are parts of one array.

    Everything else is as in that function: parameters of the same name, results, allocation, streams, graph
    captures and errors.

    Parameters
    ----------
    kv : array
        In q's dtype: `[total_k, h_kv, d_qk + d_v]` with `head_dim_qk`, the columns of k and v in this order
        (FlashMLA); or `[total_k, 2, h_kv, d]` without it (FlashAttention). Each part is read in place or
        copied, by that function's rules for k and v.
    head_dim_qk : int, optional
        d_qk with a `kv` of three dimensions.

    Returns
    -------
    out, lse : array
        As in that function.

    Raises
    ------
    TypeError, ValueError, RawMLAError
        As in that function, and for a head_dim_qk that does not fit q and kv. Errors call the parts `kv`, or
        k and v where torch traces the call.

    Notes
    -----
    The operation is FlashMLA's (github.com/deepseek-ai/FlashMLA), and FlashAttention's
    (github.com/Dao-AILab/flash-attention) with four dimensions.
    """
    if cu_seqlens_qo is not None:
        cu_seqlens_q = either("cu_seqlens_q", cu_seqlens_q, "cu_seqlens_qo", cu_seqlens_qo)
    if cu_seqlens_kv is not None:
        cu_seqlens_k = either("cu_seqlens_k", cu_seqlens_k, "cu_seqlens_kv", cu_seqlens_kv)
    if max_seqlen_qo is not None:
        max_seqlen_q = either("max_seqlen_q", max_seqlen_q, "max_seqlen_qo", max_seqlen_qo)
    if max_seqlen_kv is not None:
        max_seqlen_k = either("max_seqlen_k", max_seqlen_k, "max_seqlen_kv", max_seqlen_kv)
    if learnable_sink is not None:
        attn_sink = either("attn_sink", attn_sink, "learnable_sink", learnable_sink)
    path = dense_path(q, kv, None, attn_sink)
    options = path.options_of(
        dropout_p, softmax_scale, causal, deterministic, is_varlen, window_size, softcap, attention_chunk,
        (max_seqlen_q, max_seqlen_k),
    )  # fmt: skip
    arrays = (q, kv, None, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, attn_sink, alibi_slopes, out)
    return path.attend(arrays, options, Packing("kv", 2, head_dim_qk))


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    *,
    attn_sink: Any = None,
    attention_chunk: int = 0,
    out: Any = None,
    learnable_sink: Any = None,
) -> tuple[Any, Any]:
    """Compute attention of a batch of requests of one length.

    Everything else is as in `rawmla.flash_attn_varlen_func`: the formulas, parameters of the same name,
    allocation, streams, graph captures and errors.

    Parameters
    ----------
    q : array
        bfloat16 or float16 `[b, s_q, h_q, d_qk]`, d_qk 1 to 256, less than 2**30 tokens in all.
    k : array
        `[b, s_k, h_kv, d_qk]` in q's dtype, h_q a multiple of h_kv.
    v : array
        `[b, s_k, h_kv, d_v]` in q's dtype, d_v 1 to 256. q, k and v are read in place or copied as in that
        function; torch's `[b, h, s, d]`, transposed, are read in place.
    out : array, optional
        `[b, s_q, h_q, d_v]` in q's dtype, written and returned, by that function's rules.

    Returns
    -------
    out : array
        `[b, s_q, h_q, d_v]` in q's dtype; a fresh one has its dimensions in the order of strides of `q`, and
        rows that are padded to a multiple of 8 elements. 0 in a row with nothing to attend.
    lse : array
        float32 `[b, h_q, s_q]`, contiguous: natural logarithm of the sum of exponentials of the scores that
        no mask hides, without the sink; -inf in a row with nothing to attend.

    Raises
    ------
    TypeError, ValueError, RawMLAError
        As in that function.

    Notes
    -----
    The operation is FlashAttention's (github.com/Dao-AILab/flash-attention).

    Examples
    --------
    >>> out, lse = rawmla.flash_attn_func(q, k, v, causal=True)
    """
    if learnable_sink is not None:
        attn_sink = either("attn_sink", attn_sink, "learnable_sink", learnable_sink)
    path = dense_path(q, k, v, attn_sink)
    options = path.options_of(
        dropout_p, softmax_scale, causal, deterministic, False, window_size, softcap, attention_chunk,
        None,
    )  # fmt: skip
    arrays = (q, k, v, None, None, None, None, attn_sink, alibi_slopes, out)
    return path.attend(arrays, options)
