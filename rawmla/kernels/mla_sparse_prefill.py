"""Sparse prefill, composed of other kernels: it has no CUDA source of its own.

The kernels of `mla_sparse` attend, with every query token as a request of its own: a call is a `SparseCall`
whose b counts query tokens. Three ways to get there are tried in this order:

- An FP8 cache is copied to bf16 rows (`mla_cache_gather`), which then are attended.
- Query tokens with few heads are attended in groups that fill a tile (`mla_unite_selections`).
- Query tokens are attended one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from .. import jit
from . import mla_cache_gather, mla_metadata, mla_sparse, mla_unite_selections
from .common import BLOCK_TOKENS, D_V, INT32_MAX, TILE_ROWS, ceil_div, offsets_in_scratch
from .mla_cache_rows import FORMATS, QUANTIZED
from .mla_sparse import SparseAddresses, SparseCall

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
_PLAN_AT = SparseAddresses._fields.index("sched_meta")  # num_splits is the next


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


class Prepared(Protocol):
    """The launches of a prefill call."""

    scratch_bytes: int
    """Size of the scratch that `launch` takes; 0: none."""

    def launch(self, stream: int, addresses: SparseAddresses, scratch: int) -> None:
        """Enqueue the kernels. ``addresses`` has no plan. ``scratch`` is the address of 16-byte aligned
        scratch, or 0.
        """


def prepare(call: SparseCall, capturing: Callable[[], bool]) -> Prepared:
    """The launches of a call, with its kernels loaded; ``capturing`` as in `rawmla.jit.get_kernel`.

    In a ``batch_invariant`` call the bits of a token's result depend on nothing but the token, so the number
    of tokens may not choose the way.
    """
    if not call.batch_invariant:
        if call.format in QUANTIZED and _is_copied(call):
            return _PreparedCopies(call, capturing)
        if call.format not in QUANTIZED and _is_united(call):
            return _PreparedGroups(call, capturing)
    return _PreparedTokens(call, mla_metadata.MAX_BATCH, capturing)


def _of_copies(call: SparseCall) -> SparseCall:
    """The same call on copies of the cache's rows in bf16."""
    rows = call.cache.num_blocks * call.cache.page_block_size
    row_bytes = 2 * call.d_qk
    cache = call.cache._replace(
        page_block_size=1, num_blocks=rows, block_stride=row_bytes, token_stride=row_bytes
    )
    return call._replace(format="bf16", load_bytes=16, cache=cache)


def _is_copied(call: SparseCall) -> bool:
    """Whether an FP8 cache is better copied to bf16 rows first.

    So it is when its rows are selected many times, unless the copies take more room than q and the results.
    """
    copies = _of_copies(call)
    if call.load_bytes < QUANTIZED[call.format].alignment:
        return False
    if max(call.cache.block_stride, copies.cache.num_blocks) > INT32_MAX:
        return False
    if call.format == "v32" and call.h_q <= mla_sparse.FEW_HEADS and not _is_united(copies):
        return False  # the kernel for few heads reads FP8 rows in less time
    rows = copies.cache.num_blocks
    often = call.b * call.cache.topk >= _COPIED_WHEN_SELECTED * rows
    return often and rows * call.d_qk <= call.b * call.h_q * (call.d_qk + D_V)


def _is_united(call: SparseCall) -> bool:
    """Whether query tokens are better attended in groups that fill the rows of a tile.

    So it is when the heads of a token fill only a fraction of a tile, there are enough tokens, and rows are
    selected many times.
    """
    group_tokens = TILE_ROWS // call.h_q
    rows, topk = call.cache.num_blocks, call.cache.topk
    out_stride, _, out_stride_h = call.out_strides
    return (
        group_tokens in mla_unite_selections.GROUP_TOKENS
        and group_tokens * call.h_q == TILE_ROWS
        and call.b >= _UNITED_TOKENS
        and out_stride == call.h_q * out_stride_h
        and rows <= mla_unite_selections.MAX_ROWS
        and group_tokens * topk <= mla_unite_selections.MAX_CAPACITY
        and call.b * topk >= _UNITED_WHEN_SELECTED * rows
        and rows <= _UNITED_ROWS * topk
    )


def _from_token(addresses: SparseAddresses, call: SparseCall, first: int) -> SparseAddresses:
    """The addresses of query token ``first``."""
    if first == 0:
        return addresses
    return addresses._replace(
        q=addresses.q + 2 * first * call.q_strides[0],
        q_rope=addresses.q_rope + 2 * first * call.q_rope_strides[0],
        indices=addresses.indices + 4 * first * call.cache.index_stride_b,
        topk_length=addresses.topk_length + 4 * first if addresses.topk_length else 0,
        out=addresses.out + 2 * first * call.out_strides[0],
        max_logits=addresses.max_logits + 4 * first * call.h_q,
        lse=addresses.lse + 4 * first * call.h_q,
    )


def _load(specs: Iterable[jit.KernelSpec], call: SparseCall, capturing: Callable[[], bool]) -> None:
    """Load kernels that `launch` looks up, so that a call which lacks one enqueues nothing."""
    for spec in specs:
        jit.get_kernel(spec, call.device, capturing=capturing)


class _PreparedTokens:
    """Query tokens, or groups of them, are attended as requests, in chunks that one plan covers.

    For each chunk a plan is made, unless it is uniform. Scratch has the plan and the splits; the chunks use
    it one after the other.

    Attributes
    ----------
    chunk : int
        Requests of a chunk, at most ``most``. The last chunk may have fewer.
    plan_bytes, splits_bytes : int
        Sizes of the plan and of the splits, for a caller of `attend`, which says where they are.
    """

    def __init__(self, call: SparseCall, most: int, capturing: Callable[[], bool]) -> None:
        self._call = call
        self._capturing = capturing
        self.chunk = ceil_div(call.b, ceil_div(call.b, most))
        sizes = {self.chunk, call.b - (ceil_div(call.b, self.chunk) - 1) * self.chunk}
        self._needs_plan = call.limited and not call.batch_invariant
        if self._needs_plan:
            _load({mla_metadata.spec(size) for size in sizes}, call, capturing)
        self._attention = {
            size: mla_sparse.PreparedSparse(
                call._replace(b=size, uniform=self._uniform_plan(size)), capturing
            )
            for size in sizes
        }
        self._num_splits = call.num_parts * 4 * mla_metadata.PLAN_COLUMNS
        self.plan_bytes = self._num_splits + 4 * (self.chunk + 1) if self._needs_plan else 0
        self.splits_bytes = max(one.scratch_bytes for one in self._attention.values())
        (_, self._splits), self.scratch_bytes = offsets_in_scratch((self.plan_bytes, self.splits_bytes), 16)

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

    def launch(self, stream: int, addresses: SparseAddresses, scratch: int) -> None:
        """As in `Prepared`."""
        call = self._call
        for first in range(0, call.b, self.chunk):
            tokens = min(self.chunk, call.b - first)
            self.attend(stream, tokens, _from_token(addresses, call, first), scratch, scratch + self._splits)

    def attend(self, stream: int, requests: int, addresses: SparseAddresses, plan: int, splits: int) -> None:
        """Enqueue a chunk, whose plan and splits go to the addresses ``plan`` and ``splits``."""
        call = self._call
        num_splits = plan + self._num_splits
        if self._needs_plan:
            mla_metadata.launch(
                device=call.device,
                stream=stream,
                capturing=self._capturing,
                tokens=mla_metadata.TokenCounts(addresses.topk_length, most=call.cache.topk),
                b=requests,
                num_parts=call.num_parts,
                sched_meta=plan,
                num_splits=num_splits,
                splits_length=requests + 1,
                object_layout=True,
                batch_invariant=False,
            )
        # To replace two fields by name would take twice as long.
        attended = (*addresses[:_PLAN_AT], plan, num_splits, *addresses[_PLAN_AT + 2 :])
        self._attention[requests].launch(stream, attended, splits)


class _PreparedGroups:
    """Query tokens are attended in groups, in chunks of as many as scratch has room for.

    For each chunk: what the tokens of a group select is united, a plan is made, and a group is attended as
    one token with the heads of all its tokens. The tokens after the last whole group are attended one by
    one.

    Scratch has the plan, the bits of rows that are not finite, the united selections of a chunk and the
    splits.
    """

    def __init__(self, call: SparseCall, capturing: Callable[[], bool]) -> None:
        self._call = call
        self._capturing = capturing
        self._tokens = TILE_ROWS // call.h_q
        self._groups, rest = divmod(call.b, self._tokens)
        most = mla_metadata.MAX_BATCH
        self._rest = _PreparedTokens(call._replace(b=rest), most, capturing) if rest else None
        capacity = mla_unite_selections.capacity(self._tokens, call.cache.topk)
        words = mla_unite_selections.selected_bytes(self._tokens, capacity)
        _load(mla_unite_selections.specs(), call, capturing)
        groups = self._attention = _PreparedTokens(
            self._call_of_groups(capacity),
            min(_UNITED_SCRATCH // (4 * capacity + words), most),
            capturing,
        )
        sizes = (
            groups.plan_bytes,
            mla_unite_selections.not_finite_bytes(call.cache.num_blocks),
            4 * TILE_ROWS,  # sinks
            4 * groups.chunk,  # counts
            4 * capacity * groups.chunk,  # rows
            words * groups.chunk,  # selected
            groups.splits_bytes,
        )
        self._offsets, self.scratch_bytes = offsets_in_scratch(sizes, 16)
        if self._rest is not None:
            self.scratch_bytes = max(self.scratch_bytes, self._rest.scratch_bytes)

    def _call_of_groups(self, capacity: int) -> SparseCall:
        call = self._call
        q_stride, _, q_stride_h = call.q_strides
        q_rope_stride, _, q_rope_stride_h = call.q_rope_strides
        out_stride, _, out_stride_h = call.out_strides
        return call._replace(
            b=self._groups,
            h_q=TILE_ROWS,
            cache=call.cache._replace(topk=capacity, index_stride_b=capacity),
            q_strides=(self._tokens * q_stride, q_stride, q_stride_h),
            q_rope_strides=(self._tokens * q_rope_stride, q_rope_stride, q_rope_stride_h),
            out_strides=(self._tokens * out_stride, 0, out_stride_h),
            limited=True,
            group_tokens=self._tokens,
        )

    def launch(self, stream: int, addresses: SparseAddresses, scratch: int) -> None:
        """As in `Prepared`."""
        call = self._call
        plan, not_finite, sinks, counts, rows, selected, splits = (
            scratch + offset for offset in self._offsets
        )
        mla_unite_selections.find_not_finite(
            device=call.device,
            stream=stream,
            capturing=self._capturing,
            rows=addresses.k_cache,
            not_finite=not_finite,
            row_stride=call.cache.block_stride,
            num_rows=call.cache.num_blocks,
        )
        for first_group in range(0, self._groups, self._attention.chunk):
            groups = min(self._attention.chunk, self._groups - first_group)
            chunk = _from_token(addresses, call, first_group * self._tokens)
            mla_unite_selections.unite(
                device=call.device,
                stream=stream,
                capturing=self._capturing,
                indices=chunk.indices,
                topk_length=chunk.topk_length,
                not_finite=not_finite,
                attn_sink=chunk.attn_sink,
                rows=rows,
                counts=counts,
                selected=selected,
                sinks=sinks,
                index_stride=call.cache.index_stride_b,
                topk=call.cache.topk,
                num_rows=call.cache.num_blocks,
                group_tokens=self._tokens,
                groups=groups,
            )
            united = chunk._replace(
                indices=rows,
                topk_length=counts,
                attn_sink=sinks if chunk.attn_sink else 0,
                selected=selected,
            )
            self._attention.attend(stream, groups, united, plan, splits)
        if self._rest is not None:
            self._rest.launch(stream, _from_token(addresses, call, self._groups * self._tokens), scratch)


class _PreparedCopies:
    """An FP8 cache is copied to bf16 rows in scratch, and these are attended."""

    def __init__(self, call: SparseCall, capturing: Callable[[], bool]) -> None:
        self._call = call
        self._capturing = capturing
        _load([mla_cache_gather.spec(QUANTIZED[call.format], False)], call, capturing)
        copies = _of_copies(call)
        self._num_rows = copies.cache.num_blocks
        self._attention = prepare(copies, capturing)
        # Rows are aligned to 128 bytes: aligned 128 bytes of a row then are one cache line.
        (_, self._rows), self.scratch_bytes = offsets_in_scratch(
            (self._attention.scratch_bytes, self._num_rows * copies.cache.block_stride), 128
        )

    def launch(self, stream: int, addresses: SparseAddresses, scratch: int) -> None:
        """As in `Prepared`."""
        call = self._call
        rows = scratch + self._rows
        mla_cache_gather.launch(
            QUANTIZED[call.format],
            False,
            device=call.device,
            stream=stream,
            capturing=self._capturing,
            cache=addresses.k_cache,
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
        self._attention.launch(stream, addresses._replace(k_cache=rows), scratch)
