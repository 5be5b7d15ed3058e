"""One job in this process: start the engine, do the tasks, write the result.

python scripts/engines serve JOB.json RESULT.json --folder F
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from . import alone, bits, host, sglang_engine, traces
from .jobs import Job
from .prompts import prompts, random_tokens

Result = dict[str, Any]
Chosen = tuple[list[list[int]], list[list[float]]]
"""Of each text the tokens that followed, and their log probabilities."""


def sampling(tokens: int, **more: Any) -> Any:
    """Greedy, without an end of the text."""
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, **more)


def generate(llm: Any, texts: list[list[int]], tokens: int) -> Chosen:
    """Chosen tokens and their log probabilities."""
    given = [{"prompt_token_ids": text} for text in texts]
    done = llm.generate(given, sampling(tokens, logprobs=0), use_tqdm=False)
    ids = [list(one.outputs[0].token_ids) for one in done]
    by_token = [zip(one.outputs[0].logprobs, its, strict=True) for one, its in zip(done, ids, strict=True)]
    return ids, [[row[chosen].logprob for row, chosen in pairs] for pairs in by_token]


def first_difference(one: list[Any], other: list[Any]) -> int | None:
    """Place of the first difference; None: they are equal."""
    pairs = enumerate(zip(one, other, strict=True))
    return next((place for place, (a, b) in pairs if a != b), None)


def generate_twice(
    generate: Callable[[list[list[int]], int], Chosen], result: Result, kind: str, tokens: int
) -> None:
    """All prompts in one batch, twice: with prefix caching the second time finds the first one's pages."""
    texts = prompts(kind)
    result["prompts"] = kind
    begin = time.perf_counter()
    result["ids"], result["logprobs"] = generate(texts, tokens)
    result["seconds"] = time.perf_counter() - begin
    again = generate(texts, tokens)
    result["again"] = [first_difference(*pair) for pair in zip(again[1], result["logprobs"], strict=True)]


def task_generate(llm: Any, result: Result, kind: str, tokens: int) -> None:
    """All prompts in one batch, twice, and the number of steps of one time."""
    engine, steps = llm.llm_engine, [0]
    step = engine.step

    def counted() -> Any:
        steps[0] += 1
        return step()

    engine.step = counted
    generate_twice(partial(generate, llm), result, kind, tokens)
    result["steps"] = steps[0] // 2
    engine.step = step


def pin_norm() -> None:
    """Launch vLLM's RMSNorm for fewer than 256 rows at a time: with more it sums in another order, also under
    batch invariance (github.com/vllm-project/vllm/issues/48271).
    """
    from vllm import _custom_ops

    norm = _custom_ops.fused_add_rms_norm

    def pinned(x: Any, residual: Any, *given: Any) -> None:
        for begin in range(0, len(x), 255):
            norm(x[begin : begin + 255], residual[begin : begin + 255], *given)

    _custom_ops.fused_add_rms_norm = pinned


def task_invariance(llm: Any, result: Result, kind: str, tokens: int, pinned: bool = False) -> None:
    """Every prompt alone and in the batch: the first differing log probability, and where the bits part."""
    if pinned:
        pin_norm()
    texts = prompts(kind)
    recorder = bits.Recorder()
    llm.apply_model(recorder.attach)
    batch = generate(llm, texts, tokens)
    in_batch = recorder.take()
    rows = []
    for number, text in enumerate(texts):
        alone_ids, alone_logprobs = generate(llm, [text], tokens)
        forwards = recorder.take()
        rows.append(
            {
                "length": len(text),
                "token": first_difference(alone_ids[0], batch[0][number]),
                "logprob": first_difference(alone_logprobs[0], batch[1][number]),
                "origin": bits.origin(forwards, in_batch),
            }
        )
    result["invariance"] = rows


class Decoding:
    """Requests that decode side by side: all of them for `tokens` steps after they have started."""

    def __init__(self, llm: Any, batch: int, context: int, tokens: int) -> None:
        self.engine = llm.llm_engine
        rng = random.Random(batch)
        tokens += 10 + batch * context // 4096  # the first ones decode while the last ones are prefilled
        for number in range(batch):
            text = {"prompt_token_ids": random_tokens(context, rng)}
            self.engine.add_request(f"{batch}-{number}-{time.time_ns()}", text, sampling(tokens))
        self.started: set[str] = set()
        while len(self.started) < batch:
            self.step()
        for _ in range(10):
            self.step()

    def step(self) -> int:
        """One step of the engine; returns how many requests got a token."""
        outputs = [one for one in self.engine.step() if one.outputs and one.outputs[0].token_ids]
        self.started.update(one.request_id for one in outputs)
        return len(outputs)

    def end(self) -> None:
        while self.engine.has_unfinished_requests():
            self.engine.step()


def task_speed(llm: Any, result: Result, batches: list[int], context: int, steps: int) -> None:
    """Decoding at several batch sizes: wall-clock time of windows of steps. Traces, if there is a folder for
    them, come after all of these, since a profiler that ran once may slow down what follows.
    """
    Decoding(llm, 4, 64, 30).end()
    result["speed"] = []
    for batch in batches:
        decoding = Decoding(llm, batch, context, 4 * steps + 10)
        windows = []
        for _ in range(4):
            begin = time.perf_counter()
            tokens = sum(decoding.step() for _ in range(steps))
            seconds = time.perf_counter() - begin
            windows.append({"step_us": seconds / steps * 1e6, "tokens_per_s": tokens / seconds})
        decoding.end()
        result["speed"].append({"batch": batch, "context": context, "windows": windows})
    for row in result["speed"] if "trace_folder" in result else ():
        decoding = Decoding(llm, row["batch"], context, traces.STEPS + 10)
        row["gpu"] = traces.traced(llm, decoding.step, result["trace_folder"], result["layers"])
        result["kernels"] = row["gpu"]["ours"]
        decoding.end()


def task_host(llm: Any, result: Result, batch: int, context: int, steps: int) -> None:
    """Host time of small decode steps: of a step, of functions by timers, and by cProfile."""
    Decoding(llm, 4, 64, 30).end()
    decoding = Decoding(llm, batch, context, 6 * steps + 10)
    windows = []
    for _ in range(4):
        begin = time.perf_counter()
        for _ in range(steps):
            decoding.step()
        windows.append((time.perf_counter() - begin) / steps * 1e6)
    result["host"] = {"batch": batch, "context": context, "step_us": windows}
    result["host"]["functions"] = host.timed(llm, decoding.step, steps)
    result["host"]["profile"] = host.profiled(decoding.step, steps)
    decoding.end()


TASKS: dict[str, Callable[..., None]] = {
    "generate": task_generate,
    "invariance": task_invariance,
    "speed": task_speed,
    "host": task_host,
}


def serve_sglang(job: Job, models: Path, result: Result) -> None:
    """Start SGLang and do the task."""
    begin = time.perf_counter()
    engine = sglang_engine.start(job, models)
    result["start_s"] = time.perf_counter() - begin
    generate_twice(partial(sglang_engine.generate, engine), result, **job.tasks["generate"])


def start(job: Job, models: Path, result: Result) -> Any:
    """vLLM for a job."""
    from vllm import LLM

    options = job.engine_options(str(models))
    if "trace_folder" in result:
        options["profiler_config"] = traces.profiler_options(result["trace_folder"])
    begin = time.perf_counter()
    llm = LLM(**options)
    result["start_s"] = time.perf_counter() - begin
    result["layers"] = llm.llm_engine.model_config.hf_config.num_hidden_layers
    return llm


def loaded_kernels() -> list[str]:
    """rawmla's kernels that this process has loaded."""
    loading = sys.modules.get("rawmla.jit.loading")
    return loading.loaded_labels() if loading else []


def machine(engine: str) -> dict[str, str]:
    """Versions and device, for the report."""
    from importlib import metadata

    import torch

    versions = {name: metadata.version(name) for name in (engine, "torch", "transformers")}
    return {**versions, "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="engines serve", description=__doc__)
    parser.add_argument("job", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--folder", type=Path, required=True, help="holds models/, and gets traces/")
    options = parser.parse_args(arguments)
    job = Job.of(options.job.read_text())
    result: Result = {"name": job.name}
    try:
        if "kernel" in job.tasks:
            result["kernel"] = alone.measure(**job.tasks["kernel"])
        elif job.engine == "sglang":
            serve_sglang(job, options.folder / "models", result)
        else:
            if "speed" in job.tasks and job.round == 0:
                result["trace_folder"] = str(options.folder / "traces" / job.name)
            llm = start(job, options.folder / "models", result)
            for name, arguments_of in job.tasks.items():
                TASKS[name](llm, result, **arguments_of)
            if job.variables.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":
                result["kernels"] = loaded_kernels()
        result["machine"] = machine(job.engine)
    except Exception as error:  # a result as well: the driver goes on
        traceback.print_exc()
        result["error"] = f"{type(error).__name__}: {error}"[:500]
    options.result.write_text(json.dumps(result))
    return "error" in result
