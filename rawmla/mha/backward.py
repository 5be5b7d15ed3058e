"""One backward call of dense attention, from the arrays to the launch, laid out as `rawmla.mha.forward`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..call.arrays import READERS, address_of
from ..call.checks import check_kind, check_place
from ..call.frameworks import Fields, NewArray, aligned_strides
from ..call.memo import Memo
from ..kernels import mha_backward
from ..kernels.mha_backward import BackwardAddresses, BackwardCall
from ..kernels.mha_backward_variants import Needs
from .arguments import check_out_layout, check_softcap, fresh_out_strides, walked
from .forward import (
    SEPARATE,
    Checked,
    check_arrays,
    check_places,
    copies_of,
    kinds_of,
    of_three,
    read,
    require,
)
from .records import DenseArrays, DenseOptions, Gradients, options_of

__all__ = ["backpropagate", "options_of"]

Strides = tuple[int, int, int]


class _BackwardChecked(NamedTuple):
    """Sizes and strides of arrays that passed the checks."""

    inputs: Checked
    copied: tuple[bool, bool]  # dout and out
    strides: dict[str, Any]  # of all but q, k and v, as `BackwardCall` names them
    calls: Memo[_Prepared]


class _Prepared(NamedTuple):
    """How to run one kind of call: an allocator of its results and a prepared launch."""

    allocate: Callable[[], list[Any]]
    """Makes what is needed of dq, dk and dv, unless it is given, and of dsink, and the scratch."""
    launch: Callable[..., None] | None
    """Enqueues the kernels, as `PreparedMhaBackward.launch`; None: there is nothing to be done."""


_checked: Memo[_BackwardChecked] = Memo(shared=True)


def backpropagate(
    arrays: DenseArrays, gradients: Gradients, options: DenseOptions, needs: Needs
) -> tuple[Any, Any, Any, Any]:
    """Compute dq, dk, dv and dsink; None stands for what is not needed, and for dsink without a sink."""
    _, views = read(arrays)
    read_gradients = _read(gradients)
    given = gradients[-3:]
    kind = (options.max_seqlens is None, kinds_of(views), kinds_of(read_gradients))
    checked = _checked.get(kind) or _checked.keep(
        kind, _check(DenseArrays._make(views), read_gradients, options)
    )
    inputs = checked.inputs
    q, k, v, cu_seqlens_q, cu_seqlens_k, used_q, used_k, sink, slopes, _ = views
    dout, out, lse, dlse, *given_views = read_gradients
    device, framework = q[4], q[5]
    check_places(SEPARATE, views)
    _check_places(read_gradients, q)
    if framework.determinism():
        options = options._replace(deterministic=True)

    needs = needs._replace(others=needs.others and sink is not None)
    key = (options, needs)
    prepared = checked.calls.get(key) or checked.calls.keep(
        key, _prepare(checked, options, needs, DenseArrays._make(views), read_gradients)
    )
    made = prepared.allocate()
    scratch = made.pop()
    dsink = made.pop() if needs.others else None
    results = [
        (made.pop(0) if view is None else x) if is_needed else None
        for view, x, is_needed in zip(given_views, given, needs, strict=False)
    ]
    if prepared.launch is None:
        for array in (*results, dsink):
            if array is not None:
                framework.fill(array, 0.0)
    else:
        dq_ptr, dk_ptr, dv_ptr = [
            0 if x is None else framework.pointer(x) if view is None else view[0]
            for view, x in zip(given_views, results, strict=True)
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
            q_ptr, k_ptr, v_ptr, out_ptr, dout_ptr, lse[0], address_of(dlse), dq_ptr, dk_ptr, dv_ptr,
            address_of(cu_seqlens_q), address_of(cu_seqlens_k), address_of(used_q), address_of(used_k),
            address_of(slopes), address_of(sink), 0 if dsink is None else framework.pointer(dsink),
        )  # fmt: skip
        prepared.launch(framework.current_stream(device), addresses, framework.pointer(scratch))
    dq, dk, dv = results
    return dq, dk, dv, dsink


def _read(gradients: Gradients) -> Gradients:
    dout, out, lse, dlse, dq, dk, dv = gradients
    return Gradients(
        READERS[type(dout)](dout, "dout"),
        READERS[type(out)](out, "out"),
        READERS[type(lse)](lse, "lse"),
        None if dlse is None else READERS[type(dlse)](dlse, "dlse"),
        None if dq is None else READERS[type(dq)](dq, "dq"),
        None if dk is None else READERS[type(dk)](dk, "dk"),
        None if dv is None else READERS[type(dv)](dv, "dv"),
    )


def _check(arrays: DenseArrays, gradients: Gradients, options: DenseOptions) -> _BackwardChecked:
    """Check the arrays of a call against each other."""
    inputs = check_arrays(SEPARATE, arrays, options)
    _, q_shape, _, dtype, *_ = arrays.q
    sizes = inputs.sizes
    strides: dict[str, Any] = {}
    copied = []
    wanted = (*q_shape[:-1], sizes.d_v)
    for name, view in (("dout", gradients.dout), ("out", gradients.out)):
        check_kind(name, view, dtype, wanted)
        steps = walked(view)
        copied.append(steps is None)
        strides[f"{name}_strides"] = of_three(aligned_strides(wanted)[:-1] if steps is None else steps)
    fixed = options.max_seqlens is None
    rows = (q_shape[0], sizes.h_q, sizes.tokens_q) if fixed else (sizes.tokens_q, sizes.h_q)
    strides["dlse_strides"] = (0, 0, 0)
    for name, rows_view in (("lse", gradients.lse), ("dlse", gradients.dlse)):
        if rows_view is not None:
            check_kind(name, rows_view, "float32", rows)
            *batch, first, second = rows_view[2]
            token, head = (second, first) if fixed else (first, second)
            strides[f"{name}_strides"] = of_three((*batch, token, head))
    for name, source, gradient in (
        ("dq", arrays.q, gradients.dq),
        ("dk", arrays.k, gradients.dk),
        ("dv", arrays.v, gradients.dv),
    ):
        if gradient is None:
            strides[f"{name}_strides"] = of_three(fresh_out_strides(source, source[1][-1])[:-1])
        else:
            check_kind(name, gradient, dtype, tuple(source[1]))
            strides[f"{name}_strides"] = of_three(check_out_layout(gradient, name))
    _check_places(gradients, arrays.q)
    return _BackwardChecked(inputs, (copied[0], copied[1]), strides, Memo())


def _check_places(gradients: Gradients, q: Fields) -> None:
    """Check that the further arrays are on the device of q and, if they are of another framework, on its
    stream.
    """
    for name, view in zip(Gradients._fields, gradients, strict=True):
        if view is not None:
            check_place(name, view, q[4], q[5], "q")


def _prepare(
    checked: _BackwardChecked, options: DenseOptions, needs: Needs, arrays: DenseArrays, gradients: Gradients
) -> _Prepared:
    """Load the kernels of a call and work out their parameters."""
    inputs = checked.inputs
    sizes = inputs.sizes
    device, framework = arrays.q[4], arrays.q[5]
    softmax_scale = inputs.default_scale if options.softmax_scale is None else options.softmax_scale
    check_softcap(softmax_scale, options.softcap)
    if options.max_seqlens is not None:
        require("cu_seqlens_q", arrays.cu_seqlens_q)
    left, right = options.window
    results: list[NewArray] = [
        (tuple(view[1]), view[3], fresh_out_strides(view, view[1][-1]))
        for view, gradient, is_needed in zip(arrays[:3], gradients[-3:], needs, strict=False)
        if gradient is None and is_needed
    ]
    sink_dtype = None if arrays.attn_sink is None else arrays.attn_sink[3]
    if sink_dtype is not None and needs.others:
        results.append(((sizes.h_q,), sink_dtype))
    longest_q, longest_k = sizes.tokens_q, sizes.tokens_k
    if options.max_seqlens is not None:
        max_q, max_k = options.max_seqlens
        longest_q, longest_k = min(max_q, longest_q), min(max_k, longest_k)
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
            varlen=options.max_seqlens is not None,
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
            window_right=0 if options.causal else right,
            softcap=options.softcap,
            alibi_stride_b=sizes.alibi_stride_b,
            has_alibi=arrays.alibi_slopes is not None,
            sink_dtype=sink_dtype,
            has_dlse=gradients.dlse is not None,
            deterministic=options.deterministic,
            needs=needs,
        ),
        framework.capture_query(device),
    )
    return _Prepared(framework.allocator(results, prepared.scratch_bytes, device), prepared.launch)
