"""The mask function of transformers' models: padding and documents in the form that rawmla's functions take.

transformers calls `make_mask` once for each forward pass and kind of layer, and hands the result to every
layer. The result is None if the causal diagonal and the window alone hide keys. Otherwise it is one of:

- Lengths, int32 `[2, 1, 1, b]`: the first key of each request and the end of its keys. They stay on the
  device, so no step of a static cache waits for the GPU. Four dimensions keep transformers from changing it.
- A marker, int32 `[0, 1, 1, b]`, with an attribute `segments`: requests that have to be packed first.

A causal diagonal ends at the last key of the lengths. So padding on the right of a causal batch is not
hidden: only queries of the padding see it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.masking_utils import causal_mask_function
from transformers.utils.import_utils import is_tracing

_HOLES = (
    "attention_mask: rawmla takes masks with hidden keys between visible ones in eager calls without a "
    "static cache alone; pad on one side, or use attn_implementation='sdpa'"
)
_FUTURE = (
    "attention_mask: rawmla cannot let tokens of an image or block see later tokens; use "
    "attn_implementation='sdpa' or 'flex_attention'"
)


_OTHER_MASKS = (
    "aimv2_text_model", "diffusion_gemma", "diffusion_gemma_text", "pegasus_x", "phi4_multimodal_vision"
)  # fmt: skip
"""Types of models whose layers say another causality or window than their masks have."""


class Segments(NamedTuple):
    """Packed requests. The tokens of `[b, s]` that take part are rows of a packed array."""

    rows_q: torch.Tensor | None
    """Flat indices of the queries; None for all."""
    rows_k: torch.Tensor | None
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor | None:
    """Make the mask of one forward pass, as transformers' `AttentionMaskInterface` describes it.

    Reads a few numbers from the device if there is a padding mask, or if documents are possible, but never
    under torch.compile, in a graph capture, or for a static cache. There an assertion on the device finds
    masks that cannot be served.
    """
    device = options["device"]
    is_causal = "allow_is_bidirectional_skip" not in options  # an option of bidirectional masks alone
    if not torch.compiler.is_compiling():
        _refuse_model(options.get("config"), is_causal and q_length > 1)
    _refuse_others(kv_offset + kv_length, options)
    # Keys end after the last query. A static cache is longer, and keeps its number of tokens on the device.
    end: Any = q_offset + q_length - kv_offset if is_causal else kv_length
    is_static = isinstance(end, torch.Tensor) or end != kv_length
    # A static cache of a window is as long as the window; a step over it never goes without a mask.
    is_static |= is_causal and q_length == 1 and not options.get("allow_is_causal_skip", True)
    padding = None
    if attention_mask is not None:
        missing = kv_offset + kv_length - attention_mask.shape[-1]
        padding = torch.nn.functional.pad(attention_mask.bool(), (0, max(missing, 0)))
        padding = padding[:, kv_offset : kv_offset + kv_length]
    tokens = None
    if is_causal and q_length > 1 and mask_function is not causal_mask_function:
        tokens = _Tokens(mask_function, batch_size, q_length, q_offset, device)

    if is_static or is_tracing(padding):
        if padding is not None:
            torch._assert_async(~_has_holes(padding), _HOLES)
        if tokens is not None:
            torch._assert_async(~tokens.see_next().any(), _FUTURE)
    else:
        segments = None
        if tokens is not None:
            _refuse_future(tokens)
            if padding is None and q_length == kv_length:
                segments = find_documents(tokens.begin())
        if padding is not None:
            hidden, holes, keys, queries = _read(padding, q_length)
            if holes:
                segments = _without_holes(padding, q_length, keys, queries if is_causal else None)
            elif not hidden:
                padding = None
        if segments is not None:
            marker: Any = torch.empty((0, 1, 1, batch_size), dtype=torch.int32, device=device)
            marker.segments = segments
            return marker
    if padding is None and not is_static:
        return None
    return _lengths(batch_size, padding, end, is_causal, device)


def _refuse_model(config: Any, is_causal: bool) -> None:
    """Refuse models whose layers would not attend as their masks say, or do not call attention functions."""
    kind = getattr(config, "model_type", None)
    layers = getattr(config, "num_hidden_layers", None)
    if not _can_attend(config.__class__) or getattr(config, "index_topk", None) is not None:
        reason = "attend by functions of their own"
    elif kind in _OTHER_MASKS or (layers and layers == getattr(config, "num_kv_shared_layers", 0)):
        reason = "have masks that their layers do not know"  # Gemma 4's assistants share all keys
    elif is_causal and getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        reason = "have a causal mask here and layers without causality"
    else:
        return
    raise ValueError(
        f"attn_implementation: models of {type(config).__name__} {reason}, so rawmla cannot serve them; use "
        "attn_implementation='eager'"
    )


def _refuse_others(keys: int, options: dict[str, Any]) -> None:
    """Refuse masks that are no padding, documents, diagonal or window."""
    if options.get("use_vmap"):
        raise ValueError(
            "attention_mask: rawmla cannot follow a mask function of the model's or user's; use "
            "attn_implementation='sdpa' or 'flex_attention'"
        )
    chunk = getattr(options.get("config"), "attention_chunk_size", None)
    if chunk is not None and options.get("local_size") == chunk and keys > chunk:
        raise ValueError(
            f"attention_mask: rawmla has no attention in chunks of {chunk} tokens, got {keys} keys; use "
            "attn_implementation='sdpa' or 'flex_attention'"
        )


@lru_cache
def _can_attend(config: type) -> bool:
    """Whether models of a configuration call attention functions, as far as their classes tell."""
    module = sys.modules.get(config.__module__.replace("configuration_", "modeling_"))
    found = vars(module).values() if module else ()
    models: list[Any] = [x for x in found if isinstance(x, type) and issubclass(x, PreTrainedModel)]
    own = [x for x in models if x is not PreTrainedModel]
    return not own or any(x._supports_sdpa or x._supports_flash_attn for x in own)


def _has_holes(padding: torch.Tensor) -> torch.Tensor:
    """Whether the visible keys of some request are more than one range."""
    before = torch.nn.functional.pad(padding, (1, 0))[:, :-1]
    return ((padding & ~before).sum(1) > 1).any()


def _lengths(
    batch_size: int, padding: torch.Tensor | None, end: Any, is_causal: bool, device: Any
) -> torch.Tensor:
    """Make the first keys and ends of the requests. ``end`` is where the diagonal of a causal mask ends."""
    start = torch.zeros(batch_size, dtype=torch.int32, device=device)
    ends = start + end
    if padding is not None:
        start = (padding.cumsum(1) == 0).sum(1)
        if not is_causal:
            ends = start + padding.sum(1)
        start = torch.minimum(start, ends)
    return torch.stack([start, ends]).to(torch.int32).view(2, 1, 1, batch_size)


class _Tokens:
    """Relations of neighbouring tokens, as a mask function of transformers has them.

    Documents show in it as tokens that do not see the one before; so they are found in any mask function.
    """

    def __init__(
        self, mask_function: Callable[..., Any], batch_size: int, q_length: int, q_offset: Any, device: Any
    ) -> None:
        self.mask_function = mask_function
        self.batch = torch.arange(batch_size, device=device)[:, None]
        self.head = torch.zeros((), dtype=torch.int64, device=device)
        self.later = (torch.arange(1, q_length, device=device) + q_offset)[None]

    def see_next(self) -> torch.Tensor:
        """Whether tokens see the next one, bool `[b, q_length - 1]`."""
        return self._see(self.later - 1, self.later)

    def begin(self) -> torch.Tensor:
        """Whether tokens begin a document, bool `[b, q_length]`."""
        return torch.nn.functional.pad(~self._see(self.later, self.later - 1), (1, 0), value=True)

    def _see(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        seen: torch.Tensor = self.mask_function(self.batch, self.head, queries, keys)
        return seen.expand(len(self.batch), -1)


def _refuse_future(tokens: _Tokens) -> None:
    """Read whether tokens see later ones, and refuse that."""
    if tokens.see_next().any():
        raise ValueError(_FUTURE)


def _read(padding: torch.Tensor, q_length: int) -> list[int]:
    """Read in one copy what decides the form of a mask.

    Returns whether a key is hidden, whether one between visible ones is, and how many keys and queries are
    visible.
    """
    facts = [~padding.all(), _has_holes(padding), padding.sum(), padding[:, -q_length:].sum()]
    numbers: list[int] = torch.stack([fact.to(torch.int64) for fact in facts]).tolist()
    return numbers


def find_documents(begins: torch.Tensor) -> Segments | None:
    """Make segments of documents. Their number and the longest length are read from the device, in one copy.

    ``begins`` says of each token of `[b, s]` whether a document begins there, as each row does. Returns None
    if there are no more documents than rows.
    """
    places = torch.arange(begins.shape[1], device=begins.device)
    first = torch.where(begins, places, 0).cummax(1).values
    count, longest = torch.stack([begins.sum(), (places - first).amax() + 1]).tolist()
    if count == len(begins):
        return None
    cu_seqlens = torch.nn.functional.pad(_rows(begins, count), (0, 1), value=begins.numel()).to(torch.int32)
    return Segments(None, None, cu_seqlens, cu_seqlens, longest, longest)


def _without_holes(padding: torch.Tensor, q_length: int, keys: int, queries: int | None) -> Segments:
    """Pack the visible keys, and the visible ones of the last tokens as queries.

    Without a diagonal, all queries stay: they may be another sequence's.
    """
    cu_seqlens_k = _starts(padding.sum(1))
    rows_k = _rows(padding, keys)
    if queries is None:
        cu_seqlens_q, rows_q = _starts(torch.full_like(cu_seqlens_k[1:], q_length)), None
    else:
        visible = padding[:, -q_length:]
        cu_seqlens_q, rows_q = _starts(visible.sum(1)), _rows(visible, queries)
    return Segments(rows_q, rows_k, cu_seqlens_q, cu_seqlens_k, q_length, padding.shape[1])


def _starts(lengths: torch.Tensor) -> torch.Tensor:
    """Make cu_seqlens of lengths."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


def _rows(chosen: torch.Tensor, count: int) -> torch.Tensor:
    """The flat indices of true elements, whose number is known, without waiting for the device."""
    return chosen.flatten().to(torch.int8).argsort(descending=True, stable=True)[:count]
