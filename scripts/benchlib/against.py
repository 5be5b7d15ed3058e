"""Comparing figures with other libraries and with stored runs, only ever with figures taken the same way."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import record
from .columns import OURS, Row
from .families import all_cases, case_named, family_of, named

WAYS = {"rested": "us", "no rests": "unrested_us", "sustained": "sustained_us"}
"""How a figure was taken -> the field of a result row that holds it (see `families.ATTENTION_METHOD`)."""

LIST_WAY = "no rests"
"""How stored times of other libraries were taken."""

NOTE = (
    "A ratio is the other library's time over ours, so above 1 rawmla is faster; both times were taken the "
    "same way. All times, except in backward rows that are timed as calls, are of CUDA graphs of identical "
    "calls: such graphs favour kernels with programmatic dependent launch (rawmla's of MLA, among others), "
    "because the start of a call overlaps the end of the one before."
)

MATCH_FIELDS = (
    "op",
    "b",
    "s_q",
    "s_k",
    "s_kv",
    "s",
    "h_q",
    "h_kv",
    "d_qk",
    "d_v",
    "page_block_size",
    "causal",
    "varlen",
    "dtype",
    "batch_invariant",
    "topk",
    "extra_topk",
    "extra_page_block_size",
    "extra_length",
    "window",
    "softcap",
    "sink",
    "query_len",
    "ctx_len",
    "d",
    "cache",
    "alibi",
    "fp8_out",
    "ragged",
    "mask",
    "extent",
    "score",
    "block_size",
    "cuda_text",
    "further",
    "captured",
)
"""Fields that identify a case in a list of other libraries' times. A stored row is of a case when every one
of these that it has is equal."""

METADATA_FIELDS = ("op", "b")

DENSE_DEFAULTS: dict[str, Any] = {"op": "dense_decode", "varlen": False, "dtype": "bf16"}
"""What a stored row of dense decoding means when it leaves a field out."""

OTHER_NAMES = {
    "page": "page_block_size",
    "extra_page": "extra_page_block_size",
    "extra_len": "extra_length",
}
"""What lists also call fields."""

LIBRARIES = {"flashmla": "FlashMLA", "fa3": "FlashAttention-3"}
"""Names in fields such as `fa3_us` -> names in tables."""

LATENCY_SUFFIX = "_us"


@dataclass(frozen=True)
class Stored:
    """Stored times of a case, by the way they were taken."""

    label: str
    case: str
    times: dict[str, float]


@dataclass(frozen=True)
class Pair:
    """One time of another library or run and ours, taken the same way."""

    label: str
    way: str
    theirs: float
    ours: float

    @property
    def ratio(self) -> float:
        """Above 1: ours is faster."""
        return self.theirs / self.ours


def _list_timings(row: Row, label: str) -> dict[str, float]:
    """Library -> µs of a list's row: `us`, or `<library>_us` and `<library>_best_us` per library."""
    if isinstance(row.get("us"), (int, float)):
        return {label: float(row["us"])}
    found: dict[str, float] = {}
    for key, value in row.items():
        if key.endswith(LATENCY_SUFFIX) and key != "meta_us" and isinstance(value, (int, float)):
            short = key.removesuffix(LATENCY_SUFFIX).removesuffix("_best")
            name = LIBRARIES.get(short, short)
            found[name] = min(float(value), found.get(name, math.inf))
    return found


def _is_of(stored: Row, fields: Row) -> bool:
    keys = METADATA_FIELDS if fields["op"] == "metadata" else MATCH_FIELDS
    return all(stored[key] == fields.get(key) for key in keys if key in stored)


def _from_list(rows: list[Any], key: str) -> list[Stored]:
    label = key.split("@")[0]
    cases = [(case.id, {"batch_invariant": False, **case.fields()}) for case in all_cases()]
    found = []
    for row in rows:
        if not isinstance(row, dict) or not ("b" in row or "s_kv" in row):
            continue
        row = {OTHER_NAMES.get(name, name): value for name, value in row.items()}
        if row.get("op", "dense_decode") == "dense_decode" and "s_kv" not in row:
            row = {**DENSE_DEFAULTS, **row}
        row.setdefault("batch_invariant", False)
        for name, us in _list_timings(row, label).items():
            found += [Stored(name, case, {LIST_WAY: us}) for case, fields in cases if _is_of(row, fields)]
    return found


def _from_run(rows: list[Row], label: str) -> list[Stored]:
    """The rows that have a time; a case that failed has none."""
    found = [
        Stored(label, row["case"], {way: float(row[key]) for way, key in WAYS.items() if key in row})
        for row in named(rows)
    ]
    return [stored for stored in found if stored.times]


def load(path: Path) -> list[Stored]:
    """Stored times of this benchmark's cases.

    Reads a file written by --json (its `rows`), a gpu_check record (the benchmarks of its `parts`), or an
    object whose list-valued keys hold rows of other libraries, the key being the library and perhaps its
    commit after an @. Raises ValueError when the file cannot be read or holds no such time.
    """
    try:
        data = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: {error}") from None
    found: list[Stored] = []
    if isinstance(data, dict) and isinstance(data.get("rows"), list):
        found = _from_run(data["rows"], path.stem)
    elif isinstance(data, dict) and "parts" in data:
        for version, parts in record.compilers(record.read(path)).items():
            found += _from_run(record.latest(parts, "bench"), f"{path.stem} NVRTC {version}")
    elif isinstance(data, dict):
        for key, value in data.items():
            if isinstance(value, list):
                found += _from_list(value, key)
    if not found:
        raise ValueError(
            f"{path}: no times of this benchmark's cases "
            "(expected `rows`, `parts`, or lists of objects with `b` and `us`)"
        )
    return found


def pairs(row: Row, stored: Sequence[Stored]) -> list[Pair]:
    """Our figures of a row beside each stored time and each library that ran beside it.

    A stored time counts once, for the first way that both were taken; a library that ran beside for each way.
    """
    found: dict[tuple[str, str], Pair] = {}
    for other in stored:
        if other.case != row["case"]:
            continue
        way = next((way for way in other.times if WAYS[way] in row), None)
        if way is not None:
            pair = Pair(other.label, way, other.times[way], row[WAYS[way]])
            known = found.setdefault((other.label, way), pair)
            if pair.theirs < known.theirs:
                found[other.label, way] = pair
    beside = row.get("beside", {})
    for label, figures in beside.items():
        for way, key in WAYS.items():
            if label != OURS and key in figures and key in beside[OURS]:
                found[f"{label} beside", way] = Pair(f"{label} beside", way, figures[key], beside[OURS][key])
    return list(found.values())


def better(found: Sequence[Pair], way: str) -> Pair | None:
    """The pair with the fastest other library; None where nothing was taken that way."""
    return min((pair for pair in found if pair.way == way), key=lambda pair: pair.ratio, default=None)


def geometric_mean(values: Sequence[float]) -> float:
    """Geometric mean of positive values."""
    return math.exp(sum(math.log(value) for value in values) / len(values))


@dataclass(frozen=True)
class Mean:
    """Ratios to the better library over a family of cases, or over one group of it (`group`)."""

    family: str
    group: str
    way: str
    mean: float
    least: float
    least_case: str
    rows: int


def means(rows: Sequence[Row], stored: Sequence[Stored]) -> list[Mean]:
    """Per way and family the ratios to the better library, then those of its groups where it has several."""
    answer = []
    for way in WAYS:
        families: dict[str, dict[str, list[tuple[float, str]]]] = {}
        for row in rows:
            pair = better(pairs(row, stored), way)
            if pair is not None:
                groups = families.setdefault(family_of(row["case"]).name, {})
                groups.setdefault(case_named(row["case"]).group, []).append((pair.ratio, row["case"]))
        for family, groups in families.items():
            everything = [item for found in groups.values() for item in found]
            parts = [("all", everything), *(groups.items() if len(groups) > 1 else ())]
            for group, found in parts:
                least, case = min(found)
                mean = geometric_mean([ratio for ratio, _ in found])
                answer.append(Mean(family, group, way, mean, least, case, len(found)))
    return answer
