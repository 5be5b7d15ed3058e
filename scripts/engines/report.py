"""Tables of the results, in Markdown.

    python scripts/engines report RESULTS.jsonl [--write]

`--write` puts them between the markers of docs/engines.md.
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bench.tables import Cells, markdown

from . import ROOT, record
from .record import Row

PAGE = ROOT / "docs" / "engines.md"
BEGIN, END = "<!-- figures: begin (scripts/engines) -->", "<!-- figures: end -->"
LIBRARIES = {
    "FLASHMLA": "FlashMLA",
    "FLASHMLA_SPARSE": "FlashMLA",
    "FLASH_ATTN_MLA": "FlashAttention-3",
    "TRITON_MLA": "Triton",
    "FLASH_ATTN": "FlashAttention-3",
    "TRITON_ATTN": "Triton",
    "flash_mla": "FlashMLA",
    "rawmla": "rawmla",
}
"""Whose kernels run in a backend of vLLM as it is."""


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
    """A row for each engine that served the prompts."""
    cells = [["served", "attention", "case", "equal texts", "equal tokens"]]
    cells[0] += ["mean error", "largest", "not the best", "repeated alike", "tokens a step"]
    for row in rows:
        if "ids" not in row:
            continue
        same = [one for one in rows if one["group"] == row["group"] and "ids" in one]
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
        pace = f"{sum(map(len, row['ids'])) / row['steps']:.1f}"
        cells.append([row["group"], way(row), row["case"], *agreement(row, reference), *errors, alike, pace])
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


def layer_times(rows: list[Row]) -> list[float]:
    """Host microseconds of a layer in each round: how much longer a step takes with more layers."""
    times = []
    for pair in by(rows, lambda row: row["round"]).values():
        if len(pair) == 2:
            (least, one), (most, other) = sorted((row["layers"], min(row["host"]["step_us"])) for row in pair)
            times.append((other - one) / (most - least))
    return times


def host_cells(rows: list[Row]) -> Cells:
    """Host time of a layer, then of each timed function a layer, by the way into the engine."""
    ways = by([row for row in rows if "host" in row], way)
    if not ways:
        return []
    cells = [["µs of host time a layer", *ways]]
    cells.append(["**whole layer**", *(spread(layer_times(its)) for its in ways.values())])
    functions: dict[str, dict[str, list[float]]] = {}
    for name, its in ways.items():
        for row in its:
            for one in row["host"]["functions"]:
                times = functions.setdefault(one["function"], {}).setdefault(name, [])
                times.append(one["us"] / row["layers"])
    for function, times_of in functions.items():
        shown = (spread(times_of[name], 1) if name in times_of else "-" for name in ways)
        cells.append([f"`{function}`", *shown])
    return cells


def kernel_cells(rows: list[Row]) -> Cells:
    """The decode kernel under every condition, and inside the engine."""
    cells = [["condition", "kernels of", "µs a layer", "µs in a loop", "launch of the largest kernel"]]
    for row in rows:
        if row["group"] != "kernel":
            continue
        found = row.get("kernel") or [
            {"condition": "in the engine", "loop_us": None, **one["gpu"]} for one in row["speed"]
        ]
        for one in found:
            largest = one["kernels"][0]
            launch = ", ".join(f"{key} {largest[key]}" for key in ("grid", "block", "us") if key in largest)
            loop = "-" if one["loop_us"] is None else f"{one['loop_us']:.1f}"
            cells.append([one["condition"], way(row), f"{one['attention_us']:.1f}", loop, launch])
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


def page(rows: list[Row]) -> str:
    """All tables that have rows."""
    done, scores = record.jobs(rows), record.scores(rows)
    machines = Counter(", ".join(row["machine"].values()) for row in done if "machine" in row)
    texts = [f"Machine: vLLM, torch, transformers and GPU {'; '.join(machines)}."] if machines else []
    tables = {
        "Tokens and log probabilities": served_cells(done, scores),
        "Prompts alone and in a batch": invariance_cells(done),
        "Host time": host_cells(done),
        "FlashMLA's kernel": kernel_cells(done),
    }
    of_speed = [row for row in done if "speed" in row and row["group"] != "kernel"]
    for group, its in by(of_speed, lambda row: row["group"]).items():
        tables[f"Speed: {group.removeprefix('speed-')}"] = speed_cells(its)
    for title, cells in tables.items():
        if len(cells) > 1:
            texts += [f"### {title}", markdown(cells, code=False)]
    failed = [f"- `{row['name']}`: {row['error']}" for row in rows if "error" in row]
    if failed:
        texts += ["### Did not run", "\n".join(failed)]
    return "\n\n".join(texts)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="engines report", description=__doc__)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--write", action="store_true", help="into docs/engines.md, between its markers")
    options = parser.parse_args(arguments)
    text = page([row for path in options.results for row in record.read(path)])
    if options.write:
        head, rest = PAGE.read_text().split(BEGIN)
        _, tail = rest.split(END)
        PAGE.write_text(f"{head}{BEGIN}\n{text}\n{END}{tail}")
    else:
        print(text)
    return 0
