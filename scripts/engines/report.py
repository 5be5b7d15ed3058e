"""Tables of the results, in Markdown.

    python scripts/engines report RESULTS.jsonl [--write]

`--write` replaces the tables of each engine in docs/engines.md, and tokens per second in README.md.
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bench.tables import Cells, markdown

from . import ROOT, host, record, traces, waves
from .record import Row

BEGIN, END = "<!-- figures: begin (scripts/engines, {}) -->", "<!-- figures: end -->"
TITLES = {"vllm": "vLLM", "sglang": "SGLang"}
README_GROUP = "speed-dense16"
LIBRARIES = {
    "FLASHMLA": "FlashMLA",
    "FLASHMLA_SPARSE": "FlashMLA",
    "FLASH_ATTN_MLA": "FlashAttention-3",
    "TRITON_MLA": "Triton",
    "FLASH_ATTN": "FlashAttention-3",
    "TRITON_ATTN": "Triton",
    "flashmla": "FlashMLA",
    "dsa": "FlashMLA",
    "fa3": "FlashAttention-3",
    "triton": "Triton",
    "flash_mla": "FlashMLA",
    "rawmla": "rawmla",
}
"""Whose kernels run in a backend of an engine as it is."""


def way(row: Row) -> str:
    """Whose attention a job ran, and how it came into the engine; a mode that ran no kernel of rawmla's is
    another library's.
    """
    library = LIBRARIES[row["backend"]]
    if row["mode"] == "none":
        return library
    return f"{library} in spite of {row['mode']}" if row.get("kernels") == [] else f"rawmla, {row['mode']}"


def agreement(row: Row, reference: Row | None) -> list[str]:
    """Texts that equal the reference's, and tokens before the first difference of each."""
    if reference is None or reference is row:
        return ["-", "-"]
    leads = []
    for ids, others in zip(row["ids"], reference["ids"], strict=True):
        equal = [one == other for one, other in zip(ids, others, strict=True)]
        leads.append(equal.index(False) if False in equal else len(ids))
    texts = sum(lead == len(ids) for lead, ids in zip(leads, row["ids"], strict=True))
    tokens = sum(map(len, row["ids"]))
    return [f"{texts} of {len(leads)}", f"{sum(leads) / tokens:.1%}"]


def served_cells(rows: list[Row], scores: dict[str, Row]) -> Cells:
    """A row for the engines of a group that chose the same tokens with the same log probabilities."""
    cells = [["served", "attention", "case", "equal texts", "equal tokens"]]
    cells[0] += ["mean error", "largest", "not the best", "repeated alike", "tokens a step"]
    rows = [row for row in rows if "ids" in row]
    for its in by(rows, lambda row: (row["group"], LIBRARIES[row["backend"]], str(row["logprobs"]))).values():
        row = its[0]
        same = [one for one in rows if one["group"] == row["group"]]
        reference = next((one for one in same if one["mode"] == "none"), None)
        score = scores.get(row["name"])
        errors = ["-"] * 3
        if score:
            errors = [
                f"{score['mean']:.4f}",
                f"{score['max']:.3f}",
                f"{score['not_best'] / score['tokens']:.1%}",
            ]
        alike = f"{row['again'].count(None)} of {len(row['again'])}"
        pace = f"{sum(map(len, row['ids'])) / row['steps']:.1f}" if "steps" in row else "-"
        ways = " and ".join(dict.fromkeys(map(way, its))).replace(" and rawmla,", " and")
        cases = ", ".join(dict.fromkeys(one["case"] for one in its))
        cells.append([row["group"], ways, cases, *agreement(row, reference), *errors, alike, pace])
    return cells


def invariance_cells(rows: list[Row]) -> Cells:
    """A row for each engine whose prompts ran alone and in a batch."""
    cells = [["served", "attention", "equal bits", "lengths that differ", "first module that differs"]]
    for row in rows:
        if "invariance" in row:
            found = row["invariance"]
            differ = [one for one in found if one["logprob"] is not None]
            origins = Counter(f"`{one['origin']['module']}`" for one in found if one["origin"])
            origins["after the last module"] = sum(not one["origin"] for one in differ)
            lengths = ", ".join(f"{one['length']} (token {one['logprob']})" for one in differ) or "-"
            modules = ", ".join(f"{name} ({count})" for name, count in origins.most_common(4) if count) or "-"
            equal = f"{len(found) - len(differ)} of {len(found)}"
            cells.append([row["group"], way(row), equal, lengths, modules])
    return cells


def by(rows: Iterable[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    """Rows in groups, in the order of their first ones."""
    groups: dict[Any, list[Row]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    return dict(groups)


def spread(values: list[float], digits: int = 0) -> str:
    """The median, with the least and the largest where there are several."""
    if not values:
        return "-"
    text = f"{statistics.median(values):,.{digits}f}"
    if len(values) > 1:
        text += f" ({min(values):,.{digits}f} to {max(values):,.{digits}f})"
    return text


def host_cells(rows: list[Row]) -> Cells:
    """Host time of a call of each timed function, by the way into the engine. Times are scaled to the CPU of
    the fastest process, by the time of a function that is the same in all.
    """
    rows = [row for row in rows if "host" in row]
    if not rows:
        return []
    calls = {
        row["name"]: {one["function"]: one["us"] / one["calls"] for one in row["host"]["functions"]}
        for row in rows
    }
    slowness = {name: of_job[host.SAME] for name, of_job in calls.items()}
    least = min(slowness.values())
    ways = by(rows, way)
    cells = [["µs of host time a call", *ways]]
    cells.append(
        [
            "a step, as measured",
            *(spread([x for row in its for x in row["host"]["step_us"]]) for its in ways.values()),
        ]
    )
    paces = {name: [slowness[row["name"]] / least for row in its] for name, its in ways.items()}
    cells.append(["slowness of the CPU", *(spread(its, 2) for its in paces.values())])
    for function in dict.fromkeys(function for of_job in calls.values() for function in of_job):
        cells.append([f"`{function}`"])
        for its in ways.values():
            names = [row["name"] for row in its if function in calls[row["name"]]]
            cells[-1].append(spread([calls[name][function] * least / slowness[name] for name in names], 1))
    return cells


def kernel_cells(rows: list[Row]) -> Cells:
    """The decode kernel under every condition, and inside the engine."""
    cells = [
        ["condition", "kernels of", "µs a layer", "µs in a loop", "µs of the largest kernel", "its grid"]
    ]
    for row in rows:
        if row["group"] != "kernel":
            continue
        found = row.get("kernel") or [
            {"condition": "in the engine", "loop_us": None, **one["gpu"]} for one in row["speed"]
        ]
        for one in found:
            largest = next(filter(traces.is_attention, one["kernels"]))
            loop = "-" if one["loop_us"] is None else f"{one['loop_us']:.1f}"
            times = [f"{one['attention_us']:.1f}", loop, f"{largest['us']:.1f}"]
            cells.append([one["condition"], way(row), *times, str(largest.get("grid", "-"))])
    return cells


def speed_cells(rows: list[Row]) -> Cells:
    """Decoding by batch size: medians over restarts of each restart's median window."""
    cells = [["requests", "attention", "tokens/s", "µs a step", "GPU µs a step", "attention, µs a layer"]]
    batches = sorted({one["batch"] for row in rows for one in row["speed"]})
    for batch in batches:
        for name, its in by(rows, way).items():
            found = [one for row in its for one in row["speed"] if one["batch"] == batch]
            windows = [one["windows"] for one in found]
            columns = [
                spread([statistics.median(window[key] for window in one) for one in windows])
                for key in ("tokens_per_s", "step_us")
            ]
            traced = [one["gpu"] for one in found if "gpu" in one]
            columns += [spread([one["busy_us"] for one in traced])]
            columns += [spread([one["attention_us"] for one in traced], 1)]
            cells.append([str(batch), name, *columns])
    return cells


def readme_cells(rows: list[Row]) -> Cells:
    """Tokens per second by batch size, with a column for each way into the engine."""
    ways = by(rows, way)
    cells = [["requests", *ways]]
    for batch in sorted({one["batch"] for row in rows for one in row["speed"]}):
        cells.append([str(batch)])
        for its in ways.values():
            windows = [one["windows"] for row in its for one in row["speed"] if one["batch"] == batch]
            medians = [statistics.median(window["tokens_per_s"] for window in one) for one in windows]
            cells[-1].append(f"{statistics.median(medians):,.0f}")
    return cells


def page(rows: list[Row]) -> str:
    """All tables that have rows, of one engine."""
    order = {job.name: number for number, job in enumerate(waves.jobs([*waves.WAVES]))}
    done, scores = record.jobs(rows), record.scores(rows)
    done.sort(key=lambda row: order.get(row["name"], len(order)))
    machines = Counter(", ".join(row["machine"].values()) for row in done if "machine" in row)
    engine = TITLES[rows[0].get("engine", "vllm")] if rows else ""
    texts = [f"Machine: {engine}, torch, transformers and GPU {'; '.join(machines)}."] if machines else []
    tables = {
        "Tokens and log probabilities": served_cells(done, scores),
        "Prompts alone and in a batch": invariance_cells(done),
        "Host time": host_cells(done),
        "FlashMLA's kernel": kernel_cells(done),
    }
    for group, its in by(of_speed(done), lambda row: row["group"]).items():
        tables[f"Speed: {group.removeprefix('speed-')}"] = speed_cells(its)
    for title, cells in tables.items():
        if len(cells) > 1:
            texts += [f"### {title}", markdown(cells, code=False)]
    failed = by((row for row in rows if "error" in row), lambda row: row["error"])
    if failed:
        names = {why: ", ".join(f"`{row['name']}`" for row in its) for why, its in failed.items()}
        texts += ["### Did not run", "\n".join(f"- {its}: {why}" for why, its in names.items())]
    return "\n\n".join(texts)


def of_speed(rows: list[Row]) -> list[Row]:
    """Jobs that decoded at several batch sizes."""
    return [row for row in rows if "speed" in row and row["group"] != "kernel"]


def put(path: Path, engine: str, text: str) -> None:
    """Write text between the markers of an engine in a page."""
    begin = BEGIN.format(TITLES[engine])
    head, rest = path.read_text().split(begin)
    _, tail = rest.split(END, 1)
    path.write_text(f"{head}{begin}\n{text}\n{END}{tail}")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="engines report", description=__doc__)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--write", action="store_true", help="into docs/engines.md and README.md")
    options = parser.parse_args(arguments)
    rows = record.read(*options.results)
    scores = [row for row in rows if "oracle" in row]
    for engine, its in by((row for row in rows if "oracle" not in row), lambda row: row["engine"]).items():
        text = page([*its, *scores])
        if not options.write:
            print(text)
            continue
        put(ROOT / "docs" / "engines.md", engine, text)
        shown = [row for row in of_speed(record.jobs(its)) if row["group"] == README_GROUP]
        if shown:
            put(ROOT / "README.md", engine, markdown(readme_cells(shown), code=False))
    return 0
