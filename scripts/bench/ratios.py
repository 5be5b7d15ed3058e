"""Comparing figures with other libraries and with stored runs, only ever with figures taken the same way."""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from . import record
from .cases import OURS, Row
from .families import known, table

WAYS = {"rested": "us", "no rests": "unrested_us", "sustained": "sustained_us"}
"""How a figure was taken -> the field of a row that holds it (docs/benchmark.md)."""

STORED_WAY = "no rests"
"""How stored times of other libraries were taken."""


class Stored(NamedTuple):
    """Stored times of a case, by the way they were taken."""

    label: str
    case: str
    times: dict[str, float]


class Pair(NamedTuple):
    """One time of another library or run and ours, taken the same way."""

    label: str
    way: str
    theirs: float
    ours: float

    @property
    def ratio(self) -> float:
        """Above 1: ours is faster."""
        return self.theirs / self.ours


def _of_libraries(data: dict[str, Any]) -> Iterator[Stored]:
    """Lists of rows by library: of a key, what stands before an @ or a comma is its name."""
    for key, rows in data.items():
        for row in rows if isinstance(rows, list) else ():
            if row["case"] in table():
                label = key.partition("@")[0].partition(",")[0]
                yield Stored(label, row["case"], {STORED_WAY: float(row["us"])})


def load(path: Path) -> list[Stored]:
    """Stored times of this benchmark's cases: of a record, as --json writes it, or of other libraries, as
    docs/peers-h200.json has them. Raises ValueError when the file cannot be read or holds no such time.
    """
    try:
        data = json.loads(path.read_text())
        if "parts" in data:
            rows = known(record.latest(record.read(path), "bench"))
            times = ({way: float(row[key]) for way, key in WAYS.items() if key in row} for row in rows)
            named = zip(rows, times, strict=True)
            found = [Stored(path.stem, row["case"], one) for row, one in named if one]
        else:
            found = list(_of_libraries(data))
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
    for label in (label for label in beside if label != OURS):
        for way, key in WAYS.items():
            if key in beside[label] and key in beside[OURS]:
                pair = Pair(f"{label} beside", way, beside[label][key], beside[OURS][key])
                found[pair.label, way] = pair
    return list(found.values())


def better(found: Iterable[Pair], way: str) -> Pair | None:
    """The pair with the fastest other library; None where nothing was taken that way."""
    return min((pair for pair in found if pair.way == way), key=lambda pair: pair.ratio, default=None)
