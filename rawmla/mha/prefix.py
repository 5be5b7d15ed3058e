"""Prefix prefill: attention of new tokens over older ones in a paged cache, and over themselves."""

from __future__ import annotations

from typing import Any

from ..call import tracing
from ..call.arrays import READERS, Fields, address_of, is_array, read_given
from ..call.checks import as_bool, as_int, as_softmax_scale, check_streams, show
from ..call.memo import Memo, PreparedCall, kind_of
from ..kernels import mha_forward
from ..kernels.mha_forward import NO_BOUND, MhaForwardCall
from .arguments import as_length
from .forward import SEPARATE, copies_of
from .prefix_arrays import CACHE_DTYPES, PrefixArrays, PrefixChecked, check_arrays
from .traced import operators

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
    """Attention of requests' new tokens over their older ones, in a paged cache, and over themselves.

    Request r has the rows `b_start_loc[r]` to `b_start_loc[r + 1] - 1` of q, k, v and o, query_len of them,
    and `ctx_len = max(b_seq_len[r] - query_len, 0)` older tokens in the cache. Its token at position t is,
    for t < ctx_len, token `t % block_size` of page `b_loc[r, t // block_size]`, and from there on row
    `b_start_loc[r] + t - ctx_len` of k and v. Query j is at position u = ctx_len + j and sees the tokens with
    t <= u. For every head `S = sm_scale * Q @ K.T`, with ALiBi `S += slope * (t - u)`, and
    `o = softmax(S) @ V`. Products take q's dtype and add up in float32; scores, softmax and sums are float32,
    and probabilities are rounded to q's dtype before the second product.

    Arrays are torch CUDA tensors, CuPy arrays, or DLPack arrays of other libraries in CUDA memory. All are
    on the device of `q`, which need not be the current one. Arrays of two frameworks in one call need the
    same current stream in both. Strides are in elements.

    Parameters
    ----------
    q : array
        bfloat16 or float16 `[tokens, h_q, d]`, d 1 to 256, less than 2**30 tokens.
    k, v : array or None
        `[tokens, h_kv, d]` in q's dtype. Query head h reads KV head `h // (h_q / h_kv)`, and h_q is a
        multiple of h_kv. Both None: the new tokens are read from the cache too, at their positions; those
        from b_seq_len on do not exist.
        q, k and v are read where they lie if their last dimension is contiguous, their address a multiple of
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
        Of FP8 caches: a value is the float8 number times this, a positive number or a float32 array of one
        element (shape `[]` or `[1]`), which the host does not read. Otherwise they are not looked at.
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
    Allocates the copies that are named above, each with the framework of its array, and scratch with that of
    `q`: 16 bytes, which are cleared, or, where keys are split over multiprocessors because queries are few,
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
    if tracing.is_traced(q):
        return operators().context_attention_fwd(
            q, k, v, o, kv_cache_dtype, k_cache, v_cache, b_loc, b_start_loc, b_seq_len, max_seq_len,
            max_input_len, k_scale, v_scale, alibi_slopes, sliding_window, sm_scale, skip_decode,
            fp8_out_scale, sinks, is_block_table_ptr, interleaved_v_pack_factor, causal,
        )  # fmt: skip
    if causal.__class__ is not bool:
        causal = as_bool("causal", causal)
    if skip_decode.__class__ is not bool:
        skip_decode = as_bool("skip_decode", skip_decode)
    if is_block_table_ptr.__class__ is not bool:
        is_block_table_ptr = as_bool("is_block_table_ptr", is_block_table_ptr)
    if max_seq_len is not None:
        as_length("max_seq_len", max_seq_len)
    max_input_len = as_length("max_input_len", max_input_len)
    pack = as_length("interleaved_v_pack_factor", interleaved_v_pack_factor)
    window = _as_window(sliding_window)
    if sm_scale is not None:
        sm_scale = as_softmax_scale(sm_scale, "sm_scale")
    cache_dtype = _as_cache_dtype(kv_cache_dtype)
    if alibi_slopes is not None and not causal:
        raise ValueError(f"alibi_slopes: expected None with causal=False, got {show(alibi_slopes)}")
    if (k is None) != (v is None):
        missing, given = ("k", "v") if k is None else ("v", "k")
        raise ValueError(f"{missing}: expected an array, as {given} is one, or both None, got None")
    k_number = v_number = k_scale_view = v_scale_view = None
    if cache_dtype != "same":
        k_number, k_scale_view = _read_scale(k_scale, "k_scale")
        v_number, v_scale_view = _read_scale(v_scale, "v_scale")
    fp8_out = fp8_out_scale is not None
    out_number, out_scale_view = _read_scale(fp8_out_scale, "fp8_out_scale") if fp8_out else (None, None)
    q_view, own_k, own_v = READERS[type(q)](q, "q"), read_given(k, "k"), read_given(v, "v")
    # In the order of PrefixArrays, which only checks need.
    views = (
        q_view,
        own_k,
        own_v,
        READERS[type(o)](o, "o"),
        READERS[type(k_cache)](k_cache, "k_cache"),
        READERS[type(v_cache)](v_cache, "v_cache"),
        READERS[type(b_loc)](b_loc, "b_loc"),
        READERS[type(b_start_loc)](b_start_loc, "b_start_loc"),
        READERS[type(b_seq_len)](b_seq_len, "b_seq_len"),
        k_scale_view,
        v_scale_view,
        read_given(alibi_slopes, "alibi_slopes"),
        read_given(sinks, "sinks"),
        out_scale_view,
    )
    options = (kv_cache_dtype, pack, is_block_table_ptr, fp8_out)
    kind = (*[kind_of(view) for view in views], options)
    latest_kind, checked = _checked.latest
    if latest_kind != kind:
        checked = _checked.get(kind) or _checked.keep(kind, check_arrays(PrefixArrays(*views), *options))
        _checked.latest = kind, checked
    b, copied, has_others, default_scale, _, calls = checked
    _, (tokens, *_), _, _, device, framework, _ = q_view
    if has_others:
        check_streams(PrefixArrays(*views), device, framework)
    max_query_len = min(max_input_len, tokens)
    if not b or max_query_len < (2 if skip_decode else 1):
        return o

    key = (
        max_query_len, default_scale if sm_scale is None else sm_scale, window, causal, skip_decode,
        k_number, v_number, out_number,
    )  # fmt: skip
    call = calls.get(key) or calls.keep(key, _prepare(checked, key, PrefixArrays(*views)))
    addresses = [address_of(view) for view in views]
    if copied is not None:
        copies = copies_of(SEPARATE, copied, (q_view, own_k, own_v))  # alive until the launch
        for i, copy in enumerate(copies):
            if copy is not None:
                _, addresses[i] = copy
    (scratch,) = call.allocate()
    scratch_ptr = 0 if scratch is None else framework.pointer(scratch)
    (
        q_ptr, k_ptr, v_ptr, o_ptr, k_cache_ptr, v_cache_ptr, table, start_loc, seq_len, k_scale_ptr,
        v_scale_ptr, slopes, sinks_ptr, out_scale,
    ) = addresses  # fmt: skip
    # In the order of MhaForwardAddresses.
    addresses = [
        q_ptr, k_ptr, v_ptr, o_ptr, 0, start_loc, 0, 0, seq_len, sinks_ptr, slopes, table, k_cache_ptr,
        v_cache_ptr, k_scale_ptr, v_scale_ptr, out_scale,
    ]  # fmt: skip
    call.launch(framework.current_stream(device), tuple(addresses), scratch_ptr)
    return o


_checked: Memo[PrefixChecked] = Memo(shared=True)


def _as_window(sliding_window: Any) -> int:
    """How many tokens before itself a token sees."""
    if sliding_window is None:
        return NO_BOUND
    window = as_int("sliding_window", sliding_window)
    return min(window - 1, NO_BOUND) if window > 0 else NO_BOUND


def _as_cache_dtype(kv_cache_dtype: Any) -> str:
    if not isinstance(kv_cache_dtype, str):
        raise TypeError(f"kv_cache_dtype: expected a str, got {show(kv_cache_dtype)}")
    cache_dtype = CACHE_DTYPES.get(kv_cache_dtype)
    if cache_dtype is None:
        raise ValueError(f"kv_cache_dtype: expected one of {', '.join(CACHE_DTYPES)}, got {kv_cache_dtype!r}")
    return cache_dtype


def _read_scale(scale: Any, name: str) -> tuple[float | None, Fields | None]:
    """A scale as a number, or as the fields of an array, and None for the other."""
    if scale.__class__ is not float and is_array(scale):
        return None, READERS[type(scale)](scale, name)
    return as_softmax_scale(scale, name, "a number or a float32 array of one element"), None


def _prepare(checked: PrefixChecked, key: tuple[Any, ...], arrays: PrefixArrays) -> PreparedCall:
    """Load the kernel of a call and work out its parameters."""
    max_query_len, sm_scale, window, causal, skip_decode, k_scale, v_scale, fp8_out_scale = key
    _, (tokens, *_), _, dtype, device, framework, _ = arrays.q
    of_arrays = checked.sizes._asdict()
    of_arrays["cache"] = checked.sizes.cache._replace(
        skip_decode=skip_decode, k_scale=k_scale, v_scale=v_scale, out_scale=fp8_out_scale
    )
    prepared = mha_forward.PreparedMhaForward(
        MhaForwardCall(
            **of_arrays,
            device=device,
            dtype=dtype,
            b=checked.b,
            k_batches=checked.b,
            varlen=True,
            max_seqlen_q=max_query_len,
            max_seqlen_k=max_query_len,
            total_q=tokens,
            total_k=0 if arrays.k is None else tokens,
            lse_strides=(0, tokens),
            softmax_scale=sm_scale,
            window_left=window,
            window_right=0 if causal else NO_BOUND,
            sink_dtype=None if arrays.sinks is None else arrays.sinks[3],
            has_alibi=arrays.alibi_slopes is not None,
        ),
        framework.capture_query(device),
    )
    return PreparedCall(framework.allocator([], prepared.scratch_bytes, device), prepared.launch)
