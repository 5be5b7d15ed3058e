"""What the public calls refuse; arrays and launches are stand-ins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from calls.fakes import (
    ARRAYS,
    D_QK,
    H_KV,
    H_Q,
    K_STRIDES,
    NUM_BLOCKS,
    OUT_SHAPE,
    PAGE,
    PARTS,
    Q_STRIDES,
    S_Q,
    Arguments,
    B,
    FakeArray,
    World,
    both,
    change,
    contiguous,
    dense_arguments,
    empty_plan_with,
    make_world,
    out_array,
    put,
)

import rawmla


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return make_world(monkeypatch)


def of_1023_heads(s_q: int) -> Callable[[Arguments], None]:
    """A call of so many query tokens, with a number of heads that limits them."""
    return both(change("q", shape=(B, s_q, 1023, D_QK)), change("k_cache", shape=(NUM_BLOCKS, PAGE, 1, D_QK)))


def pages_of_4032(max_blocks: int) -> Callable[[Arguments], None]:
    """A call whose table has so many columns, with pages of a size that limits them."""
    return both(
        change("k_cache", shape=(NUM_BLOCKS, 4032, H_KV, D_QK)), change("block_table", shape=(B, max_blocks))
    )


# name of the test, argument that the text names, exception, what the text also holds, how the call is spoilt
BAD_CALLS: list[tuple[str, str, type[Exception], tuple[str, ...], Callable[[Arguments], None]]] = [
    *[(f"{name} a list", name, TypeError, ("got list",), put(name, [1])) for name in ARRAYS],
    *[
        (f"{name} on the host", name, ValueError, ("CUDA memory", "numpy.ndarray"), put(name, np.zeros(3)))
        for name in ARRAYS
    ],
    *[
        (f"{name} None", name, TypeError, ("got NoneType",), put(name, None))
        for name in ARRAYS
        if name != "num_splits"
    ],
    *[
        (
            f"{name} on another device",
            name,
            ValueError,
            ("cuda:0", "the device of q", "cuda:1"),
            change(name, device=1),
        )
        for name in ARRAYS[1:]
    ],
    *[
        (f"{name} int64", name, TypeError, ("int32", "got int64"), change(name, dtype="int64"))
        for name in ARRAYS[2:]
    ],
    ("q float32", "q", TypeError, ("bfloat16 or float16", "float32"), change("q", dtype="float32")),
    ("q fp8", "q", TypeError, ("bfloat16 or float16", "float8_e4m3fn"), change("q", dtype="float8_e4m3fn")),
    ("q 3-D", "q", ValueError, ("[b, s_q, h_q, d_qk]", "[3, 16, 576]"), change("q", shape=(3, 16, 576))),
    ("d_qk 128", "q", ValueError, ("576 or 512", "128"), change("q", shape=(B, S_Q, H_Q, 128))),
    (
        "q last dimension strided",
        "q",
        ValueError,
        ("contiguous last dimension", "2"),
        change("q", strides=tuple(2 * stride for stride in Q_STRIDES)),
    ),
    ("h_q not a multiple", "q", ValueError, ("h_q 15", "h_kv 2"), change("q", shape=(B, S_Q, 15, D_QK))),
    ("no heads", "q", ValueError, ("h_q 0", "h_kv 2"), change("q", shape=(B, S_Q, 0, D_QK))),
    (
        "no KV heads",
        "q",
        ValueError,
        ("h_q 16", "h_kv 0"),
        change("k_cache", shape=(NUM_BLOCKS, PAGE, 0, D_QK)),
    ),
    ("k_cache fp16", "k_cache", TypeError, ("bfloat16", "float16"), change("k_cache", dtype="float16")),
    ("k_cache uint8", "k_cache", TypeError, ("bfloat16", "uint8"), change("k_cache", dtype="uint8")),
    (
        "k_cache 3-D",
        "k_cache",
        ValueError,
        ("page_block_size", "[40, 64, 576]"),
        change("k_cache", shape=(40, 64, 576)),
    ),
    (
        "k_cache d_qk",
        "k_cache",
        ValueError,
        ("576", "512"),
        change("k_cache", shape=(NUM_BLOCKS, PAGE, H_KV, 512)),
    ),
    *[
        (
            f"page of {page}",
            "k_cache",
            ValueError,
            ("16, 32 or a multiple of 64", f"got {page}"),
            change("k_cache", shape=(NUM_BLOCKS, page, H_KV, D_QK)),
        )
        for page in (0, 1, 8, 48, 61, 65, 96)
    ],
    (
        "no blocks",
        "k_cache",
        ValueError,
        ("at least 1 block",),
        change("k_cache", shape=(0, PAGE, H_KV, D_QK)),
    ),
    (
        "k_cache last dimension strided",
        "k_cache",
        ValueError,
        ("contiguous last dimension",),
        change("k_cache", strides=tuple(2 * stride for stride in K_STRIDES)),
    ),
    ("k_cache address", "k_cache", ValueError, ("16-byte aligned", "0x2008"), change("k_cache", ptr=0x2008)),
    (
        "k_cache strides beyond TMA",
        "k_cache",
        ValueError,
        ("TMA", str(2**39)),
        change("k_cache", strides=(2**39, *K_STRIDES[1:])),
    ),
    (
        "more KV heads than a grid has",
        "k_cache",
        ValueError,
        ("at most 65535",),
        both(
            change("q", shape=(B, S_Q, 65_536, D_QK)),
            change("k_cache", shape=(NUM_BLOCKS, PAGE, 65_536, D_QK)),
        ),
    ),
    (
        "more rows than 32 bits count",
        "q",
        ValueError,
        ("2**31 rows",),
        change("q", shape=(B, 2**27, H_Q, D_QK)),
    ),
    (
        "more rows than are divided by 1023",
        "q",
        ValueError,
        ("at most 4214848 rows", "h_q / h_kv = 1023", "got 4215783"),
        of_1023_heads(4121),
    ),
    (
        "more tokens than are divided by a page of 4032",
        "block_table",
        ValueError,
        ("at most 277094672 tokens", "4032", "got 68724 blocks"),
        pages_of_4032(68_724),
    ),
    *[
        (
            f"k_cache strides {strides}",
            "k_cache",
            ValueError,
            ("multiples of 8", str(strides[0])),
            change("k_cache", strides=strides),
        )
        for strides in (
            (K_STRIDES[0] + 4, *K_STRIDES[1:]),
            (K_STRIDES[0], 1156, 578, 1),
            (-K_STRIDES[0], *K_STRIDES[1:]),
            (0, *K_STRIDES[1:]),
        )
    ],
    ("table 1-D", "block_table", ValueError, ("[3, max_blocks]", "[10]"), change("block_table", shape=(10,))),
    (
        "table rows",
        "block_table",
        ValueError,
        ("[3, max_blocks]", "[4, 10]"),
        change("block_table", shape=(4, 10)),
    ),
    (
        "table columns strided",
        "block_table",
        ValueError,
        ("contiguous last",),
        change("block_table", strides=(20, 2)),
    ),
    ("lengths 2-D", "cache_seqlens", ValueError, ("[3]", "[3, 1]"), change("cache_seqlens", shape=(3, 1))),
    ("lengths too few", "cache_seqlens", ValueError, ("[3]", "[2]"), change("cache_seqlens", shape=(2,))),
    ("lengths too many", "cache_seqlens", ValueError, ("[3]", "[4]"), change("cache_seqlens", shape=(4,))),
    (
        "lengths strided",
        "cache_seqlens",
        ValueError,
        ("contiguous", "2"),
        change("cache_seqlens", strides=(2,)),
    ),
    ("head_dim_v 576", "head_dim_v", ValueError, ("512", "576"), put("head_dim_v", 576)),
    ("head_dim_v float", "head_dim_v", TypeError, ("int", "float 512.0"), put("head_dim_v", 512.0)),
    ("head_dim_v None", "head_dim_v", TypeError, ("int", "None"), put("head_dim_v", None)),
    ("head_dim_v bool", "head_dim_v", TypeError, ("int", "bool True"), put("head_dim_v", True)),
    *[
        (f"scale {scale}", "softmax_scale", ValueError, ("finite", str(scale)), put("softmax_scale", scale))
        for scale in (0.0, -0.1, 1e-46, float("nan"), float("inf"), 1e39, 3e38)
    ],
    ("scale past float64", "softmax_scale", ValueError, ("finite", "inf"), put("softmax_scale", 10**400)),
    ("scale bool", "softmax_scale", TypeError, ("float", "bool True"), put("softmax_scale", True)),
    ("scale str", "softmax_scale", TypeError, ("float", "str '1'"), put("softmax_scale", "1")),
    ("scale array", "softmax_scale", TypeError, ("float", "FakeArray"), put("softmax_scale", FakeArray(()))),
    ("causal int", "causal", TypeError, ("bool", "int 1"), put("causal", 1)),
    ("causal array", "causal", TypeError, ("bool", "FakeArray"), put("causal", FakeArray(()))),
    ("causal None", "causal", TypeError, ("bool", "None"), put("causal", None)),
    ("fp8 int", "is_fp8_kvcache", TypeError, ("bool", "int 0"), put("is_fp8_kvcache", 0)),
    (
        "batch invariant None",
        "enable_batch_invariant",
        TypeError,
        ("bool",),
        put("enable_batch_invariant", None),
    ),
    ("out a list", "out", TypeError, ("got list",), put("out", [1])),
    ("out dtype", "out", TypeError, ("bfloat16", "float32"), put("out", out_array(dtype="float32"))),
    (
        "out shape",
        "out",
        ValueError,
        ("[3, 2, 16, 512]", "576"),
        put("out", out_array(shape=(B, S_Q, H_Q, 576))),
    ),
    ("out 3-D", "out", ValueError, ("[3, 2, 16, 512]",), put("out", out_array(shape=(B, H_Q, 512)))),
    ("out device", "out", ValueError, ("cuda:0", "cuda:1"), put("out", out_array(device=1))),
    ("out address", "out", ValueError, ("16-byte aligned", "0x7008"), put("out", out_array(ptr=0x7008))),
    (
        "out last dimension strided",
        "out",
        ValueError,
        ("contiguous last dimension",),
        put("out", out_array(strides=tuple(2 * stride for stride in contiguous(OUT_SHAPE)))),
    ),
    *[
        (f"out strides {strides}", "out", ValueError, (text,), put("out", out_array(strides=strides)))
        for strides, text in (
            ((16448, 8224, 514, 1), "multiples of 8"),
            ((-16384, 8192, 512, 1), "positive"),
            ((0, 8192, 512, 1), "positive"),
            ((16384, 8192, 256, 1), "overlap"),
            ((16384, 4096, 512, 1), "overlap"),
            ((8192, 8192, 512, 1), "overlap"),
        )
    ],
    (
        "plan 1-D",
        "tile_scheduler_metadata",
        ValueError,
        ("[num_sm_parts, 8]", "[40]"),
        change("tile_scheduler_metadata", shape=(40,)),
    ),
    (
        "plan of 7 columns",
        "tile_scheduler_metadata",
        ValueError,
        ("[num_sm_parts, 8]", "[5, 7]"),
        change("tile_scheduler_metadata", shape=(5, 7)),
    ),
    (
        "plan without rows",
        "tile_scheduler_metadata",
        ValueError,
        ("[num_sm_parts, 8]", "[0, 8]"),
        change("tile_scheduler_metadata", shape=(0, 8)),
    ),
    (
        "plan rows apart",
        "tile_scheduler_metadata",
        ValueError,
        ("contiguous", "[16, 1]"),
        change("tile_scheduler_metadata", strides=(16, 1)),
    ),
    (
        "plan columns apart",
        "tile_scheduler_metadata",
        ValueError,
        ("contiguous", "[8, 2]"),
        change("tile_scheduler_metadata", strides=(8, 2)),
    ),
    (
        "plan address",
        "tile_scheduler_metadata",
        ValueError,
        ("16-byte aligned", "0x5004"),
        change("tile_scheduler_metadata", ptr=0x5004),
    ),
    ("splits missing", "num_splits", ValueError, ("int32 array", "None"), put("num_splits", None)),
    ("splits 2-D", "num_splits", ValueError, ("b + 1 = 4", "[4, 1]"), change("num_splits", shape=(4, 1))),
    ("splits too few", "num_splits", ValueError, ("b + 1 = 4", "[3]"), change("num_splits", shape=(3,))),
    ("splits strided", "num_splits", ValueError, ("contiguous", "2"), change("num_splits", strides=(2,))),
    (
        "splits beside an object",
        "num_splits",
        ValueError,
        ("None with a FlashMLASchedMeta", "FakeArray"),
        put("tile_scheduler_metadata", rawmla.FlashMLASchedMeta()),
    ),
    (
        "object with splits only",
        "tile_scheduler_metadata",
        ValueError,
        ("both arrays",),
        empty_plan_with(num_splits=FakeArray((B + 1,))),
    ),
    (
        "object with rows only",
        "num_splits",
        TypeError,
        ("NoneType",),
        empty_plan_with(tile_scheduler_metadata=FakeArray((PARTS, 8))),
    ),
    (
        "object with short splits",
        "num_splits",
        ValueError,
        ("b + 1 = 4", "[3]"),
        empty_plan_with(tile_scheduler_metadata=FakeArray((PARTS, 8)), num_splits=FakeArray((B,))),
    ),
    (
        "object without config",
        "tile_scheduler_metadata",
        ValueError,
        ("have_initialized", "config None"),
        empty_plan_with(have_initialized=True),
    ),
    (
        "batch too large for a plan",
        "q",
        ValueError,
        ("at most 16384", "16385"),
        both(
            change("q", shape=(16385, 1, 16, D_QK)),
            change("block_table", shape=(16385, 1)),
            change("cache_seqlens", shape=(16385,)),
            empty_plan_with(),
        ),
    ),
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
    arguments = dense_arguments()
    spoil(arguments)
    with pytest.raises(kind) as caught:
        rawmla.flash_mla_with_kvcache(**arguments)
    message = str(caught.value)
    assert type(caught.value) is kind
    assert message.startswith(f"{argument}: expected ")
    assert ", got " in message
    for text in texts:
        assert text in message
    assert world.untouched


@pytest.mark.parametrize("largest", (of_1023_heads(4120), pages_of_4032(68_723)))
def test_largest_sizes(world: World, largest: Callable[[Arguments], None]) -> None:
    """One token or block fewer than BAD_CALLS refuses."""
    arguments = dense_arguments()
    largest(arguments)
    rawmla.flash_mla_with_kvcache(**arguments)
    assert len(world.decodes) == 1


SPARSE_ARRAYS = (
    "attn_sink",
    "extra_k_cache",
    "extra_indices_in_kvcache",
    "topk_length",
    "extra_topk_length",
)


@pytest.mark.parametrize("name", SPARSE_ARRAYS)
def test_sparse_argument_without_indices(world: World, name: str) -> None:
    arguments = dense_arguments() | {name: FakeArray((B, S_Q, 64))}
    with pytest.raises(
        ValueError,
        match=rf"^{name}: expected None without indices, got an array; dense",
    ):
        rawmla.flash_mla_with_kvcache(**arguments)
    assert world.untouched


def test_sparse_arguments_without_indices(world: World) -> None:
    """All that are too many are named, and before what else may be wrong."""
    arguments = dense_arguments() | {name: FakeArray((B,)) for name in SPARSE_ARRAYS} | {"q": None}
    with pytest.raises(ValueError, match=rf"^{', '.join(SPARSE_ARRAYS)}: expected None without indices"):
        rawmla.flash_mla_with_kvcache(**arguments)
    assert world.untouched


def test_fp8_without_indices(world: World) -> None:
    with pytest.raises(NotImplementedError, match=r"^is_fp8_kvcache=True: .*expected indices"):
        rawmla.flash_mla_with_kvcache(**dense_arguments(), is_fp8_kvcache=True)
    assert world.untouched


class TestMetadata:
    LENGTHS = FakeArray((B,), ptr=0x4000)

    @pytest.mark.parametrize(
        ("argument", "kind", "text", "arguments", "keywords"),
        (
            ("cache_seqlens", TypeError, "got NoneType", (None, 128, 1), {}),
            ("cache_seqlens", TypeError, "got NoneType", (), {"num_heads_q": 128}),
            ("cache_seqlens", TypeError, "got int64", (FakeArray((B,), "int64"), 128, 1), {}),
            ("cache_seqlens", ValueError, "got [3, 1]", (FakeArray((B, 1)), 128, 1), {}),
            ("cache_seqlens", ValueError, "stride 2", (FakeArray((B,), strides=(2,)), 128, 1), {}),
            ("cache_seqlens", ValueError, "got 16385", (FakeArray((16385,)), 128, 1), {}),
            ("cache_seqlens", ValueError, "numpy.ndarray", (np.zeros(3, np.int32), 128, 1), {}),
            ("num_q_tokens_per_head_k", TypeError, "got None", (LENGTHS,), {"num_heads_k": 1}),
            ("num_q_tokens_per_head_k", TypeError, "got float 1.0", (LENGTHS, 1.0, 1), {}),
            ("num_q_tokens_per_head_k", ValueError, "got 0", (LENGTHS, 0, 1), {}),
            ("num_heads_k", TypeError, "got None", (LENGTHS, 128), {}),
            ("num_heads_k", TypeError, "got bool True", (LENGTHS, 128, True), {}),
            ("num_heads_k", ValueError, "got -1", (LENGTHS, 128, -1), {}),
            ("num_heads_q", ValueError, "got 3 with num_heads_k = 2", (LENGTHS, 16, 2, 3), {}),
            ("num_heads_q", ValueError, "got 64 with num_heads_k = 2", (LENGTHS, 16, 2, 64), {}),
            ("num_heads_per_head_k", TypeError, "got 128", (LENGTHS, 128, 1), {"num_heads_per_head_k": 128}),
            ("is_fp8_kvcache", TypeError, "got int 1", (LENGTHS, 128, 1, None, 1), {}),
            ("enable_batch_invariant", TypeError, "got int 1", (), {"enable_batch_invariant": 1}),
            ("out", TypeError, "got FakeArray", (LENGTHS, 128, 1), {"out": FakeArray((9, 8))}),
            ("out", TypeError, "got tuple", (LENGTHS, 128, 1), {"out": (FakeArray((9, 8)),)}),
            (
                "out",
                ValueError,
                "got one array",
                (LENGTHS, 128, 1),
                {"out": rawmla.FlashMLASchedMeta(num_splits=FakeArray((B + 1,)))},
            ),
            ("out[0]", TypeError, "NoneType", (LENGTHS, 128, 1), {"out": (None, FakeArray((B + 1,)))}),
            (
                "out[0]",
                ValueError,
                "[9, 7]",
                (LENGTHS, 128, 1),
                {"out": (FakeArray((9, 7)), FakeArray((B + 1,)))},
            ),
            ("out[1]", ValueError, "[3]", (LENGTHS, 128, 1), {"out": (FakeArray((9, 8)), FakeArray((B,)))}),
            (
                "out[1]",
                ValueError,
                "cuda:1",
                (LENGTHS, 128, 1),
                {"out": (FakeArray((9, 8)), FakeArray((B + 1,), device=1))},
            ),
        ),
    )
    def test_bad_call(
        self,
        world: World,
        argument: str,
        kind: type[Exception],
        text: str,
        arguments: tuple[Any, ...],
        keywords: Arguments,
    ) -> None:
        with pytest.raises(kind) as caught:
            rawmla.get_mla_metadata(*arguments, **keywords)
        message = str(caught.value)
        assert message.startswith(f"{argument}: expected ")
        assert text in message
        assert world.untouched

    def test_batch_invariant_differs_from_the_object(self, world: World) -> None:
        plan = rawmla.FlashMLASchedMeta()
        arguments = dense_arguments() | {"tile_scheduler_metadata": plan, "num_splits": None}
        rawmla.flash_mla_with_kvcache(**arguments)
        with pytest.raises(ValueError, match=r"^enable_batch_invariant: expected False"):
            rawmla.get_mla_metadata(self.LENGTHS, 16, 2, out=plan, enable_batch_invariant=True)
        assert len(world.plans) == 1

    def test_fp8_without_topk(self, world: World) -> None:
        with pytest.raises(NotImplementedError, match=r"^is_fp8_kvcache=True: .*get_mla_metadata: topk"):
            rawmla.get_mla_metadata(self.LENGTHS, 128, 1, is_fp8_kvcache=True)
        assert world.untouched

    def test_unknown_keyword(self) -> None:
        with pytest.raises(TypeError, match="num_heads"):
            rawmla.get_mla_metadata(self.LENGTHS, 128, 1, num_heads=1)  # type: ignore[call-arg]
