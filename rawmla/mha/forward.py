"""One forward call of dense attention, from the arrays to the launch.

It is laid out as `rawmla.mla.dense_decode`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from ..call.arguments import (
    Arg,
    Sizes,
    check_arguments,
    check_dtype,
    check_places,
    check_shape,
)
from ..call.arrays import READERS
from ..call.checks import INT32_MAX, check_groups
from ..call.frameworks import Fields, NewArray
from ..call.memo import Memo, kind_of
from ..kernels import mha_forward
from ..kernels.common import FLOAT_DTYPES
from ..kernels.mha_forward import NO_BOUND, MhaForwardCall
from .arguments import (
    check_head_dim,
    check_out_layout,
    check_softcap,
    fresh_out_strides,
    of_three,
    packed_parts,
    read_strides,
)
from .records import DenseArrays, DenseOptions, Gradients, Packing, Prepared
from .records import options_of as options_of


class Parts(NamedTuple):
    """Where q, k and v are in the arguments of a function."""

    indices: tuple[Any, Any, Any]
    """The indices of the three in a packed array; None: an array of its own."""
    aliases: Mapping[str, str]
    """The names of arguments that `DenseArrays` has by other names."""


SEPARATE = Parts((None, None, None), {})
_OF_QKV = dict.fromkeys(("q", "k", "v"), "qkv") | dict.fromkeys(
    ("cu_seqlens_q", "cu_seqlens_k"), "cu_seqlens"
)
_OF_KV = dict.fromkeys(("k", "v"), "kv")


_calls: Memo[Prepared] = Memo(shared=True)


def read(arrays: tuple[Any, ...], packing: Packing | None = None) -> tuple[Parts, tuple[Any, ...]]:
    """Read the arrays of a call, in the order of `DenseArrays`; parts of a packed array become arrays."""
    q, k, v, starts_q, starts_k, used_q, used_k, sink, slopes, out = arrays
    parts, name_of_starts = SEPARATE, "cu_seqlens_q"
    if packing is None:
        q, k, v = READERS[type(q)](q, "q"), READERS[type(k)](k, "k"), READERS[type(v)](v, "v")
    elif packing.parts == 3:
        (of_q, of_k, of_v), (q, k, v) = _unpacked(q, packing)
        parts, name_of_starts = Parts((of_q, of_k, of_v), _OF_QKV), "cu_seqlens"
    else:
        q = READERS[type(q)](q, "q")
        (of_k, of_v), (k, v) = _unpacked(k, packing)
        parts = Parts((None, of_k, of_v), _OF_KV)
    if starts_q is not None:
        starts_q = READERS[type(starts_q)](starts_q, name_of_starts)
    if starts_k is not None:
        starts_k = READERS[type(starts_k)](starts_k, "cu_seqlens_k")
    elif packing is not None and packing.parts == 3:
        starts_k = starts_q
    if used_q is not None:
        used_q = READERS[type(used_q)](used_q, "seqused_q")
    if used_k is not None:
        used_k = READERS[type(used_k)](used_k, "seqused_k")
    if sink is not None:
        sink = READERS[type(sink)](sink, "attn_sink")
    if slopes is not None:
        slopes = READERS[type(slopes)](slopes, "alibi_slopes")
    if out is not None:
        out = READERS[type(out)](out, "out")
    return parts, (q, k, v, starts_q, starts_k, used_q, used_k, sink, slopes, out)


def _unpacked(packed: Any, packing: Packing) -> tuple[list[Any], list[Fields]]:
    """Read a packed array; returns the indices of its parts, and their fields with the whole array."""
    name = packing.name
    ptr, shape, strides, dtype, device, framework, array = READERS[type(packed)](packed, name)
    itemsize = 2  # of the dtypes that pass the checks
    indices = packed_parts(name, shape, packing.head_dim_qk, packing.parts)
    views: list[Fields] = []
    for first, second in indices:
        if first is ...:
            sizes, steps = (*shape[:2], second.stop - second.start), strides
            offset = second.start * strides[2]
        else:
            sizes, steps = (shape[0], *shape[2:]), (strides[0], *strides[2:])
            offset = second * strides[1]
        views.append((ptr + itemsize * offset, sizes, steps, dtype, device, framework, array))
    return indices, views


def attend(arrays: tuple[Any, ...], options: DenseOptions, packing: Packing | None = None) -> tuple[Any, Any]:
    """Compute out and lse. ``arrays`` has the fields of `DenseArrays`, which takes longer to make."""
    parts, views = read(arrays, packing)
    q, k, v, cu_seqlens_q, cu_seqlens_k, used_q, used_k, sink, slopes, out_view = views
    q_ptr, q_shape, q_steps, dtype, device, framework, _ = q
    k_ptr, k_shape, k_steps, k_dtype, k_device, k_framework, _ = k
    v_ptr, v_shape, v_steps, v_dtype, v_device, v_framework, _ = v
    # The key has what checks depend on, as in dense decoding.
    key = (
        options,
        q_ptr & 15, q_shape, q_steps, dtype, device, framework,
        k_ptr & 15, k_shape, k_steps, k_dtype, k_device, k_framework,
        v_ptr & 15, v_shape, v_steps, v_dtype, v_device, v_framework,
        cu_seqlens_q and cu_seqlens_q[1:6], cu_seqlens_k and cu_seqlens_k[1:6], used_q and used_q[1:6],
        used_k and used_k[1:6], sink and sink[1:6], slopes and slopes[1:6], out_view and kind_of(out_view),
    )  # fmt: skip
    call = _calls.get(key)
    if call is None or call.mixes_frameworks:
        call = call or _calls.keep(key, _prepare(parts, DenseArrays._make(views), options))
        check_places(DenseArrays._make(views)._asdict(), parts.aliases)
    allocate, launch, copied, _, reads_starts = call

    if copied is not None and launch is not None:
        (q_ptr, k_ptr, v_ptr), copies = copy_where(copied, (q, k, v), ("q", "k", "v"), parts)
    pointer = framework.pointer
    if out_view is None:
        out, lse, scratch = allocate()
        out_ptr = pointer(out)
    else:
        lse, scratch = allocate()
        out, out_ptr = arrays[-1], out_view[0]
    if launch is not None:
        # In the order of MhaForwardAddresses.
        addresses = (
            q_ptr, k_ptr, v_ptr, out_ptr, pointer(lse),
            cu_seqlens_q[0] if reads_starts else 0, cu_seqlens_k[0] if reads_starts else 0,
            0 if used_q is None else used_q[0], 0 if used_k is None else used_k[0],
            0 if sink is None else sink[0], 0 if slopes is None else slopes[0],
        )  # fmt: skip
        scratch_ptr = 0 if scratch is None else pointer(scratch)
        launch(framework.current_stream(device), addresses, scratch_ptr)
    return out, lse


def copy_where(
    copied: Sequence[bool], views: Sequence[Fields | None], names: Sequence[str], parts: Parts = SEPARATE
) -> tuple[list[int], list[Any]]:
    """Copy the arrays that kernels cannot walk.

    Returns the addresses of all arrays, 0 for None, and the copies, which must live until the launch.
    """
    indices = (*parts.indices, *[None] * (len(views) - 3))
    addresses, copies = [], []
    for name, index, is_copied, view in zip(names, indices, copied, views, strict=True):
        if view is None or not is_copied:
            addresses.append(0 if view is None else view[0])
        else:
            *_, framework, array = view
            part = array if index is None else array[index]
            copies.append(framework.aligned_copy(part, parts.aliases.get(name, name)))
            addresses.append(framework.pointer(copies[-1]))
    return addresses, copies


def _tables(rows_q: str, rows_k: str, rows_of_lse: str) -> tuple[str, tuple[Arg, ...], tuple[Arg, ...]]:
    """The dimensions of q, the tables of k and v, and the table of all others.

    A forward and a backward call have ``out`` in common.
    """
    of_q, of_k, of_v = f"{rows_q} h_q d_qk", f"{rows_k} h_kv d_qk", f"{rows_k} h_kv d_v"
    others = (
        Arg("cu_seqlens_k", "int32", "b+1", has_rows=True),
        Arg("seqused_q", "int32", "b", has_rows=True),
        Arg("seqused_k", "int32", "b", has_rows=True),
        Arg("attn_sink", " ".join(FLOAT_DTYPES), "h_q", has_rows=True),
        Arg("out", "=q", f"{rows_q} h_q d_v"),
        Arg("dout", "=q", f"{rows_q} h_q d_v"),
        Arg("lse", "float32", rows_of_lse),
        Arg("dlse", "float32", rows_of_lse),
        Arg("dq", "=q", of_q),
        Arg("dk", "=q", of_k),
        Arg("dv", "=q", of_v),
    )
    return of_q, (Arg("k", "=q", of_k), Arg("v", "=q", of_v)), others


_STARTS = (Arg("cu_seqlens_q", "int32", "b+1", has_rows=True),)
_FIXED = _tables("b s_q", "b s_k", "b h_q s_q")
_VARLEN = _tables("total_q", "total_k", "total_q h_q")
_NO_GRADIENTS = Gradients(*[None] * len(Gradients._fields))


def check_call(
    arrays: DenseArrays,
    options: DenseOptions,
    gradients: Gradients = _NO_GRADIENTS,
    aliases: Mapping[str, str] = SEPARATE.aliases,
) -> tuple[dict[str, Any], tuple[bool, ...]]:
    """Check the arrays and the numbers of a forward or a backward call.

    Returns the fields that `MhaForwardCall` and `BackwardCall` share, and which of q, k and v have to be
    copied.
    """
    q, k, v = arrays[:3]
    _, q_shape, _, dtype, device, *_ = q
    first, k_name, v_name = [aliases.get(name, name) for name in ("q", "k", "v")]
    varlen = options.max_seqlens is not None
    sizes = _check_starts(arrays, aliases) if varlen else Sizes()
    of_q, of_keys, of_others = _VARLEN if varlen else _FIXED
    views = {**arrays._asdict(), **gradients._asdict(), "out": arrays.out or gradients.out}
    check_dtype(first, q, "bfloat16 float16", " (float32 is not supported yet)")
    check_shape(first, q, of_q, sizes)
    check_head_dim(first, "a last dimension (d_qk)", sizes["d_qk"], q_shape)
    check_arguments(of_keys, views, sizes, aliases)
    check_head_dim(v_name, "a last dimension (d_v)", sizes["d_v"], v[1])
    b, h_q, h_kv, d_qk, d_v = [sizes[dim] for dim in ("b", "h_q", "h_kv", "d_qk", "d_v")]
    check_groups(h_q, h_kv, first, k_name)
    for name, (_, shape, *_) in ((first, q), (k_name, k)):
        if prod(shape[:-2]) >= NO_BOUND:
            raise ValueError(f"{name}: expected less than 2**30 tokens, got shape {list(shape)}")
    check_arguments(of_others, views, sizes, aliases)
    alibi_stride_b = 0 if arrays.alibi_slopes is None else check_slopes(arrays.alibi_slopes, sizes)
    check_places(views, aliases)
    softmax_scale = d_qk**-0.5 if options.softmax_scale is None else options.softmax_scale
    check_softcap(softmax_scale, options.softcap)
    total_q, total_k = q_shape[-3], k[1][-3]
    max_q, max_k = options.max_seqlens or (total_q, total_k)
    left, right = options.window
    (q_strides, k_strides, v_strides), copied = read_strides(q, k, v)
    fields = dict(
        device=device, dtype=dtype, varlen=varlen, softmax_scale=softmax_scale, softcap=options.softcap,
        b=b, k_batches=b, h_q=h_q, h_kv=h_kv, d_qk=d_qk, d_v=d_v,
        max_seqlen_q=min(max_q, total_q), max_seqlen_k=min(max_k, total_k), total_q=total_q, total_k=total_k,
        q_strides=q_strides, k_strides=k_strides, v_strides=v_strides,
        window_left=left, window_right=0 if options.causal else right,
        sink_dtype=None if arrays.attn_sink is None else arrays.attn_sink[3],
        has_alibi=arrays.alibi_slopes is not None, alibi_stride_b=alibi_stride_b,
    )  # fmt: skip
    return fields, copied


def _check_starts(arrays: DenseArrays, aliases: Mapping[str, str]) -> Sizes:
    """Check that requests have first tokens; returns the number of requests."""
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        if getattr(arrays, name) is None:
            READERS[type(None)](None, aliases.get(name, name))  # raises
    sizes = check_arguments(_STARTS, arrays._asdict(), aliases=aliases)
    sizes["b"] = sizes["b+1"] - 1
    if sizes["b"] < 0:
        name = aliases.get("cu_seqlens_q", "cu_seqlens_q")
        raise ValueError(f"{name}: expected shape [b+1], got [0]")
    return sizes


def check_slopes(slopes: Fields, sizes: Sizes) -> int:
    """Check the slopes; returns the stride between requests."""
    _, shape, strides, *_ = slopes
    check_dtype("alibi_slopes", slopes, "float32")
    b, h_q = sizes["b"], sizes["h_q"]
    if tuple(shape) not in ((h_q,), (b, h_q)):
        raise ValueError(f"alibi_slopes: expected shape [{h_q}] or [{b}, {h_q}] (h_q, b), got {list(shape)}")
    stride_b = strides[0] if len(shape) == 2 and b > 1 else 0
    if h_q > 1 and strides[-1] != 1 or not 0 <= stride_b <= INT32_MAX:
        raise ValueError(
            "alibi_slopes: expected a contiguous last dimension and a stride of 0 to 2**31 - 1 between "
            f"requests, got strides {list(strides)} (elements)"
        )
    return stride_b


def _prepare(parts: Parts, arrays: DenseArrays, options: DenseOptions) -> Prepared:
    """Check a call, load its kernel and work out its parameters."""
    fields, copied = check_call(arrays, options, aliases=parts.aliases)
    _, q_shape, _, dtype, device, framework, _ = arrays.q
    b, h_q, d_v, total_q, total_k = [fields[name] for name in ("b", "h_q", "d_v", "total_q", "total_k")]
    results: list[NewArray] = []
    if arrays.out is None:
        out_steps = fresh_out_strides(arrays.q, d_v)
        results.append(((*q_shape[:-1], d_v), dtype, out_steps))
        fields["out_strides"] = of_three(out_steps[:-1])
    else:
        fields["out_strides"] = of_three(check_out_layout(arrays.out))
    if options.max_seqlens is None:
        results.append(((b, h_q, total_q), "float32"))
        fields["lse_strides"] = (h_q * total_q, total_q)
    else:
        results.append(((total_q, h_q), "float32", (1, max(total_q, 1))))
        fields["lse_strides"] = (0, total_q)
        max_q, max_k = options.max_seqlens
        used = arrays.seqused_q or arrays.seqused_k
        if not options.is_varlen and used is None and (b * max_q, b * max_k) == (total_q, total_k):
            # Requests of one length, one after the other: a dimension of the same memory.
            fields |= {"varlen": False, "total_q": max_q, "total_k": max_k, "lse_strides": (max_q, total_q)}
            for name, longest in (("q", max_q), ("k", max_k), ("v", max_k), ("out", max_q)):
                _, token, head = fields[f"{name}_strides"]
                fields[f"{name}_strides"] = (longest * token, token, head)
    kernels = None
    if b and fields["max_seqlen_q"]:
        kernels = mha_forward.PreparedMhaForward(MhaForwardCall(**fields), framework.capture_query(device))
    return Prepared.of(arrays._asdict(), results, kernels, copied, fields["varlen"])
