#!/usr/bin/env python3
"""Write README's measured section, docs/performance.md and docs/roofline.png from docs/gpu-record.json.

README gets a table of a few cases between its two markers, docs/performance.md every case of every compiler.
Times of other libraries come from docs/peers-h200.json. With --page only the page of every case is written,
from another record. Without a record both say that nothing has been measured yet.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import benchlib
from benchlib import against, columns, families, files, plot, report, source
from benchlib.columns import EMPTY, Column, Row

ROOT = benchlib.REPO_ROOT
README = ROOT / "README.md"
RECORD = ROOT / "docs" / "gpu-record.json"
PEERS = ROOT / "docs" / "peers-h200.json"
PAGE = ROOT / "docs" / "performance.md"
PLOT = ROOT / "docs" / "roofline.png"
BEGIN = "<!-- figures: begin (scripts/update_figures.py) -->"
END = "<!-- figures: end -->"
NOTHING_YET = "Nothing has been measured at this version yet: there is no `docs/gpu-record.json`."

README_CASES = (
    "decode-b128-q1-k8192-h128-bf16-fixed",
    "decode-b128-q1-k8192-h64-bf16-fixed",
    "decode-b1-q1-k8192-h128-bf16-fixed",
    "sparse-v32-b2-q2-k32768-h128-top2048",
    "sparse-v32-b128-q1-k32768-h16-top2048",
    "sparse-model1-b128-q2-k16384-h64-top128-extra512page64",
    "prefill-bf16d576-q4096-kv131072-h128-top2048",
    "mha-b2-s8192-h16-d128-causal-bf16-fixed",
    "mha-b32-s512-h16-d128-causal-bf16-fixed",
    "prefix-b8-q1024-ctx8192-h32kv8-d128-bf16page16",
    "flex-b2-s8192-h16-d128-causal",
)
"""Large and small batches, many and few heads of each operation, and where rawmla gains least or loses."""

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
    "are of an H200: docs/performance-h200.md."
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


def test_groups(record: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Group -> files, passed, failed and skipped."""
    groups: dict[str, dict[str, int]] = {}
    for name, counts in sorted(record["tests"].items()):
        total = groups.setdefault(group_of_tests(name), {"files": 0, "passed": 0, "failed": 0, "skipped": 0})
        total["files"] += 1
        for key in ("passed", "failed", "skipped"):
            total[key] += counts[key]
    return groups


def summary_of_tests(record: dict[str, Any]) -> str:
    """One sentence on tests and sanitizer."""
    counts = record["tests"].values()
    totals = ", ".join(
        f"{sum(one[key] for one in counts):,} {key}" for key in ("passed", "failed", "skipped")
    )
    parts = [totals if counts else "not run"]
    for verdict, clean in (("clean", True), ("not clean", False)):
        tools = sorted(tool for tool, run in record["sanitizer"].items() if run["clean"] is clean)
        if tools:
            parts.append(f"{verdict} under compute-sanitizer's {', '.join(tools)}")
    return f"Tests there: {'; '.join(parts)}."


def describe_tests(record: dict[str, Any]) -> str:
    """A sentence each on tests and sanitizer."""
    groups = test_groups(record)
    if not groups:
        sentences = ["Tests on that machine: not run."]
    else:
        sums = {key: sum(group[key] for group in groups.values()) for key in ("passed", "failed", "skipped")}
        totals = ", ".join(f"{count:,} {key}" for key, count in sums.items())
        parts = []
        for name, group in groups.items():
            lost = [f"{group[key]} {key}" for key in ("failed", "skipped") if group[key]]
            parts.append(" and ".join([f"{name} {group['passed']:,}", *lost]))
        sentences = [f"Tests on that machine: {totals} ({', '.join(parts)})."]
        several = [counts for counts in record["tests"].values() if counts.get("gpus", 1) > 1]
        if several:
            gpus = min(counts["gpus"] for counts in several)
            passed = sum(counts["passed"] for counts in several)
            sentences.append(
                f"{passed:,} of those that passed are in files that ran on a machine with {gpus} GPUs; "
                "only a few tests use more than one."
            )
    if record["sanitizer"]:
        verdicts = (
            f"{tool} {'clean' if run['clean'] else 'not clean'} ({run['passed']} tests)"
            for tool, run in sorted(record["sanitizer"].items())
        )
        sentences.append("compute-sanitizer: " + ", ".join(verdicts) + ".")
    return " ".join(sentences)


def describe_machine(record: dict[str, Any]) -> str:
    """Device, driver, date and sources."""
    return (
        f"{record['device']}, driver {record['driver']}, {record['date']}, "
        f"sources `{record['source_sha256'][:12]}`."
    )


def compilers(record: dict[str, Any]) -> list[str]:
    """NVRTC versions of the record's benchmarks, newest first: by the numbers in their names."""
    return sorted(
        record["bench"], key=lambda version: [int(part) for part in re.findall(r"\d+", version)], reverse=True
    )


def stored_peers(record: dict[str, Any], path: Path) -> list[against.Stored]:
    """Times of other libraries on the record's device; none of another device's."""
    peers = json.loads(path.read_text())
    return against.load(path) if str(peers["device"]).startswith(record["device"]) else []


def readme_cells(rows: Sequence[Row], stored: Sequence[against.Stored]) -> report.Cells:
    """The few cases of README, each beside the fastest other library."""

    way = against.LIST_WAY

    def peer(row: Row) -> str:
        known = [(o.times[way], o.label) for o in stored if o.case == row["case"] and way in o.times]
        known += [(p.theirs, p.label) for p in against.pairs(row, []) if p.way == way]
        return "{:.1f} {}".format(*min(known)) if known else EMPTY

    def ratio(row: Row) -> str:
        pair = against.better(against.pairs(row, stored), way)
        return f"{pair.ratio:.2f}" if pair else EMPTY

    shown = (
        columns.NAME,
        columns.RESTED,
        columns.WITHOUT_RESTS,
        columns.SUSTAINED,
        Column("fastest other library, no rests µs", peer),
        Column("its time / rawmla's", ratio),
    )
    by_case = {row["case"]: row for row in rows}
    return columns.texts(shown, [by_case[name] for name in README_CASES if name in by_case])


def readme_section(record: dict[str, Any] | None, peers: Path) -> str:
    """The Markdown between README's markers."""
    if record is None:
        return NOTHING_YET
    parts = [f"{describe_machine(record)} {summary_of_tests(record)}"]
    if record["bench"]:
        version = compilers(record)[0]
        rows = families.named(record["bench"][version]["rows"])
        stored = stored_peers(record, peers)
        parts += [
            f"A few cases, kernels compiled by NVRTC {version}; every case is in "
            "[docs/performance.md](docs/performance.md). In their names b counts requests, q query tokens of "
            "each, s, k, kv or ctx tokens of context, h heads, top selected tokens:",
            report.markdown(readme_cells(rows, stored)),
            legend(stored),
            "![Roofline of the benchmark](docs/roofline.png)",
        ]
    return "\n\n".join(parts)


def performance_page(record: dict[str, Any] | None, peers: Path, name: str = RECORD.name) -> str:
    """docs/performance.md, or such a page of the record with another name."""
    parts = ["# Performance", f"Written by `scripts/update_figures.py` from `docs/{name}`."]
    if record is None:
        return "\n\n".join([parts[0], NOTHING_YET]) + "\n"
    parts.append(describe_machine(record))
    if record["bench"]:
        stored = stored_peers(record, peers)
        parts += [
            f"`{peers.relative_to(ROOT).as_posix()}` has other libraries' times and how they were taken. "
            f"{legend(stored)}",
            "[benchmark.md](benchmark.md) says more on how the figures are made.",
        ]
        if name == RECORD.name:
            parts.append("![Roofline of the benchmark](roofline.png)")
        for version in compilers(record):
            parts += compiler_parts(version, record["bench"][version], stored)
        methods = dict.fromkeys(run["method"] for run in record["bench"].values())
        parts += ["## How it was measured", *methods]
    parts += ["## Tests", describe_tests(record)]
    groups = test_groups(record)
    if groups:
        headings = ["tests", "files", "passed", "failed", "skipped"]
        cells = [[name, *(f"{group[key]:,}" for key in headings[1:])] for name, group in groups.items()]
        parts.append(report.markdown([headings, *cells], code=False))
    reasons = sorted(
        {reason for counts in record["tests"].values() for reason in counts.get("skip_reasons", {})}
    )
    if reasons:
        parts.append("Skipped because: " + "; ".join(reasons) + ".")
    return "\n\n".join(parts) + "\n"


def compiler_parts(version: str, run: dict[str, Any], stored: Sequence[against.Stored]) -> list[str]:
    """Every table of one compiler's benchmark, the summary first."""
    ceilings = report.describe_ceilings(run["ceilings"])
    host = [report.describe_host(run["host"])] if "host" in run else []
    load = [describe_load(run)] if "sustain_seconds" in run else []
    parts = [
        f"## Kernels compiled by NVRTC {version}",
        "; ".join([f"{ceilings[0].upper()}{ceilings[1:]}", *host, *load]) + ".",
    ]
    rows = families.named(run["rows"])
    failed = [f"`{row['case']}` ({row['error']})" for row in rows if "error" in row]
    if failed:
        parts.append(f"Failed: {'; '.join(failed)}.")
    summary = report.summary_cells(rows, stored)
    if len(summary) > 1:
        parts += ["The faster other library's time over rawmla's:", report.markdown(summary, code=False)]
    for family in families.FAMILIES:
        cells = report.family_cells(family, rows, stored)
        if len(cells) > 1:
            parts += [f"### {family.name.capitalize()}", report.markdown(cells)]
    return parts


def describe_load(run: dict[str, Any]) -> str:
    """How long the load of a sustained figure was."""
    return f"sustained figures: {run['sustain_seconds']:g} s of load each"


def replace_section(readme: str, section: str) -> str:
    """README with the text between the markers replaced; ValueError when they are not there once each."""
    if readme.count(BEGIN) != 1 or readme.count(END) != 1:
        raise ValueError(f"README.md must hold {BEGIN!r} and {END!r} once each")
    head, rest = readme.split(BEGIN)
    tail = rest.split(END)[1]
    return f"{head}{BEGIN}\n{section}\n{END}{tail}"


def main(arguments: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--record", type=Path, default=RECORD, help="the record to read (default docs/gpu-record.json)"
    )
    parser.add_argument(
        "--page", type=Path, help="write the page of every case there, and nothing else: for another record"
    )
    parser.add_argument(
        "--check", action="store_true", help="change nothing; status 1 when a page is out of date"
    )
    options = parser.parse_args(arguments)
    record = json.loads(options.record.read_text()) if options.record.exists() else None
    if options.page is not None:
        pages = {options.page: performance_page(record, PEERS, options.record.name)}
    else:
        pages = {
            README: replace_section(README.read_text(), readme_section(record, PEERS)),
            PAGE: performance_page(record, PEERS),
        }
    if options.check:
        return 0 if all(path.exists() and path.read_text() == text for path, text in pages.items()) else 1
    for path, text in pages.items():
        files.write_whole(path, text)
    if record is not None and record["bench"] and options.page is None:
        version = compilers(record)[0]
        title = f"rawmla on {record['device']}, kernels compiled by NVRTC {version}"
        plot.roofline(record["bench"][version], title, PLOT)
    if record is not None and options.page is None and record["source_sha256"] != source.source_hash(ROOT):
        print("note: the record was made from other sources than these")
    return 0


if __name__ == "__main__":
    sys.exit(main())
