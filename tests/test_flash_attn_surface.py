"""Every call that flash-attn binds, ours binds too, and with the same meaning and the same form of results.

tests/data/flash_attn_surface.json has the signatures of the three generations, as their Python source has
them, and what arguments are called in the core, whose functions are stubs here that note what reaches them.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from importlib import import_module
from math import inf
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import rawmla  # noqa: E402
from rawmla.api import dense, dense_backward  # noqa: E402
from rawmla.compat import usage  # noqa: E402

NAMES = "fa2 fa3 fa4 bert_padding rotary fa2_cuda fa3_config fa3_ops refusals"
fa2, fa3, fa4, bert_padding, rotary, fa2_cuda, fa3_config, fa3_ops, refusals = [
    import_module(f"rawmla.compat.flash_attn.{name}") for name in NAMES.split()
]
TABLE = json.loads((Path(__file__).parent / "data" / "flash_attn_surface.json").read_text())
MODULES = dict(zip(TABLE["functions"], (fa2, fa3, fa4, bert_padding, rotary, rotary), strict=True))
FUNCTIONS = [(module, name) for module, functions in TABLE["functions"].items() for name in functions]
B, S, H, D = 2, 3, 4, 8


def function_of(signature: str, result: Any = None) -> Callable[..., Any]:
    return eval(f"lambda {signature[1:-1]}: result", {"torch": torch, "result": result})


def ours(module: str, name: str) -> Callable[..., Any]:
    return attrgetter(name)(MODULES[module])


@pytest.mark.parametrize(("module", "name"), FUNCTIONS)
def test_signature(module: str, name: str) -> None:
    theirs = function_of(TABLE["functions"][module][name])
    mine = inspect.signature(ours(module, name))
    assert not any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in mine.parameters.values())
    added = [p for p in mine.parameters.values() if p.kind is p.KEYWORD_ONLY]
    assert {p.name for p in added} <= {"s_aux", "seqused_k", "out"} and all(p.default is None for p in added)
    listed = [(p.name, p.default) for p in mine.parameters.values() if p not in added]
    assert listed == [(p.name, p.default) for p in inspect.signature(theirs).parameters.values()]
    assert inspect.isfunction(ours(module, name)) and inspect.getfullargspec(ours(module, name)).args


def test_other_names() -> None:
    for name, count in TABLE["extension"].items():
        assert len(inspect.signature(getattr(fa2_cuda, name)).parameters) == count, name
    for name in ("forward", "backward", "varlen_forward", "varlen_backward"):
        assert getattr(fa2, f"_wrapped_flash_attn_{name}") is getattr(fa2, f"_flash_attn_{name}")
    assert sum(name.startswith("flash") for name in fa2.__all__) == 7
    assert rotary.apply_rotary_emb_func is rotary.apply_rotary_emb
    for name, schema in fa3_ops.SCHEMAS.items():
        defined = str(getattr(torch.ops.flash_attn_3, name).default._schema)
        assert defined.replace("softcap=0.,", "softcap=0.0,") == f"flash_attn_3::{name}{schema}"
    given = torch.ops.flash_attn_3.fwd.default._schema.arguments
    assert [one.default_value for one in given] == list(fa3_ops._FWD_DEFAULTS)
    flags = fa3_config.CONFIG["build_flags"]
    assert not flags["FLASHATTENTION_DISABLE_HDIM256"]
    assert flags["FLASH_ATTENTION_DISABLE_HDIMDIFF64"]  # LMDeploy would pass qv


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Calls of the stub core, with its own defaults. Its first query sees no key."""
    noted: list[Any] = []

    def stub(home: Any, name: str, core: Callable[..., Any]) -> None:
        form = inspect.signature(core)

        def call(*args: Any, **kwargs: Any) -> Any:
            bound = form.bind(*args, **kwargs)
            bound.apply_defaults()
            noted.append(SimpleNamespace(function=name, given=bound.arguments))
            given = bound.arguments
            if "backward" in name:
                return given["dq"], given["dk"], given["dv"]
            q = given["qkv"].unbind(1)[0] if "qkv" in given else given["q"]
            out = torch.empty_like(q) if given["out"] is None else given["out"]
            lse = torch.zeros(q.transpose(-3, -2).shape[:-1])  # heads before tokens
            lse.view(-1)[0] = -inf
            return out, lse if q.ndim == 4 else lse.t()

        monkeypatch.setattr(home, name, call)

    for home in (dense, dense_backward):
        for name in home.__all__:
            stub(home, name, getattr(home, name))
    stub(rawmla, "flash_attn_with_kvcache", rawmla.flash_attn_with_kvcache)
    return noted


def array(*shape: int) -> Any:
    return torch.ones(shape, dtype=torch.bfloat16)


def address(x: Any) -> Any:
    return x.data_ptr() if isinstance(x, torch.Tensor) else x


def ints(*shape: int) -> Any:
    return torch.ones(shape, dtype=torch.int32)


VALUES, CORE_NAMES = TABLE["values"], TABLE["core"]["names"]
IGNORED = {*VALUES["ignored"], *VALUES["fixed"]}  # these need not reach the core


def values(module: str, name: str) -> dict[str, Any]:
    """A value for every argument, if possible anything but its default, so that a swap of two shows."""
    varlen = "varlen" in name or (module == "flash_attn_interface" and name.startswith("_"))
    tokens = (S,) if varlen else (B, S)
    made: dict[str, Any] = {}
    for place, parameter in enumerate(inspect.signature(ours(module, name)).parameters):
        value: Any = torch.ones(H, place + 1)
        of_cache = parameter in ("block_table", "page_table", "rotary_cos", "rotary_sin")
        if parameter in VALUES["fixed"] or of_cache > ("kvcache" in name):
            value = VALUES["fixed"].get(parameter)
        elif parameter in VALUES["true"]:
            value = True
        elif parameter in VALUES["numbers"]:
            value = place + 2 if "max" in parameter else place + 0.5
        elif parameter.startswith("window_size"):
            value = (place, place + 1) if parameter == "window_size" else place
        elif "seqlens" in parameter or "used_" in parameter or "idx" in parameter:
            value = ints(B + 1)
        elif parameter in ("qkv", "kv"):
            value = array(*tokens, len(parameter), H, D)
        elif parameter in ("q", "k", "v", "out", "out_", "dout", "k_cache", "v_cache"):
            value = array(*tokens, H, D)
        elif "sink" in parameter or parameter == "s_aux":
            value = torch.ones(H)
        made[parameter] = value
    return made


ATTEND = re.compile("_?flash_attn_(?!combine)")


@pytest.mark.parametrize(("module", "name"), [one for one in FUNCTIONS if ATTEND.match(one[1])])
def test_calls(reached: list[Any], module: str, name: str) -> None:
    """Every number of positional arguments, the rest by keyword."""
    form = inspect.signature(ours(module, name)).parameters
    given = values(module, name)
    order = [p.name for p in form.values() if p.kind is not p.KEYWORD_ONLY]
    for count in range(len(order) + 1):
        head = [given[parameter] for parameter in order[:count]]
        ours(module, name)(*head, **{key: x for key, x in given.items() if key not in order[:count]})
    kvcache = "flash_attn_with_kvcache"
    assert [one.function == kvcache for one in reached] == [name == kvcache] * (len(order) + 1)
    if "window_size_left" in given:
        given["window_size"] = given.pop("window_size_left"), given.pop("window_size_right")
    for got in (one.given for one in reached):
        for parameter, value in given.items():
            to = CORE_NAMES.get(parameter, parameter)
            if to in got and value is not None:
                assert address(value) == address(got[to]), parameter
            elif value is not None and parameter not in IGNORED:  # packed ones are taken apart
                assert (parameter in ("qkv", "kv")) > ("varlen" in name), parameter


@pytest.mark.parametrize("module", [fa2, fa3])
def test_results(reached: list[Any], module: Any) -> None:
    """What comes back, by generation; the first query sees no key."""
    q, x = array(B, H, S, D).transpose(1, 2), array(B, S - 1, H, D)
    packed, starts = array(S, H, D), ints(B + 1)
    empty = inf if module is fa2 else -inf
    out, lse, *rest = module.flash_attn_func(q, x, x, return_attn_probs=True)
    assert out.is_contiguous() is (module is fa3) and out.shape == q.shape
    assert lse.shape == (B, H, S) and lse[0, 0, 0] == empty and lse[1, 1, 1] == 0
    assert [(r.dtype, r.shape) for r in rest] == [(q.dtype, (0,))] * (module is fa2)
    _, lse, *rest = module.flash_attn_varlen_func(*[packed] * 3, starts, starts, S, S, return_attn_probs=True)
    assert lse.shape == (H, S) and lse.is_contiguous() and lse[0, 0] == empty and len(rest) == (module is fa2)
    assert all(torch.is_tensor(f(q, x, x)) for f in (module.flash_attn_func, module.flash_attn_with_kvcache))
    _, lse, *rest = module.flash_attn_with_kvcache(q, x, x, return_softmax_lse=True)
    assert lse.shape == (B, H, S) and lse[0, 0, 0] == empty and len(rest) == 2 * (module is fa3)


def test_results_of_fa4(reached: list[Any]) -> None:
    q, x, starts = array(B, H, S, D).transpose(1, 2), array(B, S - 1, H, D), ints(B + 1)
    out, none = fa4.flash_attn_func(q, x, x)
    assert out.is_contiguous() and none is None
    _, lse = fa4.flash_attn_func(q, x, x, learnable_sink=torch.full((H,), 2.0), return_lse=True)
    assert lse[0, 0, 0] == 2.0 and lse[1, 1, 1] > 2.0 and lse.shape == (B, H, S)
    assert fa4.flash_attn_func(q.clone().requires_grad_(), x, x)[1][0, 0, 0] == -inf
    _, lse = fa4.flash_attn_varlen_func(*[array(S, H, D)] * 3, None, starts, starts, S, S, return_lse=True)
    assert lse.shape == (H, S) and lse.is_contiguous()
    fa4.flash_attn_varlen_func(q, x, x, seqused_k=starts)
    assert reached[-1].function == "flash_attn_with_kvcache"
    fa4.flash_attn_varlen_func(q, x, x)  # requests of one length
    assert reached[-1].function == "flash_attn_func"


def test_private_results(reached: list[Any]) -> None:
    q, x, starts, pages, table = (
        array(B, S, H, D),
        array(S, H, D),
        ints(B + 1),
        array(9, 16, H, D),
        ints(B, 3),
    )
    _, lse, nothing, state = fa2._flash_attn_forward(q, q, q, 0.0, 1.0, False, -1, -1, 0.0, None, False)
    assert lse.shape == (B, H, S) and nothing.shape == (0,) and state.dtype is torch.int64
    numbers = starts, starts, S, S, 0.0, 1.0, False
    out, lse, *_ = fa2._flash_attn_varlen_forward(x, x, x, *numbers, zero_tensors=True)
    assert lse.shape == (H, S) and not out.any() and out is reached[-1].given["out"]
    fa2._flash_attn_varlen_forward(x, pages, pages, *numbers, block_table=table, leftpad_k=starts)
    got = reached[-1].given
    assert got["cache_leftpad"] is got["cu_seqlens_k"] is starts and got["cache_seqlens"] is None
    with pytest.raises(RuntimeError, match="num_splits > 1 is not supported"):
        fa2._flash_attn_varlen_forward(x, pages, pages, *numbers, block_table=table, num_splits=2)
    fa2.flash_attn_varlen_func(x, pages, pages, *numbers[:4], block_table=table, seqused_k=table)
    got = reached[-1].given
    assert got["cu_seqlens_k"] is None and got["cache_seqlens"] is table and got["max_seqlen_q"] == S
    fa3._flash_attn_forward(q, q, q, rotary_cos=q)
    assert reached[-1].function == "flash_attn_with_kvcache" and reached[-1].given["rotary_cos"] is q
    fa3._flash_attn_forward(q, q, q, q, q, rotary_cos=q, seqlens_rotary=starts)
    assert reached[-1].given["rotary_seqlens"] is starts
    fa3._flash_attn_forward(q, q, q, seqused_k=starts, seqlens_rotary=starts)
    assert reached[-1].given["rotary_seqlens"] is None  # upstream reads it with rotary_cos alone
    fa3.flash_attn_with_kvcache(q, q, q, rotary_seqlens=starts)
    assert reached[-1].given["rotary_seqlens"] is None
    fa3._flash_attn_forward(q, q, q, q, q, seqused_k=starts, num_splits=3)
    assert reached[-1].function == "flash_attn_with_kvcache" and reached[-1].given["num_splits"] == 3
    fa2_cuda.fwd(q.requires_grad_(), q, q, None, None, 0.0, 1.0, False, -1, -1, 0.0, False)
    assert not any(reached[-1].given[name].requires_grad for name in "qkv")
    out, *rest = fa3_ops._fwd(q, q, q)
    assert reached[-1].function == "flash_attn_func" and len(rest) == 3 and not out.requires_grad
    gradients, numbers = [torch.empty_like(q) for _ in range(3)], (S, S, 0.5, True, 3, 4, 2.0, True, 0)
    assert len(fa3_ops._bwd(q, q, q, q, q, lse, *gradients, *[None] * 4, *numbers)) == 5
    got = reached[-1].given
    assert all(got[name] is x for name, x in zip(("dq", "dk", "dv"), gradients, strict=True))
    assert (got["softmax_scale"], got["causal"], got["window_size"], got["softcap"]) == (
        0.5,
        True,
        (3, 4),
        2.0,
    )
    x = q.detach().requires_grad_()
    for backward in (fa2._flash_attn_backward, fa2_cuda.bwd, fa3._flash_attn_backward):
        names = [*inspect.signature(backward).parameters][:9]
        options = {"dropout_p": 0.0, "alibi_slopes": None, "window_size_left": -1, "window_size_right": -1}
        options |= {"p_dropout": 0.0, "softmax_scale": 1.0, "causal": True, "is_causal": True, "softcap": 0.0}
        options |= {"deterministic": False, "dq": q, "dk": q, "dv": q}
        known = {key: y for key, y in options.items() if key in inspect.signature(backward).parameters}
        backward(**dict.fromkeys(names[:6], x) | known)
        assert not any(
            reached[-1].given[name].requires_grad for name in ("dout", "q", "k", "v", "out", "lse")
        )
    dq, *rest = fa2_cuda.bwd(q, q, q, q, q, lse, q, q, q, None, 0.0, 1.0, True, -1, -1, 0.0, True)
    assert reached[-1].given["causal"] is reached[-1].given["deterministic"] is True and dq is q
    assert len(fa2_cuda.fwd_kvcache(*[q] * 5, *[None] * 8, 1.0, True, -1, -1, 0.0, True, 4)) == 2
    assert reached[-1].given["num_splits"] == 4 and not reached[-1].given["k"].requires_grad


@pytest.mark.parametrize("window", [(3, 4), [3, 4], torch.tensor([3, 4])], ids=["tuple", "list", "tensor"])
def test_windows_and_lengths(reached: list[Any], window: Any) -> None:
    q, k, starts = array(S, H, D), array(5, H, D), ints(B + 1)
    fa2.flash_attn_varlen_func(
        q, k, k, starts, starts, torch.tensor(7), torch.tensor(8), window_size=window, s_aux=starts
    )
    got = reached[-1].given
    assert tuple(got["window_size"]) == (3, 4) and got["attn_sink"] is starts
    x = array(1, S, H, D)
    for causal, pair, meant in (
        (False, window, (3, 4)),
        (False, (-1, 0), (None, None)),
        (True, (5, -1), (5, 0)),
    ):
        fa4.flash_attn_func(x, x, x, causal=causal, window_size=pair)
        assert reached[-1].given["window_size"] == meant  # a negative sum is no window in FlashAttention-4
    assert (got["max_seqlen_q"], got["max_seqlen_k"]) == (7, 8) and type(got["max_seqlen_q"]) is int
    on_device = torch.empty((), dtype=torch.int32, device="meta")  # reading one raises
    for function in (fa2.flash_attn_varlen_func, fa3.flash_attn_varlen_func):
        function(q, k, k, starts, starts, on_device, on_device)
        assert (reached[-1].given["max_seqlen_q"], reached[-1].given["max_seqlen_k"]) == (S, 5)
    fa2.flash_attn_varlen_qkvpacked_func(array(S, 3, H, D), starts, on_device)
    assert reached[-1].given["max_seqlen"] == S
    fa3.flash_attn_with_kvcache(q, q, q, cu_seqlens_q=starts, max_seqlen_q=on_device, cu_seqlens_k_new=starts)
    assert reached[-1].given["max_seqlen_q"] == S and reached[-1].given["cu_seqlens_k_new"] is None
    fa3.flash_attn_qkvpacked_func(array(B, S, H + 4, D), num_heads_q=H)
    assert reached[-1].given["q"].shape[2] == H and reached[-1].given["v"].shape[2] == 2


def test_dropout(reached: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    q = array(B, S, H, D)
    with pytest.raises(ValueError, match='dropout_p: .* got 0.1; .*install_flash_attn.dropout="ignore".'):
        fa2.flash_attn_func(q, q, q, 0.1)
    monkeypatch.setattr(refusals, "_dropout", "ignore")
    monkeypatch.setattr(refusals, "_has_warned", False)
    with pytest.warns(UserWarning, match="0.1 is taken as 0") as caught:
        for _ in range(2):
            fa2.flash_attn_func(q, q, q, 0.1)
    assert len(caught) == 1 and [one.given["dropout_p"] for one in reached] == [0.0, 0.0]


ROTATED = {"q": array(1, 3, 1, 8), "k_cache": array(1, 16, 1, 8), "rotary_cos": array(16, 4)}
REFUSED = [
    (
        fa2.flash_attn_func,
        {"q": torch.ones(1, 1, 1, 8)},
        "q: expected bfloat16 or float16, got float32; cast",
    ),
    (fa2.flash_attn_func, {"q": None}, "q: expected a tensor, got NoneType"),
    *(
        (
            fa2.flash_attn_with_kvcache,
            {**ROTATED, "window_size": window},
            "window_size: expected -1",
        )
        for window in ((-1, 2), (15, -1), (15, 4), (16, 2))
    ),
    (
        fa3.flash_attn_func,
        {"q": torch.ones(1).to(torch.float8_e4m3fn)},
        "q: not supported .* in float8_e4m3fn",
    ),
    (fa3.flash_attn_func, {"qv": 1}, "qv: not supported by rawmla; call"),
    (fa3.flash_attn_func, {"attention_chunk": 4}, "attention_chunk: not supported by rawmla"),
    (fa3.flash_attn_func, {"num_splits": -1}, "num_splits: expected at least 0, got -1"),
    (fa3.flash_attn_func, {"pack_gqa": 1}, "pack_gqa: expected None or a bool, got int"),
    (fa3.flash_attn_func, {"sm_margin": None}, "sm_margin: expected an int, got NoneType"),
    (fa3.flash_attn_with_kvcache, {"scheduler_metadata": torch.ones(3)}, "scheduler_metadata: .*int32"),
    (fa3.flash_attn_with_kvcache, {"scheduler_metadata": ints(3, 2)}, "scheduler_metadata: .*one dimension"),
    (fa3.flash_attn_qkvpacked_func, {"qkv": array(1, 2, 3, 8)}, "num_heads_q: expected an int"),
    (fa2.flash_attn_qkvpacked_func, {"qkv": array(1, 2, 2, 1, 8)}, r"qkv: expected shape \[b, s, 3, h, d\]"),
    (fa2.flash_attn_kvpacked_func, {"kv": array(1, 2, 1, 8)}, r"kv: expected shape \[b, s, 2, h, d\]"),
    (fa3._flash_attn_forward, {"num_splits": 1.5}, "num_splits: expected an int, got float"),
    (
        fa3._flash_attn_backward,
        {"dout": 0, "out": 0, "softmax_lse": 0, "sequed_k": ints(1)},
        "sequed_k: not supported by rawmla; pass cu_seqlens_q and cu_seqlens_k",
    ),
    (fa4.flash_attn_func, {"mask_mod": len}, "mask_mod: .*rawmla.flex_attention"),
    (fa4.flash_attn_varlen_func, {"seqused_q": ints(1)}, "seqused_q: not supported"),
    *((fa4.flash_attn_func, {"window_size": w}, "window_size: .*pass None") for w in ((5, -1), (None, -1))),
]


@pytest.mark.parametrize("window", [(-1, 1), (14, -1), (-1, -1), (-1, 16), (16, 1), (99, 16)])
def test_windows_with_rotation(reached: list[Any], window: tuple[int, int]) -> None:
    """Those that hide a key, and those that FlashAttention-2 does not count either."""
    fa2.flash_attn_with_kvcache(v_cache=array(1, 16, 1, 8), **ROTATED, window_size=window)
    assert reached[-1].given["window_size"] == window


@pytest.mark.parametrize(("function", "arguments", "text"), REFUSED)
def test_refusals(reached: list[Any], function: Any, arguments: dict[str, Any], text: str) -> None:
    names = inspect.signature(function).parameters
    needed = {name: array(1, 1, 1, 8) for name in ("q", "k", "v", "k_cache", "v_cache") if name in names}
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=f"^{text}"):
        function(**needed | arguments)
    assert not reached


@pytest.mark.parametrize("module", [fa2, fa3, fa4])
def test_numbers(module: Any) -> None:
    """While torch traces a call, it runs on the CPU, in rawmla's reference."""
    q, k, v = [torch.randn(2, 5, h, 16, dtype=torch.bfloat16, requires_grad=True) for h in (4, 2, 2)]

    @torch.compile(fullgraph=True, backend="aot_eager")
    def attend(q: Any, k: Any, v: Any) -> Any:
        got = module.flash_attn_func(q, k, v, causal=True)
        return got[0] if module is fa4 else got

    heads = [x.transpose(1, 2) for x in (q, k, v)]
    attention = torch.nn.functional.scaled_dot_product_attention
    expected = attention(*heads, is_causal=True, enable_gqa=True).transpose(1, 2)
    out, dout = attend(q, k, v), torch.randn(2, 5, 4, 16, dtype=torch.bfloat16)
    wanted = torch.autograd.grad(expected, (q, k, v), dout)
    for x, y in zip((out, *torch.autograd.grad(out, (q, k, v), dout)), (expected, *wanted), strict=True):
        torch.testing.assert_close(x, y, atol=0.05, rtol=0.05)
    if module is not fa4:  # the last query, over a cache
        decode = torch.compile(module.flash_attn_with_kvcache, fullgraph=True, backend="aot_eager")
        out = decode(*[x.detach() for x in (q[:, -1:], k, v)], cache_seqlens=5)
        torch.testing.assert_close(out, expected[:, -1:], atol=0.05, rtol=0.05)


def test_metadata_and_combine() -> None:
    given = (5, 1, 4096, 8, 2, 128, ints(5))
    options = ({}, {"causal": True}, {"window_size": (64, 0)}, {"window_size": (9999, 9999)})
    sizes = [fa3.get_scheduler_metadata(*given, **more).shape[0] for more in options]
    assert sizes == [1 + 8 * 3, 1 + 8 * 4, 1 + 8 * 3, 1 + 8 * 3]
    scores, v = torch.randn(B, S, H, 12), torch.randn(B, S, H, 12, D)
    scores[0, 0, 0] = -inf
    scores[:, :, 1, :4] = -inf
    parts = scores.unflatten(-1, (3, 4)).movedim(-2, 0)
    outs = (parts.softmax(-1).unsqueeze(-2) @ v.unflatten(-2, (3, 4)).movedim(-3, 0)).squeeze(-2)
    whole = torch.empty(B, S, H, D)
    out, lse = fa3.flash_attn_combine(outs, parts.logsumexp(-1), whole)
    torch.testing.assert_close(out, (scores.softmax(-1).nan_to_num().unsqueeze(-2) @ v).squeeze(-2))
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    assert lse.transpose(1, 2).is_contiguous() and out is whole
    assert fa3.flash_attn_combine(outs, parts.logsumexp(-1), None, torch.float16)[0].dtype is torch.float16
    with pytest.raises(ValueError, match="out: expected shape"):
        fa3.flash_attn_combine(outs, parts.logsumexp(-1), whole.expand(2, -1, -1, -1, -1))


def test_status(reached: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    q = array(B, S, H, D)
    monkeypatch.setattr(usage.USED["flash_attn.flash_attn_func"], "calls", 0)
    fa2.flash_attn_func(q, q, q)
    noted = rawmla.compat.status()["functions"]["flash_attn.flash_attn_func"]
    assert noted == {"calls": 1, "called_as": "FlashAttention-2", "shapes": [q.shape, q.shape]}
