"""Finds the errors in generated headers in a program log, and shows the lines that they are about."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

__all__ = ["split_log"]

_ERROR = re.compile(r"(?P<file>[^\s(]+)\((?P<line>\d+)\): (?P<text>(?:catastrophic )?error\b.*)")
_CARET = re.compile(r"\s*\^\s*")
_INDENT = 2  # columns that NVRTC puts before a source line and its caret
_CONTEXT = 2  # lines shown before and after the wrong one


def split_log(log: str, headers: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """The errors in ``headers``, with numbered source lines and a caret, and the rest of the log as it is."""
    texts = {name: text.rstrip("\n").split("\n") for name, text in headers}
    shown: list[str] = []
    rest: list[str] = []
    for block in _blocks(log):
        error = _ERROR.fullmatch(block[0]) if block else None
        if error is None or error["file"] not in texts:
            rest += [*block, ""]
            continue
        shown.append(f"{error['file']}, line {error['line']}: {error['text']}")
        # A block is the message, the source line, the caret, and sometimes how the compiler got there.
        caret = next((at for at, line in enumerate(block) if _CARET.fullmatch(line)), 0)
        mark = block[caret][_INDENT:] if caret else None
        shown += _numbered(texts[error["file"]], int(error["line"]), mark)
        shown += block[caret + 1 :]
    return "\n".join(shown), "\n".join(rest).rstrip()


def _blocks(log: str) -> Iterator[list[str]]:
    """The log in pieces: one error with the lines that belong to it, or what stands between empty lines."""
    block: list[str] = []
    for line in log.split("\n"):
        if not line or (block and _ERROR.fullmatch(line)):
            yield block
            block = []
        if line:
            block.append(line)
    yield block


def _numbered(lines: Sequence[str], wrong: int, mark: str | None) -> Iterator[str]:
    """Lines around number ``wrong``, which starts at 1, with ``mark`` below that one."""
    first, last = max(1, wrong - _CONTEXT), min(len(lines), wrong + _CONTEXT)
    width = len(str(last))
    for number in range(first, last + 1):
        yield f"  {'>' if number == wrong else ' '} {number:{width}} | {lines[number - 1]}"
        if number == wrong and mark is not None:
            yield f"    {'':{width}} | {mark}"
