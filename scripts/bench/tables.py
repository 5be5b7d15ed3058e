"""Results as text: tables for the terminal, Markdown with every column for the pages."""

import io
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from statistics import geometric_mean
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from .cases import OURS, Row
from .families import FAMILIES, Family, family_of
from .ratios import STORED_WAY, WAYS, Stored, better, pairs

Cells = list[list[str]]
"""A table: the headings, then the rows."""
EMPTY = "-"
WIDTH = 120
"""Of tables for the terminal, in columns."""

NOTE = (
    "A ratio is the other library's time over ours, so above 1 rawmla is faster; both times were taken the "
    "same way. ¹ Beside a stored time of the other library on the same GPU model; rawmla's was taken without "
    "rests. Such ratios move by up to 10 %, and under load the other library was not timed."
)


class Column(NamedTuple):
    """One column. A cell is EMPTY where a row has no such figure; a column of such cells is not shown."""

    heading: str
    cell: Callable[[Row], str]


def _number(heading: str, key: str, digits: int = 0) -> Column:
    return Column(heading, lambda row: f"{row[key]:.{digits}f}" if key in row else EMPTY)


def _share(row: Row) -> str:
    return f"{100 * row['share']:.0f} % {row['roof']}" if "share" in row else EMPTY


def _gathered(row: Row) -> str:
    return f"{row['gathered_us']:.1f} ({row['gather_us']:.1f})" if "gathered_us" in row else EMPTY


def _timed_as(row: Row) -> str:
    if "deterministic_us" not in row:
        return EMPTY
    return "calls" if "beside" in row else "graphs"


NAME = Column("case", lambda row: str(row["case"]))
SHORT = (
    _number("rested µs", "us", 1),
    _number("no rests µs", "unrested_us", 1),
    _number("sustained µs", "sustained_us", 1),
    Column("share of roof", _share),
)
"""For the terminal."""
COLUMNS = (
    *SHORT[:3],
    _number("W", "sustained_watts"),
    _number("mJ", "sustained_mj", 2),
    _number("MHz", "sustained_mhz"),
    _number("cold L2 µs", "cold_us", 1),
    _number("TFLOP/s", "tflops"),
    _number("GB/s", "gbps"),
    SHORT[3],
    _number("metadata µs", "meta_us", 1),
    Column("gathered first µs (gather)", _gathered),
    _number("one call with its wait µs", "call_us", 1),
    _number("deterministic rested µs", "deterministic_us", 1),
    _number("deterministic / plain", "deterministic_ratio", 3),
    _number("captured gradient / none", "captured_ratio", 3),
    Column("timed as", _timed_as),
)


def _comparisons(rows: Sequence[Row], stored: Sequence[Stored], *, short: bool) -> list[Column]:
    """For each way that the figures were taken: a column for each other library and run, for ours beside
    them, and for the ratio to the better of them. `short`: the ratio alone.
    """
    found = {row["case"]: pairs(row, stored) for row in rows}
    kinds = dict.fromkeys((pair.label, pair.way) for items in found.values() for pair in items)

    def time_of(label: str, way: str) -> Column:
        def cell(row: Row) -> str:
            times = [pair.theirs for pair in found[row["case"]] if (pair.label, pair.way) == (label, way)]
            return f"{times[0]:.1f}" if times else EMPTY

        return Column(f"{label} {way} µs", cell)

    def ours(way: str) -> Column:
        def cell(row: Row) -> str:
            figure = row.get("beside", {}).get(OURS, {}).get(WAYS[way])
            return EMPTY if figure is None else f"{figure:.1f}"

        return Column(f"{OURS} beside {way} µs", cell)

    def ratio(way: str) -> Column:
        def cell(row: Row) -> str:
            pair = better(found[row["case"]], way)
            return f"{pair.ratio:.3f}" if pair else EMPTY

        return Column(f"better / ours, {way}", cell)

    columns = []
    for way in WAYS:
        times = [time_of(label, of) for label, of in kinds if of == way]
        columns += [ratio(way)] if short else [*times, ours(way), ratio(way)]
    return columns


def family_cells(
    family: Family, rows: Iterable[Row], stored: Sequence[Stored], *, short: bool = False
) -> Cells:
    """The table of a family; of the rows only its own count. Empty when it has none. `short`: of attention
    the times, the share of the roof and the ratios, for the terminal.
    """
    own = [row for row in rows if family_of(row["case"]) is family]
    columns = [*(SHORT if short and family.attention else COLUMNS), *_comparisons(own, stored, short=short)]
    filled = [column for column in columns if any(column.cell(row) != EMPTY for row in own)]
    shown = [NAME, *filled]
    return [[c.heading for c in shown], *([c.cell(row) for c in shown] for row in own)] if own else []


def summary_cells(rows: Sequence[Row], stored: Sequence[Stored], *, cases: bool = False) -> Cells:
    """A row for each family that has a ratio: the fastest other libraries, the most frequent first, geometric
    mean and least, rested and sustained; with `cases` also the case of the least rested ratio. Ratios to
    stored times stand in the place of the rested ones where nothing ran beside.
    """
    figures = ("rested, mean", "least", "sustained, mean", "least")
    cells = [["operation", "fastest other library", "cases", *figures, *(["least case"] if cases else [])]]
    for family in FAMILIES:
        own = {row["case"]: pairs(row, stored) for row in rows if family_of(row["case"]) is family}
        fastest = {
            way: [(pair, case) for case, found in own.items() if (pair := better(found, way)) is not None]
            for way in WAYS
        }
        beside = bool(fastest["rested"] or fastest["sustained"])
        first = "rested" if beside else STORED_WAY
        if not any(fastest.values()):
            continue
        shown = fastest[first] or fastest["sustained"]
        labels = Counter(pair.label.removesuffix(" beside") for pair, _ in shown)
        row = [family.title, ", ".join(name for name, _ in labels.most_common()), str(len(shown))]
        for way in (first, "sustained"):
            ratios = [pair.ratio for pair, _ in fastest[way]]
            texts = (
                [f"{one:.2f}{'' if beside else '¹'}" for one in (geometric_mean(ratios), min(ratios))]
                if ratios
                else []
            )
            row += texts or [EMPTY, EMPTY]
        least = min(((pair.ratio, case) for pair, case in fastest[first]), default=None)
        cells.append([*row, *([f"`{least[1]}`" if least else EMPTY] if cases else [])])
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
    console = Console(width=WIDTH, file=io.StringIO(), highlight=False, markup=False, color_system=None)
    with console.capture() as captured:
        console.print(shown)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def markdown(cells: Cells, *, code: bool = True) -> str:
    """A table as GitHub writes it, the first column as code unless said otherwise."""
    headings, *rows = cells
    lines = ["| " + " | ".join(headings) + " |", "|---|" + "---:|" * (len(headings) - 1)]
    for first, *others in rows:
        lines.append("| " + " | ".join([f"`{first}`" if code else first, *others]) + " |")
    return "\n".join(lines)


def text_report(rows: Sequence[Row], stored: Sequence[Stored]) -> str:
    """The tables of a run for the terminal, the summary last."""
    parts = []
    for family in FAMILIES:
        cells = family_cells(family, rows, stored, short=True)
        if cells:
            parts.append(f"{family.title}\n{fitted(cells)}")
    cells = summary_cells(rows, stored)
    if cells:
        parts.append(f"{fitted(cells, (0, 1))}\n{textwrap.fill(NOTE, WIDTH)}")
    parts.append("Every column, such as power, clocks and rates, is in the file of --json.")
    return "\n\n".join(parts)


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


def describe_ceilings(ceilings: Iterable[dict[str, float]]) -> str:
    """One line on the ceilings before and after."""
    matmul = " and ".join(f"{c['matmul_tflops']:.0f}" for c in ceilings)
    copy = " and ".join(f"{c['copy_gbps'] / 1e3:.2f}" for c in ceilings)
    return (
        f"ceilings of this run, before and after: bf16 8192^3 matmul {matmul} TFLOP/s, "
        f"elementwise copy {copy} TB/s"
    )


def describe_host(host: dict[str, float]) -> str:
    """One line on the host time of a decode call and of a flex call."""
    texts = []
    for name in (key.removesuffix("_call_us") for key in host if key.endswith("_call_us")):
        median, p90, quiet = (host[f"{name}_call{part}_us"] for part in ("", "_p90", "_quiet"))
        texts.append(
            f"host time of one {name} call {median:.1f} µs (median; nine of ten calls up to {p90:.1f}, "
            f"median of the quietest burst {quiet:.1f})"
        )
    if "flex_first_call_s" in host:
        seconds = host["flex_first_call_s"]
        texts.append(f"the first flex call of a new function {seconds:.1f} s, with its compilation")
    return "; ".join(texts)
