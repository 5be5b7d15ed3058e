"""Comparing figures with other libraries and with stored runs, only ever with figures taken the same way."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from . import ROOT, record
from .cases import OURS, Row
from .families import known

PEERS = ROOT / "docs" / "peers-h200.json"
"""Times of other libraries."""

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


def peers(device: str) -> list[Stored]:
    """Times of other libraries on this device; none of another device's."""
    data = json.loads(PEERS.read_text())
    libraries = {key: rows for key, rows in data.items() if isinstance(rows, list)}
    return [
        Stored(key.partition("@")[0].partition(",")[0], row["case"], {STORED_WAY: row["us"]})
        for key, rows in libraries.items()
        for row in (rows if data["device"].startswith(device) else [])
    ]


def of_run(path: Path) -> list[Stored]:
    """The times of an earlier run, from its record."""
    rows = known(record.latest(record.read(path), "bench"))
    times = ((row["case"], {way: row[key] for way, key in WAYS.items() if key in row}) for row in rows)
    return [Stored(path.stem, case, own) for case, own in times if own]


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
