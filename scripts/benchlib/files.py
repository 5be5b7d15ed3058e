"""Output files: whole or not at all."""

import os
from pathlib import Path


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def check_writable(path: Path) -> None:
    """Raise ValueError when a file could not be written at path; nothing is left there."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder")
    try:
        _aside(path).write_bytes(b"")
        _aside(path).unlink()
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}") from None


def write_whole(path: Path, data: bytes | str) -> None:
    """Write a file beside its place and rename it: an interrupted program leaves the old file or the new
    one.
    """
    aside = _aside(path)
    try:
        aside.write_bytes(data.encode() if isinstance(data, str) else data)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
