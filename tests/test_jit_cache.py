"""The disk cache: hits, misses, races, damage, trust, bounds; and the prebuilt folder."""

from __future__ import annotations

import errno
import functools
import json
import os
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from jit_project import INNER, KERNEL, Pretend, Project, at_once, pretended_status, tiny

from rawmla.errors import NVRTCNotFoundError
from rawmla.jit import (
    Builder,
    CompiledKernel,
    DiskCache,
    builder,
    default_builder,
    entry,
    export,
    nvrtc,
)

SOMEONE = 54321  # a user id, and a group id
PARTS = ["", "kernel.cubin", "meta.json"]


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Pretend:
    return pretended_status(monkeypatch)


def origin(project: Project, factor: int = 1) -> str:
    return str(project.build(factor).meta["origin"])


def entry_of(project: Project, factor: int = 1) -> Path:
    """The folder of a kernel that is built."""
    path = project.build(factor).path
    assert path is not None
    return path.parent


def built(project: Project, prebuilt: Path | None = None) -> tuple[CompiledKernel, list[str]]:
    """A kernel from a new builder that is asked twice, and all warnings."""
    one = project.builder(prebuilt)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first = one.build(tiny())
        one.build(tiny())
    assert all(warning.category is RuntimeWarning for warning in caught)
    return first, [str(warning.message) for warning in caught]


# ---- hits and misses


def test_miss_then_hit(project: Project) -> None:
    """A hit takes far less time than a compile. An entry is a cubin and a readable report."""
    first, start = project.build(), time.perf_counter()
    for _ in range(5):
        second = project.build()
    assert (time.perf_counter() - start) / 5 < 0.05
    assert {**first.meta, "origin": "cache"} == second.meta and first.meta["origin"] == "compiled"
    assert first.cubin == second.cubin and first.log == second.log and first.path == second.path
    folder = entry_of(project)
    assert project.entries() == [folder.name] and sorted(os.listdir(folder)) == ["kernel.cubin", "meta.json"]
    meta = json.loads((folder / "meta.json").read_text())
    assert {"registers", "spill_stores", "local_bytes", "compile_seconds", "cubin_sha256"} <= set(meta)


def test_what_is_in_the_key(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Defines, launch, name, options, version, and which bytes are in which file; no unrelated file. One
    builder sees edits too.
    """
    one = project.builder()
    first = one.build(tiny())
    project.write("lib/other.cuh", "#define UNUSED\n")
    project.write("kernels/other.cu", "nonsense\n")
    project.write("kernels/twin.cu", KERNEL.replace("tiny", "twin"))
    assert one.build(tiny()).meta["origin"] == "cache"
    for spec in (tiny(2), tiny(threads=64), tiny(smem_bytes=512), tiny(name="twin")):
        made = one.build(spec).meta
        assert made["origin"] == "compiled"
        assert (made["threads"], made["dynamic_shared_bytes"]) == (spec.threads, spec.smem_bytes)
    options, version = (*nvrtc._BASE_OPTIONS, "-lineinfo"), f"{nvrtc.version()}.1"
    for name, value in (("_BASE_OPTIONS", options), ("version", lambda: version)):
        with monkeypatch.context() as patch:
            patch.setattr(nvrtc, name, value)
            assert origin(project) == "compiled"
    assert origin(project) == "cache"
    project.write("lib/inner.cuh", INNER.replace("7", "8"))
    assert one.build(tiny()).cubin != first.cubin
    project.write("lib/inner.cuh", INNER)
    assert one.build(tiny()).meta["origin"] == "cache"
    for name in ("kernels/tiny.cu", "lib/outer.cuh", "lib/inner.cuh"):
        before = (project.sources / name).read_text()
        project.write(name, before + "// x\n")
        assert one.build(tiny()).meta["origin"] == "compiled"
        project.write(name, before)


# ---- damage


def forge(file: Path) -> None:
    """Another register count in the report."""
    meta = json.loads((file.parent / "meta.json").read_text())
    file.write_text(json.dumps({**meta, "registers": 1}))


def replace_entry(file: Path, project: Project) -> None:
    """The files of another key."""
    for other in entry_of(project, 2).iterdir():
        (file.parent / other.name).write_bytes(other.read_bytes())


def dangling_link(file: Path) -> None:
    shutil.rmtree(file.parent)
    file.parent.symlink_to(file.parent.with_name("gone"))


CUBIN, META = "kernel.cubin", "meta.json"
DAMAGES: dict[str, tuple[str, Callable[..., Any]]] = {
    "a byte": (CUBIN, lambda file: file.write_bytes(file.read_bytes()[:-1] + b"\xff")),
    "no cubin": (CUBIN, Path.unlink),
    "a pipe": (CUBIN, lambda file: (file.unlink(), os.mkfifo(file, 0o600))),
    "a folder": (CUBIN, lambda file: (file.unlink(), file.mkdir(mode=0o755))),
    "empty": (META, lambda file: file.write_bytes(b"")),
    "other JSON": (META, lambda file: file.write_bytes(b"[1, 2]")),
    "forged": (META, forge),
    "another key's": (META, replace_entry),
    "a file": (META, lambda file: (shutil.rmtree(file.parent), file.parent.write_bytes(b""))),
    "a dangling link": (META, dangling_link),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_rebuilt(project: Project, damage: str) -> None:
    kept = project.build()
    name, change = DAMAGES[damage]
    file = entry_of(project) / name
    change(file, *[project] * (change is replace_entry))
    first, said = built(project)
    assert first.meta == {**kept.meta, **{key: first.meta[key] for key in ("origin", "compile_seconds")}}
    assert first.meta["origin"] == "compiled" and first.cubin == kept.cubin and origin(project) == "cache"
    assert ["is a symbolic link" in one for one in said] == [True] * (damage == "a dangling link")
    assert not list(project.cache_dir.glob(".tmp-*"))


# ---- processes and threads

WORKER = """\
import time
from pathlib import Path
from jit_project import tiny
from rawmla.jit import Builder, DiskCache, nvrtc
root = Path(sys.argv[1])
nvrtc.version()
compile_source = nvrtc.compile_source
def slow(*arguments):
    (root / "compiling").touch()
    time.sleep(float(sys.argv[2]))
    return compile_source(*arguments)
nvrtc.compile_source = slow
print("ready", flush=True)
sys.stdin.readline()
compiled = Builder(root / "cuda_src", DiskCache(root / "cache", 10**7)).build(tiny())
print(compiled.meta["origin"], compiled.meta["cubin_sha256"], flush=True)
"""


def start_workers(project: Project, count: int, compile_seconds: float) -> list[subprocess.Popen[str]]:
    """Processes that are about to build."""
    code = f"import sys; sys.path[:] = {sys.path!r}\n{WORKER}"
    command = [sys.executable, "-c", code, str(project.root), str(compile_seconds)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    workers = [subprocess.Popen(command, **pipes) for _ in range(count)]
    for worker in workers:
        assert worker.stdout is not None and worker.stdout.readline() == "ready\n"
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("go\n")
        worker.stdin.flush()
    return workers


def test_processes_at_once_compile_once(project: Project) -> None:
    workers = start_workers(project, 3, 0.5)
    answers = [worker.communicate(timeout=60)[0].split() for worker in workers]
    assert sorted(origin for origin, _ in answers) == ["cache", "cache", "compiled"]
    assert len({digest for _, digest in answers}) == 1 and len(project.entries()) == 1


def test_a_killed_process_leaves_neither_lock_nor_entry(project: Project) -> None:
    (worker,) = start_workers(project, 1, 60.0)
    deadline = time.monotonic() + 30
    while not (project.root / "compiling").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    worker.kill()
    worker.communicate()
    start = time.monotonic()
    assert origin(project) == "compiled" and time.monotonic() - start < 20


def test_without_locks_threads_waste_work_and_corrupt_nothing(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DiskCache, "lock", lambda self, key: nullcontext())
    results: list[CompiledKernel] = []
    at_once(4, lambda _: results.extend([project.build(factor) for factor in range(3)]))
    assert len(results) == 12 and len({result.cubin for result in results}) == 3
    assert len(project.entries()) == 3 and not list(project.cache_dir.glob(".tmp-*"))
    assert {origin(project, factor) for factor in range(3)} == {"cache"}


def test_a_valid_entry_wins(project: Project) -> None:
    """Another process may have loaded it; who comes later uses it too."""
    target = entry_of(project)
    meta = json.loads((target / "meta.json").read_text())
    before = (target / "kernel.cubin").stat().st_ino, target.stat().st_ino
    kernel, key = meta["kernel"], meta["key"]
    again = entry.write_entry(project.cache_dir, kernel, key, b"another", {"cubin_sha256": "of another"})
    assert again == target and not list(project.cache_dir.glob(".tmp-*"))
    assert ((target / "kernel.cubin").stat().st_ino, target.stat().st_ino) == before


# ---- folders where nothing can be stored, or that are not trusted


def raising(error: Exception) -> Callable[..., None]:
    """A function that raises an error."""

    def raised(*arguments: object, **keywords: object) -> None:
        raise error

    return raised


def build_in_memory(one: Builder) -> str:
    """Build three times with one builder where nothing can be stored; returns the only warning."""
    with pytest.warns(RuntimeWarning) as caught:
        compiled = [one.build(tiny(1)), one.build(tiny(1)), one.build(tiny(2))]
    assert [result.meta["origin"] for result in compiled] == ["compiled", "memory", "compiled"]
    assert all(result.path is None and result.cubin.startswith(b"\x7fELF") for result in compiled)
    (warning,) = caught
    return str(warning.message)


def test_a_link_to_an_open_folder_is_refused(project: Project) -> None:
    folder = project.root / "open"
    folder.mkdir()
    folder.chmod(0o777)
    project.cache_dir.symlink_to(folder)
    said = build_in_memory(project.builder())
    assert f"{folder} is writable for others" in said and "`chmod go-w` it" in said


@pytest.mark.parametrize(("code", "where"), [(errno.ENOSPC, "write_bytes"), (errno.EROFS, "mkdtemp")])
def test_full_or_read_only_disk(
    project: Project, monkeypatch: pytest.MonkeyPatch, code: int, where: str
) -> None:
    """What is there is read all the same."""
    project.build(3)

    owner: Any = entry.tempfile if where == "mkdtemp" else Path
    monkeypatch.setattr(owner, where, raising(OSError(code, os.strerror(code))))
    assert os.strerror(code) in build_in_memory(project.builder()) and origin(project, 3) == "cache"
    monkeypatch.undo()
    assert len(project.entries()) == 1 and not list(project.cache_dir.glob(".tmp-*"))


def test_kernels_in_memory_are_bounded(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "MEMORY_KERNELS", 2)
    project.cache_dir.write_text("")  # a file: no folder can be made there
    one = project.builder()
    with pytest.warns(RuntimeWarning, match=rf"in memory.*{project.cache_dir}.*RAWMLA_CACHE_DIR"):
        origins = [one.build(tiny(factor)).meta["origin"] for factor in (1, 2, 1, 3, 1, 2)]
    assert origins == ["compiled", "compiled", "memory", "compiled", "memory", "compiled"]


OPEN, FOREIGN = "is writable for others", "belongs to user id"
ABOVE: list[tuple[int, int, int, str | None]] = [
    (SOMEONE, SOMEONE, 0o755, None),
    (0, 0, 0o1777, None),
    (0, 0, 0o777, OPEN),
    (0, 0, 0o775, None),
    (0, SOMEONE, 0o775, None),
    (SOMEONE, 99, 0o775, OPEN),
    (SOMEONE, 99, 0o1775, None),
    (99, 0, 0o1755, FOREIGN),
]
"""The owner, group and mode of the folder above someone's; why it is not trusted."""


@pytest.mark.parametrize("case", ABOVE, ids=str)
def test_who_may_write_above_the_folder(
    project: Project, monkeypatch: pytest.MonkeyPatch, pretend: Pretend, case: Any
) -> None:
    """Root, the user, and a group of the user's own or of root."""
    uid, gid, mode, text = case
    above = project.root / "above"
    mine = above / "mine"
    mine.mkdir(parents=True, mode=0o755)
    monkeypatch.setattr(entry.os, "geteuid", lambda: SOMEONE)
    monkeypatch.setattr(entry.os, "getegid", lambda: SOMEONE)
    for path in above.parents:
        pretend(path, uid=0, gid=0, mode=0o755)
    pretend(mine, uid=SOMEONE, mode=0o755)
    pretend(above, uid=uid, gid=gid, mode=mode)
    reason = entry.untrusted_reason(mine)
    assert (reason is None) == (text is None), reason
    assert reason is None or (reason.startswith(f"{above}, above {mine}, ") and str(text) in reason)


def test_a_folder_for_everybody_needs_one_below_it(project: Project, pretend: Pretend) -> None:
    """RAWMLA_CACHE_DIR=/tmp: to change the mode of /tmp would be bad advice."""
    project.cache_dir.mkdir()
    pretend(project.cache_dir, uid=SOMEONE, mode=0o1777)
    _, (warning,) = built(project)
    assert f"{project.cache_dir} is for everybody (mode 1777); use a folder of your own" in warning
    assert f"such as {project.cache_dir / 'rawmla'}" in warning and "chmod" not in warning


def test_no_home_is_one_warning(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose user has no entry in /etc/passwd."""
    monkeypatch.setattr("pwd.getpwuid", raising(KeyError("uid not found")))
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(builder, "find_source_root", lambda: project.sources)
    monkeypatch.chdir(project.root)
    said = build_in_memory(builder._default_builder.__wrapped__("~/kernels", "", "", ""))
    assert "no home folder" in said and "RAWMLA_CACHE_DIR" in said and not (project.root / "~").exists()


# ---- entries that are not trusted


def as_link(target: Path) -> None:
    aside = target.with_name(target.name + ".aside")
    target.rename(aside)
    target.symlink_to(aside)


PROBLEMS: dict[str, tuple[Callable[[Path, Pretend], Any], str]] = {
    "open to a group": (lambda target, _: target.chmod(target.stat().st_mode | 0o020), OPEN),
    "open to all": (lambda target, _: target.chmod(target.stat().st_mode | 0o002), OPEN),
    "foreign": (lambda target, pretend: pretend(target, uid=SOMEONE), f"{FOREIGN} {SOMEONE}"),
    "a link": (lambda target, _: as_link(target), "is a symbolic link"),
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("problem", PROBLEMS)
def test_an_untrusted_entry_is_replaced(project: Project, pretend: Pretend, part: str, problem: str) -> None:
    """And is passed over in a prebuilt folder. What a link leads to is left alone."""
    change, text = PROBLEMS[problem]
    folder = project.root / "prebuilt"
    exported = export(project.build(), folder) / part
    change(exported, pretend)
    loaded, (warning,) = built(project, folder)
    assert loaded.meta["origin"] == "cache"
    assert "RAWMLA_CUBIN_DIR" in warning and f"{exported} {text}" in warning

    target = entry_of(project) / part
    change(target, pretend)
    first, (warning,) = built(project)
    assert first.meta["origin"] == "compiled" and f"{target} {text}" in warning
    assert "compiled again" in warning and ("chmod go-w" in warning) == ("open" in problem)
    assert origin(project) == "cache" and not target.is_symlink()
    assert not list(project.cache_dir.glob(".tmp-*"))
    if problem == "a link" and not part:
        assert target.with_name(target.name + ".aside").is_dir()


@pytest.mark.parametrize("part", ["..", *PARTS])
def test_an_entry_of_root_is_not_mine(
    project: Project, monkeypatch: pytest.MonkeyPatch, pretend: Pretend, part: str
) -> None:
    """The cache and all in it is the user's own. A prebuilt folder may be root's."""
    folder, prebuilt = entry_of(project), project.root / "prebuilt"
    exported = export(project.build(), prebuilt)
    monkeypatch.setattr(entry.os, "geteuid", lambda: SOMEONE)
    for path in (project.cache_dir, folder, *folder.iterdir()):
        pretend(path, uid=SOMEONE)
    for path in (prebuilt, *prebuilt.parents, exported, *exported.iterdir(), folder / part):
        pretend(path, uid=0)
    loaded, said = built(project, prebuilt)
    assert (loaded.meta["origin"], said) == ("prebuilt", [])
    assert f"{(folder / part).resolve()} belongs to user id 0" in built(project)[1][0]


def test_what_is_checked_is_what_is_read(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that takes the entry's place after the check is not looked into."""
    cubin, folder = project.build().cubin, entry_of(project)
    key = json.loads((folder / "meta.json").read_text())["key"]
    real_fstat = os.fstat

    def swap(descriptor: int) -> os.stat_result:
        monkeypatch.setattr(entry.os, "fstat", real_fstat)
        folder.rename(folder.with_name("checked"))
        folder.mkdir()
        return real_fstat(descriptor)

    monkeypatch.setattr(entry.os, "fstat", swap)
    found = entry.read_entry(folder, key)
    assert found is not None and found[0] == cubin and list(folder.iterdir()) == []


def test_no_descriptor_is_left_open(project: Project) -> None:
    target = entry_of(project)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        project.build()
        assert entry.read_entry(target, "another key") is None
        (target / "kernel.cubin").chmod(0o666)
        with pytest.raises(entry.UntrustedError):
            entry.read_entry(target, "key")
        (target / "kernel.cubin").chmod(0o644)
    assert len(os.listdir("/proc/self/fd")) == before


def test_refused_entries_are_one_warning(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more where a refused entry cannot be replaced."""

    for more in ([], ["kept", "not yours"]):
        for factor in (1, 2, 3):
            (entry_of(project, factor) / "kernel.cubin").chmod(0o666)
        if more:
            monkeypatch.setattr(entry.os, "rename", raising(PermissionError(13, "not yours")))
        one = project.builder()
        with pytest.warns(RuntimeWarning) as caught:
            found = [one.build(tiny(factor)) for factor in (1, 2, 3)]
        assert [kernel.meta["origin"] for kernel in found] == ["compiled"] * 3
        assert all((kernel.path is None) == bool(more) for kernel in found)
        first, *rest = [str(warning.message) for warning in caught]
        assert "is writable for others" in first and len(rest) == bool(more)
        assert all(part in rest[0] for part in more)


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_own_entries_are_accepted_whatever_the_umask(project: Project, umask: int) -> None:
    """The cache is private."""
    before = os.umask(umask)
    try:
        target = entry_of(project)
        exported = export(project.build(), project.root / "prebuilt")
    finally:
        os.umask(before)
    assert project.cache_dir.stat().st_mode & 0o777 == 0o700
    for one in (target, exported):
        assert one.stat().st_mode & 0o777 == 0o755
        assert [file.stat().st_mode & 0o777 for file in sorted(one.iterdir())] == [0o644, 0o644]
    assert origin(project) == "cache"


# ---- bounds


def test_least_recently_used_entries_are_evicted(project: Project) -> None:
    folders = {factor: entry_of(project, factor) for factor in (1, 2, 3)}
    for factor, folder in folders.items():
        os.utime(folder, (factor, factor))
    old, new = project.cache_dir / ".tmp-old", project.cache_dir / ".tmp-new"
    old.mkdir()
    new.mkdir()
    os.utime(old, (1, 1))
    used = sum(size for _, size, _ in DiskCache(project.cache_dir, 0).entries())
    assert origin(project, 1) == "cache"  # now the most recent one
    project.max_bytes = int(used * 1.1)
    project.build(4)
    assert folders[1].exists() and not folders[2].exists() and folders[3].exists()
    assert sum(size for _, size, _ in DiskCache(project.cache_dir, 0).entries()) <= project.max_bytes
    assert origin(project, 2) == "compiled"
    assert not old.exists() and new.exists()  # temporary folders of processes that ended long ago
    project.max_bytes = 1
    project.build(5)
    assert len(project.entries()) == 1 and origin(project, 5) == "cache"  # the entry just stored stays


def fail(one: builder.Builder, project: Project, number: int) -> Path:
    """What is saved of a kernel that does not compile."""
    project.write("kernels/tiny.cu", f"{number} " * 4000)
    with pytest.raises(builder.CompileError) as caught:
        one.build(tiny())
    assert caught.value.source_path is not None
    return caught.value.source_path


@pytest.mark.parametrize("is_refused", (False, True))
def test_saved_failures_are_bounded_too(
    project: Project, monkeypatch: pytest.MonkeyPatch, is_refused: bool
) -> None:
    """Each makes room: a program may have no success. What the cache does not take is a temporary file."""
    folder = project.cache_dir
    project.max_bytes = 40_000
    one = project.builder()
    if is_refused:
        (project.root / "temporary").mkdir()
        monkeypatch.setattr(builder.tempfile, "tempdir", str(project.root / "temporary"))
        folder.write_text("")  # a file: no folder can be made there
    with pytest.warns(RuntimeWarning, match="in memory") if is_refused else nullcontext():
        old = fail(one, project, 1)
        os.utime(old.parents[1], (1, 1))
        for number in range(2, 8):
            new = fail(one, project, number)
        os.utime(new.parents[1], (1, 1))
        fail(one, project, 7)  # again: used now
    assert not old.exists() and time.time() - new.parents[1].stat().st_mtime < 60
    if is_refused:
        (folder,) = (project.root / "temporary").iterdir()
    assert sum(size for _, size, _ in DiskCache(folder, 0).entries()) <= project.max_bytes


# ---- the prebuilt folder, and the environment


def test_prebuilt_folder_round_trip(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs no compiler and no cache; what is in it can be exported again."""
    folder, second = project.root / "prebuilt", project.root / "second"
    compiled = project.build(1)
    export(compiled, folder)
    export(compiled, folder)
    export(project.builder(folder).build(tiny(1)), second)
    assert [path.name for path in folder.iterdir()] == [path.name for path in second.iterdir()]

    monkeypatch.setattr(nvrtc, "version", raising(NVRTCNotFoundError("no NVRTC here")))
    project.cache_dir = project.root / "not needed"
    for one in (folder, second):
        loaded = project.builder(one).build(tiny(1))
        assert loaded.cubin == compiled.cubin and loaded.log == compiled.log
        assert loaded.path is not None and loaded.path.parent.parent == one
        changed = {name for name in compiled.meta if loaded.meta[name] != compiled.meta[name]}
        assert loaded.meta["origin"] == "prebuilt" and changed == {"origin"}
    assert not project.cache_dir.exists()
    # Code of another compiler wins over the cache.
    monkeypatch.setattr(nvrtc, "version", lambda: "1.2.3")
    assert origin(project) == "compiled"
    assert project.builder(folder).build(tiny(1)).meta["origin"] == "prebuilt"


@pytest.mark.parametrize("problem", ["stale", "missing folder", "open"])
def test_unusable_prebuilt_folder_is_named_once_and_compiled_around(project: Project, problem: str) -> None:
    """Once for all kernels, also when threads ask for them at the same time."""
    folder = project.root / "prebuilt"
    export(project.build(1), folder)
    if problem == "stale":
        project.write("lib/inner.cuh", INNER + "// newer\n")
    elif problem == "missing folder":
        folder = project.root / "elsewhere"
    else:
        folder.chmod(0o777)
    one = project.builder(folder)
    origins: set[str] = set()
    with pytest.warns(RuntimeWarning) as caught:
        at_once(4, lambda _: origins.update(str(one.build(tiny()).meta["origin"]) for _ in range(3)))
    assert origins <= {"compiled", "cache"} and len(caught) == 1
    assert "RAWMLA_CUBIN_DIR" in str(caught[0].message) and str(folder) in str(caught[0].message)


def test_environment_sets_up_the_default_builder(
    project: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is read at every call."""
    monkeypatch.setattr(builder, "find_source_root", lambda: project.sources)
    fresh = functools.lru_cache(builder._default_builder.__wrapped__)  # none for other tests
    monkeypatch.setattr(builder, "_default_builder", fresh)
    names = ("RAWMLA_CACHE_DIR", "RAWMLA_CACHE_MAX_MB", "RAWMLA_CUBIN_DIR", "XDG_CACHE_HOME")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    for given, wanted in (
        ((), (None, 256_000_000, None)),
        ((str(tmp_path / "a"), "1.5", ""), (tmp_path / "a", 1_500_000, None)),
        (("~/b", "1", str(tmp_path / "c")), (Path.home() / "b", 1_000_000, tmp_path / "c")),
        (("", "1", "", str(tmp_path / "d")), (tmp_path / "d" / "rawmla", 1_000_000, None)),
        (("", "1", "", str(tmp_path / "e")), (tmp_path / "e" / "rawmla", 1_000_000, None)),
    ):
        for name, value in zip(names, given, strict=False):
            monkeypatch.setenv(name, value)
        one = default_builder()
        assert isinstance(one, Builder) and one is default_builder()
        path = wanted[0] or one.cache.path
        assert (one.cache.path, one.cache.max_bytes, one.prebuilt) == (path, *wanted[1:])
        assert given or one.cache.path.name == "rawmla"
    for wrong in ("many", "-1", "nan"):
        monkeypatch.setenv("RAWMLA_CACHE_MAX_MB", wrong)
        with pytest.raises(ValueError, match=f"RAWMLA_CACHE_MAX_MB.*{wrong}"):
            default_builder()
