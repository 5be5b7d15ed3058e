"""`rawmla.warmup_call`: a call up to its launches; arrays and launches are stand-ins."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import test_mha_calls as mha_calls
from calls.fakes import (
    B,
    FakeArray,
    FakeFramework,
    World,
    change,
    dense_arguments,
    make_world,
    out_array,
    prefill_arguments,
    sparse_arguments,
)

import rawmla
from rawmla import jit
from rawmla.call import memo
from rawmla.flex import create
from rawmla.jit import NO_LAUNCH, KernelSpec
from rawmla.kernels import mha_backward, mha_forward, mla_cache_write, mla_merge_states


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


@pytest.mark.parametrize("filled", (False, True))
def test_a_plan_object_of_another_library(world: World, filled: bool) -> None:
    """It is not filled either, and the call itself takes it afterwards."""
    fields = dict.fromkeys(("config", "tile_scheduler_metadata", "num_splits"))
    plan = SimpleNamespace(have_initialized=False, **fields)
    arguments = dense_arguments() | {"tile_scheduler_metadata": plan, "num_splits": None}
    if filled:
        rawmla.flash_mla_with_kvcache(**arguments)
    before = dict(vars(plan))
    rawmla.warmup_call(rawmla.flash_mla_with_kvcache, **arguments)
    assert vars(plan) == before
    rawmla.flash_mla_with_kvcache(**arguments)
    assert [launch.stream for launch in world.decodes] == [0x51] * filled + [NO_LAUNCH, 0x51]


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


# ---- dense attention and its backward

FIXED = {**mha_calls.fixed(), "causal": True, "softcap": 5.0}
VARLEN = {**mha_calls.optional(), "window_size": (3, 0)}
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
        {**mha_calls.packed_qkv(40, 8, 320), "head_dim_qk": 128},
    ),
    "qkv4": (rawmla.flash_attn_varlen_qkvpacked_func, mha_calls.packed_qkv(40, 3, 8, 128)),
    "kv": (
        rawmla.flash_attn_varlen_kvpacked_func,
        {**mha_calls.packed_kv(56, 2, 192), "head_dim_qk": 128, "alibi_slopes": FakeArray((8,), "float32")},
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


def test_dense_attention_by_position_with_out(world: World) -> None:
    call = mha_calls.plain()
    out = FakeArray((40, 8, 64), "bfloat16", ptr=0x7000)
    rawmla.warmup_call(rawmla.flash_attn_varlen_func, *call.values(), out=out, backward=True)
    assert world.mha[0].addresses.out == 0x7000 == world.mha_backward[0].addresses.out
    assert world.mha_backward[0].stream == NO_LAUNCH and not world.framework.allocated


def test_backward_of_dense_attention(world: World) -> None:
    """The plain functions for gradients, too."""
    out = FakeArray((40, 8, 64), "bfloat16", ptr=0x7000)
    lse = FakeArray((40, 8), "float32", ptr=0x8000)
    rawmla.warmup_call(
        rawmla.flash_attn_varlen_backward, out, out=out, lse=lse, **mha_calls.optional(), dq=None
    )
    assert [launch.stream for launch in world.mha_backward] == [NO_LAUNCH]
    assert not world.mha and not world.framework.allocated


def test_backward_without_keys(world: World) -> None:
    call = {**mha_calls.fixed()}
    for name, columns in (("k", 128), ("v", 64)):
        call[name] = FakeArray((3, 0, 2, columns), "bfloat16")
    rawmla.warmup_call(rawmla.flash_attn_func, **call, backward=True)
    assert not world.mha_backward and not world.framework.filled


def test_tensors_that_require_grad(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are looked at, and no graph is made of them."""
    torch = pytest.importorskip("torch")
    mha_on_cpu = pytest.importorskip("mha_on_cpu")
    launched = mha_on_cpu.install(monkeypatch, streams := [])
    q = torch.zeros(2, 3, 4, 16, dtype=torch.float16, requires_grad=True)
    rawmla.warmup_call(rawmla.flash_attn_func, q, q, q, backward=True)
    assert not launched and streams == [NO_LAUNCH] * 2
    needed: list[Any] = []
    prepared = mha_backward.PreparedMhaBackward

    def recorded(call: Any, capturing: Any) -> Any:
        needed.append(call.needs)
        return prepared(call, capturing)

    monkeypatch.setattr(mha_backward, "PreparedMhaBackward", recorded)
    frozen = q.detach()
    memo.clear_all()
    for arrays in ((q, frozen, frozen), (frozen, q, q), (frozen, frozen, frozen)):
        rawmla.warmup_call(rawmla.flash_attn_func, *arrays, backward=True)
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


def test_flex_attention_with_torchs_mask(world: World) -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    mask = flex.create_block_mask(flex.noop_mask, 1, 1, L, S, device="cpu")
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"):
        setattr(mask, name, FakeArray(tuple(getattr(mask, name).shape), "int64", ptr=0x3000))
    rawmla.warmup_call(rawmla.flex_attention, **flex_arguments(), block_mask=mask)
    assert world.flex[0].stream == NO_LAUNCH and not world.framework.copied


def test_flex_attention_refuses_what_the_call_refuses(world: World) -> None:
    elsewhere = FakeArray((4,), "float32", device=1)
    for changes, text in (
        ({"score_mod": rawmla.CudaMod("bias(h)", {"bias": elsewhere})}, "^score_mod: an array .* got cuda:1"),
        ({"block_mask": flex_mask(128)._adjust}, "^block_mask: expected a BlockMask, got method"),
        ({"scale": FakeArray(())}, "^scale: expected a float or None, got array"),
    ):
        with pytest.raises((TypeError, ValueError), match=text):
            rawmla.warmup_call(rawmla.flex_attention, **flex_arguments(**changes))
    assert world.untouched


def test_create_block_mask(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels are loaded; nothing is made, neither with a framework nor as lists."""
    monkeypatch.setattr(create, "framework_named", lambda name: world.framework)
    arguments: dict[str, Any] = {"device": 1, "BLOCK_SIZE": 64, "dq_kv_order": False}
    assert rawmla.warmup_call(rawmla.create_block_mask, "q_idx > 3", None, 2, L, S, **arguments) is None
    assert not world.enqueued and not world.framework.allocated
    loaded = list(world.loaded)
    rawmla.create_block_mask("q_idx > 3", None, 2, L, S, **arguments)
    assert {x.stream for x in world.enqueued} == {0x52} and set(world.loaded) == set(loaded)


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    (
        ({"Q_LEN": 2.5}, TypeError, "^Q_LEN: expected an int"),
        ({"BLOCK_SIZE": 100}, ValueError, "^BLOCK_SIZE: expected"),
        ({"mask_mod": None}, TypeError, "^mask_mod: expected a function"),
        ({"other": 1}, TypeError, "unexpected keyword argument 'other'"),
        ({"mask_mod": rawmla.CudaMod("q_idx >= kv_idx")}, None, ""),
    ),
)
def test_create_block_mask_refuses_what_the_call_refuses(
    world: World, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], kind: Any, text: str
) -> None:
    monkeypatch.setattr(create, "framework_named", lambda name: world.framework)
    arguments = {"mask_mod": "q_idx > 3", "B": 1, "H": 1, "Q_LEN": L, "KV_LEN": S, "device": 0, **changes}
    if kind is None:
        rawmla.warmup_call(rawmla.create_block_mask, **arguments)
    else:
        with pytest.raises(kind, match=text):
            rawmla.warmup_call(rawmla.create_block_mask, **arguments)
    assert bool(world.loaded) == (kind is None)
