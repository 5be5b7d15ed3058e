"""Small calls that reach every path of the kernels: the list to run under compute-sanitizer, with
test_lengths_sanitizer.py.

    compute-sanitizer --tool memcheck python -m pytest --full -m sanitizer tests/gpu/test_sanitizer.py

Inputs are made, and results compared, on the CPU, so that the sanitizer watches these kernels alone.
"""

from __future__ import annotations

from typing import Any

import pytest
from gpu_support import small_plans, torch, united_selections

import rawmla
from kit import DenseCase, SparseCase
from kit.mha import MhaCase
from kit.mha_backward import (
    reference_backward,
)
from kit.plans import write_plan
from operations import Call, Operation, for_each
from operations.dense_backward import (
    BackwardCase,
    gradients_of_some,
    make_dense_backward_call,
)
from operations.memory import fill_with_canaries
from operations.mla_decode import as_pair, make_dense_call
from operations.mla_prefill import BF16_512, PREFILL_KINDS, make_prefill_call
from operations.mla_sparse import make_sparse_call
from rawmla.kernels.mha_backward_variants import Needs

pytestmark = [pytest.mark.sanitizer, pytest.mark.full]  # other runs have larger cases of the same calls


def on_gpu(x: Any) -> Any:
    """A copy on the GPU, with the strides and the allocation it has."""
    if x.is_cuda:
        return x
    whole = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()).cuda().view(x.dtype)
    return whole.as_strided(x.shape, x.stride(), x.storage_offset())


def check_on_host(host: Call, got: tuple[Any, ...]) -> None:
    """Compare with the reference for the inputs on the CPU. Memory that no call writes is not read."""
    rows = ... if host.covered is None else host.covered()
    copies = []
    for one in got:
        copies.append(torch.empty(one.shape, dtype=one.dtype))
        copies[-1][rows] = one[rows].cpu()
    host.check(tuple(copies))


def outputs_for(operation: Operation, results: tuple[Any, ...]) -> dict[str, Any]:
    """Outputs to be given, which hold canaries: initcheck does not see what TMA writes."""
    made = {}
    for name, x in zip(operation.outputs if operation.out else (), results, strict=False):
        made[name] = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        fill_with_canaries(made[name])
    return made


@for_each("small_cases", only=lambda operation: operation.any_framework)
def test_small_call(operation: Operation, case: Any) -> None:
    """Fresh results, then given ones. Functions are CUDA text: those of Python close over tensors of the CPU.
    MLA has q in two parts with plans of tensors, and in prefill.
    """
    needs_forward = isinstance(case, BackwardCase) and case.needs_forward
    host = operation.make(case, "cuda" if needs_forward else "cpu")
    call = host.mapped(on_gpu)
    for form in call.forms():
        for invariant in (False, True) if form == "tensors" else (False,):
            more = {}
            if call.function.startswith("flash_mla") and (form == "tensors" or call.plan is None):
                more["q"] = as_pair(call.arguments["q"])
            got = call.run(form, invariant=invariant, **more)
            if call.written is None:
                got = call.run(form, invariant=invariant, **more, **outputs_for(operation, got))
            if needs_forward:
                call.check(got)
            else:
                check_on_host(host, got)


# ---- plans


@pytest.mark.parametrize("layout", ("dense", "v32", "model1", "bf16"))
def test_split_at_every_block(layout: str) -> None:
    lengths = (200, 64, 0, 330)
    if layout == "dense":
        case: Any = DenseCase(b=4, s_q=2, h_q=80, lengths=lengths, causal=True)
        host, tokens = make_dense_call(case, "cpu"), list(lengths)
    else:
        extra = {"extra_topk": 70, "extra_lengths": (70, 0, 0, 1), "sink": True}
        case = SparseCase(b=4, s_q=2, h_q=80, s_k=340, topk=330, layout=layout, lengths=lengths, **extra)
        host, tokens = make_sparse_call(case, "cpu"), [256 + 128, 64, 0, 384 + 64]
    rows, num_splits = write_plan(
        tokens, [1] * 16, "tensors", idle_form="negative", idle_before=1, idle_after=2
    )
    plan = (torch.from_numpy(x).cuda() for x in (rows, num_splits))
    names = ("tile_scheduler_metadata", "num_splits")
    check_on_host(host, host.mapped(on_gpu).run(**dict(zip(names, plan, strict=True))))


@pytest.mark.parametrize(("b", "topk"), ((1, None), (33, None), (1500, None), (1, 1), (33, 2051)))
def test_plan_alone(b: int, topk: int | None) -> None:
    lengths = (torch.arange(b, dtype=torch.int32) * 137 % 500).cuda()
    sparse = () if topk is None else (128, True, topk)
    _, num_splits = rawmla.get_mla_metadata(lengths, 128, 1, *sparse)
    assert int(num_splits[0]) == 0 and int(num_splits[-1]) >= b


def test_prefill_in_chunks() -> None:
    """Plans of a few tokens each, which use the same scratch one after the other."""
    case = SparseCase(b=13, h_q=17, s_k=150, topk=140, lengths="random", sink=True, **BF16_512)
    host = make_prefill_call(case, "cpu")
    with small_plans(max_batch=5):
        check_on_host(host, host.mapped(on_gpu).run())


@pytest.mark.parametrize(("h_q", "layout"), ((8, "bf16"), (16, "v32"), (32, "model1")))
def test_united_selections(h_q: int, layout: str) -> None:
    """Query tokens that share the rows of a tile, rows that are selected twice, and chunks."""
    kind = {**PREFILL_KINDS[layout], "page_block_size": 1}
    case = SparseCase(b=37, h_q=h_q, s_k=41, topk=70, duplicates=0.3, lengths="random", sink=True, **kind)
    host = make_prefill_call(case, "cpu")
    with united_selections(scratch_bytes=1 << 15, tokens=1):
        check_on_host(host, host.mapped(on_gpu).run())


# ---- gradients of some, and into parts of one array

PARTIAL = tuple(
    (dims, needs)
    for dims in ((64, 64), (128, 128), (192, 128), (256, 256))
    for needs in (
        *(Needs(True, False, False, False), Needs(False, True, True, False)),
        # The wide form is none of dv alone.
        *((Needs(False, True, False, False), Needs(False, False, True, False)) if dims[0] == 192 else ()),
    )
)


@pytest.mark.parametrize(("dims", "needs"), PARTIAL, ids=str)
def test_gradients_of_some(dims: tuple[int, int], needs: Needs) -> None:
    """As autograd asks for them; in place of the others stand the reference's."""
    case = MhaCase(b=1, s_q=70, s_k=140, h_q=2, h_kv=1, d_qk=dims[0], d_v=dims[1], causal=True)
    host = make_dense_backward_call(BackwardCase(case, deterministic=False), "cpu")
    call = host.mapped(on_gpu)
    got = gradients_of_some(needs, getattr(rawmla, call.function), **call.arguments)
    given = host.inputs
    want = reference_backward(given.inputs, given.gradients, given.results).values
    host.check(
        tuple(
            one.cpu() if needed else other.to(given.inputs.q.dtype)
            for one, other, needed in zip(got, want, needs, strict=False)
        )
    )
