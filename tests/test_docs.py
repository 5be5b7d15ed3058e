"""What README and docs name exists: paths, links, functions, command-line options, environment variables."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
MADE_ON_THE_GPU_MACHINE = {"docs/gpu-record.json", "docs/roofline.png"}
OTHER_PROGRAMS_OPTIONS = {"--quiet", "--editable"}
TOP_LEVEL = ("cuda_src", "docs", "rawmla", "scripts", "tests")

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


def code_spans(text: str) -> list[str]:
    """Inline code of a page; fenced blocks are left out."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


@pages
def test_paths_exist(page: Path) -> None:
    text = page.read_text()
    pattern = rf"(?<![\w/.-])((?:{'|'.join(TOP_LEVEL)})/[\w./-]*[\w/])"
    for name in set(re.findall(pattern, " ".join(code_spans(text)))):
        assert name in MADE_ON_THE_GPU_MACHINE or (ROOT / name).exists(), f"{page.name} names {name}"


@pages
def test_links_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        if not re.match(r"[a-z]+://", target):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pages
def test_names_exist(page: Path) -> None:
    for span in code_spans(page.read_text()):
        for name in re.findall(r"(?<![\w./-])rawmla(?:\.[A-Za-z_]\w*)+", span):
            resolve(name)


def resolve(dotted: str) -> object:
    """The object of a dotted name that starts with a module."""
    parts = dotted.split(".")
    value: object = importlib.import_module(parts[0])
    for i, part in enumerate(parts[1:], start=2):
        try:
            value = getattr(value, part)
        except AttributeError:
            value = importlib.import_module(".".join(parts[:i]))
    return value


def help_text(*command: str) -> str:
    answer = subprocess.run(
        [sys.executable, *command, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def test_options_exist() -> None:
    programs = [["-m", "rawmla", "info"], ["-m", "rawmla", "compile"]]
    programs += [[f"scripts/{name}.py"] for name in ("bench", "gpu_check", "update_figures")]
    known = {option for command in programs for option in re.findall(r"--[a-z][a-z-]*", help_text(*command))}
    for page in (ROOT / "README.md", ROOT / "docs" / "benchmark.md"):
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z](?!\w)", page.read_text()))
        assert named - known - OTHER_PROGRAMS_OPTIONS == set(), page.name


def test_every_public_name_is_in_the_api_table() -> None:
    import rawmla

    readme = (ROOT / "README.md").read_text()
    for name in rawmla.__all__:
        assert name == "__version__" or f"`rawmla.{name}`" in readme


def test_environment_variables() -> None:
    table = set(re.findall(r"^\| `(RAWMLA_[A-Z_]+)` \|", (ROOT / "README.md").read_text(), re.MULTILINE))
    used = {
        name
        for path in (ROOT / "rawmla").rglob("*.py")
        for name in re.findall(r"RAWMLA_[A-Z][A-Z_]*[A-Z]", path.read_text())
    }
    assert used == table


def test_public_functions_have_docstrings() -> None:
    import rawmla

    for name in rawmla.__all__:
        if name != "__version__":
            assert getattr(rawmla, name).__doc__, name
