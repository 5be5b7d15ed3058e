"""The report of ``python -m rawmla doctor``: which engines there are, whether they use rawmla, what to do.

Engines are looked at through their metadata and never imported; nothing is compiled.
"""

from __future__ import annotations

import os
import re
from importlib import metadata, util
from pathlib import Path
from typing import NamedTuple

from rawmla import report
from rawmla.compat import EXCLUSIVE, is_our_file
from rawmla.environment import version_of

from . import sglang, vllm
from .plug_in import Engine

Rows = list[tuple[str, str]]

PLUG_IN = "rawmla"
"""The name of both entry points, which VLLM_PLUGINS and SGLANG_PLUGINS select by."""
_ENGINES = (vllm.ENGINE, sglang.ENGINE)
_TITLES = {**{engine.distribution: engine.title for engine in _ENGINES}, "lmdeploy": "LMDeploy"}
_OTHER_VARIABLES = ("VLLM_PLUGINS", "VLLM_BATCH_INVARIANT", "SGLANG_PLUGINS", "PYTHONPATH")
_PATH = "PYTHONPATH=$(python -m rawmla flash-mla --path)"


class Diagnosis(NamedTuple):
    """`sections` maps a title to (label, text) rows. `problems` are what was asked for and is not in effect,
    or cannot work; `hints` are what could be done besides. One sentence each.
    """

    sections: dict[str, Rows]
    problems: list[str]
    hints: list[str]


def examine() -> Diagnosis:
    """Look at this environment. Raises nothing for what it finds missing."""
    found = Diagnosis({}, [], [])
    versions = {name: version_of(name) for name in _TITLES}
    known = {engine.distribution: engine for engine in _ENGINES}
    found.sections["engines"] = [
        (title, _recognised(known.get(name), versions[name])) for name, title in _TITLES.items()
    ]
    names = {name for name in os.environ if name.startswith("RAWMLA_")} | set(_OTHER_VARIABLES)
    variables = [(name, os.environ[name]) for name in sorted(names) if name in os.environ]
    found.sections["environment variables"] = variables or [("none", "of RAWMLA_*, VLLM_*, SGLANG_PLUGINS")]
    found.sections["plug-ins"] = []
    works = report.collect()
    can_run = not dict(works["what works"])["run kernels"].startswith("no: ")
    for engine in _ENGINES:
        _examine_plug_in(engine, versions[engine.distribution], can_run, found)
    _examine_flash_mla(versions, found)
    found.sections.update({title: works[title] for title in ("packages", "GPU", "what works")})
    conflicts = [text for label, text in works["packages"] if label == "conflict"]
    found.problems.extend(conflicts)
    _examine_torch(versions, bool(conflicts), found)
    verdicts = dict(works["what works"])
    needed = [("run kernels", "Kernels cannot run")]
    if any(versions.values()):  # engines work on torch's tensors
        needed.append(("torch tensors", "torch cannot be used"))
    for label, what in needed:
        verdict = verdicts[label]
        if verdict.startswith("no: "):
            found.problems.append(f"{what}: {verdict.removeprefix('no: ')}")
    return found


def _recognised(engine: Engine | None, version: str | None) -> str:
    if version is None:
        return "not installed"
    if engine is None:
        return f"{version}, imports flash_mla"
    if engine.is_tested(version):
        return f"{version}, tested"
    return f"{version}, not tested: rawmla was tested with {', '.join(engine.tested)}"


def _examine_plug_in(engine: Engine, version: str | None, can_run: bool, found: Diagnosis) -> None:
    """Is the entry point seen, is it switched on, and does it do what it was asked for?"""
    seen = [point for point in metadata.entry_points(group=engine.group) if point.name == PLUG_IN]
    mode = os.environ.get(engine.variable, "")
    rows = found.sections["plug-ins"]
    where = f"{seen[0].value} ({engine.group})" if seen else f"not in {engine.group}"
    rows.append((f"{engine.title} entry point", where))
    problems = []
    if mode and mode not in engine.modes:
        problems.append(f"{engine.variable}: expected one of {', '.join(engine.modes)}, got {mode!r}")
    if mode and version is None:
        problems.append(f"{engine.variable} is set, but {engine.title} is not installed in this environment")
    if mode and not seen:
        problems.append(
            f"{engine.title} does not see the plug-in: install rawmla into the engine's environment with "
            '`pip install -e "PATH_OF_RAWMLA[cu13]"`, since a checkout on PYTHONPATH has no entry points'
        )
    if mode and not engine.is_chosen(os.environ.get(engine.filter)):
        problems.append(
            f"{engine.filter} leaves the plug-in out: add {PLUG_IN} to it, without spaces, or unset it"
        )
    found.problems.extend(problems)
    if not mode:
        rows.append((f"{engine.title} replaced", f"nothing: {engine.variable} is not set"))
        if version is not None:
            found.hints.append(f"To use rawmla in {engine.title}: {engine.line}")
    elif problems or not can_run:
        rows.append((f"{engine.title} replaced", "nothing that works: see below"))
    else:
        _examine_names(engine, mode, found)
        if not engine.is_tested(version):
            found.hints.append(
                f"{engine.title} {version} was not tested: names and parameters were compared, nothing else"
            )


def _examine_names(engine: Engine, mode: str, found: Diagnosis) -> None:
    """What is replaced, and what is refused since its names or parameters are others?"""
    asked = [
        (f"{', '.join(module.replaced)} of {module.path or module.paths[0]}", engine.refusal([module]))
        for module in engine.modules
    ]
    if mode == "backend":
        asked.append((f"attention backends {', '.join(vllm.BACKENDS)}", engine.refusal(engine.backends)))
    for what, reason in asked:
        label = "replaced" if reason is None else "refused"
        found.sections["plug-ins"].append((f"{engine.title} {label}", what))
        if reason is not None:
            found.problems.append(reason)


def _examine_torch(versions: dict[str, str | None], mixed: bool, found: Diagnosis) -> None:
    """Is torch the version that the engines require, and for the CUDA that rawmla was installed for?

    `mixed`: libraries of two CUDA versions were found already.
    """
    torch = version_of("torch")
    for name, version in versions.items():
        pin = None if version is None else _pinned_torch(name)
        if pin is not None and torch is not None and torch.partition("+")[0] != pin:
            found.problems.append(
                f"{_TITLES[name]} {version} requires torch {pin}, and torch {torch} is installed: run "
                f"`pip install torch=={pin}`, and install rawmla without its extra `torch`, as in "
                '`pip install -e "PATH_OF_RAWMLA[cu13]"`'
            )
    build, cuda = report.torch_build() or ("", None)
    if cuda is not None and cuda.startswith("13.") and not mixed and version_of("cupy-cuda12x"):
        found.problems.append(
            f"torch {build} is for CUDA {cuda}, but rawmla was installed with `cu12`: run `pip uninstall "
            'cupy-cuda12x nvidia-cuda-nvrtc-cu12`, then `pip install -e "PATH_OF_RAWMLA[cu13]"`'
        )


def _pinned_torch(distribution: str) -> str | None:
    """The one version of torch that a distribution requires, None if it leaves a choice."""
    for requirement in metadata.requires(distribution) or ():
        what, _, marker = requirement.partition(";")
        pin = re.fullmatch(r"torch\s*\(?==\s*([\w.]+)\)?\s*", what)
        if pin and "extra" not in marker:
            return pin.group(1)
    return None


def _examine_flash_mla(versions: dict[str, str | None], found: Diagnosis) -> None:
    """Whose is `import flash_mla`?"""
    owners = [name for name in EXCLUSIVE if version_of(name) is not None]
    ours = False
    try:
        spec = util.find_spec("flash_mla")
    except ValueError:  # imported by something that left no spec
        spec = None
    if spec is None or spec.origin is None:
        text = "none"
    else:
        ours = is_our_file(Path(spec.origin))
        text = f"{'rawmla' if ours else 'another one'}: {spec.origin}"
    found.sections["flash_mla"] = [
        ("import flash_mla gives", text),
        ("distributions", ", ".join(f"{name} {version_of(name)}" for name in owners) or "none"),
    ]
    if len(owners) > 1:
        found.problems.append(
            f"{' and '.join(owners)} are both installed and own the same files: uninstall both, then install "
            "the one that is wanted"
        )
    if versions["lmdeploy"] is not None and not ours:
        found.hints.append(f"To use rawmla in LMDeploy: {_PATH} lmdeploy serve api_server MODEL")
