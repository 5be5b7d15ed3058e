"""How an operator of rawmla is registered: from a schema and two calls to all that torch needs.

`register` takes two calls, of the library and of its reference, and empty results. It makes of them

- a CUDA kernel, the call of the library;
- a CPU kernel, the call of the reference after the checks of the library;
- a fake kernel: these checks, and empty results;
- refusals of vmap, and of gradients but for operators that have a backward.

The checks are the call of the library with stand-ins: it runs up to the point where it needs a device. Sizes
that torch keeps symbolic are checked by their example values, so that a check restricts no size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch.autograd import forward_ad

from .. import jit
from ..call.frameworks import WITH_BACKWARD
from ..stand_ins import Described, NoFramework

LIBRARY = torch.library.Library("rawmla", "DEF")

# Kernels look at strides, so inputs must come as they were traced.
_TAGS = [
    torch.Tag.pt2_compliant_tag,
    getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order),
]


def register(
    schema: str,
    run: Callable[..., Any],
    refer: Callable[..., Any],
    empty: Callable[..., Any] | None,
    graph: tuple[tuple[str, ...], Callable[..., Any]] | None = None,
) -> None:
    """Register the operator `rawmla::<schema>`.

    ``run`` and ``graph`` take its arguments by position, since they are on the path of every call, ``refer``
    and ``empty`` as keywords.

    Parameters
    ----------
    schema : str
        As of `torch.library.Library.define`, without default values. Arguments that are written have an
        alias annotation, as in ``Tensor(a!) out``, and no result is an alias of an argument. Arguments have
        the names of the public function's, which errors start with.
    run, refer : callable
        Compute the results of the operator: with kernels, and with `rawmla.reference`.
    empty : callable or None
        Makes results of that kind, not filled, with every stride that results of the CUDA kernel have. It
        compares no size that may be symbolic. None: the operator returns nothing, and what the calls return
        is dropped.
    graph : pair of tuple of str and callable, optional
        The arguments that have gradients, and ``graph(forward, *args)``, which calls ``forward()`` and gives
        its results with a graph of autograd. None: no argument has one.
    """
    name = LIBRARY.define(schema, tags=_TAGS)
    qualified = f"rawmla::{name}"
    op = getattr(torch.ops.rawmla, name).default
    names = [argument.name for argument in op._schema.arguments]

    def named(args: tuple[Any, ...]) -> dict[str, Any]:
        return dict(zip(names, args, strict=True))

    def cuda(*args: Any) -> Any:
        made = run(*args)
        return None if empty is None else made

    def cpu(*args: Any) -> Any:
        given = named(args)
        _check(run, given, torch.Tensor.data_ptr)
        made = refer(**given)
        if empty is None:
            return None
        results = empty(**given)
        _copy(made, results)
        return results

    def fake(*args: Any) -> Any:
        given = named(args)
        _check(run, given, lambda tensor: 0)
        return None if empty is None else empty(**given)

    LIBRARY.impl(name, cuda, "CUDA")
    LIBRARY.impl(name, cpu, "CPU")
    torch.library.register_fake(qualified, fake, lib=LIBRARY)
    LIBRARY.impl(name, _autograd(op, names, *(graph or ((), None))), "Autograd", with_keyset=True)
    if hasattr(torch.library, "register_vmap"):  # torch 2.5
        torch.library.register_vmap(qualified, _refuse_vmap(qualified), lib=LIBRARY)


def register_with_out(
    name: str,
    arguments: str,
    num_results: int,
    run: Callable[..., Any],
    refer: Callable[..., Any],
    empty: Callable[..., Any],
    graph: tuple[tuple[str, ...], Callable[..., Any]] | None = None,
) -> None:
    """Register an operator that makes its results, and `<name>_out`, which writes the first into ``out``.

    ``run`` and ``refer`` take the keyword ``out`` too, and return all results whether it is None or not.
    `<name>_out` returns the results but ``out``. The other parameters are of `register`.
    """
    register(
        f"{name}({arguments}) -> {_results(num_results)}",
        partial(run, out=None),
        partial(refer, out=None),
        empty,
        graph,
    )
    register(
        f"{name}_out({arguments}, Tensor(out!) out) -> {_results(num_results - 1)}",
        lambda *args: _without_first(run(*args[:-1], out=args[-1])),
        lambda **given: _without_first(refer(**given)),
        (lambda out, **given: _without_first(empty(**given))) if num_results > 1 else None,
    )


def _results(number: int) -> str:
    return "Tensor" if number == 1 else f"({', '.join(['Tensor'] * number)})"


def _without_first(results: Any) -> Any:
    """The results of an operator without the first, which was given."""
    others = results[1:] if isinstance(results, tuple) else ()
    return others[0] if len(others) == 1 else others


def call_with_out(name: str, args: tuple[Any, ...], out: Any) -> Any:
    """Call an operator of `register_with_out`, or its form for a given out; returns all results."""
    if out is None:
        return getattr(torch.ops.rawmla, name).default(*args)
    others = getattr(torch.ops.rawmla, f"{name}_out").default(*args, out)
    if others is None:
        return out
    return (out, *others) if isinstance(others, tuple) else (out, others)


def _autograd(
    op: Any, names: list[str], differentiable: tuple[str, ...], graph: Callable[..., Any] | None
) -> Callable[..., Any]:
    """The kernel of the Autograd key: makes a graph, and refuses tensors that would need a backward which
    there is not, as eager functions do.

    Does not run in inference mode.
    """
    infos = [argument.alias_info for argument in op._schema.arguments]
    written = [i for i, info in enumerate(infos) if info is not None and info.is_write]

    def kernel(keyset: Any, *args: Any) -> Any:
        needs_graph = False
        for name, tensor in _tensors(zip(names, args, strict=True)):
            needs = tensor.requires_grad and torch.is_grad_enabled()
            if needs and name in differentiable and not torch._C._are_functorch_transforms_active():
                needs_graph = True
            elif needs or _has_tangent(tensor):
                raise NotImplementedError(
                    f"{op.name()} has no derivative: {name}: expected a tensor that needs no gradient, got "
                    "one that does; pass a detached tensor, or call under torch.no_grad() or "
                    f"torch.inference_mode(). {WITH_BACKWARD}"
                )
        if needs_graph and graph is not None:
            return graph(lambda: op.redispatch(keyset & torch._C._after_autograd_keyset, *args), *args)
        result = op.redispatch(keyset & torch._C._after_autograd_keyset, *args)
        for i in written:  # a graph that has saved one of these refuses to run backward
            if not args[i].is_inference():
                torch.autograd.graph.increment_version(args[i])
        return result

    return kernel


def _has_tangent(tensor: torch.Tensor) -> bool:
    """Whether forward-mode differentiation (torch.func.jvp) follows the tensor."""
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None


def _refuse_vmap(name: str) -> Callable[..., Any]:
    def rule(info: Any, in_dims: Any, *args: Any) -> Any:
        raise NotImplementedError(
            f"{name} cannot be mapped by torch.vmap: expected tensors with all requests in one batch, got an "
            "axis of vmap; fold that axis into the batch (or query token) dimension, and call once"
        )

    return rule


_NO_FRAMEWORK = NoFramework("torch")


class NoExample(Exception):
    """A symbolic number has no example value."""


def _check(run: Callable[..., Any], given: dict[str, Any], address: Callable[[Any], int]) -> None:
    """Check the arguments of an operator as a call does; `address` gives the address of a tensor."""
    (first, tensor), *others = _tensors(given.items())
    for name, other in others:
        if other.device != tensor.device:
            raise ValueError(
                f"{name}: expected a tensor on device {tensor.device}, as {first} is, got {other.device}"
            )
    try:
        stand_ins = [_stand_in(value, address) for value in given.values()]
    except NoExample:
        return  # left to the kernel
    try:
        run(*stand_ins)
    except jit.DeviceNeeded:
        pass


def _stand_in(value: Any, address: Callable[[Any], int]) -> Any:
    """Make a stand-in, for a call that launches nothing, of an argument of an operator."""
    if isinstance(value, (list, tuple)):
        return [_stand_in(one, address) for one in value]
    if isinstance(value, torch.Tensor):
        shape, strides = (tuple([example(n) for n in sizes]) for sizes in (value.shape, value.stride()))
        dtype = str(value.dtype).removeprefix("torch.")
        return Described(address(value), shape, strides, dtype, jit.NO_DEVICE, _NO_FRAMEWORK)
    return example(value)


def example(value: Any) -> Any:
    """The example value of a symbolic number; any other value as it is."""
    if not isinstance(value, (torch.SymInt, torch.SymFloat)):
        return value
    if not value.node.has_hint():
        raise NoExample
    return value.node.hint


def empty_lse(q: torch.Tensor) -> torch.Tensor:
    """float32 `[b, h_q, s_q]`, not filled, for q `[b, s_q, h_q, d]`."""
    b, s_q, h_q, _ = q.shape
    return q.new_empty((b, h_q, s_q), dtype=torch.float32)


def _tensors(given: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors among the arguments of an operator, with their names."""
    for name, value in given:
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, (list, tuple)):
            yield from _tensors((f"{name}[{i}]", one) for i, one in enumerate(value))


def _copy(values: Any, results: Any) -> None:
    """Copy results of the reference into tensors with the strides of the CUDA kernel's."""
    if isinstance(results, tuple):
        for value, result in zip(values, results, strict=True):
            result.copy_(value)
    else:
        results.copy_(values)
