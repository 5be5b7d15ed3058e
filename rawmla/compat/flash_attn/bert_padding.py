"""Removing and restoring padding, by the names of `flash_attn.bert_padding`, in plain torch with autograd."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

__all__ = [
    "index_first_axis",
    "index_first_axis_residual",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]


def __getattr__(name: str) -> Any:
    """Return `rearrange` or `repeat` of einops, which programs import from here."""
    if name in ("rearrange", "repeat"):
        return getattr(import_module("einops"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def index_first_axis(input: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return the rows `indices` of `input` `[n, ...]`. No index occurs twice."""
    return _Rows.apply(input, indices)


def index_first_axis_residual(
    input: torch.Tensor, indices: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows `indices` of `input`, and `input` itself for a residual connection."""
    return input[indices], input


def index_put_first_axis(values: torch.Tensor, indices: torch.Tensor, first_axis_dim: int) -> torch.Tensor:
    """Return zeros `[first_axis_dim, ...]` with `values` in the rows `indices`, which are int32 or int64."""
    rows = values.new_zeros(first_axis_dim, *values.shape[1:])
    return rows.index_copy(0, indices.long(), values)


class _Rows(torch.autograd.Function):
    """Selection of rows without repetition: its gradient is a copy, where the one of indexing is a sum."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(indices)
        ctx.rows = input.shape[0]
        return input.index_select(0, indices)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor, None]:
        (indices,) = ctx.saved_tensors
        return index_put_first_axis(gradients[0], indices, ctx.rows), None


def unpad_input(
    hidden_states: torch.Tensor, attention_mask: torch.Tensor, unused_mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """Pack the tokens of a padded batch.

    Parameters
    ----------
    hidden_states : tensor
        `[b, s, ...]`.
    attention_mask : tensor
        bool or int `[b, s]`, 1 for a token.
    unused_mask : tensor, optional
        bool or int `[b, s]`, 1 for a place that is kept although it has no token.

    Returns
    -------
    hidden_states : tensor
        `[total, ...]`, the tokens of one request after another.
    indices : tensor
        int64 `[total]`, their places in `[b * s]`.
    cu_seqlens : tensor
        int32 `[b + 1]`, the first token of each request.
    max_seqlen : int
        The longest request. Reading it waits for the GPU.
    seqused : tensor
        int32 `[b]`, tokens of each request without unused places.
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(dim=-1, dtype=torch.int32)
    used = attention_mask.sum(dim=-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    return _packed(hidden_states, indices), indices, _starts(lengths), int(lengths.max().item()), used


def unpad_input_for_concatenated_sequences(
    hidden_states: torch.Tensor, attention_mask_in_length: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Pack the tokens of a batch whose rows hold several requests each.

    `attention_mask_in_length` `[b, s]` has the lengths of the requests of a row, and zeros after them.
    Returns the first four results of `unpad_input`, with the requests of all rows in `cu_seqlens`.
    """
    tokens = attention_mask_in_length.sum(dim=-1, keepdim=True)
    places = torch.arange(attention_mask_in_length.shape[-1], device=tokens.device)
    indices = (places < tokens).flatten().nonzero().flatten()
    lengths = attention_mask_in_length[attention_mask_in_length != 0]
    return _packed(hidden_states, indices), indices, _starts(lengths), int(lengths.max().item())


def pad_input(hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """Undo `unpad_input`: `[total, ...]` to `[batch, seqlen, ...]`, with zeros where there is no token."""
    padded = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return padded.view(batch, seqlen, *hidden_states.shape[1:])


def _packed(hidden_states: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    return index_first_axis(hidden_states.flatten(0, 1), indices)


def _starts(lengths: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
