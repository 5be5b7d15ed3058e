"""A record of an engine for its plug-in: what is replaced, tested versions, and the switch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import update_wrapper
from importlib import util
from typing import Any, NamedTuple

from rawmla.environment import version_of
from rawmla.errors import INSTALL_HINT

from .source import call_with, file_of, find, methods_of, unserved


class Module(NamedTuple):
    """A module of an engine, with the names that rawmla replaces and those that it calls."""

    paths: tuple[str, ...]
    """Where versions of the engine have it. The first one that exists is used."""
    replaced: Mapping[str, str]
    """Functions and classes, with what takes their place, as "module:name". Of classes, the methods that both
    have are compared.
    """
    called: Mapping[str, str] = {}
    """Functions and "Class.method"s, with the parameters that rawmla gives."""
    goes_on: bool = False
    """The functions return NotImplemented for calls that go on to the engine's own ones."""

    @property
    def path(self) -> str | None:
        """Where this environment has the module."""
        return next((path for path in self.paths if file_of(path) is not None), None)

    def differences(self) -> str:
        """Names that are missing, or with the parameters that do not fit; empty if there are none."""
        if self.path is None:
            return f"{' or '.join(self.paths)} (missing)"
        different = [f"{name} ({', '.join(unfit)})" for name, unfit in self._compared(self.path) if unfit]
        return f"in {self.path}, {', '.join(dict.fromkeys(different))}" if different else ""

    def _compared(self, path: str) -> Iterator[tuple[str, list[str]]]:
        """Each name with its parameters that do not fit."""
        for name, by in self.replaced.items():
            module, _, own_name = by.partition(":")
            ours, theirs = find(module, own_name), find(path, name)
            assert ours is not None, by
            yield name, unserved(ours, theirs)
            for method in methods_of(ours):
                overridden = find(path, f"{name}.{method}")
                if overridden is not None:
                    yield f"{name}.{method}", unserved(find(module, f"{own_name}.{method}"), overridden)
        for name, parameters in self.called.items():
            yield name, unserved(find(path, name), call_with(parameters))


def or_original(ours: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls rawmla's, and the engine's own where that returns NotImplemented."""

    def replacement(*args: Any, **kwargs: Any) -> Any:
        results = ours(*args, **kwargs)
        return original(*args, **kwargs) if results is NotImplemented else results

    return update_wrapper(replacement, original, assigned=("__name__", "__qualname__"), updated=())


def cannot_load() -> str | None:
    """Why kernels cannot be compiled and loaded, as far as packages tell; None: nothing is missing."""
    needed = {"cupy": "CuPy", "cuda": "cuda-bindings"}
    if os.environ.get("RAWMLA_CUBIN_DIR"):  # nothing is compiled
        del needed["cuda"]
    missing = [name for module, name in needed.items() if util.find_spec(module) is None]
    return f"Kernels need {' and '.join(missing)}; install it with {INSTALL_HINT}" if missing else None


class Engine(NamedTuple):
    """An engine with a plug-in of rawmla."""

    title: str
    distribution: str
    tested: tuple[str, ...]
    """Versions whose calls are recorded in tests/contracts, the oldest first."""
    modules: tuple[Module, ...]
    """Modules whose names are replaced: in each of them all, or none."""
    variable: str
    """The environment variable that turns the plug-in on, by one of `modes`."""
    modes: tuple[str, ...]
    group: str
    """The group of entry points that the engine loads."""
    filter: str
    """The engine's variable that names the plug-ins to load."""
    is_chosen: Callable[[str | None], bool]
    """Whether the engine loads rawmla's plug-in at a value of that variable; None: it is not set."""
    line: str
    """How to start the engine with the plug-in."""
    backends: tuple[Module, ...] = ()
    """Modules on which the attention backends of the mode "backend" are built."""

    def is_tested(self, version: str | None) -> bool:
        """Whether the version is in `tested`; what follows "+" names only what it was built for."""
        return version is not None and version.partition("+")[0] in self.tested

    def refusal(self, modules: Sequence[Module]) -> str | None:
        """Why rawmla may not be used with these modules of the installed version; None: it may."""
        different = "; ".join(filter(None, (module.differences() for module in modules)))
        if not different:
            return None
        version = version_of(self.distribution) or "of unknown version"
        instead = f"Set {self.variable}=patch, or install" if modules is self.backends else "Install"
        return (
            f"{self.title} {version} has other names or parameters than rawmla expects: {different}. "
            f"{instead} a tested version: {', '.join(self.tested)}"
        )
