"""The plug-in in the real vLLM, imported on the CPU (tests/vllm_probe.py); skipped where vLLM is missing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import fresh
import pytest
from test_engines import set_version, write

from rawmla.engines import vllm
from rawmla.engines.plug_in import Engine

ROOT = Path(__file__).resolve().parents[1]


def installed_version(engine: Engine) -> str:
    """Return the engine's version without what follows "+", which names its build; "" without the engine."""
    try:
        return metadata.version(engine.distribution).partition("+")[0]
    except metadata.PackageNotFoundError:
        return ""


def install_entry_points(folder: Path) -> None:
    """Those of pyproject.toml, as an installed rawmla has them."""
    text = (ROOT / "pyproject.toml").read_text()
    sections = re.findall(r'\[project\.entry-points\."([\w.]+)"\]\n(.*\n)', text)
    assert len(sections) == 2
    set_version(folder, "rawmla", "0")
    text = "".join(f"[{group}]\n{line}".replace('"', "") for group, line in sections)
    write(folder, {"rawmla-0.dist-info/entry_points.txt": text})


VERSION = installed_version(vllm.ENGINE)
IMPORTS = f"""
sys.path[:0] = {[str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "gpu")]}
from contracts import record
record.vllm_without_gpu()
"""
pytestmark = pytest.mark.skipif(
    VERSION not in vllm.ENGINE.tested,
    reason=f"needs vLLM {' or '.join(vllm.ENGINE.tested)}, which is not installed",
)


def probe(function: str, *arguments: str, mode: str = "patch", path: Path | None = None) -> Any:
    """What a function of tests/vllm_probe.py finds, in a process of its own."""
    folders = [str(ROOT), *([] if path is None else [str(path)]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders), vllm.ENGINE.variable: mode}
    command = (str(ROOT / "tests" / "vllm_probe.py"), function, *arguments)
    if function in ("before", "flash_attn"):  # vLLM is imported
        start = [sys.executable, *command]
        done = subprocess.run(start, env=environment, capture_output=True, text=True, timeout=300)
    else:
        done = fresh.run(command, ROOT, environment, timeout=300, imports=IMPORTS)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def check_names(found: dict[str, list[str]]) -> None:
    """Every replaced name is in vLLM's module, and every importer has rawmla's."""
    module, _ = vllm.ENGINE.modules
    assert set(found.pop(module.paths[0])) == set(module.replaced)
    assert len(found) >= 4 and all(found.values())


def test_plug_in_is_found_and_patches_what_is_imported_later(tmp_path: Path) -> None:
    """Through vLLM's own loader, by the entry point of pyproject.toml."""
    install_entry_points(tmp_path)
    check_names(probe("before", path=tmp_path))


def test_names_that_were_imported_before_are_rebound() -> None:
    check_names(probe("after"))


def test_fp8_dense_decoding_stays_with_vllm() -> None:
    assert "vllm._flashmla_C is not available" in probe("fp8")


def test_backends_are_selected_on_hopper_and_in_workers() -> None:
    for name, backend in probe("backends", mode="backend").items():
        assert backend["class"] == backend["in a worker"] == vllm.BACKENDS[name]
        kind = "Sparse" if name == "FLASHMLA_SPARSE" else ""
        assert backend["name"] == ("FLASHMLA_SPARSE" if kind else "FLASHMLA")
        assert (backend["builder"], backend["impl"]) == (f"RawMLA{kind}MetadataBuilder", f"RawMLA{kind}Impl")
        for which, reasons in backend["reasons"].items():
            assert reasons == ([] if which.startswith("9 ") else ["compute capability not supported"])


def test_backends_compute_what_their_parents_do() -> None:
    """Without padding and with the query in two parts; all calls are computed by the reference."""
    differences = probe("same_results", mode="")
    assert len(differences) >= 14
    for name, values in differences.items():
        assert values and max(values) == 0.0, name


@pytest.mark.parametrize("invariant", [False, True])
def test_backends_load_kernels_and_reserve_memory(monkeypatch: pytest.MonkeyPatch, invariant: bool) -> None:
    """In the builders, as the operations allow; and the order of magnitude of what calls allocate."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", str(int(invariant)))
    found = probe("preparation", mode="")
    prefill = [["sparse_prefill"], {"prefill_formats": ["bf16"]}]
    assert [call[:2] for call in found["loaded"]] == [
        [["dense_decode", "metadata"], {"dtypes": ["bfloat16"], "d_qk": [576]}],
        prefill,  # over a bf16 cache
        [["sparse_decode", "metadata"], {"sparse_formats": ["v32"]}],
        prefill,
    ]
    assert all(count > 0 for *_, count in found["loaded"])
    dense, sparse, sparse_fp8 = found["reserved"]  # vLLM's kernel reads dense FP8 caches
    results = 256 * 16 * (2 * 512 + 4), 8192 * 16 * (2 * 512 + 4)
    assert sparse == sparse_fp8 and results[0] < dense < 2**28 and results[1] < sparse < 2**30
    assert found["thresholds"] == [1 if invariant else 128] * 4


@pytest.mark.parametrize("engine", ["vllm", "vllm-backend"])
def test_contracts_are_what_this_version_does(engine: str) -> None:
    file = json.loads((ROOT / "tests" / "contracts" / f"{engine}.json").read_text())
    assert probe("recorded", engine, mode="") == [file["calls"][i] for i in file["versions"][VERSION]]


def test_flash_attention_is_patched_where_it_is_imported() -> None:
    found = probe("flash_attn")
    assert len(found) >= 5 and all(found.values())
    assert {one for modules in found.values() for one in modules} == {"rawmla.engines.plug_in"}


def test_flash_attention_is_called_as_recorded() -> None:
    file = json.loads((ROOT / "tests" / "contracts" / "flash_attn" / "vllm.json").read_text())
    assert probe("recorded_flash_attn", mode="") == [file["calls"][i] for i in file["versions"][VERSION]]
