"""The families of cases: an entry says which cases a family has and how they are measured."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from . import around, dense, flex, measure, mla, prefix
from .cases import Case, Row
from .measure import IN_TURNS


@dataclass(frozen=True)
class Family:
    """A family of cases. `measure` takes a case, rounds, replays and the seconds of load. `small` is a case
    for machines without a GPU: the words after `python -m tests.emulator`. It is empty for plans, which the
    small case of decoding makes.
    """

    name: str
    cases: Callable[[], Sequence[Case]]
    small: str = ""
    rounds: int = 1
    measure: Callable[..., Row] = measure.time_attention

    @property
    def title(self) -> str:
        """The name as a heading."""
        return self.name[0].upper() + self.name[1:]

    @property
    def attention(self) -> bool:
        """Whether its cases are put under load."""
        return self.measure is measure.time_attention


SMALL = "b=1 s_q=200 s_k=300 h_q=2 h_kv=1"

FAMILIES = (
    Family("dense decoding, MLA", mla.decode_cases, "dense_decode b=2 s_q=2 s_k=300 h_q=16 causal=True"),
    *(
        Family(
            f"sparse decoding, {name} cache",
            lambda layout=layout: mla.sparse_cases(layout),  # type: ignore[misc]
            f"sparse_decode b=2 s_k=200 h_q=64 topk=140 layout={layout}",
        )
        for name, layout in (("V3.2", "v32"), ("V4", "model1"), ("bf16", "bf16"))
    ),
    Family(
        "sparse prefill, MLA",
        mla.prefill_cases,
        "sparse_prefill b=5 s_k=200 h_q=64 topk=140 layout=bf16 page_block_size=1 shared=True",
    ),
    Family("dense attention", dense.forward_cases, f"mha {SMALL} d_qk=128 d_v=128 causal=True", IN_TURNS),
    Family("prefix prefill", prefix.prefix_cases, "prefix query_lengths=(5,100) contexts=(30,200)"),
    Family("flex attention", flex.forward_cases, f"flex {SMALL} mask=causal score=softcap", IN_TURNS),
    Family(
        "dense attention backward",
        dense.backward_cases,
        f"mha_backward {SMALL} d_qk=128 d_v=128 causal=True",
        IN_TURNS,
    ),
    Family(
        "flex attention backward",
        flex.backward_cases,
        f"flex_backward {SMALL} mask=causal 'score=head scale'",
        IN_TURNS,
    ),
    Family(
        "block masks",
        lambda: [flex.BlockMaskCase(8192)],
        "block_mask b=1 s_q=300 s_k=300 h_q=1 h_kv=1 mask=causal",
        measure=measure.time_moving,
    ),
    Family("plan of a decoding step", mla.metadata_cases, measure=mla.time_metadata),
    Family("around decoding", around.around_cases, "cache kind=v32 n=64", measure=measure.time_moving),
)


@cache
def table() -> dict[str, tuple[Family, Case]]:
    """Family and case by the name of the case, in the order of the tables."""
    return {case.id: (family, case) for family in FAMILIES for case in family.cases()}


def family_of(case_id: str) -> Family:
    """The family of the case of this name."""
    return table()[case_id][0]


def select(pattern: str | None) -> list[Case]:
    """The cases whose name contains a match of the regular expression; all of them without one.

    Raises ValueError when it is no regular expression and when nothing matches, so that a typing error cannot
    pass for an empty run.
    """
    try:
        chosen = [case for _, case in table().values() if re.search(pattern or "", case.id)]
    except re.error as error:
        raise ValueError(f"expected a regular expression, got {pattern!r} ({error})") from None
    if not chosen:
        raise ValueError(f"no case matches {pattern!r} (--list prints their names)")
    return chosen


def known(rows: Iterable[Row]) -> list[Row]:
    """The rows whose case this benchmark still has, in the order of the tables."""
    by_case = {row.get("case"): row for row in rows}
    return [by_case[name] for name in table() if name in by_case]
