"""Which folders and entries are trusted: their owner, mode and links; and what is said about the others."""

from __future__ import annotations

import json
import os
import threading
import warnings
from pathlib import Path

import pytest
from jit_project import Pretend, Project, pretended_status, tiny

from rawmla.jit import CompiledKernel, builder, default_builder, entry, export

SOMEONE = 54321


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Pretend:
    return pretended_status(monkeypatch)


def built(project: Project, prebuilt: Path | None = None) -> tuple[CompiledKernel, list[str]]:
    """A kernel from a new builder that is asked twice, and all warnings."""
    one = project.builder(prebuilt)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first = one.build(tiny())
        one.build(tiny())
    assert all(warning.category is RuntimeWarning for warning in caught)
    return first, [str(warning.message) for warning in caught]


PARTS = ["", "kernel.cubin", "meta.json"]


def entry_of(project: Project) -> Path:
    path = project.build().path
    assert path is not None
    return path.parent


def as_link(target: Path) -> None:
    aside = target.with_name(target.name + ".aside")
    target.rename(aside)
    target.symlink_to(aside)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("mode", [0o020, 0o002])
def test_an_entry_that_others_can_write_is_replaced(project: Project, part: str, mode: int) -> None:
    target = entry_of(project) / part
    target.chmod(target.stat().st_mode | mode)
    first, (warning,) = built(project)
    assert first.meta["origin"] == "compiled"
    assert f"{target} is writable for others" in warning and "compiled again" in warning
    assert "chmod go-w" in warning
    assert built(project)[1] == [] and project.build().meta["origin"] == "cache"
    assert not list(project.cache_dir.glob(".tmp-*"))


@pytest.mark.parametrize("part", PARTS)
def test_an_entry_of_another_user_is_replaced(project: Project, part: str, pretend: Pretend) -> None:
    target = entry_of(project) / part
    pretend(target, uid=SOMEONE)
    first, (warning,) = built(project)
    assert first.meta["origin"] == "compiled"
    assert f"{target} belongs to user id {SOMEONE}, not to {os.geteuid()}" in warning
    assert project.build().meta["origin"] == "cache"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("part", PARTS)
def test_an_entry_that_was_given_away_is_replaced(project: Project, part: str) -> None:
    target = entry_of(project) / part
    os.chown(target, SOMEONE, SOMEONE)
    first, (warning,) = built(project)
    assert first.meta["origin"] == "compiled" and f"belongs to user id {SOMEONE}" in warning
    assert project.build().meta["origin"] == "cache"


@pytest.mark.parametrize("part", PARTS)
def test_an_entry_of_root_is_not_mine(
    project: Project, monkeypatch: pytest.MonkeyPatch, pretend: Pretend, part: str
) -> None:
    """As for the folder: the cache is the user's own."""
    folder = entry_of(project)
    target = folder / part
    monkeypatch.setattr(entry.os, "geteuid", lambda: SOMEONE)
    for path in (project.cache_dir, folder, *folder.iterdir()):
        pretend(path, uid=SOMEONE)
    for above in project.cache_dir.parents:
        pretend(above, uid=0)
    pretend(target, uid=0)
    _, warnings_seen = built(project)
    assert f"{target} belongs to user id 0" in warnings_seen[0]


@pytest.mark.parametrize("part", PARTS)
def test_an_entry_that_is_a_link_is_replaced(project: Project, part: str) -> None:
    target = entry_of(project) / part
    as_link(target)
    first, (warning,) = built(project)
    assert first.meta["origin"] == "compiled" and f"{target} is a symbolic link" in warning
    assert not target.is_symlink() and project.build().meta["origin"] == "cache"
    assert not list(project.cache_dir.glob(".tmp-*"))
    assert part != "" or target.with_name(target.name + ".aside").is_dir()  # what it led to is left alone


def test_a_link_that_leads_nowhere_is_replaced(project: Project) -> None:
    target = entry_of(project)
    as_link(target)
    target.with_name(target.name + ".aside").rename(project.root / "gone")
    assert "is a symbolic link" in built(project)[1][0]
    assert project.build().meta["origin"] == "cache"


@pytest.mark.parametrize("kind", ["file", "pipe", "folder"])
def test_what_is_no_entry_is_replaced(project: Project, kind: str) -> None:
    target = entry_of(project)
    cubin = target / "kernel.cubin"
    cubin.unlink()
    if kind == "pipe":
        os.mkfifo(cubin, 0o600)
    elif kind == "folder":
        cubin.mkdir(mode=0o755)
    else:
        (target / "meta.json").unlink()
        target.rmdir()
        target.write_bytes(b"")
    assert project.build().meta["origin"] == "compiled"
    assert project.build().meta["origin"] == "cache"
    assert not list(project.cache_dir.glob(".tmp-*"))


def test_what_is_checked_is_what_is_read(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that takes the entry's place after the check is not looked into."""
    one = project.build()
    assert one.path is not None
    folder = one.path.parent
    key = json.loads((folder / "meta.json").read_text())["key"]
    real_fstat = os.fstat

    def swap(descriptor: int) -> os.stat_result:
        monkeypatch.setattr(entry.os, "fstat", real_fstat)
        folder.rename(folder.with_name("checked"))
        folder.mkdir()
        return real_fstat(descriptor)

    monkeypatch.setattr(entry.os, "fstat", swap)
    found = entry.read_entry(folder, key)
    assert found is not None and found[0] == one.cubin
    assert list(folder.iterdir()) == []


def test_no_descriptor_is_left_open(project: Project) -> None:
    entry_of(project)
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


def test_several_refused_entries_are_one_warning(project: Project) -> None:
    for factor in (1, 2, 3):
        path = project.build(factor).path
        assert path is not None
        path.chmod(0o666)
    one = project.builder()
    with pytest.warns(RuntimeWarning) as caught:
        origins = [one.build(tiny(factor)).meta["origin"] for factor in (1, 2, 3)]
    assert origins == ["compiled"] * 3 and len(caught) == 1


def test_a_refused_entry_that_cannot_be_replaced(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    target = entry_of(project)
    (target / "kernel.cubin").chmod(0o666)

    def refuse(*arguments: object) -> None:
        raise PermissionError(13, "not yours")

    monkeypatch.setattr(entry.os, "rename", refuse)
    first, (refused, not_kept) = built(project)
    assert first.meta["origin"] == "compiled" and first.path is None
    assert "is writable for others" in refused and "kept" in not_kept and "not yours" in not_kept


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o077])
def test_own_entries_are_accepted_whatever_the_umask(project: Project, umask: int) -> None:
    folder = project.root / "new" / "prebuilt"
    before = os.umask(umask)
    try:
        target = entry_of(project)
        exported = export(project.build(), folder)
    finally:
        os.umask(before)
    for one in (target, exported):
        assert one.stat().st_mode & 0o777 == 0o755
        assert [file.stat().st_mode & 0o777 for file in sorted(one.iterdir())] == [0o644, 0o644]
    assert project.build().meta["origin"] == "cache"
    if umask:  # 0 leaves the folder above writable for others
        loaded, said = built(project, folder)
        assert loaded.meta["origin"] == "prebuilt" and said == []


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("problem", ["link", "open", "foreign"])
def test_a_prebuilt_entry_is_checked(project: Project, part: str, problem: str, pretend: Pretend) -> None:
    folder = project.root / "prebuilt"
    target = export(project.build(), folder) / part
    if problem == "link":
        as_link(target)
    elif problem == "open":
        target.chmod(target.stat().st_mode | 0o020)
    else:
        pretend(target, uid=SOMEONE)
    loaded, (warning,) = built(project, folder)
    assert loaded.meta["origin"] == "cache"
    assert "RAWMLA_CUBIN_DIR" in warning and str(target) in warning
    text = {"link": "is a symbolic link", "open": "is writable for others", "foreign": "belongs to user id"}
    assert text[problem] in warning


def test_a_prebuilt_folder_may_belong_to_root(
    project: Project, monkeypatch: pytest.MonkeyPatch, pretend: Pretend
) -> None:
    folder = project.root / "prebuilt"
    exported = export(project.build(), folder)
    monkeypatch.setattr(entry.os, "geteuid", lambda: SOMEONE)
    for path in (folder, *folder.parents, exported, *exported.iterdir()):
        pretend(path, uid=0)
    loaded, said = built(project, folder)
    assert (loaded.meta["origin"], said) == ("prebuilt", [])


def test_a_valid_entry_wins(project: Project) -> None:
    """Another process may have loaded it; who comes later uses it too."""
    target = entry_of(project)
    meta = json.loads((target / "meta.json").read_text())
    before = (target / "kernel.cubin").stat().st_ino, target.stat().st_ino
    kernel, key = meta["kernel"], meta["key"]
    again = entry.write_entry(project.cache_dir, kernel, key, b"another", {"cubin_sha256": "of another"})
    assert again == target
    assert ((target / "kernel.cubin").stat().st_ino, target.stat().st_ino) == before
    assert not list(project.cache_dir.glob(".tmp-*"))


ME = os.geteuid()


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        ({"uid": ME, "mode": 0o755}, False),
        ({"uid": 0, "mode": 0o755}, False),
        ({"uid": SOMEONE, "mode": 0o755}, True),
        ({"uid": SOMEONE, "mode": 0o1755}, True),
        ({"uid": 0, "mode": 0o1777}, False),
        ({"uid": 0, "mode": 0o777}, True),
        ({"uid": ME, "gid": os.getegid(), "mode": 0o775}, False),
        ({"uid": ME, "gid": 0, "mode": 0o775}, False),
        ({"uid": ME, "gid": SOMEONE, "mode": 0o775}, True),
        ({"uid": ME, "gid": SOMEONE, "mode": 0o1775}, False),
        ({"uid": ME, "gid": SOMEONE, "mode": 0o755}, False),
        ({"uid": ME, "gid": os.getegid(), "mode": 0o777}, True),
    ],
)
def test_who_may_write_above_the_folder(
    project: Project, pretend: Pretend, change: dict[str, int], refused: bool
) -> None:
    above = project.root / "above"
    (above / "mine").mkdir(parents=True, mode=0o755)
    pretend(above, **change)
    reason = entry.untrusted_reason(above / "mine")
    assert (reason is not None) == refused
    if reason is not None:
        assert reason.startswith(f"{above}, above {above / 'mine'}, ")
        assert ("belongs to user id" in reason) == (change["uid"] == SOMEONE)


def test_root_above_is_trusted_and_other_groups_are_not(
    project: Project, monkeypatch: pytest.MonkeyPatch, pretend: Pretend
) -> None:
    """The same for a user who is not root, whoever runs the test."""
    above = project.root / "above"
    mine = above / "mine"
    mine.mkdir(parents=True, mode=0o755)
    monkeypatch.setattr(entry.os, "geteuid", lambda: SOMEONE)
    monkeypatch.setattr(entry.os, "getegid", lambda: SOMEONE)
    for path in above.parents:
        pretend(path, uid=0, gid=0, mode=0o755)
    pretend(mine, uid=SOMEONE, mode=0o755)
    for uid, gid, mode, refused in (
        (0, 0, 0o755, False),
        (0, 0, 0o775, False),
        (0, SOMEONE, 0o775, False),
        (0, 99, 0o775, True),
        (SOMEONE, SOMEONE, 0o775, False),
        (99, 0, 0o755, True),
    ):
        pretend(above, uid=uid, gid=gid, mode=mode)
        assert (entry.untrusted_reason(mine) is not None) == refused, (uid, gid, oct(mode))
    pretend(mine, uid=0, mode=0o755)
    pretend(above, uid=0, gid=0, mode=0o755)
    assert "belongs to user id 0" in (entry.untrusted_reason(mine) or "")
    assert entry.untrusted_reason(mine, root_may_own=True) is None
    pretend(mine, uid=99, mode=0o755)
    assert "belongs to user id 99" in (entry.untrusted_reason(mine, root_may_own=True) or "")


@pytest.mark.parametrize("uid", [0, ME, SOMEONE])
def test_a_folder_for_everybody_needs_one_below_it(project: Project, pretend: Pretend, uid: int) -> None:
    """RAWMLA_CACHE_DIR=/tmp: to change the mode of /tmp would be bad advice."""
    project.cache_dir.mkdir()
    pretend(project.cache_dir, uid=uid, mode=0o1777)
    _, (warning,) = built(project)
    assert "chmod" not in warning
    assert f"{project.cache_dir} is for everybody (mode 1777); use a folder of your own" in warning
    assert f"such as {project.cache_dir / 'rawmla'}" in warning


@pytest.mark.parametrize("cache_dir", ["", "~/kernels"])
def test_no_home_is_one_warning(
    project: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache_dir: str
) -> None:
    """As in a container whose user has no entry in /etc/passwd."""

    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr("pwd.getpwuid", unknown)
    for name in ("HOME", "XDG_CACHE_HOME", "RAWMLA_CACHE_MAX_MB"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAWMLA_CACHE_DIR", cache_dir)
    monkeypatch.setenv("RAWMLA_CUBIN_DIR", "")
    monkeypatch.setattr(builder, "find_source_root", lambda: project.sources)
    monkeypatch.chdir(tmp_path)
    builder._default_builder.cache_clear()
    with pytest.warns(RuntimeWarning) as caught:
        origins = [builder.build(tiny(factor)).meta["origin"] for factor in (1, 1, 2)]
    builder._default_builder.cache_clear()
    assert origins == ["compiled", "memory", "compiled"]
    assert len(caught) == 1
    assert "no home folder" in str(caught[0].message) and "RAWMLA_CACHE_DIR" in str(caught[0].message)
    assert not (tmp_path / "~").exists()


def test_no_home_for_the_prebuilt_folder(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setenv("RAWMLA_CACHE_DIR", str(project.cache_dir))
    monkeypatch.setenv("RAWMLA_CUBIN_DIR", "~/cubins")
    monkeypatch.setattr(builder, "find_source_root", lambda: project.sources)
    builder._default_builder.cache_clear()
    with pytest.warns(RuntimeWarning, match="RAWMLA_CUBIN_DIR.*~/cubins is not a folder"):
        assert default_builder().build(tiny()).meta["origin"] == "compiled"
    builder._default_builder.cache_clear()


def test_a_missing_prebuilt_folder_is_said_once(project: Project) -> None:
    """Once for all kernels, also when threads ask for them at the same time."""
    one = project.builder(project.root / "elsewhere")
    start = threading.Barrier(4)

    def run(seed: int) -> None:
        start.wait()
        for factor in range(3):
            one.build(tiny(seed * 3 + factor))

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [str(one.message) for one in caught] == [
        f"rawmla: RAWMLA_CUBIN_DIR={project.root / 'elsewhere'} is not used: "
        f"{project.root / 'elsewhere'} is not a folder"
    ]


def test_kernels_in_memory_are_bounded(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "MEMORY_KERNELS", 2)
    (project.root / "file").write_text("")
    project.cache_dir = project.root / "file" / "cache"
    one = project.builder()
    with pytest.warns(RuntimeWarning, match="in memory"):
        origins = [one.build(tiny(factor)).meta["origin"] for factor in (1, 2, 1, 3, 1, 2)]
    assert origins == ["compiled", "compiled", "memory", "compiled", "memory", "compiled"]
