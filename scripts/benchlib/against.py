"""Stored results to compare with: files of bench.py --json, gpu_check.py records and lists of other
libraries' timings.
"""

import json
import math
from pathlib import Path
from typing import Any

from .cases import is_prefill, is_sparse

MATCH_FIELDS = (
    "op",
    "b",
    "s_q",
    "s_k",
    "s_kv",
    "h_q",
    "h_kv",
    "d_qk",
    "page_block_size",
    "causal",
    "varlen",
    "dtype",
    "batch_invariant",
    "topk",
    "extra_topk",
    "extra_page_block_size",
    "extra_length",
    "family",
    "layout",
    "tokens",
    "requests",
    "rows",
    "compact",
    "context",
    "parts",
)
"""Fields that identify a case. A stored row matches when every one of these that it has is equal."""

DEFAULTS: dict[str, Any] = {
    "op": "dense_decode",
    "varlen": False,
    "dtype": "bf16",
    "batch_invariant": False,
}
"""What a stored row means when it leaves a field out; of sparse decoding only the last one,
of sparse prefill and the operations around decoding none."""

TIMED_FIELDS = ("b", "s_kv", "family")
"""An object without any of these is not the timing of a case."""

OTHER_NAMES = {
    "page": "page_block_size",
    "extra_page": "extra_page_block_size",
    "extra_len": "extra_length",
}
"""What stored rows also call fields."""

METADATA_FIELDS = ("op", "b")
LATENCY_SUFFIX = "_us"


def _timings(row: dict[str, Any], label: str) -> dict[str, float]:
    """Label -> µs of each kernel timing in a stored row: `us`, or `<library>_us` and `<library>_best_us`
    per library.
    """
    if isinstance(row.get("us"), (int, float)):
        return {label: float(row["us"])}
    found: dict[str, float] = {}
    for key, value in row.items():
        if key.endswith(LATENCY_SUFFIX) and key != "meta_us" and isinstance(value, (int, float)):
            name = key.removesuffix(LATENCY_SUFFIX).removesuffix("_best") + " fixed"
            found[name] = min(float(value), found.get(name, math.inf))
    return found


def load(path: Path) -> list[dict[str, Any]]:
    """Stored rows, each with its case fields, a `label` and `us`.

    Reads a file written by --json (its `rows`), a gpu_check record (each entry of its `bench`), or an
    object whose list-valued keys hold rows, the key being the label. Raises ValueError when no timing is
    found.
    """
    data = json.loads(path.read_text())
    found: list[dict[str, Any]] = []

    def add(rows: list[Any], label: str) -> None:
        for row in rows:
            if not isinstance(row, dict) or not any(field in row for field in TIMED_FIELDS):
                continue
            row = {OTHER_NAMES.get(key, key): value for key, value in row.items()}
            case = dict(DEFAULTS)
            if "family" in row or is_prefill({**DEFAULTS, **row}):
                case = {}
            elif is_sparse({**DEFAULTS, **row}):
                case = {"batch_invariant": DEFAULTS["batch_invariant"]}
            case |= {key: row[key] for key in MATCH_FIELDS if key in row}
            found.extend({**case, "label": name, "us": us} for name, us in _timings(row, label).items())

    if isinstance(data, dict) and isinstance(data.get("rows"), list):
        add(data["rows"], path.stem)
    elif isinstance(data, dict) and isinstance(data.get("bench"), dict):
        for version, run in data["bench"].items():
            add(run.get("rows", []), f"{path.stem} NVRTC {version}")
    elif isinstance(data, dict):
        for key, value in data.items():
            if isinstance(value, list):
                add(value, key)
    if not found:
        raise ValueError(
            f"{path}: no timings found (expected `rows`, `bench`, or lists of objects with `b` and `us`)"
        )
    return found


def matches(stored: dict[str, Any], row: dict[str, Any]) -> bool:
    """Whether a stored row describes the same case as a measured one."""
    fields = METADATA_FIELDS if row["op"] == "metadata" else MATCH_FIELDS
    return all(stored[field] == row.get(field) for field in fields if field in stored)


def ratios(stored: list[dict[str, Any]], row: dict[str, Any]) -> dict[str, float]:
    """Per label: the stored µs over the measured µs (above 1: the measured run is faster). First match of a
    label wins.
    """
    answer: dict[str, float] = {}
    for other in stored:
        if other["label"] not in answer and matches(other, row):
            answer[other["label"]] = other["us"] / row["us"]
    return answer


def geometric_mean(values: list[float]) -> float:
    """Geometric mean of positive values."""
    return math.exp(sum(math.log(value) for value in values) / len(values))
