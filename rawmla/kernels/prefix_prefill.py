"""Host side of paged prefix prefill: the variants of cuda_src/kernels/mha_forward.cu that read a paged cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

__all__ = ["CACHE_DTYPES", "PrefixPrefillAddresses", "PrefixPrefillCall", "PreparedPrefixPrefill"]

CACHE_DTYPES = ("same", "e4m3", "e5m2")
"""What a cache holds: values of the dtype of q, or FP8 bytes."""


class PrefixPrefillAddresses(NamedTuple):
    """The arrays of a call as device addresses; 0: not given."""

    q: int
    k: int
    v: int
    o: int
    k_cache: int
    v_cache: int
    block_table: int
    b_start_loc: int
    b_seq_len: int
    k_scale: int
    v_scale: int
    alibi_slopes: int
    sinks: int
    fp8_out_scale: int


class PrefixPrefillCall(NamedTuple):
    """What stays the same when a call is repeated on other arrays: sizes, and strides in elements.

    Strides of q, k, v and o are of the dimensions (token, head), multiples of 16 bytes. k and v have the
    strides (0, 0) where the own tokens are read from the cache.
    """

    device: int
    dtype: str
    b: int
    h_q: int
    h_kv: int
    d: int
    tokens: int  # rows of q
    tokens_kv: int  # rows of k and v
    max_query_len: int
    q_strides: tuple[int, int]
    k_strides: tuple[int, int]
    v_strides: tuple[int, int]
    o_strides: tuple[int, int]
    own_from_cache: bool
    cache_dtype: str  # one of CACHE_DTYPES
    num_blocks: int
    block_size: int
    x: int  # dimensions that lie together in k_cache
    v_pack: int  # tokens that lie together in an interleaved v_cache; 0: not interleaved
    k_strides_cache: tuple[int, int]  # of the dimensions (block, head), in elements of the cache
    v_strides_cache: tuple[int, int]
    table_stride: int  # of the rows of block_table, in its elements
    table_columns: int
    table_bytes: int  # of an entry: 4 or 8
    table_has_pointers: bool
    softmax_scale: float
    window: int  # NO_BOUND: none; else a token sees so many tokens before itself (W - 1)
    causal: bool
    skip_decode: bool
    has_alibi: bool
    has_sinks: bool
    sink_dtype: str
    k_scale: float | None  # a number of the host; None: on the device, or 1 where there is no address
    v_scale: float | None
    fp8_out: bool
    fp8_out_scale: float | None


class PreparedPrefixPrefill:
    """The launch of a call.

    Attributes
    ----------
    scratch_bytes : int
        Size of the scratch that `launch` takes; 0: none.
    """

    scratch_bytes: int

    def __init__(self, call: PrefixPrefillCall, capturing: Callable[[], bool]) -> None:
        """Load the kernel; ``capturing`` as in `rawmla.jit.get_kernel`."""
        raise NotImplementedError

    def launch(self, stream: int, addresses: tuple[int, ...], scratch: int) -> None:
        """Enqueue the kernel.

        ``addresses`` has the order of `PrefixPrefillAddresses`. ``scratch`` is the address of 16-byte aligned
        scratch, or 0.
        """
        raise NotImplementedError
