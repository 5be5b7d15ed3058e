"""FlashMLA's Python functions by its names and argument orders, computed by rawmla.

The surface is the union of three: FlashMLA 9241ae3 (github.com/deepseek-ai/FlashMLA), the copy in vLLM 0.33
(github.com/vllm-project/FlashMLA) and sgl-flash-mla 1.0.0 (github.com/sgl-project/FlashMLA). Where their
positional arguments differ, the type of the argument tells them apart. docs/flash_mla.md has the differences.
Dense attention, `flash_attn_varlen_*`, is rawmla's own functions, which take FlashMLA's names too; here they
note their calls.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

from ...api import decode, dense, plan, sparse_prefill
from ...call.checks import as_bool
from ...mla.plan import FlashMLASchedMeta
from ..tables import whole_rows
from ..usage import Usage
from . import cuda as flash_mla_cuda  # FlashMLA's name of it
from .refusals import check_kv_format, refuse_descales, refuse_fp8_q, refuse_other_records

__all__ = [
    "FlashMLASchedMeta",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_mla_cuda",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "get_mla_decoding_metadata",
    "get_mla_metadata",
]

APIS = ("object", "tensors")
FLASH_MLA, OLD_FLASH_MLA, VLLM, SGL = (
    "FlashMLA with plan objects",
    "FlashMLA with plans of tensors",
    "vLLM's FlashMLA",
    "sgl-flash-mla",
)

_takes_tensors = False
_decode_usage = Usage("flash_mla_with_kvcache")
_prefill_usage = Usage("flash_mla_sparse_fwd")


def _noted(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, which notes its calls."""
    usage = Usage(function.__name__)
    first, second = list(inspect.signature(function).parameters)[:2]

    @functools.wraps(function)
    def noted(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        usage.note(
            "FlashMLA",
            args[0] if args else kwargs.get(first),
            args[1] if len(args) > 1 else kwargs.get(second),
        )
        return result

    return noted


flash_attn_varlen_func = _noted(dense.flash_attn_varlen_func)
flash_attn_varlen_kvpacked_func = _noted(dense.flash_attn_varlen_kvpacked_func)
flash_attn_varlen_qkvpacked_func = _noted(dense.flash_attn_varlen_qkvpacked_func)


def check_api(api: Any, name: str = "api") -> None:
    """Raise unless this names a generation of plans."""
    if api not in APIS:
        raise ValueError(f"{name}: expected 'object' or 'tensors', got {api!r}")


def set_api(api: str) -> None:
    """Choose the generation of plans: see `rawmla.install_flash_mla`."""
    global _takes_tensors
    _takes_tensors = api == "tensors"


def get_api() -> str:
    """The generation of plans in force."""
    return APIS[_takes_tensors]


DEFAULT_API = os.environ.get("RAWMLA_FLASH_MLA_API", "object")
check_api(DEFAULT_API, "RAWMLA_FLASH_MLA_API")
set_api(DEFAULT_API)


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """`(FlashMLASchedMeta(), None)` whatever the arguments: an empty plan that the first decode call fills.

    With `api="tensors"` and arguments, as `rawmla.get_mla_metadata` with them: a plan as a pair of tensors,
    the form of FlashMLA before plan objects.
    """
    if _takes_tensors and (args or kwargs):
        return plan.get_mla_metadata(*args, **kwargs)
    return FlashMLASchedMeta(), None


def get_mla_decoding_metadata(
    seqlens_k: Any,
    num_q_tokens_per_head_k: int,
    h_k: int,
    h_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
    use_legacy: bool = False,
) -> tuple[Any, Any]:
    """A plan computed now, as the two arrays of a plan object: callers put them into one.

    Arguments as in `rawmla.get_mla_metadata`, whose tensors have another row order: those returned here
    belong into a `FlashMLASchedMeta`, never bare into a decode call. `use_legacy` changes nothing.

    Returns
    -------
    tile_scheduler_metadata, num_splits : array
        int32 `[num_sm_parts, 8]`, rows in the order of `FlashMLASchedMeta`, num_sm_parts at most the number
        of multiprocessors; int32 `[b + 1]`.

    Raises
    ------
    NotImplementedError
        `is_fp8_kvcache` without `topk`: dense decoding has no FP8 caches.
    """
    as_bool("use_legacy", use_legacy)
    tiles, splits = flash_mla_cuda.get_mla_decoding_metadata(
        seqlens_k, num_q_tokens_per_head_k, h_k, h_q, is_fp8_kvcache, topk
    )
    return tiles, splits


def flash_mla_with_kvcache(
    q: Any,
    k_cache: Any,
    block_table: Any,
    cache_seqlens: Any,
    head_dim_v: int,
    tile_scheduler_metadata: Any,
    num_splits: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool | None = None,
    indices: Any = None,
    attn_sink: Any = None,
    extra_k_cache: Any = None,
    extra_indices_in_kvcache: Any = None,
    topk_length: Any = None,
    extra_topk_length: Any = None,
    out: Any = None,
    enable_batch_invariant: bool = False,
    kv_format: str | None = None,
    descale_q: Any = None,
    descale_k: Any = None,
    *,
    use_legacy: bool = False,
) -> tuple[Any, Any]:
    """`rawmla.flash_mla_with_kvcache` with the arguments of every generation of FlashMLA.

    Arrays, results, allocation, streams and errors are as in `rawmla.flash_mla_with_kvcache`. This function
    adds the following.

    Parameters
    ----------
    block_table : array
        A request may be longer than the table's columns: a torch tensor that is a view of wider rows counts
        with the whole rows, because FlashMLA knows the distance of rows alone. torch.compile breaks its graph
        there.
    tile_scheduler_metadata : FlashMLASchedMeta, or array, or None
        A plan object, also one of another library with the same fields. An array with `num_splits` needs
        `api="tensors"`, because its rows have another order than an object's. None is a plan of this
        call alone.
    is_fp8_kvcache : bool, optional
        None: True with `indices`, else False. False with `indices` is a bfloat16 cache, which FlashMLA does
        not have.
    out, enable_batch_invariant
        vLLM's 17th and 18th argument. A bool in the 17th place is sgl-flash-mla's `enable_batch_invariant`,
        and the 18th its `use_legacy` then.
    kv_format : str, optional
        sgl-flash-mla's name of the cache's records: "V32" (656 bytes) or "V4" (584). None: by their size.
        "V32_NO_ROPE" and "V41" have no kernel here.
    descale_q, descale_k : array, optional
        Scales of FP8 dense decoding, which has no kernel here: None.
    use_legacy : bool
        Changes nothing: both kernel sets of sgl-flash-mla are served by the same kernels.

    Raises
    ------
    NotImplementedError
        FP8 dense decoding; records of 528, 352 and 288 bytes.
    """
    form = FLASH_MLA
    if out is not None or enable_batch_invariant:
        form = VLLM
        if type(out) is bool:
            form = SGL
            enable_batch_invariant, use_legacy, out = out, use_legacy or enable_batch_invariant, None
    if is_fp8_kvcache is None:
        is_fp8_kvcache = indices is not None
    if use_legacy or kv_format is not None or descale_q is not None or descale_k is not None:
        form = SGL
        as_bool("use_legacy", use_legacy)
        if kv_format is not None:
            check_kv_format(kv_format, k_cache)
        refuse_descales(q, descale_q, descale_k)
    if tile_scheduler_metadata is None and num_splits is None:
        tile_scheduler_metadata = FlashMLASchedMeta()
    elif num_splits is not None and not isinstance(tile_scheduler_metadata, FlashMLASchedMeta):
        form = OLD_FLASH_MLA
        if not _takes_tensors:
            _refuse_tensors(tile_scheduler_metadata)
    arguments = (
        q, k_cache, whole_rows(block_table), cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits,
        softmax_scale, causal, is_fp8_kvcache, indices, attn_sink, extra_k_cache, extra_indices_in_kvcache,
        topk_length, extra_topk_length, out, enable_batch_invariant,
    )  # fmt: skip
    try:
        result = decode.flash_mla_with_kvcache(*arguments)
    except (TypeError, ValueError):
        refuse_other_records("k_cache", k_cache)
        refuse_other_records("extra_k_cache", extra_k_cache)
        refuse_fp8_q(q)
        raise
    _decode_usage.note(form, q, k_cache)
    return result


def flash_mla_sparse_fwd(
    q: Any,
    kv: Any,
    indices: Any,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Any = None,
    topk_length: Any = None,
    out: Any = None,
    return_log2_lse: bool | None = None,
    *,
    use_legacy: bool = False,
) -> tuple[Any, Any, Any]:
    """`rawmla.flash_mla_sparse_fwd` with the arguments of every generation of FlashMLA.

    Arrays, results, allocation, streams and errors are as in `rawmla.flash_mla_sparse_fwd`, but
    `max_logits` and `lse` are natural logarithms by default, which is what FlashMLA's kernels return.

    Parameters
    ----------
    out : array, optional
        vLLM's eighth argument. A bool in its place is sgl-flash-mla's `use_legacy`.
    return_log2_lse : bool, optional
        sgl-flash-mla's: True gives `max_logits` and `lse` in base 2, False gives None for both. None: they
        are natural.
    use_legacy : bool
        Changes nothing.
    """
    form = FLASH_MLA
    if out is not None:
        form = VLLM
        if type(out) is bool:
            form, use_legacy, out = SGL, out, None
    if use_legacy is not False or return_log2_lse is not None:
        form = SGL
        as_bool("use_legacy", use_legacy)
        if return_log2_lse is not None:
            as_bool("return_log2_lse", return_log2_lse)
    log_base = "2" if return_log2_lse else "e"
    result = sparse_prefill.flash_mla_sparse_fwd(
        q, kv, indices, sm_scale, d_v, attn_sink, topk_length, out, log_base=log_base
    )
    _prefill_usage.note(form, q, kv)
    return (result[0], None, None) if return_log2_lse is False else result


def _refuse_tensors(given: Any) -> None:
    """Raise for a plan of bare arrays, if it is one, where plans are objects."""
    if hasattr(given, "shape"):
        raise ValueError(
            "tile_scheduler_metadata: expected a FlashMLASchedMeta, got a bare array, whose row order this "
            "generation does not define; put the pair of get_mla_decoding_metadata into "
            "FlashMLASchedMeta(tile_scheduler_metadata=..., num_splits=...), or, for plans of the older "
            "get_mla_metadata(...), install with rawmla.install_flash_mla(api='tensors') or set "
            "RAWMLA_FLASH_MLA_API=tensors"
        )
