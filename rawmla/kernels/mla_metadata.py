"""Host side of cuda_src/kernels/mla_metadata.cu: the scheduling plan, computed on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .. import jit
from ..jit.params import I32, POINTER, U32, ParamStruct, struct_type
from .common import INT32_MAX, TILE_ROWS, ceil_div, divisor

MAX_BATCH = 16384
"""Requests of a plan."""
PLAN_COLUMNS = 8
"""int32 of a row of sched_meta."""
# Constants of the plan, the largest cost and part in blocks: see mla_metadata.cu
_MAX_FIXED_COST, _FIXED_COST_DIVISOR = 3, 3
_SHORT_PART_FACTOR, _MAX_SHORT_PART = 32, 16


class UniformPlan(NamedTuple):
    """A plan for requests that all have ``blocks`` blocks, given by three numbers instead of arrays.

    On a line, request i has its blocks from i * ``pitch`` on, and partition p takes the blocks in the p-th
    interval of ``length``. See UniformPlan in cuda_src/mla/plan.cuh.
    """

    blocks: int
    pitch: int
    length: int

    @property
    def cuts(self) -> bool:
        """Whether some request may be split. A plan in arrays may split any: the host does not read it."""
        return not self.length or self.length % self.pitch != 0


NOT_UNIFORM = UniformPlan(0, 0, 0)
"""The plan is in arrays."""


class TokenCounts(NamedTuple):
    """How many tokens each request attends: TokenCounts in cuda_src/mla/plan.cuh.

    ``lengths`` and ``extra_lengths`` are device addresses of int32 [b]; where one is 0, every request has
    ``most`` tokens (``extra_most`` of the extra cache).
    """

    lengths: int
    extra_lengths: int = 0
    most: int = INT32_MAX
    extra_most: int = 0


UNIFORM_PLAN = struct_type(UniformPlan, I32, I32, I32)
TOKEN_COUNTS = struct_type(TokenCounts, POINTER, POINTER, I32, I32)
PARAMS = ParamStruct(
    TOKEN_COUNTS("tokens"),
    POINTER("sched_meta", "num_splits"),
    I32("b", "num_parts", "object_layout", "batch_invariant", "requests_per_part", "parts_per_request"),
    U32("parts_magic", "b_magic", "share_magic"),
    I32("parts_shift", "b_shift", "share_shift"),
    I32("splits_length"),
)


def _variant(max_batch: int, threads: int) -> jit.KernelSpec:
    smem_bytes = 8 * max_batch + 512  # start [max_batch + 1], blocks [max_batch], 2 x up to 32 warp sums
    return jit.KernelSpec("mla_metadata", (("MAX_BATCH", max_batch),), threads, smem_bytes)


_SMALL_BATCH = 512
_SMALL = _variant(_SMALL_BATCH, 256)
_LARGE = _variant(MAX_BATCH, 1024)


def spec(b: int) -> jit.KernelSpec:
    """The variant for a batch: barriers take less time with fewer threads."""
    return _SMALL if b <= _SMALL_BATCH else _LARGE


def specs() -> list[jit.KernelSpec]:
    """All variants."""
    return [_SMALL, _LARGE]


def num_sm_parts(sm_count: int, s_q: int, h_q: int, h_kv: int) -> int:
    """Parts of a plan for dense decoding: as many as give every SM one CTA.

    A partition has one CTA for each tile of query rows of each KV head.
    """
    return max(sm_count // (h_kv * max(ceil_div(s_q * (h_q // h_kv), TILE_ROWS), 1)), 1)


def num_sm_parts_sparse(sm_count: int, s_q: int, h_q: int) -> int:
    """The same for sparse attention, where query tokens select different keys and share no tile."""
    return max(sm_count // (max(s_q, 1) * ceil_div(h_q, TILE_ROWS)), 1)


def uniform_plan(b: int, blocks: int, num_parts: int) -> UniformPlan:
    """The plan that mla_metadata.cu makes for ``b`` requests of ``blocks`` blocks each.

    Only its idle rows may have another place: here all of them come last.
    """
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


def uncut_plan(b: int, blocks: int, num_parts: int) -> UniformPlan:
    """A plan of ``b`` requests of at most ``blocks`` blocks each that splits none of them."""
    return UniformPlan(blocks, blocks, ceil_div(b, num_parts) * blocks)


def load(b: int, device: int, capturing: Callable[[], bool]) -> None:
    """Load the kernel that plans a batch; ``capturing`` as in `rawmla.jit.get_kernel`."""
    jit.get_kernel(spec(b), device, capturing=capturing)


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
    """Enqueue the planning of a batch; arrays are given as device addresses.

    ``sched_meta`` is int32 [num_parts, 8]. ``num_splits`` is int32 [splits_length], at least b + 1 of them;
    further ones repeat the last, so that requests of a larger batch have no splits. ``object_layout``: the
    columns of sched_meta have the order of a FlashMLASchedMeta, else of a bare tensor
    (cuda_src/mla/plan.cuh).
    """
    kernel = jit.get_kernel(spec(b), device, capturing=capturing)
    parts_per_request = max(num_parts // b, 1)
    parts_magic, parts_shift = divisor(num_parts)
    b_magic, b_shift = divisor(b)
    share_magic, share_shift = divisor(parts_per_request)
    params = PARAMS.pack(
        tokens=tokens,
        sched_meta=sched_meta,
        num_splits=num_splits,
        b=b,
        num_parts=num_parts,
        object_layout=object_layout,
        batch_invariant=batch_invariant,
        requests_per_part=ceil_div(b, num_parts),
        parts_per_request=parts_per_request,
        parts_magic=parts_magic,
        b_magic=b_magic,
        share_magic=share_magic,
        parts_shift=parts_shift,
        b_shift=b_shift,
        share_shift=share_shift,
        splits_length=splits_length,
    )
    kernel.launch((1, 1, 1), params, stream, pdl=True)
