"""The programs in examples/ compile, call what exists, and say why they stop on a machine without a GPU.

On a GPU they are run as they stand by tests/gpu.
"""

import ast
import inspect
import py_compile
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import rawmla
from rawmla.testing.gpu import missing_hopper_reason

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
NAMES = {"cuda_graph", "cupy_only", "decode_torch", "sparse_decode_fp8"}

examples = pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)


def needs(path: Path) -> None:
    """Skip where an optional package that the example imports is not installed."""
    for name in re.findall(r"^ *import (cupy|ml_dtypes|torch)$", path.read_text(), re.MULTILINE):
        pytest.importorskip(name)


def resolve(node: ast.expr) -> Any:
    """What an expression `rawmla.name` names, None for any other; AttributeError if that is not there."""
    if isinstance(node, ast.Name):
        return rawmla if node.id == "rawmla" else None
    if isinstance(node, ast.Attribute):
        owner = resolve(node.value)
        return None if owner is None else getattr(owner, node.attr)
    return None


def check_names(code: str) -> int:
    """Every name of rawmla exists, and calls bind to the signatures; returns the number of calls."""
    calls = 0
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute):
            resolve(node)
        if not isinstance(node, ast.Call) or not callable(resolve(node.func)):
            continue
        calls += 1
        signature = inspect.signature(resolve(node.func))
        keywords = {keyword.arg: None for keyword in node.keywords if keyword.arg is not None}
        positional = [argument for argument in node.args if not isinstance(argument, ast.Starred)]
        is_whole = len(positional) == len(node.args) and len(keywords) == len(node.keywords)
        if is_whole:
            signature.bind(*positional, **keywords)
        else:
            signature.bind_partial(**keywords)
    return calls


def test_all_are_here() -> None:
    assert {path.stem for path in EXAMPLES} == NAMES


@examples
def test_compiles_and_is_short(path: Path, tmp_path: Path) -> None:
    py_compile.compile(str(path), cfile=str(tmp_path / "compiled"), doraise=True)
    code = path.read_text()
    assert 40 <= len(code.splitlines()) <= 90
    assert f"python examples/{path.name}" in (ast.get_docstring(ast.parse(code)) or "")


@examples
def test_names_and_arguments_exist(path: Path) -> None:
    assert check_names(path.read_text()) >= 4


@pytest.mark.parametrize(
    "code",
    (
        "rawmla.no_such_name",
        "rawmla.reference.warmup()",
        "rawmla.get_mla_metadata(no_such_argument=1)",
        "rawmla.flash_mla_with_kvcache(*arrays, no_such_argument=1)",
        "rawmla.quantize_k_cache(cache)",
    ),
)
def test_mistakes_are_found(code: str) -> None:
    with pytest.raises((AttributeError, TypeError)):
        check_names(code)


@examples
def test_without_a_gpu(path: Path) -> None:
    """One line that says what is missing, and exit status 1."""
    needs(path)
    if missing_hopper_reason() is None:
        pytest.skip("there is a GPU")
    answer = subprocess.run(
        [sys.executable, str(path)], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    with pytest.raises(rawmla.RawMLAError) as error:
        rawmla.warmup()
    assert answer.returncode == 1
    assert answer.stdout == ""
    assert answer.stderr == f"{error.value}\n"
    assert len(answer.stderr.splitlines()) == 1


def test_cupy_only_without_ml_dtypes(tmp_path: Path) -> None:
    pytest.importorskip("cupy")
    (tmp_path / "ml_dtypes.py").write_text("raise ImportError(name='ml_dtypes')\n")
    code = (
        f"import runpy, sys; sys.path.insert(0, {str(tmp_path)!r}); "
        "runpy.run_path('examples/cupy_only.py', run_name='__main__')"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert answer.returncode == 1
    assert answer.stderr == "this example needs ml_dtypes: pip install ml_dtypes\n"


@pytest.mark.parametrize("name", ("decode_torch", "sparse_decode_fp8"))
def test_steps_on_the_reference(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Shapes, dtypes and the order of the steps, with the reference in place of the GPU."""
    path = ROOT / "examples" / f"{name}.py"
    needs(path)
    reference = {function: getattr(rawmla.reference, function) for function in rawmla.reference.__all__}
    stand_in = SimpleNamespace(
        **reference, reference=rawmla.reference, RawMLAError=rawmla.RawMLAError, warmup=lambda **options: None
    )
    code = path.read_text().replace('"cuda"', '"cpu"').replace(".cuda()", "")
    code = code.replace("\nimport rawmla\n", "\n")
    names: dict[str, Any] = {"rawmla": stand_in, "__name__": name}
    exec(compile(code, str(path), "exec"), names)
    names["main"]()
    assert capsys.readouterr().out.startswith(f"{name}: ")
