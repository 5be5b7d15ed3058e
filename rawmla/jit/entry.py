"""One stored kernel, in the disk cache or a prebuilt folder: ``kernel.cubin`` and ``meta.json``."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rawmla.errors import RawMLAError

CUBIN_FILE = "kernel.cubin"
META_FILE = "meta.json"
TMP_PREFIX = ".tmp-"


class UntrustedError(Exception):
    """Somebody else could have written a stored kernel; the text says how."""


def entry_name(kernel: str, key: str) -> str:
    """Folder name of the entry: kernel name and the first 16 digits of its 64-digit key."""
    return f"{kernel}-{key[:16]}"


def read_entry(folder: Path, key: str, *, root_may_own: bool = False) -> tuple[bytes, dict[str, Any]] | None:
    """Cubin and metadata, or None if the entry is missing, truncated, altered or of another key.

    The hashes in the metadata are no signature: whoever can write one file can write the other.
    ``root_may_own``: root may own the entry, as well as this user.

    Raises `UntrustedError` if the folder or a file in it is a symbolic link, belongs to another user or is
    writable for others.
    """
    try:
        with _opened(folder, os.O_DIRECTORY, root_may_own) as inside:
            with _opened(folder / META_FILE, 0, root_may_own, inside) as descriptor:
                meta = json.loads(_content(descriptor))
            with _opened(folder / CUBIN_FILE, 0, root_may_own, inside) as descriptor:
                cubin = _content(descriptor)
    except (OSError, ValueError):
        return None
    if not isinstance(meta, dict) or meta.pop("meta_sha256", None) != _meta_digest(meta):
        return None
    if meta.pop("key", None) != key or meta.get("cubin_sha256") != hashlib.sha256(cubin).hexdigest():
        return None
    return cubin, meta


@contextmanager
def _opened(path: Path, flags: int, root_may_own: bool, inside: int | None = None) -> Iterator[int]:
    """Descriptor of a file or folder, checked by itself: what is checked is what is read.

    ``inside`` is the descriptor of the folder that holds it.
    """
    # Not blocking: to open a pipe would wait for a writer.
    flags |= os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path if inside is None else path.name, flags, dir_fd=inside)
    except OSError:
        if path.is_symlink():
            raise UntrustedError(f"{path} is a symbolic link") from None
        raise
    try:
        reason = _foreign(path, os.fstat(descriptor), root_may_own)
        if reason is not None:
            raise UntrustedError(reason)
        yield descriptor
    finally:
        os.close(descriptor)


def _content(descriptor: int) -> bytes:
    with open(descriptor, "rb", closefd=False) as file:
        return file.read()


def write_entry(parent: Path, kernel: str, key: str, cubin: bytes, meta: dict[str, Any]) -> Path:
    """Write an entry aside and rename it into place, so that a reader sees all of it or nothing.

    ``meta`` has ``cubin_sha256``. An entry that is already there and valid wins; another one is replaced. The
    modes are such that `read_entry` accepts the entry, whatever the umask. Raises ``OSError``.
    """
    final = parent / entry_name(kernel, key)
    meta = {**meta, "key": key}
    meta["meta_sha256"] = _meta_digest(meta)
    aside = Path(tempfile.mkdtemp(prefix=TMP_PREFIX, dir=parent))
    try:
        (aside / CUBIN_FILE).write_bytes(cubin)
        (aside / META_FILE).write_text(json.dumps(meta, indent=1, sort_keys=True) + "\n")
        os.chmod(aside / CUBIN_FILE, 0o644)
        os.chmod(aside / META_FILE, 0o644)
        os.chmod(aside, 0o755)
        try:
            os.rename(aside, final)
        except OSError:
            if not _is_good(final, key):
                remove_entry(final)
                os.rename(aside, final)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return final


def _is_good(folder: Path, key: str) -> bool:
    try:
        return read_entry(folder, key) is not None
    except UntrustedError:
        return False


def remove_entry(folder: Path) -> None:
    """Delete an entry, which may also be a link or a file; it disappears under its name at once.

    What cannot be deleted, such as the files of another user, stays under a temporary name.
    """
    aside = folder.parent / f"{TMP_PREFIX}{secrets.token_hex(8)}"
    try:
        os.rename(folder, aside)
        if aside.is_symlink() or not aside.is_dir():
            aside.unlink()
        else:
            shutil.rmtree(aside, ignore_errors=True)
    except OSError:
        pass  # somebody else removed it


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
    status = os.stat(folder)
    if status.st_mode & stat.S_ISVTX and status.st_mode & 0o002:
        own = folder / "rawmla"
        return f"{folder} is for everybody ({_mode(status)}); use a folder of your own, such as {own}"
    reason = _foreign(folder, status, root_may_own)
    if reason is not None:
        return reason
    me = os.geteuid()
    for above in folder.parents:
        status = os.stat(above)
        if status.st_uid not in (0, me):
            return f"{above}, above {folder}, belongs to user id {status.st_uid}, not to {me}"
        foreign_group = status.st_mode & 0o020 and status.st_gid not in (0, os.getegid())
        if (status.st_mode & 0o002 or foreign_group) and not status.st_mode & stat.S_ISVTX:
            return f"{above}, above {folder}, is writable for others ({_mode(status)}); `chmod go-w` it"
    return None


def _foreign(path: Path, status: os.stat_result, root_may_own: bool) -> str | None:
    """Why a file or folder of this status could have been written by somebody else; None if it could not."""
    me = os.geteuid()
    if status.st_uid != me and not (root_may_own and status.st_uid == 0):
        return f"{path} belongs to user id {status.st_uid}, not to {me}"
    if status.st_mode & 0o022:
        return f"{path} is writable for others ({_mode(status)}); `chmod go-w` it"
    return None


def _mode(status: os.stat_result) -> str:
    return f"mode {stat.S_IMODE(status.st_mode):04o}"
