"""`rawmla.warmup_call`: a call up to its launches; arrays and launches are stand-ins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from decode_fakes import (
    B,
    FakeArray,
    World,
    change,
    dense_arguments,
    make_world,
    out_array,
    prefill_arguments,
    sparse_arguments,
)

import rawmla
from rawmla.jit import NO_LAUNCH
from rawmla.kernels import mla_cache_write, mla_merge_states


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return make_world(monkeypatch)


@pytest.mark.parametrize("make", (dense_arguments, sparse_arguments), ids=("dense", "sparse"))
@pytest.mark.parametrize("form", ("tensors", "object", "filled"))
def test_decode(world: World, make: Callable[[], Any], form: str) -> None:
    arguments = make()
    plan = rawmla.FlashMLASchedMeta()
    if form != "tensors":
        arguments.update(tile_scheduler_metadata=plan, num_splits=None)
    if form == "filled":
        rawmla.flash_mla_with_kvcache(**arguments)
        for done in (world.framework.allocated, world.decodes, world.sparse, world.plans):
            done.clear()
    before = dict(vars(plan))
    assert rawmla.warmup_call(rawmla.flash_mla_with_kvcache, **arguments) is None
    launches = world.decodes + world.sparse
    assert [launch.stream for launch in launches] == [NO_LAUNCH]
    assert launches[0].k_cache == arguments["k_cache"].ptr and launches[0].capturing() is False
    assert [launch["stream"] for launch in world.plans] == [NO_LAUNCH] * (form == "object")
    assert vars(plan) == before and not world.framework.allocated


def test_positional_with_out(world: World) -> None:
    out = out_array()
    rawmla.warmup_call(rawmla.flash_mla_with_kvcache, *dense_arguments().values(), out=out)
    assert world.decodes[0].out == out.ptr and not world.framework.allocated


def test_q_that_would_be_copied(world: World) -> None:
    arguments = dense_arguments()
    change("q", ptr=0x1002)(arguments)
    rawmla.warmup_call(rawmla.flash_mla_with_kvcache, **arguments)
    assert world.decodes[0].stream == NO_LAUNCH and not world.framework.copied


def test_metadata(world: World) -> None:
    lengths = FakeArray((B,), ptr=0x4000)
    rawmla.warmup_call(rawmla.get_mla_metadata, lengths, 128, 1)
    rows, splits = FakeArray((9, 8), ptr=0x8000), FakeArray((60,), ptr=0x9000)
    rawmla.warmup_call(rawmla.get_mla_metadata, lengths, 128, 1, out=(rows, splits))
    assert [launch["stream"] for launch in world.plans] == [NO_LAUNCH, NO_LAUNCH]
    assert world.plans[1]["sched_meta"] == 0x8000 and not world.framework.allocated


def test_lists_of_arrays(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = []
    monkeypatch.setattr(mla_merge_states, "launch", lambda *parts, stream, **more: streams.append(stream))
    outs = [FakeArray((2, 3, 8, 512), "bfloat16", ptr=0x1000 * i) for i in (1, 2)]
    lses = [FakeArray((2, 8, 3), "float32", ptr=0x100 * i) for i in (1, 2)]
    rawmla.warmup_call(rawmla.merge_attn_states, outs, lses)
    assert streams == [NO_LAUNCH] and not world.framework.allocated


def test_a_result_that_is_reshaped(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = []
    monkeypatch.setattr(mla_cache_write, "launch", lambda format, *, stream, **more: streams.append(stream))
    cache = FakeArray((4, 3, 1, 512), "bfloat16", ptr=0x1000)
    rawmla.warmup_call(rawmla.quantize_k_cache, cache, "model1")
    assert streams == [NO_LAUNCH] and not world.framework.allocated


def test_prefill(world: World) -> None:
    arguments = prefill_arguments(optional=True)
    rawmla.warmup_call(rawmla.flash_mla_sparse_fwd, **arguments)
    assert {launch.stream for launch in world.sparse} == {NO_LAUNCH} and not world.framework.allocated


def test_what_the_call_refuses(world: World) -> None:
    arguments = dense_arguments()
    change("q", dtype="float32")(arguments)
    with pytest.raises(TypeError, match=r"^q: expected dtype bfloat16 or float16"):
        rawmla.warmup_call(rawmla.flash_mla_with_kvcache, **arguments)
    for function in (print, rawmla.warmup, rawmla.reference.convert_indices, rawmla.FlashMLASchedMeta):
        with pytest.raises(TypeError, match=r"^function: expected a function of rawmla"):
            rawmla.warmup_call(function, 3)
    with pytest.raises(TypeError, match=r"^softmax_scale: expected a float or None, got array$"):
        rawmla.warmup_call(
            rawmla.flash_mla_with_kvcache, **dense_arguments(), softmax_scale=FakeArray((), "float32")
        )
    assert world.untouched


def test_the_call_itself_is_not_mistaken_for_it(world: World) -> None:
    arguments = dense_arguments()
    rawmla.warmup_call(rawmla.flash_mla_with_kvcache, **arguments)
    out, _ = rawmla.flash_mla_with_kvcache(**arguments)
    rawmla.warmup_call(rawmla.flash_mla_with_kvcache, **arguments)
    assert [launch.stream for launch in world.decodes] == [NO_LAUNCH, 0x51, NO_LAUNCH]
    assert out is world.framework.allocated[0]
