"""The examples and the README's Python blocks run on the GPU, each in a fresh process."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from full_cases import full_unless

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "examples").glob("*.py"))
# Heads decide which kernels run: the other kind than that of the program's default.
OTHER_HEADS = ["examples/deepseek_v3_transformers.py --heads 128", "examples/serve_step.py --heads 16"]
SLOW = ("any_transformers", "deepseek", "flex", "serve_step", "sparse_decode", "train")


def is_quick(example: str) -> bool:
    """Choose those that need few kernels."""
    return not any(name in example for name in SLOW)


def run(*arguments: str) -> None:
    """Run Python, which has to end well."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    result = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"


@pytest.mark.parametrize("example", full_unless(is_quick, [*EXAMPLES, *OTHER_HEADS]))
def test_example(example: str) -> None:
    if "transformers" in example:
        pytest.importorskip("transformers", "5.24" if "any_" in example else "5.17")
    run(*example.split())


def test_readme_and_longer_examples() -> None:
    """The Python blocks run one after the other, as a reader would paste them; results are finite. The blocks
    of docs/examples.md continue README's first block.
    """
    readme, longer = (
        re.findall(r"^```python\n(.*?)^```", (ROOT / name).read_text(), re.DOTALL | re.MULTILINE)
        for name in ("README.md", "docs/examples.md")
    )
    assert readme and longer
    check = (
        "import torch\n"
        "torch.cuda.synchronize()\n"
        "found = {n: x for n, x in list(globals().items()) if n.rpartition('_')[2] == 'out'}\n"
        "assert found and all(bool(torch.from_dlpack(x).isfinite().all()) for x in found.values()), found\n"
    )
    for blocks in (readme, [readme[0], *longer]):
        run("-c", "\n".join([*blocks, check]))
