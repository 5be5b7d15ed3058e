"""The wheel and the sdist hold the CUDA sources, and importing rawmla is quick and pulls in nothing heavy."""

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

import rawmla
from rawmla.errors import INSTALL_HINT

ROOT = Path(__file__).resolve().parents[1]
CUDA_SOURCES = sorted(p.relative_to(ROOT).as_posix() for p in (ROOT / "cuda_src").rglob("*.cu*"))
IMPORT_SECONDS = 0.3
HEAVY_MODULES = ("cupy", "torch", "cuda", "rich", "filelock", "matplotlib")


def run(*arguments: object, **options: Any) -> str:
    """Standard output of a fresh interpreter."""
    command = [sys.executable, *map(str, arguments)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=300, **options)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout.strip()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the wheel and the sdist, built with the packages installed here."""
    pytest.importorskip("build")
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    run("-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    return folder


@pytest.fixture
def wheel(built: Path) -> dict[str, str]:
    """The files of the wheel."""
    (path,) = built.glob(f"rawmla-{rawmla.__version__}-py3-none-any.whl")
    archive = zipfile.ZipFile(path)
    return {name: archive.read(name).decode() for name in archive.namelist()}


def in_dist_info(wheel: dict[str, str], name: str) -> str:
    """A file of the wheel's metadata."""
    return wheel[f"rawmla-{rawmla.__version__}.dist-info/{name}"]


def test_wheel_contents(wheel: dict[str, str]) -> None:
    """The helpers of tests and benchmark stay in the checkout, and no module imports them."""
    assert CUDA_SOURCES and {f"rawmla/{source}" for source in CUDA_SOURCES} <= wheel.keys()
    assert {"rawmla/py.typed", "rawmla/api/decode.py", "rawmla/__main__.py"} <= wheel.keys()
    assert {"rawmla/compat/site/flash_mla/cuda.py", "rawmla/compat/site/pyproject.toml"} <= wheel.keys()
    for name in ("fa2/flash_attn-2.8.3", "fa3/flash_attn_3-3.0.0", "fa4/flash_attn_4-4.0.0b36"):
        parts = {
            f"rawmla/compat/flash_attn_site/{name}.dist-info/{part}" for part in ("METADATA", "top_level.txt")
        }
        assert parts <= wheel.keys()
    assert any(name.endswith("licenses/LICENSE") for name in wheel)
    assert all(name.startswith(("rawmla/", "rawmla-")) and "__pycache__" not in name for name in wheel)
    for name, text in wheel.items():
        if name.endswith(".py"):
            imported = re.findall(r"^ *(?:from|import) (\w+)", text, re.MULTILINE)
            assert not {"kit", "tests", "operations"} & set(imported), name


def test_wheel_metadata(wheel: dict[str, str]) -> None:
    """Only NumPy and the like without an extra; links of the long description work elsewhere."""
    header, _, description = in_dist_info(wheel, "METADATA").partition("\n\n")
    lines = header.splitlines()
    extras = {line.removeprefix("Provides-Extra: ") for line in lines if line.startswith("Provides-Extra: ")}
    assert {"cu12", "cu13", "torch", "test", "dev"} <= extras
    assert "Requires-Python: >=3.10" in lines and "Project-URL: Homepage, https://" in header
    base = [line for line in lines if line.startswith("Requires-Dist: ") and "extra ==" not in line]
    assert any(line.startswith("Requires-Dist: numpy") for line in base)
    base += (of_tests := [line for line in lines if "extra == 'test'" in line])
    assert of_tests and not any(re.search("cu12|cu13|cupy|cuda|nvidia|torch", line) for line in base)
    targets = re.findall(r"\]\(([^)\s]+)\)", description)
    assert len(targets) == len(re.findall(r"\]\(([^)\s]+)\)", (ROOT / "README.md").read_text())) > 10
    assert all(target.startswith("https://") for target in targets)
    entry_points = in_dist_info(wheel, "entry_points.txt")
    for group, module in (("vllm.general_plugins", "vllm"), ("sglang.srt.plugins", "sglang")):
        assert f"[{group}]\nrawmla = rawmla.engines.{module}:register\n" in entry_points + "\n"


def test_sdist_contents(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert set(CUDA_SOURCES) <= names
    assert {".ci/run", "pyproject.toml", "README.md", "LICENSE", "examples/decode_torch.py"} <= names
    assert {"tests/test_packaging.py", "tests/kit/torch_reference.py", "scripts/bench/run.py"} <= names
    assert "tests/contracts/vllm.json" in names


def test_installed_wheel_finds_its_sources(wheel: dict[str, str], tmp_path: Path) -> None:
    """Away from the checkout, where pip would put the files."""
    for name, text in wheel.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    code = "from rawmla.jit.sources import find_source_root; print(find_source_root())"
    root = Path(run("-c", code, cwd=tmp_path))
    assert root == tmp_path / "rawmla" / "cuda_src"
    for source in CUDA_SOURCES:
        assert (tmp_path / "rawmla" / source).read_bytes() == (ROOT / source).read_bytes()


def test_import_is_quick_and_light() -> None:
    code = (
        "import sys, time; before = set(sys.modules); start = time.perf_counter(); import rawmla; "
        "print(time.perf_counter() - start); import rawmla.api.decode, rawmla.kernels, rawmla.compat; "
        "rawmla.compat.status(); "
        f"print(sorted(set({HEAVY_MODULES!r}) & (set(sys.modules) - before)))"
    )
    runs = [run("-c", code, cwd=ROOT).splitlines() for _ in range(3)]
    assert all(loaded == "[]" for _, loaded in runs)
    assert min(float(seconds) for seconds, _ in runs) < IMPORT_SECONDS


def test_hints_can_be_pasted_into_a_shell() -> None:
    """Without quotes some shells take the brackets for a pattern."""
    pages = [ROOT / "README.md", *(ROOT / "rawmla").rglob("*.py"), *(ROOT / "docs").rglob("*.md")]
    pattern = re.compile(r"install\s+(?:-e\s+)?\S*\[")
    hints = [(page.name, hint) for page in pages for hint in pattern.findall(page.read_text())]
    hints += [("errors.py", hint) for hint in pattern.findall(INSTALL_HINT)]
    assert {name for name, _ in hints} >= {"README.md", "errors.py"}
    for name, hint in hints:
        assert re.search(r"""install (-e )?["'](\w+|\.)\[$""", hint), f"{name}: {hint}"


def test_public_names() -> None:
    assert set(rawmla.__all__) <= set(dir(rawmla))
    errors = [getattr(rawmla, name) for name in rawmla.__all__ if name.endswith("Error")]
    assert errors and all(issubclass(error, rawmla.RawMLAError) for error in errors)
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'$"):
        _ = rawmla.no_such_name
    with pytest.raises(AttributeError, match="'flash_attn_foo'; close names: flash_attn_func, "):
        _ = rawmla.flash_attn_foo
