"""README's measured section and docs/performance.md, from the record and docs/peers-h200.json."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from . import ROOT, record, tables
from .cases import Row
from .families import FAMILIES, table
from .tables import Cells, markdown

README = ROOT / "README.md"
PAGE = ROOT / "docs" / "performance.md"
BEGIN = "<!-- figures: begin (scripts/update_figures.py) -->"
END = "<!-- figures: end -->"

WHAT_IS_SHOWN = (
    "Speed by operation: the geometric mean of the cases' ratios, and the least one. [Every case in "
    "µs](docs/performance.md), [how it is measured](docs/benchmark.md)."
)

HOST_TIME = (
    "The time until a call returns to Python, as the median of 1,000 calls. Two ways to call one operation "
    "take turns, and the host waits for the GPU after every 40 turns."
)


def describe_tests(parts: Sequence[record.Part]) -> str:
    """What tests and sanitizer found, in the results that count, and how many results do not."""
    rows = record.latest(parts, "tests")
    counts = ", ".join(f"{sum(row[key] for row in rows):,} {key}" for key in record.COUNTS)
    sentences = [f"Tests there: {counts if rows else 'not run'}"]
    for verdict in ("clean", "not clean"):
        found = record.latest(parts, "sanitizer")
        tools = sorted(row["tool"] for row in found if record.IN_WORDS["sanitizer"](row) == verdict)
        sentences += [f"{verdict} under compute-sanitizer's {', '.join(tools)}"] if tools else []
    again = sum(len(record.repeated(parts, stage)) for stage in record.NAMES)
    sentences += [f"results of a second run: {again}"] if again else []
    return "; ".join(sentences) + "."


def runs_again(parts: Sequence[record.Part]) -> list[str]:
    """A line for each file, tool and case that ran more than once, with all its results."""
    return [
        f"- `{name}`: first {', then '.join(map(words, rows))}"
        for stage, words in record.IN_WORDS.items()
        for name, rows in record.repeated(parts, stage).items()
    ]


def host_time_cells(parts: Sequence[record.Part]) -> Cells:
    """A row for each call whose host time the tests measured."""
    rows = record.latest(parts, "tests")
    measured = [each for row in rows for each in row.get("measured_us", {}).items()]
    return [["warm call", "µs"], *[[name, f"{median:.1f}"] for name, median in measured]]


def parts_cells(parts: Sequence[record.Part]) -> Cells:
    """A row for each run."""
    machine = ("gpus", "cores", "nvrtc", "torch", "cupy")
    cells = [["run of", "begun", "results", "seconds", *machine, "options"]]
    for part in parts:
        seconds = part["seconds"] if part["ended"] else "did not end"
        given = ((name, part["options"].get(name)) for name in record.OPTIONS[part["stage"]])
        options = "; ".join(f"{name} {value}" for name, value in given if value) or "-"
        values = part["stage"], part["begin"], len(part["rows"]), seconds
        cells.append([*map(str, values), *(str(part["machine"][name]) for name in machine), options])
    return cells


def describe_machine(parts: Sequence[record.Part]) -> str:
    """Device, driver, dates, commits and sources."""
    part = parts[-1]
    days = sorted({one["begin"][:10] for one in parts})
    commits = sorted({str(one["git_commit"])[:7] for one in parts})
    return (
        f"{part['machine']['device']}, driver {part['machine']['driver']}, {' and '.join(days)}, "
        f"commit `{'`, `'.join(commits)}`, sources `{part['source_sha256'][:12]}`, kernels compiled by NVRTC "
        f"{part['machine']['nvrtc']}."
    )


def bench_rows(parts: Sequence[record.Part]) -> list[Row]:
    """The benchmark's rows that count, in the order of the tables."""
    by_case = {row["case"]: row for row in record.latest(parts, "bench")}
    return [by_case[name] for name in table() if name in by_case]


def readme_section(parts: Sequence[record.Part]) -> str:
    """The Markdown between README's markers."""
    texts = []
    cells = tables.summary_cells(bench_rows(parts), tables.peers(parts[0]["machine"]["device"]))
    if cells:
        texts = [WHAT_IS_SHOWN, markdown(cells, code=False), tables.NOTE]
    return "\n\n".join([*texts, f"{describe_machine(parts)} {describe_tests(parts)}"])


def bench_texts(parts: Sequence[record.Part]) -> list[str]:
    """What each benchmark says of the whole run, then every table, the summary first."""
    texts = []
    for part in parts:
        if part["stage"] == "bench":
            said = [tables.describe_ceilings(part["ceilings"])]
            said.append(f"sustained figures: {part['sustain_seconds']:g} s of load each")
            texts.append(f"Run of {part['begin']}: {'; '.join(said)}.")
    failed = record.errors(parts)
    if failed:
        texts.append(f"Failed: {'; '.join(failed)}.")
    rows, stored = bench_rows(parts), tables.peers(parts[0]["machine"]["device"])
    summary = tables.summary_cells(rows, stored)
    if summary:
        texts += ["## The fastest other library", markdown(summary, code=False), tables.NOTE]
    for family in FAMILIES:
        cells = tables.family_cells(family, rows, stored)
        if cells:
            texts += [f"## {family.title}", markdown(cells)]
    return texts


def performance_page(parts: Sequence[record.Part]) -> str:
    """docs/performance.md."""
    texts = ["# Performance", f"Written by `scripts/update_figures.py` from `docs/{record.RECORD.name}`."]
    texts += [
        describe_machine(parts),
        "[benchmark.md](benchmark.md) says how the figures are made and what the columns mean. A dash: not "
        f"measured. `{tables.PEERS.relative_to(ROOT).as_posix()}` has stored times of other libraries.",
    ]
    if any(part["stage"] == "bench" for part in parts):
        texts += bench_texts(parts)
    host_times = host_time_cells(parts)
    if len(host_times) > 1:
        texts += ["## Host time", HOST_TIME, markdown(host_times, code=False)]
    texts += ["## Tests", describe_tests(parts)]
    reasons = {reason for row in record.latest(parts, "tests") for reason in row["skip_reasons"]}
    if reasons:
        texts.append("Skipped because: " + "; ".join(sorted(reasons)) + ".")
    texts += ["## Runs", markdown(parts_cells(parts), code=False)]
    again = runs_again(parts)
    if again:
        texts += ["Ran more than once; the last result counts:", "\n".join(again)]
    return "\n\n".join(texts) + "\n"


def replace_section(readme: str, section: str) -> str:
    """README with the text between the markers replaced; ValueError when they are not there."""
    head, rest = readme.split(BEGIN)
    _, tail = rest.split(END, 1)
    return f"{head}{BEGIN}\n{section}\n{END}{tail}"


def written(parts: Sequence[record.Part]) -> dict[Path, str]:
    """The pages by their files."""
    readme = replace_section(README.read_text(), readme_section(parts))
    return {README: readme, PAGE: performance_page(parts)}


def main() -> int:
    """Write the pages; the exit status is 2 where the record is not as its runs wrote it."""
    try:
        parts = record.merged([record.read(record.RECORD)])
    except record.RecordError as error:
        print(f"update_figures.py: {error}", file=sys.stderr)
        return 2
    for path, text in written(parts).items():
        record.write_whole(path, text)
    if parts[0]["source_sha256"] != record.source_hash(ROOT):
        print("note: the record was made from other sources than these")
    return 0
