"""Prefill calls: what is refused, and what accepted calls allocate and launch; arrays are stand-ins."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from calls.fakes import (
    H_Q,
    NUM_BLOCKS,
    PAGE,
    S_KV,
    SM_COUNT,
    TOPK,
    Arguments,
    FakeArray,
    FakeFramework,
    World,
    change,
    contiguous,
    make_world,
    prefill_arguments,
    put,
    q_pair,
)
from calls.fakes import PREFILL_S_Q as S_Q

import rawmla
from rawmla.call import memo
from rawmla.kernels import mla_metadata as metadata
from rawmla.kernels import mla_sparse_prefill as sparse_prefill
from rawmla.kernels.mla_sparse import NO_CACHE, Cache
from rawmla.mla import sparse_prefill as prefill

ARRAYS = ("q", "kv", "indices", "topk_length", "attn_sink")
LAYOUTS = ("bf16 576", "bf16 512", "v32", "model1")
OUT_SHAPE = (S_Q, H_Q, 512)
PLAN_BYTES = 32 * SM_COUNT + 32  # 132 parts; 6 sums, in whole units of 16 bytes
SPLIT_BYTES = 2 * SM_COUNT * H_Q * (512 * 2 + 4 * 4)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return make_world(monkeypatch)


def call(arguments: Arguments, **more: Any) -> tuple[Any, Any, Any]:
    return rawmla.flash_mla_sparse_fwd(**{**arguments, **more})


def out_array(**changes: Any) -> FakeArray:
    return FakeArray(OUT_SHAPE, "bfloat16", ptr=0x7000).but(**changes)


def of_layout(layout: str, spoil: Callable[[Arguments], None]) -> Callable[[Arguments], None]:
    """The same call over a cache of another layout, spoilt afterwards."""

    def apply(arguments: Arguments) -> None:
        arguments.update(prefill_arguments(layout, optional=True))
        spoil(arguments)

    return apply


# name of the test, argument that the text names, exception, what the text also holds, how the call is spoilt
Case = tuple[str, str, type[Exception], tuple[str, ...], Callable[[Arguments], None]]
BAD_CALLS: list[Case] = [
    *[(f"{name} a list", name, TypeError, ("got list",), put(name, [1])) for name in ARRAYS],
    *[
        (f"{name} on the host", name, ValueError, ("CUDA memory", "numpy.ndarray"), put(name, np.zeros(3)))
        for name in ARRAYS
    ],
    *[(f"{name} None", name, TypeError, ("got NoneType",), put(name, None)) for name in ARRAYS[:3]],
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
    *[
        (f"{name} int64", name, TypeError, ("int32", "got int64"), change(name, dtype="int64"))
        for name in ("indices", "topk_length")
    ],
    ("q fp16", "q", TypeError, ("bfloat16", "float16"), change("q", dtype="float16")),
    ("q 4-D", "q", ValueError, ("[s_q, h_q, d_qk]", "[1, 5, 16, 576]"), change("q", shape=(1, 5, 16, 576))),
    ("q 2-D", "q", ValueError, ("[s_q, h_q, d_qk]", "[5, 576]"), change("q", shape=(5, 576))),
    ("d_qk 128", "q", ValueError, ("576 or 512", "128"), change("q", shape=(S_Q, H_Q, 128))),
    ("no heads", "q", ValueError, ("at least 1 head", "0"), change("q", shape=(S_Q, 0, 576))),
    (
        "q last dimension strided",
        "q",
        ValueError,
        ("contiguous last dimension",),
        change("q", strides=(2 * H_Q * 576, 2 * 576, 2)),
    ),
    ("kv fp16", "kv", TypeError, ("bfloat16 with is_fp8_kvcache=False",), change("kv", dtype="float16")),
    ("kv bytes", "kv", TypeError, ("is_fp8_kvcache=False", "uint8"), change("kv", dtype="uint8")),
    ("kv 2-D", "kv", ValueError, ("[s_kv, 1, 576]", "[300, 576]"), change("kv", shape=(S_KV, 576))),
    ("kv of two heads", "kv", ValueError, ("[s_kv, 1, 576]",), change("kv", shape=(S_KV, 2, 576))),
    ("kv of other columns", "kv", ValueError, ("[s_kv, 1, 576]", "512"), change("kv", shape=(S_KV, 1, 512))),
    ("kv paged", "kv", ValueError, ("[s_kv, 1, 576]",), change("kv", shape=(S_KV, 1, 1, 576))),
    ("kv empty", "kv", ValueError, ("at least 1 token", "[0, 1, 576]"), change("kv", shape=(0, 1, 576))),
    ("kv strided", "kv", ValueError, ("contiguous last",), change("kv", strides=(1152, 1152, 2))),
    ("kv address", "kv", ValueError, ("16-byte aligned", "0x2008"), change("kv", ptr=0x2008)),
    ("kv stride odd", "kv", ValueError, ("multiple of 8", "580"), change("kv", strides=(580, 580, 1))),
    ("kv stride negative", "kv", ValueError, ("not negative",), change("kv", strides=(-576, 576, 1))),
    *[
        (f"{layout} {what}", "kv", kind, (text,), of_layout(layout, change("kv", **changes)))
        for layout, columns in (("v32", 656), ("model1", 584))
        for what, kind, text, changes in (
            ("bf16", TypeError, "is_fp8_kvcache=True", {"dtype": "bfloat16"}),
            ("3-D", ValueError, f"[num_blocks, page_block_size, 1, {columns}]", {"shape": (9, 1, columns)}),
            ("of other columns", ValueError, f"1, {columns}]", {"shape": (9, 64, 1, 576)}),
            ("without blocks", ValueError, "at least 1 block", {"shape": (0, 64, 1, columns)}),
            ("address", ValueError, "multiples of 8 bytes", {"ptr": 0x2004}),
        )
    ],
    *[
        (
            f"indices {what}",
            "indices",
            ValueError,
            ("[5, 1, topk]", str(list(shape))),
            change("indices", shape=shape),
        )
        for what, shape in (
            ("2-D", (S_Q, TOPK)),
            ("of other tokens", (S_Q + 1, 1, TOPK)),
            ("of two heads", (S_Q, 2, TOPK)),
            ("without columns", (S_Q, 1, 0)),
        )
    ],
    *[
        (f"indices strides {strides}", "indices", ValueError, (text,), change("indices", strides=strides))
        for text, strides in (
            ("contiguous last dimension", (2 * TOPK, 2 * TOPK, 2)),
            ("no negative stride", (-TOPK, TOPK, 1)),
        )
    ],
    ("lengths 2-D", "topk_length", ValueError, ("[5]", "[5, 1]"), change("topk_length", shape=(S_Q, 1))),
    ("lengths too few", "topk_length", ValueError, ("[5]", "s_q", "[4]"), change("topk_length", shape=(4,))),
    ("lengths strided", "topk_length", ValueError, ("contiguous", "2"), change("topk_length", strides=(2,))),
    ("sink bf16", "attn_sink", TypeError, ("float32", "bfloat16"), change("attn_sink", dtype="bfloat16")),
    ("sink too short", "attn_sink", ValueError, ("[16]", "h_q", "[15]"), change("attn_sink", shape=(15,))),
    ("sink strided", "attn_sink", ValueError, ("contiguous", "2"), change("attn_sink", strides=(2,))),
    ("scale 0", "sm_scale", ValueError, ("finite", "0.0"), put("sm_scale", 0)),
    ("scale negative", "sm_scale", ValueError, ("finite", "-1.0"), put("sm_scale", -1.0)),
    ("scale NaN", "sm_scale", ValueError, ("finite", "nan"), put("sm_scale", math.nan)),
    ("scale too large", "sm_scale", ValueError, ("finite", "1e+39"), put("sm_scale", 1e39)),
    ("scale None", "sm_scale", TypeError, ("a float", "None"), put("sm_scale", None)),
    ("scale an array", "sm_scale", TypeError, ("a float", "FakeArray"), put("sm_scale", FakeArray((1,)))),
    ("d_v 576", "d_v", ValueError, ("512", "576"), put("d_v", 576)),
    ("d_v None", "d_v", TypeError, ("int", "None"), put("d_v", None)),
    ("base 10", "log_base", ValueError, ("'2' or 'e'", "'10'"), put("log_base", "10")),
    ("base a number", "log_base", TypeError, ("str", "int 2"), put("log_base", 2)),
    ("fp8 int", "is_fp8_kvcache", TypeError, ("bool", "int 1"), put("is_fp8_kvcache", 1)),
    ("out a list", "out", TypeError, ("got list",), put("out", [1])),
    ("out fp16", "out", TypeError, ("bfloat16", "float16"), put("out", out_array(dtype="float16"))),
    ("out shape", "out", ValueError, ("[5, 16, 512]",), put("out", out_array(shape=(S_Q, H_Q, 576)))),
    ("out 4-D", "out", ValueError, ("[5, 16, 512]",), put("out", out_array(shape=(1, *OUT_SHAPE)))),
    ("out device", "out", ValueError, ("cuda:0", "cuda:1"), put("out", out_array(device=1))),
    ("out address", "out", ValueError, ("16-byte aligned", "0x7008"), put("out", out_array(ptr=0x7008))),
    ("out strides", "out", ValueError, ("multiples of 8",), put("out", out_array(strides=(8224, 514, 1)))),
    ("out overlaps", "out", ValueError, ("overlap",), put("out", out_array(strides=(4096, 256, 1)))),
    ("out expanded", "out", ValueError, ("positive",), put("out", out_array(strides=(0, 512, 1)))),
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
    arguments = prefill_arguments(optional=True)
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
    call(prefill_arguments(optional=True))
    made = len(world.framework.allocated)
    for _, _, kind, _, spoil in BAD_CALLS:
        arguments = prefill_arguments(optional=True)
        spoil(arguments)
        with pytest.raises(kind):
            call(arguments)
    assert len(world.sparse) == len(world.plans) == 1 and len(world.framework.allocated) == made


CACHE = {
    "bf16 576": Cache(1, S_KV, 1152, 1152, TOPK, TOPK, TOPK),
    "bf16 512": Cache(1, S_KV, 1024, 1024, TOPK, TOPK, TOPK),
    "v32": Cache(PAGE, NUM_BLOCKS, PAGE * 656, 656, TOPK, TOPK, TOPK),
    "model1": Cache(PAGE, NUM_BLOCKS, PAGE * 584, 576, TOPK, TOPK, TOPK),
}


class TestLaunch:
    """What an accepted call hands to the kernels."""

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_every_field(self, world: World, layout: str) -> None:
        arguments = prefill_arguments(layout, optional=True)
        out, max_logits, lse = call(arguments)
        allocated = world.framework.allocated
        assert [(x.shape, x.dtype) for x in allocated] == [
            (OUT_SHAPE, "bfloat16"),
            ((S_Q, H_Q), "float32"),
            ((S_Q, H_Q), "float32"),
            ((PLAN_BYTES + SPLIT_BYTES,), "uint8"),
        ]
        assert [out, max_logits, lse] == allocated[:3]
        scratch = allocated[3].ptr
        (plan,) = world.plans
        assert plan.pop("capturing")() is False
        assert plan == {
            "device": 0,
            "stream": 0x51,
            "tokens": metadata.TokenCounts(0x9000, 0, TOPK, 0),
            "b": S_Q,
            "num_parts": SM_COUNT,
            "sched_meta": scratch,
            "num_splits": scratch + 32 * SM_COUNT,
            "splits_length": S_Q + 1,
            "object_layout": True,
            "batch_invariant": False,
        }
        (args,) = world.sparse
        got = dict(vars(args))
        assert got.pop("capturing")() is False
        d_qk = arguments["q"].shape[2]
        assert got == {
            "device": 0,
            "stream": 0x51,
            "format": layout.split()[0],
            "d_qk": d_qk,
            "load_bytes": 16,
            "b": S_Q,
            "s_q": 1,
            "h_q": H_Q,
            "cache": CACHE[layout],
            "extra": NO_CACHE,
            "q": 0x1000,
            "q_rope": 0x1000 + 2 * (d_qk - 64),
            "q_strides": (H_Q * d_qk, 0, d_qk),
            "q_rope_strides": (H_Q * d_qk, 0, d_qk),
            "k_cache": 0x2000,
            "extra_k_cache": 0,
            "indices": 0x8000,
            "extra_indices": 0,
            "topk_length": 0x9000,
            "extra_topk_length": 0,
            "attn_sink": 0xA000,
            "sched_meta": scratch,
            "num_parts": SM_COUNT,
            "num_splits": scratch + 32 * SM_COUNT,
            "object_layout": True,
            "batch_invariant": False,
            "out": out.ptr,
            "out_strides": (H_Q * 512, 0, 512),
            "max_logits": max_logits.ptr,
            "lse": lse.ptr,
            "scratch": scratch + PLAN_BYTES,
            "scratch_bytes": SPLIT_BYTES,
            "softmax_scale": 0.25,
            "lse_factor": 1.0,
            "uniform": metadata.NOT_UNIFORM,
            "group_tokens": 1,
            "limited": True,
            "selected": 0,
        }
        assert not world.decodes and not world.framework.copied

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_nothing_optional(self, world: World, layout: str) -> None:
        call(prefill_arguments(layout))
        (args,) = world.sparse
        assert (args.cache, args.attn_sink) == (CACHE[layout], 0)
        assert (args.topk_length, args.extra_topk_length) == (0, 0)
        assert args.uniform == metadata.uniform_plan(S_Q, -(-TOPK // 64), SM_COUNT)
        assert not world.plans

    def test_positional(self, world: World) -> None:
        """FlashMLA's order: sm_scale, d_v, attn_sink, topk_length."""
        given = prefill_arguments(optional=True)
        first = [given[name] for name in ("q", "kv", "indices", "sm_scale")]
        rawmla.flash_mla_sparse_fwd(*first, 512, given["attn_sink"], given["topk_length"])
        (args,) = world.sparse
        assert (args.softmax_scale, args.attn_sink) == (0.25, 0xA000)
        assert (args.topk_length, args.extra_topk_length) == (0x9000, 0)

    def test_base_of_the_logarithms(self, world: World) -> None:
        for base in ("2", "e", "2"):
            call(prefill_arguments(), log_base=base)
        assert [args.lse_factor for args in world.sparse] == [1.0, math.log(2), 1.0]

    def test_numpy_scalars(self, world: World) -> None:
        arguments = prefill_arguments("v32") | {"d_v": np.int64(512), "is_fp8_kvcache": np.True_}
        call(arguments, sm_scale=np.float32(0.5))
        (args,) = world.sparse
        assert args.softmax_scale == 0.5 and type(args.softmax_scale) is float and args.format == "v32"

    def test_other_device(self, world: World) -> None:
        arguments = prefill_arguments(optional=True)
        for name in ARRAYS:
            change(name, device=1)(arguments)
        call(arguments)
        assert (world.sparse[0].device, world.sparse[0].stream) == (1, 0x52)
        assert (world.plans[0]["device"], world.plans[0]["stream"]) == (1, 0x52)
        assert {x.device for x in world.framework.allocated} == {1}

    @pytest.mark.parametrize("name", ARRAYS[1:])
    def test_another_framework_on_the_same_stream(self, world: World, name: str) -> None:
        arguments = prefill_arguments(optional=True)
        other = FakeFramework("other")
        change(name, framework=other)(arguments)
        call(arguments)
        assert len(world.sparse) == 1 and not other.allocated
        other.stream += 1
        with pytest.raises(ValueError, match=rf"^{name}: expected a fake array"):
            call(arguments)

    @pytest.mark.parametrize(("stride", "bytes_apart"), ((640, 1280), (8, 16), (0, 0)))
    def test_stride_of_kv(self, world: World, stride: int, bytes_apart: int) -> None:
        """Free, so rows may overlap."""
        arguments = prefill_arguments()
        change("kv", strides=(stride, 3, 1))(arguments)
        call(arguments)
        assert world.sparse[0].cache == CACHE["bf16 576"]._replace(block_stride=bytes_apart)

    def test_one_row_of_kv(self, world: World) -> None:
        arguments = prefill_arguments()
        change("kv", shape=(1, 1, 576))(arguments)
        change("kv", strides=(-7, 3, 1))(arguments)
        call(arguments)
        cache = world.sparse[0].cache
        assert (cache.num_blocks, cache.page_block_size, cache.block_stride) == (1, 1, 1152)

    @pytest.mark.parametrize("changes", ({"ptr": 0x2008}, {"strides": (PAGE * 656 + 8, 656, 656, 1)}))
    def test_what_fp8_rows_are_aligned_to(self, world: World, changes: Arguments) -> None:
        arguments = prefill_arguments("v32")
        change("kv", **changes)(arguments)
        call(arguments)
        assert world.sparse[0].load_bytes == 8

    @pytest.mark.parametrize("stride", (5000, 0))
    def test_index_strides(self, world: World, stride: int) -> None:
        arguments = prefill_arguments()
        change("indices", strides=(stride, 9, 1))(arguments)
        call(arguments)
        assert world.sparse[0].cache.index_stride_b == stride

    @pytest.mark.parametrize(
        ("h_q", "parts"), ((1, 132), (63, 132), (64, 132), (65, 66), (128, 66), (130, 44), (9000, 1))
    )
    def test_heads_and_parts(self, world: World, h_q: int, parts: int) -> None:
        arguments = prefill_arguments() | {"topk_length": FakeArray((S_Q,), ptr=0x9000)}
        change("q", shape=(S_Q, h_q, 576))(arguments)
        call(arguments)
        (args,), (plan,) = world.sparse, world.plans
        assert (args.h_q, args.num_parts, plan["num_parts"]) == (h_q, parts, parts)
        assert bool(args.scratch_bytes) == (parts > 1)

    def test_one_block_is_never_split(self, world: World) -> None:
        arguments = prefill_arguments()
        change("indices", shape=(S_Q, 1, 64))(arguments)
        call(arguments | {"topk_length": FakeArray((S_Q,), ptr=0x9000)})
        assert world.sparse[0].scratch_bytes == 0
        assert world.framework.allocated[-1].shape == (PLAN_BYTES,)

    def test_no_scratch_without_plan_and_splits(self, world: World) -> None:
        arguments = prefill_arguments()
        change("indices", shape=(S_Q, 1, 64))(arguments)
        results = call(arguments)
        assert world.framework.allocated == list(results) and not world.plans
        assert world.sparse[0].scratch_bytes == world.sparse[0].scratch == 0

    def test_free_strides_of_q(self, world: World) -> None:
        arguments = prefill_arguments()
        change("q", strides=(584, 584 * S_Q, 1))(arguments)
        call(arguments)
        (args,) = world.sparse
        assert args.q_strides == args.q_rope_strides == (584, 0, 584 * S_Q) and not world.framework.copied

    @pytest.mark.parametrize(
        "changes",
        ({"ptr": 0x1002}, {"strides": (H_Q * 580, 580, 1)}, {"strides": (0, 576, 1)}),
        ids=("address", "odd", "expanded"),
    )
    def test_q_that_is_copied(self, world: World, changes: Arguments) -> None:
        arguments = prefill_arguments()
        change("q", **changes)(arguments)
        for _ in range(2):
            call(arguments)
        assert world.framework.copied == [arguments["q"]] * 2
        for args in world.sparse:
            assert (args.q, args.q_rope) == (0xC0000, 0xC0000 + 2 * 512)
            assert args.q_strides == args.q_rope_strides == (H_Q * 576, 0, 576)

    @pytest.mark.parametrize("strides", ((40 * 512, 512, 1), (512, S_Q * 512, 1)), ids=("heads", "swapped"))
    def test_out(self, world: World, strides: tuple[int, ...]) -> None:
        given = out_array(strides=strides)
        out, max_logits, lse = call(prefill_arguments(), out=given)
        (args,) = world.sparse
        assert out is given and (args.out, args.out_strides) == (0x7000, (strides[0], 0, strides[1]))
        assert [x.shape for x in world.framework.allocated[:2]] == [(S_Q, H_Q)] * 2
        assert [max_logits, lse] == world.framework.allocated[:2]

    @pytest.mark.parametrize("given", (False, True))
    def test_no_query_tokens(self, world: World, given: bool) -> None:
        arguments = prefill_arguments(optional=True)
        change("q", shape=(0, H_Q, 576))(arguments)
        change("indices", shape=(0, 1, TOPK))(arguments)
        change("topk_length", shape=(0,))(arguments)
        target = out_array(shape=(0, H_Q, 512)) if given else None
        out, max_logits, lse = call(arguments, out=target)
        assert not world.sparse and not world.plans
        assert out.shape == (0, H_Q, 512) and max_logits.shape == lse.shape == (0, H_Q)
        assert max_logits is not lse and (out is target) == given


class TestChunks:
    """More query tokens than a plan takes."""

    @pytest.mark.parametrize(
        ("s_q", "sizes"),
        (
            (1, [1]),
            (16384, [16384]),
            (16385, [8193, 8192]),
            (70_000, [14_000] * 5),
            (1_000_001, [16130] * 61 + [16071]),
        ),
    )
    def test_pointers(self, world: World, s_q: int, sizes: list[int]) -> None:
        assert sum(sizes) == s_q and max(sizes) <= metadata.MAX_BATCH
        arguments = prefill_arguments(optional=True)
        change("q", shape=(s_q, H_Q, 576), strides=(10_000, 576, 1))(arguments)
        change("indices", shape=(s_q, 1, TOPK), strides=(300, 9, 1))(arguments)
        change("topk_length", shape=(s_q,))(arguments)
        given = out_array(shape=(s_q, H_Q, 512), strides=(30_000, 512, 1))
        _, max_logits, lse = call(arguments, out=given)
        assert [args.b for args in world.sparse] == [plan["b"] for plan in world.plans] == sizes
        first = 0
        for args, plan in zip(world.sparse, world.plans, strict=True):
            assert args.q == 0x1000 + 2 * 10_000 * first
            assert (args.indices, args.extra_indices) == (0x8000 + 4 * 300 * first, 0)
            assert (args.topk_length, args.extra_topk_length) == (0x9000 + 4 * first, 0)
            assert plan["tokens"].lengths == args.topk_length
            assert args.out == 0x7000 + 2 * 30_000 * first
            assert args.max_logits == max_logits.ptr + 4 * H_Q * first
            assert args.lse == lse.ptr + 4 * H_Q * first
            assert (args.k_cache, args.extra_k_cache, args.attn_sink) == (0x2000, 0, 0xA000)
            first += args.b

    def test_scratch_is_shared(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sparse_prefill, "_UNITED_TOKENS", 1 << 30)
        arguments = prefill_arguments() | {"topk_length": FakeArray((40_000,), ptr=0x9000)}
        change("q", shape=(40_000, H_Q, 576))(arguments)
        change("indices", shape=(40_000, 1, TOPK))(arguments)
        call(arguments)
        scratch = world.framework.allocated[-1]
        splits = scratch.ptr + 32 * SM_COUNT
        split_scratch = -(-(splits + 4 * (13_334 + 1)) // 16) * 16
        assert scratch.shape == (split_scratch + SPLIT_BYTES - scratch.ptr,)
        for args, plan in zip(world.sparse, world.plans, strict=True):
            assert (args.sched_meta, args.num_splits, args.scratch) == (scratch.ptr, splits, split_scratch)
            assert (plan["sched_meta"], plan["num_splits"]) == (scratch.ptr, splits)
            assert plan["splits_length"] == plan["b"] + 1
            assert args.sched_meta == scratch.ptr


class TestKnownCalls:
    """What was checked once is known by everything that it depends on."""

    def test_layers_share_what_is_known(self, world: World) -> None:
        arguments = prefill_arguments(optional=True)
        for layer in range(3):
            for name in ("q", "kv", "indices"):
                change(name, ptr=0x100000 * (layer + 1))(arguments)
            call(arguments)
        caches = [(args.k_cache, args.extra_k_cache) for args in world.sparse]
        assert caches == [(0x100000 * n, 0) for n in (1, 2, 3)]
        assert len({args.out for args in world.sparse}) == 3
        assert len(prefill._calls) == 1

    @pytest.mark.parametrize(
        ("apply", "field"),
        [
            (lambda arguments: arguments.update(prefill_arguments("v32", optional=True)), "format"),
            (change("q", strides=(10**5, 1024, 1)), "q_strides"),
            (put("q", q_pair((S_Q, H_Q, 576))), "q_rope"),
            (change("q", ptr=0x1008), "q"),
            (change("kv", shape=(S_KV + 1, 1, 576)), "cache"),
            (change("kv", strides=(640, 640, 1)), "cache"),
            (change("indices", strides=(1000, 1000, 1)), "cache"),
            (put("topk_length", None), "topk_length"),
            (put("attn_sink", None), "attn_sink"),
            (put("sm_scale", 0.125), "softmax_scale"),
            (put("log_base", "e"), "lse_factor"),
            (put("out", out_array(strides=(10**5, 1024, 1))), "out_strides"),
        ],
    )
    def test_what_differs_is_not_mistaken(
        self, world: World, apply: Callable[[Arguments], None], field: str
    ) -> None:
        arguments = prefill_arguments(optional=True)
        call(arguments)
        apply(arguments)
        call(arguments)
        call(prefill_arguments(optional=True))
        first, second, third = (getattr(args, field) for args in world.sparse)
        assert first == third != second

    def test_what_is_known_stays_bounded(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(memo, "MAX_ENTRIES", 3)
        for tokens in range(1, 9):
            arguments = prefill_arguments()
            change("kv", shape=(tokens, 1, 576), strides=contiguous((tokens, 1, 576)))(arguments)
            for scale in (0.1, 0.2, 0.3, 0.4, 0.5):
                call(arguments, sm_scale=scale)
            assert len(prefill._calls) <= 3
        assert len(world.sparse) == 40


class TestBatchInvariant:
    """A token's bits depend on nothing else: nothing is shared, copied or split."""

    @pytest.mark.parametrize("limited", (False, True), ids=("all", "topk_length"))
    @pytest.mark.parametrize(
        ("layout", "h_q"), (("bf16 576", 8), ("bf16 512", 64), ("v32", 16), ("model1", 128))
    )
    @pytest.mark.parametrize("s_q", (1, 131, 4096, 16_385))
    def test_launches(self, world: World, layout: str, h_q: int, s_q: int, limited: bool) -> None:
        arguments = prefill_arguments(layout)
        d_qk = arguments["q"].shape[2]
        change("q", shape=(s_q, h_q, d_qk))(arguments)
        change("indices", shape=(s_q, 1, TOPK))(arguments)
        if limited:
            arguments["topk_length"] = FakeArray((s_q,), ptr=0x9000)
        call(arguments, enable_batch_invariant=True)
        assert not world.plans and {args.format for args in world.sparse} == {layout.split()[0]}
        assert sum(args.b for args in world.sparse) == s_q
        for args in world.sparse:
            assert args.batch_invariant and args.group_tokens == 1 and args.k_cache == 0x2000
            assert args.uniform.length and not args.uniform.cuts and args.scratch_bytes == 0
            tokens_per_part = args.uniform.length // args.uniform.pitch
            assert tokens_per_part * args.num_parts >= args.b

    def test_what_is_prepared_is_its_own(self, world: World) -> None:
        arguments = prefill_arguments()
        for batch_invariant in (False, True, False):
            call(arguments, enable_batch_invariant=batch_invariant)
        assert [args.batch_invariant for args in world.sparse] == [False, True, False]

    def test_not_a_bool(self, world: World) -> None:
        with pytest.raises(TypeError, match=r"^enable_batch_invariant: expected a bool, got int 1"):
            call(prefill_arguments(), enable_batch_invariant=1)
        assert world.untouched
