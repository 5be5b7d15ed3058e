"""Dense and flex attention, forward and backward, under one interface, for tests that hold for all four.

Arrays that a change can lay out otherwise are called q, k, v, out and dout in all of them. Backward calls are
deterministic, so that equal calls give equal bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import nan
from typing import Any

import pytest
from gpu_support import assert_same_bits, torch

from kit import flex_backward, mha_backward
from kit.flex import FlexCase, check_flex, make_flex_inputs
from kit.flex_backward import make_flex_backward_inputs
from kit.mha import MhaCase, check_mha, make_mha_inputs
from operations import dense as mha_calls
from operations import dense_backward as mha_backward_calls
from operations import flex as flex_calls
from operations import flex_backward as flex_backward_calls
from rawmla.call import frameworks

__all__ = [
    "Attention",
    "at_offset",
    "copies_of_arguments",
    "each_attention",
    "each_backward",
    "each_forward",
    "first_for_all",
    "in_order",
    "odd_rows",
    "order_in_memory",
    "part_of_a_projection",
]


@dataclass(frozen=True)
class Attention:
    """One of the four functions.

    Attributes:
        is_flex: flex attention, whose arrays are `[b, h, s, d]`; else dense, `[b, s, h, d]`.
        is_backward: the gradients of q, k and v from out, lse and their gradients.
    """

    is_flex: bool
    is_backward: bool

    @property
    def id(self) -> str:
        return f"{'flex' if self.is_flex else 'dense'}{' backward' * self.is_backward}"

    @property
    def arrays(self) -> tuple[str, ...]:
        return ("q", "k", "v", "out", "dout") if self.is_backward else ("q", "k", "v")

    @property
    def tokens(self) -> int:
        """The dimension of tokens."""
        return 2 if self.is_flex else 1

    def argument(self, array: str) -> str:
        """The name of an array's argument."""
        of_flex = {"q": "query", "k": "key", "v": "value", "dout": "grad_out"}
        return of_flex.get(array, array) if self.is_flex else array

    def call(self, *, causal: bool = False, **sizes: Any) -> Any:
        """The inputs of a forward, or the `BackwardInputs` of a backward, of gradients of out and lse."""
        sizes = {"h_q": 4, "h_kv": 2, "d_qk": 64, "d_v": 64, **sizes}
        if self.is_flex:
            case = FlexCase(**sizes, mask="causal" if causal else "")
            made = (make_flex_backward_inputs if self.is_backward else make_flex_inputs)(case)
        else:
            made = make_mha_inputs(MhaCase(**sizes, causal=causal))
        return self.after_forward(made) if self.is_backward else made

    def after_forward(self, inputs: Any) -> Any:
        """The backward call after the forward of these inputs on the device."""
        if self.is_flex:
            return flex_backward_calls.backward_inputs(inputs.case, "both", inputs)
        return mha_backward_calls.backward_inputs(inputs, "both")

    def inputs(self, call: Any) -> Any:
        return call.inputs if self.is_backward else call

    def run(self, call: Any, **more: Any) -> Any:
        """The results; `more` are further keywords."""
        if self.is_backward:
            module = flex_backward_calls if self.is_flex else mha_backward_calls
            return module.backward_of(call, deterministic=True, **more)
        return (flex_calls if self.is_flex else mha_calls).attend(call, **more)

    def check(self, call: Any, got: Any) -> None:
        """Compare results with the float64 reference."""
        if self.is_backward:
            (flex_backward_calls if self.is_flex else mha_backward_calls).check_backward(call, got)
        else:
            (check_flex if self.is_flex else check_mha)(call, got)

    def assert_same(self, name: str, got: Any, want: Any) -> None:
        """Raise unless results have the same bits."""
        for number, (one, wanted) in enumerate(zip(got, want, strict=True)):
            if isinstance(one, torch.Tensor):
                assert_same_bits(f"{name}: result {number}", one, wanted)

    def exact(self, call: Any) -> tuple[Any, ...]:
        """dq, dk and dv of the reference, in the dtype of the call."""
        reference = (flex_backward if self.is_flex else mha_backward).reference_backward
        made: Any = reference(call.inputs, call.gradients, call.results)
        values = made.rows.values if self.is_flex else made.values
        return tuple(x.to(call.inputs.q.dtype) for x in values[:3])

    def with_arrays(self, call: Any, names: tuple[str, ...], change: Callable[[Any], Any]) -> Any:
        """The call with these arrays laid out by `change`, or replaced."""
        if not self.is_backward:
            return replace(call, **{name: change(getattr(call, name)) for name in names})
        inputs, gradients, (out, lse) = call.inputs, call.gradients, call.results
        inputs = replace(inputs, **{name: change(getattr(inputs, name)) for name in names if name in "qkv"})
        if "dout" in names:
            gradients = replace(gradients, dout=change(gradients.dout))
        return replace(
            call,
            inputs=inputs,
            gradients=gradients,
            results=(change(out) if "out" in names else out, lse),
        )

    def buffers(self, call: Any) -> tuple[list[tuple[Any, Any]], dict[str, Any]]:
        """Buffers of canaries, each with the slice of it that is to be filled, and these as keywords."""
        if not self.is_backward:
            buffer, given = (flex_calls if self.is_flex else mha_calls).out_buffer(call)
            return [(buffer, given)], {"out": given}
        if self.is_flex:  # takes none
            return [], {}
        buffers, gradients = mha_backward_calls.gradient_buffers(call.inputs, mha_calls.CANARY)
        return list(zip(buffers, gradients.values(), strict=True)), gradients


ATTENTION = [Attention(is_flex, is_backward) for is_flex in (False, True) for is_backward in (False, True)]
each_attention, each_forward, each_backward = (
    pytest.mark.parametrize("attention", some, ids=lambda attention: attention.id)
    for some in (ATTENTION, ATTENTION[::2], ATTENTION[1::2])
)


# ---- layouts


def in_order(*order: int) -> Callable[[Any], Any]:
    """A layout with the dimensions in this order in memory."""

    def change(x: Any) -> Any:
        return x.permute(order).contiguous().permute([order.index(axis) for axis in range(len(order))])

    return change


def order_in_memory(x: Any) -> list[int]:
    """The dimensions, those with larger strides first."""
    return sorted(range(x.ndim), key=lambda axis: -x.stride(axis))


def part_of_a_projection(x: Any) -> Any:
    """The middle one of three, beside NaN."""
    whole = torch.full((*x.shape[:2], 3, *x.shape[2:]), nan, dtype=x.dtype, device=x.device)
    whole[:, :, 1] = x
    return whole[:, :, 1]


def _behind(x: Any, elements: int) -> Any:
    memory = torch.full((x.numel() + elements,), nan, dtype=x.dtype, device=x.device)
    memory[elements:] = x.flatten()
    return memory[elements:].view(x.shape)


def at_offset(elements: int) -> Callable[[Any], Any]:
    """A contiguous layout, this number of elements after an aligned address."""
    return partial(_behind, elements=elements)


def odd_rows(x: Any) -> Any:
    """A stride that is no multiple of 16 bytes."""
    whole = torch.full((*x.shape[:-1], x.shape[-1] + 4), nan, dtype=x.dtype, device=x.device)
    whole[..., : x.shape[-1]] = x
    return whole[..., : x.shape[-1]]


def first_for_all(axes: tuple[int, ...]) -> Callable[[Any], Any]:
    """The first element of these dimensions for all of their elements, with strides of 0."""

    def change(x: Any) -> Any:
        for axis in axes:
            x = x.narrow(axis, 0, 1).expand(*[x.shape[i] if i == axis else -1 for i in range(x.ndim)])
        return x

    return change


@pytest.fixture(name="copies")
def copies_of_arguments(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the arguments that calls copy."""
    made: list[str] = []
    original = frameworks.TorchFramework.aligned_copy

    def counted(self: Any, array: Any, name: str, *more: Any) -> Any:
        if not name.endswith(("_indices", "_num_blocks")):  # lists of blocks
            made.append(name)
        return original(self, array, name, *more)

    monkeypatch.setattr(frameworks.TorchFramework, "aligned_copy", counted)
    yield made
