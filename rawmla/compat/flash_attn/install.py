"""Making the modules of flash-attn, and the metadata of their distributions, importable in a process."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from .. import modules
from .refusals import DEFAULT_DROPOUT, check_dropout_mode, set_dropout

SITE = Path(__file__).parents[1] / "flash_attn_site"


class Generation(NamedTuple):
    """The modules of one generation of FlashAttention."""

    folder: str
    """In `SITE`: the modules, and a dist-info, by which programs find out that they are installed."""
    distribution: str
    modules: tuple[str, ...]


GENERATIONS = {
    2: Generation("fa2", "flash-attn", ("flash_attn", "flash_attn_2_cuda")),
    3: Generation("fa3", "flash-attn-3", ("flash_attn_interface", "flash_attn_3", "flash_attn_config")),
    4: Generation("fa4", "flash-attn-4", ("flash_attn.cute",)),
}

_folders: dict[int, str] = {}  # generation -> what was put into sys.path
_displaced: dict[str, ModuleType] = {}  # what was in sys.modules before
_extended: list[ModuleType] = []  # packages that find `flash_attn.cute` in our folder


def install_flash_attn(
    versions: int | Iterable[int] = (2, 3), *, replace: bool = False, dropout: str = "error"
) -> None:
    """Make `import flash_attn` and `import flash_attn_interface` give rawmla in this process.

    Puts folders first into `sys.path`, with the modules and with the metadata by which transformers and
    others find out that flash-attn is installed. Forked children and children of `multiprocessing` have them
    too; other processes do not: for them use ``python -m rawmla flash-attn`` or its ``--path``. Call it
    before transformers is imported. It may be called again; the last `dropout` counts.

    Parameters
    ----------
    versions : int or iterable of int
        Generations of FlashAttention: 2 is `flash_attn` with `flash_attn_2_cuda`, 3 is `flash_attn_interface`
        with `flash_attn_3` and `flash_attn_config`, 4 is `flash_attn.cute`. Some programs go over to 4
        wherever they find it.
    replace : bool
        How to treat modules of these names that are not rawmla's and are imported or could be imported:
        False raises, True hides them until `uninstall_flash_attn`.
    dropout : str
        How to treat a `dropout_p` above 0: "error" raises, "ignore" warns once and computes without dropout.
        Children that `multiprocessing` spawns take it from the environment: `RAWMLA_FLASH_ATTN_DROPOUT`.

    Raises
    ------
    RuntimeError
        Other modules of these names are there, and `replace` is False; or transformers has been imported, and
        took note that they are not installed.
    ValueError
        A bad version or `dropout`; nothing is installed then.

    Notes
    -----
    Needs no GPU, compiles nothing, does not initialise CUDA; imports torch if there is one. The surface is
    described in docs/flash_attn.md.

    Examples
    --------
    >>> rawmla.install_flash_attn()
    >>> model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="flash_attention_2")
    """
    from ..usage import log  # imports torch

    chosen = as_versions(versions)
    check_dropout_mode(dropout)
    names = [name for version in chosen for name in GENERATIONS[version].modules]
    _refuse_late(chosen)
    if not replace:
        for name in names:
            modules.refuse_foreign(name, "install_flash_attn", _is_ours, _is_our_file)
    foreign = [name for name in names if name in sys.modules and not _is_ours(sys.modules[name])]
    _displaced.update(modules.remove(foreign))
    _remove_namespace()
    for version, folder in zip(chosen, folders(chosen), strict=True):
        if folder not in sys.path or (replace and version not in _folders):
            sys.path.insert(0, folder)
            _folders[version] = folder
            log(f"{GENERATIONS[version].modules[0]} is rawmla in this process (dropout={dropout!r})")
    importlib.invalidate_caches()
    _extend_path(chosen)
    set_dropout(dropout)


def uninstall_flash_attn() -> None:
    """Undo `install_flash_attn`: the imports give what they gave before.

    Nothing happens if nothing is installed. Names that programs have bound meanwhile stay rawmla's.
    """
    names = [name for version in _folders for name in GENERATIONS[version].modules]
    names += _displaced
    for folder in _folders.values():
        if folder in sys.path:
            sys.path.remove(folder)
    _folders.clear()
    for package in _extended:
        package.__path__ = [folder for folder in package.__path__ if folder != _cute_folder()]
    modules.restore(names, _displaced)
    _remove_namespace()
    for package in _extended:
        _bind_cute(package)
    _extended.clear()
    _displaced.clear()
    importlib.invalidate_caches()
    set_dropout(DEFAULT_DROPOUT)


def as_versions(versions: Any) -> tuple[int, ...]:
    """Return generations as a tuple without repetitions, or raise for one that does not exist."""
    chosen = (versions,) if isinstance(versions, int) else tuple(dict.fromkeys(versions))
    if not chosen or not all(version in GENERATIONS for version in chosen):
        raise ValueError(f"versions: expected some of 2, 3 and 4, got {versions!r}")
    return chosen


def folders(versions: Iterable[int]) -> list[str]:
    """The folders of generations, for `sys.path` and PYTHONPATH."""
    return [os.fspath(SITE / GENERATIONS[version].folder) for version in versions]


def installed() -> dict[str, str]:
    """The modules of flash-attn that are imported in this process and are rawmla's, and their files."""
    names = [name for generation in GENERATIONS.values() for name in generation.modules]
    ours = {name: sys.modules[name] for name in names if name in sys.modules and _is_ours(sys.modules[name])}
    return {name: str(module.__file__) for name, module in ours.items()}


def _is_ours(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return _is_namespace(module) if file is None else _is_our_file(Path(file))


def _is_namespace(module: ModuleType) -> bool:
    """Whether a module is the package `flash_attn` of generation 4, which has no file."""
    folders = list(getattr(module, "__path__", ()))
    return getattr(module, "__file__", None) is None and folders == [_cute_folder()]


def _remove_namespace() -> None:
    """Let the next import of `flash_attn` look at the folders as they are then."""
    package = sys.modules.get("flash_attn")
    if package is not None and _is_namespace(package):
        modules.remove(["flash_attn"])


def _is_our_file(file: Path) -> bool:
    """Whether a file is one in `SITE`, or a copy of it."""
    named = file.parts[-2:] if file.name == "__init__.py" else (file.name,)
    return any(modules.is_copy(file, ours) for ours in SITE.rglob("/".join(named)))


def _extend_path(versions: Iterable[int]) -> None:
    """Let a `flash_attn` that is imported find `flash_attn.cute`."""
    package = sys.modules.get("flash_attn")
    folder, path = _cute_folder(), getattr(package, "__path__", None)
    if 4 in versions and package is not None and path is not None and folder not in path:
        package.__path__ = [folder, *path]
        _extended.append(package)
        _bind_cute(package)


def _bind_cute(package: ModuleType) -> None:
    """Let `from flash_attn import cute` give what `import flash_attn.cute` gives."""
    vars(package).pop("cute", None)
    if "flash_attn.cute" in sys.modules:
        vars(package)["cute"] = sys.modules["flash_attn.cute"]


def _cute_folder() -> str:
    """The folder of the package `flash_attn` that `flash_attn.cute` is in."""
    return os.path.join(*folders([4]), "flash_attn")


def _refuse_late(versions: Iterable[int]) -> None:
    """Raise if transformers has looked for flash-attn, which it does once, and has not found ours."""
    module = sys.modules.get("transformers.utils.import_utils")
    for version in versions:
        if module is not None and _has_missed(module, version):
            raise RuntimeError(
                "install_flash_attn: expected a call before transformers is imported, which has found out "
                f"that there is no {GENERATIONS[version].distribution}; call it earlier, or start the "
                "program by `python -m rawmla flash-attn -- script.py`"
            )


def _has_missed(module: Any, version: int) -> bool:
    """Whether transformers keeps the answer that a generation is not installed."""
    found = getattr(module, "PACKAGE_DISTRIBUTION_MAPPING", None)  # made at its import in older versions
    cached = getattr(module, "_package_distribution_mapping", None)
    if cached is not None and cached.cache_info().currsize:
        found = cached()
    if found is None:  # a generation whose module is not there needs no list of distributions
        ask = getattr(module, f"is_flash_attn_{version}_available", None)
        return ask is not None and ask.cache_info().currsize > 0
    generation = GENERATIONS[version]
    owners = found.get(generation.modules[0].partition(".")[0], ())
    return generation.distribution not in [owner.replace("_", "-") for owner in owners]
