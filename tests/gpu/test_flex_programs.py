"""Functions of a user's in other calls and processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gpu_support import torch

from kit.flex import FlexCase, check_flex, make_flex_inputs
from operations.flex import attend


def test_functions_that_change_between_calls() -> None:
    """Numbers and tensors that a function closes over are read at every call; its Python branches too."""
    inputs = make_flex_inputs(FlexCase(s_q=200, s_k=277))
    table = torch.randn(277, device="cuda")
    state: dict[str, Any] = {"factor": 1.0, "adds": False}

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        s = s * state["factor"]
        return s + table[k] if state["adds"] else s

    def want(factor: float, bias: Any) -> Any:
        scores = factor * 0.125 * (inputs.q.double() @ inputs.k.double().transpose(2, 3))
        weights = torch.softmax(scores + (0 if bias is None else bias.double()), -1)
        return weights @ inputs.v.double(), None, None

    for factor, adds in ((1.0, False), (0.5, False), (0.5, True), (2.0, True), (1.0, False)):
        state.update(factor=factor, adds=adds)
        table.normal_()
        check_flex(inputs, (attend(inputs, score_mod=score)[0], None, None), (
            want(factor, table if adds else None)
        ))  # fmt: skip


IN_A_PROCESS = """
import sys, torch, rawmla
from rawmla.jit import nvrtc

def refuse(*arguments, **keywords):
    raise AssertionError("compiled again")

again = sys.argv[1] == "again"
if again:
    nvrtc.compile_source = refuse
length, width = (300, 70) if again else (200, 30)
table = torch.randn(4, length, device="cuda", requires_grad=True)
documents = torch.randint(0, 3, (2, length), device="cuda").sort().values

def score(s, b, h, q, k):
    return s * 0.5 + table[h, k] - (q - k) / width

def mask(b, h, q, k):
    return (documents[b, q] == documents[b, k]) & (q - k <= width)

cuda = rawmla.CudaMod(
    "score + bias(h, kv_idx)", {"bias": table}, grad="grad", capture_grads={"bias": ("h, kv_idx", "grad")}
)
q, k, v = (torch.randn(2, 4, length, 64, device="cuda", dtype=torch.float16) for _ in range(3))
q.requires_grad_()
for block, score_mod in ((128, score), (64, cuda)):
    blocks = rawmla.create_block_mask(mask, 2, None, length, length, BLOCK_SIZE=block)
    rawmla.flex_attention(q, k, v, score_mod, blocks).sum().backward()
torch.cuda.synchronize()
assert bool(table.grad.isfinite().all()) and bool(q.grad.isfinite().all())
"""


@pytest.mark.full
def test_a_new_process_compiles_nothing(tmp_path: Path) -> None:
    """With other numbers, tensors and lengths too: forward, backward and block masks."""
    root = Path(__file__).resolve().parents[2]
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "RAWMLA_CACHE_DIR": str(cache)}
    for which, compiles in (("first", True), ("again", False)):
        before = set(cache.rglob("*.cubin"))
        ran = subprocess.run(
            [sys.executable, "-c", IN_A_PROCESS, which],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert (set(cache.rglob("*.cubin")) > before) == compiles
