"""Host side of sparse prefill: the kernels of sparse decoding, every query token a request of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .. import jit
from . import cache_gather, metadata, sparse_decode
from .cache_layout import QUANTIZED, CacheLayout
from .common import BLOCK_TOKENS, D_V, ceil_div
from .sparse_decode import NO_CACHE, Cache, SparseDecodeCall

__all__ = ["PreparedSparsePrefill", "SparsePrefillCall", "specs"]

_PLAN_ROW_BYTES = 32
_ALIGNMENT = 16  # bytes, of what lies in scratch
_ROWS_ALIGNMENT = 128  # of copied rows: their 128-byte pieces must not straddle lines
# Attended by 128 heads, a row of an FP8 cache costs 0.13 ns more than one of bf16, and 0.67 ns to be copied.
_COPIED_WHEN_SELECTED = 8


class SparsePrefillCall(NamedTuple):
    """What stays the same when a prefill call is repeated; strides of tokens and heads, in elements.

    ``cache``, its stride of requests being that of query tokens, ``load_bytes`` and ``lse_factor`` are as in
    `SparseDecodeCall`. ``limited``: there is a topk_length.
    """

    device: int
    format: str
    d_qk: int
    load_bytes: int
    s_q: int
    h_q: int
    cache: Cache
    q_strides: tuple[int, int]
    out_strides: tuple[int, int]
    num_parts: int
    softmax_scale: float
    lse_factor: float
    limited: bool


def specs(format: str) -> list[jit.KernelSpec]:
    """The variants that prefill over a cache format needs besides plan and combine."""
    found = sparse_decode.specs(format, max_logits=True)
    if format in QUANTIZED:
        layout = QUANTIZED[format]
        found += [cache_gather.spec(layout, False), sparse_decode.spec("bf16", layout.d_qk, 16, True)]
    return found


def _copied_layout(call: SparsePrefillCall) -> CacheLayout | None:
    """The layout of a cache that is better copied to bf16 rows first: its rows are selected many times, and
    the copies take no more room than q and the results.
    """
    layout = QUANTIZED.get(call.format)
    few_heads = call.format == "v32" and call.h_q <= sparse_decode.FEW_HEADS  # read FP8 rows in less time
    if layout is None or few_heads or call.load_bytes < layout.alignment:
        return None
    rows = call.cache.num_blocks * call.cache.page_block_size
    often = call.s_q * call.cache.topk >= _COPIED_WHEN_SELECTED * rows
    fits = rows * call.d_qk <= call.s_q * call.h_q * (call.d_qk + D_V)
    return layout if often and fits else None


class PreparedSparsePrefill:
    """The launches of a prefill call: for as many query tokens as a plan takes at a time, plan and attention.

    Attributes
    ----------
    scratch_bytes : int
        Of the 16-byte aligned scratch that `launch` takes: a plan, if one is needed, and the pieces of split
        tokens, which the chunks of tokens use one after the other, and the rows of an FP8 cache if they are
        copied. 0: none.
    """

    def __init__(self, call: SparsePrefillCall, capturing: Callable[[], bool]) -> None:
        """Load the kernels; ``capturing`` as in `rawmla.jit.get_kernel`."""
        self._capturing = capturing
        self._copied = _copied_layout(call)
        self._source = call.cache
        if self._copied is not None:
            rows = call.cache.num_blocks * call.cache.page_block_size
            row_bytes = 2 * call.d_qk
            cache = call.cache._replace(
                page_block_size=1, num_blocks=rows, block_stride=row_bytes, token_stride=row_bytes
            )
            call = call._replace(format="bf16", load_bytes=16, cache=cache)
        self._call = call
        self._chunk = ceil_div(call.s_q, ceil_div(call.s_q, metadata.MAX_BATCH))  # all but the last are alike
        sizes = {self._chunk, call.s_q - (ceil_div(call.s_q, self._chunk) - 1) * self._chunk}
        # Tokens that select equally many need no plan where it would not cut between them.
        blocks = ceil_div(call.cache.topk, BLOCK_TOKENS)
        self._uniform = {
            size: None if call.limited else metadata.uniform_plan(size, blocks, call.num_parts)
            for size in sizes
        }
        self._attention = {
            size: sparse_decode.PreparedSparseDecode(self._decode_call(size), capturing) for size in sizes
        }
        self._splits = call.num_parts * _PLAN_ROW_BYTES
        plan_bytes = self._splits + 4 * (self._chunk + 1) if None in self._uniform.values() else 0
        self._pieces = ceil_div(plan_bytes, _ALIGNMENT) * _ALIGNMENT
        pieces = max(one.scratch_bytes for one in self._attention.values())
        self._rows = ceil_div(self._pieces + pieces, _ROWS_ALIGNMENT) * _ROWS_ALIGNMENT
        self.scratch_bytes = self._pieces + pieces
        if self._copied is not None:
            self.scratch_bytes = self._rows + call.cache.num_blocks * call.cache.block_stride

    def _decode_call(self, tokens: int) -> SparseDecodeCall:
        call = self._call
        q_stride, q_stride_h = call.q_strides
        out_stride, out_stride_h = call.out_strides
        return SparseDecodeCall(
            device=call.device,
            format=call.format,
            d_qk=call.d_qk,
            load_bytes=call.load_bytes,
            b=tokens,
            s_q=1,
            h_q=call.h_q,
            cache=call.cache,
            extra=NO_CACHE,
            q_strides=(q_stride, 0, q_stride_h),
            num_parts=call.num_parts,
            object_layout=True,
            batch_invariant=False,
            out_strides=(out_stride, 0, out_stride_h),
            softmax_scale=call.softmax_scale,
            lse_factor=call.lse_factor,
            uniform=self._uniform[tokens],
        )

    def launch(
        self,
        stream: int,
        q: int,
        kv: int,
        indices: int,
        topk_length: int,
        attn_sink: int,
        out: int,
        max_logits: int,
        lse: int,
        scratch: int,
    ) -> None:
        """Enqueue the kernels on arrays given as device addresses; ``topk_length`` and ``attn_sink`` or 0."""
        call = self._call
        splits = scratch + self._splits
        if self._copied is not None:
            self._copy_rows(stream, kv, scratch + self._rows)
            kv = scratch + self._rows
        for first in range(0, call.s_q, self._chunk):
            tokens = min(self._chunk, call.s_q - first)
            lengths = topk_length + 4 * first if topk_length else 0
            if self._uniform[tokens] is None:
                metadata.launch(
                    device=call.device,
                    stream=stream,
                    capturing=self._capturing,
                    tokens=metadata.TokenCounts(lengths, most=call.cache.topk),
                    b=tokens,
                    num_parts=call.num_parts,
                    sched_meta=scratch,
                    num_splits=splits,
                    object_layout=True,
                    batch_invariant=False,
                )
            self._attention[tokens].launch(
                stream,
                q + 2 * first * call.q_strides[0],
                (kv, 0),
                (indices + 4 * first * call.cache.index_stride_b, 0),
                (lengths, 0),
                attn_sink,
                scratch,
                splits,
                out + 2 * first * call.out_strides[0],
                lse + 4 * first * call.h_q,
                scratch + self._pieces,
                max_logits + 4 * first * call.h_q,
            )

    def _copy_rows(self, stream: int, cache: int, rows: int) -> None:
        source = self._source
        assert self._copied is not None
        cache_gather.launch(
            self._copied,
            device=self._call.device,
            stream=stream,
            capturing=self._capturing,
            cache=cache,
            block_table=0,
            cache_seqlens=0,
            workspace_starts=0,
            seq_starts=0,
            out=rows,
            table_stride=0,
            out_stride=self._call.d_qk,
            block_stride=source.block_stride,
            token_stride=source.token_stride,
            b=0,
            table_width=0,
            num_blocks=source.num_blocks,
            rows=self._call.cache.num_blocks,
            page_block_size=source.page_block_size,
        )
