"""A q that is given as a pair of arrays, the second of which has the RoPE columns; arrays and launches are
stand-ins, but for those of the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import rawmla
from calls.fakes import (
    H_KV,
    H_Q,
    NOPE_PTR,
    NUM_BLOCKS,
    PAGE,
    ROPE_PTR,
    TOPK,
    Arguments,
    B,
    FakeArray,
    FakeFramework,
    World,
    change,
    contiguous,
    dense_arguments,
    prefill_arguments,
    put,
    q_pair,
    sparse_arguments,
)
from calls.refusals import Refusal, check_all_refused
from kit import DenseCase, SparseCase, make_dense_inputs, make_sparse_inputs
from rawmla import reference
from rawmla.mla import dense_decode, sparse_decode, sparse_prefill


@dataclass(frozen=True)
class Kind:
    """A kind of call that takes a q."""

    name: str
    function: str
    arguments: Callable[[], Arguments]
    module: Any

    def run(self, arguments: Arguments) -> tuple[Any, ...]:
        return getattr(rawmla, self.function)(**arguments)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of a whole q."""
        return self.arguments()["q"].shape

    @property
    def dtype(self) -> str:
        return self.arguments()["q"].dtype

    def with_pair(self) -> Arguments:
        return self.arguments() | {"q": q_pair(self.shape, self.dtype)}


def dense_of(d_qk: int, dtype: str) -> Callable[[], Arguments]:
    def make() -> Arguments:
        arguments = dense_arguments()
        change("q", shape=(*arguments["q"].shape[:-1], d_qk), dtype=dtype)(arguments)
        change("k_cache", shape=(NUM_BLOCKS, PAGE, H_KV, d_qk), dtype=dtype)(arguments)
        return arguments

    return make


def layout_of(make: Callable[..., Arguments], layout: str) -> Callable[[], Arguments]:
    return lambda: make(layout)


LAYOUTS = ("v32", "model1", "bf16 576", "bf16 512")
DECODE, PREFILL = "flash_mla_with_kvcache", "flash_mla_sparse_fwd"
KINDS = [
    *[
        Kind(f"dense {d_qk} {dtype}", DECODE, dense_of(d_qk, dtype), dense_decode)
        for d_qk in (576, 512)
        for dtype in ("bfloat16", "float16")
    ],
    *[Kind(f"sparse {one}", DECODE, layout_of(sparse_arguments, one), sparse_decode) for one in LAYOUTS],
    *[Kind(f"prefill {one}", PREFILL, layout_of(prefill_arguments, one), sparse_prefill) for one in LAYOUTS],
]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
one_of_each = pytest.mark.parametrize("kind", (KINDS[0], KINDS[4], KINDS[8]), ids=lambda kind: kind.name)


def launches(world: World) -> list[SimpleNamespace]:
    return world.decodes + world.sparse


def as_launched(kind: Kind, strides: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of requests, tokens and heads; a request of prefill is one token."""
    return (strides[0], 0, strides[1]) if kind.module is sparse_prefill else strides[:3]


class TestLaunch:
    @each_kind
    def test_addresses_and_strides(self, world: World, kind: Kind) -> None:
        arguments = kind.with_pair()
        nope, rope = arguments["q"]
        results = kind.run(arguments)
        (args,) = launches(world)
        assert (args.q, args.q_rope, args.d_qk) == (NOPE_PTR, ROPE_PTR, kind.shape[-1])
        assert args.q_strides == as_launched(kind, nope.strides)
        assert args.q_rope_strides == as_launched(kind, rope.strides) != args.q_strides
        assert args.softmax_scale == (0.25 if kind.module is sparse_prefill else kind.shape[-1] ** -0.5)
        assert not world.framework.copied
        out = results[0]
        assert (out.shape, out.dtype) == ((*kind.shape[:-1], 512), kind.dtype)
        assert world.reads[:2] == ["q", "q_rope"]

    @one_of_each
    def test_dimensions_of_size_one_with_odd_strides(self, world: World, kind: Kind) -> None:
        """They are never stepped over: the strides that kernels get for them fit all the same."""
        arguments = kind.arguments()
        if kind.module is dense_decode:
            change("k_cache", shape=(NUM_BLOCKS, PAGE, 1, 576))(arguments)
        if kind.module is sparse_decode:
            change("indices", shape=(B, 1, TOPK))(arguments)
        ones = [1] * (len(kind.shape) - 2)  # heads, and in decoding query tokens
        arguments["q"] = tuple(
            FakeArray(
                (kind.shape[0], *ones, columns), kind.dtype, (stride, *[3 * n for n in ones], 1), ptr=ptr
            )
            for columns, stride, ptr in ((512, 4096, NOPE_PTR), (64, 192, ROPE_PTR))
        )
        kind.run(arguments)
        (args,) = launches(world)
        assert args.q_strides == as_launched(kind, (4096, 512, 512))
        assert args.q_rope_strides == as_launched(kind, (192, 64, 64))


class TestKnownCalls:
    @one_of_each
    def test_pairs_are_not_mistaken(self, world: World, kind: Kind) -> None:
        """For one array, or for another pair of which RoPE alone lies otherwise."""
        nope, rope = q_pair(kind.shape)
        packed = rope.but(strides=contiguous(rope.shape))
        for q in (kind.arguments()["q"], (nope, rope), (nope, packed), (nope, rope), kind.arguments()["q"]):
            kind.run(kind.arguments() | {"q": q})
        whole = contiguous(kind.shape)
        expected = [as_launched(kind, x) for x in (whole, rope.strides, packed.strides)]
        got = [args.q_rope_strides for args in launches(world)]
        assert got == [*expected, expected[1], expected[0]]
        assert len(kind.module._calls) == 3


class TestNothingToDo:
    @pytest.mark.parametrize("axis", (0, 1))
    @one_of_each
    def test_empty(self, world: World, kind: Kind, axis: int) -> None:
        """Without query tokens nothing is stepped over: any address and any strides will do."""
        arguments = kind.arguments()
        axis = 0 if kind.module is sparse_prefill else axis
        for name, value in arguments.items():
            if name in ("q", "indices") or name in ("block_table", "cache_seqlens") and axis == 0 and value:
                change(name, shape=(*value.shape[:axis], 0, *value.shape[axis + 1 :]))(arguments)
        shape = arguments["q"].shape
        strides = (*[3] * (len(shape) - 1), 1)
        arguments["q"] = tuple(
            FakeArray((*shape[:-1], columns), kind.dtype, strides, ptr=ptr)
            for columns, ptr in ((512, 0), (64, 0x102))
        )
        out = kind.run(arguments)[0]
        assert out.shape == (*shape[:-1], 512) and not launches(world) and not world.plans


OTHER = FakeFramework("other", stream=0x99)


def bad_pairs(nope: FakeArray, rope: FakeArray) -> list[Refusal]:
    """What is refused in the place of a pair."""
    steps, rope_steps = nope.strides or (), rope.strides or ()
    tokens = nope.shape[:-1]
    return [
        ("q", ValueError, "pair (q_nope, q_rope) ... tuple of 0", ()),
        ("q", TypeError, "got list", [nope, rope]),
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
                (ValueError, f"{H_Q}, 64]", {"shape": (tokens[0] + 1, *rope.shape[1:])}),
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


@one_of_each
def test_refused(world: World, kind: Kind) -> None:
    check_all_refused(world, getattr(rawmla, kind.function), kind.with_pair, bad_pairs(*q_pair(kind.shape)))


# ---- the reference


def dense_reference(d_qk: int) -> tuple[Callable[[Any], Any], Any]:
    inputs = make_dense_inputs(DenseCase(b=2, s_q=2, h_q=4, s_k=40, d_qk=d_qk, varlen=True), "numpy")
    arrays = (inputs.k_cache, inputs.block_table, inputs.cache_seqlens)
    return lambda q: reference.flash_mla_with_kvcache(q, *arrays), inputs.q


def sparse_reference(layout: str, d_qk: int) -> tuple[Callable[[Any], Any], Any]:
    case = SparseCase(b=2, s_q=2, h_q=4, s_k=60, topk=20, layout=layout, d_qk=d_qk)
    inputs = make_sparse_inputs(case, "numpy")
    given = {"is_fp8_kvcache": layout != "bf16", "indices": inputs.indices}
    return (
        lambda q: reference.flash_mla_with_kvcache(q, inputs.k_cache, None, None, **given),
        inputs.q,
    )


def prefill_reference(d_qk: int) -> tuple[Callable[[Any], Any], Any]:
    case = SparseCase(b=5, h_q=4, s_k=60, topk=20, page_block_size=1, layout="bf16", d_qk=d_qk, shared=True)
    inputs = make_sparse_inputs(case, "numpy")
    rows, indices = inputs.k_cache[:, 0], inputs.indices
    return lambda q: reference.flash_mla_sparse_fwd(q, rows, indices, 0.1), inputs.q[:, 0]


REFERENCES = {
    "dense 576": lambda: dense_reference(576),
    "dense 512": lambda: dense_reference(512),
    "sparse v32": lambda: sparse_reference("v32", 576),
    "sparse model1": lambda: sparse_reference("model1", 512),
    "sparse bf16": lambda: sparse_reference("bf16", 576),
    "prefill 576": lambda: prefill_reference(576),
    "prefill 512": lambda: prefill_reference(512),
}


@pytest.mark.parametrize("make", REFERENCES.values(), ids=REFERENCES)
class TestReference:
    def test_pair(self, make: Callable[[], tuple[Callable[[Any], Any], Any]]) -> None:
        run, q = make()
        nope, rope = q[..., :-64], np.ascontiguousarray(q[..., -64:])
        for got, want in zip(run((nope, rope)), run(q), strict=True):
            np.testing.assert_array_equal(got, want)
        changed = rope.copy()
        changed[..., 0, -1] += 1
        assert (run((nope, changed))[-1] != run(q)[-1]).any()
