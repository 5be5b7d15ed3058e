"""What accepted calls allocate, launch and return; arrays and launches are stand-ins."""

from __future__ import annotations

import dataclasses
import gc
import inspect as python_inspect
import weakref
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
    MAX_BLOCKS,
    NUM_BLOCKS,
    PAGE,
    PARTS,
    Q_STRIDES,
    S_Q,
    Arguments,
    B,
    FakeArray,
    FakeFramework,
    World,
    both,
    change,
    dense_arguments,
    make_world,
    out_array,
    put,
    q_pair,
)

import rawmla
from rawmla.call import arrays, frameworks, memo
from rawmla.kernels import mla_dense_decode
from rawmla.mla import dense_decode


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return make_world(monkeypatch)


class TestSignature:
    def test_decode(self) -> None:
        parameters = python_inspect.signature(rawmla.flash_mla_with_kvcache).parameters
        assert [(name, p.default) for name, p in parameters.items()] == [
            *[(name, python_inspect.Parameter.empty) for name in list(dense_arguments())[:6]],
            *[("num_splits", None), ("softmax_scale", None), ("causal", False), ("is_fp8_kvcache", False)],
            *[("indices", None), ("attn_sink", None), ("extra_k_cache", None)],
            *[("extra_indices_in_kvcache", None), ("topk_length", None), ("extra_topk_length", None)],
            *[("out", None), ("enable_batch_invariant", False)],
        ]
        kinds = {p.kind for p in parameters.values()}
        assert kinds == {python_inspect.Parameter.POSITIONAL_OR_KEYWORD}

    def test_metadata(self) -> None:
        parameters = python_inspect.signature(rawmla.get_mla_metadata).parameters.values()
        positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert positional == [
            "cache_seqlens",
            "num_q_tokens_per_head_k",
            "num_heads_k",
            "num_heads_q",
            "is_fp8_kvcache",
            "topk",
        ]

    def test_plan_fields(self) -> None:
        assert [field.name for field in dataclasses.fields(rawmla.FlashMLASchedMeta)][:4] == [
            "have_initialized",
            "config",
            "tile_scheduler_metadata",
            "num_splits",
        ]


class TestLaunch:
    """What an accepted call hands to the kernels."""

    def test_every_field(self, world: World) -> None:
        out, lse = rawmla.flash_mla_with_kvcache(**dense_arguments(), softmax_scale=0.25, causal=True)
        allocated = world.framework.allocated
        assert [(x.shape, x.dtype) for x in allocated] == [
            ((B, S_Q, H_Q, 512), "bfloat16"),
            ((B, H_Q, S_Q), "float32"),
            (
                (2 * PARTS * S_Q * H_Q * (512 * 2 + 3 * 4),),
                "uint8",
            ),
        ]
        assert out is allocated[0] and lse is allocated[1]
        (args,) = world.decodes
        got = dict(vars(args))
        capturing = got.pop("capturing")
        assert world.framework.asked_capturing == 0
        assert capturing() is False and world.framework.asked_capturing == 1
        assert got == {
            "device": 0,
            "stream": 0x51,
            "dtype": "bfloat16",
            "b": B,
            "s_q": S_Q,
            "h_q": H_Q,
            "h_kv": H_KV,
            "d_qk": D_QK,
            "page_block_size": PAGE,
            "num_blocks": NUM_BLOCKS,
            "q": 0x1000,
            "q_rope": 0x1000 + 2 * 512,
            "q_strides": (S_Q * H_Q * D_QK, H_Q * D_QK, D_QK),
            "q_rope_strides": (S_Q * H_Q * D_QK, H_Q * D_QK, D_QK),
            "k_cache": 0x2000,
            "k_strides": (PAGE * H_KV * D_QK, H_KV * D_QK, D_QK),
            "block_table": 0x3000,
            "block_table_stride": MAX_BLOCKS,
            "max_seqlen": MAX_BLOCKS * PAGE,
            "cache_seqlens": 0x4000,
            "sched_meta": 0x5000,
            "num_parts": PARTS,
            "num_splits": 0x6000,
            "object_layout": False,
            "batch_invariant": False,
            "out": out.ptr,
            "out_strides": (S_Q * H_Q * 512, H_Q * 512, 512),
            "lse": lse.ptr,
            "scratch": allocated[2].ptr,
            "scratch_bytes": allocated[2].shape[0],
            "softmax_scale": 0.25,
            "causal": True,
        }
        assert not world.plans and not world.framework.copied

    def test_positional(self, world: World) -> None:
        rawmla.flash_mla_with_kvcache(*dense_arguments().values(), 0.5, True)
        assert (world.decodes[0].softmax_scale, world.decodes[0].causal) == (0.5, True)

    @pytest.mark.parametrize("d_qk", (576, 512))
    def test_default_scale(self, world: World, d_qk: int) -> None:
        arguments = dense_arguments()
        change("q", shape=(B, S_Q, H_Q, d_qk))(arguments)
        change("k_cache", shape=(NUM_BLOCKS, PAGE, H_KV, d_qk))(arguments)
        rawmla.flash_mla_with_kvcache(**arguments)
        assert world.decodes[0].softmax_scale == d_qk**-0.5

    @pytest.mark.parametrize("scale", (2, np.float32(0.5), np.float64(0.5), np.int64(1), 1.7e38, 2e-38))
    def test_scale_types(self, world: World, scale: Any) -> None:
        rawmla.flash_mla_with_kvcache(**dense_arguments(), softmax_scale=scale)
        assert world.decodes[0].softmax_scale == float(scale)
        assert type(world.decodes[0].softmax_scale) is float

    def test_numpy_scalars(self, world: World) -> None:
        arguments = dense_arguments() | {"head_dim_v": np.int64(512), "is_fp8_kvcache": np.False_}
        rawmla.flash_mla_with_kvcache(**arguments, causal=np.True_)
        assert world.decodes[0].causal is True

    def test_causal_is_irrelevant_with_one_token(self, world: World) -> None:
        arguments = dense_arguments()
        change("q", shape=(B, 1, H_Q, D_QK))(arguments)
        rawmla.flash_mla_with_kvcache(**arguments, causal=True)
        assert world.decodes[0].causal is False

    def test_other_device(self, world: World) -> None:
        arguments = dense_arguments()
        for name in ARRAYS:
            change(name, device=1)(arguments)
        out, lse = rawmla.flash_mla_with_kvcache(**arguments)
        assert (world.decodes[0].device, world.decodes[0].stream) == (1, 0x52)
        assert {x.device for x in world.framework.allocated} == {1}

    def test_no_scratch_when_nothing_can_be_split(self, world: World) -> None:
        arguments = dense_arguments()
        change("block_table", shape=(B, 1))(arguments)
        rawmla.flash_mla_with_kvcache(**arguments)
        assert (world.decodes[0].scratch, world.decodes[0].scratch_bytes) == (0, 0)
        assert [x.dtype for x in world.framework.allocated] == ["bfloat16", "float32"]

    @pytest.mark.parametrize("page", (16, 32, 64, 128, 192, 256, 1024))
    def test_page_sizes(self, world: World, page: int) -> None:
        arguments = dense_arguments()
        change("k_cache", shape=(NUM_BLOCKS, page, H_KV, D_QK))(arguments)
        rawmla.flash_mla_with_kvcache(**arguments)
        assert world.decodes[0].page_block_size == page

    @pytest.mark.parametrize(
        "name",
        ("block_table", "cache_seqlens", "k_cache", "tile_scheduler_metadata", "num_splits"),
    )
    def test_two_frameworks(self, world: World, name: str) -> None:
        same, other = FakeFramework("other"), FakeFramework("other", stream=0x99)
        arguments = dense_arguments()
        change(name, framework=other)(arguments)
        with pytest.raises(ValueError, match=rf"^{name}: expected a fake array.*0x51.*other array.*0x99"):
            rawmla.flash_mla_with_kvcache(**arguments)
        assert world.untouched
        change(name, framework=same)(arguments)
        rawmla.flash_mla_with_kvcache(**arguments)
        assert len(world.decodes) == 1 and not same.allocated


class TestStrides:
    def test_free_strides_of_q(self, world: World) -> None:
        arguments = dense_arguments()
        change("q", strides=(8, 640 * B, 640 * B * S_Q, 1))(arguments)
        rawmla.flash_mla_with_kvcache(**arguments)
        args = world.decodes[0]
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
        arguments = dense_arguments()
        change("q", **changes)(arguments)
        rawmla.flash_mla_with_kvcache(**arguments)
        args = world.decodes[0]
        assert world.framework.copied == [arguments["q"]]
        assert (args.q, args.q_rope) == (0xC0000, 0xC0000 + 2 * 512)
        assert args.q_strides == args.q_rope_strides == Q_STRIDES[:3]

    def test_rows_of_q_that_32_bits_cannot_count(self, world: World) -> None:
        """Offsets are counted in 16 bytes: 64 GiB."""
        arguments = dense_arguments()
        step = 2**35 // (B - 1) // 8 * 8 + 8
        change("q", strides=(step, H_Q * D_QK, D_QK, 1))(arguments)
        with pytest.raises(ValueError, match="^q: expected rows within 64 GiB of each other, got shape "):
            rawmla.flash_mla_with_kvcache(**arguments)
        assert world.untouched
        change("q", strides=(step - 10**6 * 8, H_Q * D_QK, D_QK, 1))(arguments)
        rawmla.flash_mla_with_kvcache(**arguments)
        assert len(world.decodes) == 1 and not world.framework.copied

    def test_q_is_not_copied_for_dimensions_of_size_one(self, world: World) -> None:
        arguments = dense_arguments()
        change("q", shape=(B, 1, H_Q, D_QK), strides=(H_Q * D_QK, 3, D_QK, 1))(arguments)
        rawmla.flash_mla_with_kvcache(**arguments)
        args = world.decodes[0]
        assert not world.framework.copied
        assert args.q_strides == args.q_rope_strides == (H_Q * D_QK, H_Q * D_QK, D_QK)

    def test_cache_blocks_apart(self, world: World) -> None:
        arguments = dense_arguments()
        change("k_cache", strides=(2 * K_STRIDES[0] + 64, *K_STRIDES[1:]))(arguments)
        rawmla.flash_mla_with_kvcache(**arguments)
        assert world.decodes[0].k_strides[0] == 2 * K_STRIDES[0] + 64

    @pytest.mark.parametrize("head_stride", (0, 1, 5))
    def test_one_kv_head_with_any_stride(self, world: World, head_stride: int) -> None:
        """`cache[:, :, None]` has stride 0 there in CuPy."""
        arguments = dense_arguments()
        change("k_cache", shape=(NUM_BLOCKS, PAGE, 1, D_QK), strides=(PAGE * 576, 576, head_stride, 1))(
            arguments
        )
        rawmla.flash_mla_with_kvcache(**arguments)
        assert world.decodes[0].k_strides[2] == 576

    def test_table_rows_apart(self, world: World) -> None:
        arguments = dense_arguments()
        change("block_table", strides=(100, 1))(arguments)
        rawmla.flash_mla_with_kvcache(**arguments)
        assert world.decodes[0].block_table_stride == 100

    def test_table_of_no_blocks(self, world: World) -> None:
        arguments = dense_arguments()
        change("block_table", shape=(B, 0), strides=(1, 1), ptr=0)(arguments)
        rawmla.flash_mla_with_kvcache(**arguments)
        assert len(world.decodes) == 1

    def test_more_splits_than_needed(self, world: World) -> None:
        arguments = dense_arguments()
        change("num_splits", shape=(100,))(arguments)
        rawmla.flash_mla_with_kvcache(**arguments)
        assert len(world.decodes) == 1

    @pytest.mark.parametrize(
        "strides",
        (
            (S_Q * 40 * 512, 40 * 512, 512, 1),  # 16 of 40 heads
            (S_Q * H_Q * 1024, H_Q * 1024, 1024, 1),  # half of the columns
            (512, B * 512, B * S_Q * 512, 1),  # heads outermost
        ),
        ids=("heads", "columns", "transposed"),
    )
    def test_out(self, world: World, strides: tuple[int, ...]) -> None:
        given = out_array(strides=strides)
        out, lse = rawmla.flash_mla_with_kvcache(**dense_arguments(), out=given)
        args = world.decodes[0]
        assert out is given and lse is world.framework.allocated[0]
        assert (args.out, args.out_strides) == (0x7000, strides[:3])
        assert [x.dtype for x in world.framework.allocated] == ["float32", "uint8"]

    def test_out_with_dimensions_of_size_one(self, world: World) -> None:
        arguments = dense_arguments()
        change("q", shape=(B, 1, H_Q, D_QK))(arguments)
        given = out_array(shape=(B, 1, H_Q, 512), strides=(H_Q * 512, 0, 512, 1))
        rawmla.flash_mla_with_kvcache(**arguments, out=given)
        assert world.decodes[0].out_strides[1] == H_Q * 512


class TestNothingToDo:
    @pytest.mark.parametrize("given", (False, True), ids=("fresh", "out"))
    @pytest.mark.parametrize("form", ("tensors", "object"))
    @pytest.mark.parametrize(("b", "s_q"), ((0, 2), (3, 0), (0, 0)))
    def test_empty(self, world: World, b: int, s_q: int, form: str, given: bool) -> None:
        arguments = dense_arguments()
        change("q", shape=(b, s_q, H_Q, D_QK), ptr=0)(arguments)
        change("block_table", shape=(b, MAX_BLOCKS))(arguments)
        change("cache_seqlens", shape=(b,))(arguments)
        plan = rawmla.FlashMLASchedMeta()
        if form == "object":
            arguments.update(tile_scheduler_metadata=plan, num_splits=None)
        target = out_array(shape=(b, s_q, H_Q, 512)) if given else None
        out, lse = rawmla.flash_mla_with_kvcache(**arguments, out=target)
        assert not world.decodes and not world.plans and not plan.have_initialized
        assert (out.shape, out.dtype) == ((b, s_q, H_Q, 512), "bfloat16")
        assert (lse.shape, lse.dtype) == ((b, H_Q, s_q), "float32")
        assert out is target if given else out is world.framework.allocated[0]


BATCH = ("block_table", "cache_seqlens", "tile_scheduler_metadata", "num_splits")


class TestKnownCalls:
    """What was checked once is known by everything that it depends on."""

    def test_layers_share_what_is_known(self, world: World) -> None:
        arguments = dense_arguments()
        for layer in range(3):
            change("q", ptr=0x100000 * (layer + 1))(arguments)
            change("k_cache", ptr=0x10000 * (layer + 1))(arguments)
            rawmla.flash_mla_with_kvcache(**arguments)
        assert [args.k_cache for args in world.decodes] == [0x10000, 0x20000, 0x30000]
        assert len({args.out for args in world.decodes}) == 3
        assert len(dense_decode._calls) == 1

    @pytest.mark.parametrize(
        ("apply", "field"),
        [
            (change("q", shape=(B, S_Q + 1, H_Q, D_QK)), "s_q"),
            (change("q", strides=(10**6, 10**5, 1024, 1)), "q_strides"),
            (put("q", q_pair((B, S_Q, H_Q, D_QK))), "q_rope"),
            (both(change("q", dtype="float16"), change("k_cache", dtype="float16")), "dtype"),
            (change("k_cache", shape=(NUM_BLOCKS, 2 * PAGE, H_KV, D_QK)), "page_block_size"),
            (change("k_cache", strides=(10**6, *K_STRIDES[1:])), "k_strides"),
            (change("block_table", shape=(B, MAX_BLOCKS + 1)), "max_seqlen"),
            (change("block_table", strides=(2 * MAX_BLOCKS, 1)), "block_table_stride"),
            (change("tile_scheduler_metadata", shape=(PARTS + 1, 8)), "num_parts"),
            (put("softmax_scale", 0.125), "softmax_scale"),
            (put("causal", True), "causal"),
            (put("enable_batch_invariant", True), "batch_invariant"),
            (put("out", out_array(strides=(10**6, 10**5, 1024, 1))), "out_strides"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_what_differs_is_not_mistaken(
        self, world: World, apply: Callable[[Arguments], None], field: str
    ) -> None:
        arguments = dense_arguments()
        rawmla.flash_mla_with_kvcache(**arguments)
        apply(arguments)
        rawmla.flash_mla_with_kvcache(**arguments)
        rawmla.flash_mla_with_kvcache(**dense_arguments())
        first, second, third = (getattr(args, field) for args in world.decodes)
        assert first == third != second

    def test_addresses_are_checked_every_time(self, world: World) -> None:
        rawmla.flash_mla_with_kvcache(**dense_arguments())
        arguments = dense_arguments()
        change("k_cache", ptr=0x2008)(arguments)
        with pytest.raises(ValueError, match=r"^k_cache: expected a 16-byte aligned address"):
            rawmla.flash_mla_with_kvcache(**arguments)
        arguments = dense_arguments()
        change("q", ptr=0x1008)(arguments)
        for _ in range(2):
            rawmla.flash_mla_with_kvcache(**arguments)
        assert [args.q for args in world.decodes] == [0x1000, 0xC0000, 0xC0000]

    @pytest.mark.parametrize("names", [("k_cache",), *[(name,) for name in BATCH], BATCH[2:]])
    def test_streams_are_checked_every_time(self, world: World, names: tuple[str, ...]) -> None:
        other = FakeFramework("other")
        arguments = dense_arguments()
        for name in names:
            change(name, framework=other)(arguments)
        rawmla.flash_mla_with_kvcache(**arguments)
        other.stream += 1
        with pytest.raises(ValueError, match=rf"^{names[0]}: expected a fake array"):
            rawmla.flash_mla_with_kvcache(**arguments)

    def test_what_is_known_stays_bounded(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(memo, "MAX_ENTRIES", 3)
        for pages in range(1, 9):
            arguments = dense_arguments()
            change("k_cache", shape=(pages, PAGE, H_KV, D_QK))(arguments)
            for scale in (0.1, 0.2, 0.3, 0.4, 0.5):
                rawmla.flash_mla_with_kvcache(**arguments, softmax_scale=scale)
            assert len(dense_decode._calls) <= 3
        assert len(world.decodes) == 40


class Exported:
    """An array of another library: reading it makes an array of the framework's."""

    def __init__(self, array: FakeArray) -> None:
        self.array = array


class TestBatchOfTheLastCall:
    """Layers share the block table, the lengths and the plan, whose arrays are read once."""

    def test_plan_is_read_once(self, world: World) -> None:
        arguments = dense_arguments()
        for layer in range(3):
            change("q", ptr=0x100000 * (layer + 1))(arguments)
            rawmla.flash_mla_with_kvcache(**arguments)
        every_time = ["q", "k_cache", *BATCH[:2]]
        assert world.reads == [*every_time, *BATCH[2:], *every_time, *every_time]
        batches = {
            (args.block_table, args.block_table_stride, args.cache_seqlens, args.sched_meta, args.num_splits)
            for args in world.decodes
        }
        assert batches == {(0x3000, MAX_BLOCKS, 0x4000, 0x5000, 0x6000)}
        assert len({args.q for args in world.decodes}) == 3
        assert {args.scratch_bytes for args in world.decodes} == {world.decodes[0].scratch_bytes}

    @pytest.mark.parametrize("name", BATCH)
    def test_another_object(self, world: World, name: str) -> None:
        arguments = dense_arguments()
        rawmla.flash_mla_with_kvcache(**arguments)
        change(name, dtype="int64")(arguments)
        with pytest.raises(TypeError, match=rf"^{name}: expected dtype int32"):
            rawmla.flash_mla_with_kvcache(**arguments)

    @pytest.mark.parametrize("name", BATCH)
    def test_moved_in_place(self, world: World, name: str) -> None:
        arguments = dense_arguments()
        rawmla.flash_mla_with_kvcache(**arguments)
        arguments[name].ptr = 0xF000
        rawmla.flash_mla_with_kvcache(**arguments)
        args = world.decodes[1]
        assert 0xF000 in (args.block_table, args.cache_seqlens, args.sched_meta, args.num_splits)

    @pytest.mark.parametrize("name", BATCH)
    def test_reshaped_in_place(self, world: World, name: str) -> None:
        arguments = dense_arguments()
        rawmla.flash_mla_with_kvcache(**arguments)
        arguments[name].shape = (2, 2, 2)
        with pytest.raises(ValueError, match=rf"^{name}: expected shape"):
            rawmla.flash_mla_with_kvcache(**arguments)

    @pytest.mark.parametrize("name", BATCH[:2])
    def test_strides_changed_in_place(self, world: World, name: str) -> None:
        arguments = dense_arguments()
        rawmla.flash_mla_with_kvcache(**arguments)
        arguments[name].strides = (20, 2) if name == "block_table" else (2,)
        with pytest.raises(ValueError, match=rf"^{name}: expected a contiguous"):
            rawmla.flash_mla_with_kvcache(**arguments)

    def test_another_batch_size(self, world: World) -> None:
        arguments = dense_arguments()
        rawmla.flash_mla_with_kvcache(**arguments)
        change("q", shape=(B - 1, S_Q, H_Q, D_QK))(arguments)
        with pytest.raises(ValueError, match=r"^block_table: expected shape \[2, max_blocks\]"):
            rawmla.flash_mla_with_kvcache(**arguments)

    def test_another_device(self, world: World) -> None:
        arguments = dense_arguments()
        rawmla.flash_mla_with_kvcache(**arguments)
        change("q", device=1)(arguments)
        change("k_cache", device=1)(arguments)
        with pytest.raises(ValueError, match=r"^block_table: expected an array on device cuda:1"):
            rawmla.flash_mla_with_kvcache(**arguments)

    @pytest.mark.parametrize("name", BATCH[:3])
    def test_gone(self, world: World, name: str) -> None:
        """A forgotten array is not taken for a None that is passed next."""
        arguments = dense_arguments()
        rawmla.flash_mla_with_kvcache(**arguments)
        arguments[name] = None
        gc.collect()
        with pytest.raises(TypeError, match=rf"^{name}: expected .* got NoneType"):
            rawmla.flash_mla_with_kvcache(**arguments)

    @pytest.mark.parametrize("name", BATCH)
    def test_array_of_another_library(self, world: World, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        """Taken over anew by every call, and kept until the launch."""
        alive: list[bool] = []
        taken: list[weakref.ref[FakeArray]] = []

        def read(x: Exported, argument: str) -> frameworks.Fields:
            copy = x.array.but()
            taken.append(weakref.ref(copy))
            return arrays.READERS[FakeArray](copy, argument)

        monkeypatch.setitem(arrays.READERS, Exported, read)

        class Launched:
            scratch_bytes = 0

            def __init__(self, call: object, capturing: object) -> None:
                pass

            def launch(self, *arguments: object) -> None:
                alive.append(taken[-1]() is not None)

        monkeypatch.setattr(mla_dense_decode, "PreparedDenseDecode", Launched)
        arguments = dense_arguments()
        arguments[name] = Exported(arguments[name])
        for _ in range(2):
            rawmla.flash_mla_with_kvcache(**arguments)
        assert alive == [True, True] and len(taken) == 2
