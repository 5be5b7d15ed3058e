"""Calls of the torch operators, made by the public functions from the entries of tests/operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from full_cases import full_unless
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

import rawmla
import rawmla.torch_ops
from kit.mha import MhaCase, make_mha_inputs
from operations import OPERATIONS, Arguments, Operation
from operations.core import Call
from operations.dense import named_arguments
from operations.memory import between_canaries

WITH_OPERATORS = [
    operation
    for operation in OPERATIONS
    if not operation.clusters and not operation.name.startswith(("flex", "block_mask"))
]
"""The entries whose functions torch.compile can take, without those that differ in the kernel alone."""

FIRST_CASES = [(operation, operation.cases[0]) for operation in WITH_OPERATORS]
CASES = full_unless(
    lambda pair: pair[1] is pair[0].cases[0] or pair[0].name == "convert_indices",
    [(operation, case) for operation in WITH_OPERATORS for case in operation.cases],
)
"""Every run has the first cases; the compact form of `convert_indices` is an operator of its own."""

NAMES = sorted(
    schema.name.removeprefix("rawmla::")
    for schema in torch._C._jit_get_all_schemas()
    if schema.name.startswith("rawmla::")
)
OperatorCall = tuple[Any, tuple[Any, ...]]


class Recorder(TorchDispatchMode):
    """Inside, public functions call their operators, as under torch.compile; the calls are noted."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[OperatorCall] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "rawmla":
            self.calls.append((function, args))
        return function(*args, **(kwargs or {}))

    def distinct(self) -> list[OperatorCall]:
        """A call of each operator and layout of its arguments."""
        return list({(str(op), layout(args)): (op, args) for op, args in self.calls}.values())


def id_of(pair: tuple[Operation, Any]) -> str:
    """The test id of an operation and a case."""
    operation, case = pair
    return f"{operation.name}-{operation.cases.index(case)}"


def all_arguments(call: Call) -> Arguments:
    """The arguments of a call with a plan of tensors, where it takes one, and with what it writes."""
    arguments = call.arguments | call.target()
    if call.plan is not None:
        with Recorder():
            plan = call.make_plan("tensors")
        arguments |= dict(zip(("tile_scheduler_metadata", "num_splits"), plan, strict=True))
    return arguments


def given_outputs(operation: Operation, results: tuple[Any, ...]) -> Arguments:
    """Slices of larger buffers for the results that can be given."""
    assert operation.out is not None
    pairs = zip(operation.outputs, results, strict=False)
    return {name: between_canaries(x, operation.out(x))[1].zero_() for name, x in pairs}


def without_work(call: Call, change: Callable[[Arguments], Arguments]) -> Arguments:
    """Arguments that leave nothing to compute; requests have no rows then."""
    arguments = call.arguments | call.target()
    changes = change(arguments)
    if changes.keys() & {"q", "qkv"}:
        for name in {"cu_seqlens_q", "cu_seqlens", "seqused_q", "b_start_loc"} & arguments.keys():
            changes[name] = None if arguments[name] is None else torch.zeros_like(arguments[name])
    return call.target() | changes


def uses(operation: Operation, call: Call) -> Iterator[tuple[Any, ...]]:
    """Make a call in each way that it can be made; gives results, and plans as they are filled."""
    yield (results := call.run("tensors"))
    for change, _ in operation.empty.values():
        yield call.run(**without_work(call, change))
    if operation.out is not None:
        given = given_outputs(operation, results)
        if call.fresh is not None:
            given[operation.outputs[0]].copy_(call.fresh())
        yield call.run("tensors", **given)
    for form in call.forms() if call.plan is not None else ():
        metadata, num_splits = call.make_plan(form, invariant=True)
        if form == "object":
            yield call.run(tile_scheduler_metadata=metadata, num_splits=None, invariant=True)
        yield plan_arrays(metadata, num_splits)
        call.replan(metadata, num_splits)
        yield plan_arrays(metadata, num_splits)
    if call.function.startswith("flash_mla"):
        q = call.arguments["q"]
        yield call.run("tensors", q=(q[..., :-64].clone(), q[..., -64:]))


def plan_arrays(metadata: Any, num_splits: Any) -> tuple[Any, ...]:
    """Copies of the arrays of a plan."""
    if num_splits is None:
        metadata, num_splits = metadata.tile_scheduler_metadata, metadata.num_splits
    return metadata.clone(), num_splits.clone()


def layout(args: tuple[Any, ...]) -> str:
    """What the results of an operator are made like: the arrays among its arguments."""
    leaves, tree = tree_flatten(args)
    seen = [(x.shape, x.stride(), x.dtype) if isinstance(x, torch.Tensor) else None for x in leaves]
    return f"{seen} {tree}"


def cpu_call(operation: Operation, case: Any) -> Call:
    """The call of a case on the CPU; of many heads it has four, as the reference is slow."""
    if getattr(case, "h_q", 0) > 4 >= getattr(case, "h_kv", 1):
        case = replace(case, h_q=4)
    return operation.make(case, "cpu")


def copies(args: tuple[Any, ...]) -> Any:
    """Copies without the room around slices, which torch's checks cannot copy where nothing is in them."""

    def copy(x: Any) -> Any:
        return x.clone() if x.numel() else x.clone(memory_format=torch.contiguous_format)

    return tree_map_only(torch.Tensor, copy, args)


def kind_of(x: Any) -> tuple[Any, ...]:
    """What two results have in common. Strides of an array without elements mean nothing."""
    return x.shape, x.stride() if x.numel() else None, x.dtype, x.device


def check_operator(op: Any, args: tuple[Any, ...]) -> None:
    """Check that an operator does what its schema and its implementation for fake tensors say.

    The check of the schema multiplies tensors, which torch cannot do with FP8.
    """
    if not any(isinstance(x, torch.Tensor) and x.dtype == torch.float8_e4m3fn for x in tree_leaves(args)):
        torch.library.opcheck(op, copies(args), test_utils="test_schema")
    with FakeTensorMode() as mode:
        fake = op(*tree_map_only(torch.Tensor, mode.from_tensor, args))
    for one, other in zip(tree_leaves(fake), tree_leaves(op(*args)), strict=True):
        if other is None:  # an operator that writes an argument
            assert one is None
            continue
        assert kind_of(one) == kind_of(other), op


# ---- small calls


def tensors(device: str = "cpu", seed: int = 0) -> Callable[..., Any]:
    """A function that makes bfloat16 tensors of normal numbers."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator).to(torch.bfloat16).to(device)


def int32(values: Any) -> Any:
    return torch.tensor(values, dtype=torch.int32)


def arguments_of(case: MhaCase, device: str) -> Arguments:
    """The arguments of dense attention by name, with the same numbers on every device."""
    _, made = named_arguments(make_mha_inputs(case, "cpu"))
    return {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in made.items()}


def fixed(device: str = "cpu") -> Arguments:
    """The arguments of `flash_attn_func`."""
    return arguments_of(MhaCase(b=2, s_q=3, s_k=5, d_qk=40, d_v=24, causal=True, window=(3, -1)), device)


def varlen(tokens: tuple[int, int] = (9, 13), device: str = "cpu", *, full: bool = False) -> Arguments:
    """The arguments of `flash_attn_varlen_func`, of three requests, the second without a query."""
    total_q, total_k = tokens
    case = MhaCase(
        q_lengths=(total_q // 3, 0, total_q - total_q // 3),
        k_lengths=(total_k // 2, total_k - total_k // 2 - 1, 1),
        d_qk=40,
        d_v=24,
        causal=True,
    )
    if not full:
        return arguments_of(case, device)
    lengths: Arguments = {"q_used": (1, 0, 2), "k_used": (2, 2, 0), "gap": 0.0}
    masks: Arguments = {"window": (4, 1), "softcap": 5.0, "softmax_scale": 0.3}
    case = replace(case, **lengths, **masks, sink="float16", alibi="heads")
    return arguments_of(case, device) | {"is_varlen": False}


def operator_call(function: str, **arguments: Any) -> tuple[Any, list[Any]]:
    """The operator that a public function calls last, and its arguments."""
    with Recorder() as recorder:
        getattr(rawmla, function)(**arguments)
    op, args = recorder.calls[-1]
    return op, list(args)


def with_gradients(op: Any, args: list[Any], *names: str) -> list[Any]:
    """The same arguments, of which these require grad where they are given."""
    known = [argument.name for argument in op._schema.arguments]
    return [
        x.detach().clone().requires_grad_() if name in names and x is not None else x
        for name, x in zip(known, args, strict=True)
    ]
