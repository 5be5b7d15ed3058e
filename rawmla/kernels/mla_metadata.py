"""Host side of cuda_src/kernels/mla_metadata.cu: the scheduling plan, computed on the device."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

from .. import jit
from .common import ceil_div
from .division import divisor

__all__ = [
    "MAX_BATCH",
    "NOT_UNIFORM",
    "TokenCounts",
    "UniformPlan",
    "launch",
    "num_sm_parts",
    "num_sm_parts_sparse",
    "spec",
    "specs",
    "uniform_plan",
]

MAX_BATCH = 16384
_BLOCK_M = 64
# Of the plan: see mla_metadata.cu
_MAX_FIXED_COST, _FIXED_COST_DIVISOR = 3, 3
_SHORT_PART_FACTOR, _MAX_SHORT_PART = 32, 16
_PARAMS = struct.Struct("<2Q2i 2Q6i3I4i4x")  # Params of mla_metadata.cu


def _variant(max_batch: int, threads: int) -> jit.KernelSpec:
    smem_bytes = 8 * max_batch + 512  # start [max_batch + 1], blocks [max_batch], 2 x up to 32 warp sums
    defines = (("MAX_BATCH", max_batch), ("SMEM_BYTES", smem_bytes), ("THREADS", threads))
    return jit.KernelSpec("mla_metadata", defines, threads=threads, smem_bytes=smem_bytes)


_SMALL_BATCH = 512
_SMALL = _variant(_SMALL_BATCH, 256)
_LARGE = _variant(MAX_BATCH, 1024)


def spec(b: int) -> jit.KernelSpec:
    """The variant for a batch: few threads meet sooner."""
    return _SMALL if b <= _SMALL_BATCH else _LARGE


def specs() -> list[jit.KernelSpec]:
    """All variants."""
    return [_SMALL, _LARGE]


def num_sm_parts(sm_count: int, s_q: int, h_q: int, h_kv: int) -> int:
    """Parts of a plan: they fill the GPU when each 64-row tile of each KV head takes one CTA per part."""
    return max(sm_count // (h_kv * max(ceil_div(s_q * (h_q // h_kv), _BLOCK_M), 1)), 1)


def num_sm_parts_sparse(sm_count: int, s_q: int, h_q: int) -> int:
    """The same where each query token attends keys of its own: each 64-head tile of each takes one CTA."""
    return max(sm_count // (max(s_q, 1) * ceil_div(h_q, _BLOCK_M)), 1)


class UniformPlan(NamedTuple):
    """A plan of requests of as many blocks each, without arrays: UniformPlan of cuda_src/mla/plan.cuh."""

    blocks: int
    pitch: int
    length: int

    @property
    def cuts(self) -> bool:
        """Whether a request may be in several parts, as in any plan in arrays, which nobody has looked at."""
        return not self.length or self.length % self.pitch != 0


NOT_UNIFORM = UniformPlan(0, 0, 0)
"""The plan is in arrays."""


def uniform_plan(b: int, blocks: int, num_parts: int) -> UniformPlan:
    """The plan of mla_metadata.cu for `b` requests of `blocks` blocks each, but with all idle rows last."""
    fixed = min(_MAX_FIXED_COST, b * blocks // num_parts // _FIXED_COST_DIVISOR)
    shortest = 1
    while shortest * shortest * _SHORT_PART_FACTOR < blocks and shortest < _MAX_SHORT_PART:
        shortest += 1
    length = max(ceil_div(b * blocks + (b - 1) * fixed, num_parts), shortest)
    requests = ceil_div(b, num_parts)
    if requests > 1:
        if requests * (blocks + fixed) - fixed <= length:
            return UniformPlan(blocks, blocks + fixed, requests * (blocks + fixed))
    else:
        part_blocks = max(ceil_div(blocks, num_parts // b), shortest)
        if part_blocks <= length:
            return UniformPlan(blocks, ceil_div(blocks, part_blocks) * part_blocks, part_blocks)
    return UniformPlan(blocks, blocks + fixed, length)


class TokenCounts(NamedTuple):
    """How many tokens each request attends: TokenCounts of cuda_src/mla/plan.cuh.

    ``lengths`` and ``extra_lengths`` are device addresses of int32 [b], or 0 for `most` everywhere.
    """

    lengths: int
    extra_lengths: int = 0
    most: int = 2**31 - 1
    extra_most: int = 0


def launch(
    *,
    device: int,
    stream: int,
    capturing: Callable[[], bool],
    tokens: TokenCounts,
    b: int,
    num_parts: int,
    sched_meta: int,
    num_splits: int,
    splits_length: int,
    object_layout: bool,
    batch_invariant: bool,
) -> None:
    """Enqueue the plan of a batch; arrays are given as device addresses.

    ``sched_meta`` is int32 [num_parts, 8], ``num_splits`` int32 [splits_length] with at least b + 1 elements,
    all of which are written: past element b each is the total, so that requests past the batch have no
    splits. ``object_layout`` chooses the order of a row's fields (cuda_src/mla/plan.cuh).
    """
    kernel = jit.get_kernel(spec(b), device, capturing=capturing)
    parts_per_request = max(num_parts // b, 1)
    magics, shifts = zip(divisor(num_parts), divisor(b), divisor(parts_per_request), strict=True)
    params = _PARAMS.pack(
        *tokens, sched_meta, num_splits, b, num_parts, object_layout, batch_invariant,
        ceil_div(b, num_parts), parts_per_request, *magics, *shifts, splits_length,
    )  # fmt: skip
    kernel.launch((1, 1, 1), params, stream, pdl=True)
