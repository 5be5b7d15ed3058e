"""The attention function of transformers' models, over the public functions of rawmla."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from transformers.integrations.flash_attention import get_target_dtype
from transformers.utils.import_utils import is_tracing

import rawmla

from .masks import Segments, find_documents

FUNCTIONS = ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache")
"""Names of the functions that models call."""

MAX_HEAD_DIM = 256
_warned: set[str] = set()


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as transformers' `AttentionInterface` describes it.

    query, key and value are `[b, h, s, d]`, ``attention_mask`` is a result of `make_mask`. Returns out,
    `[b, s, h, d_v]`, and None in place of probabilities.
    """
    _check(query, value, attention_mask, options)
    if dropout:
        _warn_once("dropout: rawmla has none, so attention_dropout counts as 0")
    if options.get("output_attentions"):
        _warn_once("output_attentions: rawmla returns no probabilities; use attn_implementation='eager'")
    try:
        dtype = get_target_dtype(query, module)  # of float32 queries, which norms in float32 may give
    except StopIteration:  # it takes the dtype of a Linear layer, and GPT-2 has none
        dtype = None
    q, k, v = [(x if dtype is None else x.to(dtype)).transpose(1, 2) for x in (query, key, value)]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    left = -1 if sliding_window is None else sliding_window - 1
    of_model = getattr(getattr(module, "config", None), "sliding_window", None)
    if not causal and sliding_window is not None and sliding_window == of_model:
        left += 1  # a bidirectional mask shows as many keys on either side
    shared: dict[str, Any] = {
        **{"softmax_scale": scaling, "causal": causal, "softcap": softcap or 0.0, "attn_sink": s_aux},
        "window_size": (left, 0 if causal else left),
    }
    tensors = [x for x in (q, k, v, s_aux) if x is not None]
    needs_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)

    if options.get("cu_seq_lens_q") is not None:
        return _attend_segments(q, k, v, _given_segments(q, k, options), shared), None
    if attention_mask is None:
        if q.shape[1] != k.shape[1] and not needs_gradient:
            return rawmla.flash_attn_with_kvcache(q, k, v, **shared)[0], None
        documents = _documents_of(q, k, options.get("position_ids")) if causal else None
        if documents is not None:
            return _attend_segments(q, k, v, documents, shared), None
        return rawmla.flash_attn_func(q, k, v, **shared)[0], None
    if attention_mask.shape[0] == 0:
        return _attend_segments(q, k, v, attention_mask.segments, shared), None
    start, end = attention_mask.flatten(1)
    # The diagonal of the cache function ends at the last key, which only causal queries share.
    if needs_gradient or (left >= 0 and not causal):
        return _attend_padded(q, k, v, start, end, shared), None
    out = rawmla.flash_attn_with_kvcache(q, k, v, cache_leftpad=start, cache_seqlens=end, **shared)[0]
    return out, None


def _check(
    query: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None, options: dict[str, Any]
) -> None:
    """Refuse calls that rawmla cannot serve."""
    for name, size in (("query", query.shape[-1]), ("value", value.shape[-1])):
        if size > MAX_HEAD_DIM:
            raise ValueError(
                f"{name}: rawmla attends heads of up to {MAX_HEAD_DIM} columns, got {size}; use "
                "attn_implementation='sdpa'"
            )
    if options.get("position_bias") is not None:
        raise ValueError("position_bias: rawmla takes none; use attn_implementation='sdpa'")
    if attention_mask is None:
        return
    shape = list(attention_mask.shape)
    is_ours = attention_mask.dtype == torch.int32 and shape[1:] == [1, 1, query.shape[0]]
    if not is_ours or shape[0] not in (0, 2):
        raise ValueError(
            f"attention_mask: rawmla takes padding masks [batch, keys], got shape {shape} of "
            f"{attention_mask.dtype}; use attn_implementation='sdpa' or 'flex_attention'"
        )
    if shape[0] == 0 and not hasattr(attention_mask, "segments"):
        raise ValueError(
            "attention_mask: documents and masks with holes cannot go from one device to another; keep the "
            "layers on one device, or use attn_implementation='sdpa'"
        )


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, stacklevel=2)


def _documents_of(q: torch.Tensor, k: torch.Tensor, position_ids: Any) -> Segments | None:
    """Find documents packed in one row by their positions, as some models make no mask of these.

    Layers of a pass share the tensor, so the first one reads from the device. Under torch.compile an
    assertion on the device refuses documents.
    """
    if position_ids is None or position_ids.ndim != 2 or not 1 < q.shape[1] == k.shape[1]:
        return None
    if is_tracing(position_ids):
        torch._assert_async(
            (position_ids.diff() == 1).all(),
            "position_ids: pass cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k too, with packed "
            "documents under torch.compile",
        )
        return None
    if len(q) != 1:
        return None  # transformers' masks show documents of several rows
    version = None if position_ids.is_inference() else position_ids._version
    known = getattr(position_ids, "rawmla_documents", None)
    if known is None or version is None or known[0] != version:
        begins = torch.nn.functional.pad(position_ids.diff() != 1, (1, 0), value=True)
        known = position_ids.rawmla_documents = version, find_documents(begins)
    found: Segments | None = known[1]
    return found


def _given_segments(q: torch.Tensor, k: torch.Tensor, options: dict[str, Any]) -> Segments:
    """Segments of the tensors that transformers' collators and users pass for packed documents."""
    starts = [options[f"cu_seq_lens_{side}"].to(torch.int32) for side in "qk"]
    longest = []
    for side, x in (("q", q), ("k", k)):
        length = options.get(f"max_length_{side}")
        # A tensor is on the device, and reading it would wait: all tokens are a bound as well.
        longest.append(length if isinstance(length, int) else x.shape[0] * x.shape[1])
    return Segments(None, None, starts[0], starts[1], longest[0], longest[1])


def _attend_segments(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments, shared: dict[str, Any]
) -> torch.Tensor:
    """Attend packed requests; out is 0 at tokens that do not take part."""
    rows_q, rows_k, *lengths = segments
    if rows_k is not None and rows_q is None and shared["window_size"][0] >= 0:
        raise ValueError(
            "attention_mask: rawmla cannot have hidden keys between visible ones in a window without "
            "causality; use attn_implementation='sdpa'"
        )
    b, s_q = q.shape[:2]
    q, k, v = [x.flatten(0, 1) for x in (q, k, v)]
    if rows_k is not None:
        k, v = k[rows_k], v[rows_k]
    out: torch.Tensor = rawmla.flash_attn_varlen_func(
        q if rows_q is None else q[rows_q], k, v, *lengths, **shared
    )[0]
    if rows_q is not None:
        out = out.new_zeros((b * s_q, *out.shape[1:])).index_copy(0, rows_q, out)
    return out.unflatten(0, (b, s_q))


def _attend_padded(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    shared: dict[str, Any],
) -> torch.Tensor:
    """Attend padded requests with gradients, where they are, without packing them.

    Each request is two segments, so that its padding on the left is a segment whose tokens are not used.
    Padding on the right is the part of the second one that is not used.
    """
    (b, s_q), s_k = q.shape[:2], k.shape[1]
    keys = end - start
    if shared["causal"]:
        first, queries = (s_q - keys).clamp(min=0), keys.clamp(max=s_q)  # the last query is at the last key
    elif shared["window_size"][0] >= 0:
        first = (start - (s_k - s_q)).clamp(min=0)  # queries are at the last keys
        queries = (end - (s_k - s_q)).clamp(min=0) - first
    else:
        first, queries = torch.zeros_like(start), torch.full_like(start, s_q)
    used_q, used_k = [torch.stack([torch.zeros_like(x), x], 1).flatten() for x in (queries, keys)]
    requests = torch.arange(b, dtype=torch.int32, device=q.device)
    cu_seqlens_q, cu_seqlens_k = [
        torch.nn.functional.pad(
            torch.stack([requests * s, requests * s + skipped], 1).flatten(), (0, 1), value=b * s
        )
        for s, skipped in ((s_q, first), (s_k, start))
    ]
    out: torch.Tensor = rawmla.flash_attn_varlen_func(
        q.flatten(0, 1),
        k.flatten(0, 1),
        v.flatten(0, 1),
        cu_seqlens_q,
        cu_seqlens_k,
        s_q,
        s_k,
        **shared,
        seqused_q=used_q,
        seqused_k=used_k,
    )[0]
    return out.unflatten(0, (b, s_q))
