"""A q that is given as a pair of arrays, the second of which has the RoPE columns; arrays and launches are
stand-ins, but for those of the reference.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import rawmla
from calls.fakes import (
    NOPE_PTR,
    ROPE_PTR,
    Arguments,
    FakeArray,
    FakeFramework,
    World,
    contiguous,
    put,
    q_pair,
)
from calls.refusals import Refusal, check_all_refused
from calls.suite import HOST_OPERATIONS, all_arguments, known_kinds, make_call, run, stand_ins, tensors_of
from operations import Operation, core
from rawmla import reference

SPLIT = [one for one in HOST_OPERATIONS if one.name.startswith(("dense", "sparse", "prefill"))]
each_one = pytest.mark.parametrize("operation", SPLIT, ids=lambda operation: operation.name)
KINDS = [one for one in SPLIT if one.name in ("dense", "sparse_v32", "prefill_v32")]
each_kind = pytest.mark.parametrize("operation", KINDS, ids=lambda operation: operation.name)


def with_pair(operation: Operation, case: Any = None) -> Arguments:
    arguments = all_arguments(operation, case)
    return arguments | {"q": q_pair(arguments["q"].shape, arguments["q"].dtype)}


def launches(world: World) -> list[SimpleNamespace]:
    return world.decodes + world.sparse


def as_launched(strides: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of requests, tokens and heads; a request of prefill is one token."""
    return (strides[0], 0, strides[1]) if len(strides) == 3 else strides[:3]


@each_one
def test_addresses_and_strides(world: World, operation: Operation) -> None:
    for case in operation.cases:
        world.begin_again()
        arguments = with_pair(operation, case)
        nope, rope = arguments["q"]
        out, *_ = run(operation, arguments)
        (args,) = launches(world)
        *rows, columns = nope.shape
        assert (args.q, args.q_rope, args.d_qk) == (NOPE_PTR, ROPE_PTR, columns + 64)
        stepped = [axis for axis, extent in enumerate(as_launched(nope.shape)) if extent != 1]
        for array, strides in ((nope, args.q_strides), (rope, args.q_rope_strides)):
            assert all(strides[axis] == as_launched(array.strides)[axis] for axis in stepped)
        assert args.softmax_scale == arguments.get("sm_scale", (columns + 64) ** -0.5)
        assert not world.framework.copied and world.reads[:2] == ["q", "q_rope"]
        assert (out.shape, out.dtype) == ((*rows, 512), nope.dtype)


@each_kind
def test_dimensions_of_size_one_with_odd_strides(world: World, operation: Operation) -> None:
    """They are never stepped over: the strides that kernels get for them fit all the same."""
    arguments = all_arguments(operation)
    first, *others = arguments["q"].shape[:-1]
    for name in ("indices", "extra_indices_in_kvcache", "attn_sink"):
        if name in arguments:
            *_, last = arguments[name].shape
            arguments[name] = arguments[name].but(shape=(1,) if name == "attn_sink" else (first, 1, last))
    ones = [1] * len(others)
    arguments["q"] = tuple(
        FakeArray((first, *ones, columns), "bfloat16", (stride, *[3 * n for n in ones], 1), ptr=ptr)
        for columns, stride, ptr in ((512, 4096, NOPE_PTR), (64, 192, ROPE_PTR))
    )
    run(operation, arguments)
    (args,) = launches(world)
    assert args.q_strides == as_launched((4096, *[512] * len(ones), 1))
    assert args.q_rope_strides == as_launched((192, *[64] * len(ones), 1))


@each_kind
def test_pairs_are_not_mistaken(world: World, operation: Operation) -> None:
    """For one array, or for another pair of which RoPE alone lies otherwise."""
    whole = all_arguments(operation)["q"].but(strides=None)
    nope, rope = q_pair(whole.shape)
    packed = rope.but(strides=contiguous(rope.shape))
    kinds = known_kinds()
    for q in (whole, (nope, rope), (nope, packed), (nope, rope), whole):
        run(operation, all_arguments(operation) | {"q": q})
    expected = [as_launched(x) for x in (contiguous(whole.shape), rope.strides, packed.strides)]
    got = [args.q_rope_strides for args in launches(world)]
    assert got == [*expected, expected[1], expected[0]]
    assert known_kinds() - kinds == 3


@each_kind
def test_nothing_to_do(world: World, operation: Operation) -> None:
    """Without query tokens nothing is stepped over: any address and any strides will do."""
    for changes, _ in operation.empty.values():
        tensors = changes(tensors_of(operation).arguments)
        changed = {name: stand_ins(value) for name, value in tensors.items()}
        *rows, columns = changed["q"].shape
        changed["q"] = tuple(
            FakeArray((*rows, n), "bfloat16", (*[3] * len(rows), 1), ptr=ptr)
            for n, ptr in ((columns - 64, 0), (64, 0x102))
        )
        out, *_ = make_call(operation, **changed).run()
        assert out.shape == (*rows, 512) and not launches(world) and not world.plans


OTHER = FakeFramework("other", stream=0x99)


def bad_pairs(nope: FakeArray, rope: FakeArray) -> list[Refusal]:
    """What is refused in the place of a pair."""
    steps, rope_steps = nope.strides or (), rope.strides or ()
    tokens = nope.shape[:-1]
    return [
        ("q", ValueError, "pair (q_nope, q_rope) ... tuple of 0", ()),
        ("q_rope", TypeError, "got list", put("q", (nope, [1.0]))),
        ("q", TypeError, "got NoneType", (None, rope)),
        ("q_rope", TypeError, "got NoneType", put("q", (nope, None))),
        ("q_rope", ValueError, "CUDA memory ... numpy.ndarray", put("q", (nope, np.zeros(3)))),
        ("q", ValueError, "512 or 448 ... 64]", (rope, nope)),
        ("q", ValueError, "512 or 448 ... 576]", (nope.but(shape=(*tokens, 576)), rope)),
        *[
            ("q_rope", error, text, put("q", (nope, rope.but(**changes))))
            for error, text, changes in (
                (ValueError, "64] ... 128]", {"shape": (*tokens, 128)}),
                (ValueError, f"{tokens[-1]}, 64]", {"shape": (tokens[0] + 1, *rope.shape[1:])}),
                (ValueError, "expected shape", {"shape": rope.shape[1:]}),
                (TypeError, "bfloat16, the dtype of q ... got float32", {"dtype": "float32"}),
                (ValueError, "cuda:0, the device of q ... cuda:1", {"device": 1}),
                (ValueError, "fake array ... 0x51 ... other array ... 0x99", {"framework": OTHER}),
                (ValueError, "in a pair ... 0x1908", {"ptr": ROPE_PTR + 8}),
                (ValueError, "positive multiples of 8 ... [2308, ", {"strides": (2308, *rope_steps[1:])}),
                (ValueError, "positive multiples of 8 ... [0, ", {"strides": (0, *rope_steps[1:])}),
                (ValueError, "positive multiples of 8 ... [-3072, ", {"strides": (-3072, *rope_steps[1:])}),
                (ValueError, "contiguous last dimension ... 2]", {"strides": (*rope_steps[:-1], 2)}),
            )
        ],
        *[
            ("q", ValueError, text, (nope.but(**changes), rope))
            for text, changes in (
                ("in a pair ... 0x1102", {"ptr": NOPE_PTR + 2}),
                ("positive multiples of 8 ... [0, ", {"strides": (0, *steps[1:])}),
                ("contiguous last dimension ... 2]", {"strides": (*steps[:-1], 2)}),
            )
        ],
    ]


@each_kind
def test_refused(world: World, operation: Operation) -> None:
    function = getattr(rawmla, tensors_of(operation).function)
    refusals = bad_pairs(*with_pair(operation)["q"])
    check_all_refused(world, function, lambda: with_pair(operation), refusals)


@each_one
def test_reference(operation: Operation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "rawmla", reference)
    call = tensors_of(operation)
    nope, rope = call.arguments["q"][..., :-64], call.arguments["q"][..., -64:].contiguous()
    want = call.run()
    for name, got, wanted in zip(call.results, call.run(q=(nope, rope)), want, strict=True):
        core.assert_same_bits(name, got, wanted)
    rope[..., 0, -1] += 1
    assert bool((call.run(q=(nope, rope))[-1] != want[-1]).any())
