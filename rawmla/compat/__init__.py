"""rawmla under the names of other libraries: `flash_mla`, `flash_attn`, and operators of engines.

Nothing here changes what a program imports until a function below says so, ``python -m rawmla flash-mla``,
``python -m rawmla flash-attn``, or the distribution rawmla-flash-mla.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

from . import modules
from .flash_attn.install import install_flash_attn, installed, uninstall_flash_attn

__all__ = [
    "EXCLUSIVE",
    "SITE",
    "install_flash_attn",
    "install_flash_mla",
    "is_our_file",
    "status",
    "uninstall_flash_attn",
    "uninstall_flash_mla",
]

SITE = Path(__file__).parent / "site"
"""A folder for PYTHONPATH: it holds a package `flash_mla` that re-exports `rawmla.compat.flash_mla`."""

EXCLUSIVE = ("rawmla-flash-mla", "sgl-flash-mla")
"""Distributions that own the files of one folder `flash_mla`; pip does not notice."""

_displaced: dict[str, ModuleType] | None = None  # what was in sys.modules before an installation
_op_patches: dict[str, Any] = {}  # namespace -> handle of rawmla.compat.ops.patch


def install_flash_mla(*, replace: bool = False, ops: Iterable[str] = (), api: str = "object") -> ModuleType:
    """Make `import flash_mla` give rawmla in this process and in its forked children.

    Puts `flash_mla`, `flash_mla.flash_mla_interface`, `flash_mla.cuda` and
    `flash_mla.fused_norm_rope_attn_rope_cast` into `sys.modules`. Children that are spawned do not inherit
    this: for them use ``python -m rawmla flash-mla`` or its ``--path``. Names that another module has bound
    before (`from flash_mla import ...`) stay what they are, so install first. May be called again; the last
    `api` counts.

    Parameters
    ----------
    replace : bool
        What to do about a `flash_mla` that is not rawmla's and is imported or could be imported: False
        raises, True hides it until `uninstall_flash_mla`.
    ops : iterable of str
        Namespaces of `torch.ops` to patch as well: see `rawmla.compat.ops.patch`.
    api : str
        The generation of plans. "object": `get_mla_metadata` returns `(FlashMLASchedMeta(), None)` whatever
        its arguments, which is what callers of FlashMLA since plan objects rely on. "tensors": with arguments
        it returns two tensors, which `flash_mla_with_kvcache` takes, for callers of the older generation.

    Returns
    -------
    module
        `flash_mla`.

    Raises
    ------
    RuntimeError
        Another `flash_mla` is imported or could be, and `replace` is False.
    TypeError, ValueError
        A bad `api`, or what `rawmla.compat.ops.patch` raises; nothing is installed then.

    Notes
    -----
    Needs no GPU, compiles nothing, does not initialise CUDA; imports torch if there is one. The surface is
    described in docs/flash_mla.md.

    Examples
    --------
    >>> rawmla.install_flash_mla()
    >>> import flash_mla
    """
    global _displaced
    from .flash_mla import flash_mla_interface
    from .usage import log

    namespaces = (ops,) if isinstance(ops, str) else tuple(ops)
    flash_mla_interface.check_api(api)
    if not replace:
        modules.refuse_foreign("flash_mla", "install_flash_mla", _is_ours, is_our_file)
    made: dict[str, Any] = {}
    with ExitStack() as undo:
        for namespace in namespaces:
            if namespace not in _op_patches and namespace not in made:
                from .ops import patch

                made[namespace] = patch(namespace)
                undo.callback(made[namespace].close)
        module = sys.modules.get("flash_mla")
        if module is None or not _is_ours(module):
            displaced = modules.remove(["flash_mla"])
            undo.callback(modules.restore, ["flash_mla"], displaced)
            module = _load()
            _displaced = displaced
            log(f"flash_mla is rawmla in this process (api={api!r})")
        undo.pop_all()
    _op_patches.update(made)
    flash_mla_interface.set_api(api)
    return module


def uninstall_flash_mla() -> None:
    """Undo `install_flash_mla`: what `import flash_mla` gave before, it gives again; operators are restored.

    Nothing happens if nothing is installed. Names that programs have bound meanwhile stay rawmla's.
    """
    global _displaced
    while _op_patches:
        _op_patches.popitem()[1].close()
    interface = sys.modules.get("rawmla.compat.flash_mla.flash_mla_interface")
    if interface is not None:
        interface.set_api(interface.DEFAULT_API)
    if _displaced is not None:
        modules.restore(["flash_mla"], _displaced)
        _displaced = None


def status() -> dict[str, Any]:
    """Return which parts of this module are in use in this process.

    Returns
    -------
    dict
        `flash_mla`: the file that `flash_mla` was imported from, if that is rawmla's, else None.
        `flash_attn`: the modules of flash-attn that are imported and are rawmla's, and their files. `api`:
        "object" or "tensors". `ops`: patched namespaces. `functions`: for every function that has been
        called, `calls` (that returned), `called_as` (whose generation of arguments and plan the last call
        had), `shapes` (of q and the cache in the first call). `kernels`: labels of rawmla's own kernels that
        are loaded; variants with a user's function are not among them.
    """
    module = sys.modules.get("flash_mla")
    interface = sys.modules.get("rawmla.compat.flash_mla.flash_mla_interface")
    usage = sys.modules.get("rawmla.compat.usage")
    loading = sys.modules.get("rawmla.jit.loading")
    used = {} if usage is None else usage.USED
    return {
        "flash_mla": getattr(module, "__file__", None) if module is not None and _is_ours(module) else None,
        "flash_attn": installed(),
        "api": "object" if interface is None else interface.get_api(),
        "ops": sorted(_op_patches),
        "functions": {
            name: {
                "calls": one.calls,
                "called_as": one.form,
                "shapes": [tuple(shape) for shape in one.shapes],
            }
            for name, one in used.items()
            if one.calls
        },
        "kernels": [] if loading is None else loading.loaded_labels(),
    }


def _is_ours(module: ModuleType) -> bool:
    """Whether a module called flash_mla is the one that re-exports ours, wherever it was installed."""
    from . import flash_mla

    return getattr(module, "flash_mla_with_kvcache", None) is flash_mla.flash_mla_with_kvcache


def is_our_file(file: Path) -> bool:
    """Whether this file is the re-exporting `flash_mla/__init__.py`, here or of rawmla-flash-mla."""
    return modules.is_copy(file, SITE / "flash_mla" / "__init__.py")


def _load() -> ModuleType:
    """Import the package in `SITE` as `flash_mla`, with its submodules."""
    package = SITE / "flash_mla"
    spec = importlib.util.spec_from_file_location(
        "flash_mla", package / "__init__.py", submodule_search_locations=[os.fspath(package)]
    )
    assert spec is not None and spec.loader is not None
    module = sys.modules["flash_mla"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)  # it imports its submodules
    return module
