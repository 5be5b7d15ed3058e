"""Dense attention: rules of its arguments, its forms (segments, batches, packed arrays), and layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rawmla
from calls.fakes import Arguments, FakeArray, FakeFramework, World, both, change, contiguous, put
from calls.refusals import Refusal, check_all_refused, check_refused, each, shapes
from rawmla.kernels.mha_forward import NO_BOUND, MhaForwardCall

B, TOTAL_Q, TOTAL_K, H_Q, H_KV, D_QK, D_V = 3, 40, 56, 8, 2, 128, 64
S_Q, S_K = 5, 7
Q, K, V, OUT = (TOTAL_Q, H_Q, D_QK), (TOTAL_K, H_KV, D_QK), (TOTAL_K, H_KV, D_V), (TOTAL_Q, H_Q, D_V)
COPY = 0xC0000  # and 0x1000 more for every copy


def plain() -> Arguments:
    """A varlen call that is accepted."""
    return {
        "q": FakeArray(Q, "bfloat16", ptr=0x1000),
        "k": FakeArray(K, "bfloat16", ptr=0x2000),
        "v": FakeArray(V, "bfloat16", ptr=0x3000),
        "cu_seqlens_q": FakeArray((B + 1,), ptr=0x4000),
        "cu_seqlens_k": FakeArray((B + 1,), ptr=0x4800),
        "max_seqlen_q": 20,
        "max_seqlen_k": 30,
    }


def optional() -> Arguments:
    """The same with all arrays that are optional, but out."""
    return plain() | {
        "seqused_q": FakeArray((B,), ptr=0x5000),
        "seqused_k": FakeArray((B,), ptr=0x5800),
        "attn_sink": FakeArray((H_Q,), "float32", ptr=0x6000),
        "alibi_slopes": FakeArray((B, H_Q), "float32", ptr=0x6800),
    }


def with_out() -> Arguments:
    return optional() | {"out": FakeArray(OUT, "bfloat16", ptr=0x7000)}


def fixed() -> Arguments:
    """A call of `flash_attn_func` that is accepted."""
    return {
        "q": FakeArray((B, S_Q, H_Q, D_QK), "bfloat16", ptr=0x1000),
        "k": FakeArray((B, S_K, H_KV, D_QK), "bfloat16", ptr=0x2000),
        "v": FakeArray((B, S_K, H_KV, D_V), "bfloat16", ptr=0x3000),
    }


def packed_qkv(*shape: int) -> Arguments:
    array = FakeArray(shape, "bfloat16", ptr=0x1000)
    return {"qkv": array, "cu_seqlens": FakeArray((B + 1,), ptr=0x4000), "max_seqlen": 20}


def packed_kv(*shape: int) -> Arguments:
    arguments = plain()
    del arguments["k"], arguments["v"]
    return arguments | {"kv": FakeArray(shape, "bfloat16", ptr=0x2000)}


def call(arguments: Arguments, **more: Any) -> tuple[Any, Any]:
    return rawmla.flash_attn_varlen_func(**{**arguments, **more})


EXPECTED = MhaForwardCall(
    device=0,
    dtype="bfloat16",
    b=B,
    k_batches=B,
    h_q=H_Q,
    h_kv=H_KV,
    d_qk=D_QK,
    d_v=D_V,
    varlen=True,
    max_seqlen_q=20,
    max_seqlen_k=30,
    total_q=TOTAL_Q,
    total_k=TOTAL_K,
    q_strides=(0, 1024, 128),
    k_strides=(0, 256, 128),
    v_strides=(0, 128, 64),
    out_strides=(0, 512, 64),
    lse_strides=(0, TOTAL_Q),
    softmax_scale=D_QK**-0.5,
)
FIXED = EXPECTED._replace(
    varlen=False,
    max_seqlen_q=S_Q,
    max_seqlen_k=S_K,
    total_q=S_Q,
    total_k=S_K,
    q_strides=(S_Q * 1024, 1024, 128),
    k_strides=(S_K * 256, 256, 128),
    v_strides=(S_K * 128, 128, 64),
    out_strides=(S_Q * 512, 512, 64),
    lse_strides=(H_Q * S_Q, S_Q),
)

# ---- refusals

OF_OPTIONS: list[Refusal] = [
    ("max_seqlen_q", ValueError, "at least 0 ... -1", put("max_seqlen_q", -1)),
    ("max_seqlen_k", ValueError, "at least 0 ... -1", put("max_seqlen_k", -1)),
    ("window_size", TypeError, "pair ... None", put("window_size", None)),
    ("window_size", TypeError, "pair ... 'ab'", put("window_size", "ab")),
    ("window_size", ValueError, "pair ... 3 items", put("window_size", (1, 2, 3))),
    ("window_size", ValueError, "left ... -2", put("window_size", (-2, 0))),
    ("window_size", ValueError, "right ... -2", put("window_size", (0, -2))),
    ("window_size", TypeError, "right ... 2.0", put("window_size", (0, 2.0))),
    (
        "softcap",
        ValueError,
        "at least softmax_scale / 3.403e+38 ... 1e-20 ... 1e+19",
        both(put("softmax_scale", 1e19), put("softcap", 1e-20)),
    ),
]
"""Refusals of options that the backward has, too."""
REFUSALS: list[Refusal] = [
    *OF_OPTIONS,
    ("attention_chunk", ValueError, "not supported yet ... 64", put("attention_chunk", 64)),
    ("attention_chunk", ValueError, "expected 0 ... -1", put("attention_chunk", -1)),
    ("q", TypeError, "float32 is not supported yet", change("q", dtype="float32")),
    ("q", ValueError, "1 to 256 ... got 0", shapes(q=(*Q[:2], 0))),
    ("v", ValueError, "1 to 256 ... 257", shapes(v=(*V[:2], 257))),
    ("q", ValueError, "h_q 7 ... h_kv 2", shapes(q=(TOTAL_Q, 7, D_QK))),
    ("q", ValueError, "h_q 8 ... h_kv 0", shapes(k=(TOTAL_K, 0, D_QK), v=(TOTAL_K, 0, D_V))),
    ("q", ValueError, "less than 2**30", shapes(q=(2**30, H_Q, D_QK))),
    ("k", ValueError, "less than 2**30", shapes(k=(2**30, H_KV, D_QK), v=(2**30, H_KV, D_V))),
    ("out", ValueError, "multiple of 16 bytes ... 0x7008", change("out", ptr=0x7008)),
]


@each(REFUSALS)
def test_refused(world: World, refusal: Refusal) -> None:
    check_refused(world, rawmla.flash_attn_varlen_func, with_out, refusal)


OF_QKV: list[Refusal] = [
    ("qkv", ValueError, "[total, 3, h, d]", shapes(qkv=(40, 2, 8, 64))),
    ("qkv", ValueError, "1 to 256", shapes(qkv=(40, 3, 8, 257))),
    ("qkv", ValueError, "2 * d_qk + d_v", both(shapes(qkv=(40, 8, 256)), put("head_dim_qk", 128))),
    ("head_dim_qk", ValueError, "got None", shapes(qkv=(40, 8, 320))),
    ("head_dim_qk", TypeError, "float", both(shapes(qkv=(40, 8, 320)), put("head_dim_qk", 128.0))),
    ("head_dim_qk", ValueError, "1 to 256", both(shapes(qkv=(40, 8, 320)), put("head_dim_qk", 0))),
]
OF_KV: list[Refusal] = [
    ("kv", ValueError, "[total, 2, h, d]", shapes(kv=(56, 3, 2, 128))),
    ("kv", ValueError, "[total_k, h_kv, 128]", both(shapes(kv=(56, 2, 192)), put("head_dim_qk", 64))),
    ("q", ValueError, "h_q 8 and h_kv 3", shapes(kv=(56, 2, 3, 128))),
]


def test_refused_in_other_forms(world: World) -> None:
    too_many = "q", ValueError, "2**30 tokens", shapes(q=(B, 2**29, H_Q, D_QK))
    check_refused(world, rawmla.flash_attn_func, fixed, too_many)
    of_qkv, of_kv = rawmla.flash_attn_varlen_qkvpacked_func, rawmla.flash_attn_varlen_kvpacked_func
    check_all_refused(world, of_qkv, lambda: packed_qkv(40, 3, 8, 64), OF_QKV)
    check_all_refused(world, of_kv, lambda: packed_kv(56, 2, 2, 128), OF_KV)


# ---- launches


def test_nothing_optional(world: World) -> None:
    call(plain())
    out, lse = rawmla.flash_attn_func(**fixed())
    varlen, one_length = world.mha
    assert varlen.call == EXPECTED and varlen.addresses[5:] == (0x4000, 0x4800, *(0,) * 10)
    assert one_length.call == FIXED and one_length.addresses[5:] == (0,) * 12
    shape = (B, S_Q, H_Q, D_V)
    assert (out.shape, out.dtype, out.strides) == (shape, "bfloat16", contiguous(shape))
    assert (lse.shape, lse.dtype, lse.strides) == ((B, H_Q, S_Q), "float32", None)


def test_positional(world: World) -> None:
    """FlashMLA's order, and FlashAttention's."""
    rawmla.flash_attn_varlen_func(*plain().values(), 0.0, 0.5, True, False, True)
    sink, slopes = FakeArray((H_Q,), "float16"), FakeArray((H_Q,), "float32")
    rawmla.flash_attn_func(*fixed().values(), 0.0, 0.5, False, (3, 4), 2.0, slopes, False, attn_sink=sink)
    first, second = [launch.call for launch in world.mha]
    assert first == EXPECTED._replace(softmax_scale=0.5, window_right=0)
    more = {"softcap": 2.0, "has_alibi": True, "sink_dtype": "float16"}
    assert second == FIXED._replace(softmax_scale=0.5, window_left=3, window_right=4, **more)


@pytest.mark.parametrize(
    ("window", "causal", "left", "right"),
    (
        ((-1, -1), False, NO_BOUND, NO_BOUND),
        ([None, 3], False, NO_BOUND, 3),
        ((5, 3), True, 5, 0),
        ((2**31, 2**70), False, NO_BOUND, NO_BOUND),
        ((np.int32(4), np.int64(-1)), False, 4, NO_BOUND),
    ),
)
def test_windows(world: World, window: Any, causal: bool, left: int, right: int) -> None:
    call(plain(), window_size=window, causal=causal)
    launched = world.mha[0].call
    assert (launched.window_left, launched.window_right) == (left, right)
    assert type(launched.window_left) is type(launched.window_right) is int


def test_lengths_beyond_the_arrays(world: World) -> None:
    call(plain(), max_seqlen_q=2**31 - 1, max_seqlen_k=10**12)
    assert world.mha[0].call == EXPECTED._replace(max_seqlen_q=TOTAL_Q, max_seqlen_k=TOTAL_K)


# ---- `is_varlen=False`


def of_one_length() -> Arguments:
    """Segments of 8 queries and 14 keys."""
    arguments = plain() | {"max_seqlen_q": 8, "max_seqlen_k": 14}
    shapes(q=(24, H_Q, D_QK), k=(42, H_KV, D_QK), v=(42, H_KV, D_V))(arguments)
    return arguments


def test_a_promise_of_one_length(world: World) -> None:
    arguments = of_one_length()
    out, lse = call(arguments, is_varlen=False)
    (launch,) = world.mha
    assert launch.call == EXPECTED._replace(
        varlen=False,
        max_seqlen_q=8,
        max_seqlen_k=14,
        total_q=8,
        total_k=14,
        q_strides=(8 * 1024, 1024, 128),
        k_strides=(14 * 256, 256, 128),
        v_strides=(14 * 128, 128, 64),
        out_strides=(8 * 512, 512, 64),
        lse_strides=(8, 24),
    )
    assert launch.addresses.cu_seqlens_q == launch.addresses.cu_seqlens_k == 0
    assert (out.shape, lse.shape, lse.strides) == ((24, H_Q, D_V), (24, H_Q), (1, 24))


@pytest.mark.parametrize(
    "more",
    (
        {"max_seqlen_k": 15},
        {"max_seqlen_q": 9},
        {"max_seqlen_q": 7},
        {"is_varlen": True},
        {"seqused_q": FakeArray((B,))},
        {"seqused_k": FakeArray((B,))},
    ),
    ids=str,
)
def test_a_promise_that_cannot_be_used(world: World, more: Arguments) -> None:
    """Then requests are where cu_seqlens says."""
    call(of_one_length(), is_varlen=False)
    call(of_one_length() | {"is_varlen": False} | more)
    assert [launch.call.varlen for launch in world.mha] == [False, True]
    assert [launch.addresses.cu_seqlens_k for launch in world.mha] == [0, 0x4800]


# ---- layouts


@pytest.mark.parametrize("axes", ((0, 2, 1), (2, 1, 0), (1, 0, 2)))
def test_orders_of_four_dimensions(world: World, axes: Any) -> None:
    """`axes`: of (batch, token, head), from the largest stride to the smallest."""

    def ordered(shape: tuple[int, ...]) -> tuple[int, ...]:
        inner = contiguous((*[shape[axis] for axis in axes], shape[-1]))
        return (*[inner[axes.index(axis)] for axis in range(3)], 1)

    arguments = {name: x.but(strides=ordered(x.shape)) for name, x in fixed().items()}
    out, lse = rawmla.flash_attn_func(**arguments)
    launched = world.mha[0].call
    for name, array in {**arguments, "out": out}.items():
        assert array.strides == ordered(array.shape)
        assert getattr(launched, f"{name}_strides") == array.strides[:3]
    assert lse.strides is None and not world.framework.copied


@pytest.mark.parametrize("name", ("q", "k", "v"))
@pytest.mark.parametrize("strides", ((-4096, 128, 1), (2**39, 128, 1)), ids=str)
def test_copied(world: World, name: str, strides: tuple[int, ...]) -> None:
    """By its own framework at every call, though the kind of call is known."""
    arguments, other = plain(), FakeFramework("other")
    change(name, framework=other if name != "q" else None, strides=strides)(arguments)
    made = world.framework if name == "q" else other
    for count in (1, 2):
        call(arguments)
        assert made.copied == [arguments[name]] * count
        launch = world.mha[-1]
        assert launch.call == EXPECTED
        places = {"q": 0x1000, "k": 0x2000, "v": 0x3000} | {name: COPY + 0x1000 * count}
        assert launch.addresses[:3] == tuple(places.values())


def test_dimensions_of_one_element(world: World) -> None:
    """Are never stepped over, so any stride is legal; kernels get multiples of 8."""
    arguments = plain()
    change("q", shape=(1, 1, 17), strides=(3, -5, 1))(arguments)
    change("k", shape=(TOTAL_K, 1, 17), strides=(24, 17, 1))(arguments)
    change("v", shape=(TOTAL_K, 1, 1), strides=(8, 7, 9))(arguments)
    out, _ = call(arguments)
    launched = world.mha[0].call
    assert not world.framework.copied and out.strides == (8, 8, 1)
    strides = launched.q_strides + launched.k_strides + launched.v_strides + launched.out_strides
    assert all(stride % 8 == 0 for stride in strides)
    assert (launched.k_strides[1], launched.v_strides[1]) == (24, 8)


# ---- packed arrays


def test_parts_that_are_copied(world: World) -> None:
    """Parts that do not begin at a multiple of 16 bytes, or have other strides that are not walked."""
    rawmla.flash_attn_varlen_qkvpacked_func(**packed_qkv(TOTAL_Q, H_Q, 2 * 20 + 24), head_dim_qk=20)
    assert [(x.ptr, x.index) for x in world.framework.copied] == [(0x1000, (..., slice(20, 40)))]
    (launch,) = world.mha
    assert launch.addresses[:3] == (0x1000, COPY + 0x1000, 0x1000 + 2 * 40)
    assert launch.call.k_strides == (0, H_Q * 24, 24)
    assert launch.call.q_strides == launch.call.v_strides == (0, H_Q * 64, 64)
    arguments = packed_kv(TOTAL_K, 2, H_KV, D_QK)
    change("kv", strides=(2 * H_KV * D_QK + 8, H_KV * D_QK + 4, D_QK, 1))(arguments)
    rawmla.flash_attn_varlen_kvpacked_func(**arguments)
    assert [x.index for x in world.framework.copied[1:]] == [(slice(None), 1)]


# ---- nothing to attend


@pytest.mark.parametrize("given", (False, True))
@pytest.mark.parametrize(
    "spoil",
    (put("max_seqlen_q", 0), shapes(cu_seqlens_q=(1,), cu_seqlens_k=(1,))),
    ids=("no length", "no requests"),
)
def test_no_queries(world: World, spoil: Callable[[Arguments], None], given: bool) -> None:
    arguments = plain()
    spoil(arguments)
    out = FakeArray(OUT, "bfloat16", ptr=0x7000) if given else None
    result, lse = call(arguments, out=out)
    assert (result.shape, result.dtype) == (OUT, "bfloat16")
    assert (lse.shape, lse.dtype) == ((TOTAL_Q, H_Q), "float32")
    assert (result is out) == given and len(world.framework.allocated) == (1 if given else 2)
    assert not world.mha and not world.framework.filled


def test_no_keys(world: World) -> None:
    """The kernel writes the results, and no row that is of no request."""
    arguments = with_out() | {"max_seqlen_k": 0}
    change("k", shape=(0, H_KV, D_QK), ptr=0)(arguments)
    change("v", shape=(0, H_KV, D_V), ptr=0)(arguments)
    assert call(arguments)[0] is arguments["out"]
    arguments = fixed()
    change("k", shape=(B, 0, H_KV, D_QK), ptr=0)(arguments)
    change("v", shape=(B, 0, H_KV, D_V), ptr=0)(arguments)
    rawmla.flash_attn_func(**arguments)
    call(plain(), max_seqlen_k=0)
    assert [launch.call.total_k for launch in world.mha] == [0, 0, TOTAL_K]
    assert [launch.call.max_seqlen_k for launch in world.mha] == [0, 0, 0]
    assert not world.framework.filled


# ---- the memo


def prepared(launches: list[Any]) -> list[int]:
    """Which of the launches were prepared, as the number of the first one with the same preparation."""
    made = [launch.prepared for launch in launches]
    return [made.index(one) for one in made]
