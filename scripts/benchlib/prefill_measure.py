"""Sparse prefill on the GPU, made ready to be timed by `measure`."""

from dataclasses import dataclass
from typing import Any

import torch

import rawmla
from kit import torch_reference
from kit.sparse import SparseCase as Layout
from kit.sparse import SparseInputs, make_cache

from .cases import PrefillCase
from .columns import Row
from .measure import Prepared, calls_per_graph, l2_bytes, rotated_sets
from .timing import CALLS_PER_GRAPH, repeat, rest, time_graph

RANDOM_AT_A_TIME = 1 << 26
"""Random numbers drawn at a time for the indices (256 MiB), which bounds the memory that they take."""

SAMPLED_QUERIES = 8


@dataclass(frozen=True)
class PrefillArrays:
    """Device arrays of a prefill case. `kv_sets` holds s_kv tokens per rotated set; set 0 is the plain case.

    `positions` are the selected tokens; `indices` are the rows or the slots where they lie. A paged cache has
    its pages in the order of `block_table`, the same in each set; bf16 rows have none.
    """

    q: Any
    kv_sets: list[Any]
    indices: Any
    positions: Any
    block_table: Any


def make_inputs(case: PrefillCase, sets: int = 1, device: str = "cuda") -> PrefillArrays:
    """Inputs on a device: q normal(0, 1) clamped to [-1, 1], tokens normal(0, 0.1), of a paged cache
    quantised and in pages in a random order, indices a random subset of the tokens.

    `sets` times as many tokens serve runs whose data must not stay in L2.
    """
    torch.manual_seed(0)
    q = torch.randn(case.s_q, case.h_q, case.d_qk, device=device).clamp_(-1, 1).bfloat16()
    positions = random_subsets(case, device)
    if case.layout == "bf16":
        kv = torch.empty(sets, case.s_kv, 1, case.d_qk, dtype=torch.bfloat16, device=device).normal_(0, 0.1)
        return PrefillArrays(q, list(kv), positions, positions, None)
    page = case.page_block_size
    pages = -(-case.s_kv // page)
    k_cache = make_cache(_layout(case, 1), sets * pages, page, device)
    table = torch.randperm(pages, device=device)
    indices = (table[positions // page] * page + positions % page).int()
    kv_sets = [k_cache[start : start + pages] for start in range(0, sets * pages, pages)]
    return PrefillArrays(q, kv_sets, indices, positions, table.int()[None])


def random_subsets(case: PrefillCase, device: str) -> Any:
    """`topk` distinct tokens of the s_kv per query token, in a random order: int32 [s_q, 1, topk]."""
    found = torch.empty(case.s_q, 1, case.topk, dtype=torch.int32, device=device)
    step = max(RANDOM_AT_A_TIME // case.s_kv, 1)
    for rows in found.split(step):
        # The places of the largest random numbers, largest first: any subset, in any order, equally likely.
        rows[:, 0] = torch.rand(len(rows), case.s_kv, device=device).topk(case.topk).indices
    return found


def _layout(case: PrefillCase, b: int) -> Layout:
    """The case as the test tools know it: `b` query tokens as requests that share a cache."""
    return Layout(b=b, h_q=case.h_q, layout=case.layout, d_qk=case.d_qk)


def check_output(case: PrefillCase, inputs: PrefillArrays, out: Any) -> float:
    """Relative L2 error of some query tokens, the first and the last among them, against float64.

    Raises AssertionError at 1 % or NaN: the time of a wrong result means nothing.
    """
    count = min(SAMPLED_QUERIES, case.s_q)
    queries = torch.linspace(0, case.s_q - 1, count, dtype=torch.float64).round().long().to(out.device)
    kv = inputs.kv_sets[0]
    chosen = SparseInputs(
        _layout(case, count),
        q=inputs.q[queries][:, None],
        k_cache=kv[None] if case.layout == "bf16" else kv,
        indices=inputs.indices[queries],
    )
    want, _ = torch_reference.sparse_decode(chosen)
    wrong = out[queries][:, None].double() - want
    error = float((wrong.flatten(1).norm(dim=1) / want.flatten(1).norm(dim=1)).max())
    assert error < 0.01, f"{case.id}: a query token has a relative error of {error}"
    return error


def attend(case: PrefillCase, inputs: PrefillArrays, number: int) -> Any:
    """A call over one of the sets; returns out."""
    return rawmla.flash_mla_sparse_fwd(
        inputs.q,
        inputs.kv_sets[number],
        inputs.indices,
        case.d_qk**-0.5,
        is_fp8_kvcache=case.layout != "bf16",
        enable_batch_invariant=case.batch_invariant,
    )[0]


def time_gathered(case: PrefillCase, inputs: PrefillArrays, replays: int) -> Row:
    """The other way to prefill from a paged cache: gather its tokens into bf16 rows and attend those. Both
    together, and the gather alone.
    """
    device = inputs.q.device
    rows = torch.empty(case.s_kv, case.d_qk, dtype=torch.bfloat16, device=device)
    lengths = torch.full((1,), case.s_kv, dtype=torch.int32, device=device)
    starts = torch.zeros_like(lengths)

    def gather(_: int) -> None:
        rawmla.gather_kv_cache(inputs.kv_sets[0], inputs.block_table, lengths, rows, workspace_starts=starts)

    def both(number: int) -> Any:
        gather(number)
        return rawmla.flash_mla_sparse_fwd(inputs.q, rows[:, None], inputs.positions, case.d_qk**-0.5)[0]

    check_output(case, inputs, both(0))
    rest()
    count = calls_per_graph(case)
    return {
        "gathered_us": time_graph(repeat(both, count), count, replays).us,
        "gather_us": time_graph(repeat(gather, CALLS_PER_GRAPH), CALLS_PER_GRAPH, replays).us,
    }


def prepare(case: PrefillCase) -> Prepared:
    """Inputs of a case and a first call, whose result is checked; of a paged cache also the time with
    gathering first.
    """
    sets = rotated_sets(case, l2_bytes())
    inputs = make_inputs(case, sets)
    error = check_output(case, inputs, attend(case, inputs, 0))

    def more(replays: int) -> Row:
        return {} if inputs.block_table is None else time_gathered(case, inputs, replays)

    return Prepared(
        inputs, lambda number: attend(case, inputs, number), sets, error, more, calls_per_graph(case)
    )
