"""Rotary position embeddings by the names of `flash_attn.layers.rotary`, in plain torch with autograd.

A pair (a, b) of columns becomes (a cos - b sin, a sin + b cos). Products are float32 and the result is
rounded to x's dtype. Columns past the rotary dimension, which is 2 * cos.shape[-1], stay as they are.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = [
    "RotaryEmbedding",
    "apply_rotary",
    "apply_rotary_emb",
    "apply_rotary_emb_func",
    "apply_rotary_emb_kv_",
    "apply_rotary_emb_qkv_",
    "apply_rotary_emb_torch",
    "rotate_half",
]


def rotate_half(x: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """Return x with each pair (a, b) of columns as (-b, a)."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def apply_rotary_emb_torch(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False
) -> torch.Tensor:
    """Rotate x `[b, s, h, d]` by cos and sin, `[s, r / 2]` or `[b, s, r / 2]`, in the dtypes given."""
    columns = 2 * cos.shape[-1]
    if columns > x.shape[-1]:
        raise ValueError(f"cos: expected at most {x.shape[-1] // 2} columns, got {cos.shape[-1]}")
    cos, sin = [
        (y.repeat_interleave(2, -1) if interleaved else torch.cat((y, y), -1)).unsqueeze(-2)
        for y in (cos, sin)
    ]
    head, tail = x[..., :columns], x[..., columns:]
    return torch.cat((head * cos + rotate_half(head, interleaved) * sin, tail), dim=-1)


def apply_rotary(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    seqlen_offsets: int | torch.Tensor = 0,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> torch.Tensor:
    """Rotate x without a graph.

    Parameters
    ----------
    x : tensor
        `[b, s, h, d]`, or `[total, h, d]` with `cu_seqlens`.
    cos, sin : tensor
        `[positions, r / 2]`, r at most d. Positions past the last count as the last.
    seqlen_offsets : int or tensor
        The position of the first token, of all requests or int `[b]`.
    cu_seqlens : tensor, optional
        int32 `[b + 1]`, the first token of each request.
    max_seqlen : int, optional
        Needed with `cu_seqlens` in FlashAttention; it changes nothing here.
    interleaved : bool
        Pairs are the columns (2 i, 2 i + 1), else (i, i + r / 2).
    inplace : bool
        Write into x and return it.
    conjugate : bool
        Rotate backwards, which is the gradient.
    """
    _check(x, cos, sin, seqlen_offsets, cu_seqlens)
    half = cos.shape[1]
    positions = _positions(x, seqlen_offsets, cu_seqlens).clamp_(max=cos.shape[0] - 1)
    c, s = cos[positions].float().unsqueeze(-2), sin[positions].float().unsqueeze(-2)
    if conjugate:
        s = -s
    out = x if inplace else x.clone()
    view = out[..., : 2 * half]
    if interleaved:
        first, second = view[..., ::2], view[..., 1::2]
    else:
        first, second = view[..., :half], view[..., half:]
    a, b = first.float(), second.float()
    turned = a * c - b * s, a * s + b * c  # both before either is written: a may be a view
    first.copy_(turned[0])
    second.copy_(turned[1])
    return out


def _check(x: Any, cos: Any, sin: Any, offsets: Any, cu_seqlens: Any) -> None:
    dims = 4 if cu_seqlens is None else 3
    if x.dim() != dims:
        raise ValueError(f"x: expected {dims} dimensions, got shape {list(x.shape)}")
    if cos.dim() != 2 or 2 * cos.shape[1] > x.shape[-1]:
        raise ValueError(
            f"cos: expected shape [positions, r / 2], r at most {x.shape[-1]}, got {list(cos.shape)}"
        )
    if sin.shape != cos.shape:
        raise ValueError(f"sin: expected shape {list(cos.shape)}, as cos, got {list(sin.shape)}")
    requests = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if isinstance(offsets, torch.Tensor):
        if offsets.shape != (requests,):
            raise ValueError(f"seqlen_offsets: expected shape [{requests}], got {list(offsets.shape)}")
    elif cu_seqlens is None and x.shape[1] + offsets > cos.shape[0]:
        raise ValueError(
            f"cos: expected at least {x.shape[1] + offsets} rows (tokens and seqlen_offsets), got "
            f"{cos.shape[0]}"
        )


def _positions(x: Any, offsets: Any, cu_seqlens: Any) -> torch.Tensor:
    """The position of each token, `[s]`, `[b, s]` or `[total]`."""
    if cu_seqlens is None:
        tokens = torch.arange(x.shape[1], device=x.device)
        return tokens + (offsets.unsqueeze(-1) if isinstance(offsets, torch.Tensor) else offsets)
    tokens = torch.arange(x.shape[0], device=x.device)
    request = torch.searchsorted(cu_seqlens[1:].long(), tokens, right=True)
    request = request.clamp_(max=cu_seqlens.shape[0] - 2)
    tokens = tokens - cu_seqlens[request]
    return tokens + (offsets[request] if isinstance(offsets, torch.Tensor) else offsets)


class _Rotation(torch.autograd.Function):
    """`apply_rotary` of parts of an array that share positions; the gradient is the rotation backwards.

    ``parts`` are functions that give views of the array, each with its tables.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, parts: Any, inplace: bool, options: Any) -> torch.Tensor:
        ctx.parts, ctx.options = parts, options
        out = x if inplace else x.clone()
        for part, cos, sin in parts:
            apply_rotary(part(out), cos, sin, inplace=True, **options)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor, None, None, None]:
        dx = gradients[0].clone()
        for part, cos, sin in ctx.parts:
            apply_rotary(part(dx), cos, sin, inplace=True, conjugate=True, **ctx.options)
        return dx, None, None, None


def _whole(x: torch.Tensor) -> torch.Tensor:
    return x


def apply_rotary_emb(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | torch.Tensor = 0,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
) -> torch.Tensor:
    """Rotate x, with a graph: arguments as in `apply_rotary`. cos and sin have no gradient."""
    options = {"seqlen_offsets": seqlen_offsets, "cu_seqlens": cu_seqlens, "interleaved": interleaved}
    return _Rotation.apply(x, ((_whole, cos, sin),), inplace, options)


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_qkv_(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cos_k: torch.Tensor | None = None,
    sin_k: torch.Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | torch.Tensor = 0,
    num_heads_q: int | None = None,
) -> torch.Tensor:
    """Rotate q and k in place in qkv: `[b, s, 3, h, d]`, or `[b, s, h_q + 2 * h_kv, d]` with `num_heads_q`.

    k has tables of its own with `cos_k` and `sin_k`.
    """
    if qkv.dim() == 5:
        if qkv.shape[2] != 3:
            raise ValueError(f"qkv: expected shape [b, s, 3, h, d], got {list(qkv.shape)}")
        queries, keys = _part(2, 0), _part(2, 1)
    elif num_heads_q is None:
        raise ValueError("num_heads_q: expected an int with a qkv of four dimensions, got None")
    else:
        heads = num_heads_q
        last = heads + (qkv.shape[2] - heads) // 2
        queries, keys = _part(2, slice(0, heads)), _part(2, slice(heads, last))
    tables_k = cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
    options = {"seqlen_offsets": seqlen_offsets, "interleaved": interleaved}
    return _Rotation.apply(qkv, ((queries, cos, sin), (keys, *tables_k)), True, options)


def apply_rotary_emb_kv_(
    kv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    seqlen_offsets: int | torch.Tensor = 0,
) -> torch.Tensor:
    """Rotate k in place in kv `[b, s, 2, h, d]`."""
    options = {"seqlen_offsets": seqlen_offsets, "interleaved": interleaved}
    return _Rotation.apply(kv, ((_part(2, 0), cos, sin),), True, options)


def _part(dim: int, index: int | slice) -> Any:
    """A function that gives a part of an array along a dimension, as a view."""
    return lambda x: x[(slice(None),) * dim + (index,)]


class RotaryEmbedding(torch.nn.Module):
    """Rotary embeddings with their tables, which grow as positions do.

    Parameters
    ----------
    dim : int
        The rotary dimension.
    base : float
        Pair i turns by position * base**(-2 i / dim).
    interleaved : bool
        As in `apply_rotary`.
    scale_base : float, optional
        XPos (arxiv.org/abs/2212.10554): q is multiplied by a power of the position, and k divided by it.
    device : optional
        Where the frequencies are.
    """

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: Any = None,
    ) -> None:
        super().__init__()
        self.dim, self.base, self.interleaved, self.scale_base = dim, float(base), interleaved, scale_base
        self.register_buffer("inv_freq", self._frequencies(device), persistent=False)
        scale = None
        if scale_base is not None:
            scale = (torch.arange(0, dim, 2, device=device, dtype=torch.float32) + 0.4 * dim) / (1.4 * dim)
        self.register_buffer("scale", scale, persistent=False)
        self._tables: tuple[torch.Tensor, ...] = ()  # cos, sin, and with scale_base cos and sin of k

    def _frequencies(self, device: Any) -> torch.Tensor:
        pairs = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)
        return 1.0 / self.base ** (pairs / self.dim)

    # The names of the next three are FlashAttention's: subclasses use them, as ModernBERT's does.

    @property
    def _cos_cached(self) -> torch.Tensor | None:
        return self._tables[0] if self._tables else None

    @property
    def _sin_cached(self) -> torch.Tensor | None:
        return self._tables[1] if self._tables else None

    def _update_cos_sin_cache(self, seqlen: int, device: Any = None, dtype: Any = None) -> None:
        """Make tables for this many positions in a dtype on a device, unless there are such."""
        device = self.inv_freq.device if device is None else torch.device(device)
        if self._tables:
            table = self._tables[0]
            fits = table.shape[0] >= seqlen and (table.device, table.dtype) == (device, dtype)
            if fits and not (self.training and table.is_inference()):
                return
        t = torch.arange(seqlen, device=device, dtype=torch.float32)
        frequencies = self.inv_freq  # a cast of the module would have rounded them
        if frequencies.dtype is not torch.float32 or frequencies.device != device:
            frequencies = self._frequencies(device)
        angles = t.unsqueeze(1) * frequencies
        tables = [angles.cos(), angles.sin()]
        if self.scale_base is not None:
            power = (t - seqlen // 2) / self.scale_base
            scale = self.scale.to(device, torch.float32) ** power.unsqueeze(1)
            tables = [*[table * scale for table in tables], *[table / scale for table in tables]]
        self._tables = tuple(table.to(dtype) for table in tables)

    def forward(
        self,
        qkv: torch.Tensor,
        kv: torch.Tensor | None = None,
        seqlen_offset: int | torch.Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Any:
        """Rotate qkv in place, as `apply_rotary_emb_qkv_`; or, with kv, q and kv, and return both.

        `max_seqlen` says how many positions there are where `seqlen_offset` is a tensor `[b]`.
        """
        if max_seqlen is not None:
            self._update_cos_sin_cache(max_seqlen, qkv.device, qkv.dtype)
        elif isinstance(seqlen_offset, int):
            self._update_cos_sin_cache(qkv.shape[1] + seqlen_offset, qkv.device, qkv.dtype)
        elif not self._tables:
            raise ValueError("max_seqlen: expected an int with a seqlen_offset that is a tensor, got None")
        cos, sin, cos_k, sin_k = (*self._tables, *self._tables)[:4]
        if kv is None:
            return apply_rotary_emb_qkv_(
                qkv, cos, sin, cos_k, sin_k, self.interleaved, seqlen_offset, num_heads_q
            )
        q = apply_rotary_emb(qkv, cos, sin, self.interleaved, True, seqlen_offset)
        return q, apply_rotary_emb_kv_(kv, cos_k, sin_k, self.interleaved, seqlen_offset)
