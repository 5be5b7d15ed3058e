"""The plug-ins for vLLM and SGLang in small packages of those names; tests/test_vllm.py has the real vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fresh
import pytest

from rawmla.engines import sglang, vllm

ROOT = Path(__file__).resolve().parents[1]
DECODE = str(vllm.ENGINE.replaced["flash_mla_with_kvcache"]).replace(
    ", num_splits", ", num_splits=None, *", 1
)
INTERFACE = f"""\
from vllm.platforms import current_platform
def _is_flashmla_available(): return False, "not compiled"
def is_flashmla_dense_supported(): return _is_flashmla_available()
def is_flashmla_sparse_supported(): return _is_flashmla_available()
class FlashMLASchedMeta: pass
def get_mla_metadata(*args, **kwargs): raise RuntimeError("vLLM's")
def flash_mla_with_kvcache({DECODE}): raise RuntimeError("vLLM's")
def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None, out=None):
    raise RuntimeError("vLLM's")
def get_mla_metadata_dense_fp8(): pass
def flash_mla_with_kvcache_fp8(): pass
"""
PLATFORM = """\
import os
class current_platform:
    is_cuda = staticmethod(lambda: True)
    is_device_capability_family = staticmethod(lambda family: family == int(os.environ.get("FAMILY", "90")))
"""
REGISTRY = """\
import enum
AttentionBackendEnum = enum.Enum("AttentionBackendEnum", "FLASHMLA FLASHMLA_SPARSE CUSTOM TRITON_MLA")
overrides = {}
def register_backend(backend, class_path=None):
    overrides[backend.name] = class_path
"""
NAMES = """\
from vllm.v1.attention.ops.flashmla import *
from vllm.v1.attention.ops.flashmla import _is_flashmla_available
"""
PROBE = """\
import json, logging, sys
logging.basicConfig(format="%(levelname)s %(message)s", stream=sys.stderr)
def state():
    import vllm.v1.attention.ops.flashmla as interface, vllm.v1.attention.backends.mla.flashmla as importer
    from rawmla.engines.vllm import ENGINE
    names = [*ENGINE.replaced, "get_mla_metadata_dense_fp8", "flash_mla_with_kvcache_fp8"]
    names.append("_is_flashmla_available")
    same = all(getattr(interface, name) is getattr(importer, name) for name in names)
    ours = [name for name in names if getattr(interface, name).__module__.startswith("rawmla.")]
    answers = [interface.is_flashmla_dense_supported(), interface.is_flashmla_sparse_supported()]
    watchers = sum(getattr(finder, "name", "") == ENGINE.module for finder in sys.meta_path)
    torch = sys.modules.get("torch")
    cuda = torch is not None and torch.cuda.is_initialized()
    return {"ours": ours, "same": same, "answers": answers, "watchers": watchers, "cuda": cuda}
"""


def write(root: Path, files: dict[str, str]) -> None:
    """A tree of files, packages included."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        for folder in path.relative_to(root).parents:
            if path.suffix == ".py" and folder != Path("."):
                (root / folder / "__init__.py").touch()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A vLLM 0.33.0 of six modules."""
    write(
        tmp_path,
        {
            "vllm/platforms/__init__.py": PLATFORM,
            "vllm/v1/attention/ops/flashmla.py": INTERFACE,
            "vllm/v1/attention/backends/mla/flashmla.py": NAMES,
            "vllm/v1/attention/backends/registry.py": REGISTRY,
        },
    )
    set_version(tmp_path, "vllm", "0.33.0")
    return tmp_path


def set_version(root: Path, name: str, version: str) -> None:
    """Metadata as of an installed distribution."""
    for old in root.glob(f"{name}-*.dist-info"):
        (old / "METADATA").unlink()
        old.rmdir()
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    write(root, {f"{name}-{version}.dist-info/METADATA": text})


def run(
    root: Path, code: str, mode: str | None = "patch", start: bool = False, **variables: str
) -> tuple[Any, str]:
    """What a process of its own prints as JSON, and its log; `start`: one that has not imported torch."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(ROOT)]), **variables}
    environment.pop(vllm.ENGINE.variable, None)
    if mode is not None:
        environment[vllm.ENGINE.variable] = mode
    script = root / "probe.py"
    script.write_text(
        PROBE + "if __name__ == '__main__':\n" + "".join(f"    {line}\n" for line in code.splitlines())
    )
    if start:
        command = [sys.executable, str(script)]
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=120)
    else:
        done = fresh.run((str(script),), root, environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


BEFORE = "from rawmla.engines.vllm import register; register(); print(json.dumps(state()))"
AFTER = "state(); from rawmla.engines.vllm import register; register(); print(json.dumps(state()))"
PATCHED = {
    "ours": list(vllm.ENGINE.replaced),
    "same": True,
    "answers": [[True, None], [True, None]],
    "cuda": False,
}
UNPATCHED = {"ours": [], "same": True, "answers": [[False, "not compiled"]] * 2, "cuda": False}


@pytest.mark.parametrize("version", ["0.33.0", "0.34.1"])
@pytest.mark.parametrize(("code", "watchers"), [(BEFORE, 1), (AFTER, 0)], ids=["before", "after"])
def test_patch(tree: Path, code: str, watchers: int, version: str) -> None:
    """Whether the plug-in runs before vLLM's module is imported, or after it and what imports its names.
    An unknown version with the same names is patched too.
    """
    set_version(tree, "vllm", version)
    got, log = run(tree, "logging.getLogger('vllm').setLevel('INFO'); " + code)
    assert got == {**PATCHED, "watchers": watchers}
    assert log.startswith("INFO rawmla: FlashMLASchedMeta, ") and f"(vLLM {version})" in log
    assert log.count("\n") == 1


def test_register_may_be_called_again(tree: Path) -> None:
    """vLLM's own functions stay known. Its plans are objects, whatever other callers of flash_mla get."""
    code = (
        "from rawmla.engines import vllm\nvllm.register(); vllm.register(); first = state()\n"
        "vllm.register(); interface = sys.modules[vllm.ENGINE.module]\n"
        "plan, _ = interface.get_mla_metadata(1, 2, 1, is_fp8_kvcache=True)\n"
        "originals = {f.__module__ for f in interface.__rawmla_originals__.values()}\n"
        "print(json.dumps([first, state(), [*originals], type(plan).__name__]))"
    )
    (first, second, originals, plan), log = run(tree, code, RAWMLA_FLASH_MLA_API="tensors")
    assert first == second == {**PATCHED, "watchers": 1} and log == ""
    assert originals == [vllm.ENGINE.module] and plan == "FlashMLASchedMeta"


def test_register_is_cheap(tree: Path) -> None:
    """vLLM calls it in every process: nothing of vLLM, of torch or of the kernels is imported for it."""
    code = (
        "import time; before = set(sys.modules); start = time.perf_counter()\n"
        "from rawmla.engines.vllm import register; register(); seconds = time.perf_counter() - start\n"
        "print(json.dumps([seconds, sorted(set(sys.modules) - before)]))"
    )
    (seconds, loaded), _ = run(tree, code, start=True)
    heavy = ("torch", "cupy", "cuda", "vllm", "numpy", "rawmla.mla", "rawmla.compat", "rawmla.jit")
    assert not [name for name in loaded if name.startswith(heavy)]
    assert seconds < 0.5


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ("topk_length=None, out=None):", "topk_length=None, out=None, more=1):", "flash_mla_sparse_fwd"),
        ("def get_mla_metadata(*args", "def get_metadata(*args", "get_mla_metadata"),
        ("class FlashMLASchedMeta: pass", "FlashMLASchedMeta = None", "FlashMLASchedMeta"),
    ],
    ids=["parameter", "function", "class"],
)
def test_an_unknown_version_with_other_names_is_left_alone(tree: Path, old: str, new: str, name: str) -> None:
    set_version(tree, "vllm", "0.34.1")
    assert old in INTERFACE
    write(tree, {"vllm/v1/attention/ops/flashmla.py": INTERFACE.replace(old, new)})
    code = (
        "from rawmla.engines.vllm import register; register()\nimport vllm.v1.attention.ops.flashmla as m\n"
    )
    code += "register(); print(json.dumps([getattr(v, '__module__', '') for v in vars(m).values()]))"
    modules, log = run(tree, code)
    assert not [module for module in modules if str(module).startswith("rawmla")]
    assert log.count("WARNING") == 1 and "vLLM 0.34.1" in log and f": {name}. Unset RAWMLA_VLLM" in log


NO_PLATFORM = {
    "v1/attention/ops/flashmla.py": INTERFACE.replace("from vllm.platforms import current_platform\n", ""),
    "platforms/__init__.py": "",
}


@pytest.mark.parametrize(
    ("mode", "files", "variables", "text"),
    [
        (None, {}, {}, ""),
        ("", {}, {}, ""),
        ("patch", {}, {"RAWMLA_FLASH_MLA_API": "nonsense"}, "RAWMLA_FLASH_MLA_API: expected"),
        ("patch", NO_PLATFORM, {}, "vLLM is left as it is. AttributeError: "),
        ("patch", {}, {"FAMILY": "100"}, "vLLM is left as it is. rawmla's kernels are for Hopper"),
        ("pach", {}, {}, "RAWMLA_VLLM: expected one of patch, backend, got 'pach'"),
    ],
    ids=["not asked for", "empty", "variable", "version", "GPU", "mode"],
)
def test_vllm_is_left_alone(
    tree: Path, mode: str | None, files: dict[str, str], variables: dict[str, str], text: str
) -> None:
    set_version(tree, "vllm", "0.34.1")
    write(tree, {f"vllm/{name}": content for name, content in files.items()})
    got, log = run(tree, BEFORE, mode, **variables)
    assert got == {**UNPATCHED, "watchers": int(mode == "patch")}
    assert log.count("\n") == log.count("WARNING") == bool(text) and text in log


SPAWN = """\
import multiprocessing
if __name__ != "__main__":
    sys.modules["torch"] = None  # importing it takes seconds
from rawmla.engines.vllm import register
register()
def child(queue):
    register()
    queue.put(state())
if __name__ == "__main__":
    context = multiprocessing.get_context("{method}")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    got = queue.get(timeout=60)
    process.join()
    print(json.dumps(got))
"""


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_children_are_patched(tree: Path, method: str) -> None:
    (tree / "children.py").write_text(PROBE + SPAWN.format(method=method))
    code = f"import runpy; runpy.run_path({str(tree / 'children.py')!r}, run_name='__main__')"
    got, _ = run(tree, code)
    assert got == {**PATCHED, "watchers": 1}


@pytest.mark.parametrize(
    ("version", "broken", "text"),
    [
        ("0.33.0", False, ""),
        ("0.34.1", False, "use RAWMLA_VLLM=patch"),
        ("0.33.0", True, "OSError: no library"),
    ],
)
def test_backends(tree: Path, version: str, broken: bool, text: str) -> None:
    """Those of a tested version are registered too; elsewhere the log says why not."""
    set_version(tree, "vllm", version)
    if broken:
        failing = "overrides = {}\nraise OSError('no library')\n"
        write(tree, {"vllm/v1/attention/backends/registry.py": failing})
    code = (
        "from rawmla.engines.vllm import register; register(); register(); found = state()['ours']\n"
        "registry = sys.modules.get('vllm.v1.attention.backends.registry')\n"
        "print(json.dumps([found, registry.overrides if registry else {}]))"
    )
    (ours, overrides), log = run(tree, code, "backend")
    assert ours == list(vllm.ENGINE.replaced) and overrides == ({} if text else vllm.BACKENDS)
    assert log.count("WARNING rawmla: vLLM's attention backends are left as they are.") == bool(text)
    assert log.count("WARNING") == bool(text) and text in log


@pytest.mark.parametrize("plug_in", [vllm, sglang])
def test_versions(plug_in: Any) -> None:
    (version, *_) = plug_in.ENGINE.tested
    assert plug_in.ENGINE.is_tested(version) and plug_in.ENGINE.is_tested(version + "+cu129")
    assert not plug_in.ENGINE.is_tested(None) and not plug_in.ENGINE.is_tested(version + ".post1")


# ---- SGLang

INTERFACE_OF_SGLANG = sglang.ENGINE.module.replace(".", "/") + ".py"
HOOKS = """\
import enum, importlib
class HookType(enum.Enum):
    AROUND = "around"
class HookRegistry:
    hooks = []
    @classmethod
    def register(cls, target, hook, kind):
        cls.hooks.append((target, hook.__module__, kind.value))
"""
SGLANG = """\
import flash_mla
from flash_mla.flash_mla_interface import FlashMLASchedMeta
def get_mla_metadata({}): pass
def flash_mla_with_kvcache({}): pass
def flash_mla_sparse_fwd({}): pass
""".format(*(text.replace(", use_legacy", ", *, use_legacy") for text in sglang.ENGINE.replaced.values()))
SGLANG_CODE = """\
from rawmla.engines.sglang import register; register(); register()
from sglang.srt.plugins.hook_registry import HookRegistry
print(json.dumps([HookRegistry.hooks, "flash_mla" in sys.modules]))
"""
FLASH_ATTN_OF_SGLANG = sglang.FLASH_ATTN.module.replace(".", "/") + ".py"
SGLANG_FLASH_ATTN = "def flash_attn_with_kvcache({}, ver=3, mask_mod=None): pass\n".format(
    str(sglang.FLASH_ATTN.replaced["flash_attn_with_kvcache"]).removesuffix(", ...")
).replace(", k, v", ", k=None, v=None, *")
HOOKED = [
    [f"{sglang.ENGINE.module}.{name}", "rawmla.engines.sglang", "around"] for name in sglang.ENGINE.replaced
]
HOOKED_FLASH_ATTN = [
    [f"{sglang.FLASH_ATTN.module}.{name}", "rawmla.compat.sglang_flash_attn", "around"]
    for name in sglang.FLASH_ATTN.replaced
]


@pytest.fixture
def sglang_tree(tmp_path: Path) -> Path:
    """An SGLang 0.5.23 of three modules, and no flash_mla."""
    write(
        tmp_path,
        {
            "sglang/srt/plugins/hook_registry.py": HOOKS,
            INTERFACE_OF_SGLANG: SGLANG,
            FLASH_ATTN_OF_SGLANG: SGLANG_FLASH_ATTN,
        },
    )
    set_version(tmp_path, "sglang", "0.5.23")
    return tmp_path


def test_sglang_is_hooked_once(sglang_tree: Path) -> None:
    """Where no flash_mla is installed, rawmla's takes its place: SGLang's module imports it."""
    pytest.importorskip("torch")
    (hooks, imported), log = run(sglang_tree, SGLANG_CODE, RAWMLA_SGLANG="patch")
    assert hooks == HOOKED + HOOKED_FLASH_ATTN and imported and log == ""


@pytest.mark.parametrize(
    ("mode", "files", "hooks", "texts"),
    [
        ("", {}, [], []),
        ("backend", {}, [], ["RAWMLA_SGLANG: expected patch, got 'backend'"]),
        (
            *("patch", {INTERFACE_OF_SGLANG: SGLANG.replace("kv_format", "layout")}, HOOKED_FLASH_ATTN),
            ["parameters: flash_mla_with_kvcache. Unset RAWMLA_SGLANG"],
        ),
        (
            *("patch", {FLASH_ATTN_OF_SGLANG: SGLANG_FLASH_ATTN.replace("sinks", "sink")}, HOOKED),
            ["parameters: flash_attn_with_kvcache. Unset RAWMLA_SGLANG"],
        ),
        (
            *("patch", {INTERFACE_OF_SGLANG: "import no_such_module\n"}, HOOKED_FLASH_ATTN),
            ["cannot be imported: No module named 'no_such_module'"],
        ),
        ("patch", {INTERFACE_OF_SGLANG: "raise OSError('no library')\n"}, HOOKED_FLASH_ATTN, ["no library"]),
        (
            *("patch", {"sglang/srt/plugins/hook_registry.py": "HookRegistry = None\n"}, []),
            [f"{sglang.ENGINE.module} of SGLang is left as it is. ", sglang.FLASH_ATTN.module],
        ),
    ],
)
def test_sglang_is_left_alone(
    sglang_tree: Path, mode: str, files: dict[str, str], hooks: list[Any], texts: list[str]
) -> None:
    """Each module by itself, where it is not as expected."""
    pytest.importorskip("torch")
    set_version(sglang_tree, "sglang", "0.6.0")
    write(sglang_tree, files)
    code = (
        "from rawmla.engines.sglang import register; register()\n"
        "registry = sys.modules.get('sglang.srt.plugins.hook_registry')\n"
        "print(json.dumps(getattr(registry and registry.HookRegistry, 'hooks', [])))"
    )
    got, log = run(sglang_tree, code, RAWMLA_SGLANG=mode)
    assert got == hooks and all(text in log for text in texts)
    assert log.count("rawmla: ") == len(texts)


def test_fp8_dense_decoding_stays_with_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    from rawmla.compat import sgl_kernel

    calls: list[Any] = []
    for name in sglang.ENGINE.replaced:
        monkeypatch.setattr(sgl_kernel, name, lambda *a, _name=name, **k: calls.append((_name, a, k)))

    def original(*args: Any, **kwargs: Any) -> str:
        return "original"

    fp8, bf16 = SimpleNamespace(element_size=lambda: 1), SimpleNamespace(element_size=lambda: 2)
    assert sglang._get_mla_metadata(original, "lengths", 16, 1, is_fp8_kvcache=True) == "original"
    assert sglang._flash_mla_with_kvcache(original, fp8, "cache", descale_q=1) == "original"
    assert sglang._flash_mla_with_kvcache(original, q=fp8, k_cache="cache") == "original"
    assert calls == []
    sglang._get_mla_metadata(original)
    sglang._get_mla_metadata(original, cache_seqlens="lengths", num_q_tokens_per_head_k=16, topk=2048)
    sglang._flash_mla_with_kvcache(original, q=bf16, k_cache="cache", kv_format=None)
    sglang._flash_mla_sparse_fwd(original, bf16, "kv", use_legacy=True)
    assert calls == [
        ("get_mla_metadata", (None, None, None, None, False, None), {}),
        ("get_mla_metadata", ("lengths", 16, None, None, False, 2048), {}),
        ("flash_mla_with_kvcache", (bf16,), {"k_cache": "cache", "kv_format": None}),
        ("flash_mla_sparse_fwd", (bf16, "kv"), {"use_legacy": True}),
    ]
