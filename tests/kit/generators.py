"""Inputs for tests and benchmarks: described by a small dataclass, built where they are used, poisoned where
unused.

Everything a kernel must not read is made to be noticed: cache rows past a request's length, pages no request
refers to and the gap between pages hold NaN (or Inf), block_table entries past the length hold 2147480000.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

GARBAGE_PAGE = 2147480000
"""What block_table entries that nobody may follow hold."""

SHARP_FACTOR = 48.0
"""Factor on the sharp query rows; their scores have a standard deviation near 3.5 instead of 0.07."""

_POISON = {"nan": float("nan"), "inf": float("inf"), "none": None}


class Case:
    """What a dataclass of a call's sizes and options has besides its fields."""

    __slots__ = ()

    @property
    def id(self) -> str:
        """What differs from the defaults: a name for people and for pytest."""
        changed = [
            f"{one.name}={getattr(self, one.name)}"
            for one in fields(self)  # type: ignore[arg-type]
            if getattr(self, one.name) not in (one.default,)  # NaN is in (NaN,)
        ]
        return " ".join(changed).replace(", ", ",") or "default"


@dataclass(frozen=True, slots=True)
class DenseCase(Case):
    """One dense decoding problem.

    Attributes:
        b, s_q, h_q, h_kv, d_qk, page_block_size: the shape, as in `flash_mla_with_kvcache`.
        s_k: tokens per request; their mean when `varlen`.
        varlen: lengths from a normal distribution of mean s_k and deviation s_k / 2, at least s_q.
        causal: passed on to the call.
        dtype: "bfloat16" or "float16", of q and cache.
        seed: of lengths, values and page order.
        zero_lengths: about a quarter of the requests have no tokens.
        lengths: the lengths themselves, instead of s_k, varlen and zero_lengths.
        sharp: every second query row is scaled up so that its softmax has few large entries; the others stay
        flat.
        poison: "nan", "inf" or "none": what unreferenced cache rows hold.
        block_gap: rows of unused cache between consecutive pages (the block stride exceeds the block).
        table_gap: unused entries between consecutive rows of block_table (its row stride exceeds its width).
    """

    b: int
    s_q: int = 1
    s_k: int = 4096
    h_q: int = 128
    h_kv: int = 1
    d_qk: int = 576
    page_block_size: int = 64
    varlen: bool = False
    causal: bool = False
    dtype: str = "bfloat16"
    seed: int = 0
    zero_lengths: bool = False
    lengths: tuple[int, ...] | None = None
    sharp: bool = False
    poison: str = "nan"
    block_gap: int = 0
    table_gap: int = 0

    def request_lengths(self) -> list[int]:
        """Tokens per request; the same for every dtype, layout and framework."""
        if self.lengths is not None:
            return list(self.lengths)
        draw = random.Random(self.seed)
        lengths = [self.s_k] * self.b
        if self.varlen:
            lengths = [max(int(draw.normalvariate(self.s_k, self.s_k / 2)), self.s_q) for _ in lengths]
        if self.zero_lengths:
            lengths = [0 if draw.random() < 0.25 else length for length in lengths]
        return lengths


@dataclass(slots=True)
class DenseInputs:
    """Arrays of one framework for one case, ready to be passed on."""

    case: DenseCase
    q: Any
    k_cache: Any
    block_table: Any
    cache_seqlens: Any
    lengths: list[int]


@dataclass(frozen=True, slots=True)
class _Pages:
    """Which page holds what: built on the host, the same for every framework."""

    num_blocks: int
    block_table: NDArray[np.int32]  # [b, width + gap]
    width: int


def make_dense_inputs(case: DenseCase, framework: str = "torch", device: Any = "cuda") -> DenseInputs:
    """Inputs for `case` in the arrays of `framework`: "torch" (built on `device`) or "numpy".

    q is normal, clamped to [-1, 1]; the cache is normal with deviation 0.1; pages are in random order and a
    few of them are not referred to. One seed gives one set of values per device.
    """
    lengths = case.request_lengths()
    pages = _assign_pages(case, lengths)
    place = _to_torch(device if framework == "torch" else "cpu")
    q, k_cache = _values(case, lengths, pages, device if framework == "torch" else "cpu")
    return DenseInputs(
        case=case,
        q=as_framework(q, framework),
        k_cache=as_framework(k_cache[:, : case.page_block_size], framework),
        block_table=as_framework(place(pages.block_table)[:, : pages.width], framework),
        cache_seqlens=as_framework(place(np.array(lengths, dtype=np.int32)), framework),
        lengths=lengths,
    )


def as_framework(tensor: Any, framework: str) -> Any:
    """A tensor as it is, or one of the CPU as a NumPy array, with the same strides; None stays None."""
    if framework == "torch" or tensor is None:
        return tensor
    if framework != "numpy":
        raise ValueError(f"`framework`: expected 'torch' or 'numpy', got {framework!r}")
    import ml_dtypes
    import torch

    if tensor.dtype != torch.bfloat16:
        return tensor.numpy()
    return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)


def on_numpy(inputs: Any) -> Any:
    """Inputs of torch CPU tensors as NumPy arrays, bf16 and fp16 as float64."""
    moved = {}
    for field in fields(inputs):
        array = getattr(inputs, field.name)
        if hasattr(array, "element_size"):
            moved[field.name] = array.double().numpy() if array.element_size() == 2 else array.numpy()
    return replace(inputs, **moved)


COPIED_AT_A_TIME = 1 << 26
"""Elements that move to other pages at a time, which bounds the memory that this takes."""


def repage(inputs: DenseInputs, page_block_size: int) -> DenseInputs:
    """The same torch q and tokens in a new, freshly poisoned cache with another page size."""
    case = replace(inputs.case, page_block_size=page_block_size)
    pages = _assign_pages(case, inputs.lengths)
    device = inputs.q.device
    place = _to_torch(device)
    old_page = inputs.case.page_block_size
    request, token = (place(index) for index in _every_token(inputs.lengths))
    table = place(pages.block_table)
    k_cache = _torch_empty_cache(case, pages, device)
    k_cache.fill_(_POISON[case.poison] or 0.0)
    step = max(1, COPIED_AT_A_TIME // (case.h_kv * case.d_qk))
    for r, t in zip(request.split(step), token.split(step), strict=True):
        source = inputs.k_cache[inputs.block_table[r, t // old_page].long(), t % old_page]
        k_cache[table[r, t // page_block_size].long(), t % page_block_size] = source
    return DenseInputs(
        case,
        inputs.q,
        k_cache[:, :page_block_size],
        table[:, : pages.width],
        inputs.cache_seqlens,
        inputs.lengths,
    )


def _every_token(lengths: list[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Request and position of every token, request after request."""
    counts = np.array(lengths, dtype=np.int64)
    request = np.repeat(np.arange(len(lengths)), counts)
    first = np.cumsum(counts) - counts
    return request, np.arange(len(request)) - first[request]


def _assign_pages(case: DenseCase, lengths: list[int]) -> _Pages:
    size = case.page_block_size
    counts = np.array([-(-length // size) for length in lengths], dtype=np.int64)
    used = int(counts.sum())
    num_blocks = used + 2 + used // 16
    order = np.random.default_rng(case.seed).permutation(num_blocks)
    request, position = _every_token(counts.tolist())
    # One column more than the longest request needs: every row of the table ends in garbage.
    width = int(counts.max(initial=0)) + 1
    table = np.full((len(lengths), width + case.table_gap), GARBAGE_PAGE, dtype=np.int32)
    table[request, position] = order[:used]
    return _Pages(num_blocks, table, width)


def sharp_rows(case: Any, device: Any) -> Any:
    """True for the query rows to scale up, `[b, s_q, h_q, 1]`."""
    import torch

    i, j, h = (torch.arange(n, device=device) for n in (case.b, case.s_q, case.h_q))
    return ((i[:, None, None, None] + j[None, :, None, None] + h[None, None, :, None]) % 2) == 0


def _torch_empty_cache(case: DenseCase, pages: _Pages, device: Any) -> Any:
    import torch

    shape = (pages.num_blocks, case.page_block_size + case.block_gap, case.h_kv, case.d_qk)
    return torch.empty(shape, dtype=getattr(torch, case.dtype), device=device)


def _values(case: DenseCase, lengths: list[int], pages: _Pages, device: Any) -> tuple[Any, Any]:
    """q and the cache, poison where nobody may read."""
    import torch

    draw = torch.Generator(device=device).manual_seed(case.seed)
    q = torch.randn(case.b, case.s_q, case.h_q, case.d_qk, generator=draw, device=device).clamp_(-1.0, 1.0)
    if case.sharp:
        q = torch.where(sharp_rows(case, device), q * SHARP_FACTOR, q)
    k_cache = _torch_empty_cache(case, pages, device).normal_(0.0, 0.1, generator=draw)
    poison = _POISON[case.poison]
    if poison is not None:
        request, token = _every_token(lengths)
        is_token = np.zeros(k_cache.shape[:2], dtype=bool)
        page = case.page_block_size
        is_token[pages.block_table[request, token // page], token % page] = True
        k_cache.masked_fill_(~_to_torch(device)(is_token)[..., None, None], poison)
    return q.to(k_cache.dtype), k_cache


def _to_torch(device: Any) -> Any:
    import torch

    return lambda array: torch.from_numpy(array).to(device)
