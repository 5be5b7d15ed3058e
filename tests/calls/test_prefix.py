"""Prefix prefill: the rules of its caches, scales and options, and what accepted calls launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rawmla
from calls import test_dense as dense
from calls.fakes import Arguments, FakeArray, World, both, change, contiguous, put
from calls.refusals import Refusal, check_all_refused, check_refused, each, shapes
from calls.test_dense import prepared
from rawmla.kernels.mha_forward import NO_BOUND, MhaForwardAddresses, MhaForwardCall
from rawmla.kernels.paged_cache import PagedCache

B, TOKENS, H_Q, H_KV, D, BLOCKS, PAGE, X, COLUMNS = 3, 40, 8, 2, 128, 50, 16, 8, 7
Q, KV = (TOKENS, H_Q, D), (TOKENS, H_KV, D)
K_CACHE, V_CACHE = (BLOCKS, H_KV, D // X, PAGE, X), (BLOCKS, H_KV, D, PAGE)
HEAD = D * PAGE  # elements of a block and head
CACHES = ("k_cache", "v_cache")
SCALES = ("k_scale", "v_scale", "fp8_out_scale")


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


EXPECTED = dense.EXPECTED._replace(
    d_v=D,
    max_seqlen_k=20,
    total_k=TOKENS,
    v_strides=(0, 256, 128),
    out_strides=(0, 1024, 128),
    window_right=0,
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
)


def changed(call: MhaForwardCall, cache: Arguments, **more: Any) -> MhaForwardCall:
    """Replace members of a call; ``cache``: members of its `PagedCache`."""
    assert call.cache is not None
    return call._replace(cache=call.cache._replace(**cache), **more)


FP8 = changed(EXPECTED, {"dtype": "e4m3", "out_fp8": True}, has_alibi=True, sink_dtype="bfloat16")
OF_ARRAYS = {"q": 0x1000, "k": 0x2000, "v": 0x3000, "out": 0x4000, "k_cache": 0x5000, "v_cache": 0x6000}
OF_LENGTHS = {"block_table": 0x7000, "cu_seqlens_q": 0x7100, "seqused_k": 0x7200}
OF_FP8 = {"k_scale": 0x8000, "v_scale": 0x8100, "out_scale": 0x8200}
OF_FP8 |= {"alibi_slopes": 0x8300, "attn_sink": 0x8400}
PLAIN_ADDRESSES = MhaForwardAddresses(**OF_ARRAYS, **OF_LENGTHS, lse=0)
ADDRESSES = PLAIN_ADDRESSES._replace(**OF_FP8)

# ---- refusals

DTYPE_NAME = "kv_cache_dtype"
REFUSALS: list[Refusal] = [
    ("q", TypeError, "float32 is not supported yet", change("q", dtype="float32")),
    ("q", ValueError, "1 to 256 ... 264", shapes(q=(TOKENS, H_Q, 264))),
    ("q", ValueError, "less than 2**30", shapes(q=(2**30, H_Q, D))),
    ("q", ValueError, "h_q 7 ... h_kv 2", shapes(q=(TOKENS, 7, D))),
    ("v", ValueError, "as k is one ... None", put("v", None)),
    ("k", ValueError, "as v is one ... None", put("k", None)),
    ("o", TypeError, "fp8_out_scale ... bfloat16", change("o", dtype="bfloat16")),
    ("o", TypeError, "bfloat16, the dtype of q ... uint8", put("fp8_out_scale", None)),
    (DTYPE_NAME, TypeError, "str ... None", put(DTYPE_NAME, None)),
    (DTYPE_NAME, ValueError, "k_cache of uint8 ... auto", put(DTYPE_NAME, "auto")),
    *[
        (name, TypeError, "float8_e4m3fn or uint8 ... 'fp8'", change(name, dtype="float8_e5m2"))
        for name in CACHES
    ],
    (
        "k_cache",
        TypeError,
        "float8_e5m2 or uint8 ... float8_e4m3fn",
        both(put(DTYPE_NAME, "fp8_e5m2"), change("k_cache", dtype="float8_e4m3fn")),
    ),
    ("k_cache", ValueError, "block_size", shapes(k_cache=(BLOCKS, H_KV, 16, 0, X))),
    ("k_cache", ValueError, "16-byte aligned ... 0x5008", change("k_cache", ptr=0x5008)),
    *[
        ("k_cache", ValueError, text, change("k_cache", strides=(*steps, *contiguous(K_CACHE)[2:])))
        for text, steps in (
            ("multiples of 16 (16 bytes)", (2 * HEAD + 8, HEAD)),
            ("multiples of 16 (16 bytes)", (4 * HEAD, HEAD + 1)),
            ("not negative", (-2 * HEAD, HEAD)),
            ("multiples", (2**40, HEAD)),
        )
    ],
    *[
        ("k_cache", ValueError, "contiguous [d / x, block_size, x]", change("k_cache", strides=strides))
        for strides in ((4 * HEAD, 2 * HEAD, 2 * PAGE * X, 2 * X, 1), (2 * HEAD, HEAD, X, D, 1))
    ],
    (
        "v_cache",
        ValueError,
        "contiguous [d, block_size] within ... address 0x6000 ... [4096, 2048, 1, 128]",
        change("v_cache", strides=(2 * HEAD, HEAD, 1, D)),
    ),
    ("b_loc", TypeError, "int64 ... int32", put("is_block_table_ptr", True)),
    (
        "k_cache",
        ValueError,
        "positive stride of blocks with is_block_table_ptr",
        both(
            put("is_block_table_ptr", True),
            change("b_loc", dtype="int64"),
            change("k_cache", strides=(0, HEAD, PAGE * X, X, 1)),
        ),
    ),
    *[
        (name, ValueError, "-1", put(name, -1))
        for name in ("max_seq_len", "max_input_len", "interleaved_v_pack_factor")
    ],
    (
        "interleaved_v_pack_factor",
        ValueError,
        "divisor of the block_size 16 ... got 3",
        put("interleaved_v_pack_factor", 3),
    ),
    ("sliding_window", TypeError, "int ... 4.0", put("sliding_window", 4.0)),
    *[(name, ValueError, "finite ... -1.0", put(name, -1.0)) for name in SCALES],
    ("alibi_slopes", ValueError, "None with causal=False", put("causal", False)),
]


@each(REFUSALS)
def test_refused(world: World, refusal: Refusal) -> None:
    check_refused(world, rawmla.context_attention_fwd, fp8, refusal)


OF_16_BITS: list[Refusal] = [
    (DTYPE_NAME, ValueError, "v_cache of float8_e5m2 ... 'auto'", change("v_cache", dtype="float8_e5m2")),
    ("v_cache", ValueError, "multiples of 8", change("v_cache", strides=(2 * HEAD + 4, HEAD, PAGE, 1))),
    ("o", ValueError, "address that is a multiple of 2 bytes", change("o", ptr=0x4001)),
    ("k_cache", TypeError, "bfloat16, the dtype of q ... 'auto'", change("k_cache", dtype="float16")),
]


def test_refused_with_arrays_of_16_bits(world: World) -> None:
    check_all_refused(world, rawmla.context_attention_fwd, plain, OF_16_BITS)


# ---- launches


def test_plain(world: World) -> None:
    arguments = plain()
    assert call(arguments) is arguments["o"]
    (launch,) = world.prefix
    assert launch.call == EXPECTED and launch.addresses == PLAIN_ADDRESSES
    assert (launch.stream, launch.scratch, launch.prepared.capturing()) == (0x51, 0, False)
    assert not (world.framework.allocated or world.framework.copied or world.framework.filled)


def test_scratch(world: World) -> None:
    """Some calls need it."""
    call(plain(), causal=False)
    (scratch,) = world.framework.allocated
    assert (scratch.shape, scratch.dtype) == ((48,), "uint8")
    assert (world.prefix[0].call.window_right, world.prefix[0].scratch) == (NO_BOUND, scratch.ptr)


def test_windows(world: World) -> None:
    no_bounds = [(None, NO_BOUND), (0, NO_BOUND), (2**40, NO_BOUND)]
    for sliding_window, window in (*no_bounds, (1, 0), (np.int64(3), 2), (2**30, 2**30 - 1)):
        for causal, right in ((True, 0), (False, NO_BOUND)):
            call(plain(), sliding_window=sliding_window, causal=causal)
            launched = world.prefix[-1].call
            assert launched == EXPECTED._replace(window_left=window, window_right=right)
            assert type(launched.window_left) is int


@pytest.mark.parametrize("name", ("auto", "float16", "bfloat16"))
def test_caches_of_numbers(world: World, name: str) -> None:
    """They are of q's dtype, whatever name of 16 bits is given; scales are not looked at."""
    for dtype in ("float16", "bfloat16"):
        arguments = plain() | {DTYPE_NAME: name, "k_scale": None, "v_scale": "nothing"}
        for array in ("q", "k", "v", "o", *CACHES):
            change(array, dtype=dtype)(arguments)
        call(arguments)
        assert world.prefix[-1].call == EXPECTED._replace(dtype=dtype)


def test_caches_of_fp8(world: World) -> None:
    """Bytes may have any of three dtypes, and two names."""
    for name, kind, dtype in (
        ("fp8_e4m3", "e4m3", "float8_e4m3fn"),
        ("fp8_e5m2", "e5m2", "float8_e5m2"),
        ("fp8", "e4m3", "float8_e4m3fn"),
    ):
        for dtypes in (("uint8", "uint8"), (dtype, "int8"), ("int8", dtype)):
            arguments = fp8() | {DTYPE_NAME: name}
            for cache, of_cache in zip(CACHES, dtypes, strict=True):
                change(cache, dtype=of_cache)(arguments)
            call(arguments)
            assert world.prefix[-1].call == changed(FP8, {"dtype": kind})


def test_scales(world: World) -> None:
    """Numbers travel in the call, arrays as addresses."""
    call(fp8() | {"k_scale": 0.5, "v_scale": np.float32(2), "fp8_out_scale": 3})
    (launch,) = world.prefix
    assert launch.call == changed(FP8, {"k_scale": 0.5, "v_scale": 2.0, "out_scale": 3.0})
    assert launch.addresses == ADDRESSES._replace(k_scale=0, v_scale=0, out_scale=0)
    assert type(launch.call.cache.v_scale) is type(launch.call.cache.out_scale) is float


# ---- layouts


LAYOUTS_OF_O: tuple[tuple[Arguments, bool], ...] = (
    ({"strides": (128, 40 * 128, 1)}, True),
    ({"strides": (8192, 144, 1)}, True),
    ({"ptr": 0x4002}, False),
    ({"strides": (1025, 128, 1)}, False),
    ({"strides": (1060, 132, 1)}, False),
)


@pytest.mark.parametrize(("changes", "is_aligned"), LAYOUTS_OF_O, ids=str)
def test_layouts_of_o(world: World, changes: Arguments, is_aligned: bool) -> None:
    """Without alignment it is written all the same, not by TMA."""
    for arguments in (plain(), fp8()):
        change("o", **changes)(arguments)
        assert call(arguments) is arguments["o"]
        launched = world.prefix[-1].call
        assert launched.out_strides == (0, *changes.get("strides", (1024, 128, 1))[:-1])
        assert launched.out_is_aligned == is_aligned and not world.framework.copied


@pytest.mark.parametrize("block_size", (1, 3, 1056))
@pytest.mark.parametrize("dtype", ("bfloat16", "uint8"))
def test_dimensions_of_one_element(world: World, block_size: int, dtype: str) -> None:
    """Are never stepped over, so any stride is legal; kernels get multiples of 16 bytes."""
    arguments = plain() | {DTYPE_NAME: "auto" if dtype == "bfloat16" else "fp8"}
    for name in ("q", "k", "v", "o"):
        change(name, shape=(1, 1, 24), strides=(3, -5, 1))(arguments)
    k, v = (1, 1, 6, block_size, 4), (1, 1, 24, block_size)
    change("k_cache", shape=k, strides=(-7, 13, *contiguous(k)[2:]), dtype=dtype)(arguments)
    change("v_cache", shape=v, strides=(17, 0, *contiguous(v)[2:]), dtype=dtype)(arguments)
    change("b_loc", shape=(1, 1), strides=(9, 5))(arguments)
    change("b_seq_len", shape=(1,), strides=(5,))(arguments)
    call(arguments, b_start_loc=FakeArray((2,)))
    launched = world.prefix[0].call
    assert not world.framework.copied and (launched.cache.block_size, launched.cache.x) == (block_size, 4)
    assert all(s % 8 == 0 for s in (*launched.q_strides, *launched.k_strides, *launched.out_strides))
    steps = (*launched.cache.k_strides, *launched.cache.v_strides)
    assert all(s > 0 and s % (16 if dtype == "uint8" else 8) == 0 for s in steps)


def test_inner_dimensions_of_one_element(world: World) -> None:
    arguments = plain()
    change("k_cache", shape=(BLOCKS, H_KV, 1, 1, D), strides=(2 * D, D, 77, 55, 1))(arguments)
    change("v_cache", shape=(BLOCKS, H_KV, D, 1), strides=(2 * D, D, 1, 33))(arguments)
    call(arguments)
    made = world.prefix[0].call.cache
    assert made.k_strides == made.v_strides == (2 * D, D)


# ---- nothing to do


@pytest.mark.parametrize(
    "spoil",
    (
        put("max_input_len", 0),
        shapes(b_seq_len=(0,), b_start_loc=(1,), b_loc=(0, COLUMNS)),
        both(put("skip_decode", True), put("max_input_len", 1)),
    ),
    ids=("no length", "no requests", "decoding alone"),
)
def test_nothing_is_launched(world: World, spoil: Callable[[Arguments], None]) -> None:
    arguments = plain()
    change("q", ptr=0x1008)(arguments)
    spoil(arguments)
    assert call(arguments) is arguments["o"]
    assert world.untouched
    with pytest.raises(TypeError, match="^o: expected dtype bfloat16"):  # checked nevertheless
        call(arguments | {"o": arguments["o"].but(dtype="uint8")})


def test_a_cache_without_blocks(world: World) -> None:
    """Requests may have no older token."""
    arguments = plain()
    shapes(k_cache=(0, *K_CACHE[1:]), v_cache=(0, *V_CACHE[1:]), b_loc=(B, 0))(arguments)
    call({name: x.but(ptr=0) if name in (*CACHES, "b_loc") else x for name, x in arguments.items()})
    launched = world.prefix[0].call.cache
    assert (launched.num_blocks, launched.table_columns) == (0, 0)


# ---- the memo


@pytest.mark.parametrize("name", SCALES)
def test_other_scales(world: World, name: str) -> None:
    for scale in (0.5, 0.25, FakeArray((), "float32"), 0.5):
        call(fp8() | {name: scale})
    assert prepared(world.prefix) == [0, 1, 2, 0]
    member = name.removeprefix("fp8_")
    assert [getattr(launch.call.cache, member) for launch in world.prefix] == [0.5, 0.25, None, 0.5]


def test_upper_bound_that_changes_nothing(world: World) -> None:
    for length in (None, 0, 5, 10**9):
        call(plain(), max_seq_len=length)
    assert prepared(world.prefix) == [0] * 4
