#!/usr/bin/env python3
"""Write the README's measured section and docs/roofline.png from docs/gpu-record.json.

Everything between the two markers is replaced. Without a record the section says that nothing has been
measured yet.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import benchlib
from benchlib import plot, report, source

ROOT = benchlib.REPO_ROOT
README = ROOT / "README.md"
RECORD = ROOT / "docs" / "gpu-record.json"
PLOT = ROOT / "docs" / "roofline.png"
BEGIN = "<!-- figures: begin (scripts/update_figures.py) -->"
END = "<!-- figures: end -->"
NOTHING_YET = "Nothing has been measured at this version yet: there is no `docs/gpu-record.json`."


def describe_tests(record: dict[str, Any]) -> str:
    """One sentence each on tests and sanitizer."""
    groups = record["tests"].values()
    totals = (f"{sum(group[key] for group in groups)} {key}" for key in ("passed", "failed", "skipped"))
    sentences = [f"Tests on that machine: {', '.join(totals) if groups else 'not run'}."]
    if record["sanitizer"]:
        verdicts = (
            f"{tool} {'clean' if run['clean'] else 'not clean'}" for tool, run in record["sanitizer"].items()
        )
        sentences.append("compute-sanitizer: " + ", ".join(verdicts) + ".")
    return " ".join(sentences)


def figures(record: dict[str, Any] | None) -> str:
    """The Markdown between the markers."""
    if record is None:
        return NOTHING_YET
    parts = [
        f"{record['device']}, driver {record['driver']}, {record['date']}, "
        f"sources `{record['source_sha256'][:12]}`. " + describe_tests(record)
    ]
    for version, run in sorted(record["bench"].items(), reverse=True):
        ceilings = report.describe_ceilings(run["ceilings"])
        parts.append(
            f"### Kernels compiled by NVRTC {version}\n\n"
            f"{ceilings[0].upper()}{ceilings[1:]}; "
            f"{report.describe_host(run['host'])}."
        )
        parts.append(report.markdown_results(run["rows"]))
    if record["bench"]:
        parts.extend(dict.fromkeys(run["method"] for run in record["bench"].values()))
        parts.append("![Roofline of the benchmark](docs/roofline.png)")
    return "\n\n".join(parts)


def replace_section(readme: str, section: str) -> str:
    """The README with the text between the markers replaced; ValueError when they are not there once each."""
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
        "--check", action="store_true", help="change nothing; status 1 when the README is out of date"
    )
    options = parser.parse_args(arguments)
    record = json.loads(options.record.read_text()) if options.record.exists() else None
    readme = README.read_text()
    updated = replace_section(readme, figures(record))
    if options.check:
        return 0 if updated == readme else 1
    README.write_text(updated)
    if record is not None and record["bench"]:
        runs = {f"NVRTC {version}": run for version, run in sorted(record["bench"].items(), reverse=True)}
        plot.roofline(runs, record["device"], PLOT)
    if record is not None and record["source_sha256"] != source.source_hash(ROOT):
        print("note: the record was made from other sources than these")
    return 0


if __name__ == "__main__":
    sys.exit(main())
