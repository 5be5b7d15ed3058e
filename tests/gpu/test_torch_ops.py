"""The torch operators on the GPU: torch's own checks of them, torch.compile, graphs, export, host time."""

from __future__ import annotations

import importlib
import io
import timeit
from typing import Any

import pytest
from gpu_support import assert_same_bits, call_arguments, sparse_arguments, torch
from torch_op_cases import CASES, dense, tensors

import rawmla
from kit import DenseCase, SparseCase, make_dense_inputs, make_sparse_inputs
from rawmla.call import tracing

NO_REQUESTS = {"plan empty"}  # idle rows are marked in another way than in the reference

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own


@pytest.fixture(autouse=True)
def _operators() -> Any:
    """Registered, and nothing compiled by another test."""
    importlib.import_module("rawmla.torch_ops")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def arguments(case: str, device: str) -> tuple[Any, list[Any]]:
    """The operator of a case, and its arguments."""
    name, make = CASES[case]
    return getattr(torch.ops.rawmla, name).default, make(device)


@pytest.mark.parametrize("case", CASES)
def test_opcheck(case: str) -> None:
    op, args = arguments(case, "cuda")
    torch.library.opcheck(op, tuple(args))


@pytest.mark.parametrize("case", CASES)
def test_as_on_the_cpu(case: str) -> None:
    """Results, and what is written: integers and bytes are equal, numbers are close, strides are the same."""
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


# ---- gradients of dense attention

LEAVES = {0: "q", 1: "k", 2: "v", 13: "attn_sink"}  # by places, of an operator of segments


def with_gradients(args: list[Any], *places: int) -> list[Any]:
    """The same arguments, of which these require grad."""
    return [x.detach().clone().requires_grad_() if i in places else x for i, x in enumerate(args)]


def of_head_dimensions(d_qk: int, d_v: int) -> list[Any]:
    """The arguments of `flash_attn`, for a kernel of another form than those of small ones."""
    make = tensors("cuda", 6)
    q, k, v = make(2, 70, 4, d_qk), make(2, 150, 2, d_qk), make(2, 150, 2, d_v)
    return [q, k, v, *arguments("flash_attn", "cuda")[1][3:]]


@pytest.mark.parametrize(
    ("case", "places"),
    (
        ("flash_attn", (0, 1, 2)),
        ("flash_attn transposed", (1,)),
        ("flash_attn padded", (0, 2)),
        ("flash_attn empty", (0, 1, 2)),
        ("flash_attn_varlen", (0, 1, 2)),
        ("flash_attn_varlen no keys", (0, 1, 2)),
        ("flash_attn_varlen full", (0, 1, 2, 13)),
        ("flash_attn_varlen full", (13,)),
    ),
)
def test_opcheck_with_gradients(case: str, places: tuple[int, ...]) -> None:
    op, args = arguments(case, "cuda")
    torch.library.opcheck(op, tuple(with_gradients(args, *places)))


@pytest.mark.parametrize("dims", ((192, 128), (256, 256)), ids=str)
def test_opcheck_of_other_forms(dims: tuple[int, int]) -> None:
    op = torch.ops.rawmla.flash_attn.default
    args = of_head_dimensions(*dims)
    torch.library.opcheck(op, tuple(with_gradients(args, 0, 1, 2)))
    out, lse = op(*args)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    for mask in ([True, True, True, False], [False, True, True, False], [True, False, False, False]):
        given = (dout, *args[:3], out, lse, dlse, *args[3:], mask)
        torch.library.opcheck(torch.ops.rawmla.flash_attn_backward.default, given)


@pytest.mark.parametrize("of", ("out", "lse", "both"))
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


@pytest.mark.parametrize("case", ("flash_attn_backward", "flash_attn_varlen_backward full"))
def test_backward_operators_have_no_derivative(case: str) -> None:
    """Whichever of their tensors requires grad, it is refused by name or when it is asked for."""
    op, args = arguments(case, "cuda")
    torch.library.opcheck(op, tuple(args), test_utils=("test_schema", "test_faketensor"))
    for place in range(6):  # dout, q, k, v, out, lse
        with pytest.raises(NotImplementedError, match="no (second )?derivative"):
            op(*with_gradients(args, place))[0].float().sum().backward()


def decode_step(q: Any, k_cache: Any, block_table: Any, cache_seqlens: Any) -> tuple[Any, Any]:
    """A dense call with a plan that is made inside."""
    plan, _ = rawmla.get_mla_metadata()
    return rawmla.flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, 512, plan, causal=True)


def assert_results(got: Any, want: Any) -> None:
    for name, one, other in zip(("out", "lse"), got, want, strict=True):
        assert_same_bits(name, one, other)


@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
@pytest.mark.parametrize("b", (0, 1, 5))
def test_compiled_decode(backend: str, b: int) -> None:
    inputs = make_dense_inputs(DenseCase(b=max(b, 1), s_q=2, h_q=16, s_k=3000, varlen=True))
    q, k_cache, table, lengths, _ = call_arguments(inputs)
    tensors = (q[:b], k_cache, table[:b], lengths[:b])
    assert_results(
        torch.compile(decode_step, fullgraph=True, backend=backend)(*tensors), decode_step(*tensors)
    )


def test_compiled_decode_of_many_batches() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(decode_step, fullgraph=True, backend=counter, dynamic=True)
    for b in (3, 17, 1):
        tensors = dense("cuda", b).values()
        assert_results(step(*tensors), decode_step(*tensors))
    assert counter.frame_count <= 2


def test_compiled_out() -> None:
    """A slice of the heads of a larger buffer, whose other half keeps its values."""

    def step(buffer: Any, q: Any, k_cache: Any, table: Any, lengths: Any) -> Any:
        plan, _ = rawmla.get_mla_metadata()
        return rawmla.flash_mla_with_kvcache(
            q, k_cache, table, lengths, 512, plan, causal=True, out=buffer[:, :, 16:]
        )[1]

    tensors = call_arguments(make_dense_inputs(DenseCase(b=3, h_q=16, s_k=3000, varlen=True)))[:4]
    q = tensors[0]
    buffer = torch.ones(3, q.shape[1], 32, 512, dtype=q.dtype, device=q.device)
    lse = torch.compile(step, fullgraph=True)(buffer, *tensors)
    assert_results((buffer[:, :, 16:], lse), decode_step(*tensors))
    assert bool((buffer[:, :, :16] == 1).all())


@pytest.mark.parametrize("layout", ("v32", "model1", "bf16"))
def test_compiled_sparse_decode(layout: str) -> None:
    """With lengths, a sink and an extra cache. The plan leaves out what lengths do, as in eager calls."""
    case = SparseCase(
        b=3, s_q=2, h_q=16, topk=300, layout=layout, lengths="random", extra_topk=100, extra_lengths="random",
        sink=True,
    )  # fmt: skip
    inputs = make_sparse_inputs(case)

    def step(positional: Any, keywords: Any) -> Any:
        plan, _ = rawmla.get_mla_metadata()
        return rawmla.flash_mla_with_kvcache(*positional, plan, **keywords)

    arguments = (sparse_arguments(inputs), inputs.keywords())
    assert_results(torch.compile(step, fullgraph=True)(*arguments), step(*arguments))


def test_cuda_graphs() -> None:
    """Replays follow lengths that change in place, and copy neither the cache nor the table."""
    from torch._dynamo.utils import counters
    from torch._inductor.cudagraph_trees import get_container

    q, k_cache, table, lengths, _ = call_arguments(
        make_dense_inputs(DenseCase(b=4, h_q=16, s_k=5000, varlen=True))
    )
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


def test_export() -> None:
    class Layer(torch.nn.Module):  # type: ignore[misc]
        def forward(self, q: Any, k_cache: Any, table: Any, lengths: Any) -> Any:
            return decode_step(q, k_cache, table, lengths)

    tensors = call_arguments(make_dense_inputs(DenseCase(b=3, h_q=16, s_k=3000, varlen=True)))[:4]
    b = torch.export.Dim("b")
    shapes = {"q": {0: b}, "k_cache": None, "table": {0: b}, "lengths": {0: b}}
    exported = torch.export.export(Layer(), tuple(tensors), dynamic_shapes=shapes)
    stored = io.BytesIO()
    torch.export.save(exported, stored)
    stored.seek(0)
    program = torch.export.load(stored).module()
    q, k_cache, table, lengths = tensors
    for chosen in ([0, 1, 2], [2, 0]):
        rows = torch.tensor(chosen, device=q.device)
        some = (q[rows], k_cache, table[rows], lengths[rows])
        assert_results(program(*some), decode_step(*some))


@pytest.mark.unpoisoned
def test_host_time(record_property: Any) -> None:
    """Eager calls run the same code whether operators are registered or not, and pay for one question."""
    inputs = make_dense_inputs(DenseCase(b=1, h_q=16, s_k=64))
    rawmla.flash_mla_with_kvcache(*call_arguments(inputs), rawmla.get_mla_metadata()[0])
    asked = tracing.is_traced
    importlib.reload(rawmla.torch_ops)
    assert tracing.is_traced.__code__ is asked.__code__
    names = {"tracing": tracing, "q": inputs.q}
    times = timeit.repeat("tracing.is_traced(q)", number=2000, repeat=50, globals=names)
    question = min(times) / 2000 * 1e6
    print(f"\nhost time of the question whether torch traces: {question:.3f} us")
    record_property("question_us", question)
    assert question < 0.3
