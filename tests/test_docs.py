"""What README and docs name exists: paths, links, functions, command-line options, environment variables."""

import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
API_PAGE = ROOT / "docs" / "api.md"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
KERNEL_PAGES = sorted((ROOT / "docs" / "kernels").glob("*.md"))
OTHER_PROGRAMS_OPTIONS = {"--quiet", "--editable", "--no-deps", "--dist", "--maxschedchunk"}
OWN_OPTIONS_OF_PYTEST = {"--full"}  # tests/conftest.py
ENGINES_OPTIONS = {"--attention-backend", "--model-path", "--page-size"}
ENGINES_OPTIONS |= {"--dsa-prefill-backend", "--dsa-decode-backend"}
NEED_TORCH = {"--sources"}  # of tests/contracts/record.py, which does not start without torch
FILES_OF_READERS = {"NAME.cu", "NAME.py", "script.py"}
CUDA_FOLDERS = ("common", "ptx", "layout", "mla", "mha", "flex", "kernels")  # as in docs/architecture.md
TOP_LEVEL = ("cuda_src", "docs", "examples", "rawmla", "scripts", "tests")
MAX_COLUMNS = {"README.md": 120, "CHANGELOG.md": 160}
MAX_README_LINES = 180
MAX_SENTENCE_WORDS = 25
MAX_WORDS = {"architecture.md": 1800, "benchmark.md": 1200, "torch_operators.md": 900, "flash_attn.md": 900}
MAX_WORDS |= {page.name: 1000 for page in KERNEL_PAGES}

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


def prose(text: str) -> list[str]:
    """Lines that are no table, code, comment or heading, and not what scripts write."""
    text = re.sub(r"<!-- figures: begin.*?figures: end -->", "", text, flags=re.DOTALL)
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    return [line for line in text.splitlines() if not line.startswith(("|", "    ", "<!--", "#"))]


@pages
def test_pages_and_lines_are_short(page: Path) -> None:
    if page.name.startswith("performance"):  # generated
        return
    assert len(page.read_text().split()) <= MAX_WORDS.get(page.name, 10_000)
    limit = MAX_COLUMNS.get(page.name, 100)
    assert [line for line in prose(page.read_text()) if len(line) > limit] == []


def test_the_readme_and_its_sentences_are_short() -> None:
    page = (ROOT / "README.md").read_text()
    assert len(page.splitlines()) <= MAX_README_LINES
    text = re.sub(r"\]\([^)]*\)", "]", "\n".join(prose(page)))
    for sentence in re.split(r"[.?!](?:\s|$)|\n\n|\n- ", text):
        assert len(sentence.split()) <= MAX_SENTENCE_WORDS, sentence


def test_kernel_pages_are_in_the_map_of_calls() -> None:
    linked = re.findall(r"\(kernels/([\w.]+)\)", (ROOT / "docs" / "architecture.md").read_text())
    assert {page.name for page in KERNEL_PAGES} == set(linked)


def test_the_map_of_calls_has_every_kernel() -> None:
    """Of each row, the host twins name its kernels."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = page.partition("## Which call runs which kernel")[2].partition("## ")[0]
    rows = [row.split("|") for row in table.splitlines() if ".cu`" in row]
    named = set()
    for _, _, twins, kernels, _ in rows:
        modules = [ROOT / "rawmla" / "kernels" / name for name in re.findall(r"\w+\.py", twins)]
        text = "".join(module.read_text() for module in modules)
        for kernel in re.findall(r"(\w+)\.cu", kernels):
            assert kernel in text, f"{twins} launches {kernel}.cu?"
            named.add(kernel)
    assert named == {path.stem for path in (ROOT / "cuda_src" / "kernels").glob("*.cu")}


def unfenced(page: Path) -> str:
    """The text of a page without fenced blocks."""
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)


def code_spans(page: Path) -> str:
    """Inline code of a page."""
    return " ".join(re.findall(r"`([^`\n]+)`", unfenced(page)))


@pages
def test_files_exist(page: Path) -> None:
    """Paths from the root of the tree, and source files that a page names without their folder."""
    spans = code_spans(page)
    for name in set(re.findall(rf"(?<![\w/.-])((?:{'|'.join(TOP_LEVEL)})/[\w./-]*[\w/])", spans)):
        assert (ROOT / name).exists(), f"{page.name} names {name}"
    known = {path.name for top in TOP_LEVEL for path in (ROOT / top).rglob("*") if path.is_file()}
    for name in re.findall(r"(?<![\w*./-])(?:\w+/)*(\w+\.(?:cuh|cu|py))(?![\w*])", spans):
        assert name in known | FILES_OF_READERS, f"{page.name} names {name}"


def test_cuda_folders_use_those_above_them() -> None:
    for i, folder in enumerate(CUDA_FOLDERS):
        allowed = {*CUDA_FOLDERS[: i + 1], "user"}  # generated: rawmla/flex/mods.py
        for path in (ROOT / "cuda_src" / folder).iterdir():
            used = set(re.findall(r'^#include "(\w+)/', path.read_text(), re.MULTILINE))
            assert used <= allowed, f"{path.name} of {folder} includes {used - allowed}"
    cuda_part = map_of_tree().split("cuda_src/ ")[1]
    assert re.findall(r"^  (\w+)/ ", cuda_part, re.MULTILINE) == list(CUDA_FOLDERS)


def map_of_tree() -> str:
    """The picture of the tree in docs/architecture.md."""
    return (ROOT / "docs" / "architecture.md").read_text().split("```")[1]


def test_the_map_of_the_tree_is_that_of_the_tree() -> None:
    """Of every folder of the package that the map opens, it names all modules and no others."""
    tree = re.sub(r"(?<=\.py) {3,}.*", "", map_of_tree().split("cuda_src/ ")[0])  # names alone
    drawn = {"": re.sub(r"^    .*\n", "", tree, flags=re.MULTILINE)}
    drawn |= dict(re.findall(r"^  (\w+)/ .*\n((?:    .*\n)*)", tree, re.MULTILINE))
    for folder, lines in drawn.items():
        names = set(re.findall(r"\w+\.py\b", lines))
        there = {path.name for path in (ROOT / "rawmla" / folder).glob("*.py")}
        expected = there - {"__init__.py" if folder else "__main__.py"}
        assert names == expected or (folder and not names), folder or "rawmla"


@pages
def test_links_exist(page: Path) -> None:
    for target, heading in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text()):
        if re.match(r"[a-z]+://", target):
            continue
        linked = page.parent / target if target else page
        assert linked.exists(), f"{page.name} links to {target}"
        titles = re.findall(r"^#+ (.+)$", unfenced(linked), re.MULTILINE) if heading else []
        made = {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}
        assert not heading or heading in made, f"{page.name} links to {target}#{heading}"


def test_names_exist() -> None:
    """Names of rawmla in the code spans of pages, and anywhere in examples."""
    texts = {page.name: code_spans(page) for page in PAGES}
    texts |= {path.name: path.read_text() for path in (ROOT / "examples").glob("*.py")}
    for page, text in texts.items():
        for name in set(re.findall(r"(?<![\w./-])rawmla(?:\.[A-Za-z_]\w*)+", text)):
            if "torch_ops" in name:
                pytest.importorskip("torch")
            assert pkgutil.resolve_name(name) is not None, f"{page} names {name}"


def test_options_exist() -> None:
    programs = [["-m", "rawmla", command] for command in ("info", "compile", "flash-mla", "flash-attn")]
    programs.append(["-m", "tests.emulator"])
    programs += [[f"scripts/{name}"] for name in ("bench", "engines", "gpu_check.py", "update_figures.py")]
    known = OTHER_PROGRAMS_OPTIONS | OWN_OPTIONS_OF_PYTEST | ENGINES_OPTIONS | NEED_TORCH
    for program in programs:
        command = [sys.executable, *program, "--help"]
        answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert answer.returncode == 0, answer.stderr
        known |= set(re.findall(r"--[a-z][a-z-]*", answer.stdout))
    for page in PAGES:
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z](?!\w)", page.read_text()))
        assert named <= known, page.name


def test_every_public_name_is_in_the_api_table() -> None:
    import rawmla

    table = "\n".join(re.findall(r"^\| (`rawmla\..*?) \|", API_PAGE.read_text(), re.MULTILINE))
    assert set(re.findall(r"`rawmla\.(\w+)`", table)) == set(rawmla.__all__) - {"__version__"}


def test_environment_variables() -> None:
    table = set(re.findall(r"^\| `(RAWMLA_[A-Z_]+)` \|", API_PAGE.read_text(), re.MULTILINE))
    code = "".join(path.read_text() for path in (ROOT / "rawmla").rglob("*.py"))
    assert set(re.findall(r"RAWMLA_[A-Z][A-Z_]*[A-Z]", code)) == table
