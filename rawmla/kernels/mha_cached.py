"""The kernels that attend over a cache: decoding of few query rows, dense attention, or both."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from .common import ceil_div
from .mha_decode import TILE_ROWS, MhaDecodeAddresses, MhaDecodeCall, PreparedMhaDecode
from .mha_forward import NO_BOUND, MhaForwardAddresses, MhaForwardCall, PreparedMhaForward, RowCache
from .mha_forward_variants import PAGE_ROWS

_ALIGNMENT = 128
_ROWS_BESIDE = TILE_ROWS[1]
"""Query rows of a tile of decoding beside dense attention. Most requests have one token, and with larger
tiles they would take longer than memory does.
"""


def decode_tokens(group: int) -> int:
    """Return how many query tokens of a request decoding alone is meant for, with `group` heads a KV head."""
    return max(TILE_ROWS[-1] // group, 1)


def reads_pages(block_size: int) -> bool:
    """Whether dense attention can read pages of this size."""
    return block_size % PAGE_ROWS == 0


class PreparedCached:
    """The launches of a call, which take ``scratch_bytes`` of scratch; 0: none.

    Requests with more query rows than a tile of decoding has go to dense attention, which loads keys once for
    128 of them. With segments the host does not know which requests these are: both kernels run, and each
    leaves the other's requests alone. Decoding comes first. It leaves SMs to dense attention, which starts
    beside it and takes the others when they are free, unless new tokens have to be appended first.
    """

    def __init__(
        self, call: MhaDecodeCall, paged: bool, serves_long: bool, capturing: Callable[[], bool]
    ) -> None:
        """Load the kernels.

        ``paged``: there is a block table. ``serves_long``: dense attention knows how to read the call's
        arrays. ``capturing`` as in `rawmla.jit.get_kernel`.
        """
        most_tokens = decode_tokens(call.h_q // call.h_kv)
        fits = not paged or reads_pages(call.block_size)
        forward = None
        if (
            serves_long
            and fits
            and call.max_seqlen_q > most_tokens
            and call.num_blocks
            and call.table_columns
        ):
            if not call.varlen_q:
                most_tokens = 0
            leaves_sms = most_tokens > 0 and not call.seqlen_new
            call = call._replace(most_tokens=most_tokens, most_rows=_ROWS_BESIDE, leaves_sms=leaves_sms)
            forward = PreparedMhaForward(_forward_call(call, paged), capturing)
        decode = None
        self._decode_bytes = self.scratch_bytes = 0
        if forward is None or call.seqlen_new or most_tokens:
            decode = PreparedMhaDecode(call, capturing)
            self.scratch_bytes = decode.scratch_bytes
            self.launch = decode.launch
            """Enqueues the kernels; arguments as of `PreparedMhaDecode.launch`."""
        if forward is not None:
            self._decode_bytes = ceil_div(self.scratch_bytes, _ALIGNMENT) * _ALIGNMENT
            self.scratch_bytes = self._decode_bytes + forward.scratch_bytes
            self.launch = partial(self._launch_all, forward, decode)

    def _launch_all(
        self,
        forward: PreparedMhaForward,
        decode: PreparedMhaDecode | None,
        stream: int,
        addresses: tuple[int, ...],
        scratch: int,
        cache_length: int,
    ) -> None:
        given = MhaDecodeAddresses(*addresses)
        places = MhaForwardAddresses(
            given.q, given.k_cache, given.v_cache, given.out, given.lse, given.cu_seqlens_q,
            given.cu_seqlens_k, 0, given.cache_seqlens, given.attn_sink, given.alibi_slopes,
            given.block_table,
        )  # fmt: skip
        of_forward = scratch + self._decode_bytes
        forward.begin(stream, of_forward)
        if decode is not None:
            decode.launch(stream, addresses, scratch, cache_length)
        forward.attend(stream, places, of_forward, given.cache_batch_idx, given.cu_seqlens_k_new)
        if decode is not None:
            decode.combine(stream, addresses, scratch, cache_length)


def _forward_call(call: MhaDecodeCall, paged: bool) -> MhaForwardCall:
    """The call of dense attention for requests with more than ``most_tokens`` query tokens."""
    capacity = call.block_size * call.table_columns
    return MhaForwardCall(
        device=call.device,
        dtype=call.dtype,
        b=call.b,
        k_batches=call.b,
        h_q=call.h_q,
        h_kv=call.h_kv,
        d_qk=call.d_qk,
        d_v=call.d_v,
        varlen=call.varlen_q,
        max_seqlen_q=call.max_seqlen_q,
        max_seqlen_k=capacity,
        total_q=call.total_q,
        total_k=NO_BOUND,
        q_strides=call.q_strides,
        k_strides=call.k_strides,
        v_strides=call.v_strides,
        out_strides=call.out_strides,
        lse_strides=call.lse_strides,
        softmax_scale=call.softmax_scale,
        window_left=call.window_left,
        window_right=call.window_right,
        softcap=call.softcap,
        sink_dtype=call.sink_dtype,
        has_alibi=call.has_alibi,
        alibi_stride_b=call.alibi_stride_b,
        rows=RowCache(
            num_blocks=call.num_blocks,
            block_size=call.block_size,
            paged=paged,
            table_rows=call.table_rows,
            table_stride=call.table_stride,
            seqlen_new=call.seqlen_new,
            total_new=call.total_new,
            skip_tokens=call.most_tokens,
            is_whole=call.is_whole,
            runs_beside=call.leaves_sms,
        ),
    )
