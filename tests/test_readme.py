"""The examples of README and docs/examples.md, and README's commands, are what they claim to be."""

import re
from pathlib import Path
from typing import Any

import pytest

import rawmla
from kit.gpu import missing_hopper_reason

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
LONGER = (ROOT / "docs" / "examples.md").read_text()
FURTHER = ("decode example", "sparse example", "prefill example", "dense attention example")
"""The blocks of docs/examples.md, which continue README's first one."""


def block_after(marker: str, page: str = README) -> str:
    """The fenced block that follows an HTML comment."""
    found = re.search(rf"<!-- {re.escape(marker)} -->\n```\w+\n(.*?)```", page, re.DOTALL)
    assert found, f"the page has no block marked {marker!r}"
    return found.group(1)


def blocks() -> dict[str, str]:
    """Return README's blocks in the order of the page, then the blocks of docs/examples.md."""
    here = {marker: block_after(marker) for marker in ("example", "flex example")}
    return here | {marker: block_after(marker, LONGER) for marker in FURTHER}


def test_the_line_to_change_is_where_the_page_says() -> None:
    found = re.search(r"Now change `(.+?)` in `(.+?)` to", README)
    assert found
    text, path = found.groups()
    assert (ROOT / path).read_text().count(text) == 1


@pytest.mark.parametrize("marker", blocks())
def test_examples_compile_and_are_short(marker: str) -> None:
    text = blocks()[marker]
    compile(text, "README.md", "exec")
    assert len([line for line in text.splitlines() if line.strip()]) <= 15


def test_every_python_block_is_run() -> None:
    found = re.findall(r"```python\n(.*?)```", README + LONGER, re.DOTALL)
    assert found == list(blocks().values())


def test_examples_on_the_reference() -> None:
    """The examples run without a GPU as docs/examples.md says, except the one of flex attention.

    Shapes are as the comments say; results are finite, but for the request without tokens.
    """
    torch = pytest.importorskip("torch")
    text = block_after("example") + "".join(block_after(marker, LONGER) for marker in FURTHER)
    for old, new in (
        ("rawmla.warmup()\n", ""),
        ("import torch, rawmla\n", "import torch\nfrom rawmla import reference as rawmla\n"),
        ('device="cuda"', 'device="cpu"'),
        ("(256, 128, 576", "(16, 128, 576"),  # a sixteenth of the prefill's tokens
        ("(256, 1, 2048)", "(16, 1, 2048)"),
        ("(2, 1000, 16, 128,", "(2, 200, 16, 128,"),  # a fifth of the tokens of dense attention
        ("(2, 2, 1000, 4, 128,", "(2, 2, 200, 4, 128,"),
    ):
        assert old in text
        text = text.replace(old, new)
    names: dict[str, Any] = {}
    exec(compile(text, "README.md", "exec"), names)
    tokens, dense_tokens = names["queries"].shape[0], names["q"].shape[1]
    shapes = {
        "out": (4, 1, 128, 512),
        "lse": (4, 128, 1),
        "sparse_out": (4, 1, 128, 512),
        "sparse_lse": (4, 128, 1),
        "prefill_out": (tokens, 128, 512),
        "max_logits": (tokens, 128),
        "prefill_lse": (tokens, 128),
        "dense_out": (2, dense_tokens, 16, 128),
        "dense_lse": (2, 16, dense_tokens),
    }
    for name, shape in shapes.items():
        result = names[name]
        assert tuple(result.shape) == shape, name
        assert result.dtype == (torch.bfloat16 if name.endswith("out") else torch.float32), name
        assert name == "lse" or bool(torch.isfinite(result).all()), name
    out, lse = names["out"], names["lse"]
    assert bool(out[:3].any()) and not bool(out[3].any())
    assert bool(torch.isfinite(lse[:3]).all()) and bool(torch.isposinf(lse[3]).all())
    assert torch.equal(names["split_out"], out) and torch.equal(names["split_lse"], lse)
    assert bool((names["max_logits"] <= names["prefill_lse"]).all())


def test_flex_example_on_the_gpu() -> None:
    """Against attention with all scores in memory."""
    reason = missing_hopper_reason()
    if reason is not None:
        pytest.skip(reason)
    torch = pytest.importorskip("torch")
    names: dict[str, Any] = {"torch": torch, "rawmla": rawmla}
    exec(compile(block_after("flex example"), "README.md", "exec"), names)
    q, k, v = (names[name].double() for name in ("q", "k", "v"))
    at = torch.meshgrid(*[torch.arange(n, device="cuda") for n in (2, 16, 1000, 1000)], indexing="ij")
    scores = names["alibi"](q @ k.mT * 128**-0.5, *at).masked_fill(~names["sliding"](*at), -torch.inf)
    want = scores.softmax(-1) @ v
    assert float((names["flex_out"] - want).norm() / want.norm()) < 2.0**-9


def test_commands() -> None:
    """A line each; the check without a GPU runs the one of the tests."""
    for name in ("bench", "test"):
        assert block_after(f"command: {name}") == f"bash scripts/{name}.sh\n"
    script = (ROOT / ".ci" / "run").read_text()
    assert "<!-- command: $1 -->" in script and "readme_command test\n" in script
