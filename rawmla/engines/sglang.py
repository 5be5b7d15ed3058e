"""The plug-in for SGLang. `register` is an entry point of the group sglang.srt.plugins; RAWMLA_SGLANG turns it on.

SGLang's dense, DSA and DeepSeek-V4 backends call FlashMLA through three functions of one module of theirs,
which have argument orders of their own. "patch" hooks those three by SGLang's HookRegistry. What the module
exports besides is of Blackwell alone, but for the class of plan objects: rawmla takes objects of any class.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable
from importlib import import_module, metadata, util
from typing import Any

__all__ = ["MODES", "MODULE", "REPLACED", "TESTED", "VARIABLE", "is_tested", "register"]

VARIABLE = "RAWMLA_SGLANG"
MODES = ("patch",)
MODULE = "sglang.kernels.ops.attention.flash_mla_interface"
TESTED = ("0.5.23",)
"""Versions of SGLang whose calls are recorded in tests/contracts."""

REPLACED = {
    "get_mla_metadata": (
        "cache_seqlens, num_q_tokens_per_head_k, num_heads_k, num_heads_q, is_fp8_kvcache, topk"
    ),
    "flash_mla_with_kvcache": (
        "q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits, "
        "softmax_scale, causal, descale_q, descale_k, is_fp8_kvcache, indices, attn_sink, extra_k_cache, "
        "extra_indices_in_kvcache, topk_length, extra_topk_length, kv_format, use_legacy"
    ),
    "flash_mla_sparse_fwd": "q, kv, indices, sm_scale, d_v, attn_sink, topk_length, use_legacy",
}
"""What is hooked in `MODULE`: name to its parameters in the tested versions."""

_log = logging.getLogger(__name__)
_registered = False


def register() -> None:
    """Entry point: do what RAWMLA_SGLANG says. Unset or empty: nothing.

    Raises nothing: whatever is not as expected is one warning, and SGLang is left as it is.
    """
    global _registered
    mode = os.environ.get(VARIABLE, "")
    if not mode or _registered:
        return
    reason = f"{VARIABLE}: expected {MODES[0]}, got {mode!r}" if mode not in MODES else _refusal()
    if reason is not None:
        _log.warning("rawmla: SGLang is left as it is. %s", reason)
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hooks = (get_mla_metadata, flash_mla_with_kvcache, flash_mla_sparse_fwd)
    for name, hook in zip(REPLACED, hooks, strict=True):
        HookRegistry.register(f"{MODULE}.{name}", hook, HookType.AROUND)
    _registered = True
    _log.info("rawmla: %s of %s are rawmla's now (SGLang %s)", ", ".join(REPLACED), MODULE, _version() or "?")


def is_tested(version: str | None) -> bool:
    """Whether a version of SGLang is in `TESTED`; what follows "+" tells only what it was built for."""
    return version is not None and version.partition("+")[0] in TESTED


def _version() -> str | None:
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return None


def _refusal() -> str | None:
    """Why the functions may not be hooked; None: they may.

    SGLang's module imports flash_mla. Where none is installed, rawmla's takes its place.
    """
    if util.find_spec("flash_mla") is None:
        from rawmla.compat import install_flash_mla

        install_flash_mla()
    version = _version()
    try:
        module = import_module(MODULE)
    except ImportError as error:
        return f"{MODULE} of SGLang {version or 'of unknown version'} cannot be imported: {error}"
    if is_tested(version):
        return None
    different = [
        name
        for name, parameters in REPLACED.items()
        if not callable(getattr(module, name, None))
        or ", ".join(inspect.signature(getattr(module, name)).parameters) != parameters
    ]
    if different:
        return (
            f"SGLang {version or 'of unknown version'} is not one that rawmla was tested with "
            f"({', '.join(TESTED)}), and in {MODULE} these are missing or have other parameters: "
            f"{', '.join(different)}. Unset {VARIABLE}, or use a tested version"
        )
    return None


# ---- the hooks: SGLang's argument orders, behind the function that they stand around


def get_mla_metadata(
    original: Callable[..., tuple[Any, Any]],
    cache_seqlens: Any = None,
    num_q_tokens_per_head_k: int | None = None,
    num_heads_k: int | None = None,
    num_heads_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
) -> tuple[Any, Any]:
    """A plan: empty without `cache_seqlens`, else two arrays with rows in the order of a plan object.

    The plan of dense decoding over an FP8 cache is the original's, as that call is.
    """
    from rawmla.compat.flash_mla import flash_mla_interface as ours

    if cache_seqlens is None:
        return ours.FlashMLASchedMeta(), None
    if is_fp8_kvcache and topk is None:
        return original(
            cache_seqlens, num_q_tokens_per_head_k, num_heads_k, num_heads_q, is_fp8_kvcache, topk
        )
    return ours.get_mla_decoding_metadata(
        cache_seqlens, num_q_tokens_per_head_k, num_heads_k, num_heads_q, is_fp8_kvcache, topk
    )


def flash_mla_with_kvcache(
    original: Callable[..., tuple[Any, Any]],
    q: Any,
    k_cache: Any,
    block_table: Any,
    cache_seqlens: Any,
    head_dim_v: int,
    tile_scheduler_metadata: Any,
    num_splits: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    descale_q: Any = None,
    descale_k: Any = None,
    is_fp8_kvcache: bool = False,
    indices: Any = None,
    attn_sink: Any = None,
    extra_k_cache: Any = None,
    extra_indices_in_kvcache: Any = None,
    topk_length: Any = None,
    extra_topk_length: Any = None,
    kv_format: str | None = None,
    *,
    use_legacy: bool = True,
) -> tuple[Any, Any]:
    """Decode. A query in FP8, which only dense decoding over an FP8 cache has, goes to the original."""
    from rawmla.compat.flash_mla import flash_mla_interface as ours

    if q.element_size() == 1:
        return original(
            q,
            k_cache,
            block_table,
            cache_seqlens,
            head_dim_v,
            tile_scheduler_metadata,
            num_splits,
            softmax_scale,
            causal,
            descale_q,
            descale_k,
            use_legacy=use_legacy,
        )
    plan = tile_scheduler_metadata
    if num_splits is not None:
        plan = ours.FlashMLASchedMeta(tile_scheduler_metadata=plan, num_splits=num_splits)
    return ours.flash_mla_with_kvcache(
        q,
        k_cache,
        block_table,
        cache_seqlens,
        head_dim_v,
        plan,
        softmax_scale=softmax_scale,
        causal=causal,
        is_fp8_kvcache=is_fp8_kvcache,
        indices=indices,
        attn_sink=attn_sink,
        extra_k_cache=extra_k_cache,
        extra_indices_in_kvcache=extra_indices_in_kvcache,
        topk_length=topk_length,
        extra_topk_length=extra_topk_length,
        kv_format=kv_format,
        descale_q=descale_q,
        descale_k=descale_k,
        use_legacy=use_legacy,
    )


def flash_mla_sparse_fwd(
    original: Callable[..., tuple[Any, Any, Any]],
    q: Any,
    kv: Any,
    indices: Any,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Any = None,
    topk_length: Any = None,
    *,
    use_legacy: bool = True,
) -> tuple[Any, Any, Any]:
    """Sparse prefill. Its statistics are base 2 with `use_legacy`, natural without, as of the original."""
    from rawmla.compat.flash_mla import flash_mla_interface as ours

    return ours.flash_mla_sparse_fwd(
        q,
        kv,
        indices,
        sm_scale,
        d_v,
        attn_sink,
        topk_length,
        use_legacy=use_legacy,
        return_log2_lse=True if use_legacy else None,
    )
