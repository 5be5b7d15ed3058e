"""Decoding over a paged MLA cache. Names, order and meaning of the arguments are FlashMLA's."""

from __future__ import annotations

from typing import Any

from ..call import tracing
from ..call.checks import as_bool
from ..kernels.common import D_V
from ..mla import dense_decode, sparse_decode
from ..mla.arguments import check_head_dim_v, refuse_without_indices
from .paths import mla_operators

__all__ = ["flash_mla_with_kvcache"]


def flash_mla_with_kvcache(
    q: Any,
    k_cache: Any,
    block_table: Any,
    cache_seqlens: Any,
    head_dim_v: int,
    tile_scheduler_metadata: Any,
    num_splits: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Any = None,
    attn_sink: Any = None,
    extra_k_cache: Any = None,
    extra_indices_in_kvcache: Any = None,
    topk_length: Any = None,
    extra_topk_length: Any = None,
    out: Any = None,
    enable_batch_invariant: bool = False,
) -> tuple[Any, Any]:
    """Compute attention of s_q query tokens per request over a paged MLA cache.

    For every query token and head: `out = softmax(softmax_scale * q @ K.T) @ K[:, :512]`. K is the cache rows
    that the token attends; their first 512 columns are the values. In dense decoding these rows are the
    request's first `cache_seqlens` tokens, which `block_table` finds in the cache. In sparse decoding (with
    `indices`) the token's indices name them. Scores, softmax and sums are float32; probabilities are rounded
    to q's dtype before the second product (to float16 in sparse calls with up to 16 heads over "v32" caches).

    Arrays are torch CUDA tensors, CuPy arrays, or DLPack arrays of other libraries in CUDA memory (taken
    over by CuPy, which then also holds the results); no input is copied but for the one case named under
    `q`. All are on the device of `q`, which need not be the current one. Arrays of two frameworks in one
    call need the same current stream in both. Strides are in elements.

    Parameters
    ----------
    q : array or tuple of two arrays
        `[b, s_q, h_q, d_qk]`, bfloat16 or float16 (with `indices` bfloat16), d_qk 576 or 512, last dimension
        contiguous, other strides free. Any h_q that is a multiple of h_kv; without `indices`, s_q * h_q /
        h_kv may be refused above 2**32 / (h_q / h_kv) - 64. When its address is not a multiple of 16 bytes,
        or a stride is not a positive multiple of 8, a contiguous copy is made on the same stream.
        Or a pair `(q_nope, q_rope)` of its columns, `[b, s_q, h_q, d_qk - 64]` and `[b, s_q, h_q, 64]`, each
        with strides of its own: the result has the same bits as with the two concatenated. Neither is copied,
        so both need such an address and such strides. Errors call the first one `q`.
    k_cache : array
        Dense: `[num_blocks, page_block_size, h_kv, d_qk]`, dtype of `q`, page_block_size (tokens) 16, 32 or a
        multiple of 64. Address a multiple of 16 bytes, last dimension contiguous, other strides positive
        multiples of 8.
        Sparse: h_kv is 1, page_block_size any number from 1 up, and `is_fp8_kvcache` tells two kinds apart.
        False: bfloat16 `[num_blocks, page_block_size, 1, d_qk]`, address a multiple of 16 bytes, last
        dimension contiguous, other strides multiples of 8, not negative. True: bytes (float8_e4m3fn, uint8
        or int8) in the layout that d_qk decides (see `rawmla.quantize_k_cache`): `[num_blocks,
        page_block_size, 1, 656]` for 576 ("v32"), `[num_blocks, page_block_size, 1, 584]` for 512
        ("model1"). Tokens of a block are contiguous; address and block stride are multiples of 8, and rows
        are loaded in larger pieces when both are multiples of 16.
    block_table : array
        Dense: int32 `[b, max_blocks]`, last dimension contiguous, row stride free: page ids of each request,
        in order. Entries past a request's length are never read into the result. Results of a request with
        an entry outside `0 .. num_blocks - 1` within its length are undefined, but nothing outside of the
        arrays is read. A length above `max_blocks * page_block_size` counts as this product, which may be
        refused above 2**40 / page_block_size. Ignored with `indices`: None.
    cache_seqlens : array
        Dense: int32 `[b]`, contiguous: KV tokens per request; below 0 counts as 0. Ignored with `indices`:
        None.
    head_dim_v : int
        512.
    tile_scheduler_metadata : FlashMLASchedMeta or array
        The plan of `get_mla_metadata` (for bare tensors of a sparse call, with its `topk`). The first
        call with an object fills it, and later calls check it. A tensor is int32 `[n, 8]`, any n >= 1,
        contiguous, 16-byte aligned, in the row layout of `get_mla_metadata`'s tensors. If it holds
        anything but a plan for these lengths, results are undefined, but nothing outside of the arrays is
        read or written.
    num_splits : array, optional
        int32 `[>= b + 1]`, contiguous, with a tensor plan; None with an object.
    softmax_scale : float, optional
        Finite and positive. None: `d_qk ** -0.5`.
    causal : bool
        Query token j of s_q sees keys `0 .. cache_seqlens - s_q + j`. With s_q == 1 it changes nothing.
        False with `indices`. Keys that a token does not see have weight 0 for it, but NaN or Inf in the first
        512 columns of a newer token of the request reaches older query tokens, because 0 times NaN is NaN.
    is_fp8_kvcache : bool
        The caches hold FP8 values with scales: see `k_cache`. Only with `indices`. A value is e4m3 * scale,
        rounded to bfloat16 once, and with up to 16 heads over "v32" not rounded. RoPE columns are bfloat16 in
        the cache.
    indices : array, optional
        int32 `[b, s_q, topk]`, any topk from 1 up, last dimension contiguous, other strides free but not
        negative. They make the call sparse. They are slots of the cache, block * page_block_size + offset
        in the block, which `rawmla.convert_indices` makes of token positions. A negative slot or one past
        the cache is skipped; one that occurs twice counts twice. Rows that no valid index names are never
        read into the result.
    attn_sink : array, optional
        float32 `[h_q]`, contiguous. With `indices`: `out` is multiplied by `exp(lse) / (exp(lse) +
        exp(sink))`; `softmax_lse` does not change. -inf has no effect, +inf makes `out` 0.
    extra_k_cache : array, optional
        With `indices`: a second cache, attended in the same softmax. As `k_cache` in dtype and layout, with
        num_blocks, page_block_size and strides of its own.
    extra_indices_in_kvcache : array, optional
        int32 `[b, s_q, extra_topk]`: slots of `extra_k_cache`, otherwise as `indices`. Given when
        `extra_k_cache` is.
    topk_length : array, optional
        int32 `[b]`, contiguous. With `indices`: only the first `topk_length[i]` columns of request i count,
        the others may hold anything. Values are clamped to `0 .. topk`. None: all count.
    extra_topk_length : array, optional
        The same for `extra_indices_in_kvcache`.
    out : array, optional
        `[b, s_q, h_q, 512]` in q's dtype, written and returned. 16-byte aligned, last dimension contiguous,
        other strides positive multiples of 8 (a slice of the heads of a larger buffer is fine), no element
        twice. It must not overlap an input.
    enable_batch_invariant : bool
        A request's result has the same bits whatever else is in the batch; in sparse decoding, in calls of
        the same topk and extra_topk. A plan of tensors must have been made with
        `get_mla_metadata(enable_batch_invariant=True)`, and both calls need the flag; an object needs it on
        either.

    Returns
    -------
    out : array
        `[b, s_q, h_q, 512]` in q's dtype, contiguous unless given, in the framework of `q`. 0 in a row with
        nothing to attend.
    softmax_lse : array
        float32 `[b, h_q, s_q]`, contiguous: natural log of the sum of exp of the scaled scores; +inf in a
        row with nothing to attend.

    Raises
    ------
    TypeError, ValueError
        An argument is of the wrong kind or dtype; a shape, stride, range or combination is not allowed, an
        argument of sparse decoding without `indices` and a re-used `FlashMLASchedMeta` that was filled for
        another configuration among them, and a tensor that requires grad while grad is enabled. Raised
        before anything is allocated or launched.
    NotImplementedError
        `is_fp8_kvcache` without `indices`: dense decoding has no FP8 caches.
    RawMLAError
        A subclass says what is missing: GPU, driver, NVRTC, a compiled kernel inside a graph capture.

    Notes
    -----
    Allocates `out`, `softmax_lse` and, when requests can be split, scratch, all with the framework
    of `q`, and enqueues at most three kernels (plan of an empty object, attention, combine) on its current
    stream. Never synchronises. Nothing is launched for b == 0 or s_q == 0. The same call twice gives the
    same bits. There is no backward yet, so a tensor that requires grad is refused while grad is enabled.

    Inside a CUDA-graph capture the call allocates from the capture's pool (torch) and never compiles: a
    kernel that neither `rawmla.warmup` nor `rawmla.warmup_call` has loaded is a `KernelNotReadyError`. The
    plan of an empty object is computed inside the graph, so replays follow lengths that changed in place.
    CuPy has no graph pools: keep `out`, `softmax_lse` and the plan alive for as long as the graph is, and
    pass a `q` that needs no copy.

    The arrays of the last call's plan are recognised by identity, address and shape and not read again, so
    layers that share a plan cost less host time. Only strides that were changed in place escape this.

    FlashMLA (github.com/deepseek-ai/FlashMLA) defines the operation.

    Examples
    --------
    One plan serves every layer of a step:

    >>> plan, _ = rawmla.get_mla_metadata()
    >>> for q, k_cache in layers:
    ...     out, lse = rawmla.flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, 512, plan)

    Sparse, over an FP8 cache:

    >>> plan, _ = rawmla.get_mla_metadata()
    >>> slots = rawmla.convert_indices(positions, block_table, page_block_size)
    >>> out, lse = rawmla.flash_mla_with_kvcache(
    ...     q, fp8_cache, None, None, 512, plan, is_fp8_kvcache=True, indices=slots
    ... )
    """
    if head_dim_v.__class__ is not int or head_dim_v != D_V:
        check_head_dim_v(head_dim_v)
    if causal is not False and causal is not True:
        causal = as_bool("causal", causal)
    if is_fp8_kvcache is not False and is_fp8_kvcache is not True:
        is_fp8_kvcache = as_bool("is_fp8_kvcache", is_fp8_kvcache)
    if enable_batch_invariant is not False and enable_batch_invariant is not True:
        enable_batch_invariant = as_bool("enable_batch_invariant", enable_batch_invariant)
    dense: Any = dense_decode.decode
    sparse: Any = sparse_decode.decode
    if tracing.is_traced(q):
        dense, sparse = mla_operators().decode, mla_operators().decode_sparse
    if indices is not None:
        if causal:
            raise ValueError("causal: expected False with indices, got True")
        extra = None
        if not (extra_k_cache is extra_indices_in_kvcache is extra_topk_length is None):
            extra = extra_k_cache, extra_indices_in_kvcache, extra_topk_length
        return sparse(
            q,
            k_cache,
            tile_scheduler_metadata,
            num_splits,
            softmax_scale,
            is_fp8_kvcache,
            indices,
            attn_sink,
            topk_length,
            extra,
            out,
            enable_batch_invariant,
        )
    if (
        is_fp8_kvcache
        or attn_sink is not None
        or extra_k_cache is not None
        or extra_indices_in_kvcache is not None
        or topk_length is not None
        or extra_topk_length is not None
    ):
        refuse_without_indices(
            attn_sink=attn_sink,
            extra_k_cache=extra_k_cache,
            extra_indices_in_kvcache=extra_indices_in_kvcache,
            topk_length=topk_length,
            extra_topk_length=extra_topk_length,
        )
    return dense(
        q,
        k_cache,
        block_table,
        cache_seqlens,
        tile_scheduler_metadata,
        num_splits,
        softmax_scale,
        causal,
        out,
        enable_batch_invariant,
    )
