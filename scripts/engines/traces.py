"""GPU time of decode steps, from the traces of vLLM's profiler."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from . import ROOT

STEPS = 12
"""Steps in a trace."""
OURS = tuple(path.stem for path in sorted((ROOT / "cuda_src" / "kernels").glob("*.cu")))
"""rawmla's kernels."""
ATTENTION = (
    *(name for name in OURS if name != "mla_metadata"),
    *("splitkv_mla", "flash_fwd_mla", "mla_fwd", "sparse_attn", "combine_kernel"),  # FlashMLA's
    *("FlashAttnFwd", "flash::enable_sm90", "FlashAttnFwdCombine"),  # FlashAttention-3's
    *("kernel_unified_attention", "_fwd_kernel_stage", "_fwd_grouped_kernel", "reduce_segments"),  # Triton's
)
"""Parts of the names of attention kernels; plans are made once a step, and are not among them."""
WRITERS = ("concat_and_cache_mla", "concat_and_cache_ds_mla", "reshape_and_cache")
"""Kernels that run once in a layer: they write the new tokens into the cache."""

Event = dict[str, Any]


def profiler_options(folder: str) -> dict[str, Any]:
    """Options of vLLM's profiler for short traces of GPU work."""
    return {
        "profiler": "torch",
        "torch_profiler_dir": folder,
        "torch_profiler_with_stack": False,
        "torch_profiler_use_gzip": False,
        "torch_profiler_dump_cuda_time_total": False,
    }


def traced(llm: Any, step: Callable[[], Any], folder: str, layers: int) -> dict[str, Any]:
    """Trace steps of an engine and summarise the GPU's work."""
    before = set(Path(folder).glob("*"))
    llm.start_profile()
    for _ in range(STEPS):
        step()
    llm.stop_profile()
    made = set(Path(folder).glob("*.json")) - before
    events = [event for path in made for event in json.loads(path.read_text())["traceEvents"]]
    return summary(events, layers)


def is_attention(kernel: Event) -> bool:
    return any(part in kernel["name"] for part in ATTENTION)


def busy(events: Iterable[Event]) -> float:
    """Microseconds in which at least one of the events, which are in order, was running."""
    total = end = 0.0
    for event in events:
        stop = event["ts"] + event["dur"]
        total += max(0.0, stop - max(event["ts"], end))
        end = max(end, stop)
    return total


def summary(events: Iterable[Event], layers: int, steps: int = STEPS) -> dict[str, Any]:
    """Attention of a layer, all work of a step, and the kernels that take most of it, with their launches.

    Writing the cache marks the steps, since a trace may hold parts of a step at its ends.
    """
    work = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    work.sort(key=lambda event: event["ts"])
    attention = [event for event in work if event["cat"] == "kernel" and is_attention(event)]
    kernels: dict[str, list[Event]] = {}
    for event in work:
        if event["cat"] == "kernel":
            kernels.setdefault(event["name"], []).append(event)
    written = sum(len(of_it) for name, of_it in kernels.items() if any(part in name for part in WRITERS))
    count = written / layers if written else float(steps)
    largest = sorted(kernels.items(), key=lambda item: -sum(event["dur"] for event in item[1]))[:12]
    return {
        "steps": count,
        "attention_us": busy(attention) / count / layers,
        "busy_us": busy(work) / count,
        "ours": [name for name in OURS if any(found.startswith(name) for found in kernels)],
        "kernels": [describe(name, of_it, count) for name, of_it in largest],
    }


def describe(name: str, events: list[Event], steps: float) -> dict[str, Any]:
    """A kernel: how often in a step, its median time, and how it is launched."""
    row: dict[str, Any] = {"name": name[:120], "per_step": len(events) / steps}
    row["us"] = statistics.median(event["dur"] for event in events)
    given = events[-1].get("args", {})
    wanted = ("grid", "block", "registers per thread", "shared memory")
    return row | {key: given[key] for key in wanted if key in given}
