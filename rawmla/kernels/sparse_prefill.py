"""Host side of sparse prefill: the kernels of sparse decoding, every query token a request of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from . import metadata, sparse_decode
from .common import BLOCK_TOKENS, ceil_div
from .sparse_decode import NO_CACHE, Cache, SparseDecodeCall

__all__ = ["PreparedSparsePrefill", "SparsePrefillCall"]

_PLAN_ROW_BYTES = 32
_ALIGNMENT = 16  # bytes, of what lies in scratch


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


class PreparedSparsePrefill:
    """The launches of a prefill call: for as many query tokens as a plan takes at a time, plan and attention.

    Attributes
    ----------
    scratch_bytes : int
        Of the 16-byte aligned scratch that `launch` takes: a plan, if one is needed, and the pieces of split
        tokens. The chunks of tokens use it one after the other. 0: none.
    """

    def __init__(self, call: SparsePrefillCall, capturing: Callable[[], bool]) -> None:
        """Load the kernels; ``capturing`` as in `rawmla.jit.get_kernel`."""
        self._call = call
        self._capturing = capturing
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
        self.scratch_bytes = self._pieces + max(one.scratch_bytes for one in self._attention.values())

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
