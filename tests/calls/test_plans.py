"""Plans: what fills, checks and recomputes them; `get_mla_metadata`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import rawmla
from calls.fakes import (
    D_QK,
    EXTRA_BLOCKS,
    EXTRA_PAGE,
    EXTRA_TOPK,
    H_KV,
    H_Q,
    NUM_BLOCKS,
    PAGE,
    S_Q,
    SM_COUNT,
    TOPK,
    Arguments,
    B,
    FakeArray,
    PreparedDecode,
    World,
    both,
    change,
    dense_arguments,
    put,
    sparse_arguments,
)
from calls.test_decode import Make, full_sparse, plan_without_config, resize, without
from rawmla.call import memo
from rawmla.kernels import mla_dense_decode, mla_sparse
from rawmla.kernels import mla_metadata as metadata
from rawmla.mla.plan import SchedConfig, plan_object

decode = rawmla.flash_mla_with_kvcache
LENGTHS = FakeArray((B,), ptr=0x4000)
OPTIONAL = ("extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length")


MAKES = {"dense": dense_arguments, "sparse": sparse_arguments, "extra": full_sparse}
each_kind = pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)


def with_plan(make: Make, plan: Any) -> Arguments:
    return make() | {"tile_scheduler_metadata": plan, "num_splits": None}


def launches(world: World) -> list[SimpleNamespace]:
    return world.decodes + world.sparse


CONFIG = (
    *("b", "s_q", "h_q", "page_block_size", "h_k", "causal", "is_fp8_kvcache"),
    *("topk", "extra_page_block_size", "extra_topk", "enable_batch_invariant"),
)


@dataclasses.dataclass
class VllmPlan:
    """The fields of the plan objects of FlashMLA, of vLLM's copy and of sgl-flash-mla."""

    Config = dataclasses.make_dataclass("Config", CONFIG)

    have_initialized: bool = False
    config: Any = None
    tile_scheduler_metadata: Any = None
    num_splits: Any = None


class OtherConfigPlan(VllmPlan):
    """Its config has a field that we do not know."""

    Config = dataclasses.make_dataclass("Config", ("b", "colour"))


each_class = pytest.mark.parametrize("plan_class", (rawmla.FlashMLASchedMeta, VllmPlan))


# ---- objects that calls fill


@each_kind
def test_first_call_fills_it(world: World, make: Make) -> None:
    plan, nothing = rawmla.get_mla_metadata()
    assert isinstance(plan, rawmla.FlashMLASchedMeta) and nothing is None
    assert not plan.have_initialized and plan.config is None
    decode(**with_plan(make, plan))
    assert plan.have_initialized
    if make is dense_arguments:
        parts = metadata.num_sm_parts(SM_COUNT, S_Q, H_Q, H_KV)
        config = SchedConfig(B, S_Q, H_Q, PAGE, H_KV, False)
        tokens = metadata.TokenCounts(0x4000)
    else:
        parts = SM_COUNT // S_Q
        config = SchedConfig(B, S_Q, H_Q, PAGE, 1, False, True, TOPK)
        tokens = metadata.TokenCounts(0, 0, TOPK, 0)
    if make is full_sparse:
        config = dataclasses.replace(config, extra_page_block_size=EXTRA_PAGE, extra_topk=EXTRA_TOPK)
        tokens = metadata.TokenCounts(0x9000, 0xE000, TOPK, EXTRA_TOPK)
    assert plan.config == config
    assert (plan.tile_scheduler_metadata.shape, plan.num_splits.shape) == ((parts, 8), (B + 1,))
    (launched,) = world.plans
    assert (launched["tokens"], launched["b"], launched["num_parts"]) == (tokens, B, parts)
    assert launched["object_layout"] and not launched["batch_invariant"]
    (args,) = launches(world)
    assert (args.sched_meta, args.num_splits) == (launched["sched_meta"], launched["num_splits"])
    assert (args.num_parts, args.object_layout) == (parts, True)


@pytest.mark.parametrize(("s_q", "h_q", "parts"), ((1, 64, 132), (1, 65, 66), (200, 128, 1)))
def test_number_of_parts_of_a_sparse_plan(world: World, s_q: int, h_q: int, parts: int) -> None:
    plan = rawmla.FlashMLASchedMeta()
    arguments = with_plan(sparse_arguments, plan)
    change("q", shape=(B, s_q, h_q, 576))(arguments)
    change("indices", shape=(B, s_q, TOPK))(arguments)
    decode(**arguments)
    assert parts == max(SM_COUNT // (s_q * -(-h_q // 64)), 1)
    assert plan.tile_scheduler_metadata.shape == (parts, 8)
    assert (world.plans[0]["num_parts"], world.sparse[0].num_parts) == (parts, parts)
    rows, splits = rawmla.get_mla_metadata(LENGTHS, s_q * h_q, 1, h_q, True, TOPK)
    assert (rows.shape, splits.shape) == ((parts, 8), (B + 1,))


BF16 = sparse_arguments("bf16 576", extra=True)
# The kind of call, the field of the config that differs, what it is, and the change.
OTHER_CALLS: list[tuple[str, str, Any, Callable[[Arguments], None]]] = [
    ("dense", "b", B - 1, resize(B - 1, S_Q)),
    ("dense", "s_q", 1, resize(B, 1)),
    ("dense", "h_q", 8, change("q", shape=(B, S_Q, 8, D_QK))),
    ("dense", "page_block_size", 128, change("k_cache", shape=(NUM_BLOCKS, 128, H_KV, D_QK))),
    ("dense", "h_k", 4, change("k_cache", shape=(NUM_BLOCKS, PAGE, 4, D_QK))),
    ("dense", "causal", True, put("causal", True)),
    ("dense", "enable_batch_invariant", True, put("enable_batch_invariant", True)),
    ("extra", "b", B - 1, resize(B - 1, S_Q)),
    ("extra", "s_q", 1, resize(B, 1)),
    ("extra", "h_q", 8, both(change("q", shape=(B, S_Q, 8, 576)), change("attn_sink", shape=(8,)))),
    ("extra", "page_block_size", 61, change("k_cache", shape=(NUM_BLOCKS, 61, 1, 656))),
    ("extra", "is_fp8_kvcache", False, lambda arguments: arguments.update(BF16)),
    ("extra", "topk", 64, change("indices", shape=(B, S_Q, 64))),
    ("extra", "extra_page_block_size", 2, change("extra_k_cache", shape=(EXTRA_BLOCKS, 2, 1, 656))),
    ("extra", "extra_page_block_size", None, without(*OPTIONAL)),
    ("extra", "extra_topk", 101, change("extra_indices_in_kvcache", shape=(B, S_Q, 101))),
    ("extra", "enable_batch_invariant", True, put("enable_batch_invariant", True)),
    ("dense", "h_k", 1, lambda arguments: arguments.update(sparse_arguments())),
]


@pytest.mark.parametrize(("kind", "field", "called", "spoil"), OTHER_CALLS)
def test_filled_for_another_call(
    world: World, kind: str, field: str, called: Any, spoil: Callable[[Arguments], None]
) -> None:
    plan = rawmla.FlashMLASchedMeta()
    arguments = with_plan(MAKES[kind], plan)
    decode(**arguments)
    made, planned = len(world.framework.allocated), getattr(plan.config, field)
    spoil(arguments)
    arguments |= {"tile_scheduler_metadata": plan, "num_splits": None}
    expected = rf"^tile_scheduler_metadata: expected a plan for {field} = {called}, .*{field} = {planned};"
    with pytest.raises(ValueError, match=expected):
        decode(**arguments)
    assert len(launches(world)) == 1 and len(world.framework.allocated) == made


@each_class
@each_kind
def test_arrays_written_from_outside(world: World, make: Make, plan_class: Any) -> None:
    """An engine with a scheduler of its own fills the arrays, not the config."""
    plan = plan_class()
    plan.tile_scheduler_metadata = FakeArray((7, 8), ptr=0x18000)
    plan.num_splits = FakeArray((50,), ptr=0x19000)
    bare = {name: getattr(plan, name) for name in ("tile_scheduler_metadata", "num_splits")}
    decode(**make() | bare)  # rows of bare arrays have another layout
    decode(**with_plan(make, plan))
    other, args = launches(world)
    assert not world.plans and args.object_layout and not other.object_layout
    assert (args.sched_meta, args.num_splits, args.num_parts) == (0x18000, 0x19000, 7)
    assert plan.have_initialized and plan.config is not None


@each_kind
def test_config_of_another_library(world: World, make: Make) -> None:
    plan = rawmla.FlashMLASchedMeta()
    decode(**with_plan(make, plan))
    fields = dataclasses.asdict(plan.config)  # type: ignore[arg-type]
    del fields["enable_batch_invariant"]
    plan.config = SimpleNamespace(**fields)  # type: ignore[assignment]
    decode(**with_plan(make, plan))
    assert len(launches(world)) == 2


@each_kind
def test_arrays_removed_from_outside(world: World, make: Make) -> None:
    plan = rawmla.FlashMLASchedMeta()
    decode(**with_plan(make, plan))
    plan.tile_scheduler_metadata = plan.num_splits = None
    decode(**with_plan(make, plan))
    assert len(world.plans) == 2 and plan.num_splits is not None
    assert launches(world)[1].sched_meta == plan.tile_scheduler_metadata.ptr


@each_class
@each_kind
@pytest.mark.parametrize("where", ("plan", "call"))
def test_batch_invariant(world: World, where: str, make: Make, plan_class: Any) -> None:
    plan = plan_class()
    if where == "plan":
        plan.enable_batch_invariant = True
    options = {"enable_batch_invariant": True} if where == "call" else {}
    for _ in range(2):
        decode(**with_plan(make, plan), **options)
    assert [launched["batch_invariant"] for launched in world.plans] == [True]
    assert [args.batch_invariant for args in launches(world)] == [True, True]
    assert plan.config.enable_batch_invariant is True


STAGES: dict[str, list[tuple[Any, str]]] = {
    "loading": [(mla_dense_decode, "PreparedDenseDecode"), (mla_sparse, "PreparedSparse")],
    "planning": [(metadata, "launch")],
    "launching": [(PreparedDecode, "launch")],
}


@pytest.mark.parametrize("stage", STAGES)
@each_class
@each_kind
def test_a_call_that_fails_leaves_it_empty(
    world: World, monkeypatch: pytest.MonkeyPatch, make: Make, plan_class: Any, stage: str
) -> None:
    """The next one fills it."""
    plan, fail = plan_class(), Mock(side_effect=rawmla.RawMLAError("no"))
    with monkeypatch.context() as patched:
        for place, name in STAGES[stage]:
            patched.setattr(place, name, fail)
        with pytest.raises(rawmla.RawMLAError):
            decode(**with_plan(make, plan))
        assert vars(plan) == vars(plan_class())
        assert stage != "loading" or world.untouched
    memo.clear_all()  # which have the launch that fails
    decode(**with_plan(make, plan))
    assert plan.have_initialized and len(launches(world)) == 1


@pytest.mark.parametrize(
    ("plan_class", "config_class"),
    ((VllmPlan, VllmPlan.Config), (OtherConfigPlan, SchedConfig), (plan_without_config, SchedConfig)),
)
@each_kind
def test_plan_of_another_library(world: World, make: Make, plan_class: Any, config_class: Any) -> None:
    """Any object with the four fields is a plan: it is filled, compared and used as ours."""
    plan, ours = plan_class(), rawmla.FlashMLASchedMeta()
    for _ in range(2):
        decode(**with_plan(make, plan))
    assert len(world.plans) == 1 and world.plans[0]["object_layout"] is True
    sched_meta = world.plans[0]["sched_meta"]
    assert {(x.sched_meta, x.object_layout) for x in launches(world)} == {(sched_meta, True)}
    assert plan.have_initialized and type(plan.config) is config_class
    decode(**with_plan(make, ours))
    assert dataclasses.asdict(plan.config) == dataclasses.asdict(ours.config)  # type: ignore[arg-type]
    plan.config.h_q += 1
    with pytest.raises(ValueError, match=r"^tile_scheduler_metadata: expected a plan for h_q = 16, .* 17;"):
        decode(**with_plan(make, plan))


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
def test_what_is_no_plan(world: World, make: Make, given: Any, texts: tuple[str, ...]) -> None:
    """Callers pass it by mistake: the argument is named, and what to do."""
    expected = r"^tile_scheduler_metadata: expected a FlashMLASchedMeta or "
    for more in ({}, {"num_splits": None}):
        with pytest.raises(TypeError, match=expected) as e:
            decode(**make() | {"tile_scheduler_metadata": given, **more})
        assert all(text in str(e.value) for text in texts), str(e.value)
    assert world.untouched


# ---- get_mla_metadata


@pytest.mark.parametrize("topk", (None, TOPK))
def test_tensors(world: World, topk: int | None) -> None:
    rows, splits = rawmla.get_mla_metadata(LENGTHS, num_heads_per_head_k=128, num_heads_k=1, topk=topk)
    parts = 66 if topk else metadata.num_sm_parts(SM_COUNT, 1, 128, 1)  # one query token is assumed
    assert (rows.shape, splits.shape) == ((parts, 8), (B + 1,))
    assert rows.dtype == splits.dtype == "int32"
    (launched,) = world.plans
    tokens = metadata.TokenCounts(0, 0, topk, 0) if topk else metadata.TokenCounts(0x4000)
    assert (launched["tokens"], launched["num_parts"]) == (tokens, parts)
    assert (launched["sched_meta"], launched["num_splits"]) == (rows.ptr, splits.ptr)
    assert not launched["object_layout"] and not launched["batch_invariant"]


@pytest.mark.parametrize("num_heads_q", (None, 2, 16, 32))
def test_rows_do_not_depend_on_the_head_count(world: World, num_heads_q: int | None) -> None:
    rows, _ = rawmla.get_mla_metadata(LENGTHS, 16, 2, num_heads_q)
    assert rows.shape[0] == metadata.num_sm_parts(SM_COUNT, 1, 32, 2)


@pytest.mark.parametrize("topk", (None, TOPK))
def test_no_requests(world: World, topk: int | None) -> None:
    rows, splits = rawmla.get_mla_metadata(FakeArray((0,), ptr=0), 128, 1, topk=topk)
    assert splits.shape == (1,) and not world.plans
    assert world.framework.filled == [(rows, -1), (splits, 0)]


def test_in_place(world: World) -> None:
    rows, splits = FakeArray((9, 8), ptr=0x8000), FakeArray((60,), ptr=0x9000)
    returned = rawmla.get_mla_metadata(LENGTHS, 128, 1, out=(rows, splits), enable_batch_invariant=True)
    assert returned[0] is rows and returned[1] is splits and not world.framework.allocated
    (launched,) = world.plans
    assert (launched["sched_meta"], launched["num_splits"], launched["num_parts"]) == (0x8000, 0x9000, 9)
    assert launched["splits_length"] == 60 and launched["object_layout"] is False
    assert launched["batch_invariant"] is True


@pytest.mark.parametrize("batch_invariant", (False, True))
@each_class
def test_object_in_place(world: World, plan_class: Any, batch_invariant: bool) -> None:
    plan = plan_class()
    decode(**with_plan(dense_arguments, plan), enable_batch_invariant=batch_invariant)
    returned = rawmla.get_mla_metadata(LENGTHS, 16, 2, out=plan)
    assert returned[0] is plan and returned[1] is None
    first, second = world.plans
    assert first.pop("capturing") and second.pop("capturing")
    assert first == second and second["batch_invariant"] is batch_invariant


@pytest.mark.parametrize("extra", (False, True))
def test_object_of_a_sparse_call_in_place(world: World, extra: bool) -> None:
    """`topk` counts whole blocks of both caches: 4 of 64 for 200, and 2 for 100."""
    plan = rawmla.FlashMLASchedMeta()
    decode(**with_plan(full_sparse if extra else sparse_arguments, plan))
    topk = 256 + 128 if extra else TOPK
    assert rawmla.get_mla_metadata(LENGTHS, S_Q * H_Q, 1, H_Q, True, topk, out=plan) == (plan, None)
    first, second = world.plans
    assert second["tokens"] == metadata.TokenCounts(0, 0, topk, 0) and second["object_layout"] is True
    for name in ("num_parts", "sched_meta", "num_splits"):
        assert first[name] == second[name]


@pytest.mark.parametrize(
    ("make", "options", "text"),
    (
        (sparse_arguments, {"topk": None}, "topk: expected an int of 4 blocks of 64, such as 256, .*None"),
        (sparse_arguments, {"topk": 192}, "topk: .* 256, .*, got 192"),  # it would leave selected tokens out
        (sparse_arguments, {"topk": 320}, "topk: .* 256, .*, got 320"),
        (dense_arguments, {"topk": 64}, "topk: expected None, .*, got 64"),
        (dense_arguments, {"enable_batch_invariant": True}, "enable_batch_invariant: expected False"),
    ),
)
def test_object_of_another_kind_of_call(world: World, make: Make, options: Arguments, text: str) -> None:
    plan = rawmla.FlashMLASchedMeta()
    decode(**with_plan(make, plan))
    with pytest.raises(ValueError, match=f"^{text}"):
        rawmla.get_mla_metadata(LENGTHS, S_Q * H_Q, 1, H_Q, **options, out=plan)
    assert len(world.plans) == 1


@each_class
def test_object_without_arrays(world: World, plan_class: Any) -> None:
    """A plan made ahead: the object gets arrays, in its own row order, and the first call uses them."""
    plan = plan_class()
    returned = rawmla.get_mla_metadata(LENGTHS, 16, 2, out=plan, enable_batch_invariant=True)
    assert returned == (plan, None) and not plan.have_initialized and plan.config is None
    (launched,) = world.plans
    assert launched["object_layout"] is True and launched["batch_invariant"] is True
    assert launched["sched_meta"] == plan.tile_scheduler_metadata.ptr
    assert launched["num_splits"] == plan.num_splits.ptr and plan.num_splits.shape == (B + 1,)
    decode(**with_plan(dense_arguments, plan))
    assert len(world.plans) == 1 and world.decodes[0].sched_meta == launched["sched_meta"]
    assert world.decodes[0].batch_invariant is True and plan.config.enable_batch_invariant is True


def test_an_object_with_no_place_for_batch_invariance(world: World) -> None:
    class Slots:
        __slots__ = ("have_initialized", "config", "tile_scheduler_metadata", "num_splits")

        def __init__(self) -> None:
            self.have_initialized, self.config = False, None
            self.tile_scheduler_metadata = self.num_splits = None

    assert rawmla.get_mla_metadata(LENGTHS, 16, 2, out=Slots())[0].num_splits is not None
    world.plans.clear()
    with pytest.raises(ValueError, match=r"^enable_batch_invariant: .* Slots as out, which has no place"):
        rawmla.get_mla_metadata(LENGTHS, 16, 2, out=Slots(), enable_batch_invariant=True)
    assert not world.plans


TWO = (FakeArray((9, 8)), FakeArray((B + 1,)))
# The argument, the exception, the end of the text, and the arguments by name.
BAD_METADATA: list[tuple[str, type[Exception], str, Arguments]] = [
    ("cache_seqlens", TypeError, "got int64", {"cache_seqlens": FakeArray((B,), "int64")}),
    ("cache_seqlens", ValueError, "stride 2", {"cache_seqlens": FakeArray((B,), strides=(2,))}),
    ("cache_seqlens", ValueError, "got 16385", {"cache_seqlens": FakeArray((16385,))}),
    ("cache_seqlens", ValueError, "numpy.ndarray", {"cache_seqlens": np.zeros(3, np.int32)}),
    ("num_q_tokens_per_head_k", TypeError, "got None", {"num_q_tokens_per_head_k": None}),
    ("num_q_tokens_per_head_k", ValueError, "got 0", {"num_q_tokens_per_head_k": 0}),
    ("num_heads_k", TypeError, "got None", {"num_heads_k": None}),
    ("num_heads_k", ValueError, "got -1", {"num_heads_k": -1}),
    ("num_heads_k", ValueError, "1 with topk, got 2", {"topk": 64, "num_heads_k": 2}),
    ("num_heads_q", ValueError, "got 3 with num_heads_k = 2", {"num_heads_k": 2, "num_heads_q": 3}),
    ("num_heads_q", ValueError, "got 512 with num_heads_k = 2", {"num_heads_k": 2, "num_heads_q": 512}),
    ("num_heads_per_head_k", TypeError, "got 128", {"num_heads_per_head_k": 128}),
    ("is_fp8_kvcache", TypeError, "got int 1", {"is_fp8_kvcache": 1}),
    ("enable_batch_invariant", TypeError, "got int 1", {"enable_batch_invariant": 1}),
    ("topk", ValueError, "got 0", {"topk": 0}),
    ("topk", TypeError, "got float 64.0", {"topk": 64.0}),
    ("topk", ValueError, "below 2**30", {"topk": 2**30}),
    ("out", TypeError, "got FakeArray", {"out": TWO[0]}),
    ("out", TypeError, "got tuple", {"out": TWO[:1]}),
    ("out", ValueError, "got one array", {"out": rawmla.FlashMLASchedMeta(num_splits=TWO[1])}),
    ("out[0]", TypeError, "NoneType", {"out": (None, TWO[1])}),
    ("out[0]", ValueError, "[9, 7]", {"out": (FakeArray((9, 7)), TWO[1])}),
    ("out[1]", ValueError, "[3]", {"out": (TWO[0], FakeArray((B,)))}),
    ("out[1]", ValueError, "cuda:1", {"out": (TWO[0], TWO[1].but(device=1))}),
]


def test_metadata_that_is_refused(world: World) -> None:
    good = {"cache_seqlens": LENGTHS, "num_q_tokens_per_head_k": 128, "num_heads_k": 1}
    for argument, kind, text, changes in BAD_METADATA:
        with pytest.raises(kind) as caught:
            rawmla.get_mla_metadata(**good | changes)
        assert type(caught.value) is kind and str(caught.value).startswith(f"{argument}: expected ")
        assert text in str(caught.value)
    with pytest.raises(NotImplementedError, match=r"^is_fp8_kvcache=True: .*get_mla_metadata: topk"):
        rawmla.get_mla_metadata(**good, is_fp8_kvcache=True)
    with pytest.raises(TypeError, match="num_heads"):
        rawmla.get_mla_metadata(**good, num_heads=1)
    assert world.untouched


@pytest.mark.parametrize("batch_invariant", (False, True))
@each_kind
def test_plan_ahead_of_the_call(world: World, make: Make, batch_invariant: bool) -> None:
    """`plan_object`, with which torch operators compute a plan, does what a call does for an empty object."""
    plan, arguments = rawmla.FlashMLASchedMeta(enable_batch_invariant=batch_invariant), make()
    decode(**with_plan(make, plan))
    names = ("indices", "topk_length", "extra_indices_in_kvcache", "extra_topk_length")
    given = [arguments.get(name) for name in ("cache_seqlens", *names)]
    h_kv = H_KV if make is dense_arguments else 1
    rows, splits = plan_object(S_Q, H_Q, h_kv, *given, batch_invariant)
    want, got = world.plans
    made = plan.tile_scheduler_metadata, plan.num_splits
    assert [(x.shape, x.dtype) for x in (rows, splits)] == [(x.shape, x.dtype) for x in made]
    assert (got["sched_meta"], got["num_splits"]) == (rows.ptr, splits.ptr)
    for name in {*got} - {"capturing", "sched_meta", "num_splits"}:
        assert got[name] == want[name], name
