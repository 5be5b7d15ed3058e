"""Specs, sources, compilation, generated headers, and what the compiler says about the user's lines."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jit_project import KERNEL, Project, tiny, with_text

from rawmla.errors import CompileError, MissingDependencyError, NVRTCNotFoundError, RawMLAError
from rawmla.jit import CompiledKernel, KernelSpec, export, nvrtc, ptxas, sources
from rawmla.jit.diagnostics import split_log


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def failure(project: Project, spec: KernelSpec | None = None) -> CompileError:
    with pytest.raises(CompileError) as caught:
        project.builder().build(spec or tiny())
    return caught.value


def pickled(error: CompileError) -> CompileError:
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.user_lines, again.log) == (str(error), error.user_lines, error.log)
    return error


# ---- specs


def test_spec_sorts_defines_and_compares_by_value() -> None:
    one = KernelSpec("k", (("B", 2), ("A", 1)), 128, 64)
    other = KernelSpec("k", (("A", 1), ("B", 2)), 128, 64)
    assert one == other and hash(one) == hash(other) and one.label == "k[A=1,B=2]"
    assert dict(one.macros) == {"A": 1, "B": 2, "THREADS": 128, "SMEM_BYTES": 64}
    assert KernelSpec("k", (), 128, 0).label == "k" and one != KernelSpec("k", one.defines, 128, 65)
    plain, text, again, other = tiny(), with_text("one"), with_text("one"), with_text("other")
    assert text == again and len({plain, text, other}) == 3 and text.label == again.label != other.label
    assert not plain.user_text and text.user_text and plain.label == "tiny[FACTOR=1]"
    assert re.fullmatch(r"tiny\[FACTOR=1,text=[0-9a-f]{8}\]", text.label)
    both = (("a.cuh", "1"), ("b.cuh", "2"))
    assert tiny(headers=both) == tiny(headers=both[::-1]) and tiny(headers=both).headers == both


def test_a_spec_from_another_process_is_found() -> None:
    """The hash of a string differs from process to process, so it may not travel."""
    code = (
        "import pickle, sys; from rawmla.jit import KernelSpec; "
        "spec = KernelSpec('k', (('A', 1),), 128, 0, (('a.cuh', 'x'),)); "
        "sys.stdout.buffer.write(pickle.dumps(spec))"
    )
    spec = pickle.loads(subprocess.check_output([sys.executable, "-c", code]))
    assert spec in {KernelSpec("k", (("A", 1),), 128, 0, (("a.cuh", "x"),)): 1}


WRONG_NAMES = ("", "/a.cuh", "../a.cuh", "a/../b.cuh", "./a.cuh", "a//b.cuh", 'a".cuh', "a b.cuh", "a\n.cuh")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("../k", (), 128, 0), "C identifier"),
        (("k", (("A B", 1),), 128, 0), "C identifier"),
        (("k", (("A", 1), ("A", 2)), 128, 0), "defines"),
        (("k", (("THREADS", 128),), 128, 0), "defines: .* no SMEM_BYTES or THREADS"),
        (("k", (("SMEM_BYTES", 0),), 128, 0), "defines: .* no SMEM_BYTES or THREADS"),
        (("k", (), 0, 0), "threads"),
        (("k", (), 1025, 0), "threads"),
        (("k", (), 128, 232_449), "smem_bytes"),
        (("k", (), 128, 0, (("a.cuh", "1"), ("a.cuh", "2"))), "headers: each name may occur once"),
        *((("k", (), 128, 0, ((name, ""),)), "headers: expected a relative path") for name in WRONG_NAMES),
    ],
)
def test_spec_refuses_nonsense(arguments: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        KernelSpec(*arguments)


# ---- sources


def test_sources_are_found_and_name_a_missing_kernel(project: Project) -> None:
    found = sources.collect(project.sources, "tiny")
    assert [name for name, _ in found.headers] == ["lib/inner.cuh", "lib/outer.cuh"]
    with pytest.raises(RawMLAError, match="absent.cu"):
        sources.collect(project.sources, "absent")
    assert list((sources.find_source_root() / "kernels").glob("*.cu"))


@pytest.mark.parametrize(
    "lines",
    ['#include "stray.cuh"', '#define NAME "lib/stray.cuh"\n#include NAME', '#include "../stray.cuh"'],
)
def test_only_hashed_headers_can_be_included(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str
) -> None:
    """A header in the working directory, named by a macro, or out of the sources is not in the key and must
    not compile.
    """
    for name in ("stray.cuh", "kernels/stray.cuh", "cuda_src/lib/stray.cuh"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("\n")
    monkeypatch.chdir(tmp_path)
    project.write("kernels/tiny.cu", lines + '\nextern "C" __global__ void tiny() {}\n')
    assert sources.collect(project.sources, "tiny").headers == ()
    assert "stray.cuh" in str(failure(project))


# ---- compilation


def test_a_compiled_kernel_has_its_report(project: Project) -> None:
    compiled = project.builder().build(tiny(3, threads=96, smem_bytes=1000))
    assert compiled.cubin.startswith(b"\x7fELF")
    assert compiled.path is not None and compiled.path.read_bytes() == compiled.cubin
    assert compiled.source == (project.sources / "kernels/tiny.cu").read_text()
    assert "ptxas info" in compiled.log
    meta = compiled.meta
    assert meta["registers"] > 0 and meta["compile_seconds"] > 0
    assert (meta["spill_stores"], meta["spill_loads"], meta["local_bytes"]) == (0, 0, 0)
    assert (meta["threads"], meta["dynamic_shared_bytes"], meta["static_shared_bytes"]) == (96, 1000, 0)
    assert meta["nvrtc"] == nvrtc.version() and len(nvrtc.version().split(".")) == 3
    assert "libnvrtc" in (nvrtc.library_path() or "")
    assert "-arch=sm_90a" in meta["options"] and "-DFACTOR=3" in meta["options"]
    assert sorted(meta["sources"]) == ["kernels/tiny.cu", "lib/inner.cuh", "lib/outer.cuh"]


def test_compile_error_has_log_options_and_saved_source(project: Project) -> None:
    broken = '#include "lib/inner.cuh"\nextern "C" __global__ void tiny(int* p) { *p = undeclared_name; }\n'
    project.write("kernels/tiny.cu", broken)
    error = pickled(failure(project, tiny(5)))
    assert error.source_path is not None and error.source_path.read_text() == broken
    saved = error.source_path.parents[1]
    assert (saved / "lib/inner.cuh").is_file() and "undeclared_name" in (saved / "compile.log").read_text()
    for part in ("tiny[FACTOR=5]", "undeclared_name", "-DFACTOR=5", "-arch=sm_90a", str(error.source_path)):
        assert part in str(error)


GOOD_LOG = """\
ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas info    : Function properties for k
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 13 barriers, 1024 bytes smem
"""


def test_ptxas_report_is_read() -> None:
    """Serialised wgmma and ignored setmaxnreg are losses, other advisories are none."""
    found = dict(registers=168, barriers=13, spill_stores=0, spill_loads=0, local_bytes=0)
    assert ptxas.resources(GOOD_LOG) == {**found, "static_shared_bytes": 1024}
    assert ptxas.has_report(GOOD_LOG) and ptxas.losses(GOOD_LOG) == []
    for code in (7504, 7505, 7507, *range(7510, 7516), 7518):
        (loss,) = ptxas.losses(GOOD_LOG + f"ptxas info    : (C{code}) Potential Performance Loss: why\n")
        assert f"C{code}" in loss and "why" in loss
    for code in (7503, 7517, 7519, 7602):
        assert ptxas.losses(GOOD_LOG + f"ptxas info    : (C{code}) a remark\n") == []


@pytest.mark.parametrize("headers", [(), (("mine.cuh", "\n"),)])
def test_a_log_without_report_fails_the_build(
    project: Project, monkeypatch: pytest.MonkeyPatch, headers: tuple[tuple[str, str], ...]
) -> None:
    options = tuple(option for option in nvrtc._BASE_OPTIONS if "ptxas" not in option)
    monkeypatch.setattr(nvrtc, "_BASE_OPTIONS", options)
    assert "no ptxas resource report" in str(failure(project, tiny(headers=headers)))


def spilling() -> str:
    """64 live values under a limit of 24 registers."""
    loads = "\n".join(f"float v{i} = p[{i} * 32 + threadIdx.x];" for i in range(64))
    uses = "\n".join(f"p[{i} * 64 + threadIdx.x] = v{63 - i} * v{i};" for i in range(64))
    return f'extern "C" __global__ __maxnreg__(24) void tiny(volatile float* p) {{ {loads} {uses} }}'


LOCAL_MEMORY = """\
__device__ int score(int x) {
    volatile int a[100];
    for (int j = 0; j < 100; j++) a[j] = x + j;
    return a[x];
}
"""
CALL = 'extern "C" __global__ void tiny(int* p) { *p = score(*p); }\n'
SETMAXNREG = """\
extern "C" __global__ void tiny(int* p) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    *p = 1;
}
"""  # without __launch_bounds__ ptxas does not know the registers at entry


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (spilling(), r"register spills: [1-9]\d* bytes stored"),
        (LOCAL_MEMORY + CALL, "local memory: 400 bytes of stack frame"),
        (SETMAXNREG, r"ptxas: .*C75\d\d.*'setmaxnreg' ignored"),
    ],
    ids=("spills", "local memory", "setmaxnreg"),
)
def test_losses_fail_the_build(project: Project, source: str, text: str) -> None:
    """The compiler is named: another one might not have the loss. A variant that may lose is built."""
    project.write("kernels/tiny.cu", source)
    with pytest.raises(CompileError, match=rf"tiny.FACTOR=1.(?s:.)*{text}") as caught:
        project.build()
    assert f"by NVRTC {nvrtc.version()} " in str(caught.value)
    assert [name for name in project.entries() if not name.endswith("-failed")] == []
    assert project.builder().build(tiny(may_lose=True)).losses


@pytest.mark.parametrize("missing", ["bindings", "library"])
def test_a_missing_compiler_names_the_remedy(
    project: Project, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    def no_library() -> None:
        raise RuntimeError("libnvrtc.so.12 not found\nlong search list")

    error: type[Exception]
    if missing == "bindings":
        monkeypatch.setitem(sys.modules, "cuda.bindings", None)
        error, text = MissingDependencyError, r"pip install .*\[cu12\]"
    else:
        library = SimpleNamespace(nvrtcVersion=no_library)
        monkeypatch.setattr(nvrtc, "_bindings", lambda: library)
        error, text = NVRTCNotFoundError, r"libnvrtc.so.12 not found\).*RAWMLA_CUBIN_DIR"
    nvrtc._version.cache_clear()
    try:
        with pytest.raises(error, match=text) as caught:
            project.build()
        assert isinstance(caught.value, RawMLAError)
        assert isinstance(caught.value, ImportError) == (missing == "bindings")
    finally:
        nvrtc._version.cache_clear()


# ---- generated headers

WITH_TEXT = '#include "mod/score.cuh"\n' + KERNEL.replace("outer()", "score(*out)")
GOOD = "__device__ int score(int x) {\n    return 2 * x;\n}\n"
BAD = """\
// doubles
__device__ int score(int x) {
    int twice = 2 * x;
    return twice + nowhere;
}
"""


@pytest.fixture
def texts(project: Project) -> Project:
    """A project whose kernel includes a generated header."""
    project.write("kernels/tiny.cu", WITH_TEXT)
    return project


def built(project: Project, text: str, prebuilt: Path | None = None) -> CompiledKernel:
    return project.builder(prebuilt).build(with_text(text))


@pytest.mark.parametrize("name", ["lib/inner.cuh", "lib/unused.cuh", "kernels/tiny.cu", "lib"])
def test_a_header_may_not_shadow_a_file(texts: Project, name: str) -> None:
    texts.write("lib/unused.cuh", "")
    with pytest.raises(ValueError, match=f"headers: expected a name that no file.*'{name}'"):
        texts.builder().build(with_text("", name))


def test_text_is_compiled_and_part_of_the_key(texts: Project) -> None:
    one, other = built(texts, GOOD), built(texts, GOOD.replace("2 *", "3 *"))
    assert one.meta["origin"] == other.meta["origin"] == "compiled" and one.cubin != other.cubin
    assert "mod/score.cuh" in one.meta["sources"] and one.meta["label"] == with_text(GOOD).label
    assert built(texts, GOOD).meta["origin"] == "cache"
    looks_so = '// #include P\n/* #include P */\n__device__ const char* shown = "#include P /*";\n'
    assert built(texts, looks_so + GOOD).meta["origin"] == "compiled"


def test_text_may_include_files_and_other_text(texts: Project) -> None:
    texts.write("lib/factor.cuh", "#define TWICE 2\n")
    text = '#include "lib/factor.cuh"\n#include "mod/more.cuh"\n' + GOOD.replace("2 *", "TWICE * MORE *")
    spec = tiny(headers=(("mod/score.cuh", text), ("mod/more.cuh", "#define MORE 5\n")))
    first = texts.builder().build(spec)
    assert {"lib/factor.cuh", "mod/more.cuh"} <= set(first.meta["sources"])
    texts.write("lib/factor.cuh", "#define TWICE 3\n")
    assert texts.builder().build(spec).cubin != first.cubin


@pytest.mark.parametrize(
    "line",
    [
        '#include "{stray}"',
        '#define P "{stray}"\n#include P',
        '# /* hidden */ include "{stray}"',
        '#inc\\\nlude "{stray}"',
        '%:include "{stray}"',
        '#embed "{stray}"',
    ],
)
def test_a_stray_include_is_refused(texts: Project, tmp_path: Path, line: str) -> None:
    """The compiler would read the file, and a changed file would not be noticed."""
    (tmp_path / "stray.cuh").write_text("\n")
    with pytest.raises(ValueError, match="mod/score.cuh: expected "):
        built(texts, line.format(stray=tmp_path / "stray.cuh") + "\n" + GOOD)


def test_a_prebuilt_folder_has_text_or_not(texts: Project) -> None:
    """Without a word: users' text has no end."""
    folder = texts.root / "prebuilt"
    compiled = built(texts, GOOD)
    export(compiled, folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded, other = (built(texts, GOOD.replace("2 *", factor), folder) for factor in ("2 *", "3 *"))
    assert loaded.meta["origin"] == "prebuilt" and loaded.cubin == compiled.cubin
    assert other.meta["origin"] == "compiled"


def test_an_error_shows_the_users_lines(texts: Project) -> None:
    error = pickled(failure(texts, with_text(BAD)))
    assert 'score.cuh, line 4: error: identifier "nowhere" is undefined\n' in error.user_lines
    assert "\n  > 4 |     return twice + nowhere;\n      |                    ^\n" in error.user_lines
    text = str(error)
    assert error.user_lines in text and text.count("nowhere") == 2  # message and line, once each
    assert "1 error detected" in text and with_text(BAD).label in text
    assert 'mod/score.cuh(4): error: identifier "nowhere"' in error.log
    assert error.source_path is not None
    assert (error.source_path.parents[1] / "mod/score.cuh").read_text() == BAD
    texts.write("kernels/tiny.cu", WITH_TEXT + "int broken = nowhere_at_all;\n")
    ours = failure(texts, with_text(GOOD))
    assert ours.user_lines == "" and ours.log in str(ours)


LOG = """\
mod/a.cuh(1): error: first
  \tfirst line
  \t      ^
          detected during instantiation of "f" at line 2 of kernels/k.cu

kernels/k.cu(2): error: ours
  our line
  ^

mod/a.cuh(11): warning #177-D: a remark
  eleventh
  ^

mod/a.cuh(12): catastrophic error: no caret here

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
        "mod/a.cuh, line 12: catastrophic error: no caret here",
        "    10 | line 10",
        "    11 | line 11",
        "  > 12 | twelfth",
    ]
    for ours in ("kernels/k.cu(2): error: ours", "  our line", "a remark", "  eleventh", "3 errors detected"):
        assert ours in rest
    assert "first" not in rest and "no caret" not in rest and split_log(LOG, ()) == ("", LOG)


def test_local_memory_in_user_text_is_no_error(texts: Project) -> None:
    """The warning comes when the kernel is loaded: who only compiles may take another variant instead."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        twice = [built(texts, LOCAL_MEMORY) for _ in range(2)]
    assert [one.meta["origin"] for one in twice] == ["compiled", "cache"]
    assert all(one.losses == ["local memory: 400 bytes of stack frame"] for one in twice)
    assert built(texts, GOOD).losses == []
