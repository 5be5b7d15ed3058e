"""The torch operators on the GPU: as on the CPU, with gradients, in CUDA graphs.

What does not depend on the device is in tests/test_torch_operators.py.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from full_cases import full_unless
from gpu_support import torch
from operators import (
    CASES,
    Recorder,
    check_operator,
    fixed,
    id_of,
    operator_call,
    tensors,
    uses,
    with_gradients,
)

import rawmla
from kit import DenseCase, make_dense_inputs
from operations import Operation
from operations.core import assert_results as assert_all_results
from operations.core import assert_same_bits
from operations.mla_decode import call_arguments

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own


@pytest.fixture(autouse=True)
def _operators(_nothing_compiled: None) -> None:
    importlib.import_module("rawmla.torch_ops")


@pytest.mark.parametrize("pair", CASES, ids=id_of)
def test_operators(pair: tuple[Operation, Any]) -> None:
    """Results are those of eager calls, in all ways to call; each operator does what its schema and its
    implementation for fake tensors say, so its strides are those on the CPU too.
    """
    operation, case = pair
    call = operation.make(case)
    want = list(uses(operation, call))
    with Recorder() as recorder:
        got = list(uses(operation, call))
    for results, wanted in zip(got, want, strict=True):
        if len(results) == len(call.results):
            assert_all_results(operation.name, call, results, wanted)
    call.check(got[0])
    for op, args in recorder.distinct():
        check_operator(op, args)


# ---- gradients of dense attention


@pytest.mark.parametrize(
    "dims", full_unless(lambda dims: dims[0] != 256, ((64, 64), (192, 128), (256, 256))), ids=str
)
def test_opcheck_with_gradients(dims: tuple[int, int]) -> None:
    """For kernels of each form, and for gradients of some inputs."""
    make = tensors("cuda", 6)
    q, k, v = make(2, 70, 4, dims[0]), make(2, 150, 2, dims[0]), make(2, 150, 2, dims[1])
    op, args = operator_call("flash_attn_func", **fixed("cuda") | {"q": q, "k": k, "v": v})
    torch.library.opcheck(op, tuple(with_gradients(op, args, "q", "k", "v")))
    out, lse = op(*args)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    for mask in ([True, True, True, False], [False, True, True, False], [True, False, False, False]):
        given = (dout, *args[:3], out, lse, dlse, *args[3:], mask)
        torch.library.opcheck(torch.ops.rawmla.flash_attn_backward.default, given)


# ---- torch.compile


def decode_step(q: Any, k_cache: Any, block_table: Any, cache_seqlens: Any) -> tuple[Any, Any]:
    """A dense call with a plan that is made inside."""
    plan, _ = rawmla.get_mla_metadata()
    return rawmla.flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, 512, plan, causal=True)


def assert_results(got: Any, want: Any) -> None:
    """Both results have the same bits."""
    for name, one, other in zip(("out", "lse"), got, want, strict=True):
        assert_same_bits(name, one, other)


def test_cuda_graphs() -> None:
    """Replays follow lengths that change in place, and copy neither the cache nor the table."""
    from torch._dynamo.utils import counters
    from torch._inductor.cudagraph_trees import get_container

    inputs = make_dense_inputs(DenseCase(b=4, h_q=16, s_k=5000, varlen=True))
    q, k_cache, table, lengths, _ = call_arguments(inputs)
    whole = lengths.clone()
    for tensor in (k_cache, table, lengths):
        torch._dynamo.mark_static_address(tensor)
    step = torch.compile(decode_step, fullgraph=True, mode="reduce-overhead")
    counters.clear()
    for replay in range(6):  # the first two are the warm-up and the capture
        lengths.copy_(whole // (replay + 1))
        torch.compiler.cudagraph_mark_step_begin()
        got = [x.clone() for x in step(q, k_cache, table, lengths)]
        assert_results(got, decode_step(q, k_cache, table, lengths))
    assert counters["inductor"]["cudagraph_skips"] == 0
    manager = get_container(q.device.index).tree_manager
    assert manager is not None
    (node,) = [node for nodes in manager.roots.values() for node in nodes]
    assert len(node.static_input_idxs) == 3 and len(node.non_static_input_idx) == 1
