"""Kernels with generated headers: identity, sources, what the compiler says about the user's lines."""

from __future__ import annotations

import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from jit_project import KERNEL, Project, tiny

from rawmla.errors import CompileError
from rawmla.jit import KernelSpec, export, sources
from rawmla.jit.diagnostics import split_log

WITH_TEXT = '#include "mod/score.cuh"\n' + KERNEL.replace("outer()", "score(*out)")
GOOD = "__device__ int score(int x) {\n    return 2 * x;\n}\n"
BAD = """\
// doubles
__device__ int score(int x) {
    int twice = 2 * x;
    return twice + nowhere;
}
"""
SPILLING = """\
__device__ int score(int x) {
    volatile int a[100];
    for (int j = 0; j < 100; j++) a[j] = x + j;
    return a[x];
}
"""


@pytest.fixture
def project(tmp_path: Path) -> Project:
    made = Project(tmp_path)
    made.write("kernels/tiny.cu", WITH_TEXT)
    return made


def with_text(text: str, name: str = "mod/score.cuh") -> KernelSpec:
    return tiny(headers=((name, text),))


def test_headers_are_part_of_the_identity() -> None:
    plain, one, other = tiny(), with_text("one"), with_text("other")
    assert len({plain, one, other, with_text("one")}) == 3
    assert not plain.user_text and one.user_text
    assert plain.label == "tiny[FACTOR=1]"
    assert one.label.startswith("tiny[FACTOR=1,text=") and one.label != other.label
    assert one.label == with_text("one").label
    assert len(one.label) == len("tiny[FACTOR=1,text=12345678]")
    both = (("a.cuh", "1"), ("b.cuh", "2"))
    assert tiny(headers=both) == tiny(headers=both[::-1])
    assert tiny(headers=both).headers == both


def test_a_spec_from_another_process_is_found() -> None:
    """The hash of a string differs from process to process, so it may not travel."""
    code = (
        "import pickle, sys; from rawmla.jit import KernelSpec; "
        "spec = KernelSpec('k', (('A', 1),), 128, 0, (('a.cuh', 'x'),)); "
        "sys.stdout.buffer.write(pickle.dumps(spec))"
    )
    spec = pickle.loads(subprocess.check_output([sys.executable, "-c", code]))
    assert spec in {KernelSpec("k", (("A", 1),), 128, 0, (("a.cuh", "x"),)): 1}


@pytest.mark.parametrize(
    "name", ["", "/a.cuh", "../a.cuh", "a/../b.cuh", "./a.cuh", "a//b.cuh", 'a".cuh', "a b.cuh", "a\n.cuh"]
)
def test_a_header_name_is_a_relative_path(name: str) -> None:
    with pytest.raises(ValueError, match="headers: expected a relative path as name"):
        with_text("", name)


def test_a_header_name_occurs_once() -> None:
    with pytest.raises(ValueError, match="headers: each name may occur once"):
        tiny(headers=(("a.cuh", "1"), ("a.cuh", "2")))


@pytest.mark.parametrize("name", ["lib/inner.cuh", "lib/unused.cuh", "kernels/tiny.cu", "lib"])
def test_a_header_may_not_shadow_a_file(project: Project, name: str) -> None:
    project.write("lib/unused.cuh", "")
    with pytest.raises(ValueError, match=f"headers: expected a name that no file.*'{name}'"):
        project.builder().build(with_text("", name))


def test_text_is_compiled_and_part_of_the_key(project: Project) -> None:
    one = project.builder().build(with_text(GOOD))
    other = project.builder().build(with_text(GOOD.replace("2 *", "3 *")))
    assert one.meta["origin"] == other.meta["origin"] == "compiled" and one.cubin != other.cubin
    assert "mod/score.cuh" in one.meta["sources"]
    assert project.builder().build(with_text(GOOD)).meta["origin"] == "cache"
    assert one.meta["label"] == with_text(GOOD).label


def test_text_may_include_files_and_other_text(project: Project) -> None:
    project.write("lib/factor.cuh", "#define TWICE 2\n")
    text = '#include "lib/factor.cuh"\n#include "mod/more.cuh"\n' + GOOD.replace("2 *", "TWICE * MORE *")
    spec = tiny(headers=(("mod/score.cuh", text), ("mod/more.cuh", "#define MORE 5\n")))
    first = project.builder().build(spec)
    assert {"lib/factor.cuh", "mod/more.cuh"} <= set(first.meta["sources"])
    project.write("lib/factor.cuh", "#define TWICE 3\n")
    assert project.builder().build(spec).cubin != first.cubin


def test_an_absolute_include_is_refused(project: Project, tmp_path: Path) -> None:
    """The compiler would read the file, and a changed file would not be noticed."""
    (tmp_path / "stray.cuh").write_text("\n")
    with pytest.raises(ValueError, match=f"mod/score.cuh: expected includes.*'{tmp_path}/stray.cuh'"):
        project.builder().build(with_text(f'#include "{tmp_path}/stray.cuh"\n' + GOOD))


@pytest.mark.parametrize(
    "line",
    (
        '#define P "{stray}"\n#include P',
        '# /* hidden */ include "{stray}"',
        '#inc\\\nlude "{stray}"',
        '%:include "{stray}"',
        '#embed "{stray}"',
    ),
    ids=("macro", "comment", "continued", "digraph", "embed"),
)
def test_a_hidden_include_is_refused(project: Project, tmp_path: Path, line: str) -> None:
    stray = tmp_path / "stray.cuh"
    stray.write_text("\n")
    with pytest.raises(ValueError, match="mod/score.cuh: expected "):
        project.builder().build(with_text(line.format(stray=stray) + "\n" + GOOD))


def test_what_only_looks_like_an_include(project: Project) -> None:
    text = '// #include P\n/* #include P */\n__device__ const char* shown = "#include P /*";\n'
    assert project.builder().build(with_text(text + GOOD)).meta["origin"] == "compiled"


def test_text_is_exported(project: Project) -> None:
    compiled = project.builder().build(with_text(GOOD))
    export(compiled, project.root / "prebuilt")
    loaded = project.builder(project.root / "prebuilt").build(with_text(GOOD))
    assert loaded.meta["origin"] == "prebuilt" and loaded.cubin == compiled.cubin


def test_a_prebuilt_folder_need_not_have_text_of_users(project: Project) -> None:
    folder = project.root / "prebuilt"
    export(project.builder().build(with_text(GOOD)), folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other = project.builder(folder).build(with_text(GOOD.replace("2 *", "3 *")))
    assert other.meta["origin"] == "compiled"


def test_an_error_shows_the_users_lines(project: Project) -> None:
    with pytest.raises(CompileError) as caught:
        project.builder().build(with_text(BAD))
    error = caught.value
    assert error.user_lines.splitlines() == [
        'mod/score.cuh, line 4: error: identifier "nowhere" is undefined',
        "    2 | __device__ int score(int x) {",
        "    3 |     int twice = 2 * x;",
        "  > 4 |     return twice + nowhere;",
        "      |                    ^",
        "    5 | }",
    ]
    text = str(error)
    assert error.user_lines in text and text.count("nowhere") == 2  # message and line, once each
    assert "1 error detected" in text and with_text(BAD).label in text
    assert 'mod/score.cuh(4): error: identifier "nowhere"' in error.log
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.user_lines, again.log) == (text, error.user_lines, error.log)


def test_a_failed_source_is_saved_with_its_text(project: Project) -> None:
    with pytest.raises(CompileError) as caught:
        project.builder().build(with_text(BAD))
    assert caught.value.source_path is not None
    assert (caught.value.source_path.parents[1] / "mod/score.cuh").read_text() == BAD


def test_an_error_of_our_own_is_shown_as_it_is(project: Project) -> None:
    project.write("kernels/tiny.cu", WITH_TEXT + "int broken = nowhere_at_all;\n")
    with pytest.raises(CompileError) as caught:
        project.builder().build(with_text(GOOD))
    assert caught.value.user_lines == ""
    assert caught.value.log in str(caught.value)


LOG = """\
mod/a.cuh(1): error: first
  \tfirst line
  \t      ^
          detected during instantiation of "f" at line 2 of kernels/k.cu

kernels/k.cu(2): error: ours
  our line
  ^

mod/a.cuh(12): error: last
  twelfth
    ^

mod/a.cuh(11): warning #177-D: a remark
  eleventh
  ^

mod/a.cuh(3): catastrophic error: no caret here

3 errors detected in the compilation of "kernels/k.cu".
"""


def test_the_log_is_split() -> None:
    text = "\n".join(["\tfirst line", *(f"line {n}" for n in range(2, 12)), "twelfth"]) + "\n"
    shown, rest = split_log(LOG, (("mod/a.cuh", text),))
    assert shown.splitlines() == [
        "mod/a.cuh, line 1: error: first",
        "  > 1 | \tfirst line",
        "      | \t      ^",
        "    2 | line 2",
        "    3 | line 3",
        '          detected during instantiation of "f" at line 2 of kernels/k.cu',
        "mod/a.cuh, line 12: error: last",
        "    10 | line 10",
        "    11 | line 11",
        "  > 12 | twelfth",
        "       |   ^",
        "mod/a.cuh, line 3: catastrophic error: no caret here",
        "    1 | \tfirst line",
        "    2 | line 2",
        "  > 3 | line 3",
        "    4 | line 4",
        "    5 | line 5",
    ]
    for ours in ("kernels/k.cu(2): error: ours", "  our line", "a remark", "  eleventh", "3 errors detected"):
        assert ours in rest
    assert "first" not in rest and "twelfth" not in rest and "no caret" not in rest
    assert split_log(LOG, ()) == ("", LOG)


def test_local_memory_in_user_text_is_no_error(project: Project) -> None:
    """The warning comes when the kernel is loaded: who only compiles may take another variant instead."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        built = [project.builder().build(with_text(SPILLING)) for _ in range(2)]
    assert [one.meta["origin"] for one in built] == ["compiled", "cache"]
    assert all(one.losses == ["local memory: 400 bytes of stack frame"] for one in built)
    assert project.builder().build(with_text(GOOD)).losses == []


def test_the_same_code_as_our_own_is_an_error(project: Project) -> None:
    project.write("mod/score.cuh", SPILLING)  # a file this time
    with pytest.raises(CompileError, match="local memory: 400 bytes of stack frame"):
        project.build()


def test_collect_without_text_reads_files_only(project: Project) -> None:
    project.write("mod/score.cuh", GOOD)
    names = [name for name, _ in sources.collect(project.sources, "tiny").headers]
    assert names == ["lib/inner.cuh", "lib/outer.cuh", "mod/score.cuh"]
