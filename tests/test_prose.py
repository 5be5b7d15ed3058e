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


@pytest.mark.parametrize("folder", FOLDERS)
def test_words(folder: str) -> None:
    """Looks at comments and strings."""
    found = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
            if token.type in (tokenize.COMMENT, tokenize.STRING):
                words = WORDS.findall(re.sub(r"\s+", " ", token.string))
                place = f"{path.relative_to(ROOT)}:{token.start[0]}"
                found += [f"{place}: {word!r}, better: {BETTER[word.lower()]}" for word in words]
    assert not found, "\n".join(found)
