"""Host side of sparse prefill: the kernels of sparse decoding, every query token a request of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from .. import jit
from . import mla_cache_gather as cache_gather
from . import mla_metadata as metadata
from . import mla_sparse as sparse_decode
from . import mla_unite_selections as unite_selections
from .common import BLOCK_TOKENS, D_V, ceil_div
from .mla_cache_rows import OF_FORMAT, QUANTIZED
from .mla_sparse import NO_CACHE, Cache, SparseDecodeCall

__all__ = ["Prepared", "PrefillArrays", "SparsePrefillCall", "prepare", "specs"]

_PLAN_ROW_BYTES = 32
_ALIGNMENT = 16  # bytes, of what lies in scratch
_ROWS_ALIGNMENT = 128  # of copied rows: their 128-byte pieces must not straddle lines
_TILE_ROWS = 64
# Where that is worth it: 1,024 tokens with 128 heads over rows that are selected 8, 12 and 16 times took
# 1,193, 1,134 and 1,132 us from the FP8 rows, 1,186, 1,069 and 1,041 with copies.
_COPIED_WHEN_SELECTED = 8
# Uniting selections takes three launches more, and all rows are read to find those that are not finite. Four
# tokens that each select one of 16 rows at random have 9 % of them in common, which pays for that; neighbours
# in a model select much the same.
_UNITED_TOKENS = 512
_UNITED_WHEN_SELECTED = 16
_UNITED_ROWS = 16
_UNITED_SCRATCH = 64 << 20  # bytes, of united selections at a time


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


class PrefillArrays(NamedTuple):
    """The arrays of a call as device addresses; ``topk_length`` and ``attn_sink`` or 0."""

    q: int
    kv: int
    indices: int
    topk_length: int
    attn_sink: int
    out: int
    max_logits: int
    lse: int

    def from_token(self, call: SparsePrefillCall, first: int) -> PrefillArrays:
        """Those of the query tokens from number `first` on."""
        if first == 0:
            return self
        return self._replace(
            q=self.q + 2 * first * call.q_strides[0],
            indices=self.indices + 4 * first * call.cache.index_stride_b,
            topk_length=self.topk_length + 4 * first if self.topk_length else 0,
            out=self.out + 2 * first * call.out_strides[0],
            max_logits=self.max_logits + 4 * first * call.h_q,
            lse=self.lse + 4 * first * call.h_q,
        )


def specs(format: str) -> list[jit.KernelSpec]:
    """The variants that prefill over a cache format needs besides plan and combine."""
    found = sparse_decode.specs(format, max_logits=True)
    widths = {layout.d_qk for layout in OF_FORMAT[format]}
    if format in QUANTIZED:
        found.append(cache_gather.spec(QUANTIZED[format], False))
        found += [sparse_decode.spec("bf16", d_qk, 16, True) for d_qk in widths]
    found += [
        sparse_decode.spec("bf16", d_qk, 16, True, group_tokens)
        for d_qk in sorted(widths)
        for group_tokens in unite_selections.GROUP_TOKENS
    ]
    return found + unite_selections.specs()


def prepare(call: SparsePrefillCall, capturing: Callable[[], bool]) -> Prepared:
    """The launches of a call, with its kernels loaded; ``capturing`` as in `rawmla.jit.get_kernel`."""
    if call.format in QUANTIZED and _is_copied(call):
        return _PreparedCopies(call, capturing)
    if call.format not in QUANTIZED and _is_united(call):
        return _PreparedGroups(call, capturing)
    return _PreparedTokens(call, capturing)


def _as_decoding(call: SparsePrefillCall, b: int) -> SparseDecodeCall:
    """The decode call whose requests are `b` query tokens."""
    q_stride, q_stride_h = call.q_strides
    out_stride, out_stride_h = call.out_strides
    return SparseDecodeCall(
        device=call.device,
        format=call.format,
        d_qk=call.d_qk,
        load_bytes=call.load_bytes,
        b=b,
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
    )


def _of_copies(call: SparsePrefillCall) -> SparsePrefillCall:
    """The call on bf16 rows of the cache."""
    rows = call.cache.num_blocks * call.cache.page_block_size
    row_bytes = 2 * call.d_qk
    cache = call.cache._replace(
        page_block_size=1, num_blocks=rows, block_stride=row_bytes, token_stride=row_bytes
    )
    return call._replace(format="bf16", load_bytes=16, cache=cache)


def _is_copied(call: SparsePrefillCall) -> bool:
    """Whether an FP8 cache is better copied to bf16 rows first: its rows are selected many times, and the
    copies take no more room than q and the results.
    """
    layout = QUANTIZED[call.format]
    copies = _of_copies(call)
    if call.load_bytes < layout.alignment:
        return False
    if call.format == "v32" and call.h_q <= sparse_decode.FEW_HEADS and not _is_united(copies):
        return False  # these have a kernel that reads FP8 rows in less time
    rows = copies.cache.num_blocks
    often = call.s_q * call.cache.topk >= _COPIED_WHEN_SELECTED * rows
    return often and rows * call.d_qk <= call.s_q * call.h_q * (call.d_qk + D_V)


def _is_united(call: SparsePrefillCall) -> bool:
    """Whether query tokens are better attended in groups that fill a tile's rows: there are heads for a
    fraction of them, enough tokens, and a row is selected many times.
    """
    group_tokens = _TILE_ROWS // call.h_q
    rows, topk = call.cache.num_blocks, call.cache.topk
    out_stride, out_stride_h = call.out_strides
    return (
        group_tokens in unite_selections.GROUP_TOKENS
        and group_tokens * call.h_q == _TILE_ROWS
        and call.s_q >= _UNITED_TOKENS
        and out_stride == call.h_q * out_stride_h
        and rows <= unite_selections.MAX_ROWS
        and group_tokens * topk <= unite_selections.MAX_CAPACITY
        and call.s_q * topk >= _UNITED_WHEN_SELECTED * rows
        and rows <= _UNITED_ROWS * topk
    )


class Prepared(Protocol):
    """The launches of a prefill call."""

    scratch_bytes: int
    """Of the 16-byte aligned scratch that `launch` takes; 0: none."""

    def launch(self, stream: int, arrays: PrefillArrays, scratch: int) -> None:
        """Enqueue the kernels."""


class _Room:
    """Hands out places in scratch, one behind the other."""

    def __init__(self) -> None:
        self.bytes = 0

    def take(self, size: int, alignment: int = _ALIGNMENT) -> int:
        """Where the next `size` bytes begin."""
        begin = ceil_div(self.bytes, alignment) * alignment
        self.bytes = begin + size
        return begin


class _PreparedTokens:
    """For as many query tokens as a plan takes at a time: plan, if it is not known, and attention.

    In scratch are the plan and the pieces of split tokens. The chunks of tokens use it one after the other.
    """

    def __init__(self, call: SparsePrefillCall, capturing: Callable[[], bool]) -> None:
        self._call = call
        self._capturing = capturing
        self._chunk = ceil_div(call.s_q, ceil_div(call.s_q, metadata.MAX_BATCH))  # all but the last are alike
        sizes = {self._chunk, call.s_q - (ceil_div(call.s_q, self._chunk) - 1) * self._chunk}
        # The plan of tokens that select equally many needs no kernel.
        blocks = ceil_div(call.cache.topk, BLOCK_TOKENS)
        self._attention = {
            size: sparse_decode.PreparedSparseDecode(
                _as_decoding(call, size)._replace(
                    uniform=metadata.NOT_UNIFORM
                    if call.limited
                    else metadata.uniform_plan(size, blocks, call.num_parts)
                ),
                capturing,
            )
            for size in sizes
        }
        self._splits = call.num_parts * _PLAN_ROW_BYTES
        plan_bytes = self._splits + 4 * (self._chunk + 1) if call.limited else 0
        room = _Room()
        room.take(plan_bytes)
        self._pieces = room.take(max(one.scratch_bytes for one in self._attention.values()))
        self.scratch_bytes = room.bytes

    def launch(self, stream: int, arrays: PrefillArrays, scratch: int) -> None:
        """As in `Prepared`."""
        call = self._call
        splits = scratch + self._splits
        for first in range(0, call.s_q, self._chunk):
            tokens = min(self._chunk, call.s_q - first)
            chunk = arrays.from_token(call, first)
            if call.limited:
                metadata.launch(
                    device=call.device,
                    stream=stream,
                    capturing=self._capturing,
                    tokens=metadata.TokenCounts(chunk.topk_length, most=call.cache.topk),
                    b=tokens,
                    num_parts=call.num_parts,
                    sched_meta=scratch,
                    num_splits=splits,
                    splits_length=tokens + 1,
                    object_layout=True,
                    batch_invariant=False,
                )
            self._attention[tokens].launch(
                stream,
                chunk.q,
                (chunk.kv, 0),
                (chunk.indices, 0),
                (chunk.topk_length, 0),
                chunk.attn_sink,
                scratch,
                splits,
                chunk.out,
                chunk.lse,
                scratch + self._pieces,
                chunk.max_logits,
            )


class _PreparedGroups:
    """For as many groups of query tokens as there is room for at a time: uniting of what a group's tokens
    select, plan and attention, with the heads of a group's tokens as those of one; then the tokens that no
    group has.

    In scratch are what is not finite, the plan, the united selections of a chunk of groups and the pieces.
    """

    def __init__(self, call: SparsePrefillCall, capturing: Callable[[], bool]) -> None:
        self._call = call
        self._capturing = capturing
        self._tokens = _TILE_ROWS // call.h_q
        self._groups, rest = divmod(call.s_q, self._tokens)
        self._rest = _PreparedTokens(call._replace(s_q=rest), capturing) if rest else None
        self._capacity = unite_selections.capacity(self._tokens, call.cache.topk)
        words = unite_selections.selected_bytes(self._tokens, self._capacity)
        most = min(_UNITED_SCRATCH // (4 * self._capacity + words), metadata.MAX_BATCH)
        self._chunk = ceil_div(self._groups, ceil_div(self._groups, most))
        sizes = {self._chunk, self._groups - (ceil_div(self._groups, self._chunk) - 1) * self._chunk}
        self._attention = {
            size: sparse_decode.PreparedSparseDecode(self._decode_call(size), capturing) for size in sizes
        }
        room = _Room()
        self._plan = room.take(call.num_parts * _PLAN_ROW_BYTES)
        self._splits = room.take(4 * (self._chunk + 1))
        self._not_finite = room.take(unite_selections.not_finite_bytes(call.cache.num_blocks))
        self._sinks = room.take(4 * _TILE_ROWS)
        self._counts = room.take(4 * self._chunk)
        self._rows = room.take(4 * self._capacity * self._chunk)
        self._selected = room.take(words * self._chunk)
        self._pieces = room.take(max(one.scratch_bytes for one in self._attention.values()))
        self.scratch_bytes = max(room.bytes, self._rest.scratch_bytes if self._rest else 0)

    def _decode_call(self, groups: int) -> SparseDecodeCall:
        call = self._call
        q_stride, q_stride_h = call.q_strides
        out_stride, out_stride_h = call.out_strides
        return _as_decoding(call, groups)._replace(
            h_q=_TILE_ROWS,
            cache=call.cache._replace(topk=self._capacity, index_stride_b=self._capacity),
            q_strides=(self._tokens * q_stride, q_stride, q_stride_h),
            out_strides=(self._tokens * out_stride, 0, out_stride_h),
            group_tokens=self._tokens,
        )

    def launch(self, stream: int, arrays: PrefillArrays, scratch: int) -> None:
        """As in `Prepared`."""
        call = self._call
        unite_selections.find_not_finite(
            device=call.device,
            stream=stream,
            capturing=self._capturing,
            rows=arrays.kv,
            not_finite=scratch + self._not_finite,
            row_stride=call.cache.block_stride,
            num_rows=call.cache.num_blocks,
        )
        for first_group in range(0, self._groups, self._chunk):
            groups = min(self._chunk, self._groups - first_group)
            chunk = arrays.from_token(call, first_group * self._tokens)
            unite_selections.unite(
                device=call.device,
                stream=stream,
                capturing=self._capturing,
                indices=chunk.indices,
                topk_length=chunk.topk_length,
                not_finite=scratch + self._not_finite,
                attn_sink=chunk.attn_sink,
                rows=scratch + self._rows,
                counts=scratch + self._counts,
                selected=scratch + self._selected,
                sinks=scratch + self._sinks,
                index_stride=call.cache.index_stride_b,
                topk=call.cache.topk,
                num_rows=call.cache.num_blocks,
                group_tokens=self._tokens,
                groups=groups,
            )
            metadata.launch(
                device=call.device,
                stream=stream,
                capturing=self._capturing,
                tokens=metadata.TokenCounts(scratch + self._counts, most=self._capacity),
                b=groups,
                num_parts=call.num_parts,
                sched_meta=scratch + self._plan,
                num_splits=scratch + self._splits,
                splits_length=groups + 1,
                object_layout=True,
                batch_invariant=False,
            )
            self._attention[groups].launch(
                stream,
                chunk.q,
                (chunk.kv, 0),
                (scratch + self._rows, 0),
                (scratch + self._counts, 0),
                scratch + self._sinks if chunk.attn_sink else 0,
                scratch + self._plan,
                scratch + self._splits,
                chunk.out,
                chunk.lse,
                scratch + self._pieces,
                chunk.max_logits,
                scratch + self._selected,
            )
        if self._rest is not None:
            self._rest.launch(stream, arrays.from_token(call, self._groups * self._tokens), scratch)


class _PreparedCopies:
    """The copying of an FP8 cache to bf16 rows, which lie in scratch, and what attends those."""

    def __init__(self, call: SparsePrefillCall, capturing: Callable[[], bool]) -> None:
        self._call = call
        self._capturing = capturing
        copies = _of_copies(call)
        self._num_rows = copies.cache.num_blocks
        self._attention = prepare(copies, capturing)
        room = _Room()
        room.take(self._attention.scratch_bytes)
        self._rows = room.take(self._num_rows * copies.cache.block_stride, _ROWS_ALIGNMENT)
        self.scratch_bytes = room.bytes

    def launch(self, stream: int, arrays: PrefillArrays, scratch: int) -> None:
        """As in `Prepared`."""
        call = self._call
        rows = scratch + self._rows
        cache_gather.launch(
            QUANTIZED[call.format],
            device=call.device,
            stream=stream,
            capturing=self._capturing,
            cache=arrays.kv,
            block_table=0,
            cache_seqlens=0,
            workspace_starts=0,
            seq_starts=0,
            out=rows,
            table_stride=0,
            out_stride=call.d_qk,
            block_stride=call.cache.block_stride,
            token_stride=call.cache.token_stride,
            b=0,
            table_width=0,
            num_blocks=call.cache.num_blocks,
            rows=self._num_rows,
            page_block_size=call.cache.page_block_size,
        )
        self._attention.launch(stream, arrays._replace(kv=rows), scratch)
