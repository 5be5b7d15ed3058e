"""The record of what GPU machines measured: parts, each written by a run of a stage of scripts/gpu_check.py.

A part has its machine (with the number of GPUs), its sources, its rows and a hash of all of them. It is never
changed: a file, tool or case that runs again gets another row in another part. The later row counts, and the
pages show both.
"""

import datetime
import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from kit.gpu import missing_hopper_reason

from . import ROOT
from .cases import Row

Part = dict[str, Any]

RECORD = ROOT / "docs" / "gpu-record.json"

NAMES = {"bench": "case", "tests": "file", "sanitizer": "tool"}
"""Stages, and the field that names a row of each."""

SAME = ("source_sha256", "device", "driver", "nvrtc")
"""What the parts of one record have in common."""

OPTIONS = {"bench": ("bench_args",), "tests": ("tests",), "sanitizer": ()}
"""What a part keeps of the command line."""

HASHED_FOLDERS = ("cuda_src", "rawmla", "tests", "scripts", "examples")


COUNTS = ("passed", "failed", "skipped")
IN_WORDS: dict[str, Callable[[Row], str]] = {
    "bench": lambda row: row.get("error") or f"{row['us']:.1f} µs",
    "tests": lambda row: ", ".join(f"{row[key]} {key}" for key in COUNTS),
    "sanitizer": lambda row: "clean" if row["clean"] else "not clean",
}
"""The result of a row, by stage."""


class RecordError(ValueError):
    """A file is no record, its parts were changed, or they are not of one record."""


def source_hash(root: Path) -> str:
    """SHA-256 over name, length and contents of every source file but what Python compiled: equal trees give
    equal hashes, wherever they are.
    """
    paths = (path for folder in HASHED_FOLDERS for path in (root / folder).rglob("*") if path.is_file())
    files = {path.relative_to(root).as_posix(): path for path in paths if "__pycache__" not in path.parts}
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        data = path.read_bytes()
        digest.update(f"{name}\0{len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()


def _answer(*command: str) -> str | None:
    """The first line that a command prints, or None."""
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(answer.stdout.split("\n")), "").strip() or None


def why_no_timing() -> str | None:
    """None on a machine that can time; else the reason."""
    reason = missing_hopper_reason()
    if reason is not None:
        return reason
    import torch

    return None if torch.cuda.is_available() else "PyTorch sees no CUDA GPU"


def describe_machine() -> dict[str, Any]:
    """Device, number of GPUs, driver, cores and versions. Raises SystemExit without a Hopper GPU, and where
    kernels may come from another NVRTC than the one that is named.
    """
    reason = why_no_timing()
    if reason is not None:
        raise SystemExit(f"a record needs a Hopper GPU: {reason}")
    if os.environ.get("RAWMLA_CUBIN_DIR"):
        raise SystemExit("a record needs kernels of this machine's NVRTC: unset RAWMLA_CUBIN_DIR")
    import cupy
    import numpy
    import torch
    from cuda import bindings

    from rawmla.jit import nvrtc

    return {
        "device": torch.cuda.get_device_name(),
        "gpus": torch.cuda.device_count(),
        "driver": _answer("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cores": os.cpu_count(),
        "nvrtc": nvrtc.version(),
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "cupy": cupy.__version__,
        "torch": str(torch.__version__),
        "cuda_bindings": bindings.__version__,
    }


def new_part(stage: str, options: dict[str, Any]) -> Part:
    """A part without rows, which begins now. `options`: the command line, by name."""
    return {
        "stage": stage,
        "begin": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "source_sha256": source_hash(ROOT),
        "git_commit": options.get("commit") or _answer("git", "-C", str(ROOT), "rev-parse", "HEAD"),
        "machine": describe_machine(),
        "options": {name: options[name] for name in OPTIONS[stage]},
        "ended": False,
        "rows": [],
    }


def write_whole(path: Path, text: str) -> None:
    """Write a file beside its place and rename it: an interrupted program leaves the old file or the new
    one.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        aside.write_text(text)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def sealed(part: Part) -> Part:
    """The part with its hash: SHA-256 of everything else in it."""
    body = {key: value for key, value in part.items() if key != "sha256"}
    return {**body, "sha256": hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()}


def identity(part: Part) -> dict[str, Any]:
    """The fields of SAME."""
    return {key: part.get(key, part["machine"].get(key)) for key in SAME}


def read(path: Path) -> list[Part]:
    """The parts of a record. Raises RecordError where the file is no record, or a part is not as its run
    wrote it.
    """
    try:
        parts: list[Part] = json.loads(path.read_text())["parts"]
        changed = [f"{part['stage']} of {part['begin']}" for part in parts if sealed(part) != part]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecordError(f"{path}: expected a record, got {type(error).__name__}: {error}") from None
    if changed:
        raise RecordError(f"{path}, part {changed[0]}: its hash is another: it was changed after its run")
    return parts


def write(parts: Iterable[Part], path: Path) -> None:
    """Write the parts with their hashes, a row a line. An interrupted write leaves the old file."""
    texts = []
    for part in map(sealed, parts):
        rows = ",\n".join(json.dumps(row, sort_keys=True) for row in part["rows"])
        rest = json.dumps({key: value for key, value in part.items() if key != "rows"}, sort_keys=True)
        texts.append(f'{rest[:-1]}, "rows": [\n{rows}\n]}}')
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, '{"parts": [\n' + ",\n".join(texts) + "\n]}\n")


def merged(records: Sequence[Sequence[Part]]) -> list[Part]:
    """The parts of several records, in the order in which they began. Raises RecordError where they are of
    different sources, GPU models, drivers or NVRTCs.
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

    def of_rows(rows: Iterable[Row]) -> list[str]:
        return [f"{row['case']}: {row['error']}" for row in rows if "error" in row]

    others = (set(part.get("errors", [])).difference(of_rows(part["rows"])) for part in parts)
    return [*of_rows(latest(parts, "bench")), *(error for found in others for error in sorted(found))]


def repeated(parts: Iterable[Part], stage: str) -> dict[str, list[Row]]:
    """The results of what ran more than once."""
    return {name: rows for name, rows in results(parts, stage).items() if len(rows) > 1}
