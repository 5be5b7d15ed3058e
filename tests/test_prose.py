"""Words that make sentences hard to read, in the text of the folders that are rid of them."""

from __future__ import annotations

import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("rawmla", "examples", "tests/kit")
BETTER = {
    "that of": "repeat the noun",
    "those of": "repeat the noun",
    "so many": "the parameter's name, or 'the most'",
    "behind": "after",
    "told": "the argument or message",
    "asks": "the call",
    "lie": "the layout, order or address",
    "lies": "the layout, order or address",
}
WORDS = re.compile(rf"\b({'|'.join(BETTER)})\b", re.IGNORECASE)


def text_of(path: Path) -> list[tuple[int, str]]:
    """Comments and strings of a module, each with its line."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    return [(x.start[0], x.string) for x in tokens if x.type in (tokenize.COMMENT, tokenize.STRING)]


@pytest.mark.parametrize("folder", FOLDERS)
def test_words(folder: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {word!r}, better: {BETTER[word.lower()]}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, text in text_of(path)
        for word in WORDS.findall(re.sub(r"\s+", " ", text))
    ]
    assert not found, "\n".join(found)
