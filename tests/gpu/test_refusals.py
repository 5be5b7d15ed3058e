"""What every operation refuses, before it allocates or launches anything: see also test_contracts.py."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from gpu_support import replaced_launches, torch

import rawmla
from operations import OPERATIONS, Arguments, Call, Operation, assert_results, for_each, for_first
from operations.memory import all_canaries, fill_with_canaries


def change_one(value: Any, change: Callable[[Any], Any]) -> Any:
    """Change an array, or the last one of a list."""
    return [*value[:-1], change(value[-1])] if isinstance(value, list) else change(value)


def all_arguments(call: Call) -> Arguments:
    """Also a plan of tensors, where the call takes one, and what it writes."""
    arguments = dict(call.arguments)
    if call.plan is not None:
        arguments["tile_scheduler_metadata"], arguments["num_splits"] = call.make_plan("tensors")
    return arguments | call.target()


# ---- wrong arguments


def _wrong_dtype(x: Any) -> Any:
    """bool or, for integers, int64, which is the common mistake."""
    return x.bool() if x.is_floating_point() else x.long()


def _another_shape(x: Any) -> Any:
    return x.flatten() if x.ndim > 1 else x.expand(2, -1) if x.ndim else x.expand(2)


def _strided_last_dimension(x: Any) -> Any:
    wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype, device=x.device)
    wide[..., ::2] = x
    return wide[..., ::2]


WRONG: dict[str, tuple[type[Exception], Callable[[Any], Any]]] = {
    "on the CPU": (ValueError, lambda x: x.cpu()),
    "not an array": (TypeError, lambda x: [1.0]),
    "of another dtype": (TypeError, _wrong_dtype),
    "of int16": (TypeError, lambda x: x.short()),
    "of another shape": (ValueError, _another_shape),
    "with a strided last dimension": (ValueError, _strided_last_dimension),
}


@contextmanager
def _without_collection() -> Iterator[None]:
    """Inside, no memory of older arrays that are in cycles is freed by chance."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def assert_refused(
    operation: Operation,
    call: Call,
    changes: Callable[[Arguments], Arguments],
    kind: type[Exception],
    text: str,
) -> None:
    """The call raises before it allocates or launches anything, and leaves what it would write alone."""
    want = call.run()
    good = all_arguments(call)
    outputs = call.target() or {
        name: torch.empty_like(x)
        for name, x in zip(operation.outputs if operation.out else (), want, strict=False)
    }
    good |= outputs
    for canaries in outputs.values():
        fill_with_canaries(canaries)
    bad = {**good, **changes(good)}
    with _without_collection():
        memory = torch.cuda.memory_allocated()
        with pytest.raises(kind, match=text):
            getattr(rawmla, call.function)(**bad)
        assert torch.cuda.memory_allocated() == memory
    launched: list[None] = []
    with replaced_launches(lambda: launched.append(None)), pytest.raises(kind, match=text):
        getattr(rawmla, call.function)(**bad)
    assert not launched, "a refused call launched a kernel"
    assert all(all_canaries(canaries) for canaries in outputs.values())
    assert_results("the next call", call, call.run(), want)


WRONG_ARRAYS = [
    (operation, operation.cases[0], name, wrong)
    for operation in OPERATIONS
    for name in operation.arrays
    for wrong in WRONG
    if wrong != "with a strided last dimension" or name not in operation.odd_last
    if wrong != "of another dtype" or name not in operation.any_integer
]


@pytest.mark.parametrize(
    ("operation", "case", "name", "wrong"),
    WRONG_ARRAYS,
    ids=[f"{operation.name}-{name} {wrong}" for operation, _, name, wrong in WRONG_ARRAYS],
)
def test_wrong_array(operation: Operation, case: Any, name: str, wrong: str) -> None:
    call = operation.make(case)
    assert set(call.arrays()) == set(operation.arrays)
    kind, change = WRONG[wrong]

    def changes(arguments: Arguments) -> Arguments:
        return {name: change_one(arguments[name], change)}

    listed = isinstance(call.arguments.get(name), list)
    text = rf"^{name}\[{len(call.arguments[name]) - 1}\]: " if listed else rf"^{name}: "
    assert_refused(operation, call, changes, kind, text)


BAD = [(operation, operation.cases[0], bad) for operation in OPERATIONS for bad in operation.bad]


@pytest.mark.parametrize(
    ("operation", "case", "bad"), BAD, ids=[f"{operation.name}-{bad}" for operation, _, bad in BAD]
)
def test_refused_call_leaves_nothing_behind(operation: Operation, case: Any, bad: str) -> None:
    kind, name, changes = operation.bad[bad]
    assert_refused(operation, operation.make(case), changes, kind, f"^{name}")


@for_first(only=lambda operation: operation.out is not None)
@pytest.mark.parametrize("wrong", ("dtype", "shape", "place"))
def test_wrong_output(operation: Operation, case: Any, wrong: str) -> None:
    call = operation.make(case)
    for name, result in zip(operation.outputs, call.run(), strict=False):
        given, kind = {
            "dtype": (_wrong_dtype(result), TypeError),
            "shape": (result[:, :1] if call.written is None else result[:, :-8], ValueError),
            "place": (result.cpu(), ValueError),
        }[wrong]
        assert_refused(operation, call, lambda a, x=name, y=given: {x: y}, kind, f"^{name}: ")


# ---- autograd, and tensors without memory


GRADS = [
    (operation, case, name)
    for operation in OPERATIONS
    for case in operation.cases[:1]
    for name in operation.floats(case)
]


@for_each("cases")
def test_which_inputs_can_require_grad(operation: Operation, case: Any) -> None:
    """The table names them all."""
    found = []
    for name, value in operation.make(case).arrays().items():
        first = value[0] if isinstance(value, list) else value
        if first.is_floating_point():
            found.append(name)
    assert sorted(found) == sorted(operation.floats(case))


@pytest.mark.parametrize(
    ("operation", "case", "name"),
    GRADS,
    ids=[f"{operation.name}-{name}-{case.id}" for operation, case, name in GRADS],
)
def test_inputs_that_require_grad(operation: Operation, case: Any, name: str) -> None:
    """A result without a graph would be a silent error while grad is enabled."""
    call = operation.make(case)
    want = call.run()
    changes = {name: change_one(call.arguments[name], lambda x: x.detach().clone().requires_grad_(True))}
    if name in operation.grads:
        got = call.run(**changes)
        assert got[0].requires_grad and got[1].requires_grad
    else:
        with pytest.raises(ValueError, match=rf"^{name}\b.*requires_grad"):
            call.run(**changes)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert_results(context.__name__, call, call.run(**changes), want)
    assert_results("nothing requires grad", call, call.run(), want)


class Wrapper(torch.Tensor if torch else object):  # type: ignore[misc]
    """A tensor of a subclass that has no memory of its own."""

    @staticmethod
    def __new__(cls, inner: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        raise NotImplementedError(f"{function} of a tensor without memory")


def fake(x: Any) -> Any:
    """A tensor that torch's tracing makes: shape and dtype only."""
    from torch._subclasses import FakeTensorMode

    return FakeTensorMode().from_tensor(x)


@for_first()
@pytest.mark.parametrize("kind", ("FakeTensor", "Wrapper"))
def test_tensors_without_memory(operation: Operation, case: Any, kind: str) -> None:
    """Their address is 0: nothing may be launched on it."""
    call = operation.make(case)
    good = all_arguments(call)
    change = fake if kind == "FakeTensor" else Wrapper
    for name, value in good.items():
        if not (hasattr(value, "__dlpack__") or isinstance(value, list)):
            continue
        with pytest.raises(TypeError, match=rf"^{name}\b.*{kind}"):
            getattr(rawmla, call.function)(**{**good, name: change_one(value, change)})
