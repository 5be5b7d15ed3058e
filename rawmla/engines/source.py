"""Parameter lists, read from source files: an engine is compared with rawmla before it is imported, and also
where it cannot be imported.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from importlib import util
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any, NamedTuple

_STARS: dict[Any, str] = {Parameter.VAR_POSITIONAL: "*", Parameter.VAR_KEYWORD: "**"}


class Definition(NamedTuple):
    """A function, method or class, and the module that defines it."""

    module: str
    node: ast.FunctionDef | ast.ClassDef
    is_method: bool = False

    @property
    def signature(self) -> Signature:
        """Parameters without `self`, `cls` and annotations, with None for every default; a class has none."""
        if isinstance(self.node, ast.ClassDef):
            return Signature()
        given = self.node.args
        positional = [*given.posonlyargs, *given.args]
        required = len(positional) - len(given.defaults)
        parameters = [
            Parameter(
                one.arg, Parameter.POSITIONAL_OR_KEYWORD, default=Parameter.empty if i < required else None
            )
            for i, one in enumerate(positional)
        ]
        if self.is_method and "staticmethod" not in map(ast.unparse, self.node.decorator_list):
            del parameters[0]
        if given.vararg:
            parameters.append(Parameter(given.vararg.arg, Parameter.VAR_POSITIONAL))
        for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
            value = Parameter.empty if default is None else None
            parameters.append(Parameter(one.arg, Parameter.KEYWORD_ONLY, default=value))
        if given.kwarg:
            parameters.append(Parameter(given.kwarg.arg, Parameter.VAR_KEYWORD))
        return Signature(parameters)


def file_of(module: str) -> Path | None:
    """The source file of a module; None if there is none. Nothing is imported."""
    top, *rest = module.split(".")
    spec = util.find_spec(top)
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder, *rest)
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file
    return None


def find(module: str, name: str) -> Definition | None:
    """The function or class that a module has by this name, or by "Class.method", imported and inherited ones
    included. None: it has none, or makes it by an assignment.
    """
    file = file_of(module)
    first, _, method = name.partition(".")
    for node in () if file is None else _names_of(file).get(first, ()):
        if isinstance(node, ast.ImportFrom):
            original = next(one.name for one in node.names if (one.asname or one.name) == first)
            found = find(_origin_of(node, module), original)
        else:
            found = Definition(module, node)
        if found is not None:
            return _method(found, method) if method else found
    return None


@functools.cache
def _names_of(file: Path) -> dict[str, list[ast.FunctionDef | ast.ClassDef | ast.ImportFrom]]:
    """What defines or imports each name of a module, in the order of the file; blocks of `if` and `try` are
    looked into. Outside of them, what comes later takes the place of what came before.
    """
    names: dict[str, list[ast.FunctionDef | ast.ClassDef | ast.ImportFrom]] = {}
    for statement in ast.parse(file.read_bytes()).body:
        is_block = isinstance(statement, _BLOCKS)
        for node in _statements(statement) if is_block else [statement]:
            for name in _bound_by(node):
                found = names.setdefault(name, [])
                if not is_block:
                    found.clear()
                if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.ImportFrom)):
                    found.append(node)
    return names


_BLOCKS = (ast.If, ast.Try, ast.ExceptHandler)


def _statements(block: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(block):
        if isinstance(node, _BLOCKS):
            yield from _statements(node)
        else:
            yield node


def _bound_by(node: ast.AST) -> list[str]:
    """Names that a statement binds."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [one.asname or one.name for one in node.names]
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        targets = [node.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _origin_of(node: ast.ImportFrom, module: str) -> str:
    """The full name of the module that an import of `module` names."""
    package = module if str(file_of(module)).endswith("__init__.py") else module.rpartition(".")[0]
    return util.resolve_name("." * node.level + (node.module or ""), package)


def _method(found: Definition, name: str) -> Definition | None:
    """A method of a class or of its first base that has it."""
    if isinstance(found.node, ast.ClassDef):
        for node in reversed(found.node.body):
            if isinstance(node, ast.FunctionDef) and node.name == name:
                return Definition(found.module, node, is_method=True)
        for base in found.node.bases:
            generic = base.value if isinstance(base, ast.Subscript) else base
            method = find(found.module, f"{ast.unparse(generic)}.{name}")
            if method is not None:
                return method
    return None


def methods_of(kind: Definition) -> list[str]:
    """Names of the methods of a class and of its bases in the same module; a function has none."""
    if isinstance(kind.node, ast.FunctionDef):
        return []
    names = [node.name for node in kind.node.body if isinstance(node, ast.FunctionDef)]
    for base in kind.node.bases:
        found = find(kind.module, ast.unparse(base))
        if found is not None and found.module == kind.module:
            names += methods_of(found)
    return names


def call_with(parameters: str) -> Definition:
    """A function with these parameters, which stands for a call that gives them all."""
    (node,) = ast.parse(f"def call({parameters}): pass").body
    assert isinstance(node, ast.FunctionDef)
    return Definition("", node)


def unserved(ours: Definition | None, theirs: Definition | None) -> list[str]:
    """Parameters of `theirs` that `ours` lacks or has in another place, then those that only `ours` requires.
    Empty: calls of `theirs` may go to `ours`.
    """
    if ours is None or theirs is None:
        return ["missing"]
    own, others = ours.signature.parameters, theirs.signature.parameters
    stars = {one.kind for one in own.values()} & _STARS.keys()
    found = []
    for place, (name, one) in enumerate(others.items()):
        keyword = one.kind is Parameter.KEYWORD_ONLY
        if one.kind in _STARS:
            known = one.kind in stars
        elif name in own:
            kind = own[name].kind
            # A value by position goes to `*`, one by name to the parameter.
            in_star = kind is Parameter.KEYWORD_ONLY and Parameter.VAR_POSITIONAL in stars
            known = keyword or in_star or (list(own).index(name) == place and kind is one.kind)
        else:
            known = stars >= ({Parameter.VAR_KEYWORD} if keyword else _STARS.keys())
        if not known:
            found.append(_STARS.get(one.kind, "") + name)
    for name, one in own.items():
        required = one.default is Parameter.empty and one.kind not in _STARS
        if required and (name not in others or others[name].default is not Parameter.empty):
            found.append(name)
    return list(dict.fromkeys(found))
