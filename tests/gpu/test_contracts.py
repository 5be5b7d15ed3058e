"""What every operation promises of a call: what it refuses, which strides it takes, where it writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from gpu_support import POISON_BYTE, bits, replaced_launches, torch
from operations import (
    OPERATIONS,
    Arguments,
    Call,
    Operation,
    all_canaries,
    assert_results,
    between_canaries,
    fill_with_canaries,
    for_each,
    for_first,
    map_arrays,
    strided,
)

import rawmla


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
    return x.double() if x.is_floating_point() else x.short()


def _another_shape(x: Any) -> Any:
    return x.flatten() if x.ndim > 1 else x[:-1]


def _strided_last_dimension(x: Any) -> Any:
    wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype, device=x.device)
    wide[..., ::2] = x
    return wide[..., ::2]


WRONG: dict[str, tuple[type[Exception], Callable[[Any], Any]]] = {
    "on the CPU": (ValueError, lambda x: x.cpu()),
    "not an array": (TypeError, lambda x: [1.0]),
    "of another dtype": (TypeError, _wrong_dtype),
    "of another shape": (ValueError, _another_shape),
    "with a strided last dimension": (ValueError, _strided_last_dimension),
}


def assert_refused(
    call: Call, changes: Callable[[Arguments], Arguments], kind: type[Exception], text: str
) -> None:
    """The call raises before it allocates or launches anything, and leaves what it would write alone."""
    want = call.run()
    good = all_arguments(call)
    canaries = None
    if call.written is not None:
        canaries = good[call.written]
    elif call.results[0] == "out":
        canaries = good["out"] = torch.empty_like(want[0])
    if canaries is not None:
        fill_with_canaries(canaries)
    bad = {**good, **changes(good)}
    torch.cuda.synchronize()
    memory = torch.cuda.memory_allocated()
    with pytest.raises(kind, match=text):
        getattr(rawmla, call.function)(**bad)
    assert torch.cuda.memory_allocated() == memory
    assert torch.cuda.current_stream().query(), "a refused call left work running"
    assert canaries is None or all_canaries(canaries)
    assert_results("the next call", call, call.run(), want)


WRONG_ARRAYS = [
    (operation, operation.cases[0], name, wrong)
    for operation in OPERATIONS
    for name in operation.arrays
    for wrong in WRONG
    if wrong != "with a strided last dimension" or name not in operation.odd_last
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
    assert_refused(call, changes, kind, text)


BAD = [(operation, operation.cases[0], bad) for operation in OPERATIONS for bad in operation.bad]


@pytest.mark.parametrize(
    ("operation", "case", "bad"), BAD, ids=[f"{operation.name}-{bad}" for operation, _, bad in BAD]
)
def test_refused_call_leaves_nothing_behind(operation: Operation, case: Any, bad: str) -> None:
    kind, name, changes = operation.bad[bad]
    assert_refused(operation.make(case), changes, kind, f"^{name}")


@for_first(only=lambda operation: operation.out is not None)
@pytest.mark.parametrize("wrong", ("dtype", "shape", "place"))
def test_wrong_out(operation: Operation, case: Any, wrong: str) -> None:
    call = operation.make(case)
    (result, *_) = call.run()
    given, kind = {
        "dtype": (_wrong_dtype(result), TypeError),
        "shape": (result[:, :1] if call.written is None else result[:, :-8], ValueError),
        "place": (result.cpu(), ValueError),
    }[wrong]
    assert_refused(call, lambda arguments: {"out": given}, kind, "^out: ")


# ---- autograd, and tensors without memory


def grad_arguments(call: Call) -> list[str]:
    """Arguments that can require grad."""
    found = []
    for name, value in call.arrays().items():
        first = value[0] if isinstance(value, list) else value
        if first.is_floating_point():
            found.append(name)
    return found


@for_each("cases")
def test_inputs_that_require_grad(operation: Operation, case: Any) -> None:
    """There is no backward: a result without a graph would be a silent error while grad is enabled."""
    call = operation.make(case)
    want = call.run()
    for name in grad_arguments(call):
        changes = {name: change_one(call.arguments[name], lambda x: x.detach().clone().requires_grad_(True))}
        with pytest.raises(ValueError, match=rf"^{name}\b.*requires_grad"):
            call.run(**changes)
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                assert_results(f"{name}, {context.__name__}", call, call.run(**changes), want)
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


# ---- strides

STRIDES = [
    (operation, case, name, kind)
    for operation in OPERATIONS
    for case in operation.cases
    for name, kinds in operation.strides.items()
    if not name.startswith("extra") or case.extra_topk
    for kind in kinds
]


@pytest.mark.parametrize(
    ("operation", "case", "name", "kind"),
    STRIDES,
    ids=[f"{operation.name}-{name}-{kind}-{case.id}" for operation, case, name, kind in STRIDES],
)
def test_strides(operation: Operation, case: Any, name: str, kind: str) -> None:
    """The same values behind other strides, between what nobody may read, give the same bits."""
    call = operation.make(case)
    value = call.arguments[name]
    want = call.run()
    call.check(want)
    if isinstance(value, list):
        ways = [list(way) for way in zip(*(strided(x, kind) for x in value), strict=True)]
    else:
        ways = strided(value, kind)
    assert ways
    for number, way in enumerate(ways):
        got = call.run(**{name: way})
        assert_results(f"{name}, {kind}, number {number}", call, got, want)
        assert call.written or got[0].is_contiguous() == want[0].is_contiguous()


# ---- results


@for_each("cases", only=lambda operation: operation.out)
def test_out_between_canaries(operation: Operation, case: Any) -> None:
    """`out` is a slice of a larger buffer: written whole, and nothing around it."""
    call = operation.make(case)
    want = call.run()
    call.check(want)
    assert operation.out is not None
    buffer, given = between_canaries(want[0], operation.out(want[0]))
    for form in ("object", "tensors") if call.plan is not None else ("object",):
        if call.written is None:
            given.view(torch.uint8).fill_(POISON_BYTE)
        got = call.run(form, out=given)
        assert got[0] is given
        call.check(got)
        if form == "object":
            assert_results("given and fresh", call, got, want)
    fill_with_canaries(given)
    assert all_canaries(buffer), "the call wrote outside `out`"


@for_each("cases")
def test_results_are_written_whole(operation: Operation, case: Any) -> None:
    """Fresh memory is poison here (test_poison.py), so what is right was written by this call."""
    call = operation.make(case)
    for form in ("object", "tensors") if call.plan is not None else ("object",):
        call.check(call.run(form))


@for_each("cases")
def test_inputs_are_left_alone(operation: Operation, case: Any) -> None:
    call = operation.make(case)
    before = map_arrays(call.arrays(), lambda x: x.clone())
    arguments = {}
    if call.plan is not None:
        metadata, num_splits = call.make_plan("tensors")
        arguments = {"tile_scheduler_metadata": metadata, "num_splits": num_splits}
    kept = map_arrays(arguments, lambda x: x.clone())
    call.run(**arguments)
    for name, now in {**call.arrays(), **arguments}.items():
        then = {**before, **kept}[name]
        for one, other in zip(*((x if isinstance(x, list) else [x]) for x in (now, then)), strict=True):
            assert torch.equal(bits(one), bits(other)), name


EMPTY = [
    (operation, case, name)
    for operation in OPERATIONS
    for case in operation.cases
    for name in operation.empty
]


@pytest.mark.parametrize(
    ("operation", "case", "name"),
    EMPTY,
    ids=[f"{operation.name}-{name}-{case.id}" for operation, case, name in EMPTY],
)
def test_nothing_to_compute(operation: Operation, case: Any, name: str) -> None:
    """Results of the right shape, and nothing is launched; what is written in place stays as it was."""
    call = operation.make(case)
    full = call.run()
    target = call.target()
    changes = {**target, **operation.empty[name]({**call.arguments, **target})}
    before = None if call.written is None else changes[call.written].clone()

    def launched() -> None:
        raise AssertionError("a call with nothing to compute launched a kernel")

    with replaced_launches(launched):
        got = call.run(**changes)
    torch.cuda.synchronize()
    if before is not None:
        assert torch.equal(bits(got[0]), bits(before))
        return
    for text, one, other in zip(call.results, got, full, strict=True):
        assert one.dtype == other.dtype and one.ndim == other.ndim, text
        assert one.numel() == 0 or bool((one == 0).all()), text  # counts of rows without columns
    if operation.out is not None:
        given = torch.empty_like(got[0])
        assert call.run(**changes, out=given)[0] is given
