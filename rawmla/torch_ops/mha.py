"""The operators of dense attention, its backward and prefix prefill, registered as in
`rawmla.torch_ops.mla`.

A window has two arguments, whose bounds are -1 for none. Packed arrays are split before: parts are views. A
scale that may be a number or a tensor has two arguments, of which one at least is None. A backward has an
``output_mask``, as aten's: which of dq, dk, dv and dsink are computed. Others have no elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from .. import reference
from ..call import autograd
from ..kernels.mha_backward_variants import ALL, Needs
from ..mha import backward, forward, kvcache, prefix
from ..mha.arguments import order_of
from ..mha.autograd import WHAT
from ..mha.kvcache import CacheArrays
from ..mha.prefix_arrays import PrefixArrays, PrefixOptions
from ..mha.records import DenseArrays, DenseOptions, Gradients, options_of
from .registration import NoExample, empty_lse, example, register, register_with_out

__all__: list[str] = []

Result = tuple[torch.Tensor, ...]
_MASKS = "SymInt window_left, SymInt window_right, float softcap, Tensor? attn_sink, Tensor? alibi_slopes"
_ARRAYS = "Tensor q, Tensor k, Tensor v"
_VARLEN = (
    "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, "
    f"float? softmax_scale, bool causal, bool is_varlen, {_MASKS}, Tensor? seqused_q, Tensor? seqused_k, "
    "bool deterministic"
)
_FIXED = f"float? softmax_scale, bool causal, {_MASKS}, bool deterministic"
_BACKWARD = "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dlse"
_GRADIENTS = "Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv"
_PREFIX = (
    "Tensor q, Tensor? k, Tensor? v, Tensor(a!) o, str kv_cache_dtype, Tensor k_cache, Tensor v_cache, "
    "Tensor b_loc, Tensor b_start_loc, Tensor b_seq_len, SymInt? max_seq_len, SymInt max_input_len, "
    "Tensor? k_scale, float? k_scale_number, Tensor? v_scale, float? v_scale_number, Tensor? alibi_slopes, "
    "SymInt? sliding_window, float? sm_scale, bool skip_decode, Tensor? fp8_out_scale, "
    "float? fp8_out_scale_number, Tensor? sinks, bool is_block_table_ptr, int interleaved_v_pack_factor, "
    "bool causal"
)

_OF_CACHE = (
    "Tensor? cu_seqlens_q, SymInt? max_seqlen_q, Tensor? cache_seqlens, SymInt? cache_length, "
    "Tensor? cu_seqlens_k, Tensor? cache_leftpad, Tensor? cache_batch_idx, Tensor? block_table, "
    f"float? softmax_scale, bool causal, {_MASKS}, SymInt num_splits, Tensor? q_descale, Tensor? k_descale, "
    "Tensor? v_descale"
)
_NEW_TOKENS = (
    "Tensor k, Tensor v, Tensor? cu_seqlens_k_new, Tensor? rotary_cos, Tensor? rotary_sin, "
    "Tensor? rotary_seqlens, bool rotary_interleaved"
)
_READ_CACHE = f"Tensor q, Tensor k_cache, Tensor v_cache, {_OF_CACHE}"
_APPEND = f"Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, {_NEW_TOKENS}, {_OF_CACHE}"


def _names_in(schema: str) -> list[str]:
    return [argument.split()[-1] for argument in schema.split(", ")]


_Records = tuple[DenseArrays, DenseOptions]


def _varlen_records(args: tuple[Any, ...], out: Any) -> _Records:
    """Make the records of a call from the arguments of an operator with cu_seqlens."""
    q, k, v, starts_q, starts_k, longest_q, longest_k, scale, causal, is_varlen, *others = args
    left, right, softcap, sink, slopes, used_q, used_k, deterministic = others
    arrays = DenseArrays(q, k, v, starts_q, starts_k, used_q, used_k, sink, slopes, out)
    window, longest = (left, right), (longest_q, longest_k)
    return arrays, options_of(0.0, scale, causal, deterministic, is_varlen, window, softcap, 0, longest)


def _fixed_records(args: tuple[Any, ...], out: Any) -> _Records:
    """Make the same for an operator without cu_seqlens."""
    q, k, v, scale, causal, left, right, softcap, sink, slopes, deterministic = args
    arrays = DenseArrays(q, k, v, None, None, None, None, sink, slopes, out)
    return arrays, options_of(0.0, scale, causal, deterministic, False, (left, right), softcap, 0, None)


def _backpropagate(
    records: Callable[..., _Records], args: tuple[Any, ...], needs: Needs, given: tuple[Any, ...]
) -> Result:
    """Compute dq, dk, dv and dsink with kernels; ``given`` are arrays for the first three."""
    dout, q, k, v, out, lse, dlse, *others = args
    arrays, options = records((q, k, v, *others), None)
    made = backward.backpropagate(arrays, Gradients(dout, out, lse, dlse, *given), options, needs)
    return _without_none(dout, made, needs)


def _reference_of(name: str) -> Callable[..., Any]:
    """The function of the reference, for a window of two numbers."""
    function = getattr(reference, name)
    return lambda window_left, window_right, **given: function(
        window_size=(window_left, window_right), **given
    )


def _backpropagate_in_reference(name: str, output_mask: Sequence[bool], **given: Any) -> Result:
    made = _reference_of(name)(**given)
    return _without_none(given["dout"], (*made, None), Needs(*output_mask))


def _without_none(dout: Any, made: tuple[Any, ...], needs: Needs) -> Result:
    """Replace gradients that are not needed, or are of no sink, by tensors without elements."""
    if not isinstance(dout, torch.Tensor):  # a stand-in, of which the results do not matter
        return made
    wanted = zip(made, needs, strict=False)
    return tuple([one if is_wanted and one is not None else _nothing(dout) for one, is_wanted in wanted])


_PREFIX_NAMES = _names_in(_PREFIX)


def _prefix_arguments(**given: Any) -> dict[str, Any]:
    """Make arguments of `context_attention_fwd` from the operator's, where a scale has two."""
    for name in ("k_scale", "v_scale", "fp8_out_scale"):
        number = given.pop(f"{name}_number")
        if given[name] is None:
            given[name] = number
    return given


def _prefill(*args: Any) -> Any:
    given = _prefix_arguments(**dict(zip(_PREFIX_NAMES, args, strict=True)))
    arrays = PrefixArrays._make([given[name] for name in PrefixArrays._fields])
    options = PrefixOptions._make([given[name] for name in PrefixOptions._fields])
    return prefix.prefill(arrays, options)


def _empty_out(q: torch.Tensor, v: torch.Tensor, dtype: Any = None) -> torch.Tensor:
    """A fresh out, with the strides of `rawmla.mha.arguments.fresh_out_strides`.

    Sizes may be symbolic. The order follows from their example values, so that it restricts none.
    """
    shape = (*q.shape[:-1], v.shape[-1])
    try:
        sizes, steps = (tuple([example(n) for n in numbers]) for numbers in (q.shape, q.stride()))
        order = order_of(sizes, steps)
    except NoExample:
        order = list(range(len(shape) - 1))
    strides: list[Any] = [1] * len(shape)
    step: Any = (shape[-1] + 7) // 8 * 8
    for axis in reversed(order):
        strides[axis] = step
        step = step * (max(1, shape[axis]) if isinstance(shape[axis], int) else shape[axis])
    return q.new_empty_strided(shape, strides, dtype=dtype)


def _empty_varlen_lse(q: torch.Tensor) -> torch.Tensor:
    tokens, h_q, _ = q.shape
    return q.new_empty((h_q, tokens), dtype=torch.float32).t()


def _nothing(q: torch.Tensor) -> torch.Tensor:
    return q.new_empty(0, dtype=torch.float32)


def _empty_dsink(q: torch.Tensor, attn_sink: torch.Tensor | None) -> torch.Tensor:
    return _nothing(q) if attn_sink is None else attn_sink.new_empty(attn_sink.shape)


def _graph_of(name: str, schema: str) -> Callable[..., Any]:
    """A forward call whose results have a graph, over the operator of its backward."""
    names = _names_in(schema)

    def graph(run: Callable[[], Any], q: Any, k: Any, v: Any, *values: Any) -> Any:
        tensors = {n: x for n, x in zip(names, values, strict=True) if isinstance(x, torch.Tensor)}
        numbers = {n: x for n, x in zip(names, values, strict=True) if n not in tensors}
        sink = tensors.pop("attn_sink", None)
        saved_names = tuple(tensors)  # without the tensors: autograd alone keeps these

        def backpropagate(
            needs: Any, dout: Any, dlse: Any, out: Any, lse: Any, inputs: Any, saved: Any
        ) -> tuple[Any, ...]:
            sink, *arrays = inputs
            needs_sink, *needed = needs
            known = {**numbers, **dict(zip(saved_names, saved, strict=True)), "attn_sink": sink}
            dout = autograd.gradient_of_out(dout, out)
            op = getattr(torch.ops.rawmla, f"{name}_backward").default
            others = [known[n] for n in names]
            dq, dk, dv, dsink = op(dout, *arrays, out, lse, dlse, *others, [*needed, needs_sink])
            return dsink, dq, dk, dv

        call = autograd.Call(WHAT, run, backpropagate, (sink, q, k, v), tuple(tensors.values()))
        return autograd.attend(call)

    return graph


def _register(
    name: str,
    schema: str,
    records: Callable[..., _Records],
    empty_lse: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Register a form of dense attention and its backward, and both once more for results that are given.

    ``schema`` has the arguments that these operators share, but for q, k and v.
    """
    register_with_out(
        name,
        f"{_ARRAYS}, {schema}",
        2,
        lambda *args, out: forward.attend(*records(args, out)),
        _reference_of(f"{name}_func"),
        lambda q, v, **others: (_empty_out(q, v), empty_lse(q)),
        (("q", "k", "v", "attn_sink"), _graph_of(name, schema)),
    )
    refer = partial(_backpropagate_in_reference, f"{name}_backward")
    register(
        f"{name}_backward({_BACKWARD}, {schema}, bool[4] output_mask) -> (Tensor, Tensor, Tensor, Tensor)",
        lambda *args: _backpropagate(records, args[:-1], Needs(*args[-1]), (None, None, None)),
        refer,
        lambda q, k, v, attn_sink, output_mask, **others: (
            *[
                _empty_out(x, x) if wanted else _nothing(q)
                for x, wanted in zip((q, k, v), output_mask, strict=False)
            ],
            _empty_dsink(q, attn_sink if output_mask[3] else None),
        ),
    )
    register(
        f"{name}_backward_out({_BACKWARD}, {schema}, {_GRADIENTS}) -> Tensor",
        lambda *args: _backpropagate(records, args[:-3], ALL, args[-3:])[-1],
        lambda **given: refer(ALL, **given)[-1],
        lambda q, attn_sink, **others: _empty_dsink(q, attn_sink),
    )


_register("flash_attn_varlen", _VARLEN, _varlen_records, _empty_varlen_lse)
_register("flash_attn", _FIXED, _fixed_records, empty_lse)
register(
    f"context_attention_out({_PREFIX}) -> ()",
    _prefill,
    lambda **given: reference.context_attention_fwd(**_prefix_arguments(**given)),
    None,
)


def _cache_arguments(**given: Any) -> dict[str, Any]:
    """Make arguments of `flash_attn_with_kvcache` from an operator's, where lengths and windows have two."""
    length, window = given.pop("cache_length"), (given.pop("window_left"), given.pop("window_right"))
    if given["cache_seqlens"] is None:
        given["cache_seqlens"] = length
    return {**given, "window_size": window}


def _attend_cache(schema: str) -> Callable[..., Any]:
    """The call of the operator with a schema."""
    names = _names_in(schema)

    def run(*args: Any, out: Any) -> Any:
        given = dict.fromkeys(CacheArrays._fields) | {"rotary_interleaved": True}
        given |= _cache_arguments(**dict(zip(names, args, strict=True)), out=out)
        arrays = CacheArrays._make([given[name] for name in CacheArrays._fields])
        return kvcache.attend_cache(
            arrays,
            kvcache.cache_options_of(
                given["max_seqlen_q"], given["softmax_scale"], given["causal"], given["window_size"],
                given["softcap"], 0, given["rotary_interleaved"], given["num_splits"],
            ),
        )  # fmt: skip

    return run


def _empty_results(q: torch.Tensor, v_cache: torch.Tensor, **others: Any) -> Result:
    is_fp8 = q.dtype.itemsize == 1
    lse = empty_lse(q) if q.ndim == 4 else _empty_varlen_lse(q)
    return _empty_out(q, v_cache, torch.bfloat16 if is_fp8 else None), lse


for _name, _schema in (("flash_attn_kvcache", _READ_CACHE), ("flash_attn_kvcache_append", _APPEND)):
    register_with_out(
        _name,
        _schema,
        2,
        _attend_cache(_schema),
        lambda **given: reference.flash_attn_with_kvcache(**_cache_arguments(**given)),
        _empty_results,
    )
