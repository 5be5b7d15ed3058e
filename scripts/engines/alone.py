"""The decode kernel without an engine, under one condition of the engine after another.

A kernel that is slower inside the engine than in a benchmark has another binary, other inputs, other memory
or other neighbours. Each condition changes one of these in what a benchmark does; the last has all of them.
Times are of traces, as inside the engine, beside the time of a loop by events.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import traces

PAGE, D_QK, D_V = 64, 576, 512
LAYERS, CALLS = 4, 12
"""Layers, each with its own cache, and steps: the plan is made once a step."""
CONDITIONS: dict[str, dict[str, Any]] = {
    "as a benchmark": {},
    "causal": {"causal": True},
    "lengths as after some steps": {"more": 40},
    "pages shuffled": {"shuffled": True},
    "peaked scores": {"scale": 4.0},
    "small values": {"scale": 0.01},
    "L2 flushed between": {"between": "flush"},
    "products between": {"between": "products"},
    "pauses between": {"between": "pause"},
    "in a CUDA graph": {"graph": True},
    "all of the engine's": {"causal": True, "more": 40, "between": "products", "graph": True},
}


def functions(library: str) -> tuple[Callable[..., Any], Callable[[], Any]]:
    """A library's decode function and what makes an empty plan."""
    if library == "flash_mla":
        from vllm.third_party.flashmla import flash_mla_interface as module

        return module.flash_mla_with_kvcache, module.FlashMLASchedMeta
    import rawmla

    return rawmla.flash_mla_with_kvcache, rawmla.FlashMLASchedMeta


def measure(library: str, batch: int, context: int, heads: int) -> list[dict[str, Any]]:
    """A row for each condition: kernels with times and launches, and the time of a call in a loop."""
    return [
        {"condition": name, "library": library, **_measured(library, batch, context, heads, **changes)}
        for name, changes in CONDITIONS.items()
    ]


def _measured(
    library: str,
    batch: int,
    context: int,
    heads: int,
    *,
    causal: bool = False,
    more: int = 0,
    shuffled: bool = False,
    scale: float = 1.0,
    between: str = "",
    graph: bool = False,
) -> dict[str, Any]:
    import torch

    decode, make_plan = functions(library)
    generator = torch.Generator("cuda").manual_seed(3)

    def random(*shape: int) -> Any:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator)

    pages = -(-(context + more) // PAGE)
    caches = [random(batch * pages, PAGE, 1, D_QK) for _ in range(LAYERS)]
    order = torch.randperm(batch * pages) if shuffled else torch.arange(batch * pages)
    table = order.reshape(batch, pages).int().cuda()
    lengths = torch.full((batch,), context + more, dtype=torch.int32, device="cuda")
    q = scale * random(batch, 1, heads, D_QK)
    x, weights = random(batch, 4096), random(4096, 8192)
    flushed = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")

    def step() -> None:
        plan = make_plan()
        for cache in caches:
            if between == "flush":
                flushed.zero_()
            elif between == "products":
                for _ in range(4):
                    torch.mm(x, weights)
            elif between == "pause":
                torch.cuda._sleep(2_000_000)  # cycles, about a millisecond
            decode(q, cache, table, lengths, D_V, plan, softmax_scale=192**-0.5, causal=causal)

    step()
    run = _captured(step) if graph else step
    for _ in range(CALLS):
        run()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(CALLS):
        run()
    end.record()
    torch.cuda.synchronize()
    row = {"loop_us": begin.elapsed_time(end) * 1e3 / CALLS / LAYERS}
    return row | traces.summary(_events(run), LAYERS, CALLS)


def _captured(step: Callable[[], None]) -> Callable[[], None]:
    """The step as a CUDA graph."""
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def _events(run: Callable[[], None]) -> list[dict[str, Any]]:
    """A trace of several steps."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(CALLS):
            run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events
