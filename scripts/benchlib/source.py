"""Which sources a record belongs to: a hash over their contents and, when there is one, the git commit."""

import hashlib
import subprocess
from pathlib import Path

HASHED_FOLDERS = ("cuda_src", "rawmla", "tests", "scripts", "examples")
SKIPPED_FOLDERS = {"__pycache__"}
SKIPPED_SUFFIXES = {".pyc", ".pyo"}


def source_files(root: Path) -> list[Path]:
    """Every file that the hash covers, sorted by its path relative to root."""
    files = [
        path
        for folder in HASHED_FOLDERS
        for path in (root / folder).rglob("*")
        if path.is_file()
        and path.suffix not in SKIPPED_SUFFIXES
        and SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts)
    ]
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def source_hash(root: Path) -> str:
    """SHA-256 over name, length and contents of every source file: equal trees give equal hashes, wherever
    they lie.
    """
    digest = hashlib.sha256()
    for path in source_files(root):
        data = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()


def git_commit(root: Path) -> str | None:
    """The checked-out commit, or None outside a git checkout."""
    try:
        answer = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None
