"""The plug-in for SGLang. `register` is an entry point of the group sglang.srt.plugins; the variable
RAWMLA_SGLANG turns it on.

SGLang's dense, DSA and DeepSeek-V4 backends call FlashMLA through three functions of one module of theirs,
which have argument orders of their own. "patch" hooks those three by SGLang's HookRegistry. What the module
exports besides is of Blackwell alone, but for the class of plan objects: rawmla takes objects of any class.
"patch" also hooks the function by which the fa3 backend calls FlashAttention.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from importlib import import_module, util
from typing import Any

from rawmla.environment import version_of

from .plug_in import Engine

ENGINE = Engine(
    title="SGLang",
    distribution="sglang",
    tested=("0.5.23",),
    module="sglang.kernels.ops.attention.flash_mla_interface",
    replaced={
        "get_mla_metadata": (
            "cache_seqlens, num_q_tokens_per_head_k, num_heads_k, num_heads_q, is_fp8_kvcache, topk"
        ),
        "flash_mla_with_kvcache": (
            "q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits, "
            "softmax_scale, causal, descale_q, descale_k, is_fp8_kvcache, indices, attn_sink, extra_k_cache, "
            "extra_indices_in_kvcache, topk_length, extra_topk_length, kv_format, use_legacy"
        ),
        "flash_mla_sparse_fwd": "q, kv, indices, sm_scale, d_v, attn_sink, topk_length, use_legacy",
    },
    variable="RAWMLA_SGLANG",
    modes=("patch",),
    group="sglang.srt.plugins",
    filter="SGLANG_PLUGINS",
    line="RAWMLA_SGLANG=patch python -m sglang.launch_server --model-path MODEL",
)
FLASH_ATTN = ENGINE._replace(
    module="sglang.kernels.ops.attention.flash_attention",
    replaced={
        "flash_attn_with_kvcache": (
            "q, k_cache, v_cache, k, v, qv, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, "
            "cache_leftpad, page_table, cu_seqlens_q, cu_seqlens_k_new, max_seqlen_q, rotary_seqlens, "
            "q_descale, k_descale, v_descale, softmax_scale, causal, window_size, attention_chunk, softcap, "
            "rotary_interleaved, scheduler_metadata, num_splits, pack_gqa, only_qv, sm_margin, "
            "return_softmax_lse, sinks, ..."
        ),
    },
)

_log = logging.getLogger(__name__)
_registered = False


def register() -> None:
    """Entry point: do what RAWMLA_SGLANG says. Unset or empty: nothing.

    Raises nothing: whatever is not as expected is one warning, and SGLang is left as it is.
    """
    global _registered
    mode = os.environ.get(ENGINE.variable, "")
    if not mode or _registered:
        return
    if mode != "patch":
        _log.warning("rawmla: SGLang is left as it is. %s: expected patch, got %r", ENGINE.variable, mode)
        return
    for engine, hooks in (
        (ENGINE, lambda: (_get_mla_metadata, _flash_mla_with_kvcache, _flash_mla_sparse_fwd)),
        (FLASH_ATTN, _flash_attn_hooks),
    ):
        try:
            reason = _refusal(engine)
            if reason is None:
                _hook(engine, hooks())
        except Exception as error:  # an engine must start all the same
            reason = f"{type(error).__name__}: {error}"
        if reason is not None:
            _log.warning("rawmla: %s of SGLang is left as it is. %s", engine.module, reason)
            continue
        _registered = True
        names, version = ", ".join(engine.replaced), version_of("sglang") or "?"
        _log.info("rawmla: %s of %s are rawmla's now (SGLang %s)", names, engine.module, version)


def _refusal(engine: Engine) -> str | None:
    """Why the functions may not be hooked; None: they may.

    SGLang's module of FlashMLA imports flash_mla. Where none is installed, rawmla's takes its place.
    """
    if engine is ENGINE and util.find_spec("flash_mla") is None:
        from rawmla.compat import install_flash_mla

        install_flash_mla()
    version = version_of("sglang")
    try:
        module = import_module(engine.module)
    except ImportError as error:
        return f"{engine.module} of SGLang {version or 'of unknown version'} cannot be imported: {error}"
    return engine.refusal(version, module)


def _hook(engine: Engine, hooks: Sequence[Callable[..., Any]]) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for name, hook in zip(engine.replaced, hooks, strict=True):
        HookRegistry.register(f"{engine.module}.{name}", hook, HookType.AROUND)


def _flash_attn_hooks() -> Sequence[Callable[..., Any]]:
    from rawmla.compat.sglang_flash_attn import flash_attn_with_kvcache

    return (flash_attn_with_kvcache,)


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
