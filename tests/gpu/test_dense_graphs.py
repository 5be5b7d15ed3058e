"""CUDA graphs: captured once, replayed while lengths, pages and plans change in place."""

import random
import subprocess
import sys
from typing import Any

import pytest
from gpu_support import (
    assert_same_bits,
    call_arguments,
    check,
    decode,
    plan,
    plan_arguments,
    poisoned_allocations,
    torch,
)

import rawmla
from rawmla.testing import DenseCase, DenseInputs, make_dense_inputs
from rawmla.testing.generators import GARBAGE_PAGE

CASES = (
    DenseCase(b=1, h_q=128, s_k=9000),
    DenseCase(b=6, s_q=2, h_q=16, s_k=2500, causal=True),
    DenseCase(b=12, s_q=2, h_q=128, s_k=2500, causal=True, sharp=True, page_block_size=16, dtype="float16"),
    DenseCase(b=70, h_q=64, s_k=1000, page_block_size=256),
)


class Replays:
    """The static inputs of a graph, changed in place between replays and poisoned past the new lengths."""

    def __init__(self, case: DenseCase) -> None:
        self.inputs = make_dense_inputs(case)
        self.cache = self.inputs.k_cache.clone()
        self.table = self.inputs.block_table.clone()
        self.full = list(self.inputs.lengths)

    def lengths_to_try(self) -> list[list[int]]:
        draw = random.Random(7)
        some = [draw.randint(0, length) for length in self.full]
        one = [0] * (len(self.full) - 1) + [self.full[-1]]
        zero = [0] * len(self.full)
        short = [min(length, 1 + i % 3) for i, length in enumerate(self.full)]
        return [zero, self.full, zero, some, one, short, self.full, self.full, some]

    def set_lengths(self, lengths: list[int]) -> DenseInputs:
        inputs = self.inputs
        page = inputs.case.page_block_size
        new = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        inputs.cache_seqlens.copy_(new)
        inputs.k_cache.copy_(self.cache)
        token = torch.arange(self.table.shape[1] * page, device="cuda").expand(len(lengths), -1)
        past = (token >= new[:, None]) & (token < torch.tensor(self.full, device="cuda")[:, None])
        request, position = past.nonzero(as_tuple=True)
        inputs.k_cache[self.table[request, position // page].long(), position % page] = float("nan")
        column = torch.arange(self.table.shape[1], device="cuda")
        inputs.block_table.copy_(self.table.masked_fill(column * page >= new[:, None], GARBAGE_PAGE))
        inputs.lengths = lengths
        return inputs


@pytest.mark.parametrize("varlen", (False, True), ids=("whole", "split"))
def test_calls_that_wait_for_each_other(varlen: bool) -> None:
    """Each call's q is the out of the one before, which holds NaN until that call, combine included, is done.

    Of requests that are not split, most CTAs of the combine leave early.
    """
    inputs = make_dense_inputs(DenseCase(b=132, h_q=64, s_k=1000, d_qk=512, varlen=varlen))
    metadata, num_splits = plan(inputs, "tensors")
    splits = num_splits.diff()
    assert bool((splits > 1).any()) == varlen
    q, *rest = call_arguments(inputs)

    def chain(between: Any) -> list[Any]:
        outs = [torch.full_like(q, float("nan")) for _ in range(10)]
        between()
        for before, out in zip([q, *outs], outs, strict=False):
            rawmla.flash_mla_with_kvcache(before, *rest, metadata, num_splits, out=out)
            between()
        return outs

    for number, (got, want) in enumerate(
        zip(chain(lambda: None), chain(torch.cuda.synchronize), strict=True)
    ):
        assert not want.isnan().any()
        assert_same_bits(f"out of call {number}", got, want)


def capture(work: Any) -> tuple["torch.cuda.CUDAGraph", Any]:
    """Capture what `work` enqueues; its result lives in the graph's memory, poisoned at every replay."""
    graph = torch.cuda.CUDAGraph()
    with poisoned_allocations(), torch.cuda.graph(graph):
        result = work()
    return graph, result


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_plan_computed_inside_the_graph_object_form(case: DenseCase) -> None:
    replays = Replays(case)
    inputs = replays.inputs
    decode(inputs, "object")  # loads the kernels
    metadata, _ = rawmla.get_mla_metadata()
    graph, (out, lse) = capture(
        lambda: rawmla.flash_mla_with_kvcache(*call_arguments(inputs), metadata, causal=case.causal)
    )
    for lengths in replays.lengths_to_try():
        replays.set_lengths(lengths)
        graph.replay()
        check(inputs, (out, lse))
        eager_out, eager_lse = decode(inputs, "object")
        assert_same_bits("replayed and eager out", out, eager_out)
        assert_same_bits("replayed and eager lse", lse, eager_lse)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_one_object_for_several_layers(case: DenseCase) -> None:
    """The first layer computes the plan inside the graph, the others read it there."""
    replays = Replays(case)
    inputs = replays.inputs
    decode(inputs, "object")
    metadata, _ = rawmla.get_mla_metadata()
    graph, results = capture(
        lambda: [
            rawmla.flash_mla_with_kvcache(*call_arguments(inputs), metadata, causal=case.causal)
            for _ in range(3)
        ]
    )
    for lengths in replays.lengths_to_try()[:5]:
        replays.set_lengths(lengths)
        graph.replay()
        check(inputs, results[0])
        for out, lse in results[1:]:
            assert_same_bits("later layer's out", out, results[0][0])
            assert_same_bits("later layer's lse", lse, results[0][1])


@pytest.mark.parametrize("planned", ("inside", "outside"))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_plan_tensors_recomputed_in_place(case: DenseCase, planned: str) -> None:
    """Planner captured with the call, or run before each replay into the buffers that the graph reads."""
    replays = Replays(case)
    inputs = replays.inputs
    metadata, num_splits = plan(inputs, "tensors")
    decode(inputs, "tensors")

    def replan() -> None:
        rawmla.get_mla_metadata(*plan_arguments(inputs), out=(metadata, num_splits))

    def work() -> Any:
        if planned == "inside":
            replan()
        return rawmla.flash_mla_with_kvcache(
            *call_arguments(inputs), metadata, num_splits, causal=case.causal
        )

    graph, (out, lse) = capture(work)
    for lengths in replays.lengths_to_try():
        replays.set_lengths(lengths)
        if planned == "outside":
            replan()
        graph.replay()
        check(inputs, (out, lse))


@pytest.mark.parametrize("size", (1, 3, 11))
def test_batch_smaller_than_captured(size: int) -> None:
    """The plan is made for the first requests only; the rest of the captured batch is left alone."""
    case = DenseCase(b=12, s_q=2, h_q=128, s_k=2500, causal=True)
    replays = Replays(case)
    inputs = replays.inputs
    metadata, num_splits = plan(inputs, "tensors")
    decode(inputs, "tensors")
    graph, (out, lse) = capture(
        lambda: rawmla.flash_mla_with_kvcache(*call_arguments(inputs), metadata, num_splits, causal=True)
    )
    for lengths in replays.lengths_to_try():
        replays.set_lengths(lengths)
        _, *heads = plan_arguments(inputs)
        rawmla.get_mla_metadata(inputs.cache_seqlens[:size], *heads, out=(metadata, num_splits))
        out.fill_(7.0)
        lse.fill_(7.0)
        graph.replay()
        assert (out[size:] == 7.0).all() and (lse[size:] == 7.0).all()
        small = DenseInputs(
            case=DenseCase(b=size, s_q=2, h_q=128, lengths=tuple(lengths[:size]), causal=True),
            q=inputs.q[:size],
            k_cache=inputs.k_cache,
            block_table=inputs.block_table[:size],
            cache_seqlens=inputs.cache_seqlens[:size],
            lengths=lengths[:size],
        )
        check(small, (out[:size], lse[:size]))
    rawmla.get_mla_metadata(*plan_arguments(inputs), out=(metadata, num_splits))
    graph.replay()
    check(inputs, (out, lse))


def test_out_given_inside_a_graph() -> None:
    case = CASES[1]
    replays = Replays(case)
    inputs = replays.inputs
    decode(inputs, "object")
    metadata, _ = rawmla.get_mla_metadata()
    buffer = torch.full((6, 2, 40, 512), -7.0, dtype=torch.bfloat16, device="cuda")
    given = buffer[:, :, 8:24]
    graph, (out, lse) = capture(
        lambda: rawmla.flash_mla_with_kvcache(*call_arguments(inputs), metadata, causal=True, out=given)
    )
    assert out is given
    for lengths in replays.lengths_to_try()[:4]:
        replays.set_lengths(lengths)
        given.fill_(float("nan"))
        graph.replay()
        check(inputs, (out, lse))
    given.fill_(-7.0)
    assert bool((buffer == -7.0).all())


def test_batch_invariant_mode_inside_a_graph() -> None:
    case = CASES[2]
    replays = Replays(case)
    inputs = replays.inputs
    decode(inputs, "object", enable_batch_invariant=True)
    metadata, _ = rawmla.get_mla_metadata(enable_batch_invariant=True)
    graph, (out, lse) = capture(
        lambda: rawmla.flash_mla_with_kvcache(*call_arguments(inputs), metadata, causal=True)
    )
    for lengths in replays.lengths_to_try():
        replays.set_lengths(lengths)
        graph.replay()
        check(inputs, (out, lse))
        eager_out, eager_lse = decode(inputs, "tensors", enable_batch_invariant=True)
        assert_same_bits("replayed and eager out", out, eager_out)
        assert_same_bits("replayed and eager lse", lse, eager_lse)


_MISSING_KERNEL = """
import torch
import rawmla
from rawmla.testing import DenseCase, make_dense_inputs

inputs = make_dense_inputs(DenseCase(b=2, h_q=16, s_k=300))
arguments = (inputs.q, inputs.k_cache, inputs.block_table, inputs.cache_seqlens, 512)
graph = torch.cuda.CUDAGraph()
metadata, _ = rawmla.get_mla_metadata()
try:
    with torch.cuda.graph(graph):
        rawmla.flash_mla_with_kvcache(*arguments, metadata)
except rawmla.KernelNotReadyError as error:
    assert "warmup" in str(error), error
    print("refused")
torch.cuda.synchronize()
metadata, _ = rawmla.get_mla_metadata()
out, _ = rawmla.flash_mla_with_kvcache(*arguments, metadata)
assert bool(out.isfinite().all())
graph = torch.cuda.CUDAGraph()
metadata, _ = rawmla.get_mla_metadata()
with torch.cuda.graph(graph):
    captured, _ = rawmla.flash_mla_with_kvcache(*arguments, metadata)
graph.replay()
assert torch.equal(captured, out)
print("captured")
"""

_WARMED_UP = """
import torch
import rawmla
from rawmla.testing import DenseCase, make_dense_inputs

rawmla.warmup()
inputs = make_dense_inputs(DenseCase(b=2, h_q=16, s_k=300))
graph = torch.cuda.CUDAGraph()
metadata, _ = rawmla.get_mla_metadata()
with torch.cuda.graph(graph):
    out, _ = rawmla.flash_mla_with_kvcache(
        inputs.q, inputs.k_cache, inputs.block_table, inputs.cache_seqlens, 512, metadata
    )
graph.replay()
assert bool(out.isfinite().all())
print("captured")
"""


@pytest.mark.parametrize(
    ("program", "expected"),
    ((_MISSING_KERNEL, ["refused", "captured"]), (_WARMED_UP, ["captured"])),
    ids=("kernel missing", "after warmup"),
)
def test_capture_in_a_fresh_process(program: str, expected: list[str]) -> None:
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == expected
