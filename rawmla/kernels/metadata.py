"""Host side of cuda_src/kernels/mla_metadata.cu: the scheduling plan, computed on the device."""

from __future__ import annotations

import struct
from collections.abc import Callable

from .. import jit
from .common import ceil_div

__all__ = ["MAX_BATCH", "launch", "num_sm_parts", "spec", "specs"]

MAX_BATCH = 16384
_BLOCK_M = 64
_PARAMS = struct.Struct("<3Q4i")  # Params of mla_metadata.cu


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
    kernel = jit.get_kernel(spec(b), device, capturing=capturing)
    params = _PARAMS.pack(cache_seqlens, sched_meta, num_splits, b, num_parts, object_layout, batch_invariant)
    kernel.launch((1, 1, 1), params, stream, pdl=True)
