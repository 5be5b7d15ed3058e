"""Entries of the table: `Operation`, what is special about a public function, and `Call`, one call of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import rawmla

Arguments = dict[str, Any]
Pads = tuple[tuple[int, int], ...]
Bad = tuple[type[Exception], str, Callable[[Arguments], Arguments]]
Empty = tuple[Callable[[Arguments], Arguments], dict[str, int]]
LISTS = tuple(
    f"{prefix}{lines}_{what}"
    for lines in ("kv", "q")
    for prefix in ("", "full_")
    for what in ("num_blocks", "indices")
)
"""Attributes of a block mask: its lists by rows and by columns, in the order of its constructor."""


@dataclass
class Call:
    """A call of a public function: its arguments by name, in arrays of one framework.

    Attributes:
        function: name in `rawmla`.
        arguments: without the plan and without `written`.
        results: names of what the call gives.
        check: raises unless the results are right for what the arguments hold now.
        inputs: what `arguments` were made of.
        plan: arguments of `get_mla_metadata` for a plan of tensors; None if the function takes no plan.
        written: the argument that a call always writes, if there is one, and its only result.
        fresh: makes a `written` to start from.
        unpack: makes the tuple of arrays of what the function returns, if it is no array or tuple of them.
        unordered: results that are sums in any order: from call to call they may round differently.
        covered: makes an index of the rows of results that a call writes, if it does not write all.
    """

    function: str
    arguments: Arguments
    results: tuple[str, ...]
    check: Callable[[tuple[Any, ...]], None]
    inputs: Any = None
    plan: Arguments | None = None
    written: str | None = None
    fresh: Callable[[], Any] | None = None
    unpack: Callable[[Any], tuple[Any, ...]] | None = None
    unordered: tuple[str, ...] = ()
    covered: Callable[[], Any] | None = None

    def run(self, form: str = "object", /, *, invariant: bool = False, **changes: Any) -> tuple[Any, ...]:
        """The results of one call; `form` is that of the plan, "object" or "tensors"."""
        arguments = {**self.arguments, **changes}
        if self.plan is not None and "tile_scheduler_metadata" not in arguments:
            metadata, num_splits = self.make_plan(form, invariant=invariant)
            arguments |= {"tile_scheduler_metadata": metadata, "num_splits": num_splits}
        if self.plan is not None and invariant:
            arguments["enable_batch_invariant"] = True
        if self.written not in arguments:
            arguments |= self.target()
        got = getattr(rawmla, self.function)(**arguments)
        if self.written is not None:
            assert got is None or got is arguments[self.written]
            return (arguments[self.written],)
        if self.unpack is not None:
            return self.unpack(got)
        return got if isinstance(got, tuple) else (got,)

    def target(self) -> Arguments:
        """What `run` would make for the call to write, to be made now; nothing for most calls."""
        return {} if self.written is None or self.fresh is None else {self.written: self.fresh()}

    def make_plan(self, form: str = "object", *, invariant: bool = False, **keywords: Any) -> tuple[Any, Any]:
        """A plan for the call."""
        assert self.plan is not None
        given = self.plan if form == "tensors" else {}
        return rawmla.get_mla_metadata(**given, enable_batch_invariant=invariant, **keywords)

    def replan(
        self, metadata: Any, num_splits: Any, b: int | None = None, *, invariant: bool = False
    ) -> None:
        """Recompute a plan in place, for all requests or the first ones."""
        assert self.plan is not None
        plan = {**self.plan, "cache_seqlens": self.plan["cache_seqlens"][:b]}
        out = metadata if num_splits is None else (metadata, num_splits)
        rawmla.get_mla_metadata(**plan, enable_batch_invariant=invariant, out=out)

    def forms(self) -> tuple[str, ...]:
        """The forms of plan that the call can have."""
        return ("object",) if self.plan is None else ("object", "tensors")

    def arrays(self) -> Arguments:
        """The arguments that are arrays, or lists of them."""
        return {
            name: value
            for name, value in self.arguments.items()
            if hasattr(value, "__dlpack__") or isinstance(value, list)
        }

    def all_arrays(self) -> list[Any]:
        """All that the call reads: also the arrays of functions, of block masks and of the plan."""
        given = (*self.arguments.values(), *(self.plan or {}).values())
        return [x for value in given for x in arrays_in(value)]

    def mapped(self, change: Callable[[Any], Any], inside: Callable[[Any], Any] | None = None) -> Call:
        """The call with every array changed, those of the plan and a written one too; `inside` changes those
        of functions and of block masks.
        """
        fresh, plan = self.fresh, self.plan
        return replace(
            self,
            arguments={name: change_arrays(x, change, inside) for name, x in self.arguments.items()},
            plan=None if plan is None else {name: change_arrays(x, change) for name, x in plan.items()},
            fresh=None if fresh is None else lambda: change(fresh()),
        )


def change_arrays(
    value: Any, change: Callable[[Any], Any], inside: Callable[[Any], Any] | None = None
) -> Any:
    """An argument with its arrays changed: itself, those of a list, or by `inside` those of a block mask or
    of a function that is CUDA text.
    """
    inside = inside or change
    if isinstance(value, list):
        return [change(x) for x in value]
    if isinstance(value, rawmla.CudaMod):
        captures = {name: change_captured(x, inside) for name, x in value.captures.items()}
        return rawmla.CudaMod(value.code, captures, grad=value.grad, capture_grads=value.capture_grads)
    if isinstance(value, rawmla.BlockMask):
        lists = [change_arrays(getattr(value, name), inside) for name in LISTS]
        mask = change_arrays(value.mask_mod, inside)
        return rawmla.BlockMask(value.seq_lengths, *lists, value.BLOCK_SIZE, mask)
    return change(value) if hasattr(value, "__dlpack__") else value


def change_captured(x: Any, change: Callable[[Any], Any]) -> Any:
    """What a function captures, changed; a tensor requires grad if it did."""
    if not isinstance(x, torch.Tensor):
        return x
    made = change(x.detach())
    return made.requires_grad_(x.requires_grad) if isinstance(made, torch.Tensor) else made


def arrays_in(value: Any) -> list[Any]:
    """The arrays of an argument, as `change_arrays` finds them."""
    if isinstance(value, rawmla.CudaMod):
        return [x.detach() for x in value.captures.values() if isinstance(x, torch.Tensor)]
    if isinstance(value, rawmla.BlockMask):
        lists = [getattr(value, name) for name in LISTS]
        return [x for x in lists if x is not None] + arrays_in(value.mask_mod)
    values = value if isinstance(value, list) else [value]
    return [x for x in values if hasattr(x, "__dlpack__")]


@dataclass(frozen=True)
class Sizes:
    """Numbers with a name: the case of an operation that needs no more."""

    id: str
    kind: str = ""
    n: int = 0


@dataclass(frozen=True)
class Operation:
    """What the shared suites know of an operation.

    Attributes:
        name: for people and for pytest.
        make: makes the call of a case on torch tensors of a device. The emulator takes tensors of "cpu".
        cases: a few calls, by objects with an `id`, for contracts and frameworks; the first has every array.
        arrays: the names of its arguments that are arrays, or lists of them.
        floats: the names of those that are of floating point in a case, and can require grad.
        small_cases: calls that reach every path of the kernels, for the emulator and compute-sanitizer.
        kernels: labels of kernels begin so, of which the small cases run all.
        rerun_cases, graph_cases, invariant_cases: for bits, graphs and batch invariance.
        repeats: how often the calls of rerun cases are made back to back.
        strides: for each argument with free strides, the kinds of `strided` it takes.
        odd_last: arguments whose last dimension need not be contiguous.
        any_integer: arguments that are int32 or int64.
        out: padding of each dimension of the buffer that an output may be a slice of; None: none is taken.
        outputs: the arguments that take buffers for the first results.
        empty: changes of the arguments that leave nothing to compute, and for each result that is empty then
            the dimension of size 0.
        bad: wrong arguments of the first case besides those that every operation has: name -> (error, the
            argument that its text starts with, changes).
        changes: changes a graph case's arguments in place, again and again.
        part: the call with these requests of a batch only.
        plan_serves_all_lengths: a plan of tensors made once serves whatever `changes` does.
        clusters: calls are forced to the kernel for clusters; tests/test_gpu_cases.py sees that all go there.
        grads: the arguments whose gradients a graph of autograd has; others that require grad are refused.
        copied: arguments that are copied where their last dimension is not contiguous.
        ordered_like: the argument in whose order fresh results have their dimensions in memory.
        any_framework: its arrays may be those of CuPy and of DLPack; functions of Python read tensors.
        writes: calls write an argument and allocate no result.
    """

    name: str
    make: Callable[..., Call]
    cases: tuple[Any, ...]
    arrays: tuple[str, ...]
    floats: Callable[[Any], tuple[str, ...]]
    small_cases: tuple[Any, ...] = ()
    kernels: tuple[str, ...] = ()
    rerun_cases: tuple[Any, ...] = ()
    repeats: int = 20
    graph_cases: tuple[Any, ...] = ()
    invariant_cases: tuple[Any, ...] = ()
    strides: dict[str, tuple[str, ...]] = field(default_factory=dict)
    odd_last: tuple[str, ...] = ()
    any_integer: tuple[str, ...] = ()
    out: Callable[[Any], Pads] | None = None
    outputs: tuple[str, ...] = ("out",)
    empty: dict[str, Empty] = field(default_factory=dict)
    bad: dict[str, Bad] = field(default_factory=dict)
    changes: Callable[[Call], Iterator[None]] | None = None
    part: Callable[[Call, list[int]], Call] | None = None
    plan_serves_all_lengths: bool = False
    clusters: bool = False
    any_framework: bool = True
    grads: tuple[str, ...] = ()
    copied: tuple[str, ...] = ()
    ordered_like: str | None = None
    writes: bool = False


def is_planned(operation: Operation) -> bool:
    """Whether the calls take a plan."""
    return operation.part is not None


def slices(result: Any) -> Pads:
    """Room around a result in every dimension; its rows begin at multiples of 16 bytes."""
    return (*((1, 1),) * (result.ndim - 1), (8, 8 + -result.shape[-1] % 8))


def spoilt(name: str, change: Callable[[Any], Any], error: type[Exception] = ValueError) -> Bad:
    """A wrong argument that is made of the right one."""
    return error, name, lambda arguments: {name: change(arguments.get(name))}


def without(*names: str, axis: int = 0) -> Callable[[Arguments], Arguments]:
    """A change of arguments, for `Operation.empty`: arrays of which a dimension is 0."""
    part = (*(slice(None),) * axis, slice(0))
    return lambda arguments: {name: change_arrays(arguments[name], lambda x: x[part]) for name in names}


def wrong_value(name: str, value: Any, error: type[Exception] = ValueError) -> Bad:
    """A value that an argument must not have."""
    return error, name, lambda arguments: {name: value}


# ---- bits


def bits(tensor: Any) -> Any:
    """The tensor's bits as integers, so that NaN equals NaN and 0 differs from -0."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.contiguous().view(integer)


def assert_same_bits(name: str, got: Any, want: Any) -> None:
    """Raise unless two tensors are equal bit for bit."""
    different = bits(got) != bits(want)
    count = int(different.sum())
    if count:
        place = tuple(int(c) for c in different.nonzero()[0])
        raise AssertionError(
            f"{name}: {count} of {different.numel()} elements differ; first at {place}: "
            f"{float(got[place])!r} and {float(want[place])!r}"
        )


def assert_results(text: str, call: Call, got: tuple[Any, ...], want: tuple[Any, ...]) -> None:
    """Raise unless all that is written has the same bits; unordered sums may differ by a rounding."""
    rows = ... if call.covered is None else call.covered()
    for name, one, wanted in zip(call.results, got, want, strict=True):
        one, wanted = one[rows], wanted[rows]
        if name in call.unordered:
            assert_rounded_alike(f"{name}, {text}", one, wanted)
        else:
            assert_same_bits(f"{name}, {text}", one, wanted)


def assert_rounded_alike(name: str, got: Any, want: Any) -> None:
    """Raise unless sums of the same terms differ by a step of their dtype, or what float32 leaves of them."""
    step = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}.get(want.dtype, 1e-4)
    torch.testing.assert_close(
        got.double(), want.double(), rtol=step, atol=1e-4, equal_nan=True, msg=lambda text: f"{name}: {text}"
    )
