"""The jobs of each wave."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

from .jobs import Job

DENSE = (("FLASHMLA", "none"), ("FLASHMLA", "patch"), ("FLASHMLA", "backend"))
SPARSE = tuple(("FLASHMLA_SPARSE", mode) for _, mode in DENSE)
GQA = (("FLASH_ATTN", "none"), ("FLASH_ATTN", "patch"))
TRITON_ATTN = ("TRITON_ATTN", "none")
SGLANG_GQA = (("fa3", "none"), ("fa3", "patch"))
SGLANG_MLA = (("flashmla", "none"), ("flashmla", "patch"), ("fa3", "none"))
SGLANG_DSA = (("dsa", "none"), ("dsa", "patch"))
SGLANG_TRITON = ("triton", "none")
Ways = tuple[tuple[str, str], ...]
"""Backends with rawmla's modes."""

NGRAMS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
VARIATIONS: dict[str, dict[str, Any]] = {
    "chunked": {"max_num_batched_tokens": 256, "enable_chunked_prefill": True},
    "caching": {"enable_prefix_caching": True},
    "speculating": {"speculative_config": NGRAMS},
}
CHAINS = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4}
CHAINS |= {"speculative_ngram_max_bfs_breadth": 1, "speculative_attention_mode": "decode"}
SGLANG_VARIATIONS: dict[str, dict[str, Any]] = {
    "chunked": {"chunked_prefill_size": 256},
    "caching": {"disable_radix_cache": False},
    "speculating": CHAINS,
}
IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
INVARIANT = {"VLLM_BATCH_INVARIANT": "1", **IN_PROCESS}
GIB = 1 << 30


def served(
    model: str,
    ways: Ways,
    case: str,
    what: str = "",
    kind: str = "short",
    engine: str = "vllm",
    seconds: int = Job.seconds,
    **options: Any,
) -> Iterator[Job]:
    """Prompts of one model through each way; vLLM in one process with its tasks."""
    group = "-".join(filter(None, (model, what)))
    for backend, mode in ways:
        yield Job(
            name="-".join((*(() if engine == "vllm" else (engine,)), group, backend, mode, case)),
            engine=engine,
            model=model,
            backend=backend,
            mode=mode,
            case=case,
            tasks={"generate": {"kind": kind, "tokens": 48}},
            options=options,
            variables=IN_PROCESS if engine == "vllm" else {},
            group=group,
            seconds=seconds,
        )


def dense() -> Iterator[Job]:
    """MLA over 16-bit caches."""
    for model in ("dense16", "dense128"):
        yield from served(model, DENSE, "eager")
        yield from served(model, DENSE, "graphs")
        yield from served(model, (("FLASH_ATTN_MLA", "none"), ("TRITON_MLA", "none")), "eager")
    for what, options in VARIATIONS.items():
        yield from served("dense16", DENSE, "graphs", what, **options)
    yield from served("dense16", DENSE, "compiled")


def dsa() -> Iterator[Job]:
    """Sparse MLA over FP8 and 16-bit caches."""
    for model, dtype in (("dsa16", "fp8_ds_mla"), ("dsa64", "fp8_ds_mla"), ("dsa64", "auto")):
        for case in ("eager", "graphs"):
            yield from served(model, SPARSE, case, dtype, "long", kv_cache_dtype=dtype)
    fp8: dict[str, Any] = {"kv_cache_dtype": "fp8_ds_mla"}
    for what, options in VARIATIONS.items():
        yield from served("dsa16", SPARSE, "graphs", f"fp8_ds_mla-{what}", "long", **fp8, **options)


def moe() -> Iterator[Job]:
    """Experts after MLA."""
    for case in ("eager", "graphs"):
        yield from served("moe16", DENSE, case)


def gqa() -> Iterator[Job]:
    """Grouped-query attention. An engine may have no FlashAttention-3 for a shape, so Triton's is beside."""
    for model in ("llama", "qwen", "gemma", "gpt_oss"):
        yield from served(model, GQA, "eager")
        yield from served(model, GQA, "graphs")
        yield from served(model, (TRITON_ATTN,), "eager")
    for what, options in VARIATIONS.items():
        yield from served("llama", GQA, "graphs", what, **options)
    for model, tokens in (("llama", 16), ("gpt_oss", 8)):
        # So few tokens of a prompt at a time that rawmla's decoding, which reads FP8 caches, attends them.
        options = {"long_prefill_token_threshold": tokens, "enable_chunked_prefill": True}
        options |= {"kv_cache_dtype": "fp8"}
        yield from served(model, (*GQA, TRITON_ATTN), "graphs", "fp8", **options)


def sglang() -> Iterator[Job]:
    """SGLang: grouped-query attention, MLA and sparse MLA."""
    ways: dict[str, Ways] = {name: SGLANG_GQA for name in ("llama", "qwen", "gpt_oss")}
    ways |= {"gemma": SGLANG_GQA[1:], "dense16": SGLANG_MLA, "dense128": SGLANG_MLA}
    for model, its in ways.items():
        yield from served(model, its, "eager", engine="sglang")
        yield from served(model, its, "graphs", engine="sglang")
        yield from served(model, (SGLANG_TRITON,), "eager", engine="sglang")
    for (model, its), (what, options) in product(
        (("llama", SGLANG_GQA), ("dense16", SGLANG_MLA[:2])), SGLANG_VARIATIONS.items()
    ):
        yield from served(model, its, "graphs", what, engine="sglang", **options)
    for model, dtype, decode in (
        ("dsa16", "fp8_e4m3", "flashmla_kv"),
        ("dsa64", "fp8_e4m3", "flashmla_kv"),
        ("dsa64", "bfloat16", "flashmla_sparse"),
    ):
        options = {"kv_cache_dtype": dtype, "dsa_decode_backend": decode}
        options |= {"dsa_prefill_backend": "flashmla_sparse"}
        for case in ("eager", "graphs"):
            # The first jobs wait for about ten modules to be compiled.
            yield from served(model, SGLANG_DSA, case, dtype, "long", "sglang", seconds=480, **options)
    # So few tokens of a prompt at a time that rawmla's decoding, which reads FP8 caches, attends them.
    options = {"kv_cache_dtype": "fp8_e4m3", "page_size": 16, "chunked_prefill_size": 16}
    yield from served("llama", (SGLANG_GQA[1], SGLANG_TRITON), "graphs", "fp8", engine="sglang", **options)


def invariant() -> Iterator[Job]:
    """Batch invariance: every prompt alone beside the batch, module by module, and so without the one module
    of vLLM that is known to depend on the batch.
    """
    dense = (("FLASHMLA", "backend"), ("FLASH_ATTN_MLA", "none"), ("TRITON_MLA", "none"))
    for model, ways in (("dense16", dense), ("llama", GQA)):
        for pinned, (backend, mode) in product((False, True), ways):
            group = f"{model}-norm-pinned" if pinned else model
            yield Job(
                name=f"{group}-invariant-{backend}-{mode}",
                model=model,
                backend=backend,
                mode=mode,
                tasks={"invariance": {"kind": "plain", "tokens": 64, "pinned": pinned}},
                options={"max_num_batched_tokens": 16384},  # no prompt is cut in the batch
                variables=INVARIANT,
                group=group,
            )


def in_turns(group: str, model: str, ways: Ways, **more: Any) -> Iterator[Job]:
    """Timed jobs: every way in turn, three times, so that its restarts are spread over the whole time."""
    for number, (backend, mode) in product(range(3), ways):
        yield Job(
            name=f"{group}-{backend}-{mode}-{number}",
            model=model,
            backend=backend,
            mode=mode,
            group=group,
            round=number,
            alone=True,
            **more,
        )


def host() -> Iterator[Job]:
    """Host time in eager mode."""
    tasks = {"host": {"batch": 16, "context": 128, "steps": 60}}
    return in_turns("host", "dense16", DENSE, tasks=tasks, variables=IN_PROCESS)


def speed(model: str, ways: Ways, batches: list[int], cache: int, **layers: int) -> Iterator[Job]:
    """Decoding of requests of 4,000 tokens with 24 layers and vLLM's dummy weights, in vLLM's own two
    processes, with all graphs of decode steps; `cache` in bytes.
    """
    tasks = {"speed": {"batches": batches, "context": 4000, "steps": 24}}
    options: dict[str, Any] = {"hf_overrides": {"num_hidden_layers": 24, **layers}, "load_format": "dummy"}
    options |= {"max_num_seqs": max(batches), "kv_cache_memory_bytes": cache}
    return in_turns(f"speed-{model}", model, ways, case="graphs", tasks=tasks, options=options)


def speed_mla(model: str) -> Iterator[Job]:
    """Decoding of DeepSeek's shape, without experts."""
    pages = -(-(4000 + 384) // 64)
    cache = 256 * pages * 64 * 1152 * 24
    ways = (*DENSE, ("FLASH_ATTN_MLA", "none"))
    return speed(model, ways, [1, 16, 64, 256], cache + GIB, first_k_dense_replace=24)


def speed_gqa() -> Iterator[Job]:
    """Decoding of Llama's shape: FlashAttention-3's kernels beside rawmla's."""
    return speed("llama", GQA, [1, 16, 64], 32 * GIB)


def kernel() -> Iterator[Job]:
    """FlashMLA's kernel without the engine, and inside one in the same shape; rawmla's beside it."""
    shape = {"batch": 64, "context": 8192, "heads": 128}
    for library in ("flash_mla", "rawmla"):
        tasks = {"kernel": {"library": library, **shape}}
        yield Job(f"kernel-{library}", "dense128", library, tasks=tasks, group="kernel", alone=True)
    for backend, mode in (DENSE[0], DENSE[2]):
        yield Job(
            name=f"kernel-in-{backend}-{mode}",
            model="dense128",
            backend=backend,
            mode=mode,
            case="graphs",
            tasks={"speed": {"batches": [64], "context": 8192, "steps": 12}},
            options={"max_model_len": 8448, "kv_cache_memory_bytes": 4 * GIB},
            group="kernel",
            alone=True,
        )


WAVES: dict[str, Callable[[], Iterator[Job]]] = {
    "dense": dense,
    "dsa": dsa,
    "moe": moe,
    "gqa": gqa,
    "sglang": sglang,
    "invariant": invariant,
    "host": host,
    "kernel": kernel,
    "speed": lambda: speed_mla("dense128"),
    "speed16": lambda: speed_mla("dense16"),
    "speed-gqa": speed_gqa,
}
SETS = {"correct": ("dense", "dsa", "moe", "gqa", "invariant")}
"""Several waves under one name."""


def jobs(names: list[str]) -> list[Job]:
    """The jobs of waves, in order."""
    waves = [wave for name in names for wave in SETS.get(name, (name,))]
    return [job for wave in waves for job in WAVES[wave]()]
