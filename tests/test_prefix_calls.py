"""Calls of prefix prefill: what is refused, what accepted ones copy and launch; arrays are stand-ins."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from calls.fakes import Arguments, FakeArray, FakeFramework, World, both, change, contiguous, make_world, put

import rawmla
from rawmla import jit
from rawmla.call import memo
from rawmla.kernels.mha_forward import NO_BOUND, MhaForwardAddresses, MhaForwardCall
from rawmla.kernels.paged_cache import PagedCache

B, TOKENS, H_Q, H_KV, D, BLOCKS, PAGE, X, COLUMNS = 3, 40, 8, 2, 128, 50, 16, 8, 7
Q, KV = (TOKENS, H_Q, D), (TOKENS, H_KV, D)
K_CACHE, V_CACHE = (BLOCKS, H_KV, D // X, PAGE, X), (BLOCKS, H_KV, D, PAGE)
HEAD = D * PAGE  # elements of a block and head
CACHES = ("k_cache", "v_cache")
SCALES = ("k_scale", "v_scale", "fp8_out_scale")
REQUIRED = ("q", "o", *CACHES, "b_loc", "b_start_loc", "b_seq_len")
ARRAYS = ("q", "k", "v", *REQUIRED[1:], *SCALES, "alibi_slopes", "sinks")
COPY = 0xC0000  # and 0x1000 more for every copy


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return make_world(monkeypatch)


def plain() -> Arguments:
    """A call that is accepted."""
    return {
        "q": FakeArray(Q, "bfloat16", ptr=0x1000),
        "k": FakeArray(KV, "bfloat16", ptr=0x2000),
        "v": FakeArray(KV, "bfloat16", ptr=0x3000),
        "o": FakeArray(Q, "bfloat16", ptr=0x4000),
        "kv_cache_dtype": "auto",
        "k_cache": FakeArray(K_CACHE, "bfloat16", ptr=0x5000),
        "v_cache": FakeArray(V_CACHE, "bfloat16", ptr=0x6000),
        "b_loc": FakeArray((B, COLUMNS), ptr=0x7000),
        "b_start_loc": FakeArray((B + 1,), ptr=0x7100),
        "b_seq_len": FakeArray((B,), ptr=0x7200),
        "max_seq_len": None,
        "max_input_len": 20,
        "k_scale": 1.0,
        "v_scale": 1.0,
    }


def fp8() -> Arguments:
    """The same with an FP8 cache, FP8 results and all arrays that are optional."""
    return plain() | {
        "kv_cache_dtype": "fp8",
        "o": FakeArray(Q, "uint8", ptr=0x4000),
        "k_cache": FakeArray(K_CACHE, "uint8", ptr=0x5000),
        "v_cache": FakeArray(V_CACHE, "uint8", ptr=0x6000),
        "k_scale": FakeArray((), "float32", ptr=0x8000),
        "v_scale": FakeArray((1,), "float32", ptr=0x8100),
        "fp8_out_scale": FakeArray((1,), "float32", ptr=0x8200),
        "alibi_slopes": FakeArray((H_Q,), "float32", ptr=0x8300),
        "sinks": FakeArray((H_Q,), "bfloat16", ptr=0x8400),
    }


def call(arguments: Arguments, **more: Any) -> Any:
    return rawmla.context_attention_fwd(**{**arguments, **more})


def cached(arguments: Arguments) -> None:
    """All tokens are in the cache."""
    arguments.update(k=None, v=None)


# name of the test, argument that the text names, exception, what the text also holds, how the call is spoilt
Case = tuple[str, str, type[Exception], tuple[str, ...], Callable[[Arguments], None]]
BAD_CALLS: list[Case] = [
    *[(f"{name} a list", name, TypeError, ("got list",), put(name, [1])) for name in ARRAYS],
    *[
        (f"{name} on the host", name, ValueError, ("CUDA memory", "numpy.ndarray"), put(name, np.zeros(3)))
        for name in ARRAYS
    ],
    *[(f"{name} None", name, TypeError, ("got NoneType",), put(name, None)) for name in REQUIRED],
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
    ("q bytes", "q", TypeError, ("bfloat16 or float16", "uint8"), change("q", dtype="uint8")),
    ("q 2-D", "q", ValueError, ("[tokens, h_q, d]", "[8, 128]"), change("q", shape=Q[1:])),
    ("q 4-D", "q", ValueError, ("[tokens, h_q, d]", "[1, 40"), change("q", shape=(1, *Q))),
    ("d 264", "q", ValueError, ("1 to 256", "264"), change("q", shape=(TOKENS, H_Q, 264))),
    ("d 0", "q", ValueError, ("1 to 256", "got 0"), change("q", shape=(TOKENS, H_Q, 0))),
    ("2**30 tokens", "q", ValueError, ("less than 2**30",), change("q", shape=(2**30, H_Q, D))),
    ("h_q no multiple", "q", ValueError, ("h_q 7", "h_kv 2"), change("q", shape=(TOKENS, 7, D))),
    ("no query heads", "q", ValueError, ("h_q 0", "h_kv 2"), change("q", shape=(TOKENS, 0, D))),
    ("k alone", "v", ValueError, ("as k is one", "None"), put("v", None)),
    ("v alone", "k", ValueError, ("as v is one", "None"), put("k", None)),
    ("k fp16", "k", TypeError, ("bfloat16, the dtype of q", "float16"), change("k", dtype="float16")),
    ("v bytes", "v", TypeError, ("bfloat16, the dtype of q", "uint8"), change("v", dtype="uint8")),
    ("k tokens", "k", ValueError, ("[40, 2, 128]", "[39,"), change("k", shape=(39, H_KV, D))),
    ("k heads", "k", ValueError, ("[40, 2, 128]", "[40, 8,"), change("k", shape=Q)),
    ("v columns", "v", ValueError, ("[40, 2, 128]", "64]"), change("v", shape=(TOKENS, H_KV, 64))),
    ("k 2-D", "k", ValueError, ("[40, 2, 128]", "[40, 256]"), change("k", shape=(TOKENS, 256))),
    ("o fp16", "o", TypeError, ("float8_e4m3fn or uint8 or int8", "float16"), change("o", dtype="float16")),
    ("o e5m2", "o", TypeError, ("float8_e4m3fn", "e5m2"), change("o", dtype="float8_e5m2")),
    ("o shape", "o", ValueError, ("[40, 8, 128]", "[40, 1024]"), change("o", shape=(TOKENS, H_Q * D))),
    ("o last", "o", ValueError, ("contiguous last",), change("o", strides=(2048, 256, 2))),
    ("o overlaps", "o", ValueError, ("overlap",), change("o", strides=(512, 128, 1))),
    ("o expanded", "o", ValueError, ("positive",), change("o", strides=(0, 128, 1))),
    ("o reversed", "o", ValueError, ("positive",), change("o", strides=(-1024, 128, 1))),
    (
        "o of q's dtype with a scale",
        "o",
        TypeError,
        ("fp8_out_scale", "bfloat16"),
        change("o", dtype="bfloat16"),
    ),
    (
        "o bytes without a scale",
        "o",
        TypeError,
        ("bfloat16, the dtype of q", "uint8"),
        put("fp8_out_scale", None),
    ),
    ("name None", "kv_cache_dtype", TypeError, ("str", "None"), put("kv_cache_dtype", None)),
    ("name a list", "kv_cache_dtype", TypeError, ("str", "list"), put("kv_cache_dtype", ["fp8"])),
    (
        "name unknown",
        "kv_cache_dtype",
        ValueError,
        ("auto", "fp8_e5m2", "'fp4'"),
        put("kv_cache_dtype", "fp4"),
    ),
    *[
        (
            f"bytes with {name}",
            "kv_cache_dtype",
            ValueError,
            ("k_cache of uint8", name),
            put("kv_cache_dtype", name),
        )
        for name in ("auto", "float16", "bfloat16")
    ],
    (
        "auto with one cache of float8",
        "kv_cache_dtype",
        ValueError,
        ("v_cache of float8_e5m2", "'auto'"),
        both(
            put("kv_cache_dtype", "auto"),
            change("k_cache", dtype="bfloat16"),
            change("v_cache", dtype="float8_e5m2"),
        ),
    ),
    (
        "auto with another dtype",
        "k_cache",
        TypeError,
        ("bfloat16, the dtype of q", "'auto'", "float16"),
        both(put("kv_cache_dtype", "auto"), change("k_cache", dtype="float16")),
    ),
    *[
        (f"{name} bf16", name, TypeError, ("float8_e4m3fn or uint8", "'fp8'"), change(name, dtype="bfloat16"))
        for name in CACHES
    ],
    *[
        (
            f"{name} e5m2",
            name,
            TypeError,
            ("float8_e4m3fn or uint8", "'fp8'"),
            change(name, dtype="float8_e5m2"),
        )
        for name in CACHES
    ],
    (
        "e4m3 with fp8_e5m2",
        "k_cache",
        TypeError,
        ("float8_e5m2 or uint8", "float8_e4m3fn"),
        both(put("kv_cache_dtype", "fp8_e5m2"), change("k_cache", dtype="float8_e4m3fn")),
    ),
    ("k_cache 4-D", "k_cache", ValueError, ("128 / x", "[50, 2, 128, 16]"), change("k_cache", shape=V_CACHE)),
    (
        "x no divisor",
        "k_cache",
        ValueError,
        ("128 / x",),
        change("k_cache", shape=(BLOCKS, H_KV, 15, PAGE, 8)),
    ),
    (
        "d of k_cache",
        "k_cache",
        ValueError,
        ("128 / x",),
        change("k_cache", shape=(BLOCKS, H_KV, 8, PAGE, 8)),
    ),
    ("no KV heads", "k_cache", ValueError, ("h_kv",), change("k_cache", shape=(BLOCKS, 0, *K_CACHE[2:]))),
    (
        "block_size 0",
        "k_cache",
        ValueError,
        ("block_size",),
        change("k_cache", shape=(BLOCKS, H_KV, 16, 0, X)),
    ),
    (
        "v_cache blocks",
        "v_cache",
        ValueError,
        ("[50, 2, 128, 16]", "[49"),
        change("v_cache", shape=(49, *V_CACHE[1:])),
    ),
    ("v_cache 5-D", "v_cache", ValueError, ("[50, 2, 128, 16]",), change("v_cache", shape=K_CACHE)),
    *[
        (f"{name} address", name, ValueError, ("16-byte aligned", "0x5008"), change(name, ptr=0x5008))
        for name in CACHES
    ],
    *[
        (
            f"{name} block stride",
            name,
            ValueError,
            ("multiples of 16 (16 bytes)",),
            change(name, strides=strides),
        )
        for name, strides in (
            ("k_cache", (2 * HEAD + 8, HEAD, PAGE * X, X, 1)),
            ("v_cache", (2 * HEAD + 8, HEAD, PAGE, 1)),
        )
    ],
    *[
        (
            f"{name} head stride",
            name,
            ValueError,
            ("multiples of 16 (16 bytes)",),
            change(name, strides=strides),
        )
        for name, strides in (
            ("k_cache", (4 * HEAD, HEAD + 1, PAGE * X, X, 1)),
            ("v_cache", (4 * HEAD, HEAD + 1, PAGE, 1)),
        )
    ],
    (
        "k_cache reversed",
        "k_cache",
        ValueError,
        ("not negative",),
        change("k_cache", strides=(-2 * HEAD, HEAD, PAGE * X, X, 1)),
    ),
    (
        "v_cache too far apart",
        "v_cache",
        ValueError,
        ("multiples",),
        change("v_cache", strides=(2**40, HEAD, PAGE, 1)),
    ),
    (
        "k_cache tokens apart",
        "k_cache",
        ValueError,
        ("contiguous [d / x, block_size, x] within",),
        change("k_cache", strides=(4 * HEAD, 2 * HEAD, 2 * PAGE * X, 2 * X, 1)),
    ),
    (
        "k_cache transposed",
        "k_cache",
        ValueError,
        ("contiguous [d / x, block_size, x] within",),
        change("k_cache", strides=(2 * HEAD, HEAD, X, D, 1)),
    ),
    (
        "v_cache transposed",
        "v_cache",
        ValueError,
        ("contiguous [d, block_size] within", "address 0x6000", "[4096, 2048, 1, 128]"),
        change("v_cache", strides=(2 * HEAD, HEAD, 1, D)),
    ),
    ("b_loc int16", "b_loc", TypeError, ("int32 or int64", "int16"), change("b_loc", dtype="int16")),
    ("b_loc requests", "b_loc", ValueError, ("[3, max_blocks]", "[4, 7]"), change("b_loc", shape=(4, 7))),
    ("b_loc 1-D", "b_loc", ValueError, ("[3, max_blocks]", "[3]"), change("b_loc", shape=(3,))),
    ("b_loc columns", "b_loc", ValueError, ("contiguous last", "[14, 2]"), change("b_loc", strides=(14, 2))),
    ("b_loc of addresses", "b_loc", TypeError, ("int64", "int32"), put("is_block_table_ptr", True)),
    (
        "blocks in one place by address",
        "k_cache",
        ValueError,
        ("positive stride of blocks with is_block_table_ptr",),
        both(
            put("is_block_table_ptr", True),
            change("b_loc", dtype="int64"),
            change("k_cache", strides=(0, HEAD, PAGE * X, X, 1)),
        ),
    ),
    ("start int64", "b_start_loc", TypeError, ("int32", "int64"), change("b_start_loc", dtype="int64")),
    ("start short", "b_start_loc", ValueError, ("[4]", "[3]"), change("b_start_loc", shape=(B,))),
    ("start strided", "b_start_loc", ValueError, ("contiguous",), change("b_start_loc", strides=(2,))),
    ("lengths int64", "b_seq_len", TypeError, ("int32", "int64"), change("b_seq_len", dtype="int64")),
    ("lengths 2-D", "b_seq_len", ValueError, ("[b]", "[3, 1]"), change("b_seq_len", shape=(B, 1))),
    ("lengths strided", "b_seq_len", ValueError, ("contiguous",), change("b_seq_len", strides=(2,))),
    *[
        (f"{name} {kind}", name, error, (text,), put(name, value))
        for name in ("max_seq_len", "max_input_len", "interleaved_v_pack_factor")
        for kind, error, text, value in (
            ("float", TypeError, "4.0", 4.0),
            ("bool", TypeError, "True", True),
            ("array", TypeError, "FakeArray", FakeArray(())),
            ("negative", ValueError, "-1", -1),
        )
    ],
    ("max_input_len None", "max_input_len", TypeError, ("int", "None"), put("max_input_len", None)),
    (
        "factor no divisor",
        "interleaved_v_pack_factor",
        ValueError,
        ("divisor of the block_size 16", "got 3"),
        put("interleaved_v_pack_factor", 3),
    ),
    ("window float", "sliding_window", TypeError, ("int", "4.0"), put("sliding_window", 4.0)),
    ("window a pair", "sliding_window", TypeError, ("int", "tuple"), put("sliding_window", (4, 0))),
    ("window array", "sliding_window", TypeError, ("int", "FakeArray"), put("sliding_window", FakeArray(()))),
    *[
        (f"{name} {value}", name, ValueError, ("finite", str(float(value))), put(name, value))
        for name in ("sm_scale", *SCALES)
        for value in (0, -1.0, math.nan, math.inf)
    ],
    ("scale array", "sm_scale", TypeError, ("FakeArray",), put("sm_scale", FakeArray((), "float32"))),
    *[(f"{name} None", name, TypeError, ("float32", "got None"), put(name, None)) for name in SCALES[:2]],
    *[(f"{name} str", name, TypeError, ("float32", "'1'"), put(name, "1")) for name in SCALES],
    *[(f"{name} bool", name, TypeError, ("float32", "True"), put(name, True)) for name in SCALES],
    *[
        (f"{name} float64", name, TypeError, ("float32", "float64"), change(name, dtype="float64"))
        for name in SCALES
    ],
    *[
        (f"{name} of two", name, ValueError, ("[] or [1]", "[2]"), change(name, shape=(2,)))
        for name in SCALES
    ],
    *[
        (f"{name} 2-D", name, ValueError, ("[] or [1]", "[1, 1]"), change(name, shape=(1, 1)))
        for name in SCALES
    ],
    *[
        (f"{name} int", name, TypeError, ("bool", "int 1"), put(name, 1))
        for name in ("skip_decode", "is_block_table_ptr", "causal")
    ],
    ("slopes without causal", "alibi_slopes", ValueError, ("None with causal=False",), put("causal", False)),
    ("slopes bf16", "alibi_slopes", TypeError, ("float32",), change("alibi_slopes", dtype="bfloat16")),
    ("slopes 2-D", "alibi_slopes", ValueError, ("[8]",), change("alibi_slopes", shape=(B, H_Q))),
    ("slopes strided", "alibi_slopes", ValueError, ("contiguous",), change("alibi_slopes", strides=(2,))),
    ("sinks int32", "sinks", TypeError, ("float32 or", "int32"), change("sinks", dtype="int32")),
    ("sinks short", "sinks", ValueError, ("[8]", "[7]"), change("sinks", shape=(7,))),
    ("sinks strided", "sinks", ValueError, ("contiguous",), change("sinks", strides=(2,))),
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
    arguments = fp8()
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
    call(fp8())
    for _, _, kind, _, spoil in BAD_CALLS:
        arguments = fp8()
        spoil(arguments)
        with pytest.raises(kind):
            call(arguments)
    assert len(world.prefix) == 1 and not world.framework.allocated


def test_layouts_of_16_bit_arrays(world: World) -> None:
    """Multiples of 16 bytes are then multiples of 8; the address of o is a multiple of its elements."""
    arguments = plain()
    change("v_cache", strides=(2 * HEAD + 4, HEAD, PAGE, 1))(arguments)
    with pytest.raises(ValueError, match=r"^v_cache: expected .* multiples of 8"):
        call(arguments)
    arguments = plain()
    change("o", ptr=0x4001)(arguments)
    with pytest.raises(ValueError, match=r"^o: expected an address that is a multiple of 2 bytes"):
        call(arguments)
    assert world.untouched


def test_unknown_keywords(world: World) -> None:
    for name in ("softcap", "logits_soft_cap", "out", "window_size"):
        with pytest.raises(TypeError, match=name):
            call(plain(), **{name: None})
    assert world.untouched


EXPECTED = MhaForwardCall(
    device=0,
    dtype="bfloat16",
    b=B,
    k_batches=B,
    h_q=H_Q,
    h_kv=H_KV,
    d_qk=D,
    d_v=D,
    varlen=True,
    max_seqlen_q=20,
    max_seqlen_k=20,
    total_q=TOKENS,
    total_k=TOKENS,
    q_strides=(0, 1024, 128),
    k_strides=(0, 256, 128),
    v_strides=(0, 256, 128),
    out_strides=(0, 1024, 128),
    lse_strides=(0, TOKENS),
    softmax_scale=D**-0.5,
    window_left=NO_BOUND,
    window_right=0,
    softcap=0.0,
    sink_dtype=None,
    has_alibi=False,
    alibi_stride_b=0,
    out_is_aligned=True,
    cache=PagedCache(
        dtype="same",
        num_blocks=BLOCKS,
        block_size=PAGE,
        x=X,
        v_pack=0,
        k_strides=(2 * HEAD, HEAD),
        v_strides=(2 * HEAD, HEAD),
        table_stride=COLUMNS,
        table_columns=COLUMNS,
        table_bytes=4,
        table_has_pointers=False,
        own_in_cache=False,
        skip_decode=False,
        k_scale=None,
        v_scale=None,
        out_fp8=False,
        out_scale=None,
    ),
    mods=None,
)


def changed(call: MhaForwardCall, cache: Arguments, **more: Any) -> MhaForwardCall:
    """Replace members of a call; ``cache``: members of its `PagedCache`."""
    assert call.cache is not None
    return call._replace(cache=call.cache._replace(**cache), **more)


FP8 = changed(EXPECTED, {"dtype": "e4m3", "out_fp8": True}, has_alibi=True, sink_dtype="bfloat16")
IN_CACHE: Arguments = {"total_k": 0, "k_strides": (0, 0, 0), "v_strides": (0, 0, 0)}
ADDRESSES = MhaForwardAddresses(
    q=0x1000,
    k=0x2000,
    v=0x3000,
    out=0x4000,
    lse=0,
    cu_seqlens_q=0x7100,
    seqused_k=0x7200,
    attn_sink=0x8400,
    alibi_slopes=0x8300,
    block_table=0x7000,
    k_cache=0x5000,
    v_cache=0x6000,
    k_scale=0x8000,
    v_scale=0x8100,
    out_scale=0x8200,
)
WITHOUT = {"k_scale": 0, "v_scale": 0, "alibi_slopes": 0, "attn_sink": 0, "out_scale": 0}


class TestLaunch:
    """What an accepted call hands to the kernel."""

    def test_plain(self, world: World) -> None:
        arguments = plain()
        assert call(arguments) is arguments["o"]
        (launch,) = world.prefix
        assert launch.call == EXPECTED and launch.addresses == ADDRESSES._replace(**WITHOUT)
        assert (launch.stream, launch.scratch) == (0x51, 0)
        assert launch.prepared.capturing() is False
        made = world.framework
        assert not (made.allocated or made.copied or made.filled)

    def test_every_field(self, world: World) -> None:
        arguments = fp8() | {"kv_cache_dtype": "fp8_e5m2", "max_seq_len": 10**12, "sm_scale": 0.25}
        change("b_loc", dtype="int64", strides=(100, 1))(arguments)
        call(
            arguments,
            sliding_window=5,
            skip_decode=True,
            is_block_table_ptr=True,
            interleaved_v_pack_factor=8,
        )
        (launch,) = world.prefix
        of_cache = {
            "dtype": "e5m2",
            "skip_decode": True,
            "table_stride": 100,
            "table_bytes": 8,
            "table_has_pointers": True,
            "v_pack": 8,
        }
        assert launch.call == changed(FP8, of_cache, softmax_scale=0.25, window_left=4)
        assert launch.addresses == ADDRESSES

    def test_positional(self, world: World) -> None:
        """vLLM's order."""
        made = fp8()
        optional = (made["alibi_slopes"], 9, 0.5, True, made["fp8_out_scale"], made["sinks"], False, 4, True)
        rawmla.context_attention_fwd(*[*made.values()][:14], *optional)
        of_cache = {"skip_decode": True, "v_pack": 4}
        assert world.prefix[0].call == changed(FP8, of_cache, softmax_scale=0.5, window_left=8)
        assert world.prefix[0].addresses == ADDRESSES

    def test_signature_is_that_of_the_reference(self) -> None:
        of, want = map(
            inspect.signature, (rawmla.context_attention_fwd, rawmla.reference.context_attention_fwd)
        )
        assert of == want

    def test_scratch(self, world: World) -> None:
        """Some calls need it."""
        call(plain(), causal=False)
        (scratch,) = world.framework.allocated
        assert (scratch.shape, scratch.dtype) == ((48,), "uint8")
        assert (world.prefix[0].call.window_right, world.prefix[0].scratch) == (NO_BOUND, scratch.ptr)

    def test_own_tokens_from_the_cache(self, world: World) -> None:
        call(plain(), k=None, v=None)
        (launch,) = world.prefix
        assert launch.call == changed(EXPECTED, {"own_in_cache": True}, **IN_CACHE)
        assert launch.addresses == ADDRESSES._replace(k=0, v=0, **WITHOUT)

    @pytest.mark.parametrize(
        ("sliding_window", "window"),
        (
            (None, NO_BOUND),
            (0, NO_BOUND),
            (-1, NO_BOUND),
            (-(2**40), NO_BOUND),
            (1, 0),
            (1024, 1023),
            (np.int64(3), 2),
            (2**30, 2**30 - 1),
            (2**40, NO_BOUND),
        ),
    )
    @pytest.mark.parametrize("causal", (True, False))
    def test_windows(self, world: World, sliding_window: Any, window: int, causal: bool) -> None:
        call(plain(), sliding_window=sliding_window, causal=causal)
        (launch,) = world.prefix
        assert launch.call == EXPECTED._replace(window_left=window, window_right=0 if causal else NO_BOUND)
        assert type(launch.call.window_left) is int

    @pytest.mark.parametrize("name", ("auto", "float16", "bfloat16"))
    @pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
    def test_caches_of_numbers(self, world: World, name: str, dtype: str) -> None:
        """They are of q's dtype, whatever name of 16 bits is given; scales are not looked at."""
        arguments = plain() | {"kv_cache_dtype": name, "k_scale": None, "v_scale": "nothing"}
        for array in ("q", "k", "v", "o", *CACHES):
            change(array, dtype=dtype)(arguments)
        call(arguments)
        assert world.prefix[0].call == EXPECTED._replace(dtype=dtype)
        assert "v_scale" not in world.reads

    @pytest.mark.parametrize(
        ("name", "kind", "dtypes"),
        (
            ("fp8", "e4m3", ("float8_e4m3fn", "uint8")),
            ("fp8_e4m3", "e4m3", ("int8", "float8_e4m3fn")),
            ("fp8_e5m2", "e5m2", ("float8_e5m2", "int8")),
        ),
    )
    def test_caches_of_fp8(self, world: World, name: str, kind: str, dtypes: tuple[str, str]) -> None:
        arguments = fp8() | {"kv_cache_dtype": name}
        change("k_cache", dtype=dtypes[0])(arguments)
        change("v_cache", dtype=dtypes[1])(arguments)
        call(arguments)
        assert world.prefix[0].call == changed(FP8, {"dtype": kind})

    def test_scales(self, world: World) -> None:
        """Numbers travel in the call, arrays as addresses."""
        arguments = fp8() | {"k_scale": 0.5, "v_scale": np.float32(2), "fp8_out_scale": 3}
        call(arguments)
        (launch,) = world.prefix
        assert launch.call == changed(FP8, {"k_scale": 0.5, "v_scale": 2.0, "out_scale": 3.0})
        assert launch.addresses == ADDRESSES._replace(k_scale=0, v_scale=0, out_scale=0)
        assert type(launch.call.cache.v_scale) is type(launch.call.cache.out_scale) is float

    @pytest.mark.parametrize("dtype", ("float8_e4m3fn", "uint8", "int8"))
    def test_fp8_results_of_a_plain_cache(self, world: World, dtype: str) -> None:
        arguments = plain() | {"fp8_out_scale": 0.5}
        change("o", dtype=dtype)(arguments)
        call(arguments)
        assert world.prefix[0].call == changed(EXPECTED, {"out_fp8": True, "out_scale": 0.5})

    @pytest.mark.parametrize("dtype", ("float32", "bfloat16", "float16"))
    def test_sinks(self, world: World, dtype: str) -> None:
        call(plain(), sinks=FakeArray((H_Q,), dtype, ptr=0x8400))
        (launch,) = world.prefix
        assert launch.call == EXPECTED._replace(sink_dtype=dtype)
        assert launch.addresses.attn_sink == 0x8400

    @pytest.mark.parametrize(
        ("block_size", "pack", "v_pack"), ((16, 1, 1), (16, 8, 8), (16, 16, 0), (1, 1, 0), (544, 32, 32))
    )
    def test_interleaved_v(self, world: World, block_size: int, pack: int, v_pack: int) -> None:
        """A factor of block_size is the same memory as no factor."""
        arguments = plain()
        change("k_cache", shape=(BLOCKS, H_KV, D // X, block_size, X))(arguments)
        change("v_cache", shape=(BLOCKS, H_KV, D, block_size))(arguments)
        call(arguments, interleaved_v_pack_factor=pack)
        head = D * block_size
        strides = (2 * head, head)
        of_cache = {"block_size": block_size, "v_pack": v_pack, "k_strides": strides, "v_strides": strides}
        assert world.prefix[0].call == changed(EXPECTED, of_cache)

    def test_numpy_scalars(self, world: World) -> None:
        call(
            plain() | {"max_input_len": np.int32(20), "max_seq_len": np.int64(0)},
            sm_scale=np.float32(0.5),
            causal=np.True_,
            skip_decode=np.False_,
            interleaved_v_pack_factor=np.int64(0),
        )
        assert world.prefix[0].call == EXPECTED._replace(softmax_scale=0.5)
        made = world.prefix[0].call
        assert type(made.max_seqlen_q) is int and type(made.cache.skip_decode) is bool

    def test_lengths_beyond_the_arrays(self, world: World) -> None:
        call(plain(), max_input_len=10**12, max_seq_len=10**15)
        assert world.prefix[0].call == EXPECTED._replace(max_seqlen_q=TOKENS, max_seqlen_k=TOKENS)

    def test_other_device(self, world: World) -> None:
        arguments = fp8()
        for name in ARRAYS:
            change(name, device=1)(arguments)
        call(arguments)
        assert (world.prefix[0].call.device, world.prefix[0].stream) == (1, 0x52)

    @pytest.mark.parametrize("name", ARRAYS[1:])
    def test_another_framework_on_the_same_stream(self, world: World, name: str) -> None:
        arguments = fp8()
        other = FakeFramework("other")
        change(name, framework=other)(arguments)
        call(arguments)
        assert len(world.prefix) == 1
        other.stream += 1
        with pytest.raises(ValueError, match=rf"^{name}: expected a fake array"):
            call(arguments)


class TestLayouts:
    """Which arrays are read where they lie."""

    @pytest.mark.parametrize(
        "strides",
        (
            (3072, 128, 1),  # a slice of a packed projection
            (128, 40 * 128, 1),  # heads outermost
            (0, 128, 1),  # broadcast
            (2**33, 136, 1),
        ),
    )
    @pytest.mark.parametrize("name", ("q", "k", "v"))
    def test_strides(self, world: World, name: str, strides: Any) -> None:
        arguments = plain()
        change(name, strides=strides)(arguments)
        call(arguments)
        assert world.prefix[0].call == EXPECTED._replace(**{f"{name}_strides": (0, *strides[:-1])})
        assert not world.framework.copied

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
        call(arguments)
        assert (
            world.framework.copied == [arguments[name]] * 2
        )  # the kind of call is known, the copy is made anew
        assert [launch.call for launch in world.prefix] == [EXPECTED] * 2
        for launch, address in zip(world.prefix, (COPY + 0x1000, COPY + 0x2000), strict=True):
            assert launch.addresses == ADDRESSES._replace(**WITHOUT, **{name: address})

    def test_copied_of_another_framework(self, world: World) -> None:
        """By its own framework, which also knows where the copy lies."""
        arguments, other = plain(), FakeFramework("other")
        change("k", ptr=0x1008, framework=other)(arguments)
        call(arguments)
        assert other.copied == [arguments["k"]] and not world.framework.copied
        assert world.prefix[0].addresses.k == COPY + 0x1000

    @pytest.mark.parametrize("own", (True, False))
    def test_head_dimension_that_fills_no_16_bytes(self, world: World, own: bool) -> None:
        """With x below 8: q, k and v are copied; rows of o are padded by the caller."""
        arguments = plain()
        change("q", shape=(TOKENS, H_Q, 20))(arguments)
        change("o", shape=(TOKENS, H_Q, 20), strides=(H_Q * 24, 24, 1))(arguments)
        for name in ("k", "v"):
            change(name, shape=(TOKENS, H_KV, 20))(arguments)
        change("k_cache", shape=(BLOCKS, H_KV, 5, PAGE, 4))(arguments)
        change("v_cache", shape=(BLOCKS, H_KV, 20, PAGE))(arguments)
        if not own:
            cached(arguments)
        call(arguments)
        (launch,) = world.prefix
        strides = (40 * PAGE, 20 * PAGE)
        expected = changed(
            EXPECTED,
            {"x": 4, "k_strides": strides, "v_strides": strides},
            d_qk=20,
            d_v=20,
            softmax_scale=20**-0.5,
            q_strides=(0, H_Q * 24, 24),
            k_strides=(0, H_KV * 24, 24),
            v_strides=(0, H_KV * 24, 24),
            out_strides=(0, H_Q * 24, 24),
        )
        if own:
            assert launch.call == expected
            assert world.framework.copied == [arguments["q"], arguments["k"], arguments["v"]]
            assert launch.addresses[:3] == (COPY + 0x1000, COPY + 0x2000, COPY + 0x3000)
        else:
            assert launch.call == changed(expected, {"own_in_cache": True}, **IN_CACHE)
            assert world.framework.copied == [arguments["q"]]
            assert launch.addresses[:3] == (COPY + 0x1000, 0, 0)

    @pytest.mark.parametrize("d", (24, 80, 96, 112, 120, 160, 192, 256))
    @pytest.mark.parametrize("x", (1, 2, 8))
    def test_head_dimensions(self, world: World, d: int, x: int) -> None:
        arguments = plain()
        for name, heads in (("q", H_Q), ("k", H_KV), ("v", H_KV), ("o", H_Q)):
            change(name, shape=(TOKENS, heads, d))(arguments)
        change("k_cache", shape=(BLOCKS, H_KV, d // x, PAGE, x))(arguments)
        change("v_cache", shape=(BLOCKS, H_KV, d, PAGE))(arguments)
        call(arguments)
        launched = world.prefix[0].call
        assert (launched.d_qk, launched.d_v, launched.softmax_scale) == (d, d, d**-0.5)
        assert launched.cache.x == x
        assert not world.framework.copied

    @pytest.mark.parametrize("strides", ((1024, 128, 1), (128, 40 * 128, 1), (8192, 144, 1)), ids=str)
    @pytest.mark.parametrize("of", (plain, fp8))
    def test_strides_of_o(self, world: World, of: Callable[[], Arguments], strides: Any) -> None:
        arguments = of()
        change("o", strides=strides)(arguments)
        assert call(arguments) is arguments["o"]
        assert world.prefix[0].call.out_strides == (0, *strides[:-1])
        assert world.prefix[0].call.out_is_aligned

    @pytest.mark.parametrize(
        "changes", ({"ptr": 0x4002}, {"strides": (1025, 128, 1)}, {"strides": (1060, 132, 1)}), ids=str
    )
    @pytest.mark.parametrize("of", (plain, fp8))
    def test_o_without_alignment(
        self, world: World, of: Callable[[], Arguments], changes: dict[str, Any]
    ) -> None:
        """It is written all the same, not by TMA."""
        arguments = of()
        change("o", **changes)(arguments)
        assert call(arguments) is arguments["o"]
        assert not world.prefix[0].call.out_is_aligned and not world.framework.copied

    def test_strides_of_caches(self, world: World) -> None:
        """Those of blocks and heads are free: heads outermost, and K and V in one array, far apart."""
        arguments = plain()
        change("k_cache", strides=(2**35, HEAD + 8, PAGE * X, X, 1))(arguments)
        change("v_cache", strides=(HEAD, BLOCKS * HEAD, PAGE, 1))(arguments)
        call(arguments)
        assert world.prefix[0].call == changed(
            EXPECTED, {"k_strides": (2**35, HEAD + 8), "v_strides": (HEAD, BLOCKS * HEAD)}
        )

    def test_a_head_for_all(self, world: World) -> None:
        """A cache may be broadcast, as other inputs may."""
        arguments = plain()
        change("k_cache", strides=(HEAD, 0, PAGE * X, X, 1))(arguments)
        change("v_cache", strides=(0, 0, PAGE, 1))(arguments)
        call(arguments)
        launched = world.prefix[0].call.cache
        assert (launched.k_strides, launched.v_strides) == ((HEAD, 0), (0, 0))

    @pytest.mark.parametrize("block_size", (1, 3, 16, 544, 1056))
    @pytest.mark.parametrize("dtype", ("bfloat16", "uint8"))
    def test_dimensions_of_one_element(self, world: World, block_size: int, dtype: str) -> None:
        """Are never stepped over, so any stride is legal; kernels get multiples of 16 bytes."""
        arguments = plain() | {"kv_cache_dtype": "auto" if dtype == "bfloat16" else "fp8"}
        for name in ("q", "k", "v", "o"):
            change(name, shape=(1, 1, 24), strides=(3, -5, 1))(arguments)
        k, v = (1, 1, 6, block_size, 4), (1, 1, 24, block_size)
        change("k_cache", shape=k, strides=(-7, 13, *contiguous(k)[2:]), dtype=dtype)(arguments)
        change("v_cache", shape=v, strides=(17, 0, *contiguous(v)[2:]), dtype=dtype)(arguments)
        change("b_loc", shape=(1, 1), strides=(9, 5))(arguments)
        change("b_start_loc", shape=(2,))(arguments)
        change("b_seq_len", shape=(1,), strides=(5,))(arguments)
        call(arguments)
        launched = world.prefix[0].call
        assert not world.framework.copied and (launched.cache.block_size, launched.cache.x) == (block_size, 4)
        assert all(s % 8 == 0 for s in (*launched.q_strides, *launched.k_strides, *launched.out_strides))
        steps = (*launched.cache.k_strides, *launched.cache.v_strides)
        assert all(s > 0 and s % (16 if dtype == "uint8" else 8) == 0 for s in steps)

    def test_inner_dimensions_of_one_element(self, world: World) -> None:
        arguments = plain()
        k, v = (BLOCKS, H_KV, 1, 1, D), (BLOCKS, H_KV, D, 1)
        change("k_cache", shape=k, strides=(2 * D, D, 77, 55, 1))(arguments)
        change("v_cache", shape=v, strides=(2 * D, D, 1, 33))(arguments)
        call(arguments)
        made = world.prefix[0].call.cache
        assert made.k_strides == made.v_strides == (2 * D, D)

    @pytest.mark.parametrize("stride", (0, 7, 8, 2**33))
    def test_rows_of_the_table(self, world: World, stride: int) -> None:
        arguments = plain()
        change("b_loc", strides=(stride, 1), dtype="int64")(arguments)
        call(arguments)
        assert world.prefix[0].call == changed(EXPECTED, {"table_stride": stride, "table_bytes": 8})


class TestNothingToDo:
    @pytest.mark.parametrize(
        "spoil",
        (
            both(
                *[change(name, shape=(0, *Q[1:]), ptr=0) for name in ("q", "o")],
                *[change(name, shape=(0, *KV[1:]), ptr=0) for name in ("k", "v")],
            ),
            put("max_input_len", 0),
            both(
                change("b_seq_len", shape=(0,), ptr=0),
                change("b_start_loc", shape=(1,)),
                change("b_loc", shape=(0, COLUMNS), ptr=0),
            ),
            both(put("skip_decode", True), put("max_input_len", 1)),
        ),
        ids=("no tokens", "no length", "no requests", "decoding alone"),
    )
    def test_nothing_is_launched(self, world: World, spoil: Callable[[Arguments], None]) -> None:
        arguments = plain()
        change("q", ptr=0x1008)(arguments)
        spoil(arguments)
        assert call(arguments) is arguments["o"]
        assert world.untouched

    def test_checked_nevertheless(self, world: World) -> None:
        with pytest.raises(TypeError, match="^o: expected dtype bfloat16"):
            call(plain() | {"max_input_len": 0, "o": FakeArray(Q, "uint8")})

    def test_a_cache_without_blocks(self, world: World) -> None:
        """Requests may have no older token."""
        arguments = plain()
        change("k_cache", shape=(0, *K_CACHE[1:]), ptr=0)(arguments)
        change("v_cache", shape=(0, *V_CACHE[1:]), ptr=0)(arguments)
        change("b_loc", shape=(B, 0), ptr=0)(arguments)
        call(arguments)
        launched = world.prefix[0].call.cache
        assert (launched.num_blocks, launched.table_columns) == (0, 0)


class TestRepeatedCalls:
    def prepared(self, world: World) -> list[int]:
        """Which of the launches were prepared, as the number of the first one with the same preparation."""
        made = [launch.prepared for launch in world.prefix]
        return [made.index(one) for one in made]

    def test_addresses_change(self, world: World) -> None:
        call(fp8())
        arguments = fp8()
        for name in ARRAYS:
            change(name, ptr=arguments[name].ptr + 0x100000)(arguments)
        call(arguments)
        assert self.prepared(world) == [0, 0]
        assert world.prefix[1].addresses == tuple(x and x + 0x100000 for x in ADDRESSES)

    @pytest.mark.parametrize(
        "changed",
        (
            {"sm_scale": 0.5},
            {"causal": False},
            {"sliding_window": 3},
            {"skip_decode": True},
            {"max_input_len": 19},
            {"interleaved_v_pack_factor": 8},
            {"k": None, "v": None},
            {"sinks": FakeArray((H_Q,), "float32")},
            {"alibi_slopes": FakeArray((H_Q,), "float32")},
            {"o": FakeArray(Q, "bfloat16", (2048, 256, 1))},
            {"o": FakeArray(Q, "uint8"), "fp8_out_scale": 0.5},
            {"b_loc": FakeArray((B, COLUMNS), "int64")},
        ),
        ids=lambda changed: next(iter(changed)),
    )
    def test_options_change(self, world: World, changed: Arguments) -> None:
        call(plain())
        call(plain() | changed)
        call(plain())
        assert self.prepared(world) == [0, 1, 0]
        assert world.prefix[1].call != world.prefix[0].call == world.prefix[2].call == EXPECTED

    @pytest.mark.parametrize("name", SCALES)
    def test_scales_change(self, world: World, name: str) -> None:
        for scale in (0.5, 0.25, FakeArray((), "float32"), 0.5):
            call(fp8() | {name: scale})
        assert self.prepared(world) == [0, 1, 2, 0]
        member = name.removeprefix("fp8_")
        assert [getattr(launch.call.cache, member) for launch in world.prefix] == [0.5, 0.25, None, 0.5]

    @pytest.mark.parametrize("names", (("fp8_e4m3", "fp8_e5m2"), ("fp8", "fp8_e5m2")))
    def test_another_name_of_the_same_bytes(self, world: World, names: tuple[str, str]) -> None:
        for name in names:
            call(fp8() | {"kv_cache_dtype": name})
        assert [launch.call.cache.dtype for launch in world.prefix] == ["e4m3", "e5m2"]

    def test_table_of_numbers_and_of_addresses(self, world: World) -> None:
        for is_ptr in (False, True, False):
            call(plain() | {"b_loc": FakeArray((B, COLUMNS), "int64"), "is_block_table_ptr": is_ptr})
        assert [launch.call.cache.table_has_pointers for launch in world.prefix] == [False, True, False]

    def test_upper_bound_that_changes_nothing(self, world: World) -> None:
        for length in (None, 0, 5, 10**9):
            call(plain(), max_seq_len=length)
        assert self.prepared(world) == [0] * 4

    def test_forgotten(self, world: World) -> None:
        call(plain())
        memo.clear_all()
        call(plain())
        assert self.prepared(world) == [0, 1]


class TestWarmup:
    @pytest.mark.parametrize("of", (plain, fp8))
    def test_call(self, world: World, of: Callable[[], Arguments]) -> None:
        arguments = of()
        change("q", ptr=0x1008)(arguments)
        assert rawmla.warmup_call(rawmla.context_attention_fwd, **arguments) is None
        (launch,) = world.prefix
        assert launch.stream == jit.NO_LAUNCH
        assert not world.framework.allocated and not world.framework.copied

    def test_call_with_scratch(self, world: World) -> None:
        rawmla.warmup_call(rawmla.context_attention_fwd, **plain(), causal=False)
        assert world.prefix[0].stream == jit.NO_LAUNCH and not world.framework.allocated
