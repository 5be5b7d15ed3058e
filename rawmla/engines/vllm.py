"""The plug-in for vLLM. `register` is an entry point of the group vllm.general_plugins; the variable
RAWMLA_VLLM turns it on.

"patch" replaces the functions that vLLM's own FlashMLA and FlashAttention modules export by rawmla's, so
every caller in vLLM uses them with the same arguments. "backend" also replaces the attention backends
FLASHMLA and FLASHMLA_SPARSE by rawmla's (`rawmla.engines.vllm_backend`).

vLLM calls the entry point in every process, more than once and before CUDA may be touched. So nothing here
compiles or looks at a GPU, and of vLLM nothing but its registry of backends is imported: names are replaced
when vLLM itself has imported the module that holds them.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from rawmla.environment import version_of

from .plug_in import Engine, Module, cannot_load, or_original

# get_mla_metadata_dense_fp8 and flash_mla_with_kvcache_fp8 stay vLLM's, since rawmla has no dense decoding
# over FP8 caches. So does _is_flashmla_available, by which these two say that vLLM has no FlashMLA.
_FLASH_MLA = Module(
    paths=("vllm.v1.attention.ops.flashmla",),
    replaced={
        "FlashMLASchedMeta": "rawmla.compat.flash_mla.flash_mla_interface:FlashMLASchedMeta",
        "get_mla_metadata": "rawmla.engines.vllm:_get_mla_metadata",
        "flash_mla_with_kvcache": "rawmla.compat.flash_mla.flash_mla_interface:flash_mla_with_kvcache",
        "flash_mla_sparse_fwd": "rawmla.compat.flash_mla.flash_mla_interface:flash_mla_sparse_fwd",
        "is_flashmla_dense_supported": "rawmla.engines.vllm:_is_supported",
        "is_flashmla_sparse_supported": "rawmla.engines.vllm:_is_supported",
    },
)
_FLASH_ATTN = Module(
    paths=("vllm.vllm_flash_attn.flash_attn_interface",),
    replaced={
        name: f"rawmla.compat.vllm_flash_attn:{name}"
        for name in ("flash_attn_varlen_func", "get_scheduler_metadata")
    },
    goes_on=True,
)


def _parents(path: str, theirs: str, ours: str) -> Module:
    """A module with the three classes of a backend, which are the parents of rawmla's."""
    kinds = ("Backend", "MetadataBuilder", "Impl")
    return Module(
        paths=(path,),
        replaced={f"{theirs}{kind}": f"rawmla.engines.vllm_backend:{ours}{kind}" for kind in kinds},
        called={
            f"{theirs}Backend.get_builder_cls": "",
            f"{theirs}Backend.get_impl_cls": "",
            f"{theirs}MetadataBuilder.__init__": "kv_cache_spec, layer_names, vllm_config, device",
            f"{theirs}MetadataBuilder._init_reorder_batch_threshold": (
                "reorder_batch_threshold, supports_spec_as_decode, supports_dcp_with_varlen"
            ),
            f"{theirs}Impl.forward_mqa": "q, kv_c_and_k_pe_cache, attn_metadata, layer",
        },
    )


ENGINE = Engine(
    title="vLLM",
    distribution="vllm",
    tested=("0.20.0", "0.24.0", "0.26.0", "0.29.0", "0.30.0", "0.31.0", "0.33.0"),
    modules=(_FLASH_MLA, _FLASH_ATTN),
    variable="RAWMLA_VLLM",
    modes=("patch", "backend"),
    group="vllm.general_plugins",
    filter="VLLM_PLUGINS",
    is_chosen=lambda names: names is None or "rawmla" in names.split(","),
    line="RAWMLA_VLLM=patch vllm serve MODEL; for MLA with --attention-backend FLASHMLA or FLASHMLA_SPARSE",
    backends=(
        _FLASH_MLA,
        _parents("vllm.v1.attention.backends.mla.flashmla", "FlashMLA", "RawMLA"),
        _parents("vllm.v1.attention.backends.mla.flashmla_sparse", "FlashMLASparse", "RawMLASparse"),
        Module(
            paths=("vllm.v1.attention.backends.utils",),
            replaced={},
            called={"reshape_attn_output_for_spec_decode": "attn_output"},
        ),
        Module(
            paths=("vllm.model_executor.layers.attention.mla_attention",),
            replaced={},
            called={"MLAAttention.forward_impl": "q, k_c_normed, k_pe, kv_cache, attn_metadata, output"},
        ),
        Module(("vllm.v1.attention.backends.registry",), {}, {"register_backend": "backend, class_path"}),
        Module(("vllm.v1.kv_cache_interface",), {}, {"is_quantized_kv_cache": "kv_cache_dtype"}),
    ),
)
BACKENDS = {
    "FLASHMLA": "rawmla.engines.vllm_backend.RawMLABackend",
    "FLASHMLA_SPARSE": "rawmla.engines.vllm_backend.RawMLASparseBackend",
    "CUSTOM": "rawmla.engines.vllm_backend.RawMLABackend",
}
"""Members of vLLM's AttentionBackendEnum that "backend" overrides. Members can be sent to spawned workers,
new names cannot."""

_ORIGINALS = "__rawmla_originals__"  # in the module once its names are replaced
_log = logging.getLogger("vllm.rawmla")  # below vLLM's own logger, so that lines appear among vLLM's


def register() -> None:
    """Entry point: do what RAWMLA_VLLM says. Unset or empty: nothing.

    Raises nothing: if something is not as expected, vLLM's log has one warning, and vLLM keeps its own.
    """
    mode = os.environ.get(ENGINE.variable, "")
    if not mode:
        return
    if mode not in ENGINE.modes:
        _warn("vLLM", f"{ENGINE.variable}: expected one of {', '.join(ENGINE.modes)}, got {mode!r}")
        return
    for module in ENGINE.modules:
        path = module.path
        patch = functools.partial(_try, functools.partial(_patch, module), f"vLLM's {module.paths[0]}")
        if path is None or path in sys.modules:
            patch()
        else:
            _after_import(path, patch)
    if mode == "backend":
        _try(_register_backends, "vLLM's list of attention backends")


_warned: set[str] = set()


def _warn(what: str, reason: str) -> None:
    """One warning per process and reason."""
    if reason not in _warned:
        _warned.add(reason)
        _log.warning("rawmla: %s is left as it is. %s", what, reason)


def _try(action: Callable[[], str | None], what: str) -> None:
    """Run an action that returns why it did nothing. Errors are reasons too, since an engine must start."""
    try:
        reason = action()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    if reason is not None:
        _warn(what, reason)


# ---- after an import


class _Watcher:
    """A finder that finds nothing of its own: it has a function called when one module has been executed."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self.name = name
        self.action = action

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """As of any finder of `sys.meta_path`."""
        if name != self.name:
            return None
        others = (other for other in sys.meta_path if other is not self and hasattr(other, "find_spec"))
        specs = (other.find_spec(name, path, target) for other in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_act(module: ModuleType) -> None:
                execute(module)
                self.action()

            spec.loader.exec_module = execute_and_act  # type: ignore[method-assign]
        return spec


def _after_import(name: str, action: Callable[[], None]) -> None:
    if not any(isinstance(finder, _Watcher) and finder.name == name for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watcher(name, action))


# ---- patch


def _patch(module: Module) -> str | None:
    """Replace the names of a module that vLLM has imported, also where other modules imported them before.
    Returns why not; None: it is done.
    """
    reason = ENGINE.refusal([module]) or _no_hopper() or cannot_load()
    if reason is not None:
        return reason
    patched = sys.modules[str(module.path)]
    if hasattr(patched, _ORIGINALS):
        return None
    values = {name: _load(by) for name, by in module.replaced.items()}
    originals = {name: getattr(patched, name) for name in values}
    if module.goes_on:
        values = {name: or_original(ours, originals[name]) for name, ours in values.items()}
    setattr(patched, _ORIGINALS, originals)  # all that can fail has been done
    for loaded_as, loaded in list(sys.modules.items()):
        if loaded_as.partition(".")[0] == "vllm" and isinstance(loaded, ModuleType):
            names = vars(loaded)
            for name, original in originals.items():
                if names.get(name) is original:
                    setattr(loaded, name, values[name])
    _log.info(
        "rawmla: %s of %s are rawmla's now (vLLM %s)", ", ".join(values), module.path, version_of("vllm")
    )
    return None


def _no_hopper() -> str | None:
    """Why this GPU is not one for rawmla; None: it is.

    vLLM has asked for the GPU's compute capability before it imports attention, so asking again is free.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cuda() and current_platform.is_device_capability_family(90):
        return None
    return "rawmla's kernels are for Hopper (compute capability 9.0), and vLLM sees no such GPU here"


def _load(name: str) -> Any:
    """The object of "module:name"."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


def _get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[Any, None]:
    """An empty plan object and None: vLLM relies on it, whatever `flash_mla` gives other callers."""
    from rawmla import FlashMLASchedMeta

    return FlashMLASchedMeta(), None


def _is_supported() -> tuple[bool, str | None]:
    """On Hopper rawmla is there, also when vLLM was built without FlashMLA."""
    return True, None


# ---- backend


def _register_backends() -> str | None:
    reason = ENGINE.refusal(ENGINE.backends) or cannot_load()
    if reason is not None:
        return reason
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    for member, path in BACKENDS.items():
        register_backend(AttentionBackendEnum[member], path)
    _log.info(
        "rawmla: the attention backends %s are rawmla's now (vLLM %s)",
        ", ".join(BACKENDS),
        version_of("vllm"),
    )
    return None
