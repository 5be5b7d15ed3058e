"""python -m rawmla doctor: what it says and its exit status, in environments made of metadata alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from pytest import CaptureFixture, MonkeyPatch
from test_engines import (
    FILE_OF_SGLANG_FLASH_ATTN,
    OLD_INTERFACE,
    OLD_SGLANG,
    SGLANG_FLASH_ATTN,
    set_version,
    write,
)
from test_engines import VLLM as VLLM_FILES
from test_vllm import install_entry_points

from rawmla import cli, report
from rawmla.compat import SITE
from rawmla.engines import doctor, sglang, vllm

WORKING = {
    "packages": [("numpy", "2.0")],
    "GPU": [("driver", "13.0")],
    "what works": [("run kernels", "yes"), ("torch tensors", "yes")],
}
VLLM, SGLANG = {"vllm": "0.33.0"}, {"sglang": "0.5.22"}
FUNCTION = "flash_mla_sparse_fwd"
SOURCES = {**VLLM_FILES, OLD_INTERFACE: OLD_SGLANG, FILE_OF_SGLANG_FLASH_ATTN: SGLANG_FLASH_ATTN}
Environment = Callable[..., doctor.Diagnosis]
Texts = Mapping[str, str]


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: MonkeyPatch) -> Environment:
    """Diagnoses an environment with these distributions, variables, and rawmla's entry points or not."""
    engines = ("VLLM_PLUGINS", "SGLANG_PLUGINS", "VLLM_BATCH_INVARIANT")
    for name in (vllm.ENGINE.variable, sglang.ENGINE.variable, *engines):
        monkeypatch.delenv(name, raising=False)

    def examine(
        variables: Mapping[str, str] = {},
        files: Mapping[str, str] = {},
        entry_points: bool = True,
        works: Mapping[str, Any] = {},
        build: tuple[str, str | None] | None = None,
        **versions: str,
    ) -> doctor.Diagnosis:
        monkeypatch.setattr(report, "collect", lambda: {**WORKING, **works})
        monkeypatch.setattr(report, "torch_build", lambda: build)
        folder = tmp_path / "site"
        folder.mkdir()
        write(folder, dict(files))
        for name, version in versions.items():
            set_version(folder, name, version)
        if entry_points:
            install_entry_points(folder)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        # This environment's own packages would be found too.
        monkeypatch.setattr("sys.path", [str(folder)])
        return doctor.examine()

    return examine


def test_engines_that_are_not_switched_on(environment: Environment) -> None:
    found = environment(**VLLM, **SGLANG, lmdeploy="0.12.0")
    engines = dict(found.sections["engines"])
    assert engines["vLLM"] == "0.33.0, tested" and engines["SGLang"] == "0.5.22, tested"
    assert engines["LMDeploy"] == "0.12.0, imports flash_mla"
    plug_ins = dict(found.sections["plug-ins"])
    assert plug_ins["vLLM replaced"] == "nothing: RAWMLA_VLLM is not set"
    assert plug_ins["vLLM entry point"] == "rawmla.engines.vllm:register (vllm.general_plugins)"
    assert dict(found.sections["flash_mla"]) == {"import flash_mla gives": "none", "distributions": "none"}
    assert found.problems == [] and {"packages", "GPU", "what works"} <= set(found.sections)
    hints = [hint.partition(":")[0] for hint in found.hints]
    assert hints == [f"To use rawmla in {name}" for name in ("vLLM", "SGLang", "LMDeploy")]


@pytest.mark.parametrize("plug_ins_of_sglang", ["", "other, rawmla"])
def test_engines_that_are_switched_on(environment: Environment, plug_ins_of_sglang: str) -> None:
    """SGLang loads all plug-ins by an empty list, and takes names without their spaces."""
    variables = {"RAWMLA_VLLM": "backend", "RAWMLA_SGLANG": "patch", "VLLM_PLUGINS": "other,rawmla"}
    variables["SGLANG_PLUGINS"] = plug_ins_of_sglang
    found = environment(variables, SOURCES, **SGLANG, vllm="0.33.0+cu129")
    plug_ins = found.sections["plug-ins"]
    for name, engine, place in (("vLLM", vllm.ENGINE, 0), ("SGLang", sglang.ENGINE, 1)):
        mla, flash_attn = engine.modules
        for module, path in ((mla, mla.paths[place]), (flash_attn, flash_attn.paths[0])):
            assert (f"{name} replaced", f"{', '.join(module.replaced)} of {path}") in plug_ins
    assert ("vLLM replaced", "attention backends FLASHMLA, FLASHMLA_SPARSE, CUSTOM") in plug_ins
    assert found.problems == [] and found.hints == []
    assert variables.items() <= set(found.sections["environment variables"])


def test_a_version_that_is_not_known(environment: Environment) -> None:
    found = environment({"RAWMLA_VLLM": "patch"}, SOURCES, vllm="0.40.0")
    assert dict(found.sections["engines"])["vLLM"].startswith("0.40.0, not tested: rawmla was tested with 0.")
    assert "vLLM replaced" in dict(found.sections["plug-ins"])
    assert found.problems == [] and found.hints[0].startswith("vLLM 0.40.0 was not tested")


@pytest.mark.parametrize(
    ("file", "old", "new", "reasons"),
    [
        ("ops/flashmla.py", "512, attn_sink", "512, new=1, attn_sink", [f"{FUNCTION} (new"] * 2),
        ("backends/mla/flashmla.py", "attn_metadata, layer", "layer", ["FlashMLAImpl.forward_mqa (layer"]),
    ],
    ids=["functions", "backends"],
)
def test_what_is_refused(environment: Environment, file: str, old: str, new: str, reasons: list[str]) -> None:
    """Other parameters: the module is not called replaced, and the problem names what differs."""
    path = f"vllm/v1/attention/{file}"
    text = SOURCES[path].replace(old, new)
    found = environment({"RAWMLA_VLLM": "backend"}, {**SOURCES, path: text}, **VLLM)
    refused = [text for label, text in found.sections["plug-ins"] if label == "vLLM refused"]
    replaced = [text for label, text in found.sections["plug-ins"] if label == "vLLM replaced"]
    assert len(refused) == len(found.problems) == len(reasons) and len(replaced) == 3 - len(refused)
    assert all(reason in problem for reason, problem in zip(reasons, found.problems, strict=True))
    assert refused[-1].startswith("attention backends") and "Set RAWMLA_VLLM=patch" in found.problems[-1]


def test_nothing_is_replaced_where_kernels_cannot_run(environment: Environment) -> None:
    found = environment({"RAWMLA_VLLM": "patch"}, SOURCES, works={"what works": NO_GPU}, **VLLM)
    assert dict(found.sections["plug-ins"])["vLLM replaced"] == "nothing that works: see below"
    assert NO_KERNELS in found.problems


@pytest.mark.parametrize(
    ("versions", "variables", "entry_points", "problem"),
    [
        ({}, {"RAWMLA_VLLM": "patch"}, True, "vLLM is not installed"),
        (VLLM, {"RAWMLA_VLLM": "on"}, True, "RAWMLA_VLLM: expected one of patch, backend, got 'on'"),
        (VLLM, {"RAWMLA_VLLM": "patch"}, False, "vLLM does not see the plug-in"),
        (VLLM, {"RAWMLA_VLLM": "patch", "VLLM_PLUGINS": "a, rawmla"}, True, "VLLM_PLUGINS leaves"),
        (VLLM, {"RAWMLA_VLLM": "patch", "VLLM_PLUGINS": ""}, True, "VLLM_PLUGINS leaves"),
        (SGLANG, {"RAWMLA_SGLANG": "patch", "SGLANG_PLUGINS": "a"}, True, "SGLANG_PLUGINS leaves"),
        (SGLANG, {"RAWMLA_SGLANG": "patch"}, False, "SGLang does not see the plug-in"),
        ({"sgl_flash_mla": "1.0.0", "rawmla_flash_mla": "0.1.0"}, {}, True, "own the same files"),
    ],
)
def test_problems(
    environment: Environment, versions: Texts, variables: Texts, entry_points: bool, problem: str
) -> None:
    found = environment(entry_points=entry_points, variables=variables, **versions)
    assert len(found.problems) == 1 and problem in found.problems[0]
    rows = found.sections["plug-ins"]
    assert any(label.endswith("refused") or "see below" in text for label, text in rows) == bool(variables)


@pytest.mark.parametrize(
    ("requirement", "torch", "pinned"),
    [
        ("torch==2.14.0", "2.10.0+cu128", True),
        ("torch (==2.14.0)", "2.10.0", True),
        ("torch==2.14.0 ; platform_system == 'Linux'", "2.10.0", True),
        ("torch==2.14.0", "2.14.0+cu130", False),
        ("torch>=2.4", "2.10.0", False),
        ("torchvision==0.29.0", "2.10.0", False),
        ("torch==2.11.0; extra == 'old'", "2.14.0", False),
    ],
)
def test_a_torch_that_an_engine_does_not_take(
    environment: Environment, requirement: str, torch: str, pinned: bool
) -> None:
    """What `[cu12,torch]` leaves in the environment of an engine."""
    lines = ["Metadata-Version: 2.1", "Name: vllm", "Version: 0.33.0", f"Requires-Dist: {requirement}", ""]
    found = environment(files={"vllm-0.33.0.dist-info/METADATA": "\n".join(lines)}, torch=torch)
    text = f"vLLM 0.33.0 requires torch 2.14.0, and torch {torch} is installed"
    assert [problem.startswith(text) for problem in found.problems] == [True] * pinned
    assert all("`pip install torch==2.14.0`" in problem for problem in found.problems)


NO_GPU = [("run kernels", "no: no driver"), ("torch tensors", "no: a CPU build")]
CONFLICT = [*WORKING["packages"], ("conflict", "two of them")]
NO_KERNELS, NO_TORCH = "Kernels cannot run: no driver", "torch cannot be used: a CPU build"
ANOTHER_CUDA = "torch 2.14.0 is for CUDA 13.0, but rawmla was installed with"


@pytest.mark.parametrize(
    ("versions", "cuda", "works", "problems"),
    [
        ({"cupy_cuda12x": "14.2.0"}, "13.0", {}, [ANOTHER_CUDA]),
        ({"cupy_cuda13x": "14.2.0"}, "13.0", {}, []),
        ({"cupy_cuda12x": "14.2.0"}, "12.8", {}, []),
        ({"cupy_cuda12x": "14.2.0"}, None, {}, []),
        ({"cupy_cuda12x": "14.2.0"}, "13.0", {"packages": CONFLICT}, ["two of them"]),
        ({}, None, {"what works": NO_GPU}, [NO_KERNELS]),
        (VLLM, None, {"what works": NO_GPU}, [NO_KERNELS, NO_TORCH]),
    ],
)
def test_what_does_not_work_is_a_problem(
    environment: Environment, versions: Texts, cuda: str | None, works: Any, problems: list[str]
) -> None:
    """torch matters where there is an engine, which works on its tensors."""
    found = environment(works=works, build=("2.14.0", cuda), **versions).problems
    assert [one.startswith(text) for one, text in zip(found, problems, strict=True)] == [True] * len(problems)


@pytest.mark.parametrize("ours", [True, False])
def test_whose_flash_mla_it_is(environment: Environment, ours: bool) -> None:
    text = (SITE / "flash_mla" / "__init__.py").read_text() if ours else "__version__ = '1.0.0'\n"
    found = environment(files={"flash_mla/__init__.py": text}, lmdeploy="0.12.0")
    whose = dict(found.sections["flash_mla"])["import flash_mla gives"]
    assert whose.startswith("rawmla: " if ours else "another one: ")
    assert bool(found.hints) == (not ours)  # of LMDeploy, which imports it


def test_exit_status(environment: Environment, capsys: CaptureFixture[str], monkeypatch: MonkeyPatch) -> None:
    found = environment(vllm="0.33.0")
    monkeypatch.setattr(doctor, "examine", lambda: found)
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "vLLM" in out and "  hint: To use rawmla in vLLM: RAWMLA_VLLM=patch" in out
    monkeypatch.setattr(doctor, "examine", lambda: found._replace(problems=["Something."], hints=[]))
    assert cli.main(["doctor"]) == 1
    assert "  problem: Something." in capsys.readouterr().out
    monkeypatch.setattr(doctor, "examine", lambda: found._replace(hints=[]))
    assert cli.main(["doctor"]) == 0
    assert capsys.readouterr().out.endswith("what to do\n  nothing\n")
