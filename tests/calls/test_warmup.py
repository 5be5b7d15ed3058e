"""`rawmla.warmup_call` beside what test_launches.py has of every operation: plans, gradients, functions."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import rawmla
from calls import test_dense as dense
from calls.fakes import (
    FakeArray,
    FakeFramework,
    World,
    dense_arguments,
    make_world,
    sparse_arguments,
)
from rawmla import jit
from rawmla.call import memo
from rawmla.flex import create
from rawmla.jit import NO_LAUNCH, KernelSpec
from rawmla.kernels import mha_backward, mha_forward

decode = rawmla.flash_mla_with_kvcache


def plan_without_class() -> Any:
    """A plan object of another library."""
    return SimpleNamespace(have_initialized=False, config=None, tile_scheduler_metadata=None, num_splits=None)


@pytest.mark.parametrize("make", (dense_arguments, sparse_arguments), ids=("dense", "sparse"))
@pytest.mark.parametrize("filled", (False, True))
@pytest.mark.parametrize("plan_class", (rawmla.FlashMLASchedMeta, plan_without_class))
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

FIXED = {**dense.fixed(), "causal": True, "softcap": 5.0}
VARLEN = {**dense.optional(), "window_size": (3, 0)}
RENAMED = {
    {"cu_seqlens_q": "cu_seqlens_qo", "max_seqlen_k": "max_seqlen_kv", "attn_sink": "learnable_sink"}.get(
        n, n
    ): x
    for n, x in VARLEN.items()
}
PREPARED = {mha_forward: "PreparedMhaForward", mha_backward: "PreparedMhaBackward"}
MHA_CALLS = {
    "fixed": (rawmla.flash_attn_func, FIXED),
    "varlen": (rawmla.flash_attn_varlen_func, VARLEN),
    "renamed": (rawmla.flash_attn_varlen_func, RENAMED),
    "qkv": (
        rawmla.flash_attn_varlen_qkvpacked_func,
        {**dense.packed_qkv(40, 8, 320), "head_dim_qk": 128},
    ),
    "qkv4": (rawmla.flash_attn_varlen_qkvpacked_func, dense.packed_qkv(40, 3, 8, 128)),
    "kv": (
        rawmla.flash_attn_varlen_kvpacked_func,
        {**dense.packed_kv(56, 2, 192), "head_dim_qk": 128, "alibi_slopes": FakeArray((8,), "float32")},
    ),
}


@pytest.mark.parametrize("backward", (False, True))
@pytest.mark.parametrize("name", MHA_CALLS)
def test_dense_attention(world: World, name: str, backward: bool) -> None:
    function, arguments = MHA_CALLS[name]
    assert rawmla.warmup_call(function, **arguments, backward=backward) is None
    assert [launch.stream for launch in world.mha] == [NO_LAUNCH]
    # With sinks once more: with a gradient of lse there is another kernel.
    has_sink = "attn_sink" in arguments or "learnable_sink" in arguments
    wanted = [False, True][: 1 + has_sink] * backward
    assert [launch.call.has_dlse for launch in world.mha_backward] == wanted
    assert {launch.stream for launch in world.mha_backward} <= {NO_LAUNCH}
    assert not world.framework.allocated and not world.framework.copied and not world.framework.filled
    if backward:
        forward, other = world.mha[0].call, world.mha_backward[0].call
        for field in set(forward._fields) & set(other._fields) - {"lse_strides"}:
            assert getattr(forward, field) == getattr(other, field), field
        assert other.lse_strides[2] == forward.lse_strides[1] or name == "fixed"


@pytest.mark.parametrize("name", MHA_CALLS)
def test_kernels_of_dense_attention_and_its_backward(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Those that are loaded ahead are those that the call and its gradients load."""
    loaded: list[KernelSpec] = []
    real = {module: getattr(module, prepared) for module, prepared in PREPARED.items()}
    world = make_world(monkeypatch)
    for module, prepared in PREPARED.items():
        monkeypatch.setattr(module, prepared, real[module])

    def get_kernel(spec: KernelSpec, device: int, *, capturing: Any) -> Any:
        loaded.append(spec)
        launch = SimpleNamespace(launch=lambda *args: None)
        return SimpleNamespace(prepare=lambda *args, **more: launch)

    monkeypatch.setattr(jit, "get_kernel", get_kernel)
    monkeypatch.setattr(jit, "tensor_map", lambda *args, **more: b"")
    function, arguments = MHA_CALLS[name]
    rawmla.warmup_call(function, **arguments, backward=True)
    ahead = [*loaded]
    assert {spec.name for spec in ahead} >= {"mha_forward", "mha_backward", "mha_backward_finish"}
    assert ("mha_backward_clear" in {spec.name for spec in ahead}) == (name != "fixed")
    loaded.clear()
    memo.clear_all()
    out, lse = function(**arguments)
    if name == "fixed":
        rawmla.flash_attn_backward(out, out=out, lse=lse, **arguments)
    elif name in ("varlen", "renamed"):
        rawmla.flash_attn_varlen_backward(out, out=out, lse=lse, **arguments)
        if "attn_sink" in arguments or "learnable_sink" in arguments:
            rawmla.flash_attn_varlen_backward(out, out=out, lse=lse, **arguments, dlse=lse)
    else:  # equal head dimensions and flags in arrays of their own
        rows = 40 if name.startswith("qkv") else 56
        heads = 8 if name.startswith("qkv") else 2
        q, k = FakeArray((40, 8, 128), "bfloat16"), FakeArray((rows, heads, 128), "bfloat16")
        v = FakeArray((rows, heads, out.shape[-1]), "bfloat16")
        starts = FakeArray((4,))
        slopes = arguments.get("alibi_slopes")
        rawmla.flash_attn_varlen_backward(out, q, k, v, out, lse, starts, starts, 20, 20, alibi_slopes=slopes)
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


@pytest.mark.parametrize(
    ("function", "changes", "kind", "text"),
    (
        (rawmla.flash_attn_func, {"backward": 1}, TypeError, "backward: expected a bool"),
        (
            rawmla.flash_attn_backward,
            {name: FakeArray((3, 7, 2, 64), "bfloat16") for name in ("dout", "out", "q", "k", "v")}
            | {"lse": FakeArray((3, 2, 7), "float32"), "causal": False, "softcap": 0.0},
            ValueError,
            "backward: expected False, as flash_attn_backward has no backward, got True",
        ),
        (
            rawmla.create_block_mask,
            {},
            ValueError,
            "backward: expected False, as create_block_mask has no backward, got True",
        ),
    ),
)
def test_backward_that_is_refused(
    world: World, function: Callable[..., Any], changes: Any, kind: Any, text: str
) -> None:
    with pytest.raises(kind, match=f"^{text}"):
        rawmla.warmup_call(function, **{**FIXED, "backward": True, **changes})
    assert not world.mha_backward and not world.framework.allocated


L, S = 300, 500


def flex_arguments(**changes: Any) -> dict[str, Any]:
    query, key = (
        FakeArray((2, 4, L, 64), "bfloat16", ptr=0x1000),
        FakeArray((2, 4, S, 64), "bfloat16", ptr=0x2000),
    )
    return {"query": query, "key": key, "value": key, **changes}


def flex_mask(size: int, dtype: str = "int32") -> rawmla.BlockMask:
    shape = (1, 1, -(-L // size), -(-S // size))
    lists = [FakeArray(shape[:3], ptr=0x3000), FakeArray(shape, dtype, ptr=0x4000)]
    bias = FakeArray((4, L), "float32", ptr=0x5000)
    mod = rawmla.CudaMod("bias(h, q_idx) < limit", {"bias": bias, "limit": 0.5})
    return rawmla.BlockMask((L, S), *lists, BLOCK_SIZE=size, mask_mod=mod)


@pytest.mark.parametrize("size", (128, 32, 2**20))
def test_flex_attention(world: World, size: int) -> None:
    """Its kernels are those of the call; captured arrays stay what they are, whatever their stream."""
    arguments = flex_arguments(block_mask=flex_mask(size))
    other = FakeFramework("other", stream=0x99)
    bias = FakeArray((4, S), "float32", ptr=0x6000, framework=other)
    arguments["score_mod"] = rawmla.CudaMod("score + bias(h, kv_idx)", {"bias": bias})
    assert rawmla.warmup_call(rawmla.flex_attention, **arguments, return_lse=True) is None
    (launch,) = world.flex
    assert launch.stream == NO_LAUNCH and launch.addresses[:3] == (0x1000, 0x2000, 0x2000)
    assert {x.stream for x in world.enqueued} <= {NO_LAUNCH}
    assert not world.framework.allocated and not world.framework.copied
    loaded, other.stream = list(world.loaded), world.framework.stream
    rawmla.flex_attention(**arguments, return_lse=True)
    assert world.flex[1].call == launch.call and world.flex[1].stream == 0x51
    assert world.loaded == loaded * 2


@pytest.mark.parametrize("name", ("kv_num_blocks", "kv_indices"))
def test_flex_attention_with_what_would_be_copied(world: World, name: str) -> None:
    mask = flex_mask(128)
    setattr(mask, name, getattr(mask, name).but(dtype="int64"))
    key = FakeArray((2, 4, S, 64), "float8_e4m3fn", ptr=0x2000)
    rawmla.warmup_call(rawmla.flex_attention, **flex_arguments(block_mask=mask, key=key, value=key))
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
