"""A record of an engine for its plug-in: replaced functions, tested versions, and the switch."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import NamedTuple


class Engine(NamedTuple):
    """An engine with a plug-in of rawmla."""

    title: str
    distribution: str
    tested: tuple[str, ...]
    """Versions whose calls are recorded in tests/contracts."""
    module: str
    """The engine's module whose names are replaced."""
    replaced: dict[str, str | None]
    """Names that are replaced, with their parameters in the tested versions; None: a class.

    After "..." a function may have any parameters.
    """
    variable: str
    """The environment variable that turns the plug-in on, by one of `modes`."""
    modes: tuple[str, ...]
    group: str
    """The group of entry points that the engine loads."""
    filter: str
    """The engine's variable that names the plug-ins to load."""
    line: str
    """How to start the engine with the plug-in."""

    def is_tested(self, version: str | None) -> bool:
        """Whether the version is in `tested`; what follows "+" names only what it was built for."""
        return version is not None and version.partition("+")[0] in self.tested

    def refusal(self, version: str | None, module: ModuleType) -> str | None:
        """Why the names of `module` may not be replaced in this version; None: they may."""
        if self.is_tested(version):
            return None
        different = [name for name in self.replaced if not self._is_known(module, name)]
        if not different:
            return None
        return (
            f"{self.title} {version or 'of unknown version'} is not one that rawmla was tested with "
            f"({', '.join(self.tested)}), and in {self.module} these are missing or have other parameters: "
            f"{', '.join(different)}. Unset {self.variable}, or use a tested version"
        )

    def _is_known(self, module: ModuleType, name: str) -> bool:
        value, parameters = getattr(module, name, None), self.replaced[name]
        if parameters is None:
            return isinstance(value, type)
        if not callable(value):
            return False
        found = ", ".join(inspect.signature(value).parameters)
        return found == parameters or parameters.endswith("...") and found.startswith(parameters[:-3])
