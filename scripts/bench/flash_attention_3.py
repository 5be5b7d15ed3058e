"""FlashAttention-3 as vLLM calls it, by the operators of vLLM's wheel."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from . import ROOT

SITE = "RAWMLA_BENCH_VLLM"
"""The environment variable for a folder that vLLM's wheel was unpacked to."""

ALONE = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from bench.families import named
case = named(sys.argv[2])
case.of_vllm(case.make_inputs())(0)
torch.cuda.synchronize()
"""


def library() -> Path:
    """The file of the operators. Raises ImportError where vLLM is neither unpacked nor installed."""
    found = None if SITE in os.environ else importlib.util.find_spec("vllm")
    folders = [Path(os.environ[SITE], "vllm")] if SITE in os.environ else []
    folders += map(Path, found.submodule_search_locations or ()) if found else ()
    files = [path for folder in folders for path in folder.glob("vllm_flash_attn/_vllm_fa3_C*.so")]
    if not files:
        raise ImportError(
            f"no FlashAttention-3 of vLLM: it is not installed, and {SITE} names no folder of it"
        )
    return files[0]


@cache
def run_alone(case: str) -> None:
    """Make the call of a case in another process. Raises RuntimeError where it fails: where the library has
    no kernel, it ends the process.
    """
    command = [sys.executable, "-c", ALONE, str(ROOT / "scripts"), case]
    answer = subprocess.run(command, capture_output=True, text=True)
    if answer.returncode:
        said = (answer.stdout + answer.stderr).strip().splitlines() or [f"status {answer.returncode}"]
        raise RuntimeError(f"{case}: {said[-1]}")


def attention(q: Any, lengths: Any, page: int | None, **arguments: Any) -> Callable[..., Any]:
    """A function of k and v, `[pages, page, h_kv, d]`, that returns out `[tokens, h_q, d]`.

    `arguments` are the operator's own, bounds of requests among them. The plan of the work is made here: in
    vLLM all layers share it.
    """
    torch.ops.load_library(library())
    operators = torch.ops._vllm_fa3_C
    both = {"seqused_k": lengths, "is_causal": True, "window_size_left": -1, "window_size_right": -1}
    both |= {"num_splits": 0, "sm_margin": 0}
    both |= {name: arguments.pop(name) for name in ("cu_seqlens_q", "max_seqlen_q", "max_seqlen_k")}
    sizes = {"batch_size": len(lengths), "num_heads": q.shape[1], "num_heads_k": arguments.pop("h_kv")}
    sizes |= {"headdim": q.shape[2], "headdim_v": q.shape[2], "max_seqlen_k_new": 0, "has_softcap": False}
    plan = _call(operators.get_scheduler_metadata, both, sizes, qkv_dtype=q.dtype, page_size=page)
    numbers = {"softmax_scale": q.shape[2] ** -0.5, "softcap": 0.0, "is_rotary_interleaved": True}
    numbers |= {"cp_world_size": 1, "cp_rank": 0, "scheduler_metadata": plan}
    return lambda k, v: _call(operators.fwd, both, numbers, arguments, q=q, k=k, v=v)[0]


def _call(operator: Any, *parts: dict[str, Any], **more: Any) -> Any:
    """Call an operator, which has no defaults: None for each argument that is not given."""
    given = dict.fromkeys(one.name for one in operator.default._schema.arguments)
    for part in (*parts, more):
        given |= part
    return operator.default(**given)
