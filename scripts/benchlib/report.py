"""Results as text: tables for the terminal, Markdown with every column for the pages."""

import io
import textwrap
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from . import speed
from .against import NOTE, WAYS, Stored, better, means, pairs
from .columns import EMPTY, NAME, OURS, SHORT, Cells, Column, Row, texts
from .families import FAMILIES, Family, family_of


def one_line(error: Exception) -> str:
    """The kind of an error and the first line of its text."""
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}".rstrip(": ")


class Progress:
    """A line on standard error for each thing that is done, with the count, the elapsed time and its own."""

    def __init__(self, total: int, stream: Any) -> None:
        self._total = total
        self._stream = stream
        self._done = 0
        self._begin = self._last = time.monotonic()

    def step(self, text: str) -> None:
        """Another one is done."""
        self._done += 1
        width = len(str(self._total))
        now = time.monotonic()
        times = f"{now - self._begin:4.0f} s, {now - self._last:4.1f} s"
        self._last = now
        print(f"[{self._done:{width}}/{self._total}] {times}  {text}", file=self._stream, flush=True)


def best_ceilings(ceilings: list[dict[str, float]]) -> dict[str, float]:
    """The higher of the ceilings measured before and after the cases: the harder roof to be compared with."""
    return {key: max(c[key] for c in ceilings) for key in ceilings[0]}


def roof_share(row: Row, ceilings: dict[str, float]) -> tuple[float, str]:
    """The nearer roof and how much of it a row reaches: its least possible time there over its time."""
    compute = row["tflops"] / ceilings["matmul_tflops"]
    memory = row["gbps"] / ceilings["copy_gbps"]
    return (compute, "matmul") if compute >= memory else (memory, "copy")


def intensity(row: Row) -> float:
    """Operations per byte of a row, from its rates."""
    return float(row["tflops"] * 1e3 / row["gbps"])


def add_shares(rows: list[Row], ceilings: dict[str, float]) -> None:
    """Write `share` and `roof` into every row that has rates."""
    for row in rows:
        if "tflops" in row:
            row["share"], row["roof"] = roof_share(row, ceilings)
        elif "gbps" in row:
            row["share"], row["roof"] = row["gbps"] / ceilings["copy_gbps"], "copy"


WIDTH = 100
"""Of tables for the terminal, in columns."""


def fitted(cells: Cells, left: Sequence[int] = (0,)) -> str:
    """A table as lines of at most WIDTH columns. The columns in `left` hold texts, which are folded where
    they are too long; the others hold figures.
    """
    table = Table(box=None, pad_edge=False)
    for number, heading in enumerate(cells[0]):
        if number in left:
            table.add_column(heading, overflow="fold")
        else:
            table.add_column(heading.replace(" ", "\n"), justify="right", no_wrap=True)
    for row in cells[1:]:
        table.add_row(*row)
    console = Console(width=WIDTH, file=io.StringIO(), highlight=False, markup=False, color_system=None)
    with console.capture() as captured:
        console.print(table)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def markdown(cells: Cells, *, code: bool = True) -> str:
    """A table as GitHub writes it, the first column as code unless said otherwise."""
    headings, *rows = cells
    lines = ["| " + " | ".join(headings) + " |", "|---|" + "---:|" * (len(headings) - 1)]
    for first, *others in rows:
        lines.append("| " + " | ".join([f"`{first}`" if code else first, *others]) + " |")
    return "\n".join(lines)


def ratio_column(way: str, stored: Sequence[Stored]) -> Column:
    """The time of the better of the other libraries and runs over ours."""

    def cell(row: Row) -> str:
        pair = better(pairs(row, stored), way)
        return f"{pair.ratio:.3f}" if pair else EMPTY

    return Column(f"better / ours, {way}", cell)


def comparison_columns(rows: Sequence[Row], stored: Sequence[Stored]) -> list[Column]:
    """A column for each other library and run that any row is compared with, and one for the ratio to the
    better of them, for each way that the figures were taken.
    """
    found = {row["case"]: pairs(row, stored) for row in rows}
    kinds = list(dict.fromkeys((pair.label, pair.way) for items in found.values() for pair in items))

    def time_of(label: str, way: str) -> Column:
        def cell(row: Row) -> str:
            times = [pair.theirs for pair in found[row["case"]] if (pair.label, pair.way) == (label, way)]
            return f"{times[0]:.1f}" if times else EMPTY

        return Column(f"{label} {way} µs", cell)

    def ours_beside(way: str) -> Column:
        def cell(row: Row) -> str:
            figure = row.get("beside", {}).get(OURS, {}).get(WAYS[way])
            return EMPTY if figure is None else f"{figure:.1f}"

        return Column(f"{OURS} beside {way} µs", cell)

    columns = []
    for way in WAYS:
        labels = [label for label, of in kinds if of == way]
        columns += [time_of(label, way) for label in labels]
        columns += [ours_beside(way)] if any(label.endswith(" beside") for label in labels) else []
        columns += [ratio_column(way, stored)] if labels else []
    return columns


def short_cells(family: Family, rows: Sequence[Row], stored: Sequence[Stored]) -> Cells:
    """As `family_cells`, for the terminal: of attention the times, the share of the roof and the ratios."""
    own = [row for row in rows if family_of(row["case"]) is family]
    ways = [way for way in WAYS if any(better(pairs(row, stored), way) for row in own)]
    ratios = [ratio_column(way, stored) for way in ways]
    return texts([NAME, *(SHORT if family.attention else family.columns), *ratios], own)


def family_cells(family: Family, rows: Sequence[Row], stored: Sequence[Stored]) -> Cells:
    """The table of a family; of the rows only its own count. No more than the headings when it has none."""
    own = [row for row in rows if family_of(row["case"]) is family]
    return texts([NAME, *family.columns, *comparison_columns(own, stored)], own)


def summary_cells(rows: Sequence[Row], stored: Sequence[Stored]) -> Cells:
    """Per family and per group of it: geometric mean and least of the ratios to the better library."""
    headings = ["family", "cases", "figures", "rows", "geometric mean", "least", "least row"]
    return [headings] + [
        [m.family, m.group, m.way, str(m.rows), f"{m.mean:.3f}", f"{m.least:.3f}", m.least_case]
        for m in means(rows, stored)
    ]


def text_report(rows: Sequence[Row], stored: Sequence[Stored]) -> str:
    """The tables of a run for the terminal, the summary last."""
    parts = []
    for family in FAMILIES:
        cells = short_cells(family, rows, stored)
        if len(cells) > 1:
            parts.append(f"{family.title}\n{fitted(cells)}")
    speeds = speed.summary(rows, stored)
    if speeds:
        notes = f"{speed.MARK_NOTE}\n{textwrap.fill(NOTE, WIDTH)}"
        parts.append(f"{fitted(speed.cells(speeds), (0, 1))}\n{notes}")
    parts.append("Every column, such as power, clocks and rates, is in the file of --json.")
    return "\n\n".join(parts)


def describe_ceilings(ceilings: list[dict[str, float]]) -> str:
    """One line on the ceilings before and after."""
    matmul = " and ".join(f"{c['matmul_tflops']:.0f}" for c in ceilings)
    copy = " and ".join(f"{c['copy_gbps'] / 1e3:.2f}" for c in ceilings)
    return (
        f"ceilings of this run, before and after: bf16 8192^3 matmul {matmul} TFLOP/s, "
        f"elementwise copy {copy} TB/s"
    )


def describe_host(host: dict[str, float]) -> str:
    """One line on the host time of a decode call, and of a flex call where it was measured."""
    texts = [
        f"host time of one {name} call {host[f'{name}_call_us']:.1f} µs (median; nine of ten calls up to "
        f"{host[f'{name}_call_p90_us']:.1f}, median of the quietest burst "
        f"{host[f'{name}_call_quiet_us']:.1f})"
        for name in ("decode", "flex")
        if f"{name}_call_us" in host
    ]
    if "flex_first_call_s" in host:
        texts.append(
            f"the first flex call of a new function {host['flex_first_call_s']:.1f} s, with its compilation"
        )
    return "; ".join(texts)
