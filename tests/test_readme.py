"""The examples of README and docs/examples.md, and README's commands, are what they claim to be."""

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
LONGER = (ROOT / "docs" / "examples.md").read_text()
BLOCKS = dict(re.findall(r"<!-- ([\w :]+) -->\n```\w+\n(.*?)```", README + LONGER, re.DOTALL))
"""The fenced blocks that follow an HTML comment. Blocks of docs/examples.md continue README's first block."""
EXAMPLES = {marker: text for marker, text in BLOCKS.items() if marker.endswith("example")}


def test_the_line_to_change_is_where_the_page_says() -> None:
    found = re.search(r"Now change `(.+?)` in `(.+?)` to", README)
    assert found
    text, path = found.groups()
    assert (ROOT / path).read_text().count(text) == 1


def test_every_python_block_is_run_and_short() -> None:
    found = re.findall(r"```python\n(.*?)```", README + LONGER, re.DOTALL)
    assert found == list(EXAMPLES.values())
    assert all(len([line for line in text.splitlines() if line.strip()]) <= 15 for text in found)


def test_examples_on_the_reference() -> None:
    """Shapes are as the comments say; results are finite, but for the request without tokens."""
    torch = pytest.importorskip("torch")
    text = "".join(sorted(EXAMPLES.values(), key=lambda text: "flex_out" in text))  # which replaces q
    for old, new in (
        ("rawmla.warmup()\n", ""),
        ("import torch, rawmla\n", "import torch\nfrom rawmla import reference as rawmla\n"),
        ('device="cuda"', 'device="cpu"'),
        ("(256, 128, 576", "(16, 128, 576"),  # a sixteenth of the prefill's tokens
        ("(256, 1, 2048)", "(16, 1, 2048)"),
        ("(2, 1000, 16, 128,", "(2, 200, 16, 128,"),  # a fifth of the tokens of dense attention
        ("(2, 2, 1000, 4, 128,", "(2, 2, 200, 4, 128,"),
        ("(3, 2, 16, 1000, 128,", "(3, 2, 16, 40, 128,"),  # a 25th of the tokens of flex attention
        (", 1000, 1000)", ", 40, 40)"),
    ):
        assert old in text
        text = text.replace(old, new)
    names: dict[str, Any] = {}
    exec(compile(text, "README.md", "exec"), names)
    shapes = {
        "out": (4, 1, 128, 512),
        "lse": (4, 128, 1),
        "sparse_out": (4, 1, 128, 512),
        "sparse_lse": (4, 128, 1),
        "prefill_out": (16, 128, 512),
        "max_logits": (16, 128),
        "prefill_lse": (16, 128),
        "dense_out": (2, 200, 16, 128),
        "dense_lse": (2, 16, 200),
        "flex_out": (2, 16, 40, 128),
    }
    for name, shape in shapes.items():
        result = names[name]
        assert tuple(result.shape) == shape, name
        kind = "float16" if name == "flex_out" else "bfloat16" if name.endswith("out") else "float32"
        assert result.dtype == getattr(torch, kind), name
        assert name == "lse" or bool(torch.isfinite(result).all()), name
    out, lse = names["out"], names["lse"]
    assert bool(out[:3].any()) and not bool(out[3].any())
    assert bool(torch.isfinite(lse[:3]).all()) and bool(torch.isposinf(lse[3]).all())
    assert torch.equal(names["split_out"], out) and torch.equal(names["split_lse"], lse)
    assert bool((names["max_logits"] <= names["prefill_lse"]).all())


def test_commands() -> None:
    """A line each; the check without a GPU runs the one of the tests."""
    for name in ("bench", "test"):
        assert BLOCKS[f"command: {name}"] == f"bash scripts/{name}.sh\n"
    script = (ROOT / ".ci" / "run").read_text()
    assert "<!-- command: $1 -->" in script and "readme_command test\n" in script
