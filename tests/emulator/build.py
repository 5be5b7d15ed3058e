"""Compiles kernels for the emulated machine with g++, once for each variant and folder."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

from filelock import FileLock

from rawmla.jit import KernelSpec, sources
from rawmla.jit.sources import SourceSet

from .text import rewritten

CUDA = Path(__file__).parent / "cuda"
_MACHINE = ("machine.cpp", "barriers.cpp", "wgmma.cpp", "copies.cpp", "clusters.cpp")
_HEADERS = ("machine.h", "state.h", "kernel_text.h")
# No trap of strict aliasing or of contracted multiply-adds that nvcc does not have in the same places.
_FLAGS = ("-std=c++20", "-march=native", "-fPIC", "-shared", "-fno-strict-aliasing", "-ffp-contract=off")
_LEAST_GCC = 12  # _Float16


class BuildError(Exception):
    """g++ refused a kernel; the text has its messages."""


@cache
def missing_reason() -> str | None:
    """Why nothing can be emulated here, or None."""
    if platform.machine() != "x86_64":
        return f"the emulator needs an x86-64 CPU, not {platform.machine()}"
    if shutil.which("g++") is None:
        return "g++ is not on the PATH"
    version = subprocess.run(["g++", "-dumpversion"], capture_output=True, text=True).stdout.strip()
    if int(version.partition(".")[0]) < _LEAST_GCC:
        return f"the emulator needs g++ {_LEAST_GCC}, found {version}"
    return None


def build_kernel(spec: KernelSpec, folder: Path, root: Path | None = None) -> ctypes.CDLL:
    """The library of a variant, which is compiled unless `folder` has it.

    Parameters
    ----------
    root : Path, optional
        Folder of the CUDA sources; None: rawmla's.
    """
    files = rewritten(sources.collect(root or sources.find_source_root(), spec.name, spec.headers))
    files["entry.cpp"] = f'#include "kernel_text.h"\n#include "kernels/{spec.name}.cu"\n{entry_of(spec.name)}'
    return _build_on(spec.name, files, "entry.cpp", folder, dict(spec.macros))


def entry_of(kernel: str) -> str:
    """The functions by which `Emulator.run` calls a kernel; its parameter struct is passed by value."""
    return f"""template <class Params>
int bytes_of(void (*)(Params)) {{
    return sizeof(Params);
}}
template <class Params>
void call(void (*kernel)(Params), const void* params) {{
    kernel(*static_cast<const Params*>(params));
}}
extern "C" int emulator_param_bytes() {{ return bytes_of({kernel}); }}
extern "C" void emulator_entry(const void* params) {{ call({kernel}, params); }}
"""


def build_text(name: str, text: str, folder: Path, **macros: int) -> ctypes.CDLL:
    """Build the library of a C++ text that includes headers of rawmla.

    Functions that run outside of a launch may set `emulator::thread_index`, and cannot wait. With `entry_of`
    in the text, a kernel in it can be launched.
    """
    root, headers = sources.find_source_root(), {}
    pending = [text]
    while pending:
        for header in re.findall(r'^#include "(.+)"', pending.pop(), re.MULTILINE):
            if header not in headers and (root / header).exists():
                headers[header] = (root / header).read_bytes()
                pending.append(headers[header].decode())
    files = rewritten(SourceSet("main.cpp", text.encode(), tuple(sorted(headers.items()))))
    files["main.cpp"] = f'#include "kernel_text.h"\n{files["main.cpp"]}'
    return _build_on(name, files, "main.cpp", folder, macros)


def _build_on(
    name: str, files: dict[str, str], main: str, folder: Path, macros: dict[str, int]
) -> ctypes.CDLL:
    defines = [f"-D{key}={value}" for key, value in macros.items()]
    # CUDA's int and float overloads, unused variables and the like are nvcc's to judge. The machine brings
    # the libraries: to look through them takes the linker longer than all the rest.
    flags = ["-O0", "-w", "-nostdlib", "-fno-exceptions", *defines, "-I", str(CUDA)]
    flags += [str(build_machine(folder)), f"-Wl,-rpath,{folder.resolve()}"]
    return ctypes.CDLL(str(build_library(name, files, [main], flags, folder)))


def build_machine(folder: Path) -> Path:
    """The library of the machine itself."""
    files = {name: (CUDA / name).read_text() for name in (*_MACHINE, *_HEADERS)}
    files["all.cpp"] = "".join(f'#include "{name}"\n' for name in _MACHINE)  # their headers take longest
    return build_library("machine", files, ["all.cpp"], ["-O3"], folder)


def build_library(
    name: str, files: dict[str, str], compiled: list[str], flags: list[str], folder: Path
) -> Path:
    """The library that g++ makes of some files; processes that want the same wait for the first."""
    headers = [(CUDA / header).read_text() for header in _HEADERS]
    text = repr((sorted(files.items()), headers, _FLAGS, flags))
    key = f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    library = folder / f"lib{key}.so"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / f"{key}.lock"):
        if library.exists():
            return library
        source = folder / key
        for file, content in files.items():
            (source / file).parent.mkdir(parents=True, exist_ok=True)
            (source / file).write_text(content)
        aside = library.with_suffix(".tmp")
        mains = [str(source / file) for file in compiled]
        command = ["g++", *_FLAGS, "-I", str(source), *mains, *flags, "-o", str(aside)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise BuildError(f"{name}: g++ failed\n{done.stderr[:8000]}")
        os.replace(aside, library)
    return library
