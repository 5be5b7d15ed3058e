"""Sparse prefill: attention of many query tokens, each over tokens of its own choice.

As in `rawmla.mla.decode`, the host checks what it can see, allocates in the framework of q and hands plain
addresses and numbers to `rawmla.kernels`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .. import jit
from ..call import checks
from ..call.arrays import READERS, Fields
from ..kernels import mla_metadata as metadata
from ..kernels import mla_sparse_prefill as sparse_prefill
from ..mla.sparse_decode import PreparedCall

__all__ = ["flash_mla_sparse_fwd"]

_D_V = checks.D_V
_ARGUMENTS = ("q", "kv", "indices", "topk_length", "attn_sink", "out")
_REQUIRED = ("q", "kv", "indices")


def flash_mla_sparse_fwd(
    q: Any,
    kv: Any,
    indices: Any,
    sm_scale: float,
    d_v: int = _D_V,
    attn_sink: Any = None,
    topk_length: Any = None,
    out: Any = None,
    *,
    log_base: str = "2",
    is_fp8_kvcache: bool = False,
) -> tuple[Any, Any, Any]:
    """Attention of s_q query tokens, each over the rows of kv that its indices name; the first 512 columns of
    a row are its values.

    For every query token and head, K being the rows of its indices: `P = sm_scale * log2(e) * q @ K.T`,
    `max_logits = max(P)`, `lse = log2(sum(2**P))` and `out = 2**(P - lse) @ K[:, :512]`. Scores, softmax and
    sums are float32; probabilities are rounded to bfloat16 before the second product (to float16 with up to
    16 heads over "v32" caches).

    Arrays are torch CUDA tensors, CuPy arrays, or DLPack arrays of other libraries in CUDA memory (taken
    over by CuPy, which then also holds the results); no input is copied but for the one case named under
    `q`. All are on the device of `q`, which need not be the current one. Arrays of two frameworks in one
    call need the same current stream in both. Strides are in elements.

    Parameters
    ----------
    q : array
        bfloat16 `[s_q, h_q, d_qk]`, any s_q and h_q, d_qk 576 or 512, last dimension contiguous, other
        strides free. When its address is not a multiple of 16 bytes, or a stride is not a positive multiple
        of 8, a contiguous copy is made on the same stream.
    kv : array
        bfloat16 `[s_kv, 1, d_qk]`, at least 1 token, address a multiple of 16 bytes, last dimension
        contiguous, stride of tokens a multiple of 8, not negative; tokens may overlap. With `is_fp8_kvcache`
        a paged cache of bytes, as the `k_cache` of sparse decoding in `flash_mla_with_kvcache`.
    indices : array
        int32 `[s_q, 1, topk]`, any topk from 1 up, last dimension contiguous, other strides free but not
        negative: rows of kv; of a paged cache slots, block * page_block_size + offset in the block. A
        negative one or one past the last is skipped; one that occurs twice counts twice. What no valid index
        names is never read into the result.
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
        Of `max_logits` and `lse`: "2", or "e" for natural ones, which are those in base 2 times ln 2.
    is_fp8_kvcache : bool
        `kv` is a paged cache that holds FP8 values with scales, in the layout that d_qk decides (see
        `rawmla.quantize_k_cache`). A value is e4m3 * scale, rounded to bfloat16 once; few query tokens with
        up to 16 heads over "v32" may read it unrounded. A cache is copied to bf16 rows first, and these are
        attended, where that takes less time: where the query tokens select at least eight times as many rows
        as it has, and the copies take no more room than `q` and `out`.

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
        An argument is of the wrong kind or dtype; a shape, stride, range or combination is not allowed.
        Raised before anything is allocated or launched.
    RawMLAError
        A subclass says what is missing: GPU, driver, NVRTC, a compiled kernel inside a graph capture.

    Notes
    -----
    From 512 query tokens on with 8, 16 or 32 heads, eight, four or two neighbours share a tile of 64 rows:
    what they select is united, so that a row that several select is read once for all. That needs rows that
    are selected often (at most 32,768, and 16 * topk) and an `out` whose tokens and heads follow each other
    evenly. Results of a token then depend on its neighbours in their last bits, but NaN and Inf in a row stay
    with the tokens that select it; Inf in the first 512 columns of such a row gives them NaN.

    Allocates the results and scratch (some kilobytes for a plan, up to 18 MB where tokens can be split, up to
    64 MB for united selections, and the rows of an FP8 cache that is copied) with the framework of `q`, and
    enqueues the copies, the uniting and one to three kernels (plan, attention, combine) for every 16,384
    query tokens or less on its current stream: without `topk_length` the plan is often known beforehand.
    Never synchronises. Nothing is launched for s_q == 0. The same call twice gives the same bits. There is no
    autograd: results carry no graph.

    Inside a CUDA-graph capture the call allocates from the capture's pool (torch) and never compiles: a
    kernel that `rawmla.warmup(prefill_formats=[...])` has not loaded is a `KernelNotReadyError`. Replays
    follow indices and lengths that changed in place. CuPy has no graph pools: keep the results alive for as
    long as the graph is, and pass a `q` that needs no copy.

    The operation is that of FlashMLA (github.com/deepseek-ai/FlashMLA).

    Examples
    --------
    >>> out, max_logits, lse = rawmla.flash_mla_sparse_fwd(q, kv, indices, 576**-0.5)
    """
    checks.check_head_dim_v(d_v, "d_v")
    scale = checks.as_softmax_scale(sm_scale, "sm_scale", "a float")
    lse_factor = checks.as_log_base(log_base)
    is_fp8_kvcache = checks.as_bool("is_fp8_kvcache", is_fp8_kvcache)
    arrays = (q, kv, indices, topk_length, attn_sink, out)
    views: list[Fields | None] = [
        None if array is None and name not in _REQUIRED else READERS[type(array)](array, name)
        for array, name in zip(arrays, _ARGUMENTS, strict=True)
    ]
    kinds = tuple([None if view is None else (view[0] & 15, *view[1:6]) for view in views])
    known = _known.get((is_fp8_kvcache, kinds)) or _learn(is_fp8_kvcache, kinds, views)
    sizes = known.sizes
    s_q, h_q = sizes.s_q, sizes.h_q
    q_view = views[0]
    assert q_view is not None
    _, _, _, _, device, framework, q_array = q_view
    for view, name in zip(views[1:], _ARGUMENTS[1:], strict=True):
        if view is not None and view[5] is not framework:
            checks.check_place(name, view, device, framework, "q")

    if not s_q:
        if out is None:
            out = framework.empty((s_q, h_q, _D_V), "bfloat16", device)
        max_logits, lse = (framework.empty((s_q, h_q), "float32", device) for _ in range(2))
        return out, max_logits, lse

    pointers = [0 if view is None else view[0] for view in views]
    q_strides = known.q_strides
    if q_strides is None:
        q_array = framework.contiguous_copy(q_array, "q")
        pointers[0] = framework.pointer(q_array)
        q_strides = (h_q * sizes.d_qk, sizes.d_qk)

    key = (scale, lse_factor)
    call = known.calls.get(key)
    if call is None:
        if len(known.calls) >= _MAX_KNOWN:
            known.calls.clear()
        sm_count = jit.device_info(device).sm_count
        prepared = sparse_prefill.prepare(
            sparse_prefill.SparsePrefillCall(
                device=device,
                format=sizes.format,
                d_qk=sizes.d_qk,
                load_bytes=sizes.load_bytes,
                s_q=s_q,
                h_q=h_q,
                cache=sizes.cache,
                q_strides=q_strides,
                out_strides=sizes.out_strides,
                num_parts=metadata.num_sm_parts_sparse(sm_count, 1, h_q),
                softmax_scale=scale,
                lse_factor=lse_factor,
                limited=topk_length is not None,
            ),
            framework.capture_query(device),
        )
        results = [((s_q, h_q, _D_V), "bfloat16"), *[((s_q, h_q), "float32")] * 2][out is not None :]
        allocate = framework.allocator(results, prepared.scratch_bytes, device)
        call = known.calls[key] = PreparedCall(allocate, prepared.launch)
    if out is None:
        out, max_logits, lse, scratch = call.allocate()
        pointers[5] = framework.pointer(out)
    else:
        max_logits, lse, scratch = call.allocate()
    call.launch(
        framework.current_stream(device),
        sparse_prefill.PrefillAddresses._make(
            (*pointers, framework.pointer(max_logits), framework.pointer(lse))
        ),
        0 if scratch is None else framework.pointer(scratch),
    )
    return out, max_logits, lse


# Calls whose checks were passed, with their launches. Emptied when full.
_MAX_KNOWN = 1024
_known: dict[tuple[Any, ...], _Known] = {}


class _Known(NamedTuple):
    """What follows from the kinds of the arguments."""

    sizes: checks.PrefillSizes
    q_strides: tuple[int, int] | None  # None: a contiguous copy is needed
    calls: dict[tuple[float, float], PreparedCall]


def _learn(is_fp8_kvcache: bool, kinds: tuple[Any, ...], views: list[Fields | None]) -> _Known:
    """Check the arguments, and remember that."""
    sizes = checks.prefill_sizes(is_fp8_kvcache, dict(zip(_ARGUMENTS, views, strict=True)))
    q_view = views[0]
    assert q_view is not None
    ptr, shape, strides, *_ = q_view
    usable = checks.usable_strides(shape, strides)
    fits = checks.strides_fit(ptr, shape, usable)
    known = _Known(sizes, (usable[0], usable[1]) if fits else None, {})
    if len(_known) >= _MAX_KNOWN:
        _known.clear()
    _known[is_fp8_kvcache, kinds] = known
    return known
