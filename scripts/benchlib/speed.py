"""The speed of each family beside the fastest other library, for README's table and picture."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from .against import LIST_WAY, Mean, Stored, better, means, pairs
from .columns import EMPTY, Cells, Row
from .families import FAMILIES, Family, family_of

STORED_MARK = "¹"
MARK_NOTE = "¹ Beside stored times of the other library; rawmla's were taken without rests."


@dataclass(frozen=True)
class Speed:
    """Ratios of a family: `means` are of the ways "rested" and "sustained" where another library ran beside,
    else of "no rests" alone, beside stored times. `peers`: the fastest other libraries, the most frequent
    first.
    """

    family: Family
    peers: str
    means: tuple[Mean, ...]


def summary(rows: Sequence[Row], stored: Sequence[Stored]) -> list[Speed]:
    """Return the speed of every family that has a ratio."""
    found = [mean for mean in means(rows, stored) if mean.group == "all"]
    speeds = []
    for family in FAMILIES:
        own = [mean for mean in found if mean.family == family.name]
        beside = tuple(mean for mean in own if mean.way != LIST_WAY)
        shown = beside or tuple(own)
        if shown:
            fastest = (
                better(pairs(row, stored), shown[0].way) for row in rows if family_of(row["case"]) is family
            )
            labels = Counter(_library(pair.label) for pair in fastest if pair is not None)
            speeds.append(Speed(family, ", ".join(name for name, _ in labels.most_common()), shown))
    return speeds


def _library(label: str) -> str:
    """A label without how its times came about."""
    return label.removesuffix(" beside").partition(", ")[0]


def cells(speeds: Sequence[Speed]) -> Cells:
    """A row for each family."""
    figures_of = ("rested, mean", "least", "sustained, mean", "least")
    table = [["operation", "fastest other library", "cases", *figures_of]]
    for speed in speeds:
        by_way = {mean.way: mean for mean in speed.means}
        mark = STORED_MARK if LIST_WAY in by_way else ""
        figures = []
        for mean in (by_way.get("rested", by_way.get(LIST_WAY)), by_way.get("sustained")):
            figures += [f"{mean.mean:.2f}{mark}", f"{mean.least:.2f}{mark}"] if mean else [EMPTY, EMPTY]
        table.append([speed.family.title, speed.peers, str(speed.means[0].rows), *figures])
    return table
