"""Score and mask functions of Python as CUDA text.

A function is run once on fake tensors (torch's make_fx), which records the operators that it calls on its
arguments; `rawmla.flex.operators` writes each as CUDA. Nothing is launched.

For gradients torch's autograd runs in the same recording. The parts of captured tensors that a function
reads are leaves then, if they require grad: their gradients say what each score adds where, and no tensor of
the size of a captured one is made.
"""

from __future__ import annotations

import inspect
import operator
import threading
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map_only

from .mods import ELEMENTS, Backward, Capture, Mod, Number, Site
from .names import names_of
from .operators import OPERATORS, Refused, Value, View, Writer, elements
from .recording import LITERALS, NO_BRANCHES, NOT_THERE, IndexByTensors, Watch, Watched, changed_by, viewed_by

ARGUMENTS = {
    "score_mod": ("score", "b", "h", "q_idx", "kv_idx"),
    "mask_mod": ("b", "h", "q_idx", "kv_idx"),
}

_PLACE_KEYWORDS = {"dtype", "layout", "device", "pin_memory", "memory_format", "non_blocking"}
"""Where and as what torch would make a tensor; its dtype is the dtype of the result."""
_DTYPE_OF = {"score": torch.float32, "grad": torch.float32}
"""The dtypes of the arguments that are no int32."""
_DTYPES = {getattr(torch, name): name for name in ELEMENTS}
_READS = {
    *("IndexBackward0", "SelectBackward0", "SliceBackward0", "UnbindBackward0", "AliasBackward0"),
    "CloneBackward0",
}
"""The names that autograd has for operators that leave a `View`."""
_RECORDING = threading.RLock()
"""make_fx patches torch.nn.Module for the whole process."""


def name_of(mod: Callable[..., Any]) -> str:
    """A function as an error names it."""
    inner = mod
    while not hasattr(inner, "__qualname__") and hasattr(inner, "func"):  # functools.partial
        inner = inner.func
    return getattr(inner, "__qualname__", type(inner).__name__)


def trace(
    mod: Callable[..., Any],
    kind: Literal["score_mod", "mask_mod"],
    device: Any = "cpu",
    backward: bool = False,
) -> Mod:
    """Record a function, whose tensors are on the device, and write it as CUDA. With ``backward``, write the
    gradients of a score function too: of the score and of captured tensors that require grad.

    Raises
    ------
    TypeError
        It does not take the arguments of its kind.
    NotImplementedError
        It calls an operator that kernels do not have, or holds more than a short vector in between.
    ValueError
        It branches on its arguments, takes the value of a captured tensor into Python, changes a captured
        tensor or one of which a view is used afterwards, or returns something else than a 0-d tensor or a
        number. With `backward`: a number on the CPU requires grad. All name the function.
    """
    name = f"{kind} {name_of(mod)}"
    graph = _record(mod, kind, device, name, backward)
    writer = Writer()
    captures: list[Capture] = []
    values: dict[Any, Any] = {}
    arguments = iter((*ARGUMENTS[kind], "grad"))
    nodes = list(graph.graph.nodes)
    results = nodes[-1].args[0]
    owners = _owners(nodes)
    for node in nodes:
        if node.op == "placeholder":
            argument = next(arguments)
            values[node] = Value(_DTYPE_OF.get(argument, torch.int32), (), (argument,))
        elif node.op == "get_attr":
            values[node] = _captured(writer, captures, getattr(graph, node.target), name)
        elif node.op == "call_function":
            _check_changes(node, owners, name)
            values[node] = _written(writer, node, values, name)
        if backward and node is results[0]:
            writer.of_gradients = True
    returned = torch.fx.node.map_arg(results, lambda one: values[one])
    result, *gradients = returned if backward else (returned,)
    item = _result(writer, result, kind, name)
    if backward:
        names = names_of(mod, [capture.array for capture in captures])
        captures = [x._replace(name=one) for x, one in zip(captures, names, strict=True)]
    return Mod(
        "\n".join([*writer.needed(item), f"return {item};"]),
        tuple(captures),
        tuple(Number(source, _is_integer(source)) for source in writer.numbers),
        _backward(writer, item, gradients) if backward else None,
    )


def _record(mod: Callable[..., Any], kind: str, device: Any, name: str, backward: bool) -> Any:
    """The graph of the operators that a function calls; with `backward`, of `_Joint`."""
    _check_arguments(mod, kind, name)
    arguments = (*ARGUMENTS[kind], "grad") if backward else ARGUMENTS[kind]
    watch = Watch(mod, name)
    recorded = _Joint(watch, name) if backward else watch.call
    if backward and not torch.cuda.is_available():
        device = "cpu"  # without its driver autograd cannot ask a device for streams; no capture is there
    # inference_mode(False) enables gradients, of which only `_Joint` has use.
    with torch.inference_mode(False), torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        fakes = [
            torch.empty((), dtype=_DTYPE_OF.get(argument, torch.int32), device=device)
            for argument in arguments
        ]
        try:
            with _RECORDING, Watched(watch):
                return make_fx(recorded, tracing_mode="real")(*fakes)
        except DataDependentOutputException as error:
            raise ValueError(NO_BRANCHES.format(name)) from error
        except DynamicOutputShapeException as error:
            raise NotImplementedError(
                f"{name}: calls {error.func}, whose result has a shape that depends on values"
            ) from error


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    """Return what autograd saves."""
    return tensor


class _Joint:
    """A score function and its gradients, to be recorded."""

    def __init__(self, watch: Watch, name: str) -> None:
        self._watch = watch
        self._name = name

    def __call__(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, grad: Any) -> tuple[Any, ...]:
        """The result, its gradient by the score, what is read of captured tensors, and the gradients by it;
        None where there is none.
        """
        # In this thread, which make_fx records. In a backward pass torch has switched gradients off. Its
        # anomaly mode looks for NaN among values, which fake tensors do not have. Hooks of the caller, such
        # as torch.utils.checkpoint sets, would count what autograd saves here.
        with (
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(_unchanged, _unchanged),
            torch.autograd.set_multithreading_enabled(False),
            torch.autograd.set_detect_anomaly(False),
        ):
            source = score.detach().requires_grad_()
            with _ReadsAreLeaves(self._name) as reads:
                # A clone is no leaf, so that the function may change it in place.
                result = self._watch.call(source.clone(), b, h, q_idx, kv_idx)
            if not isinstance(result, torch.Tensor) or result.ndim or not result.requires_grad:
                return result, None, [], []
            leaves = reads.leaves
            try:
                by_score, *by_leaves = torch.autograd.grad(
                    result.to(torch.float32), (source, *leaves), grad, allow_unused=True
                )
            except RuntimeError as error:
                raise NotImplementedError(f"{self._name}: torch finds no gradients: {error}") from error
            return result, by_score, leaves, by_leaves


class _ReadsAreLeaves(IndexByTensors):
    """Inside, what is read of captured tensors that require grad is leaves, with gradients of their own."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.leaves: list[torch.Tensor] = []
        self._name = name
        self._of: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map_only(torch.Tensor, self._own, (args, kwargs or {}))
        result = super().__torch_function__(func, types, args, kwargs)
        if isinstance(result, torch.Tensor):
            return self._read(result)
        if type(result) in (tuple, list):
            return type(result)(self._read(x) if isinstance(x, torch.Tensor) else x for x in result)
        return result

    def _own(self, tensor: Any) -> Any:
        """A leaf for a captured tensor."""
        if isinstance(tensor, FakeTensor) or not tensor.requires_grad:
            return tensor
        if tensor.ndim == 0 and tensor.device.type == "cpu":
            raise ValueError(
                f"{self._name}: expected captured tensors that require grad on the device of query, got a "
                "number on the CPU"
            )
        if id(tensor) not in self._of:
            self._of[id(tensor)] = tensor, self._leaf(tensor)
        return self._of[id(tensor)][1]

    def _read(self, result: Any) -> Any:
        """A leaf instead of part of one."""
        made_by = result.grad_fn
        while made_by is not None and made_by.name() in _READS:
            made_by = made_by.next_functions[0][0]
        source = getattr(made_by, "variable", None)
        # A clone, which may be changed in place as what was read may be.
        return self._leaf(result).clone() if any(leaf is source for leaf in self.leaves) else result

    def _leaf(self, tensor: Any) -> Any:
        self.leaves.append(tensor.detach().requires_grad_())
        return self.leaves[-1]


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
    if isinstance(tensor, torch.nn.Module):  # a function that an operator such as torch.cond takes
        raise NotImplementedError(f"{name}: calls an operator with functions, {NOT_THERE}")
    if tensor.dtype not in _DTYPES:
        raise NotImplementedError(f"{name}: reads a captured tensor of dtype {tensor.dtype}")
    if tensor.ndim == 0 and tensor.device.type == "cpu":
        c_dtype = torch.float32 if tensor.dtype.is_floating_point else torch.int64
        if tensor.dtype == torch.bool:
            return Value(torch.bool, (), (f"({writer.number(tensor)} != 0)",))
        return writer.cast(Value(c_dtype, (), (writer.number(tensor),)), tensor.dtype)
    place = next((i for i, capture in enumerate(captures) if capture.array is tensor), len(captures))
    if place == len(captures):
        captures.append(Capture(tensor, _DTYPES[tensor.dtype], tensor.ndim))
    return View(place, tensor.dtype, tuple(range(extent) for extent in tensor.shape))


def _written(writer: Writer, node: Any, values: dict[Any, Any], name: str) -> Any:
    """The value or view that an operator leaves."""
    if node.target is operator.getitem:
        whole, place = node.args
        return values[whole][place]
    schema = getattr(node.target, "_schema", None)
    if schema is None:  # an operator that takes functions, such as torch.cond
        raise NotImplementedError(f"{name}: calls {node.target}, {NOT_THERE}")
    called = schema.name.split("::")[-1]
    changes = schema.is_mutable
    write = OPERATORS.get(called.removesuffix("_") if changes else called)
    if write is None:
        raise NotImplementedError(f"{name}: calls {schema.name}, {NOT_THERE}")
    arguments, given = torch.fx.node.map_arg((node.args, node.kwargs), lambda one: values[one])
    keywords = {key: x for key, x in given.items() if key not in _PLACE_KEYWORDS}
    try:
        written = write(writer, node.meta.get("val"), *arguments, **keywords)
    except Refused as refused:
        raise NotImplementedError(f"{name}: {schema.name} {refused}") from refused
    if changes:
        changed = node.args[0]
        values[changed] = written = writer.cast(written, values[changed].dtype)
    return written


def _owners(nodes: list[Any]) -> dict[Any, Any]:
    """For each node the one whose memory its tensor shares: the node itself unless the tensor is a view."""
    owners: dict[Any, Any] = {}
    for node in nodes:
        viewed = None
        if node.target is operator.getitem:  # of the views that an operator such as unbind makes
            viewed = node.args[0]
        elif hasattr(node.target, "_schema"):
            viewed = viewed_by(node.target, node.args, node.kwargs, lambda index: index.target in LITERALS)
        owners[node] = owners.get(viewed, node)
    return owners


def _check_changes(node: Any, owners: dict[Any, Any], name: str) -> None:
    """Check that an operator in place changes one tensor of the function's own, of which no view is used
    afterwards: a view is a value of its own in a kernel.
    """
    changed = changed_by(node.target, node.args, node.kwargs) if hasattr(node.target, "_schema") else []
    if not changed:
        return
    target, by = node.args[0], node.target._schema.name
    if changed != [target]:
        raise NotImplementedError(
            f"{name}: calls {by} with out=, {NOT_THERE}; use the tensor that it returns without out="
        )
    if isinstance(target, list):
        return  # no kernel has an operator that takes several
    places = {one: place for place, one in enumerate(owners)}
    for other, owner in owners.items():
        if owner is owners[target] and other is not target and places[other] < places[node]:
            if any(places[user] > places[node] for user in other.users):
                raise ValueError(
                    f"{name}: expected changes in place of tensors without a view that is used afterwards, "
                    f"got one by {by}: what shares the memory would not be changed; change a clone, or use "
                    "the tensor that an operation out of place returns"
                )


def _result(writer: Writer, returned: Any, kind: str, name: str) -> str:
    """The expression of what a function returns."""
    if not isinstance(returned, (Value, View, bool, int, float)):
        raise ValueError(f"{name}: expected it to return a 0-d tensor, got {type(returned).__name__}")
    value = writer.value(returned)
    if value.shape:
        raise ValueError(f"{name}: expected it to return a 0-d tensor, got shape {list(value.shape)}")
    (item,) = writer.cast(value, torch.float32 if kind == "score_mod" else torch.bool).items
    return item


def _backward(writer: Writer, result: str, returned: Any) -> Backward:
    """The texts of gradients, from those that `_Joint` returns."""
    by_score, leaves, by_leaves = returned
    derivative = "0.0f"  # of a result that does not depend on the score
    if by_score is not None:
        (derivative,) = writer.cast(writer.value(by_score), torch.float32).items
    added: dict[tuple[int, tuple[str, ...]], str] = {}  # by capture and indices
    for leaf, gradient in zip(leaves, by_leaves, strict=True):
        if gradient is None:
            continue
        items = writer.cast(writer.value(gradient), torch.float32).items
        for indices, item in zip(elements(leaf), items, strict=True):
            place = (leaf.capture, indices)
            added[place] = writer.let("float", f"{added[place]} + {item}") if place in added else item
    gradients = sorted({capture for capture, _ in added})
    sites, calls = [], []
    for i, ((capture, indices), item) in enumerate(added.items()):
        reads = writer.reads(*indices)
        by_q, by_kv = [bool(reads & {argument, "score"}) for argument in ("q_idx", "kv_idx")]
        sites.append(Site(gradients.index(capture), by_q, by_kv))
        calls.append(f"gradient_sink.template add<{i}>(mod.t{capture}.place({', '.join(indices)}), {item});")
    return Backward(
        "\n".join([*writer.needed(result, derivative), f"return {{{result}, {derivative}}};"]),
        derivative == "grad",
        "\n".join([*writer.needed(*calls), *calls]),
        tuple(gradients),
        tuple(sites),
    )


def _is_integer(source: Any) -> bool:
    if isinstance(source, torch.Tensor):
        return not source.dtype.is_floating_point
    return isinstance(source, int)
