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

import logging
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from rawmla.environment import version_of

from .plug_in import Engine

# get_mla_metadata_dense_fp8 and flash_mla_with_kvcache_fp8 stay vLLM's, since rawmla has no dense decoding
# over FP8 caches. So does _is_flashmla_available, by which these two say that vLLM has no FlashMLA.
ENGINE = Engine(
    title="vLLM",
    distribution="vllm",
    tested=("0.33.0",),
    module="vllm.v1.attention.ops.flashmla",
    replaced={
        "FlashMLASchedMeta": None,
        "get_mla_metadata": "args, kwargs",
        "flash_mla_with_kvcache": (
            "q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits, "
            "softmax_scale, causal, is_fp8_kvcache, indices, attn_sink, extra_k_cache, "
            "extra_indices_in_kvcache, topk_length, extra_topk_length, out, enable_batch_invariant"
        ),
        "flash_mla_sparse_fwd": "q, kv, indices, sm_scale, d_v, attn_sink, topk_length, out",
        "is_flashmla_dense_supported": "",
        "is_flashmla_sparse_supported": "",
    },
    variable="RAWMLA_VLLM",
    modes=("patch", "backend"),
    group="vllm.general_plugins",
    filter="VLLM_PLUGINS",
    line="RAWMLA_VLLM=patch vllm serve MODEL --attention-backend FLASHMLA (or FLASHMLA_SPARSE)",
)
FLASH_ATTN = ENGINE._replace(
    module="vllm.vllm_flash_attn.flash_attn_interface",
    replaced={  # versions have other parameters after these
        "flash_attn_varlen_func": (
            "q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k, seqused_k, q_v, dropout_p, "
            "softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs, "
            "block_table, return_softmax_lse, out, ..."
        ),
        "get_scheduler_metadata": (
            "batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens, "
            "qkv_dtype, headdim_v, ..."
        ),
    },
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

    Raises nothing: whatever is not as expected is one warning in vLLM's log, and vLLM is left as it is.
    """
    mode = os.environ.get(ENGINE.variable, "")
    if not mode:
        return
    if mode not in ENGINE.modes:
        _warn(f"{ENGINE.variable}: expected one of {', '.join(ENGINE.modes)}, got {mode!r}")
        return
    for engine, replacements in ((ENGINE, _replacements), (FLASH_ATTN, _flash_attn_replacements)):
        patch = partial(_try_patch, engine, replacements)
        module = sys.modules.get(engine.module)
        if module is None:
            _after_import(engine.module, patch)
        else:
            patch(module)
    if mode == "backend":
        try:
            _register_backends()
        except Exception as error:  # an engine must start all the same
            _warn(f"{type(error).__name__}: {error}", "vLLM's attention backends are left as they are")


def _version() -> str | None:
    return version_of("vllm") or getattr(sys.modules.get("vllm"), "__version__", None)


_warned: set[str] = set()


def _warn(reason: str, what: str = "vLLM is left as it is") -> None:
    """One warning per process and reason."""
    if reason not in _warned:
        _warned.add(reason)
        _log.warning("rawmla: %s. %s", what, reason)


# ---- after an import


class _Watcher:
    """A finder that finds nothing of its own: it has a function called when one module has been executed."""

    def __init__(self, name: str, action: Callable[[ModuleType], None]) -> None:
        self.name = name
        self.action = action

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """As of any finder of `sys.meta_path`."""
        if name != self.name:
            return None
        specs = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_act(module: ModuleType) -> None:
                execute(module)
                self.action(module)

            spec.loader.exec_module = execute_and_act  # type: ignore[method-assign]
        return spec


def _after_import(name: str, action: Callable[[ModuleType], None]) -> None:
    if not any(isinstance(finder, _Watcher) and finder.name == name for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watcher(name, action))


# ---- patch


Functions = dict[str, Any]


def _try_patch(engine: Engine, replacements: Callable[[Functions], Functions], module: ModuleType) -> None:
    try:
        _patch(engine, replacements, module)
    except Exception as error:  # an engine must start all the same
        _warn(f"{type(error).__name__}: {error}")


def _patch(engine: Engine, replacements: Callable[[Functions], Functions], module: ModuleType) -> None:
    """Replace the names in vLLM's module, also where other modules of vLLM have imported them already."""
    if hasattr(module, _ORIGINALS):
        return
    reason = _refusal(engine, module)
    if reason is not None:
        _warn(reason)
        return
    originals = {name: getattr(module, name) for name in engine.replaced}
    values = replacements(originals)
    setattr(module, _ORIGINALS, originals)  # all that can fail has been done
    for loaded_as, loaded in list(sys.modules.items()):
        if loaded_as.partition(".")[0] == "vllm" and isinstance(loaded, ModuleType):
            names = vars(loaded)
            for name, original in originals.items():
                if names.get(name) is original:
                    setattr(loaded, name, values[name])
    _log.info(
        "rawmla: %s of %s are rawmla's now (vLLM %s)", ", ".join(values), module.__name__, _version() or "?"
    )


def _refusal(engine: Engine, module: ModuleType) -> str | None:
    """Why the names of the module may not be replaced; None: they may.

    vLLM looks at the GPU's compute capability where it imports these modules, so looking again is free.
    """
    platform = import_module("vllm.platforms").current_platform
    if not (platform.is_cuda() and platform.is_device_capability_family(90)):
        return "rawmla's kernels are for Hopper (compute capability 9.0), and vLLM sees no such GPU here"
    return engine.refusal(_version(), module)


def _flash_attn_replacements(originals: Functions) -> Functions:
    from rawmla.compat.vllm_flash_attn import replacements

    return replacements(originals)


def _replacements(originals: Functions) -> Functions:
    from rawmla.compat.flash_mla import flash_mla_interface

    own = {
        "get_mla_metadata": _get_mla_metadata,
        "is_flashmla_dense_supported": _is_supported,
        "is_flashmla_sparse_supported": _is_supported,
    }
    return {name: own.get(name) or getattr(flash_mla_interface, name) for name in ENGINE.replaced}


def _get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[Any, None]:
    """An empty plan object and None: vLLM relies on it, whatever `flash_mla` gives other callers."""
    from rawmla import FlashMLASchedMeta

    return FlashMLASchedMeta(), None


def _is_supported() -> tuple[bool, str | None]:
    """On Hopper rawmla is there, also when vLLM was built without FlashMLA."""
    return True, None


# ---- backend


def _register_backends() -> None:
    version = _version()
    if not ENGINE.is_tested(version):
        _warn(
            f"{ENGINE.variable}=backend needs a version that rawmla was tested with "
            f"({', '.join(ENGINE.tested)}), and this is vLLM {version or 'of unknown version'}; use "
            f"{ENGINE.variable}=patch",
            "vLLM's attention backends are left as they are",
        )
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    for member, path in BACKENDS.items():
        register_backend(AttentionBackendEnum[member], path)
    _log.info("rawmla: the attention backends %s are rawmla's now (vLLM %s)", ", ".join(BACKENDS), version)
