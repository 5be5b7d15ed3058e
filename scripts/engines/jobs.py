"""A job: one engine with one model and its tasks."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

SIZES = [1, 2, 4, 8, 16, 24, 32, 64, 128, 256]
"""Batch sizes of CUDA graphs."""
CASES: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "graphs": {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}},
    "compiled": {"compilation_config": {}},
}
"""vLLM's options by the word for them: no graphs; graphs of decode steps; what vLLM does by default."""


@dataclass(frozen=True)
class Job:
    """What `serve` does in one process."""

    name: str
    model: str
    backend: str
    """A member of vLLM's AttentionBackendEnum, a name of SGLang's, or a kernel for `alone`."""
    mode: str = "none"
    """Value of the engine's variable, such as RAWMLA_VLLM; "none" leaves the engine as it is."""
    case: str = "eager"
    tasks: dict[str, Any] = field(default_factory=dict)
    """Functions of `serve.TASKS`, with their arguments."""
    options: dict[str, Any] = field(default_factory=dict)
    """More of the engine's options."""
    variables: dict[str, str] = field(default_factory=dict)
    """More environment variables."""
    group: str = ""
    """What it is compared with: jobs of one group have one reference, the first one of mode "none"."""
    round: int = 0
    alone: bool = False
    """No other job may run beside it: it is timed."""
    seconds: int = 240
    """Time after which it is stopped."""
    engine: str = "vllm"
    """The package of the engine: vllm or sglang."""

    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str) -> Job:
        return cls(**json.loads(text))

    def engine_options(self, folder: str) -> dict[str, Any]:
        """vLLM's options for this job, with a cache of fixed size: engines side by side share the GPU."""
        options: dict[str, Any] = {
            "model": f"{folder}/{self.model}",
            "attention_backend": self.backend,
            "skip_tokenizer_init": True,
            "seed": 0,
            "max_model_len": 4608,
            "max_num_seqs": 64,
            "max_num_batched_tokens": 8192,
            "enable_prefix_caching": False,
            "gpu_memory_utilization": 0.05,
            "kv_cache_memory_bytes": 1 << 30,
            "disable_log_stats": True,
        }
        options |= CASES[self.case] | self.options
        if "compilation_config" in options:
            most = options["max_num_seqs"] * (1 + self.speculated())
            sizes = sorted({size * (1 + self.speculated()) for size in SIZES})
            options["compilation_config"] = options["compilation_config"] | {
                "cudagraph_capture_sizes": [size for size in sizes if size <= most]
            }
        return options

    def speculated(self) -> int:
        """Tokens that are speculated at a time."""
        return int(self.options.get("speculative_config", {}).get("num_speculative_tokens", 0))
