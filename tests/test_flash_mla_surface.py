"""Every call that a version of FlashMLA binds, ours binds too, and with the same meaning.

tests/data/flash_mla_surface.json has the signatures of each version, as its Python source has them. The core
functions are stubs here that note what reaches them.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import rawmla
from rawmla.api import decode, dense, plan, sparse_prefill
from rawmla.compat import flash_mla, sgl_kernel
from rawmla.compat.flash_mla import cuda, flash_mla_interface, fused_norm_rope_attn_rope_cast
from rawmla.mha.records import DenseArrays, Packing, options_of
from rawmla.mla.plan import FlashMLASchedMeta

TABLE = json.loads((Path(__file__).parent / "data" / "flash_mla_surface.json").read_text())
MODULES = {
    "flash_mla": flash_mla,
    "flash_mla.flash_mla_interface": flash_mla_interface,
    "flash_mla.fused_norm_rope_attn_rope_cast": fused_norm_rope_attn_rope_cast,
    "rawmla.compat.sgl_kernel": sgl_kernel,
}
FUNCTIONS = [(version, one) for version, all in TABLE["versions"].items() for one in all]
SGL, VLLM, TENSORS = "sgl-flash-mla 1.0.0", "vLLM 0.33.0", "FlashMLA with plans of tensors (2025-09)"
Call = tuple[tuple[Any, ...], dict[str, Any]]


def signature(function: dict[str, str]) -> inspect.Signature:
    return inspect.signature(eval(f"lambda {function['signature'][1:-1]}: None"))


def ours(function: dict[str, Any]) -> Callable[..., Any]:
    return getattr(MODULES[function["module"]], function["name"])


def array(name: str, *shape: int) -> Any:
    return SimpleNamespace(name=name, shape=shape, dtype="bfloat16")


NUMBERS = (
    "head_dim_v d_v softmax_scale sm_scale num_q_tokens_per_head_k num_heads_k num_heads_q h_k h_q topk "
    "max_seqlen max_seqlen_qo max_seqlen_kv head_dim_qk dropout_p"
).split()
FLAGS = "causal is_fp8_kvcache enable_batch_invariant use_legacy return_log2_lse deterministic".split()
SPECIAL = {
    "k_cache": array("k_cache", 10, 64, 1, 656),
    "is_varlen": False,
    "kv_format": "V32",
    "tile_scheduler_metadata": FlashMLASchedMeta(),
    **dict.fromkeys(("num_splits", "descale_q", "descale_k")),
}


def values(version: str, function: dict[str, str]) -> dict[str, Any]:
    """A value for every argument that is anything but its default, so that a swap of two shows."""
    made = {name: array(name, 3, 2, 16, 576) for name in signature(function).parameters} | SPECIAL
    made |= {name: place + 2 for place, name in enumerate(NUMBERS)} | dict.fromkeys(FLAGS, True)
    if version == TENSORS:
        made |= {name: array(name, 5, 8) for name in ("tile_scheduler_metadata", "num_splits")}
    return made


DENSE = ("flash_attn_varlen_func", "flash_attn_varlen_qkvpacked_func", "flash_attn_varlen_kvpacked_func")
"""Functions that are rawmla's own, with FlashMLA's names of arguments beside FlashAttention's."""
SECOND_NAMES = {
    "cu_seqlens_qo": "cu_seqlens_q",
    "cu_seqlens_kv": "cu_seqlens_k",
    "max_seqlen_qo": "max_seqlen_q",
    "max_seqlen_kv": "max_seqlen_k",
}
CORE = ("get_mla_metadata", "get_mla_decoding_metadata", "flash_mla_with_kvcache", "flash_mla_sparse_fwd")
BY_TURNS = {name: place % 2 == 0 for place, name in enumerate(FLAGS)}
FURTHER: tuple[dict[str, Any], ...] = (
    {},
    {**dict.fromkeys(FLAGS, False), "out": None},
    {**BY_TURNS, "out": None},
    {name: not flag for name, flag in BY_TURNS.items()},
)
"""Further values, as types tell arguments apart: vLLM's out and enable_batch_invariant stand where
sgl-flash-mla's enable_batch_invariant and use_legacy do.
"""


def generated(version: str, function: dict[str, str]) -> list[Call]:
    """Every number of positional arguments, the rest left out or by keyword, in turn."""
    parameters = signature(function).parameters.values()
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        return [((), {}), ((1, 2, 3), {}), ((1,), {"num_heads_k": 1, "anything": None})]
    names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    only = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    required = [p.name for p in parameters if p.default is p.empty]
    calls: list[Call] = []
    for further in FURTHER if function["name"] in CORE else ({},):
        given = values(version, function) | further
        # SGLang asserts the three arguments of a plan together.
        for count in range(3 if "cache_seqlens" in names and not required else 0, len(names) + 1):
            head = tuple(given[name] for name in names[:count])
            rest = [name for name in [*names[count:], *only] if name not in required]
            needed = {name: given[name] for name in names[count:] if name in required}
            for keywords in ([], rest, rest[::2]):
                calls.append((head, needed | {name: given[name] for name in keywords}))
    return calls


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """Calls of the stub core: name and arguments by name, with the core's own defaults."""
    noted: list[tuple[str, dict[str, Any]]] = []

    def stub(core: Any, result: Any) -> Callable[..., Any]:
        form = inspect.signature(core)

        def called(*args: Any, **kwargs: Any) -> Any:
            bound = form.bind(*args, **kwargs)
            bound.apply_defaults()
            noted.append((core.__name__, bound.arguments))
            return result

        return called

    for module, name, result in (
        (decode, "flash_mla_with_kvcache", ("out", "lse")),
        (sparse_prefill, "flash_mla_sparse_fwd", ("out", "max_logits", "lse")),
        (plan, "get_mla_metadata", ("rows", "splits")),
    ):
        monkeypatch.setattr(module, name, stub(getattr(module, name), result))
    return noted


def meaning(function: dict[str, Any], call: Call) -> dict[str, Any]:
    bound = signature(function).bind(*call[0], **call[1])
    bound.apply_defaults()
    return bound.arguments


@pytest.mark.parametrize(
    "version, function",
    [(v, f) for v, f in FUNCTIONS if f["name"] in CORE],
    ids=lambda x: x if isinstance(x, str) else x["name"],
)
def test_same_meaning(
    version: str,
    function: dict[str, str],
    reached: list[tuple[str, dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The stub core gets what the version's own signature says that the call means."""
    monkeypatch.setattr(flash_mla_interface, "_takes_tensors", version == TENSORS)
    for call in generated(version, function):
        reached.clear()
        check_meaning(version, function, call, reached)


def check_meaning(
    version: str, function: dict[str, str], call: Call, reached: list[tuple[str, dict[str, Any]]]
) -> None:
    meant = meaning(function, call)
    result = ours(function)(*call[0], **call[1])
    name = function["name"]
    if name == "get_mla_metadata" and meant.get("cache_seqlens") is None:
        made, nothing = result
        assert isinstance(made, FlashMLASchedMeta) and nothing is None and not reached
        assert not made.have_initialized and made.tile_scheduler_metadata is None
        return
    ((core, got),) = reached
    if name in ("get_mla_metadata", "get_mla_decoding_metadata"):
        of = {"seqlens_k": "cache_seqlens", "h_k": "num_heads_k", "h_q": "num_heads_q"}
        wanted = {of.get(k, k): v for k, v in meant.items() if k != "use_legacy"}
        assert core == "get_mla_metadata" and {k: got[k] for k in wanted} == wanted
        assert isinstance(got["out"], FlashMLASchedMeta) == (version != TENSORS)
        return
    ignored = {"use_legacy", "kv_format", "descale_q", "descale_k", "return_log2_lse"}
    wanted = {k: v for k, v in meant.items() if k not in ignored}
    assert core == name
    if name == "flash_mla_sparse_fwd":
        log2 = meant.get("return_log2_lse") or (version == "SGLang 0.5.23" and meant["use_legacy"])
        assert got["log_base"] == ("2" if log2 else "e")
        assert {k: got[k] for k in wanted} == wanted and got["out"] is wanted.get("out")
        assert got["enable_batch_invariant"] is False and got["is_fp8_kvcache"] is False
        statistics = (None, None) if meant.get("return_log2_lse") is False else ("max_logits", "lse")
        assert result == ("out", *statistics)
        return
    if "is_fp8_kvcache" not in signature(function).bind(*call[0], **call[1]).arguments:
        wanted["is_fp8_kvcache"] = got["is_fp8_kvcache"]
        by_indices = meant.get("indices") is not None
        assert got["is_fp8_kvcache"] is (by_indices and function["module"] != "rawmla.compat.sgl_kernel")
    assert {k: got[k] for k in wanted} == wanted
    assert got["out"] is wanted.get("out")
    assert got["enable_batch_invariant"] is wanted.get("enable_batch_invariant", False)


@pytest.mark.parametrize(
    "version, function, call",
    [(v, f, call) for v, f in FUNCTIONS if f["name"] in DENSE for call in generated(v, f)],
)
def test_same_meaning_of_dense_attention(
    version: str, function: dict[str, Any], call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What reaches the call path is what the version's own signature says that the call means."""
    assert inspect.unwrap(ours(function)) is getattr(rawmla, function["name"])
    names = [*inspect.signature(options_of).parameters]
    reached: dict[str, Any] = {}
    packings: list[Packing | None] = []

    def attend(arrays: DenseArrays, options: None, packing: Packing | None = None) -> None:
        reached.update(DenseArrays._make(arrays)._asdict())
        packings.append(packing)

    def note_options(*given: Any) -> None:
        reached.update(zip(names, given, strict=False))

    path = SimpleNamespace(options_of=note_options, attend=attend)
    monkeypatch.setattr(dense, "dense_path", lambda *inputs: path)
    ours(function)(*call[0], **call[1])
    meant = {SECOND_NAMES.get(name, name): value for name, value in meaning(function, call).items()}
    reached["max_seqlen_q"], reached["max_seqlen_k"] = reached.pop("max_seqlens")
    (packing,) = packings
    wanted = None
    if "qkv" in meant:  # in the place of q, with one cu_seqlens
        wanted = Packing("qkv", 3, meant.pop("head_dim_qk"))
        meant["q"], meant["cu_seqlens_q"] = meant.pop("qkv"), meant.pop("cu_seqlens")
        meant["max_seqlen_q"] = meant["max_seqlen_k"] = meant.pop("max_seqlen")
        assert reached["k"] is reached["v"] is reached["cu_seqlens_k"] is None
    elif "kv" in meant:
        wanted = Packing("kv", 2, meant.pop("head_dim_qk"))
        meant["k"] = meant.pop("kv")
        assert reached["v"] is None
    assert packing == wanted
    for name, value in meant.items():
        assert reached[name] == value, name
    assert reached["window_size"] == (-1, -1) and reached["softcap"] == reached["attention_chunk"] == 0
    others = ("attn_sink", "alibi_slopes", "seqused_q", "seqused_k", "out")
    assert all(reached[name] is None for name in others)


def test_names_of_the_module() -> None:
    upstream = {f["name"] for f in TABLE["versions"]["FlashMLA 9241ae3"]}
    sgl = {"get_mla_decoding_metadata", "fused_norm_rope_attn_rope_cast", "has_legacy"}
    assert set(flash_mla.__all__) == upstream | sgl
    for name in flash_mla.__all__:
        assert hasattr(flash_mla, name)
    assert flash_mla.has_legacy() is True
    assert tuple(map(int, flash_mla.__version__.partition("+")[0].split("."))) >= (1, 0, 0)
    assert flash_mla_interface.flash_mla_cuda is cuda
    assert flash_mla_interface.FlashMLASchedMeta is FlashMLASchedMeta is sgl_kernel.FlashMLASchedMeta
    config = FlashMLASchedMeta.Config(1, 2, 3, 4, 5, True, False, None, None, None, False)
    assert FlashMLASchedMeta(config=config).config == config


@pytest.mark.parametrize(
    "function",
    [f for _, f in FUNCTIONS if f["name"] not in (*CORE, *DENSE, "has_legacy")],
    ids=lambda function: function["name"],
)
def test_what_is_not_computed(function: dict[str, Any]) -> None:
    assert str(inspect.signature(ours(function))) == function["signature"]
    with pytest.raises(NotImplementedError, match=rf"{function['name']}: FlashMLA has it for SM100, .*; \w"):
        ours(function)(**dict.fromkeys(signature(function).parameters))


def test_what_to_call_for_gradients() -> None:
    remedy = "call rawmla.flash_attn_varlen_backward, or backward() through flash_mla.flash_attn_varlen_func"
    with pytest.raises(NotImplementedError) as caught:
        cuda.dense_prefill_bwd()
    assert str(caught.value).endswith(f"; {remedy}")
