"""Checks of the arrays of flex attention, and the sizes and strides that follow from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..call.arguments import Arg, Sizes, check_arguments, check_dtype, check_shape
from ..call.arrays import READERS
from ..call.frameworks import Fields, aligned_strides
from ..kernels.mha_forward import NO_BOUND, MhaForwardCall
from ..mha.arguments import check_head_dim, fresh_out_strides, walked
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


def has_scores(call: Any) -> bool:
    """Whether B, L and S are above 0. Else no function is called, and what functions read may be empty."""
    return min(call.b, call.max_seqlen_q, call.max_seqlen_k) > 0


def check_arrays(
    views: Mapping[str, Any], of_others: Sequence[Arg], enable_gqa: bool
) -> tuple[MhaForwardCall, tuple[bool | str, ...]]:
    """Check the arrays of a call by name, those besides query, key and value against ``of_others``. Returns
    the call, without functions and with the default scale, and whether query, key and value are copied first,
    as `addresses_of` takes it.
    """
    q, k, v = [views[name] for name in ("query", "key", "value")]
    _, q_shape, _, dtype, device, framework, _ = q
    sizes = Sizes()
    check_dtype("query", q, "bfloat16 float16", " (float32 is not supported yet)")
    check_shape("query", q, "B Hq L E", sizes)
    check_head_dim("query", "a last dimension (E)", sizes["E"], q_shape)
    dtypes = " ".join((dtype, *FP8))
    check_arguments((Arg("key", dtypes, "Bkv Hkv S E"), Arg("value", dtypes, "Bkv Hkv S Ev")), views, sizes)
    check_head_dim("value", "a last dimension (Ev)", sizes["Ev"], v[1])
    b, k_batches, h_q, h_kv = [sizes[dim] for dim in ("B", "Bkv", "Hq", "Hkv")]
    if k_batches not in (b, 1):
        raise ValueError(f"key: expected a batch of {b}, as query has, or 1, got shape {list(k[1])}")
    if not h_q or not h_kv or h_q % h_kv or (h_q != h_kv and not enable_gqa):
        rule = "to be a positive multiple of" if enable_gqa else "to be, without enable_gqa, equal to"
        raise ValueError(f"query: expected Hq {rule} the Hkv of key, got Hq {h_q} and Hkv {h_kv}")
    for name, shape in (("query", q_shape), ("key", k[1])):
        if shape[2] >= NO_BOUND:
            raise ValueError(f"{name}: expected less than 2**30 tokens, got shape {list(shape)}")
    check_arguments(of_others, views, sizes)
    for name, view in views.items():
        if view is not None:
            check_on_device(name, view, device, framework)
    (q_strides, k_strides, v_strides), copied = read_strides(dtype, q, k, v)
    call = MhaForwardCall(
        device=device, dtype=dtype, varlen=False, softmax_scale=sizes["E"] ** -0.5,
        b=b, k_batches=k_batches, h_q=h_q, h_kv=h_kv, d_qk=sizes["E"], d_v=sizes["Ev"],
        max_seqlen_q=sizes["L"], max_seqlen_k=sizes["S"], total_q=sizes["L"], total_k=sizes["S"],
        q_strides=q_strides, k_strides=k_strides, v_strides=v_strides,
        out_strides=by_token(fresh_out_strides(q, sizes["Ev"])[:-1]),
        lse_strides=(h_q * sizes["L"], sizes["L"]),
    )  # fmt: skip
    return call, copied


def read_strides(dtype: str, *views: Fields) -> tuple[list[tuple[int, int, int]], tuple[bool | str, ...]]:
    """Strides in which kernels read arrays as ``dtype``, and how arrays are copied for `addresses_of`."""
    strides, copied = [], []
    for view in views:
        steps = walked(view) if view[3] == dtype else None
        copied.append(steps is None and (view[3] == dtype or dtype))
        strides.append(by_token(steps or aligned_strides(tuple(view[1]))[:-1]))
    return strides, tuple(copied)


def by_token(strides: Sequence[int]) -> tuple[int, int, int]:
    """Strides of (request, head, token) in the order (request, token, head)."""
    request, head, token = strides
    return request, token, head
