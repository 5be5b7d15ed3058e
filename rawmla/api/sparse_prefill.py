"""Sparse prefill: attention of many query tokens, each over tokens of its own choice."""

from __future__ import annotations

from typing import Any

from ..call import tracing
from ..kernels.common import D_V
from ..mla import sparse_prefill
from ..mla.arguments import check_head_dim_v
from .paths import mla_operators

__all__ = ["flash_mla_sparse_fwd"]


def flash_mla_sparse_fwd(
    q: Any,
    kv: Any,
    indices: Any,
    sm_scale: float,
    d_v: int = D_V,
    attn_sink: Any = None,
    topk_length: Any = None,
    out: Any = None,
    *,
    log_base: str = "2",
    is_fp8_kvcache: bool = False,
    enable_batch_invariant: bool = False,
) -> tuple[Any, Any, Any]:
    """Compute attention of s_q query tokens, each over the rows of kv that its indices name.

    The first 512 columns of a row are its values. For every query token and head, with K the rows of its
    indices: `P = sm_scale * log2(e) * q @ K.T`, `max_logits = max(P)`, `lse = log2(sum(2**P))` and
    `out = 2**(P - lse) @ K[:, :512]`. Scores, softmax and sums are float32; probabilities are rounded to
    bfloat16 before the second product (to float16 with up to 16 heads over "v32" caches).

    Arrays are torch CUDA tensors, CuPy arrays, or DLPack arrays of other libraries in CUDA memory (taken
    over by CuPy, which then also holds the results); no input is copied but for the one case named under
    `q`. All are on the device of `q`, which need not be the current one. Arrays of two frameworks in one
    call need the same current stream in both. Strides are in elements.

    Parameters
    ----------
    q : array or tuple of two arrays
        bfloat16 `[s_q, h_q, d_qk]`, any s_q and h_q, d_qk 576 or 512, last dimension contiguous, other
        strides free. When its address is not a multiple of 16 bytes, or a stride is not a positive multiple
        of 8, a contiguous copy is made on the same stream.
        Or a pair `(q_nope, q_rope)` of its columns, `[s_q, h_q, d_qk - 64]` and `[s_q, h_q, 64]`, each with
        strides of its own: the result has the same bits as with the two concatenated. Neither is copied, so
        both need such an address and such strides. Errors call the first one `q`.
    kv : array
        bfloat16 `[s_kv, 1, d_qk]`, at least 1 token, address a multiple of 16 bytes, last dimension
        contiguous, stride of tokens a multiple of 8, not negative; tokens may overlap. With `is_fp8_kvcache`
        a paged cache of bytes, as the `k_cache` of sparse decoding in `flash_mla_with_kvcache`.
    indices : array
        int32 `[s_q, 1, topk]`, any topk from 1 up, last dimension contiguous, other strides free but not
        negative: rows of kv; of a paged cache slots, block * page_block_size + offset in the block. A
        negative index or one past the last row is skipped; one that occurs twice counts twice. Rows that no
        valid index names are never read into the result.
    sm_scale : float
        Finite and positive.
    d_v : int
        512.
    attn_sink : array, optional
        float32 `[h_q]`, contiguous, natural logarithm: `out` is multiplied by `exp(lse) / (exp(lse) +
        exp(sink))`, for a natural `lse`; `max_logits` and `lse` do not change. -inf has no effect, +inf makes
        `out` 0.
    topk_length : array, optional
        int32 `[s_q]`, contiguous: only the first `topk_length[i]` indices of token i count, the others may
        hold anything. Values are clamped to `0 .. topk`. None: all count.
    out : array, optional
        bfloat16 `[s_q, h_q, 512]`, written and returned. 16-byte aligned, last dimension contiguous, other
        strides positive multiples of 8 (a slice of the heads of a larger buffer is fine), no element twice.
        It must not overlap an input.
    log_base : str
        The base of `max_logits` and `lse`: "2", or "e" for natural logarithms, which are ln 2 times as large.
    is_fp8_kvcache : bool
        `kv` is a paged cache that holds FP8 values with scales, in the layout that d_qk decides (see
        `rawmla.quantize_k_cache`). A value is e4m3 * scale, rounded to bfloat16 once; few query tokens with
        up to 16 heads over "v32" may read it unrounded. Where it takes less time, a cache is copied to bf16
        rows first, and the copies are attended: where the query tokens select at least eight times as many
        rows as the cache has, and the copies take no more room than `q` and `out`.
    enable_batch_invariant : bool
        A token's results have the same bits in every call with the same topk, h_q and `kv`, whatever the
        other tokens are and however many. Tokens share no work then: no selections are united, no cache is
        copied first, and no token is split over multiprocessors. A call of few tokens leaves most of the GPU
        idle. docs/performance.md has the cost.

    Returns
    -------
    out : array
        bfloat16 `[s_q, h_q, 512]`, contiguous unless given, in the framework of `q`. 0 in a row without a
        valid index.
    max_logits : array
        float32 `[s_q, h_q]`, contiguous: the largest scaled score; -inf in a row without a valid index.
    lse : array
        float32 `[s_q, h_q]`, contiguous: logarithm of the sum of the exponentials of the scaled scores; +inf
        in a row without a valid index.

    Raises
    ------
    TypeError, ValueError
        An argument is of the wrong kind or dtype; a shape, stride, range or combination is not allowed, or a
        tensor requires grad while grad is enabled. Raised before anything is allocated or launched.
    RawMLAError
        A subclass says what is missing: GPU, driver, NVRTC, a compiled kernel inside a graph capture.

    Notes
    -----
    From 512 query tokens on with 8, 16 or 32 heads, eight, four or two neighbours share a tile of 64 rows:
    their selections are united, so that a row that several select is read once for all. This needs rows that
    are selected often (at most 32,768, and 16 * topk) and an `out` whose tokens and heads follow each other
    evenly. Results of a token then depend on its neighbours in their last bits, but NaN and Inf in a row stay
    with the tokens that select it; Inf in the first 512 columns of such a row gives them NaN.

    Allocates the results and scratch (some kilobytes for a plan, up to 18 MB where tokens can be split, up to
    64 MB for united selections, and the rows of an FP8 cache that is copied) with the framework of `q`, and
    enqueues the copies, the uniting and one to three kernels (plan, attention, combine) for every 16,384
    query tokens or less on its current stream: without `topk_length` the plan is often known beforehand.
    Never synchronises. Nothing is launched for s_q == 0. The same call twice gives the same bits. There is no
    backward yet, so a tensor that requires grad is refused while grad is enabled.

    Inside a CUDA-graph capture the call allocates from the capture's pool (torch) and never compiles: a
    kernel that `rawmla.warmup(prefill_formats=[...])` has not loaded is a `KernelNotReadyError`. Replays
    follow indices and lengths that changed in place. CuPy has no graph pools: keep the results alive for as
    long as the graph is, and pass a `q` that needs no copy.

    FlashMLA (github.com/deepseek-ai/FlashMLA) defines the operation.

    Examples
    --------
    >>> out, max_logits, lse = rawmla.flash_mla_sparse_fwd(q, kv, indices, 576**-0.5)
    """
    check_head_dim_v(d_v, "d_v")
    prefill = mla_operators().prefill if tracing.is_traced(q) else sparse_prefill.prefill
    return prefill(
        q,
        kv,
        indices,
        sm_scale,
        attn_sink,
        topk_length,
        out,
        log_base,
        is_fp8_kvcache,
        enable_batch_invariant,
    )
