"""Sparse decode calls: what is refused, and what accepted calls allocate and launch; arrays are stand-ins."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from calls.fakes import (
    EXTRA_BLOCKS,
    EXTRA_PAGE,
    EXTRA_TOPK,
    H_Q,
    NUM_BLOCKS,
    OUT_SHAPE,
    PAGE,
    PARTS,
    S_Q,
    SM_COUNT,
    SPARSE_COLUMNS,
    TOPK,
    Arguments,
    B,
    FakeArray,
    FakeFramework,
    World,
    both,
    change,
    contiguous,
    dense_arguments,
    empty_plan_with,
    make_world,
    out_array,
    put,
    q_pair,
    sparse_arguments,
)

import rawmla
from rawmla.call import memo
from rawmla.kernels import mla_metadata as metadata
from rawmla.kernels.mla_sparse import NO_CACHE, Cache
from rawmla.mla import sparse_decode as sparse
from rawmla.mla.plan import SchedConfig

OPTIONAL = (
    "topk_length",
    "attn_sink",
    "extra_k_cache",
    "extra_indices_in_kvcache",
    "extra_topk_length",
)
ARRAYS = ("q", "k_cache", "indices", *OPTIONAL)
PLAN = ("tile_scheduler_metadata", "num_splits")
CACHES = (("k_cache", (NUM_BLOCKS, PAGE)), ("extra_k_cache", (EXTRA_BLOCKS, EXTRA_PAGE)))
LENGTHS = ("topk_length", "extra_topk_length")
CHOSEN = (("indices", TOPK), ("extra_indices_in_kvcache", EXTRA_TOPK))


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return make_world(monkeypatch)


def call(arguments: Arguments, **more: Any) -> tuple[Any, Any]:
    return rawmla.flash_mla_with_kvcache(**arguments, **more)


def of_layout(layout: str, spoil: Callable[[Arguments], None] | None = None) -> Callable[[Arguments], None]:
    """The same call over a cache of another layout, spoilt afterwards."""

    def apply(arguments: Arguments) -> None:
        arguments.update(sparse_arguments(layout, extra=True))
        if spoil is not None:
            spoil(arguments)

    return apply


# name of the test, argument that the text names, exception, what the text also holds, how the call is spoilt
Case = tuple[str, str, type[Exception], tuple[str, ...], Callable[[Arguments], None]]
BAD_CALLS: list[Case] = [
    *[(f"{name} a list", name, TypeError, ("got list",), put(name, [1])) for name in ARRAYS + PLAN],
    *[
        (f"{name} on the host", name, ValueError, ("CUDA memory", "numpy.ndarray"), put(name, np.zeros(3)))
        for name in ARRAYS + PLAN
    ],
    *[
        (f"{name} None", name, TypeError, ("got NoneType",), put(name, None))
        for name in ("q", "k_cache", "tile_scheduler_metadata")
    ],
    *[
        (f"{name} on another device", name, ValueError, ("cuda:0", "of q", "cuda:1"), change(name, device=1))
        for name in ARRAYS[1:] + PLAN
    ],
    *[
        (
            f"{name} of another stream",
            name,
            ValueError,
            ("fake array", "0x51", "other array", "0x99"),
            change(name, framework=FakeFramework("other", stream=0x99)),
        )
        for name in ARRAYS[1:] + PLAN
    ],
    *[
        (f"{name} int64", name, TypeError, ("int32", "got int64"), change(name, dtype="int64"))
        for name in ("indices", "extra_indices_in_kvcache", *LENGTHS, *PLAN)
    ],
    ("q fp16", "q", TypeError, ("bfloat16 with indices", "float16"), change("q", dtype="float16")),
    ("q float32", "q", TypeError, ("bfloat16 with indices", "float32"), change("q", dtype="float32")),
    ("q 3-D", "q", ValueError, ("[b, s_q, h_q, d_qk]", "[3, 16, 576]"), change("q", shape=(3, 16, 576))),
    ("d_qk 128", "q", ValueError, ("576 or 512", "128"), change("q", shape=(B, S_Q, H_Q, 128))),
    ("no heads", "q", ValueError, ("at least 1 head", "0"), change("q", shape=(B, S_Q, 0, 576))),
    (
        "q last dimension strided",
        "q",
        ValueError,
        ("contiguous last dimension",),
        change("q", strides=tuple(2 * stride for stride in contiguous((B, S_Q, H_Q, 576)))),
    ),
    *[
        (f"{name} {dtype}", name, TypeError, (wanted, f"got {dtype}"), spoil)
        for name, _ in CACHES
        for dtype, wanted, spoil in (
            ("bfloat16", "is_fp8_kvcache=True", change(name, dtype="bfloat16")),
            ("float16", "is_fp8_kvcache=True", change(name, dtype="float16")),
            ("uint8", "is_fp8_kvcache=False", of_layout("bf16 576", change(name, dtype="uint8"))),
            ("float16", "is_fp8_kvcache=False", of_layout("bf16 512", change(name, dtype="float16"))),
        )
    ],
    *[
        (
            f"{name} of {columns} columns in a {layout} call",
            name,
            ValueError,
            (f"1, {SPARSE_COLUMNS[layout]}] for this d_qk", str(columns)),
            of_layout(layout, change(name, shape=(*shape, 1, columns))),
        )
        for name, shape in CACHES
        for layout, columns in (
            ("v32", 584),
            ("v32", 655),
            ("v32", 576),
            ("model1", 656),
            ("model1", 576),
            ("bf16 576", 512),
            ("bf16 512", 576),
        )
    ],
    *[
        (f"{name} {what}", name, ValueError, (text,), change(name, shape=shape))
        for name, (blocks, page) in CACHES
        for what, text, shape in (
            ("3-D", "[num_blocks, page_block_size, 1, 656]", (blocks, page, 656)),
            ("of two heads", "[num_blocks, page_block_size, 1, 656]", (blocks, page, 2, 656)),
            ("without blocks", "at least 1 block", (0, page, 1, 656)),
            ("without tokens", "page_block_size at least 1", (blocks, 0, 1, 656)),
        )
    ],
    *[
        (f"{name} {what}", name, ValueError, texts, change(name, strides=strides))
        for name, (_, page) in CACHES
        for what, texts, strides in (
            ("strided", ("contiguous tokens",), (page * 1312, 1312, 1312, 2)),
            ("tokens apart", ("contiguous tokens", "672"), (page * 672, 672, 672, 1)),
            ("block stride odd", ("multiples of 8 bytes",), (page * 656 + 4, 656, 656, 1)),
            ("block stride negative", ("not negative",), (-page * 656, 656, 656, 1)),
        )
    ],
    *[
        (f"{name} address", name, ValueError, ("multiples of 8 bytes", "0x2004"), change(name, ptr=0x2004))
        for name, _ in CACHES
    ],
    *[
        (
            f"{name} bf16 {what}",
            name,
            ValueError,
            ("multiples of 16 bytes",),
            of_layout("bf16 576", change(name, **changes)),
        )
        for name, (_, page) in CACHES
        for what, changes in (
            ("address", {"ptr": 0x2008}),
            ("block stride", {"strides": (page * 576 + 4, 576, 576, 1)}),
            ("token stride", {"strides": (page * 580, 580, 580, 1)}),
            ("token stride negative", {"strides": (page * 576, -576, 576, 1)}),
        )
    ],
    *[
        (
            f"{name} bf16 tokens 4 GiB apart",
            name,
            ValueError,
            ("less than 4 GiB apart", str(2**31)),
            of_layout("bf16 576", change(name, strides=(576, 2**31, 576, 1))),
        )
        for name, _ in CACHES
    ],
    *[
        (
            f"{name} MODEL1 pages of 2 GiB",
            name,
            ValueError,
            ("less than 2 GiB", "3728271"),
            of_layout("model1", change(name, shape=(2, 3_728_271, 1, 584))),
        )
        for name, _ in CACHES
    ],
    (
        "bf16 strided",
        "k_cache",
        ValueError,
        ("contiguous columns",),
        of_layout("bf16 576", change("k_cache", strides=(PAGE * 1152, 1152, 1152, 2))),
    ),
    *[
        (
            f"{name} {what}",
            name,
            ValueError,
            (f"[{B}, {S_Q}, {'topk' if name == 'indices' else 'extra_topk'}]", str(list(shape))),
            change(name, shape=shape),
        )
        for name, width in CHOSEN
        for what, shape in (
            ("2-D", (B, width)),
            ("of other requests", (B + 1, S_Q, width)),
            ("of other tokens", (B, S_Q + 1, width)),
            ("without columns", (B, S_Q, 0)),
        )
    ],
    *[
        (f"{name} strides {strides}", name, ValueError, (text,), change(name, strides=strides))
        for name, width in CHOSEN
        for text, strides in (
            ("contiguous last dimension", (4 * width, 2 * width, 2)),
            ("no negative stride", (-2 * width, width, 1)),
            ("no negative stride", (2 * width, -width, 1)),
        )
    ],
    *[
        (f"{name} {what}", name, ValueError, texts, change(name, **changes))
        for name in LENGTHS
        for what, texts, changes in (
            ("2-D", ("[3]", "[3, 1]"), {"shape": (3, 1)}),
            ("too few", ("[3]", "[2]"), {"shape": (2,)}),
            ("strided", ("contiguous", "2"), {"strides": (2,)}),
        )
    ],
    ("sink bf16", "attn_sink", TypeError, ("float32", "bfloat16"), change("attn_sink", dtype="bfloat16")),
    ("sink too short", "attn_sink", ValueError, ("[16]", "h_q", "[15]"), change("attn_sink", shape=(15,))),
    ("sink strided", "attn_sink", ValueError, ("contiguous", "2"), change("attn_sink", strides=(2,))),
    (
        "extra cache alone",
        "extra_indices_in_kvcache",
        ValueError,
        ("None",),
        both(put("extra_indices_in_kvcache", None), put("extra_topk_length", None)),
    ),
    ("extra indices alone", "extra_k_cache", ValueError, ("None",), put("extra_k_cache", None)),
    (
        "extra lengths alone",
        "extra_topk_length",
        ValueError,
        ("without extra_k_cache",),
        both(put("extra_k_cache", None), put("extra_indices_in_kvcache", None)),
    ),
    ("causal", "causal", ValueError, ("False with indices", "True"), put("causal", True)),
    ("causal NumPy", "causal", ValueError, ("False with indices", "True"), put("causal", np.True_)),
    ("causal int", "causal", TypeError, ("bool", "int 0"), put("causal", 0)),
    ("fp8 int", "is_fp8_kvcache", TypeError, ("bool", "int 1"), put("is_fp8_kvcache", 1)),
    (
        "batch invariant None",
        "enable_batch_invariant",
        TypeError,
        ("bool",),
        put("enable_batch_invariant", None),
    ),
    ("head_dim_v 576", "head_dim_v", ValueError, ("512", "576"), put("head_dim_v", 576)),
    ("head_dim_v None", "head_dim_v", TypeError, ("int", "None"), put("head_dim_v", None)),
    ("scale 0", "softmax_scale", ValueError, ("finite", "0.0"), put("softmax_scale", 0.0)),
    ("scale str", "softmax_scale", TypeError, ("float", "str '1'"), put("softmax_scale", "1")),
    ("out a list", "out", TypeError, ("got list",), put("out", [1])),
    ("out fp16", "out", TypeError, ("bfloat16", "float16"), put("out", out_array(dtype="float16"))),
    ("out shape", "out", ValueError, ("[3, 2, 16, 512]",), put("out", out_array(shape=(B, S_Q, H_Q, 576)))),
    ("out device", "out", ValueError, ("cuda:0", "cuda:1"), put("out", out_array(device=1))),
    ("out address", "out", ValueError, ("16-byte aligned", "0x7008"), put("out", out_array(ptr=0x7008))),
    (
        "out strides",
        "out",
        ValueError,
        ("multiples of 8",),
        put("out", out_array(strides=(16448, 8224, 514, 1))),
    ),
    ("out overlaps", "out", ValueError, ("overlap",), put("out", out_array(strides=(16384, 8192, 256, 1)))),
    (
        "plan of 7 columns",
        "tile_scheduler_metadata",
        ValueError,
        ("[num_sm_parts, 8]", "[5, 7]"),
        change("tile_scheduler_metadata", shape=(5, 7)),
    ),
    (
        "plan address",
        "tile_scheduler_metadata",
        ValueError,
        ("16-byte aligned", "0x5004"),
        change("tile_scheduler_metadata", ptr=0x5004),
    ),
    ("splits missing", "num_splits", ValueError, ("int32 array", "None"), put("num_splits", None)),
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
            change("q", shape=(16385, 1, H_Q, 576)),
            *[change(name, shape=(16385, 1, width)) for name, width in CHOSEN],
            *[change(name, shape=(16385,)) for name in LENGTHS],
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
    arguments = sparse_arguments(extra=True)
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
    call(sparse_arguments(extra=True))
    made = len(world.framework.allocated)
    for _, _, kind, _, spoil in BAD_CALLS:
        arguments = sparse_arguments(extra=True)
        spoil(arguments)
        with pytest.raises(kind):
            call(arguments)
    assert len(world.sparse) == 1 and not world.plans and len(world.framework.allocated) == made


CACHE = {
    "v32": Cache(PAGE, NUM_BLOCKS, PAGE * 656, 656, TOPK, S_Q * TOPK, TOPK),
    "model1": Cache(PAGE, NUM_BLOCKS, PAGE * 584, 576, TOPK, S_Q * TOPK, TOPK),
    "bf16 576": Cache(PAGE, NUM_BLOCKS, PAGE * 1152, 1152, TOPK, S_Q * TOPK, TOPK),
    "bf16 512": Cache(PAGE, NUM_BLOCKS, PAGE * 1024, 1024, TOPK, S_Q * TOPK, TOPK),
}


def extra_of(layout: str) -> Cache:
    """The extra cache of `sparse_arguments(layout, extra=True)`."""
    return CACHE[layout]._replace(
        page_block_size=EXTRA_PAGE,
        num_blocks=EXTRA_BLOCKS,
        block_stride=CACHE[layout].block_stride // PAGE * EXTRA_PAGE,
        topk=EXTRA_TOPK,
        index_stride_b=S_Q * EXTRA_TOPK,
        index_stride_s=EXTRA_TOPK,
    )


class TestLaunch:
    """What an accepted call hands to the kernels."""

    @pytest.mark.parametrize("layout", CACHE)
    def test_every_field(self, world: World, layout: str) -> None:
        arguments = sparse_arguments(layout, extra=True)
        out, lse = call(arguments, softmax_scale=0.25)
        allocated = world.framework.allocated
        scratch_bytes = 2 * PARTS * S_Q * H_Q * (512 * 2 + 3 * 4)
        assert [(x.shape, x.dtype) for x in allocated] == [
            (OUT_SHAPE, "bfloat16"),
            ((B, H_Q, S_Q), "float32"),
            ((scratch_bytes,), "uint8"),
        ]
        assert out is allocated[0] and lse is allocated[1]
        (args,) = world.sparse
        got = dict(vars(args))
        capturing = got.pop("capturing")
        assert world.framework.asked_capturing == 0
        assert capturing() is False and world.framework.asked_capturing == 1
        d_qk = arguments["q"].shape[3]
        assert got == {
            "device": 0,
            "stream": 0x51,
            "format": layout.split()[0],
            "d_qk": d_qk,
            "load_bytes": 8 if layout == "model1" else 16,  # extra pages of 61 * 584 bytes
            "b": B,
            "s_q": S_Q,
            "h_q": H_Q,
            "cache": CACHE[layout],
            "extra": extra_of(layout),
            "q": 0x1000,
            "q_rope": 0x1000 + 2 * (d_qk - 64),
            "q_strides": (S_Q * H_Q * d_qk, H_Q * d_qk, d_qk),
            "q_rope_strides": (S_Q * H_Q * d_qk, H_Q * d_qk, d_qk),
            "k_cache": 0x2000,
            "extra_k_cache": 0xB000,
            "indices": 0x8000,
            "extra_indices": 0xD000,
            "topk_length": 0x9000,
            "extra_topk_length": 0xE000,
            "attn_sink": 0xA000,
            "sched_meta": 0x5000,
            "num_parts": PARTS,
            "num_splits": 0x6000,
            "object_layout": False,
            "batch_invariant": False,
            "out": out.ptr,
            "out_strides": (S_Q * H_Q * 512, H_Q * 512, 512),
            "lse": lse.ptr,
            "scratch": allocated[2].ptr,
            "max_logits": 0,
            "scratch_bytes": scratch_bytes,
            "softmax_scale": 0.25,
            "lse_factor": None,
            "uniform": metadata.NOT_UNIFORM,
            "group_tokens": 1,
            "limited": False,
            "selected": 0,
        }
        assert not world.plans and not world.decodes and not world.framework.copied

    @pytest.mark.parametrize("layout", CACHE)
    def test_nothing_optional(self, world: World, layout: str) -> None:
        call(sparse_arguments(layout))
        (args,) = world.sparse
        assert (args.cache, args.extra) == (CACHE[layout], NO_CACHE)
        assert (args.k_cache, args.extra_k_cache) == (0x2000, 0)
        assert (args.indices, args.extra_indices) == (0x8000, 0)
        assert (args.topk_length, args.extra_topk_length, args.attn_sink) == (0, 0, 0)
        assert args.softmax_scale == args.d_qk**-0.5 and args.load_bytes == 16

    def test_positional(self, world: World) -> None:
        """FlashMLA's order: num_splits, softmax_scale, causal, is_fp8_kvcache, indices, attn_sink, ..."""
        given = sparse_arguments(extra=True)
        first = [given[name] for name in list(dense_arguments())]
        rest = [given[name] for name in ("attn_sink", *OPTIONAL[2:4], *LENGTHS)]
        rawmla.flash_mla_with_kvcache(*first, 0.5, False, True, given["indices"], *rest)
        (args,) = world.sparse
        assert (args.softmax_scale, args.attn_sink) == (0.5, 0xA000)
        assert (args.k_cache, args.extra_k_cache) == (0x2000, 0xB000)
        assert (args.indices, args.extra_indices) == (0x8000, 0xD000)
        assert (args.topk_length, args.extra_topk_length) == (0x9000, 0xE000)

    def test_table_and_lengths_are_not_read(self, world: World) -> None:
        call(sparse_arguments() | {"block_table": object(), "cache_seqlens": object()})
        assert len(world.sparse) == 1
        assert not {"block_table", "cache_seqlens"} & set(world.reads)

    def test_numpy_scalars(self, world: World) -> None:
        arguments = sparse_arguments() | {"head_dim_v": np.int64(512), "is_fp8_kvcache": np.True_}
        call(arguments, causal=np.False_, enable_batch_invariant=np.False_, softmax_scale=np.float32(0.5))
        (args,) = world.sparse
        assert args.softmax_scale == 0.5 and type(args.softmax_scale) is float
        assert args.batch_invariant is False

    @pytest.mark.parametrize("dtype", ("uint8", "int8", "float8_e4m3fn"))
    def test_dtypes_of_bytes(self, world: World, dtype: str) -> None:
        arguments = sparse_arguments("model1")
        change("k_cache", dtype=dtype)(arguments)
        call(arguments)
        assert world.sparse[0].format == "model1"

    def test_other_device(self, world: World) -> None:
        arguments = sparse_arguments(extra=True)
        for name in ARRAYS + PLAN:
            change(name, device=1)(arguments)
        call(arguments)
        assert (world.sparse[0].device, world.sparse[0].stream) == (1, 0x52)
        assert {x.device for x in world.framework.allocated} == {1}

    @pytest.mark.parametrize("name", ARRAYS[1:] + PLAN)
    def test_another_framework_on_the_same_stream(self, world: World, name: str) -> None:
        arguments = sparse_arguments(extra=True)
        other = FakeFramework("other")
        change(name, framework=other)(arguments)
        call(arguments)
        assert len(world.sparse) == 1 and not other.allocated

    @pytest.mark.parametrize(
        ("layout", "name", "changes", "load_bytes"),
        (
            ("v32", "k_cache", {"ptr": 0x2008}, 8),
            ("v32", "k_cache", {"strides": (PAGE * 656 + 8, 656, 656, 1)}, 8),
            ("v32", "k_cache", {"strides": (PAGE * 656 + 16, 656, 656, 1)}, 16),
            ("v32", "extra_k_cache", {"ptr": 0xB008}, 8),
            ("model1", "k_cache", {"ptr": 0x2008}, 8),
            ("model1", "extra_k_cache", {"strides": (576 * 64, 584, 584, 1)}, 16),
        ),
    )
    def test_what_rows_are_aligned_to(
        self, world: World, layout: str, name: str, changes: Arguments, load_bytes: int
    ) -> None:
        arguments = sparse_arguments(layout, extra=True)
        change(name, **changes)(arguments)
        call(arguments)
        assert world.sparse[0].load_bytes == load_bytes

    @pytest.mark.parametrize("page", (1, 2, 53, 61, 64, 69, 256, 576))
    @pytest.mark.parametrize("layout", CACHE)
    def test_page_sizes(self, world: World, layout: str, page: int) -> None:
        arguments = sparse_arguments(layout)
        change("k_cache", shape=(NUM_BLOCKS, page, 1, SPARSE_COLUMNS[layout]))(arguments)
        call(arguments)
        bytes_per_token = CACHE[layout].block_stride // PAGE
        want = CACHE[layout]._replace(page_block_size=page, block_stride=page * bytes_per_token)
        assert world.sparse[0].cache == want

    def test_blocks_apart(self, world: World) -> None:
        arguments = sparse_arguments("bf16 576")
        change("k_cache", strides=(PAGE * 1000, 640, 8, 1))(arguments)
        call(arguments)
        cache = world.sparse[0].cache
        assert (cache.block_stride, cache.token_stride) == (2 * PAGE * 1000, 2 * 640)

    @pytest.mark.parametrize("strides", ((5000, 2000, 1), (0, TOPK, 1), (TOPK, 0, 1)))
    def test_index_strides(self, world: World, strides: tuple[int, ...]) -> None:
        arguments = sparse_arguments()
        change("indices", strides=strides)(arguments)
        call(arguments)
        cache = world.sparse[0].cache
        assert (cache.index_stride_b, cache.index_stride_s) == strides[:2]

    @pytest.mark.parametrize("h_q", (1, 8, 63, 64, 65, 128, 200))
    def test_any_number_of_heads(self, world: World, h_q: int) -> None:
        arguments = sparse_arguments(extra=True)
        change("q", shape=(B, S_Q, h_q, 576))(arguments)
        change("attn_sink", shape=(h_q,))(arguments)
        call(arguments)
        assert world.sparse[0].h_q == h_q

    def test_free_strides_of_q(self, world: World) -> None:
        arguments = sparse_arguments()
        change("q", strides=(8, 640 * B, 640 * B * S_Q, 1))(arguments)
        call(arguments)
        (args,) = world.sparse
        assert args.q_strides == args.q_rope_strides == (8, 640 * B, 640 * B * S_Q)
        assert not world.framework.copied

    @pytest.mark.parametrize(
        "changes",
        (
            {"ptr": 0x1002},
            {"strides": (S_Q * H_Q * 580, H_Q * 580, 580, 1)},
            {"strides": (-S_Q * H_Q * 576, H_Q * 576, 576, 1)},
            {"strides": (0, H_Q * 576, 576, 1)},
        ),
        ids=("address", "odd", "negative", "expanded"),
    )
    def test_q_that_is_copied(self, world: World, changes: Arguments) -> None:
        arguments = sparse_arguments()
        change("q", **changes)(arguments)
        for _ in range(2):
            call(arguments)
        assert world.framework.copied == [arguments["q"]] * 2
        for args in world.sparse:
            assert (args.q, args.q_rope) == (0xC0000, 0xC0000 + 2 * 512)
            assert args.q_strides == args.q_rope_strides == (S_Q * H_Q * 576, H_Q * 576, 576)

    @pytest.mark.parametrize(
        "strides",
        ((S_Q * 40 * 512, 40 * 512, 512, 1), (512, B * 512, B * S_Q * 512, 1)),
        ids=("heads", "transposed"),
    )
    def test_out(self, world: World, strides: tuple[int, ...]) -> None:
        given = out_array(strides=strides)
        out, lse = call(sparse_arguments(), out=given)
        args = world.sparse[0]
        assert out is given and lse is world.framework.allocated[0]
        assert (args.out, args.out_strides) == (0x7000, strides[:3])
        assert [x.dtype for x in world.framework.allocated] == ["float32", "uint8"]


class TestScratch:
    ROW_BYTES = 512 * 2 + 3 * 4

    @pytest.mark.parametrize(
        ("topk", "extra_topk", "batch_invariant", "slots"),
        (
            (64, 0, False, 0),
            (65, 0, False, 2 * PARTS),
            (64, 1, False, 2 * PARTS),
            (512, 0, True, 2 * PARTS),  # 8 blocks are one split
            (16384, 0, True, 32 * B),
            (64 * 9, 64 * 9, True, 2 * PARTS),  # 18 blocks, 3 splits a request
            (64 * 9, 64 * 32, True, 6 * B),  # 41 blocks, 6 splits a request
            (10**6, 0, True, 32 * B),
        ),
    )
    def test_size(self, world: World, topk: int, extra_topk: int, batch_invariant: bool, slots: int) -> None:
        arguments = sparse_arguments(extra=bool(extra_topk))
        change("indices", shape=(B, S_Q, topk))(arguments)
        if extra_topk:
            change("extra_indices_in_kvcache", shape=(B, S_Q, extra_topk))(arguments)
        call(arguments, enable_batch_invariant=batch_invariant)
        (args,) = world.sparse
        assert args.scratch_bytes == slots * S_Q * H_Q * self.ROW_BYTES
        sizes = [x.shape[0] for x in world.framework.allocated if x.dtype == "uint8"]
        assert sizes == ([args.scratch_bytes] if slots else [])
        assert bool(args.scratch) is bool(slots)


class TestNothingToDo:
    @pytest.mark.parametrize("given", (False, True), ids=("fresh", "out"))
    @pytest.mark.parametrize("form", ("tensors", "object"))
    @pytest.mark.parametrize(("b", "s_q"), ((0, 2), (3, 0), (0, 0)))
    def test_empty(self, world: World, b: int, s_q: int, form: str, given: bool) -> None:
        arguments = sparse_arguments(extra=True)
        change("q", shape=(b, s_q, H_Q, 576), ptr=0)(arguments)
        for name, width in CHOSEN:
            change(name, shape=(b, s_q, width), ptr=0)(arguments)
        for name in LENGTHS:
            change(name, shape=(b,), ptr=0)(arguments)
        plan = rawmla.FlashMLASchedMeta()
        if form == "object":
            arguments.update(tile_scheduler_metadata=plan, num_splits=None)
        target = out_array(shape=(b, s_q, H_Q, 512)) if given else None
        out, lse = call(arguments, out=target)
        assert not world.sparse and not world.plans and not plan.have_initialized
        assert (out.shape, out.dtype) == ((b, s_q, H_Q, 512), "bfloat16")
        assert (lse.shape, lse.dtype) == ((b, H_Q, s_q), "float32")
        assert out is target if given else out is world.framework.allocated[0]


class TestPlanObject:
    def arguments(self, plan: rawmla.FlashMLASchedMeta, layout: str = "v32", *, extra: bool) -> Arguments:
        given = sparse_arguments(layout, extra=extra)
        return given | {"tile_scheduler_metadata": plan, "num_splits": None}

    @pytest.mark.parametrize("extra", (False, True))
    def test_first_call_fills_it(self, world: World, extra: bool) -> None:
        plan, nothing = rawmla.get_mla_metadata()
        assert nothing is None
        call(self.arguments(plan, extra=extra))
        assert plan.have_initialized
        config = SchedConfig(B, S_Q, H_Q, PAGE, 1, False, True, TOPK)
        if extra:
            config = dataclasses.replace(config, extra_page_block_size=EXTRA_PAGE, extra_topk=EXTRA_TOPK)
        assert plan.config == config
        parts = SM_COUNT // S_Q
        assert (plan.tile_scheduler_metadata.shape, plan.num_splits.shape) == ((parts, 8), (B + 1,))
        (launched,) = world.plans
        assert launched.pop("capturing")() is False
        lengths = (0x9000, 0xE000, TOPK, EXTRA_TOPK) if extra else (0, 0, TOPK, 0)
        assert launched == {
            "device": 0,
            "stream": 0x51,
            "tokens": metadata.TokenCounts(*lengths),
            "b": B,
            "num_parts": parts,
            "sched_meta": plan.tile_scheduler_metadata.ptr,
            "num_splits": plan.num_splits.ptr,
            "splits_length": B + 1,
            "object_layout": True,
            "batch_invariant": False,
        }
        args = world.sparse[0]
        assert (args.sched_meta, args.num_splits) == (launched["sched_meta"], launched["num_splits"])
        assert (args.num_parts, args.object_layout) == (parts, True)

    @pytest.mark.parametrize(
        ("s_q", "h_q", "parts"),
        ((1, 1, 132), (1, 64, 132), (1, 65, 66), (2, 128, 33), (3, 8, 44), (5, 200, 6), (200, 128, 1)),
    )
    def test_number_of_parts(self, world: World, s_q: int, h_q: int, parts: int) -> None:
        plan = rawmla.FlashMLASchedMeta()
        arguments = self.arguments(plan, extra=False)
        change("q", shape=(B, s_q, h_q, 576))(arguments)
        change("indices", shape=(B, s_q, TOPK))(arguments)
        call(arguments)
        assert parts == max(SM_COUNT // (s_q * -(-h_q // 64)), 1)
        assert plan.tile_scheduler_metadata.shape == (parts, 8)
        assert (world.plans[0]["num_parts"], world.sparse[0].num_parts) == (parts, parts)

    def test_later_calls_reuse_it(self, world: World) -> None:
        plan = rawmla.FlashMLASchedMeta()
        for _ in range(3):
            call(self.arguments(plan, extra=True))
        assert len(world.plans) == 1 and len(world.sparse) == 3
        assert len({args.sched_meta for args in world.sparse}) == 1

    @pytest.mark.parametrize(
        ("field", "planned", "called", "spoil"),
        (
            ("b", B, B - 1, lambda arguments: _resize(arguments, b=B - 1)),
            ("s_q", S_Q, 1, lambda arguments: _resize(arguments, s_q=1)),
            ("h_q", H_Q, 8, both(change("q", shape=(B, S_Q, 8, 576)), change("attn_sink", shape=(8,)))),
            ("page_block_size", PAGE, 61, change("k_cache", shape=(NUM_BLOCKS, 61, 1, 656))),
            ("is_fp8_kvcache", True, False, of_layout("bf16 576")),
            ("topk", TOPK, 64, change("indices", shape=(B, S_Q, 64))),
            (
                "extra_page_block_size",
                EXTRA_PAGE,
                2,
                change("extra_k_cache", shape=(EXTRA_BLOCKS, 2, 1, 656)),
            ),
            (
                "extra_page_block_size",
                EXTRA_PAGE,
                None,
                lambda arguments: [arguments.update({name: None}) for name in OPTIONAL[2:]],
            ),
            ("extra_topk", EXTRA_TOPK, 101, change("extra_indices_in_kvcache", shape=(B, S_Q, 101))),
            ("enable_batch_invariant", False, True, put("enable_batch_invariant", True)),
        ),
    )
    def test_filled_for_another_call(
        self, world: World, field: str, planned: Any, called: Any, spoil: Callable[[Arguments], None]
    ) -> None:
        plan = rawmla.FlashMLASchedMeta()
        call(self.arguments(plan, extra=True))
        arguments = self.arguments(plan, extra=True)
        spoil(arguments)
        arguments.update(tile_scheduler_metadata=plan, num_splits=None)
        made = len(world.framework.allocated)
        expected = (
            rf"^tile_scheduler_metadata: expected a plan for {field} = {called}, .*{field} = {planned};"
        )
        with pytest.raises(ValueError, match=expected):
            call(arguments)
        assert len(world.sparse) == 1 and len(world.framework.allocated) == made

    def test_not_shared_with_dense_calls(self, world: World) -> None:
        plan = rawmla.FlashMLASchedMeta()
        rawmla.flash_mla_with_kvcache(
            **dense_arguments() | {"tile_scheduler_metadata": plan, "num_splits": None}
        )
        with pytest.raises(ValueError, match=r"^tile_scheduler_metadata: expected a plan for h_k = 1, "):
            call(self.arguments(plan, extra=False))
        assert not world.sparse

    @pytest.mark.parametrize("where", ("plan", "call"))
    def test_batch_invariant(self, world: World, where: str) -> None:
        plan, _ = rawmla.get_mla_metadata(enable_batch_invariant=where == "plan")
        options = {"enable_batch_invariant": True} if where == "call" else {}
        for _ in range(2):
            call(self.arguments(plan, extra=False), **options)
        assert [launched["batch_invariant"] for launched in world.plans] == [True]
        assert [args.batch_invariant for args in world.sparse] == [True, True]
        assert plan.config is not None and plan.config.enable_batch_invariant

    def test_arrays_written_from_outside(self, world: World) -> None:
        plan = rawmla.FlashMLASchedMeta()
        plan.tile_scheduler_metadata = FakeArray((7, 8), ptr=0x18000)
        plan.num_splits = FakeArray((50,), ptr=0x19000)
        call(self.arguments(plan, extra=True))
        (args,) = world.sparse
        assert not world.plans and args.object_layout
        assert (args.sched_meta, args.num_splits, args.num_parts) == (0x18000, 0x19000, 7)
        assert plan.have_initialized and plan.config is not None and plan.config.topk == TOPK

    def test_arrays_removed_from_outside(self, world: World) -> None:
        plan = rawmla.FlashMLASchedMeta()
        call(self.arguments(plan, extra=False))
        plan.tile_scheduler_metadata = plan.num_splits = None
        call(self.arguments(plan, extra=False))
        assert len(world.plans) == 2 and plan.num_splits is not None
        assert world.sparse[1].sched_meta == plan.tile_scheduler_metadata.ptr

    def test_config_of_another_library(self, world: World) -> None:
        plan = rawmla.FlashMLASchedMeta()
        call(self.arguments(plan, extra=True))
        fields = dataclasses.asdict(plan.config)  # type: ignore[arg-type]
        del fields["enable_batch_invariant"]
        plan.config = SimpleNamespace(**fields)  # type: ignore[assignment]
        call(self.arguments(plan, extra=True))
        assert len(world.sparse) == 2

    def test_failed_plan_leaves_it_empty(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(**arguments: Any) -> None:
            raise rawmla.KernelNotReadyError("not loaded")

        monkeypatch.setattr(metadata, "launch", fail)
        plan = rawmla.FlashMLASchedMeta()
        with pytest.raises(rawmla.KernelNotReadyError):
            call(self.arguments(plan, extra=True))
        assert vars(plan) == vars(rawmla.FlashMLASchedMeta())


def _resize(arguments: Arguments, b: int = B, s_q: int = S_Q) -> None:
    """The same call for another number of requests or query tokens."""
    change("q", shape=(b, s_q, H_Q, 576))(arguments)
    for name, width in CHOSEN:
        change(name, shape=(b, s_q, width))(arguments)
    for name in LENGTHS:
        change(name, shape=(b,))(arguments)


class TestKnownCalls:
    """What was checked once is known by everything that it depends on."""

    def test_layers_share_what_is_known(self, world: World) -> None:
        arguments = sparse_arguments(extra=True)
        for layer in range(3):
            for name in ("q", "k_cache", "extra_k_cache", "indices"):
                change(name, ptr=0x100000 * (layer + 1))(arguments)
            call(arguments)
        caches = [(args.k_cache, args.extra_k_cache) for args in world.sparse]
        assert caches == [(0x100000 * n,) * 2 for n in (1, 2, 3)]
        assert len({args.out for args in world.sparse}) == 3
        assert len(sparse._calls) == 1

    @pytest.mark.parametrize(
        ("apply", "field"),
        [
            (of_layout("bf16 576"), "format"),
            (lambda arguments: _resize(arguments, s_q=S_Q + 1), "s_q"),
            (change("q", strides=(10**6, 10**5, 1024, 1)), "q_strides"),
            (put("q", q_pair((B, S_Q, H_Q, 576))), "q_rope"),
            (change("q", ptr=0x1008), "q"),
            (change("k_cache", shape=(NUM_BLOCKS + 1, PAGE, 1, 656)), "cache"),
            (change("k_cache", ptr=0x2008), "load_bytes"),
            (change("indices", strides=(1000, 500, 1)), "cache"),
            (change("extra_k_cache", strides=(61 * 672, 656, 656, 1)), "extra"),
            (put("topk_length", None), "topk_length"),
            (put("attn_sink", None), "attn_sink"),
            (change("tile_scheduler_metadata", shape=(PARTS + 1, 8)), "num_parts"),
            (put("softmax_scale", 0.125), "softmax_scale"),
            (put("enable_batch_invariant", True), "batch_invariant"),
            (put("out", out_array(strides=(10**6, 10**5, 1024, 1))), "out_strides"),
            (empty_plan_with(), "object_layout"),
        ],
    )
    def test_what_differs_is_not_mistaken(
        self, world: World, apply: Callable[[Arguments], None], field: str
    ) -> None:
        arguments = sparse_arguments(extra=True)
        call(arguments)
        apply(arguments)
        call(arguments)
        call(sparse_arguments(extra=True))
        first, second, third = (getattr(args, field) for args in world.sparse)
        assert first == third != second

    def test_streams_are_checked_every_time(self, world: World) -> None:
        other = FakeFramework("other")
        arguments = sparse_arguments()
        change("k_cache", framework=other)(arguments)
        call(arguments)
        other.stream += 1
        with pytest.raises(ValueError, match=r"^k_cache: expected a fake array"):
            call(arguments)

    def test_what_is_known_stays_bounded(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(memo, "MAX_ENTRIES", 3)
        for pages in range(1, 9):
            arguments = sparse_arguments()
            change("k_cache", shape=(pages, PAGE, 1, 656))(arguments)
            for scale in (0.1, 0.2, 0.3, 0.4, 0.5):
                call(arguments, softmax_scale=scale)
            assert len(sparse._calls) <= 3
        assert len(world.sparse) == 40


class TestMetadata:
    LENGTHS = FakeArray((B,), ptr=0x4000)

    @pytest.mark.parametrize("fp8", (False, True))
    @pytest.mark.parametrize(
        ("s_q", "h_q", "parts"),
        ((1, 1, 132), (1, 64, 132), (1, 65, 66), (2, 128, 33), (7, 8, 18), (500, 128, 1)),
    )
    def test_tensors(self, world: World, s_q: int, h_q: int, parts: int, fp8: bool) -> None:
        rows, splits = rawmla.get_mla_metadata(self.LENGTHS, s_q * h_q, 1, h_q, fp8, TOPK)
        assert (rows.shape, rows.dtype, splits.shape, splits.dtype) == (
            (parts, 8),
            "int32",
            (B + 1,),
            "int32",
        )
        (launched,) = world.plans
        assert launched.pop("capturing")() is False
        assert launched == {
            "device": 0,
            "stream": 0x51,
            "tokens": metadata.TokenCounts(0, 0, TOPK, 0),
            "b": B,
            "num_parts": parts,
            "sched_meta": rows.ptr,
            "num_splits": splits.ptr,
            "splits_length": B + 1,
            "object_layout": False,
            "batch_invariant": False,
        }

    def test_without_the_head_count(self, world: World) -> None:
        """One query token is assumed."""
        rows, _ = rawmla.get_mla_metadata(self.LENGTHS, 128, 1, topk=TOPK)
        assert rows.shape == (66, 8)

    def test_batch_invariant(self, world: World) -> None:
        rawmla.get_mla_metadata(self.LENGTHS, 128, 1, topk=TOPK, enable_batch_invariant=True)
        assert world.plans[0]["batch_invariant"] is True

    def test_no_requests(self, world: World) -> None:
        rows, splits = rawmla.get_mla_metadata(FakeArray((0,), ptr=0), 128, 1, topk=TOPK)
        assert splits.shape == (1,) and not world.plans
        assert world.framework.filled == [(rows, -1), (splits, 0)]

    @pytest.mark.parametrize(
        ("argument", "kind", "text", "keywords"),
        (
            ("topk", ValueError, "got 0", {"topk": 0}),
            ("topk", ValueError, "got -1", {"topk": -1}),
            ("topk", TypeError, "got float 64.0", {"topk": 64.0}),
            ("topk", TypeError, "got bool True", {"topk": True}),
            ("num_heads_k", ValueError, "1 with topk, got 2", {"topk": 64, "num_heads_k": 2}),
        ),
    )
    def test_bad_call(
        self, world: World, argument: str, kind: type[Exception], text: str, keywords: Arguments
    ) -> None:
        arguments = {"cache_seqlens": self.LENGTHS, "num_q_tokens_per_head_k": 128, "num_heads_k": 1}
        with pytest.raises(kind) as caught:
            rawmla.get_mla_metadata(**arguments | keywords)
        assert str(caught.value).startswith(f"{argument}: expected ")
        assert text in str(caught.value)
        assert world.untouched

    @pytest.mark.parametrize("extra", (False, True))
    def test_object_in_place(self, world: World, extra: bool) -> None:
        """`topk` counts whole blocks of both caches: 4 of 64 for 200, and 2 for 100."""
        plan = rawmla.FlashMLASchedMeta()
        call(sparse_arguments(extra=extra) | {"tile_scheduler_metadata": plan, "num_splits": None})
        topk = 256 + 128 if extra else TOPK
        returned = rawmla.get_mla_metadata(self.LENGTHS, S_Q * H_Q, 1, H_Q, True, topk, out=plan)
        assert returned[0] is plan and returned[1] is None
        first, second = world.plans
        assert second["tokens"] == metadata.TokenCounts(0, 0, topk, 0) and second["object_layout"] is True
        assert [second[name] for name in ("num_parts", "sched_meta", "num_splits")] == [
            first[name] for name in ("num_parts", "sched_meta", "num_splits")
        ]

    @pytest.mark.parametrize("topk", (None, 192, 320))
    def test_object_of_another_topk(self, world: World, topk: int | None) -> None:
        """A plan of too few blocks would leave selected tokens out."""
        plan = rawmla.FlashMLASchedMeta()
        call(sparse_arguments() | {"tile_scheduler_metadata": plan, "num_splits": None})
        with pytest.raises(ValueError, match=rf"^topk: expected .*256.*, got {topk}$"):
            rawmla.get_mla_metadata(self.LENGTHS, S_Q * H_Q, 1, H_Q, topk=topk, out=plan)
        assert len(world.plans) == 1

    def test_object_of_a_dense_call(self, world: World) -> None:
        plan = rawmla.FlashMLASchedMeta()
        rawmla.flash_mla_with_kvcache(
            **dense_arguments() | {"tile_scheduler_metadata": plan, "num_splits": None}
        )
        with pytest.raises(ValueError, match=r"^topk: expected None, .*, got 64$"):
            rawmla.get_mla_metadata(self.LENGTHS, 16, 1, topk=64, out=plan)
        assert len(world.plans) == 1
