"""Host side of cuda_src/kernels/mla_metadata.cu: the scheduling plan, computed on the device."""

from __future__ import annotations

import struct
from collections.abc import Callable

from .. import jit
from .common import ceil_div

__all__ = ["MAX_BATCH", "launch", "num_sm_parts", "spec"]

MAX_BATCH = 16384
_BLOCK_M = 64
_PARAMS = struct.Struct("<3Q4i")  # Params of mla_metadata.cu
# start [MAX_BATCH + 1], blocks [MAX_BATCH], 32 warp sums
_SPEC = jit.KernelSpec(
    "mla_metadata",
    (("MAX_BATCH", MAX_BATCH), ("SMEM_BYTES", 8 * MAX_BATCH + 256)),
    threads=1024,
    smem_bytes=8 * MAX_BATCH + 256,
)


def spec() -> jit.KernelSpec:
    """The only variant."""
    return _SPEC


def num_sm_parts(sm_count: int, s_q: int, h_q: int, h_kv: int) -> int:
    """Parts of a plan: they fill the GPU when each 64-row tile of each KV head takes one CTA per part."""
    return max(sm_count // (h_kv * max(ceil_div(s_q * (h_q // h_kv), _BLOCK_M), 1)), 1)


def launch(
    *,
    device: int,
    stream: int,
    capturing: Callable[[], bool],
    cache_seqlens: int,
    b: int,
    num_parts: int,
    sched_meta: int,
    num_splits: int,
    object_layout: bool,
    batch_invariant: bool,
) -> None:
    """Enqueue the plan of a batch; arrays are given as device addresses.

    ``sched_meta`` is int32 [num_parts, 8], ``num_splits`` int32 [b + 1]; ``object_layout`` chooses the order
    of a row's fields (cuda_src/sched/plan.cuh).
    """
    kernel = jit.get_kernel(_SPEC, device, capturing=capturing)
    params = _PARAMS.pack(cache_seqlens, sched_meta, num_splits, b, num_parts, object_layout, batch_invariant)
    kernel.launch((1, 1, 1), params, stream, pdl=True)
