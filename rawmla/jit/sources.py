"""Kernel sources: where they are, and which files one kernel is made of.

The compiler is given the text of every header in memory and has no include path. What was hashed is therefore
exactly what is compiled.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rawmla.errors import RawMLAError

_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*["<]([^">\r\n]+)[">]', re.MULTILINE)


def find_source_root() -> Path:
    """Folder ``cuda_src``: inside the package when installed from a wheel, else beside it (checkout)."""
    package = Path(__file__).resolve().parents[1]
    candidates = (package / "cuda_src", package.parent / "cuda_src")
    for candidate in candidates:
        if (candidate / "kernels").is_dir():
            return candidate
    raise RawMLAError(
        "the CUDA sources of rawmla were not found, the installation is incomplete: looked for a folder "
        f"'kernels' in {' and '.join(str(c) for c in candidates)}. Install rawmla again."
    )


@dataclass(frozen=True)
class SourceSet:
    """The main file of a kernel, every project header it reaches, and its generated headers.

    Names are POSIX paths relative to the source root, as they stand in the ``#include`` lines.
    """

    main_name: str
    main: bytes
    headers: tuple[tuple[str, bytes], ...]

    def digest(self) -> str:
        """SHA-256 over the names, lengths and contents of all files."""
        total = hashlib.sha256()
        for name, data in ((self.main_name, self.main), *self.headers):
            total.update(f"{name}\0{len(data)}\0".encode())
            total.update(data)
        return total.hexdigest()

    def write_to(self, folder: Path) -> Path:
        """Write all files below ``folder`` and return the path of the main one."""
        for name, data in ((self.main_name, self.main), *self.headers):
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        return folder / self.main_name


def collect(root: Path, kernel: str, generated: Sequence[tuple[str, str]] = ()) -> SourceSet:
    """Read ``root/kernels/<kernel>.cu`` and all headers that it or a generated header includes.

    Include lines are relative to ``root``, whichever file they stand in. All include lines count, also those
    in comments or inactive ``#if`` branches. One that names no file below ``root`` is left to the compiler,
    which reports it with file and line if it is active. An absolute path is refused: the compiler would read
    that file, and nobody would notice when it changes. ``generated`` has the names and texts of headers that
    are no files.

    Raises `RawMLAError` if there is no such kernel, and `ValueError` if a generated header has the name of a
    file below ``root`` or includes what a macro names, or if an include line has an absolute path.
    """
    main_name = f"kernels/{kernel}.cu"
    try:
        main = (root / main_name).read_bytes()
    except OSError as error:
        raise RawMLAError(
            f"kernel {kernel!r} has no source file {root / main_name} ({error.strerror})"
        ) from None
    headers: dict[str, bytes] = {}
    for name, text in generated:
        if (root / name).exists():
            raise ValueError(f"headers: expected a name that no file of the sources has, got {name!r}")
        headers[name] = text.encode()
    pending = [(main_name, main), *[(name, _directives(name, text).encode()) for name, text in generated]]
    while pending:
        including, text_of = pending.pop()
        for match in _INCLUDE.finditer(text_of):
            name = match.group(1).decode("utf-8", "replace")
            if name.startswith("/"):
                raise ValueError(f"{including}: expected includes relative to the sources, got {name!r}")
            if name in headers or ".." in Path(name).parts:
                continue
            try:
                data = (root / name).read_bytes()
            except OSError:
                continue
            headers[name] = data
            pending.append((name, data))
    return SourceSet(main_name, main, tuple(sorted(headers.items())))


_LITERALS_AND_COMMENTS = re.compile(
    r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|(?P<comment>/\*.*?\*/|//[^\n]*)', re.DOTALL
)
_READS_A_FILE = re.compile(r"^[ \t]*#[ \t]*(include|include_next|import|embed)\b(.*)$", re.MULTILINE)
_LITERAL_NAME = re.compile(r'\s*(?:"[^"]+"|<[^>]+>)\s*')


def _directives(name: str, text: str) -> str:
    """A generated header as the compiler sees its include lines: without continued lines and comments.

    Raises ValueError for a directive that reads a file of which `collect` cannot tell the name.
    """
    plain = re.sub(r"\\\r?\n", "", text)
    plain = re.sub(r"^([ \t]*)%:", r"\1#", plain, flags=re.MULTILINE)  # another spelling of #
    plain = _LITERALS_AND_COMMENTS.sub(lambda found: " " if found["comment"] else found[0], plain)
    for found in _READS_A_FILE.finditer(plain):
        if found[1] != "include" or not _LITERAL_NAME.fullmatch(found[2]):
            raise ValueError(
                f"{name}: expected an #include that names its file, so that the file is part of the kernel's "
                f"key, got {found[0].strip()!r}"
            )
    return plain
