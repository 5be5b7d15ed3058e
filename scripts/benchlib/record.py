"""The record of what GPU machines measured: parts, each written by a run of a stage of scripts/gpu_check.py.

A part has its machine, its sources, its rows and a hash of all of them. It is never changed: a file, tool or
case that runs again gets another row in another part. The later row counts, and the pages show both.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from . import files
from .columns import Row

Part = dict[str, Any]

NAMES = {"bench": "case", "tests": "file", "sanitizer": "tool"}
"""Stages, and the field that names a row of each."""

SAME = ("source_sha256", "device", "driver")
"""What the parts of one record have in common."""


class RecordError(ValueError):
    """A file is no record, its parts were changed, or they are not of one record."""


def hash_of(part: Part) -> str:
    """SHA-256 of a part without its hash."""
    body = {key: value for key, value in part.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def sealed(part: Part) -> Part:
    """The part with its hash."""
    return {**part, "sha256": hash_of(part)}


def identity(part: Part) -> dict[str, Any]:
    """The fields of SAME."""
    return {key: part.get(key, part["machine"].get(key)) for key in SAME}


def read(path: Path) -> list[Part]:
    """The parts of a record. Raises RecordError where the file is no record, or a part is not as its run
    wrote it.
    """
    try:
        parts: list[Part] = json.loads(path.read_text())["parts"]
        hashes = [(part["stage"], part["begin"], part["sha256"], hash_of(part)) for part in parts]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecordError(f"{path}: expected a record, got {type(error).__name__}: {error}") from None
    for stage, begin, expected, got in hashes:
        if got != expected:
            raise RecordError(
                f"{path}, part {stage} of {begin}: expected hash {expected}, got {got}: it was changed after "
                "its run"
            )
    return parts


def write(parts: Iterable[Part], path: Path) -> None:
    """Write the parts, a row a line. An interrupted write leaves the old file."""
    texts = []
    for part in parts:
        rows = ",\n".join(json.dumps(row, sort_keys=True) for row in part["rows"])
        rest = json.dumps({key: value for key, value in part.items() if key != "rows"}, sort_keys=True)
        texts.append(f'{rest[:-1]}, "rows": [\n{rows}\n]}}')
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_whole(path, '{"parts": [\n' + ",\n".join(texts) + "\n]}\n")


def merged(records: Sequence[Sequence[Part]]) -> list[Part]:
    """The parts of several records, in the order in which they began. Raises RecordError where they are of
    different sources, GPU models or drivers.
    """
    parts = list({part["sha256"]: part for record in records for part in record}.values())
    for part in parts[1:]:
        expected, got = identity(parts[0]), identity(part)
        if got != expected:
            raise RecordError(f"part {part['stage']} of {part['begin']}: expected {expected}, got {got}")
    return sorted(parts, key=lambda part: str(part["begin"]))


def results(parts: Iterable[Part], stage: str) -> dict[str, list[Row]]:
    """Every row of a stage by its name: the results of each, the first one first."""
    found: dict[str, list[Row]] = {}
    for part in parts:
        if part["stage"] == stage:
            for row in part["rows"]:
                found.setdefault(row[NAMES[stage]], []).append(row)
    return found


def latest(parts: Iterable[Part], stage: str) -> list[Row]:
    """The rows of a stage that count."""
    return [rows[-1] for rows in results(parts, stage).values()]


def errors(parts: Iterable[Part]) -> list[str]:
    """What went wrong in benchmarks: cases whose last result is an error, and what is of no case."""
    parts = list(parts)
    found = [f"{row['case']}: {row['error']}" for row in latest(parts, "bench") if "error" in row]
    for part in parts:
        of_rows = {f"{row['case']}: {row['error']}" for row in part["rows"] if "error" in row}
        found += [error for error in part.get("errors", []) if error not in of_rows]
    return found


def compilers(parts: Iterable[Part]) -> dict[str, list[Part]]:
    """The benchmarks by the NVRTC version of their kernels, the newest first, by the numbers in its name."""
    found: dict[str, list[Part]] = {}
    for part in parts:
        if part["stage"] == "bench":
            found.setdefault(part["machine"]["nvrtc"], []).append(part)
    return dict(sorted(found.items(), key=lambda item: _numbers(item[0]), reverse=True))


def _numbers(version: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", version)]


def repeated(parts: Iterable[Part], stage: str) -> dict[str, list[Row]]:
    """The results of what ran more than once."""
    return {name: rows for name, rows in results(parts, stage).items() if len(rows) > 1}
