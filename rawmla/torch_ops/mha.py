"""The operators of dense attention, its backward and prefix prefill, registered as in
`rawmla.torch_ops.mla`.

A window has two arguments, whose bounds are -1 for none. Packed arrays are split before: parts are views. A
scale that may be a number or a tensor has two arguments, of which one at least is None. A backward has an
``output_mask``, as aten's: which of dq, dk, dv and dsink are computed. Others have no elements.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import reference
from ..call import autograd
from ..kernels.mha_backward_variants import ALL, Needs
from ..mha import backward, forward, prefix
from ..mha.arguments import order_of
from ..mha.autograd import WHAT
from ..mha.prefix_arrays import PrefixArrays, PrefixOptions
from ..mha.records import DenseArrays, DenseOptions, Gradients, options_of
from .registration import NoExample, empty_lse, example, register

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


def _names_in(schema: str) -> list[str]:
    return [argument.split()[-1] for argument in schema.split(", ")]


class _Form:
    """Dense attention with or without cu_seqlens, as operators call it.

    ``schema`` has the arguments that all operators of the form share, but for q, k and v.
    """

    def __init__(self, name: str, schema: str) -> None:
        self.name = name
        self.names = _names_in(schema)

    def records(
        self, q: Any, k: Any, v: Any, values: tuple[Any, ...], out: Any = None
    ) -> tuple[DenseArrays, DenseOptions]:
        """Make the records of a call from the values of the schema's arguments."""
        given = dict(zip(self.names, values, strict=True))
        get = given.get
        arrays = DenseArrays._make([q, k, v, *[get(name) for name in DenseArrays._fields[3:-1]], out])
        options = options_of(
            0.0, get("softmax_scale"), get("causal"), get("deterministic"), get("is_varlen", False),
            (get("window_left"), get("window_right")), get("softcap"), 0,
            (get("max_seqlen_q"), get("max_seqlen_k")) if "max_seqlen_q" in given else None,
        )  # fmt: skip
        return arrays, options

    def keywords(self, values: tuple[Any, ...]) -> dict[str, Any]:
        """Make keywords of the reference from these values."""
        given = dict(zip(self.names, values, strict=True))
        given["window_size"] = (given.pop("window_left"), given.pop("window_right"))
        return given

    def attend(self, q: Any, k: Any, v: Any, *values: Any, out: Any = None) -> Any:
        """Compute out and lse with kernels."""
        arrays, options = self.records(q, k, v, values, out)
        return forward.attend(arrays, options)

    def attend_in_reference(self, q: Any, k: Any, v: Any, *values: Any, out: Any = None) -> Any:
        """Compute out and lse with the reference."""
        return getattr(reference, f"{self.name}_func")(q, k, v, **self.keywords(values), out=out)

    def backpropagate(
        self, needs: Needs, given: tuple[Any, Any, Any], dout: Any, q: Any, k: Any, v: Any, *others: Any
    ) -> Result:
        """Compute dq, dk, dv and dsink with kernels; ``given`` are the first three, or None."""
        out, lse, dlse, *values = others
        arrays, options = self.records(q, k, v, tuple(values))
        made = backward.backpropagate(arrays, Gradients(dout, out, lse, dlse, *given), options, needs)
        return _without_none(dout, made, needs)

    def backpropagate_in_reference(
        self, needs: Needs, given: tuple[Any, Any, Any], dout: Any, q: Any, k: Any, v: Any, *others: Any
    ) -> Result:
        """Compute the same with the reference."""
        out, lse, dlse, *values = others
        function = getattr(reference, f"{self.name}_backward")
        keywords = {**self.keywords(tuple(values)), **dict(zip(("dq", "dk", "dv"), given, strict=True))}
        made = function(dout, q, k, v, out, lse, dlse=dlse, **keywords)
        return _without_none(dout, (*made, None), needs)


def _without_none(dout: Any, made: tuple[Any, ...], needs: Needs) -> Result:
    """Replace gradients that are not needed, or are of no sink, by tensors without elements."""
    if not isinstance(dout, torch.Tensor):  # a stand-in, of which the results do not matter
        return made
    wanted = zip(made, needs, strict=False)
    return tuple([one if is_wanted and one is not None else _nothing(dout) for one, is_wanted in wanted])


_PREFIX_NAMES = _names_in(_PREFIX.replace("(a!)", ""))


def _prefix_keywords(values: tuple[Any, ...]) -> dict[str, Any]:
    """Make keywords of `context_attention_fwd` from the values of the schema's arguments."""
    given = dict(zip(_PREFIX_NAMES, values, strict=True))
    for name in ("k_scale", "v_scale", "fp8_out_scale"):
        number = given.pop(f"{name}_number")
        if given[name] is None:
            given[name] = number
    return given


def _prefill(*values: Any) -> Any:
    given = _prefix_keywords(values)
    arrays = PrefixArrays._make([given[name] for name in PrefixArrays._fields])
    options = PrefixOptions._make([given[name] for name in PrefixOptions._fields])
    return prefix.prefill(arrays, options)


def _empty_out(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
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
    return q.new_empty_strided(shape, strides)


def _empty_varlen_lse(q: torch.Tensor) -> torch.Tensor:
    tokens, h_q, _ = q.shape
    return q.new_empty((h_q, tokens), dtype=torch.float32).t()


def _nothing(q: torch.Tensor) -> torch.Tensor:
    return q.new_empty(0, dtype=torch.float32)


def _empty_dsink(q: torch.Tensor, attn_sink: torch.Tensor | None) -> torch.Tensor:
    return _nothing(q) if attn_sink is None else attn_sink.new_empty(attn_sink.shape)


def _register(name: str, schema: str, empty_lse: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Register a form of dense attention and its backward, and both once more for results that are given."""
    form = _Form(name, schema)
    names = form.names
    sink_at = names.index("attn_sink")

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

    def into(attend: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: attend(*args[:-1], out=args[-1])[1]

    def masked(backpropagate: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: backpropagate(Needs(*args[-1]), (None, None, None), *args[:-1])

    def backward_into(backpropagate: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: backpropagate(ALL, args[-3:], *args[:-3])[-1]

    register(
        f"{name}({_ARRAYS}, {schema}) -> (Tensor, Tensor)",
        form.attend,
        form.attend_in_reference,
        lambda q, k, v, *args: (_empty_out(q, v), empty_lse(q)),
        (("q", "k", "v", "attn_sink"), graph),
    )
    register(
        f"{name}_out({_ARRAYS}, {schema}, Tensor(a!) out) -> Tensor",
        into(form.attend),
        into(form.attend_in_reference),
        lambda q, *args: empty_lse(q),
    )
    register(
        f"{name}_backward({_BACKWARD}, {schema}, bool[4] output_mask) -> (Tensor, Tensor, Tensor, Tensor)",
        masked(form.backpropagate),
        masked(form.backpropagate_in_reference),
        lambda dout, q, k, v, out, lse, dlse, *args: (
            *[
                _empty_out(x, x) if wanted else _nothing(q)
                for x, wanted in zip((q, k, v), args[-1][:3], strict=True)
            ],
            _empty_dsink(q, args[sink_at] if args[-1][3] else None),
        ),
    )
    register(
        f"{name}_backward_out({_BACKWARD}, {schema}, {_GRADIENTS}) -> Tensor",
        backward_into(form.backpropagate),
        backward_into(form.backpropagate_in_reference),
        lambda dout, q, k, v, out, lse, dlse, *args: _empty_dsink(q, args[sink_at]),
    )


_register("flash_attn_varlen", _VARLEN, _empty_varlen_lse)
_register("flash_attn", _FIXED, empty_lse)
register(
    f"context_attention_out({_PREFIX}) -> ()",
    _prefill,
    lambda *values: reference.context_attention_fwd(**_prefix_keywords(values)),
    None,
)
