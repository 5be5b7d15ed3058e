"""The disk cache: hits, misses, races, damage, refusals, bounds; and the prebuilt folder."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from contextlib import nullcontext
from pathlib import Path

import pytest
from jit_project import INNER, KERNEL, OUTER, Project, pretended_status, tiny

from rawmla.errors import NVRTCNotFoundError
from rawmla.jit import Builder, DiskCache, builder, cache, default_builder, entry, export, nvrtc


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def without_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise NVRTCNotFoundError("no NVRTC here")

    monkeypatch.setattr(nvrtc, "version", missing)


def test_miss_then_hit(project: Project) -> None:
    first, second = project.build(), project.build()
    assert (first.meta["origin"], second.meta["origin"]) == ("compiled", "cache")
    assert first.cubin == second.cubin and first.log == second.log and first.path == second.path
    assert first.path is not None and project.entries() == [first.path.parent.name]
    assert {**first.meta, "origin": "cache"} == second.meta


def test_entry_is_cubin_and_readable_meta(project: Project) -> None:
    compiled = project.build()
    assert compiled.path is not None
    assert sorted(os.listdir(compiled.path.parent)) == ["kernel.cubin", "meta.json"]
    meta = json.loads((compiled.path.parent / "meta.json").read_text())
    for name in (
        "registers",
        "spill_stores",
        "spill_loads",
        "local_bytes",
        "compile_seconds",
        "cubin_sha256",
    ):
        assert name in meta


@pytest.mark.parametrize("launch", ({"threads": 64}, {"smem_bytes": 512}))
def test_the_launch_is_in_the_key(project: Project, launch: dict[str, int]) -> None:
    """The kernel has both numbers as macros, and compares its own with them."""
    project.build()
    other = project.builder().build(tiny(**launch))
    assert other.meta["origin"] == "compiled"
    made = {"threads": other.meta["threads"], "smem_bytes": other.meta["dynamic_shared_bytes"]}
    assert made == {"threads": tiny().threads, "smem_bytes": tiny().smem_bytes} | launch


def test_a_hit_takes_far_less_than_a_compile(project: Project) -> None:
    one = project.builder()
    one.build(tiny())
    start = time.perf_counter()
    for _ in range(5):
        one.build(tiny())
    assert (time.perf_counter() - start) / 5 < 0.05


@pytest.mark.parametrize(
    "name", ["kernels/tiny.cu", "lib/outer.cuh", "lib/inner.cuh"], ids=["main", "header", "nested header"]
)
def test_edit_of_any_source_is_a_miss_and_undoing_it_a_hit(project: Project, name: str) -> None:
    first = project.build()
    before = (project.sources / name).read_text()
    project.write(name, before + "\n// edited\n")
    assert project.build().meta["origin"] == "compiled"
    project.write(name, before)
    again = project.build()
    assert again.meta["origin"] == "cache" and again.cubin == first.cubin


def test_one_builder_sees_an_edit(project: Project) -> None:
    one = project.builder()
    first = one.build(tiny())
    project.write("lib/inner.cuh", INNER.replace("7", "8"))
    assert one.build(tiny()).cubin != first.cubin


def test_unrelated_files_do_not_matter(project: Project) -> None:
    project.build()
    project.write("lib/other.cuh", "#define UNUSED\n")
    project.write("kernels/other.cu", "nonsense\n")
    assert project.build().meta["origin"] == "cache"


def test_moving_bytes_between_files_is_a_miss(project: Project) -> None:
    """The key has names and lengths, not only the concatenated contents."""
    project.build()
    project.write("lib/outer.cuh", OUTER + "// x\n")
    first = project.build()
    project.write("lib/outer.cuh", OUTER)
    project.write("lib/inner.cuh", "// x\n" + INNER)
    assert first.meta["origin"] == project.build().meta["origin"] == "compiled"


def test_defines_name_options_and_nvrtc_version_are_in_the_key(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.build(1)
    assert project.build(2).meta["origin"] == "compiled"
    project.write("kernels/twin.cu", KERNEL.replace("tiny", "twin"))
    assert project.builder().build(tiny(name="twin")).meta["origin"] == "compiled"
    with monkeypatch.context() as patch:
        patch.setattr(nvrtc, "_BASE_OPTIONS", (*nvrtc._BASE_OPTIONS, "-lineinfo"))
        assert project.build(1).meta["origin"] == "compiled"
    other = f"{nvrtc.version()}.1"
    with monkeypatch.context() as patch:
        patch.setattr(nvrtc, "version", lambda: other)
        assert project.build(1).meta["origin"] == "compiled"
    assert project.build(1).meta["origin"] == "cache"


@pytest.mark.parametrize("file", ["kernel.cubin", "meta.json"])
@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "delete", "garbage"])
def test_damaged_entry_is_rebuilt(project: Project, file: str, damage: str) -> None:
    first = project.build()
    assert first.path is not None
    target = first.path.parent / file
    data = bytearray(target.read_bytes())
    if damage == "truncate":
        target.write_bytes(data[: len(data) // 2])
    elif damage == "flip":
        data[len(data) // 2] ^= 1
        target.write_bytes(data)
    elif damage == "empty":
        target.write_bytes(b"")
    elif damage == "delete":
        target.unlink()
    else:
        target.write_bytes(b"[1, 2]")
    rebuilt = project.build()
    assert rebuilt.meta["origin"] == "compiled" and rebuilt.cubin == first.cubin
    assert project.build().meta["origin"] == "cache"
    assert len(project.entries()) == 1


def test_altered_register_count_is_noticed(project: Project) -> None:
    first = project.build()
    assert first.path is not None
    target = first.path.parent / "meta.json"
    meta = json.loads(target.read_text())
    target.write_text(json.dumps({**meta, "registers": 1}))
    assert project.build().meta["registers"] == first.meta["registers"]


def test_entry_of_another_key_is_not_used(project: Project) -> None:
    one, two = project.build(1), project.build(2)
    assert one.path is not None and two.path is not None
    for file in ("kernel.cubin", "meta.json"):
        (one.path.parent / file).write_bytes((two.path.parent / file).read_bytes())
    rebuilt = project.build(1)
    assert rebuilt.meta["origin"] == "compiled" and rebuilt.cubin == one.cubin


WORKER = """\
import sys, time
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


def start_worker(project: Project, compile_seconds: float) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(project.root), str(compile_seconds)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert worker.stdout is not None and worker.stdout.readline() == "ready\n"
    return worker


def test_processes_at_once_compile_once(project: Project) -> None:
    workers = [start_worker(project, 0.5) for _ in range(3)]
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("go\n")
        worker.stdin.flush()
    answers = [worker.communicate(timeout=60)[0].split() for worker in workers]
    assert sorted(origin for origin, _ in answers) == ["cache", "cache", "compiled"]
    assert len({digest for _, digest in answers}) == 1
    assert len(project.entries()) == 1


def test_a_killed_process_leaves_neither_lock_nor_entry(project: Project) -> None:
    worker = start_worker(project, 60.0)
    assert worker.stdin is not None
    worker.stdin.write("go\n")
    worker.stdin.flush()
    deadline = time.monotonic() + 30
    while not (project.root / "compiling").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    worker.send_signal(signal.SIGKILL)
    worker.communicate()
    start = time.monotonic()
    assert project.build().meta["origin"] == "compiled"
    assert time.monotonic() - start < 20


def test_without_locks_threads_waste_work_and_corrupt_nothing(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DiskCache, "lock", lambda self, key: nullcontext())
    results = []
    start = threading.Barrier(4)

    def run() -> None:
        start.wait()
        for factor in range(3):
            results.append(project.build(factor))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 12 and len({result.cubin for result in results}) == 3
    assert len(project.entries()) == 3
    assert not list(project.cache_dir.glob(".tmp-*"))
    assert {project.build(factor).meta["origin"] for factor in range(3)} == {"cache"}


def test_a_lock_that_cannot_be_had_is_done_without(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    from filelock import FileLock

    project.build(1)
    for number in range(256):
        (project.cache_dir / "locks" / f"{number:02x}.lock").touch()
    held = [FileLock(path) for path in (project.cache_dir / "locks").iterdir()]
    for lock in held:
        lock.acquire()
    monkeypatch.setattr(cache, "LOCK_TIMEOUT_S", 0.1)
    try:
        assert project.build(2).meta["origin"] == "compiled"
    finally:
        for lock in held:
            lock.release()


def only_warning(caught: list[warnings.WarningMessage]) -> str:
    assert len(caught) == 1, [str(one.message) for one in caught]
    assert caught[0].category is RuntimeWarning
    return str(caught[0].message)


def build_in_memory(project: Project) -> str:
    """Build three times with one builder where nothing can be stored; returns the only warning."""
    one = project.builder()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled = [one.build(tiny(1)), one.build(tiny(1)), one.build(tiny(2))]
    assert [result.meta["origin"] for result in compiled] == ["compiled", "memory", "compiled"]
    assert all(result.path is None and result.cubin.startswith(b"\x7fELF") for result in compiled)
    return only_warning(caught)


def test_a_folder_that_cannot_be_made(project: Project) -> None:
    (project.root / "file").write_text("")
    project.cache_dir = project.root / "file" / "cache"
    text = build_in_memory(project)
    assert str(project.cache_dir) in text and "RAWMLA_CACHE_DIR" in text


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT])
@pytest.mark.parametrize("where", ["folder", "file"])
def test_full_or_read_only_disk(
    project: Project, monkeypatch: pytest.MonkeyPatch, code: int, where: str
) -> None:
    def refuse(*arguments: object, **keywords: object) -> None:
        raise OSError(code, os.strerror(code))

    if where == "folder":
        monkeypatch.setattr(entry.tempfile, "mkdtemp", refuse)
    else:
        monkeypatch.setattr(Path, "write_bytes", refuse)
    text = build_in_memory(project)
    assert os.strerror(code) in text
    monkeypatch.undo()
    assert project.entries() == [] and not list(project.cache_dir.glob(".tmp-*"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_folder_is_read_but_not_written(project: Project) -> None:
    project.build(1)
    project.cache_dir.chmod(0o555)
    try:
        one = project.builder()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            origins = [one.build(tiny(factor)).meta["origin"] for factor in (1, 2, 2)]
        assert origins == ["cache", "compiled", "memory"]
        assert "cannot be written" in only_warning(caught)
    finally:
        project.cache_dir.chmod(0o755)


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757, 0o1775])
def test_folder_that_others_can_write_is_refused(project: Project, mode: int) -> None:
    project.build(1)
    project.cache_dir.chmod(mode)
    assert "chmod go-w" in build_in_memory(project)
    assert len(project.entries()) == 1


def test_folder_of_another_user_is_refused(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    project.build(1)
    monkeypatch.setattr(entry.os, "geteuid", lambda: os.stat(project.cache_dir).st_uid + 1)
    assert "belongs to user id" in build_in_memory(project)


def test_folder_that_others_could_replace_is_refused(project: Project) -> None:
    project.cache_dir = project.root / "shared" / "mine"
    project.build(1)
    project.cache_dir.parent.chmod(0o777)
    assert "above" in build_in_memory(project)
    project.cache_dir.parent.chmod(0o1777)  # as /tmp: others cannot rename what is mine
    assert project.build(1).meta["origin"] == "cache"


def test_own_group_may_write_above(project: Project) -> None:
    """Home folders are like this where every user has a group of his own and the umask is 002."""
    project.cache_dir = project.root / "home" / "cache"
    project.build(1)
    project.cache_dir.parent.chmod(0o775)
    assert project.build(1).meta["origin"] == "cache"


def test_link_to_an_open_folder_is_refused(project: Project) -> None:
    target = project.root / "open"
    target.mkdir()
    target.chmod(0o777)
    project.cache_dir.symlink_to(target)
    assert "chmod go-w" in build_in_memory(project)


def test_new_folder_is_private(project: Project) -> None:
    before = os.umask(0)
    try:
        project.build()
    finally:
        os.umask(before)
    assert project.cache_dir.stat().st_mode & 0o777 == 0o700


def test_least_recently_used_entries_are_evicted(project: Project) -> None:
    folders = {}
    for factor in (1, 2, 3):
        compiled = project.build(factor)
        assert compiled.path is not None
        folders[factor] = compiled.path.parent
        os.utime(folders[factor], (factor, factor))
    used = sum(size for _, size, _ in DiskCache(project.cache_dir, 0).entries())
    assert project.build(1).meta["origin"] == "cache"  # now the most recent one
    project.max_bytes = int(used * 1.1)
    project.build(4)
    assert folders[1].exists() and not folders[2].exists() and folders[3].exists()
    assert sum(size for _, size, _ in DiskCache(project.cache_dir, 0).entries()) <= project.max_bytes
    assert project.build(2).meta["origin"] == "compiled"


def test_the_entry_just_stored_stays_whatever_the_bound(project: Project) -> None:
    project.max_bytes = 1
    project.build(1)
    project.build(2)
    assert len(project.entries()) == 1
    assert project.build(2).meta["origin"] == "cache"


def test_old_temporary_folders_are_removed(project: Project) -> None:
    project.build(1)
    old, new = project.cache_dir / ".tmp-old", project.cache_dir / ".tmp-new"
    old.mkdir()
    new.mkdir()
    os.utime(old, (1, 1))
    project.build(2)
    assert not old.exists() and new.exists()


def fail(one: builder.Builder, project: Project, number: int) -> Path:
    """What is saved of a kernel that does not compile."""
    project.write("kernels/tiny.cu", f"{number} " * 4000)
    with pytest.raises(builder.CompileError) as caught:
        one.build(tiny())
    assert caught.value.source_path is not None
    return caught.value.source_path


def test_saved_failures_are_bounded_too(project: Project) -> None:
    """A success makes room, and so does the next failure: a program may have no success."""
    project.max_bytes = 40_000
    one = project.builder()
    old = fail(one, project, 1)
    os.utime(old.parents[1], (1, 1))
    for number in range(2, 8):
        new = fail(one, project, number)
    assert not old.exists() and new.exists()
    assert sum(size for _, size, _ in one.cache.entries()) <= project.max_bytes
    os.utime(new.parents[1], (1, 1))
    fail(one, project, 7)  # again: used now
    assert time.time() - new.parents[1].stat().st_mtime < 60
    os.utime(new.parents[1], (1, 1))
    project.write("kernels/tiny.cu", KERNEL)
    project.max_bytes = 8000
    project.build(1)
    assert not new.exists()


def test_failures_that_the_cache_does_not_take_are_bounded(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project.root / "temporary").mkdir()
    monkeypatch.setattr(builder.tempfile, "tempdir", str(project.root / "temporary"))
    project.cache_dir.write_text("")  # a file: no folder can be made there
    project.max_bytes = 40_000
    one = project.builder()
    with pytest.warns(RuntimeWarning, match="in memory"):
        saved = [fail(one, project, number) for number in range(8)]
    assert saved[-1].exists() and not saved[0].exists()
    (folder,) = (project.root / "temporary").iterdir()
    assert sum(size for _, size, _ in DiskCache(folder, 0).entries()) <= project.max_bytes


def test_prebuilt_folder_round_trip(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = project.root / "prebuilt"
    compiled = project.build(1)
    export(compiled, folder)
    without_nvrtc(monkeypatch)
    project.cache_dir = project.root / "not needed"
    loaded = project.builder(folder).build(tiny(1))
    assert loaded.meta["origin"] == "prebuilt" and loaded.cubin == compiled.cubin
    assert loaded.path is not None and loaded.path.parent.parent == folder
    same = ("registers", "threads", "dynamic_shared_bytes", "nvrtc")
    assert all(loaded.meta[name] == compiled.meta[name] for name in same)
    assert loaded.log == compiled.log
    assert not project.cache_dir.exists()


def test_prebuilt_code_of_another_compiler_wins_over_the_cache(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = project.root / "prebuilt"
    with monkeypatch.context() as patch:
        patch.setattr(nvrtc, "version", lambda: "1.2.3")
        export(project.build(1), folder)
    project.build(1)
    assert project.builder(folder).build(tiny(1)).meta["nvrtc"] == "1.2.3"


def test_exporting_twice_and_from_a_prebuilt_folder(project: Project) -> None:
    first, second = project.root / "first", project.root / "second"
    export(project.build(1), first)
    export(project.build(1), first)
    export(project.builder(first).build(tiny(1)), second)
    assert [path.name for path in first.iterdir()] == [path.name for path in second.iterdir()]
    assert project.builder(second).build(tiny(1)).meta["origin"] == "prebuilt"


@pytest.mark.parametrize("problem", ["stale", "damaged", "missing folder", "open", "foreign"])
def test_unusable_prebuilt_folder_is_named_once_and_compiled_around(
    project: Project, monkeypatch: pytest.MonkeyPatch, problem: str
) -> None:
    folder = project.root / "prebuilt"
    entry_folder = export(project.build(1), folder)
    if problem == "stale":
        project.write("lib/inner.cuh", INNER + "// newer\n")
    elif problem == "damaged":
        (entry_folder / "kernel.cubin").write_bytes(b"\x7fELF")
    elif problem == "missing folder":
        folder = project.root / "elsewhere"
    elif problem == "open":
        folder.chmod(0o777)
    else:
        pretended_status(monkeypatch)(folder, uid=54321)
    one = project.builder(folder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert {one.build(tiny(1)).meta["origin"] for _ in range(3)} <= {"compiled", "cache"}
    text = only_warning(caught)
    assert "RAWMLA_CUBIN_DIR" in text and str(folder) in text


def test_environment_sets_up_the_default_builder(
    project: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(builder, "find_source_root", lambda: project.sources)
    monkeypatch.setenv("RAWMLA_CACHE_DIR", str(tmp_path / "a"))
    monkeypatch.setenv("RAWMLA_CACHE_MAX_MB", "1.5")
    monkeypatch.setenv("RAWMLA_CUBIN_DIR", "")
    one = default_builder()
    assert isinstance(one, Builder) and one is default_builder()
    assert (one.cache.path, one.cache.max_bytes, one.prebuilt) == (tmp_path / "a", 1_500_000, None)
    monkeypatch.setenv("RAWMLA_CACHE_DIR", "~/b")
    monkeypatch.setenv("RAWMLA_CUBIN_DIR", str(tmp_path / "c"))
    other = default_builder()
    assert (other.cache.path, other.prebuilt) == (Path.home() / "b", tmp_path / "c")
    monkeypatch.delenv("RAWMLA_CACHE_DIR")
    monkeypatch.delenv("RAWMLA_CACHE_MAX_MB")
    assert default_builder().cache.path.name == "rawmla"
    assert default_builder().cache.max_bytes == 256_000_000
    for name in ("d", "e"):  # read at every call, as the others are
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
        assert default_builder().cache.path == tmp_path / name / "rawmla"
    for wrong in ("many", "-1", "nan"):
        monkeypatch.setenv("RAWMLA_CACHE_MAX_MB", wrong)
        with pytest.raises(ValueError, match=f"RAWMLA_CACHE_MAX_MB.*{wrong}"):
            default_builder()
