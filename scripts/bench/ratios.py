"""Comparing figures with other libraries and with stored runs, only ever with figures taken the same way."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import record
from .cases import OURS, Row
from .families import FAMILIES, Family, family_of, known, table

WAYS = {"rested": "us", "no rests": "unrested_us", "sustained": "sustained_us"}
"""How a figure was taken -> the field of a row that holds it (docs/benchmark.md)."""

STORED_WAY = "no rests"
"""How stored times of other libraries were taken."""


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


def _of_run(rows: Iterable[Row], label: str) -> list[Stored]:
    """The rows that have a time; a case that failed has none."""
    found = [
        Stored(label, row["case"], {way: float(row[key]) for way, key in WAYS.items() if key in row})
        for row in known(rows)
    ]
    return [stored for stored in found if stored.times]


def _of_libraries(data: dict[str, Any]) -> list[Stored]:
    """Lists of rows by library: of a key, what stands before an @ or a comma is its name."""
    return [
        Stored(key.partition("@")[0].partition(",")[0], row["case"], {STORED_WAY: float(row["us"])})
        for key, rows in data.items()
        if isinstance(rows, list)
        for row in rows
        if row["case"] in table()
    ]


def load(path: Path) -> list[Stored]:
    """Stored times of this benchmark's cases: of a record, as --json writes it, or of other libraries, as
    docs/peers-h200.json has them. Raises ValueError when the file cannot be read or holds no such time.
    """
    try:
        data = json.loads(path.read_text())
        found: list[Stored] = []
        if "parts" in data:
            found = _of_run(record.latest(record.read(path), "bench"), path.stem)
        else:
            found = _of_libraries(data)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: {type(error).__name__}: {error}") from None
    if not found:
        raise ValueError(f"{path}: no times of this benchmark's cases")
    return found


def pairs(row: Row, stored: Sequence[Stored]) -> list[Pair]:
    """Our figures of a row beside each stored time and each library that ran beside it.

    A stored time counts once, for the first way that both were taken, and of several the least; a library
    that ran beside for each way.
    """
    found: dict[tuple[str, str], Pair] = {}
    for other in stored:
        way = next((way for way in other.times if WAYS[way] in row), None)
        if other.case == row["case"] and way is not None:
            pair = Pair(other.label, way, other.times[way], row[WAYS[way]])
            first = found.setdefault((other.label, way), pair)
            found[other.label, way] = min(first, pair, key=lambda one: one.theirs)
    beside = row.get("beside", {})
    for label, figures in beside.items():
        for way, key in WAYS.items():
            if label != OURS and key in figures and key in beside[OURS]:
                label_beside = f"{label} beside"
                found[label_beside, way] = Pair(label_beside, way, figures[key], beside[OURS][key])
    return list(found.values())


def better(found: Iterable[Pair], way: str) -> Pair | None:
    """The pair with the fastest other library; None where nothing was taken that way."""
    return min((pair for pair in found if pair.way == way), key=lambda pair: pair.ratio, default=None)


def geometric_mean(values: Sequence[float]) -> float:
    """Geometric mean of positive values."""
    return math.exp(sum(math.log(value) for value in values) / len(values))


@dataclass(frozen=True)
class Mean:
    """Ratios of a family to the fastest other library, taken one way."""

    rows: int
    mean: float
    least: float
    least_case: str


@dataclass(frozen=True)
class Speed:
    """Ratios of a family by the way they were taken: "rested" and "sustained" where another library ran
    beside, else "no rests" alone, beside stored times. `peers`: the fastest other libraries, the most
    frequent first.
    """

    family: Family
    peers: str
    means: dict[str, Mean]


def summary(rows: Sequence[Row], stored: Sequence[Stored]) -> list[Speed]:
    """Return the speed of every family that has a ratio."""
    speeds = []
    for family in FAMILIES:
        own = {row["case"]: pairs(row, stored) for row in rows if family_of(row["case"]) is family}
        by_way = {
            way: [(pair, case) for case, found in own.items() if (pair := better(found, way)) is not None]
            for way in WAYS
        }
        beside = by_way["rested"] or by_way["sustained"]
        shown = [way for way in WAYS if by_way[way] and not (beside and way == STORED_WAY)]
        if shown:
            labels = Counter(pair.label.removesuffix(" beside") for pair, _ in by_way[shown[0]])
            means = {}
            for way in shown:
                ratios = [(pair.ratio, case) for pair, case in by_way[way]]
                mean = geometric_mean([ratio for ratio, _ in ratios])
                means[way] = Mean(len(ratios), mean, *min(ratios))
            speeds.append(Speed(family, ", ".join(name for name, _ in labels.most_common()), means))
    return speeds
