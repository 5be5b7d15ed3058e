#!/usr/bin/env python3
"""Write README's measured section, docs/performance.md and the pictures from docs/gpu-record.json.

README gets a table by operation between its two markers, docs/performance.md every case of every compiler.
Times of other libraries come from docs/peers-h200.json. Without a record both say that nothing has been
measured yet. A record that was changed after its runs is refused.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import benchlib
from benchlib import against, families, files, plot, record, report, source, speed
from benchlib.columns import EMPTY, Cells, Row

ROOT = benchlib.REPO_ROOT
README = ROOT / "README.md"
RECORD = ROOT / "docs" / "gpu-record.json"
PEERS = ROOT / "docs" / "peers-h200.json"
PAGE = ROOT / "docs" / "performance.md"
ROOFLINE = ROOT / "docs" / "roofline.png"
SPEED = ROOT / "docs" / "speed.png"
BEGIN = "<!-- figures: begin (scripts/update_figures.py) -->"
END = "<!-- figures: end -->"
NOTHING_YET = "Nothing has been measured at this version yet: there is no `docs/gpu-record.json`."

WAYS = (
    "Rested: the GPU idles before it is timed. No rests: it does not, as in most published figures. "
    "Sustained: the graph is replayed without a pause, and the mean is of the second half; under longer "
    "load it is slower. A library beside ran in the same process, in turns with rawmla and in all three "
    "ways."
)
STORED = (
    "Stored times of other libraries were taken without rests, and ratios to them are formed with that "
    "column alone. A dash: not measured. Fastest other library: the faster of FlashMLA and "
    "FlashAttention-3 (which is stored for dense decoding with fixed lengths); of sparse attention with 8 "
    "to 32 heads, FlashMLA runs 64; of dense and flex attention, forward and backward, what ran beside; "
    "of prefix prefill vLLM's Triton kernel."
)
NOT_STORED = (
    "Fastest other library: of those that ran beside. A dash: none did. Stored times of FlashMLA and vLLM "
    "are of an H200."
)
WHAT_IS_SHOWN = (
    "Speed: the fastest other library's time over rawmla's, as the geometric mean of an operation's cases "
    "and as the least of them. Above 1 rawmla is faster. [Every case in µs](docs/performance.md), "
    "[how it is measured](docs/benchmark.md)."
)
FOOTNOTE = (
    "Rested: the GPU idles before it is timed. Sustained: it works without a pause, as under load. ¹ A "
    "stored time of the other library on the same GPU model over rawmla's, which is timed without rests; "
    "such ratios move by up to 10 %. Under load the other library was not timed."
)


def legend(stored: Sequence[against.Stored]) -> str:
    """What the columns mean, with and without stored times of other libraries."""
    return f"{WAYS} {STORED if stored else NOT_STORED} {against.NOTE}"


def group_of_tests(name: str) -> str:
    """What a test file is about: the first word of a name under tests/gpu."""
    path = Path(name)
    if path.parent.name == "gpu":
        return path.stem.removeprefix("test_").split("_")[0]
    return "README's examples" if path.stem == "test_readme" else "no GPU needed"


COUNTS = ("passed", "failed", "skipped")


def count(rows: Iterable[Row]) -> dict[str, int]:
    """Passed, failed and skipped of some files or tools together."""
    rows = list(rows)
    return {key: sum(row[key] for row in rows) for key in COUNTS}


def test_groups(parts: Sequence[record.Part]) -> dict[str, dict[str, int]]:
    """Group -> files, passed, failed and skipped."""
    groups: dict[str, list[Row]] = {}
    for row in sorted(record.latest(parts, "tests"), key=lambda row: str(row["file"])):
        groups.setdefault(group_of_tests(row["file"]), []).append(row)
    return {name: {"files": len(rows), **count(rows)} for name, rows in groups.items()}


def describe_tests(parts: Sequence[record.Part]) -> str:
    """What tests and sanitizer found, in the results that count, and how many results do not."""
    rows = record.latest(parts, "tests")
    counts = ", ".join(f"{number:,} {key}" for key, number in count(rows).items())
    sentences = [f"Tests there: {counts if rows else 'not run'}"]
    for verdict, clean in (("clean", True), ("not clean", False)):
        tools = sorted(row["tool"] for row in record.latest(parts, "sanitizer") if row["clean"] is clean)
        if tools:
            sentences.append(f"{verdict} under compute-sanitizer's {', '.join(tools)}")
    again = sum(len(record.repeated(parts, stage)) for stage in record.NAMES)
    if again:
        sentences.append(f"results of a second run: {again}")
    return "; ".join(sentences) + "."


def in_words(stage: str, row: Row) -> str:
    """The result of a row that ran more than once."""
    if stage == "tests":
        return ", ".join(f"{row[key]} {key}" for key in COUNTS)
    if stage == "sanitizer":
        return "clean" if row["clean"] else "not clean"
    return row.get("error") or f"{row['us']:.1f} µs"


def runs_again(parts: Sequence[record.Part]) -> list[str]:
    """A line for each file, tool and case that ran more than once, with all its results."""
    groups = [[part for part in parts if part["stage"] != "bench"], *record.compilers(parts).values()]
    return [
        f"- `{name}`: first {', then '.join(in_words(stage, row) for row in rows)}"
        for group in groups
        for stage in record.NAMES
        for name, rows in record.repeated(group, stage).items()
    ]


def parts_cells(parts: Sequence[record.Part]) -> Cells:
    """A row for each run."""
    machine = ("gpus", "cores", "nvrtc", "torch", "cupy")
    cells = [["run of", "begun", "results", "seconds", *machine, "options"]]
    for part in parts:
        options = (f"{name} {value}" for name, value in part["options"].items() if value)
        cells.append(
            [
                part["stage"],
                part["begin"],
                str(len(part["rows"])),
                str(part["seconds"]) if part["ended"] else "did not end",
                *(str(part["machine"][name]) for name in machine),
                "; ".join(options) or EMPTY,
            ]
        )
    return cells


def describe_machine(parts: Sequence[record.Part]) -> str:
    """Device, driver, dates, commit and sources."""
    part = parts[-1]
    days = sorted({one["begin"][:10] for one in parts})
    commits = sorted({str(one["git_commit"])[:7] for one in parts})
    return (
        f"{part['machine']['device']}, driver {part['machine']['driver']}, {' and '.join(days)}, "
        f"commit `{'`, `'.join(commits)}`, sources `{part['source_sha256'][:12]}`."
    )


def stored_peers(parts: Sequence[record.Part], path: Path) -> list[against.Stored]:
    """Times of other libraries on the record's device; none of another device's."""
    peers = json.loads(path.read_text())
    return against.load(path) if str(peers["device"]).startswith(parts[0]["machine"]["device"]) else []


def readme_section(parts: Sequence[record.Part], peers: Path) -> str:
    """The Markdown between README's markers."""
    if not parts:
        return NOTHING_YET
    texts = []
    for version, benchmarks in list(record.compilers(parts).items())[:1]:
        rows = families.named(record.latest(benchmarks, "bench"))
        texts += [
            WHAT_IS_SHOWN,
            report.markdown(speed.cells(speed.summary(rows, stored_peers(parts, peers))), code=False),
            FOOTNOTE,
            "![Time of the fastest other library over rawmla's, by operation](docs/speed.png)",
            f"Kernels compiled by NVRTC {version}.",
        ]
    texts[-1:] = [" ".join([*texts[-1:], describe_machine(parts), describe_tests(parts)])]
    return "\n\n".join(texts)


def performance_page(parts: Sequence[record.Part], peers: Path) -> str:
    """docs/performance.md."""
    texts = ["# Performance", f"Written by `scripts/update_figures.py` from `docs/{RECORD.name}`."]
    if not parts:
        return "\n\n".join([texts[0], NOTHING_YET]) + "\n"
    texts += [describe_machine(parts), "[benchmark.md](benchmark.md) says how the figures are made."]
    by_compiler = record.compilers(parts)
    if by_compiler:
        stored = stored_peers(parts, peers)
        texts += [
            f"`{peers.relative_to(ROOT).as_posix()}` has other libraries' times and how they were taken. "
            f"{legend(stored)}",
            "![Roofline of the benchmark](roofline.png)",
        ]
        for version, benchmarks in by_compiler.items():
            texts += compiler_parts(version, benchmarks, stored)
        cases = [families.case_named(row["case"]) for row in families.named(record.latest(parts, "bench"))]
        texts += ["## How it was measured", families.methods(cases)]
    texts += ["## Tests", describe_tests(parts)]
    groups = test_groups(parts)
    if groups:
        headings = ["tests", "files", *COUNTS]
        cells = [[name, *(f"{group[key]:,}" for key in headings[1:])] for name, group in groups.items()]
        texts.append(report.markdown([headings, *cells], code=False))
    reasons = {reason for row in record.latest(parts, "tests") for reason in row["skip_reasons"]}
    if reasons:
        texts.append("Skipped because: " + "; ".join(sorted(reasons)) + ".")
    texts += ["## Runs", report.markdown(parts_cells(parts), code=False)]
    again = runs_again(parts)
    if again:
        texts += ["Ran more than once; the last result counts:", "\n".join(again)]
    return "\n\n".join(texts) + "\n"


def compiler_parts(
    version: str, benchmarks: Sequence[record.Part], stored: Sequence[against.Stored]
) -> list[str]:
    """Every table of one compiler's benchmarks, the summary first."""
    texts = [f"## Kernels compiled by NVRTC {version}"]
    for part in benchmarks:
        ceilings = report.describe_ceilings(part["ceilings"])
        host = [report.describe_host(part["host"])] if "host" in part else []
        load = f"sustained figures: {part['sustain_seconds']:g} s of load each"
        texts.append(f"Run of {part['begin']}: " + "; ".join([ceilings, *host, load]) + ".")
    failed = record.errors(benchmarks)
    if failed:
        texts.append(f"Failed: {'; '.join(failed)}.")
    rows = families.named(record.latest(benchmarks, "bench"))
    summary = report.summary_cells(rows, stored)
    if len(summary) > 1:
        texts += ["The faster other library's time over rawmla's:", report.markdown(summary, code=False)]
    for family in families.FAMILIES:
        cells = report.family_cells(family, rows, stored)
        if len(cells) > 1:
            texts += [f"### {family.title}", report.markdown(cells)]
    return texts


def draw(parts: Sequence[record.Part], peers: Path) -> None:
    """The pictures of the newest compiler's benchmarks."""
    for version, benchmarks in list(record.compilers(parts).items())[:1]:
        rows = families.named(record.latest(benchmarks, "bench"))
        device = parts[0]["machine"]["device"]
        ceilings = [ceiling for part in benchmarks for ceiling in part["ceilings"]]
        plot.roofline(rows, ceilings, f"rawmla on {device}, kernels compiled by NVRTC {version}", ROOFLINE)
        plot.bars(
            speed.summary(rows, stored_peers(parts, peers)),
            f"rawmla beside the fastest other library, {device}",
            SPEED,
        )


def replace_section(readme: str, section: str) -> str:
    """README with the text between the markers replaced; ValueError when they are not there once each."""
    if readme.count(BEGIN) != 1 or readme.count(END) != 1:
        raise ValueError(f"README.md must hold {BEGIN!r} and {END!r} once each")
    head, rest = readme.split(BEGIN)
    tail = rest.split(END)[1]
    return f"{head}{BEGIN}\n{section}\n{END}{tail}"


def main(arguments: list[str] | None = None) -> int:
    """Entry point; the exit status is 1 when --check finds a page out of date, and 2 where the record is not
    as its runs wrote it.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="change nothing; status 1 when a page is out of date"
    )
    options = parser.parse_args(arguments)
    try:
        parts = record.merged([record.read(RECORD)]) if RECORD.exists() else []
    except record.RecordError as error:
        print(f"update_figures.py: {error}", file=sys.stderr)
        return 2
    pages = {
        README: replace_section(README.read_text(), readme_section(parts, PEERS)),
        PAGE: performance_page(parts, PEERS),
    }
    if options.check:
        return 0 if all(path.exists() and path.read_text() == text for path, text in pages.items()) else 1
    for path, text in pages.items():
        files.write_whole(path, text)
    draw(parts, PEERS)
    if parts and parts[0]["source_sha256"] != source.source_hash(ROOT):
        print("note: the record was made from other sources than these")
    return 0


if __name__ == "__main__":
    sys.exit(main())
