"""Calls of dense attention: what is refused, what accepted ones allocate and launch; arrays are stand-ins."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from calls.fakes import (
    Arguments,
    FakeArray,
    FakeFramework,
    World,
    both,
    change,
    contiguous,
    make_world,
    put,
)

import rawmla
from rawmla import jit
from rawmla.call import memo
from rawmla.kernels.mha_forward import NO_BOUND, MhaForwardAddresses, MhaForwardCall

B, TOTAL_Q, TOTAL_K, H_Q, H_KV, D_QK, D_V = 3, 40, 56, 8, 2, 128, 64
S_Q, S_K = 5, 7
Q, K, V = (TOTAL_Q, H_Q, D_QK), (TOTAL_K, H_KV, D_QK), (TOTAL_K, H_KV, D_V)
LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
OTHER_ARRAYS = (*LENGTHS, "attn_sink", "alibi_slopes")
ARRAYS = ("q", "k", "v", *OTHER_ARRAYS)
MAX = ("max_seqlen_q", "max_seqlen_k")
COPY = 0xC0000  # and 0x1000 more for every copy


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return make_world(monkeypatch)


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


def out_array(**changes: Any) -> FakeArray:
    return FakeArray((TOTAL_Q, H_Q, D_V), "bfloat16", ptr=0x7000).but(**changes)


# name of the test, argument that the text names, exception, what the text also holds, how the call is spoilt
Case = tuple[str, str, type[Exception], tuple[str, ...], Callable[[Arguments], None]]
BAD_CALLS: list[Case] = [
    *[(f"{name} a list", name, TypeError, ("got list",), put(name, [1])) for name in ARRAYS],
    *[
        (f"{name} on the host", name, ValueError, ("CUDA memory", "numpy.ndarray"), put(name, np.zeros(3)))
        for name in ARRAYS
    ],
    *[(f"{name} None", name, TypeError, ("got NoneType",), put(name, None)) for name in ARRAYS[:5]],
    *[
        (f"{name} on another device", name, ValueError, ("cuda:0", "of q", "cuda:1"), change(name, device=1))
        for name in ARRAYS[1:]
    ],
    *[
        (
            f"{name} of another stream",
            name,
            ValueError,
            ("fake array", "0x51", "other array", "0x99"),
            change(name, framework=FakeFramework("other", stream=0x99)),
        )
        for name in ARRAYS[1:]
    ],
    ("q float32", "q", TypeError, ("float32 is not supported yet",), change("q", dtype="float32")),
    ("q float64", "q", TypeError, ("bfloat16 or float16", "float64"), change("q", dtype="float64")),
    ("q int32", "q", TypeError, ("bfloat16 or float16", "int32"), change("q", dtype="int32")),
    ("k fp16", "k", TypeError, ("bfloat16, the dtype of q", "float16"), change("k", dtype="float16")),
    ("v float32", "v", TypeError, ("bfloat16, the dtype of q", "float32"), change("v", dtype="float32")),
    ("q 4-D", "q", ValueError, ("[total_q, h_q, d_qk]", "[1, 40"), change("q", shape=(1, *Q))),
    ("q 2-D", "q", ValueError, ("[total_q, h_q, d_qk]", "[8, 128]"), change("q", shape=Q[1:])),
    (
        "k 2-D",
        "k",
        ValueError,
        ("[total_k, h_kv, 128] (d_qk of q)", "[2, 128]"),
        change("k", shape=K[1:]),
    ),
    ("v 4-D", "v", ValueError, ("[56, 2, d_v] (total_k of k, h_kv of k)",), change("v", shape=(1, *V))),
    (
        "d_qk 264",
        "q",
        ValueError,
        ("1 to 256", "264"),
        both(change("q", shape=(TOTAL_Q, H_Q, 264)), change("k", shape=(TOTAL_K, H_KV, 264))),
    ),
    ("d_qk 0", "q", ValueError, ("1 to 256", "got 0"), change("q", shape=(TOTAL_Q, H_Q, 0))),
    ("d_v 257", "v", ValueError, ("1 to 256", "257"), change("v", shape=(TOTAL_K, H_KV, 257))),
    ("d_v 0", "v", ValueError, ("1 to 256", "got 0"), change("v", shape=(TOTAL_K, H_KV, 0))),
    (
        "d_qk of k",
        "k",
        ValueError,
        ("[total_k, h_kv, 128]", "[56, 2, 64]"),
        change("k", shape=(TOTAL_K, H_KV, 64)),
    ),
    ("tokens of v", "v", ValueError, ("[56, 2, d_v]", "[55, 2, 64]"), change("v", shape=(55, H_KV, D_V))),
    ("heads of v", "v", ValueError, ("[56, 2, d_v]", "[56, 4,"), change("v", shape=(TOTAL_K, 4, D_V))),
    ("h_q no multiple", "q", ValueError, ("h_q 7", "h_kv 2"), change("q", shape=(TOTAL_Q, 7, D_QK))),
    ("no query heads", "q", ValueError, ("h_q 0", "h_kv 2"), change("q", shape=(TOTAL_Q, 0, D_QK))),
    (
        "no KV heads",
        "q",
        ValueError,
        ("h_q 8", "h_kv 0"),
        both(change("k", shape=(TOTAL_K, 0, D_QK)), change("v", shape=(TOTAL_K, 0, D_V))),
    ),
    ("2**30 queries", "q", ValueError, ("less than 2**30",), change("q", shape=(2**30, H_Q, D_QK))),
    (
        "2**30 keys",
        "k",
        ValueError,
        ("less than 2**30",),
        both(change("k", shape=(2**30, H_KV, D_QK)), change("v", shape=(2**30, H_KV, D_V))),
    ),
    *[
        (f"{name} int64", name, TypeError, ("int32", "got int64"), change(name, dtype="int64"))
        for name in LENGTHS
    ],
    *[
        (f"{name} strided", name, ValueError, ("contiguous", "2"), change(name, strides=(2,)))
        for name in (*LENGTHS, "attn_sink")
    ],
    ("cu_seqlens_q 2-D", "cu_seqlens_q", ValueError, ("[b+1]",), change("cu_seqlens_q", shape=(2, 4))),
    ("cu_seqlens_q empty", "cu_seqlens_q", ValueError, ("[b+1]",), change("cu_seqlens_q", shape=(0,))),
    ("cu_seqlens_k short", "cu_seqlens_k", ValueError, ("[4]", "[3]"), change("cu_seqlens_k", shape=(B,))),
    ("seqused_q long", "seqused_q", ValueError, ("[3]", "[4]"), change("seqused_q", shape=(B + 1,))),
    ("seqused_k long", "seqused_k", ValueError, ("[3]", "[4]"), change("seqused_k", shape=(B + 1,))),
    *[(f"{name} None", name, TypeError, ("int", "None"), put(name, None)) for name in MAX],
    *[(f"{name} float", name, TypeError, ("int", "4.0"), put(name, 4.0)) for name in MAX],
    *[(f"{name} bool", name, TypeError, ("int", "True"), put(name, True)) for name in MAX],
    *[(f"{name} array", name, TypeError, ("int", "FakeArray"), put(name, FakeArray(()))) for name in MAX],
    *[(f"{name} negative", name, ValueError, ("at least 0", "-1"), put(name, -1)) for name in MAX],
    ("dropout", "dropout_p", ValueError, ("0.0", "0.1"), put("dropout_p", 0.1)),
    ("dropout NaN", "dropout_p", ValueError, ("0.0", "nan"), put("dropout_p", math.nan)),
    ("dropout None", "dropout_p", TypeError, ("0.0", "None"), put("dropout_p", None)),
    ("dropout array", "dropout_p", TypeError, ("FakeArray",), put("dropout_p", FakeArray(()))),
    ("scale 0", "softmax_scale", ValueError, ("finite", "0.0"), put("softmax_scale", 0)),
    ("scale negative", "softmax_scale", ValueError, ("finite", "-1.0"), put("softmax_scale", -1.0)),
    ("scale NaN", "softmax_scale", ValueError, ("finite", "nan"), put("softmax_scale", math.nan)),
    ("scale infinite", "softmax_scale", ValueError, ("finite", "inf"), put("softmax_scale", math.inf)),
    ("scale array", "softmax_scale", TypeError, ("FakeArray",), put("softmax_scale", FakeArray(()))),
    ("causal int", "causal", TypeError, ("bool", "int 1"), put("causal", 1)),
    ("deterministic None", "deterministic", TypeError, ("bool", "None"), put("deterministic", None)),
    ("is_varlen int", "is_varlen", TypeError, ("bool", "int 0"), put("is_varlen", 0)),
    ("window None", "window_size", TypeError, ("pair", "None"), put("window_size", None)),
    ("window an int", "window_size", TypeError, ("pair", "int 5"), put("window_size", 5)),
    ("window a string", "window_size", TypeError, ("pair", "'ab'"), put("window_size", "ab")),
    ("window an array", "window_size", TypeError, ("pair", "FakeArray"), put("window_size", FakeArray((2,)))),
    ("window of one", "window_size", ValueError, ("pair", "1 items"), put("window_size", (5,))),
    ("window of three", "window_size", ValueError, ("pair", "3 items"), put("window_size", (1, 2, 3))),
    ("window left -2", "window_size", ValueError, ("left", "-2"), put("window_size", (-2, 0))),
    ("window right -2", "window_size", ValueError, ("right", "-2"), put("window_size", (0, -2))),
    ("window float", "window_size", TypeError, ("right", "2.0"), put("window_size", (0, 2.0))),
    ("window bool", "window_size", TypeError, ("left", "True"), put("window_size", (True, 0))),
    (
        "window of arrays",
        "window_size",
        TypeError,
        ("left", "FakeArray"),
        put("window_size", (FakeArray(()), 0)),
    ),
    ("softcap negative", "softcap", ValueError, ("finite", "-1.0"), put("softcap", -1.0)),
    ("softcap NaN", "softcap", ValueError, ("finite", "nan"), put("softcap", math.nan)),
    (
        "softcap of a large scale",
        "softcap",
        ValueError,
        ("at least softmax_scale / 3.403e+38", "1e-20", "1e+19"),
        both(put("softmax_scale", 1e19), put("softcap", 1e-20)),
    ),
    ("softcap infinite", "softcap", ValueError, ("finite", "inf"), put("softcap", math.inf)),
    ("softcap None", "softcap", TypeError, ("float", "None"), put("softcap", None)),
    ("softcap array", "softcap", TypeError, ("FakeArray",), put("softcap", FakeArray(()))),
    ("chunk", "attention_chunk", ValueError, ("not supported yet", "64"), put("attention_chunk", 64)),
    ("chunk negative", "attention_chunk", ValueError, ("expected 0", "-1"), put("attention_chunk", -1)),
    ("chunk None", "attention_chunk", TypeError, ("int", "None"), put("attention_chunk", None)),
    ("sink int32", "attn_sink", TypeError, ("float32", "got int32"), change("attn_sink", dtype="int32")),
    ("sink too short", "attn_sink", ValueError, ("[8]", "[7]"), change("attn_sink", shape=(7,))),
    ("sink 2-D", "attn_sink", ValueError, ("[8]", "[1, 8]"), change("attn_sink", shape=(1, H_Q))),
    ("slopes bf16", "alibi_slopes", TypeError, ("float32",), change("alibi_slopes", dtype="bfloat16")),
    ("slopes 3-D", "alibi_slopes", ValueError, ("[3, 8]",), change("alibi_slopes", shape=(1, B, H_Q))),
    ("slopes of heads", "alibi_slopes", ValueError, ("[8]", "[3, 7]"), change("alibi_slopes", shape=(B, 7))),
    ("slopes of requests", "alibi_slopes", ValueError, ("[4, 8]",), change("alibi_slopes", shape=(4, H_Q))),
    ("slopes strided", "alibi_slopes", ValueError, ("[16, 2]",), change("alibi_slopes", strides=(16, 2))),
    ("slopes reversed", "alibi_slopes", ValueError, ("[-8, 1]",), change("alibi_slopes", strides=(-8, 1))),
    ("out a list", "out", TypeError, ("got list",), put("out", [1])),
    ("out fp16", "out", TypeError, ("bfloat16", "float16"), put("out", out_array(dtype="float16"))),
    ("out shape", "out", ValueError, ("[40, 8, 64]",), put("out", out_array(shape=Q))),
    ("out 4-D", "out", ValueError, ("[40, 8, 64]",), put("out", out_array(shape=(1, *Q[:2], D_V)))),
    ("out device", "out", ValueError, ("cuda:0", "cuda:1"), put("out", out_array(device=1))),
    ("out address", "out", ValueError, ("multiple of 16 bytes", "0x7008"), put("out", out_array(ptr=0x7008))),
    ("out strides", "out", ValueError, ("multiples of 8",), put("out", out_array(strides=(516, 64, 1)))),
    ("out last", "out", ValueError, ("contiguous last",), put("out", out_array(strides=(1024, 128, 2)))),
    ("out overlaps", "out", ValueError, ("overlap",), put("out", out_array(strides=(256, 64, 1)))),
    ("out expanded", "out", ValueError, ("positive",), put("out", out_array(strides=(0, 64, 1)))),
    ("out reversed", "out", ValueError, ("positive",), put("out", out_array(strides=(-512, 64, 1)))),
]


@pytest.mark.parametrize(
    ("argument", "kind", "texts", "spoil"),
    [case[1:] for case in BAD_CALLS],
    ids=[case[0] for case in BAD_CALLS],
)
def test_bad_call(
    world: World,
    argument: str,
    kind: type[Exception],
    texts: tuple[str, ...],
    spoil: Callable[[Arguments], None],
) -> None:
    arguments = optional()
    spoil(arguments)
    with pytest.raises(kind) as caught:
        call(arguments)
    message = str(caught.value)
    assert type(caught.value) is kind
    assert message.startswith(f"{argument}: expected ")
    assert ", got " in message
    for text in texts:
        assert text in message
    assert world.untouched


def test_bad_call_after_a_good_one(world: World) -> None:
    """What is known of accepted calls does not hide what differs."""
    call(optional())
    made = len(world.framework.allocated)
    for _, _, kind, _, spoil in BAD_CALLS:
        arguments = optional()
        spoil(arguments)
        with pytest.raises(kind):
            call(arguments)
    assert len(world.mha) == 1 and len(world.framework.allocated) == made


@pytest.mark.parametrize(
    ("argument", "kind", "text", "spoil"),
    (
        ("q", ValueError, "[b, s_q, h_q, d_qk]", change("q", shape=Q)),
        ("k", ValueError, "[3, s_k, h_kv, 128] (b of q, d_qk of q)", change("k", shape=K)),
        (
            "k",
            ValueError,
            "[3, s_k, h_kv, 128] (b of q, d_qk of q)",
            change("k", shape=(1, S_K, H_KV, D_QK)),
        ),
        (
            "v",
            ValueError,
            "[3, 7, 2, d_v] (b of q, s_k of k, h_kv of k)",
            change("v", shape=(B, S_Q, H_KV, D_V)),
        ),
        ("q", ValueError, "2**30 tokens", change("q", shape=(B, 2**29, H_Q, D_QK))),
        ("alibi_slopes", ValueError, "[8] or [3, 8]", put("alibi_slopes", FakeArray((2, H_Q), "float32"))),
        ("out", ValueError, "[3, 5, 8, 64]", put("out", out_array())),
        ("causal", TypeError, "bool", put("causal", None)),
    ),
)
def test_bad_call_of_fixed_lengths(
    world: World, argument: str, kind: type[Exception], text: str, spoil: Callable[[Arguments], None]
) -> None:
    arguments = fixed()
    spoil(arguments)
    with pytest.raises(kind) as caught:
        rawmla.flash_attn_func(**arguments)
    assert str(caught.value).startswith(f"{argument}: expected ") and text in str(caught.value)
    assert world.untouched


@pytest.mark.parametrize(
    ("function", "argument", "kind", "text", "arguments"),
    (
        ("qkv", "qkv", TypeError, "got list", packed_qkv() | {"qkv": [1]}),
        ("qkv", "qkv", ValueError, "[total, 3, h, d]", packed_qkv(40, 2, 8, 64)),
        ("qkv", "qkv", ValueError, "[total, h, 2 * d_qk + d_v] or", packed_qkv(40, 8)),
        ("qkv", "qkv", ValueError, "2 * d_qk + d_v", packed_qkv(40, 8, 256) | {"head_dim_qk": 128}),
        ("qkv", "qkv", ValueError, "2 * d_qk + d_v", packed_qkv(40, 8, 600) | {"head_dim_qk": 128}),
        ("qkv", "qkv", ValueError, "1 to 256", packed_qkv(40, 3, 8, 257)),
        ("qkv", "head_dim_qk", ValueError, "got None", packed_qkv(40, 8, 320)),
        ("qkv", "head_dim_qk", ValueError, "expected None", packed_qkv(40, 3, 8, 64) | {"head_dim_qk": 64}),
        ("qkv", "head_dim_qk", TypeError, "float", packed_qkv(40, 8, 320) | {"head_dim_qk": 128.0}),
        ("qkv", "head_dim_qk", ValueError, "1 to 256", packed_qkv(40, 8, 320) | {"head_dim_qk": 0}),
        ("qkv", "head_dim_qk", ValueError, "1 to 256", packed_qkv(40, 8, 800) | {"head_dim_qk": 257}),
        ("qkv", "cu_seqlens", TypeError, "NoneType", packed_qkv(40, 3, 8, 64) | {"cu_seqlens": None}),
        (
            "qkv",
            "cu_seqlens",
            TypeError,
            "int64",
            packed_qkv(40, 3, 8, 64) | {"cu_seqlens": FakeArray((4,), "int64")},
        ),
        ("qkv", "max_seqlen", TypeError, "got None", packed_qkv(40, 3, 8, 64) | {"max_seqlen": None}),
        (
            "qkv",
            "cu_seqlens",
            ValueError,
            "cuda:0, the device of qkv",
            packed_qkv(40, 3, 8, 64) | {"cu_seqlens": FakeArray((4,), device=1)},
        ),
        (
            "kv",
            "kv",
            ValueError,
            "cuda:0, the device of q",
            packed_kv() | {"kv": FakeArray((56, 2, 2, 128), "bfloat16", device=1)},
        ),
        ("kv", "kv", ValueError, "[total, 2, h, d]", packed_kv(56, 3, 2, 128)),
        ("kv", "kv", ValueError, "[total, h, d_qk + d_v] or", packed_kv(56, 128)),
        ("kv", "kv", ValueError, "[total_k, h_kv, 128] (d_qk of q)", packed_kv(56, 2, 2, 64)),
        (
            "kv",
            "kv",
            ValueError,
            "[total_k, h_kv, 128] (d_qk of q)",
            packed_kv(56, 2, 192) | {"head_dim_qk": 64},
        ),
        ("kv", "head_dim_qk", ValueError, "got None", packed_kv(56, 2, 192)),
        ("kv", "q", ValueError, "h_q 8 and h_kv 3", packed_kv(56, 2, 3, 128)),
    ),
)
def test_bad_packed_call(
    world: World, function: str, argument: str, kind: type[Exception], text: str, arguments: Arguments
) -> None:
    with pytest.raises(kind) as caught:
        getattr(rawmla, f"flash_attn_varlen_{function}packed_func")(**arguments)
    assert str(caught.value).startswith(f"{argument}: expected ") and text in str(caught.value)
    assert world.untouched


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
    window_left=NO_BOUND,
    window_right=NO_BOUND,
    softcap=0.0,
    sink_dtype=None,
    alibi_stride_b=0,
    has_alibi=False,
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


class TestLaunch:
    """What an accepted call hands to the kernel."""

    def test_every_field(self, world: World) -> None:
        out, lse = call(
            optional(),
            softmax_scale=0.25,
            causal=True,
            deterministic=True,
            window_size=(7, 9),
            softcap=30.0,
        )
        allocated = world.framework.allocated
        assert [out, lse] == allocated[:2]
        assert [(x.shape, x.dtype, x.strides) for x in allocated] == [
            ((TOTAL_Q, H_Q, D_V), "bfloat16", (512, 64, 1)),
            ((TOTAL_Q, H_Q), "float32", (1, TOTAL_Q)),
            ((48,), "uint8", None),
        ]
        (launch,) = world.mha
        assert launch.call == EXPECTED._replace(
            softmax_scale=0.25,
            window_left=7,
            window_right=0,
            softcap=30.0,
            sink_dtype="float32",
            has_alibi=True,
            alibi_stride_b=H_Q,
        )
        assert launch.addresses == MhaForwardAddresses(
            q=0x1000,
            k=0x2000,
            v=0x3000,
            out=out.ptr,
            lse=lse.ptr,
            cu_seqlens_q=0x4000,
            cu_seqlens_k=0x4800,
            seqused_q=0x5000,
            seqused_k=0x5800,
            attn_sink=0x6000,
            alibi_slopes=0x6800,
        )
        assert (launch.stream, launch.scratch) == (0x51, allocated[2].ptr)
        assert launch.prepared.capturing() is False
        assert not world.framework.copied and not world.framework.filled

    def test_nothing_optional(self, world: World) -> None:
        call(plain())
        (launch,) = world.mha
        assert launch.call == EXPECTED
        assert launch.addresses[5:] == (0x4000, 0x4800, *(0,) * 10)

    def test_fixed_lengths(self, world: World) -> None:
        out, lse = rawmla.flash_attn_func(**fixed())
        assert (out.shape, out.dtype, out.strides) == (
            (B, S_Q, H_Q, D_V),
            "bfloat16",
            contiguous((B, S_Q, H_Q, D_V)),
        )
        assert (lse.shape, lse.dtype, lse.strides) == ((B, H_Q, S_Q), "float32", None)
        (launch,) = world.mha
        assert launch.call == FIXED and launch.addresses[5:] == (0,) * 12

    def test_positional(self, world: World) -> None:
        """FlashMLA's order, and FlashAttention's."""
        values = [*plain().values()]
        rawmla.flash_attn_varlen_func(*values, 0.0, 0.5, True, False, True)
        sink, slopes = FakeArray((H_Q,), "float16"), FakeArray((H_Q,), "float32")
        rawmla.flash_attn_func(*fixed().values(), 0.0, 0.5, False, (3, 4), 2.0, slopes, False, attn_sink=sink)
        first, second = [launch.call for launch in world.mha]
        assert first == EXPECTED._replace(softmax_scale=0.5, window_right=0)
        assert second == FIXED._replace(
            softmax_scale=0.5,
            window_left=3,
            window_right=4,
            softcap=2.0,
            has_alibi=True,
            sink_dtype="float16",
        )

    @pytest.mark.parametrize(
        ("name", "alias"),
        (
            ("cu_seqlens_q", "cu_seqlens_qo"),
            ("cu_seqlens_k", "cu_seqlens_kv"),
            ("max_seqlen_q", "max_seqlen_qo"),
            ("max_seqlen_k", "max_seqlen_kv"),
            ("attn_sink", "learnable_sink"),
        ),
    )
    @pytest.mark.parametrize("packed", (False, True))
    def test_aliases(self, world: World, name: str, alias: str, packed: bool) -> None:
        function: Any = rawmla.flash_attn_varlen_func
        arguments = optional()
        if packed:
            function = rawmla.flash_attn_varlen_kvpacked_func
            arguments = optional() | packed_kv(TOTAL_K, 2, H_KV, D_QK)
            del arguments["k"], arguments["v"]
        function(**arguments)
        value = arguments[name]
        with pytest.raises(TypeError, match=rf"^{alias}: expected it or {name}.*, got both$"):
            function(**arguments, **{alias: value})
        del arguments[name]
        function(**arguments, **{alias: value})
        first, second = world.mha
        assert first.call == second.call and first.addresses[5:] == second.addresses[5:]

    def test_alias_of_fixed_lengths(self, world: World) -> None:
        sink = FakeArray((H_Q,), "float16", ptr=0x6000)
        rawmla.flash_attn_func(**fixed(), learnable_sink=sink)
        assert world.mha[0].addresses.attn_sink == 0x6000
        with pytest.raises(TypeError, match="^learnable_sink: expected it or attn_sink"):
            rawmla.flash_attn_func(**fixed(), attn_sink=sink, learnable_sink=sink)

    def test_unknown_keywords(self, world: World) -> None:
        for name in ("q_descale", "qv", "page_table", "num_splits", "pack_gqa", "return_attn_probs"):
            with pytest.raises(TypeError, match=name):
                call(plain(), **{name: None})
            with pytest.raises(TypeError, match=name):
                rawmla.flash_attn_func(**fixed(), **{name: None})
        assert world.untouched

    def test_sink_of_packed_arrays(self, world: World) -> None:
        sink = FakeArray((H_Q,), "bfloat16", ptr=0x6000)
        rawmla.flash_attn_varlen_qkvpacked_func(**packed_qkv(TOTAL_Q, 3, H_Q, D_V), learnable_sink=sink)
        (launch,) = world.mha
        assert launch.call.sink_dtype == "bfloat16" and launch.addresses.attn_sink == 0x6000

    @pytest.mark.parametrize("function", ("func", "qkvpacked_func", "kvpacked_func"))
    def test_the_same_options_everywhere(self, function: str) -> None:
        """Names, order and defaults behind the arrays and lengths."""
        of = inspect.signature(getattr(rawmla, f"flash_attn_varlen_{function}")).parameters
        names = [name for name in of if name not in ("cu_seqlens_qo", "cu_seqlens_kv")]
        names = [name for name in names if name not in ("max_seqlen_qo", "max_seqlen_kv")]
        assert names[names.index("dropout_p") :] == [
            *("dropout_p", "softmax_scale", "causal", "deterministic", "is_varlen"),
            *("window_size", "softcap", "attn_sink", "alibi_slopes", "attention_chunk"),
            *("seqused_q", "seqused_k", "out", "learnable_sink"),
        ]
        assert of["window_size"].default == (-1, -1) and of["is_varlen"].default is True
        assert of["window_size"].kind is inspect.Parameter.KEYWORD_ONLY

    @pytest.mark.parametrize(
        ("window", "causal", "left", "right"),
        (
            ((-1, -1), False, NO_BOUND, NO_BOUND),
            ((None, None), False, NO_BOUND, NO_BOUND),
            ((0, None), False, 0, NO_BOUND),
            ([None, 3], False, NO_BOUND, 3),
            ((5, 3), True, 5, 0),
            ((-1, -1), True, NO_BOUND, 0),
            ((2**31, 2**70), False, NO_BOUND, NO_BOUND),
            ((np.int32(4), np.int64(-1)), False, 4, NO_BOUND),
        ),
    )
    def test_windows(self, world: World, window: Any, causal: bool, left: int, right: int) -> None:
        call(plain(), window_size=window, causal=causal)
        launched = world.mha[0].call
        assert (launched.window_left, launched.window_right) == (left, right)
        assert type(launched.window_left) is type(launched.window_right) is int

    def test_numpy_scalars(self, world: World) -> None:
        call(
            plain() | {"max_seqlen_q": np.int32(20), "max_seqlen_k": np.int64(30)},
            dropout_p=np.float32(0),
            softmax_scale=np.float32(0.5),
            softcap=np.float64(0.0),
            causal=np.True_,
            attention_chunk=np.int64(0),
        )
        assert world.mha[0].call == EXPECTED._replace(softmax_scale=0.5, window_right=0)
        assert type(world.mha[0].call.max_seqlen_q) is int

    def test_lengths_beyond_the_arrays(self, world: World) -> None:
        call(plain(), max_seqlen_q=2**31 - 1, max_seqlen_k=10**12)
        assert world.mha[0].call == EXPECTED._replace(max_seqlen_q=TOTAL_Q, max_seqlen_k=TOTAL_K)

    @pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
    def test_dtypes(self, world: World, dtype: str) -> None:
        arguments = plain()
        for name in ("q", "k", "v"):
            change(name, dtype=dtype)(arguments)
        out, _ = call(arguments)
        assert world.mha[0].call.dtype == out.dtype == dtype

    @pytest.mark.parametrize(
        ("shape", "strides", "stride_b"), (((H_Q,), None, 0), ((B, H_Q), (0, 1), 0), ((B, H_Q), (50, 1), 50))
    )
    def test_slopes(self, world: World, shape: Any, strides: Any, stride_b: int) -> None:
        call(plain(), alibi_slopes=FakeArray(shape, "float32", strides))
        assert (world.mha[0].call.has_alibi, world.mha[0].call.alibi_stride_b) == (True, stride_b)

    def test_other_device(self, world: World) -> None:
        arguments = optional()
        for name in ARRAYS:
            change(name, device=1)(arguments)
        call(arguments)
        assert (world.mha[0].call.device, world.mha[0].stream) == (1, 0x52)
        assert {x.device for x in world.framework.allocated} == {1}

    @pytest.mark.parametrize("name", ARRAYS[1:])
    def test_another_framework_on_the_same_stream(self, world: World, name: str) -> None:
        arguments = optional()
        other = FakeFramework("other")
        change(name, framework=other)(arguments)
        call(arguments)
        assert len(world.mha) == 1 and not other.allocated
        other.stream += 1
        with pytest.raises(ValueError, match=rf"^{name}: expected a fake array"):
            call(arguments)


class TestPromiseOfOneLength:
    """`is_varlen=False`."""

    def test_kept(self, world: World) -> None:
        arguments = plain() | {"max_seqlen_q": 8, "max_seqlen_k": 14}
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            change(name, shape=(6,))(arguments)
        change("k", shape=(70, H_KV, D_QK))(arguments)
        change("v", shape=(70, H_KV, D_V))(arguments)
        out, lse = call(arguments, is_varlen=False)
        (launch,) = world.mha
        assert launch.call == EXPECTED._replace(
            b=5,
            k_batches=5,
            varlen=False,
            max_seqlen_q=8,
            max_seqlen_k=14,
            total_q=8,
            total_k=14,
            q_strides=(8 * 1024, 1024, 128),
            k_strides=(14 * 256, 256, 128),
            v_strides=(14 * 128, 128, 64),
            out_strides=(8 * 512, 512, 64),
            lse_strides=(8, TOTAL_Q),
        )
        assert launch.addresses.cu_seqlens_q == launch.addresses.cu_seqlens_k == 0
        assert (out.shape, lse.shape, lse.strides) == ((TOTAL_Q, H_Q, D_V), (TOTAL_Q, H_Q), (1, TOTAL_Q))

    @pytest.mark.parametrize("more", ({"max_seqlen_k": 15}, {"max_seqlen_q": 9}, {"max_seqlen_q": 7}))
    def test_broken(self, world: World, more: Arguments) -> None:
        """Then requests are where cu_seqlens says."""
        arguments = plain() | {"max_seqlen_q": 8, "max_seqlen_k": 14}
        change("q", shape=(24, H_Q, D_QK))(arguments)
        change("k", shape=(42, H_KV, D_QK))(arguments)
        change("v", shape=(42, H_KV, D_V))(arguments)
        call(arguments, is_varlen=False)
        call(arguments, is_varlen=False, **more)
        call(arguments)
        assert [launch.call.varlen for launch in world.mha] == [False, True, True]
        assert [launch.addresses.cu_seqlens_k for launch in world.mha] == [0, 0x4800, 0x4800]

    @pytest.mark.parametrize("name", ("seqused_q", "seqused_k"))
    def test_with_tokens_that_do_not_exist(self, world: World, name: str) -> None:
        arguments = plain() | {"max_seqlen_q": 8, "max_seqlen_k": 14, name: FakeArray((B,))}
        change("q", shape=(24, H_Q, D_QK))(arguments)
        change("k", shape=(42, H_KV, D_QK))(arguments)
        change("v", shape=(42, H_KV, D_V))(arguments)
        call(arguments, is_varlen=False)
        assert world.mha[0].call.varlen


class TestLayouts:
    """Which arrays are read where they lie, and what a fresh out looks like."""

    @pytest.mark.parametrize(
        ("strides", "out_strides"),
        (
            ((1024, 128, 1), (512, 64, 1)),
            ((3072, 128, 1), (512, 64, 1)),  # a slice of a packed projection
            ((128, 40 * 128, 1), (64, 40 * 64, 1)),  # heads outermost
            ((0, 128, 1), (512, 64, 1)),  # broadcast: no order follows
            ((8, 136, 1), (64, 40 * 64, 1)),  # rows may overlap in what is read
        ),
    )
    def test_strides_of_q(self, world: World, strides: Any, out_strides: Any) -> None:
        arguments = plain()
        change("q", strides=strides)(arguments)
        out, _ = call(arguments)
        launched = world.mha[0].call
        assert launched.q_strides == (0, *strides[:-1]) and not world.framework.copied
        assert out.strides == out_strides and launched.out_strides == (0, *out_strides[:-1])

    @pytest.mark.parametrize("axes", ((0, 2, 1), (2, 1, 0), (1, 0, 2)))
    def test_orders_of_four_dimensions(self, world: World, axes: Any) -> None:
        """`axes`: of (batch, token, head), from the largest stride to the smallest."""
        arguments = fixed()
        for name, width in (("q", D_QK), ("k", D_QK), ("v", D_V)):
            shape = arguments[name].shape
            inner = contiguous((*[shape[axis] for axis in axes], width))
            strides = (*[inner[axes.index(axis)] for axis in range(3)], 1)
            change(name, strides=strides)(arguments)
        out, lse = rawmla.flash_attn_func(**arguments)
        launched = world.mha[0].call
        assert launched.q_strides == arguments["q"].strides[:3]
        assert launched.k_strides == arguments["k"].strides[:3]
        assert launched.v_strides == arguments["v"].strides[:3]
        inner = contiguous((*[out.shape[axis] for axis in axes], D_V))
        assert out.strides == (*[inner[axes.index(axis)] for axis in range(3)], 1)
        assert launched.out_strides == out.strides[:3]
        assert lse.strides is None and not world.framework.copied

    @pytest.mark.parametrize("name", ("q", "k", "v"))
    @pytest.mark.parametrize(
        "changes",
        (
            {"ptr": 0x1008},
            {"strides": (4096, 132, 1)},
            {"strides": (-4096, 128, 1)},
            {"strides": (2**39, 128, 1)},
            {"strides": (4096, 256, 2)},
        ),
    )
    def test_copied(self, world: World, name: str, changes: Arguments) -> None:
        arguments = plain()
        change(name, **changes)(arguments)
        call(arguments)
        launch = world.mha[0]
        assert world.framework.copied == [arguments[name]]
        assert launch.call == EXPECTED
        addresses = {other: arguments[other].ptr for other in ("q", "k", "v")} | {name: COPY + 0x1000}
        assert launch.addresses[:3] == (addresses["q"], addresses["k"], addresses["v"])

    def test_copied_of_another_framework(self, world: World) -> None:
        """By its own framework, which also knows where the copy lies."""
        arguments, other = plain(), FakeFramework("other")
        change("k", ptr=0x1008, framework=other)(arguments)
        call(arguments)
        assert other.copied == [arguments["k"]] and not world.framework.copied
        assert world.mha[0].addresses.k == COPY + 0x1000

    def test_head_dimensions_that_fill_no_16_bytes(self, world: World) -> None:
        arguments = plain()
        change("q", shape=(TOTAL_Q, H_Q, 17))(arguments)
        change("k", shape=(TOTAL_K, H_KV, 17))(arguments)
        change("v", shape=(TOTAL_K, H_KV, 33))(arguments)
        out, _ = call(arguments)
        launch = world.mha[0]
        assert world.framework.copied == [arguments["q"], arguments["k"], arguments["v"]]
        assert launch.addresses[:3] == (COPY + 0x1000, COPY + 0x2000, COPY + 0x3000)
        assert launch.call == EXPECTED._replace(
            d_qk=17,
            d_v=33,
            softmax_scale=17**-0.5,
            q_strides=(0, H_Q * 24, 24),
            k_strides=(0, H_KV * 24, 24),
            v_strides=(0, H_KV * 40, 40),
            out_strides=(0, H_Q * 40, 40),
        )
        assert (out.shape, out.strides) == ((TOTAL_Q, H_Q, 33), (H_Q * 40, 40, 1))

    def test_such_dimensions_in_padded_rows(self, world: World) -> None:
        arguments = plain()
        change("q", shape=(TOTAL_Q, H_Q, 17), strides=(H_Q * 32, 32, 1))(arguments)
        change("k", shape=(TOTAL_K, H_KV, 17), strides=(H_KV * 24, 24, 1))(arguments)
        call(arguments)
        assert not world.framework.copied
        assert world.mha[0].call.q_strides == (0, H_Q * 32, 32)

    def test_dimensions_of_one_element(self, world: World) -> None:
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

    def test_copies_follow_the_call(self, world: World) -> None:
        """The kind of call is known, the copy is made anew."""
        arguments = plain()
        change("k", ptr=0x2002)(arguments)
        call(arguments)
        call(arguments)
        assert len(world.framework.copied) == 2
        assert [launch.addresses.k for launch in world.mha] == [COPY + 0x1000, COPY + 0x2000]

    @pytest.mark.parametrize(
        "strides", ((512, 64, 1), (1024, 128, 1), (64, 40 * 64, 1), (8192, 64, 1)), ids=str
    )
    def test_given_out(self, world: World, strides: Any) -> None:
        out = out_array(strides=strides)
        result, lse = call(plain(), out=out)
        assert result is out and world.mha[0].addresses.out == 0x7000
        assert world.mha[0].call.out_strides == (0, *strides[:-1])
        assert [x.shape for x in world.framework.allocated] == [(TOTAL_Q, H_Q), (48,)]
        assert lse is world.framework.allocated[0]

    def test_given_out_of_fixed_lengths(self, world: World) -> None:
        strides = (4 * S_Q * 1024, 1024, 128, 1)
        out = FakeArray((B, S_Q, H_Q, D_V), "bfloat16", strides, ptr=0x7000)
        result, _ = rawmla.flash_attn_func(**fixed(), out=out)
        assert result is out and world.mha[0].call.out_strides == strides[:-1]


class TestPacked:
    def test_qkv_of_flash_mla(self, world: World) -> None:
        out, lse = rawmla.flash_attn_varlen_qkvpacked_func(
            **packed_qkv(TOTAL_Q, H_Q, 2 * D_QK + D_V), head_dim_qk=D_QK, causal=True
        )
        (launch,) = world.mha
        strides = (0, H_Q * 320, 320)
        assert launch.call == EXPECTED._replace(
            h_kv=H_Q,
            max_seqlen_k=20,
            total_k=TOTAL_Q,
            q_strides=strides,
            k_strides=strides,
            v_strides=strides,
            window_right=0,
        )
        assert launch.addresses[:3] == (0x1000, 0x1000 + 2 * 128, 0x1000 + 2 * 256)
        assert launch.addresses[5:7] == (0x4000, 0x4000)
        assert (out.shape, out.strides) == ((TOTAL_Q, H_Q, D_V), (512, 64, 1)) and lse.shape == out.shape[:2]

    def test_qkv_of_flash_attention(self, world: World) -> None:
        rawmla.flash_attn_varlen_qkvpacked_func(
            **packed_qkv(TOTAL_Q, 3, H_Q, D_V), softmax_scale=0.5, window_size=(4, 2)
        )
        (launch,) = world.mha
        strides = (0, 3 * H_Q * D_V, D_V)
        assert launch.call == EXPECTED._replace(
            h_kv=H_Q,
            d_qk=D_V,
            max_seqlen_k=20,
            total_k=TOTAL_Q,
            q_strides=strides,
            k_strides=strides,
            v_strides=strides,
            softmax_scale=0.5,
            window_left=4,
            window_right=2,
        )
        part = 2 * H_Q * D_V
        assert launch.addresses[:3] == (0x1000, 0x1000 + part, 0x1000 + 2 * part)

    def test_kv_of_flash_mla(self, world: World) -> None:
        arguments = packed_kv(TOTAL_K, H_KV, D_QK + D_V)
        rawmla.flash_attn_varlen_kvpacked_func(
            arguments.pop("q"), arguments.pop("kv"), *arguments.values(), D_QK, 0.0, 0.25, True
        )
        (launch,) = world.mha
        strides = (0, H_KV * 192, 192)
        assert launch.call == EXPECTED._replace(
            k_strides=strides, v_strides=strides, softmax_scale=0.25, window_right=0
        )
        assert launch.addresses[:3] == (0x1000, 0x2000, 0x2000 + 2 * 128)

    def test_kv_of_flash_attention(self, world: World) -> None:
        rawmla.flash_attn_varlen_kvpacked_func(**packed_kv(TOTAL_K, 2, H_KV, D_QK))
        (launch,) = world.mha
        strides = (0, 2 * H_KV * D_QK, D_QK)
        assert launch.call == EXPECTED._replace(
            d_v=D_QK, k_strides=strides, v_strides=strides, out_strides=(0, 1024, 128)
        )
        assert launch.addresses[:3] == (0x1000, 0x2000, 0x2000 + 2 * H_KV * D_QK)

    def test_parts_that_are_copied(self, world: World) -> None:
        """Parts that do not begin at a multiple of 16 bytes."""
        arguments = packed_qkv(TOTAL_Q, H_Q, 2 * 20 + 24)
        rawmla.flash_attn_varlen_qkvpacked_func(**arguments, head_dim_qk=20)
        assert [(x.ptr, x.index) for x in world.framework.copied] == [(0x1000, (..., slice(20, 40)))]
        (launch,) = world.mha
        assert launch.addresses[:3] == (0x1000, COPY + 0x1000, 0x1000 + 2 * 40)
        assert launch.call.k_strides == (0, H_Q * 24, 24)
        assert launch.call.q_strides == launch.call.v_strides == (0, H_Q * 64, 64)

    def test_a_part_of_four_dimensions_that_is_copied(self, world: World) -> None:
        arguments = packed_kv(TOTAL_K, 2, H_KV, D_QK)
        change("kv", strides=(2 * H_KV * D_QK + 8, H_KV * D_QK + 4, D_QK, 1))(arguments)
        rawmla.flash_attn_varlen_kvpacked_func(**arguments)
        assert [x.index for x in world.framework.copied] == [(slice(None), 1)]


class TestNothingToAttend:
    @pytest.mark.parametrize("given", (False, True))
    @pytest.mark.parametrize(
        "spoil",
        (
            change("q", shape=(0, H_Q, D_QK)),
            put("max_seqlen_q", 0),
            both(change("cu_seqlens_q", shape=(1,)), change("cu_seqlens_k", shape=(1,))),
        ),
        ids=("no tokens", "no length", "no requests"),
    )
    def test_no_queries(self, world: World, spoil: Callable[[Arguments], None], given: bool) -> None:
        arguments = plain()
        spoil(arguments)
        tokens = arguments["q"].shape[0]
        shape = (tokens, H_Q, D_V)
        out = FakeArray(shape, "bfloat16", ptr=0x7000) if given else None
        result, lse = call(arguments, out=out)
        assert (result.shape, result.dtype, lse.shape, lse.dtype) == (
            shape,
            "bfloat16",
            (tokens, H_Q),
            "float32",
        )
        assert (result is out) == given and len(world.framework.allocated) == (1 if given else 2)
        assert not world.mha and not world.framework.filled

    @pytest.mark.parametrize("name", ("b", "s_q"))
    def test_no_queries_of_fixed_lengths(self, world: World, name: str) -> None:
        arguments = fixed()
        b, s_q = (0, S_Q) if name == "b" else (B, 0)
        change("q", shape=(b, s_q, H_Q, D_QK))(arguments)
        change("k", shape=(b, S_K, H_KV, D_QK))(arguments)
        change("v", shape=(b, S_K, H_KV, D_V))(arguments)
        out, lse = rawmla.flash_attn_func(**arguments)
        assert (out.shape, lse.shape) == ((b, s_q, H_Q, D_V), (b, H_Q, s_q))
        assert not world.mha and not world.framework.filled

    @pytest.mark.parametrize("given", (False, True))
    def test_no_keys(self, world: World, given: bool) -> None:
        """The kernel writes the results, and no row that is of no request."""
        arguments = plain() | {"max_seqlen_k": 0}
        change("k", shape=(0, H_KV, D_QK), ptr=0)(arguments)
        change("v", shape=(0, H_KV, D_V), ptr=0)(arguments)
        out = out_array() if given else None
        result, _ = call(arguments, out=out)
        (launch,) = world.mha
        assert (launch.call.total_k, launch.call.max_seqlen_k) == (0, 0)
        assert (result is out) == given and not world.framework.filled

    def test_no_keys_of_fixed_lengths(self, world: World) -> None:
        arguments = fixed()
        change("k", shape=(B, 0, H_KV, D_QK), ptr=0)(arguments)
        change("v", shape=(B, 0, H_KV, D_V), ptr=0)(arguments)
        rawmla.flash_attn_func(**arguments)
        assert world.mha[0].call.total_k == 0 and not world.framework.filled

    def test_requests_without_keys_are_the_kernels(self, world: World) -> None:
        call(plain(), max_seqlen_k=0)
        assert world.mha[0].call.max_seqlen_k == 0 and not world.framework.filled


class TestRepeatedCalls:
    def prepared(self, world: World) -> list[int]:
        """Which of the launches were prepared, as the number of the first one with the same preparation."""
        made = [launch.prepared for launch in world.mha]
        return [made.index(one) for one in made]

    def test_addresses_change(self, world: World) -> None:
        first, _ = call(optional())
        arguments = optional()
        for name in ARRAYS:
            change(name, ptr=arguments[name].ptr + 0x100000)(arguments)
        second, _ = call(arguments)
        assert self.prepared(world) == [0, 0] and first is not second
        assert world.mha[1].addresses.k == 0x102000 and world.mha[1].addresses.alibi_slopes == 0x106800

    @pytest.mark.parametrize(
        "changed",
        (
            {"softmax_scale": 0.5},
            {"causal": True},
            {"window_size": (3, -1)},
            {"softcap": 1.5},
            {"max_seqlen_q": 19},
            {"max_seqlen_k": 29},
            {"attn_sink": FakeArray((H_Q,), "float32")},
            {"alibi_slopes": FakeArray((H_Q,), "float32")},
            {"out": out_array(strides=(1024, 128, 1))},
        ),
        ids=lambda changed: next(iter(changed)),
    )
    def test_numbers_change(self, world: World, changed: Arguments) -> None:
        call(plain())
        call(plain() | changed)
        call(plain())
        assert self.prepared(world) == [0, 1, 0]
        assert world.mha[0].call == world.mha[2].call == EXPECTED

    def test_forgotten(self, world: World) -> None:
        call(plain())
        memo.clear_all()
        call(plain())
        assert self.prepared(world) == [0, 1]

    def test_missing_starts_after_requests_of_one_length(self, world: World) -> None:
        """The arrays are those of a call that is kept, but of another function."""
        rawmla.flash_attn_func(**fixed())
        with pytest.raises(TypeError, match="^cu_seqlens_q: expected a torch tensor"):
            rawmla.flash_attn_varlen_func(**fixed(), max_seqlen_q=S_Q, max_seqlen_k=S_K)
        assert len(world.mha) == 1


class TestWarmup:
    @pytest.mark.parametrize(
        ("function", "arguments"),
        (
            ("flash_attn_varlen_func", optional()),
            ("flash_attn_func", fixed()),
            ("flash_attn_varlen_qkvpacked_func", packed_qkv(TOTAL_Q, H_Q, 59) | {"head_dim_qk": 20}),
            ("flash_attn_varlen_kvpacked_func", packed_kv(TOTAL_K, 2, H_KV, D_QK)),
        ),
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_call(self, world: World, function: str, arguments: Arguments) -> None:
        assert rawmla.warmup_call(getattr(rawmla, function), **arguments) is None
        (launch,) = world.mha
        assert launch.stream == jit.NO_LAUNCH
        assert not world.framework.allocated and not world.framework.copied
