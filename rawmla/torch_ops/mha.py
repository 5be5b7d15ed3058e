"""The operators of dense attention, its backward and prefix prefill, registered as those of
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
from ..mha.arguments import order_of
from ..mha.autograd import WHAT
from ..mha.gradients import gradients, varlen_gradients
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


def _varlen(
    api: Any,
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None,
    causal: bool,
    is_varlen: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    attn_sink: Any,
    alibi_slopes: Any,
    seqused_q: Any,
    seqused_k: Any,
    deterministic: bool,
    out: Any = None,
) -> Any:
    return api.flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        0.0,
        softmax_scale,
        causal,
        deterministic,
        is_varlen,
        window_size=(window_left, window_right),
        softcap=softcap,
        attn_sink=attn_sink,
        alibi_slopes=alibi_slopes,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        out=out,
    )


def _fixed(
    api: Any,
    q: Any,
    k: Any,
    v: Any,
    softmax_scale: float | None,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    attn_sink: Any,
    alibi_slopes: Any,
    deterministic: bool,
    out: Any = None,
) -> Any:
    return api.flash_attn_func(
        q,
        k,
        v,
        0.0,
        softmax_scale,
        causal,
        (window_left, window_right),
        softcap,
        alibi_slopes,
        deterministic,
        attn_sink=attn_sink,
        out=out,
    )


def _varlen_backward(
    api: Any,
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    dlse: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None,
    causal: bool,
    is_varlen: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    attn_sink: Any,
    alibi_slopes: Any,
    seqused_q: Any,
    seqused_k: Any,
    deterministic: bool,
    output_mask: list[bool],
    dq: Any = None,
    dk: Any = None,
    dv: Any = None,
) -> Any:
    function = _masked(api, varlen_gradients, "flash_attn_varlen_backward", output_mask)
    return function(
        dout,
        q,
        k,
        v,
        out,
        lse,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dq,
        dk,
        dv,
        causal,
        softmax_scale,
        is_varlen,
        dlse=dlse,
        deterministic=deterministic,
        window_size=(window_left, window_right),
        softcap=softcap,
        attn_sink=attn_sink,
        alibi_slopes=alibi_slopes,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
    )


def _fixed_backward(
    api: Any,
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    dlse: Any,
    softmax_scale: float | None,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    attn_sink: Any,
    alibi_slopes: Any,
    deterministic: bool,
    output_mask: list[bool],
    dq: Any = None,
    dk: Any = None,
    dv: Any = None,
) -> Any:
    function = _masked(api, gradients, "flash_attn_backward", output_mask)
    return function(
        dout,
        q,
        k,
        v,
        out,
        lse,
        dq,
        dk,
        dv,
        causal,
        softmax_scale,
        dlse=dlse,
        deterministic=deterministic,
        window_size=(window_left, window_right),
        softcap=softcap,
        attn_sink=attn_sink,
        alibi_slopes=alibi_slopes,
    )


def _masked(
    api: Any, function: Callable[..., Any], name: str, output_mask: list[bool]
) -> Callable[..., tuple[Any, ...]]:
    """``function``, or that of the reference under this name, with four results: what is not wanted, or is of
    no sink, has no elements.
    """

    def call(dout: Any, *args: Any, **keywords: Any) -> tuple[Any, ...]:
        if api is reference:
            made = (*getattr(reference, name)(dout, *args, **keywords), None)
        else:
            made = function(Needs(*output_mask), dout, *args, **keywords)
        if not isinstance(dout, torch.Tensor):  # a stand-in, of which the results do not matter
            return made
        wanted = zip(made, output_mask, strict=False)
        return tuple([one if is_wanted and one is not None else _nothing(dout) for one, is_wanted in wanted])

    return call


def _prefix(
    api: Any,
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
    k_scale_number: float | None,
    v_scale: Any,
    v_scale_number: float | None,
    alibi_slopes: Any,
    sliding_window: int | None,
    sm_scale: float | None,
    skip_decode: bool,
    fp8_out_scale: Any,
    fp8_out_scale_number: float | None,
    *others: Any,
) -> Any:
    return api.context_attention_fwd(
        q,
        k,
        v,
        o,
        kv_cache_dtype,
        k_cache,
        v_cache,
        b_loc,
        b_start_loc,
        b_seq_len,
        max_seq_len,
        max_input_len,
        k_scale_number if k_scale is None else k_scale,
        v_scale_number if v_scale is None else v_scale,
        alibi_slopes,
        sliding_window,
        sm_scale,
        skip_decode,
        fp8_out_scale_number if fp8_out_scale is None else fp8_out_scale,
        *others,
    )


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


def _register(
    name: str,
    options: str,
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    empty_lse: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Register a form of dense attention and its backward, and both once more for results that are given.

    ``options`` is what of their schemas all have in common.
    """
    names = [argument.split()[-1] for argument in options.split(", ")]
    sink_at = names.index("attn_sink")

    def graph(run: Callable[[], Any], q: Any, k: Any, v: Any, *given: Any) -> Any:
        saved_at = [i for i, x in enumerate(given) if isinstance(x, torch.Tensor) and i != sink_at]
        numbers = {i: x for i, x in enumerate(given) if not isinstance(x, torch.Tensor)}

        def backpropagate(
            needs: Any, dout: Any, dlse: Any, out: Any, lse: Any, inputs: Any, saved: Any
        ) -> tuple[Any, ...]:
            sink, *arrays = inputs
            needs_sink, *needed = needs
            known = {**numbers, **dict(zip(saved_at, saved, strict=True)), sink_at: sink}
            dout = autograd.gradient_of_out(dout, out)
            others = [known[i] for i in range(len(known))]
            op = getattr(torch.ops.rawmla, f"{name}_backward").default
            dq, dk, dv, dsink = op(dout, *arrays, out, lse, dlse, *others, [*needed, needs_sink])
            return dsink, dq, dk, dv

        saved = tuple([given[i] for i in saved_at])
        return autograd.attend(autograd.Call(WHAT, run, backpropagate, (given[sink_at], q, k, v), saved))

    register(
        f"{name}({_ARRAYS}, {options}) -> (Tensor, Tensor)",
        forward,
        lambda q, k, v, *args: (_empty_out(q, v), empty_lse(q)),
        (("q", "k", "v", "attn_sink"), graph),
    )
    register(
        f"{name}_out({_ARRAYS}, {options}, Tensor(a!) out) -> Tensor",
        lambda *args: forward(*args)[1],
        lambda q, *args: empty_lse(q),
    )
    register(
        f"{name}_backward({_BACKWARD}, {options}, bool[4] output_mask) -> (Tensor, Tensor, Tensor, Tensor)",
        backward,
        lambda dout, q, k, v, out, lse, dlse, *args: (
            *[
                _empty_out(x, x) if wanted else _nothing(q)
                for x, wanted in zip((q, k, v), args[-1][:3], strict=True)
            ],
            _empty_dsink(q, args[sink_at] if args[-1][3] else None),
        ),
    )
    register(
        f"{name}_backward_out({_BACKWARD}, {options}, {_GRADIENTS}) -> Tensor",
        lambda *args: backward(*args[:-3], ALL, *args[-3:])[-1],
        lambda dout, q, k, v, out, lse, dlse, *args: _empty_dsink(q, args[sink_at]),
    )


_register("flash_attn_varlen", _VARLEN, _varlen, _varlen_backward, _empty_varlen_lse)
_register("flash_attn", _FIXED, _fixed, _fixed_backward, empty_lse)
register(f"context_attention_out({_PREFIX}) -> ()", _prefix, None)
