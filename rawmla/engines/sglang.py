"""The plug-in for SGLang. `register` is an entry point of the group sglang.srt.plugins; the variable
RAWMLA_SGLANG turns it on.

SGLang's dense, DSA and DeepSeek-V4 backends call FlashMLA through three functions of one module, which have
argument orders of their own. "patch" hooks those three by SGLang's HookRegistry. The other functions of the
module are for Blackwell alone, and its class of plan objects stays, since rawmla takes objects of any class.
"patch" also hooks the function by which the fa3 backend calls FlashAttention.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from importlib import import_module, util
from typing import Any

from rawmla.environment import version_of

from .plug_in import Engine, Module, cannot_load

_NAMES = ("get_mla_metadata", "flash_mla_with_kvcache", "flash_mla_sparse_fwd")
ENGINE = Engine(
    title="SGLang",
    distribution="sglang",
    tested=("0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23"),
    modules=(
        Module(
            paths=("sglang.kernels.ops.attention.flash_mla_interface", "sgl_kernel.flash_mla"),
            replaced={name: f"rawmla.compat.sgl_kernel:{name}" for name in _NAMES},
        ),
        Module(
            paths=("sglang.kernels.ops.attention.flash_attention",),
            replaced={
                "flash_attn_with_kvcache": "rawmla.compat.sglang_flash_attn:flash_attn_with_kvcache",
            },
            goes_on=True,
        ),
    ),
    variable="RAWMLA_SGLANG",
    modes=("patch",),
    group="sglang.srt.plugins",
    filter="SGLANG_PLUGINS",
    is_chosen=lambda names: not names or "rawmla" in map(str.strip, names.split(",")),
    line="RAWMLA_SGLANG=patch python -m sglang.launch_server --model-path MODEL",
)

_log = logging.getLogger(__name__)
_registered = False


def register() -> None:
    """Entry point: do what RAWMLA_SGLANG says. Unset or empty: nothing.

    Raises nothing: if something is not as expected, there is one warning, and SGLang keeps its own.
    """
    global _registered
    mode = os.environ.get(ENGINE.variable, "")
    if not mode or _registered:
        return
    _registered = True
    if mode not in ENGINE.modes:
        _log.warning("rawmla: SGLang is left as it is. %s: expected patch, got %r", ENGINE.variable, mode)
        return
    for module in ENGINE.modules:
        try:
            reason = ENGINE.refusal([module]) or cannot_load()
            if reason is None:
                _hook(module)
        except Exception as error:  # an engine must start all the same
            reason = f"{type(error).__name__}: {error}"
        if reason is not None:
            _log.warning("rawmla: SGLang's %s is left as it is. %s", module.paths[0], reason)


def _hook(module: Module) -> None:
    """Hook the functions of a module. SGLang's own imports flash_mla: where none is installed, rawmla's takes
    its place.
    """
    if util.find_spec("flash_mla") is None:
        from rawmla.compat import install_flash_mla

        install_flash_mla()
    import_module(str(module.path))  # or SGLang would report for each name that this fails
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for name in module.replaced:
        HookRegistry.register(f"{module.path}.{name}", _HOOKS[name], HookType.AROUND)
    names = ", ".join(module.replaced)
    _log.info("rawmla: %s of %s are rawmla's now (SGLang %s)", names, module.path, version_of("sglang"))


# ---- the hooks, around the functions of SGLang. Dense decoding over an FP8 cache, which rawmla does not
# have, stays with the original: its plan (FP8 without topk) and its calls (an FP8 q).


def _get_mla_metadata(
    original: Callable[..., tuple[Any, Any]],
    cache_seqlens: Any = None,
    num_q_tokens_per_head_k: int | None = None,
    num_heads_k: int | None = None,
    num_heads_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
) -> tuple[Any, Any]:
    arguments = cache_seqlens, num_q_tokens_per_head_k, num_heads_k, num_heads_q, is_fp8_kvcache, topk
    if cache_seqlens is not None and is_fp8_kvcache and topk is None:
        return original(*arguments)
    from rawmla.compat import sgl_kernel

    return sgl_kernel.get_mla_metadata(*arguments)


def _flash_mla_with_kvcache(
    original: Callable[..., tuple[Any, Any]], q: Any, *args: Any, **kwargs: Any
) -> tuple[Any, Any]:
    if q.element_size() == 1:
        return original(q, *args, **kwargs)
    from rawmla.compat import sgl_kernel

    return sgl_kernel.flash_mla_with_kvcache(q, *args, **kwargs)


def _flash_mla_sparse_fwd(original: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
    from rawmla.compat import sgl_kernel

    return sgl_kernel.flash_mla_sparse_fwd(*args, **kwargs)


def _flash_attn_with_kvcache(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    from rawmla.compat import sglang_flash_attn

    results = sglang_flash_attn.flash_attn_with_kvcache(*args, **kwargs)
    return original(*args, **kwargs) if results is NotImplemented else results


_HOOKS: dict[str, Callable[..., Any]] = {
    "get_mla_metadata": _get_mla_metadata,
    "flash_mla_with_kvcache": _flash_mla_with_kvcache,
    "flash_mla_sparse_fwd": _flash_mla_sparse_fwd,
    "flash_attn_with_kvcache": _flash_attn_with_kvcache,
}
