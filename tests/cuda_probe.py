"""Asks the compiler about the CUDA sources: conditions on their own constants, functions and types."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import Any
from unittest import mock

from rawmla import jit
from rawmla.jit import KernelSpec, nvrtc
from rawmla.jit.builder import CompiledKernel
from rawmla.jit.sources import SourceSet, collect, find_source_root
from rawmla.jit.spec import MAX_SMEM_BYTES

REGISTERS_PER_SM = 65536


@functools.cache
def headers() -> tuple[tuple[str, bytes], ...]:
    """Every project header, by its name in an include line."""
    root = find_source_root()
    return tuple(
        (path.relative_to(root).as_posix(), path.read_bytes()) for path in sorted(root.rglob("*.cuh"))
    )


def source(name: str) -> str:
    """Text of a project file."""
    return (find_source_root() / name).read_text()


def assert_in_header(name: str, conditions: Iterable[str], constexpr: Iterable[str] = ()) -> None:
    """Raise AssertionError unless each C++ condition holds at compile time where header `name` is included.

    The functions named in `constexpr` are made so for the purpose: their text is unchanged otherwise.
    """
    texts = dict(headers())
    for function in constexpr:
        pattern = rf"(__device__ __forceinline__) (\w+ {function}\()".encode()
        texts[name], count = re.subn(pattern, rb"\1 constexpr \2", texts[name])
        assert count == 1, f"{count} definitions of {function} in {name}"
    main = f'#include "{name}"\n{_asserts(conditions)}'.encode()
    _compile(SourceSet("probe.cu", main, tuple(texts.items())), ("-arch=sm_90a", "-std=c++20"))


def assert_in_kernel(spec: KernelSpec, conditions: Iterable[str], declarations: str = "") -> None:
    """Raise AssertionError unless each C++ condition holds at compile time at the end of a kernel's file.

    `declarations` stand ahead of the conditions.
    """
    sources = collect(find_source_root(), spec.name, spec.headers)
    main = sources.main + f"\n{declarations}\n{_asserts(conditions)}".encode()
    options = (*nvrtc.compiler_options(spec), "--fdevice-syntax-only")
    _compile(SourceSet(sources.main_name, main, sources.headers), options)


def assert_no_losses(spec: KernelSpec) -> Ptx:
    """Compile a variant; raise AssertionError if ptxas says that something in it costs speed, or if an SM has
    no room for a CTA of it. Returns the variant's PTX.
    """
    ptx = Ptx(spec)
    built = ptx.built
    assert built.cubin[:4] == b"\x7fELF" and spec.name.encode() in built.cubin
    assert built.losses == []
    frames = re.findall(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", built.log
    )
    assert frames == [("0", "0", "0")] and "lmem" not in built.log, built.log
    assert_products_are_not_serialised(built)
    assert "warning" not in built.log.lower(), built.log
    warp_registers = -(-built.meta["registers"] // 8) * 8 * 32
    assert spec.threads % 32 == 0 and warp_registers * spec.threads // 32 <= REGISTERS_PER_SM
    assert spec.smem_bytes + built.meta["static_shared_bytes"] <= MAX_SMEM_BYTES
    return ptx


def assert_products_are_not_serialised(built: CompiledKernel) -> None:
    """Raise AssertionError where ptxas says that wgmma or setmaxnreg does not do what it is there for."""
    # C7504 to C7509: setmaxnreg without effect. C7510 to C7515 and C7518: wgmma serialised.
    assert not re.search(r"C75(0[4-9]|1[0-58])", built.log), built.log


class Ptx:
    """A compiled variant and its PTX, of one compilation unless the cache has the variant."""

    def __init__(self, spec: KernelSpec) -> None:
        self.spec = spec
        self._kept: str | None = None
        fetch = nvrtc._fetch

        def keep(compiler: Any, program: Any, what: str) -> bytes:
            if what == "CUBIN":
                self._kept = fetch(compiler, program, "PTX").decode()
            return fetch(compiler, program, what)

        with mock.patch.object(nvrtc, "_fetch", keep):
            self.built = jit.build(spec)

    def moves(self) -> list[tuple[str, int]]:
        """The setmaxnreg in it: inc or dec, and to how many registers."""
        if self._kept is None:
            options = [
                option
                for option in nvrtc.compiler_options(self.spec)
                if not option.startswith(("-arch", "--ptxas"))
            ]
            sources = collect(find_source_root(), self.spec.name, self.spec.headers)
            self._kept = _ptx(sources, options)
        found = re.findall(r"setmaxnreg\.(inc|dec)\.sync\.aligned\.u32 (\d+);", self._kept)
        return [(kind, int(count)) for kind, count in found]


def assemble(text: str) -> str:
    """The PTX of a source that includes project headers. Raises AssertionError unless ptxas takes it without
    spills and without a warning.
    """
    sources = SourceSet("probe.cu", text.encode(), headers())
    options = ("-arch=sm_90a", "-std=c++20", "--ptxas-options=-v")
    result = nvrtc.compile_source(sources, options)
    assert result.status == "NVRTC_SUCCESS", result.log
    assert "warning" not in result.log.lower(), result.log
    assert all(found == "0" for found in re.findall(r"(\d+) bytes spill", result.log)), result.log
    return _ptx(sources, ["-std=c++20"])


def _ptx(sources: SourceSet, options: list[str]) -> str:
    nvrtc.version()
    compiler = nvrtc._bindings()
    program = nvrtc._create(compiler, sources.main, sources.main_name, sources.headers)
    try:
        options = [*options, "-arch=compute_90a"]
        (status,) = compiler.nvrtcCompileProgram(
            program, len(options), [option.encode() for option in options]
        )
        nvrtc._check(compiler, status, "nvrtcCompileProgram")
        return nvrtc._fetch(compiler, program, "PTX").decode()
    finally:
        compiler.nvrtcDestroyProgram(program)


def _asserts(conditions: Iterable[str]) -> str:
    return "".join(f"\nstatic_assert({condition});" for condition in conditions) + "\n"


def _compile(sources: SourceSet, options: tuple[str, ...]) -> None:
    result = nvrtc.compile_source(sources, options)
    assert result.status == "NVRTC_SUCCESS", result.log
