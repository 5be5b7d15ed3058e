"""Sparse prefill: what it alone refuses, and what its launches get."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import rawmla
from calls.fakes import H_Q, PAGE, SM_COUNT, TOPK, Arguments, FakeArray, World, change, prefill_arguments
from calls.fakes import PREFILL_S_Q as S_Q
from calls.refusals import Refusal, check_all_refused
from rawmla.kernels import mla_metadata as metadata
from rawmla.kernels import mla_sparse_prefill as sparse_prefill

prefill = rawmla.flash_mla_sparse_fwd
PLAN_BYTES = 32 * SM_COUNT + 32  # 132 parts; 6 sums, in whole units of 16 bytes
SPLIT_BYTES = 2 * SM_COUNT * H_Q * (512 * 2 + 4 * 4)


def full() -> Arguments:
    """A call with all that is optional."""
    return prefill_arguments(optional=True)


def out_array(**changes: Any) -> FakeArray:
    return FakeArray((S_Q, H_Q, 512), "bfloat16", ptr=0x7000).but(**changes)


# ---- what is refused


ROWS: list[Refusal] = [
    ("indices", TypeError, "int32 ... got int64", {"dtype": "int64"}),
    ("topk_length", TypeError, "int32 ... got int64", {"dtype": "int64"}),
    ("attn_sink", TypeError, "float32 ... got bfloat16", {"dtype": "bfloat16"}),
    ("q", ValueError, "576 or 512", {"shape": (S_Q, H_Q, 128)}),
    ("q", ValueError, "at least 1 head", {"shape": (S_Q, 0, 576)}),
    ("kv", TypeError, "is_fp8_kvcache=False", {"dtype": "uint8"}),
    ("kv", ValueError, "[s_kv, 1, 576]", {"shape": (9, 2, 576)}),
    ("kv", ValueError, "[s_kv, 1, 576]", {"shape": (9, 1, 512)}),
    ("kv", ValueError, "at least 1 token", {"shape": (0, 1, 576)}),
    ("kv", ValueError, "16-byte aligned", {"ptr": 0x2008}),
    ("kv", ValueError, "multiple of 8", {"strides": (580, 580, 1)}),
    ("kv", ValueError, "not negative", {"strides": (-576, 576, 1)}),
    ("indices", ValueError, "[5, 1, topk]", {"shape": (S_Q, 2, TOPK)}),
    ("indices", ValueError, "no negative stride", {"strides": (-TOPK, TOPK, 1)}),
    ("log_base", TypeError, "str", 2),
    ("out", ValueError, "multiples of 8", out_array(strides=(8224, 514, 1))),
    ("out", ValueError, "overlap", out_array(strides=(4096, 256, 1))),
    ("out", ValueError, "16-byte aligned", out_array(ptr=0x7008)),
]


def test_calls_that_are_refused(world: World) -> None:
    check_all_refused(world, prefill, full, ROWS)


# ---- what launches get


@pytest.mark.parametrize(
    ("layout", "apply", "field", "value"),
    (
        ("bf16 576", change("kv", strides=(8, 3, 1)), "cache", {"block_stride": 16}),  # rows may overlap
        ("bf16 576", change("kv", strides=(0, 3, 1)), "cache", {"block_stride": 0}),
        ("bf16 576", change("kv", shape=(1, 1, 576), strides=(-7, 3, 1)), "cache", {"num_blocks": 1}),
        ("bf16 576", change("indices", strides=(0, 9, 1)), "cache", {"index_stride_b": 0}),
        ("v32", change("kv", ptr=0x2008), "load_bytes", 8),
        ("v32", change("kv", strides=(PAGE * 656 + 8, 656, 656, 1)), "load_bytes", 8),
    ),
)
def test_strides(
    world: World, layout: str, apply: Callable[[Arguments], None], field: str, value: Any
) -> None:
    arguments = prefill_arguments(layout)
    apply(arguments)
    prefill(**arguments)
    got = getattr(world.sparse[0], field)
    if isinstance(value, dict):
        got = {name: getattr(got, name) for name in value}
    assert got == value and not world.framework.copied


@pytest.mark.parametrize("limited", (False, True))
def test_one_block_is_never_split(world: World, limited: bool) -> None:
    """Without lengths there is no scratch at all."""
    arguments = full() if limited else prefill_arguments()
    change("indices", shape=(S_Q, 1, 64))(arguments)
    results = prefill(**arguments)
    assert world.sparse[0].scratch_bytes == 0 and bool(world.plans) == limited
    scratch = [x.shape for x in world.framework.allocated[len(results) :]]
    assert scratch == ([(PLAN_BYTES,)] if limited else [])


MANY = {16384: [16384], 16385: [8193, 8192], 70_000: [14_000] * 5, 1_000_001: [16130] * 61 + [16071]}


@pytest.mark.parametrize(("s_q", "sizes"), MANY.items())
def test_more_tokens_than_a_plan_takes(world: World, s_q: int, sizes: list[int]) -> None:
    assert sum(sizes) == s_q and max(sizes) <= metadata.MAX_BATCH
    arguments = full()
    change("q", shape=(s_q, H_Q, 576), strides=(10_000, 576, 1))(arguments)
    change("indices", shape=(s_q, 1, TOPK), strides=(300, 9, 1))(arguments)
    change("topk_length", shape=(s_q,))(arguments)
    given = out_array(shape=(s_q, H_Q, 512), strides=(30_000, 512, 1))
    _, max_logits, lse = prefill(**arguments, out=given)
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


def test_chunks_share_their_scratch(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_prefill, "_UNITED_TOKENS", 1 << 30)
    arguments = prefill_arguments() | {"topk_length": FakeArray((40_000,), ptr=0x9000)}
    change("q", shape=(40_000, H_Q, 576))(arguments)
    change("indices", shape=(40_000, 1, TOPK))(arguments)
    prefill(**arguments)
    scratch = world.framework.allocated[-1]
    splits = scratch.ptr + 32 * SM_COUNT
    split_scratch = -(-(splits + 4 * (13_334 + 1)) // 16) * 16
    assert scratch.shape == (split_scratch + SPLIT_BYTES - scratch.ptr,)
    for args, plan in zip(world.sparse, world.plans, strict=True):
        assert (args.sched_meta, args.num_splits, args.scratch) == (scratch.ptr, splits, split_scratch)
        assert (plan["sched_meta"], plan["num_splits"]) == (scratch.ptr, splits)
        assert plan["splits_length"] == plan["b"] + 1


@pytest.mark.parametrize("limited", (False, True), ids=("all", "topk_length"))
@pytest.mark.parametrize(("layout", "h_q"), (("bf16 576", 8), ("bf16 512", 64), ("v32", 16), ("model1", 128)))
@pytest.mark.parametrize("s_q", (1, 131, 16_385))
def test_batch_invariant(world: World, layout: str, h_q: int, s_q: int, limited: bool) -> None:
    """A token's bits depend on nothing else: nothing is shared, copied or split."""
    arguments = prefill_arguments(layout)
    change("q", shape=(s_q, h_q, arguments["q"].shape[2]))(arguments)
    change("indices", shape=(s_q, 1, TOPK))(arguments)
    if limited:
        arguments["topk_length"] = FakeArray((s_q,), ptr=0x9000)
    prefill(**arguments, enable_batch_invariant=True)
    assert not world.plans and {args.format for args in world.sparse} == {layout.split()[0]}
    assert sum(args.b for args in world.sparse) == s_q
    for args in world.sparse:
        assert args.batch_invariant and args.group_tokens == 1 and args.k_cache == 0x2000
        assert args.uniform.length and not args.uniform.cuts and args.scratch_bytes == 0
        tokens_per_part = args.uniform.length // args.uniform.pitch
        assert tokens_per_part * args.num_parts >= args.b
