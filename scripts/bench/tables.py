"""Results as text, and ratios to other libraries, only ever of figures taken the same way."""

import io
import json
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from statistics import geometric_mean
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from . import ROOT
from .cases import OURS, Row
from .families import FAMILIES, Family, family_of

PEERS = ROOT / "docs" / "peers-h200.json"
"""Times of other libraries."""

WAYS = {"rested": "us", "no rests": "unrested_us", "sustained": "sustained_us"}
"""How a figure was taken -> the field of a row that holds it (docs/benchmark.md)."""

STORED_WAY = "no rests"  # how stored times were taken

Stored = dict[str, dict[str, float]]
"""Stored times by case and library."""
Cells = list[list[str]]
"""A table: the headings, then the rows."""
EMPTY = "-"
WIDTH = 120  # of tables for the terminal

NOTE = (
    "A ratio is the other library's time over rawmla's, taken the same way: above 1 rawmla is faster. "
    "Rested: the GPU idles before it is timed. Sustained: it works without a pause, as under load. ¹ A "
    "stored time of the other library on the same GPU model over rawmla's, which is timed without rests; "
    "such ratios move by up to 10 %. Under load the other library was not timed."
)
COLUMNS = {
    "rested µs": "{us:.1f}",
    "no rests µs": "{unrested_us:.1f}",
    "sustained µs": "{sustained_us:.1f}",
    "W": "{sustained_watts:.0f}",
    "mJ": "{sustained_mj:.2f}",
    "MHz": "{sustained_mhz:.0f}",
    "cold L2 µs": "{cold_us:.1f}",
    "TFLOP/s": "{tflops:.0f}",
    "GB/s": "{gbps:.0f}",
    "share of roof": "{percent:.0f} % {roof}",
    "metadata µs": "{meta_us:.1f}",
    "deterministic rested µs": "{deterministic_us:.1f}",
    "deterministic / plain": "{deterministic_ratio:.3f}",
    "timed as": "{timed_as}",
}
"""A heading, and how a cell is made of a row. A row without such a figure has no cell, a column without cells
is not shown.
"""
SHORT = ("rested µs", "no rests µs", "sustained µs", "share of roof")
"""Columns for the terminal."""


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


def peers(device: str) -> Stored:
    """Times of other libraries on this device; none of another device's. Of several the least counts."""
    data = json.loads(PEERS.read_text())
    found: Stored = {}
    for key, rows in data.items() if data["device"].startswith(device) else ():
        label = key.partition("@")[0].partition(",")[0]
        for row in rows if isinstance(rows, list) else ():
            own = found.setdefault(row["case"], {})
            own[label] = min(row["us"], own.get(label, row["us"]))
    return found


def pairs(row: Row, stored: Stored) -> list[Pair]:
    """Our figures of a row beside each stored time, and each library that ran beside it, in each way."""
    ours, beside = row.get(WAYS[STORED_WAY], 0.0), row.get("beside", {})
    times = stored.get(row["case"], {}) if ours else {}
    return [Pair(label, STORED_WAY, us, ours) for label, us in times.items()] + [
        Pair(f"{label} beside", way, own[key], beside[OURS][key])
        for label, own in beside.items()
        for way, key in WAYS.items()
        if label != OURS and key in own and key in beside[OURS]
    ]


def better(found: Iterable[Pair], way: str) -> Pair | None:
    """The pair with the fastest other library, if any was taken that way."""
    others = (pair for pair in found if pair.way == way and not pair.label.startswith(OURS))
    return min(others, key=lambda pair: pair.ratio, default=None)


def _cells(row: Row, found: Sequence[Pair]) -> dict[str, str]:
    """The cells of a row by their headings. For each way that the figures were taken: the other libraries and
    runs, ours beside them, and the ratio to the better of them.
    """
    figures = {**row, "percent": 100 * row["share"]} if "share" in row else dict(row)
    if "deterministic_us" in row:
        figures["timed_as"] = "calls" if "beside" in row else "graphs"
    cells = {"case": row["case"]}
    for heading, form in COLUMNS.items():
        with suppress(KeyError):
            cells[heading] = form.format_map(figures)
    for way, key in WAYS.items():
        cells |= {f"{pair.label} {way} µs": f"{pair.theirs:.1f}" for pair in found if pair.way == way}
        if key in (ours := row.get("beside", {}).get(OURS, {})):
            cells[f"{OURS} beside {way} µs"] = f"{ours[key]:.1f}"
        if best := better(found, way):
            cells[f"better / ours, {way}"] = f"{best.ratio:.3f}"
    return cells


def family_cells(family: Family, rows: Iterable[Row], stored: Stored, *, short: bool = False) -> Cells:
    """The table of a family; of the rows only its own count. Empty when it has none. `short`: the times,
    the share of the roof and the ratios, for the terminal.
    """
    own = [(row, pairs(row, stored)) for row in rows if family_of(row["case"]) is family]
    columns = SHORT if short else COLUMNS
    cells = [_cells(row, found) for row, found in own]
    headings = ["case", *columns]
    for way in WAYS:
        labels = dict.fromkeys(pair.label for _, found in own for pair in found if pair.way == way)
        if not short:
            headings += [f"{label} {way} µs" for label in [*labels, f"{OURS} beside"]]
        headings.append(f"better / ours, {way}")
    shown = [heading for heading in headings if any(heading in row for row in cells)]
    return [shown, *([row.get(heading, EMPTY) for heading in shown] for row in cells)] if own else []


def summary_cells(rows: Sequence[Row], stored: Stored) -> Cells:
    """A row for each family that has a ratio: the fastest other libraries, the most frequent first, geometric
    mean and least, rested and sustained. Ratios to stored times stand in the place of the rested ones where
    nothing ran beside.
    """
    figures = ("rested, mean", "least", "sustained, mean", "least")
    cells = [["operation", "fastest other library", "cases", *figures]]
    for family in FAMILIES:
        own = [pairs(row, stored) for row in rows if family_of(row["case"]) is family]
        fastest = {way: [pair for found in own if (pair := better(found, way))] for way in WAYS}
        beside = bool(fastest["rested"] or fastest["sustained"])
        ways = "rested" if beside else STORED_WAY, "sustained"
        shown = fastest[ways[0]] or fastest["sustained"]
        if not shown:
            continue
        labels = Counter(pair.label.removesuffix(" beside") for pair in shown)
        row = [family.title, ", ".join(name for name, _ in labels.most_common()), str(len(shown))]
        for way in ways:
            ratios = [pair.ratio for pair in fastest[way]]
            mark = "" if beside else "¹"
            row += [f"{of(ratios):.2f}{mark}" if ratios else EMPTY for of in (geometric_mean, min)]
        cells.append(row)
    return cells if len(cells) > 1 else []


def fitted(cells: Cells, left: Sequence[int] = (0,)) -> str:
    """A table as lines of at most WIDTH columns. The columns in `left` hold texts, which are folded where
    they are too long; the others hold figures.
    """
    shown = Table(box=None, pad_edge=False)
    for number, heading in enumerate(cells[0]):
        if number in left:
            shown.add_column(heading, overflow="fold")
        else:
            shown.add_column(heading.replace(" ", "\n"), justify="right", no_wrap=True)
    for row in cells[1:]:
        shown.add_row(*row)
    text = io.StringIO()
    Console(width=WIDTH, file=text, highlight=False, markup=False).print(shown)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def markdown(cells: Cells, *, code: bool = True) -> str:
    """A table as GitHub writes it, the first column as code unless said otherwise."""
    headings, *rows = cells
    lines = ["| " + " | ".join(headings) + " |", "|---|" + "---:|" * (len(headings) - 1)]
    for first, *others in rows:
        lines.append("| " + " | ".join([f"`{first}`" if code else first, *others]) + " |")
    return "\n".join(lines)


def text_report(rows: Sequence[Row], stored: Stored) -> str:
    """The tables of a run for the terminal, the summary last."""
    tables = {family.title: family_cells(family, rows, stored, short=True) for family in FAMILIES}
    parts = [f"{title}\n{fitted(cells)}" for title, cells in tables.items() if cells]
    if cells := summary_cells(rows, stored):
        parts.append(f"{fitted(cells, (0, 1))}\n{textwrap.fill(NOTE, WIDTH)}")
    return "\n\n".join([*parts, "Every column, such as power, clocks and rates, is in the file of --json."])


def add_shares(rows: Iterable[Row], ceilings: Sequence[dict[str, float]]) -> None:
    """Write `share` and `roof` into every row that has rates: the nearer roof, and its least possible time
    there over its time. Of the ceilings before and after the cases the higher ones count.
    """
    roofs = {key: max(one[key] for one in ceilings) for key in ceilings[0]}
    for row in rows:
        if "gbps" in row:
            shares = {"matmul": row.get("tflops", 0.0) / roofs["matmul_tflops"]}
            shares["copy"] = row["gbps"] / roofs["copy_gbps"]
            row["roof"] = max(shares, key=lambda roof: shares[roof])
            row["share"] = shares[row["roof"]]


def describe_ceilings(ceilings: Sequence[dict[str, float]]) -> str:
    """One line on the ceilings before and after."""
    matmul = " and ".join(f"{one['matmul_tflops']:.0f}" for one in ceilings)
    copy = " and ".join(f"{one['copy_gbps'] / 1e3:.2f}" for one in ceilings)
    return f"ceilings, before and after: bf16 8192^3 matmul {matmul} TFLOP/s, elementwise copy {copy} TB/s"
