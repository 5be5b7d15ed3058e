"""Sparse prefill: attention of many query tokens, each over tokens of its own choice.

`flash_mla_sparse_fwd` is one call from the arrays to the launch, laid out as in `rawmla.mla.dense_decode`.
"""

from __future__ import annotations

from math import log
from typing import Any, NamedTuple

from .. import jit
from ..call import tracing
from ..call.arrays import READERS, Fields
from ..call.checks import as_bool, as_softmax_scale, check_streams, mixes_frameworks, show, usable_strides
from ..call.memo import Memo, PreparedCall, kind_of
from ..kernels import mla_metadata, mla_sparse_prefill
from ..kernels.common import D_V
from ..kernels.mla_sparse import Cache
from ..kernels.mla_sparse_prefill import PrefillAddresses, SparsePrefillCall
from .arguments import (
    QStrides,
    check_head_dim_v,
    check_out,
    check_selection,
    check_sparse_cache,
    check_sparse_q,
    check_vectors,
    q_strides,
    read_pair,
)
from .traced import operators

__all__ = ["flash_mla_sparse_fwd"]

_LSE_FACTORS = {"2": 1.0, "e": log(2.0)}


class _Arrays(NamedTuple):
    """The arrays of a call by the names of the arguments; None: not given."""

    q: Fields
    q_rope: Fields | None  # RoPE of q, if it is an array of its own
    kv: Fields
    indices: Fields
    topk_length: Fields | None
    attn_sink: Fields | None
    out: Fields | None


class _Checked(NamedTuple):
    """What follows from the kinds of the arrays, which passed the checks; strides in elements."""

    format: str  # as in SparsePrefillCall
    s_q: int
    h_q: int
    d_qk: int
    mixes_frameworks: bool  # some arrays are of another framework than q
    load_bytes: int  # what addresses of cache rows are multiples of
    cache: Cache
    q_strides: QStrides
    out_strides: tuple[int, ...]
    calls: Memo[PreparedCall]


_checked: Memo[_Checked] = Memo(shared=True)


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
    q : array or tuple of two arrays
        bfloat16 `[s_q, h_q, d_qk]`, any s_q and h_q, d_qk 576 or 512, last dimension contiguous, other
        strides free. When its address is not a multiple of 16 bytes, or a stride is not a positive multiple
        of 8, a contiguous copy is made on the same stream.
        Or a pair `(q_nope, q_rope)` of its columns, `[s_q, h_q, d_qk - 64]` and `[s_q, h_q, 64]`, each with
        strides of its own: the result is that of the two concatenated, bit for bit. Neither is copied, so
        both need such an address and such strides. Errors call the first one `q`.
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
    enable_batch_invariant : bool
        A token's results have the same bits in every call of the same topk, h_q and `kv`, whatever the other
        tokens are and however many. Tokens share nothing then: no selections are united, no cache is copied
        first, and no token is split over multiprocessors, so that a call of few tokens leaves most of the GPU
        idle. docs/performance.md has what that costs.

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
    what they select is united, so that a row that several select is read once for all. That needs rows that
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

    The operation is that of FlashMLA (github.com/deepseek-ai/FlashMLA).

    Examples
    --------
    >>> out, max_logits, lse = rawmla.flash_mla_sparse_fwd(q, kv, indices, 576**-0.5)
    """
    check_head_dim_v(d_v, "d_v")
    if tracing.is_traced(q):
        return operators().sparse_fwd(
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
    softmax_scale = as_softmax_scale(sm_scale, "sm_scale", "a float")
    lse_factor = _as_lse_factor(log_base)
    is_fp8_kvcache = as_bool("is_fp8_kvcache", is_fp8_kvcache)
    enable_batch_invariant = as_bool("enable_batch_invariant", enable_batch_invariant)
    rope_view = None
    if q.__class__ is tuple:
        q_view, rope_view = read_pair(q)
    else:
        q_view = READERS[type(q)](q, "q")
    kv_view = READERS[type(kv)](kv, "kv")
    indices_view = READERS[type(indices)](indices, "indices")
    length_view = None if topk_length is None else READERS[type(topk_length)](topk_length, "topk_length")
    sink_view = None if attn_sink is None else READERS[type(attn_sink)](attn_sink, "attn_sink")
    out_view = None if out is None else READERS[type(out)](out, "out")
    # In the order of _Arrays, which only checks need.
    views = q_view, rope_view, kv_view, indices_view, length_view, sink_view, out_view
    q_ptr, q_shape, q_steps, dtype, device, framework, q_array = q_view
    kv_ptr, kv_shape, kv_steps, kv_dtype, kv_device, kv_framework, _ = kv_view
    index_ptr, index_shape, index_steps, index_dtype, index_device, index_framework, _ = indices_view
    # One flat tuple of what every call has, as in dense decoding.
    kind = (
        is_fp8_kvcache,
        q_ptr & 15, q_shape, q_steps, dtype, device, framework,
        kv_ptr & 15, kv_shape, kv_steps, kv_dtype, kv_device, kv_framework,
        index_ptr & 15, index_shape, index_steps, index_dtype, index_device, index_framework,
        rope_view if rope_view is None else kind_of(rope_view),
        length_view if length_view is None else kind_of(length_view),
        sink_view if sink_view is None else kind_of(sink_view),
        out_view if out_view is None else kind_of(out_view),
    )  # fmt: skip
    latest_kind, checked = _checked.latest
    if latest_kind != kind:  # layers repeat one kind, and comparing takes half the time of hashing
        checked = _checked.get(kind) or _checked.keep(kind, _check(is_fp8_kvcache, _Arrays(*views)))
        _checked.latest = kind, checked
    if checked.mixes_frameworks:
        check_streams(_Arrays(*views), device, framework)
    if not checked.s_q:
        return _empty_results(checked, out, q_view)

    key = (softmax_scale, lse_factor, enable_batch_invariant)
    call = checked.calls.get(key) or checked.calls.keep(key, _prepare(checked, key, _Arrays(*views)))
    strides = checked.q_strides
    if strides.is_copied:
        q_array = framework.contiguous_copy(q_array, "q")
        q_ptr = framework.pointer(q_array)
    q_rope_ptr = q_ptr + strides.rope_bytes if rope_view is None else rope_view[0]
    if out_view is None:
        out, max_logits, lse, scratch = call.allocate()
        out_ptr = framework.pointer(out)
    else:
        max_logits, lse, scratch = call.allocate()
        out_ptr = out_view[0]
    addresses = PrefillAddresses(
        q_ptr, q_rope_ptr, kv_ptr, index_ptr, 0 if length_view is None else length_view[0],
        0 if sink_view is None else sink_view[0], out_ptr, framework.pointer(max_logits),
        framework.pointer(lse),
    )  # fmt: skip
    call.launch(
        framework.current_stream(device), addresses, 0 if scratch is None else framework.pointer(scratch)
    )
    return out, max_logits, lse


def _as_lse_factor(log_base: Any) -> float:
    """What numbers in base 2 are multiplied by to be in `log_base`, "2" or "e"."""
    if not isinstance(log_base, str):
        raise TypeError(f"log_base: expected a str, got {show(log_base)}")
    factor = _LSE_FACTORS.get(log_base)
    if factor is None:
        raise ValueError(f"log_base: expected '2' or 'e', got {log_base!r}")
    return factor


def _check(is_fp8_kvcache: bool, arrays: _Arrays) -> _Checked:
    """Check the arrays of a call against each other."""
    q, d_qk = check_sparse_q(arrays, ("s_q", "h_q", "d_qk"))
    _, (s_q, h_q, _), *_ = q
    if is_fp8_kvcache:
        format, cache, load_bytes = check_sparse_cache("kv", arrays.kv, d_qk, is_fp8_kvcache)
    else:
        format, cache, load_bytes = "bf16", _check_rows_of_kv(arrays.kv, d_qk), 16
    cache = check_selection(cache, "indices", arrays.indices, s_q, 1, "s_q is that of q")
    check_vectors(arrays, {"topk_length": ("int32", s_q, "s_q"), "attn_sink": ("float32", h_q, "h_q")})
    return _Checked(
        format=format,
        s_q=s_q,
        h_q=h_q,
        d_qk=d_qk,
        mixes_frameworks=mixes_frameworks(arrays),
        load_bytes=load_bytes,
        cache=cache,
        q_strides=q_strides(q, arrays.q_rope, d_qk),
        out_strides=(h_q * D_V, D_V) if arrays.out is None else check_out(arrays.out, q),
        calls=Memo(),
    )


def _check_rows_of_kv(kv: Fields, d_qk: int) -> Cache:
    """Check the bf16 kv of a call; returns it, without a selection, as a cache of blocks of one token."""
    ptr, shape, strides, dtype, _, _, _ = kv
    if dtype != "bfloat16":
        raise TypeError(f"kv: expected dtype bfloat16 with is_fp8_kvcache=False, got {dtype}")
    if len(shape) != 3 or shape[1] != 1 or shape[2] != d_qk:
        raise ValueError(f"kv: expected shape [s_kv, 1, {d_qk}] (d_qk is that of q), got {list(shape)}")
    if not shape[0]:
        raise ValueError(f"kv: expected at least 1 token, got shape {list(shape)}")
    stride, _, step = usable_strides(shape, strides)
    if step != 1:
        raise ValueError(f"kv: expected a contiguous last dimension, got strides {list(strides)} (elements)")
    if ptr & 15 or stride & 7 or stride < 0:
        raise ValueError(
            "kv: expected a 16-byte aligned address and a stride of tokens that is a multiple of 8, not "
            f"negative, got address {ptr:#x}, strides {list(strides)} (elements)"
        )
    return Cache(1, shape[0], 2 * stride, 2 * d_qk, 0, 0, 0)


def _empty_results(checked: _Checked, out: Any, q: Fields) -> tuple[Any, Any, Any]:
    """The results of a call without query tokens."""
    _, _, _, dtype, device, framework, _ = q
    s_q, h_q = checked.s_q, checked.h_q
    if out is None:
        out = framework.empty((s_q, h_q, D_V), dtype, device)
    max_logits, lse = (framework.empty((s_q, h_q), "float32", device) for _ in range(2))
    return out, max_logits, lse


def _prepare(checked: _Checked, key: tuple[Any, ...], arrays: _Arrays) -> PreparedCall:
    """Load the kernels of a call and work out their parameters."""
    softmax_scale, lse_factor, batch_invariant = key
    s_q, h_q, d_qk = checked.s_q, checked.h_q, checked.d_qk
    _, _, _, dtype, device, framework, _ = arrays.q
    results = [((s_q, h_q, D_V), dtype), ((s_q, h_q), "float32"), ((s_q, h_q), "float32")]
    if arrays.out is not None:
        del results[0]
    prepared = mla_sparse_prefill.prepare(
        SparsePrefillCall(
            device=device,
            format=checked.format,
            d_qk=d_qk,
            load_bytes=checked.load_bytes,
            s_q=s_q,
            h_q=h_q,
            cache=checked.cache,
            q_strides=checked.q_strides.q,
            q_rope_strides=checked.q_strides.q_rope,
            out_strides=checked.out_strides,
            num_parts=mla_metadata.num_sm_parts_sparse(jit.device_info(device).sm_count, 1, h_q),
            softmax_scale=softmax_scale,
            lse_factor=lse_factor,
            limited=arrays.topk_length is not None,
            batch_invariant=batch_invariant,
        ),
        framework.capture_query(device),
    )
    return PreparedCall(framework.allocator(results, prepared.scratch_bytes, device), prepared.launch)
