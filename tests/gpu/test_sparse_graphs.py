"""CUDA graphs of sparse calls: captured once, replayed while indices, lengths and plans change in place."""

import random
from typing import Any

import pytest
from gpu_support import (
    assert_same_bits,
    poisoned_allocations,
    sparse_arguments,
    sparse_check,
    sparse_decode,
    sparse_plan,
    sparse_plan_arguments,
    torch,
)

import rawmla
from rawmla.testing import SparseCase, SparseInputs, make_sparse_inputs
from rawmla.testing.sparse import INT_MAX

FULL = 2**20  # longer than any row of indices
CASES = (
    SparseCase(b=1, h_q=128, s_k=9000, topk=8192, layout="model1", lengths=(FULL,), sink=True),
    SparseCase(b=6, s_q=2, h_q=16, s_k=2500, topk=2048, lengths=(FULL,) * 6),
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
    SparseCase(b=70, h_q=66, s_k=600, topk=300, layout="bf16", d_qk=576, lengths=(FULL,) * 70),
)


class Replays:
    """The static inputs of a graph, changed in place between replays.

    Rows of indices are shuffled; past the lengths they name slot 0, which is poison, or nothing.
    """

    def __init__(self, case: SparseCase) -> None:
        self.inputs = make_sparse_inputs(case)
        self.draw = torch.Generator(device="cuda").manual_seed(5)
        self.sources = [(self.inputs.indices, self.inputs.topk_length)]
        if case.extra_topk:
            self.sources.append((self.inputs.extra_indices, self.inputs.extra_topk_length))
        self.chosen = [indices.clone() for indices, _ in self.sources]

    def lengths_to_try(self) -> list[list[int]]:
        """Lengths of the main cache, for every request; those of an extra cache follow them."""
        b, topk = self.inputs.case.b, self.inputs.case.topk
        draw = random.Random(7)
        some = [draw.randint(0, topk) for _ in range(b)]
        one = [0] * (b - 1) + [topk]
        zero, full, short = [0] * b, [topk] * b, [1 + i % 3 for i in range(b)]
        return [zero, full, zero, some, one, short, full, full, some]

    def set_lengths(self, lengths: list[int]) -> SparseInputs:
        """Put these lengths and newly shuffled indices in place; an extra cache gets the reversed share."""
        topk = self.inputs.case.topk
        shares = [[length / topk for length in lengths], [length / topk for length in reversed(lengths)]]
        for (indices, length), chosen, share in zip(self.sources, self.chosen, shares, strict=False):
            width = indices.shape[2]
            order = torch.rand(indices.shape, generator=self.draw, device="cuda").argsort(dim=2)
            new = torch.tensor([round(part * width) for part in share], dtype=torch.int32, device="cuda")
            past = torch.arange(width, device="cuda") >= new[:, None, None]
            garbage = torch.where(order % 2 == 0, 0, INT_MAX)
            indices.copy_(torch.where(past, garbage, chosen.gather(2, order)))
            length.copy_(new)
        return self.inputs


def capture(work: Any) -> tuple["torch.cuda.CUDAGraph", Any]:
    """Capture what `work` enqueues; its result lives in the graph's memory, poisoned at every replay."""
    graph = torch.cuda.CUDAGraph()
    with poisoned_allocations(), torch.cuda.graph(graph):
        result = work()
    return graph, result


def call(inputs: SparseInputs, metadata: Any, num_splits: Any = None, **kwargs: Any) -> Any:
    """A call with a plan that is there already."""
    return rawmla.flash_mla_with_kvcache(
        *sparse_arguments(inputs), metadata, num_splits, **inputs.keywords(), **kwargs
    )


@pytest.mark.parametrize("invariant", (False, True))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_plan_computed_inside_the_graph(case: SparseCase, invariant: bool) -> None:
    replays = Replays(case)
    inputs = replays.inputs
    sparse_decode(inputs, enable_batch_invariant=invariant)  # loads the kernels
    metadata, _ = rawmla.get_mla_metadata(enable_batch_invariant=invariant)
    graph, (out, lse) = capture(lambda: call(inputs, metadata))
    for lengths in replays.lengths_to_try():
        replays.set_lengths(lengths)
        graph.replay()
        sparse_check(inputs, (out, lse))
        eager_out, eager_lse = sparse_decode(inputs, enable_batch_invariant=invariant)
        assert_same_bits("replayed and eager out", out, eager_out)
        assert_same_bits("replayed and eager lse", lse, eager_lse)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_one_object_for_several_layers(case: SparseCase) -> None:
    """The first layer computes the plan inside the graph, the others read it there."""
    replays = Replays(case)
    inputs = replays.inputs
    sparse_decode(inputs)
    metadata, _ = rawmla.get_mla_metadata()
    graph, results = capture(lambda: [call(inputs, metadata) for _ in range(3)])
    for lengths in replays.lengths_to_try()[:5]:
        replays.set_lengths(lengths)
        graph.replay()
        sparse_check(inputs, results[0])
        for out, lse in results[1:]:
            assert_same_bits("later layer's out", out, results[0][0])
            assert_same_bits("later layer's lse", lse, results[0][1])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_plan_of_tensors_made_before(case: SparseCase) -> None:
    """A plan for all of topk serves every length: parts skip the blocks that a request does not have."""
    replays = Replays(case)
    inputs = replays.inputs
    metadata, num_splits = sparse_plan(inputs, "tensors")
    call(inputs, metadata, num_splits)
    graph, (out, lse) = capture(lambda: call(inputs, metadata, num_splits))
    for lengths in replays.lengths_to_try():
        replays.set_lengths(lengths)
        graph.replay()
        sparse_check(inputs, (out, lse))


@pytest.mark.parametrize("case", CASES[1:3], ids=lambda case: case.id)
def test_plan_of_tensors_recomputed_inside_the_graph(case: SparseCase) -> None:
    replays = Replays(case)
    inputs = replays.inputs
    metadata, num_splits = sparse_plan(inputs, "tensors")
    arguments = sparse_plan_arguments(inputs)
    call(inputs, metadata, num_splits)

    def work() -> Any:
        rawmla.get_mla_metadata(*arguments, out=(metadata, num_splits))
        return call(inputs, metadata, num_splits)

    graph, (out, lse) = capture(work)
    for lengths in replays.lengths_to_try():
        replays.set_lengths(lengths)
        metadata.fill_(-1)
        graph.replay()
        sparse_check(inputs, (out, lse))


def test_out_given_and_other_memory_reused_between_replays() -> None:
    case = CASES[2]
    replays = Replays(case)
    inputs = replays.inputs
    sparse_decode(inputs)
    metadata, _ = rawmla.get_mla_metadata()
    buffer = torch.full((12, 2, 80, 512), -7.0, dtype=torch.bfloat16, device="cuda")
    given = buffer[:, :, 8:72]
    graph, (out, lse) = capture(lambda: call(inputs, metadata, out=given))
    assert out is given
    for lengths in replays.lengths_to_try():
        replays.set_lengths(lengths)
        given.fill_(float("nan"))
        other = [torch.full((n << 20,), float("nan"), device="cuda") for n in (1, 2, 8)]
        graph.replay()
        sparse_check(inputs, (out, lse))
        del other
    given.fill_(-7.0)
    assert bool((buffer == -7.0).all())
