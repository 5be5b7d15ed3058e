"""Checks of the arrays of flex attention, and the sizes and strides that follow from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..call.arrays import READERS
from ..call.checks import check_kind
from ..call.frameworks import Fields, Framework, aligned_strides
from ..kernels.mha_forward import NO_BOUND, MhaForwardCall
from ..mha.arguments import check_head_dim, check_out_layout, fresh_out_strides, walked
from .functions import check_on_device

FP8 = ("float8_e4m3fn", "float8_e5m2")


def read_dense(x: Any, name: str) -> Fields:
    """The fields of query, key or value."""
    try:
        return READERS[type(x)](x, name)
    except (TypeError, ValueError) as error:
        if getattr(x, "is_nested", False):
            raise NotImplementedError(
                f"{name}: expected a dense tensor, got a nested one; give its parts as one request, with a "
                "mask that keeps them apart"
            ) from error
        raise


def kinds_of(views: Sequence[Fields | None]) -> tuple[Any, ...]:
    """The facts that checks of arrays depend on: all but addresses, whose alignment alone counts."""
    return tuple([view and (view[0] & 15, view[1:6]) for view in views])


def mixes_frameworks(views: Sequence[Fields | None], framework: Framework) -> bool:
    """Whether some arrays are of another framework than query, for `check_streams`."""
    return any(view is not None and view[5] is not framework for view in views)


def check_streams(
    names: Sequence[str], views: Sequence[Fields | None], device: int, framework: Framework
) -> None:
    """Check again, as in every call, that arrays of other frameworks than query's are on its stream."""
    for name, view in zip(names, views, strict=False):
        if view is not None and view[5] is not framework:
            check_on_device(name, view, device, framework)


def addresses_of(
    views: Sequence[Fields | None], names: Sequence[str], copied: Sequence[bool | str]
) -> tuple[list[Any], list[int]]:
    """The copies that a call makes of its arrays, to be kept until the launch, and the addresses that the
    kernel reads: 0 for an array that is not given. ``copied``: True for a copy, or the dtype of the copy.
    """
    if not any(copied):
        return [], [0 if view is None else view[0] for view in views]
    copies, addresses = [], []
    for view, name, is_copied in zip(views, names, copied, strict=False):
        if view is None:
            addresses.append(0)
        elif is_copied:
            dtype = is_copied if isinstance(is_copied, str) else None
            copies.append(view[5].aligned_copy(view[6], name, dtype))
            addresses.append(view[5].pointer(copies[-1]))
        else:
            addresses.append(view[0])
    return copies, addresses


def has_scores(call: MhaForwardCall) -> bool:
    """Whether B, L and S are above 0. Else no function is called, and what functions read may be empty."""
    return min(call.b, call.max_seqlen_q, call.max_seqlen_k) > 0


def check_arrays(
    q: Fields, k: Fields, v: Fields, out: Fields | None, enable_gqa: bool
) -> tuple[MhaForwardCall, tuple[bool | str, ...]]:
    """Check the arrays of a call against each other. Returns the call, without functions and with the default
    scale, and whether q, k and v are copied first, as `addresses_of` takes it.
    """
    _, q_shape, _, dtype, device, framework, _ = q
    if dtype != "bfloat16" and dtype != "float16":
        more = "; float32 is not supported yet" if dtype == "float32" else ""
        raise TypeError(f"query: expected dtype bfloat16 or float16, got {dtype}{more}")
    for name, sizes, view in (("query", "Hq, L, E", q), ("key", "Hkv, S, E", k), ("value", "Hkv, S, Ev", v)):
        if len(view[1]) != 4:
            batch = "B" if name == "query" else "Bkv"
            raise ValueError(f"{name}: expected shape [{batch}, {sizes}], got {list(view[1])}")
    for name, view in (("key", k), ("value", v)):
        if view[3] != dtype and view[3] not in FP8:
            raise TypeError(f"{name}: expected dtype {dtype}, as query has, or FP8, got {view[3]}")
    b, h_q, seqlen_q, d_qk = q_shape
    k_batches, h_kv, seqlen_k, k_dim = k[1]
    d_v = v[1][3]
    check_head_dim("query", "a last dimension (E)", d_qk, q_shape)
    check_head_dim("value", "a last dimension (Ev)", d_v, v[1])
    if k_dim != d_qk:
        raise ValueError(f"key: expected a last dimension of {d_qk}, as query has, got shape {list(k[1])}")
    if tuple(v[1][:3]) != tuple(k[1][:3]):
        raise ValueError(
            f"value: expected shape {[*k[1][:3], 'Ev']}, as key has but for Ev, got {list(v[1])}"
        )
    if k_batches not in (b, 1):
        raise ValueError(f"key: expected a batch of {b}, as query has, or 1, got shape {list(k[1])}")
    if not h_q or not h_kv or h_q % h_kv or (h_q != h_kv and not enable_gqa):
        rule = "to be a positive multiple of" if enable_gqa else "to be, without enable_gqa, equal to"
        raise ValueError(f"query: expected Hq {rule} the Hkv of key, got Hq {h_q} and Hkv {h_kv}")
    for name, shape in (("query", q_shape), ("key", k[1])):
        if shape[2] >= NO_BOUND:
            raise ValueError(f"{name}: expected less than 2**30 tokens, got shape {list(shape)}")
    if out is None:
        out_strides = fresh_out_strides(q, d_v)[:-1]
    else:
        check_kind("out", out, dtype, (b, h_q, seqlen_q, d_v))
        out_strides = check_out_layout(out)
    for name, other in (("key", k), ("value", v), ("out", out)):
        if other is not None:
            check_on_device(name, other, device, framework)
    steps = [walked(view) if view[3] == dtype else None for view in (q, k, v)]
    strides = [
        aligned_strides(tuple(view[1]))[:-1] if step is None else step
        for view, step in zip((q, k, v), steps, strict=True)
    ]
    call = MhaForwardCall(
        device=device,
        dtype=dtype,
        b=b,
        k_batches=k_batches,
        h_q=h_q,
        h_kv=h_kv,
        d_qk=d_qk,
        d_v=d_v,
        varlen=False,
        max_seqlen_q=seqlen_q,
        max_seqlen_k=seqlen_k,
        total_q=seqlen_q,
        total_k=seqlen_k,
        q_strides=by_token(strides[0]),
        k_strides=by_token(strides[1]),
        v_strides=by_token(strides[2]),
        out_strides=by_token(out_strides),
        lse_strides=(h_q * seqlen_q, seqlen_q),
        softmax_scale=d_qk**-0.5,
    )
    copied = [
        step is None and (view[3] == dtype or dtype) for view, step in zip((q, k, v), steps, strict=True)
    ]
    return call, tuple(copied)


def by_token(strides: Sequence[int]) -> tuple[int, int, int]:
    """Strides of (request, head, token) in the order (request, token, head)."""
    request, head, token = strides
    return request, token, head
