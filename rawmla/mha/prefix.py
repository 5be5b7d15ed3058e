"""One call of prefix prefill: attention of new tokens over a paged cache and over themselves."""

from __future__ import annotations

from typing import Any

from ..call.arguments import check_places
from ..call.arrays import READERS, address_of, is_array
from ..call.checks import as_bool, as_int, as_softmax_scale, show
from ..call.memo import Memo
from ..kernels import mha_forward
from ..kernels.mha_forward import NO_BOUND
from .arguments import as_length
from .forward import copy_where
from .prefix_arrays import CACHE_DTYPES, PrefixArrays, PrefixOptions, check_call
from .records import Prepared

_calls: Memo[Prepared] = Memo(shared=True)


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
    if given_out_scale is not None:
        out_number, out_scale = _number_or_array(given_out_scale, "fp8_out_scale")
    q, out = READERS[type(q)](q, "q"), READERS[type(o)](o, "o")
    if k is not None:
        k, v = READERS[type(k)](k, "k"), READERS[type(v)](v, "v")
    k_cache = READERS[type(k_cache)](k_cache, "k_cache")
    v_cache = READERS[type(v_cache)](v_cache, "v_cache")
    table = READERS[type(table)](table, "b_loc")
    starts = READERS[type(starts)](starts, "b_start_loc")
    lengths = READERS[type(lengths)](lengths, "b_seq_len")
    if k_scale is not None:
        k_scale = READERS[type(k_scale)](k_scale, "k_scale")
    if v_scale is not None:
        v_scale = READERS[type(v_scale)](v_scale, "v_scale")
    if slopes is not None:
        slopes = READERS[type(slopes)](slopes, "alibi_slopes")
    if sinks is not None:
        sinks = READERS[type(sinks)](sinks, "sinks")
    if out_scale is not None:
        out_scale = READERS[type(out_scale)](out_scale, "fp8_out_scale")
    q_ptr, q_shape, q_steps, dtype, device, framework, _ = q
    checked = (
        kv_cache_dtype, None, max_input_len, window, sm_scale, skip_decode, is_block_table_ptr, pack, causal
    )  # fmt: skip
    scales = k_number, v_number, out_number
    # The key has what checks depend on, as in dense decoding.
    key = (
        checked, scales,
        q_ptr & 15, q_shape, q_steps, dtype, device, framework,
        out[0] & 15, out[1:6], k and (k[0] & 15, k[1:6]), v and (v[0] & 15, v[1:6]),
        k_cache[0] & 15, k_cache[1:6], v_cache[0] & 15, v_cache[1:6], table[1:6], starts[1:6], lengths[1:6],
        k_scale and k_scale[1:6], v_scale and v_scale[1:6], slopes and slopes[1:6], sinks and sinks[1:6],
        out_scale and out_scale[1:6],
    )  # fmt: skip
    call = _calls.get(key)
    if call is None or call.mixes_frameworks:
        views = PrefixArrays(
            q, k, v, out, k_cache, v_cache, table, starts, lengths, k_scale, v_scale, slopes, sinks, out_scale
        )  # fmt: skip
        call = call or _calls.keep(key, _prepare(views, PrefixOptions._make(checked), scales))
        check_places(views._asdict())
    allocate, launch, copied, _, _ = call
    if launch is None:
        return o

    k_ptr, v_ptr = address_of(k), address_of(v)
    if copied is not None:
        (q_ptr, k_ptr, v_ptr), copies = copy_where(copied, (q, k, v), ("q", "k", "v"))
    (scratch,) = allocate()
    # In the order of MhaForwardAddresses.
    addresses = (
        q_ptr, k_ptr, v_ptr, out[0], 0, starts[0], 0, 0, lengths[0], address_of(sinks), address_of(slopes),
        table[0], k_cache[0], v_cache[0], address_of(k_scale), address_of(v_scale), address_of(out_scale),
    )  # fmt: skip
    launch(framework.current_stream(device), addresses, 0 if scratch is None else framework.pointer(scratch))
    return o


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


def _prepare(arrays: PrefixArrays, options: PrefixOptions, scales: tuple[float | None, ...]) -> Prepared:
    """Check a call, load its kernel and work out its parameters."""
    call, copied = check_call(arrays, options, scales)
    _, _, _, _, device, framework, _ = arrays.q
    kernels = None
    if call.b and call.max_seqlen_q >= (2 if options.skip_decode else 1):
        kernels = mha_forward.PreparedMhaForward(call, framework.capture_query(device))
    return Prepared.of(arrays._asdict(), [], kernels, copied)
