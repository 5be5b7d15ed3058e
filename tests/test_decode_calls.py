"""What accepted calls allocate, launch and return; arrays and launches are stand-ins."""

from __future__ import annotations

import dataclasses
import inspect as python_inspect
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from decode_fakes import (
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
    SM_COUNT,
    Arguments,
    B,
    FakeArray,
    FakeFramework,
    World,
    change,
    dense_arguments,
    make_world,
    out_array,
)

import rawmla
from rawmla.decode import SchedConfig
from rawmla.kernels import dense_decode, metadata


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
            ((dense_decode.scratch_bytes(PARTS, B, S_Q, H_Q, MAX_BLOCKS * PAGE, False),), "uint8"),
        ]
        assert out is allocated[0] and lse is allocated[1]
        (args,) = world.decodes
        got = args._asdict()
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
            "q_stride_b": S_Q * H_Q * D_QK,
            "q_stride_s": H_Q * D_QK,
            "q_stride_h": D_QK,
            "k_cache": 0x2000,
            "k_stride_block": PAGE * H_KV * D_QK,
            "k_stride_token": H_KV * D_QK,
            "k_stride_head": D_QK,
            "block_table": 0x3000,
            "block_table_stride": MAX_BLOCKS,
            "cache_seqlens": 0x4000,
            "sched_meta": 0x5000,
            "num_parts": PARTS,
            "num_splits": 0x6000,
            "object_layout": False,
            "batch_invariant": False,
            "out": out.ptr,
            "out_stride_b": S_Q * H_Q * 512,
            "out_stride_s": H_Q * 512,
            "out_stride_h": 512,
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

    @pytest.mark.parametrize("scale", (2, np.float32(0.5), np.float64(0.5), np.int64(1), 3.4e38))
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
        assert (args.q_stride_b, args.q_stride_s, args.q_stride_h) == (8, 640 * B, 640 * B * S_Q)
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
        assert (args.q, args.q_stride_b, args.q_stride_s, args.q_stride_h) == (0xC0000, *Q_STRIDES[:3])

    def test_q_is_not_copied_for_dimensions_of_size_one(self, world: World) -> None:
        arguments = dense_arguments()
        change("q", shape=(B, 1, H_Q, D_QK), strides=(H_Q * D_QK, 3, D_QK, 1))(arguments)
        rawmla.flash_mla_with_kvcache(**arguments)
        args = world.decodes[0]
        assert not world.framework.copied
        assert (args.q_stride_b, args.q_stride_s, args.q_stride_h) == (H_Q * D_QK, H_Q * D_QK, D_QK)

    def test_cache_blocks_apart(self, world: World) -> None:
        arguments = dense_arguments()
        change("k_cache", strides=(2 * K_STRIDES[0] + 64, *K_STRIDES[1:]))(arguments)
        rawmla.flash_mla_with_kvcache(**arguments)
        assert world.decodes[0].k_stride_block == 2 * K_STRIDES[0] + 64

    @pytest.mark.parametrize("head_stride", (0, 1, 5))
    def test_one_kv_head_with_any_stride(self, world: World, head_stride: int) -> None:
        """`cache[:, :, None]` has stride 0 there in CuPy."""
        arguments = dense_arguments()
        change("k_cache", shape=(NUM_BLOCKS, PAGE, 1, D_QK), strides=(PAGE * 576, 576, head_stride, 1))(
            arguments
        )
        rawmla.flash_mla_with_kvcache(**arguments)
        assert world.decodes[0].k_stride_head == 576

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
        assert (args.out, args.out_stride_b, args.out_stride_s, args.out_stride_h) == (0x7000, *strides[:3])
        assert [x.dtype for x in world.framework.allocated] == ["float32", "uint8"]

    def test_out_with_dimensions_of_size_one(self, world: World) -> None:
        arguments = dense_arguments()
        change("q", shape=(B, 1, H_Q, D_QK))(arguments)
        given = out_array(shape=(B, 1, H_Q, 512), strides=(H_Q * 512, 0, 512, 1))
        rawmla.flash_mla_with_kvcache(**arguments, out=given)
        assert world.decodes[0].out_stride_s == H_Q * 512


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


class TestPlanObject:
    def arguments(self, plan: rawmla.FlashMLASchedMeta) -> Arguments:
        return dense_arguments() | {"tile_scheduler_metadata": plan, "num_splits": None}

    def test_first_call_fills_it(self, world: World) -> None:
        plan, nothing = rawmla.get_mla_metadata()
        assert isinstance(plan, rawmla.FlashMLASchedMeta) and nothing is None
        assert not plan.have_initialized and plan.config is None
        rawmla.flash_mla_with_kvcache(**self.arguments(plan), causal=True)
        assert plan.have_initialized
        assert plan.config == SchedConfig(B, S_Q, H_Q, PAGE, H_KV, True)
        parts = metadata.num_sm_parts(SM_COUNT, S_Q, H_Q, H_KV)
        assert (plan.tile_scheduler_metadata.shape, plan.num_splits.shape) == ((parts, 8), (B + 1,))
        (launched,) = world.plans
        assert launched.pop("capturing")() is False
        assert launched == {
            "device": 0,
            "stream": 0x51,
            "cache_seqlens": 0x4000,
            "b": B,
            "num_parts": parts,
            "sched_meta": plan.tile_scheduler_metadata.ptr,
            "num_splits": plan.num_splits.ptr,
            "object_layout": True,
            "batch_invariant": False,
        }
        args = world.decodes[0]
        assert (args.sched_meta, args.num_splits) == (launched["sched_meta"], launched["num_splits"])
        assert (args.num_parts, args.object_layout) == (parts, True)

    def test_second_call_reuses_it(self, world: World) -> None:
        plan = rawmla.FlashMLASchedMeta()
        for _ in range(3):
            rawmla.flash_mla_with_kvcache(**self.arguments(plan))
        assert len(world.plans) == 1 and len(world.decodes) == 3
        assert len({args.sched_meta for args in world.decodes}) == 1

    @pytest.mark.parametrize(
        ("field", "planned", "called", "changes"),
        (
            ("b", 3, 2, {"q": (2, S_Q, H_Q, D_QK), "block_table": (2, 10), "cache_seqlens": (2,)}),
            ("s_q", 2, 1, {"q": (B, 1, H_Q, D_QK)}),
            ("h_q", 16, 8, {"q": (B, S_Q, 8, D_QK)}),
            ("page_block_size", 64, 128, {"k_cache": (NUM_BLOCKS, 128, H_KV, D_QK)}),
            ("h_k", 2, 4, {"k_cache": (NUM_BLOCKS, PAGE, 4, D_QK)}),
        ),
    )
    def test_other_shape(
        self, world: World, field: str, planned: int, called: int, changes: dict[str, tuple[int, ...]]
    ) -> None:
        plan = rawmla.FlashMLASchedMeta()
        arguments = self.arguments(plan)
        rawmla.flash_mla_with_kvcache(**arguments)
        for name, shape in changes.items():
            change(name, shape=shape)(arguments)
        expected = (
            rf"^tile_scheduler_metadata: expected a plan for {field} = {called}, .*{field} = {planned};"
        )
        with pytest.raises(ValueError, match=expected):
            rawmla.flash_mla_with_kvcache(**arguments)
        assert len(world.decodes) == 1

    @pytest.mark.parametrize("option", ("causal", "enable_batch_invariant"))
    def test_other_option(self, world: World, option: str) -> None:
        plan = rawmla.FlashMLASchedMeta()
        rawmla.flash_mla_with_kvcache(**self.arguments(plan), **{option: True})
        with pytest.raises(ValueError, match=rf"expected a plan for {option} = False, .* {option} = True;"):
            rawmla.flash_mla_with_kvcache(**self.arguments(plan))
        assert len(world.decodes) == 1

    @pytest.mark.parametrize(
        ("field", "value"),
        (("is_fp8_kvcache", True), ("topk", 64), ("extra_page_block_size", 2), ("extra_topk", 64)),
    )
    def test_plan_of_a_sparse_call(self, world: World, field: str, value: Any) -> None:
        plan = rawmla.FlashMLASchedMeta()
        rawmla.flash_mla_with_kvcache(**self.arguments(plan))
        setattr(plan.config, field, value)
        with pytest.raises(ValueError, match=rf"expected a plan for {field} = .* {field} = {value};"):
            rawmla.flash_mla_with_kvcache(**self.arguments(plan))

    def test_arrays_written_from_outside(self, world: World) -> None:
        """An engine with a scheduler of its own fills the arrays, not the config."""
        plan = rawmla.FlashMLASchedMeta()
        plan.tile_scheduler_metadata = FakeArray((7, 8), ptr=0x8000)
        plan.num_splits = FakeArray((50,), ptr=0x9000)
        rawmla.flash_mla_with_kvcache(**self.arguments(plan))
        args = world.decodes[0]
        assert not world.plans
        assert (args.sched_meta, args.num_splits, args.num_parts) == (0x8000, 0x9000, 7)
        assert args.object_layout and plan.have_initialized and plan.config is not None

    def test_config_of_another_library(self, world: World) -> None:
        plan = rawmla.FlashMLASchedMeta()
        rawmla.flash_mla_with_kvcache(**self.arguments(plan))
        fields = dataclasses.asdict(plan.config)  # type: ignore[arg-type]
        del fields["enable_batch_invariant"]
        plan.config = SimpleNamespace(**fields)  # type: ignore[assignment]
        rawmla.flash_mla_with_kvcache(**self.arguments(plan))
        assert len(world.decodes) == 2

    def test_arrays_removed_from_outside(self, world: World) -> None:
        plan = rawmla.FlashMLASchedMeta()
        rawmla.flash_mla_with_kvcache(**self.arguments(plan))
        plan.tile_scheduler_metadata = plan.num_splits = None
        rawmla.flash_mla_with_kvcache(**self.arguments(plan))
        assert len(world.plans) == 2 and plan.num_splits is not None

    @pytest.mark.parametrize("where", ("plan", "call"))
    def test_batch_invariant(self, world: World, where: str) -> None:
        plan, _ = rawmla.get_mla_metadata(enable_batch_invariant=where == "plan")
        options = {"enable_batch_invariant": True} if where == "call" else {}
        for _ in range(2):
            rawmla.flash_mla_with_kvcache(**self.arguments(plan), **options)
        assert [launched["batch_invariant"] for launched in world.plans] == [True]
        assert [args.batch_invariant for args in world.decodes] == [True, True]

    def test_failed_plan_leaves_it_empty(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(**arguments: Any) -> None:
            raise rawmla.KernelNotReadyError("not loaded")

        monkeypatch.setattr(metadata, "launch", fail)
        plan = rawmla.FlashMLASchedMeta()
        with pytest.raises(rawmla.KernelNotReadyError):
            rawmla.flash_mla_with_kvcache(**self.arguments(plan))
        assert vars(plan) == vars(rawmla.FlashMLASchedMeta())


class TestMetadata:
    LENGTHS = FakeArray((B,), ptr=0x4000)

    def test_tensors(self, world: World) -> None:
        rows, splits = rawmla.get_mla_metadata(self.LENGTHS, 128, 1)
        parts = metadata.num_sm_parts(SM_COUNT, 1, 128, 1)
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
            "cache_seqlens": 0x4000,
            "b": B,
            "num_parts": parts,
            "sched_meta": rows.ptr,
            "num_splits": splits.ptr,
            "object_layout": False,
            "batch_invariant": False,
        }

    @pytest.mark.parametrize("num_heads_q", (None, 2, 16, 32))
    def test_rows_do_not_depend_on_the_head_count(self, world: World, num_heads_q: int | None) -> None:
        rows, _ = rawmla.get_mla_metadata(self.LENGTHS, 16, 2, num_heads_q)
        assert rows.shape[0] == metadata.num_sm_parts(SM_COUNT, 1, 32, 2)

    def test_old_keyword(self, world: World) -> None:
        rawmla.get_mla_metadata(self.LENGTHS, num_heads_per_head_k=128, num_heads_k=1)
        assert len(world.plans) == 1

    def test_batch_invariant(self, world: World) -> None:
        rawmla.get_mla_metadata(self.LENGTHS, 128, 1, enable_batch_invariant=True)
        assert world.plans[0]["batch_invariant"] is True

    def test_in_place(self, world: World) -> None:
        rows, splits = FakeArray((9, 8), ptr=0x8000), FakeArray((60,), ptr=0x9000)
        returned = rawmla.get_mla_metadata(self.LENGTHS, 128, 1, out=(rows, splits))
        assert returned[0] is rows and returned[1] is splits and not world.framework.allocated
        (launched,) = world.plans
        assert (launched["sched_meta"], launched["num_splits"], launched["num_parts"]) == (0x8000, 0x9000, 9)
        assert launched["object_layout"] is False

    @pytest.mark.parametrize("batch_invariant", (False, True))
    def test_object_in_place(self, world: World, batch_invariant: bool) -> None:
        plan = rawmla.FlashMLASchedMeta()
        arguments = dense_arguments() | {"tile_scheduler_metadata": plan, "num_splits": None}
        rawmla.flash_mla_with_kvcache(**arguments, enable_batch_invariant=batch_invariant)
        returned = rawmla.get_mla_metadata(self.LENGTHS, 16, 2, out=plan)
        assert returned[0] is plan and returned[1] is None
        first, second = world.plans
        assert first.pop("capturing") and second.pop("capturing")
        assert first == second and second["batch_invariant"] is batch_invariant

    def test_no_requests(self, world: World) -> None:
        rows, splits = rawmla.get_mla_metadata(FakeArray((0,), ptr=0), 128, 1)
        assert splits.shape == (1,) and not world.plans
        assert world.framework.filled == [(rows, -1), (splits, 0)]
