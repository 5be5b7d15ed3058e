"""Host side of cuda_src/kernels/mha_decode.cu: attention of few query rows over a cache, and its combine."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from .. import jit
from ..jit.params import F32, I32, I64, POINTER, U32, ParamStruct, changing
from ..jit.spec import MAX_SMEM_BYTES
from .common import CHUNK, DTYPES, FLOAT_DTYPES, LOG2_E, ceil_div, divisor, fields, padded, stride_params

TILE_ROWS = (8, 16, 32, 64)
"""Query rows that a CTA attends at once."""
_WIDE = 192
"""Largest head dimension of V with which a tile may have all its rows: O is in registers."""
_BARRIER_BYTES = 1024
"""Shared memory for barriers and what else is small."""
_MOST_SPARE = 0.05
"""Share of the multiprocessors that may be without work, for the sake of locality."""
MOST_WHOLE_CTAS = 1 << 15
"""The most CTAs that attend whole pairs, unless requests times KV heads are more. Every request has as many
as the longest one, so most may have no work.
"""
_SHARES_BESIDE = 0.7, 0.25
"""Share of the multiprocessors that decoding has while dense attention has the others: with few query tokens
a request, and with `_MANY_TOKENS`.
"""
_MANY_TOKENS = 64
_BLOCK_ROWS = 64
"""Tokens of a tile of a block of keys."""


class MhaDecodeCall(NamedTuple):
    """The facts of a call that stay the same on other arrays: sizes, and strides in elements.

    Strides are of the dimensions (batch or block, token, head). With ``varlen_q`` the queries of requests are
    segments of one array; with ``varlen_new`` the new tokens are.
    """

    device: int
    dtype: str
    b: int
    h_q: int
    h_kv: int
    d_qk: int  # multiples of 8, of an FP8 cache of 16
    d_v: int
    varlen_q: bool
    varlen_new: bool
    max_seqlen_q: int
    total_q: int  # of one request without varlen_q
    seqlen_new: int  # 0: nothing is appended
    total_new: int
    num_blocks: int
    block_size: int
    table_rows: int
    table_columns: int
    table_stride: int
    q_strides: tuple[int, int, int]
    k_strides: tuple[int, int, int]
    v_strides: tuple[int, int, int]
    k_new_strides: tuple[int, int, int]
    v_new_strides: tuple[int, int, int]
    out_strides: tuple[int, int, int]
    lse_strides: tuple[int, int]  # of the dimensions (batch, head); tokens are contiguous
    softmax_scale: float
    window_left: int
    window_right: int  # 0: causal
    softcap: float = 0.0  # 0: none
    cache_fp8: bool = False  # e4m3, and k and v too
    q_fp8: bool = False  # then dtype is of out
    descale_strides: tuple[tuple[int, int], ...] = ((0, 0),) * 3  # of q, k and v: (batch, KV head)
    rotary_dim: int = 0  # 0: nothing is rotated
    rotary_rows: int = 0
    rotary_interleaved: bool = True
    rotates_by_token: bool = False
    sink_dtype: str | None = None
    has_alibi: bool = False
    alibi_stride_b: int = 0
    most_tokens: int = 2**31 - 1  # longer requests have no results, but new tokens
    most_rows: int = TILE_ROWS[-1]  # query rows of a tile
    is_whole: bool = False  # one order of sums, whatever the batch
    leaves_sms: bool = False  # to dense attention, which is launched before the combine


class MhaDecodeAddresses(NamedTuple):
    """The arrays of a call as device addresses; 0: not given."""

    q: int
    k_cache: int
    v_cache: int
    out: int
    lse: int
    k: int = 0
    v: int = 0
    rotary_cos: int = 0
    rotary_sin: int = 0
    cu_seqlens_q: int = 0
    cache_seqlens: int = 0
    cu_seqlens_k: int = 0
    cu_seqlens_k_new: int = 0
    cache_leftpad: int = 0
    cache_batch_idx: int = 0
    block_table: int = 0
    rotary_seqlens: int = 0
    attn_sink: int = 0
    alibi_slopes: int = 0
    q_descale: int = 0
    k_descale: int = 0
    v_descale: int = 0


_NAMES = {"k": "k_new", "v": "v_new", "cu_seqlens_k_new": "cu_seqlens_new"}
"""Members of the struct that have another name than the argument."""
_STRIDED = ("q", "k", "v", "k_new", "v_new", "out")
PARAMS = ParamStruct(
    changing(
        POINTER(*[_NAMES.get(name, name) for name in MhaDecodeAddresses._fields]),
        POINTER("states", "o_parts"),
        I64("cache_length"),
    ),
    I64(*[f"{name}_stride_{axis}" for name in _STRIDED for axis in "bsh"]),
    I64("lse_stride_b", "lse_stride_h", "table_stride"),
    I64(*[f"{name}_descale_stride_{axis}" for name in "qkv" for axis in "bh"]),
    I32("b", "group", "team", "heads_of_cta", "group_shift"),
    U32("group_magic"),
    I32("d_qk", "d_v", "seqlen_q", "total_q", "seqlen_new", "total_new"),
    I32("num_blocks", "block_size", "table_rows", "table_columns", "block_shift"),
    U32("block_magic"),
    I32("window_left", "window_right"),
    I32("rotary_dim", "rotary_rows", "rotary_interleaved", "rotates_by_token"),
    I32("alibi_stride_b", "sink_dtype", "max_tiles", "most_tokens", "is_whole"),
    F32("scale_log2", "score_scale"),
)


class Tile(NamedTuple):
    """The query rows of a CTA, and what it has in shared memory."""

    math_groups: int
    group_rows: int  # query rows of each
    row_groups: int  # 1: all math groups have the same rows
    token_tiles: int
    stages: int
    smem_bytes: int

    @property
    def rows(self) -> int:
        """Query rows."""
        return self.row_groups * self.group_rows


@cache
def tile_of(rows: int, d_qk: int, d_v: int, cache_fp8: bool = False) -> Tile:
    """The tile for the query rows of a KV head and head dimensions."""
    rows = next((size for size in TILE_ROWS if size >= rows), TILE_ROWS[-1])
    # More have no room in registers, beside fragments of K and V and a wide O.
    rows = min(rows, TILE_ROWS[-1] >> cache_fp8 + (d_v > _WIDE))
    row_groups = 1 if rows <= TILE_ROWS[1] or cache_fp8 else 2
    math_groups = 2 if cache_fp8 else row_groups
    group_rows = rows // row_groups
    k_chunks, v_chunks = ceil_div(d_qk, CHUNK), ceil_div(d_v, CHUNK)
    # Blocks of about 16 KB of K; of an FP8 cache, a tile for each math group.
    token_tiles = 2 if max(k_chunks, v_chunks) <= 1 or cache_fp8 else 1
    row_bytes = 2 * CHUNK
    own_tiles = token_tiles * row_groups // math_groups
    own_bytes = math_groups * group_rows * row_bytes * (max(k_chunks, v_chunks) + own_tiles) + _BARRIER_BYTES
    own_bytes += 16 * math_groups * group_rows  # maxima and sums
    if cache_fp8:
        k_chunks, v_chunks = ceil_div(k_chunks, 2), ceil_div(v_chunks, 2)
    stage_bytes = _BLOCK_ROWS * token_tiles * row_bytes * (k_chunks + v_chunks)
    stages = (MAX_SMEM_BYTES - own_bytes) // stage_bytes
    smem_bytes = own_bytes + stages * stage_bytes
    return Tile(math_groups, group_rows, row_groups, token_tiles, stages, smem_bytes)


@cache
def teams_of(h_kv: int, tiles: int, sm_count: int) -> tuple[int, int]:
    """How many teams of CTAs there are, and how many KV heads they attend side by side; ``tiles`` are of all
    requests.

    A team is as large as it can be while few multiprocessors have no CTA. Of the numbers of teams that leave
    few without one, the largest is taken with which each team has whole tiles, or an equal part of one tile,
    if requests have one length; else the largest.
    """
    most_spare = int(_MOST_SPARE * sm_count)
    team = next(
        team
        for team in range(min(h_kv, sm_count), 0, -1)
        if h_kv % team == 0 and sm_count % team <= most_spare
    )
    pairs = max(tiles, 1) * h_kv // team
    counts = range(sm_count // team, (sm_count - most_spare - 1) // team, -1)
    return next((teams for teams in counts if not pairs % teams or not teams % pairs), counts[0]), team


class Features(NamedTuple):
    """What a variant computes besides."""

    softcap: bool = False
    alibi: bool = False
    cache_fp8: bool = False
    q_fp8: bool = False


PLAIN = Features()


@cache
def specs(
    dtype: str, rows: int, d_qk: int, d_v: int, features: Features = PLAIN
) -> tuple[jit.KernelSpec, jit.KernelSpec]:
    """The variants of the kernel and of its combine for query rows of a KV head and head dimensions."""
    tile = tile_of(rows, d_qk, d_v, features.cache_fp8)
    sizes = (
        ("DTYPE", DTYPES[dtype]),
        ("D_QK", padded(d_qk)),
        ("D_V", padded(d_v)),
        ("GROUP_ROWS", tile.group_rows),
        ("MATH_GROUPS", tile.math_groups),
        ("STAGES", tile.stages),
        ("TOKEN_TILES", tile.token_tiles),
        ("CACHE_FP8", features.cache_fp8),
    )
    own = (("ALIBI", features.alibi), ("SOFTCAP", features.softcap), ("Q_FP8", features.q_fp8))
    none = (("ALIBI", 0), ("SOFTCAP", 0), ("Q_FP8", 0))
    out_bytes = tile.group_rows * 2 * CHUNK * ceil_div(d_v, CHUNK)
    return (
        jit.KernelSpec("mha_decode", (*sizes, *own), 128 * (tile.math_groups + 1), tile.smem_bytes),
        jit.KernelSpec("mha_decode_combine", (*sizes, *none), 128, out_bytes),
    )


class PreparedMhaDecode:
    """The launch of a call, which takes ``scratch_bytes`` of scratch; 0: none."""

    def __init__(self, call: MhaDecodeCall, capturing: Callable[[], bool]) -> None:
        """Load the kernels; ``capturing`` as in `rawmla.jit.get_kernel`."""
        group = call.h_q // call.h_kv
        rows = min(call.max_seqlen_q, call.most_tokens) * group
        features = Features(call.softcap > 0, call.has_alibi, call.cache_fp8, call.q_fp8)
        tile_rows = min(rows, call.most_rows)
        tile = tile_of(tile_rows, call.d_qk, call.d_v, call.cache_fp8)
        max_tiles = ceil_div(max(rows, 1), tile.rows)
        if call.is_whole:
            max_tiles = max(1, min(max_tiles, MOST_WHOLE_CTAS // (call.b * call.h_kv)))
        kernel, combine = [
            jit.get_kernel(spec, call.device, capturing=capturing)
            for spec in specs(call.dtype, tile_rows, call.d_qk, call.d_v, features)
        ]
        ctas, team = call.b * call.h_kv * max_tiles, 1
        self.scratch_bytes = self._states_bytes = 0
        then = None
        if not call.is_whole:
            sm_count = jit.device_info(call.device).sm_count
            if call.leaves_sms:
                share = _SHARES_BESIDE[call.total_q >= _MANY_TOKENS * call.b]
                sm_count = max(1, int(share * sm_count))
            teams, team = teams_of(call.h_kv, call.b * max_tiles, sm_count)
            ctas = teams * team
            parts = 2 * ctas * tile.rows
            self._states_bytes = 8 * parts
            self.scratch_bytes = self._states_bytes + parts * 4 * CHUNK * ceil_div(call.d_v, CHUNK)
            then = combine, (ctas, tile.row_groups, 1)
        group_magic, group_shift = divisor(group)
        block_magic, block_shift = divisor(call.block_size)
        of_arrays = {name: getattr(call, f"{name}_strides") for name in _STRIDED}
        params = PARAMS.pack(
            **stride_params(**of_arrays),
            lse_stride_b=call.lse_strides[0],
            lse_stride_h=call.lse_strides[1],
            **{
                f"{name}_descale_stride_{axis}": stride
                for name, strides in zip("qkv", call.descale_strides, strict=True)
                for axis, stride in zip("bh", strides, strict=True)
            },
            **fields(call, "table_stride", "b", "d_qk", "d_v", "total_q", "seqlen_new", "total_new"),
            **fields(
                call,
                "num_blocks",
                "block_size",
                "table_columns",
                "table_rows",
                "window_left",
                "window_right",
                "rotary_dim",
                "rotary_rows",
                "rotary_interleaved",
            ),
            **fields(call, "rotates_by_token", "alibi_stride_b", "most_tokens", "is_whole"),
            group=group,
            team=team,
            heads_of_cta=call.h_kv // team,
            group_shift=group_shift,
            group_magic=group_magic,
            seqlen_q=call.max_seqlen_q,
            block_shift=block_shift,
            block_magic=block_magic,
            sink_dtype=FLOAT_DTYPES[call.sink_dtype or "float32"],
            max_tiles=max_tiles,
            # softcap * tanh(scale / softcap * s), in base 2
            scale_log2=(call.softcap or call.softmax_scale) * LOG2_E,
            score_scale=call.softmax_scale / call.softcap if call.softcap else 1.0,
        )
        self._combine = None
        if call.leaves_sms and then is not None:
            self._combine = combine.prepare(then[1], params, PARAMS.changing, pdl=True).launch
            then = None
        self._launch = kernel.prepare((ctas, 1, 1), params, PARAMS.changing, pdl=True, then=then).launch

    def launch(self, stream: int, addresses: tuple[int, ...], scratch: int, cache_length: int) -> None:
        """Enqueue the kernel, and the combine after it unless the call leaves SMs.

        ``addresses`` has the order of `MhaDecodeAddresses`; ``scratch`` is the address of 16-byte aligned
        scratch, or 0; ``cache_length`` is the number of tokens in the cache of each request, where no array
        has it.
        """
        self._launch(stream, *addresses, scratch, scratch + self._states_bytes, cache_length)

    def combine(self, stream: int, addresses: tuple[int, ...], scratch: int, cache_length: int) -> None:
        """Enqueue the combine of a call that leaves SMs; arguments as of `launch`."""
        if self._combine is not None:
            self._combine(stream, *addresses, scratch, scratch + self._states_bytes, cache_length)
