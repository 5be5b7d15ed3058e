"""Small backward calls of flex attention that reach the paths that dense attention does not have: to run
under compute-sanitizer, as test_flex_sanitizer.py. Inputs are made, and results compared, on the CPU.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from flex_backward_calls import BackwardInputs, backward_of, needs_flex_backward
from gpu_support import torch
from test_flex_sanitizer import on_gpu
from test_mha_backward_sanitizer import copied

from rawmla.testing.flex import FlexCase
from rawmla.testing.flex_backward import (
    FlexGradients,
    captured_tensors,
    check_flex_backward,
    exact_results,
    make_flex_backward_inputs,
    make_flex_gradients,
)

pytestmark = [pytest.mark.sanitizer, needs_flex_backward]

CASES = (
    (FlexCase(b=1, h_q=2, h_kv=2, s_q=150, s_k=300, mask="causal"), "out", False),
    (FlexCase(b=2, h_q=2, h_kv=1, s_q=140, s_k=270, score="bias b h q k", layout="slice"), "both", False),
    (FlexCase(b=2, h_q=2, h_kv=2, s_q=140, s_k=270, mask="documents", score="head scale"), "both", True),
    (FlexCase(b=2, b_kv=1, h_q=4, h_kv=2, s_q=70, s_k=300, mask="per batch", score="paged"), "lse", False),
    (FlexCase(b=1, h_q=2, h_kv=2, s_q=150, s_k=200, mask="random", block=(32, 64)), "out", True),
    (FlexCase(b=1, h_q=2, h_kv=2, s_q=150, s_k=500, mask="window", block=(256, 256)), "out", True),
    (FlexCase(b=2, h_q=2, h_kv=2, s_q=70, s_k=90, mask="padding", d_qk=59, d_v=111), "both", False),
    (
        FlexCase(b=1, h_q=2, h_kv=2, s_q=140, s_k=270, mask="checkered", score="distance", d_qk=256, d_v=256),
        "out",
        True,
    ),
    (FlexCase(b=1, h_q=2, h_kv=2, s_q=130, s_k=140, mask="empty", score="one element"), "both", False),
)


@pytest.mark.parametrize(
    ("case", "of", "deterministic"), CASES, ids=lambda x: x.id if isinstance(x, FlexCase) else str(x)
)
def test_small_flex_backward_call(case: FlexCase, of: str, deterministic: bool) -> None:
    """Functions are CUDA text: those of Python close over tensors of the CPU here."""
    host = make_flex_backward_inputs(case, "cpu")
    gradients = make_flex_gradients(host, of)
    results = exact_results(host)
    device = on_gpu(host)
    if device.score is not None:
        wanted = captured_tensors(host)
        captures = {
            name: x.detach().requires_grad_(name in wanted) if isinstance(x, torch.Tensor) else x
            for name, x in device.score.captures.items()
        }
        device = replace(device, score=replace(device.score, captures=captures))
    given = FlexGradients(copied(gradients.dout), copied(gradients.dlse))
    call = BackwardInputs(device, given, (copied(results[0]), copied(results[1])))
    dq, dk, dv, captured = backward_of(call, "cuda", deterministic=deterministic)
    captured = {name: x.cpu() for name, x in captured.items()}
    check_flex_backward(host, gradients, results, (dq.cpu(), dk.cpu(), dv.cpu(), captured))
