"""Modules under names of other libraries: whose they are, and taking them out of a process and back."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType


def remove(names: Iterable[str]) -> dict[str, ModuleType]:
    """Take modules of these names, and what is under them, out of `sys.modules`."""
    prefixes = tuple(f"{name}." for name in names)
    found = [name for name in sys.modules if f"{name}.".startswith(prefixes)]
    return {name: sys.modules.pop(name) for name in found}


def restore(names: Iterable[str], displaced: dict[str, ModuleType]) -> None:
    """Put back what `remove` returned."""
    remove(names)
    sys.modules.update(displaced)


def is_copy(file: Path, ours: Path) -> bool:
    """Whether a file is one of ours, wherever it was installed."""
    return file.is_file() and file.read_bytes() == ours.read_bytes()


def refuse_foreign(
    name: str, function: str, is_ours: Callable[[ModuleType], bool], is_our_file: Callable[[Path], bool]
) -> None:
    """Raise if another module of this name is imported, or would be hidden by ``function`` of rawmla."""
    module = sys.modules.get(name)
    if module is not None:
        if is_ours(module):
            return
        where = f"imported from {getattr(module, '__file__', 'an unknown place')}"
    else:
        file = _find(name)
        if file is None or is_our_file(file):
            return
        where = f"installed at {file}"
    raise RuntimeError(
        f"replace: expected True, because another {name} is {where}, got False; call "
        f"{function}(replace=True) to hide it in this process, or uninstall it"
    )


def _find(name: str) -> Path | None:
    """The file of a module, without an import of the package that it is in."""
    if "." in name:
        files = (Path(folder, *name.split("."), "__init__.py") for folder in sys.path)
        return next(filter(Path.is_file, files), None)
    spec = importlib.util.find_spec(name)
    return None if spec is None or spec.origin is None else Path(spec.origin)
