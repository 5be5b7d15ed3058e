"""The plug-in in the real SGLang, imported on the CPU; skipped where SGLang is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fresh
import pytest
from test_vllm import install_entry_points, installed_version

from rawmla.engines import sglang

ROOT = Path(__file__).resolve().parents[1]
MODULE = sglang.ENGINE.modules[0]
LOAD = """\
import functools, importlib.machinery, importlib.util, json, sys, types
from rawmla.engines import sglang
module = sglang.ENGINE.modules[0]
if module.path == "sgl_kernel.flash_mla":  # whose package loads libraries
    package = types.ModuleType("sgl_kernel")
    package.__spec__ = importlib.util.find_spec("sgl_kernel")
    package.__path__ = package.__spec__.submodule_search_locations
    sys.modules["sgl_kernel"] = package
jit = types.ModuleType("sglang.kernels.jit.utils")  # the package looks for C++ files
jit.cache_once = functools.cache
sys.modules[jit.__name__] = jit
io = types.ModuleType("torchvision.io")  # a build of torchvision takes one build of torch
io.decode_jpeg = None
sys.modules["torchvision"] = types.ModuleType("torchvision")
sys.modules["torchvision"].__spec__ = importlib.machinery.ModuleSpec("torchvision", None)
sys.modules[io.__name__] = io
from sglang.srt.plugins import load_plugins
load_plugins(), load_plugins()
import torch
interface = importlib.import_module(module.path)
from rawmla.compat import sgl_kernel
seen = []
for name in module.replaced:
    setattr(sgl_kernel, name, lambda *args, _name=name, **kwargs: seen.append(_name))
interface.get_mla_metadata()
interface.flash_mla_with_kvcache(torch.zeros(1).bfloat16(), None, None, None, 512, None)
interface.flash_mla_sparse_fwd(None, None, None, 1.0)
import sglang.kernels.ops.attention.flash_attention as flash_attention
from rawmla.compat import engine_calls
flash_attention.fa3_flash_attn_with_kvcache = lambda *args, **kwargs: seen.append("SGLang's")
flash_attention.flash_attn_with_kvcache(torch.zeros(1, 1, 8), None, None)
seen.extend(engine_calls._passed_on)
print(json.dumps([seen, torch.cuda.is_initialized()]))
"""


VERSION = installed_version(sglang.ENGINE)
pytestmark = pytest.mark.skipif(
    VERSION not in sglang.ENGINE.tested,
    reason=f"needs SGLang {' or '.join(sglang.ENGINE.tested)}, which is not installed",
)


def test_plug_in_is_found_and_hooks(tmp_path: Path) -> None:
    """Through SGLang's own loader and HookRegistry."""
    install_entry_points(tmp_path)
    folders = [str(ROOT), str(tmp_path), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders), sglang.ENGINE.variable: "patch"}
    done = subprocess.run(
        [sys.executable, "-c", LOAD], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    seen, uses_cuda = json.loads(done.stdout.splitlines()[-1])
    *names, original, passed_on = seen
    assert names == list(MODULE.replaced) and original == "SGLang's" and not uses_cuda
    assert passed_on.startswith("rawmla: flash_attn_with_kvcache goes on") and "no page_table" in passed_on


@pytest.mark.parametrize("script, file", [("record", "sglang"), ("record_flash_attn", "flash_attn/sglang")])
def test_contracts_are_what_this_version_does(tmp_path: Path, script: str, file: str) -> None:
    """The script that wrote the file, run again."""
    contracts = ROOT / "tests" / "contracts"
    folders = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    command = (str(contracts / f"{script}.py"), "sglang", "--out", str(tmp_path))
    done = fresh.run(command, ROOT, {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    recorded = json.loads((tmp_path / "sglang.json").read_text())
    stored = json.loads((contracts / f"{file}.json").read_text())
    assert list(recorded["versions"]) == [VERSION]
    assert calls_of(recorded) == calls_of(stored)


def calls_of(file: dict[str, Any]) -> list[dict[str, Any]]:
    """What the installed version calls."""
    return [file["calls"][i] for i in file["versions"][VERSION]]
