"""One call of prefix prefill: attention of new tokens over a paged cache and over themselves."""

from __future__ import annotations

from typing import Any

from ..call.arrays import READERS, is_array
from ..call.checks import as_bool, as_int, as_softmax_scale, check_streams, show
from ..call.memo import Memo, PreparedCall
from ..kernels import mha_forward
from ..kernels.mha_forward import NO_BOUND, MhaForwardCall
from .arguments import as_length
from .forward import SEPARATE, copies_of, kinds_of
from .prefix_arrays import CACHE_DTYPES, PrefixArrays, PrefixChecked, PrefixOptions, check_arrays

__all__ = ["prefill"]


def prefill(arrays: PrefixArrays, options: PrefixOptions) -> Any:
    """Write attention into ``arrays.o``, and return it."""
    (
        kv_cache_dtype, max_seq_len, max_input_len, sliding_window, sm_scale, skip_decode,
        is_block_table_ptr, pack, causal,
    ) = options  # fmt: skip
    if causal.__class__ is not bool:
        causal = as_bool("causal", causal)
    if skip_decode.__class__ is not bool:
        skip_decode = as_bool("skip_decode", skip_decode)
    if is_block_table_ptr.__class__ is not bool:
        is_block_table_ptr = as_bool("is_block_table_ptr", is_block_table_ptr)
    if max_seq_len is not None:
        as_length("max_seq_len", max_seq_len)
    max_input_len = as_length("max_input_len", max_input_len)
    pack = as_length("interleaved_v_pack_factor", pack)
    window = _as_window(sliding_window)
    if sm_scale is not None:
        sm_scale = as_softmax_scale(sm_scale, "sm_scale")
    cache_dtype = _as_cache_dtype(kv_cache_dtype)
    (
        q, k, v, o, k_cache, v_cache, table, starts, lengths, given_k_scale, given_v_scale, slopes, sinks,
        given_out_scale,
    ) = arrays  # fmt: skip
    if slopes is not None and not causal:
        raise ValueError(f"alibi_slopes: expected None with causal=False, got {show(slopes)}")
    if (k is None) != (v is None):
        missing, given = ("k", "v") if k is None else ("v", "k")
        raise ValueError(f"{missing}: expected an array, as {given} is one, or both None, got None")
    k_number = v_number = out_number = k_scale = v_scale = out_scale = None
    if cache_dtype != "same":
        k_number, k_scale = _number_or_array(given_k_scale, "k_scale")
        v_number, v_scale = _number_or_array(given_v_scale, "v_scale")
    fp8_out = given_out_scale is not None
    if fp8_out:
        out_number, out_scale = _number_or_array(given_out_scale, "fp8_out_scale")
    q_view = READERS[type(q)](q, "q")
    views = (
        q_view,
        None if k is None else READERS[type(k)](k, "k"),
        None if v is None else READERS[type(v)](v, "v"),
        READERS[type(o)](o, "o"),
        READERS[type(k_cache)](k_cache, "k_cache"),
        READERS[type(v_cache)](v_cache, "v_cache"),
        READERS[type(table)](table, "b_loc"),
        READERS[type(starts)](starts, "b_start_loc"),
        READERS[type(lengths)](lengths, "b_seq_len"),
        None if k_scale is None else READERS[type(k_scale)](k_scale, "k_scale"),
        None if v_scale is None else READERS[type(v_scale)](v_scale, "v_scale"),
        None if slopes is None else READERS[type(slopes)](slopes, "alibi_slopes"),
        None if sinks is None else READERS[type(sinks)](sinks, "sinks"),
        None if out_scale is None else READERS[type(out_scale)](out_scale, "fp8_out_scale"),
    )
    of_arrays = (kv_cache_dtype, pack, is_block_table_ptr, fp8_out)
    kind = (kinds_of(views), of_arrays)
    latest_kind, checked = _checked.latest
    if latest_kind != kind:
        checked = _checked.get(kind) or _checked.keep(kind, check_arrays(PrefixArrays(*views), *of_arrays))
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
    addresses = [0 if view is None else view[0] for view in views]
    if copied is not None:
        copies = copies_of(SEPARATE, copied, views[:3])  # alive until the launch
        for i, copy in enumerate(copies):
            if copy is not None:
                _, addresses[i] = copy
    (scratch,) = call.allocate()
    scratch_ptr = 0 if scratch is None else framework.pointer(scratch)
    (
        q_ptr, k_ptr, v_ptr, o_ptr, k_cache_ptr, v_cache_ptr, table_ptr, start_loc, seq_len, k_scale_ptr,
        v_scale_ptr, slopes_ptr, sinks_ptr, out_scale_ptr,
    ) = addresses  # fmt: skip
    # In the order of MhaForwardAddresses.
    addresses = [
        q_ptr, k_ptr, v_ptr, o_ptr, 0, start_loc, 0, 0, seq_len, sinks_ptr, slopes_ptr, table_ptr,
        k_cache_ptr, v_cache_ptr, k_scale_ptr, v_scale_ptr, out_scale_ptr,
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


def _number_or_array(scale: Any, name: str) -> tuple[float | None, Any]:
    """Split a scale into a number and an array, of which one is None."""
    if scale.__class__ is not float and is_array(scale):
        return None, scale
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
