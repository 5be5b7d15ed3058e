"""The families of cases: an entry says which cases a family has, how they are timed, what its table shows.

A new family is one entry of FAMILIES. What times it needs torch and a GPU and is imported on first use.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Protocol

from . import (
    cache_cases,
    cases,
    columns,
    flex_backward_cases,
    flex_cases,
    mha_backward_cases,
    mha_cases,
    prefix_cases,
)
from .columns import Column, Row


class Case(Protocol):
    """What every case has; see `cases`."""

    @property
    def id(self) -> str:
        """The name of the case."""

    @property
    def group(self) -> str:
        """The cases of the family that its ratios are averaged with."""

    def fields(self) -> dict[str, Any]:
        """What identifies the case, as the leading fields of a result row."""


@dataclass(frozen=True)
class Settings:
    """How to measure: graph replays per figure, seconds of sustained load (0: none), and whether other
    libraries run beside.
    """

    replays: int
    sustain_seconds: float
    compare: bool


@dataclass(frozen=True)
class Family:
    """A family of cases. Families of attention are also put under load, and appear in the roofline. `small`
    is a case for machines without a GPU: the words after `python -m tests.emulator`. It is empty for plans,
    which the small case of decoding makes.
    """

    name: str
    cases: Callable[[], Sequence[Case]]
    measure: Callable[[Any, Settings], Row]
    columns: tuple[Column, ...]
    method: str = ""
    small: str = ""
    attention: bool = False

    @property
    def title(self) -> str:
        """The name as a heading."""
        return self.name[0].upper() + self.name[1:]


def _time_dense(case: cases.DecodeCase, settings: Settings) -> Row:
    from . import measure, peers

    return measure.time_attention(case, measure.prepare, settings, peers.DENSE)


def _time_sparse(case: cases.SparseCase, settings: Settings) -> Row:
    from . import measure, peers, sparse_measure

    return measure.time_attention(case, sparse_measure.prepare, settings, peers.SPARSE)


def _time_prefill(case: cases.PrefillCase, settings: Settings) -> Row:
    from . import measure, peers, prefill_measure

    # No other library has prefill from an FP8 cache: its row has the time of gathering first.
    beside = peers.PREFILL if case.layout == "bf16" else ()
    return measure.time_attention(case, prefill_measure.prepare, settings, beside)


def _time_mha(case: mha_cases.MhaCase, settings: Settings) -> Row:
    from . import measure, mha_measure, peers

    # Times of its peers that are worth a comparison are those of the same process.
    return measure.time_attention(case, mha_measure.prepare, replace(settings, compare=True), peers.MHA)


def _time_mha_backward(case: mha_backward_cases.MhaBackwardCase, settings: Settings) -> Row:
    from . import backward_peers, mha_backward_measure, turns

    return turns.time_in_turns(case, mha_backward_measure.prepare, settings, backward_peers.MHA)


def _time_prefix(case: prefix_cases.PrefixCase, settings: Settings) -> Row:
    from . import measure, prefix_measure

    return measure.time_attention(case, prefix_measure.prepare, settings, ())


def _time_flex(case: flex_cases.FlexCase, settings: Settings) -> Row:
    from . import flex_measure, measure, peers

    beside = peers.FLEX if case.is_compared else ()
    return measure.time_attention(case, flex_measure.prepare, replace(settings, compare=True), beside)


def _time_flex_backward(case: flex_backward_cases.FlexBackwardCase, settings: Settings) -> Row:
    from . import backward_peers, flex_backward_measure, turns

    beside = backward_peers.FLEX if case.is_compared else ()
    return turns.time_in_turns(case, flex_backward_measure.prepare, settings, beside)


def _time_block_mask(case: flex_cases.BlockMaskCase, settings: Settings) -> Row:
    from . import flex_measure

    return flex_measure.time_block_mask(case, settings.replays)


def _time_metadata(case: cases.MetadataCase, settings: Settings) -> Row:
    from . import measure

    return measure.time_metadata_case(case, settings.replays)


def _time_around(case: cache_cases.Case, settings: Settings) -> Row:
    from . import measure

    return measure.time_cache_case(case, settings.replays)


def _sparse(layout: str) -> Callable[[], Sequence[Case]]:
    return lambda: [case for case in cases.sparse_cases() if case.layout == layout]


ATTENTION_METHOD = (
    "Each figure is the median over graph replays of one call, main kernel and combine together, in a CUDA "
    "graph of 10 identical calls that was replayed for at least 20 ms before. Rested: the GPU idles before "
    "the case and, where warm-up and replays last longer than 30 ms together, between them for as long as 20 "
    "replays. No rests: inputs, warm-up and replays follow each other at once, as in most published figures. "
    "Sustained: the graph is replayed without a pause; mean of the second half of that load, with power and "
    "SM clock of that half. Identical calls find in L2 what fits there; 'cold L2' rotates page sets larger "
    "than L2 instead. Rates and share are of the rested figure; share: of the nearer roof, with the higher "
    "of the two ceilings of the run. Metadata: slope between graphs of 20 and 120 calls."
)
DENSE_METHOD = (
    f"Dense decoding: FLOPs = 2 * s_q * h_q * sum(lengths) * (d_qk + {cases.D_V}); bytes = cache read once + "
    "q + out."
)
SPARSE_METHOD = (
    f"Sparse decoding: FLOPs = 2 * h_q * selected tokens * (d_qk + {cases.D_V}); bytes = each selected token "
    "as often as it is selected (656 or 584 bytes, or 2 * d_qk), q and out; indices are a random subset of "
    "the request's s_k tokens."
)
PREFILL_METHOD = (
    "Sparse prefill: for the rested and the sustained figure a graph has fewer calls where 10 are more than "
    f"5 TFLOP together; FLOPs = 2 * s_q * h_q * topk * (d_qk + {cases.D_V}); bytes = each selected token "
    "once, however often it is selected, q and out; indices are a random subset of the s_kv tokens. "
    "'Gathered first': all tokens of a paged cache gathered into bf16 rows, then bf16 prefill, together (in "
    "brackets the gather alone)."
)
MHA_METHOD = (
    "Dense attention: cuDNN (torch's scaled_dot_product_attention) and, where it can be imported, "
    "FlashAttention-4 run beside, in turns with rawmla: medians of three rounds, the load shared out over "
    "them. The stand-in for FlashAttention-4 is 0.90 of cuDNN's time, 0.75 with d 96: about their ratio "
    "in earlier runs that had both. Fewer calls in a graph as for sparse prefill; FLOPs = 2 * h_q * pairs * "
    "(d_qk + d_v) over the pairs of query and key that are not masked, a causal mask counted as half of a "
    "square; bytes = q, k, v and out once."
)
PREFIX_METHOD = (
    "Prefix prefill: fewer calls in a graph as for sparse prefill; FLOPs = 4 * d * h_q * positions that the "
    "queries see; bytes = q, k and v of the new tokens, what is seen of the cache, and out once. The stored "
    "times are those of vLLM's Triton kernel."
)
FLEX_METHOD = (
    "Flex attention: torch's flex_attention runs beside, compiled before it is timed, as Triton and, where "
    "flash_attn.cute can be imported, with the FLASH backend; in turns as for dense attention, but not "
    "beside a bias table, a prefix and other forms of the causal case. Fewer calls in a graph as for sparse "
    f"prefill; FLOPs = 4 * d * h_q * positions in blocks of {flex_cases.BLOCK} x {flex_cases.BLOCK} of which "
    "any is attended; bytes = q, k, v and out once, lse and max_scores where asked for."
)
BACKWARD_METHOD = (
    "Backward: the plain functions, from out, lse and a gradient of out that are there already, in graphs of"
    " at most 1.5 TFLOP or one call; of the libraries beside, the gradients of q, k and v by "
    "torch.autograd.grad: a row with a library beside is timed as calls that are enqueued while the GPU "
    "waits, ours too. Every figure is the median of three rounds in which all take turns, also where nothing"
    " runs beside, and the load is shared out over them. Deterministic: the rested time with "
    "deterministic=True, of graphs in every row. Dense: FLOPs = 2 * h_q * pairs * (3 * d_qk + 2 * d_v) over "
    "the pairs of the forward; the stand-in for FlashAttention-4 is 0.87 of cuDNN's time, 0.75 with d 96, "
    "1.11 with d 256, 0.57 with d 192/128 and no mask: about their ratio in earlier runs that had both. "
    "Flex: FLOPs = 10 * d * h_q * positions in the blocks that the forward counts; a captured table or "
    "factor has a gradient too, whose cost is the ratio to the time without it, and nothing runs beside a "
    "table or a factor. Bytes = q, k, v, out, dout, lse, dq, dk and dv once."
)
BLOCK_MASK_METHOD = (
    "Block masks: create_block_mask of a causal Python function, traced before; in a graph of 10 calls, and "
    "the median of eager calls that are each waited for."
)
AROUND_METHOD = (
    "Around decoding: bytes = every token or row read and written once; what fits in L2 comes from there."
)

SMALL_ATTENTION = "b=1 s_q=200 s_k=300 h_q=2 h_kv=1"

FAMILIES = (
    Family(
        "dense decoding, MLA",
        cases.decode_cases,
        _time_dense,
        columns.DECODE,
        DENSE_METHOD,
        small="dense_decode b=2 s_q=2 s_k=300 h_q=16 causal=True",
        attention=True,
    ),
    *(
        Family(
            f"sparse decoding, {name} cache",
            _sparse(layout),
            _time_sparse,
            columns.DECODE,
            SPARSE_METHOD,
            small=f"sparse_decode b=2 s_k=200 h_q=64 topk=140 layout={layout}",
            attention=True,
        )
        for name, layout in (("V3.2", "v32"), ("V4", "model1"), ("bf16", "bf16"))
    ),
    Family(
        "sparse prefill, MLA",
        cases.prefill_cases,
        _time_prefill,
        columns.PREFILL,
        PREFILL_METHOD,
        small="sparse_prefill b=5 s_k=200 h_q=64 topk=140 layout=bf16 page_block_size=1 shared=True",
        attention=True,
    ),
    Family(
        "dense attention",
        mha_cases.mha_cases,
        _time_mha,
        columns.MHA,
        MHA_METHOD,
        small=f"mha {SMALL_ATTENTION} d_qk=128 d_v=128 causal=True",
        attention=True,
    ),
    Family(
        "prefix prefill",
        prefix_cases.prefix_cases,
        _time_prefix,
        columns.PREFIX,
        PREFIX_METHOD,
        small="prefix query_lengths=(5,100) contexts=(30,200)",
        attention=True,
    ),
    Family(
        "flex attention",
        flex_cases.flex_cases,
        _time_flex,
        columns.FLEX,
        FLEX_METHOD,
        small=f"flex {SMALL_ATTENTION} mask=causal score=softcap",
        attention=True,
    ),
    Family(
        "dense attention backward",
        mha_backward_cases.mha_backward_cases,
        _time_mha_backward,
        columns.MHA_BACKWARD,
        BACKWARD_METHOD,
        small=f"mha_backward {SMALL_ATTENTION} d_qk=128 d_v=128 causal=True",
        attention=True,
    ),
    Family(
        "flex attention backward",
        flex_backward_cases.flex_backward_cases,
        _time_flex_backward,
        columns.FLEX_BACKWARD,
        BACKWARD_METHOD,
        small=f"flex_backward {SMALL_ATTENTION} mask=causal 'score=head scale'",
        attention=True,
    ),
    Family(
        "block masks",
        flex_cases.block_mask_cases,
        _time_block_mask,
        columns.BLOCK_MASKS,
        BLOCK_MASK_METHOD,
        small="block_mask b=1 s_q=300 s_k=300 h_q=1 h_kv=1 mask=causal",
    ),
    Family(
        "plan of a decoding step",
        lambda: [cases.MetadataCase(b) for b in cases.METADATA_BATCHES],
        _time_metadata,
        columns.METADATA,
    ),
    Family(
        "around decoding",
        cache_cases.all_cases,
        _time_around,
        columns.AROUND,
        AROUND_METHOD,
        small="cache b=3 s_k=64 layout=v32",
    ),
)


@cache
def _table() -> dict[str, tuple[Family, Case]]:
    return {case.id: (family, case) for family in FAMILIES for case in family.cases()}


def all_cases() -> list[Case]:
    """Every case of the benchmark, in the order of the tables."""
    return [case for _, case in _table().values()]


def family_of(case_id: str) -> Family:
    """The family of the case of this name."""
    return _table()[case_id][0]


def case_named(case_id: str) -> Case:
    """The case of this name."""
    return _table()[case_id][1]


def select(pattern: str | None) -> list[Case]:
    """The cases whose name contains a match of the regular expression; all of them without one.

    Raises ValueError when it is no regular expression and when nothing matches, so that a typing error cannot
    pass for an empty run.
    """
    try:
        chosen = [case for case in all_cases() if re.search(pattern or "", case.id)]
    except re.error as error:
        raise ValueError(f"expected a regular expression, got {pattern!r} ({error})") from None
    if not chosen:
        raise ValueError(f"no case matches {pattern!r} (--list prints their names)")
    return chosen


def named(rows: Sequence[Row]) -> list[Row]:
    """The rows whose case this benchmark still has, in the order of the tables."""
    by_case = {row.get("case"): row for row in rows}
    return [by_case[name] for name in _table() if name in by_case]


def methods(chosen: Sequence[Case]) -> str:
    """How the cases are measured and counted."""
    texts = [ATTENTION_METHOD, *(family_of(case.id).method for case in chosen)]
    return " ".join(dict.fromkeys(text for text in texts if text))
