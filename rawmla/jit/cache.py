"""Disk cache of compiled kernels, shared by processes and safe against each of them dying at any point.

A cubin is code that runs with the rights of the user, so a folder or an entry that somebody else could have
written is not used. Whatever goes wrong with the disk costs compile time and a warning, never a wrong kernel.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rawmla.errors import RawMLAError
from rawmla.jit.entry import (
    TMP_PREFIX,
    UntrustedError,
    entry_name,
    read_entry,
    remove_entry,
    untrusted_reason,
    write_entry,
)
from rawmla.jit.sources import SourceSet

LOCK_TIMEOUT_S = 60.0  # a compile takes seconds; after this the work is done twice rather than waited for
STALE_TMP_S = 3600.0
_REMEDY = "RAWMLA_CACHE_DIR names another folder"


class DiskCache:
    """Bounded cache in one folder, which is created at the first use, readable for its owner alone.

    ``max_bytes`` bounds the sum of all entries. Beyond it the least recently used ones are deleted; the entry
    just stored always stays. ``refusal`` says why the folder cannot be used, if that is known already.
    """

    def __init__(self, path: Path, max_bytes: int, refusal: str | None = None) -> None:
        self.path = path
        self.max_bytes = max_bytes
        self._mutex = threading.Lock()
        self._checked = refusal is not None
        self._refusal = refusal
        self._warned: set[str] = set()

    def refusal(self) -> str | None:
        """Why the folder is not used at all; None if it is. Creates the folder if it is missing."""
        with self._mutex:
            if not self._checked:
                self._refusal = self._check()
                self._checked = True
            return self._refusal

    def _check(self) -> str | None:
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path = self.path.resolve()  # a link that is changed later has no effect on this process
            return untrusted_reason(self.path)
        except (OSError, RawMLAError) as error:
            return f"{self.path} cannot be used ({error})"

    def load(self, kernel: str, key: str) -> tuple[bytes, dict[str, Any], Path] | None:
        """Verified entry and its folder, or None. A hit counts as a use for the eviction order."""
        if self.refusal() is not None:
            return None
        folder = self.path / entry_name(kernel, key)
        try:
            found = read_entry(folder, key)
        except UntrustedError as error:
            self._warn("a stored kernel is not used but compiled again", str(error))
            return None
        if found is None:
            return None
        try:
            os.utime(folder)
        except OSError:
            pass  # read-only disk: there is no eviction there either
        return (*found, folder)

    def store(self, kernel: str, key: str, cubin: bytes, meta: dict[str, Any]) -> Path | None:
        """Store an entry and return its folder; None, after one warning, if the disk does not take it."""
        refusal = self.refusal()
        if refusal is None:
            try:
                folder = write_entry(self.path, kernel, key, cubin, meta)
                self._evict(keep=folder)
                return folder
            except OSError as error:
                refusal = self._unwritable(error)
        self._warn_not_kept(refusal)
        return None

    def check_writable(self, *, required: bool) -> None:
        """Say before a compile that the result will not be kept: by one warning, or by ``OSError`` if it is
        ``required``.
        """
        refusal = self.refusal()
        if refusal is None:
            try:
                tempfile.TemporaryDirectory(prefix=TMP_PREFIX, dir=self.path).cleanup()
                return
            except OSError as error:
                refusal = self._unwritable(error)
        if required:
            raise OSError(f"{refusal}. {_REMEDY}")
        self._warn_not_kept(refusal)

    def store_failure(self, kernel: str, key: str, sources: SourceSet, log: str) -> Path:
        """Store what did not compile, bounded as entries are; returns the main file. Raises ``OSError``."""
        folder = self.path / f"{entry_name(kernel, key)}-failed"
        saved = sources.write_to(folder)
        (folder / "compile.log").write_text(log)
        os.utime(folder)  # it may be there already
        self._evict(keep=folder)
        return saved

    def _unwritable(self, error: OSError) -> str:
        return f"{self.path} cannot be written ({error})"

    @contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Held while a key is compiled, so that processes that want the same kernel compile it once.

        It saves work and is not needed for correctness: where locks do not work, nothing is locked.
        """
        from filelock import FileLock, Timeout

        held = None
        if self.refusal() is None:
            try:
                folder = self.path / "locks"
                folder.mkdir(mode=0o700, exist_ok=True)
                # 256 lock files at most, whatever the number of keys over the years.
                candidate = FileLock(folder / f"{key[:2]}.lock")
                candidate.acquire(timeout=LOCK_TIMEOUT_S)
                held = candidate
            except (OSError, Timeout, NotImplementedError):
                pass
        try:
            yield
        finally:
            if held is not None:
                held.release()

    def entries(self) -> list[tuple[float, int, Path]]:
        """(time of last use, size in bytes, folder) of each entry, oldest first."""
        found = []
        try:
            folders = [
                Path(item.path) for item in os.scandir(self.path) if item.is_dir(follow_symlinks=False)
            ]
        except OSError:
            return []
        for folder in folders:
            if folder.name.startswith(TMP_PREFIX) or folder.name == "locks":
                continue
            try:
                size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
                found.append((folder.stat().st_mtime, size, folder))
            except OSError:
                continue  # removed meanwhile
        return sorted(found)

    def _evict(self, keep: Path) -> None:
        entries = self.entries()
        total = sum(size for _, size, _ in entries)
        for _, size, folder in entries:
            if total <= self.max_bytes:
                break
            if folder != keep:
                remove_entry(folder)
                total -= size
        for aside in self.path.glob(f"{TMP_PREFIX}*"):
            try:
                if time.time() - aside.stat().st_mtime > STALE_TMP_S:
                    remove_entry(aside)
            except OSError:
                continue

    def _warn_not_kept(self, reason: str) -> None:
        self._warn("kernels are compiled in memory and not kept", f"{reason}. {_REMEDY}")

    def _warn(self, what: str, reason: str) -> None:
        """Say each ``what`` once, with the first reason."""
        with self._mutex:
            first = what not in self._warned
            self._warned.add(what)
        if first:
            warnings.warn(f"rawmla: {what}: {reason}.", RuntimeWarning, stacklevel=2)
