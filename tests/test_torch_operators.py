"""The torch operators on the CPU: torch's own checks of them, torch.compile, torch.export, and refusals."""

from __future__ import annotations

import io
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import fresh
import numpy as np
import pytest
from full_cases import full_unless

torch = pytest.importorskip("torch")

from operators import (  # noqa: E402
    CASES,
    FIRST_CASES,
    NAMES,
    Recorder,
    all_arguments,
    check_operator,
    copies,
    cpu_call,
    fixed,
    id_of,
    int32,
    operator_call,
    tensors,
    uses,
    varlen,
    with_gradients,
)
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from torch._subclasses import FakeTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.utils._pytree import tree_map_only  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

import rawmla  # noqa: E402
import rawmla.torch_ops  # noqa: E402
from operations import Operation, core  # noqa: E402
from rawmla import reference  # noqa: E402
from rawmla.call import tracing  # noqa: E402

OPS = torch.ops.rawmla
PAGE = 16
NO_COMPILER = shutil.which(os.environ.get("CXX", "g++")) is None
BACKENDS = ("eager", "aot_eager", "inductor")
AND_INDUCTOR = pytest.mark.parametrize("backend", full_unless(lambda name: name != "eager", BACKENDS))


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    """No test finds what another one compiled."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def assert_equal(got: Any, want: Any) -> None:
    """Tuples of tensors that are equal in shape, dtype and every number."""
    for one, other in zip(got, want, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def dense(b: int = 3, s_q: int = 2, h_q: int = 4) -> dict[str, Any]:
    """The tensors of a dense call: two pages a request, the first request without a token."""
    make = tensors()
    return {
        "q": make(b, s_q, h_q, 576),
        "k_cache": make(2 * b + 1, PAGE, 1, 576),
        "block_table": int32([[2 * i + 1, 2 * i] for i in range(b)]).reshape(b, 2),
        "cache_seqlens": int32([(11 * i) % (2 * PAGE + 1) for i in range(b)]),
    }


def empty_plan(made: dict[str, Any]) -> tuple[Any, Any]:
    """The tensors of a plan, to be filled."""
    return torch.zeros(5, 8, dtype=torch.int32), torch.zeros(len(made["q"]) + 1, dtype=torch.int32)


def decode_operator(**more: Any) -> tuple[Any, list[Any]]:
    """The operator of decoding, and its arguments."""
    plan = rawmla.FlashMLASchedMeta()
    return operator_call(
        "flash_mla_with_kvcache", **dense(), head_dim_v=512, tile_scheduler_metadata=plan, **more
    )


def compiled_by(backend: str, step: Callable[..., Any]) -> Callable[..., Any]:
    if backend == "inductor" and NO_COMPILER:
        pytest.skip("needs a C++ compiler")
    return torch.compile(step, fullgraph=True, backend=backend)


# ---- the operators


QUICK = ("decode_out", "flash_attn_varlen_backward_out")


@cache
def first_calls() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """A call of each operator, by its name."""
    with Recorder() as recorder:
        for operation, case in (pair for pair in CASES if type(pair) is tuple):
            for _ in uses(operation, cpu_call(operation, case)):
                pass
    return {op.name().removeprefix("rawmla::"): (op, args) for op, args in reversed(recorder.calls)}


@pytest.mark.parametrize("pair", CASES, ids=id_of)
def test_operators(pair: tuple[Operation, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU kernels are the reference with its arguments in their places; then torch's checks."""
    operation, case = pair
    with Recorder() as recorder:
        got = list(uses(operation, cpu_call(operation, case)))
    monkeypatch.setattr(core, "rawmla", reference)
    want = list(uses(operation, cpu_call(operation, case)))
    for results, wanted in zip(got, want, strict=True):
        for one, other in zip(results, wanted, strict=True):
            core.assert_same_bits(operation.name, one, other)
    for op, args in recorder.distinct():
        check_operator(op, args)


@pytest.mark.parametrize(
    "name",
    full_unless(lambda name: name.removesuffix("_out") not in {*NAMES} - {name} or name in QUICK, NAMES),
)
def test_opcheck_with_dynamic_shapes(name: str) -> None:
    """An operator that fills a given out has the checks of the one without."""
    op, args = first_calls()[name]
    args = copies(args)
    torch.library.opcheck(op, args, test_utils=("test_autograd_registration", "test_aot_dispatch_dynamic"))


def test_every_operator_is_called_and_returns_no_argument() -> None:
    assert [*NAMES] == sorted(first_calls())
    for op, _ in first_calls().values():
        assert all(result.alias_info is None for result in op._schema.returns), op


def test_the_page_has_every_operator() -> None:
    page = (Path(__file__).parents[1] / "docs" / "torch_operators.md").read_text()
    _, _, table = page.partition("## The operators")
    named = re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)))
    assert {*named} == {*NAMES}


@pytest.mark.parametrize("pair", CASES, ids=id_of)
def test_compiled(pair: tuple[Operation, Any]) -> None:
    """Each public function in one graph, with all that it writes."""
    operation, case = pair
    call = cpu_call(operation, case)
    function = getattr(rawmla, call.function)
    arguments = all_arguments(call)
    with Recorder():
        want = call.run("tensors")
    got = torch.compile(function, fullgraph=True, backend="aot_eager")(**arguments)
    got = arguments[call.written] if call.written else got
    for one, other in zip(got if isinstance(got, tuple) else (got,), want, strict=True):
        core.assert_same_bits(operation.name, one, other)


# ---- refusals


def wrong_dtype(x: Any) -> Any:
    return [*x[:-1], wrong_dtype(x[-1])] if isinstance(x, list) else x.to(torch.complex64)


PART_OF = {"qkv": "q", "kv": "k"}
"""What an operator gets of a packed array, and names."""
NOT_REFUSED_SO = ("cache on the CPU", "no parts", "a tensor of parts", "no scale")
"""Right here; and refused by the schema of the operator, in torch's words."""
NO_PLAN = "tile_scheduler_metadata: expected a FlashMLASchedMeta or "
WINDOW = "window_size: expected at least 0"
BEFORE_OPERATORS: dict[str, list[tuple[type[Exception], str, dict[str, Any]]]] = {
    "dense": [
        (TypeError, NO_PLAN, {"tile_scheduler_metadata": x, "num_splits": None})
        for x in (None, rawmla.FlashMLASchedMeta, (None, None))
    ],
    "mha_varlen": [
        (ValueError, "attention_chunk: expected 0", {"attention_chunk": 3}),
        (ValueError, WINDOW, {"window_size": (-2, 0)}),
        (ValueError, "max_seqlen_q: expected an int of at least 0", {"max_seqlen_q": -1}),
    ],
    "mha_varlen_backward": [
        (TypeError, "deterministic: expected a bool", {"deterministic": 1}),
        (TypeError, "softmax_scale: expected a number, got a tensor", {"softmax_scale": torch.ones(())}),
        (ValueError, WINDOW, {"window_size": (-2, 0)}),
    ],
}
"""By the name of an operation, what the call paths of traced functions check themselves."""


@pytest.mark.parametrize("kind", ("CPU", "fake"))
@pytest.mark.parametrize("pair", FIRST_CASES, ids=id_of)
def test_checks_of_the_public_function(pair: tuple[Operation, Any], kind: str) -> None:
    """The errors of eager calls: a wrong dtype of each array, and what the operation refuses besides."""
    operation, case = pair
    call = cpu_call(operation, case)
    good = all_arguments(call)
    refused = [
        (TypeError, PART_OF.get(name, name), {name: wrong_dtype(x)})
        for name, x in good.items()
        if isinstance(x, (list, torch.Tensor))
    ]
    refused += [
        (error, text, change(good))
        for name, (error, text, change) in operation.bad.items()
        if name not in NOT_REFUSED_SO
    ]
    refused += BEFORE_OPERATORS.get(operation.name, [])
    mode = Recorder() if kind == "CPU" else FakeTensorMode()
    for error, text, changes in refused:
        given = good | changes
        if isinstance(mode, FakeTensorMode):
            given = tree_map_only(torch.Tensor, mode.from_tensor, given)
        with mode, pytest.raises(error, match=rf"^{text}"):
            getattr(rawmla, call.function)(**given)


def test_one_device() -> None:
    op, args = decode_operator()
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in args]
        fakes[3] = torch.empty(3, 2, dtype=torch.int32, device="cuda")
        with pytest.raises(ValueError, match="^block_table: expected .* device cpu, as q is, got cuda:0"):
            op(*fakes)


def test_sizes_without_an_example() -> None:
    """What depends on data is left to the kernel to check."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    shapes = ShapeEnv()
    with FakeTensorMode(shape_env=shapes):
        tokens = shapes.create_unbacked_symint()
        q = torch.empty(tokens, 4, 576, dtype=torch.bfloat16)
        indices = torch.empty(tokens, 1, 64, dtype=torch.int32)
        kv = torch.empty(9, 1, 576, dtype=torch.bfloat16)
        out, max_logits, _ = OPS.sparse_fwd(q, None, kv, indices, 0.05, None, None, "2", False, False)
    assert out.shape[0] is not None and str(out.shape[0]) == str(max_logits.shape[0]) == str(tokens)


# ---- torch.compile


def decode_step(q: Any, k_cache: Any, block_table: Any, cache_seqlens: Any) -> tuple[Any, Any]:
    """Two layers with one plan, made inside."""
    made, _ = rawmla.get_mla_metadata()
    for _ in range(2):
        out, lse = rawmla.flash_mla_with_kvcache(
            q, k_cache, block_table, cache_seqlens, 512, made, causal=True
        )
    return out * 2, lse


def decode_wanted(made: dict[str, Any]) -> tuple[Any, Any]:
    out, lse = reference.flash_mla_with_kvcache(**made, causal=True)
    return out * 2, lse


@AND_INDUCTOR
def test_compiled_call_with_tensor_plan_and_out(backend: str) -> None:
    """The out is a slice of a larger buffer, whose other half keeps its values."""

    def step(plan: Any, buffer: Any, q: Any, k_cache: Any, block_table: Any, cache_seqlens: Any) -> Any:
        rows, splits = rawmla.get_mla_metadata(cache_seqlens, 8, 1, 4)
        rawmla.get_mla_metadata(cache_seqlens, 8, 1, 4, out=plan)
        out = buffer[:, :, 4:]
        got, lse = rawmla.flash_mla_with_kvcache(
            q, k_cache, block_table, cache_seqlens, 512, rows, splits, causal=True, out=out
        )
        return buffer + 1, got * 2, lse

    made = dense()
    given = empty_plan(made)
    buffer = torch.ones(3, 2, 8, 512, dtype=torch.bfloat16)
    whole, *got = compiled_by(backend, step)(given, buffer, **made)
    want = decode_wanted(made)
    assert_equal(got, want)
    assert torch.equal(buffer[:, :, 4:] * 2, want[0])
    assert torch.equal(whole, buffer + 1) and (buffer[:, :, :4] == 1).all()
    assert np.array_equal(given[0], reference.plan(made["cache_seqlens"], 5).tensor_rows)


def test_sizes_share_a_graph() -> None:
    """Also the first and the last: the first call may compile twice, as torch tries its floats as inputs."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(rawmla.flash_mla_sparse_fwd, fullgraph=True, backend=counter, dynamic=True)
    counts = []
    for tokens, rows, topk in ((3, 20, 64), (17, 9, 70), (2, 40, 5)):
        indices = torch.arange(tokens * topk, dtype=torch.int32).view(tokens, 1, topk) % (rows + 1) - 1
        given = tensors()(tokens, 2, 576), tensors(seed=1)(rows, 1, 576), indices, 0.05
        assert_equal(compiled(*given), reference.flash_mla_sparse_fwd(*given))
        counts.append(counter.frame_count)
    assert counts[1] == counts[2]
    for scale in (0.1, 0.2):  # torch may compile for each
        assert_equal(compiled(*given[:3], scale), reference.flash_mla_sparse_fwd(*given[:3], scale))


class TestPlanObject:
    """Objects that come from outside are filled and checked as in eager calls."""

    @staticmethod
    def step(plan: Any, made: dict[str, Any]) -> Any:
        return rawmla.flash_mla_with_kvcache(*made.values(), 512, plan, causal=True)

    @pytest.mark.parametrize("batch_invariant", (False, True))
    def test_filled(self, batch_invariant: bool) -> None:
        counter = CompileCounterWithBackend("aot_eager")
        step = torch.compile(self.step, fullgraph=True, backend=counter)
        made = dense()
        want = reference.FlashMLASchedMeta(enable_batch_invariant=batch_invariant)
        reference.flash_mla_with_kvcache(**made, tile_scheduler_metadata=want, causal=True)
        plan, _ = rawmla.get_mla_metadata(enable_batch_invariant=batch_invariant)
        for _ in range(3):
            assert_equal(step(plan, made), reference.flash_mla_with_kvcache(**made, causal=True))
            assert plan.have_initialized and plan.config == want.config
            filled = [(one.tile_scheduler_metadata, one.num_splits) for one in (plan, want)]
            assert_equal(*filled)
        assert counter.frame_count == 2  # for an empty object, and for one with arrays

    def test_recomputed(self) -> None:
        """A filled object is recomputed in place, in its own order of fields."""

        def step(plan: Any, lengths: Any) -> Any:
            return rawmla.get_mla_metadata(lengths, 8, 1, 4, out=plan)[0].tile_scheduler_metadata

        made = dense()
        plan, _ = rawmla.get_mla_metadata()
        torch.compile(self.step, fullgraph=True, backend="aot_eager")(plan, made)
        rows, lengths = plan.tile_scheduler_metadata, int32([900, 5, 300])
        got = torch.compile(step, fullgraph=True, backend="aot_eager")(plan, lengths)
        want = reference.plan(lengths, len(rows))
        assert got is rows
        assert np.array_equal(rows, want.object_rows) and np.array_equal(plan.num_splits, want.num_splits)

    def test_of_another_kind_of_call(self) -> None:
        plan, _ = rawmla.get_mla_metadata()
        step = torch.compile(self.step, fullgraph=True, backend="aot_eager")
        step(plan, dense())
        with pytest.raises(Exception, match="expected a plan for b = 2|Observed exception"):
            step(plan, dense(2))
        with pytest.raises(Exception, match="expected None with a FlashMLASchedMeta|Observed exception"):
            torch.compile(
                lambda made: rawmla.flash_mla_with_kvcache(*made.values(), 512, plan, made["q"]),
                fullgraph=True,
            )(dense())


@pytest.mark.parametrize("strict", (True, False))
def test_export(strict: bool) -> None:
    """With a dynamic batch; saved and loaded again."""

    class Layer(torch.nn.Module):  # type: ignore[misc]
        def forward(self, q: Any, k_cache: Any, block_table: Any, cache_seqlens: Any) -> Any:
            return decode_step(q, k_cache, block_table, cache_seqlens)

    b = torch.export.Dim("b")
    shapes = {"q": {0: b}, "k_cache": None, "block_table": {0: b}, "cache_seqlens": {0: b}}
    example, other = dense(), dense(5)
    other["k_cache"] = example["k_cache"]
    other["block_table"] = other["block_table"] % 7
    exported = torch.export.export(Layer(), tuple(example.values()), dynamic_shapes=shapes, strict=strict)
    names = [str(node.target) for node in exported.graph.nodes]
    assert "rawmla.decode.default" in names and names.count("rawmla.plan_object.default") == 1
    stored = io.BytesIO()
    torch.export.save(exported, stored)
    stored.seek(0)
    program = torch.export.load(stored).module()
    for made in (example, other):
        assert_equal(program(*made.values()), decode_wanted(made))


_FIRST_CALL = """
import sys
import rawmla
{before}
import torch
def step(indices, table):
    return rawmla.convert_indices(indices, table, 16)
indices = torch.tensor([[3, 17]], dtype=torch.int32)
table = torch.tensor([[5, 1]], dtype=torch.int32)
got = torch.compile(step, fullgraph=True, backend="eager")(indices, table)
assert got.tolist() == [[83, 17]], got
"""


@pytest.mark.parametrize(
    "before",
    full_unless(lambda before: not before, ("", "rawmla.convert_indices; assert 'torch' not in sys.modules")),
    ids=("nothing loaded", "loaded before torch"),
)
def test_compiled_call_is_the_first(before: str) -> None:
    """Whatever was imported first, torch.compile finds the operators."""
    text = _FIRST_CALL.format(before=before)
    done = fresh.run(("-c", text), Path(__file__).parents[1], imports="" if before else fresh.IMPORTS)
    assert done.returncode == 0, done.stderr


# ---- modes of torch outside torch.compile


@pytest.mark.parametrize("kind", ("real", "fake", "symbolic"))
def test_make_fx(kind: str) -> None:
    made = dense()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        graph = make_fx(decode_step, tracing_mode=kind)(*made.values())
    names = [str(node.target) for node in graph.graph.nodes]
    assert names.count("rawmla.decode.default") == 2 and names.count("rawmla.plan_object.default") == 1
    assert_equal(graph(*made.values()), decode_wanted(made))


class Wrapper(torch.Tensor):  # type: ignore[misc]
    """A tensor whose class answers operators."""

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ("FakeTensor", "Wrapper"))
def test_class_of_tensors(kind: str) -> None:
    """Nobody answers for such tensors without a mode or torch.compile: refused by name, without a warning."""
    made = dense()
    made["q"] = (
        FakeTensorMode().from_tensor(made["q"]) if kind == "FakeTensor" else made["q"].as_subclass(Wrapper)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(TypeError, match=rf"^q: expected a plain torch tensor, got .*{kind}; "):
            decode_step(**made)


def test_arrays_that_torch_does_not_follow() -> None:
    tensor = torch.zeros(3)
    assert not tracing.is_traced(tensor)
    with FlopCounterMode(display=False):
        assert tracing.is_traced(tensor) and tracing.is_traced([tensor])
        assert not tracing.is_traced(np.zeros(3)) and not tracing.is_traced([np.zeros(3)])
        with torch._C._DisableTorchDispatch():
            assert not tracing.is_traced(tensor)


# ---- gradients and vmap


def test_backward() -> None:
    op, args = decode_operator()
    args = with_gradients(op, args, "q")
    text = r"rawmla::decode has no derivative: q: expected .* torch\.no_grad\(\) or torch\.inference_mode\(\)"
    with pytest.raises(NotImplementedError, match=f"^{text}"):
        op(*args)
    parts = {"outs": [tensors()(2, 3, 4, 512) for _ in range(2)], "lses": [torch.zeros(2, 4, 3)] * 2}
    op, outs = operator_call("merge_attn_states", **parts)
    outs[0][1].requires_grad_()
    with pytest.raises(NotImplementedError, match=r"^rawmla::merge has no derivative: outs\[1\]: "):
        op(*outs)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert not OPS.decode(*args)[0].requires_grad
    with pytest.raises(Exception, match="rawmla::decode has no derivative"):
        torch.compile(lambda *args: OPS.decode(*args), fullgraph=True, backend="aot_eager")(*args)


@pytest.mark.skipif(
    not hasattr(torch.library, "register_vmap"), reason="torch.library.register_vmap: torch 2.5"
)
def test_vmap() -> None:
    op, (q, *others) = decode_operator()
    with pytest.raises(NotImplementedError, match="^rawmla::decode cannot be mapped by torch.vmap: "):
        torch.vmap(lambda q: op(q, *others)[0])(torch.stack([q, q]))


def test_what_is_written_has_another_version() -> None:
    """So a graph that saved the tensor does not take the new values for the old ones."""
    op, args = decode_operator(out=torch.zeros(3, 2, 4, 512, dtype=torch.bfloat16))
    weight = torch.ones(512, dtype=torch.bfloat16, requires_grad=True)
    product = args[-1] * weight
    op(*args)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()
    with torch.inference_mode():
        args[-1] = args[-1].clone()
        op(*args)


# ---- gradients of dense attention


@pytest.mark.parametrize(
    ("function", "names"),
    [
        ("flash_attn_func", ("q", "k", "v")),
        ("flash_attn_func", ("k",)),
        ("flash_attn_varlen_func", ("q", "k", "v", "attn_sink")),
        ("flash_attn_varlen_func", ("attn_sink",)),
    ],
)
def test_opcheck_with_gradients(function: str, names: tuple[str, ...]) -> None:
    op, args = operator_call(function, **(fixed() if function == "flash_attn_func" else varlen(full=True)))
    torch.library.opcheck(op, tuple(with_gradients(op, args, *names)))


def gradients_of(made: dict[str, Any], dout: Any, dlse: Any) -> dict[str, Any]:
    """The gradients of the reference's function, by the names of the leaves."""
    out, lse = reference.flash_attn_varlen_func(**made)
    got = reference.flash_attn_varlen_backward(dout, out=out, lse=lse, dlse=dlse, **made)
    return dict(zip(("q", "k", "v", "attn_sink"), got, strict=False))


@pytest.mark.parametrize("of", ("out", "lse", "both"))
@pytest.mark.parametrize("full", (False, True))
def test_gradients_of_operators(full: bool, of: str) -> None:
    """Through out and lse, of some and of all arrays; those of the reference's backward, in every bit."""
    made = varlen(full=full)
    dout = tensors(seed=7)(9, 4, 24) * (of != "lse")
    dlse = torch.linspace(-1, 1, 36).reshape(9, 4)
    want = gradients_of(made, dout, None if of == "out" else dlse)
    op, args = operator_call("flash_attn_varlen_func", **made)
    known = [argument.name for argument in op._schema.arguments]
    for names in (("q", "k", "v"), ("k",), ("q", "v", "attn_sink")):
        given = dict(zip(known, with_gradients(op, args, *names), strict=True))
        out, lse = op(*given.values())
        grads = {"out": {out: dout}, "lse": {lse: dlse}, "both": {out: dout, lse: dlse}}[of]
        torch.autograd.backward([*grads], [*grads.values()])
        for name in ("q", "k", "v", "attn_sink"):
            grad = None if given[name] is None else given[name].grad
            assert torch.equal(grad, want[name]) if name in names and name in want else grad is None, name


def test_saved_tensors_of_an_operator_that_were_changed() -> None:
    op, args = operator_call("flash_attn_varlen_func", **varlen())
    given = with_gradients(op, args, "q")
    out, _ = op(*given)
    given[3].add_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.float().sum().backward()


def test_what_has_no_gradient() -> None:
    made = varlen(full=True)
    op, args = operator_call("flash_attn_varlen_func", **made)
    text = r"^rawmla::flash_attn_varlen has no derivative: alibi_slopes: .* of flash_attn_func, flash_attn_v"
    with pytest.raises(NotImplementedError, match=text):
        op(*with_gradients(op, args, "q", "alibi_slopes"))
    out = torch.zeros(9, 4, 24, dtype=torch.bfloat16)
    op, args = operator_call("flash_attn_varlen_func", **made, out=out)
    with pytest.raises(NotImplementedError, match="^rawmla::flash_attn_varlen_out has no derivative: q: "):
        op(*with_gradients(op, args, "q"))
    op, args = operator_call("flash_attn_func", **fixed())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, when it loads forward mode
        for transform in (torch.func.grad, lambda f: lambda q: torch.func.jvp(f, (q,), (q,))):
            with pytest.raises(NotImplementedError, match="^rawmla::flash_attn has no derivative: q: "):
                transform(lambda q: op(q, *args[1:])[0].float().sum())(args[0])


@AND_INDUCTOR
@pytest.mark.parametrize("form", ("fixed", "qkv"))
def test_compiled_training(backend: str, form: str) -> None:
    """A step that differentiates a loss of out and lse; its gradients are those that eager operators give."""
    lengths, leaves = int32([0, 4, 4, 9]), {"qkv": tensors(seed=8)(9, 3, 4, 40)}
    if form == "fixed":
        leaves = {name: fixed()[name] for name in ("q", "k", "v")}
    leaves["attn_sink"] = torch.linspace(-1, 1, 4)

    def step(leaves: dict[str, Any]) -> Any:
        if form == "fixed":
            out, lse = rawmla.flash_attn_func(**leaves, causal=True)
        else:
            out, lse = rawmla.flash_attn_varlen_qkvpacked_func(**leaves, cu_seqlens=lengths, max_seqlen=5)
        return (out.float() * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum() + lse.square().sum()

    results = []
    for run in (compiled_by(backend, step), torch.compile(step, backend="eager")):
        given = {name: x.clone().requires_grad_() for name, x in leaves.items()}
        run(given).backward()
        results.append([x.grad for x in given.values()])
        assert all(x.grad is not None and bool(x.grad.any()) for x in given.values())
    assert_equal(*results)


def test_compiled_training_of_many_lengths() -> None:
    counter = CompileCounterWithBackend("aot_eager")

    def step(made: dict[str, Any]) -> Any:
        return rawmla.flash_attn_varlen_func(**made)[0].float().square().sum()

    compiled = torch.compile(step, fullgraph=True, backend=counter, dynamic=True)
    counts = []
    for tokens in ((9, 13), (20, 7), (5, 64)):
        made = varlen(tokens)
        for name in ("q", "k", "v"):
            made[name].requires_grad_()
        compiled(made).backward()
        counts.append(counter.frame_count)
        detached = {n: x.detach() if isinstance(x, torch.Tensor) else x for n, x in made.items()}
        out, _ = reference.flash_attn_varlen_func(**detached)
        want = gradients_of(detached, 2 * out, None)
        for name in ("q", "k", "v"):
            assert torch.equal(made[name].grad, want[name])
    assert counts[0] == counts[2]
