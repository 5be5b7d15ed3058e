"""Score and mask functions of Python as CUDA text.

A function is run once on fake tensors (torch's make_fx), which records the operators that it calls on its
arguments; `rawmla.attention.operators` writes each as CUDA. Nothing is launched.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from .mods import ELEMENTS, Capture, Mod, Number
from .operators import OPERATORS, Refused, Value, View, Writer

__all__ = ["name_of", "trace"]

ARGUMENTS = {
    "score_mod": ("score", "b", "h", "q_idx", "kv_idx"),
    "mask_mod": ("b", "h", "q_idx", "kv_idx"),
}


_PLACE_KEYWORDS = {"dtype", "layout", "device", "pin_memory", "memory_format", "non_blocking"}
"""Where and as what torch would make a tensor; its dtype is that of the result."""


_DTYPES = {getattr(torch, name): name for name in ELEMENTS}


def name_of(mod: Callable[..., Any]) -> str:
    """A function as an error names it."""
    inner = mod
    while not hasattr(inner, "__qualname__") and hasattr(inner, "func"):  # functools.partial
        inner = inner.func
    return getattr(inner, "__qualname__", type(inner).__name__)


def trace(mod: Callable[..., Any], kind: Literal["score_mod", "mask_mod"], device: Any = "cpu") -> Mod:
    """Record a function and write it as CUDA.

    Parameters
    ----------
    mod : callable
        ``score_mod(score, b, h, q_idx, kv_idx)`` or ``mask_mod(b, h, q_idx, kv_idx)``.
    kind : str
        Which of the two it is.
    device : torch.device
        That of the tensors it reads.

    Raises
    ------
    TypeError
        It does not take the arguments of its kind.
    NotImplementedError
        It calls an operator that kernels do not have, or holds more than a short vector in between.
    ValueError
        It branches on its arguments, has a side effect, or returns what is no 0-d tensor or number. All name
        the function.
    """
    name = f"{kind} {name_of(mod)}"
    graph = _record(mod, kind, device, name)
    writer = Writer()
    captures: list[Capture] = []
    values: dict[Any, Any] = {}
    arguments = iter(ARGUMENTS[kind])
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            argument = next(arguments)
            values[node] = Value(torch.float32 if argument == "score" else torch.int32, (), (argument,))
        elif node.op == "get_attr":
            values[node] = _captured(writer, captures, getattr(graph, node.target), name)
        elif node.op == "call_function":
            values[node] = _written(writer, node, values, name)
        else:
            returned = node.args[0]
    return Mod(
        _with_return(writer, values.get(returned, returned) if _is_node(returned) else returned, kind, name),
        tuple(captures),
        tuple(Number(source, _is_integer(source)) for source in writer.numbers),
    )


def _record(mod: Callable[..., Any], kind: str, device: Any, name: str) -> Any:
    """The graph of the operators that a function calls."""
    _check_arguments(mod, kind, name)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fakes = [
            torch.empty((), dtype=torch.float32 if argument == "score" else torch.int32, device=device)
            for argument in ARGUMENTS[kind]
        ]
        try:
            with _IndexByTensors():
                # Not `mod` itself, whose parameters make_fx counts, those with defaults too.
                return make_fx(lambda *arguments: mod(*arguments), tracing_mode="real")(*fakes)
        except DataDependentOutputException as error:
            raise ValueError(
                f"{name}: expected a function that does not branch on its arguments or on tensors' values "
                "(use torch.where), got one that reads a value while it is traced"
            ) from error
        except DynamicOutputShapeException as error:
            raise NotImplementedError(
                f"{name}: calls {error.func}, whose result has a shape that depends on values"
            ) from error


class _IndexByTensors(TorchFunctionMode):
    """Inside, 0-d tensors and numbers are indices like any other: torch would ask for the values of the
    first, which are unknown, and keep the second as steps of a view, which are no parameters.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__getitem__:
            indices = args[1] if isinstance(args[1], tuple) else (args[1],)
            if all(isinstance(x, torch.Tensor) or type(x) is int for x in indices):
                # On the CPU: a copy to the device would wait for it, and be a new array at each trace.
                return torch.ops.aten.index(
                    args[0], [x if isinstance(x, torch.Tensor) else torch.tensor(x) for x in indices]
                )
        return func(*args, **(kwargs or {}))


def _check_arguments(mod: Any, kind: str, name: str) -> None:
    """Check that a function takes the arguments of its kind."""
    wanted = ARGUMENTS[kind]
    try:
        parameters = inspect.signature(mod)
    except (TypeError, ValueError):  # one of C may not say
        return
    try:
        parameters.bind(*wanted)
    except TypeError as error:
        raise TypeError(
            f"{name}: expected a function of ({', '.join(wanted)}), got one of {parameters}"
        ) from error


def _captured(writer: Writer, captures: list[Capture], tensor: Any, name: str) -> Any:
    """A tensor that the function closes over."""
    if tensor.dtype not in _DTYPES:
        raise NotImplementedError(f"{name}: reads a captured tensor of dtype {tensor.dtype}")
    if tensor.ndim == 0 and tensor.device.type == "cpu":
        c_dtype = torch.float32 if tensor.dtype.is_floating_point else torch.int64
        if tensor.dtype == torch.bool:
            return Value(torch.bool, (), (f"({writer.number(tensor)} != 0)",))
        return writer.cast(Value(c_dtype, (), (writer.number(tensor),)), tensor.dtype)
    known = [place for place, capture in enumerate(captures) if capture.array is tensor]
    if known:
        (place,) = known
    else:
        place = len(captures)
        captures.append(Capture(tensor, _DTYPES[tensor.dtype], tensor.ndim))
    return View(place, tensor.dtype, tuple(range(extent) for extent in tensor.shape))


def _written(writer: Writer, node: Any, values: dict[Any, Any], name: str) -> Any:
    """What an operator leaves."""
    if node.target is operator.getitem:
        whole, place = node.args
        return values[whole][place]
    schema = node.target._schema
    called = schema.name.split("::")[-1]
    changes = schema.is_mutable
    write = OPERATORS.get(called.removesuffix("_") if changes else called)
    if write is None:
        raise NotImplementedError(f"{name}: calls {schema.name}, which kernels do not have")
    if changes and (isinstance(values[node.args[0]], View) or node.args[0].meta["val"].ndim):
        raise ValueError(
            f"{name}: expected a function without side effects, got one that changes a tensor by "
            f"{schema.name}"
        )
    arguments, given = torch.fx.node.map_arg((node.args, node.kwargs), lambda one: values[one])
    keywords = {key: x for key, x in given.items() if key not in _PLACE_KEYWORDS}
    try:
        written = write(writer, node.meta.get("val"), *arguments, **keywords)
    except Refused as refused:
        raise NotImplementedError(f"{name}: {schema.name} {refused}") from refused
    if changes:
        values[node.args[0]] = written
    return written


def _with_return(writer: Writer, returned: Any, kind: str, name: str) -> str:
    if not isinstance(returned, (Value, View, bool, int, float)):
        raise ValueError(f"{name}: expected it to return a 0-d tensor, got {type(returned).__name__}")
    value = writer.value(returned)
    if value.shape:
        raise ValueError(f"{name}: expected it to return a 0-d tensor, got shape {list(value.shape)}")
    (item,) = writer.cast(value, torch.float32 if kind == "score_mod" else torch.bool).items
    return "\n".join([*writer.lines, f"return {item};"])


def _is_node(x: Any) -> bool:
    return isinstance(x, torch.fx.Node)


def _is_integer(source: Any) -> bool:
    if isinstance(source, torch.Tensor):
        return not source.dtype.is_floating_point
    return isinstance(source, int)
