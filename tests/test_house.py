"""Rules for the modules of the package: length, imports, and the number of parameters of functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "rawmla"
MODULES = {
    path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text())
    for path in sorted(PACKAGE.rglob("*.py"))
}
MAX_LINES, MAX_PARAMETERS = 500, 12
LONG = {"flex/operators.py"}  # a table
WITH_PUBLIC_SIGNATURES = ("api", "compat", "reference")

LAYERS = {
    "cli": "engines compat report kernels jit errors",
    "engines": "compat report kernels jit environment errors",
    "compat": "api mha mla call environment",
    "transformers": "errors",
    "preload": "api flex mha mla stand_ins kernels jit call",
    "report": "jit environment errors",
    "api": "torch_ops flex mha mla kernels call",
    "torch_ops": "reference mha mla stand_ins kernels jit call errors",
    "reference": "flex mla call",
    "flex": "mha kernels jit call errors",
    "mha": "kernels jit call errors",
    "mla": "kernels jit call errors",
    "stand_ins": "jit call",
    "kernels": "jit errors",
    "jit": "environment errors",
    "call": "errors",
    "environment": "errors",
    "errors": "",
}
"""What each folder or module of the package may import besides itself, also inside functions."""
TAKE_PUBLIC_NAMES = {"cli", "engines", "compat", "transformers", "preload", "report"}
"""They may import `rawmla` itself."""


def layer_of(module: str) -> str:
    return module.partition("/")[0].removesuffix(".py")


def imports_of(module: str) -> Iterator[str]:
    """The parts of the package that a module imports, "" for a name of the package itself."""
    for node in ast.walk(MODULES[module]):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            here = ["rawmla", *module.split("/")]
            outer = here[: len(here) - node.level] if node.level else []
            inner = node.module.split(".") if node.module else []
            names = [[*outer, *inner, alias.name] for alias in node.names]
        else:
            continue
        for first, *path in names:
            if first == "rawmla":
                yield path[0] if path and (path[0] in LAYERS) else ""


def test_no_module_is_long() -> None:
    long = {name for name in MODULES if len((PACKAGE / name).read_text().splitlines()) > MAX_LINES}
    assert long == LONG


def test_no_function_has_many_parameters() -> None:
    many = set()
    for module, tree in MODULES.items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                given = node.args
                if len(given.posonlyargs + given.args + given.kwonlyargs) > MAX_PARAMETERS:
                    many.add(f"{module} {getattr(node, 'name', 'lambda')}")
    assert not {one for one in many if layer_of(one) not in WITH_PUBLIC_SIGNATURES}


def test_modules_import_downwards_what_their_layer_may() -> None:
    order = list(LAYERS)
    for layer, below in LAYERS.items():
        assert all(order.index(layer) < order.index(one) for one in below.split()), layer
    used: dict[str, set[str]] = {layer: set() for layer in LAYERS}
    for module in MODULES:
        layer = layer_of(module)
        if layer in ("__init__", "__main__"):  # the table of public names, and the command line
            continue
        imported = set(imports_of(module)) - {layer}
        allowed = {*LAYERS[layer].split(), *([""] if layer in TAKE_PUBLIC_NAMES else [])}
        assert imported <= allowed, f"{module} imports {imported - allowed}"
        used[layer] |= imported
    assert {"mla", "call", "torch_ops"} <= used["api"]  # the walk finds imports, in functions too
