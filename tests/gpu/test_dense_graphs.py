"""What stands behind graphs of dense calls: launches that overlap, and kernels that are loaded or not."""

import os
import subprocess
import sys
from typing import Any

import pytest
from gpu_support import (
    assert_same_bits,
    call_arguments,
    plan,
    torch,
)

import rawmla
from kit import DenseCase, make_dense_inputs


@pytest.mark.unpoisoned
@pytest.mark.parametrize("varlen", (False, True), ids=("whole", "split"))
def test_calls_that_wait_for_each_other(varlen: bool) -> None:
    """Each call's q is the out of the one before, which holds NaN until that call, combine included, is done.

    Of requests that are not split, most CTAs of the combine leave early. Without poison, whose fills would
    keep the calls from overlapping.
    """
    inputs = make_dense_inputs(DenseCase(b=132, h_q=64, s_k=1000, d_qk=512, varlen=varlen))
    metadata, num_splits = plan(inputs, "tensors")
    splits = num_splits.diff()
    assert bool((splits > 1).any()) == varlen
    q, *rest = call_arguments(inputs)

    def chain(between: Any) -> list[Any]:
        outs = [torch.full_like(q, float("nan")) for _ in range(10)]
        between()
        for before, out in zip([q, *outs], outs, strict=False):
            rawmla.flash_mla_with_kvcache(before, *rest, metadata, num_splits, out=out)
            between()
        return outs

    for number, (got, want) in enumerate(
        zip(chain(lambda: None), chain(torch.cuda.synchronize), strict=True)
    ):
        assert not want.isnan().any()
        assert_same_bits(f"out of call {number}", got, want)


_MISSING_KERNEL = """
import torch
import rawmla
from kit import DenseCase, make_dense_inputs

inputs = make_dense_inputs(DenseCase(b=2, h_q=16, s_k=300))
arguments = (inputs.q, inputs.k_cache, inputs.block_table, inputs.cache_seqlens, 512)
graph = torch.cuda.CUDAGraph()
metadata, _ = rawmla.get_mla_metadata()
try:
    with torch.cuda.graph(graph):
        rawmla.flash_mla_with_kvcache(*arguments, metadata)
except rawmla.KernelNotReadyError as error:
    assert "warmup" in str(error), error
    print("refused")
torch.cuda.synchronize()
metadata, _ = rawmla.get_mla_metadata()
out, _ = rawmla.flash_mla_with_kvcache(*arguments, metadata)
assert bool(out.isfinite().all())
graph = torch.cuda.CUDAGraph()
metadata, _ = rawmla.get_mla_metadata()
with torch.cuda.graph(graph):
    captured, _ = rawmla.flash_mla_with_kvcache(*arguments, metadata)
graph.replay()
assert torch.equal(captured, out)
print("captured")
"""

_WARMED_UP = """
import torch
import rawmla
from kit import DenseCase, make_dense_inputs

rawmla.warmup()
inputs = make_dense_inputs(DenseCase(b=2, h_q=16, s_k=300))
graph = torch.cuda.CUDAGraph()
metadata, _ = rawmla.get_mla_metadata()
with torch.cuda.graph(graph):
    out, _ = rawmla.flash_mla_with_kvcache(
        inputs.q, inputs.k_cache, inputs.block_table, inputs.cache_seqlens, 512, metadata
    )
graph.replay()
assert bool(out.isfinite().all())
print("captured")
"""


@pytest.mark.parametrize(
    ("program", "expected"),
    ((_MISSING_KERNEL, ["refused", "captured"]), (_WARMED_UP, ["captured"])),
    ids=("kernel missing", "after warmup"),
)
def test_capture_in_a_fresh_process(program: str, expected: list[str]) -> None:
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == expected
