"""Watches a function while it is recorded, and refuses what a trace cannot have before it happens."""

from __future__ import annotations

from collections.abc import Callable
from types import EllipsisType, NoneType
from typing import Any, NamedTuple

import torch
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .names import UNNAMED, names_of

NOT_THERE = "which kernels do not have"
NO_BRANCHES = (
    "{}: expected a function that does not branch on its arguments or on tensors' values (use torch.where), "
    "got one that reads a value while it is traced"
)
_ARGUMENT = object()
"""Stands for the arguments of a function where a tensor is made of them."""
LITERALS = {torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default}
"""Make the tensors of torch.tensor, of numbers in a function."""


class _Made(NamedTuple):
    """A tensor that a function made."""

    tensor: Any  # kept, as its id is another one's afterwards
    source: Any  # what decides its values, as of `Watch._source`
    owner: torch.Tensor | None  # the captured tensor that has its memory


_UNKNOWN = _Made(None, None, None)


class Watch(TorchDispatchMode):
    """Calls a function, and refuses before it happens what a trace cannot have: values of captured tensors in
    Python, which would stay as they are now, and changes of captured tensors.
    """

    def __init__(self, mod: Callable[..., Any], name: str) -> None:
        super().__init__()
        self._mod = mod
        self._name = name
        self._made: dict[int, _Made] = {}  # by id

    @classmethod
    def supports_higher_order_operators(cls) -> bool:
        return True

    def call(self, *given: torch.Tensor) -> Any:
        """Call the function."""
        self._made = {id(x): _Made(x, _ARGUMENT, None) for x in given}
        with self:
            return self._mod(*given)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            raise NotImplementedError(f"{self._name}: calls {func}, an operator with functions, {NOT_THERE}")
        source = None if func in LITERALS else self._source((args, kwargs))
        if torch.Tag.data_dependent_output in func.tags:
            self.refuse_value(source)
        for x in tree_leaves(changed_by(func, args, kwargs)):
            self._refuse_change(self._owner(x), func._schema.name)
        try:
            result = func(*args, **kwargs)
        except AssertionError as error:  # of torch, which looks at the tensor that a view was made of
            views = [x for x in tree_leaves((args, kwargs)) if _is_captured(x) and x._is_view()]
            if not views:
                raise
            raise ValueError(
                f"{self._name}: expected captured tensors that torch can trace, got "
                f"{_named(self._mod, views[0])}, a view whose data was replaced ({error}); read a clone of it"
            ) from error
        owner = self._owner(viewed_by(func, args, kwargs, lambda index: self._source(index) is None))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor):
                self._made[id(x)] = _Made(x, source, owner)
        return result

    def _owner(self, x: Any) -> torch.Tensor | None:
        """The captured tensor that has the memory of a tensor."""
        return x if _is_captured(x) else self._made.get(id(x), _UNKNOWN).owner

    def _source(self, given: Any) -> Any:
        """The source of the values of the tensors among these: `_ARGUMENT`, or else a captured tensor, or
        None, as for numbers in the function's text.
        """
        sources = [
            x if _is_captured(x) else self._made.get(id(x), _UNKNOWN).source
            for x in tree_leaves(given)
            if isinstance(x, torch.Tensor)
        ]
        known = [x for x in sources if x is not None]
        return next((x for x in known if x is _ARGUMENT), known[0] if known else None)

    def check(self, func: Any, given: Any) -> None:
        """Refuse functions that go to a tensor's memory past all operators."""
        if func is torch.Tensor.__setitem__:
            self._refuse_change(self._owner(given[0][0]), "an assignment")
        elif func in _COPIES:
            source = self._source(given)
            if source is not _ARGUMENT:
                self.refuse_value(source)
        elif func in _READS_MEMORY:
            self.refuse_value(self._source(given))

    def refuse_value(self, source: Any) -> None:
        """Refuse to read a value that this decides, unless it is None."""
        if source is _ARGUMENT:
            raise ValueError(NO_BRANCHES.format(self._name))
        if source is not None:
            raise ValueError(
                f"{self._name}: expected captured tensors to be read by index or as operands, got a function "
                f"that takes the value of {_named(self._mod, source)} into Python while it is traced, where "
                "later changes of the tensor are not seen; index it in the function (a 0-d tensor is an "
                "operand as it is, torch.where branches), or pass a number instead"
            )

    def _refuse_change(self, owner: torch.Tensor | None, by: str) -> None:
        """Refuse a change of a captured tensor's memory."""
        if owner is not None:
            raise ValueError(
                f"{self._name}: expected a function without side effects, got one that changes "
                f"{_named(self._mod, owner)} by {by}"
            )


_READS_MEMORY = {
    getattr(torch.Tensor, name)
    for name in ("numpy", "tolist", "storage", "untyped_storage", "__array__", "__dlpack__")
} | {torch.Tensor.__cuda_array_interface__.__get__}
_COPIES = {torch.tensor, torch.Tensor.new_tensor}
"""Copy the values of tensors that they are given."""


def _is_captured(x: Any) -> bool:
    """Whether an object is a tensor that was there before the trace."""
    return isinstance(x, torch.Tensor) and not isinstance(x, FakeTensor)


def _named(mod: Callable[..., Any], tensor: torch.Tensor) -> str:
    """A captured tensor as an error names it."""
    (name,) = names_of(mod, [tensor])
    return "a captured tensor" if name == UNNAMED else name


def _shared(func: Any, args: Any, kwargs: Any) -> list[tuple[Any, bool]]:
    """The arguments of an operator whose memory it writes to or gives back, and whether it writes."""
    return [
        (args[place] if place < len(args) else kwargs.get(argument.name), argument.alias_info.is_write)
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None
    ]


def changed_by(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that an operator writes to."""
    return [x for x, is_written in _shared(func, args, kwargs) if is_written]


def viewed_by(func: Any, args: Any, kwargs: Any, is_literal: Callable[[Any], bool]) -> Any:
    """The argument of an operator whose memory its result shares; None if that memory is new."""
    if func is torch.ops.aten.index.Tensor:  # `IndexByTensors` writes views of torch so, by numbers alone
        return args[0] if all(index is None or is_literal(index) for index in args[1]) else None
    if any(one.alias_info is not None for one in func._schema.returns):
        return _shared(func, args, kwargs)[0][0]
    return None


class IndexByTensors(TorchFunctionMode):
    """Inside, 0-d tensors, and numbers without slices, are indices like any other: torch would ask for the
    values of the first, which are unknown, and keep the second as steps of a view, which are no parameters.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__getitem__:
            indices = args[1] if isinstance(args[1], tuple) else (args[1],)
            kinds = {torch.Tensor if isinstance(x, torch.Tensor) else type(x) for x in indices}
            if kinds == {int} or (torch.Tensor in kinds and kinds <= _BESIDE_TENSORS):
                return self._indexed(args[0], indices)
        return func(*args, **(kwargs or {}))

    def _indexed(self, whole: torch.Tensor, indices: tuple[Any, ...]) -> Any:
        """Slices first, then tensors and numbers, then new dimensions."""
        rest = whole.ndim - sum(x is not None and x is not ... for x in indices)
        spread = [one for x in indices for one in ([slice(None)] * rest if x is ... else [x])]
        old = [x for x in spread if x is not None]
        if any(isinstance(x, slice) for x in old):
            whole = whole[tuple(x if isinstance(x, slice) else slice(None) for x in old)]
        picked = self._read(torch.ops.aten.index(whole, [_place_of(x) for x in old]))
        left = [x and slice(None) for x in spread if x is None or isinstance(x, slice)]
        return picked[tuple(left)] if None in left else picked

    def _read(self, result: Any) -> Any:
        """The tensor that stands for part of another one."""
        return result


_BESIDE_TENSORS = {torch.Tensor, int, slice, EllipsisType, NoneType}


def _place_of(index: Any) -> Any:
    """An index as aten.index takes it."""
    if isinstance(index, slice):
        return None
    # On the CPU: a copy to the device would wait for it, and be a new array at each trace.
    return index if isinstance(index, torch.Tensor) else torch.tensor(index, device="cpu")


class Watched(IndexByTensors):
    """Inside, functions that go past all operators are watched too."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._watch.check(func, (args, kwargs))
        return super().__torch_function__(func, types, args, kwargs)
