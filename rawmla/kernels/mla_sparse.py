"""Host side of cuda_src/kernels/mla_sparse_*.cu, and of the combine that follows them."""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import cache
from math import log2
from typing import NamedTuple

from .. import jit
from . import mla_combine as combine
from . import mla_metadata as metadata
from .common import BLOCK_TOKENS, addresses, ceil_div, num_slots
from .division import divisor

__all__ = [
    "FEW_HEADS",
    "FORMATS",
    "FP8_FORMATS",
    "Cache",
    "PreparedSparseDecode",
    "SparseDecodeCall",
    "cluster_spec",
    "few_heads_spec",
    "spec",
    "specs",
]

# Params of mla/selection.cuh and its first members; by whether the call has max_logits
_PARAMS = {
    False: struct.Struct("<128s 15Q 14q 2i 2I 2i 2I 2i 6i f 20x"),
    True: struct.Struct("<128s 18Q 14q 2i 2I 2i 2I 2i 6i 2f 3i 44x"),
}
_POINTERS = {False: addresses(15, "128s"), True: addresses(18, "128s")}
_NO_MAP = bytes(jit.TENSOR_MAP_BYTES)
_MAX_MAPS = 1024  # of queries, each at its own address
_SMEM_BYTES = 232_448  # all that a CTA can have
_BLOCK_M = 64
FEW_HEADS = 16
"""Up to so many, "v32" caches have a kernel of their own, which does not round keys to bfloat16."""
_CLUSTER_MIN_BLOCKS = 4  # of a part on average: with fewer, what two CTAs send each other is not hidden
_LOG2_E = log2(2.718281828459045)

FORMATS = ("v32", "model1", "bf16")
"""Kinds of cache rows."""

FP8_FORMATS = {"v32": 0, "model1": 1}
"""Values of the define FORMAT of mla_sparse_fp8.cu and mla_sparse_fp8_cluster.cu."""

_D_QK = {"v32": (576,), "model1": (512,), "bf16": (576, 512)}
_LOAD_BYTES = {"v32": (16, 8), "model1": (16, 8), "bf16": (16,)}


class Cache(NamedTuple):
    """A cache and what is selected from it: sizes, cache strides in bytes, index strides in elements."""

    page_block_size: int
    num_blocks: int
    block_stride: int
    token_stride: int
    topk: int
    index_stride_b: int
    index_stride_s: int


NO_CACHE = Cache(1, 0, 0, 0, 0, 0, 0)
"""Stands in for the extra cache of a call without one."""


class SparseDecodeCall(NamedTuple):
    """What stays the same when a decode call is repeated on other queries; strides of q and out in elements.

    ``load_bytes``: what the addresses of cache rows are multiples of. ``lse_factor`` makes it a prefill call,
    which also has max_logits: what both outputs are multiplied by, from base 2. Such a call may have a
    ``uniform`` plan instead of arrays. Over bf16 rows its requests may be groups of ``group_tokens`` query
    tokens, with united selections (cuda_src/kernels/mla_unite_selections.cu): h_q counts the heads of a whole
    group, s_q is 1, and q's stride for it that of the group's tokens.
    """

    device: int
    format: str
    d_qk: int
    load_bytes: int
    b: int
    s_q: int
    h_q: int
    cache: Cache
    extra: Cache
    q_strides: tuple[int, int, int]
    num_parts: int
    object_layout: bool
    batch_invariant: bool
    out_strides: tuple[int, ...]
    softmax_scale: float
    lse_factor: float | None = None
    uniform: metadata.UniformPlan = metadata.NOT_UNIFORM
    group_tokens: int = 1


@cache
def few_heads_spec(load_bytes: int, max_logits: bool = False) -> jit.KernelSpec:
    """A variant for up to 16 heads over "v32" caches, for decoding or, with `max_logits`, for prefill."""
    return jit.KernelSpec(
        "mla_sparse_fp8_few_heads",
        (("LOAD_BYTES", load_bytes), ("MAX_LOGITS", max_logits), ("SMEM_BYTES", _SMEM_BYTES)),
        threads=768,
        smem_bytes=_SMEM_BYTES,
    )


@cache
def spec(
    format: str, d_qk: int, load_bytes: int, max_logits: bool = False, group_tokens: int = 1
) -> jit.KernelSpec:
    """A variant for any number of heads; ValueError for a combination that no kernel exists for."""
    if d_qk not in _D_QK.get(format, ()) or load_bytes not in _LOAD_BYTES[format]:
        raise ValueError(
            f"sparse decode: expected one of {list(FORMATS)} with its d_qk, got {format!r}, {d_qk} and rows "
            f"aligned to {load_bytes} bytes"
        )
    if format == "bf16":
        return jit.KernelSpec(
            "mla_sparse_bf16",
            (
                ("D_QK", d_qk),
                ("GROUP_TOKENS", group_tokens),
                ("LOAD_BYTES", load_bytes),
                ("MAX_LOGITS", max_logits),
                ("SMEM_BYTES", _SMEM_BYTES),
            ),
            threads=512,
            smem_bytes=_SMEM_BYTES,
        )
    return jit.KernelSpec(
        "mla_sparse_fp8",
        _fp8_defines(format, d_qk, load_bytes, max_logits),
        threads=640,
        smem_bytes=_SMEM_BYTES,
    )


@cache
def cluster_spec(format: str, load_bytes: int, max_logits: bool = False) -> jit.KernelSpec:
    """A variant for pairs of tiles of 64 heads over FP8 caches; launched in clusters of two CTAs."""
    (d_qk,) = _D_QK[format]
    return jit.KernelSpec(
        "mla_sparse_fp8_cluster",
        _fp8_defines(format, d_qk, load_bytes, max_logits),
        threads=512,
        smem_bytes=_SMEM_BYTES,
    )


def _fp8_defines(format: str, d_qk: int, load_bytes: int, max_logits: bool) -> tuple[tuple[str, int], ...]:
    return (
        ("D_QK", d_qk),
        ("FORMAT", FP8_FORMATS[format]),
        ("LOAD_BYTES", load_bytes),
        ("MAX_LOGITS", max_logits),
        ("SMEM_BYTES", _SMEM_BYTES),
    )


def specs(format: str, max_logits: bool = False) -> list[jit.KernelSpec]:
    """The variants of a cache format; ValueError for an unknown one."""
    if format not in FORMATS:
        raise ValueError(f"sparse formats: expected one of {list(FORMATS)}, got {format!r}")
    aligns = _LOAD_BYTES[format]
    found = [spec(format, d_qk, align, max_logits) for d_qk in _D_QK[format] for align in aligns]
    if format in FP8_FORMATS:
        found += [cluster_spec(format, align, max_logits) for align in aligns]
    if format == "v32":
        found += [few_heads_spec(align, max_logits) for align in aligns]
    return found


class PreparedSparseDecode:
    """The launches of a sparse call: the attention kernel and, when requests can be split, the combine.

    Attributes
    ----------
    scratch_bytes : int
        Of the 16-byte aligned scratch that `launch` takes; 0: none.
    """

    def __init__(self, call: SparseDecodeCall, capturing: Callable[[], bool]) -> None:
        """Load the kernels; ``capturing`` as in `rawmla.jit.get_kernel`."""
        few_heads = call.format == "v32" and call.h_q <= FEW_HEADS
        max_logits = call.lse_factor is not None
        head_tiles = ceil_div(call.h_q, FEW_HEADS if few_heads else _BLOCK_M)
        caches = (call.cache, call.extra)
        blocks = sum(ceil_div(cache.topk, BLOCK_TOKENS) for cache in caches)
        # A batch-invariant result depends on its request alone, so the choice may not depend on their number.
        long_parts = call.batch_invariant or call.b * blocks >= _CLUSTER_MIN_BLOCKS * call.num_parts
        clusters = call.format in FP8_FORMATS and not few_heads and head_tiles % 2 == 0 and long_parts
        if few_heads:
            variant = few_heads_spec(call.load_bytes, max_logits)
        elif clusters:
            variant = cluster_spec(call.format, call.load_bytes, max_logits)
        else:
            variant = spec(call.format, call.d_qk, call.load_bytes, max_logits, call.group_tokens)
        kernel = jit.get_kernel(variant, call.device, capturing=capturing)
        cuts = call.uniform.cuts
        slots = num_slots(call.num_parts, call.b, blocks, call.batch_invariant) if cuts else 0
        slot_rows = slots * call.s_q * call.h_q
        self.scratch_bytes = slot_rows * combine.slot_row_bytes("bfloat16", max_logits)
        self._lse_accum, self._o_scale, self._max_accum = combine.scalar_offsets("bfloat16", slot_rows)
        self._max_logits = max_logits
        self._call = call
        self._has_map = call.format == "bf16"
        self._maps: dict[int, bytes] = {}  # by the address of queries
        divisions = [divisor(cache.page_block_size) for cache in caches]
        pointers = _POINTERS[max_logits]
        params = _PARAMS[max_logits].pack(
            b"", *[0] * (pointers.size // 8 - 16),
            *(cache.block_stride for cache in caches),
            *(cache.token_stride for cache in caches),
            *(cache.index_stride_b for cache in caches),
            *(cache.index_stride_s for cache in caches),
            *call.q_strides,
            *call.out_strides,
            *(cache.topk for cache in caches),
            *(min(cache.num_blocks * cache.page_block_size, 2**31) for cache in caches),
            *(cache.page_block_size for cache in caches),
            *(magic for magic, _ in divisions),
            *(shift for _, shift in divisions),
            call.b, call.s_q, call.h_q, head_tiles, slots, call.object_layout,
            call.softmax_scale * _LOG2_E, *([call.lse_factor, *call.uniform] if max_logits else []),
        )  # fmt: skip
        self._main = kernel.prepare(
            (head_tiles * call.s_q, 1, call.num_parts), params, pointers,
            cluster=(2, 1, 1) if clusters else None, pdl=True,
        ).launch  # fmt: skip
        self._merge = combine.prepare(
            device=call.device,
            dtype="bfloat16",
            b=call.b,
            s_q=call.s_q,
            h_q=call.h_q,
            num_parts=call.num_parts,
            slots=slots,
            object_layout=call.object_layout,
            batch_invariant=call.batch_invariant,
            out_strides=call.out_strides,
            capturing=capturing,
            lse_factor=call.lse_factor,
            uniform=call.uniform,
        )

    def launch(
        self,
        stream: int,
        q: int,
        caches: tuple[int, int],
        indices: tuple[int, int],
        lengths: tuple[int, int],
        attn_sink: int,
        sched_meta: int,
        num_splits: int,
        out: int,
        lse: int,
        scratch: int,
        max_logits: int = 0,
        selected: int = 0,
    ) -> None:
        """Enqueue the kernels on arrays given as device addresses, pairs of the cache and the extra one."""
        lse_accum = scratch + self._lse_accum
        o_scale = scratch + self._o_scale
        maxima = (scratch + self._max_accum, max_logits) if self._max_logits else ()
        q_map = (self._maps.get(q) or self._encode(q)) if self._has_map else _NO_MAP
        current = self._main(
            stream, q_map, q, *caches, *indices, *lengths, attn_sink, sched_meta, num_splits, out, lse,
            scratch, lse_accum, o_scale, *maxima, *([selected] if maxima else []),
        )  # fmt: skip
        if self._merge is not None:
            self._merge(
                stream, sched_meta, num_splits, scratch, lse_accum, o_scale, out, lse, attn_sink, *maxima,
                context_is_current=current,
            )  # fmt: skip

    def _encode(self, q: int) -> bytes:
        """The tensor map of queries: a box is 64 columns of 64 heads, or of a group's tokens and heads."""
        call = self._call
        tokens = call.group_tokens
        # Of a dimension of one element the stride may be 0, which a tensor map may not have.
        stride_b, stride_s, stride_h = (2 * stride or 16 for stride in call.q_strides)
        if len(self._maps) >= _MAX_MAPS:
            self._maps.clear()
        found = self._maps[q] = jit.tensor_map(
            q,
            "bfloat16",
            (64, call.h_q // tokens, call.d_qk // 64, call.s_q * tokens, call.b),
            (stride_h, 128, stride_s, stride_b),
            (64, _BLOCK_M // tokens, 1, tokens, 1),
            "128b",
            "none",
        )
        return found
