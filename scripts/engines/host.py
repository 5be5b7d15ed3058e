"""Host time of decode steps: of chosen functions by timers around them, and of all by cProfile.

Timers count a function with all that it calls, and cost a third of a microsecond. cProfile makes calls two to
three times as long: it says where time goes, not how much.
"""

from __future__ import annotations

import cProfile
import pstats
import sys
import time
from collections.abc import Callable
from typing import Any

LAYERS = "vllm.model_executor.layers.attention"
DENSE, SPARSE = "vllm.v1.attention.backends.mla.flashmla", "vllm.v1.attention.backends.mla.flashmla_sparse"
OURS = "rawmla.engines.vllm_backend"
TIMED = (
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.execute_model"),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner._prepare_inputs"),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner._build_attention_metadata"),
    ("vllm.v1.worker.gpu.model_runner", "GPUModelRunner.execute_model"),
    (f"{LAYERS}.mla_attention", "MLAAttention.forward"),
    (f"{LAYERS}.mla_attention", "MLAAttention.forward_impl"),
    (f"{LAYERS}.mla_attention", "MLACommonImpl.do_kv_cache_update"),
    (f"{LAYERS}.mla_attention", "MLAAttention._v_up_proj"),
    (f"{LAYERS}.attention", "Attention.forward"),
    (DENSE, "FlashMLAMetadataBuilder._build_decode"),
    (DENSE, "FlashMLAImpl.forward_mqa"),
    (DENSE, "reshape_query_for_spec_decode"),
    (DENSE, "flash_mla_with_kvcache"),
    (SPARSE, "FlashMLASparseImpl.forward_mqa"),
    (SPARSE, "flash_mla_with_kvcache"),
    (OURS, "RawMLAImpl.forward_mqa"),
    (OURS, "RawMLASparseImpl.forward_mqa"),
    (OURS, "_by_request"),
    (OURS, "reshape_attn_output_for_spec_decode"),
    ("rawmla", "flash_mla_with_kvcache"),
    ("rawmla.mla.dense_decode", "_prepare"),
    ("rawmla.mla.dense_decode", "make_plan"),
    ("rawmla.jit.launch", "PreparedLaunch.launch"),
    ("vllm.v1.attention.backends.mla.flashattn_mla", "FlashAttnMLAImpl.forward_mqa"),
    ("vllm.v1.attention.backends.flash_attn", "FlashAttentionImpl.forward"),
    ("vllm.v1.attention.backends.flash_attn", "flash_attn_varlen_func"),
)
"""Module and name of what is timed, where it is loaded."""

SAME = "gpu_model_runner.GPUModelRunner._prepare_inputs"
"""A function that is the same whatever attends, as `timed` names it: the same CPU takes up to twice as long
for it in one process as in another.
"""


def timed(llm: Any, step: Callable[[], Any], steps: int) -> list[dict[str, Any]]:
    """Calls and microseconds a step of the functions of TIMED, while timers are around them."""
    found: dict[str, list[int]] = {}
    undo = [around for module, name in TIMED if (around := _wrap(module, name, found)) is not None]
    try:
        for _ in range(steps):
            step()
    finally:
        for put_back in reversed(undo):
            put_back()
    return [
        {"function": name, "calls": calls / steps, "us": ns / 1e3 / steps}
        for name, (calls, ns) in found.items()
        if calls
    ]


def _wrap(module: str, name: str, found: dict[str, list[int]]) -> Callable[[], None] | None:
    """Put a timer around a function or method; returns what takes it away, None if it is not there."""
    owner: Any = sys.modules.get(module)
    *outer, last = name.split(".")
    for part in outer:
        owner = getattr(owner, part, None)
    function = vars(owner).get(last) if owner is not None else None
    if not callable(function):
        return None
    counts = found.setdefault(f"{module.rpartition('.')[2]}.{name}", [0, 0])
    clock = time.perf_counter_ns

    def timer(*args: Any, **kwargs: Any) -> Any:
        begin = clock()
        result = function(*args, **kwargs)
        counts[1] += clock() - begin
        counts[0] += 1
        return result

    setattr(owner, last, timer)
    return lambda: setattr(owner, last, function)


def profiled(step: Callable[[], Any], steps: int, most: int = 40) -> list[dict[str, Any]]:
    """The functions with the most time of their own under cProfile, in microseconds a step."""
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(steps):
        step()
    profile.disable()
    rows = []
    for (path, line, function), (_, calls, own, inclusive, _) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        where = function if path == "~" else f"{'/'.join(path.split('/')[-2:])}:{line} {function}"
        row = {"function": where, "calls": calls / steps, "own_us": own / steps * 1e6}
        rows.append(row | {"us": inclusive / steps * 1e6})
    return sorted(rows, key=lambda row: -row["own_us"])[:most]
