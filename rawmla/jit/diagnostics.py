"""Finds the errors in generated headers in a program log, and shows the lines that they are about."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

_ERROR = re.compile(r"(?P<file>[^\s(]+)\((?P<line>\d+)\): (?P<text>(?:catastrophic )?error\b.*)")
_CARET = re.compile(r"\s*\^\s*")
_INDENT = 2  # columns that NVRTC puts before a source line and its caret
_CONTEXT = 2  # lines shown before and after the wrong one


def split_log(log: str, headers: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """The errors in ``headers``, with numbered source lines and a caret, and the rest of the log as it is."""
    texts = {name: text.rstrip("\n").split("\n") for name, text in headers}
    shown: list[str] = []
    rest: list[str] = []
    for paragraph in log.split("\n\n"):
        # An error is the message, the source line, the caret, and sometimes how the compiler got there.
        block = paragraph.split("\n")
        error = _ERROR.fullmatch(block[0])
        if error is None or error["file"] not in texts:
            rest.append(paragraph)
            continue
        shown.append(f"{error['file']}, line {error['line']}: {error['text']}")
        caret = next((at for at, line in enumerate(block) if _CARET.fullmatch(line)), 0)
        mark = block[caret][_INDENT:] if caret else None
        shown += _numbered(texts[error["file"]], int(error["line"]), mark)
        shown += block[caret + 1 :]
    return "\n".join(shown), "\n\n".join(rest)


def _numbered(lines: Sequence[str], wrong: int, mark: str | None) -> Iterator[str]:
    """Lines around number ``wrong``, which starts at 1, with ``mark`` below that one."""
    first, last = max(1, wrong - _CONTEXT), min(len(lines), wrong + _CONTEXT)
    width = len(str(last))
    for number in range(first, last + 1):
        yield f"  {'>' if number == wrong else ' '} {number:{width}} | {lines[number - 1]}"
        if number == wrong and mark is not None:
            yield f"    {'':{width}} | {mark}"
