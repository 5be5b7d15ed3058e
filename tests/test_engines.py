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
(MODULE, _), (MODULE_OF_SGLANG, _) = vllm.ENGINE.modules, sglang.ENGINE.modules
(PATH,) = MODULE.paths
DECODE = (
    "q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None, "
    "softmax_scale=None, causal=False, is_fp8_kvcache=False, indices=None, attn_sink=None, "
    "extra_k_cache=None, extra_indices_in_kvcache=None, topk_length=None, extra_topk_length=None, out=None"
)
SPARSE = "flash_mla_sparse_fwd"
INTERFACE = f"""\
from typing import TYPE_CHECKING, overload
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
FIRST, LAST = "def _is_flashmla_available()", "def get_mla_metadata_dense_fp8()"
FILE_OF_FLASH_ATTN = vllm.ENGINE.modules[1].paths[0].replace(".", "/") + ".py"
FLASH_ATTN = """\
def get_scheduler_metadata(
    batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens, qkv_dtype=1,
    headdim_v=None, num_splits=0
): return "vLLM's plan"
def flash_attn_varlen_func(
    q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k=None, seqused_k=None, q_v=None,
    dropout_p=0.0, softmax_scale=None, causal=False, window_size=None, softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False, block_table=None, return_softmax_lse=False, out=None,
    scheduler_metadata=None, q_descale=None, k_descale=None, v_descale=None, num_splits=0, output_scale=None,
    fa_version=2, s_aux=None, cp_world_size=1, cp_rank=0, cp_tot_seqused_k=None, mask_mod=None
): pass
def is_fa_version_supported(fa_version): return True
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
PARENTS = """\
class AttentionBackend:
    @staticmethod
    def get_builder_cls(): pass
    @staticmethod
    def get_impl_cls(): pass
    @classmethod
    def supports_combination(cls, head_size, dtype, kv_cache_dtype, block_size): pass
class FlashMLABackend(AttentionBackend): pass
class Builder:
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device): pass
    def _init_reorder_batch_threshold(
        self, reorder_batch_threshold=1, supports_spec_as_decode=False, supports_dcp_with_varlen=False
    ): pass
class FlashMLAMetadataBuilder(Builder): pass
class FlashMLAImpl:
    def forward_mqa(self, q, kv_c_and_k_pe_cache, attn_metadata, layer): pass
"""
UTILS = """\
def reshape_attn_output_for_spec_decode(attn_output): pass
"""
LAYER = """\
class MLAAttention:
    def forward_impl(self, q, k_c_normed, k_pe, kv_cache, attn_metadata, output, output_scale=None): pass
"""
VLLM = {
    "vllm/platforms/__init__.py": PLATFORM,
    "vllm/v1/attention/ops/flashmla.py": INTERFACE,
    FILE_OF_FLASH_ATTN: FLASH_ATTN,
    "vllm/v1/attention/backends/mla/flashmla.py": NAMES + PARENTS,
    "vllm/v1/attention/backends/mla/flashmla_sparse.py": PARENTS.replace(
        "class FlashMLA", "class FlashMLASparse"
    ),
    "vllm/v1/attention/backends/registry.py": REGISTRY,
    "vllm/v1/attention/backends/utils.py": UTILS,
    "vllm/model_executor/layers/attention/mla_attention.py": LAYER,
    "vllm/v1/kv_cache_interface.py": "def is_quantized_kv_cache(kv_cache_dtype): pass\n",
}
PROBE = """\
import json, logging, sys
logging.basicConfig(format="%(levelname)s %(message)s", stream=sys.stderr)
def state():
    import vllm.v1.attention.ops.flashmla as interface, vllm.v1.attention.backends.mla.flashmla as importer
    from rawmla.engines.vllm import ENGINE
    names = [*ENGINE.modules[0].replaced, "get_mla_metadata_dense_fp8", "flash_mla_with_kvcache_fp8"]
    names.append("_is_flashmla_available")
    same = all(getattr(interface, name) is getattr(importer, name) for name in names)
    ours = [name for name in names if getattr(interface, name).__module__.startswith("rawmla.")]
    answers = [interface.is_flashmla_dense_supported(), interface.is_flashmla_sparse_supported()]
    watchers = sum(getattr(finder, "name", "") == ENGINE.modules[0].path for finder in sys.meta_path)
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
    """A vLLM 0.33.0 of some modules."""
    write(tmp_path, VLLM)
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
    "ours": list(MODULE.replaced),
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
        "vllm.register(); interface = sys.modules[vllm.ENGINE.modules[0].path]\n"
        "plan, _ = interface.get_mla_metadata(1, 2, 1, is_fp8_kvcache=True)\n"
        "originals = {f.__module__ for f in interface.__rawmla_originals__.values()}\n"
        "print(json.dumps([first, state(), [*originals], type(plan).__name__]))"
    )
    (first, second, originals, plan), log = run(tree, code, RAWMLA_FLASH_MLA_API="tensors")
    assert first == second == {**PATCHED, "watchers": 1} and log == ""
    assert originals == [PATH] and plan == "FlashMLASchedMeta"


def test_register_is_cheap(tree: Path) -> None:
    """vLLM calls it in every process: nothing of vLLM, of torch or of the kernels is imported for it."""
    code = (
        "import time; before = set(sys.modules); start = time.process_time()\n"
        "from rawmla.engines.vllm import register; register(); seconds = time.process_time() - start\n"
        "print(json.dumps([seconds, sorted(set(sys.modules) - before)]))"
    )
    (seconds, loaded), _ = run(tree, code, start=True)
    heavy = ("torch", "cupy", "cuda", "vllm", "numpy", "rawmla.mla", "rawmla.compat", "rawmla.jit")
    assert not [name for name in loaded if name.startswith(heavy)]
    assert seconds < 0.5


def patched_names(tree: Path) -> tuple[list[str], str]:
    """What the plug-in replaces in vLLM's module, and the log."""
    code = "from rawmla.engines.vllm import register; register()\n"
    code += f"import {PATH} as m; register()\n"
    code += "ours = [k for k, v in vars(m).items() if getattr(v, '__module__', '').startswith('rawmla.')]\n"
    got, log = run(tree, code + "print(json.dumps(ours))")
    return got, log


@pytest.mark.parametrize(
    ("old", "new", "different"),
    [
        ("512, attn_sink=None, topk_length=None, out=None", "512, more=1", f"{SPARSE} (more)"),
        ("512, attn_sink=None, topk_length=None, out=None", "512, *, a=1, **b", f"{SPARSE} (a, **b)"),
        ("sm_scale, d_v=512", "d_v, sm_scale", f"{SPARSE} (d_v, sm_scale)"),
        ("sm_scale, d_v=512", "sm_scale=1, d_v=512", f"{SPARSE} (sm_scale)"),
        ("def get_mla_metadata(*args", "def get_metadata(*args", "get_mla_metadata (missing)"),
        ("class FlashMLASchedMeta: pass", "FlashMLASchedMeta = None", "FlashMLASchedMeta (missing)"),
        (LAST, f"def {SPARSE}(q, kv, indices, sm_scale, more): pass\n{LAST}", f"{SPARSE} (more)"),
        (LAST, f"get_mla_metadata = print\n{LAST}", "get_mla_metadata (missing)"),
    ],
    ids=["parameter", "keywords", "order", "required", "function", "class", "defined again", "assigned"],
)
def test_other_names_and_parameters_are_left_alone(tree: Path, old: str, new: str, different: str) -> None:
    assert old in INTERFACE
    write(tree, {"vllm/v1/attention/ops/flashmla.py": INTERFACE.replace(old, new)})
    ours, log = patched_names(tree)
    assert ours == [] and log.count("WARNING") == 1
    assert log.startswith(f"WARNING rawmla: vLLM's {PATH} is left as it is. vLLM 0.33.0 has other names ")
    assert f": in {PATH}, {different}. Install a tested version: " in log


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("out=None):\n", "out=None, *, use_legacy=False):\n"),
        (", topk_length=None, out=None):\n", "):\n"),
        ("(q, kv, indices", "(q: int, kv: list[int], indices"),
        (FIRST, f"@overload\ndef {SPARSE}(q, more): ...\n{FIRST}"),
        (FIRST, f"if TYPE_CHECKING:\n    from .elsewhere import {SPARSE}\n{FIRST}"),
    ],
    ids=["more", "fewer", "annotations", "overload", "for type checkers"],
)
def test_known_parameters_are_served(tree: Path, old: str, new: str) -> None:
    """More that rawmla's functions have, and fewer than they have."""
    write(tree, {"vllm/v1/attention/ops/flashmla.py": INTERFACE.replace(old, new)})
    ours, log = patched_names(tree)
    assert sorted(ours) == sorted(MODULE.replaced) and log == ""


def test_imported_functions_are_followed(tree: Path) -> None:
    """vLLM's module imports FlashMLA's functions where its extension is there. They count also elsewhere."""
    functions = INTERFACE.partition("class FlashMLASchedMeta")
    text = """\
if _is_flashmla_available()[0]:
    from vllm.third_party.flash_mla import FlashMLASchedMeta, metadata as get_mla_metadata
    from ....third_party.flash_mla import flash_mla_with_kvcache, flash_mla_sparse_fwd
else:
    class FlashMLASchedMeta: pass
    def unavailable(*_args, **_kwargs): raise RuntimeError("vLLM's")
    flash_mla_sparse_fwd = flash_mla_with_kvcache = get_mla_metadata = unavailable
"""
    imported = (functions[1] + functions[2]).replace("def get_mla_metadata(", "def metadata(")
    available = functions[0].replace('False, "not compiled"', "True, None")
    write(tree, {"vllm/third_party/flash_mla.py": imported, f"{PATH.replace('.', '/')}.py": available + text})
    ours, log = patched_names(tree)
    assert sorted(ours) == sorted(MODULE.replaced) and log == ""


def test_a_module_that_is_gone_is_named(tree: Path) -> None:
    (tree / "vllm/v1/attention/ops/flashmla.py").rename(tree / "vllm/v1/attention/ops/flash_mla.py")
    code = "from rawmla.engines.vllm import register; register(); print(json.dumps(list(sys.modules)))"
    loaded, log = run(tree, code)
    assert f"expects: {PATH} (missing). Install" in log and "vllm" not in loaded


NO_PLATFORM = {"vllm/platforms/__init__.py": ""}
WITHOUT_CUPY = {"vllm/__init__.py": "import sys; sys.modules['cupy'] = None"}


@pytest.mark.parametrize(
    ("mode", "files", "variables", "text"),
    [
        (None, {}, {}, ""),
        ("", {}, {}, ""),
        ("patch", {}, {"RAWMLA_FLASH_MLA_API": "nonsense"}, "RAWMLA_FLASH_MLA_API: expected"),
        ("patch", NO_PLATFORM, {}, f"vLLM's {PATH} is left as it is. ImportError: "),
        ("patch", {}, {"FAMILY": "100"}, f"vLLM's {PATH} is left as it is. rawmla's kernels are for Hopper"),
        ("patch", WITHOUT_CUPY, {}, f"vLLM's {PATH} is left as it is. Kernels need CuPy; install it with"),
        ("pach", {}, {}, "RAWMLA_VLLM: expected one of patch, backend, got 'pach'"),
    ],
    ids=["not asked for", "empty", "variable", "version", "GPU", "CuPy", "mode"],
)
def test_vllm_is_left_alone(
    tree: Path, mode: str | None, files: dict[str, str], variables: dict[str, str], text: str
) -> None:
    write(tree, files)
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


BACKENDS = "vllm/v1/attention/backends"


@pytest.mark.parametrize(
    ("file", "old", "new", "text"),
    [
        ("registry.py", "", "", ""),
        ("registry.py", "overrides = {}", "raise OSError('no library')", "OSError: no library"),
        ("registry.py", "class_path=None", "path=None", "register_backend (class_path)"),
        ("mla/flashmla.py", "attn_metadata, layer", "attn_metadata", "FlashMLAImpl.forward_mqa (layer)"),
        ("mla/flashmla.py", "layer):", "layer, more=1):", "FlashMLAImpl.forward_mqa (more)"),
        ("mla/flashmla.py", "get_impl_cls", "get_impl", "FlashMLABackend.get_impl_cls (missing)"),
        (
            "mla/flashmla.py",
            "class FlashMLAImpl",
            "class Impl",
            "FlashMLAImpl (missing), FlashMLAImpl.forward",
        ),
        (
            "utils.py",
            "(attn_output)",
            "(output)",
            "reshape_attn_output_for_spec_decode (attn_output, output)",
        ),
    ],
)
def test_backends(tree: Path, file: str, old: str, new: str, text: str) -> None:
    """They are registered if the parents' methods fit; elsewhere the log says why not, and patch is done."""
    path = tree / BACKENDS / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new) if old else path.read_text())
    code = (
        "from rawmla.engines.vllm import register; register(); register(); found = state()['ours']\n"
        "registry = sys.modules.get('vllm.v1.attention.backends.registry')\n"
        "print(json.dumps([found, registry.overrides if registry else {}]))"
    )
    (ours, overrides), log = run(tree, code, "backend")
    assert ours == list(MODULE.replaced) and overrides == ({} if text else vllm.BACKENDS)
    assert log.count("WARNING rawmla: vLLM's list of attention backends is left as it is. ") == bool(text)
    assert log.count("WARNING") == bool(text) and text in log
    assert log.count("Set RAWMLA_VLLM=patch, or install a tested") == ("(" in text)


@pytest.mark.parametrize("plug_in", [vllm, sglang])
def test_versions(plug_in: Any) -> None:
    (version, *_) = plug_in.ENGINE.tested
    assert plug_in.ENGINE.is_tested(version) and plug_in.ENGINE.is_tested(version + "+cu129")
    assert not plug_in.ENGINE.is_tested(None) and not plug_in.ENGINE.is_tested(version + ".post1")


# ---- SGLang

INTERFACE_OF_SGLANG, OLD_INTERFACE = (f"{path.replace('.', '/')}.py" for path in MODULE_OF_SGLANG.paths)
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
OLD_SGLANG = """\
def get_mla_metadata(
    cache_seqlens=None, num_q_tokens_per_head_k=None, num_heads_k=None, num_heads_q=None,
    is_fp8_kvcache=False, topk=None
): pass
def flash_mla_with_kvcache(
    q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None,
    softmax_scale=None, causal=False, descale_q=None, descale_k=None, is_fp8_kvcache=False, indices=None,
    attn_sink=None, extra_k_cache=None, extra_indices_in_kvcache=None, topk_length=None,
    extra_topk_length=None
): pass
def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None): pass
"""
SGLANG = (
    "import flash_mla\nfrom flash_mla.flash_mla_interface import FlashMLASchedMeta\n"
    + OLD_SGLANG.replace("topk_length=None): pass", "topk_length=None, *, use_legacy=True): pass").replace(
        "extra_topk_length=None\n", "extra_topk_length=None, kv_format=None, *, use_legacy=True\n"
    )
)
SGLANG_CODE = """\
from rawmla.engines.sglang import register; register(); register()
from sglang.srt.plugins.hook_registry import HookRegistry
print(json.dumps([HookRegistry.hooks, "flash_mla" in sys.modules]))
"""


FLASH_ATTN_OF_SGLANG = sglang.ENGINE.modules[1].paths[0]
FILE_OF_SGLANG_FLASH_ATTN = FLASH_ATTN_OF_SGLANG.replace(".", "/") + ".py"
SGLANG_FLASH_ATTN = """\
def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
    cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
    max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None,
    softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=None, softcap=0.0,
    rotary_interleaved=True, scheduler_metadata=None, num_splits=0, pack_gqa=None, only_qv=False, sm_margin=0,
    return_softmax_lse=False, sinks=None, score_mod=None, ver=3, out=None
): pass
"""
HOOKED_FLASH_ATTN = [[f"{FLASH_ATTN_OF_SGLANG}.flash_attn_with_kvcache", "rawmla.engines.sglang", "around"]]


def hooked(path: str) -> list[list[str]]:
    """What is hooked of a module."""
    return [[f"{path}.{name}", "rawmla.engines.sglang", "around"] for name in MODULE_OF_SGLANG.replaced]


@pytest.fixture
def sglang_tree(tmp_path: Path) -> Path:
    """An SGLang 0.5.23 of three modules, and no flash_mla."""
    files = {"sglang/srt/plugins/hook_registry.py": HOOKS, INTERFACE_OF_SGLANG: SGLANG}
    write(tmp_path, files | {FILE_OF_SGLANG_FLASH_ATTN: SGLANG_FLASH_ATTN})
    set_version(tmp_path, "sglang", "0.5.23")
    return tmp_path


def test_sglang_is_hooked_once(sglang_tree: Path) -> None:
    """Where no flash_mla is installed, rawmla's takes its place: SGLang's module imports it."""
    pytest.importorskip("torch")
    (hooks, imported), log = run(sglang_tree, SGLANG_CODE, RAWMLA_SGLANG="patch")
    assert hooks == hooked(MODULE_OF_SGLANG.paths[0]) + HOOKED_FLASH_ATTN and imported and log == ""


def test_sglang_before_its_own_interface(sglang_tree: Path) -> None:
    """Until 0.5.22 SGLang called the module of sglang-kernel."""
    (sglang_tree / INTERFACE_OF_SGLANG).unlink()
    write(sglang_tree, {OLD_INTERFACE: OLD_SGLANG})
    (hooks, _), log = run(sglang_tree, SGLANG_CODE, RAWMLA_SGLANG="patch")
    assert hooks == hooked(MODULE_OF_SGLANG.paths[1]) + HOOKED_FLASH_ATTN and log == ""


@pytest.mark.parametrize(
    ("mode", "files", "text", "warnings"),
    [
        ("", {}, "", 0),
        ("backend", {}, "RAWMLA_SGLANG: expected patch, got 'backend'", 1),
        (
            *("patch", {INTERFACE_OF_SGLANG: SGLANG.replace("kv_format", "layout")}),
            *(", flash_mla_with_kvcache (layout). Install a tested version", 1),
        ),
        (
            *("patch", {INTERFACE_OF_SGLANG: "import no_such_module\n" + OLD_SGLANG}),
            *("is left as it is. ModuleNotFoundError: No module named 'no_such_module'", 1),
        ),
        ("patch", {INTERFACE_OF_SGLANG: SGLANG + "raise OSError\n"}, "is left as it is. OSError", 1),
        ("patch", {"sglang/srt/plugins/hook_registry.py": "HookRegistry = None\n"}, "ImportError: ", 2),
    ],
)
def test_sglang_is_left_alone(
    sglang_tree: Path, mode: str, files: dict[str, str], text: str, warnings: int
) -> None:
    """One module of SGLang does not decide about the other."""
    pytest.importorskip("torch")
    set_version(sglang_tree, "sglang", "0.6.0")
    write(sglang_tree, files)
    code = (
        "from rawmla.engines.sglang import register; register()\n"
        "registry = sys.modules.get('sglang.srt.plugins.hook_registry')\n"
        "print(json.dumps(getattr(registry and registry.HookRegistry, 'hooks', [])))"
    )
    hooks, log = run(sglang_tree, code, RAWMLA_SGLANG=mode)
    assert hooks == (HOOKED_FLASH_ATTN if mode == "patch" and warnings == 1 else [])
    assert text in log and log.count("rawmla: ") == warnings


def test_fp8_dense_decoding_stays_with_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    from rawmla.compat import sgl_kernel

    calls: list[Any] = []
    for name in MODULE_OF_SGLANG.replaced:
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
