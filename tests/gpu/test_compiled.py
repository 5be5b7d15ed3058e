"""Calls inside functions that torch.compile compiles. Operators of their own are in test_torch_ops.py, and
what is differentiated in test_autograd.py.
"""

from __future__ import annotations

from typing import Any

import pytest
from gpu_support import assert_same_bits, torch

import rawmla
from kit.mha import MhaCase, make_mha_inputs
from operations import Operation, assert_results, for_each

pytestmark = [
    pytest.mark.usefixtures("_nothing_compiled"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch's own
]


def is_attention(operation: Operation) -> bool:
    """Choose dense and flex attention, the latter with functions of Python, and prefix prefill; forward."""
    return operation.name.startswith(("mha", "prefix", "flex_traced")) and "backward" not in operation.name


@pytest.mark.parametrize("backend", ("inductor", "aot_eager"))
@for_each("cases", only=is_attention)
def test_compiled(operation: Operation, case: Any, backend: str) -> None:
    """Results, and what is computed of them. A call of flex attention breaks the graph."""
    call = operation.make(case)
    want = call.run()
    target = call.target()
    function = getattr(rawmla, call.function)

    def step(arguments: dict[str, Any]) -> Any:
        got = function(**arguments)
        first = got if call.written is not None else got[0]
        return got, first.float() * 2

    compiled = torch.compile(step, fullgraph=call.function != "flex_attention", backend=backend)
    made, twice = compiled({**call.arguments, **target})
    got = call.unpack(made) if call.unpack is not None else made
    got = got if isinstance(got, tuple) else (got,)
    assert_results("compiled", call, got, want)
    rows = ... if call.covered is None else call.covered()
    assert_same_bits("what follows", twice[rows], got[0][rows].float() * 2)
    if call.written is None:
        assert got[0].stride() == want[0].stride()


def test_one_graph_for_many_lengths() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")

    def step(q: Any, k: Any, v: Any) -> Any:
        return rawmla.flash_attn_func(q, k, v, causal=True)

    compiled_step = torch.compile(step, fullgraph=True, backend=counter, dynamic=True)
    for b, s_q, s_k in ((3, 70, 90), (2, 130, 150), (5, 33, 257)):
        inputs = make_mha_inputs(MhaCase(b=b, s_q=s_q, s_k=s_k))
        arrays = inputs.q, inputs.k, inputs.v
        for name, got, want in zip(("out", "lse"), compiled_step(*arrays), step(*arrays), strict=True):
            assert_same_bits(name, got, want)
    assert counter.frame_count <= 2
