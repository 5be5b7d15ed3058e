"""Errors for what FlashAttention can do and rawmla cannot; they name the argument and the remedy."""

from __future__ import annotations

import os
import warnings
from typing import Any, NoReturn

DROPOUT_MODES = ("error", "ignore")
_VARIABLE = "RAWMLA_FLASH_ATTN_DROPOUT"
_has_warned = False


def check_dropout_mode(mode: Any, name: str = "dropout") -> str:
    """Return the mode, or raise ValueError if there is no such mode."""
    if mode not in DROPOUT_MODES:
        raise ValueError(f"{name}: expected 'error' or 'ignore', got {mode!r}")
    return mode


DEFAULT_DROPOUT = check_dropout_mode(os.environ.get(_VARIABLE, "error"), _VARIABLE)
_dropout = DEFAULT_DROPOUT


def set_dropout(mode: str) -> None:
    """Choose how a dropout_p above 0 is treated: see `rawmla.install_flash_attn`."""
    global _dropout, _has_warned
    _dropout, _has_warned = mode, False


def refuse_dropout(dropout_p: Any) -> None:
    """Raise for a dropout_p that is not 0, or warn once where it is to be ignored."""
    global _has_warned
    if _dropout == "error":
        raise ValueError(
            f"dropout_p: rawmla has no dropout, got {dropout_p}; set attention_dropout=0 or "
            'install_flash_attn(dropout="ignore")'
        )
    if not _has_warned:
        _has_warned = True
        warnings.warn(f"dropout_p: rawmla has no dropout, {dropout_p} is taken as 0", stacklevel=3)


def refuse_dtype(name: str, x: Any) -> NoReturn:
    """Raise for an array that is neither bfloat16 nor float16."""
    dtype = getattr(x, "dtype", None)
    if dtype is None:
        raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
    short = str(dtype).removeprefix("torch.")
    if short.startswith("float8"):
        raise NotImplementedError(
            f"{name}: not supported by rawmla in {short}; pass bfloat16 or float16 (an FP8 model needs "
            "another attention implementation)"
        )
    raise TypeError(
        f"{name}: expected bfloat16 or float16, got {short}; cast the model (dtype=torch.bfloat16) or use "
        "torch.autocast"
    )


_REMEDIES = {
    "qv": "call rawmla.flash_mla_with_kvcache for absorbed MLA, or put qv into more columns of q",
    "attention_chunk": "take attn_implementation='sdpa' for models with attention in chunks",
    "gather_kv_indices": "call rawmla.flash_mla_sparse_fwd or rawmla.flash_mla_with_kvcache(indices=...)",
    "seqused_q": "pass cu_seqlens_q and cu_seqlens_k, without a page table",
    **dict.fromkeys(("sequed_q", "sequed_k"), "pass cu_seqlens_q and cu_seqlens_k with it"),
    "leftpad_k": "pass block_table, or call flash_attn_with_kvcache(cache_leftpad=...)",
    **dict.fromkeys(
        (
            "score_mod",
            "score_mod_bwd",
            "mask_mod",
            "aux_tensors",
            "aux_scalars",
            "block_sparse_tensors",
            "block_sparse_tensors_bwd",
        ),
        "call rawmla.flex_attention, which takes Python functions",
    ),
}


def unsupported(name: str) -> NoReturn:
    """Raise for an argument that no kernel of rawmla serves."""
    raise NotImplementedError(f"{name}: not supported by rawmla; {_REMEDIES[name]}")


def refuse_given(**arguments: Any) -> None:
    """Raise for the first argument that is not None: no kernel serves any of them."""
    for name, value in arguments.items():
        if value is not None:
            unsupported(name)
