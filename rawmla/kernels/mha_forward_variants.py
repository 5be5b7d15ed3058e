"""Variants of cuda_src/kernels/mha_forward.cu: the tile of each, its shared memory and its defines."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import NamedTuple

from .. import jit
from ..jit.spec import MAX_SMEM_BYTES
from ..jit.table import BoundedTable
from . import mha_combine
from .common import CHUNK, DTYPES, ceil_div, padded
from .paged_cache import CACHE_DTYPES, PagedCache

WARPGROUP_ROWS = 64
PAGE_ROWS = 16
"""Tokens of a block of a cache of rows that are copied together: cuda_src/mha/row_pages.cuh."""
_STAGES = 2
_BARRIER_BYTES = 512


class Tile(NamedTuple):
    """How the kernel cuts a call of some head dimensions."""

    consumers: int  # warpgroups with 64 query rows each
    keys: int

    @property
    def rows(self) -> int:
        """Query rows."""
        return self.consumers * WARPGROUP_ROWS


class Pages(NamedTuple):
    """How a kernel takes keys from a paged cache; the defaults: there is none."""

    source: int = 0  # PAGED_BY_TMA or GATHERED
    cache_type: int = 0  # the place in CACHE_DTYPES
    out_fp8: bool = False


PAGED_BY_TMA, GATHERED = 1, 2
NO_CACHE = Pages()
USUAL_CACHES = (Pages(PAGED_BY_TMA), Pages(GATHERED, CACHE_DTYPES.index("e4m3")))
"""Caches in the dtype of q in vLLM's layout, and e4m3 ones."""


def pages_of(cache: PagedCache | None, d: int) -> Pages:
    """How the kernel takes keys of a head dimension from a cache."""
    if cache is None:
        return NO_CACHE
    source = PAGED_BY_TMA if cache.dtype == "same" and cache.by_tma(d) else GATHERED
    return Pages(source, CACHE_DTYPES.index(cache.dtype), cache.out_fp8)


@cache
def tile_of(d_qk: int, d_v: int, changes_scores: bool = False, pages: Pages = NO_CACHE) -> Tile:
    """The tile of a pair of head dimensions.

    ``changes_scores``: there is a softcap or ALiBi. The numbers of registers below were found by compiling:
    with more keys some variant spills by one of the NVRTCs that .ci/run compiles with.
    """
    d_qk, d_v = padded(d_qk), padded(d_v)
    # O, S and P of a thread: d_v / 2, keys / 2 and keys / 4 registers, besides those for everything else. A
    # warpgroup that gathers leaves fewer of them for two consumers than a wide O needs.
    if d_qk <= 96 and d_v <= 96 and not pages.source:
        consumers, registers = 3, 116 if changes_scores else 132
    else:
        consumers = 1 if pages.source == GATHERED and d_v > 192 else 2
        gathering = 140 if changes_scores else 160 if d_v <= 128 else 150
        registers = 178 if consumers == 1 else (196, 178, gathering)[pages.source]
    keys = min(128, (registers - d_v // 2) * 4 // 3)
    return Tile(consumers, min(keys, _keys_beside_q(d_qk, d_v, consumers, pages)) // 16 * 16)


def tile_in_blocks(d_qk: int, d_v: int) -> Tile:
    """The tile of a pair of head dimensions whose keys divide blocks of 128."""
    d_qk, d_v, consumers = padded(d_qk), padded(d_v), 2
    most = min(128, (196 - d_v // 2) * 4 // 3, _keys_beside_q(d_qk, d_v, consumers, NO_CACHE))
    return Tile(consumers, 1 << most.bit_length() - 1)


def _keys_beside_q(d_qk: int, d_v: int, consumers: int, pages: Pages) -> int:
    """Keys of which there is room for K and V in shared memory."""
    q_columns = max(_chunks(d_qk), _chunks(d_v)) * CHUNK
    room = MAX_SMEM_BYTES - _BARRIER_BYTES - consumers * WARPGROUP_ROWS * q_columns * 2
    return room // _key_bytes(d_qk, d_v, pages)


def _key_bytes(d_qk: int, d_v: int, pages: Pages) -> int:
    """Shared memory for a key of the tile: in the stages, and as an FP8 cache has it."""
    raw = d_qk + d_v if pages.cache_type else 0
    return _STAGES * (_chunks(d_qk) + _chunks(d_v)) * CHUNK * 2 + raw


def _chunks(d: int) -> int:
    return ceil_div(d, CHUNK)


@cache
def spec(
    dtype: str, d_qk: int, d_v: int, window: bool, softcap: bool, alibi: bool, pages: Pages = NO_CACHE
) -> jit.KernelSpec:
    """The variant for head dimensions; ``window``: whether a mask can hide the first keys of a row."""
    d_qk, d_v = padded(d_qk), padded(d_v)
    tile = tile_of(d_qk, d_v, softcap or alibi, pages)
    features = {"WINDOW": window, "SOFTCAP": softcap, "ALIBI": alibi}
    return _variant(dtype, d_qk, d_v, tile, features, pages)


def rows_spec(
    dtype: str, d_qk: int, d_v: int, window: bool, softcap: bool, alibi: bool, in_pieces: bool
) -> jit.KernelSpec:
    """The variant for a cache of rows; ``in_pieces``: its blocks do not have the keys of a tile whole."""
    d_qk, d_v = padded(d_qk), padded(d_v)
    tile = tile_of(d_qk, d_v, softcap or alibi)
    features = {"WINDOW": window, "SOFTCAP": softcap, "ALIBI": alibi}
    return _variant(dtype, d_qk, d_v, tile, features, page_rows=box_rows(tile.keys, in_pieces))


def box_rows(tile_keys: int, in_pieces: bool) -> int:
    """The tokens of a cache of rows that are copied together."""
    return PAGE_ROWS if in_pieces else tile_keys


def flex_spec(
    dtype: str,
    d_qk: int,
    d_v: int,
    keys: int,
    max_scores: bool,
    header: tuple[str, str],
    grouped: bool = False,
) -> jit.KernelSpec:
    """The variant for functions and lists of blocks, with a number of keys in a tile; ``header`` is of
    `rawmla.flex.mods`, ``grouped``: query heads share tiles.
    """
    tile = tile_in_blocks(d_qk, d_v)._replace(keys=keys)
    features = {"FLEX": True, "FLEX_GROUPED": grouped, "MAX_SCORES": max_scores}
    return _variant(dtype, padded(d_qk), padded(d_v), tile, features, headers=(header,))


_FEATURES = dict.fromkeys(("ALIBI", "FLEX", "FLEX_GROUPED", "MAX_SCORES", "SOFTCAP", "WINDOW"), False)


def _variant(
    dtype: str,
    d_qk: int,
    d_v: int,
    tile: Tile,
    features: dict[str, bool],
    pages: Pages = NO_CACHE,
    page_rows: int = 0,
    headers: tuple[tuple[str, str], ...] = (),
) -> jit.KernelSpec:
    """The variant with a tile, for head dimensions that `padded` returned."""
    row_bytes = tile.rows * CHUNK * 2
    smem_bytes = row_bytes * _chunks(d_qk) + tile.keys * _key_bytes(d_qk, d_v, pages) + _BARRIER_BYTES
    # O reuses the memory of Q unless there is room for both.
    out_buffer = smem_bytes + row_bytes * _chunks(d_v) <= MAX_SMEM_BYTES
    smem_bytes += row_bytes * (_chunks(d_v) if out_buffer else max(0, _chunks(d_v) - _chunks(d_qk)))
    return jit.KernelSpec(
        "mha_forward",
        (
            ("CACHE_TYPE", pages.cache_type),
            ("CONSUMERS", tile.consumers),
            ("DTYPE", DTYPES[dtype]),
            ("D_QK", d_qk),
            ("D_V", d_v),
            ("OUT_BUFFER", out_buffer),
            ("OUT_FP8", pages.out_fp8),
            ("PAGED", pages.source),
            ("PAGE_ROWS", page_rows),
            ("TILE_KEYS", tile.keys),
            *(_FEATURES | features).items(),
        ),
        threads=128 * (tile.consumers + 1 + (pages.source == GATHERED)),
        smem_bytes=smem_bytes,
        headers=headers,
    )


def specs(
    dtype: str, head_dims: Iterable[tuple[int, int]], sources: Iterable[Pages] = (NO_CACHE,)
) -> list[jit.KernelSpec]:
    """The variants for pairs of head dimensions (d_qk, d_v) and ``sources`` of keys, without softcap, ALiBi
    and FP8 output, and their combine.
    """
    found: list[jit.KernelSpec] = []
    for d_qk, d_v in head_dims:
        for pages in sources:
            for window in (False, True):
                found.append(spec(dtype, d_qk, d_v, window, softcap=False, alibi=False, pages=pages))
        found.append(mha_combine.spec(dtype, padded(d_v)))
    return list(dict.fromkeys(found))


def rows_specs(dtype: str, head_dims: Iterable[tuple[int, int]]) -> list[jit.KernelSpec]:
    """The variants for caches of rows in the same way."""
    flags = (False, True)
    found = [
        rows_spec(dtype, *dims, window, False, False, in_pieces)
        for dims in head_dims
        for window in flags
        for in_pieces in flags
    ]
    return [*found, *[mha_combine.spec(dtype, padded(d_v)) for _, d_v in head_dims]]


_slow: BoundedTable[jit.KernelSpec, bool] = BoundedTable(1024)


def is_slow(
    spec: jit.KernelSpec,
    device: int,
    capturing: Callable[[], bool],
    loses: Callable[[jit.CompiledKernel], bool],
) -> bool:
    """Whether a variant with functions loses too much speed, as ``loses`` says of its code.

    In a capture nothing is compiled: the answer is False, and to load the variant is an error then.
    """
    slow = _slow.get(spec)
    if slow is None:
        if capturing():
            return False
        jit.require_supported(device)
        slow = _slow[spec] = loses(jit.build(spec))
    return slow
