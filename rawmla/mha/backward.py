"""One backward call of dense attention, from the arrays to the launch, laid out as `rawmla.mha.forward`."""

from __future__ import annotations

from typing import Any

from ..call.arguments import check_places
from ..call.arrays import READERS, address_of
from ..call.frameworks import NewArray
from ..call.memo import Memo, kind_of
from ..kernels import mha_backward
from ..kernels.mha_backward import BackwardAddresses, BackwardCall
from ..kernels.mha_backward_variants import Needs
from .arguments import check_out_layout, fresh_out_strides, of_three, read_strides
from .forward import check_call, copy_where, read
from .records import DenseArrays, DenseOptions, Gradients, Prepared
from .records import options_of as options_of

_INPUTS = ("q", "k", "v", "dout", "out")

_calls: Memo[Prepared] = Memo(shared=True)


def backpropagate(
    arrays: DenseArrays, gradients: Gradients, options: DenseOptions, needs: Needs
) -> tuple[Any, Any, Any, Any]:
    """Compute dq, dk, dv and dsink; None stands for what is not needed, and for dsink without a sink."""
    _, views = read(arrays)
    gradient_views = _read(gradients)
    q, k, v, cu_seqlens_q, cu_seqlens_k, used_q, used_k, sink, slopes, _ = views
    dout, out, lse, dlse, *given_views = gradient_views
    device, framework = q[4], q[5]
    if framework.determinism():
        options = options._replace(deterministic=True)
    needs = needs._replace(others=needs.others and sink is not None)
    key = (options, needs, *map(kind_of, views), *map(kind_of, gradient_views))
    call = _calls.get(key)
    if call is None or call.mixes_frameworks:
        call = call or _calls.keep(key, _prepare(DenseArrays._make(views), gradient_views, options, needs))
        check_places({**DenseArrays._make(views)._asdict(), **gradient_views._asdict()})
    made = call.allocate()
    scratch = made.pop()
    dsink = made.pop() if needs.others else None
    results = [
        (made.pop(0) if view is None else x) if is_needed else None
        for view, x, is_needed in zip(given_views, gradients[-3:], needs, strict=False)
    ]
    if call.launch is None:
        for array in (*results, dsink):
            if array is not None:
                framework.fill(array, 0.0)
    else:
        dq_ptr, dk_ptr, dv_ptr = [
            0 if x is None else framework.pointer(x) if view is None else view[0]
            for view, x in zip(given_views, results, strict=True)
        ]
        inputs = (q, k, v, dout, out)
        q_ptr, k_ptr, v_ptr, dout_ptr, out_ptr = [view[0] for view in inputs]
        if call.copied is not None:
            (q_ptr, k_ptr, v_ptr, dout_ptr, out_ptr), copies = copy_where(call.copied, inputs, _INPUTS)
        addresses = BackwardAddresses(
            q_ptr, k_ptr, v_ptr, out_ptr, dout_ptr, lse[0], address_of(dlse), dq_ptr, dk_ptr, dv_ptr,
            address_of(cu_seqlens_q), address_of(cu_seqlens_k), address_of(used_q), address_of(used_k),
            address_of(slopes), address_of(sink), 0 if dsink is None else framework.pointer(dsink),
        )  # fmt: skip
        call.launch(framework.current_stream(device), addresses, framework.pointer(scratch))
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


def _prepare(arrays: DenseArrays, gradients: Gradients, options: DenseOptions, needs: Needs) -> Prepared:
    """Check a call, load its kernels and work out their parameters."""
    fields, of_inputs = check_call(arrays, options, gradients)
    device, framework = arrays.q[4], arrays.q[5]
    (fields["dout_strides"], fields["out_strides"]), of_rows = read_strides(gradients.dout, gradients.out)
    copied = of_inputs + of_rows
    fields["dlse_strides"] = (0, 0, 0)
    for name, view in (("lse", gradients.lse), ("dlse", gradients.dlse)):
        if view is not None:
            *batch, first, second = view[2]
            token, head = (first, second) if fields["varlen"] else (second, first)
            fields[f"{name}_strides"] = of_three((*batch, token, head))
    results: list[NewArray] = []
    for name, source, gradient, is_needed in zip(
        ("dq", "dk", "dv"), arrays[:3], gradients[-3:], needs, strict=False
    ):
        if gradient is None:
            fresh = fresh_out_strides(source, source[1][-1])
            fields[f"{name}_strides"] = of_three(fresh[:-1])
            if is_needed:
                results.append((tuple(source[1]), source[3], fresh))
        else:
            fields[f"{name}_strides"] = of_three(check_out_layout(gradient, name))
    if needs.others:
        results.append(((fields["h_q"],), fields["sink_dtype"]))
    kernels = None
    if fields["b"] and fields["max_seqlen_q"] and fields["max_seqlen_k"]:
        has_dlse, deterministic = gradients.dlse is not None, options.deterministic
        call = BackwardCall(**fields, has_dlse=has_dlse, deterministic=deterministic, needs=needs)
        kernels = mha_backward.PreparedMhaBackward(call, framework.capture_query(device))
    return Prepared.of({**arrays._asdict(), **gradients._asdict()}, results, kernels, copied)
