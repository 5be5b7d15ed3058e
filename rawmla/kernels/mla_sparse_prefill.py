"""Sparse prefill, composed of other kernels: it has no CUDA source of its own.

The kernels of `mla_sparse` attend, with every query token as a request of its own. Three ways to get there
are tried in this order:

- An FP8 cache is copied to bf16 rows (`mla_cache_gather`), which then are attended.
- Query tokens with few heads are attended in groups that fill a tile (`mla_unite_selections`).
- Query tokens are attended one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from .. import jit
from . import mla_cache_gather, mla_metadata, mla_sparse, mla_unite_selections
from .common import BLOCK_TOKENS, D_V, TILE_ROWS, ceil_div
from .mla_cache_rows import FORMATS, QUANTIZED
from .mla_sparse import NO_CACHE, Cache, SparseAddresses, SparseCall

__all__ = ["PrefillAddresses", "Prepared", "SparsePrefillCall", "prepare", "specs"]

_ALIGNMENT = 16  # bytes, of arrays in scratch
_ROWS_ALIGNMENT = 128  # of copied rows: aligned 128 bytes of a row then are one cache line
# An FP8 cache is copied when its rows are selected this often each, on average. 1,024 tokens with 128
# heads over rows that are selected 8, 12 and 16 times took 1,193, 1,134 and 1,132 us from the FP8 rows, and
# 1,186, 1,069 and 1,041 us with copies.
_COPIED_WHEN_SELECTED = 8
# Selections are united for at least _UNITED_TOKENS query tokens, when rows are selected _UNITED_WHEN_SELECTED
# times each and there are at most _UNITED_ROWS times as many rows as a token selects. Uniting takes three
# more launches, and all rows are read to find those that are not finite. Four tokens that each select one of
# 16 rows at random have 9 % of them in common, which pays for that; neighbours in a model have far more.
_UNITED_TOKENS = 512
_UNITED_WHEN_SELECTED = 16
_UNITED_ROWS = 16
_UNITED_SCRATCH = 64 << 20  # bytes of united selections that are in scratch at a time


class SparsePrefillCall(NamedTuple):
    """What stays the same when a prefill call is repeated on other arrays.

    Strides are of tokens and heads, in elements. ``cache``, ``load_bytes`` and ``lse_factor`` are as in
    `SparseCall`; the index_stride_b of ``cache`` is between query tokens. ``limited``: there is a
    topk_length. ``batch_invariant``: the bits of a token's result may depend on nothing but the token.
    """

    device: int
    format: str
    d_qk: int
    load_bytes: int
    s_q: int
    h_q: int
    cache: Cache
    q_strides: tuple[int, ...]
    q_rope_strides: tuple[int, ...]
    out_strides: tuple[int, ...]
    num_parts: int
    softmax_scale: float
    lse_factor: float
    limited: bool
    batch_invariant: bool = False


class PrefillAddresses(NamedTuple):
    """The arrays of a call as device addresses; ``topk_length`` and ``attn_sink`` may be 0."""

    q: int
    q_rope: int
    kv: int
    indices: int
    topk_length: int
    attn_sink: int
    out: int
    max_logits: int
    lse: int

    def from_token(self, call: SparsePrefillCall, first: int) -> PrefillAddresses:
        """The addresses of query token ``first``."""
        if first == 0:
            return self
        return self._replace(
            q=self.q + 2 * first * call.q_strides[0],
            q_rope=self.q_rope + 2 * first * call.q_rope_strides[0],
            indices=self.indices + 4 * first * call.cache.index_stride_b,
            topk_length=self.topk_length + 4 * first if self.topk_length else 0,
            out=self.out + 2 * first * call.out_strides[0],
            max_logits=self.max_logits + 4 * first * call.h_q,
            lse=self.lse + 4 * first * call.h_q,
        )


def specs(format: str) -> list[jit.KernelSpec]:
    """The variants that prefill over a cache format needs besides the variants of plan and combine."""
    found = mla_sparse.specs(format, max_logits=True)
    widths = {known.d_qk for known in FORMATS[format]}
    if format in QUANTIZED:
        found.append(mla_cache_gather.spec(QUANTIZED[format], False))
        found += [mla_sparse.spec("bf16", d_qk, 16, True) for d_qk in widths]
    found += [
        mla_sparse.spec("bf16", d_qk, 16, True, group_tokens)
        for d_qk in sorted(widths)
        for group_tokens in mla_unite_selections.GROUP_TOKENS
    ]
    return found + mla_unite_selections.specs()


def prepare(call: SparsePrefillCall, capturing: Callable[[], bool]) -> Prepared:
    """The launches of a call, with its kernels loaded; ``capturing`` as in `rawmla.jit.get_kernel`."""
    if call.batch_invariant:
        return _PreparedTokens(call, capturing)  # the other ways are chosen by the number of tokens
    if call.format in QUANTIZED and _is_copied(call):
        return _PreparedCopies(call, capturing)
    if call.format not in QUANTIZED and _is_united(call):
        return _PreparedGroups(call, capturing)
    return _PreparedTokens(call, capturing)


def _as_requests(call: SparsePrefillCall, b: int) -> SparseCall:
    """The sparse call whose requests are ``b`` query tokens."""
    q_stride, q_stride_h = call.q_strides
    q_rope_stride, q_rope_stride_h = call.q_rope_strides
    out_stride, out_stride_h = call.out_strides
    return SparseCall(
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
        q_rope_strides=(q_rope_stride, 0, q_rope_stride_h),
        num_parts=call.num_parts,
        object_layout=True,
        batch_invariant=call.batch_invariant,
        out_strides=(out_stride, 0, out_stride_h),
        softmax_scale=call.softmax_scale,
        lse_factor=call.lse_factor,
        limited=call.limited,
    )


def _of_copies(call: SparsePrefillCall) -> SparsePrefillCall:
    """The same call on copies of the cache's rows in bf16."""
    rows = call.cache.num_blocks * call.cache.page_block_size
    row_bytes = 2 * call.d_qk
    cache = call.cache._replace(
        page_block_size=1, num_blocks=rows, block_stride=row_bytes, token_stride=row_bytes
    )
    return call._replace(format="bf16", load_bytes=16, cache=cache)


def _is_copied(call: SparsePrefillCall) -> bool:
    """Whether an FP8 cache is better copied to bf16 rows first.

    So it is when its rows are selected many times, unless the copies take more room than q and the results.
    """
    copies = _of_copies(call)
    if call.load_bytes < QUANTIZED[call.format].alignment:
        return False
    if max(call.cache.block_stride, copies.cache.num_blocks) > mla_cache_gather.MAX_INT:
        return False
    if call.format == "v32" and call.h_q <= mla_sparse.FEW_HEADS and not _is_united(copies):
        return False  # the kernel for few heads reads FP8 rows in less time
    rows = copies.cache.num_blocks
    often = call.s_q * call.cache.topk >= _COPIED_WHEN_SELECTED * rows
    return often and rows * call.d_qk <= call.s_q * call.h_q * (call.d_qk + D_V)


def _is_united(call: SparsePrefillCall) -> bool:
    """Whether query tokens are better attended in groups that fill the rows of a tile.

    So it is when the heads of a token fill only a fraction of a tile, there are enough tokens, and rows are
    selected many times.
    """
    group_tokens = TILE_ROWS // call.h_q
    rows, topk = call.cache.num_blocks, call.cache.topk
    out_stride, out_stride_h = call.out_strides
    return (
        group_tokens in mla_unite_selections.GROUP_TOKENS
        and group_tokens * call.h_q == TILE_ROWS
        and call.s_q >= _UNITED_TOKENS
        and out_stride == call.h_q * out_stride_h
        and rows <= mla_unite_selections.MAX_ROWS
        and group_tokens * topk <= mla_unite_selections.MAX_CAPACITY
        and call.s_q * topk >= _UNITED_WHEN_SELECTED * rows
        and rows <= _UNITED_ROWS * topk
    )


class Prepared(Protocol):
    """The launches of a prefill call."""

    scratch_bytes: int
    """Size of the scratch that `launch` takes; 0: none."""

    def launch(self, stream: int, addresses: PrefillAddresses, scratch: int) -> None:
        """Enqueue the kernels. ``scratch`` is the address of 16-byte aligned scratch, or 0."""


def _load(specs: Iterable[jit.KernelSpec], call: SparsePrefillCall, capturing: Callable[[], bool]) -> None:
    """Load kernels that `launch` looks up, so that a call which lacks one enqueues nothing."""
    for spec in specs:
        jit.get_kernel(spec, call.device, capturing=capturing)


class _Layout:
    """The layout of scratch: arrays one after the other, given as offsets in bytes."""

    def __init__(self) -> None:
        self.bytes = 0

    def take(self, size: int, alignment: int = _ALIGNMENT) -> int:
        """Where an array of ``size`` bytes begins."""
        begin = ceil_div(self.bytes, alignment) * alignment
        self.bytes = begin + size
        return begin


class _PreparedTokens:
    """Query tokens are attended one by one, in chunks of as many as a plan takes.

    For each chunk a plan is made, unless it is uniform. Scratch has the plan and the splits; the chunks use
    it one after the other.
    """

    def __init__(self, call: SparsePrefillCall, capturing: Callable[[], bool]) -> None:
        self._call = call
        self._capturing = capturing
        # All chunks but the last have this size.
        self._chunk = ceil_div(call.s_q, ceil_div(call.s_q, mla_metadata.MAX_BATCH))
        sizes = {self._chunk, call.s_q - (ceil_div(call.s_q, self._chunk) - 1) * self._chunk}
        self._needs_plan = call.limited and not call.batch_invariant
        if self._needs_plan:
            _load({mla_metadata.spec(size) for size in sizes}, call, capturing)
        self._attention = {
            size: mla_sparse.PreparedSparse(
                _as_requests(call, size)._replace(uniform=self._uniform_plan(size)), capturing
            )
            for size in sizes
        }
        self._num_splits = call.num_parts * 4 * mla_metadata.PLAN_COLUMNS
        plan_bytes = self._num_splits + 4 * (self._chunk + 1) if self._needs_plan else 0
        layout = _Layout()
        layout.take(plan_bytes)
        self._split_scratch = layout.take(max(one.scratch_bytes for one in self._attention.values()))
        self.scratch_bytes = layout.bytes

    def _uniform_plan(self, tokens: int) -> mla_metadata.UniformPlan:
        """The plan of a chunk, if it needs no kernel because all tokens select equally many rows.

        In a batch-invariant call no token is split, since the cuts depend on the number of tokens.
        Tokens that a topk_length makes shorter then leave their part of the GPU idle.
        """
        call = self._call
        blocks = ceil_div(call.cache.topk, BLOCK_TOKENS)
        if self._needs_plan:
            return mla_metadata.NOT_UNIFORM
        if call.batch_invariant:
            return mla_metadata.uncut_plan(tokens, blocks, call.num_parts)
        return mla_metadata.uniform_plan(tokens, blocks, call.num_parts)

    def launch(self, stream: int, addresses: PrefillAddresses, scratch: int) -> None:
        """As in `Prepared`."""
        call = self._call
        num_splits = scratch + self._num_splits
        for first in range(0, call.s_q, self._chunk):
            tokens = min(self._chunk, call.s_q - first)
            chunk = addresses.from_token(call, first)
            if self._needs_plan:
                mla_metadata.launch(
                    device=call.device,
                    stream=stream,
                    capturing=self._capturing,
                    tokens=mla_metadata.TokenCounts(chunk.topk_length, most=call.cache.topk),
                    b=tokens,
                    num_parts=call.num_parts,
                    sched_meta=scratch,
                    num_splits=num_splits,
                    splits_length=tokens + 1,
                    object_layout=True,
                    batch_invariant=False,
                )
            attended = SparseAddresses(
                q=chunk.q,
                q_rope=chunk.q_rope,
                k_cache=chunk.kv,
                extra_k_cache=0,
                indices=chunk.indices,
                extra_indices=0,
                topk_length=chunk.topk_length,
                extra_topk_length=0,
                attn_sink=chunk.attn_sink,
                sched_meta=scratch,
                num_splits=num_splits,
                out=chunk.out,
                lse=chunk.lse,
                max_logits=chunk.max_logits,
            )
            self._attention[tokens].launch(stream, attended, scratch + self._split_scratch)


class _PreparedGroups:
    """Query tokens are attended in groups, in chunks of as many as scratch has room for.

    For each chunk: what the tokens of a group select is united, a plan is made, and a group is attended as
    one token with the heads of all its tokens. The tokens after the last whole group are attended one by
    one.

    Scratch has the bits of rows that are not finite, the plan, the united selections of a chunk and the
    splits.
    """

    def __init__(self, call: SparsePrefillCall, capturing: Callable[[], bool]) -> None:
        self._call = call
        self._capturing = capturing
        self._tokens = TILE_ROWS // call.h_q
        self._groups, rest = divmod(call.s_q, self._tokens)
        self._rest = _PreparedTokens(call._replace(s_q=rest), capturing) if rest else None
        self._capacity = mla_unite_selections.capacity(self._tokens, call.cache.topk)
        words = mla_unite_selections.selected_bytes(self._tokens, self._capacity)
        most = min(_UNITED_SCRATCH // (4 * self._capacity + words), mla_metadata.MAX_BATCH)
        self._chunk = ceil_div(self._groups, ceil_div(self._groups, most))
        sizes = {self._chunk, self._groups - (ceil_div(self._groups, self._chunk) - 1) * self._chunk}
        _load({mla_metadata.spec(size) for size in sizes}, call, capturing)
        _load(mla_unite_selections.specs(), call, capturing)
        self._attention = {
            size: mla_sparse.PreparedSparse(self._call_of_groups(size), capturing) for size in sizes
        }
        layout = _Layout()
        self._plan = layout.take(call.num_parts * 4 * mla_metadata.PLAN_COLUMNS)
        self._num_splits = layout.take(4 * (self._chunk + 1))
        self._not_finite = layout.take(mla_unite_selections.not_finite_bytes(call.cache.num_blocks))
        self._sinks = layout.take(4 * TILE_ROWS)
        self._counts = layout.take(4 * self._chunk)
        self._rows = layout.take(4 * self._capacity * self._chunk)
        self._selected = layout.take(words * self._chunk)
        self._split_scratch = layout.take(max(one.scratch_bytes for one in self._attention.values()))
        self.scratch_bytes = max(layout.bytes, self._rest.scratch_bytes if self._rest else 0)

    def _call_of_groups(self, groups: int) -> SparseCall:
        call = self._call
        q_stride, q_stride_h = call.q_strides
        q_rope_stride, q_rope_stride_h = call.q_rope_strides
        out_stride, out_stride_h = call.out_strides
        return _as_requests(call, groups)._replace(
            h_q=TILE_ROWS,
            cache=call.cache._replace(topk=self._capacity, index_stride_b=self._capacity),
            q_strides=(self._tokens * q_stride, q_stride, q_stride_h),
            q_rope_strides=(self._tokens * q_rope_stride, q_rope_stride, q_rope_stride_h),
            out_strides=(self._tokens * out_stride, 0, out_stride_h),
            group_tokens=self._tokens,
        )

    def launch(self, stream: int, addresses: PrefillAddresses, scratch: int) -> None:
        """As in `Prepared`."""
        call = self._call
        mla_unite_selections.find_not_finite(
            device=call.device,
            stream=stream,
            capturing=self._capturing,
            rows=addresses.kv,
            not_finite=scratch + self._not_finite,
            row_stride=call.cache.block_stride,
            num_rows=call.cache.num_blocks,
        )
        for first_group in range(0, self._groups, self._chunk):
            groups = min(self._chunk, self._groups - first_group)
            chunk = addresses.from_token(call, first_group * self._tokens)
            mla_unite_selections.unite(
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
            mla_metadata.launch(
                device=call.device,
                stream=stream,
                capturing=self._capturing,
                tokens=mla_metadata.TokenCounts(scratch + self._counts, most=self._capacity),
                b=groups,
                num_parts=call.num_parts,
                sched_meta=scratch + self._plan,
                num_splits=scratch + self._num_splits,
                splits_length=groups + 1,
                object_layout=True,
                batch_invariant=False,
            )
            attended = SparseAddresses(
                q=chunk.q,
                q_rope=chunk.q_rope,
                k_cache=chunk.kv,
                extra_k_cache=0,
                indices=scratch + self._rows,
                extra_indices=0,
                topk_length=scratch + self._counts,
                extra_topk_length=0,
                attn_sink=scratch + self._sinks if chunk.attn_sink else 0,
                sched_meta=scratch + self._plan,
                num_splits=scratch + self._num_splits,
                out=chunk.out,
                lse=chunk.lse,
                max_logits=chunk.max_logits,
                selected=scratch + self._selected,
            )
            self._attention[groups].launch(stream, attended, scratch + self._split_scratch)
        if self._rest is not None:
            self._rest.launch(stream, addresses.from_token(call, self._groups * self._tokens), scratch)


class _PreparedCopies:
    """An FP8 cache is copied to bf16 rows in scratch, and these are attended."""

    def __init__(self, call: SparsePrefillCall, capturing: Callable[[], bool]) -> None:
        self._call = call
        self._capturing = capturing
        _load([mla_cache_gather.spec(QUANTIZED[call.format], False)], call, capturing)
        copies = _of_copies(call)
        self._num_rows = copies.cache.num_blocks
        self._attention = prepare(copies, capturing)
        layout = _Layout()
        layout.take(self._attention.scratch_bytes)
        self._rows = layout.take(self._num_rows * copies.cache.block_stride, _ROWS_ALIGNMENT)
        self.scratch_bytes = layout.bytes

    def launch(self, stream: int, addresses: PrefillAddresses, scratch: int) -> None:
        """As in `Prepared`."""
        call = self._call
        rows = scratch + self._rows
        mla_cache_gather.launch(
            QUANTIZED[call.format],
            False,
            device=call.device,
            stream=stream,
            capturing=self._capturing,
            cache=addresses.kv,
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
        self._attention.launch(stream, addresses._replace(kv=rows), scratch)
