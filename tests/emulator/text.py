"""The text of a kernel as g++ can compile it: PTX replaced, shared memory taken from the emulated machine."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from rawmla.jit.sources import SourceSet

INSTEAD = Path(__file__).parent / "cuda" / "instead"
"""Files by the names of sources: whole ones for headers of ptx/, else functions that replace some of them."""

_THREAD = re.compile(r'asm volatile\("mov\.u32 %0, %%tid\.x;" : "=r"\((\w+)\)\);')
_DYNAMIC = re.compile(r"extern __shared__ (?:__align__\(\d+\) )?unsigned char (\w+)\[\];")
_STATIC = re.compile(r"__shared__ ([\w:]+) (\w+)((?:\[[^]]+\])*);")
_FUNCTION = re.compile(
    r"^(?:template <[^{}]*?>\n)?__device__ __forceinline__ [^;{}]*?(\w+)\([^;{}]*\) \{", re.MULTILINE
)
_OPAQUE = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*')
_PTX = re.compile(r'\basm\b(?! volatile\("" :)')  # what has no instruction is left as it is


def rewritten(sources: SourceSet) -> dict[str, str]:
    """The files that a kernel is compiled from, by name."""
    files = {}
    for name, data in ((sources.main_name, sources.main), *sources.headers):
        if name.startswith("ptx/"):
            files[name] = (INSTEAD / name).read_text()
        else:
            files[name] = _rewritten(name, data.decode())
    return files


@cache
def _rewritten(name: str, text: str) -> str:
    text = _DYNAMIC.sub(r"unsigned char* const \1 = emulator::dynamic_shared();", _without_ptx(name, text))
    return _STATIC.sub(
        r"typedef \1 \2_type\3; "
        r"\2_type& \2 = *static_cast<\2_type*>(emulator::static_shared(__LINE__, sizeof(\2_type)));",
        text,
    )


def _without_ptx(name: str, text: str) -> str:
    """A source with the functions of `INSTEAD` where it has PTX.

    Raises NotImplementedError if there are none for it.
    """
    text = _THREAD.sub(r"\1 = threadIdx.x;", text)
    if not _PTX.search(text):
        return text
    plain = _OPAQUE.sub(lambda found: " " * len(found[0]), text)  # for braces
    cut: list[tuple[int, int, str]] = []  # where functions with PTX begin and end, and their names
    for found in _FUNCTION.finditer(plain):
        end = _end_of_block(plain, found.end())
        if _PTX.search(text, found.end(), end):
            cut.append((found.start(), end, found[1]))
    if cut and not (INSTEAD / name).exists():
        lost = ", ".join(function for _, _, function in cut)
        raise NotImplementedError(f"{name}: nothing stands in place of the PTX of {lost}")
    for i, (start, end, _) in reversed(list(enumerate(cut))):
        text = text[:start] + ((INSTEAD / name).read_text() if i == 0 else "") + text[end:]
    return text


def _end_of_block(plain: str, at: int) -> int:
    depth = 1
    while depth:
        depth += {"{": 1, "}": -1}.get(plain[at], 0)
        at += 1
    return at
