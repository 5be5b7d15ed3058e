"""Plans: what fills, checks and recomputes them; arrays and launches are stand-ins."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
from calls.fakes import (
    D_QK,
    H_KV,
    H_Q,
    NUM_BLOCKS,
    PAGE,
    S_Q,
    SM_COUNT,
    Arguments,
    B,
    FakeArray,
    PreparedDecode,
    World,
    change,
    dense_arguments,
    make_world,
    sparse_arguments,
)

import rawmla
from rawmla.kernels import mla_dense_decode, mla_sparse
from rawmla.kernels import mla_metadata as metadata
from rawmla.mla.plan import SchedConfig, plan_object


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return make_world(monkeypatch)


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
            "tokens": metadata.TokenCounts(0x4000),
            "b": B,
            "num_parts": parts,
            "sched_meta": plan.tile_scheduler_metadata.ptr,
            "num_splits": plan.num_splits.ptr,
            "splits_length": B + 1,
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


@dataclasses.dataclass
class VllmPlan:
    """The fields of the plan objects of FlashMLA, of vLLM's copy and of sgl-flash-mla."""

    @dataclasses.dataclass
    class Config:
        b: int
        s_q: int
        h_q: int
        page_block_size: int
        h_k: int
        causal: bool
        is_fp8_kvcache: bool
        topk: int | None
        extra_page_block_size: int | None
        extra_topk: int | None
        enable_batch_invariant: bool

    have_initialized: bool = False
    config: Config | None = None
    tile_scheduler_metadata: Any = None
    num_splits: Any = None


@dataclasses.dataclass
class OtherConfigPlan(VllmPlan):
    """Its config has a field that we do not know."""

    @dataclasses.dataclass
    class Config:  # type: ignore[override]
        b: int
        colour: str


def plan_without_config() -> Any:
    return SimpleNamespace(have_initialized=False, config=None, tile_scheduler_metadata=None, num_splits=None)


class TestPlanOfAnotherLibrary:
    """Any object with the four fields is a plan: it is filled, compared and used as ours."""

    @pytest.mark.parametrize(
        ("make", "config_class"),
        ((VllmPlan, VllmPlan.Config), (OtherConfigPlan, SchedConfig), (plan_without_config, SchedConfig)),
    )
    @pytest.mark.parametrize("arguments", (dense_arguments, sparse_arguments), ids=("dense", "sparse"))
    def test_filled_and_used_again(self, world: World, make: Any, config_class: Any, arguments: Any) -> None:
        plan = make()
        call = arguments() | {"tile_scheduler_metadata": plan, "num_splits": None}
        for _ in range(2):
            rawmla.flash_mla_with_kvcache(**call)
        assert len(world.plans) == 1 and world.plans[0]["object_layout"] is True
        decodes = world.decodes or world.sparse
        assert {(x.sched_meta, x.object_layout) for x in decodes} == {(world.plans[0]["sched_meta"], True)}
        assert plan.have_initialized and type(plan.config) is config_class
        ours = rawmla.FlashMLASchedMeta()
        rawmla.flash_mla_with_kvcache(**call | {"tile_scheduler_metadata": ours})
        assert dataclasses.asdict(plan.config) == dataclasses.asdict(ours.config)  # type: ignore[arg-type]
        plan.config.h_q += 1
        with pytest.raises(
            ValueError, match=r"^tile_scheduler_metadata: expected a plan for h_q = 16, .* 17;"
        ):
            rawmla.flash_mla_with_kvcache(**call)

    def test_given_arrays_are_used(self, world: World) -> None:
        """SGLang's own planner writes the two arrays and leaves have_initialized False."""
        plan = VllmPlan()
        plan.tile_scheduler_metadata, plan.num_splits = FakeArray((7, 8), ptr=0x8000), FakeArray((50,))
        call = dense_arguments() | {"tile_scheduler_metadata": plan, "num_splits": None}
        rawmla.flash_mla_with_kvcache(**call)
        (args,) = world.decodes
        assert (args.sched_meta, args.num_parts, args.object_layout) == (0x8000, 7, True)
        assert not world.plans and plan.have_initialized

    @pytest.mark.parametrize("where", ("call", "plan"))
    def test_batch_invariant(self, world: World, where: str) -> None:
        plan: Any = VllmPlan()
        options = {"enable_batch_invariant": True} if where == "call" else {}
        if where == "plan":
            plan.enable_batch_invariant = True
        call = dense_arguments() | {"tile_scheduler_metadata": plan, "num_splits": None}
        rawmla.flash_mla_with_kvcache(**call, **options)
        assert world.plans[0]["batch_invariant"] is True and plan.config.enable_batch_invariant is True

    def test_recomputed_in_place(self, world: World) -> None:
        plan = VllmPlan()
        call = dense_arguments() | {"tile_scheduler_metadata": plan, "num_splits": None}
        rawmla.flash_mla_with_kvcache(**call)
        assert rawmla.get_mla_metadata(call["cache_seqlens"], 16, 2, out=plan)[0] is plan
        assert world.plans[1]["sched_meta"] == world.plans[0]["sched_meta"]

    def test_failed_call_leaves_it_empty(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(self: Any, stream: int, addresses: Any, scratch: int) -> None:
            raise rawmla.LaunchError("no")

        monkeypatch.setattr(PreparedDecode, "launch", fail)
        plan = VllmPlan()
        with pytest.raises(rawmla.LaunchError):
            rawmla.flash_mla_with_kvcache(
                **dense_arguments() | {"tile_scheduler_metadata": plan, "num_splits": None}
            )
        assert plan == VllmPlan()


class TestNoPlan:
    """What callers pass by mistake: the argument is named, and what to do."""

    @pytest.mark.parametrize("with_splits", (False, True))
    @pytest.mark.parametrize(
        ("given", "texts"),
        (
            (None, ("got NoneType", "take a plan from get_mla_metadata()")),
            (rawmla.FlashMLASchedMeta, ("got the class FlashMLASchedMeta", "FlashMLASchedMeta()")),
            (VllmPlan, ("got the class VllmPlan", "VllmPlan()")),
            ((rawmla.FlashMLASchedMeta(), None), ("got tuple of 2", "give its first item")),
            ([FakeArray((5, 8))], ("got list of 1", "give its first item")),
            ("a plan", ("got str", "take a plan from get_mla_metadata()")),
            (
                SimpleNamespace(tile_scheduler_metadata=None, num_splits=None),
                ("got a SimpleNamespace without have_initialized, config", "all four fields"),
            ),
        ),
        ids=("None", "class", "foreign class", "tuple", "list", "str", "half a plan"),
    )
    @pytest.mark.parametrize("make", (dense_arguments, sparse_arguments), ids=("dense", "sparse"))
    def test_refused(
        self, world: World, make: Any, given: Any, texts: tuple[str, ...], with_splits: bool
    ) -> None:
        arguments = make() | {"tile_scheduler_metadata": given}
        if not with_splits:
            arguments["num_splits"] = None
        with pytest.raises(
            TypeError, match=r"^tile_scheduler_metadata: expected a FlashMLASchedMeta or "
        ) as e:
            rawmla.flash_mla_with_kvcache(**arguments)
        assert all(text in str(e.value) for text in texts), str(e.value)
        assert world.untouched

    @pytest.mark.parametrize("make", (rawmla.FlashMLASchedMeta, VllmPlan))
    def test_object_and_splits(self, world: World, make: Any) -> None:
        with pytest.raises(ValueError, match=rf"^num_splits: expected None with a {make.__name__}, which"):
            rawmla.flash_mla_with_kvcache(**dense_arguments() | {"tile_scheduler_metadata": make()})
        assert world.untouched


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
            "tokens": metadata.TokenCounts(0x4000),
            "b": B,
            "num_parts": parts,
            "sched_meta": rows.ptr,
            "num_splits": splits.ptr,
            "splits_length": B + 1,
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
        assert launched["splits_length"] == 60 and launched["object_layout"] is False

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

    @pytest.mark.parametrize("make", (rawmla.FlashMLASchedMeta, VllmPlan))
    def test_object_without_arrays(self, world: World, make: Any) -> None:
        """A plan made ahead: the object gets arrays, in its own row order, and the first call uses them."""
        plan = make()
        returned = rawmla.get_mla_metadata(self.LENGTHS, 16, 2, out=plan, enable_batch_invariant=True)
        assert returned == (plan, None) and not plan.have_initialized and plan.config is None
        (launched,) = world.plans
        assert launched["object_layout"] is True and launched["batch_invariant"] is True
        assert launched["sched_meta"] == plan.tile_scheduler_metadata.ptr
        assert launched["num_splits"] == plan.num_splits.ptr and plan.num_splits.shape == (B + 1,)
        arguments = dense_arguments() | {"tile_scheduler_metadata": plan, "num_splits": None}
        rawmla.flash_mla_with_kvcache(**arguments)
        assert len(world.plans) == 1 and world.decodes[0].sched_meta == launched["sched_meta"]
        assert world.decodes[0].batch_invariant is True and plan.config.enable_batch_invariant is True

    @pytest.mark.parametrize("make", (rawmla.FlashMLASchedMeta, VllmPlan))
    def test_an_object_without_a_call_says_what_it_holds(self, world: World, make: Any) -> None:
        """Computed again in the other way: calls size their scratch by what the object says."""
        plan = make()
        for batch_invariant in (False, True):
            rawmla.get_mla_metadata(self.LENGTHS, 16, 2, out=plan, enable_batch_invariant=batch_invariant)
            assert world.plans[-1]["batch_invariant"] is batch_invariant
            assert getattr(plan, "enable_batch_invariant", False) is batch_invariant

    def test_an_object_with_no_place_for_batch_invariance(self, world: World) -> None:
        class Slots:
            __slots__ = ("have_initialized", "config", "tile_scheduler_metadata", "num_splits")

            def __init__(self) -> None:
                self.have_initialized, self.config = False, None
                self.tile_scheduler_metadata = self.num_splits = None

        assert rawmla.get_mla_metadata(self.LENGTHS, 16, 2, out=Slots())[0].num_splits is not None
        world.plans.clear()
        with pytest.raises(ValueError, match=r"^enable_batch_invariant: .* Slots as out, which has no place"):
            rawmla.get_mla_metadata(self.LENGTHS, 16, 2, out=Slots(), enable_batch_invariant=True)
        assert not world.plans

    def test_no_requests(self, world: World) -> None:
        rows, splits = rawmla.get_mla_metadata(FakeArray((0,), ptr=0), 128, 1)
        assert splits.shape == (1,) and not world.plans
        assert world.framework.filled == [(rows, -1), (splits, 0)]


class TestFailedFirstCall:
    """A call that fails leaves its plan as it was, so that the next one fills it."""

    def test_kernel_not_ready(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        def not_ready(call: Any, capturing: Any) -> None:
            raise rawmla.KernelNotReadyError("not loaded")

        plan = rawmla.FlashMLASchedMeta()
        arguments = dense_arguments() | {"tile_scheduler_metadata": plan, "num_splits": None}
        sparse = sparse_arguments() | {"tile_scheduler_metadata": plan, "num_splits": None}
        with monkeypatch.context() as patched:
            patched.setattr(mla_dense_decode, "PreparedDenseDecode", not_ready)
            patched.setattr(mla_sparse, "PreparedSparse", not_ready)
            for given in (arguments, sparse):
                with pytest.raises(rawmla.KernelNotReadyError):
                    rawmla.flash_mla_with_kvcache(**given)
                assert vars(plan) == vars(rawmla.FlashMLASchedMeta())
        assert world.untouched
        rawmla.flash_mla_with_kvcache(**arguments)
        assert plan.have_initialized and len(world.plans) == 1

    @pytest.mark.parametrize("make", (dense_arguments, sparse_arguments), ids=("dense", "sparse"))
    def test_launch_failed(self, world: World, monkeypatch: pytest.MonkeyPatch, make: Any) -> None:
        def fail(self: Any, stream: int, addresses: Any, scratch: int) -> None:
            raise rawmla.LaunchError("no")

        plan = rawmla.FlashMLASchedMeta()
        arguments = make() | {"tile_scheduler_metadata": plan, "num_splits": None}
        monkeypatch.setattr(PreparedDecode, "launch", fail)
        with pytest.raises(rawmla.LaunchError):
            rawmla.flash_mla_with_kvcache(**arguments)
        assert vars(plan) == vars(rawmla.FlashMLASchedMeta())


@pytest.mark.parametrize("make", (dense_arguments, sparse_arguments), ids=("dense", "sparse"))
def test_rows_beyond_the_grid(world: World, make: Any) -> None:
    """Parts are CTAs along grid z, of which there are at most 65,535."""
    arguments = make()
    change("tile_scheduler_metadata", shape=(65_535, 8))(arguments)
    rawmla.flash_mla_with_kvcache(**arguments)
    change("tile_scheduler_metadata", shape=(65_536, 8))(arguments)
    with pytest.raises(ValueError, match=r"^tile_scheduler_metadata: .* 1 to 65535 rows, got \[65536, 8\]"):
        rawmla.flash_mla_with_kvcache(**arguments)


def test_batch_invariant_requests_beyond_the_grid(world: World) -> None:
    """The combine of a batch-invariant plan has a CTA along grid y for each request."""
    arguments = dense_arguments()
    b = 65_536
    change("q", shape=(b, 1, H_Q, D_QK))(arguments)
    change("block_table", shape=(b, 10))(arguments)
    change("cache_seqlens", shape=(b,))(arguments)
    change("num_splits", shape=(b + 1,))(arguments)
    rawmla.flash_mla_with_kvcache(**arguments)
    with pytest.raises(ValueError, match=r"^q: expected at most 65535 requests .* batch-invariant plan"):
        rawmla.flash_mla_with_kvcache(**arguments, enable_batch_invariant=True)


def test_topk_beyond_32_bits(world: World) -> None:
    with pytest.raises(ValueError, match=r"^topk: expected an int below 2\*\*30, got"):
        rawmla.get_mla_metadata(TestMetadata.LENGTHS, 128, 1, topk=2**30)
    assert world.untouched


class TestPlanAheadOfTheCall:
    """`plan_object`, with which torch operators compute the plan of an empty object ahead of the call."""

    @pytest.mark.parametrize("batch_invariant", (False, True))
    @pytest.mark.parametrize("kind", ("dense", "sparse", "sparse with an extra cache"))
    def test_as_the_call_computes_it(self, world: World, kind: str, batch_invariant: bool) -> None:
        arguments = dense_arguments() if kind == "dense" else sparse_arguments(extra="extra" in kind)
        plan = rawmla.FlashMLASchedMeta(enable_batch_invariant=batch_invariant)
        rawmla.flash_mla_with_kvcache(
            **{**arguments, "tile_scheduler_metadata": plan, "num_splits": None},
        )
        names = ("indices", "topk_length", "extra_indices_in_kvcache", "extra_topk_length")
        rows, splits = plan_object(
            S_Q,
            H_Q,
            H_KV if kind == "dense" else 1,
            arguments["cache_seqlens"],
            *[arguments.get(name) for name in names],
            batch_invariant,
        )
        want, got = world.plans
        made = plan.tile_scheduler_metadata, plan.num_splits
        assert [(x.shape, x.dtype) for x in (rows, splits)] == [(x.shape, x.dtype) for x in made]
        assert (got.pop("sched_meta"), got.pop("num_splits")) == (rows.ptr, splits.ptr)
        for arguments in (want, got):
            arguments.pop("capturing")
        assert got == {name: want[name] for name in got}

    def test_no_requests(self, world: World) -> None:
        rows, splits = plan_object(S_Q, H_Q, H_KV, FakeArray((0,)), None, None, None, None, False)
        assert not world.plans
        assert world.framework.filled == [(rows, -1), (splits, 0)]
        assert splits.shape == (1,)
