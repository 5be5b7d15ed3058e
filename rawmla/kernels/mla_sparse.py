"""Host side of cuda_src/kernels/mla_sparse_*.cu, which share a Params struct, and the combine after them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

from .. import jit
from ..jit.params import F32, I32, I64, POINTER, TENSOR_MAP, U32, ParamStruct, changing
from ..jit.spec import MAX_SMEM_BYTES
from .common import (
    BLOCK_TOKENS,
    D_ROPE,
    LOG2_E,
    TILE_ROWS,
    ceil_div,
    divisor,
    fields,
    q_stride_params,
    stride_params,
)
from .mla_cache_rows import FORMATS, QUANTIZED
from .mla_combine import PreparedCombine
from .mla_metadata import NOT_UNIFORM, UNIFORM_PLAN, UniformPlan
from .tensor_maps import TensorMaps

_NO_MAPS = (bytes(jit.TENSOR_MAP_BYTES), bytes(jit.TENSOR_MAP_BYTES))
FEW_HEADS = 16
"""The most heads over "v32" caches for which mla_sparse_fp8_few_heads.cu runs: it does not round keys to
bfloat16.
"""
# Blocks of a partition on average. With fewer, what the two CTAs of a cluster send each other is not hidden.
_CLUSTER_MIN_BLOCKS = 4


class SparseAddresses(NamedTuple):
    """The arrays of a call as device addresses; 0 for one that is not there.

    ``max_logits`` is an output of prefill. ``selected`` belongs to united selections
    (cuda_src/kernels/mla_unite_selections.cu).
    """

    q: int
    q_rope: int
    k_cache: int
    extra_k_cache: int
    indices: int
    extra_indices: int
    topk_length: int
    extra_topk_length: int
    attn_sink: int
    sched_meta: int
    num_splits: int
    out: int
    lse: int
    max_logits: int = 0
    selected: int = 0


_ARRAYS = (
    *TENSOR_MAP("q_map", "q_rope_map"),
    *POINTER("q", "q_rope"),
    *POINTER("cache", "indices", "lengths", length=2),
    *POINTER("attn_sink", "sched_meta", "num_splits", "out", "lse"),
    *POINTER("o_accum", "lse_accum_log2", "o_scale_log2"),
)
_SIZES = (
    *I64("block_stride", "token_stride", "index_stride_b", "index_stride_s", length=2),
    *U32("q_stride_b", "q_stride_s", "q_stride_h"),
    *U32("q_rope_stride_b", "q_rope_stride_s", "q_rope_stride_h"),
    *I64("out_stride_b", "out_stride_s", "out_stride_h"),
    *I32("topk", length=2),
    *U32("cache_slots", length=2),
    *I32("page_block_size", length=2),
    *U32("page_magic", length=2),
    *I32("page_shift", length=2),
    *I32("b", "s_q", "h_q", "head_tiles", "max_splits", "object_layout"),
    *F32("sm_scale_log2"),
)
PARAMS = {
    False: ParamStruct(changing(_ARRAYS), _SIZES),
    True: ParamStruct(
        changing(_ARRAYS, POINTER("max_accum_log2", "max_logits", "selected")),
        _SIZES,
        F32("lse_factor"),
        UNIFORM_PLAN("uniform"),
    ),
}
"""Params of cuda_src/mla/selection.cuh, by whether the call has max_logits (prefill) or not (decoding)."""
_OF_CACHES = ("block_stride", "token_stride", "index_stride_b", "index_stride_s", "topk", "page_block_size")
"""Members that are arrays with a field of each of the two caches."""


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
"""The extra cache of a call without one."""


class SparseCall(NamedTuple):
    """The facts of a call that stay the same on other arrays; strides of q and out are in elements.

    ``q_rope_strides`` belong to the last 64 columns of q, which may be another array. ``format`` is the
    name of a cache format in `rawmla.kernels.mla_cache_rows.FORMATS`. The addresses of cache rows are
    multiples of ``load_bytes``.

    A call with ``lse_factor`` is prefill: it has max_logits too, and the factor takes both outputs from base
    2 to another. Its requests are query tokens, and s_q is 1. It may have a ``uniform`` plan instead of
    arrays; ``limited`` says that there is a topk_length. Over bf16 rows the requests may be groups of
    ``group_tokens`` query tokens with united selections (cuda_src/kernels/mla_unite_selections.cu). Then h_q
    counts the heads of all tokens in a group, and the second stride of q leads from one token of the group to
    the next.
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
    q_strides: tuple[int, ...]
    q_rope_strides: tuple[int, ...]
    num_parts: int
    object_layout: bool
    batch_invariant: bool
    out_strides: tuple[int, ...]
    softmax_scale: float
    lse_factor: float | None = None
    uniform: UniformPlan = NOT_UNIFORM
    limited: bool = False
    group_tokens: int = 1


def _variant(
    kernel: str, threads: int, load_bytes: int, max_logits: bool, *defines: tuple[str, int]
) -> jit.KernelSpec:
    """A variant of a kernel, for decoding or, with ``max_logits``, for prefill."""
    defines = (("LOAD_BYTES", load_bytes), ("MAX_LOGITS", max_logits), *defines)
    return jit.KernelSpec(kernel, defines, threads, MAX_SMEM_BYTES)


@cache
def few_heads_spec(load_bytes: int, max_logits: bool = False) -> jit.KernelSpec:
    """The variant for up to 16 heads over "v32" caches."""
    return _variant("mla_sparse_fp8_few_heads", 768, load_bytes, max_logits)


@cache
def spec(
    format: str, d_qk: int, load_bytes: int, max_logits: bool = False, group_tokens: int = 1
) -> jit.KernelSpec:
    """The variant for any number of heads; ValueError for a combination that no kernel exists for."""
    if d_qk not in _widths(format) or load_bytes not in _load_bytes(format):
        raise ValueError(
            f"sparse decode: expected one of {list(FORMATS)} with its d_qk, got {format!r}, {d_qk} and rows "
            f"aligned to {load_bytes} bytes"
        )
    if format == "bf16":
        group = ("GROUP_TOKENS", group_tokens)
        return _variant("mla_sparse_bf16", 512, load_bytes, max_logits, ("D_QK", d_qk), group)
    return _variant("mla_sparse_fp8", 640, load_bytes, max_logits, *_format_defines(format))


@cache
def cluster_spec(format: str, load_bytes: int, max_logits: bool = False) -> jit.KernelSpec:
    """The variant for an even number of tiles over FP8 caches; launched in clusters of two CTAs."""
    return _variant("mla_sparse_fp8_cluster", 512, load_bytes, max_logits, *_format_defines(format))


def _format_defines(format: str) -> tuple[tuple[str, int], ...]:
    return ("D_QK", QUANTIZED[format].d_qk), ("FORMAT", QUANTIZED[format].code)


def specs(format: str, max_logits: bool = False) -> list[jit.KernelSpec]:
    """The variants for a cache format."""
    aligns = _load_bytes(format)
    found = [spec(format, d_qk, align, max_logits) for d_qk in _widths(format) for align in aligns]
    if format in QUANTIZED:
        found += [cluster_spec(format, align, max_logits) for align in aligns]
    if format == "v32":
        found += [few_heads_spec(align, max_logits) for align in aligns]
    return found


def _widths(format: str) -> list[int]:
    """The d_qk of a cache format; none for an unknown one."""
    return [known.d_qk for known in FORMATS.get(format, ())]


def _load_bytes(format: str) -> tuple[int, ...]:
    """Alignments of rows in bytes."""
    return (16, 8) if format in QUANTIZED else (16,)


class PreparedSparse:
    """The launches of a sparse call: the attention kernel and, when requests can be split, the combine.

    They take ``scratch_bytes`` of scratch; 0: none.
    """

    def __init__(self, call: SparseCall, capturing: Callable[[], bool]) -> None:
        """Load the kernels; ``capturing`` as in `rawmla.jit.get_kernel`."""
        few_heads = call.format == "v32" and call.h_q <= FEW_HEADS
        max_logits = call.lse_factor is not None
        head_tiles = ceil_div(call.h_q, FEW_HEADS if few_heads else TILE_ROWS)
        caches = (call.cache, call.extra)
        blocks = sum(ceil_div(cache.topk, BLOCK_TOKENS) for cache in caches)
        # A batch-invariant result depends on its request alone, so the choice may not depend on their number.
        long_parts = call.batch_invariant or call.b * blocks >= _CLUSTER_MIN_BLOCKS * call.num_parts
        clusters = call.format in QUANTIZED and not few_heads and head_tiles % 2 == 0 and long_parts
        if few_heads:
            chosen = few_heads_spec(call.load_bytes, max_logits)
        elif clusters:
            chosen = cluster_spec(call.format, call.load_bytes, max_logits)
        else:
            chosen = spec(call.format, call.d_qk, call.load_bytes, max_logits, call.group_tokens)
        kernel = jit.get_kernel(chosen, call.device, capturing=capturing)
        combine = PreparedCombine(call, "bfloat16", blocks if call.uniform.cuts else 0, capturing, max_logits)
        self.scratch_bytes = combine.scratch_bytes
        self._lse_accum, self._o_scale = combine.lse_accum, combine.o_scale
        self._max_accum = combine.max_accum
        self._combine = combine.launch
        self._max_logits = max_logits
        self._has_map = call.format == "bf16"
        self._maps = TensorMaps(partial(_maps, call))  # by the addresses of q and its RoPE
        page_magic, page_shift = zip(*[divisor(cache.page_block_size) for cache in caches], strict=True)
        struct = PARAMS[max_logits]
        params = struct.pack(
            **{name: [getattr(cache, name) for cache in caches] for name in _OF_CACHES},
            **q_stride_params(call.q_strides, call.q_rope_strides),
            **stride_params(out=call.out_strides),
            cache_slots=[min(cache.num_blocks * cache.page_block_size, 2**31) for cache in caches],
            page_magic=page_magic,
            page_shift=page_shift,
            **fields(call, "b", "s_q", "h_q", "object_layout"),
            head_tiles=head_tiles,
            max_splits=combine.max_splits,
            sm_scale_log2=call.softmax_scale * LOG2_E,
            **(fields(call, "lse_factor", "uniform") if max_logits else {}),
        )
        # With a uniform plan the kernel publishes its work before the kernel ahead is complete, which may be
        # the one that writes topk_length: such a call must not start early.
        starts_early = not (call.uniform.length and call.limited)
        self._attend = kernel.prepare(
            (head_tiles * call.s_q, 1, call.num_parts),
            params,
            struct.changing,
            # With bf16 rows only the place of the tiles is a cluster's: mla_sparse_bf16.cu.
            cluster=(2, 1, 1) if clusters or (call.format == "bf16" and head_tiles % 2 == 0) else None,
            pdl=starts_early,
        ).launch

    def launch(self, stream: int, addresses: tuple[int, ...], scratch: int) -> None:
        """Enqueue the kernels.

        ``addresses`` has the order of `SparseAddresses`. ``scratch`` is the address of 16-byte aligned
        scratch, or 0.
        """
        # Spelled out: calls that unpack a tuple into arguments take twice as long.
        (
            q, q_rope, k_cache, extra_k_cache, indices, extra_indices, topk_length, extra_topk_length,
            attn_sink, sched_meta, num_splits, out, lse, max_logits, selected,
        ) = addresses  # fmt: skip
        q_map, q_rope_map = _NO_MAPS
        if self._has_map:
            q_map, q_rope_map = self._maps[q, q_rope]
        lse_accum = scratch + self._lse_accum
        o_scale = scratch + self._o_scale
        if not self._max_logits:
            current = self._attend(
                stream, q_map, q_rope_map, q, q_rope, k_cache, extra_k_cache, indices, extra_indices,
                topk_length, extra_topk_length, attn_sink, sched_meta, num_splits, out, lse, scratch,
                lse_accum, o_scale,
            )  # fmt: skip
            if self._combine is not None:
                self._combine(
                    stream, sched_meta, num_splits, scratch, lse_accum, o_scale, out, lse, attn_sink,
                    context_is_current=current,
                )  # fmt: skip
            return
        max_accum = scratch + self._max_accum
        current = self._attend(
            stream, q_map, q_rope_map, q, q_rope, k_cache, extra_k_cache, indices, extra_indices, topk_length,
            extra_topk_length, attn_sink, sched_meta, num_splits, out, lse, scratch, lse_accum, o_scale,
            max_accum, max_logits, selected,
        )  # fmt: skip
        if self._combine is not None:
            self._combine(
                stream, sched_meta, num_splits, scratch, lse_accum, o_scale, out, lse, attn_sink,
                max_accum, max_logits, context_is_current=current,
            )  # fmt: skip


def _maps(call: SparseCall, addresses: tuple[int, int]) -> tuple[bytes, ...]:
    """The tensor maps of q and its RoPE: a box is 64 columns of 64 heads, or of the rows of a group."""
    tokens = call.group_tokens

    def encode(address: int, chunks: int, strides: tuple[int, ...]) -> bytes:
        # Of a dimension of one element the stride may be 0, which a tensor map may not have.
        stride_b, stride_s, stride_h = (2 * stride or 16 for stride in strides)
        return jit.tensor_map(
            address,
            "bfloat16",
            (64, call.h_q // tokens, chunks, call.s_q * tokens, call.b),
            (stride_h, 128, stride_s, stride_b),
            (64, TILE_ROWS // tokens, 1, tokens, 1),
            "128b",
            "none",
        )

    q, q_rope = addresses
    before_rope = (call.d_qk - D_ROPE) // 64
    return encode(q, before_rope, call.q_strides), encode(q_rope, 1, call.q_rope_strides)
