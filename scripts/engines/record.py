"""The results: a file with a line of JSON for each job, and one for each result that the oracle scored.

A later line of a name counts in place of an earlier one.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
_lock = threading.Lock()


def read(*paths: Path) -> list[Row]:
    """The lines that count, jobs and scores; none of a file that is not there."""
    lines = [line for path in paths if path.exists() for line in path.read_text().splitlines()]
    rows = [json.loads(line) for line in lines]
    return list({("oracle" in row, row.get("oracle") or row["name"]): row for row in rows}.values())


def append(path: Path, rows: Iterable[Row]) -> None:
    """Add lines at once, so that a run that is stopped keeps what it has."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    with _lock, path.open("a") as file:
        file.write(text)


def jobs(rows: Iterable[Row]) -> list[Row]:
    """The rows of jobs that did not fail."""
    return [row for row in rows if "oracle" not in row and "error" not in row]


def scores(rows: Iterable[Row]) -> dict[str, Row]:
    """The oracle's rows by the names of the jobs."""
    return {row["oracle"]: row for row in rows if "oracle" in row}


def unscored(rows: list[Row]) -> list[Row]:
    """Jobs with chosen tokens that the oracle has not seen."""
    scored = scores(rows)
    return [row for row in jobs(rows) if "ids" in row and row["name"] not in scored]
