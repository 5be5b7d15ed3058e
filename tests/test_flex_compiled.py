"""Flex attention in programs of torch.compile, which runs the calls between its graphs."""

from __future__ import annotations

from typing import Any

import pytest
from calls.fakes import World, make_world
from emulator.device import HostTensors

import rawmla
from rawmla import jit
from rawmla.call import arrays
from rawmla.flex import create

torch: Any = pytest.importorskip("torch")

B, H, L, D = 1, 2, 128, 64


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """Tensors of the host pass for some of device 0, and results are zeros."""
    made, framework = make_world(monkeypatch), HostTensors(torch)
    framework._empty_strided = lambda shape, strides, dtype: torch.zeros(shape, dtype=dtype)
    monkeypatch.setitem(arrays.READERS, torch.Tensor, framework.read)
    monkeypatch.setattr(create, "framework_named", lambda name: framework)
    monkeypatch.setattr(jit, "current_device", lambda: 0)
    torch._dynamo.reset()
    return made


def queries() -> Any:
    return torch.ones(B, H, L, D, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "call",
    (
        lambda q: rawmla.flex_attention(q, q, q),
        lambda q: rawmla.flex_attention_backward(q, q, q, q, q, q),
        lambda q: rawmla.create_block_mask("q_idx >= kv_idx", None, None, L, L),
    ),
)
def test_calls_that_are_refused(world: World, call: Any) -> None:
    """A launch would not be in a graph, and there is no operator that fake tensors could go through."""
    from torch.fx.experimental.proxy_tensor import make_fx

    with pytest.raises(NotImplementedError, match="flex attention: make_fx and torch.export cannot record"):
        make_fx(lambda q: (call(q), q)[1])(queries())
    with torch._subclasses.FakeTensorMode():
        q = torch.empty(B, H, L, D, dtype=torch.bfloat16, device="cuda")
        with pytest.raises(
            NotImplementedError, match="^flex attention: cannot be called under FakeTensorMode"
        ):
            call(q)
    with pytest.raises(TypeError, match="^query: .*got .*FakeTensor; .*flex attention takes no fake tensors"):
        rawmla.flex_attention(q, q, q)


def test_calls(world: World) -> None:
    bias = torch.randn(H)

    def step(query: Any, slope: float) -> Any:
        mask = rawmla.create_block_mask(lambda b, h, q, k: q >= k, None, None, L, L)
        doubled = query * 2
        out, lse = rawmla.flex_attention(
            doubled, query, query, lambda s, b, h, q, k: s * slope + bias[h], mask, return_lse=True
        )
        return out + 1, lse

    query = queries()
    compiled = torch.compile(step, backend="eager")
    for slope in (2.0, 3.0):
        step(query, slope)
        out, lse = compiled(query, slope)
        assert out.shape == query.shape and bool((out == 1).all()) and lse.shape == (B, H, L)
        plain, traced = world.flex[-2:]
        assert (plain.call, plain.score_mod) == (traced.call, traced.score_mod)
        assert traced.addresses.k == query.data_ptr() and traced.addresses.q != query.data_ptr()
    assert len(world.flex) == 4 and len(world.enqueued) == 12


def test_one_break_for_a_call(world: World) -> None:
    step = lambda q: rawmla.flex_attention(q * 2, q, q, lambda s, b, h, q, k: s * 2) + 1  # noqa: E731
    found = torch._dynamo.explain(step)(queries())
    assert (found.graph_break_count, found.graph_count) == (1, 2)


def test_errors(world: World) -> None:
    def step(query: Any) -> Any:
        return rawmla.flex_attention(query * 2, query, query, kernel_options={"BACKEND": "FLASH"})

    with pytest.raises(ValueError, match="^kernel_options: expected BACKEND to be 'AUTO'"):
        torch.compile(step, backend="eager")(queries())
    assert not world.flex
