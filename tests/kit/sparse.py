"""Inputs of sparse decoding: caches in every layout, indices with everything that may stand between them.

As with the dense inputs, what a kernel must not read is made to be noticed. Every byte of a cache that no
valid index names is poison: slots nobody selected (slot 0 among them), the last page's tail, pages without an
owner, the pad bytes of scales and the gaps between blocks. Indices past topk_length and between the rows of
`indices` name poisoned slots, or nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .generators import SHARP_FACTOR, Case, as_framework, sharp_rows

INT_MIN = -(2**31)
INT_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class RowFormat:
    """Places of the fields of a token, in bytes.

    A block holds `row_bytes` per token, token after token, then `tail_bytes` per token likewise. Rows hold
    `values` e4m3 (none in a bf16 cache) and `rope` bf16. Scales, one per `tile` values, are in the row
    ("v32": float32) or in the tail ("model1": e8m0, and a pad byte).
    """

    d_qk: int
    row_bytes: int
    tail_bytes: int
    values: int
    rope: int
    rope_offset: int
    scales: int
    tile: int

    @property
    def token_bytes(self) -> int:
        """Bytes per token altogether; the last dimension of a cache of bytes."""
        return self.row_bytes + self.tail_bytes


_FORMATS = {
    ("v32", 576): RowFormat(576, 656, 0, 512, 64, 528, 4, 128),
    ("model1", 512): RowFormat(512, 576, 8, 448, 64, 448, 7, 64),
    ("bf16", 576): RowFormat(576, 1152, 0, 0, 576, 0, 0, 0),
    ("bf16", 512): RowFormat(512, 1024, 0, 0, 512, 0, 0, 0),
}


def row_format(layout: str, d_qk: int) -> RowFormat:
    """The format of a layout; a layout of FP8 has one d_qk only."""
    return _FORMATS[layout, d_qk]


@dataclass(frozen=True, slots=True)
class SparseCase(Case):
    """One sparse decoding problem.

    Attributes:
        b, s_q, h_q: the shape, as in `flash_mla_with_kvcache`.
        s_k: tokens per request, of which its query tokens select `topk`.
        topk: columns of `indices`. Those that s_k does not suffice for are -1.
        page_block_size: tokens per page, any number.
        layout: "v32" (656 bytes a token), "model1" (584) or "bf16".
        d_qk: of a bf16 cache, 576 or 512. None: as the layout has it.
        lengths: topk_length of each request; or "random", from 0 to topk, both included; or None.
        extra_s_k, extra_topk, extra_page_block_size, extra_lengths: the same of an extra cache, which there
            is when extra_topk is positive.
        sink: attn_sink is given: random, with +inf, -inf and large values among the heads.
        invalid: share of the indices that are negative or past the cache.
        duplicates: share of the indices that repeat another one of their row.
        empty_rows: share of the query tokens without any valid index.
        sharp: every second query row is scaled up so that its softmax has few large entries.
        shared: all requests select from the same s_k tokens, as the query tokens of a prefill call do.
        power_of_two_scales: round the scales of "v32" up to powers of two, so that bf16 holds every value.
        poison: "nan", "inf" or "none" (zeros): what bytes hold that no valid index names.
        poison_slot_0: no request owns block 0.
        block_gap: unused space after each block: that many tokens; with "model1" one pads the block to a
            multiple of 576 bytes, and each further one adds 576.
        index_gap: unused columns between consecutive rows of `indices`.
        seed: of everything random.
    """

    b: int
    s_q: int = 1
    h_q: int = 128
    s_k: int = 512
    topk: int = 64
    page_block_size: int = 64
    layout: str = "v32"
    d_qk: int | None = None
    lengths: tuple[int, ...] | str | None = None
    extra_s_k: int = 512
    extra_topk: int = 0
    extra_page_block_size: int = 64
    extra_lengths: tuple[int, ...] | str | None = None
    sink: bool = False
    invalid: float = 0.1
    duplicates: float = 0.05
    empty_rows: float = 0.0
    sharp: bool = False
    shared: bool = False
    power_of_two_scales: bool = False
    poison: str = "nan"
    poison_slot_0: bool = True
    block_gap: int = 0
    index_gap: int = 0
    seed: int = 0

    @property
    def width(self) -> int:
        """d_qk, as given or as the layout has it."""
        return self.d_qk or (512 if self.layout == "model1" else 576)

    @property
    def format(self) -> RowFormat:
        """Places of the fields of a token."""
        return row_format(self.layout, self.width)


@dataclass(slots=True)
class SparseInputs:
    """Arrays of one framework for one case, ready to be passed on; None for what the case does not have."""

    case: SparseCase
    q: Any
    k_cache: Any
    indices: Any
    topk_length: Any = None
    extra_k_cache: Any = None
    extra_indices: Any = None
    extra_topk_length: Any = None
    attn_sink: Any = None

    def keywords(self) -> dict[str, Any]:
        """The keyword arguments of `flash_mla_with_kvcache` besides the positional ones and the plan."""
        return {
            "is_fp8_kvcache": self.case.layout != "bf16",
            "indices": self.indices,
            "attn_sink": self.attn_sink,
            "extra_k_cache": self.extra_k_cache,
            "extra_indices_in_kvcache": self.extra_indices,
            "topk_length": self.topk_length,
            "extra_topk_length": self.extra_topk_length,
        }


@dataclass(frozen=True, slots=True)
class _Selection:
    """What a batch selects from one cache: built on the host, the same for every framework."""

    num_blocks: int
    indices: NDArray[np.int32]  # [b, s_q, topk + gap]
    live: NDArray[np.int64]  # slots that a valid index names
    lengths: NDArray[np.int32] | None


def make_sparse_inputs(case: SparseCase, framework: str = "torch", device: Any = "cuda") -> SparseInputs:
    """Inputs for `case` in the arrays of `framework`: "torch" (built on `device`) or "numpy".

    q is normal, clamped to [-1, 1], in bfloat16; keys are normal with deviation 0.1, quantised as an engine
    does it. One seed gives one set of values per device; indices are the same for all.
    """
    device = device if framework == "torch" else "cpu"
    build = _Builder(case, device)
    draw = np.random.default_rng([case.seed, 2])
    main = _select(case, draw, case.s_k, case.topk, case.page_block_size, case.lengths)
    extra = None
    if case.extra_topk:
        sizes = case.extra_s_k, case.extra_topk, case.extra_page_block_size
        extra = _select(case, draw, *sizes, case.extra_lengths)
    found = {
        "q": build.queries(),
        "k_cache": build.cache(main.num_blocks, case.page_block_size, main.live),
        "indices": build.place(main.indices)[..., : case.topk],
        "topk_length": build.place(main.lengths),
    }
    if extra is not None:
        found["extra_k_cache"] = build.cache(extra.num_blocks, case.extra_page_block_size, extra.live)
        found["extra_indices"] = build.place(extra.indices)[..., : case.extra_topk]
        found["extra_topk_length"] = build.place(extra.lengths)
    if case.sink:
        found["attn_sink"] = build.place(_sinks(case.h_q, draw))
    return SparseInputs(case, **{name: as_framework(x, framework) for name, x in found.items()})


def block_fields(k_cache: Any, form: RowFormat) -> tuple[Any, Any]:
    """The bytes of a cache's rows `[num_blocks, page_block_size, row_bytes]` and, where the format has them,
    of its tails `[num_blocks, page_block_size, tail_bytes]`, as views (torch, NumPy).
    """
    num_blocks, page = k_cache.shape[:2]
    blocks = _strided(k_cache, (num_blocks, page * form.token_bytes))
    rows = blocks[:, : page * form.row_bytes]
    tails = blocks[:, page * form.row_bytes :]
    return (
        _strided(rows, (num_blocks, page, form.row_bytes)),
        _strided(tails, (num_blocks, page, form.tail_bytes)) if form.tail_bytes else None,
    )


def _strided(array: Any, shape: tuple[int, ...]) -> Any:
    """Bytes that are contiguous within a block, from an array's first byte on, in another shape."""
    inner = [1]
    for extent in reversed(shape[2:]):
        inner.insert(0, inner[0] * extent)
    if isinstance(array, np.ndarray):
        return np.lib.stride_tricks.as_strided(array, shape, (array.strides[0], *inner))
    return array.as_strided(shape, (array.stride(0), *inner), array.storage_offset())


# ---- which slots


def _select(
    case: SparseCase,
    draw: np.random.Generator,
    s_k: int,
    topk: int,
    page: int,
    lengths: tuple[int, ...] | str | None,
) -> _Selection:
    """Choose pages and indices, with everything invalid and garbage that the case wants."""
    rows = (case.b, case.s_q)
    owners = 1 if case.shared else case.b
    pages = -(-s_k // page)
    num_blocks = owners * pages + 2 + owners * pages // 16
    order = draw.permutation(np.arange(1, num_blocks))[: owners * pages]
    if not case.poison_slot_0:
        order[order.argmin()] = 0
    table = order.reshape(owners, pages)

    token = draw.permuted(
        np.broadcast_to(np.arange(max(s_k, topk), dtype=np.int32), (*rows, max(s_k, topk))), axis=-1
    )[..., :topk]
    owner = np.arange(case.b)[:, None, None] % owners
    slot = table[owner, np.minimum(token, s_k - 1) // page] * page + token % page
    slot = np.where(token < s_k, slot, -1)
    repeated = draw.random(slot.shape) < case.duplicates
    slot = np.where(repeated, np.roll(slot, 1, axis=-1), slot)
    nowhere = draw.random(slot.shape) < case.invalid
    slot = np.where(nowhere, draw.choice(_nowhere(num_blocks * page), slot.shape), slot)
    empty = draw.random((*rows, 1)) < case.empty_rows
    slot = np.where(empty, draw.choice(_nowhere(num_blocks * page), slot.shape), slot)

    counts = _lengths(case, draw, topk, lengths)
    counted = np.ones(slot.shape, dtype=bool)
    if counts is not None:
        counted = np.broadcast_to(np.arange(topk) < counts[:, None, None], slot.shape)
    named = np.zeros(num_blocks * page, dtype=bool)
    named[slot[counted & (slot >= 0) & (slot < len(named))]] = True
    dead = np.flatnonzero(~named)
    garbage = np.concatenate([_nowhere(len(named)), draw.choice(dead, 18)])  # mostly slots of the cache
    indices = draw.choice(garbage, (*rows, topk + case.index_gap)).astype(np.int32)
    indices[..., :topk] = np.where(counted, slot, indices[..., :topk])
    return _Selection(num_blocks, indices, np.flatnonzero(named), counts)


def _nowhere(slots: int) -> NDArray[np.int64]:
    """Indices that name no slot of a cache."""
    return np.array([-1, -1, -123456, INT_MIN, slots, INT_MAX])


def _lengths(
    case: SparseCase, draw: np.random.Generator, topk: int, lengths: tuple[int, ...] | str | None
) -> NDArray[np.int32] | None:
    if lengths is None:
        return None
    if isinstance(lengths, str):
        counts = draw.integers(0, topk, case.b, endpoint=True, dtype=np.int32)
        counts[draw.permutation(case.b)[:3]] = (0, topk, 1)[: min(case.b, 3)]
        return counts
    return np.array(lengths, dtype=np.int32)


def _sinks(h_q: int, draw: np.random.Generator) -> NDArray[np.float32]:
    """Sinks near the usual log-sum-exp, every eighth head one of the extremes."""
    sink = draw.normal(4.0, 2.0, h_q)
    extremes = np.array([-np.inf, np.inf, 0.0, 30.0, -30.0])
    sink[1::8] = np.resize(extremes, len(sink[1::8]))
    return sink.astype(np.float32)


# ---- what is in them


LIVE_AT_A_TIME = 1 << 18
"""Tokens that are quantised at a time, which bounds the memory that this takes."""


def make_cache(case: SparseCase, num_blocks: int, page_block_size: int, device: Any) -> Any:
    """A cache without poison, all of whose slots are tokens: torch, for benchmarks."""
    return _Builder(case, device).cache(num_blocks, page_block_size, np.arange(num_blocks * page_block_size))


class _Builder:
    """Builds the arrays of a case with torch on a device."""

    def __init__(self, case: SparseCase, device: Any) -> None:
        import torch

        self.case, self.device, self.torch = case, device, torch
        self._draw = torch.Generator(device=device).manual_seed(case.seed)

    def place(self, array: NDArray[Any] | None) -> Any:
        """An array of the host on the device; None stays None."""
        return None if array is None else self.torch.from_numpy(array).to(self.device)

    def _normal(self, shape: tuple[int, ...], deviation: float) -> Any:
        return self.torch.empty(shape, device=self.device).normal_(0.0, deviation, generator=self._draw)

    def _bytes(self, values: Any, dtype: Any) -> Any:
        """float32 rounded to a dtype, as the bytes of its last dimension."""
        return values.contiguous().to(dtype).view(self.torch.uint8)

    def queries(self) -> Any:
        case = self.case
        q = self._normal((case.b, case.s_q, case.h_q, case.width), 1.0).clamp_(-1.0, 1.0)
        if case.sharp:
            q = self.torch.where(sharp_rows(case, self.device), q * SHARP_FACTOR, q)
        return q.bfloat16()

    def cache(self, num_blocks: int, page: int, slots: NDArray[np.int64]) -> Any:
        """A cache of poison, but for the given slots."""
        case, torch = self.case, self.torch
        form = case.format
        storage = self.place(_poison_pattern(case, page, block_stride(case, page))).repeat(num_blocks, 1)
        k_cache = _strided(storage, (num_blocks, page, 1, form.token_bytes))
        rows, tails = block_fields(k_cache, form)
        for start in range(0, len(slots), LIVE_AT_A_TIME):
            live = slots[start : start + LIVE_AT_A_TIME]
            at = self.place(live // page), self.place(live % page)
            tokens, scales = self._quantise(self._normal((len(live), form.d_qk), 0.1))
            rows[at] = tokens
            if tails is not None:
                tails[..., : form.scales][at] = scales
        return k_cache.view(torch.bfloat16) if case.layout == "bf16" else k_cache

    def _quantise(self, tokens: Any) -> tuple[Any, Any]:
        """Rows `[n, row_bytes]` and, of "model1", scales `[n, 7]` of float32 tokens `[n, d_qk]`."""
        form, torch = self.case.format, self.torch
        rows = torch.empty(len(tokens), form.row_bytes, dtype=torch.uint8, device=self.device)
        rows[:, form.rope_offset :][:, : 2 * form.rope] = self._bytes(
            tokens[:, form.values :], torch.bfloat16
        )
        if not form.values:
            return rows, None
        tiles = tokens[:, : form.values].unflatten(-1, (form.scales, form.tile))
        scale = tiles.abs().amax(-1) / 448.0
        exponents = None
        if self.case.layout == "model1" or self.case.power_of_two_scales:
            exponents = torch.frexp(scale).exponent  # scales are no powers of two, which would be doubled
            scale = torch.ldexp(torch.ones_like(scale), exponents)
            exponents = (exponents + 127).to(torch.uint8)
        values = (tiles / scale[..., None]).flatten(-2)
        rows[:, : form.values] = self._bytes(values, torch.float8_e4m3fn)
        if self.case.layout == "v32":
            rows[:, form.values : form.rope_offset] = self._bytes(scale, torch.float32)
        return rows, exponents


def block_stride(case: SparseCase, page: int) -> int:
    """Bytes from one block to the next."""
    form = case.format
    if case.layout == "model1" and case.block_gap:
        return (-(-page * form.token_bytes // 576) + case.block_gap - 1) * 576
    return (page + case.block_gap) * form.token_bytes


def _poison_pattern(case: SparseCase, page: int, stride: int) -> NDArray[np.uint8]:
    """One block of poison: NaN in every field (both NaN codes of e4m3), or the nearest to infinity."""
    form = case.format
    nan = case.poison == "nan"
    pattern = np.full(stride, {"nan": 0xFF, "inf": 0x7E, "none": 0}[case.poison], dtype=np.uint8)
    if case.poison == "none":
        return pattern
    row = np.zeros(form.row_bytes, dtype=np.uint8)
    row[: form.values : 2], row[1 : form.values : 2] = (0x7F, 0xFF) if nan else (0x7E, 0xFE)
    rope = row[form.rope_offset :][: 2 * form.rope]
    rope[...] = np.frombuffer(bytes.fromhex("c07f c0ff" if nan else "807f 80ff") * (form.rope // 2), np.uint8)
    if case.layout == "v32":
        scales = np.full(form.scales, np.nan if nan else np.inf, dtype=np.float32)
        row[form.values : form.rope_offset] = scales.view(np.uint8)
    pattern[: page * form.row_bytes] = np.tile(row, page)
    if form.tail_bytes:
        # e8m0 has no infinity; 448 times its largest value overflows in every type that a kernel could use.
        pattern[page * form.row_bytes : page * form.token_bytes] = 0xFF if nan else 0xFE
    return pattern
