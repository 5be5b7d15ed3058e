"""One forward call of dense attention, from the arrays to the launch, laid out as `rawmla.mla.dense_decode`.

What depends on the kinds of the arrays alone is in a `Checked`, and what depends on the numbers of the call
too in a `_Prepared`; both are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

from ..call.arrays import READERS
from ..call.checks import INT32_MAX, check_place, check_vector, mixes_frameworks
from ..call.frameworks import Fields, NewArray, aligned_strides
from ..call.memo import Memo
from ..kernels import mha_forward
from ..kernels.common import FLOAT_DTYPES
from ..kernels.mha_forward import NO_BOUND, MhaForwardCall
from .arguments import (
    check_head_dim,
    check_out_layout,
    check_softcap,
    fresh_out_strides,
    packed_parts,
    walked,
)
from .records import DenseArrays, DenseOptions, Packing, options_of

__all__ = [
    "SEPARATE",
    "Checked",
    "Parts",
    "Views",
    "attend",
    "check_arrays",
    "check_places",
    "copies_of",
    "kinds_of",
    "of_three",
    "options_of",
    "read",
    "require",
]


Strides = tuple[int, int, int]
Views = tuple[Any, ...]
"""`Fields`, or None, of the arrays of a record in its order."""


class Parts(NamedTuple):
    """Where q, k and v are in the arguments of a function: the argument's name, and the index of the part in
    a packed array. And the names of the arguments with the first tokens of requests.
    """

    q: tuple[str, Any]
    k: tuple[str, Any]
    v: tuple[str, Any]
    cu_seqlens: tuple[str, str] = ("cu_seqlens_q", "cu_seqlens_k")


SEPARATE = Parts(("q", None), ("k", None), ("v", None))
"""Arrays of their own."""


class Sizes(NamedTuple):
    """Sizes of the arrays, and their strides in elements for the dimensions (request, token, head)."""

    h_q: int
    h_kv: int
    d_qk: int
    d_v: int
    tokens_q: int  # of the whole array with cu_seqlens, else of a request
    tokens_k: int
    q_strides: Strides
    k_strides: Strides
    v_strides: Strides
    out_strides: Strides
    alibi_stride_b: int


class _Prepared(NamedTuple):
    """How to run one kind of call: an allocator of its results and a prepared launch."""

    allocate: Callable[[], list[Any]]
    """Makes out, unless it is given, lse and the scratch, or None."""
    launch: Callable[..., None] | None
    """Enqueues the kernel, as `PreparedMhaForward.launch`; None without requests or queries."""
    varlen: bool
    """The kernel reads cu_seqlens."""


class Checked(NamedTuple):
    """Sizes and strides of arrays that passed the checks."""

    b: int
    copied: tuple[bool, bool, bool] | None  # which of q, k and v have to be copied; None: none
    mixes_frameworks: bool  # some arrays are of another framework than q
    default_scale: float
    sizes: Sizes
    calls: Memo[_Prepared]


_checked: Memo[Checked] = Memo(shared=True)


def read(arrays: DenseArrays, packing: Packing | None = None) -> tuple[Parts, Views]:
    """Read the arrays of a call, in the order of `DenseArrays`; parts of a packed array become arrays."""
    q, k, v, starts_q, starts_k, used_q, used_k, sink, slopes, out = arrays
    parts = SEPARATE
    if packing is None:
        q, k, v = READERS[type(q)](q, "q"), READERS[type(k)](k, "k"), READERS[type(v)](v, "v")
    elif packing.parts == 3:
        (of_q, of_k, of_v), (q, k, v) = _unpacked(q, packing)
        parts = Parts(of_q, of_k, of_v, ("cu_seqlens", "cu_seqlens"))
    else:
        q = READERS[type(q)](q, "q")
        (of_k, of_v), (k, v) = _unpacked(k, packing)
        parts = Parts(("q", None), of_k, of_v)
    if starts_q is not None:
        starts_q = READERS[type(starts_q)](starts_q, parts.cu_seqlens[0])
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


def _unpacked(packed: Any, packing: Packing) -> tuple[list[tuple[str, Any]], list[Fields]]:
    """Read a packed array; returns its parts for `Parts`, and their fields, of which the array is packed."""
    name = packing.name
    ptr, shape, strides, dtype, device, framework, array = READERS[type(packed)](packed, name)
    itemsize = 2  # of the dtypes that pass the checks
    parts: list[tuple[str, Any]] = []
    views: list[Fields] = []
    for index in packed_parts(name, shape, packing.head_dim_qk, packing.parts):
        first, second = index
        if first is ...:
            sizes, steps = (*shape[:2], second.stop - second.start), strides
            offset = second.start * strides[2]
        else:
            sizes, steps = (shape[0], *shape[2:]), (strides[0], *strides[2:])
            offset = second * strides[1]
        parts.append((name, index))
        views.append((ptr + itemsize * offset, sizes, steps, dtype, device, framework, array))
    return parts, views


def kinds_of(views: tuple[Fields | None, ...]) -> tuple[Any, ...]:
    """Make the memo's key of a call: all fields but the array, and of an address the alignment alone."""
    return tuple([x and (x[0] & 15, x[1], x[2], x[3], x[4], x[5]) for x in views])


def require(name: str, view: Fields | None) -> Fields:
    """Refuse an array that was not given, as the reader of any other object does."""
    return READERS[type(None)](None, name) if view is None else view


def attend(arrays: DenseArrays, options: DenseOptions, packing: Packing | None = None) -> tuple[Any, Any]:
    """Compute out and lse."""
    parts, views = read(arrays, packing)
    kind = kinds_of(views)
    latest_kind, checked = _checked.latest
    if latest_kind != kind:  # layers repeat one kind, and comparing takes half the time of hashing
        checked = _checked.get(kind) or _checked.keep(
            kind, check_arrays(parts, DenseArrays._make(views), options)
        )
        _checked.latest = kind, checked
    _, copied, has_others, _, _, calls = checked
    if has_others:
        check_places(parts, views)
    call = calls.get(options) or calls.keep(options, _prepare(checked, options, DenseArrays._make(views)))
    allocate, launch, varlen = call

    q, k, v, cu_seqlens_q, cu_seqlens_k, used_q, used_k, sink, slopes, out_view = views
    q_ptr, _, _, _, device, framework, _ = q
    k_ptr, v_ptr = k[0], v[0]
    if copied is not None and launch is not None:
        copies = copies_of(parts, copied, (q, k, v))  # alive until the launch
        q_ptr, k_ptr, v_ptr = [
            view[0] if copy is None else copy[1] for view, copy in zip((q, k, v), copies, strict=True)
        ]
    pointer = framework.pointer
    if out_view is None:
        out, lse, scratch = allocate()
        out_ptr = pointer(out)
    else:
        lse, scratch = allocate()
        out, out_ptr = arrays.out, out_view[0]
    if launch is not None:
        # In the order of MhaForwardAddresses.
        addresses = (
            q_ptr, k_ptr, v_ptr, out_ptr, pointer(lse),
            cu_seqlens_q[0] if varlen else 0, cu_seqlens_k[0] if varlen else 0,
            0 if used_q is None else used_q[0], 0 if used_k is None else used_k[0],
            0 if sink is None else sink[0], 0 if slopes is None else slopes[0],
        )  # fmt: skip
        scratch_ptr = 0 if scratch is None else pointer(scratch)
        launch(framework.current_stream(device), addresses, scratch_ptr)
    return out, lse


def check_arrays(parts: Parts, arrays: DenseArrays, options: DenseOptions) -> Checked:
    """Check the arrays of a call against each other."""
    has_segments = options.max_seqlens is not None
    (first, _), (k_name, _), (v_name, _) = parts[:3]
    q, k, v = arrays[:3]
    if has_segments:
        require(parts.cu_seqlens[0], arrays.cu_seqlens_q)
        require(parts.cu_seqlens[1], arrays.cu_seqlens_k)
    _, q_shape, _, dtype, _, framework, _ = q
    if dtype != "bfloat16" and dtype != "float16":
        more = "; float32 is not supported yet" if dtype == "float32" else ""
        raise TypeError(f"{first}: expected dtype bfloat16 or float16, got {dtype}{more}")
    for name, (_, _, _, other, _, _, _) in ((k_name, k), (v_name, v)):
        if other != dtype:
            raise TypeError(f"{name}: expected dtype {dtype}, that of {first}, got {other}")
    ndim = 3 if has_segments else 4
    _, k_shape, *_ = k
    _, v_shape, *_ = v
    for name, tokens, sizes, shape in (
        (first, "q", "h_q, d_qk", q_shape),
        (k_name, "k", "h_kv, d_qk", k_shape),
        (v_name, "k", "h_kv, d_v", v_shape),
    ):
        if len(shape) != ndim:
            tokens = f"total_{tokens}" if has_segments else f"b, s_{tokens}"
            raise ValueError(f"{name}: expected shape [{tokens}, {sizes}], got {list(shape)}")
    *sizes_q, h_q, d_qk = q_shape
    *sizes_k, h_kv, k_dim = k_shape
    d_v = v_shape[-1]
    check_head_dim(first, "a last dimension (d_qk)", d_qk, q_shape)
    if k_dim != d_qk:
        raise ValueError(
            f"{k_name}: expected a last dimension of {d_qk}, that of {first}, got shape {list(k_shape)}"
        )
    check_head_dim(v_name, "a last dimension (d_v)", d_v, v_shape)
    if not has_segments and sizes_k[0] != sizes_q[0]:
        raise ValueError(
            f"{k_name}: expected {sizes_q[0]} requests (b is that of {first}), got shape {list(k_shape)}"
        )
    if tuple(v_shape[:-1]) != tuple(k_shape[:-1]):
        raise ValueError(
            f"{v_name}: expected shape {[*k_shape[:-1], 'd_v']}, but for d_v that of {k_name}, got "
            f"{list(v_shape)}"
        )
    if not h_kv or not h_q or h_q % h_kv:
        raise ValueError(
            f"{first}: expected h_q to be a positive multiple of the h_kv of {k_name}, got h_q {h_q} and "
            f"h_kv {h_kv}"
        )
    for name, counts, shape in ((first, sizes_q, q_shape), (k_name, sizes_k, k_shape)):
        if prod(counts) >= NO_BOUND:
            raise ValueError(f"{name}: expected less than 2**30 tokens, got shape {list(shape)}")
    b = _check_requests(parts, arrays) if has_segments else sizes_q[0]
    alibi_stride_b = _check_head_terms(arrays, b, h_q)
    if arrays.out is None:
        out_steps = fresh_out_strides(q, d_v)[:-1]
    else:
        out_steps = _check_out(arrays.out, first, q, d_v)
    check_places(parts, arrays)
    steps = [walked(view) for view in (q, k, v)]
    copied = [step is None for step in steps]
    q_strides, k_strides, v_strides = [
        aligned_strides(tuple(view[1]))[:-1] if step is None else step
        for view, step in zip((q, k, v), steps, strict=True)
    ]
    return Checked(
        b=b,
        copied=(copied[0], copied[1], copied[2]) if any(copied) else None,
        mixes_frameworks=mixes_frameworks(arrays),
        default_scale=d_qk**-0.5,
        sizes=Sizes(
            h_q, h_kv, d_qk, d_v, sizes_q[-1], sizes_k[-1], of_three(q_strides), of_three(k_strides),
            of_three(v_strides), of_three(out_steps), alibi_stride_b,
        ),
        calls=Memo(),
    )  # fmt: skip


def of_three(strides: tuple[int, ...]) -> Strides:
    """With 0 for the requests where an array has no dimension for them."""
    request, token, head = (0, *strides)[-3:]
    return request, token, head


def _check_requests(parts: Parts, arrays: DenseArrays) -> int:
    """Check cu_seqlens and seqused; returns the number of requests."""
    name_q, name_k = parts.cu_seqlens
    _, shape, *_ = arrays.cu_seqlens_q
    if len(shape) != 1 or not shape[0]:
        raise ValueError(f"{name_q}: expected shape [b + 1], got {list(shape)}")
    b = shape[0] - 1
    for name, view, length, meaning in (
        (name_q, arrays.cu_seqlens_q, b + 1, "b + 1"),
        (name_k, arrays.cu_seqlens_k, b + 1, f"b + 1, as {name_q} has"),
        ("seqused_q", arrays.seqused_q, b, f"b, one less than {name_q} has"),
        ("seqused_k", arrays.seqused_k, b, f"b, one less than {name_q} has"),
    ):
        if view is not None:
            check_vector(name, view, ("int32",), length, meaning)
    return b


def _check_head_terms(arrays: DenseArrays, b: int, h_q: int) -> int:
    """Check the sink and the slopes; returns the stride of the requests of the latter."""
    if arrays.attn_sink is not None:
        check_vector("attn_sink", arrays.attn_sink, tuple(FLOAT_DTYPES), h_q, "h_q is that of q")
    if arrays.alibi_slopes is None:
        return 0
    _, shape, strides, dtype, *_ = arrays.alibi_slopes
    if dtype != "float32":
        raise TypeError(f"alibi_slopes: expected dtype float32, got {dtype}")
    if tuple(shape) not in ((h_q,), (b, h_q)):
        raise ValueError(f"alibi_slopes: expected shape [{h_q}] or [{b}, {h_q}] (h_q, b), got {list(shape)}")
    stride_b = strides[0] if len(shape) == 2 and b > 1 else 0
    if h_q > 1 and strides[-1] != 1 or not 0 <= stride_b <= INT32_MAX:
        raise ValueError(
            "alibi_slopes: expected a contiguous last dimension and a stride of 0 to 2**31 - 1 between "
            f"requests, got strides {list(strides)} (elements)"
        )
    return stride_b


def _check_out(out: Fields, first: str, q: Fields, d_v: int) -> tuple[int, ...]:
    """Check `out` against q; returns its strides but the last."""
    _, shape, _, dtype, *_ = out
    _, q_shape, _, q_dtype, *_ = q
    if dtype != q_dtype:
        raise TypeError(f"out: expected dtype {q_dtype}, that of {first}, got {dtype}")
    if tuple(shape) != (*q_shape[:-1], d_v):
        raise ValueError(f"out: expected shape {[*q_shape[:-1], d_v]}, got {list(shape)}")
    return check_out_layout(out)


def check_places(parts: Parts, views: Views) -> None:
    """Check that all arrays are on the device of q and, if they are of another framework, on its stream."""
    _, _, _, _, device, framework, _ = views[0]
    names = (*[name for name, _ in parts[:3]], *parts.cu_seqlens, *DenseArrays._fields[5:])
    for name, view in zip(names, views, strict=True):
        if view is not None:
            check_place(name, view, device, framework, parts.q[0])


def _prepare(checked: Checked, options: DenseOptions, arrays: DenseArrays) -> _Prepared:
    """Load the kernel of a call and work out its parameters."""
    softmax_scale = options.softmax_scale
    if softmax_scale is None:
        explicit, calls = options._replace(softmax_scale=checked.default_scale), checked.calls
        return calls.get(explicit) or calls.keep(explicit, _prepare(checked, explicit, arrays))
    check_softcap(softmax_scale, options.softcap)
    if options.max_seqlens is not None:
        require("cu_seqlens_q", arrays.cu_seqlens_q)
    left, right = options.window
    b = checked.b
    (
        h_q, h_kv, d_qk, d_v, tokens_q, tokens_k, q_strides, k_strides, v_strides, out_steps,
        alibi_stride_b,
    ) = checked.sizes  # fmt: skip
    _, q_shape, _, dtype, device, framework, _ = arrays.q
    varlen = options.max_seqlens is not None
    if options.max_seqlens is not None:
        max_q, max_k = options.max_seqlens
        lse_strides = (0, tokens_q)
        lse: NewArray = ((tokens_q, h_q), "float32", (1, max(tokens_q, 1)))
        used = arrays.seqused_q or arrays.seqused_k
        if not options.is_varlen and used is None and (b * max_q, b * max_k) == (tokens_q, tokens_k):
            # Requests of one length, one after the other: a dimension of the same memory.
            varlen = False
            lse_strides = (max_q, tokens_q)
            tokens_q, tokens_k = max_q, max_k
            q_strides, out_steps = [(max_q * token, token, head) for _, token, head in (q_strides, out_steps)]
            k_strides, v_strides = [(max_k * token, token, head) for _, token, head in (k_strides, v_strides)]
        max_q, max_k = min(max_q, tokens_q), min(max_k, tokens_k)
    else:
        max_q, max_k = tokens_q, tokens_k
        lse_strides = (h_q * tokens_q, tokens_q)
        lse = ((b, h_q, tokens_q), "float32")
    results: list[NewArray] = [lse]
    if arrays.out is None:
        results.insert(0, ((*q_shape[:-1], d_v), dtype, fresh_out_strides(arrays.q, d_v)))
    if not b or not max_q:
        return _Prepared(framework.allocator(results, 0, device), None, varlen)
    prepared = mha_forward.PreparedMhaForward(
        MhaForwardCall(
            device=device,
            dtype=dtype,
            b=b,
            k_batches=b,
            h_q=h_q,
            h_kv=h_kv,
            d_qk=d_qk,
            d_v=d_v,
            varlen=varlen,
            max_seqlen_q=max_q,
            max_seqlen_k=max_k,
            total_q=tokens_q,
            total_k=tokens_k,
            q_strides=q_strides,
            k_strides=k_strides,
            v_strides=v_strides,
            out_strides=out_steps,
            lse_strides=lse_strides,
            softmax_scale=softmax_scale,
            window_left=left,
            window_right=0 if options.causal else right,
            softcap=options.softcap,
            sink_dtype=None if arrays.attn_sink is None else arrays.attn_sink[3],
            alibi_stride_b=alibi_stride_b,
            has_alibi=arrays.alibi_slopes is not None,
        ),
        framework.capture_query(device),
    )
    return _Prepared(framework.allocator(results, prepared.scratch_bytes, device), prepared.launch, varlen)


def copies_of(
    parts: Parts, copied: tuple[bool, ...], views: tuple[Fields | None, ...]
) -> list[tuple[Any, int] | None]:
    """Copies of the arrays that kernels cannot walk, with their addresses, and None for the others."""
    made: list[tuple[Any, int] | None] = []
    for (name, index), is_copied, view in zip(parts[:3], copied, views, strict=True):
        if view is None or not is_copied:
            made.append(None)
        else:
            _, _, _, _, _, framework, array = view
            copy = framework.aligned_copy(array if index is None else array[index], name)
            made.append((copy, framework.pointer(copy)))
    return made
