"""Comparing figures with other libraries, only ever with figures taken the same way."""

import json
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from . import ROOT
from .cases import OURS, Row

PEERS = ROOT / "docs" / "peers-h200.json"
"""Times of other libraries."""

WAYS = {"rested": "us", "no rests": "unrested_us", "sustained": "sustained_us"}
"""How a figure was taken -> the field of a row that holds it (docs/benchmark.md)."""

STORED_WAY = "no rests"
"""How stored times of other libraries were taken."""


class Stored(NamedTuple):
    """A stored time of another library."""

    label: str
    case: str
    us: float


class Pair(NamedTuple):
    """One time of another library and ours, taken the same way."""

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
        Stored(key.partition("@")[0].partition(",")[0], row["case"], row["us"])
        for key, rows in libraries.items()
        for row in (rows if data["device"].startswith(device) else [])
    ]


def pairs(row: Row, stored: Sequence[Stored]) -> list[Pair]:
    """Our figures of a row beside each stored time and each library that ran beside it.

    Of several stored times the least counts; a library that ran beside has a pair for each way.
    """
    found: dict[tuple[str, str], Pair] = {}
    ours = row.get(WAYS[STORED_WAY])
    for other in stored:
        if other.case == row["case"] and ours is not None:
            pair = Pair(other.label, STORED_WAY, other.us, ours)
            found[pair[:2]] = min(found.get(pair[:2], pair), pair, key=lambda one: one.theirs)
    beside = row.get("beside", {})
    for label in (label for label in beside if label != OURS):
        for way, key in WAYS.items():
            if key in beside[label] and key in beside[OURS]:
                pair = Pair(f"{label} beside", way, beside[label][key], beside[OURS][key])
                found[pair[:2]] = pair
    return list(found.values())


def better(found: Iterable[Pair], way: str) -> Pair | None:
    """The pair with the fastest other library; None where nothing was taken that way."""
    return min((pair for pair in found if pair.way == way), key=lambda pair: pair.ratio, default=None)
