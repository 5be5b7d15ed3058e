"""Small calls of every operation, which reach every role and path of the kernels: to run under
compute-sanitizer.

    compute-sanitizer --tool memcheck python -m pytest -m sanitizer tests/gpu/test_sanitizer.py

Inputs are made, and results compared, on the CPU: the sanitizer watches these kernels and little else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from gpu_support import as_pair, replaced_launches, small_plans, torch, united_selections

import rawmla
from kit import DenseCase, SparseCase
from kit.flex import FlexCase
from kit.mha import MhaCase
from kit.plans import write_plan
from operations import OPERATIONS, Call, Operation, for_first
from operations.dense_backward import BackwardCase, gradients_of_some, make_dense_backward_call
from operations.flex_backward import make_flex_backward_call
from operations.memory import Outputs
from operations.mla_decode import make_dense_call
from operations.mla_prefill import BF16_512, make_prefill_call
from operations.mla_sparse import make_sparse_call
from rawmla.flex.backward import Arrays, Options, gradients
from rawmla.kernels.mha_backward_variants import Needs

pytestmark = pytest.mark.sanitizer


def mover() -> Callable[[Any], Any]:
    """Copies to the GPU, with the strides and the allocations that arrays have."""
    moved: dict[int, tuple[Any, Any]] = {}  # with the storage, so that no other one gets its address

    def move(x: Any) -> Any:
        storage = x.untyped_storage()
        if storage.data_ptr() not in moved:
            moved[storage.data_ptr()] = storage, torch.empty(0, dtype=torch.uint8).set_(storage).cuda()
        whole = moved[storage.data_ptr()][1].view(x.dtype)
        return whole.as_strided(x.shape, x.stride(), x.storage_offset())

    return move


def check_on_host(host: Call, got: tuple[Any, ...]) -> None:
    host.check(tuple(x.cpu() for x in got))


# ---- the table


SMALL = [
    (operation, case, form)
    for operation in OPERATIONS
    if operation.any_framework
    for case in (operation.small_cases or operation.cases)
    for form in (("object", "tensors", "invariant") if operation.part else ("object",))
]


@pytest.mark.parametrize(
    ("operation", "case", "form"), SMALL, ids=[f"{one.name}-{form}-{case.id}" for one, case, form in SMALL]
)
def test_small_calls(operation: Operation, case: Any, form: str) -> None:
    """Outputs are given where that can be: initcheck does not see what TMA writes."""
    host = operation.make(case, "cpu")
    call = host.mapped(mover())
    with replaced_launches(lambda: None):
        results = call.run()  # for their shapes
    outputs = Outputs.of(operation, call, results)
    invariant = form == "invariant"
    got = call.run("tensors" if invariant else form, invariant=invariant, **outputs.given)
    check_on_host(host, got)
    outputs.assert_untouched_around()


@for_first(only=lambda operation: not operation.any_framework)
def test_traced_functions(operation: Operation, case: Any) -> None:
    """They read tensors of the GPU, where their calls are made."""
    call = operation.make((operation.small_cases or (case,))[0])
    call.check(call.run())


@for_first(only=lambda operation: operation.name.startswith(("dense", "sparse", "prefill")))
def test_q_in_two_arrays(operation: Operation, case: Any) -> None:
    host = operation.make(operation.small_cases[-1], "cpu")
    call = host.mapped(mover())
    check_on_host(host, call.run(q=as_pair(call.arguments["q"])))


# ---- plans


SPLIT: tuple[tuple[Callable[..., Call], Any, tuple[int, ...]], ...] = (
    (
        make_dense_call,
        DenseCase(b=4, s_q=2, h_q=80, lengths=(200, 64, 0, 330), causal=True),
        (200, 64, 0, 330),
    ),
    *(
        (
            make_sparse_call,
            SparseCase(
                b=4,
                s_q=2,
                h_q=80,
                s_k=340,
                topk=330,
                layout=layout,
                lengths=(200, 64, 0, 330),
                extra_topk=70,
                extra_lengths=(70, 0, 0, 1),
                sink=True,
            ),
            (256 + 128, 64, 0, 384 + 64),
        )
        for layout in ("v32", "model1", "bf16")
    ),
)


@pytest.mark.parametrize(("make", "case", "tokens"), SPLIT, ids=[case.id for _, case, _ in SPLIT])
def test_split_at_every_block(make: Callable[..., Call], case: Any, tokens: tuple[int, ...]) -> None:
    host = make(case, "cpu")
    rows, num_splits = write_plan(
        tokens, [1] * 16, "tensors", idle_form="negative", idle_before=1, idle_after=2
    )
    metadata, splits = torch.from_numpy(rows).cuda(), torch.from_numpy(num_splits).cuda()
    call = host.mapped(mover())
    check_on_host(host, call.run(tile_scheduler_metadata=metadata, num_splits=splits))


@pytest.mark.parametrize("topk", (None, 2051))
@pytest.mark.parametrize("b", (1, 33, 1500))
def test_plan_alone(b: int, topk: int | None) -> None:
    lengths = (torch.arange(b, dtype=torch.int32) * 37 % 500).cuda()
    _, num_splits = rawmla.get_mla_metadata(lengths, 128, 1, 128, topk is not None, topk)
    assert int(num_splits[0]) == 0 and int(num_splits[-1]) >= b


def test_prefill_in_chunks() -> None:
    """Plans of a few tokens each, which use the same scratch one after the other."""
    case = SparseCase(b=13, h_q=17, s_k=150, topk=140, lengths="random", sink=True, **BF16_512)
    host = make_prefill_call(case, "cpu")
    with small_plans(max_batch=5):
        check_on_host(host, host.mapped(mover()).run())


@pytest.mark.parametrize(("h_q", "layout"), ((8, "bf16"), (16, "v32"), (32, "model1")))
def test_united_selections(h_q: int, layout: str) -> None:
    """Query tokens that share the rows of a tile, rows that are selected twice, and chunks."""
    kind: dict[str, Any] = {"layout": layout, "page_block_size": 1, "power_of_two_scales": layout == "v32"}
    shape: dict[str, Any] = {"b": 37, "h_q": h_q, "s_k": 41, "topk": 70}
    case = SparseCase(**shape, **kind, duplicates=0.3, lengths="random", shared=True, sink=True)
    host = make_prefill_call(case, "cpu")
    with united_selections(scratch_bytes=1 << 15, tokens=1):
        check_on_host(host, host.mapped(mover()).run())


# ---- gradients of some inputs


PARTIAL = [
    (d_qk, d_v, needs)
    for d_qk, d_v in ((64, 64), (128, 128), (192, 128), (256, 256))
    for needs in (
        *(Needs(True, False, False, False), Needs(False, True, True, False)),
        # The wide form is none of dv alone.
        *((Needs(False, True, False, False), Needs(False, False, True, False)) if d_qk == 192 else ()),
    )
]


@pytest.mark.parametrize(("d_qk", "d_v", "needs"), PARTIAL, ids=str)
def test_dense_gradients_of_some(d_qk: int, d_v: int, needs: Needs) -> None:
    """As autograd asks for them; in place of the others stand the reference's."""
    case = MhaCase(b=1, s_q=70, s_k=140, h_q=2, h_kv=1, d_qk=d_qk, d_v=d_v, causal=True)
    host = make_dense_backward_call(BackwardCase(case, "out", False), "cpu")
    got = gradients_of_some(needs, rawmla.flash_attn_backward, **host.mapped(mover()).arguments)
    assert host.want is not None
    wanted = (x.to(host.arguments["q"].dtype) for x in host.want())
    host.check(tuple(one.cpu() if need else x for one, x, need in zip(got, wanted, needs, strict=False)))


@pytest.mark.parametrize(
    "needs",
    (
        Needs(dq=True, dk=False, dv=False, others=False),
        Needs(dq=False, dk=True, dv=True, others=False),
        Needs(dq=False, dk=False, dv=False, others=True),
    ),
    ids=("dq", "dk and dv", "captured"),
)
def test_flex_gradients_of_some(needs: Needs) -> None:
    """Each alone, beside others from calls of all."""
    case = FlexCase(b=1, h_q=2, h_kv=2, s_q=70, s_k=140, mask="causal", score="head scale")
    host = make_flex_backward_call(BackwardCase(case, "both"), "cpu")
    call = host.mapped(mover())
    given = [call.arguments[x] for x in ("query", "key", "value", "out", "grad_out", "lse", "grad_lse")]
    functions = call.arguments["score_mod"], call.arguments["block_mask"]
    dq, dk, dv, captured = gradients(needs, Arrays(*given), *functions, Options(None, False, True))
    made = (dq, dk, dv, captured["factor"])
    assert tuple(x is not None for x in made) == needs
    every = call.run()
    check_on_host(host, tuple(x if one is None else one for one, x in zip(made, every, strict=True)))
