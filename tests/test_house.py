"""Rules for the modules of the package: their length, and which folders import each other."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "rawmla"
MODULES = {path.relative_to(PACKAGE): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
LONG = {"flex/operators.py"}  # a table
TO_BE_SPLIT = {
    "call/arrays.py", "flex/block_mask.py", "flex/trace.py", "jit/launch.py", "mha/attention.py",
    "reference/_cache.py", "reference/_flex.py", "reference/_mha.py", "testing/flex.py", "testing/sparse.py",
}  # fmt: skip


def test_no_module_is_long() -> None:
    long = {path.as_posix() for path, text in MODULES.items() if len(text.splitlines()) > 500}
    assert long <= LONG | TO_BE_SPLIT


def imports_of(path: Path, node: ast.AST) -> Iterator[tuple[str, ...]]:
    """The modules that a module imports when it is loaded, each as its path below the package."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ImportFrom):
            root = ("rawmla", *path.parts[:-1])[: len(path.parts) + 1 - child.level] if child.level else ()
            module = (*root, *(child.module or "").split(".")) if child.module else root
            yield from ((*module, alias.name)[1:] for alias in child.names if module[0] == "rawmla")
        elif not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from imports_of(path, child)


def test_folders_do_not_import_each_other_in_circles() -> None:
    folders = {path.parts[0]: set[str]() for path in MODULES if len(path.parts) > 1}
    for path, text in MODULES.items():
        if len(path.parts) > 1:
            folders[path.parts[0]] |= {first for first, *_ in imports_of(path, ast.parse(text))} & {*folders}
            folders[path.parts[0]].discard(path.parts[0])
    assert folders["api"] >= {"mla", "call"}  # the walk finds imports
    while lowest := {folder for folder, used in folders.items() if not used & {*folders}}:
        folders = {folder: used for folder, used in folders.items() if folder not in lowest}
    assert not folders, f"import each other in a circle: {folders}"
