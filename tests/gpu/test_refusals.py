"""What every operation refuses, before it allocates or launches anything: see also test_contracts.py."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from gpu_support import replaced_launches, torch

import rawmla
from operations import Arguments, Call, Operation, assert_results, for_each, for_first
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
    return x.float().bool() if x.is_floating_point() else x.long()


def _another_shape(x: Any) -> Any:
    return x.flatten() if x.ndim > 1 else x.expand(2, -1) if x.ndim else x.expand(2)


def _strided_last_dimension(x: Any) -> Any:
    wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype, device=x.device)
    wide[..., ::2] = x
    return wide[..., ::2]


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


WRONG: dict[str, tuple[type[Exception], Callable[[Any], Any]]] = {
    "on the CPU": (ValueError, lambda x: x.cpu()),
    "not an array": (TypeError, lambda x: [1.0]),
    "of tracing, without memory": (TypeError, fake),
    "of a subclass, without memory": (TypeError, Wrapper),
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


def wrong_arrays(operation: Operation, good: Arguments) -> Iterator[tuple[type[Exception], str, Arguments]]:
    """Every array spoilt in every way: the error, how its text begins, the change."""
    for name in operation.arrays:
        value = good[name]
        text = rf"^{name}\[{len(value) - 1}\]: " if isinstance(value, list) else rf"^{name}: "
        for wrong, (kind, change) in WRONG.items():
            if wrong == "with a strided last dimension" and name in operation.odd_last:
                continue
            if wrong == "of another dtype" and name in operation.any_integer:
                continue
            yield kind, text, {name: change_one(value, change)}


def wrong_outputs(operation: Operation, call: Call, want: Any) -> Iterator[tuple[Any, str, Arguments]]:
    """Outputs of another dtype, of another shape and of another place."""
    for name, result in zip(operation.outputs if operation.out else (), want, strict=False):
        shorter = result[..., :-1] if call.written is None else result[:, :-8]
        for kind, given in (
            (TypeError, _wrong_dtype(result)),
            (ValueError, shorter),
            (ValueError, result.cpu()),
        ):
            yield kind, f"^{name}: ", {name: given}


@for_first()
def test_refused_calls(operation: Operation, case: Any) -> None:
    """They raise before they allocate or launch anything, and leave what they would write alone: every array
    and output spoilt in every way, and the rows of the table.
    """
    call = operation.make(case)
    assert set(call.arrays()) == set(operation.arrays)
    want = call.run()
    good = all_arguments(call)
    outputs = call.target() or {
        name: torch.empty_like(x)
        for name, x in zip(operation.outputs if operation.out else (), want, strict=False)
    }
    good |= outputs
    for canaries in outputs.values():
        fill_with_canaries(canaries)
    refusals = [
        *wrong_arrays(operation, good),
        *wrong_outputs(operation, call, want),
        *((kind, f"^{name}", changes(good)) for kind, name, changes in operation.bad.values()),
    ]
    launched: list[None] = []
    with _without_collection(), replaced_launches(lambda: launched.append(None)):
        for kind, text, changes in refusals:
            memory = torch.cuda.memory_allocated()
            with pytest.raises(kind, match=text):
                getattr(rawmla, call.function)(**{**good, **changes})
            assert torch.cuda.memory_allocated() == memory, text
            assert not launched, f"{text}: a refused call launched a kernel"
    assert all(all_canaries(canaries) for canaries in outputs.values())
    assert_results("the next call", call, call.run(), want)


# ---- autograd


@for_each("cases")
def test_inputs_that_require_grad(operation: Operation, case: Any) -> None:
    """A result without a graph would be a silent error while grad is enabled. The table names all arrays of
    floating point.
    """
    call = operation.make(case)
    want = call.run()
    found = []
    for name, value in call.arrays().items():
        first = value[0] if isinstance(value, list) else value
        if not first.is_floating_point():
            continue
        found.append(name)
        changes = {name: change_one(value, lambda x: x.detach().clone().requires_grad_(True))}
        if name in operation.grads:
            got = call.run(**changes)
            assert got[0].requires_grad and got[1].requires_grad
        else:
            with pytest.raises(ValueError, match=rf"^{name}\b.*requires_grad"):
                call.run(**changes)
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                assert_results(f"{name}, {context.__name__}", call, call.run(**changes), want)
    assert sorted(found) == sorted(operation.floats(case))
    assert_results("nothing requires grad", call, call.run(), want)
