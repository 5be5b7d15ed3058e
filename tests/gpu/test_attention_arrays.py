"""Arrays of dense and flex attention, forward and backward: layouts, results given, sizes past 32 bits.

Prefix prefill has its own in test_prefix_edges.py.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest
from attention_calls import (
    Attention,
    at_offset,
    copies_of_arguments,  # noqa: F401
    each_attention,
    each_backward,
    each_forward,
    first_for_all,
    in_order,
    odd_rows,
    order_in_memory,
    part_of_a_projection,
)
from full_cases import full_unless
from gpu_support import torch

from operations.dense import assert_untouched_around

SMALL: dict[str, Any] = {"b": 3, "s_q": 150, "s_k": 200, "causal": True}


def assert_none_is_written_around(buffers: list[tuple[Any, Any]]) -> None:
    """Spoils the results that were given."""
    for buffer, given in buffers:
        assert_untouched_around(buffer, given)


# ---- layouts


@each_attention
@pytest.mark.parametrize(
    "change",
    (
        *[in_order(*order) for order in ((0, 2, 1, 3), (2, 1, 0, 3), (1, 2, 0, 3))],
        part_of_a_projection,
        at_offset(8),
    ),
    ids=("0 2 1 3", "2 1 0 3", "1 2 0 3", "projection", "offset of 16 bytes"),
)
def test_layouts_that_are_free(change: Any, attention: Attention, copies: list[str]) -> None:
    """Arrays are read where they lie. Fresh results have the dimensions in the order of the arrays."""
    call = attention.call(**SMALL)
    want = attention.run(call)
    attention.check(call, want)
    moved = attention.with_arrays(call, attention.arrays, change)
    got = attention.run(moved)
    attention.assert_same("laid out", got, want)
    assert copies == []
    sources = attention.inputs(moved)
    for one, name in zip(got, "qkv" if attention.is_backward else "q", strict=False):
        order = order_in_memory(getattr(sources, name))
        assert one.permute(order).is_contiguous(), name


@each_attention
@pytest.mark.parametrize(
    "change",
    (in_order(0, 1, 3, 2), at_offset(1), odd_rows),
    ids=("last dimension not contiguous", "address", "stride"),
)
def test_layouts_that_are_copied(change: Any, attention: Attention, copies: list[str]) -> None:
    """Each array by itself, and no other one."""
    call = attention.call(**SMALL)
    want = attention.run(call)
    attention.check(call, want)
    for name in attention.arrays:
        copies.clear()
        attention.assert_same(name, attention.run(attention.with_arrays(call, (name,), change)), want)
        assert copies == [attention.argument(name)]


@each_attention
@pytest.mark.parametrize("axes", ((0,), (1,), (2,), (0, 1, 2)), ids=str)
@pytest.mark.parametrize("names", (("k", "v"), ("q", "k", "v", "dout")), ids="".join)
def test_broadcast_arrays(
    names: tuple[str, ...], axes: tuple[int, ...], attention: Attention, copies: list[str]
) -> None:
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
    assert copies == []
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


@pytest.mark.parametrize("name", ("dq", "dk", "dv"))
def test_one_given_gradient(name: str) -> None:
    """The other ones are fresh."""
    attention = Attention(is_flex=False, is_backward=True)
    call = attention.call(**SMALL)
    want = attention.run(call)
    _, given = attention.buffers(call)
    got = attention.run(call, **{name: given[name]})
    assert [one is given[name] for one in got] == [name == other for other in ("dq", "dk", "dv")]
    attention.assert_same(f"{name} given", got, want)


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
