"""One backward call of dense attention, from the arrays to the launch, laid out as `rawmla.mha.forward`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..call.arrays import Fields, NewArray, address_of, aligned_strides, read_given
from ..call.checks import as_bool, as_softmax_scale, check_kind, check_place
from ..call.memo import Memo, kind_of
from ..kernels import mha_backward
from ..kernels.mha_backward import BackwardAddresses, BackwardCall
from ..kernels.mha_backward_variants import Needs
from .arguments import (
    as_length,
    as_softcap,
    as_window,
    check_options,
    check_out_layout,
    check_softcap,
    fresh_out_strides,
    walked,
)
from .forward import SEPARATE, Arrays, Checked, check_arrays, check_places, copies_of, of_three

__all__ = ["backpropagate"]

Strides = tuple[int, int, int]


class _Gradients(NamedTuple):
    """Further arrays of a call by the names of the arguments; None: not given."""

    dout: Fields
    out: Fields
    lse: Fields
    dlse: Fields | None
    dq: Fields | None
    dk: Fields | None
    dv: Fields | None


class _BackwardChecked(NamedTuple):
    """What follows from the kinds of the arrays, which passed the checks."""

    inputs: Checked
    copied: tuple[bool, bool]  # dout and out
    strides: dict[str, Any]  # of all but q, k and v, as `BackwardCall` names them
    calls: Memo[_Prepared]


class _Prepared(NamedTuple):
    """What a call does."""

    allocate: Callable[[], list[Any]]
    """Makes what is needed of dq, dk and dv, unless it is given, and of dsink, and the scratch."""
    launch: Callable[..., None] | None
    """Enqueues the kernels, as `PreparedMhaBackward.launch`; None: there is nothing to be done."""


_checked: Memo[_BackwardChecked] = Memo(shared=True)


def backpropagate(
    dout: Fields,
    q: Fields,
    k: Fields,
    v: Fields,
    out: Fields,
    lse: Fields,
    cu_seqlens_q: Fields | None,
    cu_seqlens_k: Fields | None,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    dq: Any,
    dk: Any,
    dv: Any,
    causal: Any,
    softmax_scale: Any,
    is_varlen: Any,
    dlse: Any,
    deterministic: Any,
    window_size: Any,
    softcap: Any,
    attn_sink: Any,
    alibi_slopes: Any,
    seqused_q: Any,
    seqused_k: Any,
    needs: Needs,
) -> tuple[Any, Any, Any, Any]:
    """`flash_attn_varlen_backward`, or `flash_attn_backward` without cu_seqlens. Arrays up to there are
    read. None stands for what nobody needs, and for dsink where there are no sinks.
    """
    check_options(0.0, deterministic, 0)
    causal, is_varlen = as_bool("causal", causal), as_bool("is_varlen", is_varlen)
    deterministic = deterministic or q[5].determinism()
    left, right = as_window(window_size, causal)
    softcap = as_softcap(softcap)
    if softmax_scale is not None:
        softmax_scale = as_softmax_scale(softmax_scale)
    if cu_seqlens_q is not None:
        max_seqlen_q = as_length("max_seqlen_q", max_seqlen_q)
        max_seqlen_k = as_length("max_seqlen_k", max_seqlen_k)
    used_q, used_k = read_given(seqused_q, "seqused_q"), read_given(seqused_k, "seqused_k")
    sink, slopes = read_given(attn_sink, "attn_sink"), read_given(alibi_slopes, "alibi_slopes")
    given = [read_given(x, name) for x, name in ((dq, "dq"), (dk, "dk"), (dv, "dv"))]
    arrays = Arrays(q, k, v, cu_seqlens_q, cu_seqlens_k, used_q, used_k, sink, slopes, None)
    more = _Gradients(dout, out, lse, read_given(dlse, "dlse"), *given)
    kind = tuple([kind_of(view) for view in (*arrays, *more)])
    checked = _checked.get(kind) or _checked.keep(kind, _check(arrays, more))
    inputs = checked.inputs
    device, framework = q[4], q[5]
    check_places(SEPARATE, arrays)
    _check_places(more, q)
    if softmax_scale is None:
        softmax_scale = inputs.default_scale
    check_softcap(softmax_scale, softcap)

    needs = needs._replace(others=needs.others and sink is not None)
    key = (max_seqlen_q, max_seqlen_k, softmax_scale, left, right, softcap, deterministic, needs)
    prepared = checked.calls.get(key) or checked.calls.keep(key, _prepare(checked, key, arrays, more))
    made = prepared.allocate()
    scratch = made.pop()
    dsink = made.pop() if needs.others else None
    results = [
        (made.pop(0) if view is None else x) if is_needed else None
        for view, x, is_needed in zip(given, (dq, dk, dv), needs, strict=False)
    ]
    if prepared.launch is None:
        for array in (*results, dsink):
            if array is not None:
                framework.fill(array, 0.0)
    else:
        dq_ptr, dk_ptr, dv_ptr = [
            0 if x is None else framework.pointer(x) if view is None else view[0]
            for view, x in zip(given, results, strict=True)
        ]
        copies = [] if inputs.copied is None else copies_of(SEPARATE, inputs.copied, (q, k, v))
        q_ptr, k_ptr, v_ptr = [
            view[0] if copy is None else copy[1]
            for view, copy in zip((q, k, v), copies or (None,) * 3, strict=True)
        ]
        alive = [
            view[5].aligned_copy(view[6], name) if is_copied else None
            for name, view, is_copied in zip(("dout", "out"), (dout, out), checked.copied, strict=True)
        ]
        dout_ptr, out_ptr = [
            view[0] if copy is None else view[5].pointer(copy)
            for view, copy in zip((dout, out), alive, strict=True)
        ]
        addresses = BackwardAddresses(
            q_ptr, k_ptr, v_ptr, out_ptr, dout_ptr, lse[0], address_of(more.dlse), dq_ptr, dk_ptr, dv_ptr,
            address_of(cu_seqlens_q), address_of(cu_seqlens_k), address_of(used_q), address_of(used_k),
            address_of(slopes), address_of(sink), 0 if dsink is None else framework.pointer(dsink),
        )  # fmt: skip
        prepared.launch(framework.current_stream(device), addresses, framework.pointer(scratch))
    dq, dk, dv = results
    return dq, dk, dv, dsink


def _check(arrays: Arrays, more: _Gradients) -> _BackwardChecked:
    """Check the arrays of a call against each other."""
    inputs = check_arrays(SEPARATE, arrays)
    _, q_shape, _, dtype, *_ = arrays.q
    sizes = inputs.sizes
    strides: dict[str, Any] = {}
    copied = []
    wanted = (*q_shape[:-1], sizes.d_v)
    for name, view in (("dout", more.dout), ("out", more.out)):
        check_kind(name, view, dtype, wanted)
        steps = walked(view)
        copied.append(steps is None)
        strides[f"{name}_strides"] = of_three(aligned_strides(wanted)[:-1] if steps is None else steps)
    fixed = arrays.cu_seqlens_q is None
    rows = (q_shape[0], sizes.h_q, sizes.tokens_q) if fixed else (sizes.tokens_q, sizes.h_q)
    strides["dlse_strides"] = (0, 0, 0)
    for name, rows_view in (("lse", more.lse), ("dlse", more.dlse)):
        if rows_view is not None:
            check_kind(name, rows_view, "float32", rows)
            *batch, first, second = rows_view[2]
            token, head = (second, first) if fixed else (first, second)
            strides[f"{name}_strides"] = of_three((*batch, token, head))
    for name, source, gradient in (
        ("dq", arrays.q, more.dq),
        ("dk", arrays.k, more.dk),
        ("dv", arrays.v, more.dv),
    ):
        if gradient is None:
            strides[f"{name}_strides"] = of_three(fresh_out_strides(source, source[1][-1])[:-1])
        else:
            check_kind(name, gradient, dtype, tuple(source[1]))
            strides[f"{name}_strides"] = of_three(check_out_layout(gradient, name))
    _check_places(more, arrays.q)
    return _BackwardChecked(inputs, (copied[0], copied[1]), strides, Memo())


def _check_places(more: _Gradients, q: Fields) -> None:
    """Check that the further arrays are on the device of q and, if they are of another framework, on its
    stream.
    """
    for name, view in zip(_Gradients._fields, more, strict=True):
        if view is not None:
            check_place(name, view, q[4], q[5], "q")


def _prepare(checked: _BackwardChecked, key: tuple[Any, ...], arrays: Arrays, more: _Gradients) -> _Prepared:
    """Load the kernels of a call and work out their parameters."""
    max_q, max_k, softmax_scale, left, right, softcap, deterministic, needs = key
    inputs = checked.inputs
    sizes = inputs.sizes
    device, framework = arrays.q[4], arrays.q[5]
    varlen = arrays.cu_seqlens_q is not None
    results: list[NewArray] = [
        (tuple(view[1]), view[3], fresh_out_strides(view, view[1][-1]))
        for view, gradient, is_needed in zip(arrays[:3], more[-3:], needs, strict=False)
        if gradient is None and is_needed
    ]
    sink_dtype = None if arrays.attn_sink is None else arrays.attn_sink[3]
    if sink_dtype is not None and needs.others:
        results.append(((sizes.h_q,), sink_dtype))
    longest_q = min(max_q, sizes.tokens_q) if varlen else sizes.tokens_q
    longest_k = min(max_k, sizes.tokens_k) if varlen else sizes.tokens_k
    if not inputs.b or not longest_q or not longest_k:
        return _Prepared(framework.allocator(results, 0, device), None)
    prepared = mha_backward.PreparedMhaBackward(
        BackwardCall(
            device=device,
            dtype=arrays.q[3],
            b=inputs.b,
            k_batches=inputs.b,
            h_q=sizes.h_q,
            h_kv=sizes.h_kv,
            d_qk=sizes.d_qk,
            d_v=sizes.d_v,
            varlen=varlen,
            max_seqlen_q=longest_q,
            max_seqlen_k=longest_k,
            total_q=sizes.tokens_q,
            total_k=sizes.tokens_k,
            q_strides=sizes.q_strides,
            k_strides=sizes.k_strides,
            v_strides=sizes.v_strides,
            **checked.strides,
            softmax_scale=softmax_scale,
            window_left=left,
            window_right=right,
            softcap=softcap,
            alibi_stride_b=sizes.alibi_stride_b,
            has_alibi=arrays.alibi_slopes is not None,
            sink_dtype=sink_dtype,
            has_dlse=more.dlse is not None,
            deterministic=deterministic,
            needs=needs,
        ),
        framework.capture_query(device),
    )
    return _Prepared(framework.allocator(results, prepared.scratch_bytes, device), prepared.launch)
