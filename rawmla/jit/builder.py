"""From a `KernelSpec` to a cubin: prebuilt folder, then disk cache, then NVRTC. Needs no GPU."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import tempfile
import threading
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rawmla.errors import CompileError, RawMLAError
from rawmla.jit import nvrtc, ptxas
from rawmla.jit.cache import DiskCache
from rawmla.jit.diagnostics import split_log
from rawmla.jit.entry import UntrustedError, entry_name, read_entry, untrusted_reason, write_entry
from rawmla.jit.sources import SourceSet, collect, find_source_root
from rawmla.jit.spec import KernelSpec
from rawmla.jit.table import BoundedTable

FORMAT = 1  # of keys and entries; a change makes every older entry a miss
DEFAULT_CACHE_MB = 256
MEMORY_KERNELS = 512  # compiled kernels kept where the disk takes none


@dataclass(frozen=True)
class CompiledKernel:
    """A cubin and what is known about it."""

    spec: KernelSpec
    cubin: bytes  # ELF image for sm_90a
    meta: dict[str, Any]
    """``registers`` (per thread), ``barriers``, ``spill_stores``, ``spill_loads``, ``local_bytes``,
    ``static_shared_bytes``, ``dynamic_shared_bytes`` (bytes per CTA), ``threads``, ``compile_seconds``,
    ``nvrtc`` (version), ``options``, ``sources`` (file to SHA-256), ``cubin_bytes``, ``cubin_sha256`` and
    ``origin``: ``"prebuilt"``, ``"cache"``, ``"memory"`` or ``"compiled"``.
    """
    source: str  # text of the main source file
    log: str  # of the compilation, with the ptxas report
    path: Path | None  # file that holds the cubin; None if it exists in memory only

    @property
    def losses(self) -> list[str]:
        """What slows this code down, as found by ptxas; only a variant with user text can have any."""
        return ptxas.losses(self.log)


class Builder:
    """Builds kernels from one source folder; the module-level functions use `default_builder`.

    ``source_root`` has ``kernels/<name>.cu`` and the headers. ``prebuilt`` is a folder that `export` wrote
    to, and is looked at first.
    """

    def __init__(self, source_root: Path, cache: DiskCache, prebuilt: Path | None = None) -> None:
        self.source_root = source_root
        self.cache = cache
        self.prebuilt = prebuilt
        self._memory: BoundedTable[str, CompiledKernel] = BoundedTable(MEMORY_KERNELS)
        self._warned: set[str] = set()
        self._mutex = threading.Lock()

    def build(self, spec: KernelSpec, *, keep: bool = False) -> CompiledKernel:
        """The compiled kernel. Files are read and hashed on every call, so an edited header is seen.

        With ``keep`` nothing is compiled that the cache cannot store.

        Raises `CompileError` if the compiler refuses the kernel, or if the kernel has no user text and
        spills, uses local memory or has serialised WGMMA. Where it has to be compiled, raises
        `NVRTCNotFoundError` or `MissingDependencyError` without a compiler, and `OSError` with ``keep`` if
        the cache folder cannot be used or written.
        """
        sources = collect(self.source_root, spec.name, spec.headers)
        options = nvrtc.compiler_options(spec)
        source_key = _digest(FORMAT, spec.name, options, sources.digest())
        if self.prebuilt is not None:
            found = self._load_prebuilt(self.prebuilt, spec, sources, source_key)
            if found is not None:
                return found
        key = _digest(source_key, nvrtc.version())
        found = self._memory.get(key) or self._load_cached(spec, sources, key)
        if found is not None:
            return found
        self.cache.check_writable(required=keep)
        with self.cache.lock(key):
            found = self._load_cached(spec, sources, key)
            if found is not None:
                return found
            return self._compile(spec, sources, options, source_key, key)

    def _compile(
        self, spec: KernelSpec, sources: SourceSet, options: tuple[str, ...], source_key: str, key: str
    ) -> CompiledKernel:
        start = time.perf_counter()
        result = nvrtc.compile_source(sources, options)
        seconds = time.perf_counter() - start
        if result.cubin is None:
            reasons = [f"could not be compiled ({result.status})"]
        elif not ptxas.has_report(result.log):
            reasons = ["the log has no ptxas resource report, so spills cannot be ruled out"]
        else:
            reasons = [] if spec.user_text or spec.may_lose else ptxas.losses(result.log)
        if result.cubin is None or reasons:
            user_lines, other_log = split_log(result.log, spec.headers)
            raise CompileError(
                f"{spec.label}: {'; '.join(reasons)}; by NVRTC {nvrtc.version()} (rawmla's own kernels "
                f"compile by {nvrtc.CHECKED_VERSIONS})",
                log=result.log,
                options=options,
                source_path=self._save_failure(spec, sources, options, result.log, key),
                user_lines=user_lines,
                other_log=other_log,
            )
        meta: dict[str, Any] = {
            "kernel": spec.name,
            "label": spec.label,
            "source_key": source_key,
            "nvrtc": nvrtc.version(),
            "options": list(options),
            "compile_seconds": round(seconds, 3),
            "cubin_bytes": len(result.cubin),
            "cubin_sha256": hashlib.sha256(result.cubin).hexdigest(),
            **ptxas.resources(result.log),
            "sources": {
                name: hashlib.sha256(data).hexdigest()
                for name, data in ((sources.main_name, sources.main), *sources.headers)
            },
            "log": result.log,
        }
        folder = self.cache.store(spec.name, key, result.cubin, meta)
        compiled = _compiled(spec, sources, result.cubin, meta, folder, "compiled")
        if folder is None:
            self._memory[key] = _compiled(spec, sources, result.cubin, meta, None, "memory")
        return compiled

    def _load_cached(self, spec: KernelSpec, sources: SourceSet, key: str) -> CompiledKernel | None:
        found = self.cache.load(spec.name, key)
        return None if found is None else _compiled(spec, sources, *found, "cache")

    def _load_prebuilt(
        self, prebuilt: Path, spec: KernelSpec, sources: SourceSet, source_key: str
    ) -> CompiledKernel | None:
        folder = prebuilt.resolve() / entry_name(spec.name, source_key)
        try:
            reason = untrusted_reason(folder.parent, root_may_own=True)
            if reason is None:
                found = read_entry(folder, source_key, root_may_own=True)
                if found is not None:
                    return _compiled(spec, sources, *found, folder, "prebuilt")
                if spec.user_text:
                    return None  # nobody could foresee the text, so there is nothing to warn of
                reason = (
                    f"it has no valid entry {folder.name} for {spec.label}, as made from the sources of this "
                    "installation by `python -m rawmla compile --out DIR`"
                )
        except (OSError, RawMLAError, UntrustedError) as error:
            reason = str(error)
        with self._mutex:
            first = reason not in self._warned
            self._warned.add(reason)
        if first:
            warnings.warn(
                f"rawmla: RAWMLA_CUBIN_DIR={prebuilt} is not used: {reason}", RuntimeWarning, stacklevel=3
            )
        return None

    def _save_failure(
        self, spec: KernelSpec, sources: SourceSet, options: tuple[str, ...], log: str, key: str
    ) -> Path | None:
        """Keep what did not compile: in the cache, else in the temporary folder of this builder."""
        text = " ".join(options) + "\n" + log + "\n"
        if self.cache.refusal() is None:
            try:
                return self.cache.store_failure(spec.name, key, sources, text)
            except OSError:
                pass
        try:
            return self._temporary.store_failure(spec.name, key, sources, text)
        except OSError:
            return None

    @functools.cached_property
    def _temporary(self) -> DiskCache:
        """Has what did not compile where the cache takes nothing."""
        return DiskCache(Path(tempfile.mkdtemp(prefix="rawmla-failed-")), self.cache.max_bytes)


def export(compiled: CompiledKernel, folder: Path) -> Path:
    """Write a kernel into a prebuilt folder, creating it; returns the entry. Raises ``OSError``.

    The entry is found again by kernel, defines, options and source contents, not by compiler version, so a
    machine with another NVRTC, or none, loads exactly this code.
    """
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)  # a folder that others can write would not be used
    meta = {name: value for name, value in compiled.meta.items() if name not in _META_OF_CALL}
    meta["log"] = compiled.log
    return write_entry(folder, compiled.spec.name, meta["source_key"], compiled.cubin, meta)


# Not stored: they depend on the call. `threads` and `dynamic_shared_bytes` are no part of a cubin.
_META_OF_CALL = ("origin", "threads", "dynamic_shared_bytes")


def _compiled(
    spec: KernelSpec, sources: SourceSet, cubin: bytes, meta: dict[str, Any], folder: Path | None, origin: str
) -> CompiledKernel:
    meta = {**meta, "threads": spec.threads, "dynamic_shared_bytes": spec.smem_bytes, "origin": origin}
    log = meta.pop("log", "")
    path = None if folder is None else folder / "kernel.cubin"
    return CompiledKernel(spec, cubin, meta, sources.main.decode("utf-8", "replace"), log, path)


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def default_builder() -> Builder:
    """Builder of the installed sources; RAWMLA_CACHE_DIR, _CACHE_MAX_MB and _CUBIN_DIR set it up. Without the
    first the cache is in XDG_CACHE_HOME, or else in ~/.cache.
    """
    names = ("RAWMLA_CACHE_DIR", "XDG_CACHE_HOME", "RAWMLA_CACHE_MAX_MB", "RAWMLA_CUBIN_DIR")
    return _default_builder(*(os.environ.get(name, "") for name in names))


@functools.lru_cache(maxsize=8)
def _default_builder(cache_dir: str, user_cache: str, max_mb: str, cubin_dir: str) -> Builder:
    try:
        megabytes = float(max_mb) if max_mb else float(DEFAULT_CACHE_MB)
        if not 0 <= megabytes < 1e9:
            raise ValueError
    except ValueError:
        raise ValueError(f"RAWMLA_CACHE_MAX_MB: expected a number of megabytes, got {max_mb!r}") from None
    path = Path(cache_dir or user_cache or "~/.cache")
    if not cache_dir:
        path /= "rawmla"
    refusal = None
    try:
        path = path.expanduser().absolute()
    except RuntimeError:  # HOME is not set, and the user has no entry in /etc/passwd
        refusal = f"{path} cannot be used, because this user has no home folder (HOME is not set)"
    cache = DiskCache(path, int(megabytes * 1e6), refusal)
    return Builder(
        find_source_root(), cache, Path(os.path.expanduser(cubin_dir)).absolute() if cubin_dir else None
    )


def build(spec: KernelSpec) -> CompiledKernel:
    """Compile ``spec``, or take it from RAWMLA_CUBIN_DIR or the disk cache: `Builder.build`. Needs no GPU."""
    return default_builder().build(spec)
