"""FlashAttention's functions of vLLM and SGLang, without a GPU."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from contract_calls import Recorded
from test_engines import FILE_OF_FLASH_ATTN, FLASH_ATTN, INTERFACE, PLATFORM, run, set_version, write

from rawmla.engines import sglang, vllm

torch = pytest.importorskip("torch")

from flash_attn_calls import (  # noqa: E402
    LONGER_REQUESTS,
    PASSED_ON,
    Call,
    id_of,
    is_passed_on,
    of_longer_requests,
    recorded,
)

from rawmla.compat import engine_calls, vllm_flash_attn  # noqa: E402
from rawmla.engines.plug_in import or_original  # noqa: E402

# ---- recorded calls

CALLS = recorded()


@pytest.mark.parametrize("record", CALLS, ids=map(id_of, CALLS))
def test_recorded_calls(record: Recorded, emulator: Any) -> None:
    """By rawmla's kernels on the emulated device, or by the engine's function."""
    call = Call(record, "cpu")
    got = call.run()
    if is_passed_on(record):
        assert got == PASSED_ON and emulator.launched == []
    else:
        call.check(got)


def test_lse_has_the_sinks_in_it(emulator: Any) -> None:
    """As in vLLM's version 3, whose merges rely on it; SGLang's calls of this kind go on."""
    call = Call(next(one for one in CALLS if one.case == "gpt-oss, sinks, decode"), "cpu")
    call.arguments["return_softmax_lse"] = True
    call.check(call.run())


@pytest.mark.parametrize("case", LONGER_REQUESTS)
def test_longer_requests_than_expected(case: str, emulator: Any) -> None:
    call = of_longer_requests(case, "cpu")
    call.check(call.run())


def test_a_view_of_one_column_of_a_table(emulator: Any) -> None:
    """As SGLang 0.5.17 and 0.5.19 capture local attention: replays have requests of many pages."""
    record = next(one for one in CALLS if one.engine == "sglang" and not is_passed_on(one))
    call = Call(record, "cpu")
    table = call.arguments["page_table"]
    assert table.shape[1] > 1
    call.arguments["page_table"] = table[:, :1]
    got = call.run()
    call.arguments["page_table"] = table
    call.check(got)


# ---- calls that go on to the engine

BF16, FP8, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2


def array(*shape: int, dtype: Any = BF16) -> Any:
    return torch.empty(shape, dtype=dtype, device="meta")


def vllm_call(dtype: Any = BF16, d: int = 128, **more: Any) -> dict[str, Any]:
    """A call over pages of 16 tokens."""
    call = {"q": array(4, 8, d, dtype=dtype), "k": array(9, 16, 2, d, dtype=dtype), "max_seqlen_q": 1}
    call |= {"v": call["k"], "cu_seqlens_q": array(5), "max_seqlen_k": 99, "seqused_k": array(4)}
    return call | {"block_table": array(4, 7), "fa_version": 3} | more


def packed(dtype: Any = BF16, d: int = 128, **more: Any) -> dict[str, Any]:
    call = vllm_call(dtype, d) | {"k": array(9, 2, d, dtype=dtype), "v": array(9, 2, d, dtype=dtype)}
    return call | {"block_table": None, "seqused_k": None, "cu_seqlens_k": array(5)} | more


def sglang_call(page: int = 16, dtype: Any = BF16, **more: Any) -> dict[str, Any]:
    cache = array(9, page, 2, 128, dtype=dtype)
    call = {"q": array(4, 8, 128, dtype=dtype), "k_cache": cache, "v_cache": cache, "max_seqlen_q": 1}
    call |= {"page_table": array(4, 7), "cu_seqlens_q": array(5), "cache_seqlens": array(4)}
    return call | more


@pytest.fixture(autouse=True)
def nothing_logged() -> Iterator[None]:
    engine_calls._passed_on.clear()
    yield
    engine_calls._passed_on.clear()


def check_passed_on(
    function: Any, calls: list[Any], arguments: dict[str, Any], reason: str, log: Any
) -> None:
    """The engine's function gets the same call, twice, and the log has one line."""
    log.set_level(logging.INFO)
    for _ in range(2):
        assert function(**arguments) == PASSED_ON
    assert len(calls) == 2
    for given in calls:
        assert given.keys() == arguments.keys()
        assert all(given[name] is value for name, value in arguments.items())
    (line,) = [one.getMessage() for one in log.records]
    assert line.endswith(f"goes on to the engine's own function with {reason}")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (vllm_call(q_v=array(4, 8, 512)), "q_v"),
        (vllm_call(dropout_p=0.1), "dropout_p"),
        (vllm_call(cp_world_size=2, cp_rank=0), "cp_world_size"),
        (
            vllm_call(mask_mod=len, aux_tensors=None),
            "dynamic_causal, mask_mod, aux_tensors or output_scale",
        ),
        (vllm_call(block_sparse_tensors=array(4)), "block_sparse_tensors"),
        (vllm_call(d=512), "head dimensions 512 and 512 over a cache in bfloat16"),
        (vllm_call(d=100), "head dimensions 100 and 100 over a cache in bfloat16"),
        (vllm_call(FP8, 72), "head dimensions 72 and 72 over a cache in float8_e4m3fn"),
        (vllm_call(E5M2), "q in float8_e5m2 over a cache in float8_e5m2"),
        (vllm_call(torch.float32), "q in float32 over a cache in float32"),
        (vllm_call(FP8, max_seqlen_q=17), "many query tokens over an FP8 cache"),
        (vllm_call(FP8, num_splits=1), "num_splits=1 over an FP8 cache"),
        (packed(FP8), "q in float8_e4m3fn without a cache"),
        (packed(d=264), "head dimensions 264 and 264"),
        (packed(num_splits=1), "num_splits=1 without a cache"),
        (packed(cu_seqlens_k=None), "neither block_table nor cu_seqlens_k"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_calls_that_go_on_to_vllm(arguments: dict[str, Any], reason: str, caplog: Any) -> None:
    calls: list[Any] = []

    def original(**given: Any) -> str:
        calls.append(given)
        return PASSED_ON

    function = or_original(vllm_flash_attn.flash_attn_varlen_func, original)
    check_passed_on(function, calls, arguments, reason, caplog)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (sglang_call(qv=array(4, 8, 512)), "new tokens, qv, rotation, cache_batch_idx or cache_leftpad"),
        (sglang_call(k=array(4, 2, 128)), "new tokens, qv, rotation, cache_batch_idx or cache_leftpad"),
        (sglang_call(score_mod=len), "score_mod"),
        (sglang_call(attention_chunk=64), "attention_chunk"),
        (sglang_call(ver=4), "ver=4"),
        (sglang_call(page_table=None), "no page_table or no cu_seqlens_q"),
        (sglang_call(sinks=array(8), return_softmax_lse=True), "sinks and return_softmax_lse"),
        (sglang_call(page=1, max_seqlen_q=17), "many query tokens over pages of 1 tokens"),
        (sglang_call(page=1, num_splits=1), "num_splits=1 over pages of 1 tokens"),
        (sglang_call(dtype=FP8, max_seqlen_q=17), "many query tokens over an FP8 cache"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_calls_that_go_on_to_sglang(arguments: dict[str, Any], reason: str, caplog: Any) -> None:
    calls: list[Any] = []

    def original(**given: Any) -> str:
        calls.append(given)
        return PASSED_ON

    def function(**given: Any) -> Any:
        return sglang._flash_attn_with_kvcache(original, **given)

    check_passed_on(function, calls, arguments, reason, caplog)


# ---- the plug-in in a small vLLM

_, MODULE = vllm.ENGINE.modules
(PATH,) = MODULE.paths
CODE = """\
import inspect
import vllm.vllm_flash_attn.flash_attn_interface as module, vllm.v1.attention.backends.fa_utils as importer
register()
names = [*ENGINE.modules[1].replaced, "is_fa_version_supported"]
def plan(**given):
    try: return module.get_scheduler_metadata(**given)
    except TypeError: return "vLLM's"
print(json.dumps({
    "ours": [name for name in names if getattr(module, name).__module__.startswith("rawmla.")],
    "same": all(getattr(module, name) is getattr(importer, name) for name in names),
    "parameters": list(inspect.signature(module.flash_attn_varlen_func).parameters)[-2:],
    "plans": [plan(headdim=128, num_splits=3), *[plan(headdim=64, headdim_v=d_v) for d_v in (64, 512)]],
}))
"""
REGISTER = "from rawmla.engines.vllm import ENGINE, register\n"
BEFORE = f"{REGISTER}register()\n{CODE}"
AFTER = f"{REGISTER}import vllm.v1.attention.backends.fa_utils\n{CODE}"
FOUND = {"same": True, "parameters": ["cp_tot_seqused_k", "mask_mod"]}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A vLLM of a version that was not tested."""
    files = {
        "vllm/platforms/__init__.py": PLATFORM,
        FILE_OF_FLASH_ATTN: FLASH_ATTN,
        "vllm/v1/attention/ops/flashmla.py": INTERFACE,
        "vllm/v1/attention/backends/fa_utils.py": "from vllm.vllm_flash_attn.flash_attn_interface import *\n",
    }
    write(tmp_path, files)
    set_version(tmp_path, "vllm", "0.26.0")
    return tmp_path


@pytest.mark.parametrize("code", [BEFORE, AFTER], ids=["before", "after"])
def test_names_are_replaced(tree: Path, code: str) -> None:
    """Also where parameters follow after the known ones. Absorbed MLA keeps vLLM's plans."""
    got, log = run(tree, "logging.getLogger('vllm').setLevel('INFO')\n" + code)
    names = list(MODULE.replaced)
    assert got == {**FOUND, "ours": names, "plans": [None, None, "vLLM's"]}
    assert log == f"INFO rawmla: {', '.join(names)} of {PATH} are rawmla's now (vLLM 0.26.0)\n"


@pytest.mark.parametrize(
    ("old", "new", "family", "text"),
    [
        (
            "v_descale=None, num_splits=0",
            "num_splits=0, v_descale=None",
            "90",
            "(num_splits, v_descale). Install a tested version",
        ),
        ("softcap", "softcap", "100", "rawmla's kernels are for Hopper"),
    ],
)
def test_vllm_is_left_alone(tree: Path, old: str, new: str, family: str, text: str) -> None:
    assert old in FLASH_ATTN
    write(tree, {FILE_OF_FLASH_ATTN: FLASH_ATTN.replace(old, new)})
    got, log = run(tree, BEFORE, FAMILY=family)
    assert got == {**FOUND, "ours": [], "plans": ["vLLM's"] * 3}
    assert log.count("\n") == log.count("WARNING") == 1 and text in log
