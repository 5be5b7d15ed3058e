"""SGLang, as `serve` starts and calls it. Its scheduler, which calls the kernels, is a process of its own."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

from .jobs import Job
from .models import VOCABULARY

CASES: dict[str, dict[str, Any]] = {
    "eager": {"disable_cuda_graph": True},
    "graphs": {"cuda_graph_bs_decode": [1, 2, 4, 8, 16, 24, 32]},
}
"""SGLang's options by the word for them: no graphs; graphs of decode steps."""


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def options(job: Job, models: Path) -> dict[str, Any]:
    """SGLang's options for a job, with a cache of fixed size: engines side by side share the GPU.

    The backend flashmla would prefill with FlashInfer, so fa3 does.
    """
    given: dict[str, Any] = {
        "model_path": f"{models}/{job.model}",
        "page_size": 64,
        "skip_tokenizer_init": True,
        "random_seed": 0,
        "context_length": 4608,
        "max_running_requests": 32,
        "max_total_tokens": 65536,
        "mem_fraction_static": 0.9,
        "chunked_prefill_size": 8192,
        "disable_radix_cache": True,
        "disable_prefill_cuda_graph": True,
        "disable_custom_all_reduce": True,
        "disable_flashinfer_autotune": True,
        "moe_runner_backend": "triton",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "port": _free_port(),
        "nccl_port": _free_port(),
        "watchdog_timeout": 600,
        "log_level": "info",
    }
    if job.backend == "flashmla":
        given |= {"prefill_attention_backend": "fa3", "decode_attention_backend": "flashmla"}
    else:
        given["attention_backend"] = job.backend
    return given | CASES[job.case] | job.options


def start(job: Job, models: Path) -> Any:
    """The engine of a job."""
    from sglang.srt.entrypoints.engine import Engine

    return Engine(**options(job, models))


def generate(engine: Any, texts: list[list[int]], tokens: int) -> tuple[list[list[int]], list[list[float]]]:
    """Chosen tokens and their log probabilities: greedy, without an end of the text."""
    sampling = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
    done = engine.generate(input_ids=texts, sampling_params=sampling, return_logprob=True)
    chosen = [one["meta_info"]["output_token_logprobs"] for one in done]
    ids = [[int(token) for _, token, *_ in row] for row in chosen]
    assert all(len(row) == tokens and max(row) < VOCABULARY for row in ids)
    return ids, [[float(logprob) for logprob, *_ in row] for row in chosen]
