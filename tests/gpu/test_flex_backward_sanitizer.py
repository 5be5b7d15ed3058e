"""Small backward calls of flex attention that reach the paths that dense attention does not have: to run
under compute-sanitizer, as test_flex_sanitizer.py. Inputs are made, and results compared, on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from flex_backward_calls import BackwardInputs, backward_of
from gpu_support import torch
from test_flex_sanitizer import on_gpu
from test_mha_backward_sanitizer import copied

from kit.flex import FlexCase, FlexInputs, with_mask_mod
from kit.flex_backward import (
    FlexGradients,
    captured_tensors,
    check_flex_backward,
    exact_results,
    make_flex_backward_inputs,
    make_flex_gradients,
)
from rawmla.flex.backward import Arrays, Options, gradients
from rawmla.kernels.mha_backward_variants import Needs

pytestmark = pytest.mark.sanitizer

CASES = (
    (FlexCase(b=1, h_q=2, h_kv=2, s_q=150, s_k=300, mask="causal"), "out", False),
    (FlexCase(b=2, h_q=2, h_kv=1, s_q=140, s_k=270, score="bias b h q k", layout="slice"), "both", False),
    (FlexCase(b=2, h_q=2, h_kv=2, s_q=140, s_k=270, mask="documents", score="head scale"), "both", True),
    (FlexCase(b=2, h_q=2, h_kv=1, s_q=140, s_k=270, mask="documents", score="filled"), "both", False),
    (FlexCase(b=1, h_q=2, h_kv=2, s_q=70, s_k=300, score="filled", dtype="float16"), "both", True),
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


def call_on_gpu(host: FlexInputs, given: FlexGradients, results: tuple[Any, Any]) -> BackwardInputs:
    """Copies of everything that a call reads. What has a gradient requires one."""
    device = on_gpu(host)
    if device.score is not None:
        wanted = captured_tensors(host)
        captures = {
            name: x.detach().requires_grad_(name in wanted) if isinstance(x, torch.Tensor) else x
            for name, x in device.score.captures.items()
        }
        device = replace(device, score=replace(device.score, captures=captures))
    moved = FlexGradients(copied(given.dout), copied(given.dlse))
    return BackwardInputs(device, moved, (copied(results[0]), copied(results[1])))


def run(case: FlexCase, of: str, work: Callable[[BackwardInputs], Any]) -> None:
    """Hold what `work` makes of a call on the GPU against the reference on the CPU."""
    host = make_flex_backward_inputs(case, "cpu")
    given = make_flex_gradients(host, of)
    results = exact_results(host)
    dq, dk, dv, captured = work(call_on_gpu(host, given, results))
    captured = {name: x.cpu() for name, x in captured.items()}
    check_flex_backward(host, given, results, (dq.cpu(), dk.cpu(), dv.cpu(), captured))


@pytest.mark.parametrize(
    ("case", "of", "deterministic"), CASES, ids=lambda x: x.id if isinstance(x, FlexCase) else str(x)
)
def test_small_flex_backward_call(case: FlexCase, of: str, deterministic: bool) -> None:
    """Functions are CUDA text: those of Python close over tensors of the CPU here."""
    run(case, of, lambda call: backward_of(call, "cuda", deterministic=deterministic))


def test_a_captured_gradient_in_cells() -> None:
    """In a fixed order where a place depends on query and key: two passes."""
    case = FlexCase(b=1, h_q=2, h_kv=1, s_q=70, s_k=140, mask="causal", score="bias h q k")
    run(case, "both", lambda call: backward_of(call, "cuda", deterministic=True))


@pytest.mark.parametrize("deterministic", (False, True))
def test_a_traced_function_with_gradients(deterministic: bool) -> None:
    def work(call: BackwardInputs) -> Any:
        assert call.inputs.score is not None and call.inputs.mask is not None
        slopes, documents = call.inputs.score.captures["slopes"], call.inputs.mask.captures["documents"]

        def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            return s - slopes[h].float() * (q - k).abs()

        def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
            return (documents[b, q] == documents[b, k]) & (q >= k)

        assert call.inputs.block_mask is not None
        lists = with_mask_mod(call.inputs.block_mask, mask)
        return backward_of(call, score_mod=score, block_mask=lists, deterministic=deterministic)

    run(
        FlexCase(b=2, h_q=2, h_kv=2, s_q=70, s_k=140, mask="documents", score="alibi table"), "both", work
    )  # fmt: skip


@pytest.mark.parametrize(
    "needs",
    (
        Needs(dq=True, dk=False, dv=False, others=False),
        Needs(dq=False, dk=True, dv=True, others=False),
        Needs(dq=False, dk=False, dv=False, others=True),
    ),
    ids=("dq", "dk and dv", "captured"),
)
def test_gradients_of_some(needs: Needs) -> None:
    """Each alone, beside others from calls of all."""

    def work(call: BackwardInputs) -> Any:
        inputs, dlse = call.inputs, call.gradients.dlse
        keywords, (out, lse) = inputs.keywords("cuda"), call.results
        dq, dk, dv, captured = gradients(
            needs,
            Arrays(inputs.q, inputs.k, inputs.v, out, call.gradients.dout, lse, dlse),
            keywords["score_mod"],
            keywords["block_mask"],
            Options(None, keywords["enable_gqa"], True),
        )
        given = (dq is not None, dk is not None, dv is not None, captured["factor"] is not None)
        assert given == needs
        every = backward_of(call, "cuda", deterministic=True)
        rows = [x if one is None else one for one, x in zip((dq, dk, dv), every, strict=False)]
        return (*rows, captured if needs.others else every[3])

    run(FlexCase(b=1, h_q=2, h_kv=2, s_q=70, s_k=140, mask="causal", score="head scale"), "both", work)
