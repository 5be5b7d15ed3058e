"""`rawmla.warmup_call` beside what test_launches.py has of every operation: plans, gradients, functions."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import rawmla
from calls import test_flex_backward as backward
from calls.fakes import (
    Arguments,
    FakeArray,
    FakeFramework,
    World,
    change,
    dense_arguments,
    make_world,
    sparse_arguments,
)
from calls.suite import all_arguments, stand_in, tensors_of
from calls.test_decode import plan_without_config
from calls.test_flex import L, S, mask_of, plain, table
from operations import Operation
from operations.dense import MHA, MHA_KV, MHA_QKV, MHA_VARLEN
from rawmla import jit
from rawmla.call import memo
from rawmla.flex import create
from rawmla.jit import NO_LAUNCH, KernelSpec
from rawmla.kernels import mha_backward, mha_forward

decode = rawmla.flash_mla_with_kvcache


@pytest.mark.parametrize("make", (dense_arguments, sparse_arguments), ids=("dense", "sparse"))
@pytest.mark.parametrize("filled", (False, True))
@pytest.mark.parametrize("plan_class", (rawmla.FlashMLASchedMeta, plan_without_config))
def test_plan_objects(world: World, make: Callable[[], Any], filled: bool, plan_class: Any) -> None:
    """One is not filled, and the call itself takes it afterwards."""
    plan = plan_class()
    arguments = make() | {"tile_scheduler_metadata": plan, "num_splits": None}
    if filled:
        decode(**arguments)
        world.begin_again()
    before = dict(vars(plan))
    rawmla.warmup_call(decode, **arguments)
    assert [launch["stream"] for launch in world.plans] == [NO_LAUNCH] * (not filled)
    assert vars(plan) == before and not world.framework.allocated
    decode(**arguments)
    assert [launch.stream for launch in world.decodes + world.sparse] == [NO_LAUNCH, 0x51]


def test_what_the_call_refuses(world: World) -> None:
    arguments = dense_arguments()
    arguments["q"] = arguments["q"].but(dtype="float32")
    with pytest.raises(TypeError, match=r"^q: expected dtype bfloat16 or float16"):
        rawmla.warmup_call(decode, **arguments)
    for function in (print, rawmla.warmup, rawmla.reference.convert_indices, rawmla.FlashMLASchedMeta):
        with pytest.raises(TypeError, match=r"^function: expected a function of rawmla"):
            rawmla.warmup_call(function, 3)
    with pytest.raises(TypeError, match=r"^softmax_scale: expected a float or None, got array$"):
        rawmla.warmup_call(decode, **dense_arguments(), softmax_scale=FakeArray((), "float32"))
    assert world.untouched


# ---- dense attention and its backward

RENAMED = {"cu_seqlens_q": "cu_seqlens_qo", "max_seqlen_k": "max_seqlen_kv", "attn_sink": "learnable_sink"}
MHA_CALLS = {
    "fixed": (MHA, {}, {"softcap": 5.0}),
    "varlen": (MHA_VARLEN, {}, {}),
    "renamed": (MHA_VARLEN, RENAMED, {}),
    "qkv": (MHA_QKV, {}, {}),
    "kv": (MHA_KV, {}, {"alibi_slopes": FakeArray((4,), "float32")}),
}


@pytest.mark.parametrize(("operation", "names", "more"), MHA_CALLS.values(), ids=MHA_CALLS)
def test_kernels_of_dense_attention_and_its_backward(
    monkeypatch: pytest.MonkeyPatch, operation: Operation, names: dict[str, str], more: Arguments
) -> None:
    """Those that are loaded ahead are those that the call and its gradients load. Nothing else happens."""
    loaded: list[KernelSpec] = []
    streams: list[int] = []
    prepared = mha_forward.PreparedMhaForward, mha_backward.PreparedMhaBackward
    world = make_world(monkeypatch)
    monkeypatch.setattr(mha_forward, "PreparedMhaForward", prepared[0])
    monkeypatch.setattr(mha_backward, "PreparedMhaBackward", prepared[1])

    def get_kernel(spec: KernelSpec, device: int, *, capturing: Any) -> Any:
        loaded.append(spec)
        launch = SimpleNamespace(launch=lambda stream, *rest: streams.append(stream))
        return SimpleNamespace(prepare=lambda *args, **more: launch)

    monkeypatch.setattr(jit, "get_kernel", get_kernel)
    monkeypatch.setattr(jit, "tensor_map", lambda *args, **more: b"")
    arguments = {names.get(name, name): x for name, x in all_arguments(operation).items()} | more
    function = getattr(rawmla, tensors_of(operation).function)
    rawmla.warmup_call(function, **arguments, backward=True)
    assert set(streams) == {NO_LAUNCH} and {x.stream for x in world.enqueued} <= {NO_LAUNCH}
    assert not (world.framework.allocated or world.framework.copied or world.framework.filled)
    ahead = [*loaded]
    assert {spec.name for spec in ahead} >= {"mha_forward", "mha_backward", "mha_backward_finish"}
    assert ("mha_backward_clear" in {spec.name for spec in ahead}) == (operation is not MHA)
    loaded.clear()
    memo.clear_all()
    out, lse = function(**arguments)
    if operation in (MHA, MHA_VARLEN):
        backward = rawmla.flash_attn_backward if operation is MHA else rawmla.flash_attn_varlen_backward
        backward(out, out=out, lse=lse, **arguments)
        # With sinks once more: with a gradient of lse there is another kernel.
        backward(out, out=out, lse=lse, **arguments, dlse=lse)
    else:  # equal head dimensions in arrays of their own
        q, k, v = [stand_in(getattr(tensors_of(operation).inputs, name)) for name in "qkv"]
        starts, options = FakeArray((7,)), {name: arguments[name] for name in ("causal", "alibi_slopes")}
        rawmla.flash_attn_varlen_backward(out, q, k, v, out, lse, starts, starts, 300, 513, **options)
    assert loaded == ahead and not world.mha


def test_tensors_that_require_grad(monkeypatch: pytest.MonkeyPatch) -> None:
    """No graph is made of them. Kernels are loaded for the gradients that they need."""
    torch = pytest.importorskip("torch")
    from calls.constants import installed

    needed: list[Any] = []
    q = torch.zeros(2, 3, 4, 16, dtype=torch.float16, requires_grad=True)
    frozen = q.detach()
    with installed() as launches:
        prepared = mha_backward.PreparedMhaBackward

        def recorded(call: Any, capturing: Any) -> Any:
            needed.append(tuple(call.needs))
            return prepared(call, capturing)

        monkeypatch.setattr(mha_backward, "PreparedMhaBackward", recorded)
        for arrays in ((q, frozen, frozen), (frozen, q, q), (frozen, frozen, frozen)):
            rawmla.warmup_call(rawmla.flash_attn_func, *arrays, backward=True)
        monkeypatch.undo()
        assert not launches.forward and not launches.backward and launches.skipped == [NO_LAUNCH] * 6
        # Where nothing requires grad, all are loaded.
        assert needed == [(True, False, False, False), (False, True, True, False), (True, True, True, False)]
        kv = torch.zeros(9, 1, 576, dtype=torch.bfloat16, requires_grad=True)
        rows = torch.zeros(2, 1, 64, dtype=torch.int32)
        with pytest.raises(ValueError, match="^kv: expected a tensor that needs no gradient"):
            rawmla.warmup_call(rawmla.flash_mla_sparse_fwd, kv.detach(), kv, rows, 0.1)


def test_backward_that_is_refused(world: World) -> None:
    with pytest.raises(TypeError, match="^backward: expected a bool"):
        rawmla.warmup_call(rawmla.flash_attn_func, **all_arguments(MHA), backward=1)
    for function in (rawmla.flash_attn_backward, rawmla.create_block_mask):
        text = f"^backward: expected False, as {function.__name__} has no backward, got True"
        with pytest.raises(ValueError, match=text):
            rawmla.warmup_call(function, backward=True)
    assert world.untouched


# ---- flex attention


@pytest.mark.parametrize("size", (128, 32, 2**20))
@pytest.mark.parametrize(
    ("function", "make"),
    ((rawmla.flex_attention, plain), (rawmla.flex_attention_backward, backward.plain)),
    ids=("forward", "backward"),
)
def test_flex_attention(world: World, function: Any, make: Callable[[], Arguments], size: int) -> None:
    """Its kernels are those of the call; captured arrays stay what they are, whatever their stream."""
    other = FakeFramework("other", stream=0x99)
    mod = rawmla.CudaMod("bias(h, q_idx) < limit", {"bias": table(framework=other), "limit": 0.5})
    arguments = make() | {"block_mask": mask_of(size=size, full=False, mask_mod=mod)}
    arguments["score_mod"] = backward.score_mod(framework=other)
    rawmla.warmup_call(function, **arguments)
    (launch,) = world.flex + world.flex_backward
    assert launch.stream == NO_LAUNCH and launch.addresses[:3] == (0x1000, 0x2000, 0x3000)
    assert {x.stream for x in world.enqueued} <= {NO_LAUNCH}
    assert not world.framework.allocated and not world.framework.copied
    loaded, other.stream = list(world.loaded), world.framework.stream
    function(**arguments)
    _, called = world.flex + world.flex_backward
    assert called.call == launch.call and called.stream == 0x51 and world.loaded == loaded * 2


@pytest.mark.parametrize("name", ("kv_num_blocks", "kv_indices"))
def test_flex_attention_with_what_would_be_copied(world: World, name: str) -> None:
    mask, arguments = mask_of(), plain()
    setattr(mask, name, getattr(mask, name).but(dtype="int64"))
    for one in ("key", "value"):
        change(one, dtype="float8_e4m3fn")(arguments)
    rawmla.warmup_call(rawmla.flex_attention, **arguments, block_mask=mask)
    assert world.flex[0].stream == NO_LAUNCH
    assert not world.framework.allocated and not world.framework.copied


def test_create_block_mask(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels are loaded; nothing is made, neither with a framework nor as lists."""
    monkeypatch.setattr(create, "framework_named", lambda name: world.framework)
    arguments: dict[str, Any] = {"device": 1, "BLOCK_SIZE": 64, "dq_kv_order": False}
    assert rawmla.warmup_call(rawmla.create_block_mask, "q_idx > 3", None, 2, L, S, **arguments) is None
    assert not world.enqueued and not world.framework.allocated
    loaded = list(world.loaded)
    rawmla.create_block_mask("q_idx > 3", None, 2, L, S, **arguments)
    assert {x.stream for x in world.enqueued} == {0x52} and set(world.loaded) == set(loaded)
