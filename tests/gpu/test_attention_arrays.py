"""Arrays of dense and flex attention, forward and backward: layouts, results given, sizes past 32 bits.

Prefix prefill has its own in test_prefix_edges.py. Arrays that a change can lay out otherwise are called q,
k, v, out and dout in all four functions. Backward calls are deterministic, so that equal calls give equal
bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf, nan
from typing import Any

import pytest
from full_cases import full_unless
from gpu_support import assert_same_bits, torch

from kit import flex_backward, mha_backward
from kit.flex import FlexCase, check_flex, make_flex_inputs
from kit.flex_backward import make_flex_backward_inputs
from kit.mha import MhaCase, check_mha, make_mha_inputs
from operations import dense as mha_calls
from operations import dense_backward as mha_backward_calls
from operations import flex as flex_calls
from operations import flex_backward as flex_backward_calls
from operations.dense import assert_untouched_around

SMALL: dict[str, Any] = {"b": 3, "s_q": 150, "s_k": 200, "causal": True}


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


def first_for_all(axes: tuple[int, ...]) -> Callable[[Any], Any]:
    """The first element of these dimensions for all of their elements, with strides of 0."""

    def change(x: Any) -> Any:
        for axis in axes:
            x = x.narrow(axis, 0, 1).expand(*[x.shape[i] if i == axis else -1 for i in range(x.ndim)])
        return x

    return change


def assert_none_is_written_around(buffers: list[tuple[Any, Any]]) -> None:
    """Raise unless nothing around the results that were given was written; it spoils these results."""
    for buffer, given in buffers:
        assert_untouched_around(buffer, given)


@each_attention
@pytest.mark.parametrize("axes", ((0,), (1,), (2,), (0, 1, 2)), ids=str)
@pytest.mark.parametrize("names", (("k", "v"), ("q", "k", "v", "dout")), ids="".join)
def test_broadcast_arrays(names: tuple[str, ...], axes: tuple[int, ...], attention: Attention) -> None:
    """A stride of 0 is read as it is. Gradients have all elements of the shape."""
    change, dense = first_for_all(axes), torch.Tensor.contiguous
    inputs = attention.inputs(attention.call(**SMALL, gap=0.0))
    forward = Attention(attention.is_flex, is_backward=False)
    call = forward.with_arrays(inputs, tuple(name for name in names if name in "qkv"), change)
    if attention.is_backward:
        call = attention.after_forward(call)
        if "dout" in names:
            call = attention.with_arrays(call, ("dout",), change)
    got = attention.run(call)
    checked = got
    if attention.is_backward and "k" in names and attention.tokens in axes:
        # With one key for all tokens a row of dq is this key times a sum that cancels, and no digit is left;
        # the error of a row of dk is not spread over its columns either.
        checked = (*attention.exact(call)[:2], *got[2:])
    attention.check(call, checked)
    copied = attention.with_arrays(call, attention.arrays, dense)
    attention.assert_same("broadcast", attention.run(copied), got)


@each_forward
@pytest.mark.parametrize("order", ((0, 1, 2, 3), (0, 2, 1, 3), (2, 1, 0, 3), (1, 0, 2, 3)), ids=str)
def test_out_in_another_order(order: tuple[int, ...], attention: Attention) -> None:
    call = attention.call(**SMALL)
    want = attention.run(call)
    given = in_order(*order)(torch.full_like(want[0], nan))
    got = attention.run(call, out=given)
    assert got[0] is given
    attention.assert_same("out given", got, want)


def transposed(x: Any) -> Any:
    return x.permute(2, 0, 1).contiguous().permute(1, 2, 0)


def every_other(x: Any) -> Any:
    whole = torch.full((*x.shape[:-1], 2 * x.shape[-1] + 1), nan, device=x.device)
    whole[..., 1::2] = x
    return whole[..., 1::2]


@each_backward
@pytest.mark.parametrize("change", (transposed, every_other))
def test_layouts_of_lse_and_its_gradient(change: Any, attention: Attention) -> None:
    """lse and dlse are read with any strides."""
    call = attention.call(**SMALL)
    want = attention.run(call)
    attention.check(call, want)
    lse, dlse = call.results[1], call.gradients.dlse
    for moved in (
        replace(call, results=(call.results[0], change(lse))),
        replace(call, gradients=replace(call.gradients, dlse=change(dlse))),
    ):
        attention.assert_same("lse or its gradient", attention.run(moved), want)


@each_attention
@pytest.mark.parametrize(
    "dims",
    full_unless(lambda dims: dims in ((17, 33), (127, 3)), ((1, 1), (17, 33), (127, 3), (3, 255), (200, 72))),
    ids=str,
)
@pytest.mark.parametrize("layout", ("plain", "slice"))
def test_odd_head_dimensions(dims: tuple[int, int], layout: str, attention: Attention) -> None:
    """Rows of no multiple of 16 bytes are copied unless they are apart; rows of a fresh out are apart. The
    memory between the rows of given results is not written.
    """
    call = attention.call(**SMALL, d_qk=dims[0], d_v=dims[1], layout=layout, dtype="float16")
    want = attention.run(call)
    attention.check(call, want)
    assert all(x.stride(-2) % 8 == 0 and x.stride(-1) == 1 for x in want[: len(attention.arrays) // 2])
    buffers, given = attention.buffers(call)
    attention.assert_same("given", attention.run(call, **given), want)
    assert_none_is_written_around(buffers)


# ---- sizes


@each_attention
@pytest.mark.parametrize(
    "sizes", ((0, 5, 7), (2, 0, 7), (2, 5, 0), (0, 0, 0), (2, 0, 0), (2, 300, 0)), ids=str
)
def test_empty_calls(sizes: tuple[int, int, int], attention: Attention) -> None:
    """Results are 0 and lse -inf, with a causal mask and without one."""
    for causal in (False, True):
        b, s_q, s_k = sizes
        call = attention.call(b=b, s_q=s_q, s_k=s_k, causal=causal)
        for buffers, given in (([], {}), attention.buffers(call)):
            got = attention.run(call, **given)
            attention.check(call, got)
            assert not any(bool(x.any()) for x in got[: len(attention.arrays) // 2])
            assert attention.is_backward or bool((got[1] == -inf).all())
            assert_none_is_written_around(buffers)


@each_attention
@pytest.mark.parametrize("axis", (0, 1, 2))
def test_strides_past_2_31_elements(axis: int, attention: Attention) -> None:
    """Two requests, heads or tokens are 2**31 elements apart, in results that are given too."""
    tokens = 2 if axis == attention.tokens else 100
    call = attention.call(b=2 if axis == 0 else 1, h_kv=2, h_q=2, s_q=tokens, s_k=tokens, d_qk=128, d_v=128)
    inputs = attention.inputs(call)
    room = 1 << 20
    memory = torch.full((2**31 + 10 * room,), nan, dtype=torch.bfloat16, device="cuda")
    strides = list(inputs.q.contiguous().stride())
    strides[axis] = 2**31
    places = iter(memory.as_strided(inputs.q.shape, strides, number * room) for number in range(10))
    moved = attention.with_arrays(call, attention.arrays, lambda x: next(places).copy_(x))
    _, given = attention.buffers(call)
    attention.check(call, attention.run(moved, **{name: next(places) for name in given}))


@each_attention
def test_more_than_65535_heads_of_requests(attention: Attention) -> None:
    """b * h is 68,160; then heads alone are 70,000."""
    for sizes in (
        {"b": 22720, "h_q": 3, "h_kv": 3, "s_q": 3, "s_k": 5, "causal": True},
        {"b": 1, "h_q": 70_000, "h_kv": 35_000, "s_q": 2, "s_k": 70},
    ):
        call = attention.call(**sizes)
        attention.check(call, attention.run(call))


@each_attention
@pytest.mark.parametrize("d", full_unless(lambda d: d != 192, (64, 128, 192, 256)))
def test_lengths_at_borders_of_tiles(d: int, attention: Attention) -> None:
    """Tiles have 64 to 192 query tokens and 64 to 128 keys."""
    for s_q in (63, 64, 65, 127, 128, 129, 192, 257):
        for s_k in (1, 31, 33, 63, 64, 65, 127, 128, 129, 257):
            call = attention.call(
                b=1, h_q=2, h_kv=2, s_q=s_q, s_k=s_k, d_qk=d, d_v=d, causal=s_k >= s_q, layout="slice"
            )
            attention.check(call, attention.run(call))
