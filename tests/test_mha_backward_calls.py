"""What backward calls of dense attention refuse, allocate, copy and launch; arrays are stand-ins."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from calls.fakes import Arguments, FakeArray, FakeFramework, World, change, contiguous, make_world, put
from test_mha_calls import ARRAYS as FORWARD_ARRAYS
from test_mha_calls import D_QK, D_V, H_KV, H_Q, S_K, S_Q, TOTAL_K, TOTAL_Q, B, K, Q, V
from test_mha_calls import fixed as forward_fixed
from test_mha_calls import optional as forward_optional
from test_mha_calls import plain as forward_plain

import rawmla
from rawmla.kernels.mha_backward import BackwardAddresses, BackwardCall
from rawmla.kernels.mha_backward_variants import Needs
from rawmla.kernels.mha_forward import NO_BOUND

OUT = (TOTAL_Q, H_Q, D_V)
RESULTS = ("dq", "dk", "dv")
SHAPES = {"dq": Q, "dk": K, "dv": V}
READ = ("dout", "q", "k", "v", "out", "lse", "cu_seqlens_q", "cu_seqlens_k")
OPTIONAL = ("dq", "dk", "dv", "dlse", "seqused_q", "seqused_k", "attn_sink", "alibi_slopes")
LSE_STRIDES = (1, TOTAL_Q)  # heads first in memory


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return make_world(monkeypatch)


def plain() -> Arguments:
    """A varlen call that is accepted."""
    return forward_plain() | {
        "dout": FakeArray(OUT, "bfloat16", ptr=0x7000),
        "out": FakeArray(OUT, "bfloat16", ptr=0x7800),
        "lse": FakeArray((TOTAL_Q, H_Q), "float32", strides=LSE_STRIDES, ptr=0x8004),
    }


def optional() -> Arguments:
    """The same with all arrays that are optional."""
    given = {
        name: FakeArray(SHAPES[name], "bfloat16", ptr=0x9000 + 0x800 * i) for i, name in enumerate(RESULTS)
    }
    dlse = FakeArray((TOTAL_Q, H_Q), "float32", ptr=0x8804)
    return forward_optional() | plain() | given | {"dlse": dlse}


def fixed() -> Arguments:
    """A call of `flash_attn_backward` that is accepted."""
    return forward_fixed() | {
        "dout": FakeArray((B, S_Q, H_Q, D_V), "bfloat16", ptr=0x7000),
        "out": FakeArray((B, S_Q, H_Q, D_V), "bfloat16", ptr=0x7800),
        "lse": FakeArray((B, H_Q, S_Q), "float32", ptr=0x8004),
    }


def call(arguments: Arguments, **more: Any) -> tuple[Any, ...]:
    return rawmla.flash_attn_varlen_backward(**{**arguments, **more})


# name of the test, argument that the text names, exception, what the text also holds, how the call is spoilt
Case = tuple[str, str, type[Exception], tuple[str, ...], Callable[[Arguments], None]]
ALL = (*FORWARD_ARRAYS, "dout", "out", "lse", "dlse", *RESULTS)
BAD_CALLS: list[Case] = [
    *[(f"{name} a list", name, TypeError, ("got list",), put(name, [1])) for name in ALL],
    *[(f"{name} None", name, TypeError, ("got NoneType",), put(name, None)) for name in READ],
    *[
        (f"{name} on another device", name, ValueError, ("cuda:0", "of q", "cuda:1"), change(name, device=1))
        for name in ALL
        if name != "q"
    ],
    *[
        (
            f"{name} of another stream",
            name,
            ValueError,
            ("fake array", "0x51", "other array", "0x99"),
            change(name, framework=FakeFramework("other", stream=0x99)),
        )
        for name in ALL
        if name != "q"
    ],
    *[
        (f"{name} fp16", name, TypeError, ("bfloat16", "got float16"), change(name, dtype="float16"))
        for name in ("k", "v", "dout", "out", *RESULTS)
    ],
    *[
        (f"{name} bf16", name, TypeError, ("float32", "got bfloat16"), change(name, dtype="bfloat16"))
        for name in ("lse", "dlse", "alibi_slopes")
    ],
    *[
        (f"{name} of d_qk columns", name, ValueError, ("[40, 8, 64]", "[40, 8, 128]"), change(name, shape=Q))
        for name in ("dout", "out")
    ],
    *[
        (f"{name} [heads, tokens]", name, ValueError, ("[40, 8]", "[8, 40]"), change(name, shape=(8, 40)))
        for name in ("lse", "dlse")
    ],
    ("dq of a token less", "dq", ValueError, ("[40, 8, 128]",), change("dq", shape=(39, H_Q, D_QK))),
    ("dk of query heads", "dk", ValueError, ("[56, 2, 128]",), change("dk", shape=(TOTAL_K, H_Q, D_QK))),
    ("dv of d_qk columns", "dv", ValueError, ("[56, 2, 64]",), change("dv", shape=K)),
    *[
        (f"{name} at an odd address", name, ValueError, ("multiple of 16 bytes",), change(name, ptr=0x9008))
        for name in RESULTS
    ],
    *[
        (
            f"{name} broadcast",
            name,
            ValueError,
            ("positive",),
            change(name, strides=(0, *contiguous(SHAPES[name])[1:])),
        )
        for name in RESULTS
    ],
    *[
        (
            f"{name} of columns apart",
            name,
            ValueError,
            ("contiguous last",),
            change(name, strides=tuple(2 * n for n in contiguous(SHAPES[name]))),
        )
        for name in RESULTS
    ],
    (
        "dq twice in one place",
        "dq",
        ValueError,
        ("overlap",),
        change("dq", strides=(H_Q * D_QK // 2, D_QK, 1)),
    ),
    ("q float32", "q", TypeError, ("float32 is not supported yet",), change("q", dtype="float32")),
    ("cu_seqlens int64", "cu_seqlens_k", TypeError, ("int32",), change("cu_seqlens_k", dtype="int64")),
    ("deterministic 1", "deterministic", TypeError, ("bool",), put("deterministic", 1)),
    ("causal 1", "causal", TypeError, ("bool",), put("causal", 1)),
    ("is_varlen 0", "is_varlen", TypeError, ("bool",), put("is_varlen", 0)),
    ("max_seqlen_q None", "max_seqlen_q", TypeError, ("None",), put("max_seqlen_q", None)),
    ("max_seqlen_k array", "max_seqlen_k", TypeError, ("FakeArray",), put("max_seqlen_k", FakeArray(()))),
    ("max_seqlen_k -1", "max_seqlen_k", ValueError, ("at least 0",), put("max_seqlen_k", -1)),
    ("scale NaN", "softmax_scale", ValueError, ("finite",), put("softmax_scale", math.nan)),
    ("softcap -1", "softcap", ValueError, ("finite",), put("softcap", -1.0)),
    ("softcap array", "softcap", TypeError, ("FakeArray",), put("softcap", FakeArray(()))),
    ("window -2", "window_size", ValueError, ("left", "-2"), put("window_size", (-2, 0))),
    ("window an array", "window_size", TypeError, ("FakeArray",), put("window_size", FakeArray((2,)))),
    ("sink too short", "attn_sink", ValueError, ("[8]", "[7]"), change("attn_sink", shape=(7,))),
]


@pytest.mark.parametrize(
    ("argument", "kind", "texts", "spoil"),
    [case[1:] for case in BAD_CALLS],
    ids=[case[0] for case in BAD_CALLS],
)
def test_bad_backward_call(
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
    assert ", got " in message or "not supported yet" in message
    for text in texts:
        assert text in message
    assert world.untouched


def test_bad_backward_call_after_a_good_one(world: World) -> None:
    """What is known of accepted calls does not hide what differs."""
    call(optional())
    made = len(world.framework.allocated)
    for _, _, kind, _, spoil in BAD_CALLS:
        arguments = optional()
        spoil(arguments)
        with pytest.raises(kind):
            call(arguments)
    assert len(world.mha_backward) == 1 and len(world.framework.allocated) == made


@pytest.mark.parametrize(("d_qk", "d_v"), ((192, 128), (256, 256), (1, 256), (255, 1)))
def test_all_head_dimensions(world: World, d_qk: int, d_v: int) -> None:
    arguments = plain()
    for which, shape in (
        ("q", (TOTAL_Q, H_Q, d_qk)),
        ("k", (TOTAL_K, H_KV, d_qk)),
        ("v", (TOTAL_K, H_KV, d_v)),
        ("dout", (TOTAL_Q, H_Q, d_v)),
        ("out", (TOTAL_Q, H_Q, d_v)),
    ):
        change(which, shape=shape)(arguments)
    dq, dk, dv = call(arguments)
    assert (dq.shape[-1], dk.shape[-1], dv.shape[-1]) == (d_qk, d_qk, d_v)
    launched = world.mha_backward[-1].call
    assert (launched.d_qk, launched.d_v) == (d_qk, d_v)


@pytest.mark.parametrize(("d_qk", "d_v", "name"), ((257, 64, "q"), (64, 257, "v")))
def test_heads_that_are_too_wide(world: World, d_qk: int, d_v: int, name: str) -> None:
    arguments = plain()
    for which, shape in (
        ("q", (TOTAL_Q, H_Q, d_qk)),
        ("k", (TOTAL_K, H_KV, d_qk)),
        ("v", (TOTAL_K, H_KV, d_v)),
    ):
        change(which, shape=shape)(arguments)
    with pytest.raises(ValueError, match=f"^{name}: expected a last dimension .* of 1 to 256, got 257"):
        call(arguments)
    assert world.untouched


@pytest.mark.parametrize(
    ("argument", "text", "spoil"),
    (
        ("lse", "[3, 8, 5]", change("lse", shape=(B, S_Q, H_Q))),
        ("dout", "[3, 5, 8, 64]", change("dout", shape=OUT)),
        ("out", "[3, 5, 8, 64]", change("out", shape=(B, S_Q, H_Q, D_QK))),
        ("dlse", "[3, 8, 5]", put("dlse", FakeArray((B, H_Q, 1), "float32"))),
        ("k", "[3, s_k, h_kv, 128] (b of q, d_qk of q)", change("k", shape=(1, S_K, H_KV, D_QK))),
    ),
)
def test_bad_backward_call_of_fixed_lengths(
    world: World, argument: str, text: str, spoil: Callable[[Arguments], None]
) -> None:
    arguments = fixed()
    spoil(arguments)
    with pytest.raises(ValueError, match=f"^{argument}: expected ") as caught:
        rawmla.flash_attn_backward(**arguments)
    assert text in str(caught.value) and world.untouched


@pytest.mark.parametrize("name", ("dropout_p", "attention_chunk", "out_given", "page_table"))
def test_unknown_keywords(world: World, name: str) -> None:
    with pytest.raises(TypeError, match=name):
        call(plain(), **{name: 0})
    assert world.untouched


ALIASES = {
    "cu_seqlens_q": "cu_seqlens_qo",
    "cu_seqlens_k": "cu_seqlens_kv",
    "max_seqlen_q": "max_seqlen_qo",
    "max_seqlen_k": "max_seqlen_kv",
    "attn_sink": "learnable_sink",
}


def test_second_names(world: World) -> None:
    """The same call under the names of FlashMLA and FlashAttention."""
    call(optional())
    renamed = {ALIASES.get(name, name): value for name, value in optional().items()}
    call(renamed)
    first, second = world.mha_backward
    assert first.prepared is second.prepared
    assert first.addresses._replace(dsink=0) == second.addresses._replace(dsink=0)
    sink = FakeArray((H_Q,), "float32", ptr=0x6000)
    rawmla.flash_attn_backward(**fixed(), learnable_sink=sink)
    assert world.mha_backward[-1].addresses.attn_sink == 0x6000


@pytest.mark.parametrize("name", ALIASES)
def test_both_names_of_an_argument(world: World, name: str) -> None:
    arguments = optional()
    alias = ALIASES[name]
    with pytest.raises(TypeError, match=f"^{alias}: expected it or {name}, .* got both"):
        call(arguments, **{alias: arguments[name]})
    assert world.untouched


# ---- what is launched

EXPECTED = BackwardCall(
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
    q_strides=(0, H_Q * D_QK, D_QK),
    k_strides=(0, H_KV * D_QK, D_QK),
    v_strides=(0, H_KV * D_V, D_V),
    out_strides=(0, H_Q * D_V, D_V),
    dout_strides=(0, H_Q * D_V, D_V),
    lse_strides=(0, *LSE_STRIDES),
    dlse_strides=(0, 0, 0),
    dq_strides=(0, H_Q * D_QK, D_QK),
    dk_strides=(0, H_KV * D_QK, D_QK),
    dv_strides=(0, H_KV * D_V, D_V),
    softmax_scale=D_QK**-0.5,
    window_left=NO_BOUND,
    window_right=NO_BOUND,
    softcap=0.0,
    alibi_stride_b=0,
    has_alibi=False,
    sink_dtype=None,
    has_dlse=False,
    deterministic=False,
    needs=Needs(True, True, True, False),
)


def test_backward_of_segments(world: World) -> None:
    """Fresh gradients, then scratch; twice the same, and read anew."""
    for _ in range(2):
        got = call(plain())
        dq, dk, dv, scratch = world.framework.allocated[-4:]
        assert got == (dq, dk, dv)
        assert [x.shape for x in got] == [Q, K, V] and {x.dtype for x in got} == {"bfloat16"}
        assert [x.strides for x in got] == [contiguous(shape) for shape in (Q, K, V)]
        assert scratch.dtype == "uint8" and scratch.shape == (48,)
        launch = world.mha_backward[-1]
        assert launch.call == EXPECTED
        assert launch.addresses == BackwardAddresses(
            0x1000, 0x2000, 0x3000, 0x7800, 0x7000, 0x8004, 0, dq.ptr, dk.ptr, dv.ptr, 0x4000, 0x4800,
            0, 0, 0, 0, 0,
        )  # fmt: skip
        assert (launch.stream, launch.scratch) == (0x51, scratch.ptr)
    assert world.framework.copied == [] and world.framework.filled == []
    assert sorted(world.reads) == sorted(2 * READ)
    first, second = world.mha_backward
    assert first.prepared is second.prepared, "the second call was prepared again"


def test_backward_with_everything(world: World) -> None:
    """Given gradients are returned, and nothing but dsink and scratch is made."""
    arguments = optional()
    got = call(
        arguments, causal=True, window_size=(9, None), softcap=15.0, softmax_scale=0.25, is_varlen=False
    )
    dsink, scratch = world.framework.allocated
    assert all(one is arguments[name] for one, name in zip(got, RESULTS, strict=False))
    assert len(got) == 4 and got[3] is dsink
    assert dsink.shape == (H_Q,) and dsink.dtype == "float32"
    launch = world.mha_backward[-1]
    assert launch.call == EXPECTED._replace(
        dlse_strides=(0, H_Q, 1),
        softmax_scale=0.25,
        window_left=9,
        window_right=0,
        softcap=15.0,
        alibi_stride_b=H_Q,
        has_alibi=True,
        sink_dtype="float32",
        has_dlse=True,
        needs=Needs(True, True, True, True),
    )
    assert launch.addresses == BackwardAddresses(
        0x1000, 0x2000, 0x3000, 0x7800, 0x7000, 0x8004, 0x8804, 0x9000, 0x9800, 0xA000, 0x4000, 0x4800,
        0x5000, 0x5800, 0x6800, 0x6000, dsink.ptr,
    )  # fmt: skip
    assert launch.scratch == scratch.ptr


@pytest.mark.parametrize("sink_dtype", ("float32", "bfloat16", "float16", "float64"))
def test_dsink_has_the_dtype_of_the_sink(world: World, sink_dtype: str) -> None:
    got = call(plain(), attn_sink=FakeArray((H_Q,), sink_dtype, ptr=0x6000))
    assert got[3].dtype == sink_dtype and got[3].shape == (H_Q,)
    assert world.mha_backward[-1].call.sink_dtype == sink_dtype


def test_backward_of_a_batch(world: World) -> None:
    """lse and dlse are [b, h_q, s_q] there, of any strides."""
    dlse = FakeArray((B, H_Q, S_Q), "float32", strides=(1, B, 0), ptr=0x8808)
    got = rawmla.flash_attn_backward(**fixed(), dlse=dlse)
    assert [x.shape for x in got] == [(B, S_Q, H_Q, D_QK), (B, S_K, H_KV, D_QK), (B, S_K, H_KV, D_V)]
    launch = world.mha_backward[-1]
    q, k, v, out = (
        (s * h * d, h * d, d)
        for s, h, d in ((S_Q, H_Q, D_QK), (S_K, H_KV, D_QK), (S_K, H_KV, D_V), (S_Q, H_Q, D_V))
    )
    assert launch.call == EXPECTED._replace(
        varlen=False,
        max_seqlen_q=S_Q,
        max_seqlen_k=S_K,
        total_q=S_Q,
        total_k=S_K,
        q_strides=q,
        k_strides=k,
        v_strides=v,
        out_strides=out,
        dout_strides=out,
        lse_strides=(H_Q * S_Q, 1, S_Q),
        dlse_strides=(1, 0, B),
        dq_strides=q,
        dk_strides=k,
        dv_strides=v,
        has_dlse=True,
    )
    assert launch.addresses[10:] == (0,) * 7


def test_gradients_follow_the_order_of_strides(world: World) -> None:
    """Those of a q with heads outermost are so too, those of a broadcast k are dense."""
    arguments = plain()
    change("q", strides=(D_QK, TOTAL_Q * D_QK, 1))(arguments)
    change("k", strides=(0, 0, 1))(arguments)
    dq, dk, _ = call(arguments)
    assert dq.strides == (D_QK, TOTAL_Q * D_QK, 1) and dk.strides == contiguous(K)
    launched = world.mha_backward[-1].call
    assert launched.dq_strides == (0, D_QK, TOTAL_Q * D_QK) == launched.q_strides
    assert launched.k_strides == (0, 0, 0) and launched.dk_strides == (0, H_KV * D_QK, D_QK)
    assert world.framework.copied == []


@pytest.mark.parametrize("given", RESULTS)
def test_backward_with_one_gradient_given(world: World, given: str) -> None:
    """In strides of its own."""
    shape = SHAPES[given]
    target = FakeArray(shape, "bfloat16", strides=(2 * shape[1] * 192, 192, 1), ptr=0x9000)
    got = call(plain(), **{given: target})
    fresh = iter(world.framework.allocated)
    launch = world.mha_backward[-1]
    for name, one in zip(RESULTS, got, strict=True):
        assert one is (target if name == given else next(fresh))
        assert getattr(launch.addresses, name) == one.ptr
    assert getattr(launch.call, f"{given}_strides") == (0, 2 * shape[1] * 192, 192)


@pytest.mark.parametrize("name", ("q", "k", "v", "dout", "out"))
@pytest.mark.parametrize("how", ("address", "last dimension", "stride", "negative"))
def test_what_is_copied(world: World, name: str, how: str) -> None:
    """Once, with strides that kernels walk, and the copy's address is what they get."""
    arguments = plain()
    shape = arguments[name].shape
    token, head, _ = contiguous(shape)
    changes: Arguments = {
        "address": {"ptr": 0x7008},
        "last dimension": {"strides": (2 * token, 2 * head, 2)},
        "stride": {"strides": (token + 4, head, 1)},
        "negative": {"strides": (-token, head, 1)},
    }[how]
    change(name, **changes)(arguments)
    call(arguments)
    (copied,) = world.framework.copied
    assert copied is arguments[name]
    launch = world.mha_backward[-1]
    assert getattr(launch.addresses, name) == 0xC1000
    assert getattr(launch.call, f"{name}_strides") == (0, token, head)


@pytest.mark.parametrize("given", (False, True))
@pytest.mark.parametrize(
    "spoil",
    (
        lambda arguments: (
            [change(name, shape=(0, *K[1:]))(arguments) for name in ("k", "dk")]
            + [change(name, shape=(0, *V[1:]))(arguments) for name in ("v", "dv")]
        ),
        put("max_seqlen_k", 0),
        put("max_seqlen_q", 0),
    ),
    ids=("no keys", "max_seqlen_k 0", "max_seqlen_q 0"),
)
def test_backward_of_nothing(world: World, given: bool, spoil: Callable[[Arguments], None]) -> None:
    """Gradients are set to 0, and no kernel is launched."""
    arguments = optional()
    spoil(arguments)
    if not given:
        for name in RESULTS:
            del arguments[name]
    got = call(arguments)
    assert got[0].shape == Q and len(got) == 4
    assert all(one is got[i] and value == 0 for i, (one, value) in enumerate(world.framework.filled))
    assert len(world.framework.filled) == 4
    assert world.mha_backward == [] and len(world.framework.allocated) == (1 if given else 4)


def test_bounds_of_lengths_past_the_arrays(world: World) -> None:
    """Lengths are at most the tokens of the arrays."""
    call(plain(), max_seqlen_q=10**9, max_seqlen_k=10**9)
    launched = world.mha_backward[-1].call
    assert (launched.max_seqlen_q, launched.max_seqlen_k) == (TOTAL_Q, TOTAL_K)


def test_every_optional_array_is_read_once(world: World) -> None:
    call(optional())
    assert sorted(world.reads) == sorted((*READ, *OPTIONAL))
