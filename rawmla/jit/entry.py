"""One stored kernel, in the disk cache or a prebuilt folder: ``kernel.cubin`` and ``meta.json``."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Any

from rawmla.errors import RawMLAError

__all__ = ["TMP_PREFIX", "entry_name", "read_entry", "remove_entry", "untrusted_reason", "write_entry"]

CUBIN_FILE = "kernel.cubin"
META_FILE = "meta.json"
TMP_PREFIX = ".tmp-"


def entry_name(kernel: str, key: str) -> str:
    """Folder name of the entry: kernel name and the first 16 digits of its 64-digit key."""
    return f"{kernel}-{key[:16]}"


def read_entry(folder: Path, key: str) -> tuple[bytes, dict[str, Any]] | None:
    """Cubin and metadata, or None if the entry is missing, truncated, altered or of another key."""
    try:
        meta = json.loads((folder / META_FILE).read_bytes())
        cubin = (folder / CUBIN_FILE).read_bytes()
    except (OSError, ValueError):
        return None
    if not isinstance(meta, dict) or meta.pop("meta_sha256", None) != _meta_digest(meta):
        return None
    if meta.pop("key", None) != key or meta.get("cubin_sha256") != hashlib.sha256(cubin).hexdigest():
        return None
    return cubin, meta


def write_entry(parent: Path, kernel: str, key: str, cubin: bytes, meta: dict[str, Any]) -> Path:
    """Write an entry aside and rename it into place, so that a reader sees all of it or nothing.

    ``meta`` has ``cubin_sha256``. An entry that is already there and valid wins; an invalid one is replaced.
    Raises ``OSError``.
    """
    final = parent / entry_name(kernel, key)
    meta = {**meta, "key": key}
    meta["meta_sha256"] = _meta_digest(meta)
    aside = Path(tempfile.mkdtemp(prefix=TMP_PREFIX, dir=parent))
    try:
        (aside / CUBIN_FILE).write_bytes(cubin)
        (aside / META_FILE).write_text(json.dumps(meta, indent=1, sort_keys=True) + "\n")
        os.chmod(aside, 0o755)
        try:
            os.rename(aside, final)
        except OSError:
            if read_entry(final, key) is None:
                remove_entry(final)
                os.rename(aside, final)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return final


def remove_entry(folder: Path) -> None:
    """Delete an entry; it disappears under its name at once, also for a process that is reading it."""
    try:
        aside = Path(tempfile.mkdtemp(prefix=TMP_PREFIX, dir=folder.parent))
    except OSError:
        return
    try:
        os.rename(folder, aside / folder.name)
    except OSError:
        pass  # somebody else removed it
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _meta_digest(meta: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()


def untrusted_reason(folder: Path, *, root_may_own: bool = False) -> str | None:
    """Why somebody else could put code into ``folder``; None if only this user (and root) can.

    The folder has to belong to this user (or root, if allowed) and be writable for the owner alone; each
    folder above it must not let another user replace it: owned by this user or root, and writable for others
    only with the sticky bit (as /tmp) or through this user's own primary group.
    """
    folder = folder.resolve()
    if not folder.is_dir():
        raise RawMLAError(f"{folder} is not a folder")
    me = os.geteuid()
    status = folder.stat()
    if status.st_uid != me and not (root_may_own and status.st_uid == 0):
        return f"{folder} belongs to user id {status.st_uid}, not to {me}"
    if status.st_mode & 0o022:
        return f"{folder} is writable for others (mode {stat.S_IMODE(status.st_mode):04o}); `chmod go-w` it"
    for above in folder.parents:
        status = above.stat()
        if status.st_uid not in (0, me):
            return f"{above}, above {folder}, belongs to user id {status.st_uid}, not to {me}"
        foreign_group = status.st_mode & 0o020 and status.st_gid not in (0, os.getegid())
        if (status.st_mode & 0o002 or foreign_group) and not status.st_mode & stat.S_ISVTX:
            mode = f"{stat.S_IMODE(status.st_mode):04o}"
            return f"{above}, above {folder}, is writable for others (mode {mode}); `chmod go-w` it"
    return None
