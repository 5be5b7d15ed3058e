"""Backward calls of dense attention: what they refuse, allocate, copy and launch beside the forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import rawmla
from calls import test_dense as forward
from calls.fakes import Arguments, FakeArray, World, both, change, contiguous, put
from calls.refusals import Refusal, check_refused, each, shapes
from calls.test_dense import D_QK, D_V, H_KV, H_Q, OUT, TOTAL_Q, K, Q, V
from rawmla.kernels.mha_backward import BackwardAddresses, BackwardCall
from rawmla.kernels.mha_backward_variants import Needs

RESULTS = ("dq", "dk", "dv")
SHAPES = {"dq": Q, "dk": K, "dv": V}
LSE_STRIDES = (1, TOTAL_Q)  # heads first in memory


def plain() -> Arguments:
    """A varlen call that is accepted."""
    return forward.plain() | {
        "dout": FakeArray(OUT, "bfloat16", ptr=0x7000),
        "out": FakeArray(OUT, "bfloat16", ptr=0x7800),
        "lse": FakeArray((TOTAL_Q, H_Q), "float32", strides=LSE_STRIDES, ptr=0x8004),
    }


def optional() -> Arguments:
    """The same with all arrays that are optional."""
    places = zip(RESULTS, (0x9000, 0x9800, 0xA000), strict=True)
    given = {name: FakeArray(SHAPES[name], "bfloat16", ptr=ptr) for name, ptr in places}
    dlse = FakeArray((TOTAL_Q, H_Q), "float32", ptr=0x8804)
    return forward.optional() | plain() | given | {"dlse": dlse}


def call(arguments: Arguments, **more: Any) -> tuple[Any, ...]:
    return rawmla.flash_attn_varlen_backward(**{**arguments, **more})


REFUSALS: list[Refusal] = [
    *forward.OF_OPTIONS,
    ("q", TypeError, "float32 is not supported yet", change("q", dtype="float32")),
    ("q", ValueError, "1 to 256 ... 257", shapes(q=(*Q[:2], 257), k=(*K[:2], 257))),
    ("v", ValueError, "1 to 256 ... 257", shapes(v=(*V[:2], 257))),
]


@each(REFUSALS)
def test_refused(world: World, refusal: Refusal) -> None:
    check_refused(world, rawmla.flash_attn_varlen_backward, optional, refusal)


# ---- launches

of_forward = {name: x for name, x in forward.EXPECTED._asdict().items() if name in BackwardCall._fields}
EXPECTED = BackwardCall(
    **of_forward | {"lse_strides": (0, *LSE_STRIDES)},
    dout_strides=(0, H_Q * D_V, D_V),
    dlse_strides=(0, 0, 0),
    dq_strides=(0, H_Q * D_QK, D_QK),
    dk_strides=(0, H_KV * D_QK, D_QK),
    dv_strides=(0, H_KV * D_V, D_V),
    deterministic=False,
    needs=Needs(True, True, True, False),
)


def test_plain(world: World) -> None:
    """Fresh gradients, then scratch; twice the same."""
    for _ in range(2):
        got = call(plain())
        dq, dk, dv, scratch = world.framework.allocated[-4:]
        assert got == (dq, dk, dv)
        assert [x.shape for x in got] == [Q, K, V] and {x.dtype for x in got} == {"bfloat16"}
        assert [x.strides for x in got] == [contiguous(shape) for shape in (Q, K, V)]
        assert scratch.dtype == "uint8" and scratch.shape == (48,)
        launch = world.mha_backward[-1]
        assert launch.call == EXPECTED
        given = {name: x.ptr for name, x in plain().items() if isinstance(x, FakeArray)}
        places = BackwardAddresses(**given, dlse=0, dq=dq.ptr, dk=dk.ptr, dv=dv.ptr)
        assert launch.addresses == places
        assert (launch.stream, launch.scratch) == (0x51, scratch.ptr)
    assert world.framework.copied == [] and world.framework.filled == []
    assert forward.prepared(world.mha_backward) == [0, 0]


def test_dsink_has_the_dtype_of_the_sink(world: World) -> None:
    for dtype in ("float32", "bfloat16", "float16", "float64"):
        got = call(plain(), attn_sink=FakeArray((H_Q,), dtype, ptr=0x6000))
        assert got[3].dtype == dtype and got[3].shape == (H_Q,)
        assert world.mha_backward[-1].call.sink_dtype == dtype


def test_gradients_follow_the_order_of_strides(world: World) -> None:
    """With heads outermost in q they are so in dq; the gradient of a broadcast k is dense."""
    arguments = plain()
    change("q", strides=(D_QK, TOTAL_Q * D_QK, 1))(arguments)
    change("k", strides=(0, 0, 1))(arguments)
    dq, dk, _ = call(arguments)
    assert dq.strides == (D_QK, TOTAL_Q * D_QK, 1) and dk.strides == contiguous(K)
    launched = world.mha_backward[-1].call
    assert launched.dq_strides == (0, D_QK, TOTAL_Q * D_QK) == launched.q_strides
    assert launched.k_strides == (0, 0, 0) and launched.dk_strides == (0, H_KV * D_QK, D_QK)
    assert world.framework.copied == []


NOTHING: dict[str, Callable[[Arguments], Any]] = {
    "no keys": both(shapes(k=(0, *K[1:]), v=(0, *V[1:])), put("dk", None), put("dv", None)),
    "max_seqlen_k 0": put("max_seqlen_k", 0),
    "max_seqlen_q 0": put("max_seqlen_q", 0),
}


@pytest.mark.parametrize("given", (False, True))
@pytest.mark.parametrize("how", NOTHING)
def test_nothing_to_attend(world: World, given: bool, how: str) -> None:
    """Gradients are set to 0, and no kernel is launched."""
    arguments = optional()
    if not given:
        arguments |= dict.fromkeys(RESULTS)
    NOTHING[how](arguments)
    fresh = [name for name in RESULTS if arguments[name] is None]
    got = call(arguments)
    assert got[0].shape == Q and len(got) == 4
    assert world.framework.filled == [(one, 0.0) for one in got]
    assert world.mha_backward == [] and len(world.framework.allocated) == len(fresh) + 1
