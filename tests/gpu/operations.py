"""The table of operations that the shared suites run over: how each public function is called, and what is
special about it.

A new operation is one entry of `OPERATIONS`; test_contracts.py, test_refusals.py, test_bits.py,
test_graphs.py, test_plans.py, test_frameworks.py and test_poison.py then hold for it too. What one operation
alone does has its own file.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle, permutations
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from caches import (
    COLUMNS,
    KINDS,
    LAYOUTS,
    PaddedCache,
    filled,
    host_cache,
    same_values,
    to_gpu,
    to_host,
    values,
)
from gpu_support import (
    assert_same_bits,
    bits,
    check,
    in_batch,
    plan_arguments,
    prefill_check,
    prefill_kv,
    sparse_check,
    sparse_in_batch,
    sparse_plan_arguments,
    torch,
)

import rawmla
from kit import (
    DenseCase,
    DenseInputs,
    SparseCase,
    SparseInputs,
    make_dense_inputs,
    make_sparse_inputs,
    torch_reference,
)
from kit.generators import GARBAGE_PAGE
from kit.sparse import INT_MAX, block_fields
from rawmla import reference

Arguments = dict[str, Any]
Pads = tuple[tuple[int, int], ...]

CANARY = -7
PLAN_NAMES = (
    "cache_seqlens",
    "num_q_tokens_per_head_k",
    "num_heads_k",
    "num_heads_q",
    "is_fp8_kvcache",
    "topk",
)
Bad = tuple[type[Exception], str, Callable[[Arguments], Arguments]]
Empty = tuple[Callable[[Arguments], Arguments], dict[str, int]]


@dataclass
class Call:
    """A call of a public function: its arguments by name, in arrays of one framework.

    Attributes:
        function: name in `rawmla`.
        arguments: without the plan and without `written`.
        results: names of what the call gives.
        check: raises unless the results are right for what the arguments hold now.
        inputs: what `arguments` were made of.
        plan: arguments of `get_mla_metadata` for a plan of tensors; None if the function takes no plan.
        written: the argument that a call always writes, if there is one, and its only result.
        fresh: makes a `written` to start from.
    """

    function: str
    arguments: Arguments
    results: tuple[str, ...]
    check: Callable[[tuple[Any, ...]], None]
    inputs: Any = None
    plan: Arguments | None = None
    written: str | None = None
    fresh: Callable[[], Any] | None = None

    def run(self, form: str = "object", /, *, invariant: bool = False, **changes: Any) -> tuple[Any, ...]:
        """The results of one call; `form` is that of the plan, "object" or "tensors"."""
        arguments = {**self.arguments, **changes}
        if self.plan is not None and "tile_scheduler_metadata" not in arguments:
            metadata, num_splits = self.make_plan(form, invariant=invariant)
            arguments |= {"tile_scheduler_metadata": metadata, "num_splits": num_splits}
        if self.plan is not None and invariant:
            arguments["enable_batch_invariant"] = True
        if self.written not in arguments:
            arguments |= self.target()
        got = getattr(rawmla, self.function)(**arguments)
        if self.written is not None:
            assert got is None
            return (arguments[self.written],)
        return got if isinstance(got, tuple) else (got,)

    def target(self) -> Arguments:
        """What `run` would make for the call to write, to be made now; nothing for most calls."""
        return {} if self.written is None or self.fresh is None else {self.written: self.fresh()}

    def make_plan(self, form: str = "object", *, invariant: bool = False, **keywords: Any) -> tuple[Any, Any]:
        """A plan for the call."""
        assert self.plan is not None
        given = self.plan if form == "tensors" else {}
        return rawmla.get_mla_metadata(**given, enable_batch_invariant=invariant, **keywords)

    def replan(
        self, metadata: Any, num_splits: Any, b: int | None = None, *, invariant: bool = False
    ) -> None:
        """Recompute a plan in place, for all requests or the first ones."""
        assert self.plan is not None
        plan = {**self.plan, "cache_seqlens": self.plan["cache_seqlens"][:b]}
        out = metadata if num_splits is None else (metadata, num_splits)
        rawmla.get_mla_metadata(**plan, enable_batch_invariant=invariant, out=out)

    def arrays(self) -> Arguments:
        """The arguments that are arrays, or lists of them."""
        return {
            name: value
            for name, value in self.arguments.items()
            if hasattr(value, "__dlpack__") or isinstance(value, list)
        }

    def mapped(self, change: Callable[[Any], Any]) -> Call:
        """The call with every array changed, those of the plan and a written one too."""
        fresh = self.fresh
        return replace(
            self,
            arguments=map_arrays(self.arguments, change),
            plan=None if self.plan is None else map_arrays(self.plan, change),
            fresh=None if fresh is None else lambda: change(fresh()),
        )


def map_arrays(arguments: Arguments, change: Callable[[Any], Any]) -> Arguments:
    """The arguments with every array changed, also those in lists."""

    def apply(value: Any) -> Any:
        if isinstance(value, list):
            return [change(x) for x in value]
        return change(value) if hasattr(value, "__dlpack__") else value

    return {name: apply(value) for name, value in arguments.items()}


def assert_results(text: str, call: Call, got: tuple[Any, ...], want: tuple[Any, ...]) -> None:
    """Raise unless all results have the same bits."""
    for name, one, wanted in zip(call.results, got, want, strict=True):
        assert_same_bits(f"{name}, {text}", one, wanted)


@dataclass(frozen=True)
class Operation:
    """What the shared suites know of an operation.

    Attributes:
        name: for people and for pytest.
        make: the call of a case, on torch tensors. A case is anything that has an `id`.
        cases: a few calls, for contracts and frameworks; the first one has every array.
        arrays: the names of its arguments that are arrays, or lists of them.
        floats: the names of those that are of floating point in a case, and can require grad.
        rerun_cases, graph_cases, invariant_cases: for bits, graphs and batch invariance.
        strides: for each argument with free strides, the kinds of `strided` it takes.
        odd_last: arguments whose last dimension need not be contiguous.
        out: padding of each dimension of the buffer that an `out` may be a slice of; None: there is no `out`.
        empty: changes of the arguments that leave nothing to compute, and for each result that is empty then
            the dimension of size 0.
        bad: wrong arguments of the first case besides those that every operation has: name -> (error, the
            argument that its text starts with, changes).
        changes: changes a graph case's arguments in place, again and again.
        part: the call with these requests of a batch only.
        plan_serves_all_lengths: a plan of tensors made once serves whatever `changes` does.
        clusters: calls are forced to the kernel for clusters; tests/test_gpu_cases.py sees that all go there.
    """

    name: str
    make: Callable[[Any], Call]
    cases: tuple[Any, ...]
    arrays: tuple[str, ...]
    floats: Callable[[Any], tuple[str, ...]]
    rerun_cases: tuple[Any, ...] = ()
    graph_cases: tuple[Any, ...] = ()
    invariant_cases: tuple[Any, ...] = ()
    strides: dict[str, tuple[str, ...]] = field(default_factory=dict)
    odd_last: tuple[str, ...] = ()
    out: Callable[[Any], Pads] | None = None
    empty: dict[str, Empty] = field(default_factory=dict)
    bad: dict[str, Bad] = field(default_factory=dict)
    changes: Callable[[Call], Iterator[None]] | None = None
    part: Callable[[Call, list[int]], Call] | None = None
    plan_serves_all_lengths: bool = False
    clusters: bool = False


def for_each(cases: str, *, only: Callable[[Operation], Any] = lambda operation: True) -> Any:
    """Parametrise a test by every operation (`only` those) and each of its `cases` ("rerun_cases", ...)."""
    pairs = [
        (operation, case)
        for operation in OPERATIONS
        if only(operation)
        for case in (getattr(operation, cases) or operation.cases)
    ]
    ids = [f"{operation.name}-{case.id}" for operation, case in pairs]
    return pytest.mark.parametrize(("operation", "case"), pairs, ids=ids)


def for_first(*, only: Callable[[Operation], Any] = lambda operation: True) -> Any:
    """Parametrise a test by every operation (`only` those) and the first of its cases."""
    pairs = [(operation, operation.cases[0]) for operation in OPERATIONS if only(operation)]
    return pytest.mark.parametrize(("operation", "case"), pairs, ids=[one.name for one, _ in pairs])


def is_planned(operation: Operation) -> bool:
    """Whether the calls take a plan."""
    return operation.part is not None


# ---- strides


def strided(x: Any, kind: str) -> list[Any]:
    """The values of a torch tensor behind other strides of a kind:

    wide: slices of larger dimensions before the last; columns: of a larger last one; permuted: every order of
    the dimensions before the last in memory; unaligned: an odd address; odd: an odd stride of rows;
    transposed: every order of all dimensions.
    """

    def room(*pads: tuple[int, int]) -> Any:
        buffer = garbage([n + before + behind for n, (before, behind) in zip(x.shape, pads, strict=True)], x)
        for axis, (before, _) in enumerate(pads):
            buffer = buffer.narrow(axis, before, x.shape[axis])
        return buffer

    none = ((0, 0),) * x.ndim
    if kind == "wide":
        targets = [
            room(*none[:axis], (4, 4) if axis == x.ndim - 2 else (1, 2), *none[axis + 1 :])
            for axis in range(x.ndim - 1)
        ]
    elif kind == "columns":
        targets = [room(*none[:-1], (32, 32))]
    elif kind == "odd":
        targets = [room(*none[:-1], (0, 1))]
    elif kind == "unaligned":
        targets = [garbage([x.numel() + 1], x)[1:].view(x.shape)]
    else:
        kept = 0 if kind == "transposed" else 1
        targets = []
        for leading in list(permutations(range(x.ndim - kept)))[1:]:
            order = leading if kind == "transposed" else (*leading, x.ndim - 1)
            buffer = garbage([x.shape[axis] for axis in order], x)
            targets.append(buffer.permute([order.index(axis) for axis in range(x.ndim)]))
    for target in targets:
        target.copy_(x)
        assert torch.equal(bits(target), bits(x))
    return targets


def garbage(shape: list[int], like: Any) -> Any:
    """A tensor of what nobody may read: NaN, or a number too large for an index."""
    value = float("nan") if like.is_floating_point() else 0xFF if like.element_size() == 1 else INT_MAX
    return torch.full(shape, value, dtype=like.dtype, device=like.device)


def between_canaries(result: Any, pads: Pads) -> tuple[Any, Any]:
    """A buffer of canaries, and the slice of it that has the result's shape."""
    shape = [n + before + behind for n, (before, behind) in zip(result.shape, pads, strict=True)]
    buffer = torch.empty(shape, dtype=result.dtype, device=result.device)
    fill_with_canaries(buffer)
    target = buffer
    for axis, (before, _) in enumerate(pads):
        target = target.narrow(axis, before, result.shape[axis])
    return buffer, target


def fill_with_canaries(x: Any) -> None:
    """What a call must not write over, in any dtype."""
    x.fill_(-CANARY if x.dtype == torch.uint8 else CANARY)


def all_canaries(x: Any) -> bool:
    """Whether nothing was written there."""
    return bool((x == (-CANARY if x.dtype == torch.uint8 else CANARY)).all())


# ---- plain arrays


@dataclass(frozen=True)
class Sizes:
    """Numbers with a name: the case of an operation that needs no more."""

    id: str
    kind: str = ""
    n: int = 0


# ---- dense decoding

DENSE_CASES = (
    DenseCase(b=5, s_q=2, h_q=16, s_k=700, varlen=True, causal=True, zero_lengths=True, seed=3),
    DenseCase(b=2, h_q=128, s_k=2000, dtype="float16", sharp=True, page_block_size=16),
    DenseCase(b=3, h_q=12, h_kv=2, d_qk=512, s_k=300, varlen=True),
    DenseCase(b=4, s_q=3, h_q=128, s_k=500, varlen=True, causal=True),
)
DENSE_RERUN_CASES = (
    DenseCase(b=1, h_q=128, s_k=20000, sharp=True),
    DenseCase(b=7, s_q=2, h_q=16, s_k=3000, varlen=True, causal=True),
    DenseCase(b=64, s_q=2, h_q=128, s_k=2000, varlen=True, zero_lengths=True, causal=True, sharp=True),
    DenseCase(b=5, s_q=4, h_q=126, h_kv=2, s_k=1500, varlen=True, dtype="float16", page_block_size=16),
    DenseCase(b=33, h_q=64, d_qk=512, s_k=1500, varlen=True, page_block_size=256),
)
DENSE_GRAPH_CASES = (
    DenseCase(b=1, h_q=128, s_k=9000),
    DenseCase(b=6, s_q=2, h_q=16, s_k=2500, causal=True),
    DenseCase(b=12, s_q=2, h_q=128, s_k=2500, causal=True, sharp=True, page_block_size=16, dtype="float16"),
    DenseCase(b=70, h_q=64, s_k=1000, page_block_size=256),
)
DENSE_INVARIANT_CASES = (
    DenseCase(b=256, h_q=16, s_k=1500, varlen=True, zero_lengths=True),
    DenseCase(b=256, h_q=128, s_k=1500, varlen=True, sharp=True),
    DenseCase(b=64, s_q=3, h_q=64, s_k=3000, varlen=True, causal=True, dtype="float16"),
    DenseCase(b=32, s_q=2, h_q=12, h_kv=3, d_qk=512, s_k=3000, varlen=True, page_block_size=16),
    DenseCase(b=8, h_q=128, lengths=(40000, 1, 0, 64, 12345, 2048, 2049, 513), sharp=True),
)


def dense_call(inputs: DenseInputs) -> Call:
    """The call of dense decoding."""
    plan = dict(zip(PLAN_NAMES, plan_arguments(inputs), strict=False))
    return Call(
        function="flash_mla_with_kvcache",
        arguments={
            "q": inputs.q,
            "k_cache": inputs.k_cache,
            "block_table": inputs.block_table,
            "cache_seqlens": inputs.cache_seqlens,
            "head_dim_v": 512,
            "causal": inputs.case.causal,
        },
        results=("out", "softmax_lse"),
        check=lambda got: check(inputs, (got[0], got[1])),
        inputs=inputs,
        plan=plan,
    )


def lengths_to_try(full: list[int]) -> list[list[int]]:
    """Lengths that a batch may have from replay to replay: none, all, some, and few of them."""
    draw = random.Random(7)
    some = [draw.randint(0, length) for length in full]
    one = [0] * (len(full) - 1) + [full[-1]]
    zero = [0] * len(full)
    short = [min(length, 1 + i % 3) for i, length in enumerate(full)]
    return [zero, full, zero, some, one, short, full, full, some]


def dense_changes(call: Call) -> Iterator[None]:
    """New lengths; tokens and entries of the block table past them are poisoned."""
    inputs = call.inputs
    cache, table, full = inputs.k_cache.clone(), inputs.block_table.clone(), list(inputs.lengths)
    page = inputs.case.page_block_size
    token = torch.arange(table.shape[1] * page, device="cuda").expand(len(full), -1)
    column = torch.arange(table.shape[1], device="cuda")
    for lengths in lengths_to_try(full):
        new = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        inputs.cache_seqlens.copy_(new)
        inputs.k_cache.copy_(cache)
        past = (token >= new[:, None]) & (token < torch.tensor(full, device="cuda")[:, None])
        request, position = past.nonzero(as_tuple=True)
        inputs.k_cache[table[request, position // page].long(), position % page] = float("nan")
        inputs.block_table.copy_(table.masked_fill(column * page >= new[:, None], GARBAGE_PAGE))
        inputs.lengths = lengths
        yield


def _replaced(name: str, change: Callable[[Any], Any]) -> Callable[[Arguments], Arguments]:
    return lambda arguments: {name: change(arguments.get(name))}


def _put(name: str, value: Callable[[], Any]) -> Callable[[Arguments], Arguments]:
    return lambda arguments: {name: value()}


DENSE_BAD: dict[str, Bad] = {
    "q float32": (TypeError, "q", _replaced("q", lambda x: x.float())),
    "k_cache of another dtype": (TypeError, "k_cache", _replaced("k_cache", lambda x: x.half())),
    "d_qk 320": (ValueError, "q", _replaced("q", lambda x: x[..., :320])),
    "k_cache of another d_qk": (ValueError, "k_cache", _replaced("k_cache", lambda x: x[..., :512])),
    "page of 48 tokens": (ValueError, "k_cache", _replaced("k_cache", lambda x: x[:, :48])),
    "k_cache with odd strides": (
        ValueError,
        "k_cache",
        _replaced("k_cache", lambda x: torch.nn.functional.pad(x, (0, 1))[..., :576]),
    ),
    "one table row too few": (ValueError, "block_table", _replaced("block_table", lambda x: x[:-1])),
    "head_dim_v 256": (ValueError, "head_dim_v", _replaced("head_dim_v", lambda x: 256)),
    "scale 0": (ValueError, "softmax_scale", _replaced("softmax_scale", lambda x: 0.0)),
    "scale NaN": (ValueError, "softmax_scale", _replaced("softmax_scale", lambda x: float("nan"))),
    "plan of 7 columns": (
        ValueError,
        "tile_scheduler_metadata",
        _replaced("tile_scheduler_metadata", lambda x: x[:, :7].contiguous()),
    ),
    "plan of int64": (
        TypeError,
        "tile_scheduler_metadata",
        _replaced("tile_scheduler_metadata", lambda x: x.long()),
    ),
    "num_splits missing": (ValueError, "num_splits", _replaced("num_splits", lambda x: None)),
    "num_splits too short": (ValueError, "num_splits", _replaced("num_splits", lambda x: x[:-1])),
    "topk_length without indices": (
        ValueError,
        "topk_length",
        _put("topk_length", lambda: torch.zeros(5, dtype=torch.int32, device="cuda")),
    ),
    "indices with causal": (
        ValueError,
        "causal",
        _put("indices", lambda: torch.zeros(5, 2, 64, dtype=torch.int32, device="cuda")),
    ),
    "FP8 without indices": (NotImplementedError, "is_fp8_kvcache", _put("is_fp8_kvcache", lambda: True)),
}

QUERY_STRIDES = ("wide", "columns", "permuted", "unaligned", "odd")

DENSE = Operation(
    name="dense",
    make=lambda case: dense_call(make_dense_inputs(case)),
    cases=DENSE_CASES,
    arrays=("q", "k_cache", "block_table", "cache_seqlens"),
    floats=lambda case: ("q", "k_cache"),
    rerun_cases=DENSE_RERUN_CASES,
    graph_cases=DENSE_GRAPH_CASES,
    invariant_cases=DENSE_INVARIANT_CASES,
    strides={"q": QUERY_STRIDES, "block_table": ("columns", "odd")},
    out=lambda out: ((1, 1), (1, 1), (8, 16), (8, 8)),
    empty={
        "no requests": (
            lambda a: {name: a[name][:0] for name in ("q", "block_table", "cache_seqlens")},
            {"out": 0, "softmax_lse": 0},
        ),
        "no query tokens": (lambda a: {"q": a["q"][:, :0]}, {"out": 1, "softmax_lse": 2}),
    },
    bad=DENSE_BAD,
    changes=dense_changes,
    part=lambda call, requests: dense_call(in_batch(call.inputs, requests)),
)


# ---- sparse decoding

FULL = 2**20  # longer than any row of indices
EXTRA: Arguments = {"extra_topk": 70, "extra_page_block_size": 2, "extra_lengths": "random"}
SPARSE_SHAPE: Arguments = {"b": 4, "s_q": 2, "h_q": 16, "s_k": 300, "topk": 133, "page_block_size": 53}
SPARSE_CASES: dict[str, tuple[SparseCase, ...]] = {
    "v32": (
        SparseCase(b=4, s_q=3, h_q=128, topk=133, lengths="random", sink=True, **EXTRA),
        SparseCase(
            **SPARSE_SHAPE, lengths="random", sink=True, block_gap=1, index_gap=3, power_of_two_scales=True
        ),
    ),
    "model1": (
        SparseCase(**SPARSE_SHAPE, **EXTRA, layout="model1", block_gap=1, lengths="random", sink=True),
        SparseCase(b=5, s_q=2, h_q=64, s_k=200, topk=130, layout="model1"),
    ),
    "bf16": (
        SparseCase(
            b=4, s_q=2, h_q=64, s_k=300, topk=200, layout="bf16", lengths="random", sink=True, **EXTRA
        ),
        SparseCase(**SPARSE_SHAPE, layout="bf16", d_qk=512, empty_rows=0.3),
    ),
}
SPARSE_RERUN_CASES = {
    "v32": (
        SparseCase(b=7, s_q=2, h_q=16, s_k=3000, topk=2048, lengths="random", sink=True),
        SparseCase(b=74, s_q=2, h_q=128, s_k=1000, topk=576, empty_rows=0.1, page_block_size=61),
    ),
    "model1": (
        SparseCase(b=1, h_q=128, s_k=20000, topk=16384, layout="model1", sharp=True),
        SparseCase(
            b=64,
            s_q=2,
            h_q=64,
            topk=128,
            layout="model1",
            block_gap=1,
            lengths="random",
            extra_topk=500,
            extra_s_k=900,
            extra_page_block_size=2,
            extra_lengths="random",
            sink=True,
        ),
    ),
    "bf16": (
        SparseCase(b=33, h_q=66, s_k=2500, topk=2051, layout="bf16", d_qk=576),
        SparseCase(b=5, s_q=3, h_q=9, s_k=700, topk=600, layout="bf16", d_qk=512),
    ),
}
SPARSE_GRAPH_CASES = {
    "v32": (SparseCase(b=6, s_q=2, h_q=16, s_k=2500, topk=2048, lengths=(FULL,) * 6),),
    "model1": (
        SparseCase(b=1, h_q=128, s_k=9000, topk=8192, layout="model1", lengths=(FULL,), sink=True),
        SparseCase(
            b=12,
            s_q=2,
            h_q=64,
            s_k=700,
            topk=130,
            layout="model1",
            block_gap=1,
            lengths=(FULL,) * 12,
            extra_s_k=1000,
            extra_topk=700,
            extra_page_block_size=2,
            extra_lengths=(FULL,) * 12,
            sink=True,
        ),
    ),
    "bf16": (SparseCase(b=70, h_q=66, s_k=900, topk=600, layout="bf16", d_qk=576, lengths=(FULL,) * 70),),
}
SPARSE_INVARIANT_CASES = {
    "v32": (
        SparseCase(b=200, h_q=16, s_k=2100, topk=2048, lengths="random", empty_rows=0.1),
        SparseCase(
            b=8, h_q=128, s_k=20000, topk=16384, lengths=(16384, 1, 0, 64, 12345, 2048, 2049, 513), sink=True
        ),
    ),
    "model1": (
        SparseCase(
            b=64,
            s_q=2,
            h_q=64,
            topk=300,
            layout="model1",
            lengths="random",
            extra_topk=1500,
            extra_s_k=1600,
            extra_page_block_size=2,
            extra_lengths="random",
            sink=True,
            sharp=True,
        ),
    ),
    "bf16": (
        SparseCase(b=64, s_q=2, h_q=128, s_k=1500, topk=1000, lengths="random", layout="bf16", d_qk=512),
    ),
}


def for_clusters(cases: tuple[SparseCase, ...]) -> tuple[SparseCase, ...]:
    """The cases with two and four tiles of 64 heads: the kernel for clusters takes even numbers."""
    return tuple(replace(case, h_q=heads) for case, heads in zip(cases, cycle((128, 256)), strict=False))


def sparse_call(inputs: SparseInputs) -> Call:
    """The call of sparse decoding."""
    return Call(
        function="flash_mla_with_kvcache",
        arguments={
            "q": inputs.q,
            "k_cache": inputs.k_cache,
            "block_table": None,
            "cache_seqlens": None,
            "head_dim_v": 512,
            **inputs.keywords(),
        },
        results=("out", "softmax_lse"),
        check=lambda got: sparse_check(inputs, (got[0], got[1])),
        inputs=inputs,
        plan=dict(zip(PLAN_NAMES, sparse_plan_arguments(inputs), strict=True)),
    )


def sparse_changes(call: Call) -> Iterator[None]:
    """New lengths, those of an extra cache the reversed share, and shuffled rows of indices. Past the lengths
    indices name slot 0, which is poison, or nothing.
    """
    inputs = call.inputs
    case = inputs.case
    draw = torch.Generator(device="cuda").manual_seed(5)
    sources = [(inputs.indices, inputs.topk_length)]
    if case.extra_topk:
        sources.append((inputs.extra_indices, inputs.extra_topk_length))
    valid = [indices.clone() for indices, _ in sources]
    for lengths in lengths_to_try([case.topk] * case.b):
        shares = [[length / case.topk for length in lengths]]
        shares.append(shares[0][::-1])
        for (indices, length), chosen, share in zip(sources, valid, shares, strict=False):
            width = indices.shape[2]
            order = torch.rand(indices.shape, generator=draw, device="cuda").argsort(dim=2)
            new = torch.tensor([round(part * width) for part in share], dtype=torch.int32, device="cuda")
            past = torch.arange(width, device="cuda") >= new[:, None, None]
            nowhere = torch.where(order % 2 == 0, 0, INT_MAX)
            indices.copy_(torch.where(past, nowhere, chosen.gather(2, order)))
            length.copy_(new)
        yield


SPARSE_BAD: dict[str, Bad] = {
    "causal": (ValueError, "causal", _put("causal", lambda: True)),
    "q float16": (TypeError, "q", _replaced("q", lambda x: x.half())),
    "head_dim_v 256": (ValueError, "head_dim_v", _put("head_dim_v", lambda: 256)),
    "scale 0": (ValueError, "softmax_scale", _put("softmax_scale", lambda: 0.0)),
    "no columns of indices": (ValueError, "indices", _replaced("indices", lambda x: x[..., :0])),
    "indices of another batch": (ValueError, "indices", _replaced("indices", lambda x: x[:-1])),
    "plan of 7 columns": (
        ValueError,
        "tile_scheduler_metadata",
        _replaced("tile_scheduler_metadata", lambda x: x[:, :7].contiguous()),
    ),
    "num_splits too short": (ValueError, "num_splits", _replaced("num_splits", lambda x: x[:-1])),
}


def sparse_floats(case: SparseCase) -> tuple[str, ...]:
    """FP8 caches are bytes."""
    rows = case.layout == "bf16"
    given = {"q": True, "attn_sink": case.sink, "k_cache": rows, "extra_k_cache": rows and case.extra_topk}
    return tuple(name for name, there in given.items() if there)


def sparse_operation(layout: str, *, clusters: bool = False) -> Operation:
    """Sparse decoding over one kind of cache, or forced to the kernel for clusters, with cases for it."""

    def suited(cases: tuple[SparseCase, ...]) -> tuple[SparseCase, ...]:
        return for_clusters(cases) if clusters else cases

    per_request = ("q", "indices", "topk_length", "extra_indices_in_kvcache", "extra_topk_length")
    per_token = ("q", "indices", "extra_indices_in_kvcache")
    rows = ("wide", "columns", "permuted", "unaligned", "odd")
    return Operation(
        name=f"sparse_{layout}" + "_clusters" * clusters,
        make=lambda case: sparse_call(make_sparse_inputs(case)),
        cases=suited(SPARSE_CASES[layout]),
        arrays=(
            "q",
            "k_cache",
            "indices",
            "attn_sink",
            "extra_k_cache",
            "extra_indices_in_kvcache",
            "topk_length",
            "extra_topk_length",
        ),
        floats=sparse_floats,
        rerun_cases=suited(SPARSE_RERUN_CASES[layout]),
        graph_cases=suited(SPARSE_GRAPH_CASES[layout]),
        invariant_cases=suited(SPARSE_INVARIANT_CASES[layout]),
        strides={"q": QUERY_STRIDES, "indices": rows, "extra_indices_in_kvcache": rows},
        out=lambda out: ((1, 1), (1, 1), (8, 16), (8, 8)),
        empty={
            "no requests": (
                lambda a: {name: a[name][:0] for name in per_request if a[name] is not None},
                {"out": 0, "softmax_lse": 0},
            ),
            "no query tokens": (
                lambda a: {name: a[name][:, :0] for name in per_token if a[name] is not None},
                {"out": 1, "softmax_lse": 2},
            ),
        },
        bad=SPARSE_BAD,
        changes=sparse_changes,
        part=lambda call, requests: sparse_call(sparse_in_batch(call.inputs, requests)),
        plan_serves_all_lengths=True,
        clusters=clusters,
    )


# ---- sparse prefill

PREFILL_KINDS: dict[str, Arguments] = {
    "bf16": {"layout": "bf16", "d_qk": 576, "page_block_size": 1, "shared": True},
    "bf16_512": {"layout": "bf16", "d_qk": 512, "page_block_size": 1, "shared": True},
    "v32": {"layout": "v32", "page_block_size": 53, "power_of_two_scales": True, "shared": True},
    "model1": {"layout": "model1", "page_block_size": 61, "shared": True},
}
BF16, BF16_512, V32, MODEL1 = PREFILL_KINDS.values()
PREFILL_SHAPES: tuple[Arguments, ...] = (
    {"b": 9, "h_q": 16, "s_k": 300, "topk": 133, "lengths": "random", "sink": True},
    {"b": 200, "h_q": 128, "s_k": 300, "topk": 200, "lengths": "random", "sink": True, "empty_rows": 0.2},
)
PREFILL_RERUN_CASES = {
    "bf16": (
        SparseCase(b=1, h_q=128, s_k=9000, topk=8192, **BF16),
        SparseCase(b=500, h_q=66, s_k=1000, topk=576, empty_rows=0.1, **BF16_512),
        SparseCase(b=20_000, h_q=3, s_k=300, topk=130, lengths="random", **BF16),
    ),
    "v32": (SparseCase(b=7, h_q=16, s_k=3000, topk=2048, lengths="random", sink=True, **V32),),
    "model1": (SparseCase(b=40, h_q=64, s_k=900, topk=500, **MODEL1),),
}
# Few tokens over many rows: a cache whose rows are selected often is copied to bf16 rows first.
PREFILL_CLUSTER_SHAPES: tuple[Arguments, ...] = (
    {"b": 9, "h_q": 128, "s_k": 300, "topk": 133, "lengths": "random", "sink": True},
    {"b": 15, "h_q": 256, "s_k": 500, "topk": 200, "lengths": "random", "sink": True, "empty_rows": 0.2},
)
PREFILL_CLUSTER_RERUN_CASES = {
    "v32": (SparseCase(b=7, h_q=128, s_k=3000, topk=2048, lengths="random", sink=True, **V32),),
    "model1": (SparseCase(b=40, h_q=256, s_k=3000, topk=500, **MODEL1),),
}


def prefill_call(inputs: SparseInputs) -> Call:
    """The call of sparse prefill."""
    return Call(
        function="flash_mla_sparse_fwd",
        arguments={
            "q": inputs.q[:, 0],
            "kv": prefill_kv(inputs),
            "indices": inputs.indices,
            "sm_scale": inputs.case.width**-0.5,
            "attn_sink": inputs.attn_sink,
            "topk_length": inputs.topk_length,
            "is_fp8_kvcache": inputs.case.layout != "bf16",
        },
        results=("out", "max_logits", "lse"),
        check=lambda got: prefill_check(inputs, (got[0], got[1], got[2])),
        inputs=inputs,
    )


def prefill_changes(call: Call) -> Iterator[None]:
    """New lengths and shuffled rows of indices."""
    inputs = call.inputs
    case = inputs.case
    draw = torch.Generator(device="cuda").manual_seed(5)
    alive = live_rows(inputs)
    for share in (1.0, 0.0, 0.3, 1.0):
        lengths = torch.rand(case.b, generator=draw, device="cuda").add(share).clamp(max=1.0)
        inputs.topk_length.copy_((lengths * case.topk * share).int())
        order = torch.rand(alive.shape, generator=draw, device="cuda").argsort(dim=2)
        counted = torch.arange(case.topk, device="cuda") < inputs.topk_length[:, None, None]
        inputs.indices.copy_(torch.where(counted, alive.gather(2, order), INT_MAX))
        yield


def live_rows(inputs: SparseInputs) -> Any:
    """The indices, -1 in place of those that name poison, as those past a length do."""
    form, slots = inputs.case.format, inputs.k_cache.shape[0] * inputs.k_cache.shape[1]
    rows, _ = block_fields(inputs.k_cache.view(torch.uint8), form)
    rope = rows[..., form.rope_offset :][..., : 2 * form.rope].contiguous().view(torch.bfloat16)
    alive = rope.isfinite().all(dim=-1).reshape(-1)
    assert len(alive) == slots
    valid = (inputs.indices >= 0) & (inputs.indices < slots)
    return torch.where(valid & alive[inputs.indices.long().masked_fill(~valid, 0)], inputs.indices, -1)


def prefill_operation(layout: str, *, clusters: bool = False) -> Operation:
    """Sparse prefill over one kind of kv, or forced to the kernel for clusters, with cases for it."""
    kinds = [kind for kind in PREFILL_KINDS.values() if kind["layout"] == layout]
    shapes = PREFILL_CLUSTER_SHAPES if clusters else PREFILL_SHAPES
    reruns = (PREFILL_CLUSTER_RERUN_CASES if clusters else PREFILL_RERUN_CASES)[layout]
    per_token = ("q", "indices", "topk_length")
    return Operation(
        name=f"prefill_{layout}" + "_clusters" * clusters,
        make=lambda case: prefill_call(make_sparse_inputs(case)),
        cases=tuple(SparseCase(**shape, **kind) for kind in kinds for shape in shapes),
        arrays=("q", "kv", "indices", "attn_sink", "topk_length"),
        floats=lambda case: ("q", "attn_sink", *(("kv",) if layout == "bf16" else ())),
        rerun_cases=reruns,
        graph_cases=tuple(replace(case, lengths="random") for case in reruns),
        strides={
            "q": QUERY_STRIDES,
            "indices": ("wide", "columns", "unaligned", "odd"),
            **({"kv": ("wide", "columns")} if layout == "bf16" else {}),
        },
        out=lambda out: ((1, 1), (8, 16), (8, 8)),
        empty={
            "no query tokens": (
                lambda a: {name: a[name][:0] for name in per_token if a[name] is not None},
                {"out": 0, "max_logits": 0, "lse": 0},
            )
        },
        bad={
            "d_v 256": (ValueError, "d_v", _put("d_v", lambda: 256)),
            "scale 0": (ValueError, "sm_scale", _put("sm_scale", lambda: 0.0)),
            "another base": (ValueError, "log_base", _put("log_base", lambda: "10")),
            "q float16": (TypeError, "q", _replaced("q", lambda x: x.half())),
            "no columns of indices": (ValueError, "indices", _replaced("indices", lambda x: x[..., :0])),
            "indices of other tokens": (ValueError, "indices", _replaced("indices", lambda x: x[:-1])),
        },
        changes=prefill_changes,
        clusters=clusters,
    )


# ---- caches

PAGE, NUM_BLOCKS = 64, 8


def put(target: Any, array: np.ndarray) -> None:
    """New numbers in place."""
    target.copy_(to_gpu(array))


CACHE_CASES = tuple(Sizes(kind.replace(" ", "_"), kind) for kind in KINDS)
QUANTIZE_CASES = tuple(Sizes(kind, kind) for kind in LAYOUTS)


def new_slots(seed: int, tokens: int) -> np.ndarray:
    """Slots of a cache, some of them to be skipped."""
    slots = np.random.default_rng(seed).permutation(NUM_BLOCKS * PAGE)[:tokens]
    slots[2::7], slots[3::11] = -1, NUM_BLOCKS * PAGE
    return slots


def write_call(case: Sizes, tokens: int = 40) -> Call:
    """The call of `write_kv_cache`; the inputs are the cache that it starts from."""
    rows = to_gpu(values((tokens, COLUMNS[case.kind])))
    arguments = {
        "kv_c": rows[:, :-64].contiguous(),
        "k_pe": rows[:, -64:].contiguous(),
        "slot_mapping": to_gpu(new_slots(0, tokens)),
    }

    def check_cache(got: tuple[Any, ...]) -> None:
        want = host_cache(case.kind, NUM_BLOCKS, PAGE)
        host = [to_host(arguments[name]) for name in ("kv_c", "k_pe")]
        kv_c, k_pe = (x.view(ml_dtypes.bfloat16) for x in host)
        reference.write_kv_cache(kv_c, k_pe, want, to_host(arguments["slot_mapping"]))
        np.testing.assert_array_equal(to_host(got[0]).view(np.uint8), want.view(np.uint8))

    return Call(
        "write_kv_cache",
        arguments,
        ("kv_cache",),
        check_cache,
        case,
        written="kv_cache",
        fresh=lambda: PaddedCache(case.kind, NUM_BLOCKS, PAGE).view,
    )


def write_changes(call: Call) -> Iterator[None]:
    """New rows and slots."""
    kv_c, k_pe, slots = (call.arguments[name] for name in ("kv_c", "k_pe", "slot_mapping"))
    for seed in (1, 2, 3):
        rows = values((len(slots), COLUMNS[call.inputs.kind]), seed=seed)
        put(kv_c, rows[:, :-64].copy())
        put(k_pe, rows[:, -64:].copy())
        put(slots, new_slots(seed, len(slots)))
        yield


WRITE = Operation(
    name="write_kv_cache",
    make=write_call,
    cases=CACHE_CASES,
    arrays=("kv_c", "k_pe", "slot_mapping"),
    floats=lambda case: ("kv_c", "k_pe"),
    strides={"kv_c": ("columns", "unaligned", "odd"), "k_pe": ("columns", "unaligned", "odd")},
    empty={"no tokens": (lambda a: {name: a[name][:0] for name in ("kv_c", "k_pe", "slot_mapping")}, {})},
    bad={
        "another number of rows": (ValueError, "k_pe", _replaced("k_pe", lambda x: x[:-1])),
        "another width": (ValueError, "kv_c", _replaced("kv_c", lambda x: x[:, :-8].contiguous())),
        "cache on the CPU": (ValueError, "kv_cache", _replaced("kv_cache", lambda x: x.cpu())),
        "cache of int16": (TypeError, "kv_cache", _replaced("kv_cache", lambda x: x.short())),
        "cache of 3 dimensions": (ValueError, "kv_cache", _replaced("kv_cache", lambda x: x[0])),
    },
    changes=write_changes,
)


def gather_call(case: Sizes, b: int = 3) -> Call:
    """The call of `gather_kv_cache`."""
    kind = case.kind
    rows = values((NUM_BLOCKS, PAGE, 1, COLUMNS[kind]))
    host = filled(kind, rows)
    draw = np.random.default_rng(0)
    table = draw.permutation(b * 2).reshape(b, 2).astype(np.int32)
    vectors = {
        "cache_seqlens": np.array([100, 0, 128], np.int32),
        "workspace_starts": np.array([1, 0, 101], np.int32),
        "seq_starts": np.array([0, 0, 7], np.int32),
    }
    arguments = {
        "kv_cache": PaddedCache.of(kind, host).view,
        "block_table": to_gpu(table),
        **{name: to_gpu(vector) for name, vector in vectors.items()},
    }
    shape = (b * 2 * PAGE + 2, COLUMNS[kind])

    def check_rows(got: tuple[Any, ...]) -> None:
        want = np.full(shape, CANARY, np.float32)
        lengths, starts, places = (
            to_host(arguments[name]) for name in ("cache_seqlens", "seq_starts", "workspace_starts")
        )
        now = to_host(arguments["block_table"])
        reference.gather_kv_cache(host, now, lengths, want, workspace_starts=places, seq_starts=starts)
        same_values(got[0], want)

    return Call(
        "gather_kv_cache",
        arguments,
        ("out",),
        check_rows,
        case,
        written="out",
        fresh=lambda: torch.full(shape, float(CANARY), dtype=torch.bfloat16, device="cuda"),
    )


def gather_changes(call: Call) -> Iterator[None]:
    """New lengths, places and pages."""
    table, lengths, places, starts = (
        call.arguments[name] for name in ("block_table", "cache_seqlens", "workspace_starts", "seq_starts")
    )
    for seed, new in enumerate(((0, 0, 0), (128, 128, 128), (5, 100, 1))):
        pages = np.random.default_rng(seed).permutation(NUM_BLOCKS)[: table.numel()]
        put(table, pages.reshape(tuple(table.shape)).astype(np.int32))
        put(lengths, np.array(new, np.int32))
        put(places, np.array([0, 128, 256], np.int32))
        put(starts, np.array([0, seed, 0], np.int32))
        yield


GATHER = Operation(
    name="gather_kv_cache",
    make=gather_call,
    cases=CACHE_CASES,
    arrays=("kv_cache", "block_table", "cache_seqlens", "workspace_starts", "seq_starts"),
    floats=lambda case: () if case.kind in LAYOUTS else ("kv_cache",),
    strides={"block_table": ("columns", "odd")},
    out=lambda out: ((1, 1), (0, 24)),
    empty={
        "no requests": (
            lambda a: {
                name: a[name][:0]
                for name in ("block_table", "cache_seqlens", "workspace_starts", "seq_starts")
            },
            {},
        ),
        "no rows": (lambda a: {"out": a["out"][:0]}, {"out": 0}),
    },
    bad={
        "one length too few": (ValueError, "cache_seqlens", _replaced("cache_seqlens", lambda x: x[:-1])),
    },
    changes=gather_changes,
)


def quantize_call(case: Sizes) -> Call:
    """The call of `quantize_k_cache`."""
    source = to_gpu(values((NUM_BLOCKS, PAGE, 1, COLUMNS[case.kind])))

    def check_bytes(got: tuple[Any, ...]) -> None:
        want = reference.quantize_k_cache(to_host(source).view(ml_dtypes.bfloat16), case.kind)
        np.testing.assert_array_equal(to_host(got[0]), want)

    return Call("quantize_k_cache", {"k_cache": source, "layout": case.kind}, ("cache",), check_bytes, case)


def quantize_changes(call: Call) -> Iterator[None]:
    """New values."""
    source = call.arguments["k_cache"]
    for seed in (1, 2):
        put(source, values(tuple(source.shape), seed=seed))
        yield


QUANTIZE = Operation(
    name="quantize_k_cache",
    make=quantize_call,
    cases=QUANTIZE_CASES,
    arrays=("k_cache",),
    floats=lambda case: ("k_cache",),
    strides={"k_cache": ("wide", "columns", "permuted", "unaligned", "odd")},
    out=lambda out: ((1, 1), (0, 0), (0, 0), (0, 0)),
    empty={"no blocks": (lambda a: {"k_cache": a["k_cache"][:0]}, {"cache": 0})},
    bad={
        "another layout": (ValueError, "layout", _put("layout", lambda: "v33")),
        "layout of another width": (ValueError, "k_cache", _replaced("k_cache", lambda x: x[..., :448])),
    },
    changes=quantize_changes,
)


def dequantize_call(case: Sizes) -> Call:
    """The call of `dequantize_k_cache`."""
    host = reference.quantize_k_cache(values((NUM_BLOCKS, PAGE, 1, COLUMNS[case.kind])), case.kind)
    source = PaddedCache.of(case.kind, host).view

    def check_rows(got: tuple[Any, ...]) -> None:
        rows = NUM_BLOCKS * PAGE
        want = np.zeros((rows, COLUMNS[case.kind]), np.float32)
        table = np.arange(NUM_BLOCKS)[None]
        reference.gather_kv_cache(to_host(source), table, [rows], want, workspace_starts=[0])
        same_values(got[0].reshape(rows, -1), want)

    return Call("dequantize_k_cache", {"cache": source, "layout": case.kind}, ("k_cache",), check_rows, case)


def dequantize_changes(call: Call) -> Iterator[None]:
    """New values."""
    source, kind = call.arguments["cache"], call.inputs.kind
    for seed in (1, 2):
        shape = (NUM_BLOCKS, PAGE, 1, COLUMNS[kind])
        put(source, reference.quantize_k_cache(values(shape, seed=seed), kind))
        yield


DEQUANTIZE = Operation(
    name="dequantize_k_cache",
    make=dequantize_call,
    cases=QUANTIZE_CASES,
    arrays=("cache",),
    floats=lambda case: (),
    empty={"no blocks": (lambda a: {"cache": a["cache"][:0]}, {"k_cache": 0})},
    bad={"another layout": (ValueError, "layout", _put("layout", lambda: "v33"))},
    changes=dequantize_changes,
)


# ---- indices

CONVERT_CASES = (Sizes("slots", n=0), Sizes("compact", n=1))


def convert_call(case: Sizes) -> Call:
    """The call of `convert_indices`."""
    compact = bool(case.n)
    draw = np.random.default_rng(0)
    positions = draw.integers(-9, 700, (3, 2, 300)).astype(np.int32)
    arguments = {
        "indices": to_gpu(positions),
        "block_table": to_gpu(draw.integers(-1, 50, (5, 10)).astype(np.int32)),
        "page_block_size": PAGE,
        "request_ids": to_gpu(np.array([4, 0, 1], np.int32)),
        "compact": compact,
    }

    def check_slots(got: tuple[Any, ...]) -> None:
        indices, table, ids = (to_host(arguments[x]) for x in ("indices", "block_table", "request_ids"))
        want = reference.convert_indices(indices, table, PAGE, request_ids=ids, compact=compact)
        for one, wanted in zip(got, want if compact else (want,), strict=True):
            np.testing.assert_array_equal(to_host(one), wanted)

    return Call(
        "convert_indices", arguments, ("slots", "counts") if compact else ("slots",), check_slots, case
    )


def convert_changes(call: Call) -> Iterator[None]:
    """New positions and pages."""
    indices, table = call.arguments["indices"], call.arguments["block_table"]
    for seed in (1, 2):
        draw = np.random.default_rng(seed)
        put(indices, draw.integers(-9, 700, tuple(indices.shape)).astype(np.int32))
        put(table, draw.integers(-1, 50, tuple(table.shape)).astype(np.int32))
        yield


CONVERT = Operation(
    name="convert_indices",
    make=convert_call,
    cases=CONVERT_CASES,
    arrays=("indices", "block_table", "request_ids"),
    floats=lambda case: (),
    strides={
        "indices": ("wide", "columns", "permuted", "unaligned", "odd"),
        "block_table": ("columns", "unaligned", "odd"),
    },
    out=lambda out: ((1, 1), (1, 2), (3, 4)),
    empty={
        "no rows": (
            lambda a: {"indices": a["indices"][:0], "request_ids": a["request_ids"][:0]},
            {"slots": 0, "counts": 0},
        ),
        "no columns": (lambda a: {"indices": a["indices"][..., :0]}, {"slots": 2}),
    },
    bad={
        "page of 0 tokens": (ValueError, "page_block_size", _put("page_block_size", lambda: 0)),
        "another number of requests": (
            ValueError,
            "request_ids",
            _replaced("request_ids", lambda x: x[:-1]),
        ),
    },
    changes=convert_changes,
)


# ---- merging

MERGE_CASES = (
    Sizes("3_parts", "bfloat16", 3),
    Sizes("40_parts", "float16", 40),
    Sizes("5_parts_float32", "float32", 5),
)
MERGE_SHAPE = (2, 3, 16, 512)
MERGE_RELATIVE = {"bfloat16": 2.0**-8, "float16": 2.0**-10, "float32": 4e-6}


def make_parts(parts: int, shape: tuple[int, ...], dtype: str, seed: int = 0) -> tuple[list[Any], list[Any]]:
    """Random states; some rows are empty, with NaN in their out, and the first one is so in all parts."""
    draw = torch.Generator("cuda").manual_seed(seed + parts)
    lse_shape = (shape[0], shape[2], shape[1]) if len(shape) == 4 else shape[:2]
    outs, lses = [], []
    for i in range(parts):
        out = torch.randn(shape, generator=draw, device="cuda").to(getattr(torch, dtype))
        lse = torch.randn(lse_shape, generator=draw, device="cuda") * 4
        empty = torch.rand(lse_shape, generator=draw, device="cuda") < 0.2
        empty.view(-1)[0] = True
        lse[empty] = float("inf") if i % 2 else -float("inf")
        out[empty.transpose(1, 2) if len(shape) == 4 else empty] = float("nan")
        outs.append(out)
        lses.append(lse)
    return outs, lses


def check_merged(outs: list[Any], lses: list[Any], got: tuple[Any, ...]) -> None:
    """Compare with the float64 reference."""
    dtype = str(outs[0].dtype).removeprefix("torch.")
    want_out, want_lse = torch_reference.merge_attn_states(outs, lses)
    out, lse = got
    assert out.dtype == outs[0].dtype and lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), want_out, rtol=MERGE_RELATIVE[dtype], atol=2e-6)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=1e-6)


def merge_call(case: Sizes) -> Call:
    """The call of `merge_attn_states`."""
    outs, lses = make_parts(case.n, MERGE_SHAPE, case.kind)
    return Call(
        "merge_attn_states",
        {"outs": outs, "lses": lses},
        ("out", "lse"),
        partial(check_merged, outs, lses),
        case,
    )


def merge_changes(call: Call) -> Iterator[None]:
    """New states."""
    case = call.inputs
    for seed in (1, 2):
        parts = make_parts(case.n, MERGE_SHAPE, case.kind, seed)
        for name, news in zip(("outs", "lses"), parts, strict=True):
            for old, new in zip(call.arguments[name], news, strict=True):
                old.copy_(new)
        yield


MERGE = Operation(
    name="merge_attn_states",
    make=merge_call,
    cases=MERGE_CASES,
    arrays=("outs", "lses"),
    floats=lambda case: ("outs", "lses"),
    strides={
        "outs": ("wide", "columns", "permuted"),
        "lses": ("wide", "columns", "odd", "unaligned", "transposed"),
    },
    odd_last=("lses",),
    out=lambda out: ((1, 1), (0, 2), (4, 7), (0, 0)),
    empty={
        "no requests": (
            lambda a: {name: [x[:0] for x in a[name]] for name in ("outs", "lses")},
            {"out": 0, "lse": 0},
        ),
        "no query tokens": (
            lambda a: {"outs": [x[:, :0] for x in a["outs"]], "lses": [x[..., :0] for x in a["lses"]]},
            {"out": 1, "lse": 2},
        ),
    },
    bad={
        "no parts": (ValueError, "lses", lambda a: {"outs": [], "lses": []}),
        "one lse too few": (ValueError, "lses", _replaced("lses", lambda x: x[:-1])),
        "a tensor of parts": (TypeError, "outs", _replaced("outs", lambda x: torch.stack(x))),
    },
    changes=merge_changes,
)


OPERATIONS = (
    DENSE,
    sparse_operation("v32"),
    sparse_operation("v32", clusters=True),
    sparse_operation("model1"),
    sparse_operation("model1", clusters=True),
    sparse_operation("bf16"),
    prefill_operation("bf16"),
    prefill_operation("v32"),
    prefill_operation("v32", clusters=True),
    prefill_operation("model1"),
    prefill_operation("model1", clusters=True),
    WRITE,
    GATHER,
    QUANTIZE,
    DEQUANTIZE,
    CONVERT,
    MERGE,
)
