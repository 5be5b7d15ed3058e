"""The README's examples and commands are what they claim to be."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import rawmla
from rawmla.testing.gpu import missing_hopper_reason

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def block_after(marker: str) -> str:
    """The fenced block that follows an HTML comment."""
    found = re.search(rf"<!-- {re.escape(marker)} -->\n```\w+\n(.*?)```", README, re.DOTALL)
    assert found, f"README.md has no block marked {marker!r}"
    return found.group(1)


def example() -> str:
    return block_after("example")


def test_example_compiles_and_is_short() -> None:
    compile(example(), "README.md", "exec")
    assert len([line for line in example().splitlines() if line.strip()]) <= 15


FURTHER = ("sparse example", "prefill example", "dense attention example", "flex example")


@pytest.mark.parametrize("marker", FURTHER)
def test_further_examples_compile_and_are_short(marker: str) -> None:
    text = block_after(marker)
    compile(text, "README.md", "exec")
    assert len([line for line in text.splitlines() if line.strip()]) <= 15


def test_every_python_block_is_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert blocks == [example(), *map(block_after, FURTHER)]


def test_example_without_a_gpu() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(rawmla.NoGPUError):
        exec(compile(example(), "README.md", "exec"), {})


def test_examples_on_the_reference() -> None:
    """As the README says they run without a GPU: all but the one of flex attention."""
    torch = pytest.importorskip("torch")
    text = "".join(map(block_after, ("example", *FURTHER[:-1])))
    warm = next(line for line in text.splitlines(keepends=True) if line.startswith("rawmla.warmup()"))
    for old, new in (
        (warm, ""),
        ("import rawmla\n", "from rawmla import reference as rawmla\n"),
        ('device="cuda"', 'device="cpu"'),
    ):
        assert old in text
        text = text.replace(old, new)
    names: dict[str, Any] = {}
    exec(compile(text, "README.md", "exec"), names)
    for name in ("sparse_out", "prefill_out", "dense_out"):
        assert bool(torch.isfinite(torch.as_tensor(names[name])).all()), name
    assert tuple(names["out"].shape) == (4, 1, 128, 512) and not bool(names["out"][3].any())


def test_example_on_the_gpu() -> None:
    reason = missing_hopper_reason()
    if reason is not None:
        pytest.skip(reason)
    torch = pytest.importorskip("torch")
    names: dict[str, object] = {}
    exec(compile(example(), "README.md", "exec"), names)
    out, lse = names["out"], names["lse"]
    assert tuple(out.shape) == (4, 1, 128, 512)  # type: ignore[attr-defined]
    assert tuple(lse.shape) == (4, 128, 1)  # type: ignore[attr-defined]
    assert bool(torch.isfinite(out).all())
    assert bool((out[3] == 0).all()) and bool(torch.isposinf(lse[3]).all())  # type: ignore[index]
    exec(compile(block_after("sparse example"), "README.md", "exec"), names)
    out, lse = names["sparse_out"], names["sparse_lse"]
    assert tuple(out.shape) == (4, 1, 128, 512)  # type: ignore[attr-defined]
    assert tuple(lse.shape) == (4, 128, 1)  # type: ignore[attr-defined]
    assert bool(torch.isfinite(out).all()) and bool(torch.isfinite(lse).all())
    exec(compile(block_after("prefill example"), "README.md", "exec"), names)
    out, max_logits, lse = (names[name] for name in ("prefill_out", "max_logits", "prefill_lse"))
    assert tuple(out.shape) == (256, 128, 512)  # type: ignore[attr-defined]
    assert tuple(max_logits.shape) == tuple(lse.shape) == (256, 128)  # type: ignore[attr-defined]
    assert bool(torch.isfinite(out).all()) and bool((max_logits <= lse).all())  # type: ignore[operator]
    exec(compile(block_after("dense attention example"), "README.md", "exec"), names)
    out, lse = names["dense_out"], names["dense_lse"]
    assert tuple(out.shape) == (2, 1000, 16, 128)  # type: ignore[attr-defined]
    assert tuple(lse.shape) == (2, 16, 1000)  # type: ignore[attr-defined]
    assert bool(torch.isfinite(out).all()) and bool(torch.isfinite(lse).all())


def test_flex_example_on_the_gpu() -> None:
    """Each of its functions, against attention with all scores in memory."""
    reason = missing_hopper_reason()
    if reason is not None:
        pytest.skip(reason)
    torch = pytest.importorskip("torch")
    names: dict[str, Any] = {"torch": torch, "rawmla": rawmla}
    exec(compile(block_after("flex example"), "README.md", "exec"), names)
    q, k, v = (names[name].double() for name in ("q", "k", "v"))
    at = torch.meshgrid(*[torch.arange(n, device="cuda") for n in (2, 16, 1000, 1000)], indexing="ij")

    def check(out: Any, score: Any = None, mask: Any = None) -> None:
        scores = q @ k.mT * 128**-0.5
        scores = scores if score is None else score(scores, *at)
        scores = scores if mask is None else scores.masked_fill(~mask(*at), -torch.inf)
        want = scores.softmax(-1) @ v
        assert float((torch.from_dlpack(out) - want).norm() / want.norm()) < 2.0**-9

    check(names["flex_out"], names["alibi"], names["prefix_lm"])
    check(names["cupy_out"], names["alibi"])
    given = names["q"], names["k"], names["v"]
    for name in ("softcap", "relative"):
        check(rawmla.flex_attention(*given, names[name]), names[name])
    for name in ("documents", "sliding", "dilated"):
        mask = rawmla.create_block_mask(names[name], None, None, 1000, 1000)
        check(rawmla.flex_attention(*given, block_mask=mask), mask=names[name])


def test_commands_are_one_line_each() -> None:
    for marker in ("command: bench", "command: test"):
        assert len(block_after(marker).strip().splitlines()) == 1
    assert shlex.split(block_after("command: bench")) == ["bash", "scripts/bench.sh"]
    assert shlex.split(block_after("command: test")) == ["bash", "scripts/test.sh"]


def test_ci_runs_the_readmes_test_command() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert "<!-- command: test -->" in script
