"""Specs, sources, compilation, and what makes a compiled kernel unusable."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from jit_project import Project, tiny

from rawmla.errors import CompileError, MissingDependencyError, NVRTCNotFoundError, RawMLAError
from rawmla.jit import KernelSpec, nvrtc, ptxas, sources


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def test_import_is_cheap() -> None:
    code = (
        "import sys, rawmla.jit, rawmla.errors; "
        "print([m for m in ('cupy', 'torch', 'numpy', 'cuda.bindings', 'filelock', 'rich') "
        "if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_spec_sorts_defines_and_compares_by_value() -> None:
    one = KernelSpec("k", (("B", 2), ("A", 1)), 128, 64)
    other = KernelSpec("k", (("A", 1), ("B", 2)), 128, 64)
    assert one == other and hash(one) == hash(other)
    assert one.defines == (("A", 1), ("B", 2))
    assert one.label == "k[A=1,B=2]"
    assert dict(one.macros) == {"A": 1, "B": 2, "THREADS": 128, "SMEM_BYTES": 64}
    assert KernelSpec("k", (), 128, 0).label == "k"
    assert one != KernelSpec("k", (("A", 1), ("B", 2)), 128, 65)
    assert pickle.loads(pickle.dumps(one)) == one


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
    ],
)
def test_spec_refuses_nonsense(arguments: tuple, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        KernelSpec(*arguments)


def test_sources_are_found_and_name_a_missing_kernel(project: Project) -> None:
    found = sources.collect(project.sources, "tiny")
    assert [name for name, _ in found.headers] == ["lib/inner.cuh", "lib/outer.cuh"]
    with pytest.raises(RawMLAError, match="absent.cu"):
        sources.collect(project.sources, "absent")


def test_installed_source_root_has_kernels() -> None:
    assert list((sources.find_source_root() / "kernels").glob("*.cu"))


def test_compiled_kernel_is_an_elf_file_with_its_report(project: Project) -> None:
    compiled = project.builder().build(tiny(3, threads=96, smem_bytes=1000))
    assert compiled.cubin.startswith(b"\x7fELF")
    assert compiled.path is not None and compiled.path.read_bytes() == compiled.cubin
    assert compiled.source == (project.sources / "kernels/tiny.cu").read_text()
    assert "ptxas info" in compiled.log
    meta = compiled.meta
    assert meta["registers"] > 0 and meta["compile_seconds"] > 0
    assert (meta["spill_stores"], meta["spill_loads"], meta["local_bytes"]) == (0, 0, 0)
    assert (meta["threads"], meta["dynamic_shared_bytes"], meta["static_shared_bytes"]) == (96, 1000, 0)
    assert meta["nvrtc"] == nvrtc.version()
    assert "-arch=sm_90a" in meta["options"] and "-DFACTOR=3" in meta["options"]
    assert sorted(meta["sources"]) == ["kernels/tiny.cu", "lib/inner.cuh", "lib/outer.cuh"]


def test_nvrtc_version_has_a_patch_level() -> None:
    assert len(nvrtc.version().split(".")) == 3
    assert "libnvrtc" in (nvrtc.library_path() or "")


def test_only_hashed_headers_can_be_included(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A header in the working directory, or named by a macro, is not in the key and must not compile."""
    (tmp_path / "stray.cuh").write_text("#define FACTOR_OF_STRAY 1\n")
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels/stray.cuh").write_text("#define FACTOR_OF_STRAY 1\n")
    monkeypatch.chdir(tmp_path)
    project.write("kernels/tiny.cu", '#include "stray.cuh"\nextern "C" __global__ void tiny() {}\n')
    with pytest.raises(CompileError, match="stray.cuh"):
        project.build()
    project.write("lib/by_macro.cuh", "\n")
    project.write("kernels/tiny.cu", '#define NAME "lib/by_macro.cuh"\n#include NAME\n' + "int x;\n")
    with pytest.raises(CompileError, match="by_macro.cuh"):
        project.build()


def test_include_outside_the_root_is_not_read(project: Project, tmp_path: Path) -> None:
    (tmp_path / "secret.cuh").write_text("\n")
    project.write("kernels/tiny.cu", '#include "../secret.cuh"\nextern "C" __global__ void tiny() {}\n')
    assert sources.collect(project.sources, "tiny").headers == ()
    with pytest.raises(CompileError, match="secret.cuh"):
        project.build()


def test_inactive_include_of_a_missing_file_is_harmless(project: Project) -> None:
    text = '#if 0\n#include "gone.cuh"\n#endif\n// #include "gone.cuh"\n'
    project.write("kernels/tiny.cu", text + 'extern "C" __global__ void tiny(int* p) { *p = FACTOR; }\n')
    assert project.build().cubin


def test_compile_error_has_log_options_and_saved_source(project: Project) -> None:
    broken = '#include "lib/inner.cuh"\nextern "C" __global__ void tiny(int* p) { *p = undeclared_name; }\n'
    project.write("kernels/tiny.cu", broken)
    with pytest.raises(CompileError) as caught:
        project.build(5)
    error = caught.value
    assert "undeclared_name" in error.log
    assert "-DFACTOR=5" in error.options
    assert error.source_path is not None and error.source_path.read_text() == broken
    saved = error.source_path.parents[1]
    assert (saved / "lib/inner.cuh").is_file()
    assert "undeclared_name" in (saved / "compile.log").read_text()
    text = str(error)
    for part in ("tiny[FACTOR=5]", "undeclared_name", "-DFACTOR=5", "-arch=sm_90a", str(error.source_path)):
        assert part in text
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == text and again.log == error.log


def test_failure_is_saved_in_a_temporary_folder_without_a_cache(project: Project) -> None:
    project.write("kernels/tiny.cu", "nonsense\n")
    project.cache_dir = project.sources / "kernels/tiny.cu"  # a file: no folder can be made there
    with pytest.warns(RuntimeWarning, match="in memory"), pytest.raises(CompileError) as caught:
        project.build()
    assert caught.value.source_path is not None and caught.value.source_path.is_file()


def test_spills_fail_the_build(project: Project) -> None:
    """64 live values under a limit of 24 registers have to spill."""
    loads = "\n".join(f"float v{i} = p[{i} * 32 + threadIdx.x];" for i in range(64))
    uses = "\n".join(f"p[{i} * 64 + threadIdx.x] = v{63 - i} * v{i};" for i in range(64))
    body = f'extern "C" __global__ __maxnreg__(24) void tiny(volatile float* p) {{ {loads} {uses} }}'
    project.write("kernels/tiny.cu", body)
    with pytest.raises(CompileError, match=r"register spills: [1-9]\d* bytes stored") as caught:
        project.build()
    assert f"by NVRTC {nvrtc.version()} " in str(caught.value)  # another one might not spill
    assert [name for name in project.entries() if not name.endswith("-failed")] == []


def test_local_memory_fails_the_build(project: Project) -> None:
    body = "volatile int a[100]; for (int j = 0; j < 100; j++) a[j] = p[j]; *p = a[i];"
    project.write("kernels/tiny.cu", f'extern "C" __global__ void tiny(int* p, int i) {{ {body} }}')
    with pytest.raises(CompileError, match="local memory: 400 bytes of stack frame"):
        project.build()


GOOD_LOG = """\
ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas info    : Function properties for k
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 13 barriers, 1024 bytes smem
"""


def test_ptxas_report_is_read() -> None:
    assert ptxas.resources(GOOD_LOG) == {
        "registers": 168,
        "barriers": 13,
        "spill_stores": 0,
        "spill_loads": 0,
        "local_bytes": 0,
        "static_shared_bytes": 1024,
    }
    assert ptxas.has_report(GOOD_LOG) and ptxas.losses(GOOD_LOG) == []


@pytest.mark.parametrize("code", [7504, 7505, 7507, 7510, 7511, 7512, 7513, 7514, 7515, 7518])
def test_serialised_wgmma_and_ignored_setmaxnreg_are_losses(code: int) -> None:
    line = f"ptxas info    : (C{code}) Potential Performance Loss: something is wrong"
    (loss,) = ptxas.losses(GOOD_LOG + line + "\n")
    assert f"C{code}" in loss and "something is wrong" in loss


@pytest.mark.parametrize("code", [7503, 7517, 7519, 7602])
def test_other_advisories_are_not(code: int) -> None:
    assert ptxas.losses(GOOD_LOG + f"ptxas info    : (C{code}) a remark\n") == []


@pytest.mark.parametrize("headers", [(), (("mine.cuh", "\n"),)])
def test_a_log_without_report_fails_the_build(
    project: Project, monkeypatch: pytest.MonkeyPatch, headers: tuple[tuple[str, str], ...]
) -> None:
    options = tuple(option for option in nvrtc._BASE_OPTIONS if "ptxas" not in option)
    monkeypatch.setattr(nvrtc, "_BASE_OPTIONS", options)
    with pytest.raises(CompileError, match="no ptxas resource report"):
        project.builder().build(tiny(headers=headers))


SETMAXNREG = """\
extern "C" __global__ void tiny(int* p) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    *p = 1;
}
"""  # without __launch_bounds__ ptxas does not know the registers at entry
WGMMA = """\
extern "C" __global__ __launch_bounds__(128, 1) void tiny(float* p, unsigned long long a, int n) {
    float d0 = 0, d1 = 0, d2 = 0, d3 = 0;
    for (int i = 0; i < n; i++) {
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 "
                     "{%0, %1, %2, %3}, %4, %4, 1, 1, 1, 0, 0;"
                     : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3) : "l"(a + i));
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        if (p[i] > 0.f) asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        d0 += p[i + n];
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    p[threadIdx.x] = d0 + d1 + d2 + d3;
}
"""  # the only wait inside the loop is conditional


@pytest.mark.parametrize(("source", "text"), [(SETMAXNREG, "'setmaxnreg' ignored"), (WGMMA, "serialized")])
def test_performance_losses_fail_a_real_build(project: Project, source: str, text: str) -> None:
    project.write("kernels/tiny.cu", source)
    with pytest.raises(CompileError, match=rf"tiny.FACTOR=1.: ptxas: .*C75\d\d.*{text}"):
        project.build()
    (loss,) = project.builder().build(tiny(may_lose=True)).losses
    assert text in loss


def test_missing_bindings_name_the_extra(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    nvrtc._version.cache_clear()
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    try:
        with pytest.raises(MissingDependencyError, match=r"pip install .*\[cu12\]") as caught:
            project.build()
        assert isinstance(caught.value, ImportError) and isinstance(caught.value, RawMLAError)
    finally:
        nvrtc._version.cache_clear()


def test_missing_nvrtc_names_the_remedy(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    class NoLibrary:
        @staticmethod
        def nvrtcVersion() -> None:
            raise RuntimeError("libnvrtc.so.12 not found\nlong search list")

    nvrtc._version.cache_clear()
    monkeypatch.setattr(nvrtc, "_bindings", lambda: NoLibrary)
    try:
        with pytest.raises(NVRTCNotFoundError, match=r"libnvrtc.so.12 not found\).*RAWMLA_CUBIN_DIR"):
            project.build()
    finally:
        nvrtc._version.cache_clear()
