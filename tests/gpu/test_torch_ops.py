"""The torch operators on the GPU: as on the CPU, with gradients, through torch.compile, in CUDA graphs.

What does not depend on the device is in tests/test_torch_operators.py.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from full_cases import full_unless
from gpu_support import call_arguments, sparse_arguments, torch
from torch_op_cases import CASES, tensors

import rawmla
from kit import DenseCase, SparseCase, make_dense_inputs, make_sparse_inputs
from operations.core import assert_same_bits

NO_REQUESTS = {"plan empty"}  # idle rows are marked in another way than in the reference

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own


@pytest.fixture(autouse=True)
def _operators(_nothing_compiled: None) -> None:
    importlib.import_module("rawmla.torch_ops")


def arguments(case: str, device: str) -> tuple[Any, list[Any]]:
    """The operator of a case, and its arguments."""
    name, make = CASES[case]
    return getattr(torch.ops.rawmla, name).default, make(device)


@pytest.mark.parametrize("case", CASES)
def test_as_on_the_cpu(case: str) -> None:
    """Results, and what is written: integers and bytes are equal, numbers are close, strides are the same.
    The operator does what its schema and its implementation for fake tensors say.
    """
    compared = []
    for device in ("cuda", "cpu"):
        op, args = arguments(case, device)
        made = op(*args)
        results = list(made) if isinstance(made, tuple) else [] if made is None else [made]
        written = [
            value
            for value, argument in zip(args, op._schema.arguments, strict=True)
            if argument.alias_info is not None
        ]
        compared.append([*results, *written])
        assert all(x.device.type == device for x in compared[-1])
    for got, want in zip(*compared, strict=True):
        assert (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype)
        if case in NO_REQUESTS:
            continue
        if got.dtype.is_floating_point:
            torch.testing.assert_close(got.cpu(), want, atol=2e-2, rtol=2e-2)
        else:
            assert torch.equal(got.cpu(), want)
    op, args = arguments(case, "cuda")
    torch.library.opcheck(op, tuple(args), test_utils=("test_schema", "test_faketensor"))


# ---- gradients of dense attention

LEAVES = {0: "q", 1: "k", 2: "v", 13: "attn_sink"}  # by places, of an operator of segments


def with_gradients(args: list[Any], *places: int) -> list[Any]:
    """The same arguments, of which these require grad."""
    return [x.detach().clone().requires_grad_() if i in places else x for i, x in enumerate(args)]


@pytest.mark.parametrize(
    "dims", full_unless(lambda dims: dims[0] != 256, ((64, 64), (192, 128), (256, 256))), ids=str
)
def test_opcheck_with_gradients(dims: tuple[int, int]) -> None:
    """For kernels of each form, and for gradients of some inputs."""
    op, make = torch.ops.rawmla.flash_attn.default, tensors("cuda", 6)
    q, k, v = make(2, 70, 4, dims[0]), make(2, 150, 2, dims[0]), make(2, 150, 2, dims[1])
    args = [q, k, v, *arguments("flash_attn", "cuda")[1][3:]]
    torch.library.opcheck(op, tuple(with_gradients(args, 0, 1, 2)))
    out, lse = op(*args)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    for mask in ([True, True, True, False], [False, True, True, False], [True, False, False, False]):
        given = (dout, *args[:3], out, lse, dlse, *args[3:], mask)
        torch.library.opcheck(torch.ops.rawmla.flash_attn_backward.default, given)


@pytest.mark.parametrize("of", full_unless(lambda of: of == "both", ("out", "lse", "both")))
@pytest.mark.parametrize("case", ("flash_attn_varlen", "flash_attn_varlen full"))
def test_gradients_of_operators(case: str, of: str) -> None:
    """Those that the reference computes of tensors on the CPU."""
    compared = []
    for device in ("cuda", "cpu"):
        op, args = arguments(case, device)
        args = with_gradients(args, *[i for i in LEAVES if args[i] is not None])
        out, lse = op(*args)
        dout = tensors(device, 7)(*out.shape)
        # lse is -inf where there is nothing to attend: what its gradient is there has no effect
        dlse = torch.linspace(-1, 1, lse.numel(), device=device).reshape(lse.shape)
        results = {"out": {out: dout}, "lse": {lse: dlse}, "both": {out: dout, lse: dlse}}[of]
        torch.autograd.backward(list(results), list(results.values()))
        compared.append({name: args[i].grad for i, name in LEAVES.items() if args[i] is not None})
    got, want = compared
    assert got.keys() == want.keys() and len(got) == (4 if "full" in case else 3)
    for name, one in got.items():
        assert one.dtype == want[name].dtype and one.stride() == want[name].stride()
        torch.testing.assert_close(one.cpu(), want[name], atol=2e-2, rtol=2e-2, msg=f"{name} of {case}")
    if of == "lse":
        assert not bool(got["v"].any())


# ---- torch.compile


def decode_step(q: Any, k_cache: Any, block_table: Any, cache_seqlens: Any) -> tuple[Any, Any]:
    """A dense call with a plan that is made inside."""
    plan, _ = rawmla.get_mla_metadata()
    return rawmla.flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, 512, plan, causal=True)


def assert_results(got: Any, want: Any) -> None:
    """Both results have the same bits."""
    for name, one, other in zip(("out", "lse"), got, want, strict=True):
        assert_same_bits(name, one, other)


@pytest.mark.parametrize(("backend", "b"), (("aot_eager", 0), ("inductor", 5)))
def test_compiled_decode(backend: str, b: int) -> None:
    inputs = make_dense_inputs(DenseCase(b=5, s_q=2, h_q=16, s_k=3000, varlen=True))
    q, k_cache, table, lengths, _ = call_arguments(inputs)
    given = (q[:b], k_cache, table[:b], lengths[:b])
    step = torch.compile(decode_step, fullgraph=True, backend=backend)
    assert_results(step(*given), decode_step(*given))


def test_compiled_sparse_decode() -> None:
    """With lengths, a sink and an extra cache. The plan leaves out what lengths do, as in eager calls."""
    inputs = make_sparse_inputs(
        SparseCase(
            b=3,
            s_q=2,
            h_q=16,
            topk=300,
            layout="model1",
            lengths="random",
            extra_topk=100,
            extra_lengths="random",
            sink=True,
        )
    )

    def step(positional: Any, keywords: Any) -> Any:
        plan, _ = rawmla.get_mla_metadata()
        return rawmla.flash_mla_with_kvcache(*positional, plan, **keywords)

    given = (sparse_arguments(inputs), inputs.keywords())
    assert_results(torch.compile(step, fullgraph=True)(*given), step(*given))


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
